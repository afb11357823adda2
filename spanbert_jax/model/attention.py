"""Attention within blocks, computed in one way or another.

Shape suffixes: R rows, L places, H heads, K size of a head.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from spanbert_jax.model.dropout import Drop

# Queries, keys and values [R, L, H, K], segment ids int32 [R, L], and what is to be
# dropped of the probabilities; returns [R, L, H, K], at padding anything finite.
Attention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, Drop],
    jax.Array,
]

# Places of a tile of the TPU kernel: all of a row of 512, so that keys and values are
# read once.
_MOST_TILE = 512
# A row must be of whole tiles of at least this many places, a TPU's lanes.
SPLASH_TILE = 128


def attention_mask(segment_ids_RxL: jax.Array) -> jax.Array:
    """Who sees whom: places of the same block, and no padding.

    Returns:
        bool [R, 1, L, L]: the query's place, then the key's.
    """
    query, key = segment_ids_RxL[:, None, :, None], segment_ids_RxL[:, None, None, :]
    return (query == key) & (key != 0)


def _product(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
    """Contracts an axis of each; both have rows and heads in front. In float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((axis,), (other,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )


@jax.custom_vjp
def _attend(
    q_RxHxLxK: jax.Array,
    k_RxHxLxK: jax.Array,
    v_RxHxLxK: jax.Array,
    segment_ids_RxL: jax.Array,
    drop: Drop,
) -> jax.Array:
    """Two products and a softmax between, heads first; queries are scaled already."""
    return _attend_forward(q_RxHxLxK, k_RxHxLxK, v_RxHxLxK, segment_ids_RxL, drop)[0]


def _attend_forward(
    q_RxHxLxK: jax.Array,
    k_RxHxLxK: jax.Array,
    v_RxHxLxK: jax.Array,
    segment_ids_RxL: jax.Array,
    drop: Drop,
) -> tuple[jax.Array, tuple]:
    dtype = q_RxHxLxK.dtype
    scores_RxHxLxL = _product(q_RxHxLxK, k_RxHxLxK, 3, 3)
    # A finite number: the softmax of a padding place is uniform, not NaN.
    lowest = jnp.finfo(jnp.float32).min
    scores_RxHxLxL = jnp.where(attention_mask(segment_ids_RxL), scores_RxHxLxL, lowest)
    weights_RxHxLxL = jax.nn.softmax(scores_RxHxLxL).astype(dtype)
    y_RxHxLxK = _product(drop(weights_RxHxLxL), v_RxHxLxK, 3, 2).astype(dtype)
    inputs = (q_RxHxLxK, k_RxHxLxK, v_RxHxLxK, drop)
    return y_RxHxLxK, (*inputs, weights_RxHxLxL, y_RxHxLxK)


def _attend_backward(residuals: tuple, g_RxHxLxK: jax.Array) -> tuple:
    """The gradients, with the softmax's mean slope taken from what came out.

    Of a query, sum over keys of weight * slope = sum over K of y * g, dropout included
    (Dao et al. 2022, section B.2): 64 numbers to add up in place of 512.
    """
    q, k, v, drop, weights, y = residuals
    dtype = q.dtype
    mean_RxHxLx1 = (y.astype(jnp.float32) * g_RxHxLxK).sum(axis=-1, keepdims=True)
    slopes_RxHxLxL = drop(_product(g_RxHxLxK, v, 3, 3)) - mean_RxHxLx1
    slopes_RxHxLxL = (weights * slopes_RxHxLxL).astype(dtype)
    of_q = _product(slopes_RxHxLxL, k, 3, 2)
    # With the small operand first: XLA's product for a CPU is twice as fast so.
    of_k = _product(q, slopes_RxHxLxL, 2, 2).swapaxes(2, 3)
    of_v = _product(g_RxHxLxK, drop(weights), 2, 2).swapaxes(2, 3)
    return of_q.astype(dtype), of_k.astype(dtype), of_v.astype(dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def plain(
    q_RxLxHxK: jax.Array,
    k_RxLxHxK: jax.Array,
    v_RxLxHxK: jax.Array,
    segment_ids_RxL: jax.Array,
    drop: Drop,
) -> jax.Array:
    """Two products and a softmax between; scores and softmax in float32."""
    q_RxLxHxK = q_RxLxHxK / jnp.sqrt(q_RxLxHxK.shape[-1]).astype(q_RxLxHxK.dtype)
    by_head = (x.swapaxes(1, 2) for x in (q_RxLxHxK, k_RxLxHxK, v_RxLxHxK))
    return _attend(*by_head, segment_ids_RxL, drop).swapaxes(1, 2)


def cudnn(
    q_RxLxHxK: jax.Array,
    k_RxLxHxK: jax.Array,
    v_RxLxHxK: jax.Array,
    segment_ids_RxL: jax.Array,
    drop: Drop,
    implementation: str = "cudnn",
) -> jax.Array:
    """CuDNN's fused attention, for NVIDIA GPUs; in bfloat16 only, without dropout.

    Args:
        q_RxLxHxK: queries.
        k_RxLxHxK: keys.
        v_RxLxHxK: values.
        segment_ids_RxL: int32, 0 for padding.
        drop: not applied: the scores never leave the kernel.
        implementation: of `jax.nn.dot_product_attention`.

    Returns:
        [R, L, H, K].
    """
    del drop
    return jax.nn.dot_product_attention(
        q_RxLxHxK,
        k_RxLxHxK,
        v_RxLxHxK,
        mask=attention_mask(segment_ids_RxL),
        implementation=implementation,
    )


def splash(
    q_RxLxHxK: jax.Array,
    k_RxLxHxK: jax.Array,
    v_RxLxHxK: jax.Array,
    segment_ids_RxL: jax.Array,
    drop: Drop,
    interpret: bool = False,
) -> jax.Array:
    """Jax's Pallas kernel "splash attention", for TPUs; without dropout.

    Args:
        q_RxLxHxK: queries; L a multiple of `SPLASH_TILE`.
        k_RxLxHxK: keys.
        v_RxLxHxK: values.
        segment_ids_RxL: int32, 0 for padding, whose places see each other here.
        drop: not applied: the scores never leave the kernel.
        interpret: whether to emulate the kernel, where there is no TPU.

    Returns:
        [R, L, H, K].
    """
    # Imported where it is used: the kernels' language takes half a second.
    from jax.experimental.pallas.ops.tpu import splash_attention

    del drop
    scale = 1 / jnp.sqrt(q_RxLxHxK.shape[-1]).astype(q_RxLxHxK.dtype)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        heads, length = q.shape[1:3]
        whole = splash_attention.FullMask((length, length))
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([whole] * heads),
            block_sizes=splash_attention.BlockSizes(**_block_sizes(length)),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        segments = splash_attention.SegmentIds(ids, ids)
        return jax.vmap(kernel)(q, k, v, segments)

    if not jax.sharding.get_abstract_mesh().empty:
        # The compiler cannot look into a kernel: each device runs it on its own rows
        # and heads.
        heads_first = nn.logical_to_mesh_axes(("rows", "heads", None, None))
        rows = nn.logical_to_mesh_axes(("rows", None))
        attend = jax.shard_map(
            attend,
            in_specs=(heads_first, heads_first, heads_first, rows),
            out_specs=heads_first,
            check_vma=False,
        )
    by_head = (x.swapaxes(1, 2) for x in (q_RxLxHxK * scale, k_RxLxHxK, v_RxLxHxK))
    return attend(*by_head, segment_ids_RxL).swapaxes(1, 2)


def _block_sizes(length: int) -> dict[str, int]:
    """The largest tiles that a row is a multiple of, in all three passes."""
    tiles = range(SPLASH_TILE, _MOST_TILE + 1, SPLASH_TILE)
    tile = max(size for size in tiles if length % size == 0)
    passes = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    return {f"block_{name}": tile for name in (*passes, "q_dq", "kv_dq")}


ATTENTION: dict[str, Attention] = {"plain": plain, "cudnn": cudnn, "splash": splash}
