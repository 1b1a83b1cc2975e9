"""A real Slurm on this machine for a test: munged, slurmctld and N slurmds with fake GPUs, on loopback.

    with SlurmCluster(nodes=2) as cluster:
        job = cluster.sbatch("sleep 60", "-w", "n1")
        cluster.wait_job(job, "RUNNING")
        cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
        assert "DRAIN" in cluster.node("n1").flags

Needs root and the packages slurmctld, slurmd, slurm-client, munge; starts in about 1 s. Clusters can run in parallel.
Every process that it starts has a mark in its environment, including jobs. A slurmstepd overwrites its environment with
its title, but has its log open in the cluster's directory. At the end exactly these processes are killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import slurm_accounting
import slurm_versions
from ports import free_ports
from requirements import require_programs, require_root

CLUSTER_VARIABLE = "HEALTHD_TEST_CLUSTER"
NODE_VARIABLE = "HEALTHD_TEST_NODE"
WAIT_SECONDS = 120.0  # for events that happen at once on an idle machine; tests of a timeout pass their own

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
{backup}SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/munge.sock,cred_expire=30
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdParameters=config_overrides
# nothing that needs cgroups, PMIx or systemd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
# short, where a test would wait for it and no stall of a busy machine is a fault by it
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=0
ReturnToService=0
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=10
MessageTimeout={message_timeout}
KillWait=2
InactiveLimit=0
MinJobAge=300
JobRequeue=1
GresTypes=gpu
"""
NODE_LINE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 Boards=1 Sockets=1 "
    "CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:h100:{gpus} State=UNKNOWN\n"
)
PARTITION_LINE = "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP\n"
SHORT_TIMEOUT = "MessageTimeout=3\n"
# Up to 24.11, slurmd runs it with its own environment; 26.05 sets only SLURM_NODE_NAME.
REBOOT_PROGRAM = f"""\
#!/bin/sh
echo rebooted >> "{{directory}}/reboots/${{{{{NODE_VARIABLE}:-$SLURM_NODE_NAME}}}}"
"""
BACKUP_HOST = "standby"
# Each slurmctld listens at its own address, so both can use the same port.
BACKUP = f"SlurmctldHost={BACKUP_HOST}(127.0.0.2)\nCommunicationParameters=NoCtldInAddrAny\n"


@dataclass(frozen=True, slots=True)
class Node:
    """A node as `scontrol show node` prints it; `flags` is State split at "+"."""

    flags: frozenset[str]
    reason: str
    user: str
    reason_time: str


