"""The loop: a run from its first step, or from where it stopped, to its last."""

import contextlib
import functools
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.corpus.mixture import Mixture
from spanbert_jax.data.batch import Batch
from spanbert_jax.data.mixing import Mix
from spanbert_jax.data.pipeline import batches
from spanbert_jax.errors import PREEMPTED, InputError, StorageError
from spanbert_jax.model.spanbert import SpanBert
from spanbert_jax.training import metrics as metrics_lib
from spanbert_jax.training.checkpoint import (
    Checkpoints,
    Record,
    changed_settings,
    check_identity,
    make_record,
)
from spanbert_jax.training.evaluation import EvaluationStep, evaluate, unigram_log_probs
from spanbert_jax.training.metrics import Log, evaluation_at
from spanbert_jax.training.optimizer import make_optimizer
from spanbert_jax.training.sharding import (
    abstract,
    by_rows,
    make_mesh,
    put_batch,
    replicated,
)
from spanbert_jax.training.step import (
    TrainState,
    evaluation_step,
    init_state,
    train_step,
)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def train(config: ConfigDict, corpora: Mixture, workdir: Path) -> int:
    """Trains a config on corpora; goes on where an earlier start stopped.

    "Step n" is the state after n updates, and what the n-th update reported.

    Args:
        config: all settings.
        corpora: the text.
        workdir: the run's directory, made if it is not there.

    Returns:
        The exit code: 0, or 75 if a signal stopped the run after a save.

    Raises:
        InputError: a setting, a datum or the run in `workdir` forbids it.
        NonFiniteError: a loss or gradient norm is not finite; that step is not saved.
        StorageError: the run cannot be saved, or not be read back.
    """
    # ---- Checks and data
    settings.validate(config)
    mesh = make_mesh(config)
    mix = settings.mix(config, corpora, "train")
    held_out = settings.mix(config, corpora, "valid")
    _check_rows(mix, held_out, config)
    _make_directory(workdir)

    # ---- Model, optimiser and the three compiled functions
    model = settings.model(config, corpora.tokenizer.vocab_size)
    optimizer = make_optimizer(config)
    rows, whole = by_rows(mesh), replicated(mesh)
    init = jax.jit(
        functools.partial(init_state, model=model, optimizer=optimizer),
        out_shardings=whole,
    )
    update = jax.jit(
        functools.partial(
            train_step,
            model=model,
            optimizer=optimizer,
            seed=config.train.seed,
            weights=settings.loss_weights(config),
            accumulation=config.train.accumulation,
        ),
        in_shardings=(whole, rows),
        out_shardings=whole,
        donate_argnums=0,
    )
    look = jax.jit(
        functools.partial(evaluation_step, model=model),
        in_shardings=(whole, rows),
        out_shardings=whole,
    )

    with contextlib.ExitStack() as stack:
        # ---- State: the newest checkpoint's, or new
        stopping = stack.enter_context(_stop_signal())
        checkpoints = Checkpoints(workdir, config.checkpoint.keep)
        stack.enter_context(contextlib.closing(checkpoints))
        key = jax.random.key(config.train.seed)
        example = mix.empty_batch(1)
        like = abstract(jax.eval_shape(init, key, example), whole)
        record = make_record(config, corpora, like, mesh)
        state, record = _restore(checkpoints, like, record)
        state = state or init(key, example)
        start, stop = int(state.step), config.train.stop_after or config.train.steps
        settings.write(config, workdir / "config.json")

        # ---- Loop
        shares = functools.partial(_shares, mix, corpora, config.train.batch_size)
        log = Log(workdir, config, start, stop, shares)
        stack.enter_context(contextlib.closing(log))
        _introduce(log, config, model, mix, corpora, state, mesh)
        owes_evaluation = functools.partial(_owes_evaluation, config, held_out, workdir)
        examine = functools.partial(
            _evaluate, look, held_out, corpora, config, mesh, stopping, log
        )
        if owes_evaluation(start):
            examine(start, state.params)
        pending, saved = None, start
        for step, batch in enumerate(_batches(mix, config, start, stop), start + 1):
            state, metrics = update(state, put_batch(batch, mesh))
            # Read with the next step under way, so that the device never waits.
            if pending:
                log.update(*pending)
            pending = (step, metrics, batch)
            saves = step == stop or step % config.checkpoint.every == 0
            evaluates = _is_evaluated(config, held_out, step)
            if saves or evaluates or stopping.is_set():
                # A state is saved only after its own loss was seen to be finite.
                log.update(*pending)
                pending = None
            if saves:
                checkpoints.save(state, record)
                saved = step
            # Behind the save: what a kill cuts short here, the next start owes.
            if evaluates:
                examine(step, state.params)
            if stopping.is_set():
                break

        # ---- End: the last step is on disk before the run says so
        done = int(state.step)
        if pending:
            log.update(*pending)
        if saved < done:
            checkpoints.save(state, record)
        checkpoints.wait()
        unfinished = done < stop or owes_evaluation(done)
        _conclude(log, config, corpora, workdir, done, unfinished)
    return PREEMPTED if unfinished else 0


