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


def run_events(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"env": ENV, **options}
    result = subprocess.run(argv(*arguments), capture_output=True, text=True, timeout=240, **options)
    assert "Traceback" not in result.stderr, result.stderr
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the state directory of a node with a day of events; the first hour is in a rotated file."""
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    rotated = line(1, "started", version="0.1.0", mode="act", last_alive=None, clean=True) + b"\n"
    (state_dir / "events.jsonl.1.gz").write_bytes(
        gzip.compress(rotated + line(2, "opened", at=NOON + 3600, **XID) + b"\n")
    )
    current = line(3, "drain", at=NOON + 3601, stage="sent", reason="healthd: gpu_xid/79") + b"\n"
    current += line(4, "cleared", at=NOON + 86400, **XID, cleared_by="reboot") + b"\n"
    (state_dir / "events.jsonl").write_bytes(current)
    return state_dir


# --- rows


def test_rows_join_check_events_of_start_unless_followed():
    configuration = {"version": "1.0", "settings": "aa", "since": "2025-11-22T12:00:00.000Z"}
    enabled = [
        line(seq, "check_enabled", check=name, instance=instance, **configuration)
        for seq, name, instance in ((1, "cpu", ""), (2, "mount", "/data"))
    ]
    changed = [line(3, "check_changed", check="cpu", instance="", **configuration), line(4, "stopped", why="told")]
    stream_events = [event for event in map(parse, enabled + changed) if isinstance(event, StreamEvent)]
    page = Page(200, colour=False, fold=True)

    def without_times(row: str) -> str:
        """Return the row without its times, which are local times."""
        return " ".join(re.sub(r"\d{4}-\d\d-\d\d [\d:]{8}", "THEN", row).split()[1:])

    assert [without_times(row) for row in list(rows(stream_events, page))[1:]] == [
        "check_enabled 2 checks (version 1.0, configured since THEN): cpu, mount /data",
        "check_changed cpu (version 1.0, configured since THEN)",
        "stopped told",
    ]
    followed_rows = rows((event for event in stream_events[:1]), page, at_once=True)
    assert [without_times(next(followed_rows)), without_times(next(followed_rows))][
        1
    ] == "check_enabled cpu (version 1.0, configured since THEN)"


def test_prints_one_row_per_event(folder):
    result = run_events(folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["2025-11-22", "Saturday,"],
        ["12:00:00", "started"],
        ["13:00:00", "opened"],
        ["13:00:01", "drain"],
        [],
        ["2025-11-23", "Sunday,"],
        ["12:00:00", "cleared"],
    ]


def test_prints_local_times(folder):
    result = run_events(folder, env={**ENV, "TZ": "Europe/Berlin"})
    assert re.match(r"2025-11-22 Saturday, .*CET\n13:00:00  started ", result.stdout)


def test_folder_of_nodes_is_merged_by_time(tmp_path):
    for name, offset in (("gpu-1", 0), ("gpu-12345", 1)):
        (tmp_path / name).mkdir()
        content = b"".join(
            line(seq, "stopped", at=NOON + 2 * seq + offset, node=name, why="x") + b"\n" for seq in (1, 2)
        )
        (tmp_path / name / "events.jsonl").write_bytes(content)
    found = [row.split() for row in run_events(tmp_path).stdout.splitlines()[1:]]
    assert [(time, node) for time, node, *_ in found] == [
        *(("12:00:02", "gpu-1"), ("12:00:03", "gpu-12345"), ("12:00:04", "gpu-1"), ("12:00:05", "gpu-12345")),
    ]


ALL_FIELDS = [*sorted({name for says in EVENTS.values() for name in (*says.required, *says.optional)}), "stage"]
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
    st.lists(st.tuples(st.sampled_from([*EVENTS, "melted"]), st.dictionaries(st.sampled_from(ALL_FIELDS), ODD))),
    st.sampled_from([80, 100, 30]),
    st.booleans(),
    st.booleans(),
)
def test_rows_of_any_fields_are_printable_and_fit(events, width, nodes, at_once):
    parsed = [parse(line(seq, event, **fields)) for seq, (event, fields) in enumerate(events)]
    stream_events = [item for item in parsed if isinstance(item, StreamEvent)]
    text = "".join(rows(stream_events, Page(width, colour=False, fold=True), nodes, at_once))
    assert text.replace("\n", "").isprintable()
    assert len(text.splitlines()) >= (len(stream_events) if at_once else bool(stream_events))
    if width == 80:
        assert all(len(row) <= 80 for row in text.splitlines())


def test_row_is_folded_and_coloured_on_terminal():
    event = parse(line(1, "opened", **{**XID, "message": "x " * 60}))
    assert isinstance(event, StreamEvent)
    _, first, *rest = "".join(rows([event], Page(80, colour=True, fold=True))).splitlines()
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
def test_options_select_by_time_and_code(folder, arguments, expected):
    result = run_events(folder, "--json", *arguments, env={**ENV, "TZ": "UTC"})
    assert [json.loads(row)["seq"] for row in result.stdout.splitlines()] == expected
    assert result.returncode == 0


def test_since_duration_counts_from_now(tmp_path):
    now = time.time()
    (tmp_path / "events.jsonl").write_bytes(line(1, at=now - 7200) + b"\n" + line(2, at=now - 600) + b"\n")
    assert [json.loads(row)["seq"] for row in run_events(tmp_path, "--json", "--since", "1h").stdout.splitlines()] == [
        2
    ]


def test_empty_selection_prints_no_event(folder):
    for result in (run_events(folder, "--since", "1s"), run_events("-", stdin=subprocess.DEVNULL)):
        assert (result.returncode, result.stdout, result.stderr) == (0, "no events\n", "")


def test_json_prints_lines_unchanged(folder):
    plain = gzip.decompress((folder / "events.jsonl.1.gz").read_bytes()) + (folder / "events.jsonl").read_bytes()
    assert run_events(folder, "--json").stdout.encode() == plain


def test_json_escapes_control_characters(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(line(1, "stopped", why="\x9b2J ü") + b"\n")
    result = run_events(tmp_path, "--json", env={**ENV, "LC_ALL": "C"})
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["why"] == "\x9b2J ü"


def test_reads_standard_input(folder):
    result = run_events("-", "--json", input=lines(1, 3).decode())
    assert result.stdout.encode() == lines(1, 3)


def test_settings_name_state_directory(folder, tmp_path):
    file = tmp_path / "healthd.toml"
    file.write_text(f'state_dir = "{folder}"\n[checks.no_such]\n')
    assert run_events("--config", file, "--json").stdout == run_events("--state-dir", folder, "--json").stdout != ""


# --- errors


def run_without_events(*arguments: object, **options: Any) -> tuple[int, str]:
    result = run_events(*arguments, **options)
    assert result.stdout in ("", "no events\n")
    return result.returncode, result.stderr


def test_unreadable_source_is_one_sentence_and_exits_3(tmp_path):
    for arguments, path in (
        ((tmp_path / "none",), tmp_path / "none"),
        ((tmp_path,), tmp_path),
        (("--state-dir", tmp_path / "none", "--follow"), tmp_path / "none"),
    ):
        status, error = run_without_events(*arguments)
        assert status == 3
        assert re.fullmatch(f"healthd events: {path}: .*\n", error)


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
def test_wrong_use_is_one_sentence_and_exits_64(arguments, sentence):
    assert run_without_events(*arguments) == (64, f"healthd events: {sentence}\n")


def test_reports_damage_gaps_and_newer_events_and_prints_rest(tmp_path):
    content = lines(1, 2) + line(3)[:50] + b"\n\xff\n" + lines(5, 5) + lines(9, 9) + line(10, "melted") + b"\n"
    (tmp_path / "events.jsonl").write_bytes(content)
    result = run_events(tmp_path, "--json")
    assert [json.loads(row)["seq"] for row in result.stdout.splitlines()] == [1, 2, 5, 9, 10]
    assert result.returncode == 1
    newer, damaged, *missing = result.stderr.splitlines()
    assert newer.endswith(": event melted (1)")
    assert f"{tmp_path}/events.jsonl line 3 " in damaged
    assert "; 1 more " in damaged
    assert [re.findall(r"\w+: lines (\d) to (\d) .* (a{16})$", message) for message in missing] == [
        [("3", "4", "a" * 16)],
        [("6", "8", "a" * 16)],
    ]


def test_rewritten_torn_line_is_only_noted(tmp_path):
    torn = tmp_path / "events.jsonl.1"
    torn.write_bytes(lines(1, 2) + line(3)[:50] + b"\n")
    (tmp_path / "events.jsonl").write_bytes(lines(3, 4))
    result = run_events(tmp_path, "--json")
    assert result.returncode == 0
    assert re.fullmatch(f"healthd events: {torn} line 3 .*\n", result.stderr)
    (tmp_path / "events.jsonl").unlink()  # no other file has that line
    result = run_events(tmp_path, "--json")
    assert result.returncode == 1
    assert re.fullmatch(f"healthd events: {torn} line 3 .*\n", result.stderr)


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
def test_reports_only_damage_within_selected_time(tmp_path, since, until, status, sentences):
    content = lines(1, 3) + line(4)[:50] + b"\n" + lines(6, 7) + lines(9, 11)
    (tmp_path / "events.jsonl").write_bytes(content)
    limits = [("--since", since), ("--until", until)]
    result = run_events(
        tmp_path,
        "--json",
        *(word for flag, time_of_day in limits if time_of_day for word in (flag, f"2025-11-22T{time_of_day}Z")),
    )
    assert result.returncode == status
    messages = result.stderr.splitlines()
    assert len(messages) == len(sentences)
    assert all(sentence in row for sentence, row in zip(sentences, messages, strict=True))


# --- following, and a reader that ends


@contextmanager
def follow(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv(*arguments, "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_follow_continues_through_rotation_until_ctrl_c(folder):
    with follow(folder, "--json") as process:
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


def test_follow_waits_for_stream_in_empty_folder(tmp_path):
    with follow(tmp_path, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline().startswith(f"healthd events: {tmp_path}: ")
        (tmp_path / "n1").mkdir()
        (tmp_path / "n1/events.jsonl").write_bytes(lines(1, 2))
        assert [json.loads(process.stdout.readline())["seq"] for _ in range(2)] == [1, 2]


def test_follow_reports_unreadable_file(folder):
    with follow(folder, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        (folder / "events.jsonl.2").symlink_to("/dev/zero")
        assert process.stderr.readline().startswith(f"healthd events: {folder}/events.jsonl.2: ")


def test_follow_ends_at_until(folder):
    result = run_events(folder, "--follow", "--json", "--until", "2025-11-22T13:00")
    assert (result.returncode, result.stderr) == (0, "")
    assert [json.loads(row)["seq"] for row in result.stdout.splitlines()] == [1, 2]


def test_sorting_many_files_needs_writable_temporary_directory(tmp_path):
    for number in range(60):
        (tmp_path / f"n{number}").mkdir()
        (tmp_path / f"n{number}/events.jsonl").write_bytes(lines(1, 2, node=f"n{number}"))

    def limit_open_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    def limit_files_and_size() -> None:
        limit_open_files()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    result = run_events(tmp_path, "--json", preexec_fn=limit_open_files)
    assert (result.returncode, result.stderr, len(result.stdout.splitlines())) == (0, "", 120)
    result = run_events(tmp_path, preexec_fn=limit_files_and_size)
    assert result.returncode == 3
    assert re.fullmatch(r"healthd events: .* TMPDIR: File too large\n", result.stderr)


def test_follow_ends_quietly_when_reader_closes(folder):
    with follow(folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(240) == 0
        assert process.stderr.read() == ""


def test_ends_quietly_when_reader_closes(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(lines(1, 5000))
    command = f"{' '.join(argv(tmp_path))} | head -n 1"
    result = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, env=ENV, timeout=240
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.count(b"\n") == 1


def test_prints_rows_before_end_of_input(tmp_path):
    os.mkfifo(tmp_path / "events")
    with subprocess.Popen(argv(tmp_path / "events", "--json"), stdout=subprocess.PIPE, env=ENV) as process:
        assert process.stdout is not None
        with open(tmp_path / "events", "wb", buffering=0) as fifo:
            fifo.write(lines(1, 2))
            assert json.loads(process.stdout.readline())["seq"] == 1
            fifo.write(lines(3, 3))
        assert re.findall(rb'"seq":(\d+)', process.stdout.read()) == [b"2", b"3"]
        assert process.wait(240) == 0
