"""Opening a corpus directory: what is checked, and what is said of faults."""

import json
import shutil

import numpy as np
import pytest

from spanbert_jax.corpus import store
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.store import open_corpus
from spanbert_jax.corpus.tokenizers import Specials
from spanbert_jax.errors import InputError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    text = "\n\n".join(f"a line of words {i}\nand one more" for i in range(40))
    (directory / "text.txt").write_text(text)
    options = BuildOptions(
        output=directory / "corpus",
        input=(str(directory / "text.txt"),),
        vocab_size=60,
        valid_fraction=0.1,
        runner=Local(1),
        part_size=500,
    )
    return build(options).directory


@pytest.fixture
def directory(made, tmp_path):
    return shutil.copytree(made, tmp_path / "corpus")


def test_an_opened_corpus_agrees_with_its_manifest(directory):
    corpus = open_corpus(directory)
    train, valid = corpus.split("train"), corpus.split("valid")
    assert len(train.shards) > 2
    assert (train.num_documents, valid.num_documents) == (36, 4)
    for split in (train, valid):
        assert split.num_tokens == corpus.manifest["splits"][split.name]["tokens"]
        for shard in split.shards:
            assert isinstance(shard.tokens, np.memmap)
            assert shard.tokens.dtype == np.uint16
            assert shard.documents.dtype == shard.lines.dtype == np.int64
            assert np.all(np.diff(shard.documents) > 0)
            assert np.all(np.diff(shard.lines) > 0)
            assert np.isin(shard.documents, shard.lines).all()
    tokens = np.concatenate([shard.tokens for shard in train.shards])
    counts = np.bincount(tokens, minlength=corpus.tokenizer.vocab_size)
    np.testing.assert_array_equal(corpus.unigram_counts, counts)
    assert corpus.fingerprint == store.fingerprint(corpus.manifest)
    with pytest.raises(InputError, match="no split 'test', only train, valid"):
        corpus.split("test")


def test_wide_ids_are_stored_in_32_bits():
    assert store.token_dtype(65536) == np.uint16
    assert store.token_dtype(65537) == np.uint32


def test_what_is_no_corpus_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(InputError) as error:
        open_corpus(tmp_path / "none")
    assert f"data.corpus={tmp_path / 'none'}" in str(error.value)
    assert "python -m spanbert_jax.prepare" in str(error.value)


def change(directory, **entries):
    path = directory / "corpus.json"
    manifest = json.loads(path.read_text()) | entries
    manifest["fingerprint"] = store.fingerprint(manifest)
    path.write_text(json.dumps(manifest))
    return manifest


def test_other_format_versions_are_refused(directory):
    change(directory, format_version=99)
    with pytest.raises(InputError, match="format version 99, this program reads 2"):
        open_corpus(directory)


def test_broken_manifests_are_refused(directory):
    path = directory / "corpus.json"
    path.write_text(path.read_text().replace("train-00000", "train-00009"))
    with pytest.raises(InputError, match=r"corpus.json was changed"):
        open_corpus(directory)
    path.write_text("{")
    with pytest.raises(InputError, match=r"corpus.json is not JSON"):
        open_corpus(directory)


@pytest.mark.parametrize("kind", ["tokens", "documents", "lines"])
def test_missing_and_short_shard_files_are_named(directory, kind):
    path = directory / f"train-00001.{kind}.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(InputError, match=rf"{path.name} is cut short"):
        open_corpus(directory)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=rf"{path.name} is cut short"):
        open_corpus(directory)
    np.save(path, np.zeros(3, np.int64))
    with pytest.raises(InputError, match=rf"{path.name} holds"):
        open_corpus(directory)
    path.unlink()
    with pytest.raises(InputError, match=rf"{path.name} is missing"):
        open_corpus(directory)


def test_offsets_that_do_not_end_with_the_tokens_are_refused(directory):
    path = directory / "train-00000.documents.npy"
    offsets = np.load(path)
    offsets[-1] -= 1
    np.save(path, offsets)
    with pytest.raises(InputError, match=r"documents.npy runs from 0 to"):
        open_corpus(directory)


def test_counts_that_disagree_are_refused(directory):
    splits = json.loads((directory / "corpus.json").read_text())["splits"]
    splits["train"]["documents"] += 1
    change(directory, splits=splits)
    with pytest.raises(InputError, match=r"36 documents, corpus\.json says 37"):
        open_corpus(directory)


def test_a_changed_vocabulary_is_refused(directory):
    path = directory / "tokenizer" / "vocab.txt"
    path.write_text(path.read_text() + "new\n")
    with pytest.raises(InputError, match="sha256"):
        open_corpus(directory)


def test_other_spellings_of_special_tokens_are_remembered(tmp_path):
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b"]
    (tmp_path / "v.txt").write_text("\n".join(vocabulary))
    (tmp_path / "t.txt").write_text("a b <mask>\n\nb a")
    specials = Specials("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    options = BuildOptions(
        output=tmp_path / "c",
        input=(str(tmp_path / "t.txt"),),
        vocab=tmp_path / "v.txt",
        specials=specials,
        valid_fraction=0.0,
        runner=Local(1),
    )
    build(options)
    assert open_corpus(tmp_path / "c").tokenizer.specials == specials
