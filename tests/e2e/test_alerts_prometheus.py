"""Tests of the rules in packaging/prometheus with the real promtool and a real Prometheus that scrapes real
healthds, and of `healthd fleet status` on it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import time_ns
from typing import Any

import pytest
from healthd_daemon import Healthd, xid_line
from ports import free_ports
from requirements import require_programs
from waiting import until

from healthd.fleet.statistics.domain_faults import LinkFault, find_domain_faults

RULES = Path(__file__).parents[2] / "packaging/prometheus"
RULE_FILES = [str(RULES / f"healthd.{name}.yml") for name in ("recording", "alerts")]
GPU = "0000:61:00.0"


@pytest.fixture(autouse=True)
def require_prometheus() -> None:
    require_programs("prometheus", "promtool", packages="prometheus")


def promtool(*arguments: str, cwd: Path = RULES) -> str:
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=500, cwd=cwd)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def test_promtool_accepts_rules_and_example() -> None:
    promtool("check", "rules", *RULE_FILES)
    promtool("check", "config", "prometheus.yml")


@pytest.mark.parametrize("name", sorted(path.name for path in (RULES / "tests").glob("*.test.yml")))
def test_promtool_tests_of_alerts_pass(name: str) -> None:
    promtool("test", "rules", name, cwd=RULES / "tests")


def condition_series(node: str, code: str, subject: str, **values: str) -> list[dict[str, str]]:
    labels = f'cluster="c1",job="healthd",instance="{node}:9478",check="{code.partition("/")[0]}",code="{code}"'
    series = {"severity": "3x20", "open": "1x20", "enforced": "1x20", "acknowledged": "0x20", **values}
    return [
        {"series": f'healthd_condition_{name}{{{labels},subject="{subject}"}}', "values": value}
        for name, value in series.items()
    ]


def node_series(node: str) -> list[dict[str, str]]:
    labels = f'cluster="c1",job="healthd",instance="{node}:9478"'
    return [
        {"series": f"up{{{labels}}}", "values": "1x20"},
        {"series": f'healthd_node_info{{{labels},node="{node}"}}', "values": "1x20"},
    ]


def assert_firing(series: list[dict[str, str]], expected: Mapping[str, float], time: str, directory: Path) -> None:
    """Assert that these alerts fire at that time, with these counts, and no others."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": count} for name, count in expected.items()]
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": time, "exp_samples": samples}
        ],
    }
    order = ["healthd-recording", "healthd-nodes", "healthd-cluster"]
    document = {"rule_files": RULE_FILES, "evaluation_interval": "1m", "group_eval_order": order, "tests": [test]}
    (directory / "test.yml").write_text(json.dumps(document))  # JSON is YAML
    promtool("test", "rules", str(directory / "test.yml"))


def test_file_server_fault_of_many_nodes_is_one_alert_beside_gpu_fault(
    tmp_path: Path,
) -> None:
    names = [f"gpu{number:04d}" for number in range(1, 501)]  # promtool's engine loads at most 10,000 samples
    series = [
        entry
        for name in names
        for entry in (*node_series(name), *condition_series(name, "mount/stale", "/data", severity="2x20"))
    ]
    series += condition_series("gpu0007", "gpu_xid/79", GPU)
    assert_firing(series, {"HealthdManyNodes": 1, "HealthdGpuFault": 1}, "10m", tmp_path)


def test_file_server_fault_of_two_nodes_is_one_alert_each(tmp_path: Path) -> None:
    names = [f"gpu{number:04d}" for number in range(1, 101)]
    series = [entry for name in names for entry in node_series(name)]
    series += [entry for name in names[:2] for entry in condition_series(name, "mount/stale", "/data")]
    assert_firing(series, {"HealthdStorageFault": 2}, "10m", tmp_path)


