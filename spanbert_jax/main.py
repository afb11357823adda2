"""Trains a config: python -m spanbert_jax.main --config=FILE --workdir=DIR."""

from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from spanbert_jax import settings
from spanbert_jax.errors import InputError, run
from spanbert_jax.training.loop import train
from spanbert_jax.training.profiler import parse_steps

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "The recipe, such as configs/tiny.py; --config.a.b=value overrides a setting.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The run's directory; a run that is there goes on."
)
_PROFILE = flags.DEFINE_string(
    "profile",
    "",
    "START:STOP, traces the steps from START up to, but not including, STOP into"
    " WORKDIR/profile; the first step is 1.",
)
flags.mark_flags_as_required(["config", "workdir"])


def main(_: Sequence[str]) -> int:
    """Opens the corpora and trains."""
    config, profile = _CONFIG.value, parse_steps(_PROFILE.value)
    try:
        settings.validate(config)
    # A config whose file could not be read complains at its first use.
    except OSError as error:
        raise InputError(f"--config: {error}") from error
    corpora = settings.open_corpora(config)
    return train(config, corpora, Path(_WORKDIR.value), profile)


if __name__ == "__main__":
    run(main)
