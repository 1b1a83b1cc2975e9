"""Tests of a GB200 NVL72 as one system: 18 trays of one NVLink domain, each with a real healthd, and a real Slurm with
topology/block. A second domain has three trays."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY, Healthd, wait_for_rounds
from rack import (
    DOMAIN_1,
    DOMAIN_2,
    DOMAIN_LIMIT,
    GPUS,
    RACK_1,
    RACK_2,
    SETTINGS,
    UUIDS,
    Racks,
    disabled_checks,
    run_racks,
)
from requirements import require_programs, require_root
from slurm_look import write_script
from test_alerts_prometheus import Prometheus, run_fleet_status, run_prometheus
from waiting import until

SWITCH = 5
DOMAIN_ALERT = "HealthdNvlinkDomainFault"
MISSED_SCRAPE = "HealthdTargetDown|HealthdNotScraped"
SWITCH_SIDE = "switch side"
INACTIVE = "gpu_nvlink/inactive"


@pytest.fixture(scope="module")
def racks() -> Iterator[Racks]:
    with run_racks() as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(racks: Racks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    require_programs("prometheus", packages="prometheus")
    with contextlib.ExitStack() as stack:
        folder, targets = tmp_path_factory.mktemp("prometheus"), list(racks.addresses.values())
        server = stack.enter_context(run_prometheus(folder, targets, stack))
        until(lambda: len(server.query("healthd_nvlink_domain_info")) == len(targets), "all trays are scraped")
        yield server


@pytest.fixture
def repaired(racks: Racks) -> Iterator[None]:
    yield
    racks.repair()
    racks.wait_until_in_service()


def findings(racks: Racks, node: str) -> list[dict[str, Any]]:
    return [entry for entry in racks.daemons[node].status()["conditions"] if entry["check"] == "gpu_nvlink"]


def firing(prometheus: Prometheus) -> list[tuple[str, str]]:
    """Return the name of each firing alert with the id of its domain or the name of its node."""
    labels = [row["metric"] for row in prometheus.query('ALERTS{alertstate="firing"}')]
    return sorted((row["alertname"], row.get("id") or row.get("node", "")) for row in labels)


def fired_since(prometheus: Prometheus, start: float) -> set[tuple[str, str]]:
    """Return the alerts that have been firing at any time since `start` (epoch seconds).

    A scrape that is missed under load makes the alerts of missing nodes fire, because the rules have no `for` here.
    """
    seconds = max(1, int(time.time() - start))
    alerts = f'ALERTS{{alertstate="firing",alertname!~"{MISSED_SCRAPE}"}}'
    rows = prometheus.query(f"max_over_time({alerts}[{seconds}s])")
    return {(row["metric"]["alertname"], row["metric"].get("id") or row["metric"].get("node", "")) for row in rows}


def test_one_bad_tray_is_drained_alone(racks: Racks, prometheus: Prometheus, repaired: None) -> None:
    start = len(racks.snapshots)
    racks.set_links(["n7"], {2: [3]})
    racks.wait_until(lambda: racks.drained() == {"n7"}, "n7 is drained")
    assert racks.snapshots[-1]["n7"].reason.startswith(f"healthd: {INACTIVE} ")
    assert racks.snapshots[-1]["n7"].reason.endswith(f" (domain {DOMAIN_1})")
    (finding,) = findings(racks, "n7")
    assert finding["code"] == INACTIVE
    assert SWITCH_SIDE not in finding["message"]
    until(lambda: firing(prometheus) == [("HealthdNvlinkFault", "n7")], "the alert of the tray fires")
    assert {node for snapshot in racks.snapshots[start:] for node in snapshot if snapshot[node].is_drained} == {"n7"}
    for node in (*RACK_1, *RACK_2):
        assert (racks.daemons[node].status()["health"] == "healthy") == (node != "n7")


def start_failing_job(racks: Racks, node: str, mark: Path) -> str:
    """Start a job that fails once the file `mark` exists."""
    script = f"while [ ! -e {mark} ]; do sleep 0.2; done; exit 1"
    return racks.cluster.sbatch(script, "-w", node, "--gres=gpu:1", "--no-requeue")


def test_fault_of_a_switch_is_one_problem_of_the_rack(racks: Racks, prometheus: Prometheus, tmp_path: Path) -> None:
    cluster = racks.cluster
    job = cluster.sbatch("sleep 3000", "--nodes=18", "--nodelist=n[1-18]", f"--gres=gpu:{GPUS - 1}")
    failing = [start_failing_job(racks, node, tmp_path / "fail") for node in ("n5", "n6")]
    for each in (job, *failing):
        cluster.wait_job(each, "RUNNING")

    for node in RACK_1:  # the trays notice the fault one after the other
        racks.fail_switch([node], SWITCH)
    drained = racks.wait_until_limited(RACK_1)
    limited_since = len(racks.snapshots) - 1

    for node in RACK_1:
        found = findings(racks, node)
        assert {entry["code"] for entry in found} == {INACTIVE}
        assert all(SWITCH_SIDE in entry["message"] for entry in found)
    for node in drained:
        assert racks.snapshots[-1][node].reason.startswith("healthd: gpu_nvlink/")
        assert racks.snapshots[-1][node].reason.endswith(f" (domain {DOMAIN_1})")
    for node in set(RACK_1) - drained:
        status = racks.daemons[node].status()
        hold = status["slurm"]["fleet_hold"]
        assert (hold["domain"], hold["limit"], hold["own_hardware"]) == (DOMAIN_1, DOMAIN_LIMIT, False)
        assert hold["drained"] >= DOMAIN_LIMIT, "with drains that were taken back"
        assert f"NVLink domain {DOMAIN_1}" in status["decision"]["text"]
        assert racks.daemons[node].verdict().startswith("warning "), "jobs may start"

    # Prometheus reports one problem of the domain.
    until(lambda: firing(prometheus) == [(DOMAIN_ALERT, DOMAIN_1)], "only the alert of the domain fires")
    only_domain_fires_since = time.time()
    annotations = prometheus.alerts()[DOMAIN_ALERT, ""]
    assert SWITCH_SIDE in annotations["summary"]
    assert DOMAIN_1 in annotations["summary"]
    until(
        lambda: rows_of_domains(prometheus.url).get(DOMAIN_1) == (18, 0, DOMAIN_LIMIT, 16, 0), "fleet status is right"
    )
    assert rows_of_domains(prometheus.url)[DOMAIN_2] == (3, 3, 0, 0, 3)

    (tmp_path / "fail").touch()
    for each in failing:
        cluster.wait_job(each, "FAILED")
    racks.wait_for_snapshots(5)
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")
    assert fired_since(prometheus, only_domain_fires_since) == {(DOMAIN_ALERT, DOMAIN_1)}

    racks.repair()
    racks.wait_until_in_service()
    until(lambda: firing(prometheus) == [], "the alert of the domain ends")
    assert racks.most_drained(RACK_1, limited_since) == DOMAIN_LIMIT
    assert racks.most_drained(RACK_2, 0) == 0
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")
    cluster.run("scancel", job)

    # The fleet store reports one incident for both failed jobs.
    answer = attribution(racks, tmp_path)
    jobs = {str(row["job"]): (row["cause"], row["nvlink_domain"]) for row in answer["jobs"]}
    assert jobs == dict.fromkeys(failing, ("nvlink_switch", UUIDS["n1"]))
    (cause,) = answer["causes"]
    assert (cause["cause"], cause["jobs"], cause["incidents"]) == ("nvlink_switch", 2, 1)
    (fault,) = answer["domain_faults"]
    assert (fault["id"], fault["suspect"], fault["jobs"]) == (DOMAIN_1, SWITCH_SIDE, 2)
    assert set(fault["nodes"]) == set(RACK_1)


def rows_of_domains(url: str) -> dict[str, tuple[int, ...]]:
    """Return all, healthy, drained and other nodes, and the largest job of each domain in `healthd fleet status`."""
    _, document = run_fleet_status(url)
    names = ("nodes", "healthy", "drained", "other", "largest_job")
    return {row["id"]: tuple(row[name] for name in names) for row in document["domains"]}


def attribution(racks: Racks, folder: Path) -> dict[str, Any]:
    """Return the answer of `healthd fleet attribution` for the event streams of all trays and Slurm's jobs."""
    for node, daemon in racks.daemons.items():
        (folder / "events" / node).mkdir(parents=True)
        for stream in (daemon.directory / "state").glob("events.jsonl*"):
            shutil.copy(stream, folder / "events" / node)
    env = {**racks.cluster.env, "PYTHONPATH": str(REPOSITORY), "TZ": "UTC"}
    yesterday = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 86400))
    sources = ("--sacct", "--topology", "--nodes", "--events", "events")
    ingest = ("ingest", "--out", "db", "--users", "drop", "--from", yesterday, *sources)
    answers = []
    for command in (ingest, ("attribution", "--db", "db", "--json")):
        argv = (sys.executable, "-m", "healthd", "fleet", *command)
        result = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=400)
        assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
        answers.append(result.stdout)
    document: dict[str, Any] = json.loads(answers[-1])
    return document


