"""Tests of the advice to running jobs: its content, who may read it, and a training loop that follows it."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from other_user import NOBODY, become, only_root
from waiting import until

from healthd import client
from healthd.failslow.live.advice_files import FOLDER, AdviceWriter, FollowedJob, advice_text, follow
from healthd.failslow.live.document import LiveJob
from healthd.failslow.live.receiver import SOCKET, Receiver
from healthd.failslow.mitigation.planner import Action, Overheads
from healthd.failslow.model import Cause

ROOT = Path(__file__).parents[3]
CGROUP = "0::/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0\n"
SLOW = LiveJob("4711", 1, "client", True, 1000.0, 0.4, 6.0, "", "rank 3", "compute_gpu")


def told(job: str = "4711", slow: bool = True, lost: float = 48.0, ranks: int = 8, source: str = "client") -> LiveJob:
    return LiveJob(job, ranks, source, slow, 1000.0 if slow else None, 0.4, lost, "", "rank 3", "compute")


def in_job(root: Path, pid: int, job: str = "4711") -> None:
    place = root / f"proc/{pid}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "cgroup").write_text(CGROUP.format(job))


# --- content of advice


def test_a_job_that_never_was_slow_has_no_advice() -> None:
    assert follow(FollowedJob(), LiveJob("4711", 1, "client"), Overheads()).advice_number == 0


def test_a_job_is_advised_to_ignore_it_until_the_loss_has_reached_a_cost() -> None:
    first = follow(FollowedJob(), replace(SLOW, lost_seconds=3.0), Overheads())
    assert (first.action, first.advice_number) == (Action.IGNORE, 1)
    second = follow(first, SLOW, Overheads())
    assert (second.action, second.advice_number) == (Action.MICRO_BATCHES, 2)


def test_what_did_not_change_is_no_news() -> None:
    first = follow(FollowedJob(), SLOW, Overheads())
    assert follow(first, SLOW, Overheads()).advice_number == first.advice_number


def test_a_relief_is_told_and_begins_all_anew() -> None:
    followed = follow(
        follow(FollowedJob(), SLOW, Overheads()), LiveJob("4711", 1, "client", lost_seconds=6.0), Overheads()
    )
    assert (followed.action, followed.advice_number, followed.state.lost) == (Action.IGNORE, 2, 0.0)
    assert json.loads(advice_text(followed, Overheads(), 5.0))["message"] == "the job is no longer slow"


def test_all_ranks_wait_alike_and_one_that_ends_is_no_loss() -> None:
    first = follow(FollowedJob(), replace(SLOW, lost_seconds=32.0, ranks=8), Overheads())
    assert (first.action, first.state.lost) == (Action.IGNORE, 4.0)
    assert follow(first, replace(SLOW, lost_seconds=32.0, ranks=1), Overheads()).state.lost == 4.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e9), st.sampled_from(list(Cause))), max_size=60))
def test_whatever_a_job_shows_its_advice_is_a_document(looks: list[tuple[bool, float, Cause]]) -> None:
    followed = FollowedJob()
    for slow, lost, cause in looks:
        followed = follow(followed, replace(SLOW, slow=slow, lost_seconds=lost, cause=cause.value), Overheads())
        document = json.loads(advice_text(followed, Overheads(), 1.5))
        assert document["action"] in {one.value for one in Action}
        assert document["slow"] is slow


def test_a_restart_is_advised_when_as_much_is_lost_as_the_site_says_that_it_costs() -> None:
    """For an unknown cause, a restart is the only remedy."""
    unknown = replace(SLOW, cause=Cause.UNKNOWN.value, lost_seconds=100.0)
    assert follow(FollowedJob(), unknown, Overheads()).action is Action.IGNORE
    assert follow(FollowedJob(), unknown, Overheads(s4=100.0)).action is Action.RESTART


# --- the files


@pytest.fixture
def advising(tmp_path: Path) -> AdviceWriter:
    return AdviceWriter(str(tmp_path), {"4711": os.geteuid()}.get)


def files(advising: AdviceWriter) -> list[str]:
    return sorted(os.listdir(advising.folder))


def test_a_slow_job_has_a_file_and_loses_it_when_it_ends(advising: AdviceWriter) -> None:
    assert advising.step([told()], 5.0) is None
    document = json.loads(Path(advising.folder, "4711.json").read_text())
    assert (document["action"], document["rank"], document["lost_seconds"]) == ("s2", "rank 3", 6.0)
    assert document["next"] == {"action": "s3", "at_lost_seconds": 60.0}
    assert advising.step([told()], 6.0) is None
    assert json.loads(Path(advising.folder, "4711.json").read_text())["written"] == 5.0, "the advice did not change"
    advising.step([], 7.0)
    assert files(advising) == []


def test_what_an_earlier_process_left_is_removed_and_so_is_all_at_the_end(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "1.json").write_text("{}")
    advising = AdviceWriter(str(tmp_path), {"4711": os.geteuid()}.get)
    assert files(advising) == []
    advising.step([told()], 5.0)
    advising.close()
    assert files(advising) == []


@pytest.mark.parametrize("job", ["../../etc/passwd", "", "x", "1" * 13, "4711/../1"])
def test_what_is_no_number_of_a_job_names_no_file(tmp_path: Path, job: str) -> None:
    advising = AdviceWriter(str(tmp_path), lambda job: os.geteuid())
    assert advising.step([told(job)], 5.0) is None
    assert files(advising) == []


def test_a_job_of_which_only_counters_tell_has_no_file(advising: AdviceWriter) -> None:
    assert advising.step([told(source="counters")], 5.0) is None
    assert files(advising) == []


def test_a_job_whose_user_is_not_known_has_no_file(advising: AdviceWriter) -> None:
    assert advising.step([told("4712")], 5.0) is None
    assert files(advising) == []


def read_as(uid: int, path: str) -> bool:
    """Return whether a process of this user can read the file."""
    child = os.fork()
    if child == 0:
        try:
            become(uid)
            with open(path, "rb") as file:
                file.read()
        except PermissionError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@only_root
def test_the_jobs_user_reads_it_and_nobody_else_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    for above in (folder, *folder.parents):  # pytest's own folders belong to root and are closed to others
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    advising = AdviceWriter(str(folder), {"4711": NOBODY}.get)
    problem = advising.step([told()], 5.0)
    if problem is not None:
        pytest.skip(f"this file system has no access lists: {problem}")
    path = os.path.join(advising.folder, "4711.json")
    assert read_as(NOBODY, path)
    assert not read_as(NOBODY - 1, path)
    assert os.stat(path).st_uid == os.geteuid()  # an owner among users could fill /run of the node


# --- reading advice


class Ranks:
    """A receiver on a simulated tree, where this process belongs to job 4711."""

    def __init__(self, folder: Path) -> None:
        in_job(folder, os.getpid())
        self.receiver = Receiver(str(folder / SOCKET), str(folder), 4, 4)
        self.now = 0.0

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        list(self.receiver.step(self.now))


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    monkeypatch.setenv("HEALTHD_SOCKET", made.receiver.path)
    monkeypatch.setattr(client, "SEND_SECONDS", 0.0)
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.0)
    client._pid = 0
    client._last = None
    yield made
    client._disconnect()
    client._pid = 0
    made.receiver.close()


def test_owner_is_the_user_of_a_connected_rank(ranks: Ranks) -> None:
    assert ranks.receiver.find_user("4711") is None
    client.step()  # connects
    ranks.step()
    assert ranks.receiver.find_user("4711") == os.geteuid()
    assert ranks.receiver.find_user("1") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "1" * 100_000])
def test_advice_that_is_no_document_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HEALTHD_SOCKET", str(tmp_path / SOCKET))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert client.advice() is None
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "4711.json").write_text(text)
    assert client.advice() is None


# --- a training loop


SCRIPT = """
import os, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import follow_advice
from pathlib import Path
from healthd import client

