"""Tests of the GPUs that `lemons` names: faults follow the GPU, and are shared by GPUs that fail together."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_history import BEGIN, DAY, HOUR, History, row
from fleet_views import text_of

from healthd.common.page import Page
from tests.fleet.answers.test_lemons import add_event, healthy_fleet, lemons_of

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.answers import lemons
    from healthd.fleet.answers.lemon_gpus import (
        GpuFault,
        GpuPeriod,
        fault_weights,
        is_present,
        suspect_gpus,
    )
    from healthd.fleet.views.lemons import view
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise

pytestmark = pytest.mark.one_python
SLOTS = [f"s{number}" for number in range(8)]


def list_gpus(made: History, node: str, time: int, **gpus: str) -> None:
    """List the GPUs of a node. By default, the serial number of a GPU consists of its first node and slot."""
    seq = len(made["gpus"]) + 1
    head = {"cluster": "c1", "node": node, "stream_id": f"s{node}", "seq": seq, "time": time, "name": "H100"}
    serials = {slot: gpus.get(slot, f"{node}-{slot}") for slot in SLOTS}
    made["gpus"] += [
        row("gpus", **head, subject=slot, serial=serial, uuid=f"GPU-{serial}") for slot, serial in serials.items()
    ]


def fleet_with_gpus() -> History:
    made = healthy_fleet()
    for node in [entry["node"] for entry in made["nodes"]]:
        list_gpus(made, node, BEGIN - DAY)
    return made


def gpu_fails(made: History, node: str, slot: str, time: int, code: str = "gpu_ecc/uncorrected") -> None:
    add_event(made, node, time, code)
    made["events"][-1]["subject"] = slot


def test_lemon_gpu_is_named_after_it_moved_to_another_node(tmp_path: Path) -> None:
    made = fleet_with_gpus()
    gpu_fails(made, "g001", "s3", BEGIN + 2 * DAY)
    gpu_fails(made, "g001", "s3", BEGIN + 6 * DAY)
    list_gpus(made, "g001", BEGIN + 10 * DAY, s3="new")
    list_gpus(made, "g002", BEGIN + 11 * DAY, s5="g001-s3")
    gpu_fails(made, "g002", "s5", BEGIN + 15 * DAY)
    gpu_fails(made, "g002", "s5", BEGIN + 20 * DAY)
    gpu_fails(made, "g003", "s1", BEGIN + 16 * DAY)
    answer = lemons_of(made, tmp_path)
    (gpu,) = answer["gpus"]["lemons"]
    assert (gpu["serial"], gpu["node"], gpu["subject"], gpu["events"]) == ("g001-s3", "g002", "s5", 4)
    assert [(slot["node"], slot["subject"]) for slot in gpu["slots"]] == [("g001", "s3"), ("g002", "s5")]
    assert [slot["until_time"] for slot in gpu["slots"]] == [BEGIN + 10 * DAY, None]
    assert [item["node"] for item in gpu["evidence"]] == ["g001", "g001", "g002", "g002"]
    assert gpu["probability"] >= answer["least_probability"]
    assert (answer["gpus"]["recorded"], answer["gpus"]["known"]) == (True, 800)
    assert lemons.has_findings(answer)
    (shown,) = next(table for table in view(answer).tables if table.title == "GPUs to replace").cell_texts()
    assert shown[:3] == ("g001-s3", "g002", "s5")
    assert "g001-s3" in text_of(answer, Page())


def test_replaced_gpu_and_its_replacement_are_no_lemons(tmp_path: Path) -> None:
    made = fleet_with_gpus()
    for day in (2, 6):
        gpu_fails(made, "g001", "s3", BEGIN + day * DAY)
    list_gpus(made, "g001", BEGIN + 10 * DAY, s3="new")
    gpu_fails(made, "g001", "s3", BEGIN + 15 * DAY)
    answer = lemons_of(made, tmp_path)
    assert (answer["gpus"]["lemons"], answer["gpus"]["known"]) == ([], 800)


def test_faults_of_all_gpus_of_a_node_name_no_gpu(tmp_path: Path) -> None:
    made = fleet_with_gpus()
    for day in (2, 6, 10):
        for slot in SLOTS:
            gpu_fails(made, "g001", slot, BEGIN + day * DAY)
    assert lemons_of(made, tmp_path)["gpus"]["lemons"] == []


def test_history_without_gpus_is_not_recorded(tmp_path: Path) -> None:
    made = healthy_fleet()
    gpu_fails(made, "g001", "s3", BEGIN + 2 * DAY)
    answer = lemons_of(made, tmp_path)
    assert answer["gpus"] == {"recorded": False, "known": 0, "lemons": []}
    assert lemons.NO_GPUS_NOTE in answer["notes"]
    assert lemons.NO_GPUS_NOTE not in lemons_of(fleet_with_gpus(), tmp_path / "other")["notes"]


def fault(subject: str, time: int, code: str = "x") -> GpuFault:
    return GpuFault("c", "n", subject, subject, 0, time, code)


def test_fault_weights_are_shared_by_gpus_that_fail_together() -> None:
    faults = [fault("s1", 0), fault("s2", 600), fault("s1", 1201), fault("s3", 0, "y"), fault("s3", 0, "z")]
    weights = {(entry.subject, entry.time, entry.code): weight for entry, weight in fault_weights(faults, {"x": 0.8})}
    assert weights == {
        ("s1", 0, "x"): 0.4,
        ("s2", 600, "x"): 0.4,
        ("s1", 1201, "x"): 0.8,
        ("s3", 0, "y"): 0.5,
        ("s3", 0, "z"): 0.5,
    }


def test_gpu_that_is_removed_after_the_window_is_present() -> None:
    period = GpuPeriod("c", "n", "s1", "A", "1", "A", "H100", 0, 30 * HOUR, "replaced")
    (gpu,) = suspect_gpus([period], [], {}, (0, 24 * HOUR))["c"]
    assert is_present(gpu, 24 * HOUR)
    assert not is_present(gpu, 31 * HOUR)
    assert gpu.counted.days == 1.0
