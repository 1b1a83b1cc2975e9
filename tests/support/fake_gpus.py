"""GPUs of the fake machines."""

from __future__ import annotations

from healthd.nvidia import fake_scenario


def fake_pci_gpus(profile_or_file: str) -> list[str]:
    """Return the PCI addresses of the GPUs by NVML's index, whether or not NVML shows them."""
    scenario, _ = fake_scenario.read(profile_or_file)
    return list(fake_scenario.addresses(scenario))
