"""Blocks, the words in them and their budgets."""

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import text
from spanbert_jax.corpus.store import Shard
from spanbert_jax.corpus.tokenizers import ENDS, STARTS
from spanbert_jax.data import blocks as blocks_module
from spanbert_jax.data.blocks import (
    Segments,
    Words,
    consecutive,
    cut_into_blocks,
    cut_shard,
    find_words,
    shortest_words,
    tag_words,
    target_budget,
    target_slots,
    word_starts,
)
from spanbert_jax.data.pairs import cut_into_segments
from spanbert_jax.errors import InputError

CAPACITY = 510
UNK = text.SPECIAL.unk


def cut_into(
    shard: Shard, block_length: int, edges: np.ndarray = text.WORD_EDGES
) -> Segments:
    into = functools.partial(cut_into_blocks, capacity=block_length - 2)
    slots = target_slots(block_length, text.RATIO)
    return cut_shard(shard, 0, into, edges, UNK, slots)


def cut(
    documents: list[np.ndarray],
    block_length: int = 512,
    edges: np.ndarray = text.WORD_EDGES,
) -> tuple[Shard, Segments]:
    shard = text.make_shard(documents)
    return shard, cut_into(shard, block_length, edges)


def word_sizes(words: Words, block: int) -> list[int]:
    begin, end = words.first[block : block + 2]
    return np.diff(words.offsets[begin : end + 1]).tolist()


def words_of_blocks(
    shard: Shard, blocks: Segments, slots: int, edges: np.ndarray = text.WORD_EDGES
) -> Words:
    offsets = np.append(blocks.start, len(shard.tokens))
    continued = blocks.continued(np.arange(len(blocks)))
    return find_words(
        shard.tokens, offsets, continued, blocks.continues, edges, UNK, slots
    )


def whole_words(tokens: np.ndarray, slots: int = 80) -> Words:
    """The words of one block that is no part of a word."""
    no, offsets = np.zeros(1, bool), np.array([0, len(tokens)])
    return find_words(tokens, offsets, no, no, text.WORD_EDGES, UNK, slots)


def plain_starts(tokens: list[int], edges: np.ndarray) -> list[bool]:
    """Token by token: what begins a word in a document."""
    starts = [True]
    for before, token in itertools.pairwise(tokens):
        starts.append(bool(edges[token] & STARTS or edges[before] & ENDS))
    return starts


def random_edges(seed: int) -> np.ndarray:
    """Edges of all four kinds, most of them none."""
    rng = np.random.default_rng(seed)
    kinds = [0, STARTS, ENDS, STARTS | ENDS]
    return rng.choice(kinds, text.VOCAB_SIZE, p=[0.6, 0.2, 0.1, 0.1]).astype(np.uint8)


def greedy_lengths(sizes: list[int], capacity: int) -> list[int]:
    """Word by word: what the lengths of one document's blocks should be."""
    lengths, held = [], 0
    for size in sizes:
        if held and held + size > capacity:
            lengths.append(held)
            held = 0
        while size > capacity:
            lengths.append(capacity)
            size -= capacity
        held += size
    return [*lengths, held]


