"""What it costs to verify a checkpoint while it is read: the paper's model, from the disk and from memory."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from lex_pretrain import loading
from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.hardware import evaluation_dtype
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.run_folder import listed_file, write_listing
from tests.benchmarks.timing import median_seconds

_FILES = ("config.yaml", "model.safetensors", "tokenizer.model")


def run() -> list[str]:
    """Lines of the result: seconds with and without, taken in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "step-00000001"
        folder.mkdir()
        num_bytes = _save(folder)
        lines = [f"verification: {num_bytes / 1e6:,.0f} MB of weights"]
        for where, prepare in (("from the disk", _forget), ("from memory", lambda folder: None)):
            seconds = median_seconds(
                {
                    "verified": lambda prepare=prepare: (prepare(folder), _load(folder)),  # type: ignore[misc]
                    "not": lambda prepare=prepare: (prepare(folder), _load_unverified(folder)),  # type: ignore[misc]
                }
            )
            share = seconds["verified"] / seconds["not"] - 1
            lines.append(f"  {where}: {seconds['not']:.2f} s without, {seconds['verified']:.2f} s with, {share:+.0%}")
        return lines


def _save(folder: Path) -> int:
    config = Config.model_validate(
        {
            "run": {"output_dir": "run"},
            "data": {"path": "data"},
            "model": {
                "num_layers": 24,
                "hidden_size": 1024,
                "num_heads": 16,
                "sequence_length": 1024,
                "vocab_size": 32_000,
            },
            "train": {"num_steps": 1, "global_batch_size": 1, "precision": "fp32"},
            "schedule": {"warmup_steps": 0},
        }
    )
    weights = {name: parameter.detach() for name, parameter in Decoder(config.model).named_parameters()}
    save_file(weights, folder / "model.safetensors")
    save_config(config, folder / "config.yaml")
    (folder / "tokenizer.model").write_bytes(b"")
    write_listing(folder, [listed_file(folder, name) for name in _FILES], step=1)
    return (folder / "model.safetensors").stat().st_size


def _forget(folder: Path) -> None:
    """Take the weights out of the system's cache, so that they come from the disk."""
    with (folder / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load(folder: Path) -> None:
    model = loading.load_decoder(folder, torch.device("cpu"), evaluation_dtype)
    # Mapped weights are only read when somebody looks at them.
    for parameter in model.decoder.parameters():
        parameter.sum()


def _load_unverified(folder: Path) -> None:
    with _unverified():
        _load(folder)


@contextlib.contextmanager
def _unverified() -> Iterator[None]:
    with mock.patch.object(loading, "faults_of", return_value=[]):
        yield
