import json
import os
import select
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from story import Story

from healthd.agent.kernel_log import prefix
from healthd.agent.kernel_log.file import MAX_LINE, ROTATED_SECONDS, Fifo, FollowedFile, split_lines
from healthd.agent.kernel_log.log_reader import KernelLogReader
from healthd.agent.kernel_log.open_source import open_source
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.checks import gpu_xid
from healthd.common import guard
from healthd.common.model import Clears, Severity
from tests.e2e.requirements import require_programs, require_root


@pytest.fixture
def log(tmp_path):
    return tmp_path / "kern.log"


@pytest.fixture
def sources():
    """Return a function that follows a file. Close the files after the test."""
    opened = []

    def follow(path, cursor=None, now=time.time, injected=False):
        opened.append(FollowedFile(str(path), cursor, injected, now))
        return opened[-1]

    yield follow
    for source in opened:
        source.close()


def append(path, text):
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def texts(source, limit=1000):
    lines = source.read(limit)
    while source.pending:
        lines += source.read(limit)
    return [line.text for line in lines]


def stored_cursor(source):
    """Return the cursor as it is read back from the ledger."""
    return json.loads(json.dumps(source.cursor))


def test_file_is_read_from_start_and_followed(log, sources):
    append(log, "one\ntwo\n")
    source = sources(log)
    assert texts(source) == ["one", "two"]
    append(log, "three\n")
    assert texts(source) == ["three"]
    assert texts(source) == []


def test_error_in_prefix_parsing_yields_unread_event(log, sources, monkeypatch):
    strip_date = prefix._strip_date

    def fail_for_four(text, now):
        if "four" in text:
            raise ValueError("error in healthd")
        return strip_date(text, now)

    source = sources(log)
    monkeypatch.setattr(prefix, "_strip_date", fail_for_four)
    append(log, "NVRM: Xid (PCI:0000:3b:00): 13, x\nkernel: NVRM: four\nNVRM: Xid (PCI:0000:3b:00): 79, y\n")
    events = [make_event(line, "b") for line in source.read()]
    assert [(event.kind, event.code) for event in events] == [("xid", "13"), ("unread", ""), ("xid", "79")]
    assert events[1].text == "kernel: NVRM: four"
    assert dict(guard.dropped) == {"kernel_log": 1}


def test_lines_before_first_start_are_history(log, sources):
    append(log, "old\n")
    os.utime(log, (1000, 1000))
    source = sources(log)
    append(log, "new\n")
    old_line, new_line = source.read()
    assert (old_line.text, old_line.history, old_line.time) == ("old", True, 1000.0)
    assert (new_line.text, new_line.history) == ("new", False)
    assert new_line.time == pytest.approx(time.time(), abs=5)


def test_lines_during_downtime_are_not_history(log, sources):
    append(log, "one\n")
    first = sources(log)
    texts(first)
    append(log, "two\n")
    (line,) = sources(log, stored_cursor(first)).read()
    assert (line.text, line.history) == ("two", False)


LAST_BOOT_LINE = "2025-01-21T04:41:44Z host kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
BOOT_LINES = [
    "2025-01-21T04:51:02Z host kernel: [    0.000000] Linux version 6.8.0-45-generic (buildd@host) #45-Ubuntu SMP\n",
    "[    0.000000] Booting Linux on physical CPU 0x0000000000 [0x410fd4f0]\n",
    "[    0.000000] Command line: BOOT_IMAGE=/vmlinuz root=/dev/sda1\n",
    "%(now)s host kernel: the first line that the syslog daemon was there to hear\n",
]


def history_flags(log, cursor, boot_id, limit=1000):
    """Return whether each line is history, and the cursor after these lines."""
    source = FollowedFile(str(log), cursor, boot_id=boot_id)
    lines = source.read(limit)
    cursor = stored_cursor(source)
    source.close()
    return [line.history for line in lines], cursor


def read_in_boot(log, boot_id):
    append(log, "one\n")
    source = FollowedFile(str(log), None, boot_id=boot_id)
    texts(source)
    source.close()
    return stored_cursor(source)


