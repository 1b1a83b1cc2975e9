"""The store: a folder of Parquet files, and a manifest that lists the valid ones.

    DB/manifest.json                            replaced atomically; this is the commit
    DB/TABLE/month=2026-11/GENERATION.parquet   a table without months has month=all
    DB/lock                                     allows only one writer at a time
    DB/key                                      the site's key, unless another is given (privacy.py)
    DB/temporary/                               a writer's temporary files

The store is readable only by its owner (folders 0700, files 0600). If the site gave the folder a group with read
permission (chmod 2750), that group can also read it. The key and the lock remain the owner's.

If a writer is killed, the manifest is unchanged, and the next writer removes the files that the killed writer left.
Readers hold a shared lock on the folder itself, so that no file disappears while they read. Files that the manifest
does not list are removed only when there is no reader.
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

MEMORY_LIMIT = "600MB"  # for DuckDB; it writes the rest to DB/temporary
TEMPORARY = "temporary"
ALL_MONTHS = "all"  # month of a table without months
UNKNOWN_MONTH = "unknown"  # month of a row without a time


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The store at one point in time."""

    folder: str
    manifest: Manifest

    def files(self, table: str) -> list[str]:
        """Return the absolute paths of the table's files, by month."""
        return [os.path.join(self.folder, file.name) for _, file in sorted(self.manifest.files(table).items())]


@contextmanager
def open_for_reading(folder: str) -> Iterator[Snapshot]:
    """Open the store for reading. Its files remain until the end of the block. Raises StoreError."""
    folder = _absolute_path(folder)
    with _shared_lock(folder):
        yield Snapshot(folder, manifests.read_manifest(folder))


def select_sql(connection: duckdb.DuckDBPyConnection, table: str, files: list[str]) -> str:
    """Return SQL for the table's columns in these files, with NULL for columns that no file has.

    Raises StoreError if a file is damaged.
    """
    columns = TABLES[table].columns
    if not files:
        return f"SELECT {', '.join(f'NULL::{kind} AS {quoted(name)}' for name, kind in columns.items())} WHERE false"
    source = f"read_parquet([{', '.join(map(literal, files))}], union_by_name = true, hive_partitioning = false)"
    try:
        stored_columns = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    except duckdb.Error as error:
        raise damaged_file_error(connection, files, error) from None
    values = (
        f"{quoted(name)}::{kind} AS {quoted(name)}" if name in stored_columns else f"NULL::{kind} AS {quoted(name)}"
        for name, kind in columns.items()
    )
    return f"SELECT {', '.join(values)} FROM {source}"


def damaged_file_error(connection: duckdb.DuckDBPyConnection, files: list[str], error: duckdb.Error) -> StoreError:
    """Return an error that names the damaged file or contains DuckDB's message.

    If no file is damaged and the error is about memory, raise it again: engine.open_database reports it with the limit.
    """
    with suppress(duckdb.Error):  # end the transaction: if it was aborted, it would reject the queries below
        connection.execute("ROLLBACK")
    for file in files:
        try:
            connection.execute(f"SELECT max(hash(its)) FROM read_parquet({literal(file)}) AS its").fetchall()
        except duckdb.OutOfMemoryException:
            continue
        except duckdb.Error as file_error:
            return StoreError(f"{file}: is damaged: {first_line(file_error)}; restore the folder from a backup")
    if isinstance(error, duckdb.OutOfMemoryException):
        raise error
    return StoreError(first_line(error))


class MemoryLimitExceeded(StoreError):
    def __init__(self, mib: int) -> None:
        super().__init__(f"the answer needs more than {mib:,} MiB; raise the limit with --memory")


