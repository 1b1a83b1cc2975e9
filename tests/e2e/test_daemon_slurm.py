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
from healthd_daemon import Healthd, condition, rounds, write_whole, xid
from slurm_cluster import SlurmCluster, running_job
from slurm_look import run_again, until_listed
from waiting import until

NODES = 20
TESTS = Path(__file__).resolve().parents[1]
LOST_GPU = 'profile = "dgx-h100"\n[gpu.3]\nlost = true\n'
HEALTHY = 'profile = "dgx-h100"\n'
LOST_PCI = "0000:61:00.0"  # GPU 3 of the profile
# RPCs between slurmd and slurmctld themselves, and sdiag's own request.
NOT_OURS = re.compile(r"REQUEST_STATS_INFO|MESSAGE_.*|REQUEST_COMPLETE_.*|REQUEST_STEP_COMPLETE")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=NODES, gpus=0) as running:
        yield running


@pytest.fixture
def own_cluster() -> Iterator[SlurmCluster]:
    """Start a cluster for a test that stops slurmctld; commands wait up to 5 s for it."""
    with SlurmCluster(nodes=1, gpus=0, message_timeout=5) as running:
        yield running


def healthd(cluster: SlurmCluster, node: str, tmp_path: Path, mode: str = "act", **options: Any) -> Healthd:
    """Return a daemon for this node with one round per second."""
    flags = ("--mode", mode, "--node-name", node, "--interval", "1")
    return Healthd(*flags, directory=tmp_path, **{"env": cluster.env, **options})


def is_free(cluster: SlurmCluster, node: str) -> bool:
    found = cluster.node(node)
    return found.flags.isdisjoint({"DRAIN", "DOWN"}) and not found.reason


# --- faults that act


