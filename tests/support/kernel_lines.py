"""Captured kernel lines, each with its public source, and helpers that parse them and run checks on them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthd.agent.kernel_log.coalesce import coalesce_events
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings.config import CheckConfig
from healthd.common.model import Finding, Inventory, KernelEvent

DATA = Path(__file__).parents[1] / "data" / "kernel_lines.jsonl"
LINES: list[dict[str, Any]] = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]


def captured(*kinds: str, lines: Iterable[dict[str, Any]] = LINES) -> list[object]:
    return [pytest.param(row, id=row["id"]) for row in lines if row["kind"] in kinds]


def messages(text: str) -> list[str]:
    """Return the messages of the kernel without their prefixes."""
    stripped = [strip_prefix(line, time.time()) for line in text.split("\n")]
    return [stripped_line.text for stripped_line in stripped if stripped_line is not None]


def events(text: str) -> list[KernelEvent]:
    return [event for message in messages(text) if (event := parse(message)) is not None]


def fields(event: KernelEvent) -> dict[str, str]:
    return dict(event.fields)


def event_of(line: str, at: float = 1000.0, boot_id: str = "b", history: bool = False) -> KernelEvent:
    """Return the event of a line that must be one."""
    found = make_event(RawLine(at, line, history=history), boot_id)
    assert found is not None, line
    return found


def findings_of(
    check: ModuleType,
    *lines: str,
    node: Inventory | None = None,
    config: CheckConfig | None = None,
    interval: float = 10.0,
    times: Sequence[float] = (),
    boots: Sequence[str] = (),
    all_events: bool = True,
) -> list[Finding]:
    """Return the findings of the check for these lines, `interval` seconds apart unless `times` is given.

    Each line must be an event unless `all_events` is False; then other lines are ignored.
    """
    times = times or [1000.0 + interval * number for number in range(len(lines))]
    boots = boots or ["b"] * len(lines)
    read = [make_event(RawLine(at, line), boot) for at, line, boot in zip(times, lines, boots, strict=True)]
    assert not all_events or None not in read, lines
    recent, _, _ = coalesce_events((), [event for event in read if event is not None], 1)
    return list(check.correlate(recent, node or Inventory(), config or check.Config()))


def finding_of(*args: Any, **kwargs: Any) -> Finding:
    (finding,) = findings_of(*args, **kwargs)
    return finding
