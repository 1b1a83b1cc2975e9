"""Tests of `failslow`: slow time, its cost in GPU time, and costs that are not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleet_signals import BEGIN, DAY, END, Made, study
from fleet_views import text_of, view_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet.answers.document import Unanswerable

pytestmark = pytest.mark.one_python

try:  # only .venv has duckdb; the marked tests run nowhere else
    from healthd.fleet.answers import failslow
    from healthd.fleet.answers.failslow import (
        Drain,
        NodeJob,
        NodeLoss,
        SlowCondition,
        SlowSpan,
        episodes,
        node_loss,
        reaction,
    )
except ModuleNotFoundError as error:
    if error.name not in ("duckdb", "numpy", "scipy"):
        raise

AT, HOUR = BEGIN + DAY, 3600


def asked(made, folder, **more):
    with study(made, folder, **more) as one:
        return failslow.failslow(one)


def slow(made, node, onset, told, until, slowdown, jobs, cleared=None, code="failslow/job"):
    """Add a slowness from `onset` to `until` that opens at `reported`."""
    its = {"slowdown": slowdown, "onset_time": onset, "jobs": jobs}
    more = {"until": until} if cleared is None else {"until": until, "cleared": cleared}
    made.seen(node, code, told, "warning", "level", **its, **more)


# --- the document


def test_a_slow_job_costs_its_gpus_on_that_node_what_its_slowdown_takes_of_the_time(tmp_path):
    made = Made()
    job = made.job("ab", AT, AT + 10 * HOUR)
    made.history["job_nodes"][0]["gpus"] = 8.0
    made.alive("ab")
    slow(made, "a", AT + HOUR, AT + HOUR + 600, AT + 3 * HOUR, 0.25, str(job), cleared=AT + 3 * HOUR + 600)
    told = asked(made, tmp_path)
    (row,) = told["nodes"]
    assert (row["node"], row["slow_seconds"], row["unknown_seconds"], row["times"]) == ("a", 2 * HOUR, 0, 1)
    assert row["worst_slowdown"] == 0.25
    assert told["slow_seconds"] == 2 * HOUR
    assert row["lost_gpu_seconds"] == pytest.approx(8 * 2 * HOUR * 0.2)
    assert not row["ongoing"]


def test_the_gpus_are_those_that_slurm_accounted_and_a_job_of_none_is_not_known(tmp_path):
    made = Made()
    job = made.job("ab", AT, AT + 10 * HOUR)
    for one in made.history["job_nodes"]:
        one["gpus"] = 8.0
    slow(made, "a", AT, AT + 60, AT + HOUR, 1.0, str(job))
    told = asked(made, tmp_path / "known")
    assert told["lost_gpu_seconds"] == pytest.approx(8 * HOUR / 2)
    assert told["job_gpu_seconds"] == pytest.approx(2 * 8 * 10 * HOUR)
    for one in made.history["job_nodes"]:
        one["gpus"] = None
    told = asked(made, tmp_path / "unknown")
    assert (told["lost_gpu_seconds"], told["unknown_seconds"], told["slow_seconds"]) == (0, HOUR, HOUR)
    assert any("The cost of 100.0 % of the slow time is not known" in note for note in told["notes"])


def test_what_lasts_from_before_the_time_that_is_asked_for_counts_within_it_only(tmp_path):
    made = Made()
    job = made.job("a", BEGIN - DAY, AT, gpus=8)
    made.history["job_nodes"][0]["gpus"] = 8.0
    slow(made, "a", BEGIN - HOUR, BEGIN - 60, BEGIN + HOUR, 1.0, str(job), cleared=BEGIN + HOUR + 60)
    told = asked(made, tmp_path)
    assert (told["slow_seconds"], told["lost_gpu_seconds"]) == (HOUR, pytest.approx(4 * HOUR))
    assert told["reaction"]["episodes"] == 0, "it was reported before the period"


def test_how_long_it_took_to_tell_to_act_and_to_end(tmp_path):
    made = Made()
    slow(made, "a", AT, AT + 300, AT + HOUR, 0.3, "1", cleared=AT + HOUR + 900)
    slow(made, "b", AT, AT + 900, AT + HOUR, 0.3, "1")
    made.out("a", AT + 300 + 120, AT + DAY)
    same = ("condition_id", "code", "subject", "check_name", "kind", "severity", "first_time", "observed", "history")
    known = {name: made.history["events"][-1][name] for name in same}
    made.line("b", AT + 1000, "acknowledged", **known, who="root (uid 0)", last_time=AT + 950)
    took = asked(made, tmp_path)["reaction"]
    assert (took["episodes"], took["ongoing"]) == (2, 1)
    assert took["reported"] == {"episodes": 2, "median_seconds": 600, "p90_seconds": 840}
    assert (took["acted"]["episodes"], took["acted"]["by"]) == (2, {"healthd": 1, "acknowledged": 1})
    assert took["acted"]["median_seconds"] == 110
    assert took["lasted"] == {"episodes": 1, "median_seconds": HOUR, "p90_seconds": HOUR}


def test_validations_that_failed_or_were_slow_stand_by_node_and_one_that_stands_is_found(tmp_path):
    made = Made()
    made.seen("a", "validation/failed", AT, "degraded", "level", subject="0000:1b:00.0", cleared=AT + HOUR)
    made.seen("a", "validation/slow", AT, "warning", "level")
    told = asked(made, tmp_path / "over")
    assert [(row["failed_validations"], row["slow_validations"]) for row in told["nodes"]] == [(1, 1)]
    assert not failslow.has_findings(told)
    assert "A validation failed on 1 node: a." in list(view_of(told).sentences)
    made.seen("b", "validation/failed", AT, "degraded", "level")
    assert failslow.has_findings(asked(made, tmp_path / "stands"))


def test_nothing_told_is_said_as_that_and_a_store_without_streams_has_no_answer(tmp_path):
    made = Made()
    made.alive("a")
    told = asked(made, tmp_path / "quiet")
    assert list(view_of(told).sentences) == ["No node reported a slow job."]
    assert any("a node without reports may still have been slow" in note for note in told["notes"])
    with pytest.raises(Unanswerable):
        asked(Made(), tmp_path / "empty")


def test_the_document_is_json_and_the_text_has_its_numbers(tmp_path):
    made = Made()
    job = made.job("a", AT, AT + 10 * HOUR)
    made.history["job_nodes"][0]["gpus"] = 8.0
    slow(made, "a", AT, AT + 600, AT + 5 * HOUR, 0.25, str(job))
    told = asked(made, tmp_path)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    text = text_of(told, Page())
    assert (
        "1 node reported slow jobs, for 5.00 node-hours. They cost 8.00 GPU-hours, 10.0 % of the jobs' GPU time"
        in " ".join(text.split())
    )
    assert failslow.has_findings(told)


# --- the loss of a node


def test_a_job_that_is_not_named_loses_nothing_where_another_is():
    there = [NodeJob(1, 0, 100, 4.0), NodeJob(2, 0, 100, 2.0)]
    assert node_loss([SlowSpan(0, 100, 1.0, frozenset({1}))], there) == NodeLoss(100, 0, 200.0, 1.0)


def test_where_no_job_is_named_it_is_the_one_that_was_there_alone_and_of_two_nobody_knows():
    nobody = frozenset[int]()
    assert node_loss([SlowSpan(0, 100, 1.0, nobody)], [NodeJob(1, 0, 50, 4.0)]) == NodeLoss(100, 50, 100.0, 1.0)
    both = [NodeJob(1, 0, 100, 4.0), NodeJob(2, 0, 100, 2.0)]
    assert node_loss([SlowSpan(0, 100, 1.0, nobody)], both) == NodeLoss(100, 100, 0.0, 1.0)


def test_of_two_conditions_at_one_time_the_worse_counts_and_none_twice():
    some = [SlowSpan(0, 100, 1.0, frozenset({1})), SlowSpan(50, 150, 3.0, frozenset({1}))]
    assert node_loss(some, [NodeJob(1, 0, 200, 1.0)]) == NodeLoss(150, 0, 50 * 0.5 + 100 * 0.75, 3.0)


def test_without_a_number_it_is_time_and_no_gpu_hour():
    assert node_loss([SlowSpan(0, 100, None, frozenset({1}))], [NodeJob(1, 0, 100, 8.0)]) == NodeLoss(
        100, 100, 0.0, None
    )


TIMES = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    st.lists(st.builds(lambda t, s, j: SlowSpan(*t, s, j), TIMES, st.none() | st.floats(0, 9),
                       st.frozensets(st.integers(1, 3))), max_size=5),
    st.lists(st.builds(lambda t, j, g: NodeJob(j, *t, g), TIMES, st.integers(1, 3), st.none() | st.floats(0, 8)),
             max_size=4),
)  # fmt: skip
def test_second_by_second_it_is_the_same(stretches, ran):
    slow_seconds, unknown, gpu_seconds = 0, 0, 0.0
    for second in range(101):
        now = [one for one in stretches if one.begin <= second < one.end]
        if not now:
            continue
        slow_seconds += 1
        how = [one.slowdown for one in now if one.slowdown is not None]
        named = {job for one in now for job in one.jobs}
        there = [job for job in ran if job.begin <= second < job.end and job.gpus != 0]
        hit = [job for job in there if not named or job.job in named]
        if not how or not hit or (len(hit) > 1 and not named) or any(job.gpus is None for job in hit):
            unknown += 1
        else:
            gpu_seconds += sum(job.gpus for job in hit) * max(how) / (1 + max(how))
    told = node_loss(stretches, ran)
    assert (told.slow_seconds, told.unknown_seconds) == (slow_seconds, unknown)
    assert told.gpu_seconds == pytest.approx(gpu_seconds)


# --- reaction times


def life(onset, told, last, cleared=None, known=None):
    return SlowCondition("c1", "n1", onset, told, last, cleared, known)


def test_lives_that_overlap_are_one_slowness_which_lasts_as_long_as_any_of_them():
    (one,) = episodes([life(0, 10, 100, 120), life(50, 60, 200, None)], [])
    assert (one["onset"], one["reported"], one["end"], one["ongoing"]) == (0, 10, 200, True)
    assert len(episodes([life(0, 10, 100, 120), life(101, 110, 200, 220)], [])) == 2


def test_a_drain_before_it_was_told_or_after_it_was_over_is_no_reaction():
    drains = [Drain("c1", "n1", time, "person") for time in (9, 121)]
    (one,) = episodes([life(0, 10, 100, 120)], drains)
    assert (one["acted"], one["by"]) == (None, None)
    (one,) = episodes([life(0, 10, 100, 120)], [Drain("c1", "n1", 10, "person"), *drains])
    assert (one["acted"], one["by"]) == (10, "person")


def test_of_no_slowness_no_time_is_told():
    assert reaction([])["reported"] == {"episodes": 0, "median_seconds": None, "p90_seconds": None}


@pytest.mark.parametrize(
    ("text", "jobs"), [("4711 12", {4711, 12}), (None, set()), ("a 7 -3 9999999999999999999 ²", {7})]
)
def test_what_is_no_number_is_no_job(text, jobs):
    assert failslow.parse_job_ids(text) == jobs


def test_the_end_of_the_time_is_no_second_more(tmp_path):
    made = Made()
    made.job("a", BEGIN, None)
    slow(made, "a", END - 100, END - 50, END + DAY, 0.5, None)
    assert asked(made, tmp_path)["slow_seconds"] == 100


def shown(folder):
    """Return the page of 120 columns for four slow times on three nodes and a failed validation."""
    made = Made()
    whole, small = made.job("abcd", AT, AT + 20 * HOUR), made.job("e", AT, AT + 5 * HOUR)
    made.job("f", AT, AT + 40 * HOUR)
    for one in made.history["job_nodes"]:
        one["gpus"] = 8.0
    made.alive("abcdef")
    slow(made, "b", AT + HOUR, AT + HOUR + 90, AT + 7 * HOUR, 0.38, str(whole), cleared=AT + 7 * HOUR + 600)
    slow(made, "e", AT, AT + 120, AT + 5 * HOUR, 0.12, str(small), cleared=AT + 5 * HOUR + 600)
    slow(made, "f", AT + HOUR, AT + HOUR + 240, AT + 2 * HOUR, 0.6, None)
    slow(made, "f", AT + 10 * HOUR, AT + 10 * HOUR + 60, AT + 12 * HOUR, None, None, cleared=AT + 12 * HOUR + 300)
    made.out("b", AT + HOUR + 1800, AT + 30 * HOUR, "person")
    made.seen("b", "validation/failed", AT + 8 * HOUR, "degraded", "level", cleared=AT + 20 * HOUR)
    for table in made.history.values():
        for one in table:
            if one.get("node"):
                one["node"] = f"gpu-{'abcdef'.index(one['node']) + 1:03}"
    return text_of(asked(made, folder), Page(120))


def test_the_page_shows_what_such_a_store_says(tmp_path):
    text = (Path(__file__).parents[3] / "docs/fleet-answers.md").read_text("utf-8").split("\n## failslow\n", 1)[1]
    assert text.split("```text\n", 1)[1].split("```", 1)[0] == shown(tmp_path)
