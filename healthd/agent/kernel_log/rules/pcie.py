"""Rules for PCI Express: errors that AER, DPC and the firmware report, and hotplug slots.

    kind pcie_hotplug. Fields: pci = the port (for `inaccessible`, the device); slot. Codes:
    link_down, removed    a slot's link or card disappeared, without a button or a command
    power_fault, no_link  the slot's power failed, or the inserted card has no link
    inaccessible          a device does not respond when it is woken

    kind pcie_aer. Fields: pci = the blamed device; reporter = the port that received the report; layer, agent, bit,
    driver. Codes:
    corrected, nonfatal, fatal    the severity of an error
    contained      DPC disabled the link before the error spread
    reset_failed   the link was reset after a fatal error and did not come back up
    recovery_failed, recovered    the outcome of the drivers' recovery
    record         the firmware's error record (`record` = its number); memory.py reads the record's severity
    detail         a further line about one of these

One error produces four to eight lines: the port's ("error message received from"), the device's ("PCIe Bus Error"), and
the device's registers, bits and TLP header. The first two contain the severity and become one event, because both blame
the device. The others are `detail`, which agent/kernel_log/coalesce.py adds to that event. A `detail` line is never a
second fault and has no effect of its own.

If the firmware handles errors first (APEI), the kernel prints registers without "PCIe Bus Error". Only uncorrected
errors have an "aer_uncor_severity" line. Such an error is not fatal, because the kernel panics before it prints a fatal
one.

Formats: Linux 3.10 to 7.3, drivers/pci/pcie/{aer,dpc,err,edr}.c, drivers/pci/hotplug/pciehp_{ctrl,hpc}.c,
drivers/pci/pci.c, drivers/firmware/efi/cper.c.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import DETAIL, PCI, Rule, event, event_builder, pci_address
from healthd.common.model import KernelEvent
from healthd.common.text import regex

_DEVICE = rf"([\w-]{{1,32}}) {PCI}: "  # the driver and its device

# --- slots

# pcieport 0004:00:00.0: pciehp: Slot(41): Link Down        (5.0 and newer)
# pciehp 0000:00:1c.0:pcie004: Slot(0): Link Down           (4.10)
# pciehp 0000:00:1c.0:pcie004: slot(0): Link Down event     (3.10)
# "Link Down/Up ignored", "Link Down event ignored; already powering off" and "queued" are not faults.
_SLOT = rf"[\w-]{{1,32}} {PCI}:\s?[\w:]{{1,16}}: "
_SLOT_EVENT = regex(
    rf"{_SLOT}[Ss]lot\(([^)\s]{{1,32}})\): (Link Down(?: event)?|Card not present|Power fault|Surprise Removal"
    r"|No link|Cannot train link)(?:: status 0x[0-9a-f]{1,8})?$"
)
# pciehp 0000:00:1c.0:pcie004: Card not present on Slot(5); ... Power fault on slot 5
_OLD_SLOT_EVENT = regex(rf"{_SLOT}(Card not present|Surprise Removal|Power fault) on [Ss]lot ?\(?([^)\s]{{1,32}})\)?$")
# pcieport 0000:3c:06.0: pciehp: Failed to check link status        (to 6.5; "Cannot train link" since)
_NO_LINK = regex(rf"{_SLOT}Failed to check link status$")
_SLOT_CODES = {
    "Link Down": "link_down",
    "Link Down event": "link_down",
    "Card not present": "removed",
    "Surprise Removal": "removed",
    "Power fault": "power_fault",
    "No link": "no_link",
    "Cannot train link": "no_link",
}


def _slot_event(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, _SLOT_CODES[match[3]], match[1], (("slot", match[2]),))


def _old_slot_event(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, _SLOT_CODES[match[2]], match[1], (("slot", match[3]),))


# nvidia 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible      (5.17 and newer)
# nvidia 0000:01:00.0: can't change power state from D3cold to D0 (config space inaccessible)   (5.5)
# nvidia 0000:01:00.0: not ready 65535ms after bus reset; giving up
# nvidia 0000:01:00.0: Refused to change power state, currently in D3    (to 5.4: the value read from a lost device)
_INACCESSIBLE = regex(
    rf"{_DEVICE}(?:[Uu]nable to change power state from \w{{2,8}} to \w{{2,8}}, device inaccessible"
    r"|can't change power state from \w{2,8} to \w{2,8} \(config space inaccessible\)"
    r"|[Rr]efused to change power state(?:,? \(?currently (?:in )?D3|, currently in D3| from \w{2,8} to D0\b)"
    r"|not ready \d{1,9}ms after [\w ]{1,32}; giving up)"
)


# --- errors

# pcieport 0000:00:1d.3: AER: Multiple Correctable error message received from 0000:06:00.0    (6.8; blames a device)
# pcieport 0000:00:1d.3: AER: Multiple Correctable Error messages received, first one from 0000:06:00.0        (7.3)
# pcieport 0000:00:1c.1: AER: Multiple Corrected error received: 0000:00:1c.1                   (4.17)
# pcieport 0000:00:1c.0: AER: Corrected error received: id=00e0                                 (3.10)
# nvidia 0000:63:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)
# nvidia 0000:63:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal)                                     (7.3)
# pcieport 0000:00:1c.5: AER: PCIe Bus Error: severity=Uncorrectable (Fatal) (Inaccessible)                    (7.3)
# pcieport 0000:00:1c.5: PCIe Bus Error: severity=Corrected, type=Physical Layer, id=00e5(Receiver ID)
# pcieport 0000:00:1c.5: PCIe Bus Error: severity=Uncorrected (Fatal), type=Inaccessible, (Unregistered Agent ID)
# 0000:00:1c.5: PCIe Bus Error: severity=Corrected, type=Physical Layer, id=00e5(Receiver ID)          (3.10, no driver)
_SEVERITY = r"(Correct(?:ed|able)|Uncorrect(?:ed|able)(?: \((?:Non-)?Fatal\))?)"
_RECEIVED = regex(
    rf"{_DEVICE}AER: (?:Multiple )?{_SEVERITY} error (?:messages? )?received(?:(?:, first one)? from|:) "
    rf"(?:{PCI}|id=([0-9a-f]{{2}})([0-9a-f]{{2}}))",
    re.I,
)
_BUS_ERROR = regex(
    rf"(?:([\w-]{{1,32}}) )?{PCI}: (?:AER: )?(?:PCIe|CXL) Bus Error: (?:severity=)?{_SEVERITY}"
    r"(?:, type=([^,(]{1,40}?)(?:, (?:id=[0-9a-f]{4})?\(([^)]{1,40})\))?| \(Inaccessible\))?[ \t]{0,16}$",
    re.I | re.M,
)


def _code(severity: str) -> str:
    severity = severity.lower()
    if severity.startswith("correct"):
        return "corrected"
    return "fatal" if "(fatal)" in severity else "nonfatal"


def _address(port: str, bus: str, function: str) -> str:
    """Return a sender's address in its port's domain, from two 8-bit numbers ("00", "e5")."""
    return f"{port[:-7]}{bus}:{int(function, 16) >> 3:02x}.{int(function, 16) & 7}"


def _received(kind: str, match: re.Match[str]) -> KernelEvent:
    """Return the event. If the sender's bus number was lost ("from 0000:00:00.0"), blame the port."""
    _, port, severity, sender, bus, function = match.groups()
    reporter = pci_address(port)
    if bus is not None:
        sender = _address(port, bus, function)
    blamed = pci_address(sender)
    if blamed[-7:] == "00:00.0":
        blamed = reporter
    return event(kind, match, _code(severity), blamed, (("reporter", reporter),))


