"""The decision about this node in Slurm. The functions are pure. reconcile.py carries out the decision.

goal                 owner of the current drain  decision in mode "act"
-------------------  --------------------------  ------------------------------------------------------------
(node not read)      ?                           Leave: nothing is sent before the node was read
causes               none                        Drain; requeue if a cause is CRITICAL
causes               "Prolog error", since our   the same, with our Reason: only healthd caused that drain
                     own prolog refused a job
none, may_resume     the same                    Resume
causes               healthd                     keep it (new Reason only if the worst cause changes); requeue if
                                                 CRITICAL, even if the cause became CRITICAL later
causes, CRITICAL     an operator, Slurm, an      Reason and drain stay untouched; requeue the victims
                     unrecorded healthd
causes, no CRITICAL  the same                    Leave
none, may_resume     healthd                     Resume. Leave if the node is DOWN, INVALID_REG, powering off or on, or
                                                 if a reboot is pending: the drain remains and is lifted once that
                                                 is over (UNDRAIN keeps DOWN, with our Reason)
none, may_resume     healthd, and it flaps       Leave for a while, or until an operator resumes the node (flapping.py)
none, not yet        healthd                     Leave: a check that can drain has not completed clean, or the program
                                                 that runs before the resume has not ended
none                 none, another               Leave

A repair adds its claim to the Reason of healthd's drain and removes it again (repair_claim.py). If healthd's own step
has rebooted the machine, a node that is DOWN for that is resumed, too. If Slurm removed the drain because of that
reboot, it is set again, even if no cause is open.

A CRITICAL cause whose fault may lie in the switches of an NVL72 does not requeue (affected_jobs.requeuing).

In mode "drain", nothing is requeued. In mode "observe" or when paused, the decision is Leave, and `would` contains the
action. Only a claim whose step has not begun is removed, because it would keep other nodes from a repair.

If an operator set a node DOWN or FAIL, the node is treated as drained by the operator, because a drain would replace
that Reason.

our drain is gone    the machine rebooted, a reboot was pending, Slurm powers the node off, slurmctld restarted
                     since, another slurmctld answered before the drain was saved, or our own resume was in flight:
                     the drain is lost, and healthd drains again if a cause is open
                     otherwise an operator resumed the node: causes are acknowledged, and do not drain again
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NoReturn

from msgspec import field
from msgspec.structs import replace

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm import affected_jobs, repair_claim
from healthd.agent.slurm.flapping import Flapping, drain_note, wait_reason
from healthd.common.model import (
    Condition,
    Decision,
    Drain,
    DrainRecord,
    EndedDrain,
    Leave,
    Mode,
    NodeState,
    RepairClaim,
    Requeue,
    Resume,
    Verdict,
)
from healthd.common.slurm.builtin_reasons import (
    APPENDED,
    PROLOG_ERROR,
    REMOVED_DRAIN,
    Group,
    is_set_by_slurm,
    reason_group,
    replaces_drain_reason,
    strip_appended,
)
from healthd.common.slurm.drain_reason import names_worst_cause, parse_claim, parse_reason, reason, with_claim
from healthd.common.slurm.node_states import ALLOCATION, DRAINED_STATES, NOT_RESUMABLE, POWER, REBOOT, UNSETTLED
from healthd.common.values import Value

# Munge credentials expire after 300 s. slurmctld then refuses a command that it has not processed yet.
IN_FLIGHT_SECONDS = 600.0
SETTLED_SECONDS = 60.0  # slurmctld saves a drain after a few seconds; until then it can lose the drain
CLOCK_SKEW_SECONDS = 2.0  # clock skew between this node and slurmctld, whose own time stamps are whole seconds
# Time from our prolog's refusal to Slurm's time stamp for "Prolog error": one message's delay, which is retried for up
# to MessageTimeout (10 s by default). The skew covers the clocks, and files with only the last of several refusals.
REFUSAL_DELAY_SECONDS, REFUSAL_SKEW_SECONDS = 15.0, 5.0
# slurmctld saves a node about 5 s after a change. If it is killed before that, an ended drain returns.
SAVED_SECONDS = 60.0
# slurmctld writes a changed node to StateSaveLocation after at most 5 s (src/slurmctld/state_save.c: SAVE_MAX_WAIT).
# The rest is for a busy slurmctld and a slow file system.
WRITTEN_SECONDS = 15.0
# Controller for a change that was sent while `scontrol show config` failed. It never equals another controller.
UNKNOWN_CONTROLLER = "unknown"
MAX_EARLIER = 8  # slurmctld's restored state is seconds old, or as old as its backup


class Policy(Value, frozen=True):
    """Settings for the decision. `paused_until` is in epoch seconds, or 0 if not paused.

    command_timeout_seconds  deadline for a Slurm command, above MessageTimeout (10 s by default): scontrol reports a
                             hanging slurmctld after MessageTimeout, and lost packets after three times that
    requeue_retry_seconds  how long an unconfirmed requeue may still be in flight (because the daemon was killed, or
                           slurmctld was stopped); until then, no other requeue is sent for that run of the job
    max_restarts           a job that was restarted this often is requeued held, so that an operator checks it
    admin_comment          write the fault into the AdminComment of jobs that a CRITICAL fault hit
    flapping               when a repeated drain is resumed
    fleet                  how many nodes healthd may keep drained
    requeue                which jobs a CRITICAL fault requeues (affected_jobs.py)
    claim                  the repair that this node claims, or None
    booted_at              when this machine booted, in epoch seconds; 0 if unknown
    was_allocated          the last reading showed this node drained and with jobs, which may be out of date
    domain                 short id of this node's NVLink domain (drain_reason.domain_id), or ""
    rack_gpus              PCI addresses of the GPUs that switches outside the node may connect (affected_jobs.py)
    """

    mode: Mode = Mode.OBSERVE
    paused_until: float = 0.0
    command_timeout_seconds: float = 30.0
    requeue_retry_seconds: float = 90.0
    max_restarts: int = 5
    admin_comment: bool = True
    flapping: Flapping = field(default_factory=Flapping)
    fleet: FleetLimits = field(default_factory=FleetLimits)
    requeue: Requeue = Requeue.PART
    claim: RepairClaim | None = None
    booted_at: float = 0.0
    was_allocated: bool = False
    domain: str = ""
    rack_gpus: frozenset[str] = frozenset()


class Owner(enum.Enum):
    """Owner of the node's drain."""

    NONE = "none"
    HEALTHD = "healthd"
    UNRECORDED_HEALTHD = "unrecorded_healthd"  # a Reason in healthd's format that is not in this ledger
    OTHER = "other"  # an operator or Slurm itself


