"""Each fleet query once more in plain Python over rows: slow, and written from its description, not from its SQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise, zip_longest
from typing import Any

from fleet_history import DAY, History, Row

Rows = list[Row]
SEVERITIES = ("info", "warning", "degraded", "critical")
CLOCK_SET = 978307200  # 2001; earlier times are from a clock that was not set yet
CONDITION_EVENTS = ("opened", "seen_again", "worsened", "acknowledged", "cleared")


def groups(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], Rows]:
    result: dict[tuple[Any, ...], Rows] = defaultdict(list)
    for row in rows:
        result[tuple(row[name] for name in names)].append(row)
    return result


def worst(rows: Iterable[Row]) -> str:
    return max((row["severity"] for row in rows), key=SEVERITIES.index)


def none_last(value: Any) -> tuple[bool, Any]:
    """Return a sort key that puts None last."""
    return (value is None, 0 if value is None else value)


# --- streams


def lines(tables: History) -> Rows:
    result = []
    for stream_lines in groups([e for e in tables["events"] if e["seq"] is not None], "node", "stream_id").values():
        cluster, begin = max(e["cluster"] for e in stream_lines), min(e["time"] for e in stream_lines)
        result += [{**e, "cluster": cluster, "stream_time": begin} for e in stream_lines]
    return result


def lines_by_node(tables: History) -> dict[tuple[Any, ...], Rows]:
    """Return the lines of each node in order, one stream after another."""
    by_node = groups(lines(tables), "cluster", "node")
    return {
        node: sorted(node_lines, key=lambda e: (e["stream_time"], e["stream_id"], e["seq"]))
        for node, node_lines in by_node.items()
    }


def has_gap(before: Row, line: Row) -> bool:
    return before["stream_id"] == line["stream_id"] and line["seq"] > before["seq"] + 1


def stream_gaps(tables: History, begin: int, end: int) -> Rows:
    result = []
    for (_, stream), stream_lines in groups(lines(tables), "node", "stream_id").items():
        stream_lines = sorted(stream_lines, key=lambda e: e["seq"])
        for before, line in pairwise(stream_lines):
            lost_lines = line["seq"] - before["seq"] - 1
            if lost_lines and begin <= line["time"] < end:
                result.append(
                    {
                        "node": line["node"],
                        "from_seq": before["seq"] + 1,
                        "to_seq": line["seq"] - 1,
                        "lost": lost_lines,
                        "after_time": before["time"],
                        "until_time": line["time"],
                        "reported": line["event"] == "dropped" and line["dropped"] >= lost_lines,
                        "stream_id": stream,
                        "cluster": line["cluster"],
                    }
                )
    return result


def observed_pieces(node_lines: Rows) -> list[tuple[int, int]]:
    """Return the intervals in which a node was observed, from its lines in order."""
    result = []
    for before, line in pairwise(node_lines):
        same_stream = before["stream_id"] == line["stream_id"]
        until = None
        if before["event"] == "stopped" or has_gap(before, line):
            continue
        if line["event"] == "started":
            until = line["last_alive_time"]
        elif same_stream and before["boot_id"] == line["boot_id"]:
            jumped = line["time"] - before["time"] - (line["mono"] - before["mono"])
            until = line["time"] if jumped <= 60 else None
        if until is not None and 0 < until - before["time"] <= 25 * 3600:
            result.append((before["time"], until))
    return result


def observed_intervals(tables: History, begin: int, end: int) -> Rows:
    result = []
    for (cluster, node), node_lines in lines_by_node(tables).items():
        until = 0
        for since, end_time in sorted(observed_pieces(node_lines)):
            if end_time > max(since, until):
                result.append({"cluster": cluster, "node": node, "begin_time": max(since, until), "end_time": end_time})
            until = max(until, end_time)
    return result


def observed(tables: History, begin: int, end: int) -> Rows:
    nodes = {(row["cluster"], row["node"]) for table in ("nodes", "job_nodes", "node_states") for row in tables[table]}
    streams = lines_by_node(tables)
    result = []
    for cluster, node in nodes | set(streams):
        node_lines = streams.get((cluster, node), [])
        spans = observed_pieces(node_lines)
        day = begin - begin % DAY
        while day < end:
            low, high = max(day, begin), min(day + DAY, end)
            seconds: set[int] = set()
            for since, until in spans:
                seconds.update(range(max(since, low), min(until, high)))
            day_lines = [
                (b, e) for b, e in zip([None, *node_lines], node_lines, strict=False) if low <= e["time"] < high
            ]
            names = [e["event"] for _, e in day_lines]
            result.append(
                {
                    "node": node,
                    "day": day,
                    "seconds": high - low,
                    "observed_seconds": len(seconds),
                    "alives": names.count("alive"),
                    "starts": names.count("started"),
                    "stops": names.count("stopped"),
                    "gaps": sum(b is not None and has_gap(b, e) for b, e in day_lines),
                    "cluster": cluster,
                }
            )
            day += DAY
    return result


# --- conditions


def sightings(tables: History) -> Rows:
    """Return one row for each time at which a condition was seen, as the query `sightings` does."""
    entries = []
    for e in lines(tables):
        if e["event"] in CONDITION_EVENTS:
            key = (e["cluster"], e["node"], "events", e["condition_id"], e["code"], e["subject"])
            order = (e["time"], e["stream_id"], e["seq"])
            entries.append((key, e["first_time"], "onset", order, e))
            entries.append((key, e["last_time"], "growth" if e["event"] == "worsened" else "seen", order, e))
    for s in tables["scraped_conditions"]:
        key = (s["cluster"], s["node"], "scraped", None, s["code"], s["subject"])
        onset_row = {**s, "kind": "level", "severity": s["first_severity"] or s["severity"]}
        entries.append((key, s["first_time"], "onset", (s["first_time"], s["severity"], 0), onset_row))
        if (s["worst_time"] or 0) > s["first_time"]:
            growth_row = {**s, "kind": "level", "last_time": s["worst_time"]}
            entries.append((key, s["worst_time"], "growth", (s["worst_time"], s["severity"], 0), growth_row))
        entries.append((key, s["last_time"], "seen", (s["last_time"], s["severity"], 0), {**s, "kind": "level"}))
    by_time: dict[Any, list[Any]] = defaultdict(list)
    for key, time, kind, order, e in entries:
        by_time[key, time].append((order, kind, e))
    result = []
    for (key, time), same_time in by_time.items():
        kinds = {kind for _, kind, _ in same_time}
        preferred = [entry for entry in same_time if entry[2].get("observed") is False] or same_time
        latest = [
            entry for entry in preferred if entry[2]["last_time"] == time
        ]  # a line has the severity of its last sighting
        latest = [entry for entry in latest if entry[2]["severity"] == worst(e for _, _, e in latest)] or preferred
        _, _, e = min(latest, key=lambda entry: (entry[0], ("seen", "growth", "onset").index(entry[1])))
        result.append(
            {
                "cluster": key[0],
                "node": key[1],
                "origin": key[2],
                "condition_id": key[3],
                "check_name": e["check_name"],
                "code": key[4],
                "subject": key[5],
                "severity": e["severity"],
                "kind": e["kind"],
                "time": time,
                "what": next(kind for kind in ("onset", "growth", "seen") if kind in kinds),
                "observed": e["observed"],
                "history": None,
            }
        )
        if key[2] == "events":
            history = any(entry["history"] for _, _, entry in same_time)
            result[-1] |= {"observed": e["observed"] is not False, "history": history}
            if history:
                result[-1]["what"] = "seen"
    return result


def slow_times(tables: History, begin: int, end: int) -> Rows:
    """Return the times between consecutive sightings, never before the line's own onset, as the query does."""
    result = []
    for (cluster, node), node_lines in lines_by_node(tables).items():
        slow_lines = [e for e in node_lines if e["event"] in CONDITION_EVENTS and e["code"].startswith("failslow/")]
        for condition_lines in groups(
            [e for e in slow_lines if e["observed"] is not True], "condition_id", "code", "subject"
        ).values():
            last_time = None
            for e in condition_lines:
                onset = e["first_time"] if e["onset_time"] is None else e["onset_time"]
                low, high = max(onset, onset if last_time is None else last_time, begin), min(e["last_time"], end)
                columns = {name: e[name] for name in ("code", "subject", "condition_id", "slowdown", "jobs")}
                interval = {**columns, "cluster": cluster, "node": node, "begin_time": low, "end_time": high}
                result += [{**interval, "origin": "events"}] if high > low else []
                last_time = e["last_time"] if last_time is None else max(last_time, e["last_time"])
    for s in tables["scraped_conditions"]:
        low, high = max(s["first_time"], begin), min(s["last_time"], end)
        if s["code"].startswith("failslow/") and high > low:
            interval = {name: s[name] for name in ("cluster", "node", "code", "subject")}
            unknown = dict.fromkeys(("condition_id", "slowdown", "jobs"))
            result.append({**interval, **unknown, "begin_time": low, "end_time": high, "origin": "scraped"})
    return result