class SlurmCluster:
    """Nodes are n1, n2, ...; `env` is the environment in which Slurm's commands reach this cluster.

    directory    created in the run's folder by default, and removed at the end (a socket's path has at most 107
                 characters)
    extra_conf   lines for slurm.conf; a line that repeats a key above overrides it
    version      a Slurm of slurm_versions.py ("24.11"); "" is the installed one; None the one of HEALTHD_TEST_SLURM, or
                 the installed one
    accounting   with a slurmdbd of the same version, for sacct and sacctmgr
    backup       with a second slurmctld; each has its own UTS namespace, because a slurmctld finds its SlurmctldHost
                 line by the hostname
    reboots      with a RebootProgram that only records its runs: wait for one with `wait_reboot`, then let the node
                 come back with `boot`
    """

    def __init__(
        self,
        directory: Path | None = None,
        nodes: int = 3,
        gpus: int = 8,
        base_port: int | None = None,
        slurmd_timeout: int = 300,  # for a node that does not answer; long enough for a busy machine
        message_timeout: int = 20,  # the same for a daemon
        extra_conf: Sequence[str] = (),
        version: str | None = None,
        accounting: bool = False,
        backup: bool = False,
        reboots: bool = False,
    ) -> None:
        self.names = [f"n{i}" for i in range(1, nodes + 1)]
        self.gpus = gpus
        self.slurmd_timeout = slurmd_timeout
        self.message_timeout = message_timeout
        self.extra_conf = tuple(extra_conf)
        self.version = os.environ.get("HEALTHD_TEST_SLURM", "") if version is None else version
        self.base_port = base_port
        self.accounting = accounting
        self.backup = backup
        self.reboots = reboots
        self._wanted_directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = contextlib.ExitStack()

    def __enter__(self) -> SlurmCluster:
        require_root()
        require_programs("munged", "slurmctld", "slurmd", "scontrol", packages="slurmctld slurmd slurm-client munge")
        self.directory = self._wanted_directory or Path(tempfile.mkdtemp(prefix="slurm."))
        self.directory.chmod(0o755)  # other users' commands read slurm.conf and munge's socket
        self.env = os.environ | {"SLURM_CONF": f"{self.directory}/slurm.conf", CLUSTER_VARIABLE: str(self.directory)}
        self._programs = slurm_versions.programs(self.version) if self.version else None
        if self._programs:
            self.env["PATH"] = f"{self._programs}:{self.env['PATH']}"
        try:
            self._write_files()
            self._start_munged()
            if self.accounting:
                self._start_accounting()
            self.start_slurmctld(wait=False)
            if self.backup:
                self.start_backup()
            for name in self.names:
                self.start_slurmd(name)
            self._until(self._is_ready, "slurmctld and slurmds are up", WAIT_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def short_timeout_environment(self) -> dict[str, str]:
        """Return the environment of a command that does not wait long for a slurmctld that is down or hangs."""
        conf = self.directory / "giving_up.conf"
        conf.write_text((self.directory / "slurm.conf").read_text() + SHORT_TIMEOUT)
        return {"SLURM_CONF": str(conf)}

    # commands

    def run(self, *argv: str, timeout: float = WAIT_SECONDS, check: bool = True) -> str:
        """Return the output of a command. A failure raises RuntimeError with its stderr."""
        result = self.attempt(*argv, timeout=timeout)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(argv)}: status {result.returncode}: {result.stderr.strip()}")
        return result.stdout

    def attempt(self, *argv: str, timeout: float = WAIT_SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.env, capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=timeout
        )

    def sbatch(self, script: str, *options: str) -> str:
        """Submit the shell commands `script` as a batch job and return its id."""
        output = () if any(option.startswith(("-o", "--output")) for option in options) else ("--output=/dev/null",)
        command = ("sbatch", "--parsable", "--chdir=/tmp", *output, *options, "--wrap", script)
        return self.run(*command).strip().partition(";")[0]

    def node(self, name: str) -> Node:
        text = self.run("scontrol", "show", "node", "-o", name)
        state = re.search(r"\bState=(\S+)", text)
        reason = re.search(r" Reason=(.*) \[(\S+)@(\S+)\]", text, re.DOTALL)
        assert state, text
        return Node(frozenset(state[1].split("+")), *(reason.groups() if reason else ("", "", "")))

    def wait_state(
        self,
        name: str,
        *flags: str,
        without: Sequence[str] = (),
        reason: str | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> Node:
        """Wait until the node has all of `flags`, none of `without`, and a Reason that starts with `reason`."""
        seen: list[Node] = []

        def is_reached() -> bool:
            node = self.node(name)
            seen[:] = [node]
            has_flags = node.flags.issuperset(flags) and node.flags.isdisjoint(without)
            return has_flags and (reason is None or node.reason.startswith(reason))

        with contextlib.suppress(TimeoutError):
            self._until(is_reached, "", timeout)
            return seen[0]
        raise TimeoutError(f"{name} not {'+'.join(flags)} after {timeout} s but {seen}")

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job` (JobState, Restarts, BatchFlag, ...)."""
        text = self.run("scontrol", "show", "job", "-o", job)
        return dict(re.findall(r"(?:^| )([A-Za-z/:]+)=(\S*)", text))

    def admin_comment(self, job: str) -> str:
        comment = self.run("squeue", "-h", "-t", "all", "-j", job, "-O", "admin_comment:1000").strip()
        return "" if comment == "(null)" else comment

    def wait_job(self, job: str, *states: str, timeout: float = WAIT_SECONDS) -> dict[str, str]:
        self._until(lambda: self.job(job)["JobState"] in states, f"job {job} is {' or '.join(states)}", timeout)
        return self.job(job)

    def wait_until_saved(self, job: str) -> None:
        """Wait until slurmctld has saved the job, which it does at most every 5 s."""
        mark, file = uuid.uuid4().hex, self.directory / "state/job_state"
        self.run("scontrol", "update", f"JobId={job}", f"Comment={mark}")
        self._until(lambda: file.exists() and mark.encode() in file.read_bytes(), f"job {job} is saved", WAIT_SECONDS)

    def sdiag_counts(self) -> dict[str, int]:
        """Return how many RPCs of each type slurmctld has served: {"REQUEST_NODE_INFO": 12}.

        sdiag itself adds one REQUEST_STATS_INFO.
        """
        by_type = self.run("sdiag").partition("by message type")[2].partition("by user")[0]
        return {name: int(count) for name, count in re.findall(r"(\w+)\s*\(\s*\d+\)\s*count:(\d+)", by_type)}

    # daemons

    def start_slurmctld(self, wait: bool = True) -> None:
        self._launch("slurmctld", *self._as_host(socket.gethostname().partition(".")[0]), "slurmctld", "-D")
        if wait:
            self._until(self._controller_responds, "slurmctld is up", WAIT_SECONDS)

    def start_backup(self) -> None:
        """Start the second slurmctld, which takes over SlurmctldTimeout (10 s) after the first one ended."""
        conf = self.directory / "backup.conf"
        replacements = ("slurmctld.pid", "backup.pid"), ("slurmctld.log", "backup.log")
        text = (self.directory / "slurm.conf").read_text()
        for old, new in replacements:
            text = text.replace(old, new)
        conf.write_text(text)
        self._launch("backup", *self._as_host(BACKUP_HOST), "slurmctld", "-D", "-f", str(conf))

    def _as_host(self, name: str) -> tuple[str, ...]:
        """Return the command that runs a slurmctld as this host, which with NoCtldInAddrAny listens at its address."""
        if not self.backup:
            return ()
        hosts = self.directory / "hosts"
        own_name = socket.gethostname().partition(".")[0]
        hosts.write_text(f"127.0.0.1 localhost {own_name}\n127.0.0.2 {BACKUP_HOST}\n")
        script = f'mount --bind {hosts} /etc/hosts && hostname "$0" && exec "$@"'
        return ("unshare", "--uts", "--mount", "sh", "-c", script, name)

    def kill_backup(self, signal_number: int = signal.SIGKILL) -> None:
        self._stop("backup", signal_number)

    def upgrade_slurmctld(self, version: str) -> None:
        """Replace slurmctld with this version, with the same state. Commands and slurmds keep their version."""
        self.kill_slurmctld(signal.SIGTERM)
        newer, conf = slurm_versions.programs(version), self.directory / "upgraded.conf"
        conf.write_text((self.directory / "slurm.conf").read_text() + f"PluginDir={newer}/plugins\n")
        self._launch("slurmctld", f"{newer}/slurmctld", "-D", "-f", str(conf))
        self._until(self._controller_responds, "the newer slurmctld is up", WAIT_SECONDS)

    def kill_slurmctld(self, signal_number: int = signal.SIGKILL) -> None:
        self._stop("slurmctld", signal_number)

    def signal_slurmctld(self, signal_number: int) -> None:
        """Send a signal to slurmctld: SIGSTOP and SIGCONT simulate a controller that hangs."""
        self._processes["slurmctld"].send_signal(signal_number)

    def start_slurmd(self, name: str, *options: str) -> None:
        """Start a slurmd. `-b` reports that the node has just booted."""
        stepd = ("-d", f"{self._programs}/slurmstepd") if self._programs else ()
        self._launch(f"slurmd.{name}", "slurmd", "-D", "-N", name, *stepd, *options, environment={NODE_VARIABLE: name})

    def reboot_count(self, name: str) -> int:
        """Return how often the node's slurmd has run RebootProgram."""
        file = self.directory / "reboots" / name
        return len(file.read_text().splitlines()) if file.exists() else 0

    def wait_reboot(self, name: str, count: int = 1) -> None:
        """Wait until the node's slurmd has run RebootProgram `count` times."""
        self._until(lambda: self.reboot_count(name) >= count, f"{name} ran RebootProgram", WAIT_SECONDS)

    def boot(self, name: str) -> None:
        """End the node's slurmd, if it runs, and start it again as after a boot.

        slurmctld compares the time of the boot with that of the last answer in whole seconds.
        """
        if f"slurmd.{name}" in self._processes:
            self.stop_slurmd(name, signal.SIGKILL)
            time.sleep(2)
        self.start_slurmd(name, "-b")

    def stop_slurmd(self, name: str, signal_number: int = signal.SIGTERM) -> None:
        self._stop(f"slurmd.{name}", signal_number)

    def reset_node(self, name: str) -> None:
        """Make a node idle from any state: its jobs end, and its slurmd is restarted."""
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=mended")
        if f"slurmd.{name}" in self._processes:
            self.stop_slurmd(name, signal.SIGKILL)
        self.start_slurmd(name)
        self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        self.wait_state(name, "IDLE", without=("DRAIN", "COMPLETING", "NOT_RESPONDING"))

    def kill_slurmstepd(self, job: str) -> None:
        """Kill the slurmstepd of a batch job, whose processes continue to run."""
        name = f"slurmstepd: [{job}.batch]".encode()

        def found() -> list[Process]:
            matches = []
            for process in processes():
                with contextlib.suppress(OSError):
                    if name in Path(f"/proc/{process.pid}/cmdline").read_bytes() and self._is_own(process):
                        matches.append(process)
            return matches

        killed = found()
        for process in killed:
            kill(process)
        self._until(lambda: not found(), f"the slurmstepd of job {job} is gone", WAIT_SECONDS)
        assert killed, f"job {job} has no slurmstepd"

    def remove_dead_slurmstepd(self, job: str) -> None:
        """Remove the files of a killed slurmstepd: its socket, on which others wait, and the script, which blocks a
        rerun."""
        for file in self.directory.rglob(f"*_{job}.*"):
            if file.is_socket():
                file.unlink()
        for script in self.directory.glob(f"spool/*/job{int(job):05}"):
            shutil.rmtree(script)

    def kill_munged(self) -> None:
        self._stop("munged", signal.SIGKILL)

    def start_munged(self) -> None:
        self._start_munged()

    def release(self) -> tuple[int, int]:
        """Return the release of this Slurm: (22, 5) for 22.05.8."""
        text = self.run("slurmctld", "-V")
        found = re.search(r"(\d+)\.(\d+)", text)
        assert found, text
        return int(found[1]), int(found[2])

    def log(self, daemon: str) -> str:
        """Return the log of "slurmctld" or "slurmd.n1"."""
        return (self.directory / "log" / f"{daemon}.log").read_text(errors="replace")

    # internals

    def _write_files(self) -> None:
        directory, host = self.directory, socket.gethostname().partition(".")[0]
        first = self.base_port or free_ports(len(self.names) + 3, self._ports)
        self._accounting_port = first + len(self.names) + 1
        for folder in ("munge", "state", "spool", "log", "dev"):
            (directory / folder).mkdir(mode=0o755, parents=True)
        conf = SLURM_CONF.format(
            host=host,
            port=first,
            backup=BACKUP if self.backup else "",
            directory=directory,
            slurmd_timeout=self.slurmd_timeout,
            message_timeout=self.message_timeout,
        )
        gres = "AutoDetect=off\n"
        for number, name in enumerate(self.names, 1):
            conf += NODE_LINE.format(name=name, host=host, port=first + number, gpus=self.gpus)
            if self.gpus:
                (directory / "spool" / name).mkdir()
                gres += f"NodeName={name} Name=gpu Type=h100 File={directory}/dev/{name}/nvidia[0-{self.gpus - 1}]\n"
                for index in range(self.gpus):  # 195 is NVIDIA's major number
                    device = directory / "dev" / name / f"nvidia{index}"
                    device.parent.mkdir(exist_ok=True)
                    os.mknod(device, 0o666 | 0o020000, os.makedev(195, index))
        if self.accounting:
            conf = conf.replace("AccountingStorageType=accounting_storage/none\n", "")
            conf += slurm_accounting.SLURM_CONF.format(directory=directory, port=self._accounting_port)
            plugins = self._programs / "plugins" if self._programs else None
            slurm_accounting.write_slurmdbd_conf(directory, self._accounting_port, plugins)
        if self.reboots:
            conf += f"RebootProgram={self._write_reboot_program()}\n"
        if self._programs:
            conf += f"PluginDir={self._programs}/plugins\n"
        (directory / "slurm.conf").write_text(conf + PARTITION_LINE + "".join(f"{line}\n" for line in self.extra_conf))
        (directory / "gres.conf").write_text(gres)
        if self.release() >= (23, 11):
            (directory / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        key = directory / "munge" / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _write_reboot_program(self) -> Path:
        """Write a RebootProgram that records the name of the node on which it runs."""
        (self.directory / "reboots").mkdir()
        program = self.directory / "reboot"
        program.write_text(REBOOT_PROGRAM.format(directory=self.directory))
        program.chmod(0o755)
        return program

    def _start_munged(self) -> None:
        munge_dir = f"{self.directory}/munge"
        for name in ("munge.sock", "munge.sock.lock"):
            Path(munge_dir, name).unlink(missing_ok=True)
        self._launch(
            "munged",
            *("munged", "--foreground", f"--socket={munge_dir}/munge.sock", f"--key-file={munge_dir}/munge.key"),
            *(
                f"--log-file={munge_dir}/munged.log",
                f"--pid-file={munge_dir}/munged.pid",
                f"--seed-file={munge_dir}/munged.seed",
            ),
        )
        test_command = ("munge", "-S", f"{munge_dir}/munge.sock", "-n")
        self._until(lambda: self.attempt(*test_command).returncode == 0, "munged is up", WAIT_SECONDS)

    def _start_accounting(self) -> None:
        require_programs(*slurm_accounting.PROGRAMS, packages=slurm_accounting.PACKAGES)
        slurm_accounting.make_database(self.directory)
        self._launch("mariadbd", *slurm_accounting.mariadbd_command(self.directory, self._accounting_port))
        client = ("mariadb", "--no-defaults", "-uroot", f"--socket={self.directory}/database/s", "-e")
        self._until(
            lambda: self.attempt(*client, "CREATE DATABASE slurm_acct").returncode == 0, "MariaDB is up", WAIT_SECONDS
        )
        self._launch("slurmdbd", "slurmdbd", "-D")
        cluster = ("sacctmgr", "-i", "-Q", "add", "cluster", "test")
        self._until(lambda: self.attempt(*cluster).returncode == 0, "slurmdbd is up", WAIT_SECONDS)

    def _controller_responds(self) -> bool:
        return self.attempt("scontrol", "ping").returncode == 0

    def _is_ready(self) -> bool:
        if not self._controller_responds():
            return False
        states = self.run("sinfo", "-hN", "-p", "gpu", "-n", ",".join(self.names), "-o", "%T", check=False).split()
        return len(states) == len(self.names) and all(state == "idle" for state in states)

    def _launch(self, name: str, *argv: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        assert name not in self._processes, f"{name} runs already"
        with open(self.directory / "log" / f"{name}.out", "ab") as out:
            self._processes[name] = subprocess.Popen(
                argv,
                env=self.env | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                start_new_session=True,
            )

    def _stop(self, name: str, signal_number: int) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal_number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)

    def _until(self, is_reached: Callable[[], bool], condition: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_reached():
            for name, process in list(self._processes.items()):
                if process.poll() is not None:
                    out = (self.directory / "log" / f"{name}.out").read_text(errors="replace")
                    raise RuntimeError(f"{name} ended with status {process.returncode}: {out[-2000:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"not after {seconds} s: {condition}")
            time.sleep(0.05)

    def _end(self) -> None:
        for name in list(self._processes):
            with contextlib.suppress(OSError):
                self._stop(name, signal.SIGKILL)
        end = time.monotonic() + WAIT_SECONDS
        while remaining := self._remaining_processes():
            for process in remaining:
                kill(process)
            if time.monotonic() > end:
                raise RuntimeError(f"still there after SIGKILL: processes {remaining} of {self.directory}")
            time.sleep(0.05)
        for mount in reversed(mounts_below(self.directory)):
            subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(self.directory)
        self._ports.close()

    def _remaining_processes(self) -> set[Process]:
        """Return the processes that this cluster started and their descendants, without zombies."""
        alive = {process.pid: process for process in processes()}
        own_pids = {pid for pid, process in alive.items() if self._is_own(process)}
        while descendants := {pid for pid, process in alive.items() if process.parent in own_pids} - own_pids:
            own_pids |= descendants
        return {alive[pid] for pid in own_pids - {os.getpid()}}

    def _is_own(self, process: Process) -> bool:
        return has_cluster_mark(process.pid, self.directory) or is_slurm_program_of(process.pid, self.directory)


@dataclass(frozen=True, slots=True)
class Process:
    """A process. `started` (ticks since boot) distinguishes it from a later one with the same pid."""

    pid: int
    parent: int
    started: int


def processes() -> Iterator[Process]:
    """Yield all living processes."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := process_of(int(entry))):
            yield process


def process_of(pid: int) -> Process | None:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()  # from field 3 on
        if fields[0] != "Z":
            return Process(pid, int(fields[1]), int(fields[19]))
    return None


def has_cluster_mark(pid: int, directory: Path) -> bool:
    try:
        return f"{CLUSTER_VARIABLE}={directory}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def is_slurm_program_of(pid: int, directory: Path) -> bool:
    """Return True if it is a program of Slurm that has a file below `directory` open."""
    try:
        if not Path(f"/proc/{pid}/comm").read_text(errors="replace").startswith("slurm"):
            return False
        files = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{file}").startswith(f"{directory}/"):
                return True
    return False


def kill(process: Process) -> None:
    """Send SIGKILL through a descriptor that is opened before the check, so that a reused pid is never hit."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(process.pid)
        try:
            current = process_of(process.pid)
            if current is not None and current.started == process.started:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def mounts_below(directory: Path) -> list[str]:
    lines = Path("/proc/mounts").read_text().splitlines()
    return [target for line in lines if (target := line.split()[1]).startswith(f"{directory}/")]


def start_job(cluster: SlurmCluster, node: str, *options: str) -> str:
    """Start a job on the node and return its id."""
    job = cluster.sbatch("sleep 3000", "-w", node, *options)
    cluster.wait_job(job, "RUNNING")
    time.sleep(1)  # Slurm's times are whole seconds; the job must start before later events
    return job
