"""Tests of /dev/kmsg. A pipe in packet mode returns one record for each read, like the real device.

tests/e2e/test_real_kernel_log.py reads the real device.
"""

import json
import os
import time

import pytest

from healthd.agent.kernel_log.kmsg import Kmsg
from healthd.agent.kernel_log.open_source import open_source
from healthd.agent.kernel_log.source import Gap, RawLine, make_event

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus."
BOOT, NEXT_BOOT = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"


class FakeKmsg:
    """A fake /dev/kmsg below a root directory, written by the test."""

    def __init__(self, root):
        self.root = root
        self.sequence = 0
        (root / "dev").mkdir(parents=True)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        self.reader, self.fd = os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
        (root / "dev/kmsg").symlink_to(f"/proc/self/fd/{self.reader}")
        self.boot(BOOT)

    def boot(self, boot_id):
        (self.root / "proc/sys/kernel/random/boot_id").write_text(boot_id + "\n")
        self.sequence = 0

    def write(self, text, usec=None, facility=0, sequence=None):
        self.sequence = self.sequence if sequence is None else sequence
        usec = self.sequence * 1000 if usec is None else usec
        os.write(self.fd, f"{facility << 3 | 4},{self.sequence},{usec},-;{text}\n SUBSYSTEM=pci\n".encode())
        self.sequence += 1

    def rewind(self, *lines):
        """Write the records again that a new reader of the ring gets."""
        for sequence, text in enumerate(lines):
            self.write(text, sequence=sequence)


@pytest.fixture
def ring(tmp_path):
    ring = FakeKmsg(tmp_path)
    yield ring
    os.close(ring.fd)
    os.close(ring.reader)


@pytest.fixture
def open_kmsg(ring):
    opened = []

    def kmsg(cursor=None, now=time.time, injected=False):
        opened.append(open_source("kmsg", str(ring.root), cursor, injected, now))
        return opened[-1]

    yield kmsg
    for source in opened:
        source.close()


def texts(source):
    return [line.text for line in source.read()]


def stored_cursor(source):
    return json.loads(json.dumps(source.cursor))