def test_an_xid_79_drains_the_node_and_requeues_its_job_and_repaired_resumes_it(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    job = running_job(cluster, node)
    with healthd(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(xid(79))
        until(lambda: "DRAIN" in cluster.node(node).flags, "drained")
        drained = cluster.node(node)
        assert drained.reason.startswith("healthd: gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus, GPU 3")
        assert drained.user == "root"
        after = cluster.wait_job(job, "PENDING")
        assert after["Restarts"] == "1"
        assert after["JobId"] == job
        assert daemon.verdict().startswith("drain ")
        rounds(daemon, 3)  # every check is clean, but no repair was recorded
        assert "DRAIN" in cluster.node(node).flags
        assert cluster.node(node).reason_time == drained.reason_time
        assert "done" in daemon.ask(command="repaired", code="gpu_xid/79", part="0000:61:00.0")
        until(lambda: is_free(cluster, node), "free again")
        status = daemon.until(lambda s: s["health"] == "healthy", "healthy again")
        assert [c["cleared_by"] for c in status["cleared"]] == ["repaired by root (uid 0)"]
        assert daemon.verdict().startswith("ok ")
        daemon.until(lambda _: "resumed the node" in daemon.log.read_text(), "the resume is confirmed")
        told = [line for line in daemon.log.read_text().splitlines() if line.startswith("WARNING: ")]
        done = ("drained the node: ", "job ", "resumed the node: ")
        assert [line for word in done for line in told if line.startswith(f"WARNING: {word}")] == [
            f"WARNING: drained the node: {drained.reason}",
            f"WARNING: job {job} was requeued",
            f"WARNING: resumed the node: {drained.reason}",
        ]
    assert cluster.job(job)["Restarts"] == "1"


def test_a_batch_job_that_slurm_requeued_because_it_was_missing_on_its_node_is_requeued_like_any_other(
    tmp_path: Path,
) -> None:
    """Slurm sets its BatchFlag to 2: slurmctld counts it up to a limit."""
    with SlurmCluster(nodes=1, gpus=0, message_timeout=5, extra_conf=["BatchStartTimeout=1"]) as cluster:
        job = until_listed(cluster, running_job(cluster, "n1"), "n1")
        time.sleep(6)  # time after which slurmctld counts a job as missing: BatchStartTimeout and MessageTimeout
        cluster.stop_slurmd("n1")
        cluster.kill_slurmstepd(job)
        cluster.remove_dead_slurmstepd(job)
        cluster.start_slurmd("n1")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert f"Batch JobId={job} missing from batch node n1" in cluster.log("slurmctld")
        run_again(cluster, job, "n1")
        assert cluster.job(job)["BatchFlag"] == "2"
        time.sleep(1.1)
        with healthd(cluster, "n1", tmp_path) as daemon:
            daemon.kernel_line(xid(79))
            cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
            assert cluster.wait_job(job, "PENDING")["Restarts"] == "2"
            daemon.until(lambda _: f"job {job} was requeued" in daemon.log.read_text(), "the requeue is confirmed")


def test_a_lost_gpu_drains_and_a_repair_in_words_alone_does_not_resume(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    scenario = tmp_path / "gpus.toml"
    write_whole(scenario, HEALTHY)
    with healthd(cluster, node, tmp_path, fake_nvml=str(scenario)) as daemon:
        write_whole(scenario, LOST_GPU)
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
        daemon.ask(command="repaired", code="gpu_access/lost")
        rounds(daemon, 2)
        assert condition(daemon.status(), "gpu_access/lost"), "the check finds it again"
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
        assert "UNDRAIN" not in daemon.log.read_text()  # not even until the next run of the check
        write_whole(scenario, HEALTHY)
        rounds(daemon, 3)  # all runs are clean, but a lost GPU needs a reboot
        assert "DRAIN" in cluster.node(node).flags
        daemon.ask(command="repaired", code="gpu_access/lost")
        until(lambda: is_free(cluster, node), "free again")


def test_the_processes_on_gpus_are_asked_for_only_while_the_node_is_drained_and_idle(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    scenario, one = tmp_path / "gpus.toml", ("gpu_processes", "")
    write_whole(scenario, HEALTHY + "[gpu.3]\nprocesses = [1]\n")

    def asked(status: dict[str, Any]) -> bool:
        return one in {(result["check"], result["instance"]) for result in status["results"]}

    config = "[checks.gpu_processes]\nconfirm_seconds = 1.0\n"
    with healthd(cluster, node, tmp_path, fake_nvml=str(scenario), config=config) as daemon:
        status = rounds(daemon, 3)
        assert (status["health"], asked(status)) == ("healthy", False), "no resume waits for it"
        job = running_job(cluster, node, "--no-requeue")
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        assert not asked(rounds(daemon, 3)), "a job still runs"
        cluster.run("scancel", job)
        daemon.until(lambda s: condition(s, "gpu_processes/leftover") is not None, "the leftover process is found")
        daemon.ask(command="repaired", code="gpu_xid/79")
        rounds(daemon, 3)
        assert "DRAIN" in cluster.node(node).flags, "the process is still there"
        write_whole(scenario, HEALTHY)
        until(lambda: is_free(cluster, node), "free again")
        daemon.until(lambda s: s["health"] == "healthy" and not asked(s), "the check no longer runs")


def test_mode_drain_drains_and_leaves_the_jobs(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    job = running_job(cluster, node)
    with healthd(cluster, node, tmp_path, mode="drain") as daemon:
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        rounds(daemon, 2)
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.job(job)["Restarts"] == "0"


def test_a_severity_that_the_site_changes_while_the_drain_stands_requeues_and_enforce_false_resumes(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    job = running_job(cluster, node)
    with healthd(cluster, node, tmp_path, config='[checks.gpu_xid.severity]\n"gpu_xid/79" = "degraded"\n') as daemon:
        assert daemon.process is not None
        daemon.kernel_line(xid(79))
        drained = cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        rounds(daemon, 2)
        assert cluster.job(job)["JobState"] == "RUNNING"
        daemon.configure("")  # the default severity
        daemon.process.send_signal(signal.SIGHUP)
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert cluster.node(node).reason_time == drained.reason_time
        daemon.configure("[checks.gpu_xid]\nenforce = false\n")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: is_free(cluster, node), "free again")
        assert daemon.until(lambda s: s["health"] == "warning", "the warning remains")["conditions"]
        daemon.kernel_line(xid(79))
        rounds(daemon, 3)
        assert is_free(cluster, node)
    assert cluster.job(job)["Restarts"] == "1"


# --- conditions that must not act


def test_a_warning_and_healthy_rounds_cost_slurm_nothing(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    with healthd(cluster, node, tmp_path) as daemon:
        daemon.until(lambda s: s["slurm"]["state"] is not None, "the first reconciliation has ended")
        before = cluster.sdiag_counts()
        rounds(daemon, 2)
        daemon.kernel_line(xid(31, text="Ch 0000005a, intr 10000000. MMU Fault"))
        status = daemon.until(lambda s: s["health"] == "warning", "the warning is open")
        assert condition(status, "gpu_xid/31")
        rounds(daemon, 3)
        after = cluster.sdiag_counts()
        assert {
            n: after[n] - before.get(n, 0) for n in after if not NOT_OURS.fullmatch(n) and after[n] != before.get(n)
        } == {}
        assert daemon.verdict().startswith("warning ")
    assert is_free(cluster, node)


def logged_commands(cluster: SlurmCluster, folder: Path) -> tuple[dict[str, str], Path]:
    """Return an environment in which Slurm's commands log their arguments before they run, and that log."""
    log = folder / "commands.log"
    wrappers = folder / "bin"
    wrappers.mkdir()
    for name in ("scontrol", "sinfo", "squeue", "scancel", "sacctmgr"):
        real = next(p for p in map(Path, ("/usr/bin/", "/usr/local/bin/")) if (p / name).exists()) / name
        (wrappers / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexec {real} "$@"\n')
        (wrappers / name).chmod(0o755)
    log.touch()
    return {**cluster.env, "PATH": f"{wrappers}:{os.environ['PATH']}"}, log


def changing(log: Path) -> list[str]:
    """Return the commands that can change something: all except those known to read only."""
    read_only = re.compile(r"sinfo |squeue |scontrol (show|listpids|ping)\b")
    return [line for line in log.read_text().splitlines() if not read_only.match(line)]


def test_observe_mode_changes_nothing_whatever_breaks(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    env, log = logged_commands(cluster, tmp_path)
    scenario = tmp_path / "gpus.toml"
    write_whole(scenario, HEALTHY)
    job = running_job(cluster, node)
    lines = [json.loads(line)["text"] for line in (TESTS / "data/kernel_lines.jsonl").read_text().splitlines()]
    words = set()
    with healthd(cluster, node, tmp_path, mode="observe", env=env, fake_nvml=str(scenario)) as daemon:
        words.add(daemon.verdict().split()[0])
        for place in range(0, len(lines), 25):
            daemon.kernel_line(*(text for line in lines[place : place + 25] for text in line.split("\n")))
            rounds(daemon, 0)
            words.add(daemon.verdict().split()[0])
        daemon.kernel_line(xid(79), xid(48))
        status = daemon.until(lambda s: condition(s, "gpu_xid/79", LOST_PCI) is not None, "the fault is open")
        assert status["health"] == "unhealthy"
        assert status["decision"]["action"] == "leave"
        assert status["decision"]["would"].startswith('drain with "healthd: ')
        assert status["decision"]["would"].endswith(" and requeue")
        words.add(daemon.verdict().split()[0])
        write_whole(scenario, LOST_GPU)
        daemon.until(lambda s: condition(s, "gpu_access/lost") is not None, "the lost GPU is found")
        daemon.ask(command="pause", seconds=0.5, why="test")
        daemon.until(lambda s: s["pause"] is None, "the pause is over")
        daemon.ask(command="repaired", code="gpu_xid/79")
        daemon.kill()
        daemon.start()
        rounds(daemon, 2)
        words.add(daemon.verdict().split()[0])
    assert changing(log) == []
    assert "drain" not in words
    assert "warning" in words
    assert is_free(cluster, node)
    assert cluster.job(job)["Restarts"] == "0"
    # the same log records the commands of mode act
    with healthd(cluster, node, tmp_path, env=env, fake_nvml=str(scenario)):
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        cluster.wait_job(job, "PENDING")
    assert [" ".join(line.split()[1:3]) for line in changing(log)] == [
        f"update NodeName={node}",
        f"update JobId={job}",
        "requeue incomplete",
    ]


def test_what_the_log_held_before_the_first_start_is_history(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    then = int(time.time()) - 40 * 86400
    daemon = healthd(cluster, node, tmp_path)
    daemon.kernel_line(f"{time.strftime('%Y-%m-%dT%H:%M:%S+00:00', time.gmtime(then))} {node} kernel: {xid(48)}")
    with daemon:
        status = rounds(daemon, 2)
        found = condition(status, "gpu_xid/48")
        assert found is not None
        assert (found["severity"], found["history"]) == ("info", True)
        assert found["last_seen"] == then
        assert status["health"] == "healthy"
        assert daemon.verdict().startswith("ok ")
    assert is_free(cluster, node)


def test_what_was_only_observed_never_drains_but_what_a_check_finds_now_does(
    cluster: SlurmCluster, unused: Iterator[str], tmp_path: Path
) -> None:
    for name, scenario_now, drains in (("healthy", HEALTHY, False), ("lost", LOST_GPU, True)):
        node, folder = next(unused), tmp_path / name
        folder.mkdir()
        scenario = folder / "gpus.toml"
        write_whole(scenario, LOST_GPU)
        daemon = healthd(cluster, node, folder, mode="observe", fake_nvml=str(scenario))
        with daemon:
            daemon.kernel_line(xid(79), xid(48, pci="0000:1b:00"), xid(64, pci="0000:43:00"))
            daemon.until(lambda s: condition(s, "gpu_xid/64") is not None, "the faults are open")
            daemon.until(lambda s: condition(s, "gpu_access/lost") is not None, "the lost GPU is found")
        write_whole(scenario, scenario_now)
        with healthd(cluster, node, folder, fake_nvml=str(scenario)) as daemon:
            status = rounds(daemon, 2)
            assert condition(status, "gpu_xid/79")
            if drains:
                cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
            else:
                assert is_free(cluster, node)
                assert daemon.verdict().startswith("warning ")


# --- operators


def test_an_operators_resume_is_final_for_an_event_but_not_for_a_check_that_still_fails(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    scenario = tmp_path / "gpus.toml"
    write_whole(scenario, HEALTHY)
    old = running_job(cluster, node)
    with healthd(cluster, node, tmp_path, fake_nvml=str(scenario)) as daemon:
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        cluster.wait_job(old, "PENDING")
        rounds(daemon, 2)
        daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        time.sleep(1.5)  # so that the resume is not in the second in which the drain was last read
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        daemon.until(
            lambda s: (c := condition(s, "gpu_xid/79")) is not None and c["state"] == "acknowledged", "acknowledged"
        )
        rounds(daemon, 3)
        assert is_free(cluster, node)
        new = running_job(cluster, node)
        rounds(daemon, 2)
        assert cluster.job(new)["JobState"] == "RUNNING"
        # A check that fails now acts. This job began after the fault of the Xid, but before this one.
        write_whole(scenario, LOST_GPU)
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
        assert cluster.wait_job(new, "PENDING")["Restarts"] == "1"
        rounds(daemon, 2)
        daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        time.sleep(1.5)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")  # the check still fails
        rounds(daemon, 1)
        daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
    assert cluster.job(new)["Restarts"] == "1"


def test_a_job_that_started_after_the_resume_is_not_requeued_for_the_old_fault(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    scenario = tmp_path / "gpus.toml"
    write_whole(scenario, LOST_GPU)
    with healthd(cluster, node, tmp_path, fake_nvml=str(scenario)) as daemon:
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        daemon.kill()  # so that the job can start before healthd detects the resume
        time.sleep(1.5)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        job = running_job(cluster, node)
        daemon.start()
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        rounds(daemon, 3)
        assert cluster.job(job)["JobState"] == "RUNNING"
        assert cluster.job(job)["Restarts"] == "0"


def test_an_operators_drain_is_never_touched(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=replace the fan; ticket 12")
    before = cluster.node(node)
    with healthd(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(xid(79))
        status = daemon.until(lambda s: s["slurm"]["owner"] == "other", "the operator's drain is seen")
        rounds(daemon, 2)
        assert cluster.node(node) == before
        daemon.ask(command="repaired", code="gpu_xid/79")
        status = rounds(daemon, 2)
        assert status["health"] == "healthy"
        assert cluster.node(node) == before


def test_a_drain_that_an_operator_takes_over_is_theirs(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    with healthd(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: ")
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=mine now")
        daemon.until(lambda s: s["slurm"]["owner"] == "other", "the operator's drain is seen")
        daemon.ask(command="repaired", code="gpu_xid/79")
        rounds(daemon, 2)
        assert cluster.node(node).reason == "mine now"


def test_in_a_pause_nothing_happens_and_after_it_a_check_decides(
    cluster: SlurmCluster, unused: Iterator[str], tmp_path: Path
) -> None:
    for name, scenario_after, drains in (("reset", HEALTHY, False), ("broken", LOST_GPU, True)):
        node, folder = next(unused), tmp_path / name
        folder.mkdir()
        scenario = folder / "gpus.toml"
        write_whole(scenario, LOST_GPU if drains else HEALTHY)
        job = running_job(cluster, node)
        # a pause that was set before the faults
        with healthd(cluster, node, folder, mode="observe", fake_nvml=str(scenario)) as daemon:
            daemon.ask(command="pause", seconds=600, why="driver upgrade")
        with healthd(cluster, node, folder, fake_nvml=str(scenario)) as daemon:
            daemon.kernel_line(xid(79), xid(119, pci="0000:43:00"))
            status = daemon.until(lambda s: condition(s, "gpu_xid/119") is not None, "the faults are open")
            status = rounds(daemon, 2)
            assert status["decision"]["action"] == "leave"
            assert is_free(cluster, node)
            assert not daemon.verdict().startswith("drain ")
            write_whole(scenario, scenario_after)
            assert "done" in daemon.ask(command="unpause")
            rounds(daemon, 2)
            if drains:
                cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_access/lost {LOST_PCI}: ")
                assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
            else:
                assert is_free(cluster, node)
                assert cluster.job(job)["JobState"] == "RUNNING"


# --- slurmctld is down or hangs


def test_a_fault_while_slurmctld_is_down_drains_when_it_is_back(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster = own_cluster
    job = running_job(cluster, "n1")
    cluster.save(job)
    with healthd(cluster, "n1", tmp_path) as daemon:
        cluster.kill_slurmctld(signal.SIGTERM)
        daemon.kernel_line(xid(79))
        status = daemon.until(lambda s: "contact slurm controller" in s["slurm"]["problem"], "the problem is reported")
        assert status["health"] == "unhealthy"
        assert daemon.verdict().startswith("warning "), "the drain needs a count of the fleet"
        cluster.start_slurmctld()
        cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        daemon.until(lambda s: s["slurm"]["problem"] == "", "the problem has ended")


def test_a_fault_while_slurmctld_hangs_drains_when_it_goes_on(own_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster = own_cluster
    job = running_job(cluster, "n1")
    with healthd(cluster, "n1", tmp_path, config="[slurm]\ncommand_timeout_seconds = 3\n") as daemon:
        cluster.signal_slurmctld(signal.SIGSTOP)
        daemon.kernel_line(xid(79))
        number = daemon.status()["round"]["number"]
        daemon.until(lambda s: "did not end in time" in s["slurm"]["problem"], "the problem is reported")
        daemon.until(lambda s: s["round"]["number"] > number + 1, "the rounds continue")
        cluster.signal_slurmctld(signal.SIGCONT)
        cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        daemon.until(lambda s: s["slurm"]["problem"] == "", "the problem has ended")


def test_trouble_of_every_kind_is_told_in_status_and_metrics_and_the_drain_follows_when_it_is_over(
    own_cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster, textfile, programs = own_cluster, tmp_path / "healthd.prom", tmp_path / "bin"
    programs.mkdir()
    env = cluster.env | {"PATH": f"{programs}:{cluster.env['PATH']}"}
    job = running_job(cluster, "n1")
    config = f'[slurm]\ncommand_timeout_seconds = 2\n[metrics]\ntextfile = "{textfile}"\n'

    def metrics_say(words: str) -> bool:
        return textfile.exists() and words in textfile.read_text()

    def told(words: str, verdict: str) -> None:
        number = daemon.status()["round"]["number"]

        def wanted(status: dict[str, Any]) -> str:
            return f"{status['decision']['would']} {status['decision']['text']}".strip()

        # The first reconciliation may have had the problem before the fault arrived.
        status = daemon.until(lambda s: words in s["slurm"]["problem"] and wanted(s).startswith("drain "), words)
        assert "healthd: gpu_xid/79 " in wanted(status)
        assert daemon.verdict().startswith(f"{verdict} ")
        daemon.until(lambda s: s["round"]["number"] > number + 1, "the checks continue")
        until(lambda: metrics_say("healthd_slurm_problem 1.0\n"), "the metrics report it")

    def scontrol(body: str) -> None:
        (programs / "scontrol").write_text(f"#!/bin/sh\n{body}\n")
        (programs / "scontrol").chmod(0o755)

    with healthd(cluster, "n1", tmp_path, config=config, env=env) as daemon:
        cluster.kill_munged()
        daemon.kernel_line(xid(79))
        told("sinfo did not end in time", "warning")
        conf = cluster.directory / "slurm.conf"
        conf.rename(tmp_path / "slurm.conf")
        cluster.start_munged()
        told("sinfo", "warning")
        scontrol("echo 'slurm_update error: Invalid user id' >&2; exit 1")
        (tmp_path / "slurm.conf").rename(conf)
        told(
            "scontrol update: Invalid user id: only root, SlurmUser or a Slurm administrator may change a node", "drain"
        )
        scontrol("exit 127")
        told("scontrol update", "drain")
        assert cluster.job(job)["Restarts"] == "0"
        assert is_free(cluster, "n1")
        (programs / "scontrol").unlink()
        daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "drained")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        daemon.until(lambda s: s["slurm"]["problem"] == "", "the problem has ended")
        until(lambda: metrics_say("healthd_slurm_problem 0.0"), "the metrics report it")


# --- settings and restarts


def test_a_bad_file_at_sighup_keeps_the_old_settings_and_says_so(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    with healthd(cluster, node, tmp_path) as daemon:
        assert daemon.process is not None
        daemon.configure('mode = "observe"\n[checks.gpu_cuont]\nexpected = 8\n')
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "settings not reloaded" in daemon.log.read_text(), "the settings are kept")
        said = next(line for line in daemon.log.read_text().splitlines() if "settings not reloaded" in line)
        assert str(daemon.config) in said
        assert "gpu_cuont" in said
        assert "gpu_count" in said.replace("gpu_cuont", "")  # the suggested name
        daemon.configure("[checks.gpu_count]\nexpected = 9\n")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.until(lambda s: condition(s, "gpu_count/fewer_than_expected") is not None, "the new settings")
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_count/fewer_than_expected: ")


def test_each_line_of_the_log_counts_once_across_restarts(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    def line(link: int) -> str:
        return (
            f"nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 22013, Non-fatal, Link {link:02d} Minion Link DLREQ interrupt"
        )

    def counted(count: int) -> Callable[[dict[str, Any]], bool]:
        return lambda s: (c := condition(s, "sxid/22013")) is not None and c["count"] >= count

    with healthd(cluster, node, tmp_path) as daemon:
        daemon.kernel_line(*(line(link) for link in range(3)))
        daemon.until(counted(3), "three")
        daemon.kill()
        daemon.kernel_line(*(line(link) for link in range(3, 5)))
        daemon.start()
        daemon.until(counted(5), "five")
        daemon.stop()
        os.rename(daemon.kernel_log, f"{daemon.kernel_log}.1")  # logrotate moves the file after a last line
        with open(f"{daemon.kernel_log}.1", "a", encoding="ascii") as old:
            old.write(line(5) + "\n")
        daemon.kernel_line(line(6))
        daemon.start()
        daemon.until(counted(7), "seven")
        status = rounds(daemon, 2)
        found = condition(status, "sxid/22013")
        assert found is not None
        assert found["count"] == 7
        ledger = json.loads((daemon.run_dir / "ledger.json").read_text())
        assert [event.get("lines", 1) for event in ledger["events"]] == [1] * 7
    assert is_free(cluster, node)
