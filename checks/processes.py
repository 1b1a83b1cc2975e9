"""Processes that were killed and do not end, and zombies in masses.

Rules: a killed process that stays in D (uninterruptible) hangs in a driver or file system and holds its GPU, memory
and mounts; Slurm cannot end its job (GCM and Azure healthagent look for it). Killed is: SIGKILL is pending, which the
kernel (signal.c, complete_signal) makes of every fatal signal, or it is on its way out already (PF_EXITING, which has
taken the signal); one that writes a core dump is neither. A leader that ended (Z) waits for its threads: they count.

A user can have a process hang for ever: in a FUSE mount of their own, whose server does not answer a request that it
has taken (fuse/dev.c, request_wait_answer). That is no fault of the node: it warns, as processes/user_file_system, and
never drains. It counts only if all of this holds, which hides no hang in a driver or a file server: the task's stack in
the kernel has no other module's function than fuse's or overlay's (a driver that faults on a FUSE page has its own
there), and it waits for FUSE or for a lock of the file system layer, which another may hold who waits for FUSE;
requests wait in a user's FUSE connection (/sys/fs/fuse/connections/N, which belongs to who mounted it), and if some
also wait in root's (a shared one, like CVMFS), the process is of a user whose own connection waits, or in a user
namespace with that user in it (uid_map; a container without root). The stack is for CAP_SYS_ADMIN alone, which
healthd.service does not give: there the innermost function (wchan) has to do, and one that waits for a lock must be of
such a user. Where neither can be read, or no connections, it drains, as any other.

To read all of 2,000 processes takes 18 ms of CPU. So a look reads some, the next look goes on behind them, and where
anything is suspicious all are read, as in the first look. A stuck process is therefore seen within
(processes / processes_per_run) looks, the kernel's own threads not counted, and found `killed_seconds` later. Of more
zombies than allowed at least one share of processes has so large a part that all are counted.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from healthd.api import (
    CheckSettings,
    Clears,
    Count,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Past,
    Processes,
    Seconds,
    Severity,
    is_decimal,
    printable,
    regex,
)

USES = ""

ONLINE = "/sys/devices/system/cpu/online"
CPUS = regex(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
KTHREADD = 2
KTHREADD_STAT = regex(r"2 \(kthreadd\) \w 0 ")  # in a container process 2 may be any
STATES = frozenset("RSDTtZXxKWPI")
LEAST_FIELDS = 44  # Linux 2.6 has so many; later kernels have more
PF_EXITING = 0x4
SIGKILL = 1 << (9 - 1)
FUSE_CONNECTIONS = "/sys/fs/fuse/connections"
UID = regex(r"^Uid:\t([0-9]{1,10})", re.MULTILINE)
FRAME = regex(r"^\[<[0-9a-fx]+>\] ([^\s+]+)\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[([^\s\]]+)\])?")
UID_MAP = regex(r"^ *[0-9]{1,10} +([0-9]{1,10}) +([0-9]{1,10})$", re.MULTILINE)
ALL_UIDS = 2**32 - 1  # what the first user namespace maps
# The innermost function of a task that waits, deaf to signals, for a lock of the file system layer: an inode's, a
# page's, a file's position. Older kernels name the lock; newer ones, whose locks are left out of stacks (__sched), name
# the function that takes it, as the compiler inlined it (fs/namei.c, open.c, utimes.c, xattr.c, posix_acl.c, file.c;
# 6.18 shows path_openat, filename_create, do_unlinkat, do_renameat2, walk_component, fdget_pos and __folio_lock).
FILE_LOCKS = regex(
    r"(call_)?rwsem_down_(read|write)_(failed|slowpath)|lock_(rename|two_(directories|inodes|nondirectories))"
    r"|d_alloc_parallel|lookup_slow|walk_component|path_openat|do_last|open_last_lookups|filename_create|(__)?start_dirop"
    r"|kern_path_locked|(do|filename)_(unlinkat|rmdir|renameat2)|vfs_(link|rename|rmdir|unlink|utimes)|utimes_common"
    r"|do_truncate|(chmod|chown)_common|vfs_(set|remove)(xattr|_acl)|(__)?fdget_pos|__(lock_page|folio_lock)"
)
MOST_FINDINGS = 20  # a dead file server may hold hundreds: the oldest are enough to drain, and to look at


class Config(CheckSettings, frozen=True):
    """killed_seconds        a killed process may hang for so long
    max_zombies_per_core  more zombies than this for each CPU warn
    processes_per_run    so many processes are read in one look, unless something is suspicious
    """

    killed_seconds: Seconds = 300.0
    max_zombies_per_core: Count = 50
    processes_per_run: Processes = 200


def validate(config: Config) -> str | None:
    return None if config.processes_per_run > 0 else "processes_per_run must be 1 or more"


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
    """`stuck`: killed, and hangs; `in_user_fuse`: the same, in a file system that a user mounted."""

    zombies: list[Process]
    stuck: list[Process]
    in_user_fuse: list[Process]
    unreadable: list[str]


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    pids = _user_processes(host)
    if not pids:
        yield NothingToCheck("no process of a user")  # a captured tree
        return
    last = past.last(Observation("processes_scanned_up_to_pid", 0))
    at = bisect.bisect_right(pids, last.value) if last else 0
    order = pids[at:] + pids[:at]
    now = min(len(pids), config.processes_per_run) if last and last.value else len(pids)
    seen = Seen([], [], [], [])
    _look(host, order[:now], seen)
    allowed = config.max_zombies_per_core * _cores(host) if seen.zombies else 0
    many = len(seen.zombies) * len(pids) > allowed * now
    found = bool(seen.stuck or seen.in_user_fuse)
    if found or many:
        _look(host, order[now:], seen)
        found = bool(seen.stuck or seen.in_user_fuse)
    yield Observation("processes_scanned_up_to_pid", 0 if found else order[now - 1])  # 0: all
    for process in sorted(seen.stuck, key=lambda p: (p.start, p.pid))[:MOST_FINDINGS]:
        yield Finding(
            Severity.DEGRADED,
            "processes/unkillable",
            f"{process.pid}@{process.start}",
            _words(host, process),
            confirm_seconds=config.killed_seconds,
            shared_cause=True,
        )
    for process in sorted(seen.in_user_fuse, key=lambda p: (p.start, p.pid))[:MOST_FINDINGS]:
        yield Finding(
            Severity.WARNING,
            "processes/user_file_system",
            f"{process.pid}@{process.start}",
            f"{_words(host, process)}, for the FUSE file system of a user",
            confirm_seconds=config.killed_seconds,
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
    return sorted(int(name) for name in names if is_decimal(name))


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
            tasks = list(_stuck_tasks(host, process))
            if tasks:
                theirs = all(_waits_in_user_fuse(host, task) for task in tasks)
                (seen.in_user_fuse if theirs else seen.stuck).append(process)
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


def _stuck_tasks(host: Host, process: Process) -> Iterator[str]:
    """Where /proc has its tasks that were killed and hang."""
    own = f"/proc/{process.pid}"
    if process.state == "D" and _is_killed(host, own, process):
        yield own
    for task in host.list(f"{own}/task") if process.threads > 1 else []:
        where = f"{own}/task/{task}"
        text = host.read(f"{where}/stat")
        hangs = text is not None and state_of(text, f"{where}/stat") == "D"
        if text is not None and hangs and _is_killed(host, where, parse(text, f"{where}/stat")):
            yield where


def _waits_in_user_fuse(host: Host, where: str) -> bool:
    """Whether a task that hangs waits for a FUSE file system that a user mounted."""
    stack, wchan = host.told(f"{where}/stack"), host.told(f"{where}/wchan")
    if not (is_fuse_wait(stack) if stack else is_fuse_function(wchan) or is_file_lock(wchan)):
        return False
    waiting = {
        found.uid
        for name in host.names(FUSE_CONNECTIONS)
        if host.told(f"{FUSE_CONNECTIONS}/{name}/waiting").strip("0")
        and (found := host.stat(f"{FUSE_CONNECTIONS}/{name}"))
    }
    users = waiting - {0}
    only_theirs = 0 not in waiting and (stack != "" or is_fuse_function(wchan))
    return bool(users) and (only_theirs or any(_is_of(host, where, user) for user in users))


def _is_of(host: Host, where: str, user: int) -> bool:
    """Whether a task is this user's, who is not root: by its uid, or since its user namespace, which is not the first
    one, has that user in it."""
    uid = UID.search(host.told(f"{where}/status"))
    if uid is not None and int(uid[1]) == user:
        return True
    ranges = [(int(first), int(count)) for first, count in UID_MAP.findall(host.told(f"{where}/uid_map"))]
    return all(count < ALL_UIDS for _, count in ranges) and any(user - first in range(count) for first, count in ranges)


def is_fuse_wait(stack: str) -> bool:
    """Whether a task with this stack (/proc/PID/stack, the innermost function first) waits for a FUSE server or a lock
    of the file system layer, and for no driver: drivers are modules."""
    frames = [frame for line in stack.split("\n") for frame in FRAME.findall(line)]
    modules = {module for _, module in frames}
    functions = [function for function, _ in frames]
    waits = any(is_fuse_function(function) for function in functions)
    return modules <= {"", "fuse", "overlay"} and (waits or any(is_file_lock(function) for function in functions[:1]))


def is_fuse_function(function: str) -> bool:
    """Whether this function of the kernel is FUSE's: whoever waits in it waits for a FUSE server."""
    return function.startswith(("fuse_", "request_wait_answer"))


