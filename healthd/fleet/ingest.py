"""From what others wrote to the store: each source that was named, one after another, in steps.

A source is a file in sources/ with one value SOURCE, which all_sources.py names; the command line has its flag from
there. Its `ingest(run, files)` reads what is new and says

    with run.step("the piece's name", from_time, to_time) as step:   # a file, a day: what is committed together
        step.stage("tickets", rows)            # tuples in the order of the table's columns; or stage_text, stage_sql
        run.read(1)                            # a row was read;
        run.unread(path, line, "ends before it starts")  # ... or cannot be, with the number of its line
        step.cursor(name, text)                # how far it was read; run.cursor(name) has it the next time

What is inside is committed at the end of the block with all its tables, or not at all: a source that is killed begins
again behind its last block. `run.watch(items)` shows how far it is. Each file is read within `run.guard()`: one that is
unreadable as a whole raises IngestError there, which is said, and the next one is read. Outside it ends the source.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from typing import TYPE_CHECKING, TypeVar

from healthd.common.errors import HealthdError
from healthd.common.text import printable
from healthd.fleet.manifest import StoreError
from healthd.fleet.privacy import HASH, Private, site_key

if TYPE_CHECKING:
    from healthd.fleet.step import Step
    from healthd.fleet.store import Store

T = TypeVar("T")
LINE_EVERY_SECONDS = 10.0  # of progress, where there is no terminal
# Of the rows that cannot be read.
SHOWN = 20
MOST_SHARE = 0.01  # more unread rows of a source than that are a wrong file or a wrong setting
LONGEST = 200


class IngestError(HealthdError):
    """A source cannot be read, or not without something that was not said. One sentence that names file or flag."""


class WrongCommand(IngestError):
    """What was asked is wrong for all files, whichever showed it: none behind it is read."""


@dataclass(slots=True)
class Unread:
    """Rows that cannot be read: counted, and the first ones shown with file and line. A value is never guessed."""

    rows: Counter[str] = field(default_factory=Counter)  # source -> rows that it had, the unread ones too
    unread: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    def read(self, source: str, rows: int) -> None:
        """So many rows were read."""
        self.rows[source] += rows

    def add(self, source: str, file: str, line: int, why: str, rows: int = 1) -> None:
        """A row cannot be read. `line`: from 1; 0 where there are none (JSON, an answer of a server)."""
        self.rows[source] += rows
        self.unread[source] += rows
        if len(self.shown) < SHOWN:
            place = f"{file}:{line}" if line else file
            why = why if len(why) <= LONGEST else f"{why[:LONGEST]}..."
            self.shown.append(printable(f"{source}: {place}: {why}"))

    def told(self) -> Iterator[str]:
        """The first ones, and how many there are of each source."""
        yield from self.shown
        hidden = sum(self.unread.values()) - len(self.shown)
        if hidden > 0:
            yield f"... and {hidden:,} more"
        for source, count in sorted(self.unread.items()):
            rows = self.rows[source]
            yield f"{source}: {count:,} of {rows:,} rows could not be read ({_share(count, rows)})"

    def too_many(self) -> bool:
        """Whether more of any one source cannot be read than a few broken lines."""
        return any(count > MOST_SHARE * self.rows[source] for source, count in self.unread.items())


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.1 else "less than 0.1 %"


@dataclass(frozen=True, slots=True)
class Source:
    """name     in messages, in the table `ingests` and before its cursors: "sacct"
    flag     "--sacct"
    what     what stands behind the flag: "FILE"; "" = nothing
    many     whether there may be more than one
    runs     whether the flag alone is enough: then it asks Slurm itself, and `files` is empty
    help     a line of --help
    ingest   reads what is new
    """

    name: str
    flag: str
    what: str
    help: str
    ingest: Callable[[Run, list[str]], None]
    many: bool = True
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What a source is told, and what it says.

    cluster     of rows that do not name theirs; "" = not given
    zone        of times that do not name theirs; None = not said
    from_time   whole seconds; what ended before is not wanted; None: everything
    to_time     what began at it or later is not wanted; None: until `now`
    failed      a sentence for each file that could not be read to its end
    """

    source: Source
    store: Store
    private: Private
    rows: Unread
    now: int
    cluster: str = ""
    zone: tzinfo | None = None
    from_time: int | None = None
    to_time: int | None = None
    say: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))
    failed: list[str] = field(default_factory=list)

    def read(self, rows: int = 1) -> None:
        """So many rows were read."""
        self.rows.read(self.source.name, rows)

    def unread(self, file: str, line: int, why: str, rows: int = 1) -> None:
        """A row cannot be read. `line` is counted from 1; 0: there are no lines."""
        self.rows.add(self.source.name, file, line, why, rows)

    def sentence(self, error: HealthdError | OSError) -> str:
        """Of what could not be read, and why."""
        if isinstance(error, OSError):
            return f"{self.source.name}: {error.filename or self.source.flag}: {error.strerror or error}"
        return f"{self.source.name}: {error}"

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around each file: one that cannot be read does not keep those behind it from the store. Raises StoreError,
        WrongCommand."""
        try:
            yield
        except (StoreError, WrongCommand):
            raise
        except (HealthdError, OSError) as error:
            self.failed.append(self.sentence(error))

    def cursor(self, name: str) -> str | None:
        """What a step before said of how far this source was read."""
        return self.store.cursors.get(f"{self.source.name} {name}")

    @contextmanager
    def step(
        self, name: str, from_time: int | None = None, to_time: int | None = None, cluster: str | None = None
    ) -> Iterator[Step]:
        """What is staged in the block is committed at its end, with a row of `ingests`. `name`: of the piece; the same
        name again replaces that row. `from_time`, `to_time`: what time the piece speaks of. Raises StoreError."""
        with self.steps() as one, self.piece(one, name, from_time, to_time, cluster):
            yield one

    @contextmanager
    def steps(self) -> Iterator[Step]:
        """A step of several pieces: each is said with `piece`. Raises StoreError."""
        from healthd.fleet.step import step

        with step(self.store, f"{self.source.name} ") as one:
            yield one

    @contextmanager
    def piece(
        self,
        one: Step,
        name: str,
        from_time: int | None = None,
        to_time: int | None = None,
        cluster: str | None = None,
    ) -> Iterator[None]:
        """What is read in the block gets its row of `ingests`, if it is read to its end: see `step`."""
        source = self.source.name
        rows, unread = self.rows.rows[source], self.rows.unread[source]
        one.covered, one.clusters = None, set()
        yield
        unread = self.rows.unread[source] - unread
        read = self.rows.rows[source] - rows - unread
        from_time, to_time = one.covered or (from_time, to_time)
        if cluster is None:
            cluster = one.clusters.copy().pop() if len(one.clusters) == 1 else self.cluster
        one.stage("ingests", [(cluster, source, name, from_time, to_time, self.now, read, unread)])

    def watch(self, items: Iterable[T], total: int | None = None, unit: str = "files") -> Iterator[T]:
        """The items, and meanwhile how many of them are done: a bar on a terminal, else a line now and then."""
        if total is None and isinstance(items, Sequence):
            total = len(items)
        if sys.stderr.isatty():
            from tqdm import tqdm

            yield from tqdm(items, self.source.name, total, unit=f" {unit}", leave=False, dynamic_ncols=True)
        else:
            yield from self._lines(items, total, unit)

    def _lines(self, items: Iterable[T], total: int | None, unit: str) -> Iterator[T]:
        told = time.monotonic()
        for done, item in enumerate(items):
            if time.monotonic() - told >= LINE_EVERY_SECONDS:
                told = time.monotonic()
                self.say(f"{self.source.name}: {done:,}{f' of {total:,}' if total is not None else ''} {unit}")
            yield item


@dataclass(frozen=True, slots=True)
class Asked:
    """What holds for all sources of one ingest: see Run. `users`: keep, drop, hash; "" = as the store has it, a new one
    hashes. `key`: a file; None = the store's own."""

    now: int
    cluster: str = ""
    zone: tzinfo | None = None
    from_time: int | None = None
    to_time: int | None = None
    users: str = ""
    key: str | None = None


