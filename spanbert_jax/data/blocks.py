"""Blocks: the contiguous pieces of documents that one sequence holds."""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from spanbert_jax.corpus.store import Shard
from spanbert_jax.corpus.tokenizers import ENDS, STARTS
from spanbert_jax.errors import InputError

# The size of a word that is not to be masked: no budget has room for it.
_NEVER = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where the N blocks of a split lie. A block never crosses a document's end.

    Attributes:
        shard: int32 [N], which shard of the split.
        start: int64 [N], the block's first token in the shard.
        length: int32 [N], tokens without [CLS] and [SEP].
        continues: bool [N], whether the block ends inside a word that is longer than
            a block; never the last block of a shard.
        most_targets: int32 [N], the most targets that masking can choose in it.
    """

    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray
    continues: np.ndarray
    most_targets: np.ndarray

    def __len__(self) -> int:
        """N."""
        return len(self.start)

    def continued(self, chosen: np.ndarray) -> np.ndarray:
        """Whether each of some blocks begins inside a word: bool, like `chosen`."""
        # Block 0 asks the last one of all, which ends with its document.
        return self.continues[chosen - 1]


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of B blocks whose tokens lie one after the other.

    Attributes:
        offsets: int64 [W + 1], the token at which each word begins; the last entry is
            the number of tokens.
        first: int64 [B + 1], the first word of each block; the last entry is W.
        unknown: int64 [U], the words that hold [UNK], ascending: never to be predicted.
        tags: int64 [K, 2], runs of words that carry a tag, as first and one past the
            last word, ascending. They may overlap where a word carries two.
    """

    offsets: np.ndarray
    first: np.ndarray
    unknown: np.ndarray
    tags: np.ndarray


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
    edges = word_edges[tokens]
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
    """Finds the words of blocks.

    The pieces of a word count as words themselves where the word was cut between two
    blocks. So do those of all words without [UNK] in a block that has none of at most
    `slots` pieces: there is no room to predict such a word whole.

    Args:
        tokens: integer [T], the blocks' tokens, one block after the other.
        offsets: int64 [B + 1], where each block begins in `tokens`; none is empty.
        continued: bool [B], see `Blocks.continued`.
        continues: bool [B], see `Blocks.continues`.
        word_edges: uint8 [V], see `word_starts`.
        unk_id: the id of [UNK].
        slots: the target slots M of a row.

    Returns:
        The words, in the order of the tokens; no tags.
    """
    starts = word_starts(tokens, word_edges)
    starts[offsets[:-1]] = True
    for block in np.flatnonzero(continued | continues):
        inside = starts[offsets[block] : offsets[block + 1]]
        word_begins = np.flatnonzero(inside)
        if continued[block]:
            inside[: word_begins[1] if len(word_begins) > 1 else None] = True
        if continues[block]:
            inside[word_begins[-1] :] = True
    unknown = np.flatnonzero(tokens == unk_id)
    words = _as_words(starts, offsets, unknown)
    too_long = np.flatnonzero(shortest_words(words) > slots)
    if not too_long.size:
        return words
    sizes = maskable_sizes(words)
    pieces = np.repeat(sizes < _NEVER, np.diff(words.offsets))
    for block in too_long:
        part = slice(offsets[block], offsets[block + 1])
        starts[part] |= pieces[part]
    return _as_words(starts, offsets, unknown)


def _as_words(starts: np.ndarray, offsets: np.ndarray, unknown: np.ndarray) -> Words:
    """`unknown`: int64, the tokens that are [UNK]."""
    begins = np.flatnonzero(starts)
    holders = np.searchsorted(begins, unknown, side="right") - 1
    return Words(
        offsets=np.append(begins, len(starts)),
        first=np.searchsorted(begins, offsets),
        unknown=np.unique(holders),
        tags=np.zeros((0, 2), np.int64),
    )


def tag_words(words: Words, tags: np.ndarray) -> Words:
    """Adds tags to words.

    Args:
        words: the words of some blocks.
        tags: int64 [K, 2], tagged runs of the blocks' tokens, rising, not overlapping,
            each inside one block. They are snapped outward to whole words.

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


def cut_document(word_begins: np.ndarray, length: int, capacity: int) -> list[int]:
    """Cuts one document into blocks.

    A block ends at the last word border at or before `capacity` tokens. Only a word
    that is longer than that is cut.

    Args:
        word_begins: int64 [W], ascending from 0, the tokens at which words begin.
        length: tokens in the document, at least 1.
        capacity: the most tokens of a block.

    Returns:
        The blocks' ends, ascending; the last is `length`.
    """
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
    word_edges: np.ndarray,
    unk_id: int,
    block_length: int,
    ratio: Fraction,
) -> Blocks:
    """Cuts every document of a shard into blocks of up to `block_length` tokens.

    Args:
        shard: the shard to cut.
        number: its place in the split.
        word_edges: uint8 [V], see `word_starts`.
        unk_id: the id of [UNK].
        block_length: L, with [CLS] and [SEP].
        ratio: the share of tokens to mask.

    Returns:
        The shard's blocks, in the order of the text.

    Raises:
        InputError: a token id is outside the vocabulary.
    """
    check_ids(shard, 0, len(shard.tokens), len(word_edges))
    starts = word_starts(shard.tokens, word_edges)
    documents = np.asarray(shard.documents)
    starts[documents[:-1]] = True
    ends = [np.zeros(0, np.int64)]
    for begin, end in itertools.pairwise(documents):
        borders = np.flatnonzero(starts[begin:end])
        ends.append(begin + cut_document(borders, int(end - begin), block_length - 2))
    stops = np.concatenate(ends).astype(np.int64)
    begins = np.concatenate([[0], stops])[:-1].astype(np.int64)
    inside = np.flatnonzero(~np.isin(stops, documents))
    continues = np.zeros(len(stops), bool)
    continues[inside] = ~starts[stops[inside]]
    offsets = np.append(begins, len(starts))
    continued = np.append(False, continues)[:-1]
    slots = target_slots(block_length, ratio)
    words = find_words(
        shard.tokens, offsets, continued, continues, word_edges, unk_id, slots
    )
    budget, shortest = target_budget(stops - begins, ratio), shortest_words(words)
    most_targets = np.where(shortest > 0, np.maximum(budget, shortest), 0)
    return Blocks(
        shard=np.full(len(stops), number, np.int32),
        start=begins,
        length=(stops - begins).astype(np.int32),
        continues=continues,
        most_targets=most_targets.astype(np.int32),
    )


def join_blocks(parts: Sequence[Blocks]) -> Blocks:
    """The blocks of several shards, one after the other."""
    empty = Blocks(
        shard=np.zeros(0, np.int32),
        start=np.zeros(0, np.int64),
        length=np.zeros(0, np.int32),
        continues=np.zeros(0, bool),
        most_targets=np.zeros(0, np.int32),
    )
    names = [field.name for field in dataclasses.fields(Blocks)]
    return Blocks(
        *(np.concatenate([getattr(x, name) for x in (empty, *parts)]) for name in names)
    )
