"""The heads: masked language model, span boundary objective, next sentence.

They see gathered places only, never all places of a row. Shape suffixes: R rows, M
target slots, K blocks a row, D hidden size, V vocabulary (P with padding).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from spanbert_jax.model.encoder import (
    constrain,
    dense,
    embedding,
    flat_product,
    gelu,
    layer_norm,
)

# Far below any logit, yet finite: the padding rows of the table get probability 0.
_NEVER = -1e9


def gather(x_RxLxD: jax.Array, positions_RxM: jax.Array) -> jax.Array:
    """The hidden states at some places of each row: [R, M, D]."""
    return jnp.take_along_axis(x_RxLxD, positions_RxM[..., None], axis=1)


@jax.custom_vjp
def add_bias(logits_RxMxP: jax.Array, bias_P: jax.Array) -> jax.Array:
    """Adds a bias, both in float32."""
    return logits_RxMxP + bias_P[None, None, :]


def _add_bias_backward(_: None, g_RxMxP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients; the bias's by a product with ones.

    XLA's sum over all axes but a long last one takes six times as long on a CPU. At the
    highest precision: on a TPU the usual one would round what is added up to bfloat16.
    """
    g_NxP = g_RxMxP.reshape(-1, g_RxMxP.shape[-1])
    ones_N = jnp.ones(len(g_NxP), g_NxP.dtype)
    return g_RxMxP, jnp.dot(ones_N, g_NxP, precision=jax.lax.Precision.HIGHEST)


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), None), _add_bias_backward)


class VocabularyProjection(nn.Module):
    """Logits by the input embedding, with a bias of its own."""

    vocab_size: int

    @nn.compact
    def __call__(self, x_RxMxD: jax.Array, table_PxD: jax.Array) -> jax.Array:
        """Projects onto the token embedding: float32 [R, M, P]."""
        # Whole everywhere: its length need not divide by anything.
        bias_V = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
        padding = len(table_PxD) - self.vocab_size
        bias_P = jnp.pad(bias_V, (0, padding), constant_values=_NEVER)
        logits_RxMxP = flat_product(
            x_RxMxD,
            table_PxD.astype(x_RxMxD.dtype).T,
            preferred_element_type=jnp.float32,
        )
        logits_RxMxP = constrain(logits_RxMxP, "rows", None, "vocab")
        return add_bias(logits_RxMxP, bias_P)


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
        size = x_RxMxD.shape[-1]
        y = gelu(dense(size, self.dtype, ("embed", None), "dense")(x_RxMxD))
        y = layer_norm(self.dtype, "norm")(y)
        return VocabularyProjection(self.vocab_size, name="projection")(y, table_PxD)


@dataclasses.dataclass(frozen=True)
class Sbo:
    """The form of the span boundary objective; the paper's has both outer boundaries.

    Attributes:
        positions: rows of the position table.
        position_size: width of the position table.
        depth: dense layers, at least 1; two in the paper.
        sides: the boundaries that the head reads, of "left" and "right" in this order.
        internal: whether the boundaries are the span's own first and last token, x_s
            and x_e, in place of the paper's x_{s-1} and x_{e+1}.
    """

    positions: int
    position_size: int
    depth: int
    sides: tuple[str, ...]
    internal: bool

    def boundary_places(self, batch: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Where the boundaries stand: int32 [R, M] for each side, within the row."""
        inward = int(self.internal)
        places = {
            "left": batch["left_positions"] + inward,
            # An empty slot holds 0, and a place of -1 would be the row's last.
            "right": jnp.maximum(batch["right_positions"] - inward, 0),
        }
        return [places[side] for side in self.sides]


class SboHead(nn.Module):
    """The span boundary objective (Joshi et al. 2019, section 3.2).

    y_i = f(x_{s-1}, x_{e+1}, p_{i-s+1}), f being dense layers, each followed by GeLU
    and LayerNorm. The reference code indexes its position table from 0 for the first
    token of a span, and so do we.

    Attributes:
        vocab_size: V.
        form: what f reads, and how deep it is.
        dtype: of the computation.
    """

    vocab_size: int
    form: Sbo
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        boundaries_RxMxD: Sequence[jax.Array],
        span_offsets_RxM: jax.Array,
        table_PxD: jax.Array,
    ) -> jax.Array:
        """Predicts tokens from the hidden states at the boundaries of their span.

        Args:
            boundaries_RxMxD: hidden states, one array for each side.
            span_offsets_RxM: int32, each target's number in its span, from 1. Those
                beyond the table read its last row; their weight is to be 0.
            table_PxD: the token embedding.

        Returns:
            Logits, float32 [R, M, P].
        """
        form, size = self.form, table_PxD.shape[-1]
        table_row = jnp.clip(span_offsets_RxM - 1, 0, form.positions - 1)
        position = embedding(
            form.positions, form.position_size, (None, None), "position_embedding"
        )(table_row)
        y = [*boundaries_RxMxD, position.astype(self.dtype)]
        y = jnp.concatenate(y, axis=-1)
        for number in range(1, form.depth + 1):
            # The first one's input is no multiple of anything; the output always is.
            y = gelu(dense(size, self.dtype, (None, "embed"), f"dense_{number}")(y))
            y = layer_norm(self.dtype, f"norm_{number}")(y)
        return VocabularyProjection(self.vocab_size, name="projection")(y, table_PxD)


class NspHead(nn.Module):
    """BERT's next-sentence head: a dense layer with tanh, then two logits.

    As in BERT, the first of the two is the pooler, and there is no dropout between.

    Attributes:
        dtype: of the pooler's computation.
    """

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_RxKxD: jax.Array) -> jax.Array:
        """Says whether a block's second segment follows its first.

        Args:
            x_RxKxD: hidden states at the blocks' [CLS].

        Returns:
            Logits, float32 [R, K, 2]: of "it follows" and of "it does not".
        """
        size = x_RxKxD.shape[-1]
        pooled = dense(size, self.dtype, ("embed", None), "pooler")(x_RxKxD)
        float32 = jnp.dtype("float32")
        return dense(2, float32, ("embed", None), "relationship")(nn.tanh(pooled))
