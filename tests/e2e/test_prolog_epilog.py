"""Prolog and epilog in a real slurmd, which gives them neither PATH nor HOME, and HealthCheckProgram."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from healthd_daemon import REPOSITORY, Healthd, condition, end_of_round, xid_line
from slurm_cluster import SlurmCluster
from waiting import until

SCRIPTS = REPOSITORY / "packaging/slurm"


class Node(NamedTuple):
    cluster: SlurmCluster
    directory: Path

    def daemon(self, mode: str = "act", interval: str = "60", **options: str) -> Healthd:
        flags = ("--mode", mode, "--node-name", "n1", "--interval", interval)
        return Healthd(*flags, directory=self.directory, env=self.cluster.env, **options)  # type: ignore[arg-type]

    def submit(self, script: str = "echo the job runs", *options: str) -> tuple[str, Path]:
        output = self.directory / f"job.{time.monotonic_ns()}"
        return self.cluster.sbatch(script, "-w", "n1", f"--output={output}", *options), output


def install(tmp_path: Path, settings: Sequence[str]) -> None:
    """Install prolog, epilog and healthcheck into this folder, with their settings and a `healthd` of this checkout."""
    healthd_script = tmp_path / "healthd"
    healthd_script.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m healthd "$@"\n')
    healthd_script.chmod(0o755)
    defaults_file = tmp_path / "default"
    defaults_file.write_text(
        "\n".join((f"HEALTHD_RUNTIME_DIR={tmp_path}/run", f"HEALTHD={healthd_script}", *settings)) + "\n"
    )
    for name in ("prolog", "epilog", "healthcheck"):
        copy = tmp_path / name
        copy.write_text((SCRIPTS / name).read_text().replace("/etc/default/healthd", str(defaults_file)))
        copy.chmod(0o755)


@contextmanager
def node_with_scripts(
    tmp_path: Path, settings: Sequence[str], extra_conf: Sequence[str], version: str | None = None
) -> Iterator[Node]:
    """Yield a node whose slurmd runs the scripts as shipped. Only the path of their settings differs."""
    install(tmp_path, settings)
    conf = [f"Prolog={tmp_path}/prolog", f"Epilog={tmp_path}/epilog", *extra_conf]
    with SlurmCluster(nodes=1, extra_conf=conf, version=version) as cluster:
        yield Node(cluster, tmp_path)


@contextmanager
def paused_daemon(daemon: Healthd) -> Iterator[None]:
    """Stop the daemon for this block: its next round comes after everything in it, however long that takes.
    The verdict holds for three intervals after the last round.
    """
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


NOHOLD = "SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,nohold_on_prolog_fail"


@pytest.mark.parametrize("flags", [[], ["PrologFlags=Alloc"]], ids=["first_step", "alloc"])
@pytest.mark.parametrize(
    ("nohold", "version"),
    [([], None), ([NOHOLD], None), ([], "24.11"), ([NOHOLD], "26.05")],
    ids=["hold", "nohold", "hold-24.11", "nohold-26.05"],
)
def test_prolog_refuses_job_on_node_to_drain_and_job_stays_queued(
    tmp_path: Path, flags: list[str], nohold: list[str], version: str | None
) -> None:
    with node_with_scripts(tmp_path, [], [*flags, *nohold], version) as node:
        cluster = node.cluster
        with node.daemon(interval="300") as daemon:  # the last verdict holds for three intervals
            job, output = node.submit()
            cluster.wait_job(job, "COMPLETED")
            assert output.read_text() == "the job runs\n"
            # The drain is decided and written in the verdict. Resuming the node in Slurm simulates a race.
            daemon.kernel_line(xid_line(79))
            cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79")
            assert daemon.verdict().startswith("drain ")
            daemon.kill()  # as if it had been slow: it would drain again
            cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
            job, output = node.submit()
            refused = cluster.wait_state("n1", "DRAIN")
            assert refused.reason == "Prolog error"
            pending = cluster.wait_job(job, "PENDING")
            assert pending["Restarts"] == "1"
            expected = ("BeginTime", False) if nohold else ("launch_failed_requeued_held", True)
            until(lambda: (now := cluster.job(job)) and (now["Reason"], now["Priority"] == "0") == expected)
            until(lambda: output.exists() and "accepts no jobs" in output.read_text())
            assert "healthd: node n1 accepts no jobs: gpu_xid/79 0000:61:00.0: Xid 79" in output.read_text()
            assert "accepts no jobs: gpu_xid/79" in cluster.log("slurmd.n1"), "the log of slurmd shows it too"


def test_node_resumed_after_long_drain_gets_jobs_at_once(tmp_path: Path) -> None:
    """healthd looks once a minute here: it notices the resume only after the job."""
    with node_with_scripts(tmp_path, [], ["PrologFlags=Alloc"]) as node, node.daemon() as daemon:
        daemon.kernel_line(xid_line(79))
        node.cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79")
        assert daemon.verdict().startswith("drain ")
        until(lambda: daemon.verdict().startswith("warning "), seconds=400)
        node.cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
        job, output = node.submit()
        node.cluster.wait_job(job, "COMPLETED")
        assert output.read_text() == "the job runs\n"
        assert "DRAIN" not in node.cluster.node("n1").flags


def test_prolog_error_gets_reason_of_healthd_and_ends_after_repair(tmp_path: Path) -> None:
    """The fault is seen right after a resume: the prolog refuses the next job before the drain of healthd is in
    Slurm."""
    scontrol, gate = tmp_path / "bin/scontrol", tmp_path / "gate"
    scontrol.parent.mkdir()
    drain_gate = f'case "$*" in *State=DRAIN*) [ -e {gate} ] || exit 1;; esac'
    scontrol.write_text(f'#!/bin/sh\n{drain_gate}\nexec {shutil.which("scontrol")} "$@"\n')
    scontrol.chmod(0o755)
    with node_with_scripts(tmp_path, [], ["PrologFlags=Alloc", NOHOLD]) as node:
        cluster = node.cluster
        cluster.env["PATH"] = f"{scontrol.parent}:{cluster.env['PATH']}"
        with node.daemon(interval="5") as daemon:
            daemon.kernel_line(xid_line(79))
            until(lambda: daemon.verdict().startswith("drain "))
            node.submit()
            cluster.wait_state("n1", "DRAIN", reason="Prolog error")
            gate.touch()
            cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
            expected = "drain and requeue: healthd: gpu_xid/79 "
            daemon.wait_until(
                lambda s: s["slurm"]["owner"] == "healthd" and s["decision"]["text"].startswith(expected), "it is ours"
            )
            assert "done" in daemon.request(command="repaired", code="gpu_xid/79")
            cluster.wait_state("n1", "IDLE", without=("DRAIN",))


def test_resume_in_first_minute_counts_although_prolog_refuses_next_job(
    tmp_path: Path,
) -> None:
    with node_with_scripts(tmp_path, [], ["PrologFlags=Alloc", NOHOLD]) as node, node.daemon(interval="30") as daemon:
        time.sleep(3)  # slurmctld must not have started in the second in which healthd reads the drain
        daemon.kernel_line(xid_line(79))
        node.cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79")
        read_status = daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        next_status = daemon.wait_until(
            lambda s: s["round"]["number"] > read_status["round"]["number"], "the next round"
        )
        daemon.wait_until(
            lambda s: s["slurm"]["read_at"] > next_status["round"]["started"], "Slurm is read at the end of that round"
        )
        with paused_daemon(daemon):
            node.cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
            node.submit()
            node.cluster.wait_state("n1", "DRAIN", reason="Prolog error")
        node.cluster.wait_state("n1", "IDLE", without=("DRAIN",))
        status = daemon.wait_until(
            lambda s: (condition(s, "gpu_xid/79") or {})["state"] == "acknowledged", "acknowledged"
        )
        assert status["slurm"]["owner"] == "none"
        assert not daemon.verdict().startswith("drain ")


SITE_CHECK = '[checks.exec.site]\ncommand = ["{}"]\n'


@pytest.mark.parametrize("restarts", [False, True], ids=["goes_on", "restarts"])
def test_node_drained_by_prolog_is_resumed_although_check_fails_then(tmp_path: Path, restarts: bool) -> None:
    """The check has not yet passed at the first sight of the "Prolog error", and no other change in Slurm is due."""
    site_script, failure_file = tmp_path / "site", tmp_path / "fails"
    site_script.write_text(f"#!/bin/sh\n[ ! -e {failure_file} ] || exit 3\n")
    site_script.chmod(0o755)
    with (
        node_with_scripts(tmp_path, [], ["PrologFlags=Alloc", NOHOLD]) as node,
        node.daemon(interval="30", config=SITE_CHECK.format(site_script)) as daemon,
    ):
        time.sleep(3)  # slurmctld must not have started in the second in which healthd reads the drain
        daemon.kernel_line(xid_line(79))
        node.cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79")
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        failure_file.touch()
        daemon.wait_until(lambda s: "site" in str(s["unknown"]), "the check fails")
        daemon.wait_until(lambda s: s["slurm"]["read_at"] > end_of_round(s), "Slurm is read at the end of that round")
        with paused_daemon(daemon):
            node.cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
            node.submit()
            node.cluster.wait_state("n1", "DRAIN", reason="Prolog error")
        daemon.wait_until(
            lambda s: "healthd's prolog refused a job" in s["decision"]["text"], "the daemon waits for the check"
        )
        if restarts:
            daemon.kill()
            daemon.start()
        assert "DRAIN" in node.cluster.node("n1").flags
        failure_file.unlink()
        node.cluster.wait_state("n1", "IDLE", without=("DRAIN",))


def test_prolog_admits_jobs_in_observe_mode_and_with_expired_verdict(tmp_path: Path) -> None:
    with node_with_scripts(tmp_path, [], []) as node:
        with node.daemon("observe") as daemon:
            daemon.kernel_line(xid_line(79))
            daemon.wait_until(lambda s: s["health"] == "unhealthy", "the fault is known")
            job, _ = node.submit()
            node.cluster.wait_job(job, "COMPLETED")
        (daemon.run_dir / "verdict").write_text(f"drain {int(time.time()) - 1} gpu_xid/79 x: of yesterday\n")
        job, _ = node.submit()
        node.cluster.wait_job(job, "COMPLETED")
        assert "DRAIN" not in node.cluster.node("n1").flags


def test_prolog_refuses_job_without_daemon_when_stale_is_deny(tmp_path: Path) -> None:
    with node_with_scripts(tmp_path, ["HEALTHD_ON_STALE=deny"], []) as node:
        job, _ = node.submit()
        node.cluster.wait_state("n1", "DRAIN", reason="Prolog error")
        node.cluster.wait_job(job, "PENDING")
        until(lambda: node.cluster.job(job)["Reason"] == "launch_failed_requeued_held", "it is held")
        assert "healthd has no verdict for this node" in node.cluster.log("slurmd.n1")
        node.cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
        with node.daemon():
            node.cluster.run("scontrol", "release", job)
            node.cluster.wait_job(job, "COMPLETED")


def test_epilog_checks_gpus_before_next_job_starts(tmp_path: Path) -> None:
    scenario = tmp_path / "gpus.toml"
    scenario.write_text('profile = "dgx-h100"\n')
    with (
        node_with_scripts(tmp_path, ["HEALTHD_EPILOG_SECONDS=60"], []) as node,
        node.daemon(interval="3600", fake_nvml=str(scenario)) as daemon,  # no round comes by itself
    ):
        time.sleep(10)  # a check that has just run is not repeated at once
        bad_gpu = 'profile = "dgx-h100"\n[gpu.3]\nremap_failure = true\n'
        first, _ = node.submit(f"printf '{bad_gpu}' > {scenario}", "--exclusive")
        second, output = node.submit("echo the second runs", "--exclusive", f"--dependency=afterany:{first}")
        status = daemon.wait_until(lambda s: condition(s, "gpu_row_remap/failure") is not None, "the condition is open")
        assert condition(status, "gpu_row_remap/failure", "0000:61:00.0")
        node.cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_row_remap/failure")
        time.sleep(2)
        node.cluster.wait_job(second, "PENDING")
        # The job may have started before the drain arrived: then the prolog refused it and wrote so into its output.
        assert not output.exists() or "the second runs" not in output.read_text()


def test_epilog_ends_with_hung_daemon_and_never_drains(tmp_path: Path) -> None:
    with node_with_scripts(tmp_path, ["HEALTHD_EPILOG_SECONDS=2"], []) as node, node.daemon() as daemon:
        daemon.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        job, _ = node.submit("true")
        node.cluster.wait_job(job, "COMPLETED")
        node.cluster.wait_state("n1", "IDLE", without=["COMPLETING", "DRAIN"])
        daemon.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        daemon.kill()
        job, _ = node.submit("true")  # the socket has no listener
        node.cluster.wait_job(job, "COMPLETED")
        node.cluster.wait_state("n1", "IDLE", without=["COMPLETING", "DRAIN"])


def test_healthd_works_as_health_check_program_of_slurmd(tmp_path: Path) -> None:
    check = tmp_path / "healthcheck"
    conf = [f"HealthCheckProgram={check}", "HealthCheckInterval=1"]
    with node_with_scripts(tmp_path, [], conf) as node:
        with node.daemon() as daemon:
            daemon.kernel_line(xid_line(79))
            node.cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79")
            assert "takes" not in daemon.verdict()
            completed = subprocess.run(["/bin/sh", check], env={}, capture_output=True, text=True, timeout=120)
            assert completed.returncode == 2
            assert completed.stdout.startswith("drain: gpu_xid/79 0000:61:00.0")
        until(lambda: "drain: gpu_xid/79" in node.cluster.log("slurmd.n1"))


def test_leftover_gpu_process_is_checked_after_job_and_drains_if_it_stays(tmp_path: Path) -> None:
    """A captured cgroup tree of Slurm replaces that of the machine and shows that the node is empty."""
    scope = tmp_path / "tree/sys/fs/cgroup/system.slice/slurmstepd.scope/system"
    scope.mkdir(parents=True)
    (scope / "cgroup.procs").write_text("1\n")
    scenario = tmp_path / "gpus.toml"
    scenario.write_text('profile = "dgx-h100"\n[gpu.3]\nprocesses = [4711]\n')
    config = "[checks.gpu_processes]\nconfirm_seconds = 20\n"  # the test must have read the status before
    flags = ("--mode", "act", "--node-name", "n1", "--interval", "60", "--root", str(tmp_path / "tree"))
    with SlurmCluster(nodes=1) as cluster:
        daemon = Healthd(*flags, directory=tmp_path, env=cluster.env, fake_nvml=str(scenario), config=config)
        with daemon:
            assert condition(daemon.status(), "gpu_processes/leftover") is None
            assert daemon.request(command="job-ended")["done"]
            status = daemon.wait_until(
                lambda s: condition(s, "gpu_processes/leftover") is not None, "the leftover is pending"
            )
            assert (condition(status, "gpu_processes/leftover") or {})["state"] == "pending"
            job = scope.parent / "job_12/step_0"
            job.mkdir(parents=True)
            (job / "cgroup.procs").write_text("4712\n")
            daemon.wait_until(
                lambda s: condition(s, "gpu_processes/leftover") is None, "the process may belong to the new job"
            )
            (job / "cgroup.procs").write_text("")
            daemon.request(command="job-ended")
            cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_processes/leftover")
