"""Makes the files beside it, by the healthd that is in healthd.tar.xz and a real Slurm. Run by hand, as root:

PYTHONPATH=.:tests:tests/e2e .venv/bin/python tests/data/7adda38/make.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from healthd_daemon import Healthd, condition, xid
from machine import GPUS, Machine
from old_healthd import unpack
from slurm_cluster import SlurmCluster

HERE = Path(__file__).resolve().parent
WORK = Path("/tmp/healthd-7adda38")  # stands in what is written
OLD = WORK / "old"
NODE = "n1"
CONFIG = """\
profile = "none"
baseline_file = ""
interval_seconds = 1.0
[fleet]
limit_at_least = 4
own_hardware_limit_at_least = 4
[checks.eth_link]
expected_mbps = { eth0 = 100000 }
[checks.ib_link]
expected_gbps = { "mlx5_0/1" = 400.0, "mlx5_1/1" = 400.0 }
[checks.services]
enabled = false
[checks.clock]
enabled = false
[checks.device_nodes]
enabled = false
"""
INSTANCES = """
[checks.mount."/scratch"]
fstype = "lustre"

[checks.exec.reboot]
command = ["/etc/healthd/reboot-pending"]
timeout_seconds = 5.0
"""
SETTINGS = """\
import json, sys
from healthd import config, registry
loaded = config.settle(config.read_file(sys.argv[1], required=True), sys.argv[1], {}, registry.built_in())
print(json.dumps([[name, value] for name, value, _ in config.effective(loaded) if name != "node_name"]))
"""


def old(*argv: str, status: int = 0) -> str:
    """What the old program prints."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(OLD), "COLUMNS": "100"}
    done = subprocess.run([sys.executable, *argv], env=env, cwd=OLD, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, f"{argv}: {done}"
    return done.stdout


def old_settings(file: Path) -> list[list[object]] | None:
    try:
        return json.loads(old("-c", SETTINGS, str(file)))
    except AssertionError:
        return None


def make_settings() -> None:
    """Each setting of the sample that may be changed alone: more of a number, the opposite of a switch."""
    lines = (HERE / "settings.toml").read_text().splitlines(keepends=True)
    trial = WORK / "trial.toml"
    for number, line in enumerate(lines):
        found = re.match(r"#(\w+) = (true|false|[0-9.e-]+|\"observe\"|\"127.0.0.1:9478\")(\s.*)", line, re.DOTALL)
        if not found:
            continue
        name, value, rest = found.groups()
        others = {"true": ["false"], "false": ["true"], '"observe"': ['"drain"'], '"127.0.0.1:9478"': ['"off"']}
        tried = others.get(value) or [
            str(type(json.loads(value))(json.loads(value) * 2) or 3),
            value.replace("1", "0", 1),
        ]
        for other in tried:
            changed = [*lines[:number], f"{name} = {other}{rest}", *lines[number + 1 :]]
            trial.write_text("".join(changed))
            if other != value and old_settings(trial) is not None:
                lines = changed
                break
        else:
            print("left as it is:", line.rstrip())  # another setting bounds it
    tables = re.split(r"(?m)^(?=\[)", "".join(lines))
    said = [
        table
        if re.search(r"(?m)^\w", table) or "[checks." not in table
        else table.replace("\n", "\ntimeout_seconds = 20.0\n", 1)
        for table in tables
    ]
    (HERE / "settings_changed.toml").write_text("".join(said) + INSTANCES)
    for name in ("settings", "settings_changed"):
        found = old_settings(HERE / f"{name}.toml")
        assert found
        (HERE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def make_recording(machine: Machine, config: Path) -> None:
    machine.gpus("gpu.3.lost = true\ngpu.5.remap_failure = true")
    machine.now()
    look = ["--config", str(config), "--root", str(machine.root), "--fake-nvml", str(machine.scenario)]
    old("-m", "healthd", "record", str(HERE / "node.rec"), "--force", *look)
    said = old("-m", "healthd", "check", "--replay", str(HERE / "node.rec"), "--json", status=2)
    (HERE / "node.json").write_text(json.dumps(json.loads(said), indent=1) + "\n")


def make_site(machine: Machine) -> None:
    """What the site's checks find on this machine."""
    machine.gpus("gpu.3.lost = true")
    machine.write(
        {"/leaf": "down 5\n", "/proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 9 1 -2\n"}
    )
    config = WORK / "site.toml"
    shutil.copytree(HERE / "checks.d", WORK / "checks.d", ignore=shutil.ignore_patterns("__pycache__"))
    config.write_text((HERE / "site.toml").read_text().replace("CHECKS_DIR", str(WORK / "checks.d")))
    look = ["--config", str(config), "--root", str(machine.root), "--fake-nvml", str(machine.scenario)]
    found = json.loads(old("-m", "healthd", "check", "leaf", "swap", "--json", *look, status=2))
    conditions = [[c[key] for key in ("code", "subject", "severity", "message")] for c in found["conditions"]]
    results = [[r[key] for key in ("check", "instance", "outcome")] for r in found["results"]]
    said = {"conditions": conditions, "results": results}
    (HERE / "site.json").write_text(json.dumps(said, indent=1) + "\n")


def make_ledger(machine: Machine) -> None:
    machine.gpus("gpu.5.remap_pending = true")
    machine.now()
    with SlurmCluster(nodes=4) as cluster:
        job = cluster.sbatch("sleep 600", "-w", NODE)
        cluster.wait_job(job, "RUNNING")
        flags = ("--mode", "act", "--node-name", NODE, "--root", str(machine.root))
        env = {**cluster.env, "PYTHONPATH": str(OLD)}
        daemon = Healthd(*flags, directory=WORK, config=CONFIG, env=env, fake_nvml=str(machine.scenario))
        with daemon:
            machine.port(0, up=False)
            daemon.until(lambda s: condition(s, "ib_link/down"), "a port is down")
            machine.port(0)
            daemon.until(lambda s: not condition(s, "ib_link/down"), "it is up again")
            machine.ethernet(up=False)
            daemon.kernel_line(xid(31, text="pid=4711, name=python3, MMU Fault"))
            daemon.until(lambda s: condition(s, "gpu_xid/31") and condition(s, "eth_link/down"), "warnings")
            daemon.ask(command="repaired", code="gpu_xid/31", part=None, why="it was the job")
            daemon.ask(command="ack", code="eth_link/down", part="eth0", seconds=7200, why="cable is on its way")
            daemon.kernel_line(xid(79, GPUS[3].removesuffix(".0")), xid(13, GPUS[1].removesuffix(".0"), "Graphics"))
            daemon.until(lambda s: condition(s, "gpu_xid/79"), "an Xid 79")
            cluster.wait_state(NODE, "DRAIN")
            written = daemon.run_dir / "ledger.json"
            daemon.until(lambda s: json.loads(written.read_text())["slurm"].get("requeued"), "the job is requeued")
            daemon.until(lambda s: s["slurm"].get("owner") == "ours", "Slurm says that the drain is ours")
            daemon.ask(command="pause", seconds=3600, why="driver upgrade")
            seen = condition(daemon.status(), "eth_link/down")
            daemon.until(lambda s: condition(s, "eth_link/down") != seen, "another round")
        for name in ("ledger.json", "past.json"):
            shutil.copy(daemon.run_dir / name, HERE)


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    unpack(OLD)
    os.chdir(OLD)  # `python -m healthd` finds first what is here
    config = WORK / "record.toml"
    config.write_text(f'node_name = "{NODE}"\n{CONFIG}')
    make_settings()
    machine = Machine(WORK)
    make_recording(machine, config)
    make_site(machine)
    make_ledger(machine)


if __name__ == "__main__":
    main()
