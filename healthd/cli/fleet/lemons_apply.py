"""`healthd fleet lemons --apply`: the lemons are drained, one after another."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli.flags import load_settings, wrong_settings_are_wrong_use
from healthd.cli.terminal import UNKNOWN, Stop
from healthd.common.text import printable

if TYPE_CHECKING:
    from healthd.agent.settings.config import Settings
    from healthd.common.slurm.commands import Argv
    from healthd.fleet.answers.document import Document

WHO = "healthd fleet lemons: --apply"
OLD_SECONDS = 86400.0  # after that a node may have been repaired, and nobody told the store


def is_old(lemons: Document, now: float) -> bool:
    """Whether what the store knows does not end within a day of now. A time that is to come is no better."""
    known_until = lemons["window"]["known_until"]
    return known_until is None or abs(now - known_until) > OLD_SECONDS


def require_now(lemons: Document, until: int | None, now: float) -> None:
    """A drain acts on the nodes as they are now: so must what it stands on. until: what --to says."""
    from healthd.fleet.answers.document import moment

    if until is not None and not now <= until <= now + OLD_SECONDS:
        raise Stop(f"{WHO}: it drains the nodes of now, and --to asks of another time: leave --to out")
    if is_old(lemons, now):
        known_until = moment(lemons["window"]["known_until"]) or "no time"
        raise Stop(
            f"{WHO}: what the store tells ends at {known_until} UTC, and not within a day of now: ingest what came "
            "since, and ask again",
            UNKNOWN,
        )


def require_this_cluster(lemons: Document, said: str, settings: Settings) -> None:
    """Names of nodes are alike in many clusters: the store's has to be the one whose slurmctld is asked. said: by
    --cluster."""
    from healthd.common.slurm import commands
    from healthd.common.slurm.slurm_conf import parse_cluster_name

    told = sorted({fleet["cluster"] for fleet in lemons["fleets"]})
    if len(told) > 1:
        raise Stop(f"{WHO}: the store tells of {', '.join(map(printable, told))}: --cluster says which")
    here = parse_cluster_name(answered(commands.config(), settings.slurm.command_seconds))
    if not here and not said:
        raise Stop(f"{WHO}: Slurm does not say how its cluster is called: --cluster says which of the store's it is")
    if here and told and told[0].lower() != here:
        raise Stop(
            f"{WHO}: the store tells of cluster {printable(told[0])}, and Slurm here is {here}: what it drains has to "
            "be of one cluster"
        )


def answered(argv: Argv, command_seconds: float) -> str:
    """What Slurm prints. Raises Stop where it does not answer."""
    from healthd.agent.slurm import blocking
    from healthd.common.slurm.commands import Command
    from healthd.common.slurm.output import what_failed

    result = blocking.run(Command(argv, command_seconds))
    if result.status != 0:
        raise Stop(f"{WHO}: {what_failed(argv, result)} (drained so far: none)", UNKNOWN)
    return result.text


def settings_of(args: argparse.Namespace) -> Settings:
    with wrong_settings_are_wrong_use():
        return load_settings(args)[0].settings


def apply(nodes: Sequence[Mapping[str, Any]], most: int, settings: Settings) -> list[dict[str, Any]]:
    """[{node, drained, words}]. The first that Slurm does not answer for ends it: what was done is told. most: how many
    of the cluster's nodes may be out as lemons."""
    from healthd.agent.slurm import blocking, drain_lemon
    from healthd.common.slurm.output import SlurmTrouble

    done: list[dict[str, Any]] = []
    for one in nodes:
        steps = drain_lemon.drain(one["node"], one["words"], most, settings.fleet, settings.slurm.command_seconds)
        sent = False
        try:
            command = next(steps)
            while True:
                result = blocking.run(command)
                sent = sent or (command.changes and result.status == 0)
                command = steps.send(result)
        except StopIteration as end:
            done.append({"node": one["node"], "drained": end.value.done, "words": end.value.words})
        except SlurmTrouble as trouble:
            so_far = ", ".join(each["node"] for each in done if each["drained"]) or "none"
            unseen = f"; {one['node']} was told to drain, and not seen to" if sent else ""
            raise Stop(f"{WHO}: {trouble} (drained so far: {so_far}{unseen})", UNKNOWN) from None
    return done
