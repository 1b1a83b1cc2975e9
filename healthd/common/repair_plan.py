"""A repair plan and its obstacles, as values that the ledger keeps."""

from __future__ import annotations

import enum

from healthd.common.model import RepairStep
from healthd.common.moments import Moment, PastMoment
from healthd.common.values import Value, Whole


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
    FAILED = "failed"  # an earlier step of this drain did not end the fault
    EXHAUSTED = "exhausted"  # the fault returned after the last step, or the last step did not end it


class CauseStep(Value, frozen=True):
    """The step that one cause needs."""

    code: str
    subject: str
    step: RepairStep
    reason: Reason


class Obstacle(enum.Enum):
    """A state in which healthd takes no step."""

    OBSERVE = "observe"  # mode = "observe"
    PAUSED = "paused"  # healthd pause
    SHARED_CAUSE = "shared_cause"  # the cause may be outside this node
    ACKNOWLEDGED = "acknowledged"  # an operator has acknowledged a fault that would drain
    SLURM_UNKNOWN = "slurm_unknown"  # the node's state in Slurm is not known
    NOT_DRAINED = "not_drained"  # healthd's drain is not in force yet
    FOREIGN_DRAIN = "foreign_drain"  # another user or tool drained the node
    MAINTENANCE = "maintenance"  # the node is in a reservation for maintenance
    DOWN = "down"  # DOWN in Slurm, so jobs may still run unobserved
    NOT_RESPONDING = "not_responding"  # slurmd does not respond, so Slurm's list of jobs may be out of date
    JOBS = "jobs"  # a job or its epilog is on the node
    POWER = "power"  # a reboot or a power change is pending in Slurm
    EVIDENCE = "evidence"  # the evidence of the fault is not saved yet
    JOURNAL = "journal"  # the journal of repair steps cannot be read
    PROGRAM = "program"  # healthd-repair does not serve requests
    STATE_DIR = "state_dir"  # not known yet whether state_dir survives a reboot
    BEFORE_ACT = "before_act"  # healthd drained the node before repair.mode = "act" was set
    STOPPED = "stopped"  # healthd repair stop
    TRIED = "tried"  # the step was taken for this cause in the last 24 hours
    RETRY = "retry"  # the last try was refused a short time ago


class Plan(Value, frozen=True):
    """The step that the node needs.

    next       the step that follows if this one fails
    causes     the causes that need a step, worst first; those that need this step come before the others
    parts      the GPUs to reset, as PCI addresses, or () for all
    obstacles  states that prevent the step now
    """

    step: RepairStep
    next: RepairStep
    causes: tuple[CauseStep, ...]
    parts: tuple[str, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()


class AttemptStage(enum.Enum):
    """Progress of one step of a repair."""

    CLAIM = "claim"  # the claim is being written to the drain's Reason, and counted
    STEP = "step"  # the step is being taken
    VERIFY = "verify"  # all checks and a validation run; then healthd resumes the node


class Attempt(Value, frozen=True):
    """One step of a repair, from its claim to the resume.

    id       the step's id in the journal (agent/repair/journal.py)
    since    when the stage began
    boot_id  this machine's boot when the attempt began
    causes   the faults that the step should end, as "CODE PART"
    others   faults that only a person can end
    parts    PCI addresses of the GPUs to reset; () for all
    is_taken_over  True if another user changed the drain during the step; the repair then ends after the step
    """

    id: str
    step: RepairStep
    stage: AttemptStage
    since: Moment
    boot_id: str
    causes: tuple[str, ...]
    others: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    is_taken_over: bool = False


class TakenStep(Value, frozen=True):
    """The last step that was taken during a drain, even if it failed, and when it ended.

    Before the node is resumed, every check and the validation must have run since.
    """

    id: str
    at: PastMoment


class FailedStep(Value, frozen=True):
    """A step of this drain that did not end the faults. `why` is one sentence.

    `was_taken` is False if the step was impossible on this node, or the machine did not boot, so nothing was changed.
    """

    step: RepairStep
    at: Moment
    causes: tuple[str, ...]
    why: str
    was_taken: bool = True


class RepairRecord(Value, frozen=True):
    """The repair of this node. The ledger keeps it across restarts.

    plan         healthd's plan, as last written to the event stream
    attempt      the step in progress
    taken        the last step of the current drain that was taken, or None. It is kept after the attempt has ended
    failed       steps of the current drain that failed, oldest first
    has_given_up  True if the last step failed, or a service that a reset stopped does not start; the node stays drained
                 until a person acts
    retry_at     when a refused step may be tried again
    refusals     refusals in a row
    refused      why the last try was refused, or ""
    stopped_by   the operator who stopped the repair of the current drain, or ""
    ordered_by   the operator who ordered a repair of the current drain, or ""
    act_since    when repair.mode "act" was set, or 0
    concluded    id of the last finished step in the journal
    booted       boot id of the boot that a step of this drain caused, or ""
    verify_since  start of repair.verify_timeout_seconds, or 0. Time that does not count moves it forward
    held_since   since when the time does not count (View.is_held), or 0
    is_state_dir_proven  True if the journal is from an earlier boot; None if it has not been read
    """

    plan: Plan | None = None
    attempt: Attempt | None = None
    taken: TakenStep | None = None
    failed: tuple[FailedStep, ...] = ()
    has_given_up: bool = False
    retry_at: Moment = 0.0
    refusals: Whole = 0
    refused: str = ""
    stopped_by: str = ""
    ordered_by: str = ""
    act_since: PastMoment = 0.0
    concluded: str = ""
    booted: str = ""
    verify_since: PastMoment = 0.0
    held_since: PastMoment = 0.0
    is_state_dir_proven: bool | None = None
