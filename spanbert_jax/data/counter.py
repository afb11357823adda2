"""Counter-based random numbers: a draw is a hash of what it is for, never of history.

The same (seed, epoch, block, draw) gives the same bits on any process, in any order
and after any restart, and there is no generator to save.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FEISTEL_ROUNDS = 8

# What a seed is used for, folded in first so that no two uses share their bits.
ROWS, MASKS, MIXING, PAIRS = range(4)


def mix(x: np.ndarray) -> np.ndarray:
    """Scrambles uint64 values; a bijection.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014, with Stafford's variant 13
    constants).

    Args:
        x: uint64 of any shape.

    Returns:
        uint64 of the same shape.
    """
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def fold(key: np.ndarray, value: np.ndarray | int) -> np.ndarray:
    """Derives a new key from a key and a number, as jax.random.fold_in does.

    Args:
        key: uint64 of at least one dimension.
        value: non-negative integers, broadcast against `key`.

    Returns:
        uint64, the broadcast shape.
    """
    step = np.atleast_1d(value).astype(np.uint64)
    step += np.uint64(1)
    step *= _GOLDEN
    return mix(key + step)


def root_key(seed: int) -> np.ndarray:
    """The key that a seed stands for: uint64 of shape [1].

    One element, not a scalar: NumPy warns of the intended wrap-around of uint64
    arithmetic on scalars, not on arrays.
    """
    return mix(np.array([seed % 2**64], np.uint64))


def derive_seed(seed: int, number: int) -> int:
    """A further seed, of 64 bits, for each number."""
    return int(fold(root_key(seed), number)[0])


def below(bits: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Uniform integers in [0, bound) from the upper 32 bits.

    The bias of the multiply-shift is at most bound / 2**32.

    Args:
        bits: uint64 of any shape.
        bound: 1 to 2**32, broadcast against `bits`.

    Returns:
        int64, the broadcast shape.
    """
    high = bits >> np.uint64(32)
    scaled = high * np.asarray(bound).astype(np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int64)


def share(bits: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) from the upper 53 bits: float64, the same shape."""
    return (bits >> np.uint64(11)) * 2.0**-53


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Places of a keyed random permutation of range(size), without storing it.

    A Feistel network over the next even power of two; values that fall outside the
    range walk on along their cycle until they come back in (Black and Rogaway 2002).

    Args:
        index: int64 [n], each in [0, size).
        size: how many elements are permuted.
        key: uint64, broadcast against `index`: one permutation a key.

    Returns:
        int64 [n]: where each index goes.
    """
    half = np.uint64(max(3, (max(size - 1, 1).bit_length() + 1) // 2))
    low_half = (np.uint64(1) << half) - np.uint64(1)
    rounds = [fold(key, number) for number in range(_FEISTEL_ROUNDS)]
    rounds = [np.broadcast_to(one, index.shape) for one in rounds]

    def encrypt(x: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        left, right = x >> half, x & low_half
        for one in keys:
            left, right = right, left ^ (mix(right + one) & low_half)
        return (left << half) | right

    place = encrypt(index.astype(np.uint64), rounds)
    outside = np.flatnonzero(place >= size)
    while outside.size:
        walked = encrypt(place[outside], [one[outside] for one in rounds])
        place[outside] = walked
        outside = outside[walked >= size]
    return place.astype(np.int64)
