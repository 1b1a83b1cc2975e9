"""services: systemd units that this node needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import codes, findings, observations_named, parse_or_error, run_check, run_rounds, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem, captured_text

from healthd.agent.conditions.absorb import as_configured
from healthd.agent.settings.config import CheckConfig
from healthd.checks import services
from healthd.checks.services import Config, parse, validate
from healthd.common.model import Clears, Severity
from healthd.host.host import Host
from healthd.host.program import ProgramResult

SYSTEMCTL_COMMAND = ("systemctl", "show", "-p", "Id,ActiveState,SubState,LoadState,Result,Job,NRestarts")
STATES = {
    "good": "active running",
    "reloading": "reloading reload",
    "refreshing": "refreshing running",
    "failed": "failed failed",
    "dead": "inactive dead",
    "loop": "activating auto-restart",
    "starting": "activating start",
    "stopping": "deactivating stop-sigterm",
}


def unit_text(unit: str, state: str = "good", restarts: int | None = 0, job: str = "", loaded: str = "loaded") -> str:
    """Return a unit in the output format of systemd 252."""
    active, sub = STATES[state].split()
    lines = ["Result=exit-code" if state in ("failed", "loop") else "Result=success"]
    lines += [] if restarts is None else [f"NRestarts={restarts}"]
    lines += [f"Id={unit}.service", f"LoadState={loaded}", f"ActiveState={active}", f"SubState={sub}", f"Job={job}"]
    return "\n".join([*lines, ""])


def host(*units: str, text: str = "", output: ProgramResult | OSError | None = None) -> Host:
    """Return a node whose systemctl prints `text` for `units`."""
    return Host(
        "/nonexistent",
        system=FakeSystem("/nonexistent", {(*SYSTEMCTL_COMMAND, *units): output or ProgramResult(0, text, "")}),
    )


def slurmd(state: str = "good", **more: object) -> Host:
    return host("slurmd", text=unit_text("slurmd", state, **more))


REQUIRED = Config(required=("slurmd",))


def healthy(_tmp_path: Path) -> tuple[Host, Config]:
    text = f"{unit_text('slurmd')}\n{unit_text('munge')}\n{unit_text('chronyd')}"
    return host("slurmd", "munge", "chronyd", text=text), Config(required=("slurmd", "munge"), wanted=("chronyd",))


def test_active_units_give_no_finding(tmp_path):
    assert findings(services, *healthy(tmp_path)) == []


def test_services_runs_nothing_without_units():
    assert run_check(services, host(output=OSError("must not run"))) == []


def test_output_of_real_systemd_is_parsed():
    names = "good broken looping slowstart waits slowstop stopped hidden absent dbus dbus.socket multi-user.target"
    units = tuple(names.split())
    found = findings(services, host(*units, text=captured_text("systemctl_show_252.txt")), Config(required=units))
    assert {finding.subject: (finding.code, finding.message) for finding in found} == {
        "broken": ("services/inactive", "broken is failed (failed, exit-code)"),
        "looping": ("services/inactive", "looping is activating (auto-restart, exit-code)"),
        "slowstart": ("services/changing", "slowstart is activating (start) and changing its state"),
        "waits": ("services/changing", "waits is inactive (dead) and changing its state"),
        "slowstop": ("services/changing", "slowstop is deactivating (stop-sigterm) and changing its state"),
        "stopped": ("services/inactive", "stopped is inactive (dead)"),
        "hidden": ("services/inactive", "hidden is not active: masked"),
        "absent": ("services/inactive", "absent is not active: not-found"),
    }


@pytest.mark.parametrize("state", ["failed", "dead", "loop"])
def test_inactive_required_unit_is_degraded_after_a_minute(state):
    (finding,) = findings(services, slurmd(state), REQUIRED)
    assert (finding.code, finding.severity, finding.clears) == ("services/inactive", Severity.DEGRADED, Clears.PASS)
    assert (finding.subject, finding.confirm_seconds, finding.shared_cause) == ("slurmd", 60.0, True)
    assert finding.expects == "required"


def test_inactive_wanted_unit_warns():
    (finding,) = findings(services, slurmd("failed"), Config(wanted=("slurmd",)))
    assert (finding.code, finding.severity) == ("services/wanted_inactive", Severity.WARNING)
    assert finding.expects == "wanted"


def test_unit_that_is_required_and_wanted_is_queried_once_as_required():
    found = findings(services, slurmd("failed"), Config(required=("slurmd",), wanted=("slurmd",)))
    assert codes(found) == ["services/inactive"]


def test_unit_required_only_by_profile_warns():
    config: CheckConfig = Config(required=("slurmd",), guessed=("required",))
    (finding,) = findings(services, slurmd("failed"), config)
    assert as_configured(finding, config).severity is Severity.WARNING


GUESSED = Config(required=("slurmd", "munge"), guessed=("required",))
NOT_INSTALLED = host("slurmd", "munge", text=f"{unit_text('slurmd')}\n{unit_text('munge', 'dead', loaded='not-found')}")


def test_missing_unit_named_only_by_profile_is_ignored():
    """Slurm with auth/slurm does not need munge."""
    results = run_check(services, NOT_INSTALLED, GUESSED)
    assert findings(services, NOT_INSTALLED, GUESSED) == []
    assert [item.labels for item in observations_named(results, "service_active")] == [(("unit", "slurmd"),)]


@pytest.mark.parametrize(
    "config",
    [
        Config(required=("slurmd", "munge")),
        Config(required=("slurmd", "munge"), wanted=("munge",), guessed=("required",)),
        Config(required=("slurmd", "munge"), wanted=("munge",), guessed=("wanted",)),
    ],
)
def test_unit_in_settings_must_be_installed(config):
    assert codes(findings(services, NOT_INSTALLED, config)) == ["services/inactive"]


@pytest.mark.parametrize("loaded", ["masked", "error", "bad-setting"])
def test_installed_unit_named_only_by_profile_must_run(loaded):
    text = f"{unit_text('slurmd')}\n{unit_text('munge', 'dead', loaded=loaded)}"
    assert codes(findings(services, host("slurmd", "munge", text=text), GUESSED)) == ["services/inactive"]


@pytest.mark.parametrize("state", ["good", "reloading", "refreshing"])
def test_unit_that_reloads_is_active(state):
    results = run_check(services, slurmd(state), REQUIRED)
    (active,) = observations_named(results, "service_active")
    assert (active.value, active.labels) == (1, (("unit", "slurmd"),))


@pytest.mark.parametrize(("state", "job"), [("starting", "12"), ("stopping", "12"), ("stopping", ""), ("dead", "12")])
def test_unit_that_changes_state_only_warns(state, job):
    (finding,) = findings(services, slurmd(state, job=job), REQUIRED)
    assert (finding.code, finding.severity) == ("services/changing", Severity.WARNING)


# --- restarts


def test_repeated_restarts_warn_also_while_unit_is_active():
    (finding,) = [
        item
        for item in run_rounds(services, [slurmd(restarts=0), slurmd(restarts=2), slurmd(restarts=4)], REQUIRED)
        if not hasattr(item, "value")
    ]
    assert (finding.code, finding.severity) == ("services/restarting", Severity.WARNING)
    assert finding.message == "systemd restarted slurmd 4 times within an hour (it is active, running)"


def test_few_or_old_restarts_give_no_finding():
    hosts = [slurmd(restarts=count) for count in (100, 101, 103)]
    assert [item for item in run_rounds(services, hosts, REQUIRED) if not hasattr(item, "value")] == []


def test_old_systemd_without_restart_count_is_read():
    assert findings(services, slurmd(restarts=None), REQUIRED) == []


# --- unreadable states


def test_missing_systemctl_fails_run():
    error = run_until_error(services, host("munge", text="x"), REQUIRED)[1]
    assert error == "cannot query the units in required and wanted: systemctl is missing"


def test_failed_systemctl_fails_run():
    output = ProgramResult(1, "", "Failed to connect to bus: Host is down\n")
    error = run_until_error(services, host("slurmd", output=output), REQUIRED)[1]
    assert error == "systemctl: exit status 1: Failed to connect to bus: Host is down"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no state of slurmd"),
        ("N/A", "no state of slurmd"),
        (f"{unit_text('slurmd')}\n{unit_text('munge')}", "2 units reported, 1 requested"),
        (unit_text("slurmd").replace("active", "aktiv"), "no state of slurmd: 'Result=success NRestarts=0 Id=slurmd"),
        (unit_text("slurmd").replace("LoadState=loaded\n", ""), "no state of slurmd"),
        (unit_text("slurmd").replace("SubState=running", "SubState="), "no state of slurmd"),
    ],
)
def test_invalid_state_fails_run(text, error):
    assert error in run_until_error(services, host("slurmd", text=text), REQUIRED)[1]


@given(st.one_of(st.text(max_size=60), st.text("=\nIdactiveSubStateLoad ", max_size=200)))
def test_parse_rejects_garbage(text):
    assert parse_or_error(parse, text, ["slurmd"])[1].startswith("systemctl: ")


@pytest.mark.parametrize("unit", ["", "a b", "slurm*", "-p", "a/b", "getty@", "getty@.service", "é"])
def test_validate_rejects_invalid_unit_with_hint(unit):
    assert validate(Config(required=(unit,))) == (
        f'required: "{unit}" is not a unit name like "slurmd" or "data.mount"'
    )
    assert (validate(Config(wanted=(unit,))) or "").startswith("wanted: ")


def test_validate_accepts_units_of_every_kind():
    units = ("slurmd", "munge.service", "data-a\\x2db.mount", "getty@tty1.service", "dbus.socket", "multi-user.target")
    assert validate(Config(required=units)) is None


# --- stories


def test_failed_slurmd_drains_until_active_again():
    story = Story(services, REQUIRED).run_check(slurmd())
    story.run_check(slurmd("failed"))
    assert not story.drained
    story.run_check(slurmd("failed"), minutes=1)
    assert story.drained
    assert not story.requeued
    story.run_checks(slurmd("failed"), 10).reboot().run_checks(slurmd("failed"), 2)
    assert story.drained
    story.run_check(slurmd()).run_check(slurmd())
    assert not story.drained


@pytest.mark.parametrize("minutes", [0.2, 1, 5])
def test_slow_slurmd_restart_never_drains(minutes):
    story = Story(services, REQUIRED).run_check(slurmd())
    story.run_checks(slurmd("stopping", job="7"), 10, minutes).run_checks(slurmd("dead", job="7"), 10, minutes)
    story.run_checks(slurmd("starting", job="7"), 10, minutes)
    assert not story.drained
    assert story.run_checks(slurmd(), 2).codes == []


def test_slurmd_down_in_one_run_does_not_drain():
    story = Story(services, REQUIRED).run_check(slurmd("dead")).run_check(slurmd(), minutes=1)
    assert not story.drained
    assert story.conditions == {}


def test_required_unit_waiting_for_auto_restart_drains():
    assert Story(services, REQUIRED).run_check(slurmd("loop")).run_check(slurmd("loop"), minutes=1).drained


def test_wanted_unit_warns_and_never_drains():
    story = Story(services, Config(wanted=("slurmd",))).run_checks(slurmd("failed"), 20)
    assert story.codes == ["services/wanted_inactive"]
    assert not story.drained
    assert story.run_checks(slurmd(), 2).codes == []


def test_restarts_warn_and_clear_after_an_hour():
    story = (
        Story(services, REQUIRED)
        .run_check(slurmd(restarts=0))
        .run_check(slurmd(restarts=9))
        .run_check(slurmd(restarts=9))
    )
    assert story.codes == ["services/restarting"]
    assert not story.drained
    assert story.run_checks(slurmd(restarts=9), 14).codes == []
