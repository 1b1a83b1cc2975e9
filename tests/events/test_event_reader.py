"""Reading event streams: each event once, whatever happened during writing, rotation and transport."""

from __future__ import annotations

import errno
import gzip
import io
import os
import resource
import socket
import stat
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from event_lines import NOON, line, lines
from hypothesis import given
from hypothesis import strategies as st

from healthd.events import merge, reader
from healthd.events.merge import follow, merged
from healthd.events.parse import Key, StreamEvent
from healthd.events.reader import Cursor, Mark, Tally, find, read
from healthd.events.sequence import StreamGap

KEY = Key("c1", "n1", "a" * 16)


def read_all(*places: Path, cursor: Cursor | None = None) -> tuple[list[StreamEvent], Tally, Cursor]:
    tally, cursor = Tally(), cursor or Cursor()
    events = [event for stream in find(map(str, places), tally) for event in read(stream, cursor, tally)]
    return events, tally, cursor


def read_seqs(*places: Path, cursor: Cursor | None = None) -> list[int | None]:
    return [event.seq for event in read_all(*places, cursor=cursor)[0]]


def node_folder(tmp_path: Path, files: dict[str, bytes]) -> Path:
    folder = tmp_path / "n1"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


# --- files and their order


def test_read_orders_rotated_files_by_number(tmp_path):
    folder = node_folder(
        tmp_path,
        {
            "events.jsonl": lines(31, 35),
            "events.jsonl.1": lines(21, 30),
            "events.jsonl.2.gz": gzip.compress(lines(11, 20)),
            "events.jsonl-20261101": lines(1, 10),
        },
    )
    assert read_seqs(folder) == list(range(1, 36))


def test_read_puts_new_stream_of_node_after_old_one(tmp_path):
    new = b"".join(line(seq, at=NOON + 1000 + seq, stream_id="b" * 16) + b"\n" for seq in (1, 2))
    events, _, _ = read_all(node_folder(tmp_path, {"events.jsonl": new, "events.jsonl.1": lines(7, 9)}))
    assert [(event.key.stream_id[0], event.seq) for event in events if event.key] == [
        ("a", 7),
        ("a", 8),
        ("a", 9),
        ("b", 1),
        ("b", 2),
    ]


def test_find_ignores_other_files_in_the_folder(tmp_path):
    other_names = ("events.jsonl.new", ".events.jsonl.1.X2dR5q", "events.jsonl~", "ledger.json", "my-events.jsonl")
    assert read_seqs(
        node_folder(tmp_path, {"events.jsonl": lines(1, 2), **dict.fromkeys(other_names, lines(8, 9))})
    ) == [1, 2]


def test_find_returns_one_stream_per_node_folder(tmp_path):
    for cluster, name in (("c1", "n2"), ("c1", "n1"), ("c2", "n1")):
        folder = tmp_path / cluster / name
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_bytes(lines(1, 2, cluster=cluster, node=name))
    events, tally, _ = read_all(tmp_path)
    assert [(event.key.cluster, event.key.node, event.seq) for event in events if event.key] == [
        *(("c1", "n1", 1), ("c1", "n1", 2), ("c1", "n2", 1), ("c1", "n2", 2), ("c2", "n1", 1), ("c2", "n1", 2)),
    ]
    assert (tally.events, tally.repeats, tally.problems) == (6, 0, {})


def test_merged_orders_events_of_several_nodes_by_time(tmp_path):
    for name, at in (("n1", (0, 20, 40)), ("n2", (10, 30))):
        (tmp_path / name).mkdir()
        content = b"".join(line(seq, at=NOON + t, node=name) + b"\n" for seq, t in enumerate(at))
        (tmp_path / name / "events.jsonl").write_bytes(content)
    tally = Tally()
    events = list(merged(find([str(tmp_path)], tally), Cursor(), tally))
    assert [(event.at or 0.0) - NOON for event in events] == [0, 10, 20, 30, 40]


