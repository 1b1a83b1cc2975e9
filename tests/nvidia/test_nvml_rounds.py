"""One round of checks with a stub libnvidia-ml (stub_nvml.c) and with the fake: NVML results that must give findings.

The stub uses the real path: `healthd check`, its worker, loader, ctypes, pynvml.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stub_nvml

SECOND = "0000:43:00.0"
CheckRunner = Callable[..., dict[str, Any]]

# Settings that make the GPUs of the stub healthy.
HEALTHY_VALUES = "link5=1,fabric_health=0"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the compiled stub, with a node that has nothing else."""
    folder = tmp_path_factory.mktemp("stub")
    (folder / "node" / "proc").mkdir(parents=True)
    return folder


@pytest.fixture(params=["stub", "fake"])
def run_checks(request: pytest.FixtureRequest, library: Path, tmp_path: Path) -> CheckRunner:
    """Return a function that runs a round of the named checks and returns its document. The stub is healthy except for
    `stub` (STUB_VALUES) and `settings`. The fake is a DGX H100. Example:
    run_checks("gpu_ecc", stub="answers@1=1", fake="gpu.1.lost = true")."""

    def run(*names: str, stub: str = "", fake: str = "", config: str = "", **settings: str) -> dict[str, Any]:
        scenario, file = tmp_path / "scenario.toml", tmp_path / "healthd.toml"
        scenario.write_text(f'profile = "dgx-h100"\n{fake}\n')
        file.write_text(f'checks_dir = "{tmp_path}/none"\nprofile = "none"\n{config}')
        values = ",".join(filter(None, (stub, HEALTHY_VALUES)))
        environment = stub_nvml.environment(library, STUB_VALUES=values, **settings)
        nvml = ["--fake-nvml", str(scenario)] if request.param == "fake" else []
        arguments = ["--config", str(file), "--root", str(library / "node"), *nvml, *names]
        done = subprocess.run(
            [sys.executable, "-m", "healthd", "check", "--json", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            timeout=240,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def conditions(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return sorted((found["code"], found["subject"], found["message"]) for found in document["conditions"])


def outcomes(document: dict[str, Any]) -> dict[str, str]:
    return {result["check"]: result["outcome"] for result in document["results"]}


@pytest.mark.one_python
def test_gpu_without_fabric_next_to_joined_ones_is_reported(run_checks: CheckRunner) -> None:
    ((code, part, _),) = conditions(run_checks("gpu_fabric", stub="fabric@1=0", fake="gpu.1.fabric_state = 0"))
    assert (code, part) == ("gpu_fabric/no_fabric", SECOND)


@pytest.mark.one_python
def test_gpu_at_91_degrees_without_driver_limit_is_reported(run_checks: CheckRunner) -> None:
    errors = "nvmlDeviceGetTemperatureThreshold=3,nvmlDeviceGetMarginTemperature=3,field194=3"
    fake = '[gpu.1]\ntemperature = 91\nunsupported = ["nvmlDeviceGetMarginTemperature"]\nunsupported_fields = [194]\n'
    found = run_checks("gpu_temperature", stub="temperature@1=91", fake=fake, STUB_ERRORS=errors)
    ((code, part, message),) = conditions(found)
    assert (code, part, message[:30]) == ("gpu_temperature/hot", SECOND, "91 C; the driver reports no li")
    assert found["health"] == "warning"


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("stub", "fake", "message"),
    [
        ("link7@1=0", "nvlink_inactive = [7]", "1 NVLink is down here, but active on other GPUs: link 7"),
        (
            "link7@1=0,link17@1=0",
            "nvlink_inactive = [7, 17]",
            "2 NVLinks are down here, but active on other GPUs: links 7, 17",
        ),
        (
            "link7@1=-1",
            "nvlink_unreported = [7]",
            "1 NVLink is not active here, but active on other GPUs; state not reported: link 7",
        ),
    ],
)
def test_links_that_are_down_are_reported_with_numbers(
    run_checks: CheckRunner, stub: str, fake: str, message: str
) -> None:
    assert conditions(run_checks("gpu_nvlink", stub=stub, fake=f"[gpu.1]\n{fake}")) == [
        ("gpu_nvlink/inactive", SECOND, message)
    ]


FIVE = ("gpu_access", "gpu_ecc", "gpu_nvlink", "gpu_recovery_action", "gpu_row_remap")


def test_gpu_lost_during_a_round_is_reported_in_that_round(run_checks: CheckRunner) -> None:
    """The GPU answers the first call, when it is enumerated, and not the next one."""
    found = run_checks(*FIVE, stub="answers@1=1", fake="gpu.1.lost_after = 1")
    ((code, part, message),) = [each for each in conditions(found) if each[0].startswith("gpu_access")]
    assert (code, part) == ("gpu_access/lost", SECOND)
    assert message == f"GPU {SECOND} is lost (nvmlDeviceGetEccMode: GPU is lost)"
    assert found["health"] == "unhealthy"
    assert outcomes(found) == {**dict.fromkeys(FIVE, "completed"), "gpu_ecc": "failed"}, "other checks read other GPUs"


def test_gpu_that_requires_reset_during_a_round_is_reported_in_that_round(run_checks: CheckRunner) -> None:
    fake = '[gpu.1.errors]\nnvmlDeviceGetEccMode = "ResetRequired"\n'
    found = run_checks(*FIVE, fake=fake, STUB_ERRORS="nvmlDeviceGetEccMode@1=16")
    assert ("gpu_access/reset_required", SECOND) in [each[:2] for each in conditions(found)]


def test_hang_in_another_check_is_reported_as_driver_hang(run_checks: CheckRunner) -> None:
    hang, quick = 'hang = "nvmlDeviceGetEccMode"\nhang_seconds = 6', "[checks.gpu_ecc]\ntimeout_seconds = 1\n"
    found = run_checks(*FIVE, fake=hang, config=quick, STUB_HANG_CALL="nvmlDeviceGetEccMode", STUB_HANG_SECONDS="6")
    assert conditions(found) == [("gpu_access/hang", "", "NVML has not responded for 1 s")]
    outcome_by_check = outcomes(found)
    assert (outcome_by_check["gpu_access"], outcome_by_check["gpu_ecc"], outcome_by_check["gpu_nvlink"]) == (
        "stuck",
        "timed_out",
        "stuck",
    )
    assert len(found["results"]) == len(FIVE), "one result per check, also for the check that ran twice"