def test_fault_with_several_codes_is_one_alert(tmp_path: Path) -> None:
    series = node_series("gpu0001")
    for code in ("gpu_xid/79", "gpu_access/lost", "gpu_count/missing", "gpu_recovery_action/gpu_reset"):
        series += condition_series("gpu0001", code, GPU)
    series += condition_series("gpu0001", "gpu_xid/119", "0000:1b:00.0")
    assert_firing(series, {"HealthdGpuFault": 1}, "10m", tmp_path)


# --- faults of an NVLink domain's switches

DOMAIN = "5a0b1c2d-0000-4000-8000-000000000001"
OTHER_DOMAIN = "5a0b1c2d-0000-4000-8000-000000000002"


def tray_series(node: str, domain: str = DOMAIN, **values: str) -> list[dict[str, str]]:
    labels = f'cluster="c1",job="healthd",instance="{node}:9478"'
    number = domain[-8:]
    return [
        *node_series(node),
        {"series": f'healthd_nvlink_domain_info{{{labels},domain="{domain}",id="{number}"}}', "values": "1x20"},
        {"series": f"healthd_round_interval_seconds{{{labels}}}", "values": "300x20"},
        *({"series": f"healthd_{name}{{{labels}}}", "values": value} for name, value in values.items()),
    ]


def fault_series(
    node: str, code: str, begun: float, confirmed: float | None = None, **values: str
) -> list[dict[str, str]]:
    times = {
        "begun_timestamp_seconds": f"{begun}x20",
        "since_timestamp_seconds": f"{begun if confirmed is None else confirmed}x20",
    }
    return condition_series(node, code, GPU, **{**times, **values})


def trays(number: int) -> list[str]:
    return [f"tray{at:02d}" for at in range(1, number + 1)]


ONE_INCIDENT = {"HealthdNvlinkDomainFault": 1}


def test_switch_fault_on_18_nodes_is_one_alert(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    for at, node in enumerate(trays(18)):
        series += fault_series(node, "gpu_xid/149", 30 + 2 * at)
        series += fault_series(node, "gpu_nvlink/inactive", 60 + 15 * at)
        series += fault_series(node, "gpu_recovery_action/gpu_reset", 35 + 2 * at)
        series += fault_series(node, "gpu_recovery_action/recover_imex_domain", 35 + 2 * at, severity="1x20")
        labels = f'cluster="c1",job="healthd",instance="{node}:9478"'
        if at >= 2:
            held = f'{labels},partition="NVLink domain 00000001",kind="shared"'
            series.append({"series": f"healthd_fleet_limit_drain_waiting{{{held}}}", "values": "1x20"})
            series.append({"series": f"healthd_slurm_drain_desired{{{labels}}}", "values": "1x20"})
            waiting = f"healthd_fleet_limit_waiting_since_timestamp_seconds{{{labels}}}"
            series.append({"series": waiting, "values": "60x20"})
    assert_firing(series, ONE_INCIDENT, "1m", tmp_path)
    assert_firing(series, ONE_INCIDENT, "15m", tmp_path)


def test_fault_of_one_node_is_no_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    for code in ("gpu_xid/149", "gpu_nvlink/inactive", "gpu_fabric/unhealthy"):
        series += fault_series("tray01", code, 60)
    assert_firing(series, {"HealthdNvlinkFault": 1}, "10m", tmp_path)


def test_faults_of_two_nodes_are_no_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(2) for entry in fault_series(node, "gpu_xid/149", 60)]
    assert_firing(series, {"HealthdNvlinkFault": 2}, "10m", tmp_path)


@pytest.mark.parametrize(("last", "expected"), [(120, ONE_INCIDENT), (121, {"HealthdNvlinkFault": 3})])
def test_faults_of_three_nodes_are_domain_fault_within_one_minute(
    last: int, expected: Mapping[str, float], tmp_path: Path
) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    for node, since in zip(trays(3), (60, 90, last), strict=True):
        series += fault_series(node, "gpu_xid/149", since)
    assert_firing(series, expected, "10m", tmp_path)


