"""The naive maskers do the work that they are compared at."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from benchmarks import naive
from simulation import simulate
from text import FIRST_WORD, RANDOM_IDS, SPECIAL, STARTS_WORD, random_text

# Ids that no text holds: a random replacement shows.
UNSEEN = (RANDOM_IDS + len(STARTS_WORD)).tolist()
VOCABULARY = naive.Vocabulary(STARTS_WORD, SPECIAL.mask, UNSEEN)
LENGTHS = (1, 2, 3, 7, 31, 200, 510)

Mask = Callable[[np.ndarray], naive.MaskedBlock]


@pytest.fixture(params=["plain", "tight"])
def mask(request: pytest.FixtureRequest) -> Mask:
    if request.param == "plain":
        draws = np.random.default_rng(3)
        return lambda block: naive.mask_plainly(block, VOCABULARY, draws)
    rng = random.Random(3)
    return lambda block: naive.mask_tightly(block, VOCABULARY, rng)


def blocks(count: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(length)
    return [random_text(rng, length, most_pieces=3) for _ in range(count)]


@pytest.mark.parametrize("length", LENGTHS)
def test_spans_are_whole_words_apart_within_the_budget(mask: Mask, length: int) -> None:
    budget = math.ceil(Fraction(3, 20) * length)
    for block in blocks(50, length):
        corrupted, spans = mask(block)
        begins = {0, *np.flatnonzero(STARTS_WORD[block]).tolist()}
        assert sum(end - begin for begin, end in spans) <= budget
        outside = np.ones(length, bool)
        for begin, end in spans:
            assert begin < end
            assert begin in begins
            assert end in begins | {length}
            assert outside[max(begin - 1, 0) : end + 1].all()
            outside[begin:end] = False
            assert sum(begin <= word < end for word in begins) <= 10
        np.testing.assert_array_equal(np.array(corrupted)[outside], block[outside])


def test_the_budget_is_used(mask: Mask) -> None:
    masked = [sum(end - begin for begin, end in mask(b)[1]) for b in blocks(50, 200)]
    # 30 of 200, but for the rare block whose last places are too narrow.
    assert np.mean(masked) == pytest.approx(30, abs=0.3)


def test_placed_lengths_are_those_of_the_simulation(mask: Mask) -> None:
    rng, texts = random.Random(5), blocks(1500, 510)
    placed = [
        int(STARTS_WORD[block[begin:end]].sum())
        for block in texts
        for begin, end in mask(block)[1]
    ]
    sizes = [np.diff([*np.flatnonzero(STARTS_WORD[b]), len(b)]) for b in texts]
    expected = [last - first for s in sizes for first, last in simulate(list(s), rng)]
    assert np.mean(placed) == pytest.approx(np.mean(expected), abs=0.1)


def test_a_span_has_one_draw_of_eighty_ten_ten(mask: Mask) -> None:
    counts = np.zeros(3)
    for block in blocks(200, 510):
        corrupted, spans = mask(block)
        for begin, end in spans:
            now = np.array(corrupted[begin:end])
            kinds = [
                now == SPECIAL.mask,
                now >= len(STARTS_WORD),
                now == block[begin:end],
            ]
            (kind,) = (number for number, holds in enumerate(kinds) if holds.all())
            counts[kind] += 1
    expected = np.array([0.8, 0.1, 0.1]) * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_the_text_of_these_tests_holds_no_special_id() -> None:
    assert min(block.min() for block in blocks(20, 200)) >= FIRST_WORD
