"""The event stream. Events are added as lines to the ledger's outbox and saved with the ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from healthd.agent.conditions import events
from healthd.agent.conditions.ledger import Ledger
from healthd.common import guard
from healthd.common.guard import STREAM
from healthd.common.model import Gpu, RunName
from healthd.events import outbox
from healthd.events.emitted import Emitted
from healthd.events.outbox import Outbox
from healthd.events.schema import Event, Source


class LedgerStore(Protocol):
    """Interface of the object that contains the ledger (store.py)."""

    ledger: Ledger
    boot_id: str

    def set(self, ledger: Ledger) -> None: ...


class EventStream:
    """Appends events of this node to the outbox.

    cluster   cluster name from healthd's settings, otherwise from Slurm's settings after they have been read
    dropped   number of lines since the start that did not fit into the outbox
    """

    def __init__(
        self,
        store: LedgerStore,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        node_name: str,
        cluster: str,
    ) -> None:
        self.dropped = 0
        self._store = store
        self._now = now
        self._monotonic = monotonic
        self._node_name = node_name
        self._cluster = cluster

    @property
    def cluster(self) -> str:
        return self._cluster or self._store.ledger.emitted.cluster

    def observe(self, before: Ledger, after: Ledger) -> None:
        """Emit the events for a change to the ledger."""
        with guard.dropping_errors(STREAM):  # an error in an event must not prevent the change
            self.emit(*events.change_events(before, after, self._now()))

    def emit(self, new: Iterable[Event], emitted: Emitted | None = None) -> None:
        """Append events to the outbox. `emitted` is the stream's new state, if it changed."""
        ledger = self._store.ledger
        appended = self._append(ledger.outbox, list(new))
        # Dropped events get a number too.
        self.dropped += appended.next_seq - ledger.outbox.next_seq - (len(appended.lines) - len(ledger.outbox.lines))
        self._store.set(replace(ledger, outbox=appended, emitted=emitted or ledger.emitted))

    def set_cluster(self, name: str) -> None:
        """Set the cluster's name from Slurm's settings; "" changes nothing."""
        ledger = self._store.ledger
        if name not in ("", ledger.emitted.cluster):
            self._store.set(replace(ledger, emitted=replace(ledger.emitted, cluster=name)))

    def emit_job_end(self) -> None:
        self.emit((), events.after_job_end(self._store.ledger.emitted, self._now()))

    def flush_after_job(self) -> None:
        if self._store.ledger.emitted.job_ended:
            self.emit(*events.flush_events(self._store.ledger, self._now()))

    def emit_alive(self, checks: Iterable[str], force: bool) -> None:
        """Emit "alive" once a day, or immediately with `force`. `checks` lists the checks whose runs completed."""
        if force or events.is_alive_due(self._store.ledger.emitted, self._now()):
            self.emit(*events.alive(self._store.ledger, checks, self._now()))

    def emit_gpus(self, present: Sequence[Gpu]) -> None:
        """Emit the node's GPUs if they changed or were last listed long ago. `present` is from the newest inventory."""
        with guard.dropping_errors(STREAM):
            self.emit(*events.gpus(self._store.ledger, present, self._now()))

    def emit_stopped(self, why: str) -> None:
        self.emit(*events.stopped(self._store.ledger.emitted, why))

    def emit_checks(self, configured: Mapping[RunName, tuple[str, str]]) -> None:
        """Emit changes to the configured checks."""
        self.emit(*events.checks(self._store.ledger.emitted, configured, self._now()))

    def mark_written(self, lines: Collection[str]) -> None:
        """Remove lines that are on disk.

        This does not save the ledger. A daemon that starts from an older ledger writes the same lines again, but the
        writer finds these lines in the file.
        """
        remaining = outbox.acknowledge(self._store.ledger.outbox, lines)
        self._store.ledger = replace(self._store.ledger, outbox=remaining)
        if remaining.dropped:
            self._store.set(replace(self._store.ledger, outbox=self._append(remaining, [])))

    def _append(self, pending: Outbox, new: Collection[Event]) -> Outbox:
        if not new and not pending.dropped:
            return pending
        source = Source(self.cluster, self._node_name, self._store.boot_id, pending.stream_id)
        return outbox.put(pending, new, source, self._now(), self._monotonic())
