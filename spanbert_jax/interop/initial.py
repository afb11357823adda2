"""The initial parameters of a run that starts from weights which are there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.errors import InputError
from spanbert_jax.interop import foreign, names
from spanbert_jax.interop.names import Slot, Tensors
from spanbert_jax.interop.pretrained import is_export, read_pretrained
from spanbert_jax.interop.vocabulary import (
    Vocabulary,
    check_vocabulary,
    read_vocabulary,
)
from spanbert_jax.training.checkpoint import DIRECTORY
from spanbert_jax.training.saved import is_run

Shape = tuple[int, ...]

_WORDS = "bert.embeddings.word_embeddings.weight"
# What a tensor's axis tells of the model.
_SIZES = (
    ("model.hidden_size", _WORDS, 1),
    ("model.max_positions", "bert.embeddings.position_embeddings.weight", 0),
    ("model.type_vocab_size", "bert.embeddings.token_type_embeddings.weight", 0),
    ("model.intermediate_size", "bert.encoder.layer.0.intermediate.dense.weight", 0),
    ("sbo.positions", "sbo.position_embedding.weight", 0),
    ("sbo.position_size", "sbo.position_embedding.weight", 1),
)
_LAYER = "bert.encoder.layer."
_SBO = "sbo."


class Source(NamedTuple):
    """Weights to start from.

    Attributes:
        kind: what they are, to be told.
        tensors: those that a model of ours could have, see `names`.
        skipped: shapes of the others, by the names that they have there.
        num_heads: of the attention; None if nothing tells it.
        vocabulary: None if there is none.
    """

    kind: str
    tensors: Tensors
    skipped: Mapping[str, Shape]
    num_heads: int | None
    vocabulary: Vocabulary | None


class Report(NamedTuple):
    """What became of the tensors of a source, and of those of the model; by name.

    Attributes:
        matched: taken over.
        skipped: of the source, not of the model.
        new: of the model, not of the source: they keep their initial values.
    """

    matched: dict[str, Shape]
    skipped: dict[str, Shape]
    new: dict[str, Shape]


def read_source(path: Path, config: ConfigDict) -> Source:
    """Reads weights of any known kind.

    Args:
        path: what `init_from` names.
        config: of the run that is to start.

    Raises:
        InputError: there are none, or they are of no kind that is known.
    """
    path, step = _split_step(path)
    if not (is_export(path) or is_run(path)):
        return Source(*foreign.read(path), read_vocabulary(path))
    model = read_pretrained(path, "init_from", step)
    tokenizer = model.tokenizer
    tensors = names.to_tensors(model.params, tokenizer.vocab_size)
    skipped = {}
    # A head that was trained on other boundaries has the same shapes, or some of them.
    if any(
        model.config.sbo[key] != config.sbo[key] for key in ("boundaries", "internal")
    ):
        heads = [name for name in tensors if name.startswith(_SBO)]
        skipped = {name: tensors.pop(name).shape for name in heads}
    kind = f"{'an export' if is_export(path) else 'a run'}, step {model.step}"
    if model.broken:
        kind += f", as no newer one can be read: {', '.join(map(str, model.broken))}"
    return Source(
        kind,
        tensors,
        skipped,
        model.config.model.num_heads,
        Vocabulary(tokenizer.tokens, tokenizer.normalisation.lowercase),
    )


def _split_step(path: Path) -> tuple[Path, int | None]:
    """RUN/checkpoints/N as the run and its step; anything else as it is."""
    run = path.parent.parent
    if path.name.isdecimal() and path.parent == run / DIRECTORY and is_run(run):
        return run, int(path.name)
    return path, None


def initial_params(
    params: Any, config: ConfigDict, tokenizer: Tokenizer, say: Callable[[str], None]
) -> Any:
    """Puts the weights that `init_from` names in the place of initial parameters.

    Args:
        params: arrays on any mesh; they keep their shardings.
        config: all settings.
        tokenizer: of the corpus.
        say: takes the lines of the report.

    Returns:
        The parameters of the first step.

    Raises:
        InputError: the weights cannot be read, do not fit the model or the vocabulary,
            or lack too much of the encoder.
    """
    path = Path(config.init_from).expanduser()
    where = f"init_from={path}"
    source = read_source(path, config)
    _check_sizes(source, config, tokenizer, where)
    if source.vocabulary:
        check_vocabulary(source.vocabulary, tokenizer, where)
    else:
        say(f"warning: {where} has no vocabulary to compare with that of data.corpus")
    slots = names.slots(params, tokenizer.vocab_size)
    report = match(source, slots, where)
    _check_share(report.new, slots, config.init_max_new, where)
    for line in describe(report, f"{where} ({source.kind})"):
        say(line)
    values = names.to_params(source.tensors, params, tokenizer.vocab_size)
    flat = flatten_dict(params, sep="/")
    for name, value in values.items():
        flat[name] = _put(flat[name], value, _is_given(name, slots, report.new))
    return unflatten_dict(flat, sep="/")


def match(source: Source, slots: Mapping[str, Slot], where: str) -> Report:
    """Compares the tensors of a source with those of a model.

    Raises:
        InputError: a tensor has another shape.
    """
    tensors = source.tensors
    for name in tensors.keys() & slots.keys():
        if tensors[name].shape != slots[name].shape:
            raise InputError(
                f"{where}: {name} is {list(tensors[name].shape)}, in this model"
                f" {list(slots[name].shape)}"
            )
    return Report(
        matched={name: slot.shape for name, slot in slots.items() if name in tensors},
        skipped={
            **{name: x.shape for name, x in tensors.items() if name not in slots},
            **source.skipped,
        },
        new={name: slot.shape for name, slot in slots.items() if name not in tensors},
    )


def describe(report: Report, where: str) -> list[str]:
    """The report in lines: what was skipped and what is new, tensor by tensor."""
    counts = ", ".join(
        f"{len(tensors)} {kind}" for kind, tensors in report._asdict().items()
    )
    lines = [f"{where}: {counts}"]
    for kind, tensors in report._asdict().items():
        lines += [
            f"  {kind:8} {name} {'x'.join(map(str, shape)) or 'scalar'}"
            for name, shape in _gather_layers(tensors).items()
        ]
    return lines


def _gather_layers(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """Tensors, those of all layers in one line where they are alike."""
    layers: dict[tuple[str, Shape], list[int]] = {}
    for name, shape in tensors.items():
        if name.startswith(_LAYER):
            number, _, rest = name.removeprefix(_LAYER).partition(".")
            layers.setdefault((rest, shape), []).append(int(number))
    gathered = {
        name: shape for name, shape in tensors.items() if not name.startswith(_LAYER)
    }
    for (rest, shape), numbers in layers.items():
        gathered[f"{_LAYER}{{{_ranges(numbers)}}}.{rest}"] = shape
    return gathered


def _ranges(numbers: list[int]) -> str:
    """Numbers with their neighbours: 0-11, or 0-4,6-11."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(
        str(a) if a == b else f"{a}-{b}"
        for a, b in zip(sorted(starts), sorted(ends), strict=True)
    )


