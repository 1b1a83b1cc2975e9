"""ib_errors: error counters of InfiniBand ports."""

from __future__ import annotations

import errno

import pytest
from fakes import BOOT, NOW, codes, findings, observations_named, run_check, run_rounds, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import UnreadableTree, captured_files, write

from healthd.checks import ib_errors
from healthd.checks.ib_errors import COUNTER_LIMITS, TRANSPORT_COUNTERS, Config, validate
from healthd.common.history import KEEP_SECONDS, History, Series, update
from healthd.common.model import Clears, Finding, Observation, Severity
from healthd.host.host import Host

IB = "/sys/class/infiniband"
STATE = IB + "/mlx5_0/ports/1/state"


def counter_file(counter):
    folder = "hw_counters" if counter in TRANSPORT_COUNTERS else "counters"
    return f"{IB}/mlx5_0/ports/1/{folder}/{counter}"


def make(root, state="4: ACTIVE", up_seconds=864000, **counts):
    """Create a node with one port. Its counters are 0 except for `counts`."""
    counters = {
        counter_file(each): f"{counts.get(each, 0)}\n" for each in (*COUNTER_LIMITS, *TRANSPORT_COUNTERS, "link_downed")
    }
    return write(root, {STATE: f"{state}\n", "/proc/uptime": f"{up_seconds}.00 1.00\n", **counters})


def healthy(tmp_path):
    counters = {path: f"{text}\n" for path, text in captured_files("infiniband_h100_counters.tsv").items()}
    for path in counters:
        if path.endswith("excessive_buffer_overrun_errors"):
            counters[path] = "3\n"  # at their maximum in the capture: an INFO finding
    return write(tmp_path, counters), Config()


ABSENT_IS_FINE = {
    r".*/(hw_)?counters/.*": "drivers of virtual functions and older cards do not count everything",
    r"/sys/class/infiniband(/[^/]+/ports)?": "a machine without InfiniBand; ib_link judges whether a port is there",
}


@pytest.fixture
def findings_after(tmp_path):
    """Return a function that gives the findings of the last of several rounds with these counts."""

    def run_steps(*steps, config=None, interval=300.0, state="4: ACTIVE"):
        hosts = [make(tmp_path / str(number), **{"state": state, **step}) for number, step in enumerate(steps)]
        return [item for item in run_rounds(ib_errors, hosts, config, interval) if isinstance(item, Finding)]

    return run_steps


def test_unchanged_counters_give_no_finding(tmp_path):
    results = run_check(ib_errors, healthy(tmp_path)[0])
    assert [item for item in results if isinstance(item, Finding)] == []
    assert len(list(observations_named(results, "ib_errors_total"))) == 9 * 7


def test_counters_of_dgx_h100_give_nothing_above_info(tmp_path):
    found = findings(ib_errors, write(tmp_path, captured_files("infiniband_h100_counters.tsv")))
    assert {(finding.code, finding.severity) for finding in found} == {("ib_errors/counter_full", Severity.INFO)}
    assert len(found) == 9
    assert "excessive_buffer_overrun_errors" in found[0].message


def test_counts_from_before_healthd_started_give_no_finding(node, findings_after):
    old = {"symbol_error": 60000, "link_error_recovery": 200, "port_rcv_errors": 60000}
    assert findings(ib_errors, node(**old)) == []
    assert findings_after(old, old) == []


@pytest.mark.parametrize(
    ("counter", "code"),
    [("local_link_integrity_errors", "link_integrity"), ("excessive_buffer_overrun_errors", "buffer_overrun")],
)
def test_single_link_error_is_degraded(findings_after, counter, code):
    (finding,) = findings_after({}, {counter: 1})
    assert (finding.code, finding.subject, finding.severity) == (f"ib_errors/{code}", "mlx5_0/1", Severity.DEGRADED)
    assert (finding.clears, finding.window_seconds) == (Clears.WINDOW, 86400.0)


def test_more_than_120_symbol_errors_in_an_hour_are_degraded(findings_after):
    assert findings_after({}, {"symbol_error": 120}) == []
    (finding,) = findings_after({}, {"symbol_error": 60}, {"symbol_error": 121})
    assert (finding.code, finding.severity) == ("ib_errors/symbols", Severity.DEGRADED)
    assert findings_after({}, {"symbol_error": 60}, {"symbol_error": 121}, interval=3700.0) == []


