"""Texts about a repair plan for the status, the log and the command line. All functions are pure.

`document` is the value of "repair" in `healthd status --json` (docs/json.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthd.common.model import RepairMode, RepairStep
from healthd.common.repair_plan import Obstacle, Plan, Reason

Document = Mapping[str, Any]

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
    Reason.MILDER: "may end with {step}, before the power cycle that its runbook names",
    Reason.RELAPSE: "returned within 7 days after an earlier step",
    Reason.CONFIGURED: "has this step in repair.first_step",
    Reason.NOT_ALLOWED: "ends with a step that repair.order does not contain",
    Reason.CAUSE: "ends once its cause is fixed and its check passes",
    Reason.WINDOW: "ends after a time without a repeat, which does not pass on a drained node until it is repaired",
    Reason.PART: "ends once the part is repaired or replaced",
    Reason.EXHAUSTED: "returned within 7 days after the last step",
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
    Obstacle.JOBS: "a job, or the epilog of one, is still on the node",
    Obstacle.POWER: "a reboot or a power change is pending in Slurm",
}
# The requirement behind each obstacle, for `healthd repair --dry-run`.
PROTECTIONS = {
    Obstacle.OBSERVE: "healthd may change Slurm",
    Obstacle.PAUSED: "healthd is not paused",
    Obstacle.SHARED_CAUSE: "no cause is shared with other nodes",
    Obstacle.ACKNOWLEDGED: "no operator has acknowledged a fault here",
    Obstacle.SLURM_UNKNOWN: "the node's state in Slurm is known",
    Obstacle.NOT_DRAINED: "the node is drained",
    Obstacle.FOREIGN_DRAIN: "the drain is healthd's own",
    Obstacle.MAINTENANCE: "no reservation for maintenance",
    Obstacle.DOWN: "the node is not DOWN in Slurm",
    Obstacle.NOT_RESPONDING: "the node responds in Slurm",
    Obstacle.JOBS: "no job on the node",
    Obstacle.POWER: "no reboot or power change is pending",
}

_IN_SLURM = (
    *(Obstacle.SLURM_UNKNOWN, Obstacle.NOT_DRAINED, Obstacle.FOREIGN_DRAIN, Obstacle.MAINTENANCE),
    *(Obstacle.DOWN, Obstacle.NOT_RESPONDING, Obstacle.JOBS, Obstacle.POWER),
)


def repair_json(plan: Plan | None, mode: RepairMode) -> dict[str, Any] | None:
    """Return the document for the plan, or None if repair is off."""
    if mode is RepairMode.OFF:
        return None
    return {
        "mode": mode.value,
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
    yield document["text"]
    if document["step"] == RepairStep.PERSON.value:
        return
    for obstacle in document["obstacles"]:
        yield f"not now: {obstacle['text']}"
    yield f"if that fails: {STEP_NAMES[RepairStep(document['next'])]}"


def requirement_rows(document: Document, found: Iterable[Document]) -> list[tuple[str, str]]:
    """Return (requirement, state) for `healthd repair --dry-run`: those that the daemon checks, and those in `found`.

    The state is "yes", "unknown", or "no" with the reason.
    """
    present = {obstacle["obstacle"]: obstacle["text"] for obstacle in document["obstacles"]}
    is_unread = not present.keys().isdisjoint((Obstacle.OBSERVE.value, Obstacle.SLURM_UNKNOWN.value))

    def state(obstacle: Obstacle) -> str:
        if obstacle.value in present:
            return f"no: {present[obstacle.value]}"
        return "unknown" if is_unread and obstacle in _IN_SLURM else "yes"

    rows = [(text, state(obstacle)) for obstacle, text in PROTECTIONS.items()]
    states = {True: "yes", False: "no", None: "unknown"}
    return rows + [(r["text"], f"{states[r['met']]}: {r['problem']}".removesuffix(": ")) for r in found]
