"""Span masking written out for one block, draw by draw, to compare with."""

import math
import random
from fractions import Fraction


def simulate(sizes: list[int], rng: random.Random) -> list[tuple[int, int]]:
    """One block's spans, as (first word, one past the last), draw by draw."""
    left = math.ceil(Fraction(3, 20) * sum(sizes))
    shares = [0.2 * 0.8**k for k in range(10)]
    held: list[tuple[int, int]] = []
    while left > 0:
        drawn = rng.choices(range(1, 11), shares)[0]
        for _ in range(64):
            first = rng.randrange(len(sizes))
            last, room = first, left
            while last < min(first + drawn, len(sizes)) and sizes[last] <= room:
                room -= sizes[last]
                last += 1
            # Two spans need a word between them.
            if last > first and all(last < a or b < first for a, b in held):
                held.append((first, last))
                left = room
                break
        else:
            break
    return held
