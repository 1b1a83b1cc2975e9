"""Reconciling with a real slurmctld and real slurmds: State, Reason and owner after typical events in the field."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_versions
from frozen import wait_for_d_state
from msgspec.structs import replace
from requirements import require_programs
from slurm_cluster import SHORT_TIMEOUT, SlurmCluster
from slurm_look import (
    ACT,
    HEALTHY,
    XID,
    NodeController,
    condition,
    drain,
    end_jobs_and_resume,
    faulty,
    is_drained,
    listed_pids,
    make_idle,
    restart_requeued_job,
    resume,
    wait_until_listed,
    wait_until_not_listed,
    with_every_slurm,
    with_slurm,
    write_script,
)
from waiting import until

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.policy import Owner, Policy
from healthd.agent.slurm.reconcile import ReconcileReport
from healthd.common.codec import dump, load
from healthd.common.model import (
    DrainRecord,
    Leave,
    Mode,
    Resume,
    Severity,
    Verdict,
)
from healthd.common.slurm import commands
from healthd.common.slurm.commands import Command


class Killed(Exception):
    """The daemon was killed with SIGKILL at this point."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reboot = write_script(tmp_path_factory.mktemp("programs") / "reboot", "exit 0")
    # KillWait: the test may notice an ending job this late.
    more = [f"RebootProgram={reboot}", "ResumeTimeout=600", "KillWait=15"]
    version = getattr(request, "param", None)
    # slurmd_timeout: slurmctld makes a node register again after each third of the timeout, and after a boot.
    with SlurmCluster(nodes=8, slurmd_timeout=600, extra_conf=more, version=version) as running:
        yield running


NEXT_NODE = itertools.cycle(["n1", "n2", "n3", "n4", "n5"])


@pytest.fixture
def healthd(cluster: SlurmCluster) -> Iterator[NodeController]:
    """Yield a healthd on an idle node. Nodes are used in turn because a resumed one needs a second until it
    responds."""
    name = next(NEXT_NODE)
    make_idle(cluster, name)
    yield NodeController(cluster, name)
    end_jobs_and_resume(cluster, name)


# Drain, requeue, resume.


@with_every_slurm
def test_degraded_fault_drains_with_reason_and_lets_job_run(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")
    report = healthd.reconcile_once(faulty(condition(Severity.DEGRADED)))
    assert report.settled
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)
    assert healthd.cluster.job(job)["JobState"] == "RUNNING"


@with_every_slurm
def test_existing_drain_costs_two_small_rpcs_per_round_and_keeps_time_stamp(healthd: NodeController) -> None:
    verdict = faulty(condition(Severity.DEGRADED))
    healthd.reconcile_once(verdict)
    stamp, before = healthd.state().reason_time, healthd.cluster.sdiag_counts()
    time.sleep(1.1)
    assert healthd.reconcile_once(verdict).settled
    after = healthd.cluster.sdiag_counts()
    spent = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    assert {name for name in spent if is_request(name)} == {"REQUEST_NODE_INFO_SINGLE", "REQUEST_PARTITION_INFO"}
    assert healthd.state().reason_time == stamp


def is_request(name: str) -> bool:
    """Return whether the RPC comes from healthd, and is neither slurmd's report of an ended job nor sdiag's query."""
    other_requests = ("REQUEST_STATS_INFO", "REQUEST_COMPLETE", "REQUEST_STEP_COMPLETE")
    return name.startswith("REQUEST") and not name.startswith(other_requests)


