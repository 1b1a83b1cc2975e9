"""The event stream's state, which determines the next events. The state is a field of the ledger."""

from __future__ import annotations

from msgspec import field

from healthd.common.model import Severity
from healthd.common.moments import Moment
from healthd.common.values import Value, Whole


class EmittedCondition(Value, frozen=True):
    """An open condition as last written to the stream.

    condition     its name in the stream
    worst         its worst severity so far
    acknowledged  True if the newest event about it was an acknowledgement
    count, last   number of occurrences and time of the last one, as in its newest line
    at            time when that line was created
    serial        serial number of the GPU that it is about, or "". It stays the same after the GPU was replaced.
    """

    condition: str
    worst: Severity
    acknowledged: bool
    count: Whole
    last: Moment
    at: Moment
    serial: str = ""


class EmittedCheck(Value, frozen=True):
    """A configured run.

    `since` is the start of the period in which the run has been configured without interruption. `settings` is the
    checksum of its settings.
    """

    check: str
    instance: str
    version: str
    settings: str
    since: Moment


class Emitted(Value, frozen=True):
    """What the stream has reported so far.

    conditions  open conditions, by key as text
    checks      configured runs
    gpus        checksum of the GPUs in the newest `gpus` of this stream, or ""
    gpus_at     time of the newest `gpus`
    gpus_boot_id  boot in which the inventory was last read
    gpu_slots   PCI addresses of the GPUs that were read in that boot; another slot may have another GPU since the boot
    cluster     ClusterName from slurm.conf, or "" if unknown
    stopped     True if the newest event about the daemon was `stopped`
    alive_at    time of the last `alive`
    job_ended   time of the job end that the next flush covers, as reported by the job's epilog (epoch seconds, or 0)
    ended_again time of the newest later job end, which the second flush from now covers
    """

    conditions: dict[str, EmittedCondition] = field(default_factory=dict)
    checks: tuple[EmittedCheck, ...] = ()
    gpus: str = ""
    gpus_at: Moment = 0.0
    gpus_boot_id: str = ""
    gpu_slots: tuple[str, ...] = ()
    cluster: str = ""
    stopped: bool = False
    alive_at: Moment = 0.0
    job_ended: Moment = 0.0
    ended_again: Moment = 0.0
