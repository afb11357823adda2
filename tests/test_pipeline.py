"""The pipeline: the batches of `make_batch`, in order, whoever makes them."""

import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import text
from spanbert_jax.corpus.store import Split
from spanbert_jax.data.batch import Batch, Feed, make_batch
from spanbert_jax.data.mixing import Mix, Rows
from spanbert_jax.data.pipeline import RowOrder, batches
from spanbert_jax.errors import InputError

BATCH = 8


def mix_of(feed: Feed) -> Mix:
    return Mix((feed,), np.ones(1, np.int64), seed=11)


def order_of(feed: Feed) -> RowOrder:
    return functools.partial(mix_of(feed).training_rows, batch_size=BATCH)


def made_by(feed: Feed, rows: range, steps: range, workers: int) -> Iterator[Batch]:
    return batches(mix_of(feed), order_of(feed), rows, steps, workers)


def direct(feed: Feed, step: int) -> Batch:
    _, rows, epochs = order_of(feed)(step)
    return make_batch(feed, rows, epochs)


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert array.dtype == other[key].dtype
        np.testing.assert_array_equal(array, other[key], err_msg=key)


@pytest.fixture(scope="module")
def feed() -> Feed:
    return text.make_feed(text.random_split(12, [90] * 40, shards=2))


@pytest.fixture(scope="module")
def paired() -> Feed:
    split = text.random_split(17, [90, 1, 7] * 20, shards=2)
    return text.make_feed(split, pairs=True)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("name", ["feed", "paired"])
def test_batches_are_those_of_make_batch_in_order(
    request: pytest.FixtureRequest, name: str, workers: int
) -> None:
    feed = request.getfixturevalue(name)
    steps = range(3, 23)
    # So that an epoch ends in mid-batch within these steps.
    assert steps.stop * BATCH > feed.plan.num_rows % BATCH > 0
    made = list(made_by(feed, np.arange(BATCH), steps, workers))
    assert len(made) == len(steps)
    for step, batch in zip(steps, made, strict=True):
        assert_equal(batch, direct(feed, step))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_parts_of_all_processes_are_the_global_batch(
    feed: Feed, processes: int
) -> None:
    size = BATCH // processes
    parts = [
        list(made_by(feed, range(begin, begin + size), range(5, 8), workers=2))
        for begin in range(0, BATCH, size)
    ]
    for number, step in enumerate(range(5, 8)):
        mine = [part[number] for part in parts]
        joined = {key: np.concatenate([one[key] for one in mine]) for key in mine[0]}
        assert_equal(joined, direct(feed, step))


def test_a_start_far_on_takes_no_replay(feed: Feed) -> None:
    begin = time.monotonic()
    steps = range(100_000, 2_400_000)
    first = next(made_by(feed, np.arange(BATCH), steps, workers=4))
    assert time.monotonic() - begin < 10
    assert_equal(first, direct(feed, 100_000))


def test_two_epochs_hold_the_same_text_under_other_masks() -> None:
    # Long blocks: two masks of a short one are the same now and then.
    split = text.random_split(13, [250] * 16, most_pieces=2)
    feed = text.make_feed(split, block_length=256, packing=False)
    made = list(made_by(feed, np.arange(BATCH), range(4), workers=1))
    epochs = [
        {key: np.concatenate([made[i][key], made[i + 1][key]]) for key in made[i]}
        for i in (0, 2)
    ]

    def restored(batch: Batch) -> list[bytes]:
        ids = batch["token_ids"].copy()
        row, slot = np.nonzero(batch["target_weights"])
        ids[row, batch["target_positions"][row, slot]] = batch["target_ids"][row, slot]
        return [one.tobytes() for one in ids]

    one, other = map(restored, epochs)
    assert sorted(one) == sorted(other)
    again = [other.index(row) for row in one]
    positions = [epoch["target_positions"] for epoch in epochs]
    assert (positions[0] != positions[1][again]).any(axis=1).all()


def test_evaluation_ends_with_empty_rows(feed: Feed) -> None:
    rows = feed.plan.num_rows
    order = functools.partial(mix_of(feed).evaluation_rows, batch_size=BATCH)
    steps = range(-(-rows // BATCH))
    made = list(batches(mix_of(feed), order, np.arange(BATCH), steps, workers=2))
    weights = np.concatenate([batch["target_weights"] for batch in made])
    assert (weights[:rows].sum(axis=1) > 0).all()
    assert not weights[rows:].any()
    assert len(weights) > rows


def test_a_corpus_smaller_than_a_batch_goes_on_for_ever() -> None:
    feed = text.make_feed(text.random_split(14, [60] * 5), packing=False)
    made = list(made_by(feed, np.arange(BATCH), range(20), workers=2))
    assert len(made) == 20
    for batch in made:
        assert ((batch["target_weights"].sum(axis=1) > 0).sum()) == 5


def test_memory_maps_feed_as_arrays_do(tmp_path: Path) -> None:
    split = text.random_split(15, [90] * 10, shards=2)
    mapped = [text.save_shard(shard, tmp_path) for shard in split.shards]
    made = [
        next(made_by(feed, np.arange(BATCH), range(1), workers=1))
        for feed in map(text.make_feed, (split, Split("train", tuple(mapped))))
    ]
    assert_equal(*made)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_wrong_id_in_a_later_batch_names_shard_and_document(workers: int) -> None:
    split = text.random_split(16, [60] * 40, shards=2)
    feed = text.make_feed(split, packing=False)
    _, rows, _ = order_of(feed)(3)
    block = feed.plan.row_blocks[rows[2]]
    shard = split.shards[feed.plan.segments.shard[block]]
    place = feed.plan.segments.start[block]
    document = np.searchsorted(shard.documents, place, side="right") - 1
    # As if the file had been damaged after its plan was made.
    shard.tokens[place] = text.VOCAB_SIZE
    made = made_by(feed, np.arange(BATCH), range(5), workers)
    for step in range(3):
        assert_equal(next(made), direct(feed, step))
    with pytest.raises(InputError, match=f"document {document} of shard {shard.name} "):
        next(made)


def test_a_fault_of_ours_is_not_taken_for_a_wrong_datum(feed: Feed) -> None:
    def order(step: int) -> Rows:
        raise ZeroDivisionError(step)

    with pytest.raises(Exception, match="ZeroDivisionError") as caught:
        next(batches(mix_of(feed), order, np.arange(BATCH), range(1), workers=1))
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    "module",
    ["counter", "blocks", "masking", "plan", "batch", "pairs", "mixing", "pipeline"],
)
def test_importing_the_data_room_loads_no_framework(module: str) -> None:
    code = (
        f"import sys, spanbert_jax.data.{module}\n"
        "print({'jax', 'flax', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
