"""A recording: the checks' questions and a node's answers, in one file that can be evaluated elsewhere.

`Recorder` writes each question and its answer while a worker runs. `Player` answers from a recording. Both classes use
only a question's text ("read /proc/uptime"), so a new question needs no change here. A question that is not in the
recording raises `NotRecorded`. The check then fails, and its result is unknown, never healthy.

The file is gzipped JSON. It may come from an untrusted source, so it unpacks only to plain data and errors from the
standard library.
"""

from __future__ import annotations

import builtins
import gzip
import json
import math
import os
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

from msgspec import field

from healthd.common.atomic_files import replace_file
from healthd.common.codec import ConvertError, dump, load
from healthd.common.errors import HealthdError
from healthd.common.model import Outcome, RunName
from healthd.common.values import Value
from healthd.host import system

T = TypeVar("T")

FORMAT, VERSION = "healthd recording", 1
MAX_BYTES = 64 << 20  # maximum size of uncompressed JSON, as the file may be a zip bomb; a node may have large files

Pack = Callable[[Any], Any]


class NotRecorded(HealthdError, ValueError):
    """Raised if a question is not in the recording."""


class RecordingError(HealthdError):
    """Raised if a file is not a valid recording. The message is one sentence."""


class RecordedRun(Value, frozen=True):
    """One run of a check. `ended` is in epoch seconds, and `silent_seconds` is as in results.make_result.

    answered    True if the worker answered, even if the check failed; only such runs are replayed
    unanswered  the question during which the worker hung or died, or ""
    asked       for each question, its answers in order; the last one repeats
    """

    check: str
    instance: str
    outcome: Outcome
    error: str
    ended: float
    seconds: float
    silent_seconds: float
    answered: bool
    unanswered: str = ""
    asked: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def name(self) -> RunName:
        return RunName(self.check, self.instance)


class KernelLine(Value, frozen=True):
    """A kernel log line that is relevant to healthd. `history` is True if it was logged before the round."""

    time: float
    text: str
    history: bool = False


class Recording(Value, frozen=True):
    """A recording of one round.

    fake_nvml     True if a fake NVML replaced the driver
    checks        (check, instance, settings) of the enabled checks
    kernel_lines  lines from the kernel log, or None if no log was read
    kernel_error  why the log could not be read
    baseline      (check, instance, settings from the baseline)
    """

    healthd: str
    node: str
    time: float
    kernel: str
    boot_id: str
    root: str
    fake_nvml: bool
    checks: tuple[tuple[str, str, dict[str, Any]], ...]
    runs: tuple[RecordedRun, ...]
    kernel_lines: tuple[KernelLine, ...] | None = None
    kernel_error: dict[str, Any] | None = None
    baseline: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    def find_run(self, name: RunName, turn: int = 0) -> RecordedRun | None:
        """Return the run with this name and index `turn`, or the last one if there are fewer runs.

        If a run was repeated in the same round, the first run contains the questions from all repeats.
        """
        runs = [run for run in self.runs if run.name == name]
        return runs[min(turn, len(runs) - 1)] if runs else None


# --- answers as JSON: plain data is stored as it is, other values as a table whose only key is the type


