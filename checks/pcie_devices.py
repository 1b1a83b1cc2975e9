"""PCI devices in the node's baseline that are missing or were replaced by other devices.

Rule: only expected devices are checked (as in OCI and GCM). A device that is still listed but no longer responds is not
missing: gpu_count and pcie_link detect such a device. A device that comes back within a minute is not reported as
missing. Azure removes a VM's virtual functions during maintenance, and mlxfwreset removes the card that it resets.
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
    History,
    Host,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
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
    """expected         "vendor:device" by PCI address: {"0000:1b:00.0" = "10de:2330"}; others are not checked
    confirm_seconds  a device must be missing or different for this long before it is reported
    """

    expected: dict[str, str] = field(default_factory=dict)
    confirm_seconds: Seconds = 60.0


def validate(config: Config) -> str | None:
    for pci, model in config.expected.items():
        if not ADDRESS.fullmatch(pci):
            return f'expected: "{pci}" is not a PCI address as in sysfs; write it in lower case, as in "0000:1b:00.0"'
        if not MODEL.fullmatch(model):
            return f'expected: "{model}" of {pci} is not a vendor and device in lower case, as in "10de:2330"'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    if not config.expected:
        yield NOT_IN_BASELINE
        return
    present = {function.pci: function for function in host.pci_functions() if function.vendor}
    yield Observation("pcie_devices_missing", len(config.expected.keys() - present.keys()))
    for pci, expected in config.expected.items():
        function = present.get(pci)
        model = f"{function.vendor}:{function.device}".replace("0x", "") if function else None
        if model is None:
            code, message = "gone", f"PCI device {pci} ({expected}) is missing"
        elif model != expected:
            code, message = "changed", f"PCI device {pci} is {model}; expected {expected}"
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
        if host.read_or_empty(f"{PCI_DEVICES}/{function.pci}/revision") == "0xff":
            yield LeftOut("pcie_devices", "dead on the bus: reads return all ones", "expected", function.pci)
        else:
            model = f"{function.vendor[2:]}:{function.device[2:]}"
            yield Entry("pcie_devices", "expected", model, function.pci, note=kind)


_BASELINE = "If the hardware was changed on purpose, update the baseline (healthd baseline)."

OBSERVATIONS = {
    "pcie_devices_missing": Meaning("Number of expected PCI devices that are missing."),
}

EXPLAIN = {
    "pcie_devices/gone": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A PCI device from the node's baseline is not on the bus.",
        "A network card, disk or GPU is missing, so jobs fail or run slower than on other nodes.",
        "lspci -D shows the devices that are present, and journalctl -k | grep -iE 'pcie|aer' shows the reason. "
        "Power-cycle the node, then reseat the card or its riser. If many devices are missing and equally many are "
        f"new, the bus numbers changed because a card was added or removed. {_BASELINE}",
        confirm="confirm_seconds",
        expects="expected",
    ),
    "pcie_devices/changed": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The device at this PCI address differs from the baseline.",
        "A card was replaced or started with other firmware, or bus numbers changed because another card is missing.",
        f"lspci -D -nn shows the devices that are present. {_BASELINE}",
        confirm="confirm_seconds",
        expects="expected",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {"pcie_devices/gone": EndsJob.ALWAYS}
PERMANENT = ("pcie_devices/gone",)
