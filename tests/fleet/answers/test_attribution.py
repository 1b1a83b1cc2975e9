"""Tests of `attribution`: the most likely cause of each failed job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fleet_history import BEGIN, DAY, END, HOUR, History, history, row, write
from fleet_views import text_of
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healthd.agent.settings import registry
from healthd.common.job_failures import EndsJob
from healthd.common.page import Page
from healthd.fleet.answers.attribution import ClearedFlag, Ticket, attribution, gpu_swaps
from healthd.fleet.answers.causes import CAUSES, is_node_fault, meaning
from healthd.fleet.answers.document import Document, Unanswerable
from healthd.fleet.answers.states import states
from healthd.fleet.answers.study import Choice, Study, open_study
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python
ENDED = BEGIN + DAY  # end of the jobs below


@contextmanager
def study(made: History, folder: Path, chosen: Choice | None = None, random: Random | None = None) -> Iterator[Study]:
    folder.mkdir(exist_ok=True)
    with open_study(write(made, folder, 1 if random is None else 3, random), BEGIN, END, chosen, 1, 512) as asked:
        yield asked


def asked_of(made: History, chosen: Choice | None = None, random: Random | None = None) -> Document:
    with TemporaryDirectory() as folder, study(made, Path(folder), chosen, random) as asked:
        return attribution(asked)


class Made:
    """A history to which tests add jobs and conditions. Each node is observed from the beginning to the end."""

    def __init__(self, *nodes: str, observed: bool = True) -> None:
        self.rows: History = {name: [] for name in TABLES}
        self._seq = 0
        for node in nodes:
            for hour in range((END - BEGIN) // HOUR + 1 if observed else 1):
                self.line(node, BEGIN + hour * HOUR, "alive")

    def line(self, node: str, time: int, event: str, **more: Any) -> None:
        self._seq += 1
        plain = {"boot_id": "b", "stream_id": f"s-{node}", "mono": 1.0 * time, "schema_version": 1}
        self.rows["events"].append(
            row("events", cluster="c1", node=node, seq=self._seq, time=time, event=event, **plain, **more)
        )
        # Number the lines of a stream without gaps, in order of time.
        of_stream = [one for one in self.rows["events"] if one["node"] == node]
        for number, one in enumerate(sorted(of_stream, key=lambda one: (one["time"], one["seq"])), 1):
            one["place"] = number

    def seen(
        self, node: str, code: str, time: int, severity: str = "critical", kind: str = "edge", **more: Any
    ) -> None:
        plain = {"condition_id": f"{code}-{time}", "subject": "p", "observed": False, "history": False}
        first = {"first_time": time, "last_time": time} | more
        self.line(
            node, first["last_time"], first.pop("event", "opened"), code=code, check_name=code.partition("/")[0],
            severity=severity, kind=kind, **plain, **first,
        )  # fmt: skip

    def job(self, number: int, *nodes: str, state: str = "FAILED", end: int | None = ENDED, **more: Any) -> None:
        values = {"submit_time": BEGIN, "start_time": BEGIN + HOUR, "end_time": end} | more
        its = {"gpus": 8 * len(nodes), "nodes": len(nodes)} | values
        self.rows["jobs"].append(row("jobs", cluster="c1", db_index=number, job_id=100 + number, state=state, **its))
        times = {name: values[name] for name in ("submit_time", "start_time", "end_time")}
        self.rows["job_nodes"] += [row("job_nodes", cluster="c1", db_index=number, node=one, **times) for one in nodes]

    @property
    def history(self) -> History:
        events = [{**one, "seq": one["place"]} for one in self.rows["events"]]
        for one in events:
            del one["place"]
        return {**self.rows, "events": events}


def only(told: Document) -> dict[str, Any]:
    (job,) = told["jobs"]
    return dict(job)


def test_pcie_xid_79_and_a_critical_interrupt_are_one_incident_with_all_others_beside_it():
    made = Made("n1", "n2")
    made.job(1, "n1", "n2")
    made.seen("n1", "ipmi_sel/critical_interrupt", ENDED - 20, "degraded")
    made.seen("n1", "gpu_xid/79", ENDED - 10)
    made.seen("n1", "pcie_aer/fatal", ENDED - 5)
    made.seen("n2", "gpu_temperature/hot", ENDED - 5, "warning", "level")
    told = asked_of(made.history)
    job = only(told)
    names = ("job", "db_index", "cause", "check", "code", "node", "confidence")
    assert [job[name] for name in names] == [101, 1, "pcie", "pcie_aer", "pcie_aer/fatal", "n1", "high"]
    assert [(one["cause"], one["code"], one["node"]) for one in job["also"]] == [
        ("pcie", "ipmi_sel/critical_interrupt", "n1"),
        ("pcie", "gpu_xid/79", "n1"),
        ("gpu", "gpu_temperature/hot", "n2"),
    ]
    assert (told["unattributed"], told["by_cause"], told["expected_by_chance"]) == (0, {"pcie": 1}, 0)
    facts = {one["what"]: (one["of"], one["together"]) for one in told["co_occurrence"]}
    assert facts["PCIe error and Xid 79"] == facts["PCIe error, Xid 79, critical interrupt"] == (1, 1)
    assert facts["PCIe error without any Xid"] == (1, 0)


def test_a_level_that_merely_stands_is_no_cause_and_one_that_begins_is():
    made = Made("n1")
    made.job(1, "n1", end=ENDED)
    made.job(2, "n1", end=ENDED + 6 * HOUR)
    for time in (ENDED, ENDED + 6 * HOUR):
        event = "opened" if time == ENDED else "seen_again"
        made.seen("n1", "mount/missing", ENDED - 60, kind="level", event=event, last_time=time)
    told = asked_of(made.history)
    assert [(job["db_index"], job["code"]) for job in told["jobs"]] == [(1, "mount/missing")]
    assert told["unattributed_because"] == {"observed": 1, "not_observed": 0, "no_node_list": 0}


@pytest.mark.parametrize(("before", "found"), [(601, 0), (600, 1), (0, 1), (-300, 1), (-301, 0)])
def test_an_edge_counts_from_ten_minutes_before_the_end_until_five_after(before, found):
    made = Made("n1")
    made.job(1, "n1")
    made.seen("n1", "gpu_xid/95", ENDED - before)
    assert len(asked_of(made.history)["jobs"]) == found


def test_what_is_seen_an_hour_earlier_is_expected_by_chance():
    made = Made("n1")
    made.job(1, "n1")
    made.seen("n1", "gpu_xid/95", ENDED - HOUR)
    told = asked_of(made.history)
    assert (told["jobs"], told["expected_by_chance"], told["unattributed"]) == ([], 1, 1)
    assert [(one["cause"], one["jobs"], one["by_chance"]) for one in told["causes"]] == [("gpu_memory", 0, 1)]
    assert told["by_cause"] == {}


def test_without_a_cause_it_says_how_well_the_nodes_were_looked_at():
    made = Made("n1")
    for hour in range(2):
        made.line("n2", BEGIN + hour * HOUR, "alive")  # n2 is not observed afterwards
    made.job(1, "n1")
    made.job(2, "n2")
    made.job(3, "n1", "n2")
    made.job(4)
    made.job(5, "n3", state="NODE_FAIL")
    made.job(6, "n1", state="COMPLETED")
    told = asked_of(made.history)
    assert told["unattributed_because"] == {"observed": 1, "not_observed": 3, "no_node_list": 1}
    assert told["unattributed_by_state"] == {"FAILED": 4, "NODE_FAIL": 1}
    assert told["unattributed_node_fails"] == 1
    assert "1 of the jobs without a cause ended NODE_FAIL" in " ".join(text_of(told, Page(100)).split())
    assert (told["failures"], told["unattributed"], told["attributed"]) == (5, 5, 0)
    looked = {one["db_index"]: one["because"] for one in told["unattributed_jobs"]}
    assert [looked[number] for number in range(1, 6)] == [
        *("observed", "not_observed", "not_observed", "no_node_list", "not_observed")
    ]
    assert "1 failed jobs have no node list" in " ".join(told["notes"])


def test_a_job_that_ended_before_it_began_lost_nothing_and_has_its_cause():
    made = Made("n1")
    made.job(1, "n1", start_time=ENDED + HOUR)
    made.seen("n1", "gpu_xid/95", ENDED)
    job = only(asked_of(made.history))
    assert (job["cause"], job["gpu_seconds"], job["lost_gpu_seconds"]) == ("gpu_memory", 0, 0)


def test_a_job_loses_half_an_hour_at_most():
    made = Made("n1")
    made.job(1, "n1", start_time=ENDED - 600)
    made.job(2, "n1", start_time=ENDED - 7200)
    made.seen("n1", "mount/missing", ENDED)
    lost = {job["db_index"]: (job["gpu_seconds"], job["lost_gpu_seconds"]) for job in asked_of(made.history)["jobs"]}
    assert lost == {1: (8 * 600, 8 * 600), 2: (8 * 7200, 8 * 1800)}


def test_a_fault_that_names_another_job_of_the_node_is_that_jobs():
    made = Made("n1")
    made.job(1, "n1", array_job_id=7, array_task_id=3)
    made.job(2, "n1")
    made.seen("n1", "gpu_xid/95", ENDED, jobs="102 999")
    assert only(asked_of(made.history))["db_index"] == 2
    made.rows["events"][-1]["jobs"] = "7_3"
    assert only(asked_of(made.history))["db_index"] == 1
    made.rows["events"][-1]["rest"] = '{"jobs_more":3}'  # the list was cut: it may name any job
    assert len(asked_of(made.history)["jobs"]) == 2


def test_a_choice_leaves_its_jobs_and_conditions_on_their_other_nodes_count():
    made = Made("n1", "n2")
    made.rows["nodes"] = [row("nodes", cluster="c1", node=one, gpu_model=one.upper()) for one in ("n1", "n2")]
    made.job(1, "n1", "n2")
    made.job(2, "n2")
    made.seen("n2", "mount/missing", ENDED)
    told = asked_of(made.history, Choice(model="N1"))
    assert [(job["db_index"], job["node"]) for job in told["jobs"]] == [(1, "n2")]
    assert told["failures"] == 1
    assert (
        "1 of these 1 causes were on nodes that were not chosen: a job is chosen whole if any of its nodes is."
        in (told["notes"])
    )
    assert not any("not chosen" in note for note in asked_of(made.history)["notes"])


def test_the_dates_of_checks_are_those_at_which_most_of_the_fleet_got_them():
    nodes = [f"n{number}" for number in range(20)]
    made = Made(*nodes, observed=False)
    for number, node in enumerate(nodes):
        made.line(node, ENDED + number, "check_enabled", check_name="mount", version="0.2")
    made.line(
        "n0", ENDED + DAY, "check_changed", check_name="gpu_ecc", version="0.3"
    )  # a single node counts as no rollout
    made.job(1, "n1")
    (date,) = asked_of(made.history)["check_dates"]
    assert (date["check"], date["event"], date["nodes"], date["first_time"]) == ("mount", "check_enabled", 20, ENDED)
    assert date["time"] == ENDED + 9


def test_the_weeks_have_each_cause_and_the_gpu_hours_of_all_jobs():
    made = Made("n1")
    made.job(1, "n1")
    made.job(2, "n1", state="COMPLETED", start_time=ENDED - 2 * HOUR)
    made.job(3, "n1", state="RUNNING", end=None, start_time=ENDED - HOUR)  # counts until the end of the known jobs
    made.seen("n1", "mount/missing", ENDED)
    told = asked_of(made.history)
    assert sum(one["gpu_hours"] for one in told["weeks"]) == pytest.approx(8 * ((ENDED - BEGIN) / HOUR - 1 + 2 + 1))
    assert sum(one["jobs"] for one in told["weeks"]) == sum(one["incidents"] for one in told["weeks"]) == 1
    assert sum(one["days"] for one in told["weeks"]) == pytest.approx((END - BEGIN) / DAY)


def test_gpus_that_were_exchanged_are_known_from_tickets_and_from_flags_that_a_gpu_keeps_for_life():
    flags = [ClearedFlag("c", node, "p", "gpu_row_remap/failure", 1500) for node in ("n1", "n2", "n2")]
    words = {
        "n1": "Replaced GPU 3",
        "n3": "swap gpus",
        "n4": "replace DIMM",
        "n5": "look at the GPU",
        "n6": "rma: GPU4",
    }
    found = gpu_swaps(flags, [Ticket("c", node, 1000, 2000, text) for node, text in words.items()])
    assert [(one["node"], one["why"]) for one in found] == [
        ("n1", "ticket"),
        ("n3", "ticket"),
        ("n2", "gpu_row_remap/failure"),
    ]


def test_a_flag_for_life_that_is_gone_is_another_gpu_and_one_that_only_went_unseen_is_not():
    made = Made("n1", "n2")
    for node, why in (("n1", "repaired by ann"), ("n2", "others")):
        made.seen(node, "gpu_row_remap/failure", ENDED, event="cleared", cleared_by=why)
    made.rows["nodes"] = [row("nodes", cluster="c1", node="n1", gpus=8)]
    made.job(1, "n1")
    swaps = asked_of(made.history)["gpu_swaps"]
    assert [(one["node"], one["time"]) for one in swaps["swaps"]] == [("n1", ENDED)]
    assert swaps["per_1000_gpus_and_year"] == pytest.approx(1000 / 8 / ((END - BEGIN) / (365.25 * DAY)))


def test_a_store_without_jobs_or_without_anything_seen_says_what_is_missing(tmp_path: Path):
    empty: History = {name: [] for name in TABLES}
    with study(empty, tmp_path / "a") as asked, pytest.raises(Unanswerable, match="the store has no jobs"):
        attribution(asked)
    made = Made()
    made.job(1, "n1")
    with study(made.history, tmp_path / "b") as asked, pytest.raises(Unanswerable, match="the store has no events"):
        attribution(asked)


def test_a_store_of_one_job_and_one_line_answers():
    made = Made("n1", observed=False)
    made.job(1, "n1", state="COMPLETED")
    told = asked_of(made.history)
    assert (told["failures"], told["jobs"], told["weeks"], told["spikes"], told["by_cause"]) == (0, [], [], [], {})
    assert "No job failed in this period." in text_of(told, Page())


EXAMPLES = settings(max_examples=5, deadline=None, suppress_health_check=also(*HealthCheck))


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing_and_the_sums_hold(random):
    made = history(random, 25)
    if not made["jobs"] or not (made["events"] or made["scraped_conditions"]):
        return
    told = asked_of(made)
    assert told == asked_of(made, random=random)
    json.dumps(told, allow_nan=False)
    failed = [one for one in made["jobs"] if one["state"] in ("FAILED", "NODE_FAIL") and BEGIN <= one["end_time"] < END]
    assert told["failures"] == len(failed) == told["attributed"] + told["unattributed"]
    assert told["attributed"] == len(told["jobs"]) == sum(told["by_cause"].values()) == sum(told["by_domain"].values())
    assert told["unattributed"] == sum(told["unattributed_because"].values())
    assert sum(one["jobs"] for one in told["weeks"]) == told["attributed"]
    assert all(job["cause"] in CAUSES and job["confidence"] in ("high", "medium", "low") for job in told["jobs"])
    assert len({(one["cluster"], one["db_index"]) for one in told["jobs"]}) == len(told["jobs"])


def test_these_histories_have_jobs_with_a_cause():
    """Without them, the test above would compare empty answers."""
    found = 0
    for seed in range(12):
        found += len(asked_of(history(Random(seed), 25))["jobs"])
        if found > 5:
            break
    assert found > 5


def test_the_text_names_each_cause_and_what_chance_gives():
    made = Made("n1")
    made.job(1, "n1")
    made.seen("n1", "mount/missing", ENDED)
    shown = text_of(asked_of(made.history), Page())
    assert "Of 1 job that failed or lost a node, 1 has a most likely cause" in " ".join(shown.split())
    assert "mount" in shown
    assert "By chance alone 0 jobs would have a cause" in " ".join(shown.split())


ENDING = sorted(
    code
    for code in registry.explained(registry.built_in_checks())
    if is_node_fault(code) and meaning(code).ends != EndsJob.IF_NAMED
)


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL"])
@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_states_and_attribution_agree_on_what_ends_a_job(state: str, nodes: tuple[str, ...]) -> None:
    """Use one job and one critical condition for each code that can end jobs."""
    made = Made("n1", "n2")
    for number, code in enumerate(ENDING, 1):
        end = ENDED + number * HOUR
        made.job(number, *nodes, state=state, end=end)
        made.seen("n1", code, end - 30)
    with (
        TemporaryDirectory() as folder,
        open_study(write(made.history, Path(folder)), BEGIN, ENDED + 999 * HOUR) as asked,
    ):
        attributed, counted = attribution(asked), states(asked)
    assert {job["db_index"] for job in attributed["jobs"]} == set(range(1, len(ENDING) + 1))
    assert counted["infrastructure"]["jobs"] == len(ENDING)
    assert attributed["unattributed"] == 0
