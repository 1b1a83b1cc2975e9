"""PyTorch: pytorch_program.py beside this file, run by a Python that has torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from healthd.common.text import printable
from healthd.validation.measurement import FAMILIES, Measurement, NotUnderstood
from healthd.validation.passes import ring

MEASURES = ("gemm", "memory", "pcie", "p2p")
MOST_GPUS = 16  # that one node's PyTorch sees
MOST_LINES = 20_000
_TESTS = {test for family in MEASURES for test in FAMILIES[family]}


def command(python: str, program: str, families: Sequence[str], seconds: float) -> tuple[str, ...]:
    """python: one that has torch; program: the path of pytorch_program.py; seconds: how long each test measures."""
    wanted = {
        "families": [family for family in families if family in MEASURES],
        "seconds": seconds,
        "passes": {str(count): ring(count) for count in range(2, MOST_GPUS + 1)},
    }
    return (python, "-I", program, json.dumps(wanted))


def parse(text: str) -> list[Measurement]:
    """All lines that were whole when it ended. Raises NotUnderstood: none was, or there is no torch, or no GPU."""
    source, found, missing = "PyTorch", [], ""
    for line in text.splitlines()[:MOST_LINES]:
        told = _object(line)
        if told is None:
            continue
        if isinstance(told.get("source"), str):
            source = printable(told["source"])[:60]
        elif isinstance(told.get("missing"), str):
            missing = printable(told["missing"])[:200]
        elif str(told.get("test")) in _TESTS and isinstance(told.get("part"), str):
            found.append(_measurement(told, source))
    if not found:
        raise NotUnderstood(missing or "PyTorch's program measured nothing")
    return found


def _object(line: str) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _measurement(told: dict[str, Any], source: str) -> Measurement:
    test, part, unit = told["test"], printable(told["part"])[:60], "TFLOPS" if "gemm" in told["test"] else "GB/s"
    for key, state in (("error", "failed"), ("skipped", "not_measured")):
        if key in told:
            return Measurement(test, part, None, unit, state, printable(str(told[key]))[:300], source)
    value = told.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return Measurement(test, part, None, unit, "not_measured", "PyTorch's program told no number", source)
    if "wrong" in told:
        return Measurement(test, part, float(value), unit, "failed", printable(str(told["wrong"]))[:300], source)
    return Measurement(test, part, float(value), unit, "measured", "", source)
