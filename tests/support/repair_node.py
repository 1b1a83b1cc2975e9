"""A made-up node for the executor of repair steps: fake nvidia-smi, systemctl and Slurm commands in a folder on PATH.

The programs keep their state in files, so that a reset changes what nvidia-smi shows, and so that a killed executor
leaves behind what a real one would.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from slurm_text import NOW, columns

from healthd.agent.evidence import programs
from healthd.agent.repair import executor, reset_step, services
from healthd.agent.repair.executor import serve_requests
from healthd.agent.repair.journal import JOURNAL_FILE, NAME, Entry, Journal, Request, parse_journal
from healthd.agent.repair.journal_file import write_journal
from healthd.agent.settings.config import RepairConfig
from healthd.common.model import Gpu, RepairMode, RepairStep
from healthd.common.slurm import commands
from healthd.common.slurm.commands import column_format
from healthd.common.values import encode
from healthd.host import program
from healthd.host.separate_program import request_file

FIRST, SECOND = "0000:1b:00.0", "0000:c1:00.0"
REASON = "healthd: gpu_xid/119 0000:1b:00.0: a GPU's processor does not respond (repair: gpu_reset)"
CAUSE = "gpu_xid/119 0000:1b:00.0"
ID, LATER = "20261129T060000Z-gpu_reset", "20261129T070000Z-gpu_reset"
PERSISTENCED, DCGM = "nvidia-persistenced.service", "nvidia-dcgm.service"
IDLE = "idle+drain"
MACHINE = "0c7d3ae0b6d24c6fb7c6b8f1d6a1e5a3"
BOOT_ID = "6e3c1f60-8d0e-4b60-9d2b-5f1f0c3c2a11"

# Modes in the file smi.mode: ok, fails, hangs, no_effect, kills (another GPU), in_use, in_use_once, partly (the first
# GPU is reset, and the second is in use), lost, kills_parent.
NVIDIA_SMI = """
mode=$(cat smi.mode)
gpu() { # ADDRESS ACTION ERRORS
  echo "<gpu id=\\"$1\\"><product_architecture>Hopper</product_architecture>"
  echo "<persistence_mode>$(cat smi.persistence 2>/dev/null)</persistence_mode>"
  echo "<gpu_recovery_action>$2</gpu_recovery_action>"
  echo "<ecc_errors><volatile><dram_uncorrectable>$3</dram_uncorrectable></volatile></ecc_errors></gpu>"
}
if [ "$1" = -q ]; then
  echo "<nvidia_smi_log>"
  if [ -e smi.is_reset ] && [ "$mode" != no_effect ]; then gpu 00000000:1B:00.0 None 0
  elif [ "$mode" != lost ]; then gpu 00000000:1B:00.0 Reset 2; fi
  if ! [ -e smi.is_reset ] || [ "$mode" != kills ]; then gpu 00000000:C1:00.0 None 0; fi
  echo "</nvidia_smi_log>"
  exit 0
fi
echo "$*" >>smi.log
if [ "$1" = -pm ]; then
  [ "$2" = 1 ] && echo Enabled >smi.persistence || echo Disabled >smi.persistence
  exit 0
fi
echo "$*" >>smi.resets
[ "$(cat smi.persistence 2>/dev/null)" != Enabled ] || mode=in_use
running=$(cat *.service 2>/dev/null | sort -u)
[ "$running" = inactive ] || echo "services run: $running" >>violations
case $mode in
  fails) echo "GPU 00000000:1B:00.0: Unknown Error"; exit 255 ;;
  hangs) exec sleep 600 ;;
  in_use) echo "  GPU 00000000:1B:00.0: In use by another client" >&2; exit 255 ;;
  partly)
    touch smi.is_reset
    echo "GPU 00000000:1B:00.0 was successfully reset."
    echo "The following GPUs could not be reset:"
    echo "  GPU 00000000:C1:00.0: In use by another client"
    exit 255 ;;
  in_use_once) echo ok >smi.mode; echo "  GPU 00000000:1B:00.0: In use by another client" >&2; exit 255 ;;
esac
touch smi.is_reset
[ "$mode" != kills_parent ] || kill -9 $PPID
echo "GPU 00000000:1B:00.0 was successfully reset."
echo "All done."
"""
SYSTEMCTL = """
verb=$1; shift
case $verb in
  is-system-running) echo running ;;
  show)
    for unit; do :; done
    echo "Id=$unit"
    echo "ActiveState=$(cat "$unit" 2>/dev/null || echo inactive)"
    echo "Type=$(cat "$unit.type" 2>/dev/null || echo simple)"
    echo "RequiredBy=$(cat "$unit.required_by" 2>/dev/null)"
    for kind in RequisiteOf BoundBy ConsistsOf PropagatesStopTo RequiredBy; do
      if [ -e "$unit.$kind" ]; then echo "$kind=$(cat "$unit.$kind")"; fi
    done ;;
  stop | start)
    if [ -e "systemctl.$verb.fails" ]; then echo "Job for x failed." >&2; exit 1; fi
    state=active; [ "$verb" = start ] || state=inactive
    shift
    for unit; do
      echo "$state" >"$unit"; echo "$verb $unit" >>systemctl.log
      if [ "$verb" = start ] && [ -e "$unit.after_start" ]; then cp "$unit.after_start" "$unit"; fi
    done ;;
