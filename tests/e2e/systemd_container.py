"""A real systemd for a test: PID 1 of an nspawn container, whatever PID 1 of this machine is.

    with SystemdContainer(kmsg=True) as box:
        box.install_healthd()
        box.systemctl("start", "healthd")
        assert "Started" in box.exec("journalctl", "-u", "healthd").stdout

Boots in about 1 s on a throw-away overlay of a root that is built once (mmdebstrap, 20 to 60 s) and stored in CACHE.
The root has the release of this machine. The interpreter, its environment and this checkout appear in it at their own
paths, read-only: `sys.executable` runs the same code inside and outside, without pip or network.

    with SystemdContainer(fresh="trixie", prepare="apt-get update && apt-get install -y python3-venv") as box:

is a machine without anything installed, not even this checkout. `prepare` runs before it boots, with this machine's
network, certificates and proxies: for apt and pip.

Needs root and the packages systemd-container and mmdebstrap. Everything ends with the test, even if it is killed: the
overlay is mounted in its own mount namespace, and the container ends with the thread that started it.

The container deliberately has its own network (loopback only), read-only /sys and /proc/sys, no udevd and no
systemd-sysctl: those act on the machine (a container's udevd has renamed the network card of its host). /dev/kmsg
is the machine's only kernel log. MemoryMax= and similar settings have no effect if the cgroup controllers are bound
to v1.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from of_this_run import name_with_run
from requirements import require_programs, require_root

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path("/var/cache/healthd-tests")
FRESH = ("systemd", "systemd-sysv", "dbus")
PACKAGES = (*FRESH, "libudev1", "procps", "python3")
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "motd-news.timer",
    "console-getty.service",
    "systemd-timesyncd.service",
    "systemd-modules-load.service",
    "systemd-sysctl.service",
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-kernel.socket",
    "systemd-udevd-control.socket",
)
NSENTER = ("nsenter", "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", "-t")
ENVIRONMENT = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=/root")
BOOT_SECONDS, STOP_SECONDS, EXEC_SECONDS, PREPARE_SECONDS = 180.0, 30.0, 180.0, 600.0
# The machine's access to package archives, as far as a fresh root lacks it.
CERTIFICATES = Path("/usr/local/share/ca-certificates")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL")

OWN_MOUNTS = ("unshare", "--mount", "--propagation=private")
WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")
# Runs in its own mount namespace: the overlay's upper layer in memory, its own cgroups, then nspawn as this process.
START = """\
set -eu
mount -t tmpfs healthd-test "$STATE"
mkdir "$STATE/upper" "$STATE/work" "$STATE/root"
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$STATE/upper,workdir=$STATE/work" "$STATE/root"
for cgroup in $CGROUPS; do echo $$ > "$cgroup/cgroup.procs"; done
set -- --quiet --directory="$STATE/root" --machine="$MACHINE" --register=no --keep-unit --console=pipe \\
    --timezone=off --link-journal=no "$@"
