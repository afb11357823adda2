"""Counter-based random numbers."""

import numpy as np
import pytest
from scipy import stats

from spanbert_jax.data import counter

P_VALUE = 0.001


def test_mix_gives_the_published_splitmix64_outputs() -> None:
    steps = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    outputs = counter.mix(np.uint64(1234567) + steps)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert outputs.tolist() == expected


def test_fold_is_a_step_of_splitmix64_from_the_key() -> None:
    outputs = counter.fold(np.array([1234567], np.uint64), np.arange(3))
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert outputs.tolist() == expected


def test_fold_broadcasts_as_one_pair_at_a_time() -> None:
    keys = counter.fold(counter.root_key(3), np.arange(5))
    table = counter.fold(keys[:, None], np.arange(7))
    for row, key in enumerate(keys):
        for column in range(7):
            assert table[row, column] == counter.fold(key[None], column)[0]


def test_keys_and_numbers_are_left_as_they_are() -> None:
    key = counter.root_key(3)
    number = np.arange(5, dtype=np.uint64)
    before = key.copy()
    counter.mix(number)
    counter.fold(key, number)
    np.testing.assert_array_equal(key, before)
    np.testing.assert_array_equal(number, np.arange(5))


def test_keys_of_seeds_purposes_and_numbers_do_not_collide() -> None:
    roots = np.concatenate([counter.root_key(seed) for seed in range(100)])
    purposes = counter.fold(roots[:, None], [counter.ROWS, counter.MASKS])
    keys = counter.fold(purposes[..., None], np.arange(500))
    assert len(np.unique(keys)) == 100 * 2 * 500


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert counter.root_key(seed).shape == (1,)


@pytest.mark.parametrize("bound", [2, 7, 146, 1000])
def test_below_is_uniform(bound: int) -> None:
    bits = counter.fold(counter.root_key(1), np.arange(500_000))
    drawn = counter.below(bits, bound)
    counts = np.bincount(drawn, minlength=bound)
    assert len(counts) == bound
    assert stats.chisquare(counts).pvalue > P_VALUE


def test_both_halves_of_the_bits_are_uniform_and_independent() -> None:
    # One draw serves a span's length (lower half) and its start (upper half).
    bits = counter.fold(counter.root_key(2), np.arange(500_000))
    table = np.zeros((16, 16), np.int64)
    high, low = bits >> np.uint64(60), (bits >> np.uint64(28)) & np.uint64(15)
    np.add.at(table, (high.astype(int), low.astype(int)), 1)
    assert stats.chisquare(table.reshape(-1)).pvalue > P_VALUE


@pytest.mark.parametrize("first", ["key", "value"])
def test_neighbouring_draws_are_independent(first: str) -> None:
    numbers = np.arange(300_000)
    keys = counter.fold(counter.root_key(3), numbers)
    if first == "key":
        pair = counter.fold(keys, 0)[:-1], counter.fold(keys, 0)[1:]
    else:
        pair = counter.fold(keys, 0), counter.fold(keys, 1)
    table = np.zeros((10, 10), np.int64)
    np.add.at(table, tuple(counter.below(bits, 10) for bits in pair), 1)
    assert stats.chi2_contingency(table).pvalue > P_VALUE


def test_below_reaches_both_ends_and_no_further() -> None:
    extremes = np.array([0, 2**64 - 1], np.uint64)
    for bound in (1, 2, 3, 1000, 2**32):
        assert counter.below(extremes, bound).tolist() == [0, bound - 1]


def test_shares_are_the_upper_bits_and_below_one() -> None:
    bits = np.array([0, 2**63, 2**62, 2**64 - 1, 2**11], np.uint64)
    shares = counter.share(bits)
    assert shares.tolist() == [0, 0.5, 0.25, 1 - 2**-53, 2**-53]


def test_permute_is_a_bijection_for_small_sizes() -> None:
    for size in range(1, 301):
        for seed in range(3):
            places = counter.permute(np.arange(size), size, counter.root_key(seed))
            assert sorted(places.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [4096, 65_535, 65_536, 65_537, 1_000_000])
def test_permute_is_a_bijection_for_large_sizes(size: int) -> None:
    places = counter.permute(np.arange(size), size, counter.root_key(8))
    assert places.min() == 0
    assert (np.bincount(places, minlength=size) == 1).all()


def test_permutations_of_two_keys_agree_as_rarely_as_random_ones() -> None:
    size = 10_000
    keys = counter.fold(counter.root_key(1), np.arange(20))
    orders = [counter.permute(np.arange(size), size, keys[[one]]) for one in range(20)]
    agreements = [
        int((orders[a] == orders[b]).sum()) for a in range(20) for b in range(a)
    ]
    # Of two random permutations one place agrees in the mean.
    assert sum(agreements) / len(agreements) == pytest.approx(1, abs=4 / 190**0.5)


@pytest.mark.parametrize("size", [50_000, 65_536, 65_537])
@pytest.mark.parametrize("lag", [1, 2, 256])
def test_permute_has_no_serial_correlation(size: int, lag: int) -> None:
    places = counter.permute(np.arange(size), size, counter.root_key(4))
    bound = 4 / size**0.5
    assert abs(np.corrcoef(places[:-lag], places[lag:])[0, 1]) < bound
    assert abs(np.corrcoef(places, np.arange(size))[0, 1]) < bound


@pytest.mark.parametrize("size", [17, 100, 1000])
def test_permute_sends_each_index_anywhere_alike(size: int) -> None:
    keys = counter.fold(counter.root_key(6), np.arange(20_000))
    for index in (0, 1, size - 1):
        places = counter.permute(np.full(len(keys), index), size, keys)
        counts = np.bincount(places, minlength=size)
        assert stats.chisquare(counts).pvalue > P_VALUE


@pytest.mark.parametrize("size", range(2, 17))
def test_permute_of_a_handful_is_within_a_tenth_of_uniform(size: int) -> None:
    # A Feistel network over 2-bit halves is no more even than that.
    keys = counter.fold(counter.root_key(6), np.arange(100_000))
    for index in range(size):
        places = counter.permute(np.full(len(keys), index), size, keys)
        shares = np.bincount(places, minlength=size) / len(keys)
        np.testing.assert_allclose(shares * size, 1, atol=0.1)


def test_permute_takes_a_key_for_each_index() -> None:
    keys = counter.fold(counter.root_key(9), np.arange(2))
    index = np.array([0, 1, 2, 0, 1, 2, 9])
    which = np.array([0, 0, 0, 1, 1, 1, 0])
    mixed = counter.permute(index, 10, keys[which])
    for one in range(2):
        alone = counter.permute(index[which == one], 10, keys[[one]])
        assert mixed[which == one].tolist() == alone.tolist()
