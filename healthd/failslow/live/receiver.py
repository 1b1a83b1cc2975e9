"""Provides the socket to which jobs' ranks connect. It limits the work for each input and is fair between jobs.

It uses connections (SOCK_SEQPACKET), not datagrams to one socket (docs/adr/0031). A datagram socket has one queue for
all senders, so a flood from one job would block the ranks of all other jobs. A connection has its own queue and ends
with its rank. The kernel reliably reports which process connected (SO_PEERCRED, unix(7)), even for a process in another
pid namespace, with its pid in this namespace. The cgroup of this process identifies the job. A process outside any job
is rejected.

Polls are POLL_SECONDS apart. Each poll reads a limited number of messages, with a share for each job. All other
messages wait in the sender's own queue. If this queue is full, `healthd.client.step` combines the next steps into one
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

from healthd.failslow.live.datagram import MAX_BYTES, StepMessage, parse
from healthd.failslow.live.document import Dropped
from healthd.host import shortage
from healthd.host.job_processes import job_of_process
from healthd.host.passed_descriptor import refuse_descriptors

SOCKET = "failslow.sock"
POLL_SECONDS = 0.2
MESSAGES_PER_POLL = 100  # this is 500 messages per second; each takes 0.1 ms including its evaluation
MESSAGES_PER_CONNECTION = 2
ACCEPTS_PER_POLL = 32
MAX_MALFORMED = 50  # number of malformed messages after which the connection is closed
BACKLOG = 128  # maximum number of connections waiting for accept(2)
MAX_CONNECTIONS = 2048  # maximum for all jobs; the series for one rank take 85 KiB (bench/live_flood.py)
DEFAULT_FILES = 1024  # systemd's default limit for a service
RESERVED_FILES = 64  # number of file descriptors that this process needs for other uses
SOCKET_CHECK_SECONDS = 10.0  # interval between checks that the socket file still exists
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Received(NamedTuple):
    """A message from a rank. `connection` is the connection's number, which is never reused."""

    connection: int
    pid: int
    job: str
    step: StepMessage


class Disconnected(NamedTuple):
    """A connection that ended, because the rank's process ended or its healthd.client reconnected."""

    connection: int
    job: str


class _Malformed(NamedTuple):
    """A malformed message. The connection may have further messages."""


@dataclass(slots=True)
class _Connection:
    number: int
    stream: socket.socket
    pid: int
    uid: int
    job: str
    malformed: int = 0


