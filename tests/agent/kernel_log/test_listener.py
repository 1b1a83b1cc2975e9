"""Tests of a kernel log that is missing, fails and returns: it is reopened with backoff, and each try is counted."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from healthd.agent.kernel_log.log_reader import GAP_TRIES, MAX_LINES_PER_READ, RETRY_SECONDS, KernelLogReader
from healthd.agent.kernel_log.parse import LITERALS
from healthd.agent.kernel_log.rules.rule import Rule
from healthd.agent.kernel_log.source import Gap, RawLine

XID = "NVRM: Xid (PCI:0000:61:00): 79, pid=1, name=x, GPU has fallen off the bus."
RECORD = f"4,%d,%d,-;{XID}\n"


class Clock:
    """A monotonic clock that only the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_reader(spec: str, root: str = "/", cursor: object = None, clock: Clock | None = None) -> KernelLogReader:
    reader = KernelLogReader(spec, root, "b1", False, time.time, clock or Clock())
    reader.open(cursor)
    return reader


def fake_kmsg(root: Path, target: str) -> Path:
    """Link another file in the place of /dev/kmsg below a root."""
    device = root / "dev/kmsg"
    device.parent.mkdir(exist_ok=True)
    device.unlink(missing_ok=True)
    device.symlink_to(target)
    return device


def test_reader_switched_off_is_never_read() -> None:
    disabled_reader = open_reader("off")
    assert (
        disabled_reader.read(),
        list(disabled_reader.waits()),
        disabled_reader.deadline,
        disabled_reader.cursor,
    ) == ([], [], float("inf"), None)
    assert (disabled_reader.status.alive, disabled_reader.status.problem, disabled_reader.status.restarts_total) == (
        False,
        "disabled",
        0,
    )


def test_reader_reads_file_once_created(tmp_path: Path) -> None:
    log = open_reader(str(tmp_path / "kern.log"))
    assert (log.read(), log.status.alive) == ([], False)
    assert log.status.problem == f"{tmp_path}/kern.log does not exist yet"
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    assert [(event.code, event.pci, event.boot_id) for event in log.read()] == [("79", "0000:61:00.0", "b1")]
    assert (log.status.lines_total, log.status.events_total, log.status.restarts_total) == (1, 1, 0)
    log.close()


@pytest.mark.parametrize("make_first", [os.mkfifo, Path.touch], ids=["fifo", "file"])
@pytest.mark.parametrize("make_second", [os.mkfifo, Path.touch], ids=["fifo", "file"])
def test_reader_reopens_replaced_fifo_or_file(
    make_first: Callable[[Path], None], make_second: Callable[[Path], None], tmp_path: Path
) -> None:
    clock, path = Clock(), tmp_path / "log"
    make_first(path)
    log = open_reader(str(path), clock=clock)
    assert (log.read(), log.status.alive) == ([], True)
    path.rename(tmp_path / "log.1")
    assert log.read() == []
    if make_first is os.mkfifo:
        assert (log.status.alive, log.status.problem.partition(": ")[2]) == (
            False,
            "it was removed or replaced",
        )
    make_second(path)
    for _ in range(2):  # the first read detects the replacement, the second opens it
        log.read()
        clock.now += RETRY_SECONDS[-1]
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)  # ENXIO for a fifo without a reader
    os.write(fd, f"{XID}\n".encode())
    os.close(fd)
    assert [event.code for event in log.read()] == ["79"]
    assert (log.status.alive, log.status.problem) == (True, "")
    log.close()


def test_directory_is_no_log_and_leaks_no_descriptor(tmp_path: Path) -> None:
    clock = Clock()
    log = open_reader(str(tmp_path), clock=clock)
    open_fds = os.listdir("/proc/self/fd")
    for _ in RETRY_SECONDS:
        clock.now += RETRY_SECONDS[-1]
        assert (log.read(), log.status.alive) == ([], False)
    assert log.status.problem == f"{tmp_path}: not a regular file"
    assert len(os.listdir("/proc/self/fd")) <= len(open_fds)


