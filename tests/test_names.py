"""Names: parameters become the tensors of PyTorch's BERT, and come back."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

import reference
import toy
from spanbert_jax import settings
from spanbert_jax.data.batch import batch_spec
from spanbert_jax.interop import names

VOCAB_SIZE = 203
LAYERS = 3


def make_params(pairs: bool = True, sbo_weight: float = 1.0) -> dict[str, Any]:
    """Rough parameters of a model with all heads, as NumPy arrays."""
    config = toy.make_config(Path())
    config.data.pairs = pairs
    config.sbo.weight = sbo_weight
    config.model.num_layers = LAYERS
    model = settings.model(config, VOCAB_SIZE)
    batch = {
        key: jax.ShapeDtypeStruct(shape, dtype)
        for key, (shape, dtype) in batch_spec(settings.batch_shape(config)).items()
    }
    init = functools.partial(model.init, deterministic=True)
    shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), batch))
    return reference.rough_params(shapes["params"], seed=1)


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return make_params()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("sbo_weight", [0.0, 1.0])
def test_parameters_come_back_bit_for_bit(pairs: bool, sbo_weight: float) -> None:
    params = make_params(pairs, sbo_weight)
    tensors = names.to_tensors(params, VOCAB_SIZE)
    back = names.to_params(tensors, params, VOCAB_SIZE)
    flat = flatten_dict(params, sep="/")
    assert back.keys() == flat.keys()
    for path, values in flat.items():
        rows = VOCAB_SIZE if path == names.TOKEN_TABLE else len(values)
        np.testing.assert_array_equal(back[path][:rows], values[:rows], err_msg=path)
        assert not back[path][rows:].any()


def test_a_linear_layer_is_out_by_in(params: dict[str, Any]) -> None:
    tensors = names.to_tensors(params, VOCAB_SIZE)
    ours = params["encoder"]["layers"]["intermediate"]
    x = np.random.default_rng(0).normal(size=(5, 64))
    for layer in range(LAYERS):
        name = f"bert.encoder.layer.{layer}.intermediate.dense"
        theirs = x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
        expected = x @ ours["kernel"][layer] + ours["bias"][layer]
        np.testing.assert_allclose(theirs, expected, rtol=1e-6)


def test_tensors_lie_in_memory_as_they_are_read(params: dict[str, Any]) -> None:
    for name, tensor in names.to_tensors(params, VOCAB_SIZE).items():
        assert tensor.flags.c_contiguous, name


def test_slots_tell_the_shapes(params: dict[str, Any]) -> None:
    tensors = names.to_tensors(params, VOCAB_SIZE)
    slots = names.slots(params, VOCAB_SIZE)
    assert {name: x.shape for name, x in tensors.items()} == {
        name: slot.shape for name, slot in slots.items()
    }
    encoders = [name for name, slot in slots.items() if slot.is_encoders]
    assert len(encoders) == 5 + 16 * LAYERS


def test_a_tensor_that_is_missing_leaves_zeros(params: dict[str, Any]) -> None:
    tensors = names.to_tensors(params, VOCAB_SIZE)
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    del tensors["cls.predictions.bias"]
    back = names.to_params(tensors, params, VOCAB_SIZE)
    assert "mlm_head/projection/bias" not in back
    kernels = back["encoder/layers/output/kernel"]
    assert kernels[[0, 2]].any(axis=(1, 2)).all()
    assert not kernels[1].any()


def test_the_names_are_those_of_transformers(params: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    theirs = {
        name: tuple(tensor.shape)
        for name, tensor in transformers.BertForPreTraining(config).state_dict().items()
        # Tied to the input embedding and to `cls.predictions.bias`.
        if not name.startswith("cls.predictions.decoder.")
    }
    ours = {
        name: tensor.shape
        for name, tensor in names.to_tensors(params, VOCAB_SIZE).items()
        if not name.startswith("sbo.")
    }
    assert ours == theirs
