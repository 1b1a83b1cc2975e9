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


def all_of(*places: Path, cursor: Cursor | None = None) -> tuple[list[StreamEvent], Tally, Cursor]:
    tally, cursor = Tally(), cursor or Cursor()
    told = [one for stream in find(map(str, places), tally) for one in read(stream, cursor, tally)]
    return told, tally, cursor


def seqs(*places: Path, cursor: Cursor | None = None) -> list[int | None]:
    return [one.seq for one in all_of(*places, cursor=cursor)[0]]


def node(tmp_path: Path, files: dict[str, bytes]) -> Path:
    folder = tmp_path / "n1"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


# --- files and their order


def test_rotated_files_are_one_stream_in_the_order_of_their_numbers(tmp_path):
    folder = node(
        tmp_path,
        {
            "events.jsonl": lines(31, 35),
            "events.jsonl.1": lines(21, 30),
            "events.jsonl.2.gz": gzip.compress(lines(11, 20)),
            "events.jsonl-20261101": lines(1, 10),
        },
    )
    assert seqs(folder) == list(range(1, 36))


def test_a_new_stream_of_the_same_node_comes_after_the_old_one(tmp_path):
    new = b"".join(line(seq, at=NOON + 1000 + seq, stream_id="b" * 16) + b"\n" for seq in (1, 2))
    told, _, _ = all_of(node(tmp_path, {"events.jsonl": new, "events.jsonl.1": lines(7, 9)}))
    assert [(one.key.stream_id[0], one.seq) for one in told if one.key] == [
        ("a", 7),
        ("a", 8),
        ("a", 9),
        ("b", 1),
        ("b", 2),
    ]


def test_other_files_of_the_folder_are_none_of_the_stream(tmp_path):
    others = ("events.jsonl.new", ".events.jsonl.1.X2dR5q", "events.jsonl~", "ledger.json", "my-events.jsonl")
    assert seqs(node(tmp_path, {"events.jsonl": lines(1, 2), **dict.fromkeys(others, lines(8, 9))})) == [1, 2]


def test_a_folder_of_nodes_has_a_stream_for_each(tmp_path):
    for cluster, name in (("c1", "n2"), ("c1", "n1"), ("c2", "n1")):
        folder = tmp_path / cluster / name
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_bytes(lines(1, 2, cluster=cluster, node=name))
    told, tally, _ = all_of(tmp_path)
    assert [(one.key.cluster, one.key.node, one.seq) for one in told if one.key] == [
        *(("c1", "n1", 1), ("c1", "n1", 2), ("c1", "n2", 1), ("c1", "n2", 2), ("c2", "n1", 1), ("c2", "n1", 2)),
    ]
    assert (tally.events, tally.repeats, tally.problems) == (6, 0, {})


def test_several_nodes_can_be_read_by_time(tmp_path):
    for name, at in (("n1", (0, 20, 40)), ("n2", (10, 30))):
        (tmp_path / name).mkdir()
        content = b"".join(line(seq, at=NOON + t, node=name) + b"\n" for seq, t in enumerate(at))
        (tmp_path / name / "events.jsonl").write_bytes(content)
    tally = Tally()
    told = list(merged(find([str(tmp_path)], tally), Cursor(), tally))
    assert [(one.at or 0.0) - NOON for one in told] == [0, 10, 20, 30, 40]


