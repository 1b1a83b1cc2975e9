"""The reconciliation of one node of a SlurmCluster in the thread of the test, and helpers for it."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_versions
from slurm_cluster import Node, SlurmCluster
from waiting import until

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.node_gpus import UNKNOWN_GPUS, NodeGpus
from healthd.agent.slurm.policy import Policy
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord, reconcile
from healthd.common.model import (
    Clears,
    Condition,
    ConditionState,
    DrainRecord,
    Health,
    Mode,
    Requeue,
    Severity,
    Verdict,
)
from healthd.common.slurm.commands import ENVIRONMENT, Command, CommandResult

# Tests leave drained nodes to later tests, and do not test the limit.
NO_LIMIT = FleetLimits(own_hardware_limit_percent=100)
# test_requeue_by_part.py tests which jobs a fault hits.
ACT = Policy(mode=Mode.ACT, command_timeout_seconds=60, requeue_retry_seconds=3, fleet=NO_LIMIT, requeue=Requeue.NODE)
XID = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
HEALTHY = Verdict(Health.HEALTHY, may_resume=True)


def condition(severity: Severity = Severity.CRITICAL, code: str = "gpu_xid/79", **fields: object) -> Condition:
    values: dict[str, object] = {
        "check": code.partition("/")[0],
        "instance": "",
        "code": code,
        "subject": "0000:1b:00.0",
        "severity": severity,
        "message": "fell off the bus",
        "clears": Clears.REBOOT,
        "state": ConditionState.OPEN,
        "first_seen": 0.0,
        "last_seen": 0.0,
        "count": 1,
        "boot_id": "",
    }
    return Condition(**{**values, **fields})  # type: ignore[arg-type]


def faulty(*causes: Condition, fault_time: float | None = None) -> Verdict:
    """Return a verdict that is CRITICAL now: it affects every running job, unless `fault_time` is given."""
    time_of_fault = time.time() if fault_time is None else fault_time
    return Verdict(Health.UNHEALTHY, causes=causes or (condition(),), fault_time=time_of_fault)


@dataclasses.dataclass
class NodeController:
    """Runs the daemon's reconciliation to its end in this thread. `memory` is the drain record of the ledger."""

    cluster: SlurmCluster
    node: str
    policy: Policy = ACT
    boot_id: str = "boot-1"
    record: DrainRecord = dataclasses.field(default_factory=DrainRecord)
    commands: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    before: Callable[[Command], None] = lambda command: None
    after: Callable[[Command], None] = lambda command: None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    gpus: NodeGpus = UNKNOWN_GPUS

    def reconcile_once(self, verdict: Verdict) -> ReconcileReport:
        steps = reconcile(verdict, self.record, self.policy, self.node, self.boot_id, time.time, self.gpus)
        answer: CommandResult | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                report: ReconcileReport = end.value
                self.record = report.record
                return report
            if isinstance(step, SaveRecord):
                self.record, answer = step.record, None
            else:
                self.before(step)
                answer = self.run(step)
                self.after(step)

    def reconcile_until_settled(self, verdict: Verdict, seconds: float = 120) -> ReconcileReport:
        end = time.monotonic() + seconds
        while not (report := self.reconcile_once(verdict)).settled:
            assert time.monotonic() < end, report
            time.sleep(0.3)
        return report

    def run(self, command: Command) -> CommandResult:
        self.commands.append(command.argv)
        started, environment = time.time(), self.cluster.env | ENVIRONMENT | self.environment
        try:
            result = subprocess.run(
                [word.encode("utf-8", "surrogateescape") for word in self.prefix + command.argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=command.deadline_seconds,
            )
        except subprocess.TimeoutExpired:
            return CommandResult(None, started=started, seconds=time.time() - started)
        except OSError as error:
            return CommandResult(127, stderr=str(error), started=started)
        return CommandResult(
            result.returncode, result.stdout, result.stderr.decode(errors="replace"), started, time.time() - started
        )

    def start_job(self, script: str, *options: str) -> str:
        """Start a job on this node and wait until its slurmstepd lists its processes."""
        job = self.cluster.sbatch(script, "-w", self.node, "-n1", *options)
        self.cluster.wait_job(job, "RUNNING")
        return wait_until_listed(self.cluster, job, self.node)

    def state(self) -> Node:
        return self.cluster.node(self.node)

    def change_commands(self) -> list[tuple[str, ...]]:
        """Return the commands that changed the node or jobs, without comments for the users of jobs."""
        kinds = ("update", "requeue", "requeuehold")
        return [argv for argv in self.commands if argv[1] in kinds and not argv[2].startswith("JobId=")]


def write_script(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make_idle(cluster: SlurmCluster, name: str) -> None:
    end_jobs_and_resume(cluster, name)
    cluster.wait_state(name, "IDLE", without=("DRAIN", "COMPLETING", "NOT_RESPONDING"))


def end_jobs_and_resume(cluster: SlurmCluster, name: str) -> None:
    cluster.run("scancel", "--state=RUNNING", f"--nodelist={name}")
    cluster.run("scancel", "--state=PENDING")
    if not cluster.node(name).flags.isdisjoint({"DRAIN", "DOWN"}):
        cluster.run("scontrol", "update", f"NodeName={name}", "State=RESUME")


def drain(cluster: SlurmCluster, name: str, reason: str) -> None:
    cluster.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")


def resume(cluster: SlurmCluster, name: str) -> None:
    cluster.run("scontrol", "update", f"NodeName={name}", "State=RESUME")


def wait_until_listed(cluster: SlurmCluster, job: str, node: str) -> str:
    until(lambda: is_listed(cluster, job, node), f"slurmd lists the processes of job {job}")
    return job


def wait_until_not_listed(cluster: SlurmCluster, job: str, node: str) -> None:
    """Wait until the job's processes and its slurmstepd have ended: a slurmstepd that ends causes errors until its
    socket is removed."""
    spool = cluster.directory / "spool" / node

    def is_over() -> bool:
        return not is_listed(cluster, job, node) and not any(map(Path.is_socket, spool.glob(f"*_{job}.*")))

    until(is_over, f"job {job} ends")


def is_listed(cluster: SlurmCluster, job: str, node: str) -> bool:
    return bool(listed_pids(cluster, job, node))


def listed_pids(cluster: SlurmCluster, job: str, node: str) -> list[int]:
    """Return the pids of the job's processes on the node."""
    rows = map(str.split, cluster.attempt("scontrol", "listpids", "*", node).stdout.splitlines())
    return [int(row[0]) for row in rows if row[1:2] == [job]]


def restart_requeued_job(cluster: SlurmCluster, job: str, node: str) -> None:
    """Start a requeued job without Slurm's delay; its node may need a moment until it responds.

    Leftovers of the last run would end the next one (slurmd: "Job already running"), and slurmd rejects a start in
    the second in which the last run was killed ("already killed, do not launch").
    """
    time.sleep(2)
    wait_until_not_listed(cluster, job, node)
    cluster.wait_state(node, without=("COMPLETING",))
    end = time.monotonic() + 240
    while cluster.job(job)["JobState"] != "RUNNING":
        assert time.monotonic() < end, cluster.job(job)
        cluster.attempt("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(1)


def is_drained(node: Node, reason: str) -> bool:
    return "DRAIN" in node.flags and node.reason == reason and node.user == "root"


def with_slurm(*versions: str | None) -> pytest.MarkDecorator:
    """Run the test with these versions; None is the installed one."""
    return pytest.mark.parametrize("cluster", versions, indirect=True, scope="module")


with_every_slurm = with_slurm(None, *slurm_versions.DEBIAN)
