"""PyTorch: runs pytorch_program.py in this directory with a Python that has torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from healthd.common.text import printable
from healthd.validation.measurement import FAMILIES, Measurement, NotUnderstood
from healthd.validation.passes import ring

MEASURES = ("gemm", "memory", "pcie", "p2p")
MAX_GPUS = 16  # maximum number of GPUs that PyTorch can see on a node
MAX_LINES = 20_000
_TESTS = {test for family in MEASURES for test in FAMILIES[family]}


def command(python: str, program: str, families: Sequence[str], seconds: float) -> tuple[str, ...]:
    """Return the command.

    Args:
        python: a Python that has torch.
        program: path of pytorch_program.py.
        seconds: time for each test.
    """
    request = {
        "families": [family for family in families if family in MEASURES],
        "seconds": seconds,
        "passes": {str(count): ring(count) for count in range(2, MAX_GPUS + 1)},
    }
    return (python, "-I", program, json.dumps(request))


def parse(text: str) -> list[Measurement]:
    """Parse all complete lines. Raises NotUnderstood if there are none or if torch or a GPU is missing."""
    source, found, missing = "PyTorch", [], ""
    for line in text.splitlines()[:MAX_LINES]:
        record = _object(line)
        if record is None:
            continue
        if isinstance(record.get("source"), str):
            source = printable(record["source"])[:60]
        elif isinstance(record.get("missing"), str):
            missing = printable(record["missing"])[:200]
        elif str(record.get("test")) in _TESTS and isinstance(record.get("part"), str):
            found.append(_measurement(record, source))
    if not found:
        raise NotUnderstood(missing or "PyTorch's program measured nothing")
    return found


def _object(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _measurement(record: dict[str, Any], source: str) -> Measurement:
    test, part, unit = record["test"], printable(record["part"])[:60], "TFLOPS" if "gemm" in record["test"] else "GB/s"
    for key, state in (("error", "failed"), ("skipped", "not_measured")):
        if key in record:
            return Measurement(test, part, None, unit, state, printable(str(record[key]))[:300], source)
    value = record.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return Measurement(test, part, None, unit, "not_measured", "PyTorch's program reported no number", source)
    if "wrong" in record:
        return Measurement(test, part, float(value), unit, "failed", printable(str(record["wrong"]))[:300], source)
    return Measurement(test, part, float(value), unit, "measured", "", source)
