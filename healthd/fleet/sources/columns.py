"""Reads rows below a header line: CSV from people and other tools, and Slurm's --parsable2 output.

The separator is a comma, semicolon, vertical bar or tab, whichever yields the column names in the header. A row with a
wrong number of fields or with unclosed quotes is counted as unread. Unused columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from healthd.fleet.ingest import IngestError
from healthd.fleet.sources.reading import Reading

SEPARATORS = ",;|\t"
MAX_FIELD_LINES = 50  # maximum lines in one quoted field


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a table.

    Attributes:
        required: required names, in lower case.
        optional: optional names.
        aliases: maps alternative spellings to column names.
        free: the only column whose text may contain the separator without quotes.
    """

    required: Sequence[str]
    optional: Sequence[str] = ()
    aliases: Mapping[str, str] | None = None
    free: str = ""

    def named(self, header: Sequence[str]) -> list[str]:
        aliases = self.aliases or {}
        names = (name.strip().strip('"').strip().lower() for name in header)
        return [aliases.get(name, name) for name in names]

    def check(self, names: Sequence[str], file: str) -> None:
        """Raise IngestError if a column is missing or duplicated."""
        for name in self.required:
            if name not in names:
                raise IngestError(
                    f'{file}: has no column "{name}"; the first line must name {", ".join(self.required)}'
                )
        for name in (*self.required, *self.optional):
            if names.count(name) > 1:
                raise IngestError(f'{file}: names column "{name}" {names.count(name)} times')


def rows(
    lines: Iterable[tuple[int, str]], columns: Columns, reading: Reading, separators: Collection[str] = SEPARATORS
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row's line number and its texts by column, without leading and trailing blanks.

    Raises IngestError for a missing column.
    """
    remaining = iter(lines)
    number, header = next(((n, line) for n, line in remaining if line.strip()), (0, ""))
    if not number:
        return
    separator = max(separators, key=lambda s: len({*columns.required} & {*columns.named(header.split(s))}))
    names = columns.named(header.split(separator))
    columns.check(names, reading.name)
    used_names = {*columns.required, *columns.optional}
    positions = [(name, position) for position, name in enumerate(names) if name in used_names]
    free = names.index(columns.free) if columns.free in names else None
    for number, fields in _records(remaining, separator, reading, quoted=free is None):
        if free is not None and len(fields) > len(names):
            more = len(fields) - len(names) + 1
            fields[free : free + more] = [separator.join(fields[free : free + more])]
        if len(fields) != len(names):
            reading.unread(number, f"{_count_text(len(fields), 'column')} instead of {len(names)}")
            continue
        yield number, {name: fields[position].strip() for name, position in positions}


def _records(
    lines: Iterator[tuple[int, str]], separator: str, reading: Reading, quoted: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row. A quoted field (RFC 4180) may contain separators and line ends.

    A quoted field that is never closed does not affect other rows.
    """
    pushed_back: list[tuple[int, str]] = []
    while True:
        number, line = pushed_back.pop() if pushed_back else next(lines, (0, ""))
        if not number:
            return
        if not line.strip():
            continue
        if not quoted or '"' not in line:
            yield number, line.split(separator)
            continue
        joined, consumed, reason = line, list[tuple[int, str]](), ""
        while True:
            try:
                fields = next(csv.reader([joined], delimiter=separator, strict=True))
            except csv.Error as error:
                reason = str(error)
                next_line = pushed_back.pop() if pushed_back else next(lines, (0, ""))
                if "unexpected end of data" in reason and next_line[0] and len(consumed) < MAX_FIELD_LINES:
                    consumed.append(next_line)
                    joined += "\n" + next_line[1]
                    continue
                if next_line[0]:
                    consumed.append(next_line)
                reading.unread(number, f"invalid quotes: {reason}")
                pushed_back.extend(reversed(consumed))
                break
            yield number, fields
            break


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
