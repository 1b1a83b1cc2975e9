"""Tests of the console blocks in README.md and docs/try-it.md: their commands run, and the output is compared.

Times and line breaks are not compared. `HEALTHD_WRITE_README=1` writes the current output into the pages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MAX_LINES = 130
TERMINAL = re.compile(r"```console\n(.*?)```", re.DOTALL)
TIMES = re.compile(r"\b(just now|in \d+ \w+|now|\d[\d.]* (s|min|h|days)( ago)?)(?=[\s,;)]|$)")


# Hides the processes of this machine: other tests that run in parallel make some hang. It needs root.
PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc") if os.geteuid() == 0 else ()


def commands(terminal: str) -> list[tuple[str, str]]:
    """Return (command, output) for each line that begins with "$ "."""
    parts = re.split(r"(?m)^\$ (.*)\n", terminal)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


# The checks with something to check depend on the machine that runs the test (disks, EDAC, a BMC).
MACHINE_DEPENDENT = re.compile(
    r"(?ms)^ *\d+ checks? (?:passed|had nothing to check).*?(?=^ *\d+ checks? only read|^exit status|^Service|\Z)"
)


EVIDENCE = re.compile(r"\b\d{8}T\d{6}Z-|\b\d+ KiB")  # time and size of a file


def without_times(text: str) -> list[str]:
    text = EVIDENCE.sub("N", text)
    text = MACHINE_DEPENDENT.sub("CHECKS\n", text)
    return TIMES.sub("TIME", re.sub(r"\bround \d+", "round N", text)).split()


class Shell:
    """A folder and a shell in which `healthd` is this one. After a command with "&" it waits for the daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        program = bin_folder / "healthd"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m healthd "$@"\n')
        program.chmod(0o755)
        path = f"{bin_folder}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
        self.daemon: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> str:
        if command.endswith("&"):
            argv = [*PID_NAMESPACE, "sh", "-c", f"exec {command[:-1]}"]
            self.daemon = subprocess.Popen(argv, cwd=self.folder, env=self.environment, stderr=subprocess.DEVNULL)
            self.wait_for(lambda status: status["health"] != "unknown")
            return ""
        result = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=240
        )
        if command.endswith("> kernel-log"):
            self.wait_for(lambda status: status["health"] == "unhealthy")
            self.wait_for(lambda status: (status["evidence"] or {}).get("stage") == "waiting")
        host = os.uname().nodename.partition(".")[0]
        output = (result.stdout + result.stderr).replace(str(self.folder), "/root")
        return re.sub(rf"(?m)^{re.escape(host)}(?=: )", "gpu-042", output)

    def wait_for(self, satisfied) -> None:
        """Wait until the status fulfils a condition."""
        deadline = time.monotonic() + 120
        output = ""
        while time.monotonic() < deadline:
            output = self.run("healthd status --json --runtime-dir run 2>/dev/null")
            if output and satisfied(json.loads(output)):
                return
            time.sleep(0.1)
        pytest.fail(f"after 120 s: {output[:2000]}")

    def close(self) -> None:
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait(240)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    if os.path.exists("/etc/healthd"):
        pytest.skip("this machine has settings of its own")
    opened = Shell(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("name", ["README.md", "docs/try-it.md"])
def test_terminals_show_current_output(shell, name):
    page = ROOT / name
    text = page.read_text("utf-8")
    assert TERMINAL.search(text)
    shown, printed = [], []
    for terminal in TERMINAL.findall(text):
        now = ""
        for command, expected in commands(terminal):
            output = shell.run(command)
            now += f"$ {command}\n{output}"
            shown.append((command, without_times(expected)))
            printed.append((command, without_times(output)))
        text = text.replace(terminal, now)
    if os.environ.get("HEALTHD_WRITE_README"):
        page.write_text(text)
    else:
        assert printed == shown


def test_readme_is_short():
    assert len(README.read_text("utf-8").splitlines()) <= MAX_LINES


def test_each_page_named_in_readme_exists():
    for page in re.findall(r"\]\(([^)#:]+)", README.read_text("utf-8")):
        assert (ROOT / page).exists(), page


INSTALL_COMMANDS = [
    line.strip()
    for page in (ROOT / "docs/deploy.md", ROOT / "docs/prolog-epilog.md")
    for line in page.read_text("utf-8").splitlines()
    if line.strip().startswith("[ -e ")
]


@pytest.mark.parametrize("command", INSTALL_COMMANDS)
def test_install_command_keeps_existing_file_or_link(command: str, tmp_path: Path) -> None:
    """A link into a file system that is not mounted yet is a setting of the site, too."""
    path = re.findall(r"/etc/\S+", command)[-1]
    source = re.findall(r"/opt/\S+", command)[0]
    settings, shipped = tmp_path / path[1:], tmp_path / source[1:]
    shipped.parent.mkdir(parents=True)
    shipped.write_text("ours")
    local_command = re.sub(r"(?<= )/(?=etc/|opt/)", f"{tmp_path}/", command)

    def install() -> None:
        subprocess.run(["sh", "-ec", local_command], check=True, timeout=240)

    install()
    assert settings.read_text() == "ours"
    settings.write_text("the site's")
    install()
    assert settings.read_text() == "the site's"
    settings.unlink()
    settings.symlink_to(tmp_path / "not-mounted")
    install()
    assert settings.is_symlink()


def test_pages_have_two_install_commands() -> None:
    assert len(INSTALL_COMMANDS) == 2
