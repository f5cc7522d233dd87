"""Inputs of every kind, and bad ones: one bad record costs that record, and is counted and located."""

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data_prep.prepare import prepare
from data_prep.readers import Document, SegmentReader
from data_prep.units import Segment, make_units
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import RequestError
from tests.conftest import make_text
from tests.preparing import options, pack, rejections_of, texts_of


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


TEXTS = [f"document {number}\n" + make_text(number, 30) for number in range(50)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8"),
        (b'{"text": "half', "not JSON"),
        (b"plain words", "not JSON"),
        (b'["text"]', "no key text"),
        (b"3", "no key text"),
        (b"null", "no key text"),
        (b'{"other": "x"}', "no key text"),
        (b'{"text": null}', "text is not text"),
        (b'{"text": 3}', "text is not text"),
        (b'{"text": "a\\ud800b"}', "lone surrogate"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"text": ""}', "empty"),
        (b'{"text": " \\n\\t"}', "empty"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_one_bad_line_costs_that_line(dataset: Path, tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(lines_of(TEXTS[:2]) + line + b"\n" + lines_of(TEXTS[2:4]))
    manifest = pack([file], tmp_path / "out", options(dataset, max_rejected=1))
    assert texts_of(tmp_path / "out") == TEXTS[:4]
    assert manifest.account.rejected[reason].documents == 1
    (rejected,) = rejections_of(tmp_path / "out")
    assert (rejected["source"], rejected["record"], rejected["reason"]) == (str(file), 3, reason)


def test_bytes_and_line_ends_of_all_kinds(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    texts = ["with\0nul", "with\r\nline ends\r", "tab\tand  spaces ", "é 🤗 \u2581 \ufeff"]
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines[:2]) + b"\r\n\r\n\n" + b"\n".join(lines[2:]))
    pack([file], tmp_path / "out", options(dataset))
    assert texts_of(tmp_path / "out") == texts
    text_file = tmp_path / "in.txt"
    text_file.write_bytes(b"\xef\xbb\xbfa BOM\r\n and CRLF\r\n\0")
    pack([text_file], tmp_path / "text", options(dataset))
    assert texts_of(tmp_path / "text") == ["a BOM\r\n and CRLF\r\n\0"]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_large_file_is_split_between_lines_and_still_numbered_through(
    dataset: Path, tmp_path: Path, end: bytes
) -> None:
    file = tmp_path / "in.jsonl"
    lines = lines_of(TEXTS).splitlines()
    for number in (7, 23, 44):
        lines[number] = b"broken" + b" " * number
    lines[30] = b""
    file.write_bytes(b"\n".join(lines) + end)
    kept = [text for number, text in enumerate(TEXTS) if number not in (7, 23, 30, 44)]
    output = tmp_path / "out"
    manifest = pack([file], output, options(dataset, unit_bytes=1500, max_rejected=1))
    assert len(manifest.shards) > 3
    assert texts_of(output) == kept
    assert [line["record"] for line in rejections_of(output)] == [8, 24, 45]
    assert manifest.account.read.documents == 49


@pytest.mark.parametrize("unit_bytes", [1, 7, 199, 200, 201, 5000])
def test_every_line_belongs_to_exactly_one_part_of_its_file(dataset: Path, tmp_path: Path, unit_bytes: int) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(lines_of(["a", "", "b" * 300, "c", "d" * 40]) + b"\n\n" + lines_of(["last"])[:-1])
    units = make_units([str(file)], unit_bytes)
    readers = [SegmentReader(segment, options(dataset)) for unit in units for segment in unit.segments]
    texts = [item.text for reader in readers for item in reader if isinstance(item, Document)]
    assert texts == ["a", "", "b" * 300, "c", "d" * 40, "last"]
    assert sum(reader.num_records for reader in readers) == 8


def test_a_stopped_preparation_lists_the_faults_it_has_seen(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"broken\n" * 3000)
    with pytest.raises(RequestError, match="faulty"):
        pack([file], tmp_path / "out", options(dataset, unit_bytes=7000))
    assert len(rejections_of(tmp_path / "out")) >= 1000


def test_files_of_documents_with_a_separator(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"one\nline\n%%\n\n%%\r\n%% is no separator\n%%\nlast")
    pack([file], tmp_path / "out", options(dataset, separator="%%"))
    assert texts_of(tmp_path / "out") == ["one\nline\n", "%% is no separator\n", "last"]
    assert [(line["record"], line["reason"]) for line in rejections_of(tmp_path / "out")] == [(2, "empty")]


def test_a_line_beyond_the_limit_is_skipped_without_being_held(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(lines_of(["before"]) + lines_of(["x " * 4_000_000]) + lines_of(["after"]))
    pack([file], tmp_path / "out", options(dataset, max_document_bytes=1_000_000, max_rejected=1))
    assert texts_of(tmp_path / "out") == ["before", "after"]
    (rejected,) = rejections_of(tmp_path / "out")
    assert (rejected["record"], rejected["reason"], rejected["bytes"]) == (2, "too long", 8_000_013)


@pytest.mark.slow
def test_a_line_of_200_megabytes_is_one_document_in_bounded_memory(dataset: Path, tmp_path: Path) -> None:
    part = "".join(make_text(number, 2000) for number in range(40))
    num_parts = 200_000_000 // len(part)
    (tmp_path / "in.jsonl").write_bytes(lines_of(["before", part * num_parts, "after"]))
    arguments = ["prepare", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--workers", "1"]
    arguments += ["--tokenizer", str(dataset / "tokenizer.model"), "--validation-fraction", "0", "--test-fraction", "0"]
    process = subprocess.Popen([sys.executable, "-m", "lex_pretrain", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    # The line, its text, and what is made of them stand in memory once each, with 2 bytes for each of 120 M tokens.
    assert usage.ru_maxrss * 1024 < 2e9
    stream = TokenDataset.open(tmp_path / "out")
    (_, start), (_, end), _ = stream.document_bounds()
    tokenizer = stream.tokenizer()
    # The part ends with a line, across which no piece of this tokenizer reaches.
    expected = np.tile(np.array(tokenizer.encode(part), dtype=np.uint16), num_parts)
    np.testing.assert_array_equal(stream.read(start, end - start), np.append(expected, tokenizer.eod_id))


def test_a_long_document_comes_back_and_unbroken_data_is_rejected(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    long = make_text(1, 500_000)
    file.write_bytes(lines_of([long, "x" * 5_000_000]))
    pack([file], tmp_path / "out", options(dataset))
    assert texts_of(tmp_path / "out") == [long]
    assert [line["reason"] for line in rejections_of(tmp_path / "out")] == ["unbroken text"]


def test_an_empty_file_gives_no_document(dataset: Path, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt", "c.csv"):
        (tmp_path / name).touch()
    (tmp_path / "d.txt").write_text("the only one")
    manifest = pack(
        [tmp_path / name for name in ("a.jsonl", "b.txt", "c.csv", "d.txt")], tmp_path / "out", options(dataset)
    )
    assert texts_of(tmp_path / "out") == ["the only one"]
    assert manifest.account.rejected["empty"].documents == 1


def damaged_files(folder: Path) -> dict[str, Path]:
    whole = lines_of(TEXTS * 20)
    files = {name: folder / name for name in ("cut.jsonl.gz", "cut.jsonl.zst", "flipped.jsonl.gz", "footer.parquet")}
    packed = gzip.compress(whole, mtime=0)
    files["cut.jsonl.gz"].write_bytes(packed[:-300])
    files["cut.jsonl.zst"].write_bytes(pyarrow.compress(whole, "zstd", asbytes=True)[:-300])
    middle = len(packed) // 2
    files["flipped.jsonl.gz"].write_bytes(packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :])
    parquet.write_table(pyarrow.table({"text": TEXTS}), files["footer.parquet"])
    data = files["footer.parquet"].read_bytes()
    files["footer.parquet"].write_bytes(data[:-10] + b"\xff" * 6 + data[-4:])
    return files


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.jsonl.zst", "flipped.jsonl.gz", "footer.parquet"])
def test_a_damaged_file_stops_the_run_unless_it_may_be_skipped(dataset: Path, tmp_path: Path, name: str) -> None:
    bad = damaged_files(tmp_path)[name]
    good = tmp_path / "good.txt"
    good.write_text("a good document")
    with pytest.raises(RequestError, match=rf"{name} cannot be read.*--skip-bad-files"):
        pack([bad, good], tmp_path / "out", options(dataset))
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = pack([bad, good], tmp_path / "out", options(dataset, skip_bad_files=True, max_rejected=1))
    assert manifest.account.rejected["unreadable file"].documents == 1
    texts = texts_of(tmp_path / "out")
    assert texts[-1] == "a good document"
    assert set(texts[:-1]) <= set(TEXTS)


def test_parquet_is_split_by_row_groups_and_reads_nested_text(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.parquet"
    rows = [{"text": text} if number != 17 else {"text": None} for number, text in enumerate(TEXTS)]
    parquet.write_table(pyarrow.table({"meta": rows, "id": list(range(50))}), file, row_group_size=5)
    assert len(make_units([str(file)], 1000)) > 3
    pack([file], tmp_path / "out", options(dataset, text_key="meta.text", unit_bytes=1000, max_rejected=1))
    assert texts_of(tmp_path / "out") == TEXTS[:17] + TEXTS[18:]
    assert [(line["record"], line["reason"]) for line in rejections_of(tmp_path / "out")] == [
        (18, "meta.text is not text")
    ]
    with pytest.raises(RequestError, match=r"100\.0% of 50 records are faulty, most because: no key words"):
        pack([file], tmp_path / "wrong", options(dataset, text_key="words"))


def test_csv_keeps_every_cell_as_text(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_bytes(b'id,text\n1,12\n2,NA\n3,"a, ""quoted""\ncell"\n4\n5,caf\xe9\n6,"last"')
    pack([file], tmp_path / "out", options(dataset, max_rejected=1))
    assert texts_of(tmp_path / "out") == ["12", "NA", 'a, "quoted"\ncell', "last"]
    found = [(line["record"], line["reason"]) for line in rejections_of(tmp_path / "out")]
    assert found == [(4, "no key text"), (5, "not UTF-8")]


def test_datasets_are_read_in_parts(dataset: Path, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    saved, files = tmp_path / "saved", tmp_path / "files"
    DatasetDict({"validation": Dataset.from_dict({"text": TEXTS})}).save_to_disk(saved)
    files.mkdir()
    for number in range(5):
        Dataset.from_dict({"text": TEXTS[10 * number : 10 * number + 10]}).to_parquet(files / f"{number}.parquet")
    for source in (f"hf://{saved}@validation", f"hf://{files}"):
        assert len(make_units([source], 2000)) >= 4
        output = tmp_path / f"out-{Path(source).name.partition('@')[0]}"
        prepare([source], output, options(dataset, unit_bytes=2000), 1)
        assert texts_of(output) == TEXTS
    with pytest.raises(RequestError, match="cannot be loaded"):
        make_units([f"hf://{saved}@missing"], 2000)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Root may read everything; give that up for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_without_permission_is_named() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        file = folder / "secret.txt"
        file.write_text("text")
        file.chmod(0)
        reader = SegmentReader(Segment(str(file), 0, None, 4), options(folder))
        with not_root(), pytest.raises(RequestError, match=r"secret\.txt cannot be read: .*Permission denied"):
            list(reader)
        file.chmod(0o644)
        with not_root():
            assert [item.text for item in reader if isinstance(item, Document)] == ["text"]
    finally:
        shutil.rmtree(folder)


def test_a_folder_in_place_of_a_file_is_named(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "folder.model").mkdir()
    with pytest.raises(RequestError, match=r"folder\.model is a folder"):
        pack([tmp_path / "in.txt"], tmp_path / "out", options(dataset, tokenizer=tmp_path / "folder.model"))
    (tmp_path / "in.jsonl").mkdir()
    with pytest.raises(RequestError, match="holds no text file"):
        pack([tmp_path / "in.jsonl"], tmp_path / "out", options(dataset))


def test_more_workers_than_documents(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the only document")
    pack([tmp_path / "in.txt"], tmp_path / "out", options(dataset), num_workers=3)
    assert texts_of(tmp_path / "out") == ["the only document"]


def test_a_full_disk_is_said_and_the_same_command_goes_on(dataset: Path, tmp_path: Path) -> None:
    """A small file system of its own, in a mount namespace that goes with the process."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(lines_of([make_text(seed, 20_000) for seed in range(20)]))
    disk = tmp_path / "disk"
    disk.mkdir()
    prepare_command = (
        f"{sys.executable} -m lex_pretrain prepare {file} --output {disk}/out --unit-bytes 100000 --workers 1 "
        f"--tokenizer {dataset}/tokenizer.model"
    )
    script = (
        f"mount -t tmpfs -o size=1m none {disk} || exit 77; {prepare_command}; echo code $?; ls -a {disk}/out >&2; "
        f"mount -o remount,size=64m {disk}; {prepare_command} --json; echo code $?"
    )
    flags = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *flags, "sh", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine lets nobody mount a file system in a namespace")
    assert f"no space is left for {disk}/out" in done.stderr
    assert "Traceback" not in done.stderr
    assert "manifest.json" not in done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("code 1", "code 0")
    assert json.loads(lines[1])["packed"]["documents"] == 20
