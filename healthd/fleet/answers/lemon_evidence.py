"""What speaks against a node: jobs that failed by it, conditions, times out of service, tickets. SQL first, then pure.

A failure of many nodes' jobs is its culprit's alone: of NODE_FAIL the node that went DOWN then, else the nodes on which
a condition was seen in [end - 10 min, end + 5 min]: the window of Kokolis, Kuchnik et al. (HPCA 2025, arXiv
2410.21680).
Several culprits share it; where none is known all nodes share it, and below LEAST_SHARE nothing is made of it. A user's
mistake is no node's: FAILED counts only with a condition that drains (degraded or critical), seen on this node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.lemon_score import Sign, Spell

BEFORE_SECONDS, AFTER_SECONDS = 600, 300
LEAST_SHARE = 0.1
# NODE_FAILs of one job by so many nodes: the job kills them (a crash loop), and all are one evidence.
LOOP_NODES = 3

Key = tuple[str, str]  # cluster, node


@dataclass(frozen=True, slots=True)
class Evidence:
    """kind: failed (a job), out (of service), condition, ticket, failure (of another tool). code: of a condition;
    how it was taken out (a code of ours, "down", "person", "unknown"). weight: 0 to 1, that it is this node's failure.
    words: what others wrote. gpus, nodes: of the job."""

    kind: str
    start_time: int
    end_time: int
    code: str
    weight: float
    words: str = ""
    job_id: int | None = None
    db_index: int | None = None
    state: str = ""
    gpus: int | None = None
    nodes: int | None = None

    @property
    def sign(self) -> Sign:
        return Sign(self.start_time, self.end_time, self.weight)


@dataclass(frozen=True, slots=True)
class Outage:
    """A spell out of service. end_time: None = not yet. by_whom: healthd, slurm, person, unknown."""

    start_time: int
    end_time: int | None
    code: str
    by_whom: str
    reason: str


# --- what is asked of the store; {begin}, {end}: epoch seconds

# Moments that may have ended a job: what was seen on a node, and when Slurm noted it as down or drained.
_HITS = """
SELECT cluster, node, time, code, severity, 'condition' AS kind
FROM sights
WHERE severity IN ('degraded', 'critical') AND (kind = 'edge' OR what IN ('onset', 'growth'))
  AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE) AND time >= {begin} AND time < {end}
UNION ALL
SELECT cluster, node, start_time, coalesce(reason, ''), CASE WHEN state LIKE '%DOWN%' THEN 'down' ELSE 'drain' END,
  coalesce(set_by, 'unknown')
FROM node_states WHERE node IS NOT NULL AND start_time >= {begin} AND start_time < {end}
"""
_BINNED = """
SELECT lemon_hits.*, (time - {after}) // {width} + numbers.n AS bin
FROM lemon_hits CROSS JOIN numbers WHERE numbers.n < 2
"""
# end in [time - after, time + before] is time in [end - before, end + after].
_MET = """
SELECT jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, jobs.nodes, met.node, met.time,
  met.code, met.severity, met.kind
FROM (
  SELECT job_nodes.cluster, job_nodes.db_index, job_nodes.node, hits.time, hits.code, hits.severity, hits.kind
  FROM job_nodes JOIN lemon_hits_binned AS hits
    ON hits.cluster = job_nodes.cluster AND hits.node = job_nodes.node AND hits.bin = job_nodes.end_time // {width}
    AND job_nodes.end_time BETWEEN hits.time - {after} AND hits.time + {before}
  WHERE job_nodes.end_time >= {begin} - {after} AND job_nodes.end_time < {end}
) AS met
JOIN jobs ON jobs.cluster = met.cluster AND jobs.db_index = met.db_index
WHERE jobs.state IN ('FAILED', 'NODE_FAIL', 'REQUEUED') AND jobs.end_time < {end}
ORDER BY ALL
"""
# Each moment, and whether a job was on the node then: `until` is the latest end of the jobs that started before.
_MOMENTS = """
WITH started AS (
  SELECT cluster, node, start_time, max(coalesce(end_time, {end})) AS end_time
  FROM job_nodes SEMI JOIN lemon_hits USING (cluster, node)
  WHERE start_time < {end} AND coalesce(end_time, {end}) >= {begin} - {after} GROUP BY cluster, node, start_time
), busy AS (
  SELECT cluster, node, start_time,
    max(end_time) OVER (PARTITION BY cluster, node ORDER BY start_time ROWS UNBOUNDED PRECEDING) AS until
  FROM started
), moments AS (
  SELECT DISTINCT cluster, node, time, code, severity, kind FROM lemon_hits
)
SELECT moments.cluster, moments.node, moments.time, moments.code, moments.severity, moments.kind,
  coalesce(busy.until >= moments.time - {after}, FALSE) AS busy
