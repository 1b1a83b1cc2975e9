"""The daemon on this node: whether it runs, what it costs, what its status is, its metrics page, and its files."""

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
from healthd.agent.doctor.result import Line, absent, fails, limited, works
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
SECONDS = 5.0
MIB = 1 << 20
MEND = ("chown root:root {path}", "chmod go-w {path}")


# --- where faults come from


def kernel_log(settings: Settings) -> Iterator[Line]:
    """Whether the source of Xids opens, and the journal, which fills what the ring buffer lost."""
    source = settings.kernel_log.source
    if not needs_kernel_log(source):
        yield limited("kernel log", "kernel_log.source is off: no Xid is seen", 'kernel_log.source = "kmsg"')
    else:
        yield _opened(source, settings)
    if source != "kmsg":
        return
    try:
        Host(settings.root)
        open_source("journal", settings.root).close()
    except (OSError, ImportError) as error:
        message = f"the journal cannot be read ({error}): lines that the ring buffer lost stay lost"
        yield limited("journal", message, "systemctl status systemd-journald")
        return
    if os.path.isdir("/var/log/journal"):
        yield works("journal", "it can be read, and is kept over a reboot")
    else:
        message = "it can be read, but not after a reboot: what a crashed node said last is lost"
        yield limited("journal", message, "mkdir -p /var/log/journal && journalctl --flush")


def _opened(source: str, settings: Settings) -> Line:
    try:
        opened = open_source(source, settings.root)
    except OSError as error:
        fix = ("sudo healthd doctor",) if error.errno in (errno.EPERM, errno.EACCES) and os.geteuid() else ()
        where = f"{error.filename or source}: {error.strerror or error}"
        return fails("kernel log", f"{where}: no Xid is seen", *(fix or ('kernel_log.source = "journal"',)))
    missing = opened.missing  # a file that the daemon waits for
    opened.close()
    if missing:
        is_unreadable = os.path.exists(source) and os.geteuid() != 0
        command = "sudo healthd doctor" if is_unreadable else 'kernel_log.source = "kmsg"'
        return fails("kernel log", f"{missing}: no Xid is seen", command)
    if source not in KERNEL_LOGS and not settings.kernel_log.trust_file:
        message = f"{source} can be followed, but users can forge lines of it: what it says is only shown"
        return limited("kernel log", message, 'kernel_log.source = "kmsg"')
    return works("kernel log", f"{'/dev/kmsg' if source == 'kmsg' else source} can be read")


# --- the daemon


def daemon(
    settings: Settings, status: Mapping[str, Any] | None, why_not: str, processes: Sequence[psutil.Process]
) -> Iterator[Line]:
    """status: the daemon's own document (docs/json.md), None if it did not answer, for the reason `why_not`.
    processes: those on this machine that are a `healthd run`."""
    if status is None:
        there = "; ".join(f"process {process.pid} runs" for process in processes)
        fix = ("systemctl status healthd", "journalctl -u healthd -n 50") if there else _start_it()
        yield fails("daemon", f"{why_not}{f', though {there}' if there else ''}", *fix)
    else:
        yield _alive(settings, status, processes)


def _start_it() -> tuple[str, ...]:
    return ("systemctl enable --now healthd",) if os.path.isdir("/run/systemd/system") else ("healthd run",)


def _alive(settings: Settings, status: Mapping[str, Any], processes: Sequence[psutil.Process]) -> Line:
    since = duration(max(0, int(time.time() - float(status.get("started", 0.0)))))
    message = f"runs for {since}, mode {status.get('mode')}, version {status.get('version')}"
    message += _beside(_listener(settings.runtime_dir), processes)
    problems = [str(problem) for problem in status.get("problems", ())]
    if problems:
        return limited("daemon", f"{message}; {'; '.join(problems)}", "healthd status")
    if status.get("mode") != settings.mode.value:
        wanted = f"{message}, but the settings say {settings.mode.value}"
        return limited(
            "daemon", wanted, "systemctl reload healthd", "systemctl restart healthd (what is marked (start))"
        )
    return works("daemon", message)


def _listener(runtime_dir: str) -> int | None:
    """The process at the other end of the daemon's socket (SO_PEERCRED, unix(7)); None where nobody is."""
    from healthd.common.paths import SOCKET

    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(SECONDS)
        try:
            asked.connect(os.path.join(runtime_dir, SOCKET))
            pid, _, _ = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return int(pid)


def _beside(pid: int | None, processes: Sequence[psutil.Process]) -> str:
    """What the daemon `pid` costs, and which other daemons there are."""
    ours = next((process for process in processes if process.pid == pid), None)
    if ours is None:
        return ""
    others = "; ".join(_told(process) for process in processes if process is not ours)
    return f"{_cost(ours)}{f'; another one runs too: {others}' if others else ''}"


def _told(process: psutil.Process) -> str:
    """ "process 812 (root): healthd run --runtime-dir /tmp/h" """
    import psutil

    try:
        return f"process {process.pid} ({process.username()}): {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"process {process.pid}"  # it ended, or is not ours to look at


def _cost(process: psutil.Process) -> str:
    """Its memory, and that of its children, where it can be seen."""
    import psutil

    own = children = 0
    try:
        own = process.memory_info().rss
        children = sum(child.memory_info().rss for child in process.children(recursive=True))
    except psutil.Error:
        pass  # it ended, or is not ours to look at
    return f", {own // MIB} MiB and {children // MIB} MiB for its children" if own else ""