def is_file_lock(function: str) -> bool:
    """Whether who waits in this function may wait for a lock of the file system layer. A compiler's copy of a function
    has a suffix: .isra.0, .part.0."""
    return FILE_LOCKS.fullmatch(function.partition(".")[0]) is not None


def _is_killed(host: Host, where: str, task: Process) -> bool:
    """Raises ValueError if the task's status does not tell."""
    status = host.read(f"{where}/status")
    if status is None:
        return False
    fields = dict(line.split(":\t", 1) for line in status.split("\n") if ":\t" in line)
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


OBSERVATIONS = {
    "processes_scanned_up_to_pid": Meaning(
        "The process id up to which the last look went: 0 if all were looked at; for healthd itself.",
    ),
}

EXPLAIN = {
    "processes/unkillable": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A process was killed and has not ended for minutes: it sleeps in the kernel, where no signal reaches it. The "
        "part is its number, and when it started in ticks after boot.",
        "It holds its memory, GPU and mounts. Slurm cannot end its job; the next one finds less than it was promised.",
        "cat /proc/PID/wchan /proc/PID/stack shows where it hangs. nvidia or uvm: journalctl -k | grep Xid; nfs, "
        "rpc, lustre: the file server. It ends when that answers; if it never does, reboot.",
        confirm="killed_seconds",
        shared=True,
    ),
    "processes/user_file_system": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A process was killed and has not ended for minutes: it waits for a FUSE file system that a user has mounted "
        "(sshfs, an Apptainer image) and whose server does not answer.",
        "Slurm cannot end its job. The node is not to blame: its jobs and GPUs are as before.",
        "Kill the server: fuser -v /dev/fuse shows it. Or echo 1 > /sys/fs/fuse/connections/N/abort, where "
        "/sys/fs/fuse/connections/N/waiting is not 0.",
        confirm="killed_seconds",
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

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.KERNEL),
    "processes/user_file_system": FailureCause.USER,
}
ENDS_JOB = {
    "processes/unkillable": EndsJob.ALWAYS,
    "processes/user_file_system": EndsJob.NEVER,
    "processes/zombies": EndsJob.NEVER,
}
