"""The files of the stream: each line is on disk once, even if the writer is killed or the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.common.ownership import Untrusted
from healthd.events import writer
from healthd.events.schema import Event, Source, render
from healthd.events.writer import append
from tests.agent.reporting.test_systemd import parse_entry


def line(seq: int, why: str = "", stream: str = "0f3c6f1e2a9b4d57") -> str:
    return render(Source("c1", "n1", "boot", stream), seq, 1795349480.0, 1.0, Event("stopped", {"why": why}))


LINES = [line(seq) for seq in range(1, 9)]


def written(directory: Path, number: int = 0) -> list[str]:
    return (directory / writer.name(number)).read_text("ascii").splitlines()


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_lines_are_appended_in_their_order(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:3], may_repeat=True)
    append(str(tmp_path), LINES[3:5], may_repeat=False)
    assert written(tmp_path) == LINES[:5]
    assert (tmp_path / writer.NAME).stat().st_mode & 0o777 == 0o600


def test_the_state_directory_is_made_where_it_is_missing(tmp_path: Path) -> None:
    append(str(tmp_path / "lib/healthd"), LINES[:1], may_repeat=True)
    assert written(tmp_path / "lib/healthd") == LINES[:1]


def test_what_stands_at_the_end_is_not_written_again(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:5], may_repeat=True)
    append(str(tmp_path), LINES[2:7], may_repeat=True)
    append(str(tmp_path), LINES[:7], may_repeat=True)
    assert written(tmp_path) == LINES[:7]


def test_another_line_of_the_same_number_is_another_line(tmp_path: Path) -> None:
    append(str(tmp_path), [line(1), line(1, stream="f" * 16)], may_repeat=True)
    append(str(tmp_path), [line(1, stream="f" * 16), line(1, "other")], may_repeat=True)
    assert written(tmp_path) == [line(1), line(1, stream="f" * 16), line(1, "other")]


@pytest.mark.parametrize("left", [1, 20, len(LINES[2])])
def test_a_line_that_a_kill_cut_is_closed_and_written_anew(tmp_path: Path, left: int) -> None:
    (tmp_path / writer.NAME).write_text("".join(f"{one}\n" for one in LINES[:2]) + LINES[2][:left])
    append(str(tmp_path), LINES[:4], may_repeat=True)
    assert written(tmp_path) == [*LINES[:2], LINES[2][:left], *(LINES[3:4] if left == len(LINES[2]) else LINES[2:4])]


# --- rotation


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the file limit to two lines."""
    monkeypatch.setattr(writer, "MAX_BYTES", most := 2 * (len(LINES[0]) + 1))
    return most


def test_a_file_at_the_bound_is_full_and_the_next_line_begins_another(tmp_path: Path, small: int) -> None:
    append(str(tmp_path), LINES[:2], may_repeat=False)
    assert (tmp_path / writer.NAME).stat().st_size == small
    assert files(tmp_path) == ["events.jsonl"]
    append(str(tmp_path), LINES[2:3], may_repeat=False)
    assert (written(tmp_path, 1), written(tmp_path)) == (LINES[:2], LINES[2:3])


def test_of_the_files_four_are_kept(tmp_path: Path, small: int) -> None:
    for one in [line(seq) for seq in range(1, 10)]:
        append(str(tmp_path), [one], may_repeat=False)
    assert files(tmp_path) == ["events.jsonl", "events.jsonl.1", "events.jsonl.2", "events.jsonl.3"]
    assert [written(tmp_path, number)[0] for number in (3, 2, 1, 0)] == [line(3), line(5), line(7), line(9)]


