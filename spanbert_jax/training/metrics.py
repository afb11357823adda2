"""Metrics: metrics.jsonl, TensorBoard, and what the user sees."""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from spanbert_jax import settings
from spanbert_jax.errors import NonFiniteError, StorageError
from spanbert_jax.training.optimizer import learning_rate
from spanbert_jax.training.step import StepMetrics

FILE = "metrics.jsonl"


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


class Log:
    """Where the metrics of a run go.

    Each record becomes a line of metrics.jsonl, written through at once, scalars for
    TensorBoard, and a line of output. The progress bar shows on a terminal only.
    """

    def __init__(
        self,
        workdir: Path,
        config: ConfigDict,
        start: int,
        stop: int,
        shares: Callable[[range], Mapping[str, float]],
    ) -> None:
        """Cuts metrics.jsonl back to `start` and opens it.

        Args:
            workdir: the run's directory.
            config: all settings.
            start: updates done.
            stop: the step at which this start of the run ends.
            shares: what share of the rows of some steps, counted from 0, each corpus
                gives; empty if there is one.

        Raises:
            StorageError: the files cannot be written.
        """
        path = workdir / FILE
        self._every = config.train.log_every
        self._weights = settings.loss_weights(config)
        self._rate = learning_rate(config)
        self._shares = shares
        try:
            cut_back(path, start)
            self._file = path.open("a")
            self._events = _EventWriter(workdir, start)
        except OSError as error:
            raise StorageError(f"--workdir: {path}: {error.strerror}") from error
        self._bar = tqdm(
            total=stop,
            initial=start,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        self._began = time.perf_counter()
        self._compiles = True
        self._restart_meter()

    def say(self, message: str) -> None:
        """Prints a line, above the bar if there is one."""
        with self._bar.external_write_mode(file=sys.stdout):
            print(message, flush=True)

    def update(self, step: int, metrics: StepMetrics, stops: jax.Array) -> bool:
        """Reads what an update reported; records every `train.log_every`-th.

        Args:
            step: its number, from 1.
            metrics: still on the device, perhaps still being computed.
            stops: the same, whether a process of the run was told to stop.

        Returns:
            Whether one was.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite.
            StorageError: the disk is full, or gone.
        """
        metrics, stops = jax.device_get((metrics, stops))
        for name in ("loss", "grad_norm"):
            value = float(getattr(metrics, name))
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"{name} is {value} at step {step}; the checkpoints of earlier"
                    " steps are kept (a lower optimizer.learning_rate may help)"
                )
        self._tokens += int(metrics.tokens)
        tokens_per_second = self._tokens / (time.perf_counter() - self._metered_from)
        self._bar.set_postfix_str(
            f"loss {metrics.loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False
        )
        self._bar.update()
        if self._compiles:
            # The first update's time is its compilation's.
            self._compiles = False
            self._restart_meter()
        if step % self._every == 0:
            self._write(self._update_record(step, metrics, tokens_per_second))
            self._restart_meter()
        return bool(stops)

    def _update_record(
        self, step: int, metrics: StepMetrics, tokens_per_second: float
    ) -> dict[str, Any]:
        record = {"step": step, "split": "train", "loss": float(metrics.loss)}
        for head, sums in metrics.heads.items():
            weight = max(float(sums.weight), 1.0)
            record[f"{head}_loss"] = float(sums.loss) / weight
            record[f"{head}_accuracy"] = float(sums.correct) / weight
        if shares := self._shares(range(step - self._every, step)):
            record["corpus_shares"] = dict(shares)
        return record | {
            "learning_rate": float(self._rate(step - 1)),
            "grad_norm": float(metrics.grad_norm),
            "tokens_per_second": tokens_per_second,
            "seconds": self._seconds(),
            "batch_checksum": int(metrics.batch_checksum),
        }

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records an evaluation; the time it took does not count as training.

        Args:
            step: after which it was made.
            metrics: see `evaluation.evaluate`.

        Raises:
            NonFiniteError: a loss is not finite.
            StorageError: the disk is full, or gone.
        """
        loss = sum(
            weight * metrics[f"{head}_loss"]
            for head, weight in self._weights.items()
            if f"{head}_loss" in metrics
        )
        if not math.isfinite(loss):
            raise NonFiniteError(f"the held-out loss is {loss} after step {step}")
        record = {"step": step, "split": "valid", "loss": loss, **metrics}
        record["seconds"] = self._seconds()
        self._write(record)
        self._restart_meter()

    def _seconds(self) -> float:
        """Since this start of the run began."""
        return time.perf_counter() - self._began

    def _restart_meter(self) -> None:
        self._metered_from = time.perf_counter()
        self._tokens = 0

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            self._events.write(record)
        except OSError as error:
            raise StorageError(f"{self._file.name}: {error}") from error
        self.say(summary(record))

    def close(self) -> None:
        """Ends the bar and closes the files."""
        self._bar.close()
        self._file.close()
        self._events.close()


def summary(record: Mapping[str, Any]) -> str:
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
    }
    parts = [
        f"{label} {record[name]:{form}}"
        for name, (label, form) in shown.items()
        if name in record
    ]
    return f"step {record['step']:>7,} {record['split']}: {', '.join(parts)}"


class _EventWriter:
    """Scalars for TensorBoard.

    Written as the TensorFlow package can: its own summary writer needs tensorboard,
    which a run does not.
    """

    def __init__(self, workdir: Path, start: int) -> None:
        import tensorflow as tf

        self._error = tf.errors.OpError
        self._event = tf.compat.v1.Event
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._writer = tf.io.TFRecordWriter(str(workdir / name))
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        # TensorBoard drops what earlier files hold of this step and later ones.
        restart = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write(
            self._event(wall_time=time.time(), step=start + 1, session_log=restart)
        )

    def write(self, record: Mapping[str, Any]) -> None:
        event = self._event(wall_time=time.time(), step=record["step"])
        for name, value in record.items():
            values = value if isinstance(value, Mapping) else {"": value}
            for part, number in values.items():
                if name != "step" and isinstance(number, int | float):
                    tag = "/".join(filter(None, (record["split"], name, part)))
                    event.summary.value.add(tag=tag, simple_value=number)
        self._write(event)

    def _write(self, event: Any) -> None:
        try:
            self._writer.write(event.SerializeToString())
            self._writer.flush()
        except self._error as error:
            raise OSError(error.error_code, error.message) from error

    def close(self) -> None:
        self._writer.close()
