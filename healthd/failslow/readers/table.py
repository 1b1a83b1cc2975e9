"""Converts a table of samples (CSV, JSON lines, Parquet) to series: one for each worker or rank."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, groupby
from math import inf, nan
from typing import Any, BinaryIO, NamedTuple

from healthd.common.text import printable, redacted, regex
from healthd.failslow import times
from healthd.failslow.model import Series
from healthd.failslow.readers import clean
from healthd.failslow.readers.chunks import NUMBER, Chunk, Unreadable, open_table
from healthd.failslow.readers.columns import Columns, choose_columns, join_names, missing_column

MIN_SAMPLES = 20  # minimum number of samples in a series; with fewer, there is no useful baseline
MAX_INDEX = 1e19  # larger than any iteration number or time
_NO_VALUE = frozenset(("", "nan", "na", "n/a", "none", "null", "nat", "-", "<na>"))
_INFINITE = frozenset(("inf", "+inf", "infinity", "+infinity"))
_WHOLE = regex(r"\s*[+-]?\d{1,18}\s*")
_ENDINGS = regex(r"(?i)(\.(csv|tsv|txt|jsonl|ndjson|json|parquet|log|gz)){1,8}$")


class ReadTable(NamedTuple):
    """The contents of a table.

    Attributes:
        series: by name in natural order.
        notes: sentences without a full stop and without the file's name.
    """

    series: list[Series]
    notes: list[str]


def read_table(path: str, requested: Columns, name: str = "", standard_input: BinaryIO | None = None) -> ReadTable:
    """Return all series in a file. Raises Unreadable; its message is one sentence.

    Args:
        name: the file's name in messages.
    """
    name = name or path
    with open_table(path, name, standard_input) as table:
        if problem := missing_column(requested, table.names):
            raise Unreadable(f"{name}: {problem}")
        first = dict(zip(table.names, table.first, strict=True))
        if table.names and not any(table.first) and not requested.value:
            row_count = sum(len(chunk.columns[0]) for chunk in table.chunks([0]))  # raises an error with its line
            raise Unreadable(f"{name}: has no rows" + (" in its first 100 lines" if row_count else ""))
        columns, taken, problem = choose_columns(requested, table.names, lambda column: _is_numeric(first[column]))
        if problem:
            raise Unreadable(f"{name}: {problem}")
        if mixed := _mixed_series_problem(columns, table.names, first):
            raise Unreadable(f"{name}: {mixed}")
        rows = _Rows(columns, table.names, name)
        is_unnamed = not (columns.series or columns.group or columns.node)
        index_column = _index_column(columns, table.names) if is_unnamed else ""
        candidates = (
            [column for column in table.names if column and column not in (index_column, *columns.used())]
            if index_column
            else []
        )
        runs = _Runs(candidates)
        extra = [table.names.index(column) for column in (index_column, *candidates)] if candidates else []
        for chunk in table.chunks([*rows.column_indices, *extra]):
            rows.take(chunk)
            if extra:
                runs.take(chunk.columns[len(rows.column_indices) :])
        if likely := runs.series_columns():
            raise Unreadable(f"{name}: {_series_question(index_column, likely)}")
        notes = [f"columns found by name: {'; '.join(taken)}"] if taken else []
        unused = [column for column in table.names if column and column not in columns.used()]
        if unused and not columns.series and not columns.group:
            notes.append(f"no column identifies a series; unused columns: {join_names(unused)}")
        notes += table.notes
    return _make_series(rows, path, name, notes)


MAX_RUNS = 10_000  # if a column changes more often than this, it does not identify consecutive series
INDEX_NAMES = ("step", "iteration", "iter", "global_step", "iteration_number", "batch_idx")


def _mixed_series_problem(columns: Columns, names: Sequence[str], first: Mapping[str, Sequence[Any]]) -> str:
    """Return a sentence if no column identifies the series but each index occurs several times, otherwise "".

    Such a table contains several series, which would be read as a single series.

    Args:
        first: the first rows.
    """
    if columns.series or columns.group or columns.node:
        return ""
    index = _index_column(columns, names)
    places = list(map(str, first[index])) if index else []
    counts = Counter(places)
    if len(places) < 4 or 2 * len(counts) > len(places) + 1:
        return ""
    free = [name for name in names if name and name not in (index, *columns.used())]
    likely = [
        name
        for name in free
        if 2 <= len(set(map(str, first[name]))) <= len(places) // 2
        and len(set(zip(map(str, first[name]), places, strict=True))) == len(places)
    ]
    return _series_question(index, likely) if likely else ""


def _index_column(columns: Columns, names: Sequence[str]) -> str:
    """Return the column that counts iterations, as requested or by its name, or ""."""
    index = columns.index or next((name for name in names if name.strip().lower() in INDEX_NAMES), "")
    return "" if index in (columns.value, *columns.parts().values()) else index


def _series_question(index: str, likely: Sequence[str]) -> str:
    question = f"which column identifies the series? Use --series: {join_names(likely, 'or')}"
    return f"has several rows per {printable(index)}; {question}"


class _Runs:
    """Records the changes in columns without a role: each new value, and the index at which it begins."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.runs: dict[str, list[tuple[str, str]]] = {column: [] for column in columns}
        self.columns = columns

    def take(self, cells: Sequence[Sequence[Any]]) -> None:
        """Add the cells of the index and each column."""
        places, *column_lists = cells
        for column, column_cells in zip(self.columns, column_lists, strict=True):
            runs, row = self.runs[column], 0
            for value, same in groupby(map(str, column_cells)):
                if not runs or runs[-1][0] != value:
                    runs.append((value, str(places[row])))
                if len(runs) > MAX_RUNS:
                    break
                row += sum(1 for _ in same)

    def series_columns(self) -> list[str]:
        """Return the columns that identify consecutive series.

        Such a column has three or more values. Each value occurs in one run of rows, and all runs begin at the same
        index. A column that counts restarts is different: a restarted job begins at a checkpoint, and usually restarts
        less often.
        """
        return [
            column
            for column, runs in self.runs.items()
            if 3 <= len(runs) <= MAX_RUNS and len({*runs}) == len(runs) and len({position for _, position in runs}) == 1
        ]


