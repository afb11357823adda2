"""Flow: the batches of a run on one text, as training gets them."""

import functools
from collections.abc import Iterator

import numpy as np

from spanbert_jax.data.batch import Batch, Feed
from spanbert_jax.data.mixing import Mix
from spanbert_jax.data.pipeline import batches


def flow(feed: Feed, rows: int, steps: range, workers: int) -> Iterator[Batch]:
    """Makes batches through tf.data.

    Args:
        feed: the text and the recipe.
        rows: of a batch.
        steps: of the run.
        workers: batches made at a time.

    Yields:
        A batch a step.
    """
    mix = Mix((feed,), np.ones(1, np.int64), feed.seed)
    order = functools.partial(mix.training_rows, batch_size=rows)
    yield from batches(mix, order, np.arange(rows), steps, workers)
