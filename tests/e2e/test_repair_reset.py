"""A GPU reset by healthd with a real Slurm: claim, reset, verification and resume; failures, operators, and kills."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import wait_for_rounds, xid_line
from repair_node import BUSCTL, SYSTEMCTL
from repair_site import CONFIG, PCI, Site, journal, programs_of
from slurm_cluster import SlurmCluster, start_job
from waiting import until

from healthd.agent.repair.journal import Outcome

pytestmark = pytest.mark.one_python
SERVICE = "nvidia-dcgm"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=32, gpus=0) as running:
        yield running


@pytest.fixture
def site(cluster: SlurmCluster, node: str, tmp_path: Path) -> Site:
    return Site(cluster, node, tmp_path)


def stage_is(stage: str) -> Any:
    return lambda s: s["repair"]["attempt"] is not None and s["repair"]["attempt"]["stage"] == stage


def test_reset_returns_node_to_service(site: Site) -> None:
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        site.wait_for_stages("claimed", "taken", "succeeded")
        site.wait_in_service()
        assert site.resets() == 1
        (entry,) = journal(site).entries
        assert (entry.outcome, entry.parts) == (Outcome.DONE, (PCI,))
        assert "DRAIN" not in site.cluster.node(site.node).flags


def repairs_during(site: Site) -> None:
    """Wait until the reset is being taken."""
    until(lambda: site.resets() == 1, "the reset has begun", 180)


def test_claim_stands_in_reason_and_prolog_refuses_jobs_during_reset(site: Site) -> None:
    site.set_mode("waits")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        repairs_during(site)
        assert site.cluster.node(site.node).reason.endswith(" (repair: gpu_reset)")
        status = daemon.status()
        assert status["repair"]["attempt"]["stage"] == "step"
        assert status["repair"]["attempt"]["deadline"]
        assert daemon.verdict().split()[0] == "drain"
        (site.folder / "go").touch()
        site.wait_in_service()
        site.wait_for_stages("claimed", "taken", "succeeded")


def test_failed_last_step_leaves_node_to_person(site: Site) -> None:
    site.set_mode("fails")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        site.wait_for_stages("claimed", "failed", "gave_up")
        site.cluster.wait_state(site.node, "DRAIN", reason="healthd: gpu_xid/119 ")
        reason = "(repair failed: a person must act)"
        until(lambda: site.cluster.node(site.node).reason.endswith(reason), "the Reason says so")
        status = daemon.wait_until(lambda s: s["repair"]["has_given_up"], "given up")
        assert status["repair"]["step"] == "person"
        assert site.resets() == 1


@pytest.mark.wide
def test_service_that_does_not_start_needs_a_person_and_then_resumes_node(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    config = CONFIG.replace("stop_services = []", f'stop_services = ["{SERVICE}"]\nverify_timeout_seconds = 60.0')
    site = Site(cluster, node, tmp_path, config)
    site.machine.write({"/run/systemd/system/x": ""})
    for name, text in (("systemctl", SYSTEMCTL), ("busctl", BUSCTL)):
        program = tmp_path / "programs" / name
        program.write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}")
        program.chmod(0o755)
    (tmp_path / f"{SERVICE}.service").write_text("active\n")
    (tmp_path / "systemctl.start.fails").touch()
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        site.wait_for_stages("claimed", "taken", "gave_up")
        status = daemon.wait_until(lambda s: s["repair"]["has_given_up"], "given up")
        assert (status["repair"]["failed"], status["repair"]["attempt"]) == ([], None)
        assert f"{SERVICE}.service" in status["decision"]["text"]
        reason = "(repair failed: a person must act)"
        until(lambda: site.cluster.node(node).reason.endswith(reason), "the Reason says so", 60)
        (tmp_path / "systemctl.start.fails").unlink()
        site.wait_in_service()
        assert site.stages() == ["claimed", "taken", "gave_up"]
        assert site.resets() == 1
        assert (tmp_path / f"{SERVICE}.service").read_text() == "active\n"


def test_reservation_stops_repair_and_its_end_allows_it(site: Site) -> None:
    reservation = ("ReservationName=healthd-no-repair", "StartTime=now+300days", "Duration=1", "Users=root")
    site.cluster.run("scontrol", "create", "reservation", *reservation, f"Nodes={site.node}")
    try:
        with site.daemon as daemon:
            daemon.kernel_line(xid_line(119))
            site.wait_for_stages("claimed", "refused")
            status = daemon.wait_until(lambda s: s["repair"]["refused"], "refused")
            assert status["repair"]["attempt"] is None
            until(lambda: "(repair:" not in site.cluster.node(site.node).reason, "the claim is given up")
            assert site.resets() == 0
            site.cluster.run("scontrol", "delete", "ReservationName=healthd-no-repair")
            assert "done" in daemon.request(command="repair-now")
            site.wait_in_service()
            site.wait_for_stages("claimed", "refused", "ordered", "claimed", "taken", "succeeded")
    finally:
        site.cluster.attempt("scontrol", "delete", "ReservationName=healthd-no-repair")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_pause_delays_repair(site: Site, is_restarted: bool) -> None:
    """No check finds the fault again after the pause, because only the kernel log reported it."""
    job = start_job(site.cluster, site.node, "--no-requeue")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        daemon.wait_until(lambda s: s["repair"]["step"] == "gpu_reset" and s["slurm"]["owner"] == "healthd", "drained")
        daemon.request(command="pause", seconds=600, why="test")
        site.cluster.run("scancel", job)
        paused = lambda s: [o["obstacle"] for o in s["repair"]["obstacles"]] == ["paused"]  # noqa: E731
        daemon.wait_until(paused, "only the pause prevents the step")
        assert site.stages() == []
        if is_restarted:
            daemon.stop()
            daemon.start()
        daemon.request(command="unpause")
        site.wait_in_service()
        site.wait_for_stages("claimed", "taken", "succeeded")
        assert site.resets() == 1


def test_evidence_is_still_collected_after_a_pause(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    """The pause ends before the node is idle, so before the full part of the evidence is saved."""
    site = Site(cluster, node, tmp_path, f"{CONFIG}[evidence]\nenabled = true\n")
    job = start_job(cluster, node, "--no-requeue")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        waiting = lambda s: s["evidence"] and s["evidence"]["stage"] == "waiting"  # noqa: E731
        daemon.wait_until(waiting, "the first part is saved", 120)
        assert "done" in daemon.request(command="pause", seconds=600, why="test")
        assert "done" in daemon.request(command="unpause")
        wait_for_rounds(daemon, 2)
        cluster.run("scancel", job)
        site.wait_in_service()
        site.wait_for_stages("claimed", "taken", "succeeded")


def test_mode_advise_repairs_only_on_order(site: Site) -> None:
    site.daemon.configure(CONFIG.replace('"act"', '"advise"'))
    with site.daemon as daemon:
        assert "error" in daemon.request(command="repair-now"), "no fault"
        daemon.kernel_line(xid_line(119))
        daemon.wait_until(lambda s: s["repair"]["step"] == "gpu_reset" and not s["repair"]["obstacles"], "advised")
        assert site.stages() == []
        until(lambda: "done" in daemon.request(command="repair-now"), "the journal has been read")
        site.wait_in_service()
        site.wait_for_stages("ordered", "claimed", "taken", "succeeded")


def test_node_waits_for_job_before_its_repair(site: Site) -> None:
    job = start_job(site.cluster, site.node, "--no-requeue")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        daemon.wait_until(
            lambda s: [o["obstacle"] for o in s["repair"]["obstacles"]] == ["jobs"], "the job is an obstacle"
        )
        assert site.stages() == []
        site.cluster.run("scancel", job)
        site.wait_in_service()
        assert site.resets() == 1


def test_state_directory_that_may_be_lost_allows_no_step(site: Site) -> None:
    os.unlink(site.folder / "daemon/state/repair.json")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        daemon.wait_until(
            lambda s: [o["obstacle"] for o in s["repair"]["obstacles"]] == ["state_dir"], "not shown to survive"
        )
        assert site.stages() == []
        until(lambda: (site.folder / "daemon/state/repair.json").exists(), "the journal is created")


@pytest.mark.parametrize("change", [("State=RESUME",), ("State=DRAIN", "Reason=under test")])
def test_operator_during_reset_ends_repair(site: Site, change: tuple[str, ...]) -> None:
    """The reset that runs is over before anything else happens. The operator's state remains."""
    site.set_mode("waits")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        repairs_during(site)
        site.cluster.run("scontrol", "update", f"NodeName={site.node}", *change)
        before = daemon.wait_until(lambda s: s["slurm"]["owner"] != "healthd", "the change was read")
        assert before["repair"]["attempt"]["stage"] == "step"
        (site.folder / "go").touch()
        site.wait_for_stages("claimed", "taken", "stopped")
        flags, reason = site.cluster.node(site.node).flags, site.cluster.node(site.node).reason
        assert ("DRAIN" in flags) is (change[0] != "State=RESUME")
        assert change[0] == "State=RESUME" or reason == "under test"
        assert site.resets() == 1


