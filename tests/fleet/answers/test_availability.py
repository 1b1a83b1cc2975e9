"""Tests of `availability`: time in service, out of service, planned and not observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, DAY, END, HOUR, History, history, row, write
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
    with open_study(write(made, folder), BEGIN, END) as asked:
        yield asked


def nothing() -> History:
    return {name: [] for name in TABLES}


def node_state(start: int, end: int | None, state: str, set_by: str | None, node: str = "a") -> dict[str, Any]:
    times = {"start_time": BEGIN + start, "end_time": None if end is None else BEGIN + end}
    return row("node_states", cluster="c1", node=node, state=state, set_by=set_by, **times)


def told_by_slurm(made: History, first: int = 0, last: int = LENGTH) -> History:
    """Record that Slurm's node states were read for this time."""
    made["ingests"].append(
        row("ingests", cluster="c1", source="node_states", name="f", from_time=BEGIN + first, to_time=BEGIN + last)
    )
    return made


def one_node(*states: dict[str, Any], **more: list[dict[str, Any]]) -> History:
    made = told_by_slurm({**nothing(), **more})
    made["nodes"] = [row("nodes", cluster="c1", node="a", gpu_model="H100", gpus=8, rack="r1")]
    made["node_states"] = list(states)
    return made


def asked_of(made: History, folder: Path, **flags: Any) -> Document:
    with study(made, folder) as asked:
        return availability.availability(asked, **flags)


def reserved(begin: int, end: int | None, maintenance: bool, name: str = "m") -> dict[str, Any]:
    times = {"start_time": BEGIN + begin, "end_time": None if end is None else BEGIN + end}
    return row("reservations", cluster="c1", name=name, node="a", maintenance=maintenance, **times)


# --- each second has one kind


@given(
    st.fixed_dictionaries(dict.fromkeys(PLANNED_KINDS, SPANS)),
    st.fixed_dictionaries(dict.fromkeys(OUT_KINDS, SPANS)),
    SPANS,
)
def test_each_second_of_a_node_is_counted_once(
    planned: dict[str, list[Span]], out: dict[str, list[Span]], known: list[Span]
) -> None:
    parts = divide_period((0, 100), NodeTimes(planned, out, [], known))
    assert set(parts) == {*PLANNED_KINDS, *SHARE_KINDS}
    assert sum(parts.values()) == 100
    assert all(seconds >= 0 for seconds in parts.values())