def own_reason(node: NodeState, record: DrainRecord) -> str:
    """Return healthd's Reason on the node as healthd wrote it, or "" if there is none."""
    found = strip_appended(node.reason)
    if record.pending_reason and found == record.pending_reason:
        return record.pending_reason
    # empty: 22.05 drops the Reason when it powers the node on; an operator cannot drain without one
    is_replaced = not found or replaces_drain_reason(found)
    if record.reason and (found == record.reason or is_replaced):
        return record.reason
    if record.reason and (step := parse_claim(found)) and found == with_claim(record.reason, step):
        return found  # the ledger was restored from a copy that is older than the claim
    return ""


def is_stale_reason(node: NodeState, record: DrainRecord) -> bool:
    """Return True if the Reason is left over from an ended drain by healthd.

    Slurm 24.11 keeps the Reason, even for Slurm's next drain.
    """
    return record.ended_drain is not None and _matches(node, record.ended_drain)


def restored_drain(node: NodeState, record: DrainRecord) -> EndedDrain | None:
    """Return healthd's ended drain if slurmctld restored it from an older state."""
    if node.flags.isdisjoint(DRAINED_STATES) or own_reason(node, record):
        return None
    last = (record.ended_drain,) if record.ended_drain and not record.ended_drain.is_saved else ()
    return next((old for old in (*last, *reversed(record.earlier_drains)) if _matches(node, old)), None)


