"""Hosts: several processes are one run, and end together."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

import runs
import toy
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.errors import BAD_INPUT, PEER_LOST, PREEMPTED, InputError, PeerError
from spanbert_jax.training import hosts
from spanbert_jax.training.hosts import Place, make_place

STEPS = 12
# The order of sums differs with the cut of a batch; float32 has 6e-8 a rounding.
TOLERANCE = 1e-5
# Of the flag's least value: the end of a process is noticed within it.
HEARTBEAT = "--heartbeat_seconds=10"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return runs.build_corpus(tmp_path_factory.mktemp("corpus") / "short")


def make_config(cache: Path, corpus: Corpus, **mesh: int) -> ConfigDict:
    """One layer of width 32 on all devices there are, or on a mesh."""
    config = toy.make_config(cache)
    config.data.corpus = str(corpus.directory)
    # A schedule that is far from its end: a run can be stopped early or go on.
    config.train.steps = 100_000
    config.train.stop_after = STEPS
    config.train.eval_every = 6
    config.checkpoint.every = 4
    config.model.num_layers = 1
    config.model.hidden_size = 32
    config.model.intermediate_size = 64
    config.mesh.update(mesh)
    return config


@pytest.fixture
def config(toy_cache: Path, corpus: Corpus) -> ConfigDict:
    return make_config(toy_cache, corpus)


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, corpus: Corpus
) -> Path:
    """The run of one process with two devices, which stopped once in between."""
    workdir = tmp_path_factory.mktemp("alone")
    config = make_config(toy_cache, corpus, data=2)
    for stop in (4, STEPS):
        config.train.stop_after = stop
        assert runs.start(config, corpus, workdir).code == 0
        if stop == 4:
            shutil.copytree(workdir, _beginning(workdir))
    return workdir


def _beginning(workdir: Path) -> Path:
    """Where a run lies as it was after its fourth step."""
    return workdir.with_name(f"{workdir.name}-4")


def end(processes: Sequence[subprocess.Popen[str]]) -> list[runs.Exit]:
    """Waits for the end of all; none outlives a test that fails."""
    try:
        return [runs.wait(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


def errors_of(done: runs.Exit) -> list[str]:
    """The lines of the standard error, without orbax's warnings."""
    lines = done.errors.splitlines()
    return [line for line in lines if not re.match(r"W\d{4} .*\] ", line)]


def assert_lost_its_peer(done: runs.Exit) -> None:
    """One sentence and its code: no abort, no page of C++."""
    assert done.code == PEER_LOST, done
    (line,) = errors_of(done)
    assert re.match("error: another process of the run has ended", line)


def assert_same_run(workdir: Path, other: Path, last: int = STEPS) -> None:
    """Up to a step equal batches, and losses as near as sums allow."""
    mine, theirs = (
        [record for record in runs.read_metrics(each) if record["step"] <= last]
        for each in (workdir, other)
    )
    assert mine[-1]["step"] == last
    for one, another in zip(mine, theirs, strict=True):
        for name in ("step", "split", "batch_checksum"):
            assert one.get(name) == another.get(name)
        assert one["loss"] == pytest.approx(another["loss"], rel=TOLERANCE)


# ---- Two processes


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, corpus: Corpus
) -> tuple[Path, list[runs.Exit]]:
    """A run of two processes, of which the second was told to stop; and their ends."""
    workdir = tmp_path_factory.mktemp("together")
    processes = runs.launch_together(make_config(toy_cache, corpus), workdir, 2)
    try:
        runs.wait_for_line(processes[0], "step       5 train")
        processes[1].send_signal(signal.SIGTERM)
    finally:
        ends = end(processes)
    return workdir, ends


def test_a_signal_to_one_process_stops_all_at_one_step(
    stopped: tuple[Path, list[runs.Exit]],
) -> None:
    workdir, ends = stopped
    assert [done.code for done in ends] == [PREEMPTED, PREEMPTED], ends
    assert [errors_of(done) for done in ends] == [[], []]
    step = runs.steps_of(workdir)[-1]
    assert 5 <= step < STEPS
    assert f"step {step} is saved: run the same command again" in ends[0].output
    # Only the first talks; what gloo says comes from C++.
    assert not re.sub(r"\[Gloo\].*\n", "", ends[1].output)
    assert len(list(workdir.glob("events*"))) == 1


