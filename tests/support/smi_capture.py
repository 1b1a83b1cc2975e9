"""A fake NVML that answers as a real machine did, from the output of `nvidia-smi -q -x`.

It covers hardware that the project does not own. The first line of each capture in tests/data/nvidia_smi is its source.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from healthd.host.host import Host
from healthd.nvidia.fake_nvml import FakeLibrary
from healthd.nvidia.fake_scenario import FakePlatform, Gpu, Machine
from healthd.nvidia.nvml import SWITCH_CONNECTED, Nvml, sysfs_address

CAPTURES = sorted((Path(__file__).parents[1] / "data/nvidia_smi").glob("*.xml"))
FABRIC_STATES = {"Not Supported": 0, "Not Started": 1, "In Progress": 2, "Completed": 3}
FABRIC_SUMMARIES = {"Not Supported": 0, "Healthy": 1, "Unhealthy": 2, "Limited Capacity": 3}
FABRIC_FIELDS = ("bandwidth", "route_recovery_in_progress", "route_unhealthy", "access_timeout_recovery")
PEER_TYPES = {"Direct Connected": 0, "Switch Connected": SWITCH_CONNECTED}
HISTOGRAM = ("max", "high", "partial", "low", "none")
REASONS = {  # nvml.h: NVML_CLOCKS_EVENT_REASON_*
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}


def host(capture: Path, root: str = "/nonexistent") -> Host:
    tree = ElementTree.parse(capture).getroot()
    cards = [card for card in tree if card.tag == "gpu"]
    machine = Machine(driver_version=text_at(tree, "driver_version") or "")
    addresses, gpus = [address_of(card) for card in cards], [fake_gpu(card) for card in cards]
    return Host(root, lambda: Nvml.open(FakeLibrary(machine, addresses, gpus)))


def address_of(card: ElementTree.Element) -> str:
    domain, bus, device = card.attrib["id"].split(":")
    return sysfs_address(int(domain, 16), int(bus, 16), int(device.partition(".")[0], 16))


def text_at(card: ElementTree.Element, *paths: str) -> str | None:
    """Return the text at the first path that exists; None for N/A."""
    for path in paths:
        found = card.findtext(path)
        if found is not None:
            return None if found.strip() in ("N/A", "") else found.strip()
    return None


def number_at(card: ElementTree.Element, *paths: str) -> int | None:
    """Return the leading number of "16x", "29 C" or "700.00 W"."""
    found = text_at(card, *paths)
    match = re.match(r"-?[0-9]+", found or "")
    return int(match[0]) if match else None


def flag_at(card: ElementTree.Element, *paths: str) -> bool | None:
    found = text_at(card, *paths)
    return None if found is None else found in ("Enabled", "Yes", "Active")


def fake_gpu(card: ElementTree.Element) -> Gpu:
    reasons = [
        bit
        for name, bit in REASONS.items()
        if flag_at(
            card,
            f"clocks_event_reasons/clocks_event_reason_{name}",
            f"clocks_throttle_reasons/clocks_throttle_reason_{name}",
        )
    ]
    shows_reasons = any(card.find(f"clocks_{word}_reasons") is not None for word in ("event", "throttle"))
    mig = flag_at(card, "mig_mode/current_mig")
    histogram = tuple(
        number_at(card, f"remapped_rows/row_remapper_histogram/row_remapper_histogram_{name}") for name in HISTOGRAM
    )
    slowdowns = {
        f"slowdown_{name}_seconds": (value or 0) / 1e6
        for name, counter in (("hw_thermal", "hw_therm_slowdown"), ("hw_power_brake", "hw_power_brake"))
        if (value := number_at(card, f"clocks_event_reasons_counters/clocks_event_reasons_counters_{counter}"))
        is not None
    }
    powers = ("gpu_power_readings", "power_readings")
    state, cluster = text_at(card, "fabric/state"), text_at(card, "fabric/clusterUuid") or ""
    return Gpu(
        name=text_at(card, "product_name") or "",
        vbios=text_at(card, "vbios_version") or "",
        temperature=number_at(card, "temperature/gpu_temp"),
        temperature_slowdown=number_at(card, "temperature/gpu_temp_slow_threshold"),
        temperature_memory_max=number_at(card, "temperature/gpu_temp_max_mem_threshold"),
        temperature_margin=number_at(card, "temperature/gpu_temp_tlimit"),
        temperature_slowdown_margin=number_at(card, "temperature/gpu_temp_slow_tlimit_threshold"),
        temperature_memory=number_at(card, "temperature/memory_temp"),
        utilization_percent=number_at(card, "utilization/gpu_util"),
        persistence=flag_at(card, "persistence_mode"),
        inforom=True,
        power_limit_watts=number_at(
            card, *(f"{at}/{n}" for at in powers for n in ("current_power_limit", "power_limit"))
        ),
        power_default_watts=number_at(card, *(f"{at}/default_power_limit" for at in powers)),
        clock_event_reasons=sum(reasons) if shows_reasons else None,
        **slowdowns,
        pcie_replays=number_at(card, "pci/replay_counter"),
        pcie_generation=number_at(card, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        pcie_max_generation=number_at(card, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        pcie_width=number_at(card, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        pcie_max_width=number_at(card, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        mig=mig,
        mig_devices=len(card.findall("mig_devices/mig_device")),
        recovery_action=0 if card.findtext("gpu_recovery_action") == "None" else None,
        ecc=flag_at(card, "ecc_mode/current_ecc"),
        **ecc_counts(card),
        sram_threshold_exceeded=flag_at(card, "ecc_errors/aggregate/sram_threshold_exceeded"),
        remap_correctable=number_at(card, "remapped_rows/remapped_row_corr"),
        remap_uncorrectable=number_at(card, "remapped_rows/remapped_row_unc"),
        remap_pending=bool(flag_at(card, "remapped_rows/remapped_row_pending")),
        remap_failure=bool(flag_at(card, "remapped_rows/remapped_row_failure")),
        remap_histogram=None if None in histogram else histogram,  # type: ignore[arg-type]
        unrepairable_memory=flag_at(card, "ecc_errors/unrepairable_memory"),
        repair_pending_channel=flag_at(card, "ecc_errors/channel_repair_pending"),
        repair_pending_tpc=flag_at(card, "ecc_errors/tpc_repair_pending"),
        retired_single_bit=number_at(card, "retired_pages/multiple_single_bit_retirement/retired_count"),
        retired_double_bit=number_at(card, "retired_pages/double_bit_retirement/retired_count"),
        retired_pending=bool(flag_at(card, "retired_pages/pending_retirement")),
        fabric_state=FABRIC_STATES.get(state or ""),
        fabric_health=fabric_health(card),
        fabric_summary=FABRIC_SUMMARIES.get(text_at(card, "fabric/health/summary") or ""),
        fabric_cluster=cluster if cluster.strip("0-") else "",
        fabric_clique=number_at(card, "fabric/cliqueId") or 0,
        platform=platform_of(card),
    )


def fabric_health(card: ElementTree.Element) -> int | None:
    """Return nvml.h's NVML_GPU_FABRIC_HEALTH_MASK_* bits: two for each field (1 true, 2 false), N/A is 0."""
    if card.find("fabric/health") is None:
        return None
    words = [text_at(card, f"fabric/health/{name}") for name in FABRIC_FIELDS]
    mask = sum({"True": 1, "False": 2, "Degraded": 1, "Full": 2}.get(w or "", 0) << 2 * i for i, w in enumerate(words))
    return mask | (text_at(card, "fabric/health/incorrect_configuration") == "None") << 8


