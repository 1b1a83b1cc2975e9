"""Severity and ending of each Xid.

Rules: NVIDIA's Xid catalogue (facts/xid.csv) assigns each code an immediate action, which determines the severity. A
code that requires a GPU reset or means that the GPU is lost is CRITICAL. Codes that an application can cause never
drain a node. Unknown codes are warnings.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from healthd.common.model import Clears, KernelEvent, Severity
from healthd.common.text import is_decimal, regex
from healthd.nvidia import codes

# Immediate action RESTART_BM or RESTART_VM.
LOST_XIDS = frozenset({79, 151})
# Immediate action RESET_GPU, and 48 (uncorrectable error), whose own workflow ends with a reset. 175 is in no
# catalogue. The driver prints it instead of 119 if a call to the GSP timed out and accesses to the GPU's memory hang,
# and marks the GPU for reset (open-gpu-kernel-modules 595.45.04, kernel_gsp.c: _kgspClassifyGspTimeout,
# _kgspHandleFatalTimeout).
RESET_XIDS = frozenset({46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 175})
# The driver considers the link between Grace and this GPU dead (nverror.h: C2C_FATAL_LINK_FAILURE); gpud recommends a
# reboot. No catalogue lists this Xid, and the GPU itself may work, so it drains without a requeue.
C2C = 173
# gpu_row_remap and gpu_recovery_action evaluate the state behind 63 (IGNORE) and 94 (RESTART_APP). 45 follows another
# Xid. 174 means that the driver silently ended a process on request (nverror.h:
# ROBUST_CHANNEL_RESETCHANNEL_KILL_PROCESS_SILENT).
COMPANIONS = {45: Severity.INFO, 63: Severity.INFO, 94: Severity.WARNING, 174: Severity.INFO}
# These are consequences of an earlier fault in the program: the driver stopped its channel (43) or removed its work
# (45: the program was killed, or another Xid came before). The catalogue lists other actions for them.
AFTER_PROGRAM = frozenset({43, 45})
# WORKFLOW_NVLINK5_ERR: facts/nvlink5.csv lists the units whose errors require a GPU reset.
NVLINK5 = range(144, 151)
# WORKFLOW_NVLINK_ERR and the recovery action are evaluated from their lines and earlier lines.
NVLINK, RECOVERY = 74, 154
_WORD = regex(r"(?:0x)?[0-9a-f]{1,8}", re.I)  # a register, as the driver prints it


class XidMeaning(NamedTuple):
    """An Xid's effect. The condition for an Xid that an application caused (`caused_by_application`) clears sooner."""

    severity: Severity
    clears: Clears
    caused_by_application: bool = False


def meaning(event: KernelEvent) -> XidMeaning:
    """Return the meaning of a single line. Xid 74, which needs several lines, and the recovery action (154) are only
    warnings here.
    """
    code = number(event.code)
    if code is None:
        return XidMeaning(Severity.WARNING, Clears.WINDOW)
    fact = codes.xid(code)
    if code in LOST_XIDS:
        return XidMeaning(Severity.CRITICAL, Clears.REBOOT)
    if code in RESET_XIDS:
        return XidMeaning(Severity.CRITICAL, Clears.GPU_RESET)
    if code == C2C:
        return XidMeaning(Severity.DEGRADED, Clears.REBOOT)
    if code in COMPANIONS:
        return XidMeaning(COMPANIONS[code], Clears.WINDOW, caused_by_application=True)
    if code in NVLINK5:
        row = nvlink5_row(event)
        if row is not None and row.action == "IGNORE" and event.field("fatal") != "true":
            return XidMeaning(
                Severity.INFO, Clears.WINDOW, caused_by_application=True
            )  # like other Xids that NVIDIA ignores
        fatal = row is not None and row.action == "RESET_GPU" and event.field("fatal") == "true"
        return XidMeaning(Severity.CRITICAL if fatal else Severity.WARNING, Clears.GPU_RESET)
    if fact is not None and fact.action in ("RESTART_APP", "IGNORE"):
        severity = Severity.WARNING if fact.action == "RESTART_APP" else Severity.INFO
        return XidMeaning(severity, Clears.WINDOW, caused_by_application=True)
    return XidMeaning(Severity.WARNING, Clears.WINDOW)


def number(text: str) -> int | None:
    """Return the number in an event's code or field, or None if the driver does not print such numbers (32 bits)."""
    return int(text) if is_decimal(text) and len(text) <= 10 else None


def register_value(text: str) -> int | None:
    """Return a 32-bit register's value, or None if the text is not a register."""
    return int(text, 16) if _WORD.fullmatch(text) else None


def worst_meaning(code: int) -> XidMeaning:
    """Return the worst meaning that a line with this code can have."""
    if code in (NVLINK, RECOVERY):
        return XidMeaning(Severity.CRITICAL, Clears.GPU_RESET)
    if code in NVLINK5:
        resets = any(row.code == code and row.action == "RESET_GPU" for row in codes.nvlink5_rows())
        return XidMeaning(Severity.CRITICAL if resets else Severity.WARNING, Clears.GPU_RESET)
    return meaning(KernelEvent("xid", str(code)))


def nvlink5_row(event: KernelEvent) -> codes.Nvlink5Fact | None:
    """Return NVIDIA's row for the unit and registers in an Xid 144-150, or None if the table has no such row."""
    code, unit = number(event.code), event.field("unit")
    info, status = register_value(event.field("intr_info")), register_value(event.field("error_status"))
    if code is None or not unit or info is None or status is None:
        return None
    return codes.nvlink5(code, unit, info, status)


def title(code: int) -> str:
    """Return a title such as "Xid 79: GPU has fallen off the bus". An Xid without a description has the driver's
    mnemonic.
    """
    fact = codes.xid(code)
    if fact is None:
        return f"Xid {code}: unknown to this version"
    text = fact.description if fact.description not in ("", "Reserved", "Unused") else fact.mnemonic
    return f"Xid {code}: {text}"
