"""Packing, the cache of plans, and the order of rows."""

import dataclasses
import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import text
from spanbert_jax.corpus.store import Split
from spanbert_jax.corpus.tokenizers import STARTS
from spanbert_jax.data import plan as plan_lib
from spanbert_jax.data.batch import masked_blocks
from spanbert_jax.data.blocks import target_slots
from spanbert_jax.data.plan import (
    Plan,
    PlanSettings,
    build_plan,
    load_plan,
    ordered_rows,
    pack,
    shuffled_rows,
)
from spanbert_jax.errors import InputError, StorageError

SETTINGS = PlanSettings(64, text.RATIO, packing=True, pairs=False)


def build(split: Split, **changes: object) -> Plan:
    settings = dataclasses.replace(SETTINGS, **changes)
    return build_plan(split, text.WORD_EDGES, text.SPECIAL.unk, settings)


def realistic_lengths(seed: int, documents: int) -> np.ndarray:
    """Many short documents and some of many blocks."""
    rng = np.random.default_rng(seed)
    return np.maximum(1, rng.lognormal(6, 1.2, documents).astype(int))


def rows_of(plan: Plan) -> list[np.ndarray]:
    return np.split(plan.row_blocks, plan.row_offsets[1:-1])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("most_blocks", [1, 3, 64])
def test_pack_keeps_all_capacities_and_every_block(seed: int, most_blocks: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 65, 1000)
    # Far more targets than masking asks for, so that all capacities bind.
    targets = rng.integers(0, 17, 1000) * (rng.random(1000) < 0.5)
    rows = pack(sizes, targets, 64, 16, most_blocks)
    assert sorted(np.concatenate(rows).tolist()) == list(range(1000))
    for row in rows:
        assert sizes[row].sum() <= 64
        assert targets[row].sum() <= 16
        assert len(row) <= most_blocks
    assert most_blocks == 64 or max(map(len, rows)) == most_blocks


def test_pack_fills_a_row_to_the_last_place() -> None:
    rows = pack(np.array([32, 32, 64, 16, 16, 16, 16]), np.ones(7, int), 64, 16, 64)
    assert sorted(map(len, rows)) == [1, 2, 4]


def test_pack_prefers_the_fullest_row_that_fits() -> None:
    # 42 and 32 open a row each; 22 fits both and goes where least is left.
    rows = pack(np.array([42, 32, 22]), np.ones(3, int), 64, 16, 64)
    assert [sorted(row) for row in rows] == [[0, 2], [1]]


def test_pack_of_nothing_has_no_rows() -> None:
    assert pack(np.zeros(0, int), np.zeros(0, int), 64, 16, 64) == []


def test_tiny_blocks_fill_the_slots_before_the_places() -> None:
    split = text.random_split(1, [1] * 1000)
    plan = build(split)
    assert [len(row) for row in rows_of(plan)] == [16] * 62 + [8]
    assert plan.fill(64) < 0.8


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_a_plan_holds_every_block_once(packing: bool, shards: int) -> None:
    split = text.random_split(2, [*realistic_lengths(2, 300), 1, 1, 1], shards)
    plan = build(split, packing=packing)
    assert sorted(plan.row_blocks.tolist()) == list(range(plan.num_blocks))
    targets = plan.most_targets(text.RATIO)
    for row in rows_of(plan):
        assert (plan.lengths[row] + 2).sum() <= 64
        assert targets[row].sum() <= 16
        assert packing or len(row) == 1
    pieces = range(plan.num_blocks)
    texts = [text.segment_text(split, plan, piece) for piece in pieces]
    stream = np.concatenate([shard.tokens for shard in split.shards])
    np.testing.assert_array_equal(np.concatenate(texts), stream)


def test_packing_fills_99_percent_of_realistic_text() -> None:
    split = text.random_split(3, realistic_lengths(3, 3000), most_pieces=3)
    packed = build(split, block_length=512)
    padded = build(split, block_length=512, packing=False)
    full = padded.lengths >= 505
    assert 0.3 < full.mean() < 0.7
    assert packed.fill(512) >= 0.99
    assert padded.fill(512) < 0.8
    assert packed.num_rows < 0.8 * padded.num_rows


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
def test_a_split_without_shards_has_no_rows(packing: bool, pairs: bool) -> None:
    plan = build(Split("valid", ()), packing=packing, pairs=pairs)
    assert plan.num_rows == plan.num_blocks == 0
    assert plan.fill(64) == 1


