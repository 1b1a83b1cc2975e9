"""nvbandwidth (github.com/NVIDIA/nvbandwidth): measures copies by the copy engines.

Its text output, which every version supports, has "Running NAME.", a heading, a row of column numbers, and then one row
for each GPU. "Waived:" means that the machine has no such pair of GPUs. The diagonal contains "N/A" or 0.00. If a copy
is wrong, the tool prints "Invalid value when checking the pattern". If a CUDA error occurs, it prints "[CUDA_ERROR_...]
... in expression" (output.cpp in version 0.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from healthd.common.text import is_decimal, printable, regex
from healthd.validation.measurement import Measurement, NotUnderstood, is_excused

MEASURES = ("pcie", "p2p", "memory")
CASES = {
    "pcie": ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce"),
    "p2p": ("device_to_device_memcpy_read_ce",),
    "memory": ("device_local_copy",),
}
TESTS = {
    "host_to_device_memcpy_ce": "pcie_h2d",
    "device_to_host_memcpy_ce": "pcie_d2h",
    "device_to_device_memcpy_read_ce": "p2p",
    "device_local_copy": "memory",
}
MAX_DEVICES = 256
_VERSION = regex(r"nvbandwidth Version: v?([0-9][0-9.]{0,15})")
_DEVICE = regex(r"Device ([0-9]{1,3}): [^\n]{0,200}\(([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\)")
_NUMBER = regex(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def command(program: str, families: Sequence[str]) -> tuple[str, ...]:
    """Return the command.

    It requests text output. Every version supports it, and it contains the lines that were printed before an error.
    """
    cases = [case for family in families if family in CASES for case in CASES[family]]
    return (program, *(word for case in cases for word in ("-t", case)))


def parse(text: str) -> list[Measurement]:
    """Parse the output. Raises NotUnderstood."""
    found = list(_measurements(text))
    if not found:
        raise NotUnderstood(_problem(text) or "this is not output from nvbandwidth")
    return found


def _measurements(text: str) -> Iterator[Measurement]:
    version = _VERSION.search(text)
    if version is None:
        return
    source = f"nvbandwidth {version[1].rstrip('.')}"
    names = {int(found[1]): _address(found[2], found[3], found[4]) for found in _DEVICE.finditer(text)}
    blocks = text.split("\nRunning ")[1:]
    for block in blocks:
        lines = block.splitlines() or [""]
        case = lines[0].strip().rstrip(".")
        if case not in TESTS:
            continue
        rows = list(_rows(lines[1:]))
        if rows:
            yield from _measured(case, rows, names, source)
        else:
            problem = _problem(block)
            state = "failed" if problem and not is_excused(problem) else "not_measured"
            yield Measurement(TESTS[case], "", None, "GB/s", state, problem or "nvbandwidth printed no number", source)


def _rows(lines: Sequence[str]) -> Iterator[list[float | None]]:
    """Yield the rows in the first matrix as numbers (None for N/A), without the row number.

    The matrix ends with SUM or any other line.
    """
    columns: int | None = None
    for line in lines:
        fields = line.split()
        if not fields:
            if columns is not None:
                return
            continue
        if columns is None:
            if all(map(is_decimal, fields)) and len(fields) <= MAX_DEVICES:
                columns = len(fields)
            continue
        values = [_value(word) for word in fields[1:]]
        if not _NUMBER.fullmatch(fields[0]) or len(values) > MAX_DEVICES or any(value is False for value in values):
            return
        yield [value if isinstance(value, float) else None for value in values]


def _value(word: str) -> float | bool | None:
    """Return a cell's number, None for N/A, or False for other text."""
    if word == "N/A":
        return None
    return float(word) if _NUMBER.fullmatch(word) else False


def _problem(text: str) -> str:
    """Return the tool's line about a wrong copy or a CUDA error, or "" if there is none."""
    for line in text.splitlines():
        if "CUDA_ERROR" in line or "Invalid value when checking" in line or line.startswith("ASSERT"):
            return printable(line.strip())[:300]
    return ""


def _measured(
    case: str, rows: Sequence[Sequence[float | None]], names: dict[int, str], source: str
) -> Iterator[Measurement]:
    """Yield one value for each GPU or for each pair.

    A GPU's value is from the CPU's row, or from the GPU's copy to itself. Pairs do not include the diagonal.
    """
    for row, values in enumerate(rows if case == "device_to_device_memcpy_read_ce" else rows[:1]):
        for column, value in enumerate(values):
            if value is None or not 0 < value < math.inf:
                continue
            part = names.get(column, f"gpu {column}")
            if case == "device_to_device_memcpy_read_ce":
                # "Read tests launch a copy from the peer device to the target": the GPU of the column sends.
                part = f"{part}>{names.get(row, f'gpu {row}')}"
            # A copy within the GPU reads and writes each byte, but nvbandwidth counts each byte only once.
            scale = 2.0 if case == "device_local_copy" else 1.0
            yield Measurement(TESTS[case], part, value * scale, "GB/s", "measured", "", source)


def _address(domain: str, bus: str, device: str) -> str:
    return f"{domain[-4:].rjust(4, '0')}:{bus}:{device}.0".lower()
