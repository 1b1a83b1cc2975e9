"""services: systemd units that this node needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import codes, findings, observed, refusal, rounds, run_check, until_it_fails
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem, captured

from healthd.agent.conditions.absorb import as_configured
from healthd.agent.settings.config import CheckConfig
from healthd.checks import services
from healthd.checks.services import Config, parse, validate
from healthd.common.model import Clears, Severity
from healthd.host.host import Host
from healthd.host.program import ProgramResult

ASK = ("systemctl", "show", "-p", "Id,ActiveState,SubState,LoadState,Result,Job,NRestarts")
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


def shown(unit: str, state: str = "good", restarts: int | None = 0, job: str = "", loaded: str = "loaded") -> str:
    """Return a unit in the output format of systemd 252."""
    active, sub = STATES[state].split()
    lines = ["Result=exit-code" if state in ("failed", "loop") else "Result=success"]
    lines += [] if restarts is None else [f"NRestarts={restarts}"]
    lines += [f"Id={unit}.service", f"LoadState={loaded}", f"ActiveState={active}", f"SubState={sub}", f"Job={job}"]
    return "\n".join([*lines, ""])


def host(*units: str, text: str = "", ran: ProgramResult | OSError | None = None) -> Host:
    """Return a node whose systemctl prints `text` for `units`."""
    return Host("/nonexistent", system=FakeSystem("/nonexistent", {(*ASK, *units): ran or ProgramResult(0, text, "")}))


def slurmd(state: str = "good", **more: object) -> Host:
    return host("slurmd", text=shown("slurmd", state, **more))


REQUIRED = Config(required=("slurmd",))


def healthy(_tmp_path: Path) -> tuple[Host, Config]:
    text = f"{shown('slurmd')}\n{shown('munge')}\n{shown('chronyd')}"
    return host("slurmd", "munge", "chronyd", text=text), Config(required=("slurmd", "munge"), wanted=("chronyd",))


def test_units_that_are_active_give_no_finding(tmp_path):
    assert findings(services, *healthy(tmp_path)) == []


def test_without_units_nothing_is_asked():
    assert run_check(services, host(ran=OSError("must not run"))) == []


def test_a_real_systemd_is_understood():
    names = "good broken looping slowstart waits slowstop stopped hidden absent dbus dbus.socket multi-user.target"
    units = tuple(names.split())
    found = findings(services, host(*units, text=captured("systemctl_show_252.txt")), Config(required=units))
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
def test_a_required_unit_that_is_not_active_is_degraded_after_a_minute(state):
    (finding,) = findings(services, slurmd(state), REQUIRED)
    assert (finding.code, finding.severity, finding.clears) == ("services/inactive", Severity.DEGRADED, Clears.PASS)
    assert (finding.subject, finding.confirm_seconds, finding.shared_cause) == ("slurmd", 60.0, True)
    assert finding.expects == "required"


def test_a_wanted_unit_that_is_not_active_warns():
    (finding,) = findings(services, slurmd("failed"), Config(wanted=("slurmd",)))
    assert (finding.code, finding.severity) == ("services/wanted_inactive", Severity.WARNING)
    assert finding.expects == "wanted"


def test_a_unit_that_is_required_and_wanted_is_required_and_asked_for_once():
    found = findings(services, slurmd("failed"), Config(required=("slurmd",), wanted=("slurmd",)))
    assert codes(found) == ["services/inactive"]


def test_what_only_a_profile_requires_warns():
    config: CheckConfig = Config(required=("slurmd",), guessed=("required",))
    (finding,) = findings(services, slurmd("failed"), config)
    assert as_configured(finding, config).severity is Severity.WARNING


GUESSED = Config(required=("slurmd", "munge"), guessed=("required",))
NOT_INSTALLED = host("slurmd", "munge", text=f"{shown('slurmd')}\n{shown('munge', 'dead', loaded='not-found')}")


def test_what_only_a_profile_names_and_this_site_does_not_have_is_nothing():
    """Slurm with auth/slurm does not need munge."""
    given_ = run_check(services, NOT_INSTALLED, GUESSED)
    assert findings(services, NOT_INSTALLED, GUESSED) == []
    assert [item.labels for item in observed(given_, "service_active")] == [(("unit", "slurmd"),)]


@pytest.mark.parametrize(
    "config",
    [
        Config(required=("slurmd", "munge")),
        Config(required=("slurmd", "munge"), wanted=("munge",), guessed=("required",)),
        Config(required=("slurmd", "munge"), wanted=("munge",), guessed=("wanted",)),
    ],
)
def test_what_somebody_names_must_be_installed(config):
    assert codes(findings(services, NOT_INSTALLED, config)) == ["services/inactive"]


@pytest.mark.parametrize("loaded", ["masked", "error", "bad-setting"])
def test_what_only_a_profile_names_and_is_installed_must_run(loaded):
    text = f"{shown('slurmd')}\n{shown('munge', 'dead', loaded=loaded)}"
    assert codes(findings(services, host("slurmd", "munge", text=text), GUESSED)) == ["services/inactive"]


@pytest.mark.parametrize("state", ["good", "reloading", "refreshing"])
def test_a_unit_that_reads_its_settings_again_is_active(state):
    given_ = run_check(services, slurmd(state), REQUIRED)
    (active,) = observed(given_, "service_active")
    assert (active.value, active.labels) == (1, (("unit", "slurmd"),))


@pytest.mark.parametrize(("state", "job"), [("starting", "12"), ("stopping", "12"), ("stopping", ""), ("dead", "12")])
def test_a_unit_on_its_way_only_warns(state, job):
    (finding,) = findings(services, slurmd(state, job=job), REQUIRED)
    assert (finding.code, finding.severity) == ("services/changing", Severity.WARNING)


# --- restarts


def test_a_unit_that_systemd_starts_again_and_again_warns_also_while_it_is_up():
    (finding,) = [
        item
        for item in rounds(services, [slurmd(restarts=0), slurmd(restarts=2), slurmd(restarts=4)], REQUIRED)
        if not hasattr(item, "value")
    ]
    assert (finding.code, finding.severity) == ("services/restarting", Severity.WARNING)
    assert finding.message == "systemd restarted slurmd 4 times within an hour (it is active, running)"


def test_a_few_restarts_or_many_of_long_ago_are_nothing():
    hosts = [slurmd(restarts=count) for count in (100, 101, 103)]
    assert [item for item in rounds(services, hosts, REQUIRED) if not hasattr(item, "value")] == []


def test_an_old_systemd_that_counts_no_restarts_is_understood():
    assert findings(services, slurmd(restarts=None), REQUIRED) == []


# --- unreadable states


def test_without_systemctl_it_is_unknown_whether_units_run():
    error = until_it_fails(services, host("munge", text="x"), REQUIRED)[1]
    assert error == "cannot query the units in required and wanted: systemctl is missing"


def test_a_systemd_that_cannot_be_asked_is_unknown():
    ran = ProgramResult(1, "", "Failed to connect to bus: Host is down\n")
    error = until_it_fails(services, host("slurmd", ran=ran), REQUIRED)[1]
    assert error == "systemctl: exit status 1: Failed to connect to bus: Host is down"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no state of slurmd"),
        ("N/A", "no state of slurmd"),
        (f"{shown('slurmd')}\n{shown('munge')}", "2 units reported, 1 requested"),
        (shown("slurmd").replace("active", "aktiv"), "no state of slurmd: 'Result=success NRestarts=0 Id=slurmd"),
        (shown("slurmd").replace("LoadState=loaded\n", ""), "no state of slurmd"),
        (shown("slurmd").replace("SubState=running", "SubState="), "no state of slurmd"),
    ],
)
def test_what_is_no_state_is_unknown(text, words):
    assert words in until_it_fails(services, host("slurmd", text=text), REQUIRED)[1]


@given(st.one_of(st.text(max_size=60), st.text("=\nIdactiveSubStateLoad ", max_size=200)))
def test_garbage_is_never_a_state(text):
    assert refusal(parse, text, ["slurmd"])[1].startswith("systemctl: ")


@pytest.mark.parametrize("unit", ["", "a b", "slurm*", "-p", "a/b", "getty@", "getty@.service", "é"])
def test_what_is_no_unit_is_refused_with_a_hint(unit):
    assert validate(Config(required=(unit,))) == (
        f'required: "{unit}" is not a unit name like "slurmd" or "data.mount"'
    )
    assert (validate(Config(wanted=(unit,))) or "").startswith("wanted: ")


def test_units_of_every_kind_are_accepted():
    units = ("slurmd", "munge.service", "data-a\\x2db.mount", "getty@tty1.service", "dbus.socket", "multi-user.target")
    assert validate(Config(required=units)) is None


# --- stories


def test_a_slurmd_that_failed_drains_until_it_is_back():
    story = Story(services, REQUIRED).look(slurmd())
    story.look(slurmd("failed"))
    assert not story.drained
    story.look(slurmd("failed"), minutes=1)
    assert story.drained
    assert not story.requeued
    story.looks(slurmd("failed"), 10).reboot().looks(slurmd("failed"), 2)
    assert story.drained
    story.look(slurmd()).look(slurmd())
    assert not story.drained


@pytest.mark.parametrize("minutes", [0.2, 1, 5])
def test_a_slurmd_that_is_restarted_never_drains_however_long_it_takes(minutes):
    story = Story(services, REQUIRED).look(slurmd())
    story.looks(slurmd("stopping", job="7"), 10, minutes).looks(slurmd("dead", job="7"), 10, minutes)
    story.looks(slurmd("starting", job="7"), 10, minutes)
    assert not story.drained
    assert story.looks(slurmd(), 2).codes == []


def test_a_slurmd_that_is_down_in_one_look_does_not_drain():
    story = Story(services, REQUIRED).look(slurmd("dead")).look(slurmd(), minutes=1)
    assert not story.drained
    assert story.conditions == {}


def test_a_required_unit_that_only_waits_to_be_started_again_drains():
    assert Story(services, REQUIRED).look(slurmd("loop")).look(slurmd("loop"), minutes=1).drained


def test_a_wanted_unit_warns_and_never_drains():
    story = Story(services, Config(wanted=("slurmd",))).looks(slurmd("failed"), 20)
    assert story.codes == ["services/wanted_inactive"]
    assert not story.drained
    assert story.looks(slurmd(), 2).codes == []


def test_restarts_warn_never_drain_and_are_forgotten_after_an_hour():
    story = Story(services, REQUIRED).look(slurmd(restarts=0)).look(slurmd(restarts=9)).look(slurmd(restarts=9))
    assert story.codes == ["services/restarting"]
    assert not story.drained
    assert story.looks(slurmd(restarts=9), 14).codes == []
