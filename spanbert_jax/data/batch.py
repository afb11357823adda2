"""The batch: what one step of the model sees.

R rows of L places, M target slots a row. Empty slots hold 0 everywhere.

key              dtype, shape    meaning
token_ids        int32 [R, L]    corrupted ids
segment_ids      int32 [R, L]    0 padding; 1.. the block's number in its row.
                                 Attention joins equal non-zero ids only
position_ids     int32 [R, L]    from 0 in each block
type_ids         int32 [R, L]    0, or 1 in the second half of a pair
target_positions int32 [R, M]    where a prediction is due
target_ids       int32 [R, M]    the true token
target_weights   float32 [R, M]  1, or 0 for an empty slot
left_positions   int32 [R, M]    the place before the target's span
right_positions  int32 [R, M]    the place after it
span_offsets     int32 [R, M]    the target's number in its span, from 1
sbo_weights      float32 [R, M]  1 where the span boundary objective counts, else 0
"""

import dataclasses

import numpy as np

from spanbert_jax.corpus.store import Split
from spanbert_jax.data import counter
from spanbert_jax.data.blocks import (
    Words,
    check_ids,
    find_words,
    tag_words,
    target_slots,
)
from spanbert_jax.data.masking import SCHEMES, Masking, Masks, RandomTokens, mask
from spanbert_jax.data.plan import Plan

Batch = dict[str, np.ndarray]

_TOKEN_KEYS = ("token_ids", "segment_ids", "position_ids", "type_ids")
_SLOT_KEYS = (
    "target_positions",
    "target_ids",
    "left_positions",
    "right_positions",
    "span_offsets",
)
_WEIGHT_KEYS = ("target_weights", "sbo_weights")


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """The ids of the special tokens: of [UNK] in the text, the others added to it."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclasses.dataclass(frozen=True)
class Feed:
    """All that a batch is made of, but for its rows.

    Attributes:
        split: the text, with the tags that the scheme masks.
        plan: its blocks and rows.
        masking: the recipe.
        special: the special ids.
        word_edges: uint8 [V], whether an id begins a word, and whether it ends one; see
            `blocks.word_starts`.
        random_tokens: what random replacements are drawn from.
        block_length: L.
        seed: of the masks.
        sbo_positions: rows of the SBO position table; tokens further into their span
            get no SBO.
        sbo_edges: whether [CLS] and [SEP] serve as boundaries of a span.
    """

    split: Split
    plan: Plan
    masking: Masking
    special: SpecialIds
    word_edges: np.ndarray
    random_tokens: RandomTokens
    block_length: int
    seed: int
    sbo_positions: int
    sbo_edges: bool

    @property
    def target_slots(self) -> int:
        """M."""
        return target_slots(self.block_length, self.masking.ratio)


@dataclasses.dataclass(frozen=True)
class MaskedBlocks:
    """Blocks read from a corpus, with their masks.

    Attributes:
        tokens: int32 [T], the text of the blocks, one after the other.
        offsets: int64 [B + 1], where each block begins in `tokens`.
        words: their words; with tags if the scheme masks some.
        masks: the targets.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    words: Words
    masks: Masks


def batch_spec(rows: int, block_length: int, slots: int) -> dict[str, tuple]:
    """Shape and dtype of each array of a batch of `rows` rows."""
    spec = dict.fromkeys(_TOKEN_KEYS, ((rows, block_length), np.int32))
    spec |= dict.fromkeys(_SLOT_KEYS, ((rows, slots), np.int32))
    return spec | dict.fromkeys(_WEIGHT_KEYS, ((rows, slots), np.float32))


def empty_batch(rows: int, block_length: int, slots: int) -> Batch:
    """A batch of weight 0: padding only."""
    spec = batch_spec(rows, block_length, slots)
    return {key: np.zeros(shape, dtype) for key, (shape, dtype) in spec.items()}


def masked_blocks(feed: Feed, chosen: np.ndarray, epochs: np.ndarray) -> MaskedBlocks:
    """Reads some blocks and masks them.

    Args:
        feed: the text and the recipe.
        chosen: int64 [B], blocks of the plan, at least one.
        epochs: int64 [B], the epoch whose mask each block gets.

    Returns:
        The blocks.

    Raises:
        InputError: a token id is outside the vocabulary; names shard and document.
    """
    blocks = feed.plan.blocks
    tokens = _read_tokens(feed, chosen)
    offsets = np.concatenate([[0], np.cumsum(blocks.length[chosen], dtype=np.int64)])
    words = find_words(
        tokens,
        offsets,
        blocks.continued(chosen),
        blocks.continues[chosen],
        feed.word_edges,
        feed.special.unk,
        feed.target_slots,
    )
    if name := SCHEMES[feed.masking.scheme].tags:
        words = tag_words(words, _read_tags(feed, chosen, offsets, name))
    key = counter.fold(counter.root_key(feed.seed), counter.MASKS)
    keys = counter.fold(counter.fold(key, epochs), chosen)
    masks = mask(
        tokens,
        offsets,
        words,
        keys,
        feed.masking,
        feed.special.mask,
        feed.random_tokens,
    )
    return MaskedBlocks(tokens, offsets, words, masks)


