"""Reads sources into the store, one source after another, in steps.

A source is a file in sources/ whose SOURCE is listed in all_sources.py. SOURCE also defines the source's command-line
option. Its `ingest(run, files)` reads new data:

    with run.step("the piece's name", from_time, to_time) as step:   # a file or a day: the unit of a commit
        step.stage("tickets", rows)            # tuples in the order of the table's columns; or stage_text, stage_sql
        run.read(1)                            # count a row that was read
        run.unread(path, line, "ends before it starts")  # count an unreadable row, with its line number
        step.cursor(name, text)                # how far the source was read; run.cursor(name) returns it the next time

At the end of a block, either all its tables are committed or none. A source that is killed resumes after its last
block. `run.track(items)` shows the progress. Each file is read within `run.guard()`. If a file cannot be read, the
guard reports the IngestError, and the next file is read. An error outside `run.guard()` ends the source.
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
from healthd.fleet.privacy import HASH_USERS, Privacy, site_key

if TYPE_CHECKING:
    from healthd.fleet.step import Step
    from healthd.fleet.store import Store

T = TypeVar("T")
PROGRESS_SECONDS = 10.0  # seconds between progress lines without a terminal
# Rows that cannot be read.
MAX_EXAMPLES = 20
MAX_UNREAD_SHARE = 0.01  # if a larger share of the rows is unread, the file or a setting is wrong
MAX_REASON_LENGTH = 200


class IngestError(HealthdError):
    """A source cannot be read or lacks a required option. The message names the file or option."""


class UsageError(IngestError):
    """A usage error that affects all files. No further file is read."""


@dataclass(slots=True)
class Unread:
    """Counts rows that cannot be read, and keeps the first ones with file and line. Values are never guessed."""

    rows: Counter[str] = field(default_factory=Counter)  # number of rows in each source, including unread rows
    unread: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def read(self, source: str, rows: int) -> None:
        self.rows[source] += rows

    def add(self, source: str, file: str, line: int, why: str, rows: int = 1) -> None:
        """Count a row that cannot be read.

        Args:
            line: counted from 1; 0 if there are no lines (JSON, a server's response).
        """
        self.rows[source] += rows
        self.unread[source] += rows
        if len(self.examples) < MAX_EXAMPLES:
            location = f"{file}:{line}" if line else file
            why = why if len(why) <= MAX_REASON_LENGTH else f"{why[:MAX_REASON_LENGTH]}..."
            self.examples.append(printable(f"{source}: {location}: {why}"))

    def messages(self) -> Iterator[str]:
        """Yield messages about the first unread rows, and the number of unread rows for each source."""
        yield from self.examples
        hidden = sum(self.unread.values()) - len(self.examples)
        if hidden > 0:
            yield f"... and {hidden:,} more"
        for source, count in sorted(self.unread.items()):
            rows = self.rows[source]
            yield f"{source}: {count:,} of {rows:,} rows could not be read ({_share(count, rows)})"

    def is_over_limit(self) -> bool:
        """Return True if more than a few lines of any source were unreadable."""
        return any(count > MAX_UNREAD_SHARE * self.rows[source] for source, count in self.unread.items())


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.1 else "less than 0.1 %"


@dataclass(frozen=True, slots=True)
class Source:
    """A source for the store.

    Attributes:
        name: used in messages, in the table `ingests` and in its cursors: "sacct".
        flag: "--sacct".
        metavar: the option's argument, such as "FILE"; "" if it has none.
        allows_several: True if the option takes several arguments.
        runs_without_files: True if the option works without files: it then queries Slurm, and `files` is empty.
        help: a line of --help.
        ingest: reads new data.
    """

    name: str
    flag: str
    metavar: str
    help: str
    ingest: Callable[[Run, list[str]], None]
    allows_several: bool = True
    runs_without_files: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A source's context during an ingest.

    Attributes:
        cluster: cluster for rows that do not name one; "" if not given.
        zone: time zone for times without one; None if not given.
        from_time: whole seconds; rows that ended earlier are skipped; None for no limit.
        to_time: rows that began at this time or later are skipped; None for `now`.
        failed: a sentence for each file that could not be read completely.
    """

    source: Source
    store: Store
    privacy: Privacy
    rows: Unread
    now: int
    cluster: str = ""
    zone: tzinfo | None = None
    from_time: int | None = None
    to_time: int | None = None
    log: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))
    failed: list[str] = field(default_factory=list)

    def read(self, rows: int = 1) -> None:
        self.rows.read(self.source.name, rows)

    def unread(self, file: str, line: int, why: str, rows: int = 1) -> None:
        """Count a row that cannot be read.

        Args:
            line: counted from 1; 0 if there are no lines.
        """
        self.rows.add(self.source.name, file, line, why, rows)

    def sentence(self, error: HealthdError | OSError) -> str:
        """Return a sentence that describes the error and names the source."""
        if isinstance(error, OSError):
            return f"{self.source.name}: {error.filename or self.source.flag}: {error.strerror or error}"
        return f"{self.source.name}: {error}"

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Record the errors of one file, so that the next file can be read. Raises StoreError, UsageError."""
        try:
            yield
        except (StoreError, UsageError):
            raise
        except (HealthdError, OSError) as error:
            self.failed.append(self.sentence(error))

    def cursor(self, name: str) -> str | None:
        """Return the position up to which an earlier step read this source."""
        return self.store.cursors.get(f"{self.source.name} {name}")

    @contextmanager
    def step(
        self, name: str, from_time: int | None = None, to_time: int | None = None, cluster: str | None = None
    ) -> Iterator[Step]:
        """Stage rows in the block, and commit them at its end together with a row in `ingests`. Raises StoreError.

        Args:
            name: name of the piece (a file, a day); it replaces an existing row with this name in `ingests`.
            from_time, to_time: the period that the piece covers.
        """
        with self.steps() as new_step, self.piece(new_step, name, from_time, to_time, cluster):
            yield new_step

    @contextmanager
    def steps(self) -> Iterator[Step]:
        """Return a step that consists of several pieces, each added with `piece`. Raises StoreError."""
        from healthd.fleet.step import step

        with step(self.store, f"{self.source.name} ") as new_step:
            yield new_step

    @contextmanager
    def piece(
        self,
        step: Step,
        name: str,
        from_time: int | None = None,
        to_time: int | None = None,
        cluster: str | None = None,
    ) -> Iterator[None]:
        """At the end of the block, add a row to `ingests` for the rows that the block read (see `step`)."""
        source = self.source.name
        rows, unread = self.rows.rows[source], self.rows.unread[source]
        step.covered, step.clusters = None, set()
        yield
        unread = self.rows.unread[source] - unread
        read = self.rows.rows[source] - rows - unread
        from_time, to_time = step.covered or (from_time, to_time)
        if cluster is None:
            cluster = step.clusters.copy().pop() if len(step.clusters) == 1 else self.cluster
        step.stage("ingests", [(cluster, source, name, from_time, to_time, self.now, read, unread)])

    def track(self, items: Iterable[T], total: int | None = None, unit: str = "files") -> Iterator[T]:
        """Yield the items and show the progress, as a bar on a terminal and otherwise as occasional log lines."""
        if total is None and isinstance(items, Sequence):
            total = len(items)
        if sys.stderr.isatty():
            from tqdm import tqdm

            yield from tqdm(items, self.source.name, total, unit=f" {unit}", leave=False, dynamic_ncols=True)
        else:
            yield from self._log_progress(items, total, unit)

    def _log_progress(self, items: Iterable[T], total: int | None, unit: str) -> Iterator[T]:
        last_logged = time.monotonic()
        for done, item in enumerate(items):
            if time.monotonic() - last_logged >= PROGRESS_SECONDS:
                last_logged = time.monotonic()
                self.log(f"{self.source.name}: {done:,}{f' of {total:,}' if total is not None else ''} {unit}")
            yield item


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Options for all sources in one ingest (see Run).

    Attributes:
        users: keep, drop or hash; "" keeps the store's setting (a new store hashes).
        key: a file, or None for the store's own key.
    """

    now: int
    cluster: str = ""
    zone: tzinfo | None = None
    from_time: int | None = None
    to_time: int | None = None
    users: str = ""
    key: str | None = None


