"""Reads pre-emptions from slurmctld's log. Only this log records which job pre-empted which other job.

The lines are the same in 22.05, 23.02, 23.11, 24.05, 24.11, 25.05, 25.11 and 26.05 (github.com/SchedMD/slurm;
slurm_job_preempt() in src/slurmctld/preempt.c in 22.05, src/interfaces/preempt.c since 23.02):

    preempted %pJ has been requeued to reclaim resources for %pJ       info
    preempted %pJ has been killed to reclaim resources for %pJ         info
    slurm_job_preempt: preempted %pJ had to be killed                  info, instead; the pre-emptor is not logged
    setting %u sec preemption grace time for %pJ to reclaim ...        debug (_job_check_grace_internal())
    preempted %pJ suspended by gang scheduler to reclaim ...           debug (src/slurmctld/node_scheduler.c)
    preempted %pJ has been killed / has been requeued                  info (src/slurmctld/gang.c)

Slurm 19.05 and older also has "has been checkpointed to reclaim ..." (src/slurmctld/node_scheduler.c). %pJ is JobId=7,
JobId=5_2(7) for a task of an array, JobId=5+1(6) for a component of a heterogeneous job (src/common/log.c,
_jobid2fmt()). Debug lines require SlurmctldDebug=debug or higher.

The time precedes the message, in the format of LogTimeFormat (log.c; slurm.conf(5)), of syslog and journalctl, or of
slurmctld's JSON log. The formats `short` and `thread_id` have no year. The year is then the latest one for which the
time is not after the file's last change. The format `clock` has no usable time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import BinaryIO, TypeAlias

from healthd.common.text import regex
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.sources.common import require_same_zone
from healthd.fleet.sources.lines import Position, is_gzip, iterate_lines, open_unpacked
from healthd.fleet.sources.reading import Reading

_JOB = (
    r"JobId=(?:(?P<{0}id>[0-9]{{1,10}})|(?P<{0}of>[0-9]{{1,10}})"
    r"(?:_(?P<{0}task>[0-9]{{1,10}}|\*)|\+[0-9]{{1,10}})(?:\((?P<{0}raw>[0-9]{{1,10}})\))?)"
)
_PREEMPTED, _GRACED, _PREEMPTOR = _JOB.format("a"), _JOB.format("g"), _JOB.format("b")
_MESSAGE = regex(
    r"(?:[\w.-]+: +){0,3}"  # such as "debug:  sched: " or the name of a function
    rf"(?:preempted {_PREEMPTED} (?:has been (?P<did>requeued|killed|checkpointed)|"
    rf"(?P<gang>suspended) by gang scheduler|(?P<had>had to be killed))|"
    rf"setting [0-9]+ sec preemption (?P<grace>grace time) for {_GRACED})"
    rf"(?: to reclaim resources for {_PREEMPTOR})?\s*"
)
_MODES = {"killed": "cancelled"}

_ISO = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
_SHORT = r"[A-Z][a-z]{2} [ 0-9][0-9] [0-9]{2}:[0-9]{2}:[0-9]{2}"
# "[TIME] ", or the prefix of syslog and journalctl: "TIME HOST slurmctld[7]: ". Later text may come from a user.
_PREFIXES = (
    regex(r"\[(?P<time>[^\]]{1,80})\] "),
    regex(rf"(?P<time>{_ISO}|{_SHORT}) \S{{1,255}} [\w./-]{{1,64}}(?:\[[0-9]{{1,10}}\])?: "),
)
_ISO_TIME, _SHORT_TIME = regex(_ISO), regex(_SHORT)
_HEAD = 512
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

Row: TypeAlias = "tuple[str, int, int, int | None, str, int | None]"


def parse(lines: Iterable[tuple[int, str]], reading: Reading, changed: float) -> Iterator[Row]:
    """Yield the rows for the table `preemptions`. Other lines are ignored.

    Args:
        changed: time of the file's last change.
    """
    for number, line in lines:
        if "preempt" not in line:
            continue
        time, message = _split_line(line)
        found = _MESSAGE.fullmatch(message)
        if not found:
            continue
        parts = found.groupdict()
        job = _raw_job_id(parts, "g" if parts["grace"] else "a")
        mode = parts["did"] or parts["gang"] or ("signalled" if parts["grace"] else "killed")
        task = parts["btask"]
        try:
            seconds = reading.seconds(_iso(time, changed))
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if job is None:
            reading.unread(number, "the pre-empted job has no id of its own")
            continue
        reading.read(1)
        if not reading.is_in_period(seconds, seconds):
            continue
        by, by_task = _raw_job_id(parts, "b"), int(task) if task and task != "*" else None
        yield reading.resolve_cluster(), seconds, job, by, _MODES.get(mode, mode), by_task


def _split_line(line: str) -> tuple[str, str]:
    """Return the time as text, and the message."""
    if line.startswith("{"):
        return _parse_json(line)
    for prefix in _PREFIXES:
        if found := prefix.match(line):
            return found["time"], line[found.end() :]
    return "", line


def _raw_job_id(parts: dict[str, str | None], side: str) -> int | None:
    """Return the job's own id, or the array's id if the whole array is waiting."""
    text = parts[f"{side}raw"] or parts[f"{side}id"] or (parts[f"{side}of"] if parts[f"{side}task"] == "*" else None)
    return int(text) if text else None


def _parse_json(line: str) -> tuple[str, str]:
    """Parse slurmctld's JSON log format (log.c, LOG_FILE_FMT_JSON): {"log":"...","stream":"stdout","time":"..."}."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(record, dict) or not isinstance(record.get("log"), str):
        return "", ""
    return str(record.get("time") or ""), record["log"].rstrip()


