"""Finds the jobs that nodes ended. The answers states, goodput, rate, ettr and compare all use this rule.

hardware_ends.sql contains the rule and its source.
"""

from __future__ import annotations

from healthd.fleet.answers.study import Study

END_KINDS = ("node_fail", "failed", "requeued")
END_LABELS = dict(zip(END_KINDS, ("NODE_FAIL", "FAILED with a failing check", "REQUEUED by healthd"), strict=True))


def notes(study: Study) -> list[str]:
    """Return sentences about the limits of this rule."""
    if study.has_rows("events") or study.has_rows("scraped_conditions"):
        return []
    return ["The store has no health checks, so only NODE_FAIL shows which jobs the hardware ended."]
