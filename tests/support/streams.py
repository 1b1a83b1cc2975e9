"""Simulated streams of collective operations, and the records that a job would write about them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

Calls = list[tuple[str, float]]


GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
_STAGE = ["recv", *[GATHER, SCATTER] * 6, "send"], ["recv", *[GATHER, SCATTER, GATHER] * 6, "send"]
# Iterations that consist mostly of loops.
NESTED_PATTERNS = {
    "layers of fully sharded data parallel": [GATHER, GATHER, SCATTER] * 48 + [REDUCE],
    "fully sharded, forward and then back": [GATHER] * 64 + [GATHER, SCATTER] * 64 + [REDUCE],
    "layers x micro-batches of tensor parallel": [GATHER, SCATTER] * (24 * 8) + [SCATTER, GATHER],
    "1,500 layers x micro-batches": [GATHER, SCATTER] * 1500 + [SCATTER, GATHER],
    "a pipeline": ["recv", "send"] * 4 + ["send", "recv", "send", "recv"] * 24 + ["recv", "send"] * 4 + [REDUCE] * 2,
    "tensor and pipeline": (_STAGE[0] + _STAGE[1]) * 4 + [SCATTER, GATHER, REDUCE, REDUCE, REDUCE],
}


def simulate_calls(
    pattern: Sequence[str],
    iterations: int,
    *,
    seconds: float = 1.0,
    cv: float = 0.05,
    lost: float = 0.0,
    evaluation_at: int = -1,
    prefix: int = 0,
    seed: int = 1,
    log_every: int = 0,
) -> tuple[Calls, list[float]]:
    """Return (operation, time) pairs of a rank, and the durations of its iterations."""
    rng = random.Random(seed)
    time, events, durations = 1_758_610_505.0, list[tuple[str, float]](), list[float]()
    for _ in range(prefix):
        time += rng.random()
        events.append((rng.choice(["broadcast", "barrier", "all_gather_object"]), time))
    for number in range(iterations):
        durations.append(max(0.2 * seconds, rng.gauss(seconds, cv * seconds)))
        for position, name in enumerate(pattern):
            if rng.random() >= lost:
                events.append((name, time + durations[-1] * position / len(pattern)))
        time += durations[-1]
        if log_every and number % log_every == 0:
            events.append(("logged_loss", time - 1e-4))
        if number == evaluation_at:
            for _ in range(len(pattern) * iterations // 8):
                time += 0.01
                events.append(("evaluate", time))
    return events, durations


def inspector_lines(
    rank: int, ranks: int, collectives: Sequence[tuple[str, float, float]], verbose: bool = True
) -> str:
    """Return lines in the format of NVIDIA/nccl, ext-profiler/inspector/README.md (v4.1).

    collectives: operation, start and duration in s.
    """
    lines = []
    for number, (name, start_seconds, duration) in enumerate(collectives):
        performance = {
            "coll": name,
            "coll_sn": number,
            "coll_msg_size_bytes": 1 << 20,
            "coll_exec_time_us": round(duration * 1e6),
            "coll_algobw_gbs": 418.439467,
            "coll_busbw_gbs": 366.134533,
        }
        if verbose:
            start = round(start_seconds * 1e6)
            performance["event_trace_ts"] = {"coll_start_ts": start, "coll_stop_ts": start + 5, "kernel_events": []}
        header = {"id": "0xe62dedaa97644a", "rank": rank, "n_ranks": ranks, "nnodes": 2}
        metadata = {
            "inspector_output_format_version": "v4.1",
            "dump_timestamp_us": round(start_seconds * 1e6),
            "hostname": f"gpu-{rank // 4}",
            "pid": 100 + rank,
        }
        lines.append(json.dumps({"header": header, "metadata": metadata, "coll_perf": performance}))
    return "\n".join(lines) + "\n"


def simulate_gang(
    ranks: int, iterations: int, slow: int = -1, slow_from: int = 0
) -> list[list[tuple[str, float, float]]]:
    """Return the collectives of each rank: operation, start, duration.

    One rank computes 40 % longer from iteration `slow_from` on; the others wait for it within the collective.
    """
    rng = random.Random(3)
    begin = 1_758_610_505.0
    collectives: list[list[tuple[str, float, float]]] = [[] for _ in range(ranks)]
    for number in range(iterations):
        for position in range(5):
            longer = [1.4 if rank == slow and number >= slow_from else 1.0 for rank in range(ranks)]
            arrived = [begin + 0.02 * rng.gauss(1, 0.02) * factor for factor in longer]
            begin = max(arrived) + 0.003 * rng.gauss(1, 0.05)
            for rank, at_time in enumerate(arrived):
                collectives[rank].append(("AllReduce" if position else "AllGather", at_time, begin - at_time))
    return collectives
