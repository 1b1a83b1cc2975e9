"""Tests with a slurmdbd: the comment in sacct for the owner of a job, and accounts allowed to requeue but not to
drain."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster
from slurm_look import HEALTHY, XID, NodeController, condition, faulty, restart_requeued_job

from healthd.agent.slurm.policy import Owner
from healthd.common.model import Resume, Severity

ACCOUNTS = {"Operator": 65534, "Administrator": 1}  # nobody, daemon


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=4, accounting=True, version="") as running:
        running.run("sacctmgr", "-i", "-Q", "add", "account", "gpu")
        for user, level in (("nobody", "Operator"), ("daemon", "Administrator"), ("root", "Administrator")):
            running.run("sacctmgr", "-i", "-Q", "add", "user", user, "Account=gpu", f"AdminLevel={level}")
        yield running


def as_account(healthd: NodeController, level: str) -> NodeController:
    user_id = ACCOUNTS[level]
    healthd.prefix = ("setpriv", f"--reuid={user_id}", f"--regid={user_id}", "--clear-groups")
    return healthd


def wait_for_sacct(cluster: SlurmCluster, job: str, expected_text: str) -> list[str]:
    """Return the job's records, oldest first, one per run. slurmdbd lags behind slurmctld."""
    deadline = time.monotonic() + 120
    command = ("sacct", "-X", "-n", "-P", "-D", "-j", job, "-o", "State,AdminComment")
    while expected_text not in (text := cluster.run(*command)):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
    return text.splitlines()


def test_sacct_shows_reason_of_requeue(cluster: SlurmCluster) -> None:
    healthd = NodeController(cluster, "n1")
    job = healthd.start_job("sleep 600")
    fault = faulty()
    assert healthd.reconcile_once(fault).requeued == (job,)
    fault_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(fault.fault_time))
    comment = f"healthd: node n1: {XID.removeprefix('healthd: ')} at {fault_time}"
    assert f"REQUEUED|{comment}" in wait_for_sacct(cluster, job, comment)
    assert healthd.reconcile_once(HEALTHY).settled
    restart_requeued_job(cluster, job, "n1")
    cluster.run("scancel", job)
    last = wait_for_sacct(cluster, job, "CANCELLED")[-1]
    assert last.startswith("CANCELLED")
    assert last.endswith(f"|{comment}"), "the next run of the job keeps the comment"


def test_sacct_shows_fault_for_job_without_requeue(cluster: SlurmCluster) -> None:
    healthd = NodeController(cluster, "n2")
    job = healthd.start_job("sleep 600", "--no-requeue")
    assert dict(healthd.reconcile_once(faulty()).not_requeued) == {job: "submitted with --no-requeue"}
    cluster.run("scancel", job)
    assert "healthd: node n2: gpu_xid/79 " in wait_for_sacct(cluster, job, "CANCELLED")[-1]


def test_operator_account_reports_problem_and_requeues_nothing(
    cluster: SlurmCluster,
) -> None:
    healthd = NodeController(cluster, "n3")
    job = healthd.start_job("sleep 600")
    as_account(healthd, "Operator")
    report = healthd.reconcile_once(faulty())
    assert "Invalid user id: only root, SlurmUser or a Slurm administrator" in report.problem
    assert not report.settled
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")
    # The account could requeue, but the job would return to the node because it is not drained.
    cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=fan broken")
    assert healthd.reconcile_once(faulty()).requeued == (job,)


def test_administrator_account_can_drain_and_resume(cluster: SlurmCluster) -> None:
    healthd = as_account(NodeController(cluster, "n4"), "Administrator")
    assert healthd.reconcile_once(faulty(condition(Severity.DEGRADED))).owner is Owner.HEALTHD
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    assert cluster.wait_state("n4", "IDLE", without=("DRAIN",)).reason == ""