def test_domain_fault_is_found_beside_faults_from_before_and_after_it(tmp_path: Path) -> None:
    times = {
        "switch fault, then one more tray": [10] * 12 + [75],
        "three trays, then one more": [10] * 3 + [75],
        "between older and newer faults of single trays": [-90000, -50000, -7000] + [10] * 3 + [75, 75, 200, 330],
        "one older fault": [-86400] + [10] * 12 + [75],
    }
    series = []
    for at, begun in enumerate(times.values()):
        for node, time in zip([f"rack{at}{tray}" for tray in trays(18)], begun, strict=False):
            series += tray_series(node, DOMAIN[:-1] + str(at)) + fault_series(node, "gpu_xid/149", time)
    expected = {f'{{domain="{DOMAIN[:-1]}{at}"}}': 10.0 for at in range(len(times))}
    assert_values(series, "min by (domain) (domain:healthd_link_incident:start)", expected, tmp_path)


def test_fault_long_after_the_domain_fault_has_its_own_alert_if_prometheus_starts_late(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(17) for entry in fault_series(node, "gpu_xid/149", -3600)]
    series += fault_series("tray18", "gpu_xid/149", -600)
    assert_firing(series, {**ONE_INCIDENT, "HealthdNvlinkFault": 1}, "10m", tmp_path)


def test_wrong_clock_of_one_node_does_not_hide_the_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(17) for entry in fault_series(node, "gpu_xid/149", 60)]
    series += fault_series("tray18", "gpu_xid/149", 60 + 7200)
    assert_firing(series, {**ONE_INCIDENT, "HealthdNvlinkFault": 1}, "10m", tmp_path)


def test_domain_faults_are_those_of_the_history(tmp_path: Path) -> None:
    rng = random.Random(7)
    series, expected = [], {}
    for at in range(30):  # promtool's engine loads at most 10,000 samples
        domain = f"{at:08x}"
        faults = [
            LinkFault(
                "c1", f"{tray}-{at}", domain, rng.choice(["gpu_xid/149", "gpu_nvlink/inactive"]), rng.randint(0, 900)
            )
            for tray in trays(6)
            for _ in range(rng.choice([0, 1, 1, 2]))
        ]
        for node in {fault.node for fault in faults}:
            series += tray_series(node, domain)
        for number, fault in enumerate(faults):
            part = fault_series(fault.node, fault.code, fault.time)
            series += [{**entry, "series": entry["series"].replace(GPU, f"link {number}")} for entry in part]
        if found := find_domain_faults(faults):
            expected[f'{{domain="{domain}"}}'] = float(found[0].start_time // 60)
    assert 8 < len(expected) < 22
    minutes = "floor(min by (domain) (domain:healthd_link_incident:start) / 60)"
    assert_values(series, minutes, expected, tmp_path)


@pytest.mark.parametrize(("last", "expected"), [(420, ONE_INCIDENT), (421, {"HealthdNvlinkFault": 3})])
def test_finding_of_a_check_may_have_begun_a_round_earlier(
    last: int, expected: Mapping[str, float], tmp_path: Path
) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    for node, since in zip(trays(3), (60, 90, last), strict=True):
        series += fault_series(node, "gpu_nvlink/inactive", since)
    assert_firing(series, expected, "10m", tmp_path)


def test_confirm_time_of_a_check_does_not_separate_its_finding_from_the_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += fault_series("tray01", "gpu_xid/149", 60) + fault_series("tray02", "gpu_xid/149", 62)
    series += fault_series("tray03", "gpu_nvlink/inactive", 365, confirmed=425)
    assert_firing(series, ONE_INCIDENT, "10m", tmp_path)


def test_warnings_that_worsen_at_different_times_are_no_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    for node, opened, worsened in zip(trays(3), (60, 61, 62), (1, 5, 9), strict=True):
        began = f"{opened}x{worsened - 1} {60 * worsened}x20"
        severity = f"1x{worsened - 1} 2x20"
        times = {"begun_timestamp_seconds": began, "severity": severity}
        series += fault_series(node, "gpu_xid/149", opened, **times)
    assert_firing(series, {"HealthdNvlinkFault": 3}, "15m", tmp_path)


def test_confirmed_faults_of_older_versions_are_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(18) for entry in fault_series(node, "gpu_nvlink/inactive", 60)]
    series = [entry for entry in series if not entry["series"].startswith("healthd_condition_begun")]
    assert_firing(series, ONE_INCIDENT, "10m", tmp_path)


