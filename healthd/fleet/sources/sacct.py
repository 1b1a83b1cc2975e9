"""Reads jobs from sacct: from files with --parsable2 text or --json, or by calling sacct once per day.

A text file's header gives the columns, their order and the separator. Calls request only columns that are stored or
hashed:

    SLURM_TIME_FORMAT=%s   epoch seconds: no time zone, no repeated hour (src/common/parse_time.c, slurm_make_time_str)
    --duplicates           a requeued job keeps its id, and without this option only its last run is printed
    --allusers --allocations --noconvert, --starttime=uts1763769600 (parse_time() accepts "uts" and epoch seconds)
    --delimiter            random for each call, so that no user's text can contain it
    --format               the last column has no free text, so it ends the record

The call for a day prints all jobs that waited or ran on that day, so the call for a job's last day gives its final
record. sacct prints a job only from the time at which it may start. The call for today therefore extends a year into
the future, to include jobs that may start later. A rerun starts some days before the end of the time already read for
that cluster (covered_times.py), because slurmctld sends records to slurmdbd late. Some jobs have no end in the store
and are not in the last day's output, for example because an operator ended them as runaway. They are requested by their
ids.
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
from healthd.fleet.sources.common import ingest_in_batches
from healthd.fleet.sources.covered_times import format_spans, parse_spans, uncovered_spans, without_future
from healthd.fleet.sources.job_row import FIELDS, NO_CLUSTER, JobRow, JobRowReader, TruncatedSource, UnreadableSource
from healthd.fleet.sources.lines import open_unpacked
from healthd.fleet.sources.reading import Reading
from healthd.fleet.sources.records import read_records
from healthd.fleet.sources.sacct_json import json_rows, read_jobs
from healthd.fleet.sources.slurm_commands import EPOCH_TIMES, command_output
from healthd.fleet.staging_text import clean_field as clean
from healthd.fleet.tables import JOBS

if TYPE_CHECKING:
    from healthd.fleet.step import Step

NAME = "sacct"
MAX_BUFFERED_LINES = 10_000  # maximum lines of jobs kept before they are written

# The form of each field, by which columns are recognised. Source: src/sacct/print.c.
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
_FORMS_BY_NAME = {name.lower(): regex(form) for form, names in _FORMS.items() for name in names.split() or [""]}
_FIELD = {name.lower(): name for name in FIELDS}
_NEEDED = ("State", "Submit")


class SacctText:
    """sacct's columns, and the form of the fields in them."""

    def is_header(self, names: Sequence[str], is_first: bool) -> bool:
        lower = {name.lower() for name in names}
        return bool({"jobid", "jobidraw"} & lower) and (is_first or {name.lower() for name in _NEEDED} <= lower)

    def is_free_text(self, name: str) -> bool:
        return name.lower() not in _FORMS_BY_NAME

    def is_used(self, name: str) -> bool:
        return name.lower() in _FIELD

    def fits(self, name: str, text: str) -> bool:
        return _FORMS_BY_NAME[name.lower()].fullmatch(text) is not None


def text_rows(
    file: BinaryIO, rows: JobRowReader, unread: Callable[[int, str], None], delimiter: str = ""
) -> Iterator[JobRow | None]:
    """Yield the jobs in a text, and None for each row that is not stored (a step).

    Raises UnreadableSource if a column is missing.
    """
    header: tuple[str, ...] | None = None
    pick: Callable[[list[str]], tuple[str, ...]] = tuple
    for batch in read_records(file, SacctText(), unread, delimiter):
        if batch.header is not header:
            header, pick = batch.header, _field_selector(batch.header)
        for line, fields in batch.rows:
            fields.append("")
            try:
                yield rows.read(pick(fields))
            except ValueError as error:
                unread(line, str(error))


def _field_selector(header: Sequence[str]) -> Callable[[list[str]], tuple[str, ...]]:
    """Return a function that selects the needed fields from a row. It expects an additional "" at the row's end."""
    positions = {name.lower(): position for position, name in enumerate(header)}
    for name in _NEEDED:
        if name.lower() not in positions:
            raise UnreadableSource(f"has no column {name}; run sacct with --format={','.join(FIELDS[:10])},...")
    return itemgetter(*(positions.get(name.lower(), len(header)) for name in FIELDS))


