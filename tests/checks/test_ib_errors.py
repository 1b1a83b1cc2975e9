"""ib_errors: error counters of InfiniBand ports."""

from __future__ import annotations

import errno

import pytest
from fakes import BOOT, NOW, codes, findings, observed, rounds, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import Refusing, flat, write

from healthd.checks import ib_errors
from healthd.checks.ib_errors import COUNTER_LIMITS, TRANSPORT_COUNTERS, Config, validate
from healthd.common.history import KEEP_SECONDS, History, Series, update
from healthd.common.model import Clears, Finding, Observation, Severity
from healthd.host.host import Host

IB = "/sys/class/infiniband"
STATE = IB + "/mlx5_0/ports/1/state"


def file(counter):
    folder = "hw_counters" if counter in TRANSPORT_COUNTERS else "counters"
    return f"{IB}/mlx5_0/ports/1/{folder}/{counter}"


def make(root, state="4: ACTIVE", up_seconds=864000, **counts):
    """Create a node with one port. Its counters are 0 except for `counts`."""
    counters = {
        file(each): f"{counts.get(each, 0)}\n" for each in (*COUNTER_LIMITS, *TRANSPORT_COUNTERS, "link_downed")
    }
    return write(root, {STATE: f"{state}\n", "/proc/uptime": f"{up_seconds}.00 1.00\n", **counters})


def healthy(tmp_path):
    counters = {path: f"{text}\n" for path, text in flat("infiniband_h100_counters.tsv").items()}
    for path in counters:
        if path.endswith("excessive_buffer_overrun_errors"):
            counters[path] = "3\n"  # at their maximum in the capture: an INFO finding
    return write(tmp_path, counters), Config()


ABSENT_IS_FINE = {
    r".*/(hw_)?counters/.*": "drivers of virtual functions and older cards do not count everything",
    r"/sys/class/infiniband(/[^/]+/ports)?": "a machine without InfiniBand; ib_link judges whether a port is there",
}


@pytest.fixture
def after(tmp_path):
    """Return a function that gives the findings of the last of several rounds with these counts."""

    def look(*steps, config=None, apart=300.0, state="4: ACTIVE"):
        hosts = [make(tmp_path / str(number), **{"state": state, **step}) for number, step in enumerate(steps)]
        return [item for item in rounds(ib_errors, hosts, config, apart) if isinstance(item, Finding)]

    return look


def test_counters_that_stand_still_give_no_finding(tmp_path):
    given = run_check(ib_errors, healthy(tmp_path)[0])
    assert [item for item in given if isinstance(item, Finding)] == []
    assert len(list(observed(given, "ib_errors_total"))) == 9 * 7


def test_the_counters_of_a_dgx_h100_give_nothing_above_info(tmp_path):
    found = findings(ib_errors, write(tmp_path, flat("infiniband_h100_counters.tsv")))
    assert {(finding.code, finding.severity) for finding in found} == {("ib_errors/counter_full", Severity.INFO)}
    assert len(found) == 9
    assert "excessive_buffer_overrun_errors" in found[0].message


def test_what_was_counted_before_healthd_looked_is_no_news(node, after):
    old = {"symbol_error": 60000, "link_error_recovery": 200, "port_rcv_errors": 60000}
    assert findings(ib_errors, node(**old)) == []
    assert after(old, old) == []


@pytest.mark.parametrize(
    ("counter", "code"),
    [("local_link_integrity_errors", "link_integrity"), ("excessive_buffer_overrun_errors", "buffer_overrun")],
)
def test_one_error_of_the_link_itself_is_degraded(after, counter, code):
    (finding,) = after({}, {counter: 1})
    assert (finding.code, finding.subject, finding.severity) == (f"ib_errors/{code}", "mlx5_0/1", Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds) == (Clears.WINDOW, 86400.0)


def test_more_than_120_symbol_errors_in_an_hour_are_degraded(after):
    assert after({}, {"symbol_error": 120}) == []
    (finding,) = after({}, {"symbol_error": 60}, {"symbol_error": 121})
    assert (finding.code, finding.severity) == ("ib_errors/symbols", Severity.DEGRADED)
    assert after({}, {"symbol_error": 60}, {"symbol_error": 121}, apart=3700.0) == []


