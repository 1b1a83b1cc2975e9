"""Converts a job's sacct fields to clean text for a row in `jobs`, and to the nodes that its user excluded.

`JOBS` in tables.py describes each column. For the format of sacct's fields, see src/sacct/print.c in
https://github.com/SchedMD/slurm. Most fields have few distinct texts, so each text is converted once and cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import tzinfo
from typing import Generic, NamedTuple, TypeVar

from healthd.common.errors import HealthdError
from healthd.common.slurm.hostlist import expand
from healthd.common.text import is_decimal, redacted, regex
from healthd.fleet import times
from healthd.fleet.privacy import Privacy
from healthd.fleet.sources.exclusions import parse_script, parse_submit_line
from healthd.fleet.staging_text import clean_field as clean

# Fields of a job, in order. If a source lacks a field, it is "".
FIELDS = (
    *("JobIDRaw", "JobID", "DBIndex", "Cluster", "State", "ExitCode", "Submit", "Eligible", "Start", "End"),
    *("Suspended", "NNodes", "NodeList", "AllocCPUS", "NCPUS", "AllocTRES", "Partition", "Account", "QOS", "Priority"),
    *("User", "Reservation", "TimelimitRaw", "Timelimit", "Restarts", "JobName", "WorkDir", "SubmitLine"),
)
NOT_ENDED = frozenset({"PENDING", "RUNNING", "SUSPENDED"})
NO_NODES = ("", "None assigned", "(null)")
MAX_REMEMBERED = 20_000
MAX_CACHED_LENGTH = 1_000  # characters
# In a federation, each cluster has a copy of a job. This is the state of the copies that were removed because another
# cluster started the job.
REVOKED = "REVOKED"
MAX_WITHOUT_CLUSTER = 20  # if this many jobs have no cluster, the whole source is assumed to have none
NO_CLUSTER = "a job does not name its cluster: add --cluster NAME"
SUBMIT_LINE, SCRIPT = "submit_line", "script"  # EXCLUSIONS.source

_STATE = regex(r"([A-Z][A-Z_]{2,30})(?: by \d{1,10})?")
_JOB_ID = regex(r"(\d{1,10})(?:_(?:(\d{1,10})|\[[^\]]*\]))?(?:\+\d{1,5})?")
_EXIT = regex(r"(\d{1,10}):(\d{1,3})")
# Slurm writes a number with a unit only if the division by 1,024 leaves no remainder or exactly a half
# (convert_num_unit2() in slurm_protocol_api.c).
_GPU = regex(r"gres/gpu(?::[^=,]+)?=(\d{1,9})(?:([.]50?)?K)?")
_GPU_TRES = regex(r"gres/gpu[:=].*")  # not gres/gpumem or gres/gpuutil, which do not count GPUs
_TRES = regex(r"[^=,]+=[^=,]*(?:,[^=,]+=[^=,]*)*")

_NO_VALUES = ("4294967294", "4294967295")  # NO_VAL and INFINITE in slurm.h

_LATEST = str(times.MAX_SECONDS)  # ten digits, so that texts compare like numbers

T = TypeVar("T")


class UnreadableSource(HealthdError):
    """The source cannot be read at all. The message continues a sentence that begins with the source's name."""


class TruncatedSource(UnreadableSource):
    """The source ends too early. The rows read so far are kept."""


class BoundedCache(dict[str, T], Generic[T]):
    """Bounded cache for a function that takes text. A result for which `is_small` is false is not cached."""

    def __init__(self, convert: Callable[[str], T], is_small: Callable[[T], bool] = lambda found: True) -> None:
        self.convert = convert
        self.is_small = is_small

    def __missing__(self, text: str) -> T:
        found = self.convert(text)
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        if len(text) <= MAX_CACHED_LENGTH and self.is_small(found):
            self[text] = found
        return found


class JobRow(NamedTuple):
    """A converted job.

    `head`, exclusions_known and `tail`, joined by tabs, are clean text. It has the columns of JOBS and then the names
    of the nodes, separated by blanks. The other fields are for the caller.
    """

    head: str
    tail: str
    exclusions_known: bool  # True if `excluded` is complete
    cluster: str  # clean text
    db_index: int
    job_id: str
    submit_time: int
    first_time: int  # the start time, or the submit time if the job never started
    end_time: int | None
    excluded: tuple[str, ...]
    may_have_script: bool  # True if a script may exclude further nodes
    source: str = SUBMIT_LINE

    def with_script(self, script: str) -> JobRow:
        """Return the row with the exclusions in the job's script.

        If the command overrides them, the row is unchanged.
        """
        exclusions_known, excluded = parse_script(script)
        return (
            self._replace(exclusions_known=exclusions_known, excluded=excluded, source=SCRIPT)
            if self.may_have_script
            else self
        )