def _iso(time: str, changed: float) -> str:
    """Return the time in ISO format. Raises ValueError if it is not a time."""
    if found := _ISO_TIME.match(time):
        return found[0].replace(" ", "T").replace(",", ".")
    if (found := _SHORT_TIME.match(time)) and found[0][:3] in _MONTHS:
        return _with_year(found[0], changed)
    raise ValueError(f'"{time}" before a pre-emption is not a time' if time else "a pre-emption has no time before it")


def _with_year(short: str, changed: float) -> str:
    """Add a year to text like "Nov 22 12:11:20".

    The year is the latest one for which the time is at most a day after `changed`. A day is allowed because time zones
    may differ.
    """
    month, day, clock = _MONTHS.index(short[:3]) + 1, int(short[4:6]), short[7:]
    latest = datetime.fromtimestamp(changed, timezone.utc).replace(tzinfo=None) + timedelta(days=1)
    for year in range(latest.year, latest.year - 9, -1):  # the last leap day may be eight years ago
        try:
            when = datetime.fromisoformat(f"{year:04}-{month:02}-{day:02}T{clock}")
        except ValueError:
            continue
        if when <= latest:
            return when.isoformat()
    raise ValueError(f'"{short}" is not a valid date')


def ingest(run: Run, files: list[str]) -> None:
    """Read the new part of each log. A log is identified by its beginning, not by its name."""
    for path in run.track(files):
        with run.guard(), open_unpacked(path) as file:
            _ingest_log(run, path, file)


def _ingest_log(run: Run, path: str, file: BinaryIO) -> None:
    head = file.read(_HEAD)
    cursor = f"log {hashlib.blake2b(head, digest_size=16).hexdigest()}"
    options = f"{run.cluster} {run.zone} {run.from_time} {run.to_time}"
    require_same_zone(run, path, run.cursor(cursor))
    position, _, cursor_rest = (run.cursor(cursor) or "0 0 ").partition(" ")
    number, _, before = cursor_rest.partition(" ")
    is_growing = not is_gzip(path)
    read_position = Position(int(position), int(number)) if before == options else Position()
    status = os.stat(path)
    if is_growing and status.st_size < read_position.offset:
        read_position = Position()
    begin = read_position.offset
    file.seek(begin)
    unread: list[tuple[int, str]] = []
    read: list[int] = []
    reading = replace(
        Reading.from_run(run, path), unread=lambda line, why: unread.append((line, why)), read=read.append
    )
    ends: list[str] = []
    rows = list(
        parse(_recording_ends(iterate_lines(file, reading, read_position, is_growing), ends), reading, status.st_mtime)
    )
    if read_position.offset == begin and begin:
        return
    if not (begin or rows or unread) and ends and not any(_begins_with_time(line, status.st_mtime) for line in ends):
        raise IngestError(f"{path}: not a slurmctld log: neither its first nor its last line begins with a time")
    times = [_seconds(line, reading, status.st_mtime) for line in ends]
    with run.step(path, times[0] if times else None, times[-1] if times else None) as step:
        step.stage("preemptions", rows)
        run.read(len(read))
        for line, why in unread:
            run.unread(path, line, why)
        if len(head) == _HEAD:
            step.cursor(cursor, f"{read_position.offset} {read_position.line_number} {options}")


def _recording_ends(lines: Iterable[tuple[int, str]], ends: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines. The first and last lines are appended to `ends`; they give the log's time span."""
    line = ""
    for number, line in lines:
        if not ends:
            ends.append(line)
        yield number, line
    if ends:
        ends.append(line)


def _seconds(line: str, reading: Reading, changed: float) -> int | None:
    with suppress(ValueError):
        return reading.seconds(_iso(_split_line(line)[0], changed))
    return None


def _begins_with_time(line: str, changed: float) -> bool:
    with suppress(ValueError):
        return bool(_iso(_split_line(line)[0], changed))
    return False


SOURCE = Source(
    "preemptions", "--slurmctld-log", "FILE", "slurmctld's logs (rotated ones too), for preemptions", ingest
)
