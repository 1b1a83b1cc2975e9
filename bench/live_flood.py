"""Measure how much CPU hostile users cost the live process, and whether it still receives an honest job's messages.

    python bench/live_flood.py [--floods N] [--seconds S]

The processes are real: `python -m healthd.failslow.live` on a fake /proc; N hostile jobs with 8 connections each, which
send valid messages with alternating times as fast as they can; and one honest job of 8 ranks with five steps per
second. The memory for the series of 1,024 ranks with 400 samples each is also measured (in this process, with the same
code).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from healthd import client
from healthd.failslow.live.datagram import StepMessage
from healthd.failslow.live.jobs import Jobs
from healthd.failslow.live.settings import LiveSettings

FLOOD = """
import socket, sys
from healthd import client
a = client.MESSAGE.pack(client.MAGIC, 0, 0, 1, 1, 0.5, 0.4, 0.0)
b = client.MESSAGE.pack(client.MAGIC, 0, 0, 1, 1, 0.7, 0.6, 0.0)
print("ready", flush=True)
sys.stdin.readline()
streams = []
for _ in range(8):
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stream.connect(sys.argv[1])
    stream.setblocking(False)
    streams.append(stream)
while True:
    for stream in streams:
        try:
            stream.send(a); stream.send(b)
        except OSError:
            pass
"""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def in_job(folder: Path, pid: int, job: int) -> None:
    process_folder = folder / f"proc/{pid}"
    process_folder.mkdir(parents=True)
    (process_folder / "cgroup").write_text(f"0::/system.slice/slurmstepd.scope/job_{job}/step_0\n")


def flood(floods: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "failslow.sock"
        own_end, child_end = socket.socketpair()
        settings = {"place": {"runtime_dir": name, "root": name}, "watched": {"client": True}}
        argv = [sys.executable, "-m", "healthd.failslow.live", str(child_end.fileno()), json.dumps(settings)]
        live = subprocess.Popen(argv, pass_fds=[child_end.fileno()])
        while not path.exists():
            time.sleep(0.01)
        senders = [
            subprocess.Popen(
                [sys.executable, "-c", FLOOD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(floods)
        ]
        for job, sender in enumerate(senders, 1):
            assert sender.stdout is not None
            assert sender.stdin is not None
            sender.stdout.readline()
            in_job(folder, sender.pid, job)
            sender.stdin.write("go\n")
            sender.stdin.flush()
        in_job(folder, os.getpid(), 4711)
        ranks = []
        for _ in range(8):
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stream.setblocking(False)
            stream.connect(str(path))
            ranks.append(stream)
        began, used, sent, refused = time.monotonic(), cpu_seconds(live.pid), 0, 0
        while time.monotonic() < began + seconds:
            for rank, stream in enumerate(ranks):
                try:
                    stream.send(client.MESSAGE.pack(client.MAGIC, rank, rank, 1, 1, 0.2, 0.1, 0.0))
                    sent += 1
                except BlockingIOError:
                    refused += 1
            time.sleep(0.2)
        elapsed = time.monotonic() - began
        share = (cpu_seconds(live.pid) - used) / elapsed
        print(
            f"{floods} flooding jobs: {100 * share:.1f} % of a core, {resident_mib(live.pid):.0f} MiB; "
            f"honest job: {sent} messages sent, {refused} refused",
            flush=True,
        )
        for sender in senders:
            sender.kill()
            sender.communicate()
        own_end.close()
        live.wait()


def memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jobs = Jobs(LiveSettings(max_jobs=1, max_ranks=1024), lambda pid, job, local: "")
    began = time.process_time()
    for at in range(400):
        for rank in range(1024):
            message = StepMessage(rank, rank, at, 1, 0.5 + (at * rank) % 7 * 0.001, 0.4 + (at + rank) % 5 * 0.001, None)
            jobs.add_step(rank, rank, "1", message, float(at))
    elapsed = time.process_time() - began
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"1,024 ranks, iteration and busy: {used / 1024:.0f} MiB; {1e6 * elapsed / 1024 / 400:.0f} us per message")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--floods", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    flood(0, args.seconds)
    flood(args.floods, args.seconds)
    memory()


if __name__ == "__main__":
    main()
