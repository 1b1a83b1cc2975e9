"""`healthd fleet lemons`: find nodes that keep failing. With --apply, drain them one after another."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli.flags import DEFAULT_FILE, Command, Parser, load_settings, settings_errors_as_usage
from healthd.cli.fleet.answers import EXIT_STATUS, add_store_flags, parse_share, print_answer, study_or_exit
from healthd.cli.fleet.ingest import fleet_errors, parse_time
from healthd.cli.fleet.query import positive
from healthd.cli.terminal import UNKNOWN, Stop
from healthd.common.text import printable

if TYPE_CHECKING:
    from healthd.agent.settings.config import Settings
    from healthd.common.slurm.commands import Argv
    from healthd.fleet.answers.document import Document

COMMAND = "healthd fleet lemons: --apply"
MAX_AGE_SECONDS = 86400.0  # older data may not include a repair


def _lemons_flags(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument(
        "--days",
        metavar="N",
        type=positive,
        help="only the last N days (default: 28; with --from, everything since then)",
    )
    parser.add_argument(
        "--probability",
        metavar="P",
        type=_probability,
        help="list nodes that are bad with at least this probability (default: 0.33); --apply drains all of them",
    )
    parser.add_argument(
        "--apply", action="store_true", help="drain the nodes in this machine's Slurm, within the fleet limit"
    )
    parser.add_argument("--config", metavar="FILE", help=f"settings with the fleet limit (default: {DEFAULT_FILE})")


def _probability(text: str) -> float:
    value = parse_share(text)
    if not value:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _lemons(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import lemons
        from healthd.fleet.statistics import lemon_score
        from healthd.fleet.views.lemons import view

    days = float(args.days or lemon_score.WINDOW_DAYS) if args.days or args.from_time is None else None
    until = parse_time(args.to_time, "--to") if args.to_time is not None else None
    with study_or_exit(args) as study:
        answer = lemons.lemons(study, window_days=days, min_probability=args.probability)
    current_time = time.time()
    answer["old"] = is_old(answer, current_time)
    if args.apply:
        require_current(answer, until, current_time)
        with settings_errors_as_usage():
            settings = load_settings(args)[0].settings
        require_this_cluster(answer, args.cluster, settings)
        max_drained = sum(lemons.max_lemons(fleet["cluster_nodes"]) for fleet in answer["fleets"])
        nodes = [row for row in answer["nodes"] if row["certain"] and row["out_since"] is None]
        answer["applied"] = drain_lemons(nodes, max_drained, settings)
    return print_answer(args, answer, view, lemons.has_findings)


def is_old(lemons: Document, current_time: float) -> bool:
    """Return True if the store's data ends more than a day before or after the current time."""
    complete_until = lemons["window"]["known_until"]
    return complete_until is None or abs(current_time - complete_until) > MAX_AGE_SECONDS


def require_current(lemons: Document, until: int | None, current_time: float) -> None:
    """Require current data and a current period, because a drain affects the nodes in their present state.

    `until` is the time in --to.
    """
    from healthd.fleet.answers import document

    if until is not None and not current_time <= until <= current_time + MAX_AGE_SECONDS:
        raise Stop(f"{COMMAND} acts on the nodes as they are now, but --to names another time; omit --to")
    if is_old(lemons, current_time):
        complete_until = document.format_time(lemons["window"]["known_until"]) or "no time"
        raise Stop(
            f"{COMMAND}: the store's data ends at {complete_until} UTC, not within a day of now; ingest newer data and "
            "try again",
            UNKNOWN,
        )


def require_this_cluster(lemons: Document, given_cluster: str, settings: Settings) -> None:
    """Require that the store's cluster is the local cluster, because many clusters use the same node names.

    `given_cluster` is the value of --cluster.
    """
    from healthd.common.slurm import commands
    from healthd.common.slurm.slurm_conf import parse_cluster_name

    store_clusters = sorted({fleet["cluster"] for fleet in lemons["fleets"]})
    if len(store_clusters) > 1:
        raise Stop(
            f"{COMMAND}: the store has clusters {', '.join(map(printable, store_clusters))}; choose one with --cluster"
        )
    local_cluster = parse_cluster_name(slurm_output(commands.config(), settings.slurm.command_timeout_seconds))
    if not local_cluster and not given_cluster:
        raise Stop(
            f"{COMMAND}: Slurm on this machine does not report its cluster name; name the cluster with --cluster"
        )
    if local_cluster and store_clusters and store_clusters[0].lower() != local_cluster:
        raise Stop(
            f"{COMMAND}: the store has cluster {printable(store_clusters[0])}, but the local cluster is "
            f"{local_cluster}; only nodes in the local cluster can be drained"
        )


def slurm_output(argv: Argv, command_timeout_seconds: float) -> str:
    """Return the output of a Slurm command. Raises Stop if it fails."""
    from healthd.agent.slurm import blocking
    from healthd.common.slurm.commands import Command
    from healthd.common.slurm.output import describe_failure

    result = blocking.run(Command(argv, command_timeout_seconds))
    if result.status != 0:
        raise Stop(f"{COMMAND}: {describe_failure(argv, result)} (drained so far: none)", UNKNOWN)
    return result.text


def drain_lemons(nodes: Sequence[Mapping[str, Any]], max_drained: int, settings: Settings) -> list[dict[str, Any]]:
    """Drain the nodes and return [{node, drained, words}].

    `max_drained` is the maximum number of drained lemons in the cluster.

    The first Slurm error ends the command with a message that lists the nodes drained so far.
    """
    from healthd.agent.slurm import blocking, drain_lemon
    from healthd.common.slurm.output import SlurmError

    done: list[dict[str, Any]] = []
    for row in nodes:
        steps = drain_lemon.drain(
            row["node"], row["text"], max_drained, settings.fleet, settings.slurm.command_timeout_seconds
        )
        sent = False
        try:
            command = next(steps)
            while True:
                result = blocking.run(command)
                sent = sent or (command.changes and result.status == 0)
                command = steps.send(result)
        except StopIteration as stop:
            done.append({"node": row["node"], "drained": stop.value.done, "text": stop.value.text})
        except SlurmError as problem:
            so_far = ", ".join(result_row["node"] for result_row in done if result_row["drained"]) or "none"
            unconfirmed = f"; the drain of {row['node']} was sent but not confirmed" if sent else ""
            raise Stop(f"{COMMAND}: {problem} (drained so far: {so_far}{unconfirmed})", UNKNOWN) from None
    return done


COMMANDS = {
    "fleet lemons": Command(
        _lemons_flags,
        _lemons,
        "Show nodes that keep failing: which nodes to remove, why, and the expected gain. The output has the commands "
        f"that drain these nodes; --apply runs them within the fleet limit. No node is ever resumed.\n{EXIT_STATUS}",
        "  healthd fleet lemons\n  healthd fleet lemons --to 2026-11-01 --json\n"
        "  healthd fleet lemons --partition train --apply\n",
    ),
}
