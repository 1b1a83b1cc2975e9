"""File systems that hang, for tests: one that puts processes into D state, and one that never answers.

    with FrozenFilesystem(tmp_path) as disk:
        with disk.frozen():
            ...  # a process that writes below disk.path is in D state, immune to SIGKILL, until the end of this block

    with HangFs(tmp_path) as mount:
        ...  # a process that accesses mount.path blocks: killable at first, in D state after any fatal signal

Both need root. A separate process watches each of them. It thaws, unmounts and ends as soon as the test has closed its
pipe, by `with`, by a crash or by being killed, so no test can leave a process in D state behind.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from requirements import require_programs, require_root

PACKAGES = "e2fsprogs mount util-linux"
IMAGE_BYTES = 16 << 20
PROC = Path("/proc")
MIN_D_STATE_SECONDS = 0.3  # reading a page takes less

# Thaws and unmounts at the end of its input. Lazily, because a bind mount or a process of the test may still exist.
GUARD = 'cat >/dev/null; fsfreeze --unfreeze "$0" 2>/dev/null; umount --lazy "$0"'


class FrozenFilesystem:
    """An ext4 file system of 16 MiB at `path` that can be frozen and thawed. `directory` contains its image."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> FrozenFilesystem:
        require_root()
        require_programs("mkfs.ext4", "mount", "fsfreeze", packages=PACKAGES)
        self._directory = Path(tempfile.mkdtemp(prefix="frozen-", dir=self._directory))
        self.path = self._directory / "mount"
        self.path.mkdir()
        image = self._directory / "image"
        with open(image, "wb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(image))
        _run("mount", "-o", "loop", str(image), str(self.path))
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _close_and_wait(self._guard)

    def freeze(self) -> None:
        """From now on every write waits in D state, including the access time of a first read."""
        _run("fsfreeze", "--freeze", str(self.path))

    def thaw(self) -> None:
        """Let all waiting processes continue. Without effect if it is not frozen."""
        subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], capture_output=True, timeout=240)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the file system for the time of a block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()


class HangFs:
    """A mount at `path` that answers nothing, like a dead file server. `release` ends it.

    path     mount point, by default a new directory
    error    an errno that it answers to every request instead
    user     owner of the mount, as fusermount3 sets it
    opens    any name except "lost" exists and can be opened (a name that ends in "d" is a directory); further requests
             are not answered
    """

    def __init__(
        self, directory: Path, path: Path | None = None, error: int = 0, user: int = 0, opens: bool = False
    ) -> None:
        self._directory = directory
        self._path = path
        self._error = error
        self._user = user
        self._opens = ["opens"] if opens else []

    def __enter__(self) -> HangFs:
        require_root()
        self.path = self._path or Path(tempfile.mkdtemp(prefix="hang-", dir=self._directory))
        script = str(Path(__file__).with_name("hangfs.py"))
        command = [sys.executable, script, str(self.path), str(self._error), str(self._user), *self._opens]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=False
        )
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"ready\n":
            raise RuntimeError(f"hangfs ended with status {self._server.wait(240)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def wait_for_requests(self, *pids: int) -> None:
        """Wait until it has read an unanswered request of each of these processes.

        Only these processes are in D state after a kill; a process whose request was not read yet just dies.
        """
        assert self._server.stdout is not None
        missing = set(pids)
        for line in self._server.stdout:
            missing.discard(int(line))
            if not missing:
                return
        raise RuntimeError(f"hangfs ended with status {self._server.wait(240)}")

    def release(self) -> None:
        """End it: waiting processes get an error, and the mount point is an empty directory again."""
        _close_and_wait(self._server)


def in_d_state(pid: int, proc: Path = PROC) -> bool:
    """Return True if this process waits in the kernel, immune to signals.

    proc: the /proc in which its pid is valid, as in a container.
    """
    return _state(pid, proc) == "D"


def wait_for_d_state(pid: int, timeout: float = 240.0) -> None:
    """Wait until the process stays in D state: it is also there for a moment while a page of its program is read."""
    deadline, asleep_since, sleep_count = time.monotonic() + timeout, 0.0, ""
    while True:
        now, previous_count, sleep_count = time.monotonic(), sleep_count, _sleep_count(pid)
        if not sleep_count or sleep_count != previous_count:
            asleep_since = now
        elif now - asleep_since >= MIN_D_STATE_SECONDS:
            return
        if now > deadline:
            raise TimeoutError(f"process {pid} is not in D state but {_state(pid) or 'gone'}")
        time.sleep(0.01)


def _sleep_count(pid: int) -> str:
    """Return how often a process in D state has gone to sleep, or "" if it is not in D state."""
    try:
        status = (PROC / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return status.partition("\nvoluntary_ctxt_switches:")[2].split()[0] if "\nState:\tD" in status else ""


def _state(pid: int, proc: Path = PROC) -> str:
    """Return the state letter of /proc/PID/stat, or "" if there is no such process."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def pending_signals(pid: int, proc: Path = PROC) -> set[int]:
    """Return the signals that are pending for a process or its threads. A SIGKILL stays pending in D state."""
    pending = 0
    for task in (proc / str(pid) / "task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith(("SigPnd:", "ShdPnd:")):
                pending |= int(line.split()[1], 16)
    return {number for number in range(1, 65) if pending >> (number - 1) & 1}


def _run(*argv: str) -> None:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit status {result.returncode}: {result.stderr.strip()}")


def _close_and_wait(process: subprocess.Popen[bytes]) -> None:
    """Close its pipes, which makes it clean up, and wait for its end."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait(120)
