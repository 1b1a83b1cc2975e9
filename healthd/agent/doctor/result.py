"""Results of the doctor: one line for each thing it tested, the exit status, and the text of its document. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthd.common.page import Page, plain
from healthd.common.values import Value


class State(enum.Enum):
    """LIMITED: healthd works without it. ABSENT: this node has none and needs none."""

    FAILS = "fails"
    LIMITED = "limited"
    WORKS = "works"
    ABSENT = "absent"


class Line(Value, frozen=True):
    """about: one or two words. says: a sentence without a full stop. mend: commands or settings to apply, in order."""

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
    """Return the exit status: 0 if all works, 1 if something is limited, 2 if something that healthd needs fails."""
    states = {line.state for line in lines}
    return 2 if State.FAILS in states else 1 if State.LIMITED in states else 0


def line_json(line: Line) -> dict[str, Any]:
    return {"about": line.about, "state": line.state.value, "says": line.says, "mend": list(line.mend)}


# --- text

WORDS = {"fails": "does not work", "limited": "limited", "works": "works"}
COLOURS = {"fails": "critical", "limited": "warning", "works": "healthy"}


def text(document: Mapping[str, Any], page: Page) -> str:
    """Return the document of `healthd doctor --json` as text, with what needs a person first."""
    return "\n".join(_lines(document, page)) + "\n"


def _lines(document: Mapping[str, Any], page: Page) -> Iterator[str]:
    by_state: dict[str, list[Mapping[str, Any]]] = {"fails": [], "limited": [], "works": [], "absent": []}
    for line in document["lines"]:
        by_state[line["state"]].append(line)
    bad, weak = len(by_state["fails"]), len(by_state["limited"])
    head = f"{plain(document['node'])}: healthd {document['version']} as {plain(document['user'])}, "
    yield page.heading(f"{head}mode {document['mode']}: {_summary(bad, weak)}")
    width = max(len(line["about"]) for line in document["lines"])
    for state in ("fails", "limited", "works"):
        for line in by_state[state]:
            if line is by_state[state][0]:
                yield ""
                yield page.paint(WORDS[state].capitalize(), COLOURS[state])
            yield from _one(line, width, page)
    if by_state["absent"]:
        yield ""
        here = "; ".join(f"{line['about']}: {line['says']}" for line in by_state["absent"])
        yield from page.wrap(f"Not here, or not asked for: {here}")


def _summary(bad: int, weak: int) -> str:
    if not bad and not weak:
        return "all works"
    said = [f"{bad} thing{'s do' if bad != 1 else ' does'} not work"] if bad else []
    return ", ".join([*said, *([f"{weak} limited"] if weak else [])])


def _one(line: Mapping[str, Any], width: int, page: Page) -> Iterator[str]:
    about = f"  {plain(line['about']):{width}}  "
    inner = Page(max(page.width - len(about), 30)).wrap(line["says"])
    yield (about + (inner[0] if inner else "")).rstrip()
    yield from (" " * len(about) + more for more in inner[1:])
    yield from (f"{' ' * len(about)}-> {plain(mend)}" for mend in line["mend"])
