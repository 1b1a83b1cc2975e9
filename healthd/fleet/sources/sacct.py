"""Jobs from sacct: --parsable2 text or --json in files, or from calls of sacct, one for each day.

The header of a text file gives its columns, their order and the separator. Calls request only columns that are stored
or hashed:

    SLURM_TIME_FORMAT=%s   epoch seconds: no time zone, no repeated hour (src/common/parse_time.c, slurm_make_time_str)
    --duplicates           a requeued job keeps its id: without this option only its last run is printed
    --allusers --allocations --noconvert, --starttime=uts1763769600 (parse_time() accepts "uts" and epoch seconds)
    --delimiter            random for each call, so that no user's text can contain it
    --format               the last column has no free text: it ends the record

The call for a day prints all jobs that waited or ran on that day, so the last day of a job gives its final record.
sacct prints a job only from the time at which it may start: the call for today covers a year ahead, for jobs with a
later start. A rerun starts some days before the end of what was read of that cluster (covered_times.py), because
slurmctld sends records to slurmdbd late. Jobs that have no end in the store and that the last day did not print (an
operator ended them as runaway) are requested by their ids.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from operator import itemgetter
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from healthd.common.text import regex
from healthd.events.sequence import Runs
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.manifest import StoreError
from healthd.fleet.sources import sacct_json
from healthd.fleet.sources.calls import EPOCH, output
from healthd.fleet.sources.covered_times import not_ahead, of_text, text_of, to_ask
from healthd.fleet.sources.job_row import FIELDS, NO_CLUSTER, CutOff, JobRows, NotReadable, Row
from healthd.fleet.sources.lines import opened
from healthd.fleet.sources.pieces import read_together
from healthd.fleet.sources.reading import Reading
from healthd.fleet.sources.records import records
from healthd.fleet.sources.sacct_json import jobs_of, json_rows
from healthd.fleet.staging_text import field as clean
from healthd.fleet.tables import JOBS

if TYPE_CHECKING:
    from healthd.fleet.step import Step

NAME = "sacct"
LINES = 10_000  # of jobs, kept before they are written

# The form of each field, to recognise columns: src/sacct/print.c.
_ID = r"\d{1,10}(?:_(?:\d{1,10}|\[[^\]]*\]))?(?:\+\d{1,5})?(?:\.[^|]{1,64})?"
_TIME = r"|\d{10}|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,9}|Unknown|None"
_WORD = r"\S*"
_NUMBER = r"\d*"
_DURATION = r"[\d:.-]*|UNLIMITED|Partition_Limit|INVALID"
_TRES = r"|[^=,\s]+=[^=,]*(?:,[^=,\s]+=[^=,]*)*"
_FORMS = {
    _ID: "JobID JobIDRaw",
    _TIME: "Submit Eligible Start End",
    r"[A-Z][A-Z_]{2,30}(?: by \d{1,10})?": "State",
    r"|\d{1,10}:\d{1,3}": "ExitCode DerivedExitCode",
    r"\S*|None assigned": "NodeList",
    _TRES: "AllocTRES ReqTRES TRESUsageInAve TRESUsageInMax TRESUsageInMin TRESUsageInTot TRESUsageOutAve "
    "TRESUsageOutMax TRESUsageOutMin TRESUsageOutTot TRESUsageInMaxNode TRESUsageInMaxTask TRESUsageInMinNode "
    "TRESUsageInMinTask TRESUsageOutMaxNode TRESUsageOutMaxTask TRESUsageOutMinNode TRESUsageOutMinTask",
    _NUMBER: "AllocCPUS AllocNodes AssocID CPUTimeRAW DBIndex ElapsedRaw GID NCPUS NNodes NTasks PlannedCPURAW "
    "Priority QOSRAW ReqCPUS ReqNodes ReservationId Restarts ResvCPURAW UID WCKeyID",
    _DURATION: "AveCPU CPUTime Elapsed MinCPU Planned PlannedCPU Reserved ResvCPU Suspended SystemCPU Timelimit "
    "TimelimitRaw TotalCPU UserCPU",
    _WORD: "Account Cluster Group Partition QOS Reservation User AveCPUFreq AveDiskRead AveDiskWrite AvePages AveRSS "
    "AveVMSize ConsumedEnergy ConsumedEnergyRaw Flags Layout MaxDiskRead MaxDiskReadNode MaxDiskReadTask MaxDiskWrite "
    "MaxDiskWriteNode MaxDiskWriteTask MaxPages MaxPagesNode MaxPagesTask MaxRSS MaxRSSNode MaxRSSTask MaxVMSize "
    "MaxVMSizeNode MaxVMSizeTask MinCPUNode MinCPUTask ReqMem SLUID OriginalSLUID",
    "": "",  # after the last delimiter of --parsable
}
_FORM_OF = {name.lower(): regex(form) for form, names in _FORMS.items() for name in names.split() or [""]}
_FIELD = {name.lower(): name for name in FIELDS}
_NEEDED = ("State", "Submit")


class SacctText:
    """The columns of sacct and the form of their fields."""

    def is_header(self, names: Sequence[str], is_first: bool) -> bool:
        lower = {name.lower() for name in names}
        return bool({"jobid", "jobidraw"} & lower) and (is_first or {name.lower() for name in _NEEDED} <= lower)

    def free(self, name: str) -> bool:
        return name.lower() not in _FORM_OF

    def wanted(self, name: str) -> bool:
        return name.lower() in _FIELD

    def fits(self, name: str, text: str) -> bool:
        return _FORM_OF[name.lower()].fullmatch(text) is not None


def text_rows(
    file: BinaryIO, rows: JobRows, unread: Callable[[int, str], None], delimiter: str = ""
) -> Iterator[Row | None]:
    """Yield the jobs of a text, and None for each row that is not stored (a step).

    Raises UnreadableSource if a column is missing.
    """
    header: tuple[str, ...] | None = None
    pick: Callable[[list[str]], tuple[str, ...]] = tuple
    for batch in records(file, SacctText(), unread, delimiter):
        if batch.header is not header:
            header, pick = batch.header, _picked(batch.header)
        for line, fields in batch.rows:
            fields.append("")
            try:
                yield rows.read(pick(fields))
            except ValueError as error:
                unread(line, str(error))


def _picked(header: Sequence[str]) -> Callable[[list[str]], tuple[str, ...]]:
    """Return a function that selects the fields to read from a row. The row has an additional "" at its end."""
    place = {name.lower(): at for at, name in enumerate(header)}
    for name in _NEEDED:
        if name.lower() not in place:
            raise NotReadable(f"has no column {name}: run sacct with --format={','.join(FIELDS[:10])},...")
    return itemgetter(*(place.get(name.lower(), len(header)) for name in FIELDS))


# --- calls of sacct

DAY = 86_400
FIRST_DAYS = 365  # for a first run without --from
LATE_DAYS = 2
AHEAD_DAYS = 366
ASKED_AT_ONCE = 200  # ids in one call
MOST_ASKED = 5_000

LAST = "DBIndex"
_NOT_ASKED = ("NCPUS", "Timelimit", LAST)  # AllocCPUS and TimelimitRaw have the same content
COLUMNS = (*(name for name in FIELDS if name not in _NOT_ASKED), LAST)
NEWER = frozenset({"Restarts"})  # from 24.11
_NO_FIELD = regex(r"Invalid field requested: \"(\w+)\"")


def arguments(columns: Sequence[str], delimiter: str, cluster: str) -> list[str]:
    """Return the command without the options that select jobs."""
    cluster_option = [f"--clusters={cluster}"] if cluster else []
    return [
        *("sacct", "--allusers", "--duplicates", "--allocations", "--noconvert", "--parsable2"),
        *(f"--delimiter={delimiter}", f"--format={','.join(columns)}", *cluster_option),
    ]


def _ingest_calls(run: Run) -> None:
    """Ingest the days that are new, one step for each day, then the jobs that have no end yet."""
    asking = _Asking(run)
    days = days_of(run.now, asking.was_read, run.from_time, run.to_time)
    for begin in run.watch(days, unit="days"):
        asking.day(begin)
    if days and days[-1] + DAY > run.now:
        asking.open_jobs()


def days_of(now: int, was_read: Runs, from_time: int | None, to_time: int | None) -> list[int]:
    """Return the start of each day (UTC) that is to be requested."""
    end = now + 1 if to_time is None else min(to_time, now + 1)
    asked = to_ask(was_read, from_time, end, LATE_DAYS * DAY, now - FIRST_DAYS * DAY)
    return sorted({day for begin, until in asked for day in range(begin - begin % DAY, until, DAY)})


class _Asking:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.columns: tuple[str, ...] = COLUMNS
        self.open: set[str] = set()  # ids of the jobs that had no end on the last day
        about = _config()
        self.cluster = run.cluster or about.get("ClusterName", "")
        # Without --cluster it is the cluster of the local Slurm commands.
        self.cursor = f"days of {self.cluster}"
        self.was_read = not_ahead(run, of_text(run.cursor(self.cursor) or ""), self.cursor)
        # True if slurmdbd stores the scripts: slurm.conf(5).
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
        """Request the jobs that have no end in the store and that the last day did not print."""
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
        """Return the jobs that sacct prints. An older sacct is called again without the columns it does not have."""
        run = self.run
        while True:
            delimiter = f"\x1f{secrets.token_hex(6)}\x1f"
            argv = [*arguments(self.columns, delimiter, run.cluster), *which]
            unread: list[tuple[int, str]] = []
            rows = JobRows(run.private, timezone.utc, run.cluster, run.source.name)
            try:
                with output(argv, EPOCH) as out:
                    found = text_rows(out, rows, lambda line, why: unread.append((line, why)), delimiter)  # noqa: B023
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
        """Yield these jobs; batch jobs with the nodes that their scripts exclude, if the site stores scripts."""
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
        """Return the scripts of these jobs by (job id, submit time).

        They are requested as JSON: in the text of --batch-script a script could imitate the header of the next one.
        """
        argv = ["sacct", "--allusers", "--duplicates", "--allocations", "--batch-script", "--json"]
        cluster = [f"--clusters={self.run.cluster}"] if self.run.cluster else []
        found: dict[tuple[str, int], str] = {}
        try:
            with output([*argv, *cluster, f"--jobs={','.join(ids)}"]) as out:
                for _, job in jobs_of(out, lambda line, why: None):
                    script, submitted = job.get("script"), _submitted(job)
                    if isinstance(script, str) and script and submitted is not None:
                        found[str(job.get("job_id")), submitted] = script
        except (IngestError, NotReadable) as error:  # keep the jobs without their scripts
            self.scripts = False
            self.run.say(f"sacct: the exclusions in job scripts are not read: {error}")
        return found


def _config() -> dict[str, str]:
    """Return slurmctld's settings, or {} if it does not answer: sacct may work without it."""
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


