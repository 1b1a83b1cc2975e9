"""What the doctor says of one thing, and what all of it means for the exit status. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from healthd.common.values import dataclass


class State(enum.Enum):
    """LIMITED: healthd does its work all the same, without this. ABSENT: this node has none, and needs none."""

    FAILS = "fails"
    LIMITED = "limited"
    WORKS = "works"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Line:
    """about: one or two words. says: a sentence without its full stop. mend: what to type or to write, in order."""

    about: str
    state: State
    says: str
    mend: tuple[str, ...] = ()


def works(about: str, says: str) -> Line:
    return Line(about, State.WORKS, says)


def absent(about: str, says: str) -> Line:
    return Line(about, State.ABSENT, says)


def limited(about: str, says: str, *mend: str) -> Line:
    return Line(about, State.LIMITED, says, mend)


def fails(about: str, says: str, *mend: str) -> Line:
    return Line(about, State.FAILS, says, mend)


def status(lines: Iterable[Line]) -> int:
    """0: all works. 1: something is limited. 2: something that healthd needs does not work."""
    states = {line.state for line in lines}
    return 2 if State.FAILS in states else 1 if State.LIMITED in states else 0


def line_json(line: Line) -> dict[str, Any]:
    return {"about": line.about, "state": line.state.value, "says": line.says, "mend": list(line.mend)}
