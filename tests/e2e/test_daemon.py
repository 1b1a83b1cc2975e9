"""Tests of `healthd run` and `healthd check` as a user starts them, without Slurm: starts, faults, commands,
reloads, restarts."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from healthd_daemon import (
    MACHINE_CHECKS,
    REPOSITORY,
    Healthd,
    condition,
    have_all_run_since,
    write_atomically,
    xid_line,
)
from msgspec.structs import replace
from requirements import require, require_root
from waiting import until

from healthd.agent.conditions.store import decode
from healthd.common.model import DrainRecord, FleetHold
from healthd.common.values import encode
from healthd.nvidia import fake_scenario

HISTORY = {"gh200": ["gpu_ecc/aggregate"]}  # its GPU had one error before the capture, which is information only
NO_SLURM = {"SLURM_CONF": "/nonexistent/slurm.conf"}
BOOT_ID = "proc/sys/kernel/random/boot_id"


def run_healthd(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "healthd", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )


def failed_start(daemon: Healthd) -> tuple[int, str]:
    """Return the exit status and the one message of a daemon that does not start."""
    daemon.wait = False
    daemon.start()
    assert daemon.process is not None
    status = daemon.process.wait(120)
    (line,) = daemon.log.read_text().splitlines()
    return status, line


def above_info(conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in conditions if entry["severity"] != "info"]


def results(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{result['check']} {result['instance']}".strip(): result for result in status["results"]}


def require_kernel_log() -> None:
    require_root()
    if not os.path.exists("/dev/kmsg"):
        require("there is no /dev/kmsg")


def require_no_gpus() -> None:
    if any(Path(device).read_text().strip() == "0x10de" for device in Path("/sys/bus/pci/devices").glob("*/vendor")):
        require("this machine has NVIDIA devices, which may have faults")


# --- healthy machines


def test_healthy_machine_without_gpus_has_nothing_above_info(directory: Path) -> None:
    require_kernel_log()
    require_no_gpus()
    config = directory / "check.toml"
    config.write_text("".join(f"[checks.{check}]\nenabled = false\n" for check in MACHINE_CHECKS))
    checked = run_healthd("check", "--json", "--config", str(config))
    document = json.loads(checked.stdout)
    assert (document["health"], checked.returncode, document["unknown"]) == ("healthy", 0, []), checked.stdout
    assert above_info(document["conditions"]) == []
    with Healthd("--kernel-log", "kmsg", directory=directory, fake_nvml="") as daemon:
        status = daemon.status()
        assert (status["health"], status["unknown"]) == ("healthy", [])
        assert above_info(status["conditions"]) == []
        assert status["kernel_log"]["alive"]
        assert daemon.stop() == 0


@pytest.mark.parametrize("profile", fake_scenario.profiles())
def test_healthy_profile_has_no_conditions(directory: Path, profile: str) -> None:
    with Healthd(directory=directory, fake_nvml=profile) as daemon:
        status = daemon.status()
        assert (status["health"], status["unknown"], above_info(status["conditions"])) == ("healthy", [], [])
        assert [entry["code"] for entry in status["conditions"]] == HISTORY.get(profile, [])
        assert daemon.verdict().split()[0] == "ok"
        assert len(status["inventory"]["gpus"]) == len(fake_pci_gpus(profile))


# --- refused starts


def test_second_daemon_in_same_directory_is_refused(directory: Path) -> None:
    with Healthd(directory=directory) as first:
        second = Healthd(directory=directory)
        second.log = directory / "second.log"
        status, sentence = failed_start(second)
        assert (status, sentence) == (1, f"healthd run: {first.run_dir}: another healthd is running there")
        assert first.status()["health"] == "healthy"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("intervall_seconds = 3", 'unknown setting "intervall_seconds"'),
        ("interval_seconds = 0", "interval_seconds"),
        ('mode = "kill"', "mode"),
        ("[checks.gpu_acess]", 'there is no check "gpu_acess"'),
        ("interval_seconds = ", "not TOML"),
    ],
)
def test_invalid_settings_prevent_start_with_one_sentence(directory: Path, config: str, named: str) -> None:
    status, sentence = failed_start(Healthd(directory=directory, config=config))
    assert status == 64
    assert named in sentence
    assert "healthd.toml" in sentence
    assert not (directory / "run").exists()


@pytest.mark.parametrize("runtime_dir", ["/proc/healthd", "/dev/null/healthd", "/dev/null"])
def test_unusable_runtime_directory_is_one_sentence(directory: Path, runtime_dir: str) -> None:
    status, sentence = failed_start(Healthd("--runtime-dir", runtime_dir, directory=directory))
    assert status == 1
    assert sentence.startswith("healthd run: ")
    assert runtime_dir in sentence


def test_daemon_ends_if_runtime_directory_is_removed_and_keeps_conditions(
    directory: Path,
) -> None:
    with Healthd("--interval", "1", directory=directory) as daemon:
        daemon.kernel_line(xid_line(79))
        before = condition(daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "open"), "gpu_xid/79")
        assert before is not None
        assert daemon.process is not None
        daemon.run_dir.rename(directory / "removed")  # atomically, because the daemon may write there at any moment
        assert daemon.process.wait(120) == 1
        last = daemon.log.read_text().splitlines()[-1]
        assert last.startswith(f"healthd run: {daemon.run_dir}, or the lock in it, was removed while healthd was ")
        daemon.start()
        after = condition(daemon.status(), "gpu_xid/79")
        assert after is not None
        assert (after["first_seen"], after["count"]) == (before["first_seen"], before["count"])


def test_stopped_daemon_with_removed_directory_ends_if_another_runs(directory: Path) -> None:
    with Healthd("--interval", "3600", directory=directory) as first:
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)
        shutil.rmtree(first.run_dir)
        second = Healthd("--interval", "3600", directory=directory)
        second.kernel_log = first.kernel_log
        second.log = directory / "second.log"
        with second:
            first.process.send_signal(signal.SIGCONT)
            first.kernel_line(xid_line(79))  # wakes both daemons
            assert first.process.wait(120) == 1
            assert first.log.read_text().splitlines()[-1].endswith(f"{first.run_dir}: another healthd is running there")
            second.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the second daemon continues")


def test_socket_of_killed_daemon_does_not_prevent_start(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        daemon.kill()
        assert (daemon.run_dir / "healthd.sock").exists()
        daemon.start()
        assert daemon.status()["health"] == "healthy"


# --- outputs


def test_verdict_file_has_word_expiry_and_reason(directory: Path) -> None:
    start = time.time()
    with Healthd("--interval", "100", directory=directory) as daemon:
        match = re.fullmatch(r"ok ([0-9]+) healthy\n", daemon.verdict())
        assert match is not None
        assert int(start) + 300 <= int(match[1]) <= time.time() + 300
        assert (daemon.run_dir / "verdict").stat().st_mode & 0o777 == 0o644
        daemon.kernel_line(xid_line(79))
        daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the condition")
        until(lambda: not daemon.verdict().startswith("ok"))
        assert re.fullmatch(r"warning [0-9]+ gpu_xid/79 0000:61:00\.0: [ -~]+\n", daemon.verdict()), (
            "observe mode never writes `drain`"
        )


def test_metrics_are_served_and_written_atomically(directory: Path) -> None:
    textfile = directory / "collector" / "healthd.prom"
    textfile.parent.mkdir()
    healthy = 'healthd_health{state="healthy"} 1.0\n'
    config = f'interval_seconds = 0.5\n[metrics]\ntextfile = "{textfile}"\n'
    with Healthd("--listen", "127.0.0.1:0", directory=directory, config=config) as daemon:
        match = re.search(r"metrics on (http://127\.0\.0\.1:[0-9]+/metrics)", daemon.log.read_text())
        assert match is not None
        with urllib.request.urlopen(match[1], timeout=240) as page:
            assert healthy in page.read().decode()
        until(lambda: textfile.exists() and healthy in textfile.read_text())  # the first page may report "unknown"
        with open(textfile, encoding="utf-8") as open_file:
            until(lambda: not os.path.samestat(os.fstat(open_file.fileno()), textfile.stat()))
            assert healthy in open_file.read(), "the next page replaces the file atomically"
        assert textfile.stat().st_mode & 0o777 == 0o644
        until(lambda: os.listdir(textfile.parent) == [textfile.name])


def test_missing_textfile_directory_is_reported_without_harm(directory: Path) -> None:
    with Healthd(directory=directory, config='[metrics]\ntextfile = "/nonexistent/healthd.prom"') as daemon:
        status = daemon.wait_until(lambda s: s["problems"], "it is a problem")
        (problem,) = status["problems"]
        assert problem.startswith("cannot write /nonexistent/healthd.prom (metrics.textfile): ")
        assert problem in daemon.log.read_text()
        assert status["health"] == "healthy"


def test_status_is_answered_during_round(directory: Path) -> None:
    scenario = directory / "slow.toml"
    # The call hangs for longer than the test may be delayed, and then returns.
    write_atomically(scenario, 'profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 20.0\n')
    config = "[checks.gpu_access]\ntimeout_seconds = 100\n"
    with Healthd(directory=directory, config=config, fake_nvml=str(scenario), wait=False) as daemon:
        status = daemon.wait_until(lambda s: s["round"].get("number", 0) == 1, "the round has begun")
        assert status["round"].get("seconds", 0) == 0
        assert status["health"] == "unknown"
        assert daemon.verdict().startswith("unknown ")
        assert daemon.status()["round"].get("seconds", 0) == 0, "the next query is answered too"
        daemon.wait_until(lambda s: s["health"] == "healthy", "a slow round is healthy")


# --- faults


def test_line_in_real_kernel_log_needs_accept_injected(directory: Path) -> None:
    require_kernel_log()
    config = "[kernel_log]\naccept_injected = true\n"
    for name in ("drill", "real"):
        (directory / name).mkdir()
    with (
        Healthd("--kernel-log", "kmsg", directory=directory / "drill", config=config) as with_injection,
        Healthd("--kernel-log", "kmsg", directory=directory / "real") as without_injection,
    ):
        bus, device = random.randrange(256), random.randrange(32)  # the log keeps the lines of earlier tests
        subject = f"fffe:{bus:02x}:{device:02x}.0"
        with open("/dev/kmsg", "w", buffering=1) as log:
            log.write(f"<12>{xid_line(79, subject[:-2])}\n")
        status = with_injection.wait_until(lambda s: condition(s, "gpu_xid/79", subject) is not None, "the condition")
        injected = condition(status, "gpu_xid/79", subject)
        assert injected is not None
        assert (injected["severity"], injected["count"], injected["history"]) == ("critical", 1, False)
        time.sleep(0.2)
        assert condition(without_injection.status(), "gpu_xid/79", subject) is None


def test_lost_gpu_is_found_in_next_round_and_cleared_only_if_repaired(directory: Path) -> None:
    scenario = directory / "lost.toml"
    write_atomically(scenario, 'profile = "dgx-h100"\n')
    with Healthd("--interval", "0.4", directory=directory, fake_nvml=str(scenario)) as daemon:
        assert daemon.status()["health"] == "healthy"
        write_atomically(scenario, 'profile = "dgx-h100"\ngpu.3.lost = true\n')
        status = daemon.wait_until(lambda s: condition(s, "gpu_access/lost") is not None, "the GPU is lost")
        assert status["health"] == "unhealthy"
        before = condition(status, "gpu_access/lost")
        assert before is not None
        assert before["subject"] == status["inventory"]["gpus"][3]["pci"]

        assert "gpu_access/lost" in daemon.request(command="repaired", code="gpu_access/lost")["done"]
        status = daemon.wait_until(
            lambda s: (
                (lost := condition(s, "gpu_access/lost")) is not None and lost["first_seen"] > before["last_seen"]
            ),
            "it is not repaired and is found again",
        )
        assert status["health"] == "unhealthy"

        write_atomically(scenario, 'profile = "dgx-h100"\n')
        last = status["round"]["number"] + 3
        status = daemon.wait_until(lambda s: s["round"]["number"] > last, "rounds without a fault")
        assert status["health"] == "unhealthy", "a condition that clears by a reboot stays open"
        daemon.request(command="repaired", code="gpu_access/lost", part=before["subject"])
        daemon.wait_until(lambda s: s["health"] == "healthy" and not s["conditions"], "repaired")


@pytest.mark.parametrize(
    ("problem", "timeout_seconds", "code"),
    [
        ("gpu.3.lost_after = 4\n", 60, "gpu_access/lost"),
        ('hang = "nvmlDeviceGetEccMode"\nhang_seconds = 60\n', 2, "gpu_access/hang"),
    ],
)
def test_fault_seen_by_another_gpu_check_is_found_in_same_round(
    directory: Path, problem: str, timeout_seconds: int, code: str
) -> None:
    scenario = directory / "middle.toml"
    write_atomically(scenario, f'profile = "dgx-h100"\n{problem}')
    config = f"interval_seconds = 3600\n[checks.gpu_ecc]\ntimeout_seconds = {timeout_seconds}\n"
    with Healthd(directory=directory, config=config, fake_nvml=str(scenario)) as daemon:
        status = daemon.status()
        assert condition(status, code) is not None
        assert status["round"]["number"] == 1
        assert "gpu_ecc" in " ".join(status["unknown"])


def test_hanging_driver_warns_then_degrades_and_clears_when_it_answers(directory: Path) -> None:
    scenario = directory / "hangs.toml"
    config = (
        "interval_seconds = 0.5\n[checks.gpu_access]\ntimeout_seconds = 5\nhang_degraded_seconds = 15.0\n"
        "clear_after = 2\n"
    )
    write_atomically(scenario, 'profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 20\n')
    # Does not wait for the first round: on a busy machine it lasts until the hang is degraded.
    with Healthd(directory=directory, config=config, fake_nvml=str(scenario), wait=False) as daemon:
        status = daemon.wait_until(lambda s: condition(s, "gpu_access/hang") is not None, "it hangs")
        found = condition(status, "gpu_access/hang")
        assert found is not None
        assert found["severity"] == "warning"
        assert status["health"] == "unknown"
        assert list(status["blocked"]) == ["nvml"]
        daemon.wait_until(
            lambda s: (c := condition(s, "gpu_access/hang")) is not None and c["severity"] == "degraded", "degraded"
        )
        daemon.wait_until(lambda s: results(s).get("ib_link", {}).get("outcome") == "completed", "the other checks run")
        write_atomically(scenario, 'profile = "dgx-h100"\n')
        status = daemon.wait_until(lambda s: s["health"] == "healthy", "the call has returned")
        assert (status["blocked"], status["conditions"]) == ({}, [])
        assert status["cleared"][-1]["cleared_by"] == "pass"


def test_link_recovering_within_confirm_time_is_no_fault(directory: Path) -> None:
    root = directory / "root"
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (root / BOOT_ID).parent.mkdir(parents=True)
    (root / BOOT_ID).write_text("b1\n")

    def link(state: str, physical: str) -> None:
        for name, text in {"phys_state": physical, "rate": "400 Gb/sec (4X NDR)", "state": state}.items():
            write_atomically(port / name, f"{text}\n")

    def config(interval: float, confirm: float, critical: float) -> str:
        table = f"confirm_seconds = {confirm}\ncritical_seconds = {critical}\n"
        return f'interval_seconds = {interval}\n[checks.ib_link]\nexpected_gbps = {{"mlx5_0/1" = 400}}\n{table}'

    link("4: ACTIVE", "5: LinkUp")
    with Healthd("--root", str(root), directory=directory, config=config(0.3, 600.0, 601.0)) as daemon:
        link("1: DOWN", "2: Polling")
        status = daemon.wait_until(lambda s: condition(s, "ib_link/down") is not None, "the link is down")
        down = condition(status, "ib_link/down")
        assert down is not None
        assert down["state"] == "pending"
        link("4: ACTIVE", "5: LinkUp")
        daemon.wait_until(lambda s: condition(s, "ib_link/down") is None, "the link is back")
        assert "ib_link/down mlx5_0/1: degraded, open" not in daemon.log.read_text()

        assert daemon.process is not None
        daemon.config.write_text(config(0.25, 2.0, 3.0))
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda s: s["interval_seconds"] == 0.25, "the shorter times")
        link("1: DOWN", "2: Polling")
        daemon.wait_until(
            lambda s: (c := condition(s, "ib_link/down")) is not None and c["state"] == "open", "confirmed"
        )
        daemon.wait_until(
            lambda s: (c := condition(s, "ib_link/down")) is not None and c["severity"] == "critical", "critical"
        )
        link("4: ACTIVE", "5: LinkUp")
        daemon.wait_until(lambda s: s["health"] == "healthy", "healthy again")


def xid_conditions(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions from kernel lines."""
    return [entry for entry in status["conditions"] if entry["check"] == "gpu_xid"]