def _bus_error(kind: str, match: re.Match[str]) -> KernelEvent:
    driver, device, severity, layer, agent = match.groups()
    return event(kind, match, _code(severity), device, (("layer", layer), ("agent", agent), ("driver", driver)))


# nvidia 0000:63:00.0:   device [10de:2330] error status/mask=00001081/00006000
# nvidia 0000:63:00.0:    [20] UnsupReq               (First)
# nvidia 0000:63:00.0: AER:   [20] UnsupReq          | Requester ID | Transaction Layer (First)                (7.3)
# nvidia 0000:63:00.0: AER:   TLP Header: 60001004 000000ff 0000007d fe7eb000
# nvidia 0000:63:00.0: AER: can't recover (no error_detected callback)
_DETAIL = regex(
    rf"{_DEVICE}(?:(?:AER|DPC): )? *(?:device \[[0-9a-f]{{4}}:[0-9a-f]{{4}}\] error status/mask="
    r"|\[ ?\d{1,2}\] (\w[\w./]{0,31}(?: [\w./]{1,32}){0,7}) {0,32}"
    r"(?:\(First\)|\||$)|TLP (?:Prefix )?Header(?: \(Flit\))?: "
    r"|Error of this Agent(?:\([0-9a-f]{4}\))? is reported first|can't recover"
    r"|(?:Root|Downstream) Port link has been reset|found no error details"
    r"|aer_status: 0x|aer_layer=|rp_pio_status: |RP PIO (?:severity=|ImpSpec Log)|root port still busy"
    r"|(?:software trigger|reserved error|ERR_(?:NON)?FATAL) detected)",
    re.I | re.M,
)


# tg3 0000:04:00.0: AER: aer_uncor_severity: 0x000ef030     (firmware first: only uncorrected errors)
# pcieport 0004:00:00.0: AER: subordinate device reset failed
# pcieport 0000:00:07.1: AER: device recovery successful
_OUTCOME = regex(
    rf"{_DEVICE}(?:AER: )?(aer_uncor_severity: 0x|subordinate device reset failed"
    r"|link reset at upstream device \S{1,32} failed|device recovery (?:failed|successful)"
    r"|AER driver successfully recovered)",
    re.I,
)


