"""How many cores this process may use: those that it may run on, and no more than its cgroups pay for.

Sources: cgroup-v2.rst (cpu.max: "MAX PERIOD" in microseconds, "max" for no limit), sched-bwc.rst (v1: cpu.cfs_quota_us,
-1 for no limit). A limit holds for all cgroups below the one that has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from healthd.common.text import is_decimal


def cores(root: Path = Path("/")) -> int:
    """At least 1. `root`: where /proc and /sys lie."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, int(min([allowed, *_paid(root)])))


def _paid(root: Path) -> Iterator[float]:
    """How many cores each cgroup above this process pays for."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup"
        if controllers:
            mounted = next((mounted / name for name in (controllers, "cpu") if (mounted / name).is_dir()), mounted)
        names = [name for name in PurePosixPath(path).parts if name not in ("/", "..")]
        for depth in range(len(names) + 1):  # in a container the first ones are not there
            folder = mounted.joinpath(*names[:depth])
            if controllers:
                limit = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}".split()
            else:
                limit = _read(folder / "cpu.max").split()
            if len(limit) == 2 and all(map(is_decimal, limit)) and int(limit[1]):
                yield int(limit[0]) / int(limit[1])


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
