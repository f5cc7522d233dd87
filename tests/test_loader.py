"""What training reads: windows over the stream or within documents, and sources by weight or by size."""

from pathlib import Path

import numpy as np
import pytest

from lex_pretrain.config import DataSection
from lex_pretrain.data.loader import Loader, mixture_weights
from lex_pretrain.data.manifest import Account, Manifest, TokenizerRecord
from lex_pretrain.data.shards import TokenDataset, write_shard
from lex_pretrain.errors import RequestError

EOD = 0


def make_dataset(folder: Path, shards: list[list[int]]) -> TokenDataset:
    """Documents of the given lengths, EOD included, whose tokens count on through the whole stream from 1."""
    records, token = [], 1
    for number, lengths in enumerate(shards):
        documents = []
        for length in lengths:
            documents.append(np.append(np.arange(token, token + length - 1), EOD))
            token += length - 1
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        tokens = np.concatenate(documents).astype(np.uint16)
        records.append(write_shard(folder, f"shard-{number:05d}", "train", tokens, starts, 0))
    manifest = Manifest(
        package_version="0",
        tokenizer=TokenizerRecord(fingerprint="none", vocab_size=60_000, eod_id=EOD),
        dtype="uint16",
        shards=tuple(records),
        account=Account(),
        config={},
        sources=(),
    )
    return TokenDataset(folder, "train", manifest)


LENGTHS = [[5, 9, 1, 4, 13], [2, 3], [8, 5, 40]]


@pytest.mark.parametrize("length", [1, 4, 7, 39])
def test_windows_within_documents_cross_no_border_and_miss_nothing_that_fits(tmp_path: Path, length: int) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    loader = Loader([dataset], [1.0], length, seed=1, within_documents=True)
    (num_windows,) = loader.order.num_windows
    expected = []
    for start, end in dataset.document_bounds():
        tokens = dataset.read(start, end - start).tolist()
        expected += [tokens[place : place + length + 1] for place in range(0, end - start - length, length)]
    assert num_windows == len(expected)
    found = loader.windows(np.arange(num_windows)).tolist()
    assert sorted(found) == sorted(expected)
    assert not any(EOD in window[:-1] for window in found)
    assert loader.share_passed_over(0) == pytest.approx(1 - num_windows * length / dataset.num_tokens)
    # Any part of the order is the same part of the whole, whichever shards were looked at before.
    again = Loader([dataset], [1.0], length, seed=1, within_documents=True)
    assert again.windows(np.array([num_windows - 1, 0])).tolist() == [found[-1], found[0]]


def test_windows_over_the_stream_hold_every_token_but_the_last_ones(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    loader = Loader([dataset], [1.0], 7, seed=1)
    (num_windows,) = loader.order.num_windows
    found = loader.windows(np.arange(num_windows))
    assert sorted(found[:, :-1].flatten().tolist()) == sorted(dataset.read(0, 7 * num_windows).tolist())
    assert loader.share_passed_over(0) < 0.1


def test_more_shards_than_are_kept_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    loader = Loader([dataset], [1.0], 4, seed=1, within_documents=True)
    samples = np.arange(loader.order.num_windows[0])
    whole = loader.windows(samples)
    monkeypatch.setattr("lex_pretrain.data.windows._MAX_COUNTED_SHARDS", 1)
    small = Loader([dataset], [1.0], 4, seed=1, within_documents=True)
    assert np.concatenate([small.windows(samples[i : i + 1]) for i in range(len(samples))]).tolist() == whole.tolist()


def test_no_document_that_fills_a_window_is_an_error(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    with pytest.raises(RequestError, match=r"holds no document for one window of model\.sequence_length 40"):
        Loader([dataset], [1.0], 40, seed=1, within_documents=True)
    assert Loader([dataset], [1.0], 40, seed=1).order.num_windows == (2,)


def test_temperature_goes_from_size_to_equal_shares(tmp_path: Path) -> None:
    small, large = make_dataset(tmp_path / "a", [[10]]), make_dataset(tmp_path / "b", [[10] * 16])

    def shares(**settings: object) -> list[float]:
        data = DataSection.model_validate({"sources": [{"path": "a"}, {"path": "b", "weight": 2}], **settings})
        weights = mixture_weights(data, [small, large])
        return [weight / sum(weights) for weight in weights]

    assert shares() == pytest.approx([1 / 3, 2 / 3])
    assert shares(temperature=1) == pytest.approx([1 / 33, 32 / 33])
    assert shares(temperature=2) == pytest.approx([1 / 9, 8 / 9])
    assert shares(temperature=1e9) == pytest.approx([1 / 3, 2 / 3])