def _outcome(kind: str, match: re.Match[str]) -> KernelEvent:
    text = match[3].lower()
    code = "recovery_failed" if text == "device recovery failed" else "recovered"
    if "reset" in text:
        code = "reset_failed"
    return event(kind, match, "nonfatal" if text.startswith("aer_") else code, match[2], (("driver", match[1]),))


# pcieport 0000:a9:10.0: DPC: containment event, status:0x2009 source:0x0000
# pcieport 0000:a9:10.0: DPC: containment event, status:0x1f05, ERR_FATAL received from 0000:aa:00.0      (6.16)
# pcieport 0000:a9:10.0: DPC: unmasked uncorrectable error detected
# dpc 0000:a9:10.0:pcie008: DPC containment event, status:0x1f09 source:0x0000                           (4.8)
_DPC = regex(
    rf"[\w-]{{1,32}} {PCI}:(?:\w{{1,16}}:)? DPC:? (?:containment event, status:0x([0-9a-f]{{1,4}})"
    rf"(?: source:0x([0-9a-f]{{2}})([0-9a-f]{{2}})|, ERR_\w{{5,8}} received from {PCI})?"
    r"|(?:unmasked uncorrectable error|RP PIO error) detected)"
)
_EDR = regex(rf"[\w-]{{1,32}} {PCI}: EDR: EDR event received")


def _contained(kind: str, match: re.Match[str]) -> KernelEvent:
    """Return the event for a containment.

    Bits 1 and 2 of the status give the reason. The values 1 and 2 mean that a message was received; the source is its
    sender. For 3, the reason is in bits 5 and 6, where 1 is a software trigger for tests.
    """
    port, status, bus, function, sender = match.groups()
    bits = int(status or "0", 16)
    reason = bits >> 1 & 3
    if reason == 3 and bits >> 5 & 3 == 1:
        return event(kind, match, DETAIL, port)
    if sender is None and reason in (1, 2) and bus and bus + function != "0000":
        sender = _address(port, bus, function)
    return event(kind, match, "contained", sender or port, (("reporter", pci_address(port) if sender else None),))


# {2}[Hardware Error]:   section_type: PCIe error
# {2}[Hardware Error]:   device_id: 0000:03:00.0
# {2}[Hardware Error]:   aer_uncor_status: 0x00000000, aer_uncor_mask: 0x04500000
# [Hardware Error]: {2}  device_id: ...           (acpi_extlog); without a number: BERT, a record of the last boot
_RECORD = regex(
    r"(?:\{(\d{1,10})\}\[Hardware Error\]:|\[Hardware Error\]: ?(?:\{(\d{1,10})\})?) *"
    rf"(?:section_type: PCIe error|device_id: {PCI}|aer_uncor_(?:status|severity): 0x|aer_cor_status: 0x|port_type: \d"
    r"|TLP Header: )"
)


def _record(kind: str, match: re.Match[str]) -> KernelEvent:
    number = match[1] or match[2]
    return event(kind, match, "record" if number else DETAIL, match[3] or "", (("record", number),))


# Every line of a scanned log is searched for each literal. There are therefore only a few literals, which several
# formats share.
RULES = (
    Rule("pcie_hotplug", ("lot(",), _SLOT_EVENT, _slot_event),
    Rule("pcie_hotplug", ("lot(", "ower fault on slot"), _OLD_SLOT_EVENT, _old_slot_event),
    Rule("pcie_hotplug", ("to check link status",), _NO_LINK, event_builder("no_link", pci=1)),
    Rule(
        "pcie_hotplug",
        ("change power state", "; giving up"),
        _INACCESSIBLE,
        event_builder("inaccessible", pci=2, driver=1),
        varies=("driver",),
    ),
    Rule(
        "pcie_aer",
        ("PCIe Bus Error", "CXL Bus Error"),
        _BUS_ERROR,
        _bus_error,
        varies=("layer", "agent", "driver"),
    ),
    Rule("pcie_aer", ("AER",), _RECEIVED, _received, varies=("reporter",)),
    Rule("pcie_aer", ("AER", "aer_"), _OUTCOME, _outcome, varies=("driver",)),
    Rule("pcie_aer", ("DPC",), _DPC, _contained, varies=("reporter",)),
    Rule("pcie_aer", ("EDR event",), _EDR, event_builder(DETAIL, pci=1)),
    Rule(
        "pcie_aer",
        ("AER", "aer_", "DPC", "error status/mask=", ":    [", "(First)", "TLP Header"),
        _DETAIL,
        event_builder(DETAIL, pci=2, bit=3, driver=1),
        varies=("bit", "driver"),
    ),
    Rule("pcie_aer", ("[Hardware Error]",), _RECORD, _record, varies=("record",)),
)
