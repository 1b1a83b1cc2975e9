"""Run the soak from its first step to its report."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from slurm_cluster import SlurmCluster

from soak.actions import DECK, Action
from soak.growth import Sample, growth_problems, table
from soak.node import Node

MAX_KIB = 1024.0  # maximum growth of own memory in an hour after the warm-up
MAX_SERIES = 0.0
MIN_CARDS = 8
NO_LIMIT = float("inf")
SETTLE_SECONDS = 600.0  # time until temporary descriptors and processes are gone on a busy machine


class SoakError(Exception):
    """A check of the soak failed. The message says what failed and how to repeat it."""


@dataclass
class Soak:
    """State of a soak. seed: seed of all random choices.

    done: count of each event. samples: each node's samples at rest.
    """

    seed: int
    nodes: Sequence[Node]
    steps: int = 0
    rests: int = 0
    began: float = field(default_factory=time.monotonic)
    done: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    happening: str = "the start"

    def run(self, seconds: float, max_kib: float = MAX_KIB, max_series: float = MAX_SERIES, verbosity: int = 0) -> None:
        """Play decks of all events until the time is over, but at least the whole first deck and a few cards of the
        second.

        `verbosity`: 1 prints each rest, 2 each step. Raises SoakError.
        """
        try:
            if max_kib < NO_LIMIT:
                for node in self.nodes:
                    self.happening = f"the first faults of {node.name}"
                    node.fill()
            while self.rests < 2 or time.monotonic() - self.began < seconds:
                for number, (node, happening) in enumerate(self.deck(), 1):
                    self.step(node, happening, verbosity > 1)
                    if self.rests and number >= MIN_CARDS and time.monotonic() - self.began > seconds:
                        break
                self.check_at_rest(verbosity > 0)
            for node in self.nodes:
                self.require_none(
                    f"{node.name} grew", growth_problems(self.samples_of_last_daemon(node), max_kib, max_series)
                )
        except SoakError:
            raise
        except Exception as error:
            raise SoakError(self.describe_failure(f"{type(error).__name__}: {error}")) from error

    def deck(self) -> list[tuple[Node, Action]]:
        cards = [(node, happening) for node in self.nodes for happening in DECK]
        Random(f"{self.seed} deck {self.rests}").shuffle(cards)
        return cards

    def step(self, node: Node, happening: Action, is_verbose: bool) -> None:
        self.steps += 1
        self.happening = f"{happening.__name__} on {node.name}"
        if is_verbose:
            print(f"soak: step {self.steps}: {self.happening}", file=sys.stderr, flush=True)
        happening(node, Random(f"{self.seed} step {self.steps}"))
        self.done[happening.__name__] += 1

    def check_at_rest(self, is_verbose: bool) -> None:
        """Repair everything, then check the events and that counts are back to their first values."""
        self.rests += 1
        self.happening = f"rest {self.rests}"
        for node in self.nodes:
            node.repair_all()
            self.require_none(node.name, node.find_problems())
            sample = self.settled(node)
            first = self.samples.get(node.name, [sample])[0]
            self.require_none(f"{node.name} has more open", growth_problems([first, sample], NO_LIMIT, NO_LIMIT))
            self.samples.setdefault(node.name, []).append(sample)
        if is_verbose:
            seconds = time.monotonic() - self.began
            print(f"soak: {seconds:.0f} s, {self.steps} steps, {self.rests} rests", file=sys.stderr, flush=True)

    def settled(self, node: Node) -> Sample:
        """Measure as soon as no value exceeds that of the first rest, or after SETTLE_SECONDS."""
        earlier = self.samples.get(node.name)
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            assert node.daemon.process is not None
            seconds, number = time.monotonic() - self.began, node.daemon.status()["round"]["number"]
            try:
                values = node.measure()
            except OSError:  # a process ended during the measurement
                if time.monotonic() > end:
                    raise
                continue
            sample = Sample(seconds, number, node.daemon.process.pid, values)
            if (
                earlier is None
                or not growth_problems([earlier[0], sample], NO_LIMIT, NO_LIMIT)
                or time.monotonic() > end
            ):
                return sample
            time.sleep(1)

    def samples_of_last_daemon(self, node: Node) -> list[Sample]:
        """Return the samples of the node's last daemon process. Samples from before a kill are not compared."""
        samples = self.samples.get(node.name, [])
        return [sample for sample in samples if sample.pid == samples[-1].pid]

    def require_none(self, title: str, problems: Sequence[str]) -> None:
        if problems:
            raise SoakError(self.describe_failure(f"{title}: " + "\n  ".join(["", *problems])))

    def describe_failure(self, problem: str) -> str:
        again = f"make soak SEED={self.seed}"
        return f"seed {self.seed}, step {self.steps} ({self.happening}): {problem}\nTo run it again: {again}"

    def report(self) -> str:
        done = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(self.done.items()))
        lines = [f"seed {self.seed}: {self.steps} steps, {self.rests} rests in {time.monotonic() - self.began:.0f} s"]
        lines.append(done)
        for node in self.nodes:
            summary = f"{len(node.events)} events and {len(node.commands())} commands, each once"
            lines.append(f"{node.name}: {summary}; the daemon was killed {node.expected.kills} times")
            if len(samples := self.samples_of_last_daemon(node)) > 1:
                lines.append(table(samples))
        return "\n".join(lines)


@contextlib.contextmanager
def start_soak(seed: int) -> Iterator[Soak]:
    """Yield a soak with two nodes whose daemons run. The daemon of n1 runs all the time, the daemon of n2 is killed."""
    with contextlib.ExitStack() as ends:
        cluster = ends.enter_context(SlurmCluster(nodes=2, message_timeout=5))
        nodes = []
        for name, is_killed in (("n1", False), ("n2", True)):
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="healthd-soak.")))
            folder.chmod(0o755)
            node = Node(cluster, name, folder, is_killed)
            ends.enter_context(node.daemon)
            nodes.append(node)
        yield Soak(seed, nodes)
