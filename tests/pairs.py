"""Batches of pairs for the tests of the model: blocks cut in two, with labels."""

import numpy as np

import reference
from spanbert_jax.data.batch import Batch

# With fewer places a block has no two segments, and no slot.
SHORTEST = 5


def as_pairs(batch: Batch, slots: int = 8) -> Batch:
    """The same rows, the second half of each block being its second segment.

    Whether it "follows" is read off the block's ids, so that a block has the same label
    wherever it lies. The slots of a row are filled from the first one on.
    """
    rows = len(batch["token_ids"])
    paired = batch | {
        "type_ids": np.zeros_like(batch["type_ids"]),
        "nsp_positions": np.zeros((rows, slots), np.int32),
        "nsp_labels": np.zeros((rows, slots), np.int32),
        "nsp_weights": np.zeros((rows, slots), np.float32),
    }
    filled = np.zeros(rows, int)
    for row, places in reference.blocks_of(batch["segment_ids"]):
        if len(places) < SHORTEST:
            continue
        paired["type_ids"][row, places[len(places) // 2 :]] = 1
        slot = (row, filled[row])
        paired["nsp_positions"][slot] = places[0]
        paired["nsp_labels"][slot] = batch["token_ids"][row, places].sum() % 2
        paired["nsp_weights"][slot] = 1
        filled[row] += 1
    return paired
