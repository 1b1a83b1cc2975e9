"""For how long nothing new is said of slow jobs on this node: a file in the runtime directory, written by the daemon
when somebody tells it so, read by whoever looks for slow jobs.

It ends by itself and outlives a restart of healthd; a reboot ends it, as the directory is on tmpfs.
"""

from __future__ import annotations

import os

from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.values import DecodeError, Value, decode, encode

FILE = "failslow.pause"
LONGEST_SECONDS = 7 * 24 * 3600.0  # as of any pause (agent/conditions/condition.py)


class DetectionPause(Value, frozen=True):
    """until, given: epoch seconds; who: "root (uid 0)"."""

    until: float
    why: str
    who: str
    given: float


def standing(runtime_dir: str, now: float) -> DetectionPause | None:
    """The pause that stands; None where there is none, where it is over, and where the file is not what was written."""
    path = os.path.join(runtime_dir, FILE)
    if not os.path.lexists(path):  # as ever: to look at each step of the path costs a hundred times as much
        return None
    try:
        pause = parse(ownership.read(path))
    except OSError:  # ownership.Untrusted too
        return None
    return pause if pause is not None and now < pause.until else None


def parse(content: bytes) -> DetectionPause | None:
    """Pure. None for what `begin` does not write; a pause is never longer than LONGEST_SECONDS."""
    try:
        pause = decode(DetectionPause, content)
    except DecodeError:
        return None
    return pause if 0.0 < pause.until - pause.given <= LONGEST_SECONDS else None


def begin(runtime_dir: str, pause: DetectionPause) -> None:
    """Raises ownership.Untrusted, OSError."""
    replace_file(os.path.join(runtime_dir, FILE), encode(pause), mode=0o644)


def end(runtime_dir: str) -> bool:
    """Whether there was one. Raises ownership.Untrusted, OSError."""
    with ownership.beside(os.path.join(runtime_dir, FILE)) as (folder, name):
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
    return True