def test_two_processes_go_on_past_a_broken_step_to_the_same_end(
    stopped: tuple[Path, list[runs.Exit]],
    config: ConfigDict,
    alone: Path,
    tmp_path: Path,
) -> None:
    workdir = Path(shutil.copytree(stopped[0], tmp_path / "run"))
    step = runs.steps_of(workdir)[-1]
    shutil.rmtree(workdir / "checkpoints" / str(step) / "state")
    ends = end(runs.launch_together(config, workdir, 2))
    assert [done.code for done in ends] == [0, 0], ends
    assert f"checkpoint {step} cannot be read" in ends[0].output
    assert "resuming from step 4 " in ends[0].output
    assert os.listdir(workdir / "broken") == [str(step)]
    assert_same_run(workdir, alone)


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_one_process_goes_on_where_two_stopped(
    stopped: tuple[Path, list[runs.Exit]],
    config: ConfigDict,
    corpus: Corpus,
    alone: Path,
    tmp_path: Path,
    devices: int,
) -> None:
    workdir = Path(shutil.copytree(stopped[0], tmp_path / "run"))
    config.mesh.data = devices
    outcome = runs.start(config, corpus, workdir)
    assert outcome.code == 0
    assert f"resuming from step {runs.steps_of(stopped[0])[-1]} " in outcome.output
    assert_same_run(workdir, alone)