@pytest.mark.parametrize(
    ("counter", "limit", "code", "interval"),
    [
        ("symbol_error", 100, "symbol_rate", 10.0),
        ("link_error_recovery", 25, "recovery_rate", 300.0),
        ("port_rcv_errors", 3000, "receive_rate", 300.0),
        ("local_ack_timeout_err", 300, "ack_timeout_rate", 300.0),
        ("roce_slow_restart", 3000, "slow_restart_rate", 300.0),
    ],
)
def test_high_rates_warn(findings_after, counter, limit, code, interval):
    assert findings_after({}, {counter: limit}, interval=interval) == []
    (finding,) = findings_after({}, {counter: limit + 1}, interval=interval)
    assert (finding.code, finding.severity, finding.clears) == (f"ib_errors/{code}", Severity.WARNING, Clears.WINDOW)


def test_limits_are_settings(findings_after):
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
    assert len(findings_after(*steps, config=config)) == 5
    assert findings_after(*steps) == []
    assert codes(findings_after(*steps, config=Config(symbol_errors_per_second=0))) == ["ib_errors/symbol_rate"]


@pytest.mark.parametrize("counter", COUNTER_LIMITS)
def test_counter_that_reaches_maximum_in_one_round_is_evaluated(findings_after, counter):
    found = findings_after({}, {counter: COUNTER_LIMITS[counter]})
    assert len(found) == 2
    assert found[0].code == "ib_errors/counter_full"
    assert codes(findings_after({counter: COUNTER_LIMITS[counter]}, {counter: COUNTER_LIMITS[counter]})) == [
        "ib_errors/counter_full"
    ]


def test_card_without_transport_counters_is_evaluated_by_the_others(tmp_path):
    make(tmp_path)
    for counter in TRANSPORT_COUNTERS:
        (tmp_path / counter_file(counter)[1:]).unlink()
    results = run_check(ib_errors, Host(str(tmp_path)))
    assert len(list(observations_named(results, "ib_errors_total"))) == 5
    assert [dict(item.labels)["counter"] for item in observations_named(results, "ib_counter_unsupported")] == [
        *TRANSPORT_COUNTERS
    ]


def test_transport_counters_are_wider_than_32_bit_limits(findings_after):
    found = findings_after({"local_ack_timeout_err": 2**31}, {"local_ack_timeout_err": 2**31 + 3000})
    assert codes(found) == ["ib_errors/ack_timeout_rate"]


def test_reset_counter_is_no_wraparound(findings_after):
    assert findings_after({"symbol_error": 65000}, {"symbol_error": 3}) == []
    assert findings_after({"link_error_recovery": 250}, {}) == []


NOISE = {"symbol_error": 5000, "local_link_integrity_errors": 2, "excessive_buffer_overrun_errors": 3}
NOISE |= {"link_error_recovery": 100, "port_rcv_errors": 9000}


@pytest.mark.parametrize("ports", [(), ("mlx5_0/1",)])
def test_errors_of_port_that_is_down_are_ignored(findings_after, ports):
    assert findings_after({}, NOISE, state="1: DOWN", config=Config(ports=ports)) == []
    assert codes(findings_after({}, {"symbol_error": 5000}, state="2: INIT")) == ["ib_errors/symbols"]


def test_switch_reboot_between_runs_is_no_fault(findings_after):
    steps = ({}, {"link_downed": 1, **NOISE}, {"link_downed": 1, **NOISE, "symbol_error": 5001})
    assert findings_after(*steps[:2]) == []
    assert findings_after(*steps) == []


def test_switch_reboot_seen_by_a_run_is_no_fault(findings_after):
    steps = [{}, {"link_downed": 1, "state": "1: DOWN"}, {"link_downed": 1, "state": "1: DOWN", **NOISE}]
    up = {"link_downed": 1, **NOISE, "symbol_error": 9000}
    assert findings_after(*steps, up, {**up, "symbol_error": 9001}) == []
    assert codes(findings_after(*steps, up, {**up, "symbol_error": 9001 + 120})) == ["ib_errors/symbols"]


def test_adapter_reset_that_restarts_counters_is_no_fault(findings_after):
    assert findings_after({"link_downed": 4, "excessive_buffer_overrun_errors": 3}, {"link_downed": 0, **NOISE}) == []