@pytest.mark.parametrize(
    ("counter", "most", "code", "apart"),
    [
        ("symbol_error", 100, "symbol_rate", 10.0),
        ("link_error_recovery", 25, "recovery_rate", 300.0),
        ("port_rcv_errors", 3000, "receive_rate", 300.0),
        ("local_ack_timeout_err", 300, "ack_timeout_rate", 300.0),
        ("roce_slow_restart", 3000, "slow_restart_rate", 300.0),
    ],
)
def test_high_rates_warn(after, counter, most, code, apart):
    assert after({}, {counter: most}, apart=apart) == []
    (finding,) = after({}, {counter: most + 1}, apart=apart)
    assert (finding.code, finding.severity, finding.clears) == (f"ib_errors/{code}", Severity.WARNING, Clears.WINDOW)


def test_the_numbers_are_settings(after):
    config = Config(
        symbol_errors_per_hour=0,
        recoveries_per_minute=0,
        receive_errors_per_second=0,
        ack_timeouts_per_second=0,
        slow_restarts_per_second=0,
    )
    steps = (
        {},
        {"symbol_error": 1, "link_error_recovery": 1, "port_rcv_errors": 1, **dict.fromkeys(TRANSPORT_COUNTERS, 1)},
    )
    assert len(after(*steps, config=config)) == 5
    assert after(*steps) == []
    assert codes(after(*steps, config=Config(symbol_errors_per_second=0))) == ["ib_errors/symbol_rate"]


@pytest.mark.parametrize("counter", COUNTER_LIMITS)
def test_a_counter_that_reaches_its_end_in_one_round_is_judged_by_what_it_shows(after, counter):
    found = after({}, {counter: COUNTER_LIMITS[counter]})
    assert len(found) == 2
    assert found[0].code == "ib_errors/counter_full"
    assert codes(after({counter: COUNTER_LIMITS[counter]}, {counter: COUNTER_LIMITS[counter]})) == [
        "ib_errors/counter_full"
    ]


def test_a_card_that_does_not_count_transports_is_judged_by_the_rest(tmp_path):
    make(tmp_path)
    for counter in TRANSPORT_COUNTERS:
        (tmp_path / file(counter)[1:]).unlink()
    given = run_check(ib_errors, Host(str(tmp_path)))
    assert len(list(observed(given, "ib_errors_total"))) == 5
    assert [dict(item.labels)["counter"] for item in observed(given, "ib_counter_unsupported")] == [*TRANSPORT_COUNTERS]


def test_transports_count_on_beyond_what_the_narrow_counters_hold(after):
    found = after({"local_ack_timeout_err": 2**31}, {"local_ack_timeout_err": 2**31 + 3000})
    assert codes(found) == ["ib_errors/ack_timeout_rate"]


def test_a_counter_that_somebody_reset_did_not_go_round(after):
    assert after({"symbol_error": 65000}, {"symbol_error": 3}) == []
    assert after({"link_error_recovery": 250}, {}) == []


NOISE = {"symbol_error": 5000, "local_link_integrity_errors": 2, "excessive_buffer_overrun_errors": 3}
NOISE |= {"link_error_recovery": 100, "port_rcv_errors": 9000}


@pytest.mark.parametrize("ports", [(), ("mlx5_0/1",)])
def test_errors_of_a_port_that_is_down_are_those_of_training(after, ports):
    assert after({}, NOISE, state="1: DOWN", config=Config(ports=ports)) == []
    assert codes(after({}, {"symbol_error": 5000}, state="2: INIT")) == ["ib_errors/symbols"]


def test_a_switch_that_reboots_between_two_looks_is_no_fault(after):
    steps = ({}, {"link_downed": 1, **NOISE}, {"link_downed": 1, **NOISE, "symbol_error": 5001})
    assert after(*steps[:2]) == []
    assert after(*steps) == []


def test_nor_is_one_that_is_seen_while_it_is_away(after):
    steps = [{}, {"link_downed": 1, "state": "1: DOWN"}, {"link_downed": 1, "state": "1: DOWN", **NOISE}]
    up = {"link_downed": 1, **NOISE, "symbol_error": 9000}
    assert after(*steps, up, {**up, "symbol_error": 9001}) == []
    assert codes(after(*steps, up, {**up, "symbol_error": 9001 + 120})) == ["ib_errors/symbols"]


def test_nor_is_a_reset_of_the_adapter_that_begins_to_count_anew(after):
    assert after({"link_downed": 4, "excessive_buffer_overrun_errors": 3}, {"link_downed": 0, **NOISE}) == []


