"""Advice to the jobs on this node: RUNTIME_DIR/advice/JOB.json, which root writes and the job's user alone may read.

The file stays root's: one that belongs to the user could be filled by him until the node's /run is full. He gets an
entry of his own in its access list (acl(5)), for which neither chown nor a capability is needed; where the file system
has no such lists there is no advice, and the trouble is told.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from healthd.common.atomic_files import replace_file
from healthd.common.text import regex
from healthd.failslow.live.document import JobTold
from healthd.failslow.mitigation.advice import Followed, Seen, advice, follow
from healthd.failslow.mitigation.planner import Overheads
from healthd.failslow.model import Cause

FOLDER = "advice"
FOLDER_MODE = 0o711  # who does not know a job's number sees nothing
CLIENT = "client"  # only who tells his times can be told something
_JOB = regex(r"\d{1,12}")

# linux/posix_acl_xattr.h: a version, then entries of tag, permissions and id; the mask bounds all named ones.
_ACL = "system.posix_acl_access"
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_VERSION, _NOBODY = 2, 0xFFFFFFFF
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE = 4, 2


class Advising:
    """`owner(job)`: the user of a job's ranks, None = not known. Raises OSError from the constructor."""

    def __init__(self, runtime_dir: str, owner: Callable[[str], int | None]) -> None:
        self.folder = os.path.join(runtime_dir, FOLDER)
        self.owner = owner
        self.overheads = Overheads()
        self._jobs: dict[str, Followed] = {}
        os.makedirs(self.folder, FOLDER_MODE, exist_ok=True)
        os.chmod(self.folder, FOLDER_MODE)
        self._remove_all()

    def step(self, told: Sequence[JobTold], now: float) -> OSError | None:
        """Write new advice and remove that of jobs that ended. Return why one could not be written, if so.

        now: epoch seconds.
        """
        trouble = None
        running = {one.job: one for one in told if one.source == CLIENT and _JOB.fullmatch(one.job)}
        for job in set(self._jobs) - set(running):
            del self._jobs[job]
            self._remove(job)
        for job, one in running.items():
            before = self._jobs.get(job, Followed())
            after = self._jobs[job] = follow(before, seen(one), self.overheads)
            uid = self.owner(job)
            if after.number == before.number or uid is None:
                continue
            try:
                self._write(job, after, uid, now)
            except OSError as error:
                trouble = error
                self._remove(job)
        return trouble

    def close(self) -> None:
        """Nobody follows the jobs any more: what was advised is no advice."""
        with suppress(OSError):
            self._remove_all()

    def _write(self, job: str, followed: Followed, uid: int, now: float) -> None:
        path = self._path(job)
        replace_file(path, advice(job, followed, self.overheads, now), 0o600)
        if uid != os.geteuid():
            os.setxattr(path, _ACL, readable_by(uid))

    def _path(self, job: str) -> str:
        return os.path.join(self.folder, f"{job}.json")

    def _remove(self, job: str) -> None:
        with suppress(OSError):
            os.unlink(self._path(job))

    def _remove_all(self) -> None:
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))


def seen(told: JobTold) -> Seen:
    """A job as the planner takes it."""
    known = {cause.value for cause in Cause}
    return Seen(
        told.slow,
        told.lost_seconds,
        Cause(told.cause) if told.cause in known else Cause.UNKNOWN,
        told.since,
        told.slowdown,
        told.rank,
        told.ranks,
    )


def readable_by(uid: int) -> bytes:
    """The access list of a file that its owner may read and write, this user may read, and nobody else."""
    entries = (
        (_OWNER, _READ | _WRITE, _NOBODY),
        (_USER, _READ, uid),
        (_GROUP, 0, _NOBODY),
        (_MASK, _READ, _NOBODY),
        (_OTHER, 0, _NOBODY),
    )
    return _HEAD.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)
