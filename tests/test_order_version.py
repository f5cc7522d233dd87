"""A run records the version of the order that its samples are dealt in, and goes on in no other."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.data.order import ORDER_VERSION
from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json, write_json
from lex_pretrain.ranks import Ranks
from lex_pretrain.run_folder import STATE_FILE, listed_file, read_listing, step_of_name, write_listing
from lex_pretrain.train.checkpoint import DEEPSPEED_TAG, Checkpoints
from lex_pretrain.train.resume import find_start
from lex_pretrain.train.state import TrainState
from tests.conftest import Program

MakeConfig = Callable[..., Config]
STATE = TrainState(7, 56, 1792, 1, 1, "fingerprint")


def save_state(checkpoint: Path, version: int | None) -> None:
    """Write the checkpoint's state as a run of this version of the order did; None as one that did not record it."""
    file = checkpoint / STATE_FILE
    state = read_json(file) if file.is_file() else dataclasses.asdict(STATE)
    del state["order_version"]
    write_json(file, state if version is None else {**state, "order_version": version})
    part = checkpoint / DEEPSPEED_TAG / "part.pt"
    part.parent.mkdir(exist_ok=True)
    part.touch()
    changed = [listed_file(checkpoint, name) for name in (STATE_FILE, f"{DEEPSPEED_TAG}/part.pt")]
    names = {entry["path"] for entry in changed}
    others = [entry.model_dump() for entry in read_listing(checkpoint).files if entry.path not in names]
    write_listing(checkpoint, [*others, *changed], step_of_name(checkpoint))


def test_a_state_keeps_its_version_and_one_without_is_of_the_first() -> None:
    saved = dataclasses.asdict(STATE)
    assert saved["order_version"] == ORDER_VERSION
    assert TrainState.from_json(saved) == STATE
    del saved["order_version"]
    assert TrainState.from_json(saved) == dataclasses.replace(STATE, order_version=1)


@pytest.mark.parametrize("version", [None, ORDER_VERSION + 1])
def test_a_checkpoint_of_another_order_is_no_start(
    tiny_config: MakeConfig, checkpoint: Path, tmp_path: Path, version: int | None
) -> None:
    checkpoints = Checkpoints(tiny_config(), Ranks(0, 1, 0, 1), tmp_path / "tokenizer.model")
    save_state(checkpoint, version)
    for resume in (None, "7", str(checkpoint)):
        with pytest.raises(RequestError, match="going on would repeat some windows and miss others") as refused:
            find_start(checkpoints, resume, "fingerprint")
        assert str(refused.value).startswith(f"{checkpoint}: its samples were dealt in order version {version or 1}, ")
        assert f"this program deals version {ORDER_VERSION};" in str(refused.value)
        assert "another run.output_dir" in str(refused.value)
    assert find_start(checkpoints, "never", "fingerprint") is None


def test_a_checkpoint_of_this_order_is_a_start(tiny_config: MakeConfig, checkpoint: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tiny_config(), Ranks(0, 1, 0, 1), tmp_path / "tokenizer.model")
    save_state(checkpoint, ORDER_VERSION)
    assert find_start(checkpoints, None, "fingerprint") == (checkpoint, STATE)


@pytest.mark.slow
def test_a_run_of_the_first_order_is_refused_and_left_as_it_is(
    tiny_config: MakeConfig, program: Program, tmp_path: Path
) -> None:
    save_config(tiny_config(), tmp_path / "run.yaml")
    command = ["train", "--config", tmp_path / "run.yaml"]
    assert program(*command).returncode == 0
    last = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert read_json(last / STATE_FILE)["order_version"] == ORDER_VERSION
    save_state(last, version=None)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
    for resume in ([], ["--resume", "6"]):
        refused = program(*command, *resume, "train.num_steps=7")
        assert refused.returncode == 2, refused.stderr
        assert "dealt in order version 1" in " ".join(refused.stderr.split())
    after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert after == before
