"""ib_link: InfiniBand and RoCE ports that should be up, at the expected rate."""

from __future__ import annotations

import shutil

import pytest
from fakes import codes, findings, observations_named, parse_or_error, run_check, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import captured_files, write

from healthd.checks import ib_link
from healthd.checks.ib_link import Config, parse, validate
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

PORTS = "/sys/class/infiniband/{}/ports/{}/{}"
EXPECTED = Config(expected_gbps={"mlx5_0/1": 400.0})


def healthy(tmp_path):
    files = {path: f"{text}\n" for path, text in captured_files("infiniband_h100.tsv").items()}
    ports = {path.split("/")[4] for path in files}
    slow = {"mlx5_2", "mlx5_3", "mlx5_bond_0"}  # DGX H100: eight ports of 400 Gbit/s for GPUs, others for storage
    return write(tmp_path, files), Config(expected_gbps={f"{each}/1": 0.0 if each in slow else 400.0 for each in ports})


ABSENT_IS_FINE = {r"/sys/class/infiniband(/[^/]+/ports)?": "expected ports are read by name, listed or not"}


@pytest.fixture
def h100(tmp_path):
    """Return a function that creates the ports of a DGX H100. mlx5_0=("state", "phys", "rate") changes one port."""

    def make(**changed):
        files = {path: f"{text}\n" for path, text in captured_files("infiniband_h100.tsv").items()}
        for device, texts in changed.items():
            for name, text in zip(("state", "phys_state", "rate"), texts, strict=False):
                files[PORTS.format(device, 1, name)] = text
        return write(tmp_path, files)

    return make


def test_expected_ports_up_at_their_rate_give_no_finding(h100):
    config = Config(expected_gbps={**{f"mlx5_{n}/1": 400.0 for n in (0, 1, 4, 5, 6, 7, 8, 9)}, "mlx5_bond_0/1": 200.0})
    results = run_check(ib_link, h100(), config)
    assert [item for item in results if isinstance(item, Finding)] == []
    assert sum(item.value for item in observations_named(results, "ib_port_active")) == 9
    assert max(item.value for item in observations_named(results, "ib_port_rate_bytes_per_second")) == 50e9


def test_ports_without_expectation_give_no_finding(h100):
    results = run_check(ib_link, h100(mlx5_0=("1: DOWN", "3: Disabled", "10 Gb/sec (4X)")))
    assert [item for item in results if isinstance(item, Finding)] == []
    assert next(observations_named(results, "ib_port_active")).value == 0


def test_machine_without_infiniband_gives_nothing(tmp_path):
    assert run_check(ib_link, Host(str(tmp_path))) == []


@pytest.mark.parametrize(
    ("state", "physical"),
    [
        ("1: DOWN", "2: Polling"),
        ("1: DOWN", "3: Disabled"),
        ("2: INIT", "5: LinkUp"),
        ("1: DOWN", "5: LinkUp"),
        ("4: ACTIVE", "6: LinkErrorRecovery"),
        ("5: ACTIVE_DEFER", "5: LinkUp"),
        ("1: DOWN", "0: <unknown>"),
    ],
)
def test_port_down_is_degraded_after_a_minute_and_critical_after_four(h100, state, physical):
    (finding,) = findings(ib_link, h100(mlx5_0=(state, physical)), EXPECTED)
    assert (finding.code, finding.subject, finding.clears) == ("ib_link/down", "mlx5_0/1", Clears.PASS)
    assert (finding.severity, finding.confirm_seconds) == (Severity.DEGRADED, 60.0)
    assert finding.worsens is not None
    assert (finding.worsens.severity, finding.worsens.after_seconds) == (Severity.CRITICAL, 240.0)


def test_roce_port_is_evaluated_like_infiniband_port(h100):
    host = h100(mlx5_bond_0=("1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)"))
    assert codes(findings(ib_link, host, Config(expected_gbps={"mlx5_bond_0/1": 200.0}))) == ["ib_link/down"]


def test_virtual_function_without_physical_state_is_up(tmp_path):
    # github.com/Azure/azhpc-diagnostics@8543969 Linux/test/samples/endure
    files = {"state": "4: ACTIVE\n", "phys_state": "0: <unknown>\n", "rate": "5 Gb/sec (1X DDR)\n"}
    host = write(tmp_path, {PORTS.format("mlx5_an0", 1, name): text for name, text in files.items()})
    assert findings(ib_link, host, Config(expected_gbps={"mlx5_an0/1": 5.0})) == []


