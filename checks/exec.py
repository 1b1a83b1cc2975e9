"""Any program of the site, by its exit status: 0 ok, 1 warning, 2 critical, 3 unknown (as Nagios plug-ins and NHC).

The first line that it prints is the message. Everything else than these four (another status, a signal, no such file,
too slow) means that it could not look: the run fails, which neither passes nor fails the node.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, Severity
from healthd.past import Past

USES = ""
PER = "exec"

# All that the program gets, beside HEALTHD_CHECK=its name; stdin is empty, the directory is /.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
MAX_OUTPUT_BYTES = 64 << 10
MAX_MESSAGE = 200
ENDING_SECONDS = 1.0  # of the timeout is kept to kill the program, wait for it, and say so


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """command             the program, by its absolute path, and its arguments; no shell
    critical_severity   what exit status 2 means
    timeout_seconds     the program is killed one second before (after 80 % of it, if that is later)
    """

    command: tuple[str, ...] = ()
    critical_severity: Severity = Severity.DEGRADED


def validate(config: Config) -> str | None:
    if not config.command:
        return 'command is missing: command = ["/path/to/program", "argument"]'
    if not config.command[0].startswith("/"):
        return f'command must begin with an absolute path, not "{config.command[0]}"'
    return "command must not contain NUL" if any("\0" in word for word in config.command) else None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    seconds = max(config.timeout_seconds - ENDING_SECONDS, config.timeout_seconds * 0.8)
    status, message = execute(config.name, config.command, seconds)
    yield Observation("exec_exit_status", status, labels=(("name", config.name),))
    if status == 1:
        yield Finding(Severity.WARNING, "exec/warning", config.name, message or "exit status 1")
    elif status == 2:
        yield Finding(config.critical_severity, "exec/critical", config.name, message or "exit status 2")
    elif status == 3:
        raise RuntimeError(f"{config.name} says unknown: {message}")
    elif status != 0:
        how = f"was ended by {_signal_name(-status)}" if status < 0 else f"exit status {status} is none of 0, 1, 2, 3"
        raise RuntimeError(f"{config.name}: {how}: {message}")


def execute(name: str, command: tuple[str, ...], seconds: float) -> tuple[int, str]:
    """(exit status, or minus the signal; the first line it printed). Raises OSError, or TimeoutError when it is too
    slow; it and what it started are killed then, and left alone if even that does not end them.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={**ENVIRONMENT, "HEALTHD_CHECK": name},
        start_new_session=True,
        bufsize=0,
    )
    try:
        stdout, stderr = _communicate(process, time.monotonic() + seconds)
        ended = _has_ended(process)
    finally:
        _kill(process)
    if not ended:
        raise TimeoutError(f"{name}: did not end within {seconds:g} s, and was killed")
    return process.returncode, _first_line(stdout) or _first_line(stderr)


def _communicate(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """What it writes until it ends or the deadline passes: 64 KiB each are kept, the rest is read and dropped.

    Its end counts, not that of the pipes: a child that it left in the background may hold them open for ever.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            ended = _has_ended(process)
            ready = selector.select(0.0 if ended else min(left, 0.05)) if selector.get_map() else []
            if ended and not ready:
                break
            if not ready and not selector.get_map():
                time.sleep(min(left, 0.02))  # both pipes are closed, the program is about to end
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                kept[key.fd] += chunk[: MAX_OUTPUT_BYTES - len(kept[key.fd])]
                if not chunk:
                    selector.unregister(key.fd)
    stdout, stderr = kept.values()
    return bytes(stdout), bytes(stderr)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it: until then nobody else can have its number, so that its group can be killed safely."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it left in its process group; wait for it, but not for long."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: left behind
        process.wait(ENDING_SECONDS / 2)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _first_line(output: bytes) -> str:
    """Printable, at most 200 characters."""
    for line in output.decode("utf-8", "replace").splitlines():
        if line.strip():
            return "".join(c if c.isprintable() else "?" for c in line.strip())[:MAX_MESSAGE]
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


EXPLAIN = {
    "exec/warning": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A program of the site ended with exit status 1.",
        "What the program says.",
        "The message is the first line that it printed. Run its command by hand; healthd config show has it.",
    ),
    "exec/critical": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A program of the site ended with exit status 2. critical_severity in its settings says what that means.",
        "What the program says.",
        "The message is the first line that it printed. Run its command by hand; healthd config show has it.",
    ),
}
