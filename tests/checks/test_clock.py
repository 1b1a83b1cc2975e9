"""clock: whether this node's clock is synchronised and its time source is fast."""

from __future__ import annotations

import pytest
from fakes import codes, findings, run_check, until_it_fails
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem, write

from healthd.checks import clock
from healthd.checks.clock import CLOCK_SOURCE, CLOCK_SOURCES, SLOW_SOURCES, Config, validate
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Observation, Severity
from healthd.host.host import Host
from healthd.host.system import KernelClock

RIGHT = KernelClock(True, 0.000012, 0.02)
NEVER = KernelClock(False, 0.0, 16.0)  # the state at boot

ABSENT_IS_FINE = {
    "": "a tree of files that stands in for a machine has no clock",
    CLOCK_SOURCE: "a sandbox may not show it",
}


def node(tmp_path, reading=RIGHT):
    return Host(str(tmp_path), system=FakeSystem(str(tmp_path), clock=reading))


def healthy(tmp_path):
    write(tmp_path, {CLOCK_SOURCE: "tsc\n"})
    return node(tmp_path), Config()


def test_a_clock_that_is_kept_gives_its_numbers_and_no_finding(tmp_path):
    given = run_check(clock, node(tmp_path))
    assert [(item.name, item.value) for item in given] == [
        ("clock_synchronised", 1),
        ("clock_offset_seconds", 0.000012),
        ("clock_max_error_seconds", 0.02),
    ]


def test_chrony_without_rtcsync_leaves_the_flag_and_keeps_the_clock(tmp_path):
    assert findings(clock, node(tmp_path, KernelClock(False, 0.0, 0.02))) == []


def test_a_tree_has_no_clock(tmp_path):
    assert run_check(clock, Host(str(tmp_path))) == []


@pytest.mark.parametrize(
    ("reading", "code"),
    [
        (NEVER, "clock/unsynchronised"),
        (KernelClock(True, 1.001, 0.1), "clock/offset"),
        (KernelClock(True, -1.001, 0.1), "clock/offset"),
        (KernelClock(True, 0.0, 5.1), "clock/uncertain"),
    ],
)
def test_a_clock_that_nothing_keeps_or_that_is_wrong_warns_after_ten_minutes(tmp_path, reading, code):
    (finding,) = findings(clock, node(tmp_path, reading))
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.WARNING, Clears.PASS)
    assert finding.confirm_seconds == 600.0


def test_a_clock_that_is_not_synchronised_and_known_to_be_wrong_is_both(tmp_path):
    host = node(tmp_path, KernelClock(False, 3.0, 16.0))
    assert codes(findings(clock, host)) == ["clock/unsynchronised", "clock/offset"]


def test_the_longest_usual_poll_of_a_time_server_is_no_finding(tmp_path):
    assert findings(clock, node(tmp_path, KernelClock(True, -0.5, 0.1 + 2048 * 0.0005))) == []


def test_a_clock_that_may_not_be_read_is_unknown(tmp_path):
    assert "not permitted" in until_it_fails(clock, node(tmp_path, PermissionError(1, "Operation not permitted")))[1]


@pytest.mark.parametrize(("kept", "found"), [(True, []), (False, ["clock/unsynchronised"])])
def test_who_may_not_ask_the_kernel_is_told_by_systemd_whether_it_is_kept(tmp_path, kept, found):
    told = list(clock.run(node(tmp_path, KernelClock(kept, None, None)), Config(), History({}, 0.0, "")))
    assert [one.code for one in told if isinstance(one, Finding)] == found
    assert [(one.name, one.value) for one in told if isinstance(one, Observation)] == [("clock_synchronised", kept)]


def test_a_virtual_machine_whose_hypervisor_keeps_the_clock_is_none_where_systemd_tells(tmp_path):
    write(tmp_path, {CLOCK_SOURCES: "tsc kvm-clock\n"})
    assert findings(clock, node(tmp_path, KernelClock(False, None, None))) == []


@pytest.mark.parametrize("sources", ["tsc kvm-clock acpi_pm", "xen tsc", "hyperv_clocksource_tsc_page acpi_pm"])
def test_a_virtual_machine_without_any_time_client_is_only_recorded(tmp_path, sources):
    write(tmp_path, {CLOCK_SOURCES: f"{sources}\n"})
    assert findings(clock, node(tmp_path, NEVER)) == []


def test_a_virtual_machine_whose_time_client_does_not_work_warns(tmp_path):
    write(tmp_path, {CLOCK_SOURCES: "tsc kvm-clock\n", "/etc/chrony.conf": "pool a\n"})
    assert codes(findings(clock, node(tmp_path, NEVER))) == ["clock/unsynchronised"]


def test_hardware_without_any_time_client_warns(tmp_path):
    write(tmp_path, {CLOCK_SOURCES: "tsc hpet acpi_pm\n"})
    assert codes(findings(clock, node(tmp_path, NEVER))) == ["clock/unsynchronised"]


