"""Jobs that we ask sacct for: a day a call, and only what is kept or hashed.

    SLURM_TIME_FORMAT=%s   epoch seconds: no time zone, no hour twice (slurm_make_time_str() in src/common/parse_time.c)
    --duplicates           a requeue keeps the job's id: without it only its last run is told
    --allusers --allocations --noconvert, --starttime=uts1763769600 (parse_time() takes "uts" and epoch seconds)
    --delimiter            made anew for each call, so that nobody's text can have it in it
    --format               the columns that are read, one without free text last: it ends the record

A day's call tells all jobs that waited or ran on it, so a job that ended is told by its last day. sacct tells a job
from the moment on that it may start: today's call asks for a year ahead, for jobs that were given a later day. A rerun
begins some days before the end of what was read of that cluster (covered_times.py), for what slurmctld tells slurmdbd
late; jobs of the store that have no end and that the last day did not tell (an operator ended them as runaway) are
asked for by their ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, BinaryIO

from healthd.common.text import regex
from healthd.events.sequence import Runs
from healthd.fleet.ingest import IngestError, Run
from healthd.fleet.sources.calls import EPOCH, output
from healthd.fleet.sources.covered_times import not_ahead, of_text, text_of, to_ask
from healthd.fleet.sources.job_row import FIELDS, JobRows, NotReadable, Row
from healthd.fleet.sources.sacct_json import jobs_of
from healthd.fleet.sources.staged_jobs import staged_jobs

if TYPE_CHECKING:
    from healthd.fleet.step import Step

DAY = 86_400
FIRST_DAYS = 365  # of a first run that says no --from
LATE_DAYS = 2
AHEAD_DAYS = 366
ASKED_AT_ONCE = 200  # ids in one call
MOST_ASKED = 5_000

LAST = "DBIndex"
_NOT_ASKED = ("NCPUS", "Timelimit", LAST)  # AllocCPUS and TimelimitRaw say the same
COLUMNS = (*(name for name in FIELDS if name not in _NOT_ASKED), LAST)
NEWER = frozenset({"Restarts"})  # from 24.11
_NO_FIELD = regex(r"Invalid field requested: \"(\w+)\"")

TextRows = Callable[[BinaryIO, JobRows, Callable[[int, str], None], str], Iterator["Row | None"]]


def arguments(columns: Sequence[str], delimiter: str, cluster: str) -> list[str]:
    """sacct, but for which jobs."""
    cluster_option = [f"--clusters={cluster}"] if cluster else []
    return [
        *("sacct", "--allusers", "--duplicates", "--allocations", "--noconvert", "--parsable2"),
        *(f"--delimiter={delimiter}", f"--format={','.join(columns)}", *cluster_option),
    ]


def ingest(run: Run, text_rows: TextRows) -> None:
    """The days that are new, then what is still open. Each day is a step."""
    asking = _Asking(run, text_rows)
    days = days_of(run.now, asking.was_read, run.from_time, run.to_time)
    for begin in run.watch(days, unit="days"):
        asking.day(begin)
    if days and days[-1] + DAY > run.now:
        asking.open_jobs()


def days_of(now: int, was_read: Runs, from_time: int | None, to_time: int | None) -> list[int]:
    """When each day begins that is to be asked for, UTC."""
    end = now + 1 if to_time is None else min(to_time, now + 1)
    asked = to_ask(was_read, from_time, end, LATE_DAYS * DAY, now - FIRST_DAYS * DAY)
    return sorted({day for begin, until in asked for day in range(begin - begin % DAY, until, DAY)})


class _Asking:
    def __init__(self, run: Run, text_rows: TextRows) -> None:
        self.run = run
        self.text_rows = text_rows
        self.columns: tuple[str, ...] = COLUMNS
        self.open: set[str] = set()  # ids of the jobs that have no end, by the last day
        about = _config()
        self.cluster = run.cluster or about.get("ClusterName", "")
        # One that is not named is the one whose commands these are.
        self.cursor = f"days of {self.cluster}"
        self.was_read = not_ahead(run, of_text(run.cursor(self.cursor) or ""), self.cursor)
        # Whether slurmdbd has the scripts: slurm.conf(5).
        self.scripts = "job_script" in about.get("AccountingStoreFlags", "").lower()

    def day(self, begin: int) -> None:
        run = self.run
        until = min(begin + DAY, run.now)
        name = f"day {datetime.fromtimestamp(begin, timezone.utc):%Y-%m-%d}"
        with run.step(name, begin, until, self.cluster or None) as step, staged_jobs(step) as jobs:
            is_today = begin + DAY > run.now
            end = begin + (AHEAD_DAYS if is_today else 1) * DAY
            rows = self._asked(name, f"--starttime=uts{begin}", f"--endtime=uts{end}")
            self.open = {row.job_id for row in rows if row.end_time is None}
            for row in self._with_scripts(rows):
                jobs.add(row)
            step.covers(begin, until, *jobs.clusters)
            if len(jobs.clusters) == 1:
                (self.cluster,) = jobs.clusters
            self.was_read.add(begin, until - 1)
            step.cursor(self.cursor, text_of(self.was_read))

    def open_jobs(self) -> None:
        """Jobs that the store has without an end, and that Slurm does not tell as such any more."""
        run = self.run
        with run.step("open jobs", None, run.now, self.cluster or None) as step:
            ids = self._stale(step)
            with staged_jobs(step) as jobs:
                for at in range(0, len(ids), ASKED_AT_ONCE):
                    asked = ",".join(ids[at : at + ASKED_AT_ONCE])
                    for row in self._asked("open jobs", f"--jobs={asked}"):
                        jobs.add(row)

    def _stale(self, step: Step) -> list[str]:
        found = step.execute(
            f"SELECT DISTINCT job_id FROM {step.live('jobs')} WHERE end_time IS NULL AND source = ? AND cluster = ? "
            "ORDER BY job_id",
            (self.run.source.name, self.cluster),
        ).fetchall()
        return [str(job) for (job,) in found if str(job) not in self.open][:MOST_ASKED]

    def _asked(self, name: str, *which: str) -> list[Row]:
        """What sacct tells. One that does not know a column of newer versions is asked without it."""
        run = self.run
        while True:
            delimiter = f"\x1f{secrets.token_hex(6)}\x1f"
            argv = [*arguments(self.columns, delimiter, run.cluster), *which]
            unread: list[tuple[int, str]] = []
            rows = JobRows(run.private, timezone.utc, run.cluster, run.source.name)
            try:
                with output(argv, EPOCH) as out:
                    found = self.text_rows(out, rows, lambda line, why: unread.append((line, why)), delimiter)  # noqa: B023
                    told = [row for row in found if row is not None]
            except NotReadable as error:
                raise IngestError(f"{name}: {error}") from None
            except IngestError as error:
                unknown = _NO_FIELD.search(str(error))
                if unknown is None or unknown[1] not in NEWER.intersection(self.columns):
                    raise
                self.columns = tuple(column for column in self.columns if column != unknown[1])
                continue
            for line, why in unread:
                run.unread(f"sacct, {name}", line, why)
            run.read(len(told))
            return told

    def _with_scripts(self, rows: list[Row]) -> Iterator[Row]:
        """The same; of batch jobs with what their scripts exclude, where the site keeps scripts."""
        batch = [row.job_id for row in rows if row.batch]
        scripts: dict[tuple[str, int], str] = {}
        if batch and self.scripts:
            ids = sorted(set(batch))
            for at in range(0, len(ids), ASKED_AT_ONCE):
                scripts |= self._asked_scripts(ids[at : at + ASKED_AT_ONCE])
        for row in rows:
            script = scripts.get((row.job_id, row.submit_time), "")
            yield row.with_script(script) if script else row

    def _asked_scripts(self, ids: Iterable[str]) -> dict[tuple[str, int], str]:
        """As JSON: in the text of --batch-script any script could pretend to be the next one's beginning."""
        argv = ["sacct", "--allusers", "--duplicates", "--allocations", "--batch-script", "--json"]
        cluster = [f"--clusters={self.run.cluster}"] if self.run.cluster else []
        found: dict[tuple[str, int], str] = {}
        try:
            with output([*argv, *cluster, f"--jobs={','.join(ids)}"]) as out:
                for _, job in jobs_of(out, lambda line, why: None):
                    script, submitted = job.get("script"), _submitted(job)
                    if isinstance(script, str) and script and submitted is not None:
                        found[str(job.get("job_id")), submitted] = script
        except (IngestError, NotReadable) as error:  # the jobs are worth more
            self.scripts = False
            self.run.say(f"sacct: the scripts are not looked through for nodes that they exclude: {error}")
        return found


def _config() -> dict[str, str]:
    """What slurmctld says of its settings; {} where it cannot be asked: sacct may do without it."""
    try:
        with output(["scontrol", "show", "config"]) as out:
            lines = out.read(1 << 20).decode("utf-8", "replace").split("\n")
    except IngestError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}


def _submitted(job: Mapping[str, Any]) -> int | None:
    times = job.get("time")
    found = times.get("submission") if isinstance(times, dict) else None
    return found if isinstance(found, int) else None
