"""Model FLOPs: what the matrix products of a step cost by arithmetic alone."""

from collections.abc import Mapping
from typing import Any

from spanbert_jax.model.spanbert import SpanBert


def forward_flops(model: SpanBert, batch: Mapping[str, Any]) -> int:
    """FLOPs of the matrix products of one forward pass.

    A multiply-add counts as two. Look-ups, LayerNorm, GeLU, softmax and dropout do not
    count, nor does the padding of the vocabulary; padding within a row does.

    Args:
        model: the model.
        batch: arrays, or anything else with their shapes, as `spanbert_jax.data.batch`
            describes them.

    Returns:
        The number of operations.
    """
    g = model.geometry
    size = g.hidden_size
    rows, length = batch["token_ids"].shape
    per_place = 4 * size * size + 2 * size * g.intermediate_size
    attention = 2 * length * length * size
    products = g.num_layers * (length * per_place + attention)
    projection = size * g.vocab_size
    slot = size * size + projection
    if model.sbo:
        width = len(model.sbo.sides) * size + model.sbo.position_size
        slot += width * size + (model.sbo.depth - 1) * size * size + projection
    products += batch["target_positions"].shape[1] * slot
    if model.nsp:
        products += batch["nsp_positions"].shape[1] * (size * size + 2 * size)
    return 2 * rows * products


def step_flops(model: SpanBert, batch: Mapping[str, Any]) -> int:
    """FLOPs of an update: the backward pass costs twice the forward pass."""
    return 3 * forward_flops(model, batch)
