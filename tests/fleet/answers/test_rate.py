"""Tests of `rate`: node failures of large jobs, on histories small enough to count by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fleet_history import BEGIN, CLUSTERS, END, History, history, row, write_parquet
from fleet_views import text_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet.answers.document import Unanswerable
from healthd.fleet.answers.study import Choice, open_study
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

try:  # only .venv has scipy; the marked tests run nowhere else
    from healthd.fleet.answers import compare, ettr, goodput, rate, states
    from healthd.fleet.views.rate import DURATION_INTERVAL
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise

HOUR, DAY = 3600, 86400


def rate_of(made: History, folder: Path, chosen: Choice | None = None, **options: int) -> dict:
    folder.mkdir(exist_ok=True)
    with open_study(write_parquet(made, folder), BEGIN, END, chosen) as study:
        return rate.rate(study, **options)


def add_job(
    made: History, number: int, state: str, hours: float, *, nodes: int = 20, gpus: int = 160, start: int = BEGIN
) -> None:
    """Add a job on nodes n1, n2 and so on."""
    times = {"submit_time": start, "start_time": start, "end_time": start + int(hours * HOUR)}
    made["jobs"].append(
        row(
            "jobs",
            cluster="c1",
            db_index=len(made["jobs"]),
            job_id=number,
            state=state,
            gpus=gpus,
            nodes=nodes,
            **times,
        )
    )
    made["job_nodes"] += [
        row("job_nodes", cluster="c1", db_index=len(made["jobs"]) - 1, node=f"n{n + 1}", **times) for n in range(nodes)
    ]


def add_condition(made: History, node: str, time: int, code: str = "gpu_xid/79", severity: str = "critical") -> None:
    made["scraped_conditions"].append(
        row(
            "scraped_conditions",
            cluster="c1",
            node=node,
            check_name=code.partition("/")[0],
            code=code,
            subject="p1",
            severity=severity,
            first_time=time,
            last_time=time,
            step_seconds=60,
        )
    )


def add_requeue(made: History, node: str, time: int, job_id: int) -> None:
    """Add the event that healthd on this node requeued the job."""
    number = len(made["events"])
    made["events"].append(
        row(
            "events",
            cluster="c1",
            node=node,
            time=time,
            event="requeue",
            stage="confirmed",
            rest=json.dumps({"job": str(job_id)}, separators=(",", ":")),
            stream_id="s" * 16,
            seq=1_000_000 + number,
            boot_id="b",
            mono=float(number),
            schema_version=1,
        )
    )


def empty_history() -> History:
    return {name: [] for name in TABLES}


def small_history() -> History:
    """Return 100 node-days of jobs of 160 GPUs on 20 nodes with three failures, and a failed job of one node."""
    made = empty_history()
    add_job(made, 1, "COMPLETED", 60)
    add_job(made, 2, "NODE_FAIL", 24)  # Slurm set n7 down
    add_job(made, 3, "FAILED", 24, start=BEGIN + DAY)  # n3 had a critical condition
    add_job(made, 4, "FAILED", 6)  # failed by its own program
    add_job(made, 5, "NODE_FAIL", 6)  # the node is not known
    add_job(made, 6, "NODE_FAIL", 48, nodes=1, gpus=8)
    made["node_states"].append(
        row(
            "node_states",
            cluster="c1",
            node="n7",
            start_time=BEGIN + DAY + 120,
            end_time=BEGIN + 2 * DAY,
            state="DOWN*",
        )
    )
    add_condition(made, "n3", BEGIN + 2 * DAY - 60)
    return made


def test_failures_and_node_days_are_of_large_jobs(tmp_path):
    found = rate_of(small_history(), tmp_path)
    assert (found["failures"], found["by_end"]) == (3, {"node_fail": 2, "failed": 1, "requeued": 0})
    assert found["node_days"] == pytest.approx(20 * 120 / 24)
    assert found["r_f"] == pytest.approx(30)
    assert found["interval"] == pytest.approx([6.187, 87.67], rel=1e-3)  # Garwood's interval of 3, divided by 0.1
    assert found["method"] == "poisson"
    assert found["placed"] == 2
    assert any("unknown for 1 of 3 failures" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("code", "severity", "failed"),
    [
        ("ib_link/down", "degraded", 2),  # the paper counts a link that is down as critical
        ("gpu_xid/31", "critical", 1),  # a program's own fault
        ("gpu_temperature/slowdown", "warning", 1),
    ],
)
def test_isolating_condition_makes_failed_job_node_failure(tmp_path, code, severity, failed):
    made = small_history()
    add_condition(made, "n4", BEGIN + 6 * HOUR, code, severity)  # job 4 ends
    assert rate_of(made, tmp_path)["by_end"]["failed"] == failed


def test_only_requeue_by_healthd_is_node_failure(tmp_path):
    made = small_history()
    for number in (7, 8):
        add_job(made, number, "REQUEUED", 12)
    add_requeue(made, "n9", BEGIN + 12 * HOUR + 2, 7)
    found = rate_of(made, tmp_path)
    assert (found["failures"], found["by_end"]["requeued"], found["placed"]) == (4, 1, 3)
    text = " ".join(text_of(found, Page()).split())
    assert re.search(r"2 NODE_FAIL, 1 FAILED .*, 1 REQUEUED ", text)


def test_all_answers_count_same_large_jobs_as_ended_by_nodes(tmp_path):
    """Each of these answers has its own SQL. All jobs here ran, because rate skips other jobs."""
    ends = Counter[str]()
    for seed in range(60):  # until each way to end occurred; a change of the generator changes all histories
        if seed >= 3 and all(ends.values()):
            break
        made = history(Random(seed), 60)
        for entry in made["jobs"]:
            entry["start_time"] = min(entry["start_time"] or BEGIN, entry["end_time"] or BEGIN)
            if entry["state"] == "REQUEUED" and entry["end_time"] is not None:
                add_requeue(made, "gpu-1", entry["end_time"], entry["job_id"])
                made["events"][-1]["cluster"] = entry["cluster"]
        (tmp_path / str(seed)).mkdir()
        with open_study(write_parquet(made, tmp_path / str(seed)), BEGIN, END) as study:
            rate_document, ettr_document = rate.rate(study), rate.load_ran_jobs(study).large_rate()
            state_rows = [row for row in states.states(study)["by_size"] if (row["gpus_up_to"] or 0) > 128]
            goodput_rows = [row for row in goodput.goodput(study)["by_size"] if (row["gpus_up_to"] or 0) > 128]
            (measure,) = [entry for entry in compare.measure_side(study, "A").measures if entry.name == "r_f"]
            assert sum(rate_document["by_end"].values()) == rate_document["failures"]
            assert sum(row["by_hardware"]["jobs"] for row in state_rows) == rate_document["failures"]
            assert sum(row["first_order"]["jobs"] for row in goodput_rows) == rate_document["failures"]
            assert (measure.amount, measure.exposure) == (
                rate_document["failures"],
                pytest.approx(rate_document["node_days"]),
            )
            assert {key: rate_document[key] for key in ettr_document} == ettr_document
            if rate_document["r_f"] is not None:
                assert ettr.ettr(study)["parameters"]["rate"] == rate_document["r_f"]
        ends.update(rate_document["by_end"])
    assert all(ends.values()), "the histories must contain each way to end"


def test_each_size_has_own_rate_and_time_to_failure(tmp_path):
    found = rate_of(small_history(), tmp_path)
    sizes = {entry["gpus_up_to"]: entry for entry in found["by_size"]}
    assert set(sizes) == {8, 256}
    assert sizes[8]["mttf_seconds"] == pytest.approx(2 * DAY)
    assert sizes[256]["mttf_seconds"] == pytest.approx(120 * HOUR / 3)
    # The projection for the measured size is the measured value.
    assert sizes[256]["projected_mttf_seconds"] == pytest.approx(sizes[256]["mttf_seconds"])
    assert sizes[8]["projected_mttf_seconds"] == pytest.approx(1000 * DAY / 30)


def test_more_than_gpus_sets_size_of_large_jobs(tmp_path):
    found = rate_of(small_history(), tmp_path, more_than_gpus=4)
    assert (found["failures"], found["node_days"]) == (4, pytest.approx(102))


def test_choice_limits_jobs(tmp_path):
    made = small_history()
    for number, entry in enumerate(made["jobs"]):
        entry["account"] = "speech" if number == 1 else "vision"
    assert rate_of(made, tmp_path, Choice(account="speech"))["failures"] == 1


@pytest.mark.parametrize("attempts", [2, 35])
def test_requeue_loop_is_one_incident(tmp_path, attempts):
    made = empty_history()
    for attempt in range(attempts):
        add_job(made, 7, "NODE_FAIL", 0.25, start=BEGIN + attempt * HOUR // 2)
    add_job(made, 8, "COMPLETED", 48)
    found = rate_of(made, tmp_path)
    assert (found["failures"], found["incidents"], found["method"]) == (attempts, 1, "bootstrap")
    low, high = found["interval"]
    exact = rate.rate_row({"node_seconds": found["node_days"] * DAY, "jobs": 1}, [], [])["interval"][1]
    assert low < found["r_f"] < high
    assert high > attempts * exact  # one incident with many failures


def test_later_failure_or_other_job_is_separate_incident():
    found = rate.group_incidents(
        [
            *(failure(1000, "a"), failure(2000, None), failure(3000, "a")),  # one loop
            failure(20_000, "b", ran=10_000),
            failure(21_000, "b", job_id=2),
        ]
    )
    assert found == [("c1", "a", 3), ("c1", "b", 1), ("c1", "b", 1)]


def test_loop_over_many_nodes_is_one_incident_without_node():
    assert rate.group_incidents([failure(1000 * n, f"n{n}") for n in range(1, 12)]) == [("c1", None, 11)]


def failure(end: int, node: str | None, ran: int = 600, job_id: int = 1) -> rate.Failure:
    return rate.Failure("c1", end, job_id, "failed", 256, True, end - ran, end, node)


def test_rate_without_large_jobs_is_not_known(tmp_path):
    made = empty_history()
    add_job(made, 1, "NODE_FAIL", 10, nodes=1, gpus=8)
    found = rate_of(made, tmp_path)
    assert (found["r_f"], found["interval"], found["failures"]) == (None, None, 0)
    assert " 128 GPUs " in " ".join(found["notes"])
    assert "r_f is unknown" in text_of(found, Page())


def test_rate_without_failures_is_0_with_interval(tmp_path):
    made = empty_history()
    add_job(made, 1, "COMPLETED", 60)
    found = rate_of(made, tmp_path)
    assert found["r_f"] == 0
    assert found["interval"] == pytest.approx([0, 3.689 / 0.05], rel=1e-3)
    assert found["projection"][0]["mttf_seconds"] is None
    low, high = found["projection"][0]["interval_seconds"]
    assert high is None
    assert low > 0
    assert "over" in text_of(found, Page())


def test_job_without_node_list_counts(tmp_path):
    made = small_history()
    made["job_nodes"] = []
    found = rate_of(made, tmp_path)
    assert found["node_days"] == pytest.approx(100)
    assert found["failures"] == 2  # job 3 has no known node, so no condition counts for it


def test_rate_needs_jobs(tmp_path):
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        rate_of(empty_history(), tmp_path)


def test_rate_ignores_order_of_rows(tmp_path):
    for seed in range(4):
        made = history(Random(seed), 30)
        if not made["jobs"]:
            continue
        turned = {name: rows[::-1] for name, rows in made.items()}
        first, second = (
            rate_of(rows, tmp_path / f"{seed}{way}", more_than_gpus=1) for way, rows in (("a", made), ("b", turned))
        )
        assert first == second


def test_several_clusters_are_noted(tmp_path):
    made = small_history()
    made["jobs"][0]["cluster"] = CLUSTERS[1]
    assert any("2 clusters " in note for note in rate_of(made, tmp_path)["notes"])


@given(st.floats(1e-3, 1e3), st.floats(1, 1e5), st.floats(1, 100))
def test_mttf_is_inverse_to_nodes(r_f, nodes, times):
    single, _ = rate.mttf_interval(r_f, None, nodes)
    multiple, _ = rate.mttf_interval(r_f, None, nodes * times)
    assert single == pytest.approx(multiple * times)
    assert single == pytest.approx(1000 * DAY / (nodes * r_f))


def test_projection_matches_published_values():
    """1.8 h at 16,384 GPUs and 0.23 h at 131,072 follow from r_f = 6.5.

    The paper measured its 7.9 h at 1,024 and 47.7 d at 8 GPUs; no r_f gives both.
    """
    hours = {entry["gpus"]: entry["mttf_seconds"] / HOUR for entry in rate.projection(6.5, None, 8)}
    assert hours[16_384] == pytest.approx(1.8, abs=0.05)
    assert hours[131_072] == pytest.approx(0.23, abs=0.01)
    assert hours[8] == 128 * hours[1024]


def test_interval_end_beyond_thousand_years_is_open() -> None:
    low, high = rate.mttf_interval(6.5, [1e-12, 11.0], 128.0)[1] or (None, None)
    assert low == pytest.approx(1000 * 86400 / (128 * 11))
    assert high is None
    assert DURATION_INTERVAL.write([low, high]) == "over 17 h"


def test_failure_of_one_node_job_is_on_its_node(tmp_path: Path) -> None:
    """Without Slurm's records of node states, and on a fleet of one-GPU nodes."""
    made = empty_history()
    for number in range(12):
        add_job(made, number, "NODE_FAIL", 2, nodes=1, gpus=1, start=BEGIN + number * 3 * HOUR)
    found = rate_of(made, tmp_path / "single", more_than_gpus=0)
    assert (found["failures"], found["placed"], found["jobs"]) == (12, 12, 12)
    add_job(made, 50, "NODE_FAIL", 1, nodes=2, gpus=2)
    found = rate_of(made, tmp_path / "pair", more_than_gpus=0)
    assert (found["failures"], found["placed"]) == (13, 12)


def test_command_counts_all_jobs_with_more_than_gpus_0(tmp_path: Path) -> None:
    from fleet_rows import job as job_row
    from fleet_rows import store_with as made_store

    from tests.cli.test_fleet_command import fleet

    rows = [job_row(1, BEGIN, state="NODE_FAIL", start_time=BEGIN, end_time=BEGIN + HOUR, gpus=1, nodes=1)]
    db = made_store(tmp_path / "db", {"jobs": rows})
    status, out, _ = fleet("rate", "--db", db, "--more-than-gpus", "0", "--json")
    assert (status, json.loads(out)["failures"]) == (0, 1)
