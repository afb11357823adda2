"""Hosts: the processes of a run."""

import threading

import jax
from jax.experimental import multihost_utils


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


def first_decides(answer: bool) -> bool:
    """The answer of the first process, for all: a file may look another to each."""
    return bool(multihost_utils.broadcast_one_to_all(answer))
