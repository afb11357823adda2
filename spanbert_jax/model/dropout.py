"""Dropout by a counter hash: what is dropped is a function of a seed and a place.

The bits are computed where they are used; the compiler may keep a mask for the backward
pass. They are the same however an array is split over devices. They cost some twenty
integer operations an element; those of jax.random took a tenth of a step on a CPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

_WORDS = 2**32


def _mix(x: jax.Array, key: jax.Array) -> jax.Array:
    """Scrambles uint32 values, a bijection for each key.

    Wellons' "lowbias32", in which each bit of x flips each bit of the outcome with a
    probability close to 1/2; the key comes in between its two multiplications.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ key) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def hashed_bits(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random bits of which each element's are a hash of the seed and of its place.

    A line, of the last axis, has two keys of its own, 32 bits each: what its elements
    count up from, and what is mixed in later. With the first alone, some two of 10^5
    lines would count through the same numbers, and share bits.

    Args:
        seed: uint32 [2].
        shape: of at least one axis, up to 2^32 lines.

    Returns:
        uint32 of this shape.
    """
    *lines, size = shape
    number = jnp.zeros((*lines, 1), jnp.uint32)
    for axis, length in enumerate(lines):
        index = jax.lax.broadcasted_iota(jnp.uint32, number.shape, axis)
        number = number * jnp.uint32(length) + index
    start = _mix(number ^ seed[0], seed[1])
    place = jax.lax.broadcasted_iota(
        jnp.uint32, (*(1 for _ in lines), size), len(lines)
    )
    return _mix(start + place, _mix(start, seed[0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drop:
    """Drops elements of an array; of a shape always the same ones.

    Attributes:
        seed: uint32 [2], from a generator: seeds that are near each other, such as
            counted ones, are not what the hash was tested with.
        rate: the share that is dropped, in [0, 1), to the next 2^-32 below.
    """

    seed: jax.Array | np.ndarray
    rate: float = dataclasses.field(metadata={"static": True})

    def __call__(self, x: jax.Array) -> jax.Array:
        """Zeroes what is dropped and scales the rest, so that the mean is kept.

        Args:
            x: of at least one axis, unless the rate is 0.

        Returns:
            The same shape and dtype.
        """
        dropped = int(self.rate * _WORDS)
        if dropped == 0:
            return x
        kept = hashed_bits(self.seed, x.shape) >= jnp.uint32(dropped)
        # In float32: bfloat16 has no number near 10/9, and would shrink the mean.
        scaled = x.astype(jnp.float32) * (_WORDS / (_WORDS - dropped))
        return jnp.where(kept, scaled.astype(x.dtype), jnp.zeros((), x.dtype))


NO_DROP = Drop(np.zeros(2, np.uint32), 0.0)


class Dropout(nn.Module):
    """Draws what to drop from the random numbers "dropout" of `rngs`.

    Attributes:
        rate: as in `Drop`.
    """

    rate: float

    def draw(self, deterministic: bool) -> Drop:
        """What to drop: nothing if deterministic, else something new at each call."""
        if deterministic or self.rate == 0:
            return NO_DROP
        seed = jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32)
        return Drop(seed, self.rate)

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """Drops elements of x, of at least one axis."""
        return self.draw(deterministic)(x)