def test_reader_retries_failed_open_with_backoff(tmp_path: Path) -> None:
    clock = Clock()
    log = open_reader(str(tmp_path / "later/kern.log"), clock=clock)
    for failures, wait in enumerate((*RETRY_SECONDS, RETRY_SECONDS[-1]), start=1):
        assert log.status.restarts_total == failures
        assert (log.status.alive, list(log.waits())) == (False, [])
        assert "No such file or directory" in log.status.problem
        assert log.deadline == clock.now + wait
        clock.now += wait - 0.1
        assert log.read() == []
        assert log.status.restarts_total == failures, "no try before its time"
        clock.now += 0.1
        assert log.read() == []
    (tmp_path / "later").mkdir()
    (tmp_path / "later/kern.log").write_text(f"{XID}\n")
    clock.now = log.deadline
    assert [event.code for event in log.read()] == ["79"]
    assert (log.status.alive, log.status.problem, log.deadline) == (True, "", float("inf"))
    log.close()


def test_reader_reopens_failed_source_at_cursor(tmp_path: Path) -> None:
    """/proc/self/mem fails at its first byte; a fifo behaves like /dev/kmsg."""
    clock = Clock()
    os.mkfifo(tmp_path / "ring")
    ring = os.open(tmp_path / "ring", os.O_RDWR | os.O_NONBLOCK)
    device = fake_kmsg(tmp_path, str(tmp_path / "ring"))
    log = open_reader("kmsg", str(tmp_path), clock=clock)
    os.write(ring, (RECORD % (5, 1000)).encode())
    assert [event.code for event in log.read()] == ["79"]
    assert log.cursor["sequence"] == 5
    cursor = log.cursor
    log.close()

    fake_kmsg(tmp_path, "/proc/self/mem")
    log = open_reader("kmsg", str(tmp_path), cursor, clock)
    assert log.status.alive
    for failures, wait in enumerate(RETRY_SECONDS, start=1):
        assert log.read() == []
        assert (log.status.alive, log.status.restarts_total) == (False, failures)
        assert "Input/output error" in log.status.problem
        assert log.cursor == cursor, "the cursor is kept"
        assert log.deadline == clock.now + wait
        clock.now = log.deadline
    device.unlink()
    device.symlink_to(tmp_path / "ring")
    os.write(ring, (RECORD % (5, 1000)).encode())
    assert log.read() == [], "a line that was read before is not read again"
    os.write(ring, (RECORD % (6, 2000)).encode())
    assert [event.code for event in log.read()] == ["79"]
    assert (log.status.alive, log.status.problem) == (True, "")
    log.close()
    os.close(ring)


