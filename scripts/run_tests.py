"""Run pytest, run failed tests again alone, and clean up everything that the tests started.

    PYTHON scripts/run_tests.py [--flaky-is-red] [PYTEST OPTION...]

Tests run in parallel. Tests that fail run again in one process, with nothing in parallel, as in CPython's regrtest and
LLVM's lit. This second run takes place only if the failed tests are in at most `MAX_RERUN_FILES` files. A test that
passes in the second run is listed as FLAKY in the last lines. This is a defect of the test, but it fails the run only
with `--flaky-is-red`. Finally, tests marked `alone` run once, in one process with nothing in parallel. The exit status
is pytest's for the run that counts.

Each run has its own folder, which is `TMPDIR` for all processes that the run starts. HEALTHD_TEST_RUN has its path. At
the end, the script removes the folder and everything that belongs to the run: processes, mounts, loop devices and
cgroups. If a run was killed, the next run does this. A mount outside the folder belongs to the run if the folder is its
source. A cgroup belongs to it if its name contains the folder's name (tests/support/of_this_run.py). SIGTERM ends the
run and prints the tests that were running.
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
FOLDER, PREFIX = Path(tempfile.gettempdir()), "hdt."  # short, because the path of a socket has at most 107 characters
OWN_FILES = ("lock", "cache", "running", "alone")  # names of the run's own files in its folder
MAX_RERUN_FILES = 3  # if tests in more files fail, chance is not the cause
PASSED, FAILED, NONE_RAN = 0, 1, 5  # pytest's exit statuses for test results; other values are errors of pytest itself
END_SECONDS = 20.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
FITHAW = 0xC0045878  # linux/fs.h
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8  # umount2(2)


class Terminated(Exception):
    """SIGTERM was received: the time limit is reached."""


def main(arguments: Sequence[str]) -> int:
    flaky_is_red = "--flaky-is-red" in arguments
    options = [option for option in arguments if option != "--flaky-is-red"]
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, lambda number, frame: None)  # pytest receives it too, and ends
    become_subreaper()
    sweep_dead_runs()
    with run_folder() as run:
        try:
            return run_all(run, options, flaky_is_red)
        except Terminated:
            print(f"run_tests: terminated; running tests: {', '.join(running(run)) or 'none'}", flush=True)
            return 128 + signal.SIGTERM
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_leftovers(run)


def _terminated(number: int, frame: object) -> None:
    raise Terminated


def run_all(run: Path, options: Sequence[str], flaky_is_red: bool) -> int:
    """Run the tests that can run in parallel, then those that cannot (tests/support/alone.py)."""
    status = run_in_parallel(run, options, flaky_is_red)
    if status not in (PASSED, FAILED, NONE_RAN) or not (run / "alone").exists():
        return status
    end_leftovers(run)
    print("run_tests: tests that run alone", flush=True)
    alone_status = run_pytest(run, (*options, "-n", "0"), "alone")
    return alone_status if status == NONE_RAN else status or alone_status


def run_in_parallel(run: Path, options: Sequence[str], flaky_is_red: bool) -> int:
    status = run_pytest(run, options, "beside")
    if status != FAILED:
        return status
    failed = last_failed(run)
    files = {test.partition("::")[0] for test in failed}
    if not failed or len(files) > MAX_RERUN_FILES:
        print(
            f"run_tests: tests in {len(files)} files failed: too many for chance, so they do not run again", flush=True
        )
        return status
    end_leftovers(run)
    print(f"run_tests: {len(failed)} failed, running them again alone: {', '.join(failed)}", flush=True)
    second_status = run_pytest(
        run, (*options, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"), "beside"
    )
    if second_status:
        return second_status
    for test in failed:
        print(f"FLAKY {test}", flush=True)
    return FAILED if flaky_is_red else PASSED


def run_pytest(run: Path, options: Sequence[str], part: str) -> int:
    """Run pytest and return its exit status. Orphaned processes become children of this script and are reaped."""
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
    """Return the failed tests by their pytest ids."""
    with contextlib.suppress(FileNotFoundError):
        return list(json.loads((run / "cache" / "v" / "cache" / "lastfailed").read_text()))
    return []


def running(run: Path) -> list[str]:
    """Return the tests that have started and not ended, from the file that tests/support/started.py writes."""
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
    """Create the run's folder and lock it until this process ends. It gets its final name after it is locked."""
    unlocked = Path(tempfile.mkdtemp(prefix="hdt-", dir=FOLDER))
    unlocked.chmod(0o755)  # commands of other users connect to munge's socket in it
    with open(unlocked / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = unlocked.rename(FOLDER / unlocked.name.replace("hdt-", PREFIX))
        yield run
    shutil.rmtree(run, ignore_errors=True)


@contextlib.contextmanager
def claim(run: Path) -> Iterator[bool]:
    """Try to lock a run's folder. Yields True if the run's process is dead and no other process removes the folder."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(run / "lock"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_dead = True
        except (BlockingIOError, FileNotFoundError):
            is_dead = False
        yield is_dead


def is_own_run_folder(run: Path) -> bool:
    """Return True if `run_folder` created this folder and this user owns it. Anyone can write to /tmp."""
    with contextlib.suppress(FileNotFoundError):
        found = run.lstat()
        named = run.parent == FOLDER and run.name.startswith(PREFIX)
        return named and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def sweep_dead_runs() -> None:
    """Remove the folders of killed runs, with everything that those runs started."""
    for run in filter(is_own_run_folder, FOLDER.glob(f"{PREFIX}*")):
        with claim(run) as is_dead:
            if is_dead:
                print(f"run_tests: an earlier run was killed; removing its processes and {run}", flush=True)
                end_leftovers(run)
                shutil.rmtree(run, ignore_errors=True)


# --- leftovers


def become_subreaper() -> None:
    """Make all orphans below this process its children, so that none is lost."""
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_leftovers(run: Path) -> None:
    """End everything that the run started; print what is still there after END_SECONDS.

    Mounts and frozen cgroups come first: a process that hangs in a mount or a frozen cgroup cannot be killed.
    """
    unmount(run)
    thaw(run)
    repeat_until_none(lambda: list(processes(run)), kill)
    unmount(run)
    detach(run)
    repeat_until_none(lambda: list(cgroups(run)), remove_cgroup)
    for path in run.iterdir():
        if path.name in OWN_FILES:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def repeat_until_none(find: Callable[[], list[T]], end: Callable[[T], None]) -> None:
    """Repeat `end` until nothing is left: a process may start another process, and needs a moment to leave its
    cgroup."""
    deadline = time.monotonic() + END_SECONDS
    while found := find():
        if time.monotonic() > deadline:
            print(f"run_tests: cannot end: {', '.join(map(str, found))}", flush=True)
            break
        for item in found:
            end(item)
        reap()
        time.sleep(0.05)
    reap()


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# processes


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def processes(run: Path) -> Iterator[psutil.Process]:
    """Yield the live descendants of this process, and the processes of `run` with their descendants."""
    own = psutil.Process()
    excluded = {own, *own.parents()}
    found = set(own.children(recursive=True))
    sockets = bound_below(run)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process in excluded | found:
                continue
            if has_mark(process, run) or is_in_cgroup(process, run) or uses_folder(process, run, sockets):
                found |= {process, *process.children(recursive=True)}
    for process in found - excluded:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def environment(process: psutil.Process) -> list[str]:
    """Return the environment at the start of the process.

    A process can overwrite the beginning of it, as slurmstepd does.
    """
    with contextlib.suppress(OSError):  # a process of another user
        return os.fsdecode(Path(f"/proc/{process.pid}/environ").read_bytes()).split("\0")
    return []


def has_mark(process: psutil.Process, run: Path) -> bool:
    """Return True if the process has the mark of `run`, or of a run inside it."""
    return any(f"{each}/".startswith(f"{MARK}={run}/") for each in environment(process))


def is_in_cgroup(process: psutil.Process, run: Path) -> bool:
    with contextlib.suppress(OSError):
        return run.name in Path(f"/proc/{process.pid}/cgroup").read_text()
    return False


def uses_folder(process: psutil.Process, run: Path, sockets: Container[str]) -> bool:
    """Return True if a process that overwrote its environment uses `run`.

    It does if its current folder, an open file or a bound socket is below `run`. If a process has an intact environment
    without the mark, it is unrelated: a backup, or an interactive shell.
    """
    if "=" in "".join(environment(process)[:1]):
        return False
    with contextlib.suppress(OSError):  # a process of another user, or it has just ended
        proc = f"/proc/{process.pid}"
        open_paths = [os.readlink(f"{proc}/cwd"), *(os.readlink(file) for file in Path(f"{proc}/fd").iterdir())]
        return any(path.startswith(f"{run}/") or path in sockets for path in open_paths)
    return False


def bound_below(run: Path) -> set[str]:
    """Return the sockets whose path is below `run`, as /proc/PID/fd names them."""
    rows = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines())
    return {f"socket:[{row[6]}]" for row in rows if row[-1].startswith(f"{run}/")}


# mounts


def mountinfo() -> Iterator[tuple[str, str, str]]:
    """Yield (mount point, kind, source) of all mounts that this process sees, the newest first."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        fields, _, more = line.partition(" - ")
        raw_fields = (fields.split()[4], *more.split()[:2])
        point, kind, source = (
            re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word) for word in raw_fields
        )
        yield point, kind, source


def unmount(run: Path) -> None:
    """Unmount everything that is mounted below `run`, or elsewhere with a source below `run`.

    A frozen file system is thawed first. To thaw it, it must be opened. Only file systems on disks are opened, because
    others may hang.
    """
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
    """Detach the loop devices of files below `run`."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # detached meanwhile
            if backing.read_text().startswith(f"{run}/"):
                subprocess.run(["losetup", "--detach", f"/dev/{backing.parts[3]}"], check=False)


# cgroups


def cgroups(run: Path) -> Iterator[Path]:
    """Yield the cgroups that are named after `run`, and all cgroups below them, in each hierarchy, innermost first."""
    for root in {point for point, kind, _ in mountinfo() if kind in ("cgroup", "cgroup2")}:
        for folder, _, _ in os.walk(root, topdown=False):
            if run.name in folder.removeprefix(root):
                yield Path(folder)


def thaw(run: Path) -> None:
    for cgroup in cgroups(run):
        for file, thawed in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):  # version 1, version 2
            with contextlib.suppress(OSError):
                (cgroup / file).write_text(thawed)


def remove_cgroup(cgroup: Path) -> None:
    with contextlib.suppress(OSError):  # its processes have not left it yet
        cgroup.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
