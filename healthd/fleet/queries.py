"""Reads the queries for the store. Each query is an SQL file: fleet/sql/NAME.sql, or a site's own file.

The first line of the comment at the top of a file is its title. Below a line "-- parameters", it lists the parameters
for --param: `--   before_seconds BIGINT = 600   words`. The SQL reads them as columns of the one-row table
`parameters`, together with from_time and to_time. Other queries can use a query's name as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from healthd.common.codec import spelling_hint
from healthd.common.errors import HealthdError
from healthd.common.text import regex
from healthd.fleet import lint
from healthd.fleet.tables import BIGINT, DOUBLE, TABLES, TEXT

Value = int | float | str

_PARAMETER = regex(r"--   ([a-z][a-z_0-9]*) (BIGINT|DOUBLE|VARCHAR) = (\S+)(?:  .*)?")
_TYPES: dict[str, Callable[[str], Value]] = {BIGINT: int, DOUBLE: float, TEXT: str}
MAX_FILE_BYTES = 1 << 20  # maximum bytes in an SQL file


class InvalidQuery(HealthdError):
    """The query is invalid. The message names the file and line."""


@dataclass(frozen=True, slots=True)
class Query:
    """An SQL query on the store.

    Attributes:
        title: first line of its comment.
        parameters: maps each parameter for --param to its default.
    """

    name: str
    path: str
    sql: str
    title: str
    parameters: dict[str, Value]


SQL_FOLDER = Path(__file__).with_name("sql")


def builtin_queries() -> dict[str, Query]:
    """Return the queries that come with healthd, by name."""
    return _read_all(SQL_FOLDER)


# Chance matches are searched an hour before the failure, not an hour after it. Before the failure, the node was in
# service under the same kind of load; afterwards it is drained, down or under repair. Early signs of a slowly
# developing fault also count as chance matches, so chance is overestimated.
BY_CHANCE_SHIFT_SECONDS = -3600


def answer_queries() -> dict[str, Query]:
    """Return the built-in queries and the answers' queries, by name.

    `seen_by_chance` is `seen_with_failures` applied an hour before each failure.
    """
    queries = {**builtin_queries(), **_read_all(SQL_FOLDER / "answers")}
    seen_with_failures = queries["seen_with_failures"]
    shifted = {**seen_with_failures.parameters, "shift_seconds": BY_CHANCE_SHIFT_SECONDS}
    queries["seen_by_chance"] = replace(seen_with_failures, name="seen_by_chance", parameters=shifted)
    return queries


def _read_all(folder: Path) -> dict[str, Query]:
    return {
        path.stem: parse_query(path.stem, str(path), path.read_text("utf-8")) for path in sorted(folder.glob("*.sql"))
    }


def read_file(path: str) -> Query:
    """Read a site's own query. Raises InvalidQuery. `with_dependencies` checks its SQL later."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidQuery(f"{path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise InvalidQuery(f"{path}: larger than {MAX_FILE_BYTES} bytes, the limit for a query")
    try:
        return parse_query("", path, content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidQuery(f"{path}:{line}: is not UTF-8") from None


def parse_query(name: str, path: str, text: str) -> Query:
    """Parse a query file. Raises InvalidQuery for an invalid parameter."""
    lines = text.splitlines()
    title = next((line.removeprefix("--").strip() for line in lines[:1] if line.startswith("--")), "")
    parameters: dict[str, Value] = {}
    is_in_block = False
    for number, line in enumerate(lines, 1):
        if line.startswith("-- "):
            is_in_block = (line.startswith("--  ") and is_in_block) or line == "-- parameters"
        else:
            is_in_block = False
        if is_in_block and line != "-- parameters":
            match = _PARAMETER.fullmatch(line)
            if match is None:
                raise InvalidQuery(
                    f"{path}:{number}: write a parameter as NAME BIGINT|DOUBLE|VARCHAR = VALUE, after three blanks"
                )
            parameters[match[1]] = _parse_value(f"{path}:{number}", match[1], match[2], match[3])
    return Query(name, path, text, title, parameters)


def _parse_value(where: str, name: str, kind: str, text: str) -> Value:
    try:
        return _TYPES[kind](text)
    except ValueError:
        raise InvalidQuery(f'{where}: {name} must be a {kind}, got "{text}"') from None


def with_dependencies(query: Query, available: Mapping[str, Query], extra_tables: Collection[str] = ()) -> list[Query]:
    """Return the queries that this query reads, followed by the query itself. Each query comes after its dependencies.

    Raises InvalidQuery if the SQL is not allowed; the message names the file and line.

    Args:
        extra_tables: further tables that it may read.
    """
    found: list[Query] = []

    def add(current: Query, above: tuple[str, ...]) -> None:
        allowed_tables = {*TABLES, "parameters", "numbers", *extra_tables, *available} - {*above, current.name}
        errors = lint.find_errors(current.sql, allowed_tables)
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise InvalidQuery(f"{current.path}:{errors[0].line}: {errors[0].reason}{more}")
        for name in sorted(lint.table_names(current.sql) & set(available)):
            if all(name != added.name for added in found):
                add(available[name], (*above, current.name))
        found.append(current)

    add(query, ())
    return found


def resolve_parameters(queries: Iterable[Query], overrides: Mapping[str, str]) -> dict[str, Value]:
    """Return the parameters, taken from --param and the defaults. The last query's defaults take precedence.

    Raises InvalidQuery.
    """
    values: dict[str, Value] = {}
    for query in queries:
        values |= query.parameters
    for name, text in overrides.items():
        if name not in values:
            names = ", ".join(sorted(values)) or "none"
            raise InvalidQuery(
                f"--param {name}: the query has no such parameter (available: {names}){spelling_hint(name, values)}"
            )
        kind = next(kind for kind, value_type in _TYPES.items() if value_type is type(values[name]))
        values[name] = _parse_value("--param", name, kind, text)
    return values
