"""Jobs that nodes ended: one rule for all answers that count them (states, goodput, rate, ettr, compare).

hardware_ends.sql has the rule and its source.
"""

from __future__ import annotations

from healthd.fleet.answers.study import Study

ENDED = ("node_fail", "failed", "requeued")
WORDS = dict(zip(ENDED, ("NODE_FAIL", "FAILED with a failing check", "REQUEUED by healthd"), strict=True))


def notes(study: Study) -> list[str]:
    """Return the limits of the table as sentences."""
    if study.has("events") or study.has("scraped_conditions"):
        return []
    return ["The store has no health checks: only NODE_FAIL shows which jobs the hardware ended."]
