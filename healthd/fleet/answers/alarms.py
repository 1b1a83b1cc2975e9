"""Completed jobs that saw a failing check: an upper bound on the number of false alarms.

A failing check is a condition that drains (degraded or critical). A job saw it if the condition began or became worse
on one of the job's nodes between the job's start and its end. Warnings and conditions that were already open are
counted separately. Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680, section II.C): less than 1 % of the jobs that
completed saw a failed check. This is only a correlation: the fault may be real even though the job completed, because
the job may not have used the faulty component.
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.wilson import design_effect, wilson

LIMIT = 0.01  # the paper's target, as a share of the completed jobs


class Jobs(NamedTuple):
    """A row returned by alarms_jobs.sql."""

    completed: int
    placed: int


class UnobservedJobs(NamedTuple):
    """A row returned by alarms_unobserved_jobs.sql."""

    jobs: int
    alarmed: int


class AlarmCounts(NamedTuple):
    """A row returned by alarms_counts.sql."""

    level: int
    check_name: str
    code: str
    alarms: int
    squares: int
    jobs: int
    already_open_jobs: int
    warned_jobs: int


class Week(NamedTuple):
    """A row returned by alarms_by_week.sql."""

    week_time: int
    days: float
    completed: int
    jobs: int


NO_ALARMS = AlarmCounts(0, "", "", 0, 0, 0, 0, 0)


def alarms(study: Study, *, limit: float = LIMIT) -> Document:
    """Count the completed jobs that saw a failing check, in total, for each check and for each code.

    Raises Unanswerable if there are no jobs or no source has conditions.

    Args:
        limit: largest acceptable share of jobs; a check above this share is a finding.
    """
    study.require("jobs", "job_nodes")
    if not study.has_rows("scraped_conditions"):
        study.require("events")
    (jobs,) = study.query("alarms_jobs", Jobs)
    (unobserved,) = study.query("alarms_unobserved_jobs", UnobservedJobs)
    counts = study.query("alarms_counts", AlarmCounts)
    overall, by_check_rows, by_code_rows = ([row for row in counts if row.level == level] for level in range(3))
    placed = jobs.placed
    total = counts_row(overall[0] if overall else NO_ALARMS, placed)
    observed = placed - unobserved.jobs
    notes = [
        "A failing check during a completed job is a correlation: the fault may have been real, because the job may "
        "not have used the faulty component.",
        *study.coverage_notes("jobs", "events"),
    ]
    if placed < jobs.completed:
        notes.append(f"{jobs.completed - placed:,} completed jobs are left out because their nodes are unknown.")
    return {
        **study.head("alarms", *notes),
        "limit": limit,
        "completed_jobs": jobs.completed,
        "placed_jobs": placed,
        **{key: total[key] for key in ("jobs", "share", "interval", "alarms", "already_open_jobs", "warned_jobs")},
        "observed": {
            "jobs": observed,
            "alarmed": total["jobs"] - unobserved.alarmed,
            "share": share(total["jobs"] - unobserved.alarmed, observed),
        },
        "checks": by_check(by_check_rows, by_code_rows, placed, limit),
        "by_week": [
            {**row._asdict(), "share": share(row.jobs, row.completed)} for row in study.query("alarms_by_week", Week)
        ],
    }


def counts_row(row: AlarmCounts, completed: int) -> Row:
    """Return the counts, the share of completed jobs for each count, and the confidence interval of the share.

    The interval treats all jobs that saw the same condition as one clump.
    """
    interval = wilson(row.jobs, completed, design_effect(row.jobs, row.squares))
    return {
        "jobs": row.jobs,
        "share": share(row.jobs, completed),
        "interval": None if interval is None else list(interval),
        "alarms": row.alarms,
        "already_open_jobs": row.already_open_jobs,
        "warned_jobs": row.warned_jobs,
    }


def by_check(checks: list[AlarmCounts], codes: list[AlarmCounts], completed: int, limit: float) -> list[Row]:
    """Return the checks with their codes. The check with the most jobs comes first.

    Keys:
        above: True if the share is more than `limit`.
        surely: True if the lower end of the interval is also above `limit`.
    """
    found = []
    for row in checks:
        counts = counts_row(row, completed)
        found.append(
            {
                "check": row.check_name,
                **counts,
                "above": (counts["share"] or 0.0) > limit,
                "significantly_above": counts["interval"] is not None and counts["interval"][0] > limit,
                "codes": [
                    {"code": code_row.code, **counts_row(code_row, completed)}
                    for code_row in codes
                    if code_row.check_name == row.check_name
                ],
            }
        )
    return found


def has_findings(alarms: Document) -> bool:
    """Return True if a check is above the limit."""
    return any(row["above"] for row in alarms["checks"])
