"""Tests with a slurmdbd: the comment in sacct for the owner of a job, and accounts allowed to requeue but not to
drain."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster
from slurm_look import HEALTHY, XID, Healthd, condition, faulty, run_again

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


def as_account(healthd: Healthd, level: str) -> Healthd:
    number = ACCOUNTS[level]
    healthd.prefix = ("setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups")
    return healthd


def until_sacct_says(cluster: SlurmCluster, job: str, words: str) -> list[str]:
    """Return the job's records, oldest first, one per run. slurmdbd lags behind slurmctld."""
    end = time.monotonic() + 120
    command = ("sacct", "-X", "-n", "-P", "-D", "-j", job, "-o", "State,AdminComment")
    while words not in (text := cluster.run(*command)):
        assert time.monotonic() < end, text
        time.sleep(0.2)
    return text.splitlines()


def test_sacct_shows_the_user_why_the_job_was_requeued(cluster: SlurmCluster) -> None:
    healthd = Healthd(cluster, "n1")
    job = healthd.running("sleep 600")
    fault = faulty()
    assert healthd.look(fault).requeued == (job,)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(fault.fault_time))
    words = f"healthd: node n1: {XID.removeprefix('healthd: ')} at {when}"
    assert f"REQUEUED|{words}" in until_sacct_says(cluster, job, words)
    assert healthd.look(HEALTHY).settled
    run_again(cluster, job, "n1")
    cluster.run("scancel", job)
    last = until_sacct_says(cluster, job, "CANCELLED")[-1]
    assert last.startswith("CANCELLED")
    assert last.endswith(f"|{words}"), "the next run of the job keeps the comment"


def test_sacct_shows_the_user_of_a_job_that_cannot_be_requeued_what_hit_it(cluster: SlurmCluster) -> None:
    healthd = Healthd(cluster, "n2")
    job = healthd.running("sleep 600", "--no-requeue")
    assert dict(healthd.look(faulty()).not_requeued) == {job: "submitted with --no-requeue"}
    cluster.run("scancel", job)
    assert "healthd: node n2: gpu_xid/79 " in until_sacct_says(cluster, job, "CANCELLED")[-1]


def test_an_operators_account_that_may_requeue_but_not_drain_is_trouble_and_requeues_nothing(
    cluster: SlurmCluster,
) -> None:
    healthd = Healthd(cluster, "n3")
    job = healthd.running("sleep 600")
    as_account(healthd, "Operator")
    report = healthd.look(faulty())
    assert "Invalid user id: only root, SlurmUser or a Slurm administrator" in report.problem
    assert not report.settled
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")
    # The account could requeue, but the job would return to the node because it is not drained.
    cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=fan broken")
    assert healthd.look(faulty()).requeued == (job,)


def test_an_administrators_account_is_enough(cluster: SlurmCluster) -> None:
    healthd = as_account(Healthd(cluster, "n4"), "Administrator")
    assert healthd.look(faulty(condition(Severity.DEGRADED))).owner is Owner.HEALTHD
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    assert cluster.wait_state("n4", "IDLE", without=("DRAIN",)).reason == ""
