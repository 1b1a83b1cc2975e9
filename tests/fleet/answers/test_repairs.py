"""Tests of `repairs`: which remedy ended a fault, whether it lasted, and the suggested first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fleet_signals import BEGIN, DAY, HistoryBuilder, study
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.answers.document import Unanswerable

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.answers import repairs
    from healthd.fleet.views.repairs import view
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise

XID = "gpu_xid/119"
END = BEGIN + 40 * DAY


def fault(begin: int, cleared: int | None, by: str | None, node: str = "a", subject: str = "g0") -> Any:
    return repairs.Fault("c1", node, XID, subject, begin, cleared, by)


def document(made: HistoryBuilder, folder: Path) -> Any:
    with study(made, folder, begin=BEGIN, end=END) as opened:
        return repairs.repairs(opened)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu_reset: the uptime fell", "gpu_reset"),
        ("reboot", "reboot"),
        ("reboot: anew", "reboot"),
        ("repaired by root (uid 0)", "person"),
        ("pass", "check_passed"),
        ("window", "time"),
        ("others", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_remedy_follows_from_first_word(text: str | None, found: str) -> None:
    assert repairs.remedy(text) == found


def test_fault_that_opens_again_has_returned() -> None:
    found = repairs.find_ends([fault(1, 10, "reboot"), fault(25, 30, "reboot"), fault(50, None, None)])
    assert [(r.ended_at, r.returned_after) for r in found] == [(10, 15), (30, 20)]


def test_same_fault_on_other_part_or_node_has_not_returned() -> None:
    faults = [fault(1, 10, "reboot"), fault(25, 30, "reboot", subject="g1"), fault(25, 30, "reboot", node="b")]
    assert [r.returned_after for r in repairs.find_ends(faults)] == [None, None, None]


def test_fault_that_returns_during_boot_has_returned() -> None:
    """The daemon starts at 60 and ends the earlier fault; the kernel line is from 20."""
    found = repairs.find_ends([fault(1, 60, "reboot"), fault(20, None, None)])
    assert [r.returned_after for r in found] == [0]


def test_faults_that_end_together_are_one_repair() -> None:
    other = repairs.Fault("c1", "a", "gpu_xid/79", "g1", 2, 10, "reboot")
    found = repairs.merge_ends(repairs.find_ends([fault(1, 10, "reboot"), fault(25, 30, "reboot"), other]))
    assert [(r.ended_at, r.returned_after) for r in found] == [(10, 15), (30, None)]


def test_outage_around_repair_counts_once() -> None:
    found = repairs.find_ends([fault(1, 10, "reboot"), fault(100, 200, "reboot"), fault(300, 310, "reboot")])
    outages = repairs.by_node(
        [repairs.Outage("c1", "a", 2, 20, "healthd"), repairs.Outage("c1", "a", 305, None, "healthd")]
    )
    assert [repairs.outage_of(repair, outages) is None for repair in found] == [False, True, False]
    row = repairs.summary([*found, found[0]], outages, {}, 10_000)
    assert row["out_seconds"] == {"cases": 1, "still_out": 1, "median": 18, "p90": 18}


@pytest.mark.parametrize(
    ("until", "to_time", "lasted"),
    [
        (10 + 7 * DAY, 10 + 7 * DAY, True),
        (10 + 7 * DAY, 10 + 7 * DAY - 1, None),
        (10 + 7 * DAY - 1, 10 + 30 * DAY, None),
    ],
)
def test_repair_that_was_not_followed_is_neither_success_nor_failure(
    until: int, to_time: int, lasted: bool | None
) -> None:
    (repair,) = repairs.find_ends([fault(1, 10, "reboot")])
    assert repairs.lasts(repair, 7, {("c1", "a"): until}, to_time) is lasted


def test_repair_that_failed_counts_even_if_it_was_not_followed() -> None:
    repair = repairs.find_ends([fault(1, 10, "reboot"), fault(50, None, None)])[0]
    assert repairs.lasts(repair, 7, {("c1", "a"): 60}, 60) is False
    assert repairs.lasts(repair, 28, {}, 10**9) is False


def code_row(code: str, remedy: str, lasted: int, total: int, nodes: int = 9) -> dict[str, Any]:
    from healthd.fleet.statistics.wilson import wilson

    share = {"repairs": total, "lasted": lasted, "interval": wilson(lasted, total)}
    return {"code": code, "remedy": remedy, "nodes": nodes, "lasted_7_days": share}


def test_next_step_is_suggested_if_first_step_mostly_fails() -> None:
    rows = [
        code_row("a/1", "gpu_reset", 1, 20),
        code_row("a/2", "gpu_reset", 15, 20),
        code_row("a/3", "gpu_reset", 0, 5),
        code_row("a/4", "gpu_reset", 0, 20),
        code_row("a/4", "reboot", 0, 20),
        code_row("a/5", "reboot", 0, 20),
        code_row("a/6", "person", 0, 20),
        code_row("a/8", "gpu_reset", 0, 20, nodes=1),  # perhaps one bad GPU
        code_row("a/7", "gpu_reset", 95, 100),
        code_row("a/7", "reboot", 0, 20),  # only faults that the reset did not end
    ]
    assert repairs.suggested_steps(rows) == {"a/1": "reboot", "a/4": "person", "a/5": "person"}


def test_document_counts_repairs_of_each_remedy(tmp_path: Path) -> None:
    made = HistoryBuilder()
    nodes = ["a", "c", "d", "e", "f"]
    made.alive([*nodes, "b"], end=END)
    for node in nodes:
        for day in range(2, 5):
            begin = BEGIN + day * DAY
            made.condition(node, XID, begin, cleared=begin + 3600, cleared_by="gpu_reset: fell")
    made.condition("b", "gpu_xid/79", BEGIN + DAY, cleared=BEGIN + DAY + 7200, cleared_by="reboot")
    made.outage("b", BEGIN + DAY, BEGIN + DAY + 9000)
    found = document(made, tmp_path)
    by_remedy = {row["remedy"]: row for row in found["by_remedy"]}
    assert by_remedy["gpu_reset"]["repairs"] == 15
    assert by_remedy["gpu_reset"]["lasted_7_days"]["lasted"] == 5
    assert by_remedy["reboot"]["lasted_7_days"]["share"] == 1.0
    assert by_remedy["reboot"]["out_seconds"]["median"] == 9000
    assert found["suggested"] == {}, "5 of 15 may still be half of all"
    for node in nodes:
        for day in range(5, 9):
            begin = BEGIN + day * DAY
            made.condition(node, XID, begin, cleared=begin + 3600, cleared_by="gpu_reset: fell")
    found = document(made, tmp_path / "more")
    assert found["suggested"] == {XID: "reboot"}
    assert repairs.has_findings(found)
    described = view(found)
    assert described.details[0].lines == ("[repair]", f'first_step = {{ "{XID}" = "reboot" }}')
    for table in described.tables:
        assert {len(row) for row in table.cell_texts()} == {len(table.columns)}
    assert json.dumps([figure.spec for figure in described.figures], allow_nan=False)


@pytest.mark.parametrize(("domain", "resets"), [("00000001-0000-0000-0000-000000000001", 0), (None, 4)])
def test_fault_of_the_switch_side_is_no_repair(domain: str | None, resets: int, tmp_path: Path) -> None:
    made = HistoryBuilder()
    made.alive("abcde", end=END)
    for node in "abcd":
        times = {"cleared": BEGIN + DAY + 3600, "cleared_by": "gpu_reset: fell"}
        made.condition(node, "gpu_nvlink/inactive", BEGIN + DAY, nvlink_domain=domain, **times)
    made.condition("e", XID, BEGIN + DAY, cleared=BEGIN + DAY + 60, cleared_by="reboot", nvlink_domain=domain)
    by_remedy = {row["remedy"]: row["repairs"] for row in document(made, tmp_path)["by_remedy"]}
    assert (by_remedy.get("gpu_reset", 0), by_remedy["reboot"]) == (resets, 1)


def test_store_without_events_cannot_answer(tmp_path: Path) -> None:
    with pytest.raises(Unanswerable):
        document(HistoryBuilder(), tmp_path)


def test_period_without_faults_has_one_sentence(tmp_path: Path) -> None:
    made = HistoryBuilder()
    made.alive(["a"])
    found = document(made, tmp_path)
    assert (found["repairs"], len(view(found).sentences), view(found).figures) == (0, 1, ())


TIMES = st.integers(0, 1000)


@given(st.lists(st.tuples(TIMES, st.none() | TIMES, st.sampled_from([None, "pass", "reboot", "x"])), max_size=12))
def test_repairs_of_any_faults_return_after_they_end(rows: list[tuple[int, int | None, str | None]]) -> None:
    faults = [fault(begin, None if cleared is None else begin + cleared, by) for begin, cleared, by in rows]
    found = repairs.find_ends(faults)
    assert len(found) == sum(cleared is not None and by in ("pass", "reboot") for _, cleared, by in rows)
    assert all(r.returned_after is None or r.returned_after >= 0 for r in found)
    assert len(repairs.merge_ends(found)) <= len(found)
