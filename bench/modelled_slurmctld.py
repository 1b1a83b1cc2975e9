"""A slurmctld as a model: it answers the commands that healthd sends about nodes, one request after another, each at
its price, and counts them. For fleets that no test machine carries.

Requests are served in the order in which they come, so what one does is done when it is asked; its answer comes when
those before it are served. Prices are those of slurmctld 22.05 with 10,000 nodes (docs/fleet-limit.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

from healthd.common.slurm import commands
from healthd.common.slurm.commands import FLEET_COLUMNS, NODE_COLUMNS, CommandResult

SECONDS_A_COMMAND = 0.01  # to start a program, ask munge, connect
SECONDS_A_REQUEST = 0.0002
SECONDS_A_NODE_IN_THE_TABLE = 1.3e-6
MESSAGE_TIMEOUT = 10.0
STARTED = 1_799_000_000  # in the days before the simulation begins
AWAY = CommandResult(1, b"", "slurm_load error: Unable to contact slurm controller (connect failure)\n")
LATE = CommandResult(1, b"", "slurm_load error: Socket timed out on send/recv operation\n")


def requests_of(argv: tuple[str, ...]) -> tuple[int, bool]:
    """How many requests a command makes, and whether one of them is for the whole table of nodes. sinfo asks for the
    partitions too, and `scontrol show config` pings each slurmctld."""
    if argv[0] == "sinfo":
        return 2, "-n" not in argv
    return (2 if argv == commands.config() else 1), False


@dataclass(slots=True)
class Node:
    reason: str = ""
    since: int = 0


@dataclass(slots=True)
class Slurmctld:
    """One partition, "all". `away`: (from, until) in which nobody answers.

    requests  the second -> how many it was asked, of all kinds; `tables`: of whole tables of nodes
    busy      the second -> for how many seconds of its own those keep it
    peak      the most nodes that were drained at one moment
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
    table: bytes = b""  # as sinfo shows it now, "" = to be made anew

    def __post_init__(self) -> None:
        self.nodes = {name: Node() for name in self.names}

    def run(self, argv: tuple[str, ...], now: float) -> tuple[CommandResult, float]:
        """The command's result, and when it has ended."""
        asked = now + SECONDS_A_COMMAND
        if self.away[0] <= asked < self.away[1]:
            return AWAY, asked + 9.0
        count, is_table = requests_of(argv)
        price = count * SECONDS_A_REQUEST + is_table * len(self.nodes) * SECONDS_A_NODE_IN_THE_TABLE
        self.requests[int(asked)] += count
        self.tables[int(asked)] += is_table
        self.free_at = max(self.free_at, asked) + price
        self.busy[int(asked)] += price
        result = CommandResult(0, self._answer(argv, int(self.free_at)))
        if self.free_at - asked > MESSAGE_TIMEOUT:
            return LATE, asked + MESSAGE_TIMEOUT
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

    def _update(self, name: str, words: dict[str, str], second: int) -> bytes:
        node, self.table = self.nodes[name], b""
        if words["State"] == "DRAIN":
            if node.reason != words["Reason"]:
                node.since = second
            node.reason = words["Reason"]
            self.drained[name] = node
            self.peak = max(self.peak, len(self.drained))
        else:
            node.reason = ""
            self.drained.pop(name, None)
        return b""

    def _table(self) -> bytes:
        """sinfo makes one row of nodes that are alike."""
        alike = sorted((node.since, node.reason) for node in self.drained.values())
        rows = [
            _row(("all", "idle+drain", str(since), reason[:9], str(len(list(group)))), FLEET_COLUMNS)
            for (since, reason), group in groupby(alike)
        ]
        rest = len(self.nodes) - len(self.drained)
        return b"".join(rows) + _row(("all", "idle", "Unknown", "none", str(rest)), FLEET_COLUMNS) * bool(rest)


def _row(values: tuple[str, ...], columns: tuple[tuple[str, int], ...]) -> bytes:
    """Pad and cut by bytes, as sinfo does (printf("%.*s") and blanks)."""
    cells = (value.encode()[:width].ljust(width) for value, (_, width) in zip(values, columns, strict=True))
    return b"".join(cells) + b"\n"