def _matches(node: NodeState, old: EndedDrain) -> bool:
    return strip_appended(node.reason) == old.node_reason and old.reason_time in (0.0, node.reason_time)


def mark_prolog_drain(node: NodeState, refusals: Sequence[float], record: DrainRecord) -> NodeState:
    """Return the node, with a mark if Slurm drained it because our prolog refused a job. `refusals` are in epoch
    seconds.

    Slurm receives each refusal within seconds, and keeps the time of the first refusal. A refusal from before the end
    of our last drain belongs to that drain, so a later "Prolog error" comes from another prolog.
    """
    ended_at = record.ended_drain.ended_at if record.ended_drain else 0.0
    is_match = node.reason_time == record.prolog_drain_time or any(
        -REFUSAL_SKEW_SECONDS <= node.reason_time - at <= REFUSAL_DELAY_SECONDS
        and at >= ended_at - REFUSAL_SKEW_SECONDS
        for at in refusals
    )
    drained = node.reason == PROLOG_ERROR and "DRAIN" in node.flags and node.reason_time > 0
    return replace(node, drained_by_own_prolog=drained and is_match)


def after_refusal(record: DrainRecord, node: NodeState) -> DrainRecord:
    """Return the record, updated after a reading: whether a drain is in force that only our prolog's refusal caused."""
    return replace(record, prolog_drain_time=node.reason_time if node.drained_by_own_prolog else 0.0)


def is_drain_removed_by_reboot(node: NodeState, record: DrainRecord) -> bool:
    """Return True if Slurm removed healthd's drain because of a reboot by healthd, and set the node DOWN instead.

    Slurm 22.05 does so if the node does not register within ResumeTimeout. If an operator resumed the node, the Reason
    has neither of these suffixes, or is gone.
    """
    is_down = "DOWN" in node.flags and node.flags.isdisjoint(DRAINED_STATES)
    is_own = parse_claim(record.reason) is not None and strip_appended(node.reason) == record.reason
    return is_down and is_own and node.reason.endswith(REMOVED_DRAIN)


def drain_owner(node: NodeState, record: DrainRecord) -> Owner:
    if node.drained_by_own_prolog:
        return Owner.NONE
    if is_drain_removed_by_reboot(node, record):
        return Owner.HEALTHD
    if node.flags.isdisjoint(DRAINED_STATES):
        # a suffix is newer: Slurm itself set the node DOWN, and 24.11 keeps an ended drain's Reason
        is_site_reason = bool(node.reason) and not is_set_by_slurm(node.reason) and not node.reason.endswith(APPENDED)
        is_operators = "DOWN" in node.flags and is_site_reason and parse_reason(node.reason) is None
        return Owner.OTHER if is_operators else Owner.NONE
    if own_reason(node, record):
        return Owner.HEALTHD
    if is_stale_reason(node, record):
        return Owner.OTHER
    recorded = [text for text in (record.reason, record.pending_reason, record.overriding_reason) if text]
    is_replacement = any(node.reason.startswith(text) for text in recorded)
    if parse_reason(node.reason) and not is_replacement:
        return Owner.UNRECORDED_HEALTHD
    return Owner.OTHER


def is_idle(node: NodeState, is_booted: bool = False) -> bool:
    """Return True if no job is on this node and none will start: the node is drained, and the last epilog has ended.

    If healthd's own step has booted the machine (`is_booted`), a drained node may also be DOWN because of that.
    """
    unsettled = node.flags & ({"COMPLETING"} | UNSETTLED)
    is_expected = not unsettled if "IDLE" in node.flags else is_booted and unsettled == {"DOWN"}
    return "DRAIN" in node.flags and is_expected


def is_allocated(node: NodeState | None) -> bool:
    """Return True if Slurm shows this node drained and with jobs."""
    return node is not None and "DRAIN" in node.flags and bool(node.flags & ALLOCATION)