@contextmanager
def limit_open_files(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_merged_reads_1000_nodes_with_few_open_files(tmp_path: Path) -> None:
    """1,000 nodes: the files of 16 may be open at once, and 16 times as many are merged in each round."""
    for number in range(1000):
        (tmp_path / f"n{number}").mkdir()
        for name, seq in (("events.jsonl.1", 1), ("events.jsonl", 2)):
            at = NOON + 10_000 * seq + (number * 7919) % 1000
            (tmp_path / f"n{number}" / name).write_bytes(line(seq, at=at, node=f"n{number}") + b"\n")
    free = len(os.listdir("/proc/self/fd"))
    with limit_open_files(free + 54):
        tally, cursor = Tally(), Cursor()
        events = list(merged(find([str(tmp_path)], tally), cursor, tally))
    times = [event.at or 0.0 for event in events]
    assert (len(events), times == sorted(times)) == (2000, True)
    assert (tally.problems, list(cursor.sequences.gaps())) == ({}, [])
    assert len(os.listdir("/proc/self/fd")) <= free  # files that other tests left open may have been closed meanwhile


def test_merged_keeps_only_selected_events_of_many_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_MAX_OPEN", 0)
    for name in ("n1", "n2", "n3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(lines(1, 5, node=name))
    tally = Tally()
    with limit_open_files(len(os.listdir("/proc/self/fd")) + 54):
        found = list(merged(find([str(tmp_path)], tally), Cursor(), tally, lambda found: found.seq == 3))
    assert [event.key.node for event in found if event.key] == ["n1", "n2", "n3"]


def test_read_of_many_files_needs_few_open_files(tmp_path: Path) -> None:
    """An object store has one file for each five minutes."""
    folder = node_folder(
        tmp_path, {f"events.jsonl-{9000 - n}.{n}.gz": gzip.compress(lines(n, n)) for n in range(1, 1500)}
    )
    with limit_open_files(len(os.listdir("/proc/self/fd")) + reader.MAX_OPEN_FILES + 3):
        events, tally, _ = read_all(folder)
    assert [event.seq for event in events] == list(range(1, 1500))
    assert tally.problems == {}


def test_read_accepts_one_file_of_all_nodes(tmp_path):
    file = tmp_path / "all"
    file.write_bytes(lines(1, 2, node="n1") + lines(1, 2, node="n2"))
    assert read_seqs(file) == [1, 2, 1, 2]


# --- repeats and gaps


def test_read_returns_repeated_line_once(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl.1": lines(1, 5) + lines(4, 6), "events.jsonl": lines(6, 8)})
    events, tally, cursor = read_all(folder)
    assert [event.seq for event in events] == list(range(1, 9))
    assert (tally.lines, tally.events, tally.repeats) == (11, 8, 3)
    assert list(cursor.sequences.gaps()) == []


def test_gap_is_reported_unless_the_node_reports_dropped_lines(tmp_path):
    dropped = line(10, "dropped", from_seq=6, to_seq=8, count=3) + b"\n"
    _, _, cursor = read_all(node_folder(tmp_path, {"events.jsonl": lines(1, 2) + lines(4, 5) + dropped}))
    assert list(cursor.sequences.gaps()) == [StreamGap(KEY, 3, 3), StreamGap(KEY, 9, 9)]


@given(st.lists(st.integers(0, 12), min_size=1), st.lists(st.integers(0, 40), max_size=3))
def test_read_returns_each_event_once_for_any_repeats_and_files(tmp_path_factory, order, cuts):
    folder = tmp_path_factory.mktemp("stream")
    written = [line(seq) + b"\n" for seq in order]
    places = sorted({0, *(min(cut, len(order)) for cut in cuts), len(order)})
    for number, (first, last) in enumerate(pairwise(places)):
        (folder / f"events.jsonl.{number}").write_bytes(b"".join(written[first:last]))
    events, tally, cursor = read_all(folder)
    assert sorted(event.seq or 0 for event in events) == sorted(set(order))
    assert (tally.events, tally.repeats) == (len(set(order)), len(order) - len(set(order)))
    missing = {*range(min(order), max(order))} - set(order)
    assert {n for hole in cursor.sequences.gaps() for n in range(hole.first, hole.last + 1)} == missing


# --- damaged data


def test_read_reports_truncated_line_with_place_and_keeps_others(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 2) + line(3)[:40] + b"\n" + lines(3, 4)})
    events, tally, cursor = read_all(folder)
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert list(map(str, tally.examples)) == [
        f"{folder}/events.jsonl line 3 is truncated or damaged: it is not JSON",
    ]
    assert list(cursor.sequences.gaps()) == []


def test_read_returns_unfinished_line_after_it_is_complete(tmp_path):
    file = node_folder(tmp_path, {}) / "events.jsonl"
    file.write_bytes(lines(1, 2) + line(3)[:-1])
    events, tally, cursor = read_all(file)
    assert ([event.seq for event in events], tally.unread, tally.unfinished) == ([1, 2], 0, 1)
    file.write_bytes(lines(1, 2) + line(3))
    assert read_seqs(file, cursor=cursor) == [3]
    file.write_bytes(lines(1, 4))
    assert read_seqs(file, cursor=cursor) == [4]


def test_read_returns_newer_events_and_schemas(tmp_path):
    newer = line(3, "melted") + b"\n" + line(4, schema=2) + b"\n" + b'{"schema":3,"what":"else"}\n' * 2
    events, tally, _ = read_all(node_folder(tmp_path, {"events.jsonl": lines(1, 2) + newer + lines(5, 5)}))
    assert [event.seq for event in events] == [1, 2, 3, 4, None, None, 5]
    assert tally.unknown == {"event melted": 1, "schema 2": 1, "schema 3": 2}
    assert tally.unread == 0


@pytest.mark.parametrize(("names", "other_count"), [(reader.MAX_UNKNOWN, 0), (reader.MAX_UNKNOWN + 7, 7)])
def test_tally_limits_names_of_unknown_events(tmp_path, names, other_count):
    content = b"".join(line(seq, schema=10**70 + seq) + b"\n" * 2 for seq in range(names))
    content += b"".join(line(names + seq, f"melted {seq} " + "x" * 100) + b"\n" for seq in range(names))
    _, tally, _ = read_all(node_folder(tmp_path, {"events.jsonl": content}))
    assert tally.unknown.total() == 2 * names
    _, tally, _ = read_all(
        node_folder(tmp_path, {"events.jsonl": b"".join(line(seq, schema=2 + seq) + b"\n" for seq in range(names))})
    )
    assert tally.unknown["others"] == other_count
    assert len(tally.unknown) == reader.MAX_UNKNOWN + (1 if other_count else 0)


def test_read_skips_zero_bytes_of_a_crash(tmp_path):
    zeros = b"\0" * (3 * reader.MAX_LINE)
    folder = node_folder(
        tmp_path, {"events.jsonl": lines(1, 2) + zeros + lines(3, 4) + b"\0\0\n" + lines(5, 5) + b"\0"}
    )
    events, tally, _ = read_all(folder)
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]
    assert (tally.unread, tally.unfinished) == (0, 0)


