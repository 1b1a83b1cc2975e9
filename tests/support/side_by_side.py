"""`--processes N`: collect the tests once, then run them in N copies of the process, a group at a time.

A copy sends its reports to the process that has collected. That process prints them and ends with pytest's usual exit
status. If a copy dies, the tests that it took and did not finish have failed.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

NUMBER = struct.Struct("<I")  # of a group in the queue; length of a message
LOOK_SECONDS = 1.0  # between two looks for copies that have died: their sockets may stay open in their children


class Hooks:
    @pytest.hookspec(firstresult=True)
    def pytest_test_group(self, nodeid: str) -> str:
        """Return the name of the group of a test: one process runs the tests of a group one after another."""
        return nodeid.partition("[")[0]


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", default="1", metavar="N", help="run tests in N copies of the process; auto")


@pytest.hookimpl(trylast=True)
def pytest_test_group(nodeid: str) -> str:
    return nodeid.partition("[")[0]


@dataclass
class Copy:
    """A process that runs tests. taken: numbers of the tests that it took and has not finished."""

    pid: int
    stream: socket.socket
    received: bytearray = field(default_factory=bytearray)
    taken: dict[int, None] = field(default_factory=dict)

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Yield what has come."""
        with suppress(BlockingIOError):
            while part := self.stream.recv(1 << 20, socket.MSG_DONTWAIT):
                self.received += part
        while len(self.received) >= NUMBER.size:
            end = NUMBER.size + NUMBER.unpack_from(self.received)[0]
            if len(self.received) < end:
                break
            message = pickle.loads(self.received[NUMBER.size : end])
            del self.received[:end]
            yield message


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = processes(session.config)
    if count < 2 or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop
    groups = grouped(session)
    queue = queue_of(len(groups))
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # has a folder for each copy
    gc.collect()
    gc.freeze()  # a collection in a copy would copy all pages
    copies = [start(session, groups, queue, number) for number in range(min(count, len(groups)))]
    try:
        follow(session, copies)
    finally:
        for copy in copies:
            os.kill(copy.pid, signal.SIGKILL)
            os.waitpid(copy.pid, 0)
    for number in taken_from(queue, groups):
        fail(session, number, "all processes that run tests have died")
    os.close(queue)
    return True


def processes(config: pytest.Config) -> int:
    count: str = config.getoption("--processes")
    cores = len(os.sched_getaffinity(0))
    return min(3 * cores, cores + 8) if count == "auto" else int(count)  # many tests wait


def grouped(session: pytest.Session) -> list[list[int]]:
    """Return the numbers of the tests of each group, in the order of the tests."""
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(session.items):
        groups.setdefault(session.config.hook.pytest_test_group(nodeid=item.nodeid), []).append(number)
    return list(groups.values())


def queue_of(count: int) -> int:
    """Return a file with the numbers of all groups. Copies of the process share its offset: each reads the next one."""
    queue = os.memfd_create("groups")
    os.write(queue, b"".join(map(NUMBER.pack, range(count))))
    os.lseek(queue, 0, os.SEEK_SET)
    return queue


def taken_from(queue: int, groups: Sequence[list[int]], stream: socket.socket | None = None) -> Iterator[int]:
    """Take group after group and yield the numbers of its tests."""
    while data := os.read(queue, NUMBER.size):
        group = groups[NUMBER.unpack(data)[0]]
        if stream is not None:
            send(stream, "took", group)
        yield from group


def follow(session: pytest.Session, copies: list[Copy]) -> None:
    """Take the reports of the copies until all have ended; remove each that has ended from the list."""
    with selectors.DefaultSelector() as selector:
        for copy in copies:
            selector.register(copy.stream, selectors.EVENT_READ, copy)
        while copies:
            for key, _ in selector.select(LOOK_SECONDS):
                take(session, key.data)
            for copy in [*copies]:
                pid, status = os.waitpid(copy.pid, os.WNOHANG)
                if pid:
                    copies.remove(copy)
                    selector.unregister(copy.stream)
                    take(session, copy)
                    copy.stream.close()
                    for number in copy.taken:
                        fail(session, number, f"the process that ran it died: {ended(status)}")


def take(session: pytest.Session, copy: Copy) -> None:
    hook = session.config.hook
    for kind, value in copy.messages():
        if kind == "took":
            copy.taken.update(dict.fromkeys(value))
        elif kind == "finished":
            del copy.taken[value]
        else:
            tell(session, hook.pytest_report_from_serializable(config=session.config, data=value))


def fail(session: pytest.Session, number: int, why: str) -> None:
    item = session.items[number]
    tell(session, pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call"))


def tell(session: pytest.Session, report: pytest.TestReport) -> None:
    session.config.hook.pytest_runtest_logreport(report=report)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


# --- in a copy


def start(session: pytest.Session, groups: Sequence[list[int]], queue: int, number: int) -> Copy:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Copy(pid, ours)
    status = 1
    try:
        ours.close()
        run(session, groups, queue, number, theirs)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def run(session: pytest.Session, groups: Sequence[list[int]], queue: int, number: int, stream: socket.socket) -> None:
    """Run groups of the queue."""
    become_copy(session.config, number)
    session.config.pluginmanager.register(Reports(session.config, stream))
    numbers = taken_from(queue, groups, stream)
    current = next(numbers, None)
    while current is not None:
        following = next(numbers, None)  # what it needs too is not torn down
        item, after = session.items[current], None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        send(stream, "finished", current)
        current = following


def become_copy(config: pytest.Config, number: int) -> None:
    """Print nothing, and have files of its own for captured output and temporary folders."""
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"p{number}"
    folders._basetemp.mkdir(mode=0o700)


class Reports:
    """Sends the reports of a copy."""

    def __init__(self, config: pytest.Config, stream: socket.socket) -> None:
        self._config, self._stream = config, stream

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        send(
            self._stream, "report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )


def send(stream: socket.socket, kind: str, value: object) -> None:
    message = pickle.dumps((kind, value))
    stream.sendall(NUMBER.pack(len(message)) + message)
