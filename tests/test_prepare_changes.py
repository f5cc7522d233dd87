"""Files that change while they are read: noticed by name, and never part of a shard. And what is read how often."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.readers import ChangedFileError, SegmentReader
from data_prep.units import MAX_UNIT_SEGMENTS, Unit, make_units
from lex_pretrain.errors import RequestError
from tests.conftest import make_text
from tests.preparing import options, pack, texts_of


def lines_of(count: int, num_words: int = 20) -> str:
    return "".join(json.dumps({"text": f"{number} " + make_text(number, num_words)}) + "\n" for number in range(count))


def append(file: Path) -> None:
    with file.open("a") as opened:
        opened.write(lines_of(1))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace(file: Path) -> None:
    """Another file of the same size and time, as an editor or a download leaves it."""
    state = file.stat()
    other = file.with_name("other")
    other.write_bytes(file.read_bytes().swapcase())
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.rename(file)


def rewrite(file: Path) -> None:
    """In place, of the same size."""
    with file.open("r+b") as opened:
        opened.write(b" ")


CHANGES = [append, truncate, replace, rewrite, Path.unlink]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv", "in.json"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_file_that_changes_is_an_error_that_names_it(
    dataset: Path, tmp_path: Path, name: str, change: Callable[[Path], None], after: int
) -> None:
    """Changed between planning and reading, and while it is read; skipping bad files must not hide it."""
    file = tmp_path / name
    file.write_text("text\n" + "words\n" * 2000 if name == "in.csv" else lines_of(200))
    (unit,) = make_units([str(file)], 2**20)
    reader = iter(SegmentReader(unit.segments[0], options(dataset, skip_bad_files=True)))
    for _ in range(after):
        next(reader)
    change(file)
    with pytest.raises(ChangedFileError, match=re.escape(str(file))):
        list(reader)


def test_a_change_between_listing_and_reading_leaves_no_shard(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(lines_of(600))
    real = make_units

    def planned_then_cut(*planned: Any) -> list[Unit]:
        units = real(*planned)
        truncate(file)
        return units

    monkeypatch.setattr("data_prep.prepare.make_units", planned_then_cut)
    with pytest.raises(ChangedFileError, match=r"in\.jsonl"):
        pack([file], tmp_path / "out", options(dataset, skip_bad_files=True, max_rejected=1))
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert list((tmp_path / "out" / ".units").glob("unit-*.json")) == []
    monkeypatch.undo()
    # Nothing was packed, so the same command begins anew with the file as it is now.
    with pytest.raises(RequestError, match="records are faulty"):
        pack([file], tmp_path / "out", options(dataset, max_rejected=0))
    pack([file], tmp_path / "out", options(dataset, max_rejected=1))
    assert 200 < len(texts_of(tmp_path / "out")) < 400


@pytest.mark.parametrize("num_words", [10, 3000, 60_000])
def test_the_bytes_of_a_file_in_many_units_are_read_hardly_more_than_once(
    dataset: Path, tmp_path: Path, num_words: int
) -> None:
    """By the system's own count, in a process of its own; lines from a hundredth of a unit to ten of them."""
    file = tmp_path / "in.jsonl"
    file.write_text(lines_of(6_000_000 // (5 * num_words), num_words))
    code = f"""
from pathlib import Path
from data_prep.options import PrepareOptions
from data_prep.readers import SegmentReader
from data_prep.units import make_units
def num_read():
    return int(Path("/proc/self/io").read_text().split()[1])
options = PrepareOptions(tokenizer={str(dataset / "tokenizer.model")!r})
make_units([{str(file)!r}], 10**9)
before = num_read()
units = make_units([{str(file)!r}], 32768)
num_records = 0
for unit in units:
    for segment in unit.segments:
        num_records += sum(1 for _ in SegmentReader(segment, options))
print(len(units), num_records, num_read() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    num_units, num_records, num_bytes = map(int, done.stdout.split())
    assert num_records == len(file.read_text().splitlines())
    assert num_units > (1 if num_words > 10_000 else 50)
    assert num_bytes < 1.1 * file.stat().st_size + 10_000


def test_many_small_files_are_spread_over_units(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    count = 2 * MAX_UNIT_SEGMENTS + 10
    files = [folder / f"{number:05d}.txt" for number in range(count)]
    for number, file in enumerate(files):
        file.write_text(f"text number {number}")
    units = make_units([str(file) for file in files], 2**26)
    assert [len(unit.segments) for unit in units] == [MAX_UNIT_SEGMENTS, MAX_UNIT_SEGMENTS, 10]
    assert [segment.source for unit in units for segment in unit.segments] == [str(file) for file in files]
    pack([folder], tmp_path / "out", options(dataset), num_workers=2)
    assert texts_of(tmp_path / "out") == [f"text number {number}" for number in range(count)]
