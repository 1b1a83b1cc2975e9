"""The daemon's handling of kernel events. Events become conditions, are assigned to jobs, and are logged.

A pure function evaluates the events (agent/conditions/intake.py). An error in one event does not affect the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.conditions import events as stream_events
from healthd.agent.conditions import incidents, intake, log_lines
from healthd.agent.conditions.ledger import MAX_EVENTS
from healthd.agent.conditions.store import ConditionStore, write_log_lines
from healthd.agent.kernel_log.log_reader import KernelLogReader
from healthd.agent.kernel_log.source import Gap, RawLine
from healthd.agent.settings.configured import Configured
from healthd.agent.slurm.event_jobs import EventJobFinder
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import ReadJournal
from healthd.common import guard
from healthd.common.guard import KERNEL_LOG, SLURM
from healthd.common.model import ConditionKey, Inventory, KernelEvent, Mode, Outcome, Severity

log = logging.getLogger("healthd")

JOURNAL_SECONDS = 20.0
JOURNAL_LINES = 10_000
# Per kind, at most MAX_LOG_LINES events in LOG_PERIOD_SECONDS get a line in healthd's log, and the others are counted.
# Any user can cause endless kernel lines (a loop of segfaults). Events that drain always get a line.
MAX_LOG_LINES, LOG_PERIOD_SECONDS = 10, 60.0
INCIDENT_SECONDS = 600.0  # how far back the log is searched for an incident's other events
Kinds = tuple[str, ...]


class KernelEventIntake:
    """Handles kernel events. Methods return the kinds of new events, because some checks run at once after an event.

    configured   the settings in force; a reload replaces them
    incidents    maps a condition to the first condition of the same fault
    """

    def __init__(
        self,
        configured: Configured,
        store: ConditionStore,
        listener: KernelLogReader,
        job_finder: EventJobFinder,
        now: Callable[[], float],
    ) -> None:
        self.configured = configured
        self.listener = listener
        self.job_finder = job_finder
        self.incidents: dict[ConditionKey, ConditionKey] = {}
        self.events_forgotten = 0
        self._logged: dict[str, list[float]] = {}  # by kind: times of the last log lines, at most MAX_LOG_LINES
        self._unlogged: Counter[str] = Counter()
        self._unlogged_since = 0.0
        self._store = store
        self._now = now

    # --- waiting

    def waits(self) -> Iterator[tuple[int, bool]]:
        yield from self.listener.waits()
        yield from self.job_finder.waits()

    @property
    def deadline(self) -> float:
        return min(self.listener.deadline, self.job_finder.deadline)

    def read_log(self) -> Kinds:
        """Read and handle the kernel's log lines since the last call."""
        new_kinds = self.take_events(self.listener.read())
        self._log_unlogged_counts()
        self.take_jobs()
        if self.listener.status.source not in self._store.ledger.cursors:
            self.note_cursor()  # from now on, every line is new, even lines logged while healthd is stopped
        return new_kinds

    # --- events

    def take_events(self, events: Sequence[KernelEvent]) -> Kinds:
        """Add events to the ledger and save them with the log's cursor, so that each event is counted once."""
        if not events:
            return ()
        new_kinds = self._apply_valid_events(events)
        self.note_cursor()
        self._store.save()
        return tuple(dict.fromkeys(new_kinds))

    def _apply_valid_events(self, events: Sequence[KernelEvent]) -> Kinds:
        """Add all events that do not cause an exception.

        An event that causes an exception is found by bisection and counted as an unreadable line. The others are added.
        """
        before = self._store.ledger, self.events_forgotten
        try:
            return self.apply_events(events)
        except Exception as error:
            ledger, self.events_forgotten = before
            self._store.set(ledger)
            if len(events) > 1:
                half = len(events) // 2
                return (*self._apply_valid_events(events[:half]), *self._apply_valid_events(events[half:]))
            guard.drop(KERNEL_LOG, error, events[0].text)
            self._store.commit(intake.take_unreadable_line(self._store.ledger, events[0]))
            return ()

    def apply_events(self, events: Sequence[KernelEvent]) -> Kinds:
        store, before = self._store, self._store.ledger
        coalesced = self._with_jobs(intake.coalesce(before, events))
        result = intake.take_coalesced_events(before, coalesced, self.configured.event_checks, self._now())
        for event, error in result.failures:
            guard.drop(KERNEL_LOG, error, event.text if event else "several events together")
        keys_before = set(store.conditions)
        store.commit(result.ledger)
        self._count_forgotten(result.forgotten)
        with guard.dropping_errors(KERNEL_LOG):  # an error in logging must not affect the intake
            self._log_events(result, {event.sequence: event.lines for event in before.events})
            if not keys_before.issuperset(store.conditions):
                self._log_incidents()
        return tuple(event.kind for event in result.new_events)

    def take_inventory(self, inventory: Inventory) -> None:
        """Add the inventory that the worker read. Earlier events then get the names of their parts."""
        store, before = self._store, self._store.ledger
        after = replace(before, inventory=inventory)
        with guard.dropping_errors(KERNEL_LOG):  # an error in the names must not affect the intake
            after = intake.take_inventory(before, inventory, self.configured.event_checks)
        store.commit(after)
        with guard.dropping_errors(KERNEL_LOG):
            store.stream.emit(*stream_events.renamed_part_events(before, store.ledger, self._now()))
            write_log_lines(log_lines.renamed_part_lines(before, store.ledger))
            self._log_incidents()

    def _with_jobs(self, coalesced: intake.Coalesced) -> intake.Coalesced:
        gpus = self._store.ledger.inventory.gpus
        with guard.dropping_errors(KERNEL_LOG):  # the evaluation does not depend on the jobs
            return coalesced._replace(
                events=self.job_finder.add_jobs(coalesced.events, coalesced.touched, gpus, self._now())
            )
        return coalesced

    def _log_events(self, result: intake.EventIntake, lines_before: Mapping[int, int]) -> None:
        """Log new events. `lines_before` maps each event to the number of lines that it had before."""
        found = (finding for check_findings in result.findings.values() for finding in check_findings)
        drain_sequences = {sequence for f in found if f.severity >= Severity.DEGRADED for sequence in f.events}
        for event in result.new_events:
            # A growing event is logged again at 10, 100, ... lines, to keep a storm from flooding the journal.
            if len(str(event.lines)) > len(str(lines_before.get(event.sequence, ""))):
                drains = event.sequence in drain_sequences and not event.observed
                if self._may_log(event.kind) or drains:
                    log.info("kernel: %s%s", event.text[:300], f" ({event.lines} lines)" if event.lines > 1 else "")
                else:
                    self._unlogged_since = self._unlogged_since or self._now()
                    self._unlogged[event.kind] += 1

    def _may_log(self, kind: str) -> bool:
        now = self._now()
        recent = [time for time in self._logged.get(kind, ()) if 0.0 <= now - time < LOG_PERIOD_SECONDS]
        may_log = len(recent) < MAX_LOG_LINES
        self._logged[kind] = [*recent, now] if may_log else recent
        return may_log

    def _log_unlogged_counts(self) -> None:
        """Log once a minute the number of events without their own line."""
        if self._unlogged and not 0.0 <= self._now() - self._unlogged_since < LOG_PERIOD_SECONDS:
            kinds = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(self._unlogged.items()))
            log.info("kernel: further events that were not logged individually: %s", kinds)
            self._unlogged.clear()
            self._unlogged_since = 0.0

    def _count_forgotten(self, events: int) -> None:
        before, self.events_forgotten = self.events_forgotten, self.events_forgotten + events
        if events and len(str(self.events_forgotten)) > len(str(before or "")):
            sentence = "%d kernel events were evaluated but are no longer kept: more than %d came in a day"
            log.warning(sentence, self.events_forgotten, MAX_EVENTS)

    def _log_incidents(self) -> None:
        """Find incidents: conditions with a common cause.

        An incident is logged when one of its conditions opens, and is shown in the status while it is open.
        """
        ledger = self._store.ledger
        since = self._now() - INCIDENT_SECONDS
        events = [event for event in ledger.events if event.last_time >= since and not event.history]
        found = incidents.causes(ledger.conditions, events, ledger.inventory)
        for later, first in found.items():
            if self.incidents.get(later) != first:
                log.warning("incident: %s belongs to the same incident as %s", later, first)
        active = self._store.conditions
        self.incidents = {later: first for later, first in self.incidents.items() if later in active} | found

    def active_incidents(self) -> dict[ConditionKey, ConditionKey]:
        active = self._store.conditions
        return {later: first for later, first in self.incidents.items() if later in active and first in active}

    # --- jobs that caused events

    def take_jobs(self) -> None:
        """Add the jobs that caused earlier events. Without cgroups, Slurm reports these jobs a moment later."""
        ledger, may_query_slurm = self._store.ledger, self.configured.settings.mode is not Mode.OBSERVE
        jobs: dict[int, str] = {}
        with guard.dropping_errors(SLURM):
            jobs = self.job_finder.step(ledger.events, ledger.inventory.gpus, self._now(), may_query_slurm)
        if jobs:
            self._store.commit(intake.take_jobs(ledger, jobs, self.configured.event_checks))
            self._store.save()

    # --- log cursor and lost lines

    def note_cursor(self) -> None:
        """Record the position in the log, to be saved with the events before it."""
        if self.listener.cursor is not None:
            cursors = {**self._store.ledger.cursors, self.listener.status.source: self.listener.cursor}
            self._store.change(cursors=cursors)

    def end_round(self) -> None:
        self.listener.end_round()
        self.note_cursor()

    def journal_request(self) -> Request | None:
        """Return a request for lines that the ring buffer lost. The worker reads them from the journal, whose files are
        on a disk.
        """
        gap = self.listener.gap()
        if gap is None:
            return None
        accept_injected = self.configured.settings.kernel_log.accept_injected
        boot_id = self._store.ledger.boot_id
        query = ReadJournal(boot_id, gap.since_usec, gap.until_usec, JOURNAL_LINES, accept_injected, gap.history)
        return Request("journal", JOURNAL_SECONDS, query)

    def take_journal_reply(self, reply: Reply) -> Kinds:
        """Add the journal's lines for a gap in the ring buffer."""
        query = reply.request.operation
        assert isinstance(query, ReadJournal)
        gap = Gap(query.since_usec, query.until_usec, query.history)
        if reply.outcome is not Outcome.COMPLETED:
            self.listener.gap_failed(gap, reply.error)
            return ()
        try:
            assert isinstance(reply.answer, tuple)
            lines = [RawLine(time, text, usec=usec) for time, text, usec, _ in reply.answer]
            events = self.listener.fill_gap(gap, lines, query.limit)
        except Exception as error:
            guard.drop(KERNEL_LOG, error, "the journal's lines")
            self.listener.gap_failed(
                gap, f"internal error in healthd with the journal's lines: {guard.describe_error(error)}"
            )
            return ()
        return self.take_events(events)
