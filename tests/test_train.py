"""Training: stopping anywhere and going on with the same losses, checkpoints that break, runs that do not fit."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.errors import RequestError
from lex_pretrain.loading import load_decoder
from lex_pretrain.monitor.metrics import MetricsFile, read_records, read_steps
from lex_pretrain.train.engine import check_operations
from tests.conftest import Program, run_forked

MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parent.parent


def write(config: Config, file: Path) -> Path:
    save_config(config, file)
    return file


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_steps(run / "metrics.jsonl")]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_decoder(run, torch.device("cpu"), lambda precision: torch.float32).decoder.named_parameters())


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Bit for bit, with dropout, across an epoch's end, with rank 0 killed some steps after a checkpoint."""
    cases = [(0, "fp32", 2), (1, "bf16", 2), (2, "fp32", 2), (3, "fp32", 2), (1, "fp32", 1)]
    runs: list[tuple[Path | int | str, ...]] = []
    for number, (stage, precision, num_processes) in enumerate(cases):
        sections: dict[str, Any] = {
            "zero": {"stage": stage},
            "model": {"dropout": 0.1, "sequence_length": 128},
            "train": {"num_steps": 12, "precision": precision, "global_batch_size": 32, "micro_batch_size": 8},
            "checkpoint": {"every_steps": 4},
        }
        files = {}
        for name in ("whole", "broken"):
            config = tiny_config(**sections, run={"output_dir": str(tmp_path / f"{name}-{number}")})
            files[name] = write(config, tmp_path / f"{name}-{number}.yaml")
        runs += [(files["whole"], num_processes), (files["broken"], num_processes, "killed")]
        runs += [(files["broken"], num_processes)]
    run_forked(*runs)
    for number, case in enumerate(cases):
        whole, broken = tmp_path / f"whole-{number}", tmp_path / f"broken-{number}"
        assert losses(broken) == losses(whole), case
        records = read_records(broken / "metrics.jsonl")
        (resumed,) = [record["step"] for record in records if record.get("event") == "resumed"]
        assert resumed in (4, 8), case
        for name, weight in weights(whole).items():
            assert torch.equal(weight, weights(broken)[name]), (case, name)


def wait_for_step(run: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    file = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (file.is_file() and any(record["step"] >= step for record in read_steps(file))):
        assert process.poll() is None, f"ended with {process.returncode} before step {step}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "deepspeed"])
def test_a_stop_signal_saves_ends_with_75_and_goes_on(
    tiny_config: MakeConfig, program: Program, tmp_path: Path, launcher: str
) -> None:
    config = tiny_config(train={"num_steps": 400}, checkpoint={"every_steps": 1000})
    file = write(config, tmp_path / "run.yaml")
    launch = ["launch", "--launcher", launcher, "--num-processes", "2", "--", "train", "--config", str(file)]
    process = subprocess.Popen([sys.executable, "-m", "lex_pretrain", *launch], stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "run", 3, process)  # type: ignore[arg-type]
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "the same command goes on" in stderr
    stopped = len(losses(tmp_path / "run"))
    assert stopped < 400
    done = program(*launch[:-1], file, f"train.num_steps={stopped + 2}")
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("event") == "resumed"] == [stopped]
    assert len(losses(tmp_path / "run")) == stopped + 2


@pytest.mark.slow
def test_broken_checkpoints_are_passed_over_or_refused(
    tiny_config: MakeConfig, program: Program, tmp_path: Path
) -> None:
    file = write(tiny_config(), tmp_path / "run.yaml")
    assert program("train", "--config", file).returncode == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == "step-00000006"
    weights_file = checkpoints / "step-00000006" / "model.safetensors"
    damaged = bytearray(weights_file.read_bytes())
    damaged[-1] ^= 1
    weights_file.write_bytes(damaged)
    explicit = program("train", "--config", file, "--resume", "6", "train.num_steps=7")
    assert explicit.returncode == 2
    assert "SHA-256 differs" in explicit.stderr
    passed_over = program("train", "--config", file, "train.num_steps=7")
    assert passed_over.returncode == 0
    assert "step-00000006 is broken and passed over" in passed_over.stderr
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("event") == "resumed"] == [3]
    for folder in checkpoints.glob("step-*"):
        (folder / "files.json").unlink()
    hopeless = program("train", "--config", file, "train.num_steps=9")
    assert hopeless.returncode == 1
    assert "every checkpoint" in hopeless.stderr