FROM moments ASOF LEFT JOIN busy
  ON moments.cluster = busy.cluster AND moments.node = busy.node AND moments.time >= busy.start_time
ORDER BY ALL
"""
_NODE_FAILS = """
SELECT jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, jobs.nodes, job_nodes.node
FROM jobs JOIN job_nodes ON job_nodes.cluster = jobs.cluster AND job_nodes.db_index = jobs.db_index
WHERE jobs.state = 'NODE_FAIL' AND jobs.end_time >= {begin} AND jobs.end_time < {end} ORDER BY ALL
"""
_STATES = """
SELECT cluster, node, start_time, end_time, coalesce(state, '') AS state, coalesce(reason, '') AS reason,
  coalesce(set_by, 'unknown') AS by_whom
FROM node_states WHERE node IS NOT NULL AND start_time < {end} AND coalesce(end_time, {end}) > {begin} ORDER BY ALL
"""
_DRAINS = """
SELECT cluster, node, start_time, end_time, 'DRAIN' AS state, reason, 'healthd' AS by_whom FROM (
  SELECT cluster, node, time AS start_time, event, coalesce(reason, '') AS reason,
    lead(time) OVER (PARTITION BY cluster, node ORDER BY time, stream_id, seq) AS end_time
  FROM lines WHERE event IN ('drain', 'resume') AND stage = 'confirmed'
) WHERE event = 'drain' AND start_time < {end} AND coalesce(end_time, {end}) > {begin} ORDER BY ALL
"""
_MAINTENANCE = """
SELECT cluster, node, start_time, end_time FROM reservations
WHERE maintenance AND node IS NOT NULL AND start_time < {end} AND coalesce(end_time, {end}) > {begin} ORDER BY ALL
"""
_TICKETS = """
SELECT cluster, node, opened_time, closed_time, coalesce(words, '') AS words FROM tickets
WHERE node IS NOT NULL AND opened_time >= {begin} AND opened_time < {end} ORDER BY ALL
"""
_FAILURES = """
SELECT cluster, node, time, coalesce(kind, '') AS kind FROM failures
WHERE node IS NOT NULL AND time >= {begin} AND time < {end} ORDER BY ALL
"""
_FIRST_SEEN = """
SELECT cluster, node, CAST(min(t) AS BIGINT) AS first_time FROM (
  SELECT cluster, node, min(start_time) AS t FROM job_nodes WHERE start_time > 0 GROUP BY cluster, node
  UNION ALL SELECT cluster, node, min(time) FROM events WHERE cluster <> '' GROUP BY cluster, node
) WHERE t IS NOT NULL GROUP BY cluster, node
"""
_BEGINS = """
SELECT cluster, CAST(min(t) AS BIGINT) AS first_time FROM (
  SELECT cluster, min(start_time) AS t FROM jobs WHERE start_time > 0 GROUP BY cluster
  UNION ALL SELECT cluster, min(time) FROM events GROUP BY cluster
  UNION ALL SELECT cluster, min(start_time) FROM node_states WHERE start_time > 0 GROUP BY cluster
  UNION ALL SELECT cluster, min(time) FROM failures GROUP BY cluster
) WHERE t IS NOT NULL GROUP BY cluster
"""


@dataclass(frozen=True, slots=True)
class Known:
    """Of all nodes: what speaks against each, its outages, and since when it is known (a cluster's beginning where
    only failures tell of a node: else it would be known from its first failure on)."""

    evidence: dict[Key, list[Evidence]]
    outages: dict[Key, list[Outage]]
    first_seen: dict[Key, int]
    begins: dict[str, int]


def known(study: Study, begin: int, end: int) -> Known:
    """What the store tells of [begin, end), epoch seconds."""
    study.need("sights")
    places = {
        "begin": begin,
        "end": end,
        "before": BEFORE_SECONDS,
        "after": AFTER_SECONDS,
        "width": BEFORE_SECONDS + AFTER_SECONDS,
    }
    study.make("lemon_hits", _HITS.format(**places))
    study.make("lemon_hits_binned", _BINNED.format(**places))
    met, node_fails, states, drains, maintenance, tickets, failures = (
        study.rows(sql.format(**places))
        for sql in (_MET, _NODE_FAILS, _STATES, _DRAINS, _MAINTENANCE, _TICKETS, _FAILURES)
    )
    hits = study.rows(_MOMENTS.format(**places))
    outages = outages_of([*states, *drains], maintenance)
    shares = came_with_failures(hits, met)
    jobs = culprits(met, node_fails)
    found: dict[Key, list[Evidence]] = defaultdict(list)
    for key, of_node in (
        *jobs.items(),
        *((key, conditions(rows, shares)) for key, rows in _by_node(hits).items()),
        *((key, taken_out(spells, jobs.get(key, []), shares, end)) for key, spells in outages.items()),
        *((key, [_ticket(row) for row in rows]) for key, rows in _by_node(tickets).items()),
        *((key, [_other(row) for row in rows]) for key, rows in _by_node(failures).items()),
    ):
        found[key] += of_node
    return Known(
        dict(found),
        outages,
        {(row["cluster"], row["node"]): row["first_time"] for row in study.rows(_FIRST_SEEN)},
        {row["cluster"]: row["first_time"] for row in study.rows(_BEGINS)},
    )


# --- pure


def _by_node(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["cluster"], row["node"]].append(row)
    return found


def code_of(state: str, reason: str, by_whom: str) -> str:
    """How a node was taken out: our code ("gpu_xid/79"), "down", or who did it."""
    if "DOWN" in state:
        return "down"
    if by_whom == "healthd":
        first = reason.removeprefix("healthd: ").split(" ", 1)[0].rstrip(":")
        return first if "/" in first else "healthd"
    return by_whom


def outages_of(states: Iterable[Row], maintenance: Iterable[Row]) -> dict[Key, list[Outage]]:
    """Spells apart: records that overlap or touch are one, named by its first; a node that went DOWN in it is "down".
    What lies in a reservation for maintenance is none."""
    planned = _by_node(maintenance)
    found: dict[Key, list[Outage]] = {}
    for key, rows in _by_node(states).items():
        spells: list[Outage] = []
        for row in sorted(rows, key=lambda row: (row["start_time"], row["by_whom"], row["state"], row["reason"])):
            start, end = row["start_time"], row["end_time"]
            if any(_within(start, end, one) for one in planned.get(key, ())):
                continue
            code = code_of(row["state"], row["reason"], row["by_whom"])
            last = spells[-1] if spells else None
            if last is not None and (last.end_time is None or start <= last.end_time):
                until = None if None in (last.end_time, end) else max(last.end_time or 0, end or 0)
                code = "down" if "down" in (code, last.code) and last.by_whom != "person" else last.code
                spells[-1] = replace(last, end_time=until, code=code)
            else:
                spells.append(Outage(start, end, code, row["by_whom"], row["reason"]))
        if spells:
            found[key] = spells
    return found


def _within(start: int, end: int | None, planned: Row) -> bool:
    until = planned["end_time"]
    return planned["start_time"] <= start and (until is None or (start < until and (end is None or end <= until)))


def came_with_failures(hits: Iterable[Row], met: Iterable[Row]) -> dict[str, float]:
    """Return for each code how often a job of the node failed when it was seen or the node was drained for it.

    A code that is never seen beside a failure (a slow link, a person who inspects a fan) is weak evidence of a failing
    node. Moments without a job on the node do not count: the same fault fails no job on an idle node, and an idle fleet
    would give each code a low share. Drains by people count always, since people prefer idle nodes for their work.
    Laplace's rule, (k + 1) / (n + 2): 1/2 if nothing is known."""
    seen: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    failed: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    for rows, into in ((hits, seen), (met, failed)):
        for row in rows:
            code = _code(row)
            seen.setdefault(code, set())
            if into is failed or row["busy"] or code == "person":
                # Count once per node and day: a condition may be seen every minute.
                into[code].add((row["cluster"], row["node"], row["time"] // 86400))
    return {code: (len(failed[code]) + 1) / (len(those | failed[code]) + 2) for code, those in seen.items()}


def _code(hit: Row) -> str:
    if hit["kind"] == "condition":
        return str(hit["code"])
    return code_of("DOWN" if hit["severity"] == "down" else "", hit["code"], hit["kind"])


def culprits(met: Iterable[Row], node_fails: Iterable[Row]) -> dict[Key, list[Evidence]]:
    """The failed jobs, each with the nodes that did it, of equal shares."""
    blamed: dict[tuple[str, int], dict[str, Row]] = defaultdict(dict)
    for row in met:
        if _blames(row):
            of_job = blamed[row["cluster"], row["db_index"]]
            if row["node"] not in of_job or _strength(row) < _strength(of_job[row["node"]]):
                of_job[row["node"]] = row
    for row in node_fails:
        of_job = blamed[row["cluster"], row["db_index"]]
        if all(other["kind"] == "unknown" for other in of_job.values()):
            of_job[row["node"]] = {**row, "kind": "unknown", "code": "", "severity": "", "time": row["end_time"]}
    for job, of_job in blamed.items():
        if any(row["severity"] == "down" for row in of_job.values()):
            blamed[job] = {node: row for node, row in of_job.items() if row["severity"] == "down"}
    loops: dict[tuple[str, int], set[str]] = defaultdict(set)
    for (cluster, _), of_job in blamed.items():
        for node, row in of_job.items():
            if row["severity"] == "down" and (row["nodes"] or 0) > 1:
                loops[cluster, row["job_id"]].add(node)
    found: dict[Key, list[Evidence]] = defaultdict(list)
    for (cluster, _), of_job in sorted(blamed.items()):
        for node, row in sorted(of_job.items()):
            killed = len(loops[cluster, row["job_id"]])
            share = 1 / len(of_job) / (killed if killed >= LOOP_NODES else 1)
            if share >= LEAST_SHARE:
                found[cluster, node].append(_failed(row, share))
            elif killed >= LOOP_NODES:
                found[cluster, node].append(_failed(row, 0.0))
    return dict(found)


def _blames(row: Row) -> bool:
    """Whether this moment can have ended that job: a drain by a person did not."""
    if row["kind"] != "condition":
        return bool(row["severity"] == "down" and row["state"] in ("NODE_FAIL", "REQUEUED"))
    return bool(row["state"] != "REQUEUED" or row["severity"] == "critical")


def _strength(row: Row) -> tuple[int, int, str]:
    return {"down": 0, "critical": 1, "degraded": 2}[row["severity"]], row["time"], row["code"]


def _failed(row: Row, share: float) -> Evidence:
    return Evidence(
        "failed",
        row["end_time"],
        row["end_time"],
        "down" if row["severity"] == "down" else row["code"],
        share,
        job_id=row["job_id"],
        db_index=row["db_index"],
        state=row["state"],
        gpus=row["gpus"],
        nodes=row["nodes"],
    )


def conditions(hits: Iterable[Row], shares: Mapping[str, float]) -> list[Evidence]:
    return [
        Evidence("condition", row["time"], row["time"], row["code"], shares[row["code"]])
        for row in hits
        if row["kind"] == "condition"
    ]


def taken_out(
    outages: Iterable[Outage], failed: Iterable[Evidence], shares: Mapping[str, float], end: int
) -> list[Evidence]:
    """A node that went down failed, whether or not a job was on it; but one that a job killed in its loop has no more
    weight than the job gives it."""
    loops = [one for one in failed if one.code == "down"]
    found = []
    for outage in outages:
        weight = 1.0 if outage.code == "down" else shares.get(outage.code, 0.5)
        same = [one.weight for one in loops if -BEFORE_SECONDS <= one.start_time - outage.start_time <= BEFORE_SECONDS]
        if outage.code == "down" and same:
            weight = max(same)
        until = outage.end_time if outage.end_time is not None else end
        found.append(Evidence("out", outage.start_time, until, outage.code, weight, outage.reason))
    return found


def _ticket(row: Row) -> Evidence:
    # How often tickets are a node's own failure no store tells; one that is comes with a failure or an outage.
    return Evidence("ticket", row["opened_time"], row["opened_time"], "ticket", 0.0, row["words"])


def _other(row: Row) -> Evidence:
    return Evidence("failure", row["time"], row["time"], row["kind"], 1.0)


def in_service(first_seen: int, end: int, outages: Iterable[Outage]) -> list[Spell]:
    """When the node could fail: [first_seen, end) without its outages, spells apart."""
    found, at = [], first_seen
    for outage in sorted(outages, key=lambda one: one.start_time):
        if outage.start_time > at:
            found.append((at, min(outage.start_time, end)))
        at = max(at, end if outage.end_time is None else outage.end_time)
        if at >= end:
            break
    if at < end:
        found.append((at, end))
    return [(start, until) for start, until in found if start < until]
