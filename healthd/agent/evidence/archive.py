"""Evidence archives: STATE_DIR/evidence/ID.tar.gz, readable by root only, and the limits on what is kept.

An archive is written next to its final name and then renamed. If the disk is full, no part of it remains.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from healthd.agent.evidence import manifest as manifests
from healthd.agent.evidence.manifest import Manifest
from healthd.agent.evidence.request import FOLDER, ID
from healthd.common import ownership
from healthd.common.errors import HealthdError
from healthd.common.values import DecodeError, decode, encode

SUFFIX = ".tar.gz"
UNFINISHED = ".new"
MAX_MANIFEST_BYTES = 1 << 20
DAY_SECONDS = 86400.0
_READ_ERRORS = (OSError, tarfile.TarError, EOFError, ValueError, zlib.error)  # of a damaged archive


class ArchiveError(HealthdError):
    """The archive cannot be written or read. The message is one sentence."""


class Archive(NamedTuple):
    """A file in the folder. `modified` is in epoch seconds."""

    id: str
    path: str
    bytes: int
    modified: float


def folder(state_dir: str) -> str:
    return os.path.join(state_dir, FOLDER)


def prepare_folder(state_dir: str) -> str:
    """Create the folder with mode 0700, and remove unfinished files. Raises ownership.Untrusted or OSError."""
    path = folder(state_dir)
    with ownership.open_folder(path, make_mode=0o700) as descriptor:
        os.fchmod(descriptor, 0o700)
        for name in os.listdir(descriptor):
            if name.endswith(UNFINISHED):
                os.unlink(name, dir_fd=descriptor)
    return path


def list_archives(state_dir: str) -> list[Archive]:
    """Return the archives, oldest first. Raises OSError except for a missing folder."""
    found = []
    try:
        with os.scandir(folder(state_dir)) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if name != entry.name and ID.fullmatch(name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append(Archive(name, entry.path, status.st_size, status.st_mtime))
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda archive: (archive.id[:16], archive.id))


def to_remove(
    archives: Sequence[Archive], keep: str, max_files: int, max_bytes: int, max_days: int, now: float
) -> list[Archive]:
    """Return the archives that exceed the limits, oldest first. The archive with the id `keep` stays."""
    found = [a for a in archives if a.id != keep and now - a.modified > max_days * DAY_SECONDS]
    left = [a for a in archives if a not in found]
    for archive in list(left):
        if len(left) <= max_files and sum(a.bytes for a in left) <= max_bytes:
            break
        if archive.id != keep:
            left.remove(archive)
            found.append(archive)
    return found


def remove_old(state_dir: str, keep: str, max_files: int, max_mib: int, max_days: int) -> list[Archive]:
    """Remove the archives that exceed the limits. Return them. Raises OSError."""
    removed = to_remove(list_archives(state_dir), keep, max_files, max_mib << 20, max_days, time.time())
    for archive in removed:
        with suppress(FileNotFoundError):
            os.unlink(archive.path)
    return removed


def write_archive(
    path: str, manifest: Manifest, files: Mapping[str, str], earlier: str = "", max_bytes: int = 0
) -> int:
    """Write an archive with these files (name: path), and the files of an `earlier` archive that they do not replace.

    Return its size. Raises ArchiveError; nothing of the new archive then remains.
    """
    unfinished = f"{path}{UNFINISHED}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(unfinished, flags, 0o600)
    except OSError as error:
        raise ArchiveError(f"{path}: not written: {_why(error)}") from None
    try:
        with open(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, f"{manifest.id}/{manifests.FILE}", encode(manifest))
                for name, source in files.items():
                    tar.add(source, f"{manifest.id}/{name}", recursive=False, filter=_anonymous)
                if earlier and os.path.exists(earlier):
                    _copy(tar, earlier, {f"{manifest.id}/{name}" for name in (manifests.FILE, *files)})
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        if max_bytes and size > max_bytes:
            raise OSError(errno.EFBIG, f"{size >> 20} MiB is more than evidence.max_mib allows")
        os.replace(unfinished, path)
    except _READ_ERRORS as error:
        with suppress(OSError):
            os.unlink(unfinished)
        raise ArchiveError(f"{path}: not written: {_why(error)}") from None
    _sync_folder(os.path.dirname(path) or ".")
    return size


def _why(error: Exception) -> object:
    return error.strerror if isinstance(error, OSError) and error.strerror else error


def _sync_folder(path: str) -> None:
    """Make a rename in the folder survive a power loss. Some file systems do not support this."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_aside(path: str, id: str) -> str:
    """Rename a damaged archive, so that its case can be saved anew. Return the new path. Raises OSError.

    The new name is also an id, so that the limits apply. It sorts before the case's own id.
    """
    aside = os.path.join(os.path.dirname(path), f"{f'{id[:17]}0-damaged-{id[17:]}'[:57]}{SUFFIX}")
    os.replace(path, aside)
    return aside


def _copy(tar: tarfile.TarFile, earlier: str, without: set[str]) -> None:
    with tarfile.open(earlier, "r:gz") as source:
        for member in source:
            if member.isfile() and member.name not in without:
                tar.addfile(member, source.extractfile(member))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
    tar.addfile(info, io.BytesIO(data))


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info


@contextmanager
def open_archive(path: str) -> Iterator[tarfile.TarFile]:
    """Open an archive for reading. Raises ArchiveError, also for errors inside the block."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            yield tar
    except _READ_ERRORS as error:
        raise ArchiveError(f"{path}: cannot be read: {_why(error)}") from None


def read_manifest(path: str) -> Manifest:
    """Read an archive's manifest, which is its first file. Raises ArchiveError."""
    with open_archive(path) as tar:
        member = tar.next()
        if member is None or not member.isfile() or not member.name.endswith(f"/{manifests.FILE}"):
            raise ArchiveError(f"{path}: is not an evidence file")
        content = tar.extractfile(member)
        data = content.read(MAX_MANIFEST_BYTES) if content else b""
    return parse_manifest(data, path)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises ArchiveError."""
    try:
        found = decode(Manifest, data)
    except DecodeError as error:
        raise ArchiveError(f"{where}: has no valid manifest: {error}") from None
    if found.format != manifests.FORMAT or found.version != manifests.VERSION:
        raise ArchiveError(f"{where}: has version {found.version}; this healthd reads version {manifests.VERSION}")
    return found


def list_files(path: str) -> list[tuple[str, int]]:
    """Return (name, size) of an archive's files. Raises ArchiveError."""
    with open_archive(path) as tar:
        return [(member.name.partition("/")[2], member.size) for member in tar if member.isfile()]


def verify(path: str) -> None:
    """Read an archive to its end, including its checksum. Raises ArchiveError."""
    with open_archive(path) as tar:
        for _ in tar:
            pass
        while tar.fileobj is not None and tar.fileobj.read(1 << 16):
            pass
