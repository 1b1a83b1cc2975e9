"""eth_link: Ethernet interfaces and bonds that should be up, at the expected speed."""

from __future__ import annotations

import errno
import shutil

import pytest
from fakes import codes, findings, observations_named, parse_or_error, run_check, run_rounds, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from story import Story
from trees import UnreadableTree, write

from healthd.checks import eth_link
from healthd.checks.eth_link import Config, is_up, validate
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

NET = "/sys/class/net"
EXPECTED = Config(expected_mbps={"eth0": 100000, "bond0": 200000})
NODE = {
    "eth0": {"operstate": "up", "speed": "100000", "carrier_changes": "2"},
    "bond0": {"operstate": "up", "speed": "200000", "carrier_changes": "2", "bonding/slaves": "eth1 eth2"},
    "eth1": {"operstate": "up", "speed": "100000", "carrier_changes": "2"},
    "eth2": {"operstate": "up", "speed": "100000", "carrier_changes": "2"},
}


def make(root, **changed):
    """Create interfaces: eth0={"operstate": "down"} changes files of eth0. eth1 and eth2 are the members of bond0."""
    for name, files in NODE.items():
        for file, text in {**files, **changed.get(name, {})}.items():
            write(root, {f"{NET}/{name}/{file}": f"{text}\n"})
    for member in ("eth1", "eth2"):
        link = root / NET[1:] / "bond0" / f"lower_{member}"
        if not link.is_symlink():
            link.symlink_to(f"../{member}")
    return Host(str(root))


def healthy(tmp_path):
    config = replace(EXPECTED, expected_mtu={"eth0": 9000})
    return make(tmp_path, eth0={"operstate": "unknown", "carrier": "1", "mtu": "9000"}), config


ABSENT_IS_FINE = {
    r".*/mtu": "of a missing interface; expected_mbps checks that it exists",
    r".*/carrier_changes": "Linux before 3.15 does not count them",
    r"/sys/class/net/[a-z0-9]+": "listed only to find the members of a bond; existing interfaces are read by name",
}


def test_interfaces_and_bonds_that_are_up_give_no_finding(node):
    results = run_check(eth_link, node(), EXPECTED)
    assert [item for item in results if isinstance(item, Finding)] == []
    assert [
        (dict(item.labels)["interface"], item.value) for item in observations_named(results, "eth_interface_up")
    ] == [(name, 1) for name in ("eth0", "bond0", "eth1", "eth2")]


def test_eth_link_reports_nothing_without_expectation(node):
    assert run_check(eth_link, node(eth0={"operstate": "down"})) == []


@pytest.mark.parametrize("state", ["down", "lowerlayerdown", "dormant", "notpresent", "testing"])
def test_interface_not_up_is_degraded_after_a_minute(node, state):
    (finding,) = findings(eth_link, node(eth0={"operstate": state}), EXPECTED)
    assert (finding.code, finding.subject, finding.expects) == ("eth_link/down", "eth0", "expected_mbps")
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.DEGRADED, Clears.PASS, 60.0)
    assert state in finding.message


@pytest.mark.parametrize(("carrier", "found"), [("1", []), ("0", ["eth_link/down"])])
def test_unknown_operstate_is_decided_by_carrier(node, carrier, found):
    host = node(eth0={"operstate": "unknown", "carrier": carrier})
    assert codes(findings(eth_link, host, EXPECTED)) == found


def test_missing_interface_is_degraded(node):
    (finding,) = findings(eth_link, node(), Config(expected_mbps={"eth7": 0}))
    assert (finding.code, finding.severity) == ("eth_link/missing", Severity.DEGRADED)


def test_bond_member_that_is_down_or_missing_is_degraded(node, tmp_path):
    (finding,) = findings(eth_link, node(eth2={"operstate": "down"}), EXPECTED)
    assert (finding.code, finding.subject) == ("eth_link/member_down", "eth2")
    assert "bond0" in finding.message
    (tmp_path / NET[1:] / "eth2" / "operstate").unlink()
    assert codes(findings(eth_link, Host(str(tmp_path)), EXPECTED)) == ["eth_link/missing"]


def test_port_below_bridge_or_vlan_is_not_a_member(node, tmp_path):
    write(tmp_path, {f"{NET}/br0/operstate": "up\n", f"{NET}/veth1/operstate": "down\n"})
    (tmp_path / NET[1:] / "br0" / "lower_veth1").symlink_to("../veth1")
    assert findings(eth_link, node(), Config(expected_mbps={"br0": 0})) == []


