"""What to do with this node in Slurm: pure. reconcile.py does it.

want                 whose drain stands now      decision in mode "act"
-------------------  --------------------------  ------------------------------------------------------------
(node not read)      ?                           Leave: nothing is sent blindly
causes               nobody's                    Drain; requeue if a cause is CRITICAL
causes               "Prolog error", since our   the same, in our words: nobody but we decided that drain
                     own prolog refused a job
none, may_resume     the same                    Resume
causes               ours                        keep it (new text only for another worst cause); requeue if
                                                 CRITICAL, also when it became so later
causes, CRITICAL     an operator's, Slurm's,     text and drain stay untouched; requeue the victims
                     an unknown healthd's
causes, no CRITICAL  the same                    Leave
none, may_resume     ours                        Resume, unless DOWN, INVALID_REG, going off or on, or a reboot is
                                                 pending: then Leave. The drain stays beside it and is lifted
                                                 when that is over (UNDRAIN keeps DOWN, with our reason)
none, may_resume     ours, and it flaps          Leave: for a while, or until a person resumes it (flapping.py)
none, not yet        ours                        Leave: a check that can drain has not completed clean, or what is to
                                                 be run before the resume has not ended
none                 nobody's, another's         Leave

mode "drain": no requeue. mode "observe" or paused: Leave, and `would` says what. A node that a person set DOWN
or FAIL is theirs like a drain: draining it would replace their reason.

our drain is gone    this machine booted since, a reboot was pending, Slurm switches the node off, slurmctld
                     started since, another slurmctld answers before the drain was saved, or our own resume was on its
                     way: lost, drain again where a cause stands
                     else an operator resumed the node: causes are acknowledged, not drained for again
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

# Munge's credentials live 300 s: a command that a stopped slurmctld has not yet looked at is refused after that.
IN_FLIGHT_SECONDS = 600.0
HELD_SECONDS = 60.0  # slurmctld saves a drain after a few seconds; until then it can lose it
CLOCK_SKEW_SECONDS = 2.0  # between this node and slurmctld, whose own time stamps have whole seconds
# From our prolog's refusal to Slurm's time stamp of "Prolog error": the way of one message, tried again for up to
# MessageTimeout (10 s by default). Before it: the clocks, also where a note has only the last of some refusals.
REFUSAL_HEARD_SECONDS, REFUSAL_SKEW_SECONDS = 15.0, 5.0
# slurmctld saves a node some 5 s after it changed: if it is killed before, a drain that is over comes back.
SAVED_SECONDS = 60.0
# slurmctld writes a changed node to StateSaveLocation after at most 5 s (src/slurmctld/state_save.c: SAVE_MAX_WAIT).
# The rest is for a busy slurmctld and a slow file system.
WRITTEN_SECONDS = 15.0
# The controller of a change that was sent while `scontrol show config` failed. It is equal to no other.
UNKNOWN_CONTROLLER = "unknown"
EARLIER = 8  # a controller's older state is seconds old, or as old as a backup of it


class Policy(Value, frozen=True):
    """paused_until: epoch seconds, 0 = not paused.

    command_timeout_seconds  a Slurm command's own deadline, above MessageTimeout (10 s by default): slurmctld that
                           hangs is reported by scontrol after that, black holes after three times that
    requeue_retry_seconds  how long an unconfirmed requeue may still be under way (a killed daemon's scontrol, a
                           slurmctld that was stopped): until then no other is sent for that run of the job
    max_restarts           a job that was restarted this often is requeued held: a person looks at it first
    admin_comment          whether the AdminComment of jobs that a CRITICAL fault hit says so
    flapping               when the resume of a drain that comes back again and again waits
    fleet                  how many nodes healthd may hold drained
    requeue                which jobs a CRITICAL fault requeues (affected_jobs.py)
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
    """Whose drain stands on the node."""

    NOBODY = "none"
    OURS = "healthd"
    FOREIGN_HEALTHD = "unrecorded_healthd"  # our form of words, but this ledger does not know them
    FOREIGN = "other"  # an operator's, or Slurm's own


def our_text(node: NodeState, memory: SlurmMemory) -> str:
    """Our text that stands on the node, as we wrote it; "" if none does."""
    found = without_appended(node.reason)
    if memory.writing and found == memory.writing:
        return memory.writing
    # no words at all: 22.05 drops them when it switches the node on; a person cannot drain without
    replaced = not found or replaces_drain_reason(found)
    if memory.reason and (found == memory.reason or replaced):
        return memory.reason
    return ""


