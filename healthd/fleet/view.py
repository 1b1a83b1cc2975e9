"""Description of an answer for people: its sentences, tables, figures and notes. Pure.

Each answer describes itself once, with a function `view(document) -> View`. `view_text` writes the description for a
terminal, report_page.py as HTML; `--json` prints the document. A column names a key of the document's rows, so that a
table has no number that `--json` lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from healthd.common.page import Page, plain
from healthd.fleet.answers.document import Document, moment, number, percent, span
from healthd.fleet.figures import Figure, Of, value_of
from healthd.fleet.table import table

Row = Mapping[str, Any]


# --- forms of values


class Form(NamedTuple):
    """Written form of a value. right_aligned: align right, as for numbers."""

    write: Callable[[Any], str]
    right: bool = True


def _known(write: Callable[[Any], str], right: bool = True) -> Form:
    """Return a form that writes None as "-"."""
    return Form(lambda value: "-" if value is None else write(value), right)


TEXT = Form(lambda value: "" if value is None else str(value), right=False)
WORDS = Form(lambda value: "" if value is None else str(value).replace("_", " "), right=False)
YES = Form(lambda value: "yes" if value else "no", right=False)
COUNT = _known(lambda value: f"{value:,}")
HUNDREDTHS = _known(lambda value: f"{value:.2f}")
NUMBER = Form(number)
SHORT = Form(lambda value: number(value, 2))  # a number with two significant digits
PERCENT = Form(percent)
SPAN = Form(span)  # a duration in seconds
GPU_HOURS = _known(lambda gpu_seconds: f"{gpu_seconds / 3600:,.0f}")
TIME = Form(moment, right=False)
DAY = Form(lambda seconds: moment(seconds)[:10], right=False)


def interval(form: Form) -> Form:
    """Return the form of [low, high]: "0.2 to 0.5"."""
    return _known(lambda ends: " to ".join(form.write(end) for end in ends))


# --- tables


class Column(NamedTuple):
    """accessor: key of the row, with dots for nested keys ("repair.mean_seconds"), or a function of the row."""

    title: str
    of: Of
    form: Form = TEXT


@dataclass(frozen=True, slots=True)
class Table:
    """max_rows: number of rows to print; None: all. `--json` has all rows."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    most: int | None = None

    def written(self) -> list[tuple[str, ...]]:
        """Return the visible rows, each as the texts of its cells."""
        return [tuple(column.form.write(value_of(row, column.of)) for column in self.columns) for row in self._shown()]

    def _shown(self) -> Sequence[Row]:
        return self.rows[: self.most]

    @property
    def left_out(self) -> str:
        """Sentence about hidden rows, "" if there are none."""
        shown, rows = len(self._shown()), len(self.rows)
        return f"The first {shown:,} of {rows:,} rows; --json has all." if shown < rows else ""


# --- the view


class Detail(NamedTuple):
    """A separate part of the answer: a finding and its reasons. lines: printed unchanged, like a command. items: a
    list.
    """

    title: str
    lines: tuple[str, ...] = ()
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """Description of an answer.

    name     of the answer
    period   period and choice of the answer, as a line; "" if it has none
    figures  for the report only
    notes    limits of the answer, as sentences
    """

    name: str
    title: str
    sentences: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    details: tuple[Detail, ...] = ()
    notes: tuple[str, ...] = ()
    period: str = ""


def described(
    document: Document,
    title: str,
    sentences: Sequence[str],
    tables: Sequence[Table] = (),
    figures: Sequence[Figure | None] = (),
    details: Sequence[Detail] = (),
) -> View:
    """Return the view of a document, without empty tables and missing figures."""
    return View(
        name=document["answer"],
        title=title,
        sentences=tuple(sentences),
        tables=tuple(each for each in tables if each.rows),
        figures=tuple(figure for figure in figures if figure is not None),
        details=tuple(details),
        notes=tuple(document["notes"]),
        period=_period(document),
    )


def _period(document: Document) -> str:
    chosen = [f"{key} {value}" for key, value in document["filters"].items()]
    begin, end = document["from_time"], document["to_time"]
    times = [] if begin is None else [f"from {moment(begin)} to {moment(end)} UTC"]
    return ", ".join([*times, *chosen])


def text(view: View, page: Page) -> str:
    """Return the title, the period, the sentences, the tables and the notes, separated by empty lines."""
    head = [line for line in (page.heading(plain(view.title)), *page.wrap(view.period)) if line]
    blocks = [
        head,
        [line for sentence in view.sentences for line in page.wrap(sentence)],
        *(_table(one, page) for one in view.tables),
        *(_detail(one, page) for one in view.details),
        [line for note in view.notes for line in page.item(note)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _table(one: Table, page: Page) -> list[str]:
    right = [number for number, column in enumerate(one.columns) if column.form.right]
    titles = [column.title for column in one.columns]
    lines = table(titles, one.written(), page, right).rstrip("\n").split("\n")
    return [f"{one.title}:", *lines, *page.wrap(one.left_out)]


def _detail(one: Detail, page: Page) -> list[str]:
    lines = [f"  {plain(line)}" for line in one.lines]
    return [plain(one.title), *lines, *(line for item in one.items for line in page.item(item, "  "))]
