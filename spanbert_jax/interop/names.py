"""Names: our parameters as the tensors of PyTorch's BERT, and back.

Tensors have the names and layouts of `BertForPreTraining` in Hugging Face's
transformers: a linear layer's weight is [out, in], layers are numbered, the vocabulary
has no padding. The span boundary head, which that library lacks, is called `sbo` here:
its input is [left; right; position], its two dense layers are `dense_1` and `dense_2`.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

Tree = Mapping[str, Any]
Tensors = dict[str, np.ndarray]

# Whose rows are padded; see `encoder.Geometry.padded_vocab_size`.
TOKEN_TABLE = "encoder/token_embedding/embedding"
_STACKED = "encoder/layers/"
_ENCODER = "encoder/"

# Our modules and theirs; {} stands for a number.
_MODULES = {
    "encoder/token_embedding": "bert.embeddings.word_embeddings",
    "encoder/position_embedding": "bert.embeddings.position_embeddings",
    "encoder/type_embedding": "bert.embeddings.token_type_embeddings",
    "encoder/embedding_norm": "bert.embeddings.LayerNorm",
    "encoder/layers/attention/query": "bert.encoder.layer.{}.attention.self.query",
    "encoder/layers/attention/key": "bert.encoder.layer.{}.attention.self.key",
    "encoder/layers/attention/value": "bert.encoder.layer.{}.attention.self.value",
    "encoder/layers/attention/output": "bert.encoder.layer.{}.attention.output.dense",
    "encoder/layers/attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "encoder/layers/intermediate": "bert.encoder.layer.{}.intermediate.dense",
    "encoder/layers/output": "bert.encoder.layer.{}.output.dense",
    "encoder/layers/output_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "mlm_head/dense": "cls.predictions.transform.dense",
    "mlm_head/norm": "cls.predictions.transform.LayerNorm",
    "mlm_head/projection": "cls.predictions",
    "nsp_head/pooler": "bert.pooler.dense",
    "nsp_head/relationship": "cls.seq_relationship",
    "sbo_head/position_embedding": "sbo.position_embedding",
    "sbo_head/dense_{}": "sbo.dense_{}",
    "sbo_head/norm_{}": "sbo.norm_{}",
    "sbo_head/projection": "sbo",
}
_LEAVES = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}

_ANY_MODULE = "|".join(map(re.escape, _MODULES.values()))
_ANY_MODULE = _ANY_MODULE.replace(re.escape("{}"), "(?:0|[1-9][0-9]*)")
_KNOWN = re.compile(rf"(?:{_ANY_MODULE})\.(?:weight|bias)")


class Slot(NamedTuple):
    """Where one tensor belongs.

    Attributes:
        path: of our parameter.
        layer: number of the layer within it; None if it is not stacked.
        shape: of the tensor, in their layout and without padding.
    """

    path: str
    layer: int | None
    shape: tuple[int, ...]

    @property
    def is_encoders(self) -> bool:
        """Whether it is of the encoder, not of a head."""
        return self.path.startswith(_ENCODER)


def is_known(name: str) -> bool:
    """Whether a tensor has the name of one that a model of some settings might have."""
    return _KNOWN.fullmatch(name) is not None


def slots(params: Tree, vocab_size: int) -> dict[str, Slot]:
    """The tensors that parameters consist of, by their names.

    Args:
        params: of a `SpanBert`; arrays, or their shapes.
        vocab_size: V.

    Returns:
        In the order of the parameters, layer by layer.
    """
    found = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        shape = tuple(leaf.shape)
        if path == TOKEN_TABLE:
            shape = (vocab_size, *shape[1:])
        count = shape[0] if path.startswith(_STACKED) else None
        one = shape if count is None else shape[1:]
        one = one[::-1] if _is_kernel(path) else one
        for layer in [None] if count is None else range(count):
            found[_name(path, layer)] = Slot(path, layer, one)
    return found


def to_tensors(params: Tree, vocab_size: int) -> Tensors:
    """Parameters as tensors, contiguous in memory, padding cut off.

    Args:
        params: of a `SpanBert`; NumPy arrays.
        vocab_size: V.

    Returns:
        The tensors by their names.
    """
    flat = flatten_dict(params, sep="/")
    tensors = {}
    for name, slot in slots(params, vocab_size).items():
        array = flat[slot.path]
        array = array if slot.layer is None else array[slot.layer]
        array = array.T if _is_kernel(slot.path) else array[: slot.shape[0]]
        # A writer of safetensors takes the memory as it lies, transposed or not.
        tensors[name] = np.ascontiguousarray(array)
    return tensors


def to_params(
    tensors: Mapping[str, np.ndarray], params: Tree, vocab_size: int
) -> dict[str, np.ndarray]:
    """Tensors as parameters; the rows of the padding are 0.

    Args:
        tensors: of the shapes that `slots` tells; others than those are ignored, and
            those that are missing leave zeros.
        params: of a `SpanBert`; arrays, or their shapes.
        vocab_size: V.

    Returns:
        By the path of each parameter of which there is a tensor, float32.
    """
    shapes = flatten_dict(params, sep="/")
    found: dict[str, np.ndarray] = {}
    for name, slot in slots(params, vocab_size).items():
        if name not in tensors:
            continue
        array = tensors[name].T if _is_kernel(slot.path) else tensors[name]
        if slot.path not in found:
            found[slot.path] = np.zeros(shapes[slot.path].shape, np.float32)
        place = found[slot.path]
        place = place if slot.layer is None else place[slot.layer]
        place[: len(array)] = array
    return found


def _is_kernel(path: str) -> bool:
    return path.endswith("/kernel")


def _name(path: str, layer: int | None) -> str:
    module, _, leaf = path.rpartition("/")
    number = re.search(r"_(\d+)$", module)
    if number:
        module = module.removesuffix(number[1]) + "{}"
    theirs = _MODULES[module].format(number[1] if number else layer)
    return f"{theirs}.{_LEAVES[leaf]}"
