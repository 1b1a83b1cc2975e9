"""Decision about this node in Slurm: pure. reconcile.py carries it out.

goal                 owner of the current drain  decision in mode "act"
-------------------  --------------------------  ------------------------------------------------------------
(node not read)      ?                           Leave: nothing is sent without a reading
causes               none                        Drain; requeue if a cause is CRITICAL
causes               "Prolog error", since our   the same, with our Reason: only healthd caused that drain
                     own prolog refused a job
none, may_resume     the same                    Resume
causes               healthd                     keep it (new Reason only for another worst cause); requeue if
                                                 CRITICAL, also when it became CRITICAL later
causes, CRITICAL     an operator, Slurm, an      Reason and drain stay untouched; requeue the victims
                     unrecorded healthd
causes, no CRITICAL  the same                    Leave
none, may_resume     healthd                     Resume, unless DOWN, INVALID_REG, powering off or on, or a reboot is
                                                 pending: then Leave. The drain stays and is lifted when that is
                                                 over (UNDRAIN keeps DOWN, with our Reason)
none, may_resume     healthd, and it flaps       Leave: for a while, or until an operator resumes the node (flapping.py)
none, not yet        healthd                     Leave: a check that can drain has not completed clean, or the program
                                                 before the resume has not ended
none                 none, another               Leave

Mode "drain": no requeue. Mode "observe" or paused: Leave, and `would` has the action. A node that an operator set DOWN
or FAIL counts as drained by the operator: draining it would replace that Reason.

our drain is gone    this machine booted since, a reboot was pending, Slurm powers the node off, slurmctld started
                     since, another slurmctld answers before the drain was saved, or our own resume was in flight:
                     lost, drain again if a cause is open
                     otherwise an operator resumed the node: causes are acknowledged, without another drain
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NoReturn

from msgspec import field
from msgspec.structs import replace

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.flapping import Flapping, note, why_waits
from healthd.common.model import (
    Condition,
    Decision,
    Drain,
    Leave,
    Lifted,
    Mode,
    NodeState,
    Requeue,
    Resume,
    Severity,
    SlurmMemory,
    Verdict,
)
from healthd.common.slurm.builtin_reasons import (
    APPENDED,
    PROLOG_ERROR,
    is_slurms_own,
    replaces_drain_reason,
    without_appended,
)
from healthd.common.slurm.drain_reason import parse_reason, reason, still_says
from healthd.common.slurm.node_states import NOT_TO_RESUME, POWER, REBOOT, TAKEN, UNSETTLED
from healthd.common.values import Value

# Munge's credentials live 300 s: after that slurmctld refuses a command that it has not processed yet.
IN_FLIGHT_SECONDS = 600.0
HELD_SECONDS = 60.0  # slurmctld saves a drain after a few seconds; until then it can lose the drain
CLOCK_SKEW_SECONDS = 2.0  # between this node and slurmctld, whose own time stamps have whole seconds
# From our prolog's refusal to Slurm's time stamp of "Prolog error": the delay of one message, which is retried for up
# to MessageTimeout (10 s by default). The skew covers the clocks, and files with only the last of several refusals.
REFUSAL_HEARD_SECONDS, REFUSAL_SKEW_SECONDS = 15.0, 5.0
# slurmctld saves a node about 5 s after a change: if it is killed before, a drain that has ended returns.
SAVED_SECONDS = 60.0
# slurmctld writes a changed node to StateSaveLocation after at most 5 s (src/slurmctld/state_save.c: SAVE_MAX_WAIT).
# The rest is for a busy slurmctld and a slow file system.
WRITTEN_SECONDS = 15.0
# Controller of a change that was sent while `scontrol show config` failed. It equals no other controller.
UNKNOWN_CONTROLLER = "unknown"
EARLIER = 8  # a restored state of slurmctld is seconds old, or as old as its backup


class Policy(Value, frozen=True):
    """Settings of the decision. paused_until: epoch seconds, 0 = not paused.

    command_timeout_seconds  deadline of a Slurm command, above MessageTimeout (10 s by default): scontrol reports a
                             hanging slurmctld after that time, and lost packets after three times that
    requeue_retry_seconds  how long an unconfirmed requeue may still be in flight (scontrol of a killed daemon, a
                           slurmctld that was stopped): until then no other is sent for that run of the job
    max_restarts           a job that was restarted this often is requeued held, for an operator to check
    admin_comment          write the fault into the AdminComment of jobs that a CRITICAL fault hit
    flapping               when the resume of a repeated drain waits
    fleet                  how many nodes healthd may keep drained
    requeue                jobs that a CRITICAL fault requeues (affected_jobs.py)
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


