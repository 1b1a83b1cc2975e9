"""Tests of `states`: outcomes of jobs and use of GPU time."""

from __future__ import annotations

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


def asked_of(made: History, folder: Path, chosen: Choice | None = None, **flags: Any) -> Document:
    with study(made, folder, chosen) as asked:
        return states.states(asked, **flags)


def with_nodes(made: Made, names: str = "ab", until: int = LENGTH) -> History:
    """Add nodes of 8 GPUs, and that jobs were read from the start of the period until `until`."""
    made.history["nodes"] = [row("nodes", cluster="c1", node=name, gpus=8) for name in names]
    made.history["ingests"] = [
        row("ingests", cluster="c1", source="sacct", name="d", from_time=BEGIN, to_time=BEGIN + until, read_time=END)
    ]
    return made.history


@pytest.mark.parametrize("seed", range(6))
def test_all_shares_sum_to_one(tmp_path: Path, seed: int) -> None:
    told = asked_of(history(Random(seed), 40), tmp_path, split=(BEGIN + END) // 2, large=1)
    for rows in (told["by_state"], told["by_size"]):
        assert sum(one["share_of_jobs"] for one in rows) == pytest.approx(1)
        if told["by_state"][0]["gpu_seconds"]:
            assert sum(one["share_of_gpu_time"] for one in rows) == pytest.approx(1)
    for size in told["by_size"]:
        assert sum(one["share_of_jobs"] for one in size["by_state"]) == pytest.approx(1)
        assert sum(one["jobs"] for one in size["by_state"]) == size["jobs"]
    infrastructure = told["infrastructure"]
    for key in ("jobs", "gpu_seconds", "runtime_seconds"):
        assert sum(one[key] for one in infrastructure["by_end"]) == infrastructure[key]
    for side in (told["split"]["before"], told["split"]["after"]):
        assert sum(one["jobs"] for one in side["by_state"]) == side["jobs"]


def test_what_the_nodes_ended_is_a_share_of_jobs_of_runtime_and_of_gpu_time(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "NODE_FAIL", 0, 3 * HOUR, "ab")
    for number in range(2, 5):
        made.job(number, "COMPLETED", 0, HOUR, "c")
    told = asked_of(made.history, tmp_path)
    found = told["infrastructure"]
    assert (found["share_of_jobs"], found["share_of_runtime"]) == (0.25, 0.5)
    assert found["share_of_gpu_time"] == pytest.approx(48 / 72)
    assert "Nodes ended 25.0 % of the jobs, which had 50.0 % of the runtime and 66.7 % of the GPU time" in text_of(
        told, Page(200)
    )


def test_utilisation_and_goodput_are_of_the_gpus_and_of_the_time_that_is_known(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", -HOUR, 2 * HOUR, "a")  # one hour is before the period
    made.job(2, "PREEMPTED", 0, HOUR, "b")
    made.job(3, "RUNNING", 3 * HOUR, None, "b")  # counts until jobs were last read
    made.job(4, "COMPLETED", 0, HOUR, "x")  # on an unknown node
    use = asked_of(with_nodes(made, until=4 * HOUR), tmp_path)["use"]
    assert (use["gpus"], use["nodes"], use["nodes_without_gpus"]) == (16, 2, 1)
    assert use["jobs_per_day"] == pytest.approx(3 * 6)  # three ended in four hours
    assert use["gpu_seconds_available"] == 16 * 4 * HOUR
    assert use["gpu_seconds_used"] == 8 * (2 + 1 + 1) * HOUR
    assert use["gpu_seconds_lost"] == 8 * 1800
    assert use["utilisation"] == pytest.approx(0.5)
    assert use["normalised_goodput"] == pytest.approx(0.5 - 1 / 16)
    assert use["goodput"] == pytest.approx(16 * (0.5 - 1 / 16))


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL"])
def test_of_a_switch_what_was_lost_is_of_its_own_gpus(tmp_path: Path, state: str) -> None:
    made = Made()
    made.job(1, state, 0, HOUR, "ab")
    site = with_nodes(made)
    for node, switch in zip(site["nodes"], ("leaf1", "leaf2"), strict=True):
        node["switch"] = switch
    one, fleet = (
        asked_of(site, tmp_path / name, chosen)["use"]
        for name, chosen in (("one", Choice(switch="leaf1")), ("all", None))
    )
    assert (one["gpu_seconds_used"], one["gpu_seconds_lost"]) == (8 * HOUR, 8 * 1800)
    assert (fleet["gpu_seconds_used"], fleet["gpu_seconds_lost"]) == (16 * HOUR, 16 * 1800)
    assert one["normalised_goodput"] == pytest.approx(fleet["normalised_goodput"])


def test_what_was_not_read_is_in_no_utilisation_and_said(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, LENGTH - 1, "a")
    told = asked_of(with_nodes(made, "a", LENGTH // 2), tmp_path / "a")
    assert told["use"]["utilisation"] == pytest.approx(1)
    assert "No jobs of c1 were read for 50.0 % of the time, which is excluded from the utilisation." in told["notes"]
    unread = with_nodes(made, "a")
    unread["ingests"] = []
    use = asked_of(unread, tmp_path / "b")["use"]
    assert (use["jobs_per_day"], use["utilisation"], use["goodput"], use["gpu_seconds_available"]) == (
        None,
        None,
        None,
        0,
    )


def test_an_account_has_its_own_part_of_the_gpus(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, LENGTH - 1, "ab", account="vision")
    made.job(2, "COMPLETED", 0, LENGTH // 2, "a", account="speech")
    use = asked_of(with_nodes(made), tmp_path, Choice(account="speech"))["use"]
    assert (use["gpus"], use["utilisation"]) == (8, pytest.approx(0.5))


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 10**6))
def test_goodput_is_never_more_than_utilisation_nor_less_than_nothing(its_use: float, lost: float, gpus: int) -> None:
    use = gpu_use(1e9, 3600.0, gpus, its_use, lost, jobs=1)
    assert 0 <= use["normalised_goodput"] <= use["utilisation"]
    assert 0 <= use["goodput"] <= gpus


def test_the_mix_of_sizes_is_of_jobs_with_gpus(tmp_path: Path) -> None:
    made = Made()
    for number, gpus in enumerate((None, 0, 1, 1, 8, 255, 256), 1):
        made.job(number, "COMPLETED", 0, HOUR, "a", gpus=gpus)
    mix = asked_of(made.history, tmp_path)["size_mix"]
    assert (mix["jobs"], mix["one_gpu"]["share_of_jobs"], mix["up_to_8_gpus"]["share_of_jobs"]) == (5, 0.4, 0.6)
    assert mix["256_gpus_or_more"]["share_of_gpu_time"] == pytest.approx(256 / 521)


# --- before and after


def test_the_outcome_of_large_jobs_is_told_before_and_after_a_date(tmp_path: Path) -> None:
    made = Made()
    for number in range(20):
        state = "NODE_FAIL" if number < 5 else "COMPLETED"
        made.job(number + 1, state, number * HOUR, (number + 1) * HOUR, "a", gpus=512)
    made.job(30, "NODE_FAIL", 0, HOUR, "b", gpus=511)
    made.job(31, "CANCELLED", None, HOUR, "", gpus=512)  # it never ran
    told = asked_of(made.history, tmp_path, split=BEGIN + 11 * HOUR)
    before, after = told["split"]["before"], told["split"]["after"]
    assert (before["jobs"], before["completed"]["share"], before["by_hardware"]["share"]) == (10, 0.5, 0.5)
    assert (after["jobs"], after["completed"]["share"], after["by_hardware"]["jobs"]) == (10, 1.0, 0)
    low, high = told["split"]["change"]["completed"]["interval"]
    assert told["split"]["change"]["completed"]["difference"] == 0.5
    assert 0 < low < 0.5 < high <= 1
    assert "+50.0 points" in text_of(told, Page(200))


def test_a_side_without_large_jobs_has_no_share(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, HOUR, "a", gpus=512)
    told = asked_of(made.history, tmp_path, split=BEGIN + 2 * HOUR)
    assert told["split"]["after"]["completed"] == {"jobs": 0, "share": None, "interval": None}
    assert told["split"]["change"]["completed"] == {"difference": None, "interval": None}
    assert "points" not in text_of(told, Page(200)).partition("percentage points")[0]


def test_the_difference_of_two_shares_is_newcombes() -> None:
    """56 of 70 against 48 of 80: the first example of Newcombe's table II, method 10."""
    shares = [{"share": k / n, "interval": list(wilson(k, n) or ())} for k, n in ((48, 80), (56, 70))]
    change = share_difference(*shares)
    assert change["difference"] == pytest.approx(0.2)
    assert change["interval"] == pytest.approx([0.0524, 0.3339], abs=5e-5)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 50)), max_size=6))
