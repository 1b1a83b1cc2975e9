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


class ReceiverWithJobs:
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

    def step(self) -> ReceiverWithJobs:
        self.now += 1.0
        for event in self.receiver.step(self.now):
            (self.received if isinstance(event, Received) else self.disconnected).append(event)
        return self

    def connect(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stream.connect(self.path)
        return stream


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    made = ReceiverWithJobs(tmp_path)
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


def test_step_sends_rank_and_duration(ranks):
    client.step()
    client.step(busy=0.25)
    (received,) = ranks.step().step().received
    sent = received.step
    assert (received.job, received.pid) == ("4711", os.getpid())
    assert (sent.rank, sent.local_rank, sent.step, sent.steps, sent.busy, sent.wait) == (5, 1, 1, 1, 0.25, None)
    assert sent.seconds > 0


def test_fast_steps_are_joined_into_one_message(ranks, monkeypatch):
    client.step()
    client.step()
    monkeypatch.setattr(client, "SEND_SECONDS", 3600.0)
    for _ in range(9):
        client.step()
    monkeypatch.setattr(client, "SEND_SECONDS", 0.0)
    client.step()
    assert [entry.step.steps for entry in ranks.step().step().received] == [1, 10]


def test_step_ignores_invalid_busy_time(ranks):
    client.step()
    for busy in ("x", None, object(), [], b"", float("inf"), -1.0, float("nan")):
        client.step(busy=busy)
    assert {entry.step.busy for entry in ranks.step().step().step().step().step().received} == {None}


class Tensor:
    """A 0-d tensor of another library: no float, but float() accepts it."""

    def __float__(self) -> float:
        return 0.25


@pytest.mark.parametrize("value", [0.25, Fraction(1, 4), Decimal("0.25"), Tensor(), "0.25"])
def test_step_accepts_any_float_convertible_value(ranks, value):
    client.step()
    client.step(busy=value, wait=value)
    assert [(entry.step.busy, entry.step.wait) for entry in ranks.step().step().received] == [(0.25, 0.25)]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int64", "array"])
def test_step_accepts_numpy_scalars(ranks, kind):
    numpy = pytest.importorskip("numpy")
    client.step()
    client.step(busy=getattr(numpy, kind)(1))
    assert [entry.step.busy for entry in ranks.step().step().received] == [1.0]


@pytest.mark.parametrize(
    "bad",
    [None, "x", float("nan"), float("inf"), -1.0, 10**400, object()],
    ids=["none", "text", "nan", "infinity", "negative", "too large", "object"],
)
def test_step_leaves_invalid_value_out_of_mean(ranks, monkeypatch, bad):
    client.step()
    client.step(busy=0.5)
    monkeypatch.setattr(client, "SEND_SECONDS", 3600.0)
    client.step(busy=0.2)
    client.step(busy=bad)
    monkeypatch.setattr(client, "SEND_SECONDS", 0.0)
    client.step(busy=0.4)
    last = [entry.step for entry in ranks.step().step().step().received][-1]
    assert (last.steps, last.busy) == (3, pytest.approx(0.3))


def test_step_accepts_number_too_large_for_float(ranks):
    client.step()
    client.step(busy=10**400, wait=10**400)
    client.step(busy=1)
    client.step(busy=1)


@given(st.binary(max_size=300))
def test_parse_accepts_any_bytes(data):
    assert datagram.parse(data) is None or isinstance(datagram.parse(data), datagram.StepMessage)


@given(
    *(st.integers(-(2**31), 2**31 - 1),) * 2,
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**31), 2**31 - 1),
    *(st.floats(width=64),) * 3,
)
def test_parse_gives_valid_step_or_none(rank, local, step, steps, seconds, busy, wait):
    parsed = datagram.parse(client.MESSAGE.pack(client.MAGIC, rank, local, step, steps, seconds, busy, wait))
    if parsed is None:
        return
    assert 0 < parsed.seconds <= datagram.MAX_SECONDS
    assert (parsed.rank >= -1, parsed.steps >= 1) == (True, True)
    for part in (parsed.busy, parsed.wait):
        assert part is None or 0 <= part <= datagram.MAX_SECONDS


