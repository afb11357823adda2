"""Masking, against properties, exact numbers and a plain simulation."""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

import text
from simulation import simulate, simulate_tags
from spanbert_jax.corpus.store import Split
from spanbert_jax.data import counter, masking
from spanbert_jax.data.blocks import Words, find_words, tag_words
from spanbert_jax.data.masking import (
    KEEP,
    MASK,
    RANDOM,
    Masking,
    Masks,
    RandomTokens,
)
from spanbert_jax.data.plan import PlanSettings, build_plan
from spanbert_jax.errors import InputError

P_VALUE = 0.001
LENGTHS = (1, 2, 3, 7, 31, 510)
SCHEMES = tuple(masking.SCHEMES)
# Those whose spans are the units that were drawn, and never touch.
APART = ("span", "entity", "noun_phrase")
# [UNK] as a piece among others, not as a word's begin.
INNER_UNK_EDGES = np.where(
    np.arange(text.VOCAB_SIZE) == text.SPECIAL.unk, 0, text.WORD_EDGES
).astype(np.uint8)
UNKNOWN = 0.03


@dataclasses.dataclass(frozen=True)
class Case:
    """Blocks and what masking made of them."""

    tokens: np.ndarray
    offsets: np.ndarray
    segments: np.ndarray
    words: Words
    budget: np.ndarray
    masks: Masks

    @functools.cached_property
    def block(self) -> np.ndarray:
        """The block of each target."""
        return np.searchsorted(self.offsets, self.masks.target, side="right") - 1

    @functools.cached_property
    def span(self) -> np.ndarray:
        """The number of each target's span."""
        return np.unique(self.masks.span_begin, return_inverse=True)[1]

    @functools.cached_property
    def used(self) -> np.ndarray:
        """The number of targets of each block."""
        return np.bincount(self.block, minlength=len(self.budget))

    @functools.cached_property
    def unknown(self) -> np.ndarray:
        """Whether each word holds [UNK]."""
        begins = self.words.offsets[:-1]
        return np.logical_or.reduceat(self.tokens == text.SPECIAL.unk, begins)

    @functools.cached_property
    def shortest(self) -> np.ndarray:
        """Tokens of each block's shortest word without [UNK]; 1000 if it has none."""
        sizes = np.where(self.unknown, 1000, np.diff(self.words.offsets))
        return np.minimum.reduceat(sizes, self.words.first[:-1])


def block_keys(blocks: np.ndarray, epoch: int = 0) -> np.ndarray:
    key = counter.fold(counter.root_key(17), counter.MASKS)
    return counter.fold(counter.fold(key, epoch), blocks)


def whole_words(
    tokens: np.ndarray, offsets: np.ndarray, edges: np.ndarray = text.WORD_EDGES
) -> Words:
    """The words of blocks that are no parts of words, with 80 slots."""
    cut = np.zeros(len(offsets) - 1, bool)
    return find_words(tokens, offsets, cut, cut, edges, text.SPECIAL.unk, 80)


def mask_texts(
    texts: list[np.ndarray],
    recipe: Masking,
    keys: np.ndarray,
    tags: list[np.ndarray] | None = None,
    edges: np.ndarray = text.WORD_EDGES,
    random_tokens: RandomTokens = text.RANDOM_TOKENS,
    pairs: bool = False,
) -> Case:
    """Masks texts, each a block or, in pairs, two neighbours a block."""
    tokens = np.concatenate(texts).astype(np.int32)
    segments = np.cumsum([0, *map(len, texts)])
    words = whole_words(tokens, segments, edges)
    offsets = segments
    if pairs:
        words, offsets = words.in_pairs(), segments[::2]
    if tags:
        moved = [one + begin for one, begin in zip(tags, segments[:-1], strict=True)]
        words = tag_words(words, np.concatenate(moved))
    mask_id = text.SPECIAL.mask
    masks = masking.mask(tokens, offsets, words, keys, recipe, mask_id, random_tokens)
    budget = np.array([math.ceil(recipe.ratio * n) for n in np.diff(offsets).tolist()])
    return Case(tokens, offsets, segments, words, budget, masks)


@functools.cache
def mixed_texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.choice(LENGTHS, 10_000)
    return [text.random_text(rng, n, unknown=UNKNOWN) for n in lengths]


@functools.cache
def mixed_tags() -> list[np.ndarray]:
    rng = np.random.default_rng(10)
    return [text.random_tags(rng, len(one)) for one in mixed_texts()]


@functools.cache
def mixed_case(scheme: str, replacement: str = "span", pairs: bool = False) -> Case:
    """10,000 blocks of the lengths above, or 5,000 pairs, with [UNK]s and tags."""
    recipe = dataclasses.replace(text.PAPER, scheme=scheme, replacement=replacement)
    keys = block_keys(np.arange(5_000 if pairs else 10_000))
    return mask_texts(mixed_texts(), recipe, keys, mixed_tags(), pairs=pairs)


@functools.cache
def full_case(most_pieces: int, unknown: float = 0.0) -> Case:
    """10,000 blocks of 510 tokens, the paper's scheme."""
    rng = np.random.default_rng(1)
    tokens = [text.random_text(rng, 510, most_pieces, unknown) for _ in range(10_000)]
    return mask_texts(tokens, text.PAPER, block_keys(np.arange(10_000)))


