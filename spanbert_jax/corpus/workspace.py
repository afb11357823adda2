"""The directory that a build works in: `<output>.partial` until it is finished.

It keeps each finished file through a kill, belongs to one build at a time, and gets the
output's name in one step.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spanbert_jax.corpus import store
from spanbert_jax.errors import InputError, StorageError

_STATE = "build.json"
# What a build leaves behind for its later steps, and a finished corpus does without.
_MATERIAL = ("scan-", "sample-", "repeated-", "report-")


def check_output(output: Path) -> None:
    """Refuses an output that could only be refused after hours of work.

    Raises:
        InputError: something else than a corpus is there.
        StorageError: nothing can be written there.
    """
    # A path has lost one of the two slashes.
    if re.match(r"\w+:/", str(output)):
        raise InputError(
            f"--output={output} is a URL; a corpus is read through memory maps and must"
            " lie on a local disk"
        )
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


def claim(partial: Path) -> None:
    """Makes the directory a build's.

    Args:
        partial: the directory, locked.

    Raises:
        InputError: what is in it is not a build's.
    """
    if (partial / _STATE).exists() or (partial / store.MANIFEST).exists():
        return
    if any(path.suffix != ".tmp" for path in partial.iterdir()):
        raise InputError(
            f"{partial} is in the way: it is not from an earlier build, so it was left"
            " as it is; remove it or choose another --output"
        )
    store.write_json(partial / _STATE, {})


def begin(partial: Path, identity: dict[str, Any]) -> None:
    """Empties the directory, but for what was scanned, unless it is this very build's.

    Args:
        partial: the directory, locked and claimed.
        identity: what makes two builds the same.
    """
    recorded = _recorded(partial / _STATE) or recorded_identity(partial)
    if recorded == identity:
        print(f"going on with {partial}", flush=True)
        return
    # First, or a kill would leave another build's name on what is left of it.
    store.write_json(partial / _STATE, {})
    others = [
        path
        for path in partial.iterdir()
        if path.name != _STATE and not path.name.startswith("scan-")
    ]
    if any(path.suffix != ".tmp" for path in others):
        print(f"{partial} is of other text or options; starting anew", flush=True)
    for path in sorted(others, key=lambda path: path.name != store.MANIFEST):
        _remove(path)
    store.write_json(partial / _STATE, identity)


def publish(partial: Path, output: Path) -> None:
    """Removes what only builds need and gives the directory its name."""
    for path in partial.iterdir():
        passing = path.name == _STATE or path.name.startswith(_MATERIAL)
        if passing or path.name.endswith(".tmp"):
            _remove(path)
    store.sync(partial)
    partial.rename(output)
    store.sync(output.parent)


def abandon(partial: Path) -> None:
    """Removes a directory that turned out not to be needed."""
    shutil.rmtree(partial)


def _recorded(path: Path) -> dict[str, Any] | None:
    """Returns the identity that a build wrote down, None if it wrote none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    keys = ("format_version", "sources", "text", "options")
    return {key: content[key] for key in keys} if set(keys) <= set(content) else None


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
