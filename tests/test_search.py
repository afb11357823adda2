"""The searches against brute force."""

import itertools

import numpy as np
import pytest

from spanbert_jax.inference.search import (
    Best,
    Sequences,
    beam_search,
    best_products,
    best_tokens,
)

VOCAB = 7
ALLOWED = np.array([1, 2, 4, 6], np.int32)


def draw_log_probs(seed: int, *shape: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(*shape, VOCAB))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def next_log_probs(beginning: tuple[int, ...]) -> np.ndarray:
    """A language model: what comes behind a beginning, [V]."""
    return draw_log_probs(sum((token + 1) * 10**i for i, token in enumerate(beginning)))


def search(length: int, width: int) -> Sequences:
    def extend(beginnings: np.ndarray) -> Best:
        rows = np.array([next_log_probs(tuple(row)) for row in beginnings.tolist()])
        return best_tokens(rows, ALLOWED, width)

    first = best_tokens(next_log_probs(())[None], ALLOWED, width)
    return beam_search(first, extend, length, width)


def score(sequence: tuple[int, ...]) -> float:
    return sum(
        next_log_probs(sequence[:place])[token] for place, token in enumerate(sequence)
    )


def ranked(scores: dict[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    return sorted(scores, key=scores.__getitem__, reverse=True)


def as_tuples(sequences: Sequences) -> list[tuple[int, ...]]:
    return list(map(tuple, sequences.ids.tolist()))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_beam_that_holds_all_is_exact(length):
    found = search(length, len(ALLOWED) ** length)
    everything = itertools.product(ALLOWED.tolist(), repeat=length)
    scores = {sequence: score(sequence) for sequence in everything}
    assert as_tuples(found) == ranked(scores)
    np.testing.assert_allclose(found.log_probs, sorted(scores.values())[::-1])


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_narrow_beam_keeps_the_likeliest_beginnings(width):
    kept: list[tuple[int, ...]] = [()]
    for _ in range(4):
        longer = [(*one, token) for one in kept for token in ALLOWED.tolist()]
        kept = ranked({one: score(one) for one in longer})[:width]
    found = search(4, width)
    assert as_tuples(found) == kept
    np.testing.assert_allclose(found.log_probs, list(map(score, kept)))


@pytest.mark.parametrize("count", [1, 3, 10, 64, 100])
def test_best_products_are_exact(count):
    log_probs = draw_log_probs(1, 3)
    found = best_products(best_tokens(log_probs, ALLOWED, count), count)
    scores = {
        sequence: log_probs[range(3), sequence].sum()
        for sequence in itertools.product(ALLOWED.tolist(), repeat=3)
    }
    assert as_tuples(found) == ranked(scores)[:count]
    np.testing.assert_allclose(found.log_probs, sorted(scores.values())[::-1][:count])


def test_tokens_that_are_not_allowed_never_come():
    log_probs = draw_log_probs(2, 50)
    found = best_tokens(log_probs, ALLOWED, 3)
    for row, ids, values in zip(log_probs, *found, strict=True):
        assert ids.tolist() == sorted(ALLOWED.tolist(), key=lambda i: -row[i])[:3]
        np.testing.assert_array_equal(values, row[ids])


def test_of_equals_the_lower_id_comes_first():
    log_probs = np.full((2, VOCAB), -np.log(VOCAB))
    tokens = best_tokens(log_probs, ALLOWED, 3)
    assert tokens.ids.tolist() == [[1, 2, 4]] * 2
    assert as_tuples(best_products(tokens, 4)) == [(1, 1), (1, 2), (1, 4), (2, 1)]
