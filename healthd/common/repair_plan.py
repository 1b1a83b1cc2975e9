"""A repair plan and its obstacles, as values that the ledger keeps."""

from __future__ import annotations

import enum

from healthd.common.model import RepairStep
from healthd.common.values import Value


class Reason(enum.Enum):
    """Why a cause needs its step."""

    REMEDY = "remedy"  # this step ends the fault
    MILDER = "milder"  # this step may end the fault, before the power cycle that its runbook names
    RELAPSE = "relapse"  # the fault returned after an earlier step
    CONFIGURED = "configured"  # repair.first_step
    NOT_ALLOWED = "not_allowed"  # the step that ends the fault is not in repair.order
    CAUSE = "cause"  # a person must fix the cause; its check then passes
    WINDOW = "window"  # the fault ends by time, which does not pass on a drained node before a repair
    PART = "part"  # a person must repair or replace the part
    EXHAUSTED = "exhausted"  # the fault returned after the last step


class CauseStep(Value, frozen=True):
    """The step that one cause needs."""

    code: str
    subject: str
    step: RepairStep
    reason: Reason


class Obstacle(enum.Enum):
    """A state in which healthd takes no step. A later state may allow the step."""

    OBSERVE = "observe"  # mode = "observe"
    PAUSED = "paused"  # healthd pause
    SHARED_CAUSE = "shared_cause"  # the cause may be outside this node
    ACKNOWLEDGED = "acknowledged"  # an operator has acknowledged a fault that would drain
    SLURM_UNKNOWN = "slurm_unknown"  # the node's state in Slurm is not known
    NOT_DRAINED = "not_drained"  # healthd's drain is not in force yet
    FOREIGN_DRAIN = "foreign_drain"  # another user or tool drained the node
    MAINTENANCE = "maintenance"  # a reservation for maintenance
    DOWN = "down"  # DOWN in Slurm, so jobs may still run unobserved
    NOT_RESPONDING = "not_responding"  # slurmd does not respond, so Slurm's list of jobs may be out of date
    JOBS = "jobs"  # a job or its epilog is on the node
    POWER = "power"  # a reboot or a power change is pending in Slurm


class Plan(Value, frozen=True):
    """The step that the node needs.

    next       the step after that, if it fails
    causes     the causes that need a step; those that need this step come first, each group worst first
    parts      the GPUs to reset, as PCI addresses, or () for all
    obstacles  states that prevent the step now
    """

    step: RepairStep
    next: RepairStep
    causes: tuple[CauseStep, ...]
    parts: tuple[str, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()


class RepairRecord(Value, frozen=True):
    """healthd's plan for this node, as last written to the event stream."""

    plan: Plan | None = None
