"""The first reading: hashes, held-out documents, repeated ones, what is read again."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from spanbert_jax.corpus import parts
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.scan import Scan, held_out_threshold, repeated, scan
from spanbert_jax.corpus.sources import Reading, find_sources

READING = Reading()


def chunks(hashes: Sequence[int] | np.ndarray, size: int = 3) -> Iterator[np.ndarray]:
    array = np.asarray(hashes, np.uint64)
    for begin in range(0, len(array), size):
        yield array[begin : begin + size]


def threshold_of(hashes: Sequence[int] | np.ndarray, fraction: float) -> int:
    return held_out_threshold(lambda: chunks(hashes), fraction)


def scan_files(directory: Path, pattern: str, part_size: int = 10**6) -> Scan:
    work = directory / "work"
    work.mkdir(exist_ok=True)
    sources = find_sources([str(directory / pattern)], READING)
    cut = parts.cut(sources, READING, part_size)
    return scan(sources, cut, Local(1), work)


@pytest.mark.parametrize(
    ("count", "fraction", "wanted"),
    [(1000, 0.02, 20), (10, 0.02, 1), (2, 0.9, 1), (1, 0.5, 0), (9, 0.0, 0)],
)
def test_share_held_out(count: int, fraction: float, wanted: int) -> None:
    hashes = np.random.default_rng(0).integers(2**64, size=count, dtype=np.uint64)
    threshold = threshold_of(hashes, fraction)
    assert (hashes < threshold).sum() == wanted
    assert threshold_of(hashes[::-1], fraction) == threshold


def test_the_threshold_is_the_one_of_a_full_sort() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        # Few upper bits, so that many share a bucket; some equal ones.
        hashes = rng.integers(2 ** int(rng.integers(1, 63)), size=rng.integers(2, 60))
        hashes = (
            hashes.astype(np.uint64) << np.uint64(rng.integers(0, 2))
        ) | np.uint64(1)
        fraction = float(rng.random())
        wanted = min(max(round(fraction * len(hashes)), 1), len(hashes) - 1)
        last = int(np.sort(hashes)[wanted - 1])
        expected = last if last == int(hashes.max()) else last + 1
        assert threshold_of(hashes, fraction) == expected


def test_copies_stay_on_one_side() -> None:
    hashes = np.array([5] * 6 + [2, 9, 9, 9], np.uint64)
    assert (hashes < threshold_of(hashes, 0.3)).sum() == 7
    assert (hashes < threshold_of(hashes, 0.9)).sum() == 7
    assert threshold_of(np.full(4, 7, np.uint64), 0.5) == 7
    top = np.array([2**64 - 1, 2**64 - 1, 3], np.uint64)
    assert (top < threshold_of(top, 0.6)).sum() == 1


@pytest.mark.parametrize("at_a_time", [1, 7, 1000])
def test_repeated_are_those_that_a_set_has_seen(at_a_time: int) -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        hashes = rng.integers(40, size=60).astype(np.uint64) * np.uint64(2**58 + 1)
        flags = repeated(lambda hashes=hashes: chunks(hashes, 7), at_a_time)
        seen: set[int] = set()
        expected = []
        for value in hashes.tolist():
            expected.append(value in seen)
            seen.add(value)
        assert np.concatenate(flags).tolist() == expected
        assert [len(part) for part in flags] == [len(c) for c in chunks(hashes, 7)]


def test_no_document_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n")
    found = scan_files(tmp_path, "*.txt")
    assert found.documents == (0,)
    assert held_out_threshold(found.hashes, 0.5) == 0
    assert [len(flags) for flags in repeated(found.hashes)] == [0]


def test_equal_documents_have_equal_hashes_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nx")
    (tmp_path / "b.txt").write_text("x\n\none\ntwo\n\none two")
    found = scan_files(tmp_path, "*.txt")
    hashes = np.concatenate(list(found.hashes())).tolist()
    assert hashes[:2] == [hashes[3], hashes[2]]
    assert len(set(hashes)) == 3
    assert str(tmp_path) not in str(found.describe())


def test_the_cut_into_parts_changes_nothing_but_the_parts(tmp_path: Path) -> None:
    for name in "abc":
        text = "\n\n".join(f"{name} {n}\nline" for n in range(50))
        (tmp_path / f"{name}.txt").write_text(text)
    whole = scan_files(tmp_path, "*.txt")
    assert len(whole.parts) == 1
    hashes = np.concatenate(list(whole.hashes()))
    for size in (50, 100, 700):
        cut = scan_files(tmp_path, "*.txt", size)
        assert len(cut.parts) > 1
        assert cut.describe() == whole.describe()
        assert (np.concatenate(list(cut.hashes())) == hashes).all()


def test_what_was_read_is_read_again_only_where_it_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n\nmore")
    first = scan_files(tmp_path, "*.txt", 1)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()}
    assert scan_files(tmp_path, "*.txt", 1).describe() == first.describe()
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "work").iterdir()}
    (tmp_path / "b.txt").write_text("b\n\nmuch more")
    second = scan_files(tmp_path, "*.txt", 1)
    changed = {p.name for p, time in times.items() if p.stat().st_mtime_ns != time}
    sources = second.describe()["sources"]
    assert changed
    assert all(part.sources[0].name == "b.txt" for part in second.parts[-1:])
    assert sources[0] == first.describe()["sources"][0]
    assert sources[1]["digest"] != first.describe()["sources"][1]["digest"]
    capsys.readouterr()


def test_sources_without_text_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text(" \n\n")
    (tmp_path / "c.txt").write_text("")
    scan_files(tmp_path, "*.txt")
    errors = capsys.readouterr().err
    assert errors == "".join(
        f"warning: {tmp_path / name} holds no text\n" for name in ("b.txt", "c.txt")
    )
