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


def with_part(manifest: Manifest, part: SavedPart) -> Manifest:
    """Return the manifest with this part, which replaces an earlier one with the same name."""
    return replace(manifest, parts=(*(p for p in manifest.parts if p.name != part.name), part))


def problems(part: SavedPart) -> Iterator[str]:
    """Yield a sentence for each program that failed."""
    yield from (entry.problem for entry in part.entries if entry.problem)


def is_complete(parts: Sequence[str]) -> bool:
    return "full" in parts