@functools.cache
def simulated(
    most_pieces: int, unknown: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of `full_case`: the spans' lengths, starts and their blocks' words."""
    rng = random.Random(2)
    found = []
    for sizes, holders, _ in plain_blocks(full_case(most_pieces, unknown)):
        spans = simulate(sizes, rng, holders)
        found += [(last - first, first, len(sizes)) for first, last in spans]
    return tuple(np.array(found).T)


@functools.cache
def tagged_case(most_pieces: int, unknown: float, tag_share: float) -> Case:
    """2,000 blocks of 510 tokens, tags and words."""
    rng = np.random.default_rng(11)
    texts = [text.random_text(rng, 510, most_pieces, unknown) for _ in range(2000)]
    tags = [text.random_tags(rng, 510, 0.1, 8) for _ in range(2000)]
    recipe = dataclasses.replace(text.PAPER, scheme="entity", tag_share=tag_share)
    return mask_texts(texts, recipe, block_keys(np.arange(2000)), tags)


def plain_blocks(
    case: Case,
) -> Iterator[tuple[list[int], set[int], list[tuple[int, int]]]]:
    """Of each block the words' sizes, those that hold [UNK], and the tags in words."""
    words = case.words
    sizes = np.diff(words.offsets)
    for begin, end in itertools.pairwise(words.first.tolist()):
        mine = (words.tags[:, 0] >= begin) & (words.tags[:, 0] < end)
        yield (
            sizes[begin:end].tolist(),
            set(np.flatnonzero(case.unknown[begin:end]).tolist()),
            [(first, last) for first, last in (words.tags[mine] - begin).tolist()],
        )


def tags_inside(rng: np.random.Generator, offsets: np.ndarray) -> np.ndarray:
    """Random tags of blocks, none across a border."""
    parts = [
        begin + text.random_tags(rng, end - begin)
        for begin, end in itertools.pairwise(offsets.tolist())
    ]
    return np.concatenate(parts)


def block_of_span(case: Case) -> np.ndarray:
    return np.searchsorted(case.words.first, case.masks.spans.first, side="right") - 1


def placed(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of a case."""
    spans, first = case.masks.spans, case.words.first
    block = block_of_span(case)
    lengths = spans.last - spans.first
    return lengths, spans.first - first[block], np.diff(first)[block]


def same_distribution(one: np.ndarray, other: np.ndarray, bins: int) -> float:
    """P-value of two samples of small integers having one distribution."""
    table = np.stack([np.bincount(x, minlength=bins) for x in (one, other)])
    return stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue


# What holds for every scheme.


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_budget_is_kept_but_for_one_shortest_word(scheme: str, pairs: bool) -> None:
    case = mixed_case(scheme, pairs=pairs)
    over = case.used > case.budget
    assert over.any() == (scheme != "subword")
    np.testing.assert_array_equal(case.used[over], case.shortest[over])
    _, first = np.unique(case.masks.span_begin, return_index=True)
    spans = np.bincount(case.block[first], minlength=len(case.budget))
    assert (spans[over] == 1).all()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_block_is_without_a_target_but_of_unknown_words(
    scheme: str, pairs: bool
) -> None:
    case = mixed_case(scheme, pairs=pairs)
    whole = np.logical_and.reduceat(case.unknown, case.words.first[:-1])
    assert whole.any()
    np.testing.assert_array_equal(case.used == 0, whole)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_unused_budget_is_counted(scheme: str, pairs: bool) -> None:
    case = mixed_case(scheme, pairs=pairs)
    expected = np.maximum(case.budget - case.used, 0)
    np.testing.assert_array_equal(case.masks.unused, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("edges", [text.WORD_EDGES, INNER_UNK_EDGES])
def test_no_token_of_a_word_with_the_unknown_id_is_a_target(
    scheme: str, edges: np.ndarray
) -> None:
    recipe = dataclasses.replace(text.PAPER, scheme=scheme, ratio=Fraction(2, 5))
    texts, tags = mixed_texts()[:2000], mixed_tags()[:2000]
    case = mask_texts(texts, recipe, block_keys(np.arange(2000)), tags, edges)
    targets = set(case.masks.target.tolist())
    starts = ((edges[case.tokens] & 1) > 0).tolist()
    word: list[int] = []
    held, seen = 0, 0
    for place, token in enumerate([*case.tokens.tolist(), -1]):
        if token < 0 or starts[place] or place in case.offsets:
            seen += text.SPECIAL.unk in word
            if text.SPECIAL.unk in word:
                held += len(targets.intersection(range(place - len(word), place)))
            word = []
        word.append(token)
    assert seen > 1000
    assert held == 0


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_word_with_the_unknown_id_may_be_a_boundary(scheme: str, pairs: bool) -> None:
    case = mixed_case(scheme, pairs=pairs)
    inside = case.masks.span_end[~np.isin(case.masks.span_end, case.segments)]
    assert (case.tokens[inside] == text.SPECIAL.unk).any()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_targets_are_the_tokens_of_the_spans_in_order(scheme: str, pairs: bool) -> None:
    case = mixed_case(scheme, pairs=pairs)
    masks = case.masks
    assert (np.diff(masks.target) > 0).all()
    begins, first = np.unique(masks.span_begin, return_index=True)
    ends = masks.span_end[first]
    expected = [np.arange(a, b) for a, b in zip(begins, ends, strict=True)]
    np.testing.assert_array_equal(masks.target, np.concatenate(expected))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_span_lies_in_one_segment(scheme: str, pairs: bool) -> None:
    case = mixed_case(scheme, pairs=pairs)
    begin = np.searchsorted(case.segments, case.masks.span_begin, side="right")
    end = np.searchsorted(case.segments, case.masks.span_end - 1, side="right")
    np.testing.assert_array_equal(begin, end)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", [*APART, "word"])
def test_spans_begin_and_end_at_word_borders(scheme: str, pairs: bool) -> None:
    case = mixed_case(scheme, pairs=pairs)
    border = np.append(text.STARTS_WORD[case.tokens], True)
    border[case.segments] = True
    assert border[case.masks.span_begin].all()
    assert border[case.masks.span_end].all()


def test_subword_masking_splits_words() -> None:
    case = mixed_case("subword")
    assert not text.STARTS_WORD[case.tokens[case.masks.span_begin]].all()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_targets_never_exceed_what_the_packer_counts_on(
    scheme: str, pairs: bool
) -> None:
    rng = np.random.default_rng(5)
    longest = rng.choice([2, 8, 12, 40, 90], 500)
    sizes = [rng.integers(1, most + 1, 20) for most in longest]
    shard = text.make_shard([text.words_of(one.tolist()) for one in sizes])
    shard.tokens[rng.random(len(shard.tokens)) < 0.03] = text.SPECIAL.unk
    shard.tokens[:200] = text.SPECIAL.unk
    edges, unk = text.WORD_EDGES, text.SPECIAL.unk
    split = Split("train", (shard,))
    plan = build_plan(split, edges, unk, PlanSettings(32, text.RATIO, False, pairs))
    order = np.arange(plan.num_blocks)
    pieces = plan.segments_of(order)
    tokens = np.concatenate([text.segment_text(split, plan, p) for p in pieces])
    tokens = tokens.astype(np.int32)
    segments = np.cumsum([0, *plan.segments.length[pieces]])
    continued, continues = plan.segments.continued(pieces), plan.segments.continues
    words = find_words(tokens, segments, continued, continues[pieces], edges, unk, 8)
    offsets = segments
    if pairs:
        words, offsets = words.in_pairs(), segments[::2]
    words = tag_words(words, tags_inside(rng, segments))
    recipe = dataclasses.replace(text.PAPER, scheme=scheme)
    keys = block_keys(order)
    masks = masking.mask(tokens, offsets, words, keys, recipe, 3, text.RANDOM_TOKENS)
    used = np.diff(np.searchsorted(masks.target, offsets))
    most = plan.most_targets(text.RATIO)
    np.testing.assert_array_equal(used >= 1, most >= 1)
    assert (most == 0).any()
    assert (used <= most).all()
    assert most.max() <= 8


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("replacement", ["span", "word", "token"])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_block_masks_alike_alone_and_among_others(
    scheme: str, replacement: str, pairs: bool
) -> None:
    recipe = dataclasses.replace(text.PAPER, scheme=scheme, replacement=replacement)
    among = mixed_case(scheme, replacement, pairs)
    count, each = len(among.budget), 2 if pairs else 1
    longest = np.argsort(np.diff(among.offsets))[-3:]
    for number in (0, 1, 17, count // 2, count - 1, *longest):
        mine = slice(each * number, each * (number + 1))
        texts, tags = mixed_texts()[mine], mixed_tags()[mine]
        keys = block_keys(np.array([number]))
        alone = mask_texts(texts, recipe, keys, tags, pairs=pairs)
        mine = among.block == number
        begin = among.offsets[number]
        for name, shift in (
            ("target", begin),
            ("span_begin", begin),
            ("span_end", begin),
            ("action", np.int8(0)),
            ("replacement", np.int32(0)),
        ):
            one, other = getattr(alone.masks, name), getattr(among.masks, name)[mine]
            assert one.dtype == other.dtype
            assert one.tobytes() == (other - shift).tobytes(), name
        assert alone.masks.unused.tolist() == [among.masks.unused[number]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_order_of_the_blocks_changes_no_mask(scheme: str) -> None:
    chosen = np.random.default_rng(6).permutation(1000)
    mixed = mask_texts(
        [mixed_texts()[number] for number in chosen],
        dataclasses.replace(text.PAPER, scheme=scheme),
        block_keys(chosen),
        [mixed_tags()[number] for number in chosen],
    )
    case = mixed_case(scheme)

    def targets(case: Case, number: np.ndarray) -> set[tuple[int, int, int]]:
        place = case.masks.target - case.offsets[case.block]
        columns = number[case.block], place, case.masks.replacement
        return {one for one in zip(*columns, strict=True) if one[0] < 1000}

    assert targets(mixed, chosen) == targets(case, np.arange(10_000))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_epochs_and_blocks_mask_differently(scheme: str) -> None:
    rng = np.random.default_rng(7)
    tokens = text.random_text(rng, 510)
    recipe = dataclasses.replace(text.PAPER, scheme=scheme)
    keys = [block_keys(np.arange(30), epoch) for epoch in range(30)]
    case = mask_texts([tokens] * 900, recipe, np.concatenate(keys))
    masked = np.zeros((900, 510), bool)
    masked[case.block, case.masks.target - case.offsets[case.block]] = True
    assert len(np.unique(masked, axis=0)) == 900
    # Two independent masks share 15 % of 77 targets, more where words are long.
    shared = (masked[:-1] & masked[1:]).sum(axis=1)
    assert shared.mean() == pytest.approx(0.15 * 77, abs=1)


# Span lengths.


def test_lengths_have_the_renormalised_geometric_distribution() -> None:
    thresholds = masking.span_length_thresholds(0.2, 10)
    shares = np.diff(thresholds.astype(np.float64), prepend=0) / 2**32
    expected = 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10)
    np.testing.assert_allclose(shares, expected, atol=2**-31)
    assert shares @ np.arange(1, 11) == pytest.approx(3.797, abs=5e-4)


@pytest.mark.parametrize(("span_p", "longest"), [(0.2, 1), (0.5, 3), (1.0, 10)])
def test_every_draw_has_a_length_within_bounds(span_p: float, longest: int) -> None:
    thresholds = masking.span_length_thresholds(span_p, longest)
    bits = np.array([0, 2**31, 2**32 - 1, 2**64 - 1], np.uint64)
    lengths = masking.draw_lengths(bits, thresholds)
    assert lengths[0] == 1
    assert lengths.max() == lengths[-1] <= longest


def test_drawn_lengths_pass_a_chi_square_test() -> None:
    bits = counter.fold(counter.root_key(8), np.arange(1_000_000))
    drawn = masking.draw_lengths(bits, masking.span_length_thresholds(0.2, 10))
    expected = 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10) * len(drawn)
    counts = np.bincount(drawn, minlength=11)[1:]
    assert stats.chisquare(counts, expected).pvalue > P_VALUE
    # 2.66 is the standard deviation of a length.
    assert drawn.mean() == pytest.approx(3.797, abs=4 * 2.66 / 1000)


# The schemes whose spans never touch.


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", APART)
def test_spans_never_overlap_or_touch_within_a_segment(
    scheme: str, pairs: bool
) -> None:
    case = mixed_case(scheme, pairs=pairs)
    begins, first = np.unique(case.masks.span_begin, return_index=True)
    ends, block = case.masks.span_end[first], case.block[first]
    segment = np.searchsorted(case.segments, begins, side="right")
    same_segment = segment[1:] == segment[:-1]
    assert same_segment.sum() > 1000
    assert (begins[1:] > ends[:-1])[same_segment].all()
    # Two spans may stand beside the middle [SEP], one at each side.
    same_block = block[1:] == block[:-1]
    beside = same_block & (begins[1:] == ends[:-1])
    assert beside.any() == pairs


@pytest.mark.parametrize("scheme", APART)
def test_a_span_holds_at_most_ten_words_and_what_was_drawn(scheme: str) -> None:
    spans = mixed_case(scheme).masks.spans
    lengths = spans.last - spans.first
    assert lengths.min() == 1
    assert lengths.max() == 10
    assert (lengths <= spans.drawn).all()


@pytest.mark.parametrize("scheme", APART)
def test_spans_in_words_and_in_tokens_agree(scheme: str) -> None:
    case = mixed_case(scheme)
    begins, first = np.unique(case.masks.span_begin, return_index=True)
    spans, offsets = case.masks.spans, case.words.offsets
    np.testing.assert_array_equal(offsets[spans.first], begins)
    np.testing.assert_array_equal(offsets[spans.last], case.masks.span_end[first])


# The span scheme.


@pytest.mark.parametrize(("most_pieces", "unknown"), [(2, 0.0), (6, 0.0), (2, UNKNOWN)])
def test_placed_lengths_are_those_of_the_simulation(
    most_pieces: int, unknown: float
) -> None:
    lengths, _, _ = placed(full_case(most_pieces, unknown))
    expected, _, _ = simulated(most_pieces, unknown)
    assert abs(lengths.mean() - expected.mean()) < 0.05
    assert same_distribution(lengths, expected, 11) > P_VALUE


def plain_spans(
    words: Words, block: int, budget: int, key: np.ndarray, recipe: Masking
) -> list[tuple[int, int, int]]:
    """`choose_spans` of one block, one draw after the other."""
    lengths = recipe.span_p, recipe.max_span_words
    thresholds = masking.span_length_thresholds(*lengths)
    begin, end = words.first[block : block + 2].tolist()
    free = set(range(begin, end)) - set(words.unknown.tolist())
    spans, length, draw, tries, left = [], 0, 0, 0, budget
    while left and tries < recipe.max_tries:
        bits = counter.fold(counter.fold(key, 0), draw)
        if not tries:
            length = int(masking.draw_lengths(bits, thresholds)[0])
        first = begin + int(counter.below(bits, end - begin)[0])
        low = int(words.segments[words.segments <= first].max())
        high = int(words.segments[words.segments > first].min())
        last = min(first + length, high)
        while words.offsets[last] - words.offsets[first] > left:
            last -= 1
        draw, tries = draw + 1, tries + 1
        if last > first and free.issuperset(range(first, last)):
            spans.append((first, last, length))
            left -= int(words.offsets[last] - words.offsets[first])
            free -= set(range(max(first - 1, low), min(last + 1, high)))
            tries = 0
    return sorted(spans)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("longest", "span_p", "max_tries", "ratio"),
    [
        (10, 0.2, 64, Fraction(3, 20)),
        (10, 0.2, 1, Fraction(3, 20)),
        (1, 0.5, 3, Fraction(2, 5)),
        (1000, 0.01, 64, Fraction(4, 5)),
    ],
)
def test_spans_are_those_of_a_plain_reading_of_the_draws(
    longest: int, span_p: float, max_tries: int, ratio: Fraction, pairs: bool
) -> None:
    recipe = dataclasses.replace(
        text.PAPER,
        ratio=ratio,
        span_p=span_p,
        max_span_words=longest,
        max_tries=max_tries,
    )
    keys = block_keys(np.arange(60 if pairs else 120))
    case = mask_texts(mixed_texts()[:120], recipe, keys, pairs=pairs)
    spans = masking.choose_spans(case.words, case.budget, keys, recipe)
    expected = [
        span
        for block, budget in enumerate(case.budget.tolist())
        for span in plain_spans(case.words, block, budget, keys[[block]], recipe)
    ]
    found = zip(*(one.tolist() for one in dataclasses.astuple(spans)), strict=True)
    assert list(found) == expected


def test_placed_spans_are_as_long_as_the_paper_wants() -> None:
    lengths, _, _ = placed(full_case(2))
    assert lengths.mean() >= 3.5


@pytest.mark.parametrize(("most_pieces", "unknown"), [(2, 0.0), (6, 0.0), (2, UNKNOWN)])
def test_starts_spread_over_the_words_as_in_the_simulation(
    most_pieces: int, unknown: float
) -> None:
    _, starts, of = placed(full_case(most_pieces, unknown))
    _, expected, expected_of = simulated(most_pieces, unknown)
    bins, expected_bins = starts * 17 // of, expected * 17 // expected_of
    assert same_distribution(bins, expected_bins, 17) > P_VALUE


@pytest.mark.parametrize("end", ["first", "last"])
def test_starts_at_the_ends_are_as_frequent_as_in_the_simulation(end: str) -> None:
    def near(starts: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.minimum(starts if end == "first" else of - 1 - starts, 12)

    _, starts, of = placed(full_case(2))
    _, expected, expected_of = simulated(2)
    here, there = near(starts, of), near(expected, expected_of)
    assert same_distribution(here, there, 13) > P_VALUE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("length", [2, 3, 5, 6])
def test_a_budget_of_one_chooses_uniformly(scheme: str, length: int) -> None:
    recipe = dataclasses.replace(text.PAPER, scheme=scheme)
    texts = [text.words_of([1] * length)] * 20_000
    case = mask_texts(texts, recipe, block_keys(np.arange(20_000)))
    counts = np.bincount(case.masks.target % length, minlength=length)
    assert counts.sum() == 20_000
    assert stats.chisquare(counts).pvalue > P_VALUE


def test_the_fallback_chooses_uniformly_among_the_shortest_words() -> None:
    texts = [text.words_of([2, 4, 2, 3, 2])] * 10_000
    recipe = dataclasses.replace(text.PAPER, ratio=Fraction(1, 20))
    case = mask_texts(texts, recipe, block_keys(np.arange(10_000)))
    begins = case.masks.span_begin[::2] % 13
    counts = np.bincount(begins, minlength=13)
    assert np.flatnonzero(counts).tolist() == [0, 6, 11]
    assert stats.chisquare(counts[[0, 6, 11]]).pvalue > P_VALUE
    assert not case.masks.unused.any()


def test_the_fallback_passes_over_words_with_the_unknown_id() -> None:
    tokens = text.words_of([2, 4, 1, 3, 3])
    tokens[[0, 6]] = text.SPECIAL.unk
    recipe = dataclasses.replace(text.PAPER, ratio=Fraction(1, 20))
    case = mask_texts([tokens] * 1000, recipe, block_keys(np.arange(1000)))
    begins = np.bincount(case.masks.span_begin[::3] % 13, minlength=13)
    assert np.flatnonzero(begins).tolist() == [7, 10]


def test_one_try_leaves_budget_unused_and_many_leave_little() -> None:
    texts = mixed_texts()[:2000]
    unused, budget = [], 0
    for tries in (1, 64):
        recipe = dataclasses.replace(text.PAPER, max_tries=tries)
        case = mask_texts(texts, recipe, block_keys(np.arange(2000)))
        unused.append(int(case.masks.unused.sum()))
        budget = int(case.budget.sum())
    assert unused[0] > 0.1 * budget
    assert unused[1] < 0.02 * budget


@pytest.mark.parametrize(("most_pieces", "unknown"), [(2, 0.0), (6, UNKNOWN)])
def test_spans_in_pairs_are_those_of_the_simulation(
    most_pieces: int, unknown: float
) -> None:
    rng, plain = np.random.default_rng(15), random.Random(16)
    # The second segment is of any length: its spans are cut by both of its ends.
    lengths = [n for _ in range(5000) for n in (254, int(rng.integers(1, 60)))]
    texts = [text.random_text(rng, n, most_pieces, unknown) for n in lengths]
    case = mask_texts(texts, text.PAPER, block_keys(np.arange(5000)), pairs=True)
    middles = case.words.segments[1::2] - case.words.first[:-1]
    found = []
    for (sizes, holders, _), middle in zip(plain_blocks(case), middles, strict=True):
        spans = simulate(sizes, plain, holders, int(middle))
        found += [(last - first, first - middle) for first, last in spans]
    expected_lengths, from_middle = np.array(found).T
    placed_lengths, starts, _ = placed(case)
    starts = starts - middles[block_of_span(case)]
    assert same_distribution(placed_lengths, expected_lengths, 11) > P_VALUE
    # By the distance from the middle, on both sides of it.
    bins, expected = (np.clip(x + 20, 0, 40) for x in (starts, from_middle))
    assert same_distribution(bins, expected, 41) > P_VALUE


def test_units_in_pairs_are_those_of_the_simulation() -> None:
    rng, plain = np.random.default_rng(17), random.Random(18)
    lengths = [n for _ in range(3000) for n in (100, int(rng.integers(1, 40)))]
    texts = [text.random_text(rng, n, 3, UNKNOWN) for n in lengths]
    tags = [text.random_tags(rng, n, 0.1, 8) for n in lengths]
    recipe = dataclasses.replace(text.PAPER, scheme="entity")
    case = mask_texts(texts, recipe, block_keys(np.arange(3000)), tags, pairs=True)
    middles = case.words.segments[1::2] - case.words.first[:-1]
    found = []
    for (sizes, holders, tagged), middle in zip(
        plain_blocks(case), middles, strict=True
    ):
        units = simulate_tags(sizes, tagged, plain, holders, middle=int(middle))
        found += [(last - first, first - middle) for first, last in units]
    expected_lengths, from_middle = np.array(found).T
    placed_lengths, starts, _ = placed(case)
    starts = starts - middles[block_of_span(case)]
    assert same_distribution(placed_lengths, expected_lengths, 11) > P_VALUE
    bins, expected = (np.clip(x + 20, 0, 40) for x in (starts, from_middle))
    assert same_distribution(bins, expected, 41) > P_VALUE


# The schemes of words and pieces.


def test_subword_masks_exactly_the_budget_where_known_tokens_suffice() -> None:
    case = mixed_case("subword")
    known = np.where(case.unknown, 0, np.diff(case.words.offsets))
    most = np.add.reduceat(known, case.words.first[:-1])
    np.testing.assert_array_equal(case.used, np.minimum(case.budget, most))


def test_word_masks_until_no_word_fits() -> None:
    case = mixed_case("word")
    masked = np.zeros(len(case.tokens), bool)
    masked[case.masks.target] = True
    begins, sizes = case.words.offsets[:-1], np.diff(case.words.offsets)
    whole = np.add.reduceat(masked, begins, dtype=int)
    assert np.isin(whole / sizes, [0, 1]).all()
    free = np.where((whole > 0) | case.unknown, 1000, sizes)
    shortest_free = np.minimum.reduceat(free, case.words.first[:-1])
    assert (shortest_free > case.masks.unused).all()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", ["word", "subword"])
def test_spans_are_the_maximal_runs_of_targets(scheme: str, pairs: bool) -> None:
    case = mixed_case(scheme, pairs=pairs)
    target = case.masks.target
    segment = np.searchsorted(case.segments, target, side="right")
    fresh = (np.diff(target, prepend=-2) > 1) | (np.diff(segment, prepend=-1) > 0)
    number = np.cumsum(fresh) - 1
    begins = target[fresh]
    ends = begins + np.bincount(number)
    np.testing.assert_array_equal(case.masks.span_begin, begins[number])
    np.testing.assert_array_equal(case.masks.span_end, ends[number])
    assert (np.bincount(number) > 1).any()


def test_words_are_those_of_a_plain_reading_of_the_draws() -> None:
    keys = block_keys(np.arange(120))
    recipe = dataclasses.replace(text.PAPER, scheme="word")
    case = mask_texts(mixed_texts()[:120], recipe, keys)
    words, expected = case.words, []
    for block, left in enumerate(case.budget.tolist()):
        begin, end = words.first[block : block + 2]
        bits = counter.fold(counter.fold(keys[[block]], 1), np.arange(end - begin))
        order = np.argsort(bits >> np.uint64(36), kind="stable")
        for word in (begin + order).tolist():
            size = int(words.offsets[word + 1] - words.offsets[word])
            if size <= left and not case.unknown[word]:
                left -= size
                expected.append(word)
    spans = masking.choose_words(words, case.budget, keys, recipe)
    found = [
        word
        for first, last in zip(spans.first, spans.last, strict=True)
        for word in range(first, last)
    ]
    assert found == sorted(expected)


@pytest.mark.parametrize("scheme", ["word", "subword"])
def test_units_are_drawn_uniformly_without_replacement(scheme: str) -> None:
    recipe = dataclasses.replace(text.PAPER, scheme=scheme, ratio=Fraction(3, 10))
    count, length = 20_000, 10
    texts = [text.words_of([1] * length)] * count
    case = mask_texts(texts, recipe, block_keys(np.arange(count)))
    chosen = case.masks.target.reshape(count, 3) % length
    subsets, counts = np.unique(chosen, axis=0, return_counts=True)
    # Each of the 120 sets of 3 is as likely as any other.
    assert len(subsets) == 120
    assert stats.chisquare(counts).pvalue > P_VALUE


def test_bert_on_two_hundred_tokens() -> None:
    recipe = dataclasses.replace(text.PAPER, scheme="subword", replacement="token")
    count = 5000
    rng = np.random.default_rng(9)
    texts = [text.random_text(rng, 200) for _ in range(count)]
    case = mask_texts(texts, recipe, block_keys(np.arange(count)))
    assert (np.bincount(case.block, minlength=count) == 30).all()
    assert 200 - len(case.masks.target) / count == 170
    means = np.bincount(case.masks.action, minlength=3) / count
    for action, share in ((MASK, 0.8), (RANDOM, 0.1), (KEEP, 0.1)):
        error = (30 * share * (1 - share) / count) ** 0.5
        assert means[action] == pytest.approx(30 * share, abs=4 * error)


# The schemes of tags.


def tag_units(case: Case) -> np.ndarray:
    """Which spans are tags, from end to end: bool."""
    runs = {tuple(run) for run in case.words.tags.tolist()}
    spans = case.masks.spans
    pairs = zip(spans.first.tolist(), spans.last.tolist(), strict=True)
    return np.array([pair in runs for pair in pairs])


@pytest.mark.parametrize("scheme", ["entity", "noun_phrase"])
def test_a_unit_is_a_tag_or_a_word(scheme: str) -> None:
    case = mixed_case(scheme)
    spans = case.masks.spans
    assert (tag_units(case) | (spans.last - spans.first == 1)).all()
    assert (spans.last - spans.first)[tag_units(case)].max() == 10
    lengths = case.words.tags[:, 1] - case.words.tags[:, 0]
    assert lengths.max() > 10


def test_both_schemes_of_tags_draw_alike() -> None:
    one, other = mixed_case("entity").masks, mixed_case("noun_phrase").masks
    np.testing.assert_array_equal(one.target, other.target)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", ["entity", "noun_phrase"])
def test_the_budget_is_used_until_no_word_and_no_tag_fits(
    scheme: str, pairs: bool
) -> None:
    case = mixed_case(scheme, pairs=pairs)
    words, spans = case.words, case.masks.spans
    total = len(words.offsets) - 1
    block_of_word = np.repeat(np.arange(len(case.budget)), np.diff(words.first))
    count = len(words.segments) - 1
    segment_of_word = np.repeat(np.arange(count), np.diff(words.segments))
    # The words that a unit may not hold: [UNK]s, units and their neighbours.
    barred = case.unknown.copy()
    for shift in (-1, 0, 1):
        for place in (spans.first, spans.last - 1):
            near = np.clip(place + shift, 0, total - 1)
            barred[near[segment_of_word[near] == segment_of_word[place]]] = True
    for first, last in zip(spans.first, spans.last, strict=True):
        barred[first:last] = True
    before = np.append(0, np.cumsum(barred))
    every_word = np.stack([np.arange(total), np.arange(total) + 1], axis=1)
    lengths = words.tags[:, 1] - words.tags[:, 0]
    units = np.concatenate([every_word, words.tags[lengths <= 10]])
    free = units[before[units[:, 0]] == before[units[:, 1]]]
    sizes = words.offsets[free[:, 1]] - words.offsets[free[:, 0]]
    assert len(free) > 10_000
    assert (sizes > case.masks.unused[block_of_word[free[:, 0]]]).all()


@pytest.mark.parametrize(
    ("most_pieces", "unknown", "tag_share"),
    [(2, 0.0, 0.5), (6, UNKNOWN, 0.5), (2, UNKNOWN, 0.2), (2, 0.0, 1.0)],
)
def test_units_are_those_of_the_simulation(
    most_pieces: int, unknown: float, tag_share: float
) -> None:
    case = tagged_case(most_pieces, unknown, tag_share)
    rng = random.Random(12)
    lengths, tagged, unused, tokens = [], [], [], 0
    for (sizes, holders, tags), budget in zip(
        plain_blocks(case), case.budget, strict=True
    ):
        units = simulate_tags(sizes, tags, rng, holders, tag_share)
        lengths += [last - first for first, last in units]
        tagged += [unit in tags for unit in units]
        used = sum(sum(sizes[first:last]) for first, last in units)
        unused.append(budget - used)
        tokens += used
    spans = case.masks.spans
    placed_lengths = spans.last - spans.first
    assert same_distribution(placed_lengths, np.array(lengths), 11) > P_VALUE
    assert same_distribution(tag_units(case), np.array(tagged), 2) > P_VALUE
    assert same_distribution(case.masks.unused, np.array(unused), 80) > P_VALUE
    assert len(case.masks.target) == pytest.approx(tokens, rel=2e-3)


def test_no_tag_is_drawn_at_a_share_of_none() -> None:
    # Tags of two words: no draw of a word looks like one.
    texts = [text.words_of([1] * 60)] * 200
    tags = [np.array([[place, place + 2] for place in range(0, 60, 6)])] * 200
    for share, lengths in ((0.0, {1}), (1.0, {1, 2})):
        recipe = dataclasses.replace(text.PAPER, scheme="entity", tag_share=share)
        case = mask_texts(texts, recipe, block_keys(np.arange(200)), tags)
        spans = case.masks.spans
        drawn, counts = np.unique(spans.last - spans.first, return_counts=True)
        assert set(drawn.tolist()) == lengths
    # A budget of 9: four tags, and a word where no fifth fits.
    assert counts.tolist() == [200, 800]


def test_tags_are_drawn_uniformly_and_only_those_that_may_be() -> None:
    tokens = text.words_of([1] * 100)
    tokens[61] = text.SPECIAL.unk
    # Behind these three: one of eleven words, one with [UNK], one beyond the budget.
    tags = np.array([[0, 10], [11, 21], [90, 100], [30, 41], [60, 62], [70, 86]])
    recipe = dataclasses.replace(text.PAPER, scheme="entity", tag_share=1.0)
    count = 6000
    keys = block_keys(np.arange(count))
    case = mask_texts(
        [tokens] * count, recipe, keys, [tags[tags[:, 0].argsort()]] * count
    )
    spans = case.masks.spans
    first = spans.first[spans.last - spans.first > 1] % 100
    assert len(first) == count
    counts = np.bincount(first, minlength=100)
    assert np.flatnonzero(counts).tolist() == [0, 11, 90]
    assert stats.chisquare(counts[[0, 11, 90]]).pvalue > P_VALUE


def test_a_tag_inside_a_word_takes_the_whole_word() -> None:
    tokens = text.words_of([3, 4, 5, 20, 20])
    tags = np.array([[4, 5], [6, 8]])
    recipe = dataclasses.replace(text.PAPER, scheme="entity", tag_share=1.0)
    case = mask_texts([tokens] * 50, recipe, block_keys(np.arange(50)), [tags] * 50)
    # One becomes a word of 4 tokens; the other, of 9, exceeds the budget of 8.
    assert case.words.tags[:2].tolist() == [[1, 2], [1, 3]]
    targets = case.masks.target.reshape(50, 4) % 52
    assert (targets == [3, 4, 5, 6]).all()


# Replacement.


def unit_of(case: Case, replacement: str) -> np.ndarray:
    if replacement == "span":
        return case.masks.span_begin
    if replacement == "word":
        starts = text.STARTS_WORD[case.tokens]
        return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))[
            case.masks.target
        ]
    return case.masks.target


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("replacement", ["span", "word", "token"])
def test_one_draw_covers_one_unit(scheme: str, replacement: str) -> None:
    case = mixed_case(scheme, replacement)
    action = case.masks.action
    _, first, unit = np.unique(
        unit_of(case, replacement), return_index=True, return_inverse=True
    )
    np.testing.assert_array_equal(action, action[first][unit])
    counts = np.bincount(action[first], minlength=3)
    expected = np.array([0.8, 0.1, 0.1]) * len(first)
    assert stats.chisquare(counts, expected).pvalue > P_VALUE


@pytest.mark.parametrize("replacement", ["span", "word", "token"])
def test_draws_of_neighbouring_units_are_independent(replacement: str) -> None:
    case = mixed_case("span", replacement)
    _, first = np.unique(unit_of(case, replacement), return_index=True)
    action = case.masks.action[first]
    table = np.zeros((3, 3), np.int64)
    np.add.at(table, (action[:-1], action[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > P_VALUE


def test_the_draw_does_not_depend_on_the_length_of_its_span() -> None:
    case = full_case(2)
    _, first = np.unique(case.masks.span_begin, return_index=True)
    lengths = case.masks.spans.last - case.masks.spans.first
    table = np.zeros((3, 10), np.int64)
    np.add.at(table, (case.masks.action[first], lengths - 1), 1)
    assert stats.chi2_contingency(table).pvalue > P_VALUE


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_action_puts_its_own_id(scheme: str) -> None:
    case = mixed_case(scheme)
    masks = case.masks
    assert (masks.replacement[masks.action == MASK] == text.SPECIAL.mask).all()
    kept = masks.action == KEEP
    np.testing.assert_array_equal(
        masks.replacement[kept], case.tokens[masks.target[kept]]
    )
    assert np.isin(masks.replacement[masks.action == RANDOM], text.RANDOM_IDS).all()


def test_random_ids_are_uniform_and_drawn_for_each_token() -> None:
    case = full_case(6)
    random_ids = case.masks.replacement[case.masks.action == RANDOM]
    counts = np.bincount(random_ids, minlength=text.VOCAB_SIZE)[text.FIRST_WORD :]
    assert stats.chisquare(counts).pvalue > P_VALUE
    span = case.span[case.masks.action == RANDOM]
    inside = np.diff(span) == 0
    repeats = (np.diff(random_ids) == 0)[inside].mean()
    assert repeats < 5 / len(text.RANDOM_IDS)


def test_random_ids_that_repeat_are_drawn_as_often_as_they_stand_there() -> None:
    pool = RandomTokens(np.array([20, 20, 20, 30], np.int32))
    keys = block_keys(np.arange(3000))
    texts = mixed_texts()[:3000]
    masks = mask_texts(texts, text.PAPER, keys, random_tokens=pool).masks
    drawn = masks.replacement[masks.action == RANDOM]
    counts = [(drawn == 20).sum(), (drawn == 30).sum()]
    assert sum(counts) == len(drawn)
    expected = [0.75 * len(drawn), 0.25 * len(drawn)]
    assert stats.chisquare(counts, expected).pvalue > P_VALUE


def corpus_counts() -> np.ndarray:
    """Counts of a vocabulary after Zipf; a tenth of the ids occur nowhere."""
    rng = np.random.default_rng(13)
    counts = rng.permutation(10_000_000 // np.arange(1, text.VOCAB_SIZE + 1))
    counts[rng.random(text.VOCAB_SIZE) < 0.1] = 0
    return counts


def test_random_ids_by_frequency_are_as_frequent_as_in_the_corpus() -> None:
    counts = corpus_counts()
    pool = RandomTokens.by_frequency(text.RANDOM_IDS, counts)
    drawn = pool.draw(counter.fold(counter.root_key(14), np.arange(2_000_000)))
    assert drawn.dtype == np.int32
    expected = counts.copy()
    expected[: text.FIRST_WORD] = 0
    observed = np.bincount(drawn, minlength=text.VOCAB_SIZE)
    assert not observed[expected == 0].any()
    shares = expected[expected > 0] / expected.sum()
    pvalue = stats.chisquare(observed[expected > 0], shares * len(drawn)).pvalue
    assert pvalue > P_VALUE


@pytest.mark.parametrize("scheme", SCHEMES)
def test_masks_draw_random_ids_from_the_corpus(scheme: str) -> None:
    counts = corpus_counts()
    pool = RandomTokens.by_frequency(text.RANDOM_IDS, counts)
    recipe = dataclasses.replace(
        text.PAPER, scheme=scheme, mask_share=0.0, random_share=1.0
    )
    keys = block_keys(np.arange(3000))
    masks = mask_texts(mixed_texts()[:3000], recipe, keys, random_tokens=pool).masks
    observed = np.bincount(masks.replacement, minlength=text.VOCAB_SIZE)
    expected = counts.copy()
    expected[: text.FIRST_WORD] = 0
    kept = expected > 0
    assert observed[kept].sum() == len(masks.target)
    shares = expected[kept] / expected.sum() * len(masks.target)
    assert stats.chisquare(observed[kept], shares).pvalue > P_VALUE


@pytest.mark.parametrize("most", [1, 10, 10**6, 10**13])
def test_thresholds_are_exact(most: int) -> None:
    rng = np.random.default_rng(most % 97)
    counts = rng.integers(0, most + 1, 500)
    counts[[0, -1]] = 0
    ids = np.arange(100, 500, dtype=np.int32)
    pool = RandomTokens.by_frequency(ids, counts)
    total = sum(counts[100:].tolist())
    upper = [0, *map(int, pool.thresholds)]
    assert upper[-1] == 2**63
    for place, count in enumerate(counts[100:].tolist()):
        share = Fraction(upper[place + 1] - upper[place], 2**63)
        assert abs(share - Fraction(count, total)) < Fraction(1, 2**63)
        assert count or not share
    # A threshold is the first draw that means another id.
    borders = [bound for bound in set(upper) if 0 < bound < 2**63]
    for shift in (-1, 0):
        bits = np.array([2 * (border + shift) for border in borders], np.uint64)
        expected = [
            ids[next(i for i, x in enumerate(upper[1:]) if border + shift < x)]
            for border in borders
        ]
        assert pool.draw(bits).tolist() == expected
    edges = pool.draw(np.array([0, 2**64 - 1], np.uint64))
    present = ids[counts[100:] > 0]
    assert edges.tolist() == [present[0], present[-1]]


def test_a_corpus_without_a_token_to_draw_is_an_error() -> None:
    counts = np.zeros(text.VOCAB_SIZE, np.int64)
    counts[text.SPECIAL.unk] = 1000
    with pytest.raises(InputError, match=r"data\.random_tokens is 'corpus'"):
        RandomTokens.by_frequency(text.RANDOM_IDS, counts)


@pytest.mark.parametrize(
    ("mask_share", "random_share", "action"),
    [(1.0, 0.0, MASK), (0.0, 1.0, RANDOM), (0.0, 0.0, KEEP)],
)
def test_a_share_of_one_leaves_no_other_action(
    mask_share: float, random_share: float, action: int
) -> None:
    recipe = dataclasses.replace(
        text.PAPER, mask_share=mask_share, random_share=random_share
    )
    bits = np.append(
        counter.fold(counter.root_key(1), np.arange(1000)),
        np.array([0, 2**64 - 1], np.uint64),
    )
    assert (masking.draw_actions(bits, recipe) == action).all()
