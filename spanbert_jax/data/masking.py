"""Masking: which tokens to predict, and what stands in their place.

All blocks of a batch are masked at once. Every draw is a hash of (seed, epoch, block,
purpose, number), so a block's mask does not depend on its company.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from spanbert_jax.data import blocks as blocks_lib
from spanbert_jax.data import counter
from spanbert_jax.data.blocks import Words

# What each hash is for, folded into the block's key.
_SPAN, _ORDER, _FALLBACK, _ACTION, _TOKEN = range(5)

MASK, RANDOM, KEEP = range(3)
ACTION_NAMES = ("mask", "random", "keep")


@dataclasses.dataclass(frozen=True)
class Masking:
    """The masking part of a recipe.

    Attributes:
        scheme: a name in `SCHEMES`.
        replacement: what one replacement draw covers: "span", "word" or "token".
        ratio: share of a block's tokens to predict.
        span_p: parameter of the geometric distribution of span lengths.
        max_span_words: longest span, in words.
        max_tries: draws of a start for one span before the block's masking stops.
        mask_share: share of draws that replace by [MASK].
        random_share: share of draws that replace by random tokens; the rest is kept.
    """

    scheme: str
    replacement: str
    ratio: Fraction
    span_p: float
    max_span_words: int
    max_tries: int
    mask_share: float
    random_share: float


@dataclasses.dataclass(frozen=True)
class Spans:
    """Masked runs of whole words, in the order of the text.

    Attributes:
        first: int64 [S], the first word of each span, counted over all blocks.
        last: int64 [S], one past its last word.
        drawn: int64 [S], the length in words that was drawn for it; where the end of
            the block or of the budget cut the span, it holds fewer.
    """

    first: np.ndarray
    last: np.ndarray
    drawn: np.ndarray


@dataclasses.dataclass(frozen=True)
class Masks:
    """The targets of B blocks, T in all, in the order of the text.

    Attributes:
        target: int64 [T], each target's place among the blocks' tokens.
        span_begin: int64 [T], the place of its span's first token.
        span_end: int64 [T], the place after its span's last token.
        action: int8 [T], `MASK`, `RANDOM` or `KEEP`.
        replacement: int32 [T], the id that takes the token's place.
        unused: int64 [B], the part of each block's budget that was not used.
        spans: the spans in words; for the scheme "subword" in tokens.
    """

    target: np.ndarray
    span_begin: np.ndarray
    span_end: np.ndarray
    action: np.ndarray
    replacement: np.ndarray
    unused: np.ndarray
    spans: Spans


def span_length_thresholds(span_p: float, max_span_words: int) -> np.ndarray:
    """Upper ends of the 32-bit draws that mean lengths of 1, 2, ... words.

    The geometric distribution is renormalised over 1..max_span_words, as the reference
    code does: mean 3.797 for p = 0.2 and 10. The paper's "clipped at 10" would pile
    the tail onto 10, for a mean of 4.46 where the paper states 3.8.

    Returns:
        uint64 [max_span_words], ascending.
    """
    weight = (1 - span_p) ** np.arange(max_span_words, dtype=np.float64)
    cumulative = np.cumsum(weight) / weight.sum()
    thresholds = np.rint(cumulative * 2**32).astype(np.uint64)
    thresholds[-1] = 2**32
    return thresholds


def draw_lengths(bits: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Span lengths in words from the lower 32 bits of uint64 draws: int64."""
    low = bits & np.uint64(0xFFFFFFFF)
    return np.searchsorted(thresholds, low, side="right") + 1


