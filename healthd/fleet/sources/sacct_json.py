"""Reads the jobs that `sacct --json` prints, one after another, in bounded memory.

In all versions, the shape is that of slurmdb_job_rec_t: src/plugins/openapi/dbv0.0.38/parse.c (Slurm 22.05), then
src/plugins/data_parser/v0.0.39 to v0.0.45 (23.02 to 26.05), in https://github.com/SchedMD/slurm. Differences:

- DBIndex is missing. From v0.0.45 on, `sluid` contains it as an SLUID; in older versions, a job's id and submit time
  identify the job.
- A number that may be unset is {"set", "infinite", "number"} from v0.0.40 on (also in v0.0.39, except for times).
- `state.current` is a word until v0.0.39, then a list of the state and its flags.
- Until v0.0.39, `exit_code` is SUCCESS and 0 for every job that ended by itself, even if it returned an error. In these
  versions, the exit code of a job that is not COMPLETED is unknown.
- `reservation.name` is a meaningless number in v0.0.38. `submit_line` and `script` exist from v0.0.39, `restart_cnt`
  from v0.0.42.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from healthd.common.text import printable, regex
from healthd.fleet.sources.job_row import FIELDS, JobRow, JobRowReader, TruncatedSource, UnreadableSource

NAME = "sacct_json"
MAX_JOB_CHARACTERS = 16 << 20  # maximum bytes per job, including its steps
CHUNK = 1 << 20
NO_VAL = 0xFFFFFFFE  # INFINITE is the next number; see slurm.h
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_BLANK = regex(r"[ \t\r\n,]*")
_SLUID = regex(r"[sS][0-9A-HJ-NP-TV-Za-hj-np-tv-z]{13}")
_BASE_STATES = frozenset(
    (
        *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
        *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    )
)


def json_rows(file: BinaryIO, rows: JobRowReader, unread: Callable[[int, str], None]) -> Iterator[JobRow | None]:
    """Yield the jobs in a document. Raises UnreadableSource if the document is not from sacct."""
    for line, job in read_jobs(file, unread):
        try:
            row = rows.read(sacct_fields(job))
            script = _text(job.get("script"))
        except ValueError as error:
            unread(line, str(error))
        else:
            yield row.with_script(script) if row and script else row


class _JsonStream:
    """JSON text that is read in pieces. Text that was already parsed is dropped."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.text = ""
        self.position = 0
        self.line = 1
        self.is_exhausted = False

    def read_more(self) -> bool:
        """Read another piece. Return False at the end."""
        if self.is_exhausted:
            return False
        chunk = self.file.read(
            max(CHUNK, len(self.text) - self.position)
        )  # doubled, so that reading one large value takes linear time
        self.is_exhausted = not chunk
        self.line += self.text.count("\n", 0, self.position)
        self.text = self.text[self.position :] + self.decoder.decode(chunk, final=self.is_exhausted)
        self.position = 0
        return not self.is_exhausted

    def peek(self) -> str:
        """Return the next character that is neither blank nor a comma, or "" at the end."""
        while True:
            self.position = _BLANK.match(self.text, self.position).end()  # type: ignore[union-attr]  # it also matches ""
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.read_more():
                return ""

    def value(self) -> Any:
        """Return the next value. Raises ValueError if there is none or it is too long."""
        self.peek()
        while True:
            try:
                found, end = _DECODER.raw_decode(self.text, self.position)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.position > MAX_JOB_CHARACTERS:
                    raise ValueError(f"more than {MAX_JOB_CHARACTERS} characters") from None
                if not self.read_more():
                    raise ValueError(f"not JSON: {error}") from None
                continue
            if end == len(self.text):  # a number may continue in the next piece
                end -= self.position
                if self.read_more():
                    continue
            self.position = end
            return found

    @property
    def current_line(self) -> int:
        return self.line + self.text.count("\n", 0, self.position)


_DECODER = json.JSONDecoder(strict=False)