def test_daemon_counts_each_event_once_across_restarts(directory: Path) -> None:
    addresses = [f"0000:{bus:02x}:00" for bus in range(0x10, 0x16)]
    with Healthd(directory=directory) as daemon:
        for number, address in enumerate(addresses):
            daemon.kernel_line(xid_line(79, address))
            if number % 2:
                until(lambda subject=f"{address}.0": condition(daemon.status(), "gpu_xid/79", subject) is not None)
                daemon.kill()
            else:
                assert daemon.stop() == 0
            if number == 3:
                daemon.kernel_line(xid_line(48, address, "DBE (double bit error)"))  # while no daemon runs
            daemon.start()
        status = daemon.wait_until(lambda s: len(xid_conditions(s)) == len(addresses) + 1, "each of them")
        counts = {
            (entry["code"], entry["subject"]): (entry["count"], entry["history"]) for entry in xid_conditions(status)
        }
        expected = [("gpu_xid/79", f"{address}.0") for address in addresses]
        assert counts == dict.fromkeys([*expected, ("gpu_xid/48", f"{addresses[3]}.0")], (1, False))


def test_xid_154_without_recovery_clears_conditions_waiting_for_reset(directory: Path) -> None:
    def action(before: int, after: int) -> str:
        return xid_line(154, "0000:61:00", f"GPU recovery action changed from {before:#x} (x) to {after:#x} (x)")

    with Healthd(directory=directory) as daemon:
        daemon.kernel_line(xid_line(95, text="Uncontained: LTC TAG"), xid_line(79), action(0, 1))
        daemon.wait_until(lambda s: len(xid_conditions(s)) == 3, "the faults are open")
        daemon.kernel_line(action(1, 0))
        daemon.wait_until(
            lambda s: [entry["code"] for entry in xid_conditions(s)] == ["gpu_xid/79"],
            "only the one that waits for a reboot",
        )


