"""The hash's bits are as good as drawn ones, and the same wherever they are computed.

Tests of chance have a fixed seed, and bounds that one in some 10^5 would exceed.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.stats import chisquare, norm

from spanbert_jax.model.dropout import NO_DROP, Drop, Dropout, hashed_bits

CHANCE = 1e-5
SIGMAS = norm.isf(CHANCE / 2)
SHARE = 0.1


def seed_of(number: int) -> jax.Array:
    return jax.random.bits(jax.random.key(number), (2,), jnp.uint32)


def bits(seed: int, *shape: int) -> np.ndarray:
    draw = jax.jit(hashed_bits, static_argnums=1)
    return np.asarray(draw(seed_of(seed), shape))


def dropped(words: np.ndarray) -> np.ndarray:
    """1 where dropped, standardised: mean 0 and variance 1 if all is well."""
    drops = words < SHARE * 2**32
    return (drops - np.float32(SHARE)) / np.float32(math.sqrt(SHARE * (1 - SHARE)))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Of standardised drops, in standard deviations of that of independent ones."""
    return float((a * b).mean(dtype=np.float64) * math.sqrt(a.size))


def assert_none_is_far(correlations: list[float]) -> None:
    bound = norm.isf(CHANCE / 2 / len(correlations))
    assert max(map(abs, correlations)) < bound


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 16, 64), (64, 128, 512)])
@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_each_byte_is_uniform(shape: tuple[int, ...], shift: int) -> None:
    counts = np.bincount((bits(1, *shape) >> shift & 255).ravel(), minlength=256)
    assert chisquare(counts).pvalue > CHANCE


def test_each_place_of_a_line_and_each_line_drops_its_share() -> None:
    drops = bits(2, 1 << 14, 256) < SHARE * 2**32
    for axis in (0, 1):
        counts = drops.sum(axis=axis)
        size = drops.shape[axis]
        expected = SHARE * size
        statistic = ((counts - expected) ** 2).sum() / (expected * (1 - SHARE))
        spread = math.sqrt(2 * len(counts))
        assert abs(statistic - len(counts)) < (SIGMAS + 1) * spread


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_neighbours_on_each_axis_are_independent(axis: int) -> None:
    drops = dropped(bits(3, 16, 8, 128, 256))
    size = drops.shape[axis]
    found = []
    for lag in {1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 100, 128, 255} & set(range(size)):
        ahead = np.take(drops, np.arange(lag, size), axis)
        found.append(correlation(ahead, np.take(drops, np.arange(size - lag), axis)))
    assert_none_is_far(found)


def test_neighbours_across_two_axes_are_independent() -> None:
    drops = dropped(bits(4, 1024, 1024))
    found = []
    for down in (1, 2, 512):
        for right in (1, 2, 512):
            a, b = drops[down:, right:], drops[:-down, :-right]
            found += [correlation(a, b)]
            a, b = drops[down:, :-right], drops[:-down, right:]
            found += [correlation(a, b)]
    assert_none_is_far(found)


@pytest.mark.parametrize("transposed", [False, True])
def test_all_places_and_all_lines_are_uncorrelated(transposed: bool) -> None:
    """The whole correlation matrix: of 256 places over lines, of 256 lines over places.

    Its largest entry, and the sum of all squares, which sees a weak tie of many.
    """
    shape = (256, 1 << 14) if transposed else (1 << 14, 256)
    drops = dropped(bits(5, *shape))
    drops = drops if transposed else drops.T
    matrix = drops @ drops.T / math.sqrt(drops.shape[1])
    pairs = matrix[np.triu_indices(256, 1)].astype(np.float64)
    assert_none_is_far(pairs.tolist())
    excess = (pairs**2).sum() - len(pairs)
    assert abs(excess) < SIGMAS * math.sqrt(2 * len(pairs))


def test_four_neighbours_take_every_joint_value_alike() -> None:
    """The upper 3 bits of each: what pairs cannot show."""
    upper = (bits(6, 1 << 14, 256) >> 29).reshape(-1, 4)
    counts = np.bincount(upper @ np.array([512, 64, 8, 1]), minlength=4096)
    assert chisquare(counts).pvalue > CHANCE


def test_a_flipped_bit_of_seed_or_place_flips_each_bit_half_the_time() -> None:
    rng = np.random.default_rng(7)
    seeds = rng.integers(0, 2**32, (256, 2), np.uint32)
    draw = jax.jit(jax.vmap(lambda seed: hashed_bits(seed, (32, 32))))
    words = np.asarray(draw(seeds))
    others = []
    for word in (0, 1):
        for bit in range(32):
            near = seeds.copy()
            near[:, word] ^= np.uint32(1 << bit)
            others.append(np.asarray(draw(near)))
    for axis in (1, 2):
        for bit in range(5):
            others.append(np.take(words, np.arange(32) ^ (1 << bit), axis))
    # A flip of a place is seen from both sides: half as many are independent.
    bound = SIGMAS * 0.5 / math.sqrt(words.size / 2)
    for other in others:
        flips = np.unpackbits((words ^ other).view(np.uint8).reshape(-1, 4), axis=1)
        assert np.abs(flips.mean(axis=0) - 0.5).max() < bound


