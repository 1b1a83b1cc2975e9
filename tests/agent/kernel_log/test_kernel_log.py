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


class Ring:
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
    ring = Ring(tmp_path)
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


def stored(source):
    return json.loads(json.dumps(source.cursor))


def test_records_are_read_one_by_one_without_their_continuation(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    ring.write("two\\x0athree")
    assert texts(source) == ["one", "two\nthree"]
    assert texts(source) == []
    assert not source.pending


def test_only_the_kernels_own_lines_count(ring, open_kmsg):
    source = open_kmsg()
    ring.write(XID, facility=1)
    ring.write(XID, facility=3)
    ring.write("kernel")
    assert texts(source) == ["kernel"]
    assert (source.lost, source.gaps) == (0, ())


def test_injected_lines_count_where_that_is_set(ring, open_kmsg):
    source = open_kmsg(injected=True)
    ring.write(XID, facility=1)
    assert texts(source) == [XID]


def test_a_restart_goes_on_after_the_last_line_given(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    ring.write("two")
    assert texts(source) == ["one", "two"]
    again = open_kmsg(stored(source))
    ring.rewind("one", "two", "three")
    assert [(line.text, line.history) for line in again.read()] == [("three", False)]


def test_a_call_gives_at_most_what_was_asked_and_says_that_there_is_more(ring, open_kmsg):
    source = open_kmsg()
    for n in range(5):
        ring.write(str(n))
    assert [line.text for line in source.read(2)] == ["0", "1"]
    assert source.pending
    assert texts(source) == ["2", "3", "4"]
    assert not source.pending


def test_a_new_boot_is_read_from_its_start_as_news(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    source.read()
    ring.boot(NEXT_BOOT)
    again = open_kmsg(stored(source))
    ring.write("boot")
    (line,) = again.read()
    assert (line.text, line.history) == ("boot", False)
    assert again.cursor == {"boot_id": NEXT_BOOT, "sequence": 0, "usec": 0}


def test_what_the_ring_held_at_the_first_start_ever_is_history(ring, open_kmsg):
    source = open_kmsg()
    ring.write("old", usec=0)
    assert [line.history for line in source.read()] == [True]
    source.read()
    ring.write("new")
    assert [line.history for line in source.read()] == [False]


def test_a_record_that_is_read_as_it_is_written_is_dated_by_the_wall_clock(ring, open_kmsg):
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


def test_a_backlog_is_dated_by_the_clock_since_boot(ring, open_kmsg):
    uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    source = open_kmsg()
    ring.write("at boot", usec=0)
    (line,) = source.read()
    assert line.time == pytest.approx(time.time() - uptime, abs=5)


def test_overwritten_records_are_counted_and_named_as_a_gap(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one", usec=10)
    ring.write("five", usec=50, sequence=4)
    assert texts(source) == ["one", "five"]
    assert source.lost == 3
    assert source.gaps == (Gap(10, 50, history=True),)
    assert source.take_notes() == ["3 kernel lines were overwritten before they were read"]
    assert source.take_notes() == []


def test_a_gap_is_remembered_over_a_restart_until_it_is_filled(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one", usec=10)
    ring.write("five", usec=50, sequence=4)
    source.read()
    again = open_kmsg(stored(source))
    assert again.gaps == (Gap(10, 50, history=True),)
    again.fill_gap(Gap(10, 50, history=True))
    assert again.gaps == ()
    assert open_kmsg(stored(again)).gaps == ()


def test_a_ring_that_lost_the_boots_start_says_so(ring, open_kmsg):
    source = open_kmsg()
    ring.write("later", usec=700, sequence=7)
    source.read()
    assert source.gaps == (Gap(0, 700, history=True),)
    assert source.lost == 0


def test_what_was_lost_before_the_first_start_ever_is_history_also_after_a_restart(ring, open_kmsg):
    source = open_kmsg()
    ring.write("later", usec=700, sequence=7)
    source.read()
    source.read()
    ring.write("live", usec=900, sequence=9)
    source.read()
    assert open_kmsg(stored(source)).gaps == (Gap(0, 700, history=True), Gap(700, 900))


def test_in_a_later_boot_what_was_lost_is_news(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one")
    source.read()
    ring.boot(NEXT_BOOT)
    again = open_kmsg(stored(source))
    ring.write("later", usec=700, sequence=7)
    again.read()
    assert again.gaps == (Gap(0, 700),)


def test_a_gap_that_an_earlier_version_stored_is_read(ring, open_kmsg):
    cursor = {"boot_id": BOOT, "sequence": 3, "usec": 50, "gaps": [[10, 50]]}
    assert open_kmsg(cursor).gaps == (Gap(10, 50),)


def test_of_a_gap_that_is_filled_in_part_the_rest_stays(ring, open_kmsg):
    cursor = {"boot_id": BOOT, "sequence": 3, "usec": 50, "gaps": [[10, 50, True], [60, 70, False]]}
    source = open_kmsg(cursor)
    source.fill_gap(Gap(10, 50, True), Gap(30, 50, True))
    assert source.gaps == (Gap(30, 50, True), Gap(60, 70))


def test_lines_lost_while_we_were_away_are_a_gap(ring, open_kmsg):
    source = open_kmsg()
    ring.write("one", usec=10)
    source.read()
    again = open_kmsg(stored(source))
    ring.write("nine", usec=90, sequence=8)
    assert texts(again) == ["nine"]
    assert again.gaps == (Gap(10, 90),)


def test_what_is_no_record_is_left_out(ring, open_kmsg):
    source = open_kmsg()
    os.write(ring.fd, b"\xff\x00garbage")
    ring.write("one")
    assert texts(source) == ["one"]


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_what_stands_in_its_place_and_gives_no_records_is_an_error_and_not_read_for_ever(tmp_path, device):
    """In some containers /dev/kmsg is another device."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").symlink_to(device)
    source = open_source("kmsg", str(tmp_path))
    with pytest.raises(OSError, match="returns no kernel log records"):
        source.read()
    assert source.malformed > 0
    source.close()


def test_lines_that_were_read_before_an_error_are_given_before_it(ring, open_kmsg):
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


class Readers:
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
    readers = Readers()
    monkeypatch.setattr("healthd.agent.kernel_log.kmsg.os", readers)
    return readers


@pytest.mark.parametrize("lines", [0, 1, 2, 99, 101, 1000])
def test_kmsg_accepts_a_reader_that_receives_each_record(readers, lines):
    source = Kmsg("/dev/kmsg", BOOT, None, False)
    for _ in range(3):
        source.check_delivery()
        readers.write(*["a line"] * lines)
        source.check_delivery()
        assert len(source.read(limit=1000)) == min(lines, 100)


@pytest.mark.parametrize("lines", [1, 2, 99, 101, 1000])
def test_kmsg_reports_a_reader_that_receives_nothing(readers, lines):
    source = Kmsg("/dev/kmsg", BOOT, None, False)
    source.check_delivery()
    readers.deaf.add(source.fileno())
    readers.write(*["a line"] * lines)
    assert source.read() == []
    source.check_delivery()
    with pytest.raises(OSError, match="misses lines that another reader gets"):
        source.read()


def test_kmsg_compares_only_the_first_record_of_each_check(readers):
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
def test_a_cursor_that_does_not_fit_is_as_none(ring, open_kmsg, cursor):
    source = open_kmsg(cursor)
    ring.write("one", usec=0)
    assert [(line.text, line.history) for line in source.read()] == [("one", True)]


def test_a_kmsg_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_source("kmsg", str(tmp_path))


def test_a_line_becomes_an_event_of_its_time_and_boot():
    event = make_event(RawLine(1234.5, XID), BOOT)
    assert event is not None
    assert (event.code, event.time, event.last_time, event.boot_id) == ("79", 1234.5, 1234.5, BOOT)
    assert make_event(RawLine(1234.5, "usb 1-1: new device"), BOOT) is None
