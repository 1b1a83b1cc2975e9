"""Tests of lines about the kernel itself.

Captured lines, with their public sources, are in tests/data/kernel_lines.jsonl; the others follow the formats in Linux
(watchdog, hung_task, rcu, oom_kill, traps, therm_throt).
"""

import json
import time
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.coalesce import coalesce_events
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.source import RawLine, make_event

DATA = (Path(__file__).parents[3] / "data/kernel_lines.jsonl").read_text("utf-8")
LINES = [json.loads(line) for line in DATA.strip().split("\n")]
CAPTURED = [row for row in LINES if row["kind"] in ("hung_task", "soft_lockup", "oom")]


def summary(text):
    """Return (kind, code, pid, process) of a message, or None if no rule matches."""
    event = parse(text)
    return (event.kind, event.code, event.pid, event.process) if event else None


def fields(text):
    return dict(parse(text).fields)


def coalesced(*lines):
    events = [make_event(RawLine(1000.0 + n / 100, line), "b") for n, line in enumerate(lines)]
    return list(coalesce_events((), [event for event in events if event is not None], 1)[0])


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in CAPTURED])
def test_parse_reads_captured_line_with_process(row):
    expected = row["expected"]
    event = parse(strip_prefix(row["text"], time.time()).text)
    assert (event.kind, event.pid, event.process) == (row["kind"], expected.get("pid"), expected.get("comm"))
    event_fields = dict(event.fields)
    assert event_fields.get("seconds") == (str(expected["secs"]) if "secs" in expected else None)
    assert event_fields.get("cpu") == (str(expected["cpu"]) if expected.get("cpu") is not None else None)
    if "cgroup" in expected:
        assert event_fields["scope"] == ("cgroup" if expected["cgroup"] else "node")


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("INFO: task dd:456 blocked in I/O wait for more than 122 seconds.", ("hung_task", "hung", 456, "dd")),
        ("INFO: task kworker/u64:3:99 blocked for more than 1228 seconds.", ("hung_task", "hung", 99, "kworker/u64:3")),
        (
            "INFO: task a b:12 is blocked on a mutex likely owned by task c:13.",
            ("hung_task", "detail", None, None),
        ),
        (
            "INFO: task a:12 <writer> blocked on an rw-semaphore likely owned by task b:13 <reader>",
            ("hung_task", "detail", None, None),
        ),
        ("NMI watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [a]b:7]", ("soft_lockup", "soft", 7, "a]b")),
        ("BUG: soft lockup - CPU#0 stuck for 67s! [swapper/0:0]", ("soft_lockup", "soft", 0, "swapper/0")),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", ("soft_lockup", "hard", None, None)),
        ("watchdog: Watchdog detected hard LOCKUP on cpu 12", ("soft_lockup", "hard", None, None)),
        ("watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3", ("soft_lockup", "hard", None, None)),
        ("watchdog: CPU0: Watchdog detected hard LOCKUP on cpu 127", ("soft_lockup", "hard", None, None)),
        ("Watchdog detected hard LOCKUP on cpu 0dModules linked in:", ("soft_lockup", "hard", None, None)),
        ("watchdog: CPU 19 self-detected hard LOCKUP @ _raw_spin_lock+0x60/0x100", ("soft_lockup", "hard", None, None)),
        ("watchdog: CPU 5 detected hard LOCKUP on other CPUs 7", ("soft_lockup", "hard", None, None)),
        (
            "INFO: rcu_sched self-detected stall on CPU { 3}  (t=60000 jiffies)",
            ("soft_lockup", "rcu_stall", None, None),
        ),
        ("INFO: rcu_sched self-detected stall on CPU", ("soft_lockup", "rcu_stall", None, None)),
        ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:", ("soft_lockup", "rcu_stall", None, None)),
        ("INFO: rcu_tasks detected stalls on tasks:", ("soft_lockup", "rcu_stall", None, None)),
        (
            "rcu: INFO: rcu_sched detected expedited stalls on CPUs/tasks: { 1-.... }",
            ("soft_lockup", "rcu_stall", None, None),
        ),
        (
            "rcu: rcu_sched kthread starved for 2523 jiffies! g1 f0x0 RCU_GP_WAIT_FQS(5)",
            ("soft_lockup", "detail", None, None),
        ),
        (
            "BUG: workqueue lockup - pool cpus=3 node=0 flags=0x0 nice=0 stuck for 33s!",
            ("soft_lockup", "workqueue", None, None),
        ),
    ],
)
def test_parse_reads_lockups_and_hung_tasks_from_all_kernels(text, event):
    assert summary(text) == event


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("BUG: unable to handle kernel NULL pointer dereference at 0000000000000008", "oops"),
        ("BUG: unable to handle page fault for address: ffffa26487064230", "oops"),
        ("BUG: unable to handle kernel paging request at ffffa26487064230", "oops"),
        ("BUG: kernel NULL pointer dereference, address: 0000000000000000", "oops"),
        ("Unable to handle kernel paging request at virtual address dead000000000108", "oops"),
        ("Oops: 0000 [#1] PREEMPT SMP PTI", "oops"),
        ("Oops: 0002 [#1] SMP", "oops"),
        (
            "Oops: general protection fault, probably for non-canonical address 0xdead000000000122: 0000 [#1] SMP",
            "oops",
        ),
        ("Internal error: Oops: 0000000096000004 [#1] PREEMPT SMP", "oops"),
        ("Internal error: synchronous external abort: 96000210 [#1] SMP", "oops"),
        ("Oops: Kernel access of bad area, sig: 11 [#1]", "oops"),
        ("general protection fault: 0000 [#1] SMP NOPTI", "oops"),
        (
            "general protection fault, probably for non-canonical address 0xdead000000000122: 0000 [#1] SMP NOPTI",
            "oops",
        ),
        ("invalid opcode: 0000 [#1] SMP", "oops"),
        ("divide error: 0000 [#1] SMP", "oops"),
        ("divide_error: 0000 [#1] PREEMPT SMP KASAN", "oops"),
        ("general protection fault for non-canonical address 0xe017577ddf75b7dd: 0000 [#1] PREEMPT SMP", "oops"),  # 5.5
        ("segment-related general protection fault: beec [#2] PREEMPT SMP PTI", "oops"),
        ("BUG: stack guard page was hit at 00000000397c6d92 (stack is 00000000a0f6b86a..000000000e6f9570)", "oops"),
        (
            "BUG: TASK stack guard page was hit at ffffc900054afff8 (stack is ffffc900054b0000..ffffc900054b8000)",
            "oops",
        ),
        ("stack guard page: 0000 [#1] PREEMPT SMP", "oops"),
        ("kernel BUG at mm/slub.c:306!", "oops"),
        ("BUG: Bad page state in process python3  pfn:1234", "bad_page"),
        ("BUG: scheduling while atomic: python3/1234/0x00000002", "bad_page"),
        ("Kernel panic - not syncing: Fatal exception in interrupt", "panic"),
        ("Kernel panic - not syncing: Watchdog detected hard LOCKUP on cpu 3", "panic"),
    ],
)
def test_parse_reads_kernel_errors(text, code):
    assert summary(text) == ("oops", code, None, None)


