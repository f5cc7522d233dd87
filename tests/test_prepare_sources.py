"""What is meant by the inputs: every file is what its name says, read once, or left out by name."""

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.formats import Format, format_of
from data_prep.sources import list_sources
from lex_pretrain.data.manifest import Manifest
from lex_pretrain.errors import RequestError
from tests.conftest import Program, make_text
from tests.preparing import options, pack, rejections_of, texts_of

TEXTS = [f"document {number}\n" + make_text(number, 30) for number in range(6)]
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


def json_lines() -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def table(delimiter: str) -> bytes:
    quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    return "".join(f"{number}{delimiter}{text}\n" for number, text in enumerate(quoted)).encode()


def parquet_bytes() -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": TEXTS}), sink)
    return sink.getvalue().to_pybytes()


CONTENTS: dict[str, bytes] = {
    ".jsonl": json_lines(),
    ".ndjson": json_lines(),
    ".json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "-lines.json": b"\n" + json_lines(),
    "-values.json": "\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS).encode(),
    ".csv": b"id,text\n" + table(","),
    ".tsv": b"id\ttext\n" + table("\t"),
    ".parquet": parquet_bytes(),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("ending", CONTENTS)
def test_records_of_every_format_and_compression(dataset: Path, tmp_path: Path, ending: str, compression: str) -> None:
    """In a folder, in upper case, behind a link whose own end has no suffix: the given name is what counts."""
    blob = tmp_path / "blobs" / "3f2a9c"
    blob.parent.mkdir()
    blob.write_bytes(COMPRESSIONS[compression](CONTENTS[ending]))
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / f"part{ending}{compression}".upper()).symlink_to(blob)
    pack([folder], tmp_path / "out", options(dataset))
    assert texts_of(tmp_path / "out") == TEXTS


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", ["a.txt", "A.MD", "a.py", "Makefile", "a.tex"])
def test_text_of_every_kind_whole_and_with_a_separator(
    dataset: Path, tmp_path: Path, name: str, compression: str
) -> None:
    file = tmp_path / f"{name}{compression}"
    file.write_bytes(COMPRESSIONS[compression](b"one\n%%\ntwo\n"))
    pack([file], tmp_path / "whole", options(dataset))
    assert texts_of(tmp_path / "whole") == ["one\n%%\ntwo\n"]
    pack([file], tmp_path / "parts", options(dataset, separator="%%"))
    assert texts_of(tmp_path / "parts") == ["one\n", "two\n"]


@pytest.mark.parametrize(
    "name",
    ["picture.png", "notes", "data.npy", "x.tar.gz", "x.gz", "x.jsonld", "x.ipynb", ".txt", "x.idx.gz", "x.jsonl.lz4"],
)
def test_names_that_say_no_format(name: str) -> None:
    assert format_of(f"folder.txt/{name}") is None


def test_names_that_say_a_format() -> None:
    assert format_of("X.JSONL.GZ") == Format("json lines", "gz")
    assert format_of("a.b.json") == Format("json")
    assert format_of("data.idx") == Format("indexed")


