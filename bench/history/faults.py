"""Faults, the jobs that they end, their discovery and repair; and programs that fail as if hardware had failed."""

from __future__ import annotations

from typing import Any

from history.causes import (
    BASE_RATE,
    BY_NAME,
    CAUSES,
    LEMONS,
    PROGRAM_SIGN_SHARE,
    PROGRAM_SIGNS,
    REGRESSION,
    SPIKE,
    Cause,
    Sign,
)
from history.clock import Clock
from history.cluster import Cluster
from history.draw import Choice, between, stream
from history.hardware import SLOTS, Hardware
from history.outages import Outages
from history.scheduler import Scheduler
from history.size import DAY, GPUS_PER_NODE, NODES_PER_POD, Size, node_name
from history.slurm_output import Books
from history.streams import Streams
from history.truth import Truth
from history.workload import HOUR, Job, Workload

# Share of the node failures that begin a crash loop, for jobs with at least LOOPS_FROM nodes.
LOOPS, LOOPS_FROM = 0.02, 32
LARGE = 128  # GPUs: r_f counts larger jobs
EXCLUDED_FOR = 7 * DAY
EXCLUDES, SUPERSTITION = 0.25, 0.001  # share of users who exclude a node: after a fault, after their own mistake
QUICK = 0.65  # share of the repairs that are only a reboot
PROGRAM_CODES_LAST = 2 * HOUR

Key = tuple[str, str]


