"""Tests of the kernel event intake: new events, the read position of the log, and journal lines for a gap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.agent.conditions.store import ConditionStore
from healthd.agent.kernel_log.log_reader import KernelLogReader
from healthd.agent.kernel_log.source import Gap
from healthd.agent.scheduler.kernel_events import KernelEventIntake
from healthd.agent.settings.configured import Configured
from healthd.agent.slurm.event_jobs import EventJobFinder
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import JournalLines, ReadJournal
from healthd.common import guard
from healthd.common.model import Gpu, Inventory, Mode, Outcome
from tests.agent.test_daemon_guards import settings

XID = "NVRM: Xid (PCI:0000:61:00): {}, pid=7, name=x, GPU has fallen off the bus."


class Ears:
    """An intake that reads one file."""

    def __init__(self, folder: Path) -> None:
        self.log, self.folder = folder / "kern.log", folder
        self.log.touch()
        self.memory = ConditionStore(str(folder), time.time)
        self.memory.load(dict, "b", Mode.OBSERVE)
        kernel = KernelLogReader(str(self.log), "/", "b", False, time.time, time.monotonic)
        kernel.open(self.memory.ledger.cursors.get(str(self.log)))
        jobs = EventJobFinder("/nonexistent", "n1", time.monotonic)
        self.hearing = KernelEventIntake(Configured(*settings(folder)), self.memory, kernel, jobs, time.time)

    def say(self, *lines: str) -> None:
        with open(self.log, "a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def codes(self) -> list[str]:
        return sorted(c.code for c in self.memory.ledger.conditions)


@pytest.fixture
def ears(tmp_path: Path) -> Iterator[Ears]:
    made = Ears(tmp_path)
    made.hearing.read_log()
    yield made
    made.hearing.listener.close()


def test_what_was_heard_is_a_condition_saved_and_returned_as_news(ears: Ears) -> None:
    assert ears.hearing.read_log() == ()
    ears.say(XID.format(79), XID.format(48), "usb 1-1: new device", "EXT4-fs error (device sda1): bad block")
    assert ears.hearing.read_log() == ("xid", "fs")
    assert "gpu_xid/79" in ears.codes()
    assert not ears.memory.unsaved
    assert ears.hearing.read_log() == (), "reported once"


def test_a_line_is_heard_once_also_by_the_next_daemon(ears: Ears) -> None:
    ears.say(XID.format(79))
    ears.hearing.read_log()
    again = Ears(ears.folder)
    assert again.hearing.read_log() == ()
    (condition,) = again.memory.ledger.conditions
    assert condition.count == 1
    again.hearing.listener.close()


def test_a_mistake_with_one_event_is_no_news_and_costs_no_other(ears: Ears, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ears.hearing.apply_events

    def fails(events: list[object]) -> tuple[str, ...]:
        if any(getattr(event, "code", "") == "48" for event in events):
            raise ZeroDivisionError
        return real(events)  # type: ignore[arg-type]

    monkeypatch.setattr(ears.hearing, "apply_events", fails)
    ears.say(XID.format(48))
    assert ears.hearing.read_log() == ()
    ears.say(XID.format(48), XID.format(79))
    assert ears.hearing.read_log() == ("xid",)
    assert ears.codes() == ["gpu_xid/79", "kernel/rule_failed"]
    assert dict(guard.dropped) == {"kernel_log": 2}


def of_the_journal(outcome: Outcome, lines: JournalLines | None = None) -> Reply:
    request = Request("journal", 1.0, ReadJournal("b", 1, 10, 5))
    return Reply(request, outcome, 0.1, "" if outcome is Outcome.COMPLETED else "no journal here", True, lines)


def test_what_the_journal_has_for_a_gap_is_heard_as_any_other_line(ears: Ears) -> None:
    lines = ((time.time(), XID.format(79), 5, "cursor"),)
    assert ears.hearing.take_journal_reply(of_the_journal(Outcome.COMPLETED, lines=lines)) == ("xid",)
    assert ears.codes() == ["gpu_xid/79"]


def test_a_journal_that_cannot_be_read_leaves_the_gap_and_says_why(ears: Ears) -> None:
    assert ears.hearing.take_journal_reply(of_the_journal(Outcome.FAILED)) == ()
    assert (ears.hearing.listener.journal.up, ears.hearing.listener.journal.problem) == (False, "no journal here")


def test_a_gap_is_asked_about_with_all_that_the_worker_needs(ears: Ears, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ears.hearing.journal_request() is None
    monkeypatch.setattr(ears.hearing.listener, "gap", lambda: Gap(1, 10, False))
    request = ears.hearing.journal_request()
    assert request is not None
    assert isinstance(request.operation, ReadJournal)
    assert (request.operation.boot_id, request.operation.history) == ("b", False)


def test_what_was_heard_before_the_gpus_were_known_is_named_once_they_are(ears: Ears) -> None:
    ears.say(XID.format(79))
    ears.hearing.read_log()
    ears.hearing.take_inventory(Inventory(gpus=(Gpu("0000:61:00.0", 3, "GPU-1"),)))
    (condition,) = ears.memory.ledger.conditions
    assert "GPU 3 (GPU-1" in condition.message
