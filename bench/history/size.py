"""Size and period of a history."""

from __future__ import annotations

import calendar
from dataclasses import dataclass

GPUS_PER_NODE = 8
NODES_PER_POD = 20  # nodes behind one leaf switch: 10 racks of 2
FIRST = (2025, 12)  # the first month
DAY = 86400
UTILISATION = 0.83
FULL = (4_000_000, 2_000, 11)  # full size: jobs, nodes, months


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters of a history.

    jobs    approximate number of accounting records; pre-emptions and requeues add some
    nodes   number of nodes, with 8 GPUs each
    """

    jobs: int
    nodes: int
    months: int
    seed: int
    lemon_factors: tuple[float, float] = (5, 20)  # range of the factor on the fault rate of lemons
    utilisation: float = UTILISATION  # share of the GPU time used by jobs
    fault_rate: float = 1.0  # factor for BASE_RATE

    @property
    def start(self) -> int:
        return calendar.timegm((*FIRST, 1, 0, 0, 0))

    @property
    def end(self) -> int:
        months = FIRST[1] - 1 + self.months
        return calendar.timegm((FIRST[0] + months // 12, months % 12 + 1, 1, 0, 0, 0))

    @property
    def days(self) -> int:
        return (self.end - self.start) // DAY

    def at(self, share: float) -> int:
        """Return the time at which the given share of the history is over."""
        return self.start + int(share * (self.end - self.start))

    @property
    def gpu_hours_per_job(self) -> float:
        return self.utilisation * self.nodes * GPUS_PER_NODE * self.days * 24 / self.jobs


def node_name(index: int) -> str:
    return f"n{index + 1:04d}"


def nodes_for(jobs: int, months: int, utilisation: float = UTILISATION) -> int:
    """Return the number of nodes that gives this utilisation if jobs are as long as in the full size."""
    full_jobs, full_nodes, full_months = FULL
    return max(4, round(full_nodes * jobs * full_months / full_jobs / months * UTILISATION / utilisation))


def refusal(size: Size) -> str:
    """Return why a history of this size cannot be generated, or ""."""
    if size.jobs < 100 or size.nodes < 4 or not 1 <= size.months <= 120:
        return "a history needs at least 100 jobs and 4 nodes, and 1 to 120 months"
    if not 5 <= size.gpu_hours_per_job <= 60:
        fitting = nodes_for(size.jobs, size.months, size.utilisation)
        return (
            f"{size.jobs} jobs on {size.nodes} nodes in {size.months} months are {size.gpu_hours_per_job:.1f} "
            f"GPU-hours per job, and only 5 to 60 can be placed: {fitting} nodes would fit"
        )
    if not 0 < size.utilisation <= 0.95 or not 0 <= size.fault_rate <= 10:
        return "the utilisation must be above 0 and at most 0.95, and the fault rate 0 to 10"
    return ""
