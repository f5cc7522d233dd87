"""This process's control groups for memory: they hold a container to less than its host has, and count what the kernel
ended for want of it.

Files and their meaning: Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Version:
    """Where a version of control groups keeps what: `controllers` marks its line in /proc/self/cgroup."""

    controllers: str
    folder: Path
    kills_file: str
    limit_file: str
    usage_file: str
    # In memory.stat: file contents that nobody has used lately, which make way before anything is killed.
    cache_key: str


_VERSIONS = (
    _Version("", _ROOT, "memory.events", "memory.max", "memory.current", "inactive_file"),
    _Version(
        *("memory", _ROOT / "memory", "memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)


def count_memory_kills() -> int | None:
    """Processes of this process's group that the kernel has ended for want of memory; None where nothing counts."""
    for version, folder in _groups():
        if (file := folder / version.kills_file).is_file():
            return _numbers(file)["oom_kill"]
    return None


def memory_left_bytes() -> int | None:
    """What this process's group, or one above it, still lets its processes take; None where none has a limit."""
    left = [
        int(limit) - (int(_text(folder / version.usage_file)) - _numbers(folder / "memory.stat")[version.cache_key])
        for version, folder in _groups()
        if (folder / version.limit_file).is_file() and (limit := _text(folder / version.limit_file)) != "max"
    ]
    return min(left, default=None)


def _groups() -> Iterator[tuple[_Version, Path]]:
    """The folders of this process's groups, from its own up to the root, which a container's own may seem to be."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        for version in _VERSIONS:
            if controllers == version.controllers:
                own = version.folder / group.lstrip("/")
                for folder in (own, *own.parents):
                    if folder.is_relative_to(version.folder) and folder.is_dir():
                        yield version, folder


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip()


def _numbers(file: Path) -> dict[str, int]:
    """A file with a name and a number a line."""
    return {name: int(number) for name, number in (line.split() for line in _text(file).splitlines())}
