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
    compression = None
    for suffix, known in _COMPRESSIONS.items():
        if base.endswith(suffix):
            base, compression = base.removesuffix(suffix), known
            break
    stem, dot, suffix = base.rpartition(".")
    kind = _kind_of(dot + suffix if stem else "", base)
    # Two files that are mapped into memory are never compressed.
    return None if kind is None or (kind == "indexed" and compression) else Format(kind, compression)


def _kind_of(suffix: str, base: str) -> Kind | None:
    if suffix in _KINDS:
        return _KINDS[suffix]
    suffixes, patterns = _source_names()
    if suffix in suffixes or any(fnmatch.fnmatchcase(base, pattern) for pattern in patterns):
        return "text"
    return None


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