class JobRowReader:
    """Converts jobs one after another."""

    def __init__(self, private: Privacy, zone: tzinfo | None, cluster: str, source: str) -> None:
        """Create a reader. `cluster` and `zone` are used for jobs that do not have their own."""
        self.private = private
        self.zone = zone
        self.cluster = cluster
        self.source = source
        self.has_cluster = False  # True once a job had a cluster
        self.without_cluster = 0
        self._states = BoundedCache(_state)
        self._exits = BoundedCache(_exit)
        self._gpus = BoundedCache(_gpus)
        self._nodes = BoundedCache(_nodes, is_small=lambda found: len(found[1]) <= MAX_CACHED_LENGTH)
        self._texts = BoundedCache(_text)
        self._numbers = BoundedCache(_number)
        self._durations = BoundedCache(_duration)
        self._limits = BoundedCache(_limit)
        self._users = BoundedCache(lambda name: clean(private.user(name)))
        self._ten_minute_cache = BoundedCache(self._parse_ten_minutes)
        self._tails = BoundedCache(_tail_seconds)

    def read(self, fields: Sequence[str]) -> JobRow | None:
        """Convert a record with the fields of FIELDS. Return None for a step or the revoked copy of a federated job.

        Raises ValueError if the record cannot be read, and UnreadableSource if no job in this source names its cluster.
        """
        raw, displayed_id, index, cluster, state, exit_code, submit, eligible, start, end = fields[:10]
        suspended, nnodes, node_list, alloc_cpus, ncpus, tres, partition, account, qos, priority = fields[10:20]
        user, reservation, limit_raw, limit, restarts, name, work_dir, submit_line = fields[20:]
        if raw == displayed_id and is_decimal(raw) and len(raw) <= 10:  # most jobs
            job_id, array, task = raw, "", ""
        elif "." in raw or "." in displayed_id:
            return None
        else:
            job_id, array, task = _job_ids(raw, displayed_id)
        state_word = self._states[state]
        if state_word == REVOKED:
            return None
        submitted: int | None
        began: int | None
        ended: int | None
        epochs = len(submit) == len(start) == len(end) == 10 and is_decimal(submit + start + end)
        if epochs and max(submit, start, end) <= _LATEST:  # most jobs from healthd's own calls
            submitted, began, ended = int(submit), int(start), int(end)
        else:
            submitted, began, ended = self._seconds(submit), self._seconds(start), self._seconds(end)
        if submitted is None:
            raise ValueError("Submit: missing")
        count, names, nodes_text = self._nodes[node_list]
        # If a job was cancelled while pending, Start equals End and nothing is allocated. If a job ran, its row has
        # times and GPUs even if its nodes are no longer recorded (NODE_FAIL).
        waited = not tres or began is None or ended is None or ended <= began
        if node_list == "None assigned" and waited:
            began = None
        if ended is not None:
            if state_word in NOT_ENDED:
                raise ValueError(f"{state_word} with an End: was sacct run with --truncate?")
            if began is not None and ended < began:
                raise ValueError(f"End is {began - ended} s before Start")
        ran = began is not None
        cluster = self._texts[cluster or self.cluster]
        if not cluster:
            self.without_cluster += 1
            if not self.has_cluster and self.without_cluster >= MAX_WITHOUT_CLUSTER:
                raise UnreadableSource(NO_CLUSTER)
            raise ValueError(NO_CLUSTER)
        self.has_cluster = True
        db_index = _db_index(index) or hashed_db_index(cluster, job_id, submitted)
        code, signal = self._exits[exit_code]
        texts, numbers = self._texts, self._numbers
        began_text, ended_text = "" if began is None else began, "" if ended is None else ended
        eligible_time: int | str | None = submitted if eligible == submit else self._seconds(eligible)
        nodes: int | str = count or (numbers[nnodes] if ran and node_list in NO_NODES else "")
        gpus, cpus = self._gpus[tres], numbers[alloc_cpus] or numbers[ncpus]
        if not ran or cpus == "0":
            gpus, cpus, names = gpus if ran else "", "", names if ran else ""
        exclusions_known, excluded = parse_submit_line(submit_line)
        run_key = self.private.run_key(_join_lines(name), _join_lines(work_dir)) or ""
        head = (
            f"{cluster}\t{db_index}\t{job_id}\t{array}\t{task}\t{numbers[restarts]}\t{state_word}\t{code}\t{signal}\t"
            f"{submitted}\t{'' if eligible_time is None else eligible_time}\t{began_text}\t{ended_text}\t"
            f"{nodes}\t{gpus}\t{cpus}\t{nodes_text}\t{texts[partition]}\t{texts[account]}\t{texts[qos]}\t{_number(priority)}\t"
            f"{self._users[user]}\t{run_key}\t{texts[reservation]}\t"
            f"{self._limits[limit_raw or limit]}\t{self._durations[suspended]}"
        )
        began = submitted if began is None else began
        batch = not exclusions_known and bool(submit_line)
        tail = f"{self.source}\t{names}"
        return JobRow(head, tail, exclusions_known, cluster, db_index, job_id, submitted, began, ended, excluded, batch)

    def _seconds(self, text: str) -> int | None:
        if len(text) == 10 and is_decimal(text) and text <= _LATEST:
            return int(text)
        if len(text) == 19:
            tens, tail = self._ten_minute_cache[text[:15]], self._tails[text[15:]]
            if tens is not None and tail is not None:
                return tens + tail
        return times.parse_seconds(text, self.zone)

    def _parse_ten_minutes(self, text: str) -> int | None:
        """Return the start of the ten minutes in "2026-11-22T12:1", or None if the local time is ambiguous."""
        try:
            first, last = (times.parse_seconds(text + suffix, self.zone) for suffix in ("0:00", "9:59"))
        except times.TimeError:
            return None
        return first if first is not None and last is not None and last - first == 599 else None


