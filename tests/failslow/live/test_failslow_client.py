"""Tests of `healthd.client.step` with a real receiver: faults there never stop a training loop."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from healthd import client
from healthd.failslow.live import datagram, process
from healthd.failslow.live import document as live_document
from healthd.failslow.live.receiver import Disconnected, Received, Receiver
from healthd.failslow.live.settings import LiveSettings, Locations
from healthd.host import shortage
from healthd.host.passed_descriptor import SO_PASSRIGHTS

ROOT = Path(__file__).parents[3]
CGROUP = "0::/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0\n"


class Ranks:
    """A receiver on a simulated tree, where processes of this machine belong to jobs."""

    def __init__(self, folder: Path, jobs: int = 4, ranks: int = 4) -> None:
        self.folder = folder
        self.path = str(folder / "failslow.sock")
        self.receiver = Receiver(self.path, str(folder), jobs, ranks)
        self.received: list[Received] = []
        self.disconnected: list[Disconnected] = []
        self.now = 0.0

    def in_job(self, pid: int, job: str) -> None:
        place = self.folder / f"proc/{pid}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "cgroup").write_text(CGROUP.format(job))

    def step(self) -> Ranks:
        self.now += 1.0
        for one in self.receiver.step(self.now):
            (self.received if isinstance(one, Received) else self.disconnected).append(one)
        return self

    def connect(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stream.connect(self.path)
        return stream


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    made = Ranks(tmp_path)
    made.in_job(os.getpid(), "4711")
    monkeypatch.setenv("HEALTHD_SOCKET", made.path)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(client, "SEND_SECONDS", 0.0)
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.0)
    client._pid = 0
    client._last = None
    yield made
    made.receiver.close()
    client._disconnect()
    client._pid = 0


def message(seconds: float = 0.5, busy: float = 0.4, rank: int = 0, steps: int = 1) -> bytes:
    return client.MESSAGE.pack(client.MAGIC, rank, rank, 1, steps, seconds, busy, client.NOT_MEASURED)


# --- content of messages


def test_a_step_says_who_it_is_and_how_long_it_took(ranks):
    client.step()
    client.step(busy=0.25)
    (heard,) = ranks.step().step().received
    said = heard.step
    assert (heard.job, heard.pid) == ("4711", os.getpid())
    assert (said.rank, said.local_rank, said.step, said.steps, said.busy, said.wait) == (5, 1, 1, 1, 0.25, None)
    assert said.seconds > 0


def test_steps_that_follow_each_other_fast_are_one_message(ranks, monkeypatch):
    client.step()
    client.step()
    monkeypatch.setattr(client, "SEND_SECONDS", 3600.0)
    for _ in range(9):
        client.step()
    monkeypatch.setattr(client, "SEND_SECONDS", 0.0)
    client.step()
    assert [one.step.steps for one in ranks.step().step().received] == [1, 10]


def test_an_argument_that_is_no_number_is_as_good_as_none(ranks):
    client.step()
    for busy in ("x", None, object(), [], b"", float("inf"), -1.0, float("nan")):
        client.step(busy=busy)
    assert {one.step.busy for one in ranks.step().step().step().step().step().received} == {None}


class Tensor:
    """A 0-d tensor of another library: no float, but float() accepts it."""

    def __float__(self) -> float:
        return 0.25


@pytest.mark.parametrize("value", [0.25, Fraction(1, 4), Decimal("0.25"), Tensor(), "0.25"])
def test_step_accepts_whatever_float_accepts(ranks, value):
    client.step()
    client.step(busy=value, wait=value)
    assert [(one.step.busy, one.step.wait) for one in ranks.step().step().received] == [(0.25, 0.25)]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int64", "array"])
def test_step_accepts_numpy_scalars(ranks, kind):
    numpy = pytest.importorskip("numpy")
    client.step()
    client.step(busy=getattr(numpy, kind)(1))
    assert [one.step.busy for one in ranks.step().step().received] == [1.0]


@pytest.mark.parametrize(
    "bad",
    [None, "x", float("nan"), float("inf"), -1.0, 10**400, object()],
    ids=["none", "text", "nan", "infinity", "negative", "too large", "object"],
)
def test_step_leaves_a_bad_value_out_of_the_mean_of_its_message(ranks, monkeypatch, bad):
    client.step()
    client.step(busy=0.5)
    monkeypatch.setattr(client, "SEND_SECONDS", 3600.0)
    client.step(busy=0.2)
    client.step(busy=bad)
    monkeypatch.setattr(client, "SEND_SECONDS", 0.0)
    client.step(busy=0.4)
    last = [one.step for one in ranks.step().step().step().received][-1]
    assert (last.steps, last.busy) == (3, pytest.approx(0.3))


def test_a_number_that_no_float_can_hold_raises_nothing(ranks):
    client.step()
    client.step(busy=10**400, wait=10**400)
    client.step(busy=1)
    client.step(busy=1)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_nothing(data):
    assert datagram.parse(data) is None or isinstance(datagram.parse(data), datagram.StepMessage)


@given(
    *(st.integers(-(2**31), 2**31 - 1),) * 2,
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**31), 2**31 - 1),
    *(st.floats(width=64),) * 3,
)
def test_what_a_message_can_hold_is_a_step_that_can_be_or_nothing(rank, local, step, steps, seconds, busy, wait):
    said = datagram.parse(client.MESSAGE.pack(client.MAGIC, rank, local, step, steps, seconds, busy, wait))
    if said is None:
        return
    assert 0 < said.seconds <= datagram.MAX_SECONDS
    assert (said.rank >= -1, said.steps >= 1) == (True, True)
    for part in (said.busy, said.wait):
        assert part is None or 0 <= part <= datagram.MAX_SECONDS


def test_fields_that_later_versions_add_behind_are_passed_over():
    said = datagram.parse(message() + bytes(40))
    assert isinstance(said, datagram.StepMessage)
    assert said.seconds == 0.5
    assert datagram.parse(message() + bytes(datagram.MAX_BYTES)) is None
    assert datagram.parse(message()[:-1]) is None


# --- healthd is missing, blocked or restarted


def test_nothing_happens_where_no_healthd_is(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_pid", 0)
    for path in (tmp_path / "none", tmp_path, "x" * 300, "\0x"):
        monkeypatch.setitem(os.environ, "HEALTHD_SOCKET", str(path)) if "\0" not in str(path) else None
        client._pid = 0
        for _ in range(5):
            client.step(busy=1.0)
    assert client._connection is None
    client._pid = 0


def test_attempts_to_connect_are_far_apart(ranks, monkeypatch):
    ranks.receiver.close()
    attempts = []
    real = socket.socket
    monkeypatch.setattr(client, "RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(socket, "socket", lambda *a: attempts.append(1) or real(*a))
    for _ in range(100):
        client.step()
    assert len(attempts) == 1


def test_a_healthd_that_reads_nothing_does_not_hold_up_a_step_and_is_told_of_all_steps_later(ranks):
    client.step()
    for _ in range(2000):  # more than any message queue holds
        client.step()
    for _ in range(2000):
        ranks.step()
    client.step()
    ranks.step()
    steps = [one.step for one in ranks.received]
    assert sum(one.steps for one in steps) == 2001
    assert len(steps) < 2001
    assert [one.step.step for one in ranks.received][-1] == 2001


def test_a_healthd_that_was_restarted_is_found_again(ranks):
    client.step()
    client.step()
    assert len(ranks.step().step().received) == 1
    ranks.receiver.close()
    for _ in range(3):
        client.step()
    ranks.receiver = Receiver(ranks.path, str(ranks.folder), 4, 4)
    ranks.now = 0.0
    until(lambda: client.step() or len(ranks.step().received) > 1)
    assert ranks.received[-1].job == "4711"


def test_a_socket_that_was_removed_is_made_again_and_who_is_connected_stays(ranks):
    client.step()
    client.step()
    ranks.step().step()
    os.unlink(ranks.path)
    ranks.now += 60.0
    ranks.step()
    client.step()
    with ranks.connect() as other:
        other.send(message(rank=7))
        until(lambda: len(ranks.step().received) == 3)
    assert {one.step.rank for one in ranks.received} == {5, 7}


# --- processes, threads, containers


def test_a_child_has_a_connection_of_its_own(ranks):
    client.step()
    client.step()
    child = os.fork()
    if child == 0:
        for _ in range(3):
            client.step()
        os._exit(0)
    ranks.in_job(child, "4711")
    assert os.waitpid(child, 0)[1] == 0
    client.step()
    ranks.step().step().step().step()
    by_connection = {one.connection: one.pid for one in ranks.received}
    assert sorted(by_connection.values()) == sorted((os.getpid(), child))
    assert [one.connection for one in ranks.disconnected] == [c for c, pid in by_connection.items() if pid == child]


LAST_STEPS = """
import os, sys
from healthd import client