def conditions(tables: History, begin: int, end: int) -> Rows:
    result = []
    condition_lines = [e for e in lines(tables) if e["event"] in CONDITION_EVENTS]
    sighting_groups = groups(sightings(tables), "origin", "cluster", "node", "condition_id", "code", "subject")
    for key, same_condition in groups(condition_lines, "cluster", "node", "condition_id", "code", "subject").items():
        cleared_lines = [e for e in same_condition if e["event"] == "cleared"]
        result.append(
            {
                **dict(zip(("cluster", "node", "condition_id", "code", "subject"), key, strict=True)),
                "severity": worst(same_condition),
                "kind": same_condition[0]["kind"],
                "first_time": min(e["first_time"] for e in same_condition),
                "last_time": max(e["last_time"] for e in same_condition),
                "cleared_time": max((e["time"] for e in cleared_lines), default=None),
                "times": max(e["times"] for e in same_condition),
                "moments": len(sighting_groups[("events", *key)]),
                "cleared_by": "pass" if cleared_lines else None,
                "origin": "events",
                "observed": all(e["observed"] is not False for e in same_condition),
                "history": all(e["history"] is True for e in same_condition),
                "step_seconds": None,
                "check_name": same_condition[0]["check_name"],
            }
        )
    for s in tables["scraped_conditions"]:
        columns = {
            name: s[name]
            for name in ("cluster", "node", "code", "subject", "severity", "first_time", "last_time", "check_name")
        }
        result.append(
            {
                **columns,
                "condition_id": None,
                "kind": "level",
                "cleared_time": None,
                "times": None,
                "cleared_by": None,
                "moments": len({s["first_time"], s["worst_time"] or s["first_time"], s["last_time"]}),
                "origin": "scraped",
                "observed": s["observed"],
                "history": None,
                "step_seconds": s["step_seconds"],
            }
        )
    return [c for c in result if c["first_time"] < end and max(c["last_time"], c["cleared_time"] or 0) >= begin]


