"""The daemon's eyes by themselves: what the worker says, whether a job is here, what is for others."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from healthd.agent.conditions.store import Memory
from healthd.agent.scheduler.scheduler import Looking, Seen
from healthd.agent.settings.configured import Configured
from healthd.agent.slurm.event_jobs import LOOK_AGAIN_SECONDS
from healthd.agent.worker.client import Reply, Request, Runner
from healthd.agent.worker.process import Setup
from healthd.agent.worker.requests import JournalGap, ReadJournal, Run, RunAnswer, TakeInventory
from healthd.common.model import Finding, Gpu, Inventory, Mode, Outcome, RunName, Severity
from tests.agent.test_daemon_guards import settings

JOBS = "sys/fs/cgroup/system.slice/slurmstepd.scope"
LEFTOVER = Finding(Severity.CRITICAL, "gpu_processes/leftover", "0000:1b:00.0", "held by pid 3")


class Eyes:
    """Looking on a made tree, without a worker, at a time that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.root, self.ahead = folder / "root", 0.0
        loaded, checks = settings(folder)
        loaded = replace(loaded, settings=replace(loaded.settings, root=str(self.root)))
        self.memory = Memory(str(folder), self.of(time.time))
        self.memory.recall(dict, "b", Mode.OBSERVE)
        runner = Runner(Setup(), "", self.of(time.monotonic))
        clocks = self.of(time.time), self.of(time.monotonic)
        self.looking = Looking(Configured(loaded, checks), self.memory, runner, *clocks)

    def of(self, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + self.ahead

    def jobs(self, *jobs: int) -> None:
        """These have a process here."""
        scope = self.root / JOBS
        shutil.rmtree(scope, ignore_errors=True)
        scope.mkdir(parents=True)
        for job in jobs:
            (scope / f"job_{job}/step_0").mkdir(parents=True)
            (scope / f"job_{job}/step_0/cgroup.procs").write_text(f"{job}\n")

    def ran(self, check: str, *findings: Finding, outcome: Outcome = Outcome.COMPLETED) -> Seen:
        request = Request(check, 1.0, Run(check, "", {}))
        answer = RunAnswer(findings=findings, past="{}")
        told = time.time() + self.ahead
        return self.looking.take(Reply(request, outcome, 0.1, answered=True, answer=answer, told=told), Seen())

    def codes(self) -> list[str]:
        return [c.code for c in self.memory.ledger.conditions]


@pytest.fixture
def eyes(tmp_path: Path) -> Eyes:
    return Eyes(tmp_path)


def test_what_a_run_finds_becomes_a_condition_and_its_outcome_is_counted(eyes: Eyes) -> None:
    full = Finding(Severity.WARNING, "disk_space/full", "/", "/ is full")
    assert eyes.ran("disk_space", full) == Seen()
    eyes.ran("disk_space", outcome=Outcome.FAILED)
    assert eyes.codes() == ["disk_space/full"]
    assert eyes.looking.outcomes == {("disk_space", "", "completed"): 1, ("disk_space", "", "failed"): 1}
    assert eyes.looking.completed() == set()


def test_a_run_that_a_reload_removed_meanwhile_leaves_nothing(eyes: Eyes) -> None:
    eyes.ran("no_such_check")
    assert eyes.looking.results == {}


def test_what_looks_only_while_no_job_is_here_counts_only_then(eyes: Eyes) -> None:
    eyes.jobs(7)
    eyes.looking.job_ended()
    assert not eyes.looking.is_idle, "another one is here"
    eyes.ran("gpu_processes", LEFTOVER)
    assert (eyes.codes(), eyes.looking.results) == ([], {})
    eyes.jobs()
    eyes.looking.job_ended()
    assert eyes.looking.is_idle
    assert RunName("gpu_processes") in [run.name for run in eyes.looking.scheduled()]
    eyes.ran("gpu_processes", LEFTOVER)
    assert eyes.codes() == ["gpu_processes/leftover"]


def test_a_job_that_comes_ends_what_was_found_while_there_was_none_within_a_second(eyes: Eyes) -> None:
    eyes.jobs()
    eyes.looking.job_ended()
    eyes.ran("gpu_processes", LEFTOVER)
    eyes.jobs(8)
    eyes.looking.look_for_jobs()
    assert eyes.codes() == ["gpu_processes/leftover"], "the cgroups are not walked in each turn"
    eyes.ahead = LOOK_AGAIN_SECONDS + 0.1
    eyes.looking.look_for_jobs()
    assert (eyes.codes(), eyes.looking.results, eyes.looking.is_idle) == ([], {}, False)


def test_a_node_that_slurm_shows_drained_and_idle_keeps_what_was_found_then(eyes: Eyes) -> None:
    eyes.jobs(7)
    eyes.looking.is_drained = True
    eyes.ran("gpu_processes", LEFTOVER)
    eyes.looking.forget_unless_idle()
    assert eyes.codes() == ["gpu_processes/leftover"]
    eyes.looking.is_drained = False
    eyes.looking.forget_unless_idle()
    assert eyes.codes() == []


def test_what_is_for_others_is_returned_and_not_done_here(eyes: Eyes) -> None:
    inventory = Inventory(gpus=(Gpu("0000:1b:00.0", 0, "GPU-1"),))
    request = Request("nvml", 1.0, TakeInventory(gpus=True))
    seen = eyes.looking.take(Reply(request, Outcome.COMPLETED, 0.1, answered=True, answer=inventory), Seen())
    assert seen == Seen(inventory=inventory)
    assert eyes.memory.ledger.inventory == Inventory(), "whoever listens names with it what was heard before"
    request = Request("journal", 1.0, ReadJournal(JournalGap("b", 1, 2, 3)))
    reply = Reply(request, Outcome.FAILED, 0.1, "no journal")
    assert eyes.looking.take(reply, Seen(round_ended=True)) == Seen(round_ended=True, journal=reply)


def test_an_event_has_the_checks_look_at_once_that_want_to(eyes: Eyes) -> None:
    now = time.monotonic()
    eyes.looking.rounds._last_runs = {run.name: now for run in eyes.looking.scheduled()}
    eyes.looking.rounds._due_of = []
    later = eyes.looking.rounds._next_due()
    eyes.looking.look_after(["nothing_of_note"])
    assert eyes.looking.rounds._next_due() == later
    eyes.looking.look_after(["xid"])
    assert eyes.looking.rounds._next_due() < min(later, now + 60)