class Loop:
    def __init__(self, step, write):
        self.step, self.write = step, write
    def __del__(self):
        try:
            self.step()
            self.write(1, b"stepped ")
        except BaseException:
            self.write(1, b"raised ")

client.step(), client.step()
client.kept, client._kept, sys.kept = (Loop(client.step, os.write) for _ in range(3))
"""


def test_a_step_while_the_interpreter_ends_raises_nothing():
    ended = subprocess.run([sys.executable, "-c", LAST_STEPS], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr, set(ended.stdout.split())) == (0, "", {"stepped"})


def test_threads_that_step_at_once_raise_nothing(ranks):
    failed = []
    client.step()

    def loop():
        try:
            for _ in range(2000):
                client.step(busy=0.1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ranks.step()
    for thread in threads:
        thread.join()
    assert failed == []
    until(lambda: ranks.step().received)  # the first step accepts the connection, the next reads


LOOP = """
import sys, time
sys.path.insert(0, sys.argv[1])
import client
client.SEND_SECONDS = 0.0
while True:
    client.step(busy=0.01)
    time.sleep(0.01)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_rank_in_a_container_is_known_by_the_pid_that_it_has_here(tmp_path, monkeypatch):
    """The rank has its own mount and pid namespace, with the socket's folder elsewhere and a copy of the client."""
    made = Ranks(tmp_path)
    copy, mounted = tmp_path / "image", tmp_path / "image/run"
    mounted.mkdir(parents=True)
    (copy / "client.py").write_text(Path(client.__file__).read_text())
    script = 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$5"'
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"]
    argv = [*unshare, str(tmp_path), str(mounted), sys.executable, LOOP, str(copy)]
    rank = subprocess.Popen(argv, env={"HEALTHD_SOCKET": str(mounted / "failslow.sock"), "SLURM_PROCID": "3"})
    try:
        children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
        until(lambda: children.read_text().split() or rank.poll() is not None)
        if rank.poll() is not None:
            pytest.skip("no namespaces here")
        inside = int(children.read_text().split()[0])
        made.in_job(inside, "99")
        # Its first connection may precede the assignment to the job; then it connects again.
        until(lambda: made.step().received or time.sleep(0.05), seconds=60)
        assert (made.received[0].pid, made.received[0].job, made.received[0].step.rank) == (inside, "99", 3)
    finally:
        rank.kill()
        rank.wait()
        made.receiver.close()


