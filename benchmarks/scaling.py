"""Forecasts a config over slices of TPUs, and prints the table of docs/scaling.md.

python benchmarks/scaling.py --results=scaling.jsonl

Each slice is compiled by spanbert_jax.dryrun in a process of its own, minutes each;
libtpu must be installed. The batch is shared by all chips (mesh.data=-1), in as few
microbatches as fit. What is in the file of results, for the same config by name, is not
compiled again.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Slices of 8, 32, 64 and 256 chips that can be ordered.
_SLICES = (
    *("v5e:2x4", "v6e:2x4", "v4:2x2x2", "v5p:2x2x2"),
    *("v5e:4x8", "v6e:4x8", "v4:2x4x4", "v5p:2x4x4"),
    *("v5e:8x8", "v6e:8x8", "v4:4x4x4", "v5p:4x4x4"),
    *("v5e:16x16", "v6e:16x16", "v4:4x8x8", "v5p:4x8x8"),
)
# So that a chip of the largest slices has more than a row to work on.
_LARGE_BATCH = 2048
_LARGE_SLICE = 256

_HEAD = (
    "| slice | chips | rows | a chip | GiB a chip | GB sent | ms a step | of them sent"
    " | days | chip-hours |\n|---|---|---|---|---|---|---|---|---|---|"
)
_ACCUMULATION = re.compile(r"--config\.train\.accumulation=([0-9]+)")

Record = dict[str, Any]


def dry_run(arguments: Sequence[str]) -> Record:
    """What the dry run says, as it says it."""
    command = [sys.executable, "-m", "spanbert_jax.dryrun", "--json", *arguments]
    repository = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        command, cwd=repository, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def forecast(arguments: Sequence[str]) -> Record:
    """The forecast with the fewest microbatches that fit; if none, the last tried."""

    def attempt(parts: int, *asks: str) -> Record:
        return dry_run([*arguments, f"--config.train.accumulation={parts}", *asks])

    # A guess first, for it takes seconds; then the compiler, until it agrees.
    parts = 1
    while more := _advised(attempt(parts, "--nocompile")):
        parts = more
    refused, record = 0, attempt(parts)
    while more := _advised(record):
        refused, record = record["accumulation"], attempt(more)
    # The guess, or an advice, may have been too careful.
    while record["fits"] and (fewer := _fewer(record)) > refused:
        tried = attempt(fewer)
        if not tried["fits"]:
            break
        record = tried
    return record


def _advised(record: Record) -> int | None:
    """The microbatches that a forecast asks for; None if it fits, or none would do."""
    found = _ACCUMULATION.search(" ".join(record["remedies"]))
    return int(found[1]) if found else None


def _rows(record: Record) -> int:
    """The rows of a chip in a step."""
    mesh = record["mesh"]
    return record["batch"]["rows"] // (mesh["data"] * mesh["fsdp"])


def _fewer(record: Record) -> int:
    """The next smaller number of microbatches that a chip's rows can be cut into."""
    rows, now = _rows(record), record["accumulation"]
    return max((parts for parts in range(1, now) if rows % parts == 0), default=0)


def row(record: Record) -> str:
    """A line of the table; what a program that is too large sends is not known."""
    batch, schedule, parts = record["batch"], record["schedule"], record["accumulation"]
    share = _rows(record) // parts
    sent = sending = "-"
    if record["collectives"] is not None:
        total = sum(traffic["sent"] for traffic in record["collectives"].values())
        sent = f"{total / 1e9:.2f}"
        sending = f"{1e3 * record['communication_seconds']:.1f}"
    cells = (
        record["topology"],
        record["devices"],
        f"{batch['rows']:,}",
        f"{parts} x {share}" if parts > 1 else share,
        f"{record['memory']['total'] / 2**30:.1f} of {record['available'] / 2**30:.1f}",
        sent,
        f"{1e3 * schedule['step_seconds']:.1f}",
        sending,
        f"{schedule['days']:.2f}",
        f"{schedule['chip_hours']:,.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Compiles what is not yet in the results, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/large.py")
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    lines = arguments.results.read_text() if arguments.results.exists() else ""
    records = [json.loads(line) for line in lines.splitlines()]
    known = {_key(one): one for one in records}
    print(_HEAD)
    for name in _SLICES:
        shared = [f"--config={arguments.config}", f"--topology={name}"]
        size = dry_run([*shared, "--nocompile"])
        batches = [size["batch"]["rows"]]
        if size["devices"] >= _LARGE_SLICE:
            batches.append(_LARGE_BATCH)
        for rows in batches:
            record = known.get((arguments.config, name, rows))
            if record is None:
                made = forecast([*shared, f"--config.train.batch_size={rows}"])
                record = {"config": arguments.config, **made}
                with arguments.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            print(row(record), flush=True)


def _key(record: Record) -> tuple[str, str, int]:
    return record["config"], record["topology"], record["batch"]["rows"]


if __name__ == "__main__":
    main()
