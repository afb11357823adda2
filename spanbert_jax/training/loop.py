"""The loop: a run from its first step, or from where it stopped, to its last."""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.corpus import origin
from spanbert_jax.corpus.mixture import Mixture
from spanbert_jax.data.mixing import Mix
from spanbert_jax.data.pipeline import RowOrder, batches
from spanbert_jax.errors import PREEMPTED, InputError, StorageError
from spanbert_jax.model.flops import step_flops
from spanbert_jax.training import hosts, report
from spanbert_jax.training.checkpoint import (
    Checkpoints,
    Record,
    changed_settings,
    check_alike,
    check_identity,
    make_record,
)
from spanbert_jax.training.chips import find_chip
from spanbert_jax.training.evaluation import Scores, evaluate, unigram_log_probs
from spanbert_jax.training.hosts import say
from spanbert_jax.training.meter import Meter
from spanbert_jax.training.metrics import Log
from spanbert_jax.training.profiler import NO_STEPS, Profiler, check_steps
from spanbert_jax.training.program import Program, cast_votes, make_program
from spanbert_jax.training.sharding import local_rows, make_mesh, on, put_batch
from spanbert_jax.training.sinks import evaluation_at
from spanbert_jax.training.step import DeviceBatch, TrainState

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def train(
    config: ConfigDict,
    corpora: Mixture,
    workdir: Path,
    profile: range = NO_STEPS,
    start_from: Callable[[Any], Any] | None = None,
) -> int:
    """Trains a config on corpora; goes on where an earlier start stopped.

    "Step n" is the state after n updates, and what the n-th update reported.

    Args:
        config: all settings.
        corpora: the text.
        workdir: the run's directory, made if it is not there.
        profile: steps to trace, see `profiler.Profiler`.
        start_from: makes the parameters of a new run from random ones, in the same
            shapes and shardings; None means that it starts from these.

    Returns:
        The exit code: 0, or 75 if a signal stopped the run after a save.

    Raises:
        InputError: a setting, a datum or the run in `workdir` forbids it.
        NonFiniteError: a loss or gradient norm is not finite; that step is not saved.
        StorageError: the run cannot be saved, or not be read back.
    """
    # ---- Checks, data, model and the compiled functions
    settings.validate(config)
    check_steps(profile, config.train.stop_after or config.train.steps)
    model = settings.model(config, corpora.tokenizer.vocab_size)
    mesh = make_mesh(config, model.geometry)
    mix = settings.mix(config, corpora, "train")
    held_out = settings.mix(config, corpora, "valid")
    _check_rows(mix, held_out, config)
    _make_directory(workdir)
    program = make_program(config, model, mesh, settings.batch_shape(config))

    with contextlib.ExitStack() as stack:
        # ---- State: the newest checkpoint's, or new
        stopping = stack.enter_context(_stop_signal())
        stack.enter_context(on(mesh))
        record = make_record(config, corpora, program.state, mesh)
        # A trace decides when a step is read, so all must be told of it.
        check_alike(record, {"--profile": str(profile)})
        checkpoints = Checkpoints(workdir, config.checkpoint.keep)
        stack.enter_context(contextlib.closing(checkpoints))
        state, record = _restore(checkpoints, program.state, record)
        state = state or _first_state(program, config.train.seed, start_from)
        start, stop = int(state.step), config.train.stop_after or config.train.steps
        if hosts.is_first():
            settings.write(config, workdir / "config.json")
            origin.write(origin.describe(corpora), workdir)

        # ---- Loop
        shares = functools.partial(_shares, mix, corpora, config.train.batch_size)
        meter = _make_meter(config, program)
        log = Log(workdir, config, start, stop, meter, shares)
        stack.enter_context(contextlib.closing(log))
        profiler = Profiler(workdir / "profile", profile, start, stop, log.say)
        stack.enter_context(contextlib.closing(profiler))
        report.introduce(log, config, program, mix, corpora)
        owes_evaluation = functools.partial(_owes_evaluation, config, held_out, workdir)
        examine = functools.partial(
            _evaluate, program, held_out, corpora, config, stopping, log
        )
        # What all processes know: whether one of them was told to stop.
        stops = owes_evaluation(start) and not examine(start, state.params)
        steps = range(start, start if stops else stop)
        pending, saved = None, start
        made = meter.watch(_batches(program, mix, config, steps))
        for step, batch in enumerate(made, start + 1):
            profiler.before(step)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                votes = cast_votes(program, stopping.is_set())
                state, metrics, stopped = program.update(state, batch, votes)
            # Read with the next step under way, so that the device never waits.
            if pending:
                stops = log.update(*pending)
            stops = stops or hosts.is_told_alone(stopping)
            pending = (step, metrics, stopped)
            saves = step == stop or step % config.checkpoint.every == 0
            evaluates = _is_evaluated(config, held_out, step)
            if saves or evaluates or stops or profiler.turns(step):
                # A state is saved only after its own loss was seen to be finite.
                stops = log.update(*pending) or stops
                pending = None
                meter.pause()
            profiler.after(step)
            if saves:
                checkpoints.save(state, record)
                saved = step
            # Behind the save: what a kill cuts short here, the next start owes.
            if evaluates and not stops:
                stops = not examine(step, state.params)
            if stops:
                break

        # ---- End: the last step is on disk before the run says so
        done = int(state.step)
        if pending:
            log.update(*pending)
        if saved < done:
            checkpoints.save(state, record)
        checkpoints.wait()
        unfinished = done < stop or owes_evaluation(done)
        report.conclude(log, config, corpora, workdir, done, unfinished)
    return PREEMPTED if unfinished else 0


