"""Evaluation: how well both heads predict the held-out text under fixed masks."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spanbert_jax.data.batch import Batch
from spanbert_jax.model.losses import Prediction
from spanbert_jax.training.sharding import put_batch
from spanbert_jax.training.step import DeviceBatch, Hits

EvaluationStep = Callable[[Any, DeviceBatch], tuple[Prediction, Prediction, Hits]]

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
    heads = {"mlm": np.zeros(3), "sbo": np.zeros(3)}
    size = len(LENGTH_NAMES)
    spans = {head: np.zeros((2, size), np.int64) for head in heads}
    unigram_loss = 0.0
    for batch in batches:
        mlm, sbo, hits = jax.device_get(step(params, put_batch(batch, mesh)))
        heads["mlm"] += mlm
        heads["sbo"] += sbo
        weights = batch["target_weights"]
        unigram_loss -= float((unigram[batch["target_ids"]] * weights).sum())
        spans["mlm"] += span_matches(batch, hits.mlm, weights, mask_id)
        spans["sbo"] += span_matches(batch, hits.sbo, batch["sbo_weights"], mask_id)
    metrics: dict[str, Any] = {}
    for head, (loss, correct, weight) in heads.items():
        if weight:
            metrics[f"{head}_loss"] = loss / weight
            metrics[f"{head}_accuracy"] = correct / weight
            metrics[f"{head}_targets"] = int(weight)
            right, count = spans[head]
            metrics[f"{head}_span_exact"] = _shares(right, count)
            metrics[f"{head}_spans"] = dict(
                zip(LENGTH_NAMES, count.tolist(), strict=True)
            )
    if "mlm_loss" in metrics:
        metrics["perplexity"] = math.exp(min(metrics["mlm_loss"], 700))
        metrics["unigram_loss"] = unigram_loss / metrics["mlm_targets"]
    return metrics


def _shares(right: np.ndarray, count: np.ndarray) -> dict[str, float]:
    return {
        name: float(r / n)
        for name, r, n in zip(LENGTH_NAMES, right, count, strict=True)
        if n
    }
