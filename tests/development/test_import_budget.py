"""Tests of modules not to be loaded by a command, the daemon and its worker. bench/start.py measures the start time."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.agent.worker import test_installed_files

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
# Runs a command and prints the modules that are loaded at its end.
COMMAND = """
import json, sys
before = set(sys.modules)  # includes modules that .pth files load
from healthd.cli.main import main
sys.argv[1:] = json.loads(sys.argv[1])
main()
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""


COMMANDS = ("--version", "--help", "hook healthcheck", "hook epilog", "status", "explain gpu_xid/79", "check")
# Libraries that none of these commands may load: a command on a node does not need them, or not at its start.
NEVER_LOADED = {
    "asyncio",
    "difflib",
    "email",
    "http",
    "multiprocessing",
    "numpy",
    "prometheus_client",
    "pynvml",
    "tempfile",
    "yaml",
}


# Packages of healthd that take most of the start time.
SLOW_PACKAGES = ("healthd.checks", "healthd.agent.settings", "healthd.agent.conditions", "healthd.nvidia")


def loaded_modules(words: str, tmp_path: Path) -> set[str]:
    directory = [] if words.startswith(("-", "check", "explain")) else ["--runtime-dir", str(tmp_path)]
    argv = [sys.executable, "-c", COMMAND, json.dumps([*words.split(), *directory])]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=ROOT, check=True)
    return set(json.loads(result.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", COMMANDS)
def test_command_loads_no_heavy_library(words: str, tmp_path: Path) -> None:
    assert loaded_modules(words, tmp_path) & NEVER_LOADED == set()


@pytest.mark.parametrize("words", ["--version", "hook healthcheck", "hook epilog", "status"])
def test_frequent_command_loads_no_check(words: str, tmp_path: Path) -> None:
    assert not [name for name in loaded_modules(words, tmp_path) if name.startswith(SLOW_PACKAGES)]


def test_start_benchmark_measures_each_command() -> None:
    text = (ROOT / "bench" / "start.py").read_text()
    measured = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    assert {word for words in COMMANDS if words != "--help" for word in words.split()} <= measured


# --- long-running processes: the daemon and its worker

# The daemon and the worker loaded each of these once, or load it through a harmless-looking module: pathlib imports
# urllib and ipaddress, shutil imports bz2 and lzma, secrets a libcrypto.
UNNEEDED = {
    *("ast", "dataclasses", "dis", "inspect"),  # a check of a site may import them
    *("asyncio", "bz2", "difflib", "email", "hashlib", "http", "ipaddress", "lzma", "multiprocessing", "numpy"),
    *("pathlib", "pkgutil", "prometheus_client", "pynvml", "pyudev", "secrets", "shutil", "ssl", "tempfile"),
    *("urllib", "yaml"),
}
# The worker rarely logs, and copies a ledger without parsing it.
UNNEEDED_IN_WORKER = {
    *("argparse", "csv", "gettext", "logging", "random", "traceback"),
    *(
        "healthd.cli",
        "healthd.agent.daemon",
        "healthd.agent.conditions.ledger",
        "healthd.agent.reporting",
        "healthd.events.schema",
    ),
    *("healthd.agent.conditions.store", "healthd.agent.kernel_log", "healthd.agent.worker.client"),
}
# A worker that has run each check except those that use NVML, whose binding has its own imports, and has answered each
# other request of the daemon.
WORKER = """
import sys
from healthd.common.codec import dump
from healthd.agent.settings.registry import built_in_checks
from healthd.agent.worker.process import Setup, Worker, _open_host
from healthd.agent.worker.requests import *
from healthd.common.values import decode, encode
folder = sys.argv[1]
setup = Setup(root=f"{folder}/root", state_dir=f"{folder}/state", runtime_dir=f"{folder}/run")
worker = Worker(setup, *_open_host(setup))
for check in built_in_checks().values():
    if check.has_run and check.uses != "nvml":
        worker.answer(Run(check.name, "", dump(check.config()), boot_id="b"))
for number, request in enumerate((
    SaveCopy(f"{folder}/run", f"{folder}/state", ("ledger.json",)),
    LoadCopy(f"{folder}/state", ("ledger.json",)),
    AppendEvents(f"{folder}/state", ("{}",), False),
    ReadClusterName(),
    CheckInstalledFiles(()),
)):
    response = decode(Response, worker.respond(encode(Message(number, request))).partition(SEPARATOR)[0])
    assert not response.error, response
print(*sys.modules)
"""


# msgspec imports it, with inspect, if it is installed. Only a development tool needs it.
WITHOUT_TOOLS = "import sys; sys.modules['typing_extensions'] = None"


def loaded_without_site(program: str, *argv: str) -> set[str]:
    """Return the modules that a program loads without .pth files, as where healthd is installed.

    The .pth files of a checkout load some of them.
    """
    paths = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"{WITHOUT_TOOLS}\n{program}", *argv],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return set(result.stdout.split())


def test_daemon_loads_no_unneeded_library(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    (tmp_path / "healthd.toml").write_text(test_installed_files.SETTINGS.format(tmp_path).replace("127.0.0.1:0", "off"))
    modules = loaded_without_site(test_installed_files.READY_DAEMON, str(tmp_path / "healthd.toml"))
    assert "healthd.agent.daemon" in modules
    assert modules & UNNEEDED == set()


def test_worker_loads_no_unneeded_module(tmp_path: Path) -> None:
    for name in ("root", "run", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "run" / "ledger.json").write_text("{}")
    modules = loaded_without_site(WORKER, str(tmp_path))
    assert {"healthd.checks.exec", "healthd.events.writer", "healthd.agent.conditions.state_files"} <= modules
    assert modules & (UNNEEDED | UNNEEDED_IN_WORKER) == set()
