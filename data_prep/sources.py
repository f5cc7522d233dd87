"""What is meant by the inputs: each file and each `hf://` dataset once, in order, and what is left out, with why.

Names stay strings here, for a folder may hold a hundred thousand of them and pathlib takes several microseconds each.
"""

import errno
import fnmatch
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_prep.formats import READABLE, Format, format_of
from lex_pretrain.data.manifest import MANIFEST_FILE, Skipped
from lex_pretrain.data.origins import UNITS_FOLDER
from lex_pretrain.data.shards import TOKENIZER_FILE
from lex_pretrain.errors import RequestError

REMOTE_PREFIX = "hf://"
OnUnknown = Literal["error", "skip"]

_HIDDEN = "hidden"
_BACKUP = "an editor's backup"
_DATASET = "a prepared dataset"
_UNKNOWN = "unknown format"
_BROKEN_LINK = "a link that leads nowhere"
_NO_FILE = "no regular file"
# Left out without being asked, for nobody means them by a folder or a pattern; all others are for the user to decide.
_LEFT_OUT_UNASKED = frozenset({_HIDDEN, _BACKUP, _DATASET})
_SHOWN_PATHS = 5


@dataclass(frozen=True)
class Sources:
    """Absolute names of files, links in them left as they are, and `hf://` names, sorted; and what is not read."""

    paths: list[str]
    skipped: list[Skipped]


def list_sources(inputs: list[str], on_unknown: OnUnknown = "error", output: Path | None = None) -> Sources:
    """Files and datasets meant by `inputs`, each once by the file that it leads to; folders are searched through.

    A folder that was prepared, `output` among them, is no input. Raises RequestError for an input that does not exist,
    matches nothing or holds no file to read, and with `on_unknown` "error" where a name does not say what a file is.
    """
    search = _Search(os.path.realpath(output) if output is not None else None)
    for given in inputs:
        search.add(given)
    # A blob of a download cache may lie beside the links that name it properly; it is read by those.
    read = {real for real, _ in search.found}
    skipped = [entry for real, entry in search.skipped.items() if real not in read]
    unknown = [entry for entry in skipped if entry.reason not in _LEFT_OUT_UNASKED]
    if unknown and on_unknown == "error":
        raise RequestError(
            f"{_listed(unknown)}: not a format that can be read, by the name; names end in {READABLE}. "
            "Rename or link such files, leave them out of the inputs, or go on without them by --on-unknown skip"
        )
    if not search.found:
        raise RequestError(f"{' '.join(inputs)} holds no text file to read; left out: {_listed(skipped)}")
    return Sources(sorted(search.found.values()), sorted(skipped, key=lambda entry: entry.path))


def _listed(skipped: list[Skipped]) -> str:
    shown = ", ".join(f"{entry.path} ({entry.reason})" for entry in skipped[:_SHOWN_PATHS])
    return shown + (f" and {len(skipped) - _SHOWN_PATHS:,} more" if len(skipped) > _SHOWN_PATHS else "")


