"""Cleaned text: as a corpus would have it, and where its characters come from."""

import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from spanbert_jax.corpus.cleaning import Dirt, NormalForm, normalise, remove_dirt


class Cleaned(NamedTuple):
    """A text that was cleaned.

    Attributes:
        text: of n characters.
        begin: int64 [n], each one's first character in the text as it was given.
        end: int64 [n], one beyond its last character there.
    """

    text: str
    begin: np.ndarray
    end: np.ndarray

    def cut(self, begin: int, end: int) -> "Cleaned":
        """Part of it; places stay those of the whole."""
        return Cleaned(*(values[begin:end] for values in self))

    def shifted(self, places: int) -> "Cleaned":
        """The same of a longer text, in which so many characters precede this one."""
        return Cleaned(self.text, self.begin + places, self.end + places)


def clean(text: str, form: NormalForm) -> Cleaned:
    """Does to a text what is done to the lines of a corpus.

    Dirt is dealt with as `corpus.cleaning` says, then the text gets its normal form. A
    line feed becomes a space.

    Args:
        text: any string.
        form: the normal form that the tokenizer's text was read in.

    Returns:
        The text, white space at its ends included.
    """
    spaced = text.replace("\n", " ")
    if normalise(remove_dirt(spaced, Dirt()), form) == spaced:
        places = np.arange(len(text))
        return Cleaned(spaced, places, places + 1)
    pure = _replaced((one, remove_dirt(one, Dirt())) for one in spaced)
    parts = _parts(pure.text, form)
    normal = _replaced((part, normalise(part, form)) for part in parts)
    return Cleaned(normal.text, pure.begin[normal.begin], pure.end[normal.end - 1])


def _replaced(parts: Iterable[tuple[str, str]]) -> Cleaned:
    """What becomes of a text whose parts, one after another, are replaced by others."""
    texts, begins, ends, place = [], [], [], 0
    for part, instead in parts:
        texts.append(instead)
        begins += [place] * len(instead)
        place += len(part)
        ends += [place] * len(instead)
    return Cleaned("".join(texts), np.array(begins, int), np.array(ends, int))


def _parts(text: str, form: NormalForm) -> Iterator[str]:
    """Yields parts of a text that a normal form changes each for itself."""
    part = ""
    for character in text:
        if part and _begins_anew(part, character, form):
            yield part
            part = ""
        part += character
    if part:
        yield part


def _begins_anew(part: str, character: str, form: NormalForm) -> bool:
    # Marks are neither ordered nor composed across a character of combining class 0
    # that does not itself compose with the one before it.
    first = unicodedata.normalize("NFKD", character)[0]
    if unicodedata.combining(first):
        return False
    apart = normalise(part, form) + normalise(character, form)
    return normalise(part + character, form) == apart
