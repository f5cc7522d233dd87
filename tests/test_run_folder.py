"""What people and disks do to the folder of a run: whatever is no checkpoint is left alone, and damage has a name."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lex_pretrain import loading, run_folder
from lex_pretrain.config import Config, DataSection, RunSection
from lex_pretrain.config_io import save_config
from lex_pretrain.errors import RequestError
from lex_pretrain.evaluate.evaluation import evaluation_dtype
from lex_pretrain.files import sha256_of_json
from lex_pretrain.loading import LoadedModel, load_decoder
from lex_pretrain.monitor.metrics import read_records
from lex_pretrain.run_folder import faults_of, find_checkpoint, read_listing, step_folders
from tests.conftest import Program, save_checkpoint
from tests.test_held_folder import read_only_folder  # noqa: F401

MakeConfig = Callable[..., Config]


def load(folder: Path) -> LoadedModel:
    return load_decoder(folder, torch.device("cpu"), evaluation_dtype)


def edit(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of the decoded list, with the checksum that it then has, as no disk makes it."""

    def apply(file: Path) -> None:
        value = json.loads(file.read_text())
        value = change(value) or value
        if isinstance(value, dict):
            value["sha256"] = sha256_of_json({key: part for key, part in value.items() if key != "sha256"})
        file.write_text(json.dumps(value))

    return apply


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "short": lambda file: os.truncate(file, file.stat().st_size - 40),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "no UTF-8": lambda file: file.write_bytes(b"\xff" + file.read_bytes()),
    "list": lambda file: file.write_text("[]"),
    "object": lambda file: file.write_text("{}"),
    "number": lambda file: file.write_text("7"),
    "bit": lambda file: file.write_text(file.read_text().replace('"sha256"', '"rha256"', 1)),
    "size": lambda file: file.write_text(file.read_text().replace('"num_bytes": ', '"num_bytes": 1', 1)),
    "fewer": lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), "files": []})),
    "fewer, consistent": edit(lambda value: value["files"].clear()),
    "version": edit(lambda value: value.update(format_version=9)),
    "outside": edit(lambda value: value["files"][0].update(path="../config.yaml")),
    "absolute": edit(lambda value: value["files"][0].update(path="/etc/passwd")),
    "twice": edit(lambda value: value["files"].append(value["files"][0])),
    "no number": edit(lambda value: value["files"][0].update(num_bytes="many")),
    "old list, fewer": lambda file: file.write_text(json.dumps(json.loads(file.read_text())["files"][:1])),
    "folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_list_of_files_is_a_damaged_checkpoint(checkpoint: Path, damage: str) -> None:
    assert faults_of(checkpoint) == []
    DAMAGES[damage](checkpoint / "files.json")
    (fault,) = faults_of(checkpoint)
    assert "files.json" in fault
    with pytest.raises(RequestError, match=r"files\.json"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "config.yaml", "tokenizer.model"])
@pytest.mark.parametrize("damage", ["flip", "short", "gone", "folder"])
def test_what_is_read_is_what_was_saved(checkpoint: Path, name: str, damage: str) -> None:
    file = checkpoint / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-20] ^= 0x10
        file.write_bytes(content)
    elif damage == "short":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
        if damage == "folder":
            file.mkdir()
    with pytest.raises(RequestError, match=rf"{checkpoint} is damaged: {name}"):
        load(checkpoint)
    # A run is evaluated by its newest checkpoint or not at all, never by another one in its place.
    with pytest.raises(RequestError, match="is damaged"):
        load(checkpoint.parent.parent)


def test_a_list_without_a_checksum_of_its_own_still_verifies(checkpoint: Path) -> None:
    """As written before version 2."""
    file = checkpoint / "files.json"
    file.write_text(json.dumps(json.loads(file.read_text())["files"]))
    assert faults_of(checkpoint) == []
    assert load(checkpoint).step == 7


def test_what_lies_beside_checkpoints_is_none(checkpoint: Path) -> None:
    folder = checkpoint.parent
    for name in ("step-00000007.bak", "step-00000009 copy", "step-9", "step-000000009", ".step-00000010.Xy12"):
        shutil.copytree(checkpoint, folder / name)
    (folder / "step-00000011").write_text("a note")
    (folder / "notes.txt").write_text("a note")
    assert step_folders(folder) == {7: checkpoint}
    assert find_checkpoint(folder.parent) == checkpoint
    assert load(folder.parent).step == 7
    # A step beyond eight digits sorts as a number.
    long = folder / "step-123456789"
    shutil.copytree(checkpoint, long)
    assert list(step_folders(folder)) == [7, 123456789]


