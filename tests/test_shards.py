"""Datasets as streams: opened in no time whatever their size, read across shard borders, checked as they are read."""

import io
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lex_pretrain.data.manifest import Account, Manifest, ShardRecord, TokenizerRecord
from lex_pretrain.data.shards import TokenDataset, token_dtype, tokens_file, write_shard
from lex_pretrain.errors import RequestError


def save_manifest(folder: Path, shards: list[ShardRecord], vocab_size: int) -> None:
    Manifest(
        package_version="0",
        tokenizer=TokenizerRecord(fingerprint="none", vocab_size=vocab_size, eod_id=1),
        dtype="uint16" if token_dtype(vocab_size) is np.uint16 else "uint32",
        shards=tuple(shards),
        account=Account(),
        config={},
        sources=(),
    ).save(folder)


def make_dataset(folder: Path, sizes: list[int], vocab_size: int = 1000) -> np.ndarray:
    """Shards of the given sizes, each one document of random tokens; returns the whole stream."""
    generator = np.random.default_rng(1)
    shards, parts = [], []
    for number, size in enumerate(sizes):
        tokens = generator.integers(2, vocab_size, size).astype(token_dtype(vocab_size))
        tokens[-1] = 1
        parts.append(tokens)
        shards.append(write_shard(folder, f"shard-{number:05d}", "train", tokens, np.zeros(1, np.int64), 0))
    save_manifest(folder, shards, vocab_size)
    return np.concatenate(parts)


def test_any_window_is_that_of_the_joined_stream(tmp_path: Path) -> None:
    whole = make_dataset(tmp_path, [1, 17, 3, 40, 1, 1, 9])
    stream = TokenDataset.open(tmp_path)
    assert (stream.num_tokens, stream.num_documents) == (72, 7)
    for length in (1, 2, 5, 30, 72):
        starts = np.arange(len(whole) - length + 1)
        expected = np.stack([whole[start : start + length] for start in starts])
        np.testing.assert_array_equal(stream.read_windows(starts, length), expected)
        np.testing.assert_array_equal(stream.read_windows(starts[::-1], length), expected[::-1])
    assert list(stream.document_bounds()) == [(0, 1), (1, 18), (18, 21), (21, 61), (61, 62), (62, 63), (63, 72)]
    for start, length in ((-1, 3), (70, 3)):
        with pytest.raises(IndexError):
            stream.read_windows(np.array([0, start]), length)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_the_largest_id_survives(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    tokens = np.array([0, vocab_size - 1, 1], dtype=token_dtype(vocab_size))
    save_manifest(
        tmp_path, [write_shard(tmp_path, "shard-00000", "train", tokens, np.zeros(1, np.int64), 0)], vocab_size
    )
    stream = TokenDataset.open(tmp_path)
    assert stream.read(0, 3).dtype == dtype
    assert stream.read_windows(np.zeros(1, np.int64), 3).tolist() == [[0, vocab_size - 1, 1]]


OPEN_AND_READ = """
import resource, sys, time
from pathlib import Path
import numpy as np
from lex_pretrain.data.shards import TokenDataset
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
stream = TokenDataset.open(Path(sys.argv[1]))
seconds = time.perf_counter() - started
starts = np.linspace(0, stream.num_tokens - 1025, 64).astype(np.int64)
windows = stream.read_windows(starts, 1025)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.stdout.write(f"{stream.num_tokens} {int(windows.sum())} {seconds} {(after - before) // 1024}")
"""


def test_a_trillion_tokens_open_in_a_second_and_little_memory(tmp_path: Path) -> None:
    """Sparse files: they say what they hold and take no space."""
    shard_tokens, num_shards = 2**30, 1000
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (shard_tokens,)})
    shards = []
    for number in range(num_shards):
        stem = f"shard-{number:05d}"
        with tokens_file(tmp_path, stem).open("wb") as file:
            file.write(header.getvalue())
            file.truncate(len(header.getvalue()) + 2 * shard_tokens)
        shards.append(
            ShardRecord(
                stem=stem,
                split="train",
                num_tokens=shard_tokens,
                num_documents=1,
                num_source_bytes=0,
                tokens_sha256="0" * 64,
                documents_sha256="0" * 64,
            )
        )
    save_manifest(tmp_path, shards, 50_000)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_AND_READ, str(tmp_path)], check=True, capture_output=True, text=True
    )
    num_tokens, total, seconds, mebibytes = done.stdout.split()
    assert (int(num_tokens), int(total)) == (num_shards * shard_tokens, 0)
    assert int(num_tokens) > 1e12
    assert float(seconds) < 1
    assert int(mebibytes) < 200


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    whole = make_dataset(tmp_path, [2] * 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 290), hard))
    try:
        stream = TokenDataset.open(tmp_path)
        for _ in range(2):
            np.testing.assert_array_equal(stream.read(0, len(whole)), whole)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_that_does_not_fit_its_manifest_is_named(tmp_path: Path) -> None:
    make_dataset(tmp_path, [10, 10])
    file = tokens_file(tmp_path, "shard-00001")
    whole = file.read_bytes()
    for damage, words in ((whole[:-4], "cannot be read"), (whole[:30], "cannot be read"), (None, "cannot be read")):
        file.unlink()
        if damage is not None:
            file.write_bytes(damage)
        else:
            file.symlink_to(tmp_path / "nowhere")
        stream = TokenDataset.open(tmp_path)
        assert len(stream.read(0, 10)) == 10
        with pytest.raises(RequestError, match=rf"shard-00001\.tokens\.npy {words}"):
            stream.read(5, 10)
    write_shard(tmp_path, "shard-00001", "train", np.ones(7, np.uint16), np.zeros(1, np.int64), 0)
    with pytest.raises(RequestError, match="holds 7 tokens, and the manifest says 10"):
        TokenDataset.open(tmp_path).read(5, 10)


def test_an_id_beyond_the_vocabulary_is_named_before_it_reaches_a_model(tmp_path: Path) -> None:
    make_dataset(tmp_path, [10, 10], vocab_size=100)
    spoiled = np.arange(10, dtype=np.uint16)
    spoiled[3] = 100
    write_shard(tmp_path, "shard-00001", "train", spoiled, np.zeros(1, np.int64), 0)
    stream = TokenDataset.open(tmp_path)
    assert len(stream.read(0, 13)) == 13
    for read in (lambda: stream.read(5, 9), lambda: stream.read_windows(np.array([0, 6, 12]), 8)):
        with pytest.raises(RequestError, match=r"shard-00001\.tokens\.npy holds id 100 as its token 3, .* 100 pieces"):
            read()


def test_what_is_no_dataset_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"it has no manifest\.json"):
        TokenDataset.open(tmp_path)
    make_dataset(tmp_path, [3])
    with pytest.raises(RequestError, match="has no validation split; it has: train"):
        TokenDataset.open(tmp_path, "validation")
    file = tmp_path / "manifest.json"
    good = file.read_text()
    for text, words in (
        (good.replace('"format_version": 2', '"format_version": 1'), "format version 1"),
        (good.replace('"dtype": "uint16"', '"dtype": "int8"'), "is damaged"),
        (good[:-30], "not valid JSON"),
        ("[]", "format version None"),
    ):
        file.write_text(text)
        with pytest.raises(RequestError, match=words):
            TokenDataset.open(tmp_path)
