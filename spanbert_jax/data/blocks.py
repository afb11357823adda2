"""Segments: the contiguous pieces of documents that blocks are made of.

A block, which is what one [CLS] leads, is a segment; in pair runs it is two.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from spanbert_jax.corpus.store import Shard
from spanbert_jax.corpus.tokenizers import ENDS, STARTS
from spanbert_jax.errors import InputError

# Tokens that are cut at a time: it takes some ten bytes of memory for each.
_PORTION_TOKENS = 8_000_000
# The size of a word that is not to be masked: no budget has room for it.
_NEVER = np.iinfo(np.int64).max

# Cuts one document: where its words and its lines begin, both int64 and ascending from
# 0, and its tokens, to its segments' ends, ascending. No ends: it is left out.
Cut = Callable[[np.ndarray, np.ndarray, int], list[int]]


@dataclasses.dataclass(frozen=True)
class Segments:
    """Where the G segments of a split lie, in the order of the text.

    A segment never crosses a document's end.

    Attributes:
        shard: int32 [G], which shard of the split.
        start: int64 [G], the segment's first token in the shard.
        length: int32 [G], tokens.
        continues: bool [G], whether the segment ends inside a word that is longer than
            a segment; never the last one of a document.
        shortest_word: int32 [G], tokens of its shortest word without [UNK], 0 if it has
            none.
    """

    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray
    continues: np.ndarray
    shortest_word: np.ndarray

    def __len__(self) -> int:
        """G."""
        return len(self.start)

    def continued(self, chosen: np.ndarray) -> np.ndarray:
        """Whether each of some segments begins inside a word: bool, like `chosen`."""
        # Segment 0 asks the last one of all, which ends with its document.
        return self.continues[chosen - 1]


_FIELDS = [field.name for field in dataclasses.fields(Segments)]


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of B blocks whose tokens lie one after the other.

    Attributes:
        offsets: int64 [W + 1], the token at which each word begins; the last entry is
            the number of tokens.
        first: int64 [B + 1], the first word of each block; the last entry is W.
        segments: int64 [G + 1], the same of each segment: of one or of two a block.
        unknown: int64 [U], the words that hold [UNK], ascending: never to be predicted.
        tags: int64 [K, 2], runs of words that carry a tag, as first and one past the
            last word, ascending. They may overlap where a word carries two.
    """

    offsets: np.ndarray
    first: np.ndarray
    segments: np.ndarray
    unknown: np.ndarray
    tags: np.ndarray

    def segment_of(self, word: np.ndarray, block: np.ndarray) -> np.ndarray:
        """The segment of each of some words, of which the block is known: int64."""
        if len(self.segments) == len(self.first):
            return block
        return 2 * block + (word >= self.segments[2 * block + 1])

    def in_pairs(self) -> "Words":
        """The words of segments that are blocks, as those of blocks of two each."""
        return dataclasses.replace(self, first=self.segments[::2])