def pack(value: Any, pack_other: Pack | None = None) -> Any:
    """Return a value as data for JSON. `pack_other` packs other types. Raises TypeError."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is bytes:
        return {"bytes": value.decode("utf-8", "surrogateescape")}
    if kind is list:
        return [pack(item, pack_other) for item in value]
    if isinstance(value, tuple):
        name = kind.__name__ if hasattr(value, "_fields") else "tuple"
        return {name: [pack(item, pack_other) for item in value]}
    if kind is dict:
        return {"dict": [[pack(key, pack_other), pack(item, pack_other)] for key, item in value.items()]}
    if isinstance(value, OSError | ValueError) and getattr(builtins, kind.__name__, None) is kind:
        where = [value.filename] if isinstance(value, OSError) and value.filename is not None else []
        return {"error": [kind.__name__, *(pack(item, pack_other) for item in (*value.args, *where))]}
    if pack_other is None:
        raise TypeError(f"a {kind.__name__} cannot be recorded")
    return pack_other(value)


def unpack(data: Any, unpackers: Mapping[str, Pack] | None = None) -> Any:
    """Return the value that was passed to `pack`. An error is returned, not raised. Raises ValueError if the data is
    invalid.
    """
    if isinstance(data, list):
        return [unpack(item, unpackers) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("the recording contains an answer that cannot be read")
    ((kind, inner),) = data.items()
    try:
        if unpackers and kind in unpackers:
            return unpackers[kind](inner)
        return _unpack_table(kind, inner, unpackers)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f'the recording contains an answer "{kind[:40]}" that cannot be read: {error}') from None


def _unpack_table(kind: str, inner: Any, unpackers: Mapping[str, Pack] | None) -> Any:
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return inner.encode("utf-8", "surrogateescape")
    items = unpack(list(inner), unpackers)
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(items)
    if kind == "error":
        return _exception(*items)
    made = getattr(system, kind)  # FileStat, ProgramResult, ...
    if not (isinstance(made, type) and issubclass(made, tuple)):
        raise TypeError("no such kind")
    return made(*items)


def _exception(name: str, *arguments: Any) -> Exception:
    kind = getattr(builtins, name)
    if not (isinstance(kind, type) and issubclass(kind, OSError | ValueError)):
        raise TypeError("no such error")
    return cast(Exception, kind(*arguments))


# --- recording, in the worker


class Recorder:
    """Writes questions and answers line by line. A question is written before it is asked, in case the worker hangs or
    dies.

    Each process has its own file in `directory`, because an abandoned worker may still write to its file later.
    """

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, f"{time.time_ns():020d}.{os.getpid()}")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._remaining_bytes = MAX_BYTES

    def begin(self, check: str, instance: str) -> None:
        """Record the following questions as part of this run."""
        self._write({"check": check, "instance": instance})

    def record(self, question: str, query: Callable[[], T], pack_other: Pack | None = None) -> T:
        """Call `query`, record its result or error, and then return or raise it."""
        self._write([question])
        try:
            answer = query()
        except Exception as error:
            self._write_answer(question, error, pack_other)
            raise
        self._write_answer(question, answer, pack_other)
        return answer

    def _write_answer(self, question: str, answer: Any, pack_other: Pack | None) -> None:
        try:
            packed = pack(answer, pack_other)
        except TypeError:
            packed = {"error": ["ValueError", f"the answer could not be recorded: {question}"]}
        self._write([question, packed])

    def _write(self, item: Any) -> None:
        line = json.dumps(item, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._remaining_bytes:
            return  # the replay has no answer for this question
        self._remaining_bytes -= len(line)
        try:
            os.write(self._file, line)
        except OSError as error:  # an OSError would be mistaken for the answer
            raise RuntimeError(f"cannot write the recording: {error.strerror}") from None


class Notes(Value, frozen=True):
    """Questions and answers from one run. `unanswered` is the last question, if it has no answer."""

    answers: dict[str, list[Any]]
    unanswered: str = ""


def read_notes(directory: str) -> dict[RunName, Notes]:
    """Return the notes from one round. If a run was repeated in another worker, the later notes are used."""
    runs: dict[RunName, Notes] = {}
    for name in sorted(os.listdir(directory)):
        runs.update(_read_notes_file(os.path.join(directory, name)))
    return runs


def _read_notes_file(path: str) -> dict[RunName, Notes]:
    runs: dict[RunName, Notes] = {}
    name = RunName("")
    for item in _lines(path):
        if isinstance(item, dict):
            name = RunName(item["check"], item["instance"])
            runs.setdefault(name, Notes({}))
        elif name in runs and len(item) == 1:
            runs[name] = Notes(runs[name].answers, item[0])
        elif name in runs:
            runs[name].answers.setdefault(item[0], []).append(item[1])
            runs[name] = Notes(runs[name].answers)
    for notes in runs.values():
        for answers in notes.answers.values():
            while answers[1:] and answers[-1] == answers[-2]:
                del answers[-1]
    return runs


def _lines(path: str) -> Iterator[Any]:
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # a worker that hung may still be writing
                with suppress(ValueError):  # a line is truncated if the disk was full
                    yield json.loads(line)


# --- replaying, in the worker


class Player:
    """Returns the answers that the same run received.

    If the worker had cached the answer to another check's question, this run did not ask the question. The run then
    gets the last answer from any run.
    """

    def __init__(self, recording: Recording) -> None:
        self._runs = {
            run.name: run.asked for run in reversed(recording.runs)
        }  # the first run with a name has all answers
        self._any = {question: answers[-1:] for run in recording.runs for question, answers in run.asked.items()}
        self.begin("", "")

    def begin(self, check: str, instance: str) -> None:
        self._answers = self._runs.get(RunName(check, instance), {})
        self._turns: Counter[str] = Counter()

    def answer(self, question: str, unpackers: Mapping[str, Pack] | None = None) -> Any:
        """Return the answer. Raises the recorded error if there is one, or NotRecorded."""
        answers = self._answers.get(question) or self._any.get(question)
        if not answers:
            raise NotRecorded(f"not in the recording: {question}")
        answer = unpack(answers[min(self._turns[question], len(answers) - 1)], unpackers)
        self._turns[question] += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def has(self, question: str) -> bool:
        return bool(self._answers.get(question) or self._any.get(question))


# --- the file


def encode(recording: Recording) -> bytes:
    """Return the content of the file. The same recording always gives the same bytes."""
    data = {"format": FORMAT, "version": VERSION, **dump(recording)}
    text = json.dumps(data, separators=(",", ":"))  # keep the node's order, because findings follow the settings
    return gzip.compress(text.encode(), mtime=0)


def decode(data: bytes, where: str) -> Recording:
    """Parse a recording. Raises RecordingError if it is invalid; the message is one sentence that names `where`."""
    try:
        text = _inflated(data)
        table = json.loads(text)
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise ValueError("it has no healthd header")
        version = table.pop("version", None)
        if version != VERSION:
            raise RecordingError(f"{where}: has version {str(version)[:20]}; this healthd reads version {VERSION}")
        return load(Recording, table)
    except ConvertError as error:
        raise RecordingError(f"{where}: is not a healthd recording: {_plain(error)}") from None
    except (ValueError, RecursionError, OverflowError, EOFError, OSError, zlib.error) as error:
        raise RecordingError(f"{where}: is not a healthd recording, or is truncated: {_plain(error)}") from None


def _inflated(data: bytes) -> bytes:
    inflate = zlib.decompressobj(wbits=31)
    text = inflate.decompress(data, MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it contains more than {MAX_BYTES >> 20} MiB")
    if not inflate.eof:
        raise EOFError("the end is missing")
    return text


def _plain(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def read(path: str) -> Recording:
    """Read a recording from a file. Raises RecordingError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # each worker reads the file again
            raise RecordingError(f"{path}: is not a file")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    if not data:
        raise RecordingError(f"{path}: is empty")
    return decode(data, path)


def write(path: str, recording: Recording) -> int:
    """Write the file atomically, readable only by its owner. Return its size. Raises OSError."""
    data = encode(recording)
    replace_file(path, data)
    return len(data)