def test_faults_of_three_domains_are_no_domain_fault(tmp_path: Path) -> None:
    domains = [DOMAIN[:-1] + str(at) for at in (1, 2, 3)]
    series = [entry for at, node in enumerate(trays(18)) for entry in tray_series(node, domains[at % 3])]
    series += [entry for node in trays(3) for entry in fault_series(node, "gpu_xid/149", 60)]
    assert_firing(series, {"HealthdNvlinkFault": 3}, "10m", tmp_path)


def test_nodes_without_domain_are_no_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in node_series(node)]
    series += [entry for node in trays(4) for entry in fault_series(node, "gpu_nvlink/inactive", 60)]
    assert_firing(series, {"HealthdNvlinkFault": 4}, "10m", tmp_path)


@pytest.mark.parametrize("code", ["gpu_xid/137", "gpu_c2c/inactive", "imex/daemon", "gpu_xid/79"])
def test_fault_that_a_switch_cannot_cause_is_no_domain_fault(code: str, tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(4) for entry in fault_series(node, code, 60)]
    alert = "HealthdGpuFault" if code == "gpu_xid/79" else "HealthdNvlinkFault"
    assert_firing(series, {alert: 4}, "10m", tmp_path)


def test_other_fault_of_a_node_alerts_beside_the_domain_fault(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(18) for entry in fault_series(node, "gpu_xid/149", 60)]
    series += fault_series("tray05", "gpu_xid/79", 60)
    assert_firing(series, {**ONE_INCIDENT, "HealthdGpuFault": 1}, "10m", tmp_path)


def test_link_fault_from_before_the_domain_fault_alerts_beside_it(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += fault_series("tray09", "gpu_nvlink/inactive", -86400)
    series += [entry for node in trays(4) for entry in fault_series(node, "gpu_xid/149", 60)]
    assert_firing(series, {**ONE_INCIDENT, "HealthdNvlinkFault": 1}, "10m", tmp_path)


@pytest.mark.parametrize(
    ("code", "begun", "expected"),
    [
        ("gpu_xid/149", 360, ONE_INCIDENT),
        ("gpu_xid/149", 361, {**ONE_INCIDENT, "HealthdNvlinkFault": 1}),
        ("gpu_nvlink/replay", 660, ONE_INCIDENT),
        ("gpu_nvlink/replay", 661, {**ONE_INCIDENT, "HealthdNvlinkFault": 1}),
    ],
)
@pytest.mark.parametrize("node", ["tray01", "tray07"])
def test_later_link_fault_belongs_to_the_domain_fault_for_15_minutes(
    code: str, begun: int, node: str, expected: Mapping[str, float], tmp_path: Path
) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(4) for entry in fault_series(node, "gpu_xid/145", -600)]
    late = {name: f"_x12 {value}x8" for name, value in (("severity", 3), ("open", 1), ("enforced", 1))}
    series += fault_series(node, code, begun, **late, acknowledged="_x12 0x8")
    assert_firing(series, expected, "18m", tmp_path)


def test_domain_fault_ends_when_one_of_its_nodes_is_left(tmp_path: Path) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += fault_series("tray01", "gpu_xid/149", 60)
    for node in ("tray02", "tray03"):
        series += fault_series(node, "gpu_xid/149", 60, severity="3x5 _x15")
    assert_firing(series, ONE_INCIDENT, "5m", tmp_path)
    assert_firing(series, {"HealthdNvlinkFault": 1}, "15m", tmp_path)


def held_series(node: str, group: str) -> list[dict[str, str]]:
    labels = f'cluster="c1",job="healthd",instance="{node}:9478"'
    waiting = f'healthd_fleet_limit_drain_waiting{{{labels},partition="{group}",kind="shared"}}'
    return [{"series": waiting, "values": "1x20"}]