@pytest.mark.parametrize(
    "text",
    [
        "Kernel panic - not syncing: sysrq triggered crash",
        "Kernel panic - not syncing: Test panic triggered by crash_test module",
        "Kernel panic - not syncing: dumptest",
        "WARNING: CPU: 3 PID: 210 at drivers/gpu/drm/drm_x.c:12 f+0x1/0x2 [drm]",
        "traps: python3[1234] general protection fault ip:7f00 sp:7f00 error:0 in libc.so.6[7f00+1000]",
        "traps: a[1234] trap invalid opcode ip:7f00 sp:7f00 error:0 in libc.so.6[7f00+1000]",
        "python3[1234]: segfault at 0 ip 0 sp 0 error 4 in libc.so.6[7f00+1000]",
        "perf: interrupt took too long (2510 > 2500), lowering kernel.perf_event_max_sample_rate to 79000",
        "workqueue: drm_fb_helper_damage_work hogged CPU for >10000us 4 times, consider switching to WQ_UNBOUND",
        "CPU3: Core power limit notification (total events = 1)",
        "RIP: 0010:native_safe_halt+0xe/0x10",
        "RIP: 0033:0x7f797fe00000",
        "oom_reaper: unable to reap pid:1234 (python3)",
        "Future hung task reports are suppressed, see sysctl kernel.hung_task_warnings",
        '"echo 0 > /proc/sys/kernel/hung_task_timeout_secs" disables this message.',
        "NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.",
        "ACPI: thermal: Thermal Zone [TZ0] (28 C)",
    ],
)
def test_parse_ignores_other_kernel_lines(text):
    assert parse(text) is None


