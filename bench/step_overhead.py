"""Measure how much monitoring slows a training step: a loop runs with and without `healthd.client.step()`.

    python bench/step_overhead.py [--blocks N] [--steps N] [--milliseconds M]

The real live process runs in parallel and samples fake counters of eight InfiniBand ports. A step is a fixed amount of
hashing. Blocks of steps with and without the call alternate, so that both run under the same conditions. The overhead
is the median over pairs of neighbouring blocks. Its interval (95 %) is a bootstrap of the pairs. Exit status 1: the
upper end of the interval is above 1 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AIM = 0.01
PORTS = 8
DRAWS = 2000
TICKS = os.sysconf("SC_CLK_TCK")


def write_tree(root: Path) -> None:
    """Build a fake node on which this process is the only process of a job. The counters of its ports do not change."""
    cgroup = root / f"proc/{os.getpid()}/cgroup"
    cgroup.parent.mkdir(parents=True)
    cgroup.write_text("0::/system.slice/slurmstepd.scope/job_1/step_0\n")
    for number in range(PORTS):
        port = root / f"sys/class/infiniband/mlx5_{number}/ports/1"
        (port / "counters").mkdir(parents=True)
        for name, text in (("state", "4: ACTIVE\n"), ("link_layer", "InfiniBand\n"), ("rate", "400 Gb/sec (4X NDR)\n")):
            (port / name).write_text(text)
        for name in ("port_rcv_data", "port_xmit_data"):
            (port / "counters" / name).write_text(f"{number * 1_000_000}\n")


def live(folder: Path, channel: socket.socket) -> subprocess.Popen[bytes]:
    """Start the real process as the daemon starts it."""
    watched = {"client": True, "sample": ["ib"], "sample_seconds": 0.5}
    setup = json.dumps(
        {"place": {"runtime_dir": str(folder / "run"), "root": str(folder / "root")}, "watched": watched}
    )
    argv = [sys.executable, "-m", "healthd.failslow.live", str(channel.fileno()), setup]
    return subprocess.Popen(argv, pass_fds=[channel.fileno()], start_new_session=True)


def work(rounds: int) -> None:
    """Do one step: a fixed amount of work."""
    data = b"x" * 65_536
    for _ in range(rounds):
        hashlib.sha256(data)


def calibrate_rounds(seconds: float) -> int:
    """Return the number of rounds of work that take the given time on this machine."""
    work(200)
    before = time.perf_counter()
    work(200)
    return max(1, round(200 * seconds / (time.perf_counter() - before)))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def block(steps: int, rounds: int, with_step: bool) -> tuple[float, float]:
    """Return the mean wall-clock and CPU seconds of one step."""
    from healthd.client import step

    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        work(rounds)
        if with_step:
            step(busy=0.001)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=40, help="steps per block")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="length of a step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").mkdir(mode=0o755)
        write_tree(folder / "root")
        os.environ["HEALTHD_SOCKET"] = str(folder / "run/failslow.sock")
        own_end, child_end = socket.socketpair()
        process = live(folder, child_end)
        try:
            while not (folder / "run/failslow.sock").exists() and process.poll() is None:
                time.sleep(0.05)
            rounds = calibrate_rounds(args.milliseconds / 1000)
            block(args.steps, rounds, with_step=True)  # connects
            began, used = time.perf_counter(), cpu_seconds(process.pid)
            pairs = []
            for number in range(args.blocks):
                first = block(args.steps, rounds, with_step=bool(number % 2))
                second = block(args.steps, rounds, with_step=not number % 2)
                pairs.append((second, first) if not number % 2 else (first, second))
            share = (cpu_seconds(process.pid) - used) / (time.perf_counter() - began)
        finally:
            own_end.close()
            process.terminate()
            process.wait(30)
    print(f"a step of {args.milliseconds:g} ms, {args.blocks} pairs of {args.steps}; load {os.getloadavg()[0]:.1f}")
    worst = 0.0
    for at, clock_name in enumerate(("wall clock", "CPU time")):
        ratios = [with_client[at] / plain[at] - 1 for with_client, plain in pairs]
        low, high = interval(ratios)
        worst = max(worst, high) if clock_name == "CPU time" else worst
        print(
            f"{clock_name:<12} {statistics.median(ratios):+8.3%} longer with step()   95 %: {low:+.3%} to {high:+.3%}"
        )
    print(f"live process, sampling {PORTS} ports twice a second: {share:.2%} of a core")
    return 0 if worst <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
