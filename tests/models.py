"""Models of the tests that no run has trained: rough parameters, told as a run's."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

import reference
from spanbert_jax import settings
from spanbert_jax.corpus import origin
from spanbert_jax.corpus.mixture import mix
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.interop.pretrained import parameter_shapes
from spanbert_jax.training.checkpoint import Checkpoints, make_record
from spanbert_jax.training.saved import Saved
from spanbert_jax.training.step import TrainState

# What a look at held-out text records.
EVALUATION = {
    "step": 20,
    "split": "valid",
    "loss": 5.0,
    "mlm_loss": 2.345678,
    "mlm_accuracy": 0.5126,
    "mlm_targets": 12_345,
    "mlm_span_exact": {"1": 0.5, "2": 0.25},
    "mlm_spans": {"1": 100, "2": 300, "3": 0},
    "sbo_loss": 2.5,
    "sbo_accuracy": 0.4,
    "sbo_targets": 12_000,
    "sbo_span_exact": {"1": 0.25, "2": 0.0},
    "sbo_spans": {"1": 100, "2": 300, "3": 0},
    "perplexity": 10.4401,
    "unigram_loss": 6.5,
    "seconds": 1.0,
}


def make_saved(
    config: ConfigDict, corpus: Corpus, workdir: Path, seed: int = 0
) -> Saved:
    """A model whose every part counts, as if it were the last step of a run."""
    corpora = mix([corpus])
    shapes = parameter_shapes(config, corpora.tokenizer.vocab_size)
    record: dict[str, Any] = {
        "settings": settings.flatten(config),
        "corpus": corpora.fingerprint,
        "changes": [],
        "devices": {"devices": 8, "kind of device": "TPU v4"},
        "libraries": {"jax": "0.10.2"},
    }
    return Saved(
        workdir=workdir,
        step=config.train.steps,
        config=config,
        params=reference.rough_params(shapes, seed),
        record=record,
        origin=origin.describe(corpora),
        broken={},
    )


def save_run(
    config: ConfigDict, corpus: Corpus, workdir: Path, steps: Iterable[int]
) -> None:
    """Makes a work directory with some steps, none of which was trained."""
    corpora = mix([corpus])
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    checkpoints = Checkpoints(workdir, keep=3)
    for step in steps:
        params = make_saved(config, corpus, workdir, seed=step).params
        state = TrainState(jnp.int32(step), jax.tree.map(jnp.asarray, params), ())
        checkpoints.save(state, make_record(config, corpora, state, mesh))
    checkpoints.close()
    origin.write(origin.describe(corpora), workdir)


def make_history(*steps: int) -> list[dict[str, Any]]:
    """A line of training each step, and a look at held-out text each tenth."""
    records: list[dict[str, Any]] = []
    for step in steps:
        losses = {"mlm_loss": 9 - step / 50, "sbo_loss": 9 - step / 80}
        records.append({"step": step, "split": "train", **losses})
        if step % 10 == 0:
            records.append({**EVALUATION, "step": step, **losses})
    return records


def write_metrics(workdir: Path, history: list[dict[str, Any]], end: str = "") -> None:
    lines = "".join(json.dumps(record) + "\n" for record in history)
    (workdir / "metrics.jsonl").write_text(lines + end)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch, if it is there, to one thread: several wait by spinning."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
