"""`healthd fleet compare A B`: differences between two periods, partitions, models, switches, accounts or clusters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.fleet.answers import EXIT, open_store, store_flags, tell
from healthd.cli.fleet.ingest import at_the_centre
from healthd.cli.terminal import Stop

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document


def _compare_flags(parser: Parser) -> None:
    what = "a period (2026-03, 2026-03..2026-04, FROM..TO) or partition:, account:, model:, switch:, cluster:NAME"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="what to compare A with, in the same form")
    store_flags(parser)


def _compare(args: argparse.Namespace) -> int:
    with at_the_centre():
        document = compared(args, args.a, args.b)
    from healthd.fleet.answers import compare
    from healthd.fleet.views.compare import view

    return tell(args, document, view, compare.found)


def compared(args: argparse.Namespace, a: str, b: str) -> Document:
    """Return the document of two sides. args: the store's options.

    Raises:
        Stop: wrong use, also two equal sides.
        StoreError: the store cannot be used, is damaged, or the answer takes too much memory.
        Unanswerable: the store lacks data for the comparison.
    """
    from healthd.fleet.answers import compare

    flags = [_side(args, name) for name in (a, b)]
    if flags[0] == flags[1]:
        raise Stop(f'healthd fleet compare: "{a}" and "{b}" are the same: name two different periods, partitions, ...')
    sides = []
    for name, its in zip((a, b), flags, strict=True):
        with open_store(its) as study:
            sides.append(compare.measured(study, name))
    return compare.compared(*sides)


def _side(args: argparse.Namespace, name: str) -> argparse.Namespace:
    """Return the options of one side: its own choice, and the options common to both. Raises Stop."""
    from healthd.fleet.answers.compare import choice, period
    from healthd.fleet.answers.document import WrongChoice

    chosen = choice(name)
    said = {"from_time", "to_time"} if chosen is None else {chosen[0]}
    for key in sorted(said):
        if getattr(args, key):
            flag = key.removesuffix("_time")
            raise Stop(f'healthd fleet compare: "{name}" and --{flag} conflict: leave one out')
    if chosen is not None:
        return argparse.Namespace(**{**vars(args), chosen[0]: chosen[1]})
    try:
        begin, end = period(name)
    except WrongChoice as error:
        raise Stop(f"healthd fleet compare: {error}") from None
    return argparse.Namespace(**{**vars(args), "from_time": str(begin), "to_time": str(end)})


COMMANDS = {
    "fleet compare": Command(
        _compare_flags,
        _compare,
        f"Show significant differences between two periods, partitions, models, switches or accounts.\n{EXIT}",
        "  healthd fleet compare 2026-03 2026-04\n"
        "  healthd fleet compare 2026-01-01..2026-02-01 2026-03-01..2026-04-01\n"
        "  healthd fleet compare model:H100 model:A100 --from 2026-10-01\n",
    ),
}