def choose_spans(
    words: Words, budget: np.ndarray, keys: np.ndarray, masking: Masking
) -> Spans:
    """Draws spans of whole words that neither overlap nor touch.

    For each block, until its budget of tokens is used: a length in words, then a start
    uniformly over its words. A span that runs past the last word is cut there, one
    that exceeds the rest of the budget is shortened to the whole words that fit. On a
    clash (it would overlap or touch a span, or not even its first word fits) the
    length stays and the start is drawn again, `max_tries` times in all; then the rest
    of the budget stays unused.

    Joshi et al. 2019, section 3.1. Differs from the reference code, which cuts the
    last span in mid-word and lets spans touch.

    Args:
        words: the words of B blocks.
        budget: int64 [B], tokens to mask.
        keys: uint64 [B], a key for each block.
        masking: the recipe.

    Returns:
        The spans.
    """
    thresholds = span_length_thresholds(masking.span_p, masking.max_span_words)
    reach = np.arange(masking.max_span_words + 2)
    number_of_words = np.diff(words.first)
    keys = counter.fold(keys, _SPAN)
    # A word's cell is its number + its block's + 1, so that one guard cell stands
    # between the words of two blocks and spans there do not count as touching.
    taken = np.zeros(len(words.offsets) + len(number_of_words) + len(reach), bool)
    left = budget.copy()
    length = np.zeros(len(left), np.int64)
    tries = np.zeros(len(left), np.int64)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    active = np.flatnonzero(left > 0)
    draw = 0
    while active.size:
        bits = counter.fold(keys[active], draw)
        draw += 1
        fresh = tries[active] == 0
        length[active[fresh]] = draw_lengths(bits[fresh], thresholds)
        first = words.first[active] + counter.below(bits, number_of_words[active])
        last = np.minimum(first + length[active], words.first[active + 1])
        last = _shorten(words.offsets, first, last, left[active])
        cells = (first + active + 1)[:, None] + reach[:-2]
        clash = (taken[cells] & (reach[:-2] < (last - first)[:, None])).any(axis=1)
        placed = (last > first) & ~clash
        tries[active] = np.where(placed, 0, tries[active] + 1)
        block, first, last = active[placed], first[placed], last[placed]
        found.append((first, last, length[block]))
        left[block] -= words.offsets[last] - words.offsets[first]
        cells = (first + block)[:, None] + reach
        taken[cells[reach < (last - first + 2)[:, None]]] = True
        active = active[(left[active] > 0) & (tries[active] < masking.max_tries)]
    return _in_order(found)


def _shorten(
    offsets: np.ndarray, first: np.ndarray, last: np.ndarray, left: np.ndarray
) -> np.ndarray:
    """The largest ends up to `last` whose words hold at most `left` tokens."""
    room = offsets[first] + left
    over = np.flatnonzero(offsets[last] > room)
    if over.size:
        fit = np.searchsorted(offsets, room[over], side="right") - 1
        last[over] = fit
    return last


