"""Writes advice for the jobs on this node to RUNTIME_DIR/advice/JOB.json. Only the job's user can read the file.

A node sees only its own ranks, not the whole gang. Because all ranks wait for the slowest, the gang loses as many
seconds as each of its ranks. The cost of a remedy is also the time that the gang loses. Loss and cost are therefore
compared in seconds, and the number of GPUs does not matter.

The file belongs to root, because users could fill the node's /run through a file that they own. An entry in the file's
access list (acl(5)) lets the user read it; this requires no chown and no capability. If the file system does not
support access lists, there is no advice, and healthd reports the problem.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from healthd.common.atomic_files import replace_file
from healthd.common.text import regex
from healthd.failslow.live.document import LiveJob
from healthd.failslow.live.jobs import CLIENT
from healthd.failslow.mitigation.planner import (
    HEALTHY,
    Action,
    Observation,
    Overheads,
    State,
    advance,
    find_next_action,
)
from healthd.failslow.model import Cause

FOLDER = "advice"
FOLDER_MODE = 0o711  # users can open a file only by its name, which contains the job number
_JOB = regex(r"\d{1,12}")

# Format (linux/posix_acl_xattr.h): a version, then entries with tag, permissions and id. The mask limits all named
# entries.
_ACL = "system.posix_acl_access"
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_VERSION, _NOBODY = 2, 0xFFFFFFFF
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE = 4, 2

SCHEMA = 1
SETTLING_STEPS = 2  # number of steps to wait after a remedy; each step covers a few seconds of the job's iterations
GPU_COUNT = 1  # 1, because loss and cost are in seconds of the whole gang (see above)

ACTION_TEXTS = {
    Action.IGNORE: "no remedy is worth its cost yet",
    Action.MICRO_BATCHES: "move micro-batches from the slow data-parallel groups to the fast ones",
    Action.TOPOLOGY: "swap ranks, so that stragglers are in as few stages as possible and slow links carry little data",
    Action.RESTART: "write a checkpoint and restart without the slow node",
}


class FollowedJob(NamedTuple):
    """A job's state between two steps. `advice_number` counts the changes of the advice; 0 if there was no advice
    yet."""

    state: State = HEALTHY
    live_job: LiveJob = LiveJob("", 1, CLIENT)
    action: Action = Action.IGNORE
    advice_number: int = 0


def follow(before: FollowedJob, live_job: LiveJob, overheads: Overheads) -> FollowedJob:
    """Return the state one step later.

    A job that was never slow gets no advice. For a job that recovered, the advice reports the recovery.
    """
    lost = max(0.0, live_job.lost_seconds - before.live_job.lost_seconds) / max(1, live_job.ranks)
    state, action = advance(
        before.state, Observation(live_job.slow, lost, GPU_COUNT, _cause(live_job)), overheads, SETTLING_STEPS
    )
    if action is None:
        action = before.action if live_job.slow else Action.IGNORE
    previous_content, content = (_advice_content(before.live_job, before.action), _advice_content(live_job, action))
    return FollowedJob(state, live_job, action, before.advice_number + (previous_content != content))


def _advice_content(live_job: LiveJob, action: Action) -> tuple[object, ...]:
    """Return the parts of the advice whose change requires a new file."""
    return (True, action, live_job.rank) if live_job.slow else (False,)


def advice_text(followed: FollowedJob, overheads: Overheads, now: float) -> str:
    """Return the contents of the file, a JSON object (docs/json.md).

    Args:
        now: epoch seconds.
    """
    live_job, following = followed.live_job, find_next_action(followed.state, GPU_COUNT, overheads)
    document = {
        "schema": SCHEMA,
        "job": live_job.job,
        "number": followed.advice_number,
        "written": round(now, 3),
        "slow": live_job.slow,
        "since": live_job.since,
        "slowdown": live_job.slowdown,
        "cause": _cause(live_job).value if live_job.slow else "",
        "rank": live_job.rank,
        "action": followed.action.value,
        "message": ACTION_TEXTS[followed.action] if live_job.slow else "the job is no longer slow",
        "lost_seconds": round(followed.state.lost, 3),
        "next": None
        if following is None or not live_job.slow
        else {"action": following.action.value, "at_lost_seconds": following.lost_gpu_seconds},
    }
    return json.dumps(document, allow_nan=False) + "\n"


def _cause(live_job: LiveJob) -> Cause:
    """Return the cause of a slow job, or UNKNOWN."""
    return Cause(live_job.cause) if live_job.cause else Cause.UNKNOWN


class AdviceWriter:
    """Writes the advice files.

    `find_user(job)` returns the user of a job's ranks, or None if unknown. The constructor raises OSError.
    """

    def __init__(self, runtime_dir: str, find_user: Callable[[str], int | None]) -> None:
        self.folder = os.path.join(runtime_dir, FOLDER)
        self.find_user = find_user
        self.overheads = Overheads()
        self._jobs: dict[str, FollowedJob] = {}
        os.makedirs(self.folder, FOLDER_MODE, exist_ok=True)
        os.chmod(self.folder, FOLDER_MODE)
        self._remove_all()

    def step(self, live_jobs: Sequence[LiveJob], now: float) -> OSError | None:
        """Write new advice, and remove the advice for jobs that ended. Return the error if a file could not be written.

        Args:
            now: epoch seconds.
        """
        problem = None
        running = {
            live_job.job: live_job
            for live_job in live_jobs
            if live_job.source == CLIENT and _JOB.fullmatch(live_job.job)
        }
        for job in set(self._jobs) - set(running):
            del self._jobs[job]
            self._remove(job)
        for job, live_job in running.items():
            before = self._jobs.get(job, FollowedJob())
            after = self._jobs[job] = follow(before, live_job, self.overheads)
            uid = self.find_user(job)
            if after.advice_number == before.advice_number or uid is None:
                continue
            try:
                self._write(job, after, uid, now)
            except OSError as error:
                problem = error
                self._remove(job)
        return problem

    def close(self) -> None:
        """Remove all advice, because it is out of date when jobs are no longer monitored."""
        with suppress(OSError):
            self._remove_all()

    def _write(self, job: str, followed: FollowedJob, uid: int, now: float) -> None:
        path = self._path(job)
        replace_file(path, advice_text(followed, self.overheads, now), 0o600)
        if uid != os.geteuid():
            os.setxattr(path, _ACL, access_list(uid))

    def _path(self, job: str) -> str:
        return os.path.join(self.folder, f"{job}.json")

    def _remove(self, job: str) -> None:
        with suppress(OSError):
            os.unlink(self._path(job))

    def _remove_all(self) -> None:
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))


def access_list(uid: int) -> bytes:
    """Return an access list: the owner may read and write, user `uid` may read, and no one else has access."""
    entries = (
        (_OWNER, _READ | _WRITE, _NOBODY),
        (_USER, _READ, uid),
        (_GROUP, 0, _NOBODY),
        (_MASK, _READ, _NOBODY),
        (_OTHER, 0, _NOBODY),
    )
    return _HEAD.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)
