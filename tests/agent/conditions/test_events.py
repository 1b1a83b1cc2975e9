"""Tests of the events that a change of the ledger emits: each kind, and a reader can tell what is open."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions import endings, events, store
from healthd.agent.conditions.ledger import MAX_CLEARED, Ledger
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.control import commands
from healthd.agent.scheduler.worker_tasks import INVENTORY, InventoryTask
from healthd.agent.worker.client import Reply
from healthd.common import guard
from healthd.common.model import (
    Ack,
    Clears,
    Condition,
    ConditionState,
    Drain,
    DrainRecord,
    Gpu,
    Inventory,
    Leave,
    Mode,
    Outcome,
    RepairStep,
    RunName,
    Severity,
    Slowness,
)
from healthd.common.repair_plan import CauseStep, Obstacle, Plan, Reason, RepairRecord
from healthd.common.slurm.drain_reason import with_claim
from healthd.events.schema import EVENTS, Event

NOW = 1795349480.0
MOUNT = Condition(
    check="mount",
    instance="/data",
    code="mount/missing",
    subject="/data",
    severity=Severity.DEGRADED,
    message="/data is not mounted",
    clears=Clears.PASS,
    state=ConditionState.OPEN,
    first_seen=NOW - 60,
    last_seen=NOW,
    count=1,
    boot_id="b1",
    opened_at=NOW,
    last_level_seen=NOW,
)
XID = replace(
    MOUNT,
    check="gpu_xid",
    instance="",
    code="gpu_xid/79",
    subject="0000:61:00.0",
    severity=Severity.CRITICAL,
    clears=Clears.REBOOT,
    last_level_seen=0.0,
    last_event=NOW,
    job="4711,4712",
)


class Node:
    """A condition store with its clock and the events that it emitted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = NOW
        self.lines: list[str] = []
        self.start()

    def start(
        self, disk: Callable[[], dict[str, str | None]] = dict, boot_id: str = "b1", alive_at: float = 0.0
    ) -> None:
        self.condition_store = ConditionStore(
            str(self.directory), lambda: self.now, lambda: self.now - NOW + 100, "n1", "c1"
        )
        self.condition_store.load(disk, boot_id, Mode.ACT, alive_at)

    def restart(self, boot_id: str = "b1") -> None:
        self.condition_store.save()
        self.start(boot_id=boot_id)

    def set_conditions(self, *conditions: Condition) -> None:
        self.condition_store.set_conditions({c.key: c for c in conditions})

    def drain_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call and acknowledge them, as the worker does."""
        new = self.condition_store.ledger.outbox.lines
        self.lines += new
        self.condition_store.stream.mark_written(new)
        return list(map(json.loads, new))

    def drain_event_names(self) -> list[str]:
        return [event["event"] for event in self.drain_events()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    new_node = Node(tmp_path)
    new_node.drain_events()
    return new_node


def cleared(c: Condition, cleared_by: str, at: float) -> Condition:
    return replace(c, state=ConditionState.CLEARED, cleared_by=cleared_by, cleared_at=at)


def observed_again(c: Condition, count: int, at: float) -> Condition:
    return replace(c, count=count, last_seen=at)


# --- conditions


def test_opened_has_all_condition_fields(node: Node) -> None:
    node.set_conditions(XID)
    (event,) = node.drain_events()
    assert {name: event[name] for name in ("cluster", "node", "boot_id", "event", "check", "code", "subject")} == {
        "cluster": "c1",
        "node": "n1",
        "boot_id": "b1",
        "event": "opened",
        "check": "gpu_xid",
        "code": "gpu_xid/79",
        "subject": "0000:61:00.0",
    }
    assert (event["severity"], event["kind"], event["count"], event["jobs"]) == (
        "critical",
        "edge",
        1,
        ["4711", "4712"],
    )
    assert (event["first"], event["last"]) == ("2026-11-22T12:10:20.000Z", "2026-11-22T12:11:20.000Z")
    assert set(EVENTS["opened"].required) <= set(event)


def test_opened_for_slowness_has_slowdown_and_onset(
    node: Node,
) -> None:
    slow = replace(MOUNT, code="failslow/job", subject="", job="4711", slowness=Slowness(0.26049, NOW - 300, ("4711",)))
    node.set_conditions(slow, MOUNT)
    slow_event, mount_event = node.drain_events()
    assert (slow_event["slowdown"], slow_event["onset"], slow_event["jobs"]) == (
        0.26,
        "2026-11-22T12:06:20.000Z",
        ["4711"],
    )
    assert not {"slowdown", "onset"} & set(mount_event)


def test_opened_kind_is_level_for_run_and_edge_for_event(node: Node) -> None:
    node.set_conditions(MOUNT, XID)
    assert [(e["code"], e["kind"]) for e in node.drain_events()] == [("mount/missing", "level"), ("gpu_xid/79", "edge")]


def test_pending_condition_is_not_emitted(node: Node) -> None:
    pending = replace(MOUNT, state=ConditionState.PENDING, opened_at=0.0)
    node.set_conditions(pending)
    node.set_conditions()
    node.set_conditions(pending)
    assert node.drain_event_names() == []
    node.set_conditions(MOUNT)
    assert node.drain_event_names() == ["opened"]


def test_worsened_is_emitted_only_above_previous_maximum(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.drain_events()
    for severity in (Severity.WARNING, Severity.CRITICAL, Severity.DEGRADED, Severity.CRITICAL):
        node.set_conditions(replace(MOUNT, severity=severity))
    (event,) = node.drain_events()
    assert (event["event"], event["was"], event["severity"]) == ("worsened", "degraded", "critical")


def test_cleared_has_same_condition_and_cleared_by(node: Node) -> None:
    node.set_conditions(MOUNT)
    (opened,) = node.drain_events()
    node.set_conditions(cleared(observed_again(MOUNT, 7, NOW + 300), "pass", NOW + 600))
    (event,) = node.drain_events()
    assert (event["event"], event["cleared_by"], event["count"]) == ("cleared", "pass", 7)
    assert event["condition"] == opened["condition"]


def test_condition_that_opens_and_clears_at_once_emits_both(node: Node) -> None:
    node.set_conditions(cleared(XID, "nfs: server is back", NOW))
    assert node.drain_event_names() == ["opened", "cleared"]


def test_condition_cleared_while_pending_is_not_emitted(node: Node) -> None:
    node.set_conditions(cleared(replace(MOUNT, opened_at=0.0), "no longer configured", NOW))
    assert node.drain_event_names() == []


def test_returning_condition_has_new_id(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.set_conditions(cleared(MOUNT, "pass", NOW))
    node.set_conditions(replace(MOUNT, first_seen=NOW + 900))
    first, _, returned = node.drain_events()
    assert returned["event"] == "opened"
    assert returned["condition"] != first["condition"]


def test_folded_condition_is_emitted_as_cleared(node: Node) -> None:
    node.set_conditions(MOUNT, XID)
    node.drain_events()
    node.set_conditions(XID)
    (event,) = node.drain_events()
    assert (event["event"], event["code"], event["cleared_by"]) == ("cleared", "mount/missing", "others")


@pytest.mark.parametrize("count", [MAX_CLEARED, MAX_CLEARED + 1, 300])
def test_every_cleared_condition_is_emitted_and_logged(
    node: Node, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    node.set_conditions(*(replace(MOUNT, subject=f"/{number}") for number in range(count)))
    node.drain_events()
    caplog.clear()
    with caplog.at_level("INFO"):
        node.condition_store.clear_runs({MOUNT.run}, "no longer configured")
    emitted = node.drain_events()
    assert {(event["event"], event["cleared_by"]) for event in emitted} == {("cleared", "no longer configured")}
    assert len({event["subject"] for event in emitted}) == len(emitted) == count
    assert len([text for text in caplog.messages if text.endswith("cleared: no longer configured")]) == count
    assert len(node.condition_store.ledger.cleared) == MAX_CLEARED


def test_acknowledged_has_user_why_and_until(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.drain_events()
    ack = Ack(NOW + 60, "the cable is ordered", "ann (uid 1000)", Severity.DEGRADED, NOW)
    node.set_conditions(replace(MOUNT, state=ConditionState.ACKNOWLEDGED, ack=ack))
    (event,) = node.drain_events()
    assert (event["event"], event["who"], event["why"]) == ("acknowledged", "ann (uid 1000)", "the cable is ordered")
    assert event["until"] == "2026-11-22T12:12:20.000Z"
    node.set_conditions(replace(MOUNT, state=ConditionState.ACKNOWLEDGED, ack=replace(ack, until=NOW + 90)))
    assert node.drain_event_names() == ["acknowledged"]
    node.set_conditions(MOUNT)
    (event,) = node.drain_events()
    assert (event["event"], event["was"]) == ("opened", "acknowledged")


def test_acknowledged_by_slurm_resume_names_operator(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.drain_events()
    node.condition_store.set_conditions(endings.acknowledge_resumed(node.condition_store.conditions, NOW, NOW))
    (event,) = node.drain_events()
    assert (event["event"], event["who"]) == ("acknowledged", "an operator")
    assert "until" not in event


def test_expired_ack_on_pending_condition_is_emitted_as_cleared(node: Node) -> None:
    pending = replace(MOUNT, state=ConditionState.PENDING, opened_at=0.0)
    ack = Ack(NOW + 60, "known", "ann", Severity.DEGRADED, NOW)
    node.set_conditions(replace(pending, state=ConditionState.ACKNOWLEDGED, ack=ack))
    assert node.drain_event_names() == ["opened", "acknowledged"]
    node.set_conditions(pending)
    (event,) = node.drain_events()
    assert (event["event"], event["cleared_by"]) == ("cleared", "unconfirmed")


def test_opened_marks_history_and_observed(node: Node) -> None:
    node.set_conditions(replace(XID, history=True), replace(MOUNT, observed=True))
    history, observed = node.drain_events()
    assert (history["history"], "observed" in history) == (True, False)
    assert (observed["observed"], "history" in observed) == (True, False)


# --- seen again


def test_seen_again_is_emitted_at_ten_hundred_and_thousand(node: Node) -> None:
    for count in range(1, 1101):
        node.now = NOW + count
        node.set_conditions(observed_again(MOUNT, count, node.now))
    assert [(e["event"], e["count"]) for e in node.drain_events()] == [
        ("opened", 1),
        ("seen_again", 10),
        ("seen_again", 100),
        ("seen_again", 1000),
    ]


def test_seen_again_is_emitted_hourly(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.drain_events()
    for seconds, expected in ((3599, []), (3600, ["seen_again"]), (3601, []), (7199, []), (7200, ["seen_again"])):
        node.now = NOW + seconds
        node.set_conditions(observed_again(MOUNT, 2 + seconds % 7, node.now))
        assert node.drain_event_names() == expected, seconds


def test_renamed_part_is_emitted_once_with_first_inventory(node: Node) -> None:
    node.set_conditions(XID, MOUNT)
    node.drain_events()
    old_ledger = node.condition_store.ledger
    node.set_conditions(replace(XID, message="GPU 3 fell off the bus"), MOUNT)
    for expected in (["GPU 3 fell off the bus"], []):
        node.condition_store.stream.emit(*events.renamed_part_events(old_ledger, node.condition_store.ledger, node.now))
        assert [event["message"] for event in node.drain_events() if event["event"] == "seen_again"] == expected
        old_ledger = node.condition_store.ledger


# --- GPUs

GPUS = (
    Gpu("0000:61:00.0", 0, "GPU-a", "NVIDIA H100", serial="1650522003820"),
    Gpu("0000:1b:00.0", 1, "GPU-b", "NVIDIA H100", serial="1650522003821"),
)
SWAPPED = (Gpu("0000:61:00.0", 0, "GPU-c", "NVIDIA H100", serial="1650522003899"), GPUS[1])


def read_inventory(node: Node, *gpus: Gpu) -> None:
    """Handle a reply with these GPUs as the daemon does."""
    condition_store = node.condition_store
    before = condition_store.ledger
    reply = Reply(INVENTORY, Outcome.COMPLETED, 0.1, answered=True, answer=Inventory(gpus=gpus))
    InventoryTask(condition_store, lambda: 0.0).handle_reply(reply)
    condition_store.stream.emit(*events.renamed_part_events(before, condition_store.ledger, node.now))


def serials(stream_events: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(event["event"], event.get("serial")) for event in stream_events]


def test_gpus_lists_each_gpu_at_first_inventory_and_after_a_swap(node: Node) -> None:
    read_inventory(node, *GPUS)
    (event,) = node.drain_events()
    assert event["gpus"] == [
        {"subject": "0000:1b:00.0", "serial": "1650522003821", "uuid": "GPU-b", "name": "NVIDIA H100"},
        {"subject": "0000:61:00.0", "serial": "1650522003820", "uuid": "GPU-a", "name": "NVIDIA H100"},
    ]
    read_inventory(node, *GPUS)
    node.restart()
    read_inventory(node, *reversed(GPUS))
    assert node.drain_event_names() == ["started"]
    read_inventory(node, *SWAPPED)
    assert [gpu["uuid"] for event in node.drain_events() for gpu in event["gpus"]] == ["GPU-b", "GPU-c"]


def listed_uuids(stream_events: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    return [[(gpu["subject"][5:7], gpu["uuid"]) for gpu in event["gpus"]] for event in stream_events if "gpus" in event]


def test_gpus_is_repeated_after_30_days_and_in_each_new_stream(node: Node) -> None:
    read_inventory(node, *GPUS)
    assert node.drain_event_names() == ["gpus"]
    for days, expected in ((29.9, []), (30, ["gpus"]), (30.1, []), (59.9, []), (60, ["gpus"])):
        node.now = NOW + days * 86400
        read_inventory(node, *GPUS)
        assert node.drain_event_names() == expected, days
    node.condition_store.save()
    copy = (node.directory / store.FILE).read_text()
    (node.directory / store.FILE).unlink()
    node.start(lambda: {store.FILE: copy}, boot_id="b2")
    for expected in (["started", "gpus"], []):
        read_inventory(node, *GPUS)
        assert node.drain_event_names() == expected
    node.now = NOW
    read_inventory(node, *GPUS)
    assert node.drain_event_names() == ["gpus"], "the clock was set back"


def test_gpus_is_not_emitted_for_a_missing_gpu_or_mig(node: Node) -> None:
    read_inventory(node)
    read_inventory(node, *GPUS)
    assert node.drain_event_names() == ["gpus"]
    read_inventory(node, GPUS[1])
    read_inventory(node)
    read_inventory(node, replace(GPUS[0], mig=("MIG-1", "MIG-2"), index=1), replace(GPUS[1], index=0))
    assert node.drain_event_names() == []


def test_gpus_lists_a_replacement_while_another_gpu_is_missing(node: Node) -> None:
    read_inventory(node, *GPUS)
    read_inventory(node, SWAPPED[0])
    assert listed_uuids(node.drain_events())[1:] == [[("1b", "GPU-b"), ("61", "GPU-c")]]
    read_inventory(node, *SWAPPED)
    assert node.drain_event_names() == []


def test_gpus_lists_a_moved_gpu_once_while_its_old_slot_is_empty(node: Node) -> None:
    read_inventory(node, *GPUS)
    read_inventory(node, replace(GPUS[0], uuid="GPU-b", serial=GPUS[1].serial))
    assert listed_uuids(node.drain_events())[1:] == [[("61", "GPU-b")]]


def test_gpus_has_gpus_without_serial_numbers(node: Node) -> None:
    read_inventory(node, *(replace(gpu, serial="") for gpu in GPUS))
    (event,) = node.drain_events()
    assert {gpu["serial"] for gpu in event["gpus"]} == {""}
    assert {gpu["uuid"] for gpu in event["gpus"]} == {"GPU-a", "GPU-b"}
    node.set_conditions(XID)
    assert serials(node.drain_events()) == [("opened", None)]


def test_condition_and_drain_events_have_the_nvlink_domain(node: Node) -> None:
    node.set_conditions(XID)
    node.condition_store.change(slurm=DrainRecord(reason="healthd: a/b: c", confirmed_at=NOW))
    assert not any("domain" in event for event in node.drain_events())
    domain = "4f9a1b2c-0000-0000-0000-00000000000a"
    node.condition_store.change(inventory=Inventory(domain=domain))
    node.set_conditions(XID, MOUNT)
    node.condition_store.change(slurm=DrainRecord(reason="healthd: d/e: f", confirmed_at=NOW))
    node.set_conditions(XID, cleared(MOUNT, "pass", NOW))
    found = node.drain_events()
    assert [(event["event"], event["domain"]) for event in found] == [
        (name, domain) for name in ("opened", "drain", "cleared")
    ]


def test_condition_keeps_the_serial_number_of_a_replaced_gpu(node: Node) -> None:
    fault = replace(XID, clears=Clears.PASS)
    read_inventory(node, *GPUS)
    node.drain_events()
    node.set_conditions(fault, MOUNT)
    assert serials(node.drain_events()) == [("opened", "1650522003820"), ("opened", None)]
    node.restart("b2")
    read_inventory(node, *SWAPPED)
    node.set_conditions(MOUNT, cleared(fault, "pass", node.now))
    assert serials(node.drain_events())[-1] == ("cleared", "1650522003820")
    node.set_conditions(MOUNT, replace(fault, boot_id="b2"))
    assert serials(node.drain_events()) == [("opened", "1650522003899")]


def test_condition_of_a_missing_gpu_has_its_serial_number(node: Node) -> None:
    read_inventory(node, *GPUS)
    read_inventory(node, GPUS[1])
    node.drain_events()
    node.set_conditions(XID)
    assert serials(node.drain_events()) == [("opened", "1650522003820")]


def test_condition_of_a_gpu_that_was_not_read_since_the_boot_has_no_serial_number(node: Node) -> None:
    read_inventory(node, *GPUS)
    node.restart("b2")
    read_inventory(node, GPUS[1])
    node.drain_events()
    node.set_conditions(replace(XID, boot_id="b2"), replace(XID, boot_id="b2", subject=GPUS[1].pci))
    assert serials(node.drain_events()) == [("opened", None), ("opened", "1650522003821")]
    read_inventory(node, *GPUS)
    assert serials(node.drain_events()) == [("seen_again", "1650522003820")]


def test_condition_gets_its_serial_number_with_the_first_inventory_of_the_boot(node: Node) -> None:
    read_inventory(node, *GPUS)
    node.restart("b2")
    node.drain_events()
    old_fault = replace(XID, code="gpu_xid/48", history=True, boot_id="b2")
    node.set_conditions(replace(XID, boot_id="b2"), old_fault)
    assert serials(node.drain_events()) == [("opened", None), ("opened", None)]
    read_inventory(node, *SWAPPED)
    assert serials(node.drain_events()) == [("gpus", None), ("seen_again", "1650522003899")]
    read_inventory(node, *SWAPPED)
    assert node.drain_events() == []


def test_condition_from_an_earlier_boot_gets_no_serial_number_later(node: Node) -> None:
    node.set_conditions(XID)
    node.restart("b2")
    read_inventory(node, *GPUS)
    node.set_conditions(cleared(XID, "reboot", node.now))
    assert {serial for _, serial in serials(node.drain_events())} == {None}


def test_condition_without_new_observation_is_not_emitted(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.now = NOW + 86400
    node.set_conditions(replace(MOUNT, quiet_seconds=86400.0))
    assert node.drain_event_names() == ["opened"]


@pytest.mark.parametrize("step", [-86400.0, 86400.0])
def test_clock_step_keeps_hourly_seen_again_interval(node: Node, step: float) -> None:
    node.set_conditions(MOUNT)
    node.drain_events()
    node.condition_store.apply_clock_step(step)
    assert node.drain_event_names() == []
    node.now += step + 60
    node.set_conditions(observed_again(MOUNT, 2, node.now))
    assert node.drain_event_names() == []
    node.now += 3600
    node.set_conditions(observed_again(MOUNT, 3, node.now))
    assert node.drain_event_names() == ["seen_again"]


@pytest.mark.parametrize("step", [-86400.0, 86400.0])
def test_clock_step_keeps_flush_time_after_job_end(node: Node, step: float) -> None:
    node.set_conditions(MOUNT)
    node.condition_store.stream.emit_job_end()
    node.drain_events()
    node.condition_store.apply_clock_step(step)
    node.now += step + 60
    node.condition_store.stream.flush_after_job()
    assert node.condition_store.ledger.emitted.job_ended == NOW + step
    node.now += 300
    node.condition_store.stream.flush_after_job()
    assert (node.condition_store.ledger.emitted.job_ended, node.drain_event_names()) == (0.0, []), (
        "its only observation is already written"
    )


# --- a job's end


def test_flush_after_job_emits_unwritten_observations(node: Node) -> None:
    old = replace(XID, subject="0000:1b:00.0")
    node.set_conditions(MOUNT, XID, old)
    node.drain_events()
    node.set_conditions(observed_again(MOUNT, 2, NOW), XID, observed_again(old, 2, NOW + 1))
    node.now = NOW + 602
    node.condition_store.stream.emit_job_end()
    node.now += events.FLUSH_SECONDS - 1
    node.condition_store.stream.flush_after_job()
    assert node.drain_event_names() == []
    node.set_conditions(observed_again(MOUNT, 3, NOW + 650), XID, observed_again(old, 2, NOW + 1))
    node.now += 1
    node.condition_store.stream.flush_after_job()
    (event,) = node.drain_events()
    assert (event["event"], event["code"], event["count"]) == ("seen_again", "mount/missing", 3)
    node.condition_store.stream.flush_after_job()
    assert node.drain_event_names() == []


def test_flush_after_job_covers_ten_minutes_before_job_end(node: Node) -> None:
    node.set_conditions(MOUNT, XID)
    node.drain_events()
    node.set_conditions(observed_again(MOUNT, 2, NOW), observed_again(XID, 2, NOW - 1))
    node.now = NOW + events.BEFORE_JOB_END_SECONDS
    node.condition_store.stream.emit_job_end()
    node.now += events.FLUSH_SECONDS
    node.condition_store.stream.flush_after_job()
    assert [e["code"] for e in node.drain_events()] == ["mount/missing"]


def test_flush_after_job_is_shared_and_survives_restart(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.drain_events()
    node.condition_store.stream.emit_job_end()
    for ended_at in (NOW + 100, NOW + 200):
        node.now = ended_at
        node.set_conditions(observed_again(MOUNT, 2, node.now))
        node.condition_store.stream.emit_job_end()
    node.condition_store.save()
    node.start()
    node.drain_events()
    for flush_base, count in ((NOW, 3), (NOW + 200, 4)):
        assert events.flush_time(node.condition_store.ledger.emitted) == flush_base + events.FLUSH_SECONDS
        node.now = flush_base + events.FLUSH_SECONDS
        node.set_conditions(observed_again(MOUNT, count, node.now))
        node.condition_store.stream.flush_after_job()
        assert node.drain_event_names() == ["seen_again"]
    assert events.flush_time(node.condition_store.ledger.emitted) == float("inf")


# --- Slurm, operators


def test_drain_is_emitted_when_confirmed(node: Node) -> None:
    for drain_record in (
        DrainRecord(pending_reason="healthd: a", pending_since=NOW),
        DrainRecord(reason="healthd: a", confirmed_at=NOW),
        DrainRecord(reason="healthd: a", confirmed_at=NOW + 1),
        DrainRecord(reason="healthd: b", confirmed_at=NOW + 2),
        DrainRecord(),
    ):
        node.condition_store.change(slurm=drain_record)
    assert [(e["event"], e["stage"], e["reason"]) for e in node.drain_events()] == [
        ("drain", "confirmed", "healthd: a"),
        ("drain", "confirmed", "healthd: b"),
    ]


def test_claim_of_a_repair_is_no_new_drain(node: Node) -> None:
    text = "healthd: gpu_xid/79: fell off the bus"
    other = "healthd: gpu_xid/119: GSP timeout"
    reasons = (text, f"{text} (repair: gpu_reset)", f"{text} (repair: reboot)", text, f"{other} (repair: gpu_reset)")
    for reason in reasons:
        node.condition_store.change(slurm=DrainRecord(reason=reason, confirmed_at=NOW))
    assert [e["reason"] for e in node.drain_events()] == [text, other]


@given(length=st.integers(200, 255), steps=st.lists(st.sampled_from([*RepairStep, None]), max_size=4))
def test_claim_of_a_repair_in_a_long_reason_is_no_new_drain(length: int, steps: list[RepairStep | None]) -> None:
    head = "healthd: validation/failed 0000:1b:00.0: "
    record = DrainRecord(reason=head + "x" * (length - len(head)))
    for step in steps:
        changed = DrainRecord(reason=with_claim(record.reason, step))
        assert events.change_events(Ledger(slurm=record), Ledger(slurm=changed), NOW)[0] == []
        record = changed
    other = DrainRecord(reason=with_claim(record.reason.replace(":1b:", ":1c:"), RepairStep.REBOOT))
    assert events.change_events(Ledger(slurm=record), Ledger(slurm=other), NOW)[0] != []


def test_pause_is_emitted_at_begin_and_end(node: Node) -> None:
    commands.pause(node.condition_store, {"seconds": 60, "why": "driver upgrade"}, "ann (uid 1000)", NOW)
    commands.end_pause(node.condition_store, NOW + 60)
    assert [(e["event"], e["stage"], e["who"], e["why"], e["until"]) for e in node.drain_events()] == [
        ("pause", stage, "ann (uid 1000)", "driver upgrade", "2026-11-22T12:12:20.000Z") for stage in ("begun", "ended")
    ]


def test_repaired_is_emitted_with_user_and_cleared(node: Node) -> None:
    node.set_conditions(XID)
    node.drain_events()
    request = {"code": "gpu_xid/79", "part": XID.subject, "why": "reseated"}
    commands.repaired(node.condition_store, request, "ann (uid 1000)", NOW)
    repaired, cleared_event = node.drain_events()
    assert (repaired["event"], repaired["who"], repaired["code"]) == ("repaired", "ann (uid 1000)", "gpu_xid/79")
    assert (repaired["subject"], repaired["why"]) == (XID.subject, "reseated")
    assert (cleared_event["event"], cleared_event["cleared_by"]) == ("cleared", "repaired by ann (uid 1000): reseated")


def test_decision_has_word_and_sentence() -> None:
    assert events.decision(Drain("healthd: a", requeue=True), "drain and requeue: healthd: a").fields == {
        "decision": "drain",
        "text": "drain and requeue: healthd: a",
    }
    assert events.decision(Leave("paused"), "paused").fields["decision"] == "leave"


# --- checks


def test_check_events_are_emitted_on_change(node: Node) -> None:
    data, home = RunName("mount", "/data"), RunName("mount", "/home")
    node.condition_store.stream.emit_checks({data: ("1.0", "aa"), home: ("1.0", "bb")})
    node.now += 10
    node.condition_store.stream.emit_checks({data: ("1.1", "aa"), home: ("1.0", "bb")})
    node.condition_store.stream.emit_checks({data: ("1.1", "aa"), home: ("1.0", "bb")})
    node.now += 10
    node.condition_store.stream.emit_checks({data: ("1.1", "ab")})
    emitted = [(e["event"], e["instance"], e["version"], e["settings"], e["since"][17:19]) for e in node.drain_events()]
    assert emitted == [
        ("check_enabled", "/data", "1.0", "aa", "20"),
        ("check_enabled", "/home", "1.0", "bb", "20"),
        ("check_changed", "/data", "1.1", "aa", "20"),
        ("check_disabled", "/home", "1.0", "bb", "20"),
        ("check_changed", "/data", "1.1", "ab", "20"),
    ]
    node.now += 10
    node.condition_store.stream.emit_checks({data: ("1.1", "ab"), home: ("1.0", "bb")})
    (enabled,) = node.drain_events()
    assert (enabled["event"], enabled["since"][17:19]) == ("check_enabled", "50"), "enabled without a break since then"


# --- start, stop and alive


def test_started_has_last_alive_and_clean(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (first,) = node.drain_events()
    assert (first["event"], first["mode"], first["last_alive"], first["clean"]) == ("started", "act", None, False)
    node.condition_store.save()
    node.start(alive_at=NOW - 5)
    (after_kill,) = node.drain_events()
    assert (after_kill["last_alive"], after_kill["clean"]) == ("2026-11-22T12:11:15.000Z", False)
    node.condition_store.stream.emit_stopped("requested")
    node.condition_store.save()
    node.start(alive_at=NOW + 100)
    stopped, started = node.drain_events()
    assert (stopped["event"], started["clean"]) == ("stopped", True)
    assert started["last_alive"] is None, "the clock was ahead at that time"


def test_alive_is_emitted_at_start_and_daily(node: Node) -> None:
    node.set_conditions(MOUNT, replace(XID, state=ConditionState.PENDING))
    (opened,) = node.drain_events()
    node.condition_store.stream.emit_alive(["mount", "gpu_xid"], force=True)
    (alive,) = node.drain_events()
    assert alive["checks"] == ["gpu_xid", "mount"]
    assert alive["conditions"] == [
        {
            "condition": opened["condition"],
            "check": "mount",
            "instance": "/data",
            "code": "mount/missing",
            "subject": "/data",
            "severity": "degraded",
            "state": "open",
        }
    ]
    for seconds, expected in ((86399, []), (86400, ["alive"]), (86401, []), (2 * 86400, ["alive"])):
        node.now = NOW + seconds
        node.condition_store.stream.emit_alive([], force=False)
        assert node.drain_event_names() == expected, seconds
    node.now = NOW
    node.condition_store.stream.emit_alive([], force=False)
    assert node.drain_event_names() == ["alive"], "the clock was set back"


# --- stream identity


def test_stream_continues_after_restart_and_changes_after_boot(node: Node) -> None:
    node.set_conditions(MOUNT)
    node.condition_store.save()
    copy = (node.directory / store.FILE).read_text()
    old_outbox = node.condition_store.ledger.outbox
    node.start()
    assert (node.condition_store.ledger.outbox.stream_id, len(old_outbox.stream_id)) == (old_outbox.stream_id, 16)
    assert [json.loads(line)["seq"] for line in node.condition_store.ledger.outbox.lines] == [2, 3]
    (node.directory / store.FILE).unlink()
    node.start(lambda: {store.FILE: copy}, boot_id="b2")
    lines = node.drain_events()
    assert [e["event"] for e in lines] == ["opened", "started"], "pending lines are written; no condition is repeated"
    assert [e["seq"] for e in lines] == [2, 1]
    assert lines[0]["stream_id"] == old_outbox.stream_id != lines[1]["stream_id"]


def test_cluster_from_slurm_fills_empty_cluster(tmp_path: Path) -> None:
    memory = ConditionStore(str(tmp_path), lambda: NOW)
    memory.load(dict, "b1", Mode.ACT)
    memory.stream.set_cluster("")
    memory.stream.set_cluster("tux")
    memory.stream.emit_stopped("requested")
    memory.save()
    reloaded = ConditionStore(str(tmp_path), lambda: NOW)
    reloaded.load(dict, "b1", Mode.ACT)
    assert [json.loads(line)["cluster"] for line in reloaded.ledger.outbox.lines] == ["", "tux", "tux"]


def test_error_in_event_stream_does_not_lose_change(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "dropped", guard.Counter())
    monkeypatch.setattr(events, "change_events", lambda *_: 1 / 0)
    node.set_conditions(MOUNT)
    assert MOUNT.key in node.condition_store.conditions
    assert guard.dropped["stream"] == 1


def test_dropped_counts_lines_since_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthd.events.outbox.MAX_LINES", 3)
    for number in range(5):
        node.set_conditions(replace(MOUNT, subject=f"/{number}"))
    assert (node.condition_store.stream.dropped, node.condition_store.ledger.outbox.dropped) == (6, 6)
    assert node.drain_event_names() == ["opened", "opened", "cleared"]
    assert node.drain_event_names() == ["dropped"]
    assert (node.condition_store.stream.dropped, node.condition_store.ledger.outbox.dropped) == (6, 0)


# --- any sequence of changes


def open_conditions(lines: list[str]) -> dict[str, str]:
    """Return the open conditions by the stream alone, "CODE SUBJECT" -> state, as docs/events.md describes."""
    open_states: dict[str, tuple[str, str]] = {}
    for event in map(json.loads, lines):
        if event["event"] in ("opened", "acknowledged"):
            state = "open" if event["event"] == "opened" else "acknowledged"
            open_states[event["condition"]] = (f"{event['code']} {event['subject']}".strip(), state)
        elif event["event"] == "cleared":
            del open_states[event["condition"]]
        elif event["event"] in ("seen_again", "worsened"):
            assert event["condition"] in open_states
    assert len({key for key, _ in open_states.values()}) == len(open_states), "one part has two conditions of one code"
    return dict(open_states.values())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "pending", "ack", "clear", "vanish", "worse", "again", "restart", "boot", "clock", "all"]
        ),
        st.integers(0, 4),
        st.integers(1, 5000),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_event_stream_reproduces_open_conditions(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    node = Node(tmp_path_factory.mktemp("run"))
    for step, number, seconds in steps:
        node.now += seconds
        part = replace(MOUNT, subject=f"/{number}", first_seen=node.now, last_seen=node.now, opened_at=node.now)
        key, conditions = part.key, dict(node.condition_store.conditions)
        old = conditions.get(key, part)
        if step == "open":
            conditions[key] = replace(old, state=ConditionState.OPEN, ack=None)
        elif step == "pending" and key not in conditions:
            conditions[key] = replace(part, state=ConditionState.PENDING, opened_at=0.0)
        elif step == "ack":
            ack = Ack(node.now + 60, "known", "ann", old.severity, node.now)
            conditions[key] = replace(old, state=ConditionState.ACKNOWLEDGED, ack=ack)
        elif step == "clear":
            conditions[key] = cleared(old, "pass", node.now)
        elif step == "vanish":
            conditions.pop(key, None)
        elif step == "worse":
            conditions[key] = replace(old, severity=Severity(min(old.severity + 1, 3)))
        elif step == "again":
            conditions[key] = observed_again(old, old.count + seconds, node.now)
        elif step == "all":
            conditions = {each: cleared(c, "reboot", node.now) for each, c in conditions.items()}
        node.condition_store.set_conditions(conditions)
        if step == "clock":
            node.condition_store.apply_clock_step(float(seconds - 2500))
            node.now += seconds - 2500
        if step in ("restart", "boot"):
            node.condition_store.save()
            node.start(boot_id=f"b{number}" if step == "boot" else node.condition_store.ledger.boot_id)
        if number % 2:
            node.drain_events()
    node.drain_events()
    open_or_acked = {
        str(c.key): c.state for c in node.condition_store.ledger.conditions if c.state is not ConditionState.PENDING
    }
    assert open_conditions(node.lines) == {key: state.value for key, state in open_or_acked.items()}
    seqs = [json.loads(line)["seq"] for line in node.lines]
    assert sorted(set(seqs)) == list(range(1, len(set(seqs)) + 1))


# --- volume


@pytest.mark.one_python
def test_yearly_event_volume_matches_events_page(tmp_path: Path) -> None:
    """docs/events.md assumes 40 checks, a new version each month, ten faults that drain, and one warning that is open
    for a month and is found in each round."""
    node, names = Node(tmp_path), {RunName(name): ("", "") for name in (f"check_number_{n:02d}" for n in range(40))}
    quiet = warning = fault = 0

    def size() -> int:
        return sum(len(json.dumps(event, separators=(",", ":"))) + 1 for event in node.drain_events())

    for day in range(365):
        if day % 30 == 0:
            node.condition_store.stream.emit_stopped("requested")
            node.condition_store.save()
            node.start(alive_at=node.now)
            node.condition_store.stream.emit_checks(dict.fromkeys(names, (f"1.{day}.0", "0123abcd")))
            node.condition_store.stream.emit([events.decision(Leave("nothing to do"), "nothing to do")])
        node.condition_store.stream.emit_alive([name.check for name in names], force=day % 30 == 0)
        quiet += size()
        if day % 36 == 5:
            broken = replace(XID, first_seen=node.now, opened_at=node.now, last_seen=node.now)
            node.set_conditions(broken)
            reason = "healthd: gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus"
            node.condition_store.stream.emit(
                [events.decision(Drain(reason, requeue=True), f"drain and requeue: {reason}")]
            )
            node.condition_store.stream.emit([Event("drain", {"stage": "sent", "reason": reason})])
            node.condition_store.change(slurm=DrainRecord(reason=reason))
            node.condition_store.stream.emit(
                [Event("requeue", {"stage": stage, "job": "4711"}) for stage in ("sent", "confirmed")]
            )
            node.condition_store.stream.emit([events.decision(Leave("drained"), "the drain stands")])
            commands.repaired(
                node.condition_store, {"code": "gpu_xid/79", "why": "reseated"}, "ann (uid 1000)", node.now
            )
            node.condition_store.stream.emit([Event("resume", {"stage": "sent"})])
            node.condition_store.stream.emit([Event("resume", {"stage": "confirmed", "reason": reason})])
            node.condition_store.change(slurm=DrainRecord())
            fault += size()
        if 100 <= day < 130:
            for number in range(288):
                node.now += 300
                node.set_conditions(observed_again(MOUNT, (day - 100) * 288 + number + 1, node.now))
            warning += size()
        else:
            node.set_conditions()
            node.now += 86400
    text = (Path(__file__).parents[3] / "docs/events.md").read_text("utf-8")
    documented = re.search(
        r"quiet node writes (\d+) KB.* fault that drains the node adds (\d+) KB.* open for a\s+day\s+adds (\d+) KB",
        text,
        re.S,
    )
    assert documented is not None
    measured = (quiet / 1e3, fault / 1e4, warning / 3e4)
    print(measured)  # pytest -s shows it
    assert [float(figure) for figure in documented.groups()] == pytest.approx(measured, rel=0.15)


# --- the repair plan


def plan(step: RepairStep = RepairStep.GPU_RESET, *obstacles: Obstacle) -> Plan:
    cause = CauseStep("gpu_xid/119", "0000:61:00.0", step, Reason.REMEDY)
    return Plan(step, RepairStep.PERSON, (cause,), obstacles=obstacles)


def test_new_plan_emits_one_event_with_causes() -> None:
    before = Ledger()
    after = replace(before, repair=RepairRecord(plan()))
    (event,) = events.change_events(before, after, NOW)[0]
    assert event.name == "repair"
    assert event.fields == {
        "stage": "advised",
        "step": "gpu_reset",
        "next": "person",
        "why": "remedy",
        "causes": ("gpu_xid/119 0000:61:00.0",),
    }


def test_changed_obstacles_emit_no_event() -> None:
    before = replace(Ledger(), repair=RepairRecord(plan(RepairStep.GPU_RESET, Obstacle.JOBS)))
    assert events.change_events(before, replace(before, repair=RepairRecord(plan())), NOW)[0] == []
    (ended,) = events.change_events(before, replace(before, repair=RepairRecord()), NOW)[0]
    assert (ended.fields["stage"], ended.fields["step"]) == ("withdrawn", "gpu_reset")
    reboot = replace(before, repair=RepairRecord(plan(RepairStep.REBOOT)))
    assert [event.fields["step"] for event in events.change_events(before, reboot, NOW)[0]] == ["reboot"]