def _read_tokens(feed: Feed, chosen: np.ndarray) -> np.ndarray:
    blocks, shards = feed.plan.blocks, feed.split.shards
    where = [
        array[chosen].tolist() for array in (blocks.shard, blocks.start, blocks.length)
    ]
    pieces = []
    for shard, start, length in zip(*where, strict=True):
        pieces.append(shards[shard].tokens[start : start + length])
    tokens = np.concatenate(pieces)
    # Before the cast, which would make negative ids of the largest.
    if tokens.max() >= len(feed.word_edges):
        for shard, start, length in zip(*where, strict=True):
            check_ids(shards[shard], start, start + length, len(feed.word_edges))
    return tokens.astype(np.int32)


def _read_tags(
    feed: Feed, chosen: np.ndarray, offsets: np.ndarray, name: str
) -> np.ndarray:
    """The tags that lie wholly inside some blocks, as places in their joint tokens.

    Returns:
        int64 [K, 2], begin and end, in the order of the blocks.
    """
    shard = feed.plan.blocks.shard[chosen]
    start = feed.plan.blocks.start[chosen]
    stop = start + np.diff(offsets)
    found = [np.zeros((0, 2), np.int64)]
    owners = [np.zeros(0, np.int64)]
    for number in np.unique(shard):
        tags = feed.split.shards[number].tags[name]
        block = np.flatnonzero(shard == number)
        low = np.searchsorted(tags[:, 0], start[block])
        high = np.searchsorted(tags[:, 1], stop[block], side="right")
        # A block inside a tag has the tag's end before its begin.
        counts = np.maximum(high - low, 0)
        before = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(low - before, counts)
        owner = np.repeat(block, counts)
        found.append(tags[places] + (offsets[:-1] - start)[owner, None])
        owners.append(owner)
    order = np.argsort(np.concatenate(owners), kind="stable")
    return np.concatenate(found)[order]


def make_batch(feed: Feed, rows: np.ndarray, epochs: np.ndarray) -> Batch:
    """Makes the batch of some rows of the plan: a pure function of its arguments.

    Args:
        feed: the text and the recipe.
        rows: int64 [R], rows of the plan, -1 for an empty row.
        epochs: int64 [R], the epoch whose masks each row gets.

    Returns:
        The batch, as this module's docstring describes it.

    Raises:
        InputError: a token id is outside the vocabulary; names shard and document.
    """
    batch = empty_batch(len(rows), feed.block_length, feed.target_slots)
    batch["token_ids"][:] = feed.special.pad
    held = [
        feed.plan.row_blocks[slice(*feed.plan.row_offsets[row : row + 2])]
        if row >= 0
        else np.zeros(0, np.int64)
        for row in rows
    ]
    chosen = np.concatenate(held)
    if not chosen.size:
        return batch
    counts = np.array([len(blocks) for blocks in held])
    row = np.repeat(np.arange(len(rows)), counts)
    masked = masked_blocks(feed, chosen, epochs[row])
    places = _place_blocks(batch, feed, masked, row, counts)
    _place_targets(batch, feed, masked, places)
    return batch


def _place_blocks(
    batch: Batch, feed: Feed, masked: MaskedBlocks, row: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Writes the blocks into their rows; returns each text token's flat place."""
    offsets = masked.offsets
    sizes = np.diff(offsets) + 2
    before = np.cumsum(sizes) - sizes
    first_of_row = np.repeat(np.cumsum(counts) - counts, counts)
    begin = row * feed.block_length + before - before[first_of_row]
    inside = np.arange(sizes.sum()) - np.repeat(before, sizes)
    place = np.repeat(begin, sizes) + inside
    number = np.arange(len(row)) - first_of_row + 1
    batch["segment_ids"].reshape(-1)[place] = np.repeat(number, sizes)
    batch["position_ids"].reshape(-1)[place] = inside

    text = np.arange(offsets[-1]) + np.repeat(begin + 1 - offsets[:-1], sizes - 2)
    token_ids = batch["token_ids"].reshape(-1)
    token_ids[begin] = feed.special.cls
    token_ids[begin + sizes - 1] = feed.special.sep
    token_ids[text] = masked.tokens
    token_ids[text[masked.masks.target]] = masked.masks.replacement
    return text


def _place_targets(
    batch: Batch, feed: Feed, masked: MaskedBlocks, places: np.ndarray
) -> None:
    """Writes the targets into the slots of their rows."""
    masks, length = masked.masks, feed.block_length
    row, position = np.divmod(places[masks.target], length)
    per_row = np.bincount(row, minlength=len(batch["token_ids"]))
    # The packer keeps every row's targets within its slots; more raise IndexError.
    slot = (row, np.arange(len(row)) - (np.cumsum(per_row) - per_row)[row])
    batch["target_positions"][slot] = position
    batch["target_ids"][slot] = masked.tokens[masks.target]
    batch["target_weights"][slot] = 1
    batch["left_positions"][slot] = places[masks.span_begin] % length - 1
    batch["right_positions"][slot] = places[masks.span_end - 1] % length + 1
    span_offset = masks.target - masks.span_begin + 1
    batch["span_offsets"][slot] = span_offset
    counts = span_offset <= feed.sbo_positions
    if not feed.sbo_edges:
        counts &= ~np.isin(masks.span_begin, masked.offsets)
        counts &= ~np.isin(masks.span_end, masked.offsets)
    batch["sbo_weights"][slot] = counts
