"""Which parts of a check's run the daemon and its worker need not send again: settings, the past that this worker made,
and what its last answer had too.

The daemon's copy counts. Whatever differs from it by now (another past after a repair, a clock that was set) is sent,
and a new worker gets everything. A shortened request names the request before it, which the worker must have answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from healthd.common.history import encoded_again

SAID_AGAIN = ("findings", "observations", "left_out", "repairs", "nothing")


class Known(NamedTuple):
    """What the daemon and the worker both have of a run: number, settings and moment of its request, and of its answer
    the past and the values in `SAID_AGAIN`."""

    number: int
    config: Mapping[str, Any]
    now: float
    past: str
    said: Mapping[str, Any]


def shortened(request: Mapping[str, Any], known: Known | None) -> dict[str, Any]:
    """Return the request without what the worker has."""
    if known is None:
        return dict(request)
    same = {"config": known.config, "past": known.past}
    news = {name: value for name, value in request.items() if name not in same or value != same[name]}
    return {**news, "before": known.number}


def restored(
    answer: dict[str, Any], request: Mapping[str, Any], number: int, known: Known | None
) -> tuple[dict[str, Any], Known | None]:
    """Return the whole answer to the whole request, and what daemon and worker both have now.

    `number` is that of the request, which was shortened by `known`. A request without a moment ("now") is of a command,
    which asks only a few times: it is never shortened.
    """
    if "gone" not in answer or "now" not in request:  # without "gone" the check did not run
        return answer, None
    now = request["now"]
    if known is not None:
        answer = {**known.said, **answer}
        if "past" not in answer:  # the check read the same again, and nothing has grown
            answer["past"] = encoded_again(known.past, known.now, now, request["boot_id"])
    if not isinstance(answer.get("past"), str):
        return answer, None  # results.py reports what is wrong
    said = {name: answer[name] for name in SAID_AGAIN if name in answer}
    return answer, Known(number, request["config"], now, answer["past"], said)
