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


def listener(spec: str, root: str = "/", cursor: object = None, clock: Clock | None = None) -> KernelLogReader:
    made = KernelLogReader(spec, root, "b1", False, time.time, clock or Clock())
    made.open(cursor)
    return made


def fake_kmsg(root: Path, target: str) -> Path:
    """Link another file in the place of /dev/kmsg below a root."""
    device = root / "dev/kmsg"
    device.parent.mkdir(exist_ok=True)
    device.unlink(missing_ok=True)
    device.symlink_to(target)
    return device


def test_a_log_that_is_switched_off_is_never_read_and_never_wakes() -> None:
    off = listener("off")
    assert (off.read(), list(off.waits()), off.deadline, off.cursor) == ([], [], float("inf"), None)
    assert (off.status.alive, off.status.problem, off.status.restarts_total) == (False, "disabled", 0)


def test_a_file_that_does_not_exist_yet_is_read_once_it_does(tmp_path: Path) -> None:
    log = listener(str(tmp_path / "kern.log"))
    assert (log.read(), log.status.alive) == ([], False)
    assert log.status.problem == f"{tmp_path}/kern.log does not exist yet"
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    assert [(event.code, event.pci, event.boot_id) for event in log.read()] == [("79", "0000:61:00.0", "b1")]
    assert (log.status.lines_total, log.status.events_total, log.status.restarts_total) == (1, 1, 0)
    log.close()


@pytest.mark.parametrize("before", [os.mkfifo, Path.touch], ids=["fifo", "file"])
@pytest.mark.parametrize("after", [os.mkfifo, Path.touch], ids=["fifo", "file"])
def test_what_lies_in_the_place_of_a_fifo_or_of_a_file_is_opened_and_read(
    before: Callable[[Path], None], after: Callable[[Path], None], tmp_path: Path
) -> None:
    clock, path = Clock(), tmp_path / "log"
    before(path)
    log = listener(str(path), clock=clock)
    assert (log.read(), log.status.alive) == ([], True)
    path.rename(tmp_path / "log.1")
    assert log.read() == []
    if before is os.mkfifo:
        assert (log.status.alive, log.status.problem.partition(": ")[2]) == (
            False,
            "it was removed or replaced",
        )
    after(path)
    for _ in range(2):  # the first read detects the replacement, the second opens it
        log.read()
        clock.now += RETRY_SECONDS[-1]
    written = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)  # ENXIO for a fifo without a reader
    os.write(written, f"{XID}\n".encode())
    os.close(written)
    assert [event.code for event in log.read()] == ["79"]
    assert (log.status.alive, log.status.problem) == (True, "")
    log.close()


def test_a_directory_is_no_log_and_trying_it_leaves_nothing_open(tmp_path: Path) -> None:
    clock = Clock()
    log = listener(str(tmp_path), clock=clock)
    before = os.listdir("/proc/self/fd")
    for _ in RETRY_SECONDS:
        clock.now += RETRY_SECONDS[-1]
        assert (log.read(), log.status.alive) == ([], False)
    assert log.status.problem == f"{tmp_path}: not a regular file"
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_a_source_that_cannot_be_opened_is_tried_again_ever_more_slowly_and_counted(tmp_path: Path) -> None:
    clock = Clock()
    log = listener(str(tmp_path / "later/kern.log"), clock=clock)
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


def test_a_source_that_dies_is_opened_again_where_it_was(tmp_path: Path) -> None:
    """/proc/self/mem fails at its first byte; a fifo behaves like /dev/kmsg."""
    clock = Clock()
    os.mkfifo(tmp_path / "ring")
    ring = os.open(tmp_path / "ring", os.O_RDWR | os.O_NONBLOCK)
    device = fake_kmsg(tmp_path, str(tmp_path / "ring"))
    log = listener("kmsg", str(tmp_path), clock=clock)
    os.write(ring, (RECORD % (5, 1000)).encode())
    assert [event.code for event in log.read()] == ["79"]
    assert log.cursor["sequence"] == 5
    cursor = log.cursor
    log.close()

    fake_kmsg(tmp_path, "/proc/self/mem")
    log = listener("kmsg", str(tmp_path), cursor, clock)
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


