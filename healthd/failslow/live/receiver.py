"""Socket that ranks of jobs connect to. It bounds the work for any input and shares it fairly between jobs.

It uses connections (SOCK_SEQPACKET), not datagrams to one socket (docs/adr/0031). A datagram socket has one queue for
all senders: a flood from one job fills it for the ranks of all other jobs. A connection has its own queue, its end is
the end of the rank, and the kernel states once and reliably which process connected (SO_PEERCRED, unix(7)). This also
works from another pid namespace, with the pid in this namespace. The job of that pid is the one of its cgroup. A
process outside any job is rejected.

Each poll has a budget: a number of messages, a share for each job, and POLL_SECONDS until the next poll. Messages that
are not read wait in the sender's own queue. When that is full, `healthd.client.step` adds the next steps to one
message.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from healthd.failslow.live.datagram import MOST_BYTES, Step, read
from healthd.failslow.live.document import Dropped
from healthd.host import shortage
from healthd.host.job_processes import job_of
from healthd.host.passed_descriptor import take_no_files

SOCKET = "failslow.sock"
LOOK_SECONDS = 0.2
MESSAGES_A_LOOK = 100  # 500 per second, each 0.1 ms including its evaluation
MESSAGES_OF_ONE = 2
ACCEPTED_A_LOOK = 32
MALFORMED_OF_ONE = 50  # messages, then the connection is closed
WAITING = 128  # connections that wait for accept(2)
MOST_CONNECTIONS = 2048  # of all jobs; the series of one rank take 85 KiB (bench/live_flood.py)
USUAL_FILES = 1024  # systemd's default for a service
OTHER_FILES = 64  # descriptors for other uses of this process
AGAIN_SECONDS = 10.0  # between two checks that the socket file still exists
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Heard(NamedTuple):
    """A message of a rank. connection: number of the connection, never reused."""

    connection: int
    pid: int
    job: str
    said: Step


class Left(NamedTuple):
    """A connection that ended: the process of the rank ended, or its healthd.client reconnected."""

    connection: int
    job: str


class _Dropped(NamedTuple):
    """A malformed message. The connection may have more messages."""


@dataclass(slots=True)
class _Connection:
    number: int
    stream: socket.socket
    pid: int
    uid: int
    job: str
    malformed: int = 0


class Receiver:
    """Receiver of messages. The constructor raises OSError if it cannot listen at `path`."""

    def __init__(self, path: str, root: str, jobs: int, ranks: int) -> None:
        self.path, self.root = path, root
        self.jobs, self.ranks = jobs, ranks
        self.dropped: Counter[str] = Counter()
        self.look_at = 0.0  # monotonic
        self._look_again_at = 0.0
        self._of_job: Counter[str] = Counter()
        self._connections: dict[int, _Connection] = {}
        self._made = self._turn = 0
        self._most = _most_connections()
        self._ready = select.epoll()
        self._listener = self._listen()

    def fileno(self) -> int:
        """Return an epoll descriptor that is readable if there is input."""
        return self._ready.fileno()

    def close(self) -> None:
        with self._brief():
            for connection in self._connections.values():
                connection.stream.close()
            self._connections.clear()
            self._listener.close()
        self._ready.close()
        with suppress(OSError):
            os.unlink(self.path)

    def said_dropped(self) -> Dropped:
        return Dropped(**self.dropped)

    def step(self, now: float) -> Iterator[Heard | Left]:
        """Yield the new messages and ended connections, within the budget. now: monotonic."""
        with self._brief():
            yield from self._look(now)

    def _look(self, now: float) -> Iterator[Heard | Left]:
        self.look_at = now + LOOK_SECONDS
        if now >= self._look_again_at:
            self._look_again_at = now + AGAIN_SECONDS
            self._listen_again()
        ready = self._ready.poll(0, self._most + 1)
        share = max(MESSAGES_OF_ONE, MESSAGES_A_LOOK // max(1, len(self._of_job)))
        budget, used = MESSAGES_A_LOOK, Counter[str]()
        self._turn += 1
        start = self._turn * 61 % len(ready) if ready else 0  # so that each connection gets its turn
        for descriptor, _ in (*ready[start:], *ready[:start]):
            if descriptor == self._listener.fileno():
                self._accept()
                continue
            connection = self._connections.get(descriptor)
            if connection is None:
                continue
            if budget <= 0 or used[connection.job] >= share:
                self.dropped["flood"] += 1
                continue
            for _ in range(MESSAGES_OF_ONE):
                budget -= 1
                used[connection.job] += 1
                said = self._read(connection)
                if isinstance(said, Left):
                    yield said
                    break
                if said is None:
                    break
                if isinstance(said, Step):
                    yield Heard(connection.number, connection.pid, connection.job, said)

    def _read(self, connection: _Connection) -> Step | _Dropped | Left | None:
        """Return the next message, or None if none is waiting."""
        try:
            message, _, flags, _ = connection.stream.recvmsg(MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return self._close(connection)
        if flags & socket.MSG_TRUNC:
            self.dropped["oversized"] += 1
        elif not message:
            return self._close(connection)  # an empty message looks the same, but a client never sends one
        else:
            step = read(message)
            if step is not None:
                return step
            self.dropped["malformed"] += 1
        connection.malformed += 1
        return self._close(connection) if connection.malformed >= MALFORMED_OF_ONE else _Dropped()

    def _close(self, connection: _Connection) -> Left:
        with suppress(OSError):
            self._ready.unregister(connection.stream)
        del self._connections[connection.stream.fileno()]
        connection.stream.close()
        self._of_job[connection.job] -= 1
        if not self._of_job[connection.job]:
            del self._of_job[connection.job]
        return Left(connection.number, connection.job)

    # --- connections

    def owner(self, job: str) -> int | None:
        """Return the user whose process connected first for this job, or None if there is no connection."""
        return next((one.uid for one in self._connections.values() if one.job == job), None)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_A_LOOK):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not shortage.has_no_descriptor(error):
                    continue  # the connection ended while it waited (accept(2): ECONNABORTED)
                # The connections wait in the queue until the next poll, so that the loop does not spin.
                shortage.record(shortage.DESCRIPTORS)
                self.dropped["file_descriptors"] += 1
                return
            stream.setblocking(False)
            pid, uid, _ = _CREDENTIALS.unpack(
                stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            job = (job_of(pid, self.root) if pid > 0 else None) or ""
            if why := self._refused(job):
                self.dropped[why] += 1
                stream.close()
                continue
            self._made += 1
            self._of_job[job] += 1
            self._connections[stream.fileno()] = _Connection(self._made, stream, pid, uid, job)
            self._ready.register(stream, select.EPOLLIN)

    def _refused(self, job: str) -> str:
        """Return the limit that forbids another connection of this job, or ""."""
        if not job:
            return "strangers"
        if job not in self._of_job and len(self._of_job) >= self.jobs:
            return "jobs"
        return "series" if self._of_job[job] >= self.ranks or len(self._connections) >= self._most else ""

    # --- the socket itself

    def _listen(self) -> socket.socket:
        with suppress(FileNotFoundError):
            os.unlink(self.path)  # left by a process that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._brief = take_no_files(listener)
            listener.bind(self.path)
            os.chmod(self.path, 0o666)  # ranks run as any user
            listener.listen(WAITING)
            found = os.stat(self.path)
        except BaseException:
            listener.close()
            raise
        self._identity = (found.st_dev, found.st_ino)
        self._ready.register(listener, select.EPOLLIN)
        return listener

    def _listen_again(self) -> None:
        """Create the socket again if its file was removed. Existing connections stay."""
        try:
            found = os.stat(self.path)
            there = (found.st_dev, found.st_ino) == self._identity
        except OSError:
            there = False
        if not there:
            self._ready.unregister(self._listener)
            self._listener.close()
            self._listener = self._listen()


def _most_connections() -> int:
    """Return the maximum number of connections that the descriptor limit of this process allows."""
    try:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # a system call filter may forbid the query
        soft = USUAL_FILES
    return max(1, MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft - OTHER_FILES, MOST_CONNECTIONS))
