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
from slurm_cluster import GIVE_UP, SlurmCluster
from slurm_look import (
    ACT,
    HEALTHY,
    XID,
    Healthd,
    condition,
    drain,
    end_jobs_and_resume,
    every_slurm,
    faulty,
    is_drained,
    listed,
    make_idle,
    on_slurm,
    program,
    resume,
    run_again,
    until_listed,
    until_not_listed,
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
    reboot = program(tmp_path_factory.mktemp("programs") / "reboot", "exit 0")
    # KillWait: the test may notice an ending job this late.
    more = [f"RebootProgram={reboot}", "ResumeTimeout=600", "KillWait=15"]
    version = getattr(request, "param", None)
    # slurmd_timeout: slurmctld makes a node register again after each third of the timeout, and after a boot.
    with SlurmCluster(nodes=8, slurmd_timeout=600, extra_conf=more, version=version) as running:
        yield running


TURN = itertools.cycle(["n1", "n2", "n3", "n4", "n5"])


@pytest.fixture
def healthd(cluster: SlurmCluster) -> Iterator[Healthd]:
    """Yield a healthd on an idle node. Nodes are used in turn because a resumed one needs a second until it
    responds."""
    name = next(TURN)
    make_idle(cluster, name)
    yield Healthd(cluster, name)
    end_jobs_and_resume(cluster, name)


# Drain, requeue, resume.


@every_slurm
def test_a_degraded_node_is_drained_with_our_reason_and_its_job_runs_on(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")
    report = healthd.look(faulty(condition(Severity.DEGRADED)))
    assert report.settled
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)
    assert healthd.cluster.job(job)["JobState"] == "RUNNING"


@every_slurm
def test_a_drain_that_stands_costs_two_small_rpcs_a_look_and_keeps_its_time_stamp(healthd: Healthd) -> None:
    verdict = faulty(condition(Severity.DEGRADED))
    healthd.look(verdict)
    stamp, before = healthd.state().reason_time, healthd.cluster.sdiag_counts()
    time.sleep(1.1)
    assert healthd.look(verdict).settled
    after = healthd.cluster.sdiag_counts()
    spent = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    assert {name for name in spent if is_asked(name)} == {"REQUEST_NODE_INFO_SINGLE", "REQUEST_PARTITION_INFO"}
    assert healthd.state().reason_time == stamp


def is_asked(name: str) -> bool:
    """Return whether the RPC comes from healthd, and is neither slurmd's report of an ended job nor sdiag's query."""
    others = ("REQUEST_STATS_INFO", "REQUEST_COMPLETE", "REQUEST_STEP_COMPLETE")
    return name.startswith("REQUEST") and not name.startswith(others)


# The node, the fleet, the active slurmctld, the node once more, the change, the node, the fleet.
LOOK = {"REQUEST_NODE_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1}
COUNT = {"REQUEST_NODE_INFO": 1, "REQUEST_PARTITION_INFO": 1}
CONTROLLER = {"REQUEST_BUILD_INFO": 1, "REQUEST_PING": 1}
DRAINED = (
    Counter(CONTROLLER)
    + Counter(LOOK)
    + Counter(LOOK)
    + Counter(COUNT)
    + Counter({"REQUEST_UPDATE_NODE": 1})
    + Counter(LOOK)
    + Counter(COUNT)
)
JOB = {"REQUEST_JOB_INFO_SINGLE": 1, "REQUEST_PARTITION_INFO": 1, "REQUEST_FED_INFO": 1}


@every_slurm
def test_each_decision_costs_slurmctld_what_the_documentation_says(healthd: Healthd) -> None:
    cluster = healthd.cluster
    job = healthd.running("sleep 600")
    spared = healthd.running("sleep 600", "--no-requeue")
    listed = ["scontrol", "listpids", "*", healthd.node]
    until(
        lambda: "not exist" not in subprocess.run(listed, env=cluster.env, capture_output=True, text=True).stderr,
        "their steps are running",
    )
    time.sleep(1)

    def cost(verdict: Verdict) -> dict[str, int]:
        before = Counter(cluster.sdiag_counts())
        assert healthd.look(verdict).problem == ""
        spent = Counter(cluster.sdiag_counts()) - before
        return {name: n for name, n in spent.items() if is_asked(name)}

    def costs(*parts: dict[str, int], **more: int) -> dict[str, int]:
        return dict(sum(map(Counter, parts), Counter(more)))

    degraded = faulty(condition(Severity.DEGRADED))
    assert cost(HEALTHY) == LOOK
    assert cost(degraded) == DRAINED
    assert cost(degraded) == LOOK
    fault = faulty()
    victim = costs(JOB, JOB, REQUEST_UPDATE_JOB=1, REQUEST_JOB_REQUEUE=1)
    assert cost(fault) == costs(LOOK, victim, JOB, REQUEST_UPDATE_JOB=1)
    until_not_listed(cluster, job, healthd.node)
    assert cost(fault) == costs(LOOK, JOB), "the other job is still here, and has its comment"
    cluster.run("scancel", spared)
    cluster.wait_state(healthd.node, "IDLE", without=("COMPLETING",))
    assert cost(fault) == LOOK
    assert cost(HEALTHY) == costs(LOOK, CONTROLLER, LOOK, LOOK, REQUEST_UPDATE_NODE=1)
    healthd.look(degraded)
    # As if healthd's own resume and the start of slurmctld were long ago.
    healthd.memory = replace(healthd.memory, confirmed_at=time.time() + 3, resume_sent_at=0.0)
    resume(cluster, healthd.node)
    assert cost(degraded) == costs(LOOK, REQUEST_BUILD_INFO=1, REQUEST_PING=1)
    shared = faulty(condition(Severity.DEGRADED, "mount/hang", shared_cause=True))
    assert cost(shared) == costs(LOOK, REQUEST_PARTITION_INFO=1), "a wait precedes the count"
    assert healthd.memory.hold is not None
    # With so few nodes the random wait is at most half a second.
    hold = replace(healthd.memory.hold, until=time.time() + 60)
    healthd.memory = replace(healthd.memory, hold=hold)
    assert cost(shared) == LOOK
    healthd.memory = replace(healthd.memory, hold=replace(hold, until=0.0))
    healthd.policy = replace(ACT, fleet=FleetLimits(limit_percent=0, limit_min_nodes=0))
    assert cost(shared) == LOOK, "so late a new wait begins"
    healthd.memory = replace(healthd.memory, hold=replace(healthd.memory.hold, until=time.time()))
    assert cost(shared) == costs(LOOK, COUNT), "held"
    assert healthd.memory.hold.times == 1
    healthd.policy, healthd.memory = (
        ACT,
        replace(healthd.memory, hold=replace(healthd.memory.hold, until=time.time())),
    )
    assert cost(shared) == DRAINED
    assert cost(HEALTHY) == costs(LOOK, CONTROLLER, LOOK, LOOK, REQUEST_UPDATE_NODE=1)


@every_slurm
def test_a_critical_fault_requeues_the_batch_jobs_that_started_before_it_and_only_those(healthd: Healthd) -> None:
    cluster = healthd.cluster
    victim = healthd.running("sleep 600")
    no_requeue = healthd.running("sleep 600", "--no-requeue")
    with subprocess.Popen(["srun", "-w", healthd.node, "-n1", "sleep", "600"], env=cluster.env, cwd="/") as srun:
        interactive = str(int(no_requeue) + 1)
        until_listed(cluster, interactive, healthd.node)
        fault_time = time.time()
        time.sleep(1.1)
        later = healthd.running("sleep 600")
        report = healthd.look(faulty(fault_time=fault_time))
        states = {job: cluster.job(job)["JobState"] for job in (no_requeue, interactive, later)}
        cluster.run("scancel", interactive)
        srun.wait(120)
    assert report.requeued == (victim,)
    assert dict(report.not_requeued).keys() == {no_requeue, interactive, later}
    assert set(states.values()) == {"RUNNING"}
    assert cluster.job(victim)["Restarts"] == "1"
    assert is_drained(healthd.state(), XID)
    healthd.look(faulty(fault_time=fault_time))
    assert sum(argv[1] == "requeue" for argv in healthd.changes()) == 1


@every_slurm
@pytest.mark.parametrize("is_held", [False, True], ids=["requeue", "requeuehold"])
def test_one_task_of_an_array_is_requeued_without_the_others(healthd: Healthd, is_held: bool) -> None:
    cluster = healthd.cluster
    array = cluster.sbatch("sleep 600", "-n1", "--array=1-2", "--nodes=1", "--exclusive", "--exclude=n1,n2,n3,n4,n5,n8")
    until(lambda: cluster.run("squeue", "-h", "-t", "R", "-j", array).count("\n") == 2, "both tasks run")
    nodes = {t: cluster.run("squeue", "-h", "-j", f"{array}_{t}", "-o", "%N").strip() for t in (1, 2)}
    policy = replace(ACT, max_restarts=0) if is_held else ACT
    here = Healthd(cluster, nodes[2], policy)  # the job id of the last task is that of the array
    try:
        until_listed(cluster, cluster.job(f"{array}_2")["JobId"], nodes[2])
        report = here.look(faulty())
        assert report.requeued == (f"{array}_2",)
        assert report.held_jobs == report.requeued * is_held
        assert cluster.run("squeue", "-h", "-j", f"{array}_1", "-o", "%T").strip() == "RUNNING"
    finally:
        cluster.run("scancel", array)
        end_jobs_and_resume(cluster, nodes[2])


def test_a_part_of_a_heterogeneous_job_requeues_the_whole_of_it(healthd: Healthd) -> None:
    cluster = healthd.cluster
    options = ("-wn8", "-n1", ":", f"-w{healthd.node}", "-n1", "--wrap", "srun --het-group=0,1 sleep 600")
    leader = cluster.run("sbatch", "--parsable", "-o/dev/null", "--chdir=/tmp", *options).strip()
    try:
        cluster.wait_job(leader, "RUNNING")
        until_listed(cluster, str(int(leader) + 1), healthd.node)
        assert healthd.look(faulty()).problem == ""
        assert cluster.job(leader)["Restarts"] == "1"
    finally:
        cluster.run("scancel", leader)


@every_slurm
def test_a_fault_that_becomes_critical_requeues_on_the_node_that_is_already_drained(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")
    healthd.look(faulty(condition(Severity.DEGRADED)))
    assert healthd.look(faulty()).requeued == (job,)
    assert len(healthd.changes()) == 2


@every_slurm
def test_a_job_that_ends_between_reading_and_requeueing_is_not_run_again(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")

    def end_it(command: Command) -> None:
        if command.argv[1] == "requeue":
            healthd.cluster.run("scancel", job)
            healthd.cluster.wait_job(job, "CANCELLED")

    healthd.before = end_it
    report = healthd.look(faulty())
    assert report.requeued == ()
    assert report.settled
    now = healthd.cluster.job(job)
    assert (now["JobState"], now["Restarts"]) == ("CANCELLED", "0")


@every_slurm
def test_a_job_that_was_restarted_too_often_is_held_until_it_is_released(healthd: Healthd) -> None:
    cluster = healthd.cluster
    job = healthd.running("sleep 600")
    healthd.policy = replace(ACT, max_restarts=0)
    report = healthd.look(faulty())
    assert (report.requeued, report.held_jobs) == ((job,), (job,))
    held = cluster.wait_job(job, "PENDING")
    assert (held["Restarts"], held["Priority"], held["Reason"]) == ("1", "0", "job_requeued_in_held_state")
    cluster.run("scontrol", "release", job)
    assert cluster.job(job)["Priority"] != "0"


def test_each_restart_of_a_job_counts(healthd: Healthd) -> None:
    cluster = healthd.cluster
    job = healthd.running("sleep 600")
    healthd.policy = replace(ACT, max_restarts=1)
    assert healthd.look(faulty()).held_jobs == ()
    assert healthd.look(HEALTHY).settled
    run_again(cluster, job, healthd.node)
    until_listed(cluster, job, healthd.node)
    time.sleep(1.1)
    assert healthd.look(faulty()).held_jobs == (job,)
    assert cluster.wait_job(job, "PENDING")["Restarts"] == "2"


@every_slurm
def test_the_jobs_that_were_hit_say_why_in_their_admin_comment_and_later_ones_do_not(healthd: Healthd) -> None:
    cluster = healthd.cluster
    victim = healthd.running("sleep 600")
    no_requeue = healthd.running("sleep 600", "--no-requeue")
    cluster.run("scontrol", "update", f"JobId={no_requeue}", "AdminComment=reserved, for: RMA=7")
    fault_time = time.time()
    time.sleep(1.1)
    later = healthd.running("sleep 600")
    healthd.look(faulty(fault_time=fault_time))
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(fault_time))
    words = f"healthd: node {healthd.node}: {XID.removeprefix('healthd: ')} at {when}"
    comments = {job: cluster.admin_comment(job) for job in (victim, no_requeue, later)}
    assert comments == {victim: words, no_requeue: f"reserved, for: RMA=7; {words}", later: ""}
    healthd.look(faulty(fault_time=time.time()))
    assert cluster.admin_comment(no_requeue) == comments[no_requeue], "each run of a job gets one comment"


@pytest.mark.parametrize(
    "theirs", ["two  blanks\tand caf\u00e9", "two\nlines", "\u00e9" * 600], ids=["odd", "lines", "long"]
)
def test_what_others_wrote_into_admin_comment_is_not_damaged(healthd: Healthd, theirs: str) -> None:
    cluster = healthd.cluster
    job = healthd.running("sleep 600", "--no-requeue")
    cluster.run("scontrol", "update", f"JobId={job}", f"AdminComment={theirs}")
    healthd.look(faulty())
    found = cluster.run("scontrol", "show", "job", job).partition("AdminComment=")[2]
    assert found.startswith(theirs)
    assert ("; healthd: node" in found) == (len(theirs) < 100), "a comment as long as Slurm's column may be truncated"


@pytest.mark.parametrize("step", ["update", "requeue"])
def test_a_job_on_two_nodes_that_fail_at_once_is_requeued_once(healthd: Healthd, step: str) -> None:
    cluster = healthd.cluster
    other = Healthd(cluster, "n8")
    make_idle(cluster, "n8")
    nodes = f"{healthd.node},n8"
    job = cluster.sbatch("srun sleep 600", "-N2", "-w", nodes)
    try:
        cluster.wait_job(job, "RUNNING")
        for name in (healthd.node, "n8"):
            until_listed(cluster, job, name)
        fault = faulty()
        reports: list[ReconcileReport] = []

        def fail_too(command: Command) -> None:
            if command.argv[1] == step and not reports:
                reports.append(other.look_until_settled(fault))

        healthd.before = fail_too
        reports.append(healthd.look_until_settled(fault))
        assert cluster.job(job)["Restarts"] == "1"
        assert all(report.owner is Owner.HEALTHD for report in reports)
        assert "DRAIN" in cluster.node("n8").flags
        assert "DRAIN" in healthd.state().flags
    finally:
        cluster.run("scancel", job)
        end_jobs_and_resume(cluster, "n8")


def test_a_job_that_is_ending_is_left_to_end(healthd: Healthd) -> None:
    cluster = healthd.cluster
    job = healthd.running("trap '' TERM; sleep 600 & sleep 600")
    cluster.run("scancel", job)
    cluster.wait_state(healthd.node, "COMPLETING")
    assert healthd.look(faulty()).requeued == ()
    cluster.wait_state(healthd.node, "IDLE", "DRAIN", without=("COMPLETING",))
    now = cluster.job(job)
    assert (now["JobState"], now["Restarts"]) == ("CANCELLED", "0")


def test_a_slurmstepd_that_died_does_not_keep_other_jobs_from_their_requeue(healthd: Healthd) -> None:
    cluster = healthd.cluster
    lost, job = healthd.running("sleep 600"), healthd.running("sleep 600")
    cluster.kill_slurmstepd(lost)
    try:
        report = healthd.look(faulty())
        assert report.requeued == (job,)
        assert report.problem.startswith("scontrol listpids: Unable to connect to slurmstepd")
        assert cluster.job(lost)["JobState"] == "RUNNING"
    finally:
        cluster.remove_dead_slurmstepd(lost)


def test_an_allocation_without_a_script_runs_on_and_is_told(healthd: Healthd) -> None:
    cluster = healthd.cluster
    command = ["salloc", "-w", healthd.node, "-n1", "--no-shell", "-J", "held"]
    subprocess.run(command, env=cluster.env, cwd="/", capture_output=True, check=True)
    job = cluster.run("squeue", "-h", "-n", "held", "-t", "R", "-o", "%i").strip()
    with subprocess.Popen(["srun", f"--jobid={job}", "sleep", "600"], env=cluster.env, cwd="/") as step:
        until_listed(cluster, job, healthd.node)
        report = healthd.look(faulty())
        assert dict(report.not_requeued) == {job: "started by srun or salloc: only batch jobs can be requeued"}
        assert cluster.job(job)["JobState"] == "RUNNING"
        assert cluster.admin_comment(job).startswith(f"healthd: node {healthd.node}: gpu_xid/79 ")
        cluster.run("scancel", job)
        step.wait(120)


@every_slurm
def test_only_our_own_drain_is_resumed(healthd: Healthd) -> None:
    healthd.look(faulty())
    report = healthd.look(HEALTHY)
    assert isinstance(report.decision, Resume)
    assert report.settled
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    time.sleep(1.1)  # time stamps of Slurm have whole seconds
    for words in ("fan broken", XID):
        drain(healthd.cluster, healthd.node, words)
        assert not isinstance(healthd.look(HEALTHY).decision, Resume)
        assert is_drained(healthd.state(), words)


def test_a_drain_under_a_code_that_a_new_release_calls_otherwise_stays_ours(healthd: Healthd) -> None:
    old, new = (condition(Severity.DEGRADED, f"gpu_xid/{name}") for name in ("79", "lost"))
    healthd.look(faulty(old))
    report = healthd.look(faulty(new))
    assert report.owner is Owner.HEALTHD
    assert healthd.state().reason.startswith("healthd: gpu_xid/lost 0000:1b:00.0: ")
    healthd.look(faulty(old))
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_an_unknown_drain_in_our_words_is_adopted_and_never_resumed(healthd: Healthd) -> None:
    drain(healthd.cluster, healthd.node, "healthd: mount/missing /data: not mounted")
    report = healthd.look(HEALTHY)
    assert report.adopted is not None
    assert (report.adopted.code, report.adopted.subject) == ("mount/missing", "/data")
    assert report.owner is Owner.UNRECORDED_HEALTHD
    assert healthd.changes() == []


def test_observe_mode_changes_nothing_and_says_what_it_would_do(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")
    healthd.policy = Policy()
    decision = healthd.look(faulty()).decision
    assert isinstance(decision, Leave)
    assert decision.would == f'drain with "{XID}" and requeue'
    assert healthd.changes() == []
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    assert healthd.cluster.job(job)["JobState"] == "RUNNING"


# Operators.


@every_slurm
def test_an_operators_drain_before_ours_is_left_alone_and_the_victims_are_requeued(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")
    drain(healthd.cluster, healthd.node, "fan broken")
    report = healthd.look(faulty())
    assert report.requeued == (job,)
    assert report.owner is Owner.OTHER
    assert is_drained(healthd.state(), "fan broken")
    assert healthd.look(HEALTHY).settled
    assert is_drained(healthd.state(), "fan broken")


@pytest.mark.parametrize("words", ["RMA 4711", f"{XID}, RMA 4711"])
def test_an_operator_who_changes_our_reason_takes_the_node_over(healthd: Healthd, words: str) -> None:
    healthd.look(faulty())
    drain(healthd.cluster, healthd.node, words)
    for verdict in (faulty(), HEALTHY):
        report = healthd.look(verdict)
        assert report.owner is Owner.OTHER
        assert is_drained(healthd.state(), words)
    resume(healthd.cluster, healthd.node)
    assert healthd.look(faulty()).acknowledged


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.015, 0.02, 0.03])
def test_an_operator_who_drains_in_the_same_moment_and_we_agree_on_whose_it_is(healthd: Healthd, delay: float) -> None:
    operator = threading.Timer(delay, drain, (healthd.cluster, healthd.node, "fan broken"))
    operator.start()
    healthd.look(faulty())
    operator.join()
    report = healthd.look(faulty())
    node = healthd.state()
    assert (report.owner, node.reason) in [(Owner.HEALTHD, XID), (Owner.OTHER, "fan broken")]
    assert "DRAIN" in node.flags


@every_slurm
def test_an_operators_drain_while_we_count_the_fleet_is_seen_before_ours_is_sent(healthd: Healthd) -> None:
    def drain_now(command: Command) -> None:
        if command.argv == commands.fleet():
            drain(healthd.cluster, healthd.node, "fan broken")

    healthd.before = drain_now
    report = healthd.look(faulty())
    assert (report.owner, healthd.changes()) == (Owner.OTHER, [])
    assert is_drained(healthd.state(), "fan broken")
    healthd.look(HEALTHY)
    assert is_drained(healthd.state(), "fan broken"), "there was never a drain of healthd to lift"


@on_slurm("24.11")
def test_an_operators_words_between_our_reading_and_our_resume_are_drained_for_again(healthd: Healthd) -> None:
    """24.11 keeps the reason of a finished drain, with its time stamp; 22.05 and 26.05 drop it."""

    def take_over(command: Command) -> None:
        if "State=UNDRAIN" in command.argv:
            drain(healthd.cluster, healthd.node, "fan broken")

    healthd.look(faulty())
    healthd.before = take_over
    report = healthd.look(HEALTHY)
    assert report.owner is Owner.OTHER
    assert is_drained(healthd.state(), "fan broken")
    healthd.look(HEALTHY)
    assert is_drained(healthd.state(), "fan broken")


def test_an_operators_words_between_our_command_and_our_reading_stand(healthd: Healthd) -> None:
    def take_over(command: Command) -> None:
        if command.argv[1] == "update":
            drain(healthd.cluster, healthd.node, "fan broken")

    healthd.after = take_over
    report = healthd.look(faulty())
    assert report.owner is Owner.OTHER
    assert is_drained(healthd.state(), "fan broken")
    healthd.look(HEALTHY)
    assert is_drained(healthd.state(), "fan broken")


@every_slurm
def test_an_operators_resume_acknowledges_and_is_not_undone(healthd: Healthd) -> None:
    cluster = healthd.cluster
    healthd.look(faulty())
    # As if slurmctld had run for longer than the clocks may differ.
    healthd.memory = replace(healthd.memory, confirmed_at=time.time() + 3)
    resume(cluster, healthd.node)
    report = healthd.look(faulty())
    assert report.acknowledged
    assert not report.settled
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    assert replace(healthd.memory, ended_drain=None, stored_count=None) == DrainRecord()
    # A fault a check reports afterwards drains again.
    assert healthd.look(faulty(condition(code="gpu_access/lost"))).owner is Owner.HEALTHD


@every_slurm
def test_an_operators_resume_soon_after_our_own_is_theirs(healthd: Healthd) -> None:
    healthd.policy = replace(ACT, requeue_retry_seconds=90)
    healthd.look(faulty())
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    assert healthd.look(faulty()).owner is Owner.HEALTHD
    # As if slurmctld had run for longer than the clocks may differ.
    healthd.memory = replace(healthd.memory, confirmed_at=time.time() + 3)
    resume(healthd.cluster, healthd.node)
    assert healthd.look(faulty()).acknowledged
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_a_node_that_a_person_set_down_keeps_their_reason(healthd: Healthd) -> None:
    healthd.cluster.run("scontrol", "update", f"NodeName={healthd.node}", "State=DOWN", "Reason=fan broken")
    assert healthd.look(faulty()).owner is Owner.OTHER
    node = healthd.state()
    assert (node.reason, "DRAIN" in node.flags) == ("fan broken", False)


# Drains that disappear or change.


def test_a_drain_that_a_killed_slurmctld_forgot_is_put_back(healthd: Healthd) -> None:
    before = saved(healthd)
    healthd.look(faulty())
    start_from(before, healthd)
    assert healthd.state().flags.isdisjoint({"DRAIN"})
    report = healthd.look_until_settled(faulty())
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)


@on_slurm(None, "24.11")
def test_a_drain_that_a_killed_slurmctld_brings_back_after_our_resume_is_lifted_again(healthd: Healthd) -> None:
    cluster = healthd.cluster
    healthd.look(faulty(condition(Severity.DEGRADED)))
    drained = saved(healthd)
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    start_from(drained, healthd)
    assert is_drained(healthd.state(), XID)
    healthd.memory = json_again(healthd.memory)  # also after a restart of the daemon
    report = healthd.look(HEALTHY)
    assert isinstance(report.decision, Resume)
    assert report.adopted is None
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN",))


@every_slurm
def test_a_drain_before_the_last_one_that_slurmctld_brings_back_is_lifted_again(healthd: Healthd) -> None:
    cluster = healthd.cluster
    healthd.look(faulty(condition(Severity.DEGRADED)))
    older = saved(healthd)
    healthd.look(HEALTHY)
    healthd.look(faulty(condition(Severity.DEGRADED, "gpu_xid/48")))
    healthd.look(HEALTHY)
    healthd.memory = json_again(healthd.memory)  # also after a restart of the daemon
    start_from(older, healthd)
    assert is_drained(healthd.state(), XID)
    report = healthd.look(HEALTHY)
    assert isinstance(report.decision, Resume)
    assert report.adopted is None
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN",))


def saved(healthd: Healthd) -> bytes:
    """Return the nodes as written by slurmctld up to now, which happens at most every 5 s."""
    cluster, file = healthd.cluster, healthd.cluster.directory / "state/node_state"
    mark = uuid.uuid4().hex
    cluster.run("scontrol", "update", f"NodeName={healthd.node}", f"Comment={mark}")
    until(lambda: file.exists() and mark.encode() in file.read_bytes(), "slurmctld saves the node")
    return file.read_bytes()


def start_from(older: bytes, healthd: Healthd) -> None:
    """Kill slurmctld before it saves the latest changes to the nodes, and start it."""
    healthd.cluster.kill_slurmctld()
    (healthd.cluster.directory / "state/node_state").write_bytes(older)
    healthd.cluster.start_slurmctld()


def json_again(memory: DrainRecord) -> DrainRecord:
    return load(DrainRecord, json.loads(json.dumps(dump(memory))), "memory")


@every_slurm
def test_a_drain_that_a_reboot_by_slurm_took_away_is_put_back(healthd: Healthd) -> None:
    cluster = healthd.cluster
    healthd.look(faulty())
    cluster.run("scontrol", "reboot", "ASAP", "nextstate=RESUME", healthd.node)
    cluster.wait_state(healthd.node, "REBOOT_ISSUED", reason=f"{XID} : reboot issued")
    report = healthd.look(HEALTHY)
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
    report = healthd.look(faulty())
    assert not report.acknowledged
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)
    assert healthd.look(HEALTHY).settled
    cluster.wait_state(healthd.node, "IDLE", without=("DRAIN",))


@on_slurm(None, "24.11")  # 26.05 waits for more than a minute
def test_kill_task_failed_over_our_reason_is_still_ours(cluster: SlurmCluster) -> None:
    require_programs("fsfreeze", "mkfs.ext4", packages="util-linux e2fsprogs")
    conf = ["UnkillableStepTimeout=2"]  # no other job may be abandoned so early
    with SlurmCluster(nodes=1, extra_conf=conf, version=cluster.version) as short:
        healthd = Healthd(short, "n1")
        with frozen_mount(short.directory / "frozen") as frozen:
            job = healthd.running(f"exec touch {frozen}/x")
            # Slurm also lists the shell of the script while it becomes touch.
            until(lambda: len(listed(short, job, "n1")) == 1, "the job is one process")
            (pid,) = listed(short, job, "n1")
            wait_for_d_state(pid)
            assert healthd.look(faulty()).requeued == (job,)
            short.wait_state("n1", "DRAIN", reason="Kill task failed")
            report = healthd.look(faulty())
            assert report.owner is Owner.HEALTHD
            assert healthd.state().reason.startswith("Kill task failed")
        short.run("scancel", job)
        assert isinstance(healthd.look(HEALTHY).decision, Resume)
        short.wait_state("n1", "IDLE", without=("DRAIN", "COMPLETING"))


@contextlib.contextmanager
def frozen_mount(at: Path) -> Iterator[Path]:
    """Mount a frozen ext4 from a loop device: its writers stay in D state until it is thawed."""
    image = at.with_suffix(".img")
    at.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, at], check=True)
    try:
        subprocess.run(["fsfreeze", "-f", at], check=True)
        try:
            yield at
        finally:
            subprocess.run(["fsfreeze", "-u", at], check=True)
    finally:
        subprocess.run(["umount", "-l", at], check=True)


