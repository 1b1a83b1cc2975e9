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


class IntakeHarness:
    """An intake that reads one file."""

    def __init__(self, folder: Path) -> None:
        self.log, self.folder = folder / "kern.log", folder
        self.log.touch()
        self.condition_store = ConditionStore(str(folder), time.time)
        self.condition_store.load(dict, "b", Mode.OBSERVE)
        reader = KernelLogReader(str(self.log), "/", "b", False, time.time, time.monotonic)
        reader.open(self.condition_store.ledger.cursors.get(str(self.log)))
        jobs = EventJobFinder("/nonexistent", "n1", time.monotonic)
        self.intake = KernelEventIntake(Configured(*settings(folder)), self.condition_store, reader, jobs, time.time)

    def write_lines(self, *lines: str) -> None:
        with open(self.log, "a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def codes(self) -> list[str]:
        return sorted(c.code for c in self.condition_store.ledger.conditions)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[IntakeHarness]:
    new_harness = IntakeHarness(tmp_path)
    new_harness.intake.read_log()
    yield new_harness
    new_harness.intake.listener.close()


def test_read_log_returns_new_event_kinds(harness: IntakeHarness) -> None:
    assert harness.intake.read_log() == ()
    harness.write_lines(XID.format(79), XID.format(48), "usb 1-1: new device", "EXT4-fs error (device sda1): bad block")
    assert harness.intake.read_log() == ("xid", "fs")
    assert "gpu_xid/79" in harness.codes()
    assert not harness.condition_store.unsaved
    assert harness.intake.read_log() == (), "reported once"


def test_line_is_read_once_also_by_next_daemon(harness: IntakeHarness) -> None:
    harness.write_lines(XID.format(79))
    harness.intake.read_log()
    second = IntakeHarness(harness.folder)
    assert second.intake.read_log() == ()
    (condition,) = second.condition_store.ledger.conditions
    assert condition.count == 1
    second.intake.listener.close()


def test_error_in_event_loses_no_other_event(harness: IntakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_events = harness.intake.apply_events

    def fail_for_xid_48(events: list[object]) -> tuple[str, ...]:
        if any(getattr(event, "code", "") == "48" for event in events):
            raise ZeroDivisionError
        return apply_events(events)  # type: ignore[arg-type]

    monkeypatch.setattr(harness.intake, "apply_events", fail_for_xid_48)
    harness.write_lines(XID.format(48))
    assert harness.intake.read_log() == ()
    harness.write_lines(XID.format(48), XID.format(79))
    assert harness.intake.read_log() == ("xid",)
    assert harness.codes() == ["gpu_xid/79", "kernel/rule_failed"]
    assert dict(guard.dropped) == {"kernel_log": 2}


def journal_reply(outcome: Outcome, lines: JournalLines | None = None) -> Reply:
    request = Request("journal", 1.0, ReadJournal("b", 1, 10, 5))
    return Reply(request, outcome, 0.1, "" if outcome is Outcome.COMPLETED else "no journal here", True, lines)


def test_journal_lines_in_gap_become_events(harness: IntakeHarness) -> None:
    lines = ((time.time(), XID.format(79), 5, "cursor"),)
    assert harness.intake.take_journal_reply(journal_reply(Outcome.COMPLETED, lines=lines)) == ("xid",)
    assert harness.codes() == ["gpu_xid/79"]


def test_failed_journal_reply_is_reported(harness: IntakeHarness) -> None:
    assert harness.intake.take_journal_reply(journal_reply(Outcome.FAILED)) == ()
    assert (harness.intake.listener.journal.up, harness.intake.listener.journal.problem) == (False, "no journal here")


def test_journal_request_has_gap_boot_and_history(harness: IntakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    assert harness.intake.journal_request() is None
    monkeypatch.setattr(harness.intake.listener, "gap", lambda: Gap(1, 10, False))
    request = harness.intake.journal_request()
    assert request is not None
    assert isinstance(request.operation, ReadJournal)
    assert (request.operation.boot_id, request.operation.history) == ("b", False)


def test_take_inventory_names_gpu_for_earlier_event(harness: IntakeHarness) -> None:
    harness.write_lines(XID.format(79))
    harness.intake.read_log()
    harness.intake.take_inventory(Inventory(gpus=(Gpu("0000:61:00.0", 3, "GPU-1"),)))
    (condition,) = harness.condition_store.ledger.conditions
    assert "GPU 3 (GPU-1" in condition.message
