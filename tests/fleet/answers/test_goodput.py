"""Tests of `goodput`: work lost when nodes fail, and jobs that count as ended by a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, END, HOUR, History, history, row, write
from fleet_views import text_of

from healthd.common.page import Page
from healthd.fleet.answers import goodput
from healthd.fleet.answers.document import Document, Unanswerable, WrongChoice
from healthd.fleet.answers.study import Choice, Study, open_study
from healthd.fleet.statistics.job_sizes import format_size, size_class_sql
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python


@contextmanager
def study(made: History, folder: Path, chosen: Choice | None = None) -> Iterator[Study]:
    folder.mkdir(exist_ok=True)
    with open_study(write(made, folder), BEGIN, END, chosen) as asked:
        yield asked


def asked_of(made: History, folder: Path, **flags: Any) -> Document:
    with study(made, folder) as asked:
        return goodput.goodput(asked, **flags)


class Made:
    """A history written job by job. Times are seconds after the start of the period."""

    def __init__(self) -> None:
        self.history: History = {name: [] for name in TABLES}

    def job(self, index: int, state: str, start: int | None, end: int | None, nodes: str = "a", **more: Any) -> None:
        times = {
            "submit_time": BEGIN + (start or 0) - 5,
            "start_time": None if start is None else BEGIN + start,
            "end_time": None if end is None else BEGIN + end,
        }
        asked = {"cluster": "c1", "db_index": index, "job_id": index, "gpus": 8 * len(nodes), "nodes": len(nodes)}
        self.history["jobs"].append(row("jobs", state=state, **{**asked, **times, **more}))
        self.history["job_nodes"] += [
            row("job_nodes", cluster="c1", db_index=index, node=node, **times, gpus=8.0) for node in nodes
        ]

    def preempted(self, at: int, victim: int, by: int) -> None:
        line = {"job_id": victim, "preemptor_job_id": by, "mode": "requeued"}
        self.history["preemptions"].append(row("preemptions", cluster="c1", time=BEGIN + at, **line))

    def line(self, at: int, event: str, node: str = "a", **more: Any) -> None:
        number = len(self.history["events"]) + 1
        plain = {"stream_id": "s" * 16, "seq": number, "boot_id": "b", "mono": float(at), "schema_version": 1}
        self.history["events"].append(
            row("events", cluster="c1", node=node, time=BEGIN + at, event=event, **{**plain, **more})
        )

    def condition(self, at: int, code: str, severity: str) -> None:
        self.line(
            *(at, "opened"),
            condition_id=f"c{at}",
            check_name=code.partition("/")[0],
            code=code,
            subject="",
            severity=severity,
            kind="edge",
            first_time=BEGIN + at,
            last_time=BEGIN + at,
            times=1,
            observed=False,
            history=False,
        )


def after_a_node_failed() -> Made:
    """Job 1 (16 GPUs) lost a node. Its requeue preempted job 2; job 4 preempted job 3."""
    made = Made()
    made.job(1, "NODE_FAIL", 0, 2 * HOUR, "ab")
    made.job(2, "PREEMPTED", HOUR, 3 * HOUR, "c")
    made.job(11, "COMPLETED", 3 * HOUR + 20, 9 * HOUR, "ac", job_id=1)
    made.job(3, "PREEMPTED", HOUR, 4 * HOUR, "d")
    made.job(4, "COMPLETED", 4 * HOUR + 20, 5 * HOUR, "d")
    made.preempted(3 * HOUR, 2, 1)
    made.preempted(4 * HOUR, 3, 4)
    return made


def test_a_job_that_its_node_ended_is_of_first_order_and_what_gave_way_to_its_requeue_of_second(tmp_path: Path) -> None:
    told = asked_of(after_a_node_failed().history, tmp_path, price=3.0)
    first, second = told["first_order"], told["second_order"]
    assert (first["jobs"], first["gpu_seconds"], first["gpu_hours"], first["cost"]) == (1, 16 * 1800, 8.0, 24.0)
    assert (second["jobs"], second["gpu_hours"], second["cost"]) == (1, 4.0, 12.0)
    assert told["share_second_order"] == pytest.approx(1 / 3)
    assert told["preempted_by_others"]["jobs"] == 1
    assert [one["jobs"] for one in second["by_how"]] == [1, 0]
    shown = [(one["gpus_up_to"], one["first_order"]["jobs"], one["second_order"]["jobs"]) for one in told["by_size"]]
    assert shown == [(8, 0, 1), (16, 1, 0)]
    assert not goodput.has_findings(told)
    assert "33.3 % of the loss is of second order" in text_of(told, Page())


def test_without_a_log_the_preemptor_is_inferred_and_counted_apart(tmp_path: Path) -> None:
    made = after_a_node_failed().history
    made["preemptions"] = []
    told = asked_of(made, tmp_path)
    logged, inferred = told["second_order"]["by_how"]
    assert (logged["how"], logged["jobs"]) == ("logged", 0)
    assert (inferred["how"], inferred["jobs"], inferred["gpu_hours"]) == ("inferred", 1, 4.0)


def test_a_preemptor_that_nobody_knows_may_be_of_second_order_and_is_said_to(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "PREEMPTED", 0, HOUR)
    told = asked_of(made.history, tmp_path)
    assert (told["preempted_by_unknown"]["jobs"], told["second_order"]["jobs"]) == (1, 0)
    assert any("--slurmctld-log" in note for note in told["notes"])
    assert told["share_second_order"] is None
    assert "No loss is known" in text_of(told, Page())


def test_only_the_requeue_that_follows_a_failure_is_to_blame(tmp_path: Path) -> None:
    """The job was requeued again for another reason before its requeue preempted job 2."""
    made = after_a_node_failed()
    made.job(12, "REQUEUED", 2 * HOUR + 200, 2 * HOUR + 300, "ab", job_id=1)
    assert asked_of(made.history, tmp_path)["second_order"]["jobs"] == 0


@pytest.mark.parametrize(
    ("code", "severity", "counts"),
    [
        ("gpu_xid/79", "critical", 1),
        ("ib_link/down", "degraded", 1),
        ("gpu_xid/94", "warning", 0),
        ("gpu_xid/31", "critical", 0),
        ("pcie_link/slow", "degraded", 0),
    ],
)
def test_a_failed_job_counts_where_a_check_that_drains_fired_beside_it_that_is_no_programs_own(
    tmp_path: Path, code: str, severity: str, counts: int
) -> None:
    made = Made()
    made.job(1, "FAILED", 0, HOUR)
    made.condition(HOUR - 60, code, severity)
    failed = asked_of(made.history, tmp_path)["first_order"]["by_end"][1]
    assert (failed["ended"], failed["jobs"]) == ("failed", counts)


@pytest.mark.parametrize(
    ("named", "job", "counts"),
    [
        ("7", {"job_id": 7}, 1),
        ("70", {"job_id": 7}, 0),
        ("5_2", {"job_id": 7, "array_job_id": 5, "array_task_id": 2}, 1),
        ("5_3", {"job_id": 7, "array_job_id": 5, "array_task_id": 2}, 0),
    ],
)
def test_a_requeued_job_counts_where_healthd_says_that_it_requeued_it(
    tmp_path: Path, named: str, job: dict[str, int], counts: int
) -> None:
    made = Made()
    made.job(1, "REQUEUED", 0, HOUR, **job)
    for stage in ("sent", "confirmed"):
        made.line(HOUR + 1, "requeue", stage=stage, rest=json.dumps({"job": named}, separators=(",", ":")))
    requeued = asked_of(made.history, tmp_path)["first_order"]["by_end"][2]
    assert (requeued["ended"], requeued["jobs"]) == ("requeued", counts)


def test_a_job_loses_no_more_than_it_ran_and_no_more_than_half_the_time_between_checkpoints(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "NODE_FAIL", 0, 600)
    made.job(2, "NODE_FAIL", 0, HOUR)
    made.job(3, "NODE_FAIL", HOUR, 0)  # it ends before it starts
    assert asked_of(made.history, tmp_path / "a")["first_order"]["gpu_seconds"] == 8 * (600 + 1800)
    told = asked_of(made.history, tmp_path / "b", checkpoint=600.0)
    assert (told["first_order"]["jobs"], told["first_order"]["gpu_seconds"]) == (3, 8 * (300 + 300))
    assert told["loss_at_most_seconds"] == 300


def test_a_job_whose_nodes_end_it_over_and_over_is_a_requeue_loop(tmp_path: Path) -> None:
    made = Made()
    for number in range(5):
        made.job(10 + number, "NODE_FAIL", number * HOUR, number * HOUR + 1800, "ab", job_id=1)
    made.job(2, "PREEMPTED", 0, HOUR - 30, "c")
    made.preempted(HOUR - 30, 2, 1)
    for number in range(4):
        made.job(20 + number, "NODE_FAIL", number * HOUR, number * HOUR + 1800, "e", job_id=3)
    told = asked_of(made.history, tmp_path)
    (loop,) = told["requeue_loops"]
    assert (loop["job_id"], loop["ends"], loop["gpus"]) == (1, 5, 16)
    assert (loop["preemptions"], loop["preempted_gpus"]) == (1, 8)
    assert loop["first_order_gpu_seconds"] == 5 * 16 * 1800
    assert loop["second_order_gpu_seconds"] == 8 * 1800
    assert goodput.has_findings(told)
    assert "5 times" in text_of(told, Page())


def test_the_orders_sum_over_sizes_and_ways_to_the_whole_and_rows_may_come_in_any_order(tmp_path: Path) -> None:
    lost = 0
    for seed in range(3):
        made = history(Random(seed), 40)
        told = asked_of(made, tmp_path / f"{seed}a")
        for order, ways in (("first_order", "by_end"), ("second_order", "by_how")):
            its_own = told[order]
            for key in ("jobs", "gpu_seconds"):
                assert sum(one[order][key] for one in told["by_size"]) == its_own[key]
                assert sum(one[key] for one in its_own[ways]) == its_own[key]
            lost += its_own["jobs"]
        (tmp_path / f"{seed}b").mkdir()
        with open_study(write(made, tmp_path / f"{seed}b", 3, Random(seed)), BEGIN, END) as shuffled:
            assert goodput.goodput(shuffled) == told
    assert lost > 10


def test_a_choice_leaves_the_victims_that_are_it_whoever_took_their_nodes(tmp_path: Path) -> None:
    made = after_a_node_failed().history
    for job in made["jobs"]:
        job["account"] = "speech" if job["job_id"] == 2 else "vision"
    with study(made, tmp_path, Choice(account="speech")) as asked:
        told = goodput.goodput(asked)
    assert (told["first_order"]["jobs"], told["second_order"]["jobs"]) == (0, 1)


def test_jobs_whose_gpus_are_not_known_lose_nothing_and_are_named(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "NODE_FAIL", 0, HOUR, gpus=None)
    made.job(2, "NODE_FAIL", None, HOUR, "")
    told = asked_of(made.history, tmp_path)
    assert (told["first_order"]["jobs"], told["first_order"]["gpu_seconds"]) == (2, 0)
    assert any("1 job ended by nodes had an unknown number of GPUs" in note for note in told["notes"])


def test_a_store_without_jobs_and_flags_that_are_none_are_refused(tmp_path: Path) -> None:
    empty: History = {name: [] for name in TABLES}
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        asked_of(empty, tmp_path / "a")
    for flags in ({"checkpoint": 0.0}, {"checkpoint": float("nan")}, {"price": -1.0}, {"price": float("inf")}):
        with pytest.raises(WrongChoice, match="--"):
            asked_of(after_a_node_failed().history, tmp_path / "b", **flags)


def test_one_row_that_is_not_over_has_lost_nothing(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "RUNNING", 0, None)
    told = asked_of(made.history, tmp_path)
    assert (told["first_order"]["jobs"], told["by_size"], told["requeue_loops"]) == (0, [], [])


def test_the_classes_of_size_are_those_of_the_question_states(tmp_path: Path) -> None:
    made = Made()
    for number, gpus in enumerate([None, 0, *(2**k + d for k in range(17) for d in (-1, 0, 1))]):
        made.job(number + 1, f"S{number}", 0, 60, gpus=gpus)
    with study(made.history, tmp_path) as asked:
        asked.compute_tables("states")
        theirs = asked.database.rows("SELECT state, gpus_up_to FROM states ORDER BY state")
        ours = asked.database.rows(f"SELECT state, {size_class_sql('gpus')} AS gpus_up_to FROM jobs ORDER BY state")
    assert ours == theirs
    assert [format_size(size) for size in (None, 0, 1, 2, 4, 2048)] == [
        *("not known", "0", "1", "2", "3-4"),
        "1,025-2,048",
    ]