class HugeLine(io.RawIOBase):
    """A file with `first`, then a line of 1 GB, then `last`, without using disk space."""

    def __init__(self, first: bytes, last: bytes) -> None:
        piece = b"x" * (1 << 20)
        self._pieces: Iterator[bytes] = iter([first, *[piece] * 1_000, last])

    def read(self, size: int = -1) -> bytes:
        return next(self._pieces, b"")


def test_lines_needs_no_memory_for_a_line_of_1_gb(monkeypatch):
    tracemalloc.start()
    try:
        found = list(reader.lines(HugeLine(lines(1, 1), b"\n" + lines(2, 2)), Mark(0, 1, b"")))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(found_line.number, found_line.why) for found_line in found] == [
        (1, ""),
        (2, "is longer than 1 MiB, so it is not an event"),
        (3, ""),
    ]
    assert found[2].content == line(2, at=NOON + 2)
    assert found[2].end == len(lines(1, 2)) + 1_000 * (1 << 20) + 1
    assert peak < 8 << 20


@pytest.mark.parametrize("length", [0, 1])
def test_read_accepts_line_of_1_mib_and_rejects_longer_one(tmp_path, length):
    padded = line(2, message="x" * (reader.MAX_LINE - len(line(2, message="")) + length))
    events, tally, _ = read_all(node_folder(tmp_path, {"events.jsonl": lines(1, 1) + padded + b"\n" + lines(3, 3)}))
    assert [event.seq for event in events] == ([1, 2, 3] if length == 0 else [1, 3])
    assert tally.unread == length


BYTES = st.lists(st.binary(max_size=12) | st.sampled_from([line(1), line(2), b"\n", b"\0\0", b"y" * 700]), max_size=12)


@given(BYTES, st.integers(1, 1000))
def test_lines_are_independent_of_block_size(pieces, block):
    content = b"".join(pieces)
    found = list(reader.lines(io.BytesIO(content), Mark(0, 1, b""), block, 600))
    for number, raw_line in enumerate(content.split(b"\n"), 1):
        stripped = raw_line.lstrip(b"\0")
        (mine,) = [f for f in found if f.number == number] or [None]
        if not stripped:
            assert mine is None
        elif len(stripped) <= 600:
            assert mine is not None
            assert (mine.content, mine.why) == (stripped, "")
        else:
            assert mine is not None
            assert mine.why
    for raw_line in found:
        assert (
            content[: raw_line.end].count(b"\n") == raw_line.number if raw_line.ended else raw_line.end == len(content)
        )


# --- unreadable files


