"""ib_flap: ports whose link repeatedly goes down and returns."""

from __future__ import annotations

import errno

import pytest
from fakes import BOOT, NOW, codes, findings, observations_named, run_check, run_rounds, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import UnreadableTree, captured_files, write

from healthd.checks import ib_flap
from healthd.checks.ib_flap import Config, validate
from healthd.common.history import History, Series
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

IB = "/sys/class/infiniband"
DOWNED = IB + "/mlx5_0/ports/1/counters/link_downed"
LOST = IB + "/mlx5_0/device/net/ib0/carrier_down_count"
DAY = 86400.0


def make(root, downed=0, lost=0, up_for=10 * DAY, **more):
    """Create a node with one InfiniBand port and its interface. `more`: path -> text of other files."""
    files = {DOWNED: f"{downed}\n", LOST: f"{lost}\n", "/proc/uptime": f"{up_for:.2f} 12345.67\n", **more}
    return write(root, files)


def healthy(tmp_path):
    """A DGX H100, and a card with two ports whose interfaces differ by dev_port."""
    two = {f"{IB}/mlx4_0/ports/{port}/counters/link_downed": "0\n" for port in (1, 2)}
    for number, name in enumerate(("ib8", "ib9")):
        two[f"{IB}/mlx4_0/device/net/{name}/dev_port"] = f"{number}\n"
        two[f"{IB}/mlx4_0/device/net/{name}/carrier_down_count"] = "2\n"
    counters = {path: f"{text}\n" for path, text in captured_files("infiniband_h100_counters.tsv").items()}
    counters[f"{IB}/mlx5_1/ports/1/counters/link_downed"] = "0\n"  # at its maximum in the capture: an INFO finding
    return make(tmp_path, **counters, **two), Config()


ABSENT_IS_FINE = {
    "/proc/uptime": "a captured tree without it counts as up for a long time",
    r".*/link_downed": "drivers of virtual functions and older cards do not count this",
    r".*/(carrier_down_count|dev_port)": "Linux before 4.16 and 3.15 do not tell it",
    r".*/device/net": "InfiniBand without IPoIB has no network interface",
    r"/sys/class/infiniband(/[^/]+/ports)?": "a machine without InfiniBand; ib_link judges whether a port is there",
}


@pytest.fixture
def findings_after(tmp_path):
    """Return a function that gives the findings of the last of several rounds with these nodes."""

    def run_steps(*steps, config=None, interval=300.0):
        hosts = [make(tmp_path / str(number), **step) for number, step in enumerate(steps)]
        return [item for item in run_rounds(ib_flap, hosts, config, interval) if isinstance(item, Finding)]

    return run_steps


def test_ports_that_stay_up_give_counters_and_no_finding(tmp_path):
    results = run_check(ib_flap, healthy(tmp_path)[0])
    assert [item for item in results if isinstance(item, Finding)] == []
    assert len(list(observations_named(results, "ib_link_downed_total"))) == 9 + 2
    assert [item.value for item in observations_named(results, "ib_carrier_lost_total")] == [2, 2, 0]


def test_counts_from_before_healthd_started_give_no_finding(node, findings_after):
    assert findings(ib_flap, node(downed=200, lost=5000)) == []
    assert findings_after({"downed": 200}, {"downed": 200}) == []


def test_three_link_losses_in_three_hours_are_degraded(findings_after):
    assert findings_after({}, {"downed": 2}) == []
    (finding,) = findings_after({}, {"downed": 1}, {"downed": 2}, {"downed": 3})
    assert (finding.code, finding.subject, finding.severity) == ("ib_flap/link_downed", "mlx5_0/1", Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds, finding.shared_cause) == (Clears.OPERATOR, DAY, True)
    assert "3 times within 3.0 h" in finding.message


def test_three_link_losses_over_longer_time_give_no_finding(findings_after):
    assert findings_after({}, {"downed": 1}, {"downed": 2}, {"downed": 3}, interval=1.5 * 3600) == []


def test_five_lost_carriers_in_a_day_are_a_finding(findings_after):
    steps = [{"lost": number} for number in range(6)]
    assert codes(findings_after(*steps, interval=4 * 3600)) == ["ib_flap/carrier_lost"]
    assert findings_after(*steps, interval=6 * 3600) == []
    assert findings_after(*steps[:-1]) == []