class Owner(enum.Enum):
    """Owner of the node's drain."""

    NOBODY = "none"
    OURS = "healthd"
    FOREIGN_HEALTHD = "unrecorded_healthd"  # a Reason in healthd's format that this ledger does not have
    FOREIGN = "other"  # an operator or Slurm itself


def our_text(node: NodeState, memory: SlurmMemory) -> str:
    """Return healthd's Reason on the node as healthd wrote it; "" if there is none."""
    found = without_appended(node.reason)
    if memory.writing and found == memory.writing:
        return memory.writing
    # empty: 22.05 drops the Reason when it powers the node on; an operator cannot drain without one
    replaced = not found or replaces_drain_reason(found)
    if memory.reason and (found == memory.reason or replaced):
        return memory.reason
    return ""


def is_left_over(node: NodeState, memory: SlurmMemory) -> bool:
    """Return True if the Reason is left from an ended drain of healthd: 24.11 keeps it, also under Slurm's next
    drain.
    """
    return memory.lifted is not None and _stands_as(node, memory.lifted)


def brought_back(node: NodeState, memory: SlurmMemory) -> Lifted | None:
    """Return healthd's ended drain that is back, because slurmctld restored a state from before its end."""
    if node.flags.isdisjoint(TAKEN) or our_text(node, memory):
        return None
    last = (memory.lifted,) if memory.lifted and not memory.lifted.saved else ()
    return next((old for old in (*last, *reversed(memory.earlier)) if _stands_as(node, old)), None)


def _stands_as(node: NodeState, old: Lifted) -> bool:
    return without_appended(node.reason) == old.words and old.stamp in (0.0, node.reason_time)


def refused_here(node: NodeState, refusals: Sequence[float], memory: SlurmMemory) -> NodeState:
    """Return the node, marked if Slurm drained it because our prolog refused a job. `refusals`: times, epoch seconds.

    Slurm receives each refusal within seconds, and keeps the time of the first. A refusal from before the end of our
    last drain belongs to that drain: a later "Prolog error" comes from another prolog.
    """
    over = memory.lifted.time if memory.lifted else 0.0
    is_it = node.reason_time == memory.refused or any(
        -REFUSAL_SKEW_SECONDS <= node.reason_time - at <= REFUSAL_HEARD_SECONDS and at >= over - REFUSAL_SKEW_SECONDS
        for at in refusals
    )
    drained = node.reason == PROLOG_ERROR and "DRAIN" in node.flags and node.reason_time > 0
    return replace(node, refused_here=drained and is_it)


def refusal_noted(memory: SlurmMemory, node: NodeState) -> SlurmMemory:
    """Return the record after this reading: whether a drain is in force that only our prolog's refusal caused."""
    return replace(memory, refused=node.reason_time if node.refused_here else 0.0)


def owner(node: NodeState, memory: SlurmMemory) -> Owner:
    if node.refused_here:
        return Owner.NOBODY
    if node.flags.isdisjoint(TAKEN):
        # a suffix is newer: Slurm itself set the node DOWN, and 24.11 keeps the Reason of an ended drain
        somebodys = bool(node.reason) and not is_slurms_own(node.reason) and not node.reason.endswith(APPENDED)
        by_a_person = "DOWN" in node.flags and somebodys and parse_reason(node.reason) is None
        return Owner.FOREIGN if by_a_person else Owner.NOBODY
    if our_text(node, memory):
        return Owner.OURS
    if is_left_over(node, memory):
        return Owner.FOREIGN
    ours_or_theirs = [text for text in (memory.reason, memory.writing, memory.overruled) if text]
    taken_over = any(node.reason.startswith(text) for text in ours_or_theirs)
    if parse_reason(node.reason) and not taken_over:
        return Owner.FOREIGN_HEALTHD
    return Owner.FOREIGN


