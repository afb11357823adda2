"""Model FLOPs against a count of the products that jax is about to do."""

import math
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import linen as nn
from jax.extend.core import jaxprs_in_params

import toy
from pairs import as_pairs
from spanbert_jax import settings
from spanbert_jax.data.batch import BatchShape, empty_batch
from spanbert_jax.model.flops import forward_flops, step_flops

# A multiple of 128: no padding, which jax multiplies and the formula leaves out.
VOCAB_SIZE = 384


def flops_of(jaxpr: Any) -> int:
    """Two for each multiply-add of each matrix product, inner functions included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += (
                2
                * math.prod(equation.outvars[0].aval.shape)
                * math.prod(left[axis] for axis in contracted)
            )
        # The body of a loop over layers is written once.
        times = equation.params.get("length", 1)
        for inner in jaxprs_in_params(equation.params):
            total += times * flops_of(inner)
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sbo.weight": 0.0},
        {"sbo.boundaries": "left", "sbo.depth": 1},
        {"sbo.depth": 4, "sbo.position_size": 30, "sbo.internal": True},
        {"data.pairs": True},
        {"data.pairs": True, "sbo.weight": 0.0, "model.num_layers": 3},
    ],
)
def test_the_formula_counts_every_matrix_product(changes: dict[str, Any]) -> None:
    config = toy.make_config(Path())
    config.update_from_flattened_dict(changes)
    model = settings.model(config, VOCAB_SIZE)
    batch = as_pairs(empty_batch(BatchShape(3, 24, 8)), slots=5)
    key = jax.random.key(0)
    variables = nn.unbox(
        jax.eval_shape(lambda: model.init(key, batch, deterministic=True))
    )
    forward = jax.make_jaxpr(lambda v: model.apply(v, batch, deterministic=True))
    counted = flops_of(forward(variables).jaxpr)
    assert forward_flops(model, batch) == counted
    shapes = jax.eval_shape(lambda: batch)
    assert step_flops(model, shapes) == 3 * counted


def test_the_padding_of_the_vocabulary_does_not_count() -> None:
    config = toy.make_config(Path())
    config.sbo.weight = 0.0
    batch = empty_batch(BatchShape(2, 24, 8))
    one, more = (
        forward_flops(settings.model(config, size), batch) for size in (300, 301)
    )
    assert more - one == 2 * 2 * 8 * 64
