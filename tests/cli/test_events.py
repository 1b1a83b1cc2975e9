"""Tests of `healthd events` as a user runs it: the real program, its rows, its messages and its exit status."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from event_lines import NOON, line, lines
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.events.parse import StreamEvent, parse
from healthd.events.rows import rows
from healthd.events.schema import EVENTS

ROOT = Path(__file__).parents[2]
XID = {
    "condition": "x-1",
    "check": "gpu_xid",
    "instance": "",
    "code": "gpu_xid/79",
    "subject": "0000:61:00.0",
    "severity": "critical",
    "kind": "edge",
    "count": 1,
    "jobs": ["4711"],
    "first": "2025-11-22T12:00:00.000Z",
    "last": "2025-11-22T12:00:00.000Z",
    "message": "Xid 79: GPU has fallen off the bus",
}
ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def argv(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "healthd", "events", *map(str, arguments)]


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"env": ENV, **options}
    done = subprocess.run(argv(*arguments), capture_output=True, text=True, timeout=240, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the state directory of a node with a day of events; the first hour is in a rotated file."""
    made = tmp_path / "state"
    made.mkdir()
    old = line(1, "started", version="0.1.0", mode="act", last_alive=None, clean=True) + b"\n"
    (made / "events.jsonl.1.gz").write_bytes(gzip.compress(old + line(2, "opened", at=NOON + 3600, **XID) + b"\n"))
    new = line(3, "drain", at=NOON + 3601, stage="sent", reason="healthd: gpu_xid/79") + b"\n"
    new += line(4, "cleared", at=NOON + 86400, **XID, cleared_by="reboot") + b"\n"
    (made / "events.jsonl").write_bytes(new)
    return made


# --- rows


def test_what_a_start_says_of_each_check_is_one_row_but_none_waits_while_the_stream_is_followed():
    since = {"version": "1.0", "settings": "aa", "since": "2025-11-22T12:00:00.000Z"}
    enabled = [
        line(n, "check_enabled", check=name, instance=i, **since)
        for n, name, i in ((1, "cpu", ""), (2, "mount", "/data"))
    ]
    changed = [line(3, "check_changed", check="cpu", instance="", **since), line(4, "stopped", why="told")]
    told = [one for one in map(parse, enabled + changed) if isinstance(one, StreamEvent)]
    page = Page(200, colour=False, fold=True)

    def said(row: str) -> str:
        """Return the row without its times, which are local times."""
        return " ".join(re.sub(r"\d{4}-\d\d-\d\d [\d:]{8}", "THEN", row).split()[1:])

    assert [said(row) for row in list(rows(told, page))[1:]] == [
        "check_enabled 2 checks (version 1.0, configured since THEN): cpu, mount /data",
        "check_changed cpu (version 1.0, configured since THEN)",
        "stopped told",
    ]
    followed = rows((one for one in told[:1]), page, at_once=True)
    assert [said(next(followed)), said(next(followed))][1] == "check_enabled cpu (version 1.0, configured since THEN)"


def test_a_day_of_a_node_is_a_row_for_each_event(folder):
    done = run(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "2025-11-22 Saturday, times are UTC\n"
        "12:00:00  started         healthd 0.1.0, mode act; last alive unknown\n"
        "13:00:00  opened          critical gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus (job 4711)\n"
        "13:00:01  drain           sent: healthd: gpu_xid/79\n"
        "\n"
        "2025-11-23 Sunday, times are UTC\n"
        "12:00:00  cleared         critical gpu_xid/79 0000:61:00.0 (ended by reboot)\n"
    )


def test_times_are_local(folder):
    done = run(folder, env={**ENV, "TZ": "Europe/Berlin"})
    assert done.stdout.startswith("2025-11-22 Saturday, times are CET\n13:00:00  started ")