def test_replays_of_omni_path_are_not_link_integrity_errors(tmp_path):
    """drivers/infiniband/hw/hfi1/mad.c reports C_DC_RX_REPLAY as local_link_integrity_errors."""
    for number, driver in enumerate(("hfi1", "mlx5_core")):
        hosts = [make(tmp_path / f"{driver}{n}", local_link_integrity_errors=n) for n in (0, 1)]
        for n in (0, 1):
            link = tmp_path / f"{driver}{n}{IB}/mlx5_0/device/driver"
            link.parent.mkdir()
            link.symlink_to(f"../../../bus/pci/drivers/{driver}")
        results = [item for item in run_rounds(ib_errors, hosts) if isinstance(item, Finding)]
        assert codes(results) == ["ib_errors/link_integrity"] * number


def test_errors_within_half_an_hour_after_boot_are_no_fault(findings_after):
    noise = {"symbol_error": 300, "excessive_buffer_overrun_errors": 14, "local_link_integrity_errors": 1}
    steps = [{"up_seconds": 60}, {"up_seconds": 360, **noise}, {"up_seconds": 1790, **noise, "symbol_error": 900}]
    assert findings_after(*steps, interval=600.0) == []
    assert findings_after(*steps, {"up_seconds": 2400, **noise, "symbol_error": 901}, interval=600.0) == []
    assert codes(findings_after({"up_seconds": 1500}, {"up_seconds": 1810, **noise})) == [
        *("ib_errors/symbols", "ib_errors/link_integrity", "ib_errors/buffer_overrun")
    ]
    assert codes(
        findings_after(*steps[:2], {"up_seconds": 700, **noise, "symbol_error": 999}, config=Config(boot_seconds=0))
    )


def test_growth_without_uptime_fails_run_and_hides_no_other_counter(tmp_path):
    host = make(tmp_path, symbol_error=500)
    (tmp_path / "proc/uptime").write_text("N/A\n")
    past = History({"ib_errors_total{port=mlx5_0/1,counter=symbol_error}": Series(0.0, NOW - 300, BOOT)}, NOW, BOOT)
    results = []
    with pytest.raises(ValueError, match="/proc/uptime"):
        results.extend(ib_errors.run(host, Config(), past))
    assert len(list(observations_named(results, "ib_errors_total"))) == 6


