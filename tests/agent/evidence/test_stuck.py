"""Processes that hang are recognised by pid and start time."""

from __future__ import annotations

import subprocess
from pathlib import Path

from healthd.agent.evidence.case import Process
from healthd.agent.evidence.stuck import alive


def test_alive_returns_processes_that_still_exist() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        running, reused = Process(child.pid, start), Process(child.pid, start + 1)
        assert alive((running, reused)) == [running]
        child.kill()
        child.wait()
        assert alive((running,)) == []