# --- calls to sacct

DAY = 86_400
FIRST_DAYS = 365  # used for a first run without --from
OVERLAP_DAYS = 2
AHEAD_DAYS = 366
IDS_PER_CALL = 200  # maximum ids per call
MAX_REQUESTED_IDS = 5_000

LAST_COLUMN = "DBIndex"
_UNREQUESTED_FIELDS = ("NCPUS", "Timelimit", LAST_COLUMN)  # AllocCPUS and TimelimitRaw have the same contents
COLUMNS = (*(name for name in FIELDS if name not in _UNREQUESTED_FIELDS), LAST_COLUMN)
NEWER_COLUMNS = frozenset({"Restarts"})  # from 24.11
_NO_FIELD = regex(r"Invalid field requested: \"(\w+)\"")


def arguments(columns: Sequence[str], delimiter: str, cluster: str) -> list[str]:
    """Return the command without the options that select jobs."""
    cluster_option = [f"--clusters={cluster}"] if cluster else []
    return [
        *("sacct", "--allusers", "--duplicates", "--allocations", "--noconvert", "--parsable2"),
        *(f"--delimiter={delimiter}", f"--format={','.join(columns)}", *cluster_option),
    ]


def _ingest_calls(run: Run) -> None:
    """Ingest the new days, one step per day, and then the jobs that have no end yet."""
    calls = _SacctCalls(run)
    days = missing_days(run.now, calls.covered, run.from_time, run.to_time)
    for begin in run.track(days, unit="days"):
        calls.request_day(begin)
    if days and days[-1] + DAY > run.now:
        calls.request_open_jobs()


def missing_days(current_time: int, was_read: Runs, from_time: int | None, to_time: int | None) -> list[int]:
    """Return the start of each day (UTC) that must be requested."""
    end = current_time + 1 if to_time is None else min(to_time, current_time + 1)
    spans = uncovered_spans(was_read, from_time, end, OVERLAP_DAYS * DAY, current_time - FIRST_DAYS * DAY)
    return sorted({day for begin, until in spans for day in range(begin - begin % DAY, until, DAY)})


