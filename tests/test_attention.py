"""The kinds of attention against each other, and lowered for chips not here."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from spanbert_jax import settings
from spanbert_jax.data.batch import BatchShape
from spanbert_jax.errors import InputError
from spanbert_jax.model.attention import Attention, cudnn, plain, splash
from spanbert_jax.model.dropout import NO_DROP, Drop
from spanbert_jax.training.program import make_program
from spanbert_jax.training.sharding import make_mesh, on
from test_sharding import compose, make_config

ROWS, LENGTH, HEADS, SIZE = 4, 128, 2, 64
# What the fused kinds compute, here: cuDNN's arithmetic by XLA, the kernel emulated.
FUSED = {
    "cudnn": functools.partial(cudnn, implementation="xla"),
    "splash": functools.partial(splash, interpret=True),
}


@pytest.fixture(scope="module")
def segment_ids() -> np.ndarray:
    """Packed and full, packed with padding, one block, padding only."""
    ids = np.zeros((ROWS, LENGTH), np.int32)
    ids[0] = np.repeat([1, 2, 3], [60, 8, 60])
    ids[1, :100] = np.repeat([1, 2], [1, 99])
    ids[2] = 1
    return ids


def drawn(dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    size = ROWS, LENGTH, HEADS, SIZE
    return [jnp.asarray(2 * rng.normal(size=size), dtype) for _ in range(3)]


def attend(attention: Attention, segment_ids: np.ndarray) -> Callable:
    ids = jnp.asarray(segment_ids)
    return lambda q, k, v: attention(q, k, v, ids, NO_DROP)


def by_rows_and_heads(
    qkv: list[jax.Array], segment_ids: np.ndarray, drop: Drop
) -> jax.Array:
    """Attention as it is written in a textbook, for jax to differentiate."""
    q, k, v = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in qkv)
    scores = q @ k.transpose(0, 1, 3, 2) / SIZE**0.5
    seen = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return (drop(weights) @ v).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2)]
)
def test_values_and_gradients_are_those_of_the_textbook(
    segment_ids: np.ndarray, rate: float, dtype: str, tolerance: float
) -> None:
    """Relative to their norm, with the same things dropped in both passes."""
    real = (segment_ids > 0)[..., None, None]
    slopes = np.random.default_rng(1).normal(size=(ROWS, LENGTH, HEADS, SIZE)) * real
    drop = Drop(jnp.array([1, 2], jnp.uint32), rate)
    qkv = drawn(dtype)

    def outcome(function: Callable[..., jax.Array], qkv: list[jax.Array]) -> list:
        y, pull = jax.vjp(function, *qkv)
        return [y * real, *pull(jnp.asarray(slopes, y.dtype))]

    ids = jnp.asarray(segment_ids)
    found = outcome(lambda *qkv: plain(*qkv, ids, drop), qkv)
    wide = [x.astype(jnp.float32) for x in qkv]
    expected = outcome(lambda *qkv: by_rows_and_heads(qkv, segment_ids, drop), wide)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == jnp.dtype(dtype)
        mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(mine - other) < tolerance * np.linalg.norm(other)


@pytest.mark.parametrize("name", FUSED)
def test_each_kind_has_the_values_and_gradients_of_the_plain_one(
    segment_ids: np.ndarray, name: str
) -> None:
    real = (segment_ids > 0)[..., None, None]
    weights = np.random.default_rng(1).normal(size=(ROWS, LENGTH, HEADS, SIZE)) * real

    def outcome(attention: Attention) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def total(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = attend(attention, segment_ids)(*qkv)
            return (y * weights.astype(np.float32)).sum(), y

        differentiate = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
        (_, y), gradients = jax.jit(differentiate)(*drawn())
        return y, gradients

    (expected, slopes), (found, theirs) = outcome(plain), outcome(FUSED[name])
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found * real, expected * real, rtol=0, atol=1e-5)
    for mine, other in zip(theirs, slopes, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=5e-5)


def test_the_kernel_runs_on_each_device_by_itself(segment_ids: np.ndarray) -> None:
    """On its own rows and heads: 2 x 2 devices give what one gives."""
    function = jax.jit(attend(FUSED["splash"], segment_ids))
    alone = function(*drawn())
    with on(compose(make_config((2, 1, 2))).mesh):
        shared = jax.jit(attend(FUSED["splash"], segment_ids))(*drawn())
    assert len(shared.sharding.device_set) == 4
    np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-6)


def test_splash_is_three_kernels_on_a_tpu(segment_ids: np.ndarray) -> None:
    function = attend(splash, segment_ids)
    slope = jax.jit(jax.grad(lambda *qkv: function(*qkv).sum().astype(jnp.float32)))
    lowered = slope.trace(*drawn("bfloat16")).lower(lowering_platforms=("tpu",))
    # Forwards, and backwards for queries and for keys with values.
    assert lowered.as_text().count("tpu_custom_call") == 3


def test_a_program_with_the_kernel_starts_and_runs_on_many_devices() -> None:
    """Traced on eight devices for TPUs, each of which takes one row."""
    config = make_config((8, 1, 1), **{"model.max_positions": LENGTH})
    model = settings.model(config, vocab_size=300)
    mesh = make_mesh(config, model.geometry)
    # Here, as a config would be refused: these are no TPUs.
    fused = dataclasses.replace(
        model.geometry, attention="splash", attention_dropout=0.0
    )
    shape = BatchShape(rows=8, block_length=LENGTH, target_slots=8)
    program = make_program(config, model.clone(geometry=fused), mesh, shape)
    with on(mesh):
        started = program.init.trace(jax.random.key(0))
        updated = program.update.trace(program.state, program.batch, program.votes)
    texts = [
        traced.lower(lowering_platforms=("tpu",)).as_text()
        for traced in (started, updated)
    ]
    assert [text.count("tpu_custom_call") for text in texts] == [0, 3]


def test_cudnn_is_one_call_on_a_gpu(
    segment_ids: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    function = jax.jit(attend(cudnn, segment_ids))
    lowered = function.trace(*drawn("bfloat16")).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__cudnn$fmha") == 1


@pytest.mark.parametrize(("name", "chip"), [("splash", "tpu"), ("cudnn", "gpu")])
def test_a_kind_that_the_devices_cannot_do_is_refused(name: str, chip: str) -> None:
    config = make_config((1, 1, 1), **{"model.attention": name})
    with pytest.raises(InputError, match=f"{name}.* runs on a {chip}.* kind cpu"):
        compose(config)