# The node, the fleet, the active slurmctld, the node once more, the change, the node, the fleet.
ROUND_REQUESTS = {"REQUEST_NODE_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1}
COUNT_REQUESTS = {"REQUEST_NODE_INFO": 1, "REQUEST_PARTITION_INFO": 1}
CONTROLLER_REQUESTS = {"REQUEST_BUILD_INFO": 1, "REQUEST_PING": 1}
DRAIN_REQUESTS = (
    Counter(CONTROLLER_REQUESTS)
    + Counter(ROUND_REQUESTS)
    + Counter(ROUND_REQUESTS)
    + Counter(COUNT_REQUESTS)
    + Counter({"REQUEST_UPDATE_NODE": 1})
    + Counter(ROUND_REQUESTS)
    + Counter(COUNT_REQUESTS)
)
JOB_REQUESTS = {"REQUEST_JOB_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1, "REQUEST_FED_INFO": 1}


@with_every_slurm
def test_each_decision_costs_documented_rpcs(healthd: NodeController) -> None:
    cluster = healthd.cluster
    job = healthd.start_job("sleep 600")
    spared = healthd.start_job("sleep 600", "--no-requeue")
    listpids_command = ["scontrol", "listpids", "*", healthd.node]
    until(
        lambda: (
            "not exist" not in subprocess.run(listpids_command, env=cluster.env, capture_output=True, text=True).stderr
        ),
        "their steps are running",
    )
    time.sleep(1)

    def cost(verdict: Verdict) -> dict[str, int]:
        before = Counter(cluster.sdiag_counts())
        assert healthd.reconcile_once(verdict).problem == ""
        spent = Counter(cluster.sdiag_counts()) - before
        return {name: count for name, count in spent.items() if is_request(name)}

    def costs(*parts: dict[str, int], **more: int) -> dict[str, int]:
        return dict(sum(map(Counter, parts), Counter(more)))

    degraded = faulty(condition(Severity.DEGRADED))
    assert cost(HEALTHY) == ROUND_REQUESTS
    assert cost(degraded) == DRAIN_REQUESTS
    assert cost(degraded) == ROUND_REQUESTS
    fault = faulty()
    victim_requests = costs(JOB_REQUESTS, JOB_REQUESTS, REQUEST_UPDATE_JOB=1, REQUEST_JOB_REQUEUE=1)
    assert cost(fault) == costs(ROUND_REQUESTS, victim_requests, JOB_REQUESTS, REQUEST_UPDATE_JOB=1)
    wait_until_not_listed(cluster, job, healthd.node)
    assert cost(fault) == costs(ROUND_REQUESTS, JOB_REQUESTS), "the other job is still here, and has its comment"
    cluster.run("scancel", spared)
    cluster.wait_state(healthd.node, "IDLE", without=("COMPLETING",))
    assert cost(fault) == ROUND_REQUESTS
    assert cost(HEALTHY) == costs(
        ROUND_REQUESTS, CONTROLLER_REQUESTS, ROUND_REQUESTS, ROUND_REQUESTS, REQUEST_UPDATE_NODE=1
    )
    healthd.reconcile_once(degraded)
    # As if healthd's own resume and the start of slurmctld were long ago.
    healthd.record = replace(healthd.record, confirmed_at=time.time() + 3, resume_sent_at=0.0)
    resume(cluster, healthd.node)
    assert cost(degraded) == costs(ROUND_REQUESTS, REQUEST_BUILD_INFO=1, REQUEST_PING=1)
    shared_fault = faulty(condition(Severity.DEGRADED, "mount/hang", shared_cause=True))
    assert cost(shared_fault) == costs(ROUND_REQUESTS, REQUEST_PARTITION_INFO=1), "a wait precedes the count"
    assert healthd.record.hold is not None
    # With so few nodes the random wait is at most half a second.
    hold = replace(healthd.record.hold, until=time.time() + 60)
    healthd.record = replace(healthd.record, hold=hold)
    assert cost(shared_fault) == ROUND_REQUESTS
    healthd.record = replace(healthd.record, hold=replace(hold, until=0.0))
    healthd.policy = replace(ACT, fleet=FleetLimits(limit_percent=0, limit_min_nodes=0))
    assert cost(shared_fault) == ROUND_REQUESTS, "so late a new wait begins"
    healthd.record = replace(healthd.record, hold=replace(healthd.record.hold, until=time.time()))
    assert cost(shared_fault) == costs(ROUND_REQUESTS, COUNT_REQUESTS), "held"
    assert healthd.record.hold.times == 1
    healthd.policy, healthd.record = (
        ACT,
        replace(healthd.record, hold=replace(healthd.record.hold, until=time.time())),
    )
    assert cost(shared_fault) == DRAIN_REQUESTS
    assert cost(HEALTHY) == costs(
        ROUND_REQUESTS, CONTROLLER_REQUESTS, ROUND_REQUESTS, ROUND_REQUESTS, REQUEST_UPDATE_NODE=1
    )


@with_every_slurm
def test_critical_fault_requeues_only_batch_jobs_started_before_it(healthd: NodeController) -> None:
    cluster = healthd.cluster
    victim = healthd.start_job("sleep 600")
    no_requeue = healthd.start_job("sleep 600", "--no-requeue")
    with subprocess.Popen(["srun", "-w", healthd.node, "-n1", "sleep", "600"], env=cluster.env, cwd="/") as srun:
        interactive = str(int(no_requeue) + 1)
        wait_until_listed(cluster, interactive, healthd.node)
        fault_time = time.time()
        time.sleep(1.1)
        later = healthd.start_job("sleep 600")
        report = healthd.reconcile_once(faulty(fault_time=fault_time))
        states = {job: cluster.job(job)["JobState"] for job in (no_requeue, interactive, later)}
        cluster.run("scancel", interactive)
        srun.wait(120)
    assert report.requeued == (victim,)
    assert dict(report.not_requeued).keys() == {no_requeue, interactive, later}
    assert set(states.values()) == {"RUNNING"}
    assert cluster.job(victim)["Restarts"] == "1"
    assert is_drained(healthd.state(), XID)
    healthd.reconcile_once(faulty(fault_time=fault_time))
    assert sum(argv[1] == "requeue" for argv in healthd.change_commands()) == 1


@with_every_slurm
@pytest.mark.parametrize("is_held", [False, True], ids=["requeue", "requeuehold"])
def test_requeue_of_array_task_leaves_other_tasks_running(healthd: NodeController, is_held: bool) -> None:
    cluster = healthd.cluster
    array = cluster.sbatch("sleep 600", "-n1", "--array=1-2", "--nodes=1", "--exclusive", "--exclude=n1,n2,n3,n4,n5,n8")
    until(lambda: cluster.run("squeue", "-h", "-t", "R", "-j", array).count("\n") == 2, "both tasks run")
    nodes = {task: cluster.run("squeue", "-h", "-j", f"{array}_{task}", "-o", "%N").strip() for task in (1, 2)}
    policy = replace(ACT, max_restarts=0) if is_held else ACT
    node_controller = NodeController(cluster, nodes[2], policy)  # the job id of the last task is that of the array
    try:
        wait_until_listed(cluster, cluster.job(f"{array}_2")["JobId"], nodes[2])
        report = node_controller.reconcile_once(faulty())
        assert report.requeued == (f"{array}_2",)
        assert report.held_jobs == report.requeued * is_held
        assert cluster.run("squeue", "-h", "-j", f"{array}_1", "-o", "%T").strip() == "RUNNING"
    finally:
        cluster.run("scancel", array)
        end_jobs_and_resume(cluster, nodes[2])


def test_requeue_of_one_part_requeues_whole_heterogeneous_job(healthd: NodeController) -> None:
    cluster = healthd.cluster
    options = ("-wn8", "-n1", ":", f"-w{healthd.node}", "-n1", "--wrap", "srun --het-group=0,1 sleep 600")
    leader = cluster.run("sbatch", "--parsable", "-o/dev/null", "--chdir=/tmp", *options).strip()
    try:
        cluster.wait_job(leader, "RUNNING")
        wait_until_listed(cluster, str(int(leader) + 1), healthd.node)
        assert healthd.reconcile_once(faulty()).problem == ""
        assert cluster.job(leader)["Restarts"] == "1"
    finally:
        cluster.run("scancel", leader)


@with_every_slurm
def test_fault_becoming_critical_requeues_on_drained_node(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")
    healthd.reconcile_once(faulty(condition(Severity.DEGRADED)))
    assert healthd.reconcile_once(faulty()).requeued == (job,)
    assert len(healthd.change_commands()) == 2


@with_every_slurm
def test_job_ending_between_read_and_requeue_is_not_rerun(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")

    def cancel_job(command: Command) -> None:
        if command.argv[1] == "requeue":
            healthd.cluster.run("scancel", job)
            healthd.cluster.wait_job(job, "CANCELLED")

    healthd.before = cancel_job
    report = healthd.reconcile_once(faulty())
    assert report.requeued == ()
    assert report.settled
    job_record = healthd.cluster.job(job)
    assert (job_record["JobState"], job_record["Restarts"]) == ("CANCELLED", "0")


@with_every_slurm
def test_job_over_max_restarts_is_held_until_released(healthd: NodeController) -> None:
    cluster = healthd.cluster
    job = healthd.start_job("sleep 600")
    healthd.policy = replace(ACT, max_restarts=0)
    report = healthd.reconcile_once(faulty())
    assert (report.requeued, report.held_jobs) == ((job,), (job,))
    held = cluster.wait_job(job, "PENDING")
    assert (held["Restarts"], held["Priority"], held["Reason"]) == ("1", "0", "job_requeued_in_held_state")
    cluster.run("scontrol", "release", job)
    assert cluster.job(job)["Priority"] != "0"


def test_every_restart_of_job_counts(healthd: NodeController) -> None:
    cluster = healthd.cluster
    job = healthd.start_job("sleep 600")
    healthd.policy = replace(ACT, max_restarts=1)
    assert healthd.reconcile_once(faulty()).held_jobs == ()
    assert healthd.reconcile_once(HEALTHY).settled
    restart_requeued_job(cluster, job, healthd.node)
    wait_until_listed(cluster, job, healthd.node)
    time.sleep(1.1)
    assert healthd.reconcile_once(faulty()).held_jobs == (job,)
    assert cluster.wait_job(job, "PENDING")["Restarts"] == "2"


@with_every_slurm
def test_hit_jobs_get_admin_comment_and_later_jobs_do_not(healthd: NodeController) -> None:
    cluster = healthd.cluster
    victim = healthd.start_job("sleep 600")
    no_requeue = healthd.start_job("sleep 600", "--no-requeue")
    cluster.run("scontrol", "update", f"JobId={no_requeue}", "AdminComment=reserved, for: RMA=7")
    fault_time = time.time()
    time.sleep(1.1)
    later = healthd.start_job("sleep 600")
    healthd.reconcile_once(faulty(fault_time=fault_time))
    fault_time_text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(fault_time))
    comment = f"healthd: node {healthd.node}: {XID.removeprefix('healthd: ')} at {fault_time_text}"
    comments = {job: cluster.admin_comment(job) for job in (victim, no_requeue, later)}
    assert comments == {victim: comment, no_requeue: f"reserved, for: RMA=7; {comment}", later: ""}
    healthd.reconcile_once(faulty(fault_time=time.time()))
    assert cluster.admin_comment(no_requeue) == comments[no_requeue], "each run of a job gets one comment"


@pytest.mark.parametrize(
    "existing", ["two  blanks\tand caf\u00e9", "two\nlines", "\u00e9" * 600], ids=["odd", "lines", "long"]
)
def test_existing_admin_comment_is_kept(healthd: NodeController, existing: str) -> None:
    cluster = healthd.cluster
    job = healthd.start_job("sleep 600", "--no-requeue")
    cluster.run("scontrol", "update", f"JobId={job}", f"AdminComment={existing}")
    healthd.reconcile_once(faulty())
    shown = cluster.run("scontrol", "show", "job", job).partition("AdminComment=")[2]
    assert shown.startswith(existing)
    assert ("; healthd: node" in shown) == (len(existing) < 100), "a comment as long as Slurm's column may be truncated"


@pytest.mark.parametrize("step", ["update", "requeue"])
def test_job_on_two_failing_nodes_is_requeued_once(healthd: NodeController, step: str) -> None:
    cluster = healthd.cluster
    other = NodeController(cluster, "n8")
    make_idle(cluster, "n8")
    nodes = f"{healthd.node},n8"
    job = cluster.sbatch("srun sleep 600", "-N2", "-w", nodes)
    try:
        cluster.wait_job(job, "RUNNING")
        for name in (healthd.node, "n8"):
            wait_until_listed(cluster, job, name)
        fault = faulty()
        reports: list[ReconcileReport] = []

        def fail_too(command: Command) -> None:
            if command.argv[1] == step and not reports:
                reports.append(other.reconcile_until_settled(fault))

        healthd.before = fail_too
        reports.append(healthd.reconcile_until_settled(fault))
        assert cluster.job(job)["Restarts"] == "1"
        assert all(report.owner is Owner.HEALTHD for report in reports)
        assert "DRAIN" in cluster.node("n8").flags
        assert "DRAIN" in healthd.state().flags
    finally:
        cluster.run("scancel", job)
        end_jobs_and_resume(cluster, "n8")


def test_ending_job_is_not_requeued(healthd: NodeController) -> None:
    cluster = healthd.cluster
    job = healthd.start_job("trap '' TERM; sleep 600 & sleep 600")
    cluster.run("scancel", job)
    cluster.wait_state(healthd.node, "COMPLETING")
    assert healthd.reconcile_once(faulty()).requeued == ()
    cluster.wait_state(healthd.node, "IDLE", "DRAIN", without=("COMPLETING",))
    job_record = cluster.job(job)
    assert (job_record["JobState"], job_record["Restarts"]) == ("CANCELLED", "0")


def test_dead_slurmstepd_does_not_block_requeue_of_other_jobs(healthd: NodeController) -> None:
    cluster = healthd.cluster
    lost_job, job = healthd.start_job("sleep 600"), healthd.start_job("sleep 600")
    cluster.kill_slurmstepd(lost_job)
    try:
        report = healthd.reconcile_once(faulty())
        assert report.requeued == (job,)
        assert report.problem.startswith("scontrol listpids: Unable to connect to slurmstepd")
        assert cluster.job(lost_job)["JobState"] == "RUNNING"
    finally:
        cluster.remove_dead_slurmstepd(lost_job)


def test_allocation_without_script_runs_on_and_gets_comment(healthd: NodeController) -> None:
    cluster = healthd.cluster
    command = ["salloc", "-w", healthd.node, "-n1", "--no-shell", "-J", "held"]
    subprocess.run(command, env=cluster.env, cwd="/", capture_output=True, check=True)
    job = cluster.run("squeue", "-h", "-n", "held", "-t", "R", "-o", "%i").strip()
    with subprocess.Popen(["srun", f"--jobid={job}", "sleep", "600"], env=cluster.env, cwd="/") as step:
        wait_until_listed(cluster, job, healthd.node)
        report = healthd.reconcile_once(faulty())
        assert dict(report.not_requeued) == {job: "started by srun or salloc: only batch jobs can be requeued"}
        assert cluster.job(job)["JobState"] == "RUNNING"
        assert cluster.admin_comment(job).startswith(f"healthd: node {healthd.node}: gpu_xid/79 ")
        cluster.run("scancel", job)
        step.wait(120)


@with_every_slurm
def test_only_drains_of_healthd_are_resumed(healthd: NodeController) -> None:
    healthd.reconcile_once(faulty())
    report = healthd.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Resume)
    assert report.settled
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    time.sleep(1.1)  # time stamps of Slurm have whole seconds
    for reason in ("fan broken", XID):
        drain(healthd.cluster, healthd.node, reason)
        assert not isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
        assert is_drained(healthd.state(), reason)


def test_drain_with_renamed_code_stays_owned(healthd: NodeController) -> None:
    old, new = (condition(Severity.DEGRADED, f"gpu_xid/{name}") for name in ("79", "lost"))
    healthd.reconcile_once(faulty(old))
    report = healthd.reconcile_once(faulty(new))
    assert report.owner is Owner.HEALTHD
    assert healthd.state().reason.startswith("healthd: gpu_xid/lost 0000:1b:00.0: ")
    healthd.reconcile_once(faulty(old))
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_unrecorded_drain_in_our_format_is_adopted_and_never_resumed(healthd: NodeController) -> None:
    drain(healthd.cluster, healthd.node, "healthd: mount/missing /data: not mounted")
    report = healthd.reconcile_once(HEALTHY)
    assert report.adopted is not None
    assert (report.adopted.code, report.adopted.subject) == ("mount/missing", "/data")
    assert report.owner is Owner.UNRECORDED_HEALTHD
    assert healthd.change_commands() == []


def test_observe_mode_changes_nothing_and_reports_decision(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")
    healthd.policy = Policy()
    decision = healthd.reconcile_once(faulty()).decision
    assert isinstance(decision, Leave)
    assert decision.would == f'drain with "{XID}" and requeue'
    assert healthd.change_commands() == []
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    assert healthd.cluster.job(job)["JobState"] == "RUNNING"


# Operators.


@with_every_slurm
def test_earlier_operator_drain_is_kept_and_victims_are_requeued(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")
    drain(healthd.cluster, healthd.node, "fan broken")
    report = healthd.reconcile_once(faulty())
    assert report.requeued == (job,)
    assert report.owner is Owner.OTHER
    assert is_drained(healthd.state(), "fan broken")
    assert healthd.reconcile_once(HEALTHY).settled
    assert is_drained(healthd.state(), "fan broken")


@pytest.mark.parametrize("reason", ["RMA 4711", f"{XID}, RMA 4711"])
def test_operator_changing_our_reason_takes_over_node(healthd: NodeController, reason: str) -> None:
    healthd.reconcile_once(faulty())
    drain(healthd.cluster, healthd.node, reason)
    for verdict in (faulty(), HEALTHY):
        report = healthd.reconcile_once(verdict)
        assert report.owner is Owner.OTHER
        assert is_drained(healthd.state(), reason)
    resume(healthd.cluster, healthd.node)
    assert healthd.reconcile_once(faulty()).acknowledged


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.015, 0.02, 0.03])
def test_simultaneous_operator_drain_has_one_owner(healthd: NodeController, delay: float) -> None:
    operator = threading.Timer(delay, drain, (healthd.cluster, healthd.node, "fan broken"))
    operator.start()
    healthd.reconcile_once(faulty())
    operator.join()
    report = healthd.reconcile_once(faulty())
    node = healthd.state()
    assert (report.owner, node.reason) in [(Owner.HEALTHD, XID), (Owner.OTHER, "fan broken")]
    assert "DRAIN" in node.flags


@with_every_slurm
def test_operator_drain_during_fleet_count_prevents_ours(healthd: NodeController) -> None:
    def drain_now(command: Command) -> None:
        if command.argv == commands.fleet():
            drain(healthd.cluster, healthd.node, "fan broken")

    healthd.before = drain_now
    report = healthd.reconcile_once(faulty())
    assert (report.owner, healthd.change_commands()) == (Owner.OTHER, [])
    assert is_drained(healthd.state(), "fan broken")
    healthd.reconcile_once(HEALTHY)
    assert is_drained(healthd.state(), "fan broken"), "there was never a drain of healthd to lift"


@with_slurm("24.11")
def test_operator_reason_between_read_and_resume_is_drained_again(healthd: NodeController) -> None:
    """24.11 keeps the reason of a finished drain, with its time stamp; 22.05 and 26.05 drop it."""

    def take_over(command: Command) -> None:
        if "State=UNDRAIN" in command.argv:
            drain(healthd.cluster, healthd.node, "fan broken")

    healthd.reconcile_once(faulty())
    healthd.before = take_over
    report = healthd.reconcile_once(HEALTHY)
    assert report.owner is Owner.OTHER
    assert is_drained(healthd.state(), "fan broken")
    healthd.reconcile_once(HEALTHY)
    assert is_drained(healthd.state(), "fan broken")


def test_operator_reason_between_command_and_read_is_kept(healthd: NodeController) -> None:
    def take_over(command: Command) -> None:
        if command.argv[1] == "update":
            drain(healthd.cluster, healthd.node, "fan broken")

    healthd.after = take_over
    report = healthd.reconcile_once(faulty())
    assert report.owner is Owner.OTHER
    assert is_drained(healthd.state(), "fan broken")
    healthd.reconcile_once(HEALTHY)
    assert is_drained(healthd.state(), "fan broken")


@with_every_slurm
def test_operator_resume_acknowledges_and_is_not_undone(healthd: NodeController) -> None:
    cluster = healthd.cluster
    healthd.reconcile_once(faulty())
    # As if slurmctld had run for longer than the clocks may differ.
    healthd.record = replace(healthd.record, confirmed_at=time.time() + 3)
    resume(cluster, healthd.node)
    report = healthd.reconcile_once(faulty())
    assert report.acknowledged
    assert not report.settled
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    assert replace(healthd.record, ended_drain=None, stored_count=None) == DrainRecord()
    # A fault a check reports afterwards drains again.
    assert healthd.reconcile_once(faulty(condition(code="gpu_access/lost"))).owner is Owner.HEALTHD


@with_every_slurm
def test_operator_resume_soon_after_ours_acknowledges(healthd: NodeController) -> None:
    healthd.policy = replace(ACT, requeue_retry_seconds=90)
    healthd.reconcile_once(faulty())
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    assert healthd.reconcile_once(faulty()).owner is Owner.HEALTHD
    # As if slurmctld had run for longer than the clocks may differ.
    healthd.record = replace(healthd.record, confirmed_at=time.time() + 3)
    resume(healthd.cluster, healthd.node)
    assert healthd.reconcile_once(faulty()).acknowledged
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_node_set_down_by_operator_keeps_its_reason(healthd: NodeController) -> None:
    healthd.cluster.run("scontrol", "update", f"NodeName={healthd.node}", "State=DOWN", "Reason=fan broken")
    assert healthd.reconcile_once(faulty()).owner is Owner.OTHER
    node = healthd.state()
    assert (node.reason, "DRAIN" in node.flags) == ("fan broken", False)


# Drains that disappear or change.


def test_drain_lost_by_killed_slurmctld_is_restored(healthd: NodeController) -> None:
    node_state = save_node_state(healthd)
    healthd.reconcile_once(faulty())
    restart_with_node_state(node_state, healthd)
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    report = healthd.reconcile_until_settled(faulty())
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)


@with_slurm(None, "24.11")
def test_drain_restored_by_killed_slurmctld_after_resume_is_lifted(healthd: NodeController) -> None:
    cluster = healthd.cluster
    healthd.reconcile_once(faulty(condition(Severity.DEGRADED)))
    node_state = save_node_state(healthd)
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    restart_with_node_state(node_state, healthd)
    assert is_drained(healthd.state(), XID)
    healthd.record = json_round_trip(healthd.record)  # also after a restart of the daemon
    report = healthd.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Resume)
    assert report.adopted is None
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN",))


