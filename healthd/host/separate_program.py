"""Programs that run outside the daemon and its limits: one that collects evidence, one that runs hooks.

The daemon writes a request to RUNTIME_DIR/NAME.request. Under systemd, healthd-NAME.path starts healthd-NAME.service
for this file. The daemon thus needs no privilege and never waits, and the program has its own limits, and survives a
restart of the daemon. Without systemd, the program is a child process of the daemon.

The program removes the file when it has served the request. If the program is killed, the file remains, and systemd
(or the daemon) starts the program again. For a moment, the file has the name NAME.request.taken; a program that was
killed at this moment leaves this name, which counts as an open request.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.host.child_process import Child
from healthd.host.lock import is_locked, lock_file
from healthd.host.wakeup import FOREVER

log = logging.getLogger("healthd")

POLL_SECONDS = 5.0  # time between two checks whether a request has been served
UNSERVED_SECONDS = 60.0  # after this time, a program that has not started is reported
RETRY_SECONDS = 30.0  # delay before a child process that left its request is started again


def request_file(runtime_dir: str, name: str) -> str:
    return os.path.join(runtime_dir, f"{name}.request")


def taken_file(runtime_dir: str, name: str) -> str:
    return f"{request_file(runtime_dir, name)}.taken"


class OpenRequest(NamedTuple):
    """A request that is being served.

    number       1 for the first request that this process serves
    is_replaced  returns True if the daemon has written another request since
    """

    text: str
    number: int = 1
    is_replaced: Callable[[], bool] = lambda: False


class SeparateProgram:
    """The daemon's side: requests a run of the program NAME, and reports whether it is served.

    `argv` is the command without systemd. `seconds` is the longest run.

        problem   why a request is not served, or ""
        is_open   True if a request has been written and not been served yet
    """

    def __init__(
        self,
        name: str,
        argv: tuple[str, ...],
        runtime_dir: str,
        seconds: float,
        is_managed: bool,
        monotonic: Callable[[], float],
    ) -> None:
        self.problem = ""
        self.is_open = False
        self._name, self._argv, self._seconds = name, argv, seconds
        self._runtime_dir, self._is_managed, self._monotonic = runtime_dir, is_managed, monotonic
        self._child: Child | None = None
        self._requested_at = self._start_at = 0.0
        self._poll_at = FOREVER

    @property
    def path(self) -> str:
        return request_file(self._runtime_dir, self._name)

    @property
    def deadline(self) -> float:
        """Monotonic time at which `step` is due."""
        return min(self._poll_at, self._child.deadline) if self._child else self._poll_at

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    def request(self, text: str) -> None:
        """Write a request, which replaces an earlier one. Raises ownership.Untrusted or OSError."""
        replace_file(self.path, text)
        self.is_open = True
        self._requested_at = self._poll_at = self._monotonic()
        self._start_at = 0.0

    def adopt(self) -> bool:
        """Return True if a request of an earlier daemon is still open, and follow this request."""
        if not self.is_open and self._is_requested():
            self.is_open = True
            self._requested_at = self._poll_at = self._monotonic()
        return self.is_open

    def step(self) -> bool:
        """Start the child process if one is needed. Return True if the request has just been served."""
        now = self._monotonic()
        if self._child is not None and self._child.step():
            child, self._child = self._child, None
            self._poll_at = now if self.is_open else FOREVER
            if child.status != 0:
                lines = child.output()[1].strip().splitlines()
                log.warning("%s ended with status %s: %s", " ".join(self._argv), child.status, "".join(lines[-1:]))
        if not self.is_open or now < self._poll_at:
            return False
        self._poll_at = now + POLL_SECONDS
        if not self._is_requested():
            self.is_open, self.problem, self._poll_at = False, "", FOREVER
            return True
        if not self._is_managed and self._child is None and now >= self._start_at:
            self._start(now)
        is_late = now >= self._requested_at + UNSERVED_SECONDS
        if is_late and self._child is None and not is_running(self._runtime_dir, self._name):
            self.problem = self.problem or f"the request {self.path} is not served"
        else:
            self.problem = ""
        return False

    def _is_requested(self) -> bool:
        return any(map(os.path.lexists, (self.path, taken_file(self._runtime_dir, self._name))))

    def _start(self, now: float) -> None:
        self._start_at = now + RETRY_SECONDS
        try:
            self._child = Child(self._argv, now + self._seconds, self._monotonic, directory="/")
        except OSError as error:
            self.problem = f"{' '.join(self._argv)} could not be started: {error.strerror}"
            log.warning("%s", self.problem)

    def close(self) -> None:
        """Stop following the request. A running program continues."""
        if self._child is not None:
            self._child.abandon()
        self._child = None


def is_running(runtime_dir: str, name: str) -> bool:
    """Return True if the program NAME is serving a request."""
    return is_locked(os.path.join(runtime_dir, f"{name}.lock"))


def serve(runtime_dir: str, name: str, work: Callable[[OpenRequest], None]) -> bool:
    """Serve the open request and each request that replaces it meanwhile. Return False if another process serves them.

    If `work` raises, the request stays open. Raises ownership.Untrusted or OSError.
    """
    path, taken = request_file(runtime_dir, name), taken_file(runtime_dir, name)
    with ExitStack() as stack:
        lock = lock_file(runtime_dir, f"{name}.lock")
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with suppress(FileNotFoundError):  # a program was killed before it looked at the request that it had taken
            _reopen(taken, path)
        number = 1
        while _serve_next(path, taken, number, work):
            number += 1
    return True


def _serve_next(path: str, taken: str, number: int, work: Callable[[OpenRequest], None]) -> bool:
    """Serve the open request. Return False if there is none.

    The file stays open meanwhile, so that no later request gets its inode number. A later request may have the same
    text, but it is another file.
    """
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(ownership.open_file(path))
        except FileNotFoundError:
            return False
        served = os.fstat(descriptor)

        def is_replaced() -> bool:
            return not _is_file(path, served)

        work(OpenRequest(ownership.read_all(descriptor).decode("utf-8", "replace"), number, is_replaced))
        os.rename(path, taken)
        if _is_file(taken, served):
            os.unlink(taken)
        else:  # a new request came before the rename
            _reopen(taken, path)
    return True


def _is_file(path: str, status: os.stat_result) -> bool:
    """Return True if the path still has this file."""
    try:
        return os.path.samestat(os.lstat(path), status)
    except FileNotFoundError:
        return False


def _reopen(taken: str, path: str) -> None:
    """Make a request that was taken the open request, unless there is a newer one."""
    with suppress(FileExistsError):
        os.link(taken, path)
    os.unlink(taken)