@dataclass(slots=True)
class Came:
    """What came of an ingest. `sources`: those that were read, or of which something was. `failed`: a sentence for each
    and each file that could not be read to its end."""

    sources: list[str] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)
    failed: list[str] = field(default_factory=list)


def ingest(folder: str, wanted: Sequence[tuple[Source, list[str]]], asked: Asked) -> Came:
    """Read what is new of each source into the store, which is made if there is none. A source or a file that cannot be
    read does not keep the others from it. Raises StoreError: what was committed before stays."""
    from healthd.fleet.store import writing

    came = Came()
    with writing(folder, make=True) as store:
        private = _private(store, asked)
        for source, files in wanted:
            run = Run(
                *(source, store, private, came.unread, asked.now),
                cluster=asked.cluster,
                zone=asked.zone,
                from_time=asked.from_time,
                to_time=asked.to_time,
                failed=came.failed,
            )
            failed = len(came.failed)
            try:
                source.ingest(run, files)
            except StoreError:
                raise
            except (HealthdError, OSError) as error:
                came.failed.append(run.sentence(error))
            if len(came.failed) == failed or came.unread.rows[source.name]:
                came.sources.append(source.name)
    return came


def _private(store: Store, asked: Asked) -> Private:
    """One store has users in one way and hashes of one key, else nobody could be followed through it. Raises
    StoreError."""
    has = store.manifest
    users = asked.users or has.users or HASH
    private = Private(users, site_key(store.folder, asked.key))
    if has.users and has.users != users:
        raise StoreError(f"{store.folder}: was made with --users {has.users}: --users {users} needs a new store")
    if has.key and has.key != private.fingerprint:
        raise StoreError(f"{store.folder}: was made with another key: --key FILE names it")
    if not has.users:
        store.commit(replace(has, users=users, key=private.fingerprint))
    return private
