"""Named arrays in the files of PyTorch, safetensors and TensorFlow."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from spanbert_jax.errors import InputError

# It also registers bfloat16 with NumPy, which safetensors asks for it by name.
from spanbert_jax.interop import pickles

# What a Hugging Face directory calls its weights, in the order in which that library
# looks for them.
_STANDARD = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SHARDED = ".index.json"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index")
# The files of a TensorFlow checkpoint, which goes by the name before.
_PART = re.compile(r"\.(?:index|meta|data-\d+-of-\d+)")
_READABLE = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
# What stands in the place of a file that was not fetched.
_POINTER = b"version https://git-lfs"


class Weights(NamedTuple):
    """Named arrays that lie in a file, or in several.

    Attributes:
        library: "PyTorch", "safetensors" or "TensorFlow".
        directory: where the files are.
        shapes: of the arrays, by the names that they have there.
        load: reads one of them, in its own dtype; raises InputError.
    """

    library: str
    directory: Path
    shapes: dict[str, tuple[int, ...]]
    load: Callable[[str], np.ndarray]


def find(path: Path) -> Weights:
    """Finds the weights that a path names.

    Args:
        path: a file of PyTorch or safetensors; an index of several such files; a
            directory with one of these, in which safetensors goes before PyTorch if
            they have Hugging Face's names; a TensorFlow checkpoint by its prefix or one
            of its files, or a directory that holds a single one.

    Returns:
        Their names and shapes; the numbers are read when asked for.

    Raises:
        InputError: there is no such thing, more than one, or it is broken.
    """
    file = _choose(path)
    if file.name.endswith(_SHARDED):
        return _open_shards(file)
    return _open(file)


def _choose(path: Path) -> Path:
    """Returns the file that a path means."""
    if path.is_dir():
        return _choose_in(path)
    index = path.with_name(f"{path.name}.index")
    if path.exists() or not index.exists():
        return path
    return index


def _choose_in(directory: Path) -> Path:
    for name in _STANDARD:
        if (directory / name).exists():
            return directory / name
    found = sorted(
        file.name
        for file in directory.iterdir()
        if file.suffix in _SUFFIXES and not file.is_dir()
    )
    if not found:
        raise InputError(
            f"the directory holds no weights: neither {', '.join(_STANDARD)} nor a file"
            f" that ends in {', '.join(_SUFFIXES)}"
        )
    if len(found) > 1:
        raise InputError(
            f"the directory holds {len(found)} files of weights, {', '.join(found)}:"
            " name one of them"
        )
    return directory / found[0]


def _open(file: Path) -> Weights:
    """Opens a single file, or a TensorFlow checkpoint by one of its files."""
    _check_content(file)
    if _PART.fullmatch(file.suffix):
        return _open_tensorflow(file.with_suffix(""))
    if file.suffix == ".safetensors":
        return _open_safetensors(file)
    tensors = pickles.read(file)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return Weights("PyTorch", file.parent, shapes, lambda name: tensors[name].read())


def _check_content(file: Path) -> None:
    """Refuses a file that is absent, empty, or stands for one that was not fetched."""
    try:
        with file.open("rb") as content:
            begin = content.read(len(_POINTER))
    except FileNotFoundError:
        raise InputError(f"there is no {file.name} in {file.parent}") from None
    if not begin:
        raise InputError(f"{file.name} is empty")
    if begin == _POINTER:
        raise InputError(
            f"{file.name} is only a pointer of Git LFS: fetch the file (git lfs pull)"
        )


def _open_safetensors(file: Path) -> Weights:
    try:
        content = safe_open(file, framework="numpy")
        # It has no __iter__.
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file.name} cannot be read: {error}") from error

    def load(name: str) -> np.ndarray:
        kind = slices[name].get_dtype()
        if kind not in _READABLE:
            raise InputError(f"{name} in {file.name} is stored as {kind}")
        return content.get_tensor(name)

    return Weights("safetensors", file.parent, shapes, load)


def _open_shards(index: Path) -> Weights:
    """Opens the files that an index spreads its arrays over."""
    _check_content(index)
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
        names = sorted(set(places.values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("its weight_map has to give files in its own directory")
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{index.name} cannot be read as an index: {error}") from error
    shards = {name: _open(index.parent / name) for name in names}
    for name, shard in places.items():
        if name not in shards[shard].shapes:
            raise InputError(f"{shard} lacks {name}, which {index.name} says it has")
    return Weights(
        shards[names[0]].library,
        index.parent,
        {name: shards[shard].shapes[name] for name, shard in places.items()},
        lambda name: shards[places[name]].load(name),
    )


def _open_tensorflow(prefix: Path) -> Weights:
    # Seconds to import.
    import tensorflow as tf

    # The reader raises Python's errors too: IndexError where the file ends too soon.
    faults = (tf.errors.OpError, IndexError, ValueError, RuntimeError)
    try:
        reader = tf.train.load_checkpoint(str(prefix))
    except faults as error:
        raise InputError(f"{prefix.name} cannot be read: {error}") from error
    shapes = reader.get_variable_to_shape_map()

    def load(name: str) -> np.ndarray:
        try:
            return reader.get_tensor(name)
        except faults as error:
            raise InputError(f"{prefix.name} cannot be read: {error}") from error

    return Weights(
        "TensorFlow",
        prefix.parent,
        {name: tuple(shape) for name, shape in shapes.items()},
        load,
    )
