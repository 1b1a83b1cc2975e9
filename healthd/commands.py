"""What people tell the running daemon over its control socket (the protocol is in status.py): pure where it decides.

Each command is one that an engineer gives at a node: "I repaired it", "leave it alone for half an hour", "go on".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthd import verdict
from healthd.ledger import Pause
from healthd.memory import Memory

LONGEST_PAUSE_SECONDS = 7 * 86400.0


class Refused(Exception):
    """One sentence: why a command is not carried out."""


def repaired(memory: Memory, request: Mapping[str, Any], who: str, now: float) -> str:
    code, part = str(request.get("code")), request.get("part")
    before = memory.ledger.by_key()
    hit = [c for c in before.values() if c.code == code and part in (None, c.subject)]
    if not hit:
        standing = ", ".join(f"{c.code} {c.subject}".strip() for c in before.values()) or "none"
        raise Refused(f"there is no condition {code}{f' on {part}' if part else ''}; there are: {standing}")
    memory.set_conditions(verdict.repaired(before, code, part, who, now))
    memory.forget_growth(hit)
    names = ", ".join(f"{c.code} {c.subject}".strip() for c in hit)
    return f"repaired: {names}; all checks look now"


def pause(memory: Memory, request: Mapping[str, Any], who: str, now: float) -> str:
    from healthd.render import duration

    seconds, why = request.get("seconds"), str(request.get("why") or "").strip()
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_PAUSE_SECONDS:
        raise Refused("a pause lasts more than nothing and at most a week")
    if not why:
        raise Refused("a pause needs a reason")
    memory.change(pause=Pause(now + seconds, why, who))
    return f"paused for {duration(seconds)} by {who}: {why}"


def resume_checks(memory: Memory, _request: Mapping[str, Any], _who: str, now: float) -> str:
    if memory.ledger.pause is None:
        raise Refused("there is no pause")
    end_pause(memory, now)
    return "the pause is over; all checks look now"


def end_pause(memory: Memory, now: float) -> None:
    """What opened meanwhile acts only when a check finds it from now on."""
    memory.change(pause=None, trusted_since=now)


COMMANDS = {"repaired": repaired, "pause": pause, "resume-checks": resume_checks}
