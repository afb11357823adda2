"""The command: configs, flags, exit codes; runs whose processes end or are killed."""

import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import runs
import toy
from spanbert_jax import settings
from spanbert_jax.corpus.store import Corpus

CONFIGS = sorted(
    path.stem
    for path in (runs.REPOSITORY / "configs").glob("*.py")
    if path.stem != "__init__"
)
STEPS = 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return runs.build_corpus(tmp_path_factory.mktemp("corpus") / "short")


@pytest.fixture(scope="module")
def config(toy_cache: Path, corpus: Corpus) -> ConfigDict:
    """Saves so often that a kill falls into a save."""
    config = runs.make_config(toy_cache, corpus)
    config.checkpoint.every = 1
    return config


def complaints(done: runs.Exit) -> list[str]:
    """The lines of the standard error, without orbax's warnings.

    It warns when a save is slow, and of what a killed save left behind.
    """
    lines = done.errors.splitlines()
    return [line for line in lines if not re.match(r"W\d{4} .*\] ", line)]


def assert_done(done: runs.Exit, code: int = 0) -> None:
    assert (done.code, complaints(done)) == (code, [])


def assert_failed(done: runs.Exit, code: int, message: str) -> None:
    """One sentence on the standard error, nothing to decode."""
    assert done.code == code, done
    lines = complaints(done)
    assert len(lines) == 1, done.errors
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0]), lines


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, config: ConfigDict) -> Path:
    workdir = tmp_path_factory.mktemp("unbroken")
    done = runs.wait(runs.launch(runs.command(config, workdir)))
    assert_done(done)
    assert f"finished at step {STEPS}" in done.output
    return workdir


# ---- Configs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_valid_and_says_how_to_use_it(name: str) -> None:
    module = importlib.import_module(f"configs.{name}")
    settings.validate(module.get_config())
    text = module.__doc__.replace("\\\n", " ")
    command = f"python -m spanbert_jax.main --config=configs/{name}.py"
    assert command in text
    assert "--workdir=" in text


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_knobs_of_the_default_and_no_other(name: str) -> None:
    default = importlib.import_module("configs.default").get_config()
    config = importlib.import_module(f"configs.{name}").get_config()
    assert settings.flatten(config).keys() == settings.flatten(default).keys()
    for knob, value in settings.flatten(config).items():
        assert type(value) is type(settings.flatten(default)[knob]), knob


# ---- Faults that are found before any training

