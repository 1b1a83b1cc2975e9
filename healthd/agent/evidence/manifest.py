"""The manifest of an archive: the incident, the hardware, and what each program returned. All functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from healthd.agent.evidence.case import Cause
from healthd.agent.evidence.hardware import Hardware
from healthd.agent.evidence.sources import Entry
from healthd.common.values import Value

FILE = "manifest.json"
FORMAT, VERSION = "healthd evidence", 1


class SavedPart(Value, frozen=True):
    """One part of the evidence. Times are in epoch seconds. `stopped` is why the part is incomplete, or ""."""

    name: str
    began: float
    seconds: float
    entries: tuple[Entry, ...]
    stopped: str = ""


class Manifest(Value, frozen=True):
    """Content of manifest.json.

    causes    the faults, with their names in the event stream (`condition` in docs/events.md)
    redacted  True for a copy for a vendor
    """

    id: str
    node: str
    healthd: str
    boot_id: str
    began: float
    fault_at: float
    format: str = FORMAT
    version: int = VERSION
    cluster: str = ""
    mode: str = ""
    reason: str = ""
    causes: tuple[Cause, ...] = ()
    parts: tuple[SavedPart, ...] = ()
    hardware: Hardware = Hardware()
    redacted: bool = False


def merge_part(before: SavedPart | None, new: SavedPart) -> tuple[SavedPart, tuple[str, ...]]:
    """Return the part after another attempt, and the files to take from this attempt.

    A complete file is not replaced: it is closer to the fault. Of two incomplete files, the larger one is kept.
    """
    old = {entry.file: entry for entry in before.entries} if before is not None else {}
    taken = tuple(e for e in new.entries if e.file not in old or _quality(e) > _quality(old[e.file]))
    entries = {**old, **{entry.file: entry for entry in taken}}
    stopped = new.stopped if before is None or before.stopped else ""
    return replace(new, entries=tuple(entries.values()), stopped=stopped), tuple(entry.file for entry in taken)


def _quality(entry: Entry) -> tuple[bool, bool, int]:
    is_complete = not entry.problem and not entry.missing
    return is_complete and entry.bytes > 0, is_complete, 0 if is_complete else entry.bytes


def find_part(manifest: Manifest, name: str) -> SavedPart | None:
    return next((part for part in manifest.parts if part.name == name), None)


def with_part(manifest: Manifest, part: SavedPart) -> Manifest:
    """Return the manifest with this part, which replaces an earlier one with the same name."""
    return replace(manifest, parts=(*(p for p in manifest.parts if p.name != part.name), part))


def problems(part: SavedPart) -> Iterator[str]:
    """Yield a sentence for each program that failed."""
    yield from (entry.problem for entry in part.entries if entry.problem)


def is_complete(parts: Sequence[str]) -> bool:
    return "full" in parts