def test_reader_deadline_is_zero_while_lines_remain(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    log = open_reader(str(path))
    path.write_text("".join(f"usb 1-1: new device {number}\n" for number in range(2 * MAX_LINES_PER_READ + 500)))
    reads = 0
    while reads == 0 or log.deadline == 0.0:
        log.read()
        reads += 1
    assert (reads, log.status.lines_total, log.deadline) == (3, 2 * MAX_LINES_PER_READ + 500, float("inf"))
    log.close()


def test_line_on_which_rule_fails_is_unread_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing_rule = Rule("xid", ("explodes",), re.compile("usb explodes (.*)"), lambda kind, match: match[9])
    monkeypatch.setitem(LITERALS, "explodes", (failing_rule,))
    path = tmp_path / "kern.log"
    log = open_reader(str(path))
    path.write_text(f"usb explodes one\n{XID}\nusb explodes two\n")
    assert [(event.kind, event.code, event.text) for event in log.read()] == [
        ("unread", "", "usb explodes one"),
        ("xid", "79", XID),
        ("unread", "", "usb explodes two"),
    ]
    assert (log.status.alive, log.status.lines_total, log.status.malformed_total) == (True, 3, 2)
    (record,) = caplog.records
    assert record.getMessage() == (
        "kernel_log: input dropped after an internal error with 'usb explodes one': IndexError: no such group"
    )
    assert record.exc_info is not None
    log.close()
    second = open_reader(str(path), cursor=log.cursor)
    assert second.read() == [], "unreadable lines are not read again"
    second.close()


@pytest.mark.parametrize(
    "cursor",
    [
        {"boot_id": "b1", "sequence": 9, "usec": float("inf")},
        {"boot_id": "b1", "sequence": 9, "usec": float("nan")},
        {"boot_id": "b1", "sequence": 9, "usec": 500, "gaps": [[float("inf"), 1, False]]},
        {"boot_id": "b1", "sequence": 9, "usec": 500, "gaps": 7},
        {"files": [[1, float("inf"), 3, False]], "boot_id": "b1"},
        {"files": {"a": 1}},
        {"journal": 7},
        [1],
        "usec",
        -1e308,
    ],
)
def test_reader_ignores_invalid_cursor(tmp_path: Path, cursor: object) -> None:
    fake_kmsg(tmp_path, "/dev/null")
    kmsg = open_reader("kmsg", str(tmp_path), cursor)
    kmsg.read()
    kmsg.close()
    log = open_reader(str(tmp_path / "kern.log"), str(tmp_path), cursor)
    log.read()
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    assert [event.code for event in log.read()] == ["79"]
    log.close()


@pytest.mark.parametrize("cursor", [None, {"journal": "no cursor"}, {"journal": ""}, {"journal": "s=1;i=x"}])
def test_journal_reader_ignores_invalid_cursor(cursor: object) -> None:
    log = open_reader("journal", cursor=cursor)
    log.read()
    assert (log.status.alive, log.status.problem, log.status.restarts_total) == (True, "", 0)
    log.close()


def test_unexpected_exception_is_reported_and_source_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kern.log").touch()
    clock = Clock()
    log = open_reader(str(tmp_path / "kern.log"), clock=clock)
    with monkeypatch.context() as broken:
        broken.setattr("healthd.agent.kernel_log.file.Tail.is_truncated", lambda _tail: 1 / 0)
        assert log.read() == []
    assert (log.status.alive, log.status.problem) == (
        False,
        f"{tmp_path}/kern.log: ZeroDivisionError: division by zero",
    )
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    clock.now += RETRY_SECONDS[0]
    assert [event.code for event in log.read()] == ["79"]
    log.close()


def test_close_leaks_no_descriptor(tmp_path: Path) -> None:
    open_fds = len(os.listdir("/proc/self/fd"))
    log = open_reader(str(tmp_path / "kern.log"))
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    log.read()
    log.close()
    assert len(os.listdir("/proc/self/fd")) <= open_fds


# --- lines lost by the ring buffer


def reader_with_gap(root: Path, history: bool = False) -> KernelLogReader:
    fake_kmsg(root, "/dev/null")
    boot_id = root / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("b1\n")
    cursor = {"boot_id": "b1", "sequence": 9, "usec": 500, "gaps": [[100, 500, history], [600, 700, False]]}
    return open_reader("kmsg", str(root), cursor)


def line(usec: int) -> RawLine:
    return RawLine(usec / 1e6, XID, usec=usec)


def test_fill_gap_yields_events_and_removes_gap(tmp_path: Path) -> None:
    log = reader_with_gap(tmp_path)
    assert log.gap() == Gap(100, 500)
    (event,) = log.fill_gap(Gap(100, 500), [line(200)], 10)
    assert (event.code, event.boot_id, event.history) == ("79", "b1", False)
    assert log.gap() == Gap(600, 700)
    log.close()


def test_fill_gap_before_first_start_yields_history(tmp_path: Path) -> None:
    log = reader_with_gap(tmp_path, history=True)
    (event,) = log.fill_gap(Gap(100, 500, True), [line(200)], 10)
    assert event.history
    log.close()


def test_fill_gap_with_limit_reached_keeps_rest(tmp_path: Path) -> None:
    log = reader_with_gap(tmp_path, history=True)
    assert sum(event.lines for event in log.fill_gap(Gap(100, 500, True), [line(200), line(300)], 2)) == 2
    assert log.gap() == Gap(300, 500, True)
    assert log.fill_gap(Gap(300, 500, True), [], 2) == []
    assert log.gap() == Gap(600, 700)
    log.close()


def test_gap_failed_is_retried_each_round_and_then_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = reader_with_gap(tmp_path)
    for _ in range(GAP_TRIES):
        assert log.gap() == Gap(100, 500)
        log.gap_failed(Gap(100, 500), "the disk hangs")
        if log.gap() is None:
            log.end_round()
    assert log.gap() == Gap(600, 700)
    assert "kernel lines remain lost: the disk hangs" in caplog.text
    log.gap_failed(Gap(600, 700), "the disk hangs")
    assert log.gap() is None
    log.end_round()
    assert log.gap() == Gap(600, 700)
    log.close()
