"""Blocks: the contiguous pieces of documents that one sequence holds."""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from spanbert_jax.corpus.store import Shard
from spanbert_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where the N blocks of a split lie. A block never crosses a document's end.

    Attributes:
        shard: int32 [N], which shard of the split.
        start: int64 [N], the block's first token in the shard.
        length: int32 [N], tokens without [CLS] and [SEP].
        continues: bool [N], whether the block ends inside a word that is longer than
            a block.
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


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of B blocks whose tokens lie one after the other.

    Attributes:
        offsets: int64 [W + 1], the token at which each word begins; the last entry is
            the number of tokens.
        first: int64 [B + 1], the first word of each block; the last entry is W.
    """

    offsets: np.ndarray
    first: np.ndarray


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


def find_words(
    tokens: np.ndarray,
    offsets: np.ndarray,
    continues: np.ndarray,
    starts_word: np.ndarray,
    slots: int,
) -> Words:
    """Finds the words of blocks.

    The pieces of a word count as words themselves where the word was cut between two
    blocks, and in a block that has no word of at most `slots` pieces: there is no
    room to predict such a word whole.

    Args:
        tokens: integer [T], the blocks' tokens, one block after the other.
        offsets: int64 [B + 1], where each block begins in `tokens`; none is empty.
        continues: bool [B], see `Blocks.continues`.
        starts_word: bool [V], whether an id begins a word.
        slots: the target slots M of a row.

    Returns:
        The words, in the order of the tokens.
    """
    starts = starts_word[tokens]
    begins = offsets[:-1]
    cut_before = ~starts[begins]
    starts[begins] = True
    for block in np.flatnonzero(cut_before | continues):
        inside = starts[offsets[block] : offsets[block + 1]]
        word_begins = np.flatnonzero(inside)
        if cut_before[block]:
            inside[: word_begins[1] if len(word_begins) > 1 else None] = True
        if continues[block]:
            inside[word_begins[-1] :] = True
    words = _as_words(starts, offsets)
    too_long = np.flatnonzero(shortest_words(words) > slots)
    if not too_long.size:
        return words
    for block in too_long:
        starts[offsets[block] : offsets[block + 1]] = True
    return _as_words(starts, offsets)


def _as_words(starts: np.ndarray, offsets: np.ndarray) -> Words:
    begins = np.flatnonzero(starts)
    return Words(
        offsets=np.append(begins, len(starts)),
        first=np.searchsorted(begins, offsets),
    )


def shortest_words(words: Words) -> np.ndarray:
    """Pieces in the shortest word of each block: int64 [B]."""
    if len(words.first) == 1:
        return np.zeros(0, np.int64)
    return np.minimum.reduceat(np.diff(words.offsets), words.first[:-1])


def cut_document(word_begins: np.ndarray, length: int, capacity: int) -> list[int]:
    """Cuts one document into blocks.

    A block ends at the last word border at or before `capacity` tokens. Only a word
    that is longer than that is cut.

    Args:
        word_begins: int64 [W], ascending, the tokens at which words begin.
        length: tokens in the document, at least 1.
        capacity: the most tokens of a block.

    Returns:
        The blocks' ends, ascending; the last is `length`.
    """
    ends = []
    begin = 0
    while length - begin > capacity:
        limit = begin + capacity
        before = np.searchsorted(word_begins, limit, side="right") - 1
        border = int(word_begins[before]) if before >= 0 else 0
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
    starts_word: np.ndarray,
    block_length: int,
    ratio: Fraction,
) -> Blocks:
    """Cuts every document of a shard into blocks of up to `block_length` tokens.

    Args:
        shard: the shard to cut.
        number: its place in the split.
        starts_word: bool [V], whether an id begins a word.
        block_length: L, with [CLS] and [SEP].
        ratio: the share of tokens to mask.

    Returns:
        The shard's blocks, in the order of the text.

    Raises:
        InputError: a token id is outside the vocabulary.
    """
    check_ids(shard, 0, len(shard.tokens), len(starts_word))
    starts = starts_word[shard.tokens]
    documents = np.asarray(shard.documents)
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
    slots = target_slots(block_length, ratio)
    words = find_words(shard.tokens, offsets, continues, starts_word, slots)
    budget = target_budget(stops - begins, ratio)
    return Blocks(
        shard=np.full(len(stops), number, np.int32),
        start=begins,
        length=(stops - begins).astype(np.int32),
        continues=continues,
        most_targets=np.maximum(budget, shortest_words(words)).astype(np.int32),
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