def _in_order(found: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Spans:
    empty = np.zeros(0, np.int64)
    columns = zip((empty, empty, empty), *found, strict=True)
    first, last, drawn = (np.concatenate(column) for column in columns)
    order = np.argsort(first)
    return Spans(first[order], last[order], drawn[order])


def choose_words(
    words: Words, budget: np.ndarray, keys: np.ndarray, masking: Masking
) -> Spans:
    """Draws whole words uniformly without replacement, as whole-word BERT does.

    In a random order of the block's words, each that fits the rest of the budget is
    masked. Words may touch; the spans are the maximal runs of masked words.

    Args:
        words: the words of B blocks.
        budget: int64 [B], tokens to mask.
        keys: uint64 [B], a key for each block.
        masking: the recipe; nothing of it is used here.

    Returns:
        The spans; `drawn` is their length.
    """
    del masking  # No knob of it concerns this scheme.
    number_of_words = np.diff(words.first)
    sizes = np.diff(words.offsets)
    order = _random_order(words, counter.fold(keys, _ORDER))
    chosen = np.zeros(len(sizes), bool)
    left = budget.copy()
    active = np.flatnonzero(left > 0)
    rank = 0
    while active.size:
        word = order[words.first[active] + rank]
        rank += 1
        fits = sizes[word] <= left[active]
        chosen[word[fits]] = True
        left[active[fits]] -= sizes[word[fits]]
        active = active[(left[active] > 0) & (rank < number_of_words[active])]
    return _maximal_runs(chosen, words)


def _random_order(words: Words, keys: np.ndarray) -> np.ndarray:
    """The words of each block in a random order, the blocks in theirs: int64 [W]."""
    number_of_words = np.diff(words.first)
    block = np.repeat(np.arange(len(keys)), number_of_words)
    place = np.arange(len(block)) - words.first[block]
    bits = counter.fold(keys[block], place)
    # One sort by (block, 28 bits of hash, place): the place makes the keys distinct,
    # so that a block's order is the same in any company.
    low = (bits >> np.uint64(36) << np.uint64(16)) | place.astype(np.uint64)
    return np.argsort((block.astype(np.uint64) << np.uint64(44)) | low)


def _maximal_runs(chosen: np.ndarray, words: Words) -> Spans:
    """The runs of chosen words; a run ends with its block."""
    begins, ends = chosen.copy(), chosen.copy()
    begins[1:] &= ~chosen[:-1]
    ends[:-1] &= ~chosen[1:]
    border = words.first[1:-1]
    begins[border] = chosen[border]
    ends[border - 1] = chosen[border - 1]
    first, last = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    return Spans(first, last, last - first)


Scheme = Callable[[Words, np.ndarray, np.ndarray, Masking], Spans]

# `subword` is `word` over words of one piece each, see `mask`.
SCHEMES: dict[str, Scheme] = {
    "span": choose_spans,
    "word": choose_words,
    "subword": choose_words,
}


def _unmasked_blocks(words: Words, spans: Spans) -> np.ndarray:
    held = np.searchsorted(spans.first, words.first)
    return np.flatnonzero(np.diff(held) == 0)


def _add_fallbacks(words: Words, spans: Spans, keys: np.ndarray) -> Spans:
    """Masks one of the shortest words of each block that has no target."""
    bare = _unmasked_blocks(words, spans)
    if not bare.size:
        return spans
    picked = []
    for block in bare:
        begin, end = words.first[block], words.first[block + 1]
        sizes = np.diff(words.offsets[begin : end + 1])
        shortest = np.flatnonzero(sizes == sizes.min())
        bits = counter.fold(keys[[block]], _FALLBACK)
        picked.append(begin + shortest[counter.below(bits, len(shortest))])
    first = np.concatenate(picked)
    added = (first, first + 1, np.ones(len(first), np.int64))
    return _in_order([(spans.first, spans.last, spans.drawn), added])


def mask(
    tokens: np.ndarray,
    offsets: np.ndarray,
    words: Words,
    keys: np.ndarray,
    masking: Masking,
    mask_id: int,
    random_ids: np.ndarray,
) -> Masks:
    """Masks B blocks.

    Args:
        tokens: int32 [T], the blocks' tokens, one block after the other.
        offsets: int64 [B + 1], where each block begins in `tokens`; none is empty.
        words: their words.
        keys: uint64 [B], a key for each block and epoch.
        masking: the recipe.
        mask_id: the id of [MASK].
        random_ids: int32 [n], the ids that random replacements are drawn from.

    Returns:
        The targets and what replaces them. Every block has at least one target.
    """
    budget = blocks_lib.target_budget(np.diff(offsets), masking.ratio)
    units = words
    if masking.scheme == "subword":
        units = Words(np.arange(len(tokens) + 1), offsets)
    spans = SCHEMES[masking.scheme](units, budget, keys, masking)
    spans = _add_fallbacks(units, spans, keys)

    target, span_begin, span_end = _tokens_of(spans, units)
    block = np.searchsorted(offsets, target, side="right") - 1
    # The draw's number is the first token of what it covers.
    if masking.replacement == "span":
        covered = span_begin
    elif masking.replacement == "word":
        covered = _word_begins(target, words)
    else:
        covered = target
    bits = counter.fold(counter.fold(keys, _ACTION)[block], covered - offsets[block])
    action = draw_actions(bits, masking)
    bits = counter.fold(counter.fold(keys, _TOKEN)[block], target - offsets[block])
    drawn_ids = random_ids[counter.below(bits, len(random_ids))]
    used = np.bincount(block, minlength=len(budget))
    return Masks(
        target=target,
        span_begin=span_begin,
        span_end=span_end,
        action=action,
        replacement=np.choose(action, (np.int32(mask_id), drawn_ids, tokens[target])),
        unused=np.maximum(budget - used, 0),
        spans=spans,
    )


def _tokens_of(spans: Spans, words: Words) -> tuple[np.ndarray, ...]:
    """Each masked token, and the begin and end of its span: three int64 [T]."""
    begin, end = words.offsets[spans.first], words.offsets[spans.last]
    sizes = end - begin
    before = np.cumsum(sizes) - sizes
    token = np.arange(sizes.sum()) + np.repeat(begin - before, sizes)
    return token, np.repeat(begin, sizes), np.repeat(end, sizes)


def _word_begins(tokens: np.ndarray, words: Words) -> np.ndarray:
    """The first token of the word that each token belongs to: int64."""
    return words.offsets[np.searchsorted(words.offsets, tokens, side="right") - 1]


def draw_actions(bits: np.ndarray, masking: Masking) -> np.ndarray:
    """`MASK`, `RANDOM` or `KEEP` for each uint64 draw: int8, the same shape."""
    share = (bits >> np.uint64(11)) * 2.0**-53
    beyond_random = share >= masking.mask_share + masking.random_share
    return (share >= masking.mask_share).astype(np.int8) + beyond_random
