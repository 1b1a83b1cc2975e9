"""Removes data that is older than a given date. Later ingests do not add it again.

A row is old if the time that determines its month is before the date. However, a row that ended after the date or has
not ended yet is kept. A job's nodes and exclusions are kept if the job is kept. The lists of GPUs are always kept.
"""

from __future__ import annotations

import os
from dataclasses import replace

from healthd.fleet.manifest import File
from healthd.fleet.store import Store, literal, quoted, select_sql, store_errors
from healthd.fleet.tables import EXCLUSIONS, GPUS, JOBS, TABLES, Table

# The column with the end time, by table.
END_COLUMNS = {
    "jobs": "end_time",
    "job_nodes": "end_time",
    "node_states": "end_time",
    "reservations": "end_time",
    "tickets": "closed_time",
    "scraped_conditions": "last_time",
    "ingests": "to_time",
}


def expired_condition(table: Table, before: int) -> str:
    """Return the SQL condition that selects rows older than `before`, or "" if no row can be."""
    column = END_COLUMNS.get(table.name, table.month_column)
    if not before or not column:
        return ""
    begin_condition = f" AND {quoted(table.month_column)} < {before}" if table.month_column else ""
    return (
        f"{quoted(column)} <= {before}{begin_condition}"
        if table.name in END_COLUMNS
        else f"{quoted(column)} < {before}"
    )


def prune(store: Store, before: int) -> dict[str, int]:
    """Remove rows older than `before` (whole seconds, UTC) in one commit. Return the number of removed rows by table.

    Raises StoreError.
    """
    manifest = replace(store.manifest, pruned_before=max(before, store.manifest.pruned_before))
    removed = {}
    with store_errors(store):
        manifest = manifest.with_files(GPUS.name, _with_cluster_names(store))
        for name, table in TABLES.items():
            if not (expired := expired_condition(table, before)):
                continue
            if table is EXCLUSIONS:
                expired += f" AND NOT {_kept_job_condition(store, before)}"
            months = {month: _rewrite_month(store, name, month, expired) for month in store.manifest.files(name)}
            rows = {month: file.rows if file else 0 for month, file in months.items()}
            removed[name] = sum(file.rows - rows[month] for month, file in store.manifest.files(name).items())
            manifest = manifest.with_files(name, months)
    if manifest != store.manifest:
        store.commit(manifest)
    return removed


def _with_cluster_names(store: Store) -> dict[str, File | None]:
    """Return new files for the table `gpus`, in which rows without a cluster have that of their stream.

    Until a node has read slurm.conf, its lines do not name the cluster (sql/lines.sql). Later lines of the same stream
    do, but prune may remove them.
    """
    months: dict[str, File | None] = {}
    events = select_sql(store.connection, "events", store.files("events"))
    named = f"SELECT node, stream_id, max(cluster) AS name FROM ({events}) WHERE cluster <> '' GROUP BY node, stream_id"
    columns = ", ".join(f"listed.{quoted(name)}" for name in GPUS.columns if name != "cluster")
    for month, file in store.manifest.files(GPUS.name).items():
        rows = select_sql(store.connection, GPUS.name, [os.path.join(store.folder, file.name)])
        source = f"FROM ({rows}) AS listed LEFT JOIN ({named}) AS named USING (node, stream_id)"
        unnamed = "coalesce(listed.cluster, '') = '' AND named.name IS NOT NULL"
        found = store.connection.execute(f"SELECT count(*) {source} WHERE {unnamed}").fetchone()
        if found and found[0]:
            cluster = f"CASE WHEN {unnamed} THEN named.name ELSE listed.cluster END AS cluster"
            months[month] = _write(store, GPUS, month, f"SELECT DISTINCT {cluster}, {columns} {source}")
    return months


def _kept_job_condition(store: Store, before: int) -> str:
    """Return the SQL condition for exclusions that belong to a kept job.

    Exclusions have no end time of their own.
    """
    jobs = select_sql(store.connection, "jobs", store.files("jobs"))
    names = "cluster, job_id, submit_time"
    return (
        f"coalesce(({names}) IN (SELECT ({names}) FROM ({jobs}) WHERE submit_time < {before} "
        f"AND ({expired_condition(JOBS, before)}) IS NOT TRUE AND cluster IS NOT NULL AND job_id IS NOT NULL), false)"
    )


def _rewrite_month(store: Store, table: str, month: str, expired: str) -> File | None:
    """Return the month's file without the old rows, or None if no rows are left."""
    file = store.manifest.files(table)[month]
    rows = select_sql(store.connection, table, [os.path.join(store.folder, file.name)])
    found = store.connection.execute(f"SELECT count(*) FROM ({rows}) WHERE {expired}").fetchone()
    count = found[0] if found else 0
    if count in (0, file.rows):
        return None if count else file
    return _write(store, TABLES[table], month, f"SELECT * FROM ({rows}) WHERE ({expired}) IS NOT TRUE")


def _write(store: Store, table: Table, month: str, select: str) -> File:
    """Write the selected rows to the month's next file."""
    path = store.path(table.name, month)
    columns = ", ".join(map(quoted, [*table.key_columns, *table.row_key_columns]))
    written = store.connection.execute(
        f"COPY ({select} ORDER BY {columns}) TO {literal(path)} (FORMAT parquet, COMPRESSION zstd)"
    ).fetchone()
    return File(os.path.relpath(path, store.folder), written[0] if written else 0, os.path.getsize(path))
