"""Tests of the steps that healthd took itself: their ends, whether they lasted, and the suggested order."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fleet_signals import BEGIN, DAY, HistoryBuilder, study
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.answers import repair_steps, repairs
    from healthd.fleet.answers.repair_steps import Attempt, StepEvent, read_steps
    from healthd.fleet.views.repairs import view
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise

XID, GPU = "gpu_xid/119", "0000:1b:00.0"
END = BEGIN + 60 * DAY
NODES = ("a", "b", "c", "d", "e", "f")


def event(time: int, stage: str, id: str = "1-gpu_reset", node: str = "a", **fields: Any) -> StepEvent:
    step = id.partition("-")[2]
    rest = {"step": step, "causes": [f"{XID} {GPU}", "gpu_ecc/uncorrected"], "id": id, **fields}
    return StepEvent("c1", node, time, stage, json.dumps({key: value for key, value in rest.items() if value != ""}))


def attempt(end: str, ended_at: int = 100, step: str = "gpu_reset") -> Attempt:
    return Attempt("c1", "a", step, ((XID, GPU),), 50, end, ended_at)


def test_stages_of_one_id_are_one_attempt() -> None:
    found = read_steps([event(1, "claimed"), event(5, "taken"), event(9, "succeeded"), event(9, "taken", node="b")])
    assert found.attempts == [
        Attempt("c1", "a", "gpu_reset", ((XID, GPU), ("gpu_ecc/uncorrected", "")), 1, "succeeded", 9),
        Attempt("c1", "b", "gpu_reset", ((XID, GPU), ("gpu_ecc/uncorrected", "")), 9, "", 9),
    ]


def test_step_that_changed_nothing_is_no_attempt() -> None:
    only_claimed = [event(1, "claimed"), event(2, "stopped")]
    refused = [event(3, "claimed", "3-reboot"), event(4, "refused", "3-reboot")]
    left_out = [event(5, "failed", id="")]
    found = read_steps([*only_claimed, *refused, *left_out])
    assert (found.attempts, found.refused, found.gave_up) == ([], [4], [])


def test_step_that_could_not_be_taken_is_no_attempt() -> None:
    refused_by_driver = [event(1, "claimed"), event(2, "failed", was_taken=False)]
    left_out = [event(3, "failed", id="", step="gpu_reset", node="b", was_taken=False)]
    without_effect = [event(4, "claimed", "4-reboot"), event(5, "failed", "4-reboot", was_taken=True)]
    found = read_steps([*refused_by_driver, *left_out, *without_effect])
    assert [(each.step, each.end) for each in found.attempts] == [("reboot", "failed")]
    assert [(each.node, each.step, each.began) for each in found.impossible] == [
        ("a", "gpu_reset", 1),
        ("b", "gpu_reset", 3),
    ]


def test_given_up_repair_counts_for_each_code() -> None:
    gave_up = read_steps([event(1, "gave_up", id=""), event(2, "gave_up", id="", node="b")]).gave_up
    assert repair_steps.codes_given_up(gave_up) == {"gpu_ecc/uncorrected": 2, XID: 2}


@pytest.mark.parametrize(
    ("end", "returned_at", "until", "lasted"),
    [
        ("succeeded", None, 100 + 7 * DAY, True),
        ("succeeded", None, 99 + 7 * DAY, None),
        ("succeeded", 100 + 7 * DAY, 10**9, False),
        ("succeeded", 101 + 7 * DAY, 10**9, True),
        ("succeeded", 99, 10**9, True),
        ("failed", None, 100, False),
        ("stopped", 101, 10**9, None),
        ("", 101, 10**9, None),
    ],
)
def test_attempt_lasts_until_its_fault_returns(
    end: str, returned_at: int | None, until: int, lasted: bool | None
) -> None:
    began = {("c1", "a", XID, GPU): [50, *([returned_at] if returned_at else [])]}
    assert repair_steps.lasts(attempt(end), 7, began, until) is lasted


def test_fault_on_other_part_or_node_has_not_returned() -> None:
    began = {("c1", "a", XID, "0000:2b:00.0"): [101], ("c1", "b", XID, GPU): [101]}
    assert repair_steps.lasts(attempt("succeeded"), 7, began, 10**9) is True


@pytest.mark.parametrize(
    ("tried", "failing", "order"),
    [
        ((), (), ["gpu_reset", "reboot"]),
        (("gpu_reset",), ("gpu_reset",), ["reboot"]),
        (("reboot", "power_cycle"), (), ["gpu_reset", "reboot", "power_cycle"]),
        (("gpu_reset", "reboot"), ("gpu_reset", "reboot"), []),
    ],
)
def test_suggested_order_leaves_out_failing_steps(
    tried: tuple[str, ...], failing: tuple[str, ...], order: list[str]
) -> None:
    assert repair_steps.suggested_order(tried, failing) == order


class RepairHistory(HistoryBuilder):
    """A history with steps that healthd took."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = count(1)

    def step(self, node: str, begin: int, step: str, *stages: str, was_taken: bool = True) -> None:
        """Add the stages of one step, one hour apart, and the drain around them."""
        id = f"{next(self._ids)}-{step}"
        fields = {"id": id, "step": step, "causes": [f"{XID} {GPU}"]}
        for hour, stage in enumerate(stages):
            rest = json.dumps(fields | ({"was_taken": was_taken} if stage == "failed" else {}))
            self.line(node, begin + 3600 * hour, "repair", stage=stage, rest=rest)


