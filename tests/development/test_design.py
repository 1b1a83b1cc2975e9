"""Rules of the code that import-linter cannot express. `make check` runs both: the contracts are in pyproject.toml.

The tables list what is allowed. A failing test names the file and line that breaks a rule.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MAX_ENTRIES = 16  # in healthd/
MAX_MODULES = 25  # in one folder, except checks/

# Pure modules by package: values in, values out. The current time is an argument.
PURE_BY_PACKAGE = {
    "agent.conditions": (
        "absorb bounds condition endings events impairments incidents intake ledger log_fields log_lines verdict"
    ),
    "agent.hooks": "payload request",
    "agent.evidence": "case describe hardware manifest redact request sources",
    "agent.kernel_log": "coalesce gpu_events parse prefix repeats",
    "agent.kernel_log.rules": ("filesystems host iommu memory network nvidia pcie rule site storage"),
    "agent.repair": "attempt gpu_reset history journal ladder obstacles planner requirements",
    "agent.reporting": "endings fault_timeline next_steps render repair",
    "agent.scheduler": "due",
    "agent.settings": "limits node_sections",
    "agent.slurm": (
        "action_log affected_jobs flapping fleet_limit foreign_reasons node_gpus policy reconcile repair_claim"
    ),
    "agent.worker": "requests",
    "common": "codec duration errors history model moments mountinfo page paths repair_plan text",
    "common.slurm": (
        "admin_comment blocks builtin_reasons commands drain_reason gres hostlist lemon_command node_states output"
    ),
    "events": "emitted outbox parse rows schema sequence",
    "failslow": (
        "always_slow bocd detect groups iteration_time level model node_evidence outliers panels peers "
        "period report steps stream suspects times windows"
    ),
    "failslow.live": "datagram document evidence iterations jobs node_reading series settings",
    "failslow.mitigation": "micro_batches planner stages",
    "failslow.readers": "clean columns",
    "fleet": "figures lint summary table tables view",
    "fleet.answers": "nccl_transport",
    "fleet.collectives": "dump rank_log rank_view transport waits",
    "fleet.statistics": "domain_faults ettr_model intervals lemon_score multiplicity spans weeks wilson",
    "fleet.views": (
        "alarms attribution availability checks compare ettr failslow goodput lemons links nccl rate states"
    ),
    "fleet.status": "node text",
    "host": "cgroup disks",
    "nvidia": "gpu_event nvlink5_texts recovery_action smi_report xid_table xid_texts",
    "scan": ("candidates continuation coupled_events events findings lines messages prefixes quoted table"),
    "validation": "document measurement passes reservation transfers",
    "validation.tools": "cpu dcgmi mndiag nccl_tests nvbandwidth perftest pytorch",
}
PURE = {f"{package}.{name}" for package, names in PURE_BY_PACKAGE.items() for name in names.split()}
# Other modules of healthd that a pure module may import: types, tables that are loaded once, and `guard`, which counts
# an exception instead of raising it.
PURE_MAY_IMPORT = {
    "agent.kernel_log.rules",
    "agent.settings.config",
    "common.guard",
    "common.text",
    "common.values",
    "fleet.answers.*",  # the rows and the documents that a view shows
    "fleet.statistics.job_sizes",
    "fleet.status.queries",
    "nvidia.codes",
}
# Modules of the standard library without a clock, a file or a process.
PURE_STDLIB = (
    "__future__ array bisect calendar collections contextlib copy dataclasses datetime difflib enum functools heapq "
    "itertools math operator re statistics string textwrap types typing zlib"
)
# Modules that a pure module may use for conversions only.
PURE_EXCEPTIONS = {
    ("agent.kernel_log.prefix", "time"),
    ("common.page", "time"),
    ("failslow.live.datagram", "struct"),
    ("failslow.live.document", "json"),
    ("agent.repair.requirements", "json"),
    ("agent.reporting.next_steps", "shlex"),
    ("common.slurm.lemon_command", "shlex"),
    ("scan.findings", "json"),
    ("scan.prefixes", "json"),
    ("scan.candidates", "re2"),
    ("fleet.views.checks", "json"),
    ("fleet.statistics.intervals", "scipy"),
    *((f"fleet.statistics.{name}", "numpy") for name in ("ettr_model", "intervals", "lemon_score")),
    ("events.schema", "json"),
    ("events.outbox", "json"),
    ("events.parse", "json"),
    ("validation.document", "json"),
    ("validation.reservation", "json"),
    *((f"validation.tools.{tool}", "json") for tool in ("cpu", "dcgmi", "nvbandwidth", "pytorch")),
}
IMPURE_CALLS = {
    "open",
    "input",
    "print",
    "time.time",
    "time.monotonic",
    "time.sleep",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
}

# Modules that a check must not import, because the daemon does this once for all checks.
NOT_IN_CHECKS = {"logging", "threading", "asyncio", "multiprocessing"}

# Packages that cost start-up time: the modules that may import them, and those that may do so at the top of the file
# because they are imported late themselves.
LAZY = {
    "pynvml": ({"nvidia.nvml_binding", "agent.recording.host"}, set()),
    "argcomplete": ({"cli.completion"}, set()),  # the extra healthd[completion]
    "yaml": ({"agent.metrics.web_config"}, set()),  # the extra healthd[web]
    "psutil": ({"cli.daemons", "agent.doctor.*"}, set()),
    # the extra healthd[fleet], which no node has
    "duckdb": ({"fleet.*", "failslow.readers.*"}, {"fleet.*"}),
    "tqdm": ({"fleet.*"}, set()),
    "scipy": ({"fleet.*"}, {"fleet.*"}),
    "numpy": (
        {"fleet.*", "failslow.detect_numpy", "validation.tools.cpu_program"},
        {"fleet.*", "failslow.detect_numpy"},
    ),
    "torch": ({"validation.tools.pytorch_program"}, set()),  # that program is run by another Python
    "vl_convert": ({"fleet.*", "failslow.plot"}, {"fleet.*"}),
    "pyspark": ({"fleet.*"}, set()),
    "sqlglot": ({"fleet.*"}, set()),
    "prometheus_client": ({"agent.metrics.exposition", "agent.metrics.http_server"}, {"agent.metrics.http_server"}),
    "pyudev": ({"host.inventory"}, set()),
    "systemd": ({"agent.kernel_log.journal", "agent.reporting.systemd"}, set()),
}

# Modules that use files of the package: adjacent data files, or the program files themselves.
USE_PACKAGE_FILES = {
    "agent.doctor.service",
    "agent.settings.layers",
    "agent.worker.installed_files",
    "fleet.answers.causes",
    "fleet.queries",
    "fleet.report",
    "nvidia.codes",
    "nvidia.fake_machines",
    "validation.run",
}


class Import(NamedTuple):
    module: str  # without "healthd.": "checks.mount"
    line: int
    imported: str  # "healthd.common.model", "os.path"
    at_top: bool

    def __str__(self) -> str:
        return f"healthd/{self.module.replace('.', '/')}.py:{self.line} imports {self.imported}"


@functools.cache
def modules() -> dict[str, ast.Module]:
    paths = [*(ROOT / "healthd").rglob("*.py"), *(ROOT / "checks").glob("*.py")]
    found = {}
    for path in paths:
        base = ROOT / "healthd" if path.is_relative_to(ROOT / "healthd") else ROOT
        name = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text("utf-8"), str(path))
    return found


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_in(module: str, node: ast.AST, known: set[str], at_top: bool = True) -> Iterator[Import]:
    """Yield the imports of a module, except those for the type checker only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(module, child.lineno, alias.name, at_top) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                submodule = f"{child.module}.{alias.name}"
                is_module = submodule.removeprefix("healthd.") in known
                yield Import(module, child.lineno, submodule if is_module else str(child.module), at_top)
        elif not for_types_only(child):
            inner = at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_in(module, child, known, inner)