class Receiver:
    """Receives messages. The constructor raises OSError if it cannot listen at `path`."""

    def __init__(self, path: str, root: str, max_jobs: int, max_ranks: int) -> None:
        self.path, self.root = path, root
        self.max_jobs, self.max_ranks = max_jobs, max_ranks
        self.dropped: Counter[str] = Counter()
        self.poll_at = 0.0  # monotonic
        self._check_socket_at = 0.0
        self._connections_by_job: Counter[str] = Counter()
        self._connections: dict[int, _Connection] = {}
        self._last_number = self._turn = 0
        self._max_connections = _connection_limit()
        self._ready = select.epoll()
        self._listener = self._listen()

    def fileno(self) -> int:
        """Return an epoll descriptor that becomes readable when there is input."""
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

    def dropped_counts(self) -> Dropped:
        return Dropped(**self.dropped)

    def step(self, now: float) -> Iterator[Received | Disconnected]:
        """Yield the new messages and ended connections that fit in the budget.

        Args:
            now: monotonic seconds.
        """
        with self._brief():
            yield from self._poll(now)

    def _poll(self, now: float) -> Iterator[Received | Disconnected]:
        self.poll_at = now + POLL_SECONDS
        if now >= self._check_socket_at:
            self._check_socket_at = now + SOCKET_CHECK_SECONDS
            self._reopen_socket()
        ready = self._ready.poll(0, self._max_connections + 1)
        share = max(MESSAGES_PER_CONNECTION, MESSAGES_PER_POLL // max(1, len(self._connections_by_job)))
        budget, used = MESSAGES_PER_POLL, Counter[str]()
        self._turn += 1
        # start with another connection in each poll, so that each gets a turn
        start = self._turn * 61 % len(ready) if ready else 0
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
            for _ in range(MESSAGES_PER_CONNECTION):
                budget -= 1
                used[connection.job] += 1
                message = self._read(connection)
                if isinstance(message, Disconnected):
                    yield message
                    break
                if message is None:
                    break
                if isinstance(message, StepMessage):
                    yield Received(connection.number, connection.pid, connection.job, message)

    def _read(self, connection: _Connection) -> StepMessage | _Malformed | Disconnected | None:
        """Return the next message, or None if none is waiting."""
        try:
            message, _, flags, _ = connection.stream.recvmsg(MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return self._close(connection)
        if flags & socket.MSG_TRUNC:
            self.dropped["oversized"] += 1
        elif not message:
            # an empty message would look the same, but a client never sends an empty message
            return self._close(connection)
        else:
            step = parse(message)
            if step is not None:
                return step
            self.dropped["malformed"] += 1
        connection.malformed += 1
        return self._close(connection) if connection.malformed >= MAX_MALFORMED else _Malformed()

    def _close(self, connection: _Connection) -> Disconnected:
        with suppress(OSError):
            self._ready.unregister(connection.stream)
        del self._connections[connection.stream.fileno()]
        connection.stream.close()
        self._connections_by_job[connection.job] -= 1
        if not self._connections_by_job[connection.job]:
            del self._connections_by_job[connection.job]
        return Disconnected(connection.number, connection.job)

    # --- connections

    def find_user(self, job: str) -> int | None:
        """Return the user whose process was the first to connect for this job, or None if there is no connection."""
        return next((connection.uid for connection in self._connections.values() if connection.job == job), None)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_POLL):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not shortage.has_no_descriptor(error):
                    continue  # the connection ended while it waited (accept(2): ECONNABORTED)
                # The connections wait in the queue until the next poll. Trying again at once would be a busy loop.
                shortage.record(shortage.DESCRIPTORS)
                self.dropped["file_descriptors"] += 1
                return
            stream.setblocking(False)
            pid, uid, _ = _CREDENTIALS.unpack(
                stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            job = (job_of_process(pid, self.root) if pid > 0 else None) or ""
            if refusal := self._refusal(job):
                self.dropped[refusal] += 1
                stream.close()
                continue
            self._last_number += 1
            self._connections_by_job[job] += 1
            self._connections[stream.fileno()] = _Connection(self._last_number, stream, pid, uid, job)
            self._ready.register(stream, select.EPOLLIN)

    def _refusal(self, job: str) -> str:
        """Return the name of the limit that forbids another connection from this job, or "" if it is allowed."""
        if not job:
            return "strangers"
        if job not in self._connections_by_job and len(self._connections_by_job) >= self.max_jobs:
            return "jobs"
        return (
            "series"
            if self._connections_by_job[job] >= self.max_ranks or len(self._connections) >= self._max_connections
            else ""
        )

    # --- the socket itself

    def _listen(self) -> socket.socket:
        with suppress(FileNotFoundError):
            os.unlink(self.path)  # left behind by a process that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._brief = refuse_descriptors(listener)
            listener.bind(self.path)
            os.chmod(self.path, 0o666)  # ranks may run as any user
            listener.listen(BACKLOG)
            found = os.stat(self.path)
        except BaseException:
            listener.close()
            raise
        self._identity = (found.st_dev, found.st_ino)
        self._ready.register(listener, select.EPOLLIN)
        return listener

    def _reopen_socket(self) -> None:
        """Create the socket again if its file was removed. Existing connections remain open."""
        try:
            found = os.stat(self.path)
            is_present = (found.st_dev, found.st_ino) == self._identity
        except OSError:
            is_present = False
        if not is_present:
            self._ready.unregister(self._listener)
            self._listener.close()
            self._listener = self._listen()


def _connection_limit() -> int:
    """Return the maximum number of connections that this process's descriptor limit allows."""
    try:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # a system call filter may forbid the query
        soft = DEFAULT_FILES
    return max(1, MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft - RESERVED_FILES, MAX_CONNECTIONS))
