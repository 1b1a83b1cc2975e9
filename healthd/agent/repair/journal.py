"""The journal of repair steps: each step is recorded before it is taken, and is never taken twice.

The program `healthd repair run` writes the journal to STATE_DIR/repair.json, durably, and a copy to the runtime
directory, which the daemon reads. All functions are pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import datetime, timezone

from msgspec import field
from msgspec.structs import replace

from healthd.agent.evidence.case import Process
from healthd.agent.settings.config import RepairConfig
from healthd.common.model import Gpu, RepairStep
from healthd.common.moments import Moment
from healthd.common.text import regex
from healthd.common.values import DecodeError, Value, decode

NAME = "repair"  # of the request file, the lock and the systemd units
JOURNAL_FILE = "repair.json"  # in the state directory; the runtime directory has a copy
ID = regex(r"[0-9]{8}T[0-9]{6}Z-[a-z_]{1,20}")
MAX_ENTRIES = 100
DAY_SECONDS = 86400.0


class Outcome(enum.Enum):
    """The outcome of a step. Every outcome except TAKING ends the step."""

    TAKING = "taking"  # recorded before the step. After a boot: the step, or something else, has booted the machine
    DONE = "done"  # the step was taken, and its effect is proven
    FAILED = "failed"  # the step was taken and had no effect, or its program failed
    IMPOSSIBLE = "impossible"  # the step is not possible on this machine, or in its current state; nothing was changed
    UNKNOWN = "unknown"  # the program was killed during the step, which is not repeated
    REFUSED = "refused"  # a requirement was not met; nothing was changed, and the step may be tried again


class Entry(Value, frozen=True):
    """One step of one repair.

    at        when the step was recorded, or refused (epoch seconds)
    boot_id   the machine's boot at that time
    problem   why the step was refused or failed, as one sentence, or ""
    proof     evidence of its effect, or ""
    seconds   duration of the step
    """

    id: str
    step: RepairStep
    at: float
    boot_id: str
    outcome: Outcome
    causes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    problem: str = ""
    proof: str = ""
    seconds: float = 0.0


class Stopped(Value, frozen=True):
    """What was stopped for a reset and must be started again. A boot starts it too.

    boot_id   the machine's boot in which it was stopped
    services  units that ran
    gpus      ids of the GPUs whose persistence mode was on
    hung      processes of the reset that hang in the kernel: nothing is started before they end
    """

    boot_id: str
    services: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    hung: tuple[Process, ...] = ()


class Journal(Value, frozen=True):
    """All steps, oldest first.

    first_boot  boot id at the creation of the journal. A later boot then proves that the directory survives a reboot
    refused     the last refusal, which is not a step
    stopped     what is still stopped because of a reset, or None
    node        name of the node whose journal this is
    machine     identity of its machine (journal_file.machine_identity)
    problem     in the daemon's copy: why the journal in the state directory could not be read or written, or ""
    """

    first_boot: str = ""
    entries: tuple[Entry, ...] = ()
    refused: Entry | None = None
    stopped: Stopped | None = None
    node: str = ""
    machine: str = ""
    problem: str = ""

    def find(self, id: str) -> Entry | None:
        """Return the step with this id, or its refusal, or None."""
        if self.refused is not None and self.refused.id == id:
            return self.refused
        return next((entry for entry in reversed(self.entries) if entry.id == id), None)


def survives_reboot(journal: Journal, boot_id: str) -> bool:
    """Return True if the journal is from an earlier boot, so that its directory survives a reboot."""
    return journal.first_boot not in ("", boot_id)


def with_entry(journal: Journal, entry: Entry) -> Journal:
    """Return the journal with this entry, which replaces an earlier one with its id."""
    others = tuple(e for e in journal.entries if e.id != entry.id)
    if entry.outcome is Outcome.REFUSED:
        return replace(journal, entries=others, refused=entry)
    return replace(journal, entries=(*others, entry)[-MAX_ENTRIES:])


def is_interrupted(entry: Entry) -> bool:
    """Return True if the program was killed during this step. A reboot cannot be interrupted in this way."""
    return entry.outcome is Outcome.TAKING and entry.step is RepairStep.GPU_RESET


def with_outcomes(journal: Journal, copy: Journal | None) -> Journal:
    """Return the journal with the outcomes that only the daemon's copy has, for example because the disk was full."""
    if copy is None:
        return journal
    for entry in journal.entries:
        known = copy.find(entry.id)
        if entry.outcome is Outcome.TAKING and known is not None and known.outcome is not Outcome.TAKING:
            journal = replace(with_entry(journal, known), stopped=copy.stopped)
    return journal


