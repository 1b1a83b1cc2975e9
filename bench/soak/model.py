"""Check a node's history: every event and every decision once. The functions are pure; [] means that all is right.

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
    """`what`: drain, resume or requeue; `about`: the Reason, the job, or "" for a resume."""

    what: str
    about: str


@dataclass
class Wanted:
    """Expected results of the actions on a node.

    opened    how often each condition (code, part) must open; other codes may open, and must be cleared
    told      how often each of COUNTED must be reported, (min, max): a command may have worked before a kill
    requeued  jobs that must be requeued, each once
    """

    opened: Counter[tuple[str, str]] = field(default_factory=Counter)
    told: dict[str, tuple[int, int]] = field(default_factory=dict)
    requeued: set[str] = field(default_factory=set)
    kills: int = 0

    def tell(self, name: str, least: int = 1, most: int = 1) -> None:
        known = self.told.get(name, (0, 0))
        self.told[name] = (known[0] + least, known[1] + most)


def what_is_wrong(events: Sequence[Event], commands: Sequence[Command], wanted: Wanted) -> list[str]:
    """Return the problems of a node at rest: no condition is open, nothing waits to be written."""
    dropped = [f"the stream dropped lines: {dict(event)}" for event in events if event["event"] == "dropped"]
    return [
        *dropped,
        *_lives(events),
        *_opened(events, wanted),
        *_counted(events, wanted),
        *_decided(events, commands, wanted),
    ]


def _lives(events: Sequence[Event]) -> Iterable[str]:
    """Check that each condition is opened once, first, and cleared once, last."""
    told: defaultdict[str, list[str]] = defaultdict(list)
    names: dict[str, str] = {}
    for event in events:
        if "condition" in event:
            name = str(event["condition"])
            names[name] = f"{event['code']} {event['subject']} ({name})"
            told[name].append("counts again" if event.get("was") == "acknowledged" else str(event["event"]))
    for name, of_one in told.items():
        for what, place in (("opened", 0), ("cleared", -1)):
            if of_one.count(what) != 1 or of_one[place] != what:
                yield f"{names[name]} has the events {', '.join(of_one)}"
                break


def _opened(events: Sequence[Event], wanted: Wanted) -> Iterable[str]:
    codes = {code for code, _ in wanted.opened}
    found = Counter(
        (str(event["code"]), str(event["subject"]))
        for event in events
        if event["event"] == "opened" and "was" not in event and event["code"] in codes
    )
    for key in sorted(found.keys() | wanted.opened.keys()):
        if found[key] != wanted.opened[key]:
            yield f"{' '.join(key)} opened {found[key]} times, not {wanted.opened[key]}"


def _counted(events: Sequence[Event], wanted: Wanted) -> Iterable[str]:
    found = Counter(_name(event) for event in events)
    for name in COUNTED:
        least, most = wanted.told.get(name, (0, 0))
        if not least <= found[name] <= most:
            expected_times = least if least == most else f"{least} to {most}"
            yield f'"{name}" is reported {found[name]} times, not {expected_times}'


def _name(event: Event) -> str:
    which = {"pause": "stage", "check_enabled": "instance", "check_disabled": "instance"}.get(str(event["event"]))
    return f"{event['event']} {event[which]}" if which else str(event["event"])


def _decided(events: Sequence[Event], commands: Sequence[Command], wanted: Wanted) -> Iterable[str]:
    """Check that the commands match the events, in order. Only a kill may separate an event from its command."""
    changes = [event for event in events if event["event"] in ("drain", "resume", "requeue")]
    told = [_command(event) for event in changes if event["stage"] == "sent"]
    untold = list((Counter(commands) - Counter(told)).elements())
    undone = list((Counter(told) - Counter(commands)).elements())
    if untold:
        yield f"run, but not reported: {untold}"
    if len(undone) > wanted.kills:
        yield f"reported, but not run, with {wanted.kills} kills: {undone}"
    if not wanted.kills and not untold and not undone and told != list(commands):
        yield f"reported in another order than run: {told}, {list(commands)}"
    requeues = Counter(about for what, about in commands if what == "requeue")
    confirmed = Counter(str(e["job"]) for e in changes if e["event"] == "requeue" and e["stage"] == "confirmed")
    for how, counted in (("requeued", requeues), ("reported as requeued", confirmed)):
        if wrong := {job: n for job, n in (counted | Counter(wanted.requeued)).items() if n != 1 or not counted[job]}:
            yield f"{how} not once each: {wrong}"
    if not wanted.kills:
        yield from _answered(changes)


def _answered(changes: Sequence[Event]) -> Iterable[str]:
    """Check that each sent command has one answer before the same command is sent again.

    A command without an answer is reported as refused, but may have worked: then Slurm shows it later.
    """
    last: dict[str, Event] = {}
    for event in changes:
        what = f"{event['event']} {event['job']}" if event["event"] == "requeue" else str(event["event"])
        before, stage = last.get(what, {}).get("stage"), event["stage"]
        if before == stage == "sent":
            yield f"{what} was sent again before an answer to the first: {dict(event)}"
        elif stage != "sent" and before not in (("sent", "refused") if stage == "confirmed" else ("sent",)):
            yield f"{what} is {stage} but was not sent: {dict(event)}"
        last[what] = event
    yield from (f"the result of {what} is not reported: {dict(e)}" for what, e in last.items() if e["stage"] == "sent")


def _command(event: Event) -> Command:
    about = {"drain": "reason", "requeue": "job"}.get(str(event["event"]), "")
    return Command(str(event["event"]), str(event.get(about, "")))
