"""The store's manifest: the list of valid files in the store's folder. A change is committed by replacing the manifest.

It also records how far each source was read (the cursors), how users are stored, and the date before which data is
removed.
"""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from healthd.common import codec
from healthd.common.errors import HealthdError
from healthd.common.text import regex

SCHEMA = 1
NAME = "manifest.json"


class StoreError(HealthdError):
    """The store cannot be used or written. The message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class File:
    """A data file in the store. `name` is the path below the store's folder."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of the manifest.

    Attributes:
        generation: number of changes to the store.
        tables: maps each table to its file for each month.
        cursors: position up to which each source and name was read, in the source's own format.
        users: keep, drop or hash; "" until something is stored.
        key: fingerprint of the site's key.
        pruned_before: whole seconds, UTC; older data is removed.
    """

    schema: int = SCHEMA
    generation: int = 0
    users: str = ""
    key: str = ""
    pruned_before: int = 0
    tables: dict[str, dict[str, File]] = field(default_factory=dict)
    cursors: dict[str, str] = field(default_factory=dict)

    def files(self, table: str) -> dict[str, File]:
        return self.tables.get(table, {})

    def with_files(self, table: str, months: dict[str, File | None]) -> Manifest:
        """Return the manifest with new files for these months.

        None as a file means that the month no longer has rows.
        """
        files = {month: file for month, file in {**self.files(table), **months}.items() if file is not None}
        return replace(self, tables={**self.tables, table: dict(sorted(files.items()))})


def read_manifest(folder: str) -> Manifest:
    """Read the manifest.

    Raises StoreError if it is missing, damaged or from a newer healthd, or if one of its files has changed.
    """
    path = os.path.join(folder, NAME)
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError:
        state = "has no manifest" if os.path.isdir(folder) else "does not exist"
        raise StoreError(f'{folder}: not a store: the folder {state}; run "healthd fleet ingest --out" first') from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: is damaged: {error}; restore the folder from a backup") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise StoreError(f"{path}: was written by a newer healthd (schema {schema}; this healthd supports {SCHEMA})")
    try:
        manifest = codec.load(Manifest, data)
    except codec.ConvertError as error:
        raise StoreError(f"{path}: is damaged: {error}; restore the folder from a backup") from None
    for table, months in manifest.tables.items():
        for month, month_file in months.items():
            if not regex(rf"{re.escape(table)}/month={re.escape(month)}/[0-9]+\.parquet").fullmatch(month_file.name):
                raise StoreError(
                    f'{path}: is damaged: "{month_file.name}" is not a file for table {table}, month {month}'
                )
            _require_size(os.path.join(folder, month_file.name), month_file.bytes)
    return manifest


def _require_size(path: str, size: int) -> None:
    try:
        actual_size = os.stat(path).st_size
    except OSError as error:
        raise StoreError(f"{path}: cannot be read although the manifest lists it: {error.strerror}") from None
    if actual_size != size:
        raise StoreError(f"{path}: is damaged: it has {actual_size:,} bytes instead of {size:,}")


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest atomically, even across a power failure. Raises StoreError."""
    temporary, path = os.path.join(folder, f"{NAME}.new"), os.path.join(folder, NAME)
    try:
        if os.path.lexists(temporary):  # left behind by a killed writer: there is only one writer at a time
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666), "w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_path(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):  # the temporary file may not exist, because a file system can run out of inodes
                os.unlink(temporary)
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from None


def sync_path(path: str) -> None:
    """Make the contents of a file or folder survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
