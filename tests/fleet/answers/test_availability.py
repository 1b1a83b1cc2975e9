"""Tests of `availability`: time in service, out of service, planned and not observed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, DAY, END, HOUR, History, history, row, write_parquet
from fleet_views import text_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet.answers import availability
from healthd.fleet.answers.availability import (
    OUT_KINDS,
    PLANNED_KINDS,
    SHARE_KINDS,
    NodeTimes,
    divide_period,
    outage_kind,
    quantile,
    repair_times,
)
from healthd.fleet.answers.document import Document, Unanswerable, WrongChoice
from healthd.fleet.answers.study import Study, open_study
from healthd.fleet.statistics.spans import Span
from healthd.fleet.tables import TABLES
from healthd.fleet.views.availability import format_availability

pytestmark = pytest.mark.one_python

SPANS = st.lists(st.tuples(st.integers(-20, 120), st.integers(-20, 120)), max_size=4)
LENGTH = END - BEGIN


@contextmanager
def study(made: History, folder: Path) -> Iterator[Study]:
    folder.mkdir(exist_ok=True)
    with open_study(write_parquet(made, folder), BEGIN, END) as opened:
        yield opened


def empty_history() -> History:
    return {name: [] for name in TABLES}


def node_state(start: int, end: int | None, state: str, set_by: str | None, node: str = "a") -> dict[str, Any]:
    times = {"start_time": BEGIN + start, "end_time": None if end is None else BEGIN + end}
    return row("node_states", cluster="c1", node=node, state=state, set_by=set_by, **times)


def with_slurm_record(made: History, first: int = 0, last: int = LENGTH) -> History:
    """Record that Slurm's node states were read for this time."""
    made["ingests"].append(
        row("ingests", cluster="c1", source="node_states", name="f", from_time=BEGIN + first, to_time=BEGIN + last)
    )
    return made


def single_node(*states: dict[str, Any], **tables: list[dict[str, Any]]) -> History:
    made = with_slurm_record({**empty_history(), **tables})
    made["nodes"] = [row("nodes", cluster="c1", node="a", gpu_model="H100", gpus=8, rack="r1")]
    made["node_states"] = list(states)
    return made


def availability_of(made: History, folder: Path, **flags: Any) -> Document:
    with study(made, folder) as opened:
        return availability.availability(opened, **flags)


def reservation(begin: int, end: int | None, maintenance: bool, name: str = "m") -> dict[str, Any]:
    times = {"start_time": BEGIN + begin, "end_time": None if end is None else BEGIN + end}
    return row("reservations", cluster="c1", name=name, node="a", maintenance=maintenance, **times)


# --- each second has one kind


@given(
    st.fixed_dictionaries(dict.fromkeys(PLANNED_KINDS, SPANS)),
    st.fixed_dictionaries(dict.fromkeys(OUT_KINDS, SPANS)),
    SPANS,
)
def test_divide_period_counts_each_second_once(
    planned: dict[str, list[Span]], out: dict[str, list[Span]], known: list[Span]
) -> None:
    parts = divide_period((0, 100), NodeTimes(planned, out, [], known))
    assert set(parts) == {*PLANNED_KINDS, *SHARE_KINDS}
    assert sum(parts.values()) == 100
    assert all(seconds >= 0 for seconds in parts.values())


@pytest.mark.parametrize("seed", range(8))
def test_shares_of_each_group_sum_to_one(tmp_path: Path, seed: int) -> None:
    made = with_slurm_record(history(Random(seed), 30), LENGTH // 3, LENGTH // 2)
    answer = availability_of(made, tmp_path)
    for group in (answer["fleet"], *answer["by_model"], *answer["by_rack"], *answer["nodes"]):
        assert group["counted_seconds"] + sum(group["planned"].values()) == group["seconds"]
        if group["counted_seconds"]:
            assert sum(group["shares"].values()) == pytest.approx(1)
        else:
            assert set(group["shares"].values()) == {None}
    assert (
        sum(group["seconds"] for group in answer["nodes"])
        == answer["fleet"]["seconds"]
        == len(answer["nodes"]) * LENGTH
    )


def test_availability_ignores_order_of_rows(tmp_path: Path) -> None:
    made = history(Random(4), 30)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        open_study(write_parquet(made, tmp_path / "a"), BEGIN, END) as once,
        open_study(write_parquet(made, tmp_path / "b", 3, Random(1)), BEGIN, END) as shuffled,
    ):
        assert availability.availability(once) == availability.availability(shuffled)


