"""Checkpoints: the state of a run, with a record of what the run is."""

import json
import os
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from spanbert_jax.corpus.mixture import Mixture
from spanbert_jax.errors import InputError, NonFiniteError, StorageError
from spanbert_jax.settings import flatten, identity
from spanbert_jax.training import hosts
from spanbert_jax.training.checksums import sum_bits
from spanbert_jax.training.step import TrainState

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# Where a machine has the text, and how it reads it: its own affair.
_OF_A_PROCESS = ("data.corpus", "data.cache", "data.workers")
# Below the work directory.
DIRECTORY = "checkpoints"
# Beyond all that an int32 can count.
_MOST_STEPS = 2**31 - 1

T = TypeVar("T")
Record = dict[str, Any]


class Restored(NamedTuple):
    """A checkpoint that was read back.

    Attributes:
        state: of the run.
        record: what was saved beside it, see `make_record`.
        broken: newer steps that could not be read, with the reason.
    """

    state: TrainState
    record: Record
    broken: dict[int, str]


def make_record(
    config: ConfigDict, corpora: Mixture, state: TrainState, mesh: Mesh
) -> Record:
    """What stands beside a state: all that decides whether it may be resumed.

    Args:
        config: all settings.
        corpora: the text.
        state: the state, or its shapes.
        mesh: of the devices.

    Returns:
        A JSON value. "changes" is what changed when the run was resumed, see
        `changed_settings`; none so far.
    """
    shapes = {name: list(leaf.shape) for name, leaf in _named(state.params).items()}
    return {
        "settings": flatten(config),
        "corpus": corpora.fingerprint,
        "tokenizer": corpora.tokenizer.sha256,
        "parameters": shapes,
        "changes": [],
        "devices": {
            "devices": mesh.size,
            "kind of device": mesh.devices.flat[0].device_kind,
        },
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
    }


def check_identity(old: Record, new: Record) -> None:
    """Refuses to resume a run as another one.

    Raises:
        InputError: names what differs, with the old and the new value.
    """
    for kind in ("corpus", "tokenizer"):
        _same(f"the {kind} (its fingerprint)", old[kind], new[kind])
    old_identity, new_identity = identity(old["settings"]), identity(new["settings"])
    for name in sorted(old_identity | new_identity):
        _same(name, old_identity.get(name), new_identity.get(name))
    for name in sorted(old["parameters"] | new["parameters"]):
        _same(
            f"the shape of the parameter {name}",
            old["parameters"].get(name),
            new["parameters"].get(name),
        )


def _same(what: str, old: Any, new: Any) -> None:
    if old != new:
        raise InputError(
            f"the run in --workdir cannot go on: {what} was {old!r} and is now {new!r};"
            " restore the old value or choose another --workdir"
        )


def changed_settings(old: Record, new: Record, step: int) -> list[dict[str, Any]]:
    """What differs and may: settings, devices, libraries; for a record's "changes"."""
    changes = []
    for kind in ("settings", "devices", "libraries"):
        for name in sorted(old[kind] | new[kind]):
            before, after = old[kind].get(name), new[kind].get(name)
            if before != after:
                changes.append(
                    {"step": step, "name": name, "old": before, "new": after}
                )
    return changes


def check_alike(record: Record, flags: dict[str, str]) -> None:
    """Refuses processes that were not started as the same run.

    Args:
        record: of this process.
        flags: what else it was told, by name.

    Raises:
        InputError: names a setting, a flag, the text or a library, and both values.
    """
    record = record | {"settings": record["settings"] | flags}
    first = json.loads(hosts.first_says(json.dumps(record)))
    changes = changed_settings(first, json.loads(json.dumps(record)), 0)
    changes += [
        {"name": f"the {kind}", "old": first[kind], "new": record[kind]}
        for kind in ("corpus", "tokenizer")
        if first[kind] != record[kind]
    ]
    faults = [
        f"{change['name']} is {change['old']!r} in process 0 and {change['new']!r} in"
        f" process {jax.process_index()}: start all processes of a run alike"
        for change in changes
        if change["name"] not in _OF_A_PROCESS
    ]
    if fault := hosts.first_fault(faults[0] if faults else ""):
        raise InputError(fault)


class UnreadableError(Exception):
    """A step that cannot be read back."""


def first_line(error: Exception) -> str:
    """What an error of reading says; libraries add pages to it."""
    if isinstance(error, UnreadableError):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _crc32(record: Any) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names on the way to them."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@jax.jit
def _are_finite(state: TrainState) -> jax.Array:
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(state)]).all()


def _checksums(tree: Any) -> dict[str, int]:
    sums = _named(jax.device_get(jax.jit(sum_bits)(tree)))
    return {name: int(total) for name, total in sums.items()}


def check_sums(tree: Any, saved: dict[str, int]) -> None:
    """Notices bytes that changed on disk: the storage reads them without complaint.

    Args:
        tree: a state, or a part of one by the names that its arrays have there.
        saved: the checksums that stand in the checkpoint.

    Raises:
        UnreadableError: one differs.
    """
    for name, total in _checksums(tree).items():
        if saved.get(name) != total:
            raise UnreadableError(f"{name} has another checksum than when it was saved")


