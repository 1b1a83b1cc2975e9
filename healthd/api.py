"""Names that checks import from healthd. The names are stable, and docs/writing-a-check.md describes them.

    from healthd.api import CheckConfig, Clears, Explain, Finding, Host, Severity, dataclass

Names whose modules take longer to import (NVML, mounts) are loaded when a check imports them. A site's Config is a
dataclass derived from CheckConfig. A built-in check's Config derives from CheckSettings, which imports faster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from healthd.agent.settings.config import CheckConfig as CheckSettings
from healthd.agent.settings.config import Period, Seconds
from healthd.agent.settings.limits import (
    AbsolutePath,
    AbsolutePathOrNone,
    Bytes,
    Celsius,
    Count,
    Cpus,
    ExitStatus,
    Gbps,
    Gib,
    Gpus,
    Lanes,
    Links,
    Mbps,
    MigDevices,
    Mtu,
    Percent,
    Processes,
    Rate,
    Share,
    SmallCount,
    Times,
    Watts,
    WholeCelsius,
    between,
)
from healthd.common.history import History
from healthd.common.job_failures import EndsJob, FailureCause
from healthd.common.model import (
    NO_GPU,
    NO_IB_PORT,
    NOT_IN_BASELINE,
    Baseline,
    Clears,
    Ends,
    Entry,
    Explain,
    Finding,
    Gpu,
    Inventory,
    KernelEvent,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    ObservationKind,
    PciDevice,
    Program,
    Remedy,
    Repair,
    Severity,
    Slowness,
    Worsens,
    WorsensBy,
)
from healthd.common.text import compile_patterns_eagerly, is_decimal, printable, regex

if TYPE_CHECKING:
    from dataclasses import dataclass

    from healthd.agent.settings.config import CheckConfig as CheckConfig
    from healthd.host.host import Host, PciFunction
    from healthd.host.program import ProgramResult
    from healthd.nvidia.nvml import NvmlError, NvmlErrorKind, NvmlGpu

# maps each name to the module that is imported when the name is used
_LATE = {
    "CheckConfig": "healthd.agent.settings.site_config",
    "Host": "healthd.host.host",
    "NvmlError": "healthd.nvidia.nvml",
    "NvmlErrorKind": "healthd.nvidia.nvml",
    "NvmlGpu": "healthd.nvidia.nvml",
    "dataclass": "dataclasses",
    "PciFunction": "healthd.host.host",
    "ProgramResult": "healthd.host.program",
}

__all__ = [
    "NOT_IN_BASELINE",
    "NO_GPU",
    "NO_IB_PORT",
    "AbsolutePath",
    "AbsolutePathOrNone",
    "Baseline",
    "Bytes",
    "Celsius",
    "CheckConfig",
    "CheckSettings",
    "Clears",
    "Count",
    "Cpus",
    "Ends",
    "EndsJob",
    "Entry",
    "ExitStatus",
    "Explain",
    "FailureCause",
    "Finding",
    "Gbps",
    "Gib",
    "Gpu",
    "Gpus",
    "History",
    "Host",
    "Inventory",
    "KernelEvent",
    "Lanes",
    "LeftOut",
    "Links",
    "Mbps",
    "Meaning",
    "MigDevices",
    "Mtu",
    "NothingToCheck",
    "NvmlError",
    "NvmlErrorKind",
    "NvmlGpu",
    "Observation",
    "ObservationKind",
    "PciDevice",
    "PciFunction",
    "Percent",
    "Period",
    "Processes",
    "Program",
    "ProgramResult",
    "Rate",
    "Remedy",
    "Repair",
    "Seconds",
    "Severity",
    "Share",
    "Slowness",
    "SmallCount",
    "Times",
    "Watts",
    "WholeCelsius",
    "Worsens",
    "WorsensBy",
    "between",
    "compile_patterns_eagerly",
    "dataclass",
    "is_decimal",
    "printable",
    "regex",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"healthd.api has no name {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
