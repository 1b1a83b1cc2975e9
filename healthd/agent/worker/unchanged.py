"""What of a check's run the daemon and its worker need not say to each other again: settings, the past that this worker
made, of an answer what it was the last time.

The daemon's copy is the one that counts: what it has otherwise by now (another past after a repair, a clock that was
set) is sent, and a new worker is told all. A request names the one before it by its number only to a worker that said
that it keeps it, and only to one that says that it may be `brief` an answer leaves something out: an older worker or
daemon says and is told more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from healthd.common.history import encoded_again

SAID_AGAIN = ("findings", "observations", "left_out", "repairs", "nothing")


class Known(NamedTuple):
    """What both have in hand of a run: its request's number, settings and moment, and of its answer the past and what
    else need not be said again."""

    number: int
    config: Mapping[str, Any]
    now: object
    past: str
    said: Mapping[str, Any]


def shortened(request: Mapping[str, Any], known: Known | None) -> dict[str, Any]:
    """The request without what the worker knows."""
    if known is None:
        return dict(request)
    same = {"config": known.config, "past": known.past}
    news = {name: value for name, value in request.items() if name not in same or value != same[name]}
    return {**news, "before": known.number, "brief": isinstance(known.now, float) and "now" in request}


def restored(
    answer: dict[str, Any], request: Mapping[str, Any], number: int, known: Known | None
) -> tuple[dict[str, Any], Known | None]:
    """The whole answer to the whole request, which had that number and was shortened by `known`; what both know now."""
    if answer.get("keeps") is not True:
        return answer, None
    now = request.get("now")
    if known is not None:
        answer = {**known.said, **answer}
        if "past" not in answer and isinstance(known.now, float) and isinstance(now, float):
            # It read the same again, and nothing has grown.
            answer["past"] = encoded_again(known.past, known.now, now, request["boot_id"])
    if "config" not in request or not isinstance(answer.get("past"), str):
        return answer, None
    said = {name: answer[name] for name in SAID_AGAIN if name in answer}
    return answer, Known(number, request["config"], now, answer["past"], said)
