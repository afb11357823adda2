"""The documents of a piece of a source, in the order of the text.

However a source is cut, its pieces together give the same documents and the same counts
of dirt: a document or a record belongs to the piece in which its first byte lies, and a
blank line to the piece in which it begins.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pydoc_data import topics

from spanbert_jax.corpus import tables
from spanbert_jax.corpus.cleaning import Dirt, clean_lines, clean_record, decode
from spanbert_jax.corpus.files import File, is_packed
from spanbert_jax.corpus.lines import (
    CELL_BYTES,
    Stretch,
    find_start,
    read_stretches,
)
from spanbert_jax.corpus.sources import Piece, Reading, Source
from spanbert_jax.errors import InputError

# Lines, each a sentence or a paragraph, clean and not blank.
Document = list[str]

_LARGEST_RECORD = 1 << 30
_SKIP_BYTES = 1 << 20
_MAGIC_BYTES = 512
# How the files begin that people take for text, and what to do about it.
_MAGIC = tuple(
    (re.compile(pattern, re.DOTALL), advice)
    for pattern, advice in (
        (rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff", "is UTF-32; convert it to UTF-8"),
        (rb"\xff\xfe|\xfe\xff", "is UTF-16; convert it to UTF-8"),
        (rb"PAR1", "is a Parquet file; use --format=parquet"),
        (rb"\x1f\x8b", "is packed by gzip; its name must end in .gz"),
        (rb"\x28\xb5\x2f\xfd", "is packed by zstd; its name must end in .zst"),
        (rb"BZh[1-9]1AY&SY", "is packed by bzip2; its name must end in .bz2"),
        (rb"\xfd7zXZ\x00", "is packed by xz; its name must end in .xz"),
        (rb"PK\x03\x04", "is a ZIP archive; unpack it"),
        (rb".{257}ustar", "is a tar archive; unpack it"),
    )
)


def read_documents(
    source: Source, piece: Piece, reading: Reading, dirt: Dirt
) -> Iterator[Document]:
    """Yields the documents of a piece, one at a time.

    Memory is bounded: of a text, a line is held up to twice `lines.CELL_BYTES` and a
    document about three times that; of JSON Lines and TFDS, a record; of Parquet, a row
    group's column as it is packed, and some hundred rows.

    Args:
        source: what to read.
        piece: which part of it.
        reading: how.
        dirt: to count in, as the reading goes on.

    Raises:
        InputError: the source cannot be read, or a record is not as `reading` says; the
            message has the file and the place.
    """
    match source.format:
        case "text":
            with File(source.location) as file:
                yield from read_text(source, file, piece, reading, dirt)
        case "jsonl":
            with File(source.location) as file:
                texts = read_json(source, file, piece, reading, dirt)
                yield from _documents(texts, reading, dirt)
        case "parquet":
            rows = tables.read_rows(
                source.location, piece.start, piece.stop, reading.text_field
            )
            texts = _decode_all(source, piece, rows, reading, dirt)
            yield from _documents(texts, reading, dirt)
        case "tfds":
            examples = tables.read_examples(
                source.location,
                piece.start,
                piece.stop,
                reading.text_field,
                reading.data_dir,
            )
            texts = _decode_all(source, piece, examples, reading, dirt)
            yield from _documents(texts, reading, dirt)
        case "embedded":
            yield from _documents(_read_embedded(), reading, dirt)


def read_text(
    source: Source,
    file: File,
    piece: Piece,
    reading: Reading,
    dirt: Dirt,
    cell: int = CELL_BYTES,
) -> Iterator[Document]:
    """Yields a text file's documents: what stands between blank lines.

    Args:
        source: the file.
        file: open, at its beginning.
        piece: which part of it.
        reading: how.
        dirt: to count in.
        cell: bytes; longer lines and documents are cut.

    Raises:
        InputError: the file cannot be read, or is no text in UTF-8.
    """
    start, stop = _extent(source, piece)
    if start == 0:
        _check_magic(source, file)
    position, begins = find_start(file, start, cell)
    assembly = _Assembly(start, stop, position, cell, dirt)
    for stretch in read_stretches(file, position, begins, (start, stop), cell):
        if not assembly.wants(stretch):
            return
        lines, dirts = clean_lines(
            stretch.raw,
            reading.invalid,
            reading.unicode,
            source.location,
            stretch.position,
        )
        yield from assembly.add(stretch, lines, dirts)
    yield from assembly.end()


@dataclass
class _Growing:
    """A document of which the end was not yet read.

    Attributes:
        owned: it belongs to the piece; else nothing of it is kept.
        lines: so far.
        replaced: it had bytes that were not UTF-8.
    """

    owned: bool
    lines: Document = field(default_factory=list)
    replaced: bool = False


class _Assembly:
    """Makes documents of a text's lines, those documents that begin in a piece.

    Of a cell (see `lines`) in which no blank line ends it is known, without what comes
    before, that the document in it is too long; it ends where the next cell's first
    line begins. Hence a document shorter than a cell is never cut, and none is longer
    than three.

    Args:
        start: where the piece begins.
        stop: where it ends.
        position: of the first line to come.
        cell: bytes.
        dirt: to count in.
    """

    def __init__(
        self, start: int, stop: int, position: int, cell: int, dirt: Dirt
    ) -> None:
        self._start, self._stop, self._cell, self._dirt = start, stop, cell, dirt
        self._growing: _Growing | None = None
        # The cells in which the last blank line ended and the last stretch began.
        self._blank_cell = (position - 1) // cell
        self._begin_cell = position // cell

    def wants(self, stretch: Stretch) -> bool:
        """Tells whether a document of the piece may have lines in a stretch."""
        owned = self._growing is not None and self._growing.owned
        return owned or stretch.position < self._stop

    def add(
        self, stretch: Stretch, lines: list[str], dirts: dict[int, Dirt]
    ) -> Iterator[Document]:
        """Takes the next lines; yields the documents that end before or in them.

        Args:
            stretch: the lines as they stand in the file.
            lines: clean, the blank ones empty.
            dirts: what was found in them, by their numbers.
        """
        owned = self._start <= stretch.position < self._stop
        if owned:
            _add_all(self._dirt, [dirts[i] for i in dirts if not lines[i]])
        cell, previous = stretch.position // self._cell, self._begin_cell
        self._begin_cell = cell
        if not lines[0] and not (stretch.begins and stretch.ends):
            return  # The rest of the line need not be blank.
        if lines[0] and cell > previous and self._blank_cell < cell - 1:
            yield from self.end(too_long=True)
        texts = _find_texts(lines)
        for begin, end in texts:
            if begin > 0:
                yield from self.end()
            self._growing = growing = self._growing or _Growing(owned)
            if growing.owned:
                growing.lines += lines[begin:end]
                self._dirt.cut_lines += not stretch.ends
                found = [dirts[i] for i in range(begin, end) if i in dirts]
                growing.replaced |= any(more.replaced_characters for more in found)
                _add_all(self._dirt, found)
        if not lines[-1]:
            yield from self.end()
        if texts != [(0, len(lines))]:
            self._blank_cell = (stretch.position + len(stretch.raw) - 1) // self._cell

    def end(self, too_long: bool = False) -> Iterator[Document]:
        """Yields the document that grew, if there is one and it is the piece's."""
        growing, self._growing = self._growing, None
        if growing is not None and growing.owned:
            self._dirt.cut_documents += too_long
            self._dirt.replaced_documents += growing.replaced
            yield growing.lines


