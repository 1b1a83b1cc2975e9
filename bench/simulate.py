"""`make simulate`: simulate the fleet limit of a cluster on a bad day.

The first run has 10,000 nodes and a modelled slurmctld (modelled_slurmctld.py). The second run has 1,000 nodes, a real
slurmctld and real commands. In both runs, each node decides with healthd's own code; only the clock is simulated
(fleet.py). `--write` writes the tables to docs/fleet-limit.md; scripts/fleet_limit_figure.py draws the picture. Exit
status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "bench"), str(REPOSITORY / "tests" / "e2e")]

from fleet import Fault, Fleet, dead_file_server, hardware_faults  # noqa: E402
from modelled_slurmctld import Slurmctld, count_requests  # noqa: E402
from slurm_cluster import SlurmCluster  # noqa: E402

from healthd.agent.settings.config import FleetLimits  # noqa: E402
from healthd.agent.slurm import reconcile  # noqa: E402
from healthd.agent.slurm.fleet_limit import limit_for  # noqa: E402
from healthd.common.slurm.commands import ENVIRONMENT, CommandResult  # noqa: E402

NODES, REAL_NODES = 10_000, 1_000
LIMITS = FleetLimits()
SEED = 5
HOUR = 3600.0
STEP = 30.0  # seconds between two points of the plot
SERVER_DIES, WAVE = 600.0, 1500.0  # seconds
# The targets. Requests per second are means over ten seconds, of all nodes together.
MAX_LIMIT_SHARE = 1.2
MAX_REQUESTS = 300.0
WAVE_SECONDS = 30.0  # time by which all nodes of the wave must be drained
BACK_SECONDS = 900.0  # time by which all nodes must be back after the file server is: two rounds and one query
PAGE = REPOSITORY / "docs/fleet-limit.md"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario. `slurmctld_away`: an outage of slurmctld. `has_targets`: False if the scenario has no targets."""

    name: str
    faults: tuple[Fault, ...]
    slurmctld_away: tuple[float, float] = (0.0, 0.0)
    has_targets: bool = True


@dataclass(slots=True)
class Outcome:
    """Results of a scenario. `drained`: number of drained nodes at each STEP. `peak`: maximum number at any time.

    shared_peak       maximum number of drained nodes without an own fault
    wave              number of nodes with an own fault; wave_drained: how many were drained; wave_seconds: when the
                      last was
    left_drained      nodes that are still drained at the end, without a fault
    back_seconds      time from the end of the fault until the last node is back
    requests, tables  maximum per second; total_requests: number in total; busy: highest share of slurmctld's time, in
                      percent
    """

    name: str
    nodes: int
    drained: list[int] = field(default_factory=list)
    peak: int = 0
    shared_limit: int = 0
    shared_peak: int = 0
    wave: int = 0
    wave_drained: int = 0
    wave_seconds: float = 0.0
    left_drained: int = 0
    back_seconds: float = 0.0
    requests: float = 0.0
    tables: float = 0.0
    total_requests: int = 0
    busy: float = 0.0
    seconds: float = 0.0

    def missed(self) -> list[str]:
        aims = {
            "nodes drained for a shared cause": self.shared_peak <= MAX_LIMIT_SHARE * self.shared_limit,
            "wave drained": self.wave_drained == self.wave,
            "wave drained in time": self.wave_seconds <= WAVE_SECONDS,
            "all nodes back": self.left_drained == 0 and self.back_seconds <= BACK_SECONDS,
            "requests": self.requests <= MAX_REQUESTS,
        }
        return [name for name, met in aims.items() if not met]


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate the fleet limit of a cluster on a bad day.")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/fleet-limit.md")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--real-nodes", type=int, default=REAL_NODES, help="0: skip the real slurmctld")
    args = parser.parse_args()
    names = [f"n{i:05d}" for i in range(args.nodes)]
    outcomes, missed = [], []
    for scenario in scenarios(names):
        log_progress(f"{args.nodes} nodes: {scenario.name} ...")
        outcomes.append(simulate(scenario, names))
        missed += [f"{scenario.name}: {aim}" for aim in outcomes[-1].missed() if scenario.has_targets]
    modelled = table(outcomes)
    print(modelled)
    print(text_plot(outcomes[2]))
    real = ""
    if args.real_nodes and os.geteuid() == 0:
        outcome, counted = against_real_slurmctld(args.real_nodes)
        missed += [f"{outcome.name}: {aim}" for aim in outcome.missed()]
        if counted != outcome.total_requests:
            missed.append(f"sdiag counted {counted} requests, not {outcome.total_requests}")
        real = f"{table([outcome])}\nRequests in total: {counted:,} by slurmctld's own count (`sdiag`), "
        real += f"{outcome.total_requests:,} by the commands that ran."
        print(real)
    elif args.real_nodes:
        log_progress("not root: skipping the real slurmctld")
    for aim in missed:
        print(f"missed: {aim}")
    if args.write:
        write(modelled, real)
    return 1 if missed else 0