def _make_meter(config: ConfigDict, program: Program) -> Meter:
    chip = find_chip(program.mesh.devices.flat[0].device_kind)
    peak = config.train.peak_flops or (chip.peak if chip else None)
    return Meter(program.mesh.size, step_flops(program.model, program.batch), peak)


def _check_rows(mix: Mix, held_out: Mix, config: ConfigDict) -> None:
    rows, batch_size = mix.num_rows, config.train.batch_size
    if rows == 0:
        raise InputError(
            f"data.corpus={config.data.corpus} has 0 blocks to train on, and"
            f" train.batch_size is {batch_size}"
        )
    # Of several corpora, a small one comes again within a batch, in its next epoch.
    if rows < batch_size and len(mix.feeds) == 1:
        say(
            f"warning: the corpus fills {rows} rows, fewer than train.batch_size, which"
            f" is {batch_size}: {batch_size - rows} rows of each batch are empty"
        )
    if held_out.num_rows == 0:
        say("warning: the corpus holds out no block: there will be no evaluation")


def _make_directory(workdir: Path) -> None:
    fault = ""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = f"--workdir={workdir}: {error.strerror}"
    if fault := hosts.first_fault(fault):
        raise StorageError(fault)
    hosts.check_shared(workdir)


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
        say(f"no finished step in {checkpoints.directory}: starting at step 0")
        return None, record
    step = int(restored.state.step)
    for broken, why in restored.broken.items():
        say(
            f"checkpoint {broken} cannot be read ({why}): moved to broken/, passed over"
        )
    say(f"resuming from step {step} in {checkpoints.directory}")
    changes = changed_settings(restored.record, record, step)
    for change in changes:
        say(
            f"changed since step {step}: {change['name']} was {change['old']!r}, is"
            f" now {change['new']!r}"
        )
    return restored.state, record | {"changes": restored.record["changes"] + changes}


def _first_state(
    program: Program, seed: int, start_from: Callable[[Any], Any] | None
) -> TrainState:
    state = program.init(jax.random.key(seed))
    if start_from is None:
        return state
    fault = ""
    try:
        state = state._replace(params=start_from(state.params))
    except InputError as error:
        fault = str(error)
    if fault := hosts.first_fault(fault):
        raise InputError(fault)
    return state


def _batches(
    program: Program, mix: Mix, config: ConfigDict, steps: range
) -> Iterator[DeviceBatch]:
    order = functools.partial(mix.training_rows, batch_size=config.train.batch_size)
    return _feed(program, mix, order, config.train.batch_size, steps, config)


def _feed(
    program: Program,
    mix: Mix,
    order: RowOrder,
    size: int,
    steps: range,
    config: ConfigDict,
) -> Iterator[DeviceBatch]:
    """Global batches on the devices, each process making the rows of its own."""
    mine = local_rows(program.mesh, size)
    for batch in batches(mix, order, mine, steps, config.data.workers):
        yield put_batch(batch, program.mesh, size)


def _shares(
    mix: Mix, corpora: Mixture, batch_size: int, steps: range
) -> dict[str, float]:
    """The share of each corpus in the rows of some steps; nothing if there is one."""
    if len(mix.feeds) == 1:
        return {}
    rows = range(steps.start * batch_size, steps.stop * batch_size)
    return dict(zip(corpora.names, mix.shares(rows).tolist(), strict=True))


def _evaluate(
    program: Program,
    held_out: Mix,
    corpora: Mixture,
    config: ConfigDict,
    stopping: threading.Event,
    log: Log,
    step: int,
    params: Any,
) -> bool:
    """Scores the held-out text in batches of the size of a microbatch.

    A signal to any process ends it without a result.

    Returns:
        Whether there is a result.
    """
    size = config.train.batch_size // config.train.accumulation
    order = functools.partial(held_out.evaluation_rows, batch_size=size)
    steps = range(-(-held_out.num_rows // size))
    unigram = jnp.asarray(unigram_log_probs(corpora.unigram_counts), jnp.float32)
    mask_id = jnp.asarray(corpora.tokenizer.mask_id)

    def look(batch: DeviceBatch) -> tuple[Scores, jax.Array]:
        votes = cast_votes(program, stopping.is_set())
        return program.look(params, batch, votes, unigram, mask_id)

    made = _feed(program, held_out, order, size, steps, config)
    scores = evaluate(look, made)
    if scores is not None:
        log.evaluation(step, scores)
    return scores is not None


def _is_evaluated(config: ConfigDict, held_out: Mix, step: int) -> bool:
    every = config.train.eval_every
    is_due = step > 0 and every > 0 and step % every == 0
    return held_out.num_rows > 0 and (is_due or step == config.train.steps)


def _owes_evaluation(
    config: ConfigDict, held_out: Mix, workdir: Path, step: int
) -> bool:
    """Whether a step's evaluation is due, yet does not stand in metrics.jsonl."""
    is_due = _is_evaluated(config, held_out, step)
    if not is_due:
        return False
    # The others may see a file system's older copy.
    owes = hosts.is_first() and evaluation_at(workdir, step) is None
    return bool(hosts.first_decides(owes))
