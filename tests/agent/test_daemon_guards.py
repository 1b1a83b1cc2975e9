"""Tests of guards: an internal error behind a boundary costs only one input. The daemon runs in this process, with the
error patched in.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from healthd.agent.conditions import absorb, endings, intake
from healthd.agent.daemon import Daemon
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.scheduler import kernel_events
from healthd.agent.scheduler.replies import Received
from healthd.agent.scheduler.worker_queue import MIN_REPEAT_SECONDS
from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig, Loaded
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import Check
from healthd.agent.slurm.reconcile import ReconcileReport
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import ReadJournal, SaveCopy, TakeInventory, WriteFile, operation_name
from healthd.checks import gpu_xid
from healthd.common import guard
from healthd.common.model import (
    CheckResult,
    DrainRecord,
    Finding,
    KernelEvent,
    Leave,
    Mode,
    NodeState,
    Outcome,
    Severity,
)
from healthd.common.values import encode
from healthd.host import wakeup

NOW = 1_800_000_000.0


def xid(code: int, pci: str = "0000:61:00") -> KernelEvent:
    event = make_event(RawLine(NOW, f"NVRM: Xid (PCI:{pci}): {code}, pid=1, name=x, GPU has fallen off the bus."), "b")
    assert event is not None
    return event


def settings(tmp_path: Path, only_check: str = "") -> tuple[Loaded, dict[str, Check]]:
    """Return settings. `only_check` is the name of the only enabled check."""
    checks = registry.built_in_checks()
    table = {
        **{name: str(tmp_path / name) for name in ("runtime_dir", "state_dir", "checks_dir")},
        "profile": "none",
        "baseline_file": "",
        "nvml": {"fake": "dgx-h100"},
        "metrics": {"listen": "off"},
        "kernel_log": {"source": "off"},
        "checks": {
            name: {"enabled": False} for name in checks if only_check not in ("", name) and not checks[name].per
        },
    }
    return resolve_settings(table, "test", {}, checks), checks


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    new_daemon = Daemon(lambda _running: settings(tmp_path))
    new_daemon.start()
    yield new_daemon
    new_daemon.shut_down()


def codes(daemon: Daemon) -> list[str]:
    return sorted(code for code, _ in daemon.store.conditions)


def fail(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("internal error")


def test_failing_step_for_single_event_reports_rule_failed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    absorb_events = absorb.absorb_events

    def fail_on_xid_48(conditions: Any, check: str, findings: Any, *arguments: Any) -> Any:
        return (
            fail()
            if any(f.code == "gpu_xid/48" for f in findings)
            else absorb_events(conditions, check, findings, *arguments)
        )

    monkeypatch.setattr(absorb, "absorb_events", fail_on_xid_48)
    daemon.kernel_events.take_events([xid(79), xid(48), xid(43, "0000:5d:00")])
    assert codes(daemon) == ["gpu_xid/43", "gpu_xid/79", "kernel/rule_failed"]
    assert dict(guard.dropped) == {"kernel_log": 1}
    assert any("ZeroDivisionError" in problem for problem, _ in daemon.problems())


def test_failing_step_for_every_event_reports_rule_failed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(intake, "coalesce_events", fail)
        daemon.kernel_events.take_events([xid(79), xid(48)])
    rule_failed = daemon.store.conditions["kernel/rule_failed", ""]
    assert (rule_failed.state.value, rule_failed.severity.name, rule_failed.count) == ("open", "WARNING", 2)
    assert "Xid (PCI:0000:61:00): 48" in rule_failed.message
    assert (codes(daemon), dict(guard.dropped)) == (["kernel/rule_failed"], {"kernel_log": 2})
    daemon.kernel_events.take_events([xid(79)])
    assert codes(daemon) == ["gpu_xid/79", "kernel/rule_failed"]


def test_failing_event_among_thousand_is_found_by_bisection(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluating each event separately would take minutes, because each pass covers all events."""
    apply_events, calls = daemon.kernel_events.apply_events, []

    def count_calls(events: list[KernelEvent]) -> None:
        calls.append(len(events))
        return fail() if any(event.code == "48" for event in events) else apply_events(events)

    monkeypatch.setattr(daemon.kernel_events, "apply_events", count_calls)
    saves = []
    monkeypatch.setattr(daemon.store, "save", lambda: saves.append(1))
    events = [xid(31, f"{number:04x}:01:00") for number in range(1, 1000)]
    daemon.kernel_events.take_events([*events[:700], xid(48), *events[700:], xid(79)])
    assert len(calls) <= 25
    assert saves == [1]
    assert set(codes(daemon)) == {"gpu_xid/79", "gpu_xid/31", "gpu_xid/others", "kernel/rule_failed"}


