"""Random text files, and plain readings of whole ones to compare with."""

import random
import re

from spanbert_jax.corpus.cleaning import Dirt, clean_line, decode
from spanbert_jax.corpus.lines import Stretch

_PIECES = [
    b"a",
    b"bc ",
    b" ",
    "ü".encode(),
    "中".encode(),
    b"\xff",
    b"\r\n",
    b"\n",
    b"\n\n",
]


def split_lines(data: bytes, cell: int) -> list[Stretch]:
    """Every line, or part of one, by the rule as it is stated: cell by cell."""
    ends = {}  # Where a line ends: whether at a line feed.
    for position, byte in enumerate(data):
        if byte == 0x0A:
            ends[position + 1] = True
    for begin in range(0, len(data) - cell + 1, cell):
        content = data[begin : begin + cell]
        if b"\n" in content:
            continue
        character = re.search(rb"[\xc0-\xff][\x80-\xbf]{0,3}\Z", content)
        if b" " in content:
            ends[begin + content.rindex(b" ") + 1] = False
        elif character and character.start():
            ends[begin + character.start()] = False
        else:
            ends[begin + cell] = False
    lines, begin, begins = [], 0, True
    for end in sorted(ends):
        lines.append(Stretch(begin, data[begin:end], begins, ends[end]))
        begin, begins = end, ends[end]
    if begin < len(data):
        lines.append(Stretch(begin, data[begin:], begins))
    return lines


def random_data(rng: random.Random, longest: int = 150) -> bytes:
    """Bytes with many, few or no line ends and blanks."""
    some = rng.choices(_PIECES, k=rng.randrange(1, 8))
    return b"".join(rng.choices(some, k=rng.randrange(longest)))


def read_plainly(data: bytes, cell: int) -> tuple[list[tuple[int, list[str]]], Dirt]:
    """Reads a text by the rules as they are stated, line by line.

    Returns:
        Of each document where it begins and its lines; and all dirt.
    """
    documents, total = [], Dirt()
    growing, replaced, previous, blank_end = None, False, 0, -1
    for line in split_lines(data, cell):
        dirt = Dirt()
        raw = line.raw
        if raw.endswith(b"\n"):
            raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        text = clean_line(decode(raw, "replace", dirt, ""), "none", dirt)
        total += dirt
        cells = line.position // cell, previous // cell
        previous = line.position
        if not text:
            if line.begins and line.ends:
                growing, blank_end = None, line.position + len(line.raw) - 1
            continue
        # The cell before this line's has no end of a blank line: the document is long.
        if growing and cells[0] > cells[1] and blank_end // cell < cells[0] - 1:
            total.cut_documents += 1
            growing = None
        if growing is None:
            growing, replaced = [], False
            documents.append((line.position, growing))
        growing.append(text)
        total.replaced_documents += dirt.replaced_characters > 0 and not replaced
        replaced |= dirt.replaced_characters > 0
        total.cut_lines += not line.ends
    return documents, total
