"""Tests of an ingest: its sources, steps that a rerun continues after, and unread rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from fleet_rows import DECEMBER, NOVEMBER, content, store_with, ticket

from healthd.fleet import ingest as ingests
from healthd.fleet.ingest import MAX_EXAMPLES, IngestError, IngestOptions, IngestResult, Run, Source, Unread, ingest
from healthd.fleet.manifest import StoreError
from healthd.fleet.store import open_for_writing
from healthd.fleet.times import TimeError

pytestmark = pytest.mark.one_python

NOW = DECEMBER
OPTIONS = IngestOptions(NOW, cluster="c1")


def source(read: Callable[[Run, list[str]], None], name: str = "tickets") -> Source:
    return Source(name, f"--{name}", "FILE", "", read)


def read_each(run: Run, files: list[str]) -> None:
    """Read a ticket from each "file" in its own step, and store a cursor for it."""
    for name in files:
        if run.cursor(name) is None:
            with run.step(name, NOVEMBER, NOVEMBER + 9) as step:
                if name.startswith("bad"):
                    run.unread(name, 7, "no time")
                else:
                    run.read(step.stage("tickets", [ticket(name)]))
                step.cursor(name, "read")


def run_ingest(folder: Path, *files: str, options: IngestOptions = OPTIONS) -> IngestResult:
    return ingest(str(folder), [(source(read_each), list(files))], options)


def test_ingest_stores_rows_and_record_of_files(tmp_path):
    result = run_ingest(tmp_path / "db", "a", "bad", "b")
    assert (result.unread.rows["tickets"], result.unread.unread["tickets"], result.failed) == (3, 1, [])
    assert content(tmp_path / "db") == {
        "tickets": [ticket("a"), ticket("b")],
        "ingests": [
            ("c1", "tickets", "a", NOVEMBER, NOVEMBER + 9, NOW, 1, 0),
            ("c1", "tickets", "b", NOVEMBER, NOVEMBER + 9, NOW, 1, 0),
            ("c1", "tickets", "bad", NOVEMBER, NOVEMBER + 9, NOW, 0, 1),
        ],
    }


def test_rerun_reads_only_new_files(tmp_path):
    run_ingest(tmp_path / "db", "a", "b")
    manifest = (tmp_path / "db/manifest.json").read_text()
    result = run_ingest(tmp_path / "db", "a", "b")
    assert (result.sources, result.unread.rows["tickets"]) == (["tickets"], 0)
    assert (tmp_path / "db/manifest.json").read_text() == manifest
    assert run_ingest(tmp_path / "db", "a", "b", "c").unread.rows["tickets"] == 1


def test_sources_have_separate_cursors(tmp_path):
    run_ingest(tmp_path / "db", "a")
    result = ingest(str(tmp_path / "db"), [(source(read_each, "other"), ["a"])], OPTIONS)
    assert result.unread.rows["other"] == 1


def failing_source(error: BaseException) -> Source:
    def read(run: Run, files: list[str]) -> None:
        read_each(run, ["before"])
        with run.step("half") as step:
            step.stage("tickets", [ticket("half")])
            raise error

    return source(read, "failing")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (IngestError("t.csv: has no column node"), "failing: t.csv: has no column node"),
        (TimeError("unknown time zone 'x'"), "failing: unknown time zone 'x'"),
        (FileNotFoundError(2, "No such file or directory", "t.csv"), "failing: t.csv: No such file or directory"),
    ],
)
def test_failing_source_does_not_stop_other_sources(tmp_path, error, sentence):
    result = ingest(str(tmp_path / "db"), [(failing_source(error), []), (source(read_each), ["a"])], OPTIONS)
    assert result.failed == [sentence]
    assert result.sources == ["failing", "tickets"]  # the failing source had read a ticket
    assert content(tmp_path / "db")["tickets"] == [ticket("a"), ticket("before")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("db: is full"), ZeroDivisionError()])
def test_aborted_ingest_keeps_committed_steps(tmp_path, error):
    with pytest.raises(type(error)):
        ingest(str(tmp_path / "db"), [(failing_source(error), []), (source(read_each), ["a"])], OPTIONS)
    assert content(tmp_path / "db")["tickets"] == [ticket("before")]
    run_ingest(tmp_path / "db", "a")
    assert content(tmp_path / "db")["tickets"] == [ticket("a"), ticket("before")]


def test_source_without_data_is_not_listed(tmp_path):
    def read(run: Run, _files: list[str]) -> None:
        raise IngestError("no answer")

    result = ingest(str(tmp_path / "db"), [(source(read, "failing"), []), (source(read_each), [])], OPTIONS)
    assert (result.sources, result.failed) == (["tickets"], ["failing: no answer"])


# --- users and keys


def user_value(folder: Path, options: IngestOptions) -> str | None:
    found: list[str | None] = []

    def read(run: Run, _files: list[str]) -> None:
        found.append(run.privacy.user("alice"))

    ingest(str(folder), [(source(read), [])], options)
    return found[0]


def test_store_hashes_users_by_default_and_keeps_its_choice(tmp_path):
    first = user_value(tmp_path / "db", OPTIONS)
    assert (len(str(first)), first) == (32, user_value(tmp_path / "db", OPTIONS))
    assert (
        user_value(tmp_path / "kept", IngestOptions(NOW, users="keep"))
        == user_value(tmp_path / "kept", OPTIONS)
        == "alice"
    )
    assert user_value(tmp_path / "dropped", IngestOptions(NOW, users="drop")) is None


def test_store_rejects_second_way_to_keep_users(tmp_path):
    user_value(tmp_path / "db", IngestOptions(NOW, users="drop"))
    with pytest.raises(StoreError, match="was created with --users drop; --users keep needs a new store"):
        user_value(tmp_path / "db", IngestOptions(NOW, users="keep"))


def test_store_rejects_other_key(tmp_path):
    key = tmp_path / "site.key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    key.chmod(0o600)
    options = IngestOptions(NOW, key=str(key))
    assert user_value(tmp_path / "db", options) == user_value(tmp_path / "other", options)
    assert not (tmp_path / "db/key").exists()
    with pytest.raises(StoreError, match="was created with another key; name it with --key FILE"):
        user_value(tmp_path / "db", OPTIONS)


def test_key_is_in_no_other_file_of_store(tmp_path):
    user_value(tmp_path / "db", OPTIONS)
    key = (tmp_path / "db/key").read_bytes().strip()
    others = [path for path in (tmp_path / "db").rglob("*") if path.is_file() and path.name != "key"]
    assert others
    assert [path for path in others if key in path.read_bytes()] == []


# --- options and messages


def run_of_ingest(folder: Path, options: IngestOptions) -> Run:
    found: list[Run] = []
    ingest(str(folder), [(source(lambda run, _files: found.append(run)), [])], options)
    return found[0]


def test_run_has_options(tmp_path):
    run = run_of_ingest(tmp_path / "db", IngestOptions(NOW, "c1", ZoneInfo("Europe/Berlin"), NOVEMBER, DECEMBER))
    assert (run.cluster, str(run.zone), run.from_time, run.to_time, run.now) == (
        *("c1", "Europe/Berlin", NOVEMBER),
        *(DECEMBER, NOW),
    )


def test_track_logs_progress_without_terminal(tmp_path, monkeypatch):
    with open_for_writing(str(store_with(tmp_path / "db"))) as store:
        lines: list[str] = []
        run = run_of_ingest(tmp_path / "other", OPTIONS)
        run = Run(run.source, store, run.privacy, run.rows, NOW, log=lines.append)
        assert list(run.track(["a", "b", "c"])) == ["a", "b", "c"]
        assert lines == []
        monkeypatch.setattr(ingests, "PROGRESS_SECONDS", 0.0)
        assert list(run.track(iter("ab"), unit="days")) == ["a", "b"]
        assert list(run.track(["a"])) == ["a"]
    assert lines == ["tickets: 0 days", "tickets: 1 days", "tickets: 0 of 1 files"]


def test_unread_row_is_shown_with_file_and_line():
    rows = Unread()
    rows.read("tickets", 1999)
    rows.add("tickets", "t.csv", 17, "closed before it was opened")
    row, total = rows.messages()
    assert row.startswith("tickets: t.csv:17: closed before ")
    assert re.fullmatch(r"tickets: 1 of 2,000 rows .*\(less than 0\.1 %\)", total)


def test_unread_row_without_line_is_shown_without():
    rows = Unread()
    rows.add("prometheus", "http://vm:8428", 0, "no number: x")
    assert next(rows.messages()) == "prometheus: http://vm:8428: no number: x"


def test_first_unread_rows_are_shown_and_others_counted():
    rows = Unread()
    for line in range(1, MAX_EXAMPLES + 3):
        rows.add("sacct", "a.txt", line, "cut")
    messages = list(rows.messages())
    assert messages[MAX_EXAMPLES - 1 : -1] == [f"sacct: a.txt:{MAX_EXAMPLES}: cut", "... and 2 more"]
    assert messages[-1].startswith(f"sacct: {MAX_EXAMPLES + 2} of {MAX_EXAMPLES + 2} rows ")
    assert messages[-1].endswith(" (100.0 %)")


def test_unread_limit_is_one_percent():
    rows = Unread()
    rows.read("sacct", 99)
    rows.add("sacct", "a.txt", 1, "cut")
    assert not rows.is_over_limit()
    rows.add("sacct", "a.txt", 2, "cut")
    assert rows.is_over_limit()


def test_unread_limit_applies_to_each_source():
    rows = Unread()
    rows.read("sacct", 1_000_000)
    rows.read("tickets", 10)
    rows.add("tickets", "t.csv", 3, "no node is named")
    assert rows.is_over_limit()


def test_unread_limit_passes_without_rows():
    assert not Unread().is_over_limit()
    assert list(Unread().messages()) == []


def test_unread_message_is_printable_and_short():
    rows = Unread()
    rows.add("tickets", "a\x1b]0;x", 1, "no time: \x1b[2J" + "x" * 10_000)
    message = next(rows.messages())
    assert message.isprintable()
    assert len(message) < 300
