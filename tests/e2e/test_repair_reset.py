"""A GPU reset by healthd with a real Slurm: claim, reset, verification and resume; failures, operators, and kills."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, xid_line
from machine import GPUS, Machine
from repair_node import BUSCTL, DCGM, SYSTEMCTL
from slurm_cluster import SlurmCluster, start_job
from waiting import until

from healthd.agent.repair.journal import Journal, Outcome
from healthd.agent.repair.journal_file import machine_identity, read_journal, write_journal

pytestmark = pytest.mark.one_python
PCI = "0000:61:00.0"
# Without the step "reboot": it would reboot the test machine.
CONFIG = '[repair]\nmode = "act"\norder = ["gpu_reset"]\nstop_services = []\n'
# Modes in the file `mode`: ok, fails (no reset), waits (until the file `go` exists).
NVIDIA_SMI = """#!/bin/bash
cd {folder}
if [ "$1" = -q ]; then
  echo "<nvidia_smi_log>"
  for gpu in {gpus}; do
    echo "<gpu id=\\"$gpu\\"><product_architecture>Hopper</product_architecture>"
    echo "<gpu_recovery_action>None</gpu_recovery_action></gpu>"
  done
  echo "</nvidia_smi_log>"
  exit 0
fi
echo "$*" >>resets
case $(cat mode) in
  fails) echo "GPU 0000{pci}: Unknown Error"; exit 255 ;;
  waits) until [ -e go ]; do sleep 0.1; done ;;
esac
echo "GPU 0000{pci} was successfully reset."
echo "All done."
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=16, gpus=0) as running:
        yield running


class Site:
    """A node in mode "act" with a fake nvidia-smi. Its state directory has survived a reboot."""

    def __init__(self, cluster: SlurmCluster, node: str, folder: Path, config: str = CONFIG) -> None:
        self.cluster, self.node, self.folder = cluster, node, folder
        programs, daemon = folder / "programs", folder / "daemon"
        programs.mkdir()
        (daemon / "state").mkdir(parents=True)
        self.machine = Machine(daemon)
        self.machine.now()
        self.machine.write({"/proc/locks": "", "/proc/1/fd/0": "", "/etc/machine-id": "0c7d3ae0b6d24c6f\n"})
        gpus = " ".join(f"0000{gpu.upper()}" for gpu in GPUS)
        smi = programs / "nvidia-smi"
        smi.write_text(NVIDIA_SMI.format(folder=folder, gpus=gpus, pci=PCI.upper()))
        smi.chmod(0o755)
        self.set_mode("ok")
        machine = machine_identity(str(self.machine.root))
        write_journal(Journal("an-earlier-boot", node=node, machine=machine), str(daemon / "state"))
        flags = ("--mode", "act", "--node-name", node, "--interval", "1", "--root", str(self.machine.root))
        self.daemon = Healthd(
            *flags,
            directory=daemon,
            env=cluster.env,
            config=config,
            programs=programs,
            fake_nvml=str(self.machine.scenario),
        )

    def set_mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(f"{mode}\n")

    def resets(self) -> int:
        path = self.folder / "resets"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def stages(self) -> list[str]:
        """Return the stages of the repair in the event stream, without the advice."""
        path = self.folder / "daemon/state/events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [e for e in map(json.loads, lines) if e["event"] == "repair"]
        return [e["stage"] for e in found if e["stage"] not in ("advised", "withdrawn")]

    def wait_for_stages(self, *stages: str) -> None:
        until(lambda: self.stages() == list(stages), f"stages {stages}", 180)

    def wait_in_service(self) -> None:
        until(lambda: "DRAIN" not in self.cluster.node(self.node).flags, "the node is in service", 180)


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


def journal(site: Site) -> Journal:
    found = read_journal(str(site.folder / "daemon/state"))
    assert found is not None
    return found


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
            cluster.kill_slurmctld()
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


def test_service_that_does_not_start_delays_resume_but_does_not_fail_the_step(
    cluster: SlurmCluster, node: str, tmp_path: Path
) -> None:
    config = CONFIG.replace("stop_services = []", f'stop_services = ["{DCGM}"]')
    site = Site(cluster, node, tmp_path, f"{config}verify_timeout_seconds = 0.1\n")
    (site.machine.root / "run/systemd/system").mkdir(parents=True)
    for name, text in {"systemctl": SYSTEMCTL, "busctl": BUSCTL}.items():
        path = tmp_path / "programs" / name
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}")
        path.chmod(0o755)
    (tmp_path / DCGM).write_text("active\n")
    (tmp_path / "systemctl.start.fails").touch()
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        began = daemon.wait_until(stage_is("verify"), "the step is verified")
        late = daemon.wait_until(lambda s: s["round"]["number"] > began["round"]["number"] + 3, "more rounds")
        assert late["repair"]["attempt"]["stage"] == "verify"
        site.daemon.configure(config)
        assert "done" in daemon.request(command="reload")
        (tmp_path / "systemctl.start.fails").unlink()
        site.wait_in_service()
        site.wait_for_stages("claimed", "taken", "succeeded")
        assert (tmp_path / DCGM).read_text() == "active\n"


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


def programs_of(site: Site) -> list[int]:
    """Return the processes of `healthd repair run` on this node."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"repair" in words and b"run" in words and str(site.daemon.run_dir).encode() in words:
            found.append(int(path.parent.name))
    return found