class _SacctCalls:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.columns: tuple[str, ...] = COLUMNS
        self.unfinished: set[str] = set()  # ids of jobs that had no end on the last day
        settings = _config()
        self.cluster = run.cluster or settings.get("ClusterName", "")
        # Without --cluster, this is the cluster that the local Slurm commands use.
        self.cursor = f"days of {self.cluster}"
        self.covered = without_future(run, parse_spans(run.cursor(self.cursor) or ""), self.cursor)
        # True if slurmdbd stores the scripts; see slurm.conf(5).
        self.has_scripts = "job_script" in settings.get("AccountingStoreFlags", "").lower()

    def request_day(self, begin: int) -> None:
        run = self.run
        until = min(begin + DAY, run.now)
        name = f"day {datetime.fromtimestamp(begin, timezone.utc):%Y-%m-%d}"
        with run.step(name, begin, until, self.cluster or None) as step, staged_jobs(step) as jobs:
            is_today = begin + DAY > run.now
            end = begin + (AHEAD_DAYS if is_today else 1) * DAY
            rows = self._call_sacct(name, f"--starttime=uts{begin}", f"--endtime=uts{end}")
            self.unfinished = {row.job_id for row in rows if row.end_time is None}
            for row in self._with_scripts(rows):
                jobs.add(row)
            step.set_coverage(begin, until, *jobs.clusters)
            if len(jobs.clusters) == 1:
                (self.cluster,) = jobs.clusters
            self.covered.add(begin, until - 1)
            step.cursor(self.cursor, format_spans(self.covered))

    def request_open_jobs(self) -> None:
        """Request the jobs that have no end in the store and were not in the last day's output."""
        run = self.run
        with run.step("open jobs", None, run.now, self.cluster or None) as step:
            ids = self._open_job_ids(step)
            with staged_jobs(step) as jobs:
                for at in range(0, len(ids), IDS_PER_CALL):
                    id_list = ",".join(ids[at : at + IDS_PER_CALL])
                    for row in self._call_sacct("open jobs", f"--jobs={id_list}"):
                        jobs.add(row)

    def _open_job_ids(self, step: Step) -> list[str]:
        found = step.execute(
            f"SELECT DISTINCT job_id FROM {step.live('jobs')} WHERE end_time IS NULL AND source = ? AND cluster = ? "
            "ORDER BY job_id",
            (self.run.source.name, self.cluster),
        ).fetchall()
        return [str(job) for (job,) in found if str(job) not in self.unfinished][:MAX_REQUESTED_IDS]

    def _call_sacct(self, name: str, *selection: str) -> list[JobRow]:
        """Return the jobs that sacct prints. If an older sacct lacks some columns, call it again without them."""
        run = self.run
        while True:
            delimiter = f"\x1f{secrets.token_hex(6)}\x1f"
            argv = [*arguments(self.columns, delimiter, run.cluster), *selection]
            unread: list[tuple[int, str]] = []
            rows = JobRowReader(run.privacy, timezone.utc, run.cluster, run.source.name)
            try:
                with command_output(argv, EPOCH_TIMES) as out:
                    found = text_rows(out, rows, lambda line, why: unread.append((line, why)), delimiter)  # noqa: B023
                    job_rows = [row for row in found if row is not None]
            except UnreadableSource as error:
                raise IngestError(f"{name}: {error}") from None
            except IngestError as error:
                unknown = _NO_FIELD.search(str(error))
                if unknown is None or unknown[1] not in NEWER_COLUMNS.intersection(self.columns):
                    raise
                self.columns = tuple(column for column in self.columns if column != unknown[1])
                continue
            for line, why in unread:
                run.unread(f"sacct, {name}", line, why)
            run.read(len(job_rows))
            return job_rows

    def _with_scripts(self, rows: list[JobRow]) -> Iterator[JobRow]:
        """Yield the jobs. If the site stores scripts, add the nodes that the scripts of batch jobs exclude."""
        batch = [row.job_id for row in rows if row.may_have_script]
        scripts: dict[tuple[str, int], str] = {}
        if batch and self.has_scripts:
            ids = sorted(set(batch))
            for at in range(0, len(ids), IDS_PER_CALL):
                scripts |= self._request_scripts(ids[at : at + IDS_PER_CALL])
        for row in rows:
            script = scripts.get((row.job_id, row.submit_time), "")
            yield row.with_script(script) if script else row

    def _request_scripts(self, ids: Iterable[str]) -> dict[tuple[str, int], str]:
        """Return the scripts of these jobs by (job id, submit time).

        The scripts are requested as JSON. In the text output of --batch-script, a script could contain lines that look
        like the header of the next script.
        """
        argv = ["sacct", "--allusers", "--duplicates", "--allocations", "--batch-script", "--json"]
        cluster = [f"--clusters={self.run.cluster}"] if self.run.cluster else []
        found: dict[tuple[str, int], str] = {}
        try:
            with command_output([*argv, *cluster, f"--jobs={','.join(ids)}"]) as out:
                for _, job in read_jobs(out, lambda line, why: None):
                    script, submitted = job.get("script"), _submit_time(job)
                    if isinstance(script, str) and script and submitted is not None:
                        found[str(job.get("job_id")), submitted] = script
        except (IngestError, UnreadableSource) as error:  # keep the jobs without their scripts
            self.has_scripts = False
            self.run.log(f"sacct: the exclusions in job scripts were not read: {error}")
        return found


def _config() -> dict[str, str]:
    """Return slurmctld's settings, or {} if it does not answer, because sacct may work without it."""
    try:
        with command_output(["scontrol", "show", "config"]) as out:
            lines = out.read(1 << 20).decode("utf-8", "replace").split("\n")
    except IngestError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}