def _check_sizes(
    source: Source, config: ConfigDict, tokenizer: Tokenizer, where: str
) -> None:
    """Checks what can be said in the words of the settings."""
    tensors, values = source.tensors, settings.flatten(config)
    found = {
        setting: tensors[name].shape[axis]
        for setting, name, axis in _SIZES
        if name in tensors and (config.sbo.weight or not name.startswith(_SBO))
    }
    layers = [
        int(name.removeprefix(_LAYER).partition(".")[0])
        for name in tensors
        if name.startswith(_LAYER)
    ]
    found["model.num_layers"] = max(layers, default=-1) + 1
    if source.num_heads is not None:
        found["model.num_heads"] = source.num_heads
    for setting, size in found.items():
        if values[setting] != size:
            raise InputError(
                f"{setting} is {values[setting]}, but {where} has {size}; set it to"
                f" {size}"
            )
    if _WORDS in tensors and len(tensors[_WORDS]) != tokenizer.vocab_size:
        raise InputError(
            f"the vocabulary of data.corpus has {tokenizer.vocab_size} tokens, but"
            f" {where} has {len(tensors[_WORDS])}; prepare the corpus with --vocab and"
            " the vocabulary of the weights"
        )


def _check_share(
    new: Mapping[str, Shape], slots: Mapping[str, Slot], most: float, where: str
) -> None:
    of_encoder = [name for name, slot in slots.items() if slot.is_encoders]
    lacking = [name for name in of_encoder if name in new]
    share = len(lacking) / len(of_encoder)
    if share > most:
        raise InputError(
            f"{where} lacks {len(lacking)} of {len(of_encoder)} tensors of the encoder,"
            f" {share:.1%}, more than init_max_new={most} allows; the first is"
            f" {lacking[0]}"
        )


def _is_given(
    path: str, slots: Mapping[str, Slot], new: Mapping[str, Shape]
) -> np.ndarray:
    """bool: whether the source has the parameter, or each of its layers."""
    return np.array([name not in new for name, x in slots.items() if x.path == path])


def _put(fresh: jax.Array, values: np.ndarray, given: np.ndarray) -> jax.Array:
    """Lays values where an array lies; layers that are not given stay."""
    placed = jax.make_array_from_callback(
        fresh.shape, fresh.sharding, lambda index: values[index]
    )
    if given.all():
        return placed
    layers = given.reshape(-1, *(1,) * (fresh.ndim - 1))
    return jax.jit(jnp.where, out_shardings=fresh.sharding)(layers, placed, fresh)