def test_oops_event_names_driver_from_later_line():
    (oops,) = coalesced(
        "BUG: unable to handle page fault for address: ffffa26487064230",
        "#PF: supervisor read access in kernel mode",
        "Oops: 0000 [#1] PREEMPT SMP PTI",
        "CPU: 0 PID: 99 Comm: python3 Tainted: P           OE     6.7.0 #1",
        "RIP: 0010:_nv032045rm+0x2c/0x70 [nvidia]",
    )
    assert (oops.code, oops.lines, dict(oops.fields)) == ("oops", 3, {"driver": "nvidia"})
    old_kernel_line = "RIP: 0010:[<ffffffffa0b1c2d3>]  [<ffffffffa0b1c2d3>] mlx5_cmd+0x2c/0x70 [mlx5_core]"
    assert fields(old_kernel_line) == {"driver": "mlx5_core"}
    assert fields("pc : uvm_ioctl+0x2c/0x70 [nvidia_uvm 0123456789abcdef]") == {"driver": "nvidia_uvm"}
    assert fields("kernel BUG at /var/lib/dkms/nvidia/550.54/build/nvidia/nv.c:12!") == {"driver": "nvidia"}
    assert fields("kernel BUG at drivers/net/ethernet/mellanox/mlx5/core/cmd.c:12!") == {"driver": "mlx5"}


@pytest.mark.parametrize(
    ("text", "pid", "process", "scope"),
    [
        (
            "Memory cgroup out of memory: Killed process 12 (python3) total-vm:8kB, anon-rss:1kB, file-rss:0kB, "
            "shmem-rss:0kB, UID:1000 pgtables:64kB oom_score_adj:0",
            *(12, "python3", "cgroup"),
        ),
        ("Out of memory: Killed process 12 (a) b) total-vm:8kB, anon-rss:1kB", 12, "a) b", "node"),
        ("Out of memory (oom_kill_allocating_task): Kill process 12 (a) score 0 or sacrifice child", 12, "a", "node"),
        ("Killed process 12 (python3) total-vm:8kB, anon-rss:1kB, file-rss:0kB", 12, "python3", None),
        ("Killed process 12 (python3), UID 1000, total-vm:8kB, anon-rss:1kB", 12, "python3", None),
        ("Killed process 12, UID 1000, (python3) total-vm:8kB, anon-rss:1kB, file-rss:0kB", 12, "python3", None),
        ("oom_reaper: reaped process 12 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB", 12, "python3", None),
        (
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,"
            "task_memcg=/user.slice,task=stress,pid=12,uid=1000",
            *(12, "stress", "node"),
        ),
    ],
)
def test_parse_names_process_killed_by_oom(text, pid, process, scope):
    assert summary(text) == ("oom", "oom_kill", pid, process)
    assert fields(text).get("scope") == scope


JOB = "/system.slice/slurmstepd.scope/job_42/step_0/user/task_0"
OOM_KILL = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset={},mems_allowed=0-1,oom_memcg={},task_memcg={},"
    "task={},pid=1234,uid=1000"
)


def test_oom_event_keeps_cgroup_only_if_unambiguous():
    text = OOM_KILL.format("task_0", JOB, JOB, "python3")
    assert fields(text) == {"scope": "cgroup", "cgroup": JOB}
    forged = f"{JOB}/x,task_memcg=/system.slice/slurmstepd.scope/job_999"
    assert fields(OOM_KILL.format("task_0", forged, forged, "python3")) == {"scope": "cgroup"}
    assert summary(OOM_KILL.format("task_0", JOB, JOB, "a,pid=1,uid=0"))[1:3] == ("oom_kill", 1234)
    old_kernel_line = "Task in /slurm/uid_1000/job_42/step_0 killed as a result of limit of /slurm/uid_1000/job_42"
    assert fields(old_kernel_line)["cgroup"] == "/slurm/uid_1000/job_42/step_0"


