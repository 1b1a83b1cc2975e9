"""Queries of the store: one file of SQL each, fleet/sql/NAME.sql or a site's own.

The first line of the comment at the top of a file is its title. Below a line "-- parameters" it lists the parameters of
--param: `--   before_seconds BIGINT = 600   words`. The SQL reads them as columns of the one-row table `parameters`,
together with from_time and to_time. Other queries can use the name of a query as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from healthd.common.codec import nearest
from healthd.common.errors import HealthdError
from healthd.common.text import regex
from healthd.fleet import lint
from healthd.fleet.tables import BIGINT, DOUBLE, TABLES, TEXT

Value = int | float | str

_PARAMETER = regex(r"--   ([a-z][a-z_0-9]*) (BIGINT|DOUBLE|VARCHAR) = (\S+)(?:  .*)?")
_TYPES: dict[str, Callable[[str], Value]] = {BIGINT: int, DOUBLE: float, TEXT: str}
LONGEST = 1 << 20  # bytes of a SQL file


class WrongQuestion(HealthdError):
    """An invalid query. The message has file and line."""


@dataclass(frozen=True, slots=True)
class Question:
    """A SQL query of the store.

    title       first line of its comment
    parameters  parameter of --param -> its default
    """

    name: str
    path: str
    sql: str
    title: str
    parameters: dict[str, Value]


SQL = Path(__file__).with_name("sql")


def built_in() -> dict[str, Question]:
    """Return the queries that come with healthd, by name."""
    return _read_all(SQL)


# An hour earlier, not later: before the failure the node was in service under the same kind of load; afterwards it is
# drained, down or under repair. Early signs of a slow fault count as chance, which overestimates it.
BY_CHANCE_SHIFT_SECONDS = -3600


def for_answers() -> dict[str, Question]:
    """Return the built-in queries and the queries of the answers, by name.

    `seen_by_chance` is `seen_with_failures` an hour before each failure.
    """
    found = {**built_in(), **_read_all(SQL / "answers")}
    seen = found["seen_with_failures"]
    shifted = {**seen.parameters, "shift_seconds": BY_CHANCE_SHIFT_SECONDS}
    found["seen_by_chance"] = replace(seen, name="seen_by_chance", parameters=shifted)
    return found


def _read_all(folder: Path) -> dict[str, Question]:
    return {path.stem: parse(path.stem, str(path), path.read_text("utf-8")) for path in sorted(folder.glob("*.sql"))}


def read(path: str) -> Question:
    """Read a site's own query. Raises InvalidQuery; its SQL is checked later, by `with_dependencies`."""
    try:
        with open(path, "rb") as file:
            content = file.read(LONGEST + 1)
    except OSError as error:
        raise WrongQuestion(f"{path}: {error.strerror}") from None
    if len(content) > LONGEST:
        raise WrongQuestion(f"{path}: larger than {LONGEST} bytes, the limit for a query")
    try:
        return parse("", path, content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise WrongQuestion(f"{path}:{line}: is not UTF-8") from None


def parse(name: str, path: str, text: str) -> Question:
    """Parse a query file. Raises InvalidQuery for an invalid parameter."""
    lines = text.splitlines()
    title = next((line.removeprefix("--").strip() for line in lines[:1] if line.startswith("--")), "")
    parameters: dict[str, Value] = {}
    within = False
    for number, line in enumerate(lines, 1):
        if line.startswith("-- "):
            within = (line.startswith("--  ") and within) or line == "-- parameters"
        else:
            within = False
        if within and line != "-- parameters":
            match = _PARAMETER.fullmatch(line)
            if match is None:
                raise WrongQuestion(
                    f"{path}:{number}: write a parameter as NAME BIGINT|DOUBLE|VARCHAR = VALUE, after three blanks"
                )
            parameters[match[1]] = _value(f"{path}:{number}", match[1], match[2], match[3])
    return Question(name, path, text, title, parameters)


def _value(where: str, name: str, kind: str, text: str) -> Value:
    try:
        return _TYPES[kind](text)
    except ValueError:
        raise WrongQuestion(f'{where}: {name} must be a {kind}, got "{text}"') from None


def needed(question: Question, there: Mapping[str, Question], also: Collection[str] = ()) -> list[Question]:
    """Return the queries that this query reads, in order of dependency, and itself last.

    extra_tables: further tables that it may read. Raises InvalidQuery, with file and line, for SQL that is not allowed.
    """
    found: list[Question] = []

    def add(one: Question, above: tuple[str, ...]) -> None:
        known = {*TABLES, "parameters", "numbers", *also, *there} - {*above, one.name}
        wrong = lint.refusals(one.sql, known)
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise WrongQuestion(f"{one.path}:{wrong[0].line}: {wrong[0].why}{more}")
        for name in sorted(lint.tables_of(one.sql) & set(there)):
            if all(name != other.name for other in found):
                add(there[name], (*above, one.name))
        found.append(one)

    add(question, ())
    return found


def parameters(questions: Iterable[Question], given: Mapping[str, str]) -> dict[str, Value]:
    """Return the parameters: the defaults, those of the last query first, and --param. Raises InvalidQuery."""
    values: dict[str, Value] = {}
    for question in questions:
        values |= question.parameters
    for name, text in given.items():
        if name not in values:
            there = ", ".join(sorted(values)) or "none"
            raise WrongQuestion(
                f"--param {name}: the query has no such parameter (available: {there}){nearest(name, values)}"
            )
        kind = next(kind for kind, made in _TYPES.items() if made is type(values[name]))
        values[name] = _value("--param", name, kind, text)
    return values
