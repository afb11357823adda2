"""Pairs: how documents are cut in two, and who trades with whom."""

import numpy as np
import pytest

from spanbert_jax.data.pairs import (
    IS_NEXT,
    IS_RANDOM,
    cut_into_segments,
    segment_capacity,
    trade,
)


def random_document(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Word borders, line borders among them, and the length."""
    length = int(rng.integers(2, 400))
    words = np.flatnonzero(rng.random(length) < rng.choice([0.05, 0.5, 0.9]))
    words = np.union1d([0], words)
    lines = np.union1d([0], words[rng.random(len(words)) < 0.1])
    return words, lines, length


def test_segments_share_out_the_document_within_their_capacity() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        words, lines, length = random_document(rng)
        capacity = int(rng.integers(2, 60))
        ends = cut_into_segments(words, lines, length, capacity)
        sizes = np.diff([0, *ends])
        assert ends[-1] == length
        assert len(ends) % 2 == 0
        assert (sizes >= 1).all()
        assert (sizes <= capacity).all()


def test_segments_end_at_borders_wherever_one_is_in_reach() -> None:
    rng = np.random.default_rng(1)
    at_lines = 0
    for _ in range(2000):
        words, lines, length = random_document(rng)
        capacity = int(rng.integers(4, 60))
        ends = cut_into_segments(words, lines, length, capacity)
        for begin, end in zip([0, *ends], ends[:-1], strict=False):
            at_lines += end in lines
            if end in words:
                continue
            # No word border could have been chosen: the next one is out of reach.
            reach = [w for w in words if begin < w <= min(begin + capacity, length - 2)]
            is_last = end == ends[-2]
            if is_last:
                reach = [w for w in reach if length - w <= capacity]
            assert not reach
    assert at_lines > 1000


def test_a_line_border_is_preferred_when_the_segment_is_over_half_full() -> None:
    words = np.arange(100)
    assert cut_into_segments(words, np.array([0, 6, 18]), 100, 10)[:2] == [6, 16]
    assert cut_into_segments(words, np.array([0, 5, 18]), 100, 10)[:2] == [10, 18]


@pytest.mark.parametrize("length", [0, 1])
def test_a_document_of_one_token_makes_no_pair(length: int) -> None:
    assert cut_into_segments(np.array([0]), np.array([0]), length, 10) == []


def test_a_word_longer_than_a_segment_is_cut() -> None:
    one = np.array([0])
    assert cut_into_segments(one, one, 25, 10) == [10, 20, 22, 25]
    assert cut_into_segments(one, one, 21, 10) == [10, 19, 20, 21]


def test_pairs_fit_the_block() -> None:
    for block_length in range(7, 600):
        capacity = segment_capacity(block_length)
        assert block_length - 4 <= 2 * capacity + 3 <= block_length


def test_trading_is_a_permutation_between_documents() -> None:
    rng = np.random.default_rng(2)
    for seed in range(200):
        count = int(rng.integers(1, 300))
        documents = np.sort(rng.integers(0, rng.integers(1, 40), count))
        partner, labels = trade(documents, seed)
        assert sorted(partner) == list(range(count))
        random = labels == IS_RANDOM
        assert (documents[partner[random]] != documents[random]).all()
        assert (partner[~random] == np.flatnonzero(~random)).all()
        others = count - np.bincount(documents).max()
        assert random.sum() <= count // 2
        if others >= count // 2 + 1:
            # No document has half of the pairs: about half of all can trade.
            assert random.sum() >= count // 4


def test_half_of_the_pairs_trade_and_with_all_documents() -> None:
    documents = np.repeat(np.arange(2000), 5)
    partner, labels = trade(documents, 3)
    assert (labels == IS_NEXT).sum() == 5000
    random = np.flatnonzero(labels == IS_RANDOM)
    distance = documents[partner[random]] - documents[random]
    # Neighbours in the corpus are no likelier than others.
    assert (np.abs(distance) < 20).mean() < 0.05
    assert abs(np.corrcoef(documents[random], documents[partner[random]])[0, 1]) < 0.1


def test_a_single_document_has_nobody_to_trade_with() -> None:
    partner, labels = trade(np.zeros(10, np.int64), 0)
    assert (labels == IS_NEXT).all()
    assert (partner == np.arange(10)).all()


def test_the_seed_decides() -> None:
    documents = np.repeat(np.arange(50), 4)
    first, again = trade(documents, 0), trade(documents, 0)
    assert (first[0] == again[0]).all()
    assert (first[1] != trade(documents, 1)[1]).any()
