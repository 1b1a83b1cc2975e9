"""Tests of the fleet limit with real daemons and a real slurmctld. With three nodes it is its minimum, 2."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from healthd_daemon import Healthd, condition, xid_line
from msgspec.structs import replace
from requirements import require_root
from slurm_cluster import SlurmCluster
from slurm_look import HEALTHY, faulty, write_script
from slurm_look import NodeController as Look
from slurm_look import condition as cause

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.policy import Owner, Policy
from healthd.common.model import DrainRecord, FleetHold, Leave, Mode, Severity
from healthd.common.slurm.drain_reason import domain_id

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from simulate import STEP, WAVE, against_real_slurmctld


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=3, gpus=0) as running:
        yield running


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Mount a file system for each node; unmounting it simulates a dead file server."""
    require_root()
    points = {name: tmp_path / f"data-{name}" for name in ("n1", "n2", "n3")}
    for point in points.values():
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], check=True)
    yield points
    for point in points.values():
        subprocess.run(["umount", "-l", point], check=False, capture_output=True)


def daemon_with_mount(cluster: SlurmCluster, name: str, point: Path, folder: Path) -> Healthd:
    folder.mkdir()
    config = f'[checks.mount."{point}"]\nmissing_confirm_seconds = 0.0\n[metrics]\ntextfile = "{folder}/healthd.prom"\n'
    flags = ("--mode", "act", "--node-name", name, "--interval", "1")
    return Healthd(*flags, config=config, env=cluster.env, directory=folder)


def test_third_node_with_shared_cause_waits_and_reports_it(
    cluster: SlurmCluster, mounts: dict[str, Path], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(daemon_with_mount(cluster, name, mounts[name], tmp_path / name)) for name in mounts
        )
        for name in ("n1", "n2"):
            subprocess.run(["umount", mounts[name]], check=True)
            cluster.wait_state(name, "DRAIN", reason=f"healthd: mount/missing {mounts[name]}: ")
        subprocess.run(["umount", mounts["n3"]], check=True)
        status = third.wait_until(
            lambda s: (
                (s["slurm"]["fleet_hold"] or {}).get("times") == 1
                and "delayed by the fleet limit" in s["decision"]["text"]
            ),
            "the fleet limit delays the drain",
        )
        hold = status["slurm"]["fleet_hold"]
        assert (hold["partition"], hold["nodes"], hold["drained"], hold["limit"]) == ("gpu", 3, 2, 2)
        assert condition(status, "mount/missing")
        assert status["decision"]["action"] == "leave"
        assert "delayed by the fleet limit: healthd keeps 2 of 3 nodes in partition gpu" in status["decision"]["text"]
        assert status["decision"]["would"].startswith('drain with "healthd: mount/missing ')
        third.wait_until(lambda _: third.verdict().startswith("warning "), "jobs are accepted")
        assert "DRAIN" not in cluster.node("n3").flags
        page = third.directory / "healthd.prom"
        third.wait_until(
            lambda _: 'healthd_fleet_limit_drain_waiting{kind="shared",partition="gpu"} 1.0' in page.read_text(),
            "metric",
        )
        assert "delayed by the fleet limit" in third.log.read_text()
        command = [*third.argv()[:3], "status", "--runtime-dir", str(third.run_dir)]
        shown = subprocess.run(command, env=third.env, timeout=120, capture_output=True, text=True).stdout
        assert "delayed by the fleet limit" in " ".join(shown.split())
        assert "delayed 1 time; next attempt " in " ".join(shown.split())

        hold = third.wait_until(
            lambda s: (s["slurm"]["fleet_hold"] or {}).get("until", 0) - s["time"] > 30,
            "the wait lasts longer than a restart",
        )["slurm"]["fleet_hold"]
        requests = cluster.sdiag_counts().get("REQUEST_NODE_INFO", 0)
        third.kill()
        third.start()
        again = third.wait_until(lambda s: s["slurm"]["fleet_hold"] is not None, "still waiting")["slurm"]["fleet_hold"]
        assert (again["since"], again["until"]) == (hold["since"], hold["until"]), "a restart starts no new wait"
        time.sleep(2.5)
        assert cluster.sdiag_counts().get("REQUEST_NODE_INFO", 0) <= requests + 4, (
            "no round counts (wait_state reads too)"
        )

        third.kernel_line(xid_line(79))  # a fault of its own hardware does not wait for the file server
        cluster.wait_state("n3", "DRAIN", reason="healthd: gpu_xid/79 ")
        third.wait_until(lambda _: third.verdict().startswith("drain "), "jobs are rejected")
        for daemon_of, name in ((first, "n1"), (second, "n2")):
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounts[name]], check=True)
            daemon_of.wait_until(lambda s: s["health"] == "healthy", "the file server is back")
            cluster.wait_state(name, "IDLE", without=("DRAIN",))