def test_what_stands_at_the_end_of_the_file_before_is_not_written_again(tmp_path: Path, small: int) -> None:
    append(str(tmp_path), LINES[:2], may_repeat=False)
    append(str(tmp_path), LINES[2:3], may_repeat=False)
    append(str(tmp_path), LINES[:4], may_repeat=True)
    assert (written(tmp_path, 1), written(tmp_path)) == (LINES[:2], LINES[2:4])


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_in_a_rotation_costs_no_file_but_the_oldest(
    tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    for one in LINES:
        append(str(tmp_path), [one], may_repeat=False)
    left = iter([None] * renames)
    rename = os.rename

    def killed(*args: object, **kwargs: object) -> None:
        next(left)
        rename(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as kill, contextlib.suppress(RuntimeError, StopIteration):
        kill.setattr(os, "rename", killed)
        append(str(tmp_path), [line(9)], may_repeat=False)
    append(str(tmp_path), [line(9)], may_repeat=True)
    kept = [one for number in (3, 2, 1, 0) for one in written(tmp_path, number)]
    assert kept == [*LINES[2:], line(9)]


def test_lines_that_are_more_than_a_file_holds_are_one_file(tmp_path: Path, small: int) -> None:
    append(str(tmp_path), LINES, may_repeat=False)
    append(str(tmp_path), [line(9)], may_repeat=False)
    assert (written(tmp_path, 1), written(tmp_path)) == (LINES, [line(9)])


# --- obstacles


@contextlib.contextmanager
def full_at(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size`: a longer write is truncated, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_write_that_a_full_disk_cuts_leaves_nothing_of_it(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:2], may_repeat=False)
    size = (tmp_path / writer.NAME).stat().st_size
    with full_at(size + len(LINES[2]) + 20), pytest.raises(OSError, match="File too large"):
        append(str(tmp_path), LINES[2:4], may_repeat=False)
    assert written(tmp_path) == LINES[:2]
    append(str(tmp_path), LINES[2:4], may_repeat=True)
    assert written(tmp_path) == LINES[:4]


def test_a_commit_that_the_disk_refuses_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    append(str(tmp_path), LINES[:2], may_repeat=False)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fdatasync", dying)
        with pytest.raises(OSError, match="Input/output error"):
            append(str(tmp_path), LINES[2:3], may_repeat=False)
    assert written(tmp_path) == LINES[:2]


def test_while_another_worker_writes_nothing_is_written_beside_it(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:1], may_repeat=False)
    import fcntl

    with open(tmp_path / writer.NAME, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            append(str(tmp_path), LINES[1:2], may_repeat=False)
    assert written(tmp_path) == LINES[:1]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_of_ours_is_not_written_to(tmp_path: Path, kind: str) -> None:
    target = tmp_path / writer.NAME
    if kind == "link":
        target.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(target)
    else:
        target.mkdir()
    with pytest.raises(OSError, match=f"{re.escape(str(target))}'$"):
        append(str(tmp_path), LINES[:1], may_repeat=False)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_folder_in_the_way_of_the_rotation_is_named_and_without_it_no_line_is_lost(
    tmp_path: Path, small: int, number: int
) -> None:
    for one in LINES[: 2 * number]:
        append(str(tmp_path), [one], may_repeat=False)
    (way := tmp_path / writer.name(number)).mkdir()
    before = {path: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    for _ in range(2):
        with pytest.raises(IsADirectoryError, match=f"Is a directory: '{re.escape(str(way))}'"):
            append(str(tmp_path), [line(9)], may_repeat=True)
    assert {path: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == before
    way.rmdir()
    append(str(tmp_path), [line(9)], may_repeat=True)
    kept = [one for n in reversed(range(4)) if (tmp_path / writer.name(n)).exists() for one in written(tmp_path, n)]
    assert kept == [*LINES[: 2 * number], line(9)]


def test_until_the_rotation_a_folder_in_its_way_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / writer.name(1)).mkdir()
    append(str(tmp_path), LINES[:2], may_repeat=True)
    append(str(tmp_path), LINES[:3], may_repeat=True)
    assert written(tmp_path) == LINES[:3]


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:1], may_repeat=False)
    with full_at((tmp_path / writer.NAME).stat().st_size), pytest.raises(OSError, match="File too large") as told:
        append(str(tmp_path), LINES[1:2], may_repeat=False)
    assert told.value.filename == str(tmp_path / writer.NAME)


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(Untrusted, match="is writable by all users"):
        append(str(shared), LINES[:1], may_repeat=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 400)), max_size=30))
def test_however_often_it_is_cut_and_written_again_each_line_stands_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    """Act like a killed daemon: it knows which lines were acknowledged, and appends all others again. Two files can
    hold all lines that may wait."""
    directory = tmp_path_factory.mktemp("state")
    every = [line(seq) for seq in range(1, 700)]
    most_waiting = 40
    acknowledged = decided = 0
    with pytest.MonkeyPatch.context() as bound:
        bound.setattr(writer, "MAX_BYTES", most_waiting * (len(every[-1]) + 1))
        bound.setattr(writer, "FILES", 100)
        for more, cut in steps:
            decided = min(decided + more, acknowledged + most_waiting)
            append(str(directory), every[acknowledged:decided], may_repeat=True)
            newest = directory / writer.NAME
            if cut and cut < newest.stat().st_size:  # killed during the write: the end is missing
                os.truncate(newest, newest.stat().st_size - min(cut, len(every[decided - 1]) + 1))
            else:
                acknowledged = decided
        append(str(directory), every[acknowledged:decided], may_repeat=True)
    whole = [one for path in directory.iterdir() for one in path.read_text().splitlines()]
    assert sorted(one for one in whole if one in set(every)) == sorted(every[:decided])


# --- the journal


def test_the_journal_has_the_words_and_each_field(tmp_path: Path) -> None:
    fields = {
        "stage": "sent",
        "reason": "healthd: gpu_xid/79 0000:61:00.0: fell off the bus",
    }
    drain = render(Source("c1", "n1", "boot", "f" * 16), 7, 1795349480.5, 1.5, Event("drain", fields))
    alive = render(
        Source("c1", "n1", "boot", "f" * 16),
        8,
        1795349480.5,
        1.5,
        Event("alive", {"conditions": (), "checks": ("a", "b")}),
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journal"))
        assert writer.send_to_journal([drain, alive], str(tmp_path / "journal")) == 0
        entry = parse_entry(journald.recv(1 << 16))
        then = parse_entry(journald.recv(1 << 16))
    assert entry["MESSAGE"] == b"drain sent: healthd: gpu_xid/79 0000:61:00.0: fell off the bus"
    assert (entry["SYSLOG_IDENTIFIER"], entry["PRIORITY"]) == (b"healthd-events", b"6")
    assert (entry["HEALTHD_EVENT"], entry["HEALTHD_STAGE"], entry["HEALTHD_SEQ"]) == (b"drain", b"sent", b"7")
    assert (entry["HEALTHD_STREAM_ID"], entry["HEALTHD_TIME"]) == (b"f" * 16, b"2026-11-22T12:11:20.500Z")
    assert (then["HEALTHD_CHECKS"], then["HEALTHD_CONDITIONS"]) == (b"a b", b"")


def test_the_checks_of_a_start_are_one_entry_of_the_journal(tmp_path: Path) -> None:
    source = Source("c1", "n1", "boot", "f" * 16)

    def said(seq: int, name: str, **fields: object) -> str:
        return render(source, seq, 1795349480.5, 1.5, Event(name, fields))

    enabled = [said(seq, "check_enabled", check=f"c{seq}", settings="aa", version="1") for seq in range(2, 45)]
    lines = [
        said(1, "started"),
        *enabled,
        said(45, "check_enabled", check="mount", instance="/data"),
        said(46, "alive"),
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journal"))
        assert writer.send_to_journal(lines, str(tmp_path / "journal")) == 0
        entries = [parse_entry(journald.recv(1 << 16)) for _ in range(3)]
    assert [entry["HEALTHD_EVENT"] for entry in entries] == [b"started", b"check_enabled", b"alive"]
    assert entries[1]["MESSAGE"].startswith(b"check_enabled: 44 checks: c2, c3, ")
    assert entries[1]["MESSAGE"].endswith(b", c44, mount /data")
    assert writer.send_to_journal(lines, str(tmp_path / "none")) == len(lines)


def test_a_journal_that_does_not_read_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.05)
    lines = [line(seq, "x" * 4000) for seq in range(1, 2000)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journal"))
        lost: list[int] = []
        sender = threading.Thread(target=lambda: lost.append(writer.send_to_journal(lines, str(tmp_path / "journal"))))
        sender.start()
        sender.join(60)
        assert lost, "the sender still waits"
        taken = 0
        journald.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while journald.recv(1 << 16):
                taken += 1
    assert lost[0] + taken == len(lines)


def test_where_no_journal_is_each_line_is_counted(tmp_path: Path) -> None:
    assert writer.send_to_journal(LINES, str(tmp_path / "none")) == len(LINES)