@pytest.mark.parametrize("first", BOOT_LINES)
def test_unread_lines_from_earlier_boot_are_history(log, first):
    cursor = read_in_boot(log, "b1")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    append(log, LAST_BOOT_LINE * 2 + first.replace("%(now)s", now) + "NVRM: Xid (PCI:0000:3b:00): 79, again\n")
    assert history_flags(log, cursor, "b1")[0] == [False] * 4, "the same boot"
    assert history_flags(log, cursor, "b2")[0] == [True, True, False, False]


def test_restart_within_lines_from_earlier_boot_keeps_history(log):
    cursor = read_in_boot(log, "b1")
    append(log, LAST_BOOT_LINE * 3)
    flags, cursor = history_flags(log, cursor, "b2", limit=1)
    assert flags == [True]
    flags, cursor = history_flags(log, cursor, "b2")
    assert flags == [True, True]
    append(log, "two\n")
    assert history_flags(log, cursor, "b2")[0] == [False]


def test_line_after_start_is_not_history(log):
    cursor = read_in_boot(log, "b1")
    append(log, LAST_BOOT_LINE)
    source = FollowedFile(str(log), cursor, boot_id="b2")
    append(log, "two\n")
    assert [line.history for line in source.read()] == [True, False]
    source.close()


def test_unread_fault_from_earlier_boot_does_not_drain(log, tmp_path):
    root = tmp_path / "root"
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("b2\n")
    cursor = read_in_boot(log, "b1")
    append(log, LAST_BOOT_LINE)
    listener = KernelLogReader(str(log), str(root), "b2", False, time.time, time.monotonic)
    listener.open(cursor)
    (event,) = listener.read()
    listener.close()
    assert (event.code, event.history) == ("79", True)
    story = Story(gpu_xid).take_event(event)
    assert ([c.severity for c in story.conditions.values()], story.drained) == ([Severity.INFO], False)


def test_unread_line_for_repaired_fault_is_no_relapse():
    unread = replace(make_event(RawLine(0.0, LAST_BOOT_LINE.partition("kernel: ")[2].strip()), "b"), history=True)
    story = Story(gpu_xid).take_event(replace(unread, history=False))
    assert story.drained
    story.reboot().take_event(unread)
    assert ([(c.severity, c.clears) for c in story.conditions.values()], story.drained) == (
        [(Severity.INFO, Clears.REBOOT)],
        False,
    )
    story.take_event(replace(unread, history=False))
    assert ([c.clears for c in story.conditions.values()], story.drained) == ([Clears.OPERATOR], True)


def test_old_line_is_dated_by_plausible_prefix(log, sources):
    append(log, "2025-01-21T04:41:44Z host kernel: dated\n[ 0.5] booted\n[99999999999.5] wrong\n")
    os.utime(log, (1000, 1000))
    dated_line, uptime_line, future_line = sources(log).read()
    assert dated_line.time == 1737434504.0
    assert uptime_line.time == pytest.approx(time.time() - time.clock_gettime(time.CLOCK_MONOTONIC) + 0.5, abs=5)
    assert future_line.time == 1000.0


def test_line_keeps_uptime(log, sources):
    append(log, "2025-01-21T04:41:44Z host kernel: [   12.345678] one\n2025-01-21T04:41:44Z host kernel: two\n")
    assert [line.usec for line in sources(log).read()] == [12345678, None]


def test_live_line_is_dated_by_reading_time(log, sources):
    append(log, "")
    source = sources(log)
    source.read()
    append(log, "2025-01-21T04:41:44Z host kernel: late\n")
    (line,) = source.read()
    assert line.time == pytest.approx(time.time(), abs=5)


def test_partial_line_waits_for_newline(log, sources):
    append(log, "one\ntw")
    source = sources(log)
    assert texts(source) == ["one"]
    append(log, "o\n")
    assert texts(source) == ["two"]


def test_partial_line_is_read_whole_after_restart(log, sources):
    append(log, "one\ntw")
    first = sources(log)
    texts(first)
    append(log, "o\n")
    assert texts(sources(log, stored_cursor(first))) == ["two"]


def test_file_may_appear_later(log, sources):
    source = sources(log)
    assert texts(source) == []
    append(log, "one\n")
    (line,) = source.read()
    assert (line.text, line.history) == ("one", False)