# --- the source


def ingest(run: Run, files: list[str]) -> None:
    if not files:
        _ingest_calls(run)

    def stage(step: Step, reading: Reading) -> None:
        with staged_jobs(step) as jobs:
            for row in _rows_of_file(run, reading):
                jobs.add(row)
        step.covers(jobs.first, jobs.last, *jobs.clusters)

    read_together(run, files, stage)


def _rows_of_file(run: Run, reading: Reading) -> Iterator[Row]:
    """Yield the jobs in the requested time; all jobs count as read. Raises IngestError."""
    count = 0
    with opened(reading.name) as file:
        try:
            first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            file.seek(0)
            of, name = (json_rows, sacct_json.NAME) if first == b"{" else (text_rows, NAME)
            rows = JobRows(run.private, run.zone, run.cluster, name)
            for row in of(file, rows, reading.unread):
                if row is not None:
                    count += 1
                    if reading.wants(row.first_time, row.end_time):
                        yield row
            if rows.nameless and not rows.named:
                raise NotReadable(NO_CLUSTER)
        except CutOff as error:
            reading.cut(str(error))
        except NotReadable as error:
            raise IngestError(f"{reading.name}: {error}") from None
        except (EOFError, zlib.error) as error:
            reading.cut(f"the compressed file is cut: {error}")
        finally:
            reading.read(count)


# --- staging of jobs: clean text in the store's temporary folder, then rows of three tables


class StagedJobs:
    """Jobs read from one piece. first, last: time span of its jobs; None: no job."""

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
    """Stage the jobs added in the block at its end. Raises StoreError."""
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


SOURCE = Source(
    NAME,
    "--sacct",
    "FILE",
    "jobs, as printed by sacct --parsable2 or --json; without FILE sacct is run here, one call per day",
    ingest,
    runs=True,
)
