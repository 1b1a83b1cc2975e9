"""Other events of the nodes.

These are harmless warnings, drains by people, maintenance, new checks, daemons that do not run, and lost lines.
"""

from __future__ import annotations

from history.causes import FALSE_ALARM, FALSE_ALARMS, HARMLESS, ROLL_OUTS, Sign
from history.clock import Clock
from history.cluster import NEVER, Cluster
from history.draw import between, stream
from history.faults import Faults, subject
from history.outages import Outages
from history.scheduler import Scheduler
from history.size import DAY, NODES_PER_POD, Size, node_name
from history.slurm_output import Books, pod_list
from history.streams import ROUND, OpenCondition, Streams
from history.truth import Truth
from history.workload import HOUR, MAX_DURATION

MAINTENANCE_EVERY, MAINTENANCE_TAKES = 120 * DAY, (4 * HOUR, 9 * HOUR)  # rate per pod
ANNOUNCED = MAX_DURATION + DAY  # time before maintenance begins
MANUAL_DRAINS, NEEDLESS_TICKETS, PAUSES = 0.003, 0.0005, 0.0005  # rates per day and node
DAEMONS_OFF, LINES_LOST = 0.008, 0.003
WORSENED_SHARE, ACKNOWLEDGED_SHARE = 0.05, 0.02  # share of the warnings
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
        for a_day, draw, action in (
            (FALSE_ALARMS, self._harmless, self._false_alarm),
            (MANUAL_DRAINS, self._people, self._drained_by_people),
            (NEEDLESS_TICKETS, self._people, self._ticket),
            (PAUSES, self._people, self._pause),
            (DAEMONS_OFF, self._daemons, self._daemon_off),
            (LINES_LOST, self._lines, self._lines_lost),
        ):
            clock.by_chance(start, end, a_day * nodes, draw, action)
        for share, _, _ in ROLL_OUTS:
            for node in range(nodes):
                clock.at(size.at(share) + between(self._daemons, 0, min(DAY, size.days * HOUR)), self._roll_out, node)
        for pod in range((nodes + NODES_PER_POD - 1) // NODES_PER_POD):
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
            return  # a boot has started the daemon in the meantime
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
        node, part_name = int(draw() * self._size.nodes), subject(sign, draw())
        until, luck = now + between(draw, *lasts), draw()
        if node in self._outages or (sign.code, part_name) in self._streams.nodes[node].standing:
            return
        self._streams.fault(now, node, sign, part_name, "harmless")
        condition = self._streams.nodes[node].standing.get((sign.code, part_name))
        about = (node, (sign.code, part_name), condition)
        self._clock.at(until, self._end_warning, about)
        if sign.code == "mount/hang" and luck < WORSENED_SHARE and until - now > 3 * ROUND:
            self._clock.at(now + 2 * ROUND, self._worsen, about)
        elif luck > 1 - ACKNOWLEDGED_SHARE:
            self._clock.at(now + 2 * ROUND, self._acknowledge, (*about, until))

    def _end_warning(self, now: int, about: tuple[int, tuple[str, str], OpenCondition | None]) -> None:
        node, key, condition = about
        if condition and self._streams.nodes[node].standing.get(key) is condition:
            self._streams.clear(now, node, [key], "pass" if condition.sign.kind == "level" else "window")

    def _worsen(self, now: int, about: tuple[int, tuple[str, str], OpenCondition | None]) -> None:
        node, key, condition = about
        if condition and self._streams.nodes[node].standing.get(key) is condition and node not in self._outages:
            self._streams.worsen(now, node, key, "degraded")
            self._faults.schedule_false_drain(now, node, condition.sign, key[1])

    def _acknowledge(self, now: int, about: tuple[int, tuple[str, str], OpenCondition | None, int]) -> None:
        node, key, condition, until = about
        if condition and self._streams.nodes[node].standing.get(key) is condition:
            self._streams.acknowledged(now, node, key, "anna (uid 1001)", until)

    def _false_alarm(self, now: int, _: None) -> None:
        node, part = int(self._harmless() * self._size.nodes), self._harmless()
        self._faults.begin_false_alarm(now, node, FALSE_ALARM, subject(FALSE_ALARM, part))

    # people

    def _drained_by_people(self, now: int, _: None) -> None:
        draw = self._people
        node, person_draw, reason_draw = int(draw() * self._size.nodes), draw(), draw()
        takes = between(draw, HOUR, 12 * HOUR) if draw() < 0.7 else between(draw, DAY, 8 * DAY)
        if node not in self._outages:
            reason, user = WHY_DRAINED[int(reason_draw * len(WHY_DRAINED))], PEOPLE[int(person_draw * len(PEOPLE))]
            self._outages.begin(now, node, "DRAIN", reason, user, "person")
            self._clock.at(now + takes, self._outages.when_empty, (node, self._resumed, node))

    def _resumed(self, now: int, node: int) -> None:
        self._outages.end(now, node)

    def _ticket(self, now: int, _: None) -> None:
        """Write a ticket for a node without a fault."""
        node = int(self._people() * self._size.nodes)
        self._outages.ticket(node, now, now + between(self._people, HOUR, 9 * DAY), self._size.end)

    def _pause(self, now: int, _: None) -> None:
        node, until = int(self._people() * self._size.nodes), now + between(self._people, 600, 4 * HOUR)
        fields = {"who": "ben (uid 1002)", "why": "looking into it", "until": until}
        self._streams.slurm(now, node, "pause", stage="begun", **fields)
        self._clock.at(until, self._end_pause, (node, fields))

    def _end_pause(self, now: int, about: tuple[int, dict[str, object]]) -> None:
        self._streams.slurm(now, about[0], "pause", stage="ended", **about[1])

    # maintenance

    def _announce(self, now: int, about: tuple[int, int]) -> None:
        """Reserve a pod for maintenance. Jobs that could still run when it begins are not placed on the pod."""
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
        self._clock.at(end, self._end_maintenance, pod)

    def _end_maintenance(self, now: int, pod: int) -> None:
        for node in self._pod(pod):
            self._cluster.closes[node] = NEVER
            self._cluster.open(node)
        self._scheduler.opened(now)

    def _pod(self, pod: int) -> range:
        return range(pod * NODES_PER_POD, min(self._size.nodes, (pod + 1) * NODES_PER_POD))