def test_parse_ignores_added_fields():
    parsed = datagram.parse(message() + bytes(40))
    assert isinstance(parsed, datagram.StepMessage)
    assert parsed.seconds == 0.5
    assert datagram.parse(message() + bytes(datagram.MAX_BYTES)) is None
    assert datagram.parse(message()[:-1]) is None


# --- healthd is missing, blocked or restarted


def test_step_without_healthd_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_pid", 0)
    for path in (tmp_path / "none", tmp_path, "x" * 300, "\0x"):
        monkeypatch.setitem(os.environ, "HEALTHD_SOCKET", str(path)) if "\0" not in str(path) else None
        client._pid = 0
        for _ in range(5):
            client.step(busy=1.0)
    assert client._connection is None
    client._pid = 0


def test_failed_connection_is_retried_after_delay(ranks, monkeypatch):
    ranks.receiver.close()
    attempts = []
    real = socket.socket
    monkeypatch.setattr(client, "RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(socket, "socket", lambda *a: attempts.append(1) or real(*a))
    for _ in range(100):
        client.step()
    assert len(attempts) == 1


def test_blocked_healthd_does_not_delay_steps(ranks):
    client.step()
    for _ in range(2000):  # more than any message queue holds
        client.step()
    for _ in range(2000):
        ranks.step()
    client.step()
    ranks.step()
    steps = [entry.step for entry in ranks.received]
    assert sum(entry.steps for entry in steps) == 2001
    assert len(steps) < 2001
    assert [entry.step.step for entry in ranks.received][-1] == 2001


def test_step_reconnects_after_restart_of_healthd(ranks):
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


def test_removed_socket_is_created_again_and_connections_stay(ranks):
    client.step()
    client.step()
    ranks.step().step()
    os.unlink(ranks.path)
    ranks.now += 60.0
    ranks.step()
    client.step()
    with ranks.connect() as other_rank:
        other_rank.send(message(rank=7))
        until(lambda: len(ranks.step().received) == 3)
    assert {entry.step.rank for entry in ranks.received} == {5, 7}


# --- processes, threads, containers


def test_child_process_has_own_connection(ranks):
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
    by_connection = {entry.connection: entry.pid for entry in ranks.received}
    assert sorted(by_connection.values()) == sorted((os.getpid(), child))
    assert [entry.connection for entry in ranks.disconnected] == [c for c, pid in by_connection.items() if pid == child]


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


def test_step_at_interpreter_exit_raises_nothing():
    completed = subprocess.run(
        [sys.executable, "-c", LAST_STEPS], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (completed.returncode, completed.stderr, set(completed.stdout.split())) == (0, "", {"stepped"})


def test_parallel_steps_of_threads_raise_nothing(ranks):
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
def test_rank_in_container_is_found_by_outer_pid(tmp_path, monkeypatch):
    """The rank has its own mount and pid namespace, with the socket's folder elsewhere and a copy of the client."""
    made = ReceiverWithJobs(tmp_path)
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


def test_process_outside_jobs_is_disconnected_and_counted(ranks):
    (ranks.folder / f"proc/{os.getpid()}/cgroup").write_text("0::/user.slice/user-1000.slice/job_7\n")
    with ranks.connect() as stranger:
        stranger.send(message())
        ranks.step().step()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stranger.send(message())
    assert ranks.received == []
    assert ranks.receiver.dropped_counts().strangers == 1


def test_stranger_is_counted_without_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "ALIVE_SECONDS", 0.0)
    document = tmp_path / live_document.FILE
    own_end, process_end = socket.socketpair()
    process_end.setblocking(False)
    live = process.LiveProcess(Locations(str(tmp_path), str(tmp_path)), process_end)
    with own_end:
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
def test_connection_without_descriptor_waits_and_is_counted(ranks, shortages, number):
    listener = ranks.receiver._listener = Listener(ranks.receiver._listener, number, number)
    with ranks.connect() as rank:
        rank.send(message(0.5))
        ranks.step().step()
        dropped = ranks.receiver.dropped_counts()
        assert (dropped.file_descriptors, dropped.series) == (2, 0)
        assert listener.calls == 2, "one attempt per step"
        assert ranks.step().step().received[-1].step.seconds == 0.5
    assert dict(shortages) == {shortage.DESCRIPTORS: 2}


def test_aborted_connection_is_no_shortage(ranks, shortages):
    ranks.receiver._listener = Listener(ranks.receiver._listener, errno.ECONNABORTED)
    with ranks.connect() as rank:
        rank.send(message(0.5))
        assert ranks.step().step().received[-1].step.seconds == 0.5
    assert (dict(shortages), ranks.receiver.dropped_counts()) == ({}, live_document.Dropped())


def test_shortage_of_descriptors_is_reported_temporarily(tmp_path, shortages, monkeypatch):
    monkeypatch.setattr(process, "ALIVE_SECONDS", 0.0)
    monkeypatch.setattr(process, "EVALUATION_SECONDS", 0.0)
    document = tmp_path / live_document.FILE
    own_end, process_end = socket.socketpair()
    process_end.setblocking(False)
    live = process.LiveProcess(Locations(str(tmp_path), str(tmp_path)), process_end)
    with own_end:
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
def test_too_long_message_is_dropped_and_next_is_read(ranks, size):
    with ranks.connect() as stream:
        stream.send(b"x" * size)
        stream.send(message())
        ranks.step().step()
        assert len(ranks.received) == 1
        assert ranks.receiver.dropped_counts().oversized == 1


def test_message_of_one_megabyte_is_refused_by_kernel(ranks):
    with ranks.connect() as stream:
        with pytest.raises(OSError, match="too long"):
            stream.send(bytes(1 << 20))
        stream.send(message())
        assert len(ranks.step().step().received) == 1


def test_passed_file_descriptor_blocks_nothing(ranks):
    """Closing such a file could block for days, so healthd refuses it if the kernel can."""
    with ranks.connect() as rank:
        with pytest.raises(PermissionError) if can_refuse_files(rank) else nullcontext():
            socket.send_fds(rank, [message(0.25)], [0])
        rank.send(message(0.5))
        assert ranks.step().step().received[-1].step.seconds == 0.5


def can_refuse_files(stream: socket.socket) -> bool:
    """Return whether the kernel has SO_PASSRIGHTS (Linux 6.16 and later)."""
    try:
        return stream.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) >= 0
    except OSError:
        return False


