"""Evaluation: how well the heads predict the held-out text under fixed masks."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spanbert_jax.model.losses import hits
from spanbert_jax.model.spanbert import SpanBert
from spanbert_jax.training.step import (
    TARGETS,
    DeviceBatch,
    Predictions,
    present,
    score_heads,
)

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


class SpanMatches(NamedTuple):
    """Spans by length, as `LENGTH_NAMES`; int32 [11] each.

    Attributes:
        right: those that were predicted right as a whole.
        count: all.
    """

    right: jax.Array
    count: jax.Array


class Scores(NamedTuple):
    """What a look at held-out text reports: sums over the global batch.

    Attributes:
        heads: the sums of each head that the model has.
        spans: of each head that predicts the tokens of spans.
        unigram_loss: of the targets of the MLM head, under the unigram model.
    """

    heads: Predictions
    spans: dict[str, SpanMatches]
    unigram_loss: jax.Array


def span_matches(
    batch: DeviceBatch, hits: jax.Array, weights: jax.Array, mask_id: jax.Array
) -> SpanMatches:
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
        The counts.
    """
    left, beyond = batch["left_positions"], batch["right_positions"]
    is_target = batch["target_weights"] > 0
    shown = jnp.take_along_axis(batch["token_ids"], batch["target_positions"], axis=1)
    usable = (shown == mask_id) & (weights > 0)
    # No two spans of a row have the same left boundary.
    same = (left[:, :, None] == left[:, None, :]) & is_target[:, None, :]

    def holds_of_all(condition: jax.Array) -> jax.Array:
        return (condition[:, None, :] | ~same).all(axis=-1)

    # A span is counted at its first token.
    count = is_target & (batch["span_offsets"] == 1) & holds_of_all(usable)
    right = count & holds_of_all(hits)
    bucket = jnp.minimum(beyond - left - 1, len(LENGTH_NAMES)) - 1
    buckets = jnp.arange(len(LENGTH_NAMES))[None, None, :] == bucket[..., None]

    def by_length(spans: jax.Array) -> jax.Array:
        return (spans[..., None] & buckets).sum(axis=(0, 1))

    return SpanMatches(by_length(right), by_length(count))


def evaluation_step(
    params: Any,
    batch: DeviceBatch,
    unigram: jax.Array,
    mask_id: jax.Array,
    model: SpanBert,
) -> Scores:
    """Scores the heads on an evaluation batch, without dropout.

    Args:
        params: of the model.
        batch: R rows.
        unigram: float32 [V], log-probabilities to compare with.
        mask_id: the id of [MASK].
        model: the model.

    Returns:
        The sums.
    """
    logits = model.apply({"params": params}, batch, deterministic=True)
    spans = {
        head: span_matches(
            batch,
            hits(x, batch[TARGETS[head].ids]),
            batch[TARGETS[head].weights],
            mask_id,
        )
        for head, x in present(logits).items()
        if head in _SPAN_HEADS
    }
    by_target = unigram[batch["target_ids"]] * batch["target_weights"]
    return Scores(score_heads(logits, batch), spans, -by_target.sum())


def evaluate(
    look: Callable[[DeviceBatch], tuple[Scores, jax.Array]],
    batches: Iterable[DeviceBatch],
) -> dict[str, Any] | None:
    """Scores a model on held-out batches, each block once.

    Args:
        look: the compiled evaluation step, but for the batch: its scores, and whether
            the run is to stop.
        batches: the held-out batches, at least one.

    Returns:
        The metrics by name; means over no target are left out. None if the run is to
        stop, which must not wait for an evaluation.
    """
    # Added up in float64, on the host.
    total: Any = None
    for batch in batches:
        scores, stops = jax.device_get(look(batch))
        if stops:
            return None
        scores = jax.tree.map(np.float64, scores)
        total = scores if total is None else jax.tree.map(np.add, total, scores)
    metrics: dict[str, Any] = {}
    for head, (loss, correct, weight) in total.heads.items():
        if weight:
            metrics[f"{head}_loss"] = float(loss / weight)
            metrics[f"{head}_accuracy"] = float(correct / weight)
            metrics[f"{head}_targets"] = int(weight)
            if head in total.spans:
                metrics |= _span_metrics(head, *total.spans[head])
    if "mlm_loss" in metrics:
        metrics["perplexity"] = math.exp(min(metrics["mlm_loss"], 700))
        metrics["unigram_loss"] = float(total.unigram_loss / metrics["mlm_targets"])
    return metrics


def _span_metrics(head: str, right: np.ndarray, count: np.ndarray) -> dict[str, Any]:
    shares = {
        name: float(r / n)
        for name, r, n in zip(LENGTH_NAMES, right, count, strict=True)
        if n
    }
    counts = dict(zip(LENGTH_NAMES, map(int, count), strict=True))
    return {f"{head}_span_exact": shares, f"{head}_spans": counts}
