"""Model FLOPs: what the matrix products of a step cost by arithmetic alone."""

from spanbert_jax.model.spanbert import SpanBert


def forward_flops(model: SpanBert, rows: int, length: int, slots: int) -> int:
    """FLOPs of the matrix products of one forward pass.

    A multiply-add counts as two. Look-ups, LayerNorm, GeLU, softmax and dropout do not
    count, nor does the padding of the vocabulary; padding within a row does.

    Args:
        model: the model.
        rows: R.
        length: L, places of a row.
        slots: M, target slots of a row, each run through both heads.

    Returns:
        The number of operations.
    """
    g = model.geometry
    size = g.hidden_size
    per_place = 4 * size * size + 2 * size * g.intermediate_size
    attention = 2 * length * length * size
    layers = g.num_layers * (length * per_place + attention)
    mlm = size * size + size * g.vocab_size
    heads = mlm
    if model.sbo_positions:
        heads += (2 * size + model.sbo_position_size) * size + mlm
    return 2 * rows * (layers + slots * heads)


def step_flops(model: SpanBert, rows: int, length: int, slots: int) -> int:
    """FLOPs of an update: the backward pass costs twice the forward pass."""
    return 3 * forward_flops(model, rows, length, slots)