@pytest.mark.parametrize(
    ("group", "expected"), [("NVLink domain 00000001", {}), ("gpu", {"HealthdFleetLimitReached": 1})]
)
def test_domain_fault_explains_only_the_limit_of_the_domain(
    group: str, expected: Mapping[str, float], tmp_path: Path
) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node)]
    series += [entry for node in trays(4) for entry in fault_series(node, "gpu_xid/149", 60)]
    series += held_series("tray03", group)
    assert_firing(series, {**ONE_INCIDENT, **expected}, "15m", tmp_path)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        (["gpu_recovery_action/gpu_reset"], {}),
        (["gpu_xid/79"], {"HealthdRepairFailed": 1, "HealthdGpuFault": 1}),
        (["mount/stale"], {"HealthdRepairFailed": 1, "HealthdStorageFault": 1}),
    ],
)
def test_domain_fault_explains_failed_repair_of_node_without_other_fault(
    codes: list[str], expected: Mapping[str, float], tmp_path: Path
) -> None:
    series = [entry for node in trays(18) for entry in tray_series(node, repair_given_up="0x20")]
    series += [entry for node in trays(4) for entry in fault_series(node, "gpu_xid/149", 60)]
    series += [entry for code in codes for entry in fault_series("tray01", code, -86400)]
    for entry in series:
        if entry["series"].startswith("healthd_repair_given_up") and "tray01" in entry["series"]:
            entry["values"] = "1x20"
    assert_firing(series, {**ONE_INCIDENT, **expected}, "15m", tmp_path)


def assert_values(series: list[dict[str, str]], query: str, expected: Mapping[str, float], directory: Path) -> None:
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "15m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
            }
        ],
    }
    document = {"rule_files": RULE_FILES, "evaluation_interval": "1m", "tests": [test]}
    (directory / "test.yml").write_text(json.dumps(document))
    promtool("test", "rules", str(directory / "test.yml"))


def test_nodes_of_a_domain_are_counted_by_state(tmp_path: Path) -> None:
    health = [("healthy", 14), ("warning", 1), ("degraded", 1), ("healthy", 2)]
    states = [state for state, number in health for _ in range(number)]
    series = []
    for at, (node, state) in enumerate(zip(trays(18), states, strict=True)):
        series += tray_series(node, slurm_drain_desired="0x20")
        labels = f'cluster="c1",job="healthd",instance="{node}:9478"'
        series.append({"series": f'healthd_health{{{labels},state="{state}"}}', "values": "1x20"})
        if at in (0, 1, 15):
            owner = f'healthd_slurm_drained_by{{{labels},owner="{"other" if at else "healthd"}"}}'
            series.append({"series": owner, "values": "1x20"})
    for entry in series:
        if 'instance="tray18:' in entry["series"]:
            entry["values"] = "1x5 0x15" if entry["series"].startswith("up") else entry["values"][0] + "x5 _x15"
    counts = {"healthy": 13, "drained": 3, "not_seen": 1, "with_problems": 1}
    expected = {f'{{state="{state}"}}': float(number) for state, number in counts.items()}
    query = f'sum by (state) (domain:healthd_nodes:count{{cluster="c1",domain="{DOMAIN}"}})'
    assert_values(series, query, expected, tmp_path)
    assert_values(series, "sum by (id) (domain:healthd_largest_job:nodes)", {'{id="00000001"}': 14}, tmp_path)


def test_node_with_old_target_is_counted_once(tmp_path: Path) -> None:
    series = []
    for node in trays(3):
        series += tray_series(node, slurm_drain_desired="0x20")
        labels = f'cluster="c1",job="healthd",instance="{node}:9478"'
        series.append({"series": f'healthd_health{{{labels},state="healthy"}}', "values": "1x20"})
    for entry in tray_series("tray01"):
        values = "1x5 0x15" if entry["series"].startswith("up") else entry["values"][0] + "x5 _x15"
        series.append({"series": entry["series"].replace("tray01:9478", "10.0.0.1:9478"), "values": values})
    counts = {"healthy": 3, "drained": 0, "not_seen": 0, "with_problems": 0}
    expected = {f'{{state="{state}"}}': float(number) for state, number in counts.items()}
    assert_values(series, "sum by (state) (domain:healthd_nodes:count)", expected, tmp_path)


