"""Texts about a repair plan for the status, the log and the command line. All functions are pure.

`document` is the value of "repair" in `healthd status --json` (docs/json.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthd.agent.settings.config import RepairConfig
from healthd.common.model import ClaimHold, RepairMode, RepairStep
from healthd.common.page import date
from healthd.common.repair_plan import Attempt, AttemptStage, Obstacle, Plan, Reason, RepairRecord

Document = Mapping[str, Any]

BOOTS = (RepairStep.REBOOT, RepairStep.POWER_CYCLE)
STEP_NAMES = {
    RepairStep.GPU_RESET: "a GPU reset",
    RepairStep.REBOOT: "a reboot",
    RepairStep.POWER_CYCLE: "a power cycle",
    RepairStep.PERSON: "a person",
}
_STEP_VERBS = {
    RepairStep.REBOOT: "reboot",
    RepairStep.POWER_CYCLE: "power cycle the node",
    RepairStep.PERSON: "a person must act",
}
_REASON_TEXTS = {
    Reason.REMEDY: "ends with {step}",
    Reason.MILDER: "may end with {step}, which comes before the power cycle that its runbook names",
    Reason.RELAPSE: "returned within 7 days after an earlier step",
    Reason.CONFIGURED: "has this step in repair.first_step",
    Reason.NOT_ALLOWED: "ends with a step that repair.order does not contain",
    Reason.CAUSE: "ends once its cause is fixed and its check passes",
    Reason.WINDOW: "ends after a time without a repeat, which does not pass before the fault is repaired",
    Reason.PART: "ends once the part is repaired or replaced",
    Reason.FAILED: "did not end with the previous step",
    Reason.EXHAUSTED: "did not end with the last step, or returned within 7 days after it",
}
OBSTACLE_TEXTS = {
    Obstacle.OBSERVE: 'mode = "observe", so healthd does not drain this node',
    Obstacle.PAUSED: "healthd is paused",
    Obstacle.SHARED_CAUSE: "a cause of the drain may be outside this node",
    Obstacle.ACKNOWLEDGED: "an operator has acknowledged a fault on this node",
    Obstacle.SLURM_UNKNOWN: "the node's state in Slurm is unknown",
    Obstacle.NOT_DRAINED: "healthd's drain is not in force yet",
    Obstacle.FOREIGN_DRAIN: "the drain is not healthd's",
    Obstacle.MAINTENANCE: "the node is reserved for maintenance",
    Obstacle.DOWN: "the node is DOWN in Slurm, so a job may still run here unobserved",
    Obstacle.NOT_RESPONDING: "the node does not respond in Slurm, so its jobs are not known",
    Obstacle.JOBS: "a job or its epilog is still on the node",
    Obstacle.POWER: "a reboot or a power change is pending in Slurm",
    Obstacle.EVIDENCE: "the evidence of the fault is not saved yet",
    Obstacle.JOURNAL: "the journal of repair steps has not been read",
    Obstacle.PROGRAM: "healthd-repair does not serve requests",
    Obstacle.STATE_DIR: "not known yet whether state_dir survives a reboot: reboot this node once by hand",
    Obstacle.BEFORE_ACT: 'healthd drained the node before repair.mode = "act" was set',
    Obstacle.STOPPED: "an operator has stopped the repair of this drain",
    Obstacle.TRIED: "this step was taken for the same fault in the last 24 hours",
    Obstacle.RETRY: "the last try was refused; the next one follows within 15 minutes",
}
# The requirement behind each obstacle, for `healthd repair --dry-run`.
PROTECTIONS = {
    Obstacle.OBSERVE: 'mode is not "observe"',
    Obstacle.PAUSED: "healthd is not paused",
    Obstacle.SHARED_CAUSE: "every cause of the drain is on this node",
    Obstacle.ACKNOWLEDGED: "no operator has acknowledged a fault here",
    Obstacle.SLURM_UNKNOWN: "the node's state in Slurm is known",
    Obstacle.NOT_DRAINED: "the node is drained",
    Obstacle.FOREIGN_DRAIN: "the drain is healthd's own",
    Obstacle.MAINTENANCE: "the node is not reserved for maintenance",
    Obstacle.DOWN: "the node is not DOWN in Slurm",
    Obstacle.NOT_RESPONDING: "the node responds in Slurm",
    Obstacle.JOBS: "no job or epilog is on the node",
    Obstacle.POWER: "no reboot or power change is pending",
}
ACT_PROTECTIONS = {
    Obstacle.EVIDENCE: "the evidence of the fault is saved",
    Obstacle.JOURNAL: "the journal of repair steps can be read",
    Obstacle.PROGRAM: "healthd-repair serves requests",
    Obstacle.STATE_DIR: "state_dir survives a reboot",
    Obstacle.BEFORE_ACT: 'repair.mode was "act" when healthd drained the node',
    Obstacle.STOPPED: "no operator has stopped the repair",
    Obstacle.TRIED: "this step was not taken for the same fault in the last 24 hours",
    Obstacle.RETRY: "no try was refused in the last minutes",
}
# Obstacles of mode "act" that do not stop a step that an operator has ordered.
SKIPPED_BY_ORDER = (Obstacle.BEFORE_ACT, Obstacle.EVIDENCE, Obstacle.TRIED)
_STAGE_TEXTS = {
    AttemptStage.CLAIM: "claims {step} in Slurm",
    AttemptStage.STEP: "takes the step: {step}",
    AttemptStage.VERIFY: "verifies {step}: all checks and a validation run",
}

_IN_SLURM = (
    *(Obstacle.SLURM_UNKNOWN, Obstacle.NOT_DRAINED, Obstacle.FOREIGN_DRAIN, Obstacle.MAINTENANCE),
    *(Obstacle.DOWN, Obstacle.NOT_RESPONDING, Obstacle.JOBS, Obstacle.POWER),
)


def deadline(record: RepairRecord, config: RepairConfig) -> float:
    """Return the time by which the stage should have ended (epoch seconds), or 0 for a claim, which has no deadline."""
    attempt = record.attempt
    if attempt is None or attempt.stage is AttemptStage.CLAIM:
        return 0.0
    if attempt.stage is AttemptStage.VERIFY:
        return record.verify_since + config.verify_timeout_seconds
    return attempt.since + (config.boot_timeout_seconds if attempt.step in BOOTS else 2 * config.reset_timeout_seconds)


def repair_json(record: RepairRecord, config: RepairConfig, hold: ClaimHold | None) -> dict[str, Any] | None:
    """Return the document for the repair of this node, or None if repair is off. `hold` is set while a claim waits."""
    if config.mode is RepairMode.OFF:
        return None
    plan, attempt = record.plan, record.attempt
    return {
        "mode": config.mode.value,
        "attempt": _attempt_json(attempt, deadline(record, config), hold) if attempt else None,
        "failed": [
            {
                "step": failed.step.value,
                "at": failed.at,
                "causes": list(failed.causes),
                "why": failed.why,
                "was_taken": failed.was_taken,
            }
            for failed in record.failed
        ],
        "has_given_up": record.has_given_up,
        "refused": record.refused,
        "retry_at": record.retry_at or None,
        "stopped_by": record.stopped_by or None,
        "ordered_by": record.ordered_by or None,
        "step": plan.step.value if plan else None,
        "next": plan.next.value if plan else None,
        "text": plan_text(plan) if plan else "",
        "causes": [
            {"code": c.code, "subject": c.subject, "step": c.step.value, "reason": c.reason.value}
            for c in (plan.causes if plan else ())
        ],
        "parts": list(plan.parts) if plan else [],
        "obstacles": [
            {"obstacle": obstacle.value, "text": OBSTACLE_TEXTS[obstacle]}
            for obstacle in (plan.obstacles if plan else ())
        ],
    }


def _attempt_json(attempt: Attempt, end: float, hold: ClaimHold | None) -> dict[str, Any]:
    return {
        "id": attempt.id,
        "step": attempt.step.value,
        "stage": attempt.stage.value,
        "since": attempt.since,
        "deadline": end or None,
        "causes": list(attempt.causes),
        "parts": list(attempt.parts),
        "waits": hold.problem if hold and attempt.stage is AttemptStage.CLAIM else "",
    }


def plan_text(plan: Plan) -> str:
    """Return the plan as one sentence, such as "reset GPU 0000:1b:00.0: gpu_xid/119 ends with a GPU reset"."""
    first = plan.causes[0]
    more = len([c for c in plan.causes if c.step is plan.step]) - 1
    others = f" (and {more} more)" if more else ""
    reason = _REASON_TEXTS[first.reason].format(step=STEP_NAMES[first.step])
    cause = first.code if plan.parts == (first.subject,) else f"{first.code} {first.subject}".strip()
    return f"{_step_text(plan)}: {cause}{others} {reason}"


def _step_text(plan: Plan) -> str:
    if plan.step is not RepairStep.GPU_RESET:
        return _STEP_VERBS[plan.step]
    if not plan.parts:
        return "reset all GPUs"
    return f"reset GPU{'s' if len(plan.parts) > 1 else ''} {', '.join(plan.parts)}"


def status_lines(document: Document) -> Iterator[str]:
    """Yield the sentences for `healthd status`: the step, its obstacles, and the step after it."""
    attempt = document["attempt"]
    if attempt is not None:
        step = STEP_NAMES[RepairStep(attempt["step"])]
        until = f", expected to end by {date(attempt['deadline'])}" if attempt["deadline"] else ""
        yield f"healthd {_STAGE_TEXTS[AttemptStage(attempt['stage'])].format(step=step)}{until}"
        if attempt["waits"]:
            yield f"the claim waits: {attempt['waits']}"
    for failed in document["failed"]:
        end = "has failed" if failed["was_taken"] else "could not be taken"
        yield f"{STEP_NAMES[RepairStep(failed['step'])]} {end}: {failed['why']}"
    if document["has_given_up"]:
        yield "healthd takes no further step: a person must act"
    if is_step_begun(document):
        return  # the planned step is the one in progress, or it is due only if this one fails
    if document["text"]:
        yield document["text"]
    if document["refused"]:
        yield f"the last try was refused: {document['refused']}"
    if document["step"] in (None, RepairStep.PERSON.value):
        return
    for obstacle in document["obstacles"]:
        yield f"not now: {obstacle['text']}"
    yield f"if that fails: {STEP_NAMES[RepairStep(document['next'])]}"


def is_step_begun(document: Document) -> bool:
    """Return True while a step is being taken or verified."""
    attempt = document["attempt"]
    return attempt is not None and attempt["stage"] != AttemptStage.CLAIM.value


def requirement_rows(document: Document, found: Iterable[Document]) -> list[tuple[str, str]]:
    """Return rows (requirement, state) for `healthd repair --dry-run`: the daemon's own requirements, then `found`.

    The state is "yes", "unknown", or "no" with the reason.
    """
    present = {obstacle["obstacle"]: obstacle["text"] for obstacle in document["obstacles"]}
    is_unread = not present.keys().isdisjoint((Obstacle.OBSERVE.value, Obstacle.SLURM_UNKNOWN.value))

    def state(obstacle: Obstacle) -> str:
        if obstacle.value in present:
            return f"no: {present[obstacle.value]}"
        return "unknown" if is_unread and obstacle in _IN_SLURM else "yes"

    is_ordered = bool(document["ordered_by"])
    acts = is_ordered or document["mode"] == RepairMode.ACT.value
    protections = PROTECTIONS | ACT_PROTECTIONS if acts else PROTECTIONS
    needed = [obstacle for obstacle in protections if not (is_ordered and obstacle in SKIPPED_BY_ORDER)]
    rows = [(protections[obstacle], state(obstacle)) for obstacle in needed]
    states = {True: "yes", False: "no", None: "unknown"}
    return rows + [(r["text"], f"{states[r['met']]}: {r['problem']}".removesuffix(": ")) for r in found]
