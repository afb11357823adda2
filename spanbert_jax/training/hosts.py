"""Hosts: the processes of a run: how they meet, agree and end."""

import contextlib
import errno
import functools
import os
import re
import signal
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from spanbert_jax import errors
from spanbert_jax.errors import InputError, PeerError, StorageError
from spanbert_jax.training.guard import Guard

# Beyond that a process that ends does not wait for others to end alike.
_LEAVING_SECONDS = 10
# Of a fault that processes tell each other.
_FAULT_BYTES = 1024
# How the runtime says that another process does not answer; gloo is the CPU's
# transport, the last are the coordination service's.
_LOST = re.compile(
    r"[Gg]loo|[Cc]onnection (closed|reset|refused)|[Ss]ocket closed|[Hh]eartbeat|"
    r"[Bb]arrier|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|"
    r"NCCL.*(remote|time(d )?out|abort|closed)"
)
# Their sentences hold a path, and any word may stand in it.
_DISK_FAULTS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.EACCES}


class Place(NamedTuple):
    """The place of a process among those of its run.

    Attributes:
        coordinator: HOST:PORT that process 0 listens on.
        num_processes: of the run.
        process_id: of this one, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int


class Meeting(NamedTuple):
    """How the processes of a run meet.

    Attributes:
        place: of this process; None leaves it to jax to find out, from TPU metadata,
            GKE, SLURM or Open MPI.
        connect_seconds: how long to wait for the others.
        heartbeat_seconds: a process that is silent for so long counts as lost.
    """

    place: Place | None
    connect_seconds: int
    heartbeat_seconds: int


def make_place(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Place | None:
    """The place that flags give a process; None if none of them is set.

    Raises:
        InputError: only some are set, or one of them cannot be.
    """
    flags = {
        "--coordinator": coordinator,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [name for name, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        given = [f"{name}={flags[name]}" for name in flags if name not in missing]
        raise InputError(
            f"{' and '.join(given)} without {' and '.join(missing)}: set all three, or"
            " none of them"
        )
    if not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise InputError(
            f"--coordinator={coordinator} must be HOST:PORT, such as 10.0.0.1:8476"
        )
    if num_processes < 1:
        raise InputError(f"--num_processes={num_processes} must be at least 1")
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id={process_id} must be from 0 to {num_processes - 1}, for"
            f" --num_processes is {num_processes}"
        )
    return Place(coordinator, num_processes, process_id)


def run(work: Callable[[], int], meeting: Meeting | None) -> int:
    """Does the work of a run, with its other processes if there are any.

    Of several, this process then ends at once, whatever the others do: one that waited
    for them at its exit could hang, and they with it.

    Args:
        work: returns the exit code; the first to ask for the devices.
        meeting: of the processes; None if this is the only one.

    Returns:
        The exit code, if this is the only process.
    """
    if meeting is None:
        return work()
    guard = Guard(functools.partial(_not_met, meeting))

    def together() -> int:
        try:
            _meet(meeting)
            guard.explain = _lost
            # The transport connects at the first sum, and waits for others there for
            # half a minute only; one of them may read and plan a text for longer.
            first_decides(0)
            return work()
        except jax.errors.JaxRuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            raise guard.explain(str(error)) from error

    try:
        code = errors.outcome(together)
    # A bug, with its traceback as ever; but the interpreter's way out would hang.
    except Exception:
        traceback.print_exc()
        code = 1
    guard.exit_code = code
    # A signal that comes from now on has been heeded: the code says so.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        # Others may have failed, or have yet to learn of this end: the code says it.
        jax.distributed.shutdown()
    guard.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _meet(meeting: Meeting) -> None:
    """Joins the processes; the runtime aborts where they cannot be reached."""
    place = meeting.place
    _check_port(place)
    # Votes travel with each step; its handler would swallow the signal before them.
    jax.config.update("jax_enable_preemption_service", False)
    given = {}
    if place:
        given = {
            "coordinator_address": place.coordinator,
            "num_processes": place.num_processes,
            "process_id": place.process_id,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=meeting.connect_seconds,
            heartbeat_timeout_seconds=meeting.heartbeat_seconds,
            shutdown_timeout_seconds=_LEAVING_SECONDS,
        )
    # Raised where nothing was found, and where what was found makes no sense.
    except ValueError as error:
        raise InputError(
            f"--distributed: jax finds no cluster here ({error}); set --coordinator,"
            " --num_processes and --process_id"
        ) from error
    met = jax.process_count()
    if place and met != place.num_processes:
        raise InputError(
            f"--num_processes={place.num_processes}, but {met} processes have met at"
            f" --coordinator={place.coordinator}; give all of them the same number"
        )


def _check_port(place: Place | None) -> None:
    """Refuses a port that is taken: the runtime would share it, and wait in vain."""
    if place is None or place.process_id != 0:
        return
    host, port = place.coordinator.rsplit(":", 1)
    try:
        family = socket.getaddrinfo(host.strip("[]"), int(port))[0][0]
        with socket.socket(family) as probe:
            # A port that a run before this one has just left is no one's.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--coordinator={place.coordinator}: process 0 cannot listen there"
            f" ({error}); name this machine and a free port"
        ) from error


def _not_met(meeting: Meeting, said: str) -> PeerError:
    place = meeting.place
    who = f"process {place.process_id} of {place.num_processes}" if place else "it"
    where = f" at --coordinator={place.coordinator}" if place else ""
    return PeerError(
        f"{who} has not met all others{where} within {meeting.connect_seconds} seconds"
        f" ({_reason(said)}); start as many as --num_processes says, each with a"
        " --process_id of its own"
    )


def peer_error(error: Exception) -> PeerError | None:
    """What to say where an error, perhaps of a save, is another process's end."""
    of_a_disk = isinstance(error, OSError) and error.errno in _DISK_FAULTS
    if jax.process_count() > 1 and not of_a_disk and _LOST.search(str(error)):
        return _lost(str(error))
    return None