def test_this_machine_gives_nothing_above_info():
    assert [f for f in findings(clock, Host()) if f.severity > Severity.INFO] == []


@pytest.mark.parametrize(
    "config", [Config(max_offset_seconds=0.0), Config(max_error_seconds=-1.0), Config(max_error_seconds=16.0)]
)
def test_a_limit_that_all_or_nothing_meets_is_refused(config):
    assert "must be above 0" in (validate(config) or "")
    assert validate(Config()) is None


@given(st.booleans(), st.floats(-1e9, 1e9), st.floats(0, 1e4))
def test_every_reading_that_is_not_right_is_a_finding(synchronised, offset, error):
    host = Host("/nonexistent", system=FakeSystem("/nonexistent", clock=KernelClock(synchronised, offset, error)))
    assert bool(findings(clock, host)) == (abs(offset) > 1 or error > 5)


# --- the clock source of the kernel


@pytest.mark.parametrize("source", ["hpet", "acpi_pm", "jiffies", "refined-jiffies"])
def test_time_that_is_read_from_a_chip_warns(tmp_path, source):
    write(tmp_path, {CLOCK_SOURCE: f"{source}\n", CLOCK_SOURCES: "hpet acpi_pm\n"})  # tsc is no longer listed
    (finding,) = findings(clock, node(tmp_path))
    assert (finding.code, finding.severity, finding.clears) == ("clock/slow_source", Severity.WARNING, Clears.PASS)
    assert source in finding.message


@pytest.mark.parametrize(
    "source",
    ["tsc", "tsc-early", "kvm-clock", "xen", "hyperv_clocksource_tsc_page", "arch_sys_counter", "timebase"],
)
def test_the_source_of_each_cpu_and_hypervisor_is_right(tmp_path, source):
    write(tmp_path, {CLOCK_SOURCE: f"{source}\n"})
    assert findings(clock, node(tmp_path)) == []


@pytest.mark.parametrize("text", ["", "N/A", "Unknown", str(2**64), "tsc hpet", b"\xff\x00ELF"])
def test_a_garbled_source_is_unknown_and_hides_no_wrong_clock(tmp_path, text):
    write(tmp_path, {CLOCK_SOURCE: text})
    given, error = until_it_fails(clock, node(tmp_path, KernelClock(True, 0.0, 9.0)))
    assert f"{CLOCK_SOURCE}: not a name" in error
    assert codes([item for item in given if isinstance(item, Finding)]) == ["clock/uncertain"]


def test_a_clock_that_may_not_be_read_hides_no_slow_source(tmp_path):
    write(tmp_path, {CLOCK_SOURCE: "hpet\n"})
    given, error = until_it_fails(clock, node(tmp_path, PermissionError(1, "Operation not permitted")))
    assert (codes(given), "not permitted" in error) == (["clock/slow_source"], True)


@given(st.text(max_size=12))
def test_any_source_is_right_slow_or_unknown(tmp_path_factory, text):
    host = write(tmp_path_factory.mktemp("n"), {CLOCK_SOURCE: text.encode("utf-8", "replace")})
    given, error = until_it_fails(clock, host)
    assert codes(given) == (["clock/slow_source"] if text.strip() in SLOW_SOURCES else [])
    assert error == "" or "not a name" in error


# --- stories


def test_a_slow_source_warns_until_a_reboot_has_brought_tsc_back_and_never_drains(tmp_path):
    slow = node(tmp_path)
    write(tmp_path, {CLOCK_SOURCE: "hpet\n"})
    story = Story(clock).looks(slow, 300)
    assert (story.codes, story.drained) == (["clock/slow_source"], False)
    assert story.reboot().looks(slow, 3).codes == ["clock/slow_source"]
    write(tmp_path, {CLOCK_SOURCE: "tsc\n"})
    assert story.reboot().looks(node(tmp_path), 2).codes == []


def test_a_boot_after_which_chrony_needs_minutes_is_no_warning(tmp_path):
    story = Story(clock).look(node(tmp_path)).reboot().look(node(tmp_path, NEVER)).look(node(tmp_path, NEVER))
    assert story.codes == []
    assert story.look(node(tmp_path)).codes == []


@pytest.mark.parametrize(
    ("reading", "code"),
    [
        (NEVER, "clock/unsynchronised"),
        (KernelClock(True, 2.0, 0.1), "clock/offset"),
        (KernelClock(True, 0.0, 9.0), "clock/uncertain"),
    ],
)
def test_a_clock_that_nothing_keeps_warns_until_something_does_and_never_drains(tmp_path, reading, code):
    story = Story(clock).looks(node(tmp_path, reading), 20)
    assert (story.codes, story.drained) == ([code], False)
    assert story.wait(600).look(node(tmp_path, reading)).codes == [code]
    assert story.looks(node(tmp_path), 2).codes == []
