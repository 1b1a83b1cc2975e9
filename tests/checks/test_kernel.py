"""kernel: messages of the kernel about itself."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import event, finding_of, findings_of
from story import Story

from healthd.checks import kernel
from healthd.checks.kernel import EXPLAIN, RULES
from healthd.common.model import Clears, Finding, Severity

HOUR, DAY = 60.0, 24 * 60.0  # minutes


found = partial(findings_of, kernel, apart=0.1, all_events=False)
one = partial(finding_of, kernel, apart=0.1, all_events=False)


Life = partial(Story, kernel)


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


def at(driver):
    return f"RIP: 0010:f+0x2c/0x70 [{driver}]"


def test_a_hard_lockup_is_degraded_until_a_reboot():
    assert one(HARD) == Finding(
        Severity.DEGRADED,
        "kernel/hard_lockup",
        "",
        "a CPU no longer handles interrupts, CPU 12",
        Clears.REBOOT,
        events=(1,),
    )


@pytest.mark.parametrize(
    "lines", [[HARD], [PANIC], [FAULT, OOPS, at("nvidia")], [FAULT, at("nvidia_uvm")], [OOPS, at("mlx5_core")]]
)
def test_what_a_machine_cannot_be_trusted_after_drains_without_requeue_until_a_reboot(lines):
    finding = one(*lines)
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.DEGRADED, Clears.REBOOT, 0.0)


@pytest.mark.parametrize("line", [HARD, PANIC, "kernel BUG at /var/lib/dkms/nvidia/550.54/build/nvidia/nv.c:12!"])
def test_it_stays_drained_until_then(line):
    life = Life().says(line)
    assert (life.drained, life.requeued) == (True, False)
    assert life.says(SOFT, FAULT).wait(30 * DAY).drained
    assert not life.reboot().drained


@pytest.mark.parametrize("lines", [[FAULT, OOPS], [FAULT, at("xfs")], ["BUG: Bad page state in process a  pfn:1"]])
def test_an_oops_elsewhere_warns_until_a_reboot_or_a_day(lines):
    finding = one(*lines)
    assert (finding.code, finding.severity, finding.clears) == ("kernel/oops", Severity.WARNING, Clears.REBOOT)
    assert Life().says(*lines[:1]).codes == ["kernel/oops"]
    assert Life().says(*lines[:1]).reboot().codes == []
    assert Life().says(*lines[:1]).wait(DAY + 1).codes == []


def test_the_oops_names_its_driver():
    assert one(FAULT, OOPS, at("nvidia")).message == "kernel error; the running process was killed, in nvidia, 3 lines"


def test_a_warning_in_a_driver_makes_no_driver_oops_of_a_bad_page_beside_it():
    """A WARNING with its backtrace is common for a driver and unrelated to the wrong counter of an exiting process."""
    warning = "WARNING: CPU: 3 PID: 1234 at drivers/net/ethernet/mellanox/mlx5/core/cmd.c:123 f+0x2c/0x70 [mlx5_core]"
    bad = "BUG: Bad rss-counter state mm:00000000abcd type:MM_ANONPAGES val:1"
    for lines in ([warning, at("mlx5_core"), bad], [bad, warning, at("nvidia_uvm")]):
        (finding,) = [each for each in found(*lines) if each.severity > Severity.INFO]
        assert (finding.code, finding.severity) == ("kernel/oops", Severity.WARNING)
        assert not Life().says(*(line for line in lines if line != warning)).drained


def test_a_warning_in_a_driver_right_before_an_oops_elsewhere_is_not_where_the_oops_is():
    warning = "WARNING: CPU: 3 PID: 1234 at drivers/net/ethernet/mellanox/mlx5/core/cmd.c:123 f+0x2c/0x70 [mlx5_core]"
    assert not Life().says(at("mlx5_core"), FAULT, OOPS, at("xfs")).drained
    finding = one(warning, at("mlx5_core"), FAULT, OOPS, at("xfs"))
    assert (finding.severity, "in xfs" in finding.message, "mlx5" in finding.message) == (Severity.WARNING, True, False)
    assert one(warning, at("mlx5_core"), FAULT, OOPS).severity is Severity.WARNING
    assert one(warning, at("xfs"), FAULT, OOPS, at("nvidia")).severity is Severity.DEGRADED


def test_the_driver_of_one_oops_is_not_that_of_another():
    severities = [finding.severity for finding in found(FAULT, at("xfs"), FAULT, times=[1000.0, 1000.1, 5000.0])]
    assert severities == [Severity.WARNING]
    worst = one(FAULT, at("nvidia"), FAULT, times=[1000.0, 1000.1, 5000.0])
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
def test_what_stands_still_or_is_hot_warns_for_an_hour_and_never_drains(line, code):
    life = Life()
    for _ in range(50):
        life.says(line).wait(2)
    assert (life.drained, life.codes) == (False, [f"kernel/{code}"])
    assert life.wait(57).codes == [f"kernel/{code}"]
    assert life.wait(2).codes == []


def test_the_one_that_stands_still_is_named():
    assert one(SOFT).message == "a CPU did not schedule, python3 (pid 2254956), CPU 18, 27 s"
    assert one(HUNG).message == "a task hangs, php-fpm (pid 2767319), 120 s"
    assert "a?b" in one(HUNG.replace("php-fpm", "a\x1bb")).message


def test_a_process_that_was_killed_for_memory_is_its_jobs_affair():
    finding = one(KILLED, "oom_reaper: reaped process 1234 (python3), now anon-rss:0kB")
    assert (finding.severity, finding.code) == (Severity.INFO, "kernel/oom_kill")
    assert finding.message == "killed because memory ran out, python3 (pid 1234), its cgroup's limit, 2 lines"
    life = Life()
    for _ in range(50):
        life.says(KILLED)
    assert not life.drained
    assert life.wait(HOUR + 1).codes == []


def test_the_job_of_the_victim_stands_with_the_condition():
    from msgspec.structs import replace

    killed = event(KILLED)
    life = Life().hear(replace(killed, fields=(*killed.fields, ("job", "42"))))
    assert [condition.job for condition in life.conditions.values()] == ["42"]


def test_heat_is_over_when_every_cpu_that_was_hot_is_cool():
    life = Life().says(HOT.format(3), HOT.format(4), COOL.format(3))
    assert life.codes == ["kernel/cpu_throttled"]
    assert life.says(COOL.format(4)).codes == []
    assert life.wait(HOUR).says(HOT.format(3)).codes == ["kernel/cpu_throttled"]
    assert found(COOL.format(3)) == []


def test_a_cpu_that_was_hot_before_the_boot_is_not_waited_for():
    lines = [HOT.format(3), HOT.format(4), COOL.format(4)]
    assert one(*lines, times=[1.0, 1000.0, 1010.0], boots=["a", "b", "b"]).recovered
    assert not one(*lines, times=[1.0, 1000.0, 1010.0]).recovered


@pytest.mark.parametrize(
    "line",
    [
        "Kernel panic - not syncing: sysrq triggered crash",
        "Kernel panic - not syncing: Test panic triggered by crash_test module",
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        at("nvidia"),
        "WARNING: CPU: 3 PID: 210 at drivers/gpu/drm/drm_x.c:12 f+0x1/0x2 [drm]",
        "NVRM: Xid (PCI:0000:3b:00): 79, x",
    ],
)
def test_what_somebody_did_on_purpose_or_what_is_only_a_detail_is_no_finding(line):
    assert found(line) == []


def test_what_the_log_held_before_healthd_first_looked_never_acts():
    life = Life().hear(event(HARD, history=True))
    assert (life.drained, life.codes) == (False, ["kernel/hard_lockup"])


def test_every_finding_is_explained_as_it_is_judged():
    assert set(EXPLAIN) == {"kernel/pattern", *(f"kernel/{rule.code}" for rule in RULES.values())}
    for rule in RULES.values():
        text = EXPLAIN[f"kernel/{rule.code}"]
        # The severity of an oops depends on its driver, that of a soft lockup on its duration.
        worst = Severity.DEGRADED if rule.code in ("oops", "soft_lockup") else rule.severity
        assert (text.severity, text.clears) == (worst, Clears.REBOOT if worst >= Severity.DEGRADED else rule.clears)
        assert all((text.meaning, text.matters, text.todo))


@given(
    st.lists(
        st.sampled_from([HARD, SOFT, HUNG, FAULT, at("nvidia"), KILLED, HOT.format(1), COOL.format(1)]), max_size=10
    )
)
def test_whatever_is_said_there_is_at_most_one_finding_for_each_code(lines):
    names = [finding.code for finding in found(*lines)]
    assert len(names) == len(set(names))
    assert all(finding.events for finding in found(*lines))


def stuck(seconds, cpu=18, pid=4711):
    return f"watchdog: BUG: soft lockup - CPU#{cpu} stuck for {seconds}s! [python3:{pid}]"


@pytest.mark.parametrize(("seconds", "severity"), [(300, Severity.WARNING), (301, Severity.DEGRADED)])
def test_a_soft_lockup_of_more_than_five_minutes_drains_until_a_reboot(seconds, severity):
    (finding,) = found(stuck(26), stuck(seconds), times=[0.0, float(seconds - 26)])
    assert (finding.code, finding.severity) == ("kernel/soft_lockup", severity)
    assert finding.clears is (Clears.REBOOT if severity is Severity.DEGRADED else Clears.WINDOW)
    assert f", {seconds} s" in finding.message


@pytest.mark.parametrize(("lines", "severity"), [(14, Severity.WARNING), (15, Severity.DEGRADED)])
def test_a_kernel_that_always_says_22_seconds_is_counted_from_the_first_line_on(lines, severity):
    """Up to Linux 5.12 each line has the time since the previous line."""
    times = [20.0 * n for n in range(lines)]
    (finding,) = found(*[stuck(22)] * lines, times=times)
    assert finding.severity is severity


def test_lockups_of_other_cpus_processes_and_boots_or_with_a_pause_are_not_one():
    many = 30
    times = [20.0 * n for n in range(many)]
    by_turns = [stuck(22, cpu=n % 7) for n in range(many)]
    assert found(*by_turns, times=times)[0].severity is Severity.WARNING
    assert found(*[stuck(22, pid=n) for n in range(many)], times=times)[0].severity is Severity.WARNING
    assert found(*[stuck(22)] * many, times=[61.0 * n for n in range(many)])[0].severity is Severity.WARNING
    boots = ["a"] * 10 + ["b"] * 10
    assert found(*[stuck(22)] * 20, times=times[:20], boots=boots)[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("VFS: file-max limit 1000000 reached", "file_max", "fs.file-max is 1000000"),
        ("unregister_netdevice: waiting for lo to become free. Usage count = 1", "netdevice", "lo"),
        ("unregister_netdevice: waiting for eth0 to become free. Usage count = -1", "netdevice", "eth0"),
    ],
)
def test_a_limit_that_is_reached_and_an_interface_that_stays_warn_for_an_hour(line, code, says):
    (finding,) = found(line)
    assert (finding.code, finding.severity, finding.clears) == (f"kernel/{code}", Severity.WARNING, Clears.WINDOW)
    assert says in finding.message
