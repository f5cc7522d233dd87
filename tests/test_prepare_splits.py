"""Few documents: no split that was asked for stays empty unsaid, and content alone decides the sides."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from data_prep.splits import filling_fractions
from data_prep.verify import verify
from lex_pretrain.data.manifest import SPLITS, Manifest
from tests.conftest import Program, make_text
from tests.preparing import digests, options, pack, texts_of

fractions = st.one_of(st.just(0.0), st.floats(0.0001, 0.45))


@given(st.sets(st.integers(0, 2**30 - 1), min_size=1, max_size=40), fractions, fractions)
def test_every_split_gets_a_document_and_no_more_than_needed_moves(
    numbers: set[int], validation: float, test: float
) -> None:
    places = np.unique(np.array(sorted(numbers), dtype=np.float64) / 2**30)
    found_validation, found_test = filling_fractions(places, validation, test)
    sides = np.where(places < found_test, 2, np.where(places < found_test + found_validation, 1, 0))
    counts = {side: int((sides == side).sum()) for side in (0, 1, 2)}
    asked = [0, *([1] if validation else []), *([2] if test else [])]
    assert (found_validation > 0, found_test > 0) <= (validation > 0, test > 0)
    if len(places) >= len(asked):
        assert all(counts[side] for side in asked)
    assert counts[0] >= 1
    # Where no split was empty, nothing moves.
    before = np.where(places < test, 2, np.where(places < test + validation, 1, 0))
    if set(asked) <= set(before.tolist()):
        assert (found_validation, found_test) == (pytest.approx(validation), test)
    # A split that had more than enough for all gets none from another, and gives as few as fill the empty ones.
    assert int((before != sides).sum()) <= 2


def write_books(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"book-{number:02d}.txt").write_text(make_text(number, 300))
    return folder


@pytest.mark.parametrize("count", [3, 4, 17, 20])
def test_a_few_books_fill_the_splits_that_are_there_by_default(dataset: Path, tmp_path: Path, count: int) -> None:
    books = write_books(tmp_path / "in", count)
    settings = PrepareOptions(tokenizer=dataset / "tokenizer.model", unit_bytes=1500)
    manifest = pack([books], tmp_path / "out", settings)
    found = {split: texts_of(tmp_path / "out", split) for split in SPLITS}
    assert all(found.values())
    assert sorted(text for texts in found.values() for text in texts) == sorted(f.read_text() for f in books.iterdir())
    assert verify(tmp_path / "out", full=True) == []
    # The fractions that the manifest records, given for a corpus that has grown, leave every document where it was.
    more = write_books(tmp_path / "more", count + 30)
    kept = {key: manifest.config[key] for key in ("validation_fraction", "test_fraction")}
    pack([more], tmp_path / "grown", options(dataset, **kept))
    for split in ("validation", "test"):
        assert set(found[split]) <= set(texts_of(tmp_path / "grown", split))
    assert not set(found["train"]) & {
        *texts_of(tmp_path / "grown", "test"),
        *texts_of(tmp_path / "grown", "validation"),
    }


def test_workers_and_a_stop_change_nothing(dataset: Path, tmp_path: Path) -> None:
    books = write_books(tmp_path / "in", 9)
    (books / "again.txt").write_text((books / "book-03.txt").read_text())
    settings = PrepareOptions(tokenizer=dataset / "tokenizer.model", unit_bytes=1500)
    pack([books], tmp_path / "one", settings)
    pack([books], tmp_path / "two", settings, num_workers=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    # As if killed after packing anew and before the manifest: the fractions that were found are kept.
    (tmp_path / "two" / "manifest.json").unlink()
    value = json.loads((tmp_path / "two" / "prepare.json").read_text())
    assert value["run"]["num_units_reused"] == 0
    decided = {key: Manifest.load(tmp_path / "one").config[key] for key in ("validation_fraction", "test_fraction")}
    (tmp_path / "two" / "prepare.json").write_text(json.dumps({"job": value["job"], "fractions": decided}))
    pack([books], tmp_path / "two", settings)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    run = json.loads((tmp_path / "two" / "prepare.json").read_text())["run"]
    assert run["num_units_reused"] == run["num_units"]


@pytest.mark.parametrize(("count", "empty"), [(1, ["validation", "test"]), (2, ["test"])])
def test_fewer_documents_than_splits_is_said_with_the_option(
    program: Program, dataset: Path, tmp_path: Path, count: int, empty: list[str]
) -> None:
    write_books(tmp_path / "in", count)
    done = program("prepare", "in", "--output", "out", "--tokenizer", dataset / "tokenizer.model", "--workers", "1")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    for split in empty:
        assert f"{count} document{'s' if count > 1 else ''} cannot fill 3 splits, so the {split} split" in said
        assert f"--{split}-fraction 0" in said
    assert sorted({shard.split for shard in Manifest.load(tmp_path / "out").shards}) == sorted({*SPLITS} - {*empty})


def test_a_moved_fraction_is_said_with_the_one_to_keep(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    books = write_books(tmp_path / "in", 5)
    manifest = prepare([str(books)], tmp_path / "out", PrepareOptions(tokenizer=dataset / "tokenizer.model"), 1)
    assert manifest is not None
    for split in ("validation", "test"):
        fraction = manifest.config[f"{split}_fraction"]
        assert fraction > 0.005
        assert f"Give --{split}-fraction {fraction} yourself when the corpus grows" in caplog.text
