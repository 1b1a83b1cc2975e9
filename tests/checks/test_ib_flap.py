"""ib_flap: ports whose link repeatedly goes down and returns."""

from __future__ import annotations

import errno

import pytest
from fakes import BOOT, NOW, codes, findings, observed, rounds, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import Refusing, flat, write

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
    counters = {path: f"{text}\n" for path, text in flat("infiniband_h100_counters.tsv").items()}
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
def after(tmp_path):
    """Return a function that gives the findings of the last of several rounds with these nodes."""

    def look(*steps, config=None, apart=300.0):
        hosts = [make(tmp_path / str(number), **step) for number, step in enumerate(steps)]
        return [item for item in rounds(ib_flap, hosts, config, apart) if isinstance(item, Finding)]

    return look


def test_ports_that_stay_up_give_their_counters_and_no_finding(tmp_path):
    given = run_check(ib_flap, healthy(tmp_path)[0])
    assert [item for item in given if isinstance(item, Finding)] == []
    assert len(list(observed(given, "ib_link_downed_total"))) == 9 + 2
    assert [item.value for item in observed(given, "ib_carrier_lost_total")] == [2, 2, 0]


def test_what_was_counted_before_healthd_looked_is_no_news(node, after):
    assert findings(ib_flap, node(downed=200, lost=5000)) == []
    assert after({"downed": 200}, {"downed": 200}) == []


def test_three_times_in_three_hours_are_a_fault_for_an_operator_or_a_clean_day(after):
    assert after({}, {"downed": 2}) == []
    (finding,) = after({}, {"downed": 1}, {"downed": 2}, {"downed": 3})
    assert (finding.code, finding.subject, finding.severity) == ("ib_flap/link_downed", "mlx5_0/1", Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds, finding.shared_cause) == (Clears.OPERATOR, DAY, True)
    assert "3 times within 3.0 h" in finding.message


def test_three_times_in_a_longer_time_are_none(after):
    assert after({}, {"downed": 1}, {"downed": 2}, {"downed": 3}, apart=1.5 * 3600) == []


def test_five_lost_carriers_in_a_day_are_a_fault(after):
    steps = [{"lost": number} for number in range(6)]
    assert codes(after(*steps, apart=4 * 3600)) == ["ib_flap/carrier_lost"]
    assert after(*steps, apart=6 * 3600) == []
    assert after(*steps[:-1]) == []


def test_the_numbers_are_settings(after):
    assert codes(after({}, {"downed": 1}, config=Config(links_downed=1))) == ["ib_flap/link_downed"]
    assert codes(after({}, {"lost": 1}, config=Config(carriers_lost=1))) == ["ib_flap/carrier_lost"]
    assert after({}, {"downed": 2}, {"downed": 3}, config=Config(links_downed_window_seconds=200.0)) == []


def test_nothing_counts_while_links_train_after_a_boot(after):
    assert after({"up_for": 900}, {"downed": 9, "lost": 9, "up_for": 1200}) == []
    training = [{"downed": 9, "lost": 9, "up_for": 1500}, {"downed": 10, "lost": 10, "up_for": 2100}]
    assert after({"up_for": 900}, *training, apart=600) == []


def test_growth_after_that_time_counts(after):
    steps = [{"up_for": 1200}, {"downed": 1, "up_for": 2100}, {"downed": 3, "up_for": 3000}]
    assert codes(after(*steps, apart=900)) == ["ib_flap/link_downed"]


def test_flaps_from_before_a_boot_do_not_count_after_it(node):
    name = "ib_link_downed_total{port=mlx5_0/1}"
    store = {name: Series(4.0, NOW - 300, BOOT, ((NOW - 4000, 4.0),))}
    assert findings(ib_flap, node(downed=5, up_for=3600.0), None, History(store, NOW, BOOT)) == []
    assert codes(findings(ib_flap, node(downed=5), None, History(store, NOW, BOOT))) == ["ib_flap/link_downed"]


def test_a_counter_that_somebody_reset_did_not_go_round(after):
    assert after({"downed": 230}, {"downed": 0}) == []
    assert after({"downed": 230}, {"downed": 2}) == []


def test_a_counter_at_its_end_is_told_and_what_it_still_counted_is_judged(after):
    (finding,) = after({"downed": 255}, {"downed": 255})
    assert (finding.code, finding.severity) == ("ib_flap/counter_full", Severity.INFO)
    assert codes(after({"downed": 250}, {"downed": 255})) == ["ib_flap/counter_full", "ib_flap/link_downed"]
    assert codes(after({"downed": 255}, {"downed": 255, "lost": 5})) == ["ib_flap/counter_full", "ib_flap/carrier_lost"]


def test_the_counters_of_a_dgx_h100_give_nothing_above_info(tmp_path):
    files = {"/proc/uptime": "90000.00 1.00\n", **flat("infiniband_h100_counters.tsv")}
    (finding,) = findings(ib_flap, write(tmp_path, files))
    assert (finding.code, finding.subject, finding.severity) == ("ib_flap/counter_full", "mlx5_1/1", Severity.INFO)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_driver_that_does_not_tell_is_not_judged(tmp_path, number):
    make(tmp_path)
    host = Host(str(tmp_path), system=Refusing(tmp_path, {DOWNED: number, LOST: number}))
    assert run_check(ib_flap, host) == []


def test_a_kernel_that_says_so_in_words_is_not_judged(node):
    assert findings(ib_flap, node(**{DOWNED: "N/A (no PMA)\n"})) == []


