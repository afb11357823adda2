"""The plan: which blocks share a row, and in which order the rows come.

It depends on the corpus and the data settings alone, is built at first use and kept as
memory-mapped arrays in a cache directory.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np

from spanbert_jax.corpus.store import Split, write_array
from spanbert_jax.data import counter
from spanbert_jax.data.blocks import (
    Cut,
    Segments,
    cut_into_blocks,
    cut_shard,
    join_segments,
    target_budget,
    target_slots,
)
from spanbert_jax.data.pairs import cut_into_segments, segment_capacity, trade
from spanbert_jax.errors import StorageError

# Part of the cache key: raise it when the meaning of the arrays changes.
_FORMAT = 3
# Best-fit over windows fills 99.9 % of the tokens of real text at bounded memory.
_WINDOW = 4096
_ORDER_SEED = 0
# Planning more takes longer than a user would wait without a word.
_MANY_TOKENS = 20_000_000


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """What a plan is made from besides the text.

    Attributes:
        block_length: L, places of a row.
        ratio: share of tokens to mask.
        packing: whether several blocks may share a row.
        pairs: whether a block is two segments, half of them of two documents.
        subset: how many blocks to use, drawn with `subset_seed`; 0 = all.
        subset_seed: seed of the subset.
    """

    block_length: int
    ratio: Fraction
    packing: bool
    pairs: bool
    subset: int = 0
    subset_seed: int = 0

    @property
    def pair_slots(self) -> int:
        """K of the batch, the most pairs of a row; 0 in single runs.

        With packing so many that the pairs in them are of 13 tokens in the mean: few
        texts ever fill them.
        """
        if not self.pairs:
            return 0
        return max(1, self.block_length // 16) if self.packing else 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """The blocks of a split and the rows that they are packed into.

    In single runs block b of the B blocks is segment b. In pair runs it is two segments
    of its own or, half of the time, one of its own and one of another document: segment
    2 b and segment seconds[b].

    Attributes:
        segments: all segments of the split.
        seconds: int64 [B], the second segment of each block; empty in single runs.
        labels: int32 [B], `pairs.IS_NEXT` or `pairs.IS_RANDOM`; empty in single runs.
        row_offsets: int64 [N + 1], where each row begins in `row_blocks`.
        row_blocks: int64, the blocks of each row, one row after the other.
    """

    segments: Segments
    seconds: np.ndarray
    labels: np.ndarray
    row_offsets: np.ndarray
    row_blocks: np.ndarray

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.row_offsets) - 1

    @property
    def num_blocks(self) -> int:
        """B."""
        return len(self.seconds) if self.is_paired else len(self.segments)

    @property
    def is_paired(self) -> bool:
        """Whether a block is two segments; a plan of no block is not."""
        return len(self.seconds) > 0

    @property
    def num_specials(self) -> int:
        """What a block holds besides text: [CLS] and a [SEP] behind each segment."""
        return 3 if self.is_paired else 2

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each block without [CLS] and [SEP]: int32 [B]."""
        length = self.segments.length
        return length[::2] + length[self.seconds] if self.is_paired else length

    def segments_of(self, blocks: np.ndarray) -> np.ndarray:
        """The segments of some blocks, block after block: int64."""
        if not self.is_paired:
            return blocks
        return np.stack([2 * blocks, self.seconds[blocks]], axis=1).reshape(-1)

    def most_targets(self, ratio: Fraction) -> np.ndarray:
        """The most targets that masking can choose in each block: int64 [B].

        That is its budget or, where nothing else fits, its shortest word without [UNK].
        """
        shortest = self.segments.shortest_word.astype(np.int64)
        if self.is_paired:
            one, other = shortest[::2], shortest[self.seconds]
            both = (one > 0) & (other > 0)
            # One of them is 0 where not both are there.
            shortest = np.where(both, np.minimum(one, other), one + other)
        budget = target_budget(self.lengths, ratio)
        return np.where(shortest > 0, np.maximum(budget, shortest), 0)

    def fill(self, block_length: int) -> float:
        """Share of the rows' places that hold a token, [CLS] or [SEP]; 1 of none."""
        if not self.num_rows:
            return 1.0
        lengths = self.lengths[self.row_blocks]
        tokens = int(lengths.sum(dtype=np.int64)) + self.num_specials * len(lengths)
        return tokens / (self.num_rows * block_length)


