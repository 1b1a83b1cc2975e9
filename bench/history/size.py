"""How large a history is, and when."""

from __future__ import annotations

import calendar
from dataclasses import dataclass

GPUS_OF_A_NODE = 8
NODES_OF_A_POD = 20  # behind one leaf switch: 10 racks of 2
FIRST = (2025, 12)  # the month that begins it
DAY = 86400
UTILISATION = 0.83
FULL = (4_000_000, 2_000, 11)  # jobs, nodes, months


@dataclass(frozen=True, slots=True)
class Size:
    """jobs    records that Slurm accounts, about: what is pre-empted and requeued comes by itself
    nodes   of 8 GPUs
    """

    jobs: int
    nodes: int
    months: int
    seed: int
    lemon_factors: tuple[float, float] = (5, 20)  # how many times as often as others they fail: from, to
    utilisation: float = UTILISATION  # share of the GPU time that jobs have
    fault_rate: float = 1.0  # how many times as often as BASE_RATE nodes fail

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
        """The time when that share of the history is over."""
        return self.start + int(share * (self.end - self.start))

    @property
    def gpu_hours_of_a_job(self) -> float:
        return self.utilisation * self.nodes * GPUS_OF_A_NODE * self.days * 24 / self.jobs


def node_name(index: int) -> str:
    return f"n{index + 1:04d}"


def nodes_for(jobs: int, months: int, utilisation: float = UTILISATION) -> int:
    """Return how many nodes have that utilisation with jobs as long as in the full size."""
    full_jobs, full_nodes, full_months = FULL
    return max(4, round(full_nodes * jobs * full_months / full_jobs / months * UTILISATION / utilisation))


def refusal(size: Size) -> str:
    """Why a history of this size cannot be made, or ""."""
    if size.jobs < 100 or size.nodes < 4 or not 1 <= size.months <= 120:
        return "a history needs 100 jobs, 4 nodes and 1 to 120 months at least"
    if not 5 <= size.gpu_hours_of_a_job <= 60:
        fitting = nodes_for(size.jobs, size.months, size.utilisation)
        return (
            f"{size.jobs} jobs on {size.nodes} nodes in {size.months} months are {size.gpu_hours_of_a_job:.1f} "
            f"GPU-hours a job, where 5 to 60 can be placed: {fitting} nodes would fit"
        )
    if not 0 < size.utilisation <= 0.95 or not 0 <= size.fault_rate <= 10:
        return "a history has a utilisation of 0 to 0.95 and a fault rate of 0 to 10"
    return ""
