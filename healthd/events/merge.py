"""Merges several streams by time, with a bounded number of open files, for any number of nodes."""

from __future__ import annotations

import heapq
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from healthd.events.parse import Told, parse
from healthd.events.reader import HELD, Cursor, Tally, find, listed, read

_MOST_OPEN = 512  # each has a buffer of 64 KiB
RETRY_LOOKS = 60  # rounds after which a stream that could not be read is tried again, although it has not changed


def merged(
    streams: Iterable[str], cursor: Cursor, tally: Tally, wanted: Callable[[Told], bool] = lambda told: True
) -> Iterator[Told]:
    """Yield the new events of several streams that `is_wanted` selects, by time.

    If there are more streams than files may be open, they are merged in groups, each into a nameless file (in TMPDIR),
    and these files then. Raises OSError if one cannot be written.
    """
    at_once = max(HELD + 1, min(_MOST_OPEN, _left() // 2))

    def by_time(group: Iterable[str]) -> Iterator[Told]:
        return _by_time([filter(wanted, read(stream, cursor, tally)) for stream in group])

    groups = list(_groups(streams, at_once))
    if len(groups) <= 1:
        for group in groups:
            yield from by_time(group)
        return
    with ExitStack() as stack:
        runs: list[IO[bytes]] = []
        for group in groups:
            if len(runs) >= at_once // 2:
                runs = [_kept(_by_time(map(_read, runs)), stack)]
            runs.append(_kept(by_time(group), stack))
        yield from _by_time(map(_read, runs))


def _left() -> int:
    """Return how many more files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * _MOST_OPEN if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/proc/self/fd"))


def _groups(streams: Iterable[str], at_once: int) -> Iterator[list[str]]:
    """Yield groups of streams whose files may be open at the same time."""
    group: list[str] = []
    files = 0
    for stream in streams:
        mine = min(len(listed(stream)), HELD) + 1
        if group and files + mine > at_once:
            yield group
            group, files = [], 0
        group.append(stream)
        files += mine
    if group:
        yield group


def _by_time(streams: Iterable[Iterable[Told]]) -> Iterator[Told]:
    return heapq.merge(*streams, key=lambda told: told.at or 0.0)


def _kept(events: Iterable[Told], stack: ExitStack) -> IO[bytes]:
    """Write the events to a temporary file and rewind it; `stack` closes it."""
    from tempfile import TemporaryFile

    file: IO[bytes] = stack.enter_context(TemporaryFile(prefix="healthd-events-"))  # noqa: SIM115
    file.writelines(told.line + b"\n" for told in events)
    file.seek(0)
    return file


def _read(file: IO[bytes]) -> Iterator[Told]:
    """Yield the events of a temporary file. Closes the file at its end."""
    with file:
        for line in file:
            told = parse(line[:-1])
            if isinstance(told, Told):  # always true: only events were written
                yield told


def follow(
    places: Sequence[str],
    cursor: Cursor,
    tally: Tally,
    wait: Callable[[], bool],
    wanted: Callable[[Told], bool] = lambda told: True,
) -> Iterator[Told]:
    """Yield all new events at these places that `is_wanted` selects, and later ones until `wait` returns False.

    A stream that cannot be read is tried again when it has changed, and after RETRY_ROUNDS.
    """
    looked: dict[str, object] = {}
    looks = 0
    while True:
        looks += 1
        if looks % RETRY_LOOKS == 0:
            looked = {stream: state for stream, state in looked.items() if stream not in tally.troubled}
        now = {stream: _state(stream) for stream in find(places, tally)}
        tally.troubled.intersection_update(now)
        changed = [stream for stream in now if now[stream] != looked.get(stream)]
        tally.troubled.difference_update(changed)
        yield from merged(changed, cursor, tally, wanted)
        looked = now
        if not wait():
            return


def _state(stream: str) -> object:
    """Return a value that changes when a file of the stream is written or rotated."""
    with suppress(OSError):
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in map(os.lstat, listed(stream))]
    return object()
