"""Initial parameters: weights that are there become those of a new run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from safetensors.numpy import save_file

import reference
import runs
import toy
import weightfiles as wf
from spanbert_jax import settings
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.data.batch import make_batch
from spanbert_jax.errors import InputError
from spanbert_jax.interop import names
from spanbert_jax.interop.initial import initial_params
from spanbert_jax.interop.names import Tensors
from spanbert_jax.settings import MESH_AXES
from spanbert_jax.training.program import Program, make_program
from spanbert_jax.training.saved import read_saved
from spanbert_jax.training.sharding import make_mesh

LAYER = "bert.encoder.layer.1"


@pytest.fixture
def config(toy_cache: Path, toy_corpus: Corpus) -> ConfigDict:
    config = toy.make_config(toy_cache)
    config.data.corpus = str(toy_corpus.directory)
    config.mesh.data = 1
    return config


@pytest.fixture(scope="module")
def tokenizer(toy_corpus: Corpus) -> Tokenizer:
    return toy_corpus.tokenizer


def compose(config: ConfigDict, tokenizer: Tokenizer) -> Program:
    model = settings.model(config, tokenizer.vocab_size)
    mesh = make_mesh(config, model.geometry)
    return make_program(config, model, mesh, settings.batch_shape(config))


def start(
    config: ConfigDict, tokenizer: Tokenizer
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], list[str]]:
    """Fresh parameters, those that the weights made of them, and the report."""
    shapes = compose(config, tokenizer).state.params
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    fresh = jax.device_put(reference.rough_params(shapes, seed=0), shardings)
    lines: list[str] = []
    made = initial_params(fresh, config, tokenizer, lines.append)
    return flatten_dict(fresh, sep="/"), flatten_dict(made, sep="/"), lines


def refusal(config: ConfigDict, tokenizer: Tokenizer) -> str:
    with pytest.raises(InputError, match="init_") as caught:
        start(config, tokenizer)
    return str(caught.value)


@pytest.fixture(scope="module")
def rough(toy_cache: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Parameters of the toy, as a checkpoint has them."""
    shapes = compose(toy.make_config(toy_cache), tokenizer).state.params
    return reference.rough_params(shapes, seed=3)


@pytest.fixture
def tensors(rough: dict[str, Any], tokenizer: Tokenizer) -> Tensors:
    tensors = names.to_tensors(rough, tokenizer.vocab_size)
    # Tables and biases are views of what all tests share.
    return {name: tensor.copy() for name, tensor in tensors.items()}