@every_slurm
def test_a_drain_outlives_an_unexpected_reboot_and_is_not_lifted_from_a_down_node(healthd: Healthd) -> None:
    cluster = healthd.cluster
    healthd.running("sleep 600")  # from 24.11 on a drained node without jobs stays up
    healthd.look(faulty(condition(Severity.DEGRADED)))
    cluster.stop_slurmd(healthd.node)
    time.sleep(5.2)  # slurmctld records the last answer before it 2 s late or more, and compares whole seconds
    cluster.start_slurmd(healthd.node, "-b")
    cluster.wait_state(healthd.node, "DOWN", "DRAIN")
    healthd.boot_id = "boot-2"
    report = healthd.look(HEALTHY)
    assert report.owner is Owner.HEALTHD
    assert not report.settled
    assert is_drained(healthd.state(), XID)
    cluster.run("scontrol", "update", f"NodeName={healthd.node}", "State=RESUME")
    assert healthd.look(HEALTHY).acknowledged


# Failures of Slurm itself.


def test_a_controller_that_is_down_is_trouble_and_the_drain_follows(healthd: Healthd) -> None:
    healthd.cluster.kill_slurmctld(signal.SIGTERM)
    healthd.environment = healthd.cluster.giving_up
    report = healthd.look(faulty())
    healthd.environment = {}
    healthd.cluster.start_slurmctld()
    assert "connect failure" in report.problem
    assert not report.settled
    assert isinstance(report.decision, Leave)
    assert report.decision.would.startswith("drain with "), "the intended change is reported all the same"
    assert healthd.look_until_settled(faulty()).owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)


