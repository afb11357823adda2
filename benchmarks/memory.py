"""Measures the memory of training: python benchmarks/memory.py prints one JSON line.

Processes of their own do two updates each; peak_bytes is what was resident of them at
most, code, libraries, the compiler's work and the generated text included.

update    ours, on one packed batch
training  the same with batches that flow from the store through tf.data, as in a run
eager     transformers' BertForMaskedLM with AdamW, on a padded batch of as many places

With each of the allocators of allocator.py; `training` with "kept" alone, which is what
`make demo` sets. Beside them stands what they are made of: parameter_bytes, state_bytes
(parameters and the optimiser's two moments), temporary_bytes (activations, gradients
and what else the compiled update needs beside its state, as the compiler says),
imported_bytes (the process before it has any of them).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
import training
from allocator import ALLOCATORS
from rounds import Worker

_UPDATES = 2
# Of our worker, by the name of the figure.
_CASES = {"update": "packed", "training": "flowing"}


def peak(worker: Worker, case: str) -> int:
    """The most that was resident up to the end of some updates."""
    return max(worker.work(case).peak_bytes for _ in range(_UPDATES))


def measure(
    arguments: argparse.Namespace, names: Sequence[str], allocator: str
) -> dict[str, Any]:
    """The figures of some of our cases and of the peer's."""
    with tempfile.TemporaryDirectory() as directory:
        exchange = Path(directory)
        figures: dict[str, Any] = {}
        for name in names:
            case = _CASES[name]
            with training.ours(arguments, [case], exchange, allocator) as worker:
                described = worker.describe()
                figures[name] = {
                    "imported_bytes": described["imported_bytes"],
                    "peak_bytes": peak(worker, case),
                }
        kinds = ("parameter_bytes", "state_bytes", "temporary_bytes")
        figures |= {kind: described["updates"]["both"][kind] for kind in kinds}
        if arguments.peers:
            with training.theirs(arguments, ["eager"], exchange, allocator) as worker:
                figures["eager"] = {
                    "imported_bytes": worker.describe()["imported_bytes"],
                    "peak_bytes": peak(worker, "eager"),
                }
    return figures


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    training.add_arguments(parser)
    arguments = parser.parse_args()
    peers.check(arguments)
    figures = {
        "size": arguments.size,
        "rows": arguments.rows,
        "length": arguments.length,
    }
    for allocator in ALLOCATORS:
        names = tuple(_CASES) if allocator == "kept" else ("update",)
        figures[allocator] = measure(arguments, names, allocator)
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
