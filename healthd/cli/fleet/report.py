"""`healthd fleet report`: write all answers to one page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from healthd.cli.flags import Command, Parser
from healthd.cli.fleet.answers import CHOICES, add_store_flags, memory_limit, parse_price, study_or_exit
from healthd.cli.fleet.compare import compare_document
from healthd.cli.fleet.ingest import fleet_errors
from healthd.cli.terminal import OK, UNKNOWN, Stop, json_pieces, page, write_output, write_stream

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document


# Memory for scipy, the drawing program and all documents. Without this reserve, a report on 4 million jobs took 1,185
# MiB although the limit was 1,024 MiB.
OTHER_MIB = 320


def _arguments(parser: Parser) -> None:
    add_store_flags(parser)
    parser.add_argument("--out", metavar="DIR", help="directory for report.html; created if missing")
    parser.add_argument(
        "--price", metavar="P", type=parse_price, help="price of a GPU-hour, to also show the cost of lost work"
    )
    parser.add_argument(
        "--sla", metavar="PERCENT", type=_percent, help="target share of time that nodes are up, such as 99.5"
    )
    parser.add_argument(
        "--compare", metavar=("A", "B"), nargs=2, help="add a comparison, with the arguments of healthd fleet compare"
    )
    parser.add_argument(
        "--nccl",
        metavar="DIR",
        action="append",
        default=[],
        help="flight-recorder dumps from a stuck job; may be repeated",
    )


def _percent(text: str) -> float:
    try:
        value = float(text) if text.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f'must be a number from 1 to 100 like 99.5, got "{text}"')
    return value


def _report(args: argparse.Namespace) -> int:
    if args.out is None and not args.json:
        raise Stop("healthd fleet report: --out DIR or --json is required")
    with fleet_errors():
        from healthd.common.ownership import Untrusted
        from healthd.common.page import plural
        from healthd.fleet import report

        selected = report.report_chapters(args.price, args.sla, args.nccl, _precomputed_comparison(args))
        with study_or_exit(args, OTHER_MIB) as study:
            computed = report.compute_answers(study, selected, memory_limit(args))
            documents = report.report_document(study, computed)
            flags = _flags(args, _time(study.from_time), _time(study.to_time))
        written = ""
        if args.out is not None:
            html = report.report_html(documents, selected, flags, *_origin(), report.load_assets())
            try:
                written = report.write_report(args.out, html)
            except Untrusted as error:
                raise Stop(f"healthd fleet report: --out: {error.with_context(args.out)}", UNKNOWN) from None
            except OSError as error:
                raise Stop(f"healthd fleet report: --out {args.out}: {error.strerror or error}", UNKNOWN) from None
    for name, why in computed.failed.items():
        print(f"healthd fleet report: {name}: {why}", file=sys.stderr)
    status = UNKNOWN if computed.failed else OK
    if args.json:
        write_stream(json_pieces(documents))
        return status
    terminal_page = page()
    lines = [line for sentence in documents["report"]["opening"] for line in terminal_page.item(sentence)]
    return write_output("\n".join([*lines, "", f"{written}: {plural(len(selected), 'chapter')}", ""]), status)


def _precomputed_comparison(args: argparse.Namespace) -> tuple[str, Callable[[], Document]] | None:
    """Compute the comparison before the store is opened for the chapters, because the memory limit applies to each
    reader.

    Return the arguments for the equivalent `healthd fleet compare`, and a function that returns the document or raises
    the error. Return None without --compare.
    """
    import shlex

    from healthd.fleet.answers.document import Unanswerable
    from healthd.fleet.manifest import StoreError

    if args.compare is None:
        return None
    arguments = f"{shlex.join(args.compare)} {_flags(args, args.from_time, args.to_time)}".rstrip()
    try:
        document = compare_document(args, *args.compare)
    except (StoreError, Unanswerable) as error:
        return arguments, partial(_raise, error)
    return arguments, lambda: document


def _raise(error: Exception) -> NoReturn:
    raise error


def _flags(args: argparse.Namespace, from_time: str | None, to_time: str | None) -> str:
    """Return the options that select the same store, period, jobs and nodes."""
    import shlex

    engine = None if args.engine == "duckdb" else args.engine
    flags = [("db", args.db), ("from", from_time), ("to", to_time), ("engine", engine)]
    flags += [(name, getattr(args, name)) for name in CHOICES]
    return " ".join(f"--{name} {shlex.quote(value)}" for name, value in flags if value)


def _time(seconds: int) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _origin() -> tuple[str, str]:
    """Return the version and time as text, and the command line."""
    import shlex
    import time

    from healthd import __version__

    made_time = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"Made by healthd {__version__} on {made_time}:", shlex.join(["healthd", *sys.argv[1:]])


COMMANDS = {
    "fleet report": Command(
        _arguments,
        _report,
        "Write all answers to one page, DIR/report.html. The page loads nothing from the network.\n"
        "The page starts with a five-sentence summary, which is also printed. It replaces an older report, but no "
        "other file.\n"
        "If an answer fails (out of memory, a damaged file), its chapter gives the reason; the others are complete.\n"
        "Exit status: 0 written, 3 a chapter failed or nothing could be written, 64 usage error.",
        "  healthd fleet report --out report --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet report --out report --price 2.5 --sla 99.5\n"
        "  healthd fleet report --json\n",
    ),
}
