"""Strict JAX on eight virtual CPU devices, and a toy corpus."""

import os

# Before anything imports jax (tensorflow does, too).
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

from pathlib import Path

import jax
import pytest

import toy
from spanbert_jax.corpus.store import Corpus

jax.config.update("jax_numpy_rank_promotion", "raise")


# Whole files are dealt out, in this order: a long one begun last would be waited for.
_LONGEST_FIRST = ("test_main", "test_loop", "test_step", "test_mixture")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session")
def toy_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return toy.build_corpus(tmp_path_factory.mktemp("toy") / "corpus")


@pytest.fixture(scope="session")
def toy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