def is_idle(node: NodeState) -> bool:
    """Return True if no job is on this node and none will start: drained, and the last epilog has ended."""
    return {"IDLE", "DRAIN"} <= node.flags and node.flags.isdisjoint({"COMPLETING"} | UNSETTLED)


def decide(verdict: Verdict, node: NodeState | None, memory: SlurmMemory, policy: Policy, now: float) -> Decision:
    """Return the decision of the table above."""
    if node is None:
        # Show the desired action all the same, as for a node without a drain: the fault exists without slurmctld.
        wanted = _decide_to_act(verdict, NodeState("", frozenset({"UNKNOWN"})), memory, policy, now)
        would = "" if isinstance(wanted, Leave) else describe(wanted)
        return Leave("the node's state in Slurm is unknown", would)
    wanted = _decide_to_act(verdict, node, memory, policy, now)
    if isinstance(wanted, Leave):
        return wanted
    if policy.mode is Mode.OBSERVE:
        return Leave('mode is "observe"', would=describe(wanted))
    if now < policy.paused_until:
        return Leave("paused", would=describe(wanted))
    if isinstance(wanted, Drain) and policy.mode is Mode.DRAIN:
        return replace(wanted, requeue=False)
    return wanted


def _decide_to_act(verdict: Verdict, node: NodeState, memory: SlurmMemory, policy: Policy, now: float) -> Decision:
    whose = owner(node, memory)
    if verdict.causes:
        critical = any(cause.severity >= Severity.CRITICAL for cause in verdict.causes)
        text = reason(verdict.causes, note(memory, policy.flapping))
        if whose is Owner.NOBODY:
            return Drain(text, critical)
        if whose is Owner.OURS:
            keep = node.reason and still_says(our_text(node, memory), verdict.causes)
            return Drain(node.reason if keep else text, critical)
        if whose is Owner.FOREIGN or whose is Owner.FOREIGN_HEALTHD:
            held = held_by(node, memory, verdict.causes)
            return Drain(node.reason, requeue=True) if critical else Leave(held)
        never(whose)
    if whose is Owner.OURS:
        if verdict.before_resume:
            return Leave(f"drained by healthd until {verdict.before_resume}")
        if not verdict.may_resume:
            return Leave("drained by healthd until every check that can drain has completed clean")
        if waits_for := sorted(node.flags & NOT_TO_RESUME):
            return Leave(f"repaired, but the node is {'+'.join(waits_for)} in Slurm")
        if waits := why_waits(memory, policy.flapping, now):
            return Leave(waits)
        return Resume("every check that can drain has completed clean")
    if whose is Owner.NOBODY and node.refused_here:
        if not verdict.may_resume or node.flags & NOT_TO_RESUME:
            return Leave(
                "healthd's prolog refused a job, and Slurm drained the node; not every check is clean yet"
            )
        return Resume("healthd's prolog refused a job, and Slurm drained the node; every check has completed clean")
    if whose is Owner.NOBODY:
        return Leave("nothing to do")
    if whose is Owner.FOREIGN or whose is Owner.FOREIGN_HEALTHD:
        return Leave(held_by(node, memory))
    never(whose)


def held_by(node: NodeState, memory: SlurmMemory, causes: Sequence[Condition] = ()) -> str:
    if is_left_over(node, memory):
        return "drained by Slurm, with the Reason of an ended drain by healthd"
    fault = f"; healthd's finding: {reason(causes)}" if causes and node.reason == PROLOG_ERROR else ""
    return f'drained by {node.reason_user or "another user"}: "{node.reason}"{fault}'


