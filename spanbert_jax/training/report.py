"""The report: what a run says of itself at its start and at its end."""

import sys
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from spanbert_jax.corpus.mixture import Mixture
from spanbert_jax.data.mixing import Mix
from spanbert_jax.training import hosts
from spanbert_jax.training.metrics import Log
from spanbert_jax.training.program import Program, count_parameters
from spanbert_jax.training.sinks import FILE, evaluation_at


def introduce(
    log: Log, config: ConfigDict, program: Program, mix: Mix, corpora: Mixture
) -> None:
    """Says what is about to be trained.

    Args:
        log: of the run.
        config: all settings.
        program: the compiled functions, of a mesh.
        mix: the text to train on.
        corpora: what it is from.
    """
    parameters, mesh = count_parameters(program), program.mesh
    kind = mesh.devices.flat[0].device_kind
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    log.say(f"model: {parameters:,} parameters on {mesh.size} x {kind} ({shape})")
    size, several = config.train.batch_size, len(mix.feeds) > 1
    shares = mix.places / mix.places.sum()
    for name, share, feed in zip(corpora.names, shares, mix.feeds, strict=True):
        rows, length = feed.plan.num_rows, feed.block_length
        # Only a run that has no other corpus fills a batch up with empty rows.
        epoch = (rows if several else max(rows, size)) / (size * share)
        log.say(
            f"corpus {name}: {feed.split.num_tokens:,} tokens in {rows:,} rows of"
            f" {length}, {feed.plan.fill(length):.1%} full; an epoch is {epoch:,.1f}"
            f" steps of {size} rows" + (f", {share:.1%} of them" if several else "")
        )
        if feed.plan.is_paired:
            log.say(
                f"{np.mean(feed.plan.labels):.1%} of the second segments are of another"
                " document"
            )


def conclude(
    log: Log,
    config: ConfigDict,
    corpora: Mixture,
    workdir: Path,
    done: int,
    stopped: bool,
) -> None:
    """Says what was made, where it is, and what to do with it.

    Args:
        log: of the run.
        config: all settings.
        corpora: the text.
        workdir: the run's directory.
        done: the last step, which is on disk.
        stopped: whether a signal ended the run.
    """
    if not hosts.is_first():
        return
    total = config.train.steps
    if stopped:
        log.say(
            f"stopped by a signal; step {done} is saved: run the same command again"
        )
    elif done >= total:
        log.say(f"finished at step {done}")
    else:
        log.say(f"stopped at step {done} of {total}: train.stop_after")
    if scores := evaluation_at(workdir, done):
        log.say(
            f"held-out MLM loss {scores['mlm_loss']:.3f}; knowing only how frequent the"
            f" tokens are would give {scores['unigram_loss']:.3f}"
        )
    data = config.data
    log.say(
        f"checkpoints: {workdir / 'checkpoints'}\n"
        f"metrics:     {workdir / FILE} (tensorboard --logdir={workdir})\n"
        f"see the masks with: {_python()} -m spanbert_jax.preview"
        f" --corpus={corpora.corpora[0].directory} --block_length={data.block_length}"
        f" --masking={data.masking} --seed={config.train.seed}"
        + (" --pairs" if data.pairs else "")
    )


def _python() -> str:
    """How to call this interpreter from here."""
    path, here = Path(sys.executable), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else "python"