def test_slow_interface_is_degraded_and_faster_one_is_fine(node):
    (finding,) = findings(eth_link, node(bond0={"speed": "100000"}), EXPECTED)
    assert (finding.code, finding.subject, finding.severity) == ("eth_link/slow", "bond0", Severity.DEGRADED)
    assert findings(eth_link, node(bond0={"speed": "400000"}), EXPECTED) == []


def test_speed_is_not_read_if_any_speed_is_expected(node, tmp_path):
    node()
    host = Host(str(tmp_path), system=UnreadableTree(tmp_path, {f"{NET}/eth0/speed": errno.EINVAL}))
    assert findings(eth_link, host, Config(expected_mbps={"eth0": 0})) == []
    assert "eth0" in run_until_error(eth_link, host, EXPECTED)[1]


@pytest.mark.parametrize("speed", ["-1", "0", "4294967295"])
def test_unreported_speed_fails_run(node, speed):
    assert "expected_mbps = 0" in run_until_error(eth_link, node(eth0={"speed": speed}), EXPECTED)[1]


LARGE = Config(expected_mtu={"eth0": 9000})


@pytest.mark.parametrize("mtu", ["1500", "9001", "8999", "1"])
def test_unexpected_mtu_warns(node, mtu):
    (finding,) = findings(eth_link, node(eth0={"mtu": mtu}), LARGE)
    assert (finding.code, finding.subject, finding.expects) == ("eth_link/mtu", "eth0", "expected_mtu")
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.WARNING, Clears.PASS, 60.0)
    assert f"has MTU {mtu}; expected 9000" in finding.message
    assert findings(eth_link, node(eth0={"mtu": mtu}), EXPECTED) == []


def test_expected_mtu_and_mtu_of_missing_interface_give_no_finding(node):
    assert findings(eth_link, node(eth0={"mtu": "9000"}), LARGE) == []
    assert findings(eth_link, node(), Config(expected_mtu={"eth7": 9000})) == []


@pytest.mark.parametrize("mtu", ["", "N/A", "Unknown", str(2**64), "-1", "9000 bytes"])
def test_garbled_mtu_fails_run_and_hides_no_other_finding(node, mtu):
    config = Config(expected_mtu={"eth0": 9000, "bond0": 9000})
    results, error = run_until_error(eth_link, node(eth0={"mtu": mtu}, bond0={"mtu": "1500"}), config)
    assert "eth0: eth0/mtu: not a number of bytes" in error
    assert codes(results) == ["eth_link/mtu"]


def test_unexpected_mtu_warns_until_fixed_and_never_drains(node):
    story = Story(eth_link, LARGE).run_checks(node(eth0={"mtu": "1500"}), 300)
    assert (story.codes, story.drained) == (["eth_link/mtu"], False)
    assert story.reboot().run_checks(node(eth0={"mtu": "1500"}), 3).codes == ["eth_link/mtu"]
    assert story.run_checks(node(eth0={"mtu": "9000"}), 2).codes == []


@pytest.mark.parametrize(("mtu", "error"), [({"a/b": 9000}, "not an interface name"), ({"eth0": 0}, "must be above 0")])
def test_validate_rejects_invalid_mtu(mtu, error):
    assert error in (validate(Config(expected_mtu=mtu)) or "")
    assert validate(LARGE) is None


def findings_after_changes(tmp_path, *changes, interval=300.0, config=EXPECTED):
    hosts = [make(tmp_path / str(n), eth0={"carrier_changes": each}) for n, each in enumerate(changes)]
    return [item for item in run_rounds(eth_link, hosts, config, interval) if isinstance(item, Finding)]


def test_more_than_three_carrier_changes_within_window_warn(tmp_path):
    assert findings_after_changes(tmp_path, 100, 103) == []
    (finding,) = findings_after_changes(tmp_path, 100, 102, 104)
    assert (finding.code, finding.subject, finding.severity) == ("eth_link/flapping", "eth0", Severity.WARNING)
    assert findings_after_changes(tmp_path, 100, 102, 104, interval=3700.0) == []
    lenient = Config(expected_mbps={"eth0": 0}, carrier_changes=4)
    assert findings_after_changes(tmp_path, 100, 104, config=lenient) == []


@pytest.mark.parametrize(
    "files",
    [
        {"operstate": "Unknown"},
        {"operstate": ""},
        {"operstate": "unknown", "carrier": "N/A"},
        {"operstate": "unknown"},
        {"speed": str(2**64)},
        {"speed": "100000 Mb/s"},
        {"carrier_changes": "N/A"},
    ],
)
def test_garbled_interface_fails_run_and_hides_no_other_finding(node, files):
    results, error = run_until_error(eth_link, node(eth0=files, bond0={"operstate": "down"}), EXPECTED)
    assert error.startswith("eth0: eth0/")
    assert codes([item for item in results if isinstance(item, Finding)]) == ["eth_link/down"]