@functools.cache
def imports() -> list[Import]:
    return [
        module_import for name, tree in modules().items() for module_import in imports_in(name, tree, set(modules()))
    ]


CHECKS = sorted(path.stem for path in (ROOT / "checks").glob("[!_]*.py"))


def own_module(imported: str) -> str | None:
    """Return the name of an imported module of healthd ("common.model"), or None for any other module."""
    return imported.removeprefix("healthd.") if imported.startswith("healthd.") else None


def matches(module: str, patterns: set[str]) -> bool:
    return any(module == p or (p.endswith(".*") and module.startswith(p[:-1])) for p in patterns)


def imports_of(module: str) -> list[Import]:
    return [module_import for module_import in imports() if module_import.module == module]


def test_top_of_package_has_few_entries() -> None:
    found = [path for path in (ROOT / "healthd").iterdir() if path.is_file() or any(path.glob("**/*.py"))]
    entries = [path.name for path in found]  # without folders of an older checkout, which have bytecode only
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_no_folder_has_many_modules() -> None:
    folders = {path.parent for path in (ROOT / "healthd").rglob("*.py")}
    counts = {str(folder.relative_to(ROOT)): len([*folder.glob("[!_]*.py")]) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MAX_MODULES} == {}


def test_only_listed_modules_use_package_files() -> None:
    words = ("__file__", "importlib.resources", "import resources")
    found = {name for name, tree in modules().items() if any(word in ast.unparse(tree) for word in words)}
    assert found == USE_PACKAGE_FILES


