"""Files that are whole or absent: atomic writes, checksums."""

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lex_pretrain.errors import RequestError

# What `tempfile` makes of the names that `atomic_write` gives it.
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")
_SECONDS_OF_A_LEFTOVER = 3600.0


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success flush it to disk and rename it, else remove it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_temporaries(*folders: Path) -> None:
    """Remove what `atomic_write` left in folders that only this process writes to, when it was killed before."""
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`; on success its files are flushed and it is renamed, else it is removed.

    Raises RequestError when `path` is there already and not an empty folder.
    """
    path = path.resolve()
    if path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None):
        raise RequestError(f"{path} is there already and not an empty folder; remove it or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        # Of one that was killed; nobody holds the folder around, so a younger one may be in work.
        if time.time() - left.stat().st_mtime > _SECONDS_OF_A_LEFTOVER and left.is_dir():
            shutil.rmtree(left)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        sync_folder(temporary)
        temporary.chmod(0o755)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def json_bytes(value: Any, **layout: Any) -> bytes:
    """JSON as UTF-8. A file's name that is no UTF-8, which Python holds with lone surrogates, comes back from it."""
    # The replacement of a lone surrogate is what JSON itself writes for one.
    return json.dumps(value, ensure_ascii=False, **layout).encode(errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(json_bytes(value, indent=2) + b"\n")


def read_json(path: Path) -> Any:
    """Raises RequestError, naming the file, when it is missing, cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not valid JSON: {error}") from error


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """A fingerprint of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json_bytes(value, sort_keys=True)).hexdigest()
