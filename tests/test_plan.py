"""Plans of runs: formulas against the model that they describe, and the command."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from lex_pretrain.config import Config
from lex_pretrain.config_io import load_config
from lex_pretrain.errors import RequestError
from lex_pretrain.model import attend, positions
from lex_pretrain.model.activations import activation_bytes
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.parameters import count_hidden_matrices, count_parameters, parameter_tensors
from lex_pretrain.model_config import ModelSection
from lex_pretrain.train import loss
from lex_pretrain.train.loss import NextTokenLoss, hidden_matrices, parameter_groups
from lex_pretrain.train.plan import PlacementPlan, Plan, make_plan
from tests.conftest import Program
from tests.test_config import CONFIGS, RUNS


def make_config(
    model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, zero: dict[str, Any] | None = None
) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": "out"},
            "data": {"path": "nowhere"},
            "model": {
                **{"num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 32, "vocab_size": 256},
                **(model or {}),
            },
            "train": {"num_steps": 1000, "global_batch_size": 8, **(train or {})},
            "zero": zero or {"stage": 1},
        }
    )


@settings(deadline=None, max_examples=60)
@given(
    values=st.fixed_dictionaries(
        {
            "position": st.sampled_from(["xpos", "rope", "alibi", "sinusoidal", "learned", "none"]),
            "num_layers": st.integers(1, 3),
            "hidden_size": st.sampled_from([24, 48]),
            "num_heads": st.sampled_from([4, 6]),
            "num_key_value_heads": st.sampled_from([None, 1, 2]),
            "feed_forward_size": st.sampled_from([None, 40]),
            "sequence_length": st.sampled_from([8, 9]),
            "vocab_size": st.sampled_from([1, 128, 129]),
            "norm": st.sampled_from(["layernorm", "rmsnorm"]),
            "activation": st.sampled_from(["gelu", "relu", "swiglu"]),
            "sub_layer_norm": st.booleans(),
            "bias": st.booleans(),
            "tie_embeddings": st.booleans(),
        }
    )
)
def test_parameters_by_formula_are_those_of_the_decoder(values: dict[str, Any]) -> None:
    """Every shape as often as the decoder has it, and the same numbers with and without weight decay."""
    config = ModelSection.model_validate(values)
    with torch.device("meta"):
        decoder = Decoder(config)
    expected = sorted(tuple(parameter.shape) for parameter in decoder.parameters())
    tensors = parameter_tensors(config)
    assert sorted(shape for tensor in tensors for shape in [tensor.shape] * tensor.num_tensors) == expected
    assert count_parameters(config) == sum(parameter.numel() for parameter in decoder.parameters())
    assert count_hidden_matrices(config) == sum(parameter.numel() for parameter in hidden_matrices(decoder))
    decayed = sum(tensor.num_elements * tensor.num_tensors for tensor in tensors if tensor.decays)
    group: list[torch.nn.Parameter] = parameter_groups(decoder, 0.1)[0]["params"]  # type: ignore[assignment]
    assert decayed == sum(parameter.numel() for parameter in group)


def gpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **rest: object,
) -> torch.Tensor:
    """The operators that PyTorch takes on a GPU; on the meta device they have shapes and no kernels."""
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, is_causal)[0]  # type: ignore[no-any-return]
    bias = attn_mask if attn_mask.is_floating_point() else torch.empty_like(attn_mask, dtype=q.dtype)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias.expand(len(q), q.shape[1], -1, -1), True)[0]  # type: ignore[no-any-return]


def saved_bytes(config: Config, num_sequences: int, device: str, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that a forward pass keeps for the backward pass, parameters aside."""
    with torch.device(device):
        decoder = Decoder(config.model, config.train.activation_checkpointing, initialize_weights=False)
    module = NextTokenLoss(decoder, separate_documents_at=0 if config.train.separate_documents else None).to(dtype)
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    # Storages are held, so that no address is given out twice.
    storages = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    tokens = torch.ones(num_sequences, config.model.sequence_length, dtype=torch.long, device=device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        module(tokens, tokens)
    return sum(storage.nbytes() for address, storage in storages.items() if address not in parameters)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"model": {"position": "none", "activation": "relu"}},
    {"model": {"position": "learned", "sub_layer_norm": True}},
    {"model": {"position": "rope", "activation": "swiglu", "num_key_value_heads": 2, "bias": False}},
    {"model": {"vocab_size": 200, "num_layers": 3}},
    {"train": {"separate_documents": True}},
    {"train": {"activation_checkpointing": 2}, "model": {"num_layers": 5}},
]