def decide(verdict: Verdict, node: NodeState | None, record: DrainRecord, policy: Policy, now: float) -> Decision:
    """Return the decision from the table above."""
    if node is None:
        # Show the desired action anyway, as for an undrained node, because the fault exists without slurmctld too.
        desired = _decide_in_act_mode(verdict, NodeState("", frozenset({"UNKNOWN"})), record, policy, now)
        would = "" if isinstance(desired, Leave) else describe(desired)
        return Leave("the node's state in Slurm is unknown", would)
    desired = _decide_in_act_mode(verdict, node, record, policy, now)
    if isinstance(desired, Leave):
        return desired
    is_paused = policy.mode is Mode.OBSERVE or now < policy.paused_until
    if is_paused and _is_claim_unused(node, record, policy):
        return Drain(with_claim(node.reason, None), requeue=False)
    if policy.mode is Mode.OBSERVE:
        return Leave('mode is "observe"', would=describe(desired))
    if now < policy.paused_until:
        return Leave("paused", would=describe(desired))
    if isinstance(desired, Drain) and policy.mode is Mode.DRAIN:
        return replace(desired, requeue=False)
    return desired


def _decide_in_act_mode(verdict: Verdict, node: NodeState, record: DrainRecord, policy: Policy, now: float) -> Decision:
    owner = drain_owner(node, record)
    if verdict.causes:
        is_requeue = bool(affected_jobs.requeuing(verdict.causes, policy.rack_gpus, now))
        if owner is Owner.NONE:
            return Drain(_new_reason(verdict, record, policy), is_requeue)
        if owner is Owner.HEALTHD:
            return Drain(_own_drain_reason(verdict, node, record, policy, now), is_requeue)
        if owner is Owner.OTHER or owner is Owner.UNRECORDED_HEALTHD:
            foreign_drain = describe_foreign_drain(node, record, verdict.causes)
            return Drain(node.reason, requeue=True) if is_requeue else Leave(foreign_drain)
        unreachable(owner)
    if owner is Owner.HEALTHD:
        if not (wait := _resume_obstacle(verdict, node, record, policy, now)):
            return Resume("every check that can drain has completed clean")
        desired_reason = _own_drain_reason(verdict, node, record, policy, now)
        return Leave(wait) if desired_reason == node.reason else Drain(desired_reason, requeue=False)
    if owner is Owner.NONE and node.drained_by_own_prolog:
        if not verdict.may_resume or node.flags & NOT_RESUMABLE:
            return Leave("healthd's prolog refused a job, and Slurm drained the node; not every check is clean yet")
        return Resume("healthd's prolog refused a job, and Slurm drained the node; every check has completed clean")
    if owner is Owner.NONE:
        if is_down_after_own_boot(node, record, policy) and verdict.may_resume and not verdict.before_resume:
            return Resume("down after a reboot by healthd; every check that can drain has completed clean")
        return Leave("nothing to do")
    if owner is Owner.OTHER or owner is Owner.UNRECORDED_HEALTHD:
        return Leave(describe_foreign_drain(node, record))
    unreachable(owner)


def _is_claim_unused(node: NodeState, record: DrainRecord, policy: Policy) -> bool:
    """Return True if healthd's drain claims a step of a repair, but no step is in progress."""
    is_in_progress = policy.claim is not None and repair_claim.is_counted(policy.claim.step)
    if is_in_progress or node.flags.isdisjoint(DRAINED_STATES) or node.flags & REBOOT:
        return False
    return drain_owner(node, record) is Owner.HEALTHD and repair_claim.is_counted(parse_claim(node.reason))


def _new_reason(verdict: Verdict, record: DrainRecord, policy: Policy) -> str:
    return with_claim(reason(verdict.causes, drain_note(record, policy.flapping), policy.domain), None)


