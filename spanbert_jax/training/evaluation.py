"""Evaluation: how well the heads predict the held-out text under fixed masks."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spanbert_jax.data.batch import Batch
from spanbert_jax.training.sharding import put_batch
from spanbert_jax.training.step import TARGETS, DeviceBatch, Predictions

EvaluationStep = Callable[[Any, DeviceBatch], tuple[Predictions, dict[str, jax.Array]]]

# The heads that predict the tokens of spans.
_SPAN_HEADS = ("mlm", "sbo")

# Spans of 1..10 tokens each by themselves, all longer ones together.
LENGTH_NAMES = (*map(str, range(1, 11)), "11+")


def unigram_log_probs(counts: np.ndarray) -> np.ndarray:
    """Log-probabilities of a unigram model with add-one smoothing.

    The loss of a model that has learnt how frequent tokens are, and nothing else.

    Args:
        counts: int64 [V], how often each token is in the training text.

    Returns:
        float64 [V].
    """
    return np.log(counts + 1) - np.log(counts.sum() + len(counts))


def span_matches(
    batch: Batch, hits: np.ndarray, weights: np.ndarray, mask_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the spans that were predicted right as a whole.

    A span lies between its slots' left and right positions, whatever a head reads.

    Only spans all of whose tokens were replaced by [MASK] and have a weight count: what
    was kept or swapped is no prediction from context alone.

    Args:
        batch: R rows with M slots.
        hits: bool [R, M], whether each target was predicted right.
        weights: float32 [R, M], the head's weights.
        mask_id: the id of [MASK].

    Returns:
        int64 [11] spans right and int64 [11] spans, by length as `LENGTH_NAMES`.
    """
    row, slot = np.nonzero(batch["target_weights"])
    position, left, beyond = (
        batch[key][row, slot]
        for key in ("target_positions", "left_positions", "right_positions")
    )
    masked = batch["token_ids"][row, position] == mask_id
    usable = masked & (weights[row, slot] > 0)
    # The slots of a span stand side by side and share its left boundary.
    new = np.ones(len(row), bool)
    new[1:] = (np.diff(row) != 0) | (np.diff(left) != 0)
    begins = np.flatnonzero(new)
    zeros = np.zeros(len(LENGTH_NAMES), np.int64)
    if not begins.size:
        return zeros, zeros
    counted = np.logical_and.reduceat(usable, begins)
    right = counted & np.logical_and.reduceat(hits[row, slot], begins)
    length = (beyond - left - 1)[begins]
    bucket = np.minimum(length, len(LENGTH_NAMES)) - 1
    size = len(LENGTH_NAMES)
    return (
        np.bincount(bucket[right], minlength=size),
        np.bincount(bucket[counted], minlength=size),
    )


def evaluate(
    step: EvaluationStep,
    params: Any,
    batches: Iterable[Batch],
    mesh: Mesh,
    mask_id: int,
    unigram: np.ndarray,
) -> dict[str, Any]:
    """Scores a model on held-out batches, each block once.

    Args:
        step: the jitted evaluation step.
        params: of the model.
        batches: the held-out batches.
        mesh: of the devices.
        mask_id: the id of [MASK].
        unigram: float64 [V], log-probabilities to compare with.

    Returns:
        The metrics by name. Means over no target are left out.
    """
    heads: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    spans = {head: np.zeros((2, len(LENGTH_NAMES)), np.int64) for head in _SPAN_HEADS}
    unigram_loss = 0.0
    for batch in batches:
        predictions, hits = jax.device_get(step(params, put_batch(batch, mesh)))
        by_target = unigram[batch["target_ids"]] * batch["target_weights"]
        unigram_loss -= float(by_target.sum())
        for head, sums in predictions.items():
            heads[head] += sums
            if head in spans:
                weights = batch[TARGETS[head].weights]
                spans[head] += span_matches(batch, hits[head], weights, mask_id)
    metrics: dict[str, Any] = {}
    for head, (loss, correct, weight) in heads.items():
        if weight:
            metrics[f"{head}_loss"] = loss / weight
            metrics[f"{head}_accuracy"] = correct / weight
            metrics[f"{head}_targets"] = int(weight)
            if head in spans:
                metrics |= _span_metrics(head, *spans[head])
    if "mlm_loss" in metrics:
        metrics["perplexity"] = math.exp(min(metrics["mlm_loss"], 700))
        metrics["unigram_loss"] = unigram_loss / metrics["mlm_targets"]
    return metrics


def _span_metrics(head: str, right: np.ndarray, count: np.ndarray) -> dict[str, Any]:
    shares = {
        name: float(r / n)
        for name, r, n in zip(LENGTH_NAMES, right, count, strict=True)
        if n
    }
    counts = dict(zip(LENGTH_NAMES, count.tolist(), strict=True))
    return {f"{head}_span_exact": shares, f"{head}_spans": counts}
