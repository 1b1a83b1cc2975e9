"""What the live process tells the daemon's check: one document, RUNTIME_DIR/failslow.json. Pure; docs/json.md has it.

The check reads it as it reads any file of this machine: what is not as it should be raises a DecodeError there.
"""

from __future__ import annotations

import json

from msgspec import Struct, to_builtins

from healthd.common.text import printable
from healthd.common.values import DecodeError, decode

FILE = "failslow.json"
SCHEMA = 1
MOST_RECENT = 32  # jobs that ended
MOST_BYTES = 1 << 20
LONGEST = 200  # characters of one sentence


class JobTold(Struct, frozen=True, forbid_unknown_fields=True):
    """One job on this node.

    ranks         how many of its ranks told something here; of counters 1: they show the job as a whole
    source        "client": the job's own word; "counters": read by root
    since         when the slowness began (epoch seconds), None while it is not slow
    slowdown      0.26: 26 % slower than before, as the slowest rank has it
    lost_seconds  the sum over this node's ranks and their slow iterations of what each took longer
    suspect       the PCI address of the GPU whose rank alone works longer, "" = nobody is named
    rank          that rank's own name for itself, "" = none is named
    cause         a failslow.model.Cause, "" = not slow
    evidence      sentences without their end
    node_changed  one of these is a fault of a part of this node, as root reads it, that came at that time
    ended         when it ended, None while it runs
    """

    job: str
    ranks: int
    source: str
    slow: bool = False
    since: float | None = None
    slowdown: float = 0.0
    lost_seconds: float = 0.0
    suspect: str = ""
    rank: str = ""
    cause: str = ""
    evidence: tuple[str, ...] = ()
    node_changed: bool = False
    ended: float | None = None


class Dropped(Struct, frozen=True, forbid_unknown_fields=True):
    """What was not taken, since the process began. oversized, malformed: messages; strangers: connections of processes
    that are in no job; series, jobs: connections beyond the bounds; flood: samples that came too fast.
    file_descriptors: accept(2) failed because no descriptor was left; the connections wait."""

    oversized: int = 0
    strangers: int = 0
    malformed: int = 0
    series: int = 0
    jobs: int = 0
    flood: int = 0
    file_descriptors: int = 0


class Lost(Struct, frozen=True, forbid_unknown_fields=True):
    """What iterations took longer than before since the process began, of jobs that ended too, in seconds: the sum over
    the ranks here that told them, and the same as counters show it, of whole jobs."""

    client: float = 0.0
    counters: float = 0.0


class Told(Struct, frozen=True, forbid_unknown_fields=True):
    """paused_until: people asked for silence until then, 0 = nobody did. troubles: why a source gives nothing.
    sampling: what the sampler takes of a core, None where nothing is to be sampled."""

    written: float
    paused_until: float = 0.0
    jobs: tuple[JobTold, ...] = ()
    recent: tuple[JobTold, ...] = ()
    dropped: Dropped = Dropped()
    problems: tuple[str, ...] = ()
    lost: Lost = Lost()
    sampling: float | None = None
    schema: int = SCHEMA


def as_text(told: Told) -> str:
    """Return the whole document, with fields at their default. Raises ValueError for NaN or infinity."""
    return json.dumps(to_builtins(told), separators=(",", ":"), allow_nan=False) + "\n"


def read(text: str) -> Told:
    """Raises DecodeError."""
    told = decode(Told, text)
    if told.schema != SCHEMA:
        raise DecodeError(f"not of schema {SCHEMA}")
    return told


def sentence(text: str) -> str:
    """Text of others as it may stand in the document."""
    return printable(" ".join(text[: 2 * LONGEST].split()))[:LONGEST]