def _check_rows(mix: Mix, held_out: Mix, config: ConfigDict) -> None:
    rows, batch_size = mix.num_rows, config.train.batch_size
    if rows == 0:
        raise InputError(
            f"data.corpus={config.data.corpus} has 0 blocks to train on, and"
            f" train.batch_size is {batch_size}"
        )
    # Of several corpora, a small one comes again within a batch, in its next epoch.
    if rows < batch_size and len(mix.feeds) == 1:
        print(
            f"warning: the corpus fills {rows} rows, fewer than train.batch_size, which"
            f" is {batch_size}: {batch_size - rows} rows of each batch are empty"
        )
    if held_out.num_rows == 0:
        print("warning: the corpus holds out no block: there will be no evaluation")


def _make_directory(workdir: Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"--workdir={workdir}: {error.strerror}") from error


@contextlib.contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets; a second Ctrl-C ends at once."""
    stopping = threading.Event()

    def stop(number: int, _: Any) -> None:
        stopping.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    old = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield stopping
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _restore(
    checkpoints: Checkpoints, like: TrainState, record: Record
) -> tuple[TrainState | None, Record]:
    """The newest state, if any, and the record with what has changed since it."""
    check = functools.partial(check_identity, new=record)
    restored = checkpoints.restore(like, check)
    if restored is None:
        print(f"no finished step in {checkpoints.directory}: starting at step 0")
        return None, record
    step = int(restored.state.step)
    for broken, why in restored.broken.items():
        print(
            f"checkpoint {broken} cannot be read ({why}): moved to broken/, passed over"
        )
    print(f"resuming from step {step} in {checkpoints.directory}")
    changes = changed_settings(restored.record, record, step)
    for change in changes:
        print(
            f"changed since step {step}: {change['name']} was {change['old']!r}, is"
            f" now {change['new']!r}"
        )
    return restored.state, record | {"changes": restored.record["changes"] + changes}


def _batches(mix: Mix, config: ConfigDict, start: int, stop: int) -> Iterator[Batch]:
    size = config.train.batch_size
    order = functools.partial(mix.training_rows, batch_size=size)
    return batches(mix, order, range(size), range(start, stop), config.data.workers)


def _shares(
    mix: Mix, corpora: Mixture, batch_size: int, steps: range
) -> dict[str, float]:
    """The share of each corpus in the rows of some steps; nothing if there is one."""
    if len(mix.feeds) == 1:
        return {}
    rows = range(steps.start * batch_size, steps.stop * batch_size)
    return dict(zip(corpora.names, mix.shares(rows).tolist(), strict=True))


def _evaluate(
    look: EvaluationStep,
    held_out: Mix,
    corpora: Mixture,
    config: ConfigDict,
    mesh: Mesh,
    stopping: threading.Event,
    log: Log,
    step: int,
    params: Any,
) -> None:
    """Scores the held-out text in batches of the size of a microbatch.

    A signal ends it without a result: a run that is to stop must not wait for it.
    """
    size = config.train.batch_size // config.train.accumulation
    order = functools.partial(held_out.evaluation_rows, batch_size=size)
    steps = range(-(-held_out.num_rows // size))
    made = batches(held_out, order, range(size), steps, config.data.workers)
    made = itertools.takewhile(lambda _: not stopping.is_set(), made)
    unigram = unigram_log_probs(corpora.unigram_counts)
    scores = evaluate(look, params, made, mesh, corpora.tokenizer.mask_id, unigram)
    if not stopping.is_set():
        log.evaluation(step, scores)


def _is_evaluated(config: ConfigDict, held_out: Mix, step: int) -> bool:
    every = config.train.eval_every
    is_due = step > 0 and every > 0 and step % every == 0
    return held_out.num_rows > 0 and (is_due or step == config.train.steps)


def _owes_evaluation(
    config: ConfigDict, held_out: Mix, workdir: Path, step: int
) -> bool:
    """Whether a step's evaluation is due, yet does not stand in metrics.jsonl."""
    is_due = _is_evaluated(config, held_out, step)
    return is_due and evaluation_at(workdir, step) is None


def _introduce(
    log: Log,
    config: ConfigDict,
    model: SpanBert,
    mix: Mix,
    corpora: Mixture,
    state: TrainState,
    mesh: Mesh,
) -> None:
    """Says what is about to be trained."""
    geometry = model.geometry
    padding = geometry.padded_vocab_size - geometry.vocab_size
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    parameters -= padding * geometry.hidden_size
    kind = mesh.devices.flat[0].device_kind
    log.say(f"model: {parameters:,} parameters on {mesh.size} x {kind}")
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


def _conclude(
    log: Log,
    config: ConfigDict,
    corpora: Mixture,
    workdir: Path,
    done: int,
    stopped: bool,
) -> None:
    """Says what was made, where it is, and what to do with it."""
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
        f"metrics:     {workdir / metrics_lib.FILE} (tensorboard --logdir={workdir})\n"
        f"see the masks with: {_python()} -m spanbert_jax.preview"
        f" --corpus={corpora.corpora[0].directory} --block_length={data.block_length}"
        f" --masking={data.masking} --seed={config.train.seed}"
        + (" --pairs" if data.pairs else "")
    )


def _python() -> str:
    """How to call this interpreter from here."""
    path = Path(sys.executable)
    return (
        str(path.relative_to(Path.cwd()))
        if path.is_relative_to(Path.cwd())
        else "python"
    )
