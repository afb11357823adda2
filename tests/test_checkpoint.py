"""Checkpoints: what is saved comes back, and what is broken is not taken for it."""

import copy
import gc
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ml_collections import ConfigDict

import runs
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.errors import InputError, NonFiniteError, StorageError
from spanbert_jax.training import hosts
from spanbert_jax.training.checkpoint import (
    Checkpoints,
    Record,
    Restored,
    changed_settings,
    check_identity,
    make_record,
)
from spanbert_jax.training.sharding import abstract, replicated
from spanbert_jax.training.step import TrainState

# Orbax leaves unfinished reads behind when one of many fails.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def config(toy_cache: Path, toy_corpus: Corpus) -> ConfigDict:
    return runs.make_config(toy_cache, toy_corpus)


@pytest.fixture
def record(config: ConfigDict, toy_corpus: Corpus) -> Record:
    mesh = make_mesh(1)
    return make_record(config, toy_corpus, make_state(0), mesh)


def make_state(step: int, rows: int = 64) -> TrainState:
    """A small state whose numbers tell its step."""
    generator = np.random.default_rng(step)
    params = {
        "dense": {
            "kernel": generator.normal(size=(rows, 8)).astype(np.float32),
            "bias": generator.normal(size=(8,)).astype(np.float32),
        }
    }
    moments = jax.tree.map(lambda x: x * x, params)
    state = TrainState(jnp.int32(step), params, (moments, jnp.int32(step)))
    return jax.tree.map(jnp.asarray, state)


def make_mesh(devices: int) -> Mesh:
    shape, names = (devices,), ("data",)
    return jax.make_mesh(shape, names, devices=jax.devices()[:devices])


def make_like(devices: int) -> TrainState:
    """What `restore` is to bring back, whole on each device."""
    shapes = jax.eval_shape(lambda: make_state(0))
    whole = replicated(make_mesh(devices))
    return abstract(shapes, jax.tree.map(lambda _: whole, shapes))


def save(workdir: Path, steps: range, keep: int = 10) -> None:
    checkpoints = Checkpoints(workdir, keep)
    for step in steps:
        checkpoints.save(make_state(step), {"step": step})
    checkpoints.close()


def restore(
    workdir: Path, check: Callable[[Record], None] = lambda _: None
) -> Restored | None:
    checkpoints = Checkpoints(workdir, keep=10)
    like = make_like(1)
    try:
        return checkpoints.restore(like, check)
    finally:
        checkpoints.close()


def assert_is_state(state: TrainState, step: int) -> None:
    expected = make_state(step)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for mine, true in zip(
        jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    ):
        assert mine.dtype == true.dtype
        assert np.asarray(mine).tobytes() == np.asarray(true).tobytes()


def test_a_state_and_its_record_come_back_bit_by_bit(tmp_path: Path) -> None:
    save(tmp_path, range(3, 5))
    restored = restore(tmp_path)
    assert_is_state(restored.state, 4)
    assert restored.record == {"step": 4}
    assert restored.broken == {}


def test_no_finished_step_is_no_state(tmp_path: Path) -> None:
    assert restore(tmp_path) is None
    # What a kill in mid-save leaves.
    leftover = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp"
    (leftover / "state").mkdir(parents=True)
    assert restore(tmp_path) is None


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    save(tmp_path, range(1, 6), keep=2)
    assert runs.steps_of(tmp_path) == [4, 5]
    save(tmp_path, range(6, 7), keep=3)
    assert runs.steps_of(tmp_path) == [4, 5, 6]


def test_a_state_goes_to_the_devices_that_are_there_now(tmp_path: Path) -> None:
    save(tmp_path, range(1, 2))
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = checkpoints.restore(make_like(8), lambda _: None).state
    checkpoints.close()
    assert_is_state(state, 1)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(state))


# ---- Broken steps


