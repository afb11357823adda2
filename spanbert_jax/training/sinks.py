"""The sinks: where records of a run go; a file, TensorBoard, the terminal."""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from spanbert_jax.training import hosts

FILE = "metrics.jsonl"

Record = Mapping[str, Any]


class Sink(Protocol):
    """Takes records; raises OSError where it cannot."""

    def write(self, record: Record) -> None:
        """Writes a record through, so that it is there whatever comes."""

    def close(self) -> None:
        """Takes no more."""


def cut_back(path: Path, step: int) -> None:
    """Removes the lines after a step, and a line that a kill tore.

    So that every step stands in the file once when the run goes on from there. The file
    is replaced in one go, or left alone if there is nothing to remove.

    Args:
        path: of metrics.jsonl; it need not exist.
        step: the last one to keep.
    """
    if not path.exists():
        return
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line.rstrip("\n") + "\n")
        except json.JSONDecodeError:
            continue
    if kept == lines:
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


def evaluation_at(workdir: Path, step: int) -> dict[str, Any] | None:
    """The evaluation of a step as metrics.jsonl has it; None if it has none."""
    path = workdir / FILE
    if not path.exists():
        return None
    for record in map(json.loads, path.read_text().splitlines()):
        if record["step"] == step and record["split"] == "valid":
            return record
    return None


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a record by name; that of a part is "name/part"."""
    found = {}
    for name, value in record.items():
        values = value if isinstance(value, Mapping) else {"": value}
        for part, number in values.items():
            if isinstance(number, int | float):
                found["/".join(filter(None, (name, part)))] = number
    return found


def summary(record: Record) -> str:
    """A record as a line to read."""
    shown = {
        "loss": ("loss", ".3f"),
        "mlm_loss": ("MLM", ".3f"),
        "unigram_loss": ("unigram", ".3f"),
        "sbo_loss": ("SBO", ".3f"),
        "nsp_loss": ("NSP", ".3f"),
        "mlm_accuracy": ("MLM accuracy", ".1%"),
        "sbo_accuracy": ("SBO accuracy", ".1%"),
        "nsp_accuracy": ("NSP accuracy", ".1%"),
        "learning_rate": ("rate", ".2e"),
        "grad_norm": ("gradient", ".2f"),
        "tokens_per_second": ("tokens/s", ",.0f"),
        "step_seconds/p50": ("s/step", ",.3f"),
        "host_wait": ("host wait", ".1%"),
        "mfu": ("MFU", ".1%"),
    }
    found = numbers(record)
    parts = [
        f"{label} {found[name]:{form}}"
        for name, (label, form) in shown.items()
        if name in found
    ]
    return f"step {record['step']:>7,} {record['split']}: {', '.join(parts)}"


class JsonLines:
    """metrics.jsonl: a record a line."""

    def __init__(self, workdir: Path, start: int) -> None:
        """Cuts the file back to a step and opens it.

        Args:
            workdir: the run's directory.
            start: updates done.

        Raises:
            OSError: it cannot be written.
        """
        path = workdir / FILE
        cut_back(path, start)
        # Without a buffer, closing has nothing left to write that could fail again.
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Writes a line through.

        Raises:
            OSError: it cannot be written, or not all of it; a next start cuts it off.
        """
        line = (json.dumps(record) + "\n").encode()
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Events:
    """Scalars for TensorBoard.

    Written as the TensorFlow package can: its own summary writer needs tensorboard,
    which a run does not.
    """

    def __init__(self, workdir: Path, start: int) -> None:
        """Opens a file that tells TensorBoard to drop what comes after a step.

        Args:
            workdir: the run's directory.
            start: updates done.

        Raises:
            OSError: it cannot be written.
        """
        import tensorflow as tf

        self._error = tf.errors.OpError
        self._event = tf.compat.v1.Event
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._writer = tf.io.TFRecordWriter(str(workdir / name))
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        restart = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write(
            self._event(wall_time=time.time(), step=start + 1, session_log=restart)
        )

    def write(self, record: Record) -> None:
        """Writes the numbers of a record through."""
        event = self._event(wall_time=time.time(), step=record["step"])
        for name, number in numbers(record).items():
            if name != "step":
                tag = f"{record['split']}/{name}"
                event.summary.value.add(tag=tag, simple_value=number)
        self._write(event)

    def _write(self, event: Any) -> None:
        try:
            self._writer.write(event.SerializeToString())
            self._writer.flush()
        except self._error as error:
            raise OSError(error.error_code, error.message) from error

    def close(self) -> None:
        """Closes the file.

        Raises:
            OSError: it cannot be written.
        """
        try:
            self._writer.close()
        except self._error as error:
            raise OSError(error.error_code, error.message) from error


class Terminal:
    """Lines of output, and a progress bar if someone watches; the first process's."""

    def __init__(self, start: int, stop: int) -> None:
        """Shows the bar.

        Args:
            start: updates done.
            stop: the step at which this start of the run ends.
        """
        self._bar = tqdm(
            total=stop,
            initial=start,
            unit="step",
            disable=not (hosts.is_first() and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def say(self, message: str) -> None:
        """Prints a line, above the bar if there is one."""
        with self._bar.external_write_mode(file=sys.stdout):
            hosts.say(message)

    def advance(self, loss: float, tokens_per_second: float | None) -> None:
        """Moves the bar on by a step."""
        speed = f", {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        self._bar.set_postfix_str(f"loss {loss:.3f}{speed}", refresh=False)
        self._bar.update()

    def write(self, record: Record) -> None:
        """Prints a record."""
        self.say(summary(record))

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
