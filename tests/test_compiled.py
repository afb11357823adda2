"""The compiled: a second start finds the programs of the first."""

import subprocess
from pathlib import Path

import jax

import runs
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.training.compiled import keep_compiled

_KNOWN = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


def start(command: list[str]) -> None:
    """A run in a process of its own, which was told of no cache."""
    environment = {k: v for k, v in runs.environment().items() if k not in _KNOWN}
    subprocess.run(
        command,
        cwd=runs.REPOSITORY,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def programs(cache: Path) -> dict[str, int]:
    """The compiled programs by their place in a cache, and when they were written."""
    return {
        str(path.relative_to(cache)): path.stat().st_mtime_ns
        for path in cache.rglob("*-cache")
    }


def test_a_second_start_compiles_nothing(tmp_path: Path, toy_corpus: Corpus) -> None:
    config = runs.make_config(tmp_path / "cache", toy_corpus)
    config.train.stop_after = 1
    start(runs.command(config, tmp_path / "first"))
    first = programs(tmp_path / "cache" / "compiled")
    assert any("voted_update" in name for name in first)
    start(runs.command(config, tmp_path / "second"))
    assert programs(tmp_path / "cache" / "compiled") == first
    runs.assert_same_end(tmp_path / "first", tmp_path / "second", 1)


def test_a_cache_that_jax_knows_is_left(tmp_path: Path) -> None:
    known = jax.config.jax_compilation_cache_dir
    assert known
    keep_compiled(tmp_path)
    assert jax.config.jax_compilation_cache_dir == known
