"""`healthd failslow period`: find the duration of an iteration from a rank's recorded operations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from healthd.cli.failslow.analyse import failslow_errors
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import Stop, as_json, write_output

if TYPE_CHECKING:
    from healthd.failslow.period import Period

Document = dict[str, object]


def _flags(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="log or table of operations with their times")
    parser.add_argument("--operation", metavar="C", help="table column with the operations")
    parser.add_argument("--time", metavar="C", help="table column with the operations' times")
    parser.add_argument("--series", metavar="C", help="table column that identifies a rank")
    parser.add_argument("--json", action="store_true", help="print JSON: {period, iteration_seconds, confidence}")


def _period(args: argparse.Namespace) -> int:
    for flag in ("operation", "time", "series"):
        if (value := getattr(args, flag)) is not None and not value.strip():
            raise Stop(f"healthd failslow period: --{flag}: is an empty string; name a column")
    with failslow_errors():
        from healthd.failslow.readers import streams
        from healthd.failslow.stream import StreamError, find_stream_period

        notes: list[str] = []
        if not (args.operation or args.time or args.series) and streams.is_record(args.file):
            rank_streams = streams.read_streams(args.file, notes)
        else:
            series = (args.series,) if args.series else ()
            rank_streams = streams.read_table_streams(
                args.file, args.file, args.operation or "", args.time or "", series
            )
        periods: dict[str, Period] = {}
        failures: list[StreamError] = []
        for item in rank_streams:
            try:
                periods[item.rank] = find_stream_period(item)
            except StreamError as error:
                failures.append(error)
        if not periods:
            raise failures[0]
    notes += [*map(str, failures), *_doubt_notes(periods)]
    document = _document(periods, notes)
    if args.json:
        return write_output(as_json(document))
    most_confident = max(periods.values(), key=lambda item: item.confidence)
    ranks = f"{len(periods):,} ranks: " if len(periods) > 1 else ""
    text = (
        f"{args.file}: {ranks}an iteration has {document['period']:,} operations and takes "
        f"{document['iteration_seconds']:.6g} s (from {len(most_confident.seconds):,} iterations); "
        f"confidence {document['confidence']:.2f}\n"
    )
    return write_output(text + "".join(f"note: {note}\n" for note in notes))


def _doubt_notes(periods: dict[str, Period]) -> Iterator[str]:
    """Yield a sentence for each pair of periods that fit about equally well, and one for uncertain iteration times."""
    from healthd.failslow.period import MAX_RELATIVE_ERROR

    def rank_suffix(rank_names: list[str]) -> str:
        if len(periods) == 1:
            return ""
        return f" on rank {rank_names[0]}" + (f" and {len(rank_names) - 1:,} more" if rank_names[1:] else "")

    ranks: dict[tuple[int, int], list[str]] = {}
    for rank, period in periods.items():
        if period.alternative:
            ranks.setdefault((period.operations, period.alternative[0]), []).append(rank)
    for (operations, other_operations), rank_names in ranks.items():
        period = periods[rank_names[0]]
        seconds = period.alternative[1] if period.alternative else 0.0
        yield (
            f"doubtful: an iteration{rank_suffix(rank_names)} may have {other_operations:,} operations and take "
            f"{seconds:.6g} s, or {operations:,} operations and {period.iteration_seconds:.6g} s"
        )
    uncertain = [rank for rank, period in periods.items() if period.relative_error > MAX_RELATIVE_ERROR]
    if uncertain:
        period = periods[uncertain[0]]
        yield (
            f"doubtful: with only {len(period.seconds):,} iterations{rank_suffix(uncertain)}, the iteration time may "
            f"be wrong by {period.relative_error:.1%}"
        )


def _document(periods: dict[str, Period], notes: list[str]) -> Document:
    """Return the document. For several ranks, use the most confident period and the median iteration time."""
    most_confident = max(periods.values(), key=lambda period: period.confidence)
    return {
        "period": most_confident.operations,
        "iteration_seconds": median(period.iteration_seconds for period in periods.values()),
        "confidence": most_confident.confidence,
        "series": [
            {
                "series": rank,
                "period": period.operations,
                "iteration_seconds": period.iteration_seconds,
                "confidence": period.confidence,
                "within": period.relative_error,
                "iterations": len(period.seconds),
                "other": period.alternative
                and {"period": period.alternative[0], "iteration_seconds": period.alternative[1]},
            }
            for rank, period in periods.items()
        ],
        "notes": notes,
    }


COMMANDS = {
    "failslow period": Command(
        _flags,
        _period,
        "Find the duration of an iteration without changing the job, from the repeating pattern of its operations. "
        "The input is NCCL Inspector records (NCCL_INSPECTOR_DUMP_VERBOSE=1), a flight-recorder dump, or a hook's log "
        "(one line per call: time, operation). It may also be CSV, JSON lines or Parquet with a column for the times "
        "and one for the operations.\n"
        "Exit status: 0 found, 3 the file cannot be read or has no repeating pattern, 64 usage error.",
        "  healthd failslow period calls.log\n  healthd failslow period calls.csv --operation op --time t --json\n",
    )
}