def test_rotation_loses_no_line(log, sources):
    append(log, "one\n")
    source = sources(log)
    texts(source)
    append(log, "two\n")
    log.rename(log.with_name("kern.log.1"))
    append(log, "four\n")
    append(log.with_name("kern.log.1"), "three\n")
    assert texts(source) == ["two", "three", "four"]
    # The writer reopens its file only later.
    append(log.with_name("kern.log.1"), "late\n")
    assert texts(source) == ["late"]
    assert source.take_notes() == [f"{log} was rotated"]


def test_rotated_file_is_closed_after_rotated_seconds(log, sources):
    clock = [1000.0]
    append(log, "one\ntorn")
    source = sources(log, now=lambda: clock[0])
    log.rename(log.with_name("kern.log.1"))
    append(log, "two\n")
    assert texts(source) == ["one", "two"]
    clock[0] += ROTATED_SECONDS + 1
    assert texts(source) == ["torn"]
    assert len(source.cursor["files"]) == 1


def test_rotation_during_downtime_loses_no_line(log, sources):
    append(log, "one\n")
    first = sources(log)
    texts(first)
    append(log, "two\n")
    log.rename(log.with_name("kern.log.1"))
    append(log, "three\n")
    assert texts(sources(log, stored_cursor(first))) == ["two", "three"]


def test_missing_file_after_restart_is_reported(log, sources):
    append(log, "one\n")
    first = sources(log)
    texts(first)
    log.rename(log.parent / "elsewhere")
    append(log, "two\n")
    second = sources(log, stored_cursor(first))
    assert texts(second) == ["two"]
    assert second.overruns == 1
    assert "may be missing" in second.take_notes()[0]


def test_truncation_is_detected_in_grown_file(log, sources):
    append(log, "one\ntwo\n")
    source = sources(log)
    texts(source)
    log.write_text("three\nfour\nfive\n")
    assert texts(source) == ["three", "four", "five"]
    assert source.take_notes() == [f"{log} was truncated; reading it again from its beginning"]


def test_truncation_during_downtime_is_detected(log, sources):
    append(log, "one\ntwo\n")
    first = sources(log)
    texts(first)
    log.write_text("three\nfour\nfive\n")
    assert texts(sources(log, stored_cursor(first))) == ["three", "four", "five"]


def test_read_returns_at_most_limit_and_sets_pending(log, sources):
    append(log, "".join(f"{n}\n" for n in range(25)))
    source = sources(log)
    assert [line.text for line in source.read(10)] == [str(n) for n in range(10)]
    assert source.pending
    assert texts(source, 10) == [str(n) for n in range(10, 25)]
    assert not source.pending


def test_hole_after_truncation_is_skipped(log, sources):
    """With copytruncate, a writer that keeps its offset writes its next line after a hole."""
    with open(log, "wb", buffering=0) as writer:
        writer.write(b"one\n" * 300_000)
        source = sources(log)
        assert len(texts(source)) == 300_000
        os.truncate(log, 0)
        writer.write(b"two\n")
        assert log.stat().st_size > 1_000_000
        assert texts(source) == ["two"]
        writer.write(b"three\n")
        assert texts(source) == ["three"]
    assert source.rotations == 1


def test_removed_directory_raises_error(tmp_path, sources):
    (tmp_path / "log").mkdir()
    source = sources(tmp_path / "log/kern.log")
    assert source.missing
    append(tmp_path / "log/kern.log", "one\n")
    assert texts(source) == ["one"]
    assert not source.missing
    os.rename(tmp_path / "log", tmp_path / "old")
    assert select.select([source.fileno()], [], [], 60)[0]
    with pytest.raises(OSError, match="removed or moved away"):
        source.read()


def test_too_long_line_is_counted_as_malformed(log, sources):
    source = sources(log)
    append(log, "x" * 3 * MAX_LINE + "\none\n")
    assert texts(source)[-1] == "one"
    assert source.malformed == 1


STORM = "NVRM: Xid (PCI:0000:3b:00): 31, pid=%d, name=python3, Ch %08x, intr 00000000. MMU Fault"


