"""`healthd fleet compare A B`: differences between two periods, partitions, models, switches, accounts or clusters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.fleet.answers import EXIT_STATUS, add_store_flags, open_store, print_answer
from healthd.cli.fleet.ingest import fleet_errors
from healthd.cli.terminal import Stop

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document


def _compare_flags(parser: Parser) -> None:
    what = "a period (2026-03, 2026-03..2026-04, FROM..TO) or partition:, account:, model:, switch:, cluster:NAME"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="period or group to compare with A, in the same form")
    add_store_flags(parser)


def _compare(args: argparse.Namespace) -> int:
    with fleet_errors():
        document = compare_document(args, args.a, args.b)
    from healthd.fleet.answers import compare
    from healthd.fleet.views.compare import view

    return print_answer(args, document, view, compare.has_findings)


def compare_document(args: argparse.Namespace, a: str, b: str) -> Document:
    """Return the document that compares side A with side B. `args` contains the store's options.

    Raises:
        Stop: usage error, or both sides are equal.
        StoreError: the store is damaged or cannot be used, or the answer needs too much memory.
        Unanswerable: the store lacks data for the comparison.
    """
    from healthd.fleet.answers import compare

    flags = [_side_arguments(args, name) for name in (a, b)]
    if flags[0] == flags[1]:
        raise Stop(f'healthd fleet compare: "{a}" and "{b}" are the same: name two different periods, partitions, ...')
    sides = []
    for name, side_flags in zip((a, b), flags, strict=True):
        with open_store(side_flags) as study:
            sides.append(compare.measure_side(study, name))
    return compare.compare_sides(*sides)


def _side_arguments(args: argparse.Namespace, name: str) -> argparse.Namespace:
    """Return the options for one side: its own selection, and the options common to both sides. Raises Stop."""
    from healthd.fleet.answers.compare import parse_choice, parse_period
    from healthd.fleet.answers.document import WrongChoice

    chosen = parse_choice(name)
    conflicting = {"from_time", "to_time"} if chosen is None else {chosen[0]}
    for key in sorted(conflicting):
        if getattr(args, key):
            flag = key.removesuffix("_time")
            raise Stop(f'healthd fleet compare: "{name}" and --{flag} conflict; omit one')
    if chosen is not None:
        return argparse.Namespace(**{**vars(args), chosen[0]: chosen[1]})
    try:
        begin, end = parse_period(name)
    except WrongChoice as error:
        raise Stop(f"healthd fleet compare: {error}") from None
    return argparse.Namespace(**{**vars(args), "from_time": str(begin), "to_time": str(end)})


COMMANDS = {
    "fleet compare": Command(
        _compare_flags,
        _compare,
        f"Show significant differences between two periods, partitions, models, switches or accounts.\n{EXIT_STATUS}",
        "  healthd fleet compare 2026-03 2026-04\n"
        "  healthd fleet compare 2026-01-01..2026-02-01 2026-03-01..2026-04-01\n"
        "  healthd fleet compare model:H100 model:A100 --from 2026-10-01\n",
    ),
}