@dataclass
class _Search:
    """Files by where they really are and what their names say, so that none is met twice, whatever links lead to it."""

    output: str | None
    found: dict[tuple[str, Format | None], str] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    _folders: set[str] = field(default_factory=set)
    _num_met: int = 0

    def add(self, given: str) -> None:
        """All that is meant by one input; RequestError where that is nothing."""
        if given.startswith(REMOTE_PREFIX):
            self.found[given, None] = given
            return
        path = os.path.abspath(given)
        matches = [path] if os.path.lexists(path) else list(_matches(given))
        if not matches:
            raise RequestError(f"{given} does not exist and matches no file")
        before = self._num_met
        for match in matches:
            real = os.path.realpath(match)
            self._add(match, real, os.path.isdir(real))
        if self._num_met == before:
            raise RequestError(f"folder {given} holds no text file to read")

    def _add(self, path: str, real: str, is_folder: bool, is_file: bool = False) -> None:
        """`is_file` is true where that is known already of a regular file."""
        if not is_folder:
            self._add_file(path, real, is_file)
        elif real == self.output:
            self._num_met += 1
        elif self._is_dataset(real):
            self._skip(path, real, _DATASET)
        else:
            self._add_folder(path, real)

    def _add_folder(self, path: str, real: str) -> None:
        """Every file below, through links too; a folder that was searched before, as in a loop of links, is not."""
        if real in self._folders:
            self._num_met += 1
            return
        self._folders.add(real)
        for entry in _entries(path):
            is_link = entry.is_symlink()
            real_entry = os.path.realpath(entry.path) if is_link else os.path.join(real, entry.name)
            if entry.name.startswith("."):
                self._skip(entry.path, real_entry, _HIDDEN)
            else:
                is_folder = os.path.isdir(real_entry) if is_link else entry.is_dir()
                self._add(entry.path, real_entry, is_folder, is_file=not is_link and entry.is_file())

    def _add_file(self, path: str, real: str, is_file: bool) -> None:
        if path.lower().endswith(".bin") and os.path.isfile(index := path[: -len(".bin")] + ".idx"):
            # A Megatron dataset is both files, and its index stands for them.
            path, real = index, os.path.realpath(index)
        name = os.path.basename(path)
        if name.endswith("~") or (name.startswith("#") and name.endswith("#")):
            self._skip(path, real, _BACKUP)
            return
        try:
            is_regular = is_file or stat.S_ISREG(os.stat(path).st_mode)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                raise RequestError(f"{path} cannot be read: {error}") from error
            self._skip(path, real, _BROKEN_LINK)
            return
        form = format_of(path)
        if not is_regular or form is None:
            self._skip(path, real, _UNKNOWN if is_regular else _NO_FILE)
            return
        self._num_met += 1
        # Of several names the shortest, so that neither the order of the inputs nor a way around decides.
        other = self.found.get((real, form))
        if other is None or (len(path), path) < (len(other), other):
            self.found[real, form] = path

    def _skip(self, path: str, real: str, reason: str) -> None:
        self._num_met += 1
        self.skipped.setdefault(real, Skipped(path=path, reason=reason))

    def _is_dataset(self, real: str) -> bool:
        """Whether a preparation wrote the folder, or began to."""
        return os.path.isdir(os.path.join(real, UNITS_FOLDER)) or all(
            os.path.isfile(os.path.join(real, name)) for name in (MANIFEST_FILE, TOKENIZER_FILE)
        )


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    """What a folder holds, by name: what lies in it itself, then what links lead to."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
    except OSError as error:
        raise RequestError(f"folder {folder} cannot be read: {error}") from error


def _matches(pattern: str) -> Iterator[str]:
    """Absolute paths that a shell's pattern matches, `**` any folders; hidden ones only where it names the dot."""
    path = Path(pattern)
    start, parts = (path.anchor, path.parts[1:]) if path.anchor else (str(Path.cwd()), path.parts)
    return map(os.path.abspath, _match_parts(start, parts, set()))


def _match_parts(folder: str, parts: tuple[str, ...], searched: set[tuple[int, str]]) -> Iterator[str]:
    """Paths below `folder` that match; `searched` keeps `**` from going round in a loop of links."""
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if not set(part) & set("*?["):
        path = os.path.join(folder, part)
        if os.path.lexists(path) and (not rest or os.path.isdir(path)):
            yield from _match_parts(path, rest, searched)
        return
    if part == "**":
        place = len(parts), os.path.realpath(folder)
        if place in searched:
            return
        searched.add(place)
        yield from _match_parts(folder, rest or ("*",), searched)
    for entry in _entries(folder):
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        if part == "**":
            if os.path.isdir(entry.path):
                yield from _match_parts(entry.path, parts, searched)
        elif fnmatch.fnmatchcase(entry.name, part) and (not rest or os.path.isdir(entry.path)):
            yield from _match_parts(entry.path, rest, searched)


def name_and_split(source: str) -> tuple[str, str]:
    """Of `hf://NAME[@SPLIT]`; the split is `train` where none is named."""
    name = source.removeprefix(REMOTE_PREFIX)
    before, at, after = name.rpartition("@")
    return (before, after) if at and not Path(name).is_dir() else (name, "train")


class FileState(NamedTuple):
    """What changes when a file is written to, cut short, or replaced."""

    num_bytes: int
    modified_nanoseconds: int
    inode: int


States = dict[str, tuple[FileState, ...]]


def states_of(source: str) -> tuple[FileState, ...]:
    """The state of each file of a source, none of a remote dataset, which is trusted to stay as it is.

    Raises RequestError when one is gone.
    """
    files = [source]
    if source.startswith(REMOTE_PREFIX):
        folder = Path(name_and_split(source)[0])
        files = sorted(str(file) for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
    elif source.lower().endswith(".idx"):
        files = [source, source[: -len(".idx")] + ".bin"]
    try:
        found = [os.stat(file) for file in files]
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error}") from error
    return tuple([FileState(state.st_size, state.st_mtime_ns, state.st_ino) for state in found])


def stamp(source: str, states: tuple[FileState, ...]) -> dict[str, Any]:
    """What tells whether a source has changed since a preparation was begun, perhaps on another host."""
    if source.startswith(REMOTE_PREFIX) and not Path(name_and_split(source)[0]).is_dir():
        return {"path": source}
    return {
        "path": source,
        "num_bytes": sum(state.num_bytes for state in states),
        "modified_nanoseconds": max((state.modified_nanoseconds for state in states), default=0),
    }
