"""The store: a folder of Parquet files and a manifest that names those that count.

    DB/manifest.json                            replaced at once: the commit
    DB/TABLE/month=2026-11/GENERATION.parquet   a table without months has month=all
    DB/lock                                     one writes at a time
    DB/key                                      the site's key, where none is given (privacy.py)
    DB/temporary/                               what a writer needs meanwhile

The store is for its owner alone, its folders 0700 and files 0600; where the site gave the folder a group that reads it
(chmod 2750), for that group too. The key and the lock stay the owner's.

A writer that ends anywhere leaves the manifest as it was; what it left else the next one removes. Readers hold a shared
lock on the folder itself, so that no file vanishes below them: what is no longer named goes when none reads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from healthd.common import ownership
from healthd.common.text import regex
from healthd.fleet import manifest as manifests
from healthd.fleet.manifest import Manifest, StoreError
from healthd.fleet.tables import TABLES

MEMORY = "600MB"  # for DuckDB; what does not fit goes to DB/temporary
TEMPORARY = "temporary"
ALL = "all"  # the month of a table without months
UNKNOWN = "unknown"  # the month of a row without a time


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The store as it was at one moment."""

    folder: str
    manifest: Manifest

    def files(self, table: str) -> list[str]:
        """The table's live files, by month: absolute paths."""
        return [os.path.join(self.folder, file.name) for _, file in sorted(self.manifest.files(table).items())]


@contextmanager
def reading(folder: str) -> Iterator[Snapshot]:
    """The store, to be asked: its files stay until the end of the block. Raises StoreError."""
    folder = _plain(folder)
    with _shared(folder):
        yield Snapshot(folder, manifests.read(folder))


def select(connection: duckdb.DuckDBPyConnection, table: str, files: list[str]) -> str:
    """SQL that gives the table's columns from these files: NULL for a column that no file has yet. Raises StoreError: a
    file is damaged."""
    columns = TABLES[table].columns
    if not files:
        return f"SELECT {', '.join(f'NULL::{kind} AS {quoted(name)}' for name, kind in columns.items())} WHERE false"
    source = f"read_parquet([{', '.join(map(literal, files))}], union_by_name = true, hive_partitioning = false)"
    try:
        has = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    except duckdb.Error as error:
        raise damaged(connection, files, error) from None
    values = (
        f"{quoted(name)}::{kind} AS {quoted(name)}" if name in has else f"NULL::{kind} AS {quoted(name)}"
        for name, kind in columns.items()
    )
    return f"SELECT {', '.join(values)} FROM {source}"


def damaged(connection: duckdb.DuckDBPyConnection, files: list[str], error: duckdb.Error) -> StoreError:
    """The file that cannot be read, or else what DuckDB says. Raises the error where it is of memory and no file is
    damaged: engine.connected knows how much there was."""
    with suppress(duckdb.Error):  # an aborted transaction would refuse to look
        connection.execute("ROLLBACK")
    for file in files:
        try:
            connection.execute(f"SELECT max(hash(its)) FROM read_parquet({literal(file)}) AS its").fetchall()
        except duckdb.OutOfMemoryException:
            continue
        except duckdb.Error as why:
            return StoreError(f"{file}: is damaged: {first_line(why)}; copy the folder back from a backup")
    if isinstance(error, duckdb.OutOfMemoryException):
        raise error
    return StoreError(first_line(error))


class NeedsMemory(StoreError):
    def __init__(self, mib: int) -> None:
        super().__init__(f"the answer needs more than {mib:,} MiB: --memory raises the limit")


