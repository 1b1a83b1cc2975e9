"""Kernel faults in the kernel log: lockups, hung tasks, oopses, panics, lack of memory, heat.

Rules: after a hard lockup, a panic, or an oops in a GPU or network card driver, the machine cannot be trusted until a
reboot. The same applies if a CPU did not schedule for more than five minutes, which no load can explain. Any other oops
kills the running process, whose locks stay locked; such an oops is only a warning. So are CPUs and tasks that hang,
because a file server that fails over blocks tasks on every node (the checks processes and mount handle lasting hangs).

The kernel repeats these lines while a hang lasts. It logs a soft lockup every 20 s (kernel/watchdog.c; with its
duration only since Linux 5.13) and an RCU stall every few minutes. It logs a hung task every 2 minutes, but only ten
times in each boot (kernel.hung_task_warnings). An hour without a line ends the warning. An OOM kill is the job's
problem, not the node's. A line that healthd itself fails to parse is a warning, because the line may report any fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from healthd.api import (
    CheckSettings,
    Clears,
    Ends,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Inventory,
    KernelEvent,
    Seconds,
    Severity,
    printable,
)

USES = ""

STUCK_SECONDS = 300.0  # a longer soft lockup drains until a reboot
# Lines about the same soft lockup are closer together than this. The kernel repeats them after 20 to 60 s.
REPEAT_SECONDS = 60.0
DEGRADED_DRIVERS = ("nvidia", "mlx5")  # also related modules such as nvidia_uvm and mlx5_ib


class Config(CheckSettings, frozen=True):
    """window_seconds       how long a lockup, hung task, heat, OOM kill or pattern stays open after its last line
    oops_window_seconds  how long an oops that only warns stays open; a reboot also ends it
    """

    window_seconds: Seconds = 3600.0
    oops_window_seconds: Seconds = 24 * 3600.0


class Rule(NamedTuple):
    """Properties of the finding for one kind of event. The message starts with `text`."""

    code: str
    severity: Severity
    clears: Clears
    text: str


RULES = {
    ("soft_lockup", "hard"): Rule(
        "hard_lockup", Severity.DEGRADED, Clears.REBOOT, "a CPU no longer handles interrupts"
    ),
    ("oops", "panic"): Rule("panic", Severity.DEGRADED, Clears.REBOOT, "the kernel panicked"),
    ("oops", "oops"): Rule("oops", Severity.WARNING, Clears.REBOOT, "kernel error; the running process was killed"),
    ("oops", "bad_page"): Rule("oops", Severity.WARNING, Clears.REBOOT, "the kernel found its own data corrupt"),
    ("soft_lockup", "soft"): Rule("soft_lockup", Severity.WARNING, Clears.WINDOW, "a CPU did not schedule"),
    ("soft_lockup", "rcu_stall"): Rule("rcu_stall", Severity.WARNING, Clears.WINDOW, "a CPU blocks the others (RCU)"),
    ("soft_lockup", "workqueue"): Rule(
        "workqueue", Severity.WARNING, Clears.WINDOW, "the kernel's own work was blocked"
    ),
    ("hung_task", "hung"): Rule("hung_task", Severity.WARNING, Clears.WINDOW, "a task hangs"),
    ("oom", "oom_kill"): Rule("oom_kill", Severity.INFO, Clears.WINDOW, "killed because memory ran out"),
    ("thermal", "cpu_throttled"): Rule(
        "cpu_throttled", Severity.WARNING, Clears.WINDOW, "CPUs are hot and slowed down"
    ),
    ("thermal", "cpu_normal"): Rule("cpu_throttled", Severity.WARNING, Clears.WINDOW, "all CPUs are cool again"),
    ("thermal", "critical"): Rule("too_hot", Severity.WARNING, Clears.WINDOW, "so hot that the machine shuts down"),
    ("limit", "file_max"): Rule("file_max", Severity.WARNING, Clears.WINDOW, "no more files can be opened"),
    ("netdevice", "unregister"): Rule(
        "netdevice", Severity.WARNING, Clears.WINDOW, "a network interface cannot be removed: it is still in use"
    ),
    ("unread", ""): Rule("rule_failed", Severity.WARNING, Clears.WINDOW, "healthd could not parse this line"),
}


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code, from all its events. kernel/cpu_throttled ends once all CPUs are cool again."""
    yield from _site_patterns(events, config)
    groups: dict[str, list[KernelEvent]] = {}
    for event in events:
        if rule := RULES.get((event.kind, event.code)):
            groups.setdefault(rule.code, []).append(event)
    for code, group in groups.items():
        stuck = _stuck_seconds(group) if code == "soft_lockup" else {}
        rules = {each.sequence: _rule(each, stuck.get(each.sequence, 0.0)) for each in group}
        event = max(group, key=lambda each: (rules[each.sequence].severity, each.last_time, each.sequence))
        is_over = False
        if code == "cpu_throttled":
            hot = _still_hot(group)
            is_over = not hot
            event = max(hot or group, key=lambda each: (each.last_time, each.sequence))
            if all(each.code == "cpu_normal" for each in group):
                continue  # no line reported a hot CPU
        rule = rules[event.sequence]
        lines = sum(each.lines for each in group if each.code != "cpu_normal")
        yield Finding(
            severity=rule.severity,
            code=f"kernel/{code}",
            subject="",
            message=_message(rule, event, lines, stuck.get(event.sequence, 0.0)),
            clears=rule.clears,
            window_seconds=_window_seconds(rule, config),
            events=tuple(each.sequence for each in group),
            recovered=is_over,
        )