def _largest(step: Path) -> Path:
    files = [path for path in (step / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def _empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def _truncate_data(step: Path) -> None:
    path = _largest(step)
    os.truncate(path, path.stat().st_size // 2)


def _truncate_all(step: Path) -> None:
    for path in step.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def _remove_data(step: Path) -> None:
    _largest(step).unlink()


def _remove_state(step: Path) -> None:
    shutil.rmtree(step / "state")


def _remove_record(step: Path) -> None:
    shutil.rmtree(step / "record")


def _truncate_record(step: Path) -> None:
    path = step / "record" / "metadata"
    os.truncate(path, path.stat().st_size // 2)


def _change_record(step: Path) -> None:
    path = step / "record" / "metadata"
    content = json.loads(path.read_text())
    content["run"]["step"] = 17
    path.write_text(json.dumps(content))


def _empty_record(step: Path) -> None:
    (step / "record" / "metadata").write_text("{}")


BREAKS = [
    _empty,
    _truncate_data,
    _truncate_all,
    _remove_data,
    _remove_state,
    _remove_record,
    _truncate_record,
    _change_record,
    _empty_record,
]


@pytest.mark.parametrize("damage", BREAKS)
def test_a_broken_step_is_named_moved_away_and_saved_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, range(1, 4))
    damage(tmp_path / "checkpoints" / "3")
    restored = restore(tmp_path)
    assert_is_state(restored.state, 2)
    assert restored.record == {"step": 2}
    assert list(restored.broken) == [3]
    assert restored.broken[3]
    assert (tmp_path / "broken" / "3").is_dir()
    assert runs.steps_of(tmp_path) == [1, 2]
    save(tmp_path, range(3, 4))
    assert_is_state(restore(tmp_path).state, 3)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_not_taken_for_the_state(tmp_path: Path, seed: int) -> None:
    save(tmp_path, range(1, 3))
    path = _largest(tmp_path / "checkpoints" / "2")
    content = bytearray(path.read_bytes())
    content[np.random.default_rng(seed).integers(len(content))] ^= 1
    path.write_bytes(content)
    restored = restore(tmp_path)
    # A byte that no array uses does no harm.
    assert_is_state(restored.state, 1 if restored.broken else 2)


def test_a_step_that_breaks_twice_is_moved_away_twice(tmp_path: Path) -> None:
    save(tmp_path, range(1, 3))
    for _ in range(2):
        _remove_data(tmp_path / "checkpoints" / "2")
        assert list(restore(tmp_path).broken) == [2]
        save(tmp_path, range(2, 3))
    assert len(list((tmp_path / "broken").iterdir())) == 2
    assert_is_state(restore(tmp_path).state, 2)


def test_a_step_that_another_process_cannot_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, range(1, 4))
    # Of the directory, the record of step 3 and its state, of which another process
    # could read the first two; and of all that follows.
    told = itertools.chain(["", "", "OSError: stale"], itertools.repeat(""))
    monkeypatch.setattr(hosts, "first_fault", lambda fault: fault or next(told))
    restored = restore(tmp_path)
    assert restored.broken == {3: "OSError: stale"}
    assert_is_state(restored.state, 2)


def test_steps_that_are_all_broken_are_an_error_and_stay(tmp_path: Path) -> None:
    save(tmp_path, range(1, 4))
    _empty(tmp_path / "checkpoints" / "1")
    _truncate_data(tmp_path / "checkpoints" / "2")
    _remove_record(tmp_path / "checkpoints" / "3")
    before = runs.listing(tmp_path)
    with pytest.raises(StorageError, match=r"step 3: .*step 2: .*step 1: ") as caught:
        restore(tmp_path)
    assert "\n" not in str(caught.value)
    assert runs.listing(tmp_path) == before


def test_a_refused_record_leaves_all_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, range(1, 4))
    _remove_data(tmp_path / "checkpoints" / "3")
    before = runs.listing(tmp_path)

    def refuse(record: Record) -> None:
        raise InputError(f"not {record['step']}")

    with pytest.raises(InputError):
        restore(tmp_path, refuse)
    assert runs.listing(tmp_path) == before


# ---- Storage that fails


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_leaves_the_earlier_steps_intact(small_disk: Path) -> None:
    save(small_disk, range(1, 3))
    checkpoints = Checkpoints(small_disk, keep=10)
    # Random numbers do not compress.
    checkpoints.save(make_state(3, rows=100_000), {"step": 3})
    with pytest.raises(StorageError, match="could not be written") as caught:
        checkpoints.close()
    assert "\n" not in str(caught.value)
    assert str(small_disk) in str(caught.value)
    restored = restore(small_disk)
    assert_is_state(restored.state, 2)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    save(tmp_path, range(1, 2))
    checkpoints = Checkpoints(tmp_path, keep=10)
    state = make_state(2)
    state.params["dense"]["bias"] = state.params["dense"]["bias"].at[3].set(jnp.inf)
    with pytest.raises(NonFiniteError, match="after step 2"):
        checkpoints.save(state, {"step": 2})
    checkpoints.close()
    assert_is_state(restore(tmp_path).state, 1)


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("text")
    with pytest.raises(StorageError, match="checkpoints"):
        Checkpoints(tmp_path, keep=1)


# ---- Identity


def test_the_record_is_the_same_after_json(record: Record, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(make_state(1), record)
    checkpoints.close()
    assert restore(tmp_path).record == record
    assert record["settings"]["train.seed"] == 0
    assert record["parameters"] == {"dense/bias": [8], "dense/kernel": [64, 8]}
    assert {"jax", "flax", "optax", "orbax-checkpoint"} <= record["libraries"].keys()


def test_the_same_run_is_the_same(record: Record) -> None:
    check_identity(record, copy.deepcopy(record))
    assert changed_settings(record, copy.deepcopy(record), 1) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.seed", 5),
        ("train.batch_size", 24),
        ("data.block_length", 16),
        ("data.packing", False),
        ("data.masking", "word"),
        ("data.replacement", "token"),
        ("data.mask_ratio", 0.2),
        ("data.span_p", 0.3),
        ("data.max_span_words", 3),
        ("data.max_tries", 1),
        ("data.mask_share", 0.7),
        ("data.random_share", 0.2),
        ("data.eval_seed", 5),
    ],
)
def test_a_setting_that_decides_on_the_batches_is_identity(
    record: Record, name: str, value: object
) -> None:
    other = copy.deepcopy(record)
    other["settings"][name] = value
    with pytest.raises(InputError) as caught:
        check_identity(record, other)
    old = record["settings"][name]
    assert f"{name} was {old!r} and is now {value!r}" in str(caught.value)


