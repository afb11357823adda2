"""Checksums of arrays, computed where the arrays are."""

from typing import Any

import jax
import jax.numpy as jnp


def sum_bits(tree: Any) -> Any:
    """Adds up each array's 32-bit words, each times an odd number of its own place.

    Modulo 2**32 the order of a sum does not matter, so that it is the same however the
    array is spread over devices; and a single flipped bit always changes it, as an odd
    multiple of a power of two is not 0.

    Args:
        tree: of arrays of 32-bit elements.

    Returns:
        The same tree of uint32 scalars.
    """

    def add(x: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        place, stride = jnp.zeros(x.shape, jnp.uint32), 1
        for axis in reversed(range(x.ndim)):
            steps = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            place += steps * jnp.uint32(stride % 2**32)
            stride *= x.shape[axis]
        return (words * (2 * place + 1)).sum(dtype=jnp.uint32)

    return jax.tree.map(add, tree)


def checksum(tree: Any) -> jax.Array:
    """One uint32 for a whole tree: equal trees, equal numbers."""
    return sum_bits(jnp.stack(jax.tree.leaves(sum_bits(tree))))
