"""Tests of observed conditions. Any user can forge a line of a followed file: it is displayed and triggers nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BOOT, NOW
from kernel_lines import event_of
from msgspec.structs import replace

from healthd.agent.conditions import intake, verdict
from healthd.agent.conditions.bounds import MAX_CONDITIONS
from healthd.agent.conditions.condition import ended
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.store import decode
from healthd.agent.daemon import Daemon
from healthd.agent.kernel_log.journal import parse_entry
from healthd.agent.kernel_log.log_reader import KernelLogReader
from healthd.agent.metrics.families import render
from healthd.agent.reporting.status import status_json
from healthd.agent.settings import registry
from healthd.agent.settings.config import is_kernel_log_forgeable
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.slurm.policy import Policy, decide
from healthd.common.model import (
    CheckResult,
    Clears,
    ConditionState,
    Ending,
    Finding,
    Health,
    KernelEvent,
    Mode,
    Outcome,
    Severity,
)
from healthd.common.values import encode

GPU = "0000:61:00.0"
XID_79 = "NVRM: Xid (PCI:0000:61:00): 79, pid=7, name=x, GPU has fallen off the bus."
XID_48 = "NVRM: Xid (PCI:0000:61:00): 48, pid=7, name=x, DBE (double bit error) detected"
LISTENERS = [(check, check.config()) for check in registry.built_in_checks().values() if check.reads_kernel_log]
EMPTY = Ledger(boot_id=BOOT)


def proven_event(line: str, at: float = NOW) -> KernelEvent:
    """Return an event of a source that cannot be forged."""
    return event_of(line, at, BOOT)


def forged_event(line: str, at: float = NOW) -> KernelEvent:
    return replace(proven_event(line, at), observed=True)


def take(ledger: Ledger, *events: KernelEvent, now: float = NOW) -> Ledger:
    found = intake.take_kernel_events(ledger, events, LISTENERS, now)
    assert not found.failures
    return found.ledger


def get_verdict(ledger: Ledger) -> verdict.Verdict:
    return verdict.judge(ledger.by_key(), {}, [], 0.0)


# --- which source is observed


@pytest.mark.parametrize(
    ("table", "flags", "observed"),
    [
        ({"source": "kmsg"}, {}, False),
        ({}, {}, False),
        ({"source": "journal"}, {}, False),
        ({"source": "off"}, {}, False),
        ({"source": "/var/log/kern.log"}, {}, True),
        ({"source": "/var/log/kern.log", "trust_file": False}, {}, True),
        ({"source": "/var/log/kern.log", "trust_file": True}, {}, False),
        ({}, {"kernel_log.source": ("--kernel-log", "/tmp/log")}, False),
        ({"source": "/var/log/kern.log"}, {"kernel_log.source": ("--kernel-log", "/tmp/log")}, False),
        ({"source": "/var/log/kern.log"}, {"mode": ("--mode", "act")}, True),
    ],
)
def test_kernel_log_is_forgeable_for_untrusted_file(
    table: dict[str, Any], flags: dict[str, tuple[str, Any]], observed: bool
) -> None:
    loaded = resolve_settings({"kernel_log": table}, "/etc/healthd/healthd.toml", flags, registry.built_in_checks())
    assert is_kernel_log_forgeable(loaded) is observed


@pytest.mark.parametrize("observed", [True, False])
def test_reader_marks_events_and_status_as_observed(tmp_path: Path, observed: bool) -> None:
    log = tmp_path / "kern.log"
    listener = KernelLogReader(str(log), "/", BOOT, False, time.time, time.monotonic, observed)
    listener.open()
    assert listener.status.problem == f"{log} does not exist yet"
    log.write_text(f"{XID_79}\n")
    (event,) = listener.read()
    listener.close()
    assert (event.observed, listener.status.observed, listener.status.alive) == (observed, observed, True)
    assert ("only observed" in listener.status.problem) is observed
    assert next(listener.sources).problem == listener.status.problem


@pytest.mark.parametrize("transport", ["kernel", "syslog", "journal", "stdout", "audit", "driver", None])
def test_parse_entry_accepts_only_kernel_transport(transport: str | None) -> None:
    """A client can set any field except those that begin with "_"."""
    timestamp = SimpleNamespace(timestamp=timedelta(seconds=12.5))
    entry = {
        "MESSAGE": XID_79,
        "SYSLOG_IDENTIFIER": "kernel",
        "SYSLOG_FACILITY": 0,
        "__MONOTONIC_TIMESTAMP": timestamp,
        "__REALTIME_TIMESTAMP": datetime.fromtimestamp(NOW),
        "__CURSOR": "s=1",
        **({"_TRANSPORT": transport} if transport else {}),
    }
    line = parse_entry(entry, accept_injected=False)
    assert (line is not None) is (transport == "kernel")
    assert line is None or (line.text, line.usec, line.time) == (XID_79, 12_500_000, NOW)


# --- effect of observed conditions


def test_observed_condition_is_displayed_and_never_drains() -> None:
    ledger = take(EMPTY, forged_event(XID_79))
    (condition,) = ledger.conditions
    assert (condition.code, condition.severity, condition.state) == (
        "gpu_xid/79",
        Severity.CRITICAL,
        ConditionState.OPEN,
    )
    node_verdict = get_verdict(ledger)
    assert (node_verdict.conditions, node_verdict.causes, node_verdict.fault_time) == ((condition,), (), 0.0)
    assert (node_verdict.health, node_verdict.may_resume) == (Health.WARNING, True)
    decision = decide(node_verdict, None, ledger.slurm, Policy(Mode.ACT), NOW)
    assert getattr(decision, "would", None) == ""


def test_proven_event_replaces_observed_condition() -> None:
    ledger = take(take(EMPTY, forged_event(XID_79)), proven_event(XID_79, NOW + 1))
    (condition,) = ledger.conditions
    assert (condition.observed, condition.count, condition.first_seen) == (False, 1, NOW + 1)
    assert [cause.code for cause in get_verdict(ledger).causes] == ["gpu_xid/79"]
    expected = take(EMPTY, proven_event(XID_79, NOW + 1))
    assert replace(condition, last_sequence=1) == expected.conditions[0]


def test_forged_line_does_not_change_proven_condition() -> None:
    before = take(EMPTY, proven_event(XID_79))
    after = take(before, forged_event(XID_79.replace("name=x", "name=other"), NOW + 1), now=NOW + 1)
    assert after.conditions == before.conditions
    assert len(after.events) == 2, "lines of two sources are not coalesced"


def test_forged_line_does_not_repeat_proven_line() -> None:
    """A second Xid 74 within a day is more severe than the first."""
    xid = "NVRM: Xid (PCI:0000:61:00): 74, pid=7, name=x, NVLink: fatal error detected on link 3(0x0, 0x0, 0x0, 0x0)"
    (first,) = take(EMPTY, proven_event(xid, NOW + 60)).conditions
    (after_forged,) = take(take(EMPTY, forged_event(xid)), proven_event(xid, NOW + 60)).conditions
    (after_proven,) = take(take(EMPTY, proven_event(xid)), proven_event(xid, NOW + 60)).conditions
    assert after_proven.severity > first.severity
    assert after_forged.severity == first.severity


def test_forged_recovery_clears_only_observed_condition() -> None:
    lost, back = "nfs: server fs1 not responding, timed out", "nfs: server fs1 OK"
    proven = take(EMPTY, proven_event(lost))
    assert proven.conditions
    assert take(proven, forged_event(back, NOW + 1)).conditions == proven.conditions
    assert take(proven, proven_event(back, NOW + 1)).conditions == ()
    assert take(take(EMPTY, forged_event(lost)), forged_event(back, NOW + 1)).conditions == ()


def test_level_check_proves_observed_condition() -> None:
    ledger = take(EMPTY, forged_event("NVRM: GPU 0000:61:00.0: GPU has fallen off the bus."))
    (observed_condition,) = ledger.conditions
    finding = Finding(
        Severity.DEGRADED,
        observed_condition.code,
        observed_condition.subject,
        "it is gone",
        Clears.PASS,
        confirm_seconds=0.0,
    )
    result = CheckResult(observed_condition.check, "", Outcome.COMPLETED, NOW + 5, 0.1, (finding,))
    after = intake.take_result(ledger, result, LISTENERS[0][1], NOW + 5).ledger
    (condition,) = after.conditions
    assert (condition.observed, condition.severity, condition.clears, condition.message) == (
        False,
        Severity.DEGRADED,
        Clears.PASS,
        "it is gone",
    )
    assert get_verdict(after).causes == (condition,)


def test_forged_relapse_does_not_change_clears() -> None:
    ledger = take(EMPTY, forged_event(XID_79))
    ended_condition = ended(ledger.conditions[0], Ending.REBOOT, NOW + 5)
    (condition,) = take(
        replace(ledger, conditions=(), cleared=(ended_condition,)), proven_event(XID_79, NOW + 9), now=NOW + 9
    ).conditions
    assert condition.clears is Clears.REBOOT


def test_forged_parts_do_not_fold_proven_fault() -> None:
    parts = [forged_event(f"NVRM: Xid (PCI:{n:04x}:01:00): 79, pid=7, name=x, GPU has fallen") for n in range(1, 300)]
    ledger = take(EMPTY, *parts, proven_event(XID_48.replace("48", "79"), NOW + 1), *parts)
    assert len(ledger.conditions) == MAX_CONDITIONS
    assert [cause.subject for cause in get_verdict(ledger).causes] == [GPU]


def test_observed_is_kept_across_restart() -> None:
    ledger = take(EMPTY, forged_event(XID_79))
    restored = decode(encode(ledger), "ledger.json")
    assert (restored.conditions[0].observed, restored.events[0].observed) == (True, True)


# --- in the daemon


@pytest.fixture
def daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    checks = registry.built_in_checks()
    log = tmp_path / "kern.log"
    log.touch()
    table = {
        **{name: str(tmp_path / name) for name in ("runtime_dir", "state_dir", "checks_dir")},
        "mode": "act" if not request.param else "observe",  # in act, the job would be looked up by scontrol
        "profile": "none",
        "baseline_file": "",
        "nvml": {"fake": "dgx-h100"},
        "metrics": {"listen": "off"},
        "kernel_log": {"source": str(log), **request.param},
        "checks": {name: {"enabled": False} for name in checks if name != "gpu_xid" and not checks[name].per},
    }
    new_daemon = Daemon(lambda _running: (resolve_settings(table, "test", {}, checks), checks))
    new_daemon.start()
    new_daemon.store.change(trusted_since=0.0)
    new_daemon.kernel_events.read_log()
    with open(log, "a") as file:
        file.write(f"{XID_79}\n")
    new_daemon.kernel_events.read_log()
    new_daemon.judge()
    yield new_daemon
    new_daemon.shut_down()


@pytest.mark.parametrize("daemon", [{}], indirect=True)
def test_daemon_reports_observed_only_kernel_log(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.verdict.causes == ()
    ((problem, _command),) = daemon.problems()
    assert problem.startswith(f"kernel log: lines of {tmp_path}/kern.log are only observed")
    assert "kernel_log.trust_file = true" in problem
    assert b"\nhealthd_kernel_log_observed_only 1.0\n" in render(daemon.snapshot())
    assert b'healthd_condition_enforced{check="gpu_xid",code="gpu_xid/79",subject="0000:61:00.0"} 0.0' in render(
        daemon.snapshot()
    )
    document = status_json(daemon.snapshot())
    assert [(c["code"], c["severity"], c["observed"]) for c in document["conditions"]] == [
        ("gpu_xid/79", "critical", True)
    ]
    assert document["kernel_log"]["observed"] is True
    assert document["kernel_log"]["alive"] is True


@pytest.mark.parametrize("daemon", [{"trust_file": True}], indirect=True)
def test_daemon_acts_on_trusted_file(daemon: Daemon) -> None:
    assert [cause.code for cause in daemon.verdict.causes] == ["gpu_xid/79"]
    assert daemon.problems() == ()
    assert b"\nhealthd_kernel_log_observed_only 0.0\n" in render(daemon.snapshot())