def write(config: ConfigDict, directory: Path, tensors: Tensors, **files: str) -> Path:
    """Writes a Hugging Face directory and lets a config start from it."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    for name, content in files.items():
        (directory / name.replace("_dot_", ".")).write_text(content)
    config.init_from = str(directory)
    return directory


def vocabulary(tokenizer: Tokenizer) -> str:
    return "".join(token + "\n" for token in tokenizer.tokens)


# ---- What is taken over


def test_all_tensors_are_taken_over(
    config: ConfigDict,
    tokenizer: Tokenizer,
    tensors: Tensors,
    rough: dict[str, Any],
    tmp_path: Path,
) -> None:
    write(config, tmp_path / "hf", tensors, vocab_dot_txt=vocabulary(tokenizer))
    _, made, lines = start(config, tokenizer)
    for path, values in flatten_dict(rough, sep="/").items():
        rows = tokenizer.vocab_size if path == names.TOKEN_TABLE else len(values)
        np.testing.assert_array_equal(made[path][:rows], values[:rows], err_msg=path)
    assert f"{len(tensors)} matched, 0 skipped, 0 new" in lines[0]
    assert any(
        line.split() == ["matched", "bert.encoder.layer.{0-1}.output.dense.bias", "64"]
        for line in lines
    )


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 8, 1), (8, 1, 1)])
def test_each_parameter_lies_where_it_lay(
    config: ConfigDict,
    tokenizer: Tokenizer,
    tensors: Tensors,
    tmp_path: Path,
    sizes: tuple[int, ...],
) -> None:
    config.mesh.update(dict(zip(MESH_AXES, sizes, strict=True)))
    name = f"{LAYER}.output.dense.weight"
    kept = {key: value for key, value in tensors.items() if key != name}
    write(config, tmp_path / "hf", kept)
    fresh, made, _ = start(config, tokenizer)
    for path, array in made.items():
        assert array.sharding.is_equivalent_to(fresh[path].sharding, array.ndim), path
        assert array.dtype == np.float32
    kernels = np.asarray(made["encoder/layers/output/kernel"])
    np.testing.assert_array_equal(
        kernels[0].T, tensors["bert.encoder.layer.0.output.dense.weight"]
    )
    np.testing.assert_array_equal(
        kernels[1], np.asarray(fresh["encoder/layers/output/kernel"])[1]
    )


def test_what_is_not_there_is_new_and_told(
    config: ConfigDict, tokenizer: Tokenizer, tensors: Tensors, tmp_path: Path
) -> None:
    encoder = {name: x for name, x in tensors.items() if name.startswith("bert.")}
    encoder["bert.pooler.dense.bias"] = np.ones(64, np.float32)
    write(config, tmp_path / "hf", encoder)
    fresh, made, lines = start(config, tokenizer)
    heads = [path for path in made if not path.startswith("encoder/")]
    assert heads
    for path in heads:
        np.testing.assert_array_equal(made[path], fresh[path])
    told = [line.split() for line in lines]
    assert ["new", "sbo.dense_1.weight", "64x328"] in told
    assert ["skipped", "bert.pooler.dense.bias", "64"] in told
    assert "no vocabulary" in lines[0]


def _write_reference(directory: Path, tensors: Tensors) -> Path:
    wf.save(directory / "model.pt", {wf.reference(n): x for n, x in tensors.items()})
    return directory / "model.pt"


def _write_google(directory: Path, tensors: Tensors) -> Path:
    known = {name: x for name, x in tensors.items() if not name.startswith("sbo.")}
    wf.save_tensorflow(directory / "bert_model.ckpt", wf.google(known))
    return directory / "bert_model.ckpt"


@pytest.mark.parametrize("write_dialect", [_write_reference, _write_google])
def test_the_encoder_computes_what_the_weights_do(
    config: ConfigDict,
    toy_corpus: Corpus,
    tokenizer: Tokenizer,
    tensors: Tensors,
    rough: dict[str, Any],
    tmp_path: Path,
    write_dialect: Callable[[Path, Tensors], Path],
) -> None:
    config.init_from = str(write_dialect(tmp_path, tensors))
    _, made, lines = start(config, tokenizer)
    is_whole = write_dialect is _write_reference
    assert ("0 new" if is_whole else "10 new") in lines[1]
    model = settings.model(config, tokenizer.vocab_size)
    feed = settings.feed(config, toy_corpus, "train")
    batch = make_batch(feed, np.arange(8), np.zeros(8, np.int64))
    found = model.apply(
        {"params": unflatten_dict(made, sep="/")},
        batch,
        deterministic=True,
        method=model.encode,
    )
    expected = reference.encode(reference.double(rough), batch, config.model.num_heads)
    real = batch["segment_ids"] > 0
    scale = np.abs(expected[real]).max()
    assert np.abs(np.asarray(found) - expected)[real].max() <= 1e-5 * scale


# ---- A run as the source


@pytest.fixture(scope="module")
def finished(
    toy_cache: Path, toy_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A run that ended at step 10, and saved step 5 as well."""
    config = runs.make_config(toy_cache, toy_corpus)
    config.train.stop_after = 10
    workdir = tmp_path_factory.mktemp("finished") / "run"
    runs.start(config, toy_corpus, workdir)
    return workdir


@pytest.mark.parametrize(("ending", "step"), [("", 10), ("checkpoints/5", 5)])
def test_a_run_starts_from_a_step_of_another(
    toy_cache: Path,
    toy_corpus: Corpus,
    tokenizer: Tokenizer,
    finished: Path,
    ending: str,
    step: int,
) -> None:
    config = runs.make_config(toy_cache, toy_corpus)
    config.init_from = str(finished / ending)
    _, made, lines = start(config, tokenizer)
    saved = flatten_dict(read_saved(finished, "", step).params, sep="/")
    for path, values in saved.items():
        rows = tokenizer.vocab_size if path == names.TOKEN_TABLE else len(values)
        np.testing.assert_array_equal(made[path][:rows], values[:rows])
    assert f"(a run, step {step}): " in lines[0]
    assert "0 skipped, 0 new" in lines[0]


def test_a_new_run_has_a_new_schedule_and_needs_its_source_once(
    toy_cache: Path, toy_corpus: Corpus, finished: Path, tmp_path: Path
) -> None:
    config = runs.make_config(toy_cache, toy_corpus)
    config.train.stop_after = 5
    config.init_from = str(finished)

    def start_from(params: Any) -> Any:
        return initial_params(params, config, toy_corpus.tokenizer, print)

    workdir = tmp_path / "run"
    first = runs.start(config, toy_corpus, workdir, start_from=start_from)
    assert "starting at step 0" in first.output
    assert "matched" in first.output
    old, new = runs.read_metrics(finished), runs.read_metrics(workdir)
    assert new[0]["step"] == 1
    assert new[0]["learning_rate"] == old[0]["learning_rate"]
    # Ten updates at these rates are worth some tenths of a nat.
    assert new[0]["loss"] < old[0]["loss"] - 0.1
    config.train.stop_after = 6
    config.init_from = str(tmp_path / "gone")
    second = runs.start(config, toy_corpus, workdir, start_from=start_from)
    assert "resuming from step 5" in second.output
    assert runs.steps_of(workdir) == [5, 6]


