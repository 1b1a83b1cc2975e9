"""A small made-up history of two clusters with many edge cases: equal times, requeues, gaps, restarts, unknown
values."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import duckdb

from healthd.fleet.store import literal
from healthd.fleet.tables import TABLES

Row = dict[str, Any]
History = dict[str, list[Row]]

HOUR, DAY = 3600, 86400
FIRST = 1_793_491_200 - 2 * DAY  # 2026-10-30, so that a month ends in the history
BEGIN, END = FIRST + DAY - 2 * HOUR, FIRST + 4 * DAY + 5 * HOUR  # the requested interval
CLUSTERS, NODES = ("c1", "c2"), ("gpu-1", "gpu-2", "gpu-3")
STATES = ("COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED", "REQUEUED", "CANCELLED")
SEVERITIES = ("info", "warning", "degraded", "critical")
CODES = (
    ("gpu_xid", "gpu_xid/79", "edge"),
    ("mount", "mount/missing", "level"),
    ("ib_link", "ib_link/down", "level"),
    ("failslow", "failslow/job", "level"),
)
# Offsets around the ends of windows and days.
EDGE_OFFSETS = (-601, -600, -599, -60, -1, 0, 1, 59, 60, 61, 299, 300, 301, 1500)


def random_time(random: Random) -> int:
    return (
        FIRST + random.randint(0, 5 * DAY)
        if random.random() < 0.5
        else random.choice((BEGIN, END, FIRST + DAY, FIRST + 2 * DAY, FIRST + 3 * DAY)) + random.choice(EDGE_OFFSETS)
    )


def value_or_none(random: Random, value: Any, share: float = 0.9) -> Any:
    return value if random.random() < share else None


def history(random: Random, size: int = 6) -> History:
    """Return about `size` jobs and pieces of streams."""
    tables: History = {name: [] for name in TABLES}
    _add_jobs(random, tables, random.randint(0, 2 * size))
    _add_streams(random, tables, random.randint(0, size))
    ends = [job["end_time"] for job in tables["jobs"] if job["end_time"] is not None] or [BEGIN]
    for number in range(random.randint(0, size)):
        check, code, _ = random.choice(CODES)
        first = random.choice(ends) + random.choice(EDGE_OFFSETS)
        duration, severity = random.choice((0, 60, 7200)), random.randrange(len(SEVERITIES))
        first_severity = random.randint(0, severity) if duration else severity
        worst_time = (
            None
            if number % 3 == 0
            else first + number + (duration and first_severity < severity and random.choice((60, duration)))
        )
        tables["scraped_conditions"].append(
            row(
                "scraped_conditions",
                cluster=random.choice(CLUSTERS),
                node=random.choice(NODES),
                check_name=check,
                code=code,
                subject=random.choice(("", "p1")),
                severity=SEVERITIES[severity],
                first_time=first + number,
                last_time=first + number + duration,
                step_seconds=60,
                first_severity=None if worst_time is None else SEVERITIES[first_severity],
                worst_time=worst_time,
                observed=None if worst_time is None else random.choice((True, False)),
            )
        )
    for number in range(random.randint(0, size)):
        start = random_time(random)
        tables["node_states"].append(
            row(
                "node_states",
                cluster=random.choice(CLUSTERS),
                node=random.choice(NODES),
                start_time=start + number,
                end_time=value_or_none(random, start + number + random.choice((1, 600, HOUR, DAY)), 0.8),
                state=random.choice(("DOWN", "DRAINED")),
                reason=random.choice(("healthd: gpu_xid/79", "bad", None)),
                user_name=random.choice((None, "slurm", "root", "ann")),
                set_by=(None, "slurm", "person", "healthd")[number % 4],
            )
        )
    for number in range(random.randint(0, 2)):
        start = random_time(random)
        tables["reservations"].append(
            row(
                "reservations",
                cluster=random.choice(CLUSTERS),
                name=f"r{number}",
                node=random.choice(NODES),
                start_time=start,
                end_time=start + DAY,
                maintenance=random.choice((True, True, False, None)),
            )
        )
    _add_other_tables(random, tables, size)
    _add_gpus(random, tables)
    return {table: _unique_rows(table, rows) for table, rows in tables.items()}


def row(table: str, **values: Any) -> Row:
    assert set(values) <= set(TABLES[table].columns)
    return {**dict.fromkeys(TABLES[table].columns), **values}


def _unique_rows(table: str, rows: list[Row]) -> list[Row]:
    """Return one row for each key, the latest, as the store has it."""
    key_columns = TABLES[table].key_columns
    if table in ("job_nodes", "exclusions", "reservations", "gpus"):  # several rows have the same key
        return list({tuple(each.values()): each for each in rows}.values())
    return list({tuple(each[column] for column in key_columns): each for each in rows}.values())


def _add_jobs(random: Random, tables: History, count: int) -> None:
    ends = [BEGIN]
    freed_nodes: dict[str, list[tuple[int, list[str]]]] = {cluster: [] for cluster in CLUSTERS}
    for number in range(count):
        cluster, db_index = CLUSTERS[number % 2], number // 2 + 1
        submit = (
            random_time(random) if random.random() < 0.7 else random.choice(ends) + random.choice((0, 1, DAY, DAY + 1))
        )
        start = value_or_none(random, random.choice([*ends, submit]) + random.choice((0, 1, 59, 60, 61, HOUR)), 0.85)
        if start is not None:
            start = max(start, submit)
        end = value_or_none(random, (submit if start is None else start) + random.choice((0, 30, 900, HOUR, DAY)), 0.9)
        nodes = random.sample(NODES, random.randint(1, 3)) if start is not None else []
        if freed_nodes[cluster] and random.random() < 0.3:  # it takes the nodes of an ended job
            freed_at, nodes = random.choice(freed_nodes[cluster])
            start = freed_at + random.choice((-1, 0, 59, 60, 61))
            submit, end = start - 5, start + random.choice((30, HOUR))
        if end is not None:
            ends.append(end)
            freed_nodes[cluster].append((end, nodes or [NODES[0]]))
        gpus = random.choice((None, 0, 1, 7, 8, 9, 128, 129, 1024, 70000))
        job_id = random.randint(1, 4)
        task = value_or_none(random, random.randint(0, 2), 0.2)
        tables["jobs"].append(
            row(
                "jobs",
                cluster=cluster,
                db_index=db_index,
                job_id=job_id,
                state=random.choice(STATES) if end is not None else "RUNNING",
                array_job_id=None if task is None else 3,
                array_task_id=task,
                submit_time=submit,
                eligible_time=value_or_none(random, submit + random.choice((0, 10)), 0.8),
                start_time=start,
                end_time=end,
                nodes=len(nodes),
                gpus=gpus,
                run_key=random.choice((None, None, "k1", "k2")),
                exclusions_known=random.choice((True, False, None)),
            )
        )
        for node in nodes:
            tables["job_nodes"].append(
                row(
                    "job_nodes",
                    cluster=cluster,
                    db_index=db_index,
                    node=node,
                    submit_time=submit,
                    start_time=start,
                    end_time=end,
                    gpus=None if gpus is None else gpus / len(nodes),
                )
            )
        if end is not None and random.random() < 0.2:
            tables["preemptions"].append(
                row(
                    "preemptions",
                    cluster=cluster,
                    time=end + random.choice((-61, -60, 0, 60, 61)),
                    job_id=job_id,
                    preemptor_job_id=random.randint(1, 5),
                    mode=random.choice(("requeued", "cancelled")),
                    preemptor_array_task_id=value_or_none(random, random.randint(0, 2), 0.2),
                )
            )


def _add_streams(random: Random, tables: History, count: int) -> None:
    ends = [job["end_time"] for job in tables["jobs"] if job["end_time"] is not None] or [BEGIN]
    for number in range(count):
        node, time, seq, mono = random.choice(NODES), random_time(random), random.randint(1, 3), 100.0
        stream, boot = f"{number:016x}", f"b{number}"
        cluster = random.choice(CLUSTERS)
        open_lines: dict[str, Row] = {}
        for step in range(random.randint(1, 9)):
            lost_lines = random.choice((0, 0, 0, 0, 0, 1, 3))
            seq += 1 + lost_lines
            seconds = random.choice((0, 1, 59, 600, HOUR, DAY, 90000, 90001))
            if random.random() < 0.4:
                seconds = max(random.choice(ends) + random.choice(EDGE_OFFSETS) - time, 0)
            mono += seconds
            time += seconds + random.choice((0, 0, 0, 0, 60, 61, -HOUR))
            if random.random() < 0.1:
                boot, mono = f"{boot}x", 5.0
            event = random.choice(
                (
                    "started",
                    "stopped",
                    "alive",
                    "dropped",
                    "drain",
                    "resume",
                    "opened",
                    "opened",
                    "seen_again",
                    "worsened",
                    "cleared",
                    "new",
                )
            )
            event = "dropped" if lost_lines and random.random() < 0.5 else event
            line = row(
                "events",
                cluster=random.choice(("", cluster)) if step < 2 else cluster,
                node=node,
                boot_id=boot,
                stream_id=stream,
                seq=seq,
                time=time,
                mono=mono,
                schema_version=1,
                event=event,
            )
            if event == "started":
                line["last_alive_time"] = value_or_none(random, time - random.choice((0, 30, HOUR)), 0.8)
            elif event == "dropped":
                line["dropped"] = random.randint(1, 3)
            elif event in ("drain", "resume"):
                line |= {"stage": random.choice(("sent", "confirmed", "confirmed")), "reason": "healthd: gpu_xid/79"}
            elif event in ("opened", "seen_again", "worsened", "cleared"):
                check, code, kind = random.choice(CODES)
                first_line = open_lines.get(code)
                first = first_line["first_time"] if first_line else time - random.choice((0, 5))
                line |= {
                    "condition_id": f"{code}-{first}",
                    "check_name": check,
                    "code": code,
                    "subject": random.choice(("", "p1")),
                    "severity": random.choice(SEVERITIES),
                    "kind": kind,
                    "first_time": first,
                    "last_time": time - random.choice((0, 0, 7)),
                    "times": seq,
                    "cleared_by": "pass" if event == "cleared" else None,
                    "observed": random.choice((False, False, False, False, True, None)),
                    "history": random.choice((False, False, False, False, True, None)),
                }
                if check == "failslow" and random.random() < 0.8:
                    line |= {
                        "slowdown": random.choice((0.1, 0.25, 2.0)),
                        "onset_time": first - random.choice((0, 30, 600)),
                        "jobs": random.choice(("1", "2 3", None)),
                    }
                open_lines[code] = line
            tables["events"].append(line)
    if random.random() < 0.2:  # a line of a future schema
        tables["events"].append(row("events", cluster="c1", node="gpu-1", stream_id="new", schema_version=9, rest="{}"))


def _add_other_tables(random: Random, tables: History, size: int) -> None:
    for number in range(random.randint(0, size)):
        tables["exclusions"].append(
            row(
                "exclusions",
                cluster=random.choice(CLUSTERS),
                job_id=random.randint(1, 6),
                submit_time=random_time(random),
                node=random.choice(NODES),
                source=random.choice(("submit_line", "squeue")),
            )
        )
        begin = value_or_none(random, random_time(random), 0.8)
        tables["ingests"].append(
            row(
                "ingests",
                cluster=random.choice(CLUSTERS),
                source=random.choice(("sacct", "events")),
                name=f"f{number}",
                from_time=begin,
                to_time=None if begin is None else begin + random.choice((0, HOUR, DAY)),
                read_time=FIRST + 6 * DAY + number,
                rows_read=number * 10,
                rows_unread=number,
            )
        )
    for node in random.sample(NODES, random.randint(0, 2)):
        tables["nodes"].append(row("nodes", cluster="c1", node=node, gpus=8))


def _add_gpus(random: Random, tables: History) -> None:
    """List the GPUs of some lines' nodes. GPUs move between slots and nodes; some numbers are unknown or shared."""
    for line in tables["events"]:
        if line["seq"] is None or random.random() < 0.7:
            continue
        event = {name: line[name] for name in ("cluster", "node", "stream_id", "seq", "time")}
        for slot in random.sample(("s1", "s2", "s3"), random.randint(2, 3)):
            number = random.randint(1, 9)
            names = {"serial": value_or_none(random, f"{number // 2}"), "uuid": value_or_none(random, f"GPU-{number}")}
            tables["gpus"].append(row("gpus", **event, subject=slot, **names, name=random.choice(("A", "B"))))


def write_parquet(tables: History, folder: Path, parts: int = 1, random: Random | None = None) -> dict[str, list[str]]:
    """Write the tables as `parts` Parquet files each and return their paths.

    With `random`, the order of rows is shuffled. Empty tables have no file.
    """
    files: dict[str, list[str]] = {}
    with duckdb.connect(":memory:") as connection:
        for table, rows in tables.items():
            rows = random.sample(rows, len(rows)) if random else rows
            columns = ", ".join(f"{name}: '{kind}'" for name, kind in TABLES[table].columns.items())
            for part in range(parts):
                part_rows = rows[part::parts]
                if part_rows:
                    path, text = folder / f"{table}-{part}.parquet", folder / f"{table}-{part}.json"
                    # DuckDB takes ten times as long if the same rows are parameters.
                    text.write_text("".join(f"{json.dumps(each)}\n" for each in part_rows), "utf-8")
                    lines = f"read_json({literal(str(text))}, format = 'newline_delimited', columns = {{{columns}}})"
                    connection.execute(f"COPY (FROM {lines}) TO {literal(str(path))} (FORMAT parquet)")
                    files.setdefault(table, []).append(str(path))
    return files
