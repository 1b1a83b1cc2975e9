"""TAB in real shells.

bash and zsh run on a terminal and execute the completed line; fish completes through `complete -C`.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from requirements import require_programs
from status_daemon import StatusDaemon

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
READY = b"READY> "

# Typed line -> the arguments of healthd after the TABs.
COMPLETIONS = {
    "conf\t": "config",
    "config s\t": "config show",
    "help config ch\t": "help config check",
    "failslow per\t": "failslow period",
    "--vers\t": "--version",
    "check --js\t": "check --json",
    "check gpu_ec\t": "check gpu_ecc",
    "check --config settings site_o\t": "check --config settings site_own",
    "explain gpu_access/lo\t": "explain gpu_access/lost",
    "explain --config settings site_own/w\t": "explain --config settings site_own/wrong",
    "check --json --fake-nvml dgx-h1\t": "check --json --fake-nvml dgx-h100",
    "run --mode dr\t": "run --mode drain",
    "run --mode=dr\t": "run --mode=drain",
    "run --kernel-log jou\t": "run --kernel-log journal",
    "scan a\\ fo\tke\t": "scan a folder/kern.log",
    "config check a\\ fo\tsett\t": "config check a folder/settings.toml",
    "fleet ingest --nodes a\\ folder/no\ta\\ folder/ke\t": "fleet ingest --nodes a folder/nodes.txt a folder/kern.log",
    "completion fi\t": "completion fish",
    "status --watch --js\t": "status --watch --json",
    "ack --runtime-dir run gpu_x\t": "ack --runtime-dir run gpu_xid/79",
    "ack --runtime-dir run gpu_xid/79 0000:6\t": "ack --runtime-dir run gpu_xid/79 0000:61:00.0",
    "ack --runtime-dir run exec/critical nh\t": "ack --runtime-dir run exec/critical nhc: check_hw_eth eth1",
    "repaired --runtime-dir run exec/critical nhc:\\ che\t": (
        "repaired --runtime-dir run exec/critical nhc: check_hw_eth eth1"
    ),
}
# argcomplete completes no colon within a quote in zsh.
BASH_COMPLETIONS = {
    "unack --runtime-dir run exec/critical 'nhc: che\t": (
        "unack --runtime-dir run exec/critical nhc: check_hw_eth eth1"
    ),
}
SITE_CHECK = '''"""A site's own."""
from healthd.common.model import Clears, Explain, Severity
EXPLAIN = {"site_own/wrong": Explain(Severity.WARNING, Clears.PASS, "m", "w", "t")}
def run(host, config, past):
    return ()