def test_omni_path_counts_what_it_sends_again_as_link_integrity_errors(tmp_path):
    """drivers/infiniband/hw/hfi1/mad.c reports C_DC_RX_REPLAY as local_link_integrity_errors."""
    for number, driver in enumerate(("hfi1", "mlx5_core")):
        hosts = [make(tmp_path / f"{driver}{n}", local_link_integrity_errors=n) for n in (0, 1)]
        for n in (0, 1):
            link = tmp_path / f"{driver}{n}{IB}/mlx5_0/device/driver"
            link.parent.mkdir()
            link.symlink_to(f"../../../bus/pci/drivers/{driver}")
        given = [item for item in rounds(ib_errors, hosts) if isinstance(item, Finding)]
        assert codes(given) == ["ib_errors/link_integrity"] * number


def test_what_ports_count_within_half_an_hour_of_a_boot_is_no_fault(after):
    noise = {"symbol_error": 300, "excessive_buffer_overrun_errors": 14, "local_link_integrity_errors": 1}
    steps = [{"up_seconds": 60}, {"up_seconds": 360, **noise}, {"up_seconds": 1790, **noise, "symbol_error": 900}]
    assert after(*steps, apart=600.0) == []
    assert after(*steps, {"up_seconds": 2400, **noise, "symbol_error": 901}, apart=600.0) == []
    assert codes(after({"up_seconds": 1500}, {"up_seconds": 1810, **noise})) == [
        *("ib_errors/symbols", "ib_errors/link_integrity", "ib_errors/buffer_overrun")
    ]
    assert codes(after(*steps[:2], {"up_seconds": 700, **noise, "symbol_error": 999}, config=Config(boot_seconds=0)))


def test_where_the_time_since_boot_is_not_known_a_counter_that_grew_is_unknown_and_hides_no_other(tmp_path):
    host = make(tmp_path, symbol_error=500)
    (tmp_path / "proc/uptime").write_text("N/A\n")
    past = History({"ib_errors_total{port=mlx5_0/1,counter=symbol_error}": Series(0.0, NOW - 300, BOOT)}, NOW, BOOT)
    given = []
    with pytest.raises(ValueError, match="/proc/uptime"):
        given.extend(ib_errors.run(host, Config(), past))
    assert len(list(observed(given, "ib_errors_total"))) == 6


