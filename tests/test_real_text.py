"""The masks of 10,000 blocks of real text against the recipe."""

import itertools
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from configs import default
from simulation import simulate
from spanbert_jax import settings
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.data import counter
from spanbert_jax.data.batch import Feed, masked_blocks
from spanbert_jax.data.blocks import Words, target_budget
from spanbert_jax.data.masking import Masks

_DATA = Path(__file__).parents[2] / "shared" / "data"
_BLOCKS = 10_000

pytestmark = pytest.mark.skipif(
    not _DATA.exists(), reason=f"no real text: {_DATA} is not there"
)


class Sample(NamedTuple):
    feed: Feed
    lengths: np.ndarray
    masks: Masks
    words: Words


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    directory = tmp_path_factory.mktemp("real")
    texts = ("wiki.train.txt", "speeches.train.txt")
    corpus = build(
        BuildOptions(
            output=directory / "corpus",
            input=tuple(str(_DATA / "corpus" / name) for name in texts),
            vocab=_DATA / "wordpiece" / "vocab.txt",
            valid_fraction=0.0,
        )
    )
    config = default.get_config()
    config.data.cache = str(directory / "cache")
    config.data.block_length = 100
    feed = settings.feed(config, corpus, "train")
    total = feed.plan.num_blocks
    chosen = counter.permute(np.arange(_BLOCKS), total, counter.root_key(0))
    masked = masked_blocks(feed, chosen, np.zeros_like(chosen))
    return Sample(feed, np.diff(masked.offsets), masked.masks, masked.words)


def test_the_share_masked_is_the_budget(sample: Sample) -> None:
    budget = target_budget(sample.lengths, sample.feed.masking.ratio)
    unused = sample.masks.unused.sum() / budget.sum()
    assert unused < 1e-3
    assert len(sample.masks.target) / budget.sum() == pytest.approx(
        1 - unused, abs=1e-3
    )


def test_drawn_lengths_have_the_recipes_distribution(sample: Sample) -> None:
    drawn = sample.masks.spans.drawn
    assert drawn.mean() == pytest.approx(3.797, abs=0.06)
    expected = 0.2 * 0.8 ** np.arange(10)
    expected *= len(drawn) / expected.sum()
    counts = np.bincount(drawn, minlength=11)[1:]
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_placed_lengths_are_those_of_the_simulation(sample: Sample) -> None:
    sizes, first = np.diff(sample.words.offsets), sample.words.first
    unknown = sample.words.unknown
    rng = random.Random(5)
    simulated = [
        last - begin
        for b, e in itertools.pairwise(first)
        for begin, last in simulate(
            sizes[b:e].tolist(), rng, {i - b for i in unknown if b <= i < e}
        )
    ]
    placed = sample.masks.spans.last - sample.masks.spans.first
    assert placed.mean() == pytest.approx(np.mean(simulated), abs=0.05)


def test_replacements_are_eighty_ten_ten(sample: Sample) -> None:
    _, first = np.unique(sample.masks.span_begin, return_index=True)
    counts = np.bincount(sample.masks.action[first], minlength=3)
    expected = np.array([0.8, 0.1, 0.1]) * len(first)
    assert stats.chisquare(counts, expected).pvalue > 1e-3