def test_an_interval_holds_its_share_and_a_change_its_difference(some: list[tuple[bool, bool, int]]) -> None:
    rows = [Outcome(after, "NODE_FAIL" if hit else "COMPLETED", hit, jobs) for after, hit, jobs in some]
    told = outcomes(rows, 5, 512)
    for one in (told["before"]["completed"], told["after"]["completed"]):
        if one["share"] is not None:
            assert 0 <= one["interval"][0] <= one["share"] <= one["interval"][1] <= 1
    change = told["change"]["completed"]
    if change["difference"] is not None:
        assert change["interval"][0] <= change["difference"] <= change["interval"][1]


# --- missing data


def test_jobs_without_nodes_nodes_without_jobs_and_ends_before_starts_have_no_time(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "COMPLETED", HOUR, 0, "a")
    made.job(2, "CANCELLED", None, HOUR, "", gpus=None)
    made.job(3, "COMPLETED", 0, HOUR, "", gpus=4)
    told = asked_of(with_nodes(made, "az"), tmp_path)
    assert sum(one["gpu_seconds"] for one in told["by_state"]) == 4 * HOUR
    assert (told["use"]["gpu_seconds_used"], told["use"]["utilisation"]) == (0, 0)
    assert any("1 job never started, or has an unknown number of GPUs" in note for note in told["notes"])


def test_an_empty_store_cannot_answer_and_a_time_without_ends_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        asked_of({name: [] for name in TABLES}, tmp_path / "a")
    made = Made()
    made.job(1, "RUNNING", 0, None)
    told = asked_of(made.history, tmp_path / "b")
    assert (told["by_state"], told["by_size"], told["infrastructure"]["share_of_jobs"]) == ([], [], None)
    assert "No job ended in this period." in text_of(told, Page())


@pytest.mark.parametrize("at", [BEGIN, END, END + 1])
def test_a_split_outside_of_the_time_is_refused(tmp_path: Path, at: int) -> None:
    made = Made()
    made.job(1, "COMPLETED", 0, HOUR)
    with pytest.raises(WrongChoice, match=r"--split: .* is not within the requested period"):
        asked_of(made.history, tmp_path, split=at)