def test_oom_kill_lines_are_single_event():
    events = coalesced(
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        OOM_KILL.format("task_0", JOB, JOB, "python3"),
        "Memory cgroup out of memory: Killed process 1234 (python3) total-vm:8kB, anon-rss:1kB, file-rss:0kB",
        "oom_reaper: reaped process 1234 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
    )
    assert [(event.code, event.pid, event.lines) for event in events] == [("invoked", None, 1), ("oom_kill", 1234, 3)]
    assert dict(events[1].fields)["cgroup"] == JOB


def test_simultaneous_hung_tasks_are_single_event():
    lines = [f"INFO: task a{n}:{n} blocked for more than {120 + n} seconds." for n in range(10)]
    detail_line = "INFO: task a0:0 is blocked on a mutex likely owned by task b:9."
    assert [(event.code, event.pid, event.lines) for event in coalesced(*lines, detail_line)] == [("hung", 0, 11)]


@pytest.mark.parametrize(
    ("text", "code", "level"),
    [
        ("CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)", "cpu_throttled", "core"),
        ("CPU3: Package temperature is above threshold, cpu clock is throttled", "cpu_throttled", "package"),
        ("mce: CPU3: Core temperature above threshold, cpu clock throttled", "cpu_throttled", "core"),
        ("CPU0: Temperature above threshold, cpu clock throttled (total events = 1)", "cpu_throttled", None),
        ("mce: CPU3: Package temperature/speed normal", "cpu_normal", "package"),
        ("thermal thermal_zone0: critical temperature reached (103 C), shutting down", "critical", None),
        ("thermal thermal_zone0: critical temperature reached(103 C),shutting down", "critical", None),
        ("thermal thermal_zone2: acpitz: critical temperature reached, shutting down", "critical", None),
        ("Critical temperature reached (128 C), shutting down.", "critical", None),
        ("reboot: HARDWARE PROTECTION shutdown (Temperature too high)", "critical", None),
    ],
)
def test_parse_reads_thermal_lines_from_all_kernels(text, code, level):
    assert summary(text)[:2] == ("thermal", code)
    assert fields(text).get("level") == level


# --- user text, garbage, time


# Texts that can follow a process name at the start of a kernel line.
AFTER_PROCESS_NAME = (
    " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "[4242]: segfault at 0 ip 0 sp 0 error 4 in libc.so.6[7f00+1000]",
    " (4242): drop_caches: 3",
    " (4242) used greatest stack depth: 11024 bytes left",
    ": page allocation failure: order:5, mode:0xcc0(GFP_KERNEL), nodemask=(null)",
    "/4242: potentially unexpected fatal signal 11.",
)
BEGINNINGS = sorted(
    {strip_prefix(line, 0.0).text[:15] for row in LINES for line in row["text"].split("\n") if strip_prefix(line, 0.0)}
)
MISLEADING_NAMES = (
    *("Oops: 0000 [#1]", "Kill process 12", "Killed process ", "BUG: Bad page s", "CPU3: Temperatu", "kernel BUG at a"),
    *("NVRM: Xid (PCI:", "a: b Link down", "pc : a+0x1/0x2 ", "EDAC MC0: 1 UE ", "nvme nvme0: con", "INFO: task a:1 "),
)


@pytest.mark.parametrize("comm", [*MISLEADING_NAMES, *BEGINNINGS])
def test_process_named_like_kernel_line_yields_only_oom(comm):
    for suffix in AFTER_PROCESS_NAME:
        assert summary(comm + suffix) in (None, ("oom", "invoked", None, comm))


