"""`healthd failslow period`: the duration of an iteration, from the recorded operations of a rank."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from healthd.cli.failslow.analyse import told_as_sentence
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import Stop, as_json, say

if TYPE_CHECKING:
    from healthd.failslow.period import Period

Document = dict[str, object]


def _flags(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="record or table of operations and their times")
    parser.add_argument("--operation", metavar="C", help="column of a table with the operations")
    parser.add_argument("--time", metavar="C", help="column of a table with their times")
    parser.add_argument("--series", metavar="C", help="column of a table that identifies a rank")
    parser.add_argument("--json", action="store_true", help="print JSON: {period, iteration_seconds, confidence}")


def _period(args: argparse.Namespace) -> int:
    for flag in ("operation", "time", "series"):
        if (given := getattr(args, flag)) is not None and not given.strip():
            raise Stop(f"healthd failslow period: --{flag}: is empty; name a column")
    with told_as_sentence():
        from healthd.failslow.readers import streams
        from healthd.failslow.stream import StreamError, period_of

        notes: list[str] = []
        if not (args.operation or args.time or args.series) and streams.is_record(args.file):
            read = streams.read_streams(args.file, notes)
        else:
            series = (args.series,) if args.series else ()
            read = streams.of_table(args.file, args.file, args.operation or "", args.time or "", series)
        found: dict[str, Period] = {}
        why: list[StreamError] = []
        for one in read:
            try:
                found[one.rank] = period_of(one)
            except StreamError as error:
                why.append(error)
        if not found:
            raise why[0]
    notes += [*map(str, why), *_doubts(found)]
    told = _document(found, notes)
    if args.json:
        return say(as_json(told))
    surest = max(found.values(), key=lambda one: one.confidence)
    ranks = f"{len(found):,} ranks: " if len(found) > 1 else ""
    text = (
        f"{args.file}: {ranks}an iteration has {told['period']:,} operations and takes "
        f"{told['iteration_seconds']:.6g} s (from {len(surest.seconds):,} iterations); "
        f"confidence {told['confidence']:.2f}\n"
    )
    return say(text + "".join(f"note: {note}\n" for note in notes))


def _doubts(found: dict[str, Period]) -> Iterator[str]:
    """Yield a sentence for each pair of about equally good periods, and one for uncertain iteration times."""
    from healthd.failslow.period import SURE_WITHIN

    def of(some: list[str]) -> str:
        if len(found) == 1:
            return ""
        return f" of rank {some[0]}" + (f" and {len(some) - 1:,} more" if some[1:] else "")

    ranks: dict[tuple[int, int], list[str]] = {}
    for rank, one in found.items():
        if one.other:
            ranks.setdefault((one.operations, one.other[0]), []).append(rank)
    for (operations, other), some in ranks.items():
        one = found[some[0]]
        seconds = one.other[1] if one.other else 0.0
        yield (
            f"doubtful: an iteration{of(some)} may have {other:,} operations and take {seconds:.6g} s as well as "
            f"{operations:,} and {one.iteration_seconds:.6g} s"
        )
    unsure = [rank for rank, one in found.items() if one.within > SURE_WITHIN]
    if unsure:
        one = found[unsure[0]]
        yield (
            f"doubtful: from {len(one.seconds):,} iterations{of(unsure)}, the iteration time may be wrong by "
            f"{one.within:.1%}"
        )


def _document(found: dict[str, Period], notes: list[str]) -> Document:
    """Return the document. For several ranks it has the period with the highest confidence and the median iteration
    time.
    """
    surest = max(found.values(), key=lambda one: one.confidence)
    return {
        "period": surest.operations,
        "iteration_seconds": median(one.iteration_seconds for one in found.values()),
        "confidence": surest.confidence,
        "series": [
            {
                "series": rank,
                "period": one.operations,
                "iteration_seconds": one.iteration_seconds,
                "confidence": one.confidence,
                "within": one.within,
                "iterations": len(one.seconds),
                "other": one.other and {"period": one.other[0], "iteration_seconds": one.other[1]},
            }
            for rank, one in found.items()
        ],
        "notes": notes,
    }


COMMANDS = {
    "failslow period": Command(
        _flags,
        _period,
        "Find the duration of an iteration without changing the job, from the repeating pattern of its operations. "
        "The input is records of NCCL Inspector (NCCL_INSPECTOR_DUMP_VERBOSE=1), a flight-recorder dump, a hook's log "
        "(one line per call: time, operation), or CSV, JSON lines or Parquet with a column for each.\n"
        "Exit status: 0 found, 3 the file cannot be read or has no repeating pattern, 64 usage error.",
        "  healthd failslow period calls.log\n  healthd failslow period calls.csv --operation op --time t --json\n",
    )
}
