"""The encoder against plain NumPy, and what must not reach what."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from scipy.special import erf

import reference
import text
from spanbert_jax.model.dropout import Drop, Dropout
from spanbert_jax.model.encoder import (
    Encoder,
    Geometry,
    flat_product,
    gelu,
    layer_norm,
)

HEADS, LENGTH = 4, 24
Inputs = dict[str, np.ndarray]


def make_geometry(**changes: object) -> Geometry:
    settings = {
        "vocab_size": text.VOCAB_SIZE,
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": HEADS,
        "intermediate_size": 64,
        "max_positions": LENGTH,
        "type_vocab_size": 2,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "dtype": jnp.dtype("float32"),
        "attention": "plain",
        "remat": "none",
        "unroll": 1,
    }
    return Geometry(**settings | changes)


def make_inputs(lengths: list[list[int]], seed: int = 0) -> Inputs:
    """Rows that hold blocks of the given lengths, of random ids and types."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), LENGTH)
    inputs = {
        "token_ids": rng.integers(0, text.VOCAB_SIZE, shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "position_ids": np.zeros(shape, np.int32),
        "type_ids": rng.integers(0, 2, shape, np.int32),
    }
    for row, blocks in enumerate(lengths):
        numbers = np.repeat(np.arange(1, len(blocks) + 1), blocks)
        inputs["segment_ids"][row, : len(numbers)] = numbers
        positions = np.concatenate([np.arange(length) for length in blocks])
        inputs["position_ids"][row, : len(numbers)] = positions
    return inputs


@pytest.fixture(scope="module")
def params() -> reference.Tree:
    encoder = Encoder(make_geometry())
    inputs = make_inputs([[LENGTH]])
    key = jax.random.key(0)
    tree = jax.eval_shape(lambda: encoder.init(key, **inputs, deterministic=True))
    return reference.rough_params(nn.unbox(tree["params"]), seed=0)


@pytest.fixture(scope="module")
def encode(params: reference.Tree) -> Callable[[Inputs], np.ndarray]:
    encoder = Encoder(make_geometry())
    apply = jax.jit(
        lambda inputs: encoder.apply({"params": params}, **inputs, deterministic=True)
    )
    return lambda inputs: np.asarray(apply(inputs))


# Three rows: packed and full, packed with padding, one short block.
ROWS = [[10, 3, 11], [7, 9], [2]]


def test_hidden_states_are_those_of_plain_numpy(
    params: reference.Tree, encode: Callable[[Inputs], np.ndarray]
) -> None:
    inputs = make_inputs(ROWS)
    expected = reference.encode({"encoder": reference.double(params)}, inputs, HEADS)
    real = inputs["segment_ids"] > 0
    np.testing.assert_allclose(encode(inputs)[real], expected[real], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("EPSILON", 1e-6),
        (
            "gelu",
            lambda x: x / 2 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
        ),
    ],
)
def test_the_comparison_with_numpy_sees_another_gelu_and_another_epsilon(
    monkeypatch: pytest.MonkeyPatch,
    params: reference.Tree,
    encode: Callable[[Inputs], np.ndarray],
    name: str,
    other: object,
) -> None:
    monkeypatch.setattr(reference, name, other)
    inputs = make_inputs(ROWS)
    expected = reference.encode({"encoder": reference.double(params)}, inputs, HEADS)
    real = inputs["segment_ids"] > 0
    assert np.abs(encode(inputs)[real] - expected[real]).max() > 1e-4


def test_gelu_is_the_exact_form() -> None:
    x = np.linspace(-6, 6, 1001)
    expected = x * (1 + erf(x / math.sqrt(2))) / 2
    np.testing.assert_allclose(gelu(jnp.asarray(x, jnp.float32)), expected, atol=2e-6)


