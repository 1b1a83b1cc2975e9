"""NVIDIA's public profiles of GB200 and GB300, and each fault that its nvml-mock injects, read by the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="PyYAML, which reads the profiles, is not installed")
import nvml_mock

PROFILES = ("gb200", "gb300")
LIBRARY = "HEALTHD_NVML_MOCK"
FAULTY = 3
MISCONFIGURATIONS = nvml_mock.MISCONFIGURATIONS[1:]
# Fault -> (keys as for `nvml-mock-ctl`, the codes that the checks report). It also injects Xids, but through NVML's
# events, which healthd does not read: healthd reads Xids from the kernel log.
FAULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "lost": ({"failure": {"mode": "lost"}}, {"gpu_access/lost"}),
    "fallen off the bus": ({"failure": {"mode": "fallen_off_bus"}}, {"gpu_access/lost"}),
    "uncorrectable ECC errors": (
        {"failure": {"mode": "ecc_uncorrectable"}},
        {"gpu_ecc/uncorrected", "gpu_row_remap/failure"},
    ),
    "SRAM ECC errors": (
        {"ecc": {"sram": {"volatile": {"uncorrectable_secded": 4}, "threshold_exceeded": True}}},
        {"gpu_ecc/uncorrected", "gpu_ecc/sram_threshold"},
    ),
    "ECC off": ({"ecc": {"mode_current": "disabled"}}, {"gpu_ecc/disabled"}),
    "pending row remap": ({"remapped_rows": {"uncorrectable": 1, "pending": True}}, {"gpu_row_remap/pending"}),
    "failed row remap": ({"remapped_rows": {"failure_occurred": True}}, {"gpu_row_remap/failure"}),
    "no spare rows": (
        {"remapped_rows": {"availability_histogram": {"max": 636, "high": 0, "partial": 0, "low": 0, "none": 4}}},
        {"gpu_row_remap/no_spare_rows"},
    ),
    "temperature": ({"thermal": {"temperature_gpu_c": 95}}, {"gpu_temperature/hot"}),
    "thermal slowdown": ({"clocks_throttle_reasons": {"hw_thermal_slowdown": True}}, {"gpu_clocks/slowed_briefly"}),
    "power brake": ({"clocks_throttle_reasons": {"hw_power_brake_slowdown": True}}, {"gpu_clocks/slowed_briefly"}),
    "power limit": ({"power": {"enforced_limit_mw": 600_000}}, {"gpu_power/limited"}),
    "persistence mode": ({"persistence_mode": "disabled"}, {"gpu_persistence/off"}),
    "PCIe width": ({"pcie": {"current_link_width": 8}}, {"gpu_pcie/lanes"}),
    "fabric not started": ({"fabric": {"state": "not_started"}}, {"gpu_fabric/not_joined"}),
    "fabric in progress": ({"fabric": {"state": "in_progress"}}, {"gpu_fabric/not_joined"}),
    "another clique": ({"fabric": {"clique_id": 5}}, {"gpu_fabric/other_domain"}),
    "degraded bandwidth": ({"fabric": {"health": {"degraded_bandwidth": True}}}, {"gpu_fabric/degraded"}),
    "route recovery": ({"fabric": {"health": {"route_recovery": True}}}, {"gpu_fabric/degraded"}),
    "unhealthy route": ({"fabric": {"health": {"route_unhealthy": True}}}, {"gpu_fabric/unhealthy"}),
    "access time-out": ({"fabric": {"health": {"access_timeout_recovery": True}}}, {"gpu_fabric/unhealthy"}),
    **{
        wrong: ({"fabric": {"health": {"incorrect_configuration": wrong}}}, {"gpu_fabric/unhealthy"})
        for wrong in MISCONFIGURATIONS
    },
}
# The library counts errors at this rate in each counter of a link, also in those that Blackwell lacks (161 to 163).
NVLINK_ERRORS = {"nvlink_error": {"rate": 1_000_000}}
GROWING = {
    f"gpu_nvlink/{name}" for name in ("crc_rate", "packet", "recovered", "recovery", "recovery_failed", "replay")
}


@pytest.fixture
def library() -> Path:
    folder = os.environ.get(LIBRARY, "")
    if not folder:
        pytest.skip(
            f"{LIBRARY} is not set: build NVIDIA's library with Go (make NO_PADDING=1 in pkg/gpu/mocknvml of "
            "github.com/NVIDIA/k8s-test-infra) and set it to that folder"
        )
    return Path(folder)


def expected(name: str, codes: set[str]) -> set[tuple[str, str]]:
    part = nvml_mock.addresses(nvml_mock.profile(name))[FAULTY]
    return {(code, part) for code in codes}


@pytest.mark.parametrize("name", PROFILES)
def test_profile_is_silent(name):
    assert list(nvml_mock.reported(lambda: nvml_mock.host(name, {}, {}))) == []


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_is_found(name, fault):
    settings, codes = FAULTS[fault]
    found = nvml_mock.reported(lambda: nvml_mock.host(name, {FAULTY: settings}, {}))
    assert set(found) == expected(name, codes)


@pytest.mark.parametrize("name", PROFILES)
def test_link_that_is_down_is_found(name):
    found = nvml_mock.reported(lambda: nvml_mock.host(name, {}, {FAULTY: [4]}))
    assert set(found) == expected(name, {"gpu_nvlink/inactive"})


@pytest.mark.parametrize("name", PROFILES)
def test_library_fulfils_the_contract(name, library, tmp_path):
    environ = nvml_mock.environment(library, tmp_path, name, {})
    command = [sys.executable, str(Path(nvml_mock.__file__).with_name("contract_nvml.py"))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "8 GPUs answer, 0 do not\n" * 2


@pytest.mark.parametrize("name", PROFILES)
def test_profile_is_silent_through_the_library(name, library, tmp_path):
    assert nvml_mock.reported_in(nvml_mock.environment(library, tmp_path, name, {})) == set()


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_is_found_through_the_library(name, fault, library, tmp_path):
    settings, codes = FAULTS[fault]
    environ = nvml_mock.environment(library, tmp_path, name, {FAULTY: settings})
    assert nvml_mock.reported_in(environ) == expected(name, codes)


@pytest.mark.parametrize("name", PROFILES)
def test_link_that_is_down_is_found_through_the_library(name, library, tmp_path):
    environ = nvml_mock.environment(library, tmp_path, name, {}, {FAULTY: [4]})
    assert nvml_mock.reported_in(environ) == expected(name, {"gpu_nvlink/inactive"})


@pytest.mark.parametrize("name", PROFILES)
def test_growing_link_errors_are_found_through_the_library(name, library, tmp_path):
    found = nvml_mock.reported_in(nvml_mock.environment(library, tmp_path, name, {FAULTY: NVLINK_ERRORS}))
    assert found == expected(name, GROWING)


@pytest.mark.parametrize("name", PROFILES)
def test_check_finds_gpu_that_is_lost_in_a_round_through_the_library(name, library, tmp_path):
    environ = nvml_mock.environment(library, tmp_path, name, {FAULTY: {"failure": {"mode": "lost", "after_calls": 5}}})
    words = ("check", "--json", "--root", str(tmp_path), "--profile", "none", "gpu_access", "gpu_ecc")
    command = [sys.executable, "-m", "healthd", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    found = {(entry["code"], entry["subject"]) for entry in json.loads(done.stdout)["conditions"]}
    assert (done.returncode, found) == (2, expected(name, {"gpu_access/lost"}))
