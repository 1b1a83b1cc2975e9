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


def written_lines(directory: Path, number: int = 0) -> list[str]:
    return (directory / writer.name(number)).read_text("ascii").splitlines()


def file_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_append_keeps_order(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:3], may_repeat=True)
    append(str(tmp_path), LINES[3:5], may_repeat=False)
    assert written_lines(tmp_path) == LINES[:5]
    assert (tmp_path / writer.NAME).stat().st_mode & 0o777 == 0o600


def test_append_creates_state_directory(tmp_path: Path) -> None:
    append(str(tmp_path / "lib/healthd"), LINES[:1], may_repeat=True)
    assert written_lines(tmp_path / "lib/healthd") == LINES[:1]


def test_append_does_not_repeat_lines_at_the_end(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:5], may_repeat=True)
    append(str(tmp_path), LINES[2:7], may_repeat=True)
    append(str(tmp_path), LINES[:7], may_repeat=True)
    assert written_lines(tmp_path) == LINES[:7]


def test_append_writes_different_line_with_same_number(tmp_path: Path) -> None:
    append(str(tmp_path), [line(1), line(1, stream="f" * 16)], may_repeat=True)
    append(str(tmp_path), [line(1, stream="f" * 16), line(1, "other")], may_repeat=True)
    assert written_lines(tmp_path) == [line(1), line(1, stream="f" * 16), line(1, "other")]


@pytest.mark.parametrize("kept_length", [1, 20, len(LINES[2])])
def test_append_closes_truncated_line_and_writes_it_again(tmp_path: Path, kept_length: int) -> None:
    (tmp_path / writer.NAME).write_text("".join(f"{text}\n" for text in LINES[:2]) + LINES[2][:kept_length])
    append(str(tmp_path), LINES[:4], may_repeat=True)
    assert written_lines(tmp_path) == [
        *LINES[:2],
        LINES[2][:kept_length],
        *(LINES[3:4] if kept_length == len(LINES[2]) else LINES[2:4]),
    ]