# --- outages and reservations


@pytest.mark.parametrize(
    ("by_whom", "state", "kind"),
    [
        ("healthd", "DRAIN", "drained_healthd"),
        ("healthd", None, "drained_healthd"),
        ("person", "DRAIN", "drained_people"),
        ("person", "DOWN", "drained_people"),
        ("slurm", "DRAIN", "drained_slurm"),
        ("slurm", "DOWN*", "down"),
        ("slurm", "DOWN*+DRAIN", "down"),
        ("unknown", "DRAINED", "drained_unknown"),
        ("unknown", None, "down"),
    ],
)
def test_outage_kind_uses_setter_and_state(by_whom: str, state: str | None, kind: str) -> None:
    assert outage_kind(by_whom, state) == kind


def test_node_without_states_is_up_in_read_periods(tmp_path: Path) -> None:
    made = empty_history()
    made["nodes"] = [row("nodes", cluster="c1", node="a"), row("nodes", cluster="c2", node="b")]
    made["node_states"] = [node_state(-2 * DAY, -DAY, "DOWN*", "slurm", "c")]
    answer = availability_of(with_slurm_record(made, 0, LENGTH // 4), tmp_path)
    a, c, b = answer["nodes"]
    assert (a["shares"]["up"], a["shares"]["not_observed"], a["availability"]) == (0.25, 0.75, 1.0)
    assert (b["shares"]["up"], b["shares"]["not_observed"], b["availability"]) == (0.0, 1.0, None)
    assert c["shares"] == a["shares"]
    assert any(re.search(r" 75\.0 % .* c1\b", note) for note in answer["notes"])


def test_open_outage_lasts_until_end_of_coverage(
    tmp_path: Path,
) -> None:
    made = empty_history()
    made["nodes"] = [row("nodes", cluster="c1", node="a"), row("nodes", cluster="c1", node="b")]
    made["node_states"] = [node_state(0, None, "DRAIN", "person")]
    answer = availability_of(with_slurm_record(made, 0, LENGTH // 4), tmp_path)
    a, b = answer["nodes"]
    assert (a["shares"]["drained_people"], a["shares"]["not_observed"], a["availability"]) == (0.25, 0.75, 0.0)
    assert (b["shares"]["up"], b["shares"]["not_observed"]) == (0.25, 0.75)
    assert answer["fleet"]["availability"] == 0.5
    assert a["repair"]["still_out"] == 1


def test_downtime_in_maintenance_counts_as_planned(tmp_path: Path) -> None:
    made = single_node(node_state(0, 2 * HOUR, "DOWN*", "slurm"), reservations=[reservation(0, HOUR, True)])
    answer = availability_of(made, tmp_path)
    (node,) = answer["nodes"]
    assert node["planned"] == {"maintenance": HOUR, "reservation": 0}
    assert node["shares"]["down"] == pytest.approx(HOUR / (LENGTH - HOUR))
    assert node["repair"]["mean_seconds"] == HOUR
    assert [(entry["what"], entry["name"], entry["node_seconds"]) for entry in answer["planned"]] == [
        ("maintenance", "m", HOUR)
    ]


def test_outage_within_maintenance_is_no_repair(tmp_path: Path) -> None:
    made = single_node(node_state(HOUR, 2 * HOUR, "DOWN*", "slurm"), reservations=[reservation(0, 3 * HOUR, True)])
    answer = availability_of(made, tmp_path)
    assert (answer["fleet"]["repair"]["ended"], answer["fleet"]["availability"]) == (0, 1.0)


def test_reservation_counts_only_with_count_reservations(tmp_path: Path) -> None:
    made = single_node(node_state(0, HOUR, "DOWN*", "slurm"), reservations=[reservation(0, LENGTH // 2, False, "team")])
    left_out, counted = (
        availability_of(made, tmp_path / "a"),
        availability_of(made, tmp_path / "b", count_reservations=True),
    )
    assert left_out["fleet"]["planned"] == {"maintenance": 0, "reservation": LENGTH // 2}
    assert left_out["fleet"]["availability"] == 1.0
    assert any("--count-reservations" in note for note in left_out["notes"])
    assert counted["fleet"]["planned"] == {"maintenance": 0, "reservation": 0}
    assert counted["fleet"]["availability"] == pytest.approx(1 - HOUR / LENGTH)
    assert counted["planned"] == []


def test_node_reserved_throughout_has_no_availability(tmp_path: Path) -> None:
    answer = availability_of(single_node(reservations=[reservation(-DAY, None, True)]), tmp_path, sla=99.5)
    assert answer["fleet"]["availability"] is None
    assert answer["fleet"]["shares"]["up"] is None
    assert not availability.has_findings(answer)
    assert "-" in text_of(answer, Page())


def test_open_outage_counts_as_out_but_not_as_repair(tmp_path: Path) -> None:
    answer = availability_of(single_node(node_state(LENGTH - HOUR, None, "DRAIN", "person")), tmp_path)
    (node,) = answer["nodes"]
    assert node["shares"]["drained_people"] == pytest.approx(HOUR / LENGTH)
    assert (node["repair"]["ended"], node["repair"]["still_out"], node["repair"]["mean_seconds"]) == (0, 1, None)
    assert " 1 time (1 still out)." in text_of(answer, Page())


def test_overlapping_outages_count_each_second_once(tmp_path: Path) -> None:
    states = (
        node_state(0, 2 * HOUR, "DRAIN", "person"),
        node_state(HOUR, 3 * HOUR, "DOWN*", "slurm"),
        node_state(5 * HOUR, 4 * HOUR, "DOWN*", "slurm"),
    )
    (node,) = availability_of(single_node(*states), tmp_path)["nodes"]
    out = sum(node["shares"][kind] for kind in OUT_KINDS)
    assert out == pytest.approx(3 * HOUR / LENGTH)
    assert node["repair"]["ended"] == 1


def test_repair_times_include_whole_outages_ending_in_period() -> None:
    times = NodeTimes(
        outages=[("down", -50, 10), ("down", 20, 90), ("down", 95, 130), ("down", -9, -5), ("down", 300, None)]
    )
    assert repair_times((0, 100), times) == [("down", 60), ("down", 70), ("down", None)]


@pytest.mark.parametrize(
    ("numbers", "at", "value"), [([], 0.5, None), ([7], 0.9, 7), ([1, 2], 0.5, 1.5), (list(range(11)), 0.9, 9)]
)
def test_quantile_interpolates_between_values(numbers: list[int], at: float, value: float | None) -> None:
    assert quantile(numbers, at) == value


# --- the SLA, and questions without an answer


def test_sla_names_fleet_model_and_rack_below_it(tmp_path: Path) -> None:
    made = single_node(node_state(0, LENGTH // 10, "DOWN*", "slurm"))
    made["nodes"].append(row("nodes", cluster="c1", node="b", gpu_model="A100", rack="r2"))
    answer = availability_of(made, tmp_path / "a", sla=97)
    assert [(entry["of"], entry["name"]) for entry in answer["sla"]["below"]] == [
        ("fleet", None),
        ("model", "H100"),
        ("rack", "r1"),
    ]
    assert availability.has_findings(answer)
    text = text_of(answer, Page())
    assert re.search(r"97 %: .*fleet \(95\.00 %\), .*H100 \(90\.00 %\), .*r1 \(90\.00 %\)", text)
    assert not availability.has_findings(availability_of(made, tmp_path / "b", sla=90))
    assert not availability.has_findings(availability_of(made, tmp_path / "c"))


@pytest.mark.parametrize("sla", [-1.0, 0.995, 100.5, float("nan")])
def test_sla_rejects_invalid_percentage(tmp_path: Path, sla: float) -> None:
    with pytest.raises(WrongChoice, match="--sla"):
        availability_of(single_node(), tmp_path, sla=sla)


def test_availability_needs_node_states_or_events(tmp_path: Path) -> None:
    made = empty_history()
    made["nodes"] = [row("nodes", cluster="c1", node="a")]
    with pytest.raises(Unanswerable, match="the store has no node states and no events: healthd fleet ingest"):
        availability_of(made, tmp_path)


def test_view_without_nodes_is_one_sentence(tmp_path: Path) -> None:
    answer = availability_of(single_node(), tmp_path)
    empty = {**answer, "nodes": []}
    assert "No nodes " in text_of(empty, Page())


def test_format_availability_does_not_round_up() -> None:
    assert format_availability(0.99999) == "99.99 %"
