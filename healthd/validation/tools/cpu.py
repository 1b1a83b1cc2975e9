"""A matrix product on the CPU: cpu_program.py beside this file. It says nothing of any GPU."""

from __future__ import annotations

import json
import math

from healthd.common.text import printable
from healthd.validation.measurement import Measurement, NotUnderstood

UNIT = "GFLOPS"


def command(python: str, program: str, seconds: float) -> tuple[str, ...]:
    """python: any Python 3; program: the path of cpu_program.py."""
    return (python, "-I", program, f"{seconds:g}")


def parse(text: str) -> list[Measurement]:
    """Its one line. Raises NotUnderstood."""
    try:
        told = json.loads(text)
        value, source = float(told["value"]), printable(str(told["source"]))[:40]
        wrong, size = int(told["wrong"]), int(told["size"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise NotUnderstood("the matrix product on the CPU printed something else") from None
    if not math.isfinite(value) or value <= 0:
        raise NotUnderstood(f"the matrix product on the CPU took no time: {value}")
    if wrong:
        message = f"{wrong} of {size * size} numbers of a matrix product on the CPU changed when it was done again"
        return [Measurement("cpu_gemm", "cpu", value, UNIT, "failed", message, source)]
    return [Measurement("cpu_gemm", "cpu", value, UNIT, "measured", "", source)]
