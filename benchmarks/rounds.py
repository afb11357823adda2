"""Rounds: workers in processes of their own that work in turn.

So whatever slows the machine slows all of them. A worker prepares, prints one line of
JSON that describes it, and waits. For each line that it reads, the name of one of its
cases, it does that work once and prints what it took. Standard library only: the
interpreters of peers import this file, too.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from allocator import ALLOCATORS, VARIABLE

_DIRECTORY = Path(__file__).resolve().parent
# What would give one side another setting than the benchmark says.
_SETTINGS = (VARIABLE, "OMP_NUM_THREADS", "MKL_NUM_THREADS")

Case = Callable[[], Mapping[str, float]]


class Measure(NamedTuple):
    """What doing a case once took.

    Attributes:
        amount: what was worked on, such as tokens.
        wall: seconds.
        cpu: seconds, of all threads.
        peak_bytes: resident size of the process, at most so far.
        own_bytes: resident now, without pages of files; 0 where only Linux would tell.
    """

    amount: float
    wall: float
    cpu: float
    peak_bytes: int
    own_bytes: int

    def rate(self, clock: str) -> float:
        """Amount a second of "wall" or "cpu"."""
        return self.amount / getattr(self, clock)


def serve(description: Mapping[str, Any], cases: Mapping[str, Case]) -> None:
    """Is a worker until its input ends.

    Args:
        description: of the worker, for JSON.
        cases: by name, what does the work once; returns "amount" and, where only a part
            of it is to be timed, that part's "wall" and "cpu" seconds.
    """
    print(json.dumps(description), flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        told = cases[line.strip()]()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sizes = {"peak_bytes": peak_bytes(), "own_bytes": own_bytes()}
        print(json.dumps({"wall": wall, "cpu": cpu, **sizes, **told}), flush=True)


def peak_bytes() -> int:
    """The resident size of this process, at most so far.

    That of the process that started it counts where it was larger: a small one must.
    """
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def own_bytes() -> int:
    """What is resident of this process now, without pages of files; 0 if unknown."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return 1024 * int(found[0]) if found else 0


class Worker:
    """A worker's process, as seen from the one that gives the turns."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        python: str = sys.executable,
        cores: int = 0,
        allocator: str = "large",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it.

        Args:
            script: in this directory.
            arguments: of the script.
            python: the interpreter.
            cores: how many it may use; 0 for all.
            allocator: of those in allocator.py.
            environment: added to this process's, which keeps no setting of speed.
        """
        allowed = available_cores()[: cores or None]
        inherited = {k: v for k, v in os.environ.items() if k not in _SETTINGS}
        threads = {"OMP_NUM_THREADS": str(len(allowed))}
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(_DIRECTORY / script), *arguments],
            env=inherited | threads | ALLOCATORS[allocator] | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # At once: its threads, which come later, stay where it is.
        pin(self._process.pid, allowed)
        self._name = script

    def describe(self) -> dict[str, Any]:
        """Waits until it is ready; to be called once, before the first turn."""
        return self._read()

    def work(self, case: str) -> Measure:
        """Gives it one turn."""
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return Measure(**self._read())

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self._name} ended with code {code}; see its errors")
        return json.loads(line)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        # The end of its input ends it.
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def available_cores() -> list[int]:
    """The cores that this process may use; their numbers mean nothing on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(process: int, cores: Sequence[int]) -> None:
    """Keeps a process on some cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process, cores)


class Player(NamedTuple):
    """One case of one worker."""

    worker: Worker
    case: str


Measures = dict[str, list[Measure]]


def take_turns(players: Mapping[str, Player], rounds: int, warm_up: int) -> Measures:
    """Lets each player work once a round.

    Args:
        players: by name, in the order of their turns.
        rounds: how many count.
        warm_up: how many come first and do not.

    Returns:
        By player, its measures, one a round.
    """
    measures: Measures = {name: [] for name in players}
    for number in range(warm_up + rounds):
        for name, (worker, case) in players.items():
            measure = worker.work(case)
            if number >= warm_up:
                measures[name].append(measure)
        print(
            f"  round {number + 1} of {warm_up + rounds}", file=sys.stderr, flush=True
        )
    return measures


def rates(measures: Sequence[Measure]) -> dict[str, float]:
    """The median rates of a player, by the clock that they are of."""
    return {
        clock: statistics.median(measure.rate(clock) for measure in measures)
        for clock in ("cpu", "wall")
    }


def compare(
    ours: Sequence[Measure],
    theirs: Sequence[Measure],
    worth: float = 1.0,
) -> dict[str, dict[str, float]]:
    """How often our rate is that of another player, within each round.

    Args:
        ours: a measure a round.
        theirs: the same of the other.
        worth: what a unit of ours counts in theirs.

    Returns:
        By clock, "cpu" and "wall": the median over the rounds, the lowest, the highest.
    """
    found = {}
    for clock in ("cpu", "wall"):
        ratios = [
            worth * one.rate(clock) / other.rate(clock)
            for one, other in zip(ours, theirs, strict=True)
        ]
        found[clock] = {
            "median": round(statistics.median(ratios), 3),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
        }
    return found