def test_a_port_whose_state_cannot_be_read_is_judged_and_unknown(tmp_path):
    make(tmp_path, local_link_integrity_errors=2)
    host = Host(str(tmp_path), system=Refusing(tmp_path, {STATE: errno.EIO}))
    counter = "ib_errors_total{port=mlx5_0/1,counter=local_link_integrity_errors}"
    given = []
    with pytest.raises(ValueError, match=r"mlx5_0/1: .*Input/output error"):
        given.extend(ib_errors.run(host, Config(), History({counter: Series(0.0, NOW - 300, BOOT)}, NOW, BOOT)))
    assert codes([item for item in given if isinstance(item, Finding)]) == ["ib_errors/link_integrity"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_what_a_driver_does_not_tell_is_marked_and_not_asked_again_for_two_days(tmp_path, number):
    make(tmp_path)
    silent = Host(str(tmp_path), system=Refusing(tmp_path, {file("symbol_error"): number}))
    given = run_check(ib_errors, silent)
    assert [item.labels for item in observed(given, "ib_counter_unsupported")] == [
        (("port", "mlx5_0/1"), ("counter", "symbol_error"))
    ]
    store = update({}, [item for item in given if isinstance(item, Observation)], NOW, BOOT)
    tells = make(tmp_path, symbol_error=7)
    given = run_check(ib_errors, tells, None, History(store, NOW + 300, BOOT))
    assert "symbol_error" not in {dict(item.labels).get("counter") for item in given}
    assert len(list(observed(given, "ib_errors_total"))) == 6
    store = update(store, given, NOW + KEEP_SECONDS + 1, BOOT)
    given = run_check(ib_errors, tells, None, History(store, NOW + KEEP_SECONDS + 300, BOOT))
    assert len(list(observed(given, "ib_errors_total"))) == 7


def test_after_a_boot_it_is_asked_again(node):
    mark = "ib_counter_unsupported{port=mlx5_0/1,counter=symbol_error}"
    past = History({mark: Series(1.0, NOW - 300, "another boot")}, NOW, BOOT)
    assert len(list(observed(run_check(ib_errors, node(), None, past), "ib_errors_total"))) == 7


def test_a_counter_that_is_not_told_any_more_is_unknown(tmp_path):
    make(tmp_path)
    (tmp_path / file("symbol_error")[1:]).unlink()
    past = History({"ib_errors_total{port=mlx5_0/1,counter=symbol_error}": Series(0.0, NOW - 300, BOOT)}, NOW, BOOT)
    with pytest.raises(ValueError, match="mlx5_0/1: symbol_error cannot be read any more"):
        run_check(ib_errors, Host(str(tmp_path)), None, past)


def test_a_kernel_that_says_so_in_words_is_not_judged(node):
    host = node(**dict.fromkeys((*COUNTER_LIMITS, *TRANSPORT_COUNTERS), "N/A (no PMA)"))
    given = run_check(ib_errors, host)
    assert {item.name for item in given} == {"ib_counter_unsupported", "ib_errors_link_downs_seen"}


@pytest.mark.parametrize("text", ["", "N/A", "Unknown", str(2**64), "-1", "0x1", "1 2", "١"])
def test_a_garbled_counter_is_unknown_and_hides_no_other(node, text):
    given, error = until_it_fails(ib_errors, node(symbol_error=text))
    assert file("symbol_error") in error
    assert len(list(observed(given, "ib_errors_total"))) == 6


def test_a_counter_that_fails_in_mid_read_is_unknown_and_hides_no_other(tmp_path):
    make(tmp_path)
    given, error = until_it_fails(
        ib_errors, Host(str(tmp_path), system=Refusing(tmp_path, {file("symbol_error"): errno.EIO}))
    )
    assert error == "mlx5_0/1: [Errno 5] Input/output error"
    assert len(list(observed(given, "ib_errors_total"))) == 6


def test_a_machine_without_infiniband_gives_nothing(tmp_path):
    assert run_check(ib_errors, Host(str(tmp_path))) == []


def test_a_listed_port_that_is_not_there_is_unknown(node):
    given, error = until_it_fails(ib_errors, node(), Config(ports=("mlx5_9/1",)))
    assert (given, error) == ([], "mlx5_9/1: no such port")


@pytest.mark.parametrize(
    ("config", "said"),
    [(Config(ports=("mlx5_0",)), 'as in "mlx5_0/1"'), (Config(symbol_errors_per_hour=-1), "must not be negative")],
)
def test_nonsense_is_refused_in_a_sentence(config, said):
    assert said in (validate(config) or "")
    assert validate(Config(ports=("mlx5_0/1",))) is None


@pytest.mark.parametrize(
    ("counter", "counted", "code"),
    [
        ("symbol_error", 200, "symbols"),
        ("local_link_integrity_errors", 1, "link_integrity"),
        ("excessive_buffer_overrun_errors", 1, "buffer_overrun"),
    ],
)
def test_a_bad_link_drains_until_it_was_clean_for_a_day_after_its_repair(node, counter, counted, code):
    life = Story(ib_errors).look(node()).look(node(**{counter: counted}))
    assert (life.codes, life.drained, life.requeued) == ([f"ib_errors/{code}"], True, False)
    life.looks(node(**{counter: counted}), 2 * 288)
    assert life.drained  # two days without load prove nothing
    life.reboot().looks(node(), 280)
    assert life.drained
    life.looks(node(), 12)
    assert (life.codes, life.drained) == ([], False)


def test_an_engineer_who_has_changed_the_cable_ends_it_at_once(node):
    life = Story(ib_errors).look(node()).look(node(symbol_error=200)).repaired("ib_errors/symbols")
    life.look(node(symbol_error=200))
    assert (life.codes, life.drained) == ([], False)


@pytest.mark.parametrize(
    ("counter", "code"),
    [
        ("link_error_recovery", "recovery"),
        ("port_rcv_errors", "receive"),
        ("local_ack_timeout_err", "ack_timeout"),
        ("roce_slow_restart", "slow_restart"),
    ],
)
def test_high_rates_never_drain_and_are_forgotten_after_a_clean_day(node, counter, code):
    life = Story(ib_errors).look(node()).look(node(**{counter: 4000}))
    assert (life.codes, life.drained) == ([f"ib_errors/{code}_rate"], False)
    life.looks(node(**{counter: 4000}), 280)
    assert life.codes == [f"ib_errors/{code}_rate"]
    life.looks(node(**{counter: 4000}), 12)
    assert life.codes == []


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(counter=st.sampled_from(sorted(COUNTER_LIMITS)), content=st.binary(max_size=24))
def test_a_counter_is_read_exactly_or_the_run_fails(tmp_path, counter, content):
    host = make(tmp_path)
    (tmp_path / file(counter)[1:]).write_bytes(content)
    given, error = until_it_fails(ib_errors, host)
    if error:
        assert "not a count" in error
    elif content.strip() != b"N/A (no PMA)":
        assert float(int(content)) in [item.value for item in observed(given, "ib_errors_total")]