def write(file: Path, text: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_what_no_name_explains_stops_the_run_or_is_left_out_by_name(
    dataset: Path, tmp_path: Path, program: Program
) -> None:
    write(tmp_path / "in" / "good.txt", "a good document")
    write(tmp_path / "in" / "sub" / "notes")
    write(tmp_path / "in" / "picture.png")
    (tmp_path / "in" / "lost.txt").symlink_to("nowhere.txt")
    (tmp_path / "in" / "self.txt").symlink_to("self.txt")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    arguments = ["prepare", "in", "--output", "out", "--tokenizer", dataset / "tokenizer.model", "--workers", "1"]
    refused = program(*arguments)
    assert refused.returncode == 2
    for words in ("sub/notes (unknown format)", "picture.png", "pipe.txt (no regular file)", "--on-unknown skip"):
        assert words in refused.stderr
    assert not (tmp_path / "out").exists()
    done = program(*arguments, "--on-unknown", "skip")
    assert done.returncode == 0, done.stderr
    assert "not read: unknown format" in done.stderr
    skipped = {Path(entry.path).name: entry.reason for entry in Manifest.load(tmp_path / "out").skipped}
    assert skipped == {
        "notes": "unknown format",
        "picture.png": "unknown format",
        "lost.txt": "a link that leads nowhere",
        "self.txt": "a link that leads nowhere",
        "pipe.txt": "no regular file",
    }
    assert texts_of(tmp_path / "out") == ["a good document"]
    assert program(*arguments, "--on-unknown", "maybe").returncode == 2
    alone = program("prepare", "in/picture.png", "--output", "other", "--on-unknown", "skip")
    assert alone.returncode == 2
    assert "picture.png (unknown format)" in alone.stderr


def names(folder: Path, *inputs: str) -> list[str]:
    found = list_sources([str(folder / given) for given in inputs], on_unknown="skip")
    return [str(Path(path).relative_to(folder)) for path in found.paths]


def test_hidden_files_and_backups_are_left_out_by_folders_and_patterns_alike(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", ".git/c.txt", "d.txt~", "#e.txt#", ".f.txt.swp", "sub/g.txt", "sub/.h.txt"):
        write(tmp_path / name)
    for given in (".", "**", "**/*", "*"):
        assert names(tmp_path, given) == ["a.txt", "sub/g.txt"], given
    assert names(tmp_path, "*.txt") == ["a.txt"]
    assert names(tmp_path, "**/*.txt") == ["a.txt", "sub/g.txt"]
    # Named outright, a hidden file is meant.
    assert names(tmp_path, ".b.txt", "sub/.*.txt") == [".b.txt", "sub/.h.txt"]
    found = list_sources([str(tmp_path)])
    assert [(Path(entry.path).name, entry.reason) for entry in found.skipped] == [
        ("#e.txt#", "an editor's backup"),
        (".b.txt", "hidden"),
        (".f.txt.swp", "hidden"),
        (".git", "hidden"),
        ("d.txt~", "an editor's backup"),
        (".h.txt", "hidden"),
    ]


def test_links_are_followed_each_file_is_read_once_and_loops_end(tmp_path: Path) -> None:
    write(tmp_path / "in" / "near.txt")
    write(tmp_path / "elsewhere" / "far.txt")
    write(tmp_path / "elsewhere" / "deep" / "deeper.txt")
    (tmp_path / "in" / "more").symlink_to("../elsewhere")
    (tmp_path / "in" / "again").symlink_to("../elsewhere/deep")
    (tmp_path / "in" / "twice.txt").symlink_to("near.txt")
    for number in range(30):
        # Without care, a pattern would try every order in which thirty loops can be gone through.
        (tmp_path / "elsewhere" / f"loop{number}").symlink_to("../in")
    for given in (["in"], ["in/**/*.txt"], ["in/**"], ["in", "in/more/deep", "in/*.txt"], ["in/*"]):
        found = names(tmp_path, *given)
        assert [name for name in found if "near" in name] == ["in/near.txt"]
        assert sorted(Path(name).name for name in found) == ["deeper.txt", "far.txt", "near.txt"], given


def test_a_blob_is_read_by_the_link_that_names_it(tmp_path: Path) -> None:
    """A download cache given as a whole: blobs without suffix, and links to them."""
    write(tmp_path / "cache" / "blobs" / "3f2a9c", '{"text": "a"}\n')
    (tmp_path / "cache" / "snapshots").mkdir()
    (tmp_path / "cache" / "snapshots" / "part.jsonl").symlink_to("../blobs/3f2a9c")
    found = list_sources([str(tmp_path / "cache")])
    assert [Path(path).name for path in found.paths] == ["part.jsonl"]
    assert found.skipped == []


def test_datasets_inside_the_inputs_are_no_input(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder / "one.txt", "the first document")
    write(folder / "two.txt", "the second document")
    for name in ("first", "second", "first"):
        pack([folder], folder / name, options(dataset))
        assert sorted(texts_of(folder / name)) == ["the first document", "the second document"]
    # One that was begun and not finished, too.
    (folder / "first" / "manifest.json").unlink()
    manifest = pack([folder], folder / "third", options(dataset))
    assert [(Path(entry.path).name, entry.reason) for entry in manifest.skipped] == [
        ("first", "a prepared dataset"),
        ("second", "a prepared dataset"),
    ]
    with pytest.raises(RequestError, match=r"second \(a prepared dataset\)"):
        list_sources([str(folder / "second")])


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9.jsonl", b"\xff\xfe.csv"])
def test_names_that_are_no_utf8(program: Program, tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    text = make_text(1, 300)
    content = {b"txt": text, b"jsonl": json.dumps({"text": text}), b"csv": f'text\n"{text}"\n'}[name.split(b".")[1]]
    file = folder / os.fsdecode(name)
    file.write_text(content)
    (folder / "bad.jsonl").write_text("broken\n")
    done = program("prepare", "in", "--output", "out", "--vocab-size", "300", "--max-rejected", "60%", "--json")
    assert done.returncode == 0, done.stderr
    assert texts_of(tmp_path / "out") == [text]
    assert str(file) in Manifest.load(tmp_path / "out").sources
    assert [line["reason"] for line in rejections_of(tmp_path / "out")] == ["not JSON"]
    again = program("prepare", "in", "--output", "out", "--vocab-size", "300", "--max-rejected", "60%")
    assert "nothing to do" in again.stderr
    assert program("verify-data", "out", "--full").returncode == 0
    file.write_bytes(b"\xff")
    changed = program("prepare", "in", "--output", "out", "--vocab-size", "300")
    assert changed.returncode == 2
    assert f"{str(file)!a}"[1:-1] in changed.stderr.replace("\n", "")


def test_an_unreadable_array_names_its_record(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.json"
    good = json.dumps({"text": "good"})
    for content, number in (
        (f"[{good}, {good}", 3),
        (f"[{good} {good}]", 2),
        (f"[{good}, nul]", 2),
        (f"[{good}] x", 2),
    ):
        file.write_text(content)
        with pytest.raises(RequestError, match=rf"in\.json cannot be read: record {number} is not JSON"):
            pack([file], tmp_path / f"out-{number}-{len(content)}", options(dataset))
    file.write_text("[" * 100_000)
    with pytest.raises(RequestError, match="record 1 is not JSON"):
        pack([file], tmp_path / "nested", options(dataset))


def test_one_bad_record_of_an_array_costs_that_record(dataset: Path, tmp_path: Path) -> None:
    records = [b'{"text": "caf\xe9"}', b'{"text": "a\\ud800b"}', b"3", b'{"text": 3}', b'{"text": ""}', b"[]"]
    (tmp_path / "in.json").write_bytes(b'\xef\xbb\xbf[{"text": "first"},' + b",".join(records) + b',{"text": "last"}]')
    pack([tmp_path / "in.json"], tmp_path / "out", options(dataset, max_rejected=1))
    assert texts_of(tmp_path / "out") == ["first", "last"]
    assert [(line["record"], line["reason"]) for line in rejections_of(tmp_path / "out")] == [
        (2, "not UTF-8"),
        (3, "lone surrogate"),
        (4, "no key text"),
        (5, "text is not text"),
        (6, "empty"),
        (7, "no key text"),
    ]


def test_a_long_array_is_read_in_parts_with_no_record_lost(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [{"number": number, "text": f"{number} " + 'é\\"\n' * (number % 7)} for number in range(300)]
    layouts = {"array": json.dumps(values), "values": " ".join(json.dumps(value, indent=1) for value in values)}
    for size in (1, 2, 37):
        monkeypatch.setattr("data_prep.json_files._READ_AT_ONCE_CHARACTERS", size)
        for name, content in layouts.items():
            (tmp_path / "in.json").write_text(content)
            pack([tmp_path / "in.json"], tmp_path / f"{name}-{size}", options(dataset))
            assert texts_of(tmp_path / f"{name}-{size}") == [value["text"] for value in values]
