"""Tests of the rules in packaging/prometheus with the real promtool and a real Prometheus that scrapes real
healthds, and of `healthd fleet status` on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, xid_line
from ports import free_ports
from requirements import require_programs
from waiting import until

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


def assert_firing(series: list[dict[str, str]], expected: dict[str, float], time: str, directory: Path) -> None:
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