def conditions_near_failures(tables: History, begin: int, end: int, before: int = 600, after: int = 300) -> Rows:
    result = []
    by_node = groups(sightings(tables), "cluster", "node")
    nodes_of_jobs = groups(tables["job_nodes"], "cluster", "db_index")
    for job in tables["jobs"]:
        if job["state"] not in ("FAILED", "NODE_FAIL") or not begin <= job["end_time"] < end:
            continue
        for job_node in nodes_of_jobs[job["cluster"], job["db_index"]]:
            close_sightings = [
                s
                for s in by_node[job["cluster"], job_node["node"]]
                if job["end_time"] - before <= s["time"] <= job["end_time"] + after
                if s["kind"] == "edge" or s["what"] != "seen"
                if not (s["observed"] or s["history"])
            ]
            for (code, subject), same_condition in groups(close_sightings, "code", "subject").items():
                columns = {
                    name: job[name] for name in ("cluster", "db_index", "job_id", "state", "end_time", "gpus", "nodes")
                }
                result.append(
                    {
                        **columns,
                        "node": job_node["node"],
                        "code": code,
                        "subject": subject,
                        "severity": worst(same_condition),
                        "kind": min(s["kind"] for s in same_condition),
                        "check_name": same_condition[0]["check_name"],
                        "first_seen": min(s["time"] for s in same_condition),
                        "last_seen": max(s["time"] for s in same_condition),
                        "moments": len(same_condition),
                        "from_events": sum(s["origin"] == "events" for s in same_condition),
                        "from_scrapes": sum(s["origin"] == "scraped" for s in same_condition),
                    }
                )
    return result


# --- jobs


def ended_jobs(tables: History, begin: int, end: int) -> Rows:
    return [job for job in tables["jobs"] if job["end_time"] is not None and begin <= job["end_time"] < end]


