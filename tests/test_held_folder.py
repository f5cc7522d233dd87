"""The output folder of a run: one run at a time, and a clear word when it cannot be written."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lex_pretrain import folder_lock as folder_lock_module
from lex_pretrain import held_folder
from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json, write_json
from lex_pretrain.folder_lock import folder_lock
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
    assert f"(process {os.getpid()} on {socket.gethostname()})" in refused.stderr.replace("\n", "")
    assert [file.name for file in run.iterdir()] == [".lock"]


def test_a_folder_of_another_host_is_in_use_while_that_gives_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a shared file system that keeps locks from each other's hosts: the lock is free, and the file is not."""
    monkeypatch.setattr(folder_lock_module, "SECONDS_BETWEEN_SIGNS", 0.05)
    monkeypatch.setattr(folder_lock_module, "SECONDS_UNTIL_STALE", 1.0)
    owner_file = tmp_path / ".lock.json"
    write_json(owner_file, {"host": "elsewhere", "process_id": 4321})
    ended = threading.Event()
    threading.Thread(target=folder_lock_module._give_signs, args=(owner_file, ended), daemon=True).start()
    with pytest.raises(RequestError, match=r"in use by another training run .* \(process 4321 on elsewhere\)"):  # noqa: SIM117
        with folder_lock(tmp_path, "training run"):
            pass
    ended.set()
    # Its clock may be an hour ahead, or ours was set back: that it gives no more signs is what counts.
    os.utime(owner_file, (4e9, 4e9))
    caplog.set_level("INFO", logger="lex_pretrain")
    with folder_lock(tmp_path, "training run"):
        held = read_json(owner_file)
        assert (held["host"], held["process_id"]) == (socket.gethostname(), os.getpid())
        before = owner_file.stat().st_mtime_ns
        time.sleep(0.3)
        assert owner_file.stat().st_mtime_ns > before
    assert "was left by process 4321 on elsewhere" in caplog.text
    assert not owner_file.exists()


@pytest.mark.parametrize("left", ["", "[]", "{}", '{"host": 3}', "\0\0\0"])
def test_what_a_killed_holder_left_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    monkeypatch.setattr(folder_lock_module, "SECONDS_UNTIL_STALE", 0.2)
    (tmp_path / ".lock.json").write_text(left)
    with folder_lock(tmp_path, "training run"):
        assert read_json(tmp_path / ".lock.json")["process_id"] == os.getpid()
    write_json(tmp_path / ".lock.json", {"host": socket.gethostname(), "process_id": 1})
    with folder_lock(tmp_path, "training run"):
        pass


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
