"""Read this node's processes, locks and inhibitors before a repair step (requirements.py).

The functions block, so the daemon does not use this module.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator

from healthd.agent.evidence.case import Process as StuckProcess
from healthd.agent.evidence.stuck import alive
from healthd.agent.repair.requirements import (
    NAMES_OF_COMMANDS,
    Inhibitor,
    NodeReading,
    Process,
    parse_inhibitors,
    parse_locks,
    parse_parent,
    parse_state,
    parse_unit,
)
from healthd.common.model import RepairStep
from healthd.common.text import is_decimal
from healthd.host.program import run_program

COMMAND_SECONDS = 10.0
DAEMON_UNIT = "healthd.service"
# healthd's programs outside the daemon. If their nvidia-smi hangs in the kernel, only a boot ends it.
PROGRAM_UNITS = frozenset({"healthd-evidence.service", "healthd-repair.service", "healthd-hooks.service"})
MAX_COMMAND_BYTES = 4096
LIST_INHIBITORS = (
    *("busctl", "--json=short", "call", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "ListInhibitors"),
)
SHOW_LOGIND = ("systemctl", "show", "--property=LoadState,ActiveState", "--", "systemd-logind.service")
HAS_LOGIND = (
    *("busctl", "call", "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "NameHasOwner"),
    *("s", "org.freedesktop.login1"),
)
GONE = frozenset({errno.ENOENT, errno.ESRCH})  # the process has exited, or has closed the file
ENDED = ("Z", "X")  # states of a thread that has exited
GPU_FILES = "/dev/nvidia"
STATE_READS, STATE_SECONDS = 5, 0.1
# Files that a package manager locks while it changes the system.
PACKAGE_LOCKS = (
    *("var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock", "var/lib/apt/lists/lock"),
    *("var/lib/rpm/.rpm.lock", "usr/lib/sysimage/rpm/.rpm.lock"),
)


def read_node(root: str = "/") -> NodeReading:
    """Return a reading of this node. A value that cannot be read is unknown, never "absent"."""
    has_systemd = os.path.isdir(os.path.join(root, "run/systemd/system"))
    return NodeReading(
        processes=_processes(root),
        package_locks=_package_locks(root),
        inhibitors=_inhibitors() if has_systemd else (),
        system_state=_system_state() if has_systemd else "",
        shutdown_scheduled=os.path.exists(os.path.join(root, "run/systemd/shutdown/scheduled")),
        is_capture_kernel=os.path.exists(os.path.join(root, "proc/vmcore")),
    )


def own_pids(
    reading: NodeReading, step: RepairStep, stuck: Iterable[StuckProcess] = (), daemon: int = 0
) -> frozenset[int]:
    """Return healthd's processes that may use the GPUs right before this step.

    Before a reset, even these must not use the GPUs (requirements.py). A reset must also wait for programs that hang in
    the kernel, and for `stuck` processes; a boot ends them. `daemon` is the daemon's pid without systemd, or 0.
    """
    processes = reading.processes or ()
    ends_all = step in (RepairStep.REBOOT, RepairStep.POWER_CYCLE)
    units = {DAEMON_UNIT, *(PROGRAM_UNITS if ends_all else ())}
    found = {p.pid for p in processes if p.unit in units} | {os.getpid()}
    if ends_all:
        found |= {process.pid for process in alive(stuck)}
    if daemon and not reading.system_state:
        found.add(daemon)
        while below := {p.pid for p in processes if p.parent in found} - found:
            found |= below
    return frozenset(found)


def _processes(root: str) -> tuple[Process, ...] | None:
    """Return all processes, or None if one of them cannot be read, such as another user's without root."""
    proc = os.path.join(root, "proc")
    found = []
    for pid in filter(is_decimal, os.listdir(proc)):
        try:
            found.append(_process(int(pid), os.path.join(proc, pid)))
        except OSError as error:
            if error.errno not in GONE:
                return None
    return tuple(found)


