"""The meter: how fast a run is, from the times at which the host had read its steps."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class Meter:
    """Times steps, and the waits for their batches.

    A step's time runs from when the host had read what the step before reported to when
    it has read what this one did. The loop reads a step with the next one under way, so
    this is the time of whichever is slowest: the devices, the pipeline, or the loop.

    The first step of a start and the first after a pause have no time, for theirs would
    be a compilation's, a save's, an evaluation's, or that of devices that had nothing
    left to do. Such a step enters no figure, neither with its tokens nor with the waits
    since the step before it.
    """

    def __init__(
        self,
        devices: int,
        flops: int,
        peak: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts the clock of the run.

        Args:
            devices: of the run, over all processes.
            flops: of an update, over all devices.
            peak: FLOP/s that a device could do; None if unknown.
            clock: seconds since any moment.
        """
        self._devices = devices
        self._flops = flops
        self._peak = peak
        self._clock = clock
        self._began = clock()
        self._last_read: float | None = None
        self._waited = 0.0
        self._forget()

    def _forget(self) -> None:
        self._times: list[float] = []
        self._total = 0.0
        self._tokens = 0
        self._waits = 0.0

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; measures how long their receiver waits for each."""
        asked = self._clock()
        for batch in batches:
            self._waited += self._clock() - asked
            yield batch
            asked = self._clock()

    def read(self, tokens: int) -> None:
        """Notes that a step was read just now.

        Args:
            tokens: that it trained on, over all devices.
        """
        now = self._clock()
        if self._last_read is not None:
            self._times.append(now - self._last_read)
            self._total += self._times[-1]
            self._tokens += tokens
            self._waits += self._waited
        self._last_read, self._waited = now, 0.0

    def pause(self) -> None:
        """Leaves the next step without a time: no step is under way."""
        self._last_read = None

    def seconds(self) -> float:
        """Since this start of the run began."""
        return self._clock() - self._began

    def tokens_per_second(self) -> float | None:
        """Over the timed steps since the last figures; None if there is none."""
        return self._tokens / self._total if self._times else None

    def take(self) -> dict[str, Any]:
        """The figures of the timed steps since the last call, which are forgotten.

        Returns:
            Nothing if no step was timed, else
            tokens_per_second: real tokens over the time of the steps.
            tokens_per_second_per_device: the same, divided by the devices.
            step_seconds: the median, the 90th percentile (linear between neighbours)
                and the longest time of a step: p50, p90, max.
            host_wait: which share of the time the loop waited for the next batch, to be
                made and put on the devices. Near 0 the devices are the bottleneck, near
                1 the pipeline is.
            mfu: model FLOPs utilisation, the share of the devices' peak that the model
                needs by arithmetic alone: flops / (p50 * devices * peak). Left out if
                the peak is unknown.
        """
        rate = self.tokens_per_second()
        if rate is None:
            return {}
        p50, p90 = map(float, np.percentile(self._times, [50, 90]))
        figures = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self._devices,
            "step_seconds": {"p50": p50, "p90": p90, "max": max(self._times)},
            "host_wait": self._waits / self._total,
        }
        if self._peak:
            figures["mfu"] = self._flops / (p50 * self._devices * self._peak)
        self._forget()
        return figures