def test_leaf_switch_reboot_within_a_minute_does_not_drain(h100):
    story = Story(ib_link, EXPECTED).run_check(h100(mlx5_0=("1: DOWN", "2: Polling")))
    story.run_check(h100(mlx5_0=("4: ACTIVE", "5: LinkUp")), minutes=1)
    assert (story.codes, story.drained) == ([], False)


def test_port_down_drains_after_a_minute_and_requeues_after_four(h100):
    down = h100(mlx5_0=("1: DOWN", "2: Polling"))
    story = Story(ib_link, EXPECTED).run_check(down)
    assert not story.drained
    story.run_check(down, minutes=1)
    assert (story.codes, story.drained, story.requeued) == (["ib_link/down"], True, False)
    story.run_check(down, minutes=2)
    assert not story.requeued
    story.run_check(down, minutes=1)
    assert story.requeued
    story.run_checks(down, 300)
    assert story.drained  # a day without load repairs nothing
    up = h100(mlx5_0=("4: ACTIVE", "5: LinkUp"))
    assert story.run_check(up).drained
    assert not story.run_check(up).drained


def test_missing_port_drains_after_a_minute_and_requeues_after_four(h100, tmp_path):
    host = h100()
    story = Story(ib_link, EXPECTED).run_check(host)
    shutil.rmtree(tmp_path / "sys/class/infiniband/mlx5_0")
    story.run_check(host)
    assert (story.codes, story.drained) == ([], False)
    story.run_check(host, minutes=1)
    assert (story.codes, story.drained, story.requeued) == (["ib_link/missing"], True, False)
    story.run_check(host, minutes=2)
    assert not story.requeued
    story.run_check(host, minutes=1)
    assert story.requeued
    story.run_checks(host, 300).reboot().run_checks(host, 3)
    assert (story.codes, story.drained) == (["ib_link/missing"], True)  # neither a day nor a reboot restores it
    h100()
    assert story.run_check(host).drained
    story.run_check(host)
    assert (story.codes, story.drained) == ([], False)


def test_slow_port_drains_without_requeue_until_fast(h100):
    rate = "200 Gb/sec (4X HDR)"
    slow = h100(mlx5_0=("4: ACTIVE", "5: LinkUp", rate))
    story = Story(ib_link, EXPECTED).run_check(slow).run_check(slow, minutes=1)
    assert (story.codes, story.drained) == (["ib_link/slow"], True)
    story.run_checks(slow, 100)
    assert (story.drained, story.requeued) == (True, False)
    story.run_checks(h100(mlx5_0=("4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")), 2)
    assert (story.codes, story.drained) == ([], False)


def test_port_guessed_by_profile_never_drains(h100):
    down = h100(mlx5_0=("1: DOWN", "2: Polling"))
    guessed = Config(expected_gbps={"mlx5_0/1": 400.0}, guessed=("expected_gbps",))
    story = Story(ib_link, guessed).run_checks(down, 100)
    assert (story.codes, story.drained) == (["ib_link/down"], False)


@pytest.mark.parametrize("port", ["mlx5_77/1", "mlx5_0/2"])
def test_missing_port_is_degraded_and_becomes_critical(h100, port):
    (finding,) = findings(ib_link, h100(), Config(expected_gbps={port: 400.0}))
    assert (finding.code, finding.severity, finding.subject) == ("ib_link/missing", Severity.DEGRADED, port)
    assert finding.worsens is not None


def test_port_that_vanishes_during_read_is_missing(h100, tmp_path):
    host = h100()
    (tmp_path / PORTS.format("mlx5_0", 1, "rate")[1:]).unlink()
    assert codes(findings(ib_link, host, EXPECTED)) == ["ib_link/missing"]


@pytest.mark.parametrize("rate", ["100 Gb/sec (1X NDR)", "200 Gb/sec (4X HDR)", "100 Gb/sec (4X EDR)"])
def test_slow_port_is_degraded_and_never_critical(h100, rate):
    (finding,) = findings(ib_link, h100(mlx5_0=("4: ACTIVE", "5: LinkUp", rate)), EXPECTED)
    assert (finding.code, finding.severity, finding.worsens) == ("ib_link/slow", Severity.DEGRADED, None)
    assert finding.confirm_seconds == 60.0


