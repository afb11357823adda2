"""Compares meshes with one device: python benchmarks/parity.py prints a Markdown table.

Two layers of 64, 8 padded rows of 32, a vocabulary of 512, float32, no dropout, a rate
of 1e-3, on eight virtual CPU devices. Each figure is the largest difference:

first loss      of the first update, relative
gradients       of a tensor's first gradient, in norm, relative to the larger of its own
                norm and a thousandth of the whole gradient's
loss            over five updates, absolute
parameters      after them, absolute
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from common import prepare_process

prepare_process()

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from configs import default
from feeds import make_feed
from spanbert_jax import settings
from spanbert_jax.data.batch import Batch, BatchShape, make_batch
from spanbert_jax.data.plan import shuffled_rows
from spanbert_jax.training.program import cast_votes, make_program
from spanbert_jax.training.sharding import make_mesh, on, put_batch, replicated
from spanbert_jax.training.step import loss_and_gradients

_UPDATES = 5
_VOCAB_SIZE = 512
# Sizes of mesh.data, mesh.fsdp, mesh.tensor, and microbatches.
_LAYOUTS = (
    ((8, 1, 1), 1),
    ((1, 8, 1), 1),
    ((2, 4, 1), 1),
    ((2, 2, 2), 1),
    ((1, 2, 4), 1),
    ((2, 2, 2), 2),
)


def make_config(mesh: tuple[int, int, int], accumulation: int) -> ConfigDict:
    """The toy, on a mesh."""
    config = default.get_config()
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh
    config.train.accumulation = accumulation
    config.train.batch_size = 8
    config.data.block_length = 32
    config.model.num_layers = 2
    config.model.hidden_size = 64
    config.model.num_heads = 4
    config.model.intermediate_size = 128
    config.model.dropout = config.model.attention_dropout = 0.0
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 1
    return config


class Outcome(NamedTuple):
    """Of five updates, on the host."""

    losses: np.ndarray
    gradients: Any
    params: Any


def run(config: ConfigDict, batch: Batch, shape: BatchShape) -> Outcome:
    """Updates a fresh state on one batch, and differentiates at its start."""
    model = settings.model(config, _VOCAB_SIZE)
    mesh = make_mesh(config, model.geometry)
    program = make_program(config, model, mesh, shape)
    differentiate = jax.jit(
        functools.partial(
            loss_and_gradients,
            model=model,
            weights=settings.loss_weights(config),
            accumulation=config.train.accumulation,
        ),
        out_shardings=replicated(mesh),
    )
    with on(mesh):
        placed = put_batch(batch, mesh, shape.rows)
        votes = cast_votes(program, False)
        state = program.init(jax.random.key(0))
        gradients = jax.device_get(
            differentiate(state.params, placed, jax.random.key(0))[1]
        )
        losses = []
        for _ in range(_UPDATES):
            state, metrics, _ = program.update(state, placed, votes)
            losses.append(float(metrics.loss))
        return Outcome(np.array(losses), gradients, jax.device_get(state.params))


def compare(one: Outcome, other: Outcome) -> list[float]:
    """The figures of the table."""
    floor = 1e-3 * float(optax.tree.norm(one.gradients))
    gradients = jax.tree.map(
        lambda a, b: np.linalg.norm(a - b) / max(np.linalg.norm(a), floor),
        one.gradients,
        other.gradients,
    )
    params = jax.tree.map(lambda a, b: np.abs(a - b).max(), one.params, other.params)
    losses = np.abs(one.losses - other.losses)
    return [
        losses[0] / one.losses[0],
        max(jax.tree.leaves(gradients)),
        losses.max(),
        max(jax.tree.leaves(params)),
    ]


def main() -> None:
    """Prints the table."""
    config = make_config((1, 1, 1), 1)
    rows = config.train.batch_size
    with tempfile.TemporaryDirectory() as cache:
        feed = make_feed(config, "", Path(cache))
        batch = make_batch(feed, *shuffled_rows(0, rows, feed.plan.num_rows, 0))
    for key in ("token_ids", "target_ids"):
        batch[key] %= _VOCAB_SIZE
    shape = feed.shape(rows)
    expected = run(config, batch, shape)
    names = ("data x fsdp x tensor", "microbatches")
    kinds = ("first loss", "gradients", "loss", "parameters")
    print(f"| {' | '.join((*names, *kinds))} |\n|{'---|' * 6}")
    for mesh, parts in _LAYOUTS:
        figures = compare(expected, run(make_config(mesh, parts), batch, shape))
        cells = [" x ".join(map(str, mesh)), str(parts), *(f"{x:.1e}" for x in figures)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