@with_every_slurm
def test_older_drain_restored_by_slurmctld_is_lifted(healthd: NodeController) -> None:
    cluster = healthd.cluster
    healthd.reconcile_once(faulty(condition(Severity.DEGRADED)))
    node_state = save_node_state(healthd)
    healthd.reconcile_once(HEALTHY)
    healthd.reconcile_once(faulty(condition(Severity.DEGRADED, "gpu_xid/48")))
    healthd.reconcile_once(HEALTHY)
    healthd.record = json_round_trip(healthd.record)  # also after a restart of the daemon
    restart_with_node_state(node_state, healthd)
    assert is_drained(healthd.state(), XID)
    report = healthd.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Resume)
    assert report.adopted is None
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN",))


def save_node_state(healthd: NodeController) -> bytes:
    """Return the nodes as written by slurmctld up to now, which happens at most every 5 s."""
    cluster, file = healthd.cluster, healthd.cluster.directory / "state/node_state"
    mark = uuid.uuid4().hex
    cluster.run("scontrol", "update", f"NodeName={healthd.node}", f"Comment={mark}")
    until(lambda: file.exists() and mark.encode() in file.read_bytes(), "slurmctld saves the node")
    return file.read_bytes()


def restart_with_node_state(node_state: bytes, healthd: NodeController) -> None:
    """Kill slurmctld before it saves the latest changes to the nodes, and start it."""
    healthd.cluster.kill_slurmctld()
    (healthd.cluster.directory / "state/node_state").write_bytes(node_state)
    healthd.cluster.start_slurmctld()