class Faults:
    """Generates faults. `rate_hits` and `rate_node_seconds` give r_f.

    They are the jobs of more than 128 GPUs that a fault ended, and the node time of all such jobs.
    """

    def __init__(
        self,
        size: Size,
        clock: Clock,
        workload: Workload,
        cluster: Cluster,
        scheduler: Scheduler,
        streams: Streams,
        outages: Outages,
        books: Books,
        truth: Truth,
        hardware: Hardware,
    ) -> None:
        self._size, self._clock, self._workload, self._cluster = size, clock, workload, cluster
        self._scheduler, self._streams, self._outages = scheduler, streams, outages
        self._books, self._truth, self._hardware = books, truth, hardware
        self._when, self._how = stream(size.seed, "faults"), stream(size.seed, "what faults do")
        self._repair, self._program = stream(size.seed, "repairs"), stream(size.seed, "programs")
        self._exclude, self._loop = stream(size.seed, "exclusions"), stream(size.seed, "crash loops")
        self._causes = Choice([(cause, cause.share) for cause in CAUSES])
        self._effects = {cause.name: Choice(cause.effects) for cause in CAUSES}
        self._number = 0
        self._because: tuple[str, int | None, int | None] | None = None  # for the record that is ending
        self.rate_hits = self.rate_node_seconds = 0
        scheduler.after_end, scheduler.on_loop = self._job_ended, self._loops

    def begin(self) -> None:
        size, clock = self._size, self._clock
        rate = BASE_RATE * size.fault_rate
        clock.by_chance(size.start, size.end, rate * size.nodes, self._when, self._fault_on_random_node)
        lemons = stream(size.seed, "lemons")
        chosen: dict[int, tuple[float, int, int]] = {}
        min_factor, max_factor = size.lemon_factors
        while len(chosen) < max(1, round(LEMONS * size.nodes)):
            node, factor = (
                int(lemons() * size.nodes),
                min_factor + lemons() * (max_factor - min_factor),
            )
            since = size.start if lemons() < 0.6 else size.at(0.6 * lemons())
            until = size.end if lemons() < 0.7 else between(lemons, since, size.end)
            chosen.setdefault(node, (round(factor, 2), since, until))
        for node in range(size.nodes):
            factor, since, until = chosen.get(node, (1.0, 0, 0))
            self._truth.row("nodes", node_name(node), rate, factor, since or None, until or None)
        for node, (factor, since, until) in sorted(chosen.items()):
            more = rate * (factor - 1)
            clock.by_chance(since, until, more, self._when, lambda now, _, n=node: self._fault(now, n, None))
        first, last, name, times = REGRESSION
        more = rate * BY_NAME[name].share * (times - 1) * size.nodes
        gsp = BY_NAME[name]
        clock.by_chance(
            size.at(first), size.at(last), more, self._when, lambda now, _: self._fault(now, self._random_node(), gsp)
        )
        first, last, name, a_day, spike_nodes = SPIKE
        leaf, link = int(lemons() * size.nodes) // NODES_PER_POD * NODES_PER_POD, BY_NAME[name]
        for node in range(leaf, min(leaf + spike_nodes, size.nodes)):
            clock.by_chance(
                size.at(first), size.at(last), a_day, self._when, lambda now, _, n=node: self._fault(now, n, link)
            )

    # a fault

    def _random_node(self) -> int:
        return int(self._when() * self._size.nodes)

    def _fault_on_random_node(self, now: int, _: None) -> None:
        self._fault(now, self._random_node(), None)

    def _fault(self, now: int, node: int, cause: Any) -> None:
        """Begin a fault on a node, if the node is in service."""
        if node in self._outages:
            return
        draw = self._how
        cause = cause or self._causes.at(draw())
        effect: Any = self._effects[cause.name].at(draw())
        share, part = draw(), draw()
        signs = [sign for sign in cause.signs if share < sign.chance]
        found = [(sign, subject(sign, part)) for sign in signs if self._streams.sees(node, sign)]
        if effect == "node_fail":  # the node dies before the next round
            found = [(sign, part) for sign, part in found if sign.kind == "edge"]
        elif effect == "requeue" and not any(sign.severity == "critical" for sign, _ in found):
            effect = "crash"
        jobs = self._hit(node, cause)
        self._number += 1
        number = self._number
        self._truth.row("faults", number, node_name(node), now, cause.name, effect, int(bool(found)), len(jobs))
        ids = tuple(job.id for job in jobs)
        for sign in signs:
            if sign.kind == "edge" or effect != "node_fail":
                self._streams.fault(now, node, sign, subject(sign, part), str(number), ids)
        keys = [(sign.code, subject(sign, part)) for sign in signs]
        if effect == "node_fail":
            self._node_dies(now, node, cause.name, number, keys)
            return
        drains = [key for key in found if key[0].severity in ("degraded", "critical")]
        if drains:
            sign, part_name = min(drains, key=lambda item: (item[0].kind == "level", item[0].severity != "critical"))
            at = now + 3 if sign.kind == "edge" else self._streams.nodes[node].round_from(now) + 3
            requeue = [(job, job.row) for job in jobs] if effect == "requeue" else []
            about = (node, sign, part_name, keys, "fault", [(*item, cause.name, number) for item in requeue])
            self._clock.at(at, self._drain, about)
        else:
            self._clock.at(now + between(self._repair, HOUR, 12 * HOUR), self._found_by_people, (node, keys))
        if effect == "crash":
            for job in jobs:
                at = now + between(draw, 5, 240)
                self._clock.at(at, self._crash, (job, job.row, cause.name, node, number))

    def _hit(self, node: int, cause: Cause) -> list[Job]:
        """Return the jobs that a fault hits.

        A link fault does not hurt single-node jobs, and a GPU fault hurts only one job.
        """
        jobs = list(self._cluster.jobs[node])
        if cause.name == "ib_link":
            return [job for job in jobs if job.wants > 1]
        if cause.whole or not jobs:
            return jobs
        gpu = self._how() * GPUS_PER_NODE
        for job in jobs:
            gpu -= GPUS_PER_NODE if job.wants else job.gpus
            if gpu < 0:
                return [job]
        return []

    def _crash(self, now: int, about: tuple[Job, int, str, int, int]) -> None:
        job, row, cause, node, number = about
        self._end(now, job, row, "FAILED", cause, node, number)

    def _end(self, now: int, job: Job, row: int, state: str, cause: str, node: int, number: int | None) -> None:
        if job.row != row or job not in self._scheduler.running:
            return
        self._because = cause, node, number
        if job.gpus > LARGE and number is not None:
            self.rate_hits += 1
        if self._exclude() < EXCLUDES:
            self._exclude_node(now, job.user, node, "fault")
        self._scheduler.fail(job, state, now)

    # the node dies

    def _node_dies(self, now: int, node: int, cause: str, number: int | None, keys: list[Key]) -> None:
        self._streams.stop(now, node, False)
        self._clock.at(now + between(self._how, 60, 300), self._no_answer, (node, cause, number, keys, now))

    def _no_answer(self, now: int, about: tuple[int, str, int | None, list[Key], int]) -> None:
        node, cause, number, keys, died = about
        if node not in self._outages:
            self._books.not_responding(now, node)
            why = "crash_loop" if number is None else "node_fail"
            self._outages.begin(now, node, "DOWN*", "Not responding", "slurm", why)
            for job in list(self._cluster.jobs[node]):
                if number is not None and job.wants >= LOOPS_FROM and not job.loops and self._loop() < LOOPS:
                    job.loops = between(self._loop, 5, 36)
                self._end(now, job, job.row, "NODE_FAIL", cause, node, number)
        long = number is not None and self._repair() > QUICK
        back = now + (between(self._repair, 4 * HOUR, 4 * DAY) if long else between(self._repair, 600, 2400))
        if long:
            self._outages.ticket(node, now + HOUR, back, self._size.end)
            self._clock.at(now + HOUR, self._hardware.repair, (node, keys))
        self._clock.at(back, self._boots, (node, keys, died, False))

    def _boots(self, now: int, about: tuple[int, list[Key], int, bool]) -> None:
        """Bring the node back with its faults repaired."""
        node, keys, since, clean = about
        self._truth.row("not_observed", node_name(node), since, now, "node_down")
        self._streams.start(now, node, True, clean, since)
        self._streams.clear(now + 30, node, keys, "reboot")
        if clean:
            self._streams.slurm(now + 35, node, "decision", decision="resume", text="resume: all checks pass")
            self._streams.slurm(now + 35, node, "resume", stage="sent")
            self._streams.slurm(now + 36, node, "resume", stage="confirmed")
        else:
            self._books.returned(now, node)
        self._outages.end(now, node)

    # drains by healthd, repairs by people

    def begin_false_alarm(self, now: int, node: int, sign: Sign, part_name: str) -> None:
        """Drain a node without a fault."""
        if node in self._outages or not self._streams.sees(node, sign):
            return
        self._streams.fault(now, node, sign, part_name, "false_alarm")
        self.schedule_false_drain(now, node, sign, part_name)

    def schedule_false_drain(self, now: int, node: int, sign: Sign, part_name: str) -> None:
        at = self._streams.nodes[node].round_from(now) + 3
        self._clock.at(at, self._drain, (node, sign, part_name, [(sign.code, part_name)], "false_alarm", []))

    def _drain(self, now: int, about: Any) -> None:
        node, sign, part_name, keys, why, requeue = about
        if node in self._outages:
            return
        reason = f"healthd: {sign.code}{' ' if part_name else ''}{part_name}: {sign.message}"
        emit = self._streams.slurm
        emit(now, node, "decision", decision="drain", text=f"drain: {sign.code}")
        emit(now, node, "drain", stage="sent", reason=reason)
        emit(now + 1, node, "drain", stage="confirmed", reason=reason)
        self._outages.begin(now, node, "DRAIN", reason, "root", why)
        for job, row, cause, number in requeue:
            if job.row == row and job in self._scheduler.running:
                emit(now + 1, node, "requeue", stage="sent", job=str(job.id))
                emit(now + 2, node, "requeue", stage="confirmed", job=str(job.id))
                self._end(now + 2, job, row, "REQUEUED", cause, node, number)
        self._clock.at(now + 5, self._outages.when_empty, (node, self._repair_node, (node, keys)))

    def _found_by_people(self, now: int, about: tuple[int, list[Key]]) -> None:
        """Handle a fault that no check detected. Half of these faults disappear by themselves."""
        node, keys = about
        if node in self._outages or self._repair() < 0.5:
            self._streams.clear(now, node, keys, "pass")
            return
        self._outages.begin(now, node, "DRAIN", "does not work, see ticket", "anna", "fault")
        self._clock.at(now + 5, self._outages.when_empty, (node, self._repair_node, (node, keys)))

    def _repair_node(self, now: int, about: tuple[int, list[Key]]) -> None:
        node, keys = about
        if self._repair() < QUICK:
            down, back = now + between(self._repair, 300, 1200), 300
        else:
            down, back = now + between(self._repair, 600, HOUR), between(self._repair, 4 * HOUR, 4 * DAY)
            self._outages.ticket(node, now, down + back, self._size.end)
            self._clock.at(down + HOUR, self._hardware.repair, (node, keys))
        self._clock.at(down, self._shut_down, (node, keys, down + back))

    def _shut_down(self, now: int, about: tuple[int, list[Key], int]) -> None:
        node, keys, back = about
        self._streams.stop(now, node, True)
        self._clock.at(back, self._boots, (node, keys, now, True))

    # jobs

    def _loops(self, now: int, job: Job) -> None:
        """Let one node of a job in a crash loop die."""
        self._clock.at(job.started + between(self._loop, 300, HOUR), self._loop_ends, (job, job.row))

    def _loop_ends(self, now: int, about: tuple[Job, int]) -> None:
        job, row = about
        if job.row == row and job in self._scheduler.running:
            job.loops -= 1
            node = job.nodes[int(self._loop() * len(job.nodes))]
            self._node_dies(now, node, "crash_loop", None, [])

    def _job_ended(self, job: Job, state: str, now: int) -> None:
        because, self._because = self._because, None
        if now < self._size.start:
            return
        if job.gpus > LARGE:
            self.rate_node_seconds += len(job.nodes) * (now - max(job.started, self._size.start))
        for node in job.nodes:
            if self._streams.nodes[node].standing:
                self._streams.job_ended(now, node)
        if state in ("COMPLETED", "CANCELLED", "PREEMPTED"):
            return
        cause, node, number = because or ("limit" if state == "TIMEOUT" else "user", None, None)
        name = None if node is None else node_name(node)
        self._truth.row("failures", job.row, job.id, state, now, job.gpus, cause, name, number)
        if cause == "user" and state == "FAILED":
            self._program_failed(now, job)

    def _program_failed(self, now: int, job: Job) -> None:
        draw = self._program
        where = job.nodes[int(draw() * len(job.nodes))]
        if draw() < PROGRAM_SIGN_SHARE:
            sign = PROGRAM_SIGNS[int(draw() * len(PROGRAM_SIGNS))]
            key = sign.code, subject(sign, draw())
            self._streams.fault(now, where, sign, key[1], "user", (job.id,))
            self._clock.at(now + PROGRAM_CODES_LAST, self._window, (where, key))
        if self._exclude() < SUPERSTITION:
            self._exclude_node(now, job.user, where, "superstition")

    def _window(self, now: int, about: tuple[int, Key]) -> None:
        """End a condition that clears by time, after enough time without events."""
        node, key = about
        condition = self._streams.nodes[node].standing.get(key)
        if condition:
            if now - condition.last >= PROGRAM_CODES_LAST:
                self._streams.clear(now, node, [key], "window")
            else:
                self._clock.at(condition.last + PROGRAM_CODES_LAST, self._window, about)

    def _exclude_node(self, now: int, user: int, node: int, why: str) -> None:
        nodes = self._workload.exclusions.setdefault(user, {})
        if node not in nodes and len(nodes) < 8:
            nodes[node] = now + EXCLUDED_FOR
            self._truth.row("exclusions", f"u{user:04d}", node_name(node), now, now + EXCLUDED_FOR, why)


def subject(sign: Sign, share: float) -> str:
    """Return the part that a sign names. If there are several, `share` selects one."""
    number = int(share * 8)
    return {
        "gpu": SLOTS[number],
        "port": f"mlx5_{number}/1",
        "mount": ("/checkpoints", "/home", "/datasets", "/scratch")[number // 2],
        "disk": f"nvme{number}",
        "node": "",
    }[sign.part]