def consecutive(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers of some runs, `counts` from each `begin` on, run after run: int64."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(begin - before, counts)


def target_budget(lengths: np.ndarray, ratio: Fraction) -> np.ndarray:
    """How many tokens of each block to mask: ceil(ratio * length), exactly.

    In float32, 0.15 * 200 exceeds 30 and rounds up to 31; a fraction does not.

    Args:
        lengths: integers of any shape, tokens without [CLS] and [SEP].
        ratio: the share to mask, 3/20 in the paper.

    Returns:
        int64, the shape of `lengths`.
    """
    lengths = np.asarray(lengths, np.int64)
    return -(-lengths * ratio.numerator // ratio.denominator)


def target_slots(block_length: int, ratio: Fraction) -> int:
    """M of the batch: a full block's budget, up to the next multiple of 8."""
    return -(-int(target_budget(block_length - 2, ratio)) // 8) * 8


def word_starts(tokens: np.ndarray, word_edges: np.ndarray) -> np.ndarray:
    """Which tokens of a text begin a word.

    A token does if it says so itself, or if the one before it says that a word begins
    behind it, as SentencePiece's punctuation and Chinese characters do. The text's
    first token answers for itself alone.

    Args:
        tokens: integer [T], the text.
        word_edges: uint8 [V], the bits `STARTS` and `ENDS` of each id.

    Returns:
        bool [T].
    """
    # Not word_edges[tokens], which takes twice as long unless `tokens` are int64.
    edges = word_edges.take(tokens)
    starts = (edges & STARTS) != 0
    starts[1:] |= (edges[:-1] & ENDS) != 0
    return starts


def find_words(
    tokens: np.ndarray,
    offsets: np.ndarray,
    continued: np.ndarray,
    continues: np.ndarray,
    word_edges: np.ndarray,
    unk_id: int,
    slots: int,
) -> Words:
    """Finds the words of segments.

    The pieces of a word count as words themselves where the word was cut between two
    segments. So do those of all words without [UNK] in a segment that has none of at
    most `slots` pieces: there is no room to predict such a word whole.

    Args:
        tokens: integer [T], the segments' tokens, one segment after the other.
        offsets: int64 [G + 1], where each segment begins in `tokens`; none is empty.
        continued: bool [G], see `Segments.continued`.
        continues: bool [G], see `Segments.continues`.
        word_edges: uint8 [V], see `word_starts`.
        unk_id: the id of [UNK].
        slots: the target slots M of a row.

    Returns:
        The words, in the order of the tokens, each segment as a block; no tags.
    """
    starts = word_starts(tokens, word_edges)
    starts[offsets[:-1]] = True
    for segment in np.flatnonzero(continued | continues):
        inside = starts[offsets[segment] : offsets[segment + 1]]
        word_begins = np.flatnonzero(inside)
        if continued[segment]:
            inside[: word_begins[1] if len(word_begins) > 1 else None] = True
        if continues[segment]:
            inside[word_begins[-1] :] = True
    unknown = np.flatnonzero(tokens == unk_id)
    words = _as_words(starts, offsets, unknown)
    too_long = np.flatnonzero(shortest_words(words) > slots)
    if not too_long.size:
        return words
    sizes = maskable_sizes(words)
    pieces = np.repeat(sizes < _NEVER, np.diff(words.offsets))
    for segment in too_long:
        part = slice(offsets[segment], offsets[segment + 1])
        starts[part] |= pieces[part]
    return _as_words(starts, offsets, unknown)


def _as_words(starts: np.ndarray, offsets: np.ndarray, unknown: np.ndarray) -> Words:
    """`unknown`: int64, the tokens that are [UNK]."""
    begins = np.flatnonzero(starts)
    holders = np.searchsorted(begins, unknown, side="right") - 1
    first = np.searchsorted(begins, offsets)
    return Words(
        offsets=np.append(begins, len(starts)),
        first=first,
        segments=first,
        unknown=np.unique(holders),
        tags=np.zeros((0, 2), np.int64),
    )


def tag_words(words: Words, tags: np.ndarray) -> Words:
    """Adds tags to words.

    Args:
        words: the words of some blocks.
        tags: int64 [K, 2], tagged runs of the blocks' tokens, rising, not overlapping,
            each inside one segment. They are snapped outward to whole words.

    Returns:
        The words with the tags; two that become one are one.
    """
    first = np.searchsorted(words.offsets, tags[:, 0], side="right") - 1
    last = np.searchsorted(words.offsets, tags[:, 1], side="left")
    runs = np.stack([first, last], axis=1)
    fresh = np.ones(len(runs), bool)
    fresh[1:] = (runs[1:] != runs[:-1]).any(axis=1)
    return dataclasses.replace(words, tags=runs[fresh])


def maskable_sizes(words: Words) -> np.ndarray:
    """Tokens of each word, int64 [W]; more than any budget for one that holds [UNK]."""
    sizes = np.diff(words.offsets)
    sizes[words.unknown] = _NEVER
    return sizes


def shortest_words(words: Words) -> np.ndarray:
    """Tokens of the shortest word without [UNK] of each block.

    Returns:
        int64 [B], 0 where every word of the block holds [UNK].
    """
    if len(words.first) == 1:
        return np.zeros(0, np.int64)
    shortest = np.minimum.reduceat(maskable_sizes(words), words.first[:-1])
    shortest[shortest == _NEVER] = 0
    return shortest


def cut_into_blocks(
    word_begins: np.ndarray, line_begins: np.ndarray, length: int, capacity: int
) -> list[int]:
    """Cuts one document into blocks of one segment.

    A block ends at the last word border at or before `capacity` tokens. Only a word
    that is longer than that is cut.

    Args:
        word_begins: int64 [W], ascending from 0, the tokens at which words begin.
        line_begins: the same of lines, of no importance here.
        length: tokens in the document, at least 1.
        capacity: the most tokens of a block.

    Returns:
        The blocks' ends, ascending; the last is `length`.
    """
    del line_begins  # They serve pairs only.
    ends = []
    begin = 0
    while length - begin > capacity:
        limit = begin + capacity
        border = int(word_begins[np.searchsorted(word_begins, limit, "right") - 1])
        begin = border if border > begin else limit
        ends.append(begin)
    ends.append(length)
    return ends


def check_ids(shard: Shard, begin: int, end: int, vocab_size: int) -> None:
    """Refuses token ids that the embedding table does not have.

    Args:
        shard: the shard to check.
        begin: the first token to check.
        end: one past the last.
        vocab_size: V.

    Raises:
        InputError: names the shard, the document and the id.
    """
    wrong = np.flatnonzero(shard.tokens[begin:end] >= vocab_size)
    if wrong.size:
        place = begin + int(wrong[0])
        document = int(np.searchsorted(shard.documents, place, side="right")) - 1
        raise InputError(
            f"data.corpus: token id {shard.tokens[place]} in document {document} of"
            f" shard {shard.name} is outside the vocabulary of {vocab_size}"
        )


def cut_shard(
    shard: Shard,
    number: int,
    cut: Cut,
    word_edges: np.ndarray,
    unk_id: int,
    slots: int,
) -> Segments:
    """Cuts every document of a shard into segments.

    Args:
        shard: the shard to cut.
        number: its place in the split.
        cut: cuts a document.
        word_edges: uint8 [V], see `word_starts`.
        unk_id: the id of [UNK].
        slots: the target slots M of a row.

    Returns:
        The shard's segments, in the order of the text.

    Raises:
        InputError: a token id is outside the vocabulary.
    """
    parts = []
    for begin, part in _portions(shard):
        # Of the whole shard: it knows the numbers of its documents.
        check_ids(shard, begin, begin + len(part.tokens), len(word_edges))
        own = _cut_portion(part, number, cut, word_edges, unk_id, slots)
        parts.append(dataclasses.replace(own, start=own.start + begin))
    return join_segments(parts)


def _portions(shard: Shard) -> Iterator[tuple[int, Shard]]:
    """Whole documents of some millions of tokens at a time, and where they begin."""
    first, last = 0, len(shard.documents) - 1
    while first < last:
        begin = int(shard.documents[first])
        limit = begin + _PORTION_TOKENS
        fitting = int(np.searchsorted(shard.documents, limit, side="right")) - 1
        stop = max(fitting, first + 1)
        end = int(shard.documents[stop])
        lines = slice(*np.searchsorted(shard.lines, [begin, end + 1]))
        yield (
            begin,
            Shard(
                shard.name,
                shard.tokens[begin:end],
                shard.documents[first : stop + 1] - begin,
                shard.lines[lines] - begin,
            ),
        )
        first = stop


def _cut_portion(
    shard: Shard,
    number: int,
    cut: Cut,
    word_edges: np.ndarray,
    unk_id: int,
    slots: int,
) -> Segments:
    starts = word_starts(shard.tokens, word_edges)
    starts[shard.documents[:-1]] = True
    stop, used = _cut_documents(shard, starts, cut)
    offsets = np.append(0, stop)
    # Nothing goes on behind the end of a line; all documents are ends of lines.
    inside = np.flatnonzero(~np.isin(stop, shard.lines))
    continues = np.zeros(len(stop), bool)
    continues[inside] = ~starts[stop[inside]]
    continued = np.append(False, continues)[:-1]
    words = find_words(
        shard.tokens, offsets, continued, continues, word_edges, unk_id, slots
    )
    segments = Segments(
        shard=np.full(len(stop), number, np.int32),
        start=offsets[:-1],
        length=np.diff(offsets).astype(np.int32),
        continues=continues,
        shortest_word=shortest_words(words).astype(np.int32),
    )
    return Segments(*(getattr(segments, name)[used] for name in _FIELDS))


def _cut_documents(
    shard: Shard, starts: np.ndarray, cut: Cut
) -> tuple[np.ndarray, np.ndarray]:
    """Where the segments of a shard end, int64, and which of them are used, bool.

    A document that is left out is one that is not used.
    """
    documents, lines = np.asarray(shard.documents), np.asarray(shard.lines)
    stops, used = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    bounds = zip(documents, np.searchsorted(lines, documents), strict=True)
    for (begin, line), (end, next_line) in itertools.pairwise(bounds):
        words = np.flatnonzero(starts[begin:end])
        ends = cut(words, lines[line:next_line] - begin, int(end - begin))
        stops.append(begin + np.array(ends or [end - begin], np.int64))
        used.append(np.full(len(stops[-1]), bool(ends)))
    return np.concatenate(stops), np.concatenate(used)


def join_segments(parts: Sequence[Segments]) -> Segments:
    """The segments of several shards, one after the other."""
    empty = Segments(
        shard=np.zeros(0, np.int32),
        start=np.zeros(0, np.int64),
        length=np.zeros(0, np.int32),
        continues=np.zeros(0, bool),
        shortest_word=np.zeros(0, np.int32),
    )
    columns = ([getattr(one, name) for one in (empty, *parts)] for name in _FIELDS)
    return Segments(*map(np.concatenate, columns))
