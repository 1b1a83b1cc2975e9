"""Tests of the made-up history: it has the shares of the paper, is consistent, and its truth matches the files."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timezone
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.append(BENCH)

from history import faults  # noqa: E402
from history.making import make  # noqa: E402
from history.size import DAY, Size, nodes_for, refusal  # noqa: E402

from healthd.events.schema import EVENTS, HEAD  # noqa: E402

TINY = Size(jobs=1000, nodes=8, months=1, seed=1)
TINY_DIGESTS = ["0c8916a217e03203", "5c3f2a910180c62f", "ca8abc53a9bef2d0"]
MEDIUM = Size(jobs=40_000, nodes=nodes_for(40_000, 2), months=2, seed=1)
LONGEST = 7 * DAY


class Record(NamedTuple):
    job_id: int
    row: int
    state: str
    submitted: int
    eligible: int
    start: int  # 0: it never ran
    end: int  # 0: it still runs
    nodes: tuple[int, ...]
    gpus: int
    qos: str
    excluded: frozenset[str]


class Made(NamedTuple):
    size: Size
    folder: Path
    summary: dict[str, Any]
    records: list[Record]

    def truth(self, table: str) -> list[dict[str, str]]:
        return rows_of(self.folder / "truth" / f"{table}.csv")


def rows_of(path: Path, separator: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="ascii", newline="") as file:
        return list(csv.DictReader(file, delimiter=separator, quoting=csv.QUOTE_NONE))


def node_numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.removeprefix("n").strip("[]").split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def record(row: dict[str, str]) -> Record:
    ran = row["Start"] != "Unknown"
    gpus = int(row["AllocTRES"].partition("gres/gpu=")[2].partition(",")[0]) if ran else 0
    _, _, excluded = row["SubmitLine"].partition("--exclude=")
    return Record(
        *(int(row["JobIDRaw"]), int(row["DBIndex"]), row["State"].partition(" ")[0], int(row["Submit"])),
        *(int(row["Eligible"]), int(row["Start"]) if ran else 0, int(row["End"]) if row["End"] != "Unknown" else 0),
        *(node_numbers(row["NodeList"]) if ran else (), gpus, row["QOS"]),
        excluded=frozenset(excluded.partition(" ")[0].split(",")) - {""},
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made") / "history"
    summary = make(MEDIUM, folder)
    rows: dict[str, dict[str, str]] = {}
    for path in sorted((folder / "sacct").iterdir()):
        rows.update((row["DBIndex"], row) for row in rows_of(path, "|"))
    return Made(MEDIUM, folder, summary, [record(row) for row in rows.values()])


def digest(folder: Path, below: str = "**/*") -> str:
    whole = sha256()
    for path in sorted(path for path in folder.glob(below) if path.is_file()):
        whole.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


# --- seed


def test_a_seed_makes_the_same_bytes_on_every_python(tmp_path):
    """All Pythons check the same digests. After a change of the generator, update TINY_DIGESTS."""
    make(TINY, tmp_path / "one")
    assert [digest(tmp_path / "one", below) for below in ("sacct/*", "truth/*.csv", "*.*")] == TINY_DIGESTS
    make(TINY, tmp_path / "two")
    assert digest(tmp_path / "one") == digest(tmp_path / "two"), "the streams too, with one Python"


def test_another_seed_makes_another_history(tmp_path):
    make(TINY, tmp_path / "one")
    make(Size(TINY.jobs, TINY.nodes, TINY.months, 2), tmp_path / "two")
    assert digest(tmp_path / "one", "sacct/*") != digest(tmp_path / "two", "sacct/*")


def test_more_of_one_thing_does_not_move_another(tmp_path, monkeypatch):
    """Programs with more Xids change streams and truth only."""
    make(TINY, tmp_path / "few")
    monkeypatch.setattr(faults, "PROGRAM_TELLS", 1.0)
    make(TINY, tmp_path / "many")
    assert digest(tmp_path / "few", "sacct/*") == digest(tmp_path / "many", "sacct/*")
    assert digest(tmp_path / "few", "truth/faults.csv") == digest(tmp_path / "many", "truth/faults.csv")
    assert digest(tmp_path / "few", "events/*/*") != digest(tmp_path / "many", "events/*/*")


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (Size(20_000, 100, 1, 1), ""),
        (Size(4_000_000, 2000, 11, 1), ""),
        (Size(20_000, 2000, 1, 1), "110 nodes would fit"),
        (Size(99, 4, 1, 1), "100 jobs"),
        (Size(1000, 3, 1, 1), "4 nodes"),
        (Size(1000, 8, 0, 1), "1 to 120 months"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_one_that_can(size, says):
    assert (says in refusal(size)) if says else refusal(size) == ""


# --- shares of the paper (arXiv 2410.21680)


@pytest.mark.one_python
def test_the_states_have_the_shares_of_the_paper(made):
    states = Counter(one.state for one in made.records)
    assert states == made.summary["states"]
    share = {state: count / len(made.records) for state, count in states.items()}
    assert 0.57 < share["COMPLETED"] < 0.63
    assert 0.22 < share["FAILED"] < 0.26
    assert 0.06 < share["PREEMPTED"] < 0.12  # 10 % at full size; this size lacks the largest jobs
    assert 0.015 < share["REQUEUED"] < 0.025
    assert 0.004 < share["TIMEOUT"] < 0.008
    assert 0.0005 < share["OUT_OF_MEMORY"] < 0.002
    assert 0.0001 < share["NODE_FAIL"] < 0.002
    assert 0.95 < len(made.records) / made.size.jobs < 1.05


@pytest.mark.one_python
def test_the_sizes_have_the_shares_of_the_paper(made):
    ran = [one for one in made.records if one.start]
    jobs, time = Counter[int](), Counter[int]()
    for one in ran:
        jobs[one.gpus] += 1
        time[one.gpus] += one.gpus * ((one.end or made.size.end) - one.start)
    assert jobs[1] / len(ran) > 0.4
    assert sum(n for gpus, n in jobs.items() if gpus <= 8) / len(ran) > 0.9
    assert sum(n for gpus, n in time.items() if gpus <= 8) / sum(time.values()) < 0.11
    assert 0.50 < sum(n for gpus, n in time.items() if gpus >= 256) / sum(time.values()) < 0.66


@pytest.mark.one_python
def test_the_cluster_is_as_busy_as_the_papers(made):
    size = made.size
    used = sum(
        one.gpus * (min(one.end or size.end, size.end) - max(one.start, size.start))
        for one in made.records
        if one.start
    )
    assert used / (size.nodes * 8 * (size.end - size.start)) == pytest.approx(made.summary["utilisation"], abs=1e-4)
    assert 0.76 < made.summary["utilisation"] < 0.87  # 0.83 at full size


@pytest.mark.one_python
def test_lemons_are_few_and_fail_often(made):
    nodes = made.truth("nodes")
    lemons = [node for node in nodes if float(node["factor"]) > 1]
    assert len(nodes) == made.size.nodes
    assert len(lemons) == round(0.012 * made.size.nodes)
    assert all(5 <= float(node["factor"]) <= 20 and node["lemon_from"] for node in lemons)


@pytest.mark.one_python
def test_large_jobs_fail_at_the_rate_of_the_paper(made):
    """The rate is 6.5 in 1000 node-days, about 50 failures here: within four standard deviations of a Poisson count."""
    expected = 0.0065 * made.summary["large_jobs_node_days"]
    assert abs(made.summary["large_jobs_hit"] - expected) < 4 * expected**0.5


# --- consistency


@pytest.mark.one_python
def test_no_gpu_has_two_jobs(made):
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in made.records:
        for node in one.nodes:
            gpus = one.gpus // len(one.nodes)
            changes[node] += [(one.start, gpus), (one.end or made.size.end, -gpus)]
    for node, steps in changes.items():
        busy = 0
        for _, gpus in sorted(steps):
            busy += gpus
            assert 0 <= busy <= 8, node
    assert made.summary["job_nodes"] == sum(len(one.nodes) for one in made.records)
    assert len(changes) == made.size.nodes


@pytest.mark.one_python
def test_no_job_starts_on_a_node_that_is_out_and_none_runs_in_a_maintenance(made):
    out: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows_of(made.folder / "node_states.txt", "|"):
        end = made.size.end if row["TimeEnd"] == "Unknown" else int(row["TimeEnd"])
        out[int(row["NodeName"][1:])].append((int(row["TimeStart"]), end))
    reserved: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows_of(made.folder / "reservations.txt", "|"):
        for node in node_numbers(row["NodeName"]):
            reserved[node].append((int(row["TimeStart"]), int(row["TimeEnd"])))
    assert out
    assert reserved
    for one in made.records:
        for node in one.nodes:
            # A job gets its nodes up to 40 s before it starts, while the jobs that it preempts end.
            assert not any(begin + 40 < one.start < end for begin, end in out[node]), one
            assert not any(one.start < end and (one.end or made.size.end) > begin for begin, end in reserved[node]), one
    for times in out.values():
        ordered = sorted(times)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))


@pytest.mark.one_python
def test_a_requeue_keeps_its_id_and_begins_where_the_record_before_has_ended(made):
    records: dict[int, list[Record]] = defaultdict(list)
    for one in sorted(made.records, key=lambda one: one.row):
        records[one.job_id].append(one)
    assert max(map(len, records.values())) > 3
    for chain in records.values():
        for before, after in pairwise(chain):
            assert before.state in ("PREEMPTED", "REQUEUED", "NODE_FAIL")
            assert before.end <= after.submitted < after.eligible
            assert not after.start or after.start >= after.eligible
    assert all(one.end - one.start <= LONGEST for one in made.records if one.start and one.end)


@pytest.mark.one_python
def test_who_is_pre_empted_was_low_and_had_two_hours_and_the_log_says_for_whom(made):
    by_row = {one.row: one for one in made.records}
    told = made.truth("preemptions")
    assert len(told) == made.summary["preemptions"] == made.summary["states"]["PREEMPTED"]
    second = 0
    for row in told:
        victim, preemptor = by_row[int(row["victim_db_index"])], by_row[int(row["preemptor_db_index"])]
        assert (victim.state, victim.qos, victim.end) == ("PREEMPTED", "low", int(row["time"]))
        assert victim.end - victim.start >= 7200
        assert 0 < preemptor.start - victim.end <= 60
        assert {*victim.nodes} & {*preemptor.nodes}
        if row["second_order"] == "1":
            second += 1
            failed = by_row[int(row["after"])]
            assert failed.job_id == preemptor.job_id
            assert failed.state in ("NODE_FAIL", "REQUEUED")
    assert second == made.summary["second_order"] > 0
    log = (made.folder / "slurmctld.log").read_text("ascii")
    assert log.count(" to reclaim resources for ") == len(told)


@pytest.mark.one_python
def test_what_the_hardware_ended_has_its_node_its_fault_and_its_cause(made):
    by_row = {one.row: one for one in made.records}
    faulted = {row["fault"]: row for row in made.truth("faults")}
    causes = Counter[str]()
    for row in made.truth("failures"):
        one = by_row[int(row["db_index"])]
        assert (one.state, one.end) == (row["state"], int(row["end_time"]))
        causes[row["cause"]] += 1
        if row["node"]:
            assert int(row["node"][1:]) in one.nodes
        if row["fault"]:
            fault = faulted[row["fault"]]
            assert (fault["node"], fault["cause"]) == (row["node"], row["cause"])
            assert 0 <= one.end - int(fault["time"]) <= 900
        else:
            assert row["cause"] in ("user", "limit", "crash_loop")
    ended = [
        one for one in made.records if one.state in ("FAILED", "NODE_FAIL", "REQUEUED", "TIMEOUT", "OUT_OF_MEMORY")
    ]
    assert causes.total() == len(ended)
    assert causes["user"] > 100 * (causes["mount"] + causes["gpu_memory"]) > 0
    assert {row["node"] for row in made.truth("failures") if row["state"] == "NODE_FAIL"} - {""}
    assert all(row["node"] for row in made.truth("failures") if row["state"] == "NODE_FAIL")


@pytest.mark.one_python
def test_nobody_runs_where_they_did_not_want_to(made):
    excluding = [one for one in made.records if one.excluded]
    assert excluding
    assert not any(one.excluded & {f"n{node:04d}" for node in one.nodes} for one in excluding)
    assert {row["why"] for row in made.truth("exclusions")} == {"fault", "superstition"}


# --- streams


def lines_of(made: Made) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line once, as a reader gets it."""
    for path in sorted((made.folder / "events").glob("*/events.jsonl")):
        seen: set[tuple[str, int]] = set()
        for text in path.read_text("ascii").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # torn line
            if (line["stream_id"], line["seq"]) not in seen:
                seen.add((line["stream_id"], line["seq"]))
                yield path.parent.name, line


