"""The batch: what one step of the model sees.

R rows of L places, M target slots a row, K pair slots. Empty slots hold 0 everywhere.

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

In pair runs only:

nsp_positions    int32 [R, K]    the [CLS] of each block of the row
nsp_labels       int32 [R, K]    0 if its second segment follows its first, 1 if not
nsp_weights      float32 [R, K]  1, or 0 for an empty slot

There a block is [CLS] A [SEP] B [SEP]. Its first [SEP] belongs to A: it has type 0, may
be the place beside a span, and is never a target; no span crosses it.
"""

import dataclasses

import numpy as np

from spanbert_jax.corpus.store import Split
from spanbert_jax.data import counter
from spanbert_jax.data.blocks import (
    Words,
    check_ids,
    consecutive,
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
_PAIR_KEYS = ("nsp_positions", "nsp_labels")
_PAIR_WEIGHT_KEYS = ("nsp_weights",)


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """The ids of the special tokens: of [UNK] in the text, the others added to it."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The sizes of a batch.

    Attributes:
        rows: R.
        block_length: L.
        target_slots: M.
        pair_slots: K, 0 in single runs.
    """

    rows: int
    block_length: int
    target_slots: int
    pair_slots: int = 0


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
        pair_slots: K, 0 in single runs; see `PlanSettings.pair_slots`.
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
    pair_slots: int
    seed: int
    sbo_positions: int
    sbo_edges: bool

    @property
    def target_slots(self) -> int:
        """M."""
        return target_slots(self.block_length, self.masking.ratio)

    def shape(self, rows: int) -> BatchShape:
        """The sizes of a batch of some rows."""
        return BatchShape(rows, self.block_length, self.target_slots, self.pair_slots)


@dataclasses.dataclass(frozen=True)
class MaskedBlocks:
    """Blocks read from a corpus, with their masks.

    Attributes:
        tokens: int32 [T], the text of the blocks, one after the other.
        offsets: int64 [B + 1], where each block begins in `tokens`.
        segments: int64 [G + 1], the same of each segment: of one or of two a block.
        words: their words; with tags if the scheme masks some.
        masks: the targets.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    segments: np.ndarray
    words: Words
    masks: Masks


def batch_spec(shape: BatchShape) -> dict[str, tuple]:
    """Shape and dtype of each array of a batch of these sizes."""
    places = shape.rows, shape.block_length
    slots, pairs = (shape.rows, shape.target_slots), (shape.rows, shape.pair_slots)
    spec = dict.fromkeys(_TOKEN_KEYS, (places, np.int32))
    spec |= dict.fromkeys(_SLOT_KEYS, (slots, np.int32))
    spec |= dict.fromkeys(_WEIGHT_KEYS, (slots, np.float32))
    if shape.pair_slots:
        spec |= dict.fromkeys(_PAIR_KEYS, (pairs, np.int32))
        spec |= dict.fromkeys(_PAIR_WEIGHT_KEYS, (pairs, np.float32))
    return spec


def empty_batch(shape: BatchShape) -> Batch:
    """A batch of weight 0: padding only."""
    spec = batch_spec(shape)
    return {key: np.zeros(size, dtype) for key, (size, dtype) in spec.items()}


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
    plan = feed.plan
    pieces = plan.segments_of(chosen)
    tokens = _read_tokens(feed, pieces)
    lengths = plan.segments.length[pieces]
    segments = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    words = find_words(
        tokens,
        segments,
        plan.segments.continued(pieces),
        plan.segments.continues[pieces],
        feed.word_edges,
        feed.special.unk,
        feed.target_slots,
    )
    offsets = segments
    if plan.is_paired:
        words, offsets = words.in_pairs(), segments[::2]
    if name := SCHEMES[feed.masking.scheme].tags:
        words = tag_words(words, _read_tags(feed, pieces, segments, name))
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
    return MaskedBlocks(tokens, offsets, segments, words, masks)


def _read_tokens(feed: Feed, pieces: np.ndarray) -> np.ndarray:
    """The tokens of some segments, one after the other: int32."""
    segments, shards = feed.plan.segments, feed.split.shards
    where = [
        array[pieces].tolist()
        for array in (segments.shard, segments.start, segments.length)
    ]
    # A slice of a memory map takes ten times as long as one of an array.
    arrays = {shard: np.asarray(shards[shard].tokens) for shard in set(where[0])}
    texts = []
    for shard, start, length in zip(*where, strict=True):
        texts.append(arrays[shard][start : start + length])
    tokens = np.concatenate(texts)
    # Before the cast, which would make negative ids of the largest.
    if tokens.max() >= len(feed.word_edges):
        for shard, start, length in zip(*where, strict=True):
            check_ids(shards[shard], start, start + length, len(feed.word_edges))
    return tokens.astype(np.int32)


def _read_tags(
    feed: Feed, pieces: np.ndarray, offsets: np.ndarray, name: str
) -> np.ndarray:
    """The tags that lie wholly inside some segments, as places in their joint tokens.

    Returns:
        int64 [K, 2], begin and end, in the order of the segments.
    """
    shard = feed.plan.segments.shard[pieces]
    start = feed.plan.segments.start[pieces]
    stop = start + np.diff(offsets)
    found = [np.zeros((0, 2), np.int64)]
    owners = [np.zeros(0, np.int64)]
    for number in np.unique(shard):
        tags = feed.split.shards[number].tags[name]
        mine = np.flatnonzero(shard == number)
        low = np.searchsorted(tags[:, 0], start[mine])
        high = np.searchsorted(tags[:, 1], stop[mine], side="right")
        # A segment inside a tag has the tag's end before its begin.
        counts = np.maximum(high - low, 0)
        before = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(low - before, counts)
        owner = np.repeat(mine, counts)
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
    batch = empty_batch(feed.shape(len(rows)))
    batch["token_ids"][:] = feed.special.pad
    begin, end = feed.plan.row_offsets[rows], feed.plan.row_offsets[rows + 1]
    counts = np.where(rows < 0, 0, end - begin)
    chosen = feed.plan.row_blocks[consecutive(begin, counts)]
    if not chosen.size:
        return batch
    row = np.repeat(np.arange(len(rows)), counts)
    masked = masked_blocks(feed, chosen, epochs[row])
    places = _place_blocks(batch, feed, masked, chosen, counts)
    _place_targets(batch, feed, masked, places)
    return batch


def _place_blocks(
    batch: Batch,
    feed: Feed,
    masked: MaskedBlocks,
    chosen: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """Writes the blocks into their rows; returns each text token's flat place.

    `counts`: the blocks of each row.
    """
    offsets, segments = masked.offsets, masked.segments
    per_block = feed.plan.num_specials - 1
    begin = _number_places(batch, np.diff(offsets) + 1 + per_block, counts)
    # Before a segment stand [CLS] and the [SEP] of the one before it, if it has one.
    block, second = np.divmod(np.arange(len(segments) - 1), per_block)
    sep = begin[block] + 1 + second + segments[1:] - offsets[block]
    holds_text = batch["segment_ids"].reshape(-1) > 0
    holds_text[begin] = False
    holds_text[sep] = False
    text = np.flatnonzero(holds_text)
    token_ids = batch["token_ids"].reshape(-1)
    token_ids[begin] = feed.special.cls
    token_ids[sep] = feed.special.sep
    token_ids[holds_text] = masked.tokens
    token_ids[text[masked.masks.target]] = masked.masks.replacement
    if feed.plan.is_paired:
        type_ids = batch["type_ids"].reshape(-1)
        type_ids[text] = np.repeat(second, np.diff(segments))
        type_ids[sep] = second
        slot = np.arange(feed.pair_slots) < counts[:, None]
        batch["nsp_positions"][slot] = begin % feed.block_length
        batch["nsp_labels"][slot] = feed.plan.labels[chosen]
        batch["nsp_weights"][slot] = 1
    return text


def _number_places(batch: Batch, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Writes segment_ids and position_ids; returns the flat place of each [CLS].

    `sizes`: the places of each block; `counts`: the blocks of each row.
    """
    rows, length = batch["segment_ids"].shape
    number = consecutive(np.ones_like(counts), counts)
    filled = np.bincount(np.repeat(np.arange(rows), counts), sizes, rows)
    # A row is a run of places for each of its blocks, and one of padding.
    end = np.cumsum(counts)
    runs = np.insert(sizes, end, length - filled.astype(np.int64))
    number = np.insert(number, end, 0).astype(np.int32)
    begin = np.cumsum(runs) - runs
    segment_ids = np.repeat(number, runs)
    inside = np.arange(rows * length, dtype=np.int32)
    inside -= np.repeat(begin.astype(np.int32), runs)
    batch["segment_ids"].reshape(-1)[:] = segment_ids
    np.multiply(inside, segment_ids > 0, out=batch["position_ids"].reshape(-1))
    return begin[number > 0]


def _place_targets(
    batch: Batch, feed: Feed, masked: MaskedBlocks, places: np.ndarray
) -> None:
    """Writes the targets into the slots of their rows."""
    masks, length = masked.masks, feed.block_length
    num_rows, slots = batch["target_ids"].shape
    place = places[masks.target]
    per_row = np.diff(np.searchsorted(place, np.arange(num_rows + 1) * length))
    # The packer keeps every row's targets within its slots; more raise ValueError.
    slot = np.arange(slots) < per_row[:, None]
    position = place - np.repeat(np.arange(num_rows) * length, per_row)
    span_offset = masks.target - masks.span_begin + 1
    left = position - span_offset
    batch["target_positions"][slot] = position
    batch["target_ids"][slot] = masked.tokens[masks.target]
    batch["target_weights"][slot] = 1
    batch["left_positions"][slot] = left
    batch["right_positions"][slot] = left + 1 + masks.span_end - masks.span_begin
    batch["span_offsets"][slot] = span_offset
    counts = span_offset <= feed.sbo_positions
    if not feed.sbo_edges:
        counts &= ~np.isin(masks.span_begin, masked.segments)
        counts &= ~np.isin(masks.span_end, masked.segments)
    batch["sbo_weights"][slot] = counts
