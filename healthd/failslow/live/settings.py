"""What the live process is told at its start, and again after a reload: values that the daemon sends as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from healthd.common.codec import load


@dataclass(frozen=True, slots=True)
class Watched:
    """The settings of [checks.failslow] that the live process knows, with the names and defaults that they have there
    (a test holds them to be the same).

    client           jobs may tell their steps
    sample           what is sampled without a job's help: "nvlink", "pcie", "ib", "power"
    sample_seconds   how often
    slow_percent     a job's times count as slow from so much on
    counters_percent   the same for times that were seen in sampled counters
    max_jobs, max_ranks  so many jobs of this node are watched, and so many ranks of each
    restart_seconds  what a new start costs a job: its advice says so when as much is lost
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
class Place:
    """Where the live process is: the daemon's runtime directory, and the tree of /proc and /sys ("/" = this machine).
    fake_nvml: a profile or scenario file instead of the driver, "" = the real one."""

    runtime_dir: str
    root: str = "/"
    fake_nvml: str = ""


def watched(table: Mapping[str, Any]) -> Watched:
    """Of the check's whole table those settings that are needed here. Raises ConvertError."""
    names = {one.name for one in fields(Watched)}
    return load(Watched, {name: value for name, value in table.items() if name in names})
