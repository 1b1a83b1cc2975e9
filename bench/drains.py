"""Measure the time from a kernel log line to the drain in a real slurmctld."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import node_tree
from counted import wait_for_text
from figure import Figure
from healthd_daemon import Healthd, xid_line
from slurm_cluster import SlurmCluster

DRAINS = 100
INJECTED = "[kernel_log]\naccept_injected = true\n"
# The check gpu_processes runs only on a drained idle node, and each drain would last until this check's next round. The
# limit on own faults is off, because otherwise a node that drains repeatedly would wait for an operator.
DRAINED = "[checks.gpu_processes]\nenabled = false\n[slurm]\nown_faults_per_hour = 0\n"


def drains_from_file() -> list[Figure]:
    return drains("a followed file", lambda daemon, line: daemon.kernel_line(line))


def drains_from_kmsg() -> list[Figure]:
    return drains("/dev/kmsg", inject, "--kernel-log", "kmsg", config=INJECTED)


def drains_under_load() -> list[Figure]:
    """Measure while a busy loop runs on each core."""
    with background_programs([[sys.executable, "-c", "while True: pass"]] * (os.cpu_count() or 1)):
        return drains("/dev/kmsg, all cores busy", inject, "--kernel-log", "kmsg", config=INJECTED)


STORM = """
line = "<12>NVRM: Xid (PCI:0000:%s:00): 31, pid=%d, name=python3, Ch %08x, intr 00000000. MMU Fault: ENGINE GRAPHICS\\n"
buses = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
number = 0
while True:
    with open("/dev/kmsg", "wb", buffering=0) as file:  # one open per line: the kernel rate-limits each open file
        file.write((line % (buses[number % 8], number % 32768, number)).encode())
    number += 1
"""


def drains_in_storm() -> list[Figure]:
    """Measure while another process writes Xid 31 of all GPUs to /dev/kmsg as fast as it can."""
    with background_programs([[sys.executable, "-c", STORM]]):
        return drains("/dev/kmsg, in a storm", inject, "--kernel-log", "kmsg", config=INJECTED)


def inject(_daemon: Healthd, line: str) -> None:
    with open("/dev/kmsg", "w", buffering=1) as file:
        file.write(f"<12>{line}\n")


@contextlib.contextmanager
def background_programs(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Run programs during the block."""
    running = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def drains(source: str, write: Callable[[Healthd, str], None], *flags: str, config: str = "") -> list[Figure]:
    """Measure the time from just before the write until slurmctld has logged the new Reason.

    Repair the node after each drain.
    """
    taken = []
    with SlurmCluster(nodes=1) as cluster:
        daemon = Healthd("--mode", "drain", "--node-name", "n1", *flags, config=DRAINED + config, env=cluster.env)
        log = cluster.directory / "log" / "slurmctld.log"
        with daemon:
            for number in range(DRAINS):
                pci = node_tree.GPUS[number % len(node_tree.GPUS)]
                log_offset = log.stat().st_size
                began = time.perf_counter()
                write(daemon, xid_line(79, pci=pci.rpartition(".")[0]))
                wait_for_text(log, log_offset, f"reason set to: healthd: gpu_xid/79 {pci}".encode())
                taken.append((time.perf_counter() - began) * 1000)
                cluster.wait_state("n1", "DRAIN", reason=f"healthd: gpu_xid/79 {pci}")
                daemon.request(command="repaired", code="gpu_xid/79", part=pci)
                cluster.wait_state("n1", "IDLE", without=("DRAIN",))
    return [
        Figure(f"kernel line ({source}) to drain in slurmctld", "ms", taken, aim=250),
        Figure("  99th percentile", "ms", [statistics.quantiles(taken, n=100, method="inclusive")[98]], aim=1000),
    ]
