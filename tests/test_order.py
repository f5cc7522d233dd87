"""The sample order: a permutation an epoch, exact mixture quotas, nothing stored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lex_pretrain.data.order import QUOTA_PERIOD, SampleOrder, permute, quotas
from lex_pretrain.errors import RequestError


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    image = permute(np.arange(size), size, key)
    assert sorted(image.tolist()) == list(range(size))


def test_permute_differs_by_key_and_mixes() -> None:
    size = 10_000
    first, second = (permute(np.arange(size), size, key) for key in (1, 2))
    assert (first != second).mean() > 0.99
    # Neighbours end up far apart: the mean distance of a random permutation is a third of its size.
    assert np.abs(np.diff(first)).mean() == pytest.approx(size / 3, rel=0.05)


def test_permute_of_a_trillion_is_immediate_and_in_range() -> None:
    image = permute(np.arange(1000), 10**12, 5)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert image.max() < 10**12


def test_every_epoch_reads_each_window_once_in_another_order() -> None:
    order = SampleOrder([50], [1.0], seed=3)
    _, windows = order.locate(np.arange(150))
    epochs = windows.reshape(3, 50)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(50))
    assert (epochs[0] != epochs[1]).any()


def test_any_part_of_the_order_is_the_same_part_of_the_whole() -> None:
    order = SampleOrder([1000, 300], [3, 1], seed=9)
    sources, windows = order.locate(np.arange(5000))
    for start in (0, 17, 4200):
        part = order.locate(np.arange(start, start + 333))
        np.testing.assert_array_equal(part[0], sources[start : start + 333])
        np.testing.assert_array_equal(part[1], windows[start : start + 333])


def test_mixture_holds_its_quota_exactly_and_reads_each_source_evenly() -> None:
    order = SampleOrder([40_000, 5_000], [0.7, 0.3], seed=1)
    sources, windows = order.locate(np.arange(2 * QUOTA_PERIOD))
    counts = np.bincount(sources)
    np.testing.assert_array_equal(counts, 2 * quotas([0.7, 0.3]))
    of_second = np.bincount(windows[sources == 1])
    assert of_second.max() - of_second.min() <= 1
    # Both sources appear throughout, not one after the other.
    assert 0.25 < (sources[:1000] == 1).mean() < 0.35


def test_weight_below_one_sample_in_a_period_is_refused() -> None:
    with pytest.raises(RequestError, match=r"data.sources\[1\].weight"):
        quotas([1.0, 1e-9])


def test_epochs_are_those_that_the_order_makes() -> None:
    order = SampleOrder([100, 400], [1, 1], seed=1)
    assert order.epochs(400) == pytest.approx([2.0, 0.5])
