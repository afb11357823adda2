"""What patterns name, and how it is cut into parts."""

import itertools
import os
import random
import time

import fsspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from records import build_tfds
from spanbert_jax.corpus.sources import (
    Piece,
    Reading,
    Source,
    cut_into_parts,
    find_sources,
)
from spanbert_jax.errors import InputError

# What protobuf says of how TFDS calls it.
_TFDS_WARNINGS = pytest.mark.filterwarnings("ignore:label:DeprecationWarning")


def names(*patterns, **options):
    sources = find_sources([str(pattern) for pattern in patterns], Reading(**options))
    return [source.name for source in sources]


def test_patterns_are_expanded_in_order_and_each_file_once(tmp_path):
    for name in ("b.txt", "a.txt", "c[1].txt", "d.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub.txt").mkdir()
    (tmp_path / "sub.txt" / "e.txt").write_text("xyz")
    assert names(tmp_path / "*.txt") == ["a.txt", "b.txt", "c[1].txt"]
    assert names(tmp_path / "d.md", tmp_path / "*.txt", tmp_path / "b.txt") == [
        *("a.txt", "b.txt", "c[1].txt", "d.md")
    ]
    assert names(f"{tmp_path}/b.txt, {tmp_path}/c[1].txt,") == ["b.txt", "c[1].txt"]
    assert names(tmp_path / "**" / "e.txt") == ["e.txt"]
    assert names(f"file://{tmp_path}/a.txt", tmp_path / "sub.txt" / ".." / "a.txt") == [
        "a.txt"
    ]
    with pytest.raises(InputError, match=r"none\*.txt matches no file"):
        names(tmp_path / "a.txt", tmp_path / "none*.txt")
    with pytest.raises(InputError, match="is a directory"):
        names(tmp_path / "sub.txt")
    with pytest.raises(InputError, match="--input is missing"):
        names(" , ")