def test_unlistable_bond_members_fail_run_and_bond_is_still_evaluated(node, tmp_path):
    class Unlistable(UnreadableTree):
        def names(self, path):
            raise OSError(errno.EIO, "Input/output error")

    node(bond0={"operstate": "down"})
    results, error = run_until_error(eth_link, Host(str(tmp_path), system=Unlistable(tmp_path, {})), EXPECTED)
    assert "bond0: [Errno 5]" in error
    assert codes([item for item in results if isinstance(item, Finding)]) == ["eth_link/down"]


def test_interface_down_drains_until_up_in_two_runs(node):
    down = node(eth0={"operstate": "down"})
    life = Story(eth_link, EXPECTED).run_check(down)
    assert not life.drained
    life.run_check(down, minutes=1)
    assert (life.codes, life.drained, life.requeued) == (["eth_link/down"], True, False)
    life.run_checks(down, 300).reboot().run_checks(down, 2)
    assert life.drained
    assert life.run_check(node()).drained
    assert not life.run_check(node()).drained


def test_missing_interface_drains_until_it_exists_again(node, tmp_path):
    host = node()
    life = Story(eth_link, EXPECTED).run_check(host)
    shutil.rmtree(tmp_path / NET[1:] / "eth0")
    life.run_check(host)
    assert (life.codes, life.drained) == ([], False)
    life.run_check(host, minutes=1)
    assert (life.codes, life.drained, life.requeued) == (["eth_link/missing"], True, False)
    life.run_checks(host, 300).reboot().run_checks(host, 3)
    assert (life.codes, life.drained) == (["eth_link/missing"], True)  # neither a day nor a reboot clears the condition
    node()
    assert life.run_check(host).drained
    life.run_check(host)
    assert (life.codes, life.drained) == ([], False)


def test_interface_down_for_less_than_a_minute_does_not_drain(node):
    life = Story(eth_link, EXPECTED).run_check(node(eth0={"operstate": "down"})).run_check(node(), minutes=1)
    assert (life.codes, life.drained) == ([], False)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"eth2": {"operstate": "down"}}, "member_down"),
        ({"bond0": {"speed": "100000"}}, "slow"),
    ],
)
def test_weakened_bond_drains_until_complete(node, fault, code):
    life = Story(eth_link, EXPECTED).run_checks(node(**fault), 2)
    assert (life.codes, life.drained, life.requeued) == ([f"eth_link/{code}"], True, False)
    life.run_checks(node(**fault), 300)
    assert life.drained
    life.run_checks(node(), 2)
    assert (life.codes, life.drained) == ([], False)


def test_flapping_interface_never_drains_and_clears_after_window(node):
    life = Story(eth_link, EXPECTED).run_check(node()).run_check(node(eth0={"carrier_changes": "12"}))
    assert (life.codes, life.drained) == (["eth_link/flapping"], False)
    life.run_checks(node(eth0={"carrier_changes": "12"}), 11)
    assert life.codes == ["eth_link/flapping"]
    life.run_checks(node(eth0={"carrier_changes": "12"}), 3)
    assert life.codes == []


def test_expectation_guessed_by_profile_never_drains(node):
    guessed = Config(expected_mbps={"eth0": 0}, guessed=("expected_mbps",))
    life = Story(eth_link, guessed).run_checks(node(eth0={"operstate": "down"}), 10)
    assert (life.codes, life.drained) == (["eth_link/down"], False)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "eth 0", "a-name-that-is-too-long", "eth0:1"])
def test_validate_rejects_invalid_interface_name(name):
    assert "is not an interface name" in (validate(Config(expected_mbps={name: 0})) or "")


def test_validate_rejects_negative_speed():
    assert "must not be negative" in (validate(Config(expected_mbps={"eth0": -1})) or "")
    assert validate(EXPECTED) is None


@given(st.one_of(st.text(max_size=20), st.sampled_from(["UP", "Unknown", "N/A", "up down", "d own", "1"])))
def test_is_up_accepts_only_up(state):
    up, error = parse_or_error(is_up, Host("/nonexistent"), "eth0", state)
    assert error.startswith("eth0/operstate: not a state") if error else up == (state == "up")


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(name=st.sampled_from(["operstate", "speed"]), content=st.binary(max_size=16))
def test_any_file_content_gives_finding_or_failure(tmp_path, name, content):
    host = make(tmp_path)
    (tmp_path / NET[1:] / "eth0" / name).write_bytes(content)
    found, error = run_until_error(eth_link, host, EXPECTED)
    fast = content.strip().isdigit() and int(content) >= 100000
    assert error or any(isinstance(item, Finding) for item in found) or content.strip() == b"up" or fast
