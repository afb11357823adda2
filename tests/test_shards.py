"""Shards: every document in its place or counted, whatever the parts."""

import copy
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanbert_jax.corpus import parts, shards, store
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.scan import Scan, held_out_threshold, repeated, scan
from spanbert_jax.corpus.shards import Recipe, summarise, summarise_sources
from spanbert_jax.corpus.sources import Reading, find_sources
from spanbert_jax.corpus.tags import Tagging
from spanbert_jax.corpus.tokenizers import Normalisation, Specials, Tokenizer
from spanbert_jax.corpus.wordpiece import train_wordpiece
from spanbert_jax.errors import StorageError

DOCUMENTS = {
    "a.txt": [["the cat"], ["a dog", "the cat sat"], ["cat"], ["the dog sat"]],
    "b.txt": [["cat"], ["a cat", "\u2603 sat"], ["the cat"], ["\u2603"], ["a dog sat"]],
}
READING = Reading()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, documents in DOCUMENTS.items():
        (tmp_path / name).write_text("\n\n".join("\n".join(d) for d in documents))
    return tmp_path


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_wordpiece(["the cat sat", "a dog sat"] * 9, 40)


def read(directory: Path, work: Path, part_size: int) -> Scan:
    (work / store.TOKENIZER).mkdir(parents=True)
    sources = find_sources([str(directory / "*.txt")], READING)
    return scan(sources, parts.cut(sources, READING, part_size), Local(1), work)


def recipe(text: Scan, tokenizer: Tokenizer, **changes: Any) -> Recipe:
    tokenizer.save(text.directory / store.TOKENIZER)
    return Recipe(
        **{
            "tokenizer_sha256": tokenizer.sha256,
            "specials": Specials(),
            "normalisation": Normalisation(),
            "min_tokens": 1,
            "threshold": held_out_threshold(text.hashes, 0.3),
            "drops_repeated": False,
            "tagging": Tagging((), "", ""),
        }
        | changes
    )


def write(text: Scan, recipe: Recipe) -> list[dict[str, Any]]:
    return shards.write_shards(text, recipe, Local(1), text.directory, "key")


def stored(text: Scan, reports: list[dict[str, Any]], split: str) -> list[list[int]]:
    """The documents of a split, in order."""
    documents = []
    for entry in summarise(reports)[split]["shards"]:
        path = text.directory / entry["name"]
        tokens = np.load(f"{path}.tokens.npy")
        bounds = np.load(f"{path}.documents.npy")
        lines = np.load(f"{path}.lines.npy")
        assert len(bounds) == entry["documents"] + 1
        assert len(lines) == entry["lines"] + 1
        assert set(bounds) <= set(lines)
        documents += [tokens[a:b].tolist() for a, b in pairwise(bounds)]
    return documents


@pytest.mark.parametrize("part_size", [1, 20, 1000])
def test_the_parts_make_no_difference(
    directory: Path, tokenizer: Tokenizer, part_size: int
) -> None:
    text = read(directory, directory / "work", part_size)
    reports = write(text, recipe(text, tokenizer))
    written = [document for name in sorted(DOCUMENTS) for document in DOCUMENTS[name]]
    expected = [
        list(chain.from_iterable(tokenizer.encode(document))) for document in written
    ]
    train, valid = (stored(text, reports, split) for split in ("train", "valid"))
    assert len(valid) >= 3
    assert train == [ids for ids in expected if ids in train]
    assert valid == [ids for ids in expected if ids in valid]
    assert len(train) + len(valid) == len(expected)
    assert len(reports) == len(text.parts)


def test_finished_parts_are_taken_from_their_reports(
    directory: Path, tokenizer: Tokenizer
) -> None:
    text = read(directory, directory / "work", 20)
    made = recipe(text, tokenizer)
    first = write(text, made)
    changed = copy.deepcopy(first[0]) | {"counted_tokens": 1234}
    store.write_json(text.directory / "report-00000.json", changed)
    assert write(text, made) == [changed, *first[1:]]


@pytest.mark.parametrize("part_size", [20, 1000])
def test_dropped_and_stored_tokens_are_those_of_the_text(
    directory: Path, tokenizer: Tokenizer, part_size: int
) -> None:
    whole = read(directory, directory / "work", part_size)
    splits = summarise(write(whole, recipe(whole, tokenizer))).values()
    total = sum(split["tokens"] for split in splits)
    assert all(split["dropped_tokens"] == 0 for split in splits)

    text = read(directory, directory / "shorter", part_size)
    splits = summarise(write(text, recipe(text, tokenizer, min_tokens=3))).values()
    kept = sum(split["tokens"] for split in splits)
    assert sum(split["dropped_documents"] for split in splits) == 5
    assert kept + sum(split["dropped_tokens"] for split in splits) == total


@pytest.mark.parametrize("part_size", [20, 1000])
def test_repeated_documents_are_dropped_but_for_the_first(
    directory: Path, tokenizer: Tokenizer, part_size: int
) -> None:
    text = read(directory, directory / "work", part_size)
    for part, flags in zip(text.parts, repeated(text.hashes), strict=True):
        np.save(text.directory / shards.repeated_file(part), flags)
    reports = write(text, recipe(text, tokenizer, drops_repeated=True))
    splits = summarise(reports)
    documents = stored(text, reports, "train") + stored(text, reports, "valid")
    written = {tuple(d) for documents in DOCUMENTS.values() for d in documents}
    assert len(documents) == len(written) == 7
    assert sum(split["repeated_documents"] for split in splits.values()) == 2
    assert sum(split["dropped_documents"] for split in splits.values()) == 2


@pytest.mark.parametrize("part_size", [20, 1000])
def test_tokens_and_unknown_tokens_of_each_source(
    directory: Path, tokenizer: Tokenizer, part_size: int
) -> None:
    text = read(directory, directory / "work", part_size)
    reports = write(text, recipe(text, tokenizer))
    totals = summarise_sources(reports, len(text.sources))
    for row, documents in zip(totals, DOCUMENTS.values(), strict=True):
        lines = [line for document in documents for line in document]
        ids = list(chain.from_iterable(tokenizer.encode(lines)))
        assert row.tolist() == [len(ids), ids.count(tokenizer.unk_id)]
    assert totals[1, 1] == 2


def test_lost_tokens_are_noticed(directory: Path, tokenizer: Tokenizer) -> None:
    text = read(directory, directory / "work", 1000)
    reports = write(text, recipe(text, tokenizer))
    summarise(reports)
    reports[0]["splits"]["train"]["tokens"] -= 1
    with pytest.raises(StorageError, match="tokens were lost: the tokenizer counted"):
        summarise(reports)