'''


CONDITIONS = [
    {"code": "gpu_xid/79", "subject": "0000:61:00.0"},
    {"code": "exec/critical", "subject": "nhc: check_hw_eth eth1"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with files, settings and a site's check, a daemon in `run`, `healthd` and the three scripts."""
    place = tmp_path_factory.mktemp("completion")
    (place / "a folder").mkdir()
    for name in ("kern.log", "settings.toml", "nodes.txt"):
        (place / "a folder" / name).touch()
    (place / "checks.d").mkdir(mode=0o755)
    (place / "checks.d/site_own.py").write_text(SITE_CHECK)
    (place / "checks.d/site_own.py").chmod(0o644)
    (place / "settings").write_text(f'checks_dir = "{place}/checks.d"\n')
    (place / "bin").mkdir()
    python = shlex.quote(sys.executable)
    (place / "bin/healthd").write_text(f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {python} -m healthd "$@"\n')
    (place / "bin/healthd").chmod(0o755)
    (place / "scripts").mkdir()
    for shell, name in (("bash", "healthd"), ("zsh", "_healthd"), ("fish", "healthd.fish")):
        command = [place / "bin/healthd", "completion", shell]
        completed = subprocess.run(command, capture_output=True, check=True, timeout=240)
        (place / "scripts" / name).write_bytes(completed.stdout)
    (place / "run").mkdir()
    with StatusDaemon(place / "run", conditions=CONDITIONS):
        yield place


def environment(place: Path) -> dict[str, str]:
    path = f"{place}/bin:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(place), "TERM": "dumb", "LC_ALL": "C.UTF-8", "PS1": READY.decode()}


class Terminal:
    """A shell on a terminal. Its function `healthd` prints its arguments unless the completion calls it."""

    def __init__(self, place: Path, argv: list[str], prepare: str) -> None:
        self._read = b""
        self.process, self._terminal = pty.fork()
        if self.process == 0:
            os.chdir(place)
            os.execvpe(argv[0], argv, environment(place))
        self._read_until(READY)
        show = (
            'healthd() { if [ -n "$_ARGCOMPLETE" ]; then command healthd "$@"; '
            'else printf "<%s>" "$@"; echo "<END>"; fi; }'
        )
        self._send(f"{prepare}; {show}; echo PREP''ARED\n")
        self._read_until(rb"PREPARED\r?\n")
        self._read_until(READY)

    def completed_arguments(self, line: str) -> str:
        self._send(f"healthd {line}\n")
        output = self._read_until(rb"<END>\r?\n")
        self._read_until(READY)
        words = re.findall(r"<([^<>]*)>", output.decode().rpartition("\n<")[2].join(("<", "")))
        return " ".join(words[:-1])

    def close(self) -> None:
        os.close(self._terminal)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def _send(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def _read_until(self, pattern: bytes) -> bytes:
        deadline = time.monotonic() + SECONDS
        while not (match := re.search(pattern, self._read)):
            assert select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))[0], self._read
            self._read += os.read(self._terminal, 4096)
        output, self._read = self._read[: match.end()], self._read[match.end() :]
        return output


@pytest.fixture(scope="module", params=["bash", "zsh", "zsh, sourced"])
def terminal(request: pytest.FixtureRequest, place: Path) -> Iterator[Terminal]:
    shell, _, sourced = request.param.partition(", ")
    require_programs(shell, packages=shell)
    if shell == "bash":
        started_terminal = Terminal(place, ["bash", "--norc", "--noprofile", "-i"], f". {place}/scripts/healthd")
    else:
        load = f"fpath=({place}/scripts $fpath); autoload -Uz compinit; compinit -D -u"
        if sourced:
            load = "autoload -Uz compinit; compinit -D -u; source <(healthd completion zsh)"
        started_terminal = Terminal(place, ["zsh", "-f", "-i"], load)
    yield started_terminal
    started_terminal.close()


@pytest.mark.parametrize("line", COMPLETIONS)
def test_tab_completes_started_word(terminal: Terminal, line: str) -> None:
    assert terminal.completed_arguments(line) == COMPLETIONS[line]


@pytest.mark.parametrize("terminal", ["bash"], indirect=True)
@pytest.mark.parametrize("line", BASH_COMPLETIONS)
def test_tab_completes_within_quote(terminal: Terminal, line: str) -> None:
    assert terminal.completed_arguments(line) == BASH_COMPLETIONS[line]


@pytest.fixture(scope="module")
def fish_offers(place: Path) -> dict[str, list[str]]:
    """Return the words offered by fish for each line."""
    require_programs("fish", packages="fish")
    requested_lines = [line.rstrip("\t").replace("\t", "") for line in (*COMPLETIONS, *FISH_LINES)]
    script = f"source {place}/scripts/healthd.fish\n" + "".join(
        f"echo LINE; complete -C {shlex.quote(f'healthd {line}')}\n" for line in requested_lines
    )
    (place / "ask.fish").write_text(script)
    completed = subprocess.run(
        ["fish", "--no-config", "ask.fish"],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    parts = completed.stdout.split("LINE\n")[1:]
    return {
        line: [row.partition("\t")[0] for row in part.splitlines()]
        for line, part in zip(requested_lines, parts, strict=True)
    }


FISH_LINES = ("config ", "hook ", "run --mode ", "status ", "failslow period --j", "run --state-dir a\\ ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("conf", ["config"]),
        ("config ", ["check", "show"]),
        ("hook ", ["epilog", "healthcheck"]),
        ("help config ch", ["check"]),
        ("failslow per", ["period"]),
        ("failslow period --j", ["--json"]),
        ("check --js", ["--json"]),
        ("check gpu_ec", ["gpu_ecc"]),
        ("check --config settings site_o", ["site_own"]),
        ("explain --config settings site_own/w", ["site_own/wrong"]),
        ("run --mode ", ["act", "drain", "observe"]),
        ("run --mode=dr", ["--mode=drain"]),
        ("run --kernel-log jou", ["journal"]),
        ("run --state-dir a\\ ", ["a folder/"]),
        ("status ", []),
        ("ack --runtime-dir run gpu_x", ["gpu_xid/79"]),
        ("ack --runtime-dir run exec/critical nh", ["nhc: check_hw_eth eth1"]),
        ("completion fi", ["fish"]),
    ],
)
def test_fish_offers_only_valid_words(fish_offers: dict[str, list[str]], line: str, words: list[str]) -> None:
    assert sorted(fish_offers[line]) == words
