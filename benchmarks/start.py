"""Times how a run starts: python benchmarks/start.py prints one JSON line.

The tiny config, by spanbert_jax.main in a new process, from the command to the line of
step 1:

first  nothing is there: it also learns a vocabulary from the embedded text, and builds
       the corpus and the plan of its rows
cold   corpus and plan are there, compiled programs are not
warm   these are there, too

Wall time is up to that line, CPU time of the whole process, which then saves and ends.
Medians; `warm_over_cold` is the median of the CPU times' ratio within a round. Files
are in the system's cache in all of them.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from allocator import ALLOCATORS

_REPOSITORY = Path(__file__).resolve().parent.parent
_LINE = "step       1 train"


class Start(NamedTuple):
    """A start: seconds of wall time up to the first step, and of CPU time in all."""

    wall: float
    cpu: float


def start(cache: Path, workdir: Path) -> Start:
    """Starts the tiny config, and waits for the end of its first step."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "spanbert_jax.main"),
        *("--config=configs/tiny.py", f"--workdir={workdir}"),
        f"--config.data.cache={cache}",
        "--config.train.log_every=1",
        "--config.train.stop_after=1",
    ]
    # A cache that is kept elsewhere would make every start a warm one.
    environment = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    environment |= {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment |= ALLOCATORS["kept"]
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=_REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines, wall = [], 0.0
    for line in process.stdout:
        lines.append(line)
        if line.startswith(_LINE):
            wall = time.perf_counter() - began
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not wall:
        raise RuntimeError(f"code {process.returncode} from {command}: {lines}")
    return Start(wall, usage.ru_utime + usage.ru_stime)


def measure_round(directory: Path) -> dict[str, Start]:
    """A start of each kind, in a directory of their own."""
    cache = directory / "cache"
    starts = {"first": start(cache, directory / "first")}
    shutil.rmtree(cache / "compiled")
    starts["cold"] = start(cache, directory / "cold")
    starts["warm"] = start(cache, directory / "warm")
    return starts


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as directory:
            rounds.append(measure_round(Path(directory)))
    figures = {
        kind: {
            clock: round(
                statistics.median(getattr(one[kind], clock) for one in rounds), 2
            )
            for clock in Start._fields
        }
        for kind in rounds[0]
    }
    ratio = statistics.median(one["warm"].cpu / one["cold"].cpu for one in rounds)
    print(json.dumps({**figures, "warm_over_cold": round(ratio, 3)}))


if __name__ == "__main__":
    main()
