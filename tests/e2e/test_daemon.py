"""`healthd run` and `healthd check` as a user starts them, without Slurm: starts, faults, people, reloads, restarts."""

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
from healthd_daemon import REPOSITORY, UNCONCERNED, Healthd, condition, looked_since, write_whole, xid
from msgspec.structs import replace
from requirements import require, require_root
from waiting import until

from healthd.agent.conditions.store import decode
from healthd.common.model import DrainRecord, FleetHold
from healthd.common.values import encode

PROFILES = ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200")
NO_SLURM = {"SLURM_CONF": "/nonexistent/slurm.conf"}
BOOT_ID = "proc/sys/kernel/random/boot_id"


def healthd(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "healthd", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )


def refusal(daemon: Healthd) -> tuple[int, str]:
    """(exit status, the one sentence) of a daemon that does not start."""
    daemon.wait = False
    daemon.start()
    assert daemon.process is not None
    status = daemon.process.wait(120)
    (line,) = daemon.log.read_text().splitlines()
    return status, line


def above_info(conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found for found in conditions if found["severity"] != "info"]


def results(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{found['check']} {found['instance']}".strip(): found for found in status["results"]}


def require_kernel_log() -> None:
    require_root()
    if not os.path.exists("/dev/kmsg"):
        require("there is no /dev/kmsg")


def require_no_gpus() -> None:
    if any(Path(device).read_text().strip() == "0x10de" for device in Path("/sys/bus/pci/devices").glob("*/vendor")):
        require("this machine has NVIDIA devices, which may be ill")


# --- what is healthy


def test_a_healthy_machine_without_gpus_gives_nothing_above_info(directory: Path) -> None:
    require_kernel_log()
    require_no_gpus()
    config = directory / "check.toml"
    config.write_text("".join(f"[checks.{check}]\nenabled = false\n" for check in UNCONCERNED))
    checked = healthd("check", "--json", "--config", str(config))
    found = json.loads(checked.stdout)
    assert (found["health"], checked.returncode, found["unknown"]) == ("healthy", 0, []), checked.stdout
    assert above_info(found["conditions"]) == []
    with Healthd("--kernel-log", "kmsg", directory=directory, fake_nvml="") as daemon:
        status = daemon.status()
        assert (status["health"], status["unknown"]) == ("healthy", [])
        assert above_info(status["conditions"]) == []
        assert status["kernel_log"]["alive"]
        assert daemon.stop() == 0


@pytest.mark.parametrize("profile", PROFILES)
def test_a_healthy_profile_gives_nothing_above_info(directory: Path, profile: str) -> None:
    with Healthd(directory=directory, fake_nvml=profile) as daemon:
        status = daemon.status()
        assert (status["health"], status["conditions"], status["unknown"]) == ("healthy", [], [])
        assert daemon.verdict().split()[0] == "ok"
        assert len(status["inventory"]["gpus"]) == 8


# --- starts that are refused


def test_a_second_daemon_in_the_same_place_says_so_and_leaves_the_first_alone(directory: Path) -> None:
    with Healthd(directory=directory) as first:
        second = Healthd(directory=directory)
        second.log = directory / "second.log"
        status, sentence = refusal(second)
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
def test_wrong_settings_stop_the_start_with_one_sentence(directory: Path, config: str, named: str) -> None:
    status, sentence = refusal(Healthd(directory=directory, config=config))
    assert status == 64
    assert named in sentence
    assert "healthd.toml" in sentence
    assert not (directory / "run").exists()


@pytest.mark.parametrize("place", ["/proc/healthd", "/dev/null/healthd", "/dev/null"])
def test_a_runtime_directory_that_cannot_be_had_is_one_sentence(directory: Path, place: str) -> None:
    status, sentence = refusal(Healthd("--runtime-dir", place, directory=directory))
    assert status == 1
    assert sentence.startswith("healthd run: ")
    assert place in sentence


def test_a_daemon_whose_runtime_directory_is_removed_ends_with_a_sentence_and_the_next_one_knows_all(
    directory: Path,
) -> None:
    with Healthd("--interval", "1", directory=directory) as daemon:
        daemon.kernel_line(xid(79))
        before = condition(daemon.until(lambda s: condition(s, "gpu_xid/79") is not None, "known"), "gpu_xid/79")
        assert before is not None
        assert daemon.process is not None
        daemon.run_dir.rename(directory / "removed")  # at once: it may write there at any moment
        assert daemon.process.wait(120) == 1
        last = daemon.log.read_text().splitlines()[-1]
        assert last.startswith(f"healthd run: {daemon.run_dir}, or the lock in it, was removed while healthd was ")
        daemon.start()
        after = condition(daemon.status(), "gpu_xid/79")
        assert after is not None
        assert (after["first_seen"], after["count"]) == (before["first_seen"], before["count"])


def test_of_two_daemons_the_one_whose_runtime_directory_was_removed_ends_and_touches_nothing(directory: Path) -> None:
    with Healthd("--interval", "3600", directory=directory) as first:
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)
        shutil.rmtree(first.run_dir)
        second = Healthd("--interval", "3600", directory=directory)
        second.kernel_log = first.kernel_log
        second.log = directory / "second.log"
        with second:
            first.process.send_signal(signal.SIGCONT)
            first.kernel_line(xid(79))  # wakes both
            assert first.process.wait(120) == 1
            assert first.log.read_text().splitlines()[-1].endswith(f"{first.run_dir}: another healthd is running there")
            second.until(lambda s: condition(s, "gpu_xid/79") is not None, "it goes on, at its socket")


