"""Killed processes that do not exit, and large numbers of zombies.

Rules: a killed process that stays in state D (uninterruptible) hangs in a driver or file system. It keeps its GPU,
memory and mounts, and Slurm cannot end its job (GCM and Azure healthagent look for such processes). A process is
treated as killed if SIGKILL is pending (the kernel turns every fatal signal into SIGKILL: signal.c, complete_signal),
or if the process is already exiting (PF_EXITING, after taking the signal). A process that is writing a core dump is not
treated as killed. A thread group leader that has ended (Z) waits for its threads, which are checked.

A user can make a process hang forever in the user's own FUSE mount, if the FUSE server takes a request and never
answers it (fuse/dev.c, request_wait_answer). The node is not at fault, so this is only a warning
(processes/user_file_system), never a drain. All of the following must be true, so that no hang in a driver or a file
server is hidden:

- The only modules with functions on the task's kernel stack are fuse and overlay. (A driver that faults on a FUSE page
  has its own functions on the stack.)
- The task waits for FUSE, or for a lock in the file system layer that a task waiting for FUSE may hold.
- Requests wait in a user's FUSE connection (/sys/fs/fuse/connections/N, owned by the user who mounted it). Requests may
  also wait in a connection owned by root (a shared mount such as CVMFS). In that case the process must belong to a user
  whose own connection waits, or be in a user namespace that contains that user (uid_map; a rootless container).

Reading the stack requires CAP_SYS_ADMIN, which healthd.service does not grant. Without the stack, the innermost
function (wchan) is used, and a task that waits for a lock must belong to such a user. If neither stack nor wchan can be
read, or the connections cannot be read, the process drains the node like any other.

Reading all of 2,000 processes takes 18 ms of CPU. Each run therefore reads only some of the processes, and the next run
continues from there. If anything is suspicious, all processes are read, as in the first run. The number of runs until a
stuck process is detected is at most the number of processes (without kernel threads) divided by processes_per_run. The
process is reported `killed_seconds` later. If there are too many zombies, at least one run reads enough of them to
exceed the limit in proportion, and then counts all zombies.
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
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
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
KTHREADD_STAT = regex(r"2 \(kthreadd\) \w 0 ")  # in a container, process 2 may be any process
STATES = frozenset("RSDTtZXxKWPI")
MIN_FIELDS = 44  # number of fields in Linux 2.6; later kernels have more
PF_EXITING = 0x4
SIGKILL = 1 << (9 - 1)
FUSE_CONNECTIONS = "/sys/fs/fuse/connections"
UID = regex(r"^Uid:\t([0-9]{1,10})", re.MULTILINE)
FRAME = regex(r"^\[<[0-9a-fx]+>\] ([^\s+]+)\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[([^\s\]]+)\])?")
UID_MAP = regex(r"^ *[0-9]{1,10} +([0-9]{1,10}) +([0-9]{1,10})$", re.MULTILINE)
ALL_UIDS = 2**32 - 1  # size of the uid range in the initial user namespace
# Innermost function of a task that waits uninterruptibly for a lock in the file system layer (on an inode, a page or a
# file position). Older kernels show the lock function. Newer kernels omit lock functions from stacks (__sched) and show
# the function that takes the lock, depending on how the compiler inlined it (fs/namei.c, open.c, utimes.c, xattr.c,
# posix_acl.c, file.c; 6.18 shows path_openat, filename_create, do_unlinkat, do_renameat2, walk_component, fdget_pos and
# __folio_lock).
FILE_LOCKS = regex(
    r"(call_)?rwsem_down_(read|write)_(failed|slowpath)|lock_(rename|two_(directories|inodes|nondirectories))"
    r"|d_alloc_parallel|lookup_slow|walk_component|path_openat|do_last|open_last_lookups|filename_create|(__)?start_dirop"
    r"|kern_path_locked|(do|filename)_(unlinkat|rmdir|renameat2)|vfs_(link|rename|rmdir|unlink|utimes)|utimes_common"
    r"|do_truncate|(chmod|chown)_common|vfs_(set|remove)(xattr|_acl)|(__)?fdget_pos|__(lock_page|folio_lock)"
)
MAX_FINDINGS = 20  # a dead file server may block hundreds of processes; reporting the oldest is enough


class Config(CheckSettings, frozen=True):
    """killed_seconds        a killed process may hang for this long before it is reported
    max_zombies_per_core  warn above this many zombies per CPU
    processes_per_run    number of processes read in one run, unless something is suspicious
    """

    killed_seconds: Seconds = 300.0
    max_zombies_per_core: Count = 50
    processes_per_run: Processes = 200


def validate(config: Config) -> str | None:
    return None if config.processes_per_run > 0 else "processes_per_run must be 1 or more"


class Process(NamedTuple):
    """A process. `start` (in ticks since boot) distinguishes it from a later process with the same pid."""

    pid: int
    command: str
    state: str
    parent: int
    flags: int
    threads: int
    start: int


class ScanResult(NamedTuple):
    """Result of a scan. `stuck` lists killed processes that hang, and `in_user_fuse` those that hang in a user's own
    FUSE mount."""

    zombies: list[Process]
    stuck: list[Process]
    in_user_fuse: list[Process]
    unreadable: list[str]


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    pids = _user_processes(host)
    if not pids:
        yield NothingToCheck("no user process")  # a captured tree
        return
    last = past.last(Observation("processes_scanned_up_to_pid", 0))
    start = bisect.bisect_right(pids, last.value) if last else 0
    order = pids[start:] + pids[:start]
    count = min(len(pids), config.processes_per_run) if last and last.value else len(pids)
    scan = ScanResult([], [], [], [])
    _scan(host, order[:count], scan)
    allowed = config.max_zombies_per_core * _cores(host) if scan.zombies else 0
    has_many_zombies = len(scan.zombies) * len(pids) > allowed * count
    has_stuck = bool(scan.stuck or scan.in_user_fuse)
    if has_stuck or has_many_zombies:
        _scan(host, order[count:], scan)
        has_stuck = bool(scan.stuck or scan.in_user_fuse)
    yield Observation("processes_scanned_up_to_pid", 0 if has_stuck else order[count - 1])  # 0: all
    for process in sorted(scan.stuck, key=lambda p: (p.start, p.pid))[:MAX_FINDINGS]:
        yield Finding(
            Severity.DEGRADED,
            "processes/unkillable",
            f"{process.pid}@{process.start}",
            _describe(host, process),
            confirm_seconds=config.killed_seconds,
            shared_cause=True,
        )
    for process in sorted(scan.in_user_fuse, key=lambda p: (p.start, p.pid))[:MAX_FINDINGS]:
        yield Finding(
            Severity.WARNING,
            "processes/user_file_system",
            f"{process.pid}@{process.start}",
            f"{_describe(host, process)}, waiting for a user's FUSE file system",
            confirm_seconds=config.killed_seconds,
        )
    if has_many_zombies and len(scan.zombies) > allowed:
        ((parent, children),) = Counter(zombie.parent for zombie in scan.zombies).most_common(1)
        message = f"{len(scan.zombies)} zombies, more than {allowed}; {children} are children of process {parent}"
        yield Finding(Severity.WARNING, "processes/zombies", "", message)
    if scan.unreadable:
        raise ValueError("; ".join(scan.unreadable[:3]))


def _user_processes(host: Host) -> list[int]:
    """Return the pids in ascending order. Kernel threads are omitted if possible, because they do not receive
    signals."""
    names = set(host.names("/proc"))
    if KTHREADD_STAT.match(host.read(f"/proc/{KTHREADD}/stat") or ""):
        children = host.read(f"/proc/{KTHREADD}/task/{KTHREADD}/children") or ""
        names -= {str(KTHREADD), *children.split()}
    return sorted(int(name) for name in names if is_decimal(name))


def _scan(host: Host, pids: Sequence[int], scan: ScanResult) -> None:
    """Read these processes and add the results to `scan`."""
    for pid in pids:
        try:
            path = f"/proc/{pid}/stat"
            text = host.read(path)
            if text is None or process_state(text, path) not in "DZ":
                continue
            process = parse(text, path)
            if process.state == "Z":
                scan.zombies.append(process)
            tasks = list(_stuck_tasks(host, process))
            if tasks:
                is_user_fuse = all(_waits_in_user_fuse(host, task) for task in tasks)
                (scan.in_user_fuse if is_user_fuse else scan.stuck).append(process)
        except ProcessLookupError:  # the process ended while it was being read
            continue
        except (OSError, ValueError) as error:  # this error must not hide the other processes
            scan.unreadable.append(str(error))


def process_state(text: str, source: str) -> str:
    """Return the state letter in /proc/PID/stat, in which the process name may contain any characters. Raises
    ValueError if the text is truncated."""
    state = text[text.rfind(")") + 2 :][:1]
    if state not in STATES or text.count(" ") < MIN_FIELDS - 1:
        raise ValueError(f"{source}: not a process state: {text[:60]!r}")
    return state


def parse(text: str, source: str) -> Process:
    """Parse /proc/PID/stat (see proc_pid_stat(5)). Raises ValueError if the text is malformed."""
    name, _, tail = text.rpartition(") ")
    pid, _, command = name.partition(" (")
    try:
        fields = tail.split()
        parent, flags, threads, start = (int(fields[i]) for i in (1, 6, 17, 19))
        return Process(int(pid), command, fields[0], parent, flags, threads, start)
    except (ValueError, IndexError):
        raise ValueError(f"{source}: not a process state: {text[:60]!r}") from None


def _stuck_tasks(host: Host, process: Process) -> Iterator[str]:
    """Yield the /proc directories of a process's hanging tasks that were killed."""
    own = f"/proc/{process.pid}"
    if process.state == "D" and _is_killed(host, own, process):
        yield own
    for task in host.list(f"{own}/task") if process.threads > 1 else []:
        task_path = f"{own}/task/{task}"
        text = host.read(f"{task_path}/stat")
        is_hanging = text is not None and process_state(text, f"{task_path}/stat") == "D"
        if text is not None and is_hanging and _is_killed(host, task_path, parse(text, f"{task_path}/stat")):
            yield task_path


