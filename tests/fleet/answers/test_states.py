"""Tests of `states`: outcomes of jobs and use of GPU time."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, END, HOUR, History, history, row
from fleet_views import text_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet.answers import states
from healthd.fleet.answers.document import Document, Unanswerable, WrongChoice
from healthd.fleet.answers.states import Outcome, gpu_use, outcomes, share_difference
from healthd.fleet.answers.study import Choice
from healthd.fleet.statistics.wilson import wilson
from healthd.fleet.tables import TABLES
from tests.fleet.answers.test_goodput import Made, study

pytestmark = pytest.mark.one_python
LENGTH = END - BEGIN


def states_of(made: History, folder: Path, chosen: Choice | None = None, **flags: Any) -> Document:
    with study(made, folder, chosen) as opened:
        return states.states(opened, **flags)


def with_nodes(made: Made, names: str = "ab", until: int = LENGTH) -> History:
    """Add nodes of 8 GPUs, and that jobs were read from the start of the period until `until`."""
    made.history["nodes"] = [row("nodes", cluster="c1", node=name, gpus=8) for name in names]
    made.history["ingests"] = [
        row("ingests", cluster="c1", source="sacct", name="d", from_time=BEGIN, to_time=BEGIN + until, read_time=END)
    ]
    return made.history


@pytest.mark.parametrize("seed", range(6))
def test_all_shares_sum_to_one(tmp_path: Path, seed: int) -> None:
    answer = states_of(history(Random(seed), 40), tmp_path, split=(BEGIN + END) // 2, large=1)
    for rows in (answer["by_state"], answer["by_size"]):
        assert sum(entry["share_of_jobs"] for entry in rows) == pytest.approx(1)
        if answer["by_state"][0]["gpu_seconds"]:
            assert sum(entry["share_of_gpu_time"] for entry in rows) == pytest.approx(1)
    for size in answer["by_size"]:
        assert sum(entry["share_of_jobs"] for entry in size["by_state"]) == pytest.approx(1)
        assert sum(entry["jobs"] for entry in size["by_state"]) == size["jobs"]
    infrastructure = answer["infrastructure"]
    for key in ("jobs", "gpu_seconds", "runtime_seconds"):
        assert sum(entry[key] for entry in infrastructure["by_end"]) == infrastructure[key]
    for side in (answer["split"]["before"], answer["split"]["after"]):
        assert sum(entry["jobs"] for entry in side["by_state"]) == side["jobs"]


def test_infrastructure_share_covers_jobs_runtime_and_gpu_time(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "NODE_FAIL", 0, 3 * HOUR, "ab")
    for number in range(2, 5):
        made.job(number, "COMPLETED", 0, HOUR, "c")
    answer = states_of(made.history, tmp_path)
    found = answer["infrastructure"]
    assert (found["share_of_jobs"], found["share_of_runtime"]) == (0.25, 0.5)
    assert found["share_of_gpu_time"] == pytest.approx(48 / 72)
    assert re.search(r" 50\.0 % of the runtime .* 66\.7 % of the GPU time", text_of(answer, Page(200)))


def test_utilisation_and_goodput_cover_known_gpus_and_times(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", -HOUR, 2 * HOUR, "a")  # one hour is before the period
    made.job(2, "PREEMPTED", 0, HOUR, "b")
    made.job(3, "RUNNING", 3 * HOUR, None, "b")  # counts until jobs were last read
    made.job(4, "COMPLETED", 0, HOUR, "x")  # on an unknown node
    use = states_of(with_nodes(made, until=4 * HOUR), tmp_path)["use"]
    assert (use["gpus"], use["nodes"], use["nodes_without_gpus"]) == (16, 2, 1)
    assert use["jobs_per_day"] == pytest.approx(3 * 6)  # three ended in four hours
    assert use["gpu_seconds_available"] == 16 * 4 * HOUR
    assert use["gpu_seconds_used"] == 8 * (2 + 1 + 1) * HOUR
    assert use["gpu_seconds_lost"] == 8 * 1800
    assert use["utilisation"] == pytest.approx(0.5)
    assert use["normalised_goodput"] == pytest.approx(0.5 - 1 / 16)
    assert use["goodput"] == pytest.approx(16 * (0.5 - 1 / 16))


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL"])
def test_loss_of_chosen_switch_counts_its_own_gpus(tmp_path: Path, state: str) -> None:
    made = Made()
    made.job(1, state, 0, HOUR, "ab")
    site = with_nodes(made)
    for node, switch in zip(site["nodes"], ("leaf1", "leaf2"), strict=True):
        node["switch"] = switch
    leaf, fleet = (
        states_of(site, tmp_path / name, chosen)["use"]
        for name, chosen in (("one", Choice(switch="leaf1")), ("all", None))
    )
    assert (leaf["gpu_seconds_used"], leaf["gpu_seconds_lost"]) == (8 * HOUR, 8 * 1800)
    assert (fleet["gpu_seconds_used"], fleet["gpu_seconds_lost"]) == (16 * HOUR, 16 * 1800)
    assert leaf["normalised_goodput"] == pytest.approx(fleet["normalised_goodput"])


def test_unread_time_is_excluded_from_utilisation_and_noted(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, LENGTH - 1, "a")
    answer = states_of(with_nodes(made, "a", LENGTH // 2), tmp_path / "a")
    assert answer["use"]["utilisation"] == pytest.approx(1)
    assert any(re.search(r"\bc1 .* 50\.0 % ", note) for note in answer["notes"])
    unread = with_nodes(made, "a")
    unread["ingests"] = []
    use = states_of(unread, tmp_path / "b")["use"]
    assert (use["jobs_per_day"], use["utilisation"], use["goodput"], use["gpu_seconds_available"]) == (
        None,
        None,
        None,
        0,
    )


def test_account_has_its_share_of_gpus(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, LENGTH - 1, "ab", account="vision")
    made.job(2, "COMPLETED", 0, LENGTH // 2, "a", account="speech")
    use = states_of(with_nodes(made), tmp_path, Choice(account="speech"))["use"]
    assert (use["gpus"], use["utilisation"]) == (8, pytest.approx(0.5))


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 10**6))
def test_goodput_is_between_0_and_utilisation(used: float, lost: float, gpus: int) -> None:
    use = gpu_use(1e9, 3600.0, gpus, used, lost, jobs=1)
    assert 0 <= use["normalised_goodput"] <= use["utilisation"]
    assert 0 <= use["goodput"] <= gpus


def test_size_mix_counts_jobs_with_gpus(tmp_path: Path) -> None:
    made = Made()
    for number, gpus in enumerate((None, 0, 1, 1, 8, 255, 256), 1):
        made.job(number, "COMPLETED", 0, HOUR, "a", gpus=gpus)
    mix = states_of(made.history, tmp_path)["size_mix"]
    assert (mix["jobs"], mix["one_gpu"]["share_of_jobs"], mix["up_to_8_gpus"]["share_of_jobs"]) == (5, 0.4, 0.6)
    assert mix["256_gpus_or_more"]["share_of_gpu_time"] == pytest.approx(256 / 521)


# --- before and after


def test_outcomes_of_large_jobs_are_split_by_date(tmp_path: Path) -> None:
    made = Made()
    for number in range(20):
        state = "NODE_FAIL" if number < 5 else "COMPLETED"
        made.job(number + 1, state, number * HOUR, (number + 1) * HOUR, "a", gpus=512)
    made.job(30, "NODE_FAIL", 0, HOUR, "b", gpus=511)
    made.job(31, "CANCELLED", None, HOUR, "", gpus=512)  # it never ran
    answer = states_of(made.history, tmp_path, split=BEGIN + 11 * HOUR)
    before, after = answer["split"]["before"], answer["split"]["after"]
    assert (before["jobs"], before["completed"]["share"], before["by_hardware"]["share"]) == (10, 0.5, 0.5)
    assert (after["jobs"], after["completed"]["share"], after["by_hardware"]["jobs"]) == (10, 1.0, 0)
    low, high = answer["split"]["change"]["completed"]["interval"]
    assert answer["split"]["change"]["completed"]["difference"] == 0.5
    assert 0 < low < 0.5 < high <= 1
    assert "+50.0 points" in text_of(answer, Page(200))


def test_split_without_large_jobs_has_no_share(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, HOUR, "a", gpus=512)
    answer = states_of(made.history, tmp_path, split=BEGIN + 2 * HOUR)
    assert answer["split"]["after"]["completed"] == {"jobs": 0, "share": None, "interval": None}
    assert answer["split"]["change"]["completed"] == {"difference": None, "interval": None}
    assert "points" not in text_of(answer, Page(200)).partition("percentage points")[0]


def test_share_difference_matches_newcombe() -> None:
    """56 of 70 against 48 of 80: the first example of Newcombe's table II, method 10."""
    shares = [{"share": k / n, "interval": list(wilson(k, n) or ())} for k, n in ((48, 80), (56, 70))]
    change = share_difference(*shares)
    assert change["difference"] == pytest.approx(0.2)
    assert change["interval"] == pytest.approx([0.0524, 0.3339], abs=5e-5)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 50)), max_size=6))