def test_fill_is_the_share_of_places_in_use() -> None:
    split = text.random_split(4, [30, 62, 10])
    plan = build(split, packing=False)
    assert plan.fill(64) == pytest.approx((32 + 64 + 12) / (3 * 64))


def test_fill_counts_the_second_sep_of_a_pair() -> None:
    split = text.random_split(4, [30, 60, 10])
    plan = build(split, packing=False, pairs=True)
    assert plan.fill(64) == pytest.approx((33 + 63 + 13) / (3 * 64))


def test_rows_mix_the_documents() -> None:
    split = text.random_split(5, [40] * 2000)
    first = np.array([row[0] for row in rows_of(build(split))])
    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.1


@pytest.mark.parametrize("packing", [True, False])
def test_a_subset_has_as_many_blocks_as_asked_for_by_its_seed(packing: bool) -> None:
    split = text.random_split(6, realistic_lengths(6, 100))

    def subset(size: int, seed: int) -> np.ndarray:
        plan = build(split, packing=packing, subset=size, subset_seed=seed)
        assert len(np.unique(plan.row_blocks)) == len(plan.row_blocks)
        return np.sort(plan.row_blocks)

    total = build(split).num_blocks
    assert len(subset(50, 1)) == 50
    np.testing.assert_array_equal(subset(50, 1), subset(50, 1))
    assert not np.array_equal(subset(50, 1), subset(50, 2))
    assert np.isin(subset(50, 1), subset(51, 1)).all()
    assert len(subset(total + 5, 1)) == total


def test_a_subset_spreads_over_the_whole_split() -> None:
    split = text.random_split(7, [40] * 2000)
    plan = build(split, subset=500, subset_seed=3)
    # The standard error of the mean of 500 of range(2000) is 22.
    assert plan.row_blocks.mean() == pytest.approx(1000, abs=100)


def test_a_block_of_a_subset_masks_as_in_the_whole_split() -> None:
    split = text.random_split(8, realistic_lengths(8, 60), unknown=0.02)
    feed = text.make_feed(split)
    plan = build(split, subset=40, subset_seed=1)
    few = dataclasses.replace(feed, plan=plan)
    chosen = np.sort(plan.row_blocks)
    everything = np.arange(feed.plan.num_blocks)
    part = masked_blocks(few, chosen, np.zeros_like(chosen))
    whole = masked_blocks(feed, everything, np.zeros_like(everything))
    block = np.searchsorted(whole.offsets, whole.masks.target, side="right") - 1
    mine = np.isin(block, chosen)
    for name in ("action", "replacement"):
        np.testing.assert_array_equal(
            getattr(part.masks, name), getattr(whole.masks, name)[mine]
        )
    place = whole.masks.target - whole.offsets[block]
    number = np.searchsorted(part.offsets, part.masks.target, side="right") - 1
    np.testing.assert_array_equal(part.masks.target - part.offsets[number], place[mine])


def test_an_id_outside_the_vocabulary_stops_the_plan() -> None:
    split = text.random_split(9, [40] * 5, shards=2)
    split.shards[1].tokens[45] = text.VOCAB_SIZE
    with pytest.raises(InputError, match="document 1 of shard train-00001"):
        build(split)


# Pairs.


def pairs_split(shards: int = 3) -> Split:
    """Many documents, some of one token, of two and of three among them."""
    lengths = [*realistic_lengths(11, 60), *[1, 2, 3, 40] * 25, 1]
    return text.random_split(11, lengths, shards, unknown=0.2)


def document_of(split: Split, plan: Plan, piece: int) -> tuple[int, int]:
    """The shard and the document that a segment begins in."""
    number, start = int(plan.segments.shard[piece]), int(plan.segments.start[piece])
    documents = split.shards[number].documents.tolist()
    return number, max(d for d in range(len(documents) - 1) if documents[d] <= start)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("length", [7, 64, 128])
