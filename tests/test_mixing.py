"""Mixing: shares, epochs, and that rows are neither lost nor repeated."""

from fractions import Fraction

import numpy as np
import pytest

import text
from spanbert_jax.data.batch import Feed, make_batch
from spanbert_jax.data.mixing import Mix, Rows, places_by_epochs, places_by_share
from spanbert_jax.data.plan import shuffled_rows
from spanbert_jax.errors import InputError


def fractions(*weights: float) -> list[Fraction]:
    return [Fraction(repr(weight)) for weight in weights]


def feeds_of(*documents: int) -> tuple[Feed, ...]:
    """A feed of as many unpacked rows as documents, for each number."""
    splits = [
        text.random_split(number, [20] * count)
        for number, count in enumerate(documents, start=30)
    ]
    return tuple(text.make_feed(split, packing=False) for split in splits)


def take(mix: Mix, steps: range, size: int) -> Rows:
    parts = [mix.training_rows(step, size) for step in steps]
    return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0,), [10_000]),
        ((0.7, 0.3), [7_000, 3_000]),
        ((1.0, 1.0, 1.0), [3_334, 3_333, 3_333]),
        ((2.0, 1.0), [6_667, 3_333]),
    ],
)
def test_shares_become_places(weights: tuple[float, ...], expected: list[int]) -> None:
    assert places_by_share(fractions(*weights)).tolist() == expected


def test_places_are_the_shares_to_within_one_for_any_weights() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        weights = np.round(rng.random(rng.integers(1, 8)) + 0.01, 3)
        places = places_by_share(fractions(*weights.tolist()))
        assert places.sum() == 10_000
        assert (np.abs(places - 10_000 * weights / weights.sum()) < 1).all()


def test_a_share_of_no_row_is_refused() -> None:
    with pytest.raises(InputError, match=r"data\.weights: 1e-05 of 1\.00001"):
        places_by_share(fractions(1.0, 1e-05))


@pytest.mark.parametrize(
    ("weights", "num_rows", "expected"),
    [
        ((0.1, 1.0), [14, 1000], [7, 5_000]),
        ((1.5,), [1], [3]),
        ((0.01, 1.0), [3, 54], [3, 5_400]),
        ((0.3333333333, 1.0), [3, 1], [1_000_000, 1_000_000]),
    ],
)
def test_broken_epochs_make_a_longer_cycle(
    weights: tuple[float, ...], num_rows: list[int], expected: list[int]
) -> None:
    assert places_by_epochs(fractions(*weights), num_rows).tolist() == expected


def test_epochs_of_less_than_a_millionth_of_a_row_are_refused() -> None:
    with pytest.raises(InputError, match=r"data\.weights: 1e-09 is less than a row"):
        places_by_epochs([Fraction(1, 10**9), Fraction(1)], [3, 54])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_cycle_of_epochs_reads_each_corpus_as_often_as_its_weight(seed: int) -> None:
    num_rows = [37, 5, 101]
    places = places_by_epochs(fractions(2.0, 10.0, 1.0), num_rows)
    assert places.tolist() == [74, 50, 101]
    rows = take(Mix(feeds_of(*num_rows), places, seed), range(45), 5)
    for c, (size, times) in enumerate(zip(num_rows, (2, 10, 1), strict=True)):
        mine = rows.corpus == c
        seen = zip(rows.epoch[mine].tolist(), rows.row[mine].tolist(), strict=True)
        assert sorted(seen) == [(e, r) for e in range(times) for r in range(size)]


def test_every_row_of_an_epoch_comes_once_whatever_the_batch_size() -> None:
    num_rows = [1_000, 300]
    mix = Mix(feeds_of(*num_rows), places_by_share(fractions(0.8, 0.2)), 4)
    whole = take(mix, range(1), 10_000)
    for size in (7, 64, 1_000):
        small = take(mix, range(10_000 // size), size)
        for one, other in zip(whole, small, strict=True):
            assert (one[: len(other)] == other).all()
    for c, size in enumerate(num_rows):
        mine = whole.corpus == c
        for epoch in range(int(whole.epoch[mine].max())):
            own = whole.row[mine & (whole.epoch == epoch)]
            assert sorted(own) == list(range(size))


def test_epochs_are_shuffled_anew_and_corpora_unlike_each_other() -> None:
    mix = Mix(feeds_of(500, 500), places_by_share(fractions(1.0, 1.0)), 0)
    rows = take(mix, range(4), 1_000)
    orders = {
        tuple(rows.row[(rows.corpus == c) & (rows.epoch == e)].tolist())
        for c in (0, 1)
        for e in (0, 1)
    }
    assert len(orders) == 4


def test_shares_hold_over_a_cycle_and_roughly_within_it() -> None:
    mix = Mix(feeds_of(5, 5), places_by_share(fractions(0.9, 0.1)), 0)
    np.testing.assert_array_equal(mix.shares(range(10_000, 20_000)), [0.9, 0.1])
    part = mix.shares(range(1_000, 3_000))
    # 2,000 draws without replacement: four standard deviations.
    assert abs(part[1] - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 2_000)
    rows = take(mix, range(3), 100)
    np.testing.assert_array_equal(
        mix.shares(range(300)), np.bincount(rows.corpus) / 300
    )


def test_one_corpus_is_ordered_as_its_plan_says() -> None:
    (feed,) = feeds_of(50)
    mix = Mix((feed,), np.ones(1, np.int64), 3)
    rows = mix.training_rows(9, 8)
    expected = shuffled_rows(9, 8, 50, 3)
    assert not rows.corpus.any()
    np.testing.assert_array_equal(rows.row, expected[0])
    np.testing.assert_array_equal(rows.epoch, expected[1])


def test_an_evaluation_sees_each_row_of_each_corpus_once() -> None:
    num_rows = [13, 1, 30]
    mix = Mix(feeds_of(*num_rows), np.ones(3, np.int64), 0)
    parts = [mix.evaluation_rows(step, 8) for step in range(6)]
    rows = Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    real = rows.row >= 0
    seen = zip(rows.corpus[real].tolist(), rows.row[real].tolist(), strict=True)
    assert list(seen) == [(c, r) for c, n in enumerate(num_rows) for r in range(n)]
    assert real.sum() == 44
    assert not rows.epoch.any()
    assert not mix.make_batch(parts[-1])["target_weights"][4:].any()


def test_a_row_is_the_same_in_a_mixture_and_alone() -> None:
    feeds = feeds_of(40, 60)
    mix = Mix(feeds, places_by_share(fractions(0.5, 0.5)), 1)
    rows = mix.training_rows(2, 16)
    assert set(rows.corpus) == {0, 1}
    batch = mix.make_batch(rows)
    for place, (c, row, epoch) in enumerate(zip(*rows, strict=True)):
        alone = make_batch(feeds[c], np.array([row]), np.array([epoch]))
        for key, array in alone.items():
            np.testing.assert_array_equal(batch[key][place], array[0], err_msg=key)