@pytest.mark.parametrize("seed", range(8))
def test_the_shares_of_each_node_rack_model_and_of_the_fleet_sum_to_one(tmp_path: Path, seed: int) -> None:
    made = told_by_slurm(history(Random(seed), 30), LENGTH // 3, LENGTH // 2)
    told = asked_of(made, tmp_path)
    for one in (told["fleet"], *told["by_model"], *told["by_rack"], *told["nodes"]):
        assert one["counted_seconds"] + sum(one["planned"].values()) == one["seconds"]
        if one["counted_seconds"]:
            assert sum(one["shares"].values()) == pytest.approx(1)
        else:
            assert set(one["shares"].values()) == {None}
    assert sum(one["seconds"] for one in told["nodes"]) == told["fleet"]["seconds"] == len(told["nodes"]) * LENGTH


def test_the_order_of_rows_changes_nothing(tmp_path: Path) -> None:
    made = history(Random(4), 30)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        open_study(write(made, tmp_path / "a"), BEGIN, END) as once,
        open_study(write(made, tmp_path / "b", 3, Random(1)), BEGIN, END) as shuffled,
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
def test_how_a_node_is_out_is_who_began_it_and_the_state_that_slurm_kept(
    by_whom: str, state: str | None, kind: str
) -> None:
    assert outage_kind(by_whom, state) == kind


def test_a_node_without_a_word_is_up_where_slurm_was_read_and_else_not_observed(tmp_path: Path) -> None:
    made = nothing()
    made["nodes"] = [row("nodes", cluster="c1", node="a"), row("nodes", cluster="c2", node="b")]
    made["node_states"] = [node_state(-2 * DAY, -DAY, "DOWN*", "slurm", "c")]
    told = asked_of(told_by_slurm(made, 0, LENGTH // 4), tmp_path)
    a, c, b = told["nodes"]
    assert (a["shares"]["up"], a["shares"]["not_observed"], a["availability"]) == (0.25, 0.75, 1.0)
    assert (b["shares"]["up"], b["shares"]["not_observed"], b["availability"]) == (0.0, 1.0, None)
    assert c["shares"] == a["shares"]
    assert any("not read for 75.0 % of the time of c1" in note for note in told["notes"])


def test_a_node_that_is_out_still_is_out_until_the_last_that_was_told_and_not_observed_from_then_on(
    tmp_path: Path,
) -> None:
    made = nothing()
    made["nodes"] = [row("nodes", cluster="c1", node="a"), row("nodes", cluster="c1", node="b")]
    made["node_states"] = [node_state(0, None, "DRAIN", "person")]
    told = asked_of(told_by_slurm(made, 0, LENGTH // 4), tmp_path)
    a, b = told["nodes"]
    assert (a["shares"]["drained_people"], a["shares"]["not_observed"], a["availability"]) == (0.25, 0.75, 0.0)
    assert (b["shares"]["up"], b["shares"]["not_observed"]) == (0.25, 0.75)
    assert told["fleet"]["availability"] == 0.5
    assert a["repair"]["still_out"] == 1


def test_a_node_that_is_down_in_its_maintenance_is_planned_away(tmp_path: Path) -> None:
    made = one_node(node_state(0, 2 * HOUR, "DOWN*", "slurm"), reservations=[reserved(0, HOUR, True)])
    told = asked_of(made, tmp_path)
    (node,) = told["nodes"]
    assert node["planned"] == {"maintenance": HOUR, "reservation": 0}
    assert node["shares"]["down"] == pytest.approx(HOUR / (LENGTH - HOUR))
    assert node["repair"]["mean_seconds"] == HOUR
    assert [(one["what"], one["name"], one["node_seconds"]) for one in told["planned"]] == [("maintenance", "m", HOUR)]


def test_an_outage_in_maintenance_alone_is_no_time_to_repair(tmp_path: Path) -> None:
    made = one_node(node_state(HOUR, 2 * HOUR, "DOWN*", "slurm"), reservations=[reserved(0, 3 * HOUR, True)])
    told = asked_of(made, tmp_path)
    assert (told["fleet"]["repair"]["ended"], told["fleet"]["availability"]) == (0, 1.0)


def test_another_reservation_counts_only_where_it_is_asked_to(tmp_path: Path) -> None:
    made = one_node(node_state(0, HOUR, "DOWN*", "slurm"), reservations=[reserved(0, LENGTH // 2, False, "team")])
    left_out, counted = asked_of(made, tmp_path / "a"), asked_of(made, tmp_path / "b", count_reservations=True)
    assert left_out["fleet"]["planned"] == {"maintenance": 0, "reservation": LENGTH // 2}
    assert left_out["fleet"]["availability"] == 1.0
    assert any("--count-reservations" in note for note in left_out["notes"])
    assert counted["fleet"]["planned"] == {"maintenance": 0, "reservation": 0}
    assert counted["fleet"]["availability"] == pytest.approx(1 - HOUR / LENGTH)
    assert counted["planned"] == []


def test_a_node_that_was_reserved_all_the_time_has_no_availability(tmp_path: Path) -> None:
    told = asked_of(one_node(reservations=[reserved(-DAY, None, True)]), tmp_path, sla=99.5)
    assert told["fleet"]["availability"] is None
    assert told["fleet"]["shares"]["up"] is None
    assert not availability.has_findings(told)
    assert "-" in text_of(told, Page())


def test_a_spell_that_is_not_over_is_out_until_the_end_and_in_no_time_to_repair(tmp_path: Path) -> None:
    told = asked_of(one_node(node_state(LENGTH - HOUR, None, "DRAIN", "person")), tmp_path)
    (node,) = told["nodes"]
    assert node["shares"]["drained_people"] == pytest.approx(HOUR / LENGTH)
    assert (node["repair"]["ended"], node["repair"]["still_out"], node["repair"]["mean_seconds"]) == (0, 1, None)
    assert "Nodes were out 1 time (1 not over yet)." in text_of(told, Page())


def test_spells_that_overlap_count_each_second_once(tmp_path: Path) -> None:
    states = (
        node_state(0, 2 * HOUR, "DRAIN", "person"),
        node_state(HOUR, 3 * HOUR, "DOWN*", "slurm"),
        node_state(5 * HOUR, 4 * HOUR, "DOWN*", "slurm"),
    )
    (node,) = asked_of(one_node(*states), tmp_path)["nodes"]
    out = sum(node["shares"][kind] for kind in OUT_KINDS)
    assert out == pytest.approx(3 * HOUR / LENGTH)
    assert node["repair"]["ended"] == 1


def test_a_spell_counts_to_the_time_to_repair_as_a_whole_where_it_ended_in_the_time() -> None:
    told = NodeTimes(
        outages=[("down", -50, 10), ("down", 20, 90), ("down", 95, 130), ("down", -9, -5), ("down", 300, None)]
    )
    assert repair_times((0, 100), told) == [("down", 60), ("down", 70), ("down", None)]


@pytest.mark.parametrize(
    ("numbers", "at", "value"), [([], 0.5, None), ([7], 0.9, 7), ([1, 2], 0.5, 1.5), (list(range(11)), 0.9, 9)]
)
def test_a_quantile_lies_between_two_numbers_in_proportion(numbers: list[int], at: float, value: float | None) -> None:
    assert quantile(numbers, at) == value


# --- the SLA, and questions without an answer


def test_the_fleet_a_model_and_a_rack_below_the_sla_are_named_and_found(tmp_path: Path) -> None:
    made = one_node(node_state(0, LENGTH // 10, "DOWN*", "slurm"))
    made["nodes"].append(row("nodes", cluster="c1", node="b", gpu_model="A100", rack="r2"))
    told = asked_of(made, tmp_path / "a", sla=97)
    assert [(one["of"], one["name"]) for one in told["sla"]["below"]] == [
        ("fleet", None),
        ("model", "H100"),
        ("rack", "r1"),
    ]
    assert availability.has_findings(told)
    assert "Below 97 %: the fleet (95.00 %), model H100 (90.00 %), rack r1 (90.00 %)." in text_of(told, Page())
    assert not availability.has_findings(asked_of(made, tmp_path / "b", sla=90))
    assert not availability.has_findings(asked_of(made, tmp_path / "c"))


@pytest.mark.parametrize("sla", [-1.0, 0.995, 100.5, float("nan")])
def test_an_sla_that_is_no_percentage_is_refused(tmp_path: Path, sla: float) -> None:
    with pytest.raises(WrongChoice, match="--sla"):
        asked_of(one_node(), tmp_path, sla=sla)


def test_a_store_that_was_told_nothing_of_nodes_cannot_answer(tmp_path: Path) -> None:
    made = nothing()
    made["nodes"] = [row("nodes", cluster="c1", node="a")]
    with pytest.raises(Unanswerable, match="the store has no node states and no events: healthd fleet ingest"):
        asked_of(made, tmp_path)


def test_a_choice_that_leaves_no_node_is_a_sentence(tmp_path: Path) -> None:
    told = asked_of(one_node(), tmp_path)
    empty = {**told, "nodes": []}
    assert "No node is known." in text_of(empty, Page())


def test_an_availability_is_not_rounded_up() -> None:
    assert format_availability(0.99999) == "99.99 %"
