"""`healthd fleet NAME`: answers from the fleet store.

healthd/fleet/answers/NAME.py computes each answer, and healthd/fleet/views/NAME.py describes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from healthd.cli.flags import Command, Parser, parse_duration
from healthd.cli.fleet.ingest import fleet_errors, parse_time
from healthd.cli.fleet.query import add_engine, add_times, non_negative, positive, requested_period
from healthd.cli.terminal import OK, REFUSED, Stop, json_pieces, page, write_output, write_stream
from healthd.common.text import regex

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document, FindingsPredicate
    from healthd.fleet.answers.study import Study
    from healthd.fleet.view import View

EXIT_STATUS = "Exit status: 0 done, 1 something was found, 3 the store cannot answer, 64 usage error."
CHOICES = ("cluster", "partition", "account", "model", "switch")


class _NonEmptyName(argparse.Action):
    """Argument that must not be empty, because "" would select everything."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if not values:
            raise argparse.ArgumentError(self, "must be a name, got an empty string")
        setattr(namespace, self.dest, values)


# --- shared by all answers


def add_store_flags(parser: Parser) -> None:
    """Add options for the store, the period, and the selection of jobs and nodes."""
    parser.add_argument("--db", metavar="DB", help="store directory (default: $HEALTHD_FLEET_DB, else ./db)")
    add_times(parser)
    parser.add_argument(
        "--cluster", action=_NonEmptyName, metavar="NAME", default="", help="jobs and nodes in this cluster"
    )
    parser.add_argument(
        "--partition", action=_NonEmptyName, metavar="NAME", default="", help="jobs and nodes in this partition"
    )
    parser.add_argument(
        "--account",
        action=_NonEmptyName,
        metavar="NAME",
        default="",
        help="this account's jobs, and the nodes on which they ran",
    )
    parser.add_argument(
        "--model", action=_NonEmptyName, metavar="NAME", default="", help="nodes with this GPU model, and their jobs"
    )
    parser.add_argument(
        "--switch", action=_NonEmptyName, metavar="NAME", default="", help="nodes on this leaf switch, and their jobs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    add_engine(parser)


@contextmanager
def study_or_exit(args: argparse.Namespace, other_mib: int = 0, command: str = "healthd fleet") -> Iterator[Study]:
    """Open the store as open_store does. If that fails, end the command with a message."""
    with fleet_errors(command), open_store(args, other_mib, command) as study:
        yield study


@contextmanager
def open_store(args: argparse.Namespace, other_mib: int = 0, command: str = "healthd fleet") -> Iterator[Study]:
    """Open the store that the options name, with the selected period, jobs and nodes.

    Args:
        other_mib: memory that the process needs in addition to the answer, at most half of its limit.
        command: name of the command, for messages.

    Raises:
        StoreError: the store is damaged or cannot be used, or the answer needs too much memory.
        Stop: usage error.
    """
    import os

    from healthd.fleet import engine
    from healthd.fleet.answers.document import WrongChoice
    from healthd.fleet.answers.study import Choice, open_study, table_files
    from healthd.fleet.store import MemoryLimitExceeded, open_for_reading

    folder = args.db or os.environ.get("HEALTHD_FLEET_DB") or "db"
    chosen = Choice(**{name: getattr(args, name) for name in CHOICES})
    threads = args.threads or engine.THREADS
    memory_mib = memory_limit(args)
    with open_for_reading(folder) as snapshot:
        files = table_files(snapshot)
        begin, end = requested_period(args, folder, files, command)
        try:
            available_mib = max(memory_mib - other_mib, memory_mib // 2)
            with open_study(files, begin, end, chosen, threads, available_mib, args.engine) as study:
                yield study
        except MemoryLimitExceeded:
            raise MemoryLimitExceeded(memory_mib) from None
        except WrongChoice as error:
            raise Stop(f"{command}: {error}") from None


def memory_limit(args: argparse.Namespace) -> int:
    """Return the command's memory limit in MiB."""
    from healthd.fleet import engine

    return int(args.memory or 1024 * (args.threads or engine.THREADS))


def print_answer(
    args: argparse.Namespace, document: Document, view: Callable[[Document], View], found: FindingsPredicate
) -> int:
    """Print the document as JSON or as text. Return the exit status."""
    from healthd.fleet.view import view_text

    status = REFUSED if found(document) else OK
    if not args.json:
        return write_output(view_text(view(document), page()), status)
    write_stream(json_pieces(document))
    return status


def run_answer(
    args: argparse.Namespace,
    answer: Callable[..., Document],
    view: Callable[[Document], View],
    found: FindingsPredicate,
    **options: Any,
) -> int:
    """Compute an answer from the store and print it. `given` contains the values of the answer's own options."""
    with study_or_exit(args) as study:
        document = answer(study, **options)
    return print_answer(args, document, view, found)


# --- states


def _states_arguments(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument("--split", metavar="TIME", help="compare how large jobs ended before and after TIME")
    parser.add_argument(
        "--large", metavar="GPUS", type=positive, default=512, help="minimum GPUs in a large job (default: 512)"
    )


def _states(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import states
        from healthd.fleet.views.states import view

    split = None if args.split is None else parse_time(args.split, "--split")
    return run_answer(args, states.states, view, states.has_findings, split=split, large=args.large)


# --- goodput


def _goodput_arguments(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="TIME",
        default="60m",
        help="checkpoint interval; a failure loses half of it (default: 60m)",
    )
    parser.add_argument("--price", metavar="MONEY", type=parse_price, help="price of a GPU-hour")


def _goodput(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import goodput
        from healthd.fleet.views.goodput import view

    checkpoint = parse_duration(args.checkpoint)
    if checkpoint is None:
        raise Stop(f'healthd fleet: --checkpoint: "{args.checkpoint}" is not a duration; examples: 60m, 1h30m')
    return run_answer(args, goodput.goodput, view, goodput.has_findings, checkpoint=checkpoint, price=args.price)


MAX_PRICE = 1e9  # maximum price of a GPU-hour; in any currency, this exceeds the price of a whole GPU


def parse_price(text: str) -> float:
    """Parse the price of a GPU-hour. Raises ArgumentTypeError."""
    try:
        value = float(text) if text.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_PRICE:  # also rejects NaN
        raise argparse.ArgumentTypeError(
            f'must be the price of a GPU-hour, a number from 0 to {MAX_PRICE:,.0f}, got "{text}"'
        )
    return value


# --- availability


def _availability_arguments(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument(
        "--sla", metavar="PERCENT", type=_number, help="report an availability below this, with exit status 1"
    )
    parser.add_argument(
        "--count-reservations",
        action="store_true",
        help="treat reservations that are not for maintenance like any other time",
    )


def _availability(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import availability
        from healthd.fleet.views.availability import view

    options = {"sla": args.sla, "count_reservations": args.count_reservations}
    return run_answer(args, availability.availability, view, availability.has_findings, **options)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a number, got "{text}"') from None


# --- nccl


def _nccl_flags(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="flight-recorder dumps (PyTorch) or logs from a job's ranks")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")


def _nccl(args: argparse.Namespace) -> int:
    if not args.folder:
        raise Stop("healthd fleet nccl: DIR is an empty string; name a folder")
    with fleet_errors():
        from healthd.fleet.answers import nccl
        from healthd.fleet.views.nccl import view

        answer = nccl.nccl(args.folder)
    return print_answer(args, answer, view, nccl.has_findings)


# --- attribution


def _attribution(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import attribution
        from healthd.fleet.views.attribution import view

    return run_answer(args, attribution.attribution, view, attribution.has_findings)


# --- rate, ettr


def _rate_flags(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument(
        "--more-than-gpus",
        metavar="N",
        type=non_negative,
        help="only jobs with more than N GPUs (default: 128; 0: all jobs)",
    )
    parser.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=positive,
        help="GPUs per node in the projection (default: as in the store's jobs)",
    )


def _rate(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import rate
        from healthd.fleet.views.rate import view

    options = {"more_than_gpus": args.more_than_gpus, "gpus_per_node": args.gpus_per_node}
    return run_answer(args, rate.rate, view, rate.has_findings, **_given_options(options))


def _ettr_flags(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument("--gpus", metavar="N", type=positive, help="GPUs in the job (default: 16384)")
    parser.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=positive,
        help="GPUs per node (default: as in the store's jobs; with --rate, 8)",
    )
    parser.add_argument(
        "--rate",
        metavar="R_F",
        type=_failure_rate,
        help="failures per 1000 node-days; needs no store (default: as reported by healthd fleet rate)",
    )
    for flag, kind, help_text in (
        ("--checkpoint", _positive_duration, "progress between two checkpoints (default: 60m)"),
        ("--restart", _duration, "time from the start to the first progress (default: 5m)"),
        ("--queue", _duration, "duration of each wait for nodes (default: 0)"),
        ("--write", _duration, "time to write a checkpoint (default: 0)"),
        (
            "--productive",
            _positive_duration,
            "progress that the job needs to finish, such as 30d (default: it never finishes)",
        ),
    ):
        parser.add_argument(flag, metavar="DURATION", type=kind, help=help_text)
    parser.add_argument("--seed", metavar="N", type=non_negative, help="seed for the simulation (default: 13)")


def _ettr(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import ettr
        from healthd.fleet.views.ettr import view

    job_options = _given_options(
        {
            "gpus": args.gpus,
            "gpus_per_node": args.gpus_per_node,
            "checkpoint_seconds": args.checkpoint,
            "restart_seconds": args.restart,
            "queue_seconds": args.queue,
            "write_seconds": args.write,
            "productive_seconds": args.productive,
            "seed": args.seed,
        }
    )
    uses_store = any(getattr(args, flag) for flag in ("db", "from_time", "to_time", *CHOICES))
    if args.rate is None or uses_store:
        return run_answer(args, ettr.ettr, view, ettr.has_findings, **_given_options({"r_f": args.rate}), **job_options)
    return print_answer(
        args, ettr.ettr_for_rate(**{"r_f": args.rate, "gpus": ettr.GPUS, **job_options}), view, ettr.has_findings
    )


def _given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return only the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


MAX_SECONDS = 100 * 365 * 86400
MAX_FAILURES = 1e6  # maximum failures per 1000 node-days, which is one failure every 86 s on each node


def _positive_duration(text: str) -> float:
    """Parse a duration of more than 0 s. Raises ArgumentTypeError."""
    seconds = parse_duration(text)
    if seconds is None or seconds > MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f'must be a duration like 90s, 60m, 1h30m or 30d, up to 100 years, got "{text}"'
        )
    return seconds


def _duration(text: str) -> float:
    return 0.0 if regex(r"0{1,9}[smhd]?").fullmatch(text) else _positive_duration(text)


def _failure_rate(text: str) -> float:
    if not regex(r"[0-9]{1,7}(\.[0-9]{1,9})?").fullmatch(text) or float(text) > MAX_FAILURES:
        raise argparse.ArgumentTypeError(
            f'must be failures per 1000 node-days, a number from 0 to {MAX_FAILURES:,.0f}, got "{text}"'
        )
    return float(text)


# --- alarms


def _alarms_flags(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument(
        "--limit",
        metavar="SHARE",
        type=parse_share,
        default=0.01,
        help="report checks that more than this share of completed jobs saw failing (default: 0.01, which is 1%%)",
    )


def parse_share(text: str) -> float:
    """Parse a share from 0 to 1, given as a number or a percentage. Raises ArgumentTypeError."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f'must be a share from 0 to 1, or a percentage, got "{text}"')
    return found


def _alarms(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import alarms
        from healthd.fleet.views.alarms import view

    return run_answer(args, alarms.alarms, view, alarms.has_findings, limit=args.limit)


# --- checks


def _checks_flags(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument(
        "--gap",
        metavar="SECONDS",
        type=positive,
        default=900,
        help="failures on a node that are further apart than this are separate incidents (default: 900)",
    )


def _checks(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import checks
        from healthd.fleet.views.checks import view

    return run_answer(args, checks.checks, view, checks.has_findings, gap_seconds=args.gap)


# --- links


def _links(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import links
        from healthd.fleet.views.links import view

    return run_answer(args, links.links, view, links.has_findings)


# --- repairs


def _repairs(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import repairs
        from healthd.fleet.views.repairs import view

    return run_answer(args, repairs.repairs, view, repairs.has_findings)


# --- failslow


def _failslow(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.answers import failslow
        from healthd.fleet.views.failslow import view

    return run_answer(args, failslow.failslow, view, failslow.has_findings)


# The answers that are chapters of `healthd fleet report`, in the report's order.
COMMANDS = {
    "fleet states": Command(
        _states_arguments,
        _states,
        f"Show how jobs ended and how GPU time was used, by state and size.\n{EXIT_STATUS}",
        "  healthd fleet states --from 2026-10-01 --to 2026-11-01\n  healthd fleet states --partition train --json\n"
        "  healthd fleet states --split 2026-09-01 --large 512\n",
    ),
    "fleet goodput": Command(
        _goodput_arguments,
        _goodput,
        f"Show the work lost to node failures: in failed jobs, in jobs preempted by their restarts, in requeue "
        f"loops.\n{EXIT_STATUS}",
        "  healthd fleet goodput --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet goodput --checkpoint 30m --price 2.50\n",
    ),
    "fleet availability": Command(
        _availability_arguments,
        _availability,
        "Show how long nodes were up, drained (and by whom), down or not observed. Also show the time to repair.\n"
        f"{EXIT_STATUS}",
        "  healthd fleet availability --from 2026-10-01 --to 2026-11-01 --sla 99.5\n",
    ),
    "fleet nccl": Command(
        _nccl_flags,
        _nccl,
        f"Find the rank that blocks a stuck job, from the ranks' NCCL records.\n{EXIT_STATUS}",
        "  healthd fleet nccl /shared/dumps/1234\n  healthd fleet nccl /shared/dumps/1234 --json\n",
    ),
    "fleet attribution": Command(
        add_store_flags,
        _attribution,
        "Show the most likely cause of each failed job, and the cost of each cause. Also show the share of these "
        f"causes that may be chance, and the weeks in which a cause is unusually frequent.\n{EXIT_STATUS}",
        "  healthd fleet attribution --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet attribution --partition train --json\n",
    ),
    "fleet rate": Command(
        _rate_flags,
        _rate,
        "Show how often large jobs fail because of their nodes (r_f, with interval), and the MTTF for a job of any "
        "size.\n"
        f"{EXIT_STATUS}",
        "  healthd fleet rate --from 2026-10-01 --to 2026-11-01\n  healthd fleet rate --more-than-gpus 64 --json\n",
    ),
    "fleet ettr": Command(
        _ettr_flags,
        _ettr,
        "Show the share of time in which a large job makes progress (ETTR): from a formula, from a simulation, and as "
        "measured in the store.\nWith --rate, no store is needed.\n"
        f"{EXIT_STATUS}",
        "  healthd fleet ettr --gpus 16384 --checkpoint 60m --restart 5m --rate 6.5\n"
        "  healthd fleet ettr --gpus 4096 --checkpoint 30m --write 1m --productive 30d\n",
    ),
    "fleet alarms": Command(
        _alarms_flags,
        _alarms,
        f"Show completed jobs that saw a failing check, to estimate how often a check is a false alarm.\n{EXIT_STATUS}",
        "  healthd fleet alarms --from 2026-10-01 --to 2026-11-01\n  healthd fleet alarms --limit 0.5%\n",
    ),
    "fleet checks": Command(
        _checks_flags,
        _checks,
        "Show which checks detected an incident first, which were the only ones to detect it, and which never "
        f"detected one. Also show the time until the node was drained.\n{EXIT_STATUS}",
        "  healthd fleet checks --from 2026-10-01 --to 2026-11-01\n  healthd fleet checks --model H100 --json\n",
    ),
    "fleet links": Command(
        add_store_flags,
        _links,
        f"Show link flaps, errors and lost speed by port and switch, and the outliers.\n{EXIT_STATUS}",
        "  healthd fleet links --from 2026-10-01 --to 2026-11-01\n  healthd fleet links --switch leaf012\n",
    ),
    "fleet repairs": Command(
        add_store_flags,
        _repairs,
        "Show how often a GPU reset, a reboot or a person ended a fault for good, and how long nodes were out of "
        "service until then. Also show the steps that healthd took itself, and whether they lasted. Suggest an order "
        f"of steps, and another first step for faults that mostly return.\n{EXIT_STATUS}",
        "  healthd fleet repairs --from 2026-10-01 --to 2026-11-01\n  healthd fleet repairs --json | jq .suggested\n",
    ),
    "fleet failslow": Command(
        add_store_flags,
        _failslow,
        "Show the cost of jobs that became slower, in hours and GPU-hours, and the worst nodes. Also show the time "
        "until a slow job was reported, the time until someone acted, and validations that failed or were "
        f"slow.\n{EXIT_STATUS}",
        "  healthd fleet failslow --from 2026-10-01 --to 2026-11-01\n  healthd fleet failslow --model H100 --json\n",
    ),
}