def test_pairs_hold_every_token_of_documents_of_two_and_more(
    packing: bool, length: int
) -> None:
    split = pairs_split()
    plan = build(split, block_length=length, packing=packing, pairs=True)
    assert sorted(plan.row_blocks.tolist()) == list(range(plan.num_blocks))
    pieces = plan.segments_of(np.arange(plan.num_blocks))
    assert sorted(pieces.tolist()) == list(range(len(plan.segments)))
    assert len(pieces) == 2 * plan.num_blocks
    texts = [text.segment_text(split, plan, p) for p in range(len(plan.segments))]
    assert max(map(len, texts)) <= (length - 3) // 2
    assert min(map(len, texts)) >= 1
    documents = [
        shard.tokens[begin:end]
        for shard in split.shards
        for begin, end in itertools.pairwise(shard.documents)
    ]
    longer = [one for one in documents if len(one) > 1]
    np.testing.assert_array_equal(np.concatenate(texts), np.concatenate(longer))
    left_out = len(documents) - len(longer)
    assert left_out == 26
    assert sum(map(len, texts)) + left_out == split.num_tokens
    for block in range(plan.num_blocks):
        mine = [len(texts[p]) for p in pieces[2 * block : 2 * block + 2]]
        assert plan.lengths[block] == sum(mine)


@pytest.mark.parametrize("shards", [1, 3])
def test_half_of_the_seconds_are_next_and_half_of_another_document(shards: int) -> None:
    split = pairs_split(shards)
    plan = build(split, pairs=True)
    random = 0
    for block, (second, label) in enumerate(
        zip(plan.seconds.tolist(), plan.labels.tolist(), strict=True)
    ):
        own, other = (document_of(split, plan, p) for p in (2 * block, second))
        end = plan.segments.start[2 * block] + plan.segments.length[2 * block]
        follows = own == other and plan.segments.start[second] == end
        assert follows == (label == 0)
        assert (own != other) == (label == 1)
        random += label
    assert random == plan.num_blocks // 2
    if shards > 1:
        shard = plan.segments.shard
        assert (shard[::2] != shard[plan.seconds]).sum() > random // 3


def plain_sizes(split: Split, plan: Plan, piece: int) -> list[int]:
    """The sizes of a segment's words without [UNK]; a cut word is one a token."""
    shard = split.shards[plan.segments.shard[piece]]
    begin = int(plan.segments.start[piece])
    end = begin + int(plan.segments.length[piece])
    borders = np.flatnonzero(text.STARTS_WORD[shard.tokens])
    borders = sorted({*borders.tolist(), *shard.documents.tolist()})
    sizes = []
    for first, last in itertools.pairwise(borders):
        inside = range(max(first, begin), min(last, end))
        known = [shard.tokens[place] != text.SPECIAL.unk for place in inside]
        if len(inside) == last - first:
            sizes += [len(inside)] * all(known)
        else:
            sizes += [1] * sum(known)
    return sizes


@pytest.mark.parametrize("pairs", [True, False])
def test_the_most_targets_are_the_budget_or_the_shortest_word(pairs: bool) -> None:
    rng = np.random.default_rng(12)
    lengths = [*rng.integers(1, 4, 60), *rng.integers(4, 150, 10)]
    split = text.random_split(12, lengths, shards=2, most_pieces=9, unknown=0.2)
    plan = build(split, pairs=pairs)
    pieces = plan.segments_of(np.arange(plan.num_blocks)).reshape(plan.num_blocks, -1)
    expected = []
    for mine, length in zip(pieces.tolist(), plan.lengths.tolist(), strict=True):
        sizes = [size for piece in mine for size in plain_sizes(split, plan, piece)]
        budget = math.ceil(text.RATIO * length)
        expected.append(max(budget, min(sizes)) if sizes else 0)
    most = plan.most_targets(text.RATIO).tolist()
    assert most == expected
    assert 0 in most
    budgets = [math.ceil(text.RATIO * length) for length in plan.lengths.tolist()]
    assert any(one > budget for one, budget in zip(most, budgets, strict=True))


