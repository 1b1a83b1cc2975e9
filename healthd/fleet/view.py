"""Describes an answer for people: its sentences, tables, figures and notes. All functions are pure.

Each answer has one description, which its function `view(document) -> View` returns. `view_text` renders the
description for a terminal, and report_page.py renders it as HTML. `--json` prints the document instead. Each column of
a table names a key of the document's rows, so a table never shows a number that `--json` lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from healthd.common.page import Page, plain
from healthd.fleet.answers.document import Document, format_duration, format_time, number, percent
from healthd.fleet.figures import Accessor, Figure, get_value
from healthd.fleet.table import format_table

Row = Mapping[str, Any]


# --- forms of values


class Form(NamedTuple):
    """The text format of a value. `right_aligned` is True for numbers."""

    write: Callable[[Any], str]
    right_aligned: bool = True


def _optional(write: Callable[[Any], str], right_aligned: bool = True) -> Form:
    """Return a form that writes None as "-"."""
    return Form(lambda value: "-" if value is None else write(value), right_aligned)


TEXT = Form(lambda value: "" if value is None else str(value), right_aligned=False)
SPACED = Form(lambda value: "" if value is None else str(value).replace("_", " "), right_aligned=False)
YES_NO = Form(lambda value: "yes" if value else "no", right_aligned=False)
COUNT = _optional(lambda value: f"{value:,}")
HUNDREDTHS = _optional(lambda value: f"{value:.2f}")
NUMBER = Form(number)
TWO_DIGITS = Form(lambda value: number(value, 2))  # a number with two significant digits
PERCENT = Form(percent)
DURATION = Form(format_duration)  # a duration in seconds
GPU_HOURS = _optional(lambda gpu_seconds: f"{gpu_seconds / 3600:,.0f}")
TIME = Form(format_time, right_aligned=False)
DAY = Form(lambda seconds: format_time(seconds)[:10], right_aligned=False)


def interval(form: Form) -> Form:
    """Return a form for [low, high], such as "0.2 to 0.5"."""
    return _optional(lambda ends: " to ".join(form.write(end) for end in ends))


# --- tables


class Column(NamedTuple):
    """A column.

    `accessor` is a key in the row, with dots for nested keys ("repair.mean_seconds"), or a function of the row.
    """

    title: str
    accessor: Accessor
    form: Form = TEXT


@dataclass(frozen=True, slots=True)
class Table:
    """A table. `max_rows` is the number of rows to print, or None for all. `--json` has all rows."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    max_rows: int | None = None

    def cell_texts(self) -> list[tuple[str, ...]]:
        """Return the texts in the cells of the visible rows."""
        return [
            tuple(column.form.write(get_value(row, column.accessor)) for column in self.columns)
            for row in self._visible_rows()
        ]

    def _visible_rows(self) -> Sequence[Row]:
        return self.rows[: self.max_rows]

    @property
    def hidden_rows_note(self) -> str:
        """Return a sentence about hidden rows, or "" if there are none."""
        visible, rows = len(self._visible_rows()), len(self.rows)
        return f"The first {visible:,} of {rows:,} rows; --json lists all." if visible < rows else ""


# --- the view


class Detail(NamedTuple):
    """A separate part of the answer, with a finding and its reasons.

    Attributes:
        lines: printed unchanged, like a command.
        items: a list.
    """

    title: str
    lines: tuple[str, ...] = ()
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """The description of an answer.

    Attributes:
        name: name of the answer.
        period: a line with the answer's period and selection; "" if it has none.
        figures: shown only in the report.
        notes: sentences about the answer's limits.
    """

    name: str
    title: str
    sentences: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    details: tuple[Detail, ...] = ()
    notes: tuple[str, ...] = ()
    period: str = ""


def describe(
    document: Document,
    title: str,
    sentences: Sequence[str],
    tables: Sequence[Table] = (),
    figures: Sequence[Figure | None] = (),
    details: Sequence[Detail] = (),
) -> View:
    """Return the view of a document. Empty tables and missing figures are left out."""
    return View(
        name=document["answer"],
        title=title,
        sentences=tuple(sentences),
        tables=tuple(view_table for view_table in tables if view_table.rows),
        figures=tuple(figure for figure in figures if figure is not None),
        details=tuple(details),
        notes=tuple(document["notes"]),
        period=_period(document),
    )


def _period(document: Document) -> str:
    chosen = [f"{key} {value}" for key, value in document["filters"].items()]
    begin, end = document["from_time"], document["to_time"]
    times = [] if begin is None else [f"from {format_time(begin)} to {format_time(end)} UTC"]
    return ", ".join([*times, *chosen])


def view_text(view: View, page: Page) -> str:
    """Return the title, the period, the sentences, the tables and the notes, separated by empty lines."""
    head = [line for line in (page.heading(plain(view.title)), *page.wrap(view.period)) if line]
    blocks = [
        head,
        [line for sentence in view.sentences for line in page.wrap(sentence)],
        *(_table(part, page) for part in view.tables),
        *(_detail(part, page) for part in view.details),
        [line for note in view.notes for line in page.item(note)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _table(view_table: Table, page: Page) -> list[str]:
    right_aligned = [number for number, column in enumerate(view_table.columns) if column.form.right_aligned]
    titles = [column.title for column in view_table.columns]
    lines = format_table(titles, view_table.cell_texts(), page, right_aligned).rstrip("\n").split("\n")
    return [f"{view_table.title}:", *lines, *page.wrap(view_table.hidden_rows_note)]


def _detail(detail: Detail, page: Page) -> list[str]:
    lines = [f"  {plain(line)}" for line in detail.lines]
    return [plain(detail.title), *lines, *(line for item in detail.items for line in page.item(item, "  "))]
