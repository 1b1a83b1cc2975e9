"""Tests of an ingest: its sources, steps that a rerun continues after, and unread rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from fleet_rows import DECEMBER, NOVEMBER, content, made, ticket

from healthd.fleet import ingest as ingests
from healthd.fleet.ingest import MAX_EXAMPLES, IngestError, IngestOptions, IngestResult, Run, Source, Unread, ingest
from healthd.fleet.manifest import StoreError
from healthd.fleet.store import open_for_writing
from healthd.fleet.times import TimeError

pytestmark = pytest.mark.one_python

NOW = DECEMBER
ASKED = IngestOptions(NOW, cluster="c1")


def source(read: Callable[[Run, list[str]], None], name: str = "tickets") -> Source:
    return Source(name, f"--{name}", "FILE", "", read)


def each(run: Run, files: list[str]) -> None:
    """Read a ticket from each "file" in its own step, and store a cursor for it."""
    for name in files:
        if run.cursor(name) is None:
            with run.step(name, NOVEMBER, NOVEMBER + 9) as step:
                if name.startswith("bad"):
                    run.unread(name, 7, "no time")
                else:
                    run.read(step.stage("tickets", [ticket(name)]))
                step.cursor(name, "read")


def ingested(folder: Path, *files: str, asked: IngestOptions = ASKED) -> IngestResult:
    return ingest(str(folder), [(source(each), list(files))], asked)


def test_rows_come_with_what_was_read(tmp_path):
    came = ingested(tmp_path / "db", "a", "bad", "b")
    assert (came.unread.rows["tickets"], came.unread.unread["tickets"], came.failed) == (3, 1, [])
    assert content(tmp_path / "db") == {
        "tickets": [ticket("a"), ticket("b")],
        "ingests": [
            ("c1", "tickets", "a", NOVEMBER, NOVEMBER + 9, NOW, 1, 0),
            ("c1", "tickets", "b", NOVEMBER, NOVEMBER + 9, NOW, 1, 0),
            ("c1", "tickets", "bad", NOVEMBER, NOVEMBER + 9, NOW, 0, 1),
        ],
    }


def test_a_rerun_reads_only_what_is_new(tmp_path):
    ingested(tmp_path / "db", "a", "b")
    manifest = (tmp_path / "db/manifest.json").read_text()
    came = ingested(tmp_path / "db", "a", "b")
    assert (came.sources, came.unread.rows["tickets"]) == (["tickets"], 0)
    assert (tmp_path / "db/manifest.json").read_text() == manifest
    assert ingested(tmp_path / "db", "a", "b", "c").unread.rows["tickets"] == 1


def test_sources_do_not_see_each_others_cursors(tmp_path):
    ingested(tmp_path / "db", "a")
    came = ingest(str(tmp_path / "db"), [(source(each, "other"), ["a"])], ASKED)
    assert came.unread.rows["other"] == 1


def fails(error: BaseException) -> Source:
    def read(run: Run, files: list[str]) -> None:
        each(run, ["before"])
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
def test_a_source_that_fails_does_not_keep_the_others_from_the_store(tmp_path, error, sentence):
    came = ingest(str(tmp_path / "db"), [(fails(error), []), (source(each), ["a"])], ASKED)
    assert came.failed == [sentence]
    assert came.sources == ["failing", "tickets"]  # the failing source had read a ticket
    assert content(tmp_path / "db")["tickets"] == [ticket("a"), ticket("before")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("db: is full"), ZeroDivisionError()])
def test_what_ends_an_ingest_leaves_what_was_committed(tmp_path, error):
    with pytest.raises(type(error)):
        ingest(str(tmp_path / "db"), [(fails(error), []), (source(each), ["a"])], ASKED)
    assert content(tmp_path / "db")["tickets"] == [ticket("before")]
    ingested(tmp_path / "db", "a")
    assert content(tmp_path / "db")["tickets"] == [ticket("a"), ticket("before")]


def test_a_source_of_which_nothing_was_read_has_no_news(tmp_path):
    def read(run: Run, _files: list[str]) -> None:
        raise IngestError("no answer")

    came = ingest(str(tmp_path / "db"), [(source(read, "failing"), []), (source(each), [])], ASKED)
    assert (came.sources, came.failed) == (["tickets"], ["failing: no answer"])


# --- users and keys


def users_of(folder: Path, asked: IngestOptions) -> str | None:
    found: list[str | None] = []

    def read(run: Run, _files: list[str]) -> None:
        found.append(run.privacy.user("alice"))

    ingest(str(folder), [(source(read), [])], asked)
    return found[0]


def test_a_store_hashes_users_unless_said_otherwise_and_goes_on_so(tmp_path):
    first = users_of(tmp_path / "db", ASKED)
    assert (len(str(first)), first) == (32, users_of(tmp_path / "db", ASKED))
    assert (
        users_of(tmp_path / "kept", IngestOptions(NOW, users="keep")) == users_of(tmp_path / "kept", ASKED) == "alice"
    )
    assert users_of(tmp_path / "dropped", IngestOptions(NOW, users="drop")) is None


def test_users_are_not_kept_in_two_ways_in_one_store(tmp_path):
    users_of(tmp_path / "db", IngestOptions(NOW, users="drop"))
    with pytest.raises(StoreError, match="was made with --users drop: --users keep needs a new store"):
        users_of(tmp_path / "db", IngestOptions(NOW, users="keep"))


def test_a_store_has_hashes_of_one_key(tmp_path):
    key = tmp_path / "site.key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    key.chmod(0o600)
    asked = IngestOptions(NOW, key=str(key))
    assert users_of(tmp_path / "db", asked) == users_of(tmp_path / "other", asked)
    assert not (tmp_path / "db/key").exists()
    with pytest.raises(StoreError, match="was made with another key: --key FILE names it"):
        users_of(tmp_path / "db", ASKED)


def test_the_key_is_in_no_other_file_of_the_store(tmp_path):
    users_of(tmp_path / "db", ASKED)
    key = (tmp_path / "db/key").read_bytes().strip()
    others = [path for path in (tmp_path / "db").rglob("*") if path.is_file() and path.name != "key"]
    assert others
    assert [path for path in others if key in path.read_bytes()] == []


# --- options and messages


def told(folder: Path, asked: IngestOptions) -> Run:
    found: list[Run] = []
    ingest(str(folder), [(source(lambda run, _files: found.append(run)), [])], asked)
    return found[0]


def test_a_source_is_told_what_was_asked(tmp_path):
    run = told(tmp_path / "db", IngestOptions(NOW, "c1", ZoneInfo("Europe/Berlin"), NOVEMBER, DECEMBER))
    assert (run.cluster, str(run.zone), run.from_time, run.to_time, run.now) == (
        *("c1", "Europe/Berlin", NOVEMBER),
        *(DECEMBER, NOW),
    )


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(tmp_path, monkeypatch):
    with open_for_writing(str(made(tmp_path / "db"))) as store:
        said: list[str] = []
        run = told(tmp_path / "other", ASKED)
        run = Run(run.source, store, run.privacy, run.rows, NOW, log=said.append)
        assert list(run.track(["a", "b", "c"])) == ["a", "b", "c"]
        assert said == []
        monkeypatch.setattr(ingests, "PROGRESS_SECONDS", 0.0)
        assert list(run.track(iter("ab"), unit="days")) == ["a", "b"]
        assert list(run.track(["a"])) == ["a"]
    assert said == ["tickets: 0 days", "tickets: 1 days", "tickets: 0 of 1 files"]


def test_a_row_is_shown_with_file_and_line():
    rows = Unread()
    rows.read("tickets", 1999)
    rows.add("tickets", "t.csv", 17, "closed before it was opened")
    assert list(rows.messages()) == [
        "tickets: t.csv:17: closed before it was opened",
        "tickets: 1 of 2,000 rows could not be read (less than 0.1 %)",
    ]


def test_what_has_no_lines_is_shown_without():
    rows = Unread()
    rows.add("prometheus", "http://vm:8428", 0, "no number: x")
    assert next(rows.messages()) == "prometheus: http://vm:8428: no number: x"


def test_the_first_rows_are_shown_and_the_others_counted():
    rows = Unread()
    for line in range(1, MAX_EXAMPLES + 3):
        rows.add("sacct", "a.txt", line, "cut")
    told = list(rows.messages())
    assert told[MAX_EXAMPLES - 1 :] == [
        f"sacct: a.txt:{MAX_EXAMPLES}: cut",
        "... and 2 more",
        f"sacct: {MAX_EXAMPLES + 2} of {MAX_EXAMPLES + 2} rows could not be read (100.0 %)",
    ]


def test_one_in_a_hundred_is_not_too_many_and_more_is():
    rows = Unread()
    rows.read("sacct", 99)
    rows.add("sacct", "a.txt", 1, "cut")
    assert not rows.is_over_limit()
    rows.add("sacct", "a.txt", 2, "cut")
    assert rows.is_over_limit()


def test_a_small_source_is_not_hidden_behind_a_large_one():
    rows = Unread()
    rows.read("sacct", 1_000_000)
    rows.read("tickets", 10)
    rows.add("tickets", "t.csv", 3, "no node is named")
    assert rows.is_over_limit()


def test_nothing_read_is_not_too_many():
    assert not Unread().is_over_limit()
    assert list(Unread().messages()) == []


def test_what_others_wrote_is_shown_printable_and_short():
    rows = Unread()
    rows.add("tickets", "a\x1b]0;x", 1, "no time: \x1b[2J" + "x" * 10_000)
    shown = next(rows.messages())
    assert shown.isprintable()
    assert len(shown) < 300
