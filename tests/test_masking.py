"""Masking, against properties, exact numbers and a plain simulation."""

import dataclasses
import functools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

import text
from simulation import simulate
from spanbert_jax.data import counter, masking
from spanbert_jax.data.blocks import Words, cut_shard, find_words, shortest_words
from spanbert_jax.data.masking import KEEP, MASK, RANDOM, Masking, Masks

P_VALUE = 0.001
LENGTHS = (1, 2, 3, 7, 31, 510)
SCHEMES = tuple(masking.SCHEMES)


@dataclasses.dataclass(frozen=True)
class Case:
    """Blocks and what masking made of them."""

    tokens: np.ndarray
    offsets: np.ndarray
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


def block_keys(blocks: np.ndarray, epoch: int = 0) -> np.ndarray:
    key = counter.fold(counter.root_key(17), counter.MASKS)
    return counter.fold(counter.fold(key, epoch), blocks)


def mask_texts(texts: list[np.ndarray], recipe: Masking, keys: np.ndarray) -> Case:
    tokens = np.concatenate(texts).astype(np.int32)
    offsets = np.cumsum([0, *map(len, texts)])
    continues = np.zeros(len(texts), bool)
    words = find_words(tokens, offsets, continues, text.STARTS_WORD, 80)
    masks = masking.mask(
        tokens, offsets, words, keys, recipe, text.SPECIAL.mask, text.RANDOM_IDS
    )
    budget = np.array([math.ceil(recipe.ratio * len(one)) for one in texts])
    return Case(tokens, offsets, words, budget, masks)


@functools.cache
def mixed_texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [text.random_text(rng, n) for n in rng.choice(LENGTHS, 10_000)]


@functools.cache
def mixed_case(scheme: str, replacement: str = "span", epoch: int = 0) -> Case:
    """10,000 blocks of the lengths above."""
    recipe = dataclasses.replace(text.PAPER, scheme=scheme, replacement=replacement)
    return mask_texts(mixed_texts(), recipe, block_keys(np.arange(10_000), epoch))


@functools.cache
def full_case(most_pieces: int) -> Case:
    """10,000 blocks of 510 tokens, the paper's scheme."""
    rng = np.random.default_rng(1)
    tokens = [text.random_text(rng, 510, most_pieces) for _ in range(10_000)]
    return mask_texts(tokens, text.PAPER, block_keys(np.arange(10_000)))


