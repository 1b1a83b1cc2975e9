"""A node for golden decisions: turns findings and kernel lines into decisions of healthd, in a fixed format.

The format is defined here, so that it survives renames of classes and modules. Messages are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW
from msgspec.structs import replace
from slurm_text import listpids, sinfo, squeue

from healthd.agent.conditions import endings, intake, verdict
from healthd.agent.conditions.ledger import Ledger, with_conditions
from healthd.agent.kernel_log.coalesce import with_jobs
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import Check
from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.agent.slurm.policy import Policy, decide
from healthd.agent.slurm.reconcile import SaveRecord, reconcile
from healthd.common.history import History, Series, update, without_growth
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    Drain,
    DrainRecord,
    Finding,
    Gpu,
    Inventory,
    KernelEvent,
    Leave,
    Mode,
    NodeState,
    Observation,
    Outcome,
    PciDevice,
    Repair,
    Resume,
    RunName,
    Verdict,
)
from healthd.common.slurm.commands import CommandResult
from healthd.common.slurm.drain_reason import parse_reason
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError

CHECKS = registry.built_in_checks()
ADDRESSES = fake_pci_gpus("dgx-h100")
GPUS = tuple(Gpu(pci, index, f"GPU-{index}", minor=index) for index, pci in enumerate(ADDRESSES))
GPU_DEVICES = tuple(PciDevice(pci, "0x10de", "0x2330", "0x030200", "gpu") for pci in ADDRESSES)
ACT = Policy(Mode.ACT, admin_comment=False)
# The GPUs that the processes of each job have open and that Slurm allocated: job 101 has GPU 0, job 102 all others, job
# 103 none. Job 104 starts after the fault.
OPEN_GPUS = {"101": frozenset({0}), "102": frozenset(range(1, 8)), "103": frozenset[int](), "104": frozenset({0})}
SECOND = 1.0
NONE = "none"  # no condition


def seconds(value: float) -> str:
    return f"{value:g}s"


def part_word(part: str) -> str:
    """Return a part as one word, "-" for the node."""
    return part.replace(" ", "_") or "-"


def condition_text(condition: Condition, state: bool = True) -> str:
    """Return a condition in one line, without its message and its times."""
    words = [condition.code, part_word(condition.subject), condition.severity.name.lower()]
    words += [condition.state.value] if state else []
    words += [
        condition.clears.value,
        *([f"window={seconds(condition.window_seconds)}"] * bool(condition.window_seconds)),
    ]
    words += [f"confirm={seconds(condition.confirm_seconds)}"] * bool(condition.confirm_seconds)
    if condition.worsens:
        words.append(f"worsens={seconds(condition.worsens.after_seconds)}:{condition.worsens.severity.name.lower()}")
    flags = {"shared": condition.shared_cause, "observed": condition.observed, "history": condition.history}
    words += [name for name, is_set in flags.items() if is_set]
    words += [f"expects={condition.expects}"] * bool(condition.expects)
    words += [f"job={condition.job}"] * bool(condition.job)
    return " ".join(words)


def requeued_jobs(
    node_verdict: Verdict, drain_reason: str, inventory: Inventory, started: float, now: float
) -> tuple[str, ...]:
    """Return the jobs that a reconciliation requeues on a node drained with this reason."""
    gpus_found = inventory.gpus or GPUS

    def prolog(job: str) -> tuple[str, float]:
        return (f"101 0 {gpus_found[0].uuid}\n" if job == "101" else ""), now

    gpus = NodeGpus(inventory, gpus_found, read_prolog=prolog, find_open=lambda _processes: (OPEN_GPUS, True))
    record = DrainRecord(reason=drain_reason, confirmed_at=now - 60, boot_id=BOOT)
    steps = reconcile(node_verdict, record, ACT, "n1", BOOT, lambda: now, gpus)
    requeued_so_far: set[str] = set()
    answer: CommandResult | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            report = end.value
            break
        answer = None
        if isinstance(step, SaveRecord):
            continue
        argv = step.argv
        job = next((word for word in argv if word in OPEN_GPUS), "")
        if argv[0] == "sinfo":
            answer = sinfo("mixed+drain", drain_reason, since=now - 60, gres="gpu:h100:8")
        elif argv[0] == "sh":
            answer = CommandResult(0, b"NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia[0-7]\n")
        elif argv[0] == "squeue":
            state = {"state": "PENDING", "restarts": 1} if job in requeued_so_far else {}
            answer = squeue(job, start=now + 2 if job == "104" else started, **state)  # type: ignore[arg-type]
        elif "listpids" in argv:
            answer = listpids(*OPEN_GPUS)
        elif "requeue" in argv:
            requeued_so_far.add(job)
            answer = CommandResult(0)
        else:
            assert "show" in argv, argv
            gres = {"102": "gpu:h100:7(IDX:1-7)", "104": "gpu:h100:1(IDX:0)"}.get(job, "")
            answer = CommandResult(0, f"JobId={job} JobName=x   Nodes=n1 CPU_IDs=0 Mem=0 GRES={gres} \n".encode())
    assert not report.problem, report.problem
    return tuple(sorted(report.requeued))


class Node:
    """A DGX H100 that runs three jobs (OPEN_GPUS), and whose Slurm does at once what healthd decides."""

    def __init__(
        self, runs: Iterable[tuple[Check, CheckConfig]], inventory: Inventory | None = None, boot_id: str = BOOT
    ) -> None:
        self.runs = list(runs)
        self.names = [RunName(check.name, config.name) for check, config in self.runs if check.has_run]
        self.event_checks = [(check, config) for check, config in self.runs if check.reads_kernel_log]
        node = Inventory(GPUS, GPU_DEVICES) if inventory is None else inventory
        self.ledger = Ledger(boot_id=boot_id, inventory=node, whole_gpus=node.gpus)
        self.now, self.started = NOW, NOW - 3600.0  # the clock; when the jobs began
        self.trusted_since = 0.0
        self.history_series: dict[str, Series] = {}
        self.results: dict[RunName, CheckResult] = {}
        self.slurm = DrainRecord()

    @property
    def drained(self) -> bool:
        return bool(self.slurm.reason)

    # --- events

    def log_lines(self, texts: Iterable[str], history: bool = False, observed: bool = False) -> Node:
        """The kernel logs these lines now. A process in a line belongs to job 103."""
        stripped = [strip_prefix(text, NOW) for text in texts]
        lines = [RawLine(self.now, line_text.text, history=history) for line_text in stripped if line_text is not None]
        read = [make_event(line, self.ledger.boot_id) for line in lines]
        return self.take_events([replace(event, observed=observed) for event in read if event is not None])

    def take_events(self, events: Sequence[KernelEvent]) -> Node:
        coalesced = intake.coalesce(self.ledger, events)
        on_gpu = {gpu.pci: "101" if gpu.minor == 0 else "102" for gpu in self.ledger.inventory.gpus}
        jobs = {
            e.sequence: "103" if e.pid else on_gpu.get(e.pci, "")
            for e in coalesced.events
            if e.sequence in coalesced.touched
        }
        coalesced = coalesced._replace(
            events=with_jobs(coalesced.events, {number: job for number, job in jobs.items() if job})
        )
        applied = intake.take_coalesced_events(self.ledger, coalesced, self.event_checks, self.now)
        assert not applied.failures
        self.ledger = applied.ledger
        return self

    def run_checks(self, host: Host) -> Node:
        """Run each check that runs in service, or that runs while the node is drained if it is."""
        for check, config in self.runs:
            if not check.has_run or (check.when == "idle" and not self.drained):
                continue
            items: list[Any] = []
            outcome = Outcome.COMPLETED
            try:
                items.extend(
                    check.module.run(host, config, History(self.history_series, self.now, self.ledger.boot_id))
                )
            except (OSError, ValueError, RuntimeError, NvmlError):
                outcome = Outcome.FAILED
            self.history_series = update(
                self.history_series,
                [item for item in items if isinstance(item, Observation)],
                self.now,
                self.ledger.boot_id,
            )
            self.result(
                RunName(check.name, config.name),
                config,
                tuple(item for item in items if isinstance(item, Finding)),
                tuple(item for item in items if isinstance(item, Repair)),
                outcome,
            )
        host.close_nvml()
        return self

    def result(
        self,
        run: RunName,
        config: CheckConfig,
        findings: tuple[Finding, ...] = (),
        repairs: tuple[Repair, ...] = (),
        outcome: Outcome = Outcome.COMPLETED,
    ) -> Node:
        """Record the end of a run of a check."""
        result = CheckResult(*run, outcome, self.now, 0.0, findings, repairs=repairs)
        self.ledger, self.results[run] = intake.take_result(self.ledger, result, config, self.now)
        return self

    def set_conditions(self, conditions: Mapping[Any, Condition]) -> Node:
        self.ledger = with_conditions(self.ledger, dict(conditions))
        return self

    def wait(self, elapsed_seconds: float, loaded: bool | None = None) -> Node:
        self.now += elapsed_seconds
        under_load = not self.drained if loaded is None else loaded
        return self.set_conditions(
            endings.after_quiet_time(self.ledger.by_key(), elapsed_seconds, under_load, self.now)
        )

    def reboot(self, boot_id: str = "") -> Node:
        self.now += 300.0
        self.ledger = replace(self.ledger, boot_id=boot_id or self.ledger.boot_id + "'")
        return self.set_conditions(endings.after_boot(self.ledger.by_key(), self.ledger.boot_id, self.now))

    def reset(self, subject: str, before: float | None = None) -> Node:
        """A GPU was reset. `before`: time of the reading that the evidence is compared with; None: after all
        sightings."""
        self.now += 300.0
        repair = Repair(Clears.GPU_RESET, subject, "", before=self.now - SECOND if before is None else before)
        return self.set_conditions(endings.after_repairs(self.ledger.by_key(), [repair], self.now))

    def repaired(self, code: str, subject: str | None) -> Node:
        self.now += SECOND
        for condition in self.ledger.conditions:
            if condition.code == code and subject in (None, condition.subject):
                self.history_series = without_growth(self.history_series, condition.subject)
        return self.set_conditions(endings.repaired(self.ledger.by_key(), code, subject, "x", self.now))

    # --- decisions

    def decide(self) -> str:
        """Decide and apply the decision. Return "leave", "resume", "drain CODE PART" or "... requeue JOB,JOB"."""
        node_verdict = verdict.judge(self.ledger.by_key(), self.results, self.names, self.trusted_since)
        flags = frozenset({"MIXED", "DRAIN"} if self.drained else {"ALLOCATED"})
        decision = decide(node_verdict, NodeState("n1", flags, self.slurm.reason), self.slurm, ACT, self.now)
        if isinstance(decision, Resume):
            self.slurm = DrainRecord()
            return "resume"
        if isinstance(decision, Leave):
            return "leave" if not self.drained else "leave drained"
        assert isinstance(decision, Drain)
        self.slurm = DrainRecord(reason=decision.reason)
        cause = parse_reason(decision.reason)
        assert cause is not None, decision.reason
        jobs = (
            requeued_jobs(node_verdict, decision.reason, self.ledger.inventory, self.started, self.now)
            if decision.requeue
            else ()
        )
        return f"drain {cause[0]} {part_word(cause[1])}" + (
            f" requeue {','.join(jobs) or 'none'}" if decision.requeue else ""
        )

    def health(self) -> str:
        return verdict.judge(self.ledger.by_key(), self.results, self.names, self.trusted_since).health.value

    def condition_texts(self) -> list[str]:
        return sorted(map(condition_text, self.ledger.conditions))

    def outcome(self) -> tuple[str, ...]:
        """Decide. Return the conditions, or NONE; the last line includes the decision."""
        *before, last = self.condition_texts() or [NONE]
        return (*before, last + decision_suffix(last, self.decide()))


def decision_suffix(condition: str, decision: str) -> str:
    """Return the decision as the end of a condition line. "leave" is omitted, and so is a drain cause that is the
    condition itself."""
    cause = " ".join(condition.split()[:2])
    return "" if decision == "leave" else f" -> {decision.replace(f'drain {cause}', 'drain')}"
