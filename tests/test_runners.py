"""Runners: the same files whoever does the work, and what they say when it fails."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from spanbert_jax.corpus import store
from spanbert_jax.corpus.runners import Beam, Job, Local, Task
from spanbert_jax.errors import InputError, StorageError
from toy import contents

IN_MEMORY = "--direct_running_mode=in_memory"


@dataclass(frozen=True)
class Square(Task):
    """A task of the tests: the square of a number, plus what a file says."""

    number: int

    @property
    def size(self) -> int:
        return 1 + self.number

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("offsets",)

    @property
    def marker(self) -> str:
        return f"square-{self.number}.json"


def square(task: Square, directory: Path) -> None:
    """Leaves two files; the marker is the last."""
    offset = int((directory / "offsets" / "offset.txt").read_text())
    if task.number == 13:
        raise InputError("--number=13 brings bad luck")
    if task.number == 14:
        raise StorageError("there is no room for 14")
    result = {"square": task.number**2 + offset}
    store.write_json(directory / f"copy-{task.number}.json", result)
    store.write_json(directory / task.marker, result)


def note_process(task: Square, directory: Path) -> None:
    """Leaves the number of the process that did it."""
    store.write_json(directory / task.marker, {"process": os.getpid()})


def sleep_long(task: Square, directory: Path) -> None:
    """Takes a twentieth of a second for each unit of the number, up to two."""
    time.sleep(task.number / 20)
    store.write_json(directory / task.marker, {})


JOB = Job("squaring", square, "squares-1")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    (path / "offsets").mkdir(parents=True)
    (path / "offsets" / "offset.txt").write_text("5")
    return path


def local(_: Path) -> Local:
    return Local(1)


def processes(_: Path) -> Local:
    return Local(3)


def beam(_: Path) -> Beam:
    return Beam("DirectRunner", (IN_MEMORY,))


def staged(tmp_path: Path) -> Beam:
    return Beam("DirectRunner", (IN_MEMORY,), f"file://{tmp_path}/stage")


RUNNERS = [local, processes, beam, staged]


@pytest.mark.parametrize("make", RUNNERS)
def test_every_runner_leaves_the_same_files(
    make: Callable, directory: Path, tmp_path: Path
) -> None:
    before = contents(directory)
    make(tmp_path)(JOB, [Square(n) for n in range(10)], directory)
    made = contents(directory)
    for n in range(10):
        expected = f'{{\n  "square": {n * n + 5}\n}}\n'.encode()
        assert made.pop(f"square-{n}.json") == made.pop(f"copy-{n}.json") == expected
    assert made == before


@pytest.mark.parametrize("make", RUNNERS)
@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [(13, InputError, "bad luck"), (14, StorageError, "no room for 14")],
)
def test_what_the_work_raises_arrives(
    make: Callable,
    number: int,
    kind: type[Exception],
    message: str,
    directory: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(kind, match=message):
        make(tmp_path)(JOB, [Square(1), Square(number)], directory)
    assert not (directory / f"square-{number}.json").exists()
    assert not list(directory.glob("*.failed.json"))


def test_local_processes_share_the_work(directory: Path) -> None:
    tasks = [Square(n) for n in range(20)]
    Local(2)(Job("noting", note_process, "n"), tasks, directory)
    found = {store.read_json(directory / task.marker)["process"] for task in tasks}
    assert os.getpid() not in found
    assert 1 <= len(found) <= 2


def test_the_stage_is_left_empty_and_tells_jobs_apart(
    directory: Path, tmp_path: Path
) -> None:
    stage = tmp_path / "stage"
    # What an earlier job of another key left is not taken for this one's.
    (stage / "squares-0").mkdir(parents=True)
    (stage / "squares-0" / "square-1.json").write_text('{"square": 0}')
    staged(tmp_path)(JOB, [Square(1)], directory)
    assert store.read_json(directory / "square-1.json") == {"square": 6}
    assert [path.name for path in stage.iterdir()] == ["squares-0"]


def test_a_part_that_is_on_the_stage_is_not_done_again(
    directory: Path, tmp_path: Path
) -> None:
    done = tmp_path / "stage" / JOB.key
    done.mkdir(parents=True)
    (done / "square-2.json").write_text('{"square": -1}')
    staged(tmp_path)(JOB, [Square(2), Square(3)], directory)
    assert store.read_json(directory / "square-2.json") == {"square": -1}
    assert store.read_json(directory / "square-3.json") == {"square": 14}


@pytest.mark.parametrize("make", RUNNERS)
def test_nothing_to_do_is_no_work(
    make: Callable, directory: Path, tmp_path: Path
) -> None:
    make(tmp_path)(JOB, [], directory)
    assert list(contents(directory)) == ["offsets/offset.txt"]


@pytest.mark.parametrize("broken", range(4))
def test_a_copy_from_the_stage_that_breaks_off_is_made_again(
    broken: int, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [Square(1), Square(2)]
    copied = LocalFileSystem.get_file
    left = broken

    def breaking(self, remote, local, **options):
        nonlocal left
        if str(local).startswith(str(directory)):
            if left == 0:
                raise OSError(28, "No space left on device")
            left -= 1
        return copied(self, remote, local, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "get_file", breaking)
        with pytest.raises(OSError, match="No space left"):
            staged(tmp_path)(JOB, tasks, directory)
    # As a build does it: what has its marker is not asked for again.
    todo = [task for task in tasks if not (directory / task.marker).exists()]
    staged(tmp_path)(JOB, todo, directory)
    for n in (1, 2):
        for name in (f"square-{n}.json", f"copy-{n}.json"):
            assert store.read_json(directory / name) == {"square": n * n + 5}


def test_a_long_part_holds_up_no_other(directory: Path) -> None:
    tasks = [Square(60), *(Square(n) for n in range(8))]
    Local(2)(Job("sleeping", sleep_long, "s"), tasks, directory)
    ends = [(directory / task.marker).stat().st_mtime_ns for task in tasks]
    # All but one of the others could have waited for it.
    assert sum(end < ends[0] for end in ends[1:]) >= 6


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (Beam("NoSuchRunner"), "--runner=NoSuchRunner with .* Beam refuses it"),
        (Beam("DataflowRunner", (), "here"), "--stage=here must be a URL"),
        (Beam("DataflowRunner"), "--stage= must be a URL"),
    ],
)
def test_what_beam_cannot_run_is_refused(runner: Beam, message: str) -> None:
    with pytest.raises(InputError, match=message):
        runner.check()
