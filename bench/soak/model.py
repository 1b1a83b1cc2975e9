"""What must have come of what happened to a node: every event and every decision once. Pure; [] = all is right.

Events are the fields of the node's stream (docs/events.md) in the order of their numbers; commands are what healthd ran
in Slurm, as a wrapper around scontrol noted it.
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
    """`what`: drain, resume or requeue; `about`: the Reason, the job, "" of a resume."""

    what: str
    about: str


@dataclass
class Wanted:
    """What was done to the node. opened: how often each condition (code, part) was made to open; a code that is not in
    it may open as it likes, and has to be cleared. told: how often each of COUNTED must be told, at least and at most
    (a command whose answer a kill took may have been carried out). requeued: jobs, each once."""

    opened: Counter[tuple[str, str]] = field(default_factory=Counter)
    told: dict[str, tuple[int, int]] = field(default_factory=dict)
    requeued: set[str] = field(default_factory=set)
    kills: int = 0

    def tell(self, name: str, least: int = 1, most: int = 1) -> None:
        known = self.told.get(name, (0, 0))
        self.told[name] = (known[0] + least, known[1] + most)


def what_is_wrong(events: Sequence[Event], commands: Sequence[Command], wanted: Wanted) -> list[str]:
    """Of a node at rest: nothing stands, nothing waits to be written."""
    dropped = [f"the stream had no room for lines: {dict(event)}" for event in events if event["event"] == "dropped"]
    return [
        *dropped,
        *_lives(events),
        *_opened(events, wanted),
        *_counted(events, wanted),
        *_decided(events, commands, wanted),
    ]


def _lives(events: Sequence[Event]) -> Iterable[str]:
    """A condition opens once, and is cleared once, which is the last that is told of it."""
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
                yield f"{names[name]} is told as {', '.join(of_one)}"
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
            yield f'"{name}" is told {found[name]} times, not {least if least == most else f"{least} to {most}"}'


def _name(event: Event) -> str:
    which = {"pause": "stage", "check_enabled": "instance", "check_disabled": "instance"}.get(str(event["event"]))
    return f"{event['event']} {event[which]}" if which else str(event["event"])


def _decided(events: Sequence[Event], commands: Sequence[Command], wanted: Wanted) -> Iterable[str]:
    """What was run is what was told, in its order; only a kill may come between word and deed."""
    changes = [event for event in events if event["event"] in ("drain", "resume", "requeue")]
    told = [_command(event) for event in changes if event["stage"] == "sent"]
    untold = list((Counter(commands) - Counter(told)).elements())
    undone = list((Counter(told) - Counter(commands)).elements())
    if untold:
        yield f"run, and never told: {untold}"
    if len(undone) > wanted.kills:
        yield f"told, and never run, with {wanted.kills} kills: {undone}"
    if not wanted.kills and not untold and not undone and told != list(commands):
        yield f"told in another order than run: {told}, {list(commands)}"
    requeues = Counter(about for what, about in commands if what == "requeue")
    confirmed = Counter(str(e["job"]) for e in changes if e["event"] == "requeue" and e["stage"] == "confirmed")
    for how, counted in (("requeued", requeues), ("told as requeued", confirmed)):
        if wrong := {job: n for job, n in (counted | Counter(wanted.requeued)).items() if n != 1 or not counted[job]}:
            yield f"{how} not once each: {wrong}"
    if not wanted.kills:
        yield from _answered(changes)


def _answered(changes: Sequence[Event]) -> Iterable[str]:
    """To each command that was sent there is one answer before the same is sent again. One that got none, which is told
    as refused, may have worked: then Slurm shows it later."""
    last: dict[str, Event] = {}
    for event in changes:
        what = f"{event['event']} {event['job']}" if event["event"] == "requeue" else str(event["event"])
        before, stage = last.get(what, {}).get("stage"), event["stage"]
        if before == stage == "sent":
            yield f"a {what} was sent again before an answer to the first: {dict(event)}"
        elif stage != "sent" and before not in (("sent", "refused") if stage == "confirmed" else ("sent",)):
            yield f"a {what} is {stage} that was not sent: {dict(event)}"
        last[what] = event
    yield from (f"what came of this {what} is not told: {dict(e)}" for what, e in last.items() if e["stage"] == "sent")


def _command(event: Event) -> Command:
    about = {"drain": "reason", "requeue": "job"}.get(str(event["event"]), "")
    return Command(str(event["event"]), str(event.get(about, "")))
