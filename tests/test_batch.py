"""The batch, row by row, against the text that it was made from."""

import dataclasses

import numpy as np
import pytest

import text
from spanbert_jax.corpus.store import Split
from spanbert_jax.data.batch import (
    Batch,
    BatchShape,
    Feed,
    batch_spec,
    empty_batch,
    make_batch,
    masked_blocks,
)
from spanbert_jax.data.masking import SCHEMES
from spanbert_jax.errors import InputError

LENGTH, SLOTS = 64, 16
# How text becomes rows: arguments of make_feed.
PACKED, PADDED = {"packing": True}, {"packing": False}
PAIRS = {"packing": True, "pairs": True}
PADDED_PAIRS = {"packing": False, "pairs": True}
each_form = pytest.mark.parametrize(
    "form",
    [PACKED, PADDED, PAIRS, PADDED_PAIRS],
    ids=["packed", "padded", "packed pairs", "padded pairs"],
)


@pytest.fixture(scope="module")
def split() -> Split:
    lengths = np.random.default_rng(1).lognormal(4, 1.2, 150).astype(int) + 1
    return text.random_split(1, [*lengths, *[1, 2, 3] * 20], shards=3, unknown=0.03)


def all_rows(feed: Feed, epoch: int = 0) -> Batch:
    rows = np.arange(feed.plan.num_rows)
    return make_batch(feed, rows, np.full_like(rows, epoch))


def blocks_of_row(feed: Feed, row: int) -> np.ndarray:
    return feed.plan.row_blocks[slice(*feed.plan.row_offsets[row : row + 2])]


def plain_rows(feed: Feed, length: int = LENGTH) -> dict[str, np.ndarray]:
    """What every row holds before masking, one token at a time."""
    keys = ("token_ids", "segment_ids", "position_ids", "type_ids")
    table = {key: [] for key in keys}
    for row in range(feed.plan.num_rows):
        ids, numbers, positions, types = [], [], [], []
        for number, block in enumerate(blocks_of_row(feed, row), start=1):
            texts = text.block_texts(feed.split, feed.plan, block)
            begin = len(ids)
            ids.append(text.SPECIAL.cls)
            types.append(0)
            for kind, tokens in enumerate(texts):
                ids += [*tokens.tolist(), text.SPECIAL.sep]
                types += [kind] * (len(tokens) + 1)
            numbers += [number] * (len(ids) - begin)
            positions += range(len(ids) - begin)
        padding = [0] * (length - len(ids))
        held = (ids, numbers, positions, types)
        for key, one in zip(keys, held, strict=True):
            table[key].append(one + padding)
    return {key: np.array(held) for key, held in table.items()}


