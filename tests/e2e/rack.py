"""Racks of made GB200 NVL72 trays: a real Slurm with topology/block, and a real healthd for each tray.

Rack 1 has all 18 trays of an NVL72, rack 2 has three. A tray is a fake machine with four GPUs. Each GPU has a link to
each switch of its rack. The number of this link is the same on all GPUs here, which may differ on real machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from healthd_daemon import REPOSITORY, Healthd, write_atomically
from ports import free_ports
from slurm_cluster import SlurmCluster
from waiting import until

from healthd.common.slurm.drain_reason import domain_id

GPUS = 4
RACK_1 = tuple(f"n{number}" for number in range(1, 19))
RACK_2 = ("n19", "n20", "n21")
UUIDS = {
    **dict.fromkeys(RACK_1, "00000001-0000-0000-0000-000000000001"),
    **dict.fromkeys(RACK_2, "00000001-0000-0000-0000-000000000002"),
}
DOMAIN_1, DOMAIN_2 = domain_id(UUIDS["n1"]), domain_id(UUIDS["n19"])
DOMAIN_LIMIT = 2  # the default of domain_limit_nodes
VERSION = "24.11"  # 22.05 has no topology/block
# A block has at least as many nodes as the smallest of BlockSizes (slurm.schedmd.com/topology.conf.html).
TOPOLOGY = "BlockName=rack1 Nodes=n[1-18]\nBlockName=rack2 Nodes=n[19-21]\nBlockSizes=3\n"
ALL_LINKS_UP: Mapping[int, Iterable[int]] = MappingProxyType({})
# The checks of a tray's GPUs and domain. The others would check this machine.
CHECKS = ("gpu_access", "gpu_count", "gpu_fabric", "gpu_nvlink", "gpu_recovery_action", "imex")
NEED_SETTINGS = ("__init__", "exec", "match", "mount")
# The partition has room for all nodes, as in a cluster of many racks. The limit of a domain has its default.
SETTINGS = """\
interval_seconds = 2.0
[fleet]
limit_percent = 100.0
own_hardware_limit_percent = 100.0
[slurm]
own_faults_per_hour = 0
shared_wait_seconds = 1.0
[checks.gpu_nvlink]
inactive_confirm_seconds = 0.0
"""


@dataclasses.dataclass(frozen=True)
class SlurmNode:
    """A node in one output of sinfo."""

    state: str
    reason: str
    reason_time: str

    @property
    def is_drained(self) -> bool:
        return self.state.rstrip("*~#!%$@^-+").startswith("drain")


Snapshot = Mapping[str, SlurmNode]


class Racks:
    """All trays, each with a daemon, and the states that Slurm has shown since the start.

    daemons      by node name
    addresses    of the metrics pages, by node name
    snapshots    outputs of sinfo, the oldest first; none while slurmctld does not answer
    """

    def __init__(self, cluster: SlurmCluster, directory: Path, stack: contextlib.ExitStack) -> None:
        self.cluster = cluster
        self.snapshots: list[Snapshot] = []
        self._directory = directory
        self._ended = threading.Event()
        self.addresses = {node: f"127.0.0.1:{free_ports(1, stack)}" for node in UUIDS}
        self.daemons = {node: self._daemon(node) for node in UUIDS}

    def _daemon(self, node: str) -> Healthd:
        folder = self._directory / node
        folder.mkdir()
        self.set_links([node], ALL_LINKS_UP)
        flags = ("--mode", "act", "--node-name", node, "--listen", self.addresses[node])
        return Healthd(
            *flags,
            config=SETTINGS + disabled_checks(),
            directory=folder,
            env=self.cluster.env,
            fake_nvml=str(self._scenario(node)),
            wait=False,
        )

    def _scenario(self, node: str) -> Path:
        return self._directory / f"{node}.toml"

    def set_links(self, nodes: Iterable[str], down: Mapping[int, Iterable[int]]) -> None:
        """Make these links of these nodes inactive, by GPU, and all others active."""
        for node in nodes:
            tables = "".join(
                f'[gpu.{gpu}]\nfabric_cluster = "{UUIDS[node]}"\nnvlink_inactive = {sorted(down.get(gpu, ()))}\n'
                for gpu in range(GPUS)
            )
            write_atomically(self._scenario(node), f'profile = "gb200-nvl72"\n{tables}')

    def fail_switch(self, nodes: Iterable[str], switch: int) -> None:
        self.set_links(nodes, {gpu: [switch] for gpu in range(GPUS)})

    def repair(self, nodes: Iterable[str] = tuple(UUIDS)) -> None:
        self.set_links(nodes, ALL_LINKS_UP)

    def drained(self, nodes: Iterable[str] = tuple(UUIDS)) -> set[str]:
        """Return the nodes that Slurm's last answer shows as drained."""
        return {node for node in nodes if self.snapshots[-1][node].is_drained}

    def wait_for_snapshots(self, count: int = 2) -> None:
        """Wait for `count` more answers of slurmctld."""
        wanted = len(self.snapshots) + count
        until(lambda: len(self.snapshots) >= wanted, "slurmctld answers sinfo")

    def wait_until(self, is_reached: Callable[[], bool], condition: str, seconds: float = 240.0) -> None:
        try:
            until(is_reached, condition, seconds)
        except AssertionError as error:
            states = {node: value.state for node, value in self.snapshots[-1].items()}
            raise AssertionError(f"{error}; {states}") from error

    def wait_until_limited(self, nodes: Iterable[str]) -> set[str]:
        """Wait until each of these nodes has counted its domain: DOMAIN_LIMIT of them are drained by healthd, and the
        domain's limit holds the drains of the others. Return the drained ones.

        Before that, nodes that count at the same moment may be drained together, until their second count.
        """
        drained: set[str] = set()

        def is_limited() -> bool:
            try:
                answers = {node: self.daemons[node].status()["slurm"] for node in nodes}
            except OSError:  # a daemon starts
                return False
            drained.clear()
            drained.update(node for node, slurm in answers.items() if slurm["owner"] == "healthd")
            held = [slurm["fleet_hold"] or {} for node, slurm in answers.items() if node not in drained]
            is_counted = all(hold.get("times") and hold["domain"] for hold in held)
            return len(drained) == DOMAIN_LIMIT and is_counted and self.drained(nodes) == drained

        self.wait_until(is_limited, "each tray has counted its domain")
        return set(drained)

    def wait_until_in_service(self) -> None:
        """Wait until all daemons are healthy and no node is drained."""

        def is_in_service() -> bool:
            return not self.drained() and all(
                status["health"] == "healthy" and not status["slurm"]["fleet_hold"]
                for status in (daemon.status() for daemon in self.daemons.values())
            )

        self.wait_until(is_in_service, "all trays are in service")

    def most_drained(self, nodes: Iterable[str], since: int) -> int:
        """Return how many of these nodes Slurm has shown as drained at the same time, from snapshot `since` on."""
        return max(sum(snapshot[node].is_drained for node in nodes) for snapshot in self.snapshots[since:])

    def record(self) -> None:
        """Run sinfo until the end."""
        command = ("sinfo", "-h", "-N", "-o", "%N|%T|%H|%E")
        while not self._ended.wait(0.3):
            result = self.cluster.attempt(*command)
            rows = [line.split("|", 3) for line in result.stdout.splitlines()]
            if result.returncode == 0 and len(rows) == len(UUIDS):
                self.snapshots.append({name: SlurmNode(state, reason, at) for name, state, at, reason in rows})

    def end(self) -> None:
        self._ended.set()

    def stop(self) -> None:
        """Stop all daemons at once."""
        with ThreadPoolExecutor(len(self.daemons)) as pool:
            list(pool.map(Healthd.stop, self.daemons.values()))


def disabled_checks() -> str:
    names = sorted(path.stem for path in (REPOSITORY / "checks").glob("*.py"))
    return "".join(f"[checks.{name}]\nenabled = false\n" for name in names if name not in (*CHECKS, *NEED_SETTINGS))


@contextlib.contextmanager
def run_racks() -> Iterator[Racks]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rack.")))
        slurm = Path(tempfile.mkdtemp(prefix="slurm."))
        (slurm / "topology.conf").write_text(TOPOLOGY)
        cluster = stack.enter_context(
            SlurmCluster(
                slurm,
                nodes=len(UUIDS),
                gpus=GPUS,
                extra_conf=("TopologyPlugin=topology/block",),
                version=VERSION,
                accounting=True,
            )
        )
        racks = Racks(cluster, folder, stack)
        recorder = threading.Thread(target=racks.record)
        recorder.start()
        stack.callback(recorder.join)
        stack.callback(racks.end)
        for daemon in racks.daemons.values():
            stack.enter_context(daemon)
        stack.callback(racks.stop)
        for daemon in racks.daemons.values():
            daemon.wait_until(lambda s: s["round"].get("seconds", 0) > 0, "the first round is over")
        yield racks