def json_round_trip(record: DrainRecord) -> DrainRecord:
    return load(DrainRecord, json.loads(json.dumps(dump(record))), "memory")


@with_every_slurm
def test_drain_removed_by_slurm_reboot_is_restored(healthd: NodeController) -> None:
    cluster = healthd.cluster
    healthd.reconcile_once(faulty())
    cluster.run("scontrol", "reboot", "ASAP", "nextstate=RESUME", healthd.node)
    cluster.wait_state(healthd.node, "REBOOT_ISSUED", reason=f"{XID} : reboot issued")
    report = healthd.reconcile_once(HEALTHY)
    assert report.owner is Owner.HEALTHD
    assert not report.settled
    assert isinstance(report.decision, Leave), "a pending reboot is not cancelled"
    cluster.stop_slurmd(healthd.node)
    cluster.start_slurmd(healthd.node, "-b")
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN",))
    # slurmctld computes the boot time from the node's age in the registration: a late one looks like a second boot,
    # after which the node is DOWN. The next registration has the boot time of the machine itself.
    cluster.stop_slurmd(healthd.node)
    cluster.start_slurmd(healthd.node)
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN", "NOT_RESPONDING"))
    healthd.boot_id = "boot-2"
    report = healthd.reconcile_once(faulty())
    assert not report.acknowledged
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)
    assert healthd.reconcile_once(HEALTHY).settled
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN",))


