"""Runs the benchmarks and writes their table: python benchmarks/table.py.

The table replaces what stands between the markers of docs/benchmarks.md; the text
around it stays. What was measured is kept in --results, so that --only=NAMES measures
some again and leaves the others. Sixteen minutes on two cores; --quick takes a third of
that, for figures that are less sure, and leaves the largest sizes out.

Masking and the host are measured on a real corpus where one is at hand, see --corpus.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
from sections import render, replace_table

_DIRECTORY = Path(__file__).resolve().parent
_REPOSITORY = _DIRECTORY.parent
_PAGE = _REPOSITORY / "docs" / "benchmarks.md"
_RESULTS = _REPOSITORY / "runs" / "benchmarks.json"
# Text of some 7 million tokens, beside the repository where there is any.
_TEXT = _REPOSITORY.parent / "shared" / "data"


def commands(arguments: argparse.Namespace, corpus: str) -> dict[str, list[str]]:
    """The command of each measurement, by its name."""
    real = [f"--corpus={corpus}"]
    beside = [f"--peer_python={arguments.peer_python}"]
    if not arguments.peers:
        beside = ["--nopeers"]
    if arguments.quick:
        return {
            "host": ["host.py", *real],
            "texts": ["host.py", "--tokens=1e6,1e7"],
            "masking": ["masking.py", *real, "--rounds=7", *beside],
            "step": ["step.py", "--dropout=0.1"],
            "training": ["training.py", "--rounds=5", *beside],
            "memory": ["memory.py", *beside],
            "start": ["start.py", "--rounds=1"],
        }
    return {
        "host": ["host.py", *real],
        "texts": ["host.py", "--tokens=1e6,1e7,1e8,1e9"],
        "masking": ["masking.py", *real, *beside],
        "step": ["step.py", "--dropout=0.1"],
        "step_plain": ["step.py", "--dropout=0"],
        "step_base": ["step.py", "--size=base", "--steps=5"],
        "training": ["training.py", *beside],
        "memory": ["memory.py", *beside],
        "memory_base": ["memory.py", "--size=base", "--rows=4", *beside],
        "work": ["work.py"],
        "start": ["start.py"],
    }


def run(command: Sequence[str]) -> list[Any]:
    """The lines of JSON that a script of this directory prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(_DIRECTORY / command[0]), *command[1:]],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def prepare(directory: Path) -> str:
    """A corpus of the text beside the repository; "" if there is none."""
    if not _TEXT.exists():
        return ""
    output = directory / "corpus"
    subprocess.run(
        [
            *(sys.executable, "-m", "spanbert_jax.prepare", "--valid_fraction=0"),
            f"--input={_TEXT}/corpus/*.train.txt",
            f"--vocab={_TEXT}/wordpiece/vocab.txt",
            f"--output={output}",
        ],
        cwd=_REPOSITORY,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return str(output)


def machine() -> str:
    """What the figures were measured on, and when."""
    cpu = platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():
        lines = path.read_text().splitlines()
        names = [line.split(":")[1] for line in lines if line.startswith("model name")]
        cpu = names[0].strip() if names else cpu
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f"{os.cpu_count()} cores of {cpu}, {pages / 2**30:.0f} GiB, Python"
        f" {platform.python_version()}; {today}"
    )


def main() -> None:
    """Measures, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", help="default: of the text beside the repository")
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    peers.add_arguments(parser)
    arguments = parser.parse_args()
    peers.check(arguments)
    results = {}
    if arguments.only and arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    results["machine"] = machine()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        corpus = arguments.corpus
        if corpus is None:
            corpus = prepare(Path(directory))
        wanted = commands(arguments, corpus)
        for name in filter(None, arguments.only.split(",")):
            if name not in wanted:
                parser.error(f"--only={name} is none of {', '.join(wanted)}")
        for name, command in wanted.items():
            if arguments.only and name not in arguments.only.split(","):
                continue
            began = time.perf_counter()
            print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
            lines = run(command)
            results[name] = lines if name == "texts" else lines[-1]
            arguments.results.write_text(json.dumps(results, indent=1) + "\n")
            seconds = time.perf_counter() - began
            print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    _PAGE.write_text(replace_table(_PAGE.read_text(), render(results)))


if __name__ == "__main__":
    main()