def test_unnamed_oldest_speed_is_slow_if_another_port_has_a_named_speed(h100):
    host = h100(mlx5_0=("4: ACTIVE", "5: LinkUp", "10 Gb/sec (4X)"))
    assert codes(findings(ib_link, host, EXPECTED)) == ["ib_link/slow"]


def test_unnamed_oldest_speed_only_warns_if_no_port_has_a_named_speed(tmp_path):
    files = {"state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": "10 Gb/sec (4X)\n"}
    host = write(tmp_path, {PORTS.format("mlx5_0", 1, name): text for name, text in files.items()})
    (finding,) = findings(ib_link, host, EXPECTED)
    assert (finding.code, finding.severity) == ("ib_link/rate_unknown", Severity.WARNING)


def test_faster_port_and_any_rate_give_no_finding(h100):
    assert findings(ib_link, h100(), Config(expected_gbps={"mlx5_0/1": 200.0, "mlx5_1/1": 0.0})) == []


def test_omni_path_and_older_cards_are_read(tmp_path):
    host = write(tmp_path, captured_files("infiniband_procfs.tsv"))
    assert findings(ib_link, host, Config(expected_gbps={"hfi1_0/1": 100.0, "mlx4_0/2": 40.0})) == []


def test_contradicting_state_number_and_word_fail_run(tmp_path):
    host = write(tmp_path, captured_files("infiniband_procfs.tsv"))  # the physical state of mlx5_0 is "4: ACTIVE"
    assert run_until_error(ib_link, host, Config(expected_gbps={"mlx5_0/1": 25.0}))[1]
    assert run_until_error(ib_link, host)[1] == ""


def test_garbled_port_fails_run_and_hides_no_other_finding(h100):
    host = h100(mlx5_0=("garbage",), mlx5_1=("1: DOWN",))
    results, error = run_until_error(ib_link, host, Config(expected_gbps={"mlx5_0/1": 400.0, "mlx5_1/1": 400.0}))
    assert "mlx5_0/1: not a state" in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["ib_link/down"]


def test_garbled_port_without_expectation_is_ignored(h100):
    assert run_until_error(ib_link, h100(mlx5_7=("garbage",)), EXPECTED)[1] == ""


@pytest.mark.parametrize("port", ["mlx5_0", "mlx5_0/", "/1", "mlx5_0/0", "mlx5_0/x", "a b/1", "mlx5_0/1/2"])
def test_validate_rejects_invalid_port_with_hint(port):
    assert 'as in "mlx5_0/1"' in (validate(Config(expected_gbps={port: 400.0})) or "")


def test_validate_rejects_negative_rate():
    assert "must not be negative" in (validate(Config(expected_gbps={"mlx5_0/1": -1.0})) or "")
    assert validate(EXPECTED) is None


@pytest.mark.parametrize("number", range(4))
def test_parse_treats_every_state_but_active_as_down(number):
    state = ("0: NOP", "1: DOWN", "2: INIT", "3: ARMED")[number]
    assert not parse("p/1", state, "5: LinkUp", "400 Gb/sec (4X NDR)").active


GARBAGE = st.one_of(
    st.sampled_from(
        ["", "N/A", "4", "4:", "4: ", "4: active", f"{2**64}: ACTIVE", "-4: ACTIVE", "4: ACTIVE\n4: ACTIVE"]
    ),
    st.sampled_from(
        ["5: Link", "400 Gb/sec", "400 Gb/sec (4X NDR", "inf Gb/sec (4X)", f"{2**64} Gb/sec (4X)", "٤: ACTIVE"]
    ),
    st.text(max_size=30),
    st.binary(max_size=30).map(lambda raw: raw.decode("utf-8", "replace")),
)


@given(GARBAGE, st.integers(0, 2))
def test_parse_never_reads_garbage_as_active_port(text, position):
    texts = ["4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"]
    if text == texts[position]:
        return
    texts[position] = text
    port, error = parse_or_error(parse, "p/1", *texts)
    if error:
        assert error.startswith("p/1: not a ")
    else:
        assert not port.active or text in ("0: <unknown>",) or position == 2


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(name=st.sampled_from(["state", "phys_state", "rate"]), content=st.binary(max_size=30))
def test_any_file_content_of_expected_port_gives_finding_or_failure(h100, tmp_path, name, content):
    host = h100()
    (tmp_path / PORTS.format("mlx5_0", 1, name)[1:]).write_bytes(content)
    results, error = run_until_error(ib_link, host, EXPECTED)
    assert error or any(isinstance(item, Finding) for item in results)