def _lost(said: str) -> PeerError:
    return PeerError(
        f"another process of the run has ended or does not answer ({_reason(said)});"
        " run the same command again on all: it goes on from the newest checkpoint"
    )


def _reason(said: str) -> str:
    """The telling line of the runtime's pages."""
    found = re.search(r"(?:[A-Z]{2,}_)?[A-Z]{3,}: (.+)", said)
    return (found[1] if found else said.strip().split("\n")[0])[:200]


def is_first() -> bool:
    """Whether this process is the one that writes and talks."""
    return jax.process_index() == 0


def say(message: str) -> None:
    """Prints a line, once a run."""
    if is_first():
        print(message, flush=True)


def is_told_alone(stopping: threading.Event) -> bool:
    """Whether a run of one process was told to stop: it has nobody to agree with."""
    return jax.process_count() == 1 and stopping.is_set()


def first_decides(answer: int) -> int:
    """The answer of the first process, for all: a file may look another to each."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(answer)))


def first_says(text: str) -> str:
    """The text of the first process, for all."""
    encoded = text.encode()
    content = np.zeros(first_decides(len(encoded)), np.uint8)
    mine = np.frombuffer(encoded[: len(content)], np.uint8)
    content[: len(mine)] = mine
    return multihost_utils.broadcast_one_to_all(content).tobytes().decode()


def first_fault(fault: str) -> str:
    """What went wrong in any of the processes, for all: of the first one that says so.

    None goes on before all have come here.

    Args:
        fault: what went wrong in this one, cut after 1,024 bytes; empty if nothing did.

    Returns:
        The same in all; empty if nothing went wrong in any.
    """
    content = np.zeros(_FAULT_BYTES, np.uint8)
    encoded = np.frombuffer(fault.encode()[:_FAULT_BYTES], np.uint8)
    content[: len(encoded)] = encoded
    gathered = multihost_utils.process_allgather(content).reshape(-1, _FAULT_BYTES)
    faults = (row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in gathered)
    return next(filter(None, faults), "")


def check_shared(directory: Path) -> None:
    """Checks that all processes see one directory, not each its own.

    Raises:
        InputError: a file of the first process is not there for another one.
        StorageError: the first process cannot write a file.
    """
    if jax.process_count() == 1:
        return
    mark, fault = directory / first_says(f".shared-{uuid.uuid4().hex}"), ""
    if is_first():
        try:
            mark.touch()
        except OSError as error:
            fault = f"--workdir={directory}: {error.strerror}"
    if fault := first_fault(fault):
        raise StorageError(fault)
    if not os.path.exists(mark):
        fault = (
            f"--workdir={directory} is not the same directory in processes 0 and"
            f" {jax.process_index()}: checkpoints are written by all; name one that all"
            " machines share"
        )
    fault = first_fault(fault)
    if is_first():
        # Those of starts that were killed here, too; what cannot go may stay.
        for old in directory.glob(".shared-*"):
            with contextlib.suppress(OSError):
                old.unlink()
    if fault:
        raise InputError(fault)
