"""Reads files, and folders with one file per rank. Returns the series, and the files that could not be read."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from healthd.common.errors import HealthdError
from healthd.failslow.model import Series
from healthd.failslow.readers import streams, table
from healthd.failslow.readers.chunks import Unreadable
from healthd.failslow.readers.columns import Columns
from healthd.failslow.stream import FailStop, Stream, StreamAnalysis, analyse_streams

MAX_FILES = 200_000
MAX_BYTES = 64 << 30  # maximum bytes of all files in a folder
MAX_DEPTH = 4  # maximum levels of folders below the given one; some sites have one folder per host


class ReadFiles(NamedTuple):
    """The contents of all files.

    Attributes:
        series: by name.
        notes: sentences.
        unread: {file, why} for files in folders.
        fail_stops: ranks whose operations have stopped.
    """

    series: list[Series]
    notes: list[str]
    unread: list[dict[str, str]]
    fail_stops: tuple[FailStop, ...] = ()


def read_files(paths: Sequence[str], columns: Columns) -> ReadFiles:
    """Return all series in the paths. Raises Unreadable.

    If a file that was given cannot be read, Unreadable is raised. An unreadable file in a folder is listed in `unread`;
    Unreadable is raised only if no file in the folder can be read.
    """
    tables: list[tuple[str, table.ReadTable]] = []
    ranks: list[Stream] = []  # from all files, because the files of other ranks show what a rank waited for
    record_notes: list[str] = []
    unread: list[dict[str, str]] = []
    for path in paths:
        if path == "-" or not os.path.isdir(path):
            if path != "-" and not columns.value and streams.is_record(path):
                ranks += streams.read_streams(path, record_notes)
            else:
                tables.append((path, read_file(path, columns, path)))
            continue
        before = len(tables) + len(ranks)
        failed: list[dict[str, str]] = []
        for name in _file_names(path):
            file = os.path.join(path, name)
            try:
                if not columns.value and streams.is_record(file):
                    ranks += streams.read_streams(file, record_notes, name)
                else:
                    tables.append((file, read_file(file, columns, name)))
            except HealthdError as error:
                failed.append({"file": name, "why": str(error).removeprefix(f"{name}: ")})
        if len(tables) + len(ranks) == before:
            problem = f"{failed[0]['file']}: {failed[0]['why']}" if failed else "no file"
            more = f" (and {len(failed) - 1:,} more)" if len(failed) > 1 else ""
            raise Unreadable(f"{path}: no file can be read: {problem}{more}")
        unread += failed
    notes = _combine_notes([(name, note) for name, contents in tables for note in contents.notes], len(tables))
    analysis = analyse_streams(ranks) if ranks else StreamAnalysis((), (), ())
    series = [*_merge(tables, notes), *sorted(analysis.series, key=lambda item: table.natural_key(item.name))]
    return ReadFiles(series, [*notes, *record_notes, *analysis.notes], unread, analysis.fail_stops)


def _combine_notes(noted: Sequence[tuple[str, str]], files: int) -> list[str]:
    """Return the notes with their files. A note about several files appears once, with the number of files."""
    names: dict[str, list[str]] = {}
    for name, note in noted:
        names.setdefault(note, []).append(name)
    if files == 1:
        return list(names)
    return [
        f"{note_files[0] if len(note_files) == 1 else f'{len(note_files):,} files'}: {note}"
        for note, note_files in names.items()
    ]


def read_file(path: str, columns: Columns, name: str) -> table.ReadTable:
    """Return the series in one file. Raises HealthdError; its message is a sentence that begins with the name."""
    if path == "-":
        return table.read_table(path, columns, "standard input", sys.stdin.buffer)
    return table.read_table(path, columns, name)


def _merge(tables: Sequence[tuple[str, table.ReadTable]], notes: list[str]) -> list[Series]:
    """Return the series from all files, each with a unique name.

    If several files have a series with the same name and group, the file's name is added to the series's name. Copies
    of a series are left out with a note, because they would look like a gang.
    """
    named: dict[tuple[str, str], list[tuple[str, Series]]] = {}
    for path, contents in tables:
        for item in contents.series:
            named.setdefault((item.group, item.name), []).append((path, item))
    labelled: list[tuple[str, Series]] = []
    taken = {(group, name) for (group, name), same_named in named.items() if len(same_named) == 1}
    for (group, name), same_named in named.items():
        if len({path for path, _ in same_named}) == 1 and len(tables) == len({path for path, _ in tables}):
            labelled += same_named
            continue
        paths = [path for path, _ in same_named]
        labels = _distinct_labels(list(dict.fromkeys(paths)))
        for path, item in same_named:
            label = unique_label = labels[path] if name == table.stem(path) else f"{labels[path]}/{name}"
            nth = 1
            while (group, unique_label) in taken:
                nth += 1
                unique_label = f"{label} ({nth})"
            taken.add((group, unique_label))
            labelled.append((path, replace(item, name=unique_label)))
    result = _drop_copies(labelled, notes) if len(tables) > 1 else [item for _, item in labelled]
    return sorted(
        result,
        key=lambda item: (table.natural_key(item.group), table.natural_key(item.name), table.natural_key(item.node)),
    )


def _distinct_labels(paths: Sequence[str]) -> dict[str, str]:
    """Shorten each path to its shortest unique end, such as "c/rank1". The file ending is kept only if necessary."""
    split = [os.path.normpath(path).split(os.sep) for path in paths]
    for with_ending in (False, True):
        ends = split if with_ending else [[*folders, table.stem(file)] for *folders, file in split]
        for depth in range(1, max(map(len, ends)) + 1):
            labels = ["/".join(parts[-depth:]) for parts in ends]
            if len(set(labels)) == len(paths):
                return dict(zip(paths, labels, strict=True))
    return {path: path for path in paths}


def _drop_copies(labelled: Sequence[tuple[str, Series]], notes: list[str]) -> list[Series]:
    """Return the series without copies. A copy has the same samples as a series in another file.

    Constant series do not count as copies.
    """
    unique: list[Series] = []
    first: dict[int, list[tuple[str, Series]]] = {}
    for path, item in labelled:
        alike = first.setdefault(hash(array("d", item.value).tobytes()), [])
        original = next((candidate for _, candidate in alike if _is_copy(item, candidate)), None)
        if original is None or len(item.value) < table.MIN_SAMPLES or min(item.value) == max(item.value):
            alike.append((path, item))
            unique.append(item)
        else:
            notes.append(f"{item.name} has the same samples as {original.name} and is counted once")
    return unique


def _is_copy(first: Series, second: Series) -> bool:
    return all(
        (first_values is None and second_values is None)
        or (first_values is not None and second_values is not None and _bytes(first_values) == _bytes(second_values))
        for first_values, second_values in (
            (first.value, second.value),
            (first.index, second.index),
            (first.busy, second.busy),
            (first.wait, second.wait),
            (first.transfer, second.transfer),
        )
    )


def _bytes(cells: Sequence[float]) -> bytes:
    return array("d", cells).tobytes()


def _file_names(folder: str) -> Iterator[str]:
    """Yield the files below the folder.

    Hidden files are skipped, and links to folders are not followed. Raises Unreadable.
    """
    try:
        os.listdir(folder)
    except OSError as error:
        raise Unreadable(f"{folder}: cannot be read: {error.strerror or error}") from None
    file_count = size = 0
    for directory, folders, files in os.walk(folder):
        below = os.path.relpath(directory, folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if below.count(os.sep) + (below != ".") >= MAX_DEPTH:
            folders.clear()
        for file in sorted(name for name in files if not name.startswith(".")):
            file_count += 1
            if file_count > MAX_FILES:
                raise Unreadable(f"{folder}: has more than {MAX_FILES:,} files")
            try:
                size += os.stat(os.path.join(directory, file)).st_size
            except OSError:
                size += 0  # a dangling link; opening it reports the error
            if size > MAX_BYTES:
                raise Unreadable(f"{folder}: its files have more than {MAX_BYTES >> 30} GiB together")
            yield os.path.normpath(os.path.join(below, file))
