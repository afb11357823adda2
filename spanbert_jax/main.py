"""Trains a config: python -m spanbert_jax.main --config=FILE --workdir=DIR."""

from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from spanbert_jax import settings
from spanbert_jax.corpus.build import embedded_corpus
from spanbert_jax.corpus.store import open_corpus
from spanbert_jax.errors import InputError, run
from spanbert_jax.training.loop import train

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "The recipe, such as configs/tiny.py; --config.a.b=value overrides a setting.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The run's directory; a run that is there goes on."
)
flags.mark_flags_as_required(["config", "workdir"])

EMBEDDED = "embedded"
# A tenth of 79 documents is the least that gives a steady held-out loss; 4,096 entries
# are what half a megabyte of text can teach.
_EMBEDDED_VALID_FRACTION = 0.1
_EMBEDDED_VOCAB_SIZE = 4096


def main(_: Sequence[str]) -> int:
    """Opens the corpus and trains."""
    config = _CONFIG.value
    settings.validate(config)
    corpus = config.data.corpus
    if not corpus:
        raise InputError(
            "data.corpus is empty; make a corpus with python -m spanbert_jax.prepare"
            " --input='TEXT/*.txt' --output=CORPUS and name it with"
            " --config.data.corpus=CORPUS"
        )
    if corpus == EMBEDDED:
        corpus = embedded_corpus(
            settings.cache_directory(config),
            _EMBEDDED_VOCAB_SIZE,
            _EMBEDDED_VALID_FRACTION,
        )
    return train(config, open_corpus(corpus), Path(_WORKDIR.value))


if __name__ == "__main__":
    run(main)
