"""Lint of queries: SQL that DuckDB and Spark answer alike, without joins that are too large for a large store. Pure.

Allowed is one SELECT over known tables, with JOIN ... ON, GROUP BY, window functions and the functions of FUNCTIONS.
Anything else is rejected with its line and an alternative.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from healthd.common.text import regex

# Functions with the same name and result in both engines, for whole numbers and text.
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
_BEFORE_A_BRACKET = frozenset(
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
_ENDS_A_FROM = frozenset(["where", "group", "having", "window", "order", "limit", "union", "except", "intersect"])
_JOINS = frozenset(["join", "inner", "left", "right", "full", "outer", "cross"])
# Equality of such columns makes a join over a time range cheap: a time bin, or the identifier of a job or stream.
_NARROW = regex(r"(\w+_)?(bin|day|job_id|db_index|condition_id|stream_id)")
_SMALL = ("parameters", "numbers")  # tables allowed in a CROSS JOIN

_ALL = "name the columns; UNION ALL is allowed only between two SELECTs"
# Rejected words -> alternative.
_WORDS = {
    "anti": "use WHERE NOT EXISTS or a LEFT JOIN with IS NULL",
    "asof": "only DuckDB has ASOF JOIN: join by an equal time bin and take the newest with row_number()",
    "columns": "name the columns",
    "exclude": "name the columns",
    "ilike": "compare lower(...) with LIKE",
    "interval": "times are whole seconds: add them",
    "lateral": "use a JOIN",
    "natural": "name the columns of the JOIN",
    "pivot": "use count(*) FILTER (WHERE ...) for each column",
    "unpivot": "use UNION ALL of the columns",
    "positional": "number the rows with row_number() and join these",
    "qualify": "filter in an outer SELECT",
    "recursive": "join `numbers`, or number the rows with a window function",
    "sample": "a random sample has no reproducible answer",
    "semi": "use WHERE EXISTS",
    "tablesample": "a random sample has no reproducible answer",
    **dict.fromkeys(
        ("timestamp", "date", "current_date", "current_timestamp"), "times are whole seconds since the epoch, UTC"
    ),
}
# Functions that exist in one engine only, or differ between them -> alternative.
_FUNCTIONS = {
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
    """word: a name or keyword in lower case, or the sign, text or number unchanged. depth: of brackets."""

    kind: str
    word: str
    line: int
    depth: int


class Refusal(NamedTuple):
    line: int
    why: str


def tokens(sql: str) -> list[Token]:
    """Return the tokens of the SQL without blanks and comments."""
    found, line, depth = [], 1, 0
    for match in _TOKEN.finditer(sql):
        kind, text = str(match.lastgroup), match[0]
        depth -= text == ")"
        if kind != "blank":
            found.append(Token(kind, text.lower() if kind == "word" else text, line, depth))
        depth += text == "("
        line += text.count("\n")
    return found


def tables_of(sql: str) -> set[str]:
    """Return the names after FROM and JOIN, except those defined by a WITH of the same SQL."""
    read = tokens(sql)
    named = (read[number + 1] for number in _reading(read) if number + 1 < len(read))
    return {name.word for name in named if name.kind == "word"} - _made(read)


def refusals(sql: str, known: Collection[str]) -> list[Refusal]:
    """Return the errors of a query by line; empty if it is allowed. known_tables: the available tables."""
    read = tokens(sql)
    if not read:
        return [Refusal(1, "the file has no SQL")]
    found = [*_one_select(read), *_words_and_signs(read), *_froms(read, {*known, *_made(read)}), *_joins(read)]
    return sorted(set(found))


def _made(read: list[Token]) -> set[str]:
    """Return the names defined by WITH: `name AS (` or `name(a, b) AS (`."""
    made = set()
    for number, token in enumerate(read):
        if token.word == "as" and _word(read, number + 1) == "(" and number:
            begin = number - 1
            if read[begin].word == ")":
                begin = (
                    max(i for i in range(begin) if read[i].word == "(" and read[i].depth == read[number - 1].depth) - 1
                )
            if read[begin].kind == "word" and begin and read[begin - 1].word in ("with", ","):
                made.add(read[begin].word)
    return made


def _word(read: list[Token], number: int) -> str:
    return read[number].word if 0 <= number < len(read) else ""


def _one_select(read: list[Token]) -> Iterator[Refusal]:
    if read[0].word not in ("select", "with"):
        yield Refusal(read[0].line, "a query is one SELECT; it may begin with WITH")
    for number, token in enumerate(read):
        if token.word == ";" and number + 1 < len(read):
            yield Refusal(read[number + 1].line, "a query is one SELECT, but there is text after its end")
    if read[-1].depth < 0 or (read[-1].depth > 0 and read[-1].word != ")"):
        yield Refusal(read[-1].line, "the brackets do not match")


def _words_and_signs(read: list[Token]) -> Iterator[Refusal]:
    made = _made(read)
    for number, token in enumerate(read):
        _, word, line, _ = token
        after, before = _word(read, number + 1), _word(read, number - 1)
        if token.kind == "quoted":
            yield Refusal(line, f"{word}: write names without quotes, and text in single quotes")
        elif token.kind == "other" or word in _REFUSED_SIGNS:
            yield Refusal(line, f"{word}: {_REFUSED_SIGNS.get(word, 'not known to both engines')}")
        elif token.kind == "number" and "." in word and "e" not in word.lower():
            yield Refusal(line, f"{word}: a DECIMAL, which the engines round differently: use {word}e0")
        elif token.kind == "text" and "\\" in word:
            yield Refusal(line, "a backslash in a text has another meaning in Spark")
        elif word in ("/", "%") and read[number + 1 : number + 2] and not _safe_divisor(read, number + 1):
            yield Refusal(line, f"{word}: if the divisor is 0 one engine fails: use {word} nullif(..., 0)")
        elif token.kind != "word":
            continue
        elif word in _WORDS and before != "." and after != ".":
            yield Refusal(line, f"{word.upper()}: {_WORDS[word]}")
        elif word == "all" and before not in ("union", "except", "intersect"):
            yield Refusal(line, f"ALL: {_ALL}")
        elif word == "on" and before == "distinct":
            yield Refusal(line, "Spark has no DISTINCT ON: take the first row with row_number()")
        elif after == "(" and word not in _BEFORE_A_BRACKET and word not in made and word not in FUNCTIONS:
            hint = _FUNCTIONS.get(word, f"allowed are {', '.join(sorted(FUNCTIONS))}")
            yield Refusal(line, f"{word}(): {hint}")
        elif word == "cast" and after == "(":
            yield from _cast(read, number + 1)


def _safe_divisor(read: list[Token], number: int) -> bool:
    return read[number].word == "nullif" or (read[number].kind == "number" and float(read[number].word) != 0)


def _cast(read: list[Token], bracket: int) -> Iterator[Refusal]:
    depth = read[bracket].depth
    end = next((i for i in range(bracket + 1, len(read)) if read[i].word == ")" and read[i].depth == depth), 0)
    if end and (_word(read, end - 2) != "as" or read[end - 1].word not in TYPES):
        yield Refusal(read[end - 1].line, f"CAST: the types are {', '.join(sorted(t.upper() for t in TYPES))}")


def _reading(read: list[Token]) -> Iterator[int]:
    """Yield the positions of FROM and JOIN, except IS DISTINCT FROM."""
    for number, token in enumerate(read):
        if token.kind == "word" and token.word in ("from", "join") and _word(read, number - 1) != "distinct":
            yield number


def _froms(read: list[Token], known: Collection[str]) -> Iterator[Refusal]:
    for number in _reading(read):
        token = read[number]
        name = read[number + 1] if number + 1 < len(read) else token
        if name.word == "(":
            inner = _word(read, number + 2)
            if inner not in ("select", "with"):
                yield Refusal(name.line, "only a SELECT may be in brackets after FROM and JOIN; or use WITH")
        elif name.kind != "word" or _word(read, number + 2) in (".", "("):
            yield Refusal(name.line, f"{token.word.upper()} {name.word}: only tables can be read, by name")
        elif name.word not in known:
            yield Refusal(name.line, f'unknown table "{name.word}"; available: {", ".join(sorted(known))}')
        if token.word == "from":
            yield from _commas(read, number)


def _commas(read: list[Token], start: int) -> Iterator[Refusal]:
    for token in read[start + 1 :]:
        if token.depth < read[start].depth or (token.depth == read[start].depth and token.word in _ENDS_A_FROM):
            return
        if token.word == "," and token.depth == read[start].depth:
            yield Refusal(token.line, "a comma between tables: use JOIN ... ON")


def _joins(read: list[Token]) -> Iterator[Refusal]:
    for number, token in enumerate(read):
        if token.word != "join" or token.kind != "word":
            continue
        if _word(read, number - 1) == "cross":
            if _word(read, number + 1) not in _SMALL:
                yield Refusal(token.line, f"CROSS JOIN is allowed for {' and '.join(_SMALL)} only: use JOIN ... ON")
            continue
        condition = _condition(read, number)
        if condition is None:
            yield Refusal(token.line, "JOIN: the condition is missing: use ON or USING")
        elif condition and not any(_equality(condition, at) for at in range(len(condition))):
            yield Refusal(
                token.line, "JOIN: needs an equality of two columns, else every row is paired with every other"
            )
        elif any(part.word in ("<", "<=", ">", ">=", "between") for part in condition) and not any(
            _equality(condition, at) and _NARROW.fullmatch(condition[at - 1].word) for at in range(len(condition))
        ):
            yield Refusal(
                token.line,
                "JOIN over a time range: also require equal time bins (columns ..._bin) or job identifiers",
            )


def _condition(read: list[Token], join: int) -> list[Token] | None:
    """Return the tokens of a join's ON; [] for USING; None if it has neither."""
    depth = read[join].depth
    begin = next(
        (
            i
            for i in range(join + 1, len(read))
            if read[i].depth <= depth and read[i].word in ("on", "using", "join", ")")
        ),
        None,
    )
    if begin is None or read[begin].word in ("join", ")") or read[begin].depth < depth:
        return None
    if read[begin].word == "using":
        return []
    ends = _ENDS_A_FROM | _JOINS
    end = next(
        (
            i
            for i in range(begin + 1, len(read))
            if read[i].depth < depth or (read[i].depth == depth and read[i].word in ends)
        ),
        len(read),
    )
    return read[begin + 1 : end]


def _equality(condition: list[Token], at: int) -> bool:
    """Return True if `a.x = b.y` with two tables is at this position."""
    around = condition[max(at - 3, 0) : at + 4]
    return (
        condition[at].word == "="
        and [part.kind if part.word != "." else "." for part in around]
        == ["word", ".", "word", "sign", "word", ".", "word"]
        and around[0].word != around[4].word
    )