def test_waiting_node_is_healthy_after_its_cause_ended(
    cluster: SlurmCluster, mounts: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("n1", "n2"):
        cluster.run(
            "scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=healthd: mount/missing /data: gone"
        )
    with daemon_with_mount(cluster, "n3", mounts["n3"], tmp_path / "n3") as third:
        subprocess.run(["umount", mounts["n3"]], check=True)
        third.wait_until(lambda s: bool(s["slurm"]["fleet_hold"]) and s["slurm"]["fleet_hold"]["times"] == 1, "delayed")
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounts["n3"]], check=True)
        status = third.wait_until(lambda s: s["health"] == "healthy" and not s["slurm"]["fleet_hold"], "healthy again")
        assert status["decision"]["action"] == "leave"
        assert third.verdict().startswith("ok ")
    assert "DRAIN" not in cluster.node("n3").flags


def test_three_simultaneous_counts_leave_at_most_two_drained(cluster: SlurmCluster) -> None:
    """Each node has waited and finds no drained node; the second count decides."""
    policy = Policy(Mode.ACT, command_timeout_seconds=20, fleet=FleetLimits(jitter_seconds=0.0))
    verdict = faulty(cause(Severity.DEGRADED, "mount/hang", shared_cause=True))
    controllers = [
        Look(cluster, name, policy, record=DrainRecord(hold=FleetHold(time.time(), time.time())))
        for name in cluster.names
    ]
    start = time.time()
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda controller: controller.reconcile_once(verdict), controllers))
    drained = {name for name in cluster.names if "DRAIN" in cluster.node(name).flags}
    assert len(drained) <= 2
    assert sum(isinstance(report.decision, Leave) for report in reports) == 3 - len(drained)
    for controller in controllers:  # simulates the end of the waits
        assert controller.record.hold is None or controller.record.hold.until > start + 40
        if controller.record.hold is not None:
            controller.record = DrainRecord(hold=FleetHold(time.time(), time.time()))
            controller.reconcile_once(verdict)
    assert sum("DRAIN" in cluster.node(name).flags for name in cluster.names) == 2


@pytest.mark.parametrize("version", [None, "24.11"])
def test_fullest_partition_decides_even_if_hidden_or_down(version: str | None) -> None:
    """24.11 keeps the reasons of ended drains: they do not count, and a new drain with the same reason is a new one."""
    policy = Policy(Mode.ACT, command_timeout_seconds=20, fleet=FleetLimits(67.0, 0, jitter_seconds=0.0))
    verdict = faulty(cause(Severity.DEGRADED, "mount/hang", shared_cause=True))
    with SlurmCluster(nodes=4, gpus=0, version=version) as cluster:
        cluster.run("scontrol", "create", "PartitionName=pair", "Nodes=n[2-3]", "Hidden=YES", "State=DOWN")
        first, second, third = (Look(cluster, name, policy) for name in ("n1", "n2", "n3"))
        for controller in (first, second):
            assert controller.reconcile_once(verdict).owner is Owner.HEALTHD
        delayed = third.reconcile_once(verdict)
        assert isinstance(delayed.decision, Leave)
        assert delayed.record.hold is not None
        hold = delayed.record.hold
        assert (hold.partition, hold.nodes, hold.drained, hold.limit) in (("gpu", 4, 2, 2), ("pair", 2, 1, 1))
        assert first.reconcile_once(HEALTHY).owner is Owner.NONE
        third.record = DrainRecord()
        hold = third.reconcile_once(verdict).record.hold
        assert hold is not None
        assert (hold.partition, hold.nodes, hold.drained, hold.limit) == ("pair", 2, 1, 1), (
            "the other partition has room"
        )
        again = first.reconcile_once(verdict)
        assert again.owner is Owner.HEALTHD, again.decision
        assert second.reconcile_once(HEALTHY).owner is Owner.NONE
        third.record = DrainRecord()
        assert third.reconcile_once(verdict).owner is Owner.HEALTHD
        assert "DRAIN" in cluster.node("n3").flags


def test_twenty_nodes_meet_aims_of_make_simulate() -> None:
    """Simulates two and a half hours, with real commands."""
    outcome, counted_requests = against_real_slurmctld(20)
    assert outcome.missed() == []
    before_the_wave = outcome.drained[: int(WAVE / STEP) - 1]
    assert max(before_the_wave) == 2, "the limit is used and not exceeded (the wave's node may be one of the two)"
    assert outcome.wave_drained == 1
    assert counted_requests == outcome.total_requests, "sdiag counted each request, and no other"


