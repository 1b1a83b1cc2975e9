"""Nodes that are out of service (drained or down), with the reason. A node has one reason at a time, as in slurmdbd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from history.clock import Clock
from history.cluster import Cluster
from history.draw import Draw, between
from history.scheduler import Scheduler
from history.size import node_name
from history.slurm_output import Books
from history.truth import Truth

TICKET_TEXTS = (
    "swap GPU",
    "reseat the cable",
    "RMA",
    "firmware",
    "BMC does not answer",
    "look at the fan",
    "replace DIMM",
)
EMPTY_CHECK_SECONDS = 1800  # seconds between two checks for remaining jobs on a draining node


class Outages:
    def __init__(
        self, clock: Clock, cluster: Cluster, scheduler: Scheduler, books: Books, truth: Truth, draw: Draw, folder: Path
    ) -> None:
        self._clock, self._cluster, self._scheduler = clock, cluster, scheduler
        self._books, self._truth, self._draw = books, truth, draw
        self._out: dict[int, tuple[int, str, str, str, str]] = {}
        self._tickets = (folder / "tickets.csv").open("w", encoding="ascii", newline="\n")
        self._tickets.write("node,opened,closed,text\n")
        self.tickets = self.states = 0

    def __contains__(self, node: int) -> bool:
        return node in self._out or self._cluster.shut[node] > 0

    def begin(self, now: int, node: int, state: str, reason: str, user: str, why: str) -> None:
        """Take a node out of service. state: DRAIN or DOWN*; why: the reason in the truth."""
        self._out[node] = (now, state, reason, user, why)
        self._cluster.close(node)

    def end(self, now: int, node: int) -> None:
        if node not in self._out:
            return  # the node died in a job's crash loop during a drain, and its boot ended the drain
        since, state, reason, user, why = self._out.pop(node)
        self.states += 1
        self._books.node_state(node, since, now, state, reason, user)
        self._truth.row("outages", node_name(node), since, now, state, why)
        self._cluster.open(node)
        self._scheduler.opened(now)

    def when_empty(self, now: int, about: tuple[int, Callable[[int, Any], None], Any]) -> None:
        """Call then(when, what) as soon as no job is on the node."""
        node, action, argument = about
        if self._cluster.jobs[node]:
            self._clock.at(now + EMPTY_CHECK_SECONDS, self.when_empty, about)
        else:
            action(now, argument)

    def ticket(self, node: int, opened: int, closed: int, until: int) -> None:
        """Write a ticket. If the ticket is still open at the end of the history, it has no end."""
        self.tickets += 1
        text = TICKET_TEXTS[between(self._draw, 0, len(TICKET_TEXTS))]
        self._tickets.write(f"{node_name(node)},{opened},{closed if closed < until else ''},{text}\n")

    def close(self) -> None:
        for node, (since, state, reason, user, why) in sorted(self._out.items()):
            self.states += 1
            self._books.node_state(node, since, None, state, reason, user)
            self._truth.row("outages", node_name(node), since, None, state, why)
        self._tickets.close()
