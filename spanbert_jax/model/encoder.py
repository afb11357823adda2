"""The encoder: BERT's post-LayerNorm transformer, without heads and without pooler.

Shape suffixes: R rows, L places, D hidden size, H heads, K size of a head.

Every axis of a parameter, and of an activation where it matters, has a logical name:

rows      of the batch
vocab     entries of the token table, with padding
embed     the hidden axis of a matrix or a table
hidden    the hidden axis of an activation, or of a vector
heads     attention heads, or all heads' places side by side
mlp       width of the feed-forward layer
layers    of the stacked parameters of the layers

What a name means on a mesh of devices is the caller's affair; without flax's
`logical_axis_rules` and a mesh, the names do nothing. None is an axis that is whole
everywhere.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from spanbert_jax.model.attention import ATTENTION
from spanbert_jax.model.dropout import Dropout

LAYER_NORM_EPSILON = 1e-12
_INITIALIZER = nn.initializers.normal(0.02)

# What the backward pass finds stored of a layer; the rest it computes again.
REMAT: dict[str, Callable[..., bool] | None] = {
    # All of it.
    "none": None,
    # The layer's input only: least memory, a third more time.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Products with weights, but neither attention's scores nor anything elementwise.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

AxisNames = tuple[str | None, ...]


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
        attention: how attention is computed, a name of `ATTENTION`.
        remat: what the backward pass computes again, a name of `REMAT`.
        unroll: layers in the body of the compiled loop over them, at least 1.
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
    attention: str
    remat: str
    unroll: int

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token table: V up to a multiple of 128, a TPU's lanes."""
        return -(-self.vocab_size // 128) * 128


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Says by logical names how an activation is to lie on a mesh, if there is one."""
    return nn.with_logical_constraint(x, names)


def _initialized(
    initializer: nn.initializers.Initializer, *names: str | None
) -> nn.initializers.Initializer:
    return nn.with_logical_partitioning(initializer, names)


def flat_product(
    x: jax.Array, kernel_IxO: jax.Array, *_: object, **options: Any
) -> jax.Array:
    """Multiplies the last axis of x, the places of all rows side by side.

    The kernel's gradient then sums over one axis. Where it is to sum over rows and over
    places, XLA transposes an operand first, and on a CPU that and the product it then
    takes are a seventh of a step's time.

    Args:
        x: [..., I].
        kernel_IxO: the kernel.
        options: of `jax.lax.dot`.

    Returns:
        [..., O].
    """
    y = jax.lax.dot(x.reshape(-1, x.shape[-1]), kernel_IxO, **options)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def dense(
    features: int, dtype: jnp.dtype, axes: AxisNames, name: str | None = None
) -> nn.Dense:
    """A linear layer, initialised as BERT's; `axes` are its kernel's."""
    bias_axis = "hidden" if axes[-1] == "embed" else axes[-1]
    return nn.Dense(
        features,
        dtype=dtype,
        kernel_init=_initialized(_INITIALIZER, *axes),
        bias_init=_initialized(nn.initializers.zeros, bias_axis),
        dot_general=flat_product,
        name=name,
    )


def layer_norm(dtype: jnp.dtype, name: str | None = None) -> nn.LayerNorm:
    """LayerNorm with BERT's epsilon.

    The exact variance: the fast one (E[x^2] - E[x]^2) is off by 1e-5 where the mean is
    five standard deviations. flax computes the statistics in float32.
    """
    return nn.LayerNorm(
        epsilon=LAYER_NORM_EPSILON,
        dtype=dtype,
        use_fast_variance=False,
        scale_init=_initialized(nn.initializers.ones, "hidden"),
        bias_init=_initialized(nn.initializers.zeros, "hidden"),
        name=name,
    )


def _normal_cdf(x: jax.Array) -> jax.Array:
    return (1 + jax.lax.erf(x * math.sqrt(0.5))) / 2


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """The exact erf form, as BERT trains; the tanh form is off by up to 6e-3.

    Computed in float32, and of the forward pass nothing but x is stored: the backward
    pass finds erf faster by computing it again than in memory.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    wide = x.astype(jnp.float32)
    density = jnp.exp(-jnp.square(wide) / 2) / math.sqrt(2 * math.pi)
    return (((_normal_cdf(wide) + wide * density) * g).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


def embedding(
    rows: int, features: int, axes: AxisNames, name: str | None = None
) -> nn.Embed:
    """An embedding table, initialised as BERT's.

    Looked up in float32 whatever the computation's dtype: the gradients of all places
    of a token are added up in it.
    """
    return nn.Embed(
        rows, features, embedding_init=_initialized(_INITIALIZER, *axes), name=name
    )


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection."""

    geometry: Geometry

    @nn.compact
    def __call__(
        self, x_RxLxD: jax.Array, segment_ids_RxL: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Attends within the blocks: [R, L, D]."""
        g = self.geometry
        size, heads = g.hidden_size, g.num_heads

        def project(name: str) -> jax.Array:
            y = dense(size, g.dtype, ("embed", "heads"), name)(x_RxLxD)
            y = y.reshape(*y.shape[:-1], heads, size // heads)
            return constrain(y, "rows", None, "heads", None)

        y_RxLxHxK = ATTENTION[g.attention](
            *map(project, ("query", "key", "value")),
            segment_ids_RxL,
            Dropout(g.attention_dropout).draw(deterministic),
        )
        y_RxLxD = y_RxLxHxK.reshape(x_RxLxD.shape)
        return dense(size, g.dtype, ("heads", "embed"), "output")(y_RxLxD)


class Layer(nn.Module):
    """A transformer layer: LayerNorm after each sublayer and its residual."""

    geometry: Geometry

    @nn.compact
    def __call__(
        self, x_RxLxD: jax.Array, segment_ids_RxL: jax.Array, deterministic: bool
    ) -> tuple[jax.Array, None]:
        """Applies the layer: [R, L, D], and nothing for a scan to collect."""
        g = self.geometry
        y = SelfAttention(g, name="attention")(x_RxLxD, segment_ids_RxL, deterministic)
        y = Dropout(g.dropout)(y, deterministic)
        x_RxLxD = layer_norm(g.dtype, "attention_norm")(x_RxLxD + y)
        y = dense(g.intermediate_size, g.dtype, ("embed", "mlp"), "intermediate")(
            x_RxLxD
        )
        y = gelu(constrain(y, "rows", None, "mlp"))
        y = dense(g.hidden_size, g.dtype, ("mlp", "embed"), "output")(y)
        y = Dropout(g.dropout)(y, deterministic)
        x_RxLxD = layer_norm(g.dtype, "output_norm")(x_RxLxD + y)
        return constrain(x_RxLxD, "rows", None, "hidden"), None


def _stack(geometry: Geometry) -> nn.Module:
    """All layers, their parameters stacked: a loop compiles one layer, not 24."""
    layer = Layer
    if (policy := REMAT[geometry.remat]) is not None:
        # Within a scan nothing is there that common-subexpression elimination could
        # take for the stored value; 3 is `deterministic`, a Python bool.
        layer = nn.remat(Layer, policy=policy, prevent_cse=False, static_argnums=(3,))
    return nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast, nn.broadcast),
        length=geometry.num_layers,
        unroll=min(geometry.unroll, geometry.num_layers),
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(geometry)


def _look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    return constrain(jnp.take(table, ids, axis=0), "rows", None, "hidden")


class Encoder(nn.Module):
    """Embeddings and layers."""

    geometry: Geometry

    def setup(self) -> None:
        """Declares the submodules."""
        g = self.geometry
        size = g.hidden_size
        self.token_embedding = embedding(g.padded_vocab_size, size, ("vocab", "embed"))
        self.position_embedding = embedding(g.max_positions, size, (None, "embed"))
        self.type_embedding = embedding(g.type_vocab_size, size, (None, "embed"))
        self.embedding_norm = layer_norm(g.dtype)
        self.embedding_dropout = Dropout(g.dropout)
        self.layers = _stack(g)

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
            The final hidden states, [R, L, D] of the geometry's dtype. What they are
            at padding is nobody's concern, but they are finite.
        """
        x_RxLxD = _look_up(self.token_table(), token_ids)
        for table, ids in (
            (self.position_embedding.embedding, position_ids),
            (self.type_embedding.embedding, type_ids),
        ):
            x_RxLxD += _look_up(constrain(table, None, None), ids)
        x_RxLxD = self.embedding_norm(x_RxLxD)
        x_RxLxD = self.embedding_dropout(x_RxLxD, deterministic)
        x_RxLxD, _ = self.layers(x_RxLxD, segment_ids, deterministic)
        return x_RxLxD

    def token_table(self) -> jax.Array:
        """The token embedding, float32 [P, D].

        On a mesh its columns are brought together; its rows may stay apart. Looked up
        otherwise, XLA would bring the whole table together on every device.
        """
        return constrain(self.token_embedding.embedding, "vocab", None)
