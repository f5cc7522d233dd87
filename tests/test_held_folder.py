"""The output folder of a run: one run at a time, and a clear word when it cannot be written."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lex_pretrain import held_folder
from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.files import folder_lock
from lex_pretrain.monitor.metrics import read_steps
from lex_pretrain.train.run import train
from tests.conftest import Program

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(
    tiny_config: MakeConfig, program: Program, tmp_path: Path, num_processes: int
) -> None:
    run = tmp_path / "run"
    save_config(tiny_config(run={"output_dir": str(run)}), tmp_path / "run.yaml")
    launch = () if num_processes == 1 else ("launch", "--num-processes", str(num_processes), "--")
    run.mkdir()
    with folder_lock(run, "training run"):
        refused = program(*launch, "train", "--config", tmp_path / "run.yaml")
    assert refused.returncode == 1, refused.stderr
    assert refused.stderr.count(f"{run} is in use by another training run that is still running") == 1
    assert [file.name for file in run.iterdir()] == [".lock"]


def test_a_run_waits_for_one_that_is_ending_and_leaves_the_folder_free(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_folder, "PATIENCE_SECONDS", 60.0)
    run = tmp_path / "run"
    run.mkdir()
    config = tiny_config(run={"output_dir": str(run)}, train={"num_steps": 2})
    ending = subprocess.Popen(["flock", run / ".lock", "sleep", "3"])
    train(config)
    assert ending.wait() == 0
    assert [step["step"] for step in read_steps(run / "metrics.jsonl")] == [1, 2]
    with folder_lock(run, "test"):
        pass


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system that root itself cannot write to")
    folder = tmp_path / "read-only"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_an_output_folder_that_cannot_be_written_is_named(
    tiny_config: MakeConfig, program: Program, read_only_folder: Path, tmp_path: Path
) -> None:
    for output_dir in (read_only_folder, read_only_folder / "run"):
        save_config(tiny_config(run={"output_dir": str(output_dir)}), tmp_path / "run.yaml")
        refused = program("train", "--config", tmp_path / "run.yaml")
        assert refused.returncode == 2, refused.stderr
        assert f"run.output_dir {output_dir} cannot be written" in refused.stderr
        assert "Traceback" not in refused.stderr
