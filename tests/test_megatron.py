"""Megatron's indexed datasets: read as their format says, written so, and refused where they are broken."""

import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.megatron import IndexedDataset, write_indexed_datasets
from data_prep.verify import verify
from lex_pretrain.data.manifest import Manifest
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer
from tests.conftest import Program, make_text
from tests.preparing import digests, options, pack, rejections_of, texts_of


def lay_out(index_file: Path, documents: list[list[list[int]]], code: int, dtype: str) -> Path:
    """The two files as the format's description has them, byte by byte; a document is a list of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    index_file.with_suffix(".bin").write_bytes(b"".join(np.array(part, dtype).tobytes() for part in sequences))
    places, borders = [0], [0]
    for sequence in sequences:
        places.append(places[-1] + size * len(sequence))
    for document in documents:
        borders.append(borders[-1] + len(document))
    index_file.write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
        + b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
        + b"".join(struct.pack("<q", place) for place in places[:-1])
        + b"".join(struct.pack("<q", border) for border in borders)
    )
    return index_file


@pytest.fixture
def tokenizer(dataset: Path) -> Tokenizer:
    return Tokenizer(dataset / "tokenizer.model")


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_documents_come_in_with_the_ids_that_they_have(
    dataset: Path, tokenizer: Tokenizer, tmp_path: Path, code: int, dtype: str
) -> None:
    texts = [make_text(number, 30) for number in range(20)]
    # Characters one by one: ids that encoding the text would not give.
    spelt = [[part for character in text for part in tokenizer.encode(character)] for text in texts]
    end = tokenizer.eod_id
    documents = [[ids[:10], [*ids[10:], end]] if number % 2 else [ids] for number, ids in enumerate(spelt)]
    index_file = lay_out(tmp_path / "corpus_text_document.idx", documents, code, dtype)
    output = tmp_path / "out"
    manifest = pack([index_file], output, options(dataset, unit_bytes=2000))
    assert len(manifest.shards) > 2
    stream = TokenDataset.open(output)
    found = [stream.read(start, stop - start).tolist() for start, stop in stream.document_bounds()]
    assert found == [[*ids, end] for ids in spelt]
    assert texts_of(output) == texts
    assert verify(output, full=True) == []
    pack([index_file.with_suffix(".bin")], tmp_path / "two", options(dataset, unit_bytes=2000), num_workers=2)
    assert digests(output) == digests(tmp_path / "two")


def test_a_dataset_goes_out_and_comes_back_the_same(
    dataset: Path, corpus: Path, tmp_path: Path, program: Program
) -> None:
    result = program("export-data", dataset, "--output", tmp_path / "megatron")
    assert result.returncode == 0, result.stderr
    for split in ("train", "validation", "test"):
        index_file = tmp_path / "megatron" / f"{split}.idx"
        indexed, stream = IndexedDataset(index_file), TokenDataset.open(dataset, split)
        bounds = list(stream.document_bounds())
        assert len(indexed) == len(bounds) == stream.num_documents
        assert indexed.document_lengths().tolist() == [end - start for start, end in bounds]
        for number in (0, len(bounds) - 1):
            start, end = bounds[number]
            assert indexed.document(number).tolist() == stream.read(start, end - start).tolist()
    # Sides are those of the text, so what was for training before is so again.
    pack([tmp_path / "megatron" / "train.idx"], tmp_path / "again", options(dataset))
    assert texts_of(tmp_path / "again") == texts_of(dataset)
    assert program("export-data", dataset, "--output", tmp_path / "megatron").returncode == 2


def test_records_that_cannot_be_are_counted_and_located(dataset: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    good, end = tokenizer.encode("a document"), tokenizer.eod_id
    documents = [[good], [[*good, tokenizer.vocab_size]], [[]], [], [[*good, end, *good, end]], [tokenizer.encode("b")]]
    index_file = lay_out(tmp_path / "in.idx", documents, 8, "<u2")
    manifest = pack([index_file], tmp_path / "out", options(dataset, max_rejected=0.9))
    assert texts_of(tmp_path / "out") == ["a document", "b"]
    assert {line["record"]: line["reason"] for line in rejections_of(tmp_path / "out")} == {
        2: "ids of another tokenizer",
        3: "empty",
        4: "empty",
        5: "end of document inside",
    }
    assert manifest.account.read.documents == 6


def test_ids_without_their_tokenizer_are_refused(dataset: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    index_file = lay_out(tmp_path / "in.idx", [[tokenizer.encode("a document")]], 8, "<u2")
    with pytest.raises(RequestError, match=r"in\.idx holds ids; name the tokenizer"):
        pack([index_file], tmp_path / "out", options(dataset, tokenizer=None, vocab_size=300))


@pytest.mark.parametrize("damage", ["magic", "version", "type", "index cut", "tokens cut", "no tokens", "borders"])
def test_broken_files_are_named(dataset: Path, tmp_path: Path, damage: str) -> None:
    index_file = lay_out(tmp_path / "in.idx", [[[5, 6, 7]], [[8, 9]]], 8, "<u2")
    data, tokens = index_file.read_bytes(), index_file.with_suffix(".bin")
    broken = {
        "magic": b"X" + data[1:],
        "version": data[:9] + struct.pack("<Q", 2) + data[17:],
        "type": data[:17] + b"\x06" + data[18:],
        "index cut": data[:-1],
        "borders": data[:-8] + struct.pack("<q", 3),
    }
    index_file.write_bytes(broken.get(damage, data))
    if damage == "tokens cut":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    if damage == "no tokens":
        tokens.unlink()
    with pytest.raises(RequestError, match=r"in\.(idx|bin)"):
        pack([index_file], tmp_path / "out", options(dataset))


def test_the_files_of_wide_ids_are_int32(tmp_path: Path, dataset: Path) -> None:
    manifest = Manifest.load(dataset)
    wide = tmp_path / "wide"
    wide.mkdir()
    tokenizer = manifest.tokenizer.model_copy(update={"vocab_size": 70_000 + manifest.tokenizer.vocab_size})
    value = manifest.model_copy(update={"dtype": "uint32", "shards": manifest.shards[:1], "tokenizer": tokenizer})
    stem = manifest.shards[0].stem
    tokens = np.load(dataset / f"{stem}.tokens.npy")
    np.save(wide / f"{stem}.tokens.npy", tokens.astype(np.uint32) + 70_000)
    np.save(wide / f"{stem}.documents.npy", np.load(dataset / f"{stem}.documents.npy"))
    value.save(wide)
    (index_file,) = write_indexed_datasets(wide, tmp_path / "out")
    assert index_file.read_bytes()[17] == 4
    indexed = IndexedDataset(index_file)
    assert (
        np.concatenate([indexed.document(number) for number in range(len(indexed))]).tolist()
        == (tokens.astype(np.int64) + 70_000).tolist()
    )
