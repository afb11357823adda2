"""Compares steps with PyTorch's: python benchmarks/training.py prints one JSON line.

Ours and transformers' BertForMaskedLM with PyTorch's AdamW take turns on the same cores
with as many threads, float32, dropout 0.1, gradients clipped at 1. Ratios are ours over
theirs within a round, of rates by CPU seconds of all threads and by wall time: median,
lowest, highest.

padded       ours, MLM and SBO, on rows of one block each
packed       ours, MLM and SBO, on rows filled with blocks
everywhere   ours, MLM alone, with logits of all places as theirs, on the padded rows
eager        theirs, MLM, on the padded rows
compiled     the same after torch.compile
full         theirs, eager, without any padding and so without a mask: what text costs
             that is run together over the ends of documents

equal_padding   padded against eager and compiled
real_tokens     packed against eager and compiled, in tokens without padding, at the
                mean fill of all rows of the text
equal_work      everywhere against eager and compiled
run_together    packed against full, in tokens

Ours keeps the memory that it frees, "kept" of allocator.py. PyTorch is tried with each
of the allocators there; each of its cases then plays with that which takes it the least
CPU time, as "allocators" tells. Without --corpus a text is generated; the step takes
the same time on any, the fill differs.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peers
from allocator import ALLOCATORS
from rounds import (
    Measures,
    Player,
    Worker,
    available_cores,
    compare,
    rates,
    take_turns,
)

# Layers, hidden size, heads, intermediate size.
GEOMETRIES = {
    "tiny": (2, 64, 2, 256),
    "small": (4, 256, 4, 1024),
    "base": (12, 768, 12, 3072),
}
# BERT's cased vocabulary, as in feeds.py.
VOCAB_SIZE = 28_996
_OURS = ("padded", "packed", "everywhere")
_THEIRS = ("eager", "compiled", "full")
_TRIALS = 3
_WARM_UP = 2


def ours(
    arguments: argparse.Namespace,
    cases: Sequence[str],
    exchange: Path,
    allocator: str = "kept",
) -> Worker:
    """Starts a worker of ours, of the geometry and batch that the arguments say."""
    words = [f"--corpus={arguments.corpus}", f"--rows={arguments.rows}"]
    words += [f"--exchange={exchange}", *_shape(arguments), "--cases", *cases]
    return Worker("training_ours.py", words, cores=arguments.cores, allocator=allocator)


def theirs(
    arguments: argparse.Namespace,
    cases: Sequence[str],
    exchange: Path,
    allocator: str,
) -> Worker:
    """Starts a worker of the peers; ours must have written its batch before."""
    words = [f"--exchange={exchange}", f"--vocab_size={VOCAB_SIZE}"]
    words += [*_shape(arguments), "--cases", *cases]
    # What torch.compile makes is not kept from run to run.
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(exchange / "inductor")}
    return Worker(
        "training_peers.py",
        words,
        str(arguments.peer_python),
        arguments.cores,
        allocator,
        kept,
    )


def _shape(arguments: argparse.Namespace) -> list[str]:
    return [
        f"--length={arguments.length}",
        f"--dropout={arguments.dropout}",
        "--geometry",
        *map(str, GEOMETRIES[arguments.size]),
    ]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    with ExitStack() as stack:
        exchange = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Without peers nobody asks how fast the others are.
        cases = _OURS if arguments.peers else ("packed",)
        worker = stack.enter_context(ours(arguments, cases, exchange))
        players = {case: Player(worker, case) for case in (*cases, "matmul")}
        description, peer = worker.describe(), {}
        if arguments.peers:
            peer, chosen = _choose_peers(arguments, exchange, stack)
            players |= chosen
        measures = take_turns(players, arguments.rounds, _WARM_UP)
    return _figures(arguments, description, peer, measures)


def _choose_peers(
    arguments: argparse.Namespace, exchange: Path, stack: ExitStack
) -> tuple[dict[str, Any], dict[str, Player]]:
    """What describes the peers, and each of their cases with its fastest allocator."""
    description: dict[str, Any] = {}
    workers, chosen = {}, {}
    for allocator in ALLOCATORS:
        worker = theirs(arguments, arguments.peer_cases, exchange, allocator)
        workers[allocator] = stack.enter_context(worker)
        description = worker.describe()
    for case in arguments.peer_cases:
        tried = {name: Player(worker, case) for name, worker in workers.items()}
        measures = take_turns(tried, _TRIALS, warm_up=1)
        chosen[case] = max(tried, key=lambda name: rates(measures[name])["cpu"])
    players = {case: Player(workers[name], case) for case, name in chosen.items()}
    players["peers_matmul"] = Player(workers["usual"], "matmul")
    return description | {"allocators": chosen}, players


def _figures(
    arguments: argparse.Namespace,
    description: Mapping[str, Any],
    peer: Mapping[str, Any],
    measures: Measures,
) -> dict[str, Any]:
    fill = description["fill"]
    gflop = description["updates"]["both"]["gflop"]
    matmul = measures["matmul"]
    figures = {
        "size": arguments.size,
        "geometry": GEOMETRIES[arguments.size],
        "rows": arguments.rows,
        "length": arguments.length,
        "dropout": arguments.dropout,
        "cores": len(available_cores()[: arguments.cores or None]),
        "corpus": Path(arguments.corpus).name or "generated",
        "rounds": arguments.rounds,
        "fill": {name: round(share, 4) for name, share in fill.items()},
        "places_per_second": {
            name: {clock: round(x) for clock, x in rates(taken).items()}
            for name, taken in measures.items()
            if "matmul" not in name
        },
        "matmul_gflop_per_second": {
            name: {clock: round(x, 1) for clock, x in rates(taken).items()}
            for name, taken in measures.items()
            if "matmul" in name
        },
        # Of the machine's rate for a float32 product, by CPU time, within a round.
        "utilization": round(
            statistics.median(
                gflop / one.cpu / product.rate("cpu")
                for one, product in zip(measures["packed"], matmul, strict=True)
            ),
            3,
        ),
        "compile_seconds": description["updates"]["both"]["compile_seconds"],
        "jax": description["jax"],
    }
    if not peer:
        return figures
    batched = ("eager", "compiled")
    # What a place of ours counts, where one of theirs counts 1.
    pairs = {
        "equal_padding": ("padded", batched, 1.0),
        "real_tokens": ("packed", batched, fill["packed"] / fill["padded"]),
        "equal_work": ("everywhere", batched, 1.0),
        "run_together": ("packed", ("full",), fill["packed"]),
    }
    ratios = {
        name: {
            other: compare(measures[case], measures[other], worth)
            for other in others
            if other in measures
        }
        for name, (case, others, worth) in pairs.items()
    }
    return figures | {"ratios": ratios, "peers": peer}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a training step."""
    parser.add_argument("--corpus", default="", help="default: a generated text")
    parser.add_argument("--size", choices=GEOMETRIES, default="small")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--cores", type=int, default=0, help="default: all")
    peers.add_arguments(parser)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--peer_cases", nargs="+", choices=_THEIRS, default=list(_THEIRS)
    )
    arguments = parser.parse_args()
    peers.check(arguments)
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    sys.exit(main())
