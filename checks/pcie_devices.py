"""PCI devices that this node had when its baseline was written: gone, or others in their place.

Rule: only what the site expects is judged (OCI and GCM count devices in the same way). A device that is still listed
but no longer answers is not gone: gpu_count and pcie_link see that. One that comes back within a minute was not gone
either: Azure takes a VM's virtual functions away for its own maintenance, and mlxfwreset removes the card it resets.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import field

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    Host,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    Past,
    Seconds,
    Severity,
    regex,
)
from healthd.host.host import PCI_DEVICES
from healthd.host.inventory import device_kind

USES = ""
AFTER_EVENTS = ("pcie_hotplug", "pci_remove")
BASELINE = Baseline(("expected",), place=20)

ADDRESS = regex(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
MODEL = regex(r"[0-9a-f]{4}:[0-9a-f]{4}")


class Config(CheckSettings, frozen=True):
    """expected         PCI address -> "vendor:device": {"0000:1b:00.0" = "10de:2330"}; others are not judged
    confirm_seconds  a device must be gone, or another, for so long
    """

    expected: dict[str, str] = field(default_factory=dict)
    confirm_seconds: Seconds = 60.0


def validate(config: Config) -> str | None:
    for pci, model in config.expected.items():
        if not ADDRESS.fullmatch(pci):
            return f'expected: "{pci}" is no PCI address as sysfs has it: write "0000:1b:00.0", in lower case'
        if not MODEL.fullmatch(model):
            return f'expected: "{model}" of {pci} is no vendor and device as in "10de:2330", in lower case'
    return None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    if not config.expected:
        yield NOT_IN_BASELINE
        return
    there = {function.pci: function for function in host.pci_functions() if function.vendor}
    yield Observation("pcie_devices_missing", len(config.expected.keys() - there.keys()))
    for pci, expected in config.expected.items():
        function = there.get(pci)
        model = f"{function.vendor}:{function.device}".replace("0x", "") if function else None
        if model is None:
            code, message = "gone", f"PCI device {pci} ({expected}) is not there"
        elif model != expected:
            code, message = "changed", f"PCI device {pci} is {model}, {expected} is expected"
        else:
            continue
        yield Finding(
            Severity.DEGRADED,
            f"pcie_devices/{code}",
            pci,
            message,
            confirm_seconds=config.confirm_seconds,
            expects="expected",
        )


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    for function in host.pci_functions():
        kind = device_kind(function.vendor, function.pci_class)
        if kind == "other" or function.virtual:
            continue
        if host.told(f"{PCI_DEVICES}/{function.pci}/revision") == "0xff":
            yield LeftOut("pcie_devices", "dead on the bus: reads give all ones", "expected", function.pci)
        else:
            model = f"{function.vendor[2:]}:{function.device[2:]}"
            yield Entry("pcie_devices", "expected", model, function.pci, note=kind)


_BASELINE = "If the hardware was changed on purpose: write the baseline again (healthd baseline)."

OBSERVATIONS = {
    "pcie_devices_missing": Meaning("Expected PCI devices that are not there."),
}

EXPLAIN = {
    "pcie_devices/gone": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A PCI device of the node's baseline is not on the bus.",
        "A network card, disk or GPU is missing: jobs fail or run slower than on other nodes.",
        "lspci -D shows what is there; journalctl -k | grep -iE 'pcie|aer' why. Power the node off and on, reseat the "
        "card or its riser. Many gone and as many others new: bus numbers moved, because a card was added or removed. "
        f"{_BASELINE}",
        confirm="confirm_seconds",
        expects="expected",
    ),
    "pcie_devices/changed": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "At this PCI address is another device than the baseline has.",
        "A card was swapped or came up with other firmware, or bus numbers moved since another card is missing.",
        f"lspci -D -nn shows what is there. {_BASELINE}",
        confirm="confirm_seconds",
        expects="expected",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {"pcie_devices/gone": EndsJob.ALWAYS}
PERMANENT = ("pcie_devices/gone",)
