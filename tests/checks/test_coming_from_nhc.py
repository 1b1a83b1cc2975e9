"""docs/coming-from-nhc.md: the settings are valid, and the page mentions each check of NHC."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from healthd.agent.conditions.absorb import as_configured
from healthd.agent.kernel_log.parse import parse as parse_line
from healthd.agent.kernel_log.parse import use_patterns
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings.config import KernelPattern
from healthd.agent.settings.effective import find_mistakes, resolve_settings
from healthd.agent.settings.registry import built_in_checks
from healthd.common.model import Inventory, Severity
from healthd.common.toml import parse

pytestmark = pytest.mark.one_python

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from-nhc.md").read_text("utf-8")
TABLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
CHECKS = built_in_checks()
NHC = re.search(r"\n## NHC\n(.*?)\n## ", (DOCS / "peers.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("text", TABLES)
def test_settings_tables_of_page_are_accepted(text):
    table = parse(text)
    assert find_mistakes(table, "page", CHECKS) == []
    for node in ("gpu-001", "gpu-042", "cpu-1"):
        loaded = resolve_settings(table, "page", {"node_name": ("--node-name", node)}, CHECKS)
        named = {(name, each) for name, tables in table.get("checks", {}).items() for each in tables}
        instances = {(run.check, run.instance) for run in loaded.checks if run.instance}
        assert instances <= named


def test_settings_tables_of_page_fit_into_one_file():
    joined = "\n".join(sorted(TABLES, key=lambda text: "[[node]]" in text))
    loaded = resolve_settings(parse(joined), "page", {"node_name": ("--node-name", "gpu-001")}, CHECKS)
    assert {("exec", "nhc"), ("match", "bios"), ("mount", "/scratch")} <= set(loaded.checks)


def test_page_mentions_each_nhc_check():
    assert NHC is not None
    cells = re.findall(r"(?m)^\| (check_[^|]*) \|", NHC[1])
    checks = [name for cell in cells for name in re.findall(r"check_[a-z_]+", cell)]
    assert len(checks) == 46
    assert [check for check in checks if not re.search(rf"\b{check}\b", PAGE)] == []


def test_node_sections_replace_host_expressions_of_nhc():
    excluded, included = (
        resolve_settings(
            parse(next(t for t in TABLES if "[[node]]" in t)), "page", {"node_name": ("--node-name", node)}, CHECKS
        )
        for node in ("gpu-042", "gpu-041")
    )
    assert excluded.checks["gpu_count", ""].expected != 8
    assert included.checks["gpu_count", ""].expected == 8


EVICTED = "LustreError: 167-0: data-OST0001-osc-ff: This client was evicted by data-OST0001; in progress operations"
HFI1 = "hfi1 0000:7f:00.0: hfi1_0: [QP74] hfi1_tid_timeout 4084"


@pytest.mark.parametrize("page", ["docs/coming-from-nhc.md", "docs/scan.md", "conf/healthd.toml"])
def test_pattern_of_page_matches_line_without_built_in_rule(page):
    text = (DOCS.parent / page).read_text("utf-8")
    (name, pattern), *more = re.findall(r'\[kernel_log\.patterns\.(\w+)\][^\n]*\n(?:# )?pattern = "([^"\n]*)"', text)
    assert more == []
    assert parse_line(HFI1) is None
    use_patterns({name: KernelPattern(pattern)})
    try:
        event = parse_line(HFI1)
    finally:
        use_patterns({})
    assert event is not None
    assert (event.kind, event.code) == ("site", name)


def test_severity_setting_of_page_changes_built_in_finding():
    table = parse(next(t for t in TABLES if "[checks.filesystem]" in t))
    config = resolve_settings(table, "page", {}, CHECKS).checks["filesystem", ""]
    event = make_event(RawLine(0.0, EVICTED), "boot")
    assert event is not None
    (finding,) = CHECKS["filesystem"].correlate([event], Inventory(), config)[0]
    assert as_configured(finding, config).severity is Severity.DEGRADED


def test_no_page_recommends_nhc_with_all_checks_without_kind():
    root = DOCS.parent
    files = [root / "README.md", *(p for d in ("docs", "conf", "man") for p in (root / d).rglob("*") if p.is_file())]
    unwanted = [
        f"{path.relative_to(root)}: {line}"
        for path in files
        for line in path.read_text("utf-8", "replace").replace("\\-", "-").splitlines()
        if re.search(r'nhc", *"-a"', line) and not line.startswith("Do not use ")
    ]
    assert unwanted == []


@pytest.mark.parametrize(
    ("listed", "found"),
    [("", False), ("xmrig\n", True), ("minerd\nminerd\n", True)],
)
def test_blacklist_example_only_warns_and_lists_only_named_processes(listed, found):
    loaded = resolve_settings(parse("\n".join(t for t in TABLES if "blacklist" in t)), "page", {}, CHECKS)
    config = loaded.checks["match", "blacklist"]
    assert config.command[:2] == ("/usr/bin/ps", "-C")  # all processes would be too much output
    assert config.exit_statuses == (0, 1)  # ps exits with 1 if it finds no process
    assert config.fault_severity is Severity.WARNING  # every user can give a process this name
    assert bool(re.search(config.forbids, listed)) is found
