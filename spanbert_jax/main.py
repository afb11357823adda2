"""Trains a config: python -m spanbert_jax.main --config=FILE --workdir=DIR."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from spanbert_jax import settings
from spanbert_jax.corpus.mixture import Mixture
from spanbert_jax.errors import InputError, run
from spanbert_jax.training import hosts
from spanbert_jax.training.compiled import keep_compiled
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
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    False,
    "One of several processes of a run, as TPU metadata, GKE, SLURM or Open MPI say.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT where process 0 listens; says with the next two what --distributed"
    " finds out.",
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Of the run.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Of this one, from 0.")
_CONNECT_SECONDS = flags.DEFINE_integer(
    "connect_seconds",
    300,
    "How long processes wait for each other at the start: machines boot at different"
    " speeds.",
    lower_bound=1,
)
_HEARTBEAT_SECONDS = flags.DEFINE_integer(
    "heartbeat_seconds",
    60,
    "A process that is silent for so long counts as lost, and all others end: longer"
    " than a network's hiccup, shorter than a chip-hour.",
    lower_bound=10,
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
    workdir = _workdir()
    keep_compiled(settings.cache_directory(config))

    def work() -> int:
        corpora = settings.open_corpora(config)
        return train(config, corpora, workdir, profile, _start_from(config, corpora))

    return hosts.run(work, _meeting())


def _start_from(config: ConfigDict, corpora: Mixture) -> Callable[[Any], Any] | None:
    """What puts the weights that are there in the place of random ones, if asked to."""
    if not config.init_from:
        return None
    # Here, for the sake of all the runs that do without.
    from spanbert_jax.interop.initial import initial_params

    return functools.partial(
        initial_params, config=config, tokenizer=corpora.tokenizer, say=hosts.say
    )


def _workdir() -> Path:
    if "://" in _WORKDIR.value:
        raise InputError(
            f"--workdir={_WORKDIR.value} is a URL; mount the bucket, with gcsfuse say,"
            " and name the directory where it is mounted"
        )
    return Path(_WORKDIR.value)


def _meeting() -> hosts.Meeting | None:
    """How this process meets the others; None if there are none."""
    flags_of_place = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    place = hosts.make_place(*flags_of_place)
    if place is None and not _DISTRIBUTED.value:
        return None
    if place and _DISTRIBUTED.value:
        raise InputError(
            "--distributed finds out what --coordinator, --num_processes and"
            " --process_id say; leave either out"
        )
    return hosts.Meeting(place, _CONNECT_SECONDS.value, _HEARTBEAT_SECONDS.value)


if __name__ == "__main__":
    run(main)