def test_the_slope_of_gelu_is_that_of_its_formula() -> None:
    x = np.linspace(-6, 6, 1001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    expected = (1 + erf(x / math.sqrt(2))) / 2 + x * density
    slopes = jax.vmap(jax.grad(gelu))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(slopes, expected, rtol=0, atol=1e-6)


def test_gelu_of_bfloat16_is_the_nearest_number() -> None:
    x = jnp.linspace(-6, 6, 2001).astype(jnp.bfloat16)
    expected = gelu(x.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gelu(x), expected)


def test_a_flat_product_is_the_product_and_its_gradients() -> None:
    rng = np.random.default_rng(0)
    x, kernel, g = (rng.normal(size=size) for size in ((2, 3, 5), (5, 7), (2, 3, 7)))
    y, pull = jax.vjp(flat_product, *(jnp.asarray(a, jnp.float32) for a in (x, kernel)))
    of_x, of_kernel = pull(jnp.asarray(g, jnp.float32))
    np.testing.assert_allclose(y, x @ kernel, atol=1e-5)
    np.testing.assert_allclose(of_x, g @ kernel.T, atol=1e-5)
    np.testing.assert_allclose(of_kernel, np.einsum("rli,rlo->io", x, g), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm_adds_next_to_nothing_to_a_small_variance(dtype: str) -> None:
    x = np.random.default_rng(0).normal(0, 1e-4, (3, 64)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, dtype), np.float64)
    expected = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    norm = layer_norm(jnp.dtype(dtype))
    y = norm.apply(norm.init(jax.random.key(0), x), jnp.asarray(x, dtype))
    tolerance = {"float32": 1e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=tolerance)


def test_layer_norm_is_exact_far_from_zero() -> None:
    x = np.random.default_rng(1).normal(50, 1, (3, 64)).astype(np.float32)
    expected = (x - x.mean(1, keepdims=True, dtype=np.float64)) / x.std(
        1, keepdims=True, dtype=np.float64
    )
    norm = layer_norm(jnp.dtype("float32"))
    y = norm.apply(norm.init(jax.random.key(0), x), x)
    # The fast variance is off by 1e-3 here.
    np.testing.assert_allclose(y, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("changed", [1, 2, 3])
def test_no_block_sees_another_one_of_its_row(
    encode: Callable[[Inputs], np.ndarray], changed: int
) -> None:
    inputs = make_inputs([ROWS[0]])
    mine = inputs["segment_ids"] == changed
    other = {key: array.copy() for key, array in inputs.items()}
    other["token_ids"][mine] = (other["token_ids"][mine] + 1) % text.VOCAB_SIZE
    other["type_ids"][mine] = 1 - other["type_ids"][mine]
    before, after = encode(inputs), encode(other)
    np.testing.assert_array_equal(before[~mine], after[~mine])
    assert (before[mine] != after[mine]).any(axis=1).all()


def test_no_gradient_flows_into_another_block(params: reference.Tree) -> None:
    encoder = Encoder(make_geometry(num_layers=1))
    params = params | {"layers": jax.tree.map(lambda x: x[:1], params["layers"])}
    inputs = make_inputs([[10, 9]])
    ids = np.arange(LENGTH, dtype=np.int32) + text.FIRST_WORD
    inputs["token_ids"] = ids[None]

    @jax.jit
    def table_gradient(inputs: Inputs, asked: jax.Array) -> jax.Array:
        def total(params: reference.Tree) -> jax.Array:
            hidden = encoder.apply({"params": params}, **inputs, deterministic=True)
            return (jnp.sin(hidden) * asked[..., None]).sum()

        return jax.grad(total)(params)["token_embedding"]["embedding"]

    for number in (1, 2):
        asked = inputs["segment_ids"] == number
        gradient = np.asarray(table_gradient(inputs, asked.astype(np.float32)))
        assert np.flatnonzero(gradient.any(axis=1)).tolist() == ids[asked[0]].tolist()


def test_what_stands_in_padding_changes_nothing(
    encode: Callable[[Inputs], np.ndarray],
) -> None:
    inputs = make_inputs(ROWS)
    padding = inputs["segment_ids"] == 0
    other = {key: array.copy() for key, array in inputs.items()}
    for key, size in (("token_ids", text.VOCAB_SIZE), ("position_ids", LENGTH)):
        other[key][padding] = (other[key][padding] + 5) % size
    before, after = encode(inputs), encode(other)
    np.testing.assert_array_equal(before[~padding], after[~padding])
    assert np.isfinite(after).all()


def test_a_block_is_encoded_alike_wherever_it_lies(
    encode: Callable[[Inputs], np.ndarray],
) -> None:
    alone = make_inputs([[9]])
    packed = make_inputs([[4, 9, 11], [13, 9], [9, 15]], seed=1)
    places = [slice(4, 13), slice(13, 22), slice(0, 9)]
    for row, place in enumerate(places):
        for key in ("token_ids", "type_ids"):
            packed[key][row, place] = alone[key][0, :9]
    expected, states = encode(alone)[0, :9], encode(packed)
    for row, place in enumerate(places):
        np.testing.assert_allclose(states[row, place], expected, rtol=0, atol=5e-6)


def test_bfloat16_is_close_to_float32(
    params: reference.Tree, encode: Callable[[Inputs], np.ndarray]
) -> None:
    inputs = make_inputs(ROWS)
    encoder = Encoder(make_geometry(dtype=jnp.dtype("bfloat16")))
    states = jax.jit(
        lambda: encoder.apply({"params": params}, **inputs, deterministic=True)
    )()
    assert states.dtype == jnp.bfloat16
    real = inputs["segment_ids"] > 0
    error = np.asarray(states, np.float32)[real] - encode(inputs)[real]
    assert 0 < np.sqrt((error**2).mean()) < 0.05


def test_dropout_acts_on_embeddings_attention_and_sublayers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BERT's places: the embeddings, the attention's probabilities, each sublayer."""
    encoder = Encoder(make_geometry(dropout=0.125, attention_dropout=0.25))
    drawn, dropped = [], []

    def note(call: Callable, args: tuple, kwargs: dict, context: object) -> object:
        if context.method_name == "draw":
            drawn.append((context.module.path, context.module.rate))
        return call(*args, **kwargs)

    def note_shape(drop: Drop, x: jax.Array) -> jax.Array:
        dropped.append((drop.rate, x.shape))
        return x

    monkeypatch.setattr(Drop, "__call__", note_shape)
    inputs = make_inputs([[LENGTH]])
    with nn.intercept_methods(note):
        keys = {name: jax.random.key(0) for name in ("params", "dropout")}
        jax.eval_shape(lambda: encoder.init(keys, **inputs, deterministic=False))
    # The loop over layers traces its body, and that more than once.
    assert list(dict.fromkeys(drawn)) == [
        (("embedding_dropout",), 0.125),
        (("layers", "attention", "Dropout_0"), 0.25),
        (("layers", "Dropout_0"), 0.125),
        (("layers", "Dropout_1"), 0.125),
    ]
    states = (0.125, (1, LENGTH, 32))
    probabilities = (0.25, (1, HEADS, LENGTH, LENGTH))
    assert dropped[:4] == [states, probabilities, states, states]


def test_each_dropout_of_the_encoder_draws_its_own_mask(params: reference.Tree) -> None:
    encoder = Encoder(make_geometry(dropout=0.5))
    inputs = make_inputs(ROWS)
    masks: list[np.ndarray] = []

    def note(call: Callable, args: tuple, kwargs: dict, context: object) -> object:
        y = call(*args, **kwargs)
        if isinstance(y, jax.Array) and isinstance(context.module, Dropout):
            # What is computed in a loop cannot leave it otherwise.
            jax.debug.callback(lambda dropped: masks.append(dropped), y == 0)
        return y

    with nn.intercept_methods(note):
        draw = jax.jit(functools.partial(encoder.apply, deterministic=False))
        draw({"params": params}, **inputs, rngs={"dropout": jax.random.key(0)})
        jax.effects_barrier()
    # Of the embeddings, and two of each of two layers.
    assert len(masks) == 5
    for number, mask in enumerate(masks):
        assert abs(mask.mean() - 0.5) < 0.05
        for other in masks[:number]:
            assert abs((mask == other).mean() - 0.5) < 0.05


@pytest.mark.parametrize(("vocabulary", "rows"), [(1, 128), (128, 128), (28996, 29056)])
def test_the_token_table_is_padded_to_a_multiple_of_128(
    vocabulary: int, rows: int
) -> None:
    assert make_geometry(vocab_size=vocabulary).padded_vocab_size == rows