def test_a_sentence_of_ten_thousand_tokens_is_cut_into_full_blocks() -> None:
    small, long = text.words_of([1] * 40), text.words_of([1] * 10_000)
    middle = np.concatenate([small, long, small])
    end = np.concatenate([small, long])
    _, blocks = cut([small, middle, end, small])
    expected = []
    for length in (40, 10_080, 10_040, 40):
        expected += [CAPACITY] * (length // CAPACITY) + [length % CAPACITY]
    assert blocks.length.tolist() == expected
    assert not blocks.continues.any()


@pytest.mark.parametrize("most_pieces", [1, 6, 700])
def test_concatenated_blocks_give_back_the_text(most_pieces: int) -> None:
    rng = np.random.default_rng(most_pieces)
    lengths = [40, 10_080, 1, 10_040, 510, 511, 2, 1]
    documents = [text.random_text(rng, length, most_pieces) for length in lengths]
    shard, blocks = cut(documents)
    pieces = [
        shard.tokens[start : start + length]
        for start, length in zip(blocks.start, blocks.length, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), np.concatenate(documents))
    assert blocks.length.min() >= 1
    assert blocks.length.max() <= CAPACITY


def test_no_block_crosses_a_document() -> None:
    rng = np.random.default_rng(3)
    documents = [text.random_text(rng, n) for n in rng.integers(1, 300, 200)]
    shard, blocks = cut(documents, block_length=64)
    ends = blocks.start + blocks.length
    first = np.searchsorted(shard.documents, blocks.start, side="right")
    last = np.searchsorted(shard.documents, ends - 1, side="right")
    np.testing.assert_array_equal(first, last)
    assert np.isin(shard.documents[:-1], blocks.start).all()


@pytest.mark.parametrize("most_pieces", [1, 3, 6, 29, 30, 31, 100])
def test_each_block_takes_the_most_whole_words_that_fit(most_pieces: int) -> None:
    rng = np.random.default_rng(most_pieces)
    documents, expected = [], []
    for _ in range(30):
        sizes = rng.integers(1, most_pieces + 1, rng.integers(1, 60)).tolist()
        documents.append(text.words_of(sizes))
        expected += greedy_lengths(sizes, 30)
    _, blocks = cut(documents, block_length=32)
    assert blocks.length.tolist() == expected


def test_a_border_exactly_at_the_capacity_is_used() -> None:
    _, blocks = cut([text.words_of([505, 5, 1])])
    assert blocks.length.tolist() == [510, 1]


def test_a_word_that_would_end_one_past_the_capacity_moves_on_whole() -> None:
    _, blocks = cut([text.words_of([505, 6, 1])])
    assert blocks.length.tolist() == [505, 7]
    assert blocks.continues.tolist() == [False, False]


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        (510, [3, 510, 6]),
        (511, [3, 510, 7]),
        (1020, [3, 510, 510, 6]),
        (1200, [3, 510, 510, 186]),
        (1600, [3, 510, 510, 510, 76]),
    ],
)
def test_only_a_word_longer_than_a_block_is_cut(size: int, lengths: list[int]) -> None:
    _, blocks = cut([text.words_of([3, size, 2, 4])])
    assert blocks.length.tolist() == lengths
    cuts = (size - 1) // CAPACITY
    expected = [False] + [True] * cuts + [False] * (len(lengths) - cuts - 1)
    assert blocks.continues.tolist() == expected


def test_pieces_of_a_cut_word_are_words_and_its_neighbours_stay_whole() -> None:
    shard, blocks = cut([text.words_of([3, 1200, 2, 4])])
    words = words_of_blocks(shard, blocks, slots=80)
    assert word_sizes(words, 0) == [3]
    assert word_sizes(words, 1) == [1] * 510
    assert word_sizes(words, 2) == [1] * 510
    assert word_sizes(words, 3) == [1] * 180 + [2, 4]


def test_pieces_of_a_word_that_goes_on_in_the_next_block_are_words() -> None:
    tokens = text.words_of([2, 3, 9])
    continued, continues = np.array([False, True]), np.array([True, False])
    edges, offsets = text.WORD_EDGES, np.array([0, 10, 14])
    words = find_words(tokens, offsets, continued, continues, edges, UNK, 80)
    assert word_sizes(words, 0) == [2, 3, 1, 1, 1, 1, 1]
    assert word_sizes(words, 1) == [1, 1, 1, 1]


def test_a_cut_word_that_fills_a_document_leaves_one_word_a_piece() -> None:
    shard, blocks = cut([text.words_of([1021]), text.words_of([2])])
    words = words_of_blocks(shard, blocks, slots=80)
    assert blocks.length.tolist() == [510, 510, 1, 2]
    assert blocks.continues.tolist() == [True, True, False, False]
    assert np.diff(words.offsets).tolist() == [1] * 1021 + [2]


@pytest.mark.parametrize(
    ("size", "sizes", "shortest"),
    [(80, [80], 80), (81, [1] * 81, 1), (509, [1] * 509, 1)],
)
def test_a_lone_word_beyond_the_slots_counts_as_its_pieces(
    size: int, sizes: list[int], shortest: int
) -> None:
    shard, blocks = cut([text.words_of([size])])
    words = words_of_blocks(shard, blocks, slots=80)
    assert word_sizes(words, 0) == sizes
    assert blocks.shortest_word.tolist() == [shortest]


def test_a_word_beyond_the_slots_stays_whole_beside_a_short_one() -> None:
    shard, blocks = cut([text.words_of([100, 1])])
    assert word_sizes(words_of_blocks(shard, blocks, slots=80), 0) == [100, 1]
    assert blocks.shortest_word.tolist() == [1]


def test_a_document_that_begins_inside_a_word_is_cut_and_kept() -> None:
    document = text.words_of([40, 2, 3])[1:]
    shard, blocks = cut([text.words_of([2]), document], block_length=32)
    assert blocks.length.tolist() == [2, 30, 14]
    words = words_of_blocks(shard, blocks, slots=8)
    assert word_sizes(words, 1) == [1] * 30
    assert word_sizes(words, 2) == [1] * 9 + [2, 3]


def test_a_document_that_begins_with_a_later_piece_begins_with_a_word() -> None:
    shard, blocks = cut([text.words_of([2]), text.words_of([5, 1])[1:]])
    words = words_of_blocks(shard, blocks, slots=80)
    assert word_sizes(words, 1) == [4, 1]


