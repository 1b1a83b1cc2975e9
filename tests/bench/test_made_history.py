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
from history.generate import make  # noqa: E402
from history.size import DAY, Size, nodes_for, refusal  # noqa: E402

from healthd.events.schema import EVENTS, HEAD  # noqa: E402

TINY = Size(jobs=1000, nodes=8, months=1, seed=1)
TINY_DIGESTS = ["0c8916a217e03203", "cd045ef7845f4370", "ca8abc53a9bef2d0"]
MEDIUM = Size(jobs=40_000, nodes=nodes_for(40_000, 2), months=2, seed=1)
MAX_JOB_SECONDS = 7 * DAY


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


class MadeHistory(NamedTuple):
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
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeHistory:
    folder = tmp_path_factory.mktemp("made") / "history"
    summary = make(MEDIUM, folder)
    rows: dict[str, dict[str, str]] = {}
    for path in sorted((folder / "sacct").iterdir()):
        rows.update((row["DBIndex"], row) for row in rows_of(path, "|"))
    return MadeHistory(MEDIUM, folder, summary, [record(row) for row in rows.values()])


def digest(folder: Path, pattern: str = "**/*") -> str:
    hash_sum = sha256()
    for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
        hash_sum.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return hash_sum.hexdigest()[:16]


# --- seed


def test_seed_produces_same_bytes_on_every_python(tmp_path):
    """All Pythons check the same digests. After a change of the generator, update TINY_DIGESTS."""
    make(TINY, tmp_path / "one")
    assert [digest(tmp_path / "one", below) for below in ("sacct/*", "truth/*.csv", "*.*")] == TINY_DIGESTS
    make(TINY, tmp_path / "two")
    assert digest(tmp_path / "one") == digest(tmp_path / "two"), "the streams too, with one Python"


def test_other_seed_produces_other_history(tmp_path):
    make(TINY, tmp_path / "one")
    make(Size(TINY.jobs, TINY.nodes, TINY.months, 2), tmp_path / "two")
    assert digest(tmp_path / "one", "sacct/*") != digest(tmp_path / "two", "sacct/*")


def test_more_xids_change_streams_but_no_job(tmp_path, monkeypatch):
    """Programs with more Xids change streams and truth only."""
    make(TINY, tmp_path / "few")
    monkeypatch.setattr(faults, "PROGRAM_SIGN_SHARE", 1.0)
    make(TINY, tmp_path / "many")
    assert digest(tmp_path / "few", "sacct/*") == digest(tmp_path / "many", "sacct/*")
    assert digest(tmp_path / "few", "truth/faults.csv") == digest(tmp_path / "many", "truth/faults.csv")
    assert digest(tmp_path / "few", "events/*/*") != digest(tmp_path / "many", "events/*/*")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (Size(20_000, 100, 1, 1), ""),
        (Size(4_000_000, 2000, 11, 1), ""),
        (Size(20_000, 2000, 1, 1), "110 nodes would fit"),
        (Size(99, 4, 1, 1), "100 jobs"),
        (Size(1000, 3, 1, 1), "4 nodes"),
        (Size(1000, 8, 0, 1), "1 to 120 months"),
    ],
)
def test_impossible_size_is_refused_with_suggestion(size, message):
    assert (message in refusal(size)) if message else refusal(size) == ""


# --- shares of the paper (arXiv 2410.21680)


@pytest.mark.one_python
def test_job_states_have_shares_of_paper(made):
    states = Counter(job_record.state for job_record in made.records)
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
def test_job_sizes_have_shares_of_paper(made):
    ran = [job_record for job_record in made.records if job_record.start]
    jobs, time = Counter[int](), Counter[int]()
    for job_record in ran:
        jobs[job_record.gpus] += 1
        time[job_record.gpus] += job_record.gpus * ((job_record.end or made.size.end) - job_record.start)
    assert jobs[1] / len(ran) > 0.4
    assert sum(amount for gpus, amount in jobs.items() if gpus <= 8) / len(ran) > 0.9
    assert sum(amount for gpus, amount in time.items() if gpus <= 8) / sum(time.values()) < 0.11
    assert 0.50 < sum(amount for gpus, amount in time.items() if gpus >= 256) / sum(time.values()) < 0.66


