"""Tests of `healthd fleet lemons --apply`: the Slurm calls for one node, and when it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from slurm_text import columns

from healthd.agent.settings.config import FleetLimits, Settings
from healthd.agent.slurm import drain_lemon
from healthd.agent.slurm.drain_lemon import LemonResult
from healthd.cli.fleet import lemons
from healthd.cli.terminal import UNKNOWN, USAGE_ERROR, Stop
from healthd.common.slurm import commands
from healthd.common.slurm.commands import Argv, CommandResult
from healthd.common.slurm.output import SlurmError, parse_lemons

DAY = 86400
NOW = 1_800_000_000.0


def node(name: str, state: str = "IDLE", reason: str = "none") -> bytes:
    return columns(("gpu", "1", state, "Unknown", "Unknown", reason, ""), commands.NODE_COLUMNS)


def drain_node(
    name: str, drained_table: bytes, limit: int = 1, node_table: bytes | None = None
) -> tuple[LemonResult, list[Argv]]:
    """Return the result and the Slurm calls of a drain, with these tables from sinfo."""
    calls: list[Argv] = []
    steps = drain_lemon.drain(name, "3 Xids in 28 d", limit, FleetLimits(), 30.0)
    fleet = columns(("gpu", "idle", "Unknown", "none", "100"), commands.FLEET_COLUMNS)
    state = node(name) if node_table is None else node_table
    out = b""
    try:
        command = next(steps)
        while True:
            calls.append(command.argv)
            if command.changes:
                state, out = node(name, "IDLE+DRAIN", "lemon: 3 Xids in 28 d"), b""
            else:
                out = {commands.node(name): state, commands.drained_nodes(): drained_table, commands.fleet(): fleet}[
                    command.argv
                ]
            command = steps.send(CommandResult(0, out))
    except StopIteration as end:
        result: LemonResult = end.value
        return result, calls


def changes(calls: list[Argv]) -> list[Argv]:
    return [argv for argv in calls if "update" in argv]


def test_drain_sends_update_below_limit() -> None:
    result, calls = drain_node("g1", columns(("g2", "healthd"), commands.DRAINED_COLUMNS))
    assert result.done
    assert changes(calls) == [commands.drain("g1", "lemon: 3 Xids in 28 d")]


def test_drain_counts_earlier_lemons_once_per_node() -> None:
    drained_table = 3 * columns(("g2", "lemon: "), commands.DRAINED_COLUMNS)
    result, calls = drain_node("g1", drained_table, limit=1)
    assert not result.done
    assert result.text.partition("1 nodes ")[2].endswith(" limit is 1")
    assert changes(calls) == []
    assert drain_node("g1", drained_table, limit=2)[0].done


def test_drain_skips_unknown_node() -> None:
    result, calls = drain_node("g1", b"", node_table=b"")
    assert (result.done, '"g1"' in result.text) == (False, True)
    assert changes(calls) == []


@pytest.mark.parametrize(
    "name", ["a[1-3]", "ALL", "all", "NODESET", "n1,n2", "n 1", "n1 ", "n1;reboot", "-n1", "", "n1\n", "n1=x", "ñ1"]
)
def test_drain_queries_no_invalid_node_name(name: str) -> None:
    result, calls = drain_node(name, b"")
    assert (result, calls) == (LemonResult(name, False, result.text), [])


def test_parse_lemons_rejects_cut_table() -> None:
    with pytest.raises(SlurmError, match="incomplete table"):
        parse_lemons(columns(("g2", "lemon: "), commands.DRAINED_COLUMNS).rstrip(b"\n"))
    assert parse_lemons(b"") == frozenset()


def test_drain_rejects_unreadable_row() -> None:
    unread = columns(("night", "1", "???", "", "", "", ""), commands.NODE_COLUMNS)
    with pytest.raises(SlurmError, match="could not be read"):
        drain_node("g1", b"", node_table=node("g1") + unread)


# --- refusals


def lemons_document(known_until: float | None, *clusters: str) -> dict[str, Any]:
    return {
        "window": {"known_until": None if known_until is None else round(known_until)},
        "fleets": [{"cluster": cluster} for cluster in clusters],
    }


@pytest.mark.parametrize("known_until", [None, NOW - DAY - 1, NOW - 400 * DAY, NOW + DAY + 1])
def test_require_current_rejects_store_of_other_time(known_until: float | None) -> None:
    with pytest.raises(Stop, match="not within a day of now") as stop:
        lemons.require_current(lemons_document(known_until), None, NOW)
    assert stop.value.status == UNKNOWN


@pytest.mark.parametrize("until", [NOW - 1, NOW - 400 * DAY, NOW + DAY + 1])
def test_require_current_rejects_end_other_than_now(until: float) -> None:
    with pytest.raises(Stop, match="omit --to") as stop:
        lemons.require_current(lemons_document(NOW), round(until), NOW)
    assert stop.value.status == USAGE_ERROR


@pytest.mark.parametrize("until", [None, round(NOW), round(NOW) + 60])
def test_require_current_accepts_end_within_one_day(until: int | None) -> None:
    lemons.require_current(lemons_document(NOW - DAY + 1), until, NOW)


def install_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a scontrol with this script first on PATH."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("clusters", "chosen", "answer", "sentence", "status"),
    [
        (("near",), "", "BOOT_TIME = 1", "name the cluster with --cluster", USAGE_ERROR),
        (("far",), "", "ClusterName             = near", "cluster far, but the local cluster is near", USAGE_ERROR),
        (("far",), "far", "ClusterName             = near", "cluster far, but the local cluster is near", USAGE_ERROR),
        (("far", "near"), "", "ClusterName             = near", "the store has clusters far, near", USAGE_ERROR),
        (("near",), "near", "", "", 0),
        (("Near",), "", "ClusterName             = near", "", 0),
        (("near",), "near", "ClusterName             = near", "", 0),
    ],
)
def test_require_this_cluster_needs_local_cluster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clusters: tuple[str, ...],
    chosen: str,
    answer: str,
    sentence: str,
    status: int,
) -> None:
    install_scontrol(tmp_path, monkeypatch, f"echo '{answer}'")
    if not sentence:
        lemons.require_this_cluster(lemons_document(NOW, *clusters), chosen, Settings())
        return
    with pytest.raises(Stop, match=sentence) as stop:
        lemons.require_this_cluster(lemons_document(NOW, *clusters), chosen, Settings())
    assert stop.value.status == status


def test_require_this_cluster_stops_when_scontrol_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_scontrol(tmp_path, monkeypatch, "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(Stop, match=r"scontrol show: Unable to contact .* \(drained so far: none\)") as stop:
        lemons.require_this_cluster(lemons_document(NOW, "near"), "near", Settings())
    assert stop.value.status == UNKNOWN