@pytest.mark.slow
def test_a_run_goes_on_whatever_lies_in_its_folder(tiny_config: MakeConfig, program: Program, tmp_path: Path) -> None:
    """Copies, notes, a link as `latest`, a linked checkpoint, a half copy, other names for the folder."""
    config = tiny_config(checkpoint={"every_steps": 2, "keep_last": 2}, train={"num_steps": 4})
    save_config(config, tmp_path / "run.yaml")
    assert program("train", "--config", "run.yaml").returncode == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000004.bak")
    shutil.copytree(checkpoints / "step-00000004", checkpoints / ".step-00000004.tmp.swp")
    # An rsync of a later checkpoint that was broken off, and one whose list did not come.
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000008")
    (checkpoints / "step-00000006").mkdir()
    (checkpoints / "step-00000006" / "model.safetensors").write_bytes(b"half")
    (checkpoints / "notes").write_text("mine")
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").symlink_to("step-00000004")
    (tmp_path / "disk").mkdir()
    (checkpoints / "step-00000002").rename(tmp_path / "disk" / "second")
    (checkpoints / "step-00000002").symlink_to(tmp_path / "disk" / "second")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to("moved")
    done = program("train", "--config", "run.yaml", "run.output_dir=./x/../link/", "train.num_steps=7")
    assert done.returncode == 0, done.stderr
    for name in ("step-00000006", "step-00000008"):
        assert f"{name} is broken and passed over" in done.stderr
    checkpoints = tmp_path / "moved" / "checkpoints"
    records = read_records(tmp_path / "moved" / "metrics.jsonl")
    assert [record["checkpoint"] for record in records if record.get("event") == "resumed"] == ["step-00000004"]
    there = {path.name for path in checkpoints.iterdir()}
    assert {"step-00000004.bak", ".step-00000004.tmp.swp", "notes", "step-00000006", "step-00000007"} <= there
    # The link to the oldest was taken away with it, and what it led to is somebody's own.
    assert "step-00000002" not in there
    assert (tmp_path / "disk" / "second" / "files.json").is_file()
    assert (checkpoints / "latest").read_text() == "step-00000007\n"


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunSection(output_dir="~/runs/").output_dir == f"{tmp_path}/runs/"
    assert DataSection.model_validate({"path": "~/data"}).path == f"{tmp_path}/data"
    sources = DataSection.model_validate({"sources": [{"path": "~/data"}]}).sources
    assert sources[0].path == f"{tmp_path}/data"


def test_a_run_that_cannot_be_written_can_be_evaluated(
    tiny_config: MakeConfig,
    dataset: Path,
    program: Program,
    read_only_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    os.system(f"mount -o remount,rw,size=8m {read_only_folder}")
    save_checkpoint(read_only_folder / "run" / "checkpoints" / "step-00000007", tiny_config(), dataset)
    os.system(f"mount -o remount,ro {read_only_folder}")
    arguments = ["--data", dataset, "--lengths", "32", "--attention", "causal", "--retrieval-trials", "0"]
    done = program("evaluate", read_only_folder / "run", *arguments, "--output", tmp_path / "evaluation")
    assert done.returncode == 0, done.stderr
    assert program("export", read_only_folder / "run", "--output", tmp_path / "exported").returncode == 0


@pytest.mark.parametrize("named", ["run", "checkpoint"])
def test_a_checkpoint_that_is_removed_while_it_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """A training prunes it after it was chosen, and saves a newer one: a run is read by that one."""
    newer = checkpoint.with_name("step-00000009")
    real, removed = loading.faults_of, threading.Event()

    def prune(folder: Path, *arguments: Any, **options: Any) -> list[str]:
        if not removed.is_set():
            removed.set()
            shutil.copytree(checkpoint, newer)
            run_folder.write_listing(newer, [entry.model_dump() for entry in read_listing(checkpoint).files], 9)
            shutil.rmtree(checkpoint)
        return real(folder, *arguments, **options)

    monkeypatch.setattr(loading, "faults_of", prune)
    if named == "run":
        assert load(checkpoint.parent.parent).step == 9
    else:
        with pytest.raises(RequestError, match="was removed while it was read"):
            load(checkpoint)


def test_an_export_is_verified_too(checkpoint: Path, dataset: Path, program: Program, tmp_path: Path) -> None:
    assert program("export", checkpoint, "--output", "exported").returncode == 0
    exported = tmp_path / "exported"
    assert {entry.path for entry in read_listing(exported).files} == {
        file.name for file in exported.iterdir() if file.name != "files.json"
    }
    (exported / "README.md").write_text("a card of my own")
    assert load(exported).step == 7
    for name in ("model.safetensors", "config.json"):
        content = (exported / name).read_bytes()
        (exported / name).write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])
        with pytest.raises(RequestError, match=rf"exported is damaged: {name} has changed"):
            load(exported)
        (exported / name).write_bytes(content)
