"""Preparation: exact shards, a balanced account, restart, and clear words for bad input."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from data_prep.verify import verify
from lex_pretrain.data.manifest import SPLITS, Manifest
from lex_pretrain.data.shards import TokenDataset, token_dtype, tokens_file
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer
from tests.conftest import Program, make_text
from tests.preparing import digests, options, texts_of


def test_every_document_comes_back_from_exactly_one_split(corpus: Path, dataset: Path) -> None:
    found = [text for split in SPLITS for text in texts_of(dataset, split)]
    assert sorted(found) == sorted(file.read_text() for file in corpus.iterdir())
    assert all(texts_of(dataset, split) for split in SPLITS)
    assert verify(dataset, full=True) == []


def test_shards_are_plain_npy_and_end_each_document_with_eod(dataset: Path) -> None:
    manifest = Manifest.load(dataset)
    assert manifest.dtype == "uint16"
    for shard in manifest.shards:
        tokens = np.load(tokens_file(dataset, shard.stem), mmap_mode="r")
        assert tokens.dtype == np.uint16
        assert int((tokens == manifest.tokenizer.eod_id).sum()) == shard.num_documents
        assert tokens[-1] == manifest.tokenizer.eod_id


def test_windows_cross_shards(dataset: Path) -> None:
    stream = TokenDataset.open(dataset)
    assert len(stream.shards) > 2
    whole = np.concatenate([np.load(tokens_file(dataset, shard.stem)) for shard in stream.shards])
    starts = np.array([0, stream.shards[0].num_tokens - 3, len(whole) - 10])
    expected = np.stack([whole[start : start + 10] for start in starts])
    np.testing.assert_array_equal(stream.read_windows(starts, 10), expected)
    with pytest.raises(IndexError):
        stream.read(len(whole) - 3, 4)


def test_ids_are_16_bits_as_long_as_they_fit() -> None:
    assert token_dtype(65_536) is np.uint16
    assert token_dtype(65_537) is np.uint32


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    """One file is a hundred times the others, and with seven workers it is spread over all of them."""
    large = tmp_path / "large.jsonl"
    large.write_text("".join(json.dumps({"text": make_text(1000 + number, 150)}) + "\n" for number in range(150)))
    settings = PrepareOptions(vocab_size=320, validation_fraction=0.1, test_fraction=0.1, unit_bytes=20_000)
    for workers in (1, 2, 3, 7):
        prepare([str(corpus), str(large)], tmp_path / str(workers), settings, workers)
    assert len(list((tmp_path / "1" / ".units").glob("unit-*.json"))) > 14
    for workers in (2, 3, 7):
        assert digests(tmp_path / "1") == digests(tmp_path / str(workers))


@pytest.mark.slow
def test_bytes_are_the_same_under_mpiexec(corpus: Path, dataset: Path, tmp_path: Path) -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    output = tmp_path / "mpi"
    arguments = ["prepare", str(corpus), "--output", str(output), "--vocab-size", "320", "--unit-bytes", "50000"]
    arguments += ["--validation-fraction", "0.2", "--test-fraction", "0.2"]
    command = [str(mpiexec), "-n", "3", sys.executable, "-m", "lex_pretrain", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert digests(output) == digests(dataset)


# Prepares as the command would, but dies by SIGKILL at its n-th flush of a file or folder to disk: every file that
# a preparation leaves is flushed before and after its rename, so every state that can be left behind lies between two.
DYING = """
import os, signal, sys
left, flush = int(sys.argv.pop(1)), os.fsync
def flush_or_die(descriptor):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)
os.fsync = flush_or_die
from lex_pretrain.cli import main
main()
"""


@pytest.fixture
def killable(corpus: Path, dataset: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A dataset prepared in one go, and the arguments that prepare the same in `tmp_path / "broken"`."""
    again = corpus / "document-000.txt"
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": again.read_text()}) + "\n{bad\n")
    inputs = [str(corpus), str(tmp_path / "more.jsonl")]
    prepare(inputs, tmp_path / "whole", options(dataset, unit_bytes=20_000, max_rejected=0.1), 1)
    arguments = ["prepare", *inputs, "--output", str(tmp_path / "broken"), "--unit-bytes", "20000"]
    arguments += ["--tokenizer", str(dataset / "tokenizer.model"), "--max-rejected", "10%"]
    return tmp_path / "whole", [*arguments, "--validation-fraction", "0", "--test-fraction", "0"]


@pytest.mark.slow
def test_killed_between_any_two_writes_the_same_command_ends_with_the_same_bytes(
    killable: tuple[Path, list[str]], tmp_path: Path
) -> None:
    whole, arguments = killable
    random_points = random.Random(1)
    num_kills = 0
    while True:
        after = random_points.randint(1, 30)
        command = [sys.executable, "-c", DYING, str(after), *arguments, "--workers", "1"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode == 0:
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
        num_kills += 1
        assert num_kills < 40
    assert num_kills >= 4
    assert digests(tmp_path / "broken") == digests(whole)
    assert verify(tmp_path / "broken", full=True) == []


@pytest.mark.slow
def test_killed_with_its_workers_the_same_command_ends_with_the_same_bytes(
    killable: tuple[Path, list[str]], tmp_path: Path
) -> None:
    whole, arguments = killable
    command = [sys.executable, "-m", "lex_pretrain", *arguments, "--workers", "2"]
    units = tmp_path / "broken" / ".units"
    for num_finished in (1, 4, 8):
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while process.poll() is None and len(list(units.glob("unit-?????.json"))) < num_finished:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert digests(tmp_path / "broken") == digests(whole)


def test_adding_files_moves_no_document_to_another_side(corpus: Path, dataset: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (more / "a.txt").write_text(make_text(1000, 100))
    settings = options(dataset, validation_fraction=0.2, test_fraction=0.2)
    prepare([str(more), str(corpus)], tmp_path / "out", settings, 1)
    for split in ("validation", "test"):
        assert set(texts_of(dataset, split)) <= set(texts_of(tmp_path / "out", split))


def test_json_lines_of_every_packing_and_their_faults(dataset: Path, tmp_path: Path) -> None:
    good = [json.dumps({"meta": {"text": f"document {number} é"}}) for number in range(4)]
    bad = [b"{not json", b'{"meta": 3}', b'{"meta": {"text": null}}', b'["list"]', b'{"meta": {"text": "\xff"}}']
    bad += [b'{"meta": {"text": "\\ud800"}}', b'{"meta": {"text": "  \\n"}}']
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b"\n".join([good[0].encode(), *bad, good[1].encode()]))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(good[2].encode()))
    (tmp_path / "packed.jsonl.zst").write_bytes(pyarrow.compress(good[3].encode(), "zstd", asbytes=True))
    output = tmp_path / "out"
    manifest = prepare(
        [str(tmp_path / "*.jsonl*")], output, options(dataset, text_key="meta.text", max_rejected=0.9), 1
    )
    assert manifest is not None
    assert sorted(texts_of(output)) == [f"document {number} é" for number in range(4)]
    account = manifest.account
    assert account.balances()
    assert (account.read.documents, account.packed.documents) == (11, 4)
    rejected = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
    reasons = {line["record"]: line["reason"].partition(" (")[0] for line in rejected}
    assert reasons == {
        2: "not JSON",
        3: "no key meta.text",
        4: "meta.text is not text",
        5: "no key meta.text",
        6: "not UTF-8",
        7: "lone surrogate",
        8: "empty",
    }
    assert {line["source"] for line in rejected} == {str(plain)}


def test_tables_and_a_folder_that_datasets_wrote(dataset: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    texts = [f"row {number}\twith, commas\nand lines" for number in range(5)]
    rows = Dataset.from_dict({"text": texts})
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_csv(tmp_path / "rows.csv")
    rows.save_to_disk(tmp_path / "saved")
    inputs = [str(tmp_path / "rows.parquet"), str(tmp_path / "rows.csv"), f"hf://{tmp_path / 'saved'}"]
    for number, given in enumerate(inputs):
        prepare([given], tmp_path / f"out-{number}", options(dataset), 1)
        assert texts_of(tmp_path / f"out-{number}") == texts


def test_the_same_file_listed_twice_is_read_once(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder é"
    folder.mkdir()
    (folder / "one.txt").write_text("the only document")
    inputs = [str(folder), str(folder / "one.txt"), str(folder / "*.txt")]
    prepare(inputs, tmp_path / "out", options(dataset), 1)
    assert texts_of(tmp_path / "out") == ["the only document"]


def test_again_is_nothing_to_do_and_a_change_is_named(dataset: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("first")
    output = tmp_path / "out"
    first = prepare([str(source)], output, options(dataset), 1)
    assert prepare([str(source)], output, options(dataset), 1) == first
    with pytest.raises(RequestError, match="--unit-bytes was 67108864"):
        prepare([str(source)], output, options(dataset, unit_bytes=2), 1)
    source.write_text("second version")
    with pytest.raises(RequestError, match=r"in\.txt has changed"):
        prepare([str(source)], output, options(dataset), 1)


def test_bad_requests_say_what_to_do(dataset: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    undecodable = tmp_path / "latin.txt"
    undecodable.write_bytes(b"caf\xe9")
    used = tmp_path / "used"
    used.mkdir()
    (used / "something").touch()
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    cases = [
        ([str(empty)], tmp_path / "1", "holds no text file"),
        ([str(tmp_path / "missing.txt")], tmp_path / "2", "does not exist and matches no file"),
        ([str(blank)], tmp_path / "3", "no document was fit to keep"),
        ([str(undecodable)], tmp_path / "4", "100.0% of 1 records are faulty, most because: not UTF-8"),
        ([str(blank)], used, "holds something else"),
        ([str(cut)], tmp_path / "5", "cut.jsonl.gz cannot be read"),
        ([str(dataset / "tokenizer.model")], tmp_path / "6", "not a format that can be read"),
    ]
    for inputs, output, words in cases:
        with pytest.raises(RequestError) as caught:
            prepare(inputs, output, options(dataset), 1)
        assert words in str(caught.value)


def test_a_misspelt_text_key_stops_the_run(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "good"}\n' * 50)
    with pytest.raises(RequestError, match="most because: no key txet"):
        prepare([str(file)], tmp_path / "out", options(dataset, text_key="txet"), 1)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_verify_finds_damage(dataset: Path, tmp_path: Path, damage: str) -> None:
    (tmp_path / "in.txt").write_text(make_text(3, 200))
    folder = tmp_path / "out"
    prepare([str(tmp_path / "in.txt")], folder, options(dataset), 1)
    file = folder / "shard-00000.tokens.npy"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-2])
    elif damage == "remove":
        file.unlink()
    else:
        manifest = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(manifest.replace('"num_tokens": ', '"num_tokens": 1', 1))
    faults = verify(folder, full=False)
    assert len(faults) >= 1
    assert any("shard-00000" in fault or "manifest" in fault for fault in faults)


def test_two_preparations_of_one_folder_exclude_each_other(dataset: Path, tmp_path: Path) -> None:
    from lex_pretrain.folder_lock import folder_lock

    (tmp_path / "in.txt").write_text("text")
    output = tmp_path / "out"
    output.mkdir()
    with folder_lock(output, "preparation"), pytest.raises(RequestError, match="in use by another preparation"):
        prepare([str(tmp_path / "in.txt")], output, options(dataset), 1)


def test_command_prints_the_account_and_ends_with_2_on_a_bad_request(
    program: Program, corpus: Path, dataset: Path, tmp_path: Path
) -> None:
    arguments = ["prepare", corpus, "--tokenizer", dataset / "tokenizer.model", "--output", tmp_path / "out", "--json"]
    done = program(*arguments)
    assert done.returncode == 0
    assert json.loads(done.stdout)["read"]["documents"] == 120
    assert program("verify-data", tmp_path / "out").returncode == 0
    wrong = program("prepare", tmp_path / "nowhere", "--output", tmp_path / "other")
    assert wrong.returncode == 2
    assert "nowhere" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    too_large = program("prepare", corpus, "--output", tmp_path / "large", "--vocab-size", "100000")
    assert too_large.returncode == 2
    assert "the largest that works is" in too_large.stderr


def test_tokenizer_travels_with_the_dataset(dataset: Path) -> None:
    assert Tokenizer(dataset / "tokenizer.model").fingerprint == Manifest.load(dataset).tokenizer.fingerprint
