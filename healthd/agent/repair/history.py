"""The faults that drained this node, and the steps that healthd took, from the event stream. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from healthd.common.model import Ending
from healthd.common.values import Value
from healthd.events.parse import StreamEvent

RETURN_SECONDS = 28 * 86400.0  # a fault that returns later is a new one
NAMES = ("opened", "worsened", "cleared", "repair")  # the events that the history needs
_STEP_STAGES = ("taken", "failed", "succeeded", "gave_up")
_DRAINS = ("degraded", "critical")
# The first word of `cleared_by`; the evidence or the user may follow. Other texts, such as "others" or a part's new
# name, are no endings.
_ENDINGS = {
    "pass": Ending.PASS,
    "window": Ending.WINDOW,
    "gpu_reset": Ending.RESET,
    "reboot": Ending.REBOOT,
    "repaired": Ending.REPAIRED,
}


class Episode(Value, frozen=True):
    """One occurrence of a fault. Times are in epoch seconds.

    advised   the step that healthd advised last ("reboot"), or ""
    ended_at  0 while the fault is open
    ended_by  the ending; None while the fault is open, or if it ended in another way
    returned_at  when the fault opened again, if within RETURN_SECONDS after it ended; otherwise 0
    """

    code: str
    subject: str
    opened_at: float
    advised: str = ""
    ended_at: float = 0.0
    ended_by: Ending | None = None
    returned_at: float = 0.0


def episodes(events: Iterable[StreamEvent]) -> list[Episode]:
    """Return the episodes of one node's stream, oldest first. A fault below severity "degraded" is left out."""
    found: list[Episode] = []
    open_at: dict[str, int] = {}  # position in `found` by condition
    last: dict[tuple[str, str], int] = {}  # the newest ended episode by code and subject
    for event in events:
        if event.unknown or event.at is None:
            continue
        name, fields = event.fields["event"], event.fields
        if name in ("opened", "worsened") and fields.get("severity") in _DRAINS and not fields.get("observed"):
            if fields["condition"] in open_at:
                continue
            key = (fields["code"], fields["subject"])
            earlier = last.pop(key, None)
            if earlier is not None and event.at - found[earlier].ended_at < RETURN_SECONDS:
                found[earlier] = replace(found[earlier], returned_at=event.at)
            open_at[fields["condition"]] = len(found)
            found.append(Episode(*key, event.at))
        elif name == "repair" and fields.get("stage") == "advised":
            for position in open_at.values():
                if f"{found[position].code} {found[position].subject}".strip() in fields.get("causes", ()):
                    found[position] = replace(found[position], advised=fields["step"])
        elif name == "cleared" and fields.get("condition") in open_at:
            position = open_at.pop(fields["condition"])
            ended_by = _ENDINGS.get(_first_word(fields.get("cleared_by")))
            found[position] = replace(found[position], ended_at=event.at, ended_by=ended_by)
            if ended_by is not None:
                last[found[position].code, found[position].subject] = position
    return found


class StepStage(Value, frozen=True):
    """One stage of a step by healthd: taken, failed, succeeded or gave_up. `at` is in epoch seconds.

    id         the step's id in the journal, or "" if there is none
    was_taken  False if the step was impossible on this node, so nothing was changed
    """

    at: float
    step: str
    stage: str
    id: str = ""
    problem: str = ""
    was_taken: bool = True


def steps(events: Iterable[StreamEvent]) -> list[StepStage]:
    """Return the stages of healthd's own steps in one node's stream, oldest first."""
    found = []
    for event in events:
        if event.unknown or event.at is None or event.fields["event"] != "repair":
            continue
        step, stage, id, problem = (str(event.fields.get(name, "")) for name in ("step", "stage", "id", "problem"))
        if stage in _STEP_STAGES:
            was_taken = event.fields.get("was_taken") is not False
            found.append(StepStage(event.at, step, stage, id, problem, was_taken))
    return found


def step_json(step: StepStage) -> dict[str, Any]:
    return {
        "at": step.at,
        "step": step.step,
        "stage": step.stage,
        "id": step.id or None,
        "problem": step.problem,
        "was_taken": step.was_taken,
    }


def _first_word(text: Any) -> str:
    return str(text).partition(" ")[0].rstrip(":")


def episode_json(episode: Episode) -> dict[str, Any]:
    return {
        "code": episode.code,
        "subject": episode.subject,
        "opened_at": episode.opened_at,
        "advised": episode.advised or None,
        "ended_at": episode.ended_at or None,
        "ended_by": episode.ended_by.value if episode.ended_by else None,
        "returned_at": episode.returned_at or None,
    }
