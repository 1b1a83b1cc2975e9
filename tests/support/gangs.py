"""Simulated gangs: ranks that wait for each other in each iteration, and independent workers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from healthd.failslow.detect import detect
from healthd.failslow.model import Diagnosis, Evidence, Kind, Point, Series
from healthd.failslow.peers import compare_peers

ONSET = 150


@dataclass(frozen=True)
class Fault:
    """A fault of these ranks.

    kind: busy, transfer or host. by: relative slowdown of that time (host: relative to the busy time).
    """

    what: str
    ranks: Sequence[int]
    by: float
    onset: int = ONSET
    relief: int = 10**9


def gang(
    ranks: int,
    faults: Sequence[Fault] = (),
    samples: int = 300,
    cv: float = 0.02,
    seed: int = 1,
    busy: Sequence[float] | None = None,
    per_node: int = 0,
    groups: Mapping[int, str] | None = None,
) -> list[Series]:
    """Simulate ranks. Each iteration takes as long as the slowest rank's work and transfer; the others wait."""
    noise = random.Random(seed)
    rest = busy or [1.0] * ranks
    columns: list[list[tuple[float, float, float]]] = [[] for _ in range(ranks)]
    value: list[float] = []
    for at in range(samples):
        works = []
        for rank in range(ranks):
            work, transfer, host = rest[rank] * noise.gauss(1, cv), 0.3 * noise.gauss(1, 2 * cv), 0.05
            for fault in faults:
                if rank in fault.ranks and fault.onset <= at < fault.relief:
                    work += fault.by * rest[rank] * (fault.what == "busy")
                    transfer *= 1 + fault.by * (fault.what == "transfer")
                    host += fault.by * rest[rank] * (fault.what == "host")
            works.append((work, transfer, host))
        longest = max(sum(work) for work in works)
        value.append(longest)
        for rank, (work, transfer, host) in enumerate(works):
            columns[rank].append((work, longest - work - transfer - host, transfer))
    return [
        Series(
            str(rank),
            [one * (1 + 1e-4 * noise.random()) for one in value],
            range(samples),
            "rank",
            group=(groups or {}).get(rank, ""),
            node=f"gpu-{rank // per_node}" if per_node else "",
            busy=[one[0] for one in columns[rank]],
            wait=[one[1] for one in columns[rank]],
            transfer=[one[2] for one in columns[rank]],
        )
        for rank in range(ranks)
    ]


def workers(levels: Sequence[float], slow: Mapping[int, float], samples: int = 300, seed: int = 1) -> list[Series]:
    """Return independent workers. `slow`: worker -> relative slowdown from ONSET on."""
    noise = random.Random(seed)
    return [
        Series(
            str(one),
            [level * noise.gauss(1, 0.02) * (1 + slow.get(one, 0.0) * (at >= ONSET)) for at in range(samples)],
            range(samples),
            "worker",
        )
        for one, level in enumerate(levels)
    ]


def values_only(series: Sequence[Series]) -> list[Series]:
    return [replace(one, busy=None, wait=None, transfer=None) for one in series]


def points_of(series: Sequence[Series]) -> list[tuple[Point, ...]]:
    return [detect(one.value, one.regimes, one.starts, Kind.ITERATION) for one in series]


def judged(series: Sequence[Series], evidence: Sequence[Evidence] = ()) -> Diagnosis:
    return compare_peers(series, points_of(series), evidence)


def named(judgement: Diagnosis) -> list[tuple[str, str, str]]:
    return [(one.subject_kind, one.subject, one.cause.value) for one in judgement.suspects]
