"""Settings for the live process, which the daemon sends as JSON at startup and after a reload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from healthd.common.codec import load


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Settings from [checks.failslow] for the live process. A test checks that names and defaults match the check's.

    Attributes:
        client: True if jobs may report their steps.
        sample: counters to sample without the job's help: "nvlink", "pcie", "ib", "power".
        sample_seconds: interval between samples.
        slow_percent: slowdown at which a job's times are considered slow.
        counters_percent: the same limit for times from sampled counters.
        max_jobs, max_ranks: maximum number of monitored jobs on this node, and of ranks per job.
        restart_seconds: cost of a restart for a job; the job is advised to restart once it has lost that much time.
    """

    client: bool = False
    sample: tuple[str, ...] = ()
    sample_seconds: float = 0.5
    slow_percent: float = 10.0
    counters_percent: float = 20.0
    max_jobs: int = 16
    max_ranks: int = 128
    restart_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Locations:
    """Paths that the live process needs.

    Attributes:
        runtime_dir: the daemon's runtime directory.
        root: the folder that contains /proc and /sys ("/" is this machine).
        fake_nvml: a profile or scenario file that replaces the driver, "" for the real driver.
    """

    runtime_dir: str
    root: str = "/"
    fake_nvml: str = ""


def live_settings(table: Mapping[str, Any]) -> LiveSettings:
    """Return the settings that the live process needs from the check's table. Raises ConvertError."""
    names = {item.name for item in fields(LiveSettings)}
    return load(LiveSettings, {name: value for name, value in table.items() if name in names})
