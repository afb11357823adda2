"""Runners: one function over the parts of a text, on local processes or on Beam.

The function leaves its result as files in a directory and returns nothing, so that it
does not matter who calls it, where, or how often: a finished part is never done again,
and the files are the same whichever way they were made.
"""

import abc
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import fsspec
from tqdm import tqdm

import spanbert_jax
from spanbert_jax.corpus import store
from spanbert_jax.errors import InputError, UserError

_SECONDS_BETWEEN_LINES = 10.0
_FAILED_SUFFIX = ".failed.json"
_INSTALL_BEAM = "pip install 'apache-beam[gcp]' (without [gcp] for other runners)"


class Task(abc.ABC):
    """A part of the work; it travels to other processes and machines."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Its share of the work, in bytes of text."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of files or directories that it reads, in the same directory."""
        return ()

    @property
    @abc.abstractmethod
    def marker(self) -> str:
        """The name of the file that it makes last."""


# Does a task in a directory.
Work = Callable[[Task, Path], None]


class Runner(Protocol):
    """Does all tasks; raises what the work raises."""

    def __call__(self, job: "Job", tasks: Sequence[Task], directory: Path) -> None:
        """Does the tasks of a job whose files lie in a directory."""


@dataclass(frozen=True)
class Job:
    """What there is to do with tasks.

    Attributes:
        title: what its progress is called.
        work: a function of a module, which other processes can import.
        key: names all that decides the results, to tell them from those of other jobs.
    """

    title: str
    work: Work
    key: str


@dataclass(frozen=True)
class Local:
    """Runs tasks on this machine.

    Attributes:
        workers: processes; 1 works in this one.
    """

    workers: int

    def __call__(self, job: Job, tasks: Sequence[Task], directory: Path) -> None:
        """Does all tasks, begun in their order.

        Args:
            job: what to do with each.
            tasks: those that are left to do.
            directory: where the files are.

        Raises:
            BrokenProcessPool: a worker was killed.
        """
        with _Progress(job.title, sum(task.size for task in tasks)) as progress:
            if self.workers == 1 or len(tasks) < 2:
                for task in tasks:
                    job.work(task, directory)
                    progress.advance(task.size)
            else:
                self._share_out(job.work, tasks, directory, progress)

    def _share_out(
        self,
        work: Work,
        tasks: Sequence[Task],
        directory: Path,
        progress: "_Progress",
    ) -> None:
        pool = _start_pool(min(self.workers, len(tasks)))
        try:
            sizes = {pool.submit(work, task, directory): task.size for task in tasks}
            for future in as_completed(sizes):
                future.result()
                progress.advance(sizes[future])
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Beam:
    """Runs tasks on Apache Beam, and so on Dataflow, Spark, Flink or this machine.

    Attributes:
        runner: as Beam's --runner.
        options: further pipeline options, such as "--project=mine".
        stage: a directory, local or a URL, that this machine and all workers can write
            to; "" where the workers have this machine's file system.
    """

    runner: str
    options: tuple[str, ...] = ()
    stage: str = ""

    def check(self) -> None:
        """Refuses what cannot run.

        Raises:
            InputError: Beam is not installed, does not know the runner or an option,
                or the workers could not reach the files.
        """
        try:
            from apache_beam.options.pipeline_options import PipelineOptions
            from apache_beam.runners import create_runner
        except ImportError as error:
            raise InputError(
                f"--runner={self.runner} needs Apache Beam: {_INSTALL_BEAM}"
            ) from error
        try:
            create_runner(self.runner)
            PipelineOptions(list(self.options)).get_all_options()
        except (ValueError, SystemExit) as error:
            raise InputError(
                f"--runner={self.runner} with --beam_option={list(self.options)}: Beam"
                f" refuses it: {error}"
            ) from error
        if "dataflow" in self.runner.lower() and "://" not in self.stage:
            raise InputError(
                f"--stage={self.stage} must be a URL that the machines of"
                f" --runner={self.runner} can write to, such as gs://bucket/stage"
            )

    def __call__(self, job: Job, tasks: Sequence[Task], directory: Path) -> None:
        """Does all tasks, in any order; arguments as for `Local`.

        Raises:
            UserError: what the work raised, on whichever machine.
        """
        if not tasks:
            return
        print(f"{job.title}: {len(tasks):,} parts on {self.runner}", flush=True)
        for stale in directory.glob(f"*{_FAILED_SUFFIX}"):
            stale.unlink()
        # What another job left on the stage must not pass for this one's.
        stage = f"{self.stage.rstrip('/')}/{job.key}" if self.stage else ""
        inputs = {name for task in tasks for name in task.inputs}
        if stage:
            _copy_up(directory, stage, inputs)
        _run_pipeline(
            functools.partial(
                do_on_beam, work=job.work, directory=directory, stage=stage
            ),
            tasks,
            [f"--runner={self.runner}", *self.options],
        )
        if stage:
            _copy_down(stage, directory, inputs, {task.marker for task in tasks})
        for path in sorted(directory.glob(f"*{_FAILED_SUFFIX}")):
            failure = store.read_json(path)
            path.unlink()
            raise _user_error(failure)