def test_limits_are_settings(findings_after):
    assert codes(findings_after({}, {"downed": 1}, config=Config(links_downed=1))) == ["ib_flap/link_downed"]
    assert codes(findings_after({}, {"lost": 1}, config=Config(carriers_lost=1))) == ["ib_flap/carrier_lost"]
    assert findings_after({}, {"downed": 2}, {"downed": 3}, config=Config(links_downed_window_seconds=200.0)) == []


def test_link_training_after_boot_does_not_count(findings_after):
    assert findings_after({"up_for": 900}, {"downed": 9, "lost": 9, "up_for": 1200}) == []
    training = [{"downed": 9, "lost": 9, "up_for": 1500}, {"downed": 10, "lost": 10, "up_for": 2100}]
    assert findings_after({"up_for": 900}, *training, interval=600) == []


def test_growth_after_training_counts(findings_after):
    steps = [{"up_for": 1200}, {"downed": 1, "up_for": 2100}, {"downed": 3, "up_for": 3000}]
    assert codes(findings_after(*steps, interval=900)) == ["ib_flap/link_downed"]


def test_flaps_before_boot_do_not_count_after_it(node):
    name = "ib_link_downed_total{port=mlx5_0/1}"
    store = {name: Series(4.0, NOW - 300, BOOT, ((NOW - 4000, 4.0),))}
    assert findings(ib_flap, node(downed=5, up_for=3600.0), None, History(store, NOW, BOOT)) == []
    assert codes(findings(ib_flap, node(downed=5), None, History(store, NOW, BOOT))) == ["ib_flap/link_downed"]


def test_reset_counter_is_no_wraparound(findings_after):
    assert findings_after({"downed": 230}, {"downed": 0}) == []
    assert findings_after({"downed": 230}, {"downed": 2}) == []


def test_counter_at_maximum_is_reported_and_growth_to_it_counts(findings_after):
    (finding,) = findings_after({"downed": 255}, {"downed": 255})
    assert (finding.code, finding.severity) == ("ib_flap/counter_full", Severity.INFO)
    assert codes(findings_after({"downed": 250}, {"downed": 255})) == ["ib_flap/counter_full", "ib_flap/link_downed"]
    assert codes(findings_after({"downed": 255}, {"downed": 255, "lost": 5})) == [
        "ib_flap/counter_full",
        "ib_flap/carrier_lost",
    ]


def test_counters_of_dgx_h100_give_nothing_above_info(tmp_path):
    files = {"/proc/uptime": "90000.00 1.00\n", **captured_files("infiniband_h100_counters.tsv")}
    (finding,) = findings(ib_flap, write(tmp_path, files))
    assert (finding.code, finding.subject, finding.severity) == ("ib_flap/counter_full", "mlx5_1/1", Severity.INFO)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_unsupported_counters_give_nothing(tmp_path, number):
    make(tmp_path)
    host = Host(str(tmp_path), system=UnreadableTree(tmp_path, {DOWNED: number, LOST: number}))
    assert run_check(ib_flap, host) == []


def test_no_pma_text_of_kernel_means_unsupported(node):
    assert findings(ib_flap, node(**{DOWNED: "N/A (no PMA)\n"})) == []


def test_lost_carriers_count_without_link_counter(findings_after):
    without = {DOWNED: "N/A (no PMA)\n"}
    assert codes(findings_after(without, {**without, "lost": 5})) == ["ib_flap/carrier_lost"]


def test_counter_that_becomes_unreadable_fails_run(tmp_path):
    make(tmp_path)
    host = Host(str(tmp_path), system=UnreadableTree(tmp_path, {DOWNED: errno.EINVAL}))
    store = {"ib_link_downed_total{port=mlx5_0/1}": Series(0.0, NOW - 300, BOOT)}
    with pytest.raises(ValueError, match="mlx5_0/1: ib_link_downed_total can no longer be read"):
        run_check(ib_flap, host, None, History(store, NOW, BOOT))


def test_unreadable_port_fails_run_and_hides_no_other_finding(tmp_path):
    make(tmp_path, **{f"{IB}/mlx5_1/ports/1/counters/link_downed": "255\n"})
    host = Host(str(tmp_path), system=UnreadableTree(tmp_path, {DOWNED: errno.EIO}))
    results, error = run_until_error(ib_flap, host)
    assert error.startswith("mlx5_0/1: ")
    assert codes([item for item in results if isinstance(item, Finding)]) == ["ib_flap/counter_full"]


