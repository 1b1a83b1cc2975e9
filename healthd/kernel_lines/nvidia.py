"""NVIDIA's drivers: Xid, SXid, a GPU that is gone or cannot be initialised.

    xid                 code = number; process, pid; link, unit, fatal, ... where the message has them
    sxid                code = number; switch, fatal, link
    gpu_fallen_off_bus  code "fallen_off_bus" (beside or without an Xid 79), or "rm_init_failed": the driver could not
                        initialise a GPU; status = its three numbers

Formats: the driver's own (open-gpu-kernel-modules, nverror and nvswitch sources), older ones from users' logs.
"""

from __future__ import annotations

import re

from healthd.kernel_lines.rule import PCI, Rule, event
from healthd.model import KernelEvent

# Xid: NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
# Within "(...)" the address may be masked in pasted logs: then it is what follows "PCI:", and no address.
# journald splits an injected "NVRM: Xid ..." into identifier and message, hence the optional "NVRM: ".
_XID = re.compile(
    r"(?:NVRM: )?Xid \((PCI:[^\s()]*|[0-9A-Fa-f:.]+)(?: GPU-I:(\d{1,3}))?(?: GPU-CI:(\d{1,3}))?\): "
    r"(\d{1,4})(?![\d.])(?:,\s*|\s|$)",
)
_PID = re.compile(r"pid=(?:(\d{1,10})|'(\d{1,10})'|'?<unknown>'?)\s*(?:,\s*|$)")
# A process name has at most 15 characters and may hold ", " itself; it ends before what drivers write next.
_NAME_ENDS = re.compile(
    r",\s*(?=Ch |Channel |channel |GPU |Graphics |MMU |NVLink|NVLINK|Timeout |Contained|Uncontained|Row |An "
    r"|errorString |RLW|TLW|SAW|NETIR|TREX|NVLPW|MSE|BAD_|CMDre|intr |physAddr |[0-9a-f]{8} )"
)
_QUOTED = re.compile(r"'([^']{0,64})'(?:,\s*|$)")


def _xid(kind: str, match: re.Match[str]) -> KernelEvent:
    address, instance, compute, code = match.groups()
    pid, process, message = _who(match.string[match.end() :])
    fields = [("gpu_instance", instance), ("compute_instance", compute), *_xid_details(code, message)]
    return event(kind, match, str(int(code)), address, fields, pid, process)


def _who(rest: str) -> tuple[int | None, str | None, str]:
    """(pid, process, message) from what follows the number: "pid=12, name=python3, Ch 00000008"."""
    pid, process = None, None
    match = _PID.match(rest)
    if match is not None:
        number = match[1] or match[2]
        pid, rest = int(number) if number else None, rest[match.end() :]
    if rest.startswith("name="):
        process, rest = _name(rest[5:])
    return pid, process if process != "<unknown>" else None, rest


def _name(rest: str) -> tuple[str, str]:
    quoted = _QUOTED.match(rest)
    if quoted is not None:
        return quoted[1], rest[quoted.end() :]
    end = _NAME_ENDS.search(rest, 0, 48)
    if end is not None:
        return rest[: end.start()], rest[end.end() :]
    name, _, message = rest.partition(",")
    return name.rstrip()[:64], message.lstrip()


_RECOVERY = re.compile(r"GPU recovery action changed from 0x([0-9a-f]{1,8}) \([^)]*\) to 0x([0-9a-f]{1,8})", re.I)
_NVLINK5 = re.compile(
    r"([A-Z][A-Z0-9_]*)\s+(Nonfatal|Non-fatal|Fatal|Link Fatal)\s+XC\d+\s+i\d+\s+Link\s+(-?\d{1,3})"
    r"(?:\s+\((0x[0-9a-f]{1,8})\s+(0x[0-9a-f]{1,8}))?",
    re.I,
)
_NVLINK4 = re.compile(r"NVLink: (fatal|non-?fatal)? ?error detected on link (\d{1,3})\((0x[0-9a-f]{1,8})", re.I)
_CAUSED_BY = re.compile(r" caused by previous Xid (\d{1,4})\s*$")


