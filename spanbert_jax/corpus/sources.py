"""Where text comes from: files, or what Python itself carries, as documents.

A document is a list of lines, each a sentence or a paragraph: stripped and not blank.
"""

import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import BinaryIO, Literal

from spanbert_jax.errors import InputError

Format = Literal["text", "jsonl", "embedded"]
FORMATS: tuple[Format, ...] = ("text", "jsonl", "embedded")

_EMBEDDED_NAME = "pydoc_data.topics"
_REPLACEMENT = "\ufffd"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """One file, or the embedded text.

    Attributes:
        name: the file's base name.
        size: bytes on disk.
        format: one of FORMATS.
        path: None for the embedded text.
    """

    name: str
    size: int
    format: Format
    path: Path | None


@dataclass
class Replaced:
    """What was not UTF-8 and came out as U+FFFD, which tokenizers leave out."""

    characters: int = 0
    documents: int = 0


def find_sources(patterns: Sequence[str], file_format: Format) -> list[Source]:
    """Lists the files that patterns name, each once, in the order of their paths.

    Args:
        patterns: paths or globs ("**" goes into directories), or several of them
            joined by commas; none for the embedded text.
        file_format: how to read the files; a name that ends in ".gz" is unpacked.

    Raises:
        InputError: a pattern names no file.
    """
    if file_format == "embedded":
        size = sum(len(text.encode()) for text in topics.topics.values())
        return [Source(_EMBEDDED_NAME, size, "embedded", None)]
    paths: set[Path] = set()
    for pattern in _split_patterns(patterns):
        expanded = Path(pattern).expanduser()
        # A file may be called "a[1].txt": the name itself goes before the glob.
        found = (
            [expanded]
            if expanded.exists()
            else [Path(name) for name in glob.glob(str(expanded), recursive=True)]
        )
        files = [path for path in found if not path.is_dir()]
        if not files:
            reason = "is a directory; name its files" if found else "matches no file"
            raise InputError(f"--input={pattern} {reason}")
        paths.update(files)
    return [
        Source(path.name, path.stat().st_size, file_format, path)
        for path in sorted(paths)
    ]


def read_documents(
    source: Source, text_field: str, replaced: Replaced
) -> Iterator[list[str]]:
    """Yields a source's documents, one at a time.

    Args:
        source: what to read.
        text_field: JSON Lines only: the key of the text.
        replaced: counts what had to be replaced, as the reading goes on.

    Raises:
        InputError: the file cannot be read, or a line of JSON is not an object with
            a string under `text_field`; the message has the file and the line.
    """
    if source.format == "embedded":
        yield from _read_embedded()
        return
    reader = (
        _read_text(source, replaced)
        if source.format == "text"
        else _read_jsonl(source, text_field, replaced)
    )
    before = replaced.characters
    for document in reader:
        replaced.documents += replaced.characters > before
        before = replaced.characters
        yield document


def _split_patterns(patterns: Sequence[str]) -> list[str]:
    parts = [part.strip() for pattern in patterns for part in pattern.split(",")]
    parts = [part for part in parts if part]
    if not parts:
        raise InputError("--input is missing; it names the text files to read")
    return parts


def _read_lines(source: Source, replaced: Replaced) -> Iterator[str]:
    """Yields lines, stripped; a binary file ends them at line feeds and only there."""
    assert source.path is not None
    try:
        with _open(source.path) as file:
            for number, raw in enumerate(file):
                text = raw.removeprefix(_BYTE_ORDER_MARK) if number == 0 else raw
                yield _decode(text, replaced).strip()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"--input: cannot read {source.path}: {error}") from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"))
    return path.open("rb")


def _decode(raw: bytes, replaced: Replaced) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        already = raw.count(_REPLACEMENT.encode())
        replaced.characters += text.count(_REPLACEMENT) - already
        return text


def _read_text(source: Source, replaced: Replaced) -> Iterator[list[str]]:
    document: list[str] = []
    for line in _read_lines(source, replaced):
        if line:
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


def _read_jsonl(
    source: Source, text_field: str, replaced: Replaced
) -> Iterator[list[str]]:
    for number, line in enumerate(_read_lines(source, replaced), start=1):
        if not line:
            continue
        text = _json_text(line, text_field, f"{source.path}, line {number}")
        text, lone = _LONE_SURROGATE.subn(_REPLACEMENT, text)
        replaced.characters += lone
        if document := _strip_lines(text.split("\n")):
            yield document


def _json_text(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: not a JSON object but {type(record).__name__}")
    if text_field not in record:
        raise InputError(
            f"{where}: no field --text_field={text_field}; there are"
            f" {', '.join(map(str, record)) or 'none'}"
        )
    if not isinstance(record[text_field], str):
        kind = type(record[text_field]).__name__
        raise InputError(f"{where}: --text_field={text_field} holds {kind}, not a text")
    return record[text_field]


def _strip_lines(lines: Sequence[str]) -> list[str]:
    return [stripped for line in lines if (stripped := line.strip())]


def _read_embedded() -> Iterator[list[str]]:
    """Yields the topics of Python's own help: one document each, a paragraph a line."""
    for name in sorted(topics.topics):
        paragraphs = re.split(r"\n\s*\n", topics.topics[name])
        if document := _strip_lines([_join(paragraph) for paragraph in paragraphs]):
            yield document


def _join(paragraph: str) -> str:
    """Undoes hard wrapping; leaves out underlines and the frames of tables."""
    joined = ""
    for line in _strip_lines(paragraph.split("\n")):
        if not any(character.isalnum() for character in line):
            continue
        # The text was wrapped at hyphens too: "pseudo-" and "compiled" are one word.
        cut_word = len(joined) > 1 and joined[-1] == "-" and joined[-2].isalpha()
        joined += line if cut_word or not joined else " " + line
    return joined