def test_each_domain_has_its_own_limit(racks: Racks, repaired: None) -> None:
    racks.fail_switch((*RACK_1, *RACK_2), SWITCH)
    drained = racks.wait_until_limited(RACK_1) | racks.wait_until_limited(RACK_2)
    for node in drained:
        domain = DOMAIN_1 if node in RACK_1 else DOMAIN_2
        assert racks.snapshots[-1][node].reason.endswith(f" (domain {domain})")
    limited_since = len(racks.snapshots) - 1
    racks.wait_for_snapshots(5)
    assert racks.most_drained(RACK_1, limited_since) == racks.most_drained(RACK_2, limited_since) == DOMAIN_LIMIT


def test_limit_outlasts_kills_of_healthd_and_slurmctld(racks: Racks, repaired: None) -> None:
    racks.fail_switch(RACK_1, SWITCH)
    killed = [racks.daemons[node] for node in ("n1", "n6", "n11", "n16")]
    racks.wait_until(lambda: bool(racks.drained()), "the first tray is drained")
    racks.cluster.kill_slurmctld(signal.SIGKILL)
    for daemon in killed:
        daemon.kill()
    racks.cluster.start_slurmctld()
    for daemon in killed:
        daemon.start()
    racks.wait_until_limited(RACK_1)
    limited_since = len(racks.snapshots) - 1
    racks.wait_for_snapshots(10)
    assert racks.most_drained(RACK_1, limited_since) == DOMAIN_LIMIT


