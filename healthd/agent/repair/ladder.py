"""The repair ladder: a GPU reset, a reboot, a power cycle, a person. All functions are pure.

    what ends the fault          first step
    ---------------------------  -------------------------------------------------
    a GPU reset                  GPU reset
    a reboot or a power cycle    reboot (a power cycle only after a reboot)
    `healthd repaired`           a person, unless the fault waits for an operator only because it returned
    clean runs of its check      a person, who must fix the cause
    time without a repeat        a person, because the time does not pass on a drained node; no step if the fault has
                                 been repaired or its cause is shared, because then the time passes

If a step of this drain did not end a fault, or the fault returned within RELAPSE_SECONDS after a step, the next step is
due. The node needs the highest step of its causes. A person is the highest step only if a part is broken, or if a fault
is still there, or has returned, after the last step. If a person must only fix a cause outside the hardware, the step
for the other causes may come first. A step that is not in the site's order is replaced by the next one that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from healthd.agent.reporting.endings import condition_remedy
from healthd.common.model import LADDER, Clears, Condition, Ending, Remedy, RepairStep
from healthd.common.repair_plan import CauseStep, FailedStep, Plan, Reason
from healthd.common.text import regex

# A week, the same as for faults that return after a reboot (agent/conditions/absorb.py).
RELAPSE_SECONDS = 7 * 86400.0
PCI = regex(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


# A fault ends with any later step too: a reboot also resets the GPUs.
_MACHINE_STEPS = {
    Remedy.GPU_RESET: RepairStep.GPU_RESET,
    Remedy.REBOOT: RepairStep.REBOOT,
    Remedy.POWER_CYCLE: RepairStep.REBOOT,
}
_ENDING_STEPS = {Ending.RESET: RepairStep.GPU_RESET, Ending.REBOOT: RepairStep.REBOOT}
_RELAPSE_REMEDIES = {Clears.GPU_RESET: Remedy.GPU_RESET, Clears.REBOOT: Remedy.REBOOT}


def plan(
    causes: Sequence[Condition],
    cleared: Sequence[Condition],
    remedies: Mapping[str, Remedy],
    order: Sequence[RepairStep],
    first_steps: Mapping[str, RepairStep],
    failed: Sequence[FailedStep] = (),
) -> Plan | None:
    """Return the plan for a node with these causes (worst first), or None if no cause needs a step.

    Args:
        cleared: conditions that ended in the last weeks.
        remedies: for each code, the remedy that its check declares.
        order: the steps that this site allows, in the order of LADDER.
        first_steps: for each code, the site's first step.
        failed: steps of this drain that did not end their causes.
    """
    needed = [
        found for c in causes if (found := cause_step(c, cleared, remedies, order, first_steps, failed)) is not None
    ]
    if not needed:
        return None
    step = _node_step([(cause.step, cause.reason) for cause in needed])
    decisive_first = sorted(needed, key=lambda cause: cause.step is not step)
    parts = tuple(dict.fromkeys(cause.subject for cause in needed if cause.step is RepairStep.GPU_RESET))
    is_named = step is RepairStep.GPU_RESET and all(map(PCI.fullmatch, parts))
    return Plan(step, step_after(step, order), tuple(decisive_first), parts if is_named else ())


def _node_step(needed: Sequence[tuple[RepairStep, Reason]]) -> RepairStep:
    """Return the node's step: the highest. A person who must only fix a cause outside the hardware does not count."""
    certain = [step for step, reason in needed if reason not in (Reason.CAUSE, Reason.WINDOW)]
    return max(certain, key=LADDER.index) if certain else RepairStep.PERSON


def cause_step(
    cause: Condition,
    cleared: Sequence[Condition],
    remedies: Mapping[str, Remedy],
    order: Sequence[RepairStep],
    first_steps: Mapping[str, RepairStep],
    failed: Sequence[FailedStep] = (),
) -> CauseStep | None:
    """Return the step that this cause needs, or None if the fault ends by itself on a drained node."""
    began = cause.opened_at or cause.first_seen
    # A fault that returns during the boot is older than the daemon, which ends the earlier condition when it starts.
    earlier = [c for c in cleared if c.key == cause.key and not c.observed and began - c.cleared_at < RELAPSE_SECONDS]
    remedy = _remedy(cause, earlier, remedies)
    configured = first_steps.get(cause.code)
    if remedy is Remedy.REPAIRED:
        return CauseStep(cause.code, cause.subject, RepairStep.PERSON, Reason.PART)
    if remedy in _MACHINE_STEPS:
        first = _MACHINE_STEPS[remedy]
        reason = Reason.MILDER if remedy is Remedy.POWER_CYCLE else Reason.REMEDY
        if configured is not None and LADDER.index(configured) > LADDER.index(first):  # a lower step has no effect
            first, reason = configured, Reason.CONFIGURED
    elif configured is not None:
        first, reason = configured, Reason.CONFIGURED
    elif remedy is Remedy.CHECK:
        return CauseStep(cause.code, cause.subject, RepairStep.PERSON, Reason.CAUSE)
    elif cause.shared_cause or cause.repaired:
        return None
    else:
        return CauseStep(cause.code, cause.subject, RepairStep.PERSON, Reason.WINDOW)
    step = first if first in order or first is RepairStep.PERSON else step_after(first, order)
    if step is not first:
        reason = Reason.NOT_ALLOWED
    unsuccessful = [f for f in failed if cause_text(cause.code, cause.subject) in f.causes]
    if unsuccessful:
        last = max(unsuccessful, key=lambda f: LADDER.index(f.step))
        after_failed = step_after(last.step, order)
        if after_failed is RepairStep.POWER_CYCLE and not last.was_taken:  # the node has not been rebooted
            after_failed = RepairStep.PERSON
        if LADDER.index(after_failed) > LADDER.index(step):
            step, reason = after_failed, Reason.EXHAUSTED if after_failed is RepairStep.PERSON else Reason.FAILED
    tried = [_ENDING_STEPS[c.ending] for c in earlier if c.ending in _ENDING_STEPS]
    if tried:
        after_tried = step_after(max(tried, key=LADDER.index), order)
        if cause.clears is Clears.OPERATOR and cause.repaired:  # a boot has followed, and has not ended the fault
            after_tried = step_after(after_tried, order)
        if LADDER.index(after_tried) > LADDER.index(step):
            step, reason = after_tried, Reason.EXHAUSTED if after_tried is RepairStep.PERSON else Reason.RELAPSE
    return CauseStep(cause.code, cause.subject, step, reason)


def cause_text(code: str, subject: str) -> str:
    """Return the name of a fault in attempts, the journal and events: "CODE PART"."""
    return f"{code} {subject}".strip()


def _remedy(cause: Condition, earlier: Iterable[Condition], remedies: Mapping[str, Remedy]) -> Remedy:
    """Return the cause's remedy. A fault that waits for an operator only because it returned keeps its remedy."""
    if cause.clears is Clears.OPERATOR:
        before = [c for c in earlier if c.ending in _ENDING_STEPS and c.clears in _RELAPSE_REMEDIES]
        if before:
            return _RELAPSE_REMEDIES[max(before, key=lambda c: c.cleared_at).clears]
    declared = remedies[cause.code].value if cause.code in remedies else ""
    return Remedy(condition_remedy(cause.clears.value, cause.severity.name.lower(), declared))


def step_after(step: RepairStep, order: Sequence[RepairStep]) -> RepairStep:
    """Return the next allowed step after `step`. After the last one, a person must act."""
    later = LADDER[LADDER.index(step) + 1 :]
    return next((candidate for candidate in later if candidate in order), RepairStep.PERSON)
