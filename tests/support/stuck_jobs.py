"""Simulated stuck jobs: the groups of ranks, the order of their operations, and a rank that stops.

A tiny simulation of collectives. Each rank enters its operations in the job's order, at most `ahead` beyond its first
unfinished one. A collective is done when all of its ranks have reached it on their GPUs. A rank stops in its program
(it enters no more operations) or on its GPU (its entered operations never finish).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

START_NS = 1_758_610_000_000_000_000
NAMES = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "all_to_all")


@dataclass
class Job:
    """groups: global ranks. program: (group, kind) in the common order.

    stops: rank -> number of operations after which its program enters no more.
    """

    groups: list[tuple[int, ...]]
    program: list[tuple[int, int]]
    stops: dict[int, int] = field(default_factory=dict)
    ahead: int = 1

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for group in self.groups for rank in group})


@dataclass
class State:
    """entered, done: rank -> number of its operations. mine: rank -> positions of its operations in the program."""

    positions: dict[int, list[int]]
    entered: dict[int, int]
    done: dict[int, int]


def simulate(job: Job) -> State:
    """Simulate until there is no more progress."""
    mine = {
        rank: [position for position, (group, _) in enumerate(job.program) if rank in job.groups[group]]
        for rank in job.ranks
    }
    state = State(mine, dict.fromkeys(job.ranks, 0), dict.fromkeys(job.ranks, 0))
    has_progress = True
    while has_progress:
        has_progress = False
        for rank in job.ranks:
            limit = min(len(mine[rank]), state.done[rank] + job.ahead, job.stops.get(rank, len(mine[rank])))
            if state.entered[rank] < limit:
                state.entered[rank], has_progress = limit, True
        for rank in job.ranks:
            if state.done[rank] < state.entered[rank]:
                position = mine[rank][state.done[rank]]
                members = job.groups[job.program[position][0]]
                if all(
                    state.done[member] < state.entered[member] and mine[member][state.done[member]] == position
                    for member in members
                ):
                    for member in members:
                        state.done[member] += 1
                    has_progress = True
    return state


def waiting_ranks(job: Job, state: State) -> set[int]:
    """Return the ranks that entered an operation that is not done."""
    return {rank for rank in job.ranks if state.done[rank] < state.entered[rank]}


def dumps(
    job: Job,
    state: State,
    *,
    buffer: int = 2000,
    only_waiting: bool = False,
    status: bool = True,
    version: str = "2.9",
    late: dict[int, int] | None = None,
    started: Collection[int] = (),
) -> dict[int, dict[str, Any]]:
    """Return rank -> its flight recorder dump.

    buffer: number of entries it keeps. late: rank -> number of finished operations that it does not know of.
    started: ranks whose GPU started the operation in which they wait.
    """
    result = {}
    for rank in job.ranks:
        counts: dict[int, int] = {}
        entries, progress = [], {}
        done = max(0, state.done[rank] - (late or {}).get(rank, 0))
        for record, position in enumerate(state.positions[rank][: state.entered[rank]]):
            group, kind = job.program[position]
            counts[group] = counts.get(group, 0) + 1
            is_done = record < done
            progress[group] = (counts[group], counts[group] if is_done else progress.get(group, (0, 0))[1])
            entries.append(
                {
                    "record_id": record,
                    "pg_id": sorted(group_index for group_index, ranks in enumerate(job.groups) if rank in ranks).index(
                        group
                    ),
                    "process_group": (str(group), f"kind {len(job.groups[group])}"),
                    "collective_seq_id": counts[group],
                    "p2p_seq_id": 0,
                    "op_id": counts[group],
                    "profiling_name": f"nccl:{NAMES[kind]}",
                    "input_sizes": [[64, 1 + kind]],
                    "input_dtypes": ["BFloat16"],
                    "output_sizes": [[64, 1 + kind]],
                    "output_dtypes": ["BFloat16"],
                    "time_created_ns": START_NS + 1_000_000 * position + rank,
                    "timeout_ms": 600000,
                    "state": "completed" if is_done else "started" if rank in started else "scheduled",
                    "retired": is_done,
                    "is_p2p": False,
                }
            )
        buffered = [entry for entry in entries if not (only_waiting and entry["retired"])][-buffer:]
        own_groups = [group for group, ranks in enumerate(job.groups) if rank in ranks and group in counts]
        listed_groups = own_groups if status else [group for group, ranks in enumerate(job.groups) if rank in ranks]
        result[rank] = {
            "version": version,
            "pg_config": {
                str(group): {
                    "name": str(group),
                    "desc": f"kind {len(job.groups[group])}",
                    "ranks": str([*job.groups[group]]),
                }
                for group in listed_groups
            },
            "entries": buffered,
        }
        if status:
            result[rank]["pg_status"] = {
                str(
                    sorted(group_index for group_index, ranks in enumerate(job.groups) if rank in ranks).index(group)
                ): {
                    "last_enqueued_collective": progress[group][0],
                    "last_started_collective": -1,
                    "last_completed_collective": progress[group][1],
                }
                for group in own_groups
            }
    return result


def as_pickle(dump: dict[str, Any]) -> bytes:
    return pickle.dumps(dump, 2)


def as_json(dump: dict[str, Any]) -> bytes:
    return json.dumps(dump).encode()
