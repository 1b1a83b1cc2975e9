"""Other events of the nodes: harmless warnings, drains by people, maintenance, new checks, daemons that do not run, and
lost lines.
"""

from __future__ import annotations

from history.books import Books, pod_list
from history.causes import FALSE_ALARM, FALSE_ALARMS, HARMLESS, ROLL_OUTS, Sign
from history.clock import Clock
from history.cluster import NEVER, Cluster
from history.draw import between, stream
from history.faults import Faults, subject
from history.outages import Outages
from history.scheduler import Scheduler
from history.size import DAY, NODES_OF_A_POD, Size, node_name
from history.telling import ROUND, Standing, Streams
from history.truth import Truth
from history.workload import HOUR, LONGEST

MAINTENANCE_EVERY, MAINTENANCE_TAKES = 120 * DAY, (4 * HOUR, 9 * HOUR)  # per pod
ANNOUNCED = LONGEST + DAY  # before maintenance begins
PEOPLES_DRAINS, TICKETS_OF_NOTHING, PAUSES = 0.003, 0.0005, 0.0005  # per day and node
DAEMONS_OFF, LINES_LOST = 0.008, 0.003
WORSE, KNOWN = 0.05, 0.02  # share of the warnings
PEOPLE = ("anna", "ben", "chen", "dora")
WHY_DRAINED = ("bad node?", "firmware update", "user says slow", "investigating", "keep for debugging", "cable check")


