"""`healthd failslow`: find components that work, but too slowly."""

from __future__ import annotations

import argparse
import math
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, json_pieces, page, write_output, write_stream
from healthd.common.errors import HealthdError
from healthd.common.guard import describe_error

if TYPE_CHECKING:
    from healthd.failslow.model import Diagnosis, Evidence, Series
    from healthd.failslow.readers.columns import Columns

COMMAND = "healthd failslow"
EXIT_STATUS = (
    "Exit status: 0 nothing slow was found, 1 a series or the job is slow, 3 a file cannot be read, 64 usage error."
)


@contextmanager
def failslow_errors(command: str = "failslow") -> Iterator[None]:
    """Print a message for an error and end with exit status 3.

    Internal errors, which normally exit with 1, also exit with 3, because 1 means here that something is slow.
    """
    try:
        yield
    except Stop:
        raise
    except HealthdError as error:
        raise Stop(f"healthd {command}: {error}", UNKNOWN) from None
    except Exception as error:  # not BaseException: a signal or an exit ends the program
        *_, frame = traceback.extract_tb(error.__traceback__)
        location = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        raise Stop(
            f"healthd {command}: internal error in healthd, no result: {describe_error(error)} ({location})", UNKNOWN
        ) from error


def column_flags(parser: Parser) -> None:
    """Add the arguments for the input and its columns."""
    parser.add_argument(
        "files",
        metavar="FILE|DIR",
        nargs="+",
        help="a job's samples (-: standard input), or a directory with one file per rank",
    )
    parser.add_argument("--series", metavar="C[,C]", help="columns that identify a worker or rank")
    parser.add_argument("--value", metavar="C", help="column with the iteration times")
    parser.add_argument("--index", metavar="C", help="column with the iteration number or time (default: row order)")
    parser.add_argument("--group", metavar="C[,C]", help="columns that identify a group of peers")
    parser.add_argument("--node", metavar="C", help="column with the node")
    parser.add_argument(
        "--regime", metavar="C[,C]", help="columns whose changes explain a different speed: batch size, ..."
    )
    parser.add_argument("--busy", metavar="C", help="column with the time spent on a rank's own work")
    parser.add_argument("--wait", metavar="C", help="column with the time spent waiting for other ranks")
    parser.add_argument("--transfer", metavar="C", help="column with the time spent on sending and receiving")


def _failslow_flags(parser: Parser) -> None:
    column_flags(parser)
    parser.add_argument("--db", metavar="DB", help="fleet store, to show what the job's nodes reported at that time")
    parser.add_argument("--plot", metavar="FILE", help="draw the slow series: FILE.svg, or FILE.html with a table")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")


def requested_columns(args: argparse.Namespace, command: str = "failslow") -> Columns:
    """Return the columns named by the flags. Raises Stop."""
    from healthd.failslow.readers.columns import Columns

    def column_name(flag: str) -> str:
        text = getattr(args, flag)
        if text is not None and not text.strip():
            raise Stop(f"healthd {command}: --{flag}: is an empty string; name a column")
        return (text or "").strip()

    def column_names(flag: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in column_name(flag).split(",")) if column_name(flag) else ()
        if "" in names or len(set(names)) < len(names):
            raise Stop(f'healthd {command}: --{flag}: must be column names like a,b, got "{column_name(flag)}"')
        return names

    return Columns(
        series=column_names("series"),
        value=column_name("value"),
        index=column_name("index"),
        group=column_names("group"),
        node=column_name("node"),
        regime=column_names("regime"),
        busy=column_name("busy"),
        wait=column_name("wait"),
        transfer=column_name("transfer"),
    )


