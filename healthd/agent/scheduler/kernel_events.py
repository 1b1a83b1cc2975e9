"""Intake of kernel events in the daemon: events become conditions, get their jobs, and are logged.

A pure function evaluates the events (agent/conditions/intake.py). A mistake with one event does not affect others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.conditions import events as telling
from healthd.agent.conditions import incidents, intake, log_lines
from healthd.agent.conditions.ledger import KEEP_EVENTS
from healthd.agent.conditions.store import Memory, tell
from healthd.agent.kernel_log.listener import Listener
from healthd.agent.kernel_log.source import Gap, RawLine
from healthd.agent.settings.configured import Configured
from healthd.agent.slurm.event_jobs import JobAtSource
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import ReadJournal
from healthd.common import guard
from healthd.common.guard import KERNEL_LOG, SLURM
from healthd.common.model import ConditionKey, Inventory, KernelEvent, Mode, Outcome, Severity

log = logging.getLogger("healthd")

JOURNAL_SECONDS = 20.0
JOURNAL_LINES = 10_000
# Per kind at most MAX_LOG_LINES events in LOG_PERIOD_SECONDS have a line in healthd's log; the others are counted. Any
# user can cause endless kernel lines (a loop of segfaults). Events that drain always have a line.
MOST_TOLD, TOLD_SECONDS = 10, 60.0
INCIDENT_SECONDS = 600.0  # how far back the log is searched for other events of an incident
Kinds = tuple[str, ...]


class Hearing:
    """Takes kernel events. Methods return the kinds of new events, because some checks run at once after an event.

    configured   the settings in force; a reload replaces them
    incidents    condition -> first condition of the same fault
    """

    def __init__(
        self,
        configured: Configured,
        memory: Memory,
        kernel: Listener,
        job_at_source: JobAtSource,
        now: Callable[[], float],
    ) -> None:
        self.configured = configured
        self.kernel = kernel
        self.job_at_source = job_at_source
        self.incidents: dict[ConditionKey, ConditionKey] = {}
        self.events_forgotten = 0
        self._told: dict[str, list[float]] = {}  # kind -> times of its last log lines, at most MAX_LOG_LINES
        self._untold: Counter[str] = Counter()
        self._untold_since = 0.0
        self._memory = memory
        self._now = now

    # --- waiting

    def waits(self) -> Iterator[tuple[int, bool]]:
        yield from self.kernel.waits()
        yield from self.job_at_source.waits()

    @property
    def deadline(self) -> float:
        return min(self.kernel.deadline, self.job_at_source.deadline)

    def listen(self) -> Kinds:
        """Take the lines that the kernel wrote since the last call."""
        news = self.hear(self.kernel.read())
        self._tell_how_many_more()
        self.hear_of_jobs()
        if self.kernel.status.source not in self._memory.ledger.cursors:
            self.note_cursor()  # from now on every line counts as new, also those written while healthd is stopped
        return news

    # --- events

    def hear(self, events: Sequence[KernelEvent]) -> Kinds:
        """Take events and save them together with the log's cursor, so that each event counts once."""
        if not events:
            return ()
        news = self._take_in_what_can_be(events)
        self.note_cursor()
        self._memory.save()
        return tuple(dict.fromkeys(news))

    def _take_in_what_can_be(self, events: Sequence[KernelEvent]) -> Kinds:
        """Take the events that can be taken.

        If an event causes an exception, halving finds it. It counts as an unreadable line; the other events are taken.
        """
        before = self._memory.ledger, self.events_forgotten
        try:
            return self.take_in(events)
        except Exception as error:
            ledger, self.events_forgotten = before
            self._memory.set(ledger)
            if len(events) > 1:
                half = len(events) // 2
                return (*self._take_in_what_can_be(events[:half]), *self._take_in_what_can_be(events[half:]))
            guard.drop(KERNEL_LOG, error, events[0].text)
            self._memory.take(intake.unread(self._memory.ledger, events[0]))
            return ()

    def take_in(self, events: Sequence[KernelEvent]) -> Kinds:
        memory, before = self._memory, self._memory.ledger
        taken = self._with_jobs(intake.coalesced(before, events))
        heard = intake.judged(before, taken, self.configured.listeners, self._now())
        for event, mistake in heard.mistakes:
            guard.drop(KERNEL_LOG, mistake, event.text if event else "events that came together")
        known = set(memory.conditions)
        memory.take(heard.ledger)
        self._count_forgotten(heard.forgotten)
        with guard.at(KERNEL_LOG):  # a mistake in logging must not affect the intake
            self._tell(heard, {event.sequence: event.lines for event in before.events})
            if not known.issuperset(memory.conditions):
                self._tell_incidents()
        return tuple(event.kind for event in heard.news)

    def know(self, inventory: Inventory) -> None:
        """Take the inventory that the worker read. Earlier events get the names of their parts now."""
        memory, before = self._memory, self._memory.ledger
        after = replace(before, inventory=inventory)
        with guard.at(KERNEL_LOG):  # a mistake in names must not affect the intake
            after = intake.with_inventory(before, inventory, self.configured.listeners)
        memory.take(after)
        with guard.at(KERNEL_LOG):
            memory.stream.emit(*telling.named(before, memory.ledger, self._now()))
            tell(log_lines.of_names(before, memory.ledger))
            self._tell_incidents()

    def _with_jobs(self, taken: intake.Coalesced) -> intake.Coalesced:
        gpus = self._memory.ledger.inventory.gpus
        with guard.at(KERNEL_LOG):  # the evaluation does not need the jobs
            return taken._replace(events=self.job_at_source.name(taken.events, taken.touched, gpus, self._now()))
        return taken

    def _tell(self, heard: intake.Heard, before: Mapping[int, int]) -> None:
        """Log new events. `lines_before`: number of lines that each event had."""
        found = (finding for mine in heard.findings.values() for finding in mine)
        drain = {sequence for f in found if f.severity >= Severity.DEGRADED for sequence in f.events}
        for event in heard.news:
            # A growing event is logged again at 10, 100, ... lines, so that a storm does not flood the journal.
            if len(str(event.lines)) > len(str(before.get(event.sequence, ""))):
                drains = event.sequence in drain and not event.observed
                if self._has_a_line(event.kind) or drains:
                    log.info("kernel: %s%s", event.text[:300], f" ({event.lines} lines)" if event.lines > 1 else "")
                else:
                    self._untold_since = self._untold_since or self._now()
                    self._untold[event.kind] += 1

    def _has_a_line(self, kind: str) -> bool:
        now = self._now()
        told = [when for when in self._told.get(kind, ()) if 0.0 <= now - when < TOLD_SECONDS]
        has_one = len(told) < MOST_TOLD
        self._told[kind] = [*told, now] if has_one else told
        return has_one

    def _tell_how_many_more(self) -> None:
        """Log once a minute how many events had no line of their own."""
        if self._untold and not 0.0 <= self._now() - self._untold_since < TOLD_SECONDS:
            kinds = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(self._untold.items()))
            log.info("kernel: further events, not logged one by one: %s", kinds)
            self._untold.clear()
            self._untold_since = 0.0

    def _count_forgotten(self, events: int) -> None:
        before, self.events_forgotten = self.events_forgotten, self.events_forgotten + events
        if events and len(str(self.events_forgotten)) > len(str(before or "")):
            sentence = "%d kernel events were evaluated but are no longer kept: more than %d came in a day"
            log.warning(sentence, self.events_forgotten, KEEP_EVENTS)

    def _tell_incidents(self) -> None:
        """Find conditions with one cause. The log reports them when one opens; the status shows them while they are
        open."""
        ledger = self._memory.ledger
        since = self._now() - INCIDENT_SECONDS
        events = [event for event in ledger.events if event.last_time >= since and not event.history]
        found = incidents.causes(ledger.conditions, events, ledger.inventory)
        for follows, first in found.items():
            if self.incidents.get(follows) != first:
                log.warning("incident: %s belongs to the incident of %s", follows, first)
        standing = self._memory.conditions
        self.incidents = {follows: first for follows, first in self.incidents.items() if follows in standing} | found

    def standing_incidents(self) -> dict[ConditionKey, ConditionKey]:
        standing = self._memory.conditions
        return {
            follows: first for follows, first in self.incidents.items() if follows in standing and first in standing
        }

    # --- jobs at the source of events

    def hear_of_jobs(self) -> None:
        """Take jobs that Slurm reports a moment later, if it uses no cgroups."""
        ledger, may_ask_slurm = self._memory.ledger, self.configured.settings.mode is not Mode.OBSERVE
        jobs: dict[int, str] = {}
        with guard.at(SLURM):
            jobs = self.job_at_source.step(ledger.events, ledger.inventory.gpus, self._now(), may_ask_slurm)
        if jobs:
            self._memory.take(intake.told_of_jobs(ledger, jobs, self.configured.listeners))
            self._memory.save()

    # --- cursor of the log, and lost lines

    def note_cursor(self) -> None:
        """Record the position in the log, to be saved together with the events up to it."""
        if self.kernel.cursor is not None:
            cursors = {**self._memory.ledger.cursors, self.kernel.status.source: self.kernel.cursor}
            self._memory.change(cursors=cursors)

    def round_is_over(self) -> None:
        self.kernel.round_is_over()
        self.note_cursor()

    def journal_request(self) -> Request | None:
        """Return a request for lines that the ring buffer lost. The worker reads the journal, whose files are on a
        disk."""
        gap = self.kernel.gap()
        if gap is None:
            return None
        accept_injected = self.configured.settings.kernel_log.accept_injected
        boot_id = self._memory.ledger.boot_id
        asked = ReadJournal(boot_id, gap.since_usec, gap.until_usec, JOURNAL_LINES, accept_injected, gap.history)
        return Request("journal", JOURNAL_SECONDS, asked)

    def hear_from_journal(self, reply: Reply) -> Kinds:
        """Take the lines of the journal for a gap in the ring buffer."""
        asked = reply.request.asked
        assert isinstance(asked, ReadJournal)
        gap = Gap(asked.since_usec, asked.until_usec, asked.history)
        if reply.outcome is not Outcome.COMPLETED:
            self.kernel.not_filled(gap, reply.error)
            return ()
        try:
            assert isinstance(reply.answer, tuple)
            lines = [RawLine(when, text, usec=usec) for when, text, usec, _ in reply.answer]
            events = self.kernel.filled(gap, lines, asked.limit)
        except Exception as error:
            guard.drop(KERNEL_LOG, error, "the journal's lines")
            self.kernel.not_filled(gap, f"internal error in healthd with the journal's lines: {guard.words(error)}")
            return ()
        return self.hear(events)