@with_slurm(None, "24.11")  # 26.05 waits for more than a minute
def test_kill_task_failed_over_our_reason_stays_owned(cluster: SlurmCluster) -> None:
    require_programs("fsfreeze", "mkfs.ext4", packages="util-linux e2fsprogs")
    conf = ["UnkillableStepTimeout=2"]  # no other job may be abandoned so early
    with SlurmCluster(nodes=1, extra_conf=conf, version=cluster.version) as short_cluster:
        healthd = NodeController(short_cluster, "n1")
        with frozen_mount(short_cluster.directory / "frozen") as frozen:
            job = healthd.start_job(f"exec touch {frozen}/x")
            # Slurm also lists the shell of the script while it becomes touch.
            until(lambda: len(listed_pids(short_cluster, job, "n1")) == 1, "the job is one process")
            (pid,) = listed_pids(short_cluster, job, "n1")
            wait_for_d_state(pid)
            assert healthd.reconcile_once(faulty()).requeued == (job,)
            short_cluster.wait_state("n1", "DRAIN", reason="Kill task failed")
            report = healthd.reconcile_once(faulty())
            assert report.owner is Owner.HEALTHD
            assert healthd.state().reason.startswith("Kill task failed")
        short_cluster.run("scancel", job)
        assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
        short_cluster.wait_state("n1", "IDLE", without=("DRAIN", "COMPLETING"))


