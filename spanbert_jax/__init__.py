"""SpanBERT pretraining in JAX and Flax."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spanbert_jax.inference.predictor import Predictor


def load(path: str | PathLike[str], step: int | None = None) -> "Predictor":
    """Reads a trained model, to encode texts, to embed spans and to fill masks.

    Args:
        path: work directory of a run, which may be going on, or an export of one.
        step: of a run, which one; None means the newest that can be read.

    Returns:
        The model, on jax's default device.

    Raises:
        errors.InputError: it is neither, or has no such step, or cannot be read.
        errors.StorageError: no step of the run can be read.
    """
    # Here: none of the commands that build a corpus waits for jax.
    from spanbert_jax.inference import predictor

    return predictor.load(Path(path), "path", step)
