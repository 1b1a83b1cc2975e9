"""ib_link: InfiniBand and RoCE ports that should be up, at the expected rate."""

from __future__ import annotations

import shutil

import pytest
from fakes import codes, findings, observed, refusal, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import flat, write

from healthd.checks import ib_link
from healthd.checks.ib_link import Config, parse, validate
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

PORTS = "/sys/class/infiniband/{}/ports/{}/{}"
EXPECTED = Config(expected_gbps={"mlx5_0/1": 400.0})


def healthy(tmp_path):
    files = {path: f"{text}\n" for path, text in flat("infiniband_h100.tsv").items()}
    ports = {path.split("/")[4] for path in files}
    slow = {"mlx5_2", "mlx5_3", "mlx5_bond_0"}  # DGX H100: eight ports of 400 Gbit/s for GPUs, others for storage
    return write(tmp_path, files), Config(expected_gbps={f"{each}/1": 0.0 if each in slow else 400.0 for each in ports})


ABSENT_IS_FINE = {r"/sys/class/infiniband(/[^/]+/ports)?": "expected ports are read by name, listed or not"}


@pytest.fixture
def h100(tmp_path):
    """Return a function that creates the ports of a DGX H100. mlx5_0=("state", "phys", "rate") changes one port."""

    def make(**changed):
        files = {path: f"{text}\n" for path, text in flat("infiniband_h100.tsv").items()}
        for device, texts in changed.items():
            for name, text in zip(("state", "phys_state", "rate"), texts, strict=False):
                files[PORTS.format(device, 1, name)] = text
        return write(tmp_path, files)

    return make


def test_expected_ports_that_are_up_at_their_rate_give_no_finding(h100):
    config = Config(expected_gbps={**{f"mlx5_{n}/1": 400.0 for n in (0, 1, 4, 5, 6, 7, 8, 9)}, "mlx5_bond_0/1": 200.0})
    given = run_check(ib_link, h100(), config)
    assert [item for item in given if isinstance(item, Finding)] == []
    assert sum(item.value for item in observed(given, "ib_port_active")) == 9
    assert max(item.value for item in observed(given, "ib_port_rate_bytes_per_second")) == 50e9


def test_without_an_expectation_nothing_is_judged(h100):
    given = run_check(ib_link, h100(mlx5_0=("1: DOWN", "3: Disabled", "10 Gb/sec (4X)")))
    assert [item for item in given if isinstance(item, Finding)] == []
    assert next(observed(given, "ib_port_active")).value == 0


def test_a_machine_without_infiniband_gives_nothing(tmp_path):
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
def test_a_port_that_is_down_is_degraded_after_a_minute_and_critical_after_four(h100, state, physical):
    (finding,) = findings(ib_link, h100(mlx5_0=(state, physical)), EXPECTED)
    assert (finding.code, finding.subject, finding.clears) == ("ib_link/down", "mlx5_0/1", Clears.PASS)
    assert (finding.severity, finding.confirm_seconds) == (Severity.DEGRADED, 60.0)
    assert finding.worsens is not None
    assert (finding.worsens.severity, finding.worsens.after_seconds) == (Severity.CRITICAL, 240.0)


def test_a_roce_port_is_judged_like_an_infiniband_port(h100):
    host = h100(mlx5_bond_0=("1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)"))
    assert codes(findings(ib_link, host, Config(expected_gbps={"mlx5_bond_0/1": 200.0}))) == ["ib_link/down"]


def test_the_virtual_function_that_does_not_tell_its_physical_state_is_up(tmp_path):
    # github.com/Azure/azhpc-diagnostics@8543969 Linux/test/samples/endure
    files = {"state": "4: ACTIVE\n", "phys_state": "0: <unknown>\n", "rate": "5 Gb/sec (1X DDR)\n"}
    host = write(tmp_path, {PORTS.format("mlx5_an0", 1, name): text for name, text in files.items()})
    assert findings(ib_link, host, Config(expected_gbps={"mlx5_an0/1": 5.0})) == []


