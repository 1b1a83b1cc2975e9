"""clock: whether this node's clock is synchronised and its time source is fast."""

from __future__ import annotations

import pytest
from fakes import codes, findings, run_check, run_until_error
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


def test_synchronised_clock_gives_observations_and_no_finding(tmp_path):
    results = run_check(clock, node(tmp_path))
    assert [(item.name, item.value) for item in results] == [
        ("clock_synchronised", 1),
        ("clock_offset_seconds", 0.000012),
        ("clock_max_error_seconds", 0.02),
    ]


def test_clock_accepts_chrony_without_rtcsync(tmp_path):
    assert findings(clock, node(tmp_path, KernelClock(False, 0.0, 0.02))) == []


def test_clock_reports_nothing_for_tree(tmp_path):
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
def test_unsynchronised_or_wrong_clock_warns_after_ten_minutes(tmp_path, reading, code):
    (finding,) = findings(clock, node(tmp_path, reading))
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.WARNING, Clears.PASS)
    assert finding.confirm_seconds == 600.0


def test_unsynchronised_and_wrong_clock_gives_two_findings(tmp_path):
    host = node(tmp_path, KernelClock(False, 3.0, 16.0))
    assert codes(findings(clock, host)) == ["clock/unsynchronised", "clock/offset"]


def test_longest_usual_poll_of_time_server_gives_no_finding(tmp_path):
    assert findings(clock, node(tmp_path, KernelClock(True, -0.5, 0.1 + 2048 * 0.0005))) == []


def test_unreadable_clock_fails_run(tmp_path):
    assert "not permitted" in run_until_error(clock, node(tmp_path, PermissionError(1, "Operation not permitted")))[1]


@pytest.mark.parametrize(("synchronised", "found"), [(True, []), (False, ["clock/unsynchronised"])])
def test_clock_uses_state_of_systemd_without_permission(tmp_path, synchronised, found):
    results = list(clock.run(node(tmp_path, KernelClock(synchronised, None, None)), Config(), History({}, 0.0, "")))
    assert [item.code for item in results if isinstance(item, Finding)] == found
    assert [(item.name, item.value) for item in results if isinstance(item, Observation)] == [
        ("clock_synchronised", synchronised)
    ]


def test_guest_clock_kept_by_hypervisor_is_ignored_with_systemd_state(tmp_path):
    write(tmp_path, {CLOCK_SOURCES: "tsc kvm-clock\n"})
    assert findings(clock, node(tmp_path, KernelClock(False, None, None))) == []


@pytest.mark.parametrize("sources", ["tsc kvm-clock acpi_pm", "xen tsc", "hyperv_clocksource_tsc_page acpi_pm"])
def test_guest_without_time_client_gives_no_finding(tmp_path, sources):
    write(tmp_path, {CLOCK_SOURCES: f"{sources}\n"})
    assert findings(clock, node(tmp_path, NEVER)) == []


def test_guest_with_failing_time_client_warns(tmp_path):
    write(tmp_path, {CLOCK_SOURCES: "tsc kvm-clock\n", "/etc/chrony.conf": "pool a\n"})
    assert codes(findings(clock, node(tmp_path, NEVER))) == ["clock/unsynchronised"]


def test_hardware_without_time_client_warns(tmp_path):
    write(tmp_path, {CLOCK_SOURCES: "tsc hpet acpi_pm\n"})
    assert codes(findings(clock, node(tmp_path, NEVER))) == ["clock/unsynchronised"]


def test_clock_reports_nothing_above_info_on_this_machine():
    assert [f for f in findings(clock, Host()) if f.severity > Severity.INFO] == []


@pytest.mark.parametrize(
    "config", [Config(max_offset_seconds=0.0), Config(max_error_seconds=-1.0), Config(max_error_seconds=16.0)]
)
def test_validate_rejects_limits_without_effect(config):
    assert "must be above 0" in (validate(config) or "")
    assert validate(Config()) is None