@functools.cache
def simulated(most_pieces: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of `full_case`: the spans' lengths, starts and their blocks' words."""
    words = full_case(most_pieces).words
    sizes = np.diff(words.offsets)
    rng = random.Random(2)
    found = []
    for begin, end in zip(words.first[:-1], words.first[1:], strict=True):
        spans = simulate(sizes[begin:end].tolist(), rng)
        found += [(last - first, first, end - begin) for first, last in spans]
    return tuple(np.array(found).T)


def placed(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of a case."""
    spans, first = case.masks.spans, case.words.first
    block = np.searchsorted(first, spans.first, side="right") - 1
    lengths = spans.last - spans.first
    return lengths, spans.first - first[block], np.diff(first)[block]


def same_distribution(one: np.ndarray, other: np.ndarray, bins: int) -> float:
    """P-value of two samples of small integers having one distribution."""
    table = np.stack([np.bincount(x, minlength=bins) for x in (one, other)])
    return stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue


# What holds for every scheme.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_budget_is_kept_but_for_one_shortest_word(scheme: str) -> None:
    case = mixed_case(scheme)
    used = np.bincount(case.block, minlength=len(case.budget))
    over = used > case.budget
    assert over.any() == (scheme != "subword")
    np.testing.assert_array_equal(used[over], shortest_words(case.words)[over])
    _, first = np.unique(case.masks.span_begin, return_index=True)
    spans = np.bincount(case.block[first], minlength=len(case.budget))
    assert (spans[over] == 1).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_block_is_without_a_target(scheme: str) -> None:
    case = mixed_case(scheme)
    assert np.bincount(case.block, minlength=len(case.budget)).min() >= 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_unused_budget_is_counted(scheme: str) -> None:
    case = mixed_case(scheme)
    used = np.bincount(case.block, minlength=len(case.budget))
    expected = np.maximum(case.budget - used, 0)
    np.testing.assert_array_equal(case.masks.unused, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_targets_are_the_tokens_of_the_spans_in_order(scheme: str) -> None:
    case = mixed_case(scheme)
    masks = case.masks
    assert (np.diff(masks.target) > 0).all()
    begins, first = np.unique(masks.span_begin, return_index=True)
    ends = masks.span_end[first]
    expected = [np.arange(a, b) for a, b in zip(begins, ends, strict=True)]
    np.testing.assert_array_equal(masks.target, np.concatenate(expected))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_span_lies_in_one_block(scheme: str) -> None:
    case = mixed_case(scheme)
    begin = np.searchsorted(case.offsets, case.masks.span_begin, side="right")
    end = np.searchsorted(case.offsets, case.masks.span_end - 1, side="right")
    np.testing.assert_array_equal(begin, end)


@pytest.mark.parametrize("scheme", ["span", "word"])
def test_spans_begin_and_end_at_word_borders(scheme: str) -> None:
    case = mixed_case(scheme)
    border = np.append(text.STARTS_WORD[case.tokens], True)
    border[case.offsets] = True
    assert border[case.masks.span_begin].all()
    assert border[case.masks.span_end].all()


def test_subword_masking_splits_words() -> None:
    case = mixed_case("subword")
    assert not text.STARTS_WORD[case.tokens[case.masks.span_begin]].all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_targets_never_exceed_what_the_packer_counts_on(scheme: str) -> None:
    rng = np.random.default_rng(5)
    longest = rng.choice([2, 8, 12, 40, 90], 500)
    sizes = [rng.integers(1, most + 1, 20) for most in longest]
    shard = text.make_shard([text.words_of(one.tolist()) for one in sizes])
    blocks = cut_shard(shard, 0, text.STARTS_WORD, 32, text.RATIO)
    tokens = shard.tokens.astype(np.int32)
    offsets = np.append(blocks.start, len(tokens))
    words = find_words(tokens, offsets, blocks.continues, text.STARTS_WORD, 8)
    recipe = dataclasses.replace(text.PAPER, scheme=scheme)
    keys = block_keys(np.arange(len(blocks)))
    masks = masking.mask(tokens, offsets, words, keys, recipe, 3, text.RANDOM_IDS)
    block = np.searchsorted(offsets, masks.target, side="right") - 1
    used = np.bincount(block, minlength=len(blocks))
    assert (used >= 1).all()
    assert (used <= blocks.most_targets).all()
    assert blocks.most_targets.max() <= 8


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("replacement", ["span", "word", "token"])
def test_a_block_masks_alike_alone_and_among_others(
    scheme: str, replacement: str
) -> None:
    recipe = dataclasses.replace(text.PAPER, scheme=scheme, replacement=replacement)
    among = mixed_case(scheme, replacement)
    for number in (0, 1, 17, 4999, 9999, *np.argsort(np.diff(among.offsets))[-3:]):
        tokens = mixed_texts()[number]
        alone = mask_texts([tokens], recipe, block_keys(np.array([number])))
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


def test_the_order_of_the_blocks_changes_no_mask() -> None:
    chosen = np.random.default_rng(6).permutation(1000)
    mixed = mask_texts(
        [mixed_texts()[number] for number in chosen], text.PAPER, block_keys(chosen)
    )
    case = mixed_case("span")

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


# The span scheme.


def test_spans_never_overlap_or_touch_within_a_block() -> None:
    case = mixed_case("span")
    begins, first = np.unique(case.masks.span_begin, return_index=True)
    ends, block = case.masks.span_end[first], case.block[first]
    same_block = block[1:] == block[:-1]
    assert same_block.sum() > 1000
    assert (begins[1:] > ends[:-1])[same_block].all()


def test_a_span_holds_at_most_ten_words_and_what_was_drawn() -> None:
    spans = mixed_case("span").masks.spans
    lengths = spans.last - spans.first
    assert lengths.min() == 1
    assert lengths.max() == 10
    assert (lengths <= spans.drawn).all()


def test_spans_in_words_and_in_tokens_agree() -> None:
    case = mixed_case("span")
    begins, first = np.unique(case.masks.span_begin, return_index=True)
    spans, offsets = case.masks.spans, case.words.offsets
    np.testing.assert_array_equal(offsets[spans.first], begins)
    np.testing.assert_array_equal(offsets[spans.last], case.masks.span_end[first])


@pytest.mark.parametrize("most_pieces", [2, 6])
def test_placed_lengths_are_those_of_the_simulation(most_pieces: int) -> None:
    lengths, _, _ = placed(full_case(most_pieces))
    expected, _, _ = simulated(most_pieces)
    assert abs(lengths.mean() - expected.mean()) < 0.05
    assert same_distribution(lengths, expected, 11) > P_VALUE


def test_placed_spans_are_as_long_as_the_paper_wants() -> None:
    lengths, _, _ = placed(full_case(2))
    assert lengths.mean() >= 3.5


@pytest.mark.parametrize("most_pieces", [2, 6])
def test_starts_spread_over_the_words_as_in_the_simulation(most_pieces: int) -> None:
    _, starts, of = placed(full_case(most_pieces))
    _, expected, expected_of = simulated(most_pieces)
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


# The schemes of words and pieces.


def test_subword_masks_exactly_the_budget() -> None:
    case = mixed_case("subword")
    used = np.bincount(case.block, minlength=len(case.budget))
    np.testing.assert_array_equal(used, case.budget)


def test_word_masks_until_no_word_fits() -> None:
    case = mixed_case("word")
    masked = np.zeros(len(case.tokens), bool)
    masked[case.masks.target] = True
    begins, sizes = case.words.offsets[:-1], np.diff(case.words.offsets)
    whole = np.add.reduceat(masked, begins, dtype=int)
    assert np.isin(whole / sizes, [0, 1]).all()
    free = np.where(whole > 0, 1000, sizes)
    shortest_free = np.minimum.reduceat(free, case.words.first[:-1])
    assert (shortest_free > case.masks.unused).all()


@pytest.mark.parametrize("scheme", ["word", "subword"])
def test_spans_are_the_maximal_runs_of_targets(scheme: str) -> None:
    case = mixed_case(scheme)
    target, block = case.masks.target, case.block
    fresh = (np.diff(target, prepend=-2) > 1) | (np.diff(block, prepend=-1) > 0)
    number = np.cumsum(fresh) - 1
    begins = target[fresh]
    ends = begins + np.bincount(number)
    np.testing.assert_array_equal(case.masks.span_begin, begins[number])
    np.testing.assert_array_equal(case.masks.span_end, ends[number])
    assert (np.bincount(number) > 1).any()


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


@pytest.mark.parametrize("scheme", ["span", "word"])
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
    texts = mixed_texts()[:3000]
    tokens = np.concatenate(texts).astype(np.int32)
    offsets = np.cumsum([0, *map(len, texts)])
    words = find_words(tokens, offsets, np.zeros(3000, bool), text.STARTS_WORD, 80)
    pool = np.array([20, 20, 20, 30], np.int32)
    keys = block_keys(np.arange(3000))
    masks = masking.mask(tokens, offsets, words, keys, text.PAPER, 3, pool)
    drawn = masks.replacement[masks.action == RANDOM]
    counts = [(drawn == 20).sum(), (drawn == 30).sum()]
    assert sum(counts) == len(drawn)
    expected = [0.75 * len(drawn), 0.25 * len(drawn)]
    assert stats.chisquare(counts, expected).pvalue > P_VALUE


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
