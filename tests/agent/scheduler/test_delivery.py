"""Tests of the delivery of event lines to the worker: one write at a time, never before the lines are saved."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from healthd.agent.conditions.events import FLUSH_SECONDS
from healthd.agent.daemon import Daemon
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import AppendEvents, TakeInventory
from healthd.common.model import Outcome
from tests.agent.test_daemon_guards import daemon_with_check, run_until, settings


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with daemon_with_check(tmp_path, "clock") as new_daemon:
        yield new_daemon


def written_events(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "state_dir/events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def pending_events(daemon: Daemon) -> list[str]:
    return [json.loads(line)["event"] for line in daemon.store.ledger.outbox.lines]


def reply(request: Request, outcome: Outcome, error: str = "") -> Reply:
    return Reply(request, outcome, 0.0, error, True, 2)


def append_operation(request: Request) -> AppendEvents:
    assert isinstance(request.operation, AppendEvents)
    return request.operation


def test_events_are_sent_once_ledger_is_saved(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.store.unsaved
    assert not daemon.replies.delivery.is_due
    daemon.publish(round_ended=False)
    run_until(daemon, lambda: "started" not in pending_events(daemon))
    assert [e["event"] for e in written_events(tmp_path)][:2] == ["started", "check_enabled"]


def test_events_are_not_sent_if_ledger_cannot_be_saved(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, text: str) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr("healthd.agent.conditions.store.rewrite_file", fail)
    daemon.publish(round_ended=False)
    assert daemon.store.save_failed
    assert not daemon.replies.delivery.is_due


def test_later_events_wait_for_pending_request(daemon: Daemon) -> None:
    daemon.store.save()
    delivery = daemon.replies.delivery
    request = delivery.request()
    daemon.store.stream.emit_stopped("requested")
    daemon.store.save()
    assert not delivery.is_due
    delivery.handle_reply(reply(request, Outcome.COMPLETED))
    assert (pending_events(daemon), delivery.is_due) == (["stopped"], True)
    assert delivery.status.journal_lost_total == 2


def test_failed_append_is_repeated_next_round_with_may_repeat(daemon: Daemon) -> None:
    daemon.store.save()
    delivery = daemon.replies.delivery
    first = delivery.request()
    delivery.handle_reply(reply(first, Outcome.COMPLETED))
    daemon.store.stream.emit_stopped("requested")
    daemon.store.save()
    second = delivery.request()
    assert (append_operation(first).may_repeat, append_operation(second).may_repeat) == (True, False)
    delivery.handle_reply(reply(second, Outcome.FAILED, "OSError: [Errno 28] No space left on device"))
    assert any(
        problem.endswith("1 events have not been written: OSError: [Errno 28] No space left on device")
        for problem, _ in daemon.problems()
    )
    tasks: list[Request] = []
    daemon.scheduler.queue.add_task = tasks.append  # type: ignore[method-assign]
    daemon.replies.add_tasks(round_ended=False)
    assert tasks == []
    daemon.replies.add_tasks(round_ended=True)
    (third,) = [request for request in tasks if request.kind is AppendEvents]
    assert third.operation == replace(append_operation(second), may_repeat=True)
    delivery.handle_reply(reply(third, Outcome.COMPLETED))
    assert (delivery.status.failures_total, delivery.status.problem, delivery.status.waiting) == (1, "", 0)


def test_finish_does_not_wait_for_busy_worker(daemon: Daemon, tmp_path: Path) -> None:
    daemon.store.save()
    client = daemon.client
    client.send(Request("nvml", 60.0, TakeInventory(gpus=False)))
    daemon.replies.finish(30.0)
    assert written_events(tmp_path) == []
    run_until(daemon, lambda: not client.is_busy)


def test_finish_waits_for_pending_append_and_sends_rest(daemon: Daemon, tmp_path: Path) -> None:
    daemon.store.save()
    daemon.client.send(daemon.replies.delivery.request())
    daemon.store.stream.emit_stopped("requested")
    daemon.replies.finish(30.0)
    assert written_events(tmp_path)[-1]["event"] == "stopped"
    assert '"stopped"' in (tmp_path / "state_dir/ledger.json").read_text()
    assert pending_events(daemon) == []


def test_job_ended_sets_flush_time(daemon: Daemon) -> None:
    daemon.answer({"command": "job-ended"}, "root (uid 0)", True)
    ended_at = daemon.store.ledger.emitted.job_ended
    assert ended_at == pytest.approx(daemon.now(), abs=60)
    daemon.now = lambda: ended_at + FLUSH_SECONDS
    daemon.store.stream._now = daemon.now
    daemon.store.stream.flush_after_job()
    assert daemon.store.ledger.emitted.job_ended == 0.0


def test_reload_emits_changed_checks(tmp_path: Path) -> None:
    loaded = settings(tmp_path, only_check="clock")
    daemon = Daemon(lambda _running: loaded)
    daemon.start()
    try:
        daemon.store.stream.mark_written(daemon.store.ledger.outbox.lines)
        daemon.reload()
        assert pending_events(daemon) == []
        loaded = settings(tmp_path, only_check="cpu")
        daemon.reload()
        emitted = [json.loads(line) for line in daemon.store.ledger.outbox.lines]
        assert [(e["event"], e["check"]) for e in emitted] == [("check_disabled", "clock"), ("check_enabled", "cpu")]
    finally:
        daemon.shut_down()
