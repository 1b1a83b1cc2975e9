"""Run the collector's programs: one at a time, with a deadline for everything that a program starts.

nvidia-bug-report.sh is a script that starts dozens of programs, some of which hang on a broken GPU. At the deadline,
all descendants are killed: the collector is their subreaper (prctl(2)), so none of them escapes to init. A process
that hangs in the kernel is reported and abandoned.

If the collector itself is killed, systemd kills its control group. Without systemd, the next collector kills what is
left of the program's session, which is recorded in a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from healthd.agent.evidence.case import Process
from healthd.agent.evidence.sources import Entry, Source
from healthd.agent.evidence.stuck import has_ended
from healthd.common.text import is_decimal
from healthd.host.program import ENVIRONMENT, find_program

MAX_OUTPUT_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
KILL_SECONDS = 5.0  # how long killed processes may take to exit
POLL_SECONDS = 0.2
MARK = "HEALTHD_EVIDENCE"  # environment variable of every program, which identifies it to the next collector
# The shell records the session, and starts the program only if its parent still runs then. A collector that is killed
# at any time thus leaves either no program or a record. The parent's pid is the fourth word of stat (proc_pid_stat(5)).
_RECORD_SESSION = (
    'parent=$1; shift; echo $$ >"$0"; read -r _ _ _ current _ </proc/$$/stat; [ "$current" = "$parent" ] && exec "$@"'
)
_NOT_READ = ("D", "Z")  # states of processes whose environment is not read
_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Run(NamedTuple):
    """A program's run. `stopped` is why it was stopped early, or ""."""

    entry: Entry
    stopped: str = ""
    stuck: tuple[Process, ...] = ()


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans. Without it, only the program's session is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_source(
    source: Source,
    path: str,
    session_file: str,
    stop_reason: Callable[[], str],
    environment: Mapping[str, str] | None = None,
    max_file_bytes: int = resource.RLIM_INFINITY,
) -> Run:
    """Run a program. Its standard output goes to `path`, or to a file next to it if the program writes its own file.

    `stop_reason` is polled; if it returns a text, the program is killed. No file that the program writes becomes larger
    than `max_file_bytes`. Raises OSError if the disk is full.
    """
    try:
        program = find_program(source.argv[0])
    except FileNotFoundError:
        problem = "" if source.is_optional else f"{source.argv[0]} is not installed"
        return Run(Entry(source.file, source.argv, problem=problem, missing=True))
    except OSError as error:
        return Run(Entry(source.file, source.argv, problem=f"{source.argv[0]}: {error}"))
    others = {(found.pid, found.start) for found in _descendants(set())}
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            ("/bin/sh", "-c", _RECORD_SESSION, session_file, str(os.getpid()), program, *source.argv[1:]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            env={**ENVIRONMENT, **(environment or {}), MARK: "1"},
            bufsize=0,
        )
    except OSError as error:
        return Run(Entry(source.file, source.argv, problem=f"{source.argv[0]}: {error.strerror}"))
    stuck: tuple[Process, ...] = ()
    try:
        _limit_files(process.pid, max_file_bytes)
        stdout = f"{path}.stdout" if source.output else path
        end = _follow(process, stdout, started + source.seconds, stop_reason)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        stuck = _end_descendants(process, others)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    _forget_session(session_file)
    saved = source.output or path
    size = os.path.getsize(saved) if os.path.exists(saved) else 0
    problem = _problem(source, end, stuck)
    seconds = round(time.monotonic() - started, 3)
    status = None if end.stopped or end.is_late else end.status
    return Run(Entry(source.file, source.argv, status, seconds, size, problem), end.stopped, stuck)


def _limit_files(pid: int, max_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has ended, or its hard limit is lower
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (max_bytes, max_bytes))


class _End(NamedTuple):
    status: int | None
    is_late: bool = False
    stopped: str = ""
    is_truncated: bool = False
    error: str = ""


def _problem(source: Source, end: _End, stuck: tuple[Process, ...]) -> str:
    name = "healthd" if source.argv[1:2] == ("-m",) else source.argv[0]
    if stuck:
        pids = ", ".join(str(process.pid) for process in stuck)
        return f"{name} hangs in the kernel (process {pids})"
    if end.stopped:
        return f"{name} was stopped: {end.stopped}"
    if end.is_late:
        return f"{name} did not end within {source.seconds:.0f} s"
    if end.status != 0:
        last = " ".join(end.error.strip().split("\n")[-1:])[:200]
        return f"{name} ended with status {end.status}{': ' + last if last else ''}"
    return f"the output of {name} was cut off at {MAX_OUTPUT_BYTES >> 20} MiB" if end.is_truncated else ""