@pytest.mark.parametrize("mode", ["pause", "observe"])
def test_claim_whose_step_has_not_begun_ends_with_a_pause_and_in_mode_observe(site: Site, mode: str) -> None:
    """Other nodes count the claim. healthd-repair waits for its first answer of Slurm here."""
    site.daemon.flags = tuple(flag for flag in site.daemon.flags if flag not in ("--mode", "act"))
    site.daemon.configure(f'mode = "act"\n{CONFIG}')
    scontrol = site.folder / "programs/scontrol"
    wait = f"cd {site.folder}; touch waiting; until [ -e go ]; do sleep 0.1; done"
    scontrol.write_text(
        f'#!/bin/sh\ncase "$*" in *"show reservation"*) {wait} ;; esac\nexec {shutil.which("scontrol")} "$@"\n'
    )
    scontrol.chmod(0o755)
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        until(lambda: (site.folder / "waiting").exists(), "healthd-repair reads the reservations", 180)
        assert site.cluster.node(site.node).reason.endswith(" (repair: gpu_reset)")
        if mode == "pause":
            assert "done" in daemon.request(command="pause", seconds=3600, why="maintenance")
        else:
            daemon.configure(f'mode = "observe"\n{CONFIG}')
            assert "done" in daemon.request(command="reload")
        (site.folder / "go").touch()
        until(lambda: "(repair:" not in site.cluster.node(site.node).reason, "the claim is removed", 180)
        node = site.cluster.node(site.node)
        assert "DRAIN" in node.flags
        assert node.reason.startswith("healthd: gpu_xid/119 ")
        assert site.resets() == 0


