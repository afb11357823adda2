"""The mixture: several corpora in a run, trained for real."""

from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

import runs
import toy
from spanbert_jax import settings
from spanbert_jax.corpus.mixture import mix
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.errors import InputError
from spanbert_jax.training.loop import train

STEPS = 20


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    directory = tmp_path_factory.mktemp("corpora")
    first = runs.build_corpus(directory / "first")
    other = toy.make_text(seed=1, documents=90)
    return first, runs.build_like(first, directory / "second", other)


@pytest.fixture
def config(corpora: tuple[Corpus, Corpus], toy_cache: Path) -> ConfigDict:
    config = runs.make_config(toy_cache, corpora[0])
    config.data.corpus = ",".join(str(corpus.directory) for corpus in corpora)
    config.data.weights = "0.75,0.25"
    config.data.weighting = "shares"
    config.train.eval_every = 0
    return config


def start(config: ConfigDict, workdir: Path) -> int:
    return train(config, settings.open_corpora(config), workdir)


def test_a_mixture_resumes_as_one_corpus_does_and_logs_its_shares(
    config: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert start(config, tmp_path / "whole") == 0
    config.train.stop_after = 7
    assert start(config, tmp_path / "halves") == 0
    config.train.stop_after = 0
    assert start(config, tmp_path / "halves") == 0
    runs.assert_same_end(tmp_path / "whole", tmp_path / "halves", STEPS)
    output = capsys.readouterr().out
    assert "corpus first:" in output
    assert "75.0% of them" in output

    records = runs.read_metrics(tmp_path / "whole")
    shares = [r["corpus_shares"] for r in records if r["split"] == "train"]
    assert [set(share) for share in shares] == [{"first", "second"}] * STEPS
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)
    # 160 of the 10,000 rows of a cycle: four standard deviations.
    mean = np.mean([share["first"] for share in shares])
    assert abs(mean - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 160)

    config.data.weights = "0.5,0.5"
    with pytest.raises(InputError, match=r"data\.weights.*0\.75,0\.25.*0\.5,0\.5"):
        start(config, tmp_path / "whole")


def test_the_order_and_the_corpora_are_the_identity(
    corpora: tuple[Corpus, Corpus],
) -> None:
    first, second = corpora
    prints = {
        mix(chosen).fingerprint
        for chosen in ([first], [second], [first, second], [second, first])
    }
    assert len(prints) == 4
    assert mix([first]).fingerprint == first.fingerprint
    counts = first.unigram_counts + second.unigram_counts
    np.testing.assert_array_equal(mix(corpora).unigram_counts, counts)


def test_names_are_short_and_no_two_alike(
    corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    assert mix(corpora).names == ("first", "second")
    text = toy.make_text(seed=2, documents=30)
    (tmp_path / "more").mkdir()
    namesake = runs.build_like(corpora[0], tmp_path / "more" / "first", text)
    assert mix([corpora[0], namesake]).names == ("1-first", "2-first")
    third = runs.build_like(corpora[0], tmp_path / "1-first", toy.make_text(seed=3))
    names = mix([corpora[0], namesake, third]).names
    assert names == ("1-first", "2-first", "3-1-first")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("1", r"data\.weights has 1 numbers, data\.corpus 2 corpora"),
        ("1,2,3", r"data\.weights has 3 numbers"),
        ("1,zwei", r"data\.weights is '1,zwei'; it must be numbers"),
        ("1,0", r"data\.weights is '1,0'; each number must be above 0"),
        ("1,-1", "above 0"),
        ("1,nan", "must be numbers"),
        ("1,1e-9", "less than one row in 10,000"),
    ],
)
def test_weights_that_are_none_are_refused(
    config: ConfigDict, weights: str, message: str, tmp_path: Path
) -> None:
    config.data.weights = weights
    with pytest.raises(InputError, match=message):
        start(config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_of_a_single_corpus_are_refused(
    config: ConfigDict, corpora: tuple[Corpus, Corpus]
) -> None:
    config.data.corpus = str(corpora[0].directory)
    config.data.weights = "0.5"
    with pytest.raises(InputError, match=r"but data\.corpus is one corpus"):
        settings.open_corpora(config)


def test_corpora_that_do_not_fit_together_are_refused(
    corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    other = toy.build_corpus(tmp_path / "other", toy.make_text(seed=5, documents=20))
    with pytest.raises(InputError, match=r"differ in their tokenizer; prepare one"):
        mix([corpora[0], other])
    with pytest.raises(InputError, match=r"is there twice; data\.weights says"):
        mix([corpora[0], corpora[1], corpora[0]])
