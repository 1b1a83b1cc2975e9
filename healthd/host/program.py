"""One program that a check asks (ipmitool, a site's own script): the worker runs it to its end, within a deadline.

The daemon runs its own commands by child_process.py, which waits for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from healthd.common import ownership

# The program's whole environment, apart from what the caller adds; stdin is empty, the directory is /.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
MAX_OUTPUT_BYTES = 64 << 10
ENDING_SECONDS = 1.0  # how long a killed program is waited for, twice


class Ran(NamedTuple):
    """`status`: the exit status, or minus the signal that ended it. Of its output, the first 64 KiB."""

    status: int
    stdout: str
    stderr: str


def located(name: str) -> str:
    """Where a program is that nobody but root, or we, could have written: by its path, or the first of that name in
    the folders of ENVIRONMENT; a folder that others may write is passed over. Raises FileNotFoundError where there is
    none, ownership.Untrusted where there are only others."""
    folders = [""] if "/" in name else ENVIRONMENT["PATH"].split(":")
    refused: ownership.Untrusted | None = None
    for folder in folders:
        path = os.path.join(folder, name)
        try:
            about = ownership.program(path)
        except ownership.Untrusted as error:
            if os.path.lexists(path):  # else there is none of that name to refuse
                refused = refused or error
        except (FileNotFoundError, NotADirectoryError):
            continue
        else:
            if folder == "" or (stat.S_ISREG(about.st_mode) and about.st_mode & 0o111):
                return path
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def run_program(
    argv: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None, executable: str | None = None
) -> Ran:
    """`executable`: the file that is run; None: argv[0], as it is.

    Raises OSError, or TimeoutError if the program is too slow: then it and the processes it started are killed, and
    left behind if even that does not end them.
    """
    process = subprocess.Popen(
        argv,
        executable=executable,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={**ENVIRONMENT, **(environment or {})},
        start_new_session=True,
        bufsize=0,
    )
    try:
        stdout, stderr = _communicate(process, time.monotonic() + seconds)
        ended = _has_ended(process)
    finally:
        _kill(process)
    if not ended:
        raise TimeoutError(f"{argv[0]}: did not end within {seconds:g} s, and was killed")
    return Ran(process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))


def _communicate(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Its output until it ends or the deadline passes: 64 KiB of each pipe are kept, the rest is read and dropped.

    The program's end counts, not the pipes': a child that it left in the background may hold them open for ever.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            ended = _has_ended(process)
            ready = selector.select(0.0 if ended else min(left, 0.05)) if selector.get_map() else []
            if ended and not ready:
                break
            if not ready and not selector.get_map():
                time.sleep(min(left, 0.02))  # both pipes are closed, the program is about to end
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                kept[key.fd] += chunk[: MAX_OUTPUT_BYTES - len(kept[key.fd])]
                if not chunk:
                    selector.unregister(key.fd)
    stdout, stderr = kept.values()
    return bytes(stdout), bytes(stderr)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ended. It is not reaped yet: until then no other process has its pid, so killing its group is safe."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the program and its process group; wait for it, but not for long."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: left behind
        process.wait(ENDING_SECONDS / 2)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
