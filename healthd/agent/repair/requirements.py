"""Requirements on this node right before a repair step, from a reading of its processes and locks. Pure.

A reset ends every process that uses a GPU. A reboot also interrupts a package manager, a firmware update or a crash
dump. docs/adr/0043-steps-of-a-repair.md has the sources of the names and files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from healthd.common.text import is_decimal, regex
from healthd.common.values import Value

# Names as the kernel keeps them: the first 15 bytes.
PACKAGE_MANAGERS = frozenset(
    (
        *("apt", "apt-get", "aptitude", "dpkg", "unattended-upgr", "rpm", "yum", "dnf", "dnf5", "microdnf", "zypper"),
        *("transactional-u", "rpm-ostree", "dkms", "depmod", "dracut", "update-initramf", "mkinitramfs"),
        "grub-install",
    )
)
FIRMWARE_UPDATES = frozenset(
    (
        *("flint", "mstflint", "mlxfwmanager", "mstfwmanager", "mlxup", "mlxburn", "mstfwreset", "mlxfwreset"),
        *("nvfwupd", "nvflash", "fwupdmgr", "fwupdtool", "sum", "saa", "racadm", "dsu", "ilorest", "onecli"),
        "storcli64",
    )
)
# Programs that update firmware only with these words.
_FIRMWARE_COMMANDS = (("ipmitool", (" hpm ", " fru write ")), ("nvme", (" fw-",)), ("python", ("nvfwupd",)))
# Programs, by the beginning of their names, whose arguments matter for a requirement.
NAMES_OF_COMMANDS = ("slurmstepd", *(name for name, _ in _FIRMWARE_COMMANDS))
CRASH_DUMPS = frozenset({"makedumpfile", "vmcore-dmesg"})
# States of systemd in which the machine is not in normal operation (systemctl(1)).
SETTLED_STATES = frozenset({"", "running", "degraded"})
UNSETTLED_STATES = frozenset({"initializing", "starting", "maintenance", "stopping"})
MAX_NAMED = 3


class Process(Value, frozen=True):
    """A process.

    command    its command line, separated by blanks, if its name begins with one of NAMES_OF_COMMANDS
    unit       its systemd service, or ""
    gpu_files  its open device files of NVIDIA's driver
    is_hidden  True if its command line could not be read, because the process hangs in the kernel
    """

    pid: int
    parent: int
    name: str
    command: str = ""
    unit: str = ""
    gpu_files: tuple[str, ...] = ()
    is_hidden: bool = False


class Inhibitor(Value, frozen=True):
    """A lock of systemd-logind that inhibits a shutdown (`busctl ... ListInhibitors`)."""

    what: str
    who: str
    why: str
    mode: str


class NodeReading(Value, frozen=True):
    """A reading of this node.

    processes       None if not all processes could be read, for example without root
    package_locks   lock files of package managers that a process has locked, or None if unknown
    inhibitors      None if systemd-logind could not be queried
    system_state    `systemctl is-system-running`, or "" without systemd
    """

    processes: tuple[Process, ...] | None = None
    package_locks: tuple[str, ...] | None = ()
    inhibitors: tuple[Inhibitor, ...] | None = ()
    system_state: str = ""
    shutdown_scheduled: bool = False
    is_capture_kernel: bool = False


class Requirement(Value, frozen=True):
    """A requirement. `met` is None if unknown. `problem` is why the requirement is not met, or ""."""

    name: str
    text: str
    met: bool | None
    problem: str = ""


def requirements(
    reading: NodeReading, stop_services: Collection[str], own_pids: Collection[int], is_reset: bool = False
) -> list[Requirement]:
    """Return all requirements on this node.

    Args:
        stop_services: services that may use the GPUs, because they are stopped for a reset.
        own_pids: processes of healthd.
        is_reset: True for a GPU reset. The daemon's processes must then not use the GPUs either: one that still does
            hangs in the driver.
    """
    return [
        _by_processes("jobs", "no process of a job, a prolog or an epilog runs", reading, slurm_programs),
        _by_processes(
            "gpu_users",
            "only services in stop_services use the GPUs",
            reading,
            lambda processes: gpu_users(processes, stop_services, () if is_reset else own_pids),
        ),
        _package_managers(reading),
        _by_processes(
            "firmware", "no firmware update runs", reading, lambda processes: firmware_updates(processes, own_pids)
        ),
        _crash_dump(reading),
        _inhibitors(reading),
        _settled(reading),
    ]


def _by_processes(
    name: str, text: str, reading: NodeReading, find: Callable[[Iterable[Process]], Iterable[Process]]
) -> Requirement:
    if reading.processes is None:
        return Requirement(name, text, None)
    return _requirement(name, text, [f"{p.name} (pid {p.pid})" for p in find(reading.processes)])


def _requirement(name: str, text: str, found: Sequence[str]) -> Requirement:
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return Requirement(name, text, not found, ", ".join(found[:MAX_NAMED]) + more)


def slurm_programs(processes: Iterable[Process]) -> Iterator[Process]:
    """Yield slurmstepd processes and children of slurmd, which are prologs, epilogs and health checks.

    `slurmstepd infinity` keeps Slurm's cgroup open on a node without jobs (cgroup_v2.c).
    """
    found = tuple(processes)
    daemons = {p.pid for p in found if p.name == "slurmd"}
    for p in found:
        is_step = p.name == "slurmstepd" and p.command.split()[1:2] != ["infinity"]
        if is_step or (p.parent in daemons and p.name not in ("slurmd", "slurmstepd")):
            yield p


def gpu_users(
    processes: Iterable[Process], stop_services: Collection[str], own_pids: Collection[int]
) -> Iterator[Process]:
    """Yield processes that have a GPU open and belong neither to `stop_services` nor to healthd."""
    stopped = {name if "." in name else f"{name}.service" for name in stop_services}
    for p in processes:
        if p.gpu_files and p.unit not in stopped and p.pid not in own_pids:
            yield p


def firmware_updates(processes: Iterable[Process], own_pids: Collection[int] = ()) -> Iterator[Process]:
    """Yield firmware updates, and programs whose hidden arguments may be those of one, except healthd's own."""
    for p in processes:
        is_unknown = p.is_hidden and p.pid not in own_pids
        is_command = any(
            p.name.startswith(name) and (is_unknown or any(word in f"{p.command} " for word in words))
            for name, words in _FIRMWARE_COMMANDS
        )
        if p.name in FIRMWARE_UPDATES or is_command:
            yield p


