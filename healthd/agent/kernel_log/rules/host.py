"""Rules for the kernel itself: lockups, hung tasks, oopses, panics, out of memory, overheating.

    kind         code           meaning and fields
    hung_task    hung           a task is blocked; process, pid, seconds
    soft_lockup  soft           a CPU does not schedule; cpu, process, pid, seconds
                 hard           a CPU takes no interrupts; cpu
                 rcu_stall      RCU reports a stall
                 workqueue      a workqueue's pool is stuck; seconds
    oops         oops           the kernel killed the running code; driver = the faulty module, if a line names it
                 bad_page       bad page state, or scheduling while atomic
                 panic          the kernel panicked; why. A requested panic (sysrq, lkdtm, crash_test) is no fault
    oom          oom_kill       a process was killed; process and pid are the victim's; scope = cgroup or node; cgroup
                 invoked        a process requested memory; process. This process is not necessarily the victim
    limit        file_max       no more files can be opened; limit
    netdevice    unregister     a network interface cannot be removed because it is still in use; netdev
    thermal      cpu_throttled  a CPU is too hot and was throttled; cpu, level
                 cpu_normal     the end of cpu_throttled; cpu, level
                 critical       the machine is about to power off

A line that only adds details about a fault (the lock of a hung task, the location of an oops) has the code "detail".
Warnings with a backtrace, slow interrupts, "power limit" and backtraces themselves are ignored.

Users choose the names of processes and cgroups. A name may contain any 15 characters, so a number is only trusted at a
position that no name can reach. Formats: Linux kernel/hung_task.c, kernel/watchdog.c, kernel/rcu, kernel/workqueue.c,
mm/oom_kill.c, arch/x86 (fault.c, traps.c, dumpstack.c, therm_throt.c), arch/arm64, arch/powerpc, drivers/thermal, from
3.10 to 7.3.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import DETAIL, Rule, event, event_builder
from healthd.common.model import KernelEvent
from healthd.common.text import is_decimal, regex

_NAME = r"([\s\S]{0,63})"  # greedy: the text that follows is matched after the longest possible name

# INFO: task php-fpm:2767319 blocked for more than 120 seconds.    the limit, or (6.x) the time so far
# INFO: task dd:456 blocked in I/O wait for more than 122 seconds.                 (6.19)
# INFO: task a:1 <writer> blocked on an rw-semaphore likely owned by task b:2 <reader>     (6.15) details of the task
_HUNG = regex(rf"INFO: task {_NAME}:(\d{{1,10}}) blocked (?:in I/O wait )?for more than (\d{{1,10}}) seconds")
_BLOCKED_ON = regex(r"INFO: task [\s\S]{0,63}:\d{1,10} (?:<\w{1,8}> )?(?:is )?blocked on an? [\w-]{1,16}[ ,]")


def _hung(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "hung", fields=(("seconds", match[3]),), pid=int(match[2]), process=match[1])


# watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]
_SOFT = regex(
    r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#(\w{1,6}) stuck for (\d{1,10})s!"
    rf"(?: \[{_NAME}:(\d{{1,10}})\])?"
)
# NMI watchdog: Watchdog detected hard LOCKUP on cpu 3
# watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3          6.14 and newer: the first number is the checking CPU
# watchdog: CPU 19 self-detected hard LOCKUP @ ...                powerpc
_HARD = regex(
    r"(?:(?:NMI )?watchdog: )?(?:(?:CPU\d{1,6}: )?Watchdog detected hard LOCKUP on cpu (\d{1,6})"
    r"|CPU (\d{1,6}) (?:self-detected )?[Hh]ard LOCKUP|CPU \d{1,6} detected hard LOCKUP on other CPUs (\d{1,6}))"
)
# rcu: INFO: rcu_sched self-detected stall on CPU; INFO: rcu_sched detected stalls on CPUs/tasks: { 3} (detected by 5
_RCU = regex(r"(?:rcu: )?INFO: rcu_?\w{0,24} (?:self-)?detected (?:expedited )?stalls? on (?:CPU|task)")
_RCU_MORE = regex(r"rcu: (?:INFO: )?rcu_\w{1,24} kthread (?:starved|timer wakeup didn't happen) for \d")
_WORKQUEUE = regex(r"BUG: workqueue lockup - pool [^\n]{0,256} stuck for (\d{1,10})s!")


def _soft(kind: str, match: re.Match[str]) -> KernelEvent:
    fields = (("cpu", match[1] if is_decimal(match[1]) else None), ("seconds", match[2]))
    return event(kind, match, "soft", fields=fields, pid=int(match[4]) if match[4] else None, process=match[3])


# BUG: unable to handle page fault for address: ffff..., BUG: kernel NULL pointer dereference, address: 0000...
_BUG = regex(
    r"(?:BUG: unable to handle |BUG: kernel NULL pointer dereference|BUG: (?:[\w#]{1,24} )?stack guard page was hit"
    r"|Unable to handle kernel |PANIC: double fault|kernel BUG at (\S{1,256}))"
)
# Oops: 0002 [#1] SMP NOPTI; general protection fault, probably for non-canonical address 0xdead...: 0000 [#1] SMP PTI
# The pattern includes the line's end, because a process may be called "Oops: 0000 [#1]".
_OOPS = regex(
    r"(?:Oops|Internal error|(?:segment-related )?general protection fault|invalid opcode|divide[ _]error|stack segment"
    r"|stack guard page|double fault)(?:[:, ] ?[\w ,()/-]{1,96})?: ?[0-9a-f]{1,16} \[#\d{1,4}\]"
    r"(?: [A-Z][A-Z0-9_()=]{0,24}){0,12}\s*$"
)
_BAD_PAGE = regex(r"BUG: (?:Bad page (?:state|map|cache)|Bad rss-counter state|scheduling while atomic)\b")
_PANIC = regex(r"Kernel panic - not syncing(?:: ([^\n]{0,128}))?")
_ON_PURPOSE = regex(r"(?i)sysrq|crash_test|lkdtm|dumptest|test panic")
# RIP: 0010:_nv032045rm+0x2c/0x70 [nvidia]; RIP: 0010:[<ffffffffa0b1>]  [<ffffffffa0b1>] f+0x2c/0x70 [nvidia];
# arm64: pc : f+0x2c/0x70 [nvidia]
_WHERE = regex(
    r"(?:RIP: [0-9a-f]{4}:|pc : )(?:\[<[0-9a-f]{1,16}>\] {0,4}){0,2}[\w.$]{1,128}\+0x[0-9a-f]{1,8}/0x[0-9a-f]{1,8} "
    r"\[(\w{1,56})(?: [0-9a-f]{1,64})?\]"
)
_DRIVER = regex(r"(?:^|[/_-])(nvidia|mlx5)(?=[/_-])")


def _bug(kind: str, match: re.Match[str]) -> KernelEvent:
    driver = _DRIVER.search(match[1] or "")
    return event(kind, match, "oops", fields=(("driver", driver[1] if driver else None),))


def _panic(kind: str, match: re.Match[str]) -> KernelEvent | None:
    why = (match[1] or "").strip()
    return None if _ON_PURPOSE.search(why) else event(kind, match, "panic", fields=(("why", why or None),))


# Memory cgroup out of memory: Killed process 1234 (python3) total-vm:8kB, ...; before 5.2: Kill process
# Killed process 10592, UID 48, (httpd) total-vm:8kB, ...                                         (RHEL 6)
_KILLED = regex(
    r"(?:(Memory cgroup out of memory|Out of memory(?: \(\w{1,40}\))?): Kill(?:ed)? process |Killed process "
    rf"|oom_reaper: reaped process )(\d{{1,10}})(?:, UID \d{{1,10}},)? \({_NAME}\)(?=[ ,.]|$)"
)
# oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,...,oom_memcg=/a,task_memcg=/a/b,task=c,pid=1,uid=0
_OOM_KILL = regex(r"oom-kill:constraint=CONSTRAINT_(\w{1,24}),")
_VICTIM = regex(r",pid=(\d{1,10}),uid=\d{1,10}\s*$")
# Task in /slurm/uid_1000/job_42/step_0 killed as a result of limit of /slurm/uid_1000/job_42       (before 4.19)
_TASK_IN = regex(r"Task in (/\S{0,4096}) killed as a result of limit of (?=/)")
_INVOKED = regex(r"([\s\S]{1,63}?) invoked oom-killer: gfp_mask=")


def _killed(kind: str, match: re.Match[str]) -> KernelEvent:
    scope = {"M": "cgroup", "O": "node", "": None}[(match[1] or "")[:1]]
    return event(kind, match, "oom_kill", fields=(("scope", scope),), pid=int(match[2]), process=match[3])


def _oom_kill(kind: str, match: re.Match[str]) -> KernelEvent | None:
    text = match.string
    victim = _VICTIM.search(text, max(match.end(), len(text) - 64))
    if victim is None:
        return None
    before, _, name = text[: victim.start()].rpartition(",task=")
    # A cgroup's name may contain commas. If "task_memcg=" occurs twice, the kernel's own field cannot be identified.
    cgroup = before.partition(",task_memcg=")[2] if before.count(",task_memcg=") == 1 else ""
    scope = "cgroup" if match[1] == "MEMCG" else "node"
    fields = (("scope", scope), ("cgroup", cgroup[:512] or None))
    return event(kind, match, "oom_kill", fields=fields, pid=int(victim[1]), process=name[:64])


def _task_in(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, DETAIL, fields=(("scope", "cgroup"), ("cgroup", match[1][:512])))


def _invoked(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "invoked", process=match[1])


# CPU3: Core temperature above threshold, cpu clock throttled (total events = 1); 5.x: is above, is throttled
_THROTTLED = regex(r"(?:mce: )?CPU(\d{1,6}): (?:(Core|Package) t|T)emperature (?:is )?above threshold")
_NORMAL = regex(r"(?:mce: )?CPU(\d{1,6}): (?:(Core|Package) t|T)emperature/speed normal")
# thermal thermal_zone0: critical temperature reached (103 C), shutting down; 5.x: ...: acpitz: critical temperature ...
_CRITICAL = regex(
    r"(?:thermal thermal_zone\d{1,4}: (?:[^:\n]{1,64}: )?critical|(?:ACPI: )?Critical) temperature reached ?[(,]"
    r"|(?:reboot: )?HARDWARE PROTECTION (?:shutdown|reboot) \(Temperature too high\)"
)


def _throttled(kind: str, match: re.Match[str]) -> KernelEvent:
    code = "cpu_throttled" if match.re.pattern == _THROTTLED.pattern else "cpu_normal"
    return event(kind, match, code, fields=(("cpu", match[1]), ("level", (match[2] or "").lower() or None)))


# VFS: file-max limit 1000000 reached                                                      fs/file_table.c
_FILE_MAX = regex(r"VFS: file-max limit (\d{1,20}) reached")
# unregister_netdevice: waiting for lo to become free. Usage count = 1    net/core/dev.c, every 10 s; %d: also -1
_UNREGISTER = regex(r"unregister_netdevice: waiting for ([^\s/]{1,15}) to become free\. Usage count = -?\d")


RULES = (
    Rule("hung_task", ("INFO: task ",), _HUNG, _hung, varies=("seconds",)),
    Rule("hung_task", ("INFO: task ",), _BLOCKED_ON, event_builder(DETAIL)),
    Rule("soft_lockup", ("BUG: soft lockup",), _SOFT, _soft, varies=("seconds",)),
    Rule("soft_lockup", ("ard LOCKUP",), _HARD, event_builder("hard", cpu=(1, 2, 3))),
    Rule("soft_lockup", ("detected stall", "detected expedited stall"), _RCU, event_builder("rcu_stall")),
    Rule("soft_lockup", ("kthread starved for", "kthread timer wakeup"), _RCU_MORE, event_builder(DETAIL)),
    Rule(
        "soft_lockup",
        ("BUG: workqueue lockup",),
        _WORKQUEUE,
        event_builder("workqueue", seconds=1),
        varies=("seconds",),
    ),
    Rule(
        "oops",
        (
            "BUG: unable to handle",
            "BUG: kernel NULL",
            "stack guard page",
            "Unable to handle kernel",
            "PANIC: double",
            "kernel BUG at",
        ),
        _BUG,
        _bug,
        varies=("driver",),
    ),
    Rule("oops", (" [#",), _OOPS, event_builder("oops")),
    Rule("oops", ("BUG: Bad ", "BUG: scheduling while"), _BAD_PAGE, event_builder("bad_page")),
    Rule("oops", ("Kernel panic - not",), _PANIC, _panic),
    Rule("oops", ("RIP: 0", "pc : "), _WHERE, event_builder(DETAIL, driver=1), varies=("driver",)),
    Rule("oom", ("Kill process", "Killed process", "oom_reaper: reaped"), _KILLED, _killed, varies=("scope",)),
    Rule("oom", ("oom-kill:constraint=",), _OOM_KILL, _oom_kill, varies=("scope", "cgroup")),
    Rule("oom", ("killed as a result of limit",), _TASK_IN, _task_in, varies=("scope", "cgroup")),
    Rule("oom", (" invoked oom-killer: ",), _INVOKED, _invoked),
    Rule("limit", ("file-max limit",), _FILE_MAX, event_builder("file_max", limit=1)),
    Rule("netdevice", ("unregister_netdevice: ",), _UNREGISTER, event_builder("unregister", netdev=1)),
    Rule("thermal", ("above threshold",), _THROTTLED, _throttled),
    Rule("thermal", ("emperature/speed normal",), _NORMAL, _throttled),
    Rule("thermal", ("ritical temperature", "HARDWARE PROTECTION"), _CRITICAL, event_builder("critical")),
)
