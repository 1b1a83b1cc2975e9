"""Tests of the events about Slurm: before a command, when it is refused, and when Slurm shows its effect."""

from __future__ import annotations

from typing import Any

import pytest

from healthd.agent.slurm.action_log import command_events, report_events
from healthd.common.slurm import commands
from healthd.common.slurm.commands import CommandResult

DRAIN = commands.drain("n1", "healthd: gpu_xid/79: it fell off the bus")
REFUSED = CommandResult(1, b"", "slurm_update error: Invalid node name specified\n")


def told(argv: tuple[str, ...], result: CommandResult | None = None) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, dict(event.fields)) for event in command_events(argv, result)]


@pytest.mark.parametrize(
    ("argv", "event", "about"),
    [
        (DRAIN, "drain", {"reason": "healthd: gpu_xid/79: it fell off the bus"}),
        (commands.undrain("n1"), "resume", {}),
        (commands.requeue("12_3", hold=False), "requeue", {"job": "12_3"}),
        (commands.requeue("12", hold=True), "requeue", {"job": "12"}),
    ],
)
def test_a_command_is_told_before_it_begins_and_again_only_where_it_is_refused(argv, event, about):
    assert told(argv) == [(event, {**about, "stage": "sent"})]
    assert told(argv, CommandResult(0)) == [], "success is emitted when Slurm shows it"
    ((name, fields),) = told(argv, REFUSED)
    assert (name, fields["stage"]) == (event, "refused")
    assert fields["error"].endswith("slurm_update error: Invalid node name specified")


def test_a_command_without_an_answer_is_told_with_what_may_come_of_it():
    ((_, fields),) = told(DRAIN, CommandResult(None))
    assert fields["error"] == "scontrol update did not end in time; slurmctld may still execute it"


def test_a_comment_on_a_job_changes_nothing_that_is_told():
    assert told(commands.comment("12", "State=DRAIN")) == []
    assert told(commands.comment("12", "words"), REFUSED) == []


def look(
    lifted: bool = False, acknowledged: bool = False, requeued: tuple[str, ...] = ()
) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, dict(event.fields)) for event in report_events("healthd: a", lifted, acknowledged, requeued)]


def test_the_end_of_our_drain_is_told_with_who_ended_it():
    assert look() == []
    assert look(lifted=True) == [("resume", {"stage": "confirmed", "reason": "healthd: a"})]
    assert look(acknowledged=True) == [("resume", {"stage": "confirmed", "reason": "healthd: a", "who": "an operator"})]


def test_each_job_that_was_seen_requeued_is_told():
    assert look(requeued=("12", "13_1")) == [
        ("requeue", {"stage": "confirmed", "job": "12"}),
        ("requeue", {"stage": "confirmed", "job": "13_1"}),
    ]
