"""Other people's weights, whatever their names and layout, by the names of `names`."""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spanbert_jax.errors import InputError
from spanbert_jax.interop import weights
from spanbert_jax.interop.names import Tensors, is_known
from spanbert_jax.interop.weights import Weights

# Names begin with it, or lack it where a file holds nothing but the encoder.
_BERT = "bert."
_ENCODER = ("bert.embeddings.", "bert.encoder.")
# What training code puts before the names of a model that it wraps or saves; "decoder."
# is the reference's.
_WRAPPERS = re.compile(
    r"\A(?:(?:module|model|decoder|state_dict|model_state_dict|_orig_mod)\.)+"
)
# Only of LayerNorm: others may call their own tensors gamma.
_NORMS = re.compile(r"(?<=\.)(LayerNorm|norm_[12])\.(gamma|beta)$")
_GREEK = {"gamma": "weight", "beta": "bias"}
# Of Google's code, the last parts of names; its kernels are [in, out].
_TENSORFLOW = {"kernel": "weight", "output_weights": "weight", "output_bias": "bias"}
# The reference's span boundary head; the first that fits holds.
_REFERENCE_HEAD = "cls.pair_target_predictions."
_REFERENCE = {
    f"{_REFERENCE_HEAD}position_embeddings.": "sbo.position_embedding.",
    f"{_REFERENCE_HEAD}mlp_layer_norm.linear1.": "sbo.dense_1.",
    f"{_REFERENCE_HEAD}mlp_layer_norm.layer_norm1.": "sbo.norm_1.",
    f"{_REFERENCE_HEAD}mlp_layer_norm.linear2.": "sbo.dense_2.",
    f"{_REFERENCE_HEAD}mlp_layer_norm.layer_norm2.": "sbo.norm_2.",
    _REFERENCE_HEAD: "sbo.",
}
# The output layers, which this model ties to others.
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "sbo.decoder.weight": "bert.embeddings.word_embeddings.weight",
}
# Parts of a layer without which it computes something else.
_LACKING = {
    ".crossattention.": "cross-attention",
    ".attention.self.distance_embedding.": "relative positions",
}
# What a config may say of a model and this one cannot vary.
_FIXED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
# Hugging Face's name, and that beside Google's checkpoints.
_CONFIGS = ("config.json", "bert_config.json")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Names shown where none is known.
_SHOWN = 5


class Foreign(NamedTuple):
    """Weights that were made elsewhere.

    Attributes:
        kind: what they are, a phrase for reports.
        tensors: float32, in memory of their own, by the names of `names`.
        skipped: shapes of what means nothing to us, by the names that they have there.
        num_heads: what the config beside them says, as no shape does; None if there is
            no config.
    """

    kind: str
    tensors: Tensors
    skipped: dict[str, tuple[int, ...]]
    num_heads: int | None


class _Source(NamedTuple):
    """Where a tensor comes from.

    Attributes:
        name: that it has there.
        transposed: its rows are to become columns.
    """

    name: str
    transposed: bool


def read(path: Path) -> Foreign:
    """Reads other people's weights.

    Args:
        path: see `weights.find`.

    Returns:
        What is known of them. Output layers are left out, as they are the embeddings.

    Raises:
        InputError: there are none, they are broken, or this model cannot compute what
            they were trained for; the message begins with "init_from=".
    """
    try:
        return _read(Path(os.path.expanduser(path)))
    except InputError as error:
        raise InputError(f"init_from={path}: {error}") from error
    except OSError as error:
        raise InputError(f"init_from={path} cannot be read: {error}") from error


def _read(path: Path) -> Foreign:
    found = weights.find(path)
    num_heads = _check_config(found.directory)
    sources = _recognise(found)
    _check_layers(found)
    tensors = {name: _load(found, source) for name, source in sources.items()}
    known = {source.name for source in sources.values()}
    return Foreign(
        _kind(found.library, known),
        _untwin(tensors),
        {name: shape for name, shape in found.shapes.items() if name not in known},
        num_heads,
    )