def test_intervals_contain_share_and_difference(records: list[tuple[bool, bool, int]]) -> None:
    rows = [Outcome(after, "NODE_FAIL" if hit else "COMPLETED", hit, jobs) for after, hit, jobs in records]
    answer = outcomes(rows, 5, 512)
    for entry in (answer["before"]["completed"], answer["after"]["completed"]):
        if entry["share"] is not None:
            assert 0 <= entry["interval"][0] <= entry["share"] <= entry["interval"][1] <= 1
    change = answer["change"]["completed"]
    if change["difference"] is not None:
        assert change["interval"][0] <= change["difference"] <= change["interval"][1]


# --- missing data


def test_jobs_and_nodes_without_times_count_no_time(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", HOUR, 0, "a")
    made.job(2, "CANCELLED", None, HOUR, "", gpus=None)
    made.job(3, "COMPLETED", 0, HOUR, "", gpus=4)
    answer = states_of(with_nodes(made, "az"), tmp_path)
    assert sum(entry["gpu_seconds"] for entry in answer["by_state"]) == 4 * HOUR
    assert (answer["use"]["gpu_seconds_used"], answer["use"]["utilisation"]) == (0, 0)
    assert any(note.startswith("1 job never started") for note in answer["notes"])


def test_states_handles_store_without_jobs_and_period_without_ends(tmp_path: Path) -> None:
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        states_of({name: [] for name in TABLES}, tmp_path / "a")
    made = Made()
    made.job(1, "RUNNING", 0, None)
    answer = states_of(made.history, tmp_path / "b")
    assert (answer["by_state"], answer["by_size"], answer["infrastructure"]["share_of_jobs"]) == ([], [], None)
    assert "No job ended" in text_of(answer, Page())


@pytest.mark.parametrize("at", [BEGIN, END, END + 1])
def test_split_outside_period_is_rejected(tmp_path: Path, at: int) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, HOUR)
    with pytest.raises(WrongChoice, match=r"--split: .* is not within the requested period"):
        states_of(made.history, tmp_path, split=at)
