"""A measured figure, which is one row of the table, and the description of the machine."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table.

    If `values` is empty, the figure was not measured, and `name` has the reason. `aim`: the median must be below it
    (None: no target; 0: the median must be 0).
    """

    name: str
    unit: str
    values: list[float]
    aim: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else math.nan

    @property
    def met(self) -> bool:
        return self.aim is None or self.median < self.aim or self.median == self.aim == 0


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.strip()
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; {platform.system()} "
        f"{platform.release()}; Python {platform.python_version()}; {slurm}"
    )


def table(figures: Sequence[Figure]) -> str:
    width = max((len(figure.name) for figure in figures if figure.values), default=0)
    lines = [f"{'':{width}}  {'median':>8} {'min':>8} {'max':>8}  {'':4} {'n':>3}  aim"]
    for figure in figures:
        if not figure.values:
            lines.append(figure.name)
            continue
        numbers = " ".join(f"{number:8.1f}" for number in (figure.median, min(figure.values), max(figure.values)))
        aim = "" if figure.aim is None else f"under {figure.aim:g}" if figure.aim else "none"
        verdict = "" if figure.met else "  MISSED"
        row = f"{figure.name:{width}}  {numbers}  {figure.unit:4} {len(figure.values):3}  {aim}{verdict}"
        lines.append(row.rstrip())
    return "\n".join(lines)
