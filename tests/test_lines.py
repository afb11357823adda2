"""Lines of a file, from any position, against a plain reading of the whole."""

import random
import re
from collections import Counter

import pytest

from cuts import random_data, split_lines
from spanbert_jax.corpus.files import File
from spanbert_jax.corpus.lines import Stretch, find_start, read_stretches


def split_stretches(stretches: list[Stretch]) -> list[Stretch]:
    """The lines of stretches, each a stretch of its own."""
    lines = []
    for stretch in stretches:
        position = stretch.position
        for raw in re.findall(rb"[^\n]*\n|[^\n]+", stretch.raw):
            lines.append(Stretch(position, raw, stretch.begins, stretch.ends))
            position += len(raw)
    return lines


@pytest.fixture
def file(tmp_path):
    def open_data(data: bytes) -> File:
        (tmp_path / "data").write_bytes(data)
        return File(str(tmp_path / "data"))

    return open_data


def test_all_lines_come_in_order_and_split_at_breaks_and_cells(file):
    rng = random.Random(1)
    for _ in range(800):
        data, cell = random_data(rng), rng.choice([8, 13, 64])
        breaks = [rng.randrange(len(data) + 1) for _ in range(2)]
        with file(data) as opened:
            size = rng.choice([1, 3, 50])
            found = list(read_stretches(opened, 0, True, breaks, cell, size))
        assert split_stretches(found) == split_lines(data, cell)
        for stretch in found:
            lines = split_stretches([stretch])
            assert len(lines) == 1 or (stretch.begins and stretch.ends)
            begins = [line.position for line in lines]
            assert len({begin // cell for begin in begins}) == 1
            ends = [line.position + len(line.raw) - 1 for line in lines]
            assert len({end // cell for end in ends}) == 1
            for place in breaks:
                assert len({begin < place for begin in begins}) == 1


def test_from_anywhere_the_lines_are_those_of_the_whole(file):
    rng = random.Random(2)
    for _ in range(800):
        data, cell = random_data(rng, 400), rng.choice([8, 13, 64])
        start = rng.randrange(len(data) + 1)
        with file(data) as opened:
            position, begins = find_start(opened, start, cell)
            found = split_stretches(
                list(read_stretches(opened, position, begins, [start], cell))
            )
        assert start - 3 * cell < position <= start or position == 0
        expected = split_lines(data, cell)
        if not begins and found:
            # The rest of a line, of which the beginning was not read.
            position += len(found.pop(0).raw)
            assert position in {*(line.position for line in expected), len(data)}
        assert found == [line for line in expected if line.position >= position]


def test_no_line_shorter_than_a_cell_is_cut_and_none_is_longer_than_two(file):
    rng = random.Random(3)
    for _ in range(500):
        data, cell = random_data(rng, 300), 16
        with file(data) as opened:
            found = split_stretches(list(read_stretches(opened, 0, True, [], cell)))
        assert b"".join(line.raw for line in found) == data
        assert all(len(line.raw) < 2 * cell for line in found)
        short = [
            raw for raw in re.findall(rb"[^\n]*\n|[^\n]+", data) if len(raw) < cell
        ]
        kept = [line.raw for line in found if line.begins and line.ends]
        assert not Counter(short) - Counter(kept)