def test_log_for_event_storm_is_limited_but_has_draining_events(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def take_log_lines() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("kernel: ")]
        caplog.clear()
        return lines

    caplog.set_level("INFO", "healthd")
    mild = [replace(xid(31, f"{n:04x}:01:00"), time=NOW, last_time=NOW) for n in range(1, 1001)]
    draining = [xid(79, f"{n:04x}:02:00") for n in range(1, 16)]
    monkeypatch.setattr(daemon.kernel_events, "_now", lambda: NOW)
    daemon.kernel_events.take_events([*mild[:600], *draining, *mild[600:]])
    lines = take_log_lines()
    assert [sum(f": {code}," in line for line in lines) for code in (31, 79)] == [
        kernel_events.MAX_LOG_LINES,
        len(draining),
    ]
    daemon.kernel_events.read_log()
    assert take_log_lines() == [], "the count is logged once a minute"
    monkeypatch.setattr(daemon.kernel_events, "_now", lambda: NOW + kernel_events.LOG_PERIOD_SECONDS)
    daemon.kernel_events.read_log()
    assert take_log_lines() == [
        f"kernel: further events that were not logged individually: {1000 - kernel_events.MAX_LOG_LINES} of kind xid"
    ]
    daemon.kernel_events.read_log()
    assert take_log_lines() == []
    daemon.kernel_events.take_events([xid(43, "0000:5d:00")])
    assert len(take_log_lines()) == 1, "in the next minute"


@pytest.mark.parametrize(
    ("method", "input_name"),
    [
        ("kernel_events.job_finder.add_jobs", "kernel_log"),
        ("kernel_events._log_incidents", "kernel_log"),
        ("scheduler.runs_after", "worker"),
        ("scheduler.queue.run_after_event", "worker"),
    ],
)
def test_error_beside_evaluation_keeps_condition_and_is_counted(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, method: str, input_name: str
) -> None:
    path, name = method.rsplit(".", 1)
    monkeypatch.setattr(operator.attrgetter(path)(daemon), name, fail)
    monkeypatch.setattr(daemon.kernel_events.listener, "read", lambda: [xid(79)])
    daemon.read_inputs()
    assert (codes(daemon), dict(guard.dropped)) == (["gpu_xid/79"], {input_name: 1})


def test_errors_in_job_finder_and_hot_unplug_are_counted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon.kernel_events.job_finder, "step", fail)
    monkeypatch.setattr(daemon.hot_unplug, "read", fail)
    daemon.read_inputs()
    assert dict(guard.dropped) == {"slurm": 1, "device_removals": 1}


def test_error_in_textfile_is_counted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = replace(daemon.settings.metrics, textfile="/tmp/healthd.prom")
    loaded = replace(daemon.configured.loaded, settings=replace(daemon.settings, metrics=metrics))
    daemon.configured = replace(daemon.configured, loaded=loaded)
    monkeypatch.setattr("healthd.agent.metrics.families.families", fail)
    daemon.write_textfile()
    assert dict(guard.dropped) == {"metrics": 1}


def test_failing_event_is_not_evaluated_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = gpu_xid._judge

    def fail_on_xid_48(own_events: list[KernelEvent], *arguments: Any) -> Any:
        return fail() if any(event.code == "48" for event in own_events) else judge(own_events, *arguments)

    monkeypatch.setattr(gpu_xid, "_judge", fail_on_xid_48)
    for number in (48, 79, 43):
        daemon.kernel_events.take_events([xid(number)])
    assert codes(daemon) == ["gpu_xid/43", "gpu_xid/79", "kernel/rule_failed"]
    assert dict(guard.dropped) == {"kernel_log": 1}


def test_unusable_worker_replies_are_counted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in (TakeInventory(gpus=True), ReadJournal("b", 1, 2, 10), SaveCopy("a", "b", ())):
        reply = Reply(Request("", 1.0, operation), Outcome.COMPLETED, 0.1, answered=True)
        daemon.handle_received(daemon.replies.handle(reply, Received()))
    assert dict(guard.dropped) == {"worker": 1, "kernel_log": 1}
    assert daemon.kernel_events.listener.journal.problem.startswith(
        "internal error in healthd with the journal's lines"
    )


