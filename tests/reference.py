"""The model in plain NumPy, float64, block by block: what the real one must compute.

Written from the papers. A block is cut out of its row and encoded by itself, so that
neither masks nor padding nor batches of rows exist here. D is the hidden size.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from scipy.special import erf, log_softmax, softmax

Tree = dict[str, Any]

EPSILON = 1e-12


def rough_params(params: Tree, seed: int) -> Tree:
    """Parameters of the given shapes with which every part of the model counts.

    Fresh ones will not do: their biases are 0 and their attention is close to uniform.
    The tables are small, so that the epsilon of the first LayerNorm shows.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: Any) -> np.ndarray:
        kind = path[-1].key
        values = rng.normal(size=leaf.shape)
        if kind == "embedding":
            values *= 0.05
        elif kind == "kernel":
            values *= 1.5 / np.sqrt(leaf.shape[-2])
        else:
            values = 0.3 * values + (kind == "scale")
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, params)


def double(params: Tree) -> Tree:
    """The same parameters in float64."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def gelu(x: np.ndarray) -> np.ndarray:
    """Multiplies by the probability that a standard normal variable is below."""
    return x * (1 + erf(x / np.sqrt(2))) / 2


def linear(x: np.ndarray, params: Tree) -> np.ndarray:
    return x @ params["kernel"] + params["bias"]


def layer_norm(x: np.ndarray, params: Tree) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + EPSILON) * params["scale"] + params["bias"]


def self_attention(x: np.ndarray, params: Tree, heads: int) -> np.ndarray:
    """Every place of one block attends to every one: [n, D]."""
    query, key, value = (
        np.split(linear(x, params[name]), heads, axis=1)
        for name in ("query", "key", "value")
    )
    mixed = [
        softmax(q @ k.T / np.sqrt(q.shape[1]), axis=1) @ v
        for q, k, v in zip(query, key, value, strict=True)
    ]
    return linear(np.concatenate(mixed, axis=1), params["output"])


def encode_block(
    tokens: np.ndarray,
    positions: np.ndarray,
    types: np.ndarray,
    encoder: Tree,
    heads: int,
) -> np.ndarray:
    """Encodes one block, without padding: [n, D]."""
    x = encoder["token_embedding"]["embedding"][tokens]
    x = x + encoder["position_embedding"]["embedding"][positions]
    x = x + encoder["type_embedding"]["embedding"][types]
    x = layer_norm(x, encoder["embedding_norm"])
    for number in range(len(encoder["layers"]["output_norm"]["scale"])):
        layer = jax.tree.map(lambda stacked, n=number: stacked[n], encoder["layers"])
        attended = self_attention(x, layer["attention"], heads)
        x = layer_norm(x + attended, layer["attention_norm"])
        wide = gelu(linear(x, layer["intermediate"]))
        x = layer_norm(x + linear(wide, layer["output"]), layer["output_norm"])
    return x


def blocks_of(segment_ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The row of each block of a batch, and its places in it."""
    for row, segments in enumerate(segment_ids):
        for number in np.unique(segments[segments > 0]):
            yield row, np.flatnonzero(segments == number)


def encode(params: Tree, batch: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """The final hidden states, [R, L, D]; 0 at padding."""
    encoder = params["encoder"]
    size = encoder["token_embedding"]["embedding"].shape[1]
    hidden = np.zeros((*batch["token_ids"].shape, size))
    for row, places in blocks_of(batch["segment_ids"]):
        keys = ("token_ids", "position_ids", "type_ids")
        inputs = (batch[key][row, places] for key in keys)
        hidden[row, places] = encode_block(*inputs, encoder, heads)
    return hidden


def vocabulary_logits(y: np.ndarray, params: Tree, name: str) -> np.ndarray:
    """By the input table, without its padding rows: [V]."""
    bias = params[name]["projection"]["bias"]
    return params["encoder"]["token_embedding"]["embedding"][: len(bias)] @ y + bias


def mlm_logits(x: np.ndarray, params: Tree) -> np.ndarray:
    """Of one target, from its own hidden state: [V]."""
    head = params["mlm_head"]
    y = layer_norm(gelu(linear(x, head["dense"])), head["norm"])
    return vocabulary_logits(y, params, "mlm_head")


def boundary_places(
    batch: dict[str, np.ndarray], row: int, slot: int, boundaries: str, internal: bool
) -> list[int]:
    """Where a target's span has its boundaries: beside it, or at its own two ends."""
    if internal:
        target = batch["target_positions"][row, slot]
        left = target - (batch["span_offsets"][row, slot] - 1)
        right = batch["right_positions"][row, slot] - 1
    else:
        left = batch["left_positions"][row, slot]
        right = batch["right_positions"][row, slot]
    return {"both": [left, right], "left": [left], "right": [right]}[boundaries]


def sbo_logits(states: list[np.ndarray], offset: int, params: Tree) -> np.ndarray:
    """Of one target, the `offset`-th of its span, from the span's boundaries: [V]."""
    head = params["sbo_head"]
    [table] = (part["embedding"] for part in head.values() if "embedding" in part)
    y = np.concatenate([*states, table[offset - 1]])
    for number in range(1, sum(name.startswith("dense_") for name in head) + 1):
        y = layer_norm(gelu(linear(y, head[f"dense_{number}"])), head[f"norm_{number}"])
    return vocabulary_logits(y, params, "sbo_head")


def nsp_logits(x: np.ndarray, params: Tree) -> np.ndarray:
    """Of one block, from the hidden state at its [CLS]: [2]."""
    head = params["nsp_head"]
    return linear(np.tanh(linear(x, head["pooler"])), head["relationship"])


# What each head is to predict, and what counts.
TARGETS = {
    "mlm": ("target_ids", "target_weights"),
    "sbo": ("target_ids", "sbo_weights"),
    "nsp": ("nsp_labels", "nsp_weights"),
}


def target_logits(
    params: Tree,
    hidden: np.ndarray,
    batch: dict[str, np.ndarray],
    head: str,
    boundaries: str = "both",
    internal: bool = False,
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Row, slot and logits of each slot that counts for a head of `TARGETS`."""
    for row, slot in np.argwhere(batch[TARGETS[head][1]]).tolist():
        x = hidden[row]
        if head == "mlm":
            logits = mlm_logits(x[batch["target_positions"][row, slot]], params)
        elif head == "nsp":
            logits = nsp_logits(x[batch["nsp_positions"][row, slot]], params)
        else:
            places = boundary_places(batch, row, slot, boundaries, internal)
            states = [x[place] for place in places]
            logits = sbo_logits(states, batch["span_offsets"][row, slot], params)
        yield row, slot, logits


def head_sums(
    params: Tree,
    hidden: np.ndarray,
    batch: dict[str, np.ndarray],
    head: str,
    **variant: Any,
) -> tuple[float, int, int]:
    """Summed -log P of a head's targets, how many it got right, and how many."""
    loss, correct, count = 0.0, 0, 0
    for row, slot, logits in target_logits(params, hidden, batch, head, **variant):
        target = batch[TARGETS[head][0]][row, slot]
        loss -= log_softmax(logits)[target]
        correct += int(logits.argmax() == target)
        count += 1
    return loss, correct, count


def objective(
    params: Tree, batch: dict[str, np.ndarray], heads: int, weights: dict[str, float]
) -> float:
    """The loss: a mean over the targets of the whole batch for each head."""
    hidden = encode(params, batch, heads)
    loss = 0.0
    for head, weight in weights.items():
        total, _, count = head_sums(params, hidden, batch, head)
        loss += weight * total / count
    return loss
