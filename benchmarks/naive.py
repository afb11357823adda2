"""Naive masking: SpanBERT's spans one block after the other, in Python.

The baselines of the masking benchmark, written for it from the paper (Joshi et al.
2019, section 3.1). Both do the work of `spanbert_jax.data.masking`: whole words, spans
that do not touch, one draw of 80/10/10 a span. `mask_plainly` is a first version, with
a list of places for each word, NumPy's draws and a set of what is masked. In
`mask_tightly` no work is left that grows with the tokens but what NumPy does, and draws
are Python's: as little as a loop over blocks and spans can do.

They know no [UNK], and leave a block without a target if its budget is smaller than
each of its words.
"""

import bisect
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_SPAN_P = 0.2
_LONGEST = 10
_TRIES = 64
_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1


def _cumulative_lengths() -> list[float]:
    """The geometric distribution, renormalised over the lengths that may be drawn."""
    weights = [_SPAN_P * (1 - _SPAN_P) ** k for k in range(_LONGEST)]
    total = sum(weights)
    return list(itertools.accumulate(weight / total for weight in weights))


_LENGTHS = _cumulative_lengths()
# Rounding may leave the last sum below the largest draw.
_LENGTHS[-1] = 1.0


class Vocabulary(NamedTuple):
    """What a masker has to know of it.

    Attributes:
        starts_word: bool [V], whether an id begins a word.
        mask_id: of [MASK].
        random_ids: what random replacements are drawn from.
    """

    starts_word: np.ndarray
    mask_id: int
    random_ids: Sequence[int]


class MaskedBlock(NamedTuple):
    """A block with its masks.

    Attributes:
        tokens: what the model sees, one a token of the block.
        spans: of tokens, as first and one past the last, in the order of the draws.
    """

    tokens: Sequence[int]
    spans: list[tuple[int, int]]


def _budget(length: int) -> int:
    """ceil(0.15 * length), exactly."""
    return -(-3 * length // 20)


def mask_plainly(
    tokens: np.ndarray, vocabulary: Vocabulary, rng: np.random.Generator
) -> MaskedBlock:
    """Masks one block as a first version would.

    Args:
        tokens: int [T], its text, without [CLS] and [SEP]; at least one.
        vocabulary: of the text.
        rng: draws.

    Returns:
        The block.
    """
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if place == 0 or vocabulary.starts_word[token]:
            words.append([])
        words[-1].append(place)
    budget = _budget(len(tokens))
    masked: set[int] = set()
    spans: list[tuple[int, int]] = []
    tries = 0
    while len(masked) < budget and tries < _TRIES:
        if tries == 0:
            length = int(rng.geometric(_SPAN_P))
            # Longer ones are drawn again, which renormalises.
            while length > _LONGEST:
                length = int(rng.geometric(_SPAN_P))
        tries += 1
        first = int(rng.integers(len(words)))
        span: list[int] = []
        for word in words[first : first + length]:
            if len(masked) + len(span) + len(word) > budget:
                break
            span += word
        if not span or any(
            place in masked for place in range(span[0] - 1, span[-1] + 2)
        ):
            continue
        tries = 0
        masked.update(span)
        spans.append((span[0], span[-1] + 1))
    corrupted = tokens.tolist()
    for begin, end in spans:
        draw = rng.random()
        for place in range(begin, end):
            if draw < _MASK_SHARE:
                corrupted[place] = vocabulary.mask_id
            elif draw < _MASK_SHARE + _RANDOM_SHARE:
                chosen = int(rng.integers(len(vocabulary.random_ids)))
                corrupted[place] = vocabulary.random_ids[chosen]
    return MaskedBlock(corrupted, spans)


def mask_tightly(
    tokens: np.ndarray, vocabulary: Vocabulary, rng: random.Random
) -> MaskedBlock:
    """Masks one block with as little Python as there can be.

    Args:
        tokens: int [T], its text, without [CLS] and [SEP]; at least one.
        vocabulary: of the text.
        rng: draws.

    Returns:
        The block.
    """
    starts = vocabulary.starts_word[tokens]
    starts[0] = True
    words = [*np.flatnonzero(starts).tolist(), len(tokens)]
    spans = _tight_spans(words, _budget(len(tokens)), rng)
    corrupted = tokens.copy()
    for begin, end in spans:
        draw = rng.random()
        if draw < _MASK_SHARE:
            corrupted[begin:end] = vocabulary.mask_id
        elif draw < _MASK_SHARE + _RANDOM_SHARE:
            corrupted[begin:end] = rng.choices(vocabulary.random_ids, k=end - begin)
    return MaskedBlock(corrupted, spans)


def _tight_spans(
    words: Sequence[int], budget: int, rng: random.Random
) -> list[tuple[int, int]]:
    """Spans of tokens.

    `words`: the first token of each word, and the number of tokens.
    """
    count = len(words) - 1
    # Word w has cell w + 1; a span takes the cells of its neighbours, too.
    taken = bytearray(count + 2)
    spans = []
    while budget > 0:
        length = bisect.bisect_right(_LENGTHS, rng.random()) + 1
        for _ in range(_TRIES):
            first = int(rng.random() * count)
            last = min(first + length, count)
            while last > first and words[last] - words[first] > budget:
                last -= 1
            if last > first and not any(taken[first + 1 : last + 1]):
                break
        else:
            break
        taken[first : last + 2] = b"\1" * (last + 2 - first)
        spans.append((words[first], words[last]))
        budget -= words[last] - words[first]
    return spans
