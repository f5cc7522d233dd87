"""Reading documents out of files and `hf://` datasets, one at a time, with what went wrong in between.

A *source* is one file or one remote dataset. Reading yields a `Document` or a `Rejection` for every record, so that
nothing is lost without a trace; a file that cannot be read at all raises RequestError.
"""

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lex_pretrain.errors import RequestError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLE_SUFFIXES = (".parquet", ".csv")
REMOTE_PREFIX = "hf://"
# Formats that are surely not text; met in a folder they are left alone, named outright they are refused.
_BINARY_SUFFIXES = (
    ".npy",
    ".model",
    ".bin",
    ".safetensors",
    ".pt",
    ".so",
    ".png",
    ".jpg",
    ".zip",
    ".gz",
    ".zst",
    ".pyc",
)


@dataclass(frozen=True)
class Document:
    """A document's text, and the record of its source that it stands in, counted from 1."""

    text: str
    record: int


@dataclass(frozen=True)
class Rejection:
    """A record that gives no document; `num_bytes` is its size as stored."""

    reason: str
    record: int
    num_bytes: int


def list_sources(inputs: list[str]) -> list[str]:
    """Files and remote datasets meant by `inputs`, each once, sorted; folders are searched through.

    Raises RequestError for an input that does not exist, matches nothing, or holds no file.
    """
    sources: set[str] = set()
    for given in inputs:
        if given.startswith(REMOTE_PREFIX):
            sources.add(given)
            continue
        path = Path(given)
        if path.is_dir():
            found = [file for file in path.rglob("*") if file.is_file() and _is_text(file, path)]
            if not found:
                raise RequestError(f"folder {given} holds no text file to read")
        elif path.exists():
            if not _is_text(path, path.parent):
                raise RequestError(
                    f"{given} is not a format that can be read: give text, .jsonl[.gz|.zst], .parquet or .csv"
                )
            found = [path]
        else:
            root = Path(path.anchor or ".")
            found = [match for match in root.glob(str(path.relative_to(path.anchor))) if match.is_file()]
            if not found:
                raise RequestError(f"{given} does not exist and matches no file")
        sources.update(str(file.resolve()) for file in found)
    return sorted(sources)


def source_size_bytes(source: str) -> int:
    """Size as stored; a remote dataset's is not known and counts as nothing."""
    return 0 if source.startswith(REMOTE_PREFIX) else Path(source).stat().st_size


def read_source(source: str, text_key: str) -> Iterator[Document | Rejection]:
    """Every record of a source. `text_key` names the text in JSON lines and tables; dots reach into nested objects."""
    if source.startswith(REMOTE_PREFIX):
        yield from _read_rows(_remote_rows(source), text_key)
        return
    path = Path(source)
    try:
        if path.name.endswith(JSONL_SUFFIXES):
            yield from _read_json_lines(path, text_key)
        elif path.suffix in TABLE_SUFFIXES:
            yield from _read_rows(_table_rows(path), text_key)
        else:
            yield _decode(path.read_bytes(), record=1)
    except (OSError, EOFError) as error:
        raise RequestError(f"{source} cannot be read: {error}") from error


def _is_text(file: Path, root: Path) -> bool:
    """Hidden files and known binary formats are no documents."""
    if any(part.startswith(".") for part in file.relative_to(root).parts):
        return False
    return file.name.endswith(JSONL_SUFFIXES) or file.suffix not in _BINARY_SUFFIXES


def _decode(data: bytes, record: int) -> Document | Rejection:
    try:
        return Document(data.decode("utf-8-sig"), record)
    except UnicodeDecodeError as error:
        return Rejection(f"not UTF-8 (byte {error.start})", record, len(data))


def _read_json_lines(path: Path, text_key: str) -> Iterator[Document | Rejection]:
    with _open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _document_of_line(line, number, text_key)


def _open_binary(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
    return path.open("rb")


def _document_of_line(line: bytes, number: int, text_key: str) -> Document | Rejection:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return Rejection(f"not UTF-8 (byte {error.start} of the line)", number, len(line))
    except ValueError:
        return Rejection("not JSON", number, len(line))
    return _document_of_row(value, number, text_key, len(line))


def _document_of_row(value: Any, number: int, text_key: str, num_bytes: int) -> Document | Rejection:
    for part in text_key.split("."):
        if not isinstance(value, dict):
            return Rejection(f"no key {text_key}", number, num_bytes)
        if part not in value:
            return Rejection(f"no key {text_key}", number, num_bytes)
        value = value[part]
    if not isinstance(value, str):
        return Rejection(f"{text_key} is not text", number, num_bytes)
    return Document(value, number)


def _read_rows(rows: Iterator[dict[str, Any]], text_key: str) -> Iterator[Document | Rejection]:
    for number, row in enumerate(rows, start=1):
        yield _document_of_row(row, number, text_key, num_bytes=0)


def _table_rows(path: Path) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        kind = path.suffix.removeprefix(".")
        yield from load_dataset(kind, data_files=str(path), split="train", streaming=True)
    except (DatasetsError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as {path.suffix}: {error}") from error


def _remote_rows(source: str) -> Iterator[dict[str, Any]]:
    """Rows of `hf://NAME[:CONFIG][@SPLIT]`, or of a local folder that `datasets` wrote, given as `hf://FOLDER`."""
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    name, _, split = source.removeprefix(REMOTE_PREFIX).partition("@")
    split = split or "train"
    try:
        if Path(name).is_dir():
            loaded = load_from_disk(name)
            yield from loaded[split] if isinstance(loaded, DatasetDict) else loaded
        else:
            name, _, config = name.partition(":")
            yield from load_dataset(name, config or None, split=split, streaming=True)
    except (DatasetsError, ValueError, OSError, KeyError) as error:
        raise RequestError(f"{source} cannot be loaded by `datasets`: {error}") from error
