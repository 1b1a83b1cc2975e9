"""How many jobs that did what they should saw a failing check: what false alarms there may be.

A failing check is a condition that drains (degraded or critical). A job saw it when it began or became worse on one of
the job's nodes between the job's start and its end. What only stood there already is counted apart, and so is what
warns. Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680, section II.C): less than 1 % of the jobs that completed saw
a failed check. It is a correlation: the fault may be real, and the job one that did not need what broke.
"""

from __future__ import annotations

from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.evidence import evidence, standing
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.weeks import MONDAY, WEEK
from healthd.fleet.statistics.wilson import clumping, wilson

LIMIT = 0.01  # of the completed jobs: the paper's aim
LONGEST_DAYS = 366  # of a job that began longer before the time that is asked for, what it saw before is left out

# A job's nodes on each day of its run: bins that make the joins over times cheap. Most jobs have one day.
_PLACED = f"""
SELECT cluster, db_index, node, start_time, end_time, end_time // 86400 AS day
FROM job_nodes CROSS JOIN asked
WHERE
  end_time >= from_time AND end_time < to_time AND start_time <= end_time
  AND start_time // 86400 = end_time // 86400
UNION ALL
SELECT
  cluster, db_index, node, start_time, end_time,
  unnest(range(greatest(start_time, from_time - {LONGEST_DAYS} * 86400) // 86400, end_time // 86400 + 1))
FROM job_nodes CROSS JOIN asked
WHERE end_time >= from_time AND end_time < to_time AND start_time // 86400 < end_time // 86400
"""

# What each completed job saw: a row for each job, code and degree. life: the first of the conditions behind it.
_ALARMED = f"""
WITH looks AS (
  SELECT
    cluster, node, check_name, code, badness >= 2 AS failing, TRUE AS began, time AS first_time, time AS last_time,
    time // 86400 AS day, concat_ws(' ', cluster, node, code, subject, life) AS life
  FROM evidence WHERE badness >= 1
  UNION ALL
  SELECT
    cluster, node, check_name, code, TRUE, FALSE, from_time, to_time,
    unnest(range(from_time // 86400, to_time // 86400 + 1)),
    concat_ws(' ', cluster, node, code, subject, life)
  FROM standing
),
placed AS ({_PLACED}),
met AS (
  SELECT
    placed.cluster, placed.db_index, looks.check_name, looks.code, looks.failing, looks.began, looks.first_time,
    looks.life
  FROM placed
  JOIN looks
    ON looks.cluster = placed.cluster AND looks.node = placed.node AND looks.day = placed.day
    AND looks.first_time <= placed.end_time AND looks.last_time >= placed.start_time
)
SELECT
  cluster, db_index, check_name, code, failing, bool_or(began) AS began,
  arg_min(life, row(NOT began, first_time, life)) AS life
FROM met SEMI JOIN completed USING (cluster, db_index)
GROUP BY cluster, db_index, check_name, code, failing
"""

_COMPLETED = """
SELECT cluster, db_index, end_time FROM chosen_jobs CROSS JOIN asked
WHERE state = 'COMPLETED' AND end_time >= from_time AND end_time < to_time
"""

_PLACED_JOBS = "SELECT count(*) AS jobs FROM completed SEMI JOIN job_nodes USING (cluster, db_index)"

# Jobs with a node that was observed for less than half of a day on which they ran.
_UNSEEN = f"""
WITH unseen AS (
  SELECT cluster, node, day // 86400 AS day FROM observed WHERE observed_seconds * 2 < seconds
),
saw AS (SELECT DISTINCT cluster, db_index FROM alarmed WHERE failing AND began),
met AS (
  SELECT DISTINCT placed.cluster, placed.db_index
  FROM ({_PLACED}) AS placed SEMI JOIN unseen USING (cluster, node, day)
)
SELECT count(*) AS jobs, count(saw.db_index) AS alarmed
FROM completed SEMI JOIN met USING (cluster, db_index)
LEFT JOIN saw ON saw.cluster = completed.cluster AND saw.db_index = completed.db_index
"""

_COUNTED = """
WITH once AS (
  SELECT
    {by} cluster, db_index, bool_or(failing AND began) AS saw, bool_or(failing) AS there,
    min(life) FILTER (failing AND began) AS life
  FROM alarmed GROUP BY {by} cluster, db_index
),
clumps AS (SELECT {by} life, count(*) AS k FROM once WHERE saw GROUP BY {by} life)
SELECT
  {by} coalesce(any_value(clumped.alarms), 0) AS alarms, coalesce(any_value(clumped.squares), 0) AS squares,
  count(*) FILTER (saw) AS jobs, count(*) FILTER (there AND NOT saw) AS stood_jobs,
  count(*) FILTER (NOT there) AS warned_jobs
FROM once LEFT JOIN (
  SELECT {by} count(*) AS alarms, CAST(sum(k * k) AS BIGINT) AS squares FROM clumps GROUP BY ALL
) AS clumped {joined}
GROUP BY {grouped}
ORDER BY jobs DESC, stood_jobs DESC, warned_jobs DESC, {ordered}
"""