def size_class(gpus: int | None) -> int | None:
    if gpus is None or gpus <= 1:
        return gpus
    return 1 << (gpus - 1).bit_length()


def job_states(tables: History, begin: int, end: int) -> Rows:
    jobs = [{**job, "class": size_class(job["gpus"])} for job in ended_jobs(tables, begin, end)]
    return [
        {
            "state": state,
            "gpus_up_to": up_to,
            "jobs": len(same_jobs),
            "cluster": cluster,
            "gpu_seconds": sum(
                (j["gpus"] or 0) * (j["end_time"] - j["start_time"]) for j in same_jobs if j["start_time"] is not None
            ),
        }
        for (cluster, state, up_to), same_jobs in groups(jobs, "cluster", "state", "class").items()
    ]


def jobs_known(tables: History) -> dict[str, int]:
    """Return cluster -> time up to which its jobs are known."""
    known_until: dict[str, int] = {}
    file_times = [(i["cluster"], i["to_time"]) for i in tables["ingests"] if i["source"] in ("sacct", "jobs_file")]
    job_times = [(j["cluster"], j[name]) for j in tables["jobs"] for name in ("end_time", "start_time", "submit_time")]
    for cluster, time in (*file_times, *job_times):
        if time is not None:
            known_until[cluster] = max(time, known_until.get(cluster, 0))
    return known_until


def node_days(tables: History, begin: int, end: int, min_gpus: int = 128) -> Rows:
    blamed_jobs = {
        (s["cluster"], s["db_index"])
        for s in conditions_near_failures(tables, begin, end)
        if s["severity"] == "critical"
    }
    large_jobs, known_until = [], jobs_known(tables)
    for job in tables["jobs"]:
        if (job["gpus"] or 0) > min_gpus and job["start_time"] is not None:
            until = known_until[job["cluster"]] if job["end_time"] is None else job["end_time"]
            if job["start_time"] < end and until >= begin:
                is_ended = job["end_time"] is not None and job["end_time"] < end
                seconds = max(min(until, end) - max(job["start_time"], begin), 0)
                large_jobs.append({**job, "node_seconds": seconds * job["nodes"], "over": is_ended})
    result = []
    for (cluster,), cluster_jobs in groups(large_jobs, "cluster").items():
        fails = sum(j["over"] and j["state"] == "NODE_FAIL" for j in cluster_jobs)
        failed = sum(
            j["over"] and j["state"] == "FAILED" and (cluster, j["db_index"]) in blamed_jobs for j in cluster_jobs
        )
        seconds = sum(j["node_seconds"] for j in cluster_jobs)
        result.append(
            {
                "cluster": cluster,
                "jobs": len(cluster_jobs),
                "node_seconds": seconds,
                "node_fails": fails,
                "failed_seen": failed,
                "failures": fails + failed,
                "failures_per_1000_node_days": (fails + failed) / (seconds / DAY) * 1000 if seconds else None,
            }
        )
    return result


