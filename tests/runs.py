"""Runs of the tests, in this process or in their own, and what they leave behind."""

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

import toy
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.mixture import mix
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.settings import flatten
from spanbert_jax.training.hosts import Place
from spanbert_jax.training.loop import train

REPOSITORY = Path(__file__).resolve().parents[1]
# Differ between two runs that do the same.
_TIMES = {
    *("seconds", "tokens_per_second", "tokens_per_second_per_device", "step_seconds"),
    *("host_wait", "mfu", "process_peak_bytes"),
    *("device_peak_bytes", "device_limit_bytes"),
}


class Outcome(NamedTuple):
    """How a run in this process ended, and what it printed."""

    code: int
    output: str


class Exit(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    output: str
    errors: str


def build_corpus(directory: Path) -> Corpus:
    """A corpus whose epoch ends within 20 steps of the toy."""
    return toy.build_corpus(directory, toy.make_text(documents=32))


def build_like(corpus: Corpus, directory: Path, text: str, **options: Any) -> Corpus:
    """A corpus of another text with the vocabulary of `corpus`."""
    source = directory.with_suffix(".txt")
    source.write_text(text)
    vocab = corpus.directory / corpus.manifest["tokenizer"]["file"]
    return build(
        BuildOptions(
            output=directory,
            input=(str(source),),
            vocab=vocab,
            runner=Local(1),
            **options,
        )
    )


def make_config(cache: Path, corpus: Corpus) -> ConfigDict:
    """The toy, a layer of it, on one device, with evaluations and checkpoints."""
    config = toy.make_config(cache)
    config.data.corpus = str(corpus.directory)
    config.mesh.data = 1
    config.model.num_layers = 1
    config.train.eval_every = 10
    config.checkpoint.every = 5
    return config


class _Tap(io.StringIO):
    """Keeps what is printed, and shows it to a listener first."""

    def __init__(self, listener: Callable[[str], None]) -> None:
        super().__init__()
        self._listener = listener

    def write(self, text: str) -> int:
        self._listener(text)
        return super().write(text)


def start(
    config: ConfigDict,
    corpus: Corpus,
    workdir: Path,
    listener: Callable[[str], None] = lambda _: None,
    start_from: Callable[[Any], Any] | None = None,
) -> Outcome:
    """Starts a run in this process, and waits for its end."""
    output = _Tap(listener)
    with contextlib.redirect_stdout(output):
        code = train(config, mix([corpus]), workdir, start_from=start_from)
    return Outcome(code, output.getvalue())


def command(config: ConfigDict, workdir: Path) -> list[str]:
    """The command line of a config that derives from configs/default.py."""
    overrides = [f"--config.{name}={value}" for name, value in flatten(config).items()]
    return [
        *(sys.executable, "-m", "spanbert_jax.main", "--config=configs/default.py"),
        *(f"--workdir={workdir}", *overrides),
    ]


def environment(devices: int = 1) -> dict[str, str]:
    """Of a process with some CPU devices; else that of the tests."""
    mine = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    return {**os.environ, **mine}


def launch(arguments: Sequence[str], devices: int = 1) -> subprocess.Popen[str]:
    """Starts a process in the repository."""
    return subprocess.Popen(
        arguments,
        cwd=REPOSITORY,
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_member(
    config: ConfigDict,
    workdir: Path,
    place: Place,
    devices: int = 1,
    options: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Starts one of the processes of a run, with some devices of its own."""
    main = [sys.executable, "-W", "ignore", "tests/member.py"]
    where = [f"--{name}={value}" for name, value in place._asdict().items()]
    return launch([*main, *command(config, workdir)[3:], *where, *options], devices)


def launch_together(
    config: ConfigDict,
    workdir: Path,
    count: int,
    devices: int = 1,
    options: Sequence[str] = (),
) -> list[subprocess.Popen[str]]:
    """Starts the processes of a run."""
    coordinator = f"127.0.0.1:{free_port()}"
    return [
        launch_member(config, workdir, Place(coordinator, count, i), devices, options)
        for i in range(count)
    ]


def wait_for_line(process: subprocess.Popen[str], begin: str) -> str:
    """Reads a process's output up to a line, which it returns with what came before."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(begin):
            return "".join(lines)
    raise AssertionError(f"no line {begin!r} in {lines}: {process.stderr.read()}")


def wait(process: subprocess.Popen[str], seconds: float = 300) -> Exit:
    """Waits for the end of a process."""
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return Exit(process.returncode, output, errors)


# Orders come as lines: a command, and files for what it prints. Answers are lines, too:
# the fork's process, then how it ended.
_FORKS = """
import json, os, runpy, sys, traceback
import flax.linen, jax, ml_collections, optax, orbax.checkpoint, tensorflow
for line in sys.stdin:
    (module, *rest), *files = json.loads(line)
    if not (child := os.fork()):
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        sys.argv = [module, *rest]
        code = 1
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Runs commands one by one, each in a fork of a process that has the libraries.

    A command has a process, streams and an exit code of its own, and starts in half the
    time: importing is the rest.
    """

    def __init__(self, directory: Path) -> None:
        """Starts that process; `directory` holds what the commands print."""
        self._files = [str(directory / name) for name in ("output", "errors")]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _FORKS],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def start(self, arguments: Sequence[str]) -> None:
        """Starts a command: a module and its arguments."""
        order = json.dumps([list(arguments), *self._files])
        self._process.stdin.write(f"{order}\n".encode())
        self._child = int(self._process.stdout.readline())

    def is_running(self) -> bool:
        """Whether the command has not ended yet."""
        return not select.select([self._process.stdout], [], [], 0)[0]

    def kill(self) -> None:
        """Ends the command as `kill -9` does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)

    def wait(self) -> Exit:
        """Waits for the end of the command."""
        code = int(self._process.stdout.readline())
        return Exit(code, *(Path(file).read_text() for file in self._files))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return list(map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()))


def comparable(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records without what differs between two runs that do the same."""
    return [
        {name: value for name, value in record.items() if name not in _TIMES}
        for record in records
    ]


def steps_of(workdir: Path) -> list[int]:
    """The checkpoints of a run."""
    directory = workdir / "checkpoints"
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def read_state(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, by their paths."""
    path = workdir.absolute() / "checkpoints" / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        wanted = ocp.args.PyTreeRestore(restore_args=kinds)
        state = checkpointer.restore(path, args=wanted)
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def read_record(workdir: Path, step: int) -> dict[str, Any]:
    """What a run was when it saved a checkpoint."""
    path = workdir / "checkpoints" / str(step) / "record" / "metadata"
    return json.loads(path.read_text())["run"]


def assert_same_end(one: Path, other: Path, step: int) -> None:
    """Two runs have equal records up to a step, and equal bits of state at it."""
    assert comparable(read_metrics(one)) == comparable(read_metrics(other))
    states = [read_state(workdir, step) for workdir in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name


def listing(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a directory, with its time and content."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(directory.rglob("*"))
    }
