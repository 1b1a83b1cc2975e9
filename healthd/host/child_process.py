"""A command that runs concurrently, with limits. It is watched through its pipes, and nothing waits for its exit.

`subprocess.run(timeout=)` waits forever for a child in D state; this class abandons the child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping

from healthd.host import shortage
from healthd.host.oom import trampoline_argv

MAX_OUTPUT_BYTES = 4 << 20
TRAMPOLINE = trampoline_argv()
READS_PER_STEP = 32  # number of reads of 64 KiB each; a child that floods its pipes must not delay everything else

_abandoned: set[int] = set()  # pids of killed children that had not exited at the last check: future zombies


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True  # already reaped elsewhere


class Child:
    """A running command: `argv`, with `environment` added to this process's own environment.

    `argv` is encoded as UTF-8. A byte that is not UTF-8 is passed as a lone surrogate ("surrogateescape"). `step`
    returns True when the command has exited or its deadline (monotonic seconds) has passed; its status is then None.

    The constructor raises OSError if there is no such program.
    """

    def __init__(
        self,
        argv: tuple[str, ...],
        deadline: float,
        monotonic: Callable[[], float],
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
    ) -> None:
        _abandoned.difference_update([pid for pid in _abandoned if _has_ended(pid)])
        self.argv = argv
        self.deadline = deadline
        self.started = monotonic()
        self.status: int | None = None
        self._monotonic = monotonic
        # Start the command through a program on the local disk. Popen waits for the first exec, and the exec of a
        # program on a lost file server (one such directory in PATH is enough) could take forever.
        try:
            self._process = subprocess.Popen(
                (*TRAMPOLINE, *(word.encode("utf-8", "surrogateescape") for word in argv)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                cwd=directory,
            )
        except OSError as error:
            shortage.record_failed_start(error)
            raise
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pidfd = shortage.open_pidfd(self._process.pid)
        self._outputs = {self._process.stdout.fileno(): bytearray(), self._process.stderr.fileno(): bytearray()}
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
        self._open = set(self._outputs)

    def waits(self) -> Iterator[tuple[int, bool]]:
        if self._pidfd is not None:
            yield self._pidfd, False
        for descriptor in self._open:
            yield descriptor, False

    def step(self) -> bool:
        """Read the pipes. Return True if the command has exited, or if it was overdue and has been killed and
        abandoned.
        """
        self._read()
        self.status = self._process.poll()
        if self.status is not None:
            self._read()  # read the final output, but do not wait for a grandchild that keeps the pipe open
            self._close()
            return True
        if self._monotonic() < self.deadline:
            return False
        self._process.kill()  # a child in D state may take days to exit
        self.abandon()
        return True

    def terminate(self) -> None:
        """Request that the command exit. Only valid until `step` returns True."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def abandon(self) -> None:
        """Stop watching the command. It exits on its own."""
        self._process.returncode = -signal.SIGTERM  # Popen then considers the child ended and does not wait
        _abandoned.add(self._process.pid)
        self._close()

    def output(self) -> tuple[bytes, str]:
        """Return standard output as bytes and standard error as text, at most MAX_OUTPUT_BYTES of each."""
        out, err = self._outputs.values()
        return bytes(out), err.decode("utf-8", "replace")

    def _read(self) -> None:
        for descriptor in list(self._open):
            for _ in range(READS_PER_STEP):
                try:
                    chunk = os.read(descriptor, 1 << 16)
                except BlockingIOError:
                    break
                if not chunk:
                    self._open.discard(descriptor)
                    break
                room = MAX_OUTPUT_BYTES - len(self._outputs[descriptor])
                self._outputs[descriptor] += chunk[: max(room, 0)]

    def _close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()