# --- IMEX, which Slurm or a container may start for each job

IDLE = """printf '{"nodes": {"0": {"status": "UNAVAILABLE", "host": "10.0.0.1"}}, "status": "DOWN"}'"""
OTHER_VERSION = "echo 'version is not matching with current GPU driver version' >&2; exit 255"
HALF_UPGRADED = """printf '{"nodes": {
  "0": {"status": "READY", "host": "10.0.0.1", "version": "580.95.05"},
  "1": {"status": "READY", "host": "10.0.0.2", "version": "580.105.08"}}, "status": "UP"}'"""


@pytest.mark.parametrize(
    ("unit_state", "control_program", "expected"),
    [
        ("LoadState=loaded\\nActiveState=inactive", IDLE, "false"),
        ("LoadState=not-found\\nActiveState=inactive", "", "false"),
        ("LoadState=loaded\\nActiveState=failed", OTHER_VERSION, "false"),
        ("LoadState=loaded\\nActiveState=active", HALF_UPGRADED, "true"),
    ],
    ids=["idle", "absent", "other version", "half upgraded"],
)
def test_imex_raises_nothing_on_the_tray(unit_state: str, control_program: str, expected: str, tmp_path: Path) -> None:
    require_root()
    programs = tmp_path / "programs"
    programs.mkdir()
    write_script(programs / "systemctl", f"printf '{unit_state}\\n'")
    if control_program:
        write_script(programs / "nvidia-imex-ctl", f"touch {tmp_path}/queried; {control_program}")
    imex = f"[checks.imex]\nexpected = {expected}\nconfirm_seconds = 0.0\n"
    config = f"{SETTINGS}{imex}{disabled_checks()}"
    flags = ("--interval", "0.5")
    with Healthd(*flags, config=config, fake_nvml="gb200-nvl72", programs=programs, directory=tmp_path) as daemon:
        status = wait_for_rounds(daemon, 2)
    assert (status["health"], status["conditions"], status["unknown"]) == ("healthy", [], [])
    assert (tmp_path / "queried").exists() == (expected == "true")
