"""The view of an answer as text for a terminal. Pure."""

from __future__ import annotations

from healthd.common.page import Page, plain
from healthd.fleet.table import table
from healthd.fleet.view import Detail, Table, View


def text(view: View, page: Page) -> str:
    """Return the title, the period, the sentences, the tables and the notes, with an empty line between them."""
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