def _xid_details(code: str, message: str) -> list[tuple[str, str | None]]:
    number = int(code)
    details: list[tuple[str, str | None]] = []
    if number == 154 and (match := _RECOVERY.match(message)):
        # Only the numbers: the words in parentheses change with the driver branch.
        details = [("recovery_from", str(int(match[1], 16))), ("recovery_to", str(int(match[2], 16)))]
    elif 144 <= number <= 150 and (match := _NVLINK5.match(message)):
        fatal = "false" if match[2].lower().startswith("non") else "true"
        details = [("unit", match[1]), ("fatal", fatal), ("link", str(int(match[3])))]
        details += [("intr_info", match[4]), ("error_status", match[5])]
    elif number == 74 and (match := _NVLINK4.match(message)):
        word = (match[1] or "").lower()
        details = [("link", match[2]), ("fatal", str(word == "fatal").lower() if word else None)]
        details.append(("register", match[3]))
    caused = _CAUSED_BY.search(message, max(0, len(message) - 40))
    return [*details, ("caused_by", caused[1])] if caused else details


# SXid: nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Non-fatal, Link 60 Minion Link DLREQ interrupt
# Two or more further lines of one event follow, between those of other switches: they are no events.
_SXID = re.compile(
    r"(?:nvidia-nvswitch(\d{1,3}): )?SXid \((PCI:[^\s()]*|[0-9A-Fa-f:.]+)\): (\d{1,6})(?!\d)"
    r"(?!,\s*(?:Severity \d+ Engine instance|Data \{))(?:,\s*(Fatal|Non-fatal)\b)?(?:,\s*Link (-?\d{1,3})\b)?",
)


def _sxid(kind: str, match: re.Match[str]) -> KernelEvent:
    switch, address, code, severity, link = match.groups()
    fatal = {"Fatal": "true", "Non-fatal": "false"}.get(severity)
    fields = (("switch", switch), ("fatal", fatal), ("link", str(int(link)) if link else None))
    return event(kind, match, str(int(code)), address, fields)


# NVRM: GPU at 0000:01:00.0 has fallen off the bus.           (to driver 390)
# NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.         (newer)
# NVRM: The NVIDIA GPU 0000:b3:00.0 / NVRM: (PCI ID: 10de:26b5) installed in this system has / NVRM: fallen off
# the bus and is not responding to commands.                  (at probe: one record of three lines)
_LOST = re.compile(
    rf"NVRM: (?:GPU at (?:PCI:)?{PCI} has fallen off the bus|GPU {PCI}: GPU has fallen off the bus"
    rf"|The NVIDIA GPU {PCI}[^\n]{{0,80}}(?:\n *NVRM: [^\n]{{0,80}}){{0,2}}fallen off the bus"
    r"|fallen off the bus and is not responding|(?:installed in this )?system has fallen off the bus)"
)


def _lost(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "fallen_off_bus", match[1] or match[2] or match[3] or "")


# NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168); old drivers do not say which GPU.
_RM_INIT = re.compile(rf"NVRM: (?:GPU (?:at )?{PCI}: )?RmInitAdapter failed!(?: \(([0-9A-Fa-fx:]{{1,40}})\))?")


def _rm_init(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "rm_init_failed", match[1] or "", (("status", match[2]),))


RULES = (
    Rule("xid", ("Xid (",), _XID, _xid),
    Rule("sxid", ("SXid (",), _SXID, _sxid),
    Rule("gpu_fallen_off_bus", ("fallen off the bus",), _LOST, _lost),
    Rule("gpu_fallen_off_bus", ("RmInitAdapter failed",), _RM_INIT, _rm_init),
)