client.SEND_SECONDS = 0.0
root = Path(sys.argv[3])

def begin():
    place = root / f"proc/{os.getpid()}"
    place.mkdir(parents=True)
    (place / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\\n")

shared = follow_advice.run(follow_advice.Job(times=8.0, iterations=600), begin)
import json
print(json.dumps({"moved_at": shared.moved_at.value, "counts": list(shared.counts), "took": list(shared.took)}))
"""


@pytest.mark.one_python
def test_a_training_loop_moves_its_micro_batches_and_becomes_faster_again(tmp_path: Path) -> None:
    """A real live process and four real ranks; one rank becomes eight times as slow at iteration 100."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    place = {"runtime_dir": str(tmp_path), "root": str(tmp_path)}
    setup = json.dumps({"locations": place, "settings": {"client": True}})
    live = subprocess.Popen(
        [sys.executable, "-m", "healthd.failslow.live", str(theirs.fileno()), setup],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    theirs.close()
    try:
        until(lambda: (tmp_path / SOCKET).exists())
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(ROOT), str(ROOT / "examples"), str(tmp_path)],
            env={**os.environ, "HEALTHD_SOCKET": str(tmp_path / SOCKET), "SLURM_JOB_ID": "4711"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        ours.close()
        live.wait(240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    moved = told["moved_at"]
    assert moved > 100, done.stdout
    assert sum(told["counts"]) == 32
    assert told["counts"][2] == min(told["counts"]) < 8
    slow, after = told["took"][100 : moved + 1], told["took"][moved + 1 : moved + 25]
    assert statistics.median(after) < statistics.median(slow)
