"""Operators' commands and their changes to the ledger. protocol.py defines the requests.

Functions that change nothing raise CommandRefused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthd.agent.conditions import endings
from healthd.agent.conditions.condition import MAX_SUPPRESSION_SECONDS
from healthd.agent.conditions.ledger import Pause
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.control.protocol import (
    ACK,
    FAILSLOW_PAUSE,
    FAILSLOW_UNPAUSE,
    PAUSE,
    REPAIRED,
    UNACK,
    UNPAUSE,
)
from healthd.agent.slurm.flapping import ended_causes, may_have_drained, reset_count
from healthd.common import detection_pause
from healthd.common.detection_pause import DetectionPause
from healthd.common.duration import duration
from healthd.common.errors import HealthdError
from healthd.common.model import Ack, Condition, Severity
from healthd.common.text import printable
from healthd.events.schema import Event

MAX_REASON_LENGTH = 500
MAX_PRINTED_SECONDS = 1e9  # a client may send any number, even one that does not fit into a float
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))


class CommandRefused(HealthdError):
    """Raised if a command is refused. The message is one sentence."""


def repaired(store: ConditionStore, request: Mapping[str, Any], user: str, now: float) -> str:
    """Clear conditions after a repair.

    The command also works if an intermittent fault has cleared by itself but still keeps the node drained
    (agent/slurm/flapping.py).
    """
    ledger, slurm = store.ledger, store.ledger.slurm
    code, part, matching = _matching_conditions((*ledger.conditions, *ended_causes(slurm, ledger.cleared)), request)
    why = _reason(request)
    optional_fields = {"subject": part, "why": why}
    store.stream.emit(
        [
            Event(
                "repaired",
                {"who": user, "code": code, **{name: text for name, text in optional_fields.items() if text}},
            )
        ]
    )
    store.set_conditions(endings.repaired(store.conditions, code, part, f"{user}: {why}" if why else user, now))
    store.reset_growth(matching)
    if may_have_drained(slurm, matching):
        store.change(slurm=reset_count(slurm))
    return f"repaired: {_names(matching)}{f': {why}' if why else ''}; all checks run now"


def ack(store: ConditionStore, request: Mapping[str, Any], user: str, now: float) -> str:
    code, part, matching = _matching_conditions(store.ledger.conditions, request)
    seconds, why = _duration_and_reason(request, "an ack")
    acknowledgement = Ack(now + seconds, why, user, Severity.INFO, requested_at=now)
    store.set_conditions(endings.acknowledge(store.conditions, code, part, acknowledgement))
    return f"acknowledged for {duration(seconds)} by {user}: {_names(matching)}: {why}"


def unack(store: ConditionStore, request: Mapping[str, Any], user: str, now: float) -> str:
    """End acks early. The conditions take effect again at once."""
    code, part, matching = _matching_conditions(store.ledger.conditions, request)
    acknowledged = [c for c in matching if c.ack is not None]
    if not acknowledged:
        raise CommandRefused(f"{_names(matching)} is not acknowledged")
    store.set_conditions(endings.withdraw_acks(store.conditions, code, part, now))
    return f"acknowledgement ended by {user}: {_names(acknowledged)}; drains are possible again"


def _matching_conditions(
    conditions: Sequence[Condition], request: Mapping[str, Any]
) -> tuple[str, str | None, list[Condition]]:
    """Return the code, the part (None for every part) and the matching conditions. Raises CommandRefused if there are
    none."""
    code, part = str(request.get("code")), request.get("part")
    matching = [c for c in conditions if c.code == code and part in (None, c.subject)]
    if not matching:
        names = _names(conditions) or "none"
        part_text = f" on {part!s:.80}" if part else ""
        raise CommandRefused(f"no condition {code:.80}{part_text}; conditions on this node: {names}")
    return code, part, matching


def _names(conditions: Iterable[Condition]) -> str:
    return ", ".join(dict.fromkeys(str(c.key) for c in conditions))


def _reason(request: Mapping[str, Any]) -> str:
    """Return the reason as one printable line for storage, logs and display. Raises CommandRefused."""
    why = printable(" ".join(str(request.get("why") or "").split()))
    if len(why) > MAX_REASON_LENGTH:
        raise CommandRefused(f"a reason must have at most {MAX_REASON_LENGTH} characters, got {len(why)}")
    return why


def _duration_and_reason(request: Mapping[str, Any], subject: str) -> tuple[float, str]:
    """Return the duration in seconds and the reason. `subject` is for messages ("a pause"). Raises CommandRefused."""
    seconds, why = request.get("seconds"), _reason(request)
    # to Python, JSON's true is a number
    if not isinstance(seconds, int | float) or seconds is True or not 0 < seconds <= MAX_SUPPRESSION_SECONDS:
        got = ""
        if isinstance(seconds, int | float) and seconds is not True and 0 < seconds < MAX_PRINTED_SECONDS:
            got = f", got {_duration_text(seconds)}"
        raise CommandRefused(f"{subject} must last at most {_duration_text(MAX_SUPPRESSION_SECONDS)}{got}")
    if not why:
        raise CommandRefused(f"{subject} needs a reason (--why)")
    return seconds, why


def _duration_text(seconds: float) -> str:
    """Format seconds in the format of --for ("7d", "36h")."""
    unit, letter = next(((unit, letter) for unit, letter in UNITS if seconds >= unit and not seconds % unit), UNITS[-1])
    return f"{seconds / unit:g}{letter}"


def pause(store: ConditionStore, request: Mapping[str, Any], user: str, now: float) -> str:
    seconds, why = _duration_and_reason(request, "a pause")
    store.change(pause=Pause(now + seconds, why, user, requested_at=now))
    return f"paused for {duration(seconds)} by {user}: {why}"


def unpause(store: ConditionStore, _request: Mapping[str, Any], _user: str, now: float) -> str:
    if store.ledger.pause is None:
        raise CommandRefused("healthd is not paused")
    end_pause(store, now)
    return "the pause has ended; all checks run now"


def end_pause(store: ConditionStore, now: float) -> None:
    """End the pause. Conditions that opened during the pause take effect only if a check still reports them
    afterwards.
    """
    pause = store.ledger.pause
    store.change(pause=None, trusted_since=now, paused_at=pause.requested_at if pause else 0.0)


def failslow_pause(runtime_dir: str, request: Mapping[str, Any], user: str, now: float) -> str:
    """Pause the detection of slow jobs. Slurm and all other checks are not affected."""
    seconds, why = _duration_and_reason(request, "a pause")
    try:
        detection_pause.write_pause(runtime_dir, DetectionPause(now + seconds, why, user, now))
    except OSError as error:
        raise CommandRefused(f"{runtime_dir}: {error.strerror}") from None
    return f"slow-job detection paused for {duration(seconds)} by {user}: {why}"


def failslow_unpause(runtime_dir: str, _request: Mapping[str, Any], _user: str, now: float) -> str:
    active_pause = detection_pause.active_pause(runtime_dir, now)
    try:
        detection_pause.remove_pause(runtime_dir)
    except OSError as error:
        raise CommandRefused(f"{runtime_dir}: {error.strerror}") from None
    if active_pause is None:
        raise CommandRefused("slow-job detection is not paused")
    return "slow-job detection resumed"


COMMANDS = {ACK: ack, UNACK: unack, REPAIRED: repaired, PAUSE: pause, UNPAUSE: unpause}
# Commands that do not change the ledger: (runtime directory, request, user, now) -> message.
FAILSLOW_COMMANDS = {FAILSLOW_PAUSE: failslow_pause, FAILSLOW_UNPAUSE: failslow_unpause}