def test_dead_node_that_changed_its_domain_counts_in_the_newest(tmp_path: Path) -> None:
    series = tray_series("tray01") + tray_series("tray01", OTHER_DOMAIN)[2:3]
    values = {"up": "1x8 0x12", "healthd_node_info": "1x8 stale", DOMAIN: "1x5 stale", OTHER_DOMAIN: "_x6 1x2 stale"}
    for entry in series:
        entry["values"] = next((text for key, text in values.items() if key in entry["series"]), entry["values"])
    expected = {f'{{domain="{OTHER_DOMAIN}"}}': 1.0}
    assert_values(series, 'sum by (domain) (domain:healthd_nodes:count{state="not_seen"})', expected, tmp_path)


def test_count_of_nodes_is_not_negative_if_targets_of_a_node_disagree(tmp_path: Path) -> None:
    series = []
    for address, is_drained in (("tray01:9478", True), ("10.0.0.1:9478", False)):
        labels = f'cluster="c1",job="healthd",instance="{address}"'
        own = tray_series("tray01", slurm_drain_desired="0x20")
        series += [{**entry, "series": entry["series"].replace("tray01:9478", address)} for entry in own]
        series.append({"series": f'healthd_health{{{labels},state="healthy"}}', "values": "1x20"})
        if is_drained:
            series.append({"series": f'healthd_slurm_drained_by{{{labels},owner="healthd"}}', "values": "1x20"})
    query = 'domain:healthd_nodes:count{state="with_problems"} < 0'
    assert_values(series, query, {}, tmp_path)


# --- a real Prometheus with real healthds