def test_the_nodes_of_a_folder_are_told_apart_and_merged_by_time(tmp_path):
    for name, offset in (("gpu-1", 0), ("gpu-12345", 1)):
        (tmp_path / name).mkdir()
        content = b"".join(line(n, "stopped", at=NOON + 2 * n + offset, node=name, why="x") + b"\n" for n in (1, 2))
        (tmp_path / name / "events.jsonl").write_bytes(content)
    found = [row.split() for row in run(tmp_path).stdout.splitlines()[1:]]
    assert [(time, node) for time, node, *_ in found] == [
        *(("12:00:02", "gpu-1"), ("12:00:03", "gpu-12345"), ("12:00:04", "gpu-1"), ("12:00:05", "gpu-12345")),
    ]


FIELDS = [*sorted({name for says in EVENTS.values() for name in (*says.required, *says.optional)}), "stage"]
ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=60)
    | st.lists(st.integers() | st.dictionaries(st.text(max_size=3), st.none(), max_size=2), max_size=3)
    | st.just("2025-11-22T12:00:00.000Z")
)


@given(
    st.lists(st.tuples(st.sampled_from([*EVENTS, "melted"]), st.dictionaries(st.sampled_from(FIELDS), ODD))),
    st.sampled_from([80, 100, 30]),
    st.booleans(),
    st.booleans(),
)
def test_any_field_of_any_event_is_a_row_that_fits_and_steers_no_terminal(events, width, nodes, at_once):
    told = [parse(line(seq, event, **fields)) for seq, (event, fields) in enumerate(events)]
    read = [one for one in told if isinstance(one, StreamEvent)]
    text = "".join(rows(read, Page(width, colour=False, fold=True), nodes, at_once))
    assert text.replace("\n", "").isprintable()
    assert len(text.splitlines()) >= (len(read) if at_once else bool(read))
    if width == 80:
        assert all(len(row) <= 80 for row in text.splitlines())


def test_a_row_is_folded_on_a_terminal_and_coloured_by_severity():
    told = parse(line(1, "opened", **{**XID, "message": "x " * 60}))
    assert isinstance(told, StreamEvent)
    _, first, *rest = "".join(rows([told], Page(80, colour=True, fold=True))).splitlines()
    assert first.startswith("12:00:00  opened          \033[1;31mcritical\033[0m gpu_xid/79")
    assert all(row.startswith(" " * 26) and len(row) <= 80 for row in rest)
    assert rest


# --- selection of events


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), [1, 2, 3, 4]),
        (("--since", "2025-11-22T13:00"), [2, 3, 4]),
        (("--since", "2025-11-22T14:00+01:00"), [2, 3, 4]),
        (("--since", "2025-11-22T13:00:01Z", "--until", "2025-11-23"), [3]),
        (("--until", "2025-11-22T12:59:59"), [1]),
        (("--code", "gpu_xid/*"), [2, 4]),
        (("--code", "gpu_xid"), []),
        (("--since", "1s"), []),
    ],
)
def test_times_and_codes_choose_events(folder, arguments, expected):
    done = run(folder, "--json", *arguments, env={**ENV, "TZ": "UTC"})
    assert [json.loads(one)["seq"] for one in done.stdout.splitlines()] == expected
    assert done.returncode == 0


def test_a_time_ago_is_counted_from_now(tmp_path):
    now = time.time()
    (tmp_path / "events.jsonl").write_bytes(line(1, at=now - 7200) + b"\n" + line(2, at=now - 600) + b"\n")
    assert [json.loads(one)["seq"] for one in run(tmp_path, "--json", "--since", "1h").stdout.splitlines()] == [2]


def test_nothing_that_happened_is_said(folder):
    for done in (run(folder, "--since", "1s"), run("-", stdin=subprocess.DEVNULL)):
        assert (done.returncode, done.stdout, done.stderr) == (0, "no event\n", "")


def test_the_json_is_the_lines_as_they_are(folder):
    plain = gzip.decompress((folder / "events.jsonl.1.gz").read_bytes()) + (folder / "events.jsonl").read_bytes()
    assert run(folder, "--json").stdout.encode() == plain


