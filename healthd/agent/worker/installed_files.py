"""Whether the files that this process was started from still lie where they lay. Who removes the venv, or installs into
it, under a running daemon leaves it with what it has in memory; workers are started from what lies there then.

Looked at by the worker, since that disk may hang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import healthd

# Two of the package, and the interpreter's name in the venv. pip and dpkg write each file anew; what the interpreter's
# link leads to is the distribution's, and may be replaced.
FILES = (healthd.__file__, os.path.join(os.path.dirname(__file__), "__main__.py"), sys.executable)
RESTART = "restart it (systemctl restart healthd)"


def identities(paths: Sequence[str] = FILES) -> dict[str, tuple[int, int, int]]:
    """Of each that is there: inode, moment of its last change in ns, size."""
    found = {}
    for path in paths:
        try:
            about = os.lstat(path)
        except OSError:
            continue
        found[path] = (about.st_ino, about.st_mtime_ns, about.st_size)
    return found


def problem(before: Mapping[str, tuple[int, int, int]], now: Mapping[str, tuple[int, int, int]]) -> str:
    """One sentence if they are gone or others; "" if not."""
    for path in before:
        if path not in now:
            return f"healthd's files are gone ({path}): it goes on without them; install it again, and {RESTART}"
    for path, identity in before.items():
        if now[path] != identity:
            return f"healthd's files were replaced ({path}) while it runs: {RESTART}"
    return ""