class _CollectedSeries:
    """One series while its file is read: value, index and parts as arrays, and names of regimes."""

    __slots__ = ("columns", "regimes")

    def __init__(self, kinds: Sequence[str]) -> None:
        self.columns = [_make_array(kind) for kind in kinds]
        self.regimes: list[str] = []


def _make_array(kind: str, cells: Iterable[float] = ()) -> array[float]:
    """Return an array.

    Args:
        kind: "d", or "q" if all cells are whole numbers.
    """
    made: array[Any] = array(kind, cells)
    return made


class _Rows:
    """The rows that were read so far. `by_key` has the samples for each (group, series, node)."""

    def __init__(self, columns: Columns, names: Sequence[str], file: str) -> None:
        self.columns, self.file = columns, file
        used = columns.used()
        self.column_indices = [names.index(name) for name in used]
        self.position_by_column = {name: position for position, name in enumerate(used)}
        self.numeric = [columns.value, *([columns.index] if columns.index else []), *columns.parts().values()]
        self.kinds = ["d"] * len(self.numeric)
        if columns.index:
            self.kinds[1] = "q"  # True while every index is a whole number
        self.by_key: dict[Any, _CollectedSeries] = {}
        self.style: times.TimeStyle | None = None
        self.counts: Counter[str] = Counter()
        self.rows = 0
        self.names: dict[str, str] = {}  # interned names of regimes
        self.last_row: Callable[[], str] = str  # "line 17"

    def take(self, chunk: Chunk) -> None:
        count = len(chunk.columns[0])
        if not count:
            return
        self.rows += count
        self.last_row = partial(chunk.where, count - 1)
        cells_by_column = {name: chunk.columns[position] for name, position in self.position_by_column.items()}
        cells: list[Sequence[float]] = []
        keep: list[bool] | None = None
        for position, name in enumerate(self.numeric):
            if position == 1 and self.columns.index:
                index, keep = self._parse_index(cells_by_column[name], chunk.where)
                cells.append(index)
            else:
                cells.append(_numbers(cells_by_column[name], chunk.where, name, self.file))
        keys, are_named = self._keys(cells_by_column, count, chunk.where)
        regimes = list(self._regimes(cells_by_column)) if self.columns.regime else None
        if not are_named:
            keep = [
                bool(key) and has_index for key, has_index in zip(self._subjects, keep or [True] * count, strict=True)
            ]
        if keep is not None and not all(keep):
            self.counts["left"] += count - sum(keep)
            keys = list(compress(keys, keep))
            cells = [list(compress(column_cells, keep)) for column_cells in cells]
            regimes = list(compress(regimes, keep)) if regimes is not None else None
        self._append(keys, cells, regimes or ())

    def _append(self, keys: Sequence[Any], cells: Sequence[Sequence[float]], regimes: Sequence[str]) -> None:
        """Append rows. This works column by column, which is faster than row by row.

        Args:
            regimes: () if none are reported.
        """
        by_key = self.by_key
        for key in set(keys) - by_key.keys():
            by_key[key] = _CollectedSeries(self.kinds)
        collected = [by_key[key].columns for key in keys]
        for position, column in enumerate(cells):
            for columns, cell in zip(collected, column, strict=True):
                columns[position].append(cell)
        for key, regime in zip(keys, regimes, strict=False):
            by_key[key].regimes.append(regime)

    # --- cells that are not plain numbers

    def _keys(
        self, cells_by_column: dict[str, Sequence[Any]], count: int, where: Callable[[int], str]
    ) -> tuple[Sequence[Any], bool]:
        """Return (group, series, node) for each row as text, and True if each row names its series."""
        columns = self.columns
        subjects: Sequence[str] = [""] * count
        are_named = True
        if columns.series:
            subjects = self._joined([cells_by_column[name] for name in columns.series], where, columns.series)
            are_named = "" not in subjects
        self._subjects = subjects
        if not (columns.group or columns.node):
            return subjects, are_named
        groups = self._joined([cells_by_column[name] for name in columns.group], where, columns.group) or [""] * count
        nodes = self._joined([cells_by_column[columns.node]], where, [columns.node]) if columns.node else [""] * count
        return list(zip(groups, subjects, nodes, strict=True)), are_named

    def _joined(
        self, cells: Sequence[Sequence[Any]], where: Callable[[int], str], names: Sequence[str]
    ) -> Sequence[str]:
        """Return the names from several columns as one name, such as "gpu-1/3", or "" if one is missing."""
        texts = [_texts(values, where, name, self.file) for values, name in zip(cells, names, strict=True)]
        if len(texts) <= 1:
            return texts[0] if texts else []
        return ["/".join(values) if all(values) else "" for values in zip(*texts, strict=True)]

    def _regimes(self, cells_by_column: dict[str, Sequence[Any]]) -> Iterator[str]:
        for values in zip(*(cells_by_column[name] for name in self.columns.regime), strict=True):
            name = "/".join("" if cell is None else str(cell).strip() for cell in values)
            yield self.names.setdefault(name, name)

    def _parse_index(
        self, cells: Sequence[Any], where: Callable[[int], str]
    ) -> tuple[Sequence[float], list[bool] | None]:
        """Return the index of each row, and for each row True if it has an index, or None if all rows have one.

        The indices are whole numbers if all are whole, otherwise floats. Times become seconds since 1970.
        """
        if self.style is None and (whole := _whole_numbers(cells)) is not None:
            return whole if self.kinds[1] == "q" else array("d", whole), None
        likely = next((cell for cell in cells if not _is_missing(cell)), None)
        if self.style is None and not self.rows - len(cells) and isinstance(likely, str):
            self.style = times.detect_style(likely)
        found: Sequence[float]
        if self.style is not None:
            found = [self._parse_time(cell, row, where) for row, cell in enumerate(cells)]
        else:
            found = _numbers(cells, where, self.columns.index, self.file)
        keep = [abs(position) < MAX_INDEX for position in found]
        all_whole = self.kinds[1] == "q" and self.style is None and all(_is_whole(cell) for cell in cells)
        if all_whole:
            found = [0 if _is_missing(cell) else int(cell) for cell in cells]
        elif self.kinds[1] == "q":
            self.kinds[1] = "d"
            for collected in self.by_key.values():
                collected.columns[1] = _make_array("d", collected.columns[1])
        return found, None if all(keep) else keep

    def _parse_time(self, cell: Any, row: int, where: Callable[[int], str]) -> float:
        if _is_missing(cell):
            return nan
        since = times.parse_seconds(cell) if isinstance(cell, str) else None
        if since is None:
            raise Unreadable(
                f'{self.file}: {where(row)}: column "{printable(self.columns.index)}" has {_describe_cell(cell)}, '
                "which is not a time"
            )
        return since


