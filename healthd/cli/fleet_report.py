"""`healthd fleet report`: all answers on one page, to show."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.fleet import at_the_centre
from healthd.cli.fleet_answers import CHOICES, at_the_store, price, store_flags
from healthd.cli.fleet_compare import compared
from healthd.cli.terminal import OK, UNKNOWN, Stop, json_texts, page, say, stream

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document
    from healthd.fleet.answers.study import Study


# altair, scipy and the documents of all answers: of 4 million jobs the report took 1,185 MiB without it, of 1,024.
BESIDE_MIB = 320


def _arguments(parser: Parser) -> None:
    store_flags(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="where report.html is written; the folder is made if it is missing"
    )
    parser.add_argument("--price", metavar="P", type=price, help="what a GPU-hour costs: losses in money too")
    parser.add_argument("--sla", metavar="PERCENT", type=_percent, help="of their time nodes should be up, as 99.5")
    parser.add_argument("--compare", metavar=("A", "B"), nargs=2, help="two sides, as healthd fleet compare takes them")
    parser.add_argument(
        "--nccl", metavar="DIR", action="append", default=[], help="dumps of a job that hung; again for more"
    )


def _percent(text: str) -> float:
    try:
        value = float(text) if text.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f'must be from 1 to 100, as 99.5, got "{text}"')
    return value


def _report(args: argparse.Namespace) -> int:
    if args.out is None and not args.json:
        raise Stop("healthd fleet report: say where to: --out DIR (or --json)")
    with at_the_centre():
        from healthd.fleet import report
        from healthd.machine.ownership import Untrusted

        those = report.parts(args.price, args.sla, args.nccl, _compared(args))
        with at_the_store(args, BESIDE_MIB) as study:
            documents = report.document(study, *report.answers(study, those))
            flags = _flags(args, study)
        written = ""
        if args.out is not None:
            html = report.html(documents, those, flags, *_made_by(), report.assets())
            try:
                written = report.write(args.out, html)
            except Untrusted as error:
                raise Stop(f"healthd fleet report: --out: {error.at(args.out)}", UNKNOWN) from None
            except OSError as error:
                raise Stop(f"healthd fleet report: --out {args.out}: {error.strerror or error}", UNKNOWN) from None
    if args.json:
        stream(json_texts(documents))
        return OK
    wide = page()
    lines = [line for sentence in documents["report"]["opening"] for line in wide.item(sentence)]
    return say(
        "\n".join([*lines, "", f"{written}: {len(those)} {'chapter' if len(those) == 1 else 'chapters'}", ""]), OK
    )


def _compared(args: argparse.Namespace) -> tuple[str, Document] | None:
    """What behind `healthd fleet compare` asks for it, and its document."""
    import shlex

    if args.compare is None:
        return None
    said = ["--db", args.db] if args.db else []
    return shlex.join([*args.compare, *said]), compared(args, *args.compare)


def _flags(args: argparse.Namespace, study: Study) -> str:
    """What each command needs to tell of the same store, time and choice."""
    import shlex
    from datetime import datetime, timezone

    def time(seconds: int) -> str:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")

    said = [("db", args.db), ("from", time(study.from_time)), ("to", time(study.to_time))]
    said += [(name, getattr(args, name)) for name in CHOICES]
    return " ".join(f"--{name} {shlex.quote(value)}" for name, value in said if value)


def _made_by() -> tuple[str, str]:
    """By which healthd and when, and the command."""
    import shlex
    import sys
    import time

    from healthd import __version__

    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"Made by healthd {__version__} on {now}:", shlex.join(["healthd", *sys.argv[1:]])


COMMANDS = {
    "fleet report": Command(
        _arguments,
        _report,
        "All answers on one page, DIR/report.html: one file, to show, which fetches nothing.\n"
        "It opens with five sentences, which are printed too. It replaces an older report, and no other file.\n"
        "Exit status: 0 written, 3 the store cannot answer or the file cannot be written, 64 wrong use.",
        "  healthd fleet report --out report --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet report --out report --price 2.5 --sla 99.5\n"
        "  healthd fleet report --json\n",
    ),
}
