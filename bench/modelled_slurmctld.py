"""A model of slurmctld for fleets that are too large for a test machine.

It answers the commands that healthd sends about nodes, and counts the requests. Requests are served one after another,
in order of arrival, and each takes a fixed time. A request takes effect when it arrives, and is answered after all
requests before it have been served. The times are those of slurmctld 22.05 with 10,000 nodes (docs/fleet-limit.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

from healthd.common.slurm import commands
from healthd.common.slurm.commands import FLEET_COLUMNS, NODE_COLUMNS, CommandResult

SECONDS_PER_COMMAND = 0.01  # time to start a program, contact munge and connect
SECONDS_PER_REQUEST = 0.0002
TABLE_SECONDS_PER_NODE = 1.3e-6
MESSAGE_TIMEOUT = 10.0
STARTED = 1_799_000_000  # a time in the days before the simulation begins
UNREACHABLE = CommandResult(1, b"", "slurm_load error: Unable to contact slurm controller (connect failure)\n")
TIMED_OUT = CommandResult(1, b"", "slurm_load error: Socket timed out on send/recv operation\n")


def count_requests(argv: tuple[str, ...]) -> tuple[int, bool]:
    """Return how many requests a command sends, and True if one of them reads the whole table of nodes.

    sinfo also requests the partitions, and `scontrol show config` pings each slurmctld.
    """
    if argv[0] == "sinfo":
        return 2, "-n" not in argv
    return (2 if argv == commands.config() else 1), False


@dataclass(slots=True)
class Node:
    reason: str = ""
    since: int = 0


@dataclass(slots=True)
class Slurmctld:
    """One slurmctld with one partition, "all". `away` is the interval without answers.

    requests  for each second, the number of requests of all kinds; `tables`: the number that read the whole table of
              nodes
    busy      for each second, how many seconds it takes to process the requests of that second
    peak      the maximum number of nodes drained at one time
    """

    names: list[str]
    away: tuple[float, float] = (0.0, 0.0)
    nodes: dict[str, Node] = field(default_factory=dict)
    drained: dict[str, Node] = field(default_factory=dict)
    free_at: float = 0.0
    requests: Counter[int] = field(default_factory=Counter)
    tables: Counter[int] = field(default_factory=Counter)
    busy: Counter[int] = field(default_factory=Counter)
    peak: int = 0
    table: bytes = b""  # current output of sinfo, "" if it is outdated

    def __post_init__(self) -> None:
        self.nodes = {name: Node() for name in self.names}

    def run(self, argv: tuple[str, ...], now: float) -> tuple[CommandResult, float]:
        """Return the result of a command and the time at which it ends."""
        arrival = now + SECONDS_PER_COMMAND
        if self.away[0] <= arrival < self.away[1]:
            return UNREACHABLE, arrival + 9.0
        count, is_table = count_requests(argv)
        price = count * SECONDS_PER_REQUEST + is_table * len(self.nodes) * TABLE_SECONDS_PER_NODE
        self.requests[int(arrival)] += count
        self.tables[int(arrival)] += is_table
        self.free_at = max(self.free_at, arrival) + price
        self.busy[int(arrival)] += price
        result = CommandResult(0, self._answer(argv, int(self.free_at)))
        if self.free_at - arrival > MESSAGE_TIMEOUT:
            return TIMED_OUT, arrival + MESSAGE_TIMEOUT
        return result, self.free_at

    def _answer(self, argv: tuple[str, ...], second: int) -> bytes:
        if argv[:2] == ("scontrol", "update"):
            return self._update(argv[2].partition("=")[2], dict(word.split("=", 1) for word in argv[3:]), second)
        if argv == commands.config():
            return f"BOOT_TIME               = {STARTED}\n".encode()
        if "partition" in argv:
            return f"PartitionName=all Nodes=n[1-{len(self.nodes)}] TotalNodes={len(self.nodes)}\n".encode()
        if "-n" not in argv:
            self.table = self.table or self._table()
            return self.table
        node = self.nodes[argv[argv.index("-n") + 1]]
        drained = ("idle+drain", str(node.since), "root", node.reason)
        state = drained if node.reason else ("idle", "Unknown", "Unknown", "none")
        return _row(("all", "1", *state, "gpu:8"), NODE_COLUMNS)

    def _update(self, name: str, assignments: dict[str, str], second: int) -> bytes:
        node, self.table = self.nodes[name], b""
        if assignments["State"] == "DRAIN":
            if node.reason != assignments["Reason"]:
                node.since = second
            node.reason = assignments["Reason"]
            self.drained[name] = node
            self.peak = max(self.peak, len(self.drained))
        else:
            node.reason = ""
            self.drained.pop(name, None)
        return b""

    def _table(self) -> bytes:
        """Return sinfo's output. All nodes with equal values share one row."""
        drained_keys = sorted((node.since, node.reason) for node in self.drained.values())
        rows = [
            _row(("all", "idle+drain", str(since), reason[:9], str(len(list(group)))), FLEET_COLUMNS)
            for (since, reason), group in groupby(drained_keys)
        ]
        healthy_count = len(self.nodes) - len(self.drained)
        return b"".join(rows) + _row(("all", "idle", "Unknown", "none", str(healthy_count)), FLEET_COLUMNS) * bool(
            healthy_count
        )


def _row(values: tuple[str, ...], columns: tuple[tuple[str, int], ...]) -> bytes:
    """Pad and cut by bytes, as sinfo does (printf("%.*s") and blanks)."""
    cells = (value.encode()[:width].ljust(width) for value, (_, width) in zip(values, columns, strict=True))
    return b"".join(cells) + b"\n"
