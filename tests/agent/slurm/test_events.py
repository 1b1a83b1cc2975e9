"""Tests of the events about Slurm: before a command, when it is refused, and when Slurm shows its effect."""

from __future__ import annotations

from typing import Any

import pytest

from healthd.agent.slurm.action_log import command_events, report_events
from healthd.common.model import RepairStep
from healthd.common.slurm import commands
from healthd.common.slurm.commands import CommandResult
from healthd.common.slurm.drain_reason import with_claim

DRAIN = commands.drain("n1", "healthd: gpu_xid/79: it fell off the bus")
REFUSED = CommandResult(1, b"", "slurm_update error: Invalid node name specified\n")


def event_list(argv: tuple[str, ...], result: CommandResult | None = None) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, dict(event.fields)) for event in command_events(argv, result)]


@pytest.mark.parametrize(
    ("argv", "event", "event_fields"),
    [
        (DRAIN, "drain", {"reason": "healthd: gpu_xid/79: it fell off the bus"}),
        (commands.undrain("n1"), "resume", {}),
        (commands.resume("n1"), "resume", {}),
        (commands.requeue("12_3", hold=False), "requeue", {"job": "12_3"}),
        (commands.requeue("12", hold=True), "requeue", {"job": "12"}),
    ],
)
def test_command_events_are_sent_and_refused(argv, event, event_fields):
    assert event_list(argv) == [(event, {**event_fields, "stage": "sent"})]
    assert event_list(argv, CommandResult(0)) == [], "success is emitted when Slurm shows it"
    ((name, fields),) = event_list(argv, REFUSED)
    assert (name, fields["stage"]) == (event, "refused")
    assert fields["error"].endswith("slurm_update error: Invalid node name specified")


def test_command_events_for_timeout_leave_outcome_open():
    ((_, fields),) = event_list(DRAIN, CommandResult(None))
    assert fields["error"] == "scontrol update did not end in time; slurmctld may still execute it"


def test_command_events_for_comment_are_empty():
    assert event_list(commands.comment("12", "State=DRAIN")) == []
    assert event_list(commands.comment("12", "words"), REFUSED) == []


def report(
    lifted: bool = False, acknowledged: bool = False, requeued: tuple[str, ...] = ()
) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, dict(event.fields)) for event in report_events("healthd: a", lifted, acknowledged, requeued)]


def test_report_events_for_ended_drain_name_user():
    assert report() == []
    assert report(lifted=True) == [("resume", {"stage": "confirmed", "reason": "healthd: a"})]
    assert report(acknowledged=True) == [
        ("resume", {"stage": "confirmed", "reason": "healthd: a", "who": "an operator"})
    ]


@pytest.mark.parametrize("step", RepairStep)
def test_report_events_leave_claim_of_repair_out_of_reason(step: RepairStep) -> None:
    reason = "healthd: gpu_xid/119 0000:1b:00.0: GSP timeout"
    events = list(report_events(with_claim(reason, step), resumed=True, acknowledged=False, requeued=()))
    assert [event.fields["reason"] for event in events] == [reason]


def test_report_events_have_each_requeued_job():
    assert report(requeued=("12", "13_1")) == [
        ("requeue", {"stage": "confirmed", "job": "12"}),
        ("requeue", {"stage": "confirmed", "job": "13_1"}),
    ]
