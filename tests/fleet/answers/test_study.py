"""Tests of `open_study`: a store opened for one period and one choice of jobs and nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from fleet_history import BEGIN, END, History, history, row, write_parquet
from fleet_views import text_of

from healthd.common.page import Page
from healthd.fleet.answers import states
from healthd.fleet.answers.document import Unanswerable, WrongChoice
from healthd.fleet.answers.study import Choice, ChosenNode, Study, open_study
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python
SEEN_COLUMNS = (
    *("job_id", "node", "code", "subject", "severity", "kind", "state", "end_time", "first_seen", "last_seen"),
    *("moments", "from_events", "from_scrapes", "gpus", "nodes", "check_name", "db_index", "cluster"),
)
PARTITIONS = {1: "train", 2: "train,debug", 3: "debug", 4: None}


def two_node_history() -> History:
    """Return four ended jobs: 1 and 2 on a, 3 on a and b, 4 on b.

    Node a is an H100 in partition train; b is an A100 with fewer known facts.
    """
    made: History = {name: [] for name in TABLES}
    for number, nodes in ((1, "a"), (2, "a"), (3, "ab"), (4, "b")):
        times = {"submit_time": BEGIN, "start_time": BEGIN, "end_time": BEGIN + 3600 * number}
        owner = {"partition": PARTITIONS[number], "account": "vision" if number == 4 else "speech"}
        made["jobs"].append(
            row("jobs", cluster="c1", db_index=number, state="COMPLETED", gpus=8 * len(nodes), **times, **owner)
        )
        made["job_nodes"] += [row("job_nodes", cluster="c1", db_index=number, node=node, **times) for node in nodes]
    made["nodes"] = [
        row("nodes", cluster="c1", node="a", gpu_model="H100", partitions="train,idle", switch="leaf1"),
        row("nodes", cluster="c1", node="b", gpu_model="A100", switch="leaf2"),
        row("nodes", cluster="c2", node="a", gpu_model="A100", partitions="other", switch="leaf1"),
    ]
    return made


@contextmanager
def study(made: History, folder: Path, chosen: Choice | None = None) -> Iterator[Study]:
    folder.mkdir(exist_ok=True)
    with open_study(write_parquet(made, folder), BEGIN, END, chosen) as opened_study:
        yield opened_study


@pytest.mark.parametrize(
    ("chosen", "jobs", "nodes"),
    [
        (Choice(), [1, 2, 3, 4], ["c1/a", "c1/b", "c2/a"]),
        (Choice(cluster="c1"), [1, 2, 3, 4], ["c1/a", "c1/b"]),
        (Choice(partition="train"), [1, 2], ["c1/a"]),
        (Choice(partition="debug"), [2, 3], ["c1/b"]),
        (Choice(account="vision"), [4], ["c1/b"]),
        (Choice(model="H100"), [1, 2, 3], ["c1/a"]),
        (Choice(switch="leaf2"), [3, 4], ["c1/b"]),
        (Choice(model="A100", account="speech"), [3], ["c1/b"]),
        (Choice(partition="idle"), [], ["c1/a"]),
    ],
)
def test_choice_selects_jobs_and_nodes(tmp_path: Path, chosen: Choice, jobs: list[int], nodes: list[str]) -> None:
    with study(two_node_history(), tmp_path, chosen) as opened:
        found = opened.database.rows("SELECT db_index FROM chosen_jobs ORDER BY ALL").rows
        assert [index for (index,) in found] == jobs
        assert [f"{entry.cluster}/{entry.node}" for entry in opened.query("chosen_node_names", ChosenNode)] == nodes


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (
            Choice(partition="trian"),
            '--partition: the partition "trian" does not occur in the store; did you mean "train"?',
        ),
        (Choice(model="B200"), '--model: the model "B200" does not occur in the store; valid names: A100, H100'),
        (Choice(account="o'"), '--account: the account "o\'" does not occur in the store; valid names: speech, vision'),
    ],
)
def test_unknown_choice_is_rejected_with_known_names(tmp_path: Path, chosen: Choice, sentence: str) -> None:
    with pytest.raises(WrongChoice) as refused, study(two_node_history(), tmp_path, chosen):
        pass
    assert str(refused.value) == sentence


def test_study_names_missing_source(tmp_path: Path) -> None:
    empty: History = {name: [] for name in TABLES}
    with (
        study(empty, tmp_path) as opened,
        pytest.raises(Unanswerable, match="the store has no jobs: healthd fleet ingest --sacct"),
    ):
        states.states(opened)


def test_compute_tables_gives_same_table_in_any_order(tmp_path: Path) -> None:
    for seed in range(5):
        made = history(Random(seed))
        with study(made, tmp_path / f"{seed}a") as once, study(made, tmp_path / f"{seed}b") as twice:
            once.compute_tables("conditions")
            twice.compute_tables("seen_with_failures", "sightings", "conditions")
            whole = "SELECT * FROM conditions ORDER BY ALL"
            assert once.database.rows(whole) == twice.database.rows(whole)


SeenCondition = NamedTuple("Seen", [(name, Any) for name in SEEN_COLUMNS])


def test_query_with_other_parameters_keeps_table(tmp_path: Path) -> None:
    extra = 0
    for seed in range(8):
        with study(history(Random(seed), 20), tmp_path / str(seed)) as opened:
            wide = {row[:4] for row in opened.query("seen_with_failures", SeenCondition, before_seconds=2 * 86400)}
            opened.compute_tables("seen_with_failures")
            table = opened.database.rows("SELECT job_id, node, code, subject FROM seen_with_failures").rows
            usual = {row[:4] for row in opened.query("seen_with_failures", SeenCondition)}
            assert usual == set(table)
            assert usual <= wide
            extra += len(wide - usual)
            with pytest.raises(ValueError, match="no parameter gap_seconds"):
                opened.query("seen_with_failures", SeenCondition, gap_seconds=1)
    assert extra > 0


def test_seen_by_chance_is_rule_shifted_by_one_hour(tmp_path: Path) -> None:
    found = 0
    for seed in range(8):
        with study(history(Random(seed), 20), tmp_path / str(seed)) as opened:
            shifted = opened.query("seen_with_failures", SeenCondition, shift_seconds=-3600)
            assert opened.query("seen_by_chance", SeenCondition) == shifted
            found += len(shifted)
    assert found > 0


def test_states_shares_sum_to_one_and_text_has_each_state(tmp_path: Path) -> None:
    with study(two_node_history(), tmp_path) as opened:
        answer = states.states(opened)
    assert sum(entry["share_of_jobs"] for entry in answer["by_state"]) == pytest.approx(1)
    assert "COMPLETED     4  100.0 %" in text_of(answer, Page())
