"""How long a repair takes: from the line in the kernel log to the node in service, with a real Slurm."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from healthd_daemon import Healthd, xid_line
from machine import GPUS
from repair_site import CONFIG, REBOOT_CONFIG, RepairedNode, Site
from slurm_cluster import SlurmCluster

from repairs.result import Result, Violation

NODES = 4
LONGEST_SECONDS = 600.0
# Each node has several faults in an hour, and each is repaired.
MORE_FAULTS = "own_faults_per_hour = 0\n"
RESET_CONFIG = f"{CONFIG}[slurm]\ncommand_timeout_seconds = 120.0\n{MORE_FAULTS}"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="healthd-repair.") as path:
        yield Path(path)


def measure_times(resets: int, reboots: int, seed: int) -> Result:
    result = Result(f"times from the kernel line to the node in service ({resets} resets, {reboots} reboots)")
    _measure_resets(result, resets, seed)
    _measure_reboots(result, reboots, seed)
    return result


def _measure_resets(result: Result, count: int, seed: int) -> None:
    with contextlib.ExitStack() as ends:
        cluster = ends.enter_context(SlurmCluster(nodes=NODES + 1, gpus=0))
        sites = []
        for name in cluster.names[:NODES]:
            # The interval of the checks is the default: a repair does not wait for the next round.
            site = Site(cluster, name, ends.enter_context(folder()), RESET_CONFIG, interval="")
            ends.enter_context(site.daemon)
            sites.append(site)
        for number in range(count):
            site, pci = sites[number % NODES], GPUS[number // NODES % len(GPUS)]
            seconds = _repair(cluster, site.node, site.daemon, pci, number // NODES)
            result.seconds.setdefault("GPU reset", []).append(seconds)
            if site.resets() != number // NODES + 1:
                text = f"{site.resets()} resets after {number // NODES + 1} faults"
                result.add(Violation("reset", number, seed, site.node, text, log_tail(site.daemon)))


def _measure_reboots(result: Result, count: int, seed: int) -> None:
    conf = ["ResumeTimeout=600"]
    with contextlib.ExitStack() as ends:
        cluster = ends.enter_context(SlurmCluster(nodes=NODES + 1, gpus=0, reboots=True, extra_conf=conf))
        nodes = []
        for name in cluster.names[:NODES]:
            node = RepairedNode(cluster, name, ends.enter_context(folder()), REBOOT_CONFIG + MORE_FAULTS)
            ends.callback(end, node.daemon)
            node.start()
            nodes.append(node)
        for number in range(count):
            node, faults = nodes[number % NODES], number // NODES + 1
            began = time.monotonic()
            node.fail(GPUS[number // NODES % len(GPUS)])
            node.wait_reboot(faults)
            node.boot()
            node.wait_in_service()
            result.seconds.setdefault("reboot, without the time of the boot itself", []).append(
                time.monotonic() - began
            )
            if node.reboots != faults:
                text = f"{node.reboots} reboots after {faults} faults"
                result.add(Violation("reboot", number, seed, node.name, text, log_tail(node.daemon)))


def _repair(cluster: SlurmCluster, node: str, daemon: Healthd, pci: str, faults_before: int) -> float:
    """Write the line, and wait until the node has been repaired. Return the time in seconds."""
    began = time.monotonic()
    daemon.kernel_line(xid_line(119, pci=pci.rpartition(".")[0]))
    cluster.wait_state(node, "DRAIN", reason=f"healthd: gpu_xid/119 {pci}")
    cluster.wait_state(node, "IDLE", without=("DRAIN", "DOWN"), timeout=LONGEST_SECONDS)
    return time.monotonic() - began


def log_tail(daemon: Healthd) -> str:
    return daemon.log.read_text(errors="replace")[-4000:]


def end(daemon: Healthd) -> None:
    """Kill a daemon that still runs."""
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.kill()
