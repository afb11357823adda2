"""Pretrained: a run and its export are one model, whichever is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

import models
import toy
from spanbert_jax import settings
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.errors import InputError
from spanbert_jax.interop import names
from spanbert_jax.interop.huggingface import write_export
from spanbert_jax.interop.pretrained import (
    PATHS,
    parameter_shapes,
    portable_model,
    read_pretrained,
)
from spanbert_jax.training.saved import read_saved


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_corpus: Corpus) -> ConfigDict:
    """The toy with settings that all differ from the defaults."""
    config = toy.make_config(tmp_path_factory.mktemp("cache"))
    config.data.corpus = str(toy_corpus.directory)
    config.data.pairs = True
    config.sbo.boundaries, config.sbo.depth, config.sbo.positions = "left", 3, 7
    config.model.attention_dropout = 0.0
    return config


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, config: ConfigDict, toy_corpus: Corpus
) -> Path:
    workdir = tmp_path_factory.mktemp("pretrained") / "run"
    models.save_run(config, toy_corpus, workdir, [3, 8])
    return workdir


@pytest.fixture(scope="module")
def export(run: Path) -> Path:
    output = run.parent / "export"
    write_export(read_saved(run, "--workdir"), output)
    return output


@pytest.fixture
def copy(export: Path, tmp_path: Path) -> Path:
    """An export to be broken."""
    return shutil.copytree(export, tmp_path / "export")


def test_an_export_is_its_run_bit_for_bit(run: Path, export: Path) -> None:
    ours, theirs = (read_pretrained(path, "--model") for path in (run, export))
    assert ours.step == theirs.step == 8
    assert ours.tokenizer == theirs.tokenizer
    size = ours.tokenizer.vocab_size
    flat = flatten_dict(theirs.params, sep="/")
    assert flat.keys() == flatten_dict(ours.params, sep="/").keys()
    assert not flat[names.TOKEN_TABLE][size:].any()
    for path, array in flatten_dict(ours.params, sep="/").items():
        assert flat[path].dtype == array.dtype == np.float32
        assert flat[path].shape == array.shape
        rows = np.s_[:size] if path == names.TOKEN_TABLE else np.s_[:]
        assert flat[path][rows].tobytes() == array[rows].tobytes(), path


def test_an_export_has_the_settings_of_its_run_but_for_paths(
    run: Path, export: Path
) -> None:
    ours, theirs = (
        settings.flatten(read_pretrained(path, "--model").config)
        for path in (run, export)
    )
    assert {name for name in ours if ours[name] != theirs[name]} <= set(PATHS)
    assert theirs["sbo.depth"] == 3


def test_a_step_of_a_run_can_be_chosen(run: Path, export: Path) -> None:
    assert read_pretrained(run, "--model", 3).step == 3
    assert read_pretrained(export, "--model", 8).step == 8
    with pytest.raises(InputError, match=r"an export of step 8; it has no step 3"):
        read_pretrained(export, "--model", 3)
    with pytest.raises(InputError, match=r"has no step 4; it has 3, 8"):
        read_pretrained(run, "--model", 4)


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=f"--model={path} is neither .* run nor"):
            read_pretrained(path, "--model")


def describe_as(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "spanbert_jax.json"
        content = json.loads(path.read_text())
        content.update(changes)
        path.write_text(json.dumps(content))

    return change


def set_up_as(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "spanbert_jax.json"
        content = json.loads(path.read_text())
        for name, value in changes.items():
            content["settings"][name.replace("__", ".")] = value
        path.write_text(json.dumps(content))

    return change


def cut_off(file: str, size: int) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        with (directory / file).open("r+b") as opened:
            opened.truncate(size)

    return change


def extend(file: str, text: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        with (directory / file).open("a") as opened:
            opened.write(f"{text}\n")

    return change


def remove(file: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).unlink()


def drop_tensor(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path)

    return change


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (describe_as(format_version=9), "has format version 9, this program reads 1"),
        (cut_off("spanbert_jax.json", 100), "spanbert_jax.json cannot be read"),
        (describe_as(settings=None), "spanbert_jax.json cannot be read"),
        (describe_as(tokenizer={}), "spanbert_jax.json cannot be read"),
        (cut_off("model.safetensors", 5000), "model.safetensors cannot be read"),
        (remove("model.safetensors"), "model.safetensors cannot be read"),
        (remove("sbo.safetensors"), "sbo.safetensors cannot be read"),
        (remove("vocab.txt"), "vocab.txt"),
        (extend("vocab.txt", "more"), "vocab.txt was changed since it was written"),
        (drop_tensor("cls.predictions.bias"), "has no tensor cls.predictions.bias"),
        (
            set_up_as(model__max_positions=40),
            r"position_embeddings.weight is \(32, 64\); by spanbert_jax.json it must be"
            r" \(40, 64\)",
        ),
        (set_up_as(sbo__depth=4), "has no tensor sbo.dense_4"),
    ],
)
def test_a_broken_export_is_refused_in_a_sentence(
    copy: Path, break_it: Callable[[Path], None], message: str
) -> None:
    break_it(copy)
    with pytest.raises(InputError, match=message) as caught:
        read_pretrained(copy, "--model")
    assert str(caught.value).startswith("--model")


def test_other_settings_than_the_parameters_leave_the_shapes(
    config: ConfigDict,
) -> None:
    """A model for an accelerator can be used where there is none."""
    other = config.copy_and_resolve_references()
    other.model.attention, other.model.dtype = "splash", "bfloat16"
    other.model.remat, other.train.batch_size = "full", 4
    shapes = [parameter_shapes(one, 300) for one in (config, other)]
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, *shapes))
    geometry = portable_model(other, 300).geometry
    assert (geometry.dtype, geometry.attention) == (np.float32, "plain")
