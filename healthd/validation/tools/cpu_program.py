"""Multiplies matrices on the CPU, for this repository's tests and to detect a slow CPU.

It is a separate program, `python -I cpu_program.py SECONDS`, and does not import healthd. If numpy is available, it
uses all cores, through numpy's BLAS. Otherwise, it uses plain Python on one core. It prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from typing import Any

NUMPY_SIZE, PLAIN_SIZE = 1024, 64  # rows of the square matrices


def with_numpy(np: Any, seconds: float) -> dict[str, Any]:
    """Multiply float32 matrices.

    Machine, library and order are the same, so each product must be bitwise equal to the first.
    """
    random = np.random.default_rng(1)
    a, b = (random.standard_normal((NUMPY_SIZE, NUMPY_SIZE), dtype=np.float32) for _ in range(2))
    first = a @ b
    began, runs, wrong_numbers = time.perf_counter(), 0, 0
    while runs == 0 or time.perf_counter() - began < seconds:
        product = a @ b
        runs += 1
    took = time.perf_counter() - began
    if not np.allclose(product, first, rtol=1e-4, atol=1e-2):
        wrong_numbers = int((~np.isclose(product, first, rtol=1e-4, atol=1e-2)).sum())
    flop = 2.0 * NUMPY_SIZE**3 * runs
    return {"value": flop / took / 1e9, "source": f"numpy {np.__version__}", "wrong": wrong_numbers, "size": NUMPY_SIZE}


def with_plain_python(seconds: float) -> dict[str, Any]:
    """Multiply integer matrices, for which the exact result is known."""
    n = PLAIN_SIZE
    a = [array("d", [float((row * n + column) % 7) for column in range(n)]) for row in range(n)]
    columns = [array("d", [float((row + column) % 5) for row in range(n)]) for column in range(n)]
    began, runs, wrong_numbers = time.perf_counter(), 0, 0
    first: list[float] | None = None
    while runs == 0 or time.perf_counter() - began < seconds:
        product = [sum(x * y for x, y in zip(row, column)) for row in a for column in columns]  # noqa: B905
        first = first or product
        wrong_numbers += sum(value != expected for value, expected in zip(product, first))  # noqa: B905
        runs += 1
    took = time.perf_counter() - began
    version = ".".join(map(str, sys.version_info[:3]))
    return {"value": 2.0 * n**3 * runs / took / 1e9, "source": f"Python {version}", "wrong": wrong_numbers, "size": n}


def main() -> None:
    seconds = float(sys.argv[1])
    try:
        import numpy
    except ImportError:
        result = with_plain_python(seconds)
    else:
        result = with_numpy(numpy, seconds)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