@contextmanager
def open_files(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_any_number_of_nodes_is_read_by_time_with_few_open_files(tmp_path: Path) -> None:
    """1,000 nodes: the files of 16 may be open at once, and 16 times as many are merged in each round."""
    for node_of in range(1000):
        (tmp_path / f"n{node_of}").mkdir()
        for name, seq in (("events.jsonl.1", 1), ("events.jsonl", 2)):
            at = NOON + 10_000 * seq + (node_of * 7919) % 1000
            (tmp_path / f"n{node_of}" / name).write_bytes(line(seq, at=at, node=f"n{node_of}") + b"\n")
    free = len(os.listdir("/proc/self/fd"))
    with open_files(free + 54):
        tally, cursor = Tally(), Cursor()
        told = list(merged(find([str(tmp_path)], tally), cursor, tally))
    times = [one.at or 0.0 for one in told]
    assert (len(told), times == sorted(times)) == (2000, True)
    assert (tally.problems, list(cursor.sequences.gaps())) == ({}, [])
    assert len(os.listdir("/proc/self/fd")) <= free  # files that other tests left open may have been closed meanwhile


def test_only_what_is_wanted_is_kept_of_many_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_MAX_OPEN", 0)
    for name in ("n1", "n2", "n3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(lines(1, 5, node=name))
    tally = Tally()
    with open_files(len(os.listdir("/proc/self/fd")) + 54):
        told = list(merged(find([str(tmp_path)], tally), Cursor(), tally, lambda told: told.seq == 3))
    assert [one.key.node for one in told if one.key] == ["n1", "n2", "n3"]


def test_a_stream_of_any_number_of_files_is_read_with_few_open_ones(tmp_path: Path) -> None:
    """An object store has one file for each five minutes."""
    folder = node(tmp_path, {f"events.jsonl-{9000 - n}.{n}.gz": gzip.compress(lines(n, n)) for n in range(1, 1500)})
    with open_files(len(os.listdir("/proc/self/fd")) + reader.MAX_OPEN_FILES + 3):
        told, tally, _ = all_of(folder)
    assert [one.seq for one in told] == list(range(1, 1500))
    assert tally.problems == {}


def test_one_file_of_all_nodes_is_read_too(tmp_path):
    file = tmp_path / "all"
    file.write_bytes(lines(1, 2, node="n1") + lines(1, 2, node="n2"))
    assert seqs(file) == [1, 2, 1, 2]


# --- repeats and gaps


def test_a_line_that_was_written_twice_is_one_event(tmp_path):
    folder = node(tmp_path, {"events.jsonl.1": lines(1, 5) + lines(4, 6), "events.jsonl": lines(6, 8)})
    told, tally, cursor = all_of(folder)
    assert [one.seq for one in told] == list(range(1, 9))
    assert (tally.lines, tally.events, tally.repeats) == (11, 8, 3)
    assert list(cursor.sequences.gaps()) == []


def test_a_hole_is_told_unless_the_node_says_it_dropped_the_lines(tmp_path):
    gone = line(10, "dropped", from_seq=6, to_seq=8, count=3) + b"\n"
    _, _, cursor = all_of(node(tmp_path, {"events.jsonl": lines(1, 2) + lines(4, 5) + gone}))
    assert list(cursor.sequences.gaps()) == [StreamGap(KEY, 3, 3), StreamGap(KEY, 9, 9)]


@given(st.lists(st.integers(0, 12), min_size=1), st.lists(st.integers(0, 40), max_size=3))
def test_each_event_comes_once_however_lines_are_repeated_and_cut_into_files(tmp_path_factory, order, cuts):
    folder = tmp_path_factory.mktemp("stream")
    written = [line(seq) + b"\n" for seq in order]
    places = sorted({0, *(min(cut, len(order)) for cut in cuts), len(order)})
    for number, (first, last) in enumerate(pairwise(places)):
        (folder / f"events.jsonl.{number}").write_bytes(b"".join(written[first:last]))
    told, tally, cursor = all_of(folder)
    assert sorted(one.seq or 0 for one in told) == sorted(set(order))
    assert (tally.events, tally.repeats) == (len(set(order)), len(order) - len(set(order)))
    missing = {*range(min(order), max(order))} - set(order)
    assert {n for hole in cursor.sequences.gaps() for n in range(hole.first, hole.last + 1)} == missing


# --- damaged data


def test_a_torn_line_is_told_with_its_place_and_costs_no_other(tmp_path):
    folder = node(tmp_path, {"events.jsonl": lines(1, 2) + line(3)[:40] + b"\n" + lines(3, 4)})
    told, tally, cursor = all_of(folder)
    assert [one.seq for one in told] == [1, 2, 3, 4]
    assert list(map(str, tally.examples)) == [
        f"{folder}/events.jsonl line 3 is truncated or damaged: it is not JSON",
    ]
    assert list(cursor.sequences.gaps()) == []


def test_a_line_without_its_end_is_taken_once_it_is_whole(tmp_path):
    file = node(tmp_path, {}) / "events.jsonl"
    file.write_bytes(lines(1, 2) + line(3)[:-1])
    told, tally, cursor = all_of(file)
    assert ([one.seq for one in told], tally.unread, tally.unfinished) == ([1, 2], 0, 1)
    file.write_bytes(lines(1, 2) + line(3))
    assert seqs(file, cursor=cursor) == [3]
    file.write_bytes(lines(1, 4))
    assert seqs(file, cursor=cursor) == [4]


def test_no_newer_event_and_no_newer_schema_is_lost(tmp_path):
    newer = line(3, "melted") + b"\n" + line(4, schema=2) + b"\n" + b'{"schema":3,"what":"else"}\n' * 2
    told, tally, _ = all_of(node(tmp_path, {"events.jsonl": lines(1, 2) + newer + lines(5, 5)}))
    assert [one.seq for one in told] == [1, 2, 3, 4, None, None, 5]
    assert tally.unknown == {"event melted": 1, "schema 2": 1, "schema 3": 2}
    assert tally.unread == 0


@pytest.mark.parametrize(("names", "others"), [(reader.MAX_UNKNOWN, 0), (reader.MAX_UNKNOWN + 7, 7)])
def test_of_names_that_are_not_known_so_many_are_kept_and_the_others_counted(tmp_path, names, others):
    content = b"".join(line(seq, schema=10**70 + seq) + b"\n" * 2 for seq in range(names))
    content += b"".join(line(names + seq, f"melted {seq} " + "x" * 100) + b"\n" for seq in range(names))
    _, tally, _ = all_of(node(tmp_path, {"events.jsonl": content}))
    assert tally.unknown.total() == 2 * names
    _, tally, _ = all_of(
        node(tmp_path, {"events.jsonl": b"".join(line(seq, schema=2 + seq) + b"\n" for seq in range(names))})
    )
    assert tally.unknown["others"] == others
    assert len(tally.unknown) == reader.MAX_UNKNOWN + (1 if others else 0)


def test_zero_bytes_that_a_crash_left_cost_no_event(tmp_path):
    zeros = b"\0" * (3 * reader.MAX_LINE)
    folder = node(tmp_path, {"events.jsonl": lines(1, 2) + zeros + lines(3, 4) + b"\0\0\n" + lines(5, 5) + b"\0"})
    told, tally, _ = all_of(folder)
    assert [one.seq for one in told] == [1, 2, 3, 4, 5]
    assert (tally.unread, tally.unfinished) == (0, 0)


class Endless(io.RawIOBase):
    """A file with `first`, then a line of 1 GB, then `last`, without using disk space."""

    def __init__(self, first: bytes, last: bytes) -> None:
        piece = b"x" * (1 << 20)
        self._pieces: Iterator[bytes] = iter([first, *[piece] * 1_000, last])

    def read(self, size: int = -1) -> bytes:
        return next(self._pieces, b"")


def test_a_line_of_1_gb_needs_no_memory(monkeypatch):
    tracemalloc.start()
    try:
        found = list(reader.lines(Endless(lines(1, 1), b"\n" + lines(2, 2)), Mark(0, 1, b"")))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(one.number, one.why) for one in found] == [(1, ""), (2, "is longer than 1 MiB: it is no event"), (3, "")]
    assert found[2].content == line(2, at=NOON + 2)
    assert found[2].end == len(lines(1, 2)) + 1_000 * (1 << 20) + 1
    assert peak < 8 << 20


@pytest.mark.parametrize("length", [0, 1])
def test_a_line_of_1_mib_is_read_and_a_longer_one_is_not(tmp_path, length):
    padded = line(2, message="x" * (reader.MAX_LINE - len(line(2, message="")) + length))
    told, tally, _ = all_of(node(tmp_path, {"events.jsonl": lines(1, 1) + padded + b"\n" + lines(3, 3)}))
    assert [one.seq for one in told] == ([1, 2, 3] if length == 0 else [1, 3])
    assert tally.unread == length


BYTES = st.lists(st.binary(max_size=12) | st.sampled_from([line(1), line(2), b"\n", b"\0\0", b"y" * 700]), max_size=12)


@given(BYTES, st.integers(1, 1000))
def test_lines_are_the_same_however_they_are_read(pieces, block):
    content = b"".join(pieces)
    found = list(reader.lines(io.BytesIO(content), Mark(0, 1, b""), block, 600))
    for number, one in enumerate(content.split(b"\n"), 1):
        kept = one.lstrip(b"\0")
        (mine,) = [f for f in found if f.number == number] or [None]
        if not kept:
            assert mine is None
        elif len(kept) <= 600:
            assert mine is not None
            assert (mine.content, mine.why) == (kept, "")
        else:
            assert mine is not None
            assert mine.why
    for one in found:
        assert content[: one.end].count(b"\n") == one.number if one.ended else one.end == len(content)


# --- unreadable files


def test_a_folder_without_a_stream_and_a_file_that_is_not_there_are_told(tmp_path):
    tally = Tally()
    assert find([str(tmp_path), str(tmp_path / "none")], tally) == []
    assert list(tally.problems) == [
        f"{tmp_path}: contains no events.jsonl",
        f"{tmp_path}/none: no such file or folder",
    ]


def test_a_damaged_archive_is_told_and_its_beginning_is_read(tmp_path):
    packed = gzip.compress(lines(1, 5000))
    folder = node(tmp_path, {"events.jsonl.1.gz": packed[:-200], "events.jsonl": lines(5001, 5002)})
    told, tally, _ = all_of(folder)
    assert told[0].seq == 1
    assert [one.seq for one in told][-2:] == [5001, 5002]
    assert list(tally.problems) == [f"{folder}/events.jsonl.1.gz: ends in the middle of compressed data"]
    (folder / "events.jsonl.1.gz").write_bytes(packed[:40] + b"????" + packed[44:])
    _, tally, _ = all_of(folder)
    (problem,) = tally.problems
    assert problem.startswith(f"{folder}/events.jsonl.1.gz: its compressed data is damaged: ")


def test_another_compression_is_told_with_the_way_to_read_it(tmp_path):
    file = tmp_path / "events.jsonl.xz"
    file.write_bytes(b"\xfd7zXZ\0 and so on")
    told, tally, _ = all_of(file)
    assert told == []
    assert list(tally.problems) == [
        f"{file}: cannot be read: only gzip is supported; run: xzcat {file} | healthd events -"
    ]


@pytest.fixture
def nobody() -> Iterator[Path]:
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


def test_a_file_without_permission_is_told_and_the_others_are_read(nobody):
    told, tally, _ = all_of(nobody)
    assert [one.seq for one in told] == [3, 4]
    assert list(tally.problems) == [f"{nobody}/events.jsonl.1: cannot be read: Permission denied"]


def test_a_folder_of_a_files_name_is_told(tmp_path):
    folder = node(tmp_path, {"events.jsonl.1": lines(1, 2)})
    (folder / "events.jsonl").mkdir()
    told, tally, _ = all_of(folder)
    assert [one.seq for one in told] == [1, 2]
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
def test_in_a_folder_only_plain_files_are_read(tmp_path, monkeypatch, make, why):
    """Otherwise a user with write access could make the reader block forever, or read secret files."""
    folder = node(tmp_path, {"events.jsonl.1": lines(1, 2)})
    monkeypatch.chdir(folder)
    try:
        make(Path("events.jsonl"))
    except PermissionError:
        pytest.skip("only root makes a device")
    told, tally, _ = all_of(folder)
    assert [one.seq for one in told] == [1, 2]
    assert list(tally.problems) == [f"{folder}/events.jsonl: cannot be read: {why}"]


def test_what_a_person_names_may_be_a_link(tmp_path):
    folder = node(tmp_path, {"events.jsonl": lines(1, 2)})
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").symlink_to(folder / "events.jsonl")
    assert seqs(tmp_path / "link") == seqs(tmp_path / "file") == [1, 2]


# --- rotation during reading, reading again, following


def rotate(folder: Path) -> None:
    for number in (3, 2, 1, 0):
        old = folder / (f"events.jsonl.{number}" if number else "events.jsonl")
        if old.exists():
            old.rename(folder / f"events.jsonl.{number + 1}")


def test_files_that_are_rotated_while_they_are_read_lose_nothing(tmp_path):
    folder = node(
        tmp_path, {"events.jsonl": lines(21, 30), "events.jsonl.1": lines(11, 20), "events.jsonl.2": lines(1, 10)}
    )
    tally, cursor, found = Tally(), Cursor(), []
    for one in read(str(folder), cursor, tally):
        found.append(one.seq)
        if one.seq == 5:
            rotate(folder)
            (folder / "events.jsonl").write_bytes(lines(31, 33))
    assert found == list(range(1, 31))
    assert seqs(folder, cursor=cursor) == [31, 32, 33]


def test_files_that_are_rotated_while_they_are_opened_lose_nothing(tmp_path, monkeypatch):
    folder = node(tmp_path, {"events.jsonl": lines(11, 20), "events.jsonl.1": lines(1, 10)})
    original, turns = reader._open, iter([False, True, True, False, True])

    def rotating(*arguments, **more):
        opened = original(*arguments, **more)
        if next(turns, False):
            rotate(folder)
            (folder / "events.jsonl").write_bytes(b"")
        return opened

    monkeypatch.setattr(reader, "_open", rotating)
    assert seqs(folder) == list(range(1, 21))


def test_what_was_read_is_not_read_again_wherever_rotation_put_it(tmp_path):
    folder = node(tmp_path, {"events.jsonl": lines(1, 10)})
    _, first, cursor = all_of(folder)
    rotate(folder)
    (folder / "events.jsonl").write_bytes(lines(11, 12))
    told, second, _ = all_of(folder, cursor=cursor)
    assert [one.seq for one in told] == [11, 12]
    assert (first.lines, second.lines, second.repeats) == (10, 2, 0)


def test_a_file_that_was_replaced_by_another_is_read_from_its_beginning(tmp_path):
    folder = node(tmp_path, {"events.jsonl": lines(1, 10)})
    _, _, cursor = all_of(folder)
    (folder / "events.jsonl").write_bytes(lines(1, 4) + lines(15, 20))
    assert seqs(folder, cursor=cursor) == list(range(15, 21))
    (folder / "events.jsonl").write_bytes(lines(1, 2))
    assert seqs(folder, cursor=cursor) == []


def test_a_line_that_comes_late_fills_its_hole(tmp_path):
    folder = node(tmp_path, {"events.jsonl": lines(1, 3) + lines(6, 8)})
    _, _, cursor = all_of(folder)
    assert list(cursor.sequences.gaps()) == [StreamGap(KEY, 4, 5)]
    with open(folder / "events.jsonl", "ab") as file:
        file.write(lines(4, 5))
    assert seqs(folder, cursor=cursor) == [4, 5]
    assert list(cursor.sequences.gaps()) == []


def following(folder: Path, *steps: Callable[[], object]) -> tuple[list[int | None], Tally]:
    """Return what `follow` reads while the steps run, one step after each round."""
    left, tally = list(steps), Tally()

    def wait() -> bool:
        if not left:
            return False
        left.pop(0)()
        return True

    return [one.seq for one in follow([str(folder)], Cursor(), tally, wait)], tally


def test_what_is_written_is_followed_through_rotations_and_torn_lines(tmp_path):
    folder = node(tmp_path, {"events.jsonl": lines(1, 3)})

    def append(content: bytes) -> None:
        with open(folder / "events.jsonl", "ab") as file:
            file.write(content)

    def rotated_twice() -> None:
        append(lines(6, 7))
        rotate(folder)
        append(lines(8, 9))
        rotate(folder)
        append(lines(10, 10))

    found, tally = following(
        folder,
        lambda: append(lines(4, 4) + line(5)[:30]),
        lambda: append(line(5, at=NOON + 5)[30:] + b"\n"),
        rotated_twice,
        lambda: append(line(11)[:50]),
        lambda: append(b"\n" + lines(11, 12)),
    )
    assert found == list(range(1, 13))
    assert tally.unread == 1


def test_a_node_that_comes_later_is_followed_too(tmp_path):
    first = node(tmp_path, {"events.jsonl": lines(1, 2)})

    def another() -> None:
        (tmp_path / "n2").mkdir()
        (tmp_path / "n2/events.jsonl").write_bytes(lines(1, 2, node="n2"))

    assert following(first.parent, another)[0] == [1, 2, 1, 2]


def test_a_file_that_is_away_for_a_while_is_followed_when_it_is_back(tmp_path):
    folder = node(tmp_path, {"events.jsonl": lines(1, 2)})
    found, tally = following(
        folder,
        lambda: (folder / "events.jsonl").unlink(),
        lambda: (folder / "events.jsonl").write_bytes(lines(3, 4)),
    )
    assert found == [1, 2, 3, 4]
    assert list(tally.problems) == [f"{folder}: contains no events.jsonl"]


def test_a_stream_that_could_not_be_read_is_tried_again_though_it_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "RETRY_ROUNDS", 3)
    folder = node(tmp_path, {"events.jsonl": lines(1, 2)})
    original, fails = reader._open, [True]

    def failing(path: str, *arguments: Any, **more: Any) -> Any:
        if fails:
            raise OSError(errno.EMFILE, "Too many open files")
        return original(path, *arguments, **more)

    monkeypatch.setattr(reader, "_open", failing)
    found, tally = following(folder, fails.clear, lambda: None, lambda: None)
    assert found == [1, 2]
    assert list(tally.problems) == [f"{folder}/events.jsonl: cannot be read: Too many open files"]
    assert tally.failed == set()