# Word edges.


@pytest.mark.parametrize("seed", range(5))
def test_words_begin_where_a_plain_reading_of_the_edges_says(seed: int) -> None:
    rng, edges = np.random.default_rng(seed), random_edges(seed)
    documents = [
        rng.integers(text.FIRST_WORD, text.VOCAB_SIZE, n).astype(np.uint16)
        for n in rng.integers(1, 60, 200)
    ]
    # A block holds any of these documents: no word is cut.
    shard, blocks = cut(documents, edges=edges)
    words = words_of_blocks(shard, blocks, slots=80, edges=edges)
    expected = np.concatenate([plain_starts(one.tolist(), edges) for one in documents])
    np.testing.assert_array_equal(words.offsets[:-1], np.flatnonzero(expected))
    assert words.offsets[words.first].tolist() == shard.documents.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_blocks_end_where_a_plain_reading_of_the_edges_says(seed: int) -> None:
    rng, edges = np.random.default_rng(seed), random_edges(seed)
    documents, expected, continues = [], [], []
    for _ in range(100):
        tokens = rng.integers(text.FIRST_WORD, text.VOCAB_SIZE, rng.integers(1, 60))
        documents.append(tokens.astype(np.uint16))
        starts = plain_starts(tokens.tolist(), edges)
        sizes = np.diff([*np.flatnonzero(starts), len(starts)]).tolist()
        lengths = greedy_lengths(sizes, 6)
        expected += lengths
        continues += [not starts[end] for end in np.cumsum(lengths)[:-1]] + [False]
    shard, blocks = cut(documents, block_length=8, edges=edges)
    assert blocks.length.tolist() == expected
    assert blocks.continues.tolist() == continues
    assert sum(continues) > 10
    chosen = rng.permutation(len(blocks))
    after = np.append(False, continues)[chosen]
    np.testing.assert_array_equal(blocks.continued(chosen), after)
    # No word that was cut is masked as one: its pieces are words, others are whole.
    words = words_of_blocks(shard, blocks, slots=8, edges=edges)
    ends = np.cumsum(expected)
    for block in range(len(blocks)):
        tokens = shard.tokens[ends[block] - expected[block] : ends[block]].tolist()
        starts = plain_starts(tokens, edges)
        sizes = np.diff([*np.flatnonzero(starts), len(starts)]).tolist()
        if block and continues[block - 1]:
            sizes[:1] = [1] * sizes[0]
        if continues[block]:
            sizes[-1:] = [1] * sizes[-1]
        assert word_sizes(words, block) == sizes


def test_an_end_of_a_word_counts_for_nothing_across_a_border() -> None:
    edges = np.zeros(text.VOCAB_SIZE, np.uint8)
    edges[11] = ENDS
    # What ends the first block's word says nothing of the second block's.
    tokens = np.array([12, 11, 12, 12], np.uint16)
    no = np.zeros(2, bool)
    words = find_words(tokens, np.array([0, 2, 4]), no, no, edges, UNK, 80)
    assert words.offsets.tolist() == [0, 2, 4]
    # In one text it would: a word begins behind 11. The first token says none does.
    assert word_starts(tokens, edges).tolist() == [False, False, True, False]


# Words that hold [UNK].


@pytest.mark.parametrize("seed", range(3))
def test_words_with_the_unknown_id_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [*rng.integers(1, 4, 50), *rng.integers(1, 100, 50)]
    shard, blocks = cut([text.random_text(rng, n, 6, 0.1) for n in lengths])
    words = words_of_blocks(shard, blocks, slots=80)
    expected = [
        number
        for number, (begin, end) in enumerate(itertools.pairwise(words.offsets))
        if UNK in shard.tokens[begin:end]
    ]
    assert words.unknown.tolist() == expected
    shortest, sizes = [], np.diff(words.offsets)
    for begin, end in itertools.pairwise(words.first.tolist()):
        known = [sizes[word] for word in range(begin, end) if word not in expected]
        shortest.append(min(known, default=0))
    assert shortest_words(words).tolist() == shortest
    assert 0 in shortest
    assert blocks.shortest_word.tolist() == shortest


def test_a_long_word_is_in_pieces_where_all_others_hold_the_unknown_id() -> None:
    tokens = text.words_of([3, 100, 2])
    tokens[[1, 104]] = UNK
    # An [UNK] begins a word: the words of 3 and 2 pieces become two each.
    assert word_sizes(whole_words(tokens), 0) == [1, 2, 100, 1, 1]
    tokens[[0, 103]] = UNK
    words = whole_words(tokens)
    assert word_sizes(words, 0) == [1, 2, *[1] * 100, 1, 1]
    assert words.unknown.tolist() == [0, 1, 102, 103]