def at(array: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.take_along_axis(array, positions, axis=1)


def target_mask(batch: Batch) -> np.ndarray:
    mask = np.zeros(batch["token_ids"].shape, bool)
    row, slot = np.nonzero(batch["target_weights"])
    mask[row, batch["target_positions"][row, slot]] = True
    return mask


@each_form
def test_keys_dtypes_and_shapes_are_those_of_the_spec(
    split: Split, form: dict[str, bool]
) -> None:
    feed = text.make_feed(split, **form)
    assert feed.target_slots == SLOTS
    batch = make_batch(feed, np.array([3, -1, 0, 7]), np.array([0, 0, 1, 2]))
    pair_slots = 0
    if "pairs" in form:
        pair_slots = 4 if form["packing"] else 1
    spec = batch_spec(BatchShape(4, LENGTH, SLOTS, pair_slots))
    assert set(batch) == set(spec)
    for key, (shape, dtype) in spec.items():
        assert batch[key].shape == shape
        assert batch[key].dtype == dtype


@each_form
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_targets_restore_the_text(
    split: Split, form: dict[str, bool], scheme: str
) -> None:
    masking = dataclasses.replace(text.PAPER, scheme=scheme)
    feed = text.make_feed(split, **form, masking=masking)
    batch = all_rows(feed)
    restored = batch["token_ids"].copy()
    row, slot = np.nonzero(batch["target_weights"])
    restored[row, batch["target_positions"][row, slot]] = batch["target_ids"][row, slot]
    assert not np.array_equal(restored, batch["token_ids"])
    np.testing.assert_array_equal(restored, plain_rows(feed)["token_ids"])


@each_form
def test_segments_count_from_one_positions_and_types_from_zero(
    split: Split, form: dict[str, bool]
) -> None:
    feed = text.make_feed(split, **form)
    batch, plain = all_rows(feed), plain_rows(feed)
    assert (batch["segment_ids"].max() > 1) == form["packing"]
    assert batch["type_ids"].max() == ("pairs" in form)
    for key in ("segment_ids", "position_ids", "type_ids"):
        np.testing.assert_array_equal(batch[key], plain[key])


@each_form
@pytest.mark.parametrize("scheme", SCHEMES)
def test_special_and_unknown_tokens_and_padding_are_never_targets(
    split: Split, form: dict[str, bool], scheme: str
) -> None:
    masking = dataclasses.replace(text.PAPER, scheme=scheme)
    feed = text.make_feed(split, **form, masking=masking)
    batch, plain = all_rows(feed), plain_rows(feed)["token_ids"]
    special = plain < text.FIRST_WORD
    assert (plain == text.SPECIAL.unk).any()
    assert not (special & target_mask(batch)).any()
    np.testing.assert_array_equal(batch["token_ids"][special], plain[special])


@each_form
def test_each_target_has_one_slot(split: Split, form: dict[str, bool]) -> None:
    batch = all_rows(text.make_feed(split, **form))
    for weights, positions in zip(
        batch["target_weights"], batch["target_positions"], strict=True
    ):
        held = positions[weights > 0]
        assert held.tolist() == sorted(set(held.tolist()))
        assert weights.tolist() == [1] * len(held) + [0] * (SLOTS - len(held))


def has_a_known_word(tokens: np.ndarray, cut: np.ndarray) -> bool:
    """`cut`: whether the first word begins, and the last one ends, in another segment.

    The pieces of such a word are words.
    """
    words = np.split(tokens, np.flatnonzero(text.STARTS_WORD[tokens][1:]) + 1)
    whole = words[int(cut[0]) : len(words) - int(cut[1])]
    pieces = np.concatenate(
        [*words[: int(cut[0])], *words[len(words) - int(cut[1]) :], []]
    )
    known = [text.SPECIAL.unk not in word for word in whole]
    return any(known) or bool((pieces != text.SPECIAL.unk).any())


@each_form
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_block_has_a_target_unless_its_words_are_unknown(
    form: dict[str, bool], scheme: str
) -> None:
    split = text.random_split(4, [1, 2, 3, 4, 40] * 30, shards=2, unknown=0.3)
    masking = dataclasses.replace(text.PAPER, scheme=scheme)
    feed = text.make_feed(split, **form, masking=masking)
    masked = target_mask(all_rows(feed))
    bare = 0
    for row, mask in enumerate(masked):
        begin = 0
        for block in blocks_of_row(feed, row):
            texts = text.block_texts(split, feed.plan, block)
            end = begin + 1 + sum(len(tokens) + 1 for tokens in texts)
            pieces = feed.plan.segments_of(np.array([block]))
            known = [
                has_a_known_word(
                    tokens, feed.plan.segments.continues[[piece - 1, piece]]
                )
                for tokens, piece in zip(texts, pieces, strict=True)
            ]
            assert mask[begin:end].any() == any(known)
            bare += not any(known)
            begin = end
    assert bare > 0


@each_form
@pytest.mark.parametrize("scheme", SCHEMES)
def test_boundaries_enclose_the_span_of_each_target(
    split: Split, form: dict[str, bool], scheme: str
) -> None:
    masking = dataclasses.replace(text.PAPER, scheme=scheme)
    batch = all_rows(text.make_feed(split, **form, masking=masking))
    masked, segments = target_mask(batch), batch["segment_ids"]
    ends_of_a = (batch["type_ids"] == 0) & (batch["token_ids"] == text.SPECIAL.sep)
    beside = np.zeros_like(masked)
    for row, slot in np.argwhere(batch["target_weights"] > 0):
        left, target, right = (
            batch[f"{name}_positions"][row, slot]
            for name in ("left", "target", "right")
        )
        assert left < target < right
        assert masked[row, left + 1 : right].all()
        assert not masked[row, left]
        assert not masked[row, right]
        assert len(set(segments[row, left : right + 1].tolist())) == 1
        assert batch["span_offsets"][row, slot] == target - left
        beside[row, [left, right]] = True
        # A span stays on its side of the middle [SEP].
        types = batch["type_ids"][row, left + 1 : right]
        assert len(set(types.tolist())) == 1
    assert not (masked & ends_of_a).any()
    # Also on both sides at once, where that [SEP] stands between two spans.
    assert (beside & ends_of_a).any()


@each_form
@pytest.mark.parametrize("positions", [1, 4, 20])
@pytest.mark.parametrize("edges", [True, False])
def test_sbo_counts_within_its_table_and_between_its_boundaries(
    split: Split, form: dict[str, bool], positions: int, edges: bool
) -> None:
    feed = text.make_feed(split, **form, sbo_positions=positions, sbo_edges=edges)
    batch, plain = all_rows(feed), plain_rows(feed)["token_ids"]
    expected = batch["target_weights"] > 0
    expected &= batch["span_offsets"] <= positions
    if not edges:
        for side in ("left_positions", "right_positions"):
            edge = at(plain, batch[side])
            expected &= ~np.isin(edge, [text.SPECIAL.cls, text.SPECIAL.sep])
    np.testing.assert_array_equal(batch["sbo_weights"], expected.astype(np.float32))


def test_the_cases_of_sbo_all_occur(split: Split) -> None:
    feed = text.make_feed(split)
    batch, plain = all_rows(feed), plain_rows(feed)["token_ids"]
    due = batch["target_weights"] > 0
    assert batch["span_offsets"].max() > 4
    assert (at(plain, batch["left_positions"]) == text.SPECIAL.cls)[due].any()
    assert (at(plain, batch["right_positions"]) == text.SPECIAL.sep)[due].any()


@each_form
def test_empty_slots_hold_zero(split: Split, form: dict[str, bool]) -> None:
    feed = text.make_feed(split, **form)
    batch = all_rows(feed)
    kinds = {"target_weights": SLOTS}
    if form == PAIRS:
        kinds["nsp_weights"] = 4
    for weights, slots in kinds.items():
        empty = batch[weights] == 0
        assert empty.any()
        assert not empty.all()
        mine = [key for key in batch if batch[key].shape[1] == slots]
        assert len(mine) == (7 if weights == "target_weights" else 3)
        for key in mine:
            assert not batch[key][empty].any(), key


# Pairs.


@pytest.mark.parametrize("form", [PAIRS, PADDED_PAIRS], ids=["packed", "padded"])
@pytest.mark.parametrize("length", [7, 16, 64, 100])
def test_each_pair_of_a_row_has_a_slot_with_its_cls_and_its_label(
    split: Split, form: dict[str, bool], length: int
) -> None:
    feed = text.make_feed(split, block_length=length, **form)
    batch = all_rows(feed)
    segments, seen = feed.plan.segments, [0, 0]
    for row in range(feed.plan.num_rows):
        blocks = blocks_of_row(feed, row).tolist()
        expected = {key: [] for key in ("positions", "labels", "weights")}
        begin = 0
        for block in blocks:
            first, second = feed.plan.segments_of(np.array([block]))
            assert batch["token_ids"][row, begin] == text.SPECIAL.cls
            # The text goes on in the same shard: the second follows the first.
            stop = segments.start[first] + segments.length[first]
            follows = segments.shard[second] == segments.shard[first]
            follows &= segments.start[second] == stop
            expected["positions"].append(begin)
            expected["labels"].append(0 if follows else 1)
            expected["weights"].append(1)
            seen[expected["labels"][-1]] += 1
            begin += segments.length[first] + segments.length[second] + 3
        slots = max(1, length // 16) if form["packing"] else 1
        assert len(blocks) <= slots
        for key, held in expected.items():
            padding = [0] * (slots - len(held))
            assert batch[f"nsp_{key}"][row].tolist() == held + padding
    assert abs(seen[0] - seen[1]) <= 1
    assert sum(seen) == feed.plan.num_blocks


def test_single_runs_have_no_pair_keys(split: Split) -> None:
    for form in (PACKED, PADDED):
        batch = all_rows(text.make_feed(split, **form))
        assert not any(key.startswith("nsp") for key in batch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", [PAIRS, PADDED_PAIRS], ids=["packed", "padded"])
def test_pairs_of_any_word_edges_restore_the_text(
    split: Split, form: dict[str, bool], seed: int
) -> None:
    # As SentencePiece has them: a token may also say that the next begins a word.
    kinds = np.random.default_rng(seed).choice(
        4, text.VOCAB_SIZE, p=[0.6, 0.2, 0.1, 0.1]
    )
    edges = kinds.astype(np.uint8)
    feed = text.make_feed(split, **form, word_edges=edges)
    batch, plain = all_rows(feed), plain_rows(feed)
    row, slot = np.nonzero(batch["target_weights"])
    restored = batch["token_ids"].copy()
    restored[row, batch["target_positions"][row, slot]] = batch["target_ids"][row, slot]
    for key, array in (plain | {"token_ids": restored}).items():
        np.testing.assert_array_equal(array, plain[key])
    # No target is lost: the masks of all blocks are in the rows.
    everything = np.arange(feed.plan.num_blocks)
    masked = masked_blocks(feed, everything, np.zeros_like(everything))
    assert len(masked.masks.target) == batch["target_weights"].sum()
    assert (np.diff(masked.words.segments) > 0).all()
    budget = np.ceil(feed.plan.lengths * 0.15 - 1e-9)
    used = np.diff(np.searchsorted(masked.masks.target, masked.offsets))
    most = feed.plan.most_targets(text.RATIO)
    assert (used <= most).all()
    assert ((used > 0) == (most > 0)).all()
    assert used.sum() / budget.sum() == pytest.approx(1, abs=0.1)


def test_padding_has_the_pad_id_and_no_segment(split: Split) -> None:
    special = dataclasses.replace(text.SPECIAL, pad=5)
    feed = dataclasses.replace(text.make_feed(split, packing=False), special=special)
    batch = all_rows(feed)
    padding = batch["segment_ids"] == 0
    assert padding.any()
    assert (batch["token_ids"][padding] == 5).all()
    assert (batch["token_ids"][~padding] != 5).all()
    assert not batch["position_ids"][padding].any()


@each_form
@pytest.mark.parametrize("rows", [[-1, -1], [-1, 2, -1, 5, -1]])
def test_an_empty_row_is_padding_of_weight_zero(
    split: Split, form: dict[str, bool], rows: list[int]
) -> None:
    feed = text.make_feed(split, **form)
    batch = make_batch(feed, np.array(rows), np.zeros(len(rows), np.int64))
    blank = empty_batch(feed.shape(1))
    for number, row in enumerate(rows):
        one = make_batch(feed, np.array([row]), np.zeros(1, np.int64))
        for key in blank:
            np.testing.assert_array_equal(batch[key][number], one[key][0])
            if row < 0:
                np.testing.assert_array_equal(batch[key][number], blank[key][0])


def targets(feed: Feed) -> set[tuple[int, ...]]:
    """(block, place, true id, replacement, left, right, offset) of all targets."""
    batch = all_rows(feed, epoch=2)
    found = set()
    for row, slot in np.argwhere(batch["target_weights"] > 0):
        place = batch["target_positions"][row, slot]
        begin = place - batch["position_ids"][row, place]
        block = blocks_of_row(feed, row)[batch["segment_ids"][row, place] - 1]
        found.add(
            (
                int(block),
                int(place - begin),
                int(batch["target_ids"][row, slot]),
                int(batch["token_ids"][row, place]),
                int(batch["left_positions"][row, slot] - begin),
                int(batch["right_positions"][row, slot] - begin),
                int(batch["span_offsets"][row, slot]),
                int(batch["sbo_weights"][row, slot]),
            )
        )
    assert len(found) == batch["target_weights"].sum()
    return found


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_and_padded_rows_have_the_same_targets(
    split: Split, scheme: str, pairs: bool
) -> None:
    masking = dataclasses.replace(text.PAPER, scheme=scheme)
    packed, padded = (
        text.make_feed(
            split,
            packing=packing,
            pairs=pairs,
            masking=masking,
            sbo_positions=4,
            sbo_edges=False,
        )
        for packing in (True, False)
    )
    assert targets(packed) == targets(padded)


@each_form
def test_a_row_does_not_depend_on_its_company(
    split: Split, form: dict[str, bool]
) -> None:
    feed = text.make_feed(split, **form)
    whole = all_rows(feed)
    rows = np.array([9, 0, 4])
    part = make_batch(feed, rows, np.zeros(3, np.int64))
    for key in whole:
        np.testing.assert_array_equal(part[key], whole[key][rows])


@pytest.mark.parametrize("form", [PACKED, PAIRS], ids=["single", "pairs"])
def test_each_row_has_the_masks_of_its_own_epoch(
    split: Split, form: dict[str, bool]
) -> None:
    feed = text.make_feed(split, **form)
    rows = np.array([5, 5, 6, 6])
    mixed = make_batch(feed, rows, np.array([0, 1, 1, 0]))
    for epoch, chosen in ((0, [0, 3]), (1, [1, 2])):
        alone = make_batch(feed, rows[chosen], np.full(2, epoch))
        for key in mixed:
            np.testing.assert_array_equal(mixed[key][chosen], alone[key])
    assert not np.array_equal(
        mixed["target_positions"][0], mixed["target_positions"][1]
    )


def test_no_two_blocks_and_epochs_share_a_mask() -> None:
    # Equal documents, so that equal keys would show as equal rows.
    same = text.make_shard([text.words_of([1] * 254)] * 10)
    feed = text.make_feed(Split("train", (same,)), block_length=256, packing=False)
    parts = [all_rows(feed, epoch)["target_positions"] for epoch in range(10)]
    assert len(np.unique(np.concatenate(parts), axis=0)) == 100


def test_seeds_mask_differently(split: Split) -> None:
    feed = text.make_feed(split)
    other = dataclasses.replace(feed, seed=feed.seed + 1)
    one, two = all_rows(feed), all_rows(other)
    assert not np.array_equal(one["target_positions"], two["target_positions"])


def test_words_beyond_the_slots_and_beyond_a_block_make_a_batch() -> None:
    rng = np.random.default_rng(3)
    documents = [text.words_of([int(size), 2]) for size in rng.integers(1, 200, 60)] + [
        text.words_of([int(size)]) for size in range(1, 70)
    ]
    feed = text.make_feed(Split("train", (text.make_shard(documents),)))
    batch = all_rows(feed)
    restored = batch["token_ids"].copy()
    row, slot = np.nonzero(batch["target_weights"])
    restored[row, batch["target_positions"][row, slot]] = batch["target_ids"][row, slot]
    np.testing.assert_array_equal(restored, plain_rows(feed)["token_ids"])


# Tags.


@pytest.mark.parametrize(
    ("scheme", "name"), [("entity", "entities"), ("noun_phrase", "noun_phrases")]
)
@pytest.mark.parametrize("pairs", [False, True])
def test_segments_have_the_tags_that_lie_wholly_inside(
    split: Split, scheme: str, name: str, pairs: bool
) -> None:
    masking = dataclasses.replace(text.PAPER, scheme=scheme)
    # Segments of up to 14 tokens either way.
    length = 31 if pairs else 16
    feed = text.make_feed(split, block_length=length, pairs=pairs, masking=masking)
    total, segments = feed.plan.num_blocks, feed.plan.segments
    chosen = np.random.default_rng(2).permutation(total)[: total // 2]
    masked = masked_blocks(feed, chosen, np.zeros_like(chosen))
    words = masked.words
    expected, without = [], 0
    for place, piece in enumerate(feed.plan.segments_of(chosen)):
        start = int(segments.start[piece])
        stop = start + int(segments.length[piece])
        begin, before = int(masked.segments[place]), len(expected)
        for first, last in split.shards[segments.shard[piece]].tags[name].tolist():
            if start <= first and last <= stop:
                low, high = first - start + begin, last - start + begin
                # Outward, to the words' borders.
                while low not in words.offsets:
                    low -= 1
                while high not in words.offsets:
                    high += 1
                if [low, high] not in expected:
                    expected.append([low, high])
        without += len(expected) == before
    assert words.offsets[words.tags].tolist() == expected
    assert 0 < without < len(masked.segments) - 1
    # Of 14 tokens or fewer; tags are as long as 20.
    longest = max(int(np.diff(shard.tags[name]).max()) for shard in split.shards)
    assert longest > 14


def test_the_span_scheme_reads_no_tags(split: Split) -> None:
    bare = [dataclasses.replace(shard, tags={}) for shard in split.shards]
    one = all_rows(text.make_feed(split))
    other = all_rows(text.make_feed(Split("train", tuple(bare))))
    for key in one:
        np.testing.assert_array_equal(one[key], other[key])


def test_tags_of_some_shards_only_may_be_none(split: Split) -> None:
    first = dataclasses.replace(
        split.shards[0], tags={"entities": np.zeros((0, 2), np.int64)}
    )
    masking = dataclasses.replace(text.PAPER, scheme="entity")
    mixed = Split("train", (first, *split.shards[1:]))
    feed = text.make_feed(mixed, masking=masking)
    everything = np.arange(feed.plan.num_blocks)
    masked = masked_blocks(feed, everything, np.zeros_like(everything))
    tagged = np.searchsorted(masked.words.first, masked.words.tags[:, 0], "right") - 1
    assert set(feed.plan.segments.shard[tagged].tolist()) == {1, 2}


# 4294967295 is what a negative id becomes in an array of unsigned integers.
@pytest.mark.parametrize("wrong", [text.VOCAB_SIZE, 70_000, 2**31, 2**32 - 1])
def test_an_id_outside_the_vocabulary_names_shard_and_document(wrong: int) -> None:
    documents = [text.words_of([1, 2, 3], np.uint32) for _ in range(6)]
    shards = tuple(
        text.make_shard(documents[begin : begin + 3], f"train-{begin:05d}")
        for begin in (0, 3)
    )
    feed = text.make_feed(Split("train", shards), packing=False)
    shards[1].tokens[8] = wrong
    message = f"id {wrong} in document 1 of shard train-00003"
    with pytest.raises(InputError, match=message):
        all_rows(feed)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([1] * 20, "boolean array indexing assignment"), ([40, 40], "negative")],
    ids=["targets", "places"],
)
def test_a_row_with_more_than_fits_is_an_error(sizes: list[int], message: str) -> None:
    documents = [text.words_of([1] * size) for size in sizes]
    split = Split("train", (text.make_shard(documents),))
    feed = text.make_feed(split, packing=False)
    everything = np.array([0, len(sizes)])
    plan = dataclasses.replace(feed.plan, row_offsets=everything)
    with pytest.raises(ValueError, match=message):
        all_rows(dataclasses.replace(feed, plan=plan))