@pytest.mark.parametrize(
    ("victim", "mesh"),
    [
        (0, {}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(0, {"data": 1, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param(1, {"data": 1, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_process_ends_the_other_with_one_sentence(
    config: ConfigDict, alone: Path, tmp_path: Path, victim: int, mesh: dict[str, int]
) -> None:
    workdir = Path(shutil.copytree(_beginning(alone), tmp_path / "run"))
    config.mesh.update(mesh)
    config.train.stop_after = 0
    processes = runs.launch_together(config, workdir, 2, options=[HEARTBEAT])
    try:
        seen = runs.wait_for_line(processes[0], "step       8 train")
        processes[victim].kill()
        begin = time.monotonic()
    finally:
        ends = end(processes)
    assert "resuming from step 4 " in seen
    assert time.monotonic() - begin < 30
    assert ends[victim].code == -signal.SIGKILL
    assert_lost_its_peer(ends[1 - victim])
    assert_same_run(workdir, alone, last=8)


@pytest.mark.slow
def test_a_process_that_falls_silent_ends_the_other(
    config: ConfigDict, tmp_path: Path
) -> None:
    config.train.stop_after = 0
    processes = runs.launch_together(config, tmp_path, 2, options=[HEARTBEAT])
    try:
        runs.wait_for_line(processes[0], "step       5 train")
        # Its connections stay open: as if its machine had lost power.
        processes[1].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        left = runs.wait(processes[0])
    finally:
        processes[1].kill()
        end(processes)
    assert time.monotonic() - begin < 30
    assert_lost_its_peer(left)


@pytest.mark.slow
def test_a_signal_to_all_at_different_moments_stops_all_at_one_step(
    config: ConfigDict, tmp_path: Path
) -> None:
    config.train.stop_after = 0
    processes = runs.launch_together(config, tmp_path, 2)
    try:
        runs.wait_for_line(processes[0], "step       5 train")
        for process in processes:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
    finally:
        ends = end(processes)
    assert [done.code for done in ends] == [PREEMPTED, PREEMPTED], ends
    assert f"step {runs.steps_of(tmp_path)[-1]} is saved" in ends[0].output


@pytest.mark.slow
def test_a_process_with_another_setting_is_refused(
    config: ConfigDict, tmp_path: Path
) -> None:
    coordinator = f"127.0.0.1:{runs.free_port()}"
    places = [Place(coordinator, 2, i) for i in range(2)]
    options = ([], ["--config.optimizer.learning_rate=0.5"])
    processes = [
        runs.launch_member(config, tmp_path, place, options=changed)
        for place, changed in zip(places, options, strict=True)
    ]
    for done in end(processes):
        assert done.code == BAD_INPUT, done
        (line,) = errors_of(done)
        assert "optimizer.learning_rate is 0.001 in process 0 and 0.5 in" in line


@pytest.mark.slow
def test_processes_that_share_no_directory_are_refused(
    config: ConfigDict, tmp_path: Path
) -> None:
    coordinator = f"127.0.0.1:{runs.free_port()}"
    processes = [
        runs.launch_member(config, tmp_path / str(i), Place(coordinator, 2, i))
        for i in range(2)
    ]
    for done in end(processes):
        assert done.code == BAD_INPUT, done
        (line,) = errors_of(done)
        assert re.search(r"--workdir=\S+ is not the same directory", line)


# ---- Four processes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 1, "fsdp": 2, "tensor": 2}])
def test_four_processes_go_on_where_two_stopped_and_one_where_they_end(
    stopped: tuple[Path, list[runs.Exit]],
    config: ConfigDict,
    corpus: Corpus,
    alone: Path,
    tmp_path: Path,
    mesh: dict[str, int],
) -> None:
    workdir = Path(shutil.copytree(stopped[0], tmp_path / "run"))
    config.mesh.update(mesh)
    config.train.stop_after = 10
    ends = end(runs.launch_together(config, workdir, 4))
    assert [done.code for done in ends] == [0] * 4, ends
    assert_same_run(workdir, alone, last=10)
    config.mesh.update({"data": 1, "fsdp": 1, "tensor": 1})
    config.train.stop_after = STEPS
    assert runs.start(config, corpus, workdir).code == 0
    assert_same_run(workdir, alone)


@pytest.mark.slow
def test_processes_told_different_numbers_say_so_and_end(
    config: ConfigDict, tmp_path: Path
) -> None:
    coordinator = f"127.0.0.1:{runs.free_port()}"
    places = [Place(coordinator, 2, 0), Place(coordinator, 3, 1)]
    ends = end([runs.launch_member(config, tmp_path, place) for place in places])
    assert ends[1].code == BAD_INPUT, ends
    (line,) = errors_of(ends[1])
    assert "--num_processes=3, but 2 processes have met" in line
    assert_lost_its_peer(ends[0])


def test_a_process_that_waits_in_vain_says_for_whom_and_ends(
    config: ConfigDict, tmp_path: Path
) -> None:
    place = Place(f"127.0.0.1:{runs.free_port()}", 2, 0)
    options = ["--connect_seconds=2"]
    (done,) = end([runs.launch_member(config, tmp_path, place, options=options)])
    assert done.code == PEER_LOST, done
    (line,) = errors_of(done)
    assert re.match("error: process 0 of 2 has not met all others .* 2 seconds", line)


# ---- One process


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("h:1", 2, None), r"--coordinator=h:1 and --num_processes=2 without --proc"),
        ((None, None, 1), r"--process_id=1 without --coordinator and --num_processes"),
        (("h", 2, 0), r"--coordinator=h must be HOST:PORT"),
        (("h:1", 0, 0), r"--num_processes=0 must be at least 1"),
        (("h:1", 2, 2), r"--process_id=2 must be from 0 to 1.*--num_processes is 2"),
        (("h:1", 2, -1), r"--process_id=-1 must be from 0 to 1"),
    ],
)
def test_a_place_is_all_of_its_flags(flags: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_place(*flags)


def test_no_flag_is_no_place() -> None:
    assert make_place(None, None, None) is None
    assert make_place("h:1", 2, 1) == Place("h:1", 2, 1)


@pytest.mark.parametrize("text", ["", "a", "é" * 700])
def test_what_the_first_says_and_a_fault_are_told_to_all(text: str) -> None:
    assert hosts.first_says(text) == text
    assert text.startswith(hosts.first_fault(text))
    assert bool(hosts.first_fault(text)) == bool(text)


@pytest.mark.parametrize(
    ("said", "is_loss"),
    [
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", True),
        ("Timed out while waiting for async_write_complete barrier.", True),
        ("UNAVAILABLE: Failed to send RPC to coordination service", True),
        ("[Errno 28] No space left on device", False),
        ("[Errno 11] Resource temporarily unavailable", False),
    ],
)
def test_an_error_is_told_from_the_end_of_another_process(
    monkeypatch: pytest.MonkeyPatch, said: str, is_loss: bool
) -> None:
    assert hosts.peer_error(ValueError(said)) is None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = hosts.peer_error(ValueError(said))
    assert isinstance(found, PeerError) if is_loss else found is None


# ---- The guard

_ABORTS = """
import os, sys
from spanbert_jax.errors import PeerError
from spanbert_jax.training.guard import Guard
guard = Guard(lambda said: PeerError("it is gone"))
os.write(2, b"W1130 12:00:00 1 other.cc:1] a warning\\n")
print("python", file=sys.stderr)
os.write(2, b"F1130 12:00:00 1 client.h:80] {why}\\n    @ 0x1 a line of a stack\\n")
os.abort()
"""


def abort(why: str) -> runs.Exit:
    return runs.wait(runs.launch([sys.executable, "-c", _ABORTS.replace("{why}", why)]))


def test_an_abort_over_a_lost_process_is_one_sentence() -> None:
    done = abort("the JAX distributed service detected fatal errors")
    assert done.code == PEER_LOST
    lines = ["W1130 12:00:00 1 other.cc:1] a warning", "error: it is gone", "python"]
    assert sorted(done.errors.splitlines()) == lines


def test_an_abort_over_something_else_is_shown_as_it_is() -> None:
    done = abort("Check failed: ok")
    assert done.code == -signal.SIGABRT
    assert "Check failed: ok\n    @ 0x1 a line of a stack\n" in done.errors
