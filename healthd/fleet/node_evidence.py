"""What nodes told, as root, of what slows a job that runs on them: the evidence of the fleet's store for `failslow`.

Conditions of the checks that see throttling, clocks, heat, power, NVLink, PCIe, InfiniBand and the host, and of
validations; not what a user can forge, nor what was in the log before healthd came. What happened at a moment (an Xid)
may have slowed what begins up to 10 minutes later: the window of Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from healthd.common.text import printable
from healthd.fleet.answers.study import Study

BEFORE_SECONDS = 600
# Checks whose findings can make a job slower and leave it running.
CHECKS = (
    *("gpu_clocks", "gpu_temperature", "gpu_power", "gpu_sm", "gpu_ecc", "gpu_row_remap", "gpu_xid", "gpu_processes"),
    *("gpu_nvlink", "gpu_fabric", "nvlink5", "sxid", "gpu_pcie", "pcie_link", "pcie_aer"),
    *("ib_errors", "ib_link", "ib_flap", "mlx5", "nic", "eth_link"),
    *("cpu", "memory_edac", "kernel", "processes", "validation"),
)

# A level that was not cleared stands: a node tells when it ends. What was scraped was seen until then, and no longer.
# A clock that was set back may tell of an end before its beginning.
_TOLD = """
WITH said AS (
  SELECT node, condition_id, arg_max(message, row(time, seq)) AS message
  FROM events WHERE message IS NOT NULL AND condition_id IS NOT NULL GROUP BY node, condition_id
)
SELECT
  conditions.node, conditions.code, conditions.subject, said.message, conditions.first_time,
  CASE
    WHEN conditions.kind = 'edge' THEN greatest(conditions.last_time, conditions.first_time) + {before}
    WHEN conditions.cleared_time IS NOT NULL THEN greatest(conditions.cleared_time, conditions.first_time)
    WHEN conditions.origin = 'scraped' THEN conditions.last_time
  END AS end_time
FROM conditions
LEFT JOIN said ON said.node = conditions.node AND said.condition_id = conditions.condition_id
SEMI JOIN chosen_nodes ON chosen_nodes.cluster = conditions.cluster AND chosen_nodes.node = conditions.node
WHERE list_contains(string_split(?, ' '), conditions.node)
  AND list_contains(string_split(?, ' '), conditions.check_name)
  AND conditions.severity <> 'info' AND NOT coalesce(conditions.observed, FALSE)
  AND NOT coalesce(conditions.history, FALSE)
ORDER BY conditions.node, conditions.first_time, conditions.code, conditions.subject, end_time
"""


class Told(NamedTuple):
    """begin, end: epoch seconds, end None while it stands. what: a sentence without its end. The fields of
    failslow.model.Evidence, in its order."""

    node: str
    begin: float
    end: float | None
    code: str
    what: str


def told_by(study: Study, nodes: Iterable[str]) -> list[Told]:
    """What these nodes told of the time that the study is open for, by node and time. Nothing if the store knows
    nothing of them; it should be open from BEFORE_SECONDS before the job on. Raises StoreError for a damaged file."""
    study.need("conditions")
    rows = study.rows(_TOLD.format(before=BEFORE_SECONDS), " ".join(sorted(set(nodes))), " ".join(CHECKS))
    return [
        Told(
            row["node"],
            float(row["first_time"]),
            None if row["end_time"] is None else float(row["end_time"]),
            row["code"],
            printable(row["message"] or _plainly(row["code"], row["subject"])).rstrip("."),
        )
        for row in rows
    ]


def _plainly(code: str, subject: str | None) -> str:
    what = code.partition("/")[2].replace("_", " ") or code
    return f"{what} of {subject}" if subject else what