def test_a_drain_that_a_hung_controller_applies_late_is_known_as_ours(healthd: Healthd) -> None:
    def hang(command: Command) -> None:
        if command.argv[1] == "update":
            healthd.cluster.signal_slurmctld(signal.SIGSTOP)
            healthd.environment = healthd.cluster.giving_up

    healthd.before = hang
    try:
        report = healthd.look(faulty())
    finally:
        healthd.cluster.signal_slurmctld(signal.SIGCONT)
    healthd.before, healthd.environment = lambda command: None, {}
    assert "Socket timed out" in report.problem
    healthd.cluster.wait_state(healthd.node, "DRAIN")
    report = healthd.look(HEALTHY)  # the fault is gone meanwhile: the late drain must not stay for ever
    assert isinstance(report.decision, Resume)
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_a_requeue_that_a_hung_controller_applies_late_is_sent_once(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")

    def hang(command: Command) -> None:
        if command.argv[1] == "requeue":
            healthd.cluster.signal_slurmctld(signal.SIGSTOP)
            healthd.environment = healthd.cluster.giving_up

    healthd.before = hang
    try:
        # scontrol requeue prints only this when no answer comes.
        assert "Unexpected message received" in healthd.look(faulty()).problem
    finally:
        healthd.cluster.signal_slurmctld(signal.SIGCONT)
    healthd.before, healthd.environment = lambda command: None, {}
    healthd.cluster.wait_job(job, "PENDING")
    healthd.look_until_settled(faulty())
    assert healthd.cluster.job(job)["Restarts"] == "1"
    assert sum(argv[1] == "requeue" for argv in healthd.changes()) == 1


# A network without any answer, not even a refusal: no host here has the address, and no router forwards it.
BLACK_HOLE = 'ip link set lo up && ip route add 10.99.0.2 dev lo && exec "$@"'


def test_a_controller_behind_a_black_hole_is_trouble_within_the_commands_own_deadline(
    healthd: Healthd, tmp_path: Path
) -> None:
    conf = (healthd.cluster.directory / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(conf.replace("(127.0.0.1)", "(10.99.0.2)"))
    healthd.policy = Policy(mode=Mode.ACT, command_timeout_seconds=2)
    healthd.prefix = ("unshare", "--net", "sh", "-c", BLACK_HOLE, "sh")
    healthd.environment = {"SLURM_CONF": f"{tmp_path}/slurm.conf"}
    started = time.monotonic()
    assert healthd.look(faulty()).problem == "sinfo did not end in time"
    assert time.monotonic() - started < 60
    healthd.prefix, healthd.environment, healthd.policy = (), {}, ACT
    assert healthd.look_until_settled(faulty()).owner is Owner.HEALTHD


def test_a_controller_that_takes_what_is_sent_and_never_answers_is_trouble(healthd: Healthd, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        conf = (healthd.cluster.directory / "slurm.conf").read_text()
        port = f"SlurmctldPort={silent.getsockname()[1]}"
        (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", port, conf) + GIVE_UP)
        healthd.environment = {"SLURM_CONF": f"{tmp_path}/slurm.conf"}
        report = healthd.look(faulty())
    assert report.problem.startswith("sinfo: ")
    assert not report.settled
    healthd.environment = {}
    assert healthd.look_until_settled(faulty()).owner is Owner.HEALTHD


@contextlib.contextmanager
def slow(cluster: SlurmCluster) -> Iterator[None]:
    """Let slurmctld run only a tenth of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            cluster.signal_slurmctld(signal.SIGSTOP)
            time.sleep(0.45)
            cluster.signal_slurmctld(signal.SIGCONT)
            time.sleep(0.05)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_slow_controller_drains_and_requeues_once() -> None:
    with SlurmCluster(nodes=1, message_timeout=60) as cluster:  # slow, but not slow enough to be abandoned
        healthd = Healthd(cluster, "n1", replace(ACT, command_timeout_seconds=100))
        job = healthd.running("sleep 600")
        with slow(cluster):
            report = healthd.look_until_settled(faulty())
        assert report.owner is Owner.HEALTHD
        assert is_drained(healthd.state(), XID)
        assert cluster.job(job)["Restarts"] == "1"
        assert [argv[1] for argv in healthd.changes()] == ["update", "requeue"]


def test_a_controller_that_is_restarted_in_the_middle_of_a_look_gets_what_is_left(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")
    healthd.cluster.save(job)
    restarted = []

    def restart(command: Command) -> None:
        if command.argv[1] in ("update", "requeue") and command.argv[1] not in restarted:
            restarted.append(command.argv[1])
            healthd.cluster.kill_slurmctld(signal.SIGTERM)
            healthd.cluster.start_slurmctld()

    healthd.before = restart
    assert healthd.look_until_settled(faulty()).owner is Owner.HEALTHD
    assert restarted == ["update", "requeue"]
    assert is_drained(healthd.state(), XID)
    assert healthd.cluster.job(job)["Restarts"] == "1"


def test_a_slurmctld_that_is_upgraded_under_a_drain_still_hears_our_old_commands() -> None:
    slurm_versions.programs("26.05")
    with SlurmCluster(nodes=1, version="24.11") as cluster:
        healthd = Healthd(cluster, "n1")
        job = healthd.running("sleep 600", "--no-requeue")
        healthd.look(faulty(condition(Severity.DEGRADED)))
        cluster.upgrade_slurmctld("26.05")
        cluster.wait_state("n1", "DRAIN", without=("UNKNOWN", "NOT_RESPONDING"))
        report = healthd.look_until_settled(faulty())
        assert report.owner is Owner.HEALTHD
        assert is_drained(healthd.state(), XID)
        assert dict(report.not_requeued) == {job: "submitted with --no-requeue"}
        assert cluster.admin_comment(job).startswith("healthd: node n1: gpu_xid/79 ")
        assert isinstance(healthd.look_until_settled(HEALTHY).decision, Resume)
        cluster.wait_state("n1", without=("DRAIN",))
        victim = healthd.running("sleep 600")
        assert healthd.look_until_settled(faulty()).requeued == (victim,)


def test_a_dead_munge_is_trouble_within_the_commands_own_deadline(healthd: Healthd) -> None:
    healthd.policy = Policy(mode=Mode.ACT, command_timeout_seconds=1)
    healthd.cluster.kill_munged()
    try:
        started = time.monotonic()
        report = healthd.look(faulty())
        assert time.monotonic() - started < 60
    finally:
        healthd.cluster.start_munged()
    assert report.problem == "sinfo did not end in time"


def test_a_missing_slurm_conf_is_trouble(healthd: Healthd) -> None:
    healthd.policy = Policy(mode=Mode.ACT, command_timeout_seconds=2)
    healthd.environment = {"SLURM_CONF": "/nonexistent/slurm.conf"}
    assert healthd.look(faulty()).problem.startswith("sinfo")


def test_a_missing_sinfo_is_trouble(healthd: Healthd) -> None:
    healthd.prefix = ("/nonexistent/bin/env",)
    assert "No such file" in healthd.look(faulty()).problem


@every_slurm
def test_without_the_right_to_drain_it_says_so_and_nothing_is_requeued(healthd: Healthd) -> None:
    job = healthd.running("sleep 600")
    healthd.prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    report = healthd.look(faulty())
    assert "Invalid user id" in report.problem
    assert not report.settled
    assert healthd.cluster.job(job)["JobState"] == "RUNNING"
    assert healthd.state().flags.isdisjoint({"DRAIN"})


def test_a_node_that_slurm_does_not_know_is_trouble(cluster: SlurmCluster) -> None:
    assert Healthd(cluster, "n99").look(faulty()).problem == 'Slurm has no node "n99" in any partition'


# Killed with SIGKILL.


@pytest.mark.parametrize("verb", ["sinfo", "update", "listpids", "squeue", "requeue"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_daemon_killed_at_any_command_ends_right_after_its_restart(healthd: Healthd, verb: str, done: bool) -> None:
    job = healthd.running("sleep 600")
    fault = faulty()

    def die(command: Command) -> None:
        if verb in command.argv[:2]:
            raise Killed

    healthd.before, healthd.after = (lambda command: None, die) if done else (die, lambda command: None)
    with pytest.raises(Killed):
        healthd.look(fault)
    healthd.before = healthd.after = lambda command: None
    report = healthd.look_until_settled(fault)
    assert report.owner is Owner.HEALTHD
    assert is_drained(healthd.state(), XID)
    assert healthd.cluster.job(job)["Restarts"] == "1"
    sent = sum(argv[1] == "requeue" for argv in healthd.changes())
    assert sent == 1
    with contextlib.suppress(Killed):
        healthd.before = lambda command: None
        assert healthd.look(HEALTHY).settled
    assert healthd.state().flags.isdisjoint({"DRAIN"})


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_daemon_killed_at_its_own_resume_does_not_take_it_for_an_operators(healthd: Healthd, done: bool) -> None:
    healthd.look(faulty())

    def die(command: Command) -> None:
        if "State=UNDRAIN" in command.argv:
            raise Killed

    healthd.before, healthd.after = (lambda command: None, die) if done else (die, lambda command: None)
    with pytest.raises(Killed):
        healthd.look(HEALTHY)
    report = healthd.look(faulty(condition(code="gpu_xid/48")))
    assert not report.acknowledged
    assert report.owner is Owner.HEALTHD
    assert healthd.state().reason.startswith("healthd: gpu_xid/48")


def test_nothing_but_the_daemons_python_is_needed_to_import_the_generator() -> None:
    script = "import sys, healthd.agent.slurm; print('subprocess' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "False\n"