esac
"""
SCONTROL = """
if [ -e scontrol.away ]; then echo "slurm_load_reservations error: Unable to contact slurm controller" >&2; exit 1; fi
case "$*" in
  *"show reservation"*) cat reservations ;;
  *"show config"*) cat config.out ;;
  reboot*) echo "$*" >>reboots ;;
  *listpids*) cat listpids.out; cat listpids.err >&2; if [ -s listpids.err ]; then exit 1; fi ;;
  *) echo "$*" >>violations; exit 1 ;;
esac
"""
SLURM_CONFIG = """\
RebootProgram           = /sbin/reboot
ReturnToService         = 0
SLURM_VERSION           = 24.11.5
"""
SINFO = f"""
case "$*" in
  *{column_format(commands.CLAIM_COLUMNS)}*) cat claims.out ;;
  *{column_format(commands.FLEET_COLUMNS)}*) cat fleet.out ;;
  *{column_format(commands.NODE_COLUMNS)}*) cat sinfo.out ;;
  *) cat names.out ;;
esac
"""
BUSCTL = """echo '{"type":"a(ssssuu)","data":[[]]}'"""


def made_node(state: str, reason: str) -> bytes:
    """Return sinfo's answer for the node."""
    return columns(("gpu", "1", state, f"{NOW:.0f}", "root(0)", reason, "(null)"), commands.NODE_COLUMNS)


def made_fleet(*groups: tuple[str, int]) -> bytes:
    """Return sinfo's answer for the nodes of the partition, which have these states."""
    rows = (columns(("gpu", state, "0", "none", str(number)), commands.FLEET_COLUMNS) for state, number in groups)
    return b"".join(rows)


def made_request(state_dir: str, root: str) -> Request:
    """Return the daemon's request for a reset of the first GPU."""
    return Request(
        ID,
        state_dir,
        node="n1",
        boot_id=BOOT_ID,
        step=RepairStep.GPU_RESET,
        reason=REASON,
        causes=(CAUSE,),
        parts=(FIRST,),
        gpus=(Gpu(FIRST, 0), Gpu(SECOND, 1)),
        requested_at=time.time(),
        root=root,
        settings=RepairConfig(
            mode=RepairMode.ACT,
            stop_services=(PERSISTENCED, DCGM, "dcgm-exporter"),
            reset_timeout_seconds=60.0,
        ),
    )


