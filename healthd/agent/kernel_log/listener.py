"""Keeps a kernel log source open and reads it: a source that dies is counted and opened again, with backoff."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from healthd.agent.kernel_log.kmsg import Kmsg
from healthd.agent.kernel_log.open_source import open_source
from healthd.agent.kernel_log.parse import UNREAD
from healthd.agent.kernel_log.source import Gap, RawLine, Source, event_of, unrepeated
from healthd.common.guard import KERNEL_LOG, drop, words
from healthd.common.model import KernelEvent, KernelLogStatus, SourceStatus

log = logging.getLogger("healthd.agent.kernel_log.source")

RETRY_SECONDS = (1.0, 5.0, 30.0, 300.0)
GAP_TRIES = 5
READ_SECONDS = 0.05  # a storm is read for so long at most; then its lines are processed and others get a turn
LINES_AT_ONCE = 4000  # kept in that time, repeats not counted
FORGEABLE = (
    "what {} says is only observed and never drains, since any user can forge a line of it: "
    'kernel_log.source = "kmsg" is proof against that, kernel_log.trust_file = true trusts the file'
)


class Listener:
    """It gives KernelEvents, and a status about itself, from `open()` on. `observed`: the source can be forged
    (config.only_observes_kernel_log)."""

    def __init__(
        self,
        spec: str,
        root: str,
        boot_id: str,
        accept_injected: bool,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        observed: bool = False,
    ) -> None:
        self._spec = spec
        self._root = root
        self._boot_id = boot_id
        self._cursor: Any = None
        self._accept_injected = accept_injected
        self._now = now
        self._monotonic = monotonic
        self._source: Source | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._gap_failures = 0
        self._gap_waits = False
        self._before = (0, 0, 0, 0)  # what sources that died had counted
        self._last_read = 0.0
        problem = "" if spec != "off" else "switched off"
        self.status = KernelLogStatus(spec, alive=False, problem=problem, observed=observed)
        self.journal = SourceStatus("journal", up=True)

    def waits(self) -> Iterator[tuple[int, bool]]:
        descriptor = self._source.fileno() if self._source else None
        if descriptor is not None:
            yield descriptor, False

    @property
    def deadline(self) -> float:
        """When to look without being woken: to open the source again, or because one read did not take all."""
        if self._source is None:
            return float("inf") if self._spec == "off" else self._retry_at
        return 0.0 if self._source.pending else float("inf")

    @property
    def cursor(self) -> Any:
        return self._source.cursor if self._source else self._cursor

    @property
    def sources(self) -> Iterator[SourceStatus]:
        """The sources that are listened to, for the metrics: none where the log is switched off."""
        k = self.status
        if self._spec == "off":
            return
        yield SourceStatus(
            "kernel_log",
            k.alive,
            self._last_read,
            k.restarts_total,
            k.overruns_total,
            k.lost_total,
            k.malformed_total,
            k.rotations_total,
            k.problem,
        )
        if self._spec == "kmsg":
            yield self.journal

    def read(self) -> list[KernelEvent]:
        """The events in the lines that are there now; in a storm, in those that READ_SECONDS allow to read."""
        if self._source is None and self._monotonic() >= self._retry_at:
            self._open()
        source = self._source
        if source is None:
            return []
        lines: list[RawLine] = []
        until = self._monotonic() + READ_SECONDS
        try:
            while True:
                lines += unrepeated(source.read())
                if not source.pending or len(lines) >= LINES_AT_ONCE or self._monotonic() >= until:
                    break
            self._failures = 0
            self._last_read = self._now()
        except Exception as error:
            self._failed(f"{self._spec}: {_why(error)}")
        for note in source.take_notes():
            log.warning("kernel log: %s", note)
        return self._events(unrepeated(lines))

    def _events(self, lines: Iterable[RawLine]) -> list[KernelEvent]:
        read = [(line.lines, event_of(line, self._boot_id, self.status.observed)) for line in lines]
        events = [event for _, event in read if event is not None]
        lost, overruns, malformed, rotations = self._before
        malformed += sum(event.lines for event in events if event.kind == UNREAD)
        self._before = (lost, overruns, malformed, rotations)
        self._count(sum(count for count, _ in read), sum(event.lines for event in events))
        return events

    # --- lines that the ring buffer lost, for the journal to fill

    def gap(self) -> Gap | None:
        """The gap to ask the journal about now."""
        gaps = self._source.gaps if isinstance(self._source, Kmsg) else ()
        return gaps[0] if gaps and not self._gap_waits else None

    def filled(self, gap: Gap, lines: Sequence[RawLine], limit: int) -> list[KernelEvent]:
        """The events in the lines that the journal has of a gap. `limit` lines are not all: the rest stays a gap."""
        self._gap_failures = 0
        last = lines[-1].usec if len(lines) >= limit else None
        if isinstance(self._source, Kmsg):
            self._source.filled(gap, gap._replace(since_usec=last) if last is not None else None)
        self.journal = replace(self.journal, up=True, last_read=self._now(), problem="")
        return self._events(unrepeated(line._replace(history=gap.history) for line in lines))

    def not_filled(self, gap: Gap, why: str) -> None:
        """The journal could not be read. It is tried again in the next round, but not for ever."""
        self._gap_failures += 1
        self._gap_waits = self._gap_failures < GAP_TRIES
        restarts = self.journal.restarts_total + 1
        self.journal = replace(self.journal, up=False, problem=why, restarts_total=restarts)
        if not self._gap_waits:
            log.error("the journal could not be read %d times: kernel lines stay lost: %s", GAP_TRIES, why)
            self._gap_failures = 0
            if isinstance(self._source, Kmsg):
                self._source.filled(gap)

    def round_is_over(self) -> None:
        self._gap_waits = False
        if isinstance(self._source, Kmsg):
            try:
                self._source.listen_in()
            except OSError as error:
                self._failed(f"{self._spec}: {_why(error)}")

    # --- open and closed

    def open(self, cursor: Any = None) -> None:
        """`cursor`: where an earlier listener stopped; None: nowhere."""
        self._cursor = cursor
        self._open()

    def close(self) -> None:
        if self._source is not None:
            with contextlib.suppress(OSError):  # the descriptor itself may be broken
                self._source.close()

    def _open(self) -> None:
        if self._spec == "off":
            return
        try:
            self._source = open_source(self._spec, self._root, self._cursor, self._accept_injected, self._now)
        except Exception as error:
            if not isinstance(error, OSError | ImportError):
                self._cursor = None  # the cursor that an earlier daemon left may be the cause
            self._failed(f"{self._spec}: {_why(error)}")
            return
        missing = self._source.missing
        self.status = replace(self.status, alive=not missing, problem=missing or self._forgeable())

    def _forgeable(self) -> str:
        return FORGEABLE.format(self._spec) if self.status.observed else ""

    def _failed(self, problem: str) -> None:
        if self._source is not None:
            self._cursor = self._source.cursor
            self._before = self._counted()
            self.close()
            self._source = None
        wait = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        self._retry_at = self._monotonic() + wait
        restarts = self.status.restarts_total + 1
        self.status = replace(self.status, alive=False, problem=problem, restarts_total=restarts)
        log.error("kernel log cannot be read, trying again in %g s: %s", wait, problem)

    def _counted(self) -> tuple[int, int, int, int]:
        """(lost, overruns, malformed, rotations) of all sources since the start."""
        source = self._source
        if source is None:
            return self._before
        lost, overruns, malformed, rotations = self._before
        return (
            lost + source.lost,
            overruns + source.overruns,
            malformed + source.malformed,
            rotations + source.rotations,
        )

    def _count(self, lines: int, events: int) -> None:
        lost, overruns, malformed, rotations = self._counted()
        missing = self._source.missing if self._source else self.status.problem
        self.status = replace(
            self.status,
            alive=not missing,
            problem=missing or self._forgeable(),
            lines_total=self.status.lines_total + lines,
            events_total=self.status.events_total + events,
            lost_total=lost,
            overruns_total=overruns,
            malformed_total=malformed,
            rotations_total=rotations,
            last_line=self._now() if lines else self.status.last_line,
        )


def _why(error: Exception) -> str:
    """The text of a source's error. An error that no source should raise is healthd's own mistake: with its place."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ImportError):
        return str(error)
    drop(KERNEL_LOG, error)
    return words(error)