def _own_drain_reason(verdict: Verdict, node: NodeState, record: DrainRecord, policy: Policy, now: float) -> str:
    """Return the Reason that healthd's drain must have. If nothing must change, this is the node's Reason, which may be
    Slurm's own or have a suffix.
    """
    step = repair_claim.step_to_claim(policy.claim, record, now)
    claimed = parse_claim(node.reason)
    if claimed and node.flags & REBOOT:
        return node.reason  # the other nodes must count this reboot until it is over
    is_confirmed = step is not None and record.claim is step
    keeps_text = is_confirmed or not verdict.causes
    keeps_text = keeps_text or bool(node.reason and names_worst_cause(own_reason(node, record), verdict.causes))
    if keeps_text and claimed is step and not is_drain_removed_by_reboot(node, record):
        return node.reason
    text = own_reason(node, record) if keeps_text else _new_reason(verdict, record, policy)
    return with_claim(text, step)


def _resume_obstacle(verdict: Verdict, node: NodeState, record: DrainRecord, policy: Policy, now: float) -> str:
    """Return why healthd's drain stays although no cause is open, or ""."""
    if verdict.before_resume:
        return f"drained by healthd until {verdict.before_resume}"
    if not verdict.may_resume:
        return "drained by healthd until every check that can drain has completed clean"
    if blocking_states := sorted(_not_resumable(node, policy)):
        return f"repaired, but the node is {'+'.join(blocking_states)} in Slurm"
    return wait_reason(record, policy.flapping, now)


def _not_resumable(node: NodeState, policy: Policy) -> frozenset[str]:
    """Return the node's states in which healthd does not resume it. DOWN is none of them if a reboot by healthd may
    have caused it, and slurmd has registered since."""
    if policy.claim is None or not policy.claim.is_booted:
        return node.flags & NOT_RESUMABLE
    states = node.flags & (NOT_RESUMABLE | {"NOT_RESPONDING"})
    return frozenset() if states == {"DOWN"} else states


def is_down_after_own_boot(node: NodeState, record: DrainRecord, policy: Policy) -> bool:
    """Return True if Slurm set the undrained node DOWN because healthd's step rebooted it (ReturnToService 0 or 1).

    The Reason is then Slurm's own, or on 24.11 the Reason of the drain that has ended.
    """
    is_down = "DOWN" in node.flags and not _not_resumable(node, policy)
    ended = record.ended_drain
    is_last_reason = ended is not None and strip_appended(node.reason) == ended.node_reason
    return is_down and (is_last_reason or reason_group(node.reason) is Group.REBOOTED)


def describe_foreign_drain(node: NodeState, record: DrainRecord, causes: Sequence[Condition] = ()) -> str:
    if is_stale_reason(node, record):
        return "drained by Slurm, with the Reason from an earlier drain by healthd"
    fault = f"; healthd's finding: {reason(causes)}" if causes and node.reason == PROLOG_ERROR else ""
    return f'drained by {node.reason_user or "another user"}: "{node.reason}"{fault}'


def describe(decision: Decision) -> str:
    """Return a decision as text, such as 'drain with "healthd: ..." and requeue'."""
    if isinstance(decision, Drain):
        return f'drain with "{decision.reason}"{" and requeue" if decision.requeue else ""}'
    if isinstance(decision, Resume):
        return "resume"
    if isinstance(decision, Leave):
        return decision.why
    unreachable(decision)


def needs_no_query(verdict: Verdict, record: DrainRecord) -> bool:
    """Return True if Slurm need not be queried, because no drain is desired and no drain that concerns healthd is in
    force.
    """
    return not (verdict.causes or record.pending_reason or record.prolog_drain_time or last_drain_reason(record))


# record


def last_drain_reason(record: DrainRecord) -> str:
    """Return the Reason of the drain that concerned healthd at the last reading, or "" if there was none."""
    return record.reason or record.overriding_reason or record.adopted_reason


def jobs_blocked_since(node: NodeState | None, record: DrainRecord, boot_id: str) -> float:
    """Return the time since which Slurm itself has kept jobs from the node (epoch seconds), or infinity if it does not
    yet.

    Slurm keeps jobs away only if a drain has existed for a while in this boot and slurmd has registered. After an
    operator resumes the node, Slurm admits jobs again. If the prolog refused one of these jobs, the job would be held,
    and the node would be drained with "Prolog error" and never resumed automatically.
    """
    if node is None or not node.reason_time or not last_drain_reason(record) or record.boot_id != boot_id:
        return float("inf")
    is_drained = "DRAIN" in node.flags and node.flags.isdisjoint(UNSETTLED)
    return node.reason_time + SETTLED_SECONDS if is_drained else float("inf")


