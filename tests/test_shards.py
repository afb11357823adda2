"""Shards: where the text is cut, and what their reports must add up to."""

import json
from dataclasses import replace
from itertools import chain

import pytest

from spanbert_jax.corpus import store
from spanbert_jax.corpus.scan import Scan, held_out_threshold, scan
from spanbert_jax.corpus.shards import Cut, Report, summarise, write_shards
from spanbert_jax.corpus.sources import find_sources
from spanbert_jax.corpus.tokenizers import Specials, train_wordpiece
from spanbert_jax.errors import StorageError

DOCUMENTS = [["the cat"], ["a dog", "the cat sat"], ["cat"], ["the dog sat"], ["a cat"]]


@pytest.fixture
def text(tmp_path) -> Scan:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join("\n".join(lines) for lines in DOCUMENTS))
    return scan(find_sources([str(path)], "text"), "text")


@pytest.fixture
def cut(tmp_path, text) -> Cut:
    directory = tmp_path / "made"
    (directory / store.TOKENIZER).mkdir(parents=True)
    lines = [line for document in DOCUMENTS for line in document]
    train_wordpiece(lines, 40).save(directory / store.TOKENIZER)
    threshold = held_out_threshold(text.hashes, 0.2)
    return Cut(directory, Specials(), 1, characters=12, threshold=threshold)


def test_a_shard_ends_with_the_document_that_fills_it(text, cut):
    parts = {"train": [[]], "valid": [[]]}
    for key, document in text.documents():
        part = parts["valid" if key < cut.threshold else "train"]
        part[-1].append(document)
        if sum(map(len, chain.from_iterable(part[-1]))) >= cut.characters:
            part.append([])
    expected = {
        f"{split}-{number:05d}": len(documents)
        for split, part in parts.items()
        for number, documents in enumerate(part)
        if documents
    }
    reports = write_shards(text, cut, workers=1)
    assert {report.name: report.documents for report in reports} == expected
    assert len(expected) > 2


def test_finished_shards_are_taken_from_their_reports(text, cut):
    first = write_shards(text, cut, workers=1)
    path = cut.directory / f"{first[0].name}.done.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lines": 1234}))
    again = write_shards(text, cut, workers=2)
    assert again == [replace(first[0], lines=1234), *first[1:]]


def test_dropped_and_stored_tokens_are_those_of_the_text(text, cut):
    whole = summarise(write_shards(text, cut, workers=1))
    total = sum(split["tokens"] for split in whole.values())
    shorter = replace(cut, directory=cut.directory.with_name("b"), min_tokens=3)
    cut.directory.rename(shorter.directory)
    for path in shorter.directory.glob("*.done.json"):
        path.unlink()
    splits = summarise(write_shards(text, shorter, workers=1)).values()
    assert sum(split["dropped_documents"] for split in splits) == 3
    assert sum(split["tokens"] + split["dropped_tokens"] for split in splits) == total


def test_lost_tokens_are_noticed():
    report = Report("train-00000", 1, 1, 5, 0, 1, 2, 7, "")
    assert summarise([report])["train"]["tokens"] == 5
    with pytest.raises(StorageError, match="counted 7, but 4 are stored and 2 dropped"):
        summarise([replace(report, tokens=4)])