def document(made: HistoryBuilder, folder: Path, begin: int = BEGIN) -> Any:
    with study(made, folder, begin=begin, end=END) as opened:
        return repairs.repairs(opened)


def made_history() -> RepairHistory:
    """Two resets fail on each node, and then a reboot succeeds."""
    made = RepairHistory()
    made.alive(NODES, end=END)
    for node in NODES:
        for day in (1, 11):
            begin = BEGIN + day * DAY
            made.condition(node, XID, begin, subject=GPU, cleared=begin + 20_000, cleared_by="reboot")
            made.outage(node, begin, begin + 7 * 3600)
            made.step(node, begin + 600, "gpu_reset", "claimed", "taken", "failed")
            made.step(node, begin + 4 * 3600, "reboot", "claimed", "taken", "succeeded")
    return made


def test_document_counts_attempts_and_suggests_order(tmp_path: Path) -> None:
    found = document(made_history(), tmp_path)
    steps = found["steps"]
    by_step = {row["step"]: row for row in steps["by_step"]}
    assert (steps["attempts"], by_step["gpu_reset"]["failed"], by_step["reboot"]["succeeded"]) == (24, 12, 12)
    assert by_step["gpu_reset"]["lasted_7_days"]["share"] == 0.0
    assert by_step["reboot"]["lasted_7_days"]["share"] == 1.0
    assert by_step["reboot"]["lasted_28_days"]["lasted"] == 6, "on day 11, the first reboot of each node fails"
    assert by_step["reboot"]["out_seconds"]["median"] == 7 * 3600
    assert [row["code"] for row in steps["by_code"]] == [XID, XID]
    assert (steps["failing"], steps["suggested_order"]) == (["gpu_reset"], ["reboot"])
    assert repairs.has_findings(found)
    described = view(found)
    assert described.details[-1].lines == ("[repair]", 'order = ["reboot"]')
    for table in described.tables:
        assert {len(row) for row in table.cell_texts()} == {len(table.columns)}


def test_document_has_attempts_of_the_period_only(tmp_path: Path) -> None:
    assert document(made_history(), tmp_path, begin=BEGIN + 5 * DAY)["steps"]["attempts"] == 12


def test_steps_that_could_not_be_taken_have_their_own_column(tmp_path: Path) -> None:
    made = made_history()
    for node in NODES:
        made.step(node, BEGIN + 31 * DAY, "power_cycle", "claimed", "failed", was_taken=False)
        made.step(node, BEGIN + 41 * DAY, "gpu_reset", "claimed", "failed", was_taken=False)
    found = document(made, tmp_path)
    steps, before = found["steps"], document(made_history(), tmp_path / "before")["steps"]
    by_step = {row["step"]: row for row in steps["by_step"]}
    assert (steps["attempts"], steps["impossible"]) == (24, 12)
    counts = {step: (row["attempts"], row["failed"], row["impossible"]) for step, row in by_step.items()}
    assert counts == {"gpu_reset": (12, 12, 6), "reboot": (12, 0, 0), "power_cycle": (0, 0, 6)}
    assert by_step["power_cycle"]["lasted_7_days"]["share"] is None
    for row in before["by_step"]:
        assert by_step[row["step"]]["lasted_7_days"] == row["lasted_7_days"]
    assert (steps["failing"], steps["suggested_order"]) == (before["failing"], before["suggested_order"])
    table = next(table for table in view(found).tables if table.title == "Steps taken by healthd")
    position = [column.title for column in table.columns].index("not possible")
    assert [row[position] for row in table.cell_texts()] == ["6", "0", "6"]
    assert not any("power cycle 0 times" in sentence for sentence in view(found).sentences)


def test_few_attempts_suggest_no_order(tmp_path: Path) -> None:
    made = RepairHistory()
    made.alive(NODES, end=END)
    made.step("a", BEGIN + DAY, "reboot", "claimed", "taken", "failed", "gave_up")
    made.step("b", BEGIN + DAY, "reboot", "claimed", "refused")
    found = document(made, tmp_path)
    steps = found["steps"]
    assert (steps["attempts"], steps["refused"], steps["gave_up"]) == (1, 1, 1)
    assert (steps["suggested_order"], repairs.has_findings(found)) == (None, False)
    assert len(view(found).sentences) == 4


REST = st.text(max_size=40) | st.builds(
    lambda **fields: json.dumps(fields),
    id=st.none() | st.sampled_from(["1", "2"]) | st.integers(),
    was_taken=st.none() | st.booleans() | st.integers(),
    causes=st.none() | st.text(max_size=9) | st.lists(st.none() | st.text(max_size=9), max_size=3),
)
STAGES = st.sampled_from(["claimed", "refused", "taken", "failed", "succeeded", "gave_up", "stopped"])


@given(st.lists(st.tuples(STAGES, REST), max_size=12))
def test_read_steps_accepts_any_stages(stages: list[tuple[str, str]]) -> None:
    found = read_steps([StepEvent("c1", "a", time, stage, rest) for time, (stage, rest) in enumerate(stages)])
    counted = (found.attempts, found.impossible, found.gave_up, found.refused)
    assert sum(map(len, counted)) <= len(stages)
    assert all(attempt.began <= attempt.ended_at for attempt in found.attempts)
