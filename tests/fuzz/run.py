"""Run one target for a number of inputs or seconds. The same seed number produces the same inputs."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from healthd.common import guard
from tests.fuzz.mutate import inputs

SLOW_SECONDS = 2.0  # of CPU for one input of at most 64 KiB; quadratic code takes longer
MAX_FAILURES = 5  # more failures would have the same cause


@dataclass(slots=True)
class Outcome:
    """The result of a run. `failures`: pairs of an input and its error."""

    inputs: int = 0
    slowest_seconds: float = 0.0
    failures: list[tuple[bytes, str]] = field(default_factory=list)


def fuzz(
    seeds: Sequence[bytes],
    target: Callable[[bytes], None],
    seed: int,
    max_inputs: int = 1 << 62,
    seconds: float = float("inf"),
) -> Outcome:
    outcome, rng, end = Outcome(), random.Random(seed), time.monotonic() + seconds
    while outcome.inputs < max_inputs and time.monotonic() < end and len(outcome.failures) < MAX_FAILURES:
        data = inputs(seeds, rng)
        outcome.inputs += 1
        problem = error_of(target, data, outcome)
        if problem:
            outcome.failures.append((data, problem))
    return outcome


def error_of(target: Callable[[bytes], None], data: bytes, outcome: Outcome) -> str:
    """Return the error that this input causes, or "".

    A slow input gets two more attempts and the fastest counts: the first one may include an import or a garbage
    collection of the whole test process.
    """
    guard.dropped.clear()
    fastest = float("inf")
    for _ in range(3):
        start = time.process_time()
        try:
            target(data)
        except Exception:
            return traceback.format_exc()
        fastest = min(fastest, time.process_time() - start)
        if fastest <= SLOW_SECONDS:
            break
    outcome.slowest_seconds = max(outcome.slowest_seconds, fastest)
    return f"took {fastest:.1f} s of CPU" if fastest > SLOW_SECONDS else ""