def is_drain_gone(node: NodeState, record: DrainRecord) -> bool:
    """Return True if a drain for our fault was in force at the last reading but is now gone."""
    return bool(last_drain_reason(record)) and drain_owner(node, record) is Owner.NONE


def is_certainly_lost(node: NodeState, record: DrainRecord, boot_id: str, policy: Policy, now: float) -> bool:
    """Return True if the missing drain was certainly not lifted by an operator. If other evidence is unclear,
    slurmctld's start time decides.
    """
    is_power_change = record.reboot_pending or not node.flags.isdisjoint(POWER)
    return boot_id != record.boot_id or is_power_change or is_resume_in_flight(record, policy, now)


def is_resume_in_flight(record: DrainRecord, policy: Policy, now: float) -> bool:
    """Return True if a resume by healthd may have ended the missing drain, although its answer was lost."""
    since = record.resume_sent_at
    return since > 0 and (since >= record.confirmed_at or now < since + policy.requeue_retry_seconds)


def is_lost_by_slurmctld(changed_at: float, started: float, previous_controller: str, controller: str) -> bool:
    """Return True if slurmctld may have lost a change that it confirmed at `changed_at`.

    slurmctld answers first and saves a few seconds later. If slurmctld `started` after the change, the previous process
    may have been killed in between, so that the new process read an older state. A backup that took over may also have
    an older state, even if it started days ago. The current `controller` then differs from `previous_controller`, which
    was read right before the change ("" = the change is saved). UNKNOWN_CONTROLLER is treated as a different
    controller. If in doubt, the change is treated as lost. A broken node may then stay drained, or be drained again
    after an operator resumed it within seconds. Both are less harmful than a broken node that returns to service.
    """
    return started >= changed_at - CLOCK_SKEW_SECONDS or (
        previous_controller != "" and previous_controller != controller
    )


def after_drain_ended(record: DrainRecord, node: NodeState, now: float) -> DrainRecord:
    """Return the record without healthd's drain. A drain in flight and the sent requeues are kept.

    A resume by healthd has already taken effect, and cannot end a later drain. `node` is the last reading with
    healthd's Reason, if there is one.
    """
    ended, earlier = record.ended_drain, record.earlier_drains
    if record.reason:
        is_displayed = bool(node.reason and own_reason(node, record))
        node_reason = strip_appended(node.reason) if is_displayed else record.reason
        earlier = _with_earlier(record, record.ended_drain)
        reason_time = node.reason_time if is_displayed else record.reason_time
        ended = EndedDrain(record.reason, node_reason, reason_time, now, controller=unsaved_controller(record))
    cleared = replace(
        record, reason="", overriding_reason="", adopted_reason="", confirmed_at=0.0, boot_id="", reboot_pending=False
    )
    cleared = replace(
        cleared, drained_at=0.0, own_hardware=False, clean_since=0.0, clean_seconds=0.0, unaffected_jobs=()
    )
    cleared = replace(cleared, resume_sent_at=0.0, awaits_count=False, reason_time=0.0, unsaved_change=None)
    cleared = replace(cleared, claim=None, claim_hold=None)
    return replace(cleared, ended_drain=ended, earlier_drains=earlier)


def unsaved_controller(record: DrainRecord) -> str:
    """Return the controller that confirmed healthd's last change, or "" once that change is certainly saved."""
    return record.unsaved_change.controller if record.unsaved_change else ""


