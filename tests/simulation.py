"""The masking schemes written out for one block, draw by draw, to compare with."""

import math
import random
from collections.abc import Set
from fractions import Fraction

Run = tuple[int, int]


def simulate(
    sizes: list[int],
    rng: random.Random,
    unknown: Set[int] = frozenset(),
    middle: int = 0,
) -> list[Run]:
    """One block's spans, as (first word, one past the last), draw by draw.

    Args:
        sizes: tokens of each word.
        rng: draws.
        unknown: the words that hold [UNK].
        middle: the first word of the second segment; 0 if there is none.
    """
    left = math.ceil(Fraction(3, 20) * sum(sizes))
    shares = [0.2 * 0.8**k for k in range(10)]
    held: list[Run] = []
    while left > 0:
        drawn = rng.choices(range(1, 11), shares)[0]
        for _ in range(64):
            first = rng.randrange(len(sizes))
            last, room = first, left
            end = middle if first < middle else len(sizes)
            while last < min(first + drawn, end) and sizes[last] <= room:
                room -= sizes[last]
                last += 1
            if last > first and _is_free(first, last, held, unknown, middle):
                held.append((first, last))
                left = room
                break
        else:
            break
    return held


def simulate_tags(
    sizes: list[int],
    tags: list[Run],
    rng: random.Random,
    unknown: Set[int] = frozenset(),
    tag_share: float = 0.5,
    middle: int = 0,
) -> list[Run]:
    """One block's units of the schemes of tags, as `simulate` returns spans.

    Args:
        sizes: tokens of each word.
        tags: runs of words.
        rng: draws.
        unknown: the words that hold [UNK].
        tag_share: share of draws that take a tag.
        middle: the first word of the second segment; 0 if there is none.
    """
    left = math.ceil(Fraction(3, 20) * sum(sizes))
    words = [(word, word + 1) for word in range(len(sizes))]
    tagged = [(first, last) for first, last in tags if last - first <= 10]
    held: list[Run] = []
    while left > 0 and (words or tagged):
        heads = rng.random() < tag_share
        placed = False
        while not placed and (words or tagged):
            pool = tagged if tagged and (heads or not words) else words
            first, last = pool.pop(rng.randrange(len(pool)))
            size = sum(sizes[first:last])
            placed = size <= left and _is_free(first, last, held, unknown, middle)
            if placed:
                held.append((first, last))
                left -= size
    return held


def _is_free(
    first: int, last: int, held: list[Run], unknown: Set[int], middle: int
) -> bool:
    """Whether a run has no [UNK], and a word or [SEP] between it and each other one."""
    apart = all(
        last < begin or end < first or (begin < middle) != (first < middle)
        for begin, end in held
    )
    return apart and unknown.isdisjoint(range(first, last))
