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
OURS = DrainRecord(reason=XID, confirmed_at=NOW - 60, boot_id="b1")
GRES = "gpu:h100:3"
GRES_CONF = "NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia[0-2]\n"


def fault(number: int, at: float = NOW - 10, **more: object) -> Condition:
    state, severity = ConditionState.OPEN, Severity.CRITICAL
    found = Condition(
        "gpu_xid", "", "gpu_xid/79", PCI[number], severity, "fell off the bus", Clears.REBOOT, state, 1.0, 2.0, 1, "b1"
    )
    return replace(found, critical_at=at, **more)  # type: ignore[arg-type]


def verdict(*causes: Condition) -> Verdict:
    return Verdict(Health.UNHEALTHY, causes=causes, fault_time=max(cause.critical_at for cause in causes))


def gpus(**told: str) -> NodeGpus:
    """Return node GPUs with the text that the prolog wrote for each job, such as job12="0"."""
    return NodeGpus(Inventory(gpus=GPUS), GPUS, read_prolog=lambda job: (f"{job} {told.get(f'job{job}', '')}\n", NOW))


def asked(job: str, given: str) -> CommandResult:
    return CommandResult(
        0, f"JobId={job} JobName=x JOB_GRES=x   Nodes=n1 CPU_IDs=0 Mem=0 GRES={given} MinCPUsNode=1\n".encode()
    )


def look(
    wanted: Verdict,
    jobs: Mapping[str, CommandResult],
    node_gpus: NodeGpus,
    memory: DrainRecord = OURS,
    policy: Policy = ACT,
    gres: str = GRES,
    answers: Mapping[str, CommandResult] | None = None,
    gres_conf: CommandResult | str = GRES_CONF,
) -> tuple[ReconcileReport, list[str]]:
    """Return the report, and the commands except those that read the node. A requeued job is pending afterwards."""
    steps = reconcile(wanted, memory, policy, "n1", "b1", lambda: NOW, node_gpus)
    ran, requeued, answer = [], set(), None
    while True:
        try:
            step: Command | SaveRecord = steps.send(answer)
        except StopIteration as end:
            return end.value, ran
        answer = None
        if isinstance(step, SaveRecord):
            continue
        words = " ".join(step.argv)
        if step.argv[0] == "sinfo":
            answer = sinfo("mixed+drain", XID, gres=gres)
        elif step.argv[1] == "listpids":
            answer = listpids(*jobs)
        elif step.argv[0] == "sh":
            answer = CommandResult(0, gres_conf.encode()) if isinstance(gres_conf, str) else gres_conf
        elif step.argv[0] == "squeue":
            ran.append(f"squeue {step.argv[6]}")
            job = step.argv[6]
            answer = squeue(job, state="PENDING", restarts=1) if job in requeued else jobs[job]
        else:
            ran.append(words)
            answer = (answers or {}).get(words, CommandResult(0))
            if step.argv[1] == "requeue":
                requeued.add(step.argv[-1])


TWO = {"12": squeue("12"), "13": squeue("13")}


def test_what_the_prolog_told_spares_without_a_question_and_is_remembered() -> None:
    report, ran = look(verdict(fault(0)), TWO, gpus(job12="0", job13="1"))
    why = f"has GPU {PCI[1]}, which the fault did not hit"
    assert ran == ["squeue 12", "scontrol requeue incomplete 12", "squeue 12", "squeue 13"]
    assert report.requeued == ("12",)
    assert report.decision == Drain(XID, True, (("13", why),))
    assert report.record.unaffected_jobs == (UnaffectedJob("13", "13", NOW - 100, ("1",), why),)
    again, ran = look(verdict(fault(0)), {"13": TWO["13"]}, gpus(), report.record)
    assert (ran, again.not_requeued, again.record.unaffected_jobs) == (
        [],
        (("13", why),),
        report.record.unaffected_jobs,
    )


def test_where_gres_conf_does_not_tell_the_order_all_jobs_with_numbers_are_hit() -> None:
    reversed_ = "Name=gpu File=/dev/nvidia[2,1,0]\n"
    for conf in ("", reversed_, CommandResult(1, GRES_CONF), CommandResult(None, GRES_CONF)):
        report, _ = look(verdict(fault(0)), TWO, gpus(job12="0", job13="1"), gres_conf=conf)
        assert (report.requeued, report.not_requeued) == (("12", "13"), ())
    report, _ = look(verdict(fault(0)), TWO, gpus(job12="0 GPU-0", job13="1 GPU-1"), gres_conf="")
    assert report.requeued == ("12",), "UUIDs need no order"