def after_restored_drain(record: DrainRecord, old: EndedDrain, now: float) -> DrainRecord:
    """Return the record, updated after slurmctld restored an ended drain by healthd but not the following drain."""
    earlier = tuple(e for e in _with_earlier(record, record.ended_drain, _as_ended(record, now)) if e != old)
    restored = replace(
        record,
        reason=old.reason,
        reason_time=old.reason_time,
        overriding_reason="",
        adopted_reason="",
        ended_drain=None,
        earlier_drains=earlier,
    )
    undone = next((resumed for resumed in record.resumed_drains if resumed.resumed_at >= old.ended_at), None)
    if undone is None:
        return restored
    remaining = tuple(resumed for resumed in record.resumed_drains if resumed is not undone)
    return replace(restored, drained_at=undone.drained_at, own_hardware=undone.own_hardware, resumed_drains=remaining)


def _as_ended(record: DrainRecord, now: float) -> EndedDrain | None:
    if not record.reason:
        return None
    return EndedDrain(record.reason, record.reason, record.reason_time, now, controller=unsaved_controller(record))


def _with_earlier(record: DrainRecord, *ended: EndedDrain | None) -> tuple[EndedDrain, ...]:
    """Return the earlier drains plus the `ended` drains that have a time stamp. Without a time stamp, a Reason could be
    from anyone.
    """
    return tuple(dict.fromkeys((*record.earlier_drains, *(old for old in ended if old and old.reason_time))))[
        -MAX_EARLIER:
    ]


def mark_saved(record: DrainRecord, now: float) -> DrainRecord:
    """Return the record, updated after a reading. A drain that ended SAVED_SECONDS ago can no longer return."""
    if record.ended_drain and not record.ended_drain.is_saved and now >= record.ended_drain.ended_at + SAVED_SECONDS:
        return replace(record, ended_drain=replace(record.ended_drain, is_saved=True))
    return record


def next_read_at(record: DrainRecord) -> float:
    """Return the time to read the node once more because slurmctld may lose a change (epoch seconds), or 0.

    After a drain, the node is read again once the drain is certainly saved. After a resume, it is read again after
    SAVED_SECONDS.
    """
    if record.unsaved_change:
        return record.unsaved_change.sent_at + WRITTEN_SECONDS
    return (
        record.ended_drain.ended_at + SAVED_SECONDS if record.ended_drain and not record.ended_drain.is_saved else 0.0
    )


def after_reading(record: DrainRecord, node: NodeState, boot_id: str, now: float) -> DrainRecord:
    """Return the record, updated after this reading of the node. Call `is_drain_gone` first."""
    owner, text = drain_owner(node, record), own_reason(node, record)
    record = after_refusal(record, node)
    if record.pending_reason and (text == record.pending_reason or now > record.pending_since + IN_FLIGHT_SECONDS):
        record = replace(record, pending_reason="", pending_since=0.0)
    if record.unsaved_change and now >= record.unsaved_change.sent_at + WRITTEN_SECONDS:
        record = replace(record, unsaved_change=None)
    confirmed = replace(
        record, confirmed_at=now, boot_id=boot_id, reboot_pending=not node.flags.isdisjoint(REBOOT | POWER)
    )
    if owner is not Owner.HEALTHD:
        confirmed = replace(confirmed, claim=None, claim_hold=None)
    if owner is Owner.HEALTHD:
        own = replace(
            confirmed,
            reason=text,
            overriding_reason="",
            adopted_reason="",
            ended_drain=None,
            reason_time=node.reason_time,
            claim=record.claim if record.claim is parse_claim(text) else None,
        )
        replaced = _as_ended(record, now) if text != record.reason else None
        return replace(own, earlier_drains=_with_earlier(record, record.ended_drain, replaced))
    if owner is Owner.UNRECORDED_HEALTHD:
        return replace(confirmed, reason="", overriding_reason="", adopted_reason=node.reason, reason_time=0.0)
    if owner is Owner.OTHER and last_drain_reason(record):
        # the other owner took over the node, and must lift a healthd drain that slurmctld restores
        return replace(
            confirmed, reason="", overriding_reason=node.reason, adopted_reason="", reason_time=0.0, earlier_drains=()
        )
    return record


def unreachable(value: NoReturn) -> NoReturn:
    """Prove to mypy that all cases are handled (typing.assert_never is newer than Python 3.10)."""
    raise AssertionError(f"not handled: {value!r}")
