"""What a command imports is what it costs: each has a list of healthd's parts, and of libraries that it must not load.

A module that is missing here is one more for everybody who types that command. Where it is needed it is put here, too.
The daemon and its worker have what they import for months: at the end, what they can do without.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.agent.worker import test_installed_files as test_own_files

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
# A command as its process begins; what is loaded when it has ended.
COMMAND = """
import json, sys
before = set(sys.modules)  # what .pth files load
from healthd.cli.main import main
sys.argv[1:] = json.loads(sys.argv[1])
main()
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""


def names(text: str) -> set[str]:
    return set(text.split())


BASE = names("""
    agent agent.control agent.control.protocol cli cli.flags cli.main cli.terminal common common.errors common.paths
    common.text
""")
SETTINGS = names("""
    agent.settings agent.settings.config agent.settings.contract agent.settings.effective agent.settings.layers
    agent.settings.limits agent.settings.registry common.codec common.guard common.history common.job_failures
    common.model common.moments common.mountinfo common.ownership common.toml common.values host host.disks
    host.host host.inventory host.program host.shortage host.system nvidia nvidia.nvml
""")
# Modules that the built-in checks import besides the settings.
CHECKS = names("""
    api
    checks common.atomic_files common.detection_pause failslow failslow.live failslow.live.document host.cgroup
    host.gpu_reset host.infiniband host.network_card nvidia.codes nvidia.recovery_action nvidia.xid_table
""")
SHOWN = names("""
    agent.reporting agent.reporting.endings agent.reporting.next_steps agent.reporting.render common.duration
""")
ROUND = names("""
    agent.conditions agent.conditions.absorb agent.conditions.bounds agent.conditions.condition
    agent.conditions.endings agent.conditions.impairments agent.conditions.intake agent.conditions.ledger
    agent.conditions.verdict agent.kernel_log agent.kernel_log.coalesce agent.kernel_log.kmsg
    agent.kernel_log.open_source agent.kernel_log.parse agent.kernel_log.prefix agent.kernel_log.repeats
    agent.kernel_log.rules agent.kernel_log.source agent.recording agent.recording.recording agent.reporting.status
    agent.reporting.troubles agent.scheduler agent.scheduler.due agent.scheduler.one_round agent.worker
    agent.worker.client agent.worker.forked agent.worker.process agent.worker.requests agent.worker.results
    cli.check common.page events events.emitted events.outbox events.schema host.oom
    nvidia.fake_machines
""")
EXPLAIN = names("""
    agent.conditions agent.conditions.absorb agent.conditions.bounds agent.conditions.condition
    agent.conditions.verdict agent.control.client agent.reporting.explanation agent.reporting.fault_course
    agent.slurm agent.slurm.flapping agent.slurm.fleet_limit agent.slurm.policy cli.explain common.page common.slurm
    common.slurm.builtin_reasons common.slurm.drain_reason common.slurm.node_states nvidia.fake_machines
    nvidia.xid_texts
""")
FAMILIES = {"checks", "agent.kernel_log.rules"}  # folders whose files all belong to what is listed with them

