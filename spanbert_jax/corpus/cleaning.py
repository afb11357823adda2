r"""What becomes of the dirt in a text: one policy for every format, and counts of it.

A line ends at a line feed, or at a carriage return with a line feed, and nowhere else.
Within a line:

| what                                     | becomes   | counted as             |
|------------------------------------------|-----------|------------------------|
| bytes that are not UTF-8                 | nothing   | replaced_characters    |
| U+FFFD that stands in the text           | nothing   | replacement_characters |
| U+FEFF, at a file's start or elsewhere   | nothing   | byte_order_marks       |
| half a surrogate pair (JSON's "\ud800")  | nothing   | lone_surrogates        |
| NUL and other control characters but tab | nothing   | control_characters     |
| a carriage return                        | a space   | carriage_returns       |
| VT, FF, FS to US, NEL, U+2028, U+2029    | a space   | separators             |

Where nothing is left the neighbours join, as in BERT's own cleaning. Then the line gets
its normal form, if one is asked for, and loses the white space at its ends; a line of
which nothing is left is blank. What a line becomes depends on that line only, so a text
may be cut between any two lines.
"""

import dataclasses
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal, Self

from spanbert_jax.errors import InputError

Invalid = Literal["replace", "strict"]
NormalForm = Literal["none", "nfc", "nfkc"]

_REPLACEMENT = "\ufffd"
# Category Cc but tab and line feed, without what separates.
_CONTROLS = "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"
_SEPARATORS = "\x0b\x0c\x1c-\x1f\x85\u2028\u2029"
_RULES = (
    ("lone_surrogates", re.compile("[\ud800-\udfff]"), ""),
    ("byte_order_marks", re.compile("\ufeff"), ""),
    ("replacement_characters", re.compile(_REPLACEMENT), ""),
    ("control_characters", re.compile(f"[{_CONTROLS}]"), ""),
    ("carriage_returns", re.compile("\r"), " "),
    ("separators", re.compile(f"[{_SEPARATORS}]"), " "),
)
_DIRTY = re.compile(f"[\r{_CONTROLS}{_SEPARATORS}\ufeff{_REPLACEMENT}\ud800-\udfff]")
# What Python's "surrogateescape" makes of bytes that are not UTF-8.
_ESCAPED = re.compile("[\udc80-\udcff]")
# The dirty set once more, for searches that are several times faster than that of a
# regular expression: its single bytes, and all else.
_DIRTY_BYTES = bytes(b for b in range(128) if _DIRTY.match(chr(b)))
_DIRTY_WIDE = [
    chr(c)
    for c in (*range(0x80, 0xA0), 0x2028, 0x2029, 0xFEFF, 0xFFFD)
    if _DIRTY.match(chr(c))
]


@dataclass
class Dirt:
    """How much of what was found; the sum of two is taken field by field.

    Attributes:
        byte_order_marks: U+FEFF, left out.
        replaced_characters: what a decoder puts U+FFFD for, left out.
        replaced_documents: documents that had such bytes.
        replacement_characters: U+FFFD that stood in the text already, left out.
        lone_surrogates: left out; only JSON can spell them.
        control_characters: left out.
        separators: exotic ends of lines and pages, now spaces.
        carriage_returns: without a line feed, now spaces.
        empty_records: JSON, Parquet and TFDS records whose text is blank.
        null_texts: JSON and Parquet records whose text is null.
        cut_lines: places where a line was too long.
        cut_documents: places where a document was too long.
    """

    byte_order_marks: int = 0
    replaced_characters: int = 0
    replaced_documents: int = 0
    replacement_characters: int = 0
    lone_surrogates: int = 0
    control_characters: int = 0
    separators: int = 0
    carriage_returns: int = 0
    empty_records: int = 0
    null_texts: int = 0
    cut_lines: int = 0
    cut_documents: int = 0

    def __iadd__(self, other: "Dirt") -> Self:
        for name, count in vars(other).items():
            if count:
                setattr(self, name, getattr(self, name) + count)
        return self

    def __add__(self, other: "Dirt") -> "Dirt":
        total = dataclasses.replace(self)
        total += other
        return total


