"""Other people's weights: every dialect gives the same tensors, or a sentence."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import weightfiles as wf
from spanbert_jax.errors import InputError
from spanbert_jax.interop import foreign
from spanbert_jax.interop.foreign import Foreign
from spanbert_jax.interop.names import Tensors

WORDS = "bert.embeddings.word_embeddings.weight"
LAYERS, WIDTH, VOCAB, POSITIONS, SBO_ROWS = 2, 8, 50, 16, 5


def dense(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def encoder_shapes(positions: int = POSITIONS, types: int = 2) -> dict[str, tuple]:
    shapes = {
        WORDS: (VOCAB, WIDTH),
        "bert.embeddings.position_embeddings.weight": (positions, WIDTH),
        "bert.embeddings.token_type_embeddings.weight": (types, WIDTH),
        **norm("bert.embeddings.LayerNorm"),
    }
    for n in range(LAYERS):
        layer = f"bert.encoder.layer.{n}"
        for part in ("query", "key", "value"):
            shapes |= dense(f"{layer}.attention.self.{part}", WIDTH, WIDTH)
        shapes |= dense(f"{layer}.attention.output.dense", WIDTH, WIDTH)
        shapes |= norm(f"{layer}.attention.output.LayerNorm")
        shapes |= dense(f"{layer}.intermediate.dense", WIDTH, 4 * WIDTH)
        shapes |= dense(f"{layer}.output.dense", 4 * WIDTH, WIDTH)
        shapes |= norm(f"{layer}.output.LayerNorm")
    return shapes


MLM = {
    "cls.predictions.bias": (VOCAB,),
    **dense("cls.predictions.transform.dense", WIDTH, WIDTH),
    **norm("cls.predictions.transform.LayerNorm"),
}
NSP = {
    **dense("bert.pooler.dense", WIDTH, WIDTH),
    **dense("cls.seq_relationship", WIDTH, 2),
}
SBO = {
    "sbo.position_embedding.weight": (SBO_ROWS, 200),
    **dense("sbo.dense_1", 2 * WIDTH + 200, WIDTH),
    **norm("sbo.norm_1"),
    **dense("sbo.dense_2", WIDTH, WIDTH),
    **norm("sbo.norm_2"),
    "sbo.bias": (VOCAB,),
}


def make(shapes: dict[str, tuple], seed: int = 0) -> Tensors:
    generator = np.random.default_rng(seed)
    return {
        name: generator.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        assert found[name].flags.c_contiguous
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def read_saved(path: Path, tensors: Tensors) -> Foreign:
    wf.save(path, tensors)
    return foreign.read(path)


@dataclasses.dataclass(frozen=True)
class Dialect:
    shapes: dict[str, tuple]
    rename: Callable[[str], str]
    kind: str = "Hugging Face, PyTorch"


ENCODER = encoder_shapes()
DIALECTS = {
    "with heads": Dialect(ENCODER | MLM | NSP, str),
    "encoder alone": Dialect(ENCODER, str),
    "no pooler": Dialect(ENCODER | MLM, str),
    "gamma and beta": Dialect(ENCODER | MLM | NSP, wf.greek),
    "no prefix": Dialect(ENCODER, lambda name: name.removeprefix("bert.")),
    "no prefix, gamma": Dialect(
        ENCODER, lambda name: wf.greek(name).removeprefix("bert.")
    ),
    "module.": Dialect(ENCODER | MLM, lambda name: f"module.{name}"),
    "model.": Dialect(ENCODER | MLM, lambda name: f"model.{name}"),
    "model.module.": Dialect(ENCODER | MLM, lambda name: f"model.module.{name}"),
    "module. alone": Dialect(ENCODER, lambda name: name.replace("bert.", "module.", 1)),
    "our own": Dialect(ENCODER | MLM | SBO, str),
    "reference": Dialect(ENCODER | MLM | SBO, wf.reference, "reference SpanBERT"),
    "reference, in model": Dialect(
        ENCODER | MLM | SBO,
        lambda name: f"model.{wf.reference(name)}",
        "reference SpanBERT",
    ),
    "reference, encoder alone": Dialect(ENCODER, wf.reference, "reference SpanBERT"),
    "one token type": Dialect(encoder_shapes(types=1), str),
    "1,024 positions": Dialect(encoder_shapes(positions=1024), str),
}


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_dialects(tmp_path: Path, dialect: Dialect) -> None:
    tensors = make(dialect.shapes)
    renamed = {dialect.rename(name): array for name, array in tensors.items()}
    assert len(renamed) == len(tensors)
    extra = {"embeddings.position_ids": np.arange(POSITIONS)[None]}
    found = read_saved(tmp_path / "a.bin", renamed | extra)
    same(found.tensors, tensors)
    assert found.kind == dialect.kind
    assert found.skipped == {"embeddings.position_ids": (1, POSITIONS)}
    assert found.num_heads is None


def test_a_reference_checkpoint_with_all_that_is_in_it(tmp_path: Path) -> None:
    tensors = make(ENCODER | MLM | SBO)
    states = {wf.reference(name): array for name, array in tensors.items()}
    states["decoder.cls.predictions.decoder.weight"] = tensors[WORDS]
    states["decoder.cls.pair_target_predictions.decoder.weight"] = tensors[WORDS]
    assert "decoder.bert.encoder.layer.1.output.LayerNorm.gamma" in states
    assert (
        "decoder.cls.pair_target_predictions.mlp_layer_norm.layer_norm2.beta" in states
    )
    keys = {name: str(i) for i, name in enumerate(states)}
    model = {name: wf.of_array(keys[name], array) for name, array in states.items()}
    moment = wf.of_array(keys["decoder.cls.predictions.bias"], tensors["sbo.bias"])
    item = wf.mapping(
        {
            "args": wf.create(wf.named("argparse", "Namespace")),
            "model": wf.mapping(model),
            "optimizer_history": wf.listing(wf.mapping({"num_updates": b"K\x03"})),
            "last_optimizer_state": wf.mapping(
                {"state": wf.mapping({"0": wf.mapping({"exp_avg": moment})})}
            ),
        }
    )
    storages = {
        keys[name]: (array.size, array.tobytes()) for name, array in states.items()
    }
    wf.write_stream(tmp_path / "model.pt", item, storages)
    found = foreign.read(tmp_path / "model.pt")
    same(found.tensors, tensors)
    assert found.kind == "reference SpanBERT"
    assert found.skipped == {"last_optimizer_state.state.0.exp_avg": (VOCAB,)}


@pytest.mark.parametrize("prefix", ["bert/", ""])
def test_tensorflow(tmp_path: Path, prefix: str) -> None:
    tensors = make(ENCODER | MLM | NSP if prefix else ENCODER)
    states = wf.google(tensors)
    states = {prefix + name.removeprefix("bert/"): a for name, a in states.items()}
    if prefix:
        states = wf.google(tensors)
        assert states["cls/seq_relationship/output_weights"].shape == (2, WIDTH)
        assert states["bert/encoder/layer_0/output/dense/kernel"].shape == (32, 8)
        assert {"cls/predictions/output_bias", "bert/pooler/dense/kernel"} < set(states)
    slots = {
        f"{name}/{slot}": array
        for name, array in states.items()
        for slot in ("adam_m", "adam_v")
    }
    wf.save_tensorflow(
        tmp_path / "bert_model.ckpt", states | slots | {"global_step": np.array(7)}
    )
    config = {"hidden_act": "gelu", "num_attention_heads": 4}
    (tmp_path / "bert_config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "bert_model.ckpt"):
        found = foreign.read(path)
        same(found.tensors, tensors)
        assert found.kind == "TensorFlow BERT"
        assert found.skipped == {"global_step": ()} | {
            name: array.shape for name, array in slots.items()
        }
        assert found.num_heads == 4


def test_only_a_layer_norm_has_gamma_and_beta(tmp_path: Path) -> None:
    tensors = make(ENCODER)
    strange = {
        f"bert.encoder.layer.0.{name}": np.ones(WIDTH, np.float32)
        for name in (
            "gamma",
            "output.dense.gamma",
            "attention.self.gamma.weight",
            "intermediate.dense.beta",
            "output.MyLayerNorm.gamma",
            "output.LayerNorm.gamma.weight",
            "output.LayerNorm.gamma_scale",
        )
    }
    found = read_saved(tmp_path / "a.bin", tensors | strange)
    same(found.tensors, tensors)
    assert found.skipped == {name: array.shape for name, array in strange.items()}


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float64"])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_all_floats_become_float32(tmp_path: Path, dtype: str, suffix: str) -> None:
    tensors = {name: array.astype(dtype) for name, array in make(ENCODER).items()}
    path = tmp_path / f"a.{suffix}"
    (wf.save(path, tensors) if suffix == "pt" else save_file(tensors, path))
    found = foreign.read(path)
    same(found.tensors, {k: v.astype(np.float32) for k, v in tensors.items()})


def test_tensors_are_copies_that_may_be_changed(tmp_path: Path) -> None:
    tensors = make(ENCODER)
    found = read_saved(tmp_path / "a.bin", tensors)
    (tmp_path / "a.bin").write_bytes(b"\0" * (tmp_path / "a.bin").stat().st_size)
    same(found.tensors, tensors)
    assert all(array.flags.writeable for array in found.tensors.values())


TIED = {
    "cls.predictions.decoder.weight": WORDS,
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "sbo.decoder.weight": WORDS,
}


@pytest.mark.parametrize(("twin", "name"), TIED.items(), ids=TIED)
@pytest.mark.parametrize("rename", [str, wf.reference], ids=["ours", "reference"])
def test_tied_output_layers(
    tmp_path: Path, twin: str, name: str, rename: Callable[[str], str]
) -> None:
    tensors = make(ENCODER | MLM | SBO)

    def read(states: Tensors) -> Foreign:
        return read_saved(
            tmp_path / "a.pt", {rename(key): array for key, array in states.items()}
        )

    found = read(tensors | {twin: tensors[name]})
    same(found.tensors, tensors)
    assert found.skipped == {}
    alone = {key: array for key, array in tensors.items() if key != name}
    same(read(alone | {twin: tensors[name]}).tensors, tensors)
    other = tensors[name].copy()
    other.flat[-1] += 1e-6
    message = rf"{twin} .* {name} .* is not tied to its input embedding"
    for array in (other, tensors[name][:-1]):
        with pytest.raises(InputError, match=message):
            read(tensors | {twin: array})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WORDS, "embeddings.word_embeddings.weight"),
        (WORDS, "module.bert.embeddings.word_embeddings.weight"),
        ("bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma"),
    ],
)
def test_two_names_for_one_tensor(tmp_path: Path, one: str, other: str) -> None:
    tensors = make(ENCODER)
    tensors[other] = tensors[one]
    with pytest.raises(InputError, match=rf"{one} and {other} would both be {one}"):
        read_saved(tmp_path / "a.bin", tensors)


@pytest.mark.parametrize("prefix", ["roberta.", "electra.", "encoder.", "ema."])
def test_another_model_is_none_of_ours(tmp_path: Path, prefix: str) -> None:
    states = {
        name.replace("bert.", prefix, 1): array for name, array in make(ENCODER).items()
    }
    first = re.escape(f"{prefix}embeddings.word_embeddings.weight")
    with pytest.raises(
        InputError,
        match=rf"^init_from=.*of {len(states)} names, the first .*: {first}, ",
    ):
        read_saved(tmp_path / "a.bin", states)


def test_a_second_model_beside_ours_is_skipped(tmp_path: Path) -> None:
    tensors = make(ENCODER)
    ema = {f"ema.{name}": array for name, array in make(ENCODER, seed=1).items()}
    found = read_saved(tmp_path / "a.bin", ema | tensors)
    same(found.tensors, tensors)
    assert found.skipped.keys() == ema.keys()


def test_heads_without_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tensor has a name of BERT's encoder"):
        read_saved(tmp_path / "a.bin", make(MLM | NSP))
    wf.save(tmp_path / "a.bin", {})
    with pytest.raises(InputError, match="of 0 names, the first are: none"):
        foreign.read(tmp_path / "a.bin")


@pytest.mark.parametrize(
    "name",
    [
        "bert.encoder.layer.0.crossattention.self.query.weight",
        "bert.encoder.layer.1.attention.self.distance_embedding.weight",
    ],
)
def test_layers_that_compute_more_than_ours(tmp_path: Path, name: str) -> None:
    tensors = make(ENCODER) | {name: np.ones((WIDTH, WIDTH), np.float32)}
    with pytest.raises(InputError, match=f"its layers have .*: {name}"):
        read_saved(tmp_path / "a.bin", tensors)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((VOCAB, WIDTH), np.int8), "numbers of type int8; weights are "),
        (np.full((VOCAB, WIDTH), np.nan, np.float32), "not finite"),
        (np.full((VOCAB, WIDTH), 1e39), "not finite in float32"),
        (np.full((VOCAB, WIDTH), np.inf, ml_dtypes.bfloat16), "not finite"),
    ],
)
def test_numbers_that_are_no_weights(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    with pytest.raises(InputError, match=rf"^init_from=.*: {WORDS} holds .*{message}"):
        read_saved(tmp_path / "a.bin", make(ENCODER) | {WORDS: array})
    found = read_saved(tmp_path / "a.bin", make(ENCODER) | {"other": array})
    assert found.skipped == {"other": array.shape}


CONFIG = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "num_attention_heads": 4,
}


def test_the_config_beside_weights(tmp_path: Path) -> None:
    save_file(make(ENCODER), tmp_path / "model.safetensors")
    for config, heads in (
        (CONFIG, 4),
        ({"num_attention_heads": 2}, 2),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for path in (tmp_path, tmp_path / "model.safetensors"):
            assert foreign.read(path).num_heads == heads


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("model_type", "roberta", "'bert'"),
        ("hidden_act", "gelu_new", "'gelu'"),
        ("hidden_act", "relu", "'gelu'"),
        ("layer_norm_eps", 1e-5, "1e-12"),
        ("position_embedding_type", "relative_key", "'absolute'"),
        ("is_decoder", True, "False"),
    ],
)
def test_a_config_that_this_model_cannot_be(
    tmp_path: Path, key: str, value: object, ours: str
) -> None:
    save_file(make(ENCODER), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    message = rf"config\.json says {key}={value!r}; this model has {ours} and"
    with pytest.raises(InputError, match=message):
        foreign.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"num_attention_heads": "4"}'])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    save_file(make(ENCODER), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=rf"init_from={tmp_path}: config\.json "):
        foreign.read(tmp_path)


def test_every_error_begins_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 99)
    (tmp_path / "broken.bin").write_bytes(b"x" * 99)
    for name in ("gone", "empty", "broken.safetensors", "broken.bin", ""):
        path = tmp_path / name
        with pytest.raises(InputError, match=rf"^init_from={path}: \S"):
            foreign.read(path)
    with pytest.raises(InputError, match=r"^init_from=~/no/such: there is no such in"):
        foreign.read(Path("~/no/such"))
    looped = tmp_path / "loop.bin"
    looped.symlink_to(looped)
    with pytest.raises(InputError, match=rf"^init_from={looped} cannot be read: "):
        foreign.read(looped)


@pytest.mark.parametrize("head", ["BertForPreTraining", "BertForMaskedLM", "BertModel"])
def test_what_transformers_saves(tmp_path: Path, head: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=POSITIONS,
    )
    model = getattr(transformers, head)(config)
    states = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    shapes = {
        "BertForPreTraining": ENCODER | MLM | NSP,
        "BertForMaskedLM": ENCODER | MLM,
        "BertModel": ENCODER | dense("bert.pooler.dense", WIDTH, WIDTH),
    }[head]
    prefix = "bert." if head == "BertModel" else ""
    expected = {name: states[name.removeprefix(prefix)] for name in shapes}
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    torch.save(model.state_dict(), tmp_path / "new.bin")
    torch.save(
        {"state_dict": model.bfloat16().float().half().state_dict()},
        tmp_path / "half.bin",
        _use_new_zipfile_serialization=False,
    )
    for name, heads in (("whole", 2), ("shards", 2), ("new.bin", None)):
        found = foreign.read(tmp_path / name)
        same(found.tensors, expected)
        assert (found.skipped, found.num_heads) == ({}, heads)
    found = foreign.read(tmp_path / "half.bin")
    rounded = {
        name: array.astype(ml_dtypes.bfloat16).astype(np.float16).astype(np.float32)
        for name, array in expected.items()
    }
    same(found.tensors, rounded)