def test_find_reports_folder_without_stream_and_missing_file(tmp_path):
    tally = Tally()
    assert find([str(tmp_path), str(tmp_path / "none")], tally) == []
    assert list(tally.problems) == [
        f"{tmp_path}: contains no events.jsonl",
        f"{tmp_path}/none: no such file or folder",
    ]


def test_read_reports_damaged_archive_and_reads_its_beginning(tmp_path):
    packed = gzip.compress(lines(1, 5000))
    folder = node_folder(tmp_path, {"events.jsonl.1.gz": packed[:-200], "events.jsonl": lines(5001, 5002)})
    events, tally, _ = read_all(folder)
    assert events[0].seq == 1
    assert [event.seq for event in events][-2:] == [5001, 5002]
    assert list(tally.problems) == [f"{folder}/events.jsonl.1.gz: ends in the middle of compressed data"]
    (folder / "events.jsonl.1.gz").write_bytes(packed[:40] + b"????" + packed[44:])
    _, tally, _ = read_all(folder)
    (problem,) = tally.problems
    assert problem.startswith(f"{folder}/events.jsonl.1.gz: its compressed data is damaged: ")


def test_read_reports_other_compression_with_command(tmp_path):
    file = tmp_path / "events.jsonl.xz"
    file.write_bytes(b"\xfd7zXZ\0 and so on")
    events, tally, _ = read_all(file)
    assert events == []
    assert list(tally.problems) == [
        f"{file}: cannot be read: only gzip is supported; run: xzcat {file} | healthd events -"
    ]


@pytest.fixture
def unreadable_folder() -> Iterator[Path]:
    """A folder with an unreadable file and a readable one. Root becomes the user nobody for the test."""
    with tempfile.TemporaryDirectory(prefix="healthd.") as name:
        folder, user = Path(name), os.geteuid()
        folder.chmod(0o755)
        (folder / "events.jsonl").write_bytes(lines(3, 4))
        (folder / "events.jsonl.1").write_bytes(lines(1, 2))
        (folder / "events.jsonl.1").chmod(0)
        os.seteuid(user or 65534)
        try:
            yield folder
        finally:
            os.seteuid(user)


def test_read_reports_file_without_permission_and_reads_others(unreadable_folder):
    events, tally, _ = read_all(unreadable_folder)
    assert [event.seq for event in events] == [3, 4]
    assert list(tally.problems) == [f"{unreadable_folder}/events.jsonl.1: cannot be read: Permission denied"]


def test_read_reports_folder_with_name_of_a_file(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl.1": lines(1, 2)})
    (folder / "events.jsonl").mkdir()
    events, tally, _ = read_all(folder)
    assert [event.seq for event in events] == [1, 2]
    assert list(tally.problems) == [f"{folder}/events.jsonl: cannot be read: Is a directory"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
        (lambda path: path.symlink_to("/etc/passwd"), "a symbolic link"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)), "not a regular file"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "No such device or address"),
    ],
    ids=["link to a device", "link to a file", "fifo", "device", "socket"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_read_opens_only_regular_files_in_a_folder(tmp_path, monkeypatch, make, why):
    """Otherwise a user with write access could make the reader block forever, or read secret files."""
    folder = node_folder(tmp_path, {"events.jsonl.1": lines(1, 2)})
    monkeypatch.chdir(folder)
    try:
        make(Path("events.jsonl"))
    except PermissionError:
        pytest.skip("only root makes a device")
    events, tally, _ = read_all(folder)
    assert [event.seq for event in events] == [1, 2]
    assert list(tally.problems) == [f"{folder}/events.jsonl: cannot be read: {why}"]


def test_find_follows_link_given_by_user(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 2)})
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").symlink_to(folder / "events.jsonl")
    assert read_seqs(tmp_path / "link") == read_seqs(tmp_path / "file") == [1, 2]


# --- rotation during reading, reading again, following


def rotate(folder: Path) -> None:
    for number in (3, 2, 1, 0):
        old = folder / (f"events.jsonl.{number}" if number else "events.jsonl")
        if old.exists():
            old.rename(folder / f"events.jsonl.{number + 1}")


def test_read_loses_nothing_if_files_rotate_during_reading(tmp_path):
    folder = node_folder(
        tmp_path, {"events.jsonl": lines(21, 30), "events.jsonl.1": lines(11, 20), "events.jsonl.2": lines(1, 10)}
    )
    tally, cursor, found = Tally(), Cursor(), []
    for event in read(str(folder), cursor, tally):
        found.append(event.seq)
        if event.seq == 5:
            rotate(folder)
            (folder / "events.jsonl").write_bytes(lines(31, 33))
    assert found == list(range(1, 31))
    assert read_seqs(folder, cursor=cursor) == [31, 32, 33]