class Prometheus:
    """A real Prometheus with the rules, evaluated each second. In its copy, `for:` of each alert is 0 s."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, query: str) -> list[dict[str, Any]]:
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=120) as response:
            result: list[dict[str, Any]] = json.loads(response.read())["data"]["result"]
        return result

    def alerts(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return (alert, node) -> annotations of the firing alerts."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=120) as response:
            rows = json.loads(response.read())["data"]["alerts"]
        firing = [row for row in rows if row["state"] == "firing"]
        return {(row["labels"]["alertname"], row["labels"].get("node", "")): row["annotations"] for row in firing}


@contextlib.contextmanager
def run_prometheus(directory: Path, targets: list[str], ports: contextlib.ExitStack) -> Iterator[Prometheus]:
    for path in map(Path, RULE_FILES):
        (directory / path.name).write_text(re.sub(r"(?m)^( +for:) \w+$", r"\1 0s", path.read_text("utf-8")))
    job = {"job_name": "healthd", "static_configs": [{"targets": targets}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [Path(path).name for path in RULE_FILES],
        "scrape_configs": [job],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    port = free_ports(1, ports)
    argv = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with open(directory / "prometheus.log", "ab") as log:
        process = subprocess.Popen(
            [*argv, f"--web.listen-address=127.0.0.1:{port}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
            return False

        until(ready, "Prometheus is ready", 120)
        yield Prometheus(url)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def run_fleet_status(url: str, *flags: str) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "healthd", "fleet", "status", "--prometheus", url, "--json", *flags]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def groups(document: dict[str, Any]) -> dict[str, str]:
    return {node["node"]: node["group"] for node in document["nodes"]}


def wait_for_fleet_status(
    url: str, is_reached: Callable[[dict[str, Any]], bool], condition: str, *flags: str
) -> tuple[int, dict[str, Any]]:
    """Return the status when `is_reached` returns true.

    On a busy machine a scrape can time out, so a node may be missing for a while.
    """
    last_status: list[tuple[int, dict[str, Any]]] = []

    def check() -> bool:
        last_status[:] = [run_fleet_status(url, *flags)]
        return is_reached(last_status[0][1])

    until(check, condition)
    return last_status[0]


def test_real_faults_fire_and_end_and_fleet_status_lists_all_nodes(tmp_path: Path) -> None:
    config = "interval_seconds = 1.0\n"
    with contextlib.ExitStack() as stack:
        listen = [f"127.0.0.1:{free_ports(1, stack)}" for _ in range(3)]
        nodes = [
            stack.enter_context(Healthd("--listen", address, "--node-name", f"gpu{number}", config=config))
            for number, address in enumerate(listen, 1)
        ]
        prometheus = stack.enter_context(run_prometheus(tmp_path, listen, stack))
        broken, edited, dead = nodes
        url = prometheus.url
        names = {f"gpu{number}" for number in (1, 2, 3)}
        until(
            lambda: {row["metric"]["node"] for row in prometheus.query("healthd_node_info")} == names, "all are scraped"
        )
        fault, refused = ("HealthdGpuFault", "gpu1"), ("HealthdReloadFailed", "gpu2")
        assert not {fault, refused} & set(prometheus.alerts())

        # GPU 3 of the first node falls off the bus, the settings of the second become invalid, and the third daemon
        # dies.
        broken.kernel_line(xid_line(79))
        valid_settings = edited.config.read_text()
        edited.config.write_text("interval_seconds = -1\n")
        assert edited.process is not None
        edited.process.send_signal(signal.SIGHUP)
        firing: list[dict[tuple[str, str], dict[str, str]]] = []

        def both_fire() -> bool:
            firing[:] = [prometheus.alerts()]
            return {fault, refused} <= set(firing[0])

        until(both_fire, "the alerts of the fault and of the rejected settings fire")
        fault_annotations = firing[0][fault]
        assert (
            f"Open on gpu1: gpu_xid/79 {GPU}. The node is NOT drained (mode observe)"
            in fault_annotations["description"]
        )
        assert fault_annotations["runbook_url"].endswith("/docs/runbooks/gpu_xid.md#gpu_xid79")
        in_service = "a faulty node stays in service in mode observe"
        wait_for_fleet_status(url, lambda fleet: groups(fleet)["gpu1"] == "drain_waiting", in_service)
        dead.kill()
        down = ("HealthdTargetDown", "gpu3")  # under the name that it had while it answered
        until(lambda: down in prometheus.alerts(), "the alert of the dead healthd fires")
        until(
            lambda: [alert for alert in prometheus.alerts() if alert[1] == "gpu3"] == [down],
            "no other alert of gpu3 fires",
        )

        def only_gpu3_is_missing(fleet: dict[str, Any]) -> bool:
            return [node["node"] for node in fleet["nodes"] if not node["seen"]] == ["gpu3"]

        status, document = wait_for_fleet_status(url, only_gpu3_is_missing, "only gpu3 is missing", "--problems")
        assert (status, groups(document)["gpu3"]) == (2, "not_seen")
        (unseen,) = [node for node in document["nodes"] if not node["seen"]]
        assert unseen["last_seen"] is None or abs(unseen["last_seen"] - document["time"]) < 3600
        (first,) = [node for node in document["nodes"] if node["node"] == "gpu1"]
        assert first["delayed_by"][0] == "observe"
        assert "gpu_xid/79" in {condition["code"] for condition in first["conditions"]}
        assert document["counts"]["nodes"] == 3

        # the repairs
        dead.start()
        edited.config.write_text(valid_settings)
        edited.process.send_signal(signal.SIGHUP)
        broken.request(command="repaired", code="gpu_xid/79", part=None)
        ended = {fault, refused, down}
        until(lambda: not ended & set(prometheus.alerts()), "all three have ended", 400)
        wait_for_fleet_status(
            url, lambda fleet: not {"drain_waiting", "not_seen"} & set(groups(fleet).values()), "all nodes are back"
        )
        assert os.path.exists(tmp_path / "data")


def test_dead_nodes_that_changed_their_domain_count_in_the_newest(tmp_path: Path) -> None:
    """One node moved from the first domain to the second, and one back. Both died three hours ago."""
    now = time_ns() // 10**9
    moves = {"tray1": (DOMAIN, OTHER_DOMAIN), "tray2": (OTHER_DOMAIN, DOMAIN)}
    with contextlib.ExitStack() as stack:
        listen = [f"127.0.0.1:{free_ports(1, stack)}" for _ in moves]
        lines = ["# TYPE healthd_node_info gauge"]
        labels = [f'job="healthd",instance="{address}"' for address in listen]
        times = range(now - 6 * 3600, now - 3 * 3600, 60)
        for name, label in zip(moves, labels, strict=True):
            lines += [f'healthd_node_info{{{label},node="{name}"}} 1 {at}' for at in times]
        lines.append("# TYPE healthd_nvlink_domain_info gauge")
        for domains, label in zip(moves.values(), labels, strict=True):
            for at in times:
                domain = domains[at >= now - 4 * 3600]
                metric = f'healthd_nvlink_domain_info{{{label},domain="{domain}",id="{domain[-8:]}"}}'
                lines.append(f"{metric} 1 {at}")
        (tmp_path / "samples.txt").write_text("\n".join([*lines, "# EOF\n"]))
        promtool("tsdb", "create-blocks-from", "openmetrics", str(tmp_path / "samples.txt"), str(tmp_path / "data"))
        prometheus = stack.enter_context(run_prometheus(tmp_path, listen, stack))
        until(lambda: len(prometheus.query("up == 0")) == len(moves), "both targets are scraped")
        _, document = run_fleet_status(prometheus.url)
        assert {node["node"]: node["domain"] for node in document["nodes"]} == {
            name: domains[-1] for name, domains in moves.items()
        }
        assert {domain["domain"]: domain["nodes"] for domain in document["domains"]} == {DOMAIN: 1, OTHER_DOMAIN: 1}


NVLINK_LINE = (
    "NVRM: Xid (PCI:0000:29:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 "
    "(0x02000011 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
)


def test_xids_of_three_real_nodes_of_a_domain_are_one_alert(tmp_path: Path) -> None:
    names = ["tray1", "tray2", "tray3"]
    with contextlib.ExitStack() as stack:
        listen = [f"127.0.0.1:{free_ports(1, stack)}" for _ in names]
        nodes = [
            stack.enter_context(
                Healthd(
                    "--listen", address, "--node-name", name, fake_nvml="gb200-nvl72", config="interval_seconds = 5.0\n"
                )
            )
            for name, address in zip(names, listen, strict=True)
        ]
        prometheus = stack.enter_context(run_prometheus(tmp_path, listen, stack))
        until(lambda: len(prometheus.query("healthd_nvlink_domain_info")) == 3, "all have reported their domain")
        domain_fault = ("HealthdNvlinkDomainFault", "")
        assert domain_fault not in prometheus.alerts()
        for node in nodes:
            node.kernel_line(f"kernel: {NVLINK_LINE}")

        def only_the_domain_alerts() -> bool:
            alerts = prometheus.alerts()
            return domain_fault in alerts and not any(name == "HealthdNvlinkFault" for name, _ in alerts)

        until(only_the_domain_alerts, "the fault of the domain is one alert")
        annotations = prometheus.alerts()[domain_fault]
        assert "tray1, tray2, tray3" in annotations["description"]
        _, document = run_fleet_status(prometheus.url)
        (domain,) = document["domains"]
        assert (domain["nodes"], domain["healthy"], domain["largest_job"]) == (3, 0, 0)
        (series,) = prometheus.query("domain:healthd_largest_job:nodes")
        assert (series["metric"]["id"], float(series["value"][1])) == (domain["id"], 0.0)
        for node in nodes:
            node.request(command="repaired", code="gpu_xid/149", part=None)
        until(lambda: domain_fault not in prometheus.alerts(), "the alert ends", 400)
