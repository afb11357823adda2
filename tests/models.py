"""Models of the tests that no run has trained: rough parameters, told as a run's."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
