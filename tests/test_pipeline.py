"""The miniature pipeline through the real commands: text to shards to two DeepSpeed processes to a report to text."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.monitor.metrics import read_records, read_steps
from lex_pretrain.quickstart import run_quickstart
from tests.conftest import Program

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_from_text_to_report_with_two_deepspeed_processes(program: Program, corpus: Path, tmp_path: Path) -> None:
    prepared = program(
        *("prepare", corpus, "--output", "data", "--vocab-size", "320", "--unit-bytes", "60000"),
        *("--validation-fraction", "0.2", "--test-fraction", "0.2"),
    )
    assert prepared.returncode == 0, prepared.stderr
    trained = program(
        *("launch", "--launcher", "deepspeed", "--num-processes", "2", "--", "train"),
        *("--config", ROOT / "configs" / "runs" / "debug-cpu.yaml"),
        *("data.path=data", "run.output_dir=run", "train.precision=fp32", "monitor.wandb_mode=disabled"),
    )
    assert trained.returncode == 0, trained.stderr
    steps = read_steps(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 60
    assert steps[-1]["loss"] < 0.75 * steps[0]["loss"]
    evaluated = program(
        *("evaluate", "run", "--data", "data", "--lengths", "16,64,512", "--attention", "blockwise,causal"),
        *("--output", "evaluation", "--json"),
    )
    assert evaluated.returncode == 0, evaluated.stderr
    results = json.loads(evaluated.stdout)
    assert results == json.loads((tmp_path / "evaluation" / "results.json").read_text())
    by_length = {record["length"]: record["perplexity"] for record in results["perplexity"]}
    assert all(perplexity < 320 for perplexity in by_length.values())
    generated = program("generate", "run", "--prompt", "the model", "--max-new-tokens", "40", "--seed", "3")
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.startswith("the model")
    assert len(generated.stdout) > len("the model\n")


@pytest.mark.slow
def test_training_under_mpiexec_agrees_on_a_master_and_equals_torchrun(
    tiny_config: Callable[..., Config], program: Program, tmp_path: Path
) -> None:
    losses = []
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-m", "lex_pretrain"]
    launch = [sys.executable, "-m", "lex_pretrain", "launch", "--num-processes", "2", "--"]
    for name, command in (("mpi", mpiexec), ("torchrun", launch)):
        file = tmp_path / f"{name}.yaml"
        save_config(tiny_config(run={"output_dir": str(tmp_path / name)}), file)
        done = subprocess.run([*command, "train", "--config", str(file)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        losses.append([step["loss"] for step in read_steps(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_quickstart_of_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real quickstart with a smaller corpus, shorter lengths, the least steps and one process."""
    monkeypatch.setattr("lex_pretrain.quickstart.choose_num_processes", lambda: (1, "quick to start"))
    monkeypatch.setattr("lex_pretrain.quickstart.CORPUS_BYTES", 6 * 2**20)
    monkeypatch.setattr("lex_pretrain.quickstart.LENGTHS", (64, 128, 1024))
    monkeypatch.setattr("lex_pretrain.quickstart.NUM_DOCUMENTS", 2)
    report = run_quickstart(tmp_path / "quickstart", minutes=0.1)
    html = report.read_text()
    assert html.count("the resumed loss curve continued") == 2
    for shown in ("xpos with blockwise attention", "rope with causal attention", "lex-pretrain prepare", "torch 2."):
        assert shown in html
    for position in ("xpos", "rope"):
        records = read_records(tmp_path / "quickstart" / position / "metrics.jsonl")
        assert [record["event"] for record in records if "event" in record].count("resumed") == 1
    # It goes on in the precision that it began with, whatever a measurement would say now.
    monkeypatch.setattr("lex_pretrain.quickstart.choose_precision", lambda: pytest.fail("the precision is recorded"))
    again = run_quickstart(tmp_path / "quickstart", minutes=0.1)
    assert again == report