def _waits_in_user_fuse(host: Host, task_path: str) -> bool:
    """Return True if a hanging task is waiting for a FUSE file system that a user mounted."""
    stack, wchan = host.read_or_empty(f"{task_path}/stack"), host.read_or_empty(f"{task_path}/wchan")
    if not (is_fuse_wait(stack) if stack else is_fuse_function(wchan) or is_file_lock(wchan)):
        return False
    waiting = {
        found.uid
        for name in host.names(FUSE_CONNECTIONS)
        if host.read_or_empty(f"{FUSE_CONNECTIONS}/{name}/waiting").strip("0")
        and (found := host.stat(f"{FUSE_CONNECTIONS}/{name}"))
    }
    users = waiting - {0}
    only_user_waits = 0 not in waiting and (stack != "" or is_fuse_function(wchan))
    return bool(users) and (only_user_waits or any(_belongs_to_user(host, task_path, user) for user in users))


def _belongs_to_user(host: Host, task_path: str, user: int) -> bool:
    """Return True if a task has the uid of this user (not root), or is in a user namespace (other than the initial one)
    that contains the user.
    """
    uid = UID.search(host.read_or_empty(f"{task_path}/status"))
    if uid is not None and int(uid[1]) == user:
        return True
    ranges = [(int(first), int(count)) for first, count in UID_MAP.findall(host.read_or_empty(f"{task_path}/uid_map"))]
    return all(count < ALL_UIDS for _, count in ranges) and any(user - first in range(count) for first, count in ranges)


