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
import test_own_files

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[1]
# A command as its process begins; what is loaded when it has ended.
COMMAND = """
import json, sys
before = set(sys.modules)  # what .pth files load
from healthd.cli.main import main
sys.argv[1:] = json.loads(sys.argv[1])
main()
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""
BASE = {"", "cli", "cli.flags", "cli.main", "cli.terminal", "control", "control.protocol", "errors", "text"}
SETTINGS = {
    *("config", "convert", "guard", "host", "plausible", "settings", "settings.layers", "settings.registry"),
    *("settings.settle", "toml", "data", "nvml", "model", "past", "contract", "values"),
    *("machine", "machine.disks", "machine.inventory", "machine.mountinfo", "machine.ownership", "machine.program"),
    *("machine.shortage", "machine.system"),
}
# What the checks that come with healthd import beside the settings.
CHECKS = {
    *("checks", "live", "live.told", "machine.cgroup", "machine.detection_pause", "machine.files"),
    *("machine.gpu_reset", "machine.infiniband", "machine.network_card", "nvidia", "nvidia.codes"),
    *("nvidia.recovery", "nvidia.xid_table"),
}
SHOWN = {"say", "say.duration", "say.ends", "say.next_steps", "say.render"}
ROUND = {
    *("cli.check", "judge", "judge.absorb", "judge.bounds", "judge.condition", "judge.endings", "judge.intake"),
    *("judge.ledger", "judge.limits"),
    *("judge.verdict", "kernel", "kernel.coalesce", "kernel.kmsg", "kernel.lines", "kernel.open"),
    *("kernel.parse", "kernel.prefix", "kernel.repeats", "kernel.source", "machine.oom", "record", "record.recording"),
    *("say.status", "say.troubles", "stream", "stream.event", "stream.outbox", "stream.told", "work"),
    *("work.forked", "work.once", "work.requests", "work.results", "work.runner", "work.schedule", "work.unchanged"),
    "work.worker",
}
FAMILIES = {"checks", "kernel.lines"}  # folders whose files all belong to what is listed with them

# words -> what of healthd it may load
BUDGETS = {
    "--version": BASE,
    "--help": BASE,
    "hook healthcheck": BASE | {"cli.hook", "control.client"},
    "hook epilog": BASE | {"cli.hook", "control.client", "say", *SHOWN},
    "status": BASE | SHOWN | {"cli.control", "control.client", "cli.running", "cli.watch", "say.event_rows"},
    "explain gpu_xid/79": BASE
    | SETTINGS
    | CHECKS
    | SHOWN
    | {
        *("control.client", "cli.explain", "judge", "judge.absorb", "judge.bounds", "judge.condition", "judge.verdict"),
        *("nvidia.xid_texts", "say.course", "say.explanation", "slurm", "slurm.fleet_limit", "slurm.flapping"),
        *("slurm.policy", "slurm.reason", "slurm.slurm_reasons"),
    },
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
    own = {name for name in own if name.rpartition(".")[0] not in FAMILIES}
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
    *("asyncio", "bz2", "difflib", "email", "hashlib", "http", "ipaddress", "lzma", "multiprocessing", "numpy"),
    *("pathlib", "pkgutil", "prometheus_client", "pynvml", "pyudev", "secrets", "shutil", "ssl", "tempfile"),
    *("urllib", "yaml"),
}
# The worker has hardly ever a word to say, and copies a ledger without knowing what is in it.
NO_USE_TO_WORKER = {
    *("argparse", "csv", "datetime", "gettext", "logging", "random", "textwrap", "traceback"),
    *("healthd.cli", "healthd.daemon", "healthd.judge.ledger", "healthd.say", "healthd.stream.event"),
    *("healthd.judge.ledger_file", "healthd.kernel", "healthd.work.runner"),
}
# A worker that has looked with each check but those that ask NVML, whose binding brings its own, and has kept what the
# daemon gives it.
WORKER = """
import sys
from healthd.convert import dump
from healthd.settings.registry import built_in
from healthd.work.worker import Setup, Worker, _host
folder = sys.argv[1]
setup = Setup(root=f"{folder}/root", state_dir=f"{folder}/state", runtime_dir=f"{folder}/run")
worker = Worker(setup, *_host(setup))
for check in built_in().values():
    if check.runs and check.uses != "nvml":
        config = dump(check.config())
        worker.answer(dict(op="run", check=check.name, instance="", config=config, past="", boot_id="b", number=1))
kept = {"from": f"{folder}/run", "to": f"{folder}/state", "names": ["ledger.json"]}
for request in (
    dict(op="save_copy", keep=False, **kept),
    dict(op="load_copy", **kept | {"from": f"{folder}/state"}),
    dict(op="append_events", to=f"{folder}/state", lines=["{}"], again=False),
    dict(op="read_cluster_name"),
    dict(op="look_at_own_files", paths=[]),
):
    assert not worker.answer(request)["error"], worker.answer(request)
print(*sys.modules)
"""


def loaded_without_site(program: str, *argv: str) -> set[str]:
    """By a Python that has no .pth files, as where healthd is installed: those of a checkout load some of it."""
    paths = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, *argv],
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
    assert "healthd.daemon" in modules
    assert modules & NO_USE == set()


def test_a_worker_has_nothing_that_only_others_need(tmp_path: Path) -> None:
    for name in ("root", "run", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "run" / "ledger.json").write_text("{}")
    modules = loaded_without_site(WORKER, str(tmp_path))
    assert {"healthd.checks.exec", "healthd.stream.file", "healthd.judge.kept_file"} <= modules
    assert modules & (NO_USE | NO_USE_TO_WORKER) == set()
