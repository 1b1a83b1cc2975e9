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


def live_job(
    job: str = "4711", slow: bool = True, lost: float = 48.0, ranks: int = 8, source: str = "client"
) -> LiveJob:
    return LiveJob(job, ranks, source, slow, 1000.0 if slow else None, 0.4, lost, "", "rank 3", "compute")


def put_in_job(root: Path, pid: int, job: str = "4711") -> None:
    place = root / f"proc/{pid}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "cgroup").write_text(CGROUP.format(job))


# --- content of advice


def test_healthy_job_has_no_advice() -> None:
    assert follow(FollowedJob(), LiveJob("4711", 1, "client"), Overheads()).advice_number == 0


def test_follow_advises_ignore_until_loss_reaches_cost() -> None:
    first = follow(FollowedJob(), replace(SLOW, lost_seconds=3.0), Overheads())
    assert (first.action, first.advice_number) == (Action.IGNORE, 1)
    second = follow(first, SLOW, Overheads())
    assert (second.action, second.advice_number) == (Action.MICRO_BATCHES, 2)


def test_unchanged_advice_keeps_its_number() -> None:
    first = follow(FollowedJob(), SLOW, Overheads())
    assert follow(first, SLOW, Overheads()).advice_number == first.advice_number


def test_relief_is_reported_and_resets_loss() -> None:
    followed = follow(
        follow(FollowedJob(), SLOW, Overheads()), LiveJob("4711", 1, "client", lost_seconds=6.0), Overheads()
    )
    assert (followed.action, followed.advice_number, followed.state.lost) == (Action.IGNORE, 2, 0.0)
    assert "no longer slow" in json.loads(advice_text(followed, Overheads(), 5.0))["message"]


def test_loss_is_counted_per_rank() -> None:
    first = follow(FollowedJob(), replace(SLOW, lost_seconds=32.0, ranks=8), Overheads())
    assert (first.action, first.state.lost) == (Action.IGNORE, 4.0)
    assert follow(first, replace(SLOW, lost_seconds=32.0, ranks=1), Overheads()).state.lost == 4.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e9), st.sampled_from(list(Cause))), max_size=60))
def test_advice_text_is_json_for_any_job(states: list[tuple[bool, float, Cause]]) -> None:
    followed = FollowedJob()
    for slow, lost, cause in states:
        followed = follow(followed, replace(SLOW, slow=slow, lost_seconds=lost, cause=cause.value), Overheads())
        document = json.loads(advice_text(followed, Overheads(), 1.5))
        assert document["action"] in {action.value for action in Action}
        assert document["slow"] is slow


def test_follow_advises_restart_when_loss_reaches_site_cost() -> None:
    """For an unknown cause, a restart is the only remedy."""
    unknown = replace(SLOW, cause=Cause.UNKNOWN.value, lost_seconds=100.0)
    assert follow(FollowedJob(), unknown, Overheads()).action is Action.IGNORE
    assert follow(FollowedJob(), unknown, Overheads(s4=100.0)).action is Action.RESTART


# --- the files


@pytest.fixture
def writer(tmp_path: Path) -> AdviceWriter:
    return AdviceWriter(str(tmp_path), {"4711": os.geteuid()}.get)


def advice_files(writer: AdviceWriter) -> list[str]:
    return sorted(os.listdir(writer.folder))


def test_slow_job_has_file_until_it_ends(writer: AdviceWriter) -> None:
    assert writer.step([live_job()], 5.0) is None
    document = json.loads(Path(writer.folder, "4711.json").read_text())
    assert (document["action"], document["rank"], document["lost_seconds"]) == ("s2", "rank 3", 6.0)
    assert document["next"] == {"action": "s3", "at_lost_seconds": 60.0}
    assert writer.step([live_job()], 6.0) is None
    assert json.loads(Path(writer.folder, "4711.json").read_text())["written"] == 5.0, "the advice did not change"
    writer.step([], 7.0)
    assert advice_files(writer) == []


