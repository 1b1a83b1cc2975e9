"""Evidence from the nodes' event streams: completed checks, and conditions that may have slowed a job.

`healthd failslow --db` uses these conditions. A job may be slowed by conditions from the checks for throttling, clocks,
temperature, power, NVLink, PCIe, InfiniBand and the host, and from validations. Conditions that a user can forge or
that were logged before healthd started are excluded. A momentary event (an Xid) can explain slowness that begins up to
10 minutes later. Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680) use the same window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from healthd.common.text import printable
from healthd.fleet.answers.study import Study
from healthd.fleet.tables import TEXT

WINDOW_BEFORE_SECONDS = 600
# Checks whose findings can slow a job without ending it.
CHECKS = (
    *("gpu_clocks", "gpu_temperature", "gpu_power", "gpu_sm", "gpu_ecc", "gpu_row_remap", "gpu_xid", "gpu_processes"),
    *("gpu_nvlink", "gpu_fabric", "nvlink5", "sxid", "gpu_pcie", "pcie_link", "pcie_aer"),
    *("ib_errors", "ib_link", "ib_flap", "mlx5", "nic", "eth_link"),
    *("cpu", "memory_edac", "kernel", "processes", "validation"),
)


class CompletedRow(NamedTuple):
    """A row returned by completed_checks.sql. `checks` are names in double quotes, separated by commas."""

    cluster: str
    node: str
    checks: str
    node_days: int
    first_time: int


class CheckCompletion(NamedTuple):
    """The number of nodes and node-days on which a check completed, and the time of its first completion."""

    nodes: int
    node_days: int
    first_time: int


def completed_checks(study: Study) -> dict[str, CheckCompletion]:
    """Return the checks that completed on chosen nodes in the period, by name.

    If no stream was read, return an empty dict.
    """
    by_check: dict[str, list[CompletedRow]] = defaultdict(list)
    for row in study.query("completed_checks", CompletedRow):
        for name in row.checks.split(","):
            by_check[name.strip(' "')].append(row)
    return {
        check: CheckCompletion(
            len({(row.cluster, row.node) for row in rows}),
            sum(row.node_days for row in rows),
            min(row.first_time for row in rows),
        )
        for check, rows in sorted(by_check.items())
    }


class Slowing(NamedTuple):
    """A row returned by slowing_conditions.sql."""

    node: str
    code: str
    subject: str | None
    message: str | None
    first_time: int
    end_time: int | None


class SlowdownEvidence(NamedTuple):
    """A condition that may have slowed a job. Its fields are those of failslow.model.Evidence, in the same order.

    Attributes:
        begin, end: epoch seconds; end is None if still open.
        message: a sentence without a full stop.
    """

    node: str
    begin: float
    end: float | None
    code: str
    message: str


def slowdown_evidence(study: Study, nodes: Iterable[str]) -> list[SlowdownEvidence]:
    """Return the conditions on these nodes in the study's period, sorted by node and time.

    The list is empty if the store contains nothing about these nodes. The study should start WINDOW_BEFORE_SECONDS
    before the job. Raises StoreError for a damaged file.
    """
    study.add_table("named_nodes", {"node": TEXT}, ((node,) for node in sorted(set(nodes))))
    study.add_table("named_checks", {"check_name": TEXT}, ((check,) for check in CHECKS))
    return [
        SlowdownEvidence(
            row.node,
            float(row.first_time),
            None if row.end_time is None else float(row.end_time),
            row.code,
            printable(row.message or _describe_code(row.code, row.subject)).rstrip("."),
        )
        for row in study.query("slowing_conditions", Slowing, before_seconds=WINDOW_BEFORE_SECONDS)
    ]


def _describe_code(code: str, subject: str | None) -> str:
    text = code.partition("/")[2].replace("_", " ") or code
    return f"{text} on {subject}" if subject else text
