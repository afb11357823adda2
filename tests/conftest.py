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


@pytest.fixture(scope="session")
def toy_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return toy.build_corpus(tmp_path_factory.mktemp("toy") / "corpus")


@pytest.fixture(scope="session")
def toy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
