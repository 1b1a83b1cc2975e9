"""Check a node's history: every event and every decision must occur exactly once.

The functions are pure. They return the problems; [] means that all is right.

Events are the fields of the node's stream (docs/events.md) in order of their numbers. Commands are those that healthd
ran in Slurm, as recorded by a wrapper around scontrol.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = Mapping[str, Any]
COUNTED = (
    "acknowledged",
    "repaired",
    "pause begun",
    "pause ended",
    "check_enabled site",
    "check_disabled site",
    "stopped",
)


class Command(NamedTuple):
    """`kind`: drain, resume or requeue; `about`: the Reason, the job, or "" for a resume."""

    kind: str
    about: str


@dataclass
class Expected:
    """Expected results of the actions on a node.

    opened    how often each condition (code, part) must open; conditions with other codes may open, and must be cleared
    reports   (min, max) of how often each event in COUNTED must be reported; a range, because a command may have worked
              before a kill
    requeued  jobs that must be requeued, each once
    """

    opened: Counter[tuple[str, str]] = field(default_factory=Counter)
    reports: dict[str, tuple[int, int]] = field(default_factory=dict)
    requeued: set[str] = field(default_factory=set)
    kills: int = 0

    def expect_report(self, name: str, minimum: int = 1, maximum: int = 1) -> None:
        previous = self.reports.get(name, (0, 0))
        self.reports[name] = (previous[0] + minimum, previous[1] + maximum)


def find_problems(events: Sequence[Event], commands: Sequence[Command], expected: Expected) -> list[str]:
    """Return the problems of a node at rest. At rest, no condition is open and nothing waits to be written."""
    dropped = [f"the stream dropped lines: {dict(event)}" for event in events if event["event"] == "dropped"]
    return [
        *dropped,
        *_condition_problems(events),
        *_opening_problems(events, expected),
        *_count_problems(events, expected),
        *_command_problems(events, commands, expected),
    ]


def _condition_problems(events: Sequence[Event]) -> Iterable[str]:
    """Check that the first event of each condition is its only opening, and that the last event is its only
    clearing."""
    events_by_condition: defaultdict[str, list[str]] = defaultdict(list)
    names: dict[str, str] = {}
    for event in events:
        if "condition" in event:
            name = str(event["condition"])
            names[name] = f"{event['code']} {event['subject']} ({name})"
            events_by_condition[name].append(
                "counts again" if event.get("was") == "acknowledged" else str(event["event"])
            )
    for name, condition_events in events_by_condition.items():
        for name_of_event, index in (("opened", 0), ("cleared", -1)):
            if condition_events.count(name_of_event) != 1 or condition_events[index] != name_of_event:
                yield f"{names[name]} has the events {', '.join(condition_events)}"
                break


def _opening_problems(events: Sequence[Event], expected: Expected) -> Iterable[str]:
    codes = {code for code, _ in expected.opened}
    found = Counter(
        (str(event["code"]), str(event["subject"]))
        for event in events
        if event["event"] == "opened" and "was" not in event and event["code"] in codes
    )
    for key in sorted(found.keys() | expected.opened.keys()):
        if found[key] != expected.opened[key]:
            yield f"{' '.join(key)} opened {found[key]} times, not {expected.opened[key]}"


def _count_problems(events: Sequence[Event], expected: Expected) -> Iterable[str]:
    found = Counter(_counted_name(event) for event in events)
    for name in COUNTED:
        minimum, maximum = expected.reports.get(name, (0, 0))
        if not minimum <= found[name] <= maximum:
            expected_times = minimum if minimum == maximum else f"{minimum} to {maximum}"
            yield f'"{name}" is reported {found[name]} times, not {expected_times}'


def _counted_name(event: Event) -> str:
    detail_field = {"pause": "stage", "check_enabled": "instance", "check_disabled": "instance"}.get(
        str(event["event"])
    )
    return f"{event['event']} {event[detail_field]}" if detail_field else str(event["event"])


def _command_problems(events: Sequence[Event], commands: Sequence[Command], expected: Expected) -> Iterable[str]:
    """Check that commands and events match, in order.

    Only a kill may cause an event without a command, or the reverse.
    """
    changes = [event for event in events if event["event"] in ("drain", "resume", "requeue")]
    reported = [_command(event) for event in changes if event["stage"] == "sent"]
    unreported = list((Counter(commands) - Counter(reported)).elements())
    not_run = list((Counter(reported) - Counter(commands)).elements())
    if unreported:
        yield f"run, but not reported: {unreported}"
    if len(not_run) > expected.kills:
        yield f"reported, but not run, with {expected.kills} kills: {not_run}"
    if not expected.kills and not unreported and not not_run and reported != list(commands):
        yield f"reported in another order than run: {reported}, {list(commands)}"
    requeues = Counter(about for kind, about in commands if kind == "requeue")
    confirmed = Counter(str(e["job"]) for e in changes if e["event"] == "requeue" and e["stage"] == "confirmed")
    for description, counted in (("requeued", requeues), ("reported as requeued", confirmed)):
        if wrong_counts := {
            job: n for job, n in (counted | Counter(expected.requeued)).items() if n != 1 or not counted[job]
        }:
            yield f"{description} not once each: {wrong_counts}"
    if not expected.kills:
        yield from _answer_problems(changes)


def _answer_problems(changes: Sequence[Event]) -> Iterable[str]:
    """Check that each sent command has one answer before the same command is sent again.

    A command without an answer is reported as refused. It may have worked nevertheless; Slurm then shows this later.
    """
    last: dict[str, Event] = {}
    for event in changes:
        command_name = f"{event['event']} {event['job']}" if event["event"] == "requeue" else str(event["event"])
        before, stage = last.get(command_name, {}).get("stage"), event["stage"]
        if before == stage == "sent":
            yield f"{command_name} was sent again before an answer to the first: {dict(event)}"
        elif stage != "sent" and before not in (("sent", "refused") if stage == "confirmed" else ("sent",)):
            yield f"{command_name} is {stage} but was not sent: {dict(event)}"
        last[command_name] = event
    yield from (
        f"the result of {command_name} is not reported: {dict(e)}"
        for command_name, e in last.items()
        if e["stage"] == "sent"
    )


def _command(event: Event) -> Command:
    about = {"drain": "reason", "requeue": "job"}.get(str(event["event"]), "")
    return Command(str(event["event"]), str(event.get(about, "")))
