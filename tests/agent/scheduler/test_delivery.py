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
from tests.agent.test_daemon_guards import alone, go, settings


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with alone(tmp_path, "clock") as made:
        yield made


def written(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "state_dir/events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def waiting(daemon: Daemon) -> list[str]:
    return [json.loads(line)["event"] for line in daemon.store.ledger.outbox.lines]


def reply(request: Request, outcome: Outcome, error: str = "") -> Reply:
    return Reply(request, outcome, 0.0, error, True, 2)


def lines_of(request: Request) -> AppendEvents:
    assert isinstance(request.operation, AppendEvents)
    return request.operation


def test_lines_go_to_the_worker_once_the_ledger_with_them_is_saved(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.store.unsaved
    assert not daemon.replies.delivery.is_due
    daemon.publish(round_ended=False)
    go(daemon, lambda: waiting(daemon) == [])
    assert [e["event"] for e in written(tmp_path)][:2] == ["started", "check_enabled"]


def test_a_ledger_that_cannot_be_saved_tells_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str, text: str) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr("healthd.agent.conditions.store.rewrite_file", broken)
    daemon.publish(round_ended=False)
    assert daemon.store.save_failed
    assert not daemon.replies.delivery.is_due


def test_while_lines_are_under_way_later_ones_wait(daemon: Daemon) -> None:
    daemon.store.save()
    delivery = daemon.replies.delivery
    request = delivery.request()
    daemon.store.stream.emit_stopped("requested")
    daemon.store.save()
    assert not delivery.is_due
    delivery.handle_reply(reply(request, Outcome.COMPLETED))
    assert (waiting(daemon), delivery.is_due) == (["stopped"], True)
    assert delivery.status.journal_lost_total == 2


def test_after_a_failure_the_next_round_gives_the_same_lines_and_says_that_they_may_be_there(daemon: Daemon) -> None:
    daemon.store.save()
    delivery = daemon.replies.delivery
    first = delivery.request()
    delivery.handle_reply(reply(first, Outcome.COMPLETED))
    daemon.store.stream.emit_stopped("requested")
    daemon.store.save()
    second = delivery.request()
    assert (lines_of(first).may_repeat, lines_of(second).may_repeat) == (True, False)
    delivery.handle_reply(reply(second, Outcome.FAILED, "OSError: [Errno 28] No space left on device"))
    assert any(
        problem.endswith("1 events have not been written: OSError: [Errno 28] No space left on device")
        for problem, _ in daemon.problems()
    )
    given: list[Request] = []
    daemon.scheduler.queue.add_task = given.append  # type: ignore[method-assign]
    daemon.replies.add_tasks(round_ended=False)
    assert given == []
    daemon.replies.add_tasks(round_ended=True)
    (third,) = [request for request in given if request.kind is AppendEvents]
    assert third.operation == replace(lines_of(second), may_repeat=True)
    delivery.handle_reply(reply(third, Outcome.COMPLETED))
    assert (delivery.status.failures_total, delivery.status.problem, delivery.status.waiting) == (1, "", 0)


def test_a_busy_worker_is_not_waited_for_with_the_last_words(daemon: Daemon, tmp_path: Path) -> None:
    daemon.store.save()
    runner = daemon.client
    runner.send(Request("nvml", 60.0, TakeInventory(gpus=False)))
    daemon.replies.finish(30.0)
    assert written(tmp_path) == []
    go(daemon, lambda: not runner.is_busy)


def test_what_the_worker_already_writes_is_waited_for_and_then_comes_the_rest(daemon: Daemon, tmp_path: Path) -> None:
    daemon.store.save()
    daemon.client.send(daemon.replies.delivery.request())
    daemon.store.stream.emit_stopped("requested")
    daemon.replies.finish(30.0)
    assert written(tmp_path)[-1]["event"] == "stopped"
    assert '"stopped"' in (tmp_path / "state_dir/ledger.json").read_text()
    assert waiting(daemon) == []


def test_the_epilogs_word_sets_the_time_of_the_flush_and_wakes_the_daemon_then(daemon: Daemon) -> None:
    daemon.answer({"command": "job-ended"}, "root (uid 0)", True)
    ended = daemon.store.ledger.emitted.job_ended
    assert ended == pytest.approx(daemon.now(), abs=60)
    daemon.now = lambda: ended + FLUSH_SECONDS
    daemon.store.stream._now = daemon.now
    daemon.store.stream.flush_after_job()
    assert daemon.store.ledger.emitted.job_ended == 0.0


def test_a_reload_tells_which_checks_changed(tmp_path: Path) -> None:
    given = settings(tmp_path, only="clock")
    daemon = Daemon(lambda _running: given)
    daemon.start()
    try:
        daemon.store.stream.mark_written(daemon.store.ledger.outbox.lines)
        daemon.reload()
        assert waiting(daemon) == []
        given = settings(tmp_path, only="cpu")
        daemon.reload()
        told = [json.loads(line) for line in daemon.store.ledger.outbox.lines]
        assert [(e["event"], e["check"]) for e in told] == [("check_disabled", "clock"), ("check_enabled", "cpu")]
    finally:
        daemon.shut_down()
