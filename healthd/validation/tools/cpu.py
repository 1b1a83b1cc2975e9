"""Matrix product on the CPU: runs cpu_program.py in this directory. The result shows nothing about GPUs."""

from __future__ import annotations

import json
import math

from healthd.common.text import printable
from healthd.validation.measurement import Measurement, NotUnderstood

UNIT = "GFLOPS"


def command(python: str, program: str, seconds: float) -> tuple[str, ...]:
    """Return the command.

    Args:
        python: any Python 3.
        program: path of cpu_program.py.
    """
    return (python, "-I", program, f"{seconds:g}")


def parse(text: str) -> list[Measurement]:
    """Parse the single output line. Raises NotUnderstood."""
    try:
        record = json.loads(text)
        value, source = float(record["value"]), printable(str(record["source"]))[:40]
        wrong_numbers, size = int(record["wrong"]), int(record["size"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise NotUnderstood("the CPU matrix test printed unexpected output") from None
    if not math.isfinite(value) or value <= 0:
        raise NotUnderstood(f"the CPU matrix test took no time: {value}")
    if wrong_numbers:
        message = (
            f"{wrong_numbers} of {size * size} numbers in a matrix product on the CPU changed when it was repeated"
        )
        return [Measurement("cpu_gemm", "cpu", value, UNIT, "failed", message, source)]
    return [Measurement("cpu_gemm", "cpu", value, UNIT, "measured", "", source)]
