"""Tests of the daemon on this node: its process, memory use, status, metrics page and files."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import healthd
from healthd.agent.conditions.impairments import needs_kernel_log
from healthd.agent.doctor.result import Line, State, absent_line, failed_line, limited_line, ok_line
from healthd.agent.kernel_log.open_source import open_source
from healthd.agent.settings.config import Loaded, Settings, listen_addresses
from healthd.agent.settings.limits import KERNEL_LOGS
from healthd.common import ownership
from healthd.common.duration import duration
from healthd.common.page import ago
from healthd.host.host import Host
from healthd.host.program import run_program

if TYPE_CHECKING:
    import psutil

UNIT = "healthd.service"
HOOKS_UNIT = "healthd-hooks.path"
SYSTEMD_DIR = "/run/systemd/system"  # exists if systemd is running (sd_booted(3))
TIMEOUT_SECONDS = 5.0
MIB = 1 << 20
FIX_COMMANDS = ("chown root:root {path}", "chmod go-w {path}")


# --- sources of faults


def kernel_log(settings: Settings) -> Iterator[Line]:
    """Test the kernel log, from which Xids are read, and the journal, which fills gaps in the ring buffer."""
    source = settings.kernel_log.source
    if not needs_kernel_log(source):
        yield limited_line(
            "kernel log", "kernel_log.source is off: healthd reports no Xids", 'kernel_log.source = "kmsg"'
        )
    else:
        yield _opened(source, settings)
    if source != "kmsg":
        return
    try:
        Host(settings.root)
        open_source("journal", settings.root).close()
    except (OSError, ImportError) as error:
        message = f"the journal cannot be read ({error}): lines lost from the ring buffer cannot be recovered"
        yield limited_line("journal", message, "systemctl status systemd-journald")
        return
    if os.path.isdir("/var/log/journal"):
        yield ok_line("journal", "readable, and kept across reboots")
    else:
        message = "readable, but not kept across reboots: the last lines of a crashed node are lost"
        yield limited_line("journal", message, "mkdir -p /var/log/journal && journalctl --flush")


def _opened(source: str, settings: Settings) -> Line:
    try:
        opened = open_source(source, settings.root)
    except OSError as error:
        fix = ("sudo healthd doctor",) if error.errno in (errno.EPERM, errno.EACCES) and os.geteuid() else ()
        where = f"{error.filename or source}: {error.strerror or error}"
        return failed_line(
            "kernel log", f"{where}: healthd reports no Xids", *(fix or ('kernel_log.source = "journal"',))
        )
    missing = opened.missing  # a file that does not exist yet
    opened.close()
    if missing:
        is_unreadable = os.path.exists(source) and os.geteuid() != 0
        command = "sudo healthd doctor" if is_unreadable else 'kernel_log.source = "kmsg"'
        return failed_line("kernel log", f"{missing}: healthd reports no Xids", command)
    if source not in KERNEL_LOGS and not settings.kernel_log.trust_file:
        message = f"{source} is readable, but users can forge its lines, so they are only displayed"
        return limited_line("kernel log", message, 'kernel_log.source = "kmsg"')
    return ok_line("kernel log", f"{'/dev/kmsg' if source == 'kmsg' else source} is readable")


# --- the daemon


def daemon(
    settings: Settings, status: Mapping[str, Any] | None, why_not: str, processes: Sequence[psutil.Process]
) -> Iterator[Line]:
    """Test the daemon.

    status     the daemon's own document (docs/json.md), or None if it did not answer
    why_not    the reason why it did not answer
    processes  all `healthd run` processes on this machine
    """
    if status is None:
        running_text = "; ".join(f"process {process.pid} runs" for process in processes)
        fix = ("systemctl status healthd", "journalctl -u healthd -n 50") if running_text else _start_commands()
        yield failed_line("daemon", f"{why_not}{f', though {running_text}' if running_text else ''}", *fix)
    else:
        yield _running_daemon(settings, status, processes)


def _start_commands() -> tuple[str, ...]:
    return ("systemctl enable --now healthd",) if os.path.isdir("/run/systemd/system") else ("healthd run",)


def _running_daemon(settings: Settings, status: Mapping[str, Any], processes: Sequence[psutil.Process]) -> Line:
    since = duration(max(0, int(time.time() - float(status.get("started", 0.0)))))
    message = f"runs for {since}, mode {status.get('mode')}, version {status.get('version')}"
    message += _cost_and_other_daemons(_socket_owner(settings.runtime_dir), processes)
    problems = [str(problem) for problem in status.get("problems", ())]
    if problems:
        return limited_line("daemon", f"{message}; {'; '.join(problems)}", "healthd status")
    if status.get("mode") != settings.mode.value:
        mismatch = f"{message}, but the mode in the settings is {settings.mode.value}"
        return limited_line(
            "daemon", mismatch, "systemctl reload healthd", "systemctl restart healthd (for settings marked (start))"
        )
    return ok_line("daemon", message)


def _socket_owner(runtime_dir: str) -> int | None:
    """Return the pid at the other end of the daemon's socket (SO_PEERCRED, unix(7)), or None."""
    from healthd.common.paths import SOCKET

    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_SECONDS)
        try:
            connection.connect(os.path.join(runtime_dir, SOCKET))
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return int(pid)


