"""Tests of the whole daemon with a real Slurm: a fault in the kernel log or in NVML, and its effect on node and
jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, condition, wait_for_rounds, write_atomically, xid_line
from slurm_cluster import SlurmCluster, start_job
from slurm_look import restart_requeued_job, wait_until_listed
from waiting import until

NODES = 20
TESTS = Path(__file__).resolve().parents[1]
LOST_GPU = 'profile = "dgx-h100"\n[gpu.3]\nlost = true\n'
HEALTHY = 'profile = "dgx-h100"\n'
LOST_PCI = "0000:61:00.0"  # GPU 3 of the profile
# RPCs between slurmd and slurmctld themselves, and sdiag's own request.
OTHER_RPCS = re.compile(r"REQUEST_STATS_INFO|MESSAGE_.*|REQUEST_COMPLETE_.*|REQUEST_STEP_COMPLETE")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=NODES, gpus=0) as running:
        yield running


@pytest.fixture
def own_cluster() -> Iterator[SlurmCluster]:
    """Start a cluster for a test that stops slurmctld; commands wait up to 5 s for it."""
    with SlurmCluster(nodes=1, gpus=0, message_timeout=5) as running:
        yield running


def daemon_on(cluster: SlurmCluster, node: str, tmp_path: Path, mode: str = "act", **options: Any) -> Healthd:
    """Return a daemon for this node with one round per second."""
    flags = ("--mode", mode, "--node-name", node, "--interval", "1")
    return Healthd(*flags, directory=tmp_path, **{"env": cluster.env, **options})


def is_free(cluster: SlurmCluster, node: str) -> bool:
    state = cluster.node(node)
    return state.flags.isdisjoint({"DRAIN", "DOWN"}) and not state.reason


# --- faults that act


def test_xid_79_drains_and_requeues_and_repaired_resumes(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    job = start_job(cluster, node)
    with daemon_on(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(xid_line(79))
        until(lambda: "DRAIN" in cluster.node(node).flags, "drained")
        drained = cluster.node(node)
        assert drained.reason.startswith("healthd: gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus, GPU 3")
        assert drained.user == "root"
        after = cluster.wait_job(job, "PENDING")
        assert after["Restarts"] == "1"
        assert after["JobId"] == job
        assert daemon.verdict().startswith("drain ")
        wait_for_rounds(daemon, 3)  # every check is clean, but no repair was recorded
        assert "DRAIN" in cluster.node(node).flags
        assert cluster.node(node).reason_time == drained.reason_time
        assert "done" in daemon.request(command="repaired", code="gpu_xid/79", part="0000:61:00.0")
        until(lambda: is_free(cluster, node), "free again")
        status = daemon.wait_until(lambda s: s["health"] == "healthy", "healthy again")
        assert [entry["cleared_by"] for entry in status["cleared"]] == ["repaired by root (uid 0)"]
        assert daemon.verdict().startswith("ok ")
        daemon.wait_until(lambda _: "resumed the node" in daemon.log.read_text(), "the resume is confirmed")
        warnings = [line for line in daemon.log.read_text().splitlines() if line.startswith("WARNING: ")]
        messages = ("drained the node: ", "job ", "resumed the node: ")
        assert [line for message in messages for line in warnings if line.startswith(f"WARNING: {message}")] == [
            f"WARNING: drained the node: {drained.reason}",
            f"WARNING: job {job} was requeued",
            f"WARNING: resumed the node: {drained.reason}",
        ]
    assert cluster.job(job)["Restarts"] == "1"


def test_batch_job_requeued_by_slurm_as_missing_is_requeued(
    tmp_path: Path,
) -> None:
    """Slurm sets its BatchFlag to 2: slurmctld counts it up to a limit."""
    with SlurmCluster(nodes=1, gpus=0, message_timeout=5, extra_conf=["BatchStartTimeout=1"]) as cluster:
        job = wait_until_listed(cluster, start_job(cluster, "n1"), "n1")
        time.sleep(6)  # time after which slurmctld counts a job as missing: BatchStartTimeout and MessageTimeout
        cluster.stop_slurmd("n1")
        cluster.kill_slurmstepd(job)
        cluster.remove_dead_slurmstepd(job)
        cluster.start_slurmd("n1")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert f"Batch JobId={job} missing from batch node n1" in cluster.log("slurmctld")
        restart_requeued_job(cluster, job, "n1")
        assert cluster.job(job)["BatchFlag"] == "2"
        time.sleep(1.1)
        with daemon_on(cluster, "n1", tmp_path) as daemon:
            daemon.kernel_line(xid_line(79))
            cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
            assert cluster.wait_job(job, "PENDING")["Restarts"] == "2"
            daemon.wait_until(lambda _: f"job {job} was requeued" in daemon.log.read_text(), "the requeue is confirmed")


def test_lost_gpu_drains_and_repaired_alone_does_not_resume(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    scenario = tmp_path / "gpus.toml"
    write_atomically(scenario, HEALTHY)
    with daemon_on(cluster, node, tmp_path, fake_nvml=str(scenario)) as daemon:
        write_atomically(scenario, LOST_GPU)
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
        daemon.request(command="repaired", code="gpu_access/lost")
        wait_for_rounds(daemon, 2)
        assert condition(daemon.status(), "gpu_access/lost"), "the check finds it again"
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
        assert "UNDRAIN" not in daemon.log.read_text()  # not even until the next run of the check
        write_atomically(scenario, HEALTHY)
        wait_for_rounds(daemon, 3)  # all runs are clean, but a lost GPU needs a reboot
        assert "DRAIN" in cluster.node(node).flags
        daemon.request(command="repaired", code="gpu_access/lost")
        until(lambda: is_free(cluster, node), "free again")


def test_gpu_processes_runs_only_on_drained_idle_node(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    scenario, run_name = tmp_path / "gpus.toml", ("gpu_processes", "")
    write_atomically(scenario, HEALTHY + "[gpu.3]\nprocesses = [1]\n")

    def has_run(status: dict[str, Any]) -> bool:
        return run_name in {(result["check"], result["instance"]) for result in status["results"]}

    config = "[checks.gpu_processes]\nconfirm_seconds = 1.0\n"
    with daemon_on(cluster, node, tmp_path, fake_nvml=str(scenario), config=config) as daemon:
        status = wait_for_rounds(daemon, 3)
        assert (status["health"], has_run(status)) == ("healthy", False), "no resume waits for it"
        job = start_job(cluster, node, "--no-requeue")
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        assert not has_run(wait_for_rounds(daemon, 3)), "a job still runs"
        cluster.run("scancel", job)
        daemon.wait_until(lambda s: condition(s, "gpu_processes/leftover") is not None, "the leftover process is found")
        daemon.request(command="repaired", code="gpu_xid/79")
        wait_for_rounds(daemon, 3)
        assert "DRAIN" in cluster.node(node).flags, "the process is still there"
        write_atomically(scenario, HEALTHY)
        until(lambda: is_free(cluster, node), "free again")
        daemon.wait_until(lambda s: s["health"] == "healthy" and not has_run(s), "the check no longer runs")


def test_mode_drain_drains_and_keeps_jobs(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    job = start_job(cluster, node)
    with daemon_on(cluster, node, tmp_path, mode="drain") as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        wait_for_rounds(daemon, 2)
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.job(job)["Restarts"] == "0"


def test_changed_severity_requeues_and_enforce_false_resumes(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    job = start_job(cluster, node)
    with daemon_on(cluster, node, tmp_path, config='[checks.gpu_xid.severity]\n"gpu_xid/79" = "degraded"\n') as daemon:
        assert daemon.process is not None
        daemon.kernel_line(xid_line(79))
        drained = cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        wait_for_rounds(daemon, 2)
        assert cluster.job(job)["JobState"] == "RUNNING"
        daemon.configure("")  # the default severity
        daemon.process.send_signal(signal.SIGHUP)
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert cluster.node(node).reason_time == drained.reason_time
        daemon.configure("[checks.gpu_xid]\nenforce = false\n")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: is_free(cluster, node), "free again")
        assert daemon.wait_until(lambda s: s["health"] == "warning", "the warning remains")["conditions"]
        daemon.kernel_line(xid_line(79))
        wait_for_rounds(daemon, 3)
        assert is_free(cluster, node)
    assert cluster.job(job)["Restarts"] == "1"


# --- conditions that must not act


def test_warning_and_healthy_rounds_send_no_rpc(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    with daemon_on(cluster, node, tmp_path) as daemon:
        daemon.wait_until(lambda s: s["slurm"]["state"] is not None, "the first reconciliation has ended")
        before = cluster.sdiag_counts()
        wait_for_rounds(daemon, 2)
        daemon.kernel_line(xid_line(31, text="Ch 0000005a, intr 10000000. MMU Fault"))
        status = daemon.wait_until(lambda s: s["health"] == "warning", "the warning is open")
        assert condition(status, "gpu_xid/31")
        wait_for_rounds(daemon, 3)
        after = cluster.sdiag_counts()
        assert {
            rpc: after[rpc] - before.get(rpc, 0)
            for rpc in after
            if not OTHER_RPCS.fullmatch(rpc) and after[rpc] != before.get(rpc)
        } == {}
        assert daemon.verdict().startswith("warning ")
    assert is_free(cluster, node)


def log_slurm_commands(cluster: SlurmCluster, folder: Path) -> tuple[dict[str, str], Path]:
    """Return an environment in which Slurm's commands log their arguments before they run, and that log."""
    log = folder / "commands.log"
    wrappers = folder / "bin"
    wrappers.mkdir()
    for name in ("scontrol", "sinfo", "squeue", "scancel", "sacctmgr"):
        program = (
            next(directory for directory in map(Path, ("/usr/bin/", "/usr/local/bin/")) if (directory / name).exists())
            / name
        )
        (wrappers / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexec {program} "$@"\n')
        (wrappers / name).chmod(0o755)
    log.touch()
    return {**cluster.env, "PATH": f"{wrappers}:{os.environ['PATH']}"}, log


def changing_commands(log: Path) -> list[str]:
    """Return the commands that can change something: all except those known to read only."""
    read_only = re.compile(r"sinfo |squeue |scontrol (show|listpids|ping)\b")
    return [line for line in log.read_text().splitlines() if not read_only.match(line)]


def test_observe_mode_changes_nothing(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    env, log = log_slurm_commands(cluster, tmp_path)
    scenario = tmp_path / "gpus.toml"
    write_atomically(scenario, HEALTHY)
    job = start_job(cluster, node)
    lines = [json.loads(line)["text"] for line in (TESTS / "data/kernel_lines.jsonl").read_text().splitlines()]
    verdict_words = set()
    with daemon_on(cluster, node, tmp_path, mode="observe", env=env, fake_nvml=str(scenario)) as daemon:
        verdict_words.add(daemon.verdict().split()[0])
        for index in range(0, len(lines), 25):
            daemon.kernel_line(*(text for line in lines[index : index + 25] for text in line.split("\n")))
            wait_for_rounds(daemon, 0)
            verdict_words.add(daemon.verdict().split()[0])
        daemon.kernel_line(xid_line(79), xid_line(48))
        status = daemon.wait_until(lambda s: condition(s, "gpu_xid/79", LOST_PCI) is not None, "the fault is open")
        assert status["health"] == "unhealthy"
        assert status["decision"]["action"] == "leave"
        assert status["decision"]["would"].startswith('drain with "healthd: ')
        assert status["decision"]["would"].endswith(" and requeue")
        verdict_words.add(daemon.verdict().split()[0])
        write_atomically(scenario, LOST_GPU)
        daemon.wait_until(lambda s: condition(s, "gpu_access/lost") is not None, "the lost GPU is found")
        daemon.request(command="pause", seconds=0.5, why="test")
        daemon.wait_until(lambda s: s["pause"] is None, "the pause is over")
        daemon.request(command="repaired", code="gpu_xid/79")
        daemon.kill()
        daemon.start()
        wait_for_rounds(daemon, 2)
        verdict_words.add(daemon.verdict().split()[0])
    assert changing_commands(log) == []
    assert "drain" not in verdict_words
    assert "warning" in verdict_words
    assert is_free(cluster, node)
    assert cluster.job(job)["Restarts"] == "0"
    # the same log records the commands of mode act
    with daemon_on(cluster, node, tmp_path, env=env, fake_nvml=str(scenario)):
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        cluster.wait_job(job, "PENDING")
    assert [" ".join(line.split()[1:3]) for line in changing_commands(log)] == [
        f"update NodeName={node}",
        f"update JobId={job}",
        "requeue incomplete",
    ]


def test_lines_from_before_first_start_are_history(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    past_time = int(time.time()) - 40 * 86400
    daemon = daemon_on(cluster, node, tmp_path)
    daemon.kernel_line(
        f"{time.strftime('%Y-%m-%dT%H:%M:%S+00:00', time.gmtime(past_time))} {node} kernel: {xid_line(48)}"
    )
    with daemon:
        status = wait_for_rounds(daemon, 2)
        entry = condition(status, "gpu_xid/48")
        assert entry is not None
        assert (entry["severity"], entry["history"]) == ("info", True)
        assert entry["last_seen"] == past_time
        assert status["health"] == "healthy"
        assert daemon.verdict().startswith("ok ")
    assert is_free(cluster, node)


def test_condition_from_observe_mode_drains_only_if_check_finds_it_again(
    cluster: SlurmCluster, unused_nodes: Iterator[str], tmp_path: Path
) -> None:
    for name, scenario_now, is_drained in (("healthy", HEALTHY, False), ("lost", LOST_GPU, True)):
        node, folder = next(unused_nodes), tmp_path / name
        folder.mkdir()
        scenario = folder / "gpus.toml"
        write_atomically(scenario, LOST_GPU)
        daemon = daemon_on(cluster, node, folder, mode="observe", fake_nvml=str(scenario))
        with daemon:
            daemon.kernel_line(xid_line(79), xid_line(48, pci="0000:1b:00"), xid_line(64, pci="0000:43:00"))
            daemon.wait_until(lambda s: condition(s, "gpu_xid/64") is not None, "the faults are open")
            daemon.wait_until(lambda s: condition(s, "gpu_access/lost") is not None, "the lost GPU is found")
        write_atomically(scenario, scenario_now)
        with daemon_on(cluster, node, folder, fake_nvml=str(scenario)) as daemon:
            status = wait_for_rounds(daemon, 2)
            assert condition(status, "gpu_xid/79")
            if is_drained:
                cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
            else:
                assert is_free(cluster, node)
                assert daemon.verdict().startswith("warning ")


# --- operators


def test_operator_resume_ends_event_but_not_failing_check(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    scenario = tmp_path / "gpus.toml"
    write_atomically(scenario, HEALTHY)
    old = start_job(cluster, node)
    with daemon_on(cluster, node, tmp_path, fake_nvml=str(scenario)) as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        cluster.wait_job(old, "PENDING")
        wait_for_rounds(daemon, 2)
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        time.sleep(1.5)  # so that the resume is not in the second in which the drain was last read
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        daemon.wait_until(
            lambda s: (c := condition(s, "gpu_xid/79")) is not None and c["state"] == "acknowledged", "acknowledged"
        )
        wait_for_rounds(daemon, 3)
        assert is_free(cluster, node)
        new = start_job(cluster, node)
        wait_for_rounds(daemon, 2)
        assert cluster.job(new)["JobState"] == "RUNNING"
        # A check that fails now acts. This job began after the fault of the Xid, but before this one.
        write_atomically(scenario, LOST_GPU)
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
        assert cluster.wait_job(new, "PENDING")["Restarts"] == "1"
        wait_for_rounds(daemon, 2)
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        time.sleep(1.5)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")  # the check still fails
        wait_for_rounds(daemon, 1)
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
    assert cluster.job(new)["Restarts"] == "1"


def test_job_started_after_resume_is_not_requeued_for_old_fault(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    scenario = tmp_path / "gpus.toml"
    write_atomically(scenario, LOST_GPU)
    with daemon_on(cluster, node, tmp_path, fake_nvml=str(scenario)) as daemon:
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        daemon.kill()  # so that the job can start before healthd detects the resume
        time.sleep(1.5)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        job = start_job(cluster, node)
        daemon.start()
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        wait_for_rounds(daemon, 3)
        assert cluster.job(job)["JobState"] == "RUNNING"
        assert cluster.job(job)["Restarts"] == "0"


def test_operator_drain_is_never_changed(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=replace the fan; ticket 12")
    before = cluster.node(node)
    with daemon_on(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(xid_line(79))
        status = daemon.wait_until(lambda s: s["slurm"]["owner"] == "other", "the operator's drain is seen")
        wait_for_rounds(daemon, 2)
        assert cluster.node(node) == before
        daemon.request(command="repaired", code="gpu_xid/79")
        status = wait_for_rounds(daemon, 2)
        assert status["health"] == "healthy"
        assert cluster.node(node) == before


def test_drain_taken_over_by_operator_is_kept(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    with daemon_on(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: ")
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=mine now")
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "other", "the operator's drain is seen")
        daemon.request(command="repaired", code="gpu_xid/79")
        wait_for_rounds(daemon, 2)
        assert cluster.node(node).reason == "mine now"


def test_pause_prevents_actions_and_check_decides_afterwards(
    cluster: SlurmCluster, unused_nodes: Iterator[str], tmp_path: Path
) -> None:
    for name, scenario_after, is_drained in (("reset", HEALTHY, False), ("broken", LOST_GPU, True)):
        node, folder = next(unused_nodes), tmp_path / name
        folder.mkdir()
        scenario = folder / "gpus.toml"
        write_atomically(scenario, LOST_GPU if is_drained else HEALTHY)
        job = start_job(cluster, node)
        # a pause that was set before the faults
        with daemon_on(cluster, node, folder, mode="observe", fake_nvml=str(scenario)) as daemon:
            daemon.request(command="pause", seconds=600, why="driver upgrade")
        with daemon_on(cluster, node, folder, fake_nvml=str(scenario)) as daemon:
            daemon.kernel_line(xid_line(79), xid_line(119, pci="0000:43:00"))
            status = daemon.wait_until(lambda s: condition(s, "gpu_xid/119") is not None, "the faults are open")
            status = wait_for_rounds(daemon, 2)
            assert status["decision"]["action"] == "leave"
            assert is_free(cluster, node)
            assert not daemon.verdict().startswith("drain ")
            write_atomically(scenario, scenario_after)
            assert "done" in daemon.request(command="unpause")
            wait_for_rounds(daemon, 2)
            if is_drained:
                cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
                assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
            else:
                assert is_free(cluster, node)
                assert cluster.job(job)["JobState"] == "RUNNING"


# --- slurmctld is down or hangs


def test_fault_while_slurmctld_is_down_drains_after_its_return(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster = own_cluster
    job = start_job(cluster, "n1")
    cluster.wait_until_saved(job)
    with daemon_on(cluster, "n1", tmp_path) as daemon:
        cluster.kill_slurmctld(signal.SIGTERM)
        daemon.kernel_line(xid_line(79))
        status = daemon.wait_until(
            lambda s: "contact slurm controller" in s["slurm"]["problem"], "the problem is reported"
        )
        assert status["health"] == "unhealthy"
        assert daemon.verdict().startswith("warning "), "the drain needs a count of the fleet"
        cluster.start_slurmctld()
        cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        daemon.wait_until(lambda s: s["slurm"]["problem"] == "", "the problem has ended")


def test_fault_while_slurmctld_hangs_drains_when_it_continues(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster = own_cluster
    job = start_job(cluster, "n1")
    with daemon_on(cluster, "n1", tmp_path, config="[slurm]\ncommand_timeout_seconds = 3\n") as daemon:
        cluster.signal_slurmctld(signal.SIGSTOP)
        daemon.kernel_line(xid_line(79))
        number = daemon.status()["round"]["number"]
        daemon.wait_until(lambda s: "did not end in time" in s["slurm"]["problem"], "the problem is reported")
        daemon.wait_until(lambda s: s["round"]["number"] > number + 1, "the rounds continue")
        cluster.signal_slurmctld(signal.SIGCONT)
        cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        daemon.wait_until(lambda s: s["slurm"]["problem"] == "", "the problem has ended")


def test_each_slurm_problem_is_reported_and_drain_follows_afterwards(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster, textfile, programs = own_cluster, tmp_path / "healthd.prom", tmp_path / "bin"
    programs.mkdir()
    env = cluster.env | {"PATH": f"{programs}:{cluster.env['PATH']}"}
    job = start_job(cluster, "n1")
    config = f'[slurm]\ncommand_timeout_seconds = 2\n[metrics]\ntextfile = "{textfile}"\n'

    def has_metric(text: str) -> bool:
        return textfile.exists() and text in textfile.read_text()

    def assert_problem(text: str, verdict: str) -> None:
        number = daemon.status()["round"]["number"]

        def decided(status: dict[str, Any]) -> str:
            return f"{status['decision']['would']} {status['decision']['text']}".strip()

        # The first reconciliation may have had the problem before the fault arrived.
        status = daemon.wait_until(lambda s: text in s["slurm"]["problem"] and decided(s).startswith("drain "), text)
        assert "healthd: gpu_xid/79 " in decided(status)
        assert daemon.verdict().startswith(f"{verdict} ")
        daemon.wait_until(lambda s: s["round"]["number"] > number + 1, "the checks continue")
        until(lambda: has_metric("healthd_slurm_problem 1.0\n"), "the metrics report it")

    def scontrol(body: str) -> None:
        (programs / "scontrol").write_text(f"#!/bin/sh\n{body}\n")
        (programs / "scontrol").chmod(0o755)

    with daemon_on(cluster, "n1", tmp_path, config=config, env=env) as daemon:
        cluster.kill_munged()
        daemon.kernel_line(xid_line(79))
        assert_problem("sinfo did not end in time", "warning")
        conf = cluster.directory / "slurm.conf"
        conf.rename(tmp_path / "slurm.conf")
        cluster.start_munged()
        assert_problem("sinfo", "warning")
        scontrol("echo 'slurm_update error: Invalid user id' >&2; exit 1")
        (tmp_path / "slurm.conf").rename(conf)
        assert_problem(
            "scontrol update: Invalid user id: only root, SlurmUser or a Slurm administrator may change a node", "drain"
        )
        scontrol("exit 127")
        assert_problem("scontrol update", "drain")
        assert cluster.job(job)["Restarts"] == "0"
        assert is_free(cluster, "n1")
        (programs / "scontrol").unlink()
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "drained")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        daemon.wait_until(lambda s: s["slurm"]["problem"] == "", "the problem has ended")
        until(lambda: has_metric("healthd_slurm_problem 0.0"), "the metrics report it")


# --- settings and restarts


def test_reload_of_invalid_file_keeps_old_settings(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    with daemon_on(cluster, node, tmp_path) as daemon:
        assert daemon.process is not None
        daemon.configure('mode = "observe"\n[checks.gpu_cuont]\nexpected = 8\n')
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "settings not reloaded" in daemon.log.read_text(), "the settings are kept")
        message = next(line for line in daemon.log.read_text().splitlines() if "settings not reloaded" in line)
        assert str(daemon.config) in message
        assert "gpu_cuont" in message
        assert "gpu_count" in message.replace("gpu_cuont", "")  # the suggested name
        daemon.configure("[checks.gpu_count]\nexpected = 9\n")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda s: condition(s, "gpu_count/fewer_than_expected") is not None, "the new settings")
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_count/fewer_than_expected: ")


def test_each_log_line_counts_once_across_restarts(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    def line(link: int) -> str:
        return (
            f"nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 22013, Non-fatal, Link {link:02d} Minion Link DLREQ interrupt"
        )

    def counted(count: int) -> Callable[[dict[str, Any]], bool]:
        return lambda s: (entry := condition(s, "sxid/22013")) is not None and entry["count"] >= count

    with daemon_on(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(*(line(link) for link in range(3)))
        daemon.wait_until(counted(3), "three")
        daemon.kill()
        daemon.kernel_line(*(line(link) for link in range(3, 5)))
        daemon.start()
        daemon.wait_until(counted(5), "five")
        daemon.stop()
        os.rename(daemon.kernel_log, f"{daemon.kernel_log}.1")  # logrotate moves the file after a last line
        with open(f"{daemon.kernel_log}.1", "a", encoding="ascii") as old:
            old.write(line(5) + "\n")
        daemon.kernel_line(line(6))
        daemon.start()
        daemon.wait_until(counted(7), "seven")
        status = wait_for_rounds(daemon, 2)
        counted_condition = condition(status, "sxid/22013")
        assert counted_condition is not None
        assert counted_condition["count"] == 7
        ledger = json.loads((daemon.run_dir / "ledger.json").read_text())
        assert [event.get("lines", 1) for event in ledger["events"]] == [1] * 7
    assert is_free(cluster, node)