def is_left_over(node: NodeState, memory: SlurmMemory) -> bool:
    """Whether the reason is left from a drain of ours that is over: 24.11 keeps it, also under Slurm's next drain."""
    return memory.lifted is not None and _stands_as(node, memory.lifted)


def brought_back(node: NodeState, memory: SlurmMemory) -> Lifted | None:
    """Our drain that is over and may stand again, because slurmctld came back from a state before that."""
    if node.flags.isdisjoint(TAKEN) or our_text(node, memory):
        return None
    last = (memory.lifted,) if memory.lifted and not memory.lifted.saved else ()
    return next((old for old in (*last, *reversed(memory.earlier)) if _stands_as(node, old)), None)


def _stands_as(node: NodeState, old: Lifted) -> bool:
    return without_appended(node.reason) == old.words and old.stamp in (0.0, node.reason_time)


def refused_here(node: NodeState, refusals: Sequence[float], memory: SlurmMemory) -> NodeState:
    """The node, marked where Slurm drained it because our prolog refused a job. `refusals`: when it did, epoch seconds.
    Slurm hears of each within seconds, and keeps the time of the first. One from before the end of our last drain was
    answered by that drain: what fails later is another prolog."""
    over = memory.lifted.time if memory.lifted else 0.0
    is_it = node.reason_time == memory.refused or any(
        -REFUSAL_SKEW_SECONDS <= node.reason_time - at <= REFUSAL_HEARD_SECONDS and at >= over - REFUSAL_SKEW_SECONDS
        for at in refusals
    )
    drained = node.reason == PROLOG_ERROR and "DRAIN" in node.flags and node.reason_time > 0
    return replace(node, refused_here=drained and is_it)


def refusal_noted(memory: SlurmMemory, node: NodeState) -> SlurmMemory:
    """The memory after this reading of the node: whether a drain stands that only our prolog's refusal made."""
    return replace(memory, refused=node.reason_time if node.refused_here else 0.0)


def owner(node: NodeState, memory: SlurmMemory) -> Owner:
    if node.refused_here:
        return Owner.NOBODY
    if node.flags.isdisjoint(TAKEN):
        # appended words are younger: Slurm itself set it DOWN, and 24.11 keeps the reason of a drain that is over
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
    """Whether no job is on this node and none will come: drained, and the last epilog is over."""
    return {"IDLE", "DRAIN"} <= node.flags and node.flags.isdisjoint({"COMPLETING"} | UNSETTLED)


def decide(verdict: Verdict, node: NodeState | None, memory: SlurmMemory, policy: Policy, now: float) -> Decision:
    """The table above."""
    if node is None:
        # Say what is wanted all the same, as if nobody held the node: the controller is away, not the fault.
        wanted = _decide_to_act(verdict, NodeState("", frozenset({"UNKNOWN"})), memory, policy, now)
        would = "" if isinstance(wanted, Leave) else describe(wanted)
        return Leave("the node's state in Slurm is not known", would)
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
            return Leave(f"drained by us until {verdict.before_resume}")
        if not verdict.may_resume:
            return Leave("drained by us until every check that can drain has completed clean")
        if waits_for := sorted(node.flags & NOT_TO_RESUME):
            return Leave(f"repaired, but Slurm has the node {'+'.join(waits_for)}")
        if waits := why_waits(memory, policy.flapping, now):
            return Leave(waits)
        return Resume("every check that can drain has completed clean")
    if whose is Owner.NOBODY and node.refused_here:
        if not verdict.may_resume or node.flags & NOT_TO_RESUME:
            return Leave(
                "our prolog refused a job, and Slurm drained the node; not every check has completed clean since"
            )
        return Resume("our prolog refused a job, and Slurm drained the node for that; every check has completed clean")
    if whose is Owner.NOBODY:
        return Leave("nothing to do")
    if whose is Owner.FOREIGN or whose is Owner.FOREIGN_HEALTHD:
        return Leave(held_by(node, memory))
    never(whose)


def held_by(node: NodeState, memory: SlurmMemory, causes: Sequence[Condition] = ()) -> str:
    if is_left_over(node, memory):
        return "Slurm holds the node, under the words of our drain that is over"
    fault = f"; what healthd found: {reason(causes)}" if causes and node.reason == PROLOG_ERROR else ""
    return f'{node.reason_user or "somebody"} holds the node: "{node.reason}"{fault}'


def describe(decision: Decision) -> str:
    """A decision in words: 'drain with "healthd: ..." and requeue'."""
    if isinstance(decision, Drain):
        return f'drain with "{decision.reason}"{" and requeue" if decision.requeue else ""}'
    if isinstance(decision, Resume):
        return "resume"
    if isinstance(decision, Leave):
        return decision.why
    never(decision)


