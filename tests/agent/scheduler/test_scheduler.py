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
from healthd.agent.settings.configured import Configured
from healthd.agent.slurm.event_jobs import CGROUP_INTERVAL_SECONDS
from healthd.agent.worker.client import Reply, Request, WorkerClient
from healthd.agent.worker.process import Setup
from healthd.agent.worker.requests import ReadJournal, Run, RunAnswer, TakeInventory
from healthd.common.model import Finding, Gpu, Inventory, Mode, Outcome, RunName, Severity
from tests.agent.test_daemon_guards import settings

JOBS = "sys/fs/cgroup/system.slice/slurmstepd.scope"
LEFTOVER = Finding(Severity.CRITICAL, "gpu_processes/leftover", "0000:1b:00.0", "in use by pid 3")


class Parts:
    """The three parts with a fake root and a clock set by the test, without a worker."""

    def __init__(self, folder: Path) -> None:
        self.root, self.ahead = folder / "root", 0.0
        loaded, checks = settings(folder)
        loaded = replace(loaded, settings=replace(loaded.settings, root=str(self.root)))
        self.memory = ConditionStore(str(folder), self.of(time.time))
        self.memory.load(dict, "b", Mode.OBSERVE)
        client = WorkerClient(Setup(), "", self.of(time.monotonic))
        clocks = self.of(time.time), self.of(time.monotonic)
        self.presence = JobPresence(str(self.root), self.of(time.monotonic))
        self.scheduler = Scheduler(Configured(loaded, checks), self.memory, client, self.presence, *clocks)
        self.replies = ReplyHandler(self.scheduler, self.presence, self.memory, client, *clocks)

    def of(self, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + self.ahead

    def read_jobs(self) -> None:
        self.presence.step()
        self.replies.drop_unless_idle()

    def jobs(self, *jobs: int) -> None:
        """Give exactly these jobs a process on this node."""
        scope = self.root / JOBS
        shutil.rmtree(scope, ignore_errors=True)
        scope.mkdir(parents=True)
        for job in jobs:
            (scope / f"job_{job}/step_0").mkdir(parents=True)
            (scope / f"job_{job}/step_0/cgroup.procs").write_text(f"{job}\n")

    def ran(self, check: str, *findings: Finding, outcome: Outcome = Outcome.COMPLETED) -> Received:
        request = Request(check, 1.0, Run(check, "", {}))
        answer = RunAnswer(findings=findings, past="{}")
        told = time.time() + self.ahead
        return self.replies.handle(
            Reply(request, outcome, 0.1, answered=True, answer=answer, message_time=told), Received()
        )

    def codes(self) -> list[str]:
        return [c.code for c in self.memory.ledger.conditions]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_what_a_run_finds_becomes_a_condition_and_its_outcome_is_counted(parts: Parts) -> None:
    full = Finding(Severity.WARNING, "disk_space/full", "/", "/ is full")
    assert parts.ran("disk_space", full) == Received()
    parts.ran("disk_space", outcome=Outcome.FAILED)
    assert parts.codes() == ["disk_space/full"]
    assert parts.replies.outcomes == {("disk_space", "", "completed"): 1, ("disk_space", "", "failed"): 1}
    assert parts.replies.completed() == set()


def test_a_run_that_a_reload_removed_meanwhile_leaves_nothing(parts: Parts) -> None:
    parts.ran("no_such_check")
    assert parts.replies.results == {}


def test_what_looks_only_while_no_job_is_here_counts_only_then(parts: Parts) -> None:
    parts.jobs(7)
    parts.presence.read()
    assert not parts.presence.is_idle, "another job is running"
    parts.ran("gpu_processes", LEFTOVER)
    assert (parts.codes(), parts.replies.results) == ([], {})
    parts.jobs()
    parts.presence.read()
    assert parts.presence.is_idle
    assert RunName("gpu_processes") in [run.name for run in parts.scheduler.scheduled()]
    parts.ran("gpu_processes", LEFTOVER)
    assert parts.codes() == ["gpu_processes/leftover"]


def test_a_job_that_comes_ends_what_was_found_while_there_was_none_within_a_second(parts: Parts) -> None:
    parts.jobs()
    parts.presence.read()
    parts.ran("gpu_processes", LEFTOVER)
    parts.jobs(8)
    parts.read_jobs()
    assert parts.codes() == ["gpu_processes/leftover"], "the cgroups are not read in each turn"
    parts.ahead = CGROUP_INTERVAL_SECONDS + 0.1
    parts.read_jobs()
    assert (parts.codes(), parts.replies.results, parts.presence.is_idle) == ([], {}, False)


def test_a_node_that_slurm_shows_drained_and_idle_keeps_what_was_found_then(parts: Parts) -> None:
    parts.jobs(7)
    parts.presence.is_drained = True
    parts.ran("gpu_processes", LEFTOVER)
    parts.replies.drop_unless_idle()
    assert parts.codes() == ["gpu_processes/leftover"]
    parts.presence.is_drained = False
    parts.replies.drop_unless_idle()
    assert parts.codes() == []


def test_what_is_for_others_is_returned_and_not_done_here(parts: Parts) -> None:
    inventory = Inventory(gpus=(Gpu("0000:1b:00.0", 0, "GPU-1"),))
    request = Request("nvml", 1.0, TakeInventory(gpus=True))
    seen = parts.replies.handle(Reply(request, Outcome.COMPLETED, 0.1, answered=True, answer=inventory), Received())
    assert seen == Received(inventory=inventory)
    assert parts.memory.ledger.inventory == Inventory(), "the kernel event intake stores it"
    request = Request("journal", 1.0, ReadJournal("b", 1, 2, 3))
    reply = Reply(request, Outcome.FAILED, 0.1, "no journal")
    assert parts.replies.handle(reply, Received(round_ended=True)) == Received(round_ended=True, journal=reply)


def test_an_event_has_the_checks_look_at_once_that_want_to(parts: Parts) -> None:
    now = time.monotonic()
    parts.scheduler.queue._last_runs = {run.name: now for run in parts.scheduler.scheduled()}
    parts.scheduler.queue._due_at_runs = []
    later = parts.scheduler.queue._next_due()
    parts.scheduler.run_after(["nothing_of_note"])
    assert parts.scheduler.queue._next_due() == later
    parts.scheduler.run_after(["xid"])
    assert parts.scheduler.queue._next_due() < min(later, now + 60)