@pytest.mark.one_python
def test_each_event_is_there_once_and_speaks_the_words_of_the_stream(made):
    told = Counter[str]()
    last: dict[str, int] = {}
    for node, line in lines_of(made):
        told[line["event"]] += 1
        says = EVENTS[line["event"]]
        always = {*says.required, *(("stage",) if says.stages else ())}
        assert always <= {*line} - {*HEAD} <= {*always, *says.optional}, line
        assert line["node"] == node
        assert line["seq"] > last.get(line["stream_id"], 0)
        last[line["stream_id"]] = line["seq"]
    assert told == made.summary["events"]
    assert made.summary["repeated_lines"] > 0 < made.summary["torn_lines"]
    assert {*EVENTS} - {*told} <= {"repaired"}


@pytest.mark.one_python
def test_what_the_streams_open_is_in_the_truth_and_what_nobody_saw_is_not_in_the_streams(made):
    truth = made.truth("conditions")
    opened = {row["condition"] for row in truth if row["opened"]}
    told = {line["condition"] for _, line in lines_of(made) if line["event"] == "opened"}
    assert told <= opened
    assert len(opened - told) <= made.summary["lost_lines"] + made.summary["dropped_lines"]
    assert {row["because"] for row in truth} >= {"user", "harmless", "false_alarm"}
    assert all(int(row["onset"]) <= int(row["opened"]) for row in truth if row["opened"])
    assert any(not row["opened"] for row in truth)
    mounts = [int(row["opened"]) for row in truth if row["opened"] and row["code"].startswith("mount/")]
    assert min(mounts) >= made.size.at(0.2), "the mount check was enabled later"


