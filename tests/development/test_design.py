"""The rules of the house that a reader would otherwise have to keep in mind: who may import whom, and what.

The tables say what is allowed; a failing test names the file and line that breaks a rule.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# Pure modules, by the folder that they lie in: values in, values out; `now` is an argument.
PURE_OF = {
    "": "convert errors model past paths plausible text",
    "failslow": (
        "answer bocd detect groups iteration_time level model names outliers peers period slow_groups slow_nodes "
        "steps stream throughout times told windows"
    ),
    "failslow.mitigation": "advice micro_batches planner replay stages",
    "failslow.readers": "clean columns",
    "fleet": "hostlist lint table tables unread",
    "fleet.now": "node text",
    "judge": "absorb bounds condition endings incidents intake ledger log_fields log_lines telling verdict",
    "kernel": "coalesce parse prefix repeats",
    "kernel.lines": "filesystems host iommu memory network nvidia nvidia_driver pcie rule site storage",
    "live": "budget datagram evidence iterations jobs judged reading rhythm sample series settings told",
    "machine": "cgroup disks mountinfo",
    "nvidia": "nvlink5_texts recovery xid_table xid_texts",
    "say": "course duration ends event_rows next_steps page render troubles",
    "scan": (
        "candidates coupled events heard judged lines literals messages neighbours quoted table unprefixed unrecognised"
    ),
    "settings": "nodes",
    "slurm": (
        "admin_comment commands flapping fleet_limit gres gres_conf lemon_command log_lines look node_gpus node_states "
        "others_reasons output "
        "policy reason slurm_reasons told victims"
    ),
    "stream": "event line outbox seen told",
    "validation": "carried document history judge measurement pairs passes reservation text",
    "validation.tools": "cpu dcgmi nccl_tests nvbandwidth perftest pytorch",
    "work": "requests schedule unchanged",
}
PURE = {f"{folder}.{name}".lstrip(".") for folder, names in PURE_OF.items() for name in names.split()}
# What they may import of healthd besides each other: types, tables that are loaded once, and `guard`: what a function
# stumbles over is told once, instead of ending who called it.
PURE_MAY = {"config", "fleet.now.asked", "guard", "kernel.lines", "nvidia.codes"}
FOR_ALL = {"text", "values"}  # how text of others is read, and what a frozen class is made by
# What a pure module may import of the standard library: nothing that knows a clock, a file or a process ...
PURE_STDLIB = (
    "__future__ array bisect calendar collections contextlib copy dataclasses datetime difflib enum functools heapq "
    "itertools math operator re statistics string textwrap types typing zlib"
)
# ... but for these, which convert only,
PURE_EXCEPTIONS = {
    ("kernel.prefix", "time"),
    ("say.page", "time"),
    ("live.datagram", "struct"),
    ("live.told", "json"),
    ("failslow.mitigation.advice", "json"),
    ("past", "json"),
    ("say.next_steps", "shlex"),
    ("slurm.lemon_command", "shlex"),
    ("say.troubles", "shlex"),
    ("scan.heard", "marshal"),
    ("scan.judged", "json"),
    ("scan.unprefixed", "json"),
    ("scan.literals", "re2"),
    ("stream.event", "json"),
    ("stream.outbox", "json"),
    ("stream.line", "json"),
    ("validation.document", "json"),
    ("validation.reservation", "json"),
    ("validation.history", "json"),
    *((f"validation.tools.{tool}", "json") for tool in ("cpu", "dcgmi", "nvbandwidth", "pytorch")),
}
# and for the calls that would make them a lie.
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

# What of healthd a check may import: the words, its settings, its host. No daemon, no log, no other check.
CHECKS_MAY = {
    "machine.cgroup",
    "nvidia.codes",
    "config",
    "machine.disks",
    "host",
    "machine.gpu_reset",
    "machine.infiniband",
    "machine.inventory",
    "machine.network_card",
    "live.told",
    "model",
    "machine.mountinfo",
    "nvidia.nvlink5_texts",
    "nvml",
    "machine.ownership",
    "past",
    "plausible",
    "machine.program",
    "validation.document",
    "machine.system",
    "nvidia.recovery",
    "nvidia.xid_table",
    "nvidia.xid_texts",
    "text",
    "values",
}
# What a check may not import at all: the core does these once for all checks.
CHECKS_MAY_NOT = {"logging", "threading", "asyncio", "multiprocessing"}

# Who may import a module of healthd ("*" is everybody below that folder).
ONLY = {
    "cli.main": {"__main__", "cli.completion"},  # ... which tells a shell of all commands
    "client": set(),  # jobs do
    "daemon": {"cli.run"},
    "work.worker": {"cli.baseline_file", "cli.check", "cli.doctor", "daemon", "work.forked", "work.runner", "worker"},
    "work.forked": {"cli.check"},  # the daemon's worker is a program
    "nvml": {
        "checks.*",
        "nvidia.fake_nvml",
        "nvidia.fake_scenario",
        "host",
        "machine.inventory",
        "record.nvml_recording",
        "work.present",
        "work.worker",
    },
    "nvidia.fake_nvml": {"live.sampling", "record.nvml_recording", "work.worker"},
    "nvidia.fake_scenario": {"cli.flags", "nvidia.fake_nvml"},
    "say.service": {"daemon", "say.publisher"},
}

# Packages that cost start-up time: which modules may import them at all, and which of these at their top (they are
# imported late themselves).
LAZY = {
    "pynvml": ({"nvml_binding", "record.nvml_recording"}, set()),
    "yaml": ({"say.web_config"}, set()),  # the extra healthd[web]
    "psutil": ({"cli.running", "doctor.*"}, set()),
    # the extra healthd[fleet], which no node has
    "duckdb": ({"fleet.*", "failslow.readers.*"}, {"fleet.*"}),
    "tqdm": ({"fleet.*"}, set()),
    "scipy": ({"fleet.*"}, {"fleet.*"}),
    "numpy": (
        {"fleet.*", "failslow.many", "failslow.quiet", "validation.tools.cpu_program"},
        {"fleet.*", "failslow.many", "failslow.quiet"},
    ),
    "torch": ({"validation.tools.pytorch_program"}, set()),  # that program is run by another Python
    "altair": ({"fleet.*"}, {"fleet.*"}),
    "pyspark": ({"fleet.*"}, set()),
    "sqlglot": ({"fleet.*"}, set()),
    "prometheus_client": ({"say.metrics_text", "say.metrics_page"}, {"say.metrics_page"}),
    "pyudev": ({"machine.inventory"}, set()),
    "systemd": ({"kernel.journal", "say.service"}, set()),
}

# The rooms, from the words up. A module imports its own room and those below it; those of one tier know nothing of each
# other. The checks, and who loads them, have rules of their own below.
TIERS: tuple[tuple[str, ...], ...] = (
    ("words", "client"),  # which is copied into containers, by itself
    ("machine", "nvidia"),
    ("kernel", "settings", "stream"),
    ("judge",),
    ("slurm",),
    ("record", "say"),
    ("control",),
    ("work", "failslow"),
    ("live",),
    ("daemon", "scan", "fleet", "doctor", "validation"),
    ("cli",),
)
# What lies in a room and is a word all the same: a check reaches them through its Host.
WORDS = {
    *("machine.system", "machine.program", "machine.ownership", "machine.mountinfo", "nvml_binding"),
    "fleet.hostlist",  # Slurm's host lists, which the settings have too
}
# Where `python -m healthd`, `-m healthd.worker` and `-m healthd.trial` begin.
DOORS = {"__main__", "worker", "trial"}

# Who imports a check, or the package of them: the registry, which loads each by its name.
KNOW_CHECKS = {"settings.registry"}
# The modules that read data files of their own package, and those that look at the program's files.
KNOW_THEIR_PLACE = {
    *("nvidia.fake_machines", "nvidia.codes", "settings.layers", "fleet.questions", "fleet.report", "validation.run"),
    *("doctor.files", "work.own_files"),
}

# Nothing in these folders imports that module: reports over a cluster's history know no daemon.
NEVER = {folder: {"daemon", "work.*", "say.service"} for folder in ("fleet.*", "failslow.*")}


class Import(NamedTuple):
    module: str  # without "healthd.": "checks.mount"
    line: int
    what: str  # "healthd.model", "os.path"
    at_top: bool

    def __str__(self) -> str:
        return f"healthd/{self.module.replace('.', '/')}.py:{self.line} imports {self.what}"


def modules() -> dict[str, ast.Module]:
    paths = [*(ROOT / "healthd").rglob("*.py"), *(ROOT / "checks").glob("*.py")]
    found = {}
    for path in paths:
        where = path.relative_to(ROOT / "healthd") if path.is_relative_to(ROOT / "healthd") else path.relative_to(ROOT)
        name = ".".join(where.with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text("utf-8"), str(path))
    return found


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(module: str, node: ast.AST, known: set[str], at_top: bool = True) -> Iterator[Import]:
    """Every import in a module, those for the type checker only left out."""
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
            yield from imports_of(module, child, known, inner)


MODULES = modules()
IMPORTS = [i for name, tree in MODULES.items() for i in imports_of(name, tree, set(MODULES))]
CHECKS = sorted(name.removeprefix("checks.") for name in MODULES if name.startswith("checks."))


def own(what: str) -> str | None:
    """The module of healthd that an import means ("model"), None if it is another's."""
    return what.removeprefix("healthd.") if what.startswith("healthd.") else None


