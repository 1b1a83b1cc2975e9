"""The daemon's side of healthd-repair: which requests it repeats, and what it keeps of the journal."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from healthd.agent.evidence.case import Process
from healthd.agent.repair.journal import NAME, Entry, Journal, Outcome, Stopped, parse_request
from healthd.agent.repair.journal_file import publish
from healthd.agent.repair.step_program import MAX_REPEAT_SECONDS, REPEAT_SECONDS, StepProgram
from healthd.agent.settings.config import Settings
from healthd.common.model import RepairStep
from healthd.host.separate_program import request_file

HEALTHY = Journal("boot-1", node="n1", machine="dmi 1")
STOPPED = Journal("boot-1", node="n1", machine="dmi 1", stopped=Stopped("boot-2", ("nvidia-dcgm.service",)))
REFUSED = Entry("20261129T060000Z-gpu_reset", RepairStep.GPU_RESET, 0.0, "boot-2", Outcome.REFUSED)
UNREADABLE = Journal(problem="the journal cannot be read", refused=REFUSED)


class Daemon:
    """The daemon's side. systemd starts the program, whose part `serve` plays. Times are since the start."""

    def __init__(self, folder: Path) -> None:
        self.seconds = 0.0
        self.folder = folder
        settings = Settings(node_name="n1", runtime_dir=str(folder), state_dir=str(folder / "state"))
        self.program = StepProgram(settings, ("healthd", "repair", "run"), True, lambda: 0.0, lambda: self.seconds)

    @property
    def request_path(self) -> Path:
        return Path(request_file(str(self.folder), NAME))

    def serve(self, journal: Journal) -> None:
        """Answer the open request."""
        request = parse_request(self.request_path.read_text())
        assert (request.id, request.node) == ("", "n1")
        publish(journal, str(self.folder))
        self.request_path.unlink()
        self.seconds += 10.0
        self.program.step()
        assert not self.program.is_open

    def requests(self, journal: Journal, hours: float) -> list[float]:
        """Return when the daemon writes a request, if each has this result."""
        found, end = [], self.seconds + hours * 3600.0
        while self.seconds < end:
            self.program.step()
            if self.program.is_open:
                found.append(self.seconds)
                self.serve(journal)
            self.seconds += 5.0
        return found


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


def test_journal_is_requested_once(daemon: Daemon) -> None:
    assert daemon.requests(HEALTHY, 24) == [0.0]
    assert (daemon.program.journal, daemon.program.problem) == (HEALTHY, "")
    assert daemon.program.deadline == float("inf")


@pytest.mark.parametrize("journal", [UNREADABLE, STOPPED])
def test_repeated_requests_do_not_reach_the_start_limit_of_the_unit(daemon: Daemon, journal: Journal) -> None:
    found = daemon.requests(journal, 24)
    assert all(later - earlier >= REPEAT_SECONDS for earlier, later in itertools.pairwise(found))
    assert max(sum(start <= at < start + 1800 for at in found) for start in found) < 10
    assert len(found) > 24 * 3600 / MAX_REPEAT_SECONDS / 2, "the daemon does not give up"
    assert daemon.program.problem
    daemon.requests(HEALTHY, 1)
    assert daemon.program.problem == ""
    assert daemon.requests(HEALTHY, 24) == []


@pytest.mark.parametrize(
    "stopped",
    [
        Stopped("boot-2", services=("nvidia-dcgm.service",)),
        Stopped("boot-2", gpus=("00000000:1B:00.0",)),
        Stopped("boot-2", hung=(Process(4711, 1),)),
    ],
)
def test_what_is_stopped_is_a_problem_and_wakes_the_daemon(daemon: Daemon, stopped: Stopped) -> None:
    daemon.program.step()
    daemon.serve(Journal("boot-1", node="n1", machine="dmi 1", stopped=stopped))
    assert daemon.program.has_stopped
    assert daemon.program.problem
    daemon.seconds = daemon.program.deadline
    daemon.program.step()
    assert daemon.program.is_open
    daemon.serve(HEALTHY)
    assert not daemon.program.has_stopped


def test_unreadable_journal_keeps_what_is_known_and_reports_the_refusal(daemon: Daemon) -> None:
    daemon.program.step()
    daemon.serve(UNREADABLE)
    assert daemon.program.journal is None
    daemon.requests(HEALTHY, 1)
    daemon.program.journal = STOPPED
    daemon.requests(UNREADABLE, 1)
    journal = daemon.program.journal
    assert journal is not None
    assert (journal.first_boot, journal.stopped, journal.refused) == ("boot-1", STOPPED.stopped, REFUSED)
    assert journal.problem


@pytest.mark.parametrize("journal", [STOPPED, HEALTHY])
def test_new_daemon_continues_to_start_what_is_stopped(daemon: Daemon, journal: Journal) -> None:
    daemon.program.start()
    assert daemon.program.journal is None
    publish(journal, str(daemon.folder))
    daemon.program.start()
    assert daemon.program.has_stopped is (journal is STOPPED)
    assert daemon.requests(HEALTHY, 24) == [0.0]
    assert daemon.program.journal == HEALTHY