@dataclass(slots=True)
class IngestResult:
    """The result of an ingest.

    Attributes:
        sources: sources that were read at least partly.
        failed: a sentence for each source and file that could not be read completely.
    """

    sources: list[str] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)
    failed: list[str] = field(default_factory=list)


def ingest(folder: str, requested: Sequence[tuple[Source, list[str]]], options: IngestOptions) -> IngestResult:
    """Read each source's new data into the store. If there is no store, create it.

    A source or file that cannot be read does not affect the others. Raises StoreError, but keeps earlier commits.
    """
    from healthd.fleet.store import open_for_writing

    result = IngestResult()
    with open_for_writing(folder, make=True) as store:
        privacy = _privacy(store, options)
        for source, files in requested:
            run = Run(
                *(source, store, privacy, result.unread, options.now),
                cluster=options.cluster,
                zone=options.zone,
                from_time=options.from_time,
                to_time=options.to_time,
                failed=result.failed,
            )
            failed = len(result.failed)
            try:
                source.ingest(run, files)
            except StoreError:
                raise
            except (HealthdError, OSError) as error:
                result.failed.append(run.sentence(error))
            if len(result.failed) == failed or result.unread.rows[source.name]:
                result.sources.append(source.name)
    return result


def _privacy(store: Store, options: IngestOptions) -> Privacy:
    """Return the privacy settings. Raises StoreError.

    A store always uses the same setting and key, so that users remain comparable.
    """
    manifest = store.manifest
    users = options.users or manifest.users or HASH_USERS
    privacy = Privacy(users, site_key(store.folder, options.key))
    if manifest.users and manifest.users != users:
        raise StoreError(
            f"{store.folder}: was created with --users {manifest.users}; --users {users} needs a new store"
        )
    if manifest.key and manifest.key != privacy.fingerprint:
        raise StoreError(f"{store.folder}: was created with another key; name it with --key FILE")
    if not manifest.users:
        store.commit(replace(manifest, users=users, key=privacy.fingerprint))
    return privacy
