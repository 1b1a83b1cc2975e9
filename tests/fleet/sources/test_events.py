"""Tests of reading event streams of nodes into the store."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from event_lines import NOON, STREAM, line, lines
from fleet_reading import store_rows

from healthd.events import cursor_text
from healthd.events.parse import StreamEvent, parse
from healthd.events.reader import Cursor, Tally, read
from healthd.fleet.ingest import IngestOptions, IngestResult, ingest
from healthd.fleet.prune import prune
from healthd.fleet.sources import events
from healthd.fleet.store import open_for_writing
from healthd.fleet.tables import EVENTS

pytestmark = pytest.mark.one_python

AT, DAY = int(NOON), 86400
COVERED = ("cluster", "from_time", "to_time", "rows_read", "rows_unread")
EVENTS_REST = list(EVENTS.columns).index("rest")


def row(content: bytes, cluster: str = "c1") -> dict:
    event = parse(content)
    assert isinstance(event, StreamEvent)
    return dict(zip(EVENTS.columns, events.row(event, cluster), strict=True))


def own_columns(content: bytes) -> dict:
    """Return the values that are not None, without the head of the line."""
    head = ("cluster", "node", "boot_id", "stream_id", "seq", "time", "mono", "schema_version", "event")
    return {name: value for name, value in row(content).items() if value is not None and name not in head}


CONDITION = {
    "condition": "9d1c-1763812800",
    "check": "gpu_xid",
    "instance": "",
    "code": "gpu_xid/79",
    "subject": "0000:1b:00.0",
    "severity": "critical",
    "kind": "edge",
    "first": "2025-11-22T12:00:00.101Z",
    "last": "2025-11-22T12:00:01.101Z",
    "count": 2,
    "jobs": ["4711", "12_3"],
    "message": "Xid 79: GPU has fallen off the bus",
}


def test_condition_fills_its_columns():
    assert own_columns(line(5, "opened", **CONDITION, history=True)) == {
        "condition_id": "9d1c-1763812800",
        "check_name": "gpu_xid",
        "check_instance": "",
        "code": "gpu_xid/79",
        "subject": "0000:1b:00.0",
        "severity": "critical",
        "kind": "edge",
        "first_time": AT,
        "last_time": AT + 1,
        "times": 2,
        "jobs": "4711 12_3",
        "message": "Xid 79: GPU has fallen off the bus",
        "observed": False,
        "history": True,
    }


def test_every_line_has_head_columns():
    found = row(line(5, "alive", at=NOON + 0.9))
    assert found["time"] == AT
    assert (found["cluster"], found["node"], found["boot_id"], found["stream_id"], found["seq"]) == (
        "c1",
        "n1",
        "b1",
        STREAM,
        5,
    )
    assert (found["mono"], found["schema_version"], found["event"]) == (1.5, 1, "alive")


def test_dropped_lines_are_counted_separately():
    assert own_columns(line(9, "dropped", count=4, from_seq=5, to_seq=8)) == {
        "dropped": 4,
        "rest": '{"from_seq":5,"to_seq":8}',
    }
    of_earlier_stream = own_columns(line(9, "dropped", count=0, from_seq=0, to_seq=0, earlier=4))
    assert of_earlier_stream["dropped"] == 0, "the lines are missing from an earlier stream"


def test_start_has_times_and_missing_time_is_none():
    found = own_columns(
        line(1, "started", version="0.1.0", mode="act", last_alive="2025-11-22T11:00:00.000Z", clean=False)
    )
    assert found == {"version": "0.1.0", "last_alive_time": AT - 3600, "rest": '{"mode":"act","clean":false}'}
    assert "last_alive_time" not in own_columns(line(1, "started", version="0.1.0", last_alive=None))


@pytest.mark.parametrize("fields", [{"count": "many"}, {"first": "noon"}, {"jobs": [1]}, {"code": 7}, {"count": 2**70}])
def test_field_of_wrong_type_is_kept_in_rest(fields):
    found = own_columns(line(1, "alive", **fields))
    assert found == {"rest": json.dumps(fields, separators=(",", ":"))}


@pytest.mark.parametrize("event", ["opened", "seen_again", "worsened", "acknowledged", "cleared"])
def test_missing_condition_flag_is_false(event):
    for observed, history in ((False, False), (True, False), (False, True)):
        flags = {**({"observed": True} if observed else {}), **({"history": True} if history else {})}
        assert own_columns(line(1, event, **flags)) == {"observed": observed, "history": history}


def test_invalid_flag_is_null_and_other_events_have_none():
    assert own_columns(line(1, "opened", observed="yes")) == {"history": False, "rest": '{"observed":"yes"}'}
    assert own_columns(line(1, "repaired", who="x")) == {"who": "x"}


def test_slowdown_and_onset_are_columns():
    slow = {"history": False, "observed": False}
    values = own_columns(line(1, "opened", slowdown=0.26, onset="2025-11-22T12:00:00.000Z"))
    assert values == {**slow, "slowdown": 0.26, "onset_time": int(NOON)}
    assert own_columns(line(1, "opened", slowdown="much")) == {**slow, "rest": '{"slowdown":"much"}'}


def test_nvlink_domain_is_a_column():
    assert own_columns(line(1, "opened", **CONDITION, domain="rack"))["nvlink_domain"] == "rack"


def test_serial_number_is_a_column():
    assert own_columns(line(1, "opened", **CONDITION, serial="1650522003820"))["serial"] == "1650522003820"
    assert own_columns(line(1, "repaired", serial=7)) == {"rest": '{"serial":7}'}


GPUS = [
    {"subject": "0000:1b:00.0", "serial": "1650522003820", "uuid": "GPU-a", "name": "NVIDIA H100"},
    {"subject": "0000:61:00.0", "serial": "", "uuid": "GPU-b", "name": "NVIDIA H100"},
]


def test_gpus_are_rows_of_their_own_table_and_stay_after_pruning(tmp_path):
    folder, db = tmp_path / "n1", tmp_path / "db"
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(line(1, "gpus", gpus=GPUS) + b"\n" + line(2, "alive") + b"\n")
    for _ in range(2):
        ingest(str(db), [(events.SOURCE, [str(tmp_path)])], IngestOptions(now=AT + 60))
    head = {"cluster": "c1", "node": "n1", "stream_id": STREAM, "seq": 1, "time": AT}
    expected = [{**head, **gpu, "serial": gpu["serial"] or None} for gpu in GPUS]
    assert store_rows(db, "gpus") == expected
    assert json.loads(store_rows(db, "events")[0]["rest"]) == {"gpus": GPUS}
    with open_for_writing(str(db)) as store:
        prune(store, AT + DAY)
    assert (store_rows(db, "events"), store_rows(db, "gpus")) == ([], expected)


@pytest.mark.parametrize("gpus", [7, {"subject": "s"}, ["s"], [{}], [{"subject": 7}], [{"subject": ""}]])
def test_gpus_in_another_form_are_left_out(gpus):
    event = parse(line(1, "gpus", gpus=gpus))
    assert isinstance(event, StreamEvent)
    assert list(events.gpu_rows(events.row(event, "c1"), event.fields)) == []


def test_gpus_in_another_event_are_left_out():
    event = parse(line(1, "alive", gpus=GPUS))
    assert isinstance(event, StreamEvent)
    assert list(events.gpu_rows(events.row(event, "c1"), event.fields)) == []


def test_unknown_event_and_schema_are_kept_whole():
    content = line(1, "melted", degrees=900)
    assert (row(content)["event"], row(content)["rest"]) == ("melted", content.decode())
    other = json.dumps({"schema": 2, "who": "n1"}).encode()
    found = row(other)
    assert (found["cluster"], found["node"], found["schema_version"], found["rest"]) == ("c1", None, 2, other.decode())
    assert found["stream_id"] != row(json.dumps({"schema": 2, "who": "n2"}).encode())["stream_id"]


@pytest.mark.parametrize(
    ("text", "dropped", "hashed"),
    [
        ("alice (uid 1000)", None, "h(alice)"),
        ("repaired by alice (uid 1000)", "repaired by a user", "repaired by h(alice)"),
        ("an operator in Slurm", "an operator in Slurm", "an operator in Slurm"),
        ("pass", "pass", "pass"),
    ],
)
def test_people_are_stored_as_users(text, dropped, hashed):
    event = parse(line(1, "cleared", who=text, cleared_by=text))
    assert isinstance(event, StreamEvent)
    for user, expected in (
        (lambda name: name, text),
        (lambda name: None, dropped),
        (lambda name: f"h({name})", hashed),
    ):
        found = dict(zip(EVENTS.columns, events.row(event, "c1", user), strict=True))
        assert (found["who"], found["cleared_by"]) == (expected, expected)


def test_people_are_removed_from_rest_of_unknown_lines():
    for content in (
        line(1, "melted", who="alice (uid 1000)"),
        b'{"schema":2,"cleared_by":"repaired by alice (uid 7)"}',
    ):
        event = parse(content)
        assert isinstance(event, StreamEvent)
        rest = {
            name: events.row(event, "c1", user)[EVENTS_REST]
            for name, user in {"keep": str, "drop": lambda name: None, "hash": lambda name: "h1"}.items()
        }
        assert rest["keep"] == content.decode()
        assert "alice" not in rest["drop"] + rest["hash"]
        assert "h1" in rest["hash"]
        assert json.loads(rest["drop"])["schema"] == json.loads(content)["schema"]


@pytest.mark.parametrize("users", ["drop", "hash"])
def test_manifest_contains_no_name(tmp_path, users):
    node, store = tmp_path / "srv" / "n1", tmp_path / "db"
    node.mkdir(parents=True)
    content = b"".join(line(seq, "repaired", who="alice (uid 1000)") + b"\n" for seq in range(1, 9))
    (node / "events.jsonl").write_bytes(content)
    sources = [(events.SOURCE, [str(tmp_path / "srv")])]
    for rows in (8, 0):
        result = ingest(str(store), sources, IngestOptions(AT + 86400, "c1", users=users))
        assert result.unread.rows["events"] == rows
    manifest = (store / "manifest.json").read_text()
    assert "stream" in manifest
    for form in ("alice", b"alice".hex(), hashlib.blake2b(content[-64:], digest_size=16).hexdigest()):
        assert form not in manifest, "a guess of the name must need the key"


def test_old_cursor_with_bytes_is_read_again_and_replaced(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(content := lines(1, 8))
    cursor = Cursor(key=b"k")
    assert len(list(read(str(tmp_path), cursor, Tally()))) == 8
    ((name, mark),) = cursor.marks.items()
    cursor.marks[name] = mark._replace(before=content[-64:])
    tally = Tally()
    assert list(read(str(tmp_path), cursor, tally)) == []
    assert (tally.repeats, cursor.marks) == (8, {name: mark})


def test_columns_are_fields_of_schema():
    schema = json.loads((Path(__file__).parents[3] / "docs" / "events.schema.json").read_text())
    assert {*events._FIELDS, *events._HEAD_FIELDS, "count"} <= set(schema["properties"])


def test_line_without_cluster_gets_given_cluster():
    assert row(line(1, cluster=""))["cluster"] == "c1"
    assert row(line(1, cluster="c7"))["cluster"] == "c7"


def run(store: Path, *folders: Path, messages: list[str] | None = None) -> IngestResult:
    wanted = [(events.SOURCE, [str(folder) for folder in folders])]
    return ingest(str(store), wanted, IngestOptions(AT + 86400, "c1"))


def sequence_numbers(store: Path) -> list[int]:
    return sorted(row["seq"] for row in store_rows(store, "events"))


def test_rerun_reads_only_new_lines_after_rotation(tmp_path):
    node, store = tmp_path / "srv" / "n1", tmp_path / "db"
    node.mkdir(parents=True)
    file = node / "events.jsonl"
    file.write_bytes(lines(1, 20))
    assert run(store, tmp_path / "srv").unread.rows["events"] == 20
    assert run(store, tmp_path / "srv").unread.rows["events"] == 0
    os.rename(file, node / "events.jsonl.1")
    file.write_bytes(lines(19, 30))  # it begins with lines that were written before
    assert run(store, tmp_path / "srv").unread.rows["events"] == 10
    assert sequence_numbers(store) == list(range(1, 31))
    shutil.copy(node / "events.jsonl.1", node / "events.jsonl.2")
    assert run(store, tmp_path / "srv").unread.rows["events"] == 0


@pytest.mark.parametrize(("files", "read_twice"), [(25, 0), (cursor_text.MAX_MARKS + 5, 5)])
def test_cursor_remembers_limited_number_of_files(tmp_path, files, read_twice):
    text = None
    for number in range(files):
        content = lines(10 * number + 1, 10 * number + 10)
        (tmp_path / f"events.jsonl-{20240101 + number}.gz").write_bytes(gzip.compress(content))
    for read_again in (10 * files, 10 * read_twice, 10 * read_twice):
        cursor, tally = cursor_text.load_cursor(text), Tally()
        assert len(list(read(str(tmp_path), cursor, tally))) == (10 * files if text is None else 0)
        assert tally.lines == read_again
        text = cursor_text.dump_cursor(cursor)


def test_truncated_file_adds_only_new_lines(tmp_path):
    node, store = tmp_path / "n1", tmp_path / "db"
    node.mkdir()
    (node / "events.jsonl").write_bytes(lines(1, 20))
    run(store, tmp_path)
    (node / "events.jsonl").write_bytes(lines(15, 22))
    assert run(store, tmp_path).unread.rows["events"] == 2
    assert sequence_numbers(store) == list(range(1, 23))


def test_missing_lines_are_reported_once(tmp_path, capsys):
    node, store = tmp_path / "n1", tmp_path / "db"
    node.mkdir()
    (node / "events.jsonl").write_bytes(lines(1, 5))
    run(store, tmp_path)
    with open(node / "events.jsonl", "ab") as file:
        file.write(lines(9, 10))
    run(store, tmp_path)
    assert "events: 3 lines missing from the streams" in capsys.readouterr().err
    run(store, tmp_path)
    assert "missing" not in capsys.readouterr().err, "missing lines are reported once"


def test_invalid_lines_are_counted_and_unknown_events_reported(tmp_path, capsys):
    node, store = tmp_path / "n1", tmp_path / "db"
    node.mkdir()
    content = lines(1, 3) + b"{torn\n" + line(4, "melted") + b"\n" + b"\xff\n" + b"x" * (2 << 20) + b"\n" + line(5)[:40]
    (node / "events.jsonl").write_bytes(content)
    result = run(store, tmp_path)
    assert result.unread.unread["events"] == 3
    assert [entry.split("events.jsonl")[1].split(":")[1] for entry in result.unread.examples] == ["4", "6", "7"]
    assert (
        "events: 1 line of event melted that this version does not support; stored unchanged" in capsys.readouterr().err
    )
    assert sequence_numbers(store) == [1, 2, 3, 4]


def test_incomplete_stream_fails_and_others_are_read(tmp_path):
    store, srv = tmp_path / "db", tmp_path / "srv"
    for node in ("n1", "n2", "n3"):
        (srv / node).mkdir(parents=True)
        (srv / node / "events.jsonl").write_bytes(lines(1, 200, node=node, stream_id=node.rjust(16, "0")))
    whole = gzip.compress(lines(1, 50, node="n2", stream_id="c" * 16))
    (srv / "n2" / "events.jsonl.1.gz").write_bytes(whole[: len(whole) // 2])
    (srv / "n3" / "events.jsonl.1").mkdir()
    why = [
        f"events: {srv}/n2/events.jsonl.1.gz: ends in the middle of compressed data",
        f"events: {srv}/n3/events.jsonl.1: cannot be read: Is a directory",
    ]
    result = run(store, srv)
    assert result.failed == why
    assert sequence_numbers(store)[-1] == 200
    assert len(sequence_numbers(store)) >= 600
    again = run(store, srv)
    assert (again.failed, again.unread.rows["events"]) == (why, 0)


def test_torn_line_written_again_is_reported_and_no_row(tmp_path, capsys):
    node, store = tmp_path / "n1", tmp_path / "db"
    node.mkdir()
    torn = line(3)[:40] + b"\n"
    (node / "events.jsonl").write_bytes(lines(1, 2) + torn + lines(3, 4))
    assert run(store, tmp_path).unread.unread["events"] == 0
    assert "events: 1 line torn or damaged, but no event is missing\n" in capsys.readouterr().err
    (node / "events.jsonl").write_bytes(lines(5, 6) + line(7)[:40] + b"\n" + lines(8, 9))
    result = run(store, tmp_path)
    assert (result.unread.unread["events"], result.unread.is_over_limit()) == (1, True)
    assert sequence_numbers(store) == [1, 2, 3, 4, 5, 6, 8, 9]


def test_damage_outside_period_is_not_counted(tmp_path, capsys):
    node = tmp_path / "srv" / "n1"
    node.mkdir(parents=True)
    (node / "events.jsonl").write_bytes(lines(1, 2) + b"{torn\n" + lines(4, 9))
    sources = [(events.SOURCE, [str(tmp_path / "srv")])]
    for begin, unread in ((AT + 6, 0), (AT + 2, 1)):
        result = ingest(str(tmp_path / str(begin)), sources, IngestOptions(AT + 86400, "c1", from_time=begin))
        assert result.unread.unread["events"] == unread


def test_missing_folder_is_one_sentence(tmp_path):
    assert run(tmp_path / "db", tmp_path / "gone").failed == [f"events: {tmp_path}/gone: no such file or folder"]


def test_killed_ingest_keeps_finished_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "BATCH_EVENTS", 25)
    store, srv = tmp_path / "db", tmp_path / "srv"
    for number in range(5):
        (srv / f"n{number}").mkdir(parents=True)
        content = lines(1, 20, node=f"n{number}", stream_id=f"{number:016x}")
        (srv / f"n{number}" / "events.jsonl").write_bytes(content)
    real, calls = events.row, []

    def killed(event, *options):
        calls.append(event)
        if len(calls) == 70:
            raise KeyboardInterrupt
        return real(event, *options)

    monkeypatch.setattr(events, "row", killed)
    with pytest.raises(KeyboardInterrupt):
        run(store, srv)
    assert len(sequence_numbers(store)) == 40, "the first batch is kept, the second is not"
    monkeypatch.setattr(events, "row", real)
    assert run(store, srv).unread.rows["events"] == 60
    assert len(sequence_numbers(store)) == 100


def test_lines_outside_period_are_read_by_next_ingest(tmp_path):
    node, store = tmp_path / "srv" / "n1", tmp_path / "db"
    node.mkdir(parents=True)
    content = b"".join(line(seq, at=NOON + 60 * seq) + b"\n" for seq in range(1, 11))
    (node / "events.jsonl").write_bytes(content)

    def read(**times: int) -> int:
        sources = [(events.SOURCE, [str(tmp_path / "srv")])]
        return ingest(str(store), sources, IngestOptions(AT + 86400, "c1", **times)).unread.rows["events"]

    assert read(from_time=AT + 60 * 9) == 2
    assert read(from_time=AT + 60 * 9) == 0
    assert read(from_time=AT + 60 * 4, to_time=AT + 60 * 7) == 3
    assert sequence_numbers(store) == [4, 5, 6, 9, 10]
    assert read() == 5
    assert sequence_numbers(store) == list(range(1, 11))
    assert read() == 0


def test_coverage_follows_line_times_per_cluster(tmp_path):
    srv, store = tmp_path / "srv", tmp_path / "db"
    for node in ("n1", "n2", "n3"):
        (srv / node).mkdir(parents=True)
    (srv / "n1" / "events.jsonl").write_bytes(b"".join(line(seq, at=NOON + seq) + b"\n" for seq in range(1, 5)))
    clocks = (86_400.0, NOON + 60, NOON + 90, NOON + 9 * 86_400)
    of_c2 = b"".join(line(seq, cluster="c2", at=at) + b"\n" for seq, at in enumerate(clocks, 1))
    (srv / "n2" / "events.jsonl").write_bytes(of_c2 + b"{torn\n")
    (srv / "n3" / "events.jsonl").write_bytes(b"{torn\n")

    def covered() -> list[tuple]:
        rows = [tuple(row[name] for name in COVERED) for row in store_rows(store, "ingests")]
        return sorted(rows)

    run(store, srv)
    first = [("c1", AT + 1, AT + 4, 4, 0), ("c2", AT + 60, AT + 90, 4, 1)]
    assert covered() == first, "times of a wrong clock are ignored"
    run(store, srv)
    assert covered() == first, "nothing new was read"
    with open(srv / "n1" / "events.jsonl", "ab") as file:
        file.write(line(5, at=NOON + 50) + b"\n")
    run(store, srv)
    assert covered() == [first[0], ("c1", AT + 50, AT + 50, 1, 0), first[1]]


def test_each_batch_records_its_coverage(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "BATCH_EVENTS", 5)
    for number in range(3):
        (tmp_path / "srv" / f"n{number}").mkdir(parents=True)
        content = b"".join(line(seq, node=f"n{number}", at=NOON + 100 * number + seq) + b"\n" for seq in range(1, 6))
        (tmp_path / "srv" / f"n{number}" / "events.jsonl").write_bytes(content)
    run(tmp_path / "db", tmp_path / "srv")
    coverage = [
        (row["from_time"] - AT, row["to_time"] - AT, row["rows_read"]) for row in store_rows(tmp_path / "db", "ingests")
    ]
    assert sorted(coverage) == [(1, 5, 5), (101, 105, 5), (201, 205, 5)]
