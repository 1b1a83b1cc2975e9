"""Detect whether the files from which this process was started were removed or replaced.

If the venv is removed or changed while the daemon runs, the daemon continues with the code in its memory, but new
workers start from the new files. The worker reads the files, because their disk may hang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import healthd

# Two of the package's files, and the interpreter's name in the venv. pip and dpkg create new files. The target of
# the interpreter's link belongs to the distribution, and may be replaced.
FILES = (healthd.__file__, os.path.join(os.path.dirname(__file__), "__main__.py"), sys.executable)
RESTART = "restart it (systemctl restart healthd)"


def identities(paths: Sequence[str] = FILES) -> dict[str, tuple[int, int, int]]:
    """Return each existing file's inode, last change time in ns, and size."""
    found = {}
    for path in paths:
        try:
            status = os.lstat(path)
        except OSError:
            continue
        found[path] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def problem(before: Mapping[str, tuple[int, int, int]], current: Mapping[str, tuple[int, int, int]]) -> str:
    """Return a sentence if the files are missing or changed, otherwise ""."""
    for path in before:
        if path not in current:
            return f"healthd's files were removed ({path}) while healthd is running: reinstall it, then {RESTART}"
    for path, identity in before.items():
        if current[path] != identity:
            return f"healthd's files were replaced ({path}) while healthd is running: {RESTART}"
    return ""
