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


def drained(name: str, held: bytes, most: int = 1, shown: bytes | None = None) -> tuple[LemonResult, list[Argv]]:
    """Return the result and the Slurm calls of a drain, with these tables from sinfo."""
    asked: list[Argv] = []
    steps = drain_lemon.drain(name, "3 Xids in 28 d", most, FleetLimits(), 30.0)
    fleet = columns(("gpu", "idle", "Unknown", "none", "100"), commands.FLEET_COLUMNS)
    state = node(name) if shown is None else shown
    out = b""
    try:
        command = next(steps)
        while True:
            asked.append(command.argv)
            if command.changes:
                state, out = node(name, "IDLE+DRAIN", "lemon: 3 Xids in 28 d"), b""
            else:
                out = {commands.node(name): state, commands.drained_nodes(): held, commands.fleet(): fleet}[
                    command.argv
                ]
            command = steps.send(CommandResult(0, out))
    except StopIteration as end:
        done: LemonResult = end.value
        return done, asked


def changes(asked: list[Argv]) -> list[Argv]:
    return [argv for argv in asked if "update" in argv]


def test_a_node_is_drained_where_there_is_room() -> None:
    done, asked = drained("g1", columns(("g2", "healthd"), commands.DRAINED_COLUMNS))
    assert done.done
    assert changes(asked) == [commands.drain("g1", "lemon: 3 Xids in 28 d")]


def test_lemons_that_an_earlier_run_drained_count_once_for_each_node_whatever_their_partitions() -> None:
    held = 3 * columns(("g2", "lemon: "), commands.DRAINED_COLUMNS)
    done, asked = drained("g1", held, most=1)
    assert not done.done
    assert "1 nodes in the cluster are already drained as lemons; the limit is 1" in done.text
    assert changes(asked) == []
    assert drained("g1", held, most=2)[0].done


def test_a_node_that_slurm_does_not_have_is_left_and_said() -> None:
    done, asked = drained("g1", b"", shown=b"")
    assert (done.done, done.text) == (False, 'left: Slurm has no node "g1" in any partition')
    assert changes(asked) == []


@pytest.mark.parametrize(
    "name", ["a[1-3]", "ALL", "all", "NODESET", "n1,n2", "n 1", "n1 ", "n1;reboot", "-n1", "", "n1\n", "n1=x", "ñ1"]
)
def test_what_is_no_name_of_one_node_is_never_asked_of_slurm(name: str) -> None:
    assert drained(name, b"") == (LemonResult(name, False, "skipped: not a valid node name"), [])


def test_a_table_of_lemons_that_was_cut_is_no_count() -> None:
    with pytest.raises(SlurmError, match="incomplete table"):
        parse_lemons(columns(("g2", "lemon: "), commands.DRAINED_COLUMNS).rstrip(b"\n"))
    assert parse_lemons(b"") == frozenset()


def test_a_node_with_a_row_that_cannot_be_read_is_not_drained() -> None:
    unread = columns(("night", "1", "???", "", "", "", ""), commands.NODE_COLUMNS)
    with pytest.raises(SlurmError, match="could not be read"):
        drained("g1", b"", shown=node("g1") + unread)


# --- refusals


def told(known_until: float | None, *clusters: str) -> dict[str, Any]:
    return {
        "window": {"known_until": None if known_until is None else round(known_until)},
        "fleets": [{"cluster": cluster} for cluster in clusters],
    }


@pytest.mark.parametrize("known_until", [None, NOW - DAY - 1, NOW - 400 * DAY, NOW + DAY + 1])
def test_nothing_is_drained_for_what_is_long_past_or_yet_to_come(known_until: float | None) -> None:
    with pytest.raises(Stop, match="not within a day of now") as stop:
        lemons.require_current(told(known_until), None, NOW)
    assert stop.value.status == UNKNOWN


@pytest.mark.parametrize("until", [NOW - 1, NOW - 400 * DAY, NOW + DAY + 1])
def test_a_time_that_is_not_now_is_wrong_use(until: float) -> None:
    with pytest.raises(Stop, match="leave --to out") as stop:
        lemons.require_current(told(NOW), round(until), NOW)
    assert stop.value.status == USAGE_ERROR


@pytest.mark.parametrize("until", [None, round(NOW), round(NOW) + 60])
def test_what_ended_within_a_day_is_now(until: int | None) -> None:
    lemons.require_current(told(NOW - DAY + 1), until, NOW)


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a scontrol with this script first on PATH."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("clusters", "said", "answer", "sentence", "status"),
    [
        (("near",), "", "BOOT_TIME = 1", "name the store's cluster with --cluster", USAGE_ERROR),
        (("far",), "", "ClusterName             = near", "cluster far, but the local cluster is near", USAGE_ERROR),
        (("far",), "far", "ClusterName             = near", "cluster far, but the local cluster is near", USAGE_ERROR),
        (("far", "near"), "", "ClusterName             = near", "the store has clusters far, near", USAGE_ERROR),
        (("near",), "near", "", "", 0),
        (("Near",), "", "ClusterName             = near", "", 0),
        (("near",), "near", "ClusterName             = near", "", 0),
    ],
)
def test_only_the_cluster_whose_slurm_is_asked_is_drained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clusters: tuple[str, ...],
    said: str,
    answer: str,
    sentence: str,
    status: int,
) -> None:
    scontrol(tmp_path, monkeypatch, f"echo '{answer}'")
    if not sentence:
        lemons.require_this_cluster(told(NOW, *clusters), said, Settings())
        return
    with pytest.raises(Stop, match=sentence) as stop:
        lemons.require_this_cluster(told(NOW, *clusters), said, Settings())
    assert stop.value.status == status


def test_a_slurm_that_fails_to_say_its_name_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(Stop, match=r"scontrol show: Unable to contact .* \(drained so far: none\)") as stop:
        lemons.require_this_cluster(told(NOW, "near"), "near", Settings())
    assert stop.value.status == UNKNOWN
