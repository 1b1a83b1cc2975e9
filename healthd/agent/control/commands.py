"""What each command changes in the ledger (protocol.py has their form). Raises CommandRefused where it changes nothing.

Each command is one that an engineer gives at a node: "I know of it", "I repaired it", "leave it alone for half an
hour", "go on".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthd.agent.conditions import endings
from healthd.agent.conditions.condition import LONGEST_WISH_SECONDS
from healthd.agent.conditions.ledger import Pause
from healthd.agent.conditions.store import Memory
from healthd.agent.control.protocol import (
    ACK,
    FAILSLOW_PAUSE,
    FAILSLOW_UNPAUSE,
    PAUSE,
    REPAIRED,
    UNACK,
    UNPAUSE,
)
from healthd.agent.slurm.flapping import answered_for, ended_in_drain, has_drained
from healthd.common import detection_pause
from healthd.common.detection_pause import DetectionPause
from healthd.common.duration import duration
from healthd.common.errors import HealthdError
from healthd.common.model import Ack, Condition, Severity
from healthd.common.text import printable
from healthd.events.schema import Event

MAX_WHY = 500
MOST_SHOWN_SECONDS = 1e9  # a client may send any number, also one that is no float
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))


class CommandRefused(HealthdError):
    """One sentence: why a command is not carried out."""


def repaired(memory: Memory, request: Mapping[str, Any], who: str, now: float) -> str:
    """Also of a fault that is over, where the node stays drained because it came and went (agent/slurm/flapping.py)."""
    ledger, slurm = memory.ledger, memory.ledger.slurm
    code, part, hit = _meant((*ledger.conditions, *ended_in_drain(slurm, ledger.cleared)), request)
    why = _why(request)
    also = {"subject": part, "why": why}
    memory.stream.emit(
        [Event("repaired", {"who": who, "code": code, **{name: text for name, text in also.items() if text}})]
    )
    memory.set_conditions(endings.repaired(memory.conditions, code, part, f"{who}: {why}" if why else who, now))
    memory.forget_growth(hit)
    if has_drained(slurm, hit):
        memory.change(slurm=answered_for(slurm))
    return f"repaired: {_names(hit)}{f': {why}' if why else ''}; all checks look now"


def ack(memory: Memory, request: Mapping[str, Any], who: str, now: float) -> str:
    code, part, hit = _meant(memory.ledger.conditions, request)
    seconds, why = _how_long_and_why(request, "an ack")
    known = Ack(now + seconds, why, who, Severity.INFO, given=now)
    memory.set_conditions(endings.known_for_a_while(memory.conditions, code, part, known))
    return f"acknowledged for {duration(seconds)} by {who}: {_names(hit)}: {why}"


def unack(memory: Memory, request: Mapping[str, Any], who: str, now: float) -> str:
    """End acks before their time: their conditions count again at once."""
    code, part, hit = _meant(memory.ledger.conditions, request)
    known = [c for c in hit if c.ack is not None]
    if not known:
        raise CommandRefused(f"{_names(hit)} is not acknowledged")
    memory.set_conditions(endings.without_acks(memory.conditions, code, part, now))
    return f"acknowledgement ended by {who}: {_names(known)}; it counts again"


def _meant(conditions: Sequence[Condition], request: Mapping[str, Any]) -> tuple[str, str | None, list[Condition]]:
    """Code, part (None = every part) and the conditions that match. Raises CommandRefused if none does."""
    code, part = str(request.get("code")), request.get("part")
    hit = [c for c in conditions if c.code == code and part in (None, c.subject)]
    if not hit:
        standing = _names(conditions) or "none"
        on = f" on {part!s:.80}" if part else ""
        raise CommandRefused(f"there is no condition {code:.80}{on}; there are: {standing}")
    return code, part, hit


def _names(conditions: Iterable[Condition]) -> str:
    return ", ".join(dict.fromkeys(str(c.key) for c in conditions))


def _why(request: Mapping[str, Any]) -> str:
    """Why, on one printable line: it is kept, logged and shown. Raises CommandRefused."""
    why = printable(" ".join(str(request.get("why") or "").split()))
    if len(why) > MAX_WHY:
        raise CommandRefused(f"a reason has at most {MAX_WHY} characters, this one {len(why)}")
    return why


def _how_long_and_why(request: Mapping[str, Any], what: str) -> tuple[float, str]:
    """Raises CommandRefused. `what`: "a pause"."""
    seconds, why = request.get("seconds"), _why(request)
    # JSON's true is a number to Python
    if not isinstance(seconds, int | float) or seconds is True or not 0 < seconds <= LONGEST_WISH_SECONDS:
        got = ""
        if isinstance(seconds, int | float) and seconds is not True and 0 < seconds < MOST_SHOWN_SECONDS:
            got = f", got {_days(seconds)}"
        raise CommandRefused(f"{what} must last at most {_days(LONGEST_WISH_SECONDS)}{got}")
    if not why:
        raise CommandRefused(f"{what} needs a reason")
    return seconds, why


def _days(seconds: float) -> str:
    """Return seconds as --for takes them: "7d", "36h"."""
    unit, letter = next(((unit, letter) for unit, letter in UNITS if seconds >= unit and not seconds % unit), UNITS[-1])
    return f"{seconds / unit:g}{letter}"


def pause(memory: Memory, request: Mapping[str, Any], who: str, now: float) -> str:
    seconds, why = _how_long_and_why(request, "a pause")
    memory.change(pause=Pause(now + seconds, why, who, given=now))
    return f"paused for {duration(seconds)} by {who}: {why}"


def unpause(memory: Memory, _request: Mapping[str, Any], _who: str, now: float) -> str:
    if memory.ledger.pause is None:
        raise CommandRefused("there is no pause")
    end_pause(memory, now)
    return "the pause is over; all checks look now"


def end_pause(memory: Memory, now: float) -> None:
    """A condition that opened during the pause acts only when a check finds it from now on."""
    memory.change(pause=None, trusted_since=now)


def failslow_pause(runtime_dir: str, request: Mapping[str, Any], who: str, now: float) -> str:
    """It leaves Slurm and all other checks as they are."""
    seconds, why = _how_long_and_why(request, "a pause")
    try:
        detection_pause.begin(runtime_dir, DetectionPause(now + seconds, why, who, now))
    except OSError as error:
        raise CommandRefused(f"{runtime_dir}: {error.strerror}") from None
    return f"nothing new is said of slow jobs for {duration(seconds)}, by {who}: {why}"


def failslow_unpause(runtime_dir: str, _request: Mapping[str, Any], _who: str, now: float) -> str:
    stood = detection_pause.standing(runtime_dir, now)
    try:
        detection_pause.end(runtime_dir)
    except OSError as error:
        raise CommandRefused(f"{runtime_dir}: {error.strerror}") from None
    if stood is None:
        raise CommandRefused("the detection of slow jobs is not paused")
    return "slow jobs are told again"


COMMANDS = {ACK: ack, UNACK: unack, REPAIRED: repaired, PAUSE: pause, UNPAUSE: unpause}
# What changes nothing that is remembered: (runtime directory, request, who, now) -> what was done.
OF_DETECTION = {FAILSLOW_PAUSE: failslow_pause, FAILSLOW_UNPAUSE: failslow_unpause}
