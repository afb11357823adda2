"""Export: transformers loads what a run has made, and finds the same model in it."""

import importlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import models
import runs
import toy
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.errors import InputError, StorageError
from spanbert_jax.interop import names
from spanbert_jax.interop.huggingface import check_output, short_name, write_export
from spanbert_jax.training.saved import read_saved

# Slow to import, and not needed to export.
_HEAVY = ("tensorflow", "torch", "transformers")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy_corpus: Corpus) -> Path:
    """The work directory of a run with two steps."""
    directory = tmp_path_factory.mktemp("export")
    config = toy.make_config(directory / "cache")
    models.save_run(config, toy_corpus, directory / "run", [10, 20])
    models.write_metrics(directory / "run", models.make_history(*range(1, 31)))
    return directory / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """The newest step of the run as an export."""
    output = run.parent / "export"
    write_export(read_saved(run, "--workdir"), output)
    return output


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory: pytest.TempPathFactory, toy_corpus: Corpus) -> Path:
    """An export with a next-sentence head and without a span boundary head."""
    directory = tmp_path_factory.mktemp("pairs")
    config = toy.make_config(directory / "cache")
    config.data.pairs, config.sbo.weight = True, 0.0
    write_export(models.make_saved(config, toy_corpus, directory), directory / "export")
    return directory / "export"


@pytest.fixture(scope="module")
def of_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with a SentencePiece tokenizer."""
    directory = tmp_path_factory.mktemp("pieces")
    source = directory / "text.txt"
    source.write_text(toy.make_text(documents=20))
    corpus = build(
        BuildOptions(
            output=directory / "corpus",
            input=(str(source),),
            tokenizer="unigram",
            vocab_size=500,
            runner=Local(1),
        )
    )
    config = toy.make_config(directory / "cache")
    write_export(models.make_saved(config, corpus, directory), directory / "export")
    return directory / "export"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets nobody call out."""

    def refuse(*_: Any) -> None:
        raise AssertionError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# ---- What is in it


def test_the_files_of_an_export(exported: Path, of_pairs: Path) -> None:
    files = {path.name for path in exported.iterdir()}
    assert files >= {
        *("config.json", "model.safetensors", "sbo.safetensors", "spanbert_jax.json"),
        *("vocab.txt", "tokenizer.json", "tokenizer_config.json"),
        *("README.md", "curves.png"),
    }
    # A run that recorded nothing has no curves.
    missing = {"sbo.safetensors", "curves.png"}
    assert {path.name for path in of_pairs.iterdir()} == files - missing


def test_everybody_may_read_what_its_maker_lets_them(exported: Path) -> None:
    modes = {path.stat().st_mode for path in exported.iterdir()}
    assert len(modes) == 1


def test_the_padding_of_the_vocabulary_is_cut(run: Path, exported: Path) -> None:
    saved = read_saved(run, "--workdir")
    size = saved.origin.tokenizer.vocab_size
    table = load_file(exported / "model.safetensors")[
        "bert.embeddings.word_embeddings.weight"
    ]
    assert size % 128
    assert read_json(exported / "config.json")["vocab_size"] == len(table) == size
    padded = saved.params["encoder"]["token_embedding"]["embedding"]
    assert len(padded) > size
    np.testing.assert_array_equal(table, padded[:size])


def test_every_tensor_of_the_run_is_in_one_of_the_files(
    run: Path, exported: Path
) -> None:
    saved = read_saved(run, "--workdir")
    tensors = names.to_tensors(saved.params, saved.origin.tokenizer.vocab_size)
    of_head = load_file(exported / "sbo.safetensors")
    found = load_file(exported / "model.safetensors")
    assert of_head.keys() >= {"dense_1.weight", "norm_2.bias", "bias"}
    found |= {f"sbo.{name}": array for name, array in of_head.items()}
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array)


def test_a_step_can_be_chosen(run: Path, exported: Path, tmp_path: Path) -> None:
    write_export(read_saved(run, "--workdir", 10), tmp_path / "export")
    assert read_json(tmp_path / "export" / "spanbert_jax.json")["step"] == 10
    assert read_json(exported / "spanbert_jax.json")["step"] == 20
    weights = [
        (directory / "model.safetensors").read_bytes()
        for directory in (tmp_path / "export", exported)
    ]
    assert weights[0] != weights[1]


def test_no_file_tells_of_the_machine(toy_corpus: Corpus, tmp_path: Path) -> None:
    config = toy.make_config(tmp_path / "cache")
    config.data.corpus = str(toy_corpus.directory)
    config.init_from = str(tmp_path / "others" / "bert")
    saved = models.make_saved(config, toy_corpus, tmp_path / "run")
    moved = {"step": 5, "name": "data.corpus", "old": str(tmp_path), "new": ""}
    saved.record["changes"].append(moved)
    write_export(saved, tmp_path / "export")
    told = read_json(tmp_path / "export" / "spanbert_jax.json")["settings"]
    assert (told["init_from"], told["data.corpus"]) == ("bert", "corpus")
    for name, content in toy.contents(tmp_path / "export").items():
        for path in (tmp_path, toy_corpus.directory.parent, runs.REPOSITORY):
            assert str(path).encode() not in content, name
    # The model itself is as it was.
    assert config.data.corpus == str(toy_corpus.directory)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", ""),
        ("/home/me/bert-v1.0/", "bert-v1.0"),
        ("bert", "bert"),
        ("/home/me/bert/model.safetensors", "bert/model.safetensors"),
        ("/home/me/uncased/bert_model.ckpt", "uncased/bert_model.ckpt"),
        ("/home/me/runs/mine/checkpoints/500", "mine/checkpoints/500"),
        ("model.pt", "model.pt"),
    ],
)
def test_weights_to_start_from_have_a_name_and_no_path(path: str, name: str) -> None:
    assert short_name(path) == name