def is_quiet(verdict: Verdict, memory: SlurmMemory) -> bool:
    """Whether Slurm need not be asked at all: no drain is wanted, and none stands that concerns us."""
    return not (verdict.causes or memory.writing or memory.refused or stood(memory))


# memory


def stood(memory: SlurmMemory) -> str:
    """The words of the drain that concerned us at the last reading, "" = none."""
    return memory.reason or memory.overruled or memory.adopted


def held_from(node: NodeState | None, memory: SlurmMemory, boot_id: str) -> float:
    """Epoch seconds. From then on Slurm surely holds the node by itself: a drain has stood for a while, in this boot,
    and slurmd is registered. A job that starts later was let in by a person who resumed the node. If the prolog
    refused it, it would be held and the node drained for "Prolog error", which nobody resumes.
    """
    if node is None or not node.reason_time or not stood(memory) or memory.boot_id != boot_id:
        return float("inf")
    stands = "DRAIN" in node.flags and node.flags.isdisjoint(UNSETTLED)
    return node.reason_time + HELD_SECONDS if stands else float("inf")


def is_gone(node: NodeState, memory: SlurmMemory) -> bool:
    """Whether a drain for our fault stood at the last reading, and none stands now."""
    return bool(stood(memory)) and owner(node, memory) is Owner.NOBODY


def is_lost_for_sure(node: NodeState, memory: SlurmMemory, boot_id: str, policy: Policy, now: float) -> bool:
    """Whether a drain that is gone was surely not lifted by an operator; if not sure, slurmctld's start tells."""
    going = memory.rebooting or not node.flags.isdisjoint(POWER)
    return boot_id != memory.boot_id or going or is_resume_under_way(memory, policy, now)


def is_resume_under_way(memory: SlurmMemory, policy: Policy, now: float) -> bool:
    """Whether a resume of ours, whose answer was lost, may have ended the drain that is gone."""
    since = memory.resumed_at
    return since > 0 and (since >= memory.confirmed_at or now < since + policy.requeue_retry_seconds)


def is_lost_by_slurmctld(since: float, started: float, before: str, now: str) -> bool:
    """Return True if slurmctld may have lost a change that it confirmed at `since`.

    slurmctld answers first and saves a few seconds later. A slurmctld that `started` after the change has read an older
    state, if the other was killed in between. So has a backup that took over, although it started days ago: then the
    controller that answers `now` is not the one from right `before` the change ("" = the change is saved).
    UNKNOWN_CONTROLLER counts as another one: a broken node that stays drained, or is drained again after a person
    resumed it within seconds, is the smaller harm than one that goes back to work.
    """
    return started >= since - CLOCK_SKEW_SECONDS or (before != "" and before != now)


def forget(memory: SlurmMemory, node: NodeState, now: float) -> SlurmMemory:
    """We hold no drain any more (a drain that is under way, and what was requeued, stays known). A resume of ours has
    worked by now: it can end no later drain. `node`: the last reading that had our words, if there is one."""
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
    """This drain of ours that was over stands again, and the one that came after it does not."""
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
    """Only with its time stamp: our words alone anybody may write again."""
    return tuple(dict.fromkeys((*memory.earlier, *(old for old in over if old and old.stamp))))[-EARLIER:]


def settled_by_now(memory: SlurmMemory, now: float) -> SlurmMemory:
    """After a reading of the node: a drain that has been over for SAVED_SECONDS is over for good."""
    if memory.lifted and not memory.lifted.saved and now >= memory.lifted.time + SAVED_SECONDS:
        return replace(memory, lifted=replace(memory.lifted, saved=True))
    return memory


def look_at(memory: SlurmMemory) -> float:
    """Return when to read the node once more because slurmctld may lose a change (epoch seconds); 0 = not again.

    A drain is read again once it is surely saved, a resume after SAVED_SECONDS.
    """
    if memory.unsaved:
        return memory.unsaved.time + WRITTEN_SECONDS
    return memory.lifted.time + SAVED_SECONDS if memory.lifted and not memory.lifted.saved else 0.0


def remember(memory: SlurmMemory, node: NodeState, boot_id: str, now: float) -> SlurmMemory:
    """The memory after this reading of the node; `is_gone` must have been asked before."""
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
        # they took the node over: what slurmctld brings back of ours is theirs to lift
        return replace(seen, reason="", overruled=node.reason, adopted="", stamp=0.0, earlier=())
    return memory


def never(value: NoReturn) -> NoReturn:
    """mypy proves that no case is left out (typing.assert_never is newer than Python 3.10)."""
    raise AssertionError(f"not handled: {value!r}")
