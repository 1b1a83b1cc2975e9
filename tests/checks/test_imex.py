"""imex: the IMEX service and its domain, where the site expects them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import BOOT, NOW, codes, findings, observations_named, parse_or_error, run_check, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem

from healthd.checks import imex
from healthd.checks.imex import DOMAIN_COMMAND, UNIT_COMMAND, Config, parse
from healthd.common.history import History
from healthd.common.model import Clears, Finding, NothingToCheck, Severity
from healthd.host.host import Host
from healthd.host.program import ProgramResult

EXPECTED = Config(expected=True)
ABSENT = ProgramResult(0, "LoadState=not-found\nActiveState=inactive\n", "")


def unit(state: str) -> ProgramResult:
    return ProgramResult(0, f"LoadState=loaded\nActiveState={state}\n", "")


def domain_text(status: str, *nodes: str) -> str:
    """Return the output of `nvidia-imex-ctl -N -j` for nodes with these statuses.

    The format is that of a live domain with driver 580.95.05, as NVIDIA describes it in the ISV test
    imex_domain_test.py (AWS, 2026-09-04): each configured node has an entry, also if its daemon is down.
    """
    entries = {
        str(number): {
            "status": node,
            "host": f"10.0.0.{number + 1}",
            "hostName": f"gpu-node-{number + 1}",
            "connections": {"0": {"host": "10.0.0.1", "status": "CONNECTED", "changed": True}},
            "changed": True,
            "version": "580.95.05",
        }
        for number, node in enumerate(nodes)
    }
    return json.dumps({"nodes": entries, "timestamp": "9/4/2026 00:37:39.905", "status": status}, indent=2)


UP = domain_text("UP", "READY", "READY")


def host(service: ProgramResult | OSError | None, domain: str | ProgramResult | OSError | None = UP) -> Host:
    answer = ProgramResult(0, domain, "") if isinstance(domain, str) else domain
    programs = {UNIT_COMMAND: service, DOMAIN_COMMAND: answer}
    installed = {command: result for command, result in programs.items() if result is not None}
    return Host("/nonexistent", system=FakeSystem("/nonexistent", installed))


def healthy(_tmp_path: Path) -> tuple[Host, Config]:
    return host(unit("active")), EXPECTED


def test_domain_that_is_up_gives_no_finding():
    results = run_check(imex, host(unit("active")), EXPECTED)
    values = {"imex_active": 1, "imex_nodes": 2, "imex_nodes_ready": 2, "imex_versions": 1}
    assert {item.name: item.value for item in results} == values


@pytest.mark.parametrize(
    ("service", "domain"),
    [
        (unit("inactive"), domain_text("DOWN", "UNAVAILABLE", "UNAVAILABLE")),  # idle: Slurm starts it for each job
        (ABSENT, None),
        (None, None),
        (unit("failed"), ProgramResult(255, "", "version is not matching with current GPU driver version")),
        (unit("active"), domain_text("DEGRADED", "READY", "UNAVAILABLE")),
    ],
)
def test_nothing_is_queried_unless_imex_is_expected(service, domain):
    refusing = host(OSError("must not run"), OSError("must not run"))
    assert list(imex.run(refusing, Config(), History({}, NOW, BOOT))) == [NothingToCheck("IMEX is not expected")]
    assert findings(imex, host(service, domain), Config()) == []


@pytest.mark.parametrize(
    ("service", "state"), [(unit("failed"), "failed"), (unit("inactive"), "inactive"), (ABSENT, "not installed")]
)
def test_service_that_does_not_run_is_degraded_after_five_minutes(service, state):
    results = run_check(imex, host(service, OSError("must not run")), EXPECTED)
    assert [item.value for item in observations_named(results, "imex_active")] == [0]
    (finding,) = (item for item in results if isinstance(item, Finding))
    assert (finding.code, finding.severity, finding.clears) == ("imex/daemon", Severity.DEGRADED, Clears.PASS)
    assert (finding.confirm_seconds, finding.shared_cause) == (300.0, True)
    assert finding.message == f"nvidia-imex.service is {state}; jobs need it to share GPU memory with other nodes"


def test_degraded_domain_warns_with_its_nodes():
    (finding,) = findings(imex, host(unit("active"), domain_text("DEGRADED", "READY", "UNAVAILABLE")), EXPECTED)
    assert (finding.code, finding.severity, finding.shared_cause) == ("imex/domain", Severity.WARNING, True)
    assert finding.message == "the IMEX domain of 2 nodes is DEGRADED: 10.0.0.2 UNAVAILABLE"


@pytest.mark.parametrize("state", ["DEGRADED", "DOWN"])
def test_domain_is_not_judged_during_a_rolling_upgrade(state):
    text = domain_text(state, "READY", "UNAVAILABLE", "READY").replace("580.95.05", "580.105.08", 1)
    results = run_check(imex, host(unit("active"), text), EXPECTED)
    assert [item.value for item in observations_named(results, "imex_versions")] == [2]
    assert [item for item in results if isinstance(item, Finding)] == []


def test_node_without_version_is_no_rolling_upgrade():
    text = domain_text("DOWN", "READY", "UNAVAILABLE").replace("580.95.05", "", 1)
    assert codes(findings(imex, host(unit("active"), text), EXPECTED)) == ["imex/domain"]


@pytest.mark.parametrize("status", [0, 1, 255])
@pytest.mark.parametrize("state", ["DEGRADED", "DOWN"])
def test_domain_is_judged_whatever_the_exit_status(state, status):
    answer = ProgramResult(status, domain_text(state, "READY", "UNAVAILABLE"), "domain is not up")
    (finding,) = findings(imex, host(unit("active"), answer), EXPECTED)
    assert (finding.code, finding.severity) == ("imex/domain", Severity.WARNING)


def test_message_names_four_nodes():
    text = domain_text("DOWN", *["UNAVAILABLE"] * 18)
    (finding,) = findings(imex, host(unit("active"), text), EXPECTED)
    assert finding.message.endswith("10.0.0.4 UNAVAILABLE and 14 more")


@pytest.mark.parametrize(
    ("service", "domain", "sentence"),
    [
        (None, UP, "systemctl is missing"),
        (ProgramResult(1, "", "Failed to connect to bus"), UP, "systemctl: no state of nvidia-imex.service"),
        (unit("active"), None, "nvidia-imex-ctl is missing"),
        (unit("active"), ProgramResult(255, "", "cannot read nodes_config.cfg"), "exit status 255"),
        (unit("active"), "N/A", "nvidia-imex-ctl: not a domain"),
        (unit("active"), domain_text("UNKNOWN", "READY"), "nvidia-imex-ctl: not a domain"),
        (unit("active"), domain_text("UP"), "nvidia-imex-ctl: not a domain"),
    ],
)
def test_unknown_state_fails_run(service, domain, sentence):
    results, error = run_until_error(imex, host(service, domain), EXPECTED)
    assert [item for item in results if isinstance(item, Finding)] == []
    assert sentence in error


def test_domain_command_that_hangs_fails_run():
    with pytest.raises(TimeoutError):
        run_check(imex, host(unit("active"), TimeoutError("did not end within 4 s and was killed")), EXPECTED)


def test_service_drains_until_active_again():
    story = Story(imex, EXPECTED).run_check(host(unit("active"))).run_checks(host(unit("failed")), 3)
    assert story.drained
    assert not story.requeued
    story.run_checks(host(unit("active")), 2)
    assert not story.drained


def test_domain_never_drains():
    degraded = host(unit("active"), domain_text("DOWN", "READY", "UNAVAILABLE"))
    story = Story(imex, EXPECTED).run_checks(degraded, 300)
    assert (story.codes, story.drained) == (["imex/domain"], False)


@given(st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda data: data.decode("utf-8", "replace"))))
def test_parse_of_any_text_gives_domain_or_error(text):
    found, error = parse_or_error(parse, text)
    assert error.startswith("nvidia-imex-ctl: ") if error else found[1]


@given(st.integers(0, len(UP) - 1))
def test_parse_of_truncated_output_is_an_error(length):
    assert parse_or_error(parse, UP[:length])[1].startswith("nvidia-imex-ctl: not a domain")