def preempted_jobs(tables: History, begin: int, end: int, within: int = 60) -> Rows:
    result = []
    nodes = {
        key: {job_node["node"] for job_node in job_rows}
        for key, job_rows in groups(tables["job_nodes"], "cluster", "db_index").items()
    }
    for victim in ended_jobs(tables, begin, end):
        if victim["start_time"] is None:
            continue
        cluster, end_time = victim["cluster"], victim["end_time"]
        logged = [
            p
            for p in tables["preemptions"]
            if (p["cluster"], p["job_id"]) == (cluster, victim["job_id"]) and abs(p["time"] - end_time) <= within
            if victim
            is min(
                (
                    j
                    for j in tables["jobs"]
                    if (j["cluster"], j["job_id"]) == (cluster, victim["job_id"])
                    if j["start_time"] is not None and j["end_time"] is not None
                ),
                key=lambda j: (abs(p["time"] - j["end_time"]), j["end_time"], j["db_index"]),
            )
        ]
        base = {
            "job_id": victim["job_id"],
            "end_time": end_time,
            "gpus": victim["gpus"],
            "state": victim["state"],
            "db_index": victim["db_index"],
            "cluster": cluster,
            "mode": None,
            "shared_nodes": None,
            "preemptor_job_id": None,
            "preemptor_db_index": None,
        }
        if logged:
            line = min(logged, key=lambda p: (abs(p["time"] - end_time), p["time"], p["preemptor_job_id"], p["mode"]))
            job_id, task = line["preemptor_job_id"], line["preemptor_array_task_id"]
            possible_preemptors = [
                j
                for j in tables["jobs"]
                if j["cluster"] == cluster and (j["end_time"] is None or j["end_time"] >= line["time"])
                if (
                    j["job_id"] == job_id if task is None else (j["array_job_id"], j["array_task_id"]) == (job_id, task)
                )
            ]
            preemptor = min(
                possible_preemptors, key=lambda j: (none_last(j["start_time"]), j["db_index"]), default=None
            )
            base |= {
                "how": "logged",
                "mode": line["mode"],
                "preemptor_job_id": preemptor["job_id"] if preemptor else job_id,
                "preemptor_db_index": preemptor["db_index"] if preemptor else None,
            }
        elif victim["state"] != "PREEMPTED":
            continue
        else:
            candidates = []
            for job in tables["jobs"]:
                shared = nodes.get((cluster, job["db_index"]), set()) & nodes.get((cluster, victim["db_index"]), set())
                other = job["cluster"] == cluster and job["job_id"] != victim["job_id"]
                if other and shared and end_time <= job["start_time"] <= end_time + within:
                    candidates.append((-len(shared), job["start_time"], job["db_index"], job))
            base["how"] = "inferred" if candidates else "unknown"
            if candidates:
                shared_nodes, _, _, job = min(candidates, key=lambda c: c[:3])
                base |= {
                    "shared_nodes": -shared_nodes,
                    "preemptor_job_id": job["job_id"],
                    "preemptor_db_index": job["db_index"],
                }
        result.append(base)
    return result


def runs(tables: History, begin: int, end: int, gap: int = DAY) -> Rows:
    chains: dict[Any, Rows] = defaultdict(list)
    known_until = jobs_known(tables)
    for job in tables["jobs"]:
        chain_column = "run_key" if job["run_key"] is not None and job["array_task_id"] is None else "job_id"
        chains[job["cluster"], chain_column, job[chain_column]].append(
            {**job, "until": min(known_until[job["cluster"]], end) if job["end_time"] is None else job["end_time"]}
        )
    result = []
    for (cluster, chain_column, _), chain in chains.items():
        pieces: list[Rows] = []
        latest = None
        for job in sorted(chain, key=lambda j: (j["submit_time"], none_last(j["start_time"]), j["db_index"])):
            if latest is None or job["submit_time"] > latest + gap:
                pieces.append([])
            pieces[-1].append(
                {**job, "overlaps": bool(pieces[-1]) and job["start_time"] is not None and job["start_time"] < latest}
            )
            latest = job["until"] if latest is None else max(latest, job["until"])
        result += [_run(cluster, chain_column, piece) for piece in pieces]
    return [run for run in result if run["submit_time"] < end and run["end_time"] >= begin]


def _run(cluster: str, chain_column: str, attempts: Rows) -> Row:
    started_jobs = [j for j in attempts if j["start_time"] is not None]
    seconds = [(j, max(j["until"] - j["start_time"], 0)) for j in started_jobs]
    eligible = [(j, j["submit_time"] if j["eligible_time"] is None else j["eligible_time"]) for j in started_jobs]
    states = [j["state"] for j in attempts]
    return {
        "run": attempts[0]["job_id"],
        "chained_by": chain_column,
        "attempts": len(attempts),
        "jobs": len({j["job_id"] for j in attempts}),
        "submit_time": attempts[0]["submit_time"],
        "start_time": min((j["start_time"] for j in started_jobs), default=None),
        "end_time": max(j["until"] for j in attempts),
        "last_state": states[-1],
        "gpus": max((j["gpus"] for j in attempts if j["gpus"] is not None), default=None),
        "runtime_seconds": sum(s for _, s in seconds),
        "gpu_seconds": sum((j["gpus"] or 0) * s for j, s in seconds),
        "queued_seconds": sum(max(j["start_time"] - eligible_time, 0) for j, eligible_time in eligible),
        "overlapping": sum(j["overlaps"] for j in attempts),
        "node_fails": states.count("NODE_FAIL"),
        "failed": states.count("FAILED"),
        "preempted": states.count("PREEMPTED"),
        "cluster": cluster,
    }


# --- nodes and sources


