"""The nodes' event streams (docs/events.md), as their daemons would write them.

A node's daemon is `on` or not. While lines are lost, numbering continues. This causes a gap, or a range that one
`dropped` event names. The truth contains everything, even what a stream reports late or never.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from zlib import crc32

from healthd.events.schema import Event, Source, render
from history.causes import CHECKS, ROLL_OUTS, Sign
from history.clock import Clock
from history.draw import between, stream
from history.hardware import Hardware
from history.size import DAY, Size, node_name
from history.truth import Truth

ROUND = 300
CLUSTER = "made"
VERSION, NEXT_VERSION = "0.1.0", "0.1.1"
BUFFER = 1 << 14  # bytes that are buffered for each node before they are written
# share of the lines that are repeated; share of the starts after a kill that have a torn line
REPEATED, TORN = 0.0005, 0.1


class OpenCondition:
    """A condition of a node. `onset`: its true start.

    `because`: its cause. `opened`: when it was reported, 0 if not yet.
    """

    __slots__ = (
        *("sign", "subject", "onset", "because", "jobs", "severity", "state", "id"),
        *("first", "last", "count", "opened", "written", "serial"),
    )

    def __init__(self, sign: Sign, subject: str, onset: int, because: str, jobs: tuple[int, ...]) -> None:
        self.sign, self.subject, self.onset, self.because, self.jobs = sign, subject, onset, because, jobs
        self.severity, self.state, self.id, self.serial = sign.severity, "open", "", ""
        self.first = self.last = self.count = self.opened = self.written = 0

    def update_count(self, now: int) -> None:
        """Update the count of sightings. A level is seen in each round."""
        if self.sign.kind == "level":
            self.count = 1 + (now - self.first) // ROUND
            self.last = self.first + (self.count - 1) * ROUND


class Daemon:
    """A node's daemon. `rolled`: the ROLL_OUTS that it has. `run`: how often it was started.

    Events that were planned before its last start are void.
    """

    __slots__ = (
        *("name", "phase", "on", "run", "lost", "seq", "booted", "stopped", "source"),
        *("lines", "bytes", "checks", "rolled", "standing", "gpus"),
    )

    def __init__(self, name: str, phase: int) -> None:
        self.name, self.phase, self.on = name, phase, False
        self.lost: tuple[str, int, int] | None = None  # how lines are lost, from which number, since when
        self.run = self.seq = self.booted = self.stopped = self.bytes = 0
        self.source = Source(CLUSTER, name, "", "")
        self.lines: list[str] = []
        self.checks, self.rolled = set(CHECKS), set[int]()
        self.standing: dict[tuple[str, str], OpenCondition] = {}
        self.gpus: tuple[dict[str, str], ...] = ()  # as listed last

    def round_from(self, now: int) -> int:
        """Return the time of the daemon's next round."""
        return now + (self.phase - now) % ROUND


