"""Run a program and measure its own CPU time and peak memory.

os.wait4() in this process would report too much memory: between vfork and exec the child shares this process's memory,
and the kernel counts it. So a small process starts the program and waits for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

STARTER = """\
import json, os, sys
pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(pid, 0)
result = [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss]
os.write(int(sys.argv[1]), json.dumps(result).encode())
"""


class Usage(NamedTuple):
    """`peak_mib` is that of the largest process: the program's, or a child's that it waited for (getrusage(2)).

    The starter uses 8 MiB, so a smaller peak is not visible.
    """

    status: int
    cpu_seconds: float
    peak_mib: float


def run(
    argv: Sequence[str | Path],
    stderr: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Usage:
    """Run a program to its end without standard output."""
    read_end, write_end = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", "-c", STARTER, str(write_end), *map(str, argv)]
        subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=stderr, env=env, cwd=cwd, pass_fds=[write_end], check=True
        )
        status, cpu_seconds, peak = json.loads(os.read(read_end, 1000))
    finally:
        os.close(read_end)
        os.close(write_end)
    return Usage(status, cpu_seconds, peak / 1024)
