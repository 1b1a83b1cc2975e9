"""kernel: messages of the kernel about itself."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import event_of, finding_of, findings_of
from story import Story

from healthd.checks import kernel
from healthd.checks.kernel import EXPLAIN, RULES
from healthd.common.model import Clears, Finding, Severity

HOUR, DAY = 60.0, 24 * 60.0  # minutes


findings_from = partial(findings_of, kernel, interval=0.1, all_events=False)
finding_from = partial(finding_of, kernel, interval=0.1, all_events=False)


KernelStory = partial(Story, kernel)


HARD = "watchdog: CPU12: Watchdog detected hard LOCKUP on cpu 12"
SOFT = "watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]"
STALL = "rcu: INFO: rcu_sched self-detected stall on CPU"
WORK = "BUG: workqueue lockup - pool cpus=3 node=0 flags=0x0 nice=0 stuck for 33s!"
HUNG = "INFO: task php-fpm:2767319 blocked for more than 120 seconds."
FAULT = "BUG: unable to handle page fault for address: ffffa26487064230"
OOPS = "Oops: 0000 [#1] PREEMPT SMP PTI"
PANIC = "Kernel panic - not syncing: Fatal exception in interrupt"
KILLED = "Memory cgroup out of memory: Killed process 1234 (python3) total-vm:8kB, anon-rss:1kB, file-rss:0kB"
HOT = "CPU{}: Core temperature above threshold, cpu clock throttled (total events = 1)"
COOL = "CPU{}: Core temperature/speed normal"


def instruction_pointer(driver):
    return f"RIP: 0010:f+0x2c/0x70 [{driver}]"


def test_hard_lockup_is_degraded_until_reboot():
    assert finding_from(HARD) == Finding(
        Severity.DEGRADED,
        "kernel/hard_lockup",
        "",
        "a CPU no longer handles interrupts, CPU 12",
        Clears.REBOOT,
        events=(1,),
    )


@pytest.mark.parametrize(
    "lines",
    [
        [HARD],
        [PANIC],
        [FAULT, OOPS, instruction_pointer("nvidia")],
        [FAULT, instruction_pointer("nvidia_uvm")],
        [OOPS, instruction_pointer("mlx5_core")],
    ],
)
def test_severe_kernel_error_drains_until_reboot_without_requeue(lines):
    finding = finding_from(*lines)
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.DEGRADED, Clears.REBOOT, 0.0)


@pytest.mark.parametrize("line", [HARD, PANIC, "kernel BUG at /var/lib/dkms/nvidia/550.54/build/nvidia/nv.c:12!"])
def test_severe_kernel_error_stays_drained_until_reboot(line):
    story = KernelStory().log_lines(line)
    assert (story.drained, story.requeued) == (True, False)
    assert story.log_lines(SOFT, FAULT).wait(30 * DAY).drained
    assert not story.reboot().drained


@pytest.mark.parametrize(
    "lines", [[FAULT, OOPS], [FAULT, instruction_pointer("xfs")], ["BUG: Bad page state in process a  pfn:1"]]
)
def test_oops_elsewhere_warns_until_reboot_or_a_day(lines):
    finding = finding_from(*lines)
    assert (finding.code, finding.severity, finding.clears) == ("kernel/oops", Severity.WARNING, Clears.REBOOT)
    assert KernelStory().log_lines(*lines[:1]).codes == ["kernel/oops"]
    assert KernelStory().log_lines(*lines[:1]).reboot().codes == []
    assert KernelStory().log_lines(*lines[:1]).wait(DAY + 1).codes == []


def test_oops_message_names_driver():
    assert (
        finding_from(FAULT, OOPS, instruction_pointer("nvidia")).message
        == "kernel error; the running process was killed, in nvidia, 3 lines"
    )


def test_driver_warning_is_not_attributed_to_bad_page():
    """A WARNING with its backtrace is common for a driver and unrelated to the wrong counter of an exiting process."""
    warning = "WARNING: CPU: 3 PID: 1234 at drivers/net/ethernet/mellanox/mlx5/core/cmd.c:123 f+0x2c/0x70 [mlx5_core]"
    bad_page = "BUG: Bad rss-counter state mm:00000000abcd type:MM_ANONPAGES val:1"
    for lines in (
        [warning, instruction_pointer("mlx5_core"), bad_page],
        [bad_page, warning, instruction_pointer("nvidia_uvm")],
    ):
        (finding,) = [each for each in findings_from(*lines) if each.severity > Severity.INFO]
        assert (finding.code, finding.severity) == ("kernel/oops", Severity.WARNING)
        assert not KernelStory().log_lines(*(line for line in lines if line != warning)).drained


def test_driver_warning_before_oops_elsewhere_is_not_its_location():
    warning = "WARNING: CPU: 3 PID: 1234 at drivers/net/ethernet/mellanox/mlx5/core/cmd.c:123 f+0x2c/0x70 [mlx5_core]"
    assert (
        not KernelStory().log_lines(instruction_pointer("mlx5_core"), FAULT, OOPS, instruction_pointer("xfs")).drained
    )
    finding = finding_from(warning, instruction_pointer("mlx5_core"), FAULT, OOPS, instruction_pointer("xfs"))
    assert (finding.severity, "in xfs" in finding.message, "mlx5" in finding.message) == (Severity.WARNING, True, False)
    assert finding_from(warning, instruction_pointer("mlx5_core"), FAULT, OOPS).severity is Severity.WARNING
    assert (
        finding_from(warning, instruction_pointer("xfs"), FAULT, OOPS, instruction_pointer("nvidia")).severity
        is Severity.DEGRADED
    )


def test_driver_of_one_oops_is_not_that_of_another():
    severities = [
        finding.severity
        for finding in findings_from(FAULT, instruction_pointer("xfs"), FAULT, times=[1000.0, 1000.1, 5000.0])
    ]
    assert severities == [Severity.WARNING]
    worst = finding_from(FAULT, instruction_pointer("nvidia"), FAULT, times=[1000.0, 1000.1, 5000.0])
    assert (worst.severity, "nvidia" in worst.message) == (Severity.DEGRADED, True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (SOFT, "soft_lockup"),
        (STALL, "rcu_stall"),
        (WORK, "workqueue"),
        (HUNG, "hung_task"),
        (HOT.format(3), "cpu_throttled"),
        ("thermal thermal_zone0: critical temperature reached (103 C), shutting down", "too_hot"),
    ],
)
def test_stall_or_heat_warns_for_an_hour_and_never_drains(line, code):
    story = KernelStory()
    for _ in range(50):
        story.log_lines(line).wait(2)
    assert (story.drained, story.codes) == (False, [f"kernel/{code}"])
    assert story.wait(57).codes == [f"kernel/{code}"]
    assert story.wait(2).codes == []


def test_message_names_stalled_task():
    assert finding_from(SOFT).message == "a CPU did not schedule, python3 (pid 2254956), CPU 18, 27 s"
    assert finding_from(HUNG).message == "a task hangs, php-fpm (pid 2767319), 120 s"
    assert "a?b" in finding_from(HUNG.replace("php-fpm", "a\x1bb")).message


def test_oom_kill_is_only_recorded():
    finding = finding_from(KILLED, "oom_reaper: reaped process 1234 (python3), now anon-rss:0kB")
    assert (finding.severity, finding.code) == (Severity.INFO, "kernel/oom_kill")
    assert finding.message == "killed because memory ran out, python3 (pid 1234), its cgroup's limit, 2 lines"
    story = KernelStory()
    for _ in range(50):
        story.log_lines(KILLED)
    assert not story.drained
    assert story.wait(HOUR + 1).codes == []


def test_condition_has_job_of_oom_victim():
    from msgspec.structs import replace

    killed = event_of(KILLED)
    story = KernelStory().take_event(replace(killed, fields=(*killed.fields, ("job", "42"))))
    assert [condition.job for condition in story.conditions.values()] == ["42"]


def test_heat_clears_when_every_hot_cpu_is_cool():
    story = KernelStory().log_lines(HOT.format(3), HOT.format(4), COOL.format(3))
    assert story.codes == ["kernel/cpu_throttled"]
    assert story.log_lines(COOL.format(4)).codes == []
    assert story.wait(HOUR).log_lines(HOT.format(3)).codes == ["kernel/cpu_throttled"]
    assert findings_from(COOL.format(3)) == []


def test_cpu_hot_before_boot_does_not_delay_clearing():
    lines = [HOT.format(3), HOT.format(4), COOL.format(4)]
    assert finding_from(*lines, times=[1.0, 1000.0, 1010.0], boots=["a", "b", "b"]).recovered
    assert not finding_from(*lines, times=[1.0, 1000.0, 1010.0]).recovered


@pytest.mark.parametrize(
    "line",
    [
        "Kernel panic - not syncing: sysrq triggered crash",
        "Kernel panic - not syncing: Test panic triggered by crash_test module",
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        instruction_pointer("nvidia"),
        "WARNING: CPU: 3 PID: 210 at drivers/gpu/drm/drm_x.c:12 f+0x1/0x2 [drm]",
        "NVRM: Xid (PCI:0000:3b:00): 79, x",
    ],
)
def test_deliberate_crash_or_detail_line_gives_no_finding(line):
    assert findings_from(line) == []


def test_history_of_first_start_never_drains():
    story = KernelStory().take_event(event_of(HARD, history=True))
    assert (story.drained, story.codes) == (False, ["kernel/hard_lockup"])


def test_explain_matches_findings():
    assert set(EXPLAIN) == {"kernel/pattern", *(f"kernel/{rule.code}" for rule in RULES.values())}
    for rule in RULES.values():
        text = EXPLAIN[f"kernel/{rule.code}"]
        # The severity of an oops depends on its driver, that of a soft lockup on its duration.
        worst = Severity.DEGRADED if rule.code in ("oops", "soft_lockup") else rule.severity
        assert (text.severity, text.clears) == (worst, Clears.REBOOT if worst >= Severity.DEGRADED else rule.clears)
        assert all((text.meaning, text.matters, text.todo))


@given(
    st.lists(
        st.sampled_from(
            [HARD, SOFT, HUNG, FAULT, instruction_pointer("nvidia"), KILLED, HOT.format(1), COOL.format(1)]
        ),
        max_size=10,
    )
)
def test_any_lines_give_at_most_one_finding_per_code(lines):
    names = [finding.code for finding in findings_from(*lines)]
    assert len(names) == len(set(names))
    assert all(finding.events for finding in findings_from(*lines))


def soft_lockup(seconds, cpu=18, pid=4711):
    return f"watchdog: BUG: soft lockup - CPU#{cpu} stuck for {seconds}s! [python3:{pid}]"


@pytest.mark.parametrize(("seconds", "severity"), [(300, Severity.WARNING), (301, Severity.DEGRADED)])
def test_soft_lockup_longer_than_five_minutes_drains_until_reboot(seconds, severity):
    (finding,) = findings_from(soft_lockup(26), soft_lockup(seconds), times=[0.0, float(seconds - 26)])
    assert (finding.code, finding.severity) == ("kernel/soft_lockup", severity)
    assert finding.clears is (Clears.REBOOT if severity is Severity.DEGRADED else Clears.WINDOW)
    assert f", {seconds} s" in finding.message


@pytest.mark.parametrize(("lines", "severity"), [(14, Severity.WARNING), (15, Severity.DEGRADED)])
def test_duration_of_constant_22_seconds_counts_from_first_line(lines, severity):
    """Up to Linux 5.12 each line has the time since the previous line."""
    times = [20.0 * n for n in range(lines)]
    (finding,) = findings_from(*[soft_lockup(22)] * lines, times=times)
    assert finding.severity is severity


def test_lockups_of_other_cpus_processes_or_boots_are_not_added():
    count = 30
    times = [20.0 * n for n in range(count)]
    by_turns = [soft_lockup(22, cpu=n % 7) for n in range(count)]
    assert findings_from(*by_turns, times=times)[0].severity is Severity.WARNING
    assert findings_from(*[soft_lockup(22, pid=n) for n in range(count)], times=times)[0].severity is Severity.WARNING
    assert (
        findings_from(*[soft_lockup(22)] * count, times=[61.0 * n for n in range(count)])[0].severity
        is Severity.WARNING
    )
    boots = ["a"] * 10 + ["b"] * 10
    assert findings_from(*[soft_lockup(22)] * 20, times=times[:20], boots=boots)[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("VFS: file-max limit 1000000 reached", "file_max", "fs.file-max is 1000000"),
        ("unregister_netdevice: waiting for lo to become free. Usage count = 1", "netdevice", "lo"),
        ("unregister_netdevice: waiting for eth0 to become free. Usage count = -1", "netdevice", "eth0"),
    ],
)
def test_file_limit_and_stuck_interface_warn_for_an_hour(line, code, text):
    (finding,) = findings_from(line)
    assert (finding.code, finding.severity, finding.clears) == (f"kernel/{code}", Severity.WARNING, Clears.WINDOW)
    assert text in finding.message