_BY_WEEK = f"""
SELECT
  greatest(week, from_time) AS week_time, (least(week + {WEEK}, to_time) - greatest(week, from_time)) / 86400 AS days,
  completed, jobs
FROM (
  SELECT
    CAST((end_time - {MONDAY}) // {WEEK} * {WEEK} + {MONDAY} AS BIGINT) AS week, count(*) AS completed,
    count(saw.db_index) AS jobs
  FROM completed
  LEFT JOIN (SELECT DISTINCT cluster, db_index FROM alarmed WHERE failing AND began) AS saw USING (cluster, db_index)
  GROUP BY week
) CROSS JOIN asked ORDER BY week_time
"""


def alarms(study: Study, *, limit: float = LIMIT) -> Document:
    """Of the jobs that completed in the time: how many saw a failing check, all together, per check and per code.

    limit: a check above this share of them is found. Raises Unanswerable without jobs, or where no source tells of
    conditions.
    """
    study.must_have("jobs", "job_nodes")
    if not study.has("scraped_conditions"):
        study.must_have("events")
    evidence(study)
    standing(study)
    study.need("observed")
    study.make("completed", _COMPLETED)
    study.make("alarmed", _ALARMED)
    completed = study.row("SELECT count(*) AS jobs FROM completed")["jobs"]
    placed, unseen = study.row(_PLACED_JOBS)["jobs"], study.row(_UNSEEN)
    all_checks = _counted(study)
    told = judged(all_checks[0] if all_checks else {}, placed)
    seen = placed - unseen["jobs"]
    notes = [
        "A completed job beside a failing check is a correlation: the fault may have been real, and the job one that "
        "did not need what broke.",
        *study.coverage_notes("jobs", "events"),
    ]
    if placed < completed:
        notes.append(f"{completed - placed:,} completed jobs are left out: on which nodes is not known.")
    return {
        **study.head("alarms", *notes),
        "limit": limit,
        "completed_jobs": completed,
        "placed_jobs": placed,
        **{key: told[key] for key in ("jobs", "share", "interval", "alarms", "stood_jobs", "warned_jobs")},
        "observed": {
            "jobs": seen,
            "alarmed": told["jobs"] - unseen["alarmed"],
            "share": share(told["jobs"] - unseen["alarmed"], seen),
        },
        "checks": by_check(_counted(study, "check_name"), _counted(study, "check_name", "code"), placed, limit),
        "by_week": [{**row, "share": share(row["jobs"], row["completed"])} for row in study.rows(_BY_WEEK)],
    }


def _counted(study: Study, *by: str) -> list[Row]:
    return study.rows(
        _COUNTED.format(
            by="".join(f"{name}, " for name in by),
            joined=f"USING ({', '.join(by)})" if by else "ON TRUE",
            grouped=", ".join(by) or "()",
            ordered=", ".join(by) or "1",
        )
    )


def judged(row: Row, completed: int) -> Row:
    """A row of counts with its share of the completed jobs and the interval of that, in which jobs that one condition
    met count as one clump. Pure."""
    jobs, squares = row.get("jobs", 0), row.get("squares", 0)
    interval = wilson(jobs, completed, clumping(jobs, squares))
    return {
        "jobs": jobs,
        "share": share(jobs, completed),
        "interval": None if interval is None else list(interval),
        **{key: row.get(key, 0) for key in ("alarms", "stood_jobs", "warned_jobs")},
    }


def by_check(checks: list[Row], codes: list[Row], completed: int, limit: float) -> list[Row]:
    """The checks with their codes, the most jobs first. above: more than `limit`; surely: the whole interval is.
    Pure."""
    found = []
    for row in checks:
        told = judged(row, completed)
        found.append(
            {
                "check": row["check_name"],
                **told,
                "above": (told["share"] or 0.0) > limit,
                "surely": told["interval"] is not None and told["interval"][0] > limit,
                "codes": [
                    {"code": one["code"], **judged(one, completed)}
                    for one in codes
                    if one["check_name"] == row["check_name"]
                ],
            }
        )
    return found


def found(alarms: Document) -> bool:
    """Whether a check is above the limit."""
    return any(row["above"] for row in alarms["checks"])
