"""Files of weights: PyTorch's by hand, opcode for opcode, and TensorFlow's."""

import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from spanbert_jax.interop.names import Tensors

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def group(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + group(*arguments) + b"R"


def create(kind: bytes, *arguments: bytes) -> bytes:
    return kind + group(*arguments) + b"\x81"


def listing(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def mapping(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + item for key, item in items.items()) + b"u"


def numbers(values: Sequence[int]) -> bytes:
    return group(*map(number, values))


def whole(item: bytes) -> bytes:
    """A pickle of one item."""
    return b"\x80\x02" + item + b"."


def storage(key: str, element: str, count: int) -> bytes:
    kind = named("torch", STORAGES[element])
    return group(text("storage"), kind, text(key), text("cpu"), number(count)) + b"Q"


def tensor(
    held: bytes, shape: Sequence[int], strides: Sequence[int], offset: int = 0
) -> bytes:
    return call(
        named("torch._utils", "_rebuild_tensor_v2"),
        held,
        number(offset),
        numbers(shape),
        numbers(strides),
        b"\x89",
        call(named("collections", "OrderedDict")),
    )


def of_array(key: str, array: np.ndarray) -> bytes:
    """A contiguous tensor that fills its storage."""
    strides = [stride // array.itemsize for stride in array.strides]
    held = storage(key, array.dtype.name, array.size)
    return tensor(held, array.shape, strides)


def write_archive(
    path: Path,
    item: bytes,
    storages: Mapping[str, bytes],
    others: Mapping[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Writes what PyTorch writes since 1.6; `others` are further parts."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", whole(item))
        for name, data in (others or {}).items():
            archive.writestr(f"archive/{name}", data)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)


def write_stream(
    path: Path, item: bytes, storages: Mapping[str, tuple[int, bytes]]
) -> None:
    """Writes what PyTorch wrote before; a storage is its count and its bytes."""
    parts = [
        whole(number(0x1950A86A20F9469CFC6C)),
        whole(number(1001)),
        whole(mapping({"little_endian": b"\x88"})),
        whole(item),
        whole(listing(*map(text, storages))),
    ]
    parts += [struct.pack("<q", count) + data for count, data in storages.values()]
    path.write_bytes(b"".join(parts))


def save_tensorflow(prefix: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a checkpoint with exactly these names."""
    import tensorflow as tf

    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(arrays),
        shape_and_slices=[""] * len(arrays),
        tensors=[tf.constant(array) for array in arrays.values()],
    )


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as the state of a module, in an archive."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    keys = {name: str(i) for i, name in enumerate(contiguous)}
    items = {name: of_array(keys[name], array) for name, array in contiguous.items()}
    storages = {keys[name]: array.tobytes() for name, array in contiguous.items()}
    write_archive(path, mapping(items), storages)


# ---- How others spell the names of `spanbert_jax.interop.names`


def greek(name: str) -> str:
    """LayerNorm's names in Google's code and what follows it."""
    name = re.sub(r"(LayerNorm|norm_?\d)\.weight$", r"\1.gamma", name)
    return re.sub(r"(LayerNorm|norm_?\d)\.bias$", r"\1.beta", name)


def reference(name: str) -> str:
    """A name in the reference's code."""
    if not name.startswith("sbo."):
        return greek(f"decoder.{name}")
    name = name.replace("position_embedding", "position_embeddings")
    name = re.sub(r"dense_(\d)", r"mlp_layer_norm.linear\1", name)
    name = re.sub(r"norm_(\d)", r"mlp_layer_norm.layer_norm\1", name)
    return greek(name.replace("sbo", "decoder.cls.pair_target_predictions"))


def google(tensors: Tensors) -> Tensors:
    """Names and layouts of Google's code."""
    found = {}
    for name, array in tensors.items():
        kernel = array.ndim == 2 and "embeddings" not in name
        name = greek(name).replace("layer.", "layer_")
        name = name.replace("_embeddings.weight", "_embeddings")
        if "seq_relationship" in name:
            name = re.sub(r"\.(\w+)$", r".output_\1", name.replace("weight", "weights"))
        elif kernel:
            name, array = name.replace(".weight", ".kernel"), array.T
        name = name.replace("predictions.bias", "predictions.output_bias")
        found[name.replace(".", "/")] = array
    return found
