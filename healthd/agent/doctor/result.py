"""The doctor's results: one line for each test, the exit status, and the document as text. The functions are pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthd.common.page import Page, plain
from healthd.common.values import Value


class State(enum.Enum):
    """State of a line.

    LIMITED means that healthd works without the tested item. ABSENT means that the node neither has nor needs it.
    """

    FAILED = "failed"
    LIMITED = "limited"
    OK = "ok"
    ABSENT = "absent"


class Line(Value, frozen=True):
    """Result of one test. `topic` is one or two words, `message` is one sentence without its full stop, and `fix`
    contains commands or settings."""

    topic: str
    state: State
    message: str
    fix: tuple[str, ...] = ()


def ok_line(topic: str, message: str) -> Line:
    return Line(topic, State.OK, message)


def absent_line(topic: str, message: str) -> Line:
    return Line(topic, State.ABSENT, message)


def limited_line(topic: str, message: str, *fix: str) -> Line:
    return Line(topic, State.LIMITED, message, fix)


def failed_line(topic: str, message: str, *fix: str) -> Line:
    return Line(topic, State.FAILED, message, fix)


def status(lines: Iterable[Line]) -> int:
    """Return the exit status: 0 if everything works, 1 if something is limited, 2 if something necessary failed."""
    states = {line.state for line in lines}
    return 2 if State.FAILED in states else 1 if State.LIMITED in states else 0


def line_json(line: Line) -> dict[str, Any]:
    return {"topic": line.topic, "state": line.state.value, "message": line.message, "fix": list(line.fix)}


# --- text

STATE_LABELS = {"failed": "does not work", "limited": "limited", "ok": "works"}
COLOURS = {"failed": "critical", "limited": "warning", "ok": "healthy"}


def text(document: Mapping[str, Any], page: Page) -> str:
    """Return the document from `healthd doctor --json` as text, with failures first."""
    return "\n".join(_lines(document, page)) + "\n"


def _lines(document: Mapping[str, Any], page: Page) -> Iterator[str]:
    by_state: dict[str, list[Mapping[str, Any]]] = {"failed": [], "limited": [], "ok": [], "absent": []}
    for line in document["lines"]:
        by_state[line["state"]].append(line)
    failed_count, limited_count = len(by_state["failed"]), len(by_state["limited"])
    head = f"{plain(document['node'])}: healthd {document['version']} as {plain(document['user'])}, "
    yield page.heading(f"{head}mode {document['mode']}: {_summary(failed_count, limited_count)}")
    width = max(len(line["topic"]) for line in document["lines"])
    for state in ("failed", "limited", "ok"):
        for line in by_state[state]:
            if line is by_state[state][0]:
                yield ""
                yield page.paint(STATE_LABELS[state].capitalize(), COLOURS[state])
            yield from _line_text(line, width, page)
    if by_state["absent"]:
        yield ""
        absent_text = "; ".join(f"{line['topic']}: {line['message']}" for line in by_state["absent"])
        yield from page.wrap(f"Not present or not configured: {absent_text}")


def _summary(failed_count: int, limited_count: int) -> str:
    if not failed_count and not limited_count:
        return "all works"
    parts = [f"{failed_count} thing{'s do' if failed_count != 1 else ' does'} not work"] if failed_count else []
    return ", ".join([*parts, *([f"{limited_count} limited"] if limited_count else [])])


def _line_text(line: Mapping[str, Any], width: int, page: Page) -> Iterator[str]:
    topic = f"  {plain(line['topic']):{width}}  "
    inner = Page(max(page.width - len(topic), 30)).wrap(line["message"])
    yield (topic + (inner[0] if inner else "")).rstrip()
    yield from (" " * len(topic) + more for more in inner[1:])
    yield from (f"{' ' * len(topic)}-> {plain(fix)}" for fix in line["fix"])
