"""`healthd fleet query`: queries of the centre's store."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.fleet.ingest import at_the_centre, moment
from healthd.cli.terminal import OK, UNKNOWN, Stop, page, say, stream

if TYPE_CHECKING:
    from healthd.fleet.engine import Answer, Asked, Files
    from healthd.fleet.questions import Question

MOST_ROWS = 500  # printed in a table
ROWS_AT_ONCE = 1000  # written at once as CSV


def _arguments(parser: Parser) -> None:
    parser.add_argument("question", metavar="NAME|FILE.sql", nargs="?", help="query to run (without: list all)")
    parser.add_argument("--db", metavar="DB", help="directory of the store")
    add_times(parser)
    parser.add_argument("--param", metavar="NAME=VALUE", action="append", default=[], help="parameter of the query")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all rows as one JSON document")
    form.add_argument("--csv", dest="as_csv", action="store_true", help="print all rows as CSV")
    add_engine(parser)


def add_times(parser: Parser) -> None:
    """Add the options for the period."""
    parser.add_argument("--from", dest="from_time", metavar="TIME", help="start of the period (default: all data)")
    parser.add_argument(
        "--to", dest="to_time", metavar="TIME", help="end of the period, exclusive: 2026-04-01 ends with 31 March"
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
        "--threads", metavar="N", type=threads, help="number of threads, up to 256 (default: half the cores, at most 4)"
    )
    parser.add_argument(
        "--memory", metavar="MIB", type=memory, help="memory limit, at least 256 (default: 1024 per thread)"
    )


def _engine(text: str) -> str:
    if text not in ("duckdb", "spark") and not text.startswith("spark://"):
        raise argparse.ArgumentTypeError(f'"{text}" is none of duckdb, spark, spark://HOST:PORT')
    return text


# Every thread is created, even without work for it: 32,000 threads blocked a machine.
MOST_THREADS = 256
LEAST_MIB = 256  # less is not enough to open an empty store


def threads(text: str) -> int:
    return _whole(text, 1, MOST_THREADS, f"from 1 to {MOST_THREADS}")


def memory(text: str) -> int:
    return _whole(text, LEAST_MIB, 999_999_999, f"of MiB, from {LEAST_MIB} on")


def at_least_zero(text: str) -> int:
    return _whole(text, 0, 999_999_999, "from 0 on")


def at_least_one(text: str) -> int:
    return _whole(text, 1, 999_999_999, "from 1 on")


def _whole(text: str, least: int, most: int, said: str) -> int:
    from healthd.common.text import is_decimal

    if not is_decimal(text) or len(text) > 9 or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f'must be a whole number {said}, got "{text}"')
    return int(text)


def _query(args: argparse.Namespace) -> int:
    from healthd.fleet.questions import WrongQuestion, built_in

    with at_the_centre():
        there = built_in()
        if args.question is None:
            return _list(there.values())
        try:
            return _answer(args, _chosen(args.question, there), there)
        except WrongQuestion as error:
            raise Stop(f"healthd fleet query: {error}") from None


def _list(there: Iterable[Question]) -> int:
    lines = [f"{question.name:20} {question.title}" for question in there]
    return say("\n".join([*lines, "", "ask: healthd fleet query NAME --db DB; what each means: docs/fleet.md", ""]))


def _chosen(name: str, there: dict[str, Question]) -> Question:
    from healthd.common.codec import nearest
    from healthd.fleet.questions import read

    if "/" in name or name.endswith(".sql"):
        return read(name)
    if name not in there:
        raise Stop(f'healthd fleet query: there is no query "{name}"{nearest(name, there)}')
    return there[name]


def _answer(args: argparse.Namespace, question: Question, there: dict[str, Question]) -> int:
    from healthd.fleet.engine import Asked
    from healthd.fleet.questions import needed, parameters
    from healthd.fleet.store import reading
    from healthd.fleet.tables import TABLES

    if args.db is None:
        raise Stop("healthd fleet query: --db DB is missing")
    engine = str(args.engine)
    questions = needed(question, there)
    given = dict(_pair(text) for text in args.param)
    chosen = parameters(questions, given)
    with reading(args.db) as snapshot:
        files = {table: snapshot.files(table) for table in TABLES}
        asked = Asked(*time_asked(args, args.db, files, "healthd fleet query"), chosen)
        with _answered(args, engine, questions, files, asked) as answer:
            if args.json:
                stream(_json(question, engine, asked, answer))
            elif args.as_csv:
                stream(_csv(answer))
            else:
                _table(question, asked, answer)
    return OK


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise Stop(f'healthd fleet query: --param: "{text}" is not NAME=VALUE')
    return name, value


def time_asked(args: argparse.Namespace, folder: str, files: Files, who: str) -> tuple[int, int]:
    """Return [from, to) of --from and --to, or the period that the store covers. command: for messages. Raises Stop."""
    from healthd.fleet.engine import NUMBERS, times_known

    if not any(files.values()):
        raise Stop(f"{who}: {folder}: the store is empty: fill it with healthd fleet ingest --out", UNKNOWN)
    begin = None if args.from_time is None else moment(args.from_time, "--from")
    end = None if args.to_time is None else moment(args.to_time, "--to")
    if begin is None or end is None:
        known = times_known(files)
        if known is None:
            raise Stop(f"{who}: {folder}: the store has no times: add --from and --to", UNKNOWN)
        begin, end = known[0] if begin is None else begin, known[1] if end is None else end
    if begin >= end:
        raise Stop(f"{who}: {_when(begin)} (--from) is not before {_when(end)} (--to)")
    if end - begin > (NUMBERS - 1) * 86400:
        raise Stop(f"{who}: from {_when(begin)} to {_when(end)} is too long: at most {NUMBERS - 1} days")
    return begin, end


def _when(seconds: int) -> str:
    from healthd.fleet.table import cell

    return cell("time", seconds)


def _answered(
    args: argparse.Namespace, engine: str, questions: Sequence[Question], files: Files, asked: Asked
) -> AbstractContextManager[Answer]:
    from healthd.fleet import engine as duck

    threads = args.threads or duck.THREADS
    memory = args.memory or 1024 * threads
    if engine == "duckdb":
        return duck.answered(questions, files, asked, threads, memory)
    from healthd.fleet import spark

    return spark.answered(questions, files, asked, engine, threads, memory)


def _json(question: Question, engine: str, asked: Asked, answer: Answer) -> Iterator[str]:
    """Yield the JSON of a result, one row per line: docs/fleet.md, "As JSON"."""
    import json

    head = {
        "question": question.name or question.path,
        "engine": engine,
        "from_time": asked.from_time,
        "to_time": asked.to_time,
        "parameters": dict(asked.parameters),
        "columns": answer.columns,
    }
    yield json.dumps(head, indent=2).removesuffix("\n}") + ',\n  "rows": ['
    mark = "\n"
    for row in answer.rows:
        yield mark + "    " + json.dumps(dict(zip(answer.columns, row, strict=True)))
        mark = ",\n"
    yield "\n  ]\n}\n"


def _csv(answer: Answer) -> Iterator[str]:
    import csv
    import io

    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(answer.columns)
    while some := list(islice(answer.rows, ROWS_AT_ONCE)):
        writer.writerows(some)
        yield made.getvalue()
        made.seek(0)
        made.truncate()
    yield made.getvalue()


def _table(question: Question, asked: Asked, answer: Answer) -> None:
    from healthd.fleet.table import table

    rows = list(islice(answer.rows, MOST_ROWS + 1))
    said = [f"{question.title}\n"] if question.title else []
    said.append(f"from {_when(asked.from_time)} to {_when(asked.to_time)} UTC\n\n")
    said.append(table(answer.columns, rows[:MOST_ROWS], page()) if rows else "no rows\n")
    if len(rows) > MOST_ROWS:
        said.append(f"the first {MOST_ROWS} rows; --csv and --json have all\n")
    say("".join(said))


COMMANDS = {
    "fleet query": Command(
        _arguments,
        _query,
        "Run a built-in query, or a file of SQL, on the store.\n"
        "Without a name it lists the built-in queries. docs/fleet.md describes them and the SQL files.\n"
        "Exit status: 0 done, 3 the store could not be used or is empty, 64 usage error, or the file is not a query.",
        "  healthd fleet query\n"
        "  healthd fleet query states --db db --from 2026-10-01 --to 2026-11-01\n"
        "  healthd fleet query seen_with_failures --db db --param after_seconds=60\n"
        "  healthd fleet query ours.sql --db db --csv\n",
    ),
}
