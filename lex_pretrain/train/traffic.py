"""What the processes of a job send each other in an optimizer step, and how long that takes.

Bytes are those of ring algorithms: an all-gather or a reduce-scatter of S bytes sends S (N - 1) / N from each of N
processes, an all-reduce twice that. A ring goes through all processes of a host before it leaves it, so the network
cards of a host carry together what one process sends. The other algorithms of NCCL (trees, switches that sum) send as
much or less. gloo differs in one thing: its reduce-scatter is an all-reduce, and sends twice as much.

Checked against the calls of real engines in `tests/test_plan_engine.py`, and against what network cards count in
`tests/multinode/test_traffic.py`. Quantized messages need GPUs, and follow DeepSpeed's code alone.
"""

from dataclasses import dataclass

from lex_pretrain.train.memory import Settings

# What one hop of a ring takes, in seconds, inside a host (NVLink) and between two: NCCL's own model of its "simple"
# protocol, the one for large messages (github.com/NVIDIA/nccl, src/graph/tuning.cc at 01afd20, hwLat).
_DEVICE_HOP_SECONDS = 3.4e-6
_NETWORK_HOP_SECONDS = 9.6e-6
_INT4_BYTES = 0.5


@dataclass(frozen=True)
class Links:
    """Hosts of so many devices each; bytes a second, in one direction, of a device and of all cards of a host."""

    devices_per_host: int
    device_bytes_per_second: float
    network_bytes_per_second: float


@dataclass(frozen=True)
class Traffic:
    """What one process sends in an optimizer step, in bytes, and how many rings through all processes that takes.

    `ring_bytes` go round through all processes, `host_bytes` stay between the devices of a host, and `direct_bytes`
    go straight to processes of other hosts.
    """

    ring_bytes: int
    num_rings: int
    host_bytes: int = 0
    direct_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        return self.ring_bytes + self.host_bytes + self.direct_bytes

    def network_bytes(self, world_size: int, links: Links) -> int:
        """What a host sends to other hosts."""
        if world_size <= links.devices_per_host:
            return 0
        return self.ring_bytes + links.devices_per_host * self.direct_bytes

    def seconds(self, world_size: int, links: Links) -> float:
        """Time of all of it, one after the other: bytes over the slowest link on their way, and a delay a hop."""
        num_hosts = -(-world_size // links.devices_per_host)
        on_devices = (self.ring_bytes + self.host_bytes) / links.device_bytes_per_second
        on_network = self.network_bytes(world_size, links) / links.network_bytes_per_second
        hops = (world_size - num_hosts) * _DEVICE_HOP_SECONDS + (num_hosts - 1) * _NETWORK_HOP_SECONDS
        return max(on_devices, on_network) + self.num_rings * hops


def step_traffic(settings: Settings, stage: int, devices_per_host: int) -> Traffic:
    """The traffic of a ZeRO stage, and of ZeRO++ where the settings ask for it at stage 3.

    The ZeRO paper (arXiv 1910.02054, section 7) needs 2 messages of all parameters at stages 1 and 2, and 3 at stage
    3, for one pass. DeepSpeed 0.19 sends more: at stages 1 and 2 gradients are all-reduced (2) before the updated
    weights are gathered (1), and stages 2 and 3 repeat all but the latter for every micro batch.
    """
    if stage == 3:
        return _partitioned_parameters(settings, devices_per_host)
    number, world_size = settings.num_parameters, settings.world_size
    gradients, weights = settings.message_bytes * number, settings.weight_bytes * number
    num_reductions = settings.num_micro_steps if stage == 2 else 1
    num_buckets = -(-number // settings.reduce_bucket)
    # An all-reduce goes round twice.
    num_rings = 2 * num_buckets * num_reductions
    sent = 2 * gradients * num_reductions
    if stage > 0:
        sent, num_rings = sent + weights, num_rings + -(-number // settings.gather_bucket)
    return Traffic(_around(sent, world_size), num_rings if world_size > 1 else 0)


def _partitioned_parameters(settings: Settings, devices_per_host: int) -> Traffic:
    """Stage 3. "ZeRO++" (arXiv 2306.10209): hpZ gathers from a second copy of the weights within a group, once the
    first forward pass has gathered them from all; qwZ gathers int8; qgZ sends int4 gradients to the process of the
    same host, then to that of other hosts, that sums them."""
    world_size, micro_steps = settings.world_size, settings.num_micro_steps
    if world_size == 1:
        return Traffic(0, 0)
    partitioned = settings.num_parameters - settings.persistent
    element = 1 if settings.quantizes_weights else settings.weight_bytes
    # Each pass gathers the weights forward and backward, but for the last layers, which are still there.
    kept = min(settings.most_live, settings.max_reuse_distance // 2)
    num_passes = micro_steps * (2 - kept / max(1, partitioned))
    group = settings.secondary_group
    from_all = min(1.0, num_passes) if group > 1 else num_passes
    gathered = element * partitioned
    within = _around(round(gathered * (num_passes - from_all)), group)
    # Small tensors are gathered after the optimizer's step, one by one, and there is at least one matrix a gather.
    ring = _around(round(gathered * from_all) + settings.weight_bytes * settings.persistent, world_size)
    num_persistent = sum(tensor.num_tensors for tensor in settings.persistent_tensors)
    num_partitioned = sum(tensor.num_tensors for tensor in settings.tensors) - num_persistent
    num_rings = num_partitioned * from_all + num_persistent
    if group > devices_per_host:
        ring, within = ring + within, 0
    num_hosts = world_size // devices_per_host
    quantized = settings.quantized_gradients if num_hosts > 1 else 0
    reduced = settings.message_bytes * (settings.num_parameters - quantized) * micro_steps
    num_buckets = -(-(settings.num_parameters - quantized) // settings.reduce_bucket)
    exchanged = round(_INT4_BYTES * quantized) * micro_steps
    return Traffic(
        ring_bytes=ring + _around(reduced, world_size),
        num_rings=round(num_rings + num_buckets * micro_steps),
        host_bytes=within + _around(exchanged, devices_per_host),
        direct_bytes=_around(exchanged // devices_per_host, num_hosts),
    )


def _around(num_bytes: int, world_size: int) -> int:
    """What each of `world_size` processes sends of bytes that all of them are to have, or to sum."""
    return num_bytes * (world_size - 1) // max(1, world_size)
