"""Masking: which tokens to predict, and what stands in their place.

All blocks of a batch are masked at once. Every draw is a hash of (seed, epoch, block,
purpose, number), so a block's mask does not depend on its company.
"""

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from spanbert_jax.data import blocks as blocks_lib
from spanbert_jax.data import counter
from spanbert_jax.data.blocks import Words, maskable_sizes
from spanbert_jax.errors import InputError

# Draws of spans that are hashed at once, for a block and for all. To hash more takes
# fewer calls, but those that a block does not come to are in vain.
_AHEAD, _AHEAD_IN_ALL = 16, 4096

# What each hash is for, folded into the block's key.
_SPAN, _ORDER, _FALLBACK, _ACTION, _TOKEN, _COIN, _TAG_ORDER = range(7)

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
        max_span_words: longest span, in words; longer tags are not masked either.
        max_tries: draws of a start for one span before the block's masking stops.
        tag_share: share of draws that take a tag, the rest a word; in schemes of tags.
        mask_share: share of draws that replace by [MASK].
        random_share: share of draws that replace by random tokens; the rest is kept.
    """

    scheme: str
    replacement: str
    ratio: Fraction
    span_p: float
    max_span_words: int
    max_tries: int
    tag_share: float
    mask_share: float
    random_share: float


@dataclasses.dataclass(frozen=True)
class RandomTokens:
    """What random replacements are drawn from.

    Attributes:
        ids: int32 [n], the ids that may be drawn.
        thresholds: uint64 [n], ascending, the upper ends of the 63-bit draws that mean
            each id; None if all ids are equally likely.
    """

    ids: np.ndarray
    thresholds: np.ndarray | None = None

    @classmethod
    def by_frequency(cls, ids: np.ndarray, counts: np.ndarray) -> "RandomTokens":
        """Ids as likely as they are frequent, as in the reference code.

        The thresholds are computed in whole numbers of any size: no sum drifts, each
        probability is exact to 2**-63, and an id that never occurs is never drawn.

        Args:
            ids: int32 [n], the ids that may be drawn.
            counts: int64 [V], how often each id occurs.

        Raises:
            InputError: none of the ids occurs.
        """
        cumulative = list(itertools.accumulate(counts[ids].tolist()))
        total = cumulative[-1]
        if not total:
            raise InputError(
                "data.random_tokens is 'corpus', but the training text has no token"
                " that may stand in for another"
            )
        scaled = [(count << 63) // total for count in cumulative]
        return cls(ids, np.array(scaled, np.uint64))

    def draw(self, bits: np.ndarray) -> np.ndarray:
        """The ids that uint64 draws mean: int32, the same shape."""
        if self.thresholds is None:
            return self.ids[counter.below(bits, len(self.ids))]
        high = bits >> np.uint64(1)
        return self.ids[np.searchsorted(self.thresholds, high, side="right")]


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


class _Places:
    """Where in the words of B blocks a span may still lie.

    Each word has a cell: how many words from this one on may become a span, counted up
    to the longest. Between the cells of two segments lie so many others that what is
    written around a span never reaches those of another segment.
    """

    def __init__(self, words: Words, longest: int) -> None:
        longest = min(longest, int(np.diff(words.segments).max(initial=0)))
        self._gap = longest + 1
        cells = len(words.offsets) + len(words.segments) * self._gap
        self._room = np.full(cells, longest, np.int16)
        if words.unknown.size:
            segment = np.searchsorted(words.segments, words.unknown, side="right") - 1
            barred = self.cell(words.unknown, segment)
            # The nearest one is written last, and stays. Its neighbours are not barred:
            # a word that holds [UNK] may stand beside a span.
            for distance in range(longest, -1, -1):
                self._room[barred - distance] = distance
        # The cells around a span, from `longest` before its left neighbour on, and the
        # most that a span of each length leaves in them: nothing from that neighbour to
        # the right one, before them the words that lie between.
        distance = np.arange(longest, -longest - 2, -1)
        beyond = -distance > np.arange(longest + 1)[:, None] + 1
        most = np.where(beyond, longest, np.maximum(distance, 0))
        self._around = sliding_window_view(self._room, len(distance), writeable=True)
        self._most = most.astype(np.int16)

    def cell(self, word: np.ndarray, segment: np.ndarray) -> np.ndarray:
        """The cells of some words, of which the segments are known: int64."""
        return word + (segment + 1) * self._gap

    def free(self, cell: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Whether each run of words may become a span: bool.

        `cell`: of its first word; `size`: its words.
        """
        return size <= self._room[cell]

    def take(self, cell: np.ndarray, size: np.ndarray) -> None:
        """Keeps each run, and a word at either side, from later spans.

        `cell`, `size`: see `free`; no two of them in a segment.
        """
        window = cell - self._gap
        self._around[window] = np.minimum(self._around[window], self._most[size])


