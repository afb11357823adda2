"""Tags: named entities and noun phrases, as spaCy finds them, in places of tokens."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanbert_jax.errors import InputError

KINDS = ("entities", "noun_phrases")
DEFAULT_MODEL = "en_core_web_sm"

_NEEDED = {"entities": {"ner"}, "noun_phrases": {"parser"}}
# Noun phrases go by parts of speech, too: without them spaCy finds none, and does not
# complain. Which component tells them depends on the model.
_HELPERS: dict[str, set[str]] = {
    "entities": set(),
    "noun_phrases": {"tagger", "morphologizer", "attribute_ruler"},
}
_VECTORS = {"tok2vec", "transformer"}
# spaCy refuses longer texts, and takes memory in proportion to the text.
_LONGEST_TEXT = 50_000
_TEXTS_AT_A_TIME = 64

# Ranges of characters of a line, half open, rising.
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class Tagging:
    """What to tag, and with what.

    Attributes:
        kinds: of `KINDS`.
        model: an installed spaCy package, or a directory.
        version: the model's name and version, for the record.
    """

    kinds: tuple[str, ...]
    model: str
    version: str


def make_tagging(kinds: Sequence[str], model: str) -> Tagging:
    """Checks that the tags can be had.

    Args:
        kinds: of `KINDS`; their order makes no difference.
        model: see `Tagging`.

    Raises:
        InputError: a kind is unknown, spaCy or the model is not installed, or the
            model cannot tell one of the kinds.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"--tags: {kind} is none of {', '.join(KINDS)}")
    if not kinds:
        return Tagging((), "", "")
    kinds = tuple(kind for kind in KINDS if kind in kinds)
    meta = load_model(model, kinds).meta
    version = f"{meta['lang']}_{meta['name']} {meta['version']}"
    return Tagging(kinds, model, version)


@functools.lru_cache(maxsize=1)
def load_model(model: str, kinds: tuple[str, ...]) -> Any:
    """Loads a spaCy pipeline with the components that the kinds need.

    Raises:
        InputError: spaCy or the model is not installed, or lacks a component.
    """
    try:
        import spacy
    except ImportError as error:
        raise InputError("--tags needs spaCy: pip install 'spacy>=3.8'") from error
    try:
        pipeline = spacy.load(model)
    except OSError as error:
        raise InputError(
            f"--spacy_model={model} is not installed; spaCy's own are had by, for"
            f" example, python -m spacy download {DEFAULT_MODEL}"
        ) from error
    for kind in kinds:
        if lacking := sorted(_NEEDED[kind] - set(pipeline.pipe_names)):
            raise InputError(
                f"--tags={kind}: --spacy_model={model} has no {', '.join(lacking)}"
            )
    if "noun_phrases" in kinds and pipeline.vocab.get_noun_chunks is None:
        raise InputError(
            f"--tags=noun_phrases: spaCy has no rule for noun phrases in the language"
            f" of --spacy_model={model}"
        )
    wanted = set().union(*(_NEEDED[kind] | _HELPERS[kind] for kind in kinds))
    # A component may listen to one that makes vectors for several.
    if any(_listens(pipeline, name) for name in wanted & set(pipeline.pipe_names)):
        wanted |= _VECTORS
    for name in pipeline.pipe_names:
        if name not in wanted:
            pipeline.disable_pipe(name)
    pipeline.max_length = 2 * _LONGEST_TEXT
    return pipeline


def _listens(pipeline: Any, name: str) -> bool:
    model = getattr(pipeline.get_pipe(name), "model", None)
    return model is not None and any("listener" in node.name for node in model.walk())


def find_tags(lines: Sequence[str], tagging: Tagging) -> list[dict[str, Ranges]]:
    """Finds the tags of each line.

    Args:
        lines: text with its capitals and accents, which taggers go by.
        tagging: what to find.

    Returns:
        For each line and kind the ranges of characters, rising, none overlapping.
    """
    pipeline = load_model(tagging.model, tagging.kinds)
    pieces = [
        (number, begin, line[begin:end])
        for number, line in enumerate(lines)
        for begin, end in _cut(line)
    ]
    found: list[dict[str, Ranges]] = [
        {kind: [] for kind in tagging.kinds} for _ in lines
    ]
    texts = (text for _, _, text in pieces)
    documents = pipeline.pipe(texts, batch_size=_TEXTS_AT_A_TIME)
    for (number, begin, _), document in zip(pieces, documents, strict=True):
        for kind in tagging.kinds:
            spans = document.ents if kind == "entities" else document.noun_chunks
            found[number][kind] += [
                (begin + span.start_char, begin + span.end_char) for span in spans
            ]
    return found


def _cut(line: str) -> Iterator[tuple[int, int]]:
    """Cuts a line at spaces into texts that spaCy takes."""
    begin = 0
    while begin < len(line):
        end = begin + _LONGEST_TEXT
        if end < len(line):
            space = line.rfind(" ", begin + 1, end)
            end = space if space > 0 else end
        yield begin, end
        begin = end


def to_tokens(ranges: Ranges, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Translates ranges of characters to the tokens that they touch.

    spaCy may end a tag inside a token ("°C"): the whole token belongs to it then.

    Args:
        ranges: of characters, rising, not overlapping.
        begins: int [T], the first character of each token, rising.
        ends: int [T], one past its last character, rising.

    Returns:
        int64 [N, 2], first token and one past the last, rising, not overlapping; a
        range without a token is left out, and one that shares a token with the one
        before it, too.
    """
    if not ranges:
        return np.zeros((0, 2), np.int64)
    first_character, last_character = np.array(ranges).T
    first = np.searchsorted(ends, first_character, side="right")
    last = np.searchsorted(begins, last_character, side="left")
    kept: list[tuple[int, int]] = []
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        if end > begin and (not kept or begin >= kept[-1][1]):
            kept.append((begin, end))
    return np.array(kept, np.int64).reshape(-1, 2)
