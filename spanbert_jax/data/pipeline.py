"""The pipeline: batches in the order of the steps, made ahead on other threads."""

from collections.abc import Callable, Iterator

import numpy as np

from spanbert_jax.data.batch import Batch
from spanbert_jax.data.mixing import Mix, Rows
from spanbert_jax.errors import InputError

# The rows of the global batch of a step.
RowOrder = Callable[[int], Rows]


def batches(
    mix: Mix, order: RowOrder, rows: np.ndarray, steps: range, workers: int
) -> Iterator[Batch]:
    """This process's part of the batches of some steps.

    Args:
        mix: the text and the recipe.
        order: which rows a step sees: `mix.training_rows` or `mix.evaluation_rows` of a
            batch size.
        rows: int64 [R], which rows of the global batch this process makes.
        steps: the steps; nothing before them is computed.
        workers: batches made at a time; their number changes no batch.

    Yields:
        The batches, in the order of the steps.

    Raises:
        InputError: a datum is wrong.
    """
    # Seconds to import; the commands that only read a corpus do without.
    import tensorflow as tf

    # Where the full wheel is installed it would take the accelerator's memory.
    tf.config.set_visible_devices([], "GPU")
    spec = mix.empty_batch(len(rows))
    dtypes = [tf.as_dtype(array.dtype) for array in spec.values()]
    faults: dict[int, InputError] = {}

    def make(step: np.ndarray) -> list[np.ndarray]:
        try:
            batch = mix.make_batch(order(int(step)).part(rows))
        except InputError as error:
            faults[int(step)] = error
            raise
        return [batch[key] for key in spec]

    def load(step: tf.Tensor) -> dict[str, tf.Tensor]:
        arrays = tf.numpy_function(make, [step], dtypes, stateful=False)
        named = dict(zip(spec, arrays, strict=True))
        return {key: tf.ensure_shape(named[key], spec[key].shape) for key in spec}

    made = tf.data.Dataset.range(steps.start, steps.stop)
    # Deterministic: in the order of the steps, whichever worker ends first.
    made = made.map(load, num_parallel_calls=workers, deterministic=True)
    # As many as are being made, so that one slow batch does not stall a step.
    made = made.prefetch(workers)
    options = tf.data.Options()
    options.threading.private_threadpool_size = workers
    options.autotune.enabled = False
    iterator = made.with_options(options).as_numpy_iterator()
    return _unwrapped(iterator, faults, tf.errors.OpError)


def _unwrapped(
    iterator: Iterator[Batch], faults: dict[int, InputError], wrapper: type[Exception]
) -> Iterator[Batch]:
    """Raises our own error where tf.data wrapped it in one of its own."""
    try:
        yield from iterator
    except wrapper:
        if faults:
            raise faults[min(faults)] from None
        raise
