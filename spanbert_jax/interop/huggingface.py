"""The Hugging Face directory: the model of a run as transformers loads it."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from spanbert_jax.corpus import store
from spanbert_jax.errors import InputError, StorageError
from spanbert_jax.interop import names
from spanbert_jax.interop.card import CARD, CURVES, make_card
from spanbert_jax.interop.curves import draw_curves
from spanbert_jax.interop.history import read_history
from spanbert_jax.interop.names import Tensors
from spanbert_jax.interop.pretrained import (
    DESCRIPTION,
    SBO_PREFIX,
    SBO_WEIGHTS,
    WEIGHTS,
    describe,
)
from spanbert_jax.interop.tokenizer import write_tokenizer
from spanbert_jax.model.encoder import LAYER_NORM_EPSILON
from spanbert_jax.training.checkpoint import DIRECTORY
from spanbert_jax.training.saved import Saved

CONFIG = "config.json"

# Of files that hold weights, all of whose names are much the same.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt")


def check_output(output: Path) -> None:
    """Refuses an output that could only be refused after the work.

    Raises:
        InputError: something is there, or it is no path.
        StorageError: it cannot be looked at.
    """
    # A path has lost one of the two slashes.
    if re.match(r"\w+:/", str(output)):
        raise InputError(
            f"--output={output} is a URL; write to a local directory and copy that"
        )
    try:
        is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error}") from error
    if not is_free:
        raise InputError(
            f"--output={output} exists and is not an empty directory; nothing done"
        )


def write_export(saved: Saved, output: Path) -> None:
    """Writes a model for transformers, all of it or nothing.

    Equal models give equal bytes, whenever and wherever.

    Args:
        saved: the model.
        output: the directory to make; see `check_output`.

    Raises:
        InputError: the metrics of the run cannot be read.
        StorageError: the directory cannot be written.
    """
    history = read_history(saved.workdir, saved.step)
    saved = saved._replace(config=_without_paths(saved))
    tokenizer = saved.origin.tokenizer
    tensors = names.to_tensors(saved.params, tokenizer.vocab_size)
    card = make_card(saved, tensors, history)
    with _publishing(output) as directory:
        store.write_json(directory / CONFIG, _describe_model(saved))
        weights = _split(tensors)
        for file, part in weights.items():
            _write_tensors(directory / file, part)
        write_tokenizer(tokenizer, directory, saved.config.model.max_positions)
        store.write_json(directory / DESCRIPTION, describe(saved))
        if history:
            _write(directory / CURVES, draw_curves(history))
        _write(directory / CARD, card.encode())


def _without_paths(saved: Saved) -> ConfigDict:
    """The settings without what only says where things are on a machine."""
    config = saved.config.copy_and_resolve_references()
    names_of_corpora = (corpus["name"] for corpus in saved.origin.corpora)
    config.data.corpus = ",".join(names_of_corpora)
    config.data.cache = ""
    config.init_from = short_name(config.init_from)
    return config


def short_name(path: str) -> str:
    """What tells weights apart: the end of their path, with a name of the user's own.

    That is the name of a directory, or of the one that holds a file or a checkpoint.
    """
    parts = PurePosixPath(path).parts
    count = 1
    if parts[-2:-1] == (DIRECTORY,):
        count = 3
    elif PurePosixPath(path).suffix in _WEIGHT_SUFFIXES:
        count = 2
    return "/".join(parts[-count:])


def _describe_model(saved: Saved) -> dict[str, Any]:
    """The content of config.json."""
    model, tokenizer = saved.config.model, saved.origin.tokenizer
    has_pooler = "nsp_head" in saved.params
    return {
        "architectures": ["BertForPreTraining" if has_pooler else "BertForMaskedLM"],
        "model_type": "bert",
        "attention_probs_dropout_prob": model.attention_dropout,
        "dtype": "float32",
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout,
        "hidden_size": model.hidden_size,
        # Of the heads that fine-tuning adds.
        "initializer_range": 0.02,
        "intermediate_size": model.intermediate_size,
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "max_position_embeddings": model.max_positions,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": True,
        "type_vocab_size": model.type_vocab_size,
        "vocab_size": tokenizer.vocab_size,
    }


def _split(tensors: Tensors) -> dict[str, Tensors]:
    """The tensors of each file: transformers complains of those it does not know."""
    files: dict[str, Tensors] = {}
    for name, array in tensors.items():
        file = SBO_WEIGHTS if name.startswith(SBO_PREFIX) else WEIGHTS
        files.setdefault(file, {})[name.removeprefix(SBO_PREFIX)] = array
    return files


def _write_tensors(path: Path, tensors: Tensors) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    # The library lets nobody but the owner read it.
    path.chmod((path.parent / CONFIG).stat().st_mode)


def _write(path: Path, content: bytes) -> None:
    with store.replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def _publishing(output: Path) -> Iterator[Path]:
    """Yields a directory that gets its name when all is in it, or goes away.

    Raises:
        StorageError: it cannot be written.
    """
    output = output.resolve()
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            store.sync(path)
        # In the place of an empty directory, too; never of another.
        temporary.rename(output)
        store.sync(output.parent)
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
