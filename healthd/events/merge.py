"""Merge streams from any number of nodes by time, with a bounded number of open files."""

from __future__ import annotations

import heapq
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from healthd.events.parse import StreamEvent, parse
from healthd.events.reader import MAX_OPEN_FILES, Cursor, Tally, find, listed, read

_MAX_OPEN = 512  # each file has a buffer of 64 KiB
RETRY_ROUNDS = 60  # rounds after which an unreadable stream is tried again even if it has not changed


def merged(
    streams: Iterable[str], cursor: Cursor, tally: Tally, is_wanted: Callable[[StreamEvent], bool] = lambda event: True
) -> Iterator[StreamEvent]:
    """Yield the new events that `is_wanted` selects from several streams, sorted by time.

    If the streams have more files than may be open, first merge groups of streams into unnamed temporary files (in
    TMPDIR), and then merge these files. Raises OSError if a file cannot be written.
    """
    at_once = max(MAX_OPEN_FILES + 1, min(_MAX_OPEN, _available_files() // 2))

    def by_time(group: Iterable[str]) -> Iterator[StreamEvent]:
        return _by_time([filter(is_wanted, read(stream, cursor, tally)) for stream in group])

    groups = list(_groups(streams, at_once))
    if len(groups) <= 1:
        for group in groups:
            yield from by_time(group)
        return
    with ExitStack() as stack:
        runs: list[IO[bytes]] = []
        for group in groups:
            if len(runs) >= at_once // 2:
                runs = [_write_run(_by_time(map(_read, runs)), stack)]
            runs.append(_write_run(by_time(group), stack))
        yield from _by_time(map(_read, runs))


def _available_files() -> int:
    """Return the number of additional files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * _MAX_OPEN if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/proc/self/fd"))


def _groups(streams: Iterable[str], at_once: int) -> Iterator[list[str]]:
    """Yield groups of streams whose files may be open at the same time."""
    group: list[str] = []
    files = 0
    for stream in streams:
        file_count = min(len(listed(stream)), MAX_OPEN_FILES) + 1
        if group and files + file_count > at_once:
            yield group
            group, files = [], 0
        group.append(stream)
        files += file_count
    if group:
        yield group


def _by_time(streams: Iterable[Iterable[StreamEvent]]) -> Iterator[StreamEvent]:
    return heapq.merge(*streams, key=lambda event: event.at or 0.0)


def _write_run(events: Iterable[StreamEvent], stack: ExitStack) -> IO[bytes]:
    """Write the events to a temporary file and rewind it; `stack` closes it."""
    from tempfile import TemporaryFile

    file: IO[bytes] = stack.enter_context(TemporaryFile(prefix="healthd-events-"))  # noqa: SIM115
    file.writelines(event.line + b"\n" for event in events)
    file.seek(0)
    return file


def _read(file: IO[bytes]) -> Iterator[StreamEvent]:
    """Yield the events in a temporary file, then close it."""
    with file:
        for line in file:
            event = parse(line[:-1])
            if isinstance(event, StreamEvent):  # always true, because only events were written
                yield event


def follow(
    places: Sequence[str],
    cursor: Cursor,
    tally: Tally,
    wait: Callable[[], bool],
    is_wanted: Callable[[StreamEvent], bool] = lambda event: True,
) -> Iterator[StreamEvent]:
    """Yield the new events at these paths that `is_wanted` selects, then later ones until `wait` returns False.

    An unreadable stream is tried again when it has changed, or after RETRY_ROUNDS.
    """
    previous: dict[str, object] = {}
    rounds = 0
    while True:
        rounds += 1
        if rounds % RETRY_ROUNDS == 0:
            previous = {stream: state for stream, state in previous.items() if stream not in tally.failed}
        current = {stream: _state(stream) for stream in find(places, tally)}
        tally.failed.intersection_update(current)
        changed = [stream for stream in current if current[stream] != previous.get(stream)]
        tally.failed.difference_update(changed)
        yield from merged(changed, cursor, tally, is_wanted)
        previous = current
        if not wait():
            return


def _state(stream: str) -> object:
    """Return a value that changes when one of the stream's files is written or rotated."""
    with suppress(OSError):
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in map(os.lstat, listed(stream))]
    return object()