def connect(folder: str = "") -> duckdb.DuckDBPyConnection:
    """Connect to DuckDB with bounded memory and without downloads.

    Args:
        folder: for temporary files.
    """
    options: dict[str, Any] = {
        "memory_limit": MEMORY_LIMIT,
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "preserve_insertion_order": "false",
        "temp_directory": folder,
    }
    connection = duckdb.connect(":memory:", config=options)
    connection.execute("SET enable_progress_bar = false")  # a progress bar would spoil the output on a terminal
    return connection


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Store:
    """The store, as opened by its only writer."""

    def __init__(self, folder: str, manifest: Manifest, connection: duckdb.DuckDBPyConnection) -> None:
        self.folder = folder
        self.manifest = manifest
        self.connection = connection

    @property
    def cursors(self) -> Mapping[str, str]:
        """The position up to which each source was read."""
        return self.manifest.cursors

    @property
    def temporary(self) -> str:
        """Folder for files that are not needed after the ingest."""
        return os.path.join(self.folder, TEMPORARY)

    def files(self, table: str) -> list[str]:
        """Return the table's files, by month."""
        return Snapshot(self.folder, self.manifest).files(table)

    def path(self, table: str, month: str) -> str:
        """Return the path for the next generation of a month. Raises OSError."""
        folder = os.path.join(self.folder, table, f"month={month}")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{self.manifest.generation + 1}.parquet")

    def commit(self, manifest: Manifest) -> None:
        """Replace the store's manifest after syncing the new files. Raises StoreError."""
        manifest = replace(manifest, generation=self.manifest.generation + 1)
        try:
            for path in _file_names(manifest) - _file_names(self.manifest):
                manifests.sync_path(os.path.join(self.folder, path))
                manifests.sync_path(os.path.dirname(os.path.join(self.folder, path)))
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written: {error.strerror}") from None
        manifests.write_manifest(self.folder, manifest)
        self.manifest = manifest
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove files that the manifest does not list, unless the store has a reader."""
        with _exclusive(self.folder) as alone:
            if alone:
                for path in leftovers(self.folder, self.manifest):
                    with suppress(OSError):  # the file only uses space; the next writer tries again
                        os.unlink(path)
                        os.rmdir(os.path.dirname(path))


@contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C while DuckDB runs. Otherwise, DuckDB would handle the signal."""
    try:
        yield
    except (duckdb.InterruptException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from None


@contextmanager
def store_errors(store: Store) -> Iterator[None]:
    """Convert DuckDB's errors and system errors to StoreError. The message is one sentence."""
    try:
        with keyboard_interrupts():
            yield
    except OSError as error:
        raise StoreError(f"{error.filename or store.folder}: cannot be written: {error.strerror}") from None
    except duckdb.Error as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise StoreError(f"{store.folder}: {os.strerror(errno.ENOSPC)}: earlier commits are kept") from None
        files = [file for table in TABLES for file in store.files(table)]
        raise damaged_file_error(store.connection, files, error) from None


@contextmanager
def open_for_writing(folder: str, make: bool = False) -> Iterator[Store]:
    """Open the store for writing. Raises StoreError.

    Args:
        make: create the store if it does not exist.
    """
    folder = _absolute_path(folder)
    with _restricted_umask(folder):
        if make:
            _create_store(folder)
        manifests.read_manifest(folder)
        with _write_lock(folder):
            store = Store(folder, manifests.read_manifest(folder), connect(os.path.join(folder, TEMPORARY)))
            try:
                _recreate_folder(store.temporary)
                store.remove_leftovers()
                yield store
            finally:
                store.connection.close()
                with suppress(OSError):
                    shutil.rmtree(store.temporary)


def _absolute_path(folder: str) -> str:
    """Return the absolute path. Raises StoreError for characters that DuckDB and Spark expand as patterns.

    With such a path, matching files from other stores would also be read.
    """
    path = os.path.abspath(folder)
    if not path.isprintable() or any(sign in path for sign in "*?[]{}\\"):
        raise StoreError(f"{path}: control characters and * ? [ ] {{ }} \\ are not allowed in a store's path")
    return path


@contextmanager
def _restricted_umask(folder: str) -> Iterator[None]:
    """Make files that are created in the block readable only by the owner and by the folder's group, if it may read."""
    shared = stat.S_ISGID | stat.S_IRGRP
    try:
        mode = os.stat(folder).st_mode
    except OSError:  # the folder will be created, or opening it reports the error
        mode = 0
    before = os.umask(0o027 if mode & shared == shared else 0o077)
    try:
        yield
    finally:
        os.umask(before)


def leftovers(folder: str, manifest: Manifest) -> Iterator[str]:
    """Yield files in the store's folder that are named like data files but are not in the manifest.

    A file with a number above the next generation was not written by healthd and is left out.
    """
    live = _file_names(manifest)
    for table in TABLES:
        with suppress(FileNotFoundError):
            for month in os.listdir(os.path.join(folder, table)):
                month_folder = os.path.join(folder, table, month)
                if not regex(r"month=([0-9]{4}-[0-9]{2}|all|unknown)").fullmatch(month) or not os.path.isdir(
                    month_folder
                ):
                    continue
                for name in os.listdir(month_folder):
                    found = regex(r"([0-9]{1,12})\.parquet").fullmatch(name)
                    is_leftover = found is not None and int(found[1]) <= manifest.generation + 1
                    if is_leftover and f"{table}/{month}/{name}" not in live:
                        yield os.path.join(month_folder, name)


def _file_names(manifest: Manifest) -> set[str]:
    return {file.name for months in manifest.tables.values() for file in months.values()}


def _create_store(folder: str) -> None:
    """Create an empty store if there is none. A folder with other files in it is rejected."""
    try:
        os.makedirs(folder, exist_ok=True)
        entries = os.listdir(folder)
        if manifests.NAME not in entries:
            if set(entries) - {"lock", "key", f"{manifests.NAME}.new"}:
                raise StoreError(f"{folder}: contains other files and is not a store; choose a new or empty folder")
            with _write_lock(folder):
                if not os.path.exists(os.path.join(folder, manifests.NAME)):
                    manifests.write_manifest(folder, Manifest())
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be created: {error.strerror}") from None


def _recreate_folder(folder: str) -> None:
    try:
        if os.path.lexists(folder):
            shutil.rmtree(folder)
        os.mkdir(folder, 0o700)
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None


# --- locks


@contextmanager
def _write_lock(folder: str) -> Iterator[None]:
    """Lock the store for one writer. Raises StoreError.

    If this runs as root, it fails if another user could put a link in place of the lock (docs/adr/0019).
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if os.geteuid() == 0:
            with ownership.open_folder(folder):
                pass
        descriptor = os.open(os.path.join(folder, "lock"), flags, 0o600)
    except ownership.Untrusted as error:
        raise StoreError(str(error.with_context(folder, "the store"))) from None
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process_id = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreError(
                f"{folder}: another ingest (process {process_id}) is running; wait for it to finish"
            ) from None
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot be locked: {error.strerror}; choose a folder on a file system that supports locks "
                "(Lustre: mounted with -o flock)"
            ) from None
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # on a full disk, the process id cannot be written
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def _shared_lock(folder: str) -> Iterator[None]:
    """Keep the store's files until the end of the block.

    On NFS without locks, they are kept only until the next writer begins.
    """
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
def _exclusive(folder: str) -> Iterator[bool]:
    """Yield True if there is no reader. New readers must wait until the end of the block."""
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
