"""nvbandwidth (github.com/NVIDIA/nvbandwidth): copies by the copy engines, as text (all versions) and as JSON (from
0.5).

Text: "Running NAME.", a heading, a row of column numbers, a row each; "Waived:" where the machine has no such pair;
"N/A" or 0.00 on the diagonal. A wrong copy is "Invalid value when checking the pattern", an error of CUDA
"[CUDA_ERROR_...] ... in expression". output.cpp and json_output.cpp of version 0.8 print both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

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
MOST_DEVICES = 256
_VERSION = regex(r"nvbandwidth Version: v?([0-9][0-9.]{0,15})")
_DEVICE = regex(r"Device ([0-9]{1,3}): [^\n]{0,200}\(([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\)")
_LISTED = regex(r"([0-9]{1,3}): .*\(([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\)")
_NUMBER = regex(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def command(program: str, families: Sequence[str]) -> tuple[str, ...]:
    """As text: every version prints it, and what came before an error is not lost."""
    cases = [case for family in families if family in CASES for case in CASES[family]]
    return (program, *(word for case in cases for word in ("-t", case)))


def parse(text: str) -> list[Measurement]:
    """Either form. Raises NotUnderstood."""
    start = text.find("{")
    if start >= 0 and '"nvbandwidth"' in text:
        return _of_json(text[start:])
    found = list(_of_text(text))
    if not found:
        trouble = _trouble(text)
        raise NotUnderstood(trouble or "this is no output of nvbandwidth")
    return found


# --- text


def _of_text(text: str) -> Iterator[Measurement]:
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
            trouble = _trouble(block)
            state = "failed" if trouble and not is_excused(trouble) else "not_looked"
            yield Measurement(TESTS[case], "", None, "GB/s", state, trouble or "nvbandwidth printed no number", source)


def _rows(lines: Sequence[str]) -> Iterator[list[float | None]]:
    """The rows of the first matrix: numbers behind the row's own number; None for N/A. It ends with SUM or a line that
    is no row."""
    columns: int | None = None
    for line in lines:
        words = line.split()
        if not words:
            if columns is not None:
                return
            continue
        if columns is None:
            if all(map(is_decimal, words)) and len(words) <= MOST_DEVICES:
                columns = len(words)
            continue
        values = [_value(word) for word in words[1:]]
        if not _NUMBER.fullmatch(words[0]) or len(values) > MOST_DEVICES or any(value is False for value in values):
            return
        yield [value if isinstance(value, float) else None for value in values]


def _value(word: str) -> float | bool | None:
    """A number, None for N/A, False for what is neither."""
    if word == "N/A":
        return None
    return float(word) if _NUMBER.fullmatch(word) else False


def _trouble(text: str) -> str:
    """A wrong copy, an error of CUDA: what the tool printed of it."""
    for line in text.splitlines():
        if "CUDA_ERROR" in line or "Invalid value when checking" in line or line.startswith("ASSERT"):
            return printable(line.strip())[:300]
    return ""


# --- JSON


def _of_json(text: str) -> list[Measurement]:
    try:
        told, _ = json.JSONDecoder().raw_decode(text)
        root = told["nvbandwidth"]
        cases = root.get("testcases", [])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise NotUnderstood("this is no JSON of nvbandwidth") from None
    source = f"nvbandwidth {printable(str(root.get('version', '')))[:16].lstrip('v')}".strip()
    found: list[Measurement] = []
    for case in cases if isinstance(cases, list) else ():
        if isinstance(case, dict) and isinstance(case.get("name"), str) and case["name"] in TESTS:
            found += _of_case(case, _listed(root), source)
    if not found:
        error = root.get("error")
        raise NotUnderstood(printable(str(error))[:300] if error else "nvbandwidth's JSON has no test that is known")
    return found


def _listed(root: dict[str, Any]) -> dict[int, str]:
    devices = root.get("GPU Device list")
    told = [str(one) for one in devices] if isinstance(devices, list) else []
    found = [_LISTED.match(one) for one in told[:MOST_DEVICES]]
    return {int(one[1]): _address(one[2], one[3], one[4]) for one in found if one}


def _of_case(case: dict[str, Any], names: dict[int, str], source: str) -> list[Measurement]:
    test, status = TESTS[case["name"]], case.get("status")
    if status == "Passed" and isinstance(matrix := case.get("bandwidth_matrix"), list):
        rows = [[_of_cell(cell) for cell in row] for row in matrix[:MOST_DEVICES] if isinstance(row, list)]
        measured = list(_measured(case["name"], rows, names, source))
        if measured:
            return measured
    says = printable(str(case.get("error") or f"nvbandwidth says: {status}"))[:300]
    state = "failed" if status == "Error" and not is_excused(says) else "not_looked"
    return [Measurement(test, "", None, "GB/s", state, says, source)]


def _of_cell(cell: object) -> float | None:
    value = _value(str(cell)) if isinstance(cell, str | int | float) else None
    return value if isinstance(value, float) else None


# --- both


def _measured(
    case: str, rows: Sequence[Sequence[float | None]], names: dict[int, str], source: str
) -> Iterator[Measurement]:
    """Of the CPU's row or a GPU's own copy a value a GPU; of pairs one each, without the diagonal."""
    for row, values in enumerate(rows if case == "device_to_device_memcpy_read_ce" else rows[:1]):
        for column, value in enumerate(values):
            if value is None or not 0 < value < math.inf:
                continue
            part = names.get(column, f"gpu {column}")
            if case == "device_to_device_memcpy_read_ce":
                # "Read tests launch a copy from the peer device to the target": the column's GPU sends.
                part = f"{part}>{names.get(row, f'gpu {row}')}"
            # A copy within the GPU reads and writes each byte; nvbandwidth counts it once.
            scale = 2.0 if case == "device_local_copy" else 1.0
            yield Measurement(TESTS[case], part, value * scale, "GB/s", "measured", "", source)


def _address(domain: str, bus: str, device: str) -> str:
    return f"{domain[-4:].rjust(4, '0')}:{bus}:{device}.0".lower()