def _add_all(dirt: Dirt, found: Iterable[Dirt]) -> None:
    for more in found:
        dirt += more


def _find_texts(lines: list[str]) -> list[tuple[int, int]]:
    """Returns where the runs of text that blank lines separate begin and end."""
    texts, begin = [], 0
    while begin < len(lines):
        try:
            end = lines.index("", begin)
        except ValueError:
            end = len(lines)
        if end > begin:
            texts.append((begin, end))
        begin = end + 1
    return texts


def read_json(
    source: Source,
    file: File,
    piece: Piece,
    reading: Reading,
    dirt: Dirt,
    largest: int = _LARGEST_RECORD,
) -> Iterator[str | None]:
    """Yields the texts of JSON Lines, as they are; None for null.

    Args:
        source: the file.
        file: open, at its beginning.
        piece: which part of it: its lines are those that begin there.
        reading: how.
        dirt: to count in.
        largest: bytes of a line.

    Raises:
        InputError: the file cannot be read, a line is longer than `largest`, or not an
            object with a string or null under `reading.text_field`.
    """
    start, stop = _extent(source, piece)
    position = 0
    if start == 0:
        _check_magic(source, file)
    else:
        file.seek(start - 1)
        position = start - 1 + _skip_line(file)
    number = 0
    while position < stop and (raw := file.readline(largest + 1)):
        number += 1
        where = f"{source.location}, " + (
            f"line {number}" if start == 0 else f"the line at byte {position}"
        )
        if len(raw) > largest:
            raise InputError(f"{where}: longer than {largest} bytes")
        line = decode(raw, reading.invalid, dirt, source.location, position).strip()
        # Files that were joined have such marks in their midst, too.
        bare = line.lstrip("\ufeff")
        dirt.byte_order_marks += len(line) - len(bare)
        if bare := bare.strip():
            yield _parse_record(bare, reading.text_field, where)
        position += len(raw)