# --- hostile users


def test_who_is_in_no_job_is_turned_away_and_counted(ranks):
    (ranks.folder / f"proc/{os.getpid()}/cgroup").write_text("0::/user.slice/user-1000.slice/job_7\n")
    with ranks.connect() as stranger:
        stranger.send(message())
        ranks.step().step()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stranger.send(message())
    assert ranks.received == []
    assert ranks.receiver.dropped_counts().strangers == 1


def test_who_was_turned_away_is_told_also_where_no_job_tells_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "ALIVE_SECONDS", 0.0)
    document = tmp_path / live_document.FILE
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    live = process.LiveProcess(Locations(str(tmp_path), str(tmp_path)), theirs)
    with ours:
        try:
            live.reconfigure(LiveSettings(client=True))
            live.step()
            assert live_document.parse(document.read_text()).dropped.strangers == 0
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(tmp_path / "failslow.sock"))
                until(lambda: live.step() or live_document.parse(document.read_text()).dropped.strangers == 1)
        finally:
            live.close()


class Listener:
    """A listening socket whose accept(2) fails a few times first."""

    def __init__(self, real, *errors):
        self.real, self.errors, self.calls = real, list(errors), 0

    def fileno(self):
        return self.real.fileno()

    def close(self):
        self.real.close()

    def accept(self):
        self.calls += 1
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return self.real.accept()


@pytest.fixture
def shortages(monkeypatch):
    monkeypatch.setattr(shortage, "counts", Counter())
    monkeypatch.setattr(shortage, "_last", {})
    return shortage.counts


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_connection_without_a_descriptor_waits_and_is_counted_as_a_shortage(ranks, shortages, number):
    listener = ranks.receiver._listener = Listener(ranks.receiver._listener, number, number)
    with ranks.connect() as rank:
        rank.send(message(0.5))
        ranks.step().step()
        dropped = ranks.receiver.dropped_counts()
        assert (dropped.file_descriptors, dropped.series) == (2, 0)
        assert listener.calls == 2, "one attempt per step"
        assert ranks.step().step().received[-1].step.seconds == 0.5
    assert dict(shortages) == {shortage.DESCRIPTORS: 2}


def test_a_connection_that_ended_while_it_waited_is_no_shortage(ranks, shortages):
    ranks.receiver._listener = Listener(ranks.receiver._listener, errno.ECONNABORTED)
    with ranks.connect() as rank:
        rank.send(message(0.5))
        assert ranks.step().step().received[-1].step.seconds == 0.5
    assert (dict(shortages), ranks.receiver.dropped_counts()) == ({}, live_document.Dropped())