class _Draws(NamedTuple):
    """D draws of a span for each of n blocks, [D, n] each.

    Attributes:
        length: its words, should it be the first draw for this span.
        first: its first word.
        end: one past the last word of its segment.
        begin: its first token.
        cell: of its first word; see `_Places`.
    """

    length: np.ndarray
    first: np.ndarray
    end: np.ndarray
    begin: np.ndarray
    cell: np.ndarray


def _draw_spans(
    words: Words,
    places: _Places,
    thresholds: np.ndarray,
    block: np.ndarray,
    bits: np.ndarray,
) -> _Draws:
    """What uint64 draws [D, n] mean for n blocks."""
    begin, end = words.first[block], words.first[block + 1]
    first = begin + counter.below(bits, end - begin)
    segment = words.segment_of(first, np.broadcast_to(block, first.shape))
    return _Draws(
        length=draw_lengths(bits, thresholds),
        first=first,
        end=words.segments[segment + 1],
        begin=words.offsets[first],
        cell=places.cell(first, segment),
    )


def choose_spans(
    words: Words, budget: np.ndarray, keys: np.ndarray, masking: Masking
) -> Spans:
    """Draws spans of whole words that neither overlap nor touch.

    For each block, until its budget of tokens is used: a length in words, then a start
    uniformly over its words. A span that runs past its segment's last word is cut
    there, one that exceeds the rest of the budget is shortened to the whole words that
    fit. On a clash (it would overlap or touch a span or cover a word with [UNK], or not
    even its first word fits) the length stays and the start is drawn again, `max_tries`
    times in all; then the rest of the budget stays unused.

    Joshi et al. 2019, section 3.1. Differs from the reference code, which cuts the
    last span in mid-word, lets spans touch and predicts [UNK].

    Args:
        words: the words of B blocks.
        budget: int64 [B], tokens to mask.
        keys: uint64 [B], a key for each block.
        masking: the recipe.

    Returns:
        The spans.
    """
    thresholds = span_length_thresholds(masking.span_p, masking.max_span_words)
    places = _Places(words, masking.max_span_words)
    keys = counter.fold(keys, _SPAN)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    # Of each block that goes on: the rest of its budget, the draws since its last span,
    # the length that was drawn for the next one.
    block = np.flatnonzero(budget > 0)
    left = budget[block]
    tries, length = np.zeros((2, len(block)), np.int64)
    draw = 0
    while block.size:
        # So many that a block's tries end with the last of them, never before.
        most = min(_AHEAD, masking.max_tries - int(tries.max()))
        numbers = draw + np.arange(min(most, 1 + _AHEAD_IN_ALL // len(block)))
        draw += len(numbers)
        bits = counter.fold(keys[block], numbers[:, None])
        draws = _draw_spans(words, places, thresholds, block, bits)
        for drawn, first, end, begin, cell in zip(*draws, strict=True):
            going = left > 0
            if not going.any():
                break
            np.copyto(length, drawn, where=tries == 0)
            last = np.minimum(first + length, end)
            (over,) = np.nonzero(going & (words.offsets[last] > begin + left))
            room = begin[over] + left[over]
            last[over] = np.searchsorted(words.offsets, room, side="right") - 1
            size = last - first
            (placed,) = np.nonzero(going & (size > 0) & places.free(cell, size))
            first, last = first[placed], last[placed]
            found.append((first, last, length[placed]))
            left[placed] -= words.offsets[last] - begin[placed]
            places.take(cell[placed], size[placed])
            tries += 1
            tries[placed] = 0
        on = (left > 0) & (tries < masking.max_tries)
        block, left, tries, length = block[on], left[on], tries[on], length[on]
    return _in_order(found)


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

    In a random order of the block's words, each without [UNK] that fits the rest of the
    budget is masked. Words may touch; the spans are the maximal runs of masked words.

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
    sizes = maskable_sizes(words)
    order = _random_order(words.first, counter.fold(keys, _ORDER))
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


def _random_order(first: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The units of each block in a random order, the blocks in theirs: int64 [U].

    `first`: int64 [B + 1], the first unit of each block; the last entry is U.
    """
    block = np.repeat(np.arange(len(keys)), np.diff(first))
    place = np.arange(len(block)) - first[block]
    bits = counter.fold(keys[block], place)
    # One sort by (block, 28 bits of hash, place): the place makes the keys distinct,
    # so that a block's order is the same in any company. It is also read off them
    # again: to sort takes half as long as to argsort.
    order = bits >> np.uint64(36) << np.uint64(16)
    order |= block.astype(np.uint64) << np.uint64(44)
    order |= place.astype(np.uint64)
    order.sort()
    return first[block] + (order & np.uint64(0xFFFF)).astype(np.int64)


def _maximal_runs(chosen: np.ndarray, words: Words) -> Spans:
    """The runs of chosen words; a run ends with its segment."""
    begins, ends = chosen.copy(), chosen.copy()
    begins[1:] &= ~chosen[:-1]
    ends[:-1] &= ~chosen[1:]
    border = words.segments[1:-1]
    begins[border] = chosen[border]
    ends[border - 1] = chosen[border - 1]
    first, last = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    return Spans(first, last, last - first)


def choose_tags(
    words: Words, budget: np.ndarray, keys: np.ndarray, masking: Masking
) -> Spans:
    """Draws tagged runs of words, and single words, that neither overlap nor touch.

    For each block, until its budget is used: a coin decides between tag and word, and
    stays until something is placed. A unit of that kind is drawn uniformly without
    replacement. One that would overlap or touch an earlier one, holds [UNK] or exceeds
    the rest of the budget is passed over for good: places only fill up and the rest
    only shrinks. Where one kind is exhausted the other goes on; where both are, the
    rest of the budget stays unused. Tags of more than `max_span_words` words are not
    drawn: no span is longer than the recipe's longest.

    Joshi et al. 2019, section 6.1: half of the draws take a named entity or a noun
    phrase, half a whole word. The paper does not say what happens on a clash.

    Args:
        words: the words and tags of B blocks.
        budget: int64 [B], tokens to mask.
        keys: uint64 [B], a key for each block.
        masking: the recipe.

    Returns:
        The spans, one a unit; `drawn` is their length.
    """
    coins = counter.fold(keys, _COIN)
    places = _Places(words, masking.max_span_words)
    units, begins = _words_and_tags(words, keys, masking.max_span_words)
    # Of each kind and block: the next unit and one past the last.
    at, end = begins[:, :-1].copy(), begins[:, 1:]
    left = budget.copy()
    placements = np.zeros(len(left), np.int64)
    kind = _take_tag(coins, masking)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    active = np.flatnonzero(left > 0)
    while active.size:
        one = kind[active]
        one = np.where(at[one, active] < end[one, active], one, 1 - one)
        first, last = units[at[one, active]].T
        at[one, active] += 1
        size = words.offsets[last] - words.offsets[first]
        segment = words.segment_of(first, active)
        cell = places.cell(first, segment)
        placed = (size <= left[active]) & places.free(cell, last - first)
        block, first, last = active[placed], first[placed], last[placed]
        found.append((first, last, last - first))
        left[block] -= size[placed]
        places.take(cell[placed], last - first)
        placements[block] += 1
        kind[block] = _take_tag(counter.fold(coins[block], placements[block]), masking)
        some_left = (at[:, active] < end[:, active]).any(axis=0)
        active = active[(left[active] > 0) & some_left]
    return _in_order(found)


def _take_tag(bits: np.ndarray, masking: Masking) -> np.ndarray:
    """1 where the coin of a uint64 draw says tag, 0 where it says word: int64."""
    return (counter.share(bits) < masking.tag_share).astype(np.int64)


def _words_and_tags(
    words: Words, keys: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """The units of `choose_tags`, in the order in which each block draws them.

    Returns:
        int64 [W + K, 2], first and one past the last word, all words before all tags;
        int64 [2, B + 1], where the words, and the tags, of each block begin there.
    """
    tags = words.tags[words.tags[:, 1] - words.tags[:, 0] <= longest]
    first_tag = np.searchsorted(tags[:, 0], words.first)
    word = _random_order(words.first, counter.fold(keys, _ORDER))
    tag = _random_order(first_tag, counter.fold(keys, _TAG_ORDER))
    units = np.concatenate([np.stack([word, word + 1], axis=1), tags[tag]])
    return units, np.stack([words.first, len(word) + first_tag])


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What is masked at a time.

    Attributes:
        choose: draws the spans of B blocks from their words, budgets and keys.
        replacement: what one replacement draw covers unless the recipe differs.
        tags: the corpus's tags that it needs, "" for none.
        pieces: whether `choose` is given each token as a word.
    """

    choose: Callable[[Words, np.ndarray, np.ndarray, Masking], Spans]
    replacement: str
    tags: str = ""
    pieces: bool = False


# Replacement as in SpanBERT where the units are spans, as in BERT where they are not.
SCHEMES: dict[str, Scheme] = {
    "span": Scheme(choose_spans, "span"),
    "word": Scheme(choose_words, "token"),
    "subword": Scheme(choose_words, "token", pieces=True),
    "entity": Scheme(choose_tags, "span", tags="entities"),
    "noun_phrase": Scheme(choose_tags, "span", tags="noun_phrases"),
}


def _as_pieces(words: Words) -> Words:
    """Each token as a word; those of a word that holds [UNK] are not to be masked."""
    holds = np.zeros(len(words.offsets) - 1, bool)
    holds[words.unknown] = True
    return Words(
        offsets=np.arange(words.offsets[-1] + 1),
        first=words.offsets[words.first],
        segments=words.offsets[words.segments],
        unknown=np.flatnonzero(np.repeat(holds, np.diff(words.offsets))),
        tags=np.zeros((0, 2), np.int64),
    )


def _unmasked_blocks(words: Words, spans: Spans) -> np.ndarray:
    held = np.searchsorted(spans.first, words.first)
    return np.flatnonzero(np.diff(held) == 0)


def _add_fallbacks(words: Words, spans: Spans, keys: np.ndarray) -> Spans:
    """Masks one of the shortest words without [UNK] of each block without a target."""
    bare = _unmasked_blocks(words, spans)
    if not bare.size:
        return spans
    sizes, shortest = maskable_sizes(words), blocks_lib.shortest_words(words)
    picked = [np.zeros(0, np.int64)]
    for block in bare[shortest[bare] > 0]:
        begin, end = words.first[block], words.first[block + 1]
        candidates = begin + np.flatnonzero(sizes[begin:end] == shortest[block])
        bits = counter.fold(keys[[block]], _FALLBACK)
        picked.append(candidates[counter.below(bits, len(candidates))])
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
    random_tokens: RandomTokens,
) -> Masks:
    """Masks B blocks.

    Args:
        tokens: int32 [T], the blocks' tokens, one block after the other.
        offsets: int64 [B + 1], where each block begins in `tokens`; none is empty.
        words: their words; with the tags that the scheme masks, if it does.
        keys: uint64 [B], a key for each block and epoch.
        masking: the recipe.
        mask_id: the id of [MASK].
        random_tokens: what random replacements are drawn from.

    Returns:
        The targets and what replaces them. A word that holds [UNK] is never among them:
        a block of nothing else has no target. Every other block has at least one.
    """
    budget = blocks_lib.target_budget(np.diff(offsets), masking.ratio)
    scheme = SCHEMES[masking.scheme]
    units = _as_pieces(words) if scheme.pieces else words
    spans = scheme.choose(units, budget, keys, masking)
    spans = _add_fallbacks(units, spans, keys)

    begin, end = units.offsets[spans.first], units.offsets[spans.last]
    sizes = end - begin
    target = blocks_lib.consecutive(begin, sizes)
    span = np.repeat(np.arange(len(sizes)), sizes)
    block_of_span = np.searchsorted(offsets, begin, side="right") - 1
    block = block_of_span[span]
    # The draw's number is the first token of what it covers.
    if masking.replacement == "span":
        covered, owner, times = begin, block_of_span, sizes
    elif masking.replacement == "word":
        covered, owner, times = _word_begins(target, words), block, 1
    else:
        covered, owner, times = target, block, 1
    bits = _bits(keys, _ACTION, owner, covered - offsets[owner])
    action = np.repeat(draw_actions(bits, masking), times)
    replacement = tokens[target]
    replacement[action == MASK] = mask_id
    random = np.flatnonzero(action == RANDOM)
    owner = block[random]
    bits = _bits(keys, _TOKEN, owner, target[random] - offsets[owner])
    replacement[random] = random_tokens.draw(bits)
    used = np.diff(np.searchsorted(target, offsets))
    return Masks(
        target=target,
        span_begin=begin[span],
        span_end=end[span],
        action=action,
        replacement=replacement,
        unused=np.maximum(budget - used, 0),
        spans=spans,
    )


def _bits(
    keys: np.ndarray, purpose: int, block: np.ndarray, number: np.ndarray
) -> np.ndarray:
    """Draws of blocks, by purpose and number: uint64."""
    return counter.fold(counter.fold(keys, purpose)[block], number)


def _word_begins(tokens: np.ndarray, words: Words) -> np.ndarray:
    """The first token of the word that each token belongs to: int64."""
    return words.offsets[np.searchsorted(words.offsets, tokens, side="right") - 1]


def draw_actions(bits: np.ndarray, masking: Masking) -> np.ndarray:
    """`MASK`, `RANDOM` or `KEEP` for each uint64 draw: int8, the same shape."""
    share = counter.share(bits)
    beyond_random = share >= masking.mask_share + masking.random_share
    return (share >= masking.mask_share).astype(np.int8) + beyond_random