def test_kill_of_daemon_during_reset_repeats_nothing(site: Site) -> None:
    site.set_mode("waits")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        repairs_during(site)
        daemon.kill()
        daemon.start()
        daemon.wait_until(stage_is("step"), "the step goes on")
        (site.folder / "go").touch()
        site.wait_in_service()
        assert site.resets() == 1
        site.wait_for_stages("claimed", "taken", "succeeded")


def test_kill_of_program_during_reset_repeats_nothing(site: Site) -> None:
    """The outcome is unknown, so the step has failed, and the reset that still runs is killed."""
    site.set_mode("waits")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        repairs_during(site)
        (pid,) = programs_of(site)
        os.kill(pid, signal.SIGKILL)
        site.wait_for_stages("claimed", "failed", "gave_up")
        assert site.resets() == 1
        assert journal(site).entries[-1].outcome is Outcome.UNKNOWN


CABLE = '''"""Check a cable."""
from healthd.api import CheckConfig, Clears, Explain, Finding, Severity

Config = CheckConfig
USES = ""


def run(host, config, past):
    if host.exists("/cable-out"):
        yield Finding(Severity.DEGRADED, "cable/out", "c1", "the cable is out")


EXPLAIN = {"cable/out": Explain(Severity.DEGRADED, Clears.PASS, "out", "no network", "plug it in")}
'''


