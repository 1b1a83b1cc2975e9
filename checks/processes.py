"""Processes that were killed and do not end, and zombies in masses.

Rules: a killed process that stays in D (uninterruptible) hangs in a driver or file system and holds its GPU, memory
and mounts; Slurm cannot end its job (GCM and Azure healthagent look for it). Killed is: SIGKILL is pending, which the
kernel (signal.c, complete_signal) makes of every fatal signal, or it is on its way out already (PF_EXITING, which has
taken the signal); one that writes a core dump is neither. A leader that ended (Z) waits for its threads: they count.

To read all of 2,000 processes takes 18 ms of CPU. So a look reads some, the next look goes on behind them, and where
anything is suspicious all are read, as in the first look. A stuck process is therefore seen within
(processes / processes_per_look) looks, the kernel's own threads not counted, and found `killed_seconds` later. Of more
zombies than allowed at least one share of processes has so large a part that all are counted.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from healthd.config import CheckConfig, Seconds
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, Severity
from healthd.past import Past
from healthd.text import printable

USES = ""

ONLINE = "/sys/devices/system/cpu/online"
CPUS = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
KTHREADD = 2
KTHREADD_STAT = re.compile(r"2 \(kthreadd\) \w 0 ")  # in a container process 2 may be any
STATES = frozenset("RSDTtZXxKWPI")
LEAST_FIELDS = 44  # Linux 2.6 has so many; later kernels have more
PF_EXITING = 0x4
SIGKILL = 1 << (9 - 1)
MOST_FINDINGS = 20  # a dead file server may hold hundreds: the oldest are enough to drain, and to look at


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """killed_seconds        a killed process may hang for so long
    max_zombies_per_core  more zombies than this for each CPU warn
    processes_per_look    so many processes are read in one look, unless something is suspicious
    """

    killed_seconds: Seconds = 300.0
    max_zombies_per_core: int = 50
    processes_per_look: int = 200


def validate(config: Config) -> str | None:
    return None if config.processes_per_look > 0 else "processes_per_look must be 1 or more"


class Process(NamedTuple):
    """`start`, in ticks since boot, tells a process from a later one with the same pid."""

    pid: int
    command: str
    state: str
    parent: int
    flags: int
    threads: int
    start: int


class Seen(NamedTuple):
    zombies: list[Process]
    stuck: list[Process]
    unreadable: list[str]


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    pids = _user_processes(host)
    if not pids:
        return  # a captured tree
    last = past.last(Observation("processes_looked_up_to_pid", 0))
    at = bisect.bisect_right(pids, last.value) if last else 0
    order = pids[at:] + pids[:at]
    now = min(len(pids), config.processes_per_look) if last and last.value else len(pids)
    seen = Seen([], [], [])
    _look(host, order[:now], seen)
    allowed = config.max_zombies_per_core * _cores(host) if seen.zombies else 0
    many = len(seen.zombies) * len(pids) > allowed * now
    if seen.stuck or many:
        _look(host, order[now:], seen)
    yield Observation("processes_looked_up_to_pid", 0 if seen.stuck else order[now - 1])  # 0: all
    for process in sorted(seen.stuck, key=lambda p: (p.start, p.pid))[:MOST_FINDINGS]:
        yield Finding(
            Severity.DEGRADED,
            "processes/unkillable",
            f"{process.pid}@{process.start}",
            _words(host, process),
            confirm_seconds=config.killed_seconds,
            shared_cause=True,
        )
    if many and len(seen.zombies) > allowed:
        ((parent, children),) = Counter(zombie.parent for zombie in seen.zombies).most_common(1)
        message = f"{len(seen.zombies)} zombies, more than {allowed}; {children} are children of process {parent}"
        yield Finding(Severity.WARNING, "processes/zombies", "", message)
    if seen.unreadable:
        raise ValueError("; ".join(seen.unreadable[:3]))


def _user_processes(host: Host) -> list[int]:
    """Pids in ascending order, without the kernel's own threads if it tells which they are: they get no signals."""
    names = set(host.names("/proc"))
    if KTHREADD_STAT.match(host.read(f"/proc/{KTHREADD}/stat") or ""):
        children = host.read(f"/proc/{KTHREADD}/task/{KTHREADD}/children") or ""
        names -= {str(KTHREADD), *children.split()}
    return sorted(int(name) for name in names if name.isdecimal())


