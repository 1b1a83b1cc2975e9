"""Tests of the contract: the names and types that checks declare. A misspelled hook would never be called."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from healthd.agent.settings import registry
from healthd.agent.settings.contract import NAMES, Contract, read_contract

ROOT = Path(__file__).parents[3]
CHECKS = registry.built_in_checks()


def unused_public_names(source: str) -> list[str]:
    """Return the public top-level names that neither the module itself nor healthd uses."""
    tree = ast.parse(source)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        defined += [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return sorted({name for name in defined if name not in used and name not in NAMES and not name.startswith("_")})


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_public_check_names_are_declared_or_used(name):
    assert unused_public_names((ROOT / f"checks/{name}.py").read_text("utf-8")) == []


@pytest.mark.parametrize(
    "typo",
    [
        'AFTER_EVENT = ("xid",)',
        "HOLD_RESUME = False",
        "USED: str = 'nvml'",
        "A, PERS = 1, 2\nprint(A)",
        "def corelate(events, node, config):\n    yield",
        "class Configs: ...",
    ],
)
def test_misspelled_name_is_found(typo):
    assert len(unused_public_names(f"{typo}\ndef run(host, config, past):\n    yield from ()")) == 1


def test_every_contract_name_is_described():
    described = re.findall(
        r"(?m)^(\w+) {2,}\S", inspect.cleandoc(Contract.__doc__ or "")
    )  # Python 3.13 dedents docstrings
    assert tuple(described) == NAMES


def test_contract_for_empty_module_has_defaults():
    assert read_contract(ast) == Contract()


# --- types


WRONG_TYPES = {
    "Config": "Config = int",
    "PER": "PER = 3",
    "USES": "USES = ('nvml',)",
    "WHEN": "WHEN = None",
    "AFTER_EVENTS": "AFTER_EVENTS = (3,)",
    "HOLDS_RESUME": "HOLDS_RESUME = 'no'",
    "before_resume": "def before_resume(config: Config) -> str: return ''",
    "after_job": "def after_job() -> None: return None",
    "run": "def run(host: Host, config: Config) -> Iterator[Finding]: yield from ()",
    "validate": "def validate(config: Config) -> bool: return True",
    "overdue": "def overdue(config: str, seconds: float) -> Iterator[Finding]: yield from ()",
    "correlate": "def correlate(events: Sequence[KernelEvent], config: Config) -> Iterator[Finding]: yield from ()",
    "repairs": "def repairs(events: Sequence[KernelEvent]) -> Iterator[Finding]: yield from ()",
    "BASELINE": "BASELINE = ('expected',)",
    "baseline": "def baseline(host: Host) -> Iterator[Finding]: yield from ()",
    "EXPLAIN": "EXPLAIN = {'wrong/a': 'a text'}",
    "explain": "def explain(code: int) -> Explain | None: return None",
    "known_codes": "def known_codes() -> list[int]: return []",
    "explain_more": "def explain_more(code: str) -> str: return ''",
    "known_more": "def known_more(code: str) -> list[str]: return []",
}
HEAD = """\
from collections.abc import Iterator, Sequence
from healthd.agent.settings.config import CheckConfig
from healthd.host.host import Host
from healthd.common.model import Explain, Finding, KernelEvent
"""


def contract_line(module: str, names: list[str]) -> str:
    """Return a line that mypy refuses if a declaration of the module has another type."""
    config = f"{module}.Config" if "Config" in names else "CheckConfig"
    return f"Contract[{config}]({', '.join(f'{name}={module}.{name}' for name in names)})"


def declared_in(source: str) -> list[str]:
    return [name for name in NAMES if re.search(rf"(?m)^(def |class )?{name}\b( =|:|\()", source)]


def test_mypy_checks_declared_types_against_contract(tmp_path):
    lines = [
        HEAD,
        "from healthd.agent.settings.contract import Contract",
        f"from healthd.checks import {', '.join(CHECKS)}",
    ]
    for name, check in CHECKS.items():
        names = declared_in((ROOT / f"checks/{name}.py").read_text("utf-8"))
        assert {contract_name for contract_name in NAMES if hasattr(check.module, contract_name)} - {*names} <= {
            "Config"
        }  # may be CheckConfig
        lines.append(contract_line(name, names))
    for name, declaration in WRONG_TYPES.items():
        config = [] if name == "Config" else ["class Config(CheckConfig, frozen=True): ..."]
        (tmp_path / f"wrong_{name}.py").write_text("\n".join([HEAD, *config, declaration, ""]))
        lines += [f"import wrong_{name}", contract_line(f"wrong_{name}", ["Config", name] if config else [name])]
    program = tmp_path / "program.py"
    program.write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += ["--cache-dir", str(tmp_path / "mypy"), str(program)]  # parallel runs must not share a cache
    environment = {**os.environ, "MYPYPATH": f"{ROOT}:{tmp_path}"}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    text = program.read_text().splitlines()
    refused_lines = [text[int(line.split(":")[1]) - 1] for line in completed.stdout.splitlines()]
    assert refused_lines == [line for line in text if "(Config=wrong_" in line], completed.stdout + completed.stderr


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_built_in_check_runs_always_or_on_idle_node(name):
    assert CHECKS[name].when in ("", "idle")
    assert CHECKS[name].has_run or CHECKS[name].reads_kernel_log


def test_check_with_repairs_reads_kernel_log() -> None:
    """The intake calls only checks that evaluate events. A check with `repairs` alone would never be called."""
    checks = [check for check in registry.built_in_checks().values() if check.declares.repairs]
    assert checks
    assert all(check.reads_kernel_log for check in checks)


def observation_patterns(source: str) -> set[str]:
    """Return the names of the observations of a check as patterns, with `.+` for inserted text."""
    patterns = set()
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args):
            continue
        if call.func.id not in ("Observation", "_reading"):  # _reading(name, ...) of ib_flap.py creates one
            continue
        name = call.args[0]
        if isinstance(name, ast.Constant):
            patterns.add(re.escape(str(name.value)))
        elif isinstance(name, ast.JoinedStr):
            patterns.add(
                "".join(re.escape(piece.value) if isinstance(piece, ast.Constant) else ".+" for piece in name.values)
            )
    return patterns


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_check_observation_has_meaning(name):
    """No other name has a meaning. fakes.run_check() compares the observations of each run with the table."""
    meanings = CHECKS[name].declares.OBSERVATIONS
    patterns = observation_patterns((ROOT / f"checks/{name}.py").read_text("utf-8"))
    assert {
        pattern
        for pattern in patterns
        if not any(re.fullmatch(pattern, observation_name) for observation_name in meanings)
    } == set()
    assert {
        observation_name
        for observation_name in meanings
        if not any(re.fullmatch(pattern, observation_name) for pattern in patterns)
    } == set()
    for observation_name, (text, labels) in meanings.items():
        assert text.endswith("."), observation_name
        assert not {"instance", "job"} & set(labels), observation_name


def test_observation_names_are_unique():
    names = [observation_name for check in CHECKS.values() for observation_name in check.declares.OBSERVATIONS]
    assert sorted(names) == sorted(set(names))
