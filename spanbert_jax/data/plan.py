"""The plan: which blocks share a row, and in which order the rows come.

It depends on the corpus and the data settings alone, is built at first use and kept as
memory-mapped arrays in a cache directory.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np

from spanbert_jax.corpus.store import Split, write_array
from spanbert_jax.data import counter
from spanbert_jax.data.blocks import Blocks, cut_shard, join_blocks, target_slots
from spanbert_jax.errors import StorageError

# Part of the cache key: raise it when the meaning of the arrays changes.
_FORMAT = 2
# Best-fit over windows fills 99.9 % of the tokens of real text at bounded memory.
_WINDOW = 4096
_ORDER_SEED = 0


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """What a plan is made from besides the text.

    Attributes:
        block_length: L, places of a row.
        ratio: share of tokens to mask.
        packing: whether several blocks may share a row.
        subset: how many blocks to use, drawn with `subset_seed`; 0 = all.
        subset_seed: seed of the subset.
    """

    block_length: int
    ratio: Fraction
    packing: bool
    subset: int = 0
    subset_seed: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The blocks of a split and the rows that they are packed into.

    Attributes:
        blocks: all blocks of the split.
        row_offsets: int64 [N + 1], where each row begins in `row_blocks`.
        row_blocks: int64, the blocks of each row, one row after the other.
    """

    blocks: Blocks
    row_offsets: np.ndarray
    row_blocks: np.ndarray

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.row_offsets) - 1

    def fill(self, block_length: int) -> float:
        """Share of the rows' places that hold a token, [CLS] or [SEP]; 1 of none."""
        if not self.num_rows:
            return 1.0
        lengths = self.blocks.length[self.row_blocks]
        tokens = int(lengths.sum(dtype=np.int64)) + 2 * len(lengths)
        return tokens / (self.num_rows * block_length)


def pack(
    lengths: np.ndarray, targets: np.ndarray, block_length: int, slots: int
) -> list[list[int]]:
    """Packs blocks into rows: best fit, the longest first.

    Args:
        lengths: int [n], tokens of each block without [CLS] and [SEP].
        targets: int [n], the most targets of each block.
        block_length: L, places of a row.
        slots: M, target slots of a row.

    Returns:
        The rows, each a list of places in `lengths`. No row exceeds either capacity.
    """
    rows: list[list[int]] = []
    slots_left: list[int] = []
    # open_rows[s]: rows with s places left; bit s of `spaces` says whether any.
    open_rows: list[list[int]] = [[] for _ in range(block_length + 1)]
    spaces = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        need, due = int(lengths[item]) + 2, int(targets[item])
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
        if space > need:
            open_rows[space - need].append(row)
            spaces |= 1 << (space - need)
    return rows


def _pack_in_windows(
    blocks: Blocks, chosen: np.ndarray, block_length: int, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    counts, members = [], []
    for begin in range(0, len(chosen), _WINDOW):
        window = chosen[begin : begin + _WINDOW]
        rows = pack(
            blocks.length[window], blocks.most_targets[window], block_length, slots
        )
        counts += [len(row) for row in rows]
        members += [window[row] for row in rows]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return offsets, np.concatenate([np.zeros(0, np.int64), *members])


def build_plan(
    split: Split, word_edges: np.ndarray, unk_id: int, settings: PlanSettings
) -> Plan:
    """Cuts a split into blocks and packs them into rows.

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
    length, ratio = settings.block_length, settings.ratio
    parts = [
        cut_shard(shard, number, word_edges, unk_id, length, ratio)
        for number, shard in enumerate(split.shards)
    ]
    blocks = join_blocks(parts)
    order_key = counter.root_key(_ORDER_SEED)
    if 0 < settings.subset < len(blocks):
        order_key = counter.root_key(settings.subset_seed)
    order = counter.permute(np.arange(len(blocks)), len(blocks), order_key)
    chosen = order[: settings.subset] if settings.subset else order
    if not settings.packing:
        offsets = np.arange(len(chosen) + 1, dtype=np.int64)
        return Plan(blocks, offsets, chosen)
    slots = target_slots(length, ratio)
    return Plan(blocks, *_pack_in_windows(blocks, chosen, length, slots))


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
    directory = cache / "plans" / _cache_key(split.name, settings, fingerprint)
    if (plan := _read(directory)) is None:
        plan = build_plan(split, word_edges, unk_id, settings)
        try:
            _write(plan, directory)
            plan = _read(directory) or plan
        except OSError as error:
            raise StorageError(
                f"data.cache: cannot write the plan {directory}: {error}"
            ) from error
    return plan


def _cache_key(split: str, settings: PlanSettings, fingerprint: str) -> str:
    if not settings.subset:
        settings = dataclasses.replace(settings, subset_seed=0)
    choice = dataclasses.asdict(settings) | {"ratio": str(settings.ratio)}
    content = json.dumps([_FORMAT, fingerprint, split, choice])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _arrays(plan: Plan) -> dict[str, np.ndarray]:
    rows = {"row_offsets": plan.row_offsets, "row_blocks": plan.row_blocks}
    return dataclasses.asdict(plan.blocks) | rows


def _write(plan: Plan, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".partial-"))
    try:
        for name, array in _arrays(plan).items():
            write_array(partial / f"{name}.npy", array)
        # One that was cut short, by a full disk say, is in the way of a rename.
        if directory.exists() and _read(directory) is None:
            shutil.rmtree(directory)
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
        blocks = Blocks(*(load(field.name) for field in dataclasses.fields(Blocks)))
        return Plan(blocks, load("row_offsets"), load("row_blocks"))
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