def _site_patterns(events: Sequence[KernelEvent], config: Config) -> Iterator[Finding]:
    """Yield one finding for each of the site's patterns, with the severity from the settings."""
    groups: dict[str, list[KernelEvent]] = {}
    for event in events:
        if event.kind == "site":
            groups.setdefault(event.code, []).append(event)
    for name, group in groups.items():
        newest = max(group, key=lambda each: (each.last_time, each.sequence))
        lines = sum(each.lines for each in group)
        message = printable(newest.text[:200]) + (f", {lines} lines" if lines > 1 else "")
        yield Finding(
            severity=Severity[newest.field("severity").upper()],
            code="kernel/pattern",
            subject=name,
            message=message,
            clears=Clears.WINDOW,
            window_seconds=config.window_seconds,
            events=tuple(each.sequence for each in group),
        )


def _rule(event: KernelEvent, stuck_seconds: float) -> Rule:
    rule = RULES[event.kind, event.code]
    if stuck_seconds > STUCK_SECONDS:
        return rule._replace(severity=Severity.DEGRADED, clears=Clears.REBOOT)
    # Not for bad_page: a driver in the stack where bad data was found proves nothing. A harmless WARNING names drivers
    # too.
    if event.code == "oops" and event.field("driver").startswith(DEGRADED_DRIVERS):
        return rule._replace(severity=Severity.DEGRADED)
    return rule


def _stuck_seconds(group: Sequence[KernelEvent]) -> dict[int, float]:
    """Return a dict that maps each soft lockup event's sequence number to the seconds for which the CPU had been stuck.
    The duration comes from the line itself. Older kernels do not log the duration. For these kernels, the result is the
    time since the first line of an unbroken series about this CPU and process.
    """
    stuck: dict[int, float] = {}
    last: dict[tuple[str, str, int | None], tuple[float, float]] = {}  # (start, time of the last line)
    for event in sorted(group, key=lambda each: (each.time, each.sequence)):
        key = (event.boot_id, event.field("cpu"), event.pid)
        began, last_logged = last.get(key, (0.0, 0.0))
        line_began = event.time - int(event.field("seconds") or "0")
        began = min(began, line_began) if event.time - last_logged <= REPEAT_SECONDS else line_began
        last[key] = began, event.last_time
        stuck[event.sequence] = event.last_time - began
    return stuck


