"""Times the training step: python benchmarks/step.py prints one JSON line.

L=4 H=256 A=4 FF=1024 V=28996, 8 rows of 512, float32, dropout 0.1, MLM and SBO.

ms_per_step        median of the steps
tokens_per_second  real tokens of a packed batch, by that median
matmul_fraction    the model FLOPs of a step per second, as a share of the rate of a
                   2048-cubed float32 product in the same process; the median over steps
                   of each step against the products run right before and after it
model_gflop        of a step, by formula
"""

from common import prepare_process

prepare_process()

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

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
from spanbert_jax.training.step import StepMetrics, TrainState

_MATMUL_SIZE = 2048
_MATMULS = 4


def make_config(dropout: float) -> ConfigDict:
    """The geometry that is timed."""
    config = default.get_config()
    config.train.batch_size = 8
    config.data.packing = True
    config.model.num_layers = 4
    config.model.hidden_size = 256
    config.model.num_heads = 4
    config.model.intermediate_size = 1024
    config.model.dropout = config.model.attention_dropout = dropout
    config.model.unroll = config.model.num_layers
    return config


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    config = make_config(arguments.dropout)
    with tempfile.TemporaryDirectory() as cache:
        feed = make_feed(config, "", Path(cache))
        size = config.train.batch_size
        batch = make_batch(feed, *shuffled_rows(0, size, feed.plan.num_rows, 0))
    model = settings.model(config, VOCAB_SIZE)
    mesh = make_mesh(config, model.geometry)
    program = make_program(config, model, mesh, feed.shape(size))
    placed, votes = put_batch(batch, mesh, size), cast_votes(program, False)
    state = program.init(jax.random.key(0))

    def update(state: TrainState) -> tuple[TrainState, StepMetrics]:
        state, metrics, _ = program.update(state, placed, votes)
        return jax.block_until_ready((state, metrics))

    multiply = jax.jit(jnp.matmul)
    square = jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), jnp.float32)

    def matmul_rate() -> float:
        start = time.perf_counter()
        for _ in range(_MATMULS):
            multiply(square, square).block_until_ready()
        return _MATMULS * 2 * _MATMUL_SIZE**3 / (time.perf_counter() - start)

    state, _ = update(state)
    matmul_rate()
    flops = step_flops(model, batch)
    seconds, rates, fractions = [], [matmul_rate()], []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        state, _ = update(state)
        seconds.append(time.perf_counter() - start)
        rates.append(matmul_rate())
        fractions.append(flops / seconds[-1] / statistics.mean(rates[-2:]))
    step_seconds = statistics.median(seconds)
    tokens = int((batch["segment_ids"] > 0).sum())
    figures = {
        "ms_per_step": round(1e3 * step_seconds, 1),
        "tokens_per_second": round(tokens / step_seconds),
        "matmul_fraction": round(statistics.median(fractions), 3),
        "matmul_gflop_per_second": round(statistics.median(rates) / 1e9, 1),
        "model_gflop": round(flops / 1e9, 1),
        "dropout": arguments.dropout,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