def test_storm_is_counted_and_other_lines_are_returned(log, sources):
    append(log, "")
    source = sources(log)
    texts(source)
    other_lines = {10: "usb 1-1: new device", 1000: "NVRM: Xid (PCI:0000:9d:00): 79, pid=1, gone", 4999: "last"}
    lines = (other_lines.get(number, STORM % (number, number)) for number in range(5000))
    append(log, "".join(f"Nov 21 15:00:00 node17 kernel: [  12.345678] {line}\n" for line in lines))
    read_lines = source.read()
    assert not source.pending
    assert sum(line.lines for line in read_lines) == 5000
    assert len(read_lines) < 1000
    assert {line.text for line in read_lines if line.lines == 1} >= set(other_lines.values())
    assert all(line.text.startswith("NVRM: Xid (PCI:0000:3b:00): 31, pid=") for line in read_lines if line.lines > 1)


@pytest.mark.parametrize("settings", ["create", "nocreate", "copytruncate", "copytruncate compress", "dateext create"])
def test_logrotate_loses_no_line(tmp_path, sources, settings):
    require_root()
    require_programs("logrotate", packages="logrotate")
    log = tmp_path / "kern.log"
    (tmp_path / "rotate.conf").write_text(
        f'"{log}" {{\n rotate 3\n su root root\n ' + "\n ".join(settings.split()) + "\n}\n"
    )
    os.chmod(tmp_path, 0o755)
    append(log, "one\n" * 100)
    source = sources(log)
    assert texts(source) == ["one"] * 100
    for rotation in range(3):
        append(log, f"before {rotation}\n")
        read_before = (
            texts(source) if rotation else []
        )  # the first time the file is read after the rotation, unless it is truncated
        if "copytruncate" in settings and not rotation:
            read_before = texts(source)
        completed = subprocess.run(
            ["logrotate", "--force", "--state", str(tmp_path / "state"), str(tmp_path / "rotate.conf")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (completed.returncode, completed.stderr) == (0, "")
        append(log, f"after {rotation}\n")
        assert read_before + texts(source) == [f"before {rotation}", f"after {rotation}"]
        if "dateext" in settings:
            break  # one a day
    assert source.rotations == rotation + 1


def test_other_program_lines_are_ignored(log, sources):
    append(log, "Mar 29 15:38:59 host myprog[12]: NVRM: Xid (PCI:0000:3b:00): 79\n\n")
    assert texts(sources(log)) == []


def test_binary_garbage_is_bounded(log, sources):
    log.write_bytes(b"one\n" + bytes(1 << 20) + b"\xff\xfe\n" + b"two\n")
    read_texts = texts(sources(log))
    assert (read_texts[0], read_texts[-1]) == ("one", "two")
    assert all(len(text) <= MAX_LINE for text in read_texts)


def test_too_long_line_is_skipped_across_restart(log, sources):
    append(log, "x" * (MAX_LINE + 5))
    first = sources(log)
    assert texts(first) == ["x" * MAX_LINE]
    append(log, "yyy\ntwo\n")
    assert texts(sources(log, stored_cursor(first))) == ["two"]


@pytest.mark.parametrize("change", ["append", "create", "rotate"])
def test_descriptor_is_readable_after_change(log, sources, change):
    if change != "create":
        append(log, "one\n")
    source = sources(log)
    texts(source)
    assert select.select([source.fileno()], [], [], 0)[0] == []
    if change == "rotate":
        log.rename(log.with_name("kern.log.1"))
    append(log, "two\n")
    assert select.select([source.fileno()], [], [], 60)[0]
    assert texts(source) == ["two"]
    assert select.select([source.fileno()], [], [], 0)[0] == []


@pytest.mark.parametrize(
    "cursor",
    [
        {},
        {"sequence": 1},
        {"boot_id": "b", "files": 3},
        {"boot_id": "b", "files": [[1]]},
        {"boot_id": "b", "files": [["a"] * 4]},
        {"files": []},
    ],
)
def test_invalid_cursor_is_ignored(log, sources, cursor):
    append(log, "one\n")
    assert texts(sources(log, cursor)) == ["one"]


def test_missing_directory_raises_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        open_source(str(tmp_path / "nowhere/kern.log"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["line", "torn", "read", "kill", "rotate"]), max_size=25), st.integers(1, 4))
def test_each_line_is_returned_once_despite_kills_and_rotations(tmp_path_factory, steps, limit):
    """A kill comes after lines were read and before the cursor was stored, so the stored cursor counts."""
    folder = tmp_path_factory.mktemp("log")
    log = folder / "kern.log"
    log.touch()
    source = FollowedFile(str(log), None)
    stored_lines, cursor = [], stored_cursor(source)
    written, rotations, is_partial, is_read = 0, 0, False, True
    for step in [*steps, "line"]:
        if step == "line":
            append(log, f"{written}\n" if is_partial else f"line {written}\n")
            written, is_partial = written + 1, False
        elif step == "torn" and not is_partial:
            append(log, "line ")
            is_partial = True
        elif step == "rotate" and is_read and not is_partial and rotations < 2:
            log.rename(folder / f"kern.log.{rotations}")
            log.touch()
            rotations, is_read = rotations + 1, False
        elif step == "read":
            stored_lines += [line.text for line in source.read(limit)]
            cursor, is_read = stored_cursor(source), True
        elif step == "kill":
            source.read(limit)
            source.close()
            source = FollowedFile(str(log), cursor)
    stored_lines += texts(source, limit)
    source.close()
    assert stored_lines == [f"line {n}" for n in range(written)]


@given(st.lists(st.binary(max_size=20)), st.integers(1, 5), st.booleans())
def test_split_lines_keeps_all_bytes(pieces, limit, skipping):
    data = b"\n".join(pieces)
    lines, used_bytes, is_skipping = split_lines(data, limit, skipping)
    assert len(lines) <= limit
    assert 0 <= used_bytes <= len(data)
    assert is_skipping in (False, skipping)
    if not skipping:
        assert b"".join(line + b"\n" for line in lines) == data[:used_bytes]


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    source = open_source(str(path))
    assert isinstance(source, Fifo)
    yield path, source
    source.close()


def test_fifo_accepts_successive_writers(fifo):
    path, source = fifo
    assert source.read() == []
    for text in ("one\ntw", "o\nthree\n"):
        path.write_text(text)
        assert select.select([source.fileno()], [], [], 60)[0]
        lines = source.read()
    assert [line.text for line in lines] == ["two", "three"]
    assert lines[0].time == pytest.approx(time.time(), abs=5)
    assert source.cursor is None


def test_fifo_lines_are_live(fifo):
    path, source = fifo
    path.write_text("[    0.5] kernel: one\nMar 29 15:38:59 host kernel: two\n")
    for line in source.read():
        assert not line.history
        assert line.time == pytest.approx(time.time(), abs=5)


def test_fifo_read_returns_at_most_limit(fifo):
    path, source = fifo
    path.write_text("".join(f"{n}\n" for n in range(25)))
    assert [line.text for line in source.read(10)] == [str(n) for n in range(10)]
    assert source.pending
    assert len(source.read(10)) == 10
    assert [line.text for line in source.read(10)] == [str(n) for n in range(20, 25)]
    assert not source.pending


def test_killed_fifo_writer_loses_only_partial_line(fifo):
    path, source = fifo
    writer = subprocess.Popen(
        ["/bin/sh", "-c", 'printf "one\\ntw" > "$1"; kill -9 $$', "sh", path],
    )
    assert writer.wait() == -9
    assert [line.text for line in source.read()] == ["one"]
    with open(path, "w") as second_writer:
        second_writer.write("o\nthree\n")
    assert [line.text for line in source.read()] == ["two", "three"]


def test_fifo_storm_is_counted(fifo):
    path, source = fifo
    with open(path, "w") as writer:
        writer.write("".join(STORM % (number, number) + "\n" for number in range(600)))
    read_lines = source.read()
    assert (sum(line.lines for line in read_lines), len(read_lines)) == (600, 1)


def test_fifo_garbage_is_bounded(fifo):
    path, source = fifo
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    for _ in range(3):
        os.write(fd, b"\xff" * 60000)
        source.read()
    os.write(fd, b"\ntwo\n")
    os.close(fd)
    assert [line.text for line in source.read()] == ["two"]