@pytest.mark.one_python
def test_cluster_has_utilisation_of_paper(made):
    size = made.size
    used = sum(
        job_record.gpus * (min(job_record.end or size.end, size.end) - max(job_record.start, size.start))
        for job_record in made.records
        if job_record.start
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
def test_large_jobs_fail_at_rate_of_paper(made):
    """The rate is 6.5 in 1000 node-days, about 50 failures here: within four standard deviations of a Poisson count."""
    expected = 0.0065 * made.summary["large_jobs_node_days"]
    assert abs(made.summary["large_jobs_hit"] - expected) < 4 * expected**0.5


# --- consistency


@pytest.mark.one_python
def test_no_gpu_has_two_jobs(made):
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for job_record in made.records:
        for node in job_record.nodes:
            gpus = job_record.gpus // len(job_record.nodes)
            changes[node] += [(job_record.start, gpus), (job_record.end or made.size.end, -gpus)]
    for node, steps in changes.items():
        busy = 0
        for _, gpus in sorted(steps):
            busy += gpus
            assert 0 <= busy <= 8, node
    assert made.summary["job_nodes"] == sum(len(job_record.nodes) for job_record in made.records)
    assert len(changes) == made.size.nodes


@pytest.mark.one_python
def test_no_job_starts_on_unavailable_node_or_runs_in_maintenance(made):
    outages: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows_of(made.folder / "node_states.txt", "|"):
        end = made.size.end if row["TimeEnd"] == "Unknown" else int(row["TimeEnd"])
        outages[int(row["NodeName"][1:])].append((int(row["TimeStart"]), end))
    reserved: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows_of(made.folder / "reservations.txt", "|"):
        for node in node_numbers(row["NodeName"]):
            reserved[node].append((int(row["TimeStart"]), int(row["TimeEnd"])))
    assert outages
    assert reserved
    for job_record in made.records:
        for node in job_record.nodes:
            # A job gets its nodes up to 40 s before it starts, while the jobs that it preempts end.
            assert not any(begin + 40 < job_record.start < end for begin, end in outages[node]), job_record
            assert not any(
                job_record.start < end and (job_record.end or made.size.end) > begin for begin, end in reserved[node]
            ), job_record
    for times in outages.values():
        ordered = sorted(times)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))


@pytest.mark.one_python
def test_requeue_keeps_job_id_and_starts_after_previous_record(made):
    records: dict[int, list[Record]] = defaultdict(list)
    for job_record in sorted(made.records, key=lambda job_record: job_record.row):
        records[job_record.job_id].append(job_record)
    assert max(map(len, records.values())) > 3
    for chain in records.values():
        for before, after in pairwise(chain):
            assert before.state in ("PREEMPTED", "REQUEUED", "NODE_FAIL")
            assert before.end <= after.submitted < after.eligible
            assert not after.start or after.start >= after.eligible
    assert all(
        job_record.end - job_record.start <= MAX_JOB_SECONDS
        for job_record in made.records
        if job_record.start and job_record.end
    )


@pytest.mark.one_python
def test_preempted_jobs_had_low_qos_and_ran_two_hours(made):
    by_row = {job_record.row: job_record for job_record in made.records}
    preemptions = made.truth("preemptions")
    assert len(preemptions) == made.summary["preemptions"] == made.summary["states"]["PREEMPTED"]
    second = 0
    for row in preemptions:
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
    assert log.count(" to reclaim resources for ") == len(preemptions)


@pytest.mark.one_python
def test_each_hardware_failure_has_node_fault_and_cause(made):
    by_row = {job_record.row: job_record for job_record in made.records}
    faults_by_id = {row["fault"]: row for row in made.truth("faults")}
    causes = Counter[str]()
    for row in made.truth("failures"):
        job_record = by_row[int(row["db_index"])]
        assert (job_record.state, job_record.end) == (row["state"], int(row["end_time"]))
        causes[row["cause"]] += 1
        if row["node"]:
            assert int(row["node"][1:]) in job_record.nodes
        if row["fault"]:
            fault = faults_by_id[row["fault"]]
            assert (fault["node"], fault["cause"]) == (row["node"], row["cause"])
            assert 0 <= job_record.end - int(fault["time"]) <= 900
        else:
            assert row["cause"] in ("user", "limit", "crash_loop")
    ended = [
        job_record
        for job_record in made.records
        if job_record.state in ("FAILED", "NODE_FAIL", "REQUEUED", "TIMEOUT", "OUT_OF_MEMORY")
    ]
    assert causes.total() == len(ended)
    assert causes["user"] > 100 * (causes["mount"] + causes["gpu_memory"]) > 0
    assert {row["node"] for row in made.truth("failures") if row["state"] == "NODE_FAIL"} - {""}
    assert all(row["node"] for row in made.truth("failures") if row["state"] == "NODE_FAIL")


@pytest.mark.one_python
def test_jobs_avoid_their_excluded_nodes(made):
    excluding = [job_record for job_record in made.records if job_record.excluded]
    assert excluding
    assert not any(job_record.excluded & {f"n{node:04d}" for node in job_record.nodes} for job_record in excluding)
    assert {row["why"] for row in made.truth("exclusions")} == {"fault", "superstition"}


# --- streams


def lines_of(made: MadeHistory) -> Iterator[tuple[str, dict[str, Any]]]:
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
def test_each_event_occurs_once_with_fields_of_schema(made):
    counts = Counter[str]()
    last: dict[str, int] = {}
    for node, line in lines_of(made):
        counts[line["event"]] += 1
        event_type = EVENTS[line["event"]]
        required = {*event_type.required, *(("stage",) if event_type.stages else ())}
        assert required <= {*line} - {*HEAD} <= {*required, *event_type.optional}, line
        assert line["node"] == node
        assert line["seq"] > last.get(line["stream_id"], 0)
        last[line["stream_id"]] = line["seq"]
    assert counts == made.summary["events"]
    assert made.summary["repeated_lines"] > 0 < made.summary["torn_lines"]
    assert {*EVENTS} - {*counts} <= {"repaired", "repair", "evidence"}


