"""A checkpoint's files, made in memory first, so that training goes on while they are written."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from lex_pretrain.errors import JobError
from lex_pretrain.files import sha256_of_bytes, sha256_of_file, sync_folder
from lex_pretrain.model.decoder import Decoder

# What a file shall hold, by its path in the checkpoint's folder.
Files = dict[str, bytes | memoryview]


def deepspeed_files(engine: Any, folder: Path, tag: str) -> Files:
    """The files that DeepSpeed would write on this rank for its checkpoint `tag` in `folder`; called on all ranks.

    DeepSpeed makes the folder of the tag itself. Raises OSError where it cannot.
    """
    files: Files = {}
    with _caught_writes(engine, folder, files):
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    return files


@contextlib.contextmanager
def _caught_writes(engine: Any, folder: Path, files: Files) -> Iterator[None]:
    writer = engine.checkpoint_engine

    def catch(state_dict: Any, path: str) -> None:
        # Serialised and not copied tensor by tensor: training then changes nothing of it, whatever it holds.
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        files[Path(path).relative_to(folder).as_posix()] = buffer.getbuffer()

    writer.save = catch
    # It copies scripts past the writer that gather weights from its files; model.safetensors holds them gathered.
    engine._copy_recovery_script = lambda folder: None
    try:
        yield
    finally:
        del writer.save


def weights_file(decoder: Decoder, keep: bool) -> bytes | None:
    """Whole parameters by name in the safetensors format, from ZeRO-3 partitions too; None where `keep` is false.

    Called on all ranks.
    """
    from deepspeed import zero

    weights = {}
    for name, parameter in decoder.named_parameters():
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if keep:
                weights[name] = parameter.detach().cpu().clone()
    return safetensors.torch.save(weights) if keep else None


def write_files(folder: Path, files: Files) -> list[dict[str, Any]]:
    """Write `files`, which are taken out as they are done, into `folder`; returns path, size and SHA-256 of each.

    Meant for a thread beside the training: nothing here holds Python's global lock for long. Raises OSError where a
    file cannot be written, and JobError where the disk gives back something else than was written.
    """
    entries = []
    for path in sorted(files):
        content = files.pop(path)
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        sync_folder(file.parent)
        checksum = sha256_of_bytes(content)
        if sha256_of_file(file) != checksum:
            raise JobError(f"{file} reads back as something else than was written; the disk is at fault")
        entries.append({"path": path, "num_bytes": len(content), "sha256": checksum})
    return entries
