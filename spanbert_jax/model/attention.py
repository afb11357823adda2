"""Attention within blocks, computed in one way or another.

Shape suffixes: R rows, L places, H heads, K size of a head.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

Dropout = Callable[[jax.Array], jax.Array]
# Queries, keys and values [R, L, H, K], segment ids int32 [R, L], and what is to be
# done to the probabilities; returns [R, L, H, K], at padding anything finite.
Attention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, Dropout],
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


def cudnn(
    q_RxLxHxK: jax.Array,
    k_RxLxHxK: jax.Array,
    v_RxLxHxK: jax.Array,
    segment_ids_RxL: jax.Array,
    dropout: Dropout,
    implementation: str = "cudnn",
) -> jax.Array:
    """CuDNN's fused attention, for NVIDIA GPUs; in bfloat16 only, without dropout.

    Args:
        q_RxLxHxK: queries.
        k_RxLxHxK: keys.
        v_RxLxHxK: values.
        segment_ids_RxL: int32, 0 for padding.
        dropout: not applied: the scores never leave the kernel.
        implementation: of `jax.nn.dot_product_attention`.

    Returns:
        [R, L, H, K].
    """
    del dropout
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
    dropout: Dropout,
    interpret: bool = False,
) -> jax.Array:
    """Jax's Pallas kernel "splash attention", for TPUs; without dropout.

    Args:
        q_RxLxHxK: queries; L a multiple of `SPLASH_TILE`.
        k_RxLxHxK: keys.
        v_RxLxHxK: values.
        segment_ids_RxL: int32, 0 for padding, whose places see each other here.
        dropout: not applied: the scores never leave the kernel.
        interpret: whether to emulate the kernel, where there is no TPU.

    Returns:
        [R, L, H, K].
    """
    # Imported where it is used: the kernels' language takes half a second.
    from jax.experimental.pallas.ops.tpu import splash_attention

    del dropout
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
