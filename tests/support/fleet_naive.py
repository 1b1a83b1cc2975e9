"""Each fleet query once more in plain Python over rows: slow, and written from its description, not from its SQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise, zip_longest
from typing import Any

from fleet_history import DAY, History, Row

Rows = list[Row]
SEVERITIES = ("info", "warning", "degraded", "critical")
OF_CONDITIONS = ("opened", "seen_again", "worsened", "acknowledged", "cleared")


def groups(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], Rows]:
    found: dict[tuple[Any, ...], Rows] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


def worst(rows: Iterable[Row]) -> str:
    return max((row["severity"] for row in rows), key=SEVERITIES.index)


def ranked(value: Any) -> tuple[bool, Any]:
    """Return a sort key that puts None last."""
    return (value is None, 0 if value is None else value)


# --- streams


def lines(made: History) -> Rows:
    found = []
    for of_stream in groups([e for e in made["events"] if e["seq"] is not None], "node", "stream_id").values():
        cluster, begin = max(e["cluster"] for e in of_stream), min(e["time"] for e in of_stream)
        found += [{**e, "cluster": cluster, "stream_time": begin} for e in of_stream]
    return found


def in_order(made: History) -> dict[tuple[Any, ...], Rows]:
    """Return the lines of each node in order, one stream after another."""
    of_nodes = groups(lines(made), "cluster", "node")
    return {
        who: sorted(some, key=lambda e: (e["stream_time"], e["stream_id"], e["seq"])) for who, some in of_nodes.items()
    }


def told_before(before: Row, line: Row) -> bool:
    return before["stream_id"] == line["stream_id"] and line["seq"] > before["seq"] + 1


def holes(made: History, begin: int, end: int) -> Rows:
    found = []
    for (_, stream), some in groups(lines(made), "node", "stream_id").items():
        some = sorted(some, key=lambda e: e["seq"])
        for before, line in pairwise(some):
            lost = line["seq"] - before["seq"] - 1
            if lost and begin <= line["time"] < end:
                found.append(
                    {
                        "node": line["node"],
                        "from_seq": before["seq"] + 1,
                        "to_seq": line["seq"] - 1,
                        "lost": lost,
                        "after_time": before["time"],
                        "until_time": line["time"],
                        "reported": line["event"] == "dropped" and line["dropped"] >= lost,
                        "stream_id": stream,
                        "cluster": line["cluster"],
                    }
                )
    return found


def pieces(some: Rows) -> list[tuple[int, int]]:
    """Return the intervals in which a node was observed, from its lines in order."""
    found = []
    for before, line in pairwise(some):
        same_stream = before["stream_id"] == line["stream_id"]
        until = None
        if before["event"] == "stopped" or told_before(before, line):
            continue
        if line["event"] == "started":
            until = line["last_alive_time"]
        elif same_stream and before["boot_id"] == line["boot_id"]:
            jumped = line["time"] - before["time"] - (line["mono"] - before["mono"])
            until = line["time"] if jumped <= 60 else None
        if until is not None and 0 < until - before["time"] <= 25 * 3600:
            found.append((before["time"], until))
    return found


def observed_intervals(made: History, begin: int, end: int) -> Rows:
    found = []
    for (cluster, node), some in in_order(made).items():
        until = 0
        for since, end_time in sorted(pieces(some)):
            if end_time > max(since, until):
                found.append({"cluster": cluster, "node": node, "begin_time": max(since, until), "end_time": end_time})
            until = max(until, end_time)
    return found


def observed(made: History, begin: int, end: int) -> Rows:
    known = {(row["cluster"], row["node"]) for table in ("nodes", "job_nodes", "node_states") for row in made[table]}
    streams = in_order(made)
    found = []
    for cluster, node in known | set(streams):
        some = streams.get((cluster, node), [])
        spans = pieces(some)
        day = begin - begin % DAY
        while day < end:
            low, high = max(day, begin), min(day + DAY, end)
            seconds: set[int] = set()
            for since, until in spans:
                seconds.update(range(max(since, low), min(until, high)))
            on_it = [(b, e) for b, e in zip([None, *some], some, strict=False) if low <= e["time"] < high]
            names = [e["event"] for _, e in on_it]
            found.append(
                {
                    "node": node,
                    "day": day,
                    "seconds": high - low,
                    "observed_seconds": len(seconds),
                    "alives": names.count("alive"),
                    "starts": names.count("started"),
                    "stops": names.count("stopped"),
                    "gaps": sum(b is not None and told_before(b, e) for b, e in on_it),
                    "cluster": cluster,
                }
            )
            day += DAY
    return found


# --- conditions


def sights(made: History) -> Rows:
    """Return one row for each time at which a condition was seen, as the query `sightings` does."""
    told = []
    for e in lines(made):
        if e["event"] in OF_CONDITIONS:
            key = (e["cluster"], e["node"], "events", e["condition_id"], e["code"], e["subject"])
            order = (e["time"], e["stream_id"], e["seq"])
            told.append((key, e["first_time"], "onset", order, e))
            told.append((key, e["last_time"], "growth" if e["event"] == "worsened" else "seen", order, e))
    for s in made["scraped_conditions"]:
        key = (s["cluster"], s["node"], "scraped", None, s["code"], s["subject"])
        began = {**s, "kind": "level", "severity": s["first_severity"] or s["severity"]}
        told.append((key, s["first_time"], "onset", (s["first_time"], s["severity"], 0), began))
        if (s["worst_time"] or 0) > s["first_time"]:
            grew = {**s, "kind": "level", "last_time": s["worst_time"]}
            told.append((key, s["worst_time"], "growth", (s["worst_time"], s["severity"], 0), grew))
        told.append((key, s["last_time"], "seen", (s["last_time"], s["severity"], 0), {**s, "kind": "level"}))
    moments: dict[Any, list[Any]] = defaultdict(list)
    for key, time, what, order, e in told:
        moments[key, time].append((order, what, e))
    found = []
    for (key, time), some in moments.items():
        whats = {what for _, what, _ in some}
        proven = [one for one in some if one[2].get("observed") is False] or some
        held = [one for one in proven if one[2]["last_time"] == time]  # a line has the severity of its last sighting
        held = [one for one in held if one[2]["severity"] == worst(e for _, _, e in held)] or proven
        _, _, e = min(held, key=lambda one: (one[0], ("seen", "growth", "onset").index(one[1])))
        found.append(
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
                "what": next(what for what in ("onset", "growth", "seen") if what in whats),
                "observed": e["observed"],
                "history": None,
            }
        )
        if key[2] == "events":
            history = any(one["history"] for _, _, one in some)
            found[-1] |= {"observed": e["observed"] is not False, "history": history}
            if history:
                found[-1]["what"] = "seen"
    return found


def slow_times(made: History, begin: int, end: int) -> Rows:
    """Return the times between consecutive sightings, never before the line's own onset, as the query does."""
    found = []
    for (cluster, node), of_node in in_order(made).items():
        told = [e for e in of_node if e["event"] in OF_CONDITIONS and e["code"].startswith("failslow/")]
        for life in groups([e for e in told if e["observed"] is not True], "condition_id", "code", "subject").values():
            at = None
            for e in life:
                onset = e["first_time"] if e["onset_time"] is None else e["onset_time"]
                low, high = max(onset, onset if at is None else at, begin), min(e["last_time"], end)
                kept = {name: e[name] for name in ("code", "subject", "condition_id", "slowdown", "jobs")}
                its = {**kept, "cluster": cluster, "node": node, "begin_time": low, "end_time": high}
                found += [{**its, "origin": "events"}] if high > low else []
                at = e["last_time"] if at is None else max(at, e["last_time"])
    for s in made["scraped_conditions"]:
        low, high = max(s["first_time"], begin), min(s["last_time"], end)
        if s["code"].startswith("failslow/") and high > low:
            its = {name: s[name] for name in ("cluster", "node", "code", "subject")}
            unknown = dict.fromkeys(("condition_id", "slowdown", "jobs"))
            found.append({**its, **unknown, "begin_time": low, "end_time": high, "origin": "scraped"})
    return found


