"""The guard: the end of another process is one sentence, not an abort.

When a process of a run is gone, the runtime of the others prints a page of C++ and
aborts, from a thread of its own; Python never learns of it. Here the page is held back
and the abort becomes an exit.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

from spanbert_jax import errors
from spanbert_jax.errors import UserError

# What the runtime says before it ends the process because of another one, not of a
# fault of its own.
_LOST = re.compile(r"distributed service detected fatal errors|CoordinationService")
# A line of the runtime's log that begins to say so.
_BEGINS = re.compile(rb"[EF]\d{4} .* (coordination_service\w*\.cc|client\.h):\d+\]")
_TAIL = 8192
# How long the last lines may take from the pipe to this process's memory.
_DRAIN_SECONDS = 0.2


class Guard:
    """Stands between the runtime and the standard error of this process.

    Python's own standard error is not touched. What the runtime writes is passed on,
    but for what follows a line by which it begins to end the process: that is passed on
    when the guard is closed, or when the process aborts for another reason.

    Attributes:
        explain: see below.
        exit_code: what the process ends with, once that is known.
    """

    def __init__(self, explain: Callable[[str], UserError]) -> None:
        """Begins to stand guard.

        Args:
            explain: the error to report, of what the runtime said before it was going
                to abort because of another process; may be replaced later on.
        """
        self.explain = explain
        self.exit_code: int | None = None
        self._held = b""
        self._lock = threading.Lock()
        self._stderr = os.dup(2)
        sys.stderr.flush()
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        self._pipe, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        threading.Thread(target=self._pump, name="guard", daemon=True).start()
        # Python's own handlers run too late: abort() does not wait for them.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def _pump(self) -> None:
        part = b""
        while data := os.read(self._pipe, 65536):
            *lines, part = (part + data).split(b"\n")
            for line in lines:
                self._take(line + b"\n")

    def _take(self, line: bytes) -> None:
        with self._lock:
            if self._held or _BEGINS.match(line):
                self._held = (self._held + line)[-_TAIL:]
            else:
                os.write(self._stderr, line)

    def _on_abort(self, _: int) -> None:
        self._drain()
        said = self._held.decode(errors="replace")
        if _LOST.search(said):
            # One sentence in all: this process may have had one before.
            if self.exit_code is None:
                self.exit_code = errors.report(self.explain(said))
            sys.stdout.flush()
            os._exit(self.exit_code)
        self.close()

    def _drain(self) -> None:
        time.sleep(_DRAIN_SECONDS)

    def close(self) -> None:
        """Passes on what was held back, the last 8 KiB of it."""
        self._drain()
        with self._lock:
            os.write(self._stderr, self._held)
            self._held = b""