def test_node_is_validated_after_person_fixed_what_the_step_left(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    """The step has succeeded before the node can be resumed."""
    checks = tmp_path / "checks.d"
    checks.mkdir(mode=0o755)
    (checks / "cable.py").write_text(CABLE)
    site = Site(cluster, node, tmp_path, f'checks_dir = "{checks}"\n{CONFIG}')
    site.machine.write({"/cable-out": ""})
    with site.daemon as daemon:
        cluster.wait_state(node, "DRAIN", reason="healthd: cable/out")
        daemon.kernel_line(xid_line(119))
        site.wait_for_stages("claimed", "taken", "succeeded")
        assert "DRAIN" in cluster.node(node).flags
        assert not validations(site)
        (site.machine.root / "cable-out").unlink()
        site.wait_in_service()
        assert validations(site) == 1


def validations(site: Site) -> int:
    """Return the number of validations after a step that the daemon has logged as ended."""
    return site.daemon.log.read_text().count("validate --quick --why repair ended with status")


@pytest.mark.parametrize("hold", ["pause", "slurmctld"])
def test_time_without_possible_resume_does_not_fail_the_step(
    cluster: SlurmCluster, node: str, tmp_path: Path, hold: str
) -> None:
    site = Site(cluster, node, tmp_path, f"{CONFIG}verify_timeout_seconds = 0.1\n")
    site.set_mode("waits")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        repairs_during(site)
        if hold == "pause":
            assert "done" in daemon.request(command="pause", seconds=3600, why="test")
        else:
            cluster.kill_slurmctld(signal.SIGTERM)  # it saves its state, so the drain is not lost
            daemon.wait_until(lambda s: s["slurm"]["problem"] and time.time() > s["slurm"]["read_at"] + 5, "unread")
        (site.folder / "go").touch()
        began = daemon.wait_until(stage_is("verify"), "the step is verified")
        late = daemon.wait_until(lambda s: s["round"]["number"] > began["round"]["number"] + 3, "more rounds")
        assert late["time"] > late["repair"]["attempt"]["deadline"]
        assert late["repair"]["attempt"]["stage"] == "verify"
        site.daemon.configure(CONFIG)  # with the default timeout, for slow machines
        assert "done" in daemon.request(command="reload")
        if hold == "pause":
            assert "done" in daemon.request(command="unpause")
        else:
            cluster.start_slurmctld()
        site.wait_in_service()
        site.wait_for_stages("claimed", "taken", "succeeded")
        assert validations(site) == 1


def test_mode_off_withdraws_order(site: Site) -> None:
    site.daemon.configure(CONFIG.replace('"act"', '"advise"'))
    job = start_job(site.cluster, site.node, "--no-requeue")
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        daemon.wait_until(lambda s: s["repair"]["step"] == "gpu_reset", "advised")
        until(lambda: "done" in daemon.request(command="repair-now"), "the journal has been read")
        assert daemon.status()["repair"]["ordered_by"]
        for mode in ("off", "advise"):
            site.daemon.configure(CONFIG.replace('"act"', f'"{mode}"'))
            assert "done" in daemon.request(command="reload")
            daemon.wait_until(lambda s, mode=mode: (s["repair"] is None) is (mode == "off"), "the mode has changed")
        assert daemon.status()["repair"]["ordered_by"] is None
        site.cluster.run("scancel", job)
