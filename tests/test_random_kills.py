"""Kills at random moments of a whole training: bit for bit the run that was never killed, and nothing left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.files import atomic_folder, atomic_write, remove_temporaries

MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_random_kills_change_nothing_and_leave_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """With saves in the background, validations and retention; six kills here, as many as wished by the module."""
    config = tiny_config(
        model={"dropout": 0.1},
        train={"num_steps": 200, "validate_every_steps": 15, "validation_num_sequences": 4},
        checkpoint={"every_steps": 5, "keep_last": 2},
        monitor={"log_every_steps": 1000},
    )
    save_config(config, tmp_path / "run.yaml")
    command = [sys.executable, "-m", "tests.random_kills", "--config", str(tmp_path / "run.yaml"), "--kills", "6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["differences"], summary["left"]) == ([], [])
    assert done.returncode == 0
    assert sum(summary["moments"].values()) == 6


def test_temporaries_of_a_killed_writer_go_and_what_is_somebody_elses_stays(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "a.json"):
        (written,) = tmp_path.glob(".a.json.*.tmp")
        written.with_name(".a.json.abcdefg1.tmp").write_bytes(b"half")
    for name in ("mine.tmp", ".mine.tmp", ".a.json.ABCDEFGH.tmp", ".step-00000004.tmp"):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path, tmp_path / "missing")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a.json", "mine.tmp", ".mine.tmp", ".a.json.ABCDEFGH.tmp", ".step-00000004.tmp"]
    )


def test_a_folder_that_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    for name in (".out.aaaaaaaa.tmp", ".out.bbbbbbbb.tmp"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".out.aaaaaaaa.tmp", (0, 0))
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.bbbbbbbb.tmp", "out"]
