"""Free GPUs of each node, and the placement of jobs.

A node is `shut` while it is drained, down or in maintenance. `shut` is a counter, because several reasons can apply at
once. `closes` is the start of the node's next maintenance: a job whose time limit ends later is not placed on the node.
"""

from __future__ import annotations

from history.draw import Draw
from history.size import GPUS_PER_NODE
from history.workload import Job

NEVER = 1 << 40
MARGIN = 400  # seconds from a decision to the start of a job, and from its time limit to its end
PREEMPTIBLE_AFTER = 7200
TRIES = 4
SPREAD = 0.25  # share of the small jobs that take an empty node, for its memory and CPUs


class Cluster:
    def __init__(self, nodes: int, draw: Draw) -> None:
        self.nodes = nodes
        self.jobs: list[dict[Job, None]] = [{} for _ in range(nodes)]
        self.shut = [0] * nodes
        self.closes = [NEVER] * nodes
        self._draw = draw
        self._free = [GPUS_PER_NODE] * nodes
        # Open nodes by number of free GPUs: lists, and the position of each node in its list.
        self._with: list[list[int]] = [[] for _ in range(GPUS_PER_NODE + 1)]
        self._with[GPUS_PER_NODE] = list(range(nodes))
        self._positions = list(range(nodes))

    def whole_nodes(self) -> int:
        return len(self._with[GPUS_PER_NODE])

    def place_on_one_node(self, job: Job, now: int) -> tuple[int, ...]:
        """Return the fullest node with room, sometimes an empty one; () if there is none."""
        until, excluded = now + job.limit + MARGIN, job.excluded
        fullest_first = range(job.gpus, GPUS_PER_NODE + 1)
        for free in fullest_first if self._draw() > SPREAD else reversed(fullest_first):
            nodes = self._with[free]
            if nodes:
                for _ in range(TRIES):
                    node = nodes[int(self._draw() * len(nodes))]
                    if self.closes[node] >= until and node not in excluded:
                        return (node,)
        return ()

    def place_on_whole_nodes(self, job: Job, now: int) -> tuple[int, ...]:
        """Return `wants` whole nodes, consecutive if possible; () if there are too few."""
        if len(self._with[GPUS_PER_NODE]) < job.wants:
            return ()
        until, excluded = now + job.limit + MARGIN, job.excluded
        nodes = sorted(n for n in self._with[GPUS_PER_NODE] if self.closes[n] >= until and n not in excluded)
        if len(nodes) < job.wants:
            return ()
        first = int(self._draw() * len(nodes))
        return tuple(sorted((nodes + nodes)[first : first + job.wants]))

    def place_with_preemption(self, job: Job, now: int) -> tuple[tuple[int, ...], tuple[Job, ...]]:
        """Return (nodes, jobs to pre-empt), or ((), ()).

        The nodes are consecutive, and free or with only low-priority jobs.
        """
        until, excluded = now + job.limit + MARGIN, job.excluded
        ran_from = now - PREEMPTIBLE_AFTER
        for _ in range(TRIES):  # prefer nodes with small jobs: pre-emption of one node would stop a whole large job
            first = int(self._draw() * self.nodes)
            if any(not running.wants for running in self.jobs[first]):
                break
        taken: list[int] = []
        victims: dict[Job, None] = {}
        for node in (*range(first, self.nodes), *range(first)):
            if self.shut[node] or self.closes[node] < until or node in excluded:
                continue
            jobs = self.jobs[node]
            for running in jobs:
                if running.qos != "low" or running.started > ran_from:
                    break
            else:
                victims.update(jobs)
                taken.append(node)
                if len(taken) == job.wants:
                    return tuple(sorted(taken)), tuple(victims)
        return (), ()

    def take(self, job: Job) -> None:
        gpus = job.gpus if not job.wants else GPUS_PER_NODE
        for node in job.nodes:
            self.jobs[node][job] = None
            self._set_free(node, self._free[node] - gpus)

    def give(self, job: Job) -> None:
        gpus = job.gpus if not job.wants else GPUS_PER_NODE
        for node in job.nodes:
            del self.jobs[node][job]
            self._set_free(node, self._free[node] + gpus)

    def close(self, node: int) -> None:
        if not self.shut[node]:
            self._leave(node)
        self.shut[node] += 1

    def open(self, node: int) -> None:
        self.shut[node] -= 1
        if not self.shut[node]:
            self._enter(node)

    def _set_free(self, node: int, gpus: int) -> None:
        if self.shut[node]:
            self._free[node] = gpus
        else:
            self._leave(node)
            self._free[node] = gpus
            self._enter(node)

    def _leave(self, node: int) -> None:
        nodes, position = self._with[self._free[node]], self._positions[node]
        last = nodes.pop()
        if last != node:
            nodes[position] = last
            self._positions[last] = position

    def _enter(self, node: int) -> None:
        nodes = self._with[self._free[node]]
        self._positions[node] = len(nodes)
        nodes.append(node)


def host_list(nodes: tuple[int, ...]) -> str:
    """Format ascending nodes as Slurm does: n[0001-0004,0007]."""
    if len(nodes) == 1:
        return f"n{nodes[0] + 1:04d}"
    parts, first = [], nodes[0]
    for i, node in enumerate(nodes):
        if i + 1 == len(nodes) or nodes[i + 1] != node + 1:
            parts.append(f"{first + 1:04d}-{node + 1:04d}" if first != node else f"{node + 1:04d}")
            first = nodes[i + 1] if i + 1 < len(nodes) else 0
    return f"n[{','.join(parts)}]"