def hashed_db_index(cluster: str, job_id: str, submit_time: int) -> int:
    """Return a 62-bit hash in place of a missing DBIndex.

    A job's id and submit time identify one row in Slurm's database: `unique index (id_job, time_submit)`,
    accounting_storage_mysql.c.
    """
    text = f"{cluster}\0{job_id}\0{submit_time}"
    return int(hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16], 16) >> 2


def _or_none(number: int | None) -> str:
    return "" if number is None else str(number)


def _tail_seconds(text: str) -> int | None:
    """Return the seconds in text like "3:45"."""
    if len(text) == 4 and text[1] == ":" and is_decimal(text[0] + text[2:]) and text[2] < "6":
        return int(text[0]) * 60 + int(text[2:])
    return None


def _job_ids(raw_id: str, displayed_id: str) -> tuple[str, str, str]:
    """Return the job's raw id, the array's id and the job's index in the array.

    JobID is 12, 12_3, 12_[4-9] (not split yet) or 12+1 (a component in a heterogeneous job).
    """
    if raw_id and not (is_decimal(raw_id) and len(raw_id) <= 10):
        raise ValueError(f"JobIDRaw: not a number: {redacted(raw_id)}")
    if raw_id == displayed_id or not displayed_id:
        if not raw_id:
            raise ValueError("JobID: missing")
        return raw_id, "", ""
    found = _JOB_ID.fullmatch(displayed_id)
    if found is None:
        raise ValueError(f"JobID: not a job id: {redacted(displayed_id)}")
    if not raw_id and found[0] != found[1]:
        raise ValueError(f"JobIDRaw: missing, and JobID {redacted(displayed_id)} does not contain it")
    return (raw_id or found[1]), (found[1] if "_" in displayed_id else ""), (found[2] or "")


def _db_index(text: str) -> int:
    """Convert an unsigned 64-bit number to a signed one. 0 means none."""
    if text in ("", "0"):
        return 0
    if not is_decimal(text) or len(text) > 20 or int(text) >= 1 << 64:
        raise ValueError(f"DBIndex: not a 64-bit number: {redacted(text)}")
    number = int(text)
    return number - (1 << 64) if number >= 1 << 63 else number


def _state(text: str) -> str:
    found = _STATE.fullmatch(text)
    if found is None:
        raise ValueError(f"State: not a job state: {redacted(text)}")
    return found[1]


def _exit(text: str) -> tuple[str, str]:
    if not text:
        return "", ""
    found = _EXIT.fullmatch(text)
    if found is None:
        raise ValueError(f"ExitCode: not of the form 0:0: {redacted(text)}")
    return found[1], found[2]


def _gpus(text: str) -> str:
    """Return the number of GPUs in AllocTRES: "gres/gpu=8", or else the sum over all GPU types.

    Some sites account only GPU types.
    """
    if not text:
        return ""
    if not _TRES.fullmatch(text):
        raise ValueError(f"AllocTRES: not of the form cpu=1,gres/gpu=8: {redacted(text)}")
    all_types, total = 0, None
    for entry in text.split(","):
        if found := _GPU.fullmatch(entry):
            count = int(found[1]) * (1024 if entry.endswith("K") else 1) + (512 if found[2] else 0)
            if entry.startswith("gres/gpu="):
                total = count
            else:
                all_types += count
        elif _GPU_TRES.fullmatch(entry):
            raise ValueError(f"AllocTRES: not a number of GPUs: {redacted(entry.rpartition('=')[2])}")
    return str(all_types if total is None else total)


def _nodes(text: str) -> tuple[int, str, str]:
    """Return the number of nodes, their names, and the original list as clean text."""
    if text in NO_NODES:
        return 0, "", ""
    names = expand(text)
    return len(names), clean(" ".join(names)), clean(text)


def _text(text: str) -> str:
    return clean(text or None)


def _join_lines(text: str) -> str:
    """Join lines as sacct's text output does, so that JSON gives the same text."""
    return text.replace("\r\n", " ").replace("\n", " ")


def _number(text: str) -> str:
    if text and not (is_decimal(text) and len(text) <= 18):
        raise ValueError(f"not a number: {redacted(text)}")
    return "" if text in _NO_VALUES else text


def _duration(text: str) -> str:
    """Return the seconds as text. Slurm prints INVALID for a negative time (a bug in secs2time_str(), parse_time.c)."""
    return "" if text in ("", "INVALID", "UNLIMITED") else str(times.parse_duration(text))


def _limit(text: str) -> str:
    """Parse a limit: TimelimitRaw in minutes, or Timelimit as days-hours:minutes:seconds."""
    if text == "INVALID":
        return ""
    return _or_none(times.parse_duration(text) if ":" in text else times.parse_limit(text))
