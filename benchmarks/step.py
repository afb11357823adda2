"""Times the training step: python benchmarks/step.py prints a JSON line a setting.

Packed rows of 512, 8 a batch, V=28996, float32, MLM and SBO, on all cores.

size                  small: L=4 H=256 A=4 FF=1024, once with dropout 0.1 and once
                      without; base: L=12 H=768 A=12 FF=3072, without
ms_per_step           median of the steps
cpu_ms_per_step       the same of the CPU time of all threads, in which it shows less
                      what else the machine does
tokens_per_second     real tokens of a batch, by the median step
matmul_fraction       the model FLOPs of a step per second, as a share of the rate of a
                      2048-cubed float32 product in the same process; the median over
                      steps of each step against the products right before and after it
cpu_matmul_fraction   the same per second of CPU time
model_gflop           of a step, by formula
"""

from common import prepare_process

prepare_process("kept")

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from configs import default
from feeds import VOCAB_SIZE, make_feed
from spanbert_jax import settings
from spanbert_jax.data.batch import make_batch
from spanbert_jax.data.plan import shuffled_rows
from spanbert_jax.model.flops import step_flops
from spanbert_jax.training.program import cast_votes, make_program
from spanbert_jax.training.sharding import make_mesh, put_batch

_MATMUL_SIZE = 2048
_MATMULS = 4
_MATMUL_FLOPS = _MATMULS * 2 * _MATMUL_SIZE**3
# By size: layers, hidden size, heads, width of the feed-forward layer; and the dropout
# rates that are timed.
_SIZES = {
    "small": ((4, 256, 4, 1024), (0.1, 0.0)),
    "base": ((12, 768, 12, 3072), (0.0,)),
}


class Timing(NamedTuple):
    """Seconds, by the clock and of all threads' CPU time."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Timing:
    """Calls a function once."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def make_config(size: str, dropout: float) -> ConfigDict:
    """The geometry that is timed; all layers in the body of the loop over them."""
    config = default.get_config()
    config.train.batch_size = 8
    config.data.packing = True
    model = config.model
    (layers, hidden_size, heads, width), _ = _SIZES[size]
    model.num_layers = model.unroll = layers
    model.hidden_size = hidden_size
    model.num_heads = heads
    model.intermediate_size = width
    model.dropout = model.attention_dropout = dropout
    return config


def measure(size: str, dropout: float, steps: int) -> dict[str, object]:
    """The figures of a setting."""
    config = make_config(size, dropout)
    with tempfile.TemporaryDirectory() as cache:
        feed = make_feed(config, "", Path(cache))
        rows = config.train.batch_size
        batch = make_batch(feed, *shuffled_rows(0, rows, feed.plan.num_rows, 0))
    model = settings.model(config, VOCAB_SIZE)
    mesh = make_mesh(config, model.geometry)
    program = make_program(config, model, mesh, feed.shape(rows))
    placed, votes = put_batch(batch, mesh, rows), cast_votes(program, False)
    state = program.init(jax.random.key(0))
    multiply = jax.jit(jnp.matmul)
    square = jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), jnp.float32)

    def update() -> None:
        nonlocal state
        state, metrics, _ = program.update(state, placed, votes)
        jax.block_until_ready((state, metrics))

    def multiply_all() -> None:
        for _ in range(_MATMULS):
            multiply(square, square).block_until_ready()

    update()
    multiply_all()
    updates, products = [], [timed(multiply_all)]
    for _ in range(steps):
        updates.append(timed(update))
        products.append(timed(multiply_all))
    flops = step_flops(model, batch)
    tokens = int((batch["segment_ids"] > 0).sum())
    seconds = statistics.median(update.wall for update in updates)
    return {
        "size": size,
        "dropout": dropout,
        "ms_per_step": round(1e3 * seconds, 1),
        "cpu_ms_per_step": round(1e3 * statistics.median(u.cpu for u in updates), 1),
        "tokens_per_second": round(tokens / seconds),
        "matmul_fraction": fraction(flops, updates, products, "wall"),
        "cpu_matmul_fraction": fraction(flops, updates, products, "cpu"),
        "matmul_gflop_per_second": round(
            _MATMUL_FLOPS / 1e9 / statistics.median(p.wall for p in products), 1
        ),
        "model_gflop": round(flops / 1e9, 1),
        "device": jax.devices()[0].device_kind,
    }


def fraction(
    flops: int, updates: list[Timing], products: list[Timing], clock: str
) -> float:
    """The median share of the products' rate, each update against its neighbours.

    Args:
        flops: of an update.
        updates: their timings.
        products: those before the first update, between each two, and after the last.
        clock: a field of `Timing`.

    Returns:
        The share, to three digits.
    """
    of_products = [getattr(product, clock) for product in products]
    shares = [
        flops / getattr(update, clock) / (2 * _MATMUL_FLOPS / (before + after))
        for update, before, after in zip(
            updates, of_products[:-1], of_products[1:], strict=True
        )
    ]
    return round(statistics.median(shares), 3)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=_SIZES, default="small")
    parser.add_argument("--dropout", type=float, help="this rate alone")
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    rates = _SIZES[arguments.size][1]
    if arguments.dropout is not None:
        rates = (arguments.dropout,)
    for rate in rates:
        figures = measure(arguments.size, rate, arguments.steps)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