# ---- In transformers


def load(class_name: str, directory: Path) -> tuple[Any, set, set]:
    """A model with the names that it misses and those that it does not know."""
    with models.one_thread():
        kind = getattr(importlib.import_module("transformers"), class_name)
        model, info = kind.from_pretrained(
            directory, output_loading_info=True, local_files_only=True
        )
    assert not info["mismatched_keys"]
    return model, set(info["missing_keys"]), set(info["unexpected_keys"])


@pytest.mark.parametrize("kind", ["exported", "of_pairs", "of_pieces"])
@pytest.mark.parametrize(
    "class_name",
    [
        *("AutoModel", "AutoModelForMaskedLM", "BertForPreTraining"),
        *("BertForQuestionAnswering", "BertForTokenClassification"),
        *("BertForSequenceClassification", "BertForMultipleChoice"),
    ],
)
def test_every_class_finds_the_whole_encoder(
    class_name: str, kind: str, request: pytest.FixtureRequest, offline: None
) -> None:
    directory = request.getfixturevalue(kind)
    model, missing, unexpected = load(class_name, directory)
    encoder = ("embeddings.", "encoder.", "bert.embeddings.", "bert.encoder.")
    assert not [name for name in missing | unexpected if name.startswith(encoder)]
    tensors = load_file(directory / "model.safetensors")
    state = {
        name.removeprefix("bert."): tensor
        for name, tensor in model.state_dict().items()
    }
    for name, array in tensors.items():
        short = name.removeprefix("bert.")
        if short.startswith(encoder):
            np.testing.assert_array_equal(state[short].numpy(), array)


def test_a_masked_language_model_misses_nothing(exported: Path) -> None:
    assert load("AutoModelForMaskedLM", exported)[1:] == (set(), set())


def test_pairs_with_their_head_miss_nothing(of_pairs: Path) -> None:
    assert load("BertForPreTraining", of_pairs)[1:] == (set(), set())
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert not load("BertForSequenceClassification", of_pairs)[1] & pooler


def test_the_output_is_tied_to_the_input(exported: Path) -> None:
    model, _, _ = load("AutoModelForMaskedLM", exported)
    head, table = model.cls.predictions, model.get_input_embeddings().weight
    assert head.decoder.weight.data_ptr() == table.data_ptr()
    assert head.decoder.bias.data_ptr() == head.bias.data_ptr()


@pytest.mark.parametrize("kind", ["exported", "of_pairs", "of_pieces"])
def test_masks_are_filled_without_a_network(
    kind: str, request: pytest.FixtureRequest, offline: None
) -> None:
    transformers = pytest.importorskip("transformers")
    directory = request.getfixturevalue(kind)
    fill = transformers.pipeline("fill-mask", model=str(directory))
    tokenizer, config = fill.tokenizer, fill.model.config
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.model_max_length == config.max_position_embeddings == 32
    special = read_json(directory / "spanbert_jax.json")["tokenizer"]["special_tokens"]
    assert tokenizer.mask_token_id == special["mask"]["id"]
    assert config.pad_token_id == tokenizer.pad_token_id == special["pad"]["id"]
    with models.one_thread():
        guesses = fill(f"Ba {tokenizer.mask_token} do.", top_k=config.vocab_size)
    assert sum(guess["score"] for guess in guesses) == pytest.approx(1, abs=1e-4)


# ---- All of it or nothing


def test_exporting_twice_gives_equal_bytes_and_needs_no_torch(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    output = tmp_path / "elsewhere" / "export"
    code = f"""
import runpy, sys
sys.argv = ["export", "--workdir={run}", "--output=elsewhere/export"]
try:
    runpy.run_module("spanbert_jax.export", run_name="__main__")
except SystemExit as end:
    print([name for name in {_HEAVY} if name in sys.modules], end.code)
"""
    # From another directory, in another process, on another number of devices.
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=runs.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr
    assert f"elsewhere/export: step 20 of {run}" in done.stdout
    assert toy.contents(output) == toy.contents(exported)


@pytest.fixture
def limited() -> Iterator[Any]:
    """Sets the bytes that a file may have, as if the disk were full beyond."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


# The first file, the weights, the curves.
@pytest.mark.parametrize("size", [100, 50_000, 130_000])
def test_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, limited: Any, size: int
) -> None:
    saved = read_saved(run, "--workdir")
    limited(size)
    with pytest.raises(StorageError, match=r"cannot write .*export"):
        write_export(saved, tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for path in (tmp_path, tmp_path / "mine"):
        with pytest.raises(InputError, match="exists and is not an empty directory"):
            check_output(path)
    with pytest.raises(InputError, match="is a URL"):
        check_output(Path("gs://bucket/export"))
    # Even if it came while the model was read.
    with pytest.raises(StorageError, match="cannot write"):
        write_export(read_saved(run, "--workdir"), tmp_path)
    assert toy.contents(tmp_path.parent / tmp_path.name) == {"mine": b"mine"}
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))


def test_an_empty_directory_is_filled(
    of_pairs: Path, run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "export"
    output.mkdir()
    check_output(output)
    write_export(read_saved(run, "--workdir"), output)
    assert (output / "config.json").exists()
