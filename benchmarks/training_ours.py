"""A worker: updates of this project's training step.

See rounds.py for how it is talked to, training.py for what its cases are. It writes the
padded batch for the peers' worker: --exchange=DIR gets batch.npz.
"""

from common import prepare_process

prepare_process()

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import step
from feeds import VOCAB_SIZE, make_feed
from flow import flow
from rounds import Case, peak_bytes, serve
from spanbert_jax import settings
from spanbert_jax.data.batch import Batch, Feed, make_batch
from spanbert_jax.data.plan import shuffled_rows
from spanbert_jax.model.flops import step_flops
from spanbert_jax.training.program import cast_votes, make_program
from spanbert_jax.training.sharding import make_mesh, put_batch

_MATMUL_SIZE = 2048
_MATMULS = 4
# More than any benchmark does.
_STEPS = range(100_000)


class Update(NamedTuple):
    """A compiled update, and what it is.

    Attributes:
        run: does it, of a state of its own, on a batch.
        gflop: by formula.
        parameter_bytes: of the parameters.
        state_bytes: of them and the optimiser's state.
        temporary_bytes: what it needs beside its arguments, as the compiler says.
        compile_seconds: of tracing and compiling.
    """

    run: Callable[[Batch], None]
    gflop: float
    parameter_bytes: int
    state_bytes: int
    temporary_bytes: int
    compile_seconds: float

    def describe(self) -> dict[str, float]:
        """All but the function."""
        return {name: x for name, x in self._asdict().items() if name != "run"}


def make_config(arguments: argparse.Namespace) -> ConfigDict:
    """That of step.py, in another size."""
    config = step.make_config("small", arguments.dropout)
    model = config.model
    model.num_layers, model.hidden_size, model.num_heads, model.intermediate_size = (
        arguments.geometry
    )
    # All layers in a row, where step.py says so.
    if model.unroll > 1:
        model.unroll = model.num_layers
    model.max_positions = config.data.block_length = arguments.length
    config.train.batch_size = arguments.rows
    return config


def everywhere(batch: Batch) -> Batch:
    """A batch with a slot for each place; those that are no target count as nothing.

    What a model does whose MLM head gathers nothing.
    """
    slots, places = batch["target_ids"].shape, batch["token_ids"].shape
    wide = {
        key: np.zeros(places, array.dtype) if array.shape == slots else array
        for key, array in batch.items()
    }
    wide["target_positions"][:] = np.arange(places[1])
    row = np.arange(places[0])[:, None]
    for key in ("target_ids", "target_weights"):
        # Empty slots point at place 0, which is [CLS] and never a target.
        wide[key][row, batch["target_positions"]] = batch[key]
    return wide


def fixed(config: ConfigDict, feed: Feed) -> Batch:
    """The first batch of a run."""
    rows = config.train.batch_size
    return make_batch(feed, *shuffled_rows(0, rows, feed.plan.num_rows, feed.seed))


def make_update(config: ConfigDict, feed: Feed, like: Batch) -> Update:
    """Makes a state, and compiles its update for batches like one."""
    model = settings.model(config, VOCAB_SIZE)
    mesh, rows = make_mesh(config, model.geometry), config.train.batch_size
    slots = like["target_ids"].shape[1]
    shape = dataclasses.replace(feed.shape(rows), target_slots=slots)
    program = make_program(config, model, mesh, shape)
    votes = cast_votes(program, False)
    state = program.init(jax.random.key(0))
    parameter_bytes, state_bytes = _bytes(state.params), _bytes(state)
    start = time.perf_counter()
    update = program.update.lower(state, put_batch(like, mesh, rows), votes).compile()
    compile_seconds = time.perf_counter() - start

    def run(batch: Batch) -> None:
        nonlocal state
        state, metrics, _ = update(state, put_batch(batch, mesh, rows), votes)
        jax.block_until_ready((state, metrics))

    return Update(
        run=run,
        gflop=step_flops(model, like) / 1e9,
        parameter_bytes=parameter_bytes,
        state_bytes=state_bytes,
        temporary_bytes=update.memory_analysis().temp_size_in_bytes,
        compile_seconds=compile_seconds,
    )


def _bytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def matmul() -> Case:
    """Products of square float32 matrices; the amount is GFLOP."""
    multiply = jax.jit(jnp.matmul)
    square = jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), jnp.float32)

    def work() -> dict[str, float]:
        for _ in range(_MATMULS):
            multiply(square, square).block_until_ready()
        return {"amount": _MATMULS * 2 * _MATMUL_SIZE**3 / 1e9}

    return work


def make_case(update: Update, source: Iterator[Batch]) -> Case:
    """An update on the next batch; its amount is the places of it."""

    def work() -> dict[str, float]:
        batch = next(source)
        update.run(batch)
        return {"amount": batch["token_ids"].size}

    return work


def prepare(
    arguments: argparse.Namespace, cache: Path
) -> tuple[dict[str, Any], dict[str, Case]]:
    """What describes the worker, and the cases that are asked for, by name."""
    config = make_config(arguments)
    config.data.packing = True
    packed = make_feed(config, arguments.corpus, cache)
    config.data.packing = False
    padded = make_feed(config, arguments.corpus, cache)
    batch = fixed(config, padded)
    np.savez(arguments.exchange / "batch.npz", **batch)
    sources = {
        "padded": itertools.repeat(batch),
        "packed": itertools.repeat(fixed(config, packed)),
        "flowing": flow(packed, arguments.rows, _STEPS, config.data.workers),
    }
    updates, cases = {}, {"matmul": matmul()}
    if asked := [case for case in sources if case in arguments.cases]:
        updates["both"] = make_update(config, padded, batch)
        cases |= {case: make_case(updates["both"], sources[case]) for case in asked}
    if "everywhere" in arguments.cases:
        wide = everywhere(batch)
        config.sbo.weight = 0.0
        updates["everywhere"] = make_update(config, padded, wide)
        cases["everywhere"] = make_case(updates["everywhere"], itertools.repeat(wide))
    fills = {"packed": packed, "padded": padded}
    description = {
        "jax": jax.__version__,
        "fill": {
            name: feed.plan.fill(arguments.length) for name, feed in fills.items()
        },
        "updates": {name: update.describe() for name, update in updates.items()},
    }
    return description, cases


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="", help="default: a generated text")
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=("padded", "packed", "flowing", "everywhere"),
        required=True,
    )
    parser.add_argument("--geometry", nargs=4, type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--dropout", type=float, required=True)
    arguments = parser.parse_args()
    imported = {"imported_bytes": peak_bytes()}
    with tempfile.TemporaryDirectory() as cache:
        description, cases = prepare(arguments, Path(cache))
        serve(imported | description, cases)


if __name__ == "__main__":
    main()