class RepairNode:
    """The node. Its programs run in `state`, where their files are.

    The settings stop nvidia-persistenced and nvidia-dcgm, which both run.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.root = folder / "fakes", folder / "root"
        self.runtime_dir, self.state_dir = folder / "run", folder / "state"
        for path in (self.state, self.root / "run/systemd/system", self.root / "proc/1/fd", self.runtime_dir):
            path.mkdir(parents=True)
        self.state_dir.mkdir()
        (self.root / "proc/locks").write_text("")
        (self.root / "etc").mkdir()
        (self.root / "etc/machine-id").write_text(f"{MACHINE}\n")
        (self.root / "proc/sys/kernel/random").mkdir(parents=True)
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{BOOT_ID}\n")
        for name, text in {"stat": "1 (init) S 0", "comm": "init\n", "cmdline": "init", "cgroup": "0::/\n"}.items():
            (self.root / "proc/1" / name).write_text(text)
        self._write_programs(folder / "bin", monkeypatch)
        for name in (PERSISTENCED, DCGM):
            self.write(name, "active\n")
        self.write("smi.mode", "ok\n")
        self.write("reservations", "No reservations in the system\n")
        self.write("listpids.out", "")
        self.write("listpids.err", "No job steps exist on this node.\n")
        self.write("squeue.out", "")
        self.write("config.out", SLURM_CONFIG)
        self.set_node(IDLE, REASON)
        self.set_fleet(("idle+drain", 1), ("mixed", 3))
        self.set_claims()
        write_journal(self.made_journal(), str(self.state_dir))

    def _write_programs(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        texts = {"nvidia-smi": NVIDIA_SMI, "systemctl": SYSTEMCTL, "scontrol": SCONTROL, "busctl": BUSCTL}
        texts |= {"sinfo": SINFO, "squeue": "cat squeue.out"}
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/sh\ncd {self.state}\n{text}")
            (folder / name).chmod(0o755)
        assert programs.ENVIRONMENT is program.ENVIRONMENT
        monkeypatch.setitem(program.ENVIRONMENT, "PATH", f"{folder}:{program.ENVIRONMENT['PATH']}")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(self, name: str, text: str) -> None:
        (self.state / name).write_text(text)

    def read(self, name: str) -> str:
        path = self.state / name
        return path.read_text() if path.exists() else ""

    def set_node(self, state: str, reason: str) -> None:
        """Set the node's state and Reason in Slurm."""
        (self.state / "sinfo.out").write_bytes(made_node(state, reason))

    def set_fleet(self, *groups: tuple[str, int]) -> None:
        """Set the states of the partition's nodes, and the names of all nodes."""
        (self.state / "fleet.out").write_bytes(made_fleet(*groups))
        names = (f"n{number}" for number in range(1, sum(number for _, number in groups) + 1))
        (self.state / "names.out").write_bytes(b"".join(columns((name,), commands.NAME_COLUMNS) for name in names))

    def set_claims(self, *others: tuple[str, float], reason: str = REASON) -> None:
        """Set the other nodes that claim a repair, when they did, and their Reason."""
        rows = (("n1", NOW, REASON), *((name, at, reason) for name, at in others))
        texts = (columns((name, IDLE, f"{at:.0f}", text), commands.CLAIM_COLUMNS) for name, at, text in rows)
        (self.state / "claims.out").write_bytes(b"".join(texts))

    def request(self, **changes: object) -> Request:
        return replace(made_request(str(self.state_dir), str(self.root)), **changes)

    @property
    def resets(self) -> int:
        """Number of resets that nvidia-smi began."""
        return len(self.read("smi.resets").splitlines())

    @property
    def reboots(self) -> int:
        """Number of reboots that Slurm accepted."""
        return len(self.read("reboots").splitlines())

    @property
    def services_run(self) -> bool:
        return self.read(PERSISTENCED) == self.read(DCGM) == "active\n"

    def made_journal(self, first_boot: str = "an-earlier-boot", *entries: Entry, **fields: Any) -> Journal:
        """Return a journal of this node."""
        return Journal(first_boot, entries, **{"node": "n1", "machine": f"machine-id {MACHINE}", **fields})

    def journal(self, is_copy: bool = False) -> Journal:
        """Return the journal, or the daemon's copy."""
        folder = self.runtime_dir if is_copy else self.state_dir
        return parse_journal((folder / JOURNAL_FILE).read_text())


def put_request(node: RepairNode, **changes: object) -> None:
    Path(request_file(str(node.runtime_dir), NAME)).write_bytes(encode(node.request(**changes)))


def serve(node: RepairNode) -> None:
    serve_requests(str(node.runtime_dir))


def killed_at(node: RepairNode, point: int, is_fine: bool = False) -> bool:
    """Serve the request in a child process that is killed at its n-th point. Return False if it ended before.

    Points are before and after each write of the journal and each command of the step. With `is_fine`, they are also
    around each sync, each rename and each reading of Slurm.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _add_points(node, point, is_fine)
            serve(node)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return _was_killed(pid)


def killed_after(node: RepairNode, seconds: float) -> bool:
    """Serve the request in a child process that is killed after this time. Return False if it ended before."""
    pid = os.fork()
    if pid == 0:
        try:
            _add_points(node, -1, is_fine=False)
            serve(node)
        except BaseException:
            os._exit(1)
        os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return _was_killed(pid)


def _was_killed(pid: int) -> bool:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def _add_points(node: RepairNode, point: int, is_fine: bool) -> None:
    """Make this process kill itself at its n-th point.

    The file "durable.json" has the journal after its last complete write: it survives a power loss.
    """
    reached = 0

    def passed() -> None:
        nonlocal reached
        reached += 1
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **names: Any) -> Any:
            passed()
            result = function(*arguments, **names)
            passed()
            return result

        return call

    write_journal = executor.write_journal

    def write(journal: Journal, state_dir: str) -> None:
        write_journal(journal, state_dir)
        (node.state / "durable.json").write_bytes((node.state_dir / JOURNAL_FILE).read_bytes())

    executor.write_journal = wrapped(write)
    executor.publish = wrapped(executor.publish)
    executor.run_command = wrapped(executor.run_command)
    services.stop, services.start = wrapped(services.stop), wrapped(services.start)
    reset_step.Smi._run = wrapped(reset_step.Smi._run)  # type: ignore[method-assign]
    reset_step.wait_for_release = wrapped(reset_step.wait_for_release)
    if is_fine:
        os.fsync, os.replace = wrapped(os.fsync), wrapped(os.replace)
        executor.cluster_problem = wrapped(executor.cluster_problem)
        executor.own_problem = wrapped(executor.own_problem)
