"""A made-up history for which each fleet query returns rows, with and without a filter."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fleet_history import BEGIN, CLUSTERS, DAY, FIRST, HOUR, NODES, History, history, row

from healthd.fleet.answers.study import Choice

CHOSEN = Choice(cluster="c1", partition="train", account="speech", model="H100", switch="leaf1")
MODELS, SWITCHES = ("H100", "H100", "A100"), ("leaf1", "leaf1", "leaf2")


def complete(random: Random, size: int = 60) -> History:
    """Return `history` plus partitions, accounts, users, long runs, tickets, failures and lines of checks."""
    tables = history(random, size)
    for number, job in enumerate(tables["jobs"]):
        job["partition"] = ("train", "debug,train", "train", "debug", None)[number % 5]
        job["account"] = ("speech", "speech", "vision", None)[number % 4]
        job["user_name"] = ("ann", "bob", None)[number % 3]
    tables["nodes"] = [_node_row(cluster, position) for cluster in CLUSTERS for position in range(len(NODES))]
    for cluster in CLUSTERS:
        _add_long_run(tables, cluster)
        for node in NODES:
            _add_records(tables, cluster, node)
            tables["events"] += (stream := _stream_rows(cluster, node))
            tables["gpus"] += [gpu for line in stream if line["event"] == "gpus" for gpu in _gpu_rows(line)]
        for source in ("sacct", "events", "node_states"):
            tables["ingests"].append(
                row(
                    "ingests",
                    cluster=cluster,
                    source=source,
                    name="complete",
                    from_time=BEGIN,
                    to_time=BEGIN + 3 * DAY,
                    read_time=FIRST + 6 * DAY,
                    rows_read=10,
                    rows_unread=1,
                )
            )
    return tables


def _node_row(cluster: str, position: int) -> dict[str, Any]:
    return row(
        "nodes",
        cluster=cluster,
        node=NODES[position],
        gpus=8,
        gpu_model=MODELS[position],
        switch=SWITCHES[position],
        partitions=("train", None, "debug,train")[position],
        rack=f"r{position}",
    )


def _add_long_run(tables: History, cluster: str) -> None:
    """Add a run of two attempts of 20 h, the first ended by a node failure, and two concurrent runs of one name."""
    start = BEGIN + HOUR
    for index, (key, begin, hours, state) in enumerate(
        (
            ("long", start, 20, "NODE_FAIL"),
            ("long", start + 20 * HOUR, 20, "COMPLETED"),
            ("family", start, 20, "COMPLETED"),
            ("family", start + HOUR, 20, "FAILED"),
        ),
        1001,
    ):
        job = {"cluster": cluster, "db_index": index, "submit_time": begin, "start_time": begin + 60}
        job["end_time"] = begin + hours * HOUR
        tables["jobs"].append(
            row(
                "jobs",
                **job,
                job_id=index,
                state=state,
                nodes=2,
                gpus=16,
                run_key=key,
                partition="train",
                account="speech",
                user_name="ann",
            )
        )
        tables["job_nodes"] += [row("job_nodes", **job, node=node, gpus=8.0) for node in NODES[:2]]


def _add_records(tables: History, cluster: str, node: str) -> None:
    """Add a ticket, a failure of another tool and a maintenance reservation for a node."""
    time = BEGIN + 21 * HOUR
    tables["tickets"].append(
        row("tickets", cluster=cluster, node=node, opened_time=time, closed_time=time + DAY, text="GPU 3 was replaced")
    )
    tables["failures"].append(row("failures", cluster=cluster, node=node, time=time, kind="gpu"))
    tables["reservations"].append(
        row(
            "reservations",
            cluster=cluster,
            name="maintenance",
            node=node,
            start_time=time,
            end_time=time + 6 * HOUR,
            maintenance=True,
        )
    )


def _gpu_rows(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs that a line lists: one stays, and one fails and is replaced."""
    event = {name: line[name] for name in ("cluster", "node", "stream_id", "seq", "time")}
    serials = {"p0": f"{line['cluster']}-{line['node']}-0", "p1": f"{line['cluster']}-{line['node']}-{line['seq']}"}
    return [
        row("gpus", **event, subject=slot, serial=serial, uuid=f"GPU-{serial}", name="H100")
        for slot, serial in serials.items()
    ]


def _stream_rows(cluster: str, node: str) -> list[dict[str, Any]]:
    """Return a stream without gaps: checks that are enabled and changed, alive lines of three days, and conditions."""
    checks = {"rest": json.dumps({"checks": ["gpu_ecc", "ib_link", "validation"]})}
    times: list[tuple[int, dict[str, Any]]] = [(BEGIN, {"event": "started"})]
    times += [(BEGIN + 60, {"event": "gpus"}), (BEGIN + 30 * HOUR, {"event": "gpus"})]
    times += [(BEGIN + day * DAY + HOUR, {"event": "alive", **checks}) for day in range(3)]
    times += [(BEGIN + HOUR // 2, {"event": "check_enabled", "check_name": name}) for name in ("gpu_ecc", "ib_link")]
    times += [(BEGIN + 2 * DAY, {"event": "check_changed", "check_name": "gpu_ecc", "version": "2"})]
    times += [(BEGIN + 2 * DAY + HOUR, {"event": "check_disabled", "check_name": "ib_link"})]
    for number, (code, kind) in enumerate(
        (
            ("validation/failed", "level"),
            ("gpu_ecc/aggregate", "level"),
            ("ib_link/down", "level"),
            ("gpu_xid/79", "edge"),
            ("failslow/job", "level"),
            ("gpu_nvlink/inactive", "level"),
        )
    ):
        first = BEGIN + 20 * HOUR + 600 * number
        condition = {
            "condition_id": f"{code}-{first}",
            "check_name": code.partition("/")[0],
            "code": code,
            "subject": "p1",
            "severity": "critical",
            "kind": kind,
            "first_time": first,
            "last_time": first,
            "times": 1,
            "observed": False,
            "history": False,
        }
        if code == "failslow/job":
            condition |= {"severity": "warning", "slowdown": 0.25, "onset_time": first - 60, "jobs": "1001"}
        if code == "gpu_nvlink/inactive":
            condition |= {"nvlink_domain": "00000001-0000-0000-0000-000000000001"}
        times += [(first, {**condition, "event": "opened"})]
        times += [(first + HOUR, {**condition, "event": "cleared", "cleared_by": "pass", "last_time": first + HOUR})]
    times += [
        (BEGIN + 20 * HOUR + 60 * number, {"event": event, "stage": "confirmed", "reason": "healthd: gpu_xid/79"})
        for number, event in enumerate(("drain", "resume"))
    ]
    step = {"id": "20261101T200000Z-reboot", "step": "reboot", "causes": ["gpu_xid/79 p1"], "seconds": 180.0}
    times += [
        (BEGIN + 20 * HOUR + 10 + 10 * number, {"event": "repair", "stage": stage, "rest": json.dumps(step)})
        for number, stage in enumerate(("claimed", "taken", "succeeded"))
    ]
    times.sort(key=lambda line: line[0])
    return [
        row(
            "events",
            cluster=cluster,
            node=node,
            boot_id="complete",
            stream_id=f"complete-{cluster}-{node}",
            seq=seq,
            time=time,
            mono=float(100 + time - BEGIN),
            schema_version=1,
            **fields,
        )
        for seq, (time, fields) in enumerate(times, 1)
    ]
