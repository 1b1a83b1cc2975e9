"""What the stream has said so far, as far as the next event depends on it: a field of the ledger."""

from __future__ import annotations

from msgspec import field

from healthd.common.model import Severity
from healthd.common.moments import Moment
from healthd.common.values import Value, Whole


class ToldCondition(Value, frozen=True):
    """What was said of a condition that stands.

    condition     its name in the stream
    worst         the worst severity that it had
    acknowledged  whether the newest word on that was that a person knows
    count, last   how often, and when last, it had been seen, as its newest line says
    at            when that line was decided
    """

    condition: str
    worst: Severity
    acknowledged: bool
    count: Whole
    last: Moment
    at: Moment


class ToldCheck(Value, frozen=True):
    """A run that is configured. since: since when without a break; settings: their checksum."""

    check: str
    instance: str
    of_version: str
    settings: str
    since: Moment


class Told(Value, frozen=True):
    """conditions  what stands, by its key as text
    checks      what is configured
    cluster     the name of the cluster, as Slurm's settings have it; "" = not known
    stopped     whether the newest word on the daemon was `stopped`
    alive_at    when `alive` was said last
    job_ended   the end of a job that the next flush is for, when its epilog spoke (epoch seconds; 0 = there is none)
    ended_again when the newest epilog spoke after that: the flush behind the next one is for it
    """

    conditions: dict[str, ToldCondition] = field(default_factory=dict)
    checks: tuple[ToldCheck, ...] = ()
    cluster: str = ""
    stopped: bool = False
    alive_at: Moment = 0.0
    job_ended: Moment = 0.0
    ended_again: Moment = 0.0