MISLEADING_TEXTS = (
    "NVRM: Xid (PCI:0000:01:00): 79",
    "a:1 blocked for more than 120 seconds. b",
    "1] [",
    "a,pid=1,uid=0",
    "a) total-vm:1kB",
)
NAMES = st.text(min_size=1, max_size=15) | st.sampled_from([text[:15] for text in MISLEADING_TEXTS])


@given(NAMES)
def test_process_name_changes_neither_kind_nor_code_nor_pid(name):
    for text, event in (
        (f"INFO: task {name}:42 blocked for more than 120 seconds.", ("hung_task", "hung")),
        (f"watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [{name}:42]", ("soft_lockup", "soft")),
        (f"Memory cgroup out of memory: Killed process 42 ({name}) total-vm:8kB, anon-rss:1kB", ("oom", "oom_kill")),
        (f"Out of memory: Kill process 42 ({name}) score 1000 or sacrifice child", ("oom", "oom_kill")),
    ):
        assert summary(text) == (*event, 42, name)
        assert parse(text).pci == ""
    assert summary(OOM_KILL.format("t", JOB, JOB, name))[:3] == ("oom", "oom_kill", 1234)


PATHS = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=255) | st.sampled_from(
    [
        "NVRM: Xid (PCI:0000:01:00): 79, pid=1",
        "x,task=a,pid=1,uid=0",
        "x,task_memcg=/system.slice/slurmstepd.scope/job_9",
    ]
)


@given(PATHS, PATHS)
def test_cgroup_name_changes_neither_pid_nor_job(cpuset, name):
    event = parse(OOM_KILL.format(cpuset, f"{JOB}/{name}", f"{JOB}/{name}", "python3"))
    assert (event.kind, event.code, event.pid, event.pci) == ("oom", "oom_kill", 1234, "")
    assert dict(event.fields).get("cgroup", JOB).startswith(JOB)


PIECES = st.sampled_from(
    [
        "INFO: task ",
        ":42 ",
        "blocked for more than ",
        "120 seconds.",
        "BUG: soft lockup - CPU#",
        "3 stuck for 22s! ",
        "[",
        "oom-kill:constraint=CONSTRAINT_MEMCG,",
        ",task_memcg=",
        ",task=",
        ",pid=1,uid=1",
        "Oops: ",
        "0000 ",
        "[#1]",
        " SMP",
        "RIP: 0010:",
        "f+0x1/0x2 ",
        "[nvidia]",
        "Killed process ",
        "12 (",
        ") total-vm:",
        " invoked oom-killer: gfp_mask=",
    ]
)


@given(st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join))
def test_parse_accepts_any_text(text):
    event = parse(text)
    assert event is None or event.kind


@pytest.mark.parametrize(
    "piece",
    [
        "INFO: task ",
        ":1 ",
        "a",
        " ",
        "[#1] SMP",
        "[<a>] ",
        ",task=",
        ",pid=1",
        "Oops: 0000 [#1]",
        "(1) ",
        "rcu_",
        "CPU1: ",
    ],
)
def test_parse_is_fast_for_long_line(piece):
    long_text = piece * (16384 // len(piece))
    prefixes = (
        "",
        "INFO: task ",
        "Oops: ",
        "RIP: 0010:",
        "Killed process 1 (",
        "oom-kill:constraint=CONSTRAINT_MEMCG,",
        "Task in /",
    )
    end = " [#1] invoked oom-killer: killed as a result of limit of ard LOCKUP BUG: workqueue lockup"
    assert cpu_seconds(lambda: [parse(f"{prefix}{long_text}{end}") for prefix in prefixes], 0.5) < 0.5


@pytest.mark.parametrize("action", ["shutdown", "reboot"])
def test_parse_reads_hardware_protection_for_heat(action):
    assert summary(f"reboot: HARDWARE PROTECTION {action} (Temperature too high)")[:2] == ("thermal", "critical")


@pytest.mark.parametrize(
    "text",
    [
        "INFO: task a:12 is blocked on an rw-semaphore, but the owner is not found.",
        "INFO: task a:12 blocked on a semaphore likely last held by task b:13",
    ],
)
def test_parse_reads_hung_task_lock_owner_as_detail(text):
    assert summary(text)[:2] == ("hung_task", "detail")