@pytest.mark.parametrize(
    ("outcome", "error", "expected"),
    [
        (Outcome.FAILED, "OSError: [Errno 28] No space left on device", "[Errno 28] No space left on device"),
        (Outcome.TIMED_OUT, "no answer within 20 s", "no answer within 20 s"),
        (Outcome.STUCK, "", "stuck"),
    ],
)
def test_failed_ledger_copy_is_reported_until_success(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, error: str, expected: str
) -> None:
    def copy_problems() -> list[str]:
        return [problem for problem, _ in daemon.problems() if problem.startswith(f"{tmp_path}/state_dir: ")]

    request = Request("state_dir", 1.0, SaveCopy("a", "b", ()))
    for answer in (Reply(request, outcome, 0.1, error), Reply(request, Outcome.COMPLETED, 0.1)):
        daemon.replies.handle(answer, Received())
        if answer.outcome is outcome:
            (problem,) = copy_problems()
            assert problem.endswith(expected)
            assert daemon.store.uncopied, "the copy is retried"
    assert copy_problems() == []


def test_failed_textfile_is_reported_until_success_and_logged_once(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    def textfile_problems() -> list[str]:
        return [sentence for sentence, command in daemon.problems() if command == "healthd doctor"]

    request = Request("textfile", 1.0, WriteFile("/u/a.prom", ""))
    failed_reply = Reply(request, Outcome.FAILED, 0.1, "Untrusted: /u belongs to user 1001; it must belong to root")
    expected = "cannot write /u/a.prom (metrics.textfile): Untrusted: /u belongs to user 1001; it must belong to root"
    for reply in (failed_reply, failed_reply):
        daemon.replies.handle(reply, Received())
    assert textfile_problems() == [expected]
    assert [record.getMessage() for record in caplog.records] == [expected]
    daemon.replies.handle(Reply(request, Outcome.STUCK, 0.1), Received())
    assert textfile_problems() == ["cannot write /u/a.prom (metrics.textfile): stuck"]
    daemon.replies.handle(Reply(request, Outcome.COMPLETED, 0.1), Received())
    assert textfile_problems() == []


def test_slurm_record_is_copied_at_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    requested_tasks: list[str] = []
    monkeypatch.setattr(
        daemon.scheduler.queue, "add_task", lambda request: requested_tasks.append(operation_name(request.kind))
    )
    daemon.replies.add_tasks(round_ended=True)
    requested_tasks.clear()
    daemon.store.change(trusted_since=NOW)
    daemon.replies.add_tasks(round_ended=False)
    assert "save_copy" not in requested_tasks
    daemon.store.change(slurm=DrainRecord(reason="healthd: gpu_xid/79 0000:61:00.0: off the bus"))
    for _ in range(2):
        daemon.replies.add_tasks(round_ended=False)
    assert requested_tasks.count("save_copy") == 1


def test_clock_step_during_run_fails_and_repeats_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    offsets = [0.0]
    with daemon_with_check(tmp_path, "disk_space", now=lambda: time.time() + offsets[-1]) as daemon:
        started = time.monotonic()
        daemon.scheduler.queue.step()
        assert daemon.client.request is not None
        offsets.append(3600.0)
        run_until(daemon, lambda: bool(daemon.replies.results))
        result = daemon.replies.results["disk_space", ""]
        assert (result.outcome, result.error) == (Outcome.FAILED, "the clock was set while it ran")
        assert daemon.replies.outcomes == {("disk_space", "", "failed"): 1}
        assert caplog.text.count("check disk_space: failed: the clock was set while it ran") == 1
        assert "disk_space" not in daemon.store.past, "it would mix two clocks"
        run_until(daemon, lambda: is_round_over(daemon) and not daemon.client.is_busy)
        assert started < daemon.scheduler.queue.deadline - MIN_REPEAT_SECONDS <= time.monotonic()


def test_slow_worker_start_fails_no_run(tmp_path: Path) -> None:
    """Each start takes 5 s, on both clocks."""
    daemons: list[Daemon] = []

    def delayed(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + sum(5.0 * started_daemon.client.started_total for started_daemon in daemons)

    with daemon_with_check(tmp_path, "disk_space", now=delayed(time.time), monotonic=delayed(time.monotonic)) as daemon:
        daemons.append(daemon)
        daemon.client.renew()
        run_until(daemon, lambda: is_round_over(daemon))
        assert daemon.client.started_total == 2
        assert daemon.replies.outcomes == {("disk_space", "", "completed"): 1}


@contextlib.contextmanager
def daemon_with_check(tmp_path: Path, check: str, **clocks: Callable[[], float]) -> Iterator[Daemon]:
    """Run a daemon with one check."""
    daemon = Daemon(lambda _running: settings(tmp_path, only_check=check), **clocks)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.shut_down()


def is_round_over(daemon: Daemon) -> bool:
    queue = daemon.scheduler.queue
    return queue.status.number > 0 and not queue.is_running


def run_until(daemon: Daemon, is_done: Callable[[], bool], seconds: float = 240.0) -> None:
    """Run the worker's part of the daemon's loop until `is_done` returns True."""
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, "timed out"
        wakeup.poll(daemon.client.waits(), 0.05)
        daemon.handle_received(daemon.replies.step())


def test_ledger_that_causes_error_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Daemon(lambda _running: settings(tmp_path))
    first.start()
    first.kernel_events.take_events([xid(79)])
    first.shut_down()
    old_ledger = (tmp_path / "runtime_dir/ledger.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(
            "healthd.agent.conditions.ledger.without_future_times",
            lambda ledger, _now: fail() if ledger.events else ledger,
        )
        second = Daemon(lambda _running: settings(tmp_path))
        second.start()
    assert (codes(second), guard.dropped["ledger"]) == ([], 2), "the live ledger, and the last disk copy"
    assert (tmp_path / "runtime_dir/ledger.json.unreadable").read_text() == old_ledger
    assert encode(second.store.ledger)
    second.shut_down()


def test_dropped_events_are_evaluated_and_counted(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "healthd")
    daemon.kernel_events.take_events([xid(79), *(xid(31, f"{number:04x}:01:00") for number in range(1, 1281))])
    assert ("gpu_xid/79", "0000:61:00.0") in daemon.store.conditions
    assert (len(daemon.store.ledger.events), daemon.kernel_events.events_forgotten) == (500, 781)
    assert "781 kernel events were evaluated but are no longer kept" in caplog.text
    daemon.kernel_events.take_events([xid(79, "0000:5d:00"), xid(31, "0000:5d:00")])
    assert daemon.kernel_events.events_forgotten == 783
    assert caplog.text.count("no longer kept") == 1, "the next line comes at a thousand"


def test_poll_limits_sleep_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "MAX_SLEEP_SECONDS", 0.01)
    assert wakeup.poll([], 1e300) == set()
    assert wakeup.poll([], -1e300) == set()


def settings_in_mode_act(tmp_path: Path) -> tuple[Loaded, dict[str, Check]]:
    loaded, checks = settings(tmp_path)
    return replace(loaded, settings=replace(loaded.settings, mode=Mode.ACT)), checks


@pytest.mark.parametrize(("is_read", "is_kept"), [(False, True), (True, False)])
def test_unread_node_keeps_findings_from_idle_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool, is_kept: bool
) -> None:
    """While slurmctld is unreachable, no job is visible. Dropping the finding would return a faulty node to service."""
    daemon = Daemon(lambda _running: settings_in_mode_act(tmp_path))
    daemon.start()
    leftover = Finding(Severity.CRITICAL, "gpu_processes/leftover", "0000:1b:00.0", "in use by pid 3")
    now = time.time()
    result = CheckResult("gpu_processes", "", Outcome.COMPLETED, now, 0.1, (leftover,))
    config = daemon.configured.loaded.checks.get(result.run) or CheckConfig()
    loaded = replace(daemon.configured.loaded, checks={**daemon.configured.runs, result.run: config})
    daemon.configured = replace(daemon.configured, loaded=loaded)
    daemon.scheduler.reconfigure(daemon.configured)
    daemon.store.commit(intake.take_result(daemon.store.ledger, result, config, now).ledger)
    driver = daemon.controller._driver
    node = NodeState("n1", frozenset({"ALLOCATED"}))
    driver.status = replace(driver.status, node=node, read_at=now - 10_000)
    record = daemon.store.ledger.slurm
    report = ReconcileReport(record, node=node) if is_read else ReconcileReport(record, problem="slurmctld is away")
    monkeypatch.setattr(driver, "start", lambda *_: driver._finish(report))
    daemon.decide(round_ended=False)
    assert (leftover.key in daemon.store.conditions) is is_kept
    daemon.shut_down()


