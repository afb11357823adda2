"""Soak: a run that is killed thirty times ends where an unbroken one does."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

import runs
import toy
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.errors import PEER_LOST, PREEMPTED

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("KILLS", "30"))
STEPS = 15 * KILLS
SEED = 0
# A share of the kills falls into the start, before any step.
EARLY = 0.2
_OPTIONS = ["--heartbeat_seconds=10", "--connect_seconds=30"]


class Topology(NamedTuple):
    """Processes of a start, and the devices of each."""

    processes: int
    devices: int


TOPOLOGIES = [Topology(1, n) for n in (1, 2, 4, 8)] + [Topology(2, 1), Topology(2, 2)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return runs.build_corpus(tmp_path_factory.mktemp("corpus") / "short")


@pytest.fixture(scope="module")
def config(toy_cache: Path, corpus: Corpus) -> ConfigDict:
    """One layer of width 32, dropout on, on all devices there are."""
    config = toy.make_config(toy_cache)
    config.data.corpus = str(corpus.directory)
    config.train.steps = STEPS
    config.train.eval_every = STEPS // 4
    config.checkpoint.every = 4
    config.model.num_layers = 1
    config.model.hidden_size = 32
    config.model.intermediate_size = 64
    return config


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, config: ConfigDict) -> Path:
    """The run of one process with two devices, from step 0 to the last."""
    workdir = tmp_path_factory.mktemp("unbroken")
    (done,) = start(config, workdir, Topology(1, 2), kill=None)
    assert done.code == 0, done
    return workdir


class Kill(NamedTuple):
    """When and how a start is to end.

    Attributes:
        signal: SIGKILL or SIGTERM.
        step: whose line to wait for; None: none at all.
        delay: seconds from there.
        victim: which process, modulo their number.
    """

    signal: signal.Signals
    step: int | None
    delay: float
    victim: int


def start(
    config: ConfigDict, workdir: Path, topology: Topology, kill: Kill | None
) -> list[runs.Exit]:
    """Starts the run; kills one of its processes, or lets it come to its end."""
    count, devices = topology
    processes = (
        [runs.launch(runs.command(config, workdir), devices)]
        if count == 1
        else runs.launch_together(config, workdir, count, devices, _OPTIONS)
    )
    seen = ""
    try:
        if kill:
            if kill.step is not None:
                seen = runs.wait_for_line(processes[0], f"step {kill.step:>7,} train")
            time.sleep(kill.delay)
            processes[kill.victim % count].send_signal(kill.signal)
        first, *others = [runs.wait(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [first._replace(output=seen + first.output), *others]


def check_ends(ends: list[runs.Exit], kill: Kill) -> None:
    """Each process ended by the signal, with the code of a save, or for its peer."""
    codes = [done.code for done in ends]
    victim = codes.pop(kill.victim % len(ends))
    if kill.signal == signal.SIGKILL:
        assert victim == -signal.SIGKILL, ends
        assert set(codes) <= {PEER_LOST}, ends
    else:
        # Before the run can save there is nothing to catch the signal for.
        early = kill.step is None
        assert victim in ({PREEMPTED, -signal.SIGTERM} if early else {PREEMPTED}), ends
        assert set(codes) <= {PREEMPTED if victim == PREEMPTED else PEER_LOST}, ends


def plan_kill(
    generator: random.Random, number: signal.Signals, saved: int, slowest: float
) -> Kill:
    """A kill at a random moment: of the start, or some steps behind what is saved."""
    victim = generator.randrange(2)
    if generator.random() < EARLY or saved > STEPS - 12:
        return Kill(number, None, generator.uniform(0, slowest), victim)
    step = saved + generator.randint(1, 10)
    return Kill(number, step, generator.uniform(0, 0.1), victim)


def soak(
    config: ConfigDict, workdir: Path, choose: Callable[[random.Random], Topology]
) -> None:
    """Kills the run `KILLS` times, with a line of the log each; then lets it end."""
    generator = random.Random(SEED)
    signals = [signal.SIGKILL, signal.SIGTERM] * (KILLS // 2)
    generator.shuffle(signals)
    began, saved = time.monotonic(), 0
    print(f"\n{KILLS} kills of {STEPS} steps, seed {SEED}")
    for count, number in enumerate(signals, 1):
        topology = choose(generator)
        kill = plan_kill(generator, number, saved, slowest=8.0)
        ends = start(config, workdir, topology, kill)
        check_ends(ends, kill)
        steps = re.findall(r"^step +([\d,]+) train", ends[0].output, re.MULTILINE)
        if steps and saved:
            assert f"resuming from step {saved} " in ends[0].output
        reached = int(steps[-1].replace(",", "")) if steps else None
        saved = max(runs.steps_of(workdir), default=0) if workdir.exists() else 0
        print(
            f"kill {count:>2} after {time.monotonic() - began:6.1f} s: {number.name} to"
            f" process {kill.victim % topology.processes} of {topology.processes} x"
            f" {topology.devices} devices, reached step {reached}, saved {saved}",
            flush=True,
        )
    for done in start(config, workdir, choose(generator), kill=None):
        assert done.code == 0, done
    print(f"finished after {time.monotonic() - began:.1f} s")


def test_a_run_on_the_same_devices_ends_with_the_same_bits(
    config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    soak(config, tmp_path / "run", lambda _: Topology(1, 2))
    runs.assert_same_end(tmp_path / "run", unbroken, STEPS)


def test_a_run_on_other_devices_at_each_start_ends_alike(
    config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    soak(config, tmp_path / "run", lambda generator: generator.choice(TOPOLOGIES))
    found, expected = map(runs.read_metrics, (tmp_path / "run", unbroken))
    worst = {"train": 0.0, "valid": 0.0}
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("step", "split", "batch_checksum"):
            assert mine.get(name) == theirs.get(name)
        off = abs(mine["loss"] / theirs["loss"] - 1)
        worst[mine["split"]] = max(worst[mine["split"]], off)
    print(f"largest relative differences of the loss: {worst}")
    assert worst["train"] <= 1e-3
    assert found[-1]["split"] == "valid"
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.01)
