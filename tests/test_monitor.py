"""What a run reports: wandb's own offline files hold every step once, and its faults never stop a run."""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lex_pretrain.config import Config
from lex_pretrain.monitor.metrics import StepMetrics, read_records
from lex_pretrain.monitor.monitor import Monitor

# LevelDB's log format, which wandb writes after a header of 7 bytes: blocks of records with a header of 7 bytes each.
BLOCK_BYTES = 32 * 1024
HEADER = struct.Struct("<IHB")
FULL, LAST = 1, 4


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        samples=8 * step,
        tokens=256 * step,
        loss=5.0 - step / 10,
        lr=1e-3,
        grad_norm=1.0,
        tokens_per_second=1000.0,
        mfu=0.5,
        step_seconds=0.1,
        skipped=False,
    )


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of one `.wandb` file."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = file.read_bytes(), 7, b""
    while position + HEADER.size <= len(data):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER.size:
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        parts += data[position + HEADER.size : position + HEADER.size + length]
        position += HEADER.size + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def sent(output: Path) -> tuple[set[str], list[int]]:
    """Ids of the runs and the steps in all offline files, in the order of writing."""
    run_ids, steps = set(), []
    for file in sorted(output.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for record in wandb_records(file):
            if record.HasField("run"):
                run_ids.add(record.run.run_id)
            if record.HasField("history"):
                values = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
                steps.append(int(values["step"]))
    return run_ids, steps


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_wandb_with_each_step_once(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Stopped after step 8, resumed from the checkpoint of step 4; offline, it must not look for a network."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    config = tiny_config(train={"num_steps": 12}, monitor={"wandb_mode": "offline"})
    first = Monitor(config, tmp_path, enabled=True, first_step=0)
    for step in range(1, 9):
        first.step(metrics(step))
    first.event("validation", step=8, loss=4.0)
    first.close()
    second = Monitor(config, tmp_path, enabled=True, first_step=4, wandb_run_id=first.wandb_run_id)
    for step in range(5, 13):
        second.step(metrics(step))
    second.close()
    assert "wandb failed" not in caplog.text
    assert second.wandb_run_id == first.wandb_run_id
    run_ids, steps = sent(tmp_path)
    assert run_ids == {first.wandb_run_id}
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12]  # step 8 and the validation after it


def test_faults_of_wandb_do_not_stop_a_run(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its folder cannot be made, as on a full disk; everything is in metrics.jsonl all the same."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("wandb.init", fail)
    caplog.set_level("INFO", logger="lex_pretrain")
    config = tiny_config(monitor={"wandb_mode": "offline"})
    monitor = Monitor(config, tmp_path, enabled=True, first_step=0)
    for step in (1, 2):
        monitor.step(metrics(step))
    monitor.close()
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2]
    assert caplog.text.count("No space left on device") == 1
