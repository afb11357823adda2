"""The saved: the model of a run as one of its checkpoints has it, for reading only."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.corpus import origin
from spanbert_jax.corpus.origin import Origin
from spanbert_jax.errors import InputError, StorageError
from spanbert_jax.training.checkpoint import (
    DIRECTORY,
    Record,
    UnreadableError,
    check_sums,
    first_line,
    read_record,
)


class Saved(NamedTuple):
    """A model of a run.

    Attributes:
        workdir: of the run.
        step: that it was saved at.
        config: all settings of the run, as they were then.
        params: float32 NumPy arrays.
        record: what stands beside the state, see `checkpoint.make_record`.
        origin: the tokenizer and the text.
        broken: newer steps that could not be read, with the reason.
    """

    workdir: Path
    step: int
    config: ConfigDict
    params: dict[str, Any]
    record: Record
    origin: Origin
    broken: dict[int, str]


def is_run(directory: Path) -> bool:
    """Whether a directory looks like the work directory of a run."""
    return (directory / DIRECTORY).is_dir()


def read_saved(workdir: Path, setting: str, step: int | None = None) -> Saved:
    """Reads a model; touches nothing, so that the run may be going on.

    Args:
        workdir: of the run.
        setting: the flag or config key that named it, for error messages.
        step: which one; None means the newest that can be read.

    Returns:
        The model.

    Raises:
        InputError: there is no run, no finished step, or not this one.
        StorageError: there are finished steps, but none, or not this one, can be read.
    """
    where = f"{setting}={workdir}"
    if not is_run(workdir):
        raise InputError(f"{where} is no run: there is no {DIRECTORY}/ in it")
    found = _steps(workdir)
    if not found:
        raise InputError(f"{where} has no finished step yet")
    if step is not None and step not in found:
        known = ", ".join(map(str, found))
        raise InputError(f"{where} has no step {step}; it has {known}")
    broken: dict[int, str] = {}
    for number in reversed(found) if step is None else [step]:
        try:
            record, params = _read_step(workdir / DIRECTORY / str(number))
        except UnreadableError as error:
            broken[number] = str(error)
            continue
        known = origin.read(workdir, setting)
        if known.tokenizer.sha256 != record["tokenizer"]:
            raise InputError(f"{where}: its tokenizer is not the one of step {number}")
        config = settings.restored(record["settings"])
        return Saved(workdir, number, config, params, record, known, broken)
    reasons = "; ".join(f"step {number}: {why}" for number, why in broken.items())
    raise StorageError(f"{where} has no valid step: {reasons}")


def _steps(workdir: Path) -> list[int]:
    """The finished steps, rising: what is unfinished has a longer name."""
    names = (path.name for path in (workdir / DIRECTORY).iterdir())
    return sorted(int(name) for name in names if name.isdecimal())


def _read_step(directory: Path) -> tuple[Record, dict[str, Any]]:
    # A damaged step fails in as many ways as it has files; each is told to the user.
    try:
        record, checksums = read_record(directory)
        flat = _read_params(directory, record)
        check_sums({f"params/{name}": leaf for name, leaf in flat.items()}, checksums)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(first_line(error)) from error
    return record, unflatten_dict(flat, sep="/")


def _read_params(directory: Path, record: Record) -> dict[str, np.ndarray]:
    """The parameters alone, without the optimiser's state, on the host."""
    # The values are of no use: all comes from the file.
    leaves = dict.fromkeys(record["parameters"], np.zeros((), np.float32))
    like = {"params": unflatten_dict(leaves, sep="/")}
    how = ocp.RestoreArgs(restore_type=np.ndarray)
    restored = ocp.PyTreeCheckpointHandler().restore(
        directory / "state",
        args=ocp.args.PyTreeRestore(
            item=like,
            restore_args=jax.tree.map(lambda _: how, like),
            partial_restore=True,
        ),
    )
    return flatten_dict(restored["params"], sep="/")