@pytest.mark.one_python
def test_streams_and_truth_have_same_conditions(made):
    truth = made.truth("conditions")
    opened = {row["condition"] for row in truth if row["opened"]}
    opened_in_streams = {line["condition"] for _, line in lines_of(made) if line["event"] == "opened"}
    assert opened_in_streams <= opened
    assert len(opened - opened_in_streams) <= made.summary["lost_lines"] + made.summary["dropped_lines"]
    assert {row["because"] for row in truth} >= {"user", "harmless", "false_alarm"}
    assert all(int(row["onset"]) <= int(row["opened"]) for row in truth if row["opened"])
    assert any(not row["opened"] for row in truth)
    mounts = [int(row["opened"]) for row in truth if row["opened"] and row["code"].startswith("mount/")]
    assert min(mounts) >= made.size.at(0.2), "the mount check was enabled later"


@pytest.mark.one_python
def test_streams_list_gpus_and_serial_numbers_of_truth(made):
    periods: dict[tuple[str, str], list[tuple[int, float, str]]] = defaultdict(list)
    for row in made.truth("gpus"):
        until = int(row["until_time"]) if row["until_time"] else float("inf")
        periods[row["node"], row["subject"]].append((int(row["from_time"]), until, row["serial"]))
    assert sum(len(slot) - 1 for slot in periods.values()) == made.summary["replaced_gpus"] > 3
    serials = [serial for slot in periods.values() for *_, serial in slot]
    assert len(serials) > len(set(serials)), "a GPU was reused in another node"

    def serial_at(node: str, subject: str, time: float) -> str:
        return next(serial for begin, until, serial in periods[node, subject] if begin <= time < until)

    listed = 0
    for node, line in lines_of(made):
        time = datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp()
        if line["event"] == "gpus":
            listed += 1
            assert [gpu["serial"] for gpu in line["gpus"]] == [
                serial_at(node, gpu["subject"], time) for gpu in line["gpus"]
            ]
        elif line["event"] == "opened":
            is_gpu = (node, line["subject"]) in periods
            assert ("serial" in line) == is_gpu
    assert listed >= made.size.nodes


@pytest.mark.one_python
def test_unobserved_node_has_no_lines(made):
    down_times = [row for row in made.truth("not_observed") if row["why"] in ("daemon_off", "node_down")]
    silent: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in down_times:
        silent[row["node"]].append((int(row["from_time"]), int(row["until_time"])))
    assert {row["why"] for row in made.truth("not_observed")} == {"daemon_off", "node_down", "lost", "dropped"}
    for node, line in lines_of(made):
        line_time = datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp()
        assert not any(begin + 1 < line_time < end for begin, end in silent[node]), line


# --- ingest


@pytest.mark.one_python
def test_store_contains_exactly_history(made, tmp_path):
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
    paths = {source: [str(made.folder / name) for name in names] for source, names in files.items()}
    chosen_sources = [
        (source, {**paths, "sacct": days}[source.name]) for source in ALL if source.name in {*paths, "sacct"}
    ]
    assert len(chosen_sources) == len(files) + 1
    options = IngestOptions(made.size.end + DAY, cluster="made", zone=timezone.utc, users="keep")
    ingested = ingest(str(tmp_path / "db"), chosen_sources, options)
    assert ingested.failed == []
    # Only torn lines whose sequence number is also missing count as unread.
    assert set(ingested.unread.unread) <= {"events"}
    assert ingested.unread.unread["events"] <= made.summary["torn_lines"]
    store: dict[str, list[dict[str, Any]]] = {
        table: [dict(zip(TABLES[table].columns, row, strict=True)) for row in rows]
        for table, rows in content(tmp_path / "db").items()
    }

    jobs = {row["db_index"]: row for row in store["jobs"]}
    assert len(jobs) == len(store["jobs"]) == made.summary["records"]
    for job_record in made.records:
        row = jobs[job_record.row]
        assert (row["job_id"], row["state"], row["submit_time"]) == (
            job_record.job_id,
            job_record.state,
            job_record.submitted,
        )
        assert (row["start_time"] or 0, row["end_time"] or 0) == (job_record.start, job_record.end)
        assert not job_record.start or (row["gpus"], row["nodes"]) == (job_record.gpus, len(job_record.nodes))
    node_counts = Counter(row["db_index"] for row in store["job_nodes"])
    assert node_counts == {job_record.row: len(job_record.nodes) for job_record in made.records if job_record.nodes}
    stored_preemptions = {(row["time"], row["job_id"], row["preemptor_job_id"]) for row in store["preemptions"]}
    assert stored_preemptions == {
        (int(row["time"]), int(row["victim_job_id"]), int(row["preemptor_job_id"])) for row in made.truth("preemptions")
    }
    assert Counter(row["event"] for row in store["events"]) == made.summary["events"]
    for table in ("node_states", "reservations", "tickets", "nodes"):
        assert len(store[table]) == made.summary[table], table
    assert (
        len(store["exclusions"])
        == sum(len(job_record.excluded) for job_record in made.records)
        == made.summary["excluded"]
    )
