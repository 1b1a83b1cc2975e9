"""pytest, what failed once more alone, and nothing left behind.

    PYTHON scripts/run_tests.py [--flaky-is-red] [PYTEST OPTION...]

What fails beside the others runs again in one process with nothing beside it, as CPython's regrtest and LLVM's lit
have it, if it is of at most `MOST_FILES` files. What passes then is named FLAKY in the closing lines: a defect of the
test, but none that may keep out a change (`--flaky-is-red`: it may). What is marked `alone` runs after that, once, in
one process with nothing beside it. Exit status: pytest's own of the run that counts.

Each run has a folder of its own, `TMPDIR` of all that it starts, named to it as HEALTHD_TEST_RUN. At its end, and at
the next one's start if this was killed, the processes, mounts, loop devices and cgroups of it are ended, and it is
removed. A mount elsewhere has the folder as its source, a cgroup the folder's name in its own
(tests/support/of_this_run.py). SIGTERM ends the run and says which tests were running.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
libc = ctypes.CDLL(None, use_errno=True)

MARK, PART = "HEALTHD_TEST_RUN", "HEALTHD_TESTS"
FOLDER, PREFIX = Path(tempfile.gettempdir()), "hdt."  # short: the path of a socket has 107 characters
OWN = ("lock", "cache", "running", "alone")  # what is a run's own in its folder
MOST_FILES = 3  # more that fail are no chance
PASSED, FAILED, NONE_RAN = 0, 1, 5  # pytest's exit statuses; others are no test's
END_SECONDS = 20.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
FITHAW = 0xC0045878  # linux/fs.h
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8  # umount2(2)


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
    """Those that bear others beside them, then those that do not (tests/support/alone.py)."""
    status = beside(run, options, flaky_is_red)
    if status not in (PASSED, FAILED, NONE_RAN) or not (run / "alone").exists():
        return status
    end_leftovers(run)
    print("run_tests: what bears nothing beside it", flush=True)
    alone = pytest(run, (*options, "-n", "0"), "alone")
    return alone if status == NONE_RAN else status or alone


def beside(run: Path, options: Sequence[str], flaky_is_red: bool) -> int:
    status = pytest(run, options, "beside")
    if status != FAILED:
        return status
    failed = last_failed(run)
    files = {test.partition("::")[0] for test in failed}
    if not failed or len(files) > MOST_FILES:
        print(f"run_tests: tests of {len(files)} files failed: not by chance, they do not run again", flush=True)
        return status
    end_leftovers(run)
    print(f"run_tests: {len(failed)} failed and run again, alone: {', '.join(failed)}", flush=True)
    again = pytest(run, (*options, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"), "beside")
    if again:
        return again
    for test in failed:
        print(f"FLAKY {test}", flush=True)
    return FAILED if flaky_is_red else PASSED


def pytest(run: Path, options: Sequence[str], part: str) -> int:
    """Its exit status. Whoever is orphaned meanwhile is ours, and reaped."""
    argv = [sys.executable, "-m", "pytest", "-o", f"cache_dir={run}/cache", f"--basetemp={run}/t", *options]
    (run / "running").write_text("")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    own = {"TMPDIR": str(run), MARK: str(run), PART: part}
    child = os.posix_spawn(sys.executable, argv, {**inherited, **own})
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
    """The tests that had begun and not ended, from what tests/support/started.py wrote."""
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
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_leftovers(run: Path) -> None:
    """Mounts and frozen cgroups first: who hangs in one cannot be killed. What is left after END_SECONDS is said."""
    unmount(run)
    thaw(run)
    until_none(lambda: list(processes(run)), end)
    unmount(run)
    detach(run)
    until_none(lambda: list(cgroups(run)), remove)
    for path in run.iterdir():
        if path.name in OWN:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def until_none(left: Callable[[], list[T]], end: Callable[[T], None]) -> None:
    """End what is left, again and again: a process may begin another, and takes a moment to leave its cgroup."""
    deadline = time.monotonic() + END_SECONDS
    while found := left():
        if time.monotonic() > deadline:
            print(f"run_tests: not to be ended: {', '.join(map(str, found))}", flush=True)
            break
        for each in found:
            end(each)
        reap()
        time.sleep(0.05)
    reap()


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# processes


def end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def processes(run: Path) -> Iterator[psutil.Process]:
    """Who descends from this process or is of `run`, and who descends from those; the dead are not counted."""
    own = psutil.Process()
    spared = {own, *own.parents()}
    found = set(own.children(recursive=True))
    sockets = bound_below(run)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process in spared | found:
                continue
            if carries(process, run) or is_in_cgroup(process, run) or holds(process, run, sockets):
                found |= {process, *process.children(recursive=True)}
    for process in found - spared:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def environment(process: psutil.Process) -> list[str]:
    """As it was at its start, NAME=VALUE each; a process may write over the beginning, as slurmstepd does."""
    with contextlib.suppress(OSError):  # another user's
        return os.fsdecode(Path(f"/proc/{process.pid}/environ").read_bytes()).split("\0")
    return []


def carries(process: psutil.Process, run: Path) -> bool:
    """The mark of `run`, or of a run inside it."""
    return any(f"{each}/".startswith(f"{MARK}={run}/") for each in environment(process))


def is_in_cgroup(process: psutil.Process, run: Path) -> bool:
    with contextlib.suppress(OSError):
        return run.name in Path(f"/proc/{process.pid}/cgroup").read_text()
    return False


def holds(process: psutil.Process, run: Path, sockets: Container[str]) -> bool:
    """Whether it works, has a file open or a socket bound below `run`, and has written over its environment. Who has
    one without the mark is a stranger: a backup, a person's shell."""
    if "=" in "".join(environment(process)[:1]):
        return False
    with contextlib.suppress(OSError):  # another user's, or it has just ended
        proc = f"/proc/{process.pid}"
        opened = [os.readlink(f"{proc}/cwd"), *(os.readlink(file) for file in Path(f"{proc}/fd").iterdir())]
        return any(path.startswith(f"{run}/") or path in sockets for path in opened)
    return False