def merge_intervals(intervals: Rows, sort_key: Callable[[Row], Any]) -> list[Rows]:
    """Group intervals that overlap or touch. An end of None means that the interval is open."""
    groups_found: list[Rows] = []
    until: float = 0
    for interval in sorted(intervals, key=sort_key):
        if not groups_found or interval["start_time"] > until:
            groups_found.append([])
            until = 0
        groups_found[-1].append(interval)
        until = max(until, float("inf") if interval["end_time"] is None else interval["end_time"])
    return groups_found


def out_of_service(tables: History, begin: int, end: int) -> Rows:
    intervals = []
    for (cluster, node), node_lines in lines_by_node(tables).items():
        confirmed = [e for e in node_lines if e["event"] in ("drain", "resume") and e["stage"] == "confirmed"]
        states = [s for s in tables["node_states"] if (s["cluster"], s["node"]) == (cluster, node)]
        for line, after in zip_longest(confirmed, confirmed[1:]):
            if line["event"] == "drain":
                end_time = after and after["time"]
                before = [s for s in states if s["start_time"] - 300 <= line["time"]]
                last = max(before, key=lambda s: (s["start_time"], none_last(s["end_time"])), default=None)
                if not (after and after["event"] == "resume") and last and (last["end_time"] or 0) >= line["time"]:
                    end_time = last["end_time"]
                intervals.append(
                    {
                        "cluster": cluster,
                        "node": node,
                        "what": "outage",
                        "start_time": line["time"],
                        "from": 0,
                        "end_time": end_time,
                        "reason": line["reason"],
                        "state": None,
                        "user_name": None,
                        "by": "healthd",
                    }
                )
    for s in tables["node_states"]:
        intervals.append({**s, "what": "outage", "by": s["set_by"] or "unknown", "from": 1})
    for r in tables["reservations"]:
        if r["maintenance"]:
            intervals.append(
                {
                    **r,
                    "what": "maintenance",
                    "by": "reservation",
                    "reason": r["name"],
                    "state": None,
                    "user_name": None,
                    "from": 2,
                }
            )
    result = []
    for (cluster, node, kind), node_lines in groups(intervals, "cluster", "node", "what").items():

        def order(s: Row) -> Any:
            return (s["start_time"], s["from"], none_last(s["end_time"]), s["reason"] or "", s["state"] or "")

        for group in merge_intervals(node_lines, order):
            first, ends = group[0], [s["end_time"] for s in group]
            start, end_time = first["start_time"], None if None in ends else max(ends)
            if start < end and (end_time is None or end_time > begin):
                result.append(
                    {
                        "node": node,
                        "what": kind,
                        "by_whom": first["by"],
                        "start_time": start,
                        "end_time": end_time,
                        "seconds": min(end if end_time is None else end_time, end) - max(start, begin),
                        "first_reason": first["reason"],
                        "first_state": first["state"],
                        "user_name": first["user_name"],
                        "cluster": cluster,
                        "from_slurm": sum(s["from"] == 1 for s in group),
                        "from_healthd": sum(s["from"] == 0 for s in group),
                    }
                )
    return result


def exclusions_coverage(tables: History, begin: int, end: int) -> Rows:
    result = []
    submitted = [job for job in tables["jobs"] if begin <= job["submit_time"] < end]
    for (cluster,), jobs in groups(submitted, "cluster").items():
        ids = {job["job_id"] for job in jobs}
        excluded = {x["job_id"]: x for x in tables["exclusions"] if x["cluster"] == cluster and x["job_id"] in ids}
        complete_jobs = {job["job_id"] for job in jobs if job["exclusions_known"]}
        nodes = {x["node"] for x in tables["exclusions"] if x["cluster"] == cluster and x["job_id"] in ids}
        known = len(complete_jobs | set(excluded))
        result.append(
            {
                "cluster": cluster,
                "jobs": len(ids),
                "known": known,
                "excluding": len(excluded),
                "excluded_nodes": len(nodes),
                "share_known": known / len(ids),
            }
        )
    return result


