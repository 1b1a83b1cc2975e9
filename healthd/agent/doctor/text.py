"""The doctor's document as people read it: what needs them first, and one screen. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from healthd.common.page import Page, plain

WORDS = {"fails": "does not work", "limited": "limited", "works": "works"}
COLOURS = {"fails": "critical", "limited": "warning", "works": "healthy"}


def text(document: Mapping[str, Any], page: Page) -> str:
    """document: what `healthd doctor --json` prints."""
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
