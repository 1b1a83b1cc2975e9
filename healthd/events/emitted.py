"""State of the event stream on which the next events depend: a field of the ledger."""

from __future__ import annotations

from msgspec import field

from healthd.common.model import Severity
from healthd.common.moments import Moment
from healthd.common.values import Value, Whole


class EmittedCondition(Value, frozen=True):
    """Emitted state of an open condition.

    condition     its name in the stream
    worst         its worst severity so far
    acknowledged  the newest event about it was an acknowledgement
    count, last   occurrences and time of the last one, as in its newest line
    at            when that line was decided
    """

    condition: str
    worst: Severity
    acknowledged: bool
    count: Whole
    last: Moment
    at: Moment


class EmittedCheck(Value, frozen=True):
    """A configured run. since: configured without interruption since then; settings: their checksum."""

    check: str
    instance: str
    version: str
    settings: str
    since: Moment


class Emitted(Value, frozen=True):
    """Emitted state of the stream.

    conditions  open conditions, by key as text
    checks      configured runs
    cluster     ClusterName of slurm.conf; "" = not known
    stopped     the newest event about the daemon was `stopped`
    alive_at    time of the last `alive`
    job_ended   the job end that the next flush is for, as reported by its epilog (epoch seconds; 0 = none)
    ended_again the newest epilog after that: the flush after the next one is for it
    """

    conditions: dict[str, EmittedCondition] = field(default_factory=dict)
    checks: tuple[EmittedCheck, ...] = ()
    cluster: str = ""
    stopped: bool = False
    alive_at: Moment = 0.0
    job_ended: Moment = 0.0
    ended_again: Moment = 0.0
