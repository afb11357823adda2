"""The first reading: hashes, held-out documents, the check of later readings."""

import numpy as np
import pytest

from spanbert_jax.corpus.scan import held_out_threshold, scan
from spanbert_jax.corpus.sources import find_sources
from spanbert_jax.errors import InputError


@pytest.mark.parametrize(
    ("count", "fraction", "wanted"),
    [(1000, 0.02, 20), (10, 0.02, 1), (2, 0.9, 1), (1, 0.5, 0), (9, 0.0, 0)],
)
def test_share_held_out(count, fraction, wanted):
    hashes = np.random.default_rng(0).integers(2**64, size=count, dtype=np.uint64)
    threshold = held_out_threshold(hashes, fraction)
    assert (hashes < threshold).sum() == wanted
    assert held_out_threshold(hashes[::-1], fraction) == threshold


def test_copies_stay_on_one_side():
    hashes = np.array([5] * 6 + [2, 9, 9, 9], np.uint64)
    assert (hashes < held_out_threshold(hashes, 0.3)).sum() == 7
    assert (hashes < held_out_threshold(hashes, 0.9)).sum() == 7
    assert held_out_threshold(np.full(4, 7, np.uint64), 0.5) == 7
    top = np.array([2**64 - 1, 2**64 - 1, 3], np.uint64)
    assert (top < held_out_threshold(top, 0.6)).sum() == 1


@pytest.mark.parametrize(
    "later", ["one\n\ntwo\n\nthree", "one\n\ntwo", "one\n\nthree", "one", ""]
)
def test_later_readings_see_the_scanned_text_or_stop(tmp_path, later):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n\nthree")
    found = scan(find_sources([str(path)], "text"), "text")
    assert found.characters == len("onetwothree")
    first = list(found.documents())
    assert [document for _, document in first] == [["one"], ["two"], ["three"]]
    assert [key for key, _ in first] == found.hashes.tolist()
    path.write_text(later)
    if later == "one\n\ntwo\n\nthree":
        assert list(found.documents()) == first
    else:
        with pytest.raises(InputError, match="changed while it was read"):
            list(found.documents())


def test_equal_documents_have_equal_hashes_wherever_they_stand(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nx")
    (tmp_path / "b.txt").write_text("x\n\none\ntwo\n\none two")
    found = scan(find_sources([str(tmp_path / "*.txt")], "text"), "text")
    hashes = found.hashes.tolist()
    assert hashes[:2] == [hashes[3], hashes[2]]
    assert len(set(hashes)) == 3
    assert str(tmp_path) not in str(found.describe())
