"""The optimiser: AdamW with a linear schedule, decay by name, clipped gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

# By the last part of a parameter's name. One that stands in neither is an error: a new
# kind of parameter is to be decided on, not to be guessed.
_DECAYED = {"kernel", "embedding"}
_NOT_DECAYED = {"bias", "scale"}


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Linear warm-up to the peak, linear decay to the end value.

    Counted in updates: update u (from 1) of T has the rate peak * u / W up to W, the
    warm-up (0 counts as 1), then end + (peak - end) * (T - u) / (T - W). The peak is
    reached at update W, the end value at update T and after it; where W = T, the rate
    rises up to T and only then falls to the end value.

    Returns:
        A function of the number of updates done, u - 1: 0 for the first. A number of
        Python's is answered on the host, an array on the devices.
    """
    peak = config.optimizer.learning_rate
    end = config.optimizer.end_learning_rate
    total = config.train.steps
    warmup = max(config.optimizer.warmup_steps, 1)

    def rate(updates_done: jax.Array | int) -> jax.Array | np.ndarray:
        # On a device the log's question would wait until the step under way is done.
        xp = jnp if isinstance(updates_done, jax.Array) else np
        update = xp.asarray(updates_done, xp.float32) + 1
        rising = peak * update / warmup
        left = xp.clip((total - update) / max(total - warmup, 1), 0, 1)
        falling = end + (peak - end) * left
        return xp.where(update <= warmup, rising, falling)

    return rate


def decay_mask(params: optax.Params) -> optax.Params:
    """Which parameters decay: tables and kernels, not biases and LayerNorm.

    Raises:
        ValueError: a parameter's name says neither.
    """

    def decays(path: tuple, _: jax.Array) -> bool:
        name = path[-1].key
        if name not in _DECAYED | _NOT_DECAYED:
            raise ValueError(f"{jax.tree_util.keystr(path)}: does it decay?")
        return name in _DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """AdamW as the paper sets it, behind clipping by the global norm."""
    settings = config.optimizer
    adamw = optax.adamw(
        learning_rate(config),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mask=decay_mask,
    )
    # In either case two states, so that a run can be resumed with the other.
    clip = optax.identity()
    if settings.clip_norm:
        clip = optax.clip_by_global_norm(settings.clip_norm)
    return optax.chain(clip, adamw)
