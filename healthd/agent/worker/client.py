"""The daemon's client for the worker. It sends one request at a time, each with a deadline.

A worker that hangs in the NVIDIA driver is abandoned, never killed: a SIGKILL there has frozen GPUs (Xid 119 and 120
followed). Its stream is closed, and the worker exits once the call returns. Other overdue workers are killed. Until a
lost worker has exited, its resource is quarantined: requests for the resource are STUCK at once, so that each resource
has at most one lost worker.

The client never blocks: the socket is non-blocking, and the daemon waits for children through pidfds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from healthd.agent.worker.process import Setup
from healthd.agent.worker.requests import (
    ANSWERS,
    NO_ANSWER,
    SEPARATOR,
    Answer,
    CloseNvml,
    Message,
    Operation,
    Response,
    Run,
    RunAnswer,
)
from healthd.common import ownership
from healthd.common.atomic_files import open_own_file
from healthd.common.model import Outcome, RunName
from healthd.common.values import DecodeError, Value, decode, encode
from healthd.host import shortage

if TYPE_CHECKING:
    from healthd.agent.worker.forked import ForkedProcess

MAX_REPLY_BYTES = 8 << 20
CHUNK_BYTES = 1 << 16
NVML_PROBLEM = "nvml_trouble"  # name in AFTER_EVENTS: such a check runs at once after a reply with `has_nvml_problem`
TRUSTED_SECONDS = 10.0  # a library that a worker loaded this recently is still the installed library
EXIT_WAIT_SECONDS = 0.2  # how long to wait for a worker's exit before it counts as lost
WORKERS_FILE = "workers.json"
Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"


class Request(Value, frozen=True):
    """A request. `resource` is the resource in which the request may hang ("nvml", "mount /data")."""

    resource: str
    timeout_seconds: float
    operation: Operation

    @property
    def kind(self) -> type[Operation]:
        return type(self.operation)


CLOSE_NVML = Request("nvml", 10.0, CloseNvml())


class Reply(Value, frozen=True):
    """Result of a request.

    answered      True if the worker responded
    answer        the answer, of the request's type in ANSWERS (if FAILED, a run's findings so far)
    message_time  the time in the message (epoch seconds); None if it has no time or there was no response
    clock_step    seconds by which the clock was set between that time and the response
    """

    request: Request
    outcome: Outcome
    seconds: float
    error: str = ""
    answered: bool = False
    answer: Answer | None = None
    message_time: float | None = None
    clock_step: float = 0.0

    @property
    def run(self) -> RunName:
        """The requested run."""
        assert isinstance(self.request.operation, Run)
        return RunName(self.request.operation.check, self.request.operation.instance)

    @property
    def has_nvml_problem(self) -> bool:
        """True if a run encountered a general GPU problem: a GPU was lost, or NVML did not answer."""
        if self.request.resource != "nvml" or not isinstance(self.request.operation, Run):
            return False
        timed_out = self.outcome is Outcome.TIMED_OUT and self.seconds > 0
        return timed_out or (isinstance(self.answer, RunAnswer) and self.answer.gpu_lost)


class Identity(Value, frozen=True):
    """Identifies a process, even if its pid is reused. `start` is field 22 of /proc/PID/stat, in clock ticks since
    boot."""

    pid: int
    start: int
    resource: str


class _Lost(Struct):
    """A lost worker. `pidfd` is None if no descriptor was left for it."""

    identity: Identity
    pidfd: int | None
    process: Process | None  # None: an earlier daemon started it


class _Worker(Struct):
    """The running worker.

    started_at      when it was started (monotonic)
    nvml_open       True if it may keep the driver open
    matched_driver  True if the NVML library that it loaded matched the driver
    request_count   number of the current message and of its response
    """

    process: Process
    stream: socket.socket
    start: int
    started_at: float
    nvml_open: bool = False
    matched_driver: bool = False
    request_count: int = 0
    answers: select.poll = field(default_factory=select.poll)
    outgoing: bytes = b""
    is_outdated: bool = False
    incoming: bytearray = field(default_factory=bytearray)


def start_program(setup: Setup, stream: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker as a separate program, which shares nothing but the stream with this process. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-m", "healthd.agent.worker", str(stream.fileno()), encode(setup).decode()],
        pass_fds=[stream.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",  # `-m` looks for modules in the current directory
    )


class WorkerClient:
    """Sends requests to the worker, starts a worker if there is none, and replaces a failed worker.

    now            clock for the time in each request; if None, requests contain no time, and the worker uses its own
    start_process  starts a worker on its end of the stream; raises OSError
    """

    def __init__(
        self,
        setup: Setup,
        runtime_dir: str,
        monotonic: Callable[[], float],
        now: Callable[[], float] | None = None,
        start_process: Callable[[Setup, socket.socket], Process] | None = None,
    ) -> None:
        self._setup = setup
        self._start_process = start_process or start_program
        self._workers_file = os.path.join(runtime_dir, WORKERS_FILE) if runtime_dir else ""
        self._monotonic = monotonic
        self._now = now
        self._worker: _Worker | None = None
        self._request: Request | None = None
        self._request_began = 0.0
        self._message_time: float | None = None
        self._chunk = bytearray(CHUNK_BYTES)  # shared, because a new buffer for each answer would fragment the heap
        self._lost: list[_Lost] = []
        self._written = b""
        self._workers_fd = -1
        self.started_total = 0
        self.abandoned_total = 0

    # --- inputs for the daemon's wait

    @property
    def is_busy(self) -> bool:
        return self._request is not None

    @property
    def request(self) -> Request | None:
        """The request in flight."""
        return self._request

    @property
    def nvml_open(self) -> bool:
        """True if the worker keeps the driver open because a check has used it since the last close_nvml."""
        return self._worker is not None and self._worker.nvml_open

    @property
    def deadline(self) -> float:
        """Monotonic time at which the request in flight becomes overdue, or infinity without a request."""
        return self._request_began + self._request.timeout_seconds if self._request else float("inf")

    def waits(self) -> Iterator[tuple[int, bool]]:
        """Yield (file descriptor, whether to wait for writing) for everything that can wake the daemon."""
        if self._worker is not None:
            yield self._worker.stream.fileno(), bool(self._worker.outgoing)
        for lost in self._lost:
            if lost.pidfd is not None:
                yield lost.pidfd, False

    @property
    def quarantined(self) -> dict[str, int]:
        """Quarantined resources, each with the pid of the lost worker that hangs in it."""
        return {lost.identity.resource: lost.identity.pid for lost in self._lost} if self._lost else {}

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of the worker and of lost workers that are still alive."""
        worker = () if self._worker is None else (self._worker.process.pid,)
        return (*worker, *(lost.identity.pid for lost in self._lost))

    def answers_within(self, seconds: float) -> bool:
        """Return True if the worker sends data within this time. Return False at once if `seconds` is not positive."""
        if self._worker is None or seconds <= 0:
            return False
        return bool(self._worker.answers.poll(seconds * 1000))

    # --- requests

    def adopt_lost(self) -> None:
        """Take over an earlier daemon's workers that are still alive. Their resources stay quarantined."""
        try:
            identities = decode(list[Identity], ownership.read(self._workers_file))
        except (OSError, DecodeError):
            return  # the file is missing, or was truncated by a crash: no process from that boot is alive
        for identity in identities:
            if start_time(identity.pid) == identity.start:
                try:
                    self._lost.append(_Lost(identity, shortage.open_pidfd(identity.pid), None))
                except OSError:
                    continue  # it has just exited

    def send(self, request: Request) -> Reply | None:
        """Begin a request. Return a Reply if the request cannot begin because its resource is quarantined or no worker
        starts.
        """
        assert self._request is None, "one request at a time"
        if self._lost:
            self._forget_ended()
            if pid := self.quarantined.get(request.resource):
                return Reply(request, Outcome.STUCK, 0.0, f"worker {pid} still hangs in {request.resource}")
        self._discard_unusable()
        try:
            worker = self._worker or self._start()
        except OSError as error:
            return Reply(request, Outcome.FAILED, 0.0, f"no worker could be started: {error}")
        self._request = request
        return self._send_request(worker, request)

    def renew(self) -> None:
        """Send the next request to a new worker."""
        if self._worker is not None:
            self._worker.is_outdated = True

    def step(self) -> Reply | None:
        """Advance one step, and check the deadline. Return the Reply if the request ended."""
        if self._lost:
            self._forget_ended()
        if self._worker is None:
            return None
        reply = self._send_more() or self._receive()
        if reply is None and self._request is not None and self._monotonic() >= self.deadline:
            return self._time_out()
        return reply

    def close(self, wait_seconds: float) -> None:
        """Stop the worker if it is idle. A busy worker exits on its own, and the next daemon adopts it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stream.close()
            if not _ended_within(worker.process, wait_seconds):
                self._record_lost(
                    worker, self._request.resource if self._request else "nvml" if worker.nvml_open else ""
                )
        self._record_workers("")
        if self._workers_fd >= 0:
            os.close(self._workers_fd)
            self._workers_fd = -1
        for lost in self._lost:
            if lost.pidfd is not None:
                os.close(lost.pidfd)
            if lost.process is not None:
                lost.process.returncode = 0  # avoid a warning, because the worker may outlive the daemon
        self._lost = []

    # --- internals

    def _start(self) -> _Worker:
        try:
            own_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with worker_end:
                try:
                    process = self._start_process(self._setup, worker_end)
                except BaseException:
                    own_end.close()
                    raise
        except OSError as error:
            shortage.record_failed_start(error)
            raise
        own_end.setblocking(False)
        self._worker = _Worker(process, own_end, start_time(process.pid) or 0, self._monotonic())
        self._worker.answers.register(own_end, select.POLLIN)
        self.started_total += 1
        return self._worker

    def _send_request(self, worker: _Worker, request: Request) -> Reply | None:
        worker.request_count += 1
        worker.nvml_open = worker.nvml_open or request.resource == "nvml"
        worker.incoming = bytearray()
        # Do not set this earlier, because starting or discarding a worker may have taken seconds.
        self._request_began, self._message_time = self._monotonic(), self._now() if self._now else None
        worker.outgoing = encode(Message(worker.request_count, request.operation, self._message_time)) + b"\n"
        self._record_workers(request.resource)
        return self._send_more()

    def _discard_unusable(self) -> None:
        """Replace an idle worker that died, sent unrequested data, or has old code. Called before each request."""
        if self._worker is None:
            return
        if self._worker.is_outdated:
            self._discard()
            return
        if self._worker.answers.poll(0):
            self._discard()

    def _send_more(self) -> Reply | None:
        worker = self._worker
        if worker is None or not worker.outgoing:
            return None
        try:
            sent = worker.stream.send(worker.outgoing)
        except BlockingIOError:
            return None
        except OSError:
            return self._died()
        worker.outgoing = worker.outgoing[sent:]
        return None

    def _receive(self) -> Reply | None:
        worker = self._worker
        if worker is None:
            return None
        try:
            size = worker.stream.recv_into(self._chunk)
        except BlockingIOError:
            return None
        except OSError:
            size = 0
        if not size:
            return self._died()
        if self._request is None:
            self._discard()  # unrequested data would be mistaken for the next answer
            return None
        worker.incoming += memoryview(self._chunk)[:size]
        if self._chunk.find(b"\n", 0, size) >= 0:
            line, _, remainder = bytes(worker.incoming).partition(b"\n")
            return self._handle_response(line, remainder)
        if len(worker.incoming) > MAX_REPLY_BYTES:
            self._discard()
            return self._end_request(Outcome.FAILED, f"the worker's answer exceeds {MAX_REPLY_BYTES >> 20} MiB")
        return None

    def _handle_response(self, line: bytes, remainder: bytes) -> Reply | None:
        worker, request = self._worker, self._request
        assert worker is not None
        assert request is not None
        try:
            header, _, raw = line.partition(SEPARATOR)
            response = decode(Response, header)
            if response.number != worker.request_count:
                raise DecodeError(f"received response {response.number} to request {worker.request_count}")
        except DecodeError:
            self._discard()
            return self._end_request(Outcome.FAILED, "the worker sent an invalid answer")
        answer, error = None, response.error
        try:
            if not error or raw != NO_ANSWER:
                answer = decode(ANSWERS[request.kind], raw)
        except DecodeError as decode_error:  # a site check may return values of any type
            error = f"the worker's answer: {decode_error}"
        closes_nvml = isinstance(request.operation, CloseNvml)
        if closes_nvml or response.outdated:
            worker.nvml_open = False
        is_old = worker.matched_driver or self._monotonic() - worker.started_at >= TRUSTED_SECONDS
        outdated = response.outdated and is_old
        worker.matched_driver = worker.matched_driver or (request.resource == "nvml" and not response.outdated)
        if outdated and worker.request_count > 1:
            # The NVML that it loaded for an earlier round does not match the current driver, which may have been
            # upgraded. A new process loads the installed NVML. The new process's result is trusted for the rest of the
            # round; otherwise each GPU check would start a process.
            self._discard()
            try:
                return self._send_request(self._start(), request)
            except OSError as start_error:
                return self._end_request(Outcome.FAILED, f"no worker could be started: {start_error}")
        if remainder or outdated or (closes_nvml and error):
            self._discard()  # after a failed nvmlShutdown, the process keeps the driver open until it exits
        reply = self._end_request(Outcome.FAILED if error else Outcome.COMPLETED, error)
        if self._message_time is None or self._now is None:
            return replace(reply, answered=True, answer=answer)
        clock_step = self._now() - self._message_time - reply.seconds
        return replace(reply, answered=True, answer=answer, message_time=self._message_time, clock_step=clock_step)

    def _died(self) -> Reply | None:
        """Handle the end of the stream. If a request was in flight, return its Reply."""
        assert self._worker is not None
        process = self._worker.process
        _ended_within(process, EXIT_WAIT_SECONDS)  # wait for its exit, to report the exit status
        self._discard()
        if self._request is None:
            return None
        status = process.poll()
        exit_text = "" if status is None else f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return self._end_request(Outcome.FAILED, f"the worker died{exit_text}")

    def _time_out(self) -> Reply:
        assert self._request is not None
        self._discard()
        return self._end_request(Outcome.TIMED_OUT, f"no answer within {self._request.timeout_seconds:g} s")

    def _discard(self) -> None:
        """Close a worker's stream, so that the worker exits at its next read. Kill it unless it may be in the
        driver.
        """
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.stream.close()
        if not worker.nvml_open:
            worker.process.kill()
        if not _ended_within(worker.process, EXIT_WAIT_SECONDS):
            resource = self._request.resource if self._request else "nvml" if worker.nvml_open else ""
            self._record_lost(worker, resource)
            self.abandoned_total += 1

    def _end_request(self, outcome: Outcome, error: str) -> Reply:
        request, self._request = self._request, None
        assert request is not None
        return Reply(request, outcome, self._monotonic() - self._request_began, error)

    # --- lost workers

    def _record_lost(self, worker: _Worker, resource: str) -> None:
        try:
            pidfd = shortage.open_pidfd(worker.process.pid)
        except OSError:  # it has just exited
            worker.process.poll()
            return
        self._lost.append(_Lost(Identity(worker.process.pid, worker.start, resource), pidfd, worker.process))
        self._record_workers("")

    def _forget_ended(self) -> None:
        for lost in list(self._lost):
            ended = (
                lost.process.poll() is not None
                if lost.process is not None
                else start_time(lost.identity.pid) != lost.identity.start
            )
            if ended:
                if lost.pidfd is not None:
                    os.close(lost.pidfd)
                self._lost.remove(lost)

    def _record_workers(self, resource: str) -> None:
        """Record the workers, and the resources in which they may hang. If this daemon is killed, the next daemon reads
        the record.
        """
        if not self._workers_file:
            return
        workers = [lost.identity for lost in self._lost]
        if self._worker is not None and resource:
            workers.append(Identity(self._worker.process.pid, self._worker.start, resource))
        text = encode(workers)
        if text == self._written:
            return
        with contextlib.suppress(OSError):  # a full tmpfs: ConditionStore.save reports it
            # Written in place with one call, because the record changes with every check in a round. Blanks overwrite
            # the rest of a longer text, because JSON ignores them.
            if self._workers_fd < 0:
                self._workers_fd = open_own_file(self._workers_file)
                os.ftruncate(self._workers_fd, 0)
            os.pwrite(self._workers_fd, text.ljust(len(self._written)), 0)
            self._written = text


def _ended_within(process: Process, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def start_time(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat, or None for a zombie or a missing process. Unlike reading cmdline, this never
    blocks."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