# --- cells


def _is_missing(cell: Any) -> bool:
    return (
        cell is None
        or (isinstance(cell, float) and cell != cell)
        or (isinstance(cell, str) and cell.strip().lower() in _NO_VALUE)
    )


def _is_whole(cell: Any) -> bool:
    if isinstance(cell, str):
        return _is_missing(cell) or bool(_WHOLE.fullmatch(cell))
    return _is_missing(cell) or (type(cell) is int and abs(cell) < 1 << 62)


def _is_numeric(cells: Iterable[Any]) -> bool:
    """Return True if most of the non-empty cells are numbers.

    Any text in the column is reported later, with its line.
    """
    present = [cell for cell in cells if not _is_missing(cell)]
    return bool(present) and 2 * sum(_number(cell) is not None for cell in present) > len(present)


def _whole_numbers(cells: Sequence[Any]) -> array[int] | None:
    """Return all cells as whole numbers, or None if one is not a whole number."""
    try:
        if not isinstance(cells[0], str):
            return None if bool in set(map(type, cells)) else array("q", cells)
        joined = "".join(cells)
        return array("q", map(int, cells)) if joined.isascii() and "_" not in joined else None
    except (TypeError, ValueError, OverflowError):
        return None


def _numbers(cells: Sequence[Any], where: Callable[[int], str], column: str, file: str) -> array[float]:
    """Return the cells as numbers, with NaN for an empty cell. Raises Unreadable for text."""
    try:
        if not isinstance(cells[0], str) and bool not in set(map(type, cells)):
            return array("d", cells)
        joined = "".join(cells)
        if joined.isascii() and "_" not in joined:
            return array("d", map(float, cells))
    except (TypeError, ValueError, OverflowError):
        pass  # convert the cells one by one to find the wrong one
    found = array("d")
    for row, cell in enumerate(cells):
        number = _number(cell)
        if number is None:
            raise Unreadable(
                f'{file}: {where(row)}: column "{printable(column)}" has {_describe_cell(cell)}, which is not a number'
            )
        found.append(number)
    return found


