"""Pairs: two segments a block, for next-sentence prediction as BERT has it.

Each document is cut into pairs of neighbouring segments of at most half a block. Half
of the pairs then trade their second segments, each with a pair of another document.
Every segment is used once.
"""

import numpy as np

from spanbert_jax.data import counter

IS_NEXT, IS_RANDOM = 0, 1  # As BERT numbers them.

_PAIR, _DOCUMENT = range(2)


def segment_capacity(block_length: int) -> int:
    """The most tokens of a segment: [CLS] A [SEP] B [SEP] is to fit the block."""
    return (block_length - 3) // 2


def cut_into_segments(
    word_begins: np.ndarray, line_begins: np.ndarray, length: int, capacity: int
) -> list[int]:
    """Cuts one document into segments, an even number of them.

    A segment ends where a line ends, if that leaves it more than half full; else at
    the last word border. The last two share what is left. A word is cut only where it
    is longer than a segment, or where no other border would leave two segments.

    Args:
        word_begins: int64, ascending, the tokens at which words begin.
        line_begins: int64, ascending, the tokens at which lines begin.
        length: tokens in the document.
        capacity: the most tokens of a segment, at least 2.

    Returns:
        The segments' ends, ascending; the last is `length`. Empty for a document of a
        single token, which makes no pair.
    """
    ends: list[int] = []
    begin = 0
    while length - begin > 2 * capacity:
        for _ in range(2):
            # Whatever is left must give two segments.
            limit = min(begin + capacity, length - 2)
            end = _last(line_begins, begin + capacity // 2 + 1, limit)
            end = end or _last(word_begins, begin + 1, limit) or limit
            ends.append(end)
            begin = end
    if length - begin < 2:
        return ends
    first, last = max(begin + 1, length - capacity), min(length - 1, begin + capacity)
    middle = (begin + length) / 2
    end = _nearest(line_begins, first, last, middle)
    end = end or _nearest(word_begins, first, last, middle) or int(middle)
    return [*ends, end, length]


def _last(borders: np.ndarray, first: int, last: int) -> int:
    """The last border from `first` to `last`; 0 if there is none."""
    place = int(np.searchsorted(borders, last, side="right")) - 1
    return int(borders[place]) if place >= 0 and borders[place] >= first else 0


def _nearest(borders: np.ndarray, first: int, last: int, aim: float) -> int:
    """The border from `first` to `last` nearest to `aim`; 0 if there is none."""
    begin, end = np.searchsorted(borders, [first, last + 1])
    inside = borders[begin:end]
    return int(inside[np.argmin(np.abs(inside - aim))]) if inside.size else 0


def trade(documents: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Decides which pairs trade their second segments.

    Half of them, drawn at random; fewer where too many of these are of one document to
    find each a partner of another.

    Args:
        documents: int64 [N], the document of each pair.
        seed: of the draw.

    Returns:
        int64 [N], the pair whose second segment each gets, a permutation; int32 [N],
        `IS_NEXT` or `IS_RANDOM`.
    """
    count = len(documents)
    partner = np.arange(count, dtype=np.int64)
    labels = np.full(count, IS_NEXT, np.int32)
    key = counter.fold(counter.root_key(seed), counter.PAIRS)
    bits = counter.fold(counter.fold(key, _PAIR), np.arange(count))
    chosen = np.argsort(bits, kind="stable")[: count // 2]
    chosen = _without_excess(chosen, documents)
    if not chosen.size:
        return partner, labels
    # In an order by document, a step as long as the largest group leaves every group.
    rank = counter.fold(counter.fold(key, _DOCUMENT), documents[chosen])
    order = chosen[np.lexsort((bits[chosen], documents[chosen], rank))]
    step = int(np.unique(documents[chosen], return_counts=True)[1].max())
    partner[order] = np.roll(order, -step)
    labels[order] = IS_RANDOM
    return partner, labels


def _without_excess(chosen: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Leaves out pairs of a document that has more of them than all others."""
    names, counts = np.unique(documents[chosen], return_counts=True)
    excess = 2 * int(counts.max(initial=0)) - len(chosen)
    if excess <= 0:
        return chosen
    largest = np.flatnonzero(documents[chosen] == names[np.argmax(counts)])
    return np.delete(chosen, largest[:excess])