def conditions(made: History, begin: int, end: int) -> Rows:
    found = []
    of_lines = [e for e in lines(made) if e["event"] in OF_CONDITIONS]
    seen = groups(sights(made), "origin", "cluster", "node", "condition_id", "code", "subject")
    for key, some in groups(of_lines, "cluster", "node", "condition_id", "code", "subject").items():
        over = [e for e in some if e["event"] == "cleared"]
        found.append(
            {
                **dict(zip(("cluster", "node", "condition_id", "code", "subject"), key, strict=True)),
                "severity": worst(some),
                "kind": some[0]["kind"],
                "first_time": min(e["first_time"] for e in some),
                "last_time": max(e["last_time"] for e in some),
                "cleared_time": max((e["time"] for e in over), default=None),
                "times": max(e["times"] for e in some),
                "moments": len(seen[("events", *key)]),
                "cleared_by": "pass" if over else None,
                "origin": "events",
                "observed": all(e["observed"] is not False for e in some),
                "history": all(e["history"] is True for e in some),
                "step_seconds": None,
                "check_name": some[0]["check_name"],
            }
        )
    for s in made["scraped_conditions"]:
        kept = {
            name: s[name]
            for name in ("cluster", "node", "code", "subject", "severity", "first_time", "last_time", "check_name")
        }
        found.append(
            {
                **kept,
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
    return [c for c in found if c["first_time"] < end and max(c["last_time"], c["cleared_time"] or 0) >= begin]


def seen_with_failures(made: History, begin: int, end: int, before: int = 600, after: int = 300) -> Rows:
    found = []
    of_nodes = groups(sights(made), "cluster", "node")
    places = groups(made["job_nodes"], "cluster", "db_index")
    for job in made["jobs"]:
        if job["state"] not in ("FAILED", "NODE_FAIL") or not begin <= job["end_time"] < end:
            continue
        for place in places[job["cluster"], job["db_index"]]:
            near = [
                s
                for s in of_nodes[job["cluster"], place["node"]]
                if job["end_time"] - before <= s["time"] <= job["end_time"] + after
                if s["kind"] == "edge" or s["what"] != "seen"
                if not (s["observed"] or s["history"])
            ]
            for (code, subject), some in groups(near, "code", "subject").items():
                kept = {
                    name: job[name] for name in ("cluster", "db_index", "job_id", "state", "end_time", "gpus", "nodes")
                }
                found.append(
                    {
                        **kept,
                        "node": place["node"],
                        "code": code,
                        "subject": subject,
                        "severity": worst(some),
                        "kind": min(s["kind"] for s in some),
                        "check_name": some[0]["check_name"],
                        "first_seen": min(s["time"] for s in some),
                        "last_seen": max(s["time"] for s in some),
                        "moments": len(some),
                        "from_events": sum(s["origin"] == "events" for s in some),
                        "from_scrapes": sum(s["origin"] == "scraped" for s in some),
                    }
                )
    return found


# --- jobs


def ended(made: History, begin: int, end: int) -> Rows:
    return [job for job in made["jobs"] if job["end_time"] is not None and begin <= job["end_time"] < end]


def size_class(gpus: int | None) -> int | None:
    if gpus is None or gpus <= 1:
        return gpus
    return 1 << (gpus - 1).bit_length()


def states(made: History, begin: int, end: int) -> Rows:
    jobs = [{**job, "class": size_class(job["gpus"])} for job in ended(made, begin, end)]
    return [
        {
            "state": state,
            "gpus_up_to": up_to,
            "jobs": len(some),
            "cluster": cluster,
            "gpu_seconds": sum(
                (j["gpus"] or 0) * (j["end_time"] - j["start_time"]) for j in some if j["start_time"] is not None
            ),
        }
        for (cluster, state, up_to), some in groups(jobs, "cluster", "state", "class").items()
    ]


def jobs_known(made: History) -> dict[str, int]:
    """Return cluster -> time up to which its jobs are known."""
    known: dict[str, int] = {}
    of_files = [(i["cluster"], i["to_time"]) for i in made["ingests"] if i["source"] in ("sacct", "jobs_file")]
    of_jobs = [(j["cluster"], j[name]) for j in made["jobs"] for name in ("end_time", "start_time", "submit_time")]
    for cluster, time in (*of_files, *of_jobs):
        if time is not None:
            known[cluster] = max(time, known.get(cluster, 0))
    return known


def node_days(made: History, begin: int, end: int, more_than: int = 128) -> Rows:
    blamed = {
        (s["cluster"], s["db_index"]) for s in seen_with_failures(made, begin, end) if s["severity"] == "critical"
    }
    ran, known = [], jobs_known(made)
    for job in made["jobs"]:
        if (job["gpus"] or 0) > more_than and job["start_time"] is not None:
            until = known[job["cluster"]] if job["end_time"] is None else job["end_time"]
            if job["start_time"] < end and until >= begin:
                over = job["end_time"] is not None and job["end_time"] < end
                seconds = max(min(until, end) - max(job["start_time"], begin), 0)
                ran.append({**job, "node_seconds": seconds * job["nodes"], "over": over})
    found = []
    for (cluster,), some in groups(ran, "cluster").items():
        fails = sum(j["over"] and j["state"] == "NODE_FAIL" for j in some)
        failed = sum(j["over"] and j["state"] == "FAILED" and (cluster, j["db_index"]) in blamed for j in some)
        seconds = sum(j["node_seconds"] for j in some)
        found.append(
            {
                "cluster": cluster,
                "jobs": len(some),
                "node_seconds": seconds,
                "node_fails": fails,
                "failed_seen": failed,
                "failures": fails + failed,
                "failures_per_1000_node_days": (fails + failed) / (seconds / DAY) * 1000 if seconds else None,
            }
        )
    return found


def preempted(made: History, begin: int, end: int, within: int = 60) -> Rows:
    found = []
    nodes = {
        key: {place["node"] for place in some} for key, some in groups(made["job_nodes"], "cluster", "db_index").items()
    }
    for victim in ended(made, begin, end):
        if victim["start_time"] is None:
            continue
        cluster, over = victim["cluster"], victim["end_time"]
        said = [
            p
            for p in made["preemptions"]
            if (p["cluster"], p["job_id"]) == (cluster, victim["job_id"]) and abs(p["time"] - over) <= within
            if victim
            is min(
                (
                    j
                    for j in made["jobs"]
                    if (j["cluster"], j["job_id"]) == (cluster, victim["job_id"])
                    if j["start_time"] is not None and j["end_time"] is not None
                ),
                key=lambda j: (abs(p["time"] - j["end_time"]), j["end_time"], j["db_index"]),
            )
        ]
        base = {
            "job_id": victim["job_id"],
            "end_time": over,
            "gpus": victim["gpus"],
            "state": victim["state"],
            "db_index": victim["db_index"],
            "cluster": cluster,
            "mode": None,
            "shared_nodes": None,
            "preemptor_job_id": None,
            "preemptor_db_index": None,
        }
        if said:
            line = min(said, key=lambda p: (abs(p["time"] - over), p["time"], p["preemptor_job_id"], p["mode"]))
            named, task = line["preemptor_job_id"], line["preemptor_array_task_id"]
            takers = [
                j
                for j in made["jobs"]
                if j["cluster"] == cluster and (j["end_time"] is None or j["end_time"] >= line["time"])
                if (j["job_id"] == named if task is None else (j["array_job_id"], j["array_task_id"]) == (named, task))
            ]
            taker = min(takers, key=lambda j: (ranked(j["start_time"]), j["db_index"]), default=None)
            base |= {
                "how": "logged",
                "mode": line["mode"],
                "preemptor_job_id": taker["job_id"] if taker else named,
                "preemptor_db_index": taker["db_index"] if taker else None,
            }
        elif victim["state"] != "PREEMPTED":
            continue
        else:
            candidates = []
            for job in made["jobs"]:
                shared = nodes.get((cluster, job["db_index"]), set()) & nodes.get((cluster, victim["db_index"]), set())
                other = job["cluster"] == cluster and job["job_id"] != victim["job_id"]
                if other and shared and over <= job["start_time"] <= over + within:
                    candidates.append((-len(shared), job["start_time"], job["db_index"], job))
            base["how"] = "inferred" if candidates else "unknown"
            if candidates:
                shared_nodes, _, _, job = min(candidates, key=lambda c: c[:3])
                base |= {
                    "shared_nodes": -shared_nodes,
                    "preemptor_job_id": job["job_id"],
                    "preemptor_db_index": job["db_index"],
                }
        found.append(base)
    return found


def runs(made: History, begin: int, end: int, gap: int = DAY) -> Rows:
    chains: dict[Any, Rows] = defaultdict(list)
    known = jobs_known(made)
    for job in made["jobs"]:
        by = "run_key" if job["run_key"] is not None and job["array_task_id"] is None else "job_id"
        chains[job["cluster"], by, job[by]].append(
            {**job, "until": min(known[job["cluster"]], end) if job["end_time"] is None else job["end_time"]}
        )
    found = []
    for (cluster, by, _), some in chains.items():
        pieces: list[Rows] = []
        latest = None
        for job in sorted(some, key=lambda j: (j["submit_time"], ranked(j["start_time"]), j["db_index"])):
            if latest is None or job["submit_time"] > latest + gap:
                pieces.append([])
            pieces[-1].append(
                {**job, "overlaps": bool(pieces[-1]) and job["start_time"] is not None and job["start_time"] < latest}
            )
            latest = job["until"] if latest is None else max(latest, job["until"])
        found += [_run(cluster, by, piece) for piece in pieces]
    return [run for run in found if run["submit_time"] < end and run["end_time"] >= begin]


def _run(cluster: str, by: str, piece: Rows) -> Row:
    ran = [j for j in piece if j["start_time"] is not None]
    seconds = [(j, max(j["until"] - j["start_time"], 0)) for j in ran]
    eligible = [(j, j["submit_time"] if j["eligible_time"] is None else j["eligible_time"]) for j in ran]
    states = [j["state"] for j in piece]
    return {
        "run": piece[0]["job_id"],
        "chained_by": by,
        "attempts": len(piece),
        "jobs": len({j["job_id"] for j in piece}),
        "submit_time": piece[0]["submit_time"],
        "start_time": min((j["start_time"] for j in ran), default=None),
        "end_time": max(j["until"] for j in piece),
        "last_state": states[-1],
        "gpus": max((j["gpus"] for j in piece if j["gpus"] is not None), default=None),
        "runtime_seconds": sum(s for _, s in seconds),
        "gpu_seconds": sum((j["gpus"] or 0) * s for j, s in seconds),
        "queued_seconds": sum(max(j["start_time"] - since, 0) for j, since in eligible),
        "overlapping": sum(j["overlaps"] for j in piece),
        "node_fails": states.count("NODE_FAIL"),
        "failed": states.count("FAILED"),
        "preempted": states.count("PREEMPTED"),
        "cluster": cluster,
    }


# --- nodes and sources


def merged(spells: Rows, order: Callable[[Row], Any]) -> list[Rows]:
    """Group intervals that overlap or touch. An end of None means that the interval is open."""
    found: list[Rows] = []
    until: float = 0
    for spell in sorted(spells, key=order):
        if not found or spell["start_time"] > until:
            found.append([])
            until = 0
        found[-1].append(spell)
        until = max(until, float("inf") if spell["end_time"] is None else spell["end_time"])
    return found


def out_of_service(made: History, begin: int, end: int) -> Rows:
    spells = []
    for (cluster, node), some in in_order(made).items():
        said = [e for e in some if e["event"] in ("drain", "resume") and e["stage"] == "confirmed"]
        states = [s for s in made["node_states"] if (s["cluster"], s["node"]) == (cluster, node)]
        for line, after in zip_longest(said, said[1:]):
            if line["event"] == "drain":
                over = after and after["time"]
                before = [s for s in states if s["start_time"] - 300 <= line["time"]]
                last = max(before, key=lambda s: (s["start_time"], ranked(s["end_time"])), default=None)
                if not (after and after["event"] == "resume") and last and (last["end_time"] or 0) >= line["time"]:
                    over = last["end_time"]
                spells.append(
                    {
                        "cluster": cluster,
                        "node": node,
                        "what": "outage",
                        "start_time": line["time"],
                        "from": 0,
                        "end_time": over,
                        "reason": line["reason"],
                        "state": None,
                        "user_name": None,
                        "by": "healthd",
                    }
                )
    for s in made["node_states"]:
        spells.append({**s, "what": "outage", "by": s["set_by"] or "unknown", "from": 1})
    for r in made["reservations"]:
        if r["maintenance"]:
            spells.append(
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
    found = []
    for (cluster, node, what), some in groups(spells, "cluster", "node", "what").items():

        def order(s: Row) -> Any:
            return (s["start_time"], s["from"], ranked(s["end_time"]), s["reason"] or "", s["state"] or "")

        for island in merged(some, order):
            first, ends = island[0], [s["end_time"] for s in island]
            start, over = first["start_time"], None if None in ends else max(ends)
            if start < end and (over is None or over > begin):
                found.append(
                    {
                        "node": node,
                        "what": what,
                        "by_whom": first["by"],
                        "start_time": start,
                        "end_time": over,
                        "seconds": min(end if over is None else over, end) - max(start, begin),
                        "first_reason": first["reason"],
                        "first_state": first["state"],
                        "user_name": first["user_name"],
                        "cluster": cluster,
                        "from_slurm": sum(s["from"] == 1 for s in island),
                        "from_healthd": sum(s["from"] == 0 for s in island),
                    }
                )
    return found


def exclusions_coverage(made: History, begin: int, end: int) -> Rows:
    found = []
    submitted = [job for job in made["jobs"] if begin <= job["submit_time"] < end]
    for (cluster,), jobs in groups(submitted, "cluster").items():
        ids = {job["job_id"] for job in jobs}
        named = {x["job_id"]: x for x in made["exclusions"] if x["cluster"] == cluster and x["job_id"] in ids}
        looked = {job["job_id"] for job in jobs if job["exclusions_known"]}
        nodes = {x["node"] for x in made["exclusions"] if x["cluster"] == cluster and x["job_id"] in ids}
        known = len(looked | set(named))
        found.append(
            {
                "cluster": cluster,
                "jobs": len(ids),
                "known": known,
                "excluding": len(named),
                "excluded_nodes": len(nodes),
                "share_known": known / len(ids),
            }
        )
    return found


def sources_coverage(made: History, begin: int, end: int) -> Rows:
    found = []
    for (cluster, source), some in groups(made["ingests"], "cluster", "source").items():
        timed = [
            {**i, "start_time": i["from_time"], "end_time": i["to_time"]} for i in some if i["from_time"] is not None
        ]
        islands = merged(timed, lambda i: (i["start_time"], i["end_time"], i["name"]))
        for island in [*islands, *([[i for i in some if i["from_time"] is None]] if len(timed) < len(some) else [])]:
            begins = [i["from_time"] for i in island]
            low = None if None in begins else min(begins)
            high = None if low is None else max(i["to_time"] for i in island)
            if low is None or (low < end and high >= begin):
                found.append(
                    {
                        "source": source,
                        "from_time": low,
                        "to_time": high,
                        "names": len(island),
                        "cluster": cluster,
                        "rows_read": sum(i["rows_read"] for i in island),
                        "rows_unread": sum(i["rows_unread"] for i in island),
                        "read_time": max(i["read_time"] for i in island),
                    }
                )
    return found


# Each function gets the history and the requested interval, and returns the rows in any order.
ANSWERS: dict[str, Callable[[History, int, int], Rows]] = {
    "conditions": conditions,
    "exclusions_coverage": exclusions_coverage,
    "stream_gaps": holes,
    "jobs_known": lambda made, begin, end: [{"cluster": c, "known_until": t} for c, t in jobs_known(made).items()],
    "lines": lambda made, begin, end: lines(made),
    "node_days": node_days,
    "observed": observed,
    "observed_intervals": observed_intervals,
    "out_of_service": out_of_service,
    "preempted": preempted,
    "runs": runs,
    "seen_with_failures": seen_with_failures,
    "slow_times": slow_times,
    "sightings": lambda made, begin, end: sights(made),
    "sources_coverage": sources_coverage,
    "states": states,
}
