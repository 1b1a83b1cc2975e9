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


def raw_lines(*numbers: int, history: bool = True) -> list[RawLine]:
    return [RawLine(1000.0 + 60 * position, XID.format(number), history) for position, number in enumerate(numbers)]


def run_gpu_xid(
    kernel_log: one_round.KernelLogReader | None, tables: dict[str, Any] | None = None, **checks: Check
) -> one_round.RoundResult:
    """Run a round of gpu_xid or of `checks`. Kernel checks need no worker."""
    known_checks = checks or {"gpu_xid": registry.built_in_checks()["gpu_xid"]}
    loaded = resolve_settings({"checks": tables or {}}, "file", {}, known_checks)
    client = WorkerClient(Setup(), "", time.monotonic)
    try:
        return one_round.run_round(loaded, known_checks, client, kernel_log)
    finally:
        client.close(1.0)


def test_kernel_lines_from_this_boot_are_history():
    round_result = run_gpu_xid(lambda: raw_lines(79, 79, 13))
    assert round_result.verdict.health is Health.HEALTHY
    found_conditions = [(c.code, c.severity, c.count, c.history) for c in round_result.verdict.conditions]
    assert sorted(found_conditions) == [("gpu_xid/13", Severity.INFO, 1, True), ("gpu_xid/79", Severity.INFO, 2, True)]
    (result,) = round_result.results
    assert {finding.severity for finding in result.findings} == {Severity.INFO}


def test_kernel_line_during_round_counts():
    assert run_gpu_xid(lambda: raw_lines(79, history=False)).verdict.health is Health.UNHEALTHY


def test_severity_from_site_applies_to_kernel_events():
    tables = {"gpu_xid": {"severity": {"gpu_xid/79": "warning"}}}
    assert run_gpu_xid(lambda: raw_lines(79, history=False), tables).verdict.health is Health.WARNING


UNCORRECTED = "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x12)"


@pytest.mark.parametrize(("history", "severity"), [(True, Severity.INFO), (False, Severity.CRITICAL)])
def test_check_with_run_and_kernel_events_reports_both(history, severity):
    check = {"memory_edac": registry.built_in_checks()["memory_edac"]}
    round_result = run_gpu_xid(lambda: [RawLine(1000.0, UNCORRECTED, history)], **check)
    (result,) = round_result.results
    assert (result.outcome, len(round_result.runs)) == (Outcome.COMPLETED, 1)
    assert ("memory_edac/uncorrected", severity) in {(item.code, item.severity) for item in result.findings}
    assert ("memory_edac/uncorrected", severity) in {
        (item.code, item.severity) for item in round_result.verdict.conditions
    }


def test_unreadable_kernel_log_keeps_run_result():
    def refuse() -> list[RawLine]:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    round_result = run_gpu_xid(refuse, memory_edac=registry.built_in_checks()["memory_edac"])
    assert [result.outcome for result in round_result.results] == [Outcome.COMPLETED]


def test_kernel_log_without_events_is_completed_run():
    (result,) = run_gpu_xid(list).results
    assert (result.check, result.outcome, result.findings) == ("gpu_xid", Outcome.COMPLETED, ())


def test_unreadable_kernel_log_is_failed_run():
    def refuse() -> list[RawLine]:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    round_result = run_gpu_xid(refuse)
    assert round_result.verdict.health is Health.UNKNOWN
    assert round_result.verdict.unknown == ("gpu_xid failed: /dev/kmsg: cannot be read: Operation not permitted",)


def test_round_without_kernel_log_has_no_kernel_results():
    round_result = run_gpu_xid(None)
    assert (round_result.results, round_result.verdict.health) == ((), Health.HEALTHY)


@pytest.mark.parametrize(
    ("settings", "is_read"),
    [
        (Settings(), True),
        (Settings(kernel_log=KernelLogConfig("journal")), True),
        (Settings(kernel_log=KernelLogConfig("off")), False),
        (Settings(kernel_log=KernelLogConfig("/tmp/fifo")), False),  # reading would take lines from the daemon
        (Settings(root="/srv/tree"), False),
    ],
)
def test_kernel_log_reader_reads_only_this_machine(settings, is_read):
    assert (one_round.kernel_log_reader(settings) is not None) is is_read


# --- runs in a worker


@pytest.fixture(autouse=True)
def _workers_find_healthd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def site_checks(folder: Path, **texts: str) -> dict[str, Check]:
    """Write checks of a site and return them loaded."""
    folder.chmod(0o755)
    for name, text in texts.items():
        file = folder / f"{name}.py"
        file.write_text(f"import time\nfrom healthd.common.model import *\ndef run(host, config, past):\n    {text}\n")
        file.chmod(0o644)
    return {name: registry.load_site(str(folder / f"{name}.py")) for name in texts}


