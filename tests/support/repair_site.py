"""Nodes of a SlurmCluster whose daemon repairs them in mode "act": `Site` by a GPU reset, `RepairedNode` by a reboot.

Only the hardware is fake. nvidia-smi records its resets with their times, and `RepairedNode` boots only when the test
calls `boot`. The daemon's Slurm commands run through wrappers that record them and can hold healthd-repair.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from healthd_daemon import Healthd, xid_line
from machine import GPUS, Machine
from slurm_cluster import Node, SlurmCluster
from waiting import until

from healthd.agent.repair.journal import Journal
from healthd.agent.repair.journal_file import machine_identity, read_journal, write_journal
from healthd.agent.repair.slurm_state import STOP_RESERVATION

PCI = "0000:61:00.0"
# Without the step "reboot": it would reboot the test machine.
CONFIG = '[repair]\nmode = "act"\norder = ["gpu_reset"]\nstop_services = []\n'
# Modes in the file `mode`: ok, fails (no reset), slow (two seconds), waits (until the file `go` exists).
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
echo "$EPOCHREALTIME $*" >>resets
for gpu; do :; done
case $(cat mode) in
  fails) echo "GPU $gpu: Unknown Error"; exit 255 ;;
  slow) sleep 2 ;;
  waits) until [ -e go ]; do sleep 0.1; done ;;
esac
echo "$EPOCHREALTIME" >>resets.ended
echo "GPU $gpu was successfully reset."
echo "All done."
"""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
REBOOT_CONFIG = """\
[repair]
mode = "act"
order = ["reboot"]
[slurm]
command_timeout_seconds = 120.0
"""
CLAIM = "(repair: reboot)"
PENDING = ("REBOOT_REQUESTED", "REBOOT_ISSUED", "NOT_RESPONDING", "COMPLETING")
# The wrapper appends "BEGAN ENDED STATUS CALLER NAME ARGUMENTS" to the file "commands". The caller is healthd-repair
# or the daemon. While the file "hold" exists, healthd-repair waits before it lists the processes of the node's jobs.
SLURM_COMMAND = """\
#!/bin/bash
began=$EPOCHREALTIME caller=daemon
mapfile -d "" -t parent 2>/dev/null <"/proc/$PPID/cmdline"
case " ${{parent[*]}} " in *" repair run "*) caller=executor ;; esac
if [ $caller = executor ] && [ "$1" = listpids ] && [ -e {folder}/hold ]; then
    touch {folder}/held
    while [ -e {folder}/hold ]; do sleep 0.1; done
fi
{program} "$@"
status=$?
echo "$began $EPOCHREALTIME $status $caller {name} $*" >>{folder}/commands
exit $status
"""


class SlurmCommand(NamedTuple):
    """A command of the daemon or of healthd-repair. Times are epoch seconds."""

    began: float
    ended: float
    status: int
    caller: str
    argv: str