def _evidence(series: Sequence[Series], folder: str) -> tuple[list[Evidence], str]:
    """Return the conditions on the series' nodes during the job, from the fleet store, and a sentence that counts them.

    Times are as in Series.index. The sentence has no full stop. Raises Stop with status 64 if no series has a node or
    the index is not a time, and with status 3 if the query fails.
    """
    from healthd.cli.fleet.answers import study_or_exit
    from healthd.cli.fleet.ingest import fleet_errors
    from healthd.common.page import plural
    from healthd.failslow import times
    from healthd.failslow.model import Evidence

    nodes = sorted({item.node for item in series} - {""})
    if not nodes:
        raise Stop(f"{COMMAND}: --db: no series has a node; name its column with --node")
    first = min(float(item.index[0]) for item in series if item.node)
    last = max(float(item.index[-1]) for item in series if item.node)
    unit = times.units_per_second(first, last)
    if unit is None:
        raise Stop(f"{COMMAND}: --db: the index is not a time; set --index to a column of ISO 8601 or Unix times")
    with fleet_errors(COMMAND):
        from healthd.fleet.answers.evidence import WINDOW_BEFORE_SECONDS, slowdown_evidence

    # A job may become slow up to ten minutes after the condition that caused it was reported.
    flags = _store_flags(folder, math.floor(first / unit) - WINDOW_BEFORE_SECONDS, math.floor(last / unit) + 1)
    with study_or_exit(flags, command=COMMAND) as study:
        records = slowdown_evidence(study, nodes)
    found = [
        Evidence(item.node, item.begin * unit, None if item.end is None else item.end * unit, item.code, item.message)
        for item in records
    ]
    reporting_nodes = len({item.node for item in found})
    findings = plural(len(found), "finding")
    return found, f"the store has {findings} from {reporting_nodes:,} of the {len(nodes):,} nodes at that time"


def _store_flags(folder: str, begin: int, end: int) -> argparse.Namespace:
    """Return the arguments for opening a store. `begin` and `end` are in seconds since 1970."""
    from healthd.cli.fleet.answers import CHOICES

    flags = dict.fromkeys((*CHOICES, "threads", "memory"), "")
    return argparse.Namespace(**flags, db=folder, engine="duckdb", from_time=str(begin), to_time=str(end))


def _check_plot(path: str | None, files: Sequence[str]) -> None:
    """Check the plot's path before reading a possibly long file. Raises Stop."""
    from healthd.failslow import plot

    try:
        if path is not None:
            plot.check_plot(path, files)
    except plot.InvalidPlotPath as error:
        raise Stop(f"healthd failslow: --plot {error}") from None
    except plot.MissingExtra as error:
        raise Stop(f"healthd failslow: {error}", UNKNOWN) from None


def _draw(series: Sequence[Series], diagnosis: Diagnosis, path: str) -> None:
    """Draw the plot.

    Call this after the answer is printed, so that a failure does not suppress the answer. Raises Stop.
    """
    from healthd.failslow import plot

    try:
        plot.write_plot(series, diagnosis, path)
    except OSError as error:
        raise Stop(f"healthd failslow: --plot {path}: cannot be written: {error.strerror}", UNKNOWN) from None


def _failslow(args: argparse.Namespace) -> int:
    columns = requested_columns(args)
    if "" in args.files:
        raise Stop("healthd failslow: FILE is an empty string; name a file")
    if args.db == "":
        raise Stop("healthd failslow: --db: is an empty string; name a fleet store")
    _check_plot(args.plot, args.files)
    with failslow_errors():
        from healthd.failslow import report
        from healthd.failslow.analysis import diagnose
        from healthd.failslow.readers.folder import read_files

        series, notes, unread, stops = read_files(args.files, columns)
        evidence: list[Evidence] = []
        if args.db is not None:
            evidence, evidence_note = _evidence(series, args.db)
            notes.append(evidence_note)
        diagnosis = diagnose(series, evidence)
        document = report.build_document(args.files, series, diagnosis, notes, unread, stops)
    status = REFUSED if report.has_findings(document) else OK
    if args.json:
        write_stream(json_pieces(document))
    else:
        write_output(report.format_text(document, page()))
    if args.plot is not None:
        _draw(series, diagnosis, args.plot)
    return status


COMMANDS = {
    "failslow": Command(
        _failslow_flags,
        _failslow,
        "Find the worker, node or link that makes a job slow. The input is iteration times (CSV, JSON lines, Parquet) "
        "or operation records (NCCL Inspector, flight recorder, a hook's log). If all workers are equally slow, no "
        "single worker is named as the cause.\n"
        f"Columns that you do not name are found by their usual names.\n{EXIT_STATUS}",
        "  healthd failslow job.csv --series worker --value batch_time_norm\n"
        "  healthd failslow ranks/ --busy compute_ms --transfer comm_ms --json\n"
        "  healthd failslow ranks/ --index time --node host --db /var/lib/fleet\n",
    ),
}
