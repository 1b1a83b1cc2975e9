"""Tests of `healthd fleet status`: grouping of nodes, the printed text, and faulty Prometheus servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.common.slurm.blocks import parse_topology
from healthd.fleet.sources.prometheus_server import ResponseTooLarge, ServerError
from healthd.fleet.status.node import Group
from healthd.fleet.status.queries import (
    CONDITION_QUERIES,
    LABEL_QUERIES,
    START_QUERY,
    TARGETS_PER_QUERY,
    VALUE_QUERIES,
    read_fleet,
)
from healthd.fleet.status.text import (
    MAX_ROWS_ALIKE,
    exit_status,
    fleet_document,
    fleet_text,
    select_nodes,
    summary,
    topology_notes,
)

NOW = 1_800_000_000.0
HOUR = 3600


class Server:
    """A simulated Prometheus server: `add` gives it samples, and `read_fleet` calls it."""

    def __init__(self, *names: str) -> None:
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        self.queries: list[str] = []
        for name in names:
            self.node(name)

    def add(self, metric: str, name: str, value: float = 1, /, **labels: str) -> None:
        where = {"job": "healthd", "instance": f"{name}:9478"}
        self.samples.setdefault(metric, []).append(({**where, **labels}, value))

    def node(self, name: str, health: str = "healthy", mode: str = "act", version: str = "0.2.0") -> None:
        self.add("up", name)
        self.add(LABEL_QUERIES["node"], name, node=name)
        self.add(LABEL_QUERIES["version"], name, version=version)
        self.add(LABEL_QUERIES["mode"], name, mode=mode)
        self.add(LABEL_QUERIES["health"], name, state=health)

    def down(self, name: str, last_seen: float = 0.0) -> None:
        self.add("up", name, 0)
        if last_seen:
            self.add("last seen", name, last_seen, node=name.partition(".")[0])

    def drained(self, name: str, owner: str, reason: str, since: float) -> None:
        self.add(LABEL_QUERIES["owner"], name, owner=owner)
        self.add(LABEL_QUERIES["drain"], name, owner=owner, reason=reason)
        self.add(VALUE_QUERIES["drained_since"], name, since)

    def condition(self, name: str, code: str, subject: str, severity: int, since: float = NOW - HOUR) -> None:
        labels = {"check": code.partition("/")[0], "code": code, "subject": subject}
        self.add(CONDITION_QUERIES["severity"], name, severity, **labels)
        self.add(CONDITION_QUERIES["since"], name, since, **labels)

    def __call__(self, path: str, parameters: Any) -> Any:
        assert path == "query"
        query = parameters["query"]
        self.queries.append(query)
        if query == "time()":
            return {"resultType": "scalar", "result": [NOW, str(NOW)]}
        job_filter = re.search(r'\{job="(\w+)"\}', query)
        if query.startswith("up{"):
            name = "up"
        elif query.startswith("max_over_time"):
            name = "last domain" if "healthd_nvlink_domain_info" in query else "last seen"
        else:
            name = re.sub(r'\{job="\w+"\}', "", query)
        rows = [row for row in self.samples.get(name, []) if not job_filter or row[0]["job"] == job_filter[1]]
        return {
            "resultType": "vector",
            "result": [{"metric": labels, "value": [NOW, str(value)]} for labels, value in rows],
        }


def group_by_node(server: Server) -> dict[str, str]:
    return {node.node: node.group.value for node in read_fleet(server).nodes}


def text_of_fleet(server: Server, width: int = 100, **options: Any) -> str:
    fleet = read_fleet(server)
    return fleet_text(fleet, select_nodes(fleet, **options), Page(width))


def fleet_of_all_groups() -> Server:
    """Return a server with one node of each group."""
    server = Server("gpu1")
    server.node("gpu2", "unhealthy")
    server.condition("gpu2", "gpu_xid/79", "0000:61:00.0", 3)
    server.condition("gpu2", "gpu_count/missing", "0000:61:00.0", 3)
    server.add(VALUE_QUERIES["drain_desired"], "gpu2")
    server.drained("gpu2", "healthd", "healthd: gpu_xid/79 0000:61:00.0: off the bus", NOW - 3 * HOUR)
    server.node("gpu3", "unhealthy")
    server.condition("gpu3", "mount/stale", "/data", 3)
    server.add(VALUE_QUERIES["drain_desired"], "gpu3")
    server.add(LABEL_QUERIES["held"], "gpu3", partition="train", kind="shared")
    server.add(VALUE_QUERIES["waiting_since"], "gpu3", NOW - 60)
    server.down("gpu4", NOW - 2 * HOUR)
    server.node("gpu5")
    server.drained("gpu5", "other", "DIMM swap, Anna", NOW - 100 * HOUR)
    server.node("gpu6", "warning")
    server.condition("gpu6", "gpu_ecc/corrected", "0000:1b:00.0", 1)
    server.node("gpu7", "unknown")
    server.node("gpu8", "unhealthy")
    server.condition("gpu8", "ib_link/down", "mlx5_0/1", 2)
    labels = {"check": "ib_link", "code": "ib_link/down", "subject": "mlx5_0/1"}
    server.add(CONDITION_QUERIES["acknowledged"], "gpu8", **labels)
    return server


def test_each_node_counts_once_and_most_urgent_is_first():
    assert group_by_node(fleet_of_all_groups()) == {
        "gpu1": "healthy",
        "gpu2": "drained",
        "gpu3": "drain_waiting",
        "gpu4": "not_seen",
        "gpu5": "drained_by_others",
        "gpu6": "warning",
        "gpu7": "unknown",
        "gpu8": "broken",
    }
    fleet = read_fleet(fleet_of_all_groups())
    assert summary(fleet) == (
        "8 nodes: 1 healthy, 1 broken and in service, 1 not reporting for 2 h, 1 drained by healthd, "
        "1 broken (acknowledged), 1 unknown, 1 warning, 1 drained by others"
    )
    assert [node.node for node in select_nodes(fleet)][:3] == ["gpu3", "gpu4", "gpu2"]
    assert [node.node for node in select_nodes(fleet, order="node")] == [f"gpu{n}" for n in range(1, 9)]
    assert next(node.node for node in select_nodes(fleet, order="since")) == "gpu5"


def test_row_states_health_reason_and_duration():
    lines = text_of_fleet(fleet_of_all_groups(), 140).splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[5:]}
    assert rows == {
        "gpu1": "healthy in service",
        "gpu2": "unhealthy drained 3 h gpu_xid/79 0000:61:00.0: off the bus; +1 more",
        "gpu3": "unhealthy in service 60 min mount/stale /data; not drained: waiting for the fleet limit in train",
        "gpu4": "unknown not reporting 2 h does not answer Prometheus",
        "gpu5": "healthy by others 4 days DIMM swap, Anna",
        "gpu6": "warning in service 60 min gpu_ecc/corrected 0000:1b:00.0",
        "gpu7": "unknown in service a check did not complete",
        "gpu8": "unhealthy in service 60 min 1 acknowledged",
    }


def test_select_nodes_filters_rows_but_counts_all():
    fleet = read_fleet(fleet_of_all_groups())
    assert {node.node for node in select_nodes(fleet, drained=True)} == {"gpu2", "gpu5"}
    assert {node.node for node in select_nodes(fleet, problems=True)} == {f"gpu{n}" for n in range(2, 9)}
    assert fleet_document(fleet, select_nodes(fleet, drained=True))["counts"]["nodes"] == 8


@pytest.mark.parametrize(
    ("metric", "labels", "reason"),
    [
        (LABEL_QUERIES["mode"], {"mode": "observe"}, "mode observe"),
        (VALUE_QUERIES["paused_until"], {}, "paused"),
        (VALUE_QUERIES["waiting_since"], {}, "waiting for the fleet limit"),
        (VALUE_QUERIES["slurm_problem"], {}, "Slurm does not answer"),
        ("nothing", {}, "run healthd status on the node"),
    ],
)
def test_row_explains_why_drain_is_not_set(metric, labels, reason):
    server = Server("n1")
    server.add(VALUE_QUERIES["drain_desired"], "n1")
    server.add(metric, "n1", NOW + 60, **labels)
    assert f"not drained: {reason}\n" in text_of_fleet(server)


REASON = "healthd: gpu_xid/119 0000:1b:00.0: (repair: reboot)"


def repaired_fleet() -> Server:
    """Return a server with drained nodes that healthd repairs: one verifies, one is late, one waits, one has failed."""
    server = Server("gpu1", "gpu2", "gpu3", "gpu4")
    for name in ("gpu1", "gpu2", "gpu3", "gpu4"):
        server.drained(name, "healthd", REASON, NOW - HOUR)
    server.add(LABEL_QUERIES["repair"], "gpu1", NOW + 60, step="reboot", stage="verify")
    server.add(LABEL_QUERIES["repair"], "gpu2", NOW - 1200, step="gpu_reset", stage="step")
    server.add(LABEL_QUERIES["repair"], "gpu3", 0, step="reboot", stage="claim")
    server.add(VALUE_QUERIES["repair_failed"], "gpu4")
    return server


def test_repairs_of_seen_nodes_are_shown():
    fleet = read_fleet(repaired_fleet())
    found = {n.node: (n.repair_step, n.repair_stage, n.is_repair_late(NOW), n.repair_failed) for n in fleet.nodes}
    assert found == {
        "gpu1": ("reboot", "verify", False, False),
        "gpu2": ("gpu_reset", "step", True, False),
        "gpu3": ("reboot", "claim", False, False),
        "gpu4": ("", "", False, True),
    }
    document = fleet_document(fleet, fleet.nodes)
    assert (document["in_repair"], document["repair_late"], document["repair_failed"]) == (3, 1, 1)
    assert "4 drained by healthd (2 being repaired, 1 with a late repair, 1 with a failed repair)" in summary(fleet)
    text = text_of_fleet(repaired_fleet(), 140)
    assert "repair: reboot being verified; gpu_xid/119" in text
    assert "repair: GPU reset in progress, 20 min late; gpu_xid/119" in text


@pytest.mark.parametrize(("deadline", "is_late"), [(NOW - 1200, True), (NOW + 1200, False)])
def test_node_that_does_not_come_back_from_a_repair_is_late(deadline, is_late):
    server = Server("n1")
    server.down("n2", NOW - 2 * HOUR)
    server.down("n3", NOW - 2 * HOUR)
    for name in ("n1", "n2"):  # a node that answers has its own deadline
        server.add(VALUE_QUERIES["repair_deadline"], name, deadline)
    fleet = read_fleet(server)
    assert [n.node for n in fleet.nodes if n.is_in_repair] == ["n2"]
    assert [n.node for n in fleet.nodes if n.is_repair_late(NOW)] == (["n2"] if is_late else [])
    assert ("does not come back from a repair, 20 min late" in text_of_fleet(server)) is is_late


def test_exit_status_follows_worst_node():
    assert exit_status(read_fleet(Server("n1", "n2"))) == 0
    server = Server("n1")
    server.node("n2", "warning")
    assert exit_status(read_fleet(server)) == 1
    server.down("n3")
    assert exit_status(read_fleet(server)) == 2


def test_unenforced_conditions_are_not_shown_as_reason():
    server = Server("n1")
    for name in ("suspected", "forgeable", "acknowledged"):
        server.condition("n1", f"x/{name}", "p", 3)
        server.add(CONDITION_QUERIES[name], "n1", check="x", code=f"x/{name}", subject="p")
    (node,) = read_fleet(server).nodes
    assert {c.code: c.is_enforced for c in node.conditions} == {
        "x/suspected": False,
        "x/forgeable": False,
        "x/acknowledged": False,
    }
    assert node.group is Group.HEALTHY
    assert "x/" not in text_of_fleet(server)


def test_never_seen_node_is_named_by_its_address():
    server = Server("n1")
    server.down("gpu-9.example.org")
    (node,) = [node for node in read_fleet(server).nodes if not node.seen]
    assert (node.node, node.last_seen) == ("gpu-9", 0.0)
    assert " in the last 7 days" in text_of_fleet(server)
    assert "1 not reporting\n" in text_of_fleet(server), "the duration is not known"


def test_textfile_metrics_count_without_own_target():
    server = Server()
    server.add(LABEL_QUERIES["node"], "n1", node="n1")
    server.add(LABEL_QUERIES["health"], "n1", state="healthy")
    assert group_by_node(server) == {"n1": "healthy"}


def test_stale_rounds_and_pause_are_shown():
    server = Server("n1", "n2")
    server.add(VALUE_QUERIES["stale_seconds"], "n1", 7200)
    server.add(VALUE_QUERIES["paused_until"], "n2", NOW + 600)
    assert group_by_node(server) == {"n1": "unknown", "n2": "healthy"}
    assert "no check ran for 2 h" in text_of_fleet(server)
    assert " in 10 min" in text_of_fleet(server)
    assert "1 paused" in text_of_fleet(server)


def test_clusters_are_named_and_versions_counted():
    server = Server()
    for cluster, version in (("a", "0.1.0"), ("b", "0.2.0")):
        for metric, labels in (
            ("up", {}),
            (LABEL_QUERIES["node"], {"node": "n1"}),
            (LABEL_QUERIES["version"], {"version": version}),
        ):
            server.add(metric, "n1", 1, cluster=cluster, **labels)
    text = text_of_fleet(server)
    assert "a/n1" in text
    assert "b/n1" in text
    assert "healthd 0.1.0 on 1, 0.2.0 on 1" in text


def test_number_of_queries_does_not_grow_with_nodes():
    small, large = Server("n1", "n2"), Server(*(f"gpu{n:04d}" for n in range(1, 2001)))
    large.down("gpu2001", NOW - HOUR)
    small.down("n3", NOW - HOUR)
    text = text_of_fleet(large, 80)
    read_fleet(small)
    assert len(large.queries) == len(small.queries) < 27
    assert "2,000 healthy: gpu[0001-2000]" in " ".join(text.split())
    assert len(text.splitlines()) < 12
    every = read_fleet(large)
    assert len(fleet_text(every, select_nodes(every), Page(80), show_all=True).splitlines()) > 2000


def test_down_targets_are_queried_in_batches():
    server = Server("n0")
    for n in range(3 * TARGETS_PER_QUERY):
        server.down(f"n{n + 1}", NOW - HOUR)
    fleet = read_fleet(server)
    assert sum(query.startswith("max_over_time") for query in server.queries) == 3
    assert all(node.last_seen for node in fleet.nodes if not node.seen)


def test_failed_last_seen_query_becomes_note():
    server = Server("n1")
    server.down("n2")

    def ask(path: str, parameters: Any) -> Any:
        if parameters["query"].startswith("max_over_time"):
            raise ResponseTooLarge("answers with status 422: too many samples")
        return server(path, parameters)

    fleet = read_fleet(ask)
    assert len(fleet.nodes) == 2
    (note,) = fleet.notes
    assert note.endswith("status 422: too many samples")


def test_few_healthy_nodes_have_one_row_each():
    assert "healthy:" not in text_of_fleet(Server(*(f"n{n}" for n in range(MAX_ROWS_ALIKE))))
    assert f"{MAX_ROWS_ALIKE + 1} healthy: n[0-{MAX_ROWS_ALIKE}]" in text_of_fleet(
        Server(*(f"n{n}" for n in range(MAX_ROWS_ALIKE + 1)))
    )


def test_nodes_with_same_reason_share_one_host_list():
    server = fleet_of_all_groups()
    for n in range(100, 300):
        server.node(f"gpu{n}", "unhealthy")
        server.condition(f"gpu{n}", "mount/stale", "/home", 3)
    text = text_of_fleet(server, 200)
    assert "- 200 unhealthy, in service, mount/stale /home: gpu[100-299]\n" in text
    assert "gpu3      unhealthy" in text or "gpu3  unhealthy" in text
    assert len(text_of_fleet(server, 200, order="node").splitlines()) < 20


def test_hostile_reason_is_escaped_and_cut():
    server = Server("n1")
    server.drained("n1", "other", f"\x1b[2Jgone\n{'x' * 5000}", NOW)
    text = text_of_fleet(server)
    assert "?[2Jgone xxx" in text
    assert "\x1b" not in text
    assert len(text) < 1000


def test_broken_node_without_known_reason_names_status_command():
    server = Server()
    server.node("n1", "unhealthy")
    assert summary(read_fleet(server)) == "1 node: 1 broken"
    assert "run healthd status" in text_of_fleet(server)


def server_with_two_jobs(*names: str, health: str = "unhealthy") -> Server:
    """Return nodes that are scraped directly and also through the textfile collector of node_exporter."""
    server = Server()
    for name in names:
        server.node(name, health)
        server.add(START_QUERY, name, NOW - 100.25)
        textfile = {"job": "node", "instance": f"{name}:9100"}
        server.add(LABEL_QUERIES["node"], name, node=name, **textfile)
        server.add(LABEL_QUERIES["health"], name, state="healthy", **textfile)
        server.add(START_QUERY, name, NOW - 9.5, **textfile)
    return server


def test_node_in_two_jobs_counts_once_by_own_target():
    fleet = read_fleet(server_with_two_jobs("n1", "n2"))
    assert [(node.node, node.instance, node.health) for node in fleet.nodes] == [
        ("n1", "n1:9478", "unhealthy"),
        ("n2", "n2:9478", "unhealthy"),
    ]
    assert fleet.notes == ()


def test_job_option_selects_only_targets_of_job():
    server = server_with_two_jobs("n1", "n2")
    fleet = read_fleet(server, "node")
    assert [(node.instance, node.health) for node in fleet.nodes] == [("n1:9100", "healthy"), ("n2:9100", "healthy")]
    assert all('job="node"' in query for query in server.queries[1:])
    with pytest.raises(ServerError, match='no target of the job "other"'):
        read_fleet(server, "other")


def test_textfile_does_not_replace_down_healthd():
    server = server_with_two_jobs("n1")
    for metric, rows in server.samples.items():
        server.samples[metric] = [row for row in rows if row[0]["job"] != "healthd"]
    server.down("n1.example.org")
    server.samples["up"][0][0]["instance"] = "n1:9478"
    assert group_by_node(server) == {"n1": "not_seen"}


def test_newest_of_two_other_jobs_counts():
    server = Server()
    for job, started in (("a", NOW - 500), ("b", NOW - 100), ("c", NOW - 300)):
        server.add(LABEL_QUERIES["node"], "n1", node="n1", job=job)
        server.add(LABEL_QUERIES["mode"], "n1", mode=job, job=job)
        server.add(START_QUERY, "n1", started, job=job)
    (node,) = read_fleet(server).nodes
    assert node.mode == "b"


def test_targets_of_one_job_are_merged_only_for_same_healthd():
    server = Server()
    for instance, started in (("n1:9478", 5.25), ("10.0.0.1:9478", 5.25), ("10.1.0.1:9478", 7.5)):
        server.add(LABEL_QUERIES["node"], "n1", node="n1", instance=instance)
        server.add(START_QUERY, "n1", NOW - started, instance=instance)
    fleet = read_fleet(server)
    assert [node.instance for node in fleet.nodes] == ["10.0.0.1:9478", "10.1.0.1:9478"]
    (note,) = fleet.notes
    assert "(1: n1)" in note
    assert "cluster label" in note


def test_down_address_is_matched_to_node_of_other_job():
    server = Server()
    server.down("10.0.0.1")
    server.add(LABEL_QUERIES["node"], "n1", node="n1", job="node", instance="10.0.0.1:9100")
    assert group_by_node(server) == {"n1": "not_seen"}


@pytest.mark.parametrize("number", [-1e308, 1e300, -1, float("nan"), float("inf"), float("-inf"), 1e13])
@pytest.mark.parametrize("metric", ["drained_since", "paused_until", "waiting_since", "stale_seconds"])
def test_invalid_time_is_not_known(metric, number):
    server = Server("n1")
    server.condition("n1", "mount/stale", "/data", 3, since=number)
    server.add(LABEL_QUERIES["owner"], "n1", owner="healthd")
    server.add(VALUE_QUERIES[metric], "n1", number)
    fleet = read_fleet(server)
    (node,) = fleet.nodes
    assert (node.drained_since, node.paused_until, node.waiting_since) == (0, 0, 0)
    assert node.conditions[0].since == 0
    assert max(map(len, text_of_fleet(server, 400).splitlines())) < 120
    assert "invalid series" in fleet.notes[-1]


def test_invalid_server_time_is_error():
    def ask(path: str, parameters: Any) -> Any:
        return {"resultType": "scalar", "result": [NOW, "-1e308"]}

    with pytest.raises(ServerError, match="returned an invalid time"):
        read_fleet(ask)


TEXTS = st.text(max_size=20)
SAMPLE = st.fixed_dictionaries(
    {"metric": st.dictionaries(st.sampled_from(["instance", "job", "node", "code", "cluster", "owner"]), TEXTS)},
    optional={
        "value": st.one_of(st.tuples(st.floats(), st.one_of(TEXTS, st.floats().map(str))), st.none(), st.just([]))
    },
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | TEXTS | SAMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ANSWER = ANYTHING | st.fixed_dictionaries(
    {"resultType": st.sampled_from(["vector", "scalar"]), "result": st.lists(SAMPLE | ANYTHING, max_size=4)}
)


@given(st.lists(ANSWER, min_size=1, max_size=30), st.booleans())
def test_any_response_is_fleet_or_one_sentence(answers, has_time):
    remaining = list(answers)

    def ask(path: str, parameters: Any) -> Any:
        if has_time and parameters["query"] == "time()":
            return {"resultType": "scalar", "result": [NOW, str(NOW)]}
        return remaining.pop() if remaining else {"resultType": "vector", "result": []}

    try:
        fleet = read_fleet(ask)
    except ServerError:
        return
    text = fleet_text(fleet, select_nodes(fleet), Page(80))
    assert text.replace("\n", "").isprintable()
    json.dumps(fleet_document(fleet, select_nodes(fleet)), allow_nan=False)


# --- the command


class CommandResult(NamedTuple):
    status: int
    out: str
    err: str


def run(*arguments: str, **environment: str) -> CommandResult:
    command = [sys.executable, "-m", "healthd", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    return CommandResult(completed.returncode, completed.stdout, completed.stderr)


@contextmanager
def serving(ask: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (query,) = parse_qs(urlsplit(self.path).query)["query"]
            body = json.dumps({"status": "success", "data": ask("query", {"query": query})}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_command_prints_text_and_json():
    with serving(fleet_of_all_groups()) as url:
        result = run("fleet", "status", "--prometheus", url)
        assert (result.status, result.err) == (2, "")
        assert result.out.startswith("8 nodes: 1 healthy, ")
        text = run("fleet", "status", "--prometheus", url, "--json", "--drained")
        assert text.status == 2
        assert [node["node"] for node in json.loads(text.out)["nodes"]] == ["gpu2", "gpu5"]
        assert run("fleet", "status", HEALTHD_PROMETHEUS=url).status == 2


def test_missing_healthd_or_server_exits_with_3():
    with serving(Server()) as url:
        result = run("fleet", "status", "--prometheus", url)
        assert (result.status, result.out) == (3, "")
        assert re.search(r'no target .*"healthd"', result.err)
    result = run("fleet", "status", "--prometheus", url)
    assert (result.status, result.err.count("\n")) == (3, 1)
    assert result.err.startswith(f"healthd fleet status: {url}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prometheus", "ftp://x"), "is not a server address"),
        (("--prometheus", "http://[x"), "is not a server address"),
        (("--prometheus", "http://x:99999"), "is not a server address"),
        (("--prometheus", "http://\u00fc.example"), "is not a server address"),
        (("--prometheus", "http://al:secret@x"), "put it into a file"),
        (("--basic-file", "/none"), "/none cannot be read"),
        (("--drained", "--problems"), "not allowed with"),
    ],
)
def test_usage_error_is_one_sentence(arguments, message):
    result = run("fleet", "status", *arguments)
    assert (result.status, result.err.count("\n")) == (64, 1)
    assert message in result.err


# --- NVLink domains

RACK, OTHER_RACK = "00000001-0000-0000-0000-000000000001", "00000001-0000-0000-0000-000000000002"


def two_racks() -> Server:
    server = Server(*(f"t{n}" for n in range(1, 10)))
    for n in range(1, 7):
        server.add(LABEL_QUERIES["domain"], f"t{n}", domain=RACK, id="1a2b3c4d")
    for n in range(7, 9):
        server.add(LABEL_QUERIES["domain"], f"t{n}", domain=OTHER_RACK, id="5e6f7a8b")
    return server


def test_fleet_status_shows_each_nvlink_domain() -> None:
    server = two_racks()
    assert "2 NVLink domains: all nodes are healthy" in text_of_fleet(server)
    server.drained("t1", "healthd", "healthd: gpu_xid/79: x (domain 1a2b3c4d)", NOW - HOUR)
    server.drained("t2", "other", "DIMM swap", NOW - HOUR)
    server.samples["up"] = [
        (labels, 0 if labels["instance"] == "t3:9478" else up) for labels, up in server.samples["up"]
    ]
    for query in (LABEL_QUERIES["node"], LABEL_QUERIES["health"]):
        server.samples[query] = [row for row in server.samples[query] if row[0]["instance"] != "t3:9478"]
    health = [row for row in server.samples[LABEL_QUERIES["health"]] if row[0]["instance"] == "t4:9478"]
    health[0][0]["state"] = "warning"
    text = text_of_fleet(server, width=120)
    assert "6 nodes: 2 healthy, 2 drained, 1 not reporting, 1 with problems; largest job: 3 nodes\n" in text
    assert "1 other NVLink domain: all nodes are healthy\n" in text
    fleet = read_fleet(server)
    document = fleet_document(fleet, fleet.nodes)
    counts = {"nodes": 6, "healthy": 2, "drained": 2, "not_seen": 1, "other": 1, "largest_job": 3, "blocks": None}
    assert document["domains"][0] == {"cluster": "", "domain": RACK, "id": "1a2b3c4d", **counts}
    assert [domain["domain"] for domain in document["domains"]] == [RACK, OTHER_RACK]
    domains = {node["node"]: node["domain_id"] for node in document["nodes"]}
    assert (domains["t3"], domains["t7"], domains["t9"]) == ("1a2b3c4d", "5e6f7a8b", None)


BLOCKS = "BlockName=b1 Nodes=t[1-4]\nBlockName=b2 Nodes=t[5-6]\nBlockName=b3 Nodes=t[7-8]\nBlockSizes=2,4\n"


def test_largest_job_uses_the_blocks_of_slurm(tmp_path) -> None:
    server = two_racks()
    server.drained("t1", "other", "DIMM swap", NOW - HOUR)
    topology = tmp_path / "topology.conf"
    topology.write_text(BLOCKS)
    with serving(server) as url:
        result = run("fleet", "status", "--prometheus", url, "--topology", str(topology), "--json")
    document = json.loads(result.out)
    first = document["domains"][0]
    assert document["block_sizes"] == [2, 4]
    assert first["largest_job"] == 5
    assert first["blocks"] == [{"block": "b1", "nodes": 4, "usable": 3}, {"block": "b2", "nodes": 2, "usable": 2}]
    with serving(server) as url:
        text = run("fleet", "status", "--prometheus", url, "--topology", str(topology)).out
    assert "largest job: 5 nodes (usable nodes by block: b1 3 of 4, b2 2 of 2)" in " ".join(text.split())


def test_largest_job_without_blocks_counts_usable_nodes_of_the_domain(tmp_path) -> None:
    server = two_racks()
    topology = tmp_path / "topology.conf"
    topology.write_text("BlockName=b1 Nodes=other[1-4]\n")
    with serving(server) as url:
        document = json.loads(run("fleet", "status", "--prometheus", url, "--topology", str(topology), "--json").out)
    assert [(d["largest_job"], d["blocks"]) for d in document["domains"]] == [(6, None), (2, None)]
    (note,) = document["notes"]
    assert "--topology" in note
    assert "1a2b3c4d, 5e6f7a8b" in note


@pytest.mark.parametrize("order", [1, -1])
def test_node_that_changed_its_domain_counts_only_in_the_newest(order: int) -> None:
    server = two_racks()
    server.down("t10", NOW - HOUR)
    last_times = [(RACK, NOW - 24 * HOUR), (OTHER_RACK, NOW - HOUR)]
    for domain, last_time in last_times[::order]:
        server.add(LABEL_QUERIES["domain"], "t10", domain=domain, id=domain[:8])
        server.add("last domain", "t10", last_time, domain=domain, id=domain[:8])
    domains = {node.node: (node.domain, node.domain_id) for node in read_fleet(server).nodes}
    assert domains["t10"] == (OTHER_RACK, OTHER_RACK[:8])
    assert domains["t1"] == (RACK, "1a2b3c4d")


def test_last_samples_of_domains_are_read_only_for_nodes_with_several() -> None:
    server = two_racks()
    server.add(LABEL_QUERIES["domain"], "t1", domain=RACK, id="1a2b3c4d", rack="added to the target")
    read_fleet(server)
    assert not any(query.startswith("max_over_time") for query in server.queries)
    server.add(LABEL_QUERIES["domain"], "t1", domain=OTHER_RACK, id="5e6f7a8b")
    read_fleet(server, "healthd")
    (query,) = [query for query in server.queries if query.startswith("max_over_time")]
    assert 'job="healthd"' in query
    assert "t1:9478" in query
    assert "t2:9478" not in query


def test_domain_is_unknown_if_its_last_sample_cannot_be_read() -> None:
    server = two_racks()
    server.add(LABEL_QUERIES["domain"], "t1", domain=OTHER_RACK, id="5e6f7a8b")

    def ask(path: str, parameters: Any) -> Any:
        if parameters["query"].startswith("max_over_time"):
            raise ResponseTooLarge("answers with status 422: too many samples")
        return server(path, parameters)

    fleet = read_fleet(ask)
    assert {node.node: node.domain for node in fleet.nodes}["t1"] == ""
    (note,) = fleet.notes
    assert "NVLink domain" in note


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("BlockName=b1 Nodes=t[1-8]\n", []),
        ("BlockName=b1 Nodes=t1,t7\n", []),
        ("BlockName=b1 Nodes=t[1-6]\n", ["5e6f7a8b"]),
        ("BlockName=b1 Nodes=T[1-9]\n", ["1a2b3c4d", "5e6f7a8b"]),
    ],
)
def test_topology_notes_name_the_domains_without_a_block(blocks: str, expected: list[str]) -> None:
    topology = parse_topology(blocks)
    assert topology is not None
    notes = " ".join(topology_notes(read_fleet(two_racks()), topology))
    assert re.findall("[0-9a-f]{8}", notes) == expected


def test_topology_notes_name_a_few_of_many_domains() -> None:
    server = Server(*(f"t{n}" for n in range(20)))
    topology = parse_topology("BlockName=b1 Nodes=other\n")
    assert topology is not None
    (note,) = topology_notes(read_fleet(server), topology)
    assert "no effect" in note
    for n in range(20):
        server.add(LABEL_QUERIES["domain"], f"t{n}", domain=f"{RACK[:-2]}{n:02}", id=f"{n:08x}")
    (note,) = topology_notes(read_fleet(server), topology)
    assert note.count("000000") == 5
    assert "and 15 more" in note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SwitchName=s1 Nodes=t[1-4]\n", "has no BlockName="),
        ("BlockName=b1 Nodes=t[1-4]\nBlockSizes=3,5\n", "times a power of two"),
        ("BlockName=b1 Nodes=t[1-4]\nBlockSizes=x\n", "not a block size"),
        ("BlockName=b1 Nodes=t[4\n", "unclosed brackets"),
        ("BlockName=b1 Nodes=t[1-4]\nBlockLevels=0-1\n", "BlockSizes="),
        ("BlockName=b1 BlockIndex=0 Nodes=t[1-4]\n", "24.11"),
        ('BlockName=b1 Nodes=""\n', "no block has nodes"),
        ("BlockName=b1 Nodes=t[1-4]\nBlockName=b2 Nodes=t[4-6]\n", "topology.conf: node t4 is in the blocks b1 and b2"),
        (
            "BlockName=b1 BlockIndex=0 Nodes=t1 BlockSize=1\nBlockName=c1 BlockIndex=0 Nodes=t2 BlockSize=1\n",
            "topology.conf: BlockIndex=0 occurs twice",
        ),
        ("- topology: racks\n  block:\n    blocks:\n      - block: b1\n        nodes: t[1-4]\n", "topology NAME"),
    ],
)
def test_bad_topology_is_one_sentence(tmp_path, text, message) -> None:
    topology = tmp_path / "topology.conf"
    topology.write_text(text)
    result = run("fleet", "status", "--topology", str(topology))
    assert (result.status, result.err.count("\n")) == (64, 1)
    assert message in result.err
    assert run("fleet", "status", "--topology", str(tmp_path / "none")).status == 64


def test_fleet_status_without_nvlink_domains_does_not_mention_them() -> None:
    fleet = read_fleet(fleet_of_all_groups())
    assert "NVLink" not in text_of_fleet(fleet_of_all_groups())
    assert fleet_document(fleet, fleet.nodes)["domains"] == []