def connect(folder: str = "") -> duckdb.DuckDBPyConnection:
    """DuckDB with bounded memory and without downloads. `folder`: where it may write what does not fit."""
    options: dict[str, Any] = {
        "memory_limit": MEMORY,
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "preserve_insertion_order": "false",
        "temp_directory": folder,
    }
    connection = duckdb.connect(":memory:", config=options)
    connection.execute("SET enable_progress_bar = false")  # at a terminal it would stand among what is told
    return connection


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Store:
    """The store in the hands of its one writer."""

    def __init__(self, folder: str, manifest: Manifest, connection: duckdb.DuckDBPyConnection) -> None:
        self.folder = folder
        self.manifest = manifest
        self.connection = connection

    @property
    def cursors(self) -> Mapping[str, str]:
        """How far each source was read."""
        return self.manifest.cursors

    @property
    def temporary(self) -> str:
        """A folder for what is not needed after the ingest."""
        return os.path.join(self.folder, TEMPORARY)

    def files(self, table: str) -> list[str]:
        """The table's live files, by month."""
        return Snapshot(self.folder, self.manifest).files(table)

    def path(self, table: str, month: str) -> str:
        """Where the next generation of a month is written. Raises OSError."""
        folder = os.path.join(self.folder, table, f"month={month}")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{self.manifest.generation + 1}.parquet")

    def commit(self, manifest: Manifest) -> None:
        """From now on this is the store: its new files are there and whole. Raises StoreError."""
        manifest = replace(manifest, generation=self.manifest.generation + 1)
        try:
            for path in _names(manifest) - _names(self.manifest):
                manifests.sync(os.path.join(self.folder, path))
                manifests.sync(os.path.dirname(os.path.join(self.folder, path)))
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written: {error.strerror}") from None
        manifests.write(self.folder, manifest)
        self.manifest = manifest
        self.clear()

    def clear(self) -> None:
        """Remove what no manifest names, unless somebody reads."""
        with _alone(self.folder) as alone:
            if alone:
                for path in leftovers(self.folder, self.manifest):
                    with suppress(OSError):  # it costs room, and the next writer tries again
                        os.unlink(path)
                        os.rmdir(os.path.dirname(path))


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt also while DuckDB works, which takes the signal for itself."""
    try:
        yield
    except (duckdb.InterruptException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from None


@contextmanager
def explained(store: Store) -> Iterator[None]:
    """DuckDB's errors and the system's as one sentence."""
    try:
        with interruptible():
            yield
    except OSError as error:
        raise StoreError(f"{error.filename or store.folder}: cannot be written: {error.strerror}") from None
    except duckdb.Error as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise StoreError(f"{store.folder}: {os.strerror(errno.ENOSPC)}: what was committed before stays") from None
        files = [file for table in TABLES for file in store.files(table)]
        raise damaged(store.connection, files, error) from None


@contextmanager
def writing(folder: str, make: bool = False) -> Iterator[Store]:
    """The store, to be changed. `make`: it is made if there is none. Raises StoreError."""
    folder = _plain(folder)
    with _masked(folder):
        if make:
            _make(folder)
        manifests.read(folder)
        with _locked(folder):
            store = Store(folder, manifests.read(folder), connect(os.path.join(folder, TEMPORARY)))
            try:
                _empty(store.temporary)
                store.clear()
                yield store
            finally:
                store.connection.close()
                with suppress(OSError):
                    shutil.rmtree(store.temporary)


def _plain(folder: str) -> str:
    """Its path from the root. In one with these signs DuckDB and Spark see a pattern, and read what fits it: the files
    of another store. Raises StoreError."""
    path = os.path.abspath(folder)
    if not path.isprintable() or any(sign in path for sign in "*?[]{}\\"):
        raise StoreError(f"{path}: a store's path has no control characters and none of * ? [ ] {{ }} \\: name another")
    return path


@contextmanager
def _masked(folder: str) -> Iterator[None]:
    """What is made in the block, also by DuckDB, nobody else may read, or the folder's group where it is said to."""
    shared = stat.S_ISGID | stat.S_IRGRP
    try:
        mode = os.stat(folder).st_mode
    except OSError:  # it is made, or whoever opens it says so
        mode = 0
    before = os.umask(0o027 if mode & shared == shared else 0o077)
    try:
        yield
    finally:
        os.umask(before)


def leftovers(folder: str, manifest: Manifest) -> Iterator[str]:
    """Files in the store's folder that have the names of its files and that the manifest does not name. A number above
    the next generation's is nobody's of ours."""
    live = _names(manifest)
    for table in TABLES:
        with suppress(FileNotFoundError):
            for month in os.listdir(os.path.join(folder, table)):
                where = os.path.join(folder, table, month)
                if not regex(r"month=([0-9]{4}-[0-9]{2}|all|unknown)").fullmatch(month) or not os.path.isdir(where):
                    continue
                for name in os.listdir(where):
                    found = regex(r"([0-9]{1,12})\.parquet").fullmatch(name)
                    ours = found is not None and int(found[1]) <= manifest.generation + 1
                    if ours and f"{table}/{month}/{name}" not in live:
                        yield os.path.join(where, name)


def _names(manifest: Manifest) -> set[str]:
    return {file.name for months in manifest.tables.values() for file in months.values()}


def _make(folder: str) -> None:
    """An empty store, unless there is one. A folder that has other things in it is somebody else's."""
    try:
        os.makedirs(folder, exist_ok=True)
        there = os.listdir(folder)
        if manifests.NAME not in there:
            if set(there) - {"lock", "key", f"{manifests.NAME}.new"}:
                raise StoreError(f"{folder}: has other files in it and is no store: name a new or an empty folder")
            with _locked(folder):
                if not os.path.exists(os.path.join(folder, manifests.NAME)):
                    manifests.write(folder, Manifest())
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be made: {error.strerror}") from None


def _empty(folder: str) -> None:
    try:
        if os.path.lexists(folder):
            shutil.rmtree(folder)
        os.mkdir(folder, 0o700)
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None


# --- locks


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """One writer at a time. As root, nobody else may be able to put a link there: docs/adr/0019. Raises StoreError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if os.geteuid() == 0:
            with ownership.folder(folder):
                pass
        descriptor = os.open(os.path.join(folder, "lock"), flags, 0o600)
    except ownership.Untrusted as error:
        raise StoreError(str(error.at(folder, "the store"))) from None
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreError(f"{folder}: another ingest is writing there (process {who}): wait for it") from None
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot be locked: {error.strerror}: name a folder of a file system that has locks (Lustre: "
                "one that is mounted with -o flock)"
            ) from None
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # on a full disk the number is missing
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def _shared(folder: str) -> Iterator[None]:
    """Files that are live now stay. Where a folder cannot be locked (NFS), they stay until the next writer begins."""
    descriptor = -1
    try:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def _alone(folder: str) -> Iterator[bool]:
    """Whether nobody reads now, and nobody begins before the end of the block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
