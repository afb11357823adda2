"""The likeliest tokens and sequences of tokens, by their log probabilities.

Of equally likely tokens the one of the lower id comes first; of sequences the one whose
beginning does, without its last token.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Best(NamedTuple):
    """The likeliest tokens after each of some beginnings.

    Attributes:
        ids: int32 [B, K], the likeliest first.
        log_probs: float64 [B, K].
    """

    ids: np.ndarray
    log_probs: np.ndarray


class Sequences(NamedTuple):
    """The likeliest sequences.

    Attributes:
        ids: int32 [K, n], the likeliest first.
        log_probs: float64 [K].
    """

    ids: np.ndarray
    log_probs: np.ndarray


# From beginnings, int32 [B, n], to the likeliest tokens behind each.
Extend = Callable[[np.ndarray], Best]


def best_tokens(log_probs: np.ndarray, allowed: np.ndarray, count: int) -> Best:
    """The likeliest of the tokens that may be predicted.

    Args:
        log_probs: float [B, V].
        allowed: int32 [W], their ids in rising order.
        count: K; fewer if there are no more.

    Returns:
        The likeliest of each row.
    """
    found = log_probs[:, allowed].astype(np.float64)
    order = np.argsort(-found, axis=1, kind="stable")[:, :count]
    return Best(allowed[order], np.take_along_axis(found, order, axis=1))


def beam_search(first: Best, extend: Extend, length: int, width: int) -> Sequences:
    """Finds likely sequences from the left, by the chain rule.

    Exact if `width` is the number of all sequences; else a sequence is lost if its
    beginning is not among the `width` likeliest of its length.

    Args:
        first: [1, K], the likeliest first tokens, at least `width` if there are.
        extend: tells what may come behind, at least `width` tokens if there are.
        length: tokens of a sequence, at least 1.
        width: sequences that are kept at each length.

    Returns:
        At most `width` sequences.
    """
    nothing = Sequences(np.zeros((1, 0), np.int32), np.zeros(1))
    beam = _continued(nothing, first, width)
    for _ in range(length - 1):
        beam = _continued(beam, extend(beam.ids), width)
    return beam


def best_products(tokens: Best, count: int) -> Sequences:
    """The likeliest sequences of tokens that do not depend on each other; exact.

    Args:
        tokens: [n, K], for each place the likeliest, at least `count` if there are.
        count: sequences; fewer if there are no more.

    Returns:
        The sequences.
    """
    found = Sequences(np.zeros((1, 0), np.int32), np.zeros(1))
    for ids, log_probs in zip(*tokens, strict=True):
        # Only the likeliest beginnings begin the likeliest sequences.
        size = (len(found.ids), len(ids))
        rows = Best(np.broadcast_to(ids, size), np.broadcast_to(log_probs, size))
        found = _continued(found, rows, count)
    return found


def _continued(beginnings: Sequences, following: Best, count: int) -> Sequences:
    """The likeliest of all beginnings with one more token."""
    totals = beginnings.log_probs[:, None] + following.log_probs
    order = np.argsort(-totals, axis=None, kind="stable")[:count]
    rows, places = np.unravel_index(order, totals.shape)
    ids = [beginnings.ids[rows], following.ids[rows, places][:, None]]
    return Sequences(np.concatenate(ids, axis=1), totals[rows, places])