def run_site_checks(
    folder: Path, tables: dict[str, Any] | None = None, short_round: str = "", **texts: str
) -> one_round.RoundResult:
    known_checks = site_checks(folder, **texts)
    loaded = resolve_settings(
        {"checks": tables or {}, **({"round_timeout_seconds": 1.5} if short_round else {})}, "file", {}, known_checks
    )
    client = WorkerClient(Setup(checks_dir=str(folder)), "", time.monotonic)
    try:
        return one_round.run_round(loaded, known_checks, client, None)
    finally:
        client.close(1.0)


DEGRADED_FINDING = "yield Finding(Severity.DEGRADED, 'fan/slow', 'fan1', 'fan1 turns slowly', confirm_seconds=60.0)"


def test_finding_with_confirm_time_counts_at_once(tmp_path):
    round_result = run_site_checks(tmp_path, fan=DEGRADED_FINDING)
    assert round_result.verdict.health is Health.DEGRADED
    document = one_round.round_json(round_result)
    assert document["conditions"][0]["state"] == "open"
    assert document["results"][0]["findings"][0]["confirm_seconds"] == 60.0


def test_finding_before_failure_counts(tmp_path):
    round_result = run_site_checks(tmp_path, fan=f"{DEGRADED_FINDING}; raise RuntimeError('no more')")
    assert round_result.verdict.health is Health.DEGRADED
    assert round_result.results[0].error == "no more"


def test_other_checks_run_after_time_out(tmp_path):
    tables = {"a": {"timeout_seconds": 0.3}}
    round_result = run_site_checks(tmp_path, tables, a="time.sleep(20); yield", b="yield from ()")
    assert [r.outcome for r in round_result.results] == [Outcome.TIMED_OUT, Outcome.COMPLETED]
    assert round_result.verdict.health is Health.UNKNOWN


def test_round_without_time_left_skips_last_checks(tmp_path):
    texts = {"a": "time.sleep(2.0); yield from ()", "b": "yield from ()"}
    round_result = run_site_checks(tmp_path, short_round="short", **texts)
    assert [r.outcome for r in round_result.results] == [Outcome.COMPLETED, Outcome.TIMED_OUT]
    assert round_result.results[1].error == "the round ran out of time before this run"


# --- results


def check_with_overdue() -> Check:
    module = ModuleType("fan")

    def overdue(config: Any, seconds: float) -> list[Finding]:
        return [Finding(Severity.WARNING, "fan/hang", "", f"silent for {seconds:.0f} s", Clears.PASS)]

    module.overdue = overdue  # type: ignore[attr-defined]
    return Check("fan", module)


def reply(outcome: Outcome, seconds: float = 1.0) -> Reply:
    return Reply(Request("fan", 10.0, Run("fan", "", {})), outcome, seconds)


@pytest.mark.parametrize("outcome", [Outcome.TIMED_OUT, Outcome.STUCK])
def test_make_result_calls_overdue_without_answer(outcome):
    check = check_with_overdue()
    result = make_result(check, check.config(), reply(outcome), started=99.0, silent_seconds=30.0)
    assert [finding.message for finding in result.findings] == ["silent for 30 s"]
    assert (result.started, result.duration_seconds) == (99.0, 1.0)


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.FAILED])
def test_make_result_does_not_call_overdue_after_answer(outcome):
    check = check_with_overdue()
    assert make_result(check, check.config(), reply(outcome), 100.0, 30.0).findings == ()


def test_make_result_does_not_call_overdue_for_skipped_run():
    check = check_with_overdue()
    assert make_result(check, check.config(), reply(Outcome.TIMED_OUT, 0.0), 100.0, 0.0).findings == ()


def test_run_started_at_is_start_reported_by_worker():
    assert run_started_at(run_reply(message_time=NOW + 0.1), ended=NOW + 1.3) == NOW + 0.1
    assert run_started_at(run_reply(message_time=NOW + 0.1, outcome=Outcome.FAILED), ended=NOW + 1.3) == NOW + 0.1


def test_run_started_at_without_answer_is_computed_from_now():
    assert run_started_at(run_reply(message_time=None, outcome=Outcome.TIMED_OUT), ended=NOW + 1.0) == NOW


def run_reply(message_time: float | None, outcome: Outcome = Outcome.COMPLETED) -> Reply:
    """Return the reply of a run that took one second."""
    return Reply(
        Request("fan", 10.0, Run("fan", "", {})),
        outcome,
        1.0,
        answered=message_time is not None,
        message_time=message_time,
    )
