"""What counts as evidence that something on a node broke: made once in a study, for all answers."""

from __future__ import annotations

from healthd.fleet.answers.study import Row, Study

# How bad a sight was, as a number: what fails drains.
BADNESS = {"info": 0, "warning": 1, "degraded": 2, "critical": 3}
FAILING = 2

# A moment at which something began or became worse: an edge when it was seen, a level at its onset and its growth, as
# in the question seen_with_failures. What a user can forge and what was in the log before healthd came is none.
_EVIDENCE = """
SELECT
  cluster, node, coalesce(check_name, split_part(code, '/', 1)) AS check_name, code, subject, kind, time, origin,
  CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 ELSE 0 END AS badness,
  coalesce(condition_id, CAST(time AS VARCHAR)) AS life
FROM sights
WHERE (kind = 'edge' OR what IN ('onset', 'growth'))
  AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE)
  AND node IS NOT NULL AND code IS NOT NULL
"""

# From when to when a level was seen failing: docs/events.md, "it was there from `first` to `last`".
_STANDING = """
SELECT
  cluster, node, coalesce(min(check_name), split_part(code, '/', 1)) AS check_name, code, subject, condition_id AS life,
  min(time) AS from_time, max(time) AS to_time
FROM sights
WHERE origin = 'events' AND kind = 'level' AND severity IN ('degraded', 'critical')
  AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE) AND node IS NOT NULL AND code IS NOT NULL
GROUP BY cluster, node, code, subject, condition_id
UNION ALL
SELECT
  cluster, node, coalesce(check_name, split_part(code, '/', 1)), code, subject, CAST(first_time AS VARCHAR),
  coalesce(worst_time, first_time), greatest(first_time, last_time)
FROM scraped_conditions
WHERE severity IN ('degraded', 'critical') AND NOT coalesce(observed, FALSE) AND node IS NOT NULL AND code IS NOT NULL
"""


# Which checks completed: the list in a node's first `alive` of each day, cut out of its JSON. (A quote inside a text is
# written \\", so that the list begins nowhere else.) There are few different lists.
_LOOKED = r"""
WITH alive AS (
  SELECT
    cluster, node, time // 86400 AS day, min(time) AS first_time,
    regexp_extract(arg_min(rest, row(time, stream_id, seq)), '"checks":\s*\[([^\]]*)\]', 1) AS checks
  FROM events SEMI JOIN chosen_nodes USING (cluster, node) CROSS JOIN asked
  WHERE event = 'alive' AND time >= from_time AND time < to_time
  GROUP BY cluster, node, time // 86400
),
by_node AS (
  SELECT checks, cluster, node, count(*) AS node_days, min(first_time) AS first_time
  FROM alive WHERE checks <> '' GROUP BY checks, cluster, node
),
split AS (
  SELECT checks, trim(unnest(string_split(checks, ',')), ' "') AS "check" FROM (SELECT DISTINCT checks FROM by_node)
)
SELECT
  "check", count(DISTINCT (cluster, node)) AS nodes, CAST(sum(node_days) AS BIGINT) AS node_days,
  min(first_time) AS first_time
FROM by_node JOIN split USING (checks)
GROUP BY "check"
"""


def evidence(study: Study) -> None:
    """The table `evidence`: cluster, node, check_name, code, subject, kind, time, origin, badness (as BADNESS), life
    (which condition it is of). Of the whole store, and of all nodes."""
    study.need("sights")
    study.make("evidence", _EVIDENCE)


def standing(study: Study) -> None:
    """The table `standing`: cluster, node, check_name, code, subject, life, from_time, to_time of what fails as a
    level."""
    study.need("sights")
    study.make("standing", _STANDING)


def looked_at(study: Study) -> list[Row]:
    """check, nodes, node_days, first_time of each check that a node's stream (`alive`) names as one that completed:
    chosen nodes, in the time that is asked for. Nothing, where no stream was read."""
    study.make("looked", _LOOKED)
    return study.rows('SELECT "check", nodes, node_days, first_time FROM looked ORDER BY "check"')
