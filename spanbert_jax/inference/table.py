"""The table: what was filled into a text, for people to read."""

import itertools
from collections.abc import Iterator, Sequence

from spanbert_jax.data.describe import Paint, columns, printable, wrap
from spanbert_jax.inference.filling import (
    NO_HEAD,
    Filled,
    Filling,
    Guess,
    MaskedSpan,
)

# A score, and the text that it is of.
Cell = tuple[str, str]

_LABEL_COLUMNS = 12
_SCORE_COLUMNS = 10


def describe_filled(filled: Filled, width: int, paint: Paint) -> Iterator[str]:
    """Yields lines: the text, then for each span what each head predicts.

    P is the probability of a token for one mask, log P the natural logarithm of that of
    all tokens together.

    Args:
        filled: the text and the predictions.
        width: columns to fill, at least 40.
        paint: gives colours.
    """
    words = _pieces(printable(filled.text), width - 2)
    for line in wrap(words, width, "", "  ", " "):
        yield paint(line, "title")
    for number, span in enumerate(filled.spans, start=1):
        yield from _describe_span(number, span, width, paint)


def _describe_span(
    number: int, span: MaskedSpan, width: int, paint: Paint
) -> Iterator[str]:
    has_head = span.no_sbo != NO_HEAD
    heads = [[("", "MLM head")], [("", "SBO head")] if has_head else []]
    yield ""
    yield from _rows(f"span {number}", heads, width, paint)
    for mask in span.masks:
        cells = [_guesses(mask.mlm), _guesses(mask.sbo or ())]
        yield from _rows(f"P at {mask.position:,}", cells, width, paint)
    if len(span.masks) > 1:
        cells = [_fillings(span.mlm), _fillings(span.sbo or ())]
        yield from _rows("log P", cells, width, paint)
    if span.no_sbo and has_head:
        indent = " " * _LABEL_COLUMNS
        reason = f"no SBO prediction for this span: {span.no_sbo}".split()
        yield from wrap(reason, width, indent, indent, " ")


def _guesses(guesses: Sequence[Guess]) -> list[Cell]:
    return [(f"{one.probability:.3g}", one.token) for one in guesses]


def _fillings(fillings: Sequence[Filling]) -> list[Cell]:
    return [(f"{one.log_probability:.3f}", one.text) for one in fillings]


def _rows(
    label: str, heads: Sequence[Sequence[Cell]], width: int, paint: Paint
) -> Iterator[str]:
    """Yields lines: the label, then the cells of each head in a column of its own."""
    size = (width - _LABEL_COLUMNS) // len(heads)
    text = paint(f"  {label}", "faint")
    for cells in itertools.zip_longest(*heads, fillvalue=("", "")):
        columns_of = [list(_cell(*cell, size - 2)) for cell in cells]
        for lines in itertools.zip_longest(*columns_of, fillvalue=""):
            line = _padded(text, _LABEL_COLUMNS)
            line += "".join(_padded(part, size) for part in lines)
            yield line.rstrip()
            text = ""


def _cell(score: str, text: str, size: int) -> Iterator[str]:
    words = _pieces(printable(text), size - _SCORE_COLUMNS)
    head = f"{score:<{_SCORE_COLUMNS}}"
    return wrap(words, size, head, " " * _SCORE_COLUMNS, " ")


def _pieces(text: str, size: int) -> list[str]:
    """The words of a text, longer ones cut."""
    pieces = []
    for word in text.split(" "):
        piece = ""
        for character in word:
            if columns(piece + character) > size:
                pieces.append(piece)
                piece = ""
            piece += character
        pieces.append(piece)
    return pieces


def _padded(text: str, size: int) -> str:
    return text + " " * (size - columns(text))
