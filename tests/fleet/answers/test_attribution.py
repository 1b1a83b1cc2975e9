"""Tests of `attribution`: the most likely cause of each failed job."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fleet_history import BEGIN, DAY, END, HOUR, History, history, row, write_parquet
from fleet_views import text_of
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healthd.agent.settings import registry
from healthd.common.job_failures import EndsJob
from healthd.common.page import Page
from healthd.common.slurm.drain_reason import domain_id
from healthd.fleet.answers.attribution import ClearedFlag, ReplacedGpu, Ticket, attribution, gpu_swaps
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
    with open_study(
        write_parquet(made, folder, 1 if random is None else 3, random), BEGIN, END, chosen, 1, 512
    ) as opened:
        yield opened


def attribution_of(made: History, chosen: Choice | None = None, random: Random | None = None) -> Document:
    with TemporaryDirectory() as folder, study(made, Path(folder), chosen, random) as opened:
        return attribution(opened)


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
        of_stream = [entry for entry in self.rows["events"] if entry["node"] == node]
        for number, entry in enumerate(sorted(of_stream, key=lambda entry: (entry["time"], entry["seq"])), 1):
            entry["place"] = number

    def seen(
        self, node: str, code: str, time: int, severity: str = "critical", kind: str = "edge", **more: Any
    ) -> None:
        plain = {"condition_id": f"{code}-{time}", "subject": "p", "observed": False, "history": False}
        plain |= {name: more.pop(name) for name in ("condition_id", "subject") if name in more}
        first = {"first_time": time, "last_time": time} | more
        self.line(
            node, first["last_time"], first.pop("event", "opened"), code=code, check_name=code.partition("/")[0],
            severity=severity, kind=kind, **plain, **first,
        )  # fmt: skip

    def job(self, number: int, *nodes: str, state: str = "FAILED", end: int | None = ENDED, **more: Any) -> None:
        values = {"submit_time": BEGIN, "start_time": BEGIN + HOUR, "end_time": end} | more
        columns = {"gpus": 8 * len(nodes), "nodes": len(nodes)} | values
        self.rows["jobs"].append(
            row("jobs", cluster="c1", db_index=number, job_id=100 + number, state=state, **columns)
        )
        times = {name: values[name] for name in ("submit_time", "start_time", "end_time")}
        self.rows["job_nodes"] += [
            row("job_nodes", cluster="c1", db_index=number, node=node, **times) for node in nodes
        ]

    @property
    def history(self) -> History:
        events = [{**event, "seq": event["place"]} for event in self.rows["events"]]
        for event in events:
            del event["place"]
        return {**self.rows, "events": events}


def only_job(answer: Document) -> dict[str, Any]:
    (job,) = answer["jobs"]
    return dict(job)


def test_pcie_error_with_xid_79_is_one_incident():
    made = Made("n1", "n2")
    made.job(1, "n1", "n2")
    made.seen("n1", "ipmi_sel/critical_interrupt", ENDED - 20, "degraded")
    made.seen("n1", "gpu_xid/79", ENDED - 10)
    made.seen("n1", "pcie_aer/fatal", ENDED - 5)
    made.seen("n2", "gpu_temperature/hot", ENDED - 5, "warning", "level")
    answer = attribution_of(made.history)
    job = only_job(answer)
    names = ("job", "db_index", "cause", "check", "code", "node", "confidence")
    assert [job[name] for name in names] == [101, 1, "pcie", "pcie_aer", "pcie_aer/fatal", "n1", "high"]
    assert [(entry["cause"], entry["code"], entry["node"]) for entry in job["also"]] == [
        ("pcie", "ipmi_sel/critical_interrupt", "n1"),
        ("pcie", "gpu_xid/79", "n1"),
        ("gpu", "gpu_temperature/hot", "n2"),
    ]
    assert (answer["unattributed"], answer["by_cause"], answer["expected_by_chance"]) == (0, {"pcie": 1}, 0)
    facts = {entry["what"]: (entry["of"], entry["together"]) for entry in answer["co_occurrence"]}
    assert facts["PCIe error and Xid 79"] == facts["PCIe error, Xid 79, critical interrupt"] == (1, 1)
    assert facts["PCIe error without any Xid"] == (1, 0)


RACK = "00000001-0000-0000-0000-000000000001"


def trays(number: int, domain: str | None = RACK, seconds: int = 1) -> Made:
    """Return a history in which these nodes report a link fault and lose a job each."""
    nodes = [f"t{at}" for at in range(1, number + 1)]
    made = Made(*nodes)
    for at, node in enumerate(nodes):
        made.job(at, node, end=ENDED + 60 * at)
        made.seen(node, "gpu_xid/149", ENDED + seconds * at, nvlink_domain=domain)
        made.seen(node, "gpu_recovery_action/gpu_reset", ENDED + 2 + seconds * at, nvlink_domain=domain)
    return made


def test_jobs_ended_by_fault_of_nvlink_domain_are_one_incident():
    answer = attribution_of(trays(6).history)
    (cause,) = answer["causes"]
    names = ("cause", "domain", "jobs", "incidents", "nodes")
    assert [cause[name] for name in names] == ["nvlink_switch", "hardware", 6, 1, 1]
    assert {(job["cause"], job["nvlink_domain"], job["code"]) for job in answer["jobs"]} == {
        ("nvlink_switch", RACK, "gpu_xid/149")
    }
    assert {entry["cause"] for job in answer["jobs"] for entry in job["also"]} == {"nvlink_switch"}
    assert sum(week["incidents"] for week in answer["weeks"]) == 1
    (fault,) = answer["domain_faults"]
    assert fault == {
        "cluster": "c1",
        "domain": RACK,
        "id": domain_id(RACK),
        "time": ENDED,
        "suspect": "switch side",
        "nodes": [f"t{at}" for at in range(1, 7)],
        "jobs": 6,
    }
    assert "switch side of an NVLink domain" in text_of(answer, Page(100))


@pytest.mark.parametrize(
    "made", [trays(2), trays(6, domain=None), trays(3, seconds=31)], ids=["two", "no domain", "62 s"]
)
def test_jobs_ended_by_faults_of_single_nodes_are_incidents_of_these(made):
    answer = attribution_of(made.history)
    nodes = len(answer["jobs"])
    (cause,) = answer["causes"]
    assert [cause[name] for name in ("cause", "jobs", "incidents", "nodes")] == ["nvlink", nodes, nodes, nodes]
    assert answer["domain_faults"] == []
    assert {job["nvlink_domain"] for job in answer["jobs"]} == {None}


def test_own_fault_of_a_node_is_the_cause_beside_fault_of_nvlink_domain():
    made = trays(6)
    made.seen("t3", "pcie_aer/fatal", ENDED, nvlink_domain=RACK)
    answer = attribution_of(made.history)
    assert {job["node"]: job["cause"] for job in answer["jobs"]}["t3"] == "pcie"
    assert answer["by_cause"] == {"pcie": 1, "nvlink_switch": 5}


def test_level_condition_is_cause_only_when_it_opens():
    made = Made("n1")
    made.job(1, "n1", end=ENDED)
    made.job(2, "n1", end=ENDED + 6 * HOUR)
    for time in (ENDED, ENDED + 6 * HOUR):
        event = "opened" if time == ENDED else "seen_again"
        made.seen("n1", "mount/missing", ENDED - 60, kind="level", event=event, last_time=time)
    answer = attribution_of(made.history)
    assert [(job["db_index"], job["code"]) for job in answer["jobs"]] == [(1, "mount/missing")]
    assert answer["unattributed_because"] == {"observed": 1, "not_observed": 0, "no_node_list": 0}


@pytest.mark.parametrize(("before", "found"), [(601, 0), (600, 1), (0, 1), (-300, 1), (-301, 0)])
def test_edge_counts_from_10_min_before_end_to_5_min_after(before, found):
    made = Made("n1")
    made.job(1, "n1")
    made.seen("n1", "gpu_xid/95", ENDED - before)
    assert len(attribution_of(made.history)["jobs"]) == found


def test_condition_one_hour_earlier_counts_as_chance():
    made = Made("n1")
    made.job(1, "n1")
    made.seen("n1", "gpu_xid/95", ENDED - HOUR)
    answer = attribution_of(made.history)
    assert (answer["jobs"], answer["expected_by_chance"], answer["unattributed"]) == ([], 1, 1)
    assert [(entry["cause"], entry["jobs"], entry["by_chance"]) for entry in answer["causes"]] == [("gpu_memory", 0, 1)]
    assert answer["by_cause"] == {}


def test_jobs_without_cause_are_split_by_observation():
    made = Made("n1")
    for hour in range(2):
        made.line("n2", BEGIN + hour * HOUR, "alive")  # n2 is not observed afterwards
    made.job(1, "n1")
    made.job(2, "n2")
    made.job(3, "n1", "n2")
    made.job(4)
    made.job(5, "n3", state="NODE_FAIL")
    made.job(6, "n1", state="COMPLETED")
    answer = attribution_of(made.history)
    assert answer["unattributed_because"] == {"observed": 1, "not_observed": 3, "no_node_list": 1}
    assert answer["unattributed_by_state"] == {"FAILED": 4, "NODE_FAIL": 1}
    assert answer["unattributed_node_fails"] == 1
    assert (answer["failures"], answer["unattributed"], answer["attributed"]) == (5, 5, 0)
    reasons = {entry["db_index"]: entry["because"] for entry in answer["unattributed_jobs"]}
    assert [reasons[number] for number in range(1, 6)] == [
        *("observed", "not_observed", "not_observed", "no_node_list", "not_observed")
    ]
    assert any(note.startswith("1 failed jobs ") for note in answer["notes"])


def test_job_with_end_before_start_has_cause_and_no_loss():
    made = Made("n1")
    made.job(1, "n1", start_time=ENDED + HOUR)
    made.seen("n1", "gpu_xid/95", ENDED)
    job = only_job(attribution_of(made.history))
    assert (job["cause"], job["gpu_seconds"], job["lost_gpu_seconds"]) == ("gpu_memory", 0, 0)


def test_job_loses_at_most_30_minutes():
    made = Made("n1")
    made.job(1, "n1", start_time=ENDED - 600)
    made.job(2, "n1", start_time=ENDED - 7200)
    made.seen("n1", "mount/missing", ENDED)
    lost = {
        job["db_index"]: (job["gpu_seconds"], job["lost_gpu_seconds"]) for job in attribution_of(made.history)["jobs"]
    }
    assert lost == {1: (8 * 600, 8 * 600), 2: (8 * 7200, 8 * 1800)}


def test_fault_with_job_ids_counts_only_for_those_jobs():
    made = Made("n1")
    made.job(1, "n1", array_job_id=7, array_task_id=3)
    made.job(2, "n1")
    made.seen("n1", "gpu_xid/95", ENDED, jobs="102 999")
    assert only_job(attribution_of(made.history))["db_index"] == 2
    made.rows["events"][-1]["jobs"] = "7_3"
    assert only_job(attribution_of(made.history))["db_index"] == 1
    made.rows["events"][-1]["rest"] = '{"jobs_more":3}'  # the list was cut: it may name any job
    assert len(attribution_of(made.history)["jobs"]) == 2


def test_choice_selects_jobs_but_not_nodes_of_causes():
    made = Made("n1", "n2")
    made.rows["nodes"] = [row("nodes", cluster="c1", node=node, gpu_model=node.upper()) for node in ("n1", "n2")]
    made.job(1, "n1", "n2")
    made.job(2, "n2")
    made.seen("n2", "mount/missing", ENDED)
    answer = attribution_of(made.history, Choice(model="N1"))
    assert [(job["db_index"], job["node"]) for job in answer["jobs"]] == [(1, "n2")]
    assert answer["failures"] == 1
    assert any(note.startswith("1 of these 1 causes ") for note in answer["notes"])
    assert not any("not chosen" in note for note in attribution_of(made.history)["notes"])


def test_check_dates_are_median_over_nodes():
    nodes = [f"n{number}" for number in range(20)]
    made = Made(*nodes, observed=False)
    for number, node in enumerate(nodes):
        made.line(node, ENDED + number, "check_enabled", check_name="mount", version="0.2")
    made.line(
        "n0", ENDED + DAY, "check_changed", check_name="gpu_ecc", version="0.3"
    )  # a single node counts as no rollout
    made.job(1, "n1")
    (date,) = attribution_of(made.history)["check_dates"]
    assert (date["check"], date["event"], date["nodes"], date["first_time"]) == ("mount", "check_enabled", 20, ENDED)
    assert date["time"] == ENDED + 9


def test_weeks_have_causes_and_gpu_hours_of_all_jobs():
    made = Made("n1")
    made.job(1, "n1")
    made.job(2, "n1", state="COMPLETED", start_time=ENDED - 2 * HOUR)
    made.job(3, "n1", state="RUNNING", end=None, start_time=ENDED - HOUR)  # counts until the end of the known jobs
    made.seen("n1", "mount/missing", ENDED)
    answer = attribution_of(made.history)
    assert sum(entry["gpu_hours"] for entry in answer["weeks"]) == pytest.approx(
        8 * ((ENDED - BEGIN) / HOUR - 1 + 2 + 1)
    )
    assert sum(entry["jobs"] for entry in answer["weeks"]) == sum(entry["incidents"] for entry in answer["weeks"]) == 1
    assert sum(entry["days"] for entry in answer["weeks"]) == pytest.approx((END - BEGIN) / DAY)


def test_gpu_swaps_come_from_tickets_and_permanent_flags():
    flags = [ClearedFlag("c", node, "p", "gpu_row_remap/failure", 1500) for node in ("n1", "n2", "n2")]
    texts = {
        "n1": "Replaced GPU 3",
        "n3": "swap gpus",
        "n4": "replace DIMM",
        "n5": "look at the GPU",
        "n6": "rma: GPU4",
    }
    found = gpu_swaps(flags, [Ticket("c", node, 1000, 2000, text) for node, text in texts.items()])
    assert [(entry["node"], entry["why"]) for entry in found] == [
        ("n1", "ticket"),
        ("n3", "ticket"),
        ("n2", "gpu_row_remap/failure"),
    ]


def test_gpu_swaps_are_not_inferred_while_the_node_lists_its_gpus():
    flags = [ClearedFlag("c", "n1", "p", "gpu_row_remap/failure", time) for time in (1499, 1500)]
    tickets = [Ticket("c", "n1", time, None, "swap GPU") for time in (900, 1600)]
    gone = ReplacedGpu("c", "n1", "p", 1700, "1", "GPU-1", "GPU-2", "2", "gpu_xid/79")
    found = gpu_swaps(flags[1:], tickets, [gone], {("c", "n1"): 1500})
    assert [(entry["time"], entry["why"], entry["serial"]) for entry in found] == [
        (900, "ticket", None),
        (1700, "gpu_xid/79", "1"),
    ]
    assert [entry["time"] for entry in gpu_swaps(flags, [], [gone], {("c", "n1"): 1500})] == [1499, 1700]


def test_gpu_swaps_follow_serial_numbers():
    from healthd.fleet.views.attribution import view

    made = Made("n1", "n2")
    made.job(1, "n1")
    for slot in ("s1", "s2"):
        made.seen("n1", "gpu_ecc/uncorrected", ENDED, subject=slot, condition_id=slot)
    lists = {1: ("n1", BEGIN, {"s1": "1", "s2": "2"}), 2: ("n1", ENDED + DAY, {"s1": "3", "s2": "4"})}
    lists |= {3: ("n2", ENDED + DAY, {"s1": "2"})}
    for seq, (node, time, gpus) in lists.items():
        head = {"cluster": "c1", "node": node, "stream_id": f"s-{node}", "seq": seq, "time": time}
        made.rows["gpus"] += [
            row("gpus", **head, subject=slot, serial=serial, uuid=f"GPU-{serial}") for slot, serial in gpus.items()
        ]
    answer = attribution_of(made.history)
    (swap,) = answer["gpu_swaps"]["swaps"]  # the other GPU was moved to n2
    assert (swap["serial"], swap["next_serial"], swap["subject"], swap["why"]) == (
        "1",
        "3",
        "s1",
        "gpu_ecc/uncorrected",
    )
    assert (answer["gpu_swaps"]["known"], answer["gpu_swaps"]["listed_nodes"]) == (1, 2)
    tables = {table.title: table for table in view(answer).tables}
    (shown,) = tables["GPUs replaced after a fault"].cell_texts()
    assert shown[1:] == ("n1", "s1", "1", "3", "gpu_ecc/uncorrected")
    swap["serial"] = swap["next_serial"] = None
    tables = {table.title: table for table in view(answer).tables}
    (shown,) = tables["GPUs replaced after a fault"].cell_texts()
    assert shown[3:5] == ("GPU-1", "GPU-3")


def test_gpu_swap_needs_flag_cleared_by_repair():
    made = Made("n1", "n2")
    for node, why in (("n1", "repaired by ann"), ("n2", "others")):
        made.seen(node, "gpu_row_remap/failure", ENDED, event="cleared", cleared_by=why)
    made.rows["nodes"] = [row("nodes", cluster="c1", node="n1", gpus=8)]
    made.job(1, "n1")
    swaps = attribution_of(made.history)["gpu_swaps"]
    assert [(entry["node"], entry["time"]) for entry in swaps["swaps"]] == [("n1", ENDED)]
    assert swaps["per_1000_gpus_and_year"] == pytest.approx(1000 / 8 / ((END - BEGIN) / (365.25 * DAY)))


def test_attribution_names_missing_jobs_or_events(tmp_path: Path):
    empty: History = {name: [] for name in TABLES}
    with study(empty, tmp_path / "a") as opened, pytest.raises(Unanswerable, match="the store has no jobs"):
        attribution(opened)
    made = Made()
    made.job(1, "n1")
    with study(made.history, tmp_path / "b") as opened, pytest.raises(Unanswerable, match="the store has no events"):
        attribution(opened)


def test_attribution_handles_store_of_one_job():
    made = Made("n1", observed=False)
    made.job(1, "n1", state="COMPLETED")
    answer = attribution_of(made.history)
    assert (answer["failures"], answer["jobs"], answer["weeks"], answer["spikes"], answer["by_cause"]) == (
        0,
        [],
        [],
        [],
        {},
    )
    assert "No job failed" in text_of(answer, Page())


EXAMPLES = settings(max_examples=5, deadline=None, suppress_health_check=also(*HealthCheck))


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_attribution_ignores_row_order_and_sums_match(random):
    made = history(random, 25)
    if not made["jobs"] or not (made["events"] or made["scraped_conditions"]):
        return
    answer = attribution_of(made)
    assert answer == attribution_of(made, random=random)
    json.dumps(answer, allow_nan=False)
    failed = [
        entry
        for entry in made["jobs"]
        if entry["state"] in ("FAILED", "NODE_FAIL") and BEGIN <= entry["end_time"] < END
    ]
    assert answer["failures"] == len(failed) == answer["attributed"] + answer["unattributed"]
    assert (
        answer["attributed"]
        == len(answer["jobs"])
        == sum(answer["by_cause"].values())
        == sum(answer["by_domain"].values())
    )
    assert answer["unattributed"] == sum(answer["unattributed_because"].values())
    assert sum(entry["jobs"] for entry in answer["weeks"]) == answer["attributed"]
    assert all(job["cause"] in CAUSES and job["confidence"] in ("high", "medium", "low") for job in answer["jobs"])
    assert len({(entry["cluster"], entry["db_index"]) for entry in answer["jobs"]}) == len(answer["jobs"])


def test_generated_histories_have_jobs_with_cause():
    """Without them, the test above would compare empty answers."""
    found = 0
    for seed in range(12):
        found += len(attribution_of(history(Random(seed), 25))["jobs"])
        if found > 5:
            break
    assert found > 5


def test_view_names_causes_and_chance():
    made = Made("n1")
    made.job(1, "n1")
    made.seen("n1", "mount/missing", ENDED)
    text = " ".join(text_of(attribution_of(made.history), Page()).split())
    assert re.search(r"Of 1 job .*, 1 has ", text)
    assert "mount" in text
    assert "By chance alone, 0 jobs " in text


ENDING = sorted(
    code
    for code in registry.explained(registry.built_in_checks())
    if is_node_fault(code) and meaning(code).ends != EndsJob.IF_NAMED
)


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL"])
@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_states_and_attribution_agree_on_hardware_ends(state: str, nodes: tuple[str, ...]) -> None:
    """Use one job and one critical condition for each code that can end jobs."""
    made = Made("n1", "n2")
    for number, code in enumerate(ENDING, 1):
        end = ENDED + number * HOUR
        made.job(number, *nodes, state=state, end=end)
        made.seen("n1", code, end - 30)
    with (
        TemporaryDirectory() as folder,
        open_study(write_parquet(made.history, Path(folder)), BEGIN, ENDED + 999 * HOUR) as opened,
    ):
        attributed, counted = attribution(opened), states(opened)
    assert {job["db_index"] for job in attributed["jobs"]} == set(range(1, len(ENDING) + 1))
    assert counted["infrastructure"]["jobs"] == len(ENDING)
    assert attributed["unattributed"] == 0