def write_slurm_commands(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Write the wrappers of Slurm's commands. Return the environment in which they are found first."""
    for name in ("scontrol", "sinfo", "squeue"):
        program = shutil.which(name, path=env["PATH"])
        path = folder / name
        path.write_text(SLURM_COMMAND.format(folder=folder, program=program, name=name))
        path.chmod(0o755)
    return {**env, "PATH": f"{folder}:{env['PATH']}"}


def slurm_commands(folder: Path) -> list[SlurmCommand]:
    """Return the commands that have ended, in the order of their ends."""
    path, found = folder / "commands", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        words = line.split(" ", 4)
        if len(words) == 5 and words[3] in ("daemon", "executor"):  # a Reason may contain a line break
            found.append(SlurmCommand(float(words[0]), float(words[1]), int(words[2]), words[3], words[4]))
    return found


class Site:
    """A node in mode "act" with a fake nvidia-smi. Its state directory has survived a reboot.

    interval  seconds between rounds of checks, or "" for the default
    """

    def __init__(
        self, cluster: SlurmCluster, node: str, folder: Path, config: str = CONFIG, interval: str = "1"
    ) -> None:
        self.cluster, self.node, self.folder = cluster, node, folder
        self.programs, daemon = folder / "programs", folder / "daemon"
        self.programs.mkdir()
        (daemon / "state").mkdir(parents=True)
        self.machine = Machine(daemon)
        self.machine.now()
        self.machine.write({"/proc/locks": "", "/proc/1/fd/0": "", "/etc/machine-id": "0c7d3ae0b6d24c6f\n"})
        gpus = " ".join(f"0000{gpu.upper()}" for gpu in GPUS)
        smi = self.programs / "nvidia-smi"
        smi.write_text(NVIDIA_SMI.format(folder=folder, gpus=gpus))
        smi.chmod(0o755)
        self.set_mode("ok")
        machine = machine_identity(str(self.machine.root))
        write_journal(Journal("an-earlier-boot", node=node, machine=machine), str(daemon / "state"))
        rounds = ("--interval", interval) if interval else ()
        flags = ("--mode", "act", "--node-name", node, "--root", str(self.machine.root))
        self.daemon = Healthd(
            *(*flags, *rounds),
            directory=daemon,
            env=write_slurm_commands(self.programs, cluster.env),
            config=config,
            programs=self.programs,
            fake_nvml=str(self.machine.scenario),
        )

    def set_mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(f"{mode}\n")

    def resets(self) -> int:
        return len(self.reset_times())

    def reset_times(self, name: str = "resets") -> list[float]:
        """Return when each reset began, or with "resets.ended", when it ended."""
        path = self.folder / name
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

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


def journal(site: Site) -> Journal:
    found = read_journal(str(site.folder / "daemon/state"))
    assert found is not None
    return found


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


class NodeDaemon(Healthd):
    """A daemon whose kernel has the boot id of a file. Its worker and healthd-repair see the same."""

    boot_id: Path

    def argv(self) -> list[str]:
        mount = f'mount --bind "$0" {BOOT_ID} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, str(self.boot_id), *super().argv()]


class RepairedNode:
    """A node in mode "act" after its second boot, so that its state directory has survived one."""

    def __init__(self, cluster: SlurmCluster, name: str, directory: Path, config: str = REBOOT_CONFIG) -> None:
        directory.mkdir(exist_ok=True)
        self.cluster, self.name, self.directory = cluster, name, directory
        self.machine = Machine(directory)
        self.machine.write({"/proc/locks": "", "/etc/machine-id": f"{uuid.uuid4().hex}\n"})
        self.machine.now()
        self.programs = directory / "programs"
        self.programs.mkdir()
        env = write_slurm_commands(self.programs, cluster.env)
        flags = ("--mode", "act", "--node-name", name, "--interval", "1", "--root", str(self.machine.root))
        self.daemon = NodeDaemon(
            *flags, directory=directory, env=env, config=config, fake_nvml=str(self.machine.scenario)
        )
        self.daemon.boot_id = self.machine.root / BOOT_ID[1:]

    def start(self) -> None:
        """Start the node, and boot it once."""
        self.daemon.start()
        until((self.directory / "state/repair.json").exists, "the journal is created")
        self.go_down(slurmd=False)
        self.daemon.start()

    def go_down(self, slurmd: bool = True) -> None:
        """Stop everything abruptly, as a machine does that boots."""
        until(lambda: not (self.directory / "run/repair.request").exists(), "healthd-repair has ended")
        self.daemon.kill()
        if slurmd:
            self.cluster.stop_slurmd(self.name, signal.SIGKILL)
        shutil.rmtree(self.directory / "run")
        self.machine.write({BOOT_ID: f"{uuid.uuid4()}\n"})

    def boot(self) -> None:
        """Boot as the RebootProgram would."""
        self.go_down()
        self.daemon.start()
        self.cluster.start_slurmd(self.name, "-b")

    def fail(self, pci: str = PCI) -> None:
        self.daemon.kernel_line(xid_line(119, pci=pci.rpartition(".")[0]))

    def wait_reboot(self, count: int = 1) -> None:
        """Wait until Slurm has run RebootProgram `count` times. A claim that finds no room waits for minutes."""
        until(lambda: self.reboots >= count, f"{self.name} reboots", 900)

    @property
    def state(self) -> Node:
        return self.cluster.node(self.name)

    @property
    def reboots(self) -> int:
        return self.cluster.reboot_count(self.name)

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / "state/events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def stages(self) -> list[str]:
        """Return the stages of the repair in the event stream, without the advice."""
        return [e["stage"] for e in self.events("repair") if e["stage"] not in ("advised", "withdrawn")]

    def wait_stage(self, *stages: str) -> None:
        condition = f"the repair is {' or '.join(stages)}"
        self.daemon.wait_until(lambda _: not set(stages).isdisjoint(self.stages()), condition, 240.0)

    def wait_in_service(self) -> None:
        self.cluster.wait_state(self.name, "IDLE", without=("DRAIN", "DOWN", *PENDING), timeout=240.0)

    def obstacles(self, status: dict[str, Any]) -> set[str]:
        return {obstacle["obstacle"] for obstacle in status["repair"]["obstacles"]}

    def wait_obstacles(self, *names: str) -> None:
        self.daemon.wait_until(lambda status: self.obstacles(status) == set(names), f"obstacles {names}")

    def refuses_jobs(self) -> bool:
        """Return True if the prolog would refuse a job."""
        return self.daemon.verdict().startswith("drain ")

    def reserve(self) -> None:
        """Create the reservation that stops all repairs. It starts in 300 days."""
        at = ("StartTime=now+300days", "Duration=1", "Users=root", f"Nodes={self.name}")
        self.cluster.run("scontrol", "create", "reservation", f"ReservationName={STOP_RESERVATION}", *at)

    def unreserve(self) -> None:
        self.cluster.attempt("scontrol", "delete", f"ReservationName={STOP_RESERVATION}")

    @contextlib.contextmanager
    def held_before_step(self) -> Iterator[None]:
        """Hold healthd-repair after its first look at the node's state: it lists the jobs' processes."""
        hold = self.programs / "hold"
        hold.touch()
        yield
        hold.unlink()

    def wait_until_held(self) -> None:
        until((self.programs / "held").exists, "healthd-repair is about to take the step")

    def journal(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.directory / "state/repair.json").read_text())
        return document
