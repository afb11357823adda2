"""What text there is to read, and how it is cut so that many processes can read it."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pydoc_data import topics
from typing import Literal

from spanbert_jax.corpus import tables
from spanbert_jax.corpus.cleaning import Invalid, NormalForm
from spanbert_jax.corpus.files import FileInfo, find_files, is_packed
from spanbert_jax.errors import InputError

Format = Literal["text", "jsonl", "parquet", "tfds", "embedded"]
FORMATS: tuple[Format, ...] = ("text", "jsonl", "parquet", "tfds", "embedded")

_EMBEDDED_NAME = "pydoc_data.topics"
_TFDS_PREFIX = "tfds:"
# Names that leave no doubt about the format.
_SUFFIXES: dict[str, Format] = {
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Reading:
    """How to read. All but `data_dir` is part of a corpus's identity.

    Attributes:
        format: "text" (blank lines between documents), "jsonl" (an object a line),
            "parquet" (a row a document), "tfds" (an example a document), "embedded".
        text_field: JSON Lines, Parquet, TFDS: what holds the text.
        invalid: what to do with bytes that are not UTF-8: leave out, or refuse.
        unicode: the normal form of every line.
        tfds_split: TFDS: which split.
        data_dir: TFDS: where its data are; None for its own default.
    """

    format: Format = "text"
    text_field: str = "text"
    invalid: Invalid = "replace"
    unicode: NormalForm = "none"
    tfds_split: str = "train"
    data_dir: str | None = None


@dataclass(frozen=True)
class Source:
    """A file, a split of a TFDS data set, or the embedded text.

    Attributes:
        name: a file's base name; "wikipedia/20230601.en/train". Holds no path.
        size: bytes on disk.
        format: one of FORMATS.
        location: an absolute path or a URL; TFDS: the name with version and split;
            empty for the embedded text.
        stamp: another one when the source has changed.
    """

    name: str
    size: int
    format: Format
    location: str
    stamp: str


@dataclass(frozen=True)
class Piece:
    """A part of a source, which one process reads from end to end.

    Attributes:
        source: its number in the list of sources.
        start: where it begins, in bytes of an uncompressed text or JSON Lines file, in
            row groups of Parquet, in examples of TFDS. 0 for what cannot be cut.
        stop: where it ends; the size for what cannot be cut.
        size: its share of the source's bytes.
    """

    source: int
    start: int
    stop: int
    size: int


def find_sources(patterns: Sequence[str], reading: Reading) -> list[Source]:
    """Lists what patterns name, each source once, in the order of their locations.

    Args:
        patterns: paths, URLs that fsspec knows, globs of both ("**" goes into
            directories), or several of them joined by commas; "tfds:NAME" for a data
            set of TFDS, where `reading.format` is "tfds" also NAME alone. None for the
            embedded text.
        reading: how to read.

    Raises:
        InputError: a pattern names nothing, or a name contradicts the format.
    """
    if reading.format == "embedded":
        text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        stamp = hashlib.sha256(text).hexdigest()
        return [Source(_EMBEDDED_NAME, len(text), "embedded", "", stamp)]
    found = {}
    for pattern in _split_patterns(patterns):
        if pattern.startswith(_TFDS_PREFIX) or reading.format == "tfds":
            name = pattern.removeprefix(_TFDS_PREFIX)
            split = tables.find_split(name, reading.tfds_split, reading.data_dir)
            source = Source(split.name, split.size, "tfds", split.location, split.stamp)
            found[source.location] = source
        else:
            for file in find_files(pattern):
                found[file.location] = _from_file(file, reading.format)
    return [found[location] for location in sorted(found)]


def cut_into_parts(
    sources: Sequence[Source], part_size: int, reading: Reading
) -> list[tuple[Piece, ...]]:
    """Cuts sources into pieces and groups these, in the order of the text.

    Every byte, row group and example is in exactly one piece, every source has at least
    one. Nothing but compressed files and single row groups makes a part larger than
    `part_size`.

    Args:
        sources: what there is.
        part_size: bytes of a part, about.
        reading: how to read.

    Raises:
        InputError: a Parquet file or a TFDS data set cannot be read, or has no such
            text field.
    """
    parts: list[list[Piece]] = []
    filled = 0
    for number, source in enumerate(sources):
        for piece in _cut(number, source, part_size, reading):
            if not parts or filled + piece.size > part_size:
                parts.append([])
                filled = 0
            parts[-1].append(piece)
            filled += piece.size
    return [tuple(part) for part in parts]


def _split_patterns(patterns: Sequence[str]) -> list[str]:
    parts = []
    for pattern in patterns:
        # A file may have a comma in its name.
        known = [pattern] if os.path.exists(pattern) else pattern.split(",")
        parts += [part.strip() for part in known if part.strip()]
    if not parts:
        raise InputError("--input is missing; it names the text files to read")
    return parts


def _from_file(file: FileInfo, format_: Format) -> Source:
    stem, suffix = os.path.splitext(file.name)
    if is_packed(file.name):
        suffix = os.path.splitext(stem)[1]
    implied = _SUFFIXES.get(suffix.lower(), format_)
    if implied != format_:
        raise InputError(
            f"--format={format_} contradicts the name of {file.location}; use"
            f" --format={implied}, or name the file otherwise"
        )
    return Source(file.name, file.size, format_, file.location, file.stamp)


def _cut(
    number: int, source: Source, part_size: int, reading: Reading
) -> Iterable[Piece]:
    match source.format:
        case "parquet":
            sizes = tables.row_group_sizes(source.location, reading.text_field)
            return _group(number, source.size, sizes, part_size)
        case "tfds":
            total = tables.count_examples(
                source.location, reading.text_field, reading.data_dir
            )
            return _slice(number, source.size, total, part_size)
        case "text" | "jsonl" if not is_packed(source.location):
            return _slice(number, source.size, source.size, part_size)
        case _:
            return [Piece(number, 0, source.size, source.size)]


def _slice(number: int, size: int, total: int, part_size: int) -> list[Piece]:
    """Cuts `total` units into equal pieces of at most about `part_size` bytes."""
    count = max(1, min(-(-size // part_size), total))
    edges = [total * i // count for i in range(count + 1)]
    shares = [size * i // count for i in range(count + 1)]
    return [
        Piece(number, edges[i], edges[i + 1], shares[i + 1] - shares[i])
        for i in range(count)
    ]


def _group(
    number: int, size: int, weights: Sequence[int], part_size: int
) -> list[Piece]:
    """Puts row groups together, each with its share of the file by its weight."""
    total = max(sum(weights), 1)
    edges, shares, weight = [0], [0], 0
    for group, more in enumerate(weights):
        share = size * (weight + more) // total
        if group > edges[-1] and share - shares[-1] > part_size:
            edges.append(group)
            shares.append(size * weight // total)
        weight += more
    edges.append(len(weights))
    shares.append(size)
    return [
        Piece(number, edges[i], edges[i + 1], shares[i + 1] - shares[i])
        for i in range(len(edges) - 1)
    ]
