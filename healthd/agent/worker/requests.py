"""Messages between the daemon and its worker, with one type for each request and each answer.

A message is a line with the JSON of a Message (common/values.py). The response is a line with the JSON of a Response
and of the answer, separated by a tab, so that the Response can be read even if the answer is invalid.

    Message(1, Run("gpu_ecc", "", {...}, past, boot_id), now)  ->  Response(1)  RunAnswer(...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import field

from healthd.common.model import Entry, Finding, Inventory, LeftOut, NothingToCheck, Observation, Repair
from healthd.common.values import Value, Whole

# --- requests


class Run(Value, frozen=True, tag_field="op", tag="run"):
    """One run of one check. `config` contains its settings, and `past` the check's stored counters (history.py)."""

    check: str
    instance: str
    config: dict[str, Any]
    past: str = ""
    boot_id: str = ""


class CloseNvml(Value, frozen=True, tag_field="op", tag="close_nvml"):
    """Close NVML, so that the driver can be unloaded."""


class TakeInventory(Value, frozen=True, tag_field="op", tag="inventory"):
    gpus: bool


class TakeBaseline(Value, frozen=True, tag_field="op", tag="baseline"):
    """Read the current values of a check's baseline settings."""

    check: str
    config: dict[str, Any]


class SaveCopy(Value, frozen=True, tag_field="op", tag="save_copy"):
    """Copy the files `names` from the folder `source` to the folder `target`, durably.

    With `keep_old`, the old copy in `target` is moved aside instead of being replaced, because it could not be read at
    the start.
    """

    source: str
    target: str
    names: tuple[str, ...]
    keep_old: bool = False


class LoadCopy(Value, frozen=True, tag_field="op", tag="load_copy"):
    source: str
    names: tuple[str, ...]


class AppendEvents(Value, frozen=True, tag_field="op", tag="append_events"):
    """Append lines to the event stream in `folder`. If `may_repeat`, the file may already contain some of these
    lines.
    """

    folder: str
    lines: tuple[str, ...]
    may_repeat: bool


class ReadClusterName(Value, frozen=True, tag_field="op", tag="read_cluster_name"):
    """Read the cluster's name from Slurm's settings on this node."""


class WriteFile(Value, frozen=True, tag_field="op", tag="write_file"):
    path: str
    text: str


class CheckInstalledFiles(Value, frozen=True, tag_field="op", tag="check_installed_files"):
    paths: tuple[str, ...]


class ReadJournal(Value, frozen=True, tag_field="op", tag="read_journal"):
    """Read lines that the ring buffer lost.

    The lines are between two times on the log's clock, in microseconds, both exclusive. At most `limit` lines are read.
    If `history`, the lines are older than healthd's first start.
    """

    boot_id: str
    since_usec: int
    until_usec: int
    limit: int
    accept_injected: bool = False
    history: bool = False


Operation = (
    Run
    | CloseNvml
    | TakeInventory
    | TakeBaseline
    | SaveCopy
    | LoadCopy
    | AppendEvents
    | ReadClusterName
    | WriteFile
    | CheckInstalledFiles
    | ReadJournal
)


class Message(Value, frozen=True):
    """A request with its number. `now` is in epoch seconds on the daemon's clock, or None if the worker uses its own
    clock."""

    number: int
    operation: Operation
    now: float | None = None


# --- answers


class RunAnswer(Value, frozen=True):
    """Result of one run.

    gpu_lost              True if a GPU that had answered before was lost during the run
    dropped_observations  number of observations beyond the limit
    past                  the check's stored counters, for its next run
    """

    gpu_lost: bool = False
    findings: tuple[Finding, ...] = ()
    observations: tuple[Observation, ...] = ()
    dropped_observations: Whole = 0
    repairs: tuple[Repair, ...] = ()
    nothing_to_check: tuple[NothingToCheck, ...] = ()
    past: str = ""


class BaselineAnswer(Value, frozen=True):
    """Answer to TakeBaseline."""

    entries: tuple[Entry, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


class CopyAnswer(Value, frozen=True):
    """The files' texts, with None for a missing file. `written_at` is the newest file's modification time (epoch
    seconds), or 0.
    """

    texts: dict[str, str | None] = field(default_factory=dict)
    written_at: float = 0.0


NO_ANSWER = b"null"
SEPARATOR = b"\t"  # JSON contains no raw tab; strings have \t


class Response(Value, frozen=True):
    """Response to the request with this number.

    error     why the request failed, in one sentence, or ""
    outdated  True if the worker's NVML does not match the driver, so that only a new worker helps
    """

    number: int
    error: str = ""
    outdated: bool = False


JournalLines = tuple[tuple[float, str, int, str], ...]  # journal.JournalLine
Identities = dict[str, tuple[int, int, int]]  # installed_files.identities
Answer = RunAnswer | BaselineAnswer | Inventory | CopyAnswer | JournalLines | Identities | str | int

# Type of the answer to each request. AppendEvents: number of events that the journal rejected. ReadClusterName:
# the name.
ANSWERS: Mapping[type[Operation], Any] = {
    Run: RunAnswer,
    CloseNvml: type(None),
    TakeInventory: Inventory,
    TakeBaseline: BaselineAnswer,
    SaveCopy: type(None),
    LoadCopy: CopyAnswer,
    AppendEvents: int,
    ReadClusterName: str,
    WriteFile: type(None),
    CheckInstalledFiles: Identities,
    ReadJournal: JournalLines,
}


def operation_name(kind: type[Operation]) -> str:
    """Return the name of a request type, such as "save_copy"."""
    return str(kind.__struct_config__.tag)
