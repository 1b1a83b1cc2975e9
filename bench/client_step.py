"""Measure the cost of `healthd.client.step` in a training loop.

    python bench/client_step.py [--steps N]

Three cases are measured: healthd is absent, healthd reads the messages, and healthd hangs with a full queue. The times
of the calls are measured with the monotonic clock. The cost of the clock itself is printed and not subtracted. Half of
the calls of each case use the default settings. In the other half, every step sends (SEND_SECONDS is 0), which no real
loop does. Exit status 1: in one case, more than 1 % of the calls took longer than AIM_MICROSECONDS.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from healthd import client

AIM_MICROSECONDS = 5.0
READER = """
import os, sys, time
from healthd.failslow.live.receiver import Receiver
receiver = Receiver(sys.argv[1], sys.argv[2], 4, 4)
print("listens", flush=True)
while True:
    for _ in receiver.step(time.monotonic()):
        pass
    time.sleep(0.01)
"""


def measured(steps: int) -> list[float]:
    """Return the microseconds of each call, ascending."""
    clock, step, microseconds = time.perf_counter_ns, client.step, []
    for _ in range(steps):
        before = clock()
        step(busy=0.1, wait=0.05)
        microseconds.append((clock() - before) / 1000)
    return sorted(microseconds)


def clock_cost(steps: int) -> list[float]:
    clock, microseconds = time.perf_counter_ns, []
    for _ in range(steps):
        before = clock()
        microseconds.append((clock() - before) / 1000)
    return sorted(microseconds)


def row(name: str, took: list[float]) -> str:
    at = [took[min(len(took) - 1, int(len(took) * share))] for share in (0.5, 0.99, 0.999)]
    return f"{name:<44} {at[0]:8.2f} {at[1]:8.2f} {at[2]:8.2f} {took[-1]:9.1f}"


def measure_case(name: str, steps: int) -> bool:
    """Measure with the default settings, and with a message in each step. Returns True if the target is met."""
    reached = True
    for seconds, label in ((0.2, ""), (0.0, ", each step sends")):
        client.SEND_SECONDS = seconds
        microseconds = measured(steps)
        print(row(name + label, microseconds), flush=True)
        reached &= microseconds[int(len(microseconds) * 0.99)] <= AIM_MICROSECONDS
    return reached


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    print(f"{'us per call':<44} {'median':>8} {'p99':>8} {'p99.9':>8} {'max':>9}   load {os.getloadavg()[0]:.1f}")
    print(row("clock only", clock_cost(steps)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failslow.sock"
        os.environ["HEALTHD_SOCKET"] = str(path)
        reached = measure_case("healthd absent", steps)
        cgroup = Path(folder) / f"proc/{os.getpid()}/cgroup"
        cgroup.parent.mkdir(parents=True)
        cgroup.write_text("0::/system.slice/slurmstepd.scope/job_1/step_0\n")
        argv = [sys.executable, "-c", READER, str(path), folder]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            client.RETRY_SECONDS = 0.0
            client._pid = 0
            reached &= measure_case("healthd reading", steps)
            reader.send_signal(signal.SIGSTOP)
            for _ in range(2000):
                client.step()  # these steps fill the queue
            reached &= measure_case("healthd hung, queue full", steps)
            reader.kill()
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