def sources_coverage(tables: History, begin: int, end: int) -> Rows:
    result = []
    for (cluster, source), ingests in groups(tables["ingests"], "cluster", "source").items():
        timed = [
            {**i, "start_time": i["from_time"], "end_time": i["to_time"]} for i in ingests if i["from_time"] is not None
        ]
        merged_ingests = merge_intervals(timed, lambda i: (i["start_time"], i["end_time"], i["name"]))
        for group in [
            *merged_ingests,
            *([[i for i in ingests if i["from_time"] is None]] if len(timed) < len(ingests) else []),
        ]:
            begins = [i["from_time"] for i in group]
            low = None if None in begins else min(begins)
            high = None if low is None else max(i["to_time"] for i in group)
            if low is None or (low < end and high >= begin):
                result.append(
                    {
                        "source": source,
                        "from_time": low,
                        "to_time": high,
                        "names": len(group),
                        "cluster": cluster,
                        "rows_read": sum(i["rows_read"] for i in group),
                        "rows_unread": sum(i["rows_unread"] for i in group),
                        "read_time": max(i["read_time"] for i in group),
                    }
                )
    return result


# --- GPUs


def gpu_periods(tables: History, begin: int, end: int) -> Rows:
    streams = {
        stream: {
            "cluster": max(line["cluster"] for line in stream_lines),
            "stream_time": min((time for time in times if time >= CLOCK_SET), default=min(times)),
        }
        for stream, stream_lines in groups([*tables["gpus"], *lines(tables)], "node", "stream_id").items()
        if (times := [line["time"] for line in stream_lines])
    }
    listed = {(gpu["node"], gpu["stream_id"], gpu["seq"], gpu["subject"]): gpu for gpu in tables["gpus"]}.values()
    listed = [{**gpu, **streams[gpu["node"], gpu["stream_id"]]} for gpu in listed]
    result: Rows = []
    for node_rows in groups(listed, "cluster", "node").values():
        by_event = groups(node_rows, "stream_time", "stream_id", "seq")
        open_periods: dict[str, Row] = {}
        time = 0
        for event in sorted(by_event):
            time = max(time, *(gpu["time"] for gpu in by_event[event]))
            slots = _identified_gpus(by_event[event])
            for slot, period in list(open_periods.items()):
                following = slots.get(slot)
                if following is None or following["gpu"] != period["gpu"]:
                    period["until_time"], period["following"] = time, following or {}
                    del open_periods[slot]
            for slot, gpu in slots.items():
                if slot not in open_periods:
                    open_periods[slot] = {**gpu, "from_time": time, "until_time": None, "following": None}
                    result.append(open_periods[slot])
                period = open_periods[slot]
                for name in ("serial", "uuid", "name"):
                    period[name] = max(filter(None, (period[name], gpu[name])), default=None)
    for periods in groups(result, "cluster", "gpu").values():
        periods.sort(key=lambda period: (period["from_time"], period["node"]))  # a node's periods are in order
        for period, later in zip_longest(periods, periods[1:]):
            following = period.pop("following")
            times = [time for time in (period["until_time"], later and later["from_time"]) if time is not None]
            ended = None if following is None else "replaced" if following else "removed"
            period |= {
                "until_time": min(times, default=None),
                "ended": "moved" if later else ended,
                "next_gpu": None if later else (following or {}).get("gpu"),
                "next_serial": None if later else (following or {}).get("serial"),
            }
    return result


def _identified_gpus(rows: Rows) -> dict[str, Row]:
    """Return the GPU in each slot. A number that two slots share identifies none."""
    gpus = [{**row, "gpu": row["uuid"] or row["serial"]} for row in rows]
    numbers = [gpu["gpu"] for gpu in gpus]
    return {gpu["subject"]: gpu for gpu in gpus if gpu["gpu"] is not None and numbers.count(gpu["gpu"]) == 1}


# Each function gets the history and the requested interval, and returns the rows in any order.
ANSWERS: dict[str, Callable[[History, int, int], Rows]] = {
    "conditions": conditions,
    "exclusions_coverage": exclusions_coverage,
    "gpu_periods": gpu_periods,
    "stream_gaps": stream_gaps,
    "jobs_known": lambda made, begin, end: [{"cluster": c, "known_until": t} for c, t in jobs_known(made).items()],
    "lines": lambda made, begin, end: lines(made),
    "node_days": node_days,
    "observed": observed,
    "observed_intervals": observed_intervals,
    "out_of_service": out_of_service,
    "preempted": preempted_jobs,
    "runs": runs,
    "seen_with_failures": conditions_near_failures,
    "slow_times": slow_times,
    "sightings": lambda made, begin, end: sightings(made),
    "sources_coverage": sources_coverage,
    "states": job_states,
}