[ -z "$PREPARE" ] || setpriv --pdeathsig TERM systemd-nspawn "$@" $ONLINE --as-pid2 bash -exc "$PREPARE"
exec systemd-nspawn "$@" --boot --private-network --resolv-conf=off
"""


class ContainerError(Exception):
    """A request to the container failed; with the last lines that it printed."""


class SystemdContainer:
    """A container.

    binds      paths that appear inside at the same path, writable
    kmsg       with /dev/kmsg, for journald too
    options    further options of systemd-nspawn
    fresh      a Debian release ("bookworm") with only `packages` installed
    packages   the installed packages (FRESH)
    prepare    commands that bash runs as root before it boots; ContainerError if one fails
    """

    def __init__(
        self,
        *,
        binds: Sequence[Path] = (),
        kmsg: bool = False,
        options: Sequence[str] = (),
        fresh: str = "",
        packages: Sequence[str] = FRESH,
        prepare: str = "",
    ) -> None:
        self._fresh, self._packages, self._prepare = fresh, packages, prepare
        self._options = [] if fresh else [f"--bind-ro={path}" for path in _code_paths()]
        self._options += [f"--bind={path}" for path in binds]
        self._options += ["--bind=/dev/kmsg", "--capability=CAP_SYSLOG"] if kmsg else []
        self._options += options
        self._nspawn: subprocess.Popen[bytes] | None = None
        self.cgroups: list[Path] = []

    def __enter__(self) -> SystemdContainer:
        root = built_root(self._fresh, self._packages) if self._fresh else built_root(_release(), PACKAGES)
        self.directory = Path(tempfile.mkdtemp(prefix="healthd-systemd-"))
        (self.directory / "state").mkdir()
        self.machine = self.directory.name.replace("_", "-").rstrip("-")
        self.cgroups = _create_cgroups(name_with_run(self.machine))
        try:
            self._start(root)
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, root: Path) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "STATE": str(self.directory / "state"),
            "LOWER": str(root),
            "MACHINE": self.machine,
            "CGROUPS": " ".join(map(str, self.cgroups)),
            "PREPARE": self._prepare,
            "ONLINE": " ".join(_network_options()),
            **_proxies(),
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
            "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "no",
        }
        with open(self.directory / "console", "wb") as console:
            self._nspawn = subprocess.Popen(
                [*OWN_MOUNTS, *WITH_PARENT, "sh", "-c", START, "sh", *self._options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def _wait_until_up(self) -> None:
        seconds = BOOT_SECONDS + (PREPARE_SECONDS if self._prepare else 0.0)
        deadline = time.monotonic() + seconds
        state = "no PID 1"
        while time.monotonic() < deadline:
            if self._nspawn is None or self._nspawn.poll() is not None:
                raise ContainerError(f"systemd-nspawn ended:\n{self.console()}")
            if self._leader() is not None:
                state = self.exec("systemctl", "is-system-running", check=False).stdout.strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.05)
        raise ContainerError(f"not up after {seconds:.0f} s ({state}):\n{self.console()}")

    def stop(self) -> None:
        """Power off within a bounded time: processes in D state inside are left to end by themselves."""
        if self._nspawn is not None:
            leader = self._leader()
            if leader is not None:
                _kill(leader, signal.SIGRTMIN + 4)  # poweroff.target
            if not _has_ended_within(self._nspawn, STOP_SECONDS):
                leader = self._leader()
                if leader is not None:
                    _kill(leader, signal.SIGKILL)
                if not _has_ended_within(self._nspawn, 10.0):
                    self._nspawn.kill()
                    _has_ended_within(self._nspawn, 10.0)
            self._nspawn = None
        clean_up(self.directory, self.cgroups)

    def _leader(self) -> int | None:
        """Return the pid of the container's PID 1 in the namespace of this machine."""
        if self._nspawn is None:
            return None
        with contextlib.suppress(OSError):
            pid = self._nspawn.pid
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                for line in Path(f"/proc/{child}/status").read_text().splitlines():
                    if line.startswith("NSpid:") and line.split()[-1] == "1" and len(line.split()) > 2:
                        return int(child)
        return None

    @property
    def leader(self) -> int:
        leader = self._leader()
        if leader is None:
            raise ContainerError(f"the container does not run:\n{self.console()}")
        return leader

    def console(self) -> str:
        """Return the last lines that the container printed."""
        try:
            text = (self.directory / "console").read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-30:])

    def path(self, inside: str) -> Path:
        """Return the path on this machine of the container's file `inside` ("/etc/healthd/healthd.toml")."""
        return Path(f"/proc/{self.leader}/root{inside}")

    def popen(self, *argv: str) -> subprocess.Popen[str]:
        """Start a command inside, with its output on pipes."""
        return subprocess.Popen(
            [*NSENTER, str(self.leader), "env", "-i", *ENVIRONMENT, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def exec(self, *argv: str, check: bool = True, timeout: float = EXEC_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end. Raise ContainerError if it fails (with `check`) or does not end in time."""
        process = self.popen(*argv)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()  # without waiting: it may be in D state
            raise ContainerError(f"{shlex.join(argv)}: no end after {timeout:.0f} s") from None
        if check and process.returncode != 0:
            raise ContainerError(f"{shlex.join(argv)}: exit status {process.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def systemctl(self, *argv: str, check: bool = True, timeout: float = EXEC_SECONDS) -> str:
        return self.exec("systemctl", *argv, check=check, timeout=timeout).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """Return one property of a unit: show("healthd", "MainPID")."""
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def wait_for_property(self, unit: str, name: str, value: str, timeout: float = 120.0) -> None:
        """Wait until a property of a unit has this value."""
        deadline = time.monotonic() + timeout
        while (current := self.show(unit, name)) != value:
            if time.monotonic() > deadline:
                raise ContainerError(
                    f"{unit}: {name} is {current} and not {value} after {timeout:.0f} s\n{self.log(unit)}"
                )
            time.sleep(0.05)

    def status(self, *flags: str) -> dict[str, Any]:
        """Return the status as soon as the daemon answers; each attempt waits up to 5 s."""
        deadline = time.monotonic() + EXEC_SECONDS
        while not (result := self.exec("healthd", "status", "--json", *flags, check=False)).stdout.startswith("{"):
            if time.monotonic() > deadline:
                raise ContainerError(f"healthd status: {result.stdout}{result.stderr}\n{self.log('healthd')[-3000:]}")
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def log(self, unit: str) -> str:
        """Return the journal of a unit, oldest first."""
        self.exec("journalctl", "--sync")  # writes out the latest messages
        return self.exec("journalctl", "--no-pager", "--quiet", "--output=short-precise", f"--unit={unit}").stdout

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def install_unit(self, name: str, text: str) -> None:
        """Install a unit; start it with systemctl."""
        self.write(f"/etc/systemd/system/{name}", text)
        self.systemctl("daemon-reload")

    def install_healthd(self, config: str = "") -> None:
        """Install the project's unit, a /usr/bin/healthd that runs this checkout, and settings. Nothing is started."""
        command = f"PYTHONPATH={shlex.quote(str(CHECKOUT))} exec {shlex.quote(sys.executable)} -m healthd"
        self.write("/usr/bin/healthd", f'#!/bin/sh\n{command} "$@"\n', 0o755)
        self.write("/etc/healthd/healthd.toml", config)
        for unit in ("healthd-evidence.path", "healthd-evidence.service", "healthd.service"):
            self.install_unit(unit, (CHECKOUT / "packaging/systemd" / unit).read_text())


def clean_up(directory: Path, cgroups: Sequence[Path]) -> None:
    """Remove the leftovers of a container that has ended: empty cgroups and its console output."""
    for cgroup in cgroups:
        _remove_cgroup(cgroup)
    shutil.rmtree(directory, ignore_errors=True)


def _code_paths() -> list[Path]:
    """Return the paths of this machine that the interpreter and the checkout need inside."""
    needed = [CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]]
    kept_paths: list[Path] = []
    for path in sorted({candidate for candidate in needed if candidate != Path("/usr")}):
        if not any(path.is_relative_to(other) for other in kept_paths):
            kept_paths.append(path)
    return kept_paths


def built_root(release: str, packages: Sequence[str]) -> Path:
    """Return the root directory of which containers are an overlay. It is built if it is not in the cache."""
    require_root()
    require_programs("systemd-nspawn", "mmdebstrap", packages="systemd-container mmdebstrap")
    key = hashlib.sha256(repr((release, packages, MASKED)).encode()).hexdigest()[:12]
    root = CACHE / f"root-{release}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            _build(root, release, packages)
    return root


def _release() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "VERSION_CODENAME":
            return value.strip('"')
    raise ContainerError("/etc/os-release has no VERSION_CODENAME: the root can be made on Debian and Ubuntu only")


def _build(root: Path, release: str, packages: Sequence[str]) -> None:
    building = root.with_name(root.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
    command += [
        "--dpkgopt=force-unsafe-io",
        "--aptopt=Acquire::Check-Valid-Until false",
        release,
        str(building),
        *_mirror(release),
    ]
    built = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
    if built.returncode != 0:
        raise ContainerError(f"{shlex.join(command)}: exit status {built.returncode}\n{built.stderr[-3000:]}")
    (building / "etc/machine-id").write_text("")
    (building / "etc/hostname").unlink(missing_ok=True)
    for unit in MASKED:
        link = building / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    building.rename(root)


def _mirror(release: str) -> list[str]:
    """Return the archive that this machine installs from; [] leaves the choice to mmdebstrap."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    command += ["Identifier: Packages", f"Release: {release}", "Component: main"]
    try:
        sites = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.split()
    except OSError:
        return []
    return sites[:1]


def _proxies() -> dict[str, str]:
    return {name: os.environ[name] for name in PROXIES if name in os.environ}


def _network_options() -> list[str]:
    """Return systemd-nspawn options that give the container this machine's network access; they contain no space."""
    certificates = [f"--bind-ro={CERTIFICATES}"] if CERTIFICATES.is_dir() else []
    return ["--resolv-conf=copy-host", *certificates, *(f"--setenv={name}" for name in _proxies())]


def _create_cgroups(name: str) -> list[Path]:
    """Create cgroups in each hierarchy that systemd uses, so that the container never changes this machine's own."""
    created = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            cgroup = Path(mount) / name
            cgroup.mkdir()
            created.append(cgroup)
    return created


def _remove_cgroup(cgroup: Path) -> None:
    for _ in range(20):  # the cgroup of an ended process is busy for a moment
        for directory, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        if not cgroup.exists():
            return
        time.sleep(0.05)


def _has_ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