def test_nothing_is_drained_or_requeued_if_fleet_cannot_be_counted(cluster: SlurmCluster, tmp_path: Path) -> None:
    """sinfo of all nodes fails, as with a slow slurmctld; sinfo of one node works."""
    write_script(tmp_path / "sinfo", f'case "$*" in *" -n "*) exec {shutil.which("sinfo")} "$@";; esac; exit 1')
    failing_sinfo = {"PATH": f"{tmp_path}:{cluster.env['PATH']}"}
    limits = FleetLimits(own_hardware_limit_percent=0.0, own_hardware_limit_min_nodes=2)
    policy = Policy(Mode.ACT, command_timeout_seconds=20, fleet=limits)
    controllers = [Look(cluster, name, policy, environment=failing_sinfo) for name in cluster.names]
    jobs = [controller.start_job("sleep 600") for controller in controllers]
    verdict = faulty(cause(Severity.CRITICAL))
    for controller in controllers:
        report = controller.reconcile_once(verdict)
        assert isinstance(report.decision, Leave)
        assert "cannot be counted" in report.problem
    assert [name for name in cluster.names if "DRAIN" in cluster.node(name).flags] == []
    for controller in controllers:
        controller.environment = {}
        controller.reconcile_once(verdict)
    assert sum("DRAIN" in cluster.node(name).flags for name in cluster.names) == 2
    assert sum(int(cluster.job(job)["Restarts"]) for job in jobs) == 2


# --- the limit of an NVLink domain


@pytest.mark.parametrize("version", [None, "24.11"])
def test_third_node_of_an_nvlink_domain_is_held_and_other_domains_are_not(version: str | None) -> None:
    """A fault of a switch that looks like broken hardware on each node of a rack. Another rack is not affected."""
    rack, other = domain_id("00000001-0000-0000-0000-000000000001"), domain_id("00000001-0000-0000-0000-000000000002")
    verdict = faulty(cause(Severity.CRITICAL, "gpu_nvlink/inactive"))
    with SlurmCluster(nodes=5, gpus=0, version=version) as cluster:
        cluster.run("scontrol", "create", "PartitionName=rack", "Nodes=n[1-4]")  # a node counts once
        policy = Policy(Mode.ACT, command_timeout_seconds=20, fleet=FleetLimits(100.0, 5, 100.0, 5))
        domains = {"n1": rack, "n2": rack, "n3": rack, "n4": rack, "n5": other}
        controllers = {name: Look(cluster, name, replace(policy, domain=domain)) for name, domain in domains.items()}
        for name in ("n1", "n2"):
            assert controllers[name].reconcile_once(verdict).owner is Owner.HEALTHD
            assert cluster.node(name).reason.endswith(f" (domain {rack})")
        held = controllers["n3"].reconcile_once(verdict)
        assert isinstance(held.decision, Leave)
        assert held.record.hold is not None
        assert (held.record.hold.domain, held.record.hold.drained, held.record.hold.limit) == (rack, 2, 2)
        assert "DRAIN" not in cluster.node("n3").flags
        assert controllers["n5"].reconcile_once(verdict).owner is Owner.HEALTHD, "the other domain has room"
        assert controllers["n1"].reconcile_once(HEALTHY).owner is Owner.NONE
        controllers["n3"].record = DrainRecord()  # simulates the end of the wait
        assert controllers["n3"].reconcile_once(verdict).owner is Owner.HEALTHD, "24.11 keeps the Reason of n1"
        assert isinstance(controllers["n4"].reconcile_once(verdict).decision, Leave)


def test_simultaneous_counts_leave_at_most_two_nodes_of_a_domain_drained() -> None:
    """18 nodes of a rack report the same fault at the same moment; the second count decides."""
    limits = FleetLimits(100.0, 18, 100.0, 18, jitter_seconds=0.0)
    domain = domain_id("00000001-0000-0000-0000-000000000001")
    policy = Policy(Mode.ACT, command_timeout_seconds=60, fleet=limits, domain=domain)
    verdict = faulty(cause(Severity.DEGRADED, "gpu_nvlink/inactive"))
    with SlurmCluster(nodes=18, gpus=0) as cluster:
        controllers = [Look(cluster, name, policy) for name in cluster.names]
        with ThreadPoolExecutor(18) as pool:
            reports = list(pool.map(lambda controller: controller.reconcile_once(verdict), controllers))
        drained = {name for name in cluster.names if "DRAIN" in cluster.node(name).flags}
        assert len(drained) <= 2
        assert sum(isinstance(report.decision, Leave) for report in reports) == 18 - len(drained)
        for controller in controllers:  # simulates the end of the waits
            if controller.record.hold is not None:
                controller.record = DrainRecord()
                controller.reconcile_once(verdict)
        assert sum("DRAIN" in cluster.node(name).flags for name in cluster.names) == 2
