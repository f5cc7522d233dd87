"""What lies in a run's folder: its checkpoints by their steps, and whether one is whole.

A checkpoint lists its files in `files.json`, with their sizes and SHA-256 and a SHA-256 of the list itself. Whoever
reads one asks here first whether what it reads is what was saved. What people lay beside the checkpoints, such as
copies and notes, is none and is left alone.
"""

import os
import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json, sha256_of_file, sha256_of_json, write_json

CHECKPOINTS_FOLDER = "checkpoints"
CONFIG_FILE = "config.yaml"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.model"
STATE_FILE = "state.json"
LISTING_FILE = "files.json"
# Without these there is no checkpoint, whatever its list says.
REQUIRED_FILES = (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE)

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_LISTING_VERSION = 2


class ListedFile(BaseModel):
    """A file of a checkpoint; `path` is relative to its folder, with slashes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Listing(BaseModel):
    """The whole of `files.json`; `step` None where an older version did not write it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int | None = Field(ge=0)
    files: tuple[ListedFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def find_checkpoint(run_or_checkpoint: Path) -> Path:
    """The checkpoint folder meant: itself, or the newest of a run. RequestError when there is none."""
    if any((run_or_checkpoint / name).exists() for name in (WEIGHTS_FILE, LISTING_FILE)):
        return run_or_checkpoint
    found = step_folders(run_or_checkpoint / CHECKPOINTS_FOLDER)
    if not found:
        raise RequestError(
            f"{run_or_checkpoint} is neither a checkpoint (no {WEIGHTS_FILE} in it) nor a run with one "
            f"(no {CHECKPOINTS_FOLDER}/step-*/{WEIGHTS_FILE} in it)"
        )
    return list(found.values())[-1]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of_name(folder: Path) -> int:
    """The step in a checkpoint's name, 0 in any other; for those that do not say it themselves.

    Raises RequestError for a name that begins as a step's and is none.
    """
    if not folder.name.startswith("step-"):
        return 0
    named = _STEP_FOLDER.fullmatch(folder.name)
    if named is None:
        raise RequestError(
            f"{folder}: a checkpoint's folder is named after its step, such as step-00000100, and {folder.name!r} is "
            "not. Give it the name it had, or one that does not begin with step-"
        )
    return int(named[1])


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """The folders that have the names of checkpoints, by step, ascending, be they whole or not."""
    found = {}
    for path in checkpoints.glob("step-*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match is not None and path == step_folder(checkpoints, int(match[1])) and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def write_listing(folder: Path, entries: Iterable[dict[str, Any]], step: int) -> None:
    """Write `files.json` from the path, size and SHA-256 of each file."""
    listing = {
        "format_version": _LISTING_VERSION,
        "step": step,
        "files": sorted(entries, key=lambda entry: str(entry["path"])),
    }
    write_json(folder / LISTING_FILE, {**listing, "sha256": sha256_of_json(listing)})


def listed_file(folder: Path, path: str) -> dict[str, Any]:
    """A file's entry of the list, from what it is now."""
    file = folder / path
    return {"path": path, "num_bytes": file.stat().st_size, "sha256": sha256_of_file(file)}


def read_listing(folder: Path) -> Listing:
    """Raises RequestError when `files.json` is missing, damaged, or does not name what every checkpoint has."""
    file = folder / LISTING_FILE
    value = read_json(file)
    # A list alone is what earlier versions wrote.
    listing = {"step": None, "files": value} if isinstance(value, list) else value
    if not isinstance(listing, dict):
        raise RequestError(f"{file} is no list of files")
    if not isinstance(value, list):
        version, sha256 = listing.get("format_version"), listing.get("sha256")
        if version != _LISTING_VERSION:
            raise RequestError(f"{file} has format version {version}; this program reads {_LISTING_VERSION}")
        if sha256 != sha256_of_json({key: part for key, part in listing.items() if key != "sha256"}):
            raise RequestError(f"{file} has changed (its own SHA-256 differs)")
        listing = {"step": listing.get("step"), "files": listing.get("files")}
    try:
        found = Listing.model_validate(listing)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise RequestError(f"{file} is damaged at {where}: {error.errors()[0]['msg']}") from error
    paths = [entry.path for entry in found.files]
    outside = [path for path in paths if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts]
    if outside or len(set(paths)) != len(paths):
        raise RequestError(f"{file} names {outside[0] if outside else 'a file twice'}")
    if missing := [name for name in REQUIRED_FILES if name not in paths]:
        raise RequestError(f"{file} does not name {', '.join(missing)}, which every checkpoint has")
    return found


def faults_of(
    folder: Path, only: Collection[str] | None = None, part: int = 0, num_parts: int = 1, any_name: bool = False
) -> list[str]:
    """What is wrong with a checkpoint's files: all of them, those that `only` names, or one of so many parts of them.

    A folder with a step's name must hold that step's checkpoint, unless `any_name`. Files are read in parallel.
    """
    try:
        listing = read_listing(folder)
    except RequestError as error:
        return [str(error)]
    named = _STEP_FOLDER.fullmatch(folder.name)
    if named and listing.step is not None and int(named[1]) != listing.step and not any_name:
        return [f"it holds the checkpoint of step {listing.step}, and its name is that of step {int(named[1])}"]
    wanted = [entry for entry in listing.files if only is None or entry.path in only]
    faults = [] if only is None else [f"{name} is not listed" for name in only if name not in {e.path for e in wanted}]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda entry: _fault_of(folder, entry), wanted[part::num_parts])
        return faults + [fault for fault in found if fault is not None]


def _fault_of(folder: Path, entry: ListedFile) -> str | None:
    file = folder / entry.path
    try:
        if not file.is_file():
            return f"{entry.path} is missing"
        if file.stat().st_size != entry.num_bytes:
            return f"{entry.path} has {file.stat().st_size} bytes, not {entry.num_bytes}"
        return None if sha256_of_file(file) == entry.sha256 else f"{entry.path} has changed (SHA-256 differs)"
    except OSError as error:
        return f"{entry.path} cannot be read: {error}"