def test_leftover_files_are_removed_at_start_and_close(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "1.json").write_text("{}")
    writer = AdviceWriter(str(tmp_path), {"4711": os.geteuid()}.get)
    assert advice_files(writer) == []
    writer.step([live_job()], 5.0)
    writer.close()
    assert advice_files(writer) == []


@pytest.mark.parametrize("job", ["../../etc/passwd", "", "x", "1" * 13, "4711/../1"])
def test_invalid_job_id_names_no_file(tmp_path: Path, job: str) -> None:
    writer = AdviceWriter(str(tmp_path), lambda job: os.geteuid())
    assert writer.step([live_job(job)], 5.0) is None
    assert advice_files(writer) == []


def test_job_known_only_from_counters_has_no_file(writer: AdviceWriter) -> None:
    assert writer.step([live_job(source="counters")], 5.0) is None
    assert advice_files(writer) == []


def test_job_of_unknown_user_has_no_file(writer: AdviceWriter) -> None:
    assert writer.step([live_job("4712")], 5.0) is None
    assert advice_files(writer) == []


def is_readable_by(uid: int, path: str) -> bool:
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
def test_advice_is_readable_only_by_user_of_job(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    for above in (folder, *folder.parents):  # pytest's own folders belong to root and are closed to others
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    writer = AdviceWriter(str(folder), {"4711": NOBODY}.get)
    problem = writer.step([live_job()], 5.0)
    if problem is not None:
        pytest.skip(f"this file system has no access lists: {problem}")
    path = os.path.join(writer.folder, "4711.json")
    assert is_readable_by(NOBODY, path)
    assert not is_readable_by(NOBODY - 1, path)
    assert os.stat(path).st_uid == os.geteuid()  # an owner among users could fill /run of the node


# --- reading advice


class ReceiverInJob:
    """A receiver on a simulated tree, where this process belongs to job 4711."""

    def __init__(self, folder: Path) -> None:
        put_in_job(folder, os.getpid())
        self.receiver = Receiver(str(folder / SOCKET), str(folder), 4, 4)
        self.now = 0.0

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        list(self.receiver.step(self.now))


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReceiverInJob]:
    made = ReceiverInJob(tmp_path)
    monkeypatch.setenv("HEALTHD_SOCKET", made.receiver.path)
    monkeypatch.setattr(client, "SEND_SECONDS", 0.0)
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.0)
    client._pid = 0
    client._last = None
    yield made
    client._disconnect()
    client._pid = 0
    made.receiver.close()


def test_find_user_returns_user_of_connected_rank(ranks: ReceiverInJob) -> None:
    assert ranks.receiver.find_user("4711") is None
    client.step()  # connects
    ranks.step()
    assert ranks.receiver.find_user("4711") == os.geteuid()
    assert ranks.receiver.find_user("1") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "1" * 100_000])
def test_client_ignores_invalid_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
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
def test_training_loop_follows_advice_and_becomes_faster(tmp_path: Path) -> None:
    """A real live process and four real ranks; one rank becomes eight times as slow at iteration 100."""
    own_end, process_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    locations = {"runtime_dir": str(tmp_path), "root": str(tmp_path)}
    setup = json.dumps({"locations": locations, "settings": {"client": True}})
    live = subprocess.Popen(
        [sys.executable, "-m", "healthd.failslow.live", str(process_end.fileno()), setup],
        pass_fds=[process_end.fileno()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    process_end.close()
    try:
        until(lambda: (tmp_path / SOCKET).exists())
        completed = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(ROOT), str(ROOT / "examples"), str(tmp_path)],
            env={**os.environ, "HEALTHD_SOCKET": str(tmp_path / SOCKET), "SLURM_JOB_ID": "4711"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        own_end.close()
        live.wait(240)
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout.splitlines()[-1])
    moved = report["moved_at"]
    assert moved > 100, completed.stdout
    assert sum(report["counts"]) == 32
    assert report["counts"][2] == min(report["counts"]) < 8
    slow, after = report["took"][100 : moved + 1], report["took"][moved + 1 : moved + 25]
    assert statistics.median(after) < statistics.median(slow)