@given(st.booleans(), st.floats(-1e9, 1e9), st.floats(0, 1e4))
def test_finding_exists_exactly_if_reading_exceeds_limits(synchronised, offset, error):
    host = Host("/nonexistent", system=FakeSystem("/nonexistent", clock=KernelClock(synchronised, offset, error)))
    assert bool(findings(clock, host)) == (abs(offset) > 1 or error > 5)


# --- the clock source of the kernel


@pytest.mark.parametrize("source", ["hpet", "acpi_pm", "jiffies", "refined-jiffies"])
def test_slow_clock_source_warns(tmp_path, source):
    write(tmp_path, {CLOCK_SOURCE: f"{source}\n", CLOCK_SOURCES: "hpet acpi_pm\n"})  # tsc is no longer listed
    (finding,) = findings(clock, node(tmp_path))
    assert (finding.code, finding.severity, finding.clears) == ("clock/slow_source", Severity.WARNING, Clears.PASS)
    assert source in finding.message


@pytest.mark.parametrize(
    "source",
    ["tsc", "tsc-early", "kvm-clock", "xen", "hyperv_clocksource_tsc_page", "arch_sys_counter", "timebase"],
)
def test_usual_clock_sources_give_no_finding(tmp_path, source):
    write(tmp_path, {CLOCK_SOURCE: f"{source}\n"})
    assert findings(clock, node(tmp_path)) == []


@pytest.mark.parametrize("text", ["", "N/A", "Unknown", str(2**64), "tsc hpet", b"\xff\x00ELF"])
def test_garbled_clock_source_fails_run_and_hides_no_wrong_clock(tmp_path, text):
    write(tmp_path, {CLOCK_SOURCE: text})
    results, error = run_until_error(clock, node(tmp_path, KernelClock(True, 0.0, 9.0)))
    assert f"{CLOCK_SOURCE}: not a name" in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["clock/uncertain"]


def test_unreadable_clock_hides_no_slow_source(tmp_path):
    write(tmp_path, {CLOCK_SOURCE: "hpet\n"})
    results, error = run_until_error(clock, node(tmp_path, PermissionError(1, "Operation not permitted")))
    assert (codes(results), "not permitted" in error) == (["clock/slow_source"], True)


@given(st.text(max_size=12))
def test_any_clock_source_is_accepted_slow_or_fails_run(tmp_path_factory, text):
    host = write(tmp_path_factory.mktemp("n"), {CLOCK_SOURCE: text.encode("utf-8", "replace")})
    results, error = run_until_error(clock, host)
    assert codes(results) == (["clock/slow_source"] if text.strip() in SLOW_SOURCES else [])
    assert error == "" or "not a name" in error


# --- stories


def test_slow_source_warns_until_reboot_restores_tsc_and_never_drains(tmp_path):
    slow = node(tmp_path)
    write(tmp_path, {CLOCK_SOURCE: "hpet\n"})
    story = Story(clock).run_checks(slow, 300)
    assert (story.codes, story.drained) == (["clock/slow_source"], False)
    assert story.reboot().run_checks(slow, 3).codes == ["clock/slow_source"]
    write(tmp_path, {CLOCK_SOURCE: "tsc\n"})
    assert story.reboot().run_checks(node(tmp_path), 2).codes == []


def test_slow_start_of_chrony_after_boot_gives_no_warning(tmp_path):
    story = (
        Story(clock)
        .run_check(node(tmp_path))
        .reboot()
        .run_check(node(tmp_path, NEVER))
        .run_check(node(tmp_path, NEVER))
    )
    assert story.codes == []
    assert story.run_check(node(tmp_path)).codes == []


@pytest.mark.parametrize(
    ("reading", "code"),
    [
        (NEVER, "clock/unsynchronised"),
        (KernelClock(True, 2.0, 0.1), "clock/offset"),
        (KernelClock(True, 0.0, 9.0), "clock/uncertain"),
    ],
)
def test_wrong_clock_warns_until_it_is_right_and_never_drains(tmp_path, reading, code):
    story = Story(clock).run_checks(node(tmp_path, reading), 20)
    assert (story.codes, story.drained) == ([code], False)
    assert story.wait(600).run_check(node(tmp_path, reading)).codes == [code]
    assert story.run_checks(node(tmp_path), 2).codes == []
