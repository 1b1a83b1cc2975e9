"""What a line of the kernel says: parse(text) -> KernelEvent, pure.

Every rule is anchored at the start of the kernel's message: process names and cgroup paths inside a message are
user text, and a program that quotes an Xid in its own log line is not the driver. Rules are tried in order; a
new kind is a new row of RULES.

    xid             code = number; process, pid; link, unit, fatal, ... where the message has them
    sxid            code = number; switch, fatal, link
    gpu_lost        "has fallen off the bus" beside or without an Xid 79
    rm_init_failed  the driver could not initialise a GPU; status = its three numbers
    pciehp_link_down   pci = the port, slot
    pcie_aer        code = corrected, nonfatal or fatal; pci = the device that reports or is blamed

Formats: the driver's own (open-gpu-kernel-modules, nverror and nvswitch sources), older ones from users' logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from healthd.model import KernelEvent

Fields = tuple[tuple[str, str], ...]
MAX_TEXT = 1024  # of the message that an event keeps: a kernel record can be 8 kB


class Rule(NamedTuple):
    kind: str
    pattern: re.Pattern[str]
    build: Callable[[str, re.Match[str]], KernelEvent | None]


_ADDRESS = re.compile(r"(?:PCI:)?(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}|00[0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.I)
_PCI = r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"


def pci_address(text: str) -> str:
    """Any way that drivers write a PCI address, as sysfs does: "PCI:0000:1B:00" -> "0000:1b:00.0".

    An Xid has no function: GPUs are function 0. The oldest drivers print bus:device with four digits for the
    bus ("0001:00"). "" if it is no address (masked, cut).
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    if int(device, 16) > 31:
        return ""
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or '0'}"


def parse(text: str) -> KernelEvent | None:
    """The event that a kernel message (without any prefix) reports, None if it reports none that matters here."""
    for rule in RULES:
        match = rule.pattern.match(text)
        if match is not None:
            return rule.build(rule.kind, match)
    return None


def _event(kind: str, match: re.Match[str], code: str = "", pci: str = "", fields: Fields = ()) -> KernelEvent:
    text = match.string.rstrip()[:MAX_TEXT]
    return KernelEvent(kind=kind, code=code, pci=pci_address(pci), text=text, fields=fields)


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
    event = _event(kind, match, str(int(code)), address, tuple((k, v) for k, v in fields if v is not None))
    return KernelEvent(
        kind=kind, code=event.code, pci=event.pci, text=event.text, pid=pid, process=process, fields=event.fields
    )


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
    found = (("switch", switch), ("fatal", fatal), ("link", str(int(link)) if link else None))
    return _event(kind, match, str(int(code)), address, tuple((k, v) for k, v in found if v is not None))


# NVRM: GPU at 0000:01:00.0 has fallen off the bus.           (to driver 390)
# NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.         (newer)
# NVRM: The NVIDIA GPU 0000:b3:00.0 / NVRM: (PCI ID: 10de:26b5) installed in this system has / NVRM: fallen off
# the bus and is not responding to commands.                  (at probe: one record of three lines)
_LOST = re.compile(
    rf"NVRM: (?:GPU at (?:PCI:)?{_PCI} has fallen off the bus|GPU {_PCI}: GPU has fallen off the bus"
    rf"|The NVIDIA GPU {_PCI}[^\n]{{0,80}}(?:\n *NVRM: [^\n]{{0,80}}){{0,2}}fallen off the bus"
    r"|fallen off the bus and is not responding|(?:installed in this )?system has fallen off the bus)"
)


def _lost(kind: str, match: re.Match[str]) -> KernelEvent:
    return _event(kind, match, pci=match[1] or match[2] or match[3] or "")


# NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168); old drivers do not say which GPU.
_RM_INIT = re.compile(rf"NVRM: (?:GPU (?:at )?{_PCI}: )?RmInitAdapter failed!(?: \(([0-9A-Fa-fx:]{{1,40}})\))?")


def _rm_init(kind: str, match: re.Match[str]) -> KernelEvent:
    return _event(kind, match, pci=match[1] or "", fields=(("status", match[2]),) if match[2] else ())


# "Link Down/Up ignored (recovered by DPC)" is none.
# pcieport 0004:00:00.0: pciehp: Slot(41): Link Down; before 5.0: pciehp 0000:00:1c.0:pcie004: Slot(0): Link Down
_PCIEHP = re.compile(rf"[\w-]{{1,32}} {_PCI}:\s?[\w:]{{1,16}}: Slot\(([^)\s]{{1,32}})\): Link Down(?!/)")


def _pciehp(kind: str, match: re.Match[str]) -> KernelEvent:
    return _event(kind, match, pci=match[1], fields=(("slot", match[2]),))


# pcieport 0000:00:1d.3: AER: Multiple Correctable error message received from 0000:06:00.0   (blames a device)
# nvidia 0000:63:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)
# The words were Corrected and Uncorrected before 6.8.
_AER_SEVERITY = r"(Correct(?:ed|able)|Uncorrect(?:ed|able)(?: \((?:Non-)?Fatal\))?)"
_AER_RECEIVED = re.compile(
    rf"[\w-]{{1,32}} {_PCI}: AER: (?:Multiple )?{_AER_SEVERITY} error (?:message )?received(?: from|:) {_PCI}", re.I
)
_AER_DEVICE = re.compile(
    rf"[\w-]{{1,32}} {_PCI}: (?:AER: )?PCIe Bus Error: severity={_AER_SEVERITY}"
    r"(?:, type=([^,(]{1,40}?)(?:, (?:id=[0-9a-f]{4})?\(([^)]{1,40})\))?)?\s*$",
    re.I | re.M,
)


def _aer_code(word: str) -> str:
    word = word.lower()
    if word.startswith("correct"):
        return "corrected"
    return "fatal" if "(fatal)" in word else "nonfatal"


def _aer_received(kind: str, match: re.Match[str]) -> KernelEvent:
    reporter = pci_address(match[1])
    return _event(kind, match, _aer_code(match[2]), match[3], (("reporter", reporter),))


def _aer_device(kind: str, match: re.Match[str]) -> KernelEvent:
    found = (("layer", match[3]), ("agent", match[4]))
    return _event(kind, match, _aer_code(match[2]), match[1], tuple((k, v) for k, v in found if v))


RULES: tuple[Rule, ...] = (
    Rule("xid", _XID, _xid),
    Rule("sxid", _SXID, _sxid),
    Rule("gpu_lost", _LOST, _lost),
    Rule("rm_init_failed", _RM_INIT, _rm_init),
    Rule("pciehp_link_down", _PCIEHP, _pciehp),
    Rule("pcie_aer", _AER_DEVICE, _aer_device),
    Rule("pcie_aer", _AER_RECEIVED, _aer_received),
)