@pytest.mark.parametrize("length", [7, 24, 64])
def test_rows_of_pairs_keep_three_capacities(length: int) -> None:
    split = pairs_split()
    settings = dataclasses.replace(SETTINGS, block_length=length, pairs=True)
    plan = build(split, block_length=length, pairs=True)
    targets = plan.most_targets(text.RATIO)
    most = max(1, length // 16)
    assert settings.pair_slots == most
    rows = rows_of(plan)
    for row in rows:
        assert (plan.lengths[row] + 3).sum() <= length
        assert targets[row].sum() <= target_slots(length, text.RATIO)
        assert len(row) <= most


def test_tiny_pairs_fill_the_pair_slots_before_all_else() -> None:
    split = text.random_split(14, [2] * 100)
    plan = build(split, pairs=True)
    assert [len(row) for row in rows_of(plan)] == [4] * 25


def test_pair_slots_are_one_without_packing_and_none_without_pairs() -> None:
    padded = dataclasses.replace(SETTINGS, packing=False, pairs=True)
    assert padded.pair_slots == 1
    assert SETTINGS.pair_slots == 0


def test_packing_fills_rows_with_pairs() -> None:
    split = text.random_split(3, realistic_lengths(3, 3000), most_pieces=3)
    packed = build(split, block_length=512, pairs=True)
    padded = build(split, block_length=512, pairs=True, packing=False)
    # Segments end with their lines: many are not full, but few leave room for another.
    assert packed.fill(512) > padded.fill(512) + 0.15
    assert packed.num_rows < 0.85 * padded.num_rows


# The cache.


def load(
    split: Split, cache: Path, fingerprint: str = "one", **changes: object
) -> Plan:
    settings = dataclasses.replace(SETTINGS, **changes)
    edges, unk = text.WORD_EDGES, text.SPECIAL.unk
    return load_plan(split, edges, unk, settings, fingerprint, cache)


def directories(cache: Path) -> list[Path]:
    return sorted((cache / "plans").iterdir())


@pytest.fixture(scope="module")
def split() -> Split:
    return text.random_split(10, realistic_lengths(10, 50))


@pytest.mark.parametrize("pairs", [True, False])
def test_a_loaded_plan_equals_a_built_one(
    split: Split, tmp_path: Path, pairs: bool
) -> None:
    loaded = load(split, tmp_path / "new" / "cache", pairs=pairs)
    built = build(split, pairs=pairs)
    assert built.is_paired == loaded.is_paired == pairs
    for name in ("row_offsets", "row_blocks", "seconds", "labels"):
        one, other = getattr(loaded, name), getattr(built, name)
        assert isinstance(one, np.memmap)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    for field in dataclasses.fields(built.segments):
        one = getattr(loaded.segments, field.name)
        other = getattr(built.segments, field.name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_the_second_load_reads_what_the_first_wrote(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(split, tmp_path)
    assert len(directories(tmp_path)) == 1
    monkeypatch.delattr(plan_lib, "build_plan")
    second = load(split, tmp_path)
    np.testing.assert_array_equal(first.row_blocks, second.row_blocks)
    assert len(directories(tmp_path)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"block_length": 32},
        {"ratio": Fraction(1, 5)},
        {"packing": False},
        {"pairs": True},
        {"fingerprint": "two"},
        {"subset": 20},
    ],
)
def test_other_settings_have_another_plan(
    split: Split, tmp_path: Path, changes: dict[str, object]
) -> None:
    load(split, tmp_path)
    load(split, tmp_path, **changes)
    assert len(directories(tmp_path)) == 2


def test_a_loaded_subset_is_that_of_its_seed(split: Split, tmp_path: Path) -> None:
    for seed in (1, 2):
        loaded = load(split, tmp_path, subset=20, subset_seed=seed)
        built = build(split, subset=20, subset_seed=seed)
        np.testing.assert_array_equal(loaded.row_blocks, built.row_blocks)
    assert len(directories(tmp_path)) == 2


def test_the_seed_of_no_subset_is_no_other_plan(split: Split, tmp_path: Path) -> None:
    for seed in (1, 2):
        load(split, tmp_path, subset_seed=seed)
    assert len(directories(tmp_path)) == 1


def test_another_split_has_another_plan(split: Split, tmp_path: Path) -> None:
    load(split, tmp_path)
    load(Split("valid", split.shards), tmp_path)
    assert len(directories(tmp_path)) == 2


def test_a_cache_that_cannot_be_written_is_named(split: Split, tmp_path: Path) -> None:
    # A file in its place, because root may write to any directory.
    cache = tmp_path / "cache"
    cache.write_text("")
    with pytest.raises(StorageError, match=rf"data\.cache: .*{cache}"):
        load(split, cache)


def test_a_failed_write_leaves_nothing_behind(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, array: np.ndarray, allow_pickle: bool) -> None:
        # What NumPy raises where a disk fills up within an array: it has no strerror.
        raise OSError(f"{array.size} requested and 0 written")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(StorageError, match="requested and 0 written"):
        load(split, tmp_path)
    assert directories(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut short", "missing", "empty"])
def test_a_damaged_plan_is_built_anew(
    split: Split, tmp_path: Path, damage: str
) -> None:
    load(split, tmp_path)
    (directory,) = directories(tmp_path)
    path = directory / "row_blocks.npy"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-8] if damage == "cut short" else b"")
    mended = load(split, tmp_path)
    np.testing.assert_array_equal(mended.row_blocks, build(split).row_blocks)
    assert directories(tmp_path) == [directory]