def test_home_and_relative_paths_are_the_same_source(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("xyz")
    found = find_sources(["~/a.txt", "a.txt", "./*.txt"], Reading())
    status = os.stat(tmp_path / "a.txt")
    stamp = f"3-{status.st_mtime_ns}"
    assert found == [Source("a.txt", 3, "text", str(tmp_path / "a.txt"), stamp)]


def test_files_and_urls_together(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with fsspec.open("memory://together/b.txt", "wb") as file:
        file.write(b"xyz")
    found = find_sources(["memory://together/*", str(tmp_path / "*")], Reading())
    assert [(source.name, source.size) for source in found] == [
        ("a.txt", 1),
        ("b.txt", 3),
    ]
    assert found[1].location == "memory:///together/b.txt"


@pytest.mark.parametrize(
    ("name", "format_", "implied"),
    [
        ("a.parquet", "text", "parquet"),
        ("a.parquet", "jsonl", "parquet"),
        ("a.jsonl", "text", "jsonl"),
        ("a.JSON.gz", "text", "jsonl"),
        ("a.jsonl.zst", "parquet", "jsonl"),
        ("a.txt", "text", None),
        ("a.txt.gz", "jsonl", None),
        ("parquet", "text", None),
    ],
)
def test_a_name_must_not_contradict_the_format(tmp_path, name, format_, implied):
    (tmp_path / name).write_text("x")
    if implied is None:
        assert names(tmp_path / name, format=format_) == [name]
        return
    with pytest.raises(InputError, match=f"--format={format_} .*--format={implied}"):
        names(tmp_path / name, format=format_)


def test_embedded_text_is_one_source_in_one_piece():
    reading = Reading(format="embedded")
    (source,) = find_sources([], reading)
    assert source.size > 300_000
    piece = Piece(0, 0, source.size, source.size)
    assert cut_into_parts([source], 1000, reading) == [(piece,)]


# Cutting.


def check_parts(sources, parts, part_size, extents):
    """Every unit of every source is in one piece, in order; shares add up."""
    pieces = list(itertools.chain(*parts))
    assert [piece.source for piece in pieces] == sorted(
        piece.source for piece in pieces
    )
    for number, (source, extent) in enumerate(zip(sources, extents, strict=True)):
        mine = [piece for piece in pieces if piece.source == number]
        assert mine[0].start == 0
        assert mine[-1].stop == extent
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
        assert sum(piece.size for piece in mine) == source.size
    for part, following in itertools.pairwise(parts):
        assert part
        assert sum(piece.size for piece in part) + following[0].size > part_size


def test_files_are_cut_and_grouped():
    rng = random.Random(1)
    for _ in range(300):
        part_size = rng.randrange(1, 400)
        sources = []
        for number in range(rng.randrange(1, 12)):
            name = f"{number}.txt" + rng.choice(["", ".gz"])
            size = rng.choice([0, 3, rng.randrange(1000)])
            sources.append(Source(name, size, "text", f"/{name}", ""))
        parts = cut_into_parts(sources, part_size, Reading())
        check_parts(sources, parts, part_size, [source.size for source in sources])
        for part in parts:
            packed = [p for p in part if sources[p.source].name.endswith(".gz")]
            total = sum(piece.size for piece in part)
            assert total <= part_size or (len(packed) == 1 and total == packed[0].size)
        assert parts == cut_into_parts(sources, part_size, Reading())


def test_parquet_is_cut_at_row_groups(tmp_path):
    rng = np.random.default_rng(1)
    texts = [rng.bytes(int(n)).hex() for n in rng.integers(10, 500, 60)]
    parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=4
    )
    empty = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    parquet.write_table(empty, tmp_path / "b.parquet")
    reading = Reading(format="parquet")
    sources = find_sources([str(tmp_path / "*.parquet")], reading)
    groups = parquet.ParquetFile(tmp_path / "b.parquet").num_row_groups
    for part_size, fewest in ((1, 15), (5000, 3), (1 << 30, 1)):
        parts = cut_into_parts(sources, part_size, reading)
        check_parts(sources, parts, part_size, [15, groups])
        assert len(parts) >= fewest
    assert len(parts) == 1


@_TFDS_WARNINGS
def test_tfds_is_found_and_cut_by_examples(tmp_path):
    build_tfds(tmp_path, [f"text {number}" for number in range(23)])
    reading = Reading(data_dir=str(tmp_path))
    found = find_sources(["tfds:toy_texts", "tfds:toy_texts:1.0.0"], reading)
    (source,) = found
    assert source.name == "toy_texts/train"
    assert source.location == "toy_texts:1.0.0/train"
    assert source.stamp == "1.0.0-23"
    assert source.size > 23 * len("text 0")
    assert find_sources(["toy_texts"], Reading("tfds", data_dir=str(tmp_path))) == found
    for part_size in (1, 100, 1 << 20):
        parts = cut_into_parts(found, part_size, reading)
        check_parts(found, parts, part_size, [23])
    with pytest.raises(
        InputError, match=r"--tfds_split=test is no split .*there are train"
    ):
        find_sources(
            ["tfds:toy_texts"], Reading(data_dir=str(tmp_path), tfds_split="test")
        )


@_TFDS_WARNINGS
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wikipedia/20230601.en", "is not prepared in .*download_and_prepare"),
        ("no_such_set", "is not in --data_dir=.*: .* not found"),
        ("wikipedia/no_such", "no_such not found"),
        ("wikipedia/20230601.en:9.9.9", "cannot be loaded at version 9.9.9"),
        ("huggingface:wikipedia", r"not of the form tfds:NAME\[/CONFIG\]\[:VERSION\]"),
        ("toy texts", "not of the form"),
    ],
)
def test_what_is_not_prepared_is_told_at_once(tmp_path, name, message):
    start = time.monotonic()
    with pytest.raises(InputError, match=message) as error:
        names(f"tfds:{name}", data_dir=str(tmp_path))
    assert f"--input=tfds:{name}" in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - start < 20
