"""The jobs that the nodes ended: one rule for all answers that count them (states, goodput, rate, ettr, compare).

hardware_ends.sql has the rule and its source.
"""

from __future__ import annotations

from healthd.fleet.answers.study import Study

ENDED = ("node_fail", "failed", "requeued")
WORDS = dict(zip(ENDED, ("NODE_FAIL", "FAILED beside a failing check", "REQUEUED by healthd"), strict=True))


def loss(at_most_seconds: float) -> str:
    """SQL: the GPU-seconds of work that a row of `jobs` did in vain, min(runtime, at_most_seconds) * GPUs: half of the
    time between two checkpoints is lost on average. 0 of a job whose GPUs are not known. Source: the same paper, its
    lost goodput, with half an hour."""
    return f"coalesce(jobs.gpus * least(greatest(jobs.end_time - jobs.start_time, 0), {at_most_seconds}), 0)"


def notes(study: Study) -> list[str]:
    """What limits the table."""
    if study.has("events") or study.has("scraped_conditions"):
        return []
    return ["No health check is in the store: of what the hardware ended only NODE_FAIL is known."]
