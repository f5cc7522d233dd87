"""A plan as people read it on a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from lex_pretrain.train.plan import Plan


def plan_table(plan: Plan) -> RenderableType:
    """What holds for every placement, a row for each placement, and how to read both."""
    traffic = [_traffic(plan)] if plan.world_size > 1 else []
    return Group(_facts(plan), _placements(plan), *_notes(plan), *traffic)


def _facts(plan: Plan) -> Table:
    table = Table(box=None, show_header=False)
    configured = next((row for row in plan.placements if row.is_configured), plan.placements[0])
    checkpointing = {0: "kept", 1: "recomputed"}.get(
        plan.activation_checkpointing, f"recomputed in one of {plan.activation_checkpointing} layers"
    )
    rows = {
        "parameters": f"{plan.num_parameters:,}",
        "processes": f"{plan.world_size:,}, one device each, {plan.precision}",
        "step": f"{plan.tokens_per_step:,} tokens: micro batch {plan.micro_batch_size}, "
        f"{plan.num_micro_steps} accumulated; {plan.flops_per_step:.3e} FLOPs",
        "activations": f"{_gib(plan.activation_bytes)} GiB a process, {checkpointing}",
        "time": f"{plan.step_seconds:.3g} s a step, {plan.days:.3g} days for {plan.num_steps:,} steps, "
        f"at {plan.mfu:.0%} of {plan.peak_tflops:g} TFLOP/s",
        "disk": f"{_gib(configured.checkpoint_bytes)} GiB a checkpoint, "
        f"{_gib(configured.checkpoint_bytes * plan.num_checkpoints_kept)} GiB for the "
        f"{plan.num_checkpoints_kept} that exist at most",
        "saving": f"{_gib(configured.copied_bytes)} GiB of host memory a process, "
        f"{_gib(configured.first_copied_bytes)} GiB in the first",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _placements(plan: Plan) -> Table:
    header = ["ZeRO", "weights", "grads", "optim.", "buffers", "peak", "host", "sent"]
    table = Table(
        *header, box=SIMPLE_HEAD, title="GiB a process, and GiB that it sends in a step", padding=(0, 1, 0, 0)
    )
    for column in table.columns[1:]:
        column.justify = "right"
    if plan.gpu_memory_bytes is not None:
        table.add_column("fits")
    for index, row in enumerate(plan.placements):
        sizes = (
            *(row.weights_bytes, row.gradients_bytes, row.optimizer_bytes, row.buffers_bytes),
            *(row.peak_bytes, row.host_bytes, row.sent_bytes_per_step),
        )
        fits = "cheapest" if index == plan.cheapest_that_fits else "yes" if row.fits else "no"
        cells = [row.name + (" *" if row.is_configured else ""), *map(_gib, sizes)]
        table.add_row(*cells, *([] if row.fits is None else [fits]))
    return table


def _traffic(plan: Plan) -> Table:
    header = ["ZeRO", "sent", "by a host", "seconds", "efficiency"]
    table = Table(
        *header,
        box=SIMPLE_HEAD,
        title=f"Messages of a step: GiB, time beside {plan.step_seconds:.3g} s of computing",
        padding=(0, 1, 0, 0),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in plan.placements:
        if not row.offload_optimizer and not row.offload_parameters:
            sizes = _gib(row.sent_bytes_per_step), _gib(row.network_bytes_per_step)
            efficiency = f"{row.worst_efficiency:.0%} to {row.best_efficiency:.0%}"
            name = row.name + (" *" if row.is_configured else "")
            table.add_row(name, *sizes, f"{row.communication_seconds:.3g}", efficiency)
    return table


def _notes(plan: Plan) -> list[str]:
    notes = [
        "* as configured. Offload: optimizer state on the host; offload all: parameters too.",
        "Peak: with buffers and activations, or in the optimizer step, whichever is more.",
    ]
    if len(plan.placements) == 1:
        notes.append("optimizer.name muon needs the placement that is configured.")
    elif plan.precision == "bf16":
        notes.append("Stage 0 is left out: train.precision bf16 needs zero.stage 1 to 3.")
    if plan.gpu_memory_bytes is None:
        return notes
    limit = f"{plan.usable_share:.0%} of {_gib(plan.gpu_memory_bytes)} GiB"
    if plan.cheapest_that_fits is None:
        notes.append(
            f"Nothing fits {limit}. Lower train.micro_batch_size, set train.activation_checkpointing=1, "
            "or use more processes."
        )
    else:
        row = plan.placements[plan.cheapest_that_fits]
        keys = f"zero.stage={row.zero_stage} zero.offload_optimizer={str(row.offload_optimizer).lower()}"
        if row.offload_parameters:
            keys += " zero.offload_parameters=true"
        notes.append(f"Cheapest that fits {limit}: {keys}")
    return notes


def _gib(num_bytes: int) -> str:
    size = num_bytes / 2**30
    num_decimals = 0 if num_bytes == 0 or size >= 100 else 1 if size >= 10 else 2
    return f"{size:,.{num_decimals}f}"