def test_a_socket_that_a_killed_daemon_left_is_in_nobodys_way(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        daemon.kill()
        assert (daemon.run_dir / "healthd.sock").exists()
        daemon.start()
        assert daemon.status()["health"] == "healthy"


# --- what it publishes


def test_the_verdict_file_says_one_word_then_when_it_expires_then_why(directory: Path) -> None:
    began = time.time()
    with Healthd("--interval", "100", directory=directory) as daemon:
        ok = re.fullmatch(r"ok ([0-9]+) healthy\n", daemon.verdict())
        assert ok is not None
        assert int(began) + 300 <= int(ok[1]) <= time.time() + 300
        assert (daemon.run_dir / "verdict").stat().st_mode & 0o777 == 0o644
        daemon.kernel_line(xid(79))
        daemon.until(lambda s: condition(s, "gpu_xid/79") is not None, "the condition")
        until(lambda: not daemon.verdict().startswith("ok"))
        assert re.fullmatch(r"warning [0-9]+ gpu_xid/79 0000:61:00\.0: [ -~]+\n", daemon.verdict()), (
            "never `drain` in observe mode"
        )


def test_metrics_come_over_http_and_as_a_whole_file(directory: Path) -> None:
    textfile = directory / "collector" / "healthd.prom"
    textfile.parent.mkdir()
    healthy = 'healthd_health{state="healthy"} 1.0\n'
    config = f'interval_seconds = 0.5\n[metrics]\ntextfile = "{textfile}"\n'
    with Healthd("--listen", "127.0.0.1:0", directory=directory, config=config) as daemon:
        found = re.search(r"metrics on (http://127\.0\.0\.1:[0-9]+/metrics)", daemon.log.read_text())
        assert found is not None
        with urllib.request.urlopen(found[1], timeout=240) as page:
            assert healthy in page.read().decode()
        until(lambda: textfile.exists() and healthy in textfile.read_text())  # the first may say "unknown": so it was
        with open(textfile, encoding="utf-8") as whole:
            until(lambda: not os.path.samestat(os.fstat(whole.fileno()), textfile.stat()))
            assert healthy in whole.read(), "the next one takes its place whole"
        assert textfile.stat().st_mode & 0o777 == 0o644
        until(lambda: os.listdir(textfile.parent) == [textfile.name])


def test_a_collectors_directory_that_is_not_there_is_said_and_harms_nothing(directory: Path) -> None:
    with Healthd(directory=directory, config='[metrics]\ntextfile = "/nonexistent/healthd.prom"') as daemon:
        status = daemon.until(lambda s: s["problems"], "it is a trouble")
        (problem,) = status["problems"]
        assert problem.startswith("cannot write /nonexistent/healthd.prom (metrics.textfile): ")
        assert problem in daemon.log.read_text()
        assert status["health"] == "healthy"


def test_the_status_is_answered_while_a_round_is_under_way(directory: Path) -> None:
    scenario = directory / "slow.toml"
    # It hangs for longer than the test may be kept from looking, and is waited for.
    write_whole(scenario, 'profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 20.0\n')
    config = "[checks.gpu_access]\ntimeout_seconds = 100\n"
    with Healthd(directory=directory, config=config, fake_nvml=str(scenario), wait=False) as daemon:
        status = daemon.until(lambda s: s["round"].get("number", 0) == 1, "the round began")
        assert status["round"].get("seconds", 0) == 0
        assert status["health"] == "unknown"
        assert daemon.verdict().startswith("unknown ")
        assert daemon.status()["round"].get("seconds", 0) == 0, "and again"
        daemon.until(lambda s: s["health"] == "healthy", "slow is not ill")


# --- faults


def test_a_real_line_in_the_kernels_log_counts_only_if_drills_are_admitted(directory: Path) -> None:
    require_kernel_log()
    config = "[kernel_log]\naccept_injected = true\n"
    for name in ("drill", "real"):
        (directory / name).mkdir()
    with (
        Healthd("--kernel-log", "kmsg", directory=directory / "drill", config=config) as drill,
        Healthd("--kernel-log", "kmsg", directory=directory / "real") as real,
    ):
        bus, device = random.randrange(256), random.randrange(32)  # the log keeps the lines of earlier tests
        subject = f"fffe:{bus:02x}:{device:02x}.0"
        with open("/dev/kmsg", "w", buffering=1) as log:
            log.write(f"<12>{xid(79, subject[:-2])}\n")
        status = drill.until(lambda s: condition(s, "gpu_xid/79", subject) is not None, "the condition")
        found = condition(status, "gpu_xid/79", subject)
        assert found is not None
        assert (found["severity"], found["count"], found["history"]) == ("critical", 1, False)
        time.sleep(0.2)
        assert condition(real.status(), "gpu_xid/79", subject) is None


def test_a_gpu_that_is_lost_is_found_in_the_next_round_and_repaired_only_when_it_is(directory: Path) -> None:
    scenario = directory / "lost.toml"
    write_whole(scenario, 'profile = "dgx-h100"\n')
    with Healthd("--interval", "0.4", directory=directory, fake_nvml=str(scenario)) as daemon:
        assert daemon.status()["health"] == "healthy"
        write_whole(scenario, 'profile = "dgx-h100"\ngpu.3.lost = true\n')
        status = daemon.until(lambda s: condition(s, "gpu_access/lost") is not None, "the GPU is lost")
        assert status["health"] == "unhealthy"
        before = condition(status, "gpu_access/lost")
        assert before is not None
        assert before["subject"] == status["inventory"]["gpus"][3]["pci"]

        assert "gpu_access/lost" in daemon.ask(command="repaired", code="gpu_access/lost")["done"]
        status = daemon.until(
            lambda s: (
                (found := condition(s, "gpu_access/lost")) is not None and found["first_seen"] > before["last_seen"]
            ),
            "it is not repaired: found again",
        )
        assert status["health"] == "unhealthy"

        write_whole(scenario, 'profile = "dgx-h100"\n')
        last = status["round"]["number"] + 3
        status = daemon.until(lambda s: s["round"]["number"] > last, "rounds that find it well")
        assert status["health"] == "unhealthy", "what clears by a reboot does not go by itself"
        daemon.ask(command="repaired", code="gpu_access/lost", part=before["subject"])
        daemon.until(lambda s: s["health"] == "healthy" and not s["conditions"], "repaired")


@pytest.mark.parametrize(
    ("problem", "timeout_seconds", "code"),
    [
        ("gpu.3.lost_after = 3\n", 60, "gpu_access/lost"),
        ('hang = "nvmlDeviceGetEccMode"\nhang_seconds = 60\n', 2, "gpu_access/hang"),
    ],
)
def test_what_another_gpu_check_meets_in_the_middle_of_a_round_is_found_in_that_round(
    directory: Path, problem: str, timeout_seconds: int, code: str
) -> None:
    scenario = directory / "middle.toml"
    write_whole(scenario, f'profile = "dgx-h100"\n{problem}')
    config = f"interval_seconds = 3600\n[checks.gpu_ecc]\ntimeout_seconds = {timeout_seconds}\n"
    with Healthd(directory=directory, config=config, fake_nvml=str(scenario)) as daemon:
        status = daemon.status()
        assert condition(status, code) is not None
        assert status["round"]["number"] == 1
        assert "gpu_ecc" in " ".join(status["unknown"])


def test_a_driver_that_hangs_warns_at_first_gets_worse_and_is_forgiven_when_it_answers(directory: Path) -> None:
    scenario = directory / "hangs.toml"
    config = (
        "interval_seconds = 0.5\n[checks.gpu_access]\ntimeout_seconds = 5\nhang_degraded_seconds = 15.0\n"
        "clear_after = 2\n"
    )
    write_whole(scenario, 'profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 20\n')
    # Not after the first round: on a busy machine it lasts until the hang is worse.
    with Healthd(directory=directory, config=config, fake_nvml=str(scenario), wait=False) as daemon:
        status = daemon.until(lambda s: condition(s, "gpu_access/hang") is not None, "it hangs")
        found = condition(status, "gpu_access/hang")
        assert found is not None
        assert found["severity"] == "warning"
        assert status["health"] == "unknown"
        assert list(status["blocked"]) == ["nvml"]
        daemon.until(
            lambda s: (c := condition(s, "gpu_access/hang")) is not None and c["severity"] == "degraded", "worse"
        )
        daemon.until(lambda s: results(s).get("ib_link", {}).get("outcome") == "completed", "the others look")
        write_whole(scenario, 'profile = "dgx-h100"\n')
        status = daemon.until(lambda s: s["health"] == "healthy", "the call came back")
        assert (status["blocked"], status["conditions"]) == ({}, [])
        assert status["cleared"][-1]["cleared_by"] == "pass"


def test_a_link_that_is_back_within_its_confirm_time_is_no_fault(directory: Path) -> None:
    root = directory / "root"
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (root / BOOT_ID).parent.mkdir(parents=True)
    (root / BOOT_ID).write_text("b1\n")

    def link(state: str, physical: str) -> None:
        for name, text in {"phys_state": physical, "rate": "400 Gb/sec (4X NDR)", "state": state}.items():
            write_whole(port / name, f"{text}\n")

    def config(interval: float, confirm: float, critical: float) -> str:
        table = f"confirm_seconds = {confirm}\ncritical_seconds = {critical}\n"
        return f'interval_seconds = {interval}\n[checks.ib_link]\nexpected_gbps = {{"mlx5_0/1" = 400}}\n{table}'

    link("4: ACTIVE", "5: LinkUp")
    with Healthd("--root", str(root), directory=directory, config=config(0.3, 600.0, 601.0)) as daemon:
        link("1: DOWN", "2: Polling")
        status = daemon.until(lambda s: condition(s, "ib_link/down") is not None, "the link is down")
        found = condition(status, "ib_link/down")
        assert found is not None
        assert found["state"] == "pending"
        link("4: ACTIVE", "5: LinkUp")
        daemon.until(lambda s: condition(s, "ib_link/down") is None, "the link is back")
        assert "ib_link/down mlx5_0/1: degraded, open" not in daemon.log.read_text()

        assert daemon.process is not None
        daemon.config.write_text(config(0.25, 2.0, 3.0))
        daemon.process.send_signal(signal.SIGHUP)
        daemon.until(lambda s: s["interval_seconds"] == 0.25, "the shorter times")
        link("1: DOWN", "2: Polling")
        daemon.until(lambda s: (c := condition(s, "ib_link/down")) is not None and c["state"] == "open", "it lasts")
        daemon.until(
            lambda s: (c := condition(s, "ib_link/down")) is not None and c["severity"] == "critical", "it lasts on"
        )
        link("4: ACTIVE", "5: LinkUp")
        daemon.until(lambda s: s["health"] == "healthy", "it passes")


def heard(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The conditions that rest on kernel lines."""
    return [each for each in status["conditions"] if each["check"] == "gpu_xid"]


def test_a_daemon_that_is_restarted_again_and_again_counts_each_event_once(directory: Path) -> None:
    addresses = [f"0000:{bus:02x}:00" for bus in range(0x10, 0x16)]
    with Healthd(directory=directory) as daemon:
        for number, address in enumerate(addresses):
            daemon.kernel_line(xid(79, address))
            if number % 2:
                until(lambda subject=f"{address}.0": condition(daemon.status(), "gpu_xid/79", subject) is not None)
                daemon.kill()
            else:
                assert daemon.stop() == 0
            if number == 3:
                daemon.kernel_line(xid(48, address, "DBE (double bit error)"))  # while nobody listens
            daemon.start()
        status = daemon.until(lambda s: len(heard(s)) == len(addresses) + 1, "each of them")
        found = {(c["code"], c["subject"]): (c["count"], c["history"]) for c in heard(status)}
        expected = [("gpu_xid/79", f"{address}.0") for address in addresses]
        assert found == dict.fromkeys([*expected, ("gpu_xid/48", f"{addresses[3]}.0")], (1, False))


def test_an_xid_that_says_that_no_recovery_is_needed_any_more_ends_what_waited_for_the_reset(directory: Path) -> None:
    def action(before: int, after: int) -> str:
        return xid(154, "0000:61:00", f"GPU recovery action changed from {before:#x} (x) to {after:#x} (x)")

    with Healthd(directory=directory) as daemon:
        daemon.kernel_line(xid(95, text="Uncontained: LTC TAG"), xid(79), action(0, 1))
        daemon.until(lambda s: len(heard(s)) == 3, "the faults are known")
        daemon.kernel_line(action(1, 0))
        daemon.until(lambda s: [c["code"] for c in heard(s)] == ["gpu_xid/79"], "only what waits for a reboot is left")


def test_conditions_of_one_fault_are_told_to_be_one_incident(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        daemon.kernel_line(xid(48, text="DBE (double bit error)"), xid(79), xid(79, "0000:9d:00"))
        status = daemon.until(lambda s: condition(s, "gpu_xid/79", "0000:9d:00.0"), "all are conditions")
        assert status["incidents"] == [{"first": "gpu_xid/48 0000:61:00.0", "then": ["gpu_xid/79 0000:61:00.0"]}]
        told = "incident: gpu_xid/79 0000:61:00.0 belongs to the incident of gpu_xid/48 0000:61:00.0"
        assert daemon.log.read_text().count(told) == 1
        daemon.ask(command="repaired", code="gpu_xid/48", part="0000:61:00.0")
        daemon.until(lambda s: s["incidents"] == [], "what stands alone is no incident")


@pytest.mark.alone  # each daemon of this machine hears of it, and looks
def test_a_device_that_is_removed_is_looked_at_without_waiting_for_the_next_round(directory: Path) -> None:
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
            # The kernel repeats what it would say: the device stays where it is.
            (bridges[0] / "uevent").write_text("remove")
            until(lambda: f"device {bridges[0].name} was removed" in daemon.log.read_text())
        finally:
            (bridges[0] / "uevent").write_text("add")
        status = daemon.until(
            lambda s: results(s)["gpu_access"]["started"] > before["gpu_access"]["started"], "it looks"
        )
        assert results(status)["gpu_ecc"]["started"] == before["gpu_ecc"]["started"], "the others wait for their round"


def test_one_device_that_cannot_be_read_hides_no_growth_on_the_others(directory: Path) -> None:
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
        status = daemon.until(lambda s: condition(s, "port/errors") is not None, "the growth is seen")
        assert results(status)["port"]["outcome"] == "failed"


def test_the_gpus_of_a_driver_that_comes_later_get_into_the_inventory(directory: Path) -> None:
    scenario = directory / "node.toml"
    write_whole(scenario, 'profile = "dgx-h100"\nlibrary = "driver_not_loaded"\n')
    with Healthd("--interval", "0.5", directory=directory, fake_nvml=str(scenario)) as daemon:
        assert daemon.status()["inventory"]["gpus"] == []
        write_whole(scenario, 'profile = "dgx-h100"\n')
        daemon.until(lambda s: len(s["inventory"]["gpus"]) == 8, "the inventory has the GPUs")
        assert daemon.status()["inventory"]["driver_version"]


def test_a_gpu_that_is_lost_stays_in_the_inventory(directory: Path) -> None:
    scenario = directory / "node.toml"
    write_whole(scenario, 'profile = "dgx-h100"\n')
    with Healthd("--interval", "0.5", directory=directory, fake_nvml=str(scenario)) as daemon:
        daemon.until(lambda s: len(s["inventory"]["gpus"]) == 8, "the inventory has the GPUs")
        write_whole(scenario, 'profile = "dgx-h100"\ngpu.3.lost = true\n')
        daemon.until(lambda s: condition(s, "gpu_access/lost") is not None, "it is lost")
        rounds = daemon.status()["round"]["number"]
        status = daemon.until(lambda s: s["round"]["number"] > rounds + 2, "some rounds later")
        assert len(status["inventory"]["gpus"]) == 8


# --- people


def test_what_opens_in_a_pause_acts_only_when_it_is_seen_again(directory: Path) -> None:
    flags = ("--mode", "drain", "--node-name", "nowhere")
    with Healthd(*flags, directory=directory, env=NO_SLURM) as daemon:
        assert "paused for 10 min" in daemon.ask(command="pause", seconds=600, why="driver upgrade")["done"]
        assert daemon.status()["pause"]["why"] == "driver upgrade"
        daemon.kernel_line(xid(79))
        daemon.until(lambda s: condition(s, "gpu_xid/79") is not None, "the condition")
        ends = daemon.status()["time"] + 1.0  # or later
        assert "paused for 1 s" in daemon.ask(command="pause", seconds=1, why="it is done")["done"]
        status = daemon.until(lambda s: s["pause"] is None and looked_since(s, ends), "all looked after the pause")
        assert status["health"] == "unhealthy"
        assert daemon.verdict().startswith("warning "), "what was seen in the pause does not drain"
        daemon.kernel_line(xid(79, text="GPU has fallen off the bus again."))
        daemon.until(lambda s: s["decision"]["would"].startswith("drain "), "a drain is wanted")


def test_a_pause_survives_a_kill(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        daemon.ask(command="pause", seconds=600, why="driver upgrade")
        daemon.kill()
        daemon.start()
        assert daemon.status()["pause"]["why"] == "driver upgrade"
        assert "the pause has ended" in daemon.ask(command="unpause")["done"]
        assert daemon.status()["pause"] is None


def test_no_request_whatever_it_says_ends_the_daemon(directory: Path) -> None:
    with Healthd(directory=directory) as daemon:
        assert daemon.ask(command="reboot") == {"error": "unknown command 'reboot'"}
        for command in (None, 1, ["pause"], {"a": 1}):
            assert daemon.ask(command=command) == {"error": "command: must be text"}
        assert "error" in daemon.ask(command="repaired", code=["x"], part={"a": []})
        assert "error" in daemon.ask(command="pause", seconds=10**300, why="x")
        assert daemon.status()["health"] == "healthy"


# --- reload


def test_a_reload_to_observe_takes_a_hold_of_the_fleet_limit_out_of_status_and_metrics(directory: Path) -> None:
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
        daemon.until(lambda s: s["mode"] == "observe", "the new mode")
        assert daemon.status()["slurm"]["fleet_hold"] is None
        until(lambda: "healthd_fleet_limit_drain_waiting{" not in page.read_text())


def test_a_reload_of_a_wrong_file_keeps_the_old_settings_and_of_a_right_one_changes_them(directory: Path) -> None:
    with Healthd(directory=directory, config="interval_seconds = 3600", env=NO_SLURM) as daemon:
        assert daemon.process is not None
        daemon.configure('interval_seconds = 60\nmode = "dran"\n')
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "settings not reloaded" in daemon.log.read_text())
        (said,) = [line for line in daemon.log.read_text().splitlines() if "settings not reloaded" in line]
        assert "healthd.toml: mode: " in said
        status = daemon.status()
        assert (status["interval_seconds"], status["mode"]) == (3600, "observe")
        assert "gpu_ecc" in results(status)

        daemon.configure(
            'interval_seconds = 1800\nmode = "drain"\nstate_dir = "/nowhere"\nround_timeout_seconds = 7\n'
            "[checks.gpu_ecc]\nenabled = false\n"
        )
        daemon.process.send_signal(signal.SIGHUP)
        status = daemon.until(lambda s: s["interval_seconds"] == 1800, "the new settings")
        assert status["mode"] == "drain"
        assert "gpu_ecc" not in results(status)
        assert "takes effect only after a restart: round_timeout_seconds" in daemon.log.read_text()


FAN = """
from dataclasses import dataclass
from healthd.api import CheckConfig

@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    {field}

{more}
def run(host, config, past):
    yield from ()
"""
ODD = {  # what a site's check says: what is said of it
    FAN.format(field='timeout_seconds: str = "5s"', more=""): "fan.py: Config.timeout_seconds: must be a number",
    FAN.format(field="severity: int = 3", more=""): "fan.py: Config.severity: must be a table, got 3",
    FAN.format(field="def __post_init__(self): 1 / 0", more=""): "checks.fan: its Config raised ZeroDivisionError",
    FAN.format(field="fans: set[int] | str = 3", more=""): "checks.fan: its Config raised TypeError",
    FAN.format(
        field="x: int = 1", more="def validate(config): return config.y"
    ): "its validate() raised AttributeError",
    FAN.format(field="x: int = 1", more="def validate(config): return 'x must be 2'"): "checks.fan: x must be 2",
    FAN.format(field="x: int = 1", more="HOLDS_RESUME = 'no'"): "fan.py: HOLDS_RESUME must be True or False",
    FAN.format(field="x: int = 1", more="1 / 0"): "fan.py: cannot be loaded: ZeroDivisionError",
    FAN.format(field="x: int = 1", more="raise GeneratorExit"): "fan.py: cannot be loaded: GeneratorExit",
}


def test_no_odd_check_of_the_site_ends_a_daemon_that_is_reloaded_and_the_old_settings_stay(directory: Path) -> None:
    checks = directory / "checks"
    checks.mkdir(mode=0o755)
    (checks / "fan.py").write_text(FAN.format(field="root: int = 3; max_restarts: int | None = None", more=""))
    settings = f'interval_seconds = 3600\nchecks_dir = "{checks}"\n'
    with Healthd(directory=directory, config=settings, env=NO_SLURM) as daemon:
        assert daemon.process is not None
        assert "fan" in results(daemon.status()), "its settings are called as some of ours are"
        daemon.config.write_text(daemon.config.read_text().replace("3600", "1800"))
        for times, (text, sentence) in enumerate(ODD.items(), 1):
            (checks / "fan.py").write_text(text)
            checked = healthd("config", "check", str(daemon.config))
            assert (checked.returncode, checked.stdout, checked.stderr.count("\n")) == (64, "", 1)
            assert checked.stderr.startswith("healthd: ")
            assert sentence in checked.stderr
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda times=times: daemon.log.read_text().count("settings not reloaded") == times)
            status = daemon.status()
            assert (status["interval_seconds"], "fan" in results(status)) == (3600, True)
            (problem,) = [t for t in status["problems"] if t.startswith("the settings were not reloaded: ")]
            assert sentence in problem
            assert problem.partition(": ")[2].strip() == checked.stderr.removeprefix("healthd: ").strip()
            assert problem.partition(": ")[2].startswith((str(daemon.config), str(checks)))
        assert "Traceback" not in daemon.log.read_text()
        (checks / "fan.py").write_text(FAN.format(field="x: int = 1", more=""))
        daemon.process.send_signal(signal.SIGHUP)
        status = daemon.until(lambda s: s["interval_seconds"] == 1800, "the new settings")
        assert not any("settings" in problem for problem in status["problems"])
        daemon.until(lambda s: results(s)["fan"]["outcome"] == "completed", "it runs on")


def test_a_reload_that_fails_as_nobody_thought_of_keeps_the_old_settings_and_says_where(directory: Path) -> None:
    # In the daemon only: what ends the process of the trial before it is refused with a sentence.
    odd = "import sys\n\n\ndef validate(config):\n    if not sys.argv[0].endswith('settings/__main__.py'):\n"
    odd += "        raise KeyboardInterrupt('as if by hand')"
    checks = directory / "checks"
    checks.mkdir(mode=0o755)
    settings = f'interval_seconds = 3600\nchecks_dir = "{checks}"\n'
    with Healthd(directory=directory, config=settings, env=NO_SLURM) as daemon:
        assert daemon.process is not None
        (checks / "fan.py").write_text(FAN.format(field="x: int = 1", more=odd))
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "settings not reloaded: KeyboardInterrupt: as if by hand" in daemon.log.read_text())
        assert "Traceback (most recent call last)" in daemon.log.read_text()
        status = daemon.status()
        assert "the settings were not reloaded: KeyboardInterrupt: as if by hand" in status["problems"]
        assert "fan" not in results(status)


def test_a_reload_with_another_directory_of_checks_goes_on_with_those_of_the_start(directory: Path) -> None:
    for name in ("checks", "others"):
        (directory / name).mkdir(mode=0o755)
        (directory / name / f"{name}.py").write_text(FAN.format(field="x: int = 1", more=""))
    settings = f'interval_seconds = 3600\nchecks_dir = "{directory}/checks"\n'
    with Healthd(directory=directory, config=settings, env=NO_SLURM) as daemon:
        assert daemon.process is not None
        daemon.config.write_text(daemon.config.read_text().replace('/checks"', '/others"').replace("3600", "1800"))
        daemon.process.send_signal(signal.SIGHUP)
        status = daemon.until(lambda s: s["interval_seconds"] == 1800, "the new settings")
        assert "takes effect only after a restart: checks_dir" in daemon.log.read_text()
        assert ("checks" in results(status), "others" in results(status)) == (True, False)
