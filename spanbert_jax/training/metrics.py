"""Metrics: what is read of a run's steps and evaluations, checked and recorded."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.errors import NonFiniteError, StorageError
from spanbert_jax.training import hosts
from spanbert_jax.training.memory import memory
from spanbert_jax.training.meter import Meter
from spanbert_jax.training.optimizer import learning_rate
from spanbert_jax.training.sinks import Events, JsonLines, Sink, Terminal
from spanbert_jax.training.step import StepMetrics


def _open_files(workdir: Path, start: int) -> list[Sink]:
    try:
        return [JsonLines(workdir, start), Events(workdir, start)]
    except OSError as error:
        raise StorageError(f"--workdir={workdir}: {error}") from error


class Log:
    """What is known of a run while it goes.

    Every process reads what its steps report and checks that it is finite. The first
    one alone records: each record becomes a line of metrics.jsonl, scalars for
    TensorBoard, and a line of output.
    """

    def __init__(
        self,
        workdir: Path,
        config: ConfigDict,
        start: int,
        stop: int,
        meter: Meter,
        shares: Callable[[range], Mapping[str, float]],
    ) -> None:
        """Cuts metrics.jsonl back to `start` and opens it.

        Args:
            workdir: the run's directory.
            config: all settings.
            start: updates done.
            stop: the step at which this start of the run ends.
            meter: is told of each step that was read; gives the figures of speed.
            shares: what share of the rows of some steps, counted from 0, each corpus
                gives; empty if there is one.

        Raises:
            StorageError: the files cannot be written.
        """
        self._workdir = workdir
        self._every = config.train.log_every
        self._weights = settings.loss_weights(config)
        self._rate = learning_rate(config)
        self._meter = meter
        self._shares = shares
        self._records = hosts.is_first()
        files = _open_files(workdir, start) if self._records else []
        self._terminal = Terminal(start, stop)
        self._sinks = [*files, self._terminal]

    def say(self, message: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._terminal.say(message)

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
        self._meter.read(int(metrics.tokens))
        self._terminal.advance(float(metrics.loss), self._meter.tokens_per_second())
        if step % self._every == 0:
            speed = self._meter.take()
            if self._records:
                self._write(self._update_record(step, metrics, speed))
        return bool(stops)

    def _update_record(
        self, step: int, metrics: StepMetrics, speed: Mapping[str, Any]
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
            "batch_checksum": int(metrics.batch_checksum),
            **speed,
            **memory(jax.local_devices()),
            "seconds": self._meter.seconds(),
        }

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records an evaluation.

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
        if self._records:
            record = {"step": step, "split": "valid", "loss": loss, **metrics}
            self._write(record | {"seconds": self._meter.seconds()})

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            for sink in self._sinks:
                sink.write(record)
        except OSError as error:
            raise StorageError(f"--workdir={self._workdir}: {error}") from error

    def close(self) -> None:
        """Ends the bar and closes the files.

        Raises:
            StorageError: the disk is full, or gone.
        """
        try:
            for sink in reversed(self._sinks):
                sink.close()
        except OSError as error:
            raise StorageError(f"--workdir={self._workdir}: {error}") from error