def test_sender_of_invalid_messages_is_disconnected(ranks):
    with ranks.connect() as stream:
        for _ in range(60):
            stream.send(struct.pack("<4s", b"hfs9"))
        for _ in range(60):
            ranks.step()
        assert ranks.receiver.dropped_counts().malformed == 50
        assert ranks.received == []
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stream.send(message())


def test_flood_of_one_job_does_not_displace_other_job(ranks):
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
        assert [entry.step.seconds for entry in ranks.received if entry.job == "8"] == [
            1.0 + turn for turn in range(50)
        ]
    for stream in floods:
        stream.close()


def test_step_reads_limited_number_of_messages(ranks):
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
    connections = {entry.connection for entry in ranks.received}
    for _ in range(10):
        ranks.step()
    assert len({entry.connection for entry in ranks.received}) == 100 > len(connections)
    for stream in floods:
        stream.close()


def test_ranks_and_jobs_are_limited(ranks):
    """4 jobs of 4 ranks are accepted. Further ones are disconnected, and no file descriptor leaks."""
    before = len(os.listdir("/proc/self/fd"))
    connected, jobs = [], 0
    for number in range(10_000):
        ranks.in_job(os.getpid(), str(number % 10 + 1))
        stream = ranks.connect()
        ranks.step()
        try:
            stream.send(message())
            connected.append(stream)
        except OSError:
            stream.close()
        jobs = max(jobs, len({entry.job for entry in ranks.step().received}))
    dropped = ranks.receiver.dropped_counts()
    assert (len(connected), jobs) == (16, 4)
    assert dropped.series + dropped.jobs == 10_000 - 16
    assert min(dropped.series, dropped.jobs) > 0
    for stream in connected:
        stream.close()
    ranks.step()
    assert len(ranks.disconnected) == 16
    assert len(os.listdir("/proc/self/fd")) <= before


def test_rank_with_same_number_is_separate_series(ranks):
    with ranks.connect() as first, ranks.connect() as second:
        first.send(message(rank=3))
        second.send(message(rank=3))
        ranks.step().step()
        assert len({message_received.connection for message_received in ranks.received}) == 2