def identity_problem(journal: Journal, node: str, machine: str) -> str:
    """Return why the journal is not that of this node on this machine, as one sentence, or "".

    An image that was captured from another node may contain its journal, and several nodes may share a directory.
    """
    if not node or not machine:
        return "the identity of this machine is not known: neither the DMI product UUID nor /etc/machine-id can be read"
    if journal.node != node:
        return f'the journal was written by node "{journal.node}", not by "{node}": remove the file'
    if journal.machine != machine:
        return "the journal was written on another machine: remove the file"
    return ""


def stopped_problem(journal: Journal | None) -> str:
    """Return what is still stopped because of a reset, as one sentence, or ""."""
    stopped = journal.stopped if journal is not None else None
    if stopped is None:
        return ""
    what = [f"stopped for a GPU reset and not started again: {', '.join(stopped.services)}"] if stopped.services else []
    what += [f"persistence mode is off after a GPU reset: {', '.join(stopped.gpus)}"] if stopped.gpus else []
    if stopped.hung:
        pids = ", ".join(str(process.pid) for process in stopped.hung)
        what.append(f"nvidia-smi hangs in the kernel (process {pids})")
    return "; ".join(what)


def unused_id(journal: Journal | None, step: RepairStep, now: float) -> str:
    """Return an id for a new step: its time and name. If the journal has that id, the time of the next free second."""
    while journal is not None and journal.find(_id_at(now, step)) is not None:
        now += 1
    return _id_at(now, step)


def _id_at(now: float, step: RepairStep) -> str:
    return f"{datetime.fromtimestamp(now, timezone.utc):%Y%m%dT%H%M%SZ}-{step.value}"


def tried_within_day(journal: Journal, step: RepairStep, causes: Sequence[str], now: float) -> bool:
    """Return True if this step was taken for one of these causes in the last 24 hours. A time in the future counts."""
    return any(
        entry.step is step and now - entry.at < DAY_SECONDS and not set(causes).isdisjoint(entry.causes)
        for entry in journal.entries
        if entry.outcome is not Outcome.IMPOSSIBLE
    )


def parse_journal(text: str) -> Journal:
    """Parse a journal. Raises DecodeError."""
    return decode(Journal, text)


# --- the daemon's request


class Request(Value, frozen=True):
    """A step to take. If `id` is empty, the program only ends what is left of earlier steps, and publishes the journal.

    reason   the drain's Reason in Slurm, with the claim and without Slurm's own suffixes
    causes   faults as "CODE PART"
    parts    PCI addresses of the GPUs to reset; () for all
    gpus     the GPUs in the last complete inventory
    stuck    processes that hang in the kernel, which a reset must wait for
    is_booted  True if healthd's own step has booted the machine, so that it may be DOWN in Slurm
    is_ordered  True if an operator ordered the step, which may repeat a step of the last 24 hours
    root     where /proc, /sys and /run are
    environment  the daemon's PATH and SLURM_CONF: a site sets them for healthd.service only
    """

    id: str
    state_dir: str
    node: str = ""
    boot_id: str = ""
    step: RepairStep = RepairStep.PERSON
    reason: str = ""
    causes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    stuck: tuple[Process, ...] = ()
    is_booted: bool = False
    is_ordered: bool = False
    requested_at: Moment = 0.0
    command_timeout_seconds: float = 30.0
    root: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    settings: RepairConfig = RepairConfig()


def parse_request(text: str) -> Request:
    """Parse a request. Raises DecodeError."""
    request = decode(Request, text)
    if (request.id and not ID.fullmatch(request.id)) or not request.state_dir.startswith("/"):
        raise DecodeError("not a request for a repair step")
    return request
