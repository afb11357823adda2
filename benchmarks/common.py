"""What the benchmarks share: the environment, the clock and the scales."""

import os
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from allocator import ALLOCATORS, VARIABLE

_WATCH_SECONDS = 0.02

Result = TypeVar("Result")


def prepare_process(allocator: str = "large") -> None:
    """Starts the script again with an allocator's setting, if there is none.

    Call this before any import that takes time.

    Args:
        allocator: of those in allocator.py.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if VARIABLE not in os.environ:
        environment = os.environ | ALLOCATORS[allocator]
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def median_seconds(
    work: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> float:
    """The median time of some runs, after one that does not count.

    Args:
        work: what to time.
        repeats: how often.
        clock: seconds, such as time.perf_counter or time.process_time.

    Returns:
        Seconds a run.
    """
    work()
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)


def with_peak_bytes(work: Callable[[], Result]) -> tuple[Result, int]:
    """Calls a function and watches the memory that it takes.

    Args:
        work: what to call.

    Returns:
        What it returns; the most memory that the process had meanwhile beyond what it
        had before, mapped files aside, looked at fifty times a second.
    """
    before, peak = _anonymous_bytes(), 0
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_WATCH_SECONDS):
            peak = max(peak, _anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        over.set()
        watcher.join()
    return result, peak


def _anonymous_bytes() -> int:
    """Resident memory of this process that is no file's; Linux only."""
    status = Path("/proc/self/status").read_text()
    (line,) = (one for one in status.splitlines() if one.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
