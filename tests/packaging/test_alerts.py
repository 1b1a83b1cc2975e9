"""Tests of the alerts in packaging/prometheus: existing metrics, links to existing pages, and promtool tests.

Prometheus itself reads and runs them in e2e/test_alerts_prometheus.py.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from healthd.agent.metrics.names import FAMILIES
from healthd.agent.settings import registry
from healthd.fleet.status.queries import CONDITION_QUERIES, LABEL_QUERIES, VALUE_QUERIES

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
RULES = ROOT / "packaging/prometheus"
METRIC = re.compile(r"(?<![:\w])healthd_([a-z_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|=|!=)"([^"]*)"')
PROMETHEUS_LABELS = {"cluster", "job", "instance"}
CHECKS = registry.built_in_checks()
CODES = [(name, code) for name, check in CHECKS.items() for code in check.codes()]
PROBLEMS = (  # problems that a node may have, the families of faults first
    *(
        "gpu",
        "gpu_memory",
        "nvlink",
        "pcie",
        "network",
        "storage",
        "thermal",
        "host",
        "failslow",
        "validation",
        "other",
    ),
    *("warning", "target_down", "round_stale", "kernel_log", "slurm", "drain_held", "drained_long", "unknown", "ack"),
    *("paused", "reload", "stream", "hook", "evidence", "validation_slow", "repair_failed", "repair_stuck"),
)


def load_yaml(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text("utf-8"))


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in load_yaml(RULES / f"healthd.{name}.yml")["groups"] for rule in group["rules"]]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("alerts_page", ROOT / "scripts/alerts_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_alerts_page_is_current():
    assert (ROOT / "docs/alerts.md").read_text("utf-8") == load_script().page(), "run scripts/alerts_page.py"


def expressions() -> list[str]:
    texts = [str(rule["expr"]) for name in ("recording", "alerts") for rule in rules(name)]
    annotations = [text for rule in rules("alerts") for text in rule["annotations"].values()]
    return [*texts, *annotations, *LABEL_QUERIES.values(), *VALUE_QUERIES.values(), *CONDITION_QUERIES.values()]


def test_rules_and_fleet_status_use_existing_metrics_and_labels():
    named = Counter[str]()
    for text in expressions():
        for name, matchers in METRIC.findall(text):
            assert name in FAMILIES, name
            labels = {label for label, _, _ in MATCHER.findall(matchers)}
            assert labels <= {*FAMILIES[name].labels, *PROMETHEUS_LABELS}, (name, labels)
            named[name] += 1
    assert {"condition_severity", "slurm_drain_info", "config_last_reload_successful"} <= set(named)


def matches(expr: str, labels: dict[str, str]) -> bool:
    """Return True if one of the selectors in `expr` matches a condition with these labels."""
    test = {
        "=": lambda value, pattern: value == pattern,
        "!=": lambda value, pattern: value != pattern,
        "=~": lambda value, pattern: re.fullmatch(pattern, value) is not None,
        "!~": lambda value, pattern: re.fullmatch(pattern, value) is None,
    }
    selectors = re.findall(r"condition:healthd_severity:acting\{([^}]*)\}", expr)
    assert selectors
    return any(
        all(
            test[operator](labels[name], matcher_pattern)
            for name, operator, matcher_pattern in MATCHER.findall(selector)
        )
        for selector in selectors
    )


FAMILY_RULES = {}


def families() -> dict[str, str]:
    if not FAMILY_RULES:
        for rule in rules("recording"):
            if rule["record"] == "condition:healthd_problem:severity":
                FAMILY_RULES[rule["labels"]["problem"]] = rule["expr"]
    return FAMILY_RULES


def families_of(check: str, code: str) -> list[str]:
    return [name for name, expr in families().items() if matches(expr, {"check": check, "code": code})]


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_each_code_is_in_one_family(check):
    for name, code in [*CODES, (check, f"{check}/others")]:
        if name == check:
            assert len(families_of(check, code)) == 1, (code, families_of(check, code))
            assert families_of(check, code) != ["other"] or check in ("exec", "match"), code


def test_code_of_site_check_is_in_family_other():
    assert families_of("rack_door", "rack_door/open") == ["other"]


@pytest.mark.parametrize(
    ("code", "family"),
    [
        ("gpu_xid/79", "gpu"),
        ("gpu_recovery_action/gpu_reset", "gpu"),
        ("gpu_xid/95", "gpu_memory"),
        ("gpu_row_remap/failure", "gpu_memory"),
        ("gpu_xid/149", "nvlink"),
        ("sxid/12001", "nvlink"),
        ("pcie_aer/fatal", "pcie"),
        ("ib_link/down", "network"),
        ("mount/stale", "storage"),
        ("memory_edac/uncorrected", "host"),
        ("cpu/throttled", "thermal"),
        ("failslow/gpu", "failslow"),
        ("validation/slow", "validation"),
    ],
)
def test_family_of_well_known_code(code, family):
    assert families_of(code.partition("/")[0], code) == [family]


def test_each_alert_names_place_next_step_and_urgency():
    for rule in rules("alerts"):
        texts = rule["annotations"]
        assert set(texts) == {"summary", "description", "runbook_url"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert re.search(r"Next(, on [^:]+)?:", texts["description"]), rule["alert"]
        if "node:" in rule["expr"] and rule["labels"]["severity"] != "critical":
            assert re.search(r"tonight|until the morning", texts["description"]), rule["alert"]
        if "node:healthd_problem" in rule["expr"]:
            assert texts["summary"].startswith("{{ $labels.node }}: ")
            suffix = 'unless on (cluster, problem) ALERTS{alertname=~"HealthdManyNodes.*", alertstate="firing"}'
            assert rule["expr"].endswith(suffix), rule["alert"]


def test_each_problem_has_alert_for_one_node_and_for_many():
    recorded = {rule["labels"]["problem"] for rule in rules("recording") if "problem" in rule.get("labels", {})}
    assert recorded == set(PROBLEMS)
    alerts_for_one = [
        name
        for rule in rules("alerts")
        for name in re.findall(r'node:healthd_problem:value\{problem="(\w+)"\}', rule["expr"])
    ]
    assert sorted(alerts_for_one) == sorted(PROBLEMS)
    for problem in PROBLEMS:
        waits_for_many = [rule.get("for") for rule in rules("alerts") if covers_many_nodes(rule["expr"], problem)]
        (wait_for_one,) = [
            rule.get("for")
            for rule in rules("alerts")
            if f'{{problem="{problem}"}}' in rule["expr"] and "node:" in rule["expr"]
        ]
        assert waits_for_many == [wait_for_one], (
            f"{problem}: the alert for many nodes must wait as long as that for one"
        )


def covers_many_nodes(expr: str, problem: str) -> bool:
    found = re.fullmatch(r'cluster:healthd_problem:many\{problem(=~|!~|=)"([^"]*)"\}', expr)
    if found is None:
        return False
    return (re.fullmatch(found[2], problem) is None) if found[1] == "!~" else bool(re.fullmatch(found[2], problem))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)", page.read_text("utf-8"))
    return {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_alert_links_to_existing_page():
    base = load_script().BASE
    for rule in rules("alerts"):
        url = str(rule["annotations"]["runbook_url"])
        assert url.startswith(base), url
        path, _, anchor = url.removeprefix(base).partition("#")
        if "{{" not in url:
            assert (ROOT / "docs" / path).exists(), url
            assert not anchor or anchor in anchors(ROOT / "docs" / path), url


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_runbook_has_anchor_for_each_code(check):
    """The alerts of the families build the link runbooks/CHECK.md#CODE, without the "/", from labels."""
    page = anchors(ROOT / f"docs/runbooks/{check}.md")
    assert [code for name, code in CODES if name == check and code.replace("/", "") not in page] == []
    assert f"{check}others" in page


