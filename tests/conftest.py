"""Strict JAX on eight virtual CPU devices, and a toy corpus."""

import atexit
import os
import shutil
import tempfile

# Compiling is most of the time of a test: done without effort, and once for all
# processes of the tests, which inherit these.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="spanbert_jax-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
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