class Upkeep:
    def __init__(
        self,
        size: Size,
        clock: Clock,
        cluster: Cluster,
        scheduler: Scheduler,
        streams: Streams,
        outages: Outages,
        faults: Faults,
        books: Books,
        truth: Truth,
    ) -> None:
        self._size, self._clock, self._cluster, self._scheduler = size, clock, cluster, scheduler
        self._streams, self._outages, self._faults = streams, outages, faults
        self._books, self._truth = books, truth
        subjects = ("harmless", "people", "daemons", "maintenance", "lost lines")
        self._harmless, self._people, self._daemons, self._maintain, self._lines = (
            stream(size.seed, subject) for subject in subjects
        )
        self.reserved = 0

    def begin(self) -> None:
        size, clock = self._size, self._clock
        start, end, nodes = size.start, size.end, size.nodes
        for node in range(nodes):
            clock.at(start + node % ROUND, self._first_start, node)
        for sign, a_day, lasts in HARMLESS:
            clock.by_chance(
                *(start, end, a_day * nodes, self._harmless),
                lambda now, _, about=(sign, lasts): self._warning(now, *about),
            )
        for a_day, draw, what in (
            (FALSE_ALARMS, self._harmless, self._false_alarm),
            (PEOPLES_DRAINS, self._people, self._drained_by_people),
            (TICKETS_OF_NOTHING, self._people, self._ticket),
            (PAUSES, self._people, self._pause),
            (DAEMONS_OFF, self._daemons, self._daemon_off),
            (LINES_LOST, self._lines, self._lines_lost),
        ):
            clock.by_chance(start, end, a_day * nodes, draw, what)
        for share, _, _ in ROLL_OUTS:
            for node in range(nodes):
                clock.at(size.at(share) + between(self._daemons, 0, min(DAY, size.days * HOUR)), self._roll_out, node)
        for pod in range((nodes + NODES_OF_A_POD - 1) // NODES_OF_A_POD):
            at = start + ANNOUNCED + int(self._maintain() * MAINTENANCE_EVERY)
            clock.at(at - ANNOUNCED, self._announce, (pod, at))

    # daemons

    def _first_start(self, now: int, node: int) -> None:
        self._streams.start(now, node, True, True, None)

    def _roll_out(self, now: int, node: int) -> None:
        self._streams.roll_out(now, node)

    def _daemon_off(self, now: int, _: None) -> None:
        """Stop a daemon: someone killed it, or it was switched off and forgotten."""
        node = int(self._daemons() * self._size.nodes)
        takes = (
            between(self._daemons, 600, 6 * HOUR) if self._daemons() < 0.7 else between(self._daemons, DAY, 10 * DAY)
        )
        killed = self._daemons() < 0.6
        if node not in self._outages and self._streams.nodes[node].on:
            self._streams.stop(now, node, not killed)
            self._clock.at(now + takes, self._daemon_on, (node, now, killed, self._streams.nodes[node].run))

    def _daemon_on(self, now: int, about: tuple[int, int, bool, int]) -> None:
        node, since, killed, run = about
        if self._streams.nodes[node].run != run:
            return  # a boot has started it meanwhile
        self._truth.row("not_observed", node_name(node), since, now, "daemon_off")
        self._streams.start(now, node, False, not killed, since)

    def _lines_lost(self, now: int, _: None) -> None:
        node = int(self._lines() * self._size.nodes)
        how = "dropped" if self._lines() < 0.4 else "lost"
        self._streams.lose(now, node, how)
        self._clock.at(now + between(self._lines, HOUR, 3 * DAY), self._lines_found, node)

    def _lines_found(self, now: int, node: int) -> None:
        self._streams.lose(now, node, "")

    # warnings

    def _warning(self, now: int, sign: Sign, lasts: tuple[int, int]) -> None:
        draw = self._harmless
        node, of = int(draw() * self._size.nodes), subject(sign, draw())
        until, luck = now + between(draw, *lasts), draw()
        if node in self._outages or (sign.code, of) in self._streams.nodes[node].standing:
            return
        self._streams.fault(now, node, sign, of, "harmless")
        standing = self._streams.nodes[node].standing.get((sign.code, of))
        about = (node, (sign.code, of), standing)
        self._clock.at(until, self._warning_over, about)
        if sign.code == "mount/hang" and luck < WORSE and until - now > 3 * ROUND:
            self._clock.at(now + 2 * ROUND, self._worse, about)
        elif luck > 1 - KNOWN:
            self._clock.at(now + 2 * ROUND, self._known, (*about, until))

    def _warning_over(self, now: int, about: tuple[int, tuple[str, str], Standing | None]) -> None:
        node, key, standing = about
        if standing and self._streams.nodes[node].standing.get(key) is standing:
            self._streams.over(now, node, [key], "pass" if standing.sign.kind == "level" else "window")

    def _worse(self, now: int, about: tuple[int, tuple[str, str], Standing | None]) -> None:
        node, key, standing = about
        if standing and self._streams.nodes[node].standing.get(key) is standing and node not in self._outages:
            self._streams.worse(now, node, key, "degraded")
            self._faults.alarm_of(now, node, standing.sign, key[1])

    def _known(self, now: int, about: tuple[int, tuple[str, str], Standing | None, int]) -> None:
        node, key, standing, until = about
        if standing and self._streams.nodes[node].standing.get(key) is standing:
            self._streams.acknowledged(now, node, key, "anna (uid 1001)", until)

    def _false_alarm(self, now: int, _: None) -> None:
        node, part = int(self._harmless() * self._size.nodes), self._harmless()
        self._faults.alarm(now, node, FALSE_ALARM, subject(FALSE_ALARM, part))

    # people

    def _drained_by_people(self, now: int, _: None) -> None:
        draw = self._people
        node, who, why = int(draw() * self._size.nodes), draw(), draw()
        takes = between(draw, HOUR, 12 * HOUR) if draw() < 0.7 else between(draw, DAY, 8 * DAY)
        if node not in self._outages:
            reason, user = WHY_DRAINED[int(why * len(WHY_DRAINED))], PEOPLE[int(who * len(PEOPLE))]
            self._outages.begin(now, node, "DRAIN", reason, user, "person")
            self._clock.at(now + takes, self._outages.when_empty, (node, self._resumed, node))

    def _resumed(self, now: int, node: int) -> None:
        self._outages.over(now, node)

    def _ticket(self, now: int, _: None) -> None:
        """Write a ticket for a node without a fault."""
        node = int(self._people() * self._size.nodes)
        self._outages.ticket(node, now, now + between(self._people, HOUR, 9 * DAY), self._size.end)

    def _pause(self, now: int, _: None) -> None:
        node, until = int(self._people() * self._size.nodes), now + between(self._people, 600, 4 * HOUR)
        fields = {"who": "ben (uid 1002)", "why": "looking into it", "until": until}
        self._streams.slurm(now, node, "pause", stage="begun", **fields)
        self._clock.at(until, self._pause_over, (node, fields))

    def _pause_over(self, now: int, about: tuple[int, dict[str, object]]) -> None:
        self._streams.slurm(now, about[0], "pause", stage="ended", **about[1])

    # maintenance

    def _announce(self, now: int, about: tuple[int, int]) -> None:
        """Reserve a pod: jobs that could still run at that time are not placed there."""
        pod, start = about
        end = start + between(self._maintain, *MAINTENANCE_TAKES)
        self.reserved += len(self._pod(pod))
        self._books.reservation(f"maint_pod{pod + 1:03d}_{start}", pod_list(self._size, pod), start, end)
        for node in self._pod(pod):
            self._cluster.closes[node] = start
        self._clock.at(start, self._maintenance, (pod, end))
        self._clock.at(start + MAINTENANCE_EVERY - ANNOUNCED, self._announce, (pod, start + MAINTENANCE_EVERY))

    def _maintenance(self, now: int, about: tuple[int, int]) -> None:
        pod, end = about
        for node in self._pod(pod):
            self._cluster.close(node)
        self._clock.at(end, self._maintenance_over, pod)

    def _maintenance_over(self, now: int, pod: int) -> None:
        for node in self._pod(pod):
            self._cluster.closes[node] = NEVER
            self._cluster.open(node)
        self._scheduler.opened(now)

    def _pod(self, pod: int) -> range:
        return range(pod * NODES_OF_A_POD, min(self._size.nodes, (pod + 1) * NODES_OF_A_POD))