def unit() -> Iterator[Line]:
    """Whether systemd starts it at boot, by one unit."""
    if not os.path.isdir("/run/systemd/system"):
        yield absent("unit", "systemd does not run here: start healthd run by what does")
        return
    shown = run_program(("systemctl", "show", "-p", "UnitFileState,LoadState,FragmentPath", UNIT), SECONDS)
    said = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    if said.get("LoadState") != "loaded":
        yield fails("unit", "systemd has no healthd.service: it will not run after a boot", "docs/deploy.md")
    elif said.get("UnitFileState") not in ("enabled", "enabled-runtime"):
        yield fails(
            "unit", f"it is {said.get('UnitFileState')}: it will not run after a boot", "systemctl enable healthd"
        )
    else:
        yield _one_unit(said.get("FragmentPath", ""))


def _one_unit(path: str) -> Line:
    packaged = [folder for folder in ("/usr/lib", "/lib") if os.path.exists(f"{folder}/systemd/system/{UNIT}")]
    if path.startswith("/etc/") and packaged:
        message = f"{path} hides the package's own unit: an upgrade does not reach it"
        return limited(
            "unit", message, f"rm {path}", "systemctl daemon-reload", "systemctl edit healthd (what is the site's)"
        )
    return works("unit", f"{path} is enabled")


# --- what was set up


def baseline(settings: Settings, now: float) -> Iterator[Line]:
    path = settings.baseline_file
    if not path:
        yield absent("baseline", 'baseline_file is ""')
        return
    try:
        written = os.stat(path).st_mtime
    except FileNotFoundError:
        message = f"no {path}: nothing says what this node should have, so a part that is gone is not missed"
        yield limited("baseline", message, "healthd baseline --write (on a node that is well)")
    else:
        yield works("baseline", f"{path}, written {ago(written, now)}")


def page(settings: Settings, is_running: bool, processes: Sequence[psutil.Process]) -> Iterator[Line]:
    """Whether somebody answers where the metrics are to be, and that it is the daemon: one of `processes`."""
    ours = {process.pid for process in processes}
    addresses = listen_addresses(settings.metrics.listen, "metrics.listen")
    if not addresses and not settings.metrics.textfile:
        yield limited(
            "metrics", "metrics.listen is off and no textfile is set: nobody is told", "[metrics] in healthd.toml"
        )
    for host, port in addresses:
        where = f"{host}:{port}"
        try:
            socket.create_connection((host, port), SECONDS).close()
        except OSError as error:
            if is_running:
                yield limited("metrics", f"{where}: {error.strerror or error}", "healthd status", "ss -ltnp")
            else:
                yield absent("metrics", f"{where} is free; the daemon that would serve it does not run")
            continue
        holder = _holder(port)
        if is_running and (holder is None or holder.pid in ours):
            yield works("metrics", f"{where} answers")
        else:
            name = f"{holder.name()} (process {holder.pid})" if holder else "somebody"
            yield limited("metrics", f"{where} is taken by {name}", "ss -ltnp", "metrics.listen in healthd.toml")


def _holder(port: int) -> psutil.Process | None:
    """Who listens on that port; None where that cannot be seen."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return psutil.Process(connection.pid)
    except psutil.Error:
        pass  # it ended, or others' are not ours to see
    return None


# --- its files


def files(loaded: Loaded | None, settings_file: str) -> Iterator[Line]:
    """Yield who but root may write what healthd reads and runs as root (healthd.common.ownership has the rule).

    loaded: None if the settings cannot be read, which another line reports.
    """
    said = list(_wrong(loaded, settings_file))
    if not said:
        yield works("files", "nobody but root can write what healthd reads and runs as root")
    for place, why in said:
        yield fails("files", why, *(fix.format(path=place) for fix in MEND))


def _wrong(loaded: Loaded | None, settings_file: str) -> Iterator[tuple[str, str]]:
    """Each step of a path that others could write, and the sentence that says who."""
    wanted: dict[str, str] = {settings_file: "the settings", sys.executable: "the interpreter"}
    folders = {os.path.dirname(healthd.__file__): "the program"}
    if loaded is not None:
        settings = loaded.settings
        if settings.checks_dir:
            folders[settings.checks_dir] = "checks_dir"
        folders |= {settings.state_dir: "state_dir", settings.runtime_dir: "runtime_dir"}
        if settings.baseline_file:
            wanted[settings.baseline_file] = "baseline_file"
        if settings.metrics.textfile:
            folders[os.path.dirname(settings.metrics.textfile)] = "metrics.textfile"
    yield from _looked(wanted, is_folder=False)
    yield from _looked(folders, is_folder=True)


def _looked(paths: Mapping[str, str], is_folder: bool) -> Iterator[tuple[str, str]]:
    for path, what in paths.items():
        try:
            if is_folder:
                with ownership.folder(path):
                    pass
            else:
                ownership.program(path)
        except ownership.Untrusted as error:
            yield error.place, f"{path} ({what}): {error}"
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # what is not there nobody writes; what we may not see, root asks for


def room(settings_state_dir: str, settings_runtime_dir: str, most_bytes_wanted: int = 64 << 20) -> Iterator[Line]:
    """Whether there is room for what is remembered, and memory for the daemon."""
    import psutil

    short = []
    for path, name in ((settings_state_dir, "state_dir"), (settings_runtime_dir, "runtime_dir")):
        there = _existing(path)
        free = psutil.disk_usage(there).free
        if free < most_bytes_wanted:
            short.append((f"{path} ({name}) has {free >> 20} MiB left", f"df -h {there}"))
    available = psutil.virtual_memory().available
    if available < 2 * most_bytes_wanted:
        short.append(
            (f"the node has {available >> 20} MiB of memory left", "ps -eo pid,user,rss,comm --sort=-rss | head")
        )
    for message, fix in short:
        yield limited("room", message, fix)
    if not short:
        yield works("room", f"disk for state_dir and runtime_dir, {available >> 20:,} MiB of memory")


def _existing(path: str) -> str:
    """The path, or the nearest folder above it that is there."""
    while path != "/" and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
