"""Processes that hang are recognised by pid and start time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waiting import until

from healthd.agent.evidence.case import Process
from healthd.agent.evidence.stuck import alive


def test_alive_returns_processes_that_still_exist() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        start = int(fields(child.pid)[19])
        running, reused = Process(child.pid, start), Process(child.pid, start + 1)
        assert alive((running, reused)) == [running]
        child.kill()
        child.wait()
        assert alive((running,)) == []


# The main thread ends, and another thread remains, like one that hangs in the kernel.
WITHOUT_MAIN_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_zombie_with_another_thread_is_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD]) as child:
        until(lambda: fields(child.pid)[0] == "Z", "the main thread ends")
        process = Process(child.pid, int(fields(child.pid)[19]))
        assert alive((process,)) == [process]
        child.kill()
        until(lambda: not alive((process,)), "all threads end")
        assert fields(child.pid)[0] == "Z"


def fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
