"""Losses and hits against SciPy, and their sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from spanbert_jax.model.losses import Prediction, hits, score, token_losses


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def surprisal(logits: np.ndarray, target_ids: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    chosen = np.take_along_axis(logits, target_ids[..., None], axis=-1)[..., 0]
    return logsumexp(logits, axis=-1) - chosen


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_the_loss_is_minus_log_p(rng: np.random.Generator, scale: float) -> None:
    logits = rng.normal(0, scale, (3, 5, 50)).astype(np.float32)
    target_ids = rng.integers(0, 50, (3, 5))
    losses = np.asarray(token_losses(jnp.asarray(logits), target_ids))
    assert losses.shape == (3, 5)
    np.testing.assert_allclose(
        losses, surprisal(logits, target_ids), rtol=2e-6, atol=4e-7 * max(scale, 10)
    )


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, -1e9, -1e9], 0.0),
        ([-1e4, 1e4, 0.0], 2e4),
        ([1e30, 0.0, 0.0], 0.0),
        ([-1e4, -1e4, -1e4], np.log(3)),
        ([1e4, 1e4, -1e9], np.log(2)),
    ],
)
def test_extreme_logits_have_exact_losses_and_finite_gradients(
    logits: list[float], expected: float
) -> None:
    # float32 numbers near 1e4 are 1e-3 apart.
    loss, gradient = jax.value_and_grad(token_losses)(jnp.array(logits), jnp.array(0))
    np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=1e-3)
    assert np.isfinite(gradient).all()
    assert abs(float(gradient.sum())) < 1e-6


def test_the_gradient_is_the_softmax_less_the_target(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 3, (3, 5, 50)).astype(np.float32)
    target_ids = rng.integers(0, 50, (3, 5))
    slopes = rng.normal(size=(3, 5)).astype(np.float32)
    _, pull = jax.vjp(lambda x: token_losses(x, jnp.asarray(target_ids)), logits)
    expected = softmax(logits.astype(np.float64), axis=-1) - np.eye(50)[target_ids]
    expected *= slopes[..., None]
    np.testing.assert_allclose(*pull(slopes), expected, rtol=0, atol=2e-6)


def test_a_hit_is_the_highest_logit_and_a_tie_counts() -> None:
    logits = jnp.array(
        [[[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [5.0, 5.0, 4.0], [0.0, 0.0, -1.0]]]
    )
    found = hits(logits, jnp.array([[1, 2, 1, 2]]))
    assert found.tolist() == [[True, False, True, False]]


def test_scores_are_sums_over_the_weighted_targets(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 2, (4, 6, 8)).astype(np.float32)
    target_ids = rng.integers(0, 8, (4, 6))
    weights = (rng.random((4, 6)) < 0.6).astype(np.float32)
    counted = weights > 0
    right = logits.argmax(axis=-1) == target_ids
    assert (right & counted).any()
    assert (right & ~counted).any()
    found = score(jnp.asarray(logits), target_ids, weights)
    np.testing.assert_allclose(
        found.loss, surprisal(logits, target_ids)[counted].sum(), rtol=1e-6
    )
    assert float(found.correct) == (right & counted).sum()
    assert float(found.weight) == counted.sum()


def test_nothing_of_weight_0_counts(rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.normal(0, 1e4, (2, 3, 8)), jnp.float32)
    target_ids = rng.integers(0, 8, (2, 3))

    def loss(logits: jax.Array) -> tuple[jax.Array, Prediction]:
        found = score(logits, target_ids, jnp.zeros((2, 3)))
        return found.loss, found

    gradient, found = jax.grad(loss, has_aux=True)(logits)
    assert [float(total) for total in found] == [0, 0, 0]
    assert not np.asarray(gradient).any()


def test_sums_of_parts_are_the_sum_of_the_whole(rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.normal(0, 2, (4, 6, 8)), jnp.float32)
    target_ids = rng.integers(0, 8, (4, 6))
    weights = np.zeros((4, 6), np.float32)
    for row, filled in enumerate((6, 1, 0, 3)):
        weights[row, :filled] = 1
    whole = score(logits, target_ids, weights)
    parts = [score(logits[i], target_ids[i], weights[i]) for i in range(4)]
    for name, total in whole._asdict().items():
        parts_total = sum(float(getattr(part, name)) for part in parts)
        np.testing.assert_allclose(float(total), parts_total, rtol=1e-6)