def _extent(source: Source, piece: Piece) -> tuple[int, int]:
    """Returns where a piece begins and ends in the uncompressed file."""
    if is_packed(source.location):
        return 0, sys.maxsize
    return piece.start, piece.stop


def _check_magic(source: Source, file: File) -> None:
    head = file.peek(_MAGIC_BYTES)
    for pattern, advice in _MAGIC:
        if pattern.match(head):
            raise InputError(f"--input: {source.location} {advice}")


def _skip_line(file: File) -> int:
    """Reads on to the next line; returns how many bytes that took."""
    size = 0
    while raw := file.readline(_SKIP_BYTES):
        size += len(raw)
        if raw.endswith(b"\n"):
            break
    return size


def _parse_record(line: str, text_field: str, where: str) -> str | None:
    try:
        # Not strict: control characters in a string are dirt like any other.
        record = json.loads(line, strict=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: not a JSON object but {type(record).__name__}")
    if text_field not in record:
        raise InputError(
            f"{where}: no field --text_field={text_field}; there are"
            f" {', '.join(map(str, record)) or 'none'}"
        )
    text = record[text_field]
    if text is not None and not isinstance(text, str):
        kind = type(text).__name__
        raise InputError(f"{where}: --text_field={text_field} holds {kind}, not a text")
    return text


def _decode_all(
    source: Source,
    piece: Piece,
    values: Iterable[bytes | None],
    reading: Reading,
    dirt: Dirt,
) -> Iterator[str | None]:
    unit = "row" if source.format == "parquet" else "example"
    for number, raw in enumerate(values):
        where = f"{source.location}, {unit} {number} of those from {piece.start}"
        yield raw if raw is None else decode(raw, reading.invalid, dirt, where)


def _documents(
    texts: Iterable[str | None], reading: Reading, dirt: Dirt
) -> Iterator[Document]:
    """Makes one document of each record that has a text."""
    before = dirt.replaced_characters
    for text in texts:
        if text is None:
            dirt.null_texts += 1
        elif lines := clean_record(text, reading.unicode, dirt):
            dirt.replaced_documents += dirt.replaced_characters > before
            yield lines
        else:
            dirt.empty_records += 1
        before = dirt.replaced_characters


def _read_embedded() -> Iterator[str]:
    """Yields the topics of Python's own help: one document each, a paragraph a line."""
    for name in sorted(topics.topics):
        paragraphs = re.split(r"\n\s*\n", topics.topics[name])
        yield "\n".join(map(_join, paragraphs))


def _join(paragraph: str) -> str:
    """Undoes hard wrapping; leaves out underlines and the frames of tables."""
    joined = ""
    for line in map(str.strip, paragraph.split("\n")):
        if not any(character.isalnum() for character in line):
            continue
        # The text was wrapped at hyphens too: "pseudo-" and "compiled" are one word.
        cut_word = len(joined) > 1 and joined[-1] == "-" and joined[-2].isalpha()
        joined += line if cut_word or not joined else " " + line
    return joined