@contextlib.contextmanager
def frozen_mount(mount_point: Path) -> Iterator[Path]:
    """Mount a frozen ext4 from a loop device: its writers stay in D state until it is thawed."""
    image = mount_point.with_suffix(".img")
    mount_point.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount_point], check=True)
    try:
        subprocess.run(["fsfreeze", "-f", mount_point], check=True)
        try:
            yield mount_point
        finally:
            subprocess.run(["fsfreeze", "-u", mount_point], check=True)
    finally:
        subprocess.run(["umount", "-l", mount_point], check=True)


@with_every_slurm
def test_drain_survives_unexpected_reboot_and_stays_on_down_node(healthd: NodeController) -> None:
    cluster = healthd.cluster
    healthd.start_job("sleep 600")  # from 24.11 on a drained node without jobs stays up
    healthd.reconcile_once(faulty(condition(Severity.DEGRADED)))
    cluster.stop_slurmd(healthd.node)
    time.sleep(5.2)  # slurmctld records the last answer before it 2 s late or more, and compares whole seconds
    cluster.start_slurmd(healthd.node, "-b")
    cluster.wait_state(healthd.node, "DOWN", "DRAIN")
    healthd.boot_id = "boot-2"
    report = healthd.reconcile_once(HEALTHY)
    assert report.owner is Owner.HEALTHD
    assert not report.settled
    assert is_drained(healthd.state(), XID)
    cluster.run("scontrol", "update", f"NodeName={healthd.node}", "State=RESUME")
    assert healthd.reconcile_once(HEALTHY).acknowledged


