"""Whole lines of a file, many at a time, from wherever in it one begins.

Lines without an end must not fill the memory, and wherever they are cut, every reader
of a part of the file must cut them in the same places without having read what comes
before. So the file is divided into cells of equal size, and what happens in a cell
depends on its own bytes: a full cell in which no line ends is cut after its last space,
or at its end if it has none. Hence a line shorter than a cell is never cut, and none is
longer than two.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spanbert_jax.corpus.files import File

CELL_BYTES = 64 << 20
# It and what is made of it fit into a core's cache: half the time of a megabyte. And
# only that much is cleaned line by line where something in it is dirty.
_READ_BYTES = 1 << 16
_SEARCH_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True)
class Stretch:
    """Consecutive lines, or one part of a line that was cut.

    Attributes:
        position: of the first byte, in the uncompressed file.
        raw: the bytes; every line with its line feed, if it has one.
        begins: raw begins where a line does.
        ends: raw ends where a line does.
    """

    position: int
    raw: bytes
    begins: bool = True
    ends: bool = True


def read_stretches(
    file: File,
    position: int,
    begins: bool,
    breaks: Sequence[int],
    cell: int = CELL_BYTES,
    read_size: int = _READ_BYTES,
) -> Iterator[Stretch]:
    """Yields the rest of a file.

    Lines that begin on different sides of a break, or in different cells, are in
    different stretches; all lines of a stretch end in the same cell.

    Args:
        file: stands at `position`.
        position: where a line begins, or a multiple of `cell`.
        begins: that a line begins there.
        breaks: positions in the file.
        cell: bytes; what is longer is cut.
        read_size: bytes to read at a time.

    Raises:
        InputError: the file cannot be read.
    """
    breaks = sorted(breaks)
    pending = bytearray()  # What was read and not yet yielded, from `position` on.
    line_ended = begins and position % cell > 0
    while True:
        end = position + len(pending)
        data = file.read(min(read_size, cell - end % cell))
        if not data:
            break
        whole = data.rfind(b"\n") + 1
        whole += len(pending) if whole else 0
        pending += data
        line_ended |= whole > 0
        for stop in _stops(pending, whole, position, begins, breaks):
            yield Stretch(position, bytes(pending[:stop]), begins)
            del pending[:stop]
            position, begins = position + stop, True
        end += len(data)
        if end % cell == 0:
            if not line_ended:
                stop = _forced_stop(pending, len(pending) - cell)
                yield Stretch(position, bytes(pending[:stop]), begins, ends=False)
                del pending[:stop]
                position, begins = position + stop, False
            line_ended = False
            bisect.insort(breaks, end)
    if pending:
        yield Stretch(position, bytes(pending), begins)


def find_start(file: File, start: int, cell: int = CELL_BYTES) -> tuple[int, bool]:
    """Finds where to begin in order to know all about the lines from `start` on.

    That is after a blank line; or else three cells back, since then it takes one cell
    to find a line's beginning, and a second one without a blank line to say that a
    document is too long. `file` is left at that place.

    Args:
        file: not packed.
        start: a position in it.
        cell: bytes.

    Returns:
        The position, and whether a line begins there.

    Raises:
        InputError: the file cannot be read.
    """
    if start == 0:
        return 0, True
    earliest = max(start // cell - 2, 0) * cell
    end, size = start, _READ_BYTES
    while end > earliest:
        begin = max(end - size, earliest)
        file.seek(begin)
        blanks = _BLANK_LINE.finditer(_read_all(file, end - begin))
        # Not what may have been cut. One across two windows is missed without harm.
        ends = [blank.end() for blank in blanks if len(blank[0]) <= cell]
        if ends:
            end = begin + ends[-1]
            file.seek(end)
            return end, True
        end, size = begin, _SEARCH_BYTES
    file.seek(earliest)
    return earliest, earliest == 0


def _stops(
    pending: bytearray, whole: int, position: int, begins: bool, breaks: list[int]
) -> Iterator[int]:
    """Yields how much to take next of the first `whole` bytes, which are whole lines.

    Args:
        pending: loses each time what was taken.
        whole: bytes of it.
        position: of its first byte.
        begins: a line begins there; the part of one is taken alone.
        breaks: loses those that were passed.
    """
    while whole:
        while breaks and breaks[0] <= position:
            breaks.pop(0)
        stop = whole
        if not begins:
            stop = pending.find(b"\n") + 1
        elif breaks and (line_feed := breaks[0] - 1 - position) < whole:
            stop = pending.find(b"\n", line_feed, whole) + 1
        yield stop
        position, begins, whole = position + stop, True, whole - stop


def _forced_stop(pending: bytearray, first: int) -> int:
    """Chooses where to cut a line in pending[first:], the cell that it fills."""
    if (space := pending.rfind(b" ", first)) >= 0:
        return space + 1
    stop = len(pending)
    # Not within a character: at most three bytes of it go on in UTF-8.
    while stop > max(first + 1, len(pending) - 3) and pending[stop - 1] & 0xC0 == 0x80:
        stop -= 1
    is_lead = pending[stop - 1] >= 0xC0
    return stop - 1 if is_lead and stop - 1 > first else len(pending)


def _read_all(file: File, size: int) -> bytes:
    parts = []
    while size > 0 and (data := file.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