def test_conditions_of_one_fault_are_one_incident(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        daemon.kernel_line(xid_line(48, text="DBE (double bit error)"), xid_line(79), xid_line(79, "0000:9d:00"))
        status = daemon.wait_until(lambda s: condition(s, "gpu_xid/79", "0000:9d:00.0"), "all conditions are open")
        assert status["incidents"] == [{"first": "gpu_xid/48 0000:61:00.0", "then": ["gpu_xid/79 0000:61:00.0"]}]
        message = "incident: gpu_xid/79 0000:61:00.0 belongs to the same incident as gpu_xid/48 0000:61:00.0"
        assert daemon.log.read_text().count(message) == 1
        daemon.request(command="repaired", code="gpu_xid/48", part="0000:61:00.0")
        daemon.wait_until(lambda s: s["incidents"] == [], "a single condition is not an incident")


@pytest.mark.alone  # each daemon of this machine receives the event and runs checks
def test_removed_device_is_checked_at_once(directory: Path) -> None:
    require_root()
    bridges = [
        device
        for device in Path("/sys/bus/pci/devices").glob("*")
        if (device / "class").read_text().startswith("0x0600") and os.access(device / "uevent", os.W_OK)
    ]
    if not bridges:
        require("this machine has no PCI host bridge to report on")
    with Healthd("--interval", "3600", directory=directory) as daemon:
        before = results(daemon.status())
        try:
            # The kernel repeats the event without removing the device.
            (bridges[0] / "uevent").write_text("remove")
            until(lambda: f"device {bridges[0].name} was removed" in daemon.log.read_text())
        finally:
            (bridges[0] / "uevent").write_text("add")
        status = daemon.wait_until(
            lambda s: results(s)["gpu_access"]["started"] > before["gpu_access"]["started"], "gpu_access runs"
        )
        assert results(status)["gpu_ecc"]["started"] == before["gpu_ecc"]["started"], "the others wait for their round"


def test_growth_is_found_if_another_device_cannot_be_read(directory: Path) -> None:
    checks = directory / "checks.d"
    checks.mkdir(mode=0o755)
    (checks / "port.py").write_text(
        "import itertools\nfrom healthd.api import *\nCOUNT = itertools.count()\n"
        "def run(host, config, past):\n"
        "    reading = Observation('port_errors_total', next(COUNT), ObservationKind.COUNTER)\n"
        "    yield reading\n"
        "    if past.growth(reading, 3600):\n"
        "        yield Finding(Severity.WARNING, 'port/errors', 'p1', 'errors grow')\n"
        "    raise OSError('p2 cannot be read')\n"
    )
    (checks / "port.py").chmod(0o644)
    config = f'interval_seconds = 0.3\nchecks_dir = "{checks}"\n'
    with Healthd(directory=directory, config=config) as daemon:
        status = daemon.wait_until(lambda s: condition(s, "port/errors") is not None, "the growth is found")
        assert results(status)["port"]["outcome"] == "failed"


def test_inventory_gets_gpus_of_driver_loaded_later(directory: Path) -> None:
    scenario = directory / "node.toml"
    write_atomically(scenario, 'profile = "dgx-h100"\nlibrary = "driver_not_loaded"\n')
    with Healthd("--interval", "0.5", directory=directory, fake_nvml=str(scenario)) as daemon:
        assert daemon.status()["inventory"]["gpus"] == []
        write_atomically(scenario, 'profile = "dgx-h100"\n')
        daemon.wait_until(lambda s: len(s["inventory"]["gpus"]) == 8, "the inventory has the GPUs")
        assert daemon.status()["inventory"]["driver_version"]


def test_lost_gpu_stays_in_inventory(directory: Path) -> None:
    scenario = directory / "node.toml"
    write_atomically(scenario, 'profile = "dgx-h100"\n')
    with Healthd("--interval", "0.5", directory=directory, fake_nvml=str(scenario)) as daemon:
        daemon.wait_until(lambda s: len(s["inventory"]["gpus"]) == 8, "the inventory has the GPUs")
        write_atomically(scenario, 'profile = "dgx-h100"\ngpu.3.lost = true\n')
        daemon.wait_until(lambda s: condition(s, "gpu_access/lost") is not None, "the GPU is lost")
        rounds = daemon.status()["round"]["number"]
        status = daemon.wait_until(lambda s: s["round"]["number"] > rounds + 2, "some rounds later")
        assert len(status["inventory"]["gpus"]) == 8


# --- commands of operators


def test_condition_opened_in_pause_acts_only_if_seen_again(directory: Path) -> None:
    flags = ("--mode", "drain", "--node-name", "nowhere")
    with Healthd(*flags, directory=directory, env=NO_SLURM) as daemon:
        assert "paused for 10 min" in daemon.request(command="pause", seconds=600, why="driver upgrade")["done"]
        assert daemon.status()["pause"]["why"] == "driver upgrade"
        daemon.kernel_line(xid_line(79))
        daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the condition")
        ends = daemon.status()["time"] + 1.0  # at the earliest
        assert "paused for 1 s" in daemon.request(command="pause", seconds=1, why="it is done")["done"]
        status = daemon.wait_until(
            lambda s: s["pause"] is None and have_all_run_since(s, ends), "all checks ran after the pause"
        )
        assert status["health"] == "unhealthy"
        assert daemon.verdict().startswith("warning "), "a condition from the pause does not drain"
        daemon.kernel_line(xid_line(79, text="GPU has fallen off the bus again."))
        daemon.wait_until(lambda s: s["decision"]["would"].startswith("drain "), "a drain is decided")


def test_pause_survives_kill(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        daemon.request(command="pause", seconds=600, why="driver upgrade")
        daemon.kill()
        daemon.start()
        assert daemon.status()["pause"]["why"] == "driver upgrade"
        assert "the pause has ended" in daemon.request(command="unpause")["done"]
        assert daemon.status()["pause"] is None


def test_invalid_request_does_not_end_daemon(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        assert daemon.request(command="reboot") == {"error": "unknown command 'reboot'"}
        for command in (None, 1, ["pause"], {"a": 1}):
            assert daemon.request(command=command) == {"error": "command: must be text"}
        assert "error" in daemon.request(command="repaired", code=["x"], part={"a": []})
        assert "error" in daemon.request(command="pause", seconds=10**300, why="x")
        assert daemon.status()["health"] == "healthy"


# --- reload


def test_reload_to_observe_removes_fleet_hold_from_status_and_metrics(directory: Path) -> None:
    page = directory / "page.prom"
    textfile = f'interval_seconds = 1\n[metrics]\ntextfile = "{page}"\n'
    with Healthd(directory=directory, config=f'mode = "drain"\n{textfile}', env=NO_SLURM) as daemon:
        assert daemon.process is not None
        daemon.kill()
        file = daemon.run_dir / "ledger.json"
        hold = FleetHold(time.time() - 60, time.time() + 600, 1, False, "gpu", 10, 2, 2)
        file.write_bytes(encode(replace(decode(file.read_text(), ""), slurm=DrainRecord(hold=hold))))
        daemon.start()
        assert daemon.status()["slurm"]["fleet_hold"]["partition"] == "gpu"
        until(lambda: page.exists() and "healthd_fleet_limit_drain_waiting{" in page.read_text())
        daemon.configure(f'mode = "observe"\n{textfile}')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda s: s["mode"] == "observe", "the new mode")
        assert daemon.status()["slurm"]["fleet_hold"] is None
        until(lambda: "healthd_fleet_limit_drain_waiting{" not in page.read_text())


def test_reload_keeps_old_settings_for_invalid_file(directory: Path) -> None:
    with Healthd(directory=directory, config="interval_seconds = 3600", env=NO_SLURM) as daemon:
        assert daemon.process is not None
        daemon.configure('interval_seconds = 60\nmode = "dran"\n')
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "settings not reloaded" in daemon.log.read_text())
        (message,) = [line for line in daemon.log.read_text().splitlines() if "settings not reloaded" in line]
        assert "healthd.toml: mode: " in message
        status = daemon.status()
        assert (status["interval_seconds"], status["mode"]) == (3600, "observe")
        assert "gpu_ecc" in results(status)

        daemon.configure(
            'interval_seconds = 1800\nmode = "drain"\nstate_dir = "/nowhere"\nround_timeout_seconds = 7\n'
            "[checks.gpu_ecc]\nenabled = false\n"
        )
        daemon.process.send_signal(signal.SIGHUP)
        status = daemon.wait_until(lambda s: s["interval_seconds"] == 1800, "the new settings")
        assert status["mode"] == "drain"
        assert "gpu_ecc" not in results(status)
        assert "takes effect only after a restart: round_timeout_seconds" in daemon.log.read_text()


SITE_CHECK = """
from dataclasses import dataclass
from healthd.api import CheckConfig

@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    {field}

{more}
def run(host, config, past):
    yield from ()
"""
INVALID_CHECKS = {  # text of a site's check -> the expected message
    SITE_CHECK.format(field='timeout_seconds: str = "5s"', more=""): "fan.py: Config.timeout_seconds: must be a number",
    SITE_CHECK.format(field="severity: int = 3", more=""): "fan.py: Config.severity: must be a table, got 3",
    SITE_CHECK.format(
        field="def __post_init__(self): 1 / 0", more=""
    ): "checks.fan: its Config raised ZeroDivisionError",
    SITE_CHECK.format(field="fans: set[int] | str = 3", more=""): "checks.fan: its Config raised TypeError",
    SITE_CHECK.format(
        field="x: int = 1", more="def validate(config): return config.y"
    ): "its validate() raised AttributeError",
    SITE_CHECK.format(field="x: int = 1", more="def validate(config): return 'x must be 2'"): "checks.fan: x must be 2",
    SITE_CHECK.format(field="x: int = 1", more="HOLDS_RESUME = 'no'"): "fan.py: HOLDS_RESUME must be True or False",
    SITE_CHECK.format(field="x: int = 1", more="1 / 0"): "fan.py: cannot be loaded: ZeroDivisionError",
    SITE_CHECK.format(field="x: int = 1", more="raise GeneratorExit"): "fan.py: cannot be loaded: GeneratorExit",
}


def test_invalid_site_check_keeps_old_settings_on_reload(directory: Path) -> None:
    checks = directory / "checks"
    checks.mkdir(mode=0o755)
    (checks / "fan.py").write_text(SITE_CHECK.format(field="root: int = 3; max_restarts: int | None = None", more=""))
    settings = f'interval_seconds = 3600\nchecks_dir = "{checks}"\n'
    with Healthd(directory=directory, config=settings, env=NO_SLURM) as daemon:
        assert daemon.process is not None
        assert "fan" in results(daemon.status()), "its settings may have names of ours"
        daemon.config.write_text(daemon.config.read_text().replace("3600", "1800"))
        for times, (text, sentence) in enumerate(INVALID_CHECKS.items(), 1):
            (checks / "fan.py").write_text(text)
            checked = run_healthd("config", "check", str(daemon.config))
            assert (checked.returncode, checked.stdout, checked.stderr.count("\n")) == (64, "", 1)
            assert checked.stderr.startswith("healthd: ")
            assert sentence in checked.stderr
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda times=times: daemon.log.read_text().count("settings not reloaded") == times)
            status = daemon.status()
            assert (status["interval_seconds"], "fan" in results(status)) == (3600, True)
            (problem,) = [
                text_of_problem
                for text_of_problem in status["problems"]
                if text_of_problem.startswith("the settings were not reloaded: ")
            ]
            assert sentence in problem
            assert problem.partition(": ")[2].strip() == checked.stderr.removeprefix("healthd: ").strip()
            assert problem.partition(": ")[2].startswith((str(daemon.config), str(checks)))
        assert "Traceback" not in daemon.log.read_text()
        (checks / "fan.py").write_text(SITE_CHECK.format(field="x: int = 1", more=""))
        daemon.process.send_signal(signal.SIGHUP)
        status = daemon.wait_until(lambda s: s["interval_seconds"] == 1800, "the new settings")
        assert not any("settings" in problem for problem in status["problems"])
        daemon.wait_until(lambda s: results(s)["fan"]["outcome"] == "completed", "the check still runs")


