"""Tables of NVIDIA's codes: Xids, SXids and the decoding of NVLink 5 Xids. The data in facts/*.csv is read on first
use.

Sources: NVIDIA's Xid catalogue (workbook of 2025-09-30) and the SXid tables in the Fabric Manager guide.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import NamedTuple


class XidFact(NamedTuple):
    """A row in the Xid catalogue. `action` is NVIDIA's immediate action (RESET_GPU, RESTART_APP, ...), or "" if there
    is none."""

    code: int
    mnemonic: str
    description: str
    action: str
    investigate: str


class SxidFact(NamedTuple):
    """A row in the SXid tables. `category` is "always fatal", "potentially fatal" or "non-fatal"."""

    code: int
    name: str
    category: str


class Nvlink5Fact(NamedTuple):
    """A row in the table that decodes Xids 144-150. `action` is as in XidFact.

    patterns   bits of the first register word, bit 31 first: "0", "1", "-" = any. One pattern is for drivers before
               575, one for 575 and later
    statuses   accepted values of the second word; () = any
    impact     ("Local: ...", "Remote: ...")
    """

    code: int
    units: tuple[str, ...]
    patterns: tuple[str, ...]
    statuses: tuple[int, ...]
    action: str
    investigate: str
    severity: str
    impact: tuple[str, ...]

    @property
    def sub_code(self) -> int:
        """Return bits 25 to 20 of the first word, such as the 4 in other tools' "149.4"."""
        return int(self.patterns[0][6:12], 2)


def xid_numbers() -> list[int]:
    """Return all Xids in the catalogue except reserved and unused ones."""
    return sorted(code for code, fact in _xids().items() if fact.description not in ("", "Reserved", "Unused"))


def sxid_numbers() -> list[int]:
    return sorted(_sxids())


def xid(code: int) -> XidFact | None:
    return _xids().get(code)


def sxid(code: int) -> SxidFact | None:
    return _sxids().get(code)


class Nvlink4Bits(NamedTuple):
    """Some bits in one of an Xid 74's registers, and their meaning. `word` 0 is the first register."""

    word: int
    bits: frozenset[int]
    means: str


# From the workflow for NVLink errors (Xid 74) in NVIDIA's catalogue, worst first. Bits 0, 23 and 30 of the first word
# have no meaning.
NVLINK4_BITS = (
    Nvlink4Bits(3, frozenset({18}), "the NVLink fabric must be reset"),
    Nvlink4Bits(0, frozenset({4, 5}), "ECC or parity"),
    Nvlink4Bits(2, frozenset({0, 1, 2, 6}), "ECC or parity"),
    Nvlink4Bits(4, frozenset({18, 19, 21, 22, 24, 25, 27, 28}), "ECC or parity"),
    Nvlink4Bits(0, frozenset({8, 9, 12, 16, 17, 24, 28}), "perhaps the link's hardware: check its connections"),
    Nvlink4Bits(0, frozenset({21, 22}), "marginal signal: check the link's connections"),
    Nvlink4Bits(2, frozenset({16, 19}), "if repeated: run NVIDIA's field diagnostics"),
    Nvlink4Bits(0, frozenset({27, 29}), "if repeated: open a case with NVIDIA"),
    Nvlink4Bits(2, frozenset({13, 17, 18}), "if repeated: open a case with NVIDIA"),
    Nvlink4Bits(4, frozenset({20, 23, 26, 29}), "many corrected errors, nothing lost"),
    Nvlink4Bits(0, frozenset({1, 20}), "follows another error"),
    Nvlink4Bits(3, frozenset({16, 17}), "follows another error"),
)


def nvlink4(registers: Sequence[int]) -> tuple[Nvlink4Bits, ...]:
    """Return the meanings of an Xid 74's register words, worst first, or () if no known bit is set."""
    return tuple(
        entry
        for entry in NVLINK4_BITS
        if entry.word < len(registers) and any(registers[entry.word] >> bit & 1 for bit in entry.bits)
    )


def nvlink5_rows() -> tuple[Nvlink5Fact, ...]:
    """Return all rows in table order."""
    return _nvlink5s()


def sub_code(intr_info: int) -> int:
    """Return the sub-code of an Xid 144-150: bits 25 to 20 of its first register word."""
    return intr_info >> 20 & 0x3F


def nvlink5(code: int, unit: str, intr_info: int, error_status: int) -> Nvlink5Fact | None:
    """Return the row for an Xid 144-150 line, by its unit ("RLW_REMAP") and its first and second register words.

    Driver 575 changed the bits of the first word that identify the unit. Both patterns are tried, and the unit's name
    in the line distinguishes them. If a status has several bits set, the worst bit is used.
    """
    bits = f"{intr_info:032b}"
    rows = [
        row
        for row in _nvlink5s()
        if row.code == code and unit in row.units and any(_matches(p, bits) for p in row.patterns)
    ]
    exact = [row for row in rows if not row.statuses or error_status in row.statuses]
    partial = [row for row in rows if any(s and s & error_status == s for s in row.statuses)]
    candidates = exact or partial
    return max(candidates, key=lambda row: (row.action == "RESET_GPU", row.action != "IGNORE"), default=None)


def _matches(pattern: str, bits: str) -> bool:
    return all(expected_bit in ("-", bit) for expected_bit, bit in zip(pattern, bits, strict=True))


def _rows(name: str) -> list[dict[str, str]]:
    import csv

    with open(os.path.join(os.path.dirname(__file__), "facts", name), encoding="utf-8", newline="") as file:
        return [{key: "" if value == "-" else value for key, value in row.items()} for row in csv.DictReader(file)]


def load() -> None:
    """Read the tables now, because a process may outlive their files."""
    for read in (_xids, _sxids, _nvlink5s):
        read()


@functools.cache
def _xids() -> dict[int, XidFact]:
    return {
        int(row["xid"]): XidFact(
            int(row["xid"]),
            row["mnemonic"],
            row["description"],
            row["nvidia_immediate_action"],
            row["nvidia_investigatory_action"],
        )
        for row in _rows("xid.csv")
    }


@functools.cache
def _sxids() -> dict[int, SxidFact]:
    return {
        int(row["sxid"]): SxidFact(int(row["sxid"]), row["name"], row["fabric_manager_guide_category"])
        for row in _rows("sxid.csv")
    }


@functools.cache
def _nvlink5s() -> tuple[Nvlink5Fact, ...]:
    return tuple(
        Nvlink5Fact(
            int(row["xid"]),
            tuple(row["unit_subcode"].split("/")),
            (row["intrinfo_pattern_lt_r575"], row["intrinfo_pattern_ge_r575"]),
            tuple(int(word, 16) for word in row["error_status_hex"].split("/") if word),
            row["immediate_bucket"],
            row["investigatory_bucket"],
            row["severity"],
            tuple(part.strip() for part in row["local_remote"].split(";;")),
        )
        for row in _rows("nvlink5.csv")
    )