def _package_managers(reading: NodeReading) -> Requirement:
    name, text = "packages", "no package manager runs"
    running = [p for p in reading.processes or () if p.name in PACKAGE_MANAGERS]
    found = [
        *(f"{p.name} (pid {p.pid})" for p in running),
        *(f"{path} is locked" for path in reading.package_locks or ()),
    ]
    if not found and (reading.processes is None or reading.package_locks is None):
        return Requirement(name, text, None)
    return _requirement(name, text, found)


def _crash_dump(reading: NodeReading) -> Requirement:
    found = ["this is the capture kernel"] if reading.is_capture_kernel else []
    found += [f"{p.name} (pid {p.pid})" for p in reading.processes or () if p.name in CRASH_DUMPS]
    name, text = "crash_dump", "no crash dump is being written"
    if not found and reading.processes is None:
        return Requirement(name, text, None)
    return _requirement(name, text, found)


def _inhibitors(reading: NodeReading) -> Requirement:
    name, text = "inhibitors", "no service inhibits a shutdown"
    if reading.inhibitors is None:
        return Requirement(name, text, None)
    return _requirement(name, text, [f"{i.who}: {i.why}" for i in reading.inhibitors if blocks_shutdown(i)])


def blocks_shutdown(inhibitor: Inhibitor) -> bool:
    """Return True if the lock blocks a shutdown. A lock of mode "delay" only delays it by seconds."""
    return inhibitor.mode.startswith("block") and "shutdown" in inhibitor.what.split(":")


def _settled(reading: NodeReading) -> Requirement:
    found = [f"systemd is {reading.system_state}"] if reading.system_state in UNSETTLED_STATES else []
    found += ["a shutdown is scheduled"] if reading.shutdown_scheduled else []
    name, text = "settled", "the machine is not starting or shutting down"
    if not found and reading.system_state not in SETTLED_STATES:
        return Requirement(name, text, None, f"the state of systemd is {reading.system_state}")
    return _requirement(name, text, found)


# --- parsers


def parse_inhibitors(text: str) -> tuple[Inhibitor, ...]:
    """Parse `busctl --json=short call ... ListInhibitors`. Raises ValueError."""
    try:
        rows = json.loads(text)["data"][0]
        return tuple(Inhibitor(*(_text(word) for word in row[:4])) for row in rows)
    except (KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"not a list of inhibitors: {type(error).__name__}") from None


def _text(word: object) -> str:
    if not isinstance(word, str):
        raise TypeError("not text")
    return word


def parse_locks(text: str) -> frozenset[tuple[int, int, int]]:
    """Return (major, minor, inode) of each file that a process has locked, from /proc/locks. Other lines are skipped.

    "1: POSIX  ADVISORY  WRITE 17079 fe:00:402117 0 EOF"; device numbers are hexadecimal (proc_locks(5)).
    """
    found = regex(r"(?m)^\d+: (?:POSIX|FLOCK|OFDLCK)\s.*?\s([0-9a-f]{1,8}):([0-9a-f]{1,8}):(\d{1,20}) ").findall(text)
    return frozenset((int(major, 16), int(minor, 16), int(inode)) for major, minor, inode in found)


def parse_unit(cgroup: str) -> str:
    """Return the systemd service in the text of /proc/PID/cgroup, or "". A user's own services are left out."""
    match = regex(r"(?m)^(?:0:|\d+:name=systemd):(?:/[^/\n]*\.slice)*/([^/\n]+\.service)(?:/[^\n]*)?$").search(cgroup)
    return match[1] if match and not match[1].startswith("user@") else ""


def parse_parent(stat: str) -> int:
    """Return the parent's pid from /proc/PID/stat, or 0. The name may contain any characters, also parentheses."""
    words = stat.rpartition(")")[2].split()
    return int(words[1]) if len(words) > 1 and is_decimal(words[1]) else 0


def parse_state(stat: str) -> str:
    """Return the state in /proc/PID/stat, such as "S" or "D" (proc_pid_stat(5)), or ""."""
    return (stat.rpartition(")")[2].split() or [""])[0]