def test_on_a_node_of_two_types_numbers_count_for_nothing() -> None:
    told = gpus(job12="0", job13="1")
    report, _ = look(verdict(fault(0)), TWO, told, gres="gpu:a:2,gpu:b:1", gres_conf="AutoDetect=nvml\n")
    assert (report.requeued, report.not_requeued) == (("12", "13"), ())
    report, _ = look(verdict(fault(0)), TWO, gpus(job12="0 GPU-0", job13="1 GPU-1"), gres="gpu:a:2,gpu:b:1")
    assert report.requeued == ("12",)


def test_a_run_that_was_spared_is_hit_where_gres_conf_has_another_order_now() -> None:
    known = replace(OURS, unaffected_jobs=(UnaffectedJob("13", "13", NOW - 100, ("1",), "has another"),))
    report, _ = look(verdict(fault(0)), {"13": TWO["13"]}, gpus(), known, gres_conf="")
    assert report.requeued == ("13",)


def test_a_run_that_was_spared_is_hit_by_the_next_fault_on_its_gpu() -> None:
    known = replace(OURS, unaffected_jobs=(UnaffectedJob("13", "13", NOW - 100, ("1",), "has another"),))
    report, ran = look(verdict(fault(0), fault(1)), {"13": TWO["13"]}, gpus(), known)
    assert report.requeued == ("13",)
    assert ran == ["squeue 13", "scontrol requeue incomplete 13", "squeue 13"], "its GPUs are not queried again"


def test_slurm_is_asked_where_the_prolog_told_nothing() -> None:
    answers = {f"scontrol -d -o show job {job}": asked(job, f"gpu:h100:1(IDX:{i})") for i, job in enumerate(TWO)}
    report, ran = look(verdict(fault(0)), TWO, gpus(), answers=answers)
    assert report.requeued == ("12",)
    assert [words for words in ran if "-d" in words] == list(answers)


def test_what_slurm_does_not_say_counts_as_a_hit() -> None:
    for said in (asked("13", "gpu:1(CNT:1)"), CommandResult(0, b"rubbish"), CommandResult(1, b"", "Invalid job id\n")):
        report, _ = look(verdict(fault(0)), {"13": TWO["13"]}, gpus(), answers={"scontrol -d -o show job 13": said})
        assert report.requeued == ("13",)


def test_a_slurm_that_is_away_requeues_nobody_and_is_told() -> None:
    away = CommandResult(1, b"", "Unable to contact slurm controller (connect failure)\n")
    report, ran = look(verdict(fault(0)), {"13": TWO["13"]}, gpus(), answers={"scontrol -d -o show job 13": away})
    assert report.problem.startswith("scontrol")
    assert not report.settled
    assert not any("requeue" in words for words in ran)


def test_on_a_node_without_gpus_in_slurm_and_with_node_all_are_hit_and_nothing_is_asked() -> None:
    told = gpus(job12="0", job13="1")
    for report, ran in (
        look(verdict(fault(0)), TWO, told, gres="(null)"),
        look(verdict(fault(0)), TWO, told, policy=replace(ACT, requeue=Requeue.NODE)),
    ):
        assert report.requeued == ("12", "13")
        assert not any("-d" in words for words in ran)


def test_a_job_is_a_victim_of_the_faults_that_were_seen_since_it_started() -> None:
    """The job started after the fault of its own GPU; the fault of another GPU came later."""
    late = {"13": squeue("13", start=NOW - 5)}
    report, _ = look(verdict(fault(1, at=NOW - 10), fault(0, at=NOW - 1)), late, gpus(job13="1"))
    assert report.requeued == ()
    assert [job for job, _ in report.not_requeued] == ["13"]


def test_who_held_the_gpu_when_the_line_came_is_hit_whatever_slurm_gave_it() -> None:
    report, _ = look(verdict(fault(0, job="99,13")), TWO, gpus(job12="1", job13="1"))
    assert report.requeued == ("13",)


def test_a_heterogeneous_job_of_which_one_part_is_hit_is_not_told_as_spared() -> None:
    parts = {"12": squeue("12", name="12+0"), "13": squeue("13", name="12+1")}
    report, _ = look(verdict(fault(1)), parts, gpus(job12="0", job13="1"))
    assert report.not_requeued == ()


def test_where_nothing_is_to_be_requeued_nobody_is_spared() -> None:
    known = replace(OURS, unaffected_jobs=(UnaffectedJob("13", "13", NOW - 100, ("1",), "has another"),))
    degraded = Verdict(Health.DEGRADED, causes=(replace(fault(0), severity=Severity.DEGRADED),))
    report, _ = look(degraded, TWO, gpus(), known)
    assert report.record.unaffected_jobs == ()