def is_fuse_wait(stack: str) -> bool:
    """Return True if a task with this stack waits for a FUSE server or a file system lock, and not for a driver.
    Drivers are modules. The stack is that of /proc/PID/stack, with the innermost function first.
    """
    frames = [frame for line in stack.split("\n") for frame in FRAME.findall(line)]
    modules = {module for _, module in frames}
    functions = [function for function, _ in frames]
    waits = any(is_fuse_function(function) for function in functions)
    return modules <= {"", "fuse", "overlay"} and (waits or any(is_file_lock(function) for function in functions[:1]))


def is_fuse_function(function: str) -> bool:
    """Return True if this kernel function belongs to FUSE. A task in such a function waits for a FUSE server."""
    return function.startswith(("fuse_", "request_wait_answer"))


def is_file_lock(function: str) -> bool:
    """Return True if a task in this function may be waiting for a file system lock. The compiler may add a suffix such
    as .isra.0 or .part.0 to the function's name.
    """
    return FILE_LOCKS.fullmatch(function.partition(".")[0]) is not None


def _is_killed(host: Host, task_path: str, task: Process) -> bool:
    """Return True if SIGKILL is pending or the task is exiting. Raises ValueError if its status cannot be parsed."""
    status = host.read(f"{task_path}/status")
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
        raise ValueError(f"{task_path}/status: no signals in {status[:60]!r}") from None
    return bool(task.flags & PF_EXITING) or any(signal & SIGKILL for signal in signals)


