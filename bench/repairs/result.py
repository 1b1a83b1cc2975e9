"""Results of trials: counts, durations and violations."""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Violation:
    """A trial that broke a rule. `log`: the end of the daemon's log."""

    kind: str
    number: int
    seed: int
    trial: str
    text: str
    log: str = ""

    def __str__(self) -> str:
        log = f"\n{self.log}" if self.log else ""
        return f"VIOLATION in {self.kind} {self.number} (seed {self.seed}): {self.trial}\n  {self.text}{log}"


@dataclass
class Result:
    """Result of one kind of trials. `seconds`: durations by name."""

    title: str
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *violations: Violation) -> None:
        """Add violations, and print them at once."""
        for violation in violations:
            print(violation, flush=True)
            self.violations.append(violation)

    def rows(self) -> Iterator[str]:
        """Yield the lines of the table."""
        yield self.title
        for name, values in self.seconds.items():
            ordered = sorted(values)
            p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
            yield (
                f"  {name:<58} n {len(values):>4}   median {statistics.median(values):7.1f} s   "
                f"95th percentile {p95:7.1f} s   longest {ordered[-1]:7.1f} s"
            )
        for name, count in self.counts.items():
            yield f"  {name:<58} {count:>6}"
        yield f"  {'violations':<58} {len(self.violations):>6}"
