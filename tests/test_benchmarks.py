"""What the benchmarks work on, and one of their scales."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import common, feeds
from configs import default
from spanbert_jax.data.batch import make_batch

MEGABYTES = 64 * 2**20


@pytest.mark.parametrize(
    ("tokens", "part", "shards"),
    [(300_000, 8_000_000, 1), (1_500_000, 100_000, 2)],
    ids=["one part", "fifteen parts"],
)
def test_a_text_of_any_size_has_whole_documents(
    tokens: int, part: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "_PART_TOKENS", part)
    feeds.write_split(tokens, tmp_path)
    split = feeds.open_split(tmp_path)
    assert len(split.shards) == shards
    assert split.num_tokens == pytest.approx(tokens, rel=0.3)
    for shard in split.shards:
        assert isinstance(shard.tokens, np.memmap)
        assert (np.diff(shard.documents) > 0).all()
        assert shard.documents[[0, -1]].tolist() == [0, len(shard.tokens)]
        # A word that goes on does not begin a document.
        assert feeds._word_edges()[shard.tokens[shard.documents[:-1]]].all()


def test_a_text_on_disk_gives_the_batches_of_one_in_memory(tmp_path: Path) -> None:
    config = default.get_config()
    config.data.packing = True
    feeds.write_split(100_000, tmp_path)
    split = feeds.make_split(100_000)
    rows = np.arange(4)
    one, other = (
        make_batch(feeds.feed_of(config, text, tmp_path / name), rows, rows)
        for name, text in (("disk", feeds.open_split(tmp_path)), ("memory", split))
    )
    for key, array in one.items():
        np.testing.assert_array_equal(array, other[key])


def test_the_peak_is_that_of_the_call_alone() -> None:
    held = np.ones(MEGABYTES, np.uint8)

    def work() -> str:
        total = sum(int(np.ones(MEGABYTES, np.uint8).sum()) for _ in range(8))
        return f"{total:,}"

    result, peak = common.with_peak_bytes(work)
    assert result == f"{8 * len(held):,}"
    assert 0.9 * MEGABYTES < peak < 2.5 * MEGABYTES


def test_a_fault_comes_through_the_watch() -> None:
    with pytest.raises(ZeroDivisionError):
        common.with_peak_bytes(lambda: 1 // 0)