def test_promtool_tests_have_each_alert_firing_and_quiet():
    fires, quiet = set(), set()
    for path in sorted((RULES / "tests").glob("*.test.yml")):
        for test in load_yaml(path)["tests"]:
            for case in test["alert_rule_test"]:
                (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    named = {rule["alert"] for rule in rules("alerts")}
    assert (named - fires, named - quiet) == (set(), set())
    assert (fires | quiet) == named


def test_target_list_is_kept_if_sinfo_fails_or_prints_nothing(tmp_path):
    """Run the lines that prometheus.yml recommends."""
    text = (RULES / "prometheus.yml").read_text("utf-8")
    lines = re.findall(r"(?m)^      #   (.*)$", text)
    assert len(lines) == 4
    script = "\n".join(lines).replace("/etc/prometheus/healthd", str(tmp_path))
    listed = tmp_path / "c1.yml"

    def list_after(sinfo: str) -> Any:
        subprocess.run(["sh", "-c", f"sinfo() {{ {sinfo}; }}\n{script}"], check=False, timeout=240)
        return load_yaml(listed)

    expected = [{"labels": {"cluster": "c1"}, "targets": ["gpu-0:9478", "gpu-1:9478"]}]
    assert list_after("printf 'gpu-1\\ngpu-0\\ngpu-1\\n'") == expected
    assert list_after("echo gpu-0; return 1") == expected, "sinfo failed after its first line"
    assert list_after("true") == expected, "sinfo printed no node"
    assert list_after("echo gpu-2")[0]["targets"] == ["gpu-2:9478"]


def test_alertmanager_routes_name_existing_alerts():
    routes = load_yaml(RULES / "alertmanager.yml")
    named = [rule["alert"] for rule in rules("alerts")]
    patterns = [
        pattern
        for rule in routes["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        for pattern in re.findall(r'alertname =~? "([^"]*)"', matcher)
    ]
    assert len(patterns) >= 6
    assert [
        name_pattern for name_pattern in patterns if not any(re.fullmatch(name_pattern, name) for name in named)
    ] == []
    receivers = {receiver["name"] for receiver in routes["receivers"]}
    assert {routes["route"]["receiver"], *(route["receiver"] for route in routes["route"]["routes"])} == receivers