def test_the_plan_of_a_process_that_was_faster_is_used(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_slowly(*arguments: object) -> Plan:
        monkeypatch.setattr(plan_lib, "build_plan", build_plan)
        load(split, tmp_path)
        return build_plan(*arguments)

    monkeypatch.setattr(plan_lib, "build_plan", build_slowly)
    loaded = load(split, tmp_path)
    np.testing.assert_array_equal(loaded.row_blocks, build(split).row_blocks)
    assert len(directories(tmp_path)) == 1


# The order of rows.


def stream(steps: range, batch_size: int, num_rows: int) -> tuple[np.ndarray, ...]:
    parts = [shuffled_rows(step, batch_size, num_rows, seed=3) for step in steps]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


@pytest.mark.parametrize(("batch_size", "num_rows"), [(8, 100), (7, 7), (10, 64)])
def test_each_epoch_is_a_permutation_and_batches_run_across_its_end(
    batch_size: int, num_rows: int
) -> None:
    rows, epochs = stream(range(num_rows), batch_size, num_rows)
    orders = rows.reshape(batch_size, num_rows)
    assert (np.sort(orders, axis=1) == np.arange(num_rows)).all()
    assert len(np.unique(orders, axis=0)) == batch_size
    np.testing.assert_array_equal(epochs, np.repeat(np.arange(batch_size), num_rows))


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    small, _ = stream(range(40), 5, 30)
    large, _ = stream(range(10), 20, 30)
    np.testing.assert_array_equal(small, large)


def test_seeds_order_differently() -> None:
    one, _ = shuffled_rows(0, 50, 50, seed=1)
    other, _ = shuffled_rows(0, 50, 50, seed=2)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("num_rows", [1, 5, 7])
def test_fewer_rows_than_a_batch_come_once_each_with_empty_ones(num_rows: int) -> None:
    for step in range(20):
        rows, epochs = shuffled_rows(step, 8, num_rows, seed=4)
        assert sorted(rows.tolist()) == [-1] * (8 - num_rows) + list(range(num_rows))
        assert epochs.tolist() == [step] * 8


def test_a_step_far_away_is_as_quick_as_the_first() -> None:
    rows, epochs = shuffled_rows(10**12, 256, 1_000_003, seed=5)
    begin = 10**12 * 256
    places = [begin + i for i in range(256)]
    assert epochs.tolist() == [place // 1_000_003 for place in places]
    assert len(np.unique(rows)) == 256
    assert ((rows >= 0) & (rows < 1_000_003)).all()


@pytest.mark.parametrize("batch_size", [1, 3, 8, 10, 25])
def test_evaluation_sees_each_row_once(batch_size: int) -> None:
    steps = -(-10 // batch_size)
    parts = [ordered_rows(step, batch_size, 10) for step in range(steps)]
    rows = np.concatenate([rows for rows, _ in parts])
    assert rows.tolist() == list(range(10)) + [-1] * (steps * batch_size - 10)
    assert not np.concatenate([epochs for _, epochs in parts]).any()


def test_other_words_are_another_plan(split: Split, tmp_path: Path) -> None:
    settings = SETTINGS
    edges = text.WORD_EDGES.copy()
    edges[text.FIRST_PIECE : text.FIRST_PIECE + 100] = STARTS
    for one in (text.WORD_EDGES, edges):
        loaded = load_plan(split, one, text.SPECIAL.unk, settings, "one", tmp_path)
        built = build_plan(split, one, text.SPECIAL.unk, settings)
        for name, array in vars(built.segments).items():
            np.testing.assert_array_equal(getattr(loaded.segments, name), array)
    assert len(directories(tmp_path)) == 2
