"""What can go wrong, each kind with the exit code that its process ends with."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from absl import app, flags, logging

# 0: done. 1: a bug of ours, left to Python and its traceback.
BAD_INPUT = 2
NON_FINITE = 3
STORAGE_FAILED = 4
# EX_UNAVAILABLE of sysexits.h: run the same command again, on all machines of the run.
PEER_LOST = 69
# 128 + SIGINT, as shells have it.
INTERRUPTED = 130
# EX_TEMPFAIL of sysexits.h: the state is saved, run the same command again.
PREEMPTED = 75

# So that TensorFlow, which feeds the steps and computes nothing, does not say at its
# import what it is and how the CPU would let it compute; warnings stay.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}


class UserError(Exception):
    """An error that its reader can mend: one sentence, no traceback needed."""

    exit_code: int


class InputError(UserError):
    """A setting or a datum is wrong; the message names it, with its value."""

    exit_code = BAD_INPUT


class NonFiniteError(UserError):
    """The loss or the gradient norm of a step is not a finite number."""

    exit_code = NON_FINITE


class StorageError(UserError):
    """A checkpoint or a corpus could not be written, or not read back."""

    exit_code = STORAGE_FAILED


class PeerError(UserError):
    """Another process of the run has ended, or cannot be reached."""

    exit_code = PEER_LOST


def outcome(work: Callable[[], int | None]) -> int | None:
    """Does some work, and reports on the standard error what its user can mend.

    Args:
        work: returns the exit code (None means 0).

    Returns:
        Its exit code, or that of the error.
    """
    try:
        with _holding_echoes():
            return work()
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def run(
    main: Callable[[Sequence[str]], int | None], takes_arguments: bool = False
) -> None:
    """Runs a command: parses its flags, calls `main`, exits with the right code.

    Args:
        main: takes argv without the flags; returns the exit code (None means 0).
        takes_arguments: whether argv may hold anything else; if not, it is refused.
    """
    os.environ.update(_QUIET | os.environ)

    def guarded(argv: Sequence[str]) -> int | None:
        # What orbax logs as an error it also raises, and we say it in a sentence; its
        # log would bury that under tracebacks. --verbosity=0 shows it.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.FATAL)
        if len(argv) > 1 and not takes_arguments:
            fault = f"unknown argument {argv[1]!r}; flags begin with --"
            return report(InputError(fault))
        code = outcome(lambda: main(argv))
        if code == STORAGE_FAILED:
            # Threads of a save that failed wait for its other parts, and at its exit
            # the interpreter would wait for them, for many minutes.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    app.run(guarded, flags_parser=_parse_flags)


@contextlib.contextmanager
def _holding_echoes() -> Iterator[None]:
    """Lets a failed write be told once, not again by each write beside it.

    The first write to fail closes the event loop of its save. Threads of the storage
    library then find it closed, hundreds of times, each with a traceback that Python
    prints at once, even into a line of ours. They are held back, and shown after all
    unless a `StorageError` tells why the loop is closed.
    """
    held: list[sys.UnraisableHookArgs] = []
    show = sys.unraisablehook

    def hold(failure: "sys.UnraisableHookArgs") -> None:
        # Threads that are not Python's have no object to blame.
        if failure.object is None and str(failure.exc_value) == "Event loop is closed":
            held.append(failure)
        else:
            show(failure)

    told = False
    sys.unraisablehook = hold
    try:
        yield
    except StorageError:
        # Such threads go on until the end of the process, and so does the hook.
        told = True
        raise
    finally:
        if not told:
            sys.unraisablehook = show
            for failure in held:
                show(failure)


def _parse_flags(argv: Sequence[str]) -> Sequence[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(report(error))
    # What ml_collections raises for --config.a.b with an a or a b that is not there.
    except (AttributeError, KeyError) as error:
        # They quote a text that was quoted before.
        text = str(error.args[0]).replace("\\n", ". ").replace("\n", ". ")
        text = text.replace("\\", "").replace("'", "")
        sys.exit(report(InputError(f"unknown setting: {text}")))


def report(error: Exception) -> int:
    """Says an error in one line on the standard error; returns its exit code."""
    message = " ".join(str(error).split())
    # A config file that fails brings its whole traceback; the last line says why.
    if "Traceback" in message:
        message = f"--config: {str(error).strip().splitlines()[-1]}"
    # One write, into which no other thread's can fall.
    sys.stderr.write(f"error: {message}\n")
    return getattr(error, "exit_code", BAD_INPUT)
