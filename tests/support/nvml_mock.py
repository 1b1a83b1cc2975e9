"""NVIDIA's nvml-mock: its profiles, and the faults that its `nvml-mock-ctl` injects, with and without its library.

The library is a libnvidia-ml.so.1 that answers from such a profile (github.com/NVIDIA/k8s-test-infra,
pkg/gpu/mocknvml). Without it, `host` converts the profile and the faults for the fake NVML. The keys are those of
docs/configuration.md and engine/config_types.go there; the numbers of states, bits and summaries are those of nvml.h.

`python nvml_mock.py` prints the codes that the checks report through the library of this process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fakes import BOOT, NOW

from healthd.agent.settings.registry import Check, built_in_checks
from healthd.common.history import History, Series, update
from healthd.common.model import Finding, Observation, Severity
from healthd.host.host import Host
from healthd.nvidia.fake_nvml import FakeLibrary
from healthd.nvidia.fake_scenario import FakePlatform, Gpu, LinkCounters, Machine
from healthd.nvidia.nvml import Nvml, NvmlError, open_real

PROFILES = Path(__file__).parents[1] / "data/nvml_mock"
ROOT = Path(__file__).parents[2]
REASONS = {  # nvml.h: nvmlClocksEventReason*
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
FABRIC_STATES = {"not_supported": 0, "not_started": 1, "in_progress": 2, "completed": 3, "auto": 3}
FABRIC_CONDITIONS = ("degraded_bandwidth", "route_recovery", "route_unhealthy", "access_timeout_recovery")
MISCONFIGURATIONS = (  # from 1 on: NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*
    *("none", "incorrect_sysguid", "incorrect_chassis_sn", "no_partition", "insufficient_nvlinks"),
    *("incompatible_gpu_fw", "invalid_location", "gpu_state_invalid"),
)
HEALTHY, UNHEALTHY, LIMITED_CAPACITY = 1, 2, 3  # NVML_GPU_FABRIC_HEALTH_SUMMARY_*
PEER_TYPES = {"direct_connected": 0, "switch_connected": 1}
HISTOGRAM = ("max", "high", "partial", "low", "none")


@functools.cache
def profile(name: str) -> dict[str, Any]:
    import yaml

    document: dict[str, Any] = yaml.safe_load((PROFILES / f"{name}.yaml").read_text("utf-8"))
    return document


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`, merged key by key like the library's overrides."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def addresses(document: Mapping[str, Any]) -> list[str]:
    return [device["pci"]["bus_id"].lower() for device in document["devices"]]


def host(name: str, faults: Mapping[int, Mapping[str, Any]], links_down: Mapping[int, list[int]]) -> Host:
    """Return a host whose fake NVML has the profile's GPUs. `faults` and `links_down` are by GPU index."""
    document = profile(name)
    gpus = []
    for device in document["devices"]:
        index = device["index"]
        settings = merge(merge(document["device_defaults"], device), faults.get(index, {}))
        gpus.append(fake_gpu(settings, document["nvlink"], links_down.get(index, [])))
    machine = Machine(driver_version=document["system"]["driver_version"])
    return Host("/nonexistent", lambda: Nvml.open(FakeLibrary(machine, addresses(document), gpus)))


def fake_gpu(settings: Mapping[str, Any], nvlink: Mapping[str, Any], links_down: list[int]) -> Gpu:
    thermal, pcie, power, ecc = (settings[name] for name in ("thermal", "pcie", "power", "ecc"))
    reasons, rows, mig = settings["clocks_throttle_reasons"], settings["remapped_rows"], settings["mig"]
    spare = rows.get("availability_histogram")
    capability, counters = settings["compute_capability"], reasons.get("counters", {})
    return Gpu(
        name=settings["name"],
        serial=settings["serial"],
        vbios=settings["vbios_version"],
        compute_capability=(capability["major"], capability["minor"]),
        temperature=thermal["temperature_gpu_c"],
        temperature_memory=thermal["temperature_memory_c"],
        temperature_margin=thermal["slowdown_threshold_c"] - thermal["temperature_gpu_c"],
        temperature_slowdown_margin=0,
        utilization_percent=settings["utilization"]["gpu"],
        persistence=settings["persistence_mode"] == "enabled",
        inforom=True,
        power_limit_watts=power["enforced_limit_mw"] / 1000,
        power_default_watts=power["default_limit_mw"] / 1000,
        clock_event_reasons=sum(bit for reason, bit in REASONS.items() if reasons.get(reason)),
        slowdown_hw_thermal_seconds=counters.get("hw_thermal_slowdown_us", 0) / 1e6,
        slowdown_hw_power_brake_seconds=counters.get("hw_power_brake_slowdown_us", 0) / 1e6,
        processes=tuple(process["pid"] for process in settings["processes"]),
        pcie_replays=pcie["replay_counter"],
        pcie_generation=pcie["current_link_gen"],
        pcie_width=pcie["current_link_width"],
        pcie_max_generation=pcie["max_link_gen"],
        pcie_max_width=pcie["max_link_width"],
        mig=mig["mode_current"] == "enabled",
        mig_pending=mig["mode_pending"] == "enabled",
        ecc=ecc["mode_current"] == "enabled",
        sram_threshold_exceeded=ecc.get("sram", {}).get("threshold_exceeded", False),
        remap_correctable=rows["correctable"],
        remap_uncorrectable=rows["uncorrectable"],
        remap_pending=rows["pending"],
        remap_histogram=None if spare is None else tuple(spare[name] for name in HISTOGRAM),  # type: ignore[arg-type]
        **{"remap_failure": rows["failure_occurred"], **ecc_counts(ecc), **failure(settings.get("failure", {}))},
        **fabric(settings["fabric"]),
        platform=platform(settings["platform"]),
        nvlinks=nvlink["links_per_gpu"],
        nvlink_inactive=tuple(links_down),
        nvlink_counters=LinkCounters.NVLINK5,
        nvlink_speed=nvlink["bandwidth_per_link_mbps"],
    )


