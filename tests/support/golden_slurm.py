"""Golden decisions on Slurm alone: the decision for each drain owner and mode, and the jobs that a fault affects."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fakes import NOW
from life import FEWER, GONE, Node
from msgspec.structs import replace

from healthd.agent.slurm.affected_jobs import FaultReach, JobGpus, is_certain_hit, is_hit
from healthd.agent.slurm.policy import Policy, decide
from healthd.common.model import Decision, Drain, DrainRecord, Leave, Mode, NodeState, Resume, Verdict

OURS = "healthd: gpu_count/missing 0000:1b:00.0: gone"
OTHERS = "healthd: ib_link/down mlx5_0/1: down"
THIS, OTHER = "0000:1b:00.0", "0000:43:00.0"

MEMORY = DrainRecord(reason=OURS, confirmed_at=NOW - 60, boot_id="b1")
NODES: dict[str, tuple[NodeState | None, DrainRecord]] = {
    "not read": (None, MEMORY),
    "in service": (NodeState("n1", frozenset({"ALLOCATED"})), DrainRecord()),
    "down": (NodeState("n1", frozenset({"DOWN"}), "Not responding"), DrainRecord()),
    "down by a person": (NodeState("n1", frozenset({"DOWN"}), "fan", "joe"), DrainRecord()),
    "drained by a person": (NodeState("n1", frozenset({"IDLE", "DRAIN"}), "fan", "joe"), DrainRecord()),
    "drained by Slurm": (NodeState("n1", frozenset({"IDLE", "DRAIN"}), "Kill task failed"), DrainRecord()),
    "drained by a refusal": (
        NodeState("n1", frozenset({"IDLE", "DRAIN"}), "Prolog error", drained_by_own_prolog=True),
        DrainRecord(),
    ),
    "drained by another healthd": (NodeState("n1", frozenset({"IDLE", "DRAIN"}), OTHERS), DrainRecord()),
    "drained by us": (NodeState("n1", frozenset({"IDLE", "DRAIN"}), OURS), MEMORY),
    "drained by us, overruled": (NodeState("n1", frozenset({"IDLE", "DRAIN"}), "fan", "joe"), MEMORY),
    **{
        f"drained by us, {flag}": (NodeState("n1", frozenset({"IDLE", "DRAIN", flag}), OURS), MEMORY)
        for flag in ("DOWN", "INVALID_REG", "REBOOT_ISSUED", "POWERING_DOWN", "MAINTENANCE", "COMPLETING")
    },
}


def verdicts() -> dict[str, Verdict]:
    clean = Node().run(check="gpu_count").judge()
    return {
        "clean": replace(clean, may_resume=True),
        "clean, may not resume": replace(clean, may_resume=False),
        "clean, a program first": replace(clean, may_resume=True, before_resume="x"),
        "degraded": Node().run(FEWER).judge(),
        "critical": Node().run(GONE).judge(),
    }


def decision_text(decision: Decision) -> str:
    if isinstance(decision, Drain):
        reason_source = (
            "same words"
            if decision.reason in (OURS, OTHERS, "fan", "Kill task failed", "Prolog error")
            else "new words"
        )
        return f"drain, {reason_source}{', requeue' if decision.requeue else ''}"
    if isinstance(decision, Resume):
        return "resume"
    assert isinstance(decision, Leave)
    return "leave, would act" if decision.would else "leave"


def policies() -> Iterator[str]:
    """Yield the decision in each mode, for each verdict and each owner of the current drain."""
    policies = {mode.value: Policy(mode) for mode in Mode} | {"paused": Policy(Mode.ACT, paused_until=NOW + 60)}
    for (verdict_name, verdict), (owner, (node, memory)) in product(verdicts().items(), NODES.items()):
        decisions = (
            f"{name}: {decision_text(decide(verdict, node, memory, policy, NOW))}" for name, policy in policies.items()
        )
        yield f"{verdict_name}; {owner}; {'; '.join(decisions)}"


JOBS = {
    "nothing known": JobGpus(),
    "no GPU": JobGpus(False, frozenset(), is_complete=True),
    "no GPU, processes not seen": JobGpus(False, frozenset()),
    "no GPU, has one open": JobGpus(False, frozenset(), frozenset({OTHER}), True),
    "the GPU": JobGpus(True, frozenset({THIS}), frozenset({THIS}), True),
    "another": JobGpus(True, frozenset({OTHER}), frozenset({OTHER}), True),
    "another, has the GPU open": JobGpus(True, frozenset({OTHER}), frozenset({THIS}), True),
    "some": JobGpus(True),
}
FAULTS = {"of the host": FaultReach(all_jobs=True), "of all GPUs": FaultReach(), "of the GPU": FaultReach(pci=THIS)}


def affected_jobs() -> Iterator[str]:
    for (fault, reach), (job, job_gpus), count in product(FAULTS.items(), JOBS.items(), (8, None)):
        hit = (
            "for sure"
            if is_certain_hit(reach, job_gpus, count)
            else "hit"
            if is_hit(reach, job_gpus, count)
            else "spared"
        )
        yield f"fault {fault}; job with {job}; node with {'?' if count is None else count} GPUs: {hit}"