def test_kmsg_returns_records_without_continuation(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    ring.write("two\\x0athree")
    assert texts(source) == ["one", "two\nthree"]
    assert texts(source) == []
    assert not source.pending


def test_kmsg_returns_only_kernel_facility(ring, open_kmsg):
    source = open_kmsg()
    ring.write(XID, facility=1)
    ring.write(XID, facility=3)
    ring.write("kernel")
    assert texts(source) == ["kernel"]
    assert (source.lost, source.gaps) == (0, ())


def test_kmsg_returns_injected_lines_if_configured(ring, open_kmsg):
    source = open_kmsg(injected=True)
    ring.write(XID, facility=1)
    assert texts(source) == [XID]


def test_kmsg_continues_after_restart(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    ring.write("two")
    assert texts(source) == ["one", "two"]
    second = open_kmsg(stored_cursor(source))
    ring.rewind("one", "two", "three")
    assert [(line.text, line.history) for line in second.read()] == [("three", False)]


def test_kmsg_read_returns_at_most_limit_and_sets_pending(ring, open_kmsg):
    source = open_kmsg()
    for n in range(5):
        ring.write(str(n))
    assert [line.text for line in source.read(2)] == ["0", "1"]
    assert source.pending
    assert texts(source) == ["2", "3", "4"]
    assert not source.pending


def test_kmsg_reads_new_boot_as_live(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    source.read()
    ring.boot(NEXT_BOOT)
    second = open_kmsg(stored_cursor(source))
    ring.write("boot")
    (line,) = second.read()
    assert (line.text, line.history) == ("boot", False)
    assert second.cursor == {"boot_id": NEXT_BOOT, "sequence": 0, "usec": 0}


def test_kmsg_marks_lines_before_first_start_as_history(ring, open_kmsg):
    source = open_kmsg()
    ring.write("old", usec=0)
    assert [line.history for line in source.read()] == [True]
    source.read()
    ring.write("new")
    assert [line.history for line in source.read()] == [False]


def test_kmsg_dates_live_record_by_wall_clock(ring, open_kmsg):
    clock = [5000.0]
    source = open_kmsg(now=lambda: clock[0])
    source.read()
    clock[0] = 6000.0
    ring.write("live", usec=1_000_000)
    ring.write("a second later", usec=2_000_000)
    clock[0] = 6000.5
    assert [line.time for line in source.read()] == [6000.5, 6000.5]  # never later than now
    clock[0] = 7000.0
    ring.write("the log clock is two seconds late by now", usec=1_001_000_000 - 2_000_000)
    assert [line.time for line in source.read()] == [7000.0]


def test_kmsg_dates_backlog_by_uptime(ring, open_kmsg):
    uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    source = open_kmsg()
    ring.write("at boot", usec=0)
    (line,) = source.read()
    assert line.time == pytest.approx(time.time() - uptime, abs=5)


def test_kmsg_counts_overwritten_records_as_gap(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one", usec=10)
    ring.write("five", usec=50, sequence=4)
    assert texts(source) == ["one", "five"]
    assert source.lost == 3
    assert source.gaps == (Gap(10, 50, history=True),)
    assert source.take_notes() == ["3 kernel lines were overwritten before they were read"]
    assert source.take_notes() == []


def test_kmsg_keeps_gap_over_restart_until_filled(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one", usec=10)
    ring.write("five", usec=50, sequence=4)
    source.read()
    second = open_kmsg(stored_cursor(source))
    assert second.gaps == (Gap(10, 50, history=True),)
    second.fill_gap(Gap(10, 50, history=True))
    assert second.gaps == ()
    assert open_kmsg(stored_cursor(second)).gaps == ()


def test_kmsg_reports_gap_at_boot_start(ring, open_kmsg):
    source = open_kmsg()
    ring.write("later", usec=700, sequence=7)
    source.read()
    assert source.gaps == (Gap(0, 700, history=True),)
    assert source.lost == 0


def test_kmsg_gap_before_first_start_stays_history(ring, open_kmsg):
    source = open_kmsg()
    ring.write("later", usec=700, sequence=7)
    source.read()
    source.read()
    ring.write("live", usec=900, sequence=9)
    source.read()
    assert open_kmsg(stored_cursor(source)).gaps == (Gap(0, 700, history=True), Gap(700, 900))


def test_kmsg_gap_in_later_boot_is_live(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    source.read()
    ring.boot(NEXT_BOOT)
    second = open_kmsg(stored_cursor(source))
    ring.write("later", usec=700, sequence=7)
    second.read()
    assert second.gaps == (Gap(0, 700),)


def test_kmsg_reads_gap_from_earlier_version(ring, open_kmsg):
    cursor = {"boot_id": BOOT, "sequence": 3, "usec": 50, "gaps": [[10, 50]]}
    assert open_kmsg(cursor).gaps == (Gap(10, 50),)


def test_fill_gap_keeps_unfilled_rest(ring, open_kmsg):
    cursor = {"boot_id": BOOT, "sequence": 3, "usec": 50, "gaps": [[10, 50, True], [60, 70, False]]}
    source = open_kmsg(cursor)
    source.fill_gap(Gap(10, 50, True), Gap(30, 50, True))
    assert source.gaps == (Gap(30, 50, True), Gap(60, 70))


def test_kmsg_lines_lost_during_downtime_are_gap(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one", usec=10)
    source.read()
    second = open_kmsg(stored_cursor(source))
    ring.write("nine", usec=90, sequence=8)
    assert texts(second) == ["nine"]
    assert second.gaps == (Gap(10, 90),)


def test_kmsg_ignores_invalid_record(ring, open_kmsg):
    source = open_kmsg()
    os.write(ring.fd, b"\xff\x00garbage")
    ring.write("one")
    assert texts(source) == ["one"]


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_kmsg_that_returns_no_records_raises_error(tmp_path, device):
    """In some containers /dev/kmsg is another device."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").symlink_to(device)
    source = open_source("kmsg", str(tmp_path))
    with pytest.raises(OSError, match="returns no kernel log records"):
        source.read()
    assert source.malformed > 0
    source.close()


def test_kmsg_returns_lines_before_raising_error(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    ring.write("two")
    os.close(ring.fd)  # the reader gets the remaining records, then the end of the pipe
    try:
        assert texts(source) == ["one", "two"]
        with pytest.raises(OSError, match="returns no kernel log records"):
            source.read()
    finally:
        ring.fd = os.open(os.devnull, os.O_RDONLY)


class FakeOs:
    """A fake `os` for /dev/kmsg with several readers: each has its own position in a ring of 100 records."""

    def __init__(self):
        self.records = []
        self.places = {}
        self.deaf = set()

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, *texts):
        for text in texts:
            number = len(self.records)
            self.records.append(f"4,{number},{number * 1000},-;{text}\n".encode())

    def open(self, path, flags):
        fd = 1000 + len(self.places)
        self.places[fd] = max(len(self.records) - 100, 0)
        return fd

    def lseek(self, fd, offset, whence):
        assert (offset, whence) == (0, os.SEEK_END)
        self.places[fd] = len(self.records)

    def close(self, fd):
        pass

    def read(self, fd, size):
        oldest = len(self.records) - 100
        if fd in self.deaf or self.places[fd] == len(self.records):
            raise BlockingIOError
        if self.places[fd] < oldest:
            self.places[fd] = oldest
            raise BrokenPipeError
        self.places[fd] += 1
        return self.records[self.places[fd] - 1]


@pytest.fixture
def readers(monkeypatch):
    readers = FakeOs()
    monkeypatch.setattr("healthd.agent.kernel_log.kmsg.os", readers)
    return readers


@pytest.mark.parametrize("lines", [0, 1, 2, 99, 101, 1000])
def test_check_delivery_accepts_reader_that_receives_records(readers, lines):
    source = Kmsg("/dev/kmsg", BOOT, None, False)
    for _ in range(3):
        source.check_delivery()
        readers.write(*["a line"] * lines)
        source.check_delivery()
        assert len(source.read(limit=1000)) == min(lines, 100)


@pytest.mark.parametrize("lines", [1, 2, 99, 101, 1000])
def test_check_delivery_reports_reader_that_receives_nothing(readers, lines):
    source = Kmsg("/dev/kmsg", BOOT, None, False)
    source.check_delivery()
    readers.deaf.add(source.fileno())
    readers.write(*["a line"] * lines)
    assert source.read() == []
    source.check_delivery()
    with pytest.raises(OSError, match="misses lines that another reader gets"):
        source.read()


def test_check_delivery_compares_first_record_per_check(readers):
    source = Kmsg("/dev/kmsg", BOOT, None, False)
    source.check_delivery()
    readers.write("one")
    assert texts(source) == ["one"]
    readers.deaf.add(source.fileno())
    readers.write("two")
    source.check_delivery()
    assert texts(source) == []
    readers.write("three")
    source.check_delivery()
    with pytest.raises(OSError, match="misses lines that another reader gets"):
        source.read()


@pytest.mark.parametrize("cursor", [{}, {"sequence": "x"}, {"journal": "s=1"}, {"files": []}, {"boot_id": BOOT}])
def test_kmsg_ignores_invalid_cursor(ring, open_kmsg, cursor):
    source = open_kmsg(cursor)
    ring.write("one", usec=0)
    assert [(line.text, line.history) for line in source.read()] == [("one", True)]


def test_kmsg_open_error_is_raised(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_source("kmsg", str(tmp_path))


def test_make_event_has_line_time_and_boot():
    event = make_event(RawLine(1234.5, XID), BOOT)
    assert event is not None
    assert (event.code, event.time, event.last_time, event.boot_id) == ("79", 1234.5, 1234.5, BOOT)
    assert make_event(RawLine(1234.5, "usb 1-1: new device"), BOOT) is None