def test_other_seeds_and_other_calls_are_independent() -> None:
    """Steps, layers and sites differ by their key alone, as here by its number."""
    number = 48
    drops = [dropped(bits(seed, 256, 256)) for seed in range(100, 100 + number)]
    found = [correlation(a, b) for i, a in enumerate(drops) for b in drops[:i]]
    assert_none_is_far(found)
    # Nor is one the other shifted along the lines.
    a, *rest = drops
    assert_none_is_far(
        [
            correlation(a[:, lag:], b[:, : 256 - lag])
            for b in rest
            for lag in (1, 2, 3, 4, 8)
        ]
    )


def test_equal_words_are_as_rare_as_among_drawn_ones() -> None:
    """Among n words, n^2 / 2^33 pairs are to be equal.

    Of these lines some 64 pairs start within a line's length of each other. If they
    went on alike, there would be twice as many.
    """
    words = bits(8, 1 << 16, 64)
    _, counts = np.unique(words, return_counts=True)
    expected = words.size**2 / 2**33
    pairs = int((counts * (counts - 1) // 2).sum())
    assert abs(pairs - expected) < SIGMAS * math.sqrt(expected)


@pytest.mark.parametrize("shape", [(1,), (4096,), (64, 61), (3, 7, 11, 18), (5, 1)])
def test_bits_have_the_shape_asked_for(shape: tuple[int, ...]) -> None:
    drawn = hashed_bits(seed_of(0), shape)
    assert (drawn.shape, drawn.dtype) == (shape, jnp.uint32)
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_each_device_computes_its_part_and_no_more(axis: int) -> None:
    """The bits of a whole array, wherever it is cut."""
    shape = (8, 16, 24, 32)
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    cut = NamedSharding(mesh, PartitionSpec(*(None,) * axis, "devices"))
    draw = jax.jit(lambda seed: hashed_bits(seed, shape), out_shardings=cut)
    compiled = draw.lower(seed_of(1)).compile()
    np.testing.assert_array_equal(compiled(seed_of(1)), bits(1, *shape))
    assert "u32[8,16,24,32]" not in compiled.as_text()


# ---- What is dropped


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_a_rate_is_met_and_the_mean_is_kept(rate: float) -> None:
    size = 1 << 21
    y = np.asarray(Drop(seed_of(9), rate)(jnp.ones(size)))
    zero, kept = np.unique(y)
    assert (zero, kept) == (0, pytest.approx(1 / (1 - rate), rel=1e-6))
    deviation = math.sqrt(rate * (1 - rate) / size)
    assert abs((y == 0).mean() - rate) < SIGMAS * deviation
    assert abs(y.mean(dtype=np.float64) - 1) < SIGMAS * deviation / (1 - rate)


@pytest.mark.parametrize("rate", [1e-12, 2**-31, 1 - 2**-31, 1 - 2**-53])
def test_a_rate_near_0_or_1_is_finite(rate: float) -> None:
    y = np.asarray(Drop(seed_of(10), rate)(jnp.ones(1000)))
    assert (y == round(1 - rate)).all()


def test_bfloat16_keeps_the_mean_too() -> None:
    # The factor itself, rounded to bfloat16, is off by 1.6e-3.
    x = jax.random.uniform(jax.random.key(0), 1 << 16, jnp.bfloat16, 1, 2)
    y = Drop(seed_of(11), 0.1)(x)
    assert y.dtype == jnp.bfloat16
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert y.sum() / x[y > 0].sum() == pytest.approx(1 / 0.9, rel=1e-4)


def test_the_gradient_drops_what_was_dropped() -> None:
    drop, x = Drop(seed_of(12), 0.3), jnp.arange(1.0, 1001)
    slopes = jax.grad(lambda x: drop(x).sum())(x)
    np.testing.assert_allclose(slopes * x, drop(x), rtol=1e-6)


def drop_of(key: int, rate: float = 0.5, deterministic: bool = False) -> Drop:
    rngs = {"dropout": jax.random.key(key)}
    return Dropout(rate).apply({}, deterministic, rngs=rngs, method="draw")


def test_a_dropout_key_means_one_mask_and_another_key_another() -> None:
    first, again, other = (drop_of(key)(jnp.ones(1000)) for key in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 400 < (first != other).sum() < 600


def test_each_call_drops_something_else() -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            dropout = Dropout(0.5)
            return dropout(x, False), dropout(x, False)

    first, second = Twice().apply(
        {}, jnp.ones(1000), rngs={"dropout": jax.random.key(0)}
    )
    assert 400 < (first != second).sum() < 600


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_deterministic_dropout_is_the_identity(rate: float) -> None:
    x = jnp.arange(1000.0)
    np.testing.assert_array_equal(Dropout(rate).apply({}, x, True), x)
    np.testing.assert_array_equal(NO_DROP(x), x)
