"""A large log is read in pieces by several processes: what is found, and how it ends, is as with one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from waiting import until

from healthd.scan import continuation, literals, messages, parallel, piece_result, subprocesses
from healthd.scan.events import happened
from healthd.scan.findings import event_json, judged
from healthd.scan.lines import Tally
from healthd.scan.log_file import BLOCK, lines_of
from healthd.scan.messages import Reader
from healthd.scan.parallel import Sizes
from tests.scan.test_scan_fast import LOGS, NOW, OTHERS, TEXTS, XID, correlate, told

ROOT = Path(__file__).parents[2]


class Beside(subprocesses.Copy):
    """A copy that is this process: it answers at once. `dies`: which of its requests it does not live to answer."""

    def __init__(self, work: subprocesses.Work, silent: int, dies: int | None = None) -> None:
        super().__init__(0, -1, silent)
        self._work, self._dies = work, dies

    def ask(self, request: bytes) -> None:
        if self._dies == 0 or not self.alive:
            self.alive = False
            self.answers.append(None)
            return
        self._dies = None if self._dies is None else self._dies - 1
        self.answers.append(self._work(request))


@contextlib.contextmanager
def file_of(log: bytes) -> Iterator[int]:
    file = os.memfd_create("log")
    try:
        os.write(file, log)
        yield file
    finally:
        os.close(file)


def in_parts(log: bytes, sizes: Sizes, dies: int | None = None) -> tuple[list[dict[str, Any]], Tally, int]:
    """(events, tally, how many pieces were taken from a copy's answer)."""
    tally, taken = Tally(), []

    def heads_behind(heads: continuation.Heads, answer: piece_result.Heard) -> continuation.Heads:
        taken.append(answer)
        return behind(heads, answer)

    behind = piece_result.heads_behind
    reads, writes = os.pipe()
    with file_of(log) as file:
        copies: list[subprocesses.Copy] = [
            Beside(parallel._work(Reader(NOW), file, "log", sizes), reads, dies) for _ in range(2)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(piece_result, "heads_behind", heads_behind)
            found = parallel._in_order(Reader(NOW), file, "log", tally, sizes, copies)
            events = [event_json(one) for one in judged(happened(found), correlate())]
    os.close(reads)
    os.close(writes)
    return events, tally, len(taken)


def whole(log: bytes) -> tuple[list[dict[str, Any]], tuple[int, bool, bool]]:
    events, tally = told(lines_of(io.BytesIO(log)))
    return events, (tally.lines, tally.kernel, tally.binary)


def same(log: bytes, sizes: Sizes, dies: int | None = None) -> None:
    events, tally, _ = in_parts(log, sizes, dies)
    assert (events, (tally.lines, tally.kernel, tally.binary)) == whole(log)


# One of each of what goes on over lines: an incident, a storm, records that were cut into lines, a program's further
# lines, a reboot, a line that syslog repeats, bytes that are no text.
STORY = "\n".join(
    [
        "Mar 29 15:38:12 gpu-1 sshd[4711]: Accepted publickey for alice from 10.1.2.3 port 22",
        *(f"Mar 29 15:38:12 gpu-1 kernel: [   10.{micro:06}] {XID}" for micro in (1, 2, 3, 4, 5, 9, 8)),
        "Mar 29 15:38:12 gpu-1 kernel: [   10.500000] overlayfs: failed to resolve '/zz",
        f"Mar 29 15:38:12 gpu-1 kernel: [   10.500000] {XID.replace('18:00', '2a:00')}",
        "Mar 29 15:38:12 gpu-2 kernel: [   10.500000] usb 1-1: another machine",
        f"Mar 29 15:38:12 gpu-1 kernel: [   10.500000] {XID.replace('18:00', '3b:00')}",
        "Mar 29 15:38:13 gpu-1 kernel: mlx5_core 0000:5c:00.0 ib0: Link down",
        "Mar 29 15:38:13 gpu-1 kernel: message repeated 3 times: [ mlx5_core 0000:5c:00.0 ib0: Link down]",
        "Mar 29 15:38:14 gpu-1 python3[4]: the text of a program",
        " " * 34 + XID,
        f"[   11.000000] {XID.replace('18:00', '4c:00')}",
        XID.replace("18:00", "5d:00"),
        "",
        "\0\0\0[   12.000000] NVRM: Xid (PCI:0000:18:00): 74, pid=1, name=a, NVLink: fatal error detected on link 2",
        f"[    1.000000] {XID}",
        "[    2.000000] nvme nvme0: I/O 12 QID 3 timeout, completion polled",
        "",
    ]
).encode("latin-1")


def test_cut_at_each_byte_it_is_read_as_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(STORY)
    assert len(expected[0]) > 8
    assert any(one["unproven"] for one in expected[0])
    cut_at: set[int] = set()
    tried: list[set[int]] = []
    for place in range(1, len(STORY) + 1):
        with file_of(STORY) as file:
            plan = {piece.begins for piece in parallel.pieces(file, place, 1)}
        if plan in tried:
            continue
        tried.append(plan)
        cut_at |= plan
        events, tally, _ = in_parts(STORY, Sizes(piece=place, block=1))
        assert (events, (tally.lines, tally.kernel, tally.binary)) == expected, place
    lines = [0, *(place + 1 for place, byte in enumerate(STORY[:-1]) if byte == ord("\n"))]
    assert cut_at >= {begins for begins in lines if not STORY.startswith(b" ", begins)}


@given(log=LOGS, piece=st.integers(1, 2000), kept=st.sampled_from([1, 2, 3, 2100]), ends=st.sampled_from([b"", b"\n"]))
def test_any_log_is_read_in_pieces_as_by_one(log: bytes, piece: int, kept: int, ends: bytes) -> None:
    """Also where few lines before one count: then what pieces know of each other is all that holds it together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuation, "LINES_KEPT", kept)
        patch.setattr(continuation, "OF_OTHER_HOSTS", 1)
        patch.setattr(parallel, "LINES_KEPT", kept)
        same(log + ends, Sizes(piece=piece, block=1))


RECORD = st.tuples(st.sampled_from(["gpu-1", "gpu-2"]), st.integers(1, 2), st.sampled_from(TEXTS)).map(
    lambda one: f"Mar 29 15:38:12 {one[0]} kernel: [   10.00000{one[1]}] {one[2]}"
)


@given(lines=st.lists(RECORD | OTHERS, max_size=40), piece=st.integers(1, 600), kept=st.sampled_from([2, 5, 2100]))
def test_so_are_records_of_one_moment_that_lie_on_both_sides_of_a_cut(lines: list[str], piece: int, kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuation, "LINES_KEPT", kept)
        patch.setattr(continuation, "OF_OTHER_HOSTS", 1)
        patch.setattr(parallel, "LINES_KEPT", kept)
        same("\n".join(lines).encode(), Sizes(piece=piece, block=1))


@given(
    lines=st.lists(st.binary(max_size=60) | st.sampled_from([b"\0" * 70, b"\xef\xbb\xbf", XID.encode()]), max_size=20),
    piece=st.integers(1, 300),
)
def test_any_bytes_are(lines: list[bytes], piece: int) -> None:
    same(b"\n".join(lines), Sizes(piece=piece, block=16))


# Faults of one part that take turns, with a detail: which of them a line belongs to depends on what came before.
IN_TURN = [
    "nvme nvme1: frozen state error detected, reset controller",
    "nvme nvme1: I/O 775 QID 2 timeout, aborting",
    "nvme nvme1: Abort status: 0x6",
    "{1}[Hardware Error]: event severity: corrected",
    "{2}[Hardware Error]: event severity: corrected",
    XID,
]


@example(texts=[IN_TURN[0], IN_TURN[1], IN_TURN[0], IN_TURN[2]], piece=150)
@example(texts=[IN_TURN[3], IN_TURN[4]] * 2 + [IN_TURN[3]], piece=150)
@given(texts=st.lists(st.sampled_from(IN_TURN), max_size=12), piece=st.integers(1, 400))
def test_so_are_faults_of_one_part_in_turn(texts: list[str], piece: int) -> None:
    log = "".join(f"[   10.{micro:06}] {text}\n" for micro, text in enumerate(texts)).encode()
    same(log, Sizes(piece=piece, block=1))


@given(texts=st.lists(st.sampled_from(IN_TURN), max_size=12))
def test_what_is_forgotten_of_known_messages_changes_nothing(texts: list[str]) -> None:
    log = "".join(f"[   10.{micro:06}] {text}\n" for micro, text in enumerate(texts)).encode()
    expected = whole(log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MESSAGES_BYTES", 1)
        assert whole(log) == expected


def test_what_a_piece_lacks_of_those_before_it_is_noticed_and_it_is_read_again() -> None:
    """A record of thousands of lines of one moment: only who read its beginning knows on what."""
    first = "[   10.000001] overlayfs: failed to resolve '/zz"
    lines = [first, *(f"[   10.000001] {XID.replace('18:00', f'{place % 100:02}:00')}" for place in range(6000))]
    log = "\n".join(lines).encode()
    events, _, taken = in_parts(log, Sizes(piece=100_000, block=1000))
    assert events == whole(log)[0]
    assert taken == 1
    usual = "\n".join(f"[   10.{place:06}] {XID.replace('18:00', f'{place % 100:02}:00')}" for place in range(6000))
    events, _, taken = in_parts(usual.encode(), Sizes(piece=100_000, block=1000))
    assert events == whole(usual.encode())[0]
    assert taken == len(usual) // 100_000, "all but the last piece"


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_what_a_copy_does_not_live_to_answer_the_first_process_reads(dies: int) -> None:
    same(STORY, Sizes(piece=100, block=1), dies)


def test_lines_without_end_are_read_by_one_process_in_bounded_pieces() -> None:
    for log in (b"x" * 20_000_000, b"\0" * 3_000_000 + STORY, b"  indented\n" * 300_000):
        with file_of(log) as file:
            plan = list(parallel.pieces(file, 1 << 20))
        assert plan[-1].last
        assert all(piece.ends - piece.begins < 10 << 20 for piece in plan[:-1])
        same(log, Sizes(piece=1 << 20))


def test_a_piece_ends_where_one_reader_ends_a_block() -> None:
    lines = [f"[{place:5}.000000] usb 1-1: {'x' * (place % 3000)}\n" for place in range(3000)]
    log = "".join(lines).encode()
    with file_of(log) as file:
        ends = {piece.ends for piece in parallel.pieces(file, 1 << 20)}
    at, blocks = 0, set()
    for block in lines_of(io.BytesIO(log)):
        at += len(block.text) + 1
        blocks.add(at)
    assert len(ends) > 3
    assert ends - {len(log)} <= blocks
    assert BLOCK < 1 << 20


# --- real processes

PROGRAM = """
import sys
from healthd.cli import main, scan
from healthd.scan.parallel import Sizes
scan._scan.__defaults__ = (Sizes(large={large}, piece=100_000, copies={copies}),)
{more}
sys.exit(main.main(sys.argv[1:]))
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def faults(count: int) -> str:
    """All different, ten seconds apart."""
    return "".join(
        f"[{10 * place:7}.{place:06}] {XID.replace('18:00', f'{place % 200:02x}:00').replace('4711', str(place))}\n"
        for place in range(count)
    )


def argv(log: Path, *, json: bool = True, large: int = 1000, copies: int = 2, more: str = "") -> list[str]:
    program = PROGRAM.format(large=large, copies=copies, more=more)
    # What a shell starts in the background, this test perhaps too, is deaf to Ctrl-C.
    words = ["env", "--default-signal=INT", sys.executable, "-c", program, "scan", *(["--json"] if json else [])]
    return [*words, str(log)]


def done(words: list[str]) -> tuple[int, str, str]:
    ended = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    return ended.returncode, ended.stdout, ended.stderr


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    except OSError:
        return []


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("as_json", [True, False])
def test_the_program_says_the_same_with_several_processes(tmp_path: Path, as_json: bool) -> None:
    rows = (ROOT / "tests/data/kernel_lines.jsonl").read_text("utf-8").splitlines()
    captured = "\n".join(json.loads(row)["text"] for row in rows)
    logs = [faults(4000), f"{captured}\n" * 5, "nothing\n" * 50_000, STORY.decode("latin-1") * 300]
    for number, text in enumerate(logs):
        log = tmp_path / f"log{number}"
        log.write_bytes(text.encode("utf-8"))
        beside = done(argv(log, json=as_json, more=COUNTS.format(file=str(tmp_path / f"copies{number}"))))
        assert beside == done(argv(log, json=as_json, large=1 << 40)), number
        assert (tmp_path / f"copies{number}").read_text() == "xx"


# An "x" in a file for each copy that is made.
COUNTS = """
import os
fork = os.fork
def counted():
    with open({file!r}, "a") as file:
        file.write("x")
    return fork()
os.fork = counted
"""


def test_an_hour_that_there_is_twice_is_the_same_in_each_piece(tmp_path: Path) -> None:
    """The C library answers by what it was asked before."""
    said = [
        f"[Sat Oct 24 20:50:00 2026] {XID}\n",
        f"[Sun Oct 25 02:30:00 2026] {XID.replace('18:00', '2a:00')}\n",
        f"[Sun Oct 25 02:40:00 2026] {XID.replace('18:00', '3b:00')}\n",
    ]
    (tmp_path / "log").write_text("nothing\n".join(said).replace("nothing\n", "nothing\n" * 20_000))
    here = ["env", "TZ=Europe/Berlin"]
    beside = done([*here, *argv(tmp_path / "log")])
    assert beside == done([*here, *argv(tmp_path / "log", large=1 << 40)])
    assert len(beside[1].splitlines()) == 3


def test_a_log_that_begins_with_holes_is_read_by_one_process(tmp_path: Path) -> None:
    """What copytruncate leaves: how the lines are written is only seen behind it."""
    (tmp_path / "log").write_bytes(b"\0" * 200_000 + faults(2000).encode())
    more = "import os; del os.fork"
    assert done(argv(tmp_path / "log", more=more)) == done(argv(tmp_path / "log", large=1 << 40))


@pytest.mark.parametrize("cores", ["one core", "a small log", "a pipe"])
def test_one_core_a_small_log_and_a_pipe_are_read_by_one_process(tmp_path: Path, cores: str) -> None:
    log = tmp_path / "log"
    log.write_text(faults(100))
    more = "import os; del os.fork\n"
    if cores == "one core":
        more += "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    large = 1 << 20 if cores == "a small log" else 1000
    words = argv(log, large=large, copies=0 if cores == "one core" else 2, more=more)
    if cores == "a pipe":
        words[-1:] = ["-"]
        ended = subprocess.run(words, env=ENVIRONMENT, input=faults(100), capture_output=True, text=True, timeout=240)
        assert ended.stdout == done(argv(log, large=1 << 40))[1]
    else:
        assert done(words) == done(argv(log, large=1 << 40))


def test_copies_that_are_killed_take_nothing_with_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(faults(20_000))
    with subprocess.Popen(
        argv(log), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()  # it waits for us now, as soon as the pipe is full
        until(lambda: len(children(process.pid)) == 2)
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=240)
    assert (process.returncode, (first + out).decode(), err.decode()) == done(argv(log, large=1 << 40))


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None])
def test_no_process_stays_behind(tmp_path: Path, by: signal.Signals | None) -> None:
    """Ctrl-C, SIGTERM, kill -9, a reader that goes away."""
    log = tmp_path / "log"
    log.write_text(faults(20_000))
    with subprocess.Popen(
        argv(log), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        until(lambda: len(children(process.pid)) == 2)
        copies = children(process.pid)
        if by is None:
            process.stdout.close()
        else:
            process.send_signal(by)
        status = process.wait(240)
        until(lambda: all(gone(pid) for pid in copies))
        assert process.stderr.read() == b""
    assert status == {signal.SIGINT: 130, None: 2}.get(by, -(by or 0))


def test_a_log_that_becomes_shorter_meanwhile_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(faults(20_000))
    with subprocess.Popen(
        argv(log), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.truncate(log, 500_000)
        _, err = process.communicate(timeout=240)
    assert err.decode() == f"healthd scan: {log}: became shorter while it was read\n"
    assert process.returncode == 2


def test_what_is_written_meanwhile_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(faults(20_000))
    with subprocess.Popen(argv(log), env=ENVIRONMENT, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        with open(log, "a") as more:
            more.write(f"[9000000.000000] {XID.replace('18:00', 'ff:00')}\n")
        out, _ = process.communicate(timeout=240)
    assert json.loads(out.splitlines()[-1])["pci"] == "0000:ff:00.0"
    assert len((first + out).splitlines()) == 20_001


def test_a_mistake_of_ours_is_told_once_and_by_the_first_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(faults(3000))
    more = (
        "import healthd.agent.kernel_log.parse as parse\nreal = parse._parse\n"
        "def _parse(text, literals):\n    if '77:00' in text: raise ZeroDivisionError('a mistake')\n"
        "    return real(text, literals)\nparse._parse = _parse"
    )
    beside = done(argv(log, more=more))
    assert beside == done(argv(log, large=1 << 40, more=more))
    assert "ZeroDivisionError" in beside[2]


def test_no_more_is_kept_than_is_allowed(tmp_path: Path) -> None:
    """Answers that wait for their turn: no further piece is given out beyond their bound."""
    log = faults(6000).encode()
    with file_of(log) as file:
        sizes = Sizes(piece=10_000, block=1000, unread=1)
        reads, writes = os.pipe()
        copies: list[subprocesses.Copy] = [
            Beside(parallel._work(Reader(NOW), file, "log", sizes), reads) for _ in range(4)
        ]
        given = parallel._Given(parallel.pieces(file, sizes.piece, sizes.block), copies, sizes.unread)
        while given.next() is not None:
            assert sum(len(copy.answers) for copy in copies) <= 1
        os.close(reads)
        os.close(writes)


def test_the_search_by_re2_may_be_given_from_the_start() -> None:
    reader = Reader(NOW, literals.by_re2())
    tally = Tally()
    found = list(happened(reader.messages(lines_of(io.BytesIO(STORY)), tally, reader.neighbours())))
    assert len(found) == len(whole(STORY)[0])
