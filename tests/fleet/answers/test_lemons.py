"""Tests of `lemons`: which nodes are lemons, the limit on them, and how evidence counts."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, CLUSTERS, DAY, END, HOUR, NODES, History, history, row, write_parquet
from fleet_views import text_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.common.slurm import lemon_command
from healthd.fleet.answers.document import Document, Unanswerable
from healthd.fleet.answers.study import Choice, open_study
from healthd.fleet.tables import TABLES

try:  # only .venv has numpy; the marked tests run nowhere else
    import numpy as np

    from healthd.fleet.answers import lemons
    from healthd.fleet.answers.lemon_evidence import (
        ConditionMoment,
        Evidence,
        FailedJobSighting,
        Maintenance,
        Outage,
        OutageRow,
        failed_job_evidence,
        failure_shares,
        merge_outages,
        service_spells,
    )
    from healthd.fleet.statistics import lemon_score
    from healthd.fleet.statistics.lemon_score import (
        GAP_AFTER_END_SECONDS,
        GAP_SECONDS,
        DiscountedCounts,
        Observation,
        Record,
        discounted_counts,
        fit_prior,
        merge_incidents,
        probability,
        score,
        share_named,
    )
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise

pytestmark = pytest.mark.one_python
TO = BEGIN + 28 * DAY
FLEET, GAP_HOURS = 100, 12

signs = st.deferred(
    lambda: st.lists(
        st.builds(Observation, st.integers(0, 90 * DAY), st.integers(0, 90 * DAY), st.floats(0.1, 1.0)), max_size=20
    )
)
counts = st.deferred(lambda: st.builds(DiscountedCounts, st.integers(0, 9).map(float), st.floats(1.0, 60.0)))
spells = st.deferred(
    lambda: st.lists(st.builds(Outage, st.integers(0, 99), st.none() | st.integers(0, 120), *[st.just("")] * 3))
)


# --- a simulated fleet


def empty() -> History:
    return {name: [] for name in TABLES}


def healthy_fleet(nodes: int = FLEET) -> History:
    """Return a fleet where each node completed one job and every tenth node failed once."""
    made = empty()
    for number in range(nodes):
        name = f"g{number:03d}"
        made["nodes"].append(row("nodes", cluster="c1", node=name, gpus=8))
        job(made, [name], BEGIN, "COMPLETED")
        if number % 10 == 9:
            died(made, name, BEGIN + (number % 27) * DAY)
    return made


def job(made: History, nodes: list[str], end: int, state: str, job_id: int | None = None) -> int:
    number = len(made["jobs"]) + 1
    times = {"submit_time": end - HOUR, "start_time": end - HOUR, "end_time": end}
    size = {"nodes": len(nodes), "gpus": 8 * len(nodes), "state": state, "job_id": job_id or number}
    made["jobs"].append(row("jobs", cluster="c1", db_index=number, **times, **size))
    made["job_nodes"] += [
        row("job_nodes", cluster="c1", db_index=number, node=node, gpus=8.0, **times) for node in nodes
    ]
    return number


def down(made: History, node: str, start: int, end: int | None = None) -> None:
    state = {"state": "DOWN*", "reason": "Not responding", "set_by": "slurm"}
    made["node_states"].append(
        row("node_states", cluster="c1", node=node, start_time=start, end_time=end or start + HOUR, **state)
    )


def died(made: History, node: str, at: int, others: int = 0, job_id: int | None = None) -> None:
    """Add a job that ended NODE_FAIL on this node and on `others` further nodes."""
    rest = [f"g{number:03d}" for number in range(FLEET) if f"g{number:03d}" != node][:others]
    job(made, [node, *rest], at, "NODE_FAIL", job_id)
    down(made, node, at)


def add_event(
    made: History, node: str, at: int, code: str, severity: str = "critical", domain: str | None = None
) -> None:
    condition = {"check_name": code.partition("/")[0], "code": code, "severity": severity, "kind": "edge"}
    number = len(made["events"]) + 1
    stream_fields = {"seq": number, "stream_id": f"s{node}", "boot_id": "b", "time": at, "mono": float(at - BEGIN)}
    made["events"].append(
        row(
            "events",
            cluster="c1",
            node=node,
            event="opened",
            condition_id=f"x{number}",
            observed=False,
            history=False,
            first_time=at,
            last_time=at,
            times=1,
            subject="gpu",
            nvlink_domain=domain,
            **stream_fields,
            **condition,
        )
    )


def lemons_of(made: History, folder: Path, chosen: Choice | None = None, **options: Any) -> Document:
    folder.mkdir(exist_ok=True)
    with open_study(write_parquet(made, folder), BEGIN - DAY, TO, chosen) as study:
        return lemons.lemons(study, **options)


def lemon_names(document: Document) -> list[str]:
    return [entry["node"] for entry in document["nodes"]]


# --- lemons


def test_node_with_repeated_job_failures_is_lemon_with_reason(tmp_path: Path) -> None:
    made = healthy_fleet()
    for week in range(4):
        died(made, "g005", BEGIN + (7 * week + 3) * DAY, others=63)
    document = lemons_of(made, tmp_path)
    assert lemon_names(document) == ["g005"]
    (entry,) = document["nodes"]
    assert entry["signals"] == {
        **dict.fromkeys(lemons.SIGNALS, 0),
        "multi_node_node_fails": 4,
        "out_count": 4,
        "single_node_node_failure_rate": 0.0,
    }
    assert entry["score"] > 5
    assert entry["probability"] > 0.9
    assert len(entry["evidence"]) == 4
    assert "(512 GPUs on 64 nodes) ended NODE_FAIL" in entry["evidence"][0]["text"]
    text = text_of(document, Page())
    assert re.search(r"g005: 4 .*\(4 with 512 GPUs\), out 4 times", text)
    assert "; fleet median 0\n" in text
    assert (
        'scontrol update NodeName=g005 State=DRAIN Reason="lemon: 4 multi-node failures (4 with 512 GPUs), out' in text
    )
    assert document["gain"][0]["by_lemons"] == 4
    assert document["gain"][0]["failures_without"] < 1
    json.dumps(document, allow_nan=False)


def test_signals_of_one_failure_are_one_incident(tmp_path: Path) -> None:
    made = healthy_fleet()
    at = BEGIN + 5 * DAY
    add_event(made, "g005", at, "gpu_xid/79")
    job(made, ["g005", "g006"], at + 60, "FAILED")
    job(made, ["g005"], at + 61, "FAILED")
    made["node_states"].append(
        row(
            "node_states",
            cluster="c1",
            node="g005",
            start_time=at + 3,
            end_time=at + 2 * DAY,
            state="DRAIN",
            reason="healthd: gpu_xid/79 gpu: lost",
            set_by="healthd",
        )
    )
    made["tickets"].append(row("tickets", cluster="c1", node="g005", opened_time=at + HOUR, text="swap GPU"))
    down(made, "g005", at + 3 * HOUR, at + 2 * DAY)
    document = lemons_of(made, tmp_path)
    assert lemon_names(document) == [], "all signals belong to one event"
    (entry,) = [entry for entry in document["candidates"] if entry["node"] == "g005"]
    assert entry["incidents"] == 1
    assert entry["signals"]["multi_node_node_fails"] == entry["signals"]["single_node_node_fails"] == 1


def add_drain(made: History, node: str, at: int, code: str) -> None:
    """Let healthd drain the idle node for a condition."""
    add_event(made, node, at, code)
    reason = f"healthd: {code} gpu: broken"
    times = {"start_time": at + 3, "end_time": at + 8 * HOUR}
    made["node_states"].append(
        row("node_states", cluster="c1", node=node, state="DRAIN", reason=reason, set_by="healthd", **times)
    )


def idle_fleet_with_one_bad_node() -> History:
    """Return a fleet where most drains meet no job; g005 is drained five times in 28 days, without a job."""
    made = healthy_fleet()
    for number in range(10, 26):
        add_drain(made, f"g{number:03d}", BEGIN + number * DAY, "gpu_xid/79")
    for number in (31, 32, 33):
        add_event(made, f"g{number:03d}", BEGIN + number % 7 * DAY, "gpu_xid/79")
        job(made, [f"g{number:03d}"], BEGIN + number % 7 * DAY + 30, "FAILED")
    for time in range(5):
        add_drain(made, "g005", BEGIN + (5 * time + 2) * DAY, "gpu_xid/79")
    return made


def fleet_with_one_uncertain_node() -> History:
    """g005 failed four times before the last 7 days and once in them."""
    made = healthy_fleet()
    for day in (2, 7, 12, 17, 25):
        died(made, "g005", BEGIN + day * DAY)
    return made


def test_node_out_five_times_in_28_days_is_lemon(tmp_path: Path) -> None:
    document = lemons_of(idle_fleet_with_one_bad_node(), tmp_path)
    (entry,) = [entry for entry in document["nodes"] if entry["node"] == "g005"]
    assert (entry["events"], entry["signals"]["out_count"]) == (5, 5)
    assert entry["probability"] > 0.7
    assert entry["certain"]


def test_uncertain_lemon_is_certain_only_with_min_probability(tmp_path: Path) -> None:
    made = fleet_with_one_uncertain_node()
    document = lemons_of(made, tmp_path, window_days=7)
    assert [entry["certain"] for entry in document["nodes"] if entry["node"] == "g005"] == [False]
    assert lemons.NOT_DRAINED_NOTE in text_of(document, Page())
    with_probability = lemons_of(made, tmp_path, window_days=7, min_probability=0.3)
    assert [entry["certain"] for entry in with_probability["nodes"] if entry["node"] == "g005"] == [True]
    assert "g005" not in lemon_names(lemons_of(made, tmp_path, window_days=7, min_probability=1.0))


def test_exclusions_alone_make_no_lemon(tmp_path: Path) -> None:
    made = healthy_fleet()
    for number in range(500):
        made["exclusions"].append(
            row("exclusions", cluster="c1", node="g005", job_id=number, submit_time=BEGIN + number, source="script")
        )
    document = lemons_of(made, tmp_path)
    assert lemon_names(document) == []
    assert document["cdfs"]["excl_jobid_count"][-1] == [500, 1.0]


@pytest.mark.parametrize(
    ("domain", "has_lemons"),
    [("00000001-0000-0000-0000-000000000001", False), (None, True)],
    ids=["domain", "no domain"],
)
def test_fault_of_the_switch_side_makes_no_lemon(domain: str | None, has_lemons: bool, tmp_path: Path) -> None:
    made = healthy_fleet()
    trays = [f"g{number:03d}" for number in range(6)]
    for week in range(4):
        for position, node in enumerate(trays):
            at = BEGIN + (7 * week + 2) * DAY + 5 * position
            add_event(made, node, at, "gpu_xid/149", domain=domain)
            add_event(made, node, at + 2, "gpu_recovery_action/gpu_reset", domain=domain)
            job(made, [node], at + 30, "FAILED")
            by_whom, reason = ("healthd", "healthd: gpu_xid/149 gpu: x") if position < 2 else ("person", "NVLink")
            made["node_states"].append(
                row(
                    "node_states",
                    cluster="c1",
                    node=node,
                    start_time=at + 60 + HOUR * (position >= 2),
                    end_time=at + DAY,
                    state="DRAIN",
                    reason=reason,
                    set_by=by_whom,
                )
            )
        job(made, trays, BEGIN + (7 * week + 2) * DAY + 40, "NODE_FAIL")
    document = lemons_of(made, tmp_path)
    assert bool(set(lemon_names(document)) & set(trays)) is has_lemons
    evidence = {row["node"]: row["score"] for row in document["candidates"]}
    assert has_lemons or not set(evidence) & set(trays)


def test_user_faults_make_no_lemon(tmp_path: Path) -> None:
    made = healthy_fleet()
    for day in range(20):
        job(made, ["g005"], BEGIN + day * DAY, "FAILED")
        add_event(made, "g005", BEGIN + day * DAY - 5, "gpu_xid/31", "warning")
    assert lemon_names(lemons_of(made, tmp_path)) == []


def test_job_killing_nodes_in_turn_makes_no_lemon(tmp_path: Path) -> None:
    made = healthy_fleet()
    for turn in range(24):
        died(made, f"g00{turn % 6}", BEGIN + turn * DAY + 60 * turn, others=63, job_id=4711)
    document = lemons_of(made, tmp_path)
    assert not {f"g00{number}" for number in range(6)} & set(lemon_names(document))


def test_lemons_are_limited_to_worst_two_percent(tmp_path: Path) -> None:
    made = healthy_fleet()
    for number in range(6):
        for time in range(3 + number):
            died(made, f"g00{number}", BEGIN + (3 * time + 1) * DAY + number)
    assert lemon_names(lemons_of(made, tmp_path)) == ["g005", "g004"]


@pytest.mark.parametrize(("nodes", "limit"), [(0, 0), (1, 0), (2, 1), (49, 1), (99, 1), (100, 2), (149, 2), (2000, 40)])
def test_max_lemons_is_two_percent_or_one_of_small_fleet(nodes: int, limit: int) -> None:
    assert lemons.max_lemons(nodes) == limit


def test_window_ends_at_newest_time_in_any_table(tmp_path: Path) -> None:
    made = healthy_fleet()
    job(made, ["g000"], TO + DAY, "COMPLETED")
    made["failures"].append(row("failures", cluster="c1", node="g001", time=BEGIN + DAY, kind="hw"))
    document = lemons_of(made, tmp_path)
    assert document["window"]["to_time"] == max(entry["end_time"] for entry in made["jobs"][:-1]) + 1


def test_known_until_is_end_of_last_job(tmp_path: Path) -> None:
    made = healthy_fleet()
    made["failures"].append(row("failures", cluster="c1", node="g001", time=TO - 1, kind="hw"))
    document = lemons_of(made, tmp_path)
    assert document["window"]["to_time"] == TO
    assert document["window"]["known_until"] == max(entry["end_time"] for entry in made["jobs"])


def test_known_until_ignores_other_clusters(tmp_path: Path) -> None:
    made = healthy_fleet()
    made["failures"].append(row("failures", cluster="far", node="f1", time=TO - 1, kind="hw"))
    document = lemons_of(made, tmp_path, Choice(cluster="c1"))
    assert document["window"]["known_until"] == max(entry["end_time"] for entry in made["jobs"])


def test_cluster_size_counts_unchosen_nodes(tmp_path: Path) -> None:
    made = healthy_fleet()
    for number, node in enumerate(made["nodes"]):
        node["switch"] = f"leaf{number % 10}"
    (entry,) = lemons_of(made, tmp_path, Choice(switch="leaf3"))["fleets"]
    assert (entry["nodes"], entry["cluster_nodes"]) == (10, 100)


@pytest.mark.parametrize("old", [True, False])
def test_old_store_is_noted_before_commands(tmp_path: Path, old: bool) -> None:
    made = healthy_fleet()
    for week in range(4):
        died(made, "g005", BEGIN + (6 * week + 3) * DAY)
    text = text_of(lemons_of(made, tmp_path) | {"old": old}, Page())
    before, line, _ = text.partition("scontrol update")
    assert line
    assert ("store ends at " in before) == old


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (1, "job 10 (1 GPU on 1 node) ended NODE_FAIL: its only node"),
        (2, "job 10 (1 GPU on 2 nodes) ended NODE_FAIL: the node that failed is not known, weight 50.0 %"),
    ],
)
def test_incident_row_describes_job_without_other_evidence(nodes: int, text: str) -> None:
    failed = Evidence("failed", 5, 5, "", 1 / nodes, job_id=10, state="NODE_FAIL", gpus=1, nodes=nodes)
    (incident,) = merge_incidents([failed.sign])
    assert lemons.incident_row(incident, [failed])["text"] == text


def test_node_out_of_service_gets_no_command(tmp_path: Path) -> None:
    made = healthy_fleet()
    for week in range(4):
        died(made, "g005", BEGIN + (6 * week + 3) * DAY)
    made["node_states"][-1] = {**made["node_states"][-1], "end_time": None}
    document = lemons_of(made, tmp_path)
    assert lemon_names(document) == ["g005"]
    assert document["nodes"][0]["command"] is None
    assert "already out of service" in text_of(document, Page())
    assert any(note.startswith("1 of 100 nodes ") for note in document["notes"])


def test_hostile_node_name_is_escaped_and_gets_no_command(tmp_path: Path) -> None:
    name = "g1;$(reboot)\x1b[31m\nx"
    made = healthy_fleet()
    made["nodes"].append(row("nodes", cluster="c1", node=name))
    for week in range(4):
        died(made, name, BEGIN + (6 * week + 3) * DAY)
    document = lemons_of(made, tmp_path)
    assert lemon_names(document) == [name]
    assert document["nodes"][0]["command"] is None
    text = text_of(document, Page())
    assert "not a valid" in text
    assert "\x1b" not in text
    assert "scontrol" not in text


def test_failures_recorded_by_other_tools_are_evidence(tmp_path: Path) -> None:
    made = empty()
    for number in range(FLEET):
        for day in range(1, 27, 4) if number == 7 else (number % 28,):
            made["failures"].append(
                row("failures", cluster="c1", node=f"g{number:03d}", time=BEGIN + day * DAY, kind="hw")
            )
    document = lemons_of(made, tmp_path)
    assert lemon_names(document) == ["g007"]
    assert document["nodes"][0]["text"].startswith("7 failures in ")
    assert "failure (hw)" in document["nodes"][0]["evidence"][0]["text"]
    assert any("never failed" in note for note in document["notes"])


def test_data_after_window_is_ignored_and_data_before_counts(tmp_path: Path) -> None:
    made = healthy_fleet()
    for week in range(4):
        died(made, "g005", BEGIN + (6 * week + 3) * DAY)
    job(made, ["g000"], TO - 1, "COMPLETED")
    usual = lemons_of(made, tmp_path / "usual")
    for day in (1, 2, 3):
        died(made, "g006", TO + day * DAY)
    assert lemons_of(made, tmp_path / "later") == usual
    died(made, "g005", BEGIN - 20 * DAY)
    assert lemons_of(made, tmp_path / "earlier")["nodes"][0]["score"] != usual["nodes"][0]["score"]


def test_lemons_handles_empty_store_and_single_row(tmp_path: Path) -> None:
    with pytest.raises(Unanswerable, match="no data about failing nodes"):
        lemons_of(empty(), tmp_path / "empty")
    made = empty()
    died(made, "g000", BEGIN)
    document = lemons_of(made, tmp_path / "one")
    assert lemon_names(document) == []
    made = empty()
    job(made, [], BEGIN, "NODE_FAIL")
    document = lemons_of(made, tmp_path / "job")
    assert (document["nodes"], document["fleets"], document["candidates"]) == ([], [], [])
    assert "None of 0 nodes" in text_of(document, Page())
    assert any("not 28 days" in note for note in document["notes"])
    assert document["cdfs"]["tickets"] == []


@pytest.mark.parametrize("seed", range(6))
def test_lemons_ignores_row_order_and_keeps_limits(tmp_path: Path, seed: int) -> None:
    made = history(Random(seed), 30)
    shuffled = {name: list(rows) for name, rows in made.items()}
    for rows in shuffled.values():
        Random(seed + 100).shuffle(rows)
    documents = []
    for number, entry in enumerate((made, shuffled)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with open_study(write_parquet(entry, folder), BEGIN, END) as study:
            documents.append(lemons.lemons(study, window_days=None))
    assert documents[0] == documents[1]
    json.dumps(documents[0], allow_nan=False)
    assert len(documents[0]["nodes"]) <= len(CLUSTERS) * lemons.max_lemons(len(NODES))
    for steps in documents[0]["cdfs"].values():
        assert steps[-1][1] == 1.0
        assert [share for _, share in steps] == sorted(share for _, share in steps)


# --- the parts


@given(signs, st.randoms(use_true_random=False))
def test_merge_incidents_separates_and_covers_all_signs(signs_of_node: list[Observation], random: Random) -> None:
    found = merge_incidents(signs_of_node)
    shuffled = list(signs_of_node)
    random.shuffle(shuffled)
    assert merge_incidents(shuffled) == found
    for before, after in pairwise(found):
        assert after.start_time > before.start_time + GAP_SECONDS
        assert after.start_time > before.end_time + GAP_AFTER_END_SECONDS
    for sign in signs_of_node:
        assert any(
            entry.start_time <= sign.start_time <= entry.end_time and entry.weight >= sign.weight for entry in found
        )


@pytest.mark.parametrize(("more", "events"), [(0, 1), (1, 2)])
@pytest.mark.parametrize(("lasts", "until"), [(0, GAP_HOURS * HOUR), (3 * DAY, 3 * DAY + HOUR)])
def test_merge_incidents_joins_signs_up_to_gap(lasts: int, until: int, more: int, events: int) -> None:
    assert len(merge_incidents([Observation(0, lasts, 1.0), Observation(until + more, until + more, 1.0)])) == events


@given(st.lists(counts, min_size=2, max_size=40), st.floats(0.0, 5.0))
def test_score_grows_with_failures_and_falls_with_days(nodes: list[DiscountedCounts], more: float) -> None:
    found = fit_prior(nodes)
    if found is None:
        assert not sum(node.failures for node in nodes)
        return
    assert sum(found.shares) == pytest.approx(1)
    node = nodes[0]
    worse, longer = DiscountedCounts(node.failures + more, node.days), DiscountedCounts(node.failures, node.days + more)
    assert score(worse, found) >= score(node, found) - 1e-9 >= score(longer, found) - 2e-9
    assert probability(worse, found, 3.0) >= probability(node, found, 3.0) - 1e-9
    assert 0 <= probability(node, found, 3.0) <= 1 + 1e-9


def test_prior_counts_in_small_fleet_and_little_in_divergent_one() -> None:
    usual = fit_prior([DiscountedCounts(0.0, 28.0)] * 30 + [DiscountedCounts(1.0, 28.0)] * 5)
    assert usual is not None
    assert 24 / 2000 / 2 < probability(DiscountedCounts(0.0, 0.0), usual, 3.0) < 24 / 2000 * 2
    spread = fit_prior([DiscountedCounts(0.0, 28.0)] * 1600 + [DiscountedCounts(40.0, 28.0)] * 400)
    assert spread is not None
    assert probability(DiscountedCounts(0.0, 0.0), spread, 3.0) > 0.1


def test_fit_prior_without_failures_or_days_is_none() -> None:
    assert fit_prior([]) is None
    assert fit_prior([DiscountedCounts(0.0, 28.0)] * 5) is None
    assert fit_prior([DiscountedCounts(3.0, 0.0)]) is None


@pytest.mark.parametrize(("a_day", "days"), [(0.002, 28.0), (0.006, 28.0), (0.006, 90.0), (0.05, 28.0)])
def test_share_named_is_share_of_drawn_lemons_named(a_day: float, days: float) -> None:
    made = fit_prior([DiscountedCounts(0.0, days)] * 170 + [DiscountedCounts(a_day * days * 200 / 30, days)] * 30)
    assert made is not None
    rates = [
        rate for rate in lemon_score.RATE_FACTORS if lemon_score.LEMON_RATES[0] < rate <= lemon_score.LEMON_RATES[1]
    ]
    draw = np.random.default_rng(7)
    counts = draw.poisson(draw.choice(rates, 4000) * made.rate * days)
    probabilities = {int(count): probability(DiscountedCounts(float(count), days), made, 3.0) for count in set(counts)}
    drawn = sum(probabilities[int(count)] >= 1 / 3 for count in counts) / len(counts)
    assert share_named([DiscountedCounts(0.0, days)], made, days, 3.0, 1 / 3) == pytest.approx(drawn, abs=0.04)


def test_share_named_requires_event_in_window() -> None:
    made = fit_prior([DiscountedCounts(0.0, 200.0)] * 90 + [DiscountedCounts(3.0, 200.0)] * 10)
    assert made is not None
    shares = [share_named([DiscountedCounts(0.0, 200.0)], made, window, 3.0, 1 / 3) for window in (1.0, 28.0, 200.0)]
    assert 0 < shares[0] < shares[1] < shares[2] <= 1


def test_window_with_few_failures_suggests_longer_window(tmp_path: Path) -> None:
    (short_window,) = lemons_of(healthy_fleet(), tmp_path / "short")["fleets"]
    assert 0 < short_window["share_named"] < lemons.MIN_NAMED_SHARE
    assert short_window["longer"] is None
    made = healthy_fleet()
    for number in range(FLEET):
        job(made, [f"g{number:03d}"], BEGIN - 170 * DAY, "COMPLETED")
    for number in range(30):
        died(made, f"g{number:03d}", BEGIN - (5 * number + 10) * DAY)
    document = lemons_of(made, tmp_path / "long")
    (long_window,) = document["fleets"]
    assert long_window["longer"]["days"] == 180
    assert long_window["longer"]["share_named"] > long_window["share_named"] > short_window["share_named"]
    assert any("fleet lemons --days 180" in note for note in document["notes"])


def test_few_named_notes_skips_windows_with_enough_failures() -> None:
    enough = {"cluster": "c1", "share_named": 0.8, "longer": None}
    few = {"cluster": "c1", "share_named": 0.2, "longer": {"days": 180, "share_named": 0.22}}
    assert lemons.few_named_notes([enough, {**enough, "share_named": None}], BEGIN, TO) == []
    (note,) = lemons.few_named_notes([few], BEGIN, TO)
    assert "--days" not in note


def test_discounted_counts_discount_old_events() -> None:
    record = Record(merge_incidents([Observation(at * DAY, at * DAY, 1.0) for at in (0, 200, 390)]), [(0, 400 * DAY)])
    known = discounted_counts(record, (372 * DAY, 400 * DAY))
    assert 1.0 < known.failures < 2.0
    assert 28 < known.days < 28 + 372 / 2
    assert discounted_counts(record, (0, DAY)) == DiscountedCounts(1.0, 1.0)


def test_down_node_is_blamed_else_all_nodes(tmp_path: Path) -> None:
    fails = [
        FailedJobSighting("c1", 1, 1, "NODE_FAIL", 1000, 32, 4, f"n{number}", 1000, "", "", "unknown")
        for number in range(4)
    ]
    found = failed_job_evidence([fails[2]._replace(time=990, severity="down", kind="slurm")], fails)
    assert {node: [entry.weight for entry in evidence] for (_, node), evidence in found.items()} == {"n2": [1.0]}
    found = failed_job_evidence([], fails)
    assert {node: [entry.weight for entry in evidence] for (_, node), evidence in found.items()} == {
        f"n{number}": [0.25] for number in range(4)
    }


def test_condition_never_seen_with_failures_has_low_share() -> None:
    seen = [
        ConditionMoment("c", f"n{number}", 100, code, "degraded", "condition", True)
        for number in range(18)
        for code in ("pcie_link/slow", "gpu_xid/79")
    ]
    met = [
        FailedJobSighting(
            "c", number, number, "FAILED", 110, 8, 1, f"n{number}", 100, "gpu_xid/79", "degraded", "condition"
        )
        for number in range(18)
    ]
    shares = failure_shares(seen, met)
    assert shares == {"pcie_link/slow": 1 / 20, "gpu_xid/79": 19 / 20}
    idle = [moment._replace(node=f"idle-{moment.node}", busy=False) for moment in seen]
    assert failure_shares([*seen, *idle], met) == shares


def test_moments_are_busy_exactly_while_job_is_on_node(tmp_path: Path) -> None:
    made = empty()
    for start, end in ((0, 10), (2, 4), (20, 24)):  # hours; the second one lies within the first
        times = {"start_time": BEGIN + start * HOUR, "end_time": BEGIN + end * HOUR}
        job(made, ["g1"], BEGIN + end * HOUR, "COMPLETED")
        made["jobs"][-1] |= times
        made["job_nodes"][-1] |= times
    for hour in (-1, 1, 5, 11, 21, 25):
        add_event(made, "g1", BEGIN + hour * HOUR, "gpu_xid/79")
    with open_study(write_parquet(made, tmp_path), BEGIN - DAY, TO) as study:
        moments = study.query("lemons_moments", ConditionMoment, window_from=BEGIN - DAY, window_to=TO)
    assert [moment.busy for moment in moments] == [False, True, True, False, True, False]


@pytest.mark.parametrize("end", [BEGIN + 4 * HOUR, None])
def test_moments_are_busy_with_job_from_before_period(end: int | None, tmp_path: Path) -> None:
    made = empty()
    job(made, ["g1"], BEGIN + 4 * HOUR, "COMPLETED")
    times = {"start_time": BEGIN - DAY, "end_time": end}
    made["jobs"][-1] |= times
    made["job_nodes"][-1] |= times
    for hour in (1, 3):
        add_event(made, "g1", BEGIN + hour * HOUR, "gpu_xid/79")
    with open_study(write_parquet(made, tmp_path), BEGIN, TO) as study:
        moments = study.query("lemons_moments", ConditionMoment, window_from=BEGIN, window_to=TO)
    assert [moment.busy for moment in moments] == [True, True]


def test_merge_outages_joins_touching_and_skips_maintenance() -> None:
    times = ((0, 10), (10, 20), (30, 40), (50, None))
    rows = [OutageRow("c", "n", start, end, "DRAIN", "", "person") for start, end in times]
    planned = [Maintenance("c", "n", 25, 45)]
    assert merge_outages(rows, planned) == {
        ("c", "n"): [Outage(0, 20, "person", "person", ""), Outage(50, None, "person", "person", "")]
    }
    assert service_spells(5, 60, merge_outages(rows, planned)["c", "n"]) == [(20, 50)]


@given(spells, st.integers(0, 50))
def test_service_spells_do_not_overlap_outages(outages: list[Outage], first: int) -> None:
    for start, until in service_spells(first, 100, outages):
        assert first <= start < until <= 100
        for outage in outages:
            end = 100 if outage.end_time is None else outage.end_time
            assert end <= start or outage.start_time >= until or end <= outage.start_time


@given(st.text(max_size=80), st.lists(st.text(max_size=12), max_size=3))
def test_shell_command_is_safe_for_any_name(name: str, reasons: list[str]) -> None:
    line = lemon_command.shell_command(name, ", ".join(reasons))
    if line is None:
        assert not name.isalnum() or not name.isascii() or len(name) > 64 or name.upper() in ("ALL", "NODESET")
        return
    assert not set("\n`$\\") & set(line)
    first, *_, last = shlex.split(line)
    assert (first, shlex.split(line)[2]) == ("scontrol", f"NodeName={name}")
    assert last.startswith("Reason=lemon:")
    assert len(last) <= 255 + len("Reason=")


def test_evidence_of_equal_times_has_fixed_order() -> None:
    evidence = [Evidence("ticket", 5, 5, "ticket", 0.1, "x"), Evidence("out", 5, 9, "down", 1.0, "y")]
    (incident,) = merge_incidents(entry.sign for entry in evidence)
    assert re.match(r"a ticket .*; it went down", lemons.incident_row(incident, evidence)["text"])
