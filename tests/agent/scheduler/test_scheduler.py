"""Tests of the scheduler, job presence and the reply handler without a daemon."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from healthd.agent.conditions.store import ConditionStore
from healthd.agent.scheduler.job_presence import JobPresence
from healthd.agent.scheduler.replies import Received, ReplyHandler
from healthd.agent.scheduler.scheduler import Scheduler
from healthd.agent.scheduler.worker_tasks import hooks_record
from healthd.agent.settings.configured import Configured
from healthd.agent.slurm.event_jobs import CGROUP_INTERVAL_SECONDS
from healthd.agent.worker.client import Reply, Request, WorkerClient
from healthd.agent.worker.process import Setup
from healthd.agent.worker.requests import CopyAnswer, ReadJournal, Run, RunAnswer, TakeInventory
from healthd.common.model import Finding, Gpu, Inventory, Mode, Outcome, RunName, Severity
from tests.agent.test_daemon_guards import settings

JOBS = "sys/fs/cgroup/system.slice/slurmstepd.scope"
LEFTOVER = Finding(Severity.CRITICAL, "gpu_processes/leftover", "0000:1b:00.0", "in use by pid 3")


class Parts:
    """The three parts with a fake root and a clock set by the test, without a worker."""

    def __init__(self, folder: Path) -> None:
        self.root, self.clock_offset = folder / "root", 0.0
        loaded, checks = settings(folder)
        loaded = replace(loaded, settings=replace(loaded.settings, root=str(self.root)))
        self.condition_store = ConditionStore(str(folder), self.shifted(time.time))
        self.condition_store.load(dict, "b", Mode.OBSERVE)
        client = WorkerClient(Setup(), "", self.shifted(time.monotonic))
        clocks = self.shifted(time.time), self.shifted(time.monotonic)
        self.presence = JobPresence(str(self.root), self.shifted(time.monotonic))
        self.scheduler = Scheduler(Configured(loaded, checks), self.condition_store, client, self.presence, *clocks)
        self.replies = ReplyHandler(self.scheduler, self.presence, self.condition_store, client, *clocks)

    def shifted(self, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + self.clock_offset

    def read_jobs(self) -> None:
        self.presence.step()
        self.replies.drop_unless_idle()

    def set_jobs(self, *job_ids: int) -> None:
        """Give exactly these jobs a process on this node."""
        scope = self.root / JOBS
        shutil.rmtree(scope, ignore_errors=True)
        scope.mkdir(parents=True)
        for job in job_ids:
            (scope / f"job_{job}/step_0").mkdir(parents=True)
            (scope / f"job_{job}/step_0/cgroup.procs").write_text(f"{job}\n")

    def reply_to_run(self, check: str, *findings: Finding, outcome: Outcome = Outcome.COMPLETED) -> Received:
        request = Request(check, 1.0, Run(check, "", {}))
        answer = RunAnswer(findings=findings, past="{}")
        message_time = time.time() + self.clock_offset
        return self.replies.handle(
            Reply(request, outcome, 0.1, answered=True, answer=answer, message_time=message_time), Received()
        )

    def codes(self) -> list[str]:
        return [c.code for c in self.condition_store.ledger.conditions]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_finding_becomes_condition_and_outcome_is_counted(parts: Parts) -> None:
    full_disk = Finding(Severity.WARNING, "disk_space/full", "/", "/ is full")
    assert parts.reply_to_run("disk_space", full_disk) == Received()
    parts.reply_to_run("disk_space", outcome=Outcome.FAILED)
    assert parts.codes() == ["disk_space/full"]
    assert parts.replies.outcomes == {("disk_space", "", "completed"): 1, ("disk_space", "", "failed"): 1}
    assert parts.replies.completed() == set()


def test_reply_for_removed_check_is_dropped(parts: Parts) -> None:
    parts.reply_to_run("no_such_check")
    assert parts.replies.results == {}


def test_idle_check_counts_only_without_jobs(parts: Parts) -> None:
    parts.set_jobs(7)
    parts.presence.read()
    assert not parts.presence.is_idle, "another job is running"
    parts.reply_to_run("gpu_processes", LEFTOVER)
    assert (parts.codes(), parts.replies.results) == ([], {})
    parts.set_jobs()
    parts.presence.read()
    assert parts.presence.is_idle
    assert RunName("gpu_processes") in [run.name for run in parts.scheduler.scheduled()]
    parts.reply_to_run("gpu_processes", LEFTOVER)
    assert parts.codes() == ["gpu_processes/leftover"]


def test_new_job_drops_findings_from_idle_check(parts: Parts) -> None:
    parts.set_jobs()
    parts.presence.read()
    parts.reply_to_run("gpu_processes", LEFTOVER)
    parts.set_jobs(8)
    parts.read_jobs()
    assert parts.codes() == ["gpu_processes/leftover"], "the cgroups are not read in each turn"
    parts.clock_offset = CGROUP_INTERVAL_SECONDS + 0.1
    parts.read_jobs()
    assert (parts.codes(), parts.replies.results, parts.presence.is_idle) == ([], {}, False)


def test_drained_idle_node_keeps_findings_from_idle_check(parts: Parts) -> None:
    parts.set_jobs(7)
    parts.presence.is_drained = True
    parts.reply_to_run("gpu_processes", LEFTOVER)
    parts.replies.drop_unless_idle()
    assert parts.codes() == ["gpu_processes/leftover"]
    parts.presence.is_drained = False
    parts.replies.drop_unless_idle()
    assert parts.codes() == []


def test_replies_for_others_are_returned(parts: Parts) -> None:
    inventory = Inventory(gpus=(Gpu("0000:1b:00.0", 0, "GPU-1"),))
    request = Request("nvml", 1.0, TakeInventory(gpus=True))
    received = parts.replies.handle(Reply(request, Outcome.COMPLETED, 0.1, answered=True, answer=inventory), Received())
    assert received == Received(inventory=inventory)
    assert parts.condition_store.ledger.inventory == Inventory(), "the kernel event intake stores it"
    request = Request("journal", 1.0, ReadJournal("b", 1, 2, 3))
    reply = Reply(request, Outcome.FAILED, 0.1, "no journal")
    assert parts.replies.handle(reply, Received(round_ended=True)) == Received(round_ended=True, journal=reply)


@pytest.mark.parametrize(
    ("outcome", "answer", "expected"),
    [
        (Outcome.COMPLETED, CopyAnswer({"hooks.json": None}), False),
        (Outcome.COMPLETED, CopyAnswer({"hooks.json": "{}"}), True),
        (Outcome.COMPLETED, CopyAnswer({"hooks.json": ""}), True),
        (Outcome.FAILED, None, True),
    ],
)
def test_hooks_record_is_found_even_if_unreadable(
    parts: Parts, outcome: Outcome, answer: CopyAnswer | None, expected: bool
) -> None:
    reply = Reply(hooks_record("/var/lib/healthd"), outcome, 0.1, answered=True, answer=answer)
    assert parts.replies.handle(reply, Received()) == Received(has_hooks_record=expected)


def test_hooks_record_is_read_again_after_worker_hung(parts: Parts) -> None:
    request = hooks_record("/var/lib/healthd")
    timed_out = Reply(request, Outcome.TIMED_OUT, 20.0, "no answer within 20 s")
    assert parts.replies.handle(timed_out, Received()) == Received()
    assert request in parts.scheduler.queue._tasks


def test_run_after_event_schedules_checks(parts: Parts) -> None:
    now = time.monotonic()
    parts.scheduler.queue._last_runs = {run.name: now for run in parts.scheduler.scheduled()}
    parts.scheduler.queue._due_at_runs = []
    regular_due = parts.scheduler.queue._next_due()
    parts.scheduler.run_after(["nothing_of_note"])
    assert parts.scheduler.queue._next_due() == regular_due
    parts.scheduler.run_after(["xid"])
    assert parts.scheduler.queue._next_due() < min(regular_due, now + 60)