def do_on_beam(task: Task, work: Work, directory: Path, stage: str) -> None:
    """Does a task on a worker; what its user can mend is written down, not raised.

    Beam tries again what raises, and wraps it in its own errors.
    """
    if not stage:
        _do_and_record(task, work, directory)
        return
    files, root = fsspec.url_to_fs(stage)
    if files.exists(f"{root}/{task.marker}"):
        return
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        for input_name in task.inputs:
            files.get(f"{root}/{input_name}", str(local / input_name), recursive=True)
        _do_and_record(task, work, local)
        made = [path for path in local.iterdir() if path.name not in task.inputs]
        for path in sorted(made, key=lambda path: path.name == task.marker):
            files.put_file(str(path), f"{root}/{path.name}")


def _do_and_record(task: Task, work: Work, directory: Path) -> None:
    try:
        work(task, directory)
    except UserError as error:
        failure = {"kind": type(error).__name__, "message": str(error)}
        store.write_json(directory / f"{task.marker}{_FAILED_SUFFIX}", failure)


def _user_error(failure: dict[str, str]) -> UserError:
    kinds = {kind.__name__: kind for kind in UserError.__subclasses__()}
    return kinds[failure["kind"]](failure["message"])


def _run_pipeline(
    do: Callable[[Task], None], tasks: Sequence[Task], options: Sequence[str]
) -> None:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    # Workers that Beam starts on this machine do not inherit the search path.
    root = str(Path(spanbert_jax.__file__).parents[1])
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, *known]))
    pipeline = beam.Pipeline(options=PipelineOptions(list(options)))
    parts = pipeline | "parts" >> beam.Create(list(tasks))
    # Without it, a runner may fuse all parts into the work of one process.
    spread = parts | "spread" >> beam.Reshuffle()
    _ = spread | "work" >> beam.Map(do)
    pipeline.run().wait_until_finish()


def _copy_up(directory: Path, stage: str, names: Iterable[str]) -> None:
    files, root = fsspec.url_to_fs(stage)
    files.makedirs(root, exist_ok=True)
    for name in sorted(names):
        if (directory / name).is_dir():
            for path in sorted((directory / name).iterdir()):
                files.makedirs(f"{root}/{name}", exist_ok=True)
                files.put_file(str(path), f"{root}/{name}/{path.name}")
        else:
            files.put_file(str(directory / name), f"{root}/{name}")


def _copy_down(
    stage: str, directory: Path, inputs: Collection[str], markers: Collection[str]
) -> None:
    """Moves what the tasks made, markers last, and removes the stage."""
    files, root = fsspec.url_to_fs(stage)
    files.invalidate_cache()
    found = {
        remote.rstrip("/").rsplit("/", 1)[-1]: remote
        for remote in files.ls(root, detail=False)
    }
    for name in sorted(found, key=lambda name: (name in markers, name)):
        remote = found[name]
        if name not in inputs:
            temporary = directory / f"{name}.tmp"
            files.get_file(remote, str(temporary))
            temporary.rename(directory / name)
    files.rm(root, recursive=True)


class _Progress:
    """A bar with the time left on a terminal; else a line from time to time."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, max(total, 1), 0
        self._bar = tqdm(
            desc=title,
            total=total,
            unit="B",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )
        self._began = self._said = time.monotonic()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, size: int) -> None:
        self._bar.update(size)
        self._done += size
        now = time.monotonic()
        if self._bar.disable and now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            rate = self._done / (now - self._began)
            left = (self._total - self._done) / max(rate, 1)
            print(
                f"{self._title}: {self._done / self._total:.0%} of"
                f" {self._total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s,"
                f" {left:,.0f} s left",
                flush=True,
            )


def _start_pool(workers: int) -> ProcessPoolExecutor:
    # Spawn: a fork would copy the locks of the threads that libraries have started.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_start_worker)


def _start_worker() -> None:
    # One process per core is all the parallelism that there is to gain.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C goes to all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed; it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
