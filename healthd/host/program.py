"""Programs that checks run (ipmitool, a site's own script). The worker waits for a program's exit, up to a deadline.

The daemon runs its own commands with child_process.py, which never waits.
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

# The program's whole environment, except for the caller's additions. The directory is /.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
MAX_OUTPUT_BYTES = 64 << 10
ENDING_SECONDS = 1.0  # how long to wait for a killed program; used twice


class ProgramResult(NamedTuple):
    """Result of a program. `status` is the exit status or the negative signal number. The output is the first 64 KiB of
    each stream."""

    status: int
    stdout: str
    stderr: str


def find_program(name: str) -> str:
    """Return the path of a program that only root or this user could have written.

    The result is the given path, or the first program with that name in the directories of ENVIRONMENT. Directories
    that other users may write to are skipped. Raises FileNotFoundError if there is no such program, or
    ownership.Untrusted if all are unsafe.
    """
    folders = [""] if "/" in name else ENVIRONMENT["PATH"].split(":")
    refused: ownership.Untrusted | None = None
    for folder in folders:
        path = os.path.join(folder, name)
        try:
            file_stat = ownership.stat_program(path)
        except ownership.Untrusted as error:
            if os.path.lexists(path):  # without the file, there is no program to refuse
                refused = refused or error
        except (FileNotFoundError, NotADirectoryError):
            continue
        else:
            if folder == "" or (stat.S_ISREG(file_stat.st_mode) and file_stat.st_mode & 0o111):
                return path
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def run_program(
    argv: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    executable: str | None = None,
    stdin: int = subprocess.DEVNULL,
) -> ProgramResult:
    """Run a program. `executable` is the file to run, or None for argv[0]. `stdin` is a descriptor.

    Raises OSError, or TimeoutError if the program is too slow. In that case, the program and its child processes are
    killed, and abandoned if even that does not stop them.
    """
    process = subprocess.Popen(
        argv,
        executable=executable,
        stdin=stdin,
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
        raise TimeoutError(f"{argv[0]}: did not end within {seconds:g} s and was killed")
    return ProgramResult(process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))


def _communicate(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Return the output until the program ends or the deadline passes. Output beyond 64 KiB from a pipe is dropped.

    Wait for the program, not for the pipes, because a background child may keep them open forever.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    buffers = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in buffers:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            ended = _has_ended(process)
            ready = selector.select(0.0 if ended else min(remaining, 0.05)) if selector.get_map() else []
            if ended and not ready:
                break
            if not ready and not selector.get_map():
                time.sleep(min(remaining, 0.02))  # both pipes are closed, so the program is about to exit
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                buffers[key.fd] += chunk[: MAX_OUTPUT_BYTES - len(buffers[key.fd])]
                if not chunk:
                    selector.unregister(key.fd)
    stdout, stderr = buffers.values()
    return bytes(stdout), bytes(stderr)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if the process has exited. It is not reaped, so its pid is not reused and its group can be killed
    safely."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and its process group. Wait for the exit only for a short time."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the program hangs in the kernel, so abandon it
        process.wait(ENDING_SECONDS / 2)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
