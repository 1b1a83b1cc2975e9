"""pytest, what failed once more alone, and nothing left behind.

    PYTHON scripts/run_tests.py [--flaky-is-red] [PYTEST OPTION...]

What fails beside the others runs again in one process with nothing beside it, as CPython's regrtest and LLVM's lit
have it, if it is of at most `MOST_FILES` files. What passes then is named FLAKY in the closing lines: a defect of the
test, but none that may keep out a change (`--flaky-is-red`: it may). Exit status: pytest's own of the run that counts.

Each run has a folder of its own, `TMPDIR` of all that it starts, named to it as HEALTHD_TEST_RUN. At its end, and at
the next one's start if this was killed, processes, mounts and loop devices that carry it are ended, and it is removed.
SIGTERM ends the run and says which tests were running.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

MARK = "HEALTHD_TEST_RUN"
FOLDER, PREFIX = Path(tempfile.gettempdir()), "hdt."  # short: the path of a socket has 107 characters
OWN = ("lock", "cache", "running")  # what is a run's own in its folder
MOST_FILES = 3  # more that fail are no chance
FAILED = 1  # pytest's exit status where tests failed; higher ones are no test's
END_SECONDS = 20.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
FITHAW = 0xC0045878  # linux/fs.h


class Terminated(Exception):
    """SIGTERM: the time is over."""


def main(arguments: Sequence[str]) -> int:
    flaky_is_red = "--flaky-is-red" in arguments
    options = [option for option in arguments if option != "--flaky-is-red"]
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, lambda number, frame: None)  # pytest hears it too, and ends
    become_subreaper()
    sweep_dead_runs()
    with run_folder() as run:
        try:
            return tests(run, options, flaky_is_red)
        except Terminated:
            print(f"run_tests: ended; running were: {', '.join(running(run)) or 'none'}", flush=True)
            return 128 + signal.SIGTERM
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_leftovers(run)


def _terminated(number: int, frame: object) -> None:
    raise Terminated


def tests(run: Path, options: Sequence[str], flaky_is_red: bool) -> int:
    status = pytest(run, options)
    if status != FAILED:
        return status
    failed = last_failed(run)
    files = {test.partition("::")[0] for test in failed}
    if not failed or len(files) > MOST_FILES:
        print(f"run_tests: tests of {len(files)} files failed: not by chance, they do not run again", flush=True)
        return status
    end_leftovers(run)
    print(f"run_tests: {len(failed)} failed and run again, alone: {', '.join(failed)}", flush=True)
    again = pytest(run, (*options, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"))
    if again:
        return again
    for test in failed:
        print(f"FLAKY {test}", flush=True)
    return FAILED if flaky_is_red else 0


def pytest(run: Path, options: Sequence[str]) -> int:
    """Its exit status. Whoever is orphaned meanwhile is ours, and reaped."""
    argv = [sys.executable, "-m", "pytest", "-o", f"cache_dir={run}/cache", f"--basetemp={run}/t", *options]
    (run / "running").write_text("")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    child = os.posix_spawn(sys.executable, argv, {**inherited, "TMPDIR": str(run), MARK: str(run)})
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def last_failed(run: Path) -> list[str]:
    """The tests that failed, as pytest names them."""
    with contextlib.suppress(FileNotFoundError):
        return list(json.loads((run / "cache" / "v" / "cache" / "lastfailed").read_text()))
    return []


def running(run: Path) -> list[str]:
    """The tests that had begun and not ended, from what tests/started.py wrote."""
    begun: dict[str, None] = {}
    for line in (run / "running").read_text().splitlines():
        if line.startswith("+"):
            begun[line[1:]] = None
        else:
            begun.pop(line[1:], None)
    return list(begun)


# --- the folder of a run


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Locked for as long as this process lives; it gets its name when it is."""
    being_made = Path(tempfile.mkdtemp(prefix="hdt-", dir=FOLDER))
    being_made.chmod(0o755)  # other users' commands find munge's socket in it
    with open(being_made / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = being_made.rename(FOLDER / being_made.name.replace("hdt-", PREFIX))
        yield run
    shutil.rmtree(run, ignore_errors=True)


@contextlib.contextmanager
def claim(run: Path) -> Iterator[bool]:
    """Whether the process that made this folder is dead, and nobody else removes it: it is ours for this block."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(run / "lock"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_dead = True
        except (BlockingIOError, FileNotFoundError):
            is_dead = False
        yield is_dead


def is_ours(run: Path) -> bool:
    """A folder of `run_folder`, of this user: /tmp is for everybody to write."""
    with contextlib.suppress(FileNotFoundError):
        found = run.lstat()
        named = run.parent == FOLDER and run.name.startswith(PREFIX)
        return named and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def sweep_dead_runs() -> None:
    """What earlier runs left that were killed, with all that they had started."""
    for run in filter(is_ours, FOLDER.glob(f"{PREFIX}*")):
        with claim(run) as is_dead:
            if is_dead:
                print(f"run_tests: a run was killed; what it left in {run} is removed", flush=True)
                end_leftovers(run)
                shutil.rmtree(run, ignore_errors=True)


# --- what is left


def become_subreaper() -> None:
    """Orphans below this process become its children, so that none is lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_leftovers(run: Path) -> None:
    """Mounts first: who hangs in one cannot be killed. What is left after END_SECONDS is said."""
    unmount(run)
    deadline = time.monotonic() + END_SECONDS
    while left := list(processes(run)):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        reap()
        if time.monotonic() > deadline:
            print(f"run_tests: not to be ended: {', '.join(map(str, left))}", flush=True)
            break
        time.sleep(0.05)
    reap()
    unmount(run)
    detach(run)
    for path in run.iterdir():
        if path.name in OWN:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def processes(run: Path) -> Iterator[psutil.Process]:
    """Who descends from this process, and who carries the mark of `run`; the dead are not counted."""
    own = os.getpid()
    descends = {process.pid for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in descends or carries(process, run):
                yield process


def carries(process: psutil.Process, run: Path) -> bool:
    with contextlib.suppress(OSError):  # another user's
        return process.environ().get(MARK) == str(run)
    return False


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def unmount(run: Path) -> None:
    """All that is mounted below `run`, the newest first; a frozen file system is thawed before."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in reversed([path for path in mounts if path.startswith(f"{run}/")]):
        with contextlib.suppress(OSError):
            folder = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.ioctl(folder, FITHAW, 0)
            finally:
                os.close(folder)
        subprocess.run(["umount", "--lazy", mount], check=False)


def detach(run: Path) -> None:
    """Loop devices of files below `run`."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it has been detached meanwhile
            if backing.read_text().startswith(f"{run}/"):
                subprocess.run(["losetup", "--detach", f"/dev/{backing.parts[3]}"], check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
