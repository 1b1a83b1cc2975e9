"""Measure queries on DuckDB and on Spark of this machine, over generated stores of growing size.

.venv-spark/bin/python bench/fleet_engines.py [JOBS ...]     default: 100000 1000000 4000000

scripts/test_spark.sh creates that environment. It prints one row for each size, engine and query, with wall-clock
seconds, CPU seconds and peak memory. CPU and memory are those of the process that answered, for Spark including its
Java. Each answer has its own process, as on the command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import duckdb

from healthd.fleet import engine, queries, spark
from healthd.fleet.store import literal, select_sql
from healthd.fleet.tables import TABLES

BEGIN, DAYS, NODES = 1_767_225_600, 330, 2_000  # 2026-01-01
QUERIES = ("states", "seen_with_failures", "runs", "preempted")
THREADS, MEMORY_MIB = 2, 4096


def make(folder: Path, jobs: int) -> engine.Files:
    """Generate jobs, their nodes, and one condition for each 20 jobs. Half of the conditions are near a job's end.

    Hashes make the result repeatable. Sizes and placement are not those of a real cluster, but the number of matching
    rows in each join is.
    """
    span = DAYS * 86400
    tables = {
        "jobs": f"""
            SELECT *, start_time + 60 + pick(n, 'long', 40000) AS end_time FROM (
              SELECT n, 'c1' AS cluster, n AS db_index, n AS job_id, 0 AS restarts,
                ['COMPLETED', 'COMPLETED', 'FAILED', 'PREEMPTED', 'NODE_FAIL'][1 + pick(n, 'state', 5)] AS state,
                {BEGIN} + n * {span} // {jobs} AS submit_time, submit_time + pick(n, 'wait', 3600) AS start_time,
                CASE WHEN pick(n, 'large', 10) = 0 THEN 1 + pick(n, 'nodes', 32) ELSE 1 END AS nodes, nodes * 8 AS gpus,
                CAST(pick(n, 'run', ({jobs} // 4)) AS VARCHAR) AS run_key
              FROM range({jobs}) AS r(n))""",
        "job_nodes": f"""
            SELECT cluster, db_index, 'node' || (hash(n, 'place') + i) % {NODES} AS node, submit_time, start_time,
              end_time
            FROM jobs_made, range(32) AS r(i) WHERE i < nodes""",
        "events": """
            SELECT cluster, node, 'b' AS boot_id, node AS stream_id, 'opened' AS event, 1 AS schema_version,
              row_number() OVER (PARTITION BY node ORDER BY time, db_index) AS seq, time, time AS first_time,
              time AS last_time, 'edge' AS kind, 'gpu_xid/79' AS code, 'gpu_xid' AS check_name, '' AS subject,
              'critical' AS severity, CAST(db_index AS VARCHAR) AS condition_id, 1 AS times,
              false AS observed, false AS history
            FROM (SELECT *, end_time - pick(db_index, 'near', 1200) AS time
                  FROM job_nodes_made WHERE pick(db_index, 'sick', 20) = 0)""",
    }
    files: dict[str, list[str]] = {}
    with duckdb.connect(":memory:") as connection:
        connection.execute("CREATE MACRO pick(n, what, below) AS CAST(hash(n, what) % below AS BIGINT)")
        for name, sql in tables.items():
            connection.execute(f"CREATE TABLE {name}_made AS {sql}")
            columns = {row[0] for row in connection.execute(f"DESCRIBE {name}_made").fetchall()}
            chosen = ", ".join(
                f"CAST({column if column in columns else 'NULL'} AS {kind}) AS {column}"
                for column, kind in TABLES[name].columns.items()
            )
            path = str(folder / f"{name}.parquet")
            connection.execute(f"COPY (SELECT {chosen} FROM {name}_made) TO {literal(path)} (FORMAT parquet)")
            select_sql(connection, name, [path])
            files[name] = [path]
    return files


def answer(engine_name: str, name: str, files: engine.Files) -> dict[str, float]:
    """Run one query in this process and return its cost."""
    available = queries.builtin_queries()
    needed = queries.with_dependencies(available[name], available)
    parameters = engine.QueryParameters(BEGIN, BEGIN + DAYS * 86400, queries.resolve_parameters(needed, {}))
    began = time.monotonic()
    if engine_name == "duckdb":
        with engine.run_queries(needed, files, parameters, THREADS, MEMORY_MIB) as found:
            rows = sum(1 for _ in found.rows)
    else:
        with spark.run_queries(needed, files, parameters, "spark", THREADS, MEMORY_MIB) as found:
            rows = sum(1 for _ in found.rows)
    return {"wall": time.monotonic() - began, "rows": rows}


def measured(engine_name: str, name: str, files: engine.Files) -> None:
    command = [sys.executable, __file__, "--answer", engine_name, name, json.dumps(files)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak, cpu = 0, {}
    while process.poll() is None:
        family = _process_tree(process.pid)
        peak = max(peak, sum(map(_resident_kib, family)))
        cpu |= {pid: seconds for pid in family if (seconds := _cpu_seconds(pid))}
        time.sleep(0.05)
    out = process.stdout.read() if process.stdout else ""
    rows = json.loads(out)["rows"] if process.returncode == 0 else f"failed: exit status {process.returncode}"
    print(
        f"  {engine_name:7} {name:20} {time.monotonic() - began:7.1f} s wall  {sum(cpu.values()):7.1f} s CPU"
        f"  {peak // 1024:6} MiB  {rows} rows",
        flush=True,
    )


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _process_tree(pid: int) -> list[int]:
    """Return the process and its descendants."""
    found = [pid]
    for parent in found:
        for task in Path("/proc", str(parent), "task").glob("*/children"):
            try:
                found += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
    return found


def _resident_kib(pid: int) -> int:
    try:
        lines = Path("/proc", str(pid), "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def main(sizes: list[int]) -> None:
    for jobs in sizes:
        with tempfile.TemporaryDirectory() as folder:
            files = make(Path(folder), jobs)
            size = sum(os.path.getsize(path) for paths in files.values() for path in paths)
            print(f"{jobs:,} jobs, {size / 1e6:,.0f} MB of Parquet, load {os.getloadavg()[0]:.1f}", flush=True)
            for name in QUERIES:
                for engine_name in ("duckdb", "spark"):
                    measured(engine_name, name, files)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        print(json.dumps(answer(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))))
    else:
        main([int(word) for word in sys.argv[1:]] or [100_000, 1_000_000, 4_000_000])
