"""What a running job is advised: the planner followed while the job runs, and its answer as a document. Pure.

A node knows its own ranks, not the gang. But all wait for the slowest, so that the gang loses as many seconds as each
of its ranks does, and a remedy's cost is seconds of the gang, too: loss and cost are compared in seconds, and how many
GPUs there are cancels out.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from healthd.failslow.mitigation.planner import HEALTHY, Action, Look, Overheads, State, due, step
from healthd.failslow.model import Cause

SCHEMA = 1
SETTLES = 2  # looks after a remedy, each of some seconds in which the job's iterations go on
ALONE = 1  # GPUs: see above

WHY = {
    Action.IGNORE: "nothing is worth its cost yet",
    Action.MICRO_BATCHES: "move micro-batches from the slow data-parallel groups to the quick ones",
    Action.TOPOLOGY: "exchange places: stragglers into the fewest pipeline stages, slow links where little is sent",
    Action.RESTART: "write a checkpoint and start again without the slow node",
}


class Seen(NamedTuple):
    """A job as it is now. lost_seconds: the sum over its ranks here since it began, also over those that have ended;
    ranks: how many there are now; since: epoch seconds, None while nothing is slow; rank: who is named, "" = nobody."""

    slow: bool
    lost_seconds: float
    cause: Cause = Cause.UNKNOWN
    since: float | None = None
    slowdown: float = 0.0
    rank: str = ""
    ranks: int = 1


class Followed(NamedTuple):
    """What is kept of a job between two looks. number: how often the advice changed, 0 = there never was any."""

    state: State = HEALTHY
    seen: Seen = Seen(False, 0.0)
    action: Action = Action.IGNORE
    number: int = 0


def follow(before: Followed, seen: Seen, overheads: Overheads) -> Followed:
    """One look later. A job that never was slow has no advice; one that recovered is told so."""
    lost = max(0.0, seen.lost_seconds - before.seen.lost_seconds) / max(1, seen.ranks)
    state, action = step(before.state, Look(seen.slow, lost, ALONE, seen.cause), overheads, SETTLES)
    if action is None:
        action = before.action if seen.slow else Action.IGNORE
    said, now = (_said(before.seen, before.action), _said(seen, action))
    return Followed(state, seen, action, before.number + (said != now))


def _said(seen: Seen, action: Action) -> tuple[object, ...]:
    """What of it is news."""
    return (True, action, seen.rank) if seen.slow else (False,)


def advice(job: str, followed: Followed, overheads: Overheads, now: float) -> str:
    """The file: a JSON object (docs/json.md). now: epoch seconds."""
    seen, following = followed.seen, due(followed.state, ALONE, overheads)
    document = {
        "schema": SCHEMA,
        "job": job,
        "number": followed.number,
        "written": round(now, 3),
        "slow": seen.slow,
        "since": seen.since,
        "slowdown": seen.slowdown,
        "cause": seen.cause.value if seen.slow else "",
        "rank": seen.rank,
        "action": followed.action.value,
        "says": WHY[followed.action] if seen.slow else "nothing is slow any more",
        "lost_seconds": round(followed.state.lost, 3),
        "next": None
        if following is None or not seen.slow
        else {"action": following.action.value, "at_lost_seconds": following.at},
    }
    return json.dumps(document, allow_nan=False) + "\n"
