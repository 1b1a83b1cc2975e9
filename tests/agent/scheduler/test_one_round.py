"""Tests of one round without a daemon: what it counts, what is history, and what stays unknown."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import NOW

from healthd.agent.kernel_log.source import RawLine
from healthd.agent.scheduler import one_round
from healthd.agent.settings import registry
from healthd.agent.settings.config import KernelLogConfig, Settings
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import Check
from healthd.agent.worker.client import Reply, Request, WorkerClient
from healthd.agent.worker.process import Setup
from healthd.agent.worker.requests import Run
from healthd.agent.worker.results import make_result, run_started_at
from healthd.common.model import (
    Clears,
    Finding,
    Health,
    Outcome,
    Severity,
)

ROOT = Path(__file__).parents[3]
XID = "NVRM: Xid (PCI:0000:61:00): {}, pid=4711, name=python3, GPU has fallen off the bus."


def lines(*numbers: int, history: bool = True) -> list[RawLine]:
    return [RawLine(1000.0 + 60 * place, XID.format(number), history) for place, number in enumerate(numbers)]


def look(
    kernel_log: one_round.KernelLogReader | None, tables: dict[str, Any] | None = None, **checks: Check
) -> one_round.RoundResult:
    """Run a round of gpu_xid or of `checks`. Kernel checks need no worker."""
    known = checks or {"gpu_xid": registry.built_in_checks()["gpu_xid"]}
    loaded = resolve_settings({"checks": tables or {}}, "file", {}, known)
    runner = WorkerClient(Setup(), "", time.monotonic)
    try:
        return one_round.run_round(loaded, known, runner, kernel_log)
    finally:
        runner.close(1.0)


def test_what_this_boots_kernel_log_holds_is_history_and_no_judgement():
    found = look(lambda: lines(79, 79, 13))
    assert found.verdict.health is Health.HEALTHY
    told = [(c.code, c.severity, c.count, c.history) for c in found.verdict.conditions]
    assert sorted(told) == [("gpu_xid/13", Severity.INFO, 1, True), ("gpu_xid/79", Severity.INFO, 2, True)]
    (result,) = found.results
    assert {finding.severity for finding in result.findings} == {Severity.INFO}


def test_what_the_kernel_says_while_the_round_runs_counts():
    assert look(lambda: lines(79, history=False)).verdict.health is Health.UNHEALTHY


def test_a_severity_of_the_site_holds_for_kernel_events_too():
    tables = {"gpu_xid": {"severity": {"gpu_xid/79": "warning"}}}
    assert look(lambda: lines(79, history=False), tables).verdict.health is Health.WARNING


UNCORRECTED = "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x12)"


@pytest.mark.parametrize(("history", "severity"), [(True, Severity.INFO), (False, Severity.CRITICAL)])
def test_a_check_that_looks_and_listens_tells_both(history, severity):
    check = {"memory_edac": registry.built_in_checks()["memory_edac"]}
    found = look(lambda: [RawLine(1000.0, UNCORRECTED, history)], **check)
    (result,) = found.results
    assert (result.outcome, len(found.runs)) == (Outcome.COMPLETED, 1)
    assert ("memory_edac/uncorrected", severity) in {(one.code, one.severity) for one in result.findings}
    assert ("memory_edac/uncorrected", severity) in {(one.code, one.severity) for one in found.verdict.conditions}


def test_a_log_that_cannot_be_read_takes_nothing_from_what_such_a_check_looked_at():
    def refused() -> list[RawLine]:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    found = look(refused, memory_edac=registry.built_in_checks()["memory_edac"])
    assert [result.outcome for result in found.results] == [Outcome.COMPLETED]


def test_a_quiet_log_is_a_completed_run():
    (result,) = look(list).results
    assert (result.check, result.outcome, result.findings) == ("gpu_xid", Outcome.COMPLETED, ())


def test_a_log_that_cannot_be_read_is_a_failed_run_and_the_node_is_unknown():
    def refused() -> list[RawLine]:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    found = look(refused)
    assert found.verdict.health is Health.UNKNOWN
    assert found.verdict.unknown == ("gpu_xid failed: /dev/kmsg: cannot be read: Operation not permitted",)


def test_without_a_log_nothing_is_said_of_it():
    found = look(None)
    assert (found.results, found.verdict.health) == ((), Health.HEALTHY)


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        (Settings(), True),
        (Settings(kernel_log=KernelLogConfig("journal")), True),
        (Settings(kernel_log=KernelLogConfig("off")), False),
        (Settings(kernel_log=KernelLogConfig("/tmp/fifo")), False),  # reading would take lines from the daemon
        (Settings(root="/srv/tree"), False),
    ],
)
def test_the_kernel_log_is_that_of_this_machine_or_none(settings, read):
    assert (one_round.kernel_log_reader(settings) is not None) is read


# --- runs in a worker


@pytest.fixture(autouse=True)
def _workers_find_healthd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def site(folder: Path, **texts: str) -> dict[str, Check]:
    """Write checks of a site and return them loaded."""
    folder.chmod(0o755)
    for name, text in texts.items():
        file = folder / f"{name}.py"
        file.write_text(f"import time\nfrom healthd.common.model import *\ndef run(host, config, past):\n    {text}\n")
        file.chmod(0o644)
    return {name: registry.load_site(str(folder / f"{name}.py")) for name in texts}


def look_at_site(
    folder: Path, tables: dict[str, Any] | None = None, more: str = "", **texts: str
) -> one_round.RoundResult:
    known = site(folder, **texts)
    loaded = resolve_settings(
        {"checks": tables or {}, **({"round_timeout_seconds": 1.5} if more else {})}, "file", {}, known
    )
    runner = WorkerClient(Setup(checks_dir=str(folder)), "", time.monotonic)
    try:
        return one_round.run_round(loaded, known, runner, None)
    finally:
        runner.close(1.0)


WARNS = "yield Finding(Severity.DEGRADED, 'fan/slow', 'fan1', 'fan1 turns slowly', confirm_seconds=60.0)"


def test_a_finding_that_would_have_to_last_counts_at_once(tmp_path):
    found = look_at_site(tmp_path, fan=WARNS)
    assert found.verdict.health is Health.DEGRADED
    document = one_round.round_json(found)
    assert document["conditions"][0]["state"] == "open"
    assert document["results"][0]["findings"][0]["confirm_seconds"] == 60.0


def test_what_a_run_found_before_it_failed_counts(tmp_path):
    found = look_at_site(tmp_path, fan=f"{WARNS}; raise RuntimeError('no more')")
    assert found.verdict.health is Health.DEGRADED
    assert found.results[0].error == "no more"


def test_the_other_checks_run_when_one_does_not_answer(tmp_path):
    tables = {"a": {"timeout_seconds": 0.3}}
    found = look_at_site(tmp_path, tables, a="time.sleep(20); yield", b="yield from ()")
    assert [r.outcome for r in found.results] == [Outcome.TIMED_OUT, Outcome.COMPLETED]
    assert found.verdict.health is Health.UNKNOWN


def test_a_round_that_is_out_of_time_ends_without_its_last_checks(tmp_path):
    texts = {"a": "time.sleep(2.0); yield from ()", "b": "yield from ()"}
    found = look_at_site(tmp_path, more="short", **texts)
    assert [r.outcome for r in found.results] == [Outcome.COMPLETED, Outcome.TIMED_OUT]
    assert found.results[1].error == "the round ran out of time before this run"


# --- results


def silent_check() -> Check:
    module = ModuleType("fan")

    def overdue(config: Any, seconds: float) -> list[Finding]:
        return [Finding(Severity.WARNING, "fan/hang", "", f"silent for {seconds:.0f} s", Clears.PASS)]

    module.overdue = overdue  # type: ignore[attr-defined]
    return Check("fan", module)


def reply(outcome: Outcome, seconds: float = 1.0) -> Reply:
    return Reply(Request("fan", 10.0, Run("fan", "", {})), outcome, seconds)


@pytest.mark.parametrize("outcome", [Outcome.TIMED_OUT, Outcome.STUCK])
def test_what_silence_means_is_the_checks_to_say(outcome):
    check = silent_check()
    result = make_result(check, check.config(), reply(outcome), started=99.0, silent_seconds=30.0)
    assert [finding.message for finding in result.findings] == ["silent for 30 s"]
    assert (result.started, result.duration_seconds) == (99.0, 1.0)


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.FAILED])
def test_who_answers_is_not_silent(outcome):
    check = silent_check()
    assert make_result(check, check.config(), reply(outcome), 100.0, 30.0).findings == ()


def test_a_check_without_its_turn_was_not_silent():
    check = silent_check()
    assert make_result(check, check.config(), reply(Outcome.TIMED_OUT, 0.0), 100.0, 0.0).findings == ()


def test_a_run_that_answered_began_at_the_moment_that_its_check_was_told_to_the_last_bit():
    assert run_started_at(ran(told=NOW + 0.1), ended=NOW + 1.3) == NOW + 0.1
    assert run_started_at(ran(told=NOW + 0.1, outcome=Outcome.FAILED), ended=NOW + 1.3) == NOW + 0.1


def test_a_run_without_an_answer_began_by_the_clock_of_now():
    assert run_started_at(ran(told=None, outcome=Outcome.TIMED_OUT), ended=NOW + 1.0) == NOW


def ran(told: float | None, outcome: Outcome = Outcome.COMPLETED) -> Reply:
    """Return the reply of a run that took one second."""
    return Reply(Request("fan", 10.0, Run("fan", "", {})), outcome, 1.0, answered=told is not None, message_time=told)
