"""gpu_clocks: clock slowdowns by the hardware, from the driver's counters or from the bits of each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observations_named, run_check, scenarios
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story

from healthd.agent.conditions.ledger import Ledger
from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.fleet_limit import PartitionCount, backoff, has_room, is_own_hardware, must_wait
from healthd.checks import gpu_clocks
from healthd.checks.gpu_clocks import Config, validate
from healthd.common.history import History
from healthd.common.model import Clears, Condition, Finding, Severity
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
SLOWDOWN, THERMAL, BRAKE = 0x8, 0x48, 0x88
# A driver before 580, which does not count the seconds of slowdown.
OLD = "".join(f"[gpu.{n}]\nunsupported_fields = [270, 271]\n" for n in range(8) if n != 3)
OLD += "[gpu.3]\nunsupported_fields = [270, 271]\n"


@pytest.fixture
def story(host):
    return ClockStory(host)


healthy = healthy_gpus(Config())


class ClockStory(Story):
    """A story of GPU 3: its clock event bits, and the seconds of slowdown since the previous run."""

    def __init__(self, host: Callable[..., Host], profile: str = "dgx-h100") -> None:
        super().__init__(gpu_clocks)
        self.make = host
        self.profile = profile
        self.seconds = 0.0

    def sees(
        self, bits: int = 0, seconds: float | None = None, minutes: float = 5.0, text: str = "", **more: Any
    ) -> ClockStory:
        """Run the check once. Without `seconds` the driver does not count them."""
        self.seconds += seconds or 0.0
        head = OLD if seconds is None else f"[gpu.3]\nslowdown_hw_thermal_seconds = {self.seconds}\n"
        host = self.make(f"{head}clock_event_reasons = {bits}\n{text}", profile=self.profile)
        host.now = lambda: self.now
        self.run_check(host, minutes)
        return self

    def well(self, hours: float, counted: bool = True) -> ClockStory:
        for _ in range(int(hours * 12)):
            self.sees(0x1, 0.0 if counted else None)
        return self

    def reboot(self) -> ClockStory:
        self.seconds = 0.0
        super().reboot()
        return self


def test_healthy_machine_gives_no_finding(host):
    results = run_check(gpu_clocks, host())
    assert [item.value for item in observations_named(results, "gpu_clock_event_reasons")] == [1] * 8
    assert len([*observations_named(results, "gpu_clock_slowdown_seconds_total")]) == 16
    assert findings(gpu_clocks, host()) == []


@pytest.mark.parametrize("bits", [0x0, 0x1, 0x2, 0x4, 0x10, 0x20, 0x100, 0x200, 0x400, 0x737])
def test_idle_application_clocks_power_cap_and_software_are_normal(host, story, bits):
    assert findings(gpu_clocks, host(f"gpu.3.clock_event_reasons = {bits}")) == []
    for _ in range(20):
        story.sees(bits)
    assert story.codes == []


@pytest.mark.parametrize(
    ("bits", "reason"),
    [(SLOWDOWN, "no reason reported"), (THERMAL, "too hot"), (BRAKE, "power brake of the power supply")],
)
def test_single_slowdown_warns_with_its_reason(host, bits, reason):
    for text in (f"gpu.3.clock_event_reasons = {bits}", f"{OLD}clock_event_reasons = {bits}"):
        (finding,) = findings(gpu_clocks, host(text))
        assert (finding.code, finding.subject) == ("gpu_clocks/slowed_briefly", PCI)
        assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.WARNING, Clears.WINDOW, 21600.0)
        assert f"({reason})" in finding.message
        assert finding.relapse_seconds == 0


def test_unsupported_queries_give_nothing(host):
    text = "".join(
        f"[gpu.{n}]\nunsupported_fields = [270, 271]\n"
        'unsupported = ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]\n'
        for n in range(8)
    )
    assert run_check(gpu_clocks, host(text)) == []


def test_counted_seconds_are_enough_without_bits(story):
    text = 'unsupported = ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]\n'
    story.sees(0, 0.0, text=text).sees(0, 300.0, text=text)
    assert story.codes == ["gpu_clocks/slowed_briefly"]
    assert "gpu_clocks/slowed" in story.sees(0, 300.0, text=text).codes


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_clocks, Host(str(tmp_path))) == []


def test_failing_gpu_hides_no_other_finding(host):
    text = 'gpu.3.clock_event_reasons = 8\n[gpu.2.errors]\nnvmlDeviceGetCurrentClocksEventReasons = "Unknown"\n'
    results: list[Any] = []
    with pytest.raises(NvmlError):
        results.extend(gpu_clocks.run(host(text), Config(), History({}, NOW, BOOT)))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_clocks/slowed_briefly"]


# --- 60 % of ten minutes


def test_slow_for_60_percent_of_ten_minutes_is_degraded_and_less_warns(story):
    story.sees(THERMAL, 0.0).sees(THERMAL, 150.0).sees(THERMAL, 209.0)
    assert story.codes == ["gpu_clocks/slowed_briefly"]
    story.sees(THERMAL, 151.0)
    assert story.codes == ["gpu_clocks/slowed", "gpu_clocks/slowed_briefly"]
    assert "for 6 of the last 10 minutes" in next(f.message for f in story.result.findings)


def test_five_slow_minutes_of_ten_only_warn(story):
    assert story.sees(0, 0.0).sees(0, 300.0).codes == ["gpu_clocks/slowed_briefly"]


@pytest.mark.parametrize("minutes", [1.0, 2.0, 4.0, 5.0, 7.0, 10.0])
def test_constantly_slow_gpu_is_degraded_within_15_minutes_at_any_interval(story, minutes):
    story.sees(THERMAL, 0.0)
    while not story.drained:
        story.sees(THERMAL, minutes * 60, minutes=minutes)
        assert story.now - story.conditions["gpu_clocks/slowed_briefly", PCI].first_seen <= 15 * 60


@pytest.mark.one_python
@pytest.mark.parametrize("minutes", [1.0, 2.0, 4.0, 5.0, 7.0, 10.0])
@pytest.mark.parametrize("counted", [True, False])
def test_gpu_slow_half_of_the_time_never_drains_at_any_interval(story, minutes, counted):
    for number in range(60):
        story.sees(THERMAL if number % 2 else 0, minutes * 30 if counted else None, minutes=minutes)
    assert story.codes == ["gpu_clocks/slowed_briefly"]


def test_hourly_runs_use_share_of_the_hour(story):
    """On a node without persistence, runs are an hour apart. A slow share of 60 % proves ten minutes with 60 %, 59 %
    does not."""
    assert story.sees(0, 0.0, minutes=60).sees(0, 0.59 * 3600, minutes=60).codes == ["gpu_clocks/slowed_briefly"]
    assert "gpu_clocks/slowed" in story.sees(0, 0.6 * 3600, minutes=60).codes


def test_slowdown_before_long_gap_does_not_count_for_later_minutes(story):
    """healthd was stopped for a day with half an hour of slowdown. That is little, then and in the next rounds."""
    story.sees(0, 0.0).sees(0, 1800.0, minutes=24 * 60)
    for _ in range(3):
        story.sees(0, 60.0)
    assert story.codes == ["gpu_clocks/slowed_briefly"]


def test_runs_within_seconds_do_not_degrade(story):
    story.sees(0, 0.0)
    for _ in range(20):
        story.sees(THERMAL, 3.0, minutes=0.05)
    assert story.codes == ["gpu_clocks/slowed_briefly"]


def test_hot_run_after_boot_does_not_continue_earlier_slowdown(story):
    hot(story).wait(4)
    story.ledger = Ledger(boot_id=story.boot_id + "'")
    assert story.sees(THERMAL, 0.0, minutes=0.1).codes == ["gpu_clocks/slowed_briefly"]


# --- drivers without counters


def test_two_slow_runs_cover_time_between_them_without_counters(story):
    story.sees(0)
    assert story.sees(SLOWDOWN).codes == ["gpu_clocks/slowed_briefly"]  # one slow run
    assert story.sees(0x1).codes == ["gpu_clocks/slowed_briefly"]
    assert story.sees(SLOWDOWN).codes == ["gpu_clocks/slowed_briefly"]
    assert story.sees(SLOWDOWN).codes == ["gpu_clocks/slowed", "gpu_clocks/slowed_briefly"]
    assert story.drained


def test_hourly_slow_runs_do_not_cover_time_between_them(story):
    for _ in range(20):
        story.sees(THERMAL, minutes=60)
    assert story.codes == ["gpu_clocks/slowed_briefly"]
    assert not story.drained


def test_missed_run_counts_neither_as_slow_nor_as_normal(story):
    story.sees(THERMAL).sees(THERMAL, minutes=10)
    assert "gpu_clocks/slowed" in story.codes  # one round failed, and the runs before and after were slow
    later_story = ClockStory(story.make).sees(THERMAL).sees(THERMAL, minutes=15)
    assert later_story.codes == ["gpu_clocks/slowed_briefly"]
    assert "gpu_clocks/slowed" in later_story.sees(THERMAL).sees(THERMAL).codes


def test_counted_slowdown_is_not_counted_again_from_bits(story):
    """Each round has ten seconds of heat, and each run coincides with them."""
    for _ in range(20):
        story.sees(THERMAL, 10.0)
    assert story.codes == ["gpu_clocks/slowed_briefly"]
    for _ in range(3):
        story.sees(SLOWDOWN, 0.0)  # the driver's counters do not include this bit alone
    assert "gpu_clocks/slowed" in story.codes


def test_counter_reset_by_driver_reload_is_no_slowdown(story):
    story.sees(0, 5000.0)
    story.seconds = 0.0
    assert story.sees(0, 0.0).codes == []


# --- stories


def hot(story: ClockStory) -> ClockStory:
    return story.sees(THERMAL, 0.0).sees(THERMAL, 300.0).sees(THERMAL, 300.0)


def braked(story: ClockStory) -> ClockStory:
    return story.sees(BRAKE).sees(BRAKE).sees(BRAKE)


def weak(story: ClockStory) -> ClockStory:
    return story.sees(SLOWDOWN).sees(SLOWDOWN).sees(SLOWDOWN)


@pytest.mark.parametrize("event", [hot, braked])
def test_heat_or_power_event_drains_until_it_is_over_each_time(story, event):
    """Operators do not reboot a rack of nodes, or report each one as repaired, after a power event."""
    for _ in range(3):
        event(story)
        assert (story.drained, story.requeued) == (True, False)
        story.well(hours=1 / 12)
        assert story.drained, "the ten minutes are not over"
        story.well(hours=0.5)
        assert not story.drained


def test_power_brake_keeps_idle_node_drained(story):
    braked(story)
    for _ in range(100):
        assert story.sees(BRAKE).drained


def test_slowdown_without_reason_needs_repair_and_six_clean_hours(story):
    weak(story)
    assert (story.drained, story.requeued) == (True, False)
    story.well(hours=24)  # without load and heat this proves nothing
    assert story.drained
    story.reboot()
    story.well(hours=5)
    assert story.drained
    story.well(hours=1.2)
    assert (story.drained, story.codes) == (False, [])


def slowed(story: ClockStory) -> Condition:
    return story.conditions["gpu_clocks/slowed", PCI]


@pytest.mark.parametrize(("bits", "shared"), [(THERMAL, True), (BRAKE, True), (SLOWDOWN, False)])
def test_only_heat_and_brake_may_have_a_shared_cause(story, bits, shared):
    for _ in range(3):
        story.sees(bits)
    assert (slowed(story).severity, slowed(story).shared_cause) == (Severity.DEGRADED, shared)
    assert is_own_hardware([slowed(story)]) is not shared


def test_slowdown_left_by_brake_is_own_hardware(story):
    for _ in range(3):
        story.sees(BRAKE)
    assert slowed(story).shared_cause
    assert not slowed(story.sees(SLOWDOWN)).shared_cause


def test_power_event_on_many_nodes_is_held_by_fleet_limit(story):
    """A brake on a GPU of each of 288 nodes in one partition: 28 nodes may be drained, the others wait."""
    for _ in range(3):
        story.sees(BRAKE)
    limits, own = FleetLimits(), is_own_hardware([slowed(story)])
    drained = [has_room(PartitionCount("gpu", 288, drained_count), limits, own) for drained_count in range(40)]
    assert drained == [True] * 28 + [False] * 12
    hold = backoff(None, PartitionCount("gpu", 288, 28), limits, own, "n1", story.now)
    assert must_wait(hold, own, story.now)


def test_second_slowdown_without_reason_within_a_day_needs_operator(story):
    weak(story).reboot()
    story.well(hours=7)
    assert not story.drained
    weak(story)
    assert (story.drained, story.requeued) == (True, False)
    assert story.conditions["gpu_clocks/slowed", PCI].clears is Clears.OPERATOR
    story.reboot()
    story.well(hours=48)
    assert story.drained
    story.repaired("gpu_clocks/slowed", PCI)
    story.well(hours=1)
    assert not story.drained


def test_second_slowdown_after_more_than_a_day_is_like_the_first(story):
    weak(story).reboot()
    story.well(hours=7 + 25)
    weak(story)
    assert story.conditions["gpu_clocks/slowed", PCI].clears is Clears.WINDOW


def test_brief_slowdown_never_drains_and_clears_after_six_clean_hours(story):
    story.sees(BRAKE, 0.0).sees(0, 0.0).sees(BRAKE, 0.0)
    assert not story.drained
    story.well(hours=5.8)
    assert story.codes == ["gpu_clocks/slowed_briefly"]
    story.well(hours=0.5)
    assert story.codes == []


@settings(max_examples=40, suppress_health_check=also(HealthCheck.function_scoped_fixture), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(0, 1e6), st.floats(0, 90)), min_size=1, max_size=6))
def test_counted_time_never_exceeds_elapsed_time(tmp_path, readings):
    story = ClockStory(scenarios(tmp_path))
    for bits, seconds, minutes in readings:
        story.sees(bits, seconds, minutes=minutes)
    (slowed,) = (
        each.value for key, each in story.history_series.items() if key.startswith("gpu_clock_slowed") and PCI in key
    )
    assert 0 <= slowed <= sum(minutes * 60 for _, _, minutes in readings[1:]) + 1e-3


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (Config(slowed_share=0.0), "slowed_share"),
        (Config(slowed_share=1.1), "slowed_share"),
        (Config(within_seconds=0.0), "within_seconds"),
        (Config(), ""),
    ],
)
def test_validate_rejects_invalid_settings(config, setting):
    assert (validate(config) or "").partition(":")[0] == setting