def test_a_leaf_switch_that_reboots_in_a_minute_drains_nothing(h100):
    life = Story(ib_link, EXPECTED).look(h100(mlx5_0=("1: DOWN", "2: Polling")))
    life.look(h100(mlx5_0=("4: ACTIVE", "5: LinkUp")), minutes=1)
    assert (life.codes, life.drained) == ([], False)


def test_a_port_that_stays_down_drains_after_a_minute_and_requeues_after_four_until_it_is_up_twice(h100):
    down = h100(mlx5_0=("1: DOWN", "2: Polling"))
    life = Story(ib_link, EXPECTED).look(down)
    assert not life.drained
    life.look(down, minutes=1)
    assert (life.codes, life.drained, life.requeued) == (["ib_link/down"], True, False)
    life.look(down, minutes=2)
    assert not life.requeued
    life.look(down, minutes=1)
    assert life.requeued
    life.looks(down, 300)
    assert life.drained  # a day without load repairs nothing
    up = h100(mlx5_0=("4: ACTIVE", "5: LinkUp"))
    assert life.look(up).drained
    assert not life.look(up).drained


def test_a_port_that_is_gone_drains_after_a_minute_and_requeues_after_four_until_it_is_back_twice(h100, tmp_path):
    host = h100()
    life = Story(ib_link, EXPECTED).look(host)
    shutil.rmtree(tmp_path / "sys/class/infiniband/mlx5_0")
    life.look(host)
    assert (life.codes, life.drained) == ([], False)
    life.look(host, minutes=1)
    assert (life.codes, life.drained, life.requeued) == (["ib_link/missing"], True, False)
    life.look(host, minutes=2)
    assert not life.requeued
    life.look(host, minutes=1)
    assert life.requeued
    life.looks(host, 300).reboot().looks(host, 3)
    assert (life.codes, life.drained) == (["ib_link/missing"], True)  # neither a day nor a reboot restores it
    h100()
    assert life.look(host).drained
    life.look(host)
    assert (life.codes, life.drained) == ([], False)


def test_a_slow_port_drains_without_requeue_until_it_is_fast(h100):
    rate = "200 Gb/sec (4X HDR)"
    slow = h100(mlx5_0=("4: ACTIVE", "5: LinkUp", rate))
    life = Story(ib_link, EXPECTED).look(slow).look(slow, minutes=1)
    assert (life.codes, life.drained) == (["ib_link/slow"], True)
    life.looks(slow, 100)
    assert (life.drained, life.requeued) == (True, False)
    life.looks(h100(mlx5_0=("4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")), 2)
    assert (life.codes, life.drained) == ([], False)


def test_what_a_profile_guessed_warns_and_never_drains(h100):
    down = h100(mlx5_0=("1: DOWN", "2: Polling"))
    guessed = Config(expected_gbps={"mlx5_0/1": 400.0}, guessed=("expected_gbps",))
    life = Story(ib_link, guessed).looks(down, 100)
    assert (life.codes, life.drained) == (["ib_link/down"], False)


@pytest.mark.parametrize("port", ["mlx5_77/1", "mlx5_0/2"])
def test_a_port_that_is_not_there_is_degraded_and_gets_critical(h100, port):
    (finding,) = findings(ib_link, h100(), Config(expected_gbps={port: 400.0}))
    assert (finding.code, finding.severity, finding.subject) == ("ib_link/missing", Severity.DEGRADED, port)
    assert finding.worsens is not None


def test_a_port_that_vanishes_while_it_is_read_is_missing(h100, tmp_path):
    host = h100()
    (tmp_path / PORTS.format("mlx5_0", 1, "rate")[1:]).unlink()
    assert codes(findings(ib_link, host, EXPECTED)) == ["ib_link/missing"]


@pytest.mark.parametrize("rate", ["100 Gb/sec (1X NDR)", "200 Gb/sec (4X HDR)", "100 Gb/sec (4X EDR)"])
def test_a_slow_port_is_degraded_and_never_requeued_for(h100, rate):
    (finding,) = findings(ib_link, h100(mlx5_0=("4: ACTIVE", "5: LinkUp", rate)), EXPECTED)
    assert (finding.code, finding.severity, finding.worsens) == ("ib_link/slow", Severity.DEGRADED, None)
    assert finding.confirm_seconds == 60.0