def _submit_time(job: Mapping[str, Any]) -> int | None:
    times = job.get("time")
    found = times.get("submission") if isinstance(times, dict) else None
    return found if isinstance(found, int) else None


# --- the source


def ingest(run: Run, files: list[str]) -> None:
    if not files:
        _ingest_calls(run)

    def stage(step: Step, reading: Reading) -> None:
        with staged_jobs(step) as jobs:
            for row in _file_rows(run, reading):
                jobs.add(row)
        step.set_coverage(jobs.first, jobs.last, *jobs.clusters)

    ingest_in_batches(run, files, stage)


def _file_rows(run: Run, reading: Reading) -> Iterator[JobRow]:
    """Yield the jobs in the requested period. All jobs count as read. Raises IngestError."""
    count = 0
    with open_unpacked(reading.name) as file:
        try:
            first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            file.seek(0)
            read_rows, name = (json_rows, sacct_json.NAME) if first == b"{" else (text_rows, NAME)
            rows = JobRowReader(run.privacy, run.zone, run.cluster, name)
            for row in read_rows(file, rows, reading.unread):
                if row is not None:
                    count += 1
                    if reading.is_in_period(row.first_time, row.end_time):
                        yield row
            if rows.without_cluster and not rows.has_cluster:
                raise UnreadableSource(NO_CLUSTER)
        except TruncatedSource as error:
            reading.cut(str(error))
        except UnreadableSource as error:
            raise IngestError(f"{reading.name}: {error}") from None
        except (EOFError, zlib.error) as error:
            reading.cut(f"the compressed file is truncated: {error}")
        finally:
            reading.read(count)


# --- staging of jobs: clean text in the store's temporary folder, then rows in three tables


class StagedJobs:
    """The jobs read from one piece. `first` and `last` are the time span of the jobs, or None if there are none."""

    def __init__(self, jobs: TextIO, exclusions: TextIO) -> None:
        self.clusters: set[str] = set()
        self.first: int | None = None
        self.last: int | None = None
        self.count = 0
        self.excluded = 0
        self._jobs = jobs
        self._exclusions = exclusions
        self._lines: list[str] = []

    def add(self, row: JobRow) -> None:
        self._lines.append(f"{row.head}\t{'true' if row.exclusions_known else 'false'}\t{row.tail}")
        self.count += 1
        if len(self._lines) >= MAX_BUFFERED_LINES:
            self.flush()
        if self.first is None or row.submit_time < self.first:
            self.first = row.submit_time
        last = row.end_time or row.first_time
        if self.last is None or last > self.last:
            self.last = last
        self.clusters.add(row.cluster)
        self.excluded += len(row.excluded)
        for node in row.excluded:
            values = (row.cluster, row.db_index, row.submit_time, clean(node), row.source, row.job_id)
            self._exclusions.write("\t".join(map(str, values)) + "\n")

    def flush(self) -> None:
        if self._lines:
            self._jobs.write("\n".join(self._lines) + "\n")
            self._lines.clear()
        self._jobs.flush()
        self._exclusions.flush()


@contextmanager
def staged_jobs(step: Step) -> Iterator[StagedJobs]:
    """At the end of the block, stage the jobs that were added in it. Raises StoreError."""
    folder = step.store.temporary
    paths = [os.path.join(folder, name) for name in ("jobs.tsv", "job_exclusions.tsv")]
    try:
        with ExitStack() as files:
            jobs = StagedJobs(*(files.enter_context(open(path, "w", encoding="utf-8")) for path in paths))
            yield jobs
            jobs.flush()
        if jobs.count:
            _stage_jobs(step, paths[0])
        if jobs.excluded:
            step.stage_text("exclusions", paths[1])
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    finally:
        for path in paths:
            with suppress(FileNotFoundError):
                os.unlink(path)


def _stage_jobs(step: Step, path: str) -> None:
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
    "jobs, as printed by sacct --parsable2 or --json; without FILE, sacct runs here, once per day",
    ingest,
    runs_without_files=True,
)
