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

    kind: str
    ranks: Sequence[int]
    slowdown: float
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
    base_times = busy or [1.0] * ranks
    columns: list[list[tuple[float, float, float]]] = [[] for _ in range(ranks)]
    value: list[float] = []
    for iteration in range(samples):
        works = []
        for rank in range(ranks):
            work, transfer, host = base_times[rank] * noise.gauss(1, cv), 0.3 * noise.gauss(1, 2 * cv), 0.05
            for fault in faults:
                if rank in fault.ranks and fault.onset <= iteration < fault.relief:
                    work += fault.slowdown * base_times[rank] * (fault.kind == "busy")
                    transfer *= 1 + fault.slowdown * (fault.kind == "transfer")
                    host += fault.slowdown * base_times[rank] * (fault.kind == "host")
            works.append((work, transfer, host))
        longest = max(sum(work) for work in works)
        value.append(longest)
        for rank, (work, transfer, host) in enumerate(works):
            columns[rank].append((work, longest - work - transfer - host, transfer))
    return [
        Series(
            str(rank),
            [column * (1 + 1e-4 * noise.random()) for column in value],
            range(samples),
            "rank",
            group=(groups or {}).get(rank, ""),
            node=f"gpu-{rank // per_node}" if per_node else "",
            busy=[column[0] for column in columns[rank]],
            wait=[column[1] for column in columns[rank]],
            transfer=[column[2] for column in columns[rank]],
        )
        for rank in range(ranks)
    ]


def workers(levels: Sequence[float], slow: Mapping[int, float], samples: int = 300, seed: int = 1) -> list[Series]:
    """Return independent workers. `slow`: worker -> relative slowdown from ONSET on."""
    noise = random.Random(seed)
    return [
        Series(
            str(index),
            [
                level * noise.gauss(1, 0.02) * (1 + slow.get(index, 0.0) * (iteration >= ONSET))
                for iteration in range(samples)
            ],
            range(samples),
            "worker",
        )
        for index, level in enumerate(levels)
    ]


def values_only(series: Sequence[Series]) -> list[Series]:
    return [replace(item, busy=None, wait=None, transfer=None) for item in series]


def points_of(series: Sequence[Series]) -> list[tuple[Point, ...]]:
    return [detect(item.value, item.regimes, item.starts, Kind.ITERATION) for item in series]


def diagnose(series: Sequence[Series], evidence: Sequence[Evidence] = ()) -> Diagnosis:
    return compare_peers(series, points_of(series), evidence)


def suspects_of(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    return [(suspect.subject_kind, suspect.subject, suspect.cause.value) for suspect in diagnosis.suspects]