def test_ib_flap_counts_lost_carriers_where_the_driver_has_no_link_counter(after):
    without = {DOWNED: "N/A (no PMA)\n"}
    assert codes(after(without, {**without, "lost": 5})) == ["ib_flap/carrier_lost"]


def test_a_counter_that_is_not_told_any_more_is_unknown(tmp_path):
    make(tmp_path)
    host = Host(str(tmp_path), system=Refusing(tmp_path, {DOWNED: errno.EINVAL}))
    store = {"ib_link_downed_total{port=mlx5_0/1}": Series(0.0, NOW - 300, BOOT)}
    with pytest.raises(ValueError, match="mlx5_0/1: ib_link_downed_total cannot be read any more"):
        run_check(ib_flap, host, None, History(store, NOW, BOOT))


def test_a_port_that_cannot_be_read_is_unknown_and_hides_no_other(tmp_path):
    make(tmp_path, **{f"{IB}/mlx5_1/ports/1/counters/link_downed": "255\n"})
    host = Host(str(tmp_path), system=Refusing(tmp_path, {DOWNED: errno.EIO}))
    given, error = until_it_fails(ib_flap, host)
    assert error.startswith("mlx5_0/1: ")
    assert codes([item for item in given if isinstance(item, Finding)]) == ["ib_flap/counter_full"]


@pytest.mark.parametrize("text", ["", "up", "12 345", "-3.00 4.00", "N/A"])
def test_nothing_is_judged_where_the_time_since_boot_is_not_known(node, text):
    assert "/proc/uptime" in until_it_fails(ib_flap, node(**{"/proc/uptime": text}))[1]


def test_a_machine_without_infiniband_is_not_asked_for_its_uptime(tmp_path):
    assert run_check(ib_flap, Host(str(tmp_path))) == []


def test_only_the_ports_that_the_site_lists_are_judged(after):
    there = Config(ports=("mlx5_0/1",))
    assert codes(after({}, {"downed": 3}, config=there)) == ["ib_flap/link_downed"]


def test_a_listed_port_that_is_not_there_is_unknown(node):
    given, error = until_it_fails(ib_flap, node(), Config(ports=("mlx5_9/1",)))
    assert (given, error) == ([], "mlx5_9/1: no such port")


def test_of_several_interfaces_of_a_port_the_first_is_its_own(tmp_path):
    net = f"{IB}/mlx5_0/device/net"
    files = {f"{net}/ib0/dev_port": "0\n"}
    for name in ("ib0.8001", "ib0pf0vf0"):
        files |= {f"{net}/{name}/dev_port": "0\n", f"{net}/{name}/carrier_down_count": "77\n"}
    given = run_check(ib_flap, make(tmp_path, lost=3, **files))
    assert [item.value for item in observed(given, "ib_carrier_lost_total")] == [3]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(ports=("mlx5_0",)), 'as in "mlx5_0/1"'),
        (Config(links_downed=0), "at least 1"),
        (Config(carriers_lost=0), "at least 1"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(config, said):
    assert said in (validate(config) or "")
    assert validate(Config(ports=("mlx5_0/1",))) is None


@pytest.mark.parametrize(("file", "code"), [("downed", "link_downed"), ("lost", "carrier_lost")])
def test_a_flapping_port_drains_and_only_an_operator_ends_it_while_there_is_no_load(node, file, code):
    life = Story(ib_flap).look(node(**{file: 0}))
    for number in range(1, 6):
        life.look(node(**{file: number}))
    assert (life.codes, life.drained, life.requeued) == ([f"ib_flap/{code}"], True, False)
    life.looks(node(**{file: 5}), 2 * 288)
    assert life.drained  # two days without load prove nothing
    life.repaired(f"ib_flap/{code}").look(node(**{file: 5}))
    assert (life.codes, life.drained) == ([], False)


def test_after_a_reboot_a_clean_day_ends_it_too(node):
    life = Story(ib_flap).look(node()).look(node(downed=3))
    assert life.drained
    life.reboot()
    for number in range(280):
        life.look(node(up_for=300.0 * (number + 1)))
    assert life.drained
    life.looks(node(), 12)
    assert (life.codes, life.drained) == ([], False)


def test_a_leaf_switch_that_reboots_drains_nothing(node):
    life = Story(ib_flap).look(node()).look(node(downed=1, lost=1)).looks(node(downed=2, lost=2), 2)
    assert (life.codes, life.drained) == ([], False)


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(path=st.sampled_from([DOWNED, LOST]), content=st.binary(max_size=24))
def test_a_counter_is_read_exactly_or_the_run_fails(tmp_path, path, content):
    host = make(tmp_path, **{path: content})
    given, error = until_it_fails(ib_flap, host)
    text = content.strip()
    if error:
        assert "not a count" in error
    else:
        assert text == b"N/A (no PMA)" or float(int(text)) in [getattr(item, "value", None) for item in given]


def test_after_a_repair_what_was_before_it_does_not_count(node):
    """After a cable was replaced, one more link loss within three hours: the switch rebooted."""
    life = Story(ib_flap).look(node()).look(node(downed=4)).repaired("ib_flap/link_downed")
    life.look(node(downed=4)).look(node(downed=5))
    assert (life.codes, life.drained) == ([], False)
    life.look(node(downed=7))
    assert (life.codes, life.drained) == (["ib_flap/link_downed"], True)
