"""Checks that a query gives the same result in DuckDB and Spark, and that none of its joins is too large.

All functions are pure.

A query is one SELECT over known tables, with JOIN ... ON, GROUP BY, window functions and the functions in FUNCTIONS.
Everything else is rejected with a message that names the line and an alternative.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from healthd.common.text import regex

# Functions that have the same name and result in both engines, for whole numbers and text.
FUNCTIONS = frozenset(
    [
        "abs",
        "avg",
        "cast",
        "coalesce",
        "count",
        "dense_rank",
        "exp",
        "first_value",
        "greatest",
        "lag",
        "last_value",
        "lead",
        "least",
        "length",
        "ln",
        "lower",
        "max",
        "min",
        "nullif",
        "rank",
        "regexp_extract",
        "replace",
        "row_number",
        "sqrt",
        "substr",
        "sum",
        "trim",
        "upper",
    ]
)
TYPES = frozenset(["bigint", "boolean", "double", "varchar"])
_KEYWORDS_BEFORE_BRACKET = frozenset(
    [
        "all",
        "and",
        "any",
        "as",
        "between",
        "by",
        "case",
        "distinct",
        "else",
        "end",
        "except",
        "exists",
        "filter",
        "from",
        "having",
        "in",
        "intersect",
        "is",
        "join",
        "like",
        "not",
        "on",
        "or",
        "over",
        "select",
        "then",
        "union",
        "using",
        "values",
        "when",
        "where",
        "with",
    ]
)
_KEYWORDS_AFTER_FROM = frozenset(
    ["where", "group", "having", "window", "order", "limit", "union", "except", "intersect"]
)
_JOINS = frozenset(["join", "inner", "left", "right", "full", "outer", "cross"])
# A join over a time range is cheap if it also requires equal values in one of these columns: a time bin, or the
# identifier of a job or stream.
_NARROW_COLUMN = regex(r"(\w+_)?(bin|day|job_id|db_index|condition_id|stream_id)")
_SMALL_TABLES = ("parameters", "numbers")  # tables allowed in a CROSS JOIN

_ALL_HINT = "name the columns; UNION ALL is allowed only between two SELECTs"
# Rejected words and their alternatives.
_REFUSED_WORDS = {
    "anti": "use WHERE NOT EXISTS or a LEFT JOIN with IS NULL",
    "asof": "only DuckDB has ASOF JOIN: join on equal time bins and take the newest row with row_number()",
    "columns": "name the columns",
    "exclude": "name the columns",
    "ilike": "compare lower(...) with LIKE",
    "interval": "times are whole seconds: add them",
    "lateral": "use a JOIN",
    "natural": "name the columns of the JOIN",
    "pivot": "use count(*) FILTER (WHERE ...) for each column",
    "unpivot": "use UNION ALL of the columns",
    "positional": "number the rows with row_number() and join on the number",
    "qualify": "filter in an outer SELECT",
    "recursive": "join `numbers`, or number the rows with a window function",
    "sample": "a random sample has no reproducible answer",
    "semi": "use WHERE EXISTS",
    "tablesample": "a random sample has no reproducible answer",
    **dict.fromkeys(
        ("timestamp", "date", "current_date", "current_timestamp"), "times are whole seconds since the epoch, UTC"
    ),
}
# Functions that exist in only one engine or differ between the two, and their alternatives.
_REFUSED_FUNCTIONS = {
    "explode": "join `numbers`",
    "generate_series": "join `numbers`",
    "epoch": "times are whole seconds already; epoch() differs in Spark",
    "percentile": "rank the rows with row_number() and select one",
    "quantile_cont": "rank the rows with row_number() and select one",
    "range": "join `numbers`",
    "round": "the engines round halves differently: multiply, or round when printing",
    "time_bucket": "use time - time % 3600",
    "unnest": "join `numbers`",
}
_TOKEN = regex(
    r"(?P<blank>\s+|--[^\n]*)|(?P<text>'(?:[^']|'')*')|(?P<quoted>\"[^\"]*\"|`[^`]*`)"
    r"|(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)|(?P<word>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<sign><=|>=|<>|!=|\|\||::|//|->>?|==|/\*|\*\*|[-+*/%=<>(),.;])|(?P<other>.)"
)
_REFUSED_SIGNS = {
    "::": "use CAST(... AS BIGINT)",
    "//": "whole numbers: use (a - a % 10) / 10, or CAST the quotient",
    "->": "JSON and lambda functions differ between the engines",
    "->>": "JSON differs between the engines",
    "==": "use =",
    "/*": "comments begin with --",
    "**": "multiply",
}


class Token(NamedTuple):
    """A token.

    Attributes:
        word: a name or keyword in lower case, or an unchanged sign, text or number.
        depth: nesting depth of brackets.
    """

    kind: str
    word: str
    line: int
    depth: int


class LintError(NamedTuple):
    line: int
    reason: str


def tokens(sql: str) -> list[Token]:
    """Return the tokens in the SQL, without blanks and comments."""
    found, line, depth = [], 1, 0
    for match in _TOKEN.finditer(sql):
        kind, text = str(match.lastgroup), match[0]
        depth -= text == ")"
        if kind != "blank":
            found.append(Token(kind, text.lower() if kind == "word" else text, line, depth))
        depth += text == "("
        line += text.count("\n")
    return found


def table_names(sql: str) -> set[str]:
    """Return the names after FROM and JOIN, except names that a WITH in the same SQL defines."""
    sql_tokens = tokens(sql)
    following = (sql_tokens[number + 1] for number in _from_positions(sql_tokens) if number + 1 < len(sql_tokens))
    return {name.word for name in following if name.kind == "word"} - _with_names(sql_tokens)


def find_errors(sql: str, known_tables: Collection[str]) -> list[LintError]:
    """Return the errors in a query, sorted by line, or an empty list for a valid query.

    Args:
        known_tables: the available tables.
    """
    sql_tokens = tokens(sql)
    if not sql_tokens:
        return [LintError(1, "the file has no SQL")]
    found = [
        *_check_single_select(sql_tokens),
        *_check_tokens(sql_tokens),
        *_check_from(sql_tokens, {*known_tables, *_with_names(sql_tokens)}),
        *_check_joins(sql_tokens),
    ]
    return sorted(set(found))


def _with_names(sql_tokens: list[Token]) -> set[str]:
    """Return the names defined by WITH: `name AS (` or `name(a, b) AS (`."""
    names = set()
    for number, token in enumerate(sql_tokens):
        if token.word == "as" and _word(sql_tokens, number + 1) == "(" and number:
            begin = number - 1
            if sql_tokens[begin].word == ")":
                begin = (
                    max(
                        i
                        for i in range(begin)
                        if sql_tokens[i].word == "(" and sql_tokens[i].depth == sql_tokens[number - 1].depth
                    )
                    - 1
                )
            if sql_tokens[begin].kind == "word" and begin and sql_tokens[begin - 1].word in ("with", ","):
                names.add(sql_tokens[begin].word)
    return names


def _word(sql_tokens: list[Token], number: int) -> str:
    return sql_tokens[number].word if 0 <= number < len(sql_tokens) else ""


def _check_single_select(sql_tokens: list[Token]) -> Iterator[LintError]:
    if sql_tokens[0].word not in ("select", "with"):
        yield LintError(sql_tokens[0].line, "a query is one SELECT; it may begin with WITH")
    for number, token in enumerate(sql_tokens):
        if token.word == ";" and number + 1 < len(sql_tokens):
            yield LintError(sql_tokens[number + 1].line, "a query is one SELECT, but there is text after it")
    if sql_tokens[-1].depth < 0 or (sql_tokens[-1].depth > 0 and sql_tokens[-1].word != ")"):
        yield LintError(sql_tokens[-1].line, "the brackets do not match")


def _check_tokens(sql_tokens: list[Token]) -> Iterator[LintError]:
    with_names = _with_names(sql_tokens)
    for number, token in enumerate(sql_tokens):
        _, word, line, _ = token
        after, before = _word(sql_tokens, number + 1), _word(sql_tokens, number - 1)
        if token.kind == "quoted":
            yield LintError(line, f"{word}: write names without quotes, and text in single quotes")
        elif token.kind == "other" or word in _REFUSED_SIGNS:
            yield LintError(line, f"{word}: {_REFUSED_SIGNS.get(word, 'not supported by both engines')}")
        elif token.kind == "number" and "." in word and "e" not in word.lower():
            yield LintError(line, f"{word}: a DECIMAL, which the engines round differently: use {word}e0")
        elif token.kind == "text" and "\\" in word:
            yield LintError(line, "a backslash in a text has a different meaning in Spark")
        elif word in ("/", "%") and sql_tokens[number + 1 : number + 2] and not _safe_divisor(sql_tokens, number + 1):
            yield LintError(line, f"{word}: if the divisor is 0, one engine fails: use {word} nullif(..., 0)")
        elif token.kind != "word":
            continue
        elif word in _REFUSED_WORDS and before != "." and after != ".":
            yield LintError(line, f"{word.upper()}: {_REFUSED_WORDS[word]}")
        elif word == "all" and before not in ("union", "except", "intersect"):
            yield LintError(line, f"ALL: {_ALL_HINT}")
        elif word == "on" and before == "distinct":
            yield LintError(line, "Spark has no DISTINCT ON: take the first row with row_number()")
        elif after == "(" and word not in _KEYWORDS_BEFORE_BRACKET and word not in with_names and word not in FUNCTIONS:
            hint = _REFUSED_FUNCTIONS.get(word, f"the allowed functions are {', '.join(sorted(FUNCTIONS))}")
            yield LintError(line, f"{word}(): {hint}")
        elif word == "cast" and after == "(":
            yield from _check_cast(sql_tokens, number + 1)


def _safe_divisor(sql_tokens: list[Token], number: int) -> bool:
    return sql_tokens[number].word == "nullif" or (
        sql_tokens[number].kind == "number" and float(sql_tokens[number].word) != 0
    )


def _check_cast(sql_tokens: list[Token], bracket: int) -> Iterator[LintError]:
    depth = sql_tokens[bracket].depth
    end = next(
        (i for i in range(bracket + 1, len(sql_tokens)) if sql_tokens[i].word == ")" and sql_tokens[i].depth == depth),
        0,
    )
    if end and (_word(sql_tokens, end - 2) != "as" or sql_tokens[end - 1].word not in TYPES):
        yield LintError(sql_tokens[end - 1].line, f"CAST: the types are {', '.join(sorted(t.upper() for t in TYPES))}")


def _from_positions(sql_tokens: list[Token]) -> Iterator[int]:
    """Yield the positions of FROM and JOIN. The FROM in IS DISTINCT FROM is skipped."""
    for number, token in enumerate(sql_tokens):
        if token.kind == "word" and token.word in ("from", "join") and _word(sql_tokens, number - 1) != "distinct":
            yield number


def _check_from(sql_tokens: list[Token], known_tables: Collection[str]) -> Iterator[LintError]:
    for number in _from_positions(sql_tokens):
        token = sql_tokens[number]
        name = sql_tokens[number + 1] if number + 1 < len(sql_tokens) else token
        if name.word == "(":
            inner = _word(sql_tokens, number + 2)
            if inner not in ("select", "with"):
                yield LintError(name.line, "brackets after FROM or JOIN must contain a SELECT; or use WITH")
        elif name.kind != "word" or _word(sql_tokens, number + 2) in (".", "("):
            yield LintError(name.line, f"{token.word.upper()} {name.word}: only named tables can be read")
        elif name.word not in known_tables:
            yield LintError(name.line, f'unknown table "{name.word}"; available: {", ".join(sorted(known_tables))}')
        if token.word == "from":
            yield from _check_commas(sql_tokens, number)


def _check_commas(sql_tokens: list[Token], start: int) -> Iterator[LintError]:
    for token in sql_tokens[start + 1 :]:
        if token.depth < sql_tokens[start].depth or (
            token.depth == sql_tokens[start].depth and token.word in _KEYWORDS_AFTER_FROM
        ):
            return
        if token.word == "," and token.depth == sql_tokens[start].depth:
            yield LintError(token.line, "a comma between tables is not allowed: use JOIN ... ON")


def _check_joins(sql_tokens: list[Token]) -> Iterator[LintError]:
    for number, token in enumerate(sql_tokens):
        if token.word != "join" or token.kind != "word":
            continue
        if _word(sql_tokens, number - 1) == "cross":
            if _word(sql_tokens, number + 1) not in _SMALL_TABLES:
                yield LintError(
                    token.line, f"CROSS JOIN is allowed only for {' and '.join(_SMALL_TABLES)}: use JOIN ... ON"
                )
            continue
        condition = _condition(sql_tokens, number)
        if condition is None:
            yield LintError(token.line, "JOIN: the condition is missing: use ON or USING")
        elif condition and not any(_equality(condition, at) for at in range(len(condition))):
            yield LintError(token.line, "JOIN: needs two equal columns; otherwise every row is paired with every other")
        elif any(part.word in ("<", "<=", ">", ">=", "between") for part in condition) and not any(
            _equality(condition, at) and _NARROW_COLUMN.fullmatch(condition[at - 1].word)
            for at in range(len(condition))
        ):
            yield LintError(
                token.line,
                "JOIN over a time range: also require equal time bins (columns ..._bin) or job identifiers",
            )


def _condition(sql_tokens: list[Token], join: int) -> list[Token] | None:
    """Return the tokens of a join's ON condition, [] for USING, or None if the join has neither."""
    depth = sql_tokens[join].depth
    begin = next(
        (
            i
            for i in range(join + 1, len(sql_tokens))
            if sql_tokens[i].depth <= depth and sql_tokens[i].word in ("on", "using", "join", ")")
        ),
        None,
    )
    if begin is None or sql_tokens[begin].word in ("join", ")") or sql_tokens[begin].depth < depth:
        return None
    if sql_tokens[begin].word == "using":
        return []
    ends = _KEYWORDS_AFTER_FROM | _JOINS
    end = next(
        (
            i
            for i in range(begin + 1, len(sql_tokens))
            if sql_tokens[i].depth < depth or (sql_tokens[i].depth == depth and sql_tokens[i].word in ends)
        ),
        len(sql_tokens),
    )
    return sql_tokens[begin + 1 : end]


def _equality(condition: list[Token], at: int) -> bool:
    """Return True if the tokens at this position are `a.x = b.y` and name two different tables."""
    around = condition[max(at - 3, 0) : at + 4]
    return (
        condition[at].word == "="
        and [part.kind if part.word != "." else "." for part in around]
        == ["word", ".", "word", "sign", "word", ".", "word"]
        and around[0].word != around[4].word
    )