def test_unexpected_failure_of_reload_keeps_old_settings_with_traceback(directory: Path) -> None:
    # Only in the daemon: the trial process that runs before it would be refused with a sentence.
    validate_text = "import sys\n\n\ndef validate(config):\n    if not sys.argv[0].endswith('settings/__main__.py'):\n"
    validate_text += "        raise KeyboardInterrupt('as if by hand')"
    checks = directory / "checks"
    checks.mkdir(mode=0o755)
    settings = f'interval_seconds = 3600\nchecks_dir = "{checks}"\n'
    with Healthd(directory=directory, config=settings, env=NO_SLURM) as daemon:
        assert daemon.process is not None
        (checks / "fan.py").write_text(SITE_CHECK.format(field="x: int = 1", more=validate_text))
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "settings not reloaded: KeyboardInterrupt: as if by hand" in daemon.log.read_text())
        assert "Traceback (most recent call last)" in daemon.log.read_text()
        status = daemon.status()
        assert "the settings were not reloaded: KeyboardInterrupt: as if by hand" in status["problems"]
        assert "fan" not in results(status)


def test_reload_with_other_checks_dir_keeps_checks_of_start(directory: Path) -> None:
    for name in ("checks", "others"):
        (directory / name).mkdir(mode=0o755)
        (directory / name / f"{name}.py").write_text(SITE_CHECK.format(field="x: int = 1", more=""))
    settings = f'interval_seconds = 3600\nchecks_dir = "{directory}/checks"\n'
    with Healthd(directory=directory, config=settings, env=NO_SLURM) as daemon:
        assert daemon.process is not None
        daemon.config.write_text(daemon.config.read_text().replace('/checks"', '/others"').replace("3600", "1800"))
        daemon.process.send_signal(signal.SIGHUP)
        status = daemon.wait_until(lambda s: s["interval_seconds"] == 1800, "the new settings")
        assert "takes effect only after a restart: checks_dir" in daemon.log.read_text()
        assert ("checks" in results(status), "others" in results(status)) == (True, False)