def test_read_loses_nothing_if_files_rotate_during_opening(tmp_path, monkeypatch):
    folder = node_folder(tmp_path, {"events.jsonl": lines(11, 20), "events.jsonl.1": lines(1, 10)})
    original, turns = reader._open, iter([False, True, True, False, True])

    def rotating(*arguments, **more):
        opened = original(*arguments, **more)
        if next(turns, False):
            rotate(folder)
            (folder / "events.jsonl").write_bytes(b"")
        return opened

    monkeypatch.setattr(reader, "_open", rotating)
    assert read_seqs(folder) == list(range(1, 21))


def test_cursor_prevents_rereading_of_rotated_files(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 10)})
    _, first, cursor = read_all(folder)
    rotate(folder)
    (folder / "events.jsonl").write_bytes(lines(11, 12))
    events, second, _ = read_all(folder, cursor=cursor)
    assert [event.seq for event in events] == [11, 12]
    assert (first.lines, second.lines, second.repeats) == (10, 2, 0)


def test_read_starts_again_in_a_replaced_file(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 10)})
    _, _, cursor = read_all(folder)
    (folder / "events.jsonl").write_bytes(lines(1, 4) + lines(15, 20))
    assert read_seqs(folder, cursor=cursor) == list(range(15, 21))
    (folder / "events.jsonl").write_bytes(lines(1, 2))
    assert read_seqs(folder, cursor=cursor) == []


def test_late_line_fills_its_gap(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 3) + lines(6, 8)})
    _, _, cursor = read_all(folder)
    assert list(cursor.sequences.gaps()) == [StreamGap(KEY, 4, 5)]
    with open(folder / "events.jsonl", "ab") as file:
        file.write(lines(4, 5))
    assert read_seqs(folder, cursor=cursor) == [4, 5]
    assert list(cursor.sequences.gaps()) == []


def follow_steps(folder: Path, *steps: Callable[[], object]) -> tuple[list[int | None], Tally]:
    """Return what `follow` reads while the steps run, one step after each round."""
    remaining, tally = list(steps), Tally()

    def wait() -> bool:
        if not remaining:
            return False
        remaining.pop(0)()
        return True

    return [event.seq for event in follow([str(folder)], Cursor(), tally, wait)], tally


def test_follow_reads_through_rotations_and_truncated_lines(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 3)})

    def append(content: bytes) -> None:
        with open(folder / "events.jsonl", "ab") as file:
            file.write(content)

    def rotated_twice() -> None:
        append(lines(6, 7))
        rotate(folder)
        append(lines(8, 9))
        rotate(folder)
        append(lines(10, 10))

    found, tally = follow_steps(
        folder,
        lambda: append(lines(4, 4) + line(5)[:30]),
        lambda: append(line(5, at=NOON + 5)[30:] + b"\n"),
        rotated_twice,
        lambda: append(line(11)[:50]),
        lambda: append(b"\n" + lines(11, 12)),
    )
    assert found == list(range(1, 13))
    assert tally.unread == 1


def test_follow_finds_a_new_node(tmp_path):
    first = node_folder(tmp_path, {"events.jsonl": lines(1, 2)})

    def add_node() -> None:
        (tmp_path / "n2").mkdir()
        (tmp_path / "n2/events.jsonl").write_bytes(lines(1, 2, node="n2"))

    assert follow_steps(first.parent, add_node)[0] == [1, 2, 1, 2]


def test_follow_continues_after_a_file_was_missing(tmp_path):
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 2)})
    found, tally = follow_steps(
        folder,
        lambda: (folder / "events.jsonl").unlink(),
        lambda: (folder / "events.jsonl").write_bytes(lines(3, 4)),
    )
    assert found == [1, 2, 3, 4]
    assert list(tally.problems) == [f"{folder}: contains no events.jsonl"]


def test_follow_retries_a_stream_that_could_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "RETRY_ROUNDS", 3)
    folder = node_folder(tmp_path, {"events.jsonl": lines(1, 2)})
    original, fails = reader._open, [True]

    def failing(path: str, *arguments: Any, **more: Any) -> Any:
        if fails:
            raise OSError(errno.EMFILE, "Too many open files")
        return original(path, *arguments, **more)

    monkeypatch.setattr(reader, "_open", failing)
    found, tally = follow_steps(folder, fails.clear, lambda: None, lambda: None)
    assert found == [1, 2]
    assert list(tally.problems) == [f"{folder}/events.jsonl: cannot be read: Too many open files"]
    assert tally.failed == set()