def decode(raw: bytes, invalid: Invalid, dirt: Dirt, where: str, start: int = 0) -> str:
    """Reads UTF-8; never fails on the bytes of another encoding unless told to.

    Args:
        raw: one line or several, whole.
        invalid: "replace" leaves out what is not UTF-8 and counts it.
        dirt: to count in.
        where: the file, for the message.
        start: the place of raw[0] in the uncompressed file, for the message.

    Raises:
        InputError: `invalid` is "strict" and a byte is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        if invalid == "strict":
            raise InputError(
                f"{where}: byte {start + error.start} ({raw[error.start]:#04x}) is not"
                " UTF-8, and --invalid=strict refuses it; --invalid=replace leaves such"
                " bytes out"
            ) from None
    text = raw.decode(errors="replace")
    already = raw.count(_REPLACEMENT.encode())
    dirt.replaced_characters += text.count(_REPLACEMENT) - already
    dirt.replacement_characters += already
    return text.replace(_REPLACEMENT, "")


def clean_line(text: str, unicode: NormalForm, dirt: Dirt) -> str:
    """Applies the policy to one line, which has lost its end; blank becomes empty.

    Args:
        text: without a line feed.
        unicode: the normal form.
        dirt: to count in.
    """
    return normalise(remove_dirt(text, dirt), unicode).strip()


def clean_record(text: str, unicode: NormalForm, dirt: Dirt) -> list[str]:
    """Returns the lines of a record's text, clean and without the blank ones.

    Args:
        text: any.
        unicode: the normal form.
        dirt: to count in.
    """
    text = text.replace("\r\n", "\n")
    try:
        clean = _is_clean(text, text.encode())
    except UnicodeEncodeError:  # Half a surrogate pair has no UTF-8.
        clean = False
    if clean:
        lines = _strip_lines(text, unicode)
    else:
        lines = [clean_line(line, unicode, dirt) for line in text.split("\n")]
    return [line for line in lines if line]


def clean_lines(
    raw: bytes, invalid: Invalid, unicode: NormalForm, where: str, start: int
) -> tuple[list[str], dict[int, Dirt]]:
    """Decodes and cleans whole lines of a file, all at once where nothing is dirty.

    Args:
        raw: whole lines; the last one may lack its end.
        invalid: what to do with bytes that are not UTF-8.
        unicode: the normal form.
        where: the file, for messages.
        start: the place of raw[0] in the uncompressed file, for messages.

    Returns:
        The lines, blank ones empty; and what the dirty ones had, by their numbers.

    Raises:
        InputError: `invalid` is "strict" and a byte is not UTF-8.
    """
    plain = raw.replace(b"\r\n", b"\n").removesuffix(b"\n")
    try:
        text = plain.decode()
    except UnicodeDecodeError:
        if invalid == "strict":
            decode(raw, invalid, Dirt(), where, start)
        text = plain.decode(errors="surrogateescape")
    else:
        if _is_clean(text, plain):
            return _strip_lines(text, unicode), {}
    lines, dirts = [], {}
    for number, line in enumerate(text.split("\n")):
        if _DIRTY.search(line):
            dirts[number] = dirt = Dirt()
            if _ESCAPED.search(line):
                raw_line = line.encode(errors="surrogateescape")
                line = decode(raw_line, invalid, dirt, where)
            line = remove_dirt(line, dirt)
        lines.append(normalise(line, unicode).strip())
    return lines, dirts


def remove_dirt(text: str, dirt: Dirt) -> str:
    """Applies the table to a text, character by character.

    Args:
        text: of any kind; line feeds stay.
        dirt: to count in.
    """
    if not _DIRTY.search(text):
        return text
    for name, pattern, instead in _RULES:
        text, count = pattern.subn(instead, text)
        if count:
            setattr(dirt, name, getattr(dirt, name) + count)
    return text


def _is_clean(text: str, raw: bytes) -> bool:
    """Tells whether a text, and the same in UTF-8, is free of dirt."""
    if len(raw.translate(None, _DIRTY_BYTES)) != len(raw):
        return False
    return text.isascii() or not any(wide in text for wide in _DIRTY_WIDE)


def _strip_lines(text: str, unicode: NormalForm) -> list[str]:
    # No normal form makes or joins anything across a line feed.
    return list(map(str.strip, normalise(text, unicode).split("\n")))


def normalise(text: str, unicode: NormalForm) -> str:
    """Brings a text into a normal form."""
    if unicode == "none" or text.isascii():
        return text
    return unicodedata.normalize(unicode.upper(), text)