class Streams:
    """Writes the streams. `event_counts`: number of lines that a reader finds, by event, without repeated lines."""

    def __init__(self, size: Size, clock: Clock, folder: Path, truth: Truth, hardware: Hardware) -> None:
        self._size, self._clock, self._folder, self._truth = size, clock, folder, truth
        self._hardware = hardware
        self._draw, self._luck = stream(size.seed, "streams"), stream(size.seed, "repeats")
        self.event_counts = Counter[str]()
        self.repeats = self.torn = 0
        self.missing = Counter[str]()  # lost lines, by kind of loss
        self.nodes = [Daemon(node_name(n), between(self._draw, 0, ROUND)) for n in range(size.nodes)]
        for d in self.nodes:
            (folder / d.name).mkdir(parents=True)

    # the daemon

    def start(self, now: int, node: int, boot: bool, clean: bool, last_alive: int | None) -> None:
        d = self.nodes[node]
        if d.on:
            return
        if not clean and d.seq and self._luck() < TORN:
            self.torn += 1
            self._write(d, '{"schema":1,"cluster":"made","node":"')
        if boot:
            self.lose(now, node, "")
            d.source = Source(CLUSTER, d.name, self._hex(32), self._hex(16))
            d.seq, d.booted = 0, now - 60
        d.on = True
        d.run += 1
        self._emit(now, d, "started", version=VERSION, mode="act", last_alive=last_alive, clean=clean)
        for number, (share, event, check) in enumerate(ROLL_OUTS):
            if self._size.at(share) <= now and number not in d.rolled:
                self._roll(now, d, number, event, check)
        for key, condition in list(d.standing.items()):
            if not condition.opened:
                self._open(now, d, key, condition)
        self._clock.at(now + 20, self._list_gpus, (d, d.run, node))
        self._clock.at(now + 30, self._alive, (d, d.run))

    def stop(self, now: int, node: int, clean: bool) -> None:
        """Stop a daemon. It ends cleanly, or it is killed alone or together with its node."""
        d = self.nodes[node]
        if d.on:
            if clean:
                self._emit(now, d, "stopped", why="SIGTERM")
            d.on, d.stopped = False, now

    def roll_out(self, now: int, node: int) -> None:
        """Restart the daemon with the site's new configuration. A daemon that is off gets it at its next start."""
        if self.nodes[node].on:
            self.stop(now, node, True)
            self.start(now + 2, node, False, True, now)

    def _roll(self, now: int, d: Daemon, number: int, event: str, check: str) -> None:
        d.rolled.add(number)
        (d.checks.discard if event == "check_disabled" else d.checks.add)(check)
        version = NEXT_VERSION if event == "check_changed" else VERSION
        settings = f"{crc32((check + version).encode()):08x}"
        self._emit(now, d, event, check=check, instance="", version=version, settings=settings, since=now)
        self._truth.row("checks", d.name, check, event, now)

    def _list_gpus(self, now: int, about: tuple[Daemon, int, int]) -> None:
        """List the GPUs after a start, if they changed."""
        d, run, node = about
        listed = self._hardware.listed(node)
        if d.on and d.run == run and listed != d.gpus:
            d.gpus = listed
            self._emit(now, d, "gpus", gpus=listed)

    def _alive(self, now: int, about: tuple[Daemon, int]) -> None:
        """Write `alive` at each start, and daily until the daemon ends."""
        d, run = about
        if not d.on or d.run != run:
            return
        conditions = [
            {
                "condition": s.id,
                "check": s.sign.check,
                "instance": "",
                "code": s.sign.code,
                "subject": s.subject,
                "severity": s.severity,
                "state": s.state,
            }
            for s in d.standing.values()
            if s.opened
        ]
        self._emit(now, d, "alive", conditions=conditions, checks=sorted(d.checks))
        self._clock.at(now + DAY, self._alive, about)

    # conditions

    def fault(self, now: int, node: int, sign: Sign, subject: str, because: str, jobs: tuple[int, ...] = ()) -> None:
        """Begin a fault. An edge is reported at once or never.

        A level is reported at the next round of a running daemon.
        """
        d = self.nodes[node]
        key = sign.code, subject
        condition = d.standing.get(key)
        if condition:
            if sign.kind == "edge" and d.on:
                condition.count += 1
                condition.last = now
                if condition.count in (10, 100, 1000) or now - condition.written >= 3600:
                    self._condition(now, d, "seen_again", condition)
            return
        condition = OpenCondition(sign, subject, now, because, jobs)
        condition.serial = self._hardware.serial(node, subject)
        sees = sign.check in d.checks and d.on
        if sign.kind == "level":
            d.standing[key] = condition
            self._clock.at(d.round_from(now), self._first_round, (d, key, condition))
        elif sees:
            d.standing[key] = condition
            self._open(now, d, key, condition)
        else:
            self._true_condition(d, condition, now)

    def sees(self, node: int, sign: Sign) -> bool:
        d = self.nodes[node]
        return d.on and sign.check in d.checks

    def clear(self, now: int, node: int, keys: list[tuple[str, str]], by: str) -> None:
        """End the conditions of these keys."""
        d = self.nodes[node]
        for key in keys:
            condition = d.standing.pop(key, None)
            if condition is None:
                continue
            if not condition.opened:
                self._true_condition(d, condition, now)
                continue
            condition.update_count(min(now, d.stopped) if not d.on else now)
            if d.on:
                self._condition(now, d, "cleared", condition, cleared_by=by)
            self._true_condition(d, condition, now)

    def worsen(self, now: int, node: int, key: tuple[str, str], severity: str) -> None:
        d = self.nodes[node]
        condition = d.standing.get(key)
        if condition and condition.opened and d.on:
            was, condition.severity = condition.severity, severity
            self._condition(now, d, "worsened", condition, was=was)

    def acknowledged(self, now: int, node: int, key: tuple[str, str], who: str, until: int) -> None:
        d = self.nodes[node]
        condition = d.standing.get(key)
        if condition and condition.opened and d.on:
            condition.state = "acknowledged"
            self._condition(now, d, "acknowledged", condition, who=who, why="known", until=until)

    def job_ended(self, now: int, node: int) -> None:
        """Schedule the writing of a job's evidence: five minutes after its end, all sightings of its last ten
        minutes."""
        if any(s.opened for s in self.nodes[node].standing.values()):
            self._clock.at(now + 300, self._flush, (self.nodes[node], now))

    def end(self) -> None:
        """End the history: write the open conditions to the truth, and all lines to their files."""
        for d in self.nodes:
            for condition in d.standing.values():
                self._true_condition(d, condition, None)
            self._flush_lines(d)

    def _first_round(self, now: int, about: tuple[Daemon, tuple[str, str], OpenCondition]) -> None:
        d, key, condition = about
        if d.standing.get(key) is condition and not condition.opened and d.on and condition.sign.check in d.checks:
            self._open(now, d, key, condition)

    def _open(self, now: int, d: Daemon, key: tuple[str, str], condition: OpenCondition) -> None:
        if condition.sign.check not in d.checks:
            return
        condition.first = condition.last = condition.opened = now
        condition.count = 1
        condition.id = f"{crc32(' '.join((d.name, *key)).encode()):08x}-{now}"
        self._condition(now, d, "opened", condition)
        if condition.sign.kind == "level":
            self._clock.at(now + 9 * ROUND, self._again, (d, key, condition))

    def _again(self, now: int, about: tuple[Daemon, tuple[str, str], OpenCondition]) -> None:
        """Write the tenth sighting, then one per hour."""
        d, key, condition = about
        if d.standing.get(key) is condition:
            condition.update_count(now)
            if d.on:
                self._condition(now, d, "seen_again", condition)
            self._clock.at(now + 3600, self._again, about)

    def _flush(self, now: int, about: tuple[Daemon, int]) -> None:
        d, ended = about
        for condition in d.standing.values():
            if d.on and condition.opened:
                condition.update_count(now)
                if condition.last >= ended - 600 and condition.last > condition.written:
                    self._condition(now, d, "seen_again", condition)

    def _condition(self, now: int, d: Daemon, event: str, s: OpenCondition, **more: object) -> None:
        s.written = s.last
        self._emit(
            *(now, d, event),
            condition=s.id,
            check=s.sign.check,
            instance="",
            code=s.sign.code,
            subject=s.subject,
            severity=s.severity,
            kind=s.sign.kind,
            first=s.first,
            last=s.last,
            count=s.count,
            jobs=[str(job) for job in s.jobs],
            message=s.sign.message,
            **({"serial": s.serial} if s.serial else {}),
            **more,
        )

    def _true_condition(self, d: Daemon, s: OpenCondition, cleared: int | None) -> None:
        self._truth.row(
            *("conditions", s.id, d.name, s.sign.code, s.subject, s.sign.kind, s.severity),
            *(s.onset, s.opened or None, cleared, s.because),
        )

    # lines

    def slurm(self, now: int, node: int, event: str, **fields: object) -> None:
        """If the daemon is on, write a decision, drain, resume, requeue, pause or repaired event."""
        if self.nodes[node].on:
            self._emit(now, self.nodes[node], event, **fields)

    def lose(self, now: int, node: int, how: str) -> None:
        """Begin to lose lines. "lost": without a trace; "dropped": a later line reports the loss; "": end the loss."""
        d = self.nodes[node]
        if how and not d.lost:
            d.lost = (how, d.seq + 1, now)
        elif d.lost and not how:
            was, first, since = d.lost
            d.lost = None
            if d.on and d.seq >= first and was == "dropped":
                self._emit(now, d, "dropped", count=d.seq + 1 - first, from_seq=first, to_seq=d.seq)
            self._truth.row("not_observed", d.name, since, now, was)

    def _emit(self, now: int, d: Daemon, event: str, **fields: object) -> None:
        d.seq += 1
        if d.lost:
            self.missing[d.lost[0]] += 1
            return
        at = now + d.seq % 1000 / 1000
        line = render(d.source, d.seq, at, at - d.booted, Event(event, fields))
        self.event_counts[event] += 1
        self._write(d, line)
        if self._luck() < REPEATED:
            self.repeats += 1
            self._write(d, line)

    def _write(self, d: Daemon, line: str) -> None:
        d.lines.append(line)
        d.bytes += len(line)
        if d.bytes > BUFFER:
            self._flush_lines(d)

    def _flush_lines(self, d: Daemon) -> None:
        if d.lines:
            with (self._folder / d.name / "events.jsonl").open("a", encoding="ascii", newline="\n") as file:
                file.write("\n".join(d.lines) + "\n")
            d.lines.clear()
            d.bytes = 0

    def _hex(self, digits: int) -> str:
        return "".join(f"{int(self._draw() * (1 << 32)):08x}" for _ in range(digits // 8))