def test_the_oldest_speed_without_its_name_is_slow_where_another_port_shows_that_the_kernel_knows_better(h100):
    host = h100(mlx5_0=("4: ACTIVE", "5: LinkUp", "10 Gb/sec (4X)"))
    assert codes(findings(ib_link, host, EXPECTED)) == ["ib_link/slow"]


def test_the_oldest_speed_without_its_name_only_warns_on_a_kernel_that_shows_nothing_faster(tmp_path):
    files = {"state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": "10 Gb/sec (4X)\n"}
    host = write(tmp_path, {PORTS.format("mlx5_0", 1, name): text for name, text in files.items()})
    (finding,) = findings(ib_link, host, EXPECTED)
    assert (finding.code, finding.severity) == ("ib_link/rate_unknown", Severity.WARNING)


def test_a_faster_port_than_expected_and_any_rate_are_fine(h100):
    assert findings(ib_link, h100(), Config(expected_gbps={"mlx5_0/1": 200.0, "mlx5_1/1": 0.0})) == []


def test_omni_path_and_older_cards_are_read(tmp_path):
    host = write(tmp_path, flat("infiniband_procfs.tsv"))
    assert findings(ib_link, host, Config(expected_gbps={"hfi1_0/1": 100.0, "mlx4_0/2": 40.0})) == []


def test_a_number_and_word_that_do_not_belong_together_are_unknown(tmp_path):
    host = write(tmp_path, flat("infiniband_procfs.tsv"))  # the physical state of mlx5_0 is "4: ACTIVE"
    assert until_it_fails(ib_link, host, Config(expected_gbps={"mlx5_0/1": 25.0}))[1]
    assert until_it_fails(ib_link, host)[1] == ""


def test_a_garbled_port_is_unknown_and_hides_no_other_port(h100):
    host = h100(mlx5_0=("garbage",), mlx5_1=("1: DOWN",))
    given, error = until_it_fails(ib_link, host, Config(expected_gbps={"mlx5_0/1": 400.0, "mlx5_1/1": 400.0}))
    assert "mlx5_0/1: not a state" in error
    assert codes([item for item in given if isinstance(item, Finding)]) == ["ib_link/down"]


def test_a_garbled_port_that_nobody_expects_is_no_matter(h100):
    assert until_it_fails(ib_link, h100(mlx5_7=("garbage",)), EXPECTED)[1] == ""


@pytest.mark.parametrize("port", ["mlx5_0", "mlx5_0/", "/1", "mlx5_0/0", "mlx5_0/x", "a b/1", "mlx5_0/1/2"])
def test_what_is_no_port_is_refused_with_a_hint(port):
    assert 'as in "mlx5_0/1"' in (validate(Config(expected_gbps={port: 400.0})) or "")


def test_a_negative_rate_is_refused():
    assert "must not be negative" in (validate(Config(expected_gbps={"mlx5_0/1": -1.0})) or "")
    assert validate(EXPECTED) is None


@pytest.mark.parametrize("number", range(4))
def test_every_state_but_active_is_down(number):
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
def test_garbage_is_never_an_active_port(text, position):
    texts = ["4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"]
    if text == texts[position]:
        return
    texts[position] = text
    port, said = refusal(parse, "p/1", *texts)
    if said:
        assert said.startswith("p/1: not a ")
    else:
        assert not port.active or text in ("0: <unknown>",) or position == 2


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(name=st.sampled_from(["state", "phys_state", "rate"]), content=st.binary(max_size=30))
def test_no_content_of_a_file_of_an_expected_port_passes_silently(h100, tmp_path, name, content):
    host = h100()
    (tmp_path / PORTS.format("mlx5_0", 1, name)[1:]).write_bytes(content)
    given_, error = until_it_fails(ib_link, host, EXPECTED)
    assert error or any(isinstance(item, Finding) for item in given_)