def test_a_head_of_other_boundaries_is_skipped(
    toy_cache: Path, toy_corpus: Corpus, tokenizer: Tokenizer, finished: Path
) -> None:
    config = runs.make_config(toy_cache, toy_corpus)
    config.init_from = str(finished)
    config.sbo.internal = True
    fresh, made, lines = start(config, tokenizer)
    kernel = "sbo_head/dense_2/kernel"
    np.testing.assert_array_equal(made[kernel], fresh[kernel])
    assert any(line.split()[:2] == ["skipped", "sbo.dense_2.weight"] for line in lines)


# ---- What is refused, with both numbers


@pytest.mark.parametrize(
    ("setting", "value", "found"),
    [
        ("model.num_layers", 3, 2),
        ("model.hidden_size", 32, 64),
        ("model.intermediate_size", 96, 128),
        ("model.max_positions", 64, 32),
        ("model.type_vocab_size", 1, 2),
        ("sbo.positions", 15, 20),
        ("sbo.position_size", 100, 200),
    ],
)
def test_a_model_of_another_size_is_named(
    config: ConfigDict,
    tokenizer: Tokenizer,
    tensors: Tensors,
    tmp_path: Path,
    setting: str,
    value: int,
    found: int,
) -> None:
    write(config, tmp_path / "hf", tensors)
    config.update_from_flattened_dict({setting: value})
    message = refusal(config, tokenizer)
    assert message.startswith(f"{setting} is {value}, but init_from=")
    assert message.endswith(f"has {found}; set it to {found}")


def test_other_heads_are_named(
    config: ConfigDict, tokenizer: Tokenizer, tensors: Tensors, tmp_path: Path
) -> None:
    content = json.dumps({"model_type": "bert", "num_attention_heads": 4})
    write(config, tmp_path / "hf", tensors, config_dot_json=content)
    assert "model.num_heads is 2" in refusal(config, tokenizer)
    config.model.num_heads = 4
    start(config, tokenizer)


def test_a_vocabulary_of_another_size_is_named(
    config: ConfigDict, tokenizer: Tokenizer, tensors: Tensors, tmp_path: Path
) -> None:
    name = "bert.embeddings.word_embeddings.weight"
    tensors[name] = np.concatenate([tensors[name], tensors[name][:3]])
    write(config, tmp_path / "hf", tensors)
    message = refusal(config, tokenizer)
    assert f"has {tokenizer.vocab_size} tokens" in message
    assert f"has {tokenizer.vocab_size + 3};" in message


def test_a_vocabulary_of_other_tokens_is_named(
    config: ConfigDict, tokenizer: Tokenizer, tensors: Tensors, tmp_path: Path
) -> None:
    tokens = [*tokenizer.tokens[:-1], "elsewhere"]
    content = "".join(token + "\n" for token in tokens)
    write(config, tmp_path / "hf", tensors, vocab_dot_txt=content)
    assert "'elsewhere'" in refusal(config, tokenizer)


def test_another_shape_is_named(
    config: ConfigDict, tokenizer: Tokenizer, tensors: Tensors, tmp_path: Path
) -> None:
    name = f"{LAYER}.output.dense.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    write(config, tmp_path / "hf", tensors)
    message = refusal(config, tokenizer)
    assert f"{name} is [128, 64], in this model [64, 128]" in message


def test_a_number_that_is_not_finite_is_refused(
    config: ConfigDict, tokenizer: Tokenizer, tensors: Tensors, tmp_path: Path
) -> None:
    tensors[f"{LAYER}.output.dense.bias"][3] = np.nan
    write(config, tmp_path / "hf", tensors)
    assert "not finite" in refusal(config, tokenizer)


def test_too_little_of_an_encoder_is_refused_unless_allowed(
    config: ConfigDict, tokenizer: Tokenizer, tensors: Tensors, tmp_path: Path
) -> None:
    for kind in ("query", "key", "value"):
        del tensors[f"{LAYER}.attention.self.{kind}.bias"]
    write(config, tmp_path / "hf", tensors)
    message = refusal(config, tokenizer)
    assert "lacks 3 of 37 tensors of the encoder, 8.1%" in message
    assert "init_max_new=0.05" in message
    config.init_max_new = 0.1
    *_, lines = start(config, tokenizer)
    assert ["new", f"{LAYER}.attention.self.key.bias", "64"] in [
        line.replace("{1}", "1").split() for line in lines
    ]


def test_a_path_where_nothing_is_is_refused(
    config: ConfigDict, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config.init_from = str(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in refusal(config, tokenizer)