@pytest.mark.parametrize("kind", ["corpus", "tokenizer"])
def test_another_text_or_tokenizer_is_another_run(record: Record, kind: str) -> None:
    with pytest.raises(InputError, match=rf"{kind}.*{record[kind]}.*now 'other'"):
        check_identity(record, record | {kind: "other"})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dense/kernel": [64, 9], "dense/bias": [8]}, r"kernel was \[64, 8\].*9\]"),
        ({"dense/kernel": [64, 8]}, r"bias was \[8\] and is now None"),
    ],
)
def test_other_shapes_are_another_run(
    record: Record, parameters: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_identity(record, record | {"parameters": parameters})


@pytest.mark.parametrize("name", ["data.workers", "data.corpus", "data.cache"])
def test_places_and_workers_are_changes_not_identity(record: Record, name: str) -> None:
    other = copy.deepcopy(record)
    other["settings"][name] = "other"
    check_identity(record, other)
    assert changed_settings(record, other, 7) == [
        {"step": 7, "name": name, "old": record["settings"][name], "new": "other"}
    ]


def test_another_library_version_is_a_change(record: Record) -> None:
    other = copy.deepcopy(record)
    other["libraries"]["jax"] = "0.0.1"
    check_identity(record, other)
    (change,) = changed_settings(record, other, 7)
    assert (change["name"], change["new"]) == ("jax", "0.0.1")