MAIN = "spanbert_jax.main"
_TINY = "--config=configs/tiny.py"
_WORKDIR = "--workdir={directory}/run"
_TRAIN = [MAIN, _TINY, _WORKDIR]
FAULTS = {
    "an unknown setting": (
        [*_TRAIN, "--config.train.stepz=3"],
        "stepz",
    ),
    "an unknown block": ([*_TRAIN, "--config.trian.steps=3"], "trian"),
    "a word for a number": (
        [*_TRAIN, "--config.train.steps=abc"],
        r"train\.steps.*abc",
    ),
    "a fraction for a whole number": (
        [*_TRAIN, "--config.train.steps=1.5"],
        r"train\.steps.*1\.5",
    ),
    "a word for a truth value": (
        [*_TRAIN, "--config.data.packing=maybe"],
        r"data\.packing.*maybe",
    ),
    "an unknown flag": ([*_TRAIN, "--workdri=x"], "workdri"),
    "an argument without a flag": ([*_TRAIN, "train"], "'train'"),
    "no work directory": ([MAIN, _TINY], "--workdir"),
    "no config": ([MAIN, _WORKDIR], "--config"),
    "a config that is not there": (
        [MAIN, "--config=configs/nothing.py", _WORKDIR],
        r"nothing\.py",
    ),
    "no corpus": (
        [MAIN, "--config=configs/small.py", _WORKDIR],
        r"data\.corpus.*python -m spanbert_jax\.prepare.*--output",
    ),
    "a corpus that is not there": (
        [*_TRAIN, "--config.data.corpus={directory}/nothing"],
        r"data\.corpus=.*nothing.*python -m spanbert_jax\.prepare",
    ),
    "blocks beyond the position table": (
        [
            MAIN,
            "--config=configs/default.py",
            _WORKDIR,
            "--config.data.block_length=1024",
        ],
        r"data\.block_length is 1024.*model\.max_positions.*512",
    ),
    "a warm-up beyond the end": (
        [*_TRAIN, "--config.train.steps=50", "--config.optimizer.warmup_steps=100"],
        r"optimizer\.warmup_steps is 100.*train\.steps.*50",
    ),
    "heads that do not divide the width": (
        [*_TRAIN, "--config.model.num_heads=3"],
        r"model\.hidden_size is 128.*model\.num_heads.*3",
    ),
    "a rate that is no number": (
        [*_TRAIN, "--config.optimizer.learning_rate=nan"],
        r"optimizer\.learning_rate is nan",
    ),
    "a rate without end": (
        [*_TRAIN, "--config.optimizer.learning_rate=inf"],
        r"optimizer\.learning_rate is inf",
    ),
    "an unknown masking": (
        [*_TRAIN, "--config.data.masking=spam"],
        r"data\.masking is 'spam'.*span, ",
    ),
    "more devices than there are": (
        [
            *_TRAIN,
            "--config.data.corpus={corpus}",
            "--config.mesh.data=3",
            "--config.data.cache={directory}/cache",
        ],
        r"mesh\.data=3 .* is 3 devices, but there are 1; ",
    ),
    "a work directory in a bucket": (
        [MAIN, _TINY, "--workdir=gs://bucket/run"],
        r"--workdir=gs://bucket/run is a URL; mount the bucket",
    ),
    "half a place among processes": (
        [*_TRAIN, "--coordinator=localhost:8476", "--process_id=0"],
        r"--coordinator=.* and --process_id=0 without --num_processes",
    ),
    "two ways to find the processes": (
        [
            *_TRAIN,
            "--distributed",
            "--coordinator=localhost:8476",
            "--num_processes=1",
            "--process_id=0",
        ],
        r"--distributed finds out what --coordinator",
    ),
    "no cluster": ([*_TRAIN, "--distributed"], r"--distributed: jax finds no cluster"),
    "a port that cannot be": (
        [
            *_TRAIN,
            "--coordinator=localhost:99999",
            "--num_processes=2",
            "--process_id=0",
        ],
        r"--coordinator=localhost:99999: process 0 cannot listen there",
    ),
    "a vocabulary without [MASK]": (
        [
            "spanbert_jax.prepare",
            "--input={directory}/text",
            "--output={directory}/c",
            "--vocab={directory}/vocab",
        ],
        r"\[MASK\]",
    ),
}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Forks]:
    with contextlib.closing(runs.Forks(tmp_path_factory.mktemp("forks"))) as forks:
        yield forks


@pytest.fixture(scope="module")
def faults(
    tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, forks: runs.Forks
) -> tuple[Path, dict[str, runs.Exit]]:
    """What came of each of the commands of `FAULTS`, and the directory they got."""
    directory = tmp_path_factory.mktemp("faults")
    (directory / "text").write_text(toy.make_text(documents=5))
    vocab = corpus.directory / corpus.manifest["tokenizer"]["file"]
    (directory / "vocab").write_text(vocab.read_text().replace("[MASK]", "[other]"))
    places = {"directory": directory, "corpus": corpus.directory}
    ends = {}
    for name, (arguments, _) in FAULTS.items():
        forks.start([argument.format(**places) for argument in arguments])
        ends[name] = forks.wait()
    return directory, ends


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_exit_code_2(
    faults: tuple[Path, dict[str, runs.Exit]], name: str
) -> None:
    assert_failed(faults[1][name], 2, FAULTS[name][1])


def test_a_fault_leaves_no_work_directory(
    faults: tuple[Path, dict[str, runs.Exit]],
) -> None:
    assert not (faults[0] / "run").exists()
    assert not (faults[0] / "c").exists()


def test_weights_that_are_not_there_are_a_fault(
    forks: runs.Forks, config: ConfigDict, tmp_path: Path
) -> None:
    changed = config.copy_and_resolve_references()
    changed.init_from = str(tmp_path / "nothing")
    forks.start(runs.command(changed, tmp_path / "run")[2:])
    assert_failed(forks.wait(), 2, "init_from=.*nothing")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