def ecc_counts(ecc: Mapping[str, Any]) -> dict[str, int]:
    counts = {}
    for scope in ("volatile", "aggregate"):
        memory, sram = ecc["errors"][scope], ecc.get("sram", {}).get(scope, {})
        counts[f"ecc_{scope}_corrected_dram"] = memory["single_bit"]["device_memory"]
        counts[f"ecc_{scope}_uncorrected_dram"] = memory["double_bit"]["device_memory"]
        counts[f"ecc_{scope}_corrected_sram"] = sram.get("correctable", 0)
        counts[f"ecc_{scope}_uncorrected_sram"] = sum(
            sram.get(f"uncorrectable_{kind}", 0) for kind in ("parity", "secded")
        )
    return counts


def failure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for a `failure` block (engine/failure_injector.go and device.go)."""
    if settings.get("mode") in ("lost", "fallen_off_bus"):
        return {"lost": True}
    if settings.get("mode") == "ecc_uncorrectable":
        return {"ecc_volatile_uncorrected_dram": 1, "ecc_aggregate_uncorrected_dram": 1, "remap_failure": True}
    return {}


def fabric(settings: Mapping[str, Any]) -> dict[str, Any]:
    health = settings.get("health", {})
    faults = [bool(health.get(condition)) for condition in FABRIC_CONDITIONS]
    wrong = MISCONFIGURATIONS.index(health.get("incorrect_configuration", "none")) + 1
    mask = sum((1 if fault else 2) << 2 * position for position, fault in enumerate(faults)) | wrong << 8
    summary = UNHEALTHY if any(faults[1:]) or wrong > 1 else LIMITED_CAPACITY if faults[0] else HEALTHY
    state = FABRIC_STATES[settings["state"]]
    place = {"fabric_cluster": settings["cluster_uuid"], "fabric_clique": settings["clique_id"]}
    return {"fabric_state": state, "fabric_health": mask, "fabric_summary": summary, **place}


def platform(settings: Mapping[str, Any]) -> FakePlatform:
    return FakePlatform(
        PEER_TYPES[settings["peer_type"]],
        serial=settings["chassis_serial_number"],
        slot=settings["slot_number"],
        tray=settings["tray_index"],
        host=settings["host_id"],
        module=settings["module_id"],
    )


def reported(node: Callable[[], Host]) -> Iterator[tuple[str, str]]:
    """Yield (code, part) of what the GPU checks report above INFO in the second of two rounds, an interval apart."""
    checks = [check for check in built_in_checks().values() if check.uses == "nvml" and check.has_run]
    store: dict[str, Series] = {}
    for now in (NOW, NOW + 300.0):
        with closing_nvml(node()) as host:
            items = [item for check in checks for item in run(check, host, History(store, now, BOOT))]
        store = update(store, [item for item in items if isinstance(item, Observation)], now, BOOT)
    found = [item for item in items if isinstance(item, Finding) and item.severity > Severity.INFO]
    yield from ((finding.code, finding.subject) for finding in found)


@contextlib.contextmanager
def closing_nvml(host: Host) -> Iterator[Host]:
    yield host
    host.close_nvml()


def run(check: Check, host: Host, past: History) -> Iterator[object]:
    """Yield a check's items. An NVML error ends it, which gpu_access reports."""
    with contextlib.suppress(NvmlError):
        yield from check.module.run(host, check.module.Config(), past)


def environment(
    library: Path,
    folder: Path,
    name: str,
    faults: Mapping[int, Mapping[str, Any]],
    links_down: Mapping[int, list[int]] | None = None,
) -> dict[str, str]:
    """Return the environment of a process that loads the library. `folder` gets the profile and its overrides."""
    document = profile(name)
    if links_down:
        links = [
            {"index": device["index"], "links": links_of(document, links_down.get(device["index"], []))}
            for device in document["devices"]
        ]
        document = merge(document, {"nvlink": {"device_links": links}})
    (folder / "config.yaml").write_text(json.dumps(document))
    overrides = {"version": 1, "devices": {str(index): dict(fault) for index, fault in faults.items()}}
    (folder / "overrides.yaml").write_text(json.dumps(overrides))
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "MOCK_NVML_CONFIG": str(folder / "config.yaml"),
        "MOCK_NVML_OVERRIDES": str(folder / "overrides.yaml"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }


def reported_in(environ: dict[str, str]) -> set[tuple[str, str]]:
    """Return `reported` from a process with the library."""
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    return {(code, part) for code, part in json.loads(done.stdout)}


def links_of(document: Mapping[str, Any], down: list[int]) -> list[dict[str, Any]]:
    return [
        {"link": link, "state": "inactive" if link in down else "active", "remote_device_type": "switch"}
        for link in range(document["nvlink"]["links_per_gpu"])
    ]


if __name__ == "__main__":
    print(json.dumps(list(reported(lambda: Host("/nonexistent", open_real)))))