def _process(pid: int, folder: str) -> Process:
    """Read a process. Raises OSError.

    A read of /proc/PID/cmdline waits for a lock that a process hanging in the kernel may keep forever. It is read only
    if its words matter and no thread hangs. No other file in /proc waits for the process.
    """
    stat_text, name = _read(folder, "stat"), _read(folder, "comm").rstrip("\n")
    is_needed = name.startswith(NAMES_OF_COMMANDS)
    is_hidden = is_needed and hangs(folder)
    return Process(
        pid,
        parse_parent(stat_text),
        name,
        _read(folder, "cmdline").replace("\0", " ").strip() if is_needed and not is_hidden else "",
        parse_unit(_read(folder, "cgroup")),
        tuple(sorted(set(_gpu_files(folder, parse_state(stat_text))))),
        is_hidden,
    )


def hangs(folder: str) -> bool:
    """Return True if a thread of this process hangs in the kernel (state D). `folder` is /proc/PID.

    Most threads leave this state within milliseconds, so it is read several times. Raises OSError.
    """
    for _ in range(STATE_READS):
        if not any(parse_state(text) == "D" for text in _thread_stats(folder)):
            return False
        time.sleep(STATE_SECONDS)
    return True


def _thread_stats(folder: str) -> Iterator[str]:
    tasks = os.path.join(folder, "task")
    for thread in os.listdir(tasks):
        try:
            yield _read(os.path.join(tasks, thread), "stat")
        except OSError as error:
            if error.errno not in GONE:
                raise


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
        return file.read(MAX_COMMAND_BYTES)


def _gpu_files(folder: str, state: str) -> Iterator[str]:
    """Yield the process's open device files of NVIDIA's driver. A regular file with such a name does not count.

    If the main thread has exited, only the other threads show the open files. Raises OSError.
    """
    for files in _descriptor_folders(folder, state):
        for name in os.listdir(files):
            path = os.path.join(files, name)
            try:
                target = os.readlink(path)
                if target.startswith(GPU_FILES) and stat.S_ISCHR(os.stat(path).st_mode):
                    yield target
            except OSError as error:
                if error.errno not in GONE:  # otherwise closed in the meantime
                    raise


def _descriptor_folders(folder: str, state: str) -> Iterator[str]:
    if state not in ENDED:
        yield os.path.join(folder, "fd")
        return
    tasks = os.path.join(folder, "task")
    for thread in os.listdir(tasks):
        try:
            is_left = parse_state(_read(os.path.join(tasks, thread), "stat")) not in ENDED
        except OSError as error:
            if error.errno not in GONE:
                raise
        else:
            if is_left:
                yield os.path.join(tasks, thread, "fd")


def _package_locks(root: str) -> tuple[str, ...] | None:
    """Return the locked files, or None if they cannot be read."""
    try:
        with open(os.path.join(root, "proc/locks"), encoding="ascii", errors="replace") as file:
            locked = parse_locks(file.read())
        return tuple(path for path in (os.path.join(root, name) for name in PACKAGE_LOCKS) if _file_id(path) in locked)
    except OSError:
        return None


def _file_id(path: str) -> tuple[int, int, int] | None:
    """Return (major, minor, inode), or None if there is no such file. Raises OSError."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def _inhibitors() -> tuple[Inhibitor, ...] | None:
    """Return the locks of systemd-logind, or None if they are unknown. Without logind, there are none."""
    try:
        result = run_program(LIST_INHIBITORS, COMMAND_SECONDS)
        if result.status == 0:
            return parse_inhibitors(result.stdout)
        return () if _has_no_logind() else None
    except (OSError, ValueError):
        return None


def _has_no_logind() -> bool:
    """Return True if systemd-logind does not run, for example because a site masks it for pam_slurm_adopt.

    Raises OSError.
    """
    shown = run_program(SHOW_LOGIND, COMMAND_SECONDS)
    unit = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    if shown.status != 0 or unit.get("ActiveState") not in ("inactive", "failed"):
        return False
    if unit.get("LoadState") in ("masked", "not-found"):
        return True
    owner = run_program(HAS_LOGIND, COMMAND_SECONDS)
    return owner.status == 0 and owner.stdout.split() == ["b", "false"]


def _system_state() -> str:
    """Return the state of systemd, or "unknown"."""
    try:
        return run_program(("systemctl", "is-system-running"), COMMAND_SECONDS).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