@pytest.mark.one_python
def test_a_node_that_is_not_observed_tells_nothing(made):
    gone = [row for row in made.truth("not_observed") if row["why"] in ("daemon_off", "node_down")]
    silent: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in gone:
        silent[row["node"]].append((int(row["from_time"]), int(row["until_time"])))
    assert {row["why"] for row in made.truth("not_observed")} == {"daemon_off", "node_down", "lost", "dropped"}
    for node, line in lines_of(made):
        at = datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp()
        assert not any(begin + 1 < at < end for begin, end in silent[node]), line


# --- ingest


@pytest.mark.one_python
def test_the_store_has_what_was_made_no_more_and_no_less(made, tmp_path):
    from fleet_rows import content

    from healthd.fleet.all_sources import ALL
    from healthd.fleet.ingest import IngestOptions, ingest
    from healthd.fleet.sources.sacct import COLUMNS as ASKED_OF_SACCT
    from healthd.fleet.tables import TABLES

    days = sorted(map(str, (made.folder / "sacct").iterdir()))
    assert Path(days[0]).read_text("ascii").partition("\n")[0].split("|") == [*ASKED_OF_SACCT]
    files = {
        "nodes": ["nodes.csv"],
        "topology": ["topology.conf"],
        "preemptions": ["slurmctld.log"],
        "node_states": ["node_states.txt"],
        "reservations": ["reservations.txt"],
        "events": ["events"],
        "tickets": ["tickets.csv"],
    }
    named = {source: [str(made.folder / name) for name in names] for source, names in files.items()}
    wanted = [(source, {**named, "sacct": days}[source.name]) for source in ALL if source.name in {*named, "sacct"}]
    assert len(wanted) == len(files) + 1
    asked = IngestOptions(made.size.end + DAY, cluster="made", zone=timezone.utc, users="keep")
    came = ingest(str(tmp_path / "db"), wanted, asked)
    assert came.failed == []
    # Only torn lines whose sequence number is also missing count as unread.
    assert set(came.unread.unread) <= {"events"}
    assert came.unread.unread["events"] <= made.summary["torn_lines"]
    store: dict[str, list[dict[str, Any]]] = {
        table: [dict(zip(TABLES[table].columns, row, strict=True)) for row in rows]
        for table, rows in content(tmp_path / "db").items()
    }

    jobs = {row["db_index"]: row for row in store["jobs"]}
    assert len(jobs) == len(store["jobs"]) == made.summary["records"]
    for one in made.records:
        row = jobs[one.row]
        assert (row["job_id"], row["state"], row["submit_time"]) == (one.job_id, one.state, one.submitted)
        assert (row["start_time"] or 0, row["end_time"] or 0) == (one.start, one.end)
        assert not one.start or (row["gpus"], row["nodes"]) == (one.gpus, len(one.nodes))
    on = Counter(row["db_index"] for row in store["job_nodes"])
    assert on == {one.row: len(one.nodes) for one in made.records if one.nodes}
    took = {(row["time"], row["job_id"], row["preemptor_job_id"]) for row in store["preemptions"]}
    assert took == {
        (int(row["time"]), int(row["victim_job_id"]), int(row["preemptor_job_id"])) for row in made.truth("preemptions")
    }
    assert Counter(row["event"] for row in store["events"]) == made.summary["events"]
    for table in ("node_states", "reservations", "tickets", "nodes"):
        assert len(store[table]) == made.summary[table], table
    assert len(store["exclusions"]) == sum(len(one.excluded) for one in made.records) == made.summary["excluded"]