@pytest.mark.slow
def test_what_a_resumption_from_an_older_step_leaves_behind_is_set_aside(
    tiny_config: MakeConfig, program: Program, tmp_path: Path
) -> None:
    """Saved at 2, 4 and 6; gone back to 2, killed after 3; the plain restart is of that path, and 6 stays whole."""
    config = tiny_config(checkpoint={"every_steps": 2, "keep_last": 3}, train={"num_steps": 6})
    file = write(config, tmp_path / "run.yaml")
    assert program("train", "--config", file).returncode == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    left = (checkpoints / "step-00000006" / "model.safetensors").read_bytes()
    for attempt in range(2):
        # A run that dies before it has saved anything on its new path.
        command = [sys.executable, "-m", "tests.spoiled_run", "0:16-23", "train", "--config", str(file)]
        process = subprocess.run(
            [*command, "--resume", "2", "train.max_bad_steps=1", "train.max_rewinds=0"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 1, process.stderr
        assert ("set aside in" in process.stderr) == (attempt == 0)
        assert "leave --resume out" in process.stderr
    assert (checkpoints / "latest").read_text() == "step-00000002\n"
    assert len(losses(tmp_path / "run")) == 3
    again = program("train", "--config", file)
    assert again.returncode == 0, again.stderr
    resumed = [
        record["step"]
        for record in read_records(tmp_path / "run" / "metrics.jsonl")
        if record.get("event") == "resumed"
    ]
    assert resumed == [2, 2, 2]
    aside = checkpoints / "abandoned-1"
    assert sorted(folder.name for folder in aside.iterdir()) == ["step-00000004", "step-00000006"]
    assert (aside / "step-00000006" / "model.safetensors").read_bytes() == left
    back = program("train", "--config", file, "--resume", aside / "step-00000006", "train.num_steps=7")
    assert back.returncode == 0, back.stderr
    assert [folder.name for folder in (checkpoints / "abandoned-2").iterdir()] == ["step-00000006"]
    assert (checkpoints / "latest").read_text() == "step-00000007\n"


def test_a_run_of_set_aside_checkpoints_alone_does_not_begin_afresh(
    tiny_config: MakeConfig, program: Program, tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints" / "abandoned-1" / "step-00000006").mkdir(parents=True)
    done = program("train", "--config", write(tiny_config(), tmp_path / "run.yaml"))
    assert done.returncode == 2
    assert "abandoned-1/step-00000006" in done.stderr


@pytest.mark.slow
def test_a_folder_with_another_run_is_refused_by_key(tiny_config: MakeConfig, program: Program, tmp_path: Path) -> None:
    file = write(tiny_config(), tmp_path / "run.yaml")
    assert program("train", "--config", file).returncode == 0
    harmless = program("train", "--config", file, "train.num_steps=7", "monitor.log_every_steps=2")
    assert harmless.returncode == 0, harmless.stderr
    # 256 tokens a step: the same run, its length and warm-up given otherwise.
    in_tokens = ["train.num_steps=null", "train.num_tokens=1793", "schedule.warmup_steps=null"]
    longer = program("train", "--config", file, *in_tokens, "schedule.warmup_tokens=512")
    assert longer.returncode == 0, longer.stderr
    assert [step["samples"] for step in read_steps(tmp_path / "run" / "metrics.jsonl")] == list(range(8, 72, 8))
    other_warmup = program("train", "--config", file, *in_tokens, "schedule.warmup_tokens=513")
    assert other_warmup.returncode == 2
    assert "schedule.warmup_steps: 2 there, 3 here" in other_warmup.stderr
    wrong = program("train", "--config", file, "optimizer.learning_rate=0.1", "model.position=rope")
    assert wrong.returncode == 2
    assert "optimizer.learning_rate: 0.003 there, 0.1 here" in wrong.stderr
    assert "model.position: 'xpos' there, 'rope' here" in wrong.stderr
    assert "train.num_steps" not in wrong.stderr
    never = program("train", "--config", file, "--resume", "never")
    assert never.returncode == 2
    stage_0 = program("train", "--config", file, "train.num_steps=9", "zero.stage=0")
    assert stage_0.returncode == 2
    assert "between the stages 1, 2 and 3 only: set zero.stage=1" in stage_0.stderr


@pytest.mark.slow
def test_a_batch_that_grows_is_the_same_on_other_processes_and_after_a_kill(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """4, 8 and then 12 sequences a step: in accumulated micro batches as at once, at every change of their number."""
    runs: list[tuple[Path | int | str, ...]] = []
    for name, stage, micro, num_processes in (("whole", 0, 4, 1), ("parts", 1, 1, 2), ("partitioned", 2, 2, 2)):
        config = tiny_config(
            run={"output_dir": str(tmp_path / name)},
            train={
                **{"num_tokens": 64 * 32, "num_steps": None, "global_batch_size": 12, "micro_batch_size": micro},
                **{"initial_batch_size": 4, "batch_ramp_steps": 5, "precision": "fp32"},
            },
            zero={"stage": stage},
        )
        file = write(config, tmp_path / f"{name}.yaml")
        runs += [(file, num_processes, "killed")] if name == "parts" else []
        runs += [(file, num_processes)]
    run_forked(*runs)
    for name in ("whole", "parts", "partitioned"):
        steps = read_steps(tmp_path / name / "metrics.jsonl")
        assert [step["samples"] for step in steps] == [4, 8, 12, 20, 28, 40, 52, 64], name
        assert [step["tokens"] for step in steps] == [32 * step["samples"] for step in steps], name
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), abs=1e-4), name


@pytest.mark.slow
def test_other_numbers_of_processes_and_stages_go_on_unasked(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """The same samples, and in float32 losses within 1e-4 of the uninterrupted run, wherever it goes on."""
    runs = []
    for name, stage, num_steps, num_processes in (
        ("whole", 1, 12, 1),
        *(("moved", 1, 3, 2), ("moved", 3, 6, 1), ("moved", 3, 9, 3), ("moved", 2, 12, 2)),
    ):
        config = tiny_config(
            run={"output_dir": str(tmp_path / name)},
            train={"num_steps": num_steps, "global_batch_size": 12, "precision": "fp32"},
            # A decay would follow num_steps, which differs between the parts.
            schedule={"decay": "constant"},
            zero={"stage": stage},
        )
        runs.append((write(config, tmp_path / f"{name}-{num_steps}.yaml"), num_processes))
    assert run_forked(*runs).count("converting step-") == 3
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)
    samples = [[step["samples"] for step in read_steps(tmp_path / run / "metrics.jsonl")] for run in ("whole", "moved")]
    assert samples[0] == samples[1]


def test_fp16_on_the_cpu_is_refused_before_anything_starts(
    tiny_config: MakeConfig, program: Program, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which trains in fp16")
    done = program("train", "--config", write(tiny_config(), tmp_path / "run.yaml"), "train.precision=fp16")
    assert done.returncode == 2
    assert "fp16 needs a GPU" in done.stderr
    assert not (tmp_path / "run").exists()


def test_quantised_messages_on_the_cpu_are_refused_before_anything_starts(tiny_config: MakeConfig) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which quantises messages")
    section = {"zero_optimization": {"zero_quantized_gradients": True}}
    with pytest.raises(RequestError, match=r"deepspeed\.zero_optimization\.zero_quantized_gradients needs a GPU"):
        check_operations(tiny_config(zero={"stage": 3}, deepspeed=section))


def test_requests_that_cannot_be_met_end_with_2(tiny_config: MakeConfig, program: Program, tmp_path: Path) -> None:
    file = write(tiny_config(), tmp_path / "run.yaml")
    cases = {
        "data.path=nowhere": "nowhere is not a prepared dataset",
        "model.sequence_length=1000000": "too few for one window",
        "model.hiden_size=3": "did you mean model.hidden_size",
        "model.vocab_size=100": "smaller than the 320 pieces",
    }
    for override, words in cases.items():
        done = program("train", "--config", file, override)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_validation_retention_and_wandb_offline(tiny_config: MakeConfig, program: Program, tmp_path: Path) -> None:
    config = tiny_config(
        train={"validate_every_steps": 2, "validation_num_sequences": 8},
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_every_steps": 3},
        monitor={"wandb_mode": "offline"},
    )
    done = program("train", "--config", write(config, tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000003", "step-00000005", "step-00000006"]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    validations = [record for record in records if record.get("event") == "validation"]
    assert [record["step"] for record in validations] == [2, 4, 6]
    assert validations[-1]["loss"] < validations[0]["loss"]
    assert "loss_128_blockwise" in validations[0]
    first = read_steps(tmp_path / "run" / "metrics.jsonl")[0]
    keys = "step samples tokens loss lr grad_norm tokens_per_second mfu step_seconds skipped".split()  # noqa: SIM905
    assert set(first) == set(keys)
    assert (first["samples"], first["tokens"]) == (8, 8 * 32)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_a_torn_last_line_is_cut_off_and_the_last_line_of_a_step_is_true(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert [record["step"] for record in read_steps(file)] == [1, 2]
    metrics = MetricsFile(file)
    metrics.append({"event": "resumed", "step": 1})
    metrics.append({"step": 2, "loss": 2.5})
    metrics.close()
    assert all(json.loads(line) for line in file.read_text().splitlines())
    assert [record["loss"] for record in read_steps(file)] == [3.0, 2.5]
