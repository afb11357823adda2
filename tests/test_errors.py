"""How a command ends: what it prints, and with which exit code."""

import subprocess
import sys

import pytest

import runs

# Writes are under way as their event loop is closed; then threads of the storage
# library end them, some of them behind the end of `main`.
_COMMAND = """
import asyncio, sys, threading
import tensorstore
from spanbert_jax import errors

async def wait(future):
    await future

class Bug:
    def __del__(self):
        raise ValueError("a bug")

def write():
    promise, future = tensorstore.Promise.new()
    loop = asyncio.new_event_loop()
    writes.append(loop.create_task(wait(future)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    threads.append(threading.Thread(target=promise.set_result, args=(1,)))
    threads[-1].start()

def main(_):
    for _ in range(10):
        write()
    for thread in threads[:5]:
        thread.join()
    {end}

writes, threads = [], []
errors.run(main)
"""
_ECHO = "RuntimeError: Event loop is closed\n"


def run(end: str) -> runs.Exit:
    """Runs a command that ends in a way."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND.format(end=end)],
        cwd=runs.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return runs.Exit(done.returncode, done.stdout, done.stderr)


def test_a_storage_error_is_told_once() -> None:
    done = run("raise errors.StorageError('the disk is full')")
    assert (done.code, done.errors) == (4, "error: the disk is full\n")


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("return", 0, ""),
        ("raise errors.InputError('a word')", 2, "error: a word\n"),
    ],
)
def test_another_end_hides_nothing(end: str, code: int, message: str) -> None:
    done = run(f"for thread in threads: thread.join()\n    {end}")
    assert done.code == code
    assert done.errors.count(_ECHO) == 10
    assert done.errors.endswith(_ECHO + message)


def test_a_storage_error_hides_no_other_failure() -> None:
    done = run("bug = Bug(); del bug; raise errors.StorageError('the disk is full')")
    assert done.code == 4
    assert "ValueError: a bug\n" in done.errors
    assert done.errors.endswith("\nerror: the disk is full\n")
    assert _ECHO not in done.errors


@pytest.mark.parametrize(
    ("takes", "code", "output", "message"),
    [
        (False, 2, "", "error: unknown argument 'a word'; flags begin with --\n"),
        (True, 0, "['-c', 'a word', '-b']\n", ""),
    ],
)
def test_arguments_are_for_commands_that_take_them(takes, code, output, message):
    code_of_it = f"from spanbert_jax import errors; errors.run(print, {takes})"
    done = subprocess.run(
        [sys.executable, "-c", code_of_it, "a word", "--", "-b"],
        cwd=runs.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, output, message)
