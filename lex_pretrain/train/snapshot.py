"""The files of a checkpoint: those that DeepSpeed writes and the gathered weights, now or from a copy in memory."""

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lex_pretrain.files import sha256_of_file, sync_folder
from lex_pretrain.model.decoder import Decoder

# How each file is written, by its path in the checkpoint's folder.
Files = dict[str, Callable[[Path], object]]
Result = TypeVar("Result")


def deepspeed_files(engine: Any, folder: Path, tag: str, in_memory: bool) -> Files:
    """The files of this rank for DeepSpeed's checkpoint `tag` in `folder`; called on all ranks.

    What they hold is kept in memory, or they are written at once. One that cannot be written then raises OSError where
    it is asked for, and not here, where the other ranks wait for this one.
    """
    files: Files = {}
    with _caught_writes(engine, folder, files, in_memory):
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    return files


@contextlib.contextmanager
def _caught_writes(engine: Any, folder: Path, files: Files, in_memory: bool) -> Iterator[None]:
    writer = engine.checkpoint_engine

    def keep(state_dict: Any, path: str) -> None:
        # Serialised and not copied tensor by tensor: training then changes nothing of it, whatever it holds.
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        files[_inside(path)] = partial(_write_bytes, buffer.getbuffer())

    def write(state_dict: Any, path: str) -> None:
        try:
            torch.save(state_dict, path)
        # torch reports a failed write as a RuntimeError.
        except (OSError, RuntimeError) as error:
            files[_inside(path)] = partial(_fail, f"{path}: {str(error).splitlines()[0]}")
        else:
            files[_inside(path)] = _is_written

    def _inside(path: str) -> str:
        return Path(path).relative_to(folder).as_posix()

    writer.save = keep if in_memory else write
    # It copies scripts past the writer that gather weights from its files; model.safetensors holds them gathered.
    engine._copy_recovery_script = lambda folder: None
    try:
        yield
    finally:
        del writer.save


def gather_weights(decoder: Decoder, keep: bool) -> dict[str, torch.Tensor]:
    """A copy of the whole parameters on the CPU by name, from ZeRO-3 partitions too; empty where `keep` is false.

    Called on all ranks.
    """
    from deepspeed import zero

    weights = {}
    for name, parameter in decoder.named_parameters():
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if keep:
                weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def write_files(folder: Path, files: Files) -> list[dict[str, Any]]:
    """Write `files`, which are taken out as they are done, into `folder`; returns path, size and SHA-256 of each.

    Meant for a thread beside the training: nothing here holds Python's global lock for long. Raises OSError or
    SafetensorError where a file cannot be written.
    """
    entries = []
    for path in sorted(files):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        files.pop(path)(file)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        sync_folder(file.parent)
        entries.append({"path": path, "num_bytes": file.stat().st_size, "sha256": sha256_of_file(file)})
    return entries


def start_thread(function: Callable[[], Result]) -> "Future[Result]":
    """Call it in a thread that keeps no process from ending, unlike those of an executor."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _write_bytes(content: memoryview, file: Path) -> None:
    file.write_bytes(content)


def _is_written(file: Path) -> None:
    """Nothing is left to do."""


def _fail(reason: str, file: Path) -> None:
    raise OSError(reason)