def _still_hot(group: Sequence[KernelEvent]) -> list[KernelEvent]:
    """Return the last event of this boot for each CPU and package, if it reports heat."""
    boot_id = max(group, key=lambda each: (each.last_time, each.sequence)).boot_id
    group = [event for event in group if event.boot_id == boot_id]
    newest: dict[tuple[str, str], KernelEvent] = {}
    for event in sorted(group, key=lambda each: (each.last_time, each.sequence)):
        newest[event.field("cpu"), event.field("level")] = event
    return [event for event in newest.values() if event.code == "cpu_throttled"]


def _window_seconds(rule: Rule, config: Config) -> float:
    if rule.severity >= Severity.DEGRADED:
        return 0.0
    return config.oops_window_seconds if rule.code == "oops" else config.window_seconds


def _message(rule: Rule, event: KernelEvent, lines: int, stuck_seconds: float) -> str:
    parts = [rule.text]
    if rule.code == "rule_failed":
        parts.append(printable(event.text[:200]))
    if why := event.field("why"):
        parts.append(printable(why))
    if driver := event.field("driver"):
        parts.append(f"in {driver}")
    if event.process or event.pid:
        name = printable(event.process or "process")
        parts.append(f"{name} (pid {event.pid})" if event.pid else name)
    if cpu := event.field("cpu"):
        parts.append(f"CPU {cpu}")
    if netdev := event.field("netdev"):
        parts.append(printable(netdev))
    if limit := event.field("limit"):
        parts.append(f"fs.file-max is {limit}")
    if seconds := f"{stuck_seconds:.0f}" if stuck_seconds else event.field("seconds"):
        parts.append(f"{seconds} s")
    if rule.code == "oom_kill":
        parts.append({"cgroup": "its cgroup's limit", "node": "the whole node's"}.get(event.field("scope"), ""))
    if lines > 1:
        parts.append(f"{lines} lines")
    return ", ".join(part for part in parts if part)


_STACK_TODO = (
    "journalctl -k shows the stack trace below the line. Its functions show which driver or file system is involved."
)

