"""Jobs on their way into a step: as clean text in the store's temporary folder, then as rows of three tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from healthd.fleet.manifest import StoreError
from healthd.fleet.sources.job_row import Row
from healthd.fleet.staging_text import field as clean
from healthd.fleet.tables import JOBS

if TYPE_CHECKING:
    from healthd.fleet.step import Step

LINES = 10_000  # kept before they are written


class StagedJobs:
    """What was read of one piece. `first`, `last`: the time that its jobs speak of; None: there is none."""

    def __init__(self, jobs: TextIO, exclusions: TextIO) -> None:
        self.clusters: set[str] = set()
        self.first: int | None = None
        self.last: int | None = None
        self.count = 0
        self.excluded = 0
        self._jobs = jobs
        self._exclusions = exclusions
        self._lines: list[str] = []

    def add(self, row: Row) -> None:
        self._lines.append(f"{row.head}\t{'true' if row.known else 'false'}\t{row.tail}")
        self.count += 1
        if len(self._lines) >= LINES:
            self.flush()
        if self.first is None or row.submit_time < self.first:
            self.first = row.submit_time
        last = row.end_time or row.first_time
        if self.last is None or last > self.last:
            self.last = last
        self.clusters.add(row.cluster)
        self.excluded += len(row.excluded)
        for node in row.excluded:
            about = (row.cluster, row.db_index, row.submit_time, clean(node), row.source, row.job_id)
            self._exclusions.write("\t".join(map(str, about)) + "\n")

    def flush(self) -> None:
        if self._lines:
            self._jobs.write("\n".join(self._lines) + "\n")
            self._lines.clear()
        self._jobs.flush()
        self._exclusions.flush()


@contextmanager
def staged_jobs(step: Step) -> Iterator[StagedJobs]:
    """Jobs that are added in the block are staged at its end. Raises StoreError."""
    folder = step.store.temporary
    paths = [os.path.join(folder, name) for name in ("jobs.tsv", "job_exclusions.tsv")]
    try:
        with ExitStack() as files:
            jobs = StagedJobs(*(files.enter_context(open(path, "w", encoding="utf-8")) for path in paths))
            yield jobs
            jobs.flush()
        if jobs.count:
            _stage(step, paths[0])
        if jobs.excluded:
            step.stage_text("exclusions", paths[1])
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    finally:
        for path in paths:
            with suppress(FileNotFoundError):
                os.unlink(path)


def _stage(step: Step, path: str) -> None:
    from healthd.fleet.store import literal, quoted

    columns = {**JOBS.columns, "names": "VARCHAR"}
    typed = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in columns.items())
    table = (
        f"read_csv({literal(path)}, auto_detect = false, header = false, delim = '\t', quote = '\"', escape = '\"', "
        f"nullstr = '', allow_quoted_nulls = false, columns = {{{typed}}})"
    )
    step.stage_sql("jobs", f"SELECT {', '.join(map(quoted, JOBS.columns))} FROM {table}")
    step.stage_sql(
        "job_nodes",
        "SELECT cluster, db_index, unnest(string_split(names, ' ')), submit_time, start_time, end_time, gpus / nodes "
        f"FROM {table} WHERE names IS NOT NULL",
    )
