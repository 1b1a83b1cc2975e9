"""`healthd fleet NAME`: answers of the centre's store.

healthd/fleet/answers/NAME.py computes each answer, healthd/fleet/views/NAME.py describes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from healthd.cli.flags import Command, Parser, duration
from healthd.cli.fleet.ingest import at_the_centre, moment
from healthd.cli.fleet.query import add_engine, add_times, at_least_one, at_least_zero, time_asked
from healthd.cli.terminal import OK, REFUSED, Stop, json_texts, page, say, stream
from healthd.common.text import regex

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document, Found
    from healthd.fleet.answers.study import Study
    from healthd.fleet.view import View

EXIT = "Exit status: 0 done, 1 something was found, 3 the store cannot answer, 64 usage error."
CHOICES = ("cluster", "partition", "account", "model", "switch")


class _Name(argparse.Action):
    """Argument that must not be empty: "" would mean all."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if not values:
            raise argparse.ArgumentError(self, "must be a name, not empty")
        setattr(namespace, self.dest, values)


# --- shared by all answers


def store_flags(parser: Parser) -> None:
    """Add options for the store, the period, and the choice of jobs and nodes."""
    parser.add_argument("--db", metavar="DB", help="directory of the store (default: $HEALTHD_FLEET_DB, else ./db)")
    add_times(parser)
    parser.add_argument("--cluster", action=_Name, metavar="NAME", default="", help="jobs and nodes of a cluster")
    parser.add_argument("--partition", action=_Name, metavar="NAME", default="", help="jobs and nodes of a partition")
    parser.add_argument(
        "--account",
        action=_Name,
        metavar="NAME",
        default="",
        help="jobs of an account, and the nodes on which they ran",
    )
    parser.add_argument(
        "--model", action=_Name, metavar="NAME", default="", help="nodes with a GPU model, and their jobs"
    )
    parser.add_argument(
        "--switch", action=_Name, metavar="NAME", default="", help="nodes on a leaf switch, and their jobs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    add_engine(parser)


@contextmanager
def at_the_store(args: argparse.Namespace, beside_mib: int = 0, who: str = "healthd fleet") -> Iterator[Study]:
    """Open the store like open_store. Errors end the command with a message."""
    with at_the_centre(who), open_store(args, beside_mib, who) as study:
        yield study


@contextmanager
def open_store(args: argparse.Namespace, beside_mib: int = 0, who: str = "healthd fleet") -> Iterator[Study]:
    """Open the store of the options, for their period and choice.

    Args:
        other_mib: memory that the process needs besides the answer, at most half of its limit.
        command: the command, for messages.

    Raises:
        StoreError: the store cannot be used, is damaged, or the answer takes too much memory.
        Stop: wrong use.
    """
    import os

    from healthd.fleet import engine
    from healthd.fleet.answers.document import WrongChoice
    from healthd.fleet.answers.study import Chosen, opened, tables_of
    from healthd.fleet.store import NeedsMemory, reading

    folder = args.db or os.environ.get("HEALTHD_FLEET_DB") or "db"
    chosen = Chosen(**{name: getattr(args, name) for name in CHOICES})
    threads = args.threads or engine.THREADS
    memory_mib = memory_limit(args)
    with reading(folder) as snapshot:
        files = tables_of(snapshot)
        begin, end = time_asked(args, folder, files, who)
        try:
            left = max(memory_mib - beside_mib, memory_mib // 2)
            with opened(files, begin, end, chosen, threads, left, args.engine) as study:
                yield study
        except NeedsMemory:
            raise NeedsMemory(memory_mib) from None
        except WrongChoice as error:
            raise Stop(f"{who}: {error}") from None


def memory_limit(args: argparse.Namespace) -> int:
    """Return the memory limit of the command in MiB."""
    from healthd.fleet import engine

    return int(args.memory or 1024 * (args.threads or engine.THREADS))


def tell(args: argparse.Namespace, document: Document, view: Callable[[Document], View], found: Found) -> int:
    """Print the document, as JSON or for people. Return the exit status."""
    from healthd.fleet.view import text

    status = REFUSED if found(document) else OK
    if not args.json:
        return say(text(view(document), page()), status)
    stream(json_texts(document))
    return status


def answered(
    args: argparse.Namespace,
    answer: Callable[..., Document],
    view: Callable[[Document], View],
    found: Found,
    **given: Any,
) -> int:
    """Print an answer of the store. given: from the answer's own options."""
    with at_the_store(args) as study:
        document = answer(study, **given)
    return tell(args, document, view, found)


# --- states


def _states_arguments(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument("--split", metavar="TIME", help="compare the outcome of large jobs before and after TIME")
    parser.add_argument(
        "--large", metavar="GPUS", type=at_least_one, default=512, help="minimum GPUs of a large job (default: 512)"
    )


def _states(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import states
        from healthd.fleet.views.states import view

    split = None if args.split is None else moment(args.split, "--split")
    return answered(args, states.states, view, states.found, split=split, large=args.large)


# --- goodput


def _goodput_arguments(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument(
        "--checkpoint", metavar="TIME", default="60m", help="checkpoint interval, of which half is lost (default: 60m)"
    )
    parser.add_argument("--price", metavar="MONEY", type=price, help="price of a GPU-hour")


def _goodput(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import goodput
        from healthd.fleet.views.goodput import view

    checkpoint = duration(args.checkpoint)
    if checkpoint is None:
        raise Stop(f'healthd fleet: --checkpoint: "{args.checkpoint}" is not a duration; examples: 60m, 1h30m')
    return answered(args, goodput.goodput, view, goodput.found, checkpoint=checkpoint, price=args.price)


MOST_MONEY = 1e9  # per GPU-hour: more than a GPU costs in any currency


def price(text: str) -> float:
    """Parse the price of a GPU-hour. Raises ArgumentTypeError."""
    try:
        money = float(text) if text.isascii() else -1.0
    except ValueError:
        money = -1.0
    if not 0 <= money <= MOST_MONEY:  # NaN too
        raise argparse.ArgumentTypeError(
            f'must be the price of a GPU-hour, a number from 0 to {MOST_MONEY:,.0f}, got "{text}"'
        )
    return money


# --- availability


def _availability_arguments(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument(
        "--sla", metavar="PERCENT", type=_number, help="report availability below this, with exit status 1"
    )
    parser.add_argument(
        "--count-reservations",
        action="store_true",
        help="count reservations that are not maintenance like any other time",
    )


def _availability(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import availability
        from healthd.fleet.views.availability import view

    given = {"sla": args.sla, "count_reservations": args.count_reservations}
    return answered(args, availability.availability, view, availability.found, **given)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a number, got "{text}"') from None


# --- nccl


def _nccl_flags(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="flight-recorder dumps (PyTorch) or logs of a job's ranks")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")


def _nccl(args: argparse.Namespace) -> int:
    if not args.folder:
        raise Stop("healthd fleet nccl: DIR is empty: name a folder")
    with at_the_centre():
        from healthd.fleet.answers import nccl
        from healthd.fleet.views.nccl import view

        told = nccl.nccl(args.folder)
    return tell(args, told, view, nccl.found)


# --- attribution


def _attribution(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import attribution
        from healthd.fleet.views.attribution import view

    return answered(args, attribution.attribution, view, attribution.found)


# --- rate, ettr


def _rate_flags(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument(
        "--more-than-gpus",
        metavar="N",
        type=at_least_zero,
        help="only jobs with more GPUs (default: 128; 0: all jobs)",
    )
    parser.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=at_least_one,
        help="GPUs per node in the projection (default: as in the jobs)",
    )


def _rate(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import rate
        from healthd.fleet.views.rate import view

    given = {"more_than_gpus": args.more_than_gpus, "gpus_per_node": args.gpus_per_node}
    return answered(args, rate.rate, view, rate.found, **_said(given))


def _ettr_flags(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument("--gpus", metavar="N", type=at_least_one, help="GPUs of the job (default: 16384)")
    parser.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=at_least_one,
        help="GPUs per node (default: as in the store's jobs; with --rate 8)",
    )
    parser.add_argument(
        "--rate",
        metavar="R_F",
        type=_rate_of_failures,
        help="failures per 1000 node-days; needs no store (default: the rate of healthd fleet rate)",
    )
    for flag, kind, words in (
        ("--checkpoint", _some_time, "progress between two checkpoints (default: 60m)"),
        ("--restart", _time_or_0, "time from a start to progress (default: 5m)"),
        ("--queue", _time_or_0, "duration of each wait for nodes (default: 0)"),
        ("--write", _time_or_0, "time to write a checkpoint (default: 0)"),
        ("--productive", _some_time, "progress that the job needs to finish, like 30d (default: it never finishes)"),
    ):
        parser.add_argument(flag, metavar="DURATION", type=kind, help=words)
    parser.add_argument("--seed", metavar="N", type=at_least_zero, help="seed of the simulation (default: 13)")


def _ettr(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import ettr
        from healthd.fleet.views.ettr import view

    of_job = _said(
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
    of_store = any(getattr(args, flag) for flag in ("db", "from_time", "to_time", *CHOICES))
    if args.rate is None or of_store:
        return answered(args, ettr.ettr, view, ettr.found, **_said({"r_f": args.rate}), **of_job)
    return tell(args, ettr.of_rate(**{"r_f": args.rate, "gpus": ettr.GPUS, **of_job}), view, ettr.found)


def _said(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in given.items() if value is not None}


MOST_SECONDS = 100 * 365 * 86400
MOST_FAILURES = 1e6  # per 1000 node-days: one every 86 s on each node


def _some_time(text: str) -> float:
    """Parse a duration of more than 0 s. Raises ArgumentTypeError."""
    seconds = duration(text)
    if seconds is None or seconds > MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f'must be a duration like 90s, 60m, 1h30m or 30d, up to 100 years, got "{text}"'
        )
    return seconds


def _time_or_0(text: str) -> float:
    return 0.0 if regex(r"0{1,9}[smhd]?").fullmatch(text) else _some_time(text)


def _rate_of_failures(text: str) -> float:
    if not regex(r"[0-9]{1,7}(\.[0-9]{1,9})?").fullmatch(text) or float(text) > MOST_FAILURES:
        raise argparse.ArgumentTypeError(
            f'must be failures per 1000 node-days, a number from 0 to {MOST_FAILURES:,.0f}, got "{text}"'
        )
    return float(text)


# --- alarms


def _alarms_flags(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument(
        "--limit",
        metavar="SHARE",
        type=share,
        default=0.01,
        help="report checks above this share (default: 0.01, or 1%%)",
    )


def share(text: str) -> float:
    """Parse a share from 0 to 1, given as a number or a percentage. Raises ArgumentTypeError."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f'must be a share from 0 to 1, or a percentage, got "{text}"')
    return found


def _alarms(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import alarms
        from healthd.fleet.views.alarms import view

    return answered(args, alarms.alarms, view, alarms.found, limit=args.limit)


# --- checks


def _checks_flags(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument(
        "--gap",
        metavar="SECONDS",
        type=at_least_one,
        default=900,
        help="failures on a node further apart are two incidents (default: 900)",
    )


def _checks(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import checks
        from healthd.fleet.views.checks import view

    return answered(args, checks.checks, view, checks.found, gap_seconds=args.gap)


# --- links


def _links(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import links
        from healthd.fleet.views.links import view

    return answered(args, links.links, view, links.found)


# --- failslow


def _failslow(args: argparse.Namespace) -> int:
    with at_the_centre():
        from healthd.fleet.answers import failslow
        from healthd.fleet.views.failslow import view

    return answered(args, failslow.failslow, view, failslow.found)


# The answers that are chapters of `healthd fleet report`, in its order.
COMMANDS = {
    "fleet states": Command(
        _states_arguments,
        _states,
        f"Show how jobs ended and how GPU time was used, by state and size.\n{EXIT}",
        "  healthd fleet states --from 2026-10-01 --to 2026-11-01\n  healthd fleet states --partition train --json\n"
        "  healthd fleet states --split 2026-09-01 --large 512\n",
    ),
    "fleet goodput": Command(
        _goodput_arguments,
        _goodput,
        f"Show the work lost when nodes failed: in jobs that they ended, in jobs those displaced, in requeue "
        f"loops.\n{EXIT}",
        "  healthd fleet goodput --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet goodput --checkpoint 30m --price 2.50\n",
    ),
    "fleet availability": Command(
        _availability_arguments,
        _availability,
        f"Show how long nodes were up, drained (and by whom), down or not observed, and the time to repair.\n{EXIT}",
        "  healthd fleet availability --from 2026-10-01 --to 2026-11-01 --sla 99.5\n",
    ),
    "fleet nccl": Command(
        _nccl_flags,
        _nccl,
        f"Find the rank that blocks a stuck job, from the NCCL records of its ranks.\n{EXIT}",
        "  healthd fleet nccl /shared/dumps/1234\n  healthd fleet nccl /shared/dumps/1234 --json\n",
    ),
    "fleet attribution": Command(
        store_flags,
        _attribution,
        "Show the most likely cause of each failed job, the cost of each cause, how much of it is chance, and the "
        f"weeks in which a cause is unusually frequent.\n{EXIT}",
        "  healthd fleet attribution --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet attribution --partition train --json\n",
    ),
    "fleet rate": Command(
        _rate_flags,
        _rate,
        "Show how often large jobs fail because of their nodes (r_f, with interval), and the MTTF of a job of any "
        "size.\n"
        f"{EXIT}",
        "  healthd fleet rate --from 2026-10-01 --to 2026-11-01\n  healthd fleet rate --more-than-gpus 64 --json\n",
    ),
    "fleet ettr": Command(
        _ettr_flags,
        _ettr,
        "Show the share of its time in which a large job makes progress (ETTR): by formula, by simulation, and as "
        "measured in the store.\nWith --rate it needs no store.\n"
        f"{EXIT}",
        "  healthd fleet ettr --gpus 16384 --checkpoint 60m --restart 5m --rate 6.5\n"
        "  healthd fleet ettr --gpus 4096 --checkpoint 30m --write 1m --productive 30d\n",
    ),
    "fleet alarms": Command(
        _alarms_flags,
        _alarms,
        f"Show completed jobs that saw a failing check: how often a check may be a false alarm.\n{EXIT}",
        "  healthd fleet alarms --from 2026-10-01 --to 2026-11-01\n  healthd fleet alarms --limit 0.5%\n",
    ),
    "fleet checks": Command(
        _checks_flags,
        _checks,
        "Show which check detected an incident first, which was the only one, which never reported one, and the time "
        f"until the drain.\n{EXIT}",
        "  healthd fleet checks --from 2026-10-01 --to 2026-11-01\n  healthd fleet checks --model H100 --json\n",
    ),
    "fleet links": Command(
        store_flags,
        _links,
        f"Show flaps, errors and lost speed of links by port and switch, and the outliers.\n{EXIT}",
        "  healthd fleet links --from 2026-10-01 --to 2026-11-01\n  healthd fleet links --switch leaf012\n",
    ),
    "fleet failslow": Command(
        store_flags,
        _failslow,
        "Show the cost of jobs that became slower, in hours and GPU-hours, the worst nodes, the time until the "
        f"slowness was reported and someone acted, and validations that failed or were slow.\n{EXIT}",
        "  healthd fleet failslow --from 2026-10-01 --to 2026-11-01\n  healthd fleet failslow --model H100 --json\n",
    ),
}
