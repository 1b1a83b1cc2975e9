"""Defines the document that the live process writes for the daemon's check, RUNTIME_DIR/failslow.json.

All functions are pure.

docs/json.md describes the document. The check does not trust it more than any other file on the machine: unexpected
content raises a DecodeError.
"""

from __future__ import annotations

import json

from msgspec import Struct, to_builtins

from healthd.common.text import printable
from healthd.common.values import DecodeError, decode

FILE = "failslow.json"
SCHEMA = 1
MAX_RECENT = 32  # maximum number of ended jobs to keep
MAX_BYTES = 1 << 20
MAX_SENTENCE = 200  # characters of a sentence


class LiveJob(Struct, frozen=True, forbid_unknown_fields=True):
    """One job on this node.

    Attributes:
        ranks: number of ranks on this node that reported steps; 1 for counters, which show only the whole job.
        source: "client": reported by the job; "counters": read by root.
        since: time at which the slowness began (epoch seconds), None while the job is not slow.
        slowdown: 0.26 means 26 % slower than before, for the slowest rank.
        lost_seconds: time lost in slow iterations, summed over this node's ranks.
        suspect: if a single rank works longer than the others, the PCI address of its GPU; "" if no rank is named.
        rank: the job's name for that rank, "" if no rank is named.
        cause: a failslow.model.Cause, "" if not slow.
        evidence: sentences without a full stop.
        node_changed: True if root read a hardware fault on this node when the slowness began.
        ended: time at which the job ended, None while it runs.
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
    """Input that was dropped since the process started.

    Attributes:
        oversized, malformed: number of messages.
        strangers: number of connections from processes outside any job.
        series, jobs: number of connections beyond these limits.
        flood: number of times a connection had to wait because its messages exceeded the budget.
        file_descriptors: number of times accept(2) failed because no file descriptor was left; the connections then
            wait.
    """

    oversized: int = 0
    strangers: int = 0
    malformed: int = 0
    series: int = 0
    jobs: int = 0
    flood: int = 0
    file_descriptors: int = 0


class LostSeconds(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds lost in slow iterations since the process started, including jobs that ended.

    Attributes:
        client: sum over the ranks that reported on this node.
        counters: for whole jobs, measured by counters.
    """

    client: float = 0.0
    counters: float = 0.0


class LiveDocument(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the document.

    Attributes:
        paused_until: time until which detection is paused, or 0 if it is not paused.
        problems: the reasons why sources provide no data.
        sampling: the sampler's share of a core, None if sampling is off.
    """

    written: float
    paused_until: float = 0.0
    jobs: tuple[LiveJob, ...] = ()
    recent: tuple[LiveJob, ...] = ()
    dropped: Dropped = Dropped()
    problems: tuple[str, ...] = ()
    lost: LostSeconds = LostSeconds()
    sampling: float | None = None
    schema: int = SCHEMA


def to_json(document: LiveDocument) -> str:
    """Return the document as JSON, including fields with default values. Raises ValueError for NaN or infinity."""
    return json.dumps(to_builtins(document), separators=(",", ":"), allow_nan=False) + "\n"


def parse(text: str) -> LiveDocument:
    """Parse the document. Raises DecodeError."""
    document = decode(LiveDocument, text)
    if document.schema != SCHEMA:
        raise DecodeError(f"does not have schema {SCHEMA}")
    return document


def clean_sentence(text: str) -> str:
    """Return untrusted text as one printable sentence of limited length."""
    return printable(" ".join(text[: 2 * MAX_SENTENCE].split()))[:MAX_SENTENCE]
