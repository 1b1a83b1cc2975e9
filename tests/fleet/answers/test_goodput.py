"""Tests of `goodput`: work lost when nodes fail, and jobs that count as ended by a node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, END, HOUR, History, history, row, write_parquet
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
    with open_study(write_parquet(made, folder), BEGIN, END, chosen) as opened:
        yield opened


def goodput_of(made: History, folder: Path, **flags: Any) -> Document:
    with study(made, folder) as opened:
        return goodput.goodput(opened, **flags)


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
        columns = {"cluster": "c1", "db_index": index, "job_id": index, "gpus": 8 * len(nodes), "nodes": len(nodes)}
        self.history["jobs"].append(row("jobs", state=state, **{**columns, **times, **more}))
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


def history_after_node_fail() -> Made:
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


def test_node_fail_is_first_order_and_preemption_by_requeue_second(tmp_path: Path) -> None:
    answer = goodput_of(history_after_node_fail().history, tmp_path, price=3.0)
    first, second = answer["first_order"], answer["second_order"]
    assert (first["jobs"], first["gpu_seconds"], first["gpu_hours"], first["cost"]) == (1, 16 * 1800, 8.0, 24.0)
    assert (second["jobs"], second["gpu_hours"], second["cost"]) == (1, 4.0, 12.0)
    assert answer["share_second_order"] == pytest.approx(1 / 3)
    assert answer["preempted_by_others"]["jobs"] == 1
    assert [entry["jobs"] for entry in second["by_how"]] == [1, 0]
    size_counts = [
        (entry["gpus_up_to"], entry["first_order"]["jobs"], entry["second_order"]["jobs"])
        for entry in answer["by_size"]
    ]
    assert size_counts == [(8, 0, 1), (16, 1, 0)]
    assert not goodput.has_findings(answer)
    assert "33.3 %" in text_of(answer, Page())


def test_preemptor_is_inferred_without_log(tmp_path: Path) -> None:
    made = history_after_node_fail().history
    made["preemptions"] = []
    answer = goodput_of(made, tmp_path)
    logged, inferred = answer["second_order"]["by_how"]
    assert (logged["how"], logged["jobs"]) == ("logged", 0)
    assert (inferred["how"], inferred["jobs"], inferred["gpu_hours"]) == ("inferred", 1, 4.0)


def test_unknown_preemptor_is_noted(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "PREEMPTED", 0, HOUR)
    answer = goodput_of(made.history, tmp_path)
    assert (answer["preempted_by_unknown"]["jobs"], answer["second_order"]["jobs"]) == (1, 0)
    assert any("--slurmctld-log" in note for note in answer["notes"])
    assert answer["share_second_order"] is None
    assert "No loss " in text_of(answer, Page())


def test_only_requeue_right_after_failure_counts(tmp_path: Path) -> None:
    """The job was requeued again for another reason before its requeue preempted job 2."""
    made = history_after_node_fail()
    made.job(12, "REQUEUED", 2 * HOUR + 200, 2 * HOUR + 300, "ab", job_id=1)
    assert goodput_of(made.history, tmp_path)["second_order"]["jobs"] == 0


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
def test_failed_job_counts_only_with_draining_node_fault(tmp_path: Path, code: str, severity: str, counts: int) -> None:
    made = Made()
    made.job(1, "FAILED", 0, HOUR)
    made.condition(HOUR - 60, code, severity)
    failed = goodput_of(made.history, tmp_path)["first_order"]["by_end"][1]
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
def test_requeued_job_counts_if_healthd_requeued_it(
    tmp_path: Path, named: str, job: dict[str, int], counts: int
) -> None:
    made = Made()
    made.job(1, "REQUEUED", 0, HOUR, **job)
    for stage in ("sent", "confirmed"):
        made.line(HOUR + 1, "requeue", stage=stage, rest=json.dumps({"job": named}, separators=(",", ":")))
    requeued = goodput_of(made.history, tmp_path)["first_order"]["by_end"][2]
    assert (requeued["ended"], requeued["jobs"]) == ("requeued", counts)


def test_loss_is_capped_at_runtime_and_half_checkpoint(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "NODE_FAIL", 0, 600)
    made.job(2, "NODE_FAIL", 0, HOUR)
    made.job(3, "NODE_FAIL", HOUR, 0)  # it ends before it starts
    assert goodput_of(made.history, tmp_path / "a")["first_order"]["gpu_seconds"] == 8 * (600 + 1800)
    answer = goodput_of(made.history, tmp_path / "b", checkpoint=600.0)
    assert (answer["first_order"]["jobs"], answer["first_order"]["gpu_seconds"]) == (3, 8 * (300 + 300))
    assert answer["loss_at_most_seconds"] == 300


def test_job_ended_repeatedly_by_nodes_is_requeue_loop(tmp_path: Path) -> None:
    made = Made()
    for number in range(5):
        made.job(10 + number, "NODE_FAIL", number * HOUR, number * HOUR + 1800, "ab", job_id=1)
    made.job(2, "PREEMPTED", 0, HOUR - 30, "c")
    made.preempted(HOUR - 30, 2, 1)
    for number in range(4):
        made.job(20 + number, "NODE_FAIL", number * HOUR, number * HOUR + 1800, "e", job_id=3)
    answer = goodput_of(made.history, tmp_path)
    (loop,) = answer["requeue_loops"]
    assert (loop["job_id"], loop["ends"], loop["gpus"]) == (1, 5, 16)
    assert (loop["preemptions"], loop["preempted_gpus"]) == (1, 8)
    assert loop["first_order_gpu_seconds"] == 5 * 16 * 1800
    assert loop["second_order_gpu_seconds"] == 8 * 1800
    assert goodput.has_findings(answer)
    assert "5 times" in text_of(answer, Page())


def test_goodput_sums_match_totals_in_any_row_order(tmp_path: Path) -> None:
    lost = 0
    for seed in range(3):
        made = history(Random(seed), 40)
        answer = goodput_of(made, tmp_path / f"{seed}a")
        for order, ways in (("first_order", "by_end"), ("second_order", "by_how")):
            totals = answer[order]
            for key in ("jobs", "gpu_seconds"):
                assert sum(entry[order][key] for entry in answer["by_size"]) == totals[key]
                assert sum(entry[key] for entry in totals[ways]) == totals[key]
            lost += totals["jobs"]
        (tmp_path / f"{seed}b").mkdir()
        with open_study(write_parquet(made, tmp_path / f"{seed}b", 3, Random(seed)), BEGIN, END) as shuffled:
            assert goodput.goodput(shuffled) == answer
    assert lost > 10


def test_choice_selects_victims(tmp_path: Path) -> None:
    made = history_after_node_fail().history
    for job in made["jobs"]:
        job["account"] = "speech" if job["job_id"] == 2 else "vision"
    with study(made, tmp_path, Choice(account="speech")) as opened:
        answer = goodput.goodput(opened)
    assert (answer["first_order"]["jobs"], answer["second_order"]["jobs"]) == (0, 1)


def test_jobs_with_unknown_gpus_lose_nothing_and_are_noted(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "NODE_FAIL", 0, HOUR, gpus=None)
    made.job(2, "NODE_FAIL", None, HOUR, "")
    answer = goodput_of(made.history, tmp_path)
    assert (answer["first_order"]["jobs"], answer["first_order"]["gpu_seconds"]) == (2, 0)
    assert any(re.match(r"1 job .* unknown number of GPUs", note) for note in answer["notes"])


def test_goodput_rejects_empty_store_and_invalid_flags(tmp_path: Path) -> None:
    empty: History = {name: [] for name in TABLES}
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        goodput_of(empty, tmp_path / "a")
    for flags in ({"checkpoint": 0.0}, {"checkpoint": float("nan")}, {"price": -1.0}, {"price": float("inf")}):
        with pytest.raises(WrongChoice, match="--"):
            goodput_of(history_after_node_fail().history, tmp_path / "b", **flags)


def test_running_job_has_lost_nothing(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "RUNNING", 0, None)
    answer = goodput_of(made.history, tmp_path)
    assert (answer["first_order"]["jobs"], answer["by_size"], answer["requeue_loops"]) == (0, [], [])


def test_size_classes_match_those_of_states(tmp_path: Path) -> None:
    made = Made()
    for number, gpus in enumerate([None, 0, *(2**k + d for k in range(17) for d in (-1, 0, 1))]):
        made.job(number + 1, f"S{number}", 0, 60, gpus=gpus)
    with study(made.history, tmp_path) as opened:
        opened.compute_tables("states")
        states_rows = opened.database.rows("SELECT state, gpus_up_to FROM states ORDER BY state")
        own_rows = opened.database.rows(
            f"SELECT state, {size_class_sql('gpus')} AS gpus_up_to FROM jobs ORDER BY state"
        )
    assert own_rows == states_rows
    assert [format_size(size) for size in (None, 0, 1, 2, 4, 2048)] == [
        *("not known", "0", "1", "2", "3-4"),
        "1,025-2,048",
    ]
