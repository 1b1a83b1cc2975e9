"""Test of a round that takes longer than three intervals: the verdict stays valid as long as the daemon runs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from healthd_daemon import Healthd
from waiting import until

# The first run of its check is short.
CONFIG = """
interval_seconds = {interval}
round_timeout_seconds = 200.0
[checks.exec.slow]
command = ["/bin/sh", "-c", "[ ! -e {slow} ] || exec sleep 100"]
timeout_seconds = 150.0
"""
INTERVAL_SECONDS = 5.0
VALID_SECONDS = 3 * INTERVAL_SECONDS  # of a verdict


def expiry_time(daemon: Healthd) -> int:
    return int(daemon.verdict().split()[1])


def test_verdict_stays_valid_in_long_round_and_expires_with_stopped_daemon(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    with Healthd(config=CONFIG.format(interval=INTERVAL_SECONDS, slow=slow)) as daemon:
        slow.touch()
        last = daemon.status()["round"]["number"]
        number = daemon.wait_until(lambda s: s["round"]["number"] > last, "the next round has begun")["round"]["number"]
        start = time.time()
        while time.time() < start + 2 * VALID_SECONDS:
            assert expiry_time(daemon) >= int(time.time()), "the verdict has expired in a round"
            time.sleep(0.2)
        assert daemon.status()["round"]["number"] == number, "the round was too short for this test"
        assert daemon.process is not None
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            until(lambda: expiry_time(daemon) < int(time.time()), "the verdict of a stopped daemon expires")
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
