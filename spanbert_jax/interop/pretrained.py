"""The pretrained: a model to be used, from a run or from an export of one."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from spanbert_jax import settings
from spanbert_jax.corpus import store
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.data.batch import batch_spec
from spanbert_jax.errors import InputError
from spanbert_jax.interop import names
from spanbert_jax.interop.names import Tensors
from spanbert_jax.model.spanbert import SpanBert
from spanbert_jax.training.saved import Saved, is_run, read_saved

# Of the description of an export.
FORMAT_VERSION = 1
# The files of an export that this program reads, beside the tokenizer's own.
DESCRIPTION = "spanbert_jax.json"
WEIGHTS = "model.safetensors"
SBO_WEIGHTS = "sbo.safetensors"
# What the names of `SBO_WEIGHTS` lack.
SBO_PREFIX = "sbo."
# Settings that say where things are on a machine, which nobody else is to know.
PATHS = ("data.corpus", "data.cache", "init_from")


class Pretrained(NamedTuple):
    """A model to be used.

    Attributes:
        config: all settings that it was trained with.
        params: float32 NumPy arrays.
        tokenizer: its tokenizer.
        step: updates done.
        broken: newer steps of a run that could not be read, with the reason.
    """

    config: ConfigDict
    params: dict[str, Any]
    tokenizer: Tokenizer
    step: int
    broken: Mapping[int, str]


def portable_model(config: ConfigDict, vocab_size: int) -> SpanBert:
    """The model of a config as every machine computes it: float32, plain attention."""
    model = settings.model(config, vocab_size)
    geometry = dataclasses.replace(
        model.geometry, dtype=jnp.dtype("float32"), attention="plain"
    )
    return model.clone(geometry=geometry)


def is_export(directory: Path) -> bool:
    """Whether a directory looks like what `huggingface.write_export` made."""
    return (directory / DESCRIPTION).is_file()


def read_pretrained(path: Path, setting: str, step: int | None = None) -> Pretrained:
    """Reads a model.

    Args:
        path: work directory of a run, which may be going on, or an export.
        setting: the flag or config key that named it, for error messages.
        step: of a run, which one; None means the newest that can be read. An export has
            one only.

    Returns:
        The model.

    Raises:
        InputError: it is neither, or has no such step, or cannot be read.
        StorageError: no step of the run can be read.
    """
    if is_export(path):
        pretrained = read_export(path, setting)
        if step not in (None, pretrained.step):
            raise InputError(
                f"{setting}={path} is an export of step {pretrained.step}; it has no"
                f" step {step}"
            )
        return pretrained
    if not is_run(path):
        raise InputError(
            f"{setting}={path} is neither the work directory of a run nor an export:"
            f" there is no checkpoints/ and no {DESCRIPTION} in it"
        )
    saved = read_saved(path, setting, step)
    return Pretrained(
        saved.config,
        saved.params,
        saved.origin.tokenizer,
        saved.step,
        saved.broken,
    )


def describe(saved: Saved) -> dict[str, Any]:
    """What `read_export` must know of a model, and what else a reader may ask for.

    Args:
        saved: the model; its settings are told as they are.

    Returns:
        A JSON value, for the file `DESCRIPTION`.
    """
    record = saved.record
    return {
        "format_version": FORMAT_VERSION,
        "step": saved.step,
        "settings": settings.flatten(saved.config),
        # What was changed when the run was resumed; see `checkpoint.make_record`.
        "changes": [c for c in record["changes"] if c["name"] not in PATHS],
        **store.describe_tokenizer(saved.origin.tokenizer, directory="."),
        "corpora": saved.origin.corpora,
        "devices": record["devices"],
        "libraries": record["libraries"],
    }


def read_export(directory: Path, setting: str) -> Pretrained:
    """Reads the model of an export, bit for bit the one of the run.

    Args:
        directory: what `huggingface.write_export` made.
        setting: the flag or config key that named it, for error messages.

    Returns:
        The model; what pads its vocabulary is 0.

    Raises:
        InputError: it is of another format version, or a file is missing, broken or at
            odds with the others.
    """
    path = directory / DESCRIPTION
    try:
        content = store.read_json(path)
        version, step = content["format_version"], content["step"]
        if version != FORMAT_VERSION:
            raise InputError(
                f"{setting}={directory} has format version {version}, this program"
                f" reads {FORMAT_VERSION}; export the run again"
            )
        config = settings.restored(content["settings"])
        tokenizer = store.open_tokenizer(directory, content, setting)
    # JSON of another shape fails in as many ways as it is read.
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{setting}: {path} cannot be read: {error!r}") from error
    tensors = _read_tensors(directory / WEIGHTS, setting)
    shapes = parameter_shapes(config, tokenizer.vocab_size)
    if "sbo_head" in shapes:
        of_sbo = _read_tensors(directory / SBO_WEIGHTS, setting)
        tensors |= {f"{SBO_PREFIX}{name}": array for name, array in of_sbo.items()}
    _check_shapes(tensors, shapes, tokenizer.vocab_size, f"{setting}={directory}")
    flat = names.to_params(tensors, shapes, tokenizer.vocab_size)
    return Pretrained(config, unflatten_dict(flat, sep="/"), tokenizer, step, {})


def _read_tensors(path: Path, setting: str) -> Tensors:
    try:
        return load_file(path)
    # The last for a dtype that NumPy lacks, which somebody else has written.
    except (OSError, SafetensorError, TypeError) as error:
        raise InputError(f"{setting}: {path} cannot be read: {error}") from error


def parameter_shapes(config: ConfigDict, vocab_size: int) -> dict[str, Any]:
    """The shapes of a model's parameters, without making any."""
    model = portable_model(config, vocab_size)
    batch = {
        # One row: parameters have the same shapes whatever the number of rows.
        key: jax.ShapeDtypeStruct((1, *shape[1:]), dtype)
        for key, (shape, dtype) in batch_spec(settings.batch_shape(config)).items()
    }
    init = functools.partial(model.init, deterministic=True)
    return nn.unbox(jax.eval_shape(init, jax.random.key(0), batch)["params"])


def _check_shapes(
    tensors: Tensors, shapes: dict[str, Any], vocab_size: int, where: str
) -> None:
    """Refuses tensors that are not those of the settings beside them."""
    for name, slot in names.slots(shapes, vocab_size).items():
        if name not in tensors:
            raise InputError(f"{where} has no tensor {name}")
        if tensors[name].shape != slot.shape:
            raise InputError(
                f"{where}: {name} is {tensors[name].shape}; by {DESCRIPTION} it must"
                f" be {slot.shape}"
            )