# Ten thousand nodes read the same table.
parse_fleet_once = functools.lru_cache(maxsize=4)(reconcile.parse_fleet)


def log_progress(text: str) -> None:
    print(f"simulate: {text}", file=sys.stderr, flush=True)


def scenarios(names: Sequence[str]) -> list[Scenario]:
    server = dead_file_server(names, SERVER_DIES, SERVER_DIES + HOUR)
    wave = hardware_faults(names[7::100], WAVE, 9 * HOUR)
    return [
        Scenario("a file server is dead for an hour", (server,)),
        Scenario("1 % of the nodes lose a GPU in the same second", (wave,)),
        Scenario("both", (server, wave)),
        Scenario("both, and slurmctld is away for 20 minutes", (server, wave), (900.0, 2100.0), has_targets=False),
        Scenario(
            "every node loses a GPU in the same second", (hardware_faults(names, WAVE, WAVE + HOUR),), has_targets=False
        ),
    ]


def simulate(scenario: Scenario, names: list[str]) -> Outcome:
    epoch = 1.8e9
    slurmctld = Slurmctld(names, (epoch + scenario.slurmctld_away[0], epoch + scenario.slurmctld_away[1]))
    fleet = Fleet(names, slurmctld, LIMITS, epoch)
    outcome = play(scenario, fleet, lambda: set(slurmctld.drained))
    outcome.peak = slurmctld.peak
    outcome.shared_peak = max(outcome.shared_peak, slurmctld.peak - outcome.wave)
    outcome.requests, outcome.tables = highest_mean(slurmctld.requests), highest_mean(slurmctld.tables)
    outcome.total_requests = sum(slurmctld.requests.values())
    outcome.busy = 100 * highest_mean(slurmctld.busy)
    return outcome


def play(scenario: Scenario, fleet: Fleet, drained: Callable[[], set[str]]) -> Outcome:
    """Play a scenario for two and a half hours, which covers the recovery. The result is repeatable."""
    random.seed(SEED)
    reconcile.parse_fleet = parse_fleet_once  # type: ignore[assignment]
    begun, names = time.monotonic(), set(fleet.nodes)
    for fault in scenario.faults:
        fleet.add_fault(fault)
    wave = {name for fault in scenario.faults if not fault.shared for name in fault.nodes}
    outcome = Outcome(scenario.name, len(names), wave=len(wave))
    outcome.shared_limit = limit_for(len(names), LIMITS, own_hardware=False)
    not_drained, hours = set(wave), 2.5
    steps = sorted({*(i * STEP for i in range(1, int(hours * HOUR / STEP) + 1)), *(WAVE + s for s in range(1, 30))})
    broken_until = max((fault.end for fault in scenario.faults if fault.end < hours * HOUR), default=0.0)
    for moment in steps:
        fleet.run(moment)
        drained_nodes = drained()
        if not_drained and not not_drained.isdisjoint(drained_nodes):
            not_drained -= drained_nodes
            # some of these nodes may have been drained for the file server
            outcome.wave_seconds = max(0.0, moment - WAVE)
        outcome.shared_peak = max(outcome.shared_peak, len(drained_nodes - wave))
        if moment > broken_until and drained_nodes - permanent_faults(scenario, hours):
            outcome.back_seconds = moment - broken_until
        if moment % STEP == 0:
            outcome.drained.append(len(drained_nodes))
    outcome.peak = max(outcome.drained)
    outcome.wave_drained = len(wave - not_drained)
    outcome.left_drained = len(drained() - permanent_faults(scenario, hours))
    outcome.seconds = time.monotonic() - begun
    return outcome


def permanent_faults(scenario: Scenario, hours: float) -> set[str]:
    """Nodes whose fault lasts longer than the simulation."""
    return {name for fault in scenario.faults if fault.end > hours * HOUR for name in fault.nodes}


def highest_mean(by_second: Mapping[int, float], seconds: int = 10) -> float:
    """Return the highest mean over the given number of consecutive seconds."""
    sums: Counter[int] = Counter()
    for second, value in by_second.items():
        for begins in range(second - seconds + 1, second + 1):
            sums[begins] += value  # type: ignore[assignment]
    return max(sums.values(), default=0) / seconds


# --- against a real slurmctld


