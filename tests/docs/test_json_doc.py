"""Tests of docs/json.md: it names every key and value of the documents, and the documents have the promised keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from healthd.agent.conditions.ledger import Pause
from healthd.agent.evidence.case import Case, Cause, Stage
from healthd.agent.evidence.describe import document
from healthd.agent.evidence.hardware import GpuPart, Hardware, Part
from healthd.agent.evidence.manifest import Manifest, SavedPart
from healthd.agent.evidence.sources import Entry
from healthd.agent.repair.history import Episode, StepStage, episode_json, step_json
from healthd.agent.reporting import explanation
from healthd.agent.reporting.fault_timeline import Effect
from healthd.agent.reporting.status import Snapshot, status_json
from healthd.agent.scheduler.one_round import RoundResult, round_json
from healthd.agent.settings.config import RepairConfig
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import built_in_checks
from healthd.cli.explain import checks_json, codes_json
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Disk,
    Finding,
    FleetHold,
    Gpu,
    Health,
    Inventory,
    KernelLogStatus,
    Leave,
    LocalMount,
    NodeState,
    Observation,
    Outcome,
    PciDevice,
    RepairMode,
    RepairStep,
    RoundStatus,
    Severity,
    SlurmStatus,
    Verdict,
)
from healthd.common.repair_plan import (
    Attempt,
    AttemptStage,
    CauseStep,
    FailedStep,
    Obstacle,
    Plan,
    Reason,
    RepairRecord,
)

TEXT = (Path(__file__).parents[2] / "docs/json.md").read_text("utf-8")
NAMED = set(re.findall(r"`([a-z_]+)`", TEXT))

FINDING = Finding(Severity.CRITICAL, "mount/missing", "/data", "/data is not mounted")
CONDITION = Condition(
    check="mount",
    instance="/data",
    code="mount/missing",
    subject="/data",
    severity=Severity.CRITICAL,
    message="/data is not mounted",
    clears=Clears.PASS,
    state=ConditionState.OPEN,
    first_seen=1.0,
    last_seen=2.0,
    count=2,
    boot_id="b",
)
RESULT = CheckResult(
    "mount", "/data", Outcome.COMPLETED, 1.0, 0.1, (FINDING,), (Observation("mount_mounted", 0.0),), error=""
)
VERDICT = Verdict(Health.UNHEALTHY, (CONDITION,), (CONDITION,), ("gpu_ecc has not run yet",))
INVENTORY = Inventory(
    (Gpu("0000:1b:00.0", 0),),
    (PciDevice("0000:1b:00.0", "0x10de", "0x2330", "0x030200", "gpu"),),
    "580",
    "DGX H100",
    (Disk("sda"),),
    (LocalMount("/", "ext4", "sda3", ("sda",)),),
)
SNAPSHOT = Snapshot(
    version="0",
    node_name="n",
    mode="act",
    started=1.0,
    now=2.0,
    interval_seconds=300.0,
    verdict=VERDICT,
    results=(RESULT,),
    outcomes={},
    decision=Leave("paused", "drain"),
    slurm=SlurmStatus(NodeState("n", frozenset({"IDLE"}))),
    kernel_log=KernelLogStatus("kmsg", True),
    round=RoundStatus(),
    inventory=INVENTORY,
    pause=Pause(3.0, "upgrade", "root"),
    fleet_hold=FleetHold(1.0, 2.0),
    repair=RepairRecord(
        Plan(
            RepairStep.GPU_RESET,
            RepairStep.REBOOT,
            (CauseStep("gpu_xid/119", "0000:1b:00.0", RepairStep.GPU_RESET, Reason.REMEDY),),
            ("0000:1b:00.0",),
            (Obstacle.JOBS,),
        ),
        Attempt("20261129T060000Z-gpu_reset", RepairStep.GPU_RESET, AttemptStage.CLAIM, 1.0, "boot", ()),
        (FailedStep(RepairStep.GPU_RESET, 1.0, (), "no effect"),),
    ),
    repair_config=RepairConfig(RepairMode.ACT),
    evidence=Case("20261129T060000Z-gpu_xid-79", Stage.WAITING, 1.0, 1.0, (), path="/x"),
    cleared=(replace(CONDITION, state=ConditionState.CLEARED),),
)
KNOWN = built_in_checks()
LISTED = [*checks_json(resolve_settings({}, "healthd.toml", {}, KNOWN), KNOWN), *codes_json(KNOWN)]
CHECK_DOCUMENT = round_json(RoundResult("n", 1.0, VERDICT, (RESULT,), (), "b", None))
STATUS_DOCUMENT = status_json(SNAPSHOT)


def explain_documents() -> list[dict[str, Any]]:
    """Return each kind of document of `healthd explain --json`."""
    checks = built_in_checks()
    codes = list(codes_json({"mount": checks["mount"]}))
    text = checks["mount"].explain("mount/hang")
    assert text is not None
    code = explanation.code_document("x", "mount/hang", "", text, checks["mount"], explanation.NodeContext(None))
    return [
        {**code, "settings_problem": ""},
        explanation.check_document("x", checks["mount"], codes),
        explanation.ambiguous_document("x", "cut", codes),
        explanation.foreign_reason_document("x", "a", "b", "c"),
        explanation.kernel_line_document("x", "says"),
    ]


def keys(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            yield from keys(value)
    elif isinstance(document, list | tuple):
        for value in document:
            yield from keys(value)


def test_every_key_is_documented():
    assert sorted({*keys(CHECK_DOCUMENT), *keys(STATUS_DOCUMENT), *keys(LISTED)} - NAMED) == []


def test_every_key_of_evidence_is_documented():
    entry = Entry("kernel.log", ("dmesg",))
    parts = {"gpus": (GpuPart(""),), "nvswitches": (Part(""),), "nics": (Part(""),)}
    manifest = Manifest(
        "",
        "",
        "",
        "",
        0.0,
        0.0,
        causes=(Cause(""),),
        parts=(SavedPart("first", 0.0, 0.0, (entry,)),),
        hardware=Hardware(**parts),
    )
    assert sorted({*keys(document(manifest, "", 0, (("kernel.log", 0),)))} - NAMED) == []


def test_every_key_and_word_of_explain_is_documented():
    documents = explain_documents()
    assert sorted(set(keys(documents)) - NAMED) == []
    words = [*(effect.value for effect in Effect), *(document["what"] for document in documents)]
    assert [word for word in words if word not in NAMED] == []


def test_every_key_and_word_of_repair_is_documented():
    steps = [step_json(StepStage(1.0, "gpu_reset", "taken"))]
    document = {"time": 1.0, "episodes": [episode_json(Episode("gpu_xid/119", "", 1.0))], "steps": steps}
    words = [word.value for kind in (RepairStep, Reason, AttemptStage) for word in kind]
    assert sorted({*keys(document), *words} - NAMED) == []


def test_status_has_all_keys_of_check():
    assert set(CHECK_DOCUMENT) - set(STATUS_DOCUMENT) == set()
    assert set(CHECK_DOCUMENT["conditions"][0]) == set(STATUS_DOCUMENT["conditions"][0])
    assert set(CHECK_DOCUMENT["results"][0]) == set(STATUS_DOCUMENT["results"][0])


def test_check_document_has_promised_keys():
    assert CHECK_DOCUMENT["health"] == "unhealthy"
    (condition,) = CHECK_DOCUMENT["conditions"]
    assert {"check", "code", "severity", "subject", "message", "clears"} <= set(condition)
    (result,) = CHECK_DOCUMENT["results"]
    assert {"check", "outcome", "duration_seconds", "findings", "observations"} <= set(result)


def test_every_enum_value_is_documented():
    words = [*Severity.__members__, *Outcome.__members__, *Clears.__members__, *Health.__members__]
    assert [word.lower() for word in words if word.lower() not in NAMED] == []