# command -> the modules of healthd that it may load
BUDGETS = {
    "--version": BASE,
    "--help": BASE,
    "hook healthcheck": BASE | {"agent.control.client", "cli.hook"},
    "hook epilog": BASE | SHOWN | {"agent.control.client", "cli.hook"},
    "status": BASE
    | SHOWN
    | {"agent.control.client", "cli.control", "cli.daemons", "cli.watch", "common.page", "events", "events.rows"},
    "explain gpu_xid/79": BASE | SETTINGS | CHECKS | SHOWN | EXPLAIN,
    "check": BASE | SETTINGS | CHECKS | SHOWN | ROUND,
}
# Libraries that none of these may load: a node's command has no use for them, or not at its start.
NEVER = {
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


def loaded(words: str, tmp_path: Path) -> set[str]:
    directory = [] if words.startswith(("-", "check", "explain")) else ["--runtime-dir", str(tmp_path)]
    argv = [sys.executable, "-c", COMMAND, json.dumps([*words.split(), *directory])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=ROOT, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", BUDGETS)
def test_a_command_loads_what_it_needs_and_no_more(words: str, tmp_path: Path) -> None:
    modules = loaded(words, tmp_path)
    own = {name.removeprefix("healthd").removeprefix(".") for name in modules if name.partition(".")[0] == "healthd"}
    own = {name for name in own if name and name.rpartition(".")[0] not in FAMILIES}
    assert own - BUDGETS[words] == set()
    assert modules & NEVER == set()


def test_no_module_of_a_budget_is_gone() -> None:
    there = {
        ".".join(path.relative_to(ROOT / "healthd").with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        for path in (ROOT / "healthd").rglob("*.py")
    } | {"checks"}
    assert set().union(*BUDGETS.values()) - there == set()


def test_each_command_that_a_node_runs_often_has_a_budget() -> None:
    text = (ROOT / "bench" / "start.py").read_text()
    measured = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    assert {word for words in BUDGETS if words != "--help" for word in words.split()} <= measured


# --- what stays: the daemon and its worker

# Each of these was in both once, or comes with what looks harmless: pathlib brings urllib and ipaddress, shutil brings
# bz2 and lzma, secrets a libcrypto.
NO_USE = {
    *("ast", "dataclasses", "dis", "inspect"),  # a site's check may import them
    *("asyncio", "bz2", "difflib", "email", "hashlib", "http", "ipaddress", "lzma", "multiprocessing", "numpy"),
    *("pathlib", "pkgutil", "prometheus_client", "pynvml", "pyudev", "secrets", "shutil", "ssl", "tempfile"),
    *("urllib", "yaml"),
}
# The worker has hardly ever a word to say, and copies a ledger without knowing what is in it.
NO_USE_TO_WORKER = {
    *("argparse", "csv", "gettext", "logging", "random", "traceback"),
    *(
        "healthd.cli",
        "healthd.agent.daemon",
        "healthd.agent.conditions.ledger",
        "healthd.agent.reporting",
        "healthd.events.schema",
    ),
    *("healthd.agent.conditions.ledger_codec", "healthd.agent.kernel_log", "healthd.agent.worker.client"),
}
# A worker that has looked with each check but those that ask NVML, whose binding brings its own, and has kept what the
# daemon gives it.
WORKER = """
import sys
from healthd.common.codec import dump
from healthd.agent.settings.registry import built_in
from healthd.agent.worker.process import Setup, Worker, _host
from healthd.agent.worker.requests import *
from healthd.common.values import decode, encode
folder = sys.argv[1]
setup = Setup(root=f"{folder}/root", state_dir=f"{folder}/state", runtime_dir=f"{folder}/run")
worker = Worker(setup, *_host(setup))
for check in built_in().values():
    if check.runs and check.uses != "nvml":
        worker.answer(Run(check.name, "", dump(check.config()), boot_id="b"))
for number, request in enumerate((
    SaveCopy(f"{folder}/run", f"{folder}/state", ("ledger.json",)),
    LoadCopy(f"{folder}/state", ("ledger.json",)),
    AppendEvents(f"{folder}/state", ("{}",), False),
    ReadClusterName(),
    LookAtOwnFiles(()),
)):
    response = decode(Response, worker.respond(encode(Message(number, request))).partition(BETWEEN)[0])
    assert not response.error, response
print(*sys.modules)
"""


# msgspec imports it, with inspect, where it is installed. Only a development tool needs it.
WITHOUT_TOOLS = "import sys; sys.modules['typing_extensions'] = None"


def loaded_without_site(program: str, *argv: str) -> set[str]:
    """By a Python that has no .pth files, as where healthd is installed: those of a checkout load some of it."""
    paths = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{WITHOUT_TOOLS}\n{program}", *argv],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return set(done.stdout.split())


def test_a_daemon_has_no_library_that_it_can_do_without(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    (tmp_path / "healthd.toml").write_text(test_own_files.SETTINGS.format(tmp_path).replace("127.0.0.1:0", "off"))
    modules = loaded_without_site(test_own_files.READY, str(tmp_path / "healthd.toml"))
    assert "healthd.agent.daemon" in modules
    assert modules & NO_USE == set()


def test_a_worker_has_nothing_that_only_others_need(tmp_path: Path) -> None:
    for name in ("root", "run", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "run" / "ledger.json").write_text("{}")
    modules = loaded_without_site(WORKER, str(tmp_path))
    assert {"healthd.checks.exec", "healthd.events.writer", "healthd.agent.conditions.state_files"} <= modules
    assert modules & (NO_USE | NO_USE_TO_WORKER) == set()
