"""The pause of slow-job detection on this node, a file that the daemon writes in the runtime directory.

The pause expires by itself and survives a restart of healthd. A reboot ends it, because the directory is on tmpfs.
"""

from __future__ import annotations

import os

from healthd.common import ownership
from healthd.common.atomic_files import replace_file
from healthd.common.values import DecodeError, Value, decode, encode

FILE = "failslow.pause"
MAX_SECONDS = 7 * 24 * 3600.0  # the maximum of every pause (agent/conditions/condition.py)


class DetectionPause(Value, frozen=True):
    """A pause of slow-job detection. `until` and `given` are in epoch seconds. `who` is the operator, such as "root
    (uid 0)".
    """

    until: float
    why: str
    who: str
    given: float


def active_pause(runtime_dir: str, now: float) -> DetectionPause | None:
    """Return the pause in force, or None if there is no pause, the pause has expired, or the file is invalid."""
    path = os.path.join(runtime_dir, FILE)
    if not os.path.lexists(path):  # the usual case; verifying each step of the path takes a hundred times as long
        return None
    try:
        pause = parse(ownership.read(path))
    except OSError:  # ownership.Untrusted too
        return None
    return pause if pause is not None and now < pause.until else None


def parse(content: bytes) -> DetectionPause | None:
    """Parse the file. Return None for content that `write_pause` does not write, and for a pause longer than
    MAX_SECONDS."""
    try:
        pause = decode(DetectionPause, content)
    except DecodeError:
        return None
    return pause if 0.0 < pause.until - pause.given <= MAX_SECONDS else None


def write_pause(runtime_dir: str, pause: DetectionPause) -> None:
    """Write the pause. Raises ownership.Untrusted or OSError."""
    replace_file(os.path.join(runtime_dir, FILE), encode(pause), mode=0o644)


def remove_pause(runtime_dir: str) -> bool:
    """Remove the pause and return True if there was one. Raises ownership.Untrusted or OSError."""
    with ownership.open_parent(os.path.join(runtime_dir, FILE)) as (folder, name):
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
    return True
