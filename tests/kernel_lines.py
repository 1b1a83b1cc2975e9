"""Captured lines of the kernel, each with its public source, and what is read of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from healthd.kernel.parse import parse
from healthd.kernel.prefix import strip_prefix
from healthd.model import KernelEvent

DATA = Path(__file__).with_name("data") / "kernel_lines.jsonl"
LINES: list[dict[str, Any]] = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]


def captured(*kinds: str, lines: Iterable[dict[str, Any]] = LINES) -> list[object]:
    return [pytest.param(row, id=row["id"]) for row in lines if row["kind"] in kinds]


def messages(text: str) -> list[str]:
    """What the kernel said, without what stands before it."""
    stripped = [strip_prefix(line, time.time()) for line in text.split("\n")]
    return [each.text for each in stripped if each is not None]


def events(text: str) -> list[KernelEvent]:
    return [event for message in messages(text) if (event := parse(message)) is not None]


def fields(event: KernelEvent) -> dict[str, str]:
    return dict(event.fields)
