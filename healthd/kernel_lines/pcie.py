"""PCI Express: errors that AER reports, hotplug slots.

pcie_hotplug   code link_down; pci = the port, slot
pcie_aer       code = corrected, nonfatal or fatal; pci = the device that reports or is blamed
"""

from __future__ import annotations

import re

from healthd.kernel_lines.rule import PCI, Rule, event, pci_address
from healthd.model import KernelEvent

# "Link Down/Up ignored (recovered by DPC)" is none.
# pcieport 0004:00:00.0: pciehp: Slot(41): Link Down; before 5.0: pciehp 0000:00:1c.0:pcie004: Slot(0): Link Down
_PCIEHP = re.compile(rf"[\w-]{{1,32}} {PCI}:\s?[\w:]{{1,16}}: Slot\(([^)\s]{{1,32}})\): Link Down(?!/)")


def _pciehp(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "link_down", match[1], (("slot", match[2]),))


# pcieport 0000:00:1d.3: AER: Multiple Correctable error message received from 0000:06:00.0   (blames a device)
# nvidia 0000:63:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)
# The words were Corrected and Uncorrected before 6.8.
_AER_SEVERITY = r"(Correct(?:ed|able)|Uncorrect(?:ed|able)(?: \((?:Non-)?Fatal\))?)"
_AER_RECEIVED = re.compile(
    rf"[\w-]{{1,32}} {PCI}: AER: (?:Multiple )?{_AER_SEVERITY} error (?:message )?received(?: from|:) {PCI}", re.I
)
_AER_DEVICE = re.compile(
    rf"[\w-]{{1,32}} {PCI}: (?:AER: )?PCIe Bus Error: severity={_AER_SEVERITY}"
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
    return event(kind, match, _aer_code(match[2]), match[3], (("reporter", reporter),))


def _aer_device(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, _aer_code(match[2]), match[1], (("layer", match[3]), ("agent", match[4])))


RULES = (
    Rule("pcie_hotplug", ("Link Down",), _PCIEHP, _pciehp),
    Rule("pcie_aer", ("PCIe Bus Error",), _AER_DEVICE, _aer_device),
    Rule("pcie_aer", ("AER: ",), _AER_RECEIVED, _aer_received),
)