def describe(decision: Decision) -> str:
    """Return a decision as text: 'drain with "healthd: ..." and requeue'."""
    if isinstance(decision, Drain):
        return f'drain with "{decision.reason}"{" and requeue" if decision.requeue else ""}'
    if isinstance(decision, Resume):
        return "resume"
    if isinstance(decision, Leave):
        return decision.why
    never(decision)


def is_quiet(verdict: Verdict, memory: SlurmMemory) -> bool:
    """Return True if Slurm need not be queried: no drain is desired, and none that concerns healthd is in force."""
    return not (verdict.causes or memory.writing or memory.refused or stood(memory))


# record


def stood(memory: SlurmMemory) -> str:
    """Return the Reason of the drain that concerned healthd at the last reading, "" = none."""
    return memory.reason or memory.overruled or memory.adopted


def held_from(node: NodeState | None, memory: SlurmMemory, boot_id: str) -> float:
    """Return when Slurm began to keep jobs from the node by itself (epoch seconds; infinity: not yet).

    That requires a drain that has existed for a while, in this boot, and a registered slurmd. An operator who resumed
    the node admitted a job that starts later. If the prolog refused that job, it would be held, and the node would be
    drained with "Prolog error", which nothing resumes.
    """
    if node is None or not node.reason_time or not stood(memory) or memory.boot_id != boot_id:
        return float("inf")
    stands = "DRAIN" in node.flags and node.flags.isdisjoint(UNSETTLED)
    return node.reason_time + HELD_SECONDS if stands else float("inf")


def is_gone(node: NodeState, memory: SlurmMemory) -> bool:
    """Return True if a drain for our fault was in force at the last reading, and none is now."""
    return bool(stood(memory)) and owner(node, memory) is Owner.NOBODY


def is_lost_for_sure(node: NodeState, memory: SlurmMemory, boot_id: str, policy: Policy, now: float) -> bool:
    """Return True if an operator certainly did not lift the missing drain. If unsure, slurmctld's start decides."""
    going = memory.rebooting or not node.flags.isdisjoint(POWER)
    return boot_id != memory.boot_id or going or is_resume_under_way(memory, policy, now)


def is_resume_under_way(memory: SlurmMemory, policy: Policy, now: float) -> bool:
    """Return True if a resume by healthd, whose answer was lost, may have ended the missing drain."""
    since = memory.resumed_at
    return since > 0 and (since >= memory.confirmed_at or now < since + policy.requeue_retry_seconds)


def is_lost_by_slurmctld(since: float, started: float, before: str, now: str) -> bool:
    """Return True if slurmctld may have lost a change that it confirmed at `changed_at`.

    slurmctld answers first and saves a few seconds later. If slurmctld `started` after the change, the other process
    may have been killed in between, and it has read an older state. The same holds for a backup that took over,
    although it started days ago: then the current `controller` is not the `previous_controller` from right before the
    change ("" = the change is saved). UNKNOWN_CONTROLLER counts as another one: a broken node that stays drained, or is
    drained again after an operator resumed it within seconds, is less harmful than one that returns to work.
    """
    return started >= since - CLOCK_SKEW_SECONDS or (before != "" and before != now)


def forget(memory: SlurmMemory, node: NodeState, now: float) -> SlurmMemory:
    """Return the record without healthd's drain. A drain in flight and the sent requeues stay.

    A resume by healthd has taken effect by now and can end no later drain. `node`: the last reading with healthd's
    Reason, if there is one.
    """
    lifted, earlier = memory.lifted, memory.earlier
    if memory.reason:
        shown = bool(node.reason and our_text(node, memory))
        words = without_appended(node.reason) if shown else memory.reason
        earlier = _with_earlier(memory, memory.lifted)
        stamp = node.reason_time if shown else memory.stamp
        lifted = Lifted(memory.reason, words, stamp, now, controller=unsaved_by(memory))
    nothing = replace(memory, reason="", overruled="", adopted="", confirmed_at=0.0, boot_id="", rebooting=False)
    nothing = replace(nothing, drained_at=0.0, own_hardware=False, clean_since=0.0, clean_seconds=0.0, spared=())
    nothing = replace(nothing, resumed_at=0.0, uncounted=False, stamp=0.0, unsaved=None)
    return replace(nothing, lifted=lifted, earlier=earlier)