def pack(
    sizes: np.ndarray,
    targets: np.ndarray,
    block_length: int,
    slots: int,
    most_blocks: int,
) -> list[list[int]]:
    """Packs blocks into rows: best fit, the longest first.

    Args:
        sizes: int [n], tokens of each block, [CLS] and [SEP] among them.
        targets: int [n], the most targets of each block.
        block_length: L, places of a row.
        slots: M, target slots of a row.
        most_blocks: the most blocks of a row.

    Returns:
        The rows, each a list of places in `sizes`. No row exceeds any capacity.
    """
    rows: list[list[int]] = []
    slots_left: list[int] = []
    # open_rows[s]: rows with s places left; bit s of `spaces` says whether any.
    open_rows: list[list[int]] = [[] for _ in range(block_length + 1)]
    spaces = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        need, due = int(sizes[item]), int(targets[item])
        row, space = -1, block_length
        candidates = spaces >> need << need
        while candidates:
            space = (candidates & -candidates).bit_length() - 1
            row = next((r for r in open_rows[space] if slots_left[r] >= due), -1)
            if row >= 0:
                break
            candidates &= candidates - 1
        if row >= 0:
            open_rows[space].remove(row)
            if not open_rows[space]:
                spaces &= ~(1 << space)
        else:
            row, space = len(rows), block_length
            rows.append([])
            slots_left.append(slots)
        rows[row].append(item)
        slots_left[row] -= due
        if space > need and len(rows[row]) < most_blocks:
            open_rows[space - need].append(row)
            spaces |= 1 << (space - need)
    return rows


