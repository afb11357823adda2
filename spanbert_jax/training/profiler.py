"""The profiler: a trace of some steps, to look at in TensorBoard or XProf."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from spanbert_jax.errors import InputError, StorageError

# What a run traces if it is not told to.
NO_STEPS = range(0)


def parse_steps(text: str) -> range:
    """The steps that --profile names.

    Args:
        text: START:STOP, the steps from START up to, but not including, STOP; the first
            step of a run is 1. Empty: none.

    Returns:
        The steps.

    Raises:
        InputError: it is something else, or names no step.
    """
    if not text:
        return NO_STEPS
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise InputError(
            f"--profile is {text!r}; it must be START:STOP, such as 10:13 for the steps"
            " 10, 11 and 12"
        )
    steps = range(int(match[1]), int(match[2]))
    if steps.start < 1 or not steps:
        raise InputError(
            f"--profile={text} names no step; START must be at least 1, and STOP, which"
            " is not traced itself, above it"
        )
    return steps


def check_steps(steps: range, last: int) -> None:
    """Checks that a run has steps that are to be traced.

    Args:
        steps: to be traced; none is allowed.
        last: step of the run.

    Raises:
        InputError: it has none of them.
    """
    if steps and not 1 <= steps.start <= last:
        raise InputError(
            f"--profile={steps.start}:{steps.stop} begins outside the run, whose steps"
            f" are 1 to {last}"
        )


class Profiler:
    """Traces steps; every process traces its own devices.

    A trace holds the whole of its steps and nothing of others: the loop lets no step be
    under way where one begins or ends.
    """

    def __init__(
        self,
        directory: Path,
        steps: range,
        start: int,
        stop: int,
        say: Callable[[str], None],
    ) -> None:
        """Traces nothing yet.

        Args:
            directory: where traces are kept.
            steps: to be traced, without a gap.
            start: updates done.
            stop: the step at which this start of the run ends.
            say: prints a line.
        """
        self._directory = directory
        self._say = say
        # A run that was restarted has done some of them, or all.
        self._steps = range(
            max(steps.start, start + 1), max(min(steps.stop, stop + 1), start + 1)
        )
        self._is_tracing = False
        if steps and not self._steps:
            say(f"--profile: the steps up to {start} are done, there is none to trace")

    def turns(self, step: int) -> bool:
        """Whether the trace begins or ends behind a step."""
        return bool(self._steps) and step + 1 in (self._steps.start, self._steps.stop)

    def before(self, step: int) -> None:
        """Begins the trace if a step is its first.

        Raises:
            StorageError: what a killed process left cannot be removed.
        """
        if self._steps and step == self._steps.start:
            self._sweep()
            options = jax.profiler.ProfileOptions()
            # Every Python call would slow the pipeline down and hide it in the trace.
            options.python_tracer_level = 0
            options.session_id = self._name()
            jax.profiler.start_trace(self._scratch(), profiler_options=options)
            self._is_tracing = True

    def after(self, step: int) -> None:
        """Ends the trace if a step is its last.

        Raises:
            StorageError: it cannot be written.
        """
        if self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Ends the trace that goes on, if any, and writes what it holds.

        Raises:
            StorageError: it cannot be written.
        """
        if not self._is_tracing:
            return
        self._is_tracing = False
        try:
            jax.profiler.stop_trace()
            self._publish()
        except (jax.errors.JaxRuntimeError, OSError) as error:
            raise StorageError(f"--profile: {self._directory}: {error}") from error
        self._say(
            f"profile: {self._name()} in {self._directory}"
            f" (tensorboard --logdir={self._directory})"
        )

    def _publish(self) -> None:
        """Puts the trace where the viewers look.

        The profiler names files by host, on which several processes may run.
        """
        session = self._directory / "plugins" / "profile" / self._name()
        session.mkdir(parents=True, exist_ok=True)
        for file in self._scratch().rglob("*.xplane.pb"):
            file.replace(session / f"process-{jax.process_index()}.xplane.pb")
        shutil.rmtree(self._scratch())

    def _sweep(self) -> None:
        """Removes what a process that was killed while it traced has left."""
        try:
            if self._scratch().exists():
                shutil.rmtree(self._scratch())
        except OSError as error:
            raise StorageError(f"--profile: {self._directory}: {error}") from error

    def _scratch(self) -> Path:
        return self._directory / f".process-{jax.process_index()}"

    def _name(self) -> str:
        return f"steps-from-{self._steps.start}"