# --- rotation


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the file limit to two lines."""
    monkeypatch.setattr(writer, "MAX_BYTES", max_bytes := 2 * (len(LINES[0]) + 1))
    return max_bytes


def test_append_rotates_at_the_size_limit(tmp_path: Path, small: int) -> None:
    append(str(tmp_path), LINES[:2], may_repeat=False)
    assert (tmp_path / writer.NAME).stat().st_size == small
    assert file_names(tmp_path) == ["events.jsonl"]
    append(str(tmp_path), LINES[2:3], may_repeat=False)
    assert (written_lines(tmp_path, 1), written_lines(tmp_path)) == (LINES[:2], LINES[2:3])


def test_append_keeps_four_files(tmp_path: Path, small: int) -> None:
    for text in [line(seq) for seq in range(1, 10)]:
        append(str(tmp_path), [text], may_repeat=False)
    assert file_names(tmp_path) == ["events.jsonl", "events.jsonl.1", "events.jsonl.2", "events.jsonl.3"]
    assert [written_lines(tmp_path, number)[0] for number in (3, 2, 1, 0)] == [line(3), line(5), line(7), line(9)]


def test_append_does_not_repeat_lines_of_previous_file(tmp_path: Path, small: int) -> None:
    append(str(tmp_path), LINES[:2], may_repeat=False)
    append(str(tmp_path), LINES[2:3], may_repeat=False)
    append(str(tmp_path), LINES[:4], may_repeat=True)
    assert (written_lines(tmp_path, 1), written_lines(tmp_path)) == (LINES[:2], LINES[2:4])


@pytest.mark.parametrize("renames", range(4))
def test_kill_during_rotation_loses_only_the_oldest_file(
    tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    for text in LINES:
        append(str(tmp_path), [text], may_repeat=False)
    remaining = iter([None] * renames)
    rename = os.rename

    def killed(*args: object, **kwargs: object) -> None:
        next(remaining)
        rename(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as kill, contextlib.suppress(RuntimeError, StopIteration):
        kill.setattr(os, "rename", killed)
        append(str(tmp_path), [line(9)], may_repeat=False)
    append(str(tmp_path), [line(9)], may_repeat=True)
    stored = [text for number in (3, 2, 1, 0) for text in written_lines(tmp_path, number)]
    assert stored == [*LINES[2:], line(9)]


def test_append_puts_more_lines_than_a_file_holds_into_one_file(tmp_path: Path, small: int) -> None:
    append(str(tmp_path), LINES, may_repeat=False)
    append(str(tmp_path), [line(9)], may_repeat=False)
    assert (written_lines(tmp_path, 1), written_lines(tmp_path)) == (LINES, [line(9)])


# --- obstacles


@contextlib.contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size`: a longer write is truncated, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_append_leaves_nothing_of_a_write_on_full_disk(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:2], may_repeat=False)
    size = (tmp_path / writer.NAME).stat().st_size
    with limit_file_size(size + len(LINES[2]) + 20), pytest.raises(OSError, match="File too large"):
        append(str(tmp_path), LINES[2:4], may_repeat=False)
    assert written_lines(tmp_path) == LINES[:2]
    append(str(tmp_path), LINES[2:4], may_repeat=True)
    assert written_lines(tmp_path) == LINES[:4]


def test_append_leaves_nothing_if_commit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    append(str(tmp_path), LINES[:2], may_repeat=False)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fdatasync", dying)
        with pytest.raises(OSError, match="Input/output error"):
            append(str(tmp_path), LINES[2:3], may_repeat=False)
    assert written_lines(tmp_path) == LINES[:2]


def test_append_fails_while_another_worker_writes(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:1], may_repeat=False)
    import fcntl

    with open(tmp_path / writer.NAME, "rb") as locked_file:
        fcntl.flock(locked_file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            append(str(tmp_path), LINES[1:2], may_repeat=False)
    assert written_lines(tmp_path) == LINES[:1]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_append_rejects_link_fifo_and_folder(tmp_path: Path, kind: str) -> None:
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
def test_folder_in_the_way_of_rotation_is_reported_and_no_line_is_lost(tmp_path: Path, small: int, number: int) -> None:
    for text in LINES[: 2 * number]:
        append(str(tmp_path), [text], may_repeat=False)
    (obstacle := tmp_path / writer.name(number)).mkdir()
    before = {path: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    for _ in range(2):
        with pytest.raises(IsADirectoryError, match=f"Is a directory: '{re.escape(str(obstacle))}'"):
            append(str(tmp_path), [line(9)], may_repeat=True)
    assert {path: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == before
    obstacle.rmdir()
    append(str(tmp_path), [line(9)], may_repeat=True)
    stored = [
        text for n in reversed(range(4)) if (tmp_path / writer.name(n)).exists() for text in written_lines(tmp_path, n)
    ]
    assert stored == [*LINES[: 2 * number], line(9)]


def test_folder_in_the_way_does_not_matter_before_rotation(tmp_path: Path) -> None:
    (tmp_path / writer.name(1)).mkdir()
    append(str(tmp_path), LINES[:2], may_repeat=True)
    append(str(tmp_path), LINES[:3], may_repeat=True)
    assert written_lines(tmp_path) == LINES[:3]


def test_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    append(str(tmp_path), LINES[:1], may_repeat=False)
    with (
        limit_file_size((tmp_path / writer.NAME).stat().st_size),
        pytest.raises(OSError, match="File too large") as raised,
    ):
        append(str(tmp_path), LINES[1:2], may_repeat=False)
    assert raised.value.filename == str(tmp_path / writer.NAME)


def test_append_rejects_folder_writable_by_others(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(Untrusted, match="is writable by all users"):
        append(str(shared), LINES[:1], may_repeat=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 400)), max_size=30))
def test_append_writes_each_line_once_after_any_kills_and_retries(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    """Act like a killed daemon: it knows which lines were acknowledged, and appends all others again. Two files can
    hold all lines that may wait."""
    directory = tmp_path_factory.mktemp("state")
    every = [line(seq) for seq in range(1, 700)]
    max_waiting = 40
    acknowledged = decided = 0
    with pytest.MonkeyPatch.context() as bound:
        bound.setattr(writer, "MAX_BYTES", max_waiting * (len(every[-1]) + 1))
        bound.setattr(writer, "FILES", 100)
        for more, cut in steps:
            decided = min(decided + more, acknowledged + max_waiting)
            append(str(directory), every[acknowledged:decided], may_repeat=True)
            newest = directory / writer.NAME
            if cut and cut < newest.stat().st_size:  # killed during the write: the end is missing
                os.truncate(newest, newest.stat().st_size - min(cut, len(every[decided - 1]) + 1))
            else:
                acknowledged = decided
        append(str(directory), every[acknowledged:decided], may_repeat=True)
    whole = [text for path in directory.iterdir() for text in path.read_text().splitlines()]
    assert sorted(text for text in whole if text in set(every)) == sorted(every[:decided])


# --- the journal


def test_send_to_journal_writes_message_and_fields(tmp_path: Path) -> None:
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
        second_entry = parse_entry(journald.recv(1 << 16))
    assert entry["MESSAGE"] == b"drain sent: healthd: gpu_xid/79 0000:61:00.0: fell off the bus"
    assert (entry["SYSLOG_IDENTIFIER"], entry["PRIORITY"]) == (b"healthd-events", b"6")
    assert (entry["HEALTHD_EVENT"], entry["HEALTHD_STAGE"], entry["HEALTHD_SEQ"]) == (b"drain", b"sent", b"7")
    assert (entry["HEALTHD_STREAM_ID"], entry["HEALTHD_TIME"]) == (b"f" * 16, b"2026-11-22T12:11:20.500Z")
    assert (second_entry["HEALTHD_CHECKS"], second_entry["HEALTHD_CONDITIONS"]) == (b"a b", b"")


def test_send_to_journal_combines_checks_of_a_start(tmp_path: Path) -> None:
    source = Source("c1", "n1", "boot", "f" * 16)

    def event_line(seq: int, name: str, **fields: object) -> str:
        return render(source, seq, 1795349480.5, 1.5, Event(name, fields))

    enabled = [event_line(seq, "check_enabled", check=f"c{seq}", settings="aa", version="1") for seq in range(2, 45)]
    lines = [
        event_line(1, "started"),
        *enabled,
        event_line(45, "check_enabled", check="mount", instance="/data"),
        event_line(46, "alive"),
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journal"))
        assert writer.send_to_journal(lines, str(tmp_path / "journal")) == 0
        entries = [parse_entry(journald.recv(1 << 16)) for _ in range(3)]
    assert [entry["HEALTHD_EVENT"] for entry in entries] == [b"started", b"check_enabled", b"alive"]
    assert entries[1]["MESSAGE"].startswith(b"check_enabled: 44 checks: c2, c3, ")
    assert entries[1]["MESSAGE"].endswith(b", c44, mount /data")
    assert writer.send_to_journal(lines, str(tmp_path / "none")) == len(lines)


def test_send_to_journal_does_not_wait_long_for_a_blocked_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_send_to_journal_counts_lines_without_a_journal(tmp_path: Path) -> None:
    assert writer.send_to_journal(LINES, str(tmp_path / "none")) == len(LINES)