def platform_of(card: ElementTree.Element) -> FakePlatform | None:
    peer_type = text_at(card, "platformInfo/peer_type")
    if peer_type is None:
        return None
    names = {"slot": "slot_number", "tray": "tray_index", "host": "host_id", "module": "module_id"}
    numbers = {name: number_at(card, f"platformInfo/{tag}") or 0 for name, tag in names.items()}
    serial = text_at(card, "platformInfo/chassis_serial_number") or ""
    return FakePlatform(PEER_TYPES[peer_type], serial=serial, **numbers)


def ecc_counts(card: ElementTree.Element) -> dict[str, Any]:
    """Return the ECC counters from the elements of Ampere and later, or from the older ones."""
    counts: dict[str, Any] = {}
    for counter in ("volatile", "aggregate"):
        element = card.find(f"ecc_errors/{counter}")
        if element is None:
            continue
        sram = (
            number_at(element, "sram_uncorrectable"),
            *(number_at(element, f"sram_uncorrectable_{n}") for n in ("parity", "secded")),
        )
        older = {
            error: number_at(element, f"{bits}_bit/total")
            for error, bits in (("corrected", "single"), ("uncorrected", "double"))
        }
        counts |= {
            f"ecc_{counter}_corrected_sram": number_at(element, "sram_correctable") or 0,
            f"ecc_{counter}_uncorrected_sram": sum(filter(None, sram)),
            f"ecc_{counter}_corrected_dram": number_at(element, "dram_correctable") or older["corrected"] or 0,
            f"ecc_{counter}_uncorrected_dram": number_at(element, "dram_uncorrectable") or older["uncorrected"] or 0,
        }
    return counts
