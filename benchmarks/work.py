"""Measures cost against work: python benchmarks/work.py prints one JSON line.

length  the packed training step at block lengths of 128, 256 and 512, as many places in
        each: places, tokens and FLOPs a second; attention alone grows with the length
size    the same at the small and the base geometry: FLOPs a second should not fall

By CPU time of all threads and by wall time, medians; `utilization` is the model FLOPs
of a step per CPU second over those of a 2048-cubed float32 product in the same round.
The processes of `length` take turns, those of `size` too, in few rounds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import training
from rounds import Player, rates, take_turns

_LENGTHS = (128, 256, 512)
_SIZES = ("small", "base")
_WARM_UP = 1


def measure(
    runs: Mapping[str, argparse.Namespace], rounds: int
) -> dict[str, dict[str, Any]]:
    """The figures of some geometries and batches, which take turns."""
    with ExitStack() as stack:
        workers, described, players = {}, {}, {}
        for name, arguments in runs.items():
            exchange = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            worker = training.ours(arguments, ["packed"], exchange)
            workers[name] = stack.enter_context(worker)
            # One after the other: compiling takes memory.
            described[name] = worker.describe()
        for name, worker in workers.items():
            players[name] = Player(worker, "packed")
            players[f"{name}:matmul"] = Player(worker, "matmul")
        measures = take_turns(players, rounds, _WARM_UP)
    figures = {}
    for name, arguments in runs.items():
        gflop = described[name]["updates"]["both"]["gflop"]
        taken, products = measures[name], measures[f"{name}:matmul"]
        figures[name] = {
            "rows": arguments.rows,
            "length": arguments.length,
            "places_per_second": {k: round(x) for k, x in rates(taken).items()},
            "gflop": round(gflop, 1),
            "utilization": round(
                statistics.median(
                    gflop / one.cpu / product.rate("cpu")
                    for one, product in zip(taken, products, strict=True)
                ),
                3,
            ),
        }
    return figures


def vary(
    arguments: argparse.Namespace, **changes: Sequence[Any]
) -> dict[str, argparse.Namespace]:
    """Arguments with some changed, by the first of what changes."""
    names = list(changes)
    return {
        str(values[0]): argparse.Namespace(
            **(vars(arguments) | dict(zip(names, values, strict=True)))
        )
        for values in zip(*changes.values(), strict=True)
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    training.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base_rounds", type=int, default=2)
    parser.add_argument("--base_rows", type=int, default=2)
    arguments = parser.parse_args()
    places = arguments.rows * arguments.length
    lengths = [length for length in _LENGTHS if length <= arguments.length]
    by_length = vary(
        arguments, length=lengths, rows=[places // length for length in lengths]
    )
    by_size = vary(arguments, size=_SIZES, rows=[arguments.base_rows] * len(_SIZES))
    figures = {
        "length": measure(by_length, arguments.rounds),
        "size": measure(by_size, arguments.base_rounds),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