@pytest.mark.parametrize("sections", VARIANTS, ids=str)
def test_activations_by_formula_are_those_that_a_cpu_keeps(sections: dict[str, Any]) -> None:
    """Within 0.2 %: the formula leaves out what does not grow with the width."""
    config = make_config(sections.get("model"), {**sections.get("train", {}), "precision": "fp32"})
    found = saved_bytes(config, 3, "cpu", torch.float32)
    assert activation_bytes(config, 3).saved == pytest.approx(found, rel=2e-3)


@pytest.mark.parametrize("sections", [*VARIANTS, {"model": {"position": "alibi"}}], ids=str)
def test_activations_by_formula_are_those_of_gpu_operators(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, whose attention a CPU does in float32, on the meta device with the operators of a GPU."""

    class Functional:
        scaled_dot_product_attention = staticmethod(gpu_attention)
        pad = staticmethod(F.pad)

    monkeypatch.setattr(attend, "F", Functional)
    config = make_config(sections.get("model"), sections.get("train"))
    found = saved_bytes(config, 3, "meta", torch.bfloat16)
    assert activation_bytes(config, 3).saved == pytest.approx(found, rel=2e-3)


def test_keys_and_values_of_alibi_are_kept_by_every_run_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With shorter runs, 256 tokens are taken in four, as 4,096 are; on CUDA no run needs a mask."""
    from lex_pretrain.model import activations

    monkeypatch.setattr(activations, "_ALIBI_RUN_TOKENS", 64)
    monkeypatch.setattr(positions.AlibiPositions, "_SPAN_TOKENS", 64)
    monkeypatch.setattr(attend.CausalAttend, "_needs_mask", lambda *arguments: False)
    monkeypatch.setattr(attend, "causal_lower_right", lambda *arguments: None)
    functional = {"scaled_dot_product_attention": staticmethod(gpu_attention), "pad": staticmethod(F.pad)}
    monkeypatch.setattr(attend, "F", type("Functional", (), functional))
    config = make_config({"position": "alibi", "sequence_length": 256})
    found = saved_bytes(config, 3, "meta", torch.bfloat16)
    assert activation_bytes(config, 3).saved == pytest.approx(found, rel=2e-3)


PEAKS: list[dict[str, Any]] = [
    {"model": {"vocab_size": 4096}},
    {"model": {}},
    {"model": {"activation": "swiglu"}},
    {"model": {"vocab_size": 4000}, "train": {"activation_checkpointing": 1}},
    {"model": {"num_layers": 6}, "train": {"activation_checkpointing": 1}},
    {"model": {"num_layers": 6}, "train": {"activation_checkpointing": 2}},
    {"model": {"num_layers": 5}, "train": {"activation_checkpointing": 2}},
]


@pytest.mark.parametrize("sections", PEAKS, ids=str)
def test_the_peak_is_that_of_a_real_pass_forward_and_backward(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 %, against the tensors that live at a time, parameters and their gradients aside."""
    # The loss's blocks are of a fixed size, which a small model would notice.
    monkeypatch.setattr(loss, "_BLOCK_ELEMENTS", 8192)
    model = {"hidden_size": 128, "sequence_length": 128, **sections["model"]}
    config = make_config(model, {**sections.get("train", {}), "precision": "fp32"})
    module = NextTokenLoss(Decoder(config.model, config.train.activation_checkpointing))
    tokens = torch.ones(4, 128, dtype=torch.long)
    module(tokens, tokens).backward()
    tracker = MemTracker()
    tracker.track_external(module, *[parameter.grad for parameter in module.parameters()])
    with tracker:
        module(tokens, tokens).backward()
    states = 2 * 4 * count_parameters(config.model)
    found = max(tracker.get_tracker_snapshot("peak")[torch.device("cpu")].values()) - states
    assert activation_bytes(config, 4).peak == pytest.approx(found, rel=0.05)


def fitting_batch(config: Config, world_size: int) -> Config:
    """The config with at least one micro batch for each process."""
    least = world_size * (config.train.micro_batch_size or 1)
    total = max(config.train.global_batch_size, least)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": total})})


@pytest.mark.parametrize("world_size", [1, 8, 64, 4096])
@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_every_shipped_run_is_planned_at_every_size(file: Path, world_size: int) -> None:
    config = load_config(file, ["model.vocab_size=32000"])
    if config.train.global_batch_size % (world_size * (config.train.micro_batch_size or 1)):
        with pytest.raises(RequestError, match=r"train\.(global|micro)_batch_size"):
            make_plan(config, world_size, 0.4, 989, 80)
        config = fitting_batch(config, world_size)
    started = time.perf_counter()
    plan = make_plan(config, world_size, 0.4, 989, 80)
    assert time.perf_counter() - started < 0.5
    assert plan.micro_batch_size * plan.num_micro_steps * world_size == config.train.global_batch_size
    by_name = {row.name: row for row in plan.placements}
    assert sum(row.is_configured for row in plan.placements) == 1
    weights = [by_name[stage].weights_bytes for stage in ("1", "2", "3")]
    assert weights[0] == weights[1] >= weights[2]
    for row in plan.placements:
        parts = row.weights_bytes + row.gradients_bytes + row.optimizer_bytes
        assert row.peak_bytes >= parts + row.buffers_bytes + plan.activation_bytes
        assert (row.sent_bytes_per_step > 0) == (world_size > 1)
        assert (row.host_bytes > 0) == (row.offload_optimizer or row.offload_parameters)
    # The ZeRO paper's 16 bytes a parameter and the 2 or 4 more of float32 sums, when nothing is partitioned.
    if world_size == 1:
        held = by_name["1"].weights_bytes + by_name["1"].gradients_bytes + by_name["1"].optimizer_bytes
        assert held == pytest.approx(20 * plan.num_parameters, rel=1e-6)


def test_the_shipped_sizes_are_what_their_names_say() -> None:
    for name, expected in (("lex-350m", 0.335e9), ("lex-1b3", 1.27e9), ("lex-7b", 6.74e9), ("lex-70b", 69e9)):
        config = load_config(CONFIGS / "runs" / f"{name}.yaml", ["model.vocab_size=32000"])
        assert count_parameters(config.model) == pytest.approx(expected, rel=0.02)


def test_partitions_shrink_with_processes_and_nothing_else_does() -> None:
    config = load_config(CONFIGS / "runs" / "lex-70b.yaml")
    few, many = (make_plan(config, world_size, 0.4, 989, None) for world_size in (8, 64))
    for before, after in zip(few.placements, many.placements, strict=True):
        assert after.optimizer_bytes == pytest.approx(before.optimizer_bytes / 8, rel=1e-6)
        shrinks = before.zero_stage == 3 and not before.offload_parameters
        assert after.weights_bytes / before.weights_bytes == pytest.approx(1 / 8 if shrinks else 1, rel=0.02)
        shrinks = before.zero_stage >= 2 and before.gradients_bytes > 0
        ratio = after.gradients_bytes / max(1, before.gradients_bytes)
        assert ratio == pytest.approx((1 / 8 if shrinks else 1) if before.gradients_bytes else 0, rel=0.02)
    assert many.days == pytest.approx(few.days / 8)


def test_raw_deepspeed_settings_count() -> None:
    run = CONFIGS / "runs" / "lex-7b.yaml"
    raw = "deepspeed.zero_optimization"

    def configured(*overrides: str) -> PlacementPlan:
        plan = make_plan(load_config(run, overrides), 8, 0.4, 989, None)
        return next(row for row in plan.placements if row.is_configured)

    plain, offloaded = configured(), configured("zero.offload_parameters=true")
    assert offloaded.name == "3 offload parameters"
    assert offloaded.weights_bytes < plain.weights_bytes
    assert offloaded.host_bytes == pytest.approx(plain.weights_bytes, rel=0.001)
    small = configured(f"{raw}.reduce_bucket_size=1000", f"{raw}.stage3_max_live_parameters=5000")
    assert small.buffers_bytes == 2 * (1000 + 5000)
    narrow = configured("deepspeed.communication_data_type=bf16")
    assert narrow.sent_bytes_per_step < plain.sent_bytes_per_step
    bf16_sums = configured("deepspeed.data_types.grad_accum_dtype=bf16")
    assert bf16_sums.gradients_bytes == plain.gradients_bytes // 2
    muon = make_plan(load_config(run, ["optimizer.name=muon", "zero.stage=1"]), 8, 0.4, 989, None)
    (only,) = muon.placements
    # Muon has 4 bytes less for each parameter in the layers' matrices.
    hidden = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert configured("zero.stage=1").optimizer_bytes - only.optimizer_bytes == 4 * hidden // 8
    with pytest.raises(RequestError, match=r"deepspeed\.communication_data_type int8 is unknown"):
        configured("deepspeed.communication_data_type=int8")


def run_plan(program: Program, *arguments: str | Path) -> Plan:
    done = program("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return Plan.model_validate(json.loads(done.stdout))


def test_the_command_names_the_cheapest_placement_that_fits(program: Program) -> None:
    run = CONFIGS / "runs" / "lex-7b.yaml"
    plan = run_plan(program, "--config", run, "--world-size", "64", "--gpu-memory", "40")
    fitting = [row.name for row in plan.placements if row.fits]
    assert fitting == ["2", "3", "2 offload", "3 offload", "3 offload all"]
    assert plan.cheapest_that_fits is not None
    # With so many micro batches stage 2 sends its float32 gradients more often than stage 3 gathers its bf16 weights.
    assert plan.placements[plan.cheapest_that_fits].name == "3"
    none = run_plan(program, "--config", run, "--gpu-memory", "4")
    assert none.cheapest_that_fits is None
    table = program("plan", "--config", run, "--world-size", "64", "--gpu-memory", "79", "train.precision=fp32")
    assert table.returncode == 0
    assert table.stdout == ""
    assert "Cheapest that fits" in table.stderr
    assert "0 " in table.stderr


def test_time_is_operations_over_what_the_devices_reach(program: Program) -> None:
    run = CONFIGS / "runs" / "lex-7b.yaml"
    plan = run_plan(program, "--config", run, "--world-size", "8", "--mfu", "0.5", "--peak-tflops", "100")
    assert plan.flops_per_step == pytest.approx(6 * plan.num_parameters * plan.tokens_per_step, rel=0.1)
    assert plan.step_seconds == pytest.approx(plan.flops_per_step / (8 * 50e12))
    assert plan.days == pytest.approx(plan.step_seconds * 250_000 / 86_400)


def test_vocabulary_comes_from_the_config_then_from_the_data(program: Program, dataset: Path) -> None:
    run = CONFIGS / "runs" / "debug-cpu.yaml"
    missing = program("plan", "--config", run, "data.path=nowhere")
    assert missing.returncode == 2
    assert "model.vocab_size is null" in missing.stderr
    assert "nowhere is not a prepared dataset" in missing.stderr
    from_data = run_plan(program, "--config", run, f"data.path={dataset}")
    from_config = run_plan(program, "--config", run, "data.path=nowhere", "model.vocab_size=320")
    assert from_data == from_config


def test_planning_imports_neither_torch_nor_deepspeed() -> None:
    script = (
        "import sys; from lex_pretrain.cli import app; "
        f"app(['plan', '--config', {str(CONFIGS / 'runs' / 'lex-70b.yaml')!r}, '--json'], standalone_mode=False); "
        "assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_messages_take_the_time_of_the_slowest_link_and_leave_an_efficiency(program: Program) -> None:
    """What a host sends does not depend on its links; one host sends nothing; twice the network, half the time."""
    run = ("--config", CONFIGS / "runs" / "lex-70b.yaml", "--gpu-memory", "80", "--world-size")
    alone = run_plan(program, *run, "8")
    assert {row.network_bytes_per_step for row in alone.placements} == {0}
    many, faster = (run_plan(program, *run, "64", "--network", rate) for rate in ("800", "1600"))
    for slow, fast in zip(many.placements, faster.placements, strict=True):
        assert slow.network_bytes_per_step == fast.network_bytes_per_step > 0
        assert slow.communication_seconds == pytest.approx(2 * fast.communication_seconds, rel=0.05)
        waiting = many.step_seconds / (many.step_seconds + slow.communication_seconds)
        assert slow.worst_efficiency == pytest.approx(waiting)
        assert slow.worst_efficiency < slow.best_efficiency <= 1


def test_a_second_copy_within_hosts_costs_memory_and_spares_the_network(program: Program) -> None:
    """hpZ of ZeRO++ keeps 1 / 8 of the weights more, and gathers from all hosts once a step, not twice a
    micro batch."""
    run = ("--config", CONFIGS / "runs" / "lex-70b.yaml", "--world-size", "512", "--gpu-memory", "80", "zero.stage=3")
    plain = run_plan(program, *run)
    copied = run_plan(program, *run, "deepspeed.zero_optimization.zero_hpz_partition_size=8")
    before, after = (next(row for row in plan.placements if row.name == "3") for plan in (plain, copied))
    assert after.peak_bytes - before.peak_bytes == pytest.approx(2 * plain.num_parameters / 8, rel=0.01)
    assert after.network_bytes_per_step < 0.6 * before.network_bytes_per_step
    gradients = 4 * plain.num_parameters * plain.num_micro_steps
    assert after.network_bytes_per_step > gradients * 511 / 512
