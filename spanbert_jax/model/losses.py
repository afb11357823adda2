"""Losses, as sums with their weights: the caller divides once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Prediction(NamedTuple):
    """How well a head predicted the targets of a batch; float32 scalars.

    Attributes:
        loss: sum of weight * -log P(target).
        correct: sum of the weights of the targets that were hit.
        weight: sum of the weights.
    """

    loss: jax.Array
    correct: jax.Array
    weight: jax.Array


@jax.custom_vjp
def _target_logits(logits: jax.Array, target_ids: jax.Array) -> jax.Array:
    """The logit of each target, looked up.

    A vocabulary that is split over devices stays so: each looks up in its own part.
    """
    return jnp.take_along_axis(logits, target_ids[..., None], axis=-1)[..., 0]


def _look_up(logits: jax.Array, target_ids: jax.Array) -> tuple[jax.Array, tuple]:
    # The logits' shape is all that is wanted of them; who uses them keeps them anyway.
    return _target_logits(logits, target_ids), (logits, target_ids)


def _spread(residuals: tuple, slopes: jax.Array) -> tuple[jax.Array, None]:
    """The gradient as a comparison of every id, which fuses with the softmax's.

    The look-up's own would write zeros over a whole vocabulary first, and scatter.
    """
    logits, target_ids = residuals
    shape = (1,) * target_ids.ndim + logits.shape[-1:]
    ids = jax.lax.broadcasted_iota(jnp.int32, shape, target_ids.ndim)
    return jnp.where(ids == target_ids[..., None], slopes[..., None], 0), None


_target_logits.defvjp(_look_up, _spread)


def token_losses(logits: jax.Array, target_ids: jax.Array) -> jax.Array:
    """-log P(target), P being the softmax of the logits.

    Args:
        logits: float32 [..., V].
        target_ids: integer [...], each in [0, V).

    Returns:
        float32 [...].
    """
    return jax.nn.logsumexp(logits, axis=-1) - _target_logits(logits, target_ids)


def hits(logits: jax.Array, target_ids: jax.Array) -> jax.Array:
    """Whether no other id has a higher logit than the target: bool [...].

    The maximum, not the argmax: the loss needs it anyway.
    """
    return _target_logits(logits, target_ids) >= logits.max(axis=-1)


def score(logits: jax.Array, target_ids: jax.Array, weights: jax.Array) -> Prediction:
    """Sums the losses and the hits of a head.

    Args:
        logits: float32 [R, M, V].
        target_ids: integer [R, M].
        weights: float32 [R, M], 0 for an empty slot.

    Returns:
        The sums.
    """
    return Prediction(
        loss=(token_losses(logits, target_ids) * weights).sum(),
        correct=(hits(logits, target_ids) * weights).sum(),
        weight=weights.sum(),
    )