def _cost_and_other_daemons(pid: int | None, processes: Sequence[psutil.Process]) -> str:
    """Return text about the daemon `pid`'s memory use and any other running daemons."""
    own = next((process for process in processes if process.pid == pid), None)
    if own is None:
        return ""
    other_daemons = "; ".join(_process_text(process) for process in processes if process is not own)
    return f"{_cost(own)}{f'; another daemon runs too: {other_daemons}' if other_daemons else ''}"


def _process_text(process: psutil.Process) -> str:
    """Describe a process, as in "process 812 (root): healthd run --runtime-dir /tmp/h"."""
    import psutil

    try:
        return f"process {process.pid} ({process.username()}): {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"process {process.pid}"  # it has exited or belongs to another user


def _cost(process: psutil.Process) -> str:
    """Return the memory use of the process and its children as text, or "" if it cannot be read."""
    import psutil

    own = children = 0
    try:
        own = process.memory_info().rss
        children = sum(child.memory_info().rss for child in process.children(recursive=True))
    except psutil.Error:
        pass  # it has exited or belongs to another user
    return f", {own // MIB} MiB and {children // MIB} MiB for its children" if own else ""


def unit() -> Iterator[Line]:
    """Test that systemd starts healthd at boot, and that nothing overrides the package's unit."""
    if not os.path.isdir(SYSTEMD_DIR):
        yield absent_line("unit", "systemd is not running on this node: start `healthd run` with its service manager")
        return
    result = run_program(("systemctl", "show", "-p", "UnitFileState,LoadState,FragmentPath", UNIT), TIMEOUT_SECONDS)
    properties = dict(line.partition("=")[::2] for line in result.stdout.splitlines())
    if properties.get("LoadState") != "loaded":
        yield failed_line("unit", "systemd has no healthd.service: healthd will not start at boot", "docs/deploy.md")
    elif properties.get("UnitFileState") not in ("enabled", "enabled-runtime"):
        yield failed_line(
            "unit",
            f"it is {properties.get('UnitFileState')}: healthd will not start at boot",
            "systemctl enable healthd",
        )
    else:
        yield _enabled_unit(properties.get("FragmentPath", ""))


def _enabled_unit(path: str) -> Line:
    packaged = [folder for folder in ("/usr/lib", "/lib") if os.path.exists(f"{folder}/systemd/system/{UNIT}")]
    if path.startswith("/etc/") and packaged:
        message = f"{path} overrides the package's unit, so upgrades have no effect on it"
        return limited_line(
            "unit", message, f"rm {path}", "systemctl daemon-reload", "systemctl edit healthd (for the site's changes)"
        )
    return ok_line("unit", f"{path} is enabled")


# --- configuration


def baseline(settings: Settings, now: float) -> Iterator[Line]:
    path = settings.baseline_file
    if not path:
        yield absent_line("baseline", 'baseline_file is ""')
        return
    try:
        written = os.stat(path).st_mtime
    except FileNotFoundError:
        message = f"no {path}: without expected hardware, missing parts are not detected"
        yield limited_line("baseline", message, "healthd baseline --write (on a healthy node)")
    else:
        yield ok_line("baseline", f"{path}, written {ago(written, now)}")


def page(settings: Settings, is_running: bool, processes: Sequence[psutil.Process]) -> Iterator[Line]:
    """Test that each metrics address answers, and that the daemon (one of `processes`) sends the answer."""
    own_pids = {process.pid for process in processes}
    addresses = listen_addresses(settings.metrics.listen, "metrics.listen")
    if not addresses and not settings.metrics.textfile:
        yield limited_line(
            "metrics", "metrics.listen is off and no textfile is set: there are no metrics", "[metrics] in healthd.toml"
        )
    for host, port in addresses:
        where = f"{host}:{port}"
        try:
            socket.create_connection((host, port), TIMEOUT_SECONDS).close()
        except OSError as error:
            if is_running:
                yield limited_line("metrics", f"{where}: {error.strerror or error}", "healthd status", "ss -ltnp")
            else:
                yield absent_line("metrics", f"{where} is free; the daemon is not running")
            continue
        holder = _holder(port)
        if is_running and (holder is None or holder.pid in own_pids):
            yield ok_line("metrics", f"{where} answers")
        else:
            name = f"{holder.name()} (process {holder.pid})" if holder else "another process"
            yield limited_line("metrics", f"{where} is used by {name}", "ss -ltnp", "metrics.listen in healthd.toml")