def test_more_than_one_reads_worth_is_read_on_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    log = listener(str(path))
    path.write_text("".join(f"usb 1-1: new device {number}\n" for number in range(2 * MAX_LINES_PER_READ + 500)))
    reads = 0
    while reads == 0 or log.deadline == 0.0:
        log.read()
        reads += 1
    assert (reads, log.status.lines_total, log.deadline) == (3, 2 * MAX_LINES_PER_READ + 500, float("inf"))
    log.close()


def test_a_line_on_which_a_rule_fails_stays_visible_and_is_told_once_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Rule("xid", ("explodes",), re.compile("usb explodes (.*)"), lambda kind, match: match[9])
    monkeypatch.setitem(LITERALS, "explodes", (broken,))
    path = tmp_path / "kern.log"
    log = listener(str(path))
    path.write_text(f"usb explodes one\n{XID}\nusb explodes two\n")
    assert [(event.kind, event.code, event.text) for event in log.read()] == [
        ("unread", "", "usb explodes one"),
        ("xid", "79", XID),
        ("unread", "", "usb explodes two"),
    ]
    assert (log.status.alive, log.status.lines_total, log.status.malformed_total) == (True, 3, 2)
    (said,) = caplog.records
    assert said.getMessage() == (
        "kernel_log: input dropped after an internal error with 'usb explodes one': IndexError: no such group"
    )
    assert said.exc_info is not None
    log.close()
    again = listener(str(path), cursor=log.cursor)
    assert again.read() == [], "unreadable lines are not read again"
    again.close()


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
def test_a_cursor_that_is_none_is_as_if_there_were_none(tmp_path: Path, cursor: object) -> None:
    fake_kmsg(tmp_path, "/dev/null")
    kmsg = listener("kmsg", str(tmp_path), cursor)
    kmsg.read()
    kmsg.close()
    log = listener(str(tmp_path / "kern.log"), str(tmp_path), cursor)
    log.read()
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    assert [event.code for event in log.read()] == ["79"]
    log.close()


@pytest.mark.parametrize("cursor", [None, {"journal": "no cursor"}, {"journal": ""}, {"journal": "s=1;i=x"}])
def test_a_journal_is_read_from_its_head_where_the_cursor_is_none(cursor: object) -> None:
    log = listener("journal", cursor=cursor)
    log.read()
    assert (log.status.alive, log.status.problem, log.status.restarts_total) == (True, "", 0)
    log.close()


def test_what_no_source_should_raise_is_its_trouble_and_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kern.log").touch()
    clock = Clock()
    log = listener(str(tmp_path / "kern.log"), clock=clock)
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


def test_a_closed_listener_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    log = listener(str(tmp_path / "kern.log"))
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    log.read()
    log.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# --- lines lost by the ring buffer


def listener_with_a_gap(root: Path, history: bool = False) -> KernelLogReader:
    fake_kmsg(root, "/dev/null")
    boot_id = root / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("b1\n")
    cursor = {"boot_id": "b1", "sequence": 9, "usec": 500, "gaps": [[100, 500, history], [600, 700, False]]}
    return listener("kmsg", str(root), cursor)


def line(usec: int) -> RawLine:
    return RawLine(usec / 1e6, XID, usec=usec)


def test_what_the_journal_has_of_a_gap_becomes_events_and_the_gap_is_gone(tmp_path: Path) -> None:
    log = listener_with_a_gap(tmp_path)
    assert log.gap() == Gap(100, 500)
    (event,) = log.fill_gap(Gap(100, 500), [line(200)], 10)
    assert (event.code, event.boot_id, event.history) == ("79", "b1", False)
    assert log.gap() == Gap(600, 700)
    log.close()


def test_what_fills_a_gap_from_before_the_first_start_is_history(tmp_path: Path) -> None:
    log = listener_with_a_gap(tmp_path, history=True)
    (event,) = log.fill_gap(Gap(100, 500, True), [line(200)], 10)
    assert event.history
    log.close()


def test_as_many_lines_as_were_asked_for_are_not_the_whole_gap(tmp_path: Path) -> None:
    log = listener_with_a_gap(tmp_path, history=True)
    assert sum(event.lines for event in log.fill_gap(Gap(100, 500, True), [line(200), line(300)], 2)) == 2
    assert log.gap() == Gap(300, 500, True)
    assert log.fill_gap(Gap(300, 500, True), [], 2) == []
    assert log.gap() == Gap(600, 700)
    log.close()


def test_a_journal_that_cannot_be_read_is_asked_again_once_a_round_and_then_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = listener_with_a_gap(tmp_path)
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
