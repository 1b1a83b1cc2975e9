"""`healthd run` as a user starts it, in a separate process: own directories, and a followed file as kernel log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from healthd.host.program import ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]
EVERY_SECOND = "interval_seconds = 1.0\n"
# These checks depend on the test machine: a killed process takes a moment to end, and its disk may be full.
MACHINE_CHECKS = ("processes", "disk_space")
FIRST_PATH_DIR = ENVIRONMENT["PATH"].partition(":")[0]


class Healthd:
    """`with Healthd("--mode", "act", ...) as daemon:`; the kernel log is the file `daemon.kernel_log`.

    config     the text of healthd.toml
    programs   a folder whose programs (systemctl, ipmitool) checks find first, on a machine that systemd booted
    instead    folders of this machine, and their replacements for the daemon

    `kill` and `start` again keep the directories, as a restart on a node does.
    """

    def __init__(
        self,
        *flags: str,
        config: str = "",
        env: Mapping[str, str] | None = None,
        directory: Path | None = None,
        fake_nvml: str = "dgx-h100",
        wait: bool = True,
        programs: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix="healthd."))
        self.kernel_log = self.directory / "kernel.log"
        self.kernel_log.touch()
        self.config = self.directory / "healthd.toml"
        self.configure(config)
        self.log = self.directory / "healthd.log"
        self.run_dir = self.directory / "run"
        self.flags = flags
        self.fake_nvml = fake_nvml
        self.env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})}
        self.wait = wait
        self.python = python
        self.programs = programs
        self.bind_mounts = {} if programs is None else {FIRST_PATH_DIR: programs}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Healthd:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        if error is not None:
            print(self.log.read_text(errors="replace")[-8000:], file=sys.stderr)

    def configure(self, config: str) -> None:
        """Write other settings, for the next start or reload."""
        off = (f"[checks.{check}]\nenabled = false\n" for check in MACHINE_CHECKS if f"[checks.{check}]" not in config)
        # A collector runs `healthd record` and reads this machine's journal: only the tests of evidence start it.
        no_evidence = "" if "[evidence]" in config else "[evidence]\nenabled = false\n"
        self.config.write_text(f"{config}\n{''.join(off)}{no_evidence}")

    def argv(self) -> list[str]:
        argv = [self.python, "-m", "healthd", "run", "--config", str(self.config)]
        argv += ["--runtime-dir", str(self.run_dir), "--state-dir", str(self.directory / "state")]
        argv += ["--kernel-log", str(self.kernel_log)]
        argv += [] if "\nlisten = " in self.config.read_text() else ["--listen", "off"]
        argv += (["--fake-nvml", self.fake_nvml] if self.fake_nvml else []) + list(self.flags)
        if not self.bind_mounts:
            return argv
        # Run in its own mount namespace, in which systemd runs as sd_booted(3) detects it.
        shell_command = "mount -t tmpfs run /run && mkdir -p /run/systemd/system || exit; "
        shell_command += 'while [ "$1" != -- ]; do mount --bind "$1" "$2" && shift 2 || exit; done; shift; exec "$@"'
        mounts = [str(path) for target, source in self.bind_mounts.items() for path in (source, target)]
        return ["unshare", "--mount", "sh", "-c", shell_command, "sh", *mounts, "--", *argv]

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.argv(), env=self.env, stdout=log, stderr=log)
        if self.wait:
            self.wait_until(lambda s: s["round"].get("seconds", 0) > 0, "the first round is over")

    def stop(self, seconds: float = 120) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(seconds)

    def stop_when_idle(self) -> int:
        """Stop the daemon while its worker is idle, so that it saves its last events; it does not wait for a busy one.

        The settings must begin with EVERY_SECOND.
        """
        assert self.process is not None
        settings = self.config.read_text()
        self.config.write_text("interval_seconds = 3600.0\n" + settings.removeprefix(EVERY_SECOND))
        self.process.send_signal(signal.SIGHUP)
        self.wait_until(lambda s: s["interval_seconds"] == 3600, "no further round is due")
        self.wait_until(
            lambda s: s["time"] - end_of_round(s) > 9 and not s["stream"]["waiting"],
            "the last round ended 9 s ago",
        )
        self.config.write_text(settings)
        return self.stop()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(120)

    def request(self, **request: Any) -> dict[str, Any]:
        """Send one request on the control socket. Raise OSError if no daemon listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(120)
            stream.connect(str(self.run_dir / "healthd.sock"))
            stream.sendall(json.dumps(request).encode() + b"\n")
            received = b""
            while chunk := stream.recv(1 << 16):
                received += chunk
        answer: dict[str, Any] = json.loads(received)
        return answer

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.request(command="status")["status"]
        return document

    def wait_until(
        self, is_reached: Callable[[dict[str, Any]], bool], condition_text: str, seconds: float = 120
    ) -> dict[str, Any]:
        """Wait until `reached(status)` is true and return that status."""
        end = time.monotonic() + seconds
        status: dict[str, Any] | None = None
        while time.monotonic() < end:
            try:
                status = self.status()
            except (OSError, ValueError):
                status = None
            if status is not None and is_reached(status):
                return status
            if self.process is not None and self.process.poll() is not None:
                break
            time.sleep(0.05)
        shown_keys = ("health", "conditions", "unknown", "decision", "slurm", "blocked")
        shown = {key: (status or {}).get(key) for key in shown_keys}
        raise TimeoutError(f"not within {seconds} s: {condition_text}; {shown}\n{self.log.read_text()[-4000:]}")

    def verdict(self) -> str:
        return (self.run_dir / "verdict").read_text()

    def kernel_line(self, *lines: str) -> None:
        with open(self.kernel_log, "a", encoding="ascii") as log:
            log.write("".join(f"{line}\n" for line in lines))

    def worker_pid(self) -> int:
        """Return the pid of the current or next worker: the last one may just have been given up."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        end = time.monotonic() + 120
        while True:
            for pid in children.read_text().split():
                with contextlib.suppress(OSError):  # the child has ended
                    if b"healthd.agent.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return int(pid)
            assert time.monotonic() < end, "there is no worker"
            time.sleep(0.02)


def write_atomically(file: Path, text: str) -> None:
    """Replace a file so that a daemon reads either the old text or the new one."""
    temporary = file.with_suffix(".new")
    temporary.write_bytes(text.encode())
    temporary.replace(file)


def wait_for_rounds(daemon: Healthd, count: int) -> dict[str, Any]:
    """Wait until `count` more complete rounds have ended and return the status."""
    last = daemon.status()["round"]["number"] + count
    return daemon.wait_until(lambda s: s["round"]["number"] > last, f"round {last} is over")


def end_of_round(status: dict[str, Any]) -> float:
    """Return the end of the last round (epoch), or infinity while a due round is in progress."""
    round_status = status["round"]
    return (
        float(round_status["started"] + round_status["seconds"])
        if round_status["next_at"] > round_status["started"]
        else float("inf")
    )


def have_all_run_since(status: dict[str, Any], moment: float) -> bool:
    """Return True if each check has run after that time (epoch). On a busy machine two requests can share a round."""
    return all(found["started"] >= moment for found in status["results"])


def xid_line(
    code: int, pci: str = "0000:61:00", text: str = "GPU has fallen off the bus.", when: float | None = None
) -> str:
    """Return a kernel line as the driver writes it. `when` adds dmesg's time stamp (seconds since boot)."""
    prefix = "" if when is None else f"[{when:12.6f}] "
    return f"{prefix}NVRM: Xid (PCI:{pci}): {code}, pid='<unknown>', name=<unknown>, {text}"


def condition(status: dict[str, Any], code: str, subject: str | None = None) -> dict[str, Any] | None:
    for entry in status["conditions"]:
        if entry["code"] == code and subject in (None, entry["subject"]):
            return dict(entry)
    return None
