"""Attention within blocks, computed in one way or another.

Shape suffixes: R rows, L places, H heads, K size of a head.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Dropout = Callable[[jax.Array], jax.Array]
# Queries, keys and values [R, L, H, K], segment ids int32 [R, L], and what is to be
# done to the probabilities; returns [R, L, H, K].
Attention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, Dropout],
    jax.Array,
]


def attention_mask(segment_ids_RxL: jax.Array) -> jax.Array:
    """Who sees whom: places of the same block, and no padding.

    Returns:
        bool [R, 1, L, L]: the query's place, then the key's.
    """
    query, key = segment_ids_RxL[:, None, :, None], segment_ids_RxL[:, None, None, :]
    return (query == key) & (key != 0)


def plain(
    q_RxLxHxK: jax.Array,
    k_RxLxHxK: jax.Array,
    v_RxLxHxK: jax.Array,
    segment_ids_RxL: jax.Array,
    dropout: Dropout,
) -> jax.Array:
    """Two products and a softmax between; scores and softmax in float32."""
    dtype, size = q_RxLxHxK.dtype, q_RxLxHxK.shape[-1]
    scores_RxHxLxL = jnp.einsum(
        "rqhk,rlhk->rhql",
        q_RxLxHxK / jnp.sqrt(size).astype(dtype),
        k_RxLxHxK,
        preferred_element_type=jnp.float32,
    )
    # A finite number: the softmax of a padding place is uniform, not NaN.
    lowest = jnp.finfo(jnp.float32).min
    mask_Rx1xLxL = attention_mask(segment_ids_RxL)
    scores_RxHxLxL = jnp.where(mask_Rx1xLxL, scores_RxHxLxL, lowest)
    weights_RxHxLxL = dropout(jax.nn.softmax(scores_RxHxLxL).astype(dtype))
    return jnp.einsum("rhql,rlhk->rqhk", weights_RxHxLxL, v_RxLxHxK)


ATTENTION: dict[str, Attention] = {"plain": plain}
