"""Tests of `failslow`: slow time, its cost in GPU time, and costs that are not known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fleet_signals import BEGIN, DAY, END, HistoryBuilder, study
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


def failslow_of(made, folder, **options):
    with study(made, folder, **options) as opened:
        return failslow.failslow(opened)


def add_slowness(made, node, onset, reported, until, slowdown, jobs, cleared=None, code="failslow/job"):
    """Add a slowness from `onset` to `until` that opens at `reported`."""
    columns = {"slowdown": slowdown, "onset_time": onset, "jobs": jobs}
    more = {"until": until} if cleared is None else {"until": until, "cleared": cleared}
    made.condition(node, code, reported, "warning", "level", **columns, **more)


# --- the document


def test_slow_job_costs_share_of_its_gpus_on_node(tmp_path):
    made = HistoryBuilder()
    job = made.job("ab", AT, AT + 10 * HOUR)
    made.history["job_nodes"][0]["gpus"] = 8.0
    made.alive("ab")
    add_slowness(made, "a", AT + HOUR, AT + HOUR + 600, AT + 3 * HOUR, 0.25, str(job), cleared=AT + 3 * HOUR + 600)
    answer = failslow_of(made, tmp_path)
    (row,) = answer["nodes"]
    assert (row["node"], row["slow_seconds"], row["unknown_seconds"], row["times"]) == ("a", 2 * HOUR, 0, 1)
    assert row["worst_slowdown"] == 0.25
    assert answer["slow_seconds"] == 2 * HOUR
    assert row["lost_gpu_seconds"] == pytest.approx(8 * 2 * HOUR * 0.2)
    assert not row["ongoing"]


def test_cost_uses_accounted_gpus_and_is_unknown_without(tmp_path):
    made = HistoryBuilder()
    job = made.job("ab", AT, AT + 10 * HOUR)
    for entry in made.history["job_nodes"]:
        entry["gpus"] = 8.0
    add_slowness(made, "a", AT, AT + 60, AT + HOUR, 1.0, str(job))
    answer = failslow_of(made, tmp_path / "known")
    assert answer["lost_gpu_seconds"] == pytest.approx(8 * HOUR / 2)
    assert answer["job_gpu_seconds"] == pytest.approx(2 * 8 * 10 * HOUR)
    for entry in made.history["job_nodes"]:
        entry["gpus"] = None
    answer = failslow_of(made, tmp_path / "unknown")
    assert (answer["lost_gpu_seconds"], answer["unknown_seconds"], answer["slow_seconds"]) == (0, HOUR, HOUR)
    assert any(re.search(r"cost of 100\.0 % .* unknown", note) for note in answer["notes"])


def test_slowness_counts_only_within_period(tmp_path):
    made = HistoryBuilder()
    job = made.job("a", BEGIN - DAY, AT, gpus=8)
    made.history["job_nodes"][0]["gpus"] = 8.0
    add_slowness(made, "a", BEGIN - HOUR, BEGIN - 60, BEGIN + HOUR, 1.0, str(job), cleared=BEGIN + HOUR + 60)
    answer = failslow_of(made, tmp_path)
    assert (answer["slow_seconds"], answer["lost_gpu_seconds"]) == (HOUR, pytest.approx(4 * HOUR))
    assert answer["reaction"]["episodes"] == 0, "it was reported before the period"


def test_reaction_measures_time_to_report_act_and_end(tmp_path):
    made = HistoryBuilder()
    add_slowness(made, "a", AT, AT + 300, AT + HOUR, 0.3, "1", cleared=AT + HOUR + 900)
    add_slowness(made, "b", AT, AT + 900, AT + HOUR, 0.3, "1")
    made.outage("a", AT + 300 + 120, AT + DAY)
    same = ("condition_id", "code", "subject", "check_name", "kind", "severity", "first_time", "observed", "history")
    known = {name: made.history["events"][-1][name] for name in same}
    made.line("b", AT + 1000, "acknowledged", **known, who="root (uid 0)", last_time=AT + 950)
    took = failslow_of(made, tmp_path)["reaction"]
    assert (took["episodes"], took["ongoing"]) == (2, 1)
    assert took["reported"] == {"episodes": 2, "median_seconds": 600, "p90_seconds": 840}
    assert (took["acted"]["episodes"], took["acted"]["by"]) == (2, {"healthd": 1, "acknowledged": 1})
    assert took["acted"]["median_seconds"] == 110
    assert took["lasted"] == {"episodes": 1, "median_seconds": HOUR, "p90_seconds": HOUR}


def test_validations_are_listed_and_open_failure_is_finding(tmp_path):
    made = HistoryBuilder()
    made.condition("a", "validation/failed", AT, "degraded", "level", subject="0000:1b:00.0", cleared=AT + HOUR)
    made.condition("a", "validation/slow", AT, "warning", "level")
    answer = failslow_of(made, tmp_path / "over")
    assert [(row["failed_validations"], row["slow_validations"]) for row in answer["nodes"]] == [(1, 1)]
    assert not failslow.has_findings(answer)
    assert any(sentence.endswith(" 1 node: a.") for sentence in view_of(answer).sentences)
    made.condition("b", "validation/failed", AT, "degraded", "level")
    assert failslow.has_findings(failslow_of(made, tmp_path / "stands"))


def test_failslow_handles_no_reports_and_no_streams(tmp_path):
    made = HistoryBuilder()
    made.alive("a")
    answer = failslow_of(made, tmp_path / "quiet")
    (sentence,) = view_of(answer).sentences
    assert sentence.startswith("No node ")
    assert any("without reports" in note for note in answer["notes"])
    with pytest.raises(Unanswerable):
        failslow_of(HistoryBuilder(), tmp_path / "empty")


def test_document_is_json_and_text_has_its_numbers(tmp_path):
    made = HistoryBuilder()
    job = made.job("a", AT, AT + 10 * HOUR)
    made.history["job_nodes"][0]["gpus"] = 8.0
    add_slowness(made, "a", AT, AT + 600, AT + 5 * HOUR, 0.25, str(job))
    answer = failslow_of(made, tmp_path)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    text = " ".join(text_of(answer, Page()).split())
    assert re.search(r"1 node .* 5\.00 node-hours\. .* 8\.00 GPU-hours, 10\.0 % ", text)
    assert failslow.has_findings(answer)


# --- the loss of a node


def test_unnamed_job_loses_nothing_beside_named_job():
    jobs = [NodeJob(1, 0, 100, 4.0), NodeJob(2, 0, 100, 2.0)]
    assert node_loss([SlowSpan(0, 100, 1.0, frozenset({1}))], jobs) == NodeLoss(100, 0, 200.0, 1.0)


def test_slowness_without_job_ids_counts_for_only_job():
    no_jobs = frozenset[int]()
    assert node_loss([SlowSpan(0, 100, 1.0, no_jobs)], [NodeJob(1, 0, 50, 4.0)]) == NodeLoss(100, 50, 100.0, 1.0)
    both = [NodeJob(1, 0, 100, 4.0), NodeJob(2, 0, 100, 2.0)]
    assert node_loss([SlowSpan(0, 100, 1.0, no_jobs)], both) == NodeLoss(100, 100, 0.0, 1.0)


def test_overlapping_slowness_counts_worst_once():
    spans = [SlowSpan(0, 100, 1.0, frozenset({1})), SlowSpan(50, 150, 3.0, frozenset({1}))]
    assert node_loss(spans, [NodeJob(1, 0, 200, 1.0)]) == NodeLoss(150, 0, 50 * 0.5 + 100 * 0.75, 3.0)


def test_slowness_without_number_has_unknown_cost():
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
def test_node_loss_matches_sum_over_seconds(stretches, ran):
    slow_seconds, unknown, gpu_seconds = 0, 0, 0.0
    for second in range(101):
        active = [span for span in stretches if span.begin <= second < span.end]
        if not active:
            continue
        slow_seconds += 1
        slowdowns = [span.slowdown for span in active if span.slowdown is not None]
        named = {job for span in active for job in span.jobs}
        running = [job for job in ran if job.begin <= second < job.end and job.gpus != 0]
        hit = [job for job in running if not named or job.job in named]
        if not slowdowns or not hit or (len(hit) > 1 and not named) or any(job.gpus is None for job in hit):
            unknown += 1
        else:
            gpu_seconds += sum(job.gpus for job in hit) * max(slowdowns) / (1 + max(slowdowns))
    loss = node_loss(stretches, ran)
    assert (loss.slow_seconds, loss.unknown_seconds) == (slow_seconds, unknown)
    assert loss.gpu_seconds == pytest.approx(gpu_seconds)


# --- reaction times


def condition(onset, reported, last, cleared=None, known=None):
    return SlowCondition("c1", "n1", onset, reported, last, cleared, known)


def test_episodes_merges_overlapping_conditions():
    (episode,) = episodes([condition(0, 10, 100, 120), condition(50, 60, 200, None)], [])
    assert (episode["onset"], episode["reported"], episode["end"], episode["ongoing"]) == (0, 10, 200, True)
    assert len(episodes([condition(0, 10, 100, 120), condition(101, 110, 200, 220)], [])) == 2


def test_drain_outside_episode_is_no_reaction():
    drains = [Drain("c1", "n1", time, "person") for time in (9, 121)]
    (episode,) = episodes([condition(0, 10, 100, 120)], drains)
    assert (episode["acted"], episode["by"]) == (None, None)
    (episode,) = episodes([condition(0, 10, 100, 120)], [Drain("c1", "n1", 10, "person"), *drains])
    assert (episode["acted"], episode["by"]) == (10, "person")


def test_reaction_without_episodes_has_no_times():
    assert reaction([])["reported"] == {"episodes": 0, "median_seconds": None, "p90_seconds": None}


@pytest.mark.parametrize(
    ("text", "jobs"), [("4711 12", {4711, 12}), (None, set()), ("a 7 -3 9999999999999999999 ²", {7})]
)
def test_parse_job_ids_ignores_non_numbers(text, jobs):
    assert failslow.parse_job_ids(text) == jobs


def test_slowness_ends_at_end_of_period(tmp_path):
    made = HistoryBuilder()
    made.job("a", BEGIN, None)
    add_slowness(made, "a", END - 100, END - 50, END + DAY, 0.5, None)
    assert failslow_of(made, tmp_path)["slow_seconds"] == 100


def page_text(folder):
    """Return the page of 120 columns for four slow times on three nodes and a failed validation."""
    made = HistoryBuilder()
    whole, small = made.job("abcd", AT, AT + 20 * HOUR), made.job("e", AT, AT + 5 * HOUR)
    made.job("f", AT, AT + 40 * HOUR)
    for entry in made.history["job_nodes"]:
        entry["gpus"] = 8.0
    made.alive("abcdef")
    add_slowness(made, "b", AT + HOUR, AT + HOUR + 90, AT + 7 * HOUR, 0.38, str(whole), cleared=AT + 7 * HOUR + 600)
    add_slowness(made, "e", AT, AT + 120, AT + 5 * HOUR, 0.12, str(small), cleared=AT + 5 * HOUR + 600)
    add_slowness(made, "f", AT + HOUR, AT + HOUR + 240, AT + 2 * HOUR, 0.6, None)
    add_slowness(
        made, "f", AT + 10 * HOUR, AT + 10 * HOUR + 60, AT + 12 * HOUR, None, None, cleared=AT + 12 * HOUR + 300
    )
    made.outage("b", AT + HOUR + 1800, AT + 30 * HOUR, "person")
    made.condition("b", "validation/failed", AT + 8 * HOUR, "degraded", "level", cleared=AT + 20 * HOUR)
    for table in made.history.values():
        for entry in table:
            if entry.get("node"):
                entry["node"] = f"gpu-{'abcdef'.index(entry['node']) + 1:03}"
    return text_of(failslow_of(made, folder), Page(120))


def test_page_matches_documentation(tmp_path):
    text = (Path(__file__).parents[3] / "docs/fleet-answers.md").read_text("utf-8").split("\n## failslow\n", 1)[1]
    assert text.split("```text\n", 1)[1].split("```", 1)[0] == page_text(tmp_path)