def bound_below(run: Path) -> set[str]:
    """The sockets whose path is below `run`, as /proc/PID/fd names them."""
    rows = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines())
    return {f"socket:[{row[6]}]" for row in rows if row[-1].startswith(f"{run}/")}


# mounts


def mountinfo() -> Iterator[tuple[str, str, str]]:
    """(mount point, kind, source) of all that this process sees, the newest first."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        fields, _, more = line.partition(" - ")
        words = (fields.split()[4], *more.split()[:2])
        point, kind, source = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word) for word in words)
        yield point, kind, source


def unmount(run: Path) -> None:
    """All that is mounted below `run`, or elsewhere with it as its source. A frozen file system is thawed before;
    only a disk's is opened for that, for others may hang."""
    for point, _, source in mountinfo():
        if not point.startswith(f"{run}/") and not f"{source}/".startswith(f"{run}/"):
            continue
        if source.startswith("/dev/"):
            with contextlib.suppress(OSError):
                folder = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.ioctl(folder, FITHAW, 0)
                finally:
                    os.close(folder)
        if libc.umount2(os.fsencode(point), MNT_DETACH | UMOUNT_NOFOLLOW):
            print(f"run_tests: {point} cannot be unmounted: {os.strerror(ctypes.get_errno())}", flush=True)


def detach(run: Path) -> None:
    """Loop devices of files below `run`."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it has been detached meanwhile
            if backing.read_text().startswith(f"{run}/"):
                subprocess.run(["losetup", "--detach", f"/dev/{backing.parts[3]}"], check=False)


# cgroups


def cgroups(run: Path) -> Iterator[Path]:
    """Those with the name of `run` in theirs, and those below them, in each hierarchy; the innermost first."""
    for root in {point for point, kind, _ in mountinfo() if kind in ("cgroup", "cgroup2")}:
        for folder, _, _ in os.walk(root, topdown=False):
            if run.name in folder.removeprefix(root):
                yield Path(folder)


def thaw(run: Path) -> None:
    for cgroup in cgroups(run):
        for file, thawed in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):  # version 1, version 2
            with contextlib.suppress(OSError):
                (cgroup / file).write_text(thawed)


def remove(cgroup: Path) -> None:
    with contextlib.suppress(OSError):  # its processes have not left it yet
        cgroup.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