EXPLAIN = {
    "kernel/pattern": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "A kernel log line matches one of the site's patterns in [kernel_log.patterns]. The condition's part is the "
        "pattern's name. The pattern sets the severity.",
        "The effect depends on the site's pattern.",
        "journalctl -k shows the line and its context. healthd config show prints the pattern. If the condition is "
        "only a warning, no action is needed tonight.",
        also=(Severity.CRITICAL, Severity.WARNING, Severity.INFO),
        window="window_seconds",
    ),
    "kernel/hard_lockup": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "A CPU handled no interrupts for ten seconds or more. The CPU hangs in the kernel or in the firmware.",
        "Work on this CPU is stuck, and eventually all work that waits for this CPU is stuck too.",
        f"Reboot the node. {_STACK_TODO} Update the firmware and drivers. If the fault recurs, suspect the processor "
        "or the board.",
    ),
    "kernel/panic": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel stopped the machine (panic).",
        "All jobs on the node are lost.",
        f"{_STACK_TODO} Look for a crash dump (/var/crash), and check the BMC's event log.",
    ),
    "kernel/oops": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel hit an internal error (oops, BUG) and killed the running process. An error in a GPU or network "
        "card driver is degraded; any other error is a warning.",
        "The killed process's locks are never released, so later jobs may hang in the same driver. Data may be "
        "damaged.",
        "If the condition is only a warning, no action is needed tonight; reboot the node once no job is running here. "
        f"{_STACK_TODO} Report the error to the driver's vendor. Bad memory can also be the cause (memory_edac).",
        also=(Severity.WARNING,),
        milder=Ends(Clears.REBOOT, "oops_window_seconds"),
    ),
    "kernel/soft_lockup": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "A CPU stayed in the kernel for more than 20 seconds without scheduling other tasks. The warning ends after "
        "an hour without a further line. A lockup of more than five minutes drains the node until a reboot.",
        "Tasks bound to this CPU hang during that time. On a virtual machine, the host may have been too busy.",
        f"If the condition is only a warning, no action is needed tonight. {_STACK_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "window_seconds"),
    ),
    "kernel/file_max": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The number of open files reached the kernel's limit (fs.file-max).",
        "At the limit, only root processes can open files, and jobs fail in unexpected places.",
        "No action tonight. cat /proc/sys/fs/file-nr; lsof | awk '{print $2}' | sort | uniq -c | sort -n | tail "
        "shows which processes have the most files open. If these files are needed, raise fs.file-max.",
        window="window_seconds",
    ),
    "kernel/netdevice": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A network interface, usually a container's, cannot be removed because it is still in use.",
        "The container does not exit. Until the interface is removed, no other interface can be created or removed, "
        "so new containers hang.",
        "No action tonight unless containers hang. If the kernel repeats the line for minutes, only a reboot helps; "
        "reboot the node once no job is running here. The cause is a kernel bug, so look for a newer kernel.",
        window="window_seconds",
    ),
    "kernel/rcu_stall": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A CPU did not pass through the scheduler for 21 seconds or more, and the kernel waits for this CPU.",
        "The kernel cannot free memory, and jobs on this CPU may hang.",
        f"No action tonight. {_STACK_TODO}",
        window="window_seconds",
    ),
    "kernel/workqueue": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel's own work (a workqueue) was blocked on a CPU for 30 seconds.",
        "Drivers and file systems wait for this work.",
        f"No action tonight. {_STACK_TODO}",
        window="window_seconds",
    ),
    "kernel/hung_task": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A task has waited in the kernel for two minutes or more, usually for a disk or file server, and cannot be "
        "killed.",
        "The task's job hangs. The job continues if the disk or server comes back. Otherwise the node needs a reboot.",
        "No action tonight. Check whether a file server or disk is unavailable (checks mount and block_device). "
        f"{_STACK_TODO} cat /proc/PID/stack shows where the task is now.",
        window="window_seconds",
    ),
    "kernel/oom_kill": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The kernel killed a process because its job (or the whole node) had no memory left.",
        "There is no effect on the node if the job reached its own memory limit.",
        "If a cgroup's limit was reached, just inform the job's owner. If the whole node ran out of memory, a job "
        "runs without a limit or the system used too much memory. The check memory_size shows whether memory is "
        "missing.",
        window="window_seconds",
    ),
    "kernel/cpu_throttled": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "CPUs overheated and ran slower. The condition clears when the kernel reports that all CPUs are cool again.",
        "Jobs are slow, and all of a job's nodes wait for this node.",
        "No action tonight. ipmitool sdr type Temperature shows the temperatures. Check fans, filters, the inlet "
        "temperature and thermal paste.",
        window="window_seconds",
    ),
    "kernel/rule_failed": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "One of healthd's rules failed on a kernel line. The line was not evaluated and may report any fault.",
        "If it is a hardware fault, this may be the only sign.",
        "The message shows the line. No action is needed tonight, unless this line reports a fault. healthd's own "
        "log has the error with its traceback. Please report the line and the traceback.",
        window="window_seconds",
    ),
    "kernel/too_hot": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A sensor is above the temperature at which the kernel shuts the machine down.",
        "The node is about to shut down or has already shut down.",
        "ipmitool sdr type Temperature shows the temperatures. Check fans, filters and the inlet temperature.",
        window="window_seconds",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.KERNEL),
    "kernel/oom_kill": FailureCause.USER,
    "kernel/cpu_throttled": FailureCause.POWER,
    "kernel/too_hot": FailureCause.POWER,
}
ENDS_JOB = {
    "kernel/hard_lockup": EndsJob.ALWAYS,
    "kernel/panic": EndsJob.ALWAYS,
    "kernel/oops": EndsJob.ALWAYS,
    "kernel/soft_lockup": EndsJob.ALWAYS,
    "kernel/netdevice": EndsJob.NEVER,
    "kernel/oom_kill": EndsJob.ALWAYS,
    "kernel/cpu_throttled": EndsJob.NEVER,
}