# Failures of Slurm itself.


def test_stopped_slurmctld_is_problem_and_drain_follows(healthd: NodeController) -> None:
    healthd.cluster.kill_slurmctld(signal.SIGTERM)
    healthd.environment = healthd.cluster.short_timeout_environment
    report = healthd.reconcile_once(faulty())
    healthd.environment = {}
    healthd.cluster.start_slurmctld()
    assert "connect failure" in report.problem
    assert not report.settled
    assert isinstance(report.decision, Leave)
    assert report.decision.would.startswith("drain with "), "the intended change is reported all the same"
    assert healthd.reconcile_until_settled(faulty()).owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)


def test_drain_applied_late_by_hung_slurmctld_stays_owned(healthd: NodeController) -> None:
    def hang(command: Command) -> None:
        if command.argv[1] == "update":
            healthd.cluster.signal_slurmctld(signal.SIGSTOP)
            healthd.environment = healthd.cluster.short_timeout_environment

    healthd.before = hang
    try:
        report = healthd.reconcile_once(faulty())
    finally:
        healthd.cluster.signal_slurmctld(signal.SIGCONT)
    healthd.before, healthd.environment = lambda command: None, {}
    assert "Socket timed out" in report.problem
    healthd.cluster.wait_state(healthd.node, "DRAIN")
    report = healthd.reconcile_once(HEALTHY)  # the fault is gone meanwhile: the late drain must not stay for ever
    assert isinstance(report.decision, Resume)
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_requeue_applied_late_by_hung_slurmctld_is_sent_once(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")

    def hang(command: Command) -> None:
        if command.argv[1] == "requeue":
            healthd.cluster.signal_slurmctld(signal.SIGSTOP)
            healthd.environment = healthd.cluster.short_timeout_environment

    healthd.before = hang
    try:
        # scontrol requeue prints only this when no answer comes.
        assert "Unexpected message received" in healthd.reconcile_once(faulty()).problem
    finally:
        healthd.cluster.signal_slurmctld(signal.SIGCONT)
    healthd.before, healthd.environment = lambda command: None, {}
    healthd.cluster.wait_job(job, "PENDING")
    healthd.reconcile_until_settled(faulty())
    assert healthd.cluster.job(job)["Restarts"] == "1"
    assert sum(argv[1] == "requeue" for argv in healthd.change_commands()) == 1


# A network without any answer, not even a refusal: no host here has the address, and no router forwards it.
BLACK_HOLE = 'ip link set lo up && ip route add 10.99.0.2 dev lo && exec "$@"'


def test_unreachable_slurmctld_is_problem_within_command_timeout(healthd: NodeController, tmp_path: Path) -> None:
    conf = (healthd.cluster.directory / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(conf.replace("(127.0.0.1)", "(10.99.0.2)"))
    healthd.policy = Policy(mode=Mode.ACT, command_timeout_seconds=2)
    healthd.prefix = ("unshare", "--net", "sh", "-c", BLACK_HOLE, "sh")
    healthd.environment = {"SLURM_CONF": f"{tmp_path}/slurm.conf"}
    started = time.monotonic()
    assert healthd.reconcile_once(faulty()).problem == "sinfo did not end in time"
    assert time.monotonic() - started < 60
    healthd.prefix, healthd.environment, healthd.policy = (), {}, ACT
    assert healthd.reconcile_until_settled(faulty()).owner is Owner.HEALTHD


def test_silent_slurmctld_is_problem(healthd: NodeController, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        conf = (healthd.cluster.directory / "slurm.conf").read_text()
        port = f"SlurmctldPort={silent.getsockname()[1]}"
        (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", port, conf) + SHORT_TIMEOUT)
        healthd.environment = {"SLURM_CONF": f"{tmp_path}/slurm.conf"}
        report = healthd.reconcile_once(faulty())
    assert report.problem.startswith("sinfo: ")
    assert not report.settled
    healthd.environment = {}
    assert healthd.reconcile_until_settled(faulty()).owner is Owner.HEALTHD


@contextlib.contextmanager
def slow_slurmctld(cluster: SlurmCluster) -> Iterator[None]:
    """Let slurmctld run only a tenth of the time."""
    finished = threading.Event()

    def stop_and_go() -> None:
        while not finished.is_set():
            cluster.signal_slurmctld(signal.SIGSTOP)
            time.sleep(0.45)
            cluster.signal_slurmctld(signal.SIGCONT)
            time.sleep(0.05)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def test_slow_slurmctld_drains_and_requeues_once() -> None:
    with SlurmCluster(nodes=1, message_timeout=60) as cluster:  # slow, but not slow enough to be abandoned
        healthd = NodeController(cluster, "n1", replace(ACT, command_timeout_seconds=100))
        job = healthd.start_job("sleep 600")
        with slow_slurmctld(cluster):
            report = healthd.reconcile_until_settled(faulty())
        assert report.owner is Owner.HEALTHD
        assert is_drained(healthd.state(), XID)
        assert cluster.job(job)["Restarts"] == "1"
        assert [argv[1] for argv in healthd.change_commands()] == ["update", "requeue"]


def test_slurmctld_restarted_during_reconciliation_gets_remaining_changes(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")
    healthd.cluster.wait_until_saved(job)
    restarted = []

    def restart(command: Command) -> None:
        if command.argv[1] in ("update", "requeue") and command.argv[1] not in restarted:
            restarted.append(command.argv[1])
            healthd.cluster.kill_slurmctld(signal.SIGTERM)
            healthd.cluster.start_slurmctld()

    healthd.before = restart
    assert healthd.reconcile_until_settled(faulty()).owner is Owner.HEALTHD
    assert restarted == ["update", "requeue"]
    assert is_drained(healthd.state(), XID)
    assert healthd.cluster.job(job)["Restarts"] == "1"


def test_upgraded_slurmctld_accepts_commands_of_older_client() -> None:
    slurm_versions.programs("26.05")
    with SlurmCluster(nodes=1, version="24.11") as cluster:
        healthd = NodeController(cluster, "n1")
        job = healthd.start_job("sleep 600", "--no-requeue")
        healthd.reconcile_once(faulty(condition(Severity.DEGRADED)))
        cluster.upgrade_slurmctld("26.05")
        cluster.wait_state("n1", "DRAIN", without=("UNKNOWN", "NOT_RESPONDING"))
        report = healthd.reconcile_until_settled(faulty())
        assert report.owner is Owner.HEALTHD
        assert is_drained(healthd.state(), XID)
        assert dict(report.not_requeued) == {job: "submitted with --no-requeue"}
        assert cluster.admin_comment(job).startswith("healthd: node n1: gpu_xid/79 ")
        assert isinstance(healthd.reconcile_until_settled(HEALTHY).decision, Resume)
        cluster.wait_state("n1", without=("DRAIN",))
        victim = healthd.start_job("sleep 600")
        assert healthd.reconcile_until_settled(faulty()).requeued == (victim,)


def test_dead_munge_is_problem_within_command_timeout(healthd: NodeController) -> None:
    healthd.policy = Policy(mode=Mode.ACT, command_timeout_seconds=1)
    healthd.cluster.kill_munged()
    try:
        started = time.monotonic()
        report = healthd.reconcile_once(faulty())
        assert time.monotonic() - started < 60
    finally:
        healthd.cluster.start_munged()
    assert report.problem == "sinfo did not end in time"


def test_missing_slurm_conf_is_problem(healthd: NodeController) -> None:
    healthd.policy = Policy(mode=Mode.ACT, command_timeout_seconds=2)
    healthd.environment = {"SLURM_CONF": "/nonexistent/slurm.conf"}
    assert healthd.reconcile_once(faulty()).problem.startswith("sinfo")


def test_missing_sinfo_is_problem(healthd: NodeController) -> None:
    healthd.prefix = ("/nonexistent/bin/env",)
    assert "No such file" in healthd.reconcile_once(faulty()).problem


@with_every_slurm
def test_missing_permission_is_problem_and_nothing_is_requeued(healthd: NodeController) -> None:
    job = healthd.start_job("sleep 600")
    healthd.prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    report = healthd.reconcile_once(faulty())
    assert "Invalid user id" in report.problem
    assert not report.settled
    assert healthd.cluster.job(job)["JobState"] == "RUNNING"
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_unknown_node_is_problem(cluster: SlurmCluster) -> None:
    assert NodeController(cluster, "n99").reconcile_once(faulty()).problem == 'Slurm has no node "n99" in any partition'


# Killed with SIGKILL.


@pytest.mark.parametrize("command_word", ["sinfo", "update", "listpids", "squeue", "requeue"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_daemon_killed_at_any_command_finishes_after_restart(
    healthd: NodeController, command_word: str, is_after: bool
) -> None:
    job = healthd.start_job("sleep 600")
    fault = faulty()

    def die(command: Command) -> None:
        if command_word in command.argv[:2]:
            raise Killed

    healthd.before, healthd.after = (lambda command: None, die) if is_after else (die, lambda command: None)
    with pytest.raises(Killed):
        healthd.reconcile_once(fault)
    healthd.before = healthd.after = lambda command: None
    report = healthd.reconcile_until_settled(fault)
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)
    assert healthd.cluster.job(job)["Restarts"] == "1"
    sent = sum(argv[1] == "requeue" for argv in healthd.change_commands())
    assert sent == 1
    with contextlib.suppress(Killed):
        healthd.before = lambda command: None
        assert healthd.reconcile_once(HEALTHY).settled
    assert healthd.state().flags.isdisjoint({"DRAIN"})


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_daemon_killed_at_own_resume_does_not_attribute_it_to_operator(healthd: NodeController, is_after: bool) -> None:
    healthd.reconcile_once(faulty())

    def die(command: Command) -> None:
        if "State=UNDRAIN" in command.argv:
            raise Killed

    healthd.before, healthd.after = (lambda command: None, die) if is_after else (die, lambda command: None)
    with pytest.raises(Killed):
        healthd.reconcile_once(HEALTHY)
    report = healthd.reconcile_once(faulty(condition(code="gpu_xid/48")))
    assert not report.acknowledged
    assert report.owner is Owner.HEALTHD
    assert healthd.state().reason.startswith("healthd: gpu_xid/48")


def test_import_does_not_load_subprocess() -> None:
    script = "import sys, healthd.agent.slurm; print('subprocess' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "False\n"
