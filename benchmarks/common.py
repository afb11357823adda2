"""What the benchmarks share: the environment, a text to work on, and the clock."""

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

_ALLOCATOR = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def prepare_process() -> None:
    """Starts the script again with the allocator's setting, if it is not there.

    It must stand in the environment before the process starts. Call this before any
    import that takes time.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if _ALLOCATOR not in os.environ:
        environment = os.environ | {_ALLOCATOR: _HUGE_PAGES}
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