def test_a_block_of_words_with_the_unknown_id_is_left_whole() -> None:
    tokens = text.words_of([100, 90])
    tokens[[0, 100]] = UNK
    words = whole_words(tokens)
    assert word_sizes(words, 0) == [100, 90]
    assert words.unknown.tolist() == [0, 1]
    _, blocks = cut([tokens])
    assert blocks.shortest_word.tolist() == [0]


# Tags.


@pytest.mark.parametrize("seed", range(5))
def test_tags_are_snapped_outward_to_whole_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = text.random_text(rng, 2000)
    tags = text.random_tags(rng, 2000)
    words = tag_words(whole_words(tokens, slots=2000), tags)
    borders = words.offsets.tolist()
    expected = []
    for begin, end in tags.tolist():
        first = max(word for word in range(len(borders) - 1) if borders[word] <= begin)
        last = min(word for word in range(1, len(borders)) if borders[word] >= end)
        if [first, last] not in expected:
            expected.append([first, last])
    assert words.tags.tolist() == expected
    assert len(expected) < len(tags)


def test_no_tags_are_none() -> None:
    words = tag_words(whole_words(text.words_of([1, 2])), np.zeros((0, 2), np.int64))
    assert words.tags.shape == (0, 2)


def test_documents_of_one_token_are_blocks_of_one_word() -> None:
    _, blocks = cut([text.words_of([1])] * 4)
    assert blocks.length.tolist() == [1] * 4
    assert blocks.start.tolist() == [0, 1, 2, 3]
    assert blocks.shortest_word.tolist() == [1] * 4


def test_a_shard_without_documents_has_no_blocks() -> None:
    nothing = np.zeros(1, np.int64)
    shard = Shard("train-00000", np.zeros(0, np.uint16), nothing, nothing)
    assert len(cut_into(shard, 512)) == 0


def test_consecutive_numbers_are_those_of_the_ranges() -> None:
    rng = np.random.default_rng(21)
    begin, counts = rng.integers(-50, 50, 300), rng.integers(0, 4, 300)
    ranges = zip(begin.tolist(), counts.tolist(), strict=True)
    expected = [number for b, n in ranges for number in range(b, b + n)]
    assert consecutive(begin, counts).tolist() == expected
    assert consecutive(begin[:0], counts[:0]).tolist() == []


@pytest.mark.parametrize("ratio", [Fraction(3, 20), Fraction(1, 3), Fraction(1)])
def test_budgets_are_exact(ratio: Fraction) -> None:
    lengths = np.arange(1, 2001)
    expected = [math.ceil(ratio * n) for n in range(1, 2001)]
    assert target_budget(lengths, ratio).tolist() == expected


def test_two_hundred_tokens_have_a_budget_of_thirty() -> None:
    assert int(target_budget(np.array(200), Fraction(3, 20))) == 30


def test_a_full_sequence_has_eighty_slots() -> None:
    assert target_slots(512, Fraction(3, 20)) == 80


@pytest.mark.parametrize("block_length", [3, 16, 32, 128, 384, 1024])
def test_slots_are_the_next_multiple_of_eight(block_length: int) -> None:
    exact = Fraction(3, 20) * (block_length - 2)
    slots = target_slots(block_length, Fraction(3, 20))
    assert slots % 8 == 0
    assert slots - 8 < math.ceil(exact) <= slots


@pytest.mark.parametrize("place", [0, 3, 4])
def test_an_id_outside_the_vocabulary_names_shard_and_document(place: int) -> None:
    documents = [text.words_of([2, 3]) for _ in range(4)]
    documents[2][place] = text.VOCAB_SIZE
    shard = text.make_shard(documents, "train-00007")
    message = f"id {text.VOCAB_SIZE} in document 2 of shard train-00007"
    with pytest.raises(InputError, match=message):
        cut_into(shard, 512)


def test_the_last_id_of_the_vocabulary_is_inside() -> None:
    document = text.words_of([2, 3])
    document[1] = text.VOCAB_SIZE - 1
    _, blocks = cut([document])
    assert blocks.length.tolist() == [5]


def test_portions_of_a_shard_are_cut_as_the_whole_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 90, 60)
    shard = text.make_shard([text.random_text(rng, int(n)) for n in lengths])
    for cut in (
        functools.partial(cut_into_blocks, capacity=30),
        functools.partial(cut_into_segments, capacity=14),
    ):
        arguments = (shard, 3, cut, text.WORD_EDGES, text.SPECIAL.unk, 8)
        whole = cut_shard(*arguments)
        for size in (1, 100, 1000):
            monkeypatch.setattr(blocks_module, "_PORTION_TOKENS", size)
            parts = cut_shard(*arguments)
            for name, array in vars(whole).items():
                np.testing.assert_array_equal(getattr(parts, name), array, name)
        monkeypatch.undo()
