"""healthd.api: the names for checks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from healthd import api

# Names may be added. Removing or renaming one breaks checks of sites.
NAMES = """
AbsolutePath AbsolutePathOrNone Baseline Bytes Celsius CheckConfig CheckSettings Clears Count Cpus Ends EndsJob Entry
ExitStatus Explain FailureCause Finding Gbps Gib Gpu Gpus History Host Inventory KernelEvent Lanes LeftOut Links Mbps
Meaning MigDevices Mtu NOT_IN_BASELINE NO_GPU NO_IB_PORT NothingToCheck NvmlError NvmlErrorKind NvmlGpu Observation
ObservationKind PciDevice PciFunction Percent Period Processes Program ProgramResult Rate Remedy Repair Seconds
Severity Share Slowness SmallCount Times Watts WholeCelsius Worsens WorsensBy between compile_patterns_eagerly
dataclass is_decimal printable regex
"""


def test_api_has_names_imported_by_sites() -> None:
    assert sorted(api.__all__) == NAMES.split()


@pytest.mark.parametrize("name", NAMES.split())
def test_api_name_can_be_imported(name: str) -> None:
    assert getattr(api, name) is not None


def test_api_rejects_unknown_name() -> None:
    with pytest.raises(AttributeError, match="Hosts"):
        _ = api.Hosts  # type: ignore[attr-defined]


def test_api_loads_nvml_only_when_used() -> None:
    program = "import sys, healthd.api; print(*sorted({'healthd.nvidia.nvml', 'healthd.host.host'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