@pytest.mark.parametrize("text", ["", "up", "12 345", "-3.00 4.00", "N/A"])
def test_garbled_uptime_fails_run(node, text):
    assert "/proc/uptime" in run_until_error(ib_flap, node(**{"/proc/uptime": text}))[1]


def test_uptime_is_not_read_without_infiniband(tmp_path):
    assert run_check(ib_flap, Host(str(tmp_path))) == []


def test_listed_port_is_evaluated(findings_after):
    config = Config(ports=("mlx5_0/1",))
    assert codes(findings_after({}, {"downed": 3}, config=config)) == ["ib_flap/link_downed"]


def test_missing_listed_port_fails_run(node):
    results, error = run_until_error(ib_flap, node(), Config(ports=("mlx5_9/1",)))
    assert (results, error) == ([], "mlx5_9/1: no such port")


def test_first_interface_of_port_is_used(tmp_path):
    net = f"{IB}/mlx5_0/device/net"
    files = {f"{net}/ib0/dev_port": "0\n"}
    for name in ("ib0.8001", "ib0pf0vf0"):
        files |= {f"{net}/{name}/dev_port": "0\n", f"{net}/{name}/carrier_down_count": "77\n"}
    results = run_check(ib_flap, make(tmp_path, lost=3, **files))
    assert [item.value for item in observations_named(results, "ib_carrier_lost_total")] == [3]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (Config(ports=("mlx5_0",)), 'as in "mlx5_0/1"'),
        (Config(links_downed=0), "at least 1"),
        (Config(carriers_lost=0), "at least 1"),
    ],
)
def test_validate_rejects_invalid_settings(config, error):
    assert error in (validate(config) or "")
    assert validate(Config(ports=("mlx5_0/1",))) is None


@pytest.mark.parametrize(("file", "code"), [("downed", "link_downed"), ("lost", "carrier_lost")])
def test_flapping_port_drains_until_repaired_without_load(node, file, code):
    story = Story(ib_flap).run_check(node(**{file: 0}))
    for number in range(1, 6):
        story.run_check(node(**{file: number}))
    assert (story.codes, story.drained, story.requeued) == ([f"ib_flap/{code}"], True, False)
    story.run_checks(node(**{file: 5}), 2 * 288)
    assert story.drained  # two days without load prove nothing
    story.repaired(f"ib_flap/{code}").run_check(node(**{file: 5}))
    assert (story.codes, story.drained) == ([], False)


def test_clean_day_after_reboot_clears_flapping(node):
    story = Story(ib_flap).run_check(node()).run_check(node(downed=3))
    assert story.drained
    story.reboot()
    for number in range(280):
        story.run_check(node(up_for=300.0 * (number + 1)))
    assert story.drained
    story.run_checks(node(), 12)
    assert (story.codes, story.drained) == ([], False)


def test_leaf_switch_reboot_does_not_drain(node):
    story = Story(ib_flap).run_check(node()).run_check(node(downed=1, lost=1)).run_checks(node(downed=2, lost=2), 2)
    assert (story.codes, story.drained) == ([], False)


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(path=st.sampled_from([DOWNED, LOST]), content=st.binary(max_size=24))
def test_counter_is_read_exactly_or_run_fails(tmp_path, path, content):
    host = make(tmp_path, **{path: content})
    results, error = run_until_error(ib_flap, host)
    text = content.strip()
    if error:
        assert "not a count" in error
    else:
        assert text == b"N/A (no PMA)" or float(int(text)) in [getattr(item, "value", None) for item in results]


def test_flaps_before_repair_do_not_count(node):
    """After a cable was replaced, one more link loss within three hours: the switch rebooted."""
    story = Story(ib_flap).run_check(node()).run_check(node(downed=4)).repaired("ib_flap/link_downed")
    story.run_check(node(downed=4)).run_check(node(downed=5))
    assert (story.codes, story.drained) == ([], False)
    story.run_check(node(downed=7))
    assert (story.codes, story.drained) == (["ib_flap/link_downed"], True)
