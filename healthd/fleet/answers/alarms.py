"""Completed jobs that saw a failing check: an upper estimate of false alarms.

A failing check is a condition that drains (degraded or critical). A job saw it if the condition began or became worse
on one of the job's nodes between the job's start and its end. Conditions that were already open, and warnings, are
counted separately. Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680, section II.C): less than 1 % of the jobs that
completed saw a failed check. It is a correlation: the fault may be real, and the job may not have needed the broken
part.
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.wilson import clumping, wilson

LIMIT = 0.01  # share of the completed jobs: the paper's aim


class Jobs(NamedTuple):
    """Columns of alarms_jobs.sql."""

    completed: int
    placed: int


class Unseen(NamedTuple):
    """Columns of alarms_unseen.sql."""

    jobs: int
    alarmed: int


class Counted(NamedTuple):
    """Columns of alarms_counted.sql."""

    level: int
    check_name: str
    code: str
    alarms: int
    squares: int
    jobs: int
    already_open_jobs: int
    warned_jobs: int


class Week(NamedTuple):
    """Columns of alarms_by_week.sql."""

    week_time: int
    days: float
    completed: int
    jobs: int


NOTHING = Counted(0, "", "", 0, 0, 0, 0, 0)


def alarms(study: Study, *, limit: float = LIMIT) -> Document:
    """Return how many of the completed jobs saw a failing check: in total, per check and per code.

    limit: a check above this share is a finding. Raises Unanswerable without jobs, or if no source has conditions.
    """
    study.must_have("jobs", "job_nodes")
    if not study.has("scraped_conditions"):
        study.must_have("events")
    (jobs,) = study.ask("alarms_jobs", Jobs)
    (unseen,) = study.ask("alarms_unseen", Unseen)
    counted = study.ask("alarms_counted", Counted)
    of_all, of_checks, of_codes = ([row for row in counted if row.level == level] for level in range(3))
    placed = jobs.placed
    found = judged(of_all[0] if of_all else NOTHING, placed)
    seen = placed - unseen.jobs
    notes = [
        "A failing check during a completed job is a correlation: the fault may have been real, and the job may not "
        "have needed the broken part.",
        *study.coverage_notes("jobs", "events"),
    ]
    if placed < jobs.completed:
        notes.append(f"{jobs.completed - placed:,} completed jobs are left out: their nodes are not known.")
    return {
        **study.head("alarms", *notes),
        "limit": limit,
        "completed_jobs": jobs.completed,
        "placed_jobs": placed,
        **{key: found[key] for key in ("jobs", "share", "interval", "alarms", "already_open_jobs", "warned_jobs")},
        "observed": {
            "jobs": seen,
            "alarmed": found["jobs"] - unseen.alarmed,
            "share": share(found["jobs"] - unseen.alarmed, seen),
        },
        "checks": by_check(of_checks, of_codes, placed, limit),
        "by_week": [
            {**row._asdict(), "share": share(row.jobs, row.completed)} for row in study.ask("alarms_by_week", Week)
        ],
    }


def judged(row: Counted, completed: int) -> Row:
    """Return the counts with their share of the completed jobs and its interval.

    Jobs that saw the same condition count as one clump in the interval. Pure.
    """
    interval = wilson(row.jobs, completed, clumping(row.jobs, row.squares))
    return {
        "jobs": row.jobs,
        "share": share(row.jobs, completed),
        "interval": None if interval is None else list(interval),
        "alarms": row.alarms,
        "already_open_jobs": row.already_open_jobs,
        "warned_jobs": row.warned_jobs,
    }


def by_check(checks: list[Counted], codes: list[Counted], completed: int, limit: float) -> list[Row]:
    """Return the checks with their codes, sorted by the number of jobs, largest first. Pure.

    above   the share is more than `limit`
    surely  the whole interval is above `limit`
    """
    found = []
    for row in checks:
        counts = judged(row, completed)
        found.append(
            {
                "check": row.check_name,
                **counts,
                "above": (counts["share"] or 0.0) > limit,
                "significantly_above": counts["interval"] is not None and counts["interval"][0] > limit,
                "codes": [
                    {"code": one.code, **judged(one, completed)} for one in codes if one.check_name == row.check_name
                ],
            }
        )
    return found


def found(alarms: Document) -> bool:
    """Return True if a check is above the limit."""
    return any(row["above"] for row in alarms["checks"])