def unsaved_by(memory: SlurmMemory) -> str:
    """Return the controller that confirmed healthd's last change, "" once that change is surely saved."""
    return memory.unsaved.controller if memory.unsaved else ""


def taken_back(memory: SlurmMemory, old: Lifted, now: float) -> SlurmMemory:
    """Return the record after an ended drain of healthd returned, and the drain after it did not."""
    earlier = tuple(e for e in _with_earlier(memory, memory.lifted, _standing(memory, now)) if e != old)
    back = replace(memory, reason=old.reason, stamp=old.stamp, overruled="", adopted="", lifted=None, earlier=earlier)
    never_was = next((resumed for resumed in memory.resumed if resumed.time >= old.time), None)
    if never_was is None:
        return back
    others = tuple(resumed for resumed in memory.resumed if resumed is not never_was)
    return replace(back, drained_at=never_was.drained_at, own_hardware=never_was.own_hardware, resumed=others)


def _standing(memory: SlurmMemory, now: float) -> Lifted | None:
    if not memory.reason:
        return None
    return Lifted(memory.reason, memory.reason, memory.stamp, now, controller=unsaved_by(memory))


def _with_earlier(memory: SlurmMemory, *over: Lifted | None) -> tuple[Lifted, ...]:
    """Return the earlier drains with those that have a time stamp: anyone may write the Reason alone again."""
    return tuple(dict.fromkeys((*memory.earlier, *(old for old in over if old and old.stamp))))[-EARLIER:]


def settled_by_now(memory: SlurmMemory, now: float) -> SlurmMemory:
    """Return the record after a reading: a drain that ended SAVED_SECONDS ago cannot return."""
    if memory.lifted and not memory.lifted.saved and now >= memory.lifted.time + SAVED_SECONDS:
        return replace(memory, lifted=replace(memory.lifted, saved=True))
    return memory


def look_at(memory: SlurmMemory) -> float:
    """Return when to read the node once more because slurmctld may lose a change (epoch seconds); 0 = not again.

    A drain is read again once it is certainly saved, a resume after SAVED_SECONDS.
    """
    if memory.unsaved:
        return memory.unsaved.time + WRITTEN_SECONDS
    return memory.lifted.time + SAVED_SECONDS if memory.lifted and not memory.lifted.saved else 0.0


def remember(memory: SlurmMemory, node: NodeState, boot_id: str, now: float) -> SlurmMemory:
    """Return the record after this reading of the node. Call `is_drain_gone` first."""
    whose, text = owner(node, memory), our_text(node, memory)
    memory = refusal_noted(memory, node)
    if memory.writing and (text == memory.writing or now > memory.written_at + IN_FLIGHT_SECONDS):
        memory = replace(memory, writing="", written_at=0.0)
    if memory.unsaved and now >= memory.unsaved.time + WRITTEN_SECONDS:
        memory = replace(memory, unsaved=None)
    seen = replace(memory, confirmed_at=now, boot_id=boot_id, rebooting=not node.flags.isdisjoint(REBOOT | POWER))
    if whose is Owner.OURS:
        ours = replace(seen, reason=text, overruled="", adopted="", lifted=None, stamp=node.reason_time)
        replaced = _standing(memory, now) if text != memory.reason else None
        return replace(ours, earlier=_with_earlier(memory, memory.lifted, replaced))
    if whose is Owner.FOREIGN_HEALTHD:
        return replace(seen, reason="", overruled="", adopted=node.reason, stamp=0.0)
    if whose is Owner.FOREIGN and stood(memory):
        # they took over the node: a drain of healthd that slurmctld restores is theirs to lift
        return replace(seen, reason="", overruled=node.reason, adopted="", stamp=0.0, earlier=())
    return memory


def never(value: NoReturn) -> NoReturn:
    """Prove to mypy that all cases are handled (typing.assert_never is newer than Python 3.10)."""
    raise AssertionError(f"not handled: {value!r}")