def _recognise(found: Weights) -> dict[str, _Source]:
    """Returns where each tensor that has a name here comes from."""
    sources: dict[str, _Source] = {}
    for raw in found.shapes:
        name, transposed = raw, False
        if found.library == "TensorFlow":
            name, transposed = _spell_tensorflow(raw)
        name = _canonical(name)
        if name in sources:
            raise InputError(
                f"{sources[name].name} and {raw} would both be {name}: it holds two"
                " models, or two spellings of one"
            )
        if name is not None:
            sources[name] = _Source(raw, transposed)
    if not any(name.startswith(_ENCODER) for name in sources):
        shown = ", ".join(list(found.shapes)[:_SHOWN]) or "none"
        raise InputError(
            f"no tensor has a name of BERT's encoder, as embeddings.word_embeddings"
            f".weight; of {len(found.shapes)} names, the first are: {shown}"
        )
    return sources


def _spell_tensorflow(raw: str) -> tuple[str, bool]:
    """Spells a name of Google's BERT as PyTorch would.

    Returns:
        The name, and whether the tensor is transposed. Kernels are; `output_weights` is
        not, as that code transposes it where it multiplies.
    """
    *scopes, leaf = raw.split("/")
    if leaf.endswith("_embeddings"):
        scopes, leaf = [*scopes, leaf], "weight"
    name = ".".join([*scopes, _TENSORFLOW.get(leaf, leaf)])
    return re.sub(r"\blayer_(?=\d+\.)", "layer.", name), leaf == "kernel"


def _canonical(name: str) -> str | None:
    """Returns a tensor's name as it is here; None if it means nothing to us."""
    name = _WRAPPERS.sub("", name)
    for theirs, ours in _REFERENCE.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    name = _NORMS.sub(lambda match: f"{match[1]}.{_GREEK[match[2]]}", name)
    of_encoder = _BERT + name.removeprefix(_BERT)
    if is_known(of_encoder):
        return of_encoder
    return name if is_known(name) or name in _TIED else None


def _check_layers(found: Weights) -> None:
    """Refuses layers that compute more than BERT's."""
    for raw in found.shapes:
        for part, what in _LACKING.items():
            if part in raw:
                raise InputError(
                    f"its layers have {what}, which this model has not: {raw}"
                )


def _load(found: Weights, source: _Source) -> np.ndarray:
    """Reads a tensor as float32."""
    array = found.load(source.name)
    if array.dtype.name not in _FLOATS:
        raise InputError(
            f"{source.name} holds numbers of type {array.dtype.name}; weights are"
            f" {', '.join(_FLOATS)}"
        )
    # What float32 cannot hold becomes infinite, and is found below.
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(array.T if source.transposed else array, np.float32, order="C")
    if not np.isfinite(array).all():
        raise InputError(f"{source.name} holds numbers that are not finite in float32")
    return array


def _untwin(tensors: Tensors) -> Tensors:
    """Leaves out the output layers, once it is sure that they are the embeddings.

    An output layer may also stand in for what it is tied to, where that is absent: of
    two tensors that share their memory, some writers keep but one.
    """
    for twin, name in _TIED.items():
        if twin not in tensors:
            continue
        array = tensors.pop(twin)
        kept = tensors.setdefault(name, array)
        if not np.array_equal(kept, array):
            raise InputError(
                f"{twin} {array.shape} is not the same as {name} {kept.shape}: its"
                " output layer is not tied to its input embedding, as this model's is"
            )
    return tensors


def _kind(library: str, known: set[str]) -> str:
    """Says what weights are, by the library that wrote them and the names they have."""
    if library == "TensorFlow":
        return "TensorFlow BERT"
    if any("decoder.bert." in name or _REFERENCE_HEAD in name for name in known):
        return "reference SpanBERT"
    return f"Hugging Face, {library}"


def _check_config(directory: Path) -> int | None:
    """Reads the config beside weights, if there is one.

    Returns:
        The number of attention heads that it has, if any.

    Raises:
        InputError: it says something that this model cannot be.
    """
    path = next(
        (directory / name for name in _CONFIGS if (directory / name).exists()), None
    )
    if path is None:
        return None
    try:
        config: dict[str, Any] = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path.name} cannot be read as JSON: {error}") from error
    for key, ours in _FIXED.items():
        if config.get(key, ours) != ours:
            raise InputError(
                f"{path.name} says {key}={config[key]!r}; this model has {ours!r} and"
                " nothing else"
            )
    heads = config.get("num_attention_heads")
    if heads is not None and (type(heads) is not int or heads < 1):
        raise InputError(f"{path.name} says num_attention_heads={heads!r}")
    return heads
