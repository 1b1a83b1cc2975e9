"""Read this node's processes, locks and inhibitors, as required before a repair step (requirements.py).

The caller waits for the answers, so the daemon does not use this module.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from healthd.agent.evidence.case import Process as StuckProcess
from healthd.agent.evidence.stuck import alive
from healthd.agent.repair.requirements import (
    Inhibitor,
    NodeReading,
    Process,
    parse_inhibitors,
    parse_locks,
    parse_parent,
    parse_unit,
)
from healthd.common.model import RepairStep
from healthd.common.text import is_decimal
from healthd.host.program import run_program

COMMAND_SECONDS = 10.0
DAEMON_UNIT = "healthd.service"
# healthd's programs outside the daemon. Their nvidia-smi may hang in the kernel, which only a boot ends.
PROGRAM_UNITS = frozenset({"healthd-evidence.service", "healthd-repair.service", "healthd-hooks.service"})
MAX_COMMAND_BYTES = 4096
LIST_INHIBITORS = (
    *("busctl", "--json=short", "call", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "ListInhibitors"),
)
# Files that a package manager locks while it changes the system.
PACKAGE_LOCKS = (
    *("var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock", "var/lib/apt/lists/lock"),
    *("var/lib/rpm/.rpm.lock", "usr/lib/sysimage/rpm/.rpm.lock"),
)


def read_node(root: str = "/") -> NodeReading:
    """Return a reading of this node. Anything that cannot be read is unknown, never absent."""
    has_systemd = os.path.isdir(os.path.join(root, "run/systemd/system"))
    return NodeReading(
        processes=_processes(root),
        package_locks=tuple(_package_locks(root)),
        inhibitors=_inhibitors() if has_systemd else (),
        system_state=_system_state() if has_systemd else "",
        shutdown_scheduled=os.path.exists(os.path.join(root, "run/systemd/shutdown/scheduled")),
        is_capture_kernel=os.path.exists(os.path.join(root, "proc/vmcore")),
    )


def own_pids(
    reading: NodeReading, step: RepairStep, stuck: Iterable[StuckProcess] = (), daemon: int = 0
) -> frozenset[int]:
    """Return healthd's processes that may use the GPUs right before this step.

    The daemon's checks close the GPUs when they end. A boot ends also those programs that hang in the kernel, and the
    `stuck` ones; a reset must wait for them. `daemon` is the daemon's pid without systemd, or 0.
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
    """Return all processes, or None if another user's files in /proc cannot be read."""
    proc = os.path.join(root, "proc")
    found = []
    for pid in filter(is_decimal, os.listdir(proc)):
        folder = os.path.join(proc, pid)
        try:
            found.append(
                Process(
                    int(pid),
                    parse_parent(_read(folder, "stat")),
                    _read(folder, "comm").rstrip("\n"),
                    _read(folder, "cmdline").replace("\0", " ").strip(),
                    parse_unit(_read(folder, "cgroup")),
                    tuple(sorted(set(_gpu_files(os.path.join(folder, "fd"))))),
                )
            )
        except PermissionError:
            return None
        except OSError:
            continue  # it has exited
    return tuple(found)


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
        return file.read(MAX_COMMAND_BYTES)


def _gpu_files(folder: str) -> Iterator[str]:
    """Yield the process's open device files of NVIDIA's driver. A user's regular file of that name does not count."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            target = os.readlink(path)
            if target.startswith("/dev/nvidia") and stat.S_ISCHR(os.stat(path).st_mode):
                yield target
        except OSError:
            continue  # closed in the meantime


def _package_locks(root: str) -> Iterator[str]:
    with open(os.path.join(root, "proc/locks"), encoding="ascii", errors="replace") as file:
        locked = parse_locks(file.read())
    for name in PACKAGE_LOCKS:
        path = os.path.join(root, name)
        try:
            status = os.stat(path)
        except OSError:
            continue
        if (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) in locked:
            yield path


def _inhibitors() -> tuple[Inhibitor, ...] | None:
    try:
        result = run_program(LIST_INHIBITORS, COMMAND_SECONDS)
        return parse_inhibitors(result.stdout) if result.status == 0 else None
    except (OSError, ValueError):
        return None


def _system_state() -> str:
    """Return the state of systemd, or "unknown"."""
    try:
        return run_program(("systemctl", "is-system-running"), COMMAND_SECONDS).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
