"""`healthd fleet query`: run queries on the fleet store."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.fleet.ingest import fleet_errors, parse_time
from healthd.cli.terminal import OK, UNKNOWN, Stop, page, write_output, write_stream

if TYPE_CHECKING:
    from healthd.fleet.engine import Files, QueryParameters, QueryResult
    from healthd.fleet.queries import Query

MAX_ROWS = 500  # maximum number of rows in a printed table
CSV_ROWS = 1000  # rows per write as CSV


def _arguments(parser: Parser) -> None:
    parser.add_argument("question", metavar="NAME|FILE.sql", nargs="?", help="query to run (default: list all queries)")
    parser.add_argument("--db", metavar="DB", help="store directory")
    add_times(parser)
    parser.add_argument("--param", metavar="NAME=VALUE", action="append", default=[], help="query parameter")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all rows as one JSON document")
    form.add_argument("--csv", dest="as_csv", action="store_true", help="print all rows as CSV")
    add_engine(parser)


def add_times(parser: Parser) -> None:
    """Add the options for the period."""
    parser.add_argument("--from", dest="from_time", metavar="TIME", help="start of the period (default: all data)")
    parser.add_argument(
        "--to", dest="to_time", metavar="TIME", help="end of the period, exclusive: 2026-04-01 includes 31 March"
    )


def add_engine(parser: Parser) -> None:
    """Add the options for the engine, its threads and its memory."""
    parser.add_argument(
        "--engine",
        metavar="duckdb|spark|spark://HOST:PORT",
        type=_engine,
        default="duckdb",
        help="query engine: duckdb (default), Spark on this machine, or a Spark cluster",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=thread_count,
        help="number of threads, up to 256 (default: half the cores, at most 4)",
    )
    parser.add_argument(
        "--memory", metavar="MIB", type=memory_mib, help="memory limit, at least 256 (default: 1024 per thread)"
    )


def _engine(text: str) -> str:
    if text not in ("duckdb", "spark") and not text.startswith("spark://"):
        raise argparse.ArgumentTypeError(f'must be duckdb, spark or spark://HOST:PORT, got "{text}"')
    return text


# All threads are created even if they have no work. 32,000 threads once blocked a machine.
MAX_THREADS = 256
MIN_MIB = 256  # with less memory, not even an empty store can be opened


def thread_count(text: str) -> int:
    return _whole_number(text, 1, MAX_THREADS, f"from 1 to {MAX_THREADS}")


def memory_mib(text: str) -> int:
    return _whole_number(text, MIN_MIB, 999_999_999, f"of MiB, at least {MIN_MIB}")


def non_negative(text: str) -> int:
    return _whole_number(text, 0, 999_999_999, "of at least 0")


def positive(text: str) -> int:
    return _whole_number(text, 1, 999_999_999, "of at least 1")


def _whole_number(text: str, minimum: int, maximum: int, range_text: str) -> int:
    from healthd.common.text import is_decimal

    if not is_decimal(text) or len(text) > 9 or not minimum <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(f'must be a whole number {range_text}, got "{text}"')
    return int(text)


def _query(args: argparse.Namespace) -> int:
    from healthd.fleet.queries import InvalidQuery, builtin_queries

    with fleet_errors():
        available = builtin_queries()
        if args.question is None:
            return _print_list(available.values())
        try:
            return _print_result(args, _select_query(args.question, available), available)
        except InvalidQuery as error:
            raise Stop(f"healthd fleet query: {error}") from None


def _print_list(available: Iterable[Query]) -> int:
    lines = [f"{query.name:20} {query.title}" for query in available]
    return write_output(
        "\n".join([*lines, "", "run a query: healthd fleet query NAME --db DB; docs/fleet.md describes each query", ""])
    )


def _select_query(name: str, available: dict[str, Query]) -> Query:
    from healthd.common.codec import spelling_hint
    from healthd.fleet.queries import read_file

    if "/" in name or name.endswith(".sql"):
        return read_file(name)
    if name not in available:
        raise Stop(f'healthd fleet query: there is no query "{name}"{spelling_hint(name, available)}')
    return available[name]


def _print_result(args: argparse.Namespace, query: Query, available: dict[str, Query]) -> int:
    from healthd.fleet.engine import QueryParameters
    from healthd.fleet.queries import resolve_parameters, with_dependencies
    from healthd.fleet.store import open_for_reading
    from healthd.fleet.tables import TABLES

    if args.db is None:
        raise Stop("healthd fleet query: --db DB is required")
    engine = str(args.engine)
    queries = with_dependencies(query, available)
    overrides = dict(_parse_pair(text) for text in args.param)
    values = resolve_parameters(queries, overrides)
    with open_for_reading(args.db) as snapshot:
        files = {table: snapshot.files(table) for table in TABLES}
        period_parameters = QueryParameters(*requested_period(args, args.db, files, "healthd fleet query"), values)
        with _open_result(args, engine, queries, files, period_parameters) as result:
            if args.json:
                write_stream(_json(query, engine, period_parameters, result))
            elif args.as_csv:
                write_stream(_csv(result))
            else:
                _table(query, period_parameters, result)
    return OK


def _parse_pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise Stop(f'healthd fleet query: --param: must be NAME=VALUE, got "{text}"')
    return name, value


def requested_period(args: argparse.Namespace, folder: str, files: Files, command: str) -> tuple[int, int]:
    """Return the period [from, to) from --from and --to, or the store's period. Raises Stop.

    `command` is the name for messages.
    """
    from healthd.fleet.engine import NUMBER_COUNT, covered_period

    if not any(files.values()):
        raise Stop(f"{command}: {folder}: the store is empty; load data with healthd fleet ingest --out", UNKNOWN)
    begin = None if args.from_time is None else parse_time(args.from_time, "--from")
    end = None if args.to_time is None else parse_time(args.to_time, "--to")
    if begin is None or end is None:
        covered = covered_period(files)
        if covered is None:
            raise Stop(f"{command}: {folder}: the store has no times; add --from and --to", UNKNOWN)
        begin, end = covered[0] if begin is None else begin, covered[1] if end is None else end
    if begin >= end:
        raise Stop(f"{command}: {_format_time(begin)} (--from) is not before {_format_time(end)} (--to)")
    if end - begin > (NUMBER_COUNT - 1) * 86400:
        raise Stop(
            f"{command}: from {_format_time(begin)} to {_format_time(end)} is too long: at most {NUMBER_COUNT - 1} days"
        )
    return begin, end


def _format_time(seconds: int) -> str:
    from healthd.fleet.table import format_cell

    return format_cell("time", seconds)


def _open_result(
    args: argparse.Namespace, engine: str, queries: Sequence[Query], files: Files, period_parameters: QueryParameters
) -> AbstractContextManager[QueryResult]:
    from healthd.fleet import engine as duck

    threads = args.threads or duck.THREADS
    memory = args.memory or 1024 * threads
    if engine == "duckdb":
        return duck.run_queries(queries, files, period_parameters, threads, memory)
    from healthd.fleet import spark

    return spark.run_queries(queries, files, period_parameters, engine, threads, memory)


def _json(query: Query, engine: str, period_parameters: QueryParameters, result: QueryResult) -> Iterator[str]:
    """Yield a result as JSON, one row per line (docs/fleet.md, "As JSON")."""
    import json

    head = {
        "question": query.name or query.path,
        "engine": engine,
        "from_time": period_parameters.from_time,
        "to_time": period_parameters.to_time,
        "parameters": dict(period_parameters.values),
        "columns": result.columns,
    }
    yield json.dumps(head, indent=2).removesuffix("\n}") + ',\n  "rows": ['
    separator = "\n"
    for row in result.rows:
        yield separator + "    " + json.dumps(dict(zip(result.columns, row, strict=True)))
        separator = ",\n"
    yield "\n  ]\n}\n"


def _csv(result: QueryResult) -> Iterator[str]:
    import csv
    import io

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(result.columns)
    while batch := list(islice(result.rows, CSV_ROWS)):
        writer.writerows(batch)
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def _table(query: Query, period_parameters: QueryParameters, result: QueryResult) -> None:
    from healthd.fleet.table import format_table

    rows = list(islice(result.rows, MAX_ROWS + 1))
    parts = [f"{query.title}\n"] if query.title else []
    parts.append(
        f"from {_format_time(period_parameters.from_time)} to {_format_time(period_parameters.to_time)} UTC\n\n"
    )
    parts.append(format_table(result.columns, rows[:MAX_ROWS], page()) if rows else "no rows\n")
    if len(rows) > MAX_ROWS:
        parts.append(f"the first {MAX_ROWS} rows; --csv and --json print all\n")
    write_output("".join(parts))


COMMANDS = {
    "fleet query": Command(
        _arguments,
        _query,
        "Run a built-in query or a SQL file on the store.\n"
        "Without a name, list the built-in queries. docs/fleet.md describes them and the SQL files.\n"
        "Exit status: 0 done, 3 the store could not be used or is empty, 64 usage error, or the file is not a query.",
        "  healthd fleet query\n"
        "  healthd fleet query states --db db --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet query seen_with_failures --db db --param after_seconds=60\n"
        "  healthd fleet query ours.sql --db db --csv\n",
    ),
}