def read_record(directory: Path) -> tuple[Record, dict[str, int]]:
    """The record of a step's directory as it was saved, and the arrays' checksums.

    Raises:
        UnreadableError: it was changed; the storage library raises what it likes.
    """
    saved = ocp.JsonCheckpointHandler().restore(
        directory / "record", args=ocp.args.JsonRestore()
    )
    if saved.get("crc32") != _crc32(saved.get("run")):
        raise UnreadableError("the record has another checksum than when saved")
    return saved["run"], saved["arrays"]


def _together(read: Callable[[], T]) -> T:
    """Reads in all processes, none of which waits for another meanwhile.

    Orbax's own restore does wait: a process that failed would leave the others hanging.

    Raises:
        UnreadableError: one of them failed; in all.
    """
    found, fault = None, ""
    try:
        found = read()
    # A damaged step fails in as many ways as it has files. The caller names each to the
    # user, and goes on or gives up: nothing is hidden.
    except Exception as error:
        fault = first_line(error)
    if fault := hosts.first_fault(fault):
        raise UnreadableError(fault)
    return found


class Checkpoints:
    """The checkpoints of a work directory, of all processes of a run.

    Saving is asynchronous: a failed write is raised by the next call. A step counts as
    finished once its directory has its final name, which orbax gives it last.
    """

    def __init__(self, workdir: Path, keep: int) -> None:
        """Opens `workdir`/checkpoints, and makes it if it is not there.

        Args:
            workdir: the run's directory.
            keep: how many of the newest steps to keep.

        Raises:
            StorageError: the directory cannot be made.
        """
        self.directory = workdir.absolute() / DIRECTORY
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        fault = ""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fault = f"--workdir: {error}"
        # Before the manager, in which processes wait for each other.
        if fault := hosts.first_fault(fault):
            raise StorageError(fault)
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise StorageError(f"--workdir: {error}") from error

    def restore(
        self, like: TrainState, check: Callable[[Record], None]
    ) -> Restored | None:
        """Reads the newest step that can be read.

        Broken newer steps are moved to `workdir`/broken.

        Args:
            like: shapes, dtypes and shardings of the state.
            check: raises if a record is that of another run.

        Returns:
            The state; None if there is no finished step.

        Raises:
            StorageError: there are finished steps, but none can be read.
        """
        broken: dict[int, str] = {}
        while (step := self._newest(before=min(broken, default=_MOST_STEPS))) >= 0:
            try:
                record, checksums = _together(
                    lambda: read_record(self.directory / str(step))
                )
                check(record)
                state = _together(lambda: self._read_state(step, like))
                check_sums(state, checksums)
            except UnreadableError as error:
                broken[step] = str(error)
                continue
            self._set_aside(list(broken))
            return Restored(state, record, broken)
        if broken:
            reasons = "; ".join(f"step {step}: {why}" for step, why in broken.items())
            raise StorageError(f"no checkpoint in {self.directory} is valid: {reasons}")
        return None

    def _newest(self, before: int) -> int:
        """The newest finished step before another, as the first process sees it; -1."""
        steps = [step for step in self._manager.all_steps() if step < before]
        return hosts.first_decides(max(steps, default=-1))

    def _read_state(self, step: int, like: TrainState) -> TrainState:
        return ocp.StandardCheckpointHandler().restore(
            self.directory / str(step) / "state", args=ocp.args.StandardRestore(like)
        )

    def _set_aside(self, steps: list[int]) -> None:
        """Moves broken steps away: orbax counts them and would not save them again."""
        fault = ""
        try:
            for step in steps if hosts.is_first() else []:
                target = self.directory.parent / "broken" / str(step)
                target.parent.mkdir(exist_ok=True)
                while target.exists():
                    target = target.with_name(target.name + "_")
                os.rename(self.directory / str(step), target)
        except OSError as error:
            fault = f"a broken checkpoint cannot be moved away: {error}"
        if fault := hosts.first_fault(fault):
            raise StorageError(fault)
        if steps:
            self._manager.reload()

    def save(self, state: TrainState, record: Record) -> None:
        """Starts to save a state under its step.

        Raises:
            NonFiniteError: an array of the state is not finite.
            StorageError: this save cannot start, or the one before it failed.
        """
        step = int(state.step)
        if not _are_finite(state):
            raise NonFiniteError(
                f"an array of the state is not finite after step {step}, which was not"
                f" saved; the checkpoints of earlier steps are in {self.directory}"
            )
        saved = {"run": record, "crc32": _crc32(record), "arrays": _checksums(state)}
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            record=ocp.args.JsonSave(saved),
        )
        try:
            started = self._manager.save(step, args=arguments)
        except (OSError, ValueError, RuntimeError) as error:
            raise hosts.peer_error(error) or self._failure(error) from error
        if not started:
            raise StorageError(f"{self.directory}: orbax refused to save step {step}")

    def wait(self) -> None:
        """Waits for the last save to finish.

        Raises:
            StorageError: it failed.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise hosts.peer_error(error) or self._failure(error) from error

    def close(self) -> None:
        """Waits for the last save and ends the manager's threads.

        Raises:
            StorageError: that save failed.
        """
        self.wait()
        self._manager.close()

    def _failure(self, error: Exception) -> StorageError:
        return StorageError(
            f"a checkpoint could not be written to {self.directory}"
            f" ({first_line(error)}); the ones before it are intact"
        )
