"""`healthd fleet lemons`: nodes that keep failing. With --apply they are drained one after another."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli.flags import DEFAULT_FILE, Command, Parser, load_settings, wrong_settings_are_wrong_use
from healthd.cli.fleet.answers import EXIT, at_the_store, share, store_flags, tell
from healthd.cli.fleet.ingest import at_the_centre, moment
from healthd.cli.fleet.query import at_least_one
from healthd.cli.terminal import UNKNOWN, Stop
from healthd.common.text import printable

if TYPE_CHECKING:
    from healthd.agent.settings.config import Settings
    from healthd.common.slurm.commands import Argv
    from healthd.fleet.answers.document import Document

WHO = "healthd fleet lemons: --apply"
OLD_SECONDS = 86400.0  # older data may miss a repair of the node


def _lemons_flags(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument(
        "--days", metavar="N", type=at_least_one, help="the last N days (default: 28; with --from, all since then)"
    )
    parser.add_argument(
        "--probability",
        metavar="P",
        type=_probability,
        help="name nodes that are bad with at least this probability (default: 0.33); --apply drains all of them",
    )
    parser.add_argument(
        "--apply", action="store_true", help="drain the nodes in this machine's Slurm, within the fleet limit"
    )
    parser.add_argument("--config", metavar="FILE", help=f"settings with the fleet limit (default: {DEFAULT_FILE})")


def _probability(text: str) -> float:
    value = share(text)
    if not value:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _lemons(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import lemons
        from healthd.fleet.statistics import lemon_score
        from healthd.fleet.views.lemons import view

    days = float(args.days or lemon_score.WINDOW_DAYS) if args.days or args.from_time is None else None
    until = moment(args.to_time, "--to") if args.to_time is not None else None
    with at_the_store(args) as study:
        told = lemons.lemons(study, window_days=days, least=args.probability)
    now = time.time()
    told["old"] = is_old(told, now)
    if args.apply:
        require_now(told, until, now)
        with wrong_settings_are_wrong_use():
            settings = load_settings(args)[0].settings
        require_this_cluster(told, args.cluster, settings)
        most = sum(lemons.most_lemons(fleet["cluster_nodes"]) for fleet in told["fleets"])
        nodes = [one for one in told["nodes"] if one["certain"] and one["out_since"] is None]
        told["applied"] = apply(nodes, most, settings)
    return tell(args, told, view, lemons.found)


def is_old(lemons: Document, now: float) -> bool:
    """Return True if the store's data does not end within a day of now, before or after."""
    known_until = lemons["window"]["known_until"]
    return known_until is None or abs(now - known_until) > OLD_SECONDS


def require_now(lemons: Document, until: int | None, now: float) -> None:
    """Require current data and a current period, since a drain acts on the current nodes. until: the time of --to."""
    from healthd.fleet.answers import document

    if until is not None and not now <= until <= now + OLD_SECONDS:
        raise Stop(f"{WHO}: it acts on the current nodes, but --to names another time: leave --to out")
    if is_old(lemons, now):
        known_until = document.moment(lemons["window"]["known_until"]) or "no time"
        raise Stop(
            f"{WHO}: the store's data ends at {known_until} UTC, not within a day of now: ingest newer data and try "
            "again",
            UNKNOWN,
        )


def require_this_cluster(lemons: Document, said: str, settings: Settings) -> None:
    """Require that the store's cluster is the local one: many clusters use the same node names. given_cluster:
    --cluster.
    """
    from healthd.common.slurm import commands
    from healthd.common.slurm.slurm_conf import parse_cluster_name

    told = sorted({fleet["cluster"] for fleet in lemons["fleets"]})
    if len(told) > 1:
        raise Stop(f"{WHO}: the store has clusters {', '.join(map(printable, told))}: choose one with --cluster")
    here = parse_cluster_name(answered(commands.config(), settings.slurm.command_timeout_seconds))
    if not here and not said:
        raise Stop(f"{WHO}: the local Slurm does not report its cluster name: name the store's cluster with --cluster")
    if here and told and told[0].lower() != here:
        raise Stop(
            f"{WHO}: the store has cluster {printable(told[0])}, but the local cluster is {here}: only nodes of the "
            "local cluster can be drained"
        )


def answered(argv: Argv, command_timeout_seconds: float) -> str:
    """Return the output of a Slurm command. Raises Stop if it fails."""
    from healthd.agent.slurm import blocking
    from healthd.common.slurm.commands import Command
    from healthd.common.slurm.output import what_failed

    result = blocking.run(Command(argv, command_timeout_seconds))
    if result.status != 0:
        raise Stop(f"{WHO}: {what_failed(argv, result)} (drained so far: none)", UNKNOWN)
    return result.text


def apply(nodes: Sequence[Mapping[str, Any]], most: int, settings: Settings) -> list[dict[str, Any]]:
    """Drain the nodes and return [{node, drained, words}]. max_drained: limit of lemons that are drained in the
    cluster.

    The first error of Slurm ends it with a message on the drains so far.
    """
    from healthd.agent.slurm import blocking, drain_lemon
    from healthd.common.slurm.output import SlurmTrouble

    done: list[dict[str, Any]] = []
    for one in nodes:
        steps = drain_lemon.drain(
            one["node"], one["text"], most, settings.fleet, settings.slurm.command_timeout_seconds
        )
        sent = False
        try:
            command = next(steps)
            while True:
                result = blocking.run(command)
                sent = sent or (command.changes and result.status == 0)
                command = steps.send(result)
        except StopIteration as end:
            done.append({"node": one["node"], "drained": end.value.done, "text": end.value.words})
        except SlurmTrouble as problem:
            so_far = ", ".join(each["node"] for each in done if each["drained"]) or "none"
            unseen = f"; the drain of {one['node']} was sent but not confirmed" if sent else ""
            raise Stop(f"{WHO}: {problem} (drained so far: {so_far}{unseen})", UNKNOWN) from None
    return done


COMMANDS = {
    "fleet lemons": Command(
        _lemons_flags,
        _lemons,
        "Show nodes that keep failing: which nodes to take out, why, and the expected gain. It prints the commands; "
        f"--apply runs them within the fleet limit. It never resumes a node.\n{EXIT}",
        "  healthd fleet lemons\n  healthd fleet lemons --to 2026-11-01 --json\n"
        "  healthd fleet lemons --partition train --apply\n",
    ),
}