def _number(cell: Any) -> float | None:
    if _is_missing(cell):
        return nan
    if isinstance(cell, str):
        token = cell.strip().lower()
        if token.lstrip("-") in _INFINITE:
            return -inf if token.startswith("-") else inf
        return float(cell) if NUMBER.fullmatch(cell) else None
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        try:
            return float(cell)
        except OverflowError:
            return inf if cell > 0 else -inf
    return None


def _describe_cell(cell: Any) -> str:
    return redacted(cell) if isinstance(cell, str) else f"a {type(cell).__name__}"


def _texts(cells: Sequence[Any], where: Callable[[int], str], column: str, file: str) -> Sequence[str]:
    """Return the cells as text, with "" for an empty cell."""
    if set(map(type, cells)) == {str}:
        return list(map(str.strip, cells))
    found = []
    for row, cell in enumerate(cells):
        if isinstance(cell, (dict, list)):
            raise Unreadable(
                f'{file}: {where(row)}: column "{printable(column)}" has {_describe_cell(cell)}, which is not a name'
            )
        found.append("" if cell is None else str(cell).strip())
    return found


# --- series


def _make_series(rows: _Rows, path: str, file: str, notes: list[str]) -> ReadTable:
    columns = rows.columns
    if not rows.by_key:
        missing_text = " with a name and an index" if rows.rows else ""
        raise Unreadable(
            f"{file}: has no rows{missing_text}" + (f" ({rows.last_row()} is the last)" if rows.rows else "")
        )
    counts: Counter[str] = Counter()
    kind = "/".join(columns.series) if columns.series else ""
    default_name = stem(path)
    series: list[Series] = []
    short_count = 0
    part_names = list(columns.parts())
    mismatches: Counter[str] = Counter()
    for key in sorted(rows.by_key, key=_series_sort_key):
        collected = rows.by_key.pop(key)
        group, name, node = key if isinstance(key, tuple) else ("", key, "")
        value, *other_columns = collected.columns
        index = other_columns.pop(0) if columns.index else None
        raw = clean.RawSeries(
            value, index, tuple(other_columns), collected.regimes if columns.regime else None, rows.style is not None
        )
        cleaned = clean.clean_series(raw, counts)
        short_count += len(cleaned.value) < MIN_SAMPLES
        if cleaned.parts and cleaned.value:
            mismatches[
                clean.unit_mismatch(cleaned.value, cleaned.parts, "busy" in part_names and len(part_names) > 1)
            ] += 1
        if not cleaned.value:
            continue
        series.append(
            Series(
                name=name or default_name,
                value=cleaned.value,
                index=cleaned.index,
                label=kind,
                group=group,
                node=node,
                regimes=cleaned.regimes,
                starts=cleaned.starts,
                rows=cleaned.rows,
                times=rows.style,
                **dict(zip(part_names, cleaned.parts, strict=True)),
            )
        )
    if columns.regime and (thin := _thin_regimes(series)):
        notes = [*notes, thin]
    direction = max(mismatches, key=mismatches.__getitem__, default="")
    if direction and 2 * mismatches[direction] > sum(mismatches.values()):
        parts = join_names([*columns.parts().values()])
        raise Unreadable(
            f"{file}: {parts} together are far {direction} {columns.value} in most samples; check the units"
        )
    longest = max((len(item.value) for item in series), default=0)
    if longest < 2:
        count_text = "only one sample" if longest else "no sample with a value"
        raise Unreadable(
            f"{file}: {rows.last_row()}: {'each series has' if len(series) > 1 else 'there is'} {count_text}; "
            "several samples per series are required"
        )
    return ReadTable(series, notes + _problem_notes(counts, rows.counts["left"], short_count, columns))