def _follow(process: subprocess.Popen[bytes], path: str, deadline: float, stop_reason: Callable[[], str]) -> _End:
    """Copy the program's output until it ends, is late, or is stopped. Wait for the program, not for its pipes."""
    assert process.stdout is not None
    assert process.stderr is not None
    errors, written, is_truncated = bytearray(), 0, False
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file, selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while True:
            has_ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if selector.get_map():
                ready = selector.select(0.0 if has_ended else POLL_SECONDS)
            else:
                ready = []
                time.sleep(0.0 if has_ended else POLL_SECONDS)
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    errors += chunk[: MAX_ERROR_BYTES - len(errors)]
                else:
                    is_truncated = is_truncated or written + len(chunk) > MAX_OUTPUT_BYTES
                    written += _write(file.fileno(), chunk[: MAX_OUTPUT_BYTES - written])
            if has_ended and not ready:
                break
            if time.monotonic() >= deadline:
                return _End(None, is_late=True)
            if stopped := stop_reason():
                return _End(None, stopped=stopped)
    process.wait()  # it has ended
    return _End(process.returncode, is_truncated=is_truncated, error=errors.decode("utf-8", "replace"))


def _write(descriptor: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return len(data)


# --- processes


class _Stat(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str
    start: int
    threads: int

    @property
    def has_ended(self) -> bool:
        return has_ended(self.state, self.threads)


def _processes() -> Iterator[_Stat]:
    """Yield all processes, from /proc/PID/stat, which never hangs (proc_pid_stat(5))."""
    for name in os.listdir("/proc"):
        if not is_decimal(name):
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            yield _Stat(int(name), int(fields[1]), int(fields[3]), fields[0], int(fields[19]), int(fields[17]))
        except (OSError, ValueError, IndexError):
            continue


def _descendants(without: set[tuple[int, int]]) -> list[_Stat]:
    """Return this process's descendants, including zombies. `without` are (pid, start) of children to leave out."""
    found, parents = [], {os.getpid()}
    remaining = [process for process in _processes() if (process.pid, process.start) not in without]
    while below := [process for process in remaining if process.parent in parents]:
        found += below
        parents = {process.pid for process in below}
        remaining = [process for process in remaining if process not in below]
    return found


def _end_descendants(process: subprocess.Popen[bytes], others: set[tuple[int, int]]) -> tuple[Process, ...]:
    """Kill all descendants except `others`. Return those that still exist after KILL_SECONDS."""
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        alive = []
        for found in _descendants(others):
            if found.has_ended:
                _reap(process, found.pid)
            else:
                alive.append(found)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(found.pid, signal.SIGKILL)
        if not alive:
            process.poll()
            return ()
        if time.monotonic() >= deadline:
            if process.poll() is None:
                process.returncode = -signal.SIGKILL  # Popen then does not wait for it
            return tuple(Process(found.pid, found.start) for found in alive)
        time.sleep(0.05)


def _reap(process: subprocess.Popen[bytes], pid: int) -> None:
    if pid == process.pid:
        process.poll()
        return
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _forget_session(session_file: str) -> None:
    """Record that no program runs. Raises OSError."""
    with open(session_file, "w", encoding="ascii") as file:
        file.write("0\n")


def end_earlier_session(session_file: str) -> tuple[Process, ...]:
    """Kill the programs that a killed collector left behind. Return those that hang in the kernel."""
    try:
        with open(session_file, encoding="ascii") as file:
            session = int(file.read(20))
    except (OSError, ValueError):
        return ()
    deadline = time.monotonic() + KILL_SECONDS
    while session and (left := [p for p in _processes() if p.session == session and not p.has_ended and _is_marked(p)]):
        if time.monotonic() >= deadline:
            return tuple(Process(found.pid, found.start) for found in left)
        for found in left:
            if found.state not in _NOT_READ:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(found.pid, signal.SIGKILL)
        time.sleep(0.05)
    return ()


def _is_marked(process: _Stat) -> bool:
    """Return True if this is one of the collector's programs, and not a later process with the same session number.

    The environment of a process in D state is not read, because that may hang; a zombie with threads has none. Such a
    process is reported, not killed.
    """
    if process.state in _NOT_READ:
        return True
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            return f"\0{MARK}=1\0".encode() in b"\0" + file.read() + b"\0"
    except OSError:
        return False
