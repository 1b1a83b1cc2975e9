"""A validation as people read it at night: what is wrong first, the rest in few lines, and what nobody saw. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any

from healthd.common.page import Page, plain

WORDS = {"failed": "Failed", "slow": "Slow", "not_looked": "Not looked at"}
HEADS = {
    "failed": "failed",
    "slow": "something is slow",
    "ok": "all is well",
    "not_looked": "nothing could be looked at",
}
COLOURS = {"failed": "critical", "slow": "warning", "ok": "healthy", "not_looked": "unknown"}

Result = Mapping[str, Any]


def text(document: Mapping[str, Any], page: Page) -> str:
    """document: what `healthd validate --json` prints."""
    return "\n".join(_lines(document, page)) + "\n"


def _lines(document: Mapping[str, Any], page: Page) -> Iterator[str]:
    by_verdict: dict[str, list[Result]] = {"failed": [], "slow": [], "ok": [], "not_looked": []}
    for result in document["results"]:
        by_verdict[result["verdict"]].append(result)
    verdict = document["verdict"]
    took = f"{document['ended'] - document['began']:.0f} s"
    words = "what was looked at is well" if verdict == "ok" and by_verdict["not_looked"] else HEADS[verdict]
    head = f"{plain(document['node']) or 'this node'}: {page.paint(words, COLOURS[verdict])}"
    counts = [f"{len(by_verdict[word])} {name}" for word, name in _COUNTED if by_verdict[word]]
    began = datetime.fromtimestamp(document["began"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    yield page.heading(f"{head}; {', '.join([*counts, took])}, {began}")
    if document["stopped_by"]:
        yield f"It was stopped by {document['stopped_by']}: what was measured until then counts, the rest is not known."
    for word in ("failed", "slow"):
        if by_verdict[word]:
            yield ""
            yield page.paint(WORDS[word], COLOURS[word])
            for result in by_verdict[word]:
                yield from page.item(_sentence(result), "  ")
    measured = [result for result in by_verdict["ok"] if result["value"] is not None]
    if measured:
        yield ""
        yield from page.table(("fine", "parts", "least", "median", "unit", "beside", "by"), list(_rows(measured)))
    for source, names in _passed(by_verdict["ok"]).items():
        yield ""
        yield from page.wrap(f"Passed by {source}: {', '.join(names)}")
    if by_verdict["not_looked"]:
        yield ""
        yield WORDS["not_looked"]
        for says, names in _together(by_verdict["not_looked"]).items():
            yield from page.item(f"{', '.join(names)}: {says}", "  ")
    yield ""
    yield "Not seen here"
    for sentence in filter(str.strip, document["not_seen"]):
        yield from page.item(plain(sentence), "  ")


_COUNTED = (("failed", "failed"), ("slow", "slow"), ("ok", "fine"), ("not_looked", "not looked at"))


def _name(result: Result) -> str:
    return " ".join(plain(word) for word in (result["test"], result["part"]) if word)


def _sentence(result: Result) -> str:
    by = f" ({plain(result['source'])})" if result["source"] else ""
    return f"{_name(result)}: {plain(result['says'])}{by}"


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """A row a test and tool: all parts that are fine together."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result["test"], result["source"]), []).append(result)
    for (test, source), some in groups.items():
        values = [one["value"] for one in some]
        least, middle = _number(min(values)), _number(median(values))
        beside = {"floor": "a floor", "peers": "its peers", "own": "its past", "": "nothing"}
        against = ", ".join(dict.fromkeys(beside[one["against"]] for one in some))
        yield plain(test), str(len(some)), least, middle, plain(some[0]["unit"]), against, plain(source)


def _passed(results: Sequence[Result]) -> dict[str, list[str]]:
    """Tool -> its tests that only pass or fail, each with the number of its parts."""
    counts: dict[str, dict[str, int]] = {}
    for result in results:
        if result["value"] is None:
            of_tool = counts.setdefault(plain(result["source"]), {})
            of_tool[plain(result["test"])] = of_tool.get(plain(result["test"]), 0) + 1
    return {
        tool: [f"{test} ({count})" if count > 1 else test for test, count in tests.items()]
        for tool, tests in counts.items()
    }


def _together(results: Sequence[Result]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(plain(result["says"]), []).append(_name(result))
    return {says: names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"] for says, names in found.items()}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
