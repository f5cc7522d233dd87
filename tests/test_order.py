"""The sample order: a permutation an epoch, whole epochs in any mixture, exact shares, nothing stored."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lex_pretrain.data.order import ORDER_VERSION, QUOTA_PERIOD, Mixture, SampleOrder, permute
from lex_pretrain.errors import RequestError

# Of every size, with ties and whole numbers among them; the smallest has some samples in each period.
WEIGHTS = st.lists(st.floats(1e-3, 1.0) | st.integers(1, 3), min_size=1, max_size=12)


def check_epochs(order: SampleOrder, sources: NDArray[np.int64], windows: NDArray[np.int64]) -> list[int]:
    """Every epoch that these first samples of an order reach reads no window twice; returns how many each ends."""
    num_ended = []
    for source, size in enumerate(order.num_windows):
        read = windows[sources == source]
        ended, begun = np.split(read, [len(read) - len(read) % size])
        assert (np.sort(ended.reshape(-1, size), axis=1) == np.arange(size)).all(), (order.num_windows, source)
        assert len(np.unique(begun)) == len(begun)
        assert ((begun >= 0) & (begun < size)).all()
        num_ended.append(len(ended) // size)
    return num_ended


def deviations(weights: Sequence[float], sources: NDArray[np.int64]) -> NDArray[np.float64]:
    """By how much the count of each source differs from its share after each of these first samples, [S, N]."""
    shares = np.array(weights, dtype=np.float64) / math.fsum(weights)
    counts = np.cumsum(sources == np.arange(len(weights))[:, None], axis=1)
    return counts - shares[:, None] * np.arange(1, len(sources) + 1)


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
    for distance in (1, 2, 16, 128):
        assert abs(np.corrcoef(first[:-distance], first[distance:])[0, 1]) < 0.04
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.04


@pytest.mark.parametrize("size", [7, 64, 600_000_000, 2**32 + 1, 10**12, 2**48])
def test_permute_takes_every_index_anywhere(size: int) -> None:
    """Over many keys, the images of the first indices and of the last are spread evenly: a chi-squared test."""
    num_keys, num_bins = 3000, min(size, 30)
    images = np.array([permute(np.array([0, 1, size - 1]), size, key) for key in range(num_keys)])
    expected = num_keys * np.diff([-(-size * edge // num_bins) for edge in range(num_bins + 1)]) / size
    for of_index in images.T:
        counts = np.bincount(of_index * num_bins // size, minlength=num_bins)
        # Beyond four standard deviations of the statistic for three indices of six sizes: once in a thousand times.
        assert ((counts - expected) ** 2 / expected).sum() < num_bins + 4 * math.sqrt(2 * num_bins)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_permute_makes_all_permutations_of_a_few(size: int) -> None:
    made = {tuple(permute(np.arange(size), size, key).tolist()) for key in range(4000)}
    assert made == set(itertools.permutations(range(size)))


def test_permute_of_a_trillion_is_immediate_and_in_range() -> None:
    image = permute(np.arange(1000), 10**12, 5)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert image.max() < 10**12
    with pytest.raises(ValueError, match="2\\^48"):
        permute(np.arange(1000), 2**48 + 1, 5)


def test_every_epoch_reads_each_window_once_in_another_order() -> None:
    order = SampleOrder([50], [1.0], seed=3)
    _, windows = order.locate(np.arange(150))
    epochs = windows.reshape(3, 50)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(50))
    assert (epochs[0] != epochs[1]).any()


def test_three_epochs_of_200_random_mixtures_read_every_window_once_an_epoch() -> None:
    generator = np.random.default_rng(0)
    for seed in range(200):
        num_sources = int(generator.integers(1, 9))
        weights = np.exp(generator.uniform(-3, 0, num_sources))
        num_windows = np.exp(generator.uniform(0, 8, num_sources)).astype(int)
        order = SampleOrder(num_windows.tolist(), weights.tolist(), seed)
        # Up to the third epoch's end of the source that is read most slowly.
        num_samples = int(3 * (num_windows / weights).max() * weights.sum()) + 4 * num_sources
        num_ended = check_epochs(order, *order.locate(np.arange(num_samples)))
        assert min(num_ended) >= 3


@settings(max_examples=40)
@given(weights=WEIGHTS, seed=st.integers(0, 2**63 - 1), data=st.data())
def test_epochs_are_whole_wherever_a_run_stops(weights: list[float], seed: int, data: st.DataObject) -> None:
    num_windows = data.draw(st.lists(st.integers(1, 20_000), min_size=len(weights), max_size=len(weights)))
    num_samples = data.draw(st.integers(0, 2 * QUOTA_PERIOD))
    order = SampleOrder(num_windows, weights, seed)
    check_epochs(order, *order.locate(np.arange(num_samples)))


@settings(max_examples=40)
@given(weights=WEIGHTS, seed=st.integers(0, 2**63 - 1))
def test_shares_stay_within_the_bound_everywhere_and_within_one_sample_at_periods(
    weights: list[float], seed: int
) -> None:
    sources, _ = SampleOrder([1000] * len(weights), weights, seed).locate(np.arange(2 * QUOTA_PERIOD))
    away = np.abs(deviations(weights, sources))
    shares = np.array(weights) / math.fsum(weights)
    if len(weights) == 1:
        assert away.max() == 0
    else:
        assert (away.max(axis=1) < 2 + 2 * shares * (len(weights) - 2)).all()
    assert (away[:, QUOTA_PERIOD - 1 :: QUOTA_PERIOD] < 1 + 1e-6).all()


@given(weights=WEIGHTS, num_periods=st.integers(0, 2**46))
def test_shares_never_drift(weights: list[float], num_periods: int) -> None:
    mixture = Mixture(weights, key=1)
    counts, next_counts = mixture.count(num_periods).tolist(), mixture.count(num_periods + 1).tolist()
    total = sum(map(Fraction, weights))
    assert sum(counts) == num_periods * QUOTA_PERIOD
    for weight, count, next_count in zip(weights, counts, next_counts, strict=True):
        assert abs(count - Fraction(weight) / total * num_periods * QUOTA_PERIOD) < 1
        assert next_count >= count


def test_mixture_holds_its_shares_exactly_and_reads_each_source_evenly() -> None:
    order = SampleOrder([40_000, 5_000], [0.7, 0.3], seed=1)
    sources, windows = order.locate(np.arange(2 * QUOTA_PERIOD))
    away = np.abs(deviations([0.7, 0.3], sources))
    assert away.max() < 2
    assert away[:, QUOTA_PERIOD - 1 :: QUOTA_PERIOD].max() < 1
    assert check_epochs(order, sources, windows) == [2, 7]
    # Both sources appear throughout, not one after the other, and not in turns like clockwork.
    assert 0.29 < (sources[:1000] == 1).mean() < 0.31
    assert len(np.unique(np.diff(np.flatnonzero(sources == 1)))) > 3


def test_any_part_of_the_order_is_the_same_part_of_the_whole() -> None:
    for num_windows, weights in (([1000], [1]), ([1000, 300], [3, 1]), ([1000, 7, 20_000], [2, 1, 6])):
        whole = np.arange(5 * QUOTA_PERIOD)
        order = SampleOrder(num_windows, weights, seed=9)
        sources, windows = order.locate(whole)
        some = np.random.default_rng(0).choice(whole, 5000)
        parts = [np.arange(start, start + 333) for start in (0, 17, QUOTA_PERIOD - 40)]
        for part in (*parts, some, some[::-1], whole[::-1], whole[:0], whole[-1:]):
            for asked in (order, SampleOrder(num_windows, weights, seed=9)):
                np.testing.assert_array_equal(asked.locate(part), (sources[part], windows[part]))


def test_another_seed_deals_another_order() -> None:
    first, second = (SampleOrder([1000, 300], [3, 1], seed).locate(np.arange(1000)) for seed in (1, 2))
    assert (first[0] != second[0]).any()
    assert (first[1] != second[1]).mean() > 0.9


def test_sources_of_one_size_are_read_in_different_orders() -> None:
    sources, windows = SampleOrder([1000, 1000], [1, 1], seed=1).locate(np.arange(2000))
    assert (windows[sources == 0] != windows[sources == 1]).mean() > 0.99


def test_weight_below_one_sample_in_a_period_is_refused() -> None:
    with pytest.raises(RequestError, match=r"data.sources\[1\].weight 1e-09 is less than one sample in 65536"):
        SampleOrder([10, 10], [1.0, 1e-9], seed=1)
    with pytest.raises(RequestError, match=r"data.sources\[0\].weight inf"):
        SampleOrder([10, 10], [math.inf, 1.0], seed=1)


def test_the_smallest_weight_has_its_sample_in_a_period() -> None:
    sources, _ = SampleOrder([10, 10], [QUOTA_PERIOD - 1, 1], seed=1).locate(np.arange(4 * QUOTA_PERIOD))
    np.testing.assert_array_equal(np.flatnonzero(sources) // QUOTA_PERIOD, [0, 1, 2, 3])


def test_a_trillion_windows_of_a_hundred_sources_are_located_far_out() -> None:
    order = SampleOrder([10**10] * 100, [1.0 + source for source in range(100)], seed=1)
    sources, windows = order.locate(np.arange(10**12, 10**12 + 1000))
    assert len(np.unique(sources)) > 90
    assert len(np.unique(windows)) == 1000
    assert windows.max() < 10**10


def test_epochs_are_those_that_the_order_makes() -> None:
    order = SampleOrder([100, 400], [1, 1], seed=1)
    assert order.epochs(400) == pytest.approx([2.0, 0.5])


def test_the_order_of_this_version_stays_as_it_is() -> None:
    """Runs that go on rely on it: whoever changes the order raises ORDER_VERSION, and then this."""
    digest = hashlib.sha256()
    for num_windows, weights in (([1000], [1]), ([10**9, 3, 500_000], [0.5, 0.01, 1 / 3])):
        for first in (0, 10 * QUOTA_PERIOD - 500):
            for located in SampleOrder(num_windows, weights, seed=7).locate(np.arange(first, first + 1000)):
                digest.update(located.astype("<i8").tobytes())
    assert (ORDER_VERSION, digest.hexdigest()[:16]) == (2, "d161d03dea59b4b0")
