"""Nodes that fail at the same moment: how many of them claim a repair and take a step at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable

from healthd_daemon import xid_line
from repair_site import CONFIG, Site
from slurm_cluster import SlurmCluster
from waiting import until

from repairs.result import Result, Violation
from repairs.times import folder, log_tail

SAMPLE_SECONDS = 0.1
LONGEST_SECONDS = 5400.0
CLAIMED = "(repair: gpu_reset)"
INTERVAL = "20"  # between rounds of checks: all daemons share the cores of this machine
LIMIT_CONFIG = """\
[slurm]
command_timeout_seconds = 120.0
own_faults_per_hour = 0
[fleet]
own_hardware_limit_percent = 100
"""


class Sampler(threading.Thread):
    """Reads Slurm's Reasons in short intervals. `history` has the number of claims at each time."""

    def __init__(self, cluster: SlurmCluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.is_over = threading.Event()
        self.history: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self.is_over.is_set():
            began = time.monotonic()
            found = self.cluster.attempt("sinfo", "-h", "-N", "-t", "drain,down", "-O", "NodeList:65,Reason:400")
            count = sum(CLAIMED in line for line in found.stdout.splitlines())
            self.history.append((began, count))
            self.is_over.wait(max(0.0, SAMPLE_SECONDS - (time.monotonic() - began)))


def measure_limit(nodes: int, max_concurrent: int, seed: int) -> Result:
    """Let all nodes fail at once, and wait until all are in service."""
    result = Result(f"{nodes} nodes that fail together, max_concurrent = {max_concurrent}, each reset takes 2 s")
    config = CONFIG.replace("stop_services", f"max_concurrent = {max_concurrent}\nstop_services") + LIMIT_CONFIG
    with contextlib.ExitStack() as ends:
        cluster = ends.enter_context(SlurmCluster(nodes=nodes + 1, gpus=0, message_timeout=60))
        sites = []
        for name in cluster.names[:nodes]:
            site = Site(cluster, name, ends.enter_context(folder()), config, interval=INTERVAL)
            site.set_mode("slow")
            ends.enter_context(site.daemon)
            sites.append(site)
        sampler = Sampler(cluster)
        ends.callback(sampler.join)
        ends.callback(sampler.is_over.set)
        began = time.monotonic()
        for site in sites:
            site.daemon.kernel_line(xid_line(119))
        until(lambda: all("healthd: " in cluster.node(s.node).reason for s in sites), "all are drained", 600)
        sampler.start()
        waiting = {site.node: site for site in sites}
        while waiting and time.monotonic() < began + LONGEST_SECONDS:
            time.sleep(0.5)
            for name in [name for name in waiting if "DRAIN" not in cluster.node(name).flags]:
                del waiting[name]
                result.seconds.setdefault("until a node was back in service", []).append(time.monotonic() - began)
        for site in waiting.values():
            text = f"not in service after {LONGEST_SECONDS:.0f} s: {cluster.node(site.node)}"
            result.add(Violation("limit", 1, seed, site.node, text, log_tail(site.daemon)))
        result.counts["samples of Slurm's Reasons"] = len(sampler.history)
        result.counts["claims at the same time, at most"] = max(count for _, count in sampler.history)
        result.counts["milliseconds with more claims than allowed, at most"] = round(
            1000 * longest_over(sampler.history, max_concurrent)
        )
        intervals = [pair for s in sites for pair in zip(s.reset_times(), s.reset_times("resets.ended"), strict=True)]
        result.counts["steps at the same time, at most"] = steps = most_at_once(intervals)
        result.counts["resets"] = len(intervals)
        if steps > max_concurrent:
            result.add(Violation("limit", 1, seed, "all nodes", f"{steps} steps at the same time"))
        for site in sites:
            if site.resets() != 1:
                text = f"{site.resets()} resets for one fault"
                result.add(Violation("limit", 1, seed, site.node, text, log_tail(site.daemon)))
    return result


def most_at_once(intervals: Iterable[tuple[float, float]]) -> int:
    """Return how many of the intervals (start, end) overlap at most."""
    changes = sorted((time, change) for began, ended in intervals for time, change in ((began, 1), (ended, -1)))
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def longest_over(history: Iterable[tuple[float, int]], limit: int) -> float:
    """Return the longest time in seconds during which consecutive samples (time, count) exceeded the limit."""
    longest, since = 0.0, None
    for moment, count in history:
        if since is not None:
            longest = max(longest, moment - since)
        if count <= limit:
            since = None
        elif since is None:
            since = moment
    return longest