# ---- The demo's corpus


@pytest.mark.slow
def test_the_embedded_corpus_is_made_once_and_trains(
    config: ConfigDict, tmp_path: Path
) -> None:
    changed = config.copy_and_resolve_references()
    changed.data.corpus = "embedded"
    changed.data.cache = str(tmp_path / "cache")
    changed.train.stop_after = 2
    workdir = tmp_path / "run"
    first = runs.wait(runs.launch(runs.command(changed, workdir)))
    assert_done(first)
    assert runs.steps_of(workdir) == [1, 2]
    (made,) = (tmp_path / "cache" / "corpora").iterdir()
    before = runs.listing(made)
    second = runs.wait(runs.launch(runs.command(changed, workdir)))
    assert_done(second)
    assert "resuming from step 2 " in second.output
    assert list((tmp_path / "cache" / "corpora").iterdir()) == [made]
    assert runs.listing(made) == before


# ---- Processes that end


@pytest.mark.slow
def test_a_run_of_two_processes_equals_one_of_one(
    config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    for stop in (10, 0):
        changed = config.copy_and_resolve_references()
        changed.train.stop_after = stop
        done = runs.wait(runs.launch(runs.command(changed, tmp_path)))
        assert_done(done)
    assert "resuming from step 10 " in done.output
    runs.assert_same_end(tmp_path, unbroken, STEPS)


@pytest.mark.slow
def test_sigterm_saves_in_time_and_the_same_command_goes_on(
    config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    process = runs.launch(runs.command(config, tmp_path))
    runs.wait_for_line(process, "step       8 train")
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    stopped = runs.wait(process)
    assert time.monotonic() - begin < 30
    assert_done(stopped, code=75)
    saved = runs.steps_of(tmp_path)[-1]
    assert f"step {saved} is saved: run the same command again" in stopped.output
    assert saved < STEPS
    finished = runs.wait(runs.launch(runs.command(config, tmp_path)))
    assert_done(finished)
    assert f"resuming from step {saved} " in finished.output
    runs.assert_same_end(tmp_path, unbroken, STEPS)


# ---- Processes that are killed


def _kill_in_a_save(
    forks: runs.Forks, workdir: Path, step: int, generator: random.Random
) -> None:
    """Kills a run at a random moment of the save of a step or soon after it."""
    checkpoints = workdir / "checkpoints"
    before = set(os.listdir(checkpoints)) if checkpoints.exists() else set()
    while forks.is_running():
        new = set(os.listdir(checkpoints)) - before if checkpoints.exists() else set()
        if any(int(name.split(".")[0]) >= step for name in new):
            # A save takes some tens of milliseconds.
            time.sleep(generator.uniform(0, 0.08))
            break
        time.sleep(0.0005)
    forks.kill()


def _check_kills(
    forks: runs.Forks,
    config: ConfigDict,
    unbroken: Path,
    workdir: Path,
    steps: Sequence[int],
    seed: int,
) -> None:
    _, _, *arguments = runs.command(config, workdir)
    generator = random.Random(seed)
    saved: list[int] = []
    for step in [*steps, None]:
        forks.start(arguments)
        if step:
            _kill_in_a_save(forks, workdir, step, generator)
        done = forks.wait()
        assert done.code == (-signal.SIGKILL if step else 0), done
        says = [
            line
            for line in done.output.splitlines()
            if line.startswith(("resuming from step", "no finished step"))
        ]
        checkpoints = workdir / "checkpoints"
        if saved:
            assert says == [f"resuming from step {saved[-1]} in {checkpoints}"]
        else:
            assert says == [f"no finished step in {checkpoints}: starting at step 0"]
        saved = runs.steps_of(workdir)
        assert not step or saved[-1:] >= [step - 1]
    runs.assert_same_end(workdir, unbroken, STEPS)
    assert saved == [18, 19, 20]


def test_a_run_killed_three_times_equals_an_unbroken_one(
    forks: runs.Forks, config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    _check_kills(forks, config, unbroken, tmp_path, steps=[2, 7, 12], seed=0)


@pytest.mark.slow
def test_a_run_killed_seventeen_times_equals_an_unbroken_one(
    forks: runs.Forks, config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    _check_kills(forks, config, unbroken, tmp_path, steps=[*range(2, 18), 17], seed=1)


# ---- Broken storage


def test_broken_checkpoints_are_one_sentence_and_exit_code_4(
    config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    workdir = Path(shutil.copytree(unbroken, tmp_path / "run"))
    for step in runs.steps_of(workdir):
        for path in (workdir / "checkpoints" / str(step) / "state").rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
    done = runs.wait(runs.launch(runs.command(config, workdir)))
    assert_failed(done, 4, "no checkpoint in .* is valid: step 20: .*step 18: ")


@pytest.mark.slow
def test_a_non_finite_loss_is_one_sentence_and_exit_code_3(
    config: ConfigDict, tmp_path: Path
) -> None:
    changed = config.copy_and_resolve_references()
    changed.optimizer.learning_rate = 1e30
    done = runs.wait(runs.launch(runs.command(changed, tmp_path)))
    assert_failed(done, 3, r"\w+ is (nan|inf) at step \d+; ")


@contextlib.contextmanager
def mounted(arguments: list[str], directory: Path) -> Iterator[None]:
    """A file system on a directory, for a while; skips where that is not permitted."""
    mount = ["mount", *arguments]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture(scope="module")
def full_disk(
    tmp_path_factory: pytest.TempPathFactory, config: ConfigDict
) -> tuple[runs.Exit, Path, Path]:
    """A run whose disk ran full: its end, its directory, and a copy of that."""
    disk = tmp_path_factory.mktemp("disk")
    # Room for some of the checkpoints, which are all kept.
    with mounted(["-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], disk):
        changed = config.copy_and_resolve_references()
        changed.checkpoint.keep = STEPS
        done = runs.wait(runs.launch(runs.command(changed, disk)))
        return done, disk, Path(shutil.copytree(disk, disk.with_name("copy")))


@pytest.mark.slow
def test_a_full_disk_leaves_a_run_that_can_go_on(
    full_disk: tuple[runs.Exit, Path, Path], config: ConfigDict, unbroken: Path
) -> None:
    done, disk, workdir = full_disk
    assert done.code == 4
    assert f"error: a checkpoint could not be written to {disk}" in done.errors
    saved = runs.steps_of(workdir)
    assert 0 < len(saved) < STEPS
    finished = runs.wait(runs.launch(runs.command(config, workdir)))
    assert_done(finished)
    assert f"resuming from step {saved[-1]} " in finished.output
    runs.assert_same_end(workdir, unbroken, STEPS)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_exit_code_4(
    full_disk: tuple[runs.Exit, Path, Path],
) -> None:
    done, disk, _ = full_disk
    assert_failed(done, 4, f"a checkpoint could not be written to {disk}")


@pytest.mark.slow
def test_a_disk_that_is_read_only_ends_a_run_at_its_save(
    config: ConfigDict, unbroken: Path, tmp_path: Path
) -> None:
    """Of the storage alone: nothing that is there is touched, and the run can go on."""
    workdir = tmp_path / "run"
    first = config.copy_and_resolve_references()
    first.train.stop_after = STEPS // 2
    assert_done(runs.wait(runs.launch(runs.command(first, workdir))))
    checkpoints = workdir / "checkpoints"
    saved = runs.listing(checkpoints)
    with mounted(["--bind", str(checkpoints), str(checkpoints)], checkpoints):
        remount = ["mount", "-o", "remount,ro,bind", str(checkpoints)]
        subprocess.run(remount, check=True)
        done = runs.wait(runs.launch(runs.command(config, workdir)))
    assert done.code == 4
    assert_failed(done, 4, f"a checkpoint could not be written to {checkpoints}")
    assert "Read-only file system" in done.errors
    assert runs.listing(checkpoints) == saved
    finished = runs.wait(runs.launch(runs.command(config, workdir)))
    assert_done(finished)
    assert f"resuming from step {STEPS // 2} " in finished.output
    runs.assert_same_end(workdir, unbroken, STEPS)
