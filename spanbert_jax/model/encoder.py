"""The encoder: BERT's post-LayerNorm transformer, without heads and without pooler.

Shape suffixes: R rows, L places, D hidden size, H heads, K size of a head.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

LAYER_NORM_EPSILON = 1e-12
_INITIALIZER = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The size of an encoder.

    Attributes:
        vocab_size: V, entries of the vocabulary, without padding.
        num_layers: transformer layers.
        hidden_size: D, a multiple of `num_heads`.
        num_heads: H.
        intermediate_size: width of the feed-forward layer.
        max_positions: rows of the position table.
        type_vocab_size: rows of the token-type table.
        dropout: rate on embeddings and on the output of each sublayer.
        attention_dropout: rate on the attention's probabilities.
        dtype: of the computation; parameters are float32.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int
    dropout: float
    attention_dropout: float
    dtype: jnp.dtype

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token table: V up to a multiple of 128, a TPU's lanes."""
        return -(-self.vocab_size // 128) * 128


def random_bytes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform uint8, four from each 32-bit draw.

    jax.random.bits draws 32 bits even for a uint8, and random bits are a tenth of a
    step's time on a CPU.
    """
    *rest, size = shape
    words = jax.random.bits(key, (*rest, -(-size // 4)), jnp.uint32)
    quarters = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return quarters.reshape(*rest, -1)[..., :size]


class Dropout(nn.Module):
    """Dropout from 8 random bits an element.

    The rate is rounded to a multiple of 1/256 below 1 (0.1 becomes 26/256), and the
    kept values are scaled by the rate as rounded, so that the mean is kept.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """Drops elements of x, of at least one axis; `rngs` needs "dropout"."""
        dropped = min(round(self.rate * 256), 255)
        if deterministic or dropped == 0:
            return x
        kept = random_bytes(self.make_rng("dropout"), x.shape) >= dropped
        # In float32: bfloat16 has no number near 256/230, and would shrink the mean.
        scaled = x.astype(jnp.float32) * (256 / (256 - dropped))
        return jnp.where(kept, scaled.astype(x.dtype), jnp.zeros((), x.dtype))


def dense(features: int, dtype: jnp.dtype, name: str | None = None) -> nn.Dense:
    """A linear layer, initialised as BERT's."""
    return nn.Dense(features, dtype=dtype, kernel_init=_INITIALIZER, name=name)


def layer_norm(dtype: jnp.dtype, name: str | None = None) -> nn.LayerNorm:
    """LayerNorm with BERT's epsilon.

    The exact variance: the fast one (E[x^2] - E[x]^2) is off by 1e-5 where the mean is
    five standard deviations. flax computes the statistics in float32.
    """
    return nn.LayerNorm(
        epsilon=LAYER_NORM_EPSILON, dtype=dtype, use_fast_variance=False, name=name
    )


def gelu(x: jax.Array) -> jax.Array:
    """The exact erf form, as BERT trains; the tanh form is off by up to 6e-3."""
    return nn.gelu(x, approximate=False)


def embedding(
    rows: int, features: int, dtype: jnp.dtype, name: str | None = None
) -> nn.Embed:
    """An embedding table, initialised as BERT's."""
    return nn.Embed(rows, features, dtype=dtype, embedding_init=_INITIALIZER, name=name)


def attention_mask(segment_ids_RxL: jax.Array) -> jax.Array:
    """Who sees whom: places of the same block, and no padding.

    Returns:
        bool [R, 1, L, L]: the query's place, then the key's.
    """
    query, key = segment_ids_RxL[:, None, :, None], segment_ids_RxL[:, None, None, :]
    return (query == key) & (key != 0)


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection."""

    geometry: Geometry

    @nn.compact
    def __call__(
        self, x_RxLxD: jax.Array, mask_Rx1xLxL: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Attends where the mask allows: [R, L, D]."""
        size, heads = self.geometry.hidden_size, self.geometry.num_heads
        dtype = self.geometry.dtype

        def project(name: str) -> jax.Array:
            y = dense(size, dtype, name)(x_RxLxD)
            return y.reshape(*y.shape[:-1], heads, size // heads)

        q_RxLxHxK, k_RxLxHxK, v_RxLxHxK = map(project, ("query", "key", "value"))
        q_RxLxHxK /= jnp.sqrt(size // heads).astype(dtype)
        scores_RxHxLxL = jnp.einsum(
            "rqhk,rlhk->rhql", q_RxLxHxK, k_RxLxHxK, preferred_element_type=jnp.float32
        )
        # A finite number: the softmax of a padding place is uniform, not NaN.
        lowest = jnp.finfo(jnp.float32).min
        scores_RxHxLxL = jnp.where(mask_Rx1xLxL, scores_RxHxLxL, lowest)
        weights_RxHxLxL = nn.softmax(scores_RxHxLxL).astype(dtype)
        weights_RxHxLxL = Dropout(self.geometry.attention_dropout)(
            weights_RxHxLxL, deterministic
        )
        y_RxLxHxK = jnp.einsum("rhql,rlhk->rqhk", weights_RxHxLxL, v_RxLxHxK)
        return dense(size, dtype, "output")(y_RxLxHxK.reshape(x_RxLxD.shape))


class Layer(nn.Module):
    """A transformer layer: LayerNorm after each sublayer and its residual."""

    geometry: Geometry

    @nn.compact
    def __call__(
        self, x_RxLxD: jax.Array, mask_Rx1xLxL: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Applies the layer: [R, L, D]."""
        g = self.geometry
        y = SelfAttention(g, name="attention")(x_RxLxD, mask_Rx1xLxL, deterministic)
        y = Dropout(g.dropout)(y, deterministic)
        x_RxLxD = layer_norm(g.dtype, "attention_norm")(x_RxLxD + y)
        y = gelu(dense(g.intermediate_size, g.dtype, "intermediate")(x_RxLxD))
        y = dense(g.hidden_size, g.dtype, "output")(y)
        y = Dropout(g.dropout)(y, deterministic)
        return layer_norm(g.dtype, "output_norm")(x_RxLxD + y)


class Encoder(nn.Module):
    """Embeddings and layers."""

    geometry: Geometry

    def setup(self) -> None:
        """Declares the submodules."""
        g = self.geometry
        self.token_embedding = embedding(g.padded_vocab_size, g.hidden_size, g.dtype)
        self.position_embedding = embedding(g.max_positions, g.hidden_size, g.dtype)
        self.type_embedding = embedding(g.type_vocab_size, g.hidden_size, g.dtype)
        self.embedding_norm = layer_norm(g.dtype)
        self.embedding_dropout = Dropout(g.dropout)
        self.layers = [Layer(g, name=f"layer_{i}") for i in range(g.num_layers)]

    def __call__(
        self,
        token_ids: jax.Array,
        segment_ids: jax.Array,
        position_ids: jax.Array,
        type_ids: jax.Array,
        deterministic: bool,
    ) -> jax.Array:
        """Encodes rows.

        Args:
            token_ids: int32 [R, L]; out-of-range ids are the caller's fault and give
                garbage, here as everywhere in JAX.
            segment_ids: int32 [R, L], 0 for padding, else the block's number.
            position_ids: int32 [R, L].
            type_ids: int32 [R, L].
            deterministic: whether dropout is off; if not, `rngs` needs "dropout".

        Returns:
            The final hidden states, [R, L, D] of the geometry's dtype.
        """
        x_RxLxD = self.token_embedding(token_ids)
        x_RxLxD += self.position_embedding(position_ids)
        x_RxLxD += self.type_embedding(type_ids)
        x_RxLxD = self.embedding_norm(x_RxLxD)
        x_RxLxD = self.embedding_dropout(x_RxLxD, deterministic)
        mask = attention_mask(segment_ids)
        for layer in self.layers:
            x_RxLxD = layer(x_RxLxD, mask, deterministic)
        return x_RxLxD
