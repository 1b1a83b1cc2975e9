"""Converts user names for storage (unchanged, as hashes or not at all), and computes keys that connect a run's jobs.

A hash is HMAC-SHA256 with the site's key, truncated to 128 bits as RFC 2104, section 5, allows. Anyone who has the key
can try names until one matches, so protect it like a password.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from typing import Literal

from healthd.fleet.manifest import StoreError

Users = Literal["keep", "drop", "hash"]
KEEP_USERS, DROP_USERS, HASH_USERS = "keep", "drop", "hash"
MIN_KEY_BYTES = 16  # 128 bits; a shorter key can be found by brute force
MAX_KEY_BYTES = 4096
MAX_CACHED_HASHES = 100_000


@dataclass(frozen=True, slots=True)
class Privacy:
    users: str
    key: bytes = field(repr=False)
    _hashes: dict[tuple[bytes, bytes], str] = field(default_factory=dict, repr=False)

    def user(self, name: str | None) -> str | None:
        """Return the stored form of a user's name."""
        if not name or self.users == DROP_USERS:
            return None
        return name if self.users == KEEP_USERS else self._hash(b"user", name.encode("utf-8", "surrogateescape"))

    def run_key(self, job_name: str | None, work_directory: str | None) -> str | None:
        """Return a key that is equal for jobs with the same name and work directory, or None if either is unknown.

        The name alone is not enough: many users have a job "train", and every interactive session is "bash".
        """
        if not job_name or not work_directory:
            return None
        return self._hash(b"run", f"{job_name}\0{work_directory}".encode("utf-8", "surrogateescape"))

    @property
    def marks_key(self) -> bytes:
        """A key of 32 bytes for hashing text from other programs' files. Such text may contain people's names."""
        return self._hash(b"marks", b"").encode("ascii")

    @property
    def fingerprint(self) -> str:
        """An identifier for the key that reveals nothing about it."""
        return self._hash(b"key", b"")[:16]

    def _hash(self, purpose: bytes, text: bytes) -> str:
        found = self._hashes.get((purpose, text))
        if found is None:
            if len(self._hashes) >= MAX_CACHED_HASHES:
                self._hashes.clear()
            found = hmac.digest(self.key, purpose + b"\0" + text, "sha256")[:16].hex()
            self._hashes[purpose, text] = found
        return found


def site_key(folder: str, file: str | None) -> bytes:
    """Return the key in `file`. Without `file`, return the store's own key, and create it if it is missing.

    Raises StoreError.
    """
    if file is not None:
        return _read_key(file)
    path = os.path.join(folder, "key")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read_key(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be created: {error.strerror}") from None
    try:
        with open(descriptor, "w", encoding="ascii") as key_file:
            key_file.write(secrets.token_hex(32) + "\n")
            key_file.flush()
            os.fsync(descriptor)
    except OSError as error:
        os.unlink(path)
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from None
    return _read_key(path)


def _read_key(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            text = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise StoreError(f"{path}: the key cannot be read: {error.strerror}") from None
    if status.st_mode & 0o077:
        raise StoreError(f"{path}: other users can read or change the key: chmod 600 {path}")
    if not MIN_KEY_BYTES <= len(text) <= MAX_KEY_BYTES:
        raise StoreError(
            f"{path}: a key must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, but this one has {len(text)}"
        )
    return text