class RealSlurmctld:
    """Run the commands one after another. On the simulated clock, each command takes as long as it really took."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.environment = {**cluster.env, **ENVIRONMENT}
        self.requests: Counter[int] = Counter()
        self.tables: Counter[int] = Counter()

    def run(self, argv: tuple[str, ...], now: float) -> tuple[CommandResult, float]:
        count, is_table = count_requests(argv)
        self.requests[int(now)] += count
        self.tables[int(now)] += is_table
        begun = time.monotonic()
        done = subprocess.run(argv, env=self.environment, capture_output=True, timeout=60)
        seconds = time.monotonic() - begun
        return CommandResult(
            done.returncode, done.stdout, done.stderr.decode(errors="replace"), now, seconds
        ), now + seconds

    def drained(self) -> set[str]:
        text = self.cluster.run("sinfo", "-h", "-N", "-p", "fleet", "-O", "NodeList:30,StateComplete:60,Reason:9")
        rows = (line.split() for line in text.splitlines())
        return {row[0] for row in rows if "drain" in row[1] and row[-1] == "healthd:"}


def against_real_slurmctld(nodes: int) -> tuple[Outcome, int]:
    """Play on a real slurmctld with nodes without slurmd. Returns the outcome and sdiag's number of requests."""
    names = [f"f{i}" for i in range(1, nodes + 1)]
    lines = [
        f"NodeName=f[1-{nodes}] NodeAddr=127.0.0.1 Port=9 CPUs=1 RealMemory=100 State=UNKNOWN",
        f"PartitionName=fleet Nodes=f[1-{nodes}]",
        "SlurmdTimeout=0",
    ]
    with SlurmCluster(nodes=1, gpus=0, extra_conf=lines) as cluster:
        log_progress(f"{nodes} nodes on a real slurmctld: both ...")
        slurmctld = RealSlurmctld(cluster)
        extra_requests = 0

        def drained() -> set[str]:
            nonlocal extra_requests
            extra_requests += 2
            return slurmctld.drained()

        scenario = next(s for s in scenarios(names) if s.name == "both")
        before = count_served_requests(cluster)
        outcome = play(scenario, Fleet(names, slurmctld, LIMITS, float(int(time.time()))), drained)
        after = count_served_requests(cluster)
        outcome.requests, outcome.tables = highest_mean(slurmctld.requests), highest_mean(slurmctld.tables)
        outcome.total_requests = sum(slurmctld.requests.values())
        outcome.name += ", with a real slurmctld"
        return outcome, after - before - extra_requests


def count_served_requests(cluster: SlurmCluster) -> int:
    """Return how many requests about nodes, partitions and itself slurmctld has served."""
    kinds = r"REQUEST_(NODE_INFO|NODE_INFO_SINGLE|PARTITION_INFO|UPDATE_NODE|BUILD_INFO|PING)"
    return sum(number for name, number in cluster.sdiag_counts().items() if re.fullmatch(kinds, name))


# --- tables


def table(outcomes: Sequence[Outcome]) -> str:
    head = (
        *("", "nodes", "max drained", "drained half an hour later", "max for the file server", "of the limit"),
        *("own faults drained", "last after", "all back after", "requests/s", "whole tables/s", "slurmctld busy"),
    )
    rows = [head, ("---",) * len(head)]
    for o in outcomes:
        is_shared = "server" in o.name or o.name.startswith("both")
        rows.append(
            (
                o.name,
                f"{o.nodes:,}",
                f"{o.peak:,}",
                f"{o.drained[int((WAVE + HOUR / 2) / STEP)]:,}",
                *((f"{o.shared_peak:,}", f"{o.shared_peak / o.shared_limit:.0%}") if is_shared else ("", "")),
                *((f"{o.wave_drained:,} of {o.wave:,}", f"{o.wave_seconds:.0f} s") if o.wave else ("", "")),
                f"{o.back_seconds / 60:.0f} min" if o.back_seconds else "",
                f"{o.requests:.0f}",
                f"{o.tables:.1f}",
                f"{o.busy:.0f} %" if o.busy else "",
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def text_plot(outcome: Outcome, width: int = 90, height: int = 12) -> str:
    """Return a text plot of drained nodes over time."""
    top = max(*outcome.drained, 1)
    columns = [outcome.drained[i * len(outcome.drained) // width] for i in range(width)]
    lines = []
    for level in range(height, 0, -1):
        bar = "".join("#" if value * height >= level * top - top / 2 and value else " " for value in columns)
        lines.append(f"{level * top // height:6} |{bar}")
    hours = len(outcome.drained) * STEP / HOUR
    return f"drained nodes over {hours:g} hours: {outcome.name}\n" + "\n".join(lines) + f"\n       +{'-' * width}\n"


def write(modelled: str, real: str) -> None:
    text = PAGE.read_text("utf-8")
    for name, content in (("modelled", modelled), ("real", real)):
        begin, end = f"<!-- {name}: make simulate -->\n", f"<!-- end of {name} -->"
        if content:
            before, _, after_begin = text.partition(begin)
            text = before + begin + "\n" + content.strip() + "\n\n" + end + after_begin.partition(end)[2]
    PAGE.write_text(text, "utf-8")
    log_progress(f"{PAGE.relative_to(REPOSITORY)}: written")


if __name__ == "__main__":
    sys.exit(main())