def _holder(port: int) -> psutil.Process | None:
    """Return the process that listens on the port, or None if it cannot be determined."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return psutil.Process(connection.pid)
    except psutil.Error:
        pass  # it has exited or belongs to another user
    return None


# --- files


def hooks(settings: Settings, systemd_dir: str = SYSTEMD_DIR) -> Iterator[Line]:
    """Test that the programs of the hooks exist, and that systemd starts them. `files` tests their owners."""
    programs = settings.hooks.programs
    if not programs:
        yield absent_line("hooks", "no hook is configured")
        return
    missing = [(name, argv[0]) for name, argv in programs.items() if not os.access(argv[0], os.X_OK)]
    for name, path in missing:
        yield failed_line("hooks", f"hooks.{name}: {path} is not a program", f"healthd hooks test {name}")
    if os.path.isdir(systemd_dir) and (line := unit_line("hooks", HOOKS_UNIT, "no hook runs")).state is not State.OK:
        yield line
        return
    if not missing:
        yield ok_line("hooks", f"{', '.join(programs)}; healthd hooks test HOOK runs one")


def unit_line(topic: str, unit: str, consequence: str) -> Line:
    """Test that a unit is active. `consequence` is a clause that describes the effect if it is not."""
    result = run_program(("systemctl", "is-active", unit), TIMEOUT_SECONDS)
    if result.status != 0:
        message = f"{unit} is {result.stdout.strip() or 'missing'}: {consequence}"
        # A .path unit fails once its service has been started too often.
        units = f"{unit} {unit.removesuffix('.path')}.service" if unit.endswith(".path") else unit
        return failed_line(topic, message, f"systemctl reset-failed {units}", f"systemctl start {unit}")
    return ok_line(topic, f"{unit} is active")


def files(loaded: Loaded | None, settings_file: str) -> Iterator[Line]:
    """Test that only root can write the files that healthd reads or runs as root (see healthd.common.ownership).

    `loaded` contains the settings, or is None if they cannot be read, which another line reports.
    """
    untrusted = list(_untrusted_paths(loaded, settings_file))
    if not untrusted:
        yield ok_line("files", "only root can write the files that healthd reads and runs as root")
    for path, why in untrusted:
        yield failed_line("files", why, *(fix.format(path=path) for fix in FIX_COMMANDS))


def _untrusted_paths(loaded: Loaded | None, settings_file: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of each path that other users can write to, each with a sentence about the problem."""
    file_labels: dict[str, str] = {settings_file: "the settings", sys.executable: "the interpreter"}
    folder_labels = {os.path.dirname(healthd.__file__): "the program"}
    if loaded is not None:
        settings = loaded.settings
        if settings.checks_dir:
            folder_labels[settings.checks_dir] = "checks_dir"
        folder_labels |= {settings.state_dir: "state_dir", settings.runtime_dir: "runtime_dir"}
        if settings.baseline_file:
            file_labels[settings.baseline_file] = "baseline_file"
        file_labels |= {argv[0]: f"hooks.{name}" for name, argv in settings.hooks.programs.items()}
        if settings.metrics.textfile:
            folder_labels[os.path.dirname(settings.metrics.textfile)] = "metrics.textfile"
    yield from _check_owners(file_labels, is_folder=False)
    yield from _check_owners(folder_labels, is_folder=True)


def _check_owners(paths: Mapping[str, str], is_folder: bool) -> Iterator[tuple[str, str]]:
    for path, label in paths.items():
        try:
            if is_folder:
                with ownership.open_folder(path):
                    pass
            else:
                ownership.stat_program(path)
        except ownership.Untrusted as error:
            yield error.path, f"{path} ({label}): {error}"
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # it does not exist, or only root can read it


def room(settings_state_dir: str, settings_runtime_dir: str, min_bytes: int = 64 << 20) -> Iterator[Line]:
    """Test the free space of the state and runtime directories, and the free memory."""
    import psutil

    short = []
    for path, name in ((settings_state_dir, "state_dir"), (settings_runtime_dir, "runtime_dir")):
        folder = _existing(path)
        free = psutil.disk_usage(folder).free
        if free < min_bytes:
            short.append((f"{path} ({name}) has {free >> 20} MiB free", f"df -h {folder}"))
    available = psutil.virtual_memory().available
    if available < 2 * min_bytes:
        short.append(
            (f"the node has {available >> 20} MiB of free memory", "ps -eo pid,user,rss,comm --sort=-rss | head")
        )
    for message, fix in short:
        yield limited_line("room", message, fix)
    if not short:
        yield ok_line(
            "room", f"enough disk space for state_dir and runtime_dir, {available >> 20:,} MiB of free memory"
        )


def _existing(path: str) -> str:
    """Return the path or, if it does not exist, its nearest existing parent directory."""
    while path != "/" and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