def test_a_line_of_others_reaches_the_terminal_escaped_and_means_the_same(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(line(1, "stopped", why="\x9b2J ü") + b"\n")
    done = run(tmp_path, "--json", env={**ENV, "LC_ALL": "C"})
    assert done.stdout.isascii()
    assert json.loads(done.stdout)["why"] == "\x9b2J ü"


def test_standard_input_is_a_stream(folder):
    done = run("-", "--json", input=lines(1, 3).decode())
    assert done.stdout.encode() == lines(1, 3)


def test_the_settings_say_where_the_stream_is(folder, tmp_path):
    file = tmp_path / "healthd.toml"
    file.write_text(f'state_dir = "{folder}"\n[checks.no_such]\n')
    assert run("--config", file, "--json").stdout == run("--state-dir", folder, "--json").stdout != ""


# --- errors


def refused(*arguments: object, **options: Any) -> tuple[int, str]:
    done = run(*arguments, **options)
    assert done.stdout in ("", "no event\n")
    return done.returncode, done.stderr


def test_what_cannot_be_read_is_one_sentence_and_exit_status_3(tmp_path):
    assert refused(tmp_path / "none") == (3, f"healthd events: {tmp_path}/none: no such file or folder\n")
    assert refused(tmp_path) == (3, f"healthd events: {tmp_path}: contains no events.jsonl\n")
    assert refused("--state-dir", tmp_path / "none", "--follow") == (
        3,
        f"healthd events: {tmp_path}/none: no such file or folder\n",
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--since", "tomorrow"), '--since must be like 2d, 2026-11-22 or 2026-11-22T13:00, got "tomorrow"'),
        (("--until", "2026-11-31"), '--until must be like 2d, 2026-11-22 or 2026-11-22T13:00, got "2026-11-31"'),
        (
            ("--since", "99999999999999d"),
            '--since must be like 2d, 2026-11-22 or 2026-11-22T13:00, got "99999999999999d"',
        ),
        (("--since", "1d", "--until", "2d"), "--since is after --until"),
        (("-", "--follow"), "standard input cannot be combined with other files or --follow"),
        (("-", "."), "standard input cannot be combined with other files or --follow"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_status_64(arguments, sentence):
    assert refused(*arguments) == (64, f"healthd events: {sentence}\n")


def test_damage_holes_and_what_is_newer_are_told_and_lose_nothing(tmp_path):
    content = lines(1, 2) + line(3)[:50] + b"\n\xff\n" + lines(5, 5) + lines(9, 9) + line(10, "melted") + b"\n"
    (tmp_path / "events.jsonl").write_bytes(content)
    done = run(tmp_path, "--json")
    assert [json.loads(one)["seq"] for one in done.stdout.splitlines()] == [1, 2, 5, 9, 10]
    assert done.returncode == 1
    assert done.stderr == (
        "healthd events: written by a newer healthd, shown unchanged: event melted (1)\n"
        f"healthd events: {tmp_path}/events.jsonl line 3 is truncated or damaged: it is not JSON; 1 more such lines\n"
        f"healthd events: n1: lines 3 to 4 are missing in stream {'a' * 16}\n"
        f"healthd events: n1: lines 6 to 8 are missing in stream {'a' * 16}\n"
    )


def test_a_torn_line_that_was_written_again_is_a_note(tmp_path):
    torn = tmp_path / "events.jsonl.1"
    torn.write_bytes(lines(1, 2) + line(3)[:50] + b"\n")
    (tmp_path / "events.jsonl").write_bytes(lines(3, 4))
    done = run(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (
        0,
        f"healthd events: {torn} line 3 is truncated or damaged: it is not JSON; no event is missing\n",
    )
    (tmp_path / "events.jsonl").unlink()  # no other file has that line
    done = run(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (
        1,
        f"healthd events: {torn} line 3 is truncated or damaged: it is not JSON\n",
    )


@pytest.mark.parametrize(
    ("since", "until", "status", "sentences"),
    [
        (None, None, 1, ["line 4 is truncated", "lines 4 to 5 are", "line 8 is"]),
        ("12:00:02", "12:00:03", 1, ["line 4 is truncated", "lines 4 to 5 are"]),
        ("12:00:04", "12:00:05", 1, ["line 4 is truncated", "lines 4 to 5 are"]),  # or of that time
        ("12:00:06", "12:00:06", 1, ["line 4 is truncated", "lines 4 to 5 are"]),
        ("12:00:07", "12:00:07", 1, ["line 8 is"]),
        ("12:00:08", None, 1, ["line 8 is"]),
        ("12:00:10", None, 0, []),
        (None, "12:00:02", 0, []),
    ],
)
def test_only_what_is_wrong_at_the_time_that_is_asked_for_is_told(tmp_path, since, until, status, sentences):
    content = lines(1, 3) + line(4)[:50] + b"\n" + lines(6, 7) + lines(9, 11)
    (tmp_path / "events.jsonl").write_bytes(content)
    asked = [("--since", since), ("--until", until)]
    done = run(tmp_path, "--json", *(word for flag, at in asked if at for word in (flag, f"2025-11-22T{at}Z")))
    assert done.returncode == status
    said = done.stderr.splitlines()
    assert len(said) == len(sentences)
    assert all(sentence in row for sentence, row in zip(sentences, said, strict=True))


# --- following, and a reader that ends


@contextmanager
def following(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv(*arguments, "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_what_is_written_is_followed_through_a_rotation_until_ctrl_c(folder):
    with following(folder, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert [json.loads(process.stdout.readline())["seq"] for _ in range(4)] == [1, 2, 3, 4]
        with open(folder / "events.jsonl", "ab") as file:
            file.write(lines(5, 5))
        (folder / "events.jsonl").rename(folder / "events.jsonl.1")
        (folder / "events.jsonl").write_bytes(lines(6, 7))
        assert [json.loads(process.stdout.readline())["seq"] for _ in range(3)] == [5, 6, 7]
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 130
        assert process.stderr.read() == ""


def test_a_folder_that_has_no_stream_yet_is_waited_for(tmp_path):
    with following(tmp_path, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == f"healthd events: {tmp_path}: contains no events.jsonl\n"
        (tmp_path / "n1").mkdir()
        (tmp_path / "n1/events.jsonl").write_bytes(lines(1, 2))
        assert [json.loads(process.stdout.readline())["seq"] for _ in range(2)] == [1, 2]


def test_what_cannot_be_read_is_said_while_it_is_followed(folder):
    with following(folder, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        (folder / "events.jsonl.2").symlink_to("/dev/zero")
        assert (
            process.stderr.readline() == f"healthd events: {folder}/events.jsonl.2: cannot be read: a symbolic link\n"
        )


def test_following_until_a_time_ends_at_that_time(folder):
    done = run(folder, "--follow", "--json", "--until", "2025-11-22T13:00")
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(one)["seq"] for one in done.stdout.splitlines()] == [1, 2]


def test_what_is_sorted_needs_a_place_to_be_kept(tmp_path):
    for number in range(60):
        (tmp_path / f"n{number}").mkdir()
        (tmp_path / f"n{number}/events.jsonl").write_bytes(lines(1, 2, node=f"n{number}"))

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    def tiny() -> None:
        few()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    done = run(tmp_path, "--json", preexec_fn=few)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 120)
    done = run(tmp_path, preexec_fn=tiny)
    assert (done.returncode, done.stderr) == (
        3,
        "healthd events: cannot write temporary files in TMPDIR: File too large\n",
    )


def test_following_ends_quietly_when_nobody_reads_any_more(folder):
    with following(folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(240) == 0
        assert process.stderr.read() == ""


def test_who_stops_reading_gets_no_complaint(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(lines(1, 5000))
    command = f"{' '.join(argv(tmp_path))} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, env=ENV, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1


def test_the_rows_of_a_file_come_before_it_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "events")
    with subprocess.Popen(argv(tmp_path / "events", "--json"), stdout=subprocess.PIPE, env=ENV) as process:
        assert process.stdout is not None
        with open(tmp_path / "events", "wb", buffering=0) as fifo:
            fifo.write(lines(1, 2))
            assert json.loads(process.stdout.readline())["seq"] == 1
            fifo.write(lines(3, 3))
        assert re.findall(rb'"seq":(\d+)', process.stdout.read()) == [b"2", b"3"]
        assert process.wait(240) == 0