def test_unreadable_state_fails_run_but_counters_are_evaluated(tmp_path):
    make(tmp_path, local_link_integrity_errors=2)
    host = Host(str(tmp_path), system=UnreadableTree(tmp_path, {STATE: errno.EIO}))
    counter = "ib_errors_total{port=mlx5_0/1,counter=local_link_integrity_errors}"
    results = []
    with pytest.raises(ValueError, match=r"mlx5_0/1: .*Input/output error"):
        results.extend(ib_errors.run(host, Config(), History({counter: Series(0.0, NOW - 300, BOOT)}, NOW, BOOT)))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["ib_errors/link_integrity"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_unsupported_counter_is_not_read_again_for_two_days(tmp_path, number):
    make(tmp_path)
    unsupported = Host(str(tmp_path), system=UnreadableTree(tmp_path, {counter_file("symbol_error"): number}))
    results = run_check(ib_errors, unsupported)
    assert [item.labels for item in observations_named(results, "ib_counter_unsupported")] == [
        (("port", "mlx5_0/1"), ("counter", "symbol_error"))
    ]
    store = update({}, [item for item in results if isinstance(item, Observation)], NOW, BOOT)
    supported = make(tmp_path, symbol_error=7)
    results = run_check(ib_errors, supported, None, History(store, NOW + 300, BOOT))
    assert "symbol_error" not in {dict(item.labels).get("counter") for item in results}
    assert len(list(observations_named(results, "ib_errors_total"))) == 6
    store = update(store, results, NOW + KEEP_SECONDS + 1, BOOT)
    results = run_check(ib_errors, supported, None, History(store, NOW + KEEP_SECONDS + 300, BOOT))
    assert len(list(observations_named(results, "ib_errors_total"))) == 7


def test_unsupported_counter_is_read_again_after_boot(node):
    mark = "ib_counter_unsupported{port=mlx5_0/1,counter=symbol_error}"
    past = History({mark: Series(1.0, NOW - 300, "another boot")}, NOW, BOOT)
    assert len(list(observations_named(run_check(ib_errors, node(), None, past), "ib_errors_total"))) == 7


def test_counter_that_becomes_unreadable_fails_run(tmp_path):
    make(tmp_path)
    (tmp_path / counter_file("symbol_error")[1:]).unlink()
    past = History({"ib_errors_total{port=mlx5_0/1,counter=symbol_error}": Series(0.0, NOW - 300, BOOT)}, NOW, BOOT)
    with pytest.raises(ValueError, match="mlx5_0/1: symbol_error can no longer be read"):
        run_check(ib_errors, Host(str(tmp_path)), None, past)


def test_no_pma_text_of_kernel_means_unsupported(node):
    host = node(**dict.fromkeys((*COUNTER_LIMITS, *TRANSPORT_COUNTERS), "N/A (no PMA)"))
    results = run_check(ib_errors, host)
    assert {item.name for item in results} == {"ib_counter_unsupported", "ib_errors_link_downs_seen"}


@pytest.mark.parametrize("text", ["", "N/A", "Unknown", str(2**64), "-1", "0x1", "1 2", "١"])
def test_garbled_counter_fails_run_and_hides_no_other_counter(node, text):
    results, error = run_until_error(ib_errors, node(symbol_error=text))
    assert counter_file("symbol_error") in error
    assert len(list(observations_named(results, "ib_errors_total"))) == 6


def test_counter_read_error_fails_run_and_hides_no_other_counter(tmp_path):
    make(tmp_path)
    results, error = run_until_error(
        ib_errors, Host(str(tmp_path), system=UnreadableTree(tmp_path, {counter_file("symbol_error"): errno.EIO}))
    )
    assert error == "mlx5_0/1: [Errno 5] Input/output error"
    assert len(list(observations_named(results, "ib_errors_total"))) == 6


def test_machine_without_infiniband_gives_nothing(tmp_path):
    assert run_check(ib_errors, Host(str(tmp_path))) == []


def test_missing_listed_port_fails_run(node):
    results, error = run_until_error(ib_errors, node(), Config(ports=("mlx5_9/1",)))
    assert (results, error) == ([], "mlx5_9/1: no such port")


@pytest.mark.parametrize(
    ("config", "error"),
    [(Config(ports=("mlx5_0",)), 'as in "mlx5_0/1"'), (Config(symbol_errors_per_hour=-1), "must not be negative")],
)
def test_validate_rejects_invalid_settings(config, error):
    assert error in (validate(config) or "")
    assert validate(Config(ports=("mlx5_0/1",))) is None


@pytest.mark.parametrize(
    ("counter", "counted", "code"),
    [
        ("symbol_error", 200, "symbols"),
        ("local_link_integrity_errors", 1, "link_integrity"),
        ("excessive_buffer_overrun_errors", 1, "buffer_overrun"),
    ],
)
def test_faulty_link_drains_until_clean_day_after_reboot(node, counter, counted, code):
    story = Story(ib_errors).run_check(node()).run_check(node(**{counter: counted}))
    assert (story.codes, story.drained, story.requeued) == ([f"ib_errors/{code}"], True, False)
    story.run_checks(node(**{counter: counted}), 2 * 288)
    assert story.drained  # two days without load prove nothing
    story.reboot().run_checks(node(), 280)
    assert story.drained
    story.run_checks(node(), 12)
    assert (story.codes, story.drained) == ([], False)


def test_repaired_clears_faulty_link_at_once(node):
    story = Story(ib_errors).run_check(node()).run_check(node(symbol_error=200)).repaired("ib_errors/symbols")
    story.run_check(node(symbol_error=200))
    assert (story.codes, story.drained) == ([], False)


@pytest.mark.parametrize(
    ("counter", "code"),
    [
        ("link_error_recovery", "recovery"),
        ("port_rcv_errors", "receive"),
        ("local_ack_timeout_err", "ack_timeout"),
        ("roce_slow_restart", "slow_restart"),
    ],
)
def test_high_rates_never_drain_and_clear_after_clean_day(node, counter, code):
    story = Story(ib_errors).run_check(node()).run_check(node(**{counter: 4000}))
    assert (story.codes, story.drained) == ([f"ib_errors/{code}_rate"], False)
    story.run_checks(node(**{counter: 4000}), 280)
    assert story.codes == [f"ib_errors/{code}_rate"]
    story.run_checks(node(**{counter: 4000}), 12)
    assert story.codes == []


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(counter=st.sampled_from(sorted(COUNTER_LIMITS)), content=st.binary(max_size=24))
def test_counter_is_read_exactly_or_run_fails(tmp_path, counter, content):
    host = make(tmp_path)
    (tmp_path / counter_file(counter)[1:]).write_bytes(content)
    results, error = run_until_error(ib_errors, host)
    if error:
        assert "not a count" in error
    elif content.strip() != b"N/A (no PMA)":
        assert float(int(content)) in [item.value for item in observations_named(results, "ib_errors_total")]
