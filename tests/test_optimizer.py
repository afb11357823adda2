"""The schedule and AdamW against formulas written out by hand."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from ml_collections import ConfigDict

import toy
from pairs import as_pairs
from spanbert_jax import settings
from spanbert_jax.data.batch import BatchShape, empty_batch
from spanbert_jax.training.optimizer import decay_mask, learning_rate, make_optimizer

Tree = dict[str, Any]


def make_config(steps: int, warmup: int, peak: float, end: float = 0.0) -> ConfigDict:
    config = toy.make_config(Path())
    config.train.steps = steps
    config.optimizer.warmup_steps = warmup
    config.optimizer.learning_rate = peak
    config.optimizer.end_learning_rate = end
    return config


def rate_of(update: int, steps: int, warmup: int, peak: float, end: float) -> float:
    """The rate of an update, counted from 1.

    Warm-up: the first `warmup` updates climb in equal steps, and the last of them has
    the peak. Then equal steps down, so that the last of `steps` has the end value;
    without warm-up the first update has the peak. It stays there ever after.
    """
    top = max(warmup, 1)
    if update <= top:
        return peak * update / top
    if update >= steps:
        return end
    return peak - (peak - end) * (update - top) / (steps - top)


SCHEDULES = [
    (50, 0),
    (50, 1),
    (50, 49),
    (50, 50),
    (1, 0),
    (1, 1),
    (2, 1),
    (100, 10),
    (2_400_000, 10_000),
]


def updates_to_look_at(steps: int, warmup: int) -> list[int]:
    around = {1, 2, warmup, warmup + 1, steps // 2, steps - 1, steps}
    around |= {steps + 1, 10 * steps}
    return sorted(u for u in around | set(range(1, min(steps, 100) + 1)) if u >= 1)


@pytest.mark.parametrize("end", [0.0, 2e-5])
@pytest.mark.parametrize(("steps", "warmup"), SCHEDULES)
def test_the_rate_is_that_of_the_formula(steps: int, warmup: int, end: float) -> None:
    rate = learning_rate(make_config(steps, warmup, 1e-4, end))
    for update in updates_to_look_at(steps, warmup):
        expected = rate_of(update, steps, warmup, 1e-4, end)
        assert float(rate(update - 1)) == pytest.approx(expected, rel=1e-5, abs=1e-11)


@pytest.mark.parametrize(("steps", "warmup"), SCHEDULES)
def test_the_rate_reaches_the_peak_and_no_more_and_is_never_negative(
    steps: int, warmup: int
) -> None:
    rate = learning_rate(make_config(steps, warmup, 1e-4))
    rates = [float(rate(u - 1)) for u in updates_to_look_at(steps, warmup)]
    assert np.isfinite(rates).all()
    assert min(rates) >= 0
    assert max(rates) == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize("end", [0.0, 2e-5])
@pytest.mark.parametrize(
    ("steps", "warmup"), [(s, w) for s, w in SCHEDULES if w < s and s > 1]
)
def test_the_last_update_and_those_after_it_have_the_end_value(
    steps: int, warmup: int, end: float
) -> None:
    rate = learning_rate(make_config(steps, warmup, 1e-4, end))
    for update in (steps, steps + 1, 2 * steps):
        assert float(rate(update - 1)) == pytest.approx(end, rel=1e-6, abs=1e-12)


def test_a_traced_count_has_the_same_rate() -> None:
    rate = learning_rate(make_config(20, 5, 1e-3))
    traced = jax.jit(jax.vmap(rate))(jnp.arange(25))
    np.testing.assert_allclose(traced, [rate(u) for u in range(25)], rtol=1e-6)


def parameters_of_one_layer() -> Tree:
    config = toy.make_config(Path())
    config.model.num_layers = 1
    config.data.pairs = True
    model = settings.model(config, vocab_size=50)
    init = functools.partial(model.init, deterministic=True)
    batch = as_pairs(empty_batch(BatchShape(1, 8, 8)))
    return nn.unbox(jax.eval_shape(init, jax.random.key(0), batch)["params"])


def test_tables_and_kernels_decay_biases_and_layer_norm_do_not() -> None:
    linear = {"kernel": True, "bias": False}
    norm = {"scale": False, "bias": False}
    table = {"embedding": True}
    params = parameters_of_one_layer()
    [position_table] = set(params["sbo_head"]) - {
        "dense_1",
        "dense_2",
        "norm_1",
        "norm_2",
        "projection",
    }
    assert decay_mask(params) == {
        "encoder": {
            "token_embedding": table,
            "position_embedding": table,
            "type_embedding": table,
            "embedding_norm": norm,
            "layers": {
                "attention": dict.fromkeys(("query", "key", "value", "output"), linear),
                "attention_norm": norm,
                "intermediate": linear,
                "output": linear,
                "output_norm": norm,
            },
        },
        "mlm_head": {"dense": linear, "norm": norm, "projection": {"bias": False}},
        "sbo_head": {
            position_table: table,
            "dense_1": linear,
            "norm_1": norm,
            "dense_2": linear,
            "norm_2": norm,
            "projection": {"bias": False},
        },
        "nsp_head": {"pooler": linear, "relationship": linear},
    }


def test_a_parameter_of_a_new_kind_is_an_error() -> None:
    params = {"layer": {"kernel": jnp.zeros(2), "temperature": jnp.zeros(2)}}
    with pytest.raises(ValueError, match="temperature"):
        decay_mask(params)
    with pytest.raises(ValueError, match="temperature"):
        make_optimizer(toy.make_config(Path())).init(params)


SHAPES = {
    "dense": {"kernel": (3, 4), "bias": (4,)},
    "norm": {"scale": (4,), "bias": (4,)},
    "table": {"embedding": (5, 3)},
}


def random_tree(seed: int, norm: float | None = None) -> Tree:
    """Of the shapes above; scaled to a global norm, if one is given."""
    rng = np.random.default_rng(seed)
    tree = {
        module: {name: rng.normal(size=shape) for name, shape in leaves.items()}
        for module, leaves in SHAPES.items()
    }
    factor = 1.0
    if norm is not None:
        squares = sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(tree))
        factor = norm / np.sqrt(squares)
    return jax.tree.map(lambda leaf: (factor * leaf).astype(np.float32), tree)


def run(config: ConfigDict, params: Tree, gradients: list[Tree]) -> list[Tree]:
    """The parameters after each update."""
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    seen = []
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


def adamw_by_hand(config: ConfigDict, params: Tree, gradients: list[Tree]) -> Tree:
    """Loshchilov and Hutter's algorithm 2, with the gradient clipped before it.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    p = p - rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p).
    """
    o = config.optimizer
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    first = jax.tree.map(np.zeros_like, params)
    second = jax.tree.map(np.zeros_like, params)
    for t, gradient in enumerate(gradients, start=1):
        squares = sum(
            float((g.astype(float) ** 2).sum()) for g in jax.tree.leaves(gradient)
        )
        clip = min(1.0, o.clip_norm / np.sqrt(squares))
        rate = rate_of(
            t, config.train.steps, o.warmup_steps, o.learning_rate, o.end_learning_rate
        )
        for module, leaves in params.items():
            for name in leaves:
                g = clip * gradient[module][name].astype(np.float64)
                m = o.beta1 * first[module][name] + (1 - o.beta1) * g
                v = o.beta2 * second[module][name] + (1 - o.beta2) * g**2
                first[module][name], second[module][name] = m, v
                move = (
                    m / (1 - o.beta1**t) / (np.sqrt(v / (1 - o.beta2**t)) + o.epsilon)
                )
                decay = o.weight_decay if name in ("kernel", "embedding") else 0.0
                leaves[name] = leaves[name] - rate * (move + decay * leaves[name])
    return params


# In the order of the updates: below the clip, far above it, just above, far below.
NORMS = [0.5, 10.0, 1.1, 1e-3]


@pytest.mark.parametrize("updates", [1, 4])
def test_updates_are_those_of_adamw_by_hand(updates: int) -> None:
    config = make_config(20, 5, 1e-2)
    params = random_tree(0)
    gradients = [random_tree(10 + i, norm) for i, norm in enumerate(NORMS[:updates])]
    found = run(config, params, gradients)[-1]
    expected = adamw_by_hand(config, params, gradients)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=5e-7),
        found,
        expected,
    )


def test_without_gradient_tables_and_kernels_shrink_by_rate_times_decay() -> None:
    config = make_config(20, 0, 1e-2)
    params = random_tree(1)
    zero = jax.tree.map(np.zeros_like, params)
    [found] = run(config, params, [zero])
    shrunk = 1 - 1e-2 * 0.1
    for module, leaves in found.items():
        for name, leaf in leaves.items():
            factor = shrunk if name in ("kernel", "embedding") else 1.0
            np.testing.assert_allclose(leaf, factor * params[module][name], rtol=1e-6)


def test_gradients_are_clipped_at_a_global_norm_of_1() -> None:
    # AdamW forgets the scale of its first gradient: the second one shows it.
    config = make_config(20, 0, 1e-2)
    params, before = random_tree(2), random_tree(3, 0.5)
    after = {
        norm: run(config, params, [before, random_tree(4, norm)])[-1]
        for norm in (0.5, 1.0, 10.0)
    }
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-7),
        after[10.0],
        after[1.0],
    )
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[0.5], after[1.0])
    assert max(jax.tree.leaves(moved)) > 1e-4