def read_jobs(file: BinaryIO, unread: Callable[[int, str], None]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line, job) for each job in the list `jobs`.

    Raises UnreadableSource if there is no such list, or if it is empty and sacct reported an error. Raises
    TruncatedSource if the list has no end, or if sacct reported an error, because jobs may then be missing.
    """
    text = _JsonStream(file)
    text.read_more()
    text.text = text.text.removeprefix("\ufeff")
    if text.peek() != "{":
        raise UnreadableSource("is not a JSON object from sacct --json")
    text.position += 1
    found_jobs, error_text, count = False, "", 0
    while text.peek() == '"':
        try:
            key = text.value()
            if text.peek() != ":":
                raise ValueError("a name without a value")
            text.position += 1
            if key != "jobs" or text.peek() != "[":
                value = text.value()
                if key == "errors" and isinstance(value, list):
                    error_text = "".join(f": {_error_description(error)}" for error in value[:3])
                continue
        except ValueError as error:
            if not found_jobs:
                raise UnreadableSource(f"line {text.current_line}: {error}") from None
            raise TruncatedSource(f"line {text.current_line}: {error}") from None
        text.position += 1
        found_jobs = True
        while (character := text.peek()) not in ("]", ""):
            line = text.current_line if character == "{" else text.line
            try:
                job = text.value()
            except ValueError as error:
                raise TruncatedSource(f"the document is truncated at line {line}: {error}") from None
            count += 1
            if isinstance(job, dict):
                yield line, job
            else:
                unread(line, "a job is not an object")
        if not character:
            raise TruncatedSource(f"the document ends within the list of jobs, at line {text.current_line}")
        text.position += 1
    if found_jobs and error_text and not count:
        raise UnreadableSource(f"has no jobs, and sacct reported an error{error_text}")
    if found_jobs and error_text:
        raise TruncatedSource(f"sacct reported an error, so jobs may be missing{error_text}")
    if not found_jobs:
        raise UnreadableSource(f'has no list "jobs" from sacct --json{error_text}')


def _error_description(error: Any) -> str:
    description = error.get("description", error) if isinstance(error, dict) else error
    return printable(str(description)[:200])


def sacct_fields(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that sacct would print for FIELDS. Raises ValueError for an unexpected shape."""
    times, array, het = (_object(job, name) for name in ("time", "array", "het"))
    allocated = _tres(_object(job, "tres").get("allocated"))
    job_id = _number(job.get("job_id"))
    task, array_id = _number(array.get("task_id")), _number(array.get("job_id"))
    displayed_id = job_id
    if array_id not in ("", "0"):
        displayed_id = f"{array_id}_{task}" if task else f"{array_id}_[]"
    elif (leader := _number(het.get("job_id"))) not in ("", "0"):
        displayed_id = f"{leader}+{_number(het.get('job_offset')) or 0}"
    state = _state(_object(job, "state").get("current"))
    reservation = _object(job, "reservation").get("name")
    values = {
        "JobIDRaw": job_id,
        "JobID": displayed_id,
        "DBIndex": _sluid(job.get("sluid")),
        "Cluster": _text(job.get("cluster")),
        "State": state,
        "ExitCode": _exit_code(_object(job, "exit_code"), state),
        "Submit": _number(times.get("submission")),
        "Eligible": _number(times.get("eligible")),
        "Start": _number(times.get("start")),
        "End": _number(times.get("end")),
        "Suspended": _duration(_number(times.get("suspended"))),
        "NNodes": _number(job.get("allocation_nodes")),
        "NodeList": _text(job.get("nodes")),
        "AllocCPUS": allocated.get("cpu", ""),
        "AllocTRES": ",".join(f"{name}={count}" for name, count in allocated.items()),
        "Partition": _text(job.get("partition")),
        "Account": _text(job.get("account")),
        "QOS": _text(job.get("qos")),
        "Priority": _number(job.get("priority")),
        "User": _text(job.get("user")),
        "Reservation": reservation if isinstance(reservation, str) else "",
        "TimelimitRaw": _number(times.get("limit")),
        "Restarts": _number(job.get("restart_cnt")),
        "JobName": _text(job.get("name")),
        "WorkDir": _text(job.get("working_directory")),
        "SubmitLine": _text(job.get("submit_line")),
    }
    return tuple(values.get(name, "") for name in FIELDS)


def _object(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parent.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: not an object")
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a text field has another type")
    return str(value)


def _number(value: Any) -> str:
    """Return digits, or "" if the number is unset or infinite."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value in (NO_VAL, NO_VAL + 1)):
        return ""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"not a number: {str(value)[:40]!r}")
    return str(value)


def _duration(seconds: str) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}" if seconds else ""


def _state(value: Any) -> str:
    """Return the state as one word.

    A flag takes precedence over the state to which it is added, as in job_state_string() in slurm_protocol_defs.c.
    """
    states = [value] if isinstance(value, str) else value
    if not isinstance(states, list) or not states or not all(isinstance(state, str) for state in states):
        raise ValueError("state: not a job state")
    return str(next((state for state in states if state not in _BASE_STATES), states[0]))


def _exit_code(value: Mapping[str, Any], state: str) -> str:
    status = value.get("status")
    signal = _object(value, "signal")
    number = _number(signal.get("id", signal.get("signal_id")))
    if number not in ("", "0"):
        return f"0:{number}"
    if isinstance(status, str):
        if status == "SUCCESS" and state == "COMPLETED":
            return "0:0"
        return f"{code}:0" if status == "ERROR" and (code := _number(value.get("return_code"))) else ""
    code = _number(value.get("return_code"))
    return f"{code}:0" if code else ""


def _tres(entries: Any) -> dict[str, str]:
    """Return the numbers of CPUs, nodes and GRES, such as {"cpu": "16", "gres/gpu:h100": "8"}.

    Other numbers may be unset, and versions differ in how they show that.
    """
    if entries is None:
        return {}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("tres.allocated: not a list of objects")
    found = {}
    for entry in entries:
        kind, name = _text(entry.get("type")), _text(entry.get("name"))
        if kind in ("cpu", "node", "gres"):
            found[f"{kind}/{name}" if name else kind] = _number(entry.get("count"))
    return found


def _sluid(value: Any) -> str:
    """Convert an SLUID ("s" and 13 digits of 5 bits, see src/common/sluid.c) to its 64 bits, as in DBIndex."""
    if value in (None, ""):
        return ""
    if not isinstance(value, str) or not _SLUID.fullmatch(value):
        raise ValueError(f"sluid: invalid: {str(value)[:40]!r}")
    number = 0
    for digit in value[1:].upper():
        number = number * 32 + _CROCKFORD.index(digit)
    return str(number)
