"""One job at a time in a folder, on one host or on several that share it.

The system's lock on `.lock` is freed with the process that holds it, however that ends. Between hosts it may not hold:
some shared file systems keep it from each other's hosts. So the holder also says in `.lock.json` who it is, and touches
that file every few seconds; another host looks whether it is still being touched.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lex_pretrain.errors import RequestError
from lex_pretrain.files import write_json
from lex_pretrain.progress import logger

LOCK_FILES = (".lock", ".lock.json")
SECONDS_BETWEEN_SIGNS = 10.0
# A holder that gives no sign for so long has ended.
SECONDS_UNTIL_STALE = 25.0


@contextlib.contextmanager
def folder_lock(folder: Path, what: str, patience_seconds: float = 0.0) -> Iterator[None]:
    """Hold `folder`, which exists, for this process, which is a `what`.

    Raises RequestError, naming host and process of the holder, when another has not left it after `patience_seconds`;
    where the last holder was on another host, it may take `SECONDS_UNTIL_STALE` to see whether that is still there.
    """
    lock, owner_file = (folder / name for name in LOCK_FILES)
    file_lock = FileLock(lock)
    try:
        file_lock.acquire(timeout=patience_seconds)
    except Timeout:
        raise _in_use(folder, what, _read_owner(owner_file)) from None
    try:
        owner = _read_owner(owner_file)
        if owner is not None and owner.get("host") != socket.gethostname() and _gives_signs(owner_file):
            raise _in_use(folder, what, owner)
        if owner is not None:
            logger.info("%s was left by %s, which ended without giving it back", folder, _described(owner))
        write_json(owner_file, {"host": socket.gethostname(), "process_id": os.getpid(), "what": what})
        ended = threading.Event()
        threading.Thread(target=_give_signs, args=(owner_file, ended), name="folder lock", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                owner_file.unlink()
    finally:
        file_lock.release()


def _in_use(folder: Path, what: str, owner: dict[str, Any] | None) -> RequestError:
    who = f" ({_described(owner)})" if owner is not None else ""
    return RequestError(
        f"{folder} is in use by another {what} that is still running{who}; wait for it or choose another folder"
    )


def _described(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process_id', 'unknown')} on {owner.get('host', 'an unknown host')}"


def _read_owner(owner_file: Path) -> dict[str, Any] | None:
    """What the holder said of itself; nothing where none did, {} where that is damaged."""
    try:
        owner = json.loads(owner_file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _gives_signs(owner_file: Path) -> bool:
    """Whether another host still touches its file. Looked at for changes alone, for clocks of hosts may differ."""
    try:
        before = owner_file.stat().st_mtime_ns
        deadline = time.monotonic() + SECONDS_UNTIL_STALE
        while time.monotonic() < deadline:
            time.sleep(min(0.5, SECONDS_UNTIL_STALE / 10))
            if owner_file.stat().st_mtime_ns != before:
                return True
    except FileNotFoundError:
        return False
    return False


def _give_signs(owner_file: Path, ended: threading.Event) -> None:
    while not ended.wait(SECONDS_BETWEEN_SIGNS):
        with contextlib.suppress(OSError):
            os.utime(owner_file)