def test_not_requeued_jobs_are_logged_once_despite_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a report covers only some of the jobs."""
    caplog.set_level(logging.INFO, "healthd")
    daemon = Daemon(lambda _running: settings_in_mode_act(tmp_path))
    daemon.start()
    slurm_record, not_requeued = daemon.store.ledger.slurm, (("12", "has GPU a"), ("13", "has GPU b"))
    complete = ReconcileReport(slurm_record, not_requeued=not_requeued, settled=True)
    incomplete = ReconcileReport(slurm_record, not_requeued=not_requeued[:1], problem="slurmctld is away")
    unread = ReconcileReport(slurm_record, problem="slurmctld is away")
    reports = [complete, incomplete, complete, unread, complete, ReconcileReport(slurm_record, settled=True), complete]
    log_counts = []
    for report in reports:
        monkeypatch.setattr(daemon.controller._driver, "start", lambda *_, report=report: report)
        daemon.controller._retry_at = 0.0
        daemon.controller.reconcile_if_due(daemon.verdict, round_ended=True)
        log_counts.append(sum("is not requeued" in record.getMessage() for record in caplog.records))
    assert log_counts == [2, 2, 2, 2, 2, 2, 4], "logged again after a report without such jobs"
    daemon.shut_down()


def test_gpu_name_is_added_after_first_inventory(daemon: Daemon) -> None:
    daemon.kernel_events.take_events([xid(79)])
    daemon.decide(round_ended=False)
    gpu_name = "GPU has fallen off the bus, GPU 3 (GPU-00000003-"
    assert gpu_name not in str(daemon.snapshot().verdict.conditions[0].message)
    assert isinstance(daemon.controller.decision, Leave)
    assert gpu_name not in daemon.controller.decision.would
    run_until(daemon, lambda: bool(daemon.store.ledger.inventory.gpus))
    daemon.decide(round_ended=False)
    (lost_gpu,) = (c for c in daemon.snapshot().verdict.conditions if c.code == "gpu_xid/79")
    assert gpu_name in lost_gpu.message
    assert gpu_name in daemon.controller.decision.would
    lines = [line for line in daemon.store.ledger.outbox.lines if "gpu_xid/79" in line and gpu_name in line]
    assert any('"event":"seen_again"' in line for line in lines)


def test_repaired_node_may_resume_after_next_clean_run(tmp_path: Path) -> None:
    """No condition changes then, because `repaired` has already ended it."""
    with daemon_with_check(tmp_path, "disk_space") as daemon:
        run_until(daemon, lambda: bool(daemon.replies.results))
        replies, condition_store = daemon.replies, daemon.store
        clean = replace(replies.results["disk_space", ""], outcome=Outcome.COMPLETED, findings=())
        full = Finding(Severity.DEGRADED, "disk_space/full", "/", "/ is full")

        def record_run(result: CheckResult) -> bool:
            replies._record_result(result)
            condition_store.commit(
                intake.take_result(
                    condition_store.ledger, result, daemon.configured.runs[result.run], time.time()
                ).ledger
            )
            daemon.judge()
            return daemon.verdict.may_resume

        assert record_run(clean)
        assert not record_run(replace(clean, findings=(full,)))
        condition_store.set_conditions(
            endings.repaired(condition_store.conditions, full.code, None, "ann", time.time())
        )
        daemon.judge()
        assert not daemon.verdict.may_resume, "no check has run since"
        assert record_run(clean)


def test_reload_reaches_every_part(tmp_path: Path) -> None:
    loads = [settings(tmp_path), settings_in_mode_act(tmp_path)]
    daemon = Daemon(lambda _running: loads.pop(0))
    daemon.start()
    daemon.reload()
    assert daemon.configured.settings.mode is Mode.ACT
    assert daemon.kernel_events.configured is daemon.scheduler.configured is daemon.configured
    assert daemon.controller.settings is daemon.publisher.settings is daemon.settings
    parts = (daemon.kernel_events, daemon.scheduler, daemon.controller, daemon.publisher)
    configured_parts = [
        part for part in vars(daemon).values() if hasattr(part, "settings") or hasattr(part, "configured")
    ]
    assert all(part in (*parts, daemon.configured) for part in configured_parts), "a part that a reload does not reach"
    daemon.shut_down()