def _cores(host: Host) -> int:
    """Return the number of CPUs in a list such as "0-127,256". Raises ValueError if it cannot be parsed."""
    text = host.read(ONLINE) or ""
    if not CPUS.fullmatch(text):
        raise ValueError(f"{ONLINE}: not a list of CPUs: {text[:60]!r}")
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return sum(end[-1] - end[0] + 1 for end in ends)


def _describe(host: Host, process: Process) -> str:
    command = printable(process.command)
    found = host.stat(f"/proc/{process.pid}")
    user = f" of user {found.uid}" if found else ""
    wait_channel = host.read(f"/proc/{process.pid}/wchan") or "0"
    location = "" if wait_channel == "0" or not wait_channel.isidentifier() else f" in {wait_channel}"
    return f"process {process.pid} ({command}){user} was killed and hangs{location}"


OBSERVATIONS = {
    "processes_scanned_up_to_pid": Meaning(
        "Last process id that the previous run read; 0 if it read all. For healthd's own use.",
    ),
}

EXPLAIN = {
    "processes/unkillable": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A process was killed minutes ago but has not ended. It sleeps in the kernel, where no signal reaches it. "
        "The condition's part is the pid and the start time in ticks since boot.",
        "The process still occupies its memory, GPU and mounts. Slurm cannot end its job, and the next job gets less "
        "than it was allocated.",
        "cat /proc/PID/wchan /proc/PID/stack shows where it hangs. If the functions contain nvidia or uvm, run "
        "journalctl -k | grep Xid. If they contain nfs, rpc or lustre, check the file server. The process ends when "
        "the driver or server responds. If it never responds, reboot the node.",
        confirm="killed_seconds",
        shared=True,
    ),
    "processes/user_file_system": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A process was killed minutes ago but has not ended. It waits for a FUSE file system that a user mounted "
        "(sshfs, an Apptainer image) and whose server does not respond.",
        "Slurm cannot end the process's job. The node is not at fault, and its other jobs and its GPUs are not "
        "affected.",
        "No action tonight. To end the process, kill the FUSE server (fuser -v /dev/fuse shows it), or run echo 1 > "
        "/sys/fs/fuse/connections/N/abort. N is the connection whose /sys/fs/fuse/connections/N/waiting is not 0.",
        confirm="killed_seconds",
    ),
    "processes/zombies": Explain(
        Severity.WARNING,
        Clears.PASS,
        "There are many zombies: processes that have ended but whose parents have not reaped them.",
        "No effect at first. When process ids run out, no new process can start.",
        "No action tonight. ps -eo stat,ppid | awk '/^Z/ {print $2}' | sort | uniq -c | sort -n | tail shows the "
        "parents. Restart or fix the parent. A common cause is a container without an init process.",
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
