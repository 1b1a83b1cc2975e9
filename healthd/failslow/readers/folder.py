"""Reader for files and folders with one file per rank. Returns series, and the files that could not be read."""

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
from healthd.failslow.stream import FailStop, Gathered, Stream, gathered

MOST_FILES = 200_000
MOST_BYTES = 64 << 30  # of all files of a folder
DEEPEST = 4  # levels of folders below the given one: some sites have one folder per host


class Found(NamedTuple):
    """Content of all files.

    series: by name. notes: sentences. unread: {file, why} of files in folders. fail_stops: ranks whose operations have
    stopped.
    """

    series: list[Series]
    notes: list[str]
    unread: list[dict[str, str]]
    fail_stops: tuple[FailStop, ...] = ()


def read(paths: Sequence[str], columns: Columns) -> Found:
    """Return all series of the paths. Raises Unreadable.

    A given file that cannot be read raises. A file in a folder is listed in `unread`, and raises only if no file there
    can be read.
    """
    found: list[tuple[str, table.Read]] = []
    ranks: list[Stream] = []  # of all files: other ranks' files show what a rank waited for
    told: list[str] = []
    unread: list[dict[str, str]] = []
    for path in paths:
        if path == "-" or not os.path.isdir(path):
            if path != "-" and not columns.value and streams.is_record(path):
                ranks += streams.read_streams(path, told)
            else:
                found.append((path, of_file(path, columns, path)))
            continue
        before = len(found) + len(ranks)
        failed: list[dict[str, str]] = []
        for name in _names(path):
            file = os.path.join(path, name)
            try:
                if not columns.value and streams.is_record(file):
                    ranks += streams.read_streams(file, told, name)
                else:
                    found.append((file, of_file(file, columns, name)))
            except HealthdError as error:
                failed.append({"file": name, "why": str(error).removeprefix(f"{name}: ")})
        if len(found) + len(ranks) == before:
            what = f"{failed[0]['file']}: {failed[0]['why']}" if failed else "no file"
            more = f" (and {len(failed) - 1:,} more)" if len(failed) > 1 else ""
            raise Unreadable(f"{path}: no file can be read: {what}{more}")
        unread += failed
    notes = _notes([(name, note) for name, told in found for note in told.notes], len(found))
    made = gathered(ranks) if ranks else Gathered((), (), ())
    series = [*_together(found, notes), *sorted(made.series, key=lambda one: table.natural(one.name))]
    return Found(series, [*notes, *told, *made.notes], unread, made.fail_stops)


def _notes(noted: Sequence[tuple[str, str]], files: int) -> list[str]:
    """Return the notes with their files. A note about several files appears once, with their number."""
    names: dict[str, list[str]] = {}
    for name, note in noted:
        names.setdefault(note, []).append(name)
    if files == 1:
        return list(names)
    return [f"{some[0] if len(some) == 1 else f'{len(some):,} files'}: {note}" for note, some in names.items()]


def of_file(path: str, columns: Columns, name: str) -> table.Read:
    """Return the series of one file. Raises HealthdError with a sentence that begins with the name."""
    if path == "-":
        return table.read(path, columns, "standard input", sys.stdin.buffer)
    return table.read(path, columns, name)


def _together(found: Sequence[tuple[str, table.Read]], notes: list[str]) -> list[Series]:
    """Return the series of all files, each with a unique name.

    If several files have a series of the same name and group, the file is added to the name. Copies are left out with a
    note, because they look like a gang.
    """
    named: dict[tuple[str, str], list[tuple[str, Series]]] = {}
    for path, told in found:
        for one in told.series:
            named.setdefault((one.group, one.name), []).append((path, one))
    every: list[tuple[str, Series]] = []
    taken = {(group, name) for (group, name), some in named.items() if len(some) == 1}
    for (group, name), some in named.items():
        if len({path for path, _ in some}) == 1 and len(found) == len({path for path, _ in found}):
            every += some
            continue
        paths = [path for path, _ in some]
        labels = _apart(list(dict.fromkeys(paths)))
        for path, one in some:
            label = whole = labels[path] if name == table.stem(path) else f"{labels[path]}/{name}"
            nth = 1
            while (group, whole) in taken:
                nth += 1
                whole = f"{label} ({nth})"
            taken.add((group, whole))
            every.append((path, replace(one, name=whole)))
    kept = _once(every, notes) if len(found) > 1 else [one for _, one in every]
    return sorted(kept, key=lambda one: (table.natural(one.group), table.natural(one.name), table.natural(one.node)))


def _apart(paths: Sequence[str]) -> dict[str, str]:
    """Return the shortest unique end of each path: "c/rank1". The file ending is included only if necessary."""
    split = [os.path.normpath(path).split(os.sep) for path in paths]
    for whole in (False, True):
        ends = split if whole else [[*folders, table.stem(file)] for *folders, file in split]
        for depth in range(1, max(map(len, ends)) + 1):
            labels = ["/".join(one[-depth:]) for one in ends]
            if len(set(labels)) == len(paths):
                return dict(zip(paths, labels, strict=True))
    return {path: path for path in paths}


def _once(every: Sequence[tuple[str, Series]], notes: list[str]) -> list[Series]:
    """Return the series without copies that have the same samples as one in another file. Constant series are not
    copies.
    """
    kept: list[Series] = []
    first: dict[int, list[tuple[str, Series]]] = {}
    for path, one in every:
        alike = first.setdefault(hash(array("d", one.value).tobytes()), [])
        known = next((other for _, other in alike if _same(one, other)), None)
        if known is None or len(one.value) < table.FEWEST or min(one.value) == max(one.value):
            alike.append((path, one))
            kept.append(one)
        else:
            notes.append(f"{one.name} has the same samples as {known.name}: counted once")
    return kept


def _same(one: Series, other: Series) -> bool:
    return all(
        (mine is None and its is None) or (mine is not None and its is not None and _bytes(mine) == _bytes(its))
        for mine, its in (
            (one.value, other.value),
            (one.index, other.index),
            (one.busy, other.busy),
            (one.wait, other.wait),
            (one.transfer, other.transfer),
        )
    )


def _bytes(cells: Sequence[float]) -> bytes:
    return array("d", cells).tobytes()


def _names(folder: str) -> Iterator[str]:
    """Yield the files below the folder.

    Hidden files are skipped and links to folders not followed. Raises Unreadable.
    """
    try:
        os.listdir(folder)
    except OSError as error:
        raise Unreadable(f"{folder}: cannot be read: {error.strerror or error}") from None
    files_there = size = 0
    for place, folders, files in os.walk(folder):
        below = os.path.relpath(place, folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if below.count(os.sep) + (below != ".") >= DEEPEST:
            folders.clear()
        for file in sorted(name for name in files if not name.startswith(".")):
            files_there += 1
            if files_there > MOST_FILES:
                raise Unreadable(f"{folder}: has more than {MOST_FILES:,} files")
            try:
                size += os.stat(os.path.join(place, file)).st_size
            except OSError:
                size += 0  # a dangling link: opening it reports the error
            if size > MOST_BYTES:
                raise Unreadable(f"{folder}: its files have more than {MOST_BYTES >> 30} GiB together")
            yield os.path.normpath(os.path.join(below, file))