def matches(module: str, patterns: set[str]) -> bool:
    return any(module == p or (p.endswith(".*") and module.startswith(p[:-1])) for p in patterns)


def of(pattern: str) -> list[Import]:
    return [i for i in IMPORTS if matches(i.module, {pattern})]


def room(module: str) -> str:
    if module in WORDS:
        return "words"
    return module.partition(".")[0] if "." in module or module in ("daemon", "client") else "words"


def tier(module: str) -> int:
    return next(number for number, rooms in enumerate(TIERS) if room(module) in rooms)


def every_import(module: str) -> set[str]:
    """The modules of healthd that one imports anywhere: also late, also for the type checker only."""
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {own(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            submodules = {own(f"{node.module}.{alias.name}") for alias in node.names} & set(MODULES)
            found |= submodules or {own(str(node.module))}
    return {name for name in found if name in MODULES and name != module}


IN_ROOMS = sorted(name for name in MODULES if name not in DOORS and not name.startswith("checks") and name)


def test_a_room_imports_only_rooms_below_it() -> None:
    up = {
        (module, other)
        for module in IN_ROOMS
        for other in every_import(module)
        if not other.startswith("checks") and room(module) != room(other) and tier(other) >= tier(module)
    }
    assert up == set()


def circles(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The groups of modules of which each reaches all others of its group, by whatever number of imports."""

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        ahead = list(imports[module])
        while ahead:
            if (other := ahead.pop()) not in found:
                found.add(other)
                ahead.extend(imports[other])
        return found

    reach = {module: reached(module) for module in imports}
    return {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in imports
        if module in reach[module]
    }


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, {frozenset("ab")}),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d", "a"}}, {frozenset("abc"), frozenset("de")}),
    ],
)
def test_a_circle_of_imports_is_found(imports: dict[str, set[str]], found: set[frozenset[str]]) -> None:
    assert circles(imports) == found


def test_no_modules_import_each_other() -> None:
    """Late imports and those for the type checker make a circle too: neither part can be read without the other."""
    assert circles({module: every_import(module) for module in MODULES}) == set()


def test_only_the_registry_knows_the_checks() -> None:
    knowing = {name for name in MODULES if any(matches(other, {"checks", "checks.*"}) for other in every_import(name))}
    assert knowing == KNOW_CHECKS


@pytest.mark.one_python
def test_only_owners_of_data_folders_look_for_files_of_the_package() -> None:
    asks = ("__file__", "importlib.resources", "import resources")
    knowing = {name for name, tree in MODULES.items() if any(word in ast.unparse(tree) for word in asks)}
    assert knowing == KNOW_THEIR_PLACE


def test_the_rules_speak_of_modules_that_exist() -> None:
    named = {*PURE, *ONLY, *CHECKS_MAY} - {"__main__", "daemon"}
    assert named - set(MODULES) == set()


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_knows_no_clock_file_or_process(module: str) -> None:
    allowed = set(PURE_STDLIB.split()) | {what for name, what in PURE_EXCEPTIONS if name == module}
    wrong = [i for i in of(module) if not i.what.startswith("healthd") and i.what.partition(".")[0] not in allowed]
    assert list(map(str, wrong)) == []
    calls = (node for node in ast.walk(MODULES[module]) if isinstance(node, ast.Call))
    assert [f"line {c.lineno}: {ast.unparse(c.func)}()" for c in calls if ast.unparse(c.func) in IMPURE_CALLS] == []


def test_text_of_others_is_read_as_ascii() -> None:
    """Only healthd/text.py makes patterns for text and asks whether it is a number: for Python alone "\\d", int() and
    str.isdecimal() take the digits of every script. Patterns for bytes know ASCII only."""
    wrong = []
    for name, tree in MODULES.items():
        for call in ast.walk(tree):
            if name == "text" or not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            asks = call.func.attr in ("isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum")
            of_re = isinstance(call.func.value, ast.Name) and call.func.value.id == "re" and call.func.attr != "escape"
            of_bytes = call.args and isinstance(call.args[0], ast.Constant | ast.BinOp) and _is_bytes(call.args[0])
            if asks or (of_re and not of_bytes):
                wrong.append(f"{name}:{call.lineno}: {ast.unparse(call.func)}()")
    assert wrong == []


def test_text_of_others_is_split_at_newlines_only() -> None:
    """str.splitlines() also splits at form feeds, U+2028 and others, which users can put into names and comments."""
    folders = ("checks.", "slurm.", "live.")
    wrong = [
        f"{name}:{call.lineno}"
        for name, tree in MODULES.items()
        if name.startswith(folders)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "splitlines"
    ]
    assert wrong == []


def _is_bytes(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, bytes) for part in ast.walk(node))


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_stands_on_pure_modules(module: str) -> None:
    assert [str(i) for i in of(module) if own(i.what) and own(i.what) not in PURE | PURE_MAY | FOR_ALL] == []


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_imports_the_words_its_settings_and_its_host(check: str) -> None:
    found = of(f"checks.{check}")
    assert [str(i) for i in found if own(i.what) and own(i.what) not in CHECKS_MAY] == []
    assert [str(i) for i in found if i.what.partition(".")[0] in CHECKS_MAY_NOT] == []


@pytest.mark.parametrize("module", sorted(ONLY))
def test_a_module_is_imported_only_by_those_that_need_it(module: str) -> None:
    wrong = [i for i in IMPORTS if own(i.what) == module and not matches(i.module, ONLY[module])]
    assert list(map(str, wrong)) == []


@pytest.mark.parametrize("package", sorted(LAZY))
def test_a_package_that_costs_start_up_time_is_imported_late_and_in_one_place(package: str) -> None:
    anywhere, at_top = LAZY[package]
    found = [i for i in IMPORTS if i.what.partition(".")[0] == package]
    assert [str(i) for i in found if not matches(i.module, anywhere)] == []
    assert [f"{i} at its top" for i in found if i.at_top and not matches(i.module, at_top)] == []


def never(folder: str, imports: Iterable[Import]) -> list[str]:
    """Those of the imports that no module of this folder may have."""
    return [str(i) for i in imports if (what := own(i.what)) and matches(what, NEVER[folder])]


@pytest.mark.parametrize("folder", sorted(NEVER))
def test_what_only_reads_history_knows_no_daemon(folder: str) -> None:
    assert never(folder, of(folder)) == []


def test_a_report_that_knows_the_daemon_or_the_worker_is_found() -> None:
    wrong, right = ("healthd.work.runner", "healthd.daemon"), ("healthd.model", "healthd.judge.incidents")
    imports = [Import("fleet.mttf", line, what, True) for line, what in enumerate((*wrong, *right), 1)]
    assert never("fleet.*", imports) == [str(one) for one in imports[:2]]


LOADED = f"import sys; print(*sorted({set(LAZY)!r} & set(sys.modules)))"


def loaded_after(program: str) -> str:
    """Which of the packages in LAZY an interpreter has loaded after a program."""
    command = [sys.executable, "-c", f"{program}\n{LOADED}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_help_loads_nothing_that_it_does_not_need() -> None:
    program = """
from healthd.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
"""
    if "cli.main" in MODULES:
        assert loaded_after(program) == ""


def test_the_daemon_never_loads_nvml() -> None:
    program = "import healthd.settings.registry; healthd.settings.registry.built_in()"
    if "daemon" in MODULES:
        program += "; import healthd.daemon"
    assert loaded_after(program) == ""


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_comes_with_its_test(check: str) -> None:
    assert (ROOT / f"tests/test_{check}.py").exists()


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_comes_with_its_table_in_the_sample_settings(check: str) -> None:
    sample = ROOT / "conf/healthd.toml"
    if sample.exists():
        assert f"[checks.{check}]" in sample.read_text() or f"[checks.{check}." in sample.read_text()


def test_modules_are_imported_by_name_only_where_the_checks_and_the_commands_are_found() -> None:
    """importlib is an import that the tables above do not see."""
    asking = {name for name, tree in MODULES.items() if "import_module" in ast.unparse(tree)}
    assert asking == {"settings.registry", "cli.main"}
