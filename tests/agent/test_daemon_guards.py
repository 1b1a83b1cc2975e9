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


def settings(tmp_path: Path, only: str = "") -> tuple[Loaded, dict[str, Check]]:
    """Return settings. `only_check` is the name of the only enabled check."""
    checks = registry.built_in_checks()
    table = {
        **{name: str(tmp_path / name) for name in ("runtime_dir", "state_dir", "checks_dir")},
        "profile": "none",
        "baseline_file": "",
        "nvml": {"fake": "dgx-h100"},
        "metrics": {"listen": "off"},
        "kernel_log": {"source": "off"},
        "checks": {name: {"enabled": False} for name in checks if only not in ("", name) and not checks[name].per},
    }
    return resolve_settings(table, "test", {}, checks), checks


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(lambda _running: settings(tmp_path))
    made.start()
    yield made
    made.shut_down()


def codes(daemon: Daemon) -> list[str]:
    return sorted(code for code, _ in daemon.store.conditions)


def raises(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("internal error")


def test_an_event_on_which_a_later_step_fails_is_told_of_and_costs_no_other(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = absorb.absorb_events

    def fails_on_48(conditions: Any, check: str, found: Any, *rest: Any) -> Any:
        return raises() if any(f.code == "gpu_xid/48" for f in found) else real(conditions, check, found, *rest)

    monkeypatch.setattr(absorb, "absorb_events", fails_on_48)
    daemon.kernel_events.take_events([xid(79), xid(48), xid(43, "0000:5d:00")])
    assert codes(daemon) == ["gpu_xid/43", "gpu_xid/79", "kernel/rule_failed"]
    assert dict(guard.dropped) == {"kernel_log": 1}
    assert any("ZeroDivisionError" in problem for problem, _ in daemon.problems())


def test_a_line_with_which_every_step_fails_is_told_all_the_same(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(intake, "coalesce_events", raises)
        daemon.kernel_events.take_events([xid(79), xid(48)])
    found = daemon.store.conditions["kernel/rule_failed", ""]
    assert (found.state.value, found.severity.name, found.count) == ("open", "WARNING", 2)
    assert "Xid (PCI:0000:61:00): 48" in found.message
    assert (codes(daemon), dict(guard.dropped)) == (["kernel/rule_failed"], {"kernel_log": 2})
    daemon.kernel_events.take_events([xid(79)])
    assert codes(daemon) == ["gpu_xid/79", "kernel/rule_failed"]


def test_one_bad_event_among_a_thousand_is_found_by_halves(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluating each event separately would take minutes, because each pass covers all events."""
    real, calls = daemon.kernel_events.apply_events, []

    def counted(events: list[KernelEvent]) -> None:
        calls.append(len(events))
        return raises() if any(event.code == "48" for event in events) else real(events)

    monkeypatch.setattr(daemon.kernel_events, "apply_events", counted)
    saves = []
    monkeypatch.setattr(daemon.store, "save", lambda: saves.append(1))
    events = [xid(31, f"{number:04x}:01:00") for number in range(1, 1000)]
    daemon.kernel_events.take_events([*events[:700], xid(48), *events[700:], xid(79)])
    assert len(calls) <= 25
    assert saves == [1]
    assert set(codes(daemon)) == {"gpu_xid/79", "gpu_xid/31", "gpu_xid/others", "kernel/rule_failed"}


def test_a_storm_of_different_lines_has_few_lines_in_the_log_and_what_drains_each(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("kernel: ")]
        caplog.clear()
        return lines

    caplog.set_level("INFO", "healthd")
    mild = [replace(xid(31, f"{n:04x}:01:00"), time=NOW, last_time=NOW) for n in range(1, 1001)]
    bad = [xid(79, f"{n:04x}:02:00") for n in range(1, 16)]
    monkeypatch.setattr(daemon.kernel_events, "_now", lambda: NOW)
    daemon.kernel_events.take_events([*mild[:600], *bad, *mild[600:]])
    lines = logged()
    assert [sum(f": {code}," in line for line in lines) for code in (31, 79)] == [kernel_events.MAX_LOG_LINES, len(bad)]
    daemon.kernel_events.read_log()
    assert logged() == [], "the count is logged once a minute"
    monkeypatch.setattr(daemon.kernel_events, "_now", lambda: NOW + kernel_events.LOG_PERIOD_SECONDS)
    daemon.kernel_events.read_log()
    assert logged() == [
        f"kernel: further events that were not logged individually: {1000 - kernel_events.MAX_LOG_LINES} of kind xid"
    ]
    daemon.kernel_events.read_log()
    assert logged() == []
    daemon.kernel_events.take_events([xid(43, "0000:5d:00")])
    assert len(logged()) == 1, "in the next minute"


@pytest.mark.parametrize(
    ("where", "whose"),
    [
        ("kernel_events.job_finder.add_jobs", "kernel_log"),
        ("kernel_events._log_incidents", "kernel_log"),
        ("scheduler.runs_after", "worker"),
        ("scheduler.queue.run_after_event", "worker"),
    ],
)
def test_what_is_only_beside_the_judging_costs_no_fault_and_is_counted_where_the_mistake_is(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, where: str, whose: str
) -> None:
    path, name = where.rsplit(".", 1)
    monkeypatch.setattr(operator.attrgetter(path)(daemon), name, raises)
    monkeypatch.setattr(daemon.kernel_events.listener, "read", lambda: [xid(79)])
    daemon.read_inputs()
    assert (codes(daemon), dict(guard.dropped)) == (["gpu_xid/79"], {whose: 1})


def test_what_slurm_says_of_jobs_and_devices_that_go_cost_the_turn_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.kernel_events.job_finder, "step", raises)
    monkeypatch.setattr(daemon.hot_unplug, "read", raises)
    daemon.read_inputs()
    assert dict(guard.dropped) == {"slurm": 1, "device_removals": 1}


def test_a_metrics_file_that_cannot_be_made_costs_the_turn_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = replace(daemon.settings.metrics, textfile="/tmp/healthd.prom")
    loaded = replace(daemon.configured.loaded, settings=replace(daemon.settings, metrics=metrics))
    daemon.configured = replace(daemon.configured, loaded=loaded)
    monkeypatch.setattr("healthd.agent.metrics.families.families", raises)
    daemon.write_textfile()
    assert dict(guard.dropped) == {"metrics": 1}


def test_what_could_not_be_judged_is_judged_no_more_and_told_of(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gpu_xid._judge

    def stumbles(own: list[KernelEvent], *others: Any) -> Any:
        return raises() if any(event.code == "48" for event in own) else real(own, *others)

    monkeypatch.setattr(gpu_xid, "_judge", stumbles)
    for number in (48, 79, 43):
        daemon.kernel_events.take_events([xid(number)])
    assert codes(daemon) == ["gpu_xid/43", "gpu_xid/79", "kernel/rule_failed"]
    assert dict(guard.dropped) == {"kernel_log": 1}


def test_an_answer_of_the_worker_that_nothing_can_be_made_of_means_that_the_check_could_not_look(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in (TakeInventory(gpus=True), ReadJournal("b", 1, 2, 10), SaveCopy("a", "b", ())):
        reply = Reply(Request("", 1.0, asked), Outcome.COMPLETED, 0.1, answered=True)
        daemon.handle_received(daemon.replies.handle(reply, Received()))
    assert dict(guard.dropped) == {"worker": 1, "kernel_log": 1}
    assert daemon.kernel_events.listener.journal.problem.startswith(
        "internal error in healthd with the journal's lines"
    )


@pytest.mark.parametrize(
    ("outcome", "error", "told"),
    [
        (Outcome.FAILED, "OSError: [Errno 28] No space left on device", "[Errno 28] No space left on device"),
        (Outcome.TIMED_OUT, "no answer within 20 s", "no answer within 20 s"),
        (Outcome.STUCK, "", "stuck"),
    ],
)
def test_a_copy_of_the_ledger_that_cannot_be_written_is_told_in_status_until_it_can(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, error: str, told: str
) -> None:
    def of_copy() -> list[str]:
        return [problem for problem, _ in daemon.problems() if problem.startswith(f"{tmp_path}/state_dir: ")]

    request = Request("state_dir", 1.0, SaveCopy("a", "b", ()))
    for answer in (Reply(request, outcome, 0.1, error), Reply(request, Outcome.COMPLETED, 0.1)):
        daemon.replies.handle(answer, Received())
        if answer.outcome is outcome:
            (problem,) = of_copy()
            assert problem.endswith(told)
            assert daemon.store.uncopied, "the copy is retried"
    assert of_copy() == []


def test_a_textfile_that_cannot_be_written_is_told_in_status_until_it_can_and_once_in_the_log(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [sentence for sentence, command in daemon.problems() if command == "healthd doctor"]

    request = Request("textfile", 1.0, WriteFile("/u/a.prom", ""))
    refused = Reply(request, Outcome.FAILED, 0.1, "Untrusted: /u belongs to user 1001; it must belong to root")
    why = "cannot write /u/a.prom (metrics.textfile): Untrusted: /u belongs to user 1001; it must belong to root"
    for reply in (refused, refused):
        daemon.replies.handle(reply, Received())
    assert told() == [why]
    assert [record.getMessage() for record in caplog.records] == [why]
    daemon.replies.handle(Reply(request, Outcome.STUCK, 0.1), Received())
    assert told() == ["cannot write /u/a.prom (metrics.textfile): stuck"]
    daemon.replies.handle(Reply(request, Outcome.COMPLETED, 0.1), Received())
    assert told() == []


def test_what_was_done_in_slurm_is_copied_at_once_and_the_rest_at_the_end_of_a_round(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(daemon.scheduler.queue, "add_task", lambda request: asked.append(operation_name(request.kind)))
    daemon.replies.add_tasks(round_ended=True)
    asked.clear()
    daemon.store.change(trusted_since=NOW)
    daemon.replies.add_tasks(round_ended=False)
    assert "save_copy" not in asked
    daemon.store.change(slurm=DrainRecord(reason="healthd: gpu_xid/79 0000:61:00.0: off the bus"))
    for _ in range(2):
        daemon.replies.add_tasks(round_ended=False)
    assert asked.count("save_copy") == 1


def test_a_clock_that_is_set_while_a_check_runs_fails_that_run_and_it_is_done_again_a_while_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = [0.0]
    with alone(tmp_path, "disk_space", now=lambda: time.time() + ahead[-1]) as daemon:
        began = time.monotonic()
        daemon.scheduler.queue.step()
        assert daemon.client.request is not None
        ahead.append(3600.0)
        go(daemon, lambda: bool(daemon.replies.results))
        result = daemon.replies.results["disk_space", ""]
        assert (result.outcome, result.error) == (Outcome.FAILED, "the clock was set while it ran")
        assert daemon.replies.outcomes == {("disk_space", "", "failed"): 1}
        assert caplog.text.count("check disk_space: failed: the clock was set while it ran") == 1
        assert "disk_space" not in daemon.store.past, "it would mix two clocks"
        go(daemon, lambda: a_round_is_over(daemon) and not daemon.client.is_busy)
        assert began < daemon.scheduler.queue.deadline - MIN_REPEAT_SECONDS <= time.monotonic()


def test_a_worker_that_takes_seconds_to_start_costs_no_run(tmp_path: Path) -> None:
    """Each start takes 5 s, on both clocks."""
    made: list[Daemon] = []

    def late(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + sum(5.0 * one.client.started_total for one in made)

    with alone(tmp_path, "disk_space", now=late(time.time), monotonic=late(time.monotonic)) as daemon:
        made.append(daemon)
        daemon.client.renew()
        go(daemon, lambda: a_round_is_over(daemon))
        assert daemon.client.started_total == 2
        assert daemon.replies.outcomes == {("disk_space", "", "completed"): 1}


@contextlib.contextmanager
def alone(tmp_path: Path, check: str, **clocks: Callable[[], float]) -> Iterator[Daemon]:
    """Run a daemon with one check."""
    daemon = Daemon(lambda _running: settings(tmp_path, only=check), **clocks)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.shut_down()


def a_round_is_over(daemon: Daemon) -> bool:
    rounds = daemon.scheduler.queue
    return rounds.status.number > 0 and not rounds.is_running


def go(daemon: Daemon, over: Callable[[], bool], seconds: float = 240.0) -> None:
    """Run the worker's part of the daemon's loop until `is_done` returns True."""
    end = time.monotonic() + seconds
    while not over():
        assert time.monotonic() < end, "timed out"
        wakeup.poll(daemon.client.waits(), 0.05)
        daemon.handle_received(daemon.replies.step())


def test_a_ledger_with_which_healthd_fails_is_kept_aside_and_a_new_one_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Daemon(lambda _running: settings(tmp_path))
    first.start()
    first.kernel_events.take_events([xid(79)])
    first.shut_down()
    before = (tmp_path / "runtime_dir/ledger.json").read_text()
    with monkeypatch.context() as broken:
        broken.setattr(
            "healthd.agent.conditions.ledger.without_future_times",
            lambda ledger, _now: raises() if ledger.events else ledger,
        )
        second = Daemon(lambda _running: settings(tmp_path))
        second.start()
    assert (codes(second), guard.dropped["ledger"]) == ([], 2), "the live ledger, and the last disk copy"
    assert (tmp_path / "runtime_dir/ledger.json.unreadable").read_text() == before
    assert encode(second.store.ledger)
    second.shut_down()


def test_of_more_events_than_are_kept_all_are_judged_and_it_is_said_how_many_are_no_longer_kept(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "healthd")
    daemon.kernel_events.take_events([xid(79), *(xid(31, f"{number:04x}:01:00") for number in range(1, 1281))])
    assert ("gpu_xid/79", "0000:61:00.0") in daemon.store.conditions
    assert (len(daemon.store.ledger.events), daemon.kernel_events.events_forgotten) == (500, 781)
    assert "781 kernel events were evaluated but are no longer kept" in caplog.text
    daemon.kernel_events.take_events([xid(79, "0000:5d:00"), xid(31, "0000:5d:00")])
    assert daemon.kernel_events.events_forgotten == 783
    assert caplog.text.count("no longer kept") == 1, "the next line comes at a thousand"


def test_a_sleep_that_no_poll_can_take_is_as_long_as_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "MAX_SLEEP_SECONDS", 0.01)
    assert wakeup.poll([], 1e300) == set()
    assert wakeup.poll([], -1e300) == set()


def acting(tmp_path: Path) -> tuple[Loaded, dict[str, Check]]:
    loaded, checks = settings(tmp_path)
    return replace(loaded, settings=replace(loaded.settings, mode=Mode.ACT)), checks


@pytest.mark.parametrize(("read", "stands"), [(False, True), (True, False)])
def test_a_look_that_could_not_read_the_node_ends_nothing_that_was_found_while_no_job_was_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool, stands: bool
) -> None:
    """While slurmctld is unreachable, no job is visible. Dropping the finding would return a faulty node to service."""
    daemon = Daemon(lambda _running: acting(tmp_path))
    daemon.start()
    held = Finding(Severity.CRITICAL, "gpu_processes/leftover", "0000:1b:00.0", "held by pid 3")
    now = time.time()
    result = CheckResult("gpu_processes", "", Outcome.COMPLETED, now, 0.1, (held,))
    config = daemon.configured.loaded.checks.get(result.run) or CheckConfig()
    loaded = replace(daemon.configured.loaded, checks={**daemon.configured.runs, result.run: config})
    daemon.configured = replace(daemon.configured, loaded=loaded)
    daemon.scheduler.reconfigure(daemon.configured)
    daemon.store.commit(intake.take_result(daemon.store.ledger, result, config, now).ledger)
    driver = daemon.controller._driver
    node = NodeState("n1", frozenset({"ALLOCATED"}))
    driver.status = replace(driver.status, node=node, read_at=now - 10_000)
    known = daemon.store.ledger.slurm
    report = ReconcileReport(known, node=node) if read else ReconcileReport(known, problem="slurmctld is away")
    monkeypatch.setattr(driver, "start", lambda *_: driver._finish(report))
    daemon.decide(round_ended=False)
    assert (held.key in daemon.store.conditions) is stands
    daemon.shut_down()


def test_who_is_not_requeued_is_told_once_also_where_looks_end_in_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a report covers only some of the jobs."""
    caplog.set_level(logging.INFO, "healthd")
    daemon = Daemon(lambda _running: acting(tmp_path))
    daemon.start()
    known, all_of_them = daemon.store.ledger.slurm, (("12", "has GPU a"), ("13", "has GPU b"))
    whole = ReconcileReport(known, not_requeued=all_of_them, settled=True)
    cut = ReconcileReport(known, not_requeued=all_of_them[:1], problem="slurmctld is away")
    unread = ReconcileReport(known, problem="slurmctld is away")
    looks = [whole, cut, whole, unread, whole, ReconcileReport(known, settled=True), whole]
    told = []
    for report in looks:
        monkeypatch.setattr(daemon.controller._driver, "start", lambda *_, report=report: report)
        daemon.controller._retry_at = 0.0
        daemon.controller.reconcile_if_due(daemon.verdict, round_ended=True)
        told.append(sum("is not requeued" in record.getMessage() for record in caplog.records))
    assert told == [2, 2, 2, 2, 2, 2, 4], "logged again after a report without such jobs"
    daemon.shut_down()


def test_a_fault_that_is_heard_before_the_gpus_are_known_is_named_in_status_reason_and_stream(daemon: Daemon) -> None:
    daemon.kernel_events.take_events([xid(79)])
    daemon.decide(round_ended=False)
    named = "GPU has fallen off the bus, GPU 3 (GPU-00000003-"
    assert named not in str(daemon.snapshot().verdict.conditions[0].message)
    assert isinstance(daemon.controller.decision, Leave)
    assert named not in daemon.controller.decision.would
    go(daemon, lambda: bool(daemon.store.ledger.inventory.gpus))
    daemon.decide(round_ended=False)
    (fallen,) = (c for c in daemon.snapshot().verdict.conditions if c.code == "gpu_xid/79")
    assert named in fallen.message
    assert named in daemon.controller.decision.would
    lines = [line for line in daemon.store.ledger.outbox.lines if "gpu_xid/79" in line and named in line]
    assert any('"event":"seen_again"' in line for line in lines)


def test_a_node_may_be_resumed_once_a_check_has_seen_the_repair_that_a_person_told_of_before(tmp_path: Path) -> None:
    """No condition changes then, because `repaired` has already ended it."""
    with alone(tmp_path, "disk_space") as daemon:
        go(daemon, lambda: bool(daemon.replies.results))
        replies, memory = daemon.replies, daemon.store
        clean = replace(replies.results["disk_space", ""], outcome=Outcome.COMPLETED, findings=())
        full = Finding(Severity.DEGRADED, "disk_space/full", "/", "/ is full")

        def look(result: CheckResult) -> bool:
            replies._record_result(result)
            memory.commit(
                intake.take_result(memory.ledger, result, daemon.configured.runs[result.run], time.time()).ledger
            )
            daemon.judge()
            return daemon.verdict.may_resume

        assert look(clean)
        assert not look(replace(clean, findings=(full,)))
        memory.set_conditions(endings.repaired(memory.conditions, full.code, None, "ann", time.time()))
        daemon.judge()
        assert not daemon.verdict.may_resume, "no check has run since"
        assert look(clean)


def test_a_reload_reaches_every_part_of_the_daemon(tmp_path: Path) -> None:
    loads = [settings(tmp_path), acting(tmp_path)]
    daemon = Daemon(lambda _running: loads.pop(0))
    daemon.start()
    daemon.reload()
    assert daemon.configured.settings.mode is Mode.ACT
    assert daemon.kernel_events.configured is daemon.scheduler.configured is daemon.configured
    assert daemon.controller.settings is daemon.publisher.settings is daemon.settings
    parts = (daemon.kernel_events, daemon.scheduler, daemon.controller, daemon.publisher)
    holding = [part for part in vars(daemon).values() if hasattr(part, "settings") or hasattr(part, "configured")]
    assert all(part in (*parts, daemon.configured) for part in holding), "a part that a reload does not reach"
    daemon.shut_down()