def test_a_shortage_of_descriptors_is_reported_as_a_trouble_for_a_while(tmp_path, shortages, monkeypatch):
    monkeypatch.setattr(process, "ALIVE_SECONDS", 0.0)
    monkeypatch.setattr(process, "EVALUATION_SECONDS", 0.0)
    document = tmp_path / live_document.FILE
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    live = process.LiveProcess(Locations(str(tmp_path), str(tmp_path)), theirs)
    with ours:
        try:
            live.step()
            shortage.record(shortage.DESCRIPTORS)
            live.step()
            (problem,) = live_document.parse(document.read_text()).problems
            assert "file descriptors" in problem
            monkeypatch.setattr(shortage, "REPORT_SECONDS", 0.0)
            live.step()
            assert live_document.parse(document.read_text()).problems == ()
        finally:
            live.close()


@pytest.mark.parametrize("size", [257, 4096, 100_000])
def test_a_message_that_is_too_long_is_dropped_and_the_next_is_read(ranks, size):
    with ranks.connect() as stream:
        stream.send(b"x" * size)
        stream.send(message())
        ranks.step().step()
        assert len(ranks.received) == 1
        assert ranks.receiver.dropped_counts().oversized == 1


def test_a_message_of_a_megabyte_is_refused_by_the_kernel(ranks):
    with ranks.connect() as stream:
        with pytest.raises(OSError, match="too long"):
            stream.send(bytes(1 << 20))
        stream.send(message())
        assert len(ranks.step().step().received) == 1


def test_an_open_file_that_is_handed_over_holds_up_nobody(ranks):
    """Closing such a file could block for days, so healthd refuses it if the kernel can."""
    with ranks.connect() as rank:
        with pytest.raises(PermissionError) if refuses_files(rank) else nullcontext():
            socket.send_fds(rank, [message(0.25)], [0])
        rank.send(message(0.5))
        assert ranks.step().step().received[-1].step.seconds == 0.5


def refuses_files(stream: socket.socket) -> bool:
    """Return whether the kernel has SO_PASSRIGHTS (Linux 6.16 and later)."""
    try:
        return stream.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) >= 0
    except OSError:
        return False


def test_who_sends_only_nonsense_is_hung_up_on(ranks):
    with ranks.connect() as stream:
        for _ in range(60):
            stream.send(struct.pack("<4s", b"hfs9"))
        for _ in range(60):
            ranks.step()
        assert ranks.receiver.dropped_counts().malformed == 50
        assert ranks.received == []
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stream.send(message())


def test_a_flood_of_one_job_takes_nothing_from_another(ranks):
    """The flood fills only its own queues; the other job has its share of each step."""
    floods = [ranks.connect() for _ in range(4)]
    ranks.step()
    ranks.in_job(os.getpid(), "8")
    with ranks.connect() as honest:
        ranks.step()
        for stream in floods:
            stream.setblocking(False)
        for turn in range(50):
            for stream in floods:
                try:
                    while True:
                        stream.send(message(rank=99))
                except BlockingIOError:
                    pass
            honest.send(message(seconds=1.0 + turn))
            ranks.step()
        ranks.step()
        assert [one.step.seconds for one in ranks.received if one.job == "8"] == [1.0 + turn for turn in range(50)]
    for stream in floods:
        stream.close()


def test_one_look_reads_no_more_than_its_budget(ranks):
    ranks.receiver.max_ranks = 200
    floods = [ranks.connect() for _ in range(100)]
    for _ in range(5):
        ranks.step()
    for stream in floods:
        for _ in range(5):
            stream.send(message())
    before = len(ranks.received)
    ranks.step()
    assert 0 < len(ranks.received) - before <= 100
    seen = {one.connection for one in ranks.received}
    for _ in range(10):
        ranks.step()
    assert len({one.connection for one in ranks.received}) == 100 > len(seen)
    for stream in floods:
        stream.close()


def test_ten_thousand_series_are_no_more_than_the_bounds_allow(ranks):
    """4 jobs of 4 ranks are accepted. Further ones are disconnected, and no file descriptor leaks."""
    before = len(os.listdir("/proc/self/fd"))
    kept, jobs = [], 0
    for number in range(10_000):
        ranks.in_job(os.getpid(), str(number % 10 + 1))
        stream = ranks.connect()
        ranks.step()
        try:
            stream.send(message())
            kept.append(stream)
        except OSError:
            stream.close()
        jobs = max(jobs, len({one.job for one in ranks.step().received}))
    dropped = ranks.receiver.dropped_counts()
    assert (len(kept), jobs) == (16, 4)
    assert dropped.series + dropped.jobs == 10_000 - 16
    assert min(dropped.series, dropped.jobs) > 0
    for stream in kept:
        stream.close()
    ranks.step()
    assert len(ranks.disconnected) == 16
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rank_that_calls_itself_as_another_is_a_series_of_its_own(ranks):
    with ranks.connect() as one, ranks.connect() as other:
        one.send(message(rank=3))
        other.send(message(rank=3))
        ranks.step().step()
        assert len({heard.connection for heard in ranks.received}) == 2
