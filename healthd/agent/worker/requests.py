"""What the worker can be asked, and how that goes over the stream: one type a request, one codec for both ends. Pure.

    Run("gpu_ecc", "", {...}, past, boot_id)  <->  {"op": "run", "check": "gpu_ecc", "instance": "", ...}

The runner adds "number" and "now" to each request. It leaves out of a Run what the worker has already
(agent/worker/unchanged.py). `config` and `past` of a Run hold JSON of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from healthd.common.codec import load
from healthd.common.values import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a check. config: its settings; past: its counters' past as text, which only the worker reads."""

    check: str
    instance: str
    config: dict[str, Any]
    past: str = ""
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class CloseNvml:
    """Give the driver back."""


@dataclass(frozen=True, slots=True)
class TakeInventory:
    gpus: bool


@dataclass(frozen=True, slots=True)
class TakeBaseline:
    """What this node has of the settings that a check wants in the baseline."""

    check: str
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SaveCopy:
    """names: files of the folder `from_`; keep: what lies in the folder `to` goes aside for a person."""

    from_: str
    to: str
    names: tuple[str, ...]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class LoadCopy:
    from_: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AppendEvents:
    """Lines of the stream, for the folder `to`; again: they may stand there already."""

    to: str
    lines: tuple[str, ...]
    again: bool


@dataclass(frozen=True, slots=True)
class ReadClusterName:
    """As Slurm's settings on this node have it."""


@dataclass(frozen=True, slots=True)
class WriteFile:
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class LookAtOwnFiles:
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JournalGap:
    """Microseconds of the log's clock, both exclusive; at most `limit` lines."""

    boot_id: str
    since_usec: int
    until_usec: int
    limit: int
    accept_injected: bool = False


@dataclass(frozen=True, slots=True)
class ReadJournal:
    """Lines that the ring buffer lost. history: they are of before healthd's first start."""

    gap: JournalGap
    history: bool = False


Asked = (
    Run
    | CloseNvml
    | TakeInventory
    | TakeBaseline
    | SaveCopy
    | LoadCopy
    | AppendEvents
    | ReadClusterName
    | WriteFile
    | LookAtOwnFiles
    | ReadJournal
)
OPS: Mapping[str, type[Asked]] = {
    "run": Run,
    "close_nvml": CloseNvml,
    "inventory": TakeInventory,
    "baseline": TakeBaseline,
    "save_copy": SaveCopy,
    "load_copy": LoadCopy,
    "append_events": AppendEvents,
    "read_cluster_name": ReadClusterName,
    "write_file": WriteFile,
    "look_at_own_files": LookAtOwnFiles,
    "read_journal": ReadJournal,
}
ADDED = ("op", "number", "now")  # to the fields of each request
_NAMES = {kind: name for name, kind in OPS.items()}


def table_of(asked: Asked) -> dict[str, Any]:
    """As it goes over the stream."""
    return {"op": _NAMES[type(asked)], **_fields_of(asked)}


def _fields_of(value: Asked | JournalGap) -> dict[str, Any]:
    table = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, JournalGap):
            inner = _fields_of(inner)
        table[field.name.rstrip("_")] = list(inner) if isinstance(inner, tuple) else inner
    return table


def asked_in(table: Mapping[str, Any]) -> Asked:
    """Return the request that came over the stream. Raises ConvertError, or KeyError if there is no such request."""
    kind = OPS[table["op"]]
    names = {field.name.rstrip("_"): field.name for field in dataclasses.fields(kind)}
    asked: Asked = load(kind, {names.get(name, name): table[name] for name in table if name not in ADDED})
    return asked
