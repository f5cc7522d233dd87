"""What a file is, by its name alone: the kind of its records, and how it is compressed."""

import fnmatch
import functools
from dataclasses import dataclass
from typing import Literal

Kind = Literal["json lines", "json", "parquet", "csv", "tsv", "indexed", "text"]
Compression = Literal["gz", "zst", "bz2", "xz"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".idx": "indexed",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
# Prose that the list of source files below does not know.
_MORE_TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".log", ".srt", ".vtt"})
# What `--help` and errors say of the above.
READABLE = ".jsonl, .ndjson, .json, .parquet, .csv, .tsv, .txt, .md and source text, each plain or .gz, .zst, .bz2, .xz"


@dataclass(frozen=True)
class Format:
    """How a file is to be read."""

    kind: Kind
    compression: Compression | None = None


def format_of(name: str) -> Format | None:
    """The format that a file's name, in any case, says; None where it says none that can be read."""
    base = name.rpartition("/")[2].lower()
    stem, *suffixes = base.rsplit(".", 2)
    if found := _format_of_suffixes("." + ".".join(suffixes) if stem or len(suffixes) > 1 else ""):
        return found
    plain, compression = _without_compression(base)
    is_text = any(fnmatch.fnmatchcase(plain, pattern) for pattern in _source_names()[1])
    return Format("text", compression) if is_text else None


@functools.lru_cache(maxsize=1024)
def _format_of_suffixes(suffixes: str) -> Format | None:
    """By the last one or two suffixes; remembered, for a folder of many files has few."""
    plain, compression = _without_compression(suffixes)
    last = "." + plain.rpartition(".")[2] if plain else ""
    kind = _KINDS.get(last) or ("text" if last in _source_names()[0] else None)
    # Two files that are mapped into memory are never compressed.
    return None if kind is None or (kind == "indexed" and compression) else Format(kind, compression)


def _without_compression(name: str) -> tuple[str, Compression | None]:
    for suffix, compression in _COMPRESSIONS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), compression
    return name, None


@functools.cache
def _source_names() -> tuple[frozenset[str], tuple[str, ...]]:
    """Suffixes of source files, and patterns of names without one such as `makefile`, as Pygments knows them."""
    from pygments.lexers import get_all_lexers

    suffixes, patterns = set(_MORE_TEXT_SUFFIXES), []
    for name, _, filenames, _ in get_all_lexers():
        if "json" in name.lower():
            # A relative of JSON is data: its text stands under some key, and packing it raw would be wrong.
            continue
        for filename in filenames:
            pattern = filename.lower()
            if pattern.startswith("*.") and not set(pattern[2:]) & set("*?[."):
                suffixes.add(pattern[1:])
            else:
                patterns.append(pattern)
    return frozenset(suffixes), tuple(patterns)
