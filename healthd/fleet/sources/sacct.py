"""Jobs from sacct: --parsable2 text or --json in files, or asked of Slurm by ourselves (sacct_calls.py).

Of a text file the header says which columns it has, in which order, and what stands between them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, BinaryIO

from healthd.common.text import regex
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.sources import sacct_calls, sacct_json
from healthd.fleet.sources.job_row import FIELDS, NO_CLUSTER, CutOff, JobRows, NotReadable, Row
from healthd.fleet.sources.lines import opened
from healthd.fleet.sources.pieces import read_together
from healthd.fleet.sources.reading import Reading
from healthd.fleet.sources.records import records
from healthd.fleet.sources.sacct_json import json_rows
from healthd.fleet.sources.staged_jobs import staged_jobs

if TYPE_CHECKING:
    from healthd.fleet.step import Step

NAME = "sacct"

# The form of a field, as far as it tells one column from another: src/sacct/print.c.
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
    "": "",  # behind the last delimiter of --parsable
}
_FORM_OF = {name.lower(): regex(form) for form, names in _FORMS.items() for name in names.split() or [""]}
_FIELD = {name.lower(): name for name in FIELDS}
_NEEDED = ("State", "Submit")


class SacctText:
    """What is known of the columns of sacct."""

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
    """The jobs of a text; None for each that is not to be kept (a step). Raises NotReadable: a column is missing."""
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
    """From the fields of a row, and "" behind them, to those that are read."""
    place = {name.lower(): at for at, name in enumerate(header)}
    for name in _NEEDED:
        if name.lower() not in place:
            raise NotReadable(f"has no column {name}: ask sacct with --format={','.join(FIELDS[:10])},...")
    return itemgetter(*(place.get(name.lower(), len(header)) for name in FIELDS))


def ingest(run: Run, files: list[str]) -> None:
    if not files:
        sacct_calls.ingest(run, text_rows)

    def stage(step: Step, reading: Reading) -> None:
        with staged_jobs(step) as jobs:
            for row in _rows_of_file(run, reading):
                jobs.add(row)
        step.covers(jobs.first, jobs.last, *jobs.clusters)

    read_together(run, files, stage)


def _rows_of_file(run: Run, reading: Reading) -> Iterator[Row]:
    """The jobs of the time that was asked for; all are counted. Raises IngestError."""
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
            reading.cut(f"the compressed file goes no further: {error}")
        finally:
            reading.read(count)


SOURCE = Source(
    NAME,
    "--sacct",
    "FILE",
    "jobs as sacct --parsable2 or --json printed them; without FILE sacct is run here, a day a call",
    ingest,
    runs=True,
)
