"""The directory that a build works in: `<output>.partial` until it is finished.

It keeps each finished file through a kill, belongs to one build at a time, and gets the
output's name in one step.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spanbert_jax.corpus import store
from spanbert_jax.corpus.shards import REPORT_SUFFIX
from spanbert_jax.errors import InputError, StorageError

_STATE = "build.json"


def check_output(output: Path) -> None:
    """Refuses an output that could only be refused after hours of work.

    Raises:
        InputError: something else than a corpus is there.
        StorageError: nothing can be written there.
    """
    try:
        if (output / store.MANIFEST).exists():
            return
        others = output.exists() and not (output.is_dir() and _is_empty(output))
        parent = next(path for path in output.absolute().parents if path.exists())
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error}") from error
    if others:
        raise InputError(f"--output={output} exists and is not a corpus; nothing done")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise StorageError(f"cannot write {output}: {parent} takes no new files")


def recorded_identity(directory: Path) -> dict[str, Any] | None:
    """Returns the identity of the corpus in a directory, None if there is none."""
    return _recorded(directory / store.MANIFEST)


@contextlib.contextmanager
def lock(partial: Path, wait: bool) -> Iterator[None]:
    """Creates the directory and keeps other builds out of it; a kill ends that.

    Args:
        partial: the directory.
        wait: if another build holds it, wait for the end of that; else refuse.

    Raises:
        InputError: another build holds it.
    """
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever held it may have renamed it meanwhile; then this is another one.
            if _is_open_as(descriptor, partial):
                yield
                return
        except BlockingIOError as error:
            raise InputError(f"another process is building {partial}") from error
        finally:
            os.close(descriptor)


def begin(partial: Path, identity: dict[str, Any]) -> None:
    """Empties the directory unless it holds the beginnings of this very build.

    Args:
        partial: the directory, locked.
        identity: what makes two builds the same.

    Raises:
        InputError: what is in it is not a build's.
    """
    recorded = _recorded(partial / _STATE) or recorded_identity(partial)
    leftovers = [path for path in partial.iterdir() if path.suffix != ".tmp"]
    if recorded == identity:
        print(f"going on with {partial}", flush=True)
        return
    if leftovers and recorded is None:
        raise InputError(
            f"{partial} is in the way: it is not from an earlier build, so it was left"
            " as it is; remove it or choose another --output"
        )
    if leftovers:
        print(f"{partial} is of other text or options; starting anew", flush=True)
    # The record goes last: as long as it is there, the rest is known to be a build's.
    for path in sorted(partial.iterdir(), key=lambda path: path.name == _STATE):
        _remove(path)
    store.write_json(partial / _STATE, identity)


def publish(partial: Path, output: Path) -> None:
    """Removes what only builds need and gives the directory its name."""
    for path in partial.iterdir():
        if path.name.endswith((".tmp", REPORT_SUFFIX)) or path.name == _STATE:
            _remove(path)
    store.sync(partial)
    partial.rename(output)
    store.sync(output.parent)


def _recorded(path: Path) -> dict[str, Any] | None:
    """Returns the identity that a build wrote down, None if it wrote none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    keys = ("format_version", "sources", "text", "options")
    return {key: content.get(key) for key in keys}


def _is_empty(directory: Path) -> bool:
    return not any(directory.iterdir())


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