def _thin_regimes(series: Sequence[Series]) -> str:
    """Return a sentence if most samples are in regimes with too few samples, otherwise ""."""
    sizes = [count for item in series for count in Counter(item.regimes or ()).values()]
    thin = sum(count for count in sizes if count < MIN_SAMPLES)
    if 2 * thin <= sum(sizes):
        return ""
    return (
        f"{thin:,} of {sum(sizes):,} samples have a regime with fewer than {MIN_SAMPLES} samples per series; "
        "regimes are ignored"
    )


def stem(path: str) -> str:
    """Return the file name without endings, such as "rank3" for "/tmp/rank3.csv.gz"."""
    base = os.path.basename(os.path.normpath(path))
    return _ENDINGS.sub("", base) or base


def _series_sort_key(key: Any) -> Any:
    return [natural_key(part) for part in key] if isinstance(key, tuple) else [natural_key(key)]


_PIECES = regex(r"\d+|\D+")


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts "worker 2" before "worker 10"."""
    return [
        (not _WHOLE.fullmatch(part), int(part) if _WHOLE.fullmatch(part) else 0, part) for part in _PIECES.findall(name)
    ]


def _problem_notes(counts: Counter[str], unnamed_count: int, short_count: int, columns: Columns) -> list[str]:
    """Return notes about the problems in the file, without repetition."""
    without = " or ".join([*(["a series"] if columns.series else []), *(["an index"] if columns.index else [])])
    problems = [
        (unnamed_count, f"without {without}", "left out"),
        (counts[clean.MISSING], clean.MISSING, "left out"),
        (counts[clean.INFINITE], clean.INFINITE, "left out"),
        (counts[clean.NOT_POSITIVE], clean.NOT_POSITIVE, "left out"),
        (counts[clean.NO_TIME], clean.NO_TIME, "left out"),
        (counts[clean.REPEATED], "that repeat an earlier row", "left out"),
        (counts[clean.LATE], "that are out of order", "sorted"),
        (
            counts[clean.NEGATIVE_PART],
            "with an invalid busy, wait or transfer time",
            "used without it",
        ),
    ]
    notes = [
        f"{count:,} row{'s' if count > 1 else ''} {description}: {done}"
        for count, description, done in problems
        if count
    ]
    if counts[clean.RESTARTS]:
        restart_count = counts[clean.RESTARTS]
        notes.append(
            f"{restart_count:,} restart{'s' if restart_count > 1 else ''} of a series, each followed by a warm-up"
        )
    if short_count:
        notes.append(f"{short_count:,} series have fewer than {MIN_SAMPLES} samples, too few to evaluate")
    return notes