def _look(host: Host, pids: Sequence[int], seen: Seen) -> None:
    """Adds its readings to `seen`."""
    for pid in pids:
        try:
            path = f"/proc/{pid}/stat"
            text = host.read(path)
            if text is None or state_of(text, path) not in "DZ":
                continue
            process = parse(text, path)
            if process.state == "Z":
                seen.zombies.append(process)
            if _is_stuck(host, process):
                seen.stuck.append(process)
        except ProcessLookupError:  # it ended while it was read
            continue
        except (OSError, ValueError) as error:  # it must not hide the others
            seen.unreadable.append(str(error))


def state_of(text: str, where: str) -> str:
    """The letter in /proc/PID/stat. The name before it may hold anything. Raises ValueError if it is cut short."""
    state = text[text.rfind(")") + 2 :][:1]
    if state not in STATES or text.count(" ") < LEAST_FIELDS - 1:
        raise ValueError(f"{where}: not the state of a process: {text[:60]!r}")
    return state


def parse(text: str, where: str) -> Process:
    """See proc_pid_stat(5). Raises ValueError."""
    name, _, rest = text.rpartition(") ")
    pid, _, command = name.partition(" (")
    try:
        fields = rest.split()
        parent, flags, threads, start = (int(fields[i]) for i in (1, 6, 17, 19))
        return Process(int(pid), command, fields[0], parent, flags, threads, start)
    except (ValueError, IndexError):
        raise ValueError(f"{where}: not the state of a process: {text[:60]!r}") from None


def _is_stuck(host: Host, process: Process) -> bool:
    own = f"/proc/{process.pid}"
    if process.state == "D":
        return _is_killed(host, own, process)
    for task in host.list(f"{own}/task") if process.threads > 1 else []:
        text = host.read(f"{own}/task/{task}/stat")
        if text is not None and state_of(text, f"{own}/task/{task}/stat") == "D":
            thread = parse(text, f"{own}/task/{task}/stat")
            if _is_killed(host, f"{own}/task/{task}", thread):
                return True
    return False


def _is_killed(host: Host, where: str, task: Process) -> bool:
    """Raises ValueError if the task's status does not tell."""
    status = host.read(f"{where}/status")
    if status is None:
        return False
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    if fields.get("CoreDumping") == "1":
        return False
    pending = [fields.get(name, "") for name in ("SigPnd", "ShdPnd")]
    try:
        if any(len(word) != 16 for word in pending):
            raise ValueError
        signals = [int(word, 16) for word in pending]
    except ValueError:
        raise ValueError(f"{where}/status: no signals in {status[:60]!r}") from None
    return bool(task.flags & PF_EXITING) or any(signal & SIGKILL for signal in signals)


def _cores(host: Host) -> int:
    """The number of CPUs in "0-127,256". Raises ValueError."""
    text = host.read(ONLINE) or ""
    if not CPUS.fullmatch(text):
        raise ValueError(f"{ONLINE}: not a list of CPUs: {text[:60]!r}")
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return sum(end[-1] - end[0] + 1 for end in ends)


def _words(host: Host, process: Process) -> str:
    command = printable(process.command)
    found = host.stat(f"/proc/{process.pid}")
    user = f" of user {found.uid}" if found else ""
    waits = host.read(f"/proc/{process.pid}/wchan") or "0"
    where = "" if waits == "0" or not waits.isidentifier() else f" in {waits}"
    return f"process {process.pid} ({command}){user} was killed and hangs{where}"


EXPLAIN = {
    "processes/unkillable": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A process was killed and has not ended for minutes: it sleeps in the kernel, where no signal reaches it. The "
        "part is its number, and when it started in ticks after boot.",
        "It holds its memory, GPU and mounts. Slurm cannot end its job; the next one finds less than it was promised.",
        "cat /proc/PID/wchan /proc/PID/stack shows where it hangs. nvidia or uvm: journalctl -k | grep Xid; nfs, "
        "rpc, lustre: the file server. It ends when that answers; if it never does, reboot.",
    ),
    "processes/zombies": Explain(
        Severity.WARNING,
        Clears.PASS,
        "So many processes have ended without their parents taking note.",
        "None at first. When the numbers of processes run out nothing can be started any more.",
        "ps -eo stat,ppid | awk '/^Z/ {print $2}' | sort | uniq -c | sort -n | tail shows the parents. Restart or "
        "repair the parent; a container without an init as its first process is a common one.",
    ),
}
