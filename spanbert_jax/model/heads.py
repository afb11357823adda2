"""The heads: masked language model and span boundary objective.

They see the gathered target slots only, never all places of a row. Shape suffixes:
R rows, M target slots, D hidden size, V vocabulary (P with padding).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from spanbert_jax.model.encoder import dense, embedding, gelu, layer_norm

# Far below any logit, yet finite: the padding rows of the table get probability 0.
_NEVER = -1e9


def gather(x_RxLxD: jax.Array, positions_RxM: jax.Array) -> jax.Array:
    """The hidden states at some places of each row: [R, M, D]."""
    return jnp.take_along_axis(x_RxLxD, positions_RxM[..., None], axis=1)


class VocabularyProjection(nn.Module):
    """Logits by the input embedding, with a bias of its own."""

    vocab_size: int

    @nn.compact
    def __call__(self, x_RxMxD: jax.Array, table_PxD: jax.Array) -> jax.Array:
        """Projects onto the token embedding: float32 [R, M, P]."""
        bias_V = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
        padding = len(table_PxD) - self.vocab_size
        bias_P = jnp.pad(bias_V, (0, padding), constant_values=_NEVER)
        logits_RxMxP = jnp.einsum(
            "rmd,pd->rmp",
            x_RxMxD,
            table_PxD.astype(x_RxMxD.dtype),
            preferred_element_type=jnp.float32,
        )
        return logits_RxMxP + bias_P[None, None, :]


class MlmHead(nn.Module):
    """BERT's head: dense, GeLU, LayerNorm, tied projection."""

    vocab_size: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_RxMxD: jax.Array, table_PxD: jax.Array) -> jax.Array:
        """Predicts tokens from their own hidden states.

        Args:
            x_RxMxD: hidden states at the targets.
            table_PxD: the token embedding.

        Returns:
            Logits, float32 [R, M, P].
        """
        y = gelu(dense(x_RxMxD.shape[-1], self.dtype, "dense")(x_RxMxD))
        y = layer_norm(self.dtype, "norm")(y)
        return VocabularyProjection(self.vocab_size, name="projection")(y, table_PxD)


class SboHead(nn.Module):
    """The span boundary objective (Joshi et al. 2019, section 3.2).

    y_i = f(x_{s-1}, x_{e+1}, p_{i-s+1}), f being two dense layers, each followed by
    GeLU and LayerNorm. The reference code indexes its position table from 0 for the
    first token of a span, and so do we.

    Attributes:
        vocab_size: V.
        positions: rows of the position table.
        position_size: width of the position table.
        dtype: of the computation.
    """

    vocab_size: int
    positions: int
    position_size: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        left_RxMxD: jax.Array,
        right_RxMxD: jax.Array,
        span_offsets_RxM: jax.Array,
        table_PxD: jax.Array,
    ) -> jax.Array:
        """Predicts tokens from the two hidden states beside their span.

        Args:
            left_RxMxD: hidden states before the spans.
            right_RxMxD: hidden states after them.
            span_offsets_RxM: int32, each target's number in its span, from 1. Those
                beyond the table read its last row; their weight is to be 0.
            table_PxD: the token embedding.

        Returns:
            Logits, float32 [R, M, P].
        """
        size = left_RxMxD.shape[-1]
        table_row = jnp.clip(span_offsets_RxM - 1, 0, self.positions - 1)
        position = embedding(
            self.positions, self.position_size, self.dtype, "position_embedding"
        )(table_row)
        y = jnp.concatenate([left_RxMxD, right_RxMxD, position], axis=-1)
        for number in ("1", "2"):
            y = gelu(dense(size, self.dtype, f"dense_{number}")(y))
            y = layer_norm(self.dtype, f"norm_{number}")(y)
        return VocabularyProjection(self.vocab_size, name="projection")(y, table_PxD)