def test_pure_modules_exist() -> None:
    assert PURE - set(modules()) == set()


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_module_uses_no_clock_file_or_process(module: str) -> None:
    allowed = {*PURE_STDLIB.split(), "msgspec"} | {imported for name, imported in PURE_EXCEPTIONS if name == module}
    third_party = [module_import for module_import in imports_of(module) if own_module(module_import.imported) is None]
    assert [
        str(module_import) for module_import in third_party if module_import.imported.partition(".")[0] not in allowed
    ] == []
    calls = (node for node in ast.walk(modules()[module]) if isinstance(node, ast.Call))
    assert [
        f"line {call.lineno}: {ast.unparse(call.func)}()" for call in calls if ast.unparse(call.func) in IMPURE_CALLS
    ] == []


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_module_imports_only_pure_modules(module: str) -> None:
    own_imports = [(module_import, own_module(module_import.imported)) for module_import in imports_of(module)]
    assert [
        str(module_import) for module_import, name in own_imports if name and not matches(name, PURE | PURE_MAY_IMPORT)
    ] == []


def test_text_from_outside_is_parsed_as_ascii() -> None:
    r"""Only healthd/common/text.py compiles patterns for text and tests for numbers.

    Python's "\\d", int() and str.isdecimal() accept digits of every script. Patterns for bytes match ASCII only.
    """
    mistakes = []
    for name, tree in modules().items():
        for call in ast.walk(tree):
            if name == "common.text" or not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            tests_text = call.func.attr in ("isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum")
            is_re_call = (
                isinstance(call.func.value, ast.Name) and call.func.value.id == "re" and call.func.attr != "escape"
            )
            is_for_bytes = call.args and isinstance(call.args[0], ast.Constant | ast.BinOp) and _is_bytes(call.args[0])
            if tests_text or (is_re_call and not is_for_bytes):
                mistakes.append(f"{name}:{call.lineno}: {ast.unparse(call.func)}()")
    assert mistakes == []


def test_text_from_outside_is_split_at_newlines_only() -> None:
    """str.splitlines() also splits at form feeds, U+2028 and others, which users can put into names and comments."""
    packages = ("checks.", "agent.slurm.", "common.slurm.", "failslow.live.")
    mistakes = [
        f"{name}:{call.lineno}"
        for name, tree in modules().items()
        if name.startswith(packages)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "splitlines"
    ]
    assert mistakes == []


def _is_bytes(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, bytes) for part in ast.walk(node))


@pytest.mark.parametrize("check", CHECKS)
def test_check_uses_no_log_or_threads(check: str) -> None:
    found = imports_of(f"checks.{check}")
    assert [
        str(module_import) for module_import in found if module_import.imported.partition(".")[0] in NOT_IN_CHECKS
    ] == []


@pytest.mark.parametrize("package", sorted(LAZY))
def test_slow_package_is_imported_late_and_in_few_modules(package: str) -> None:
    anywhere, at_top = LAZY[package]
    found = [module_import for module_import in imports() if module_import.imported.partition(".")[0] == package]
    assert [str(module_import) for module_import in found if not matches(module_import.module, anywhere)] == []
    assert [
        str(module_import)
        for module_import in found
        if module_import.at_top and not matches(module_import.module, at_top)
    ] == []


PRINT_LOADED = f"import sys; print(*sorted({set(LAZY)!r} & set(sys.modules)))"


def loaded_after(program: str) -> str:
    """Return the packages of LAZY that an interpreter has loaded after a program."""
    command = [sys.executable, "-c", f"{program}\n{PRINT_LOADED}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_help_loads_no_slow_package() -> None:
    program = """
from healthd.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
"""
    assert loaded_after(program) == ""


def test_daemon_does_not_load_nvml() -> None:
    program = "import healthd.agent.daemon; from healthd.agent.settings import registry; registry.built_in_checks()"
    assert loaded_after(program) == ""


@pytest.mark.parametrize("check", CHECKS)
def test_check_has_test_file(check: str) -> None:
    assert (ROOT / f"tests/checks/test_{check}.py").exists()


@pytest.mark.parametrize("check", CHECKS)
def test_check_has_table_in_sample_settings(check: str) -> None:
    text = (ROOT / "conf/healthd.toml").read_text("utf-8")
    assert f"[checks.{check}]" in text or f"[checks.{check}." in text


def test_importlib_is_used_in_three_modules_only() -> None:
    """import-linter does not see imports through importlib."""
    found = {name for name, tree in modules().items() if "import_module" in ast.unparse(tree)}
    assert found == {"agent.settings.registry", "api", "cli.main"}
