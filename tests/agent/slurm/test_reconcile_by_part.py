"""Tests of one reconciliation with a fault of one GPU: only jobs on that GPU are requeued. Slurm answers are fakes."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from slurm_text import NOW, XID, listpids, sinfo, squeue

from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.agent.slurm.policy import Policy
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord, reconcile
from healthd.common.model import (
    Clears,
    Condition,
    ConditionState,
    Drain,
    DrainRecord,
    Gpu,
    Health,
    Inventory,
    Mode,
    Requeue,
    Severity,
    UnaffectedJob,
    Verdict,
)
from healthd.common.slurm.commands import Command, CommandResult

PCI = ("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0")
GPUS = tuple(Gpu(pci, i, f"GPU-{i}", minor=i) for i, pci in enumerate(PCI))
ACT = Policy(mode=Mode.ACT, admin_comment=False)
OWN_DRAIN = DrainRecord(reason=XID, confirmed_at=NOW - 60, boot_id="b1")
GRES = "gpu:h100:3"
GRES_CONF = "NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia[0-2]\n"


def fault(number: int, timestamp: float = NOW - 10, **fields: object) -> Condition:
    state, severity = ConditionState.OPEN, Severity.CRITICAL
    condition = Condition(
        "gpu_xid", "", "gpu_xid/79", PCI[number], severity, "fell off the bus", Clears.REBOOT, state, 1.0, 2.0, 1, "b1"
    )
    return replace(condition, critical_at=timestamp, **fields)  # type: ignore[arg-type]


def verdict(*causes: Condition) -> Verdict:
    fault_time = max(cause.critical_at for cause in causes)
    return Verdict(Health.UNHEALTHY, causes, causes, fault_time=fault_time)


def make_node_gpus(**prolog_text: str) -> NodeGpus:
    """Return node GPUs with the text that the prolog wrote for each job, such as job12="0"."""
    return NodeGpus(
        Inventory(gpus=GPUS), GPUS, read_prolog=lambda job: (f"{job} {prolog_text.get(f'job{job}', '')}\n", NOW)
    )


def show_job_result(job: str, gres: str) -> CommandResult:
    return CommandResult(
        0, f"JobId={job} JobName=x JOB_GRES=x   Nodes=n1 CPU_IDs=0 Mem=0 GRES={gres} MinCPUsNode=1\n".encode()
    )


def run_reconcile(
    wanted_verdict: Verdict,
    jobs: Mapping[str, CommandResult],
    node_gpus: NodeGpus,
    record: DrainRecord = OWN_DRAIN,
    policy: Policy = ACT,
    gres: str = GRES,
    answers: Mapping[str, CommandResult] | None = None,
    gres_conf: CommandResult | str = GRES_CONF,
) -> tuple[ReconcileReport, list[str]]:
    """Return the report, and the commands except those that read the node. A requeued job is pending afterwards."""
    steps = reconcile(wanted_verdict, record, policy, "n1", "b1", lambda: NOW, node_gpus)
    commands, requeued, answer = [], set(), None
    while True:
        try:
            step: Command | SaveRecord = steps.send(answer)
        except StopIteration as end:
            return end.value, commands
        answer = None
        if isinstance(step, SaveRecord):
            continue
        command_line = " ".join(step.argv)
        if step.argv[0] == "sinfo":
            answer = sinfo("mixed+drain", XID, gres=gres)
        elif step.argv[1] == "listpids":
            answer = listpids(*jobs)
        elif step.argv[0] == "sh":
            answer = CommandResult(0, gres_conf.encode()) if isinstance(gres_conf, str) else gres_conf
        elif step.argv[0] == "squeue":
            commands.append(f"squeue {step.argv[6]}")
            job = step.argv[6]
            answer = squeue(job, state="PENDING", restarts=1) if job in requeued else jobs[job]
        else:
            commands.append(command_line)
            answer = (answers or {}).get(command_line, CommandResult(0))
            if step.argv[1] == "requeue":
                requeued.add(step.argv[-1])


TWO_JOBS = {"12": squeue("12"), "13": squeue("13")}


def test_prolog_allocation_spares_job_without_query() -> None:
    report, commands = run_reconcile(verdict(fault(0)), TWO_JOBS, make_node_gpus(job12="0", job13="1"))
    reason = f"has GPU {PCI[1]}, which the fault did not hit"
    assert commands == ["squeue 12", "scontrol requeue incomplete 12", "squeue 12", "squeue 13"]
    assert report.requeued == ("12",)
    assert report.decision == Drain(XID, True, (("13", reason),))
    assert report.record.unaffected_jobs == (UnaffectedJob("13", "13", NOW - 100, ("1",), reason),)
    second, commands = run_reconcile(verdict(fault(0)), {"13": TWO_JOBS["13"]}, make_node_gpus(), report.record)
    assert (commands, second.not_requeued, second.record.unaffected_jobs) == (
        [],
        (("13", reason),),
        report.record.unaffected_jobs,
    )


def test_link_xid_on_one_gpu_of_rack_tray_requeues_when_others_have_had_a_minute() -> None:
    policy, allocated = replace(ACT, rack_gpus=frozenset(PCI)), make_node_gpus(job12="0", job13="1")
    earlier = fault(0, NOW - 1000)  # its jobs are gone
    link_down = fault(0, NOW - 10, code="gpu_xid/149")
    report, _ = run_reconcile(verdict(earlier, link_down), TWO_JOBS, allocated, policy=policy)
    assert (report.requeued, report.settled, report.next_read_at) == ((), True, NOW + 50)
    older = replace(link_down, critical_at=NOW - 60)
    report, _ = run_reconcile(verdict(earlier, older), TWO_JOBS, allocated, policy=policy)
    assert (report.requeued, report.next_read_at) == (("12",), 0.0)
    on_all = [replace(older, subject=pci, last_event=NOW - 60, switch_side_at=NOW - 60) for pci in PCI]
    report, _ = run_reconcile(verdict(earlier, *on_all), TWO_JOBS, allocated, policy=policy)
    assert (report.requeued, report.next_read_at) == ((), 0.0)


def test_unknown_gres_order_hits_all_jobs_with_numbers() -> None:
    reversed_ = "Name=gpu File=/dev/nvidia[2,1,0]\n"
    for conf in ("", reversed_, CommandResult(1, GRES_CONF), CommandResult(None, GRES_CONF)):
        report, _ = run_reconcile(verdict(fault(0)), TWO_JOBS, make_node_gpus(job12="0", job13="1"), gres_conf=conf)
        assert (report.requeued, report.not_requeued) == (("12", "13"), ())
    report, _ = run_reconcile(
        verdict(fault(0)), TWO_JOBS, make_node_gpus(job12="0 GPU-0", job13="1 GPU-1"), gres_conf=""
    )
    assert report.requeued == ("12",), "UUIDs need no order"


def test_two_gpu_types_hit_all_jobs_with_numbers() -> None:
    prolog_gpus = make_node_gpus(job12="0", job13="1")
    report, _ = run_reconcile(
        verdict(fault(0)), TWO_JOBS, prolog_gpus, gres="gpu:a:2,gpu:b:1", gres_conf="AutoDetect=nvml\n"
    )
    assert (report.requeued, report.not_requeued) == (("12", "13"), ())
    report, _ = run_reconcile(
        verdict(fault(0)), TWO_JOBS, make_node_gpus(job12="0 GPU-0", job13="1 GPU-1"), gres="gpu:a:2,gpu:b:1"
    )
    assert report.requeued == ("12",)


def test_unaffected_job_is_hit_if_gres_order_changed() -> None:
    record = replace(OWN_DRAIN, unaffected_jobs=(UnaffectedJob("13", "13", NOW - 100, ("1",), "has another"),))
    report, _ = run_reconcile(verdict(fault(0)), {"13": TWO_JOBS["13"]}, make_node_gpus(), record, gres_conf="")
    assert report.requeued == ("13",)


def test_unaffected_job_is_hit_by_next_fault_on_gpu() -> None:
    record = replace(OWN_DRAIN, unaffected_jobs=(UnaffectedJob("13", "13", NOW - 100, ("1",), "has another"),))
    report, commands = run_reconcile(verdict(fault(0), fault(1)), {"13": TWO_JOBS["13"]}, make_node_gpus(), record)
    assert report.requeued == ("13",)
    assert commands == ["squeue 13", "scontrol requeue incomplete 13", "squeue 13"], "its GPUs are not queried again"


def test_scontrol_is_queried_without_prolog_allocation() -> None:
    answers = {
        f"scontrol -d -o show job {job}": show_job_result(job, f"gpu:h100:1(IDX:{i})") for i, job in enumerate(TWO_JOBS)
    }
    report, commands = run_reconcile(verdict(fault(0)), TWO_JOBS, make_node_gpus(), answers=answers)
    assert report.requeued == ("12",)
    assert [command for command in commands if "-d" in command] == list(answers)


def test_unknown_allocation_is_hit() -> None:
    for result in (
        show_job_result("13", "gpu:1(CNT:1)"),
        CommandResult(0, b"rubbish"),
        CommandResult(1, b"", "Invalid job id\n"),
    ):
        report, _ = run_reconcile(
            verdict(fault(0)), {"13": TWO_JOBS["13"]}, make_node_gpus(), answers={"scontrol -d -o show job 13": result}
        )
        assert report.requeued == ("13",)


def test_unreachable_slurm_requeues_no_job() -> None:
    unreachable = CommandResult(1, b"", "Unable to contact slurm controller (connect failure)\n")
    report, commands = run_reconcile(
        verdict(fault(0)), {"13": TWO_JOBS["13"]}, make_node_gpus(), answers={"scontrol -d -o show job 13": unreachable}
    )
    assert report.problem.startswith("scontrol")
    assert not report.settled
    assert not any("requeue" in command for command in commands)


def test_all_jobs_are_hit_without_slurm_gpus_or_with_requeue_node() -> None:
    prolog_gpus = make_node_gpus(job12="0", job13="1")
    for report, commands in (
        run_reconcile(verdict(fault(0)), TWO_JOBS, prolog_gpus, gres="(null)"),
        run_reconcile(verdict(fault(0)), TWO_JOBS, prolog_gpus, policy=replace(ACT, requeue=Requeue.NODE)),
    ):
        assert report.requeued == ("12", "13")
        assert not any("-d" in command for command in commands)


def test_job_is_hit_only_by_faults_since_start() -> None:
    """The job started after the fault of its own GPU; the fault of another GPU came later."""
    late_job = {"13": squeue("13", start=NOW - 5)}
    report, _ = run_reconcile(
        verdict(fault(1, timestamp=NOW - 10), fault(0, timestamp=NOW - 1)), late_job, make_node_gpus(job13="1")
    )
    assert report.requeued == ()
    assert [job for job, _ in report.not_requeued] == ["13"]


def test_job_in_event_is_hit_despite_allocation() -> None:
    report, _ = run_reconcile(verdict(fault(0, job="99,13")), TWO_JOBS, make_node_gpus(job12="1", job13="1"))
    assert report.requeued == ("13",)


def test_heterogeneous_job_is_requeued_as_a_whole() -> None:
    parts = {"12": squeue("12", name="12+0"), "13": squeue("13", name="12+1")}
    report, _ = run_reconcile(verdict(fault(1)), parts, make_node_gpus(job12="0", job13="1"))
    assert report.not_requeued == ()


def test_without_requeue_no_job_is_recorded_as_unaffected() -> None:
    record = replace(OWN_DRAIN, unaffected_jobs=(UnaffectedJob("13", "13", NOW - 100, ("1",), "has another"),))
    degraded = Verdict(Health.DEGRADED, causes=(replace(fault(0), severity=Severity.DEGRADED),))
    report, _ = run_reconcile(degraded, TWO_JOBS, make_node_gpus(), record)
    assert report.record.unaffected_jobs == ()
