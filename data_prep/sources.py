"""What is meant by the inputs: each file and each `hf://` dataset once, in order, and whether it has changed since."""

from pathlib import Path
from typing import Any

from lex_pretrain.errors import RequestError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
REMOTE_PREFIX = "hf://"
# Formats that are surely not text; met in a folder they are left alone, named outright they are refused.
_BINARY_SUFFIXES = frozenset(
    f".{name}"
    for names in (
        ("npy", "npz", "model", "bin", "idx", "safetensors", "pt", "pyc"),
        ("so", "a", "o", "png", "jpg", "gif", "pdf"),
        ("zip", "gz", "zst", "xz", "bz2", "tar"),
    )
    for name in names
)


def list_sources(inputs: list[str]) -> list[str]:
    """Files and datasets meant by `inputs`, each once, sorted; folders are searched through.

    Raises RequestError for an input that does not exist, matches nothing, or holds no file.
    """
    sources: set[str] = set()
    for given in inputs:
        if given.startswith(REMOTE_PREFIX):
            sources.add(given)
        else:
            sources.update(str(file.resolve()) for file in _files(given))
    return sorted(sources)


def _files(given: str) -> list[Path]:
    path = Path(given)
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        # A Megatron dataset is both files, and its index stands for them.
        path = path.with_suffix(".idx")
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file() and _is_text(file, path)]
        if not found:
            raise RequestError(f"folder {given} holds no text file to read")
        return found
    if path.exists():
        if path.suffix != ".idx" and not _is_text(path, path.parent):
            raise RequestError(
                f"{given} is not a format that can be read: give text, .jsonl[.gz|.zst], .parquet, .csv or .idx"
            )
        return [path]
    root = Path(path.anchor or ".")
    found = [match for match in root.glob(str(path.relative_to(path.anchor))) if match.is_file()]
    if not found:
        raise RequestError(f"{given} does not exist and matches no file")
    return found


def _is_text(file: Path, root: Path) -> bool:
    """Hidden files and known binary formats are no documents."""
    if any(part.startswith(".") for part in file.relative_to(root).parts):
        return False
    return file.name.endswith(JSONL_SUFFIXES) or file.suffix not in _BINARY_SUFFIXES


def name_and_split(source: str) -> tuple[str, str]:
    """Of `hf://NAME[@SPLIT]`; the split is `train` where none is named."""
    name = source.removeprefix(REMOTE_PREFIX)
    before, at, after = name.rpartition("@")
    return (before, after) if at and not Path(name).is_dir() else (name, "train")


def stamp(source: str) -> dict[str, Any]:
    """What tells whether a source has changed since. A remote dataset is trusted to stay as it is."""
    if source.endswith(".idx"):
        files = [Path(source), Path(source).with_suffix(".bin")]
    elif not source.startswith(REMOTE_PREFIX):
        files = [Path(source)]
    elif (folder := Path(name_and_split(source)[0])).is_dir():
        files = [file for file in folder.rglob("*") if file.is_file()]
    else:
        return {"path": source}
    try:
        states = [file.stat() for file in files]
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error}") from error
    return {
        "path": source,
        "num_bytes": sum(state.st_size for state in states),
        "modified_nanoseconds": max((state.st_mtime_ns for state in states), default=0),
    }