def _pack_in_windows(
    plan: Plan, settings: PlanSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Row offsets and the blocks of the rows, of a plan with a block a row."""
    sizes = plan.lengths.astype(np.int64) + plan.num_specials
    targets = plan.most_targets(settings.ratio)
    slots = target_slots(settings.block_length, settings.ratio)
    # As many as there are places, where nothing else limits them.
    most_blocks = settings.pair_slots or settings.block_length
    counts, members = [], []
    for begin in range(0, len(plan.row_blocks), _WINDOW):
        window = plan.row_blocks[begin : begin + _WINDOW]
        rows = pack(
            sizes[window], targets[window], settings.block_length, slots, most_blocks
        )
        counts.append(np.fromiter(map(len, rows), np.int64))
        members.append(window[np.fromiter(itertools.chain(*rows), np.int64)])
    offsets = np.concatenate([np.zeros(1, np.int64), *counts]).cumsum()
    return offsets, np.concatenate([np.zeros(0, np.int64), *members])


def _cut_of(settings: PlanSettings) -> Cut:
    if settings.pairs:
        capacity = segment_capacity(settings.block_length)
        return functools.partial(cut_into_segments, capacity=capacity)
    return functools.partial(cut_into_blocks, capacity=settings.block_length - 2)


def _pair_up(split: Split, segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """The second segment of each pair, and its label, over all documents of a split."""
    document = np.zeros(len(segments), np.int64)
    before = 0
    for number, shard in enumerate(split.shards):
        mine = segments.shard == number
        place = np.searchsorted(shard.documents, segments.start[mine], side="right") - 1
        document[mine] = before + place
        before += len(shard.documents) - 1
    partner, labels = trade(document[::2], _ORDER_SEED)
    return 2 * partner + 1, labels


def build_plan(
    split: Split, word_edges: np.ndarray, unk_id: int, settings: PlanSettings
) -> Plan:
    """Cuts a split into blocks and packs them into rows.

    In pair runs a document of a single token makes no block.

    Args:
        split: the split of a corpus.
        word_edges: uint8 [V], see `blocks.word_starts`.
        unk_id: the id of [UNK].
        settings: what else decides it.

    Returns:
        The plan.

    Raises:
        InputError: a token id is outside the vocabulary.
    """
    slots = target_slots(settings.block_length, settings.ratio)
    cut = _cut_of(settings)
    segments = join_segments(
        [
            cut_shard(shard, number, cut, word_edges, unk_id, slots)
            for number, shard in enumerate(split.shards)
        ]
    )
    seconds, labels = np.zeros(0, np.int64), np.zeros(0, np.int32)
    if settings.pairs:
        seconds, labels = _pair_up(split, segments)
    count = len(seconds) if settings.pairs else len(segments)
    order_key = counter.root_key(_ORDER_SEED)
    if 0 < settings.subset < count:
        order_key = counter.root_key(settings.subset_seed)
    order = counter.permute(np.arange(count), count, order_key)
    chosen = order[: settings.subset] if settings.subset else order
    offsets = np.arange(len(chosen) + 1, dtype=np.int64)
    plan = Plan(segments, seconds, labels, offsets, chosen)
    if not settings.packing:
        return plan
    offsets, members = _pack_in_windows(plan, settings)
    return dataclasses.replace(plan, row_offsets=offsets, row_blocks=members)


def load_plan(
    split: Split,
    word_edges: np.ndarray,
    unk_id: int,
    settings: PlanSettings,
    fingerprint: str,
    cache: Path,
) -> Plan:
    """`build_plan` through a cache directory.

    Two processes that build the same plan at once write the same bytes; the second
    to finish uses the first one's.

    Args:
        split: see `build_plan`.
        word_edges: see `build_plan`.
        unk_id: see `build_plan`.
        settings: see `build_plan`.
        fingerprint: of the corpus, its vocabulary included.
        cache: directory for plans, made if it is not there.

    Returns:
        The plan, memory-mapped.

    Raises:
        StorageError: the cache cannot be written.
    """
    key = _cache_key(split.name, word_edges, unk_id, settings, fingerprint)
    directory = cache / "plans" / key
    if (plan := _read(directory)) is None:
        if split.num_tokens > _MANY_TOKENS:
            print(
                f"planning the rows of {split.num_tokens:,} tokens ({split.name}), once"
                " for these settings",
                flush=True,
            )
        plan = build_plan(split, word_edges, unk_id, settings)
        try:
            _write(plan, directory)
            plan = _read(directory) or plan
        except OSError as error:
            raise StorageError(
                f"data.cache: cannot write the plan {directory}: {error}"
            ) from error
    return plan


def _cache_key(
    split: str,
    word_edges: np.ndarray,
    unk_id: int,
    settings: PlanSettings,
    fingerprint: str,
) -> str:
    if not settings.subset:
        settings = dataclasses.replace(settings, subset_seed=0)
    choice = dataclasses.asdict(settings) | {"ratio": str(settings.ratio)}
    # What words are is the code's to say, not the corpus's.
    words = [hashlib.sha256(word_edges.tobytes()).hexdigest(), unk_id]
    content = json.dumps([_FORMAT, fingerprint, split, words, choice])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _arrays(plan: Plan) -> dict[str, np.ndarray]:
    arrays = vars(plan) | vars(plan.segments)
    del arrays["segments"]
    return arrays


def _write(plan: Plan, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".partial-"))
    try:
        for name, array in _arrays(plan).items():
            write_array(partial / f"{name}.npy", array)
        # One that was damaged is in the way of a rename. Not deleted where it is, in
        # part perhaps, while another process finds it in its own way.
        if directory.exists() and _read(directory) is None:
            damaged = partial.with_name(f"{partial.name}-damaged")
            with contextlib.suppress(FileNotFoundError):
                os.rename(directory, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        os.rename(partial, directory)
    except (OSError, StorageError):
        shutil.rmtree(partial, ignore_errors=True)
        if _read(directory) is None:
            raise


def _read(directory: Path) -> Plan | None:
    """The plan in a directory; None if there is none, or not all of it."""

    def load(name: str) -> np.ndarray:
        return np.load(directory / f"{name}.npy", mmap_mode="r")

    try:
        segments = Segments(*(load(one.name) for one in dataclasses.fields(Segments)))
        rest = (load(one.name) for one in dataclasses.fields(Plan)[1:])
        return Plan(segments, *rest)
    except (OSError, ValueError, EOFError):
        return None


def shuffled_rows(
    step: int, batch_size: int, num_rows: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the global batch of one training step.

    An epoch is a permutation of the rows by (seed, epoch). Row i of step t is place
    (t * B + i) mod N of epoch (t * B + i) // N: batches run across an epoch's end and
    none is short. A plan with fewer rows than a batch is padded with empty rows, so
    that a step is then an epoch.

    Args:
        step: t, from 0.
        batch_size: B, rows of the global batch.
        num_rows: rows of the plan, at least 1.
        seed: of the order.

    Returns:
        int64 [B] row numbers, -1 for an empty row; int64 [B] epochs.
    """
    places = max(num_rows, batch_size)
    index = step * batch_size + np.arange(batch_size, dtype=np.int64)
    epochs = index // places
    keys = counter.fold(counter.fold(counter.root_key(seed), counter.ROWS), epochs)
    rows = counter.permute(index % places, places, keys)
    return np.where(rows < num_rows, rows, -1), epochs


def ordered_rows(
    step: int, batch_size: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one evaluation batch: each once, then empty ones.

    Returns:
        int64 [batch_size] row numbers, -1 for an empty row; epochs, all 0.
    """
    rows = step * batch_size + np.arange(batch_size, dtype=np.int64)
    return np.where(rows < num_rows, rows, -1), np.zeros_like(rows)
