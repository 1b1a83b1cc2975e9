"""Reader for the kernel log. It keeps a source open, and reopens the source with backoff after an error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from healthd.agent.kernel_log.kmsg import Kmsg
from healthd.agent.kernel_log.open_source import open_source
from healthd.agent.kernel_log.parse import UNREAD
from healthd.agent.kernel_log.source import Gap, RawLine, Source, make_event, merge_repeats
from healthd.common.guard import KERNEL_LOG, describe_error, drop
from healthd.common.model import KernelEvent, KernelLogStatus, SourceStatus

log = logging.getLogger("healthd.agent.kernel_log.source")

RETRY_SECONDS = (1.0, 5.0, 30.0, 300.0)
GAP_TRIES = 5
READ_SECONDS = 0.05  # maximum duration of one read in a storm, so that other sources are served too
MAX_LINES_PER_READ = 4000  # maximum number of lines per read, without repeats
FORGEABLE_NOTE = (
    "lines of {} are only observed and never drain, because any user can forge them: use "
    'kernel_log.source = "kmsg", or set kernel_log.trust_file = true to trust the file'
)


class KernelLogReader:
    """Reads KernelEvents and reports the source's status. Call `open()` first.

    `observed` is True if users can forge the source's lines (config.is_kernel_log_forgeable).
    """

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
        self._previous_counts = (0, 0, 0, 0)  # counts of earlier sources
        self._last_read = 0.0
        problem = "" if spec != "off" else "disabled"
        self.status = KernelLogStatus(spec, alive=False, problem=problem, observed=observed)
        self.journal = SourceStatus("journal", up=True)

    def waits(self) -> Iterator[tuple[int, bool]]:
        descriptor = self._source.fileno() if self._source else None
        if descriptor is not None:
            yield descriptor, False

    @property
    def deadline(self) -> float:
        """Time of the next read without a wakeup, either to reopen the source or because the last read left lines
        unread.
        """
        if self._source is None:
            return float("inf") if self._spec == "off" else self._retry_at
        return 0.0 if self._source.pending else float("inf")

    @property
    def cursor(self) -> Any:
        return self._source.cursor if self._source else self._cursor

    @property
    def sources(self) -> Iterator[SourceStatus]:
        """Status of the open sources, for the metrics. There are none if the kernel log is off."""
        status = self.status
        if self._spec == "off":
            return
        yield SourceStatus(
            "kernel_log",
            status.alive,
            self._last_read,
            status.restarts_total,
            status.overruns_total,
            status.lost_total,
            status.malformed_total,
            status.rotations_total,
            status.problem,
        )
        if self._spec == "kmsg":
            yield self.journal

    def read(self) -> list[KernelEvent]:
        """Return the events from the available lines. In a storm, reading stops after READ_SECONDS."""
        if self._source is None and self._monotonic() >= self._retry_at:
            self._open()
        source = self._source
        if source is None:
            return []
        lines: list[RawLine] = []
        until = self._monotonic() + READ_SECONDS
        try:
            while True:
                lines += merge_repeats(source.read())
                if not source.pending or len(lines) >= MAX_LINES_PER_READ or self._monotonic() >= until:
                    break
            self._failures = 0
            self._last_read = self._now()
        except Exception as error:
            self._handle_failure(f"{self._spec}: {_describe(error)}")
        for note in source.take_notes():
            log.warning("kernel log: %s", note)
        return self._events(merge_repeats(lines))

    def _events(self, lines: Iterable[RawLine]) -> list[KernelEvent]:
        read = [(line.lines, make_event(line, self._boot_id, self.status.observed)) for line in lines]
        events = [event for _, event in read if event is not None]
        lost, overruns, malformed, rotations = self._previous_counts
        malformed += sum(event.lines for event in events if event.kind == UNREAD)
        self._previous_counts = (lost, overruns, malformed, rotations)
        self._update_status(sum(count for count, _ in read), sum(event.lines for event in events))
        return events

    # --- gaps in the ring buffer, which the journal fills

    def gap(self) -> Gap | None:
        """Return the gap to read from the journal now."""
        gaps = self._source.gaps if isinstance(self._source, Kmsg) else ()
        return gaps[0] if gaps and not self._gap_waits else None

    def fill_gap(self, gap: Gap, lines: Sequence[RawLine], limit: int) -> list[KernelEvent]:
        """Return the events from the journal's lines in a gap. If there are `limit` lines, the rest of the gap is
        kept.
        """
        self._gap_failures = 0
        last = lines[-1].usec if len(lines) >= limit else None
        if isinstance(self._source, Kmsg):
            self._source.fill_gap(gap, gap._replace(since_usec=last) if last is not None else None)
        self.journal = replace(self.journal, up=True, last_read=self._now(), problem="")
        return self._events(merge_repeats(line._replace(history=gap.history) for line in lines))

    def gap_failed(self, gap: Gap, why: str) -> None:
        """Handle a failed read of the journal. The next rounds retry, at most GAP_TRIES times."""
        self._gap_failures += 1
        self._gap_waits = self._gap_failures < GAP_TRIES
        restarts = self.journal.restarts_total + 1
        self.journal = replace(self.journal, up=False, problem=why, restarts_total=restarts)
        if not self._gap_waits:
            log.error("the journal could not be read %d times; kernel lines remain lost: %s", GAP_TRIES, why)
            self._gap_failures = 0
            if isinstance(self._source, Kmsg):
                self._source.fill_gap(gap)

    def end_round(self) -> None:
        self._gap_waits = False
        if isinstance(self._source, Kmsg):
            try:
                self._source.check_delivery()
            except OSError as error:
                self._handle_failure(f"{self._spec}: {_describe(error)}")

    # --- opening and closing

    def open(self, cursor: Any = None) -> None:
        """Open the source. `cursor` is the position where an earlier reader stopped, or None."""
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
                self._cursor = None  # the cursor from an earlier daemon may be the cause
            self._handle_failure(f"{self._spec}: {_describe(error)}")
            return
        missing = self._source.missing
        self.status = replace(self.status, alive=not missing, problem=missing or self._forgeable_note())

    def _forgeable_note(self) -> str:
        return FORGEABLE_NOTE.format(self._spec) if self.status.observed else ""

    def _handle_failure(self, problem: str) -> None:
        if self._source is not None:
            self._cursor = self._source.cursor
            self._previous_counts = self._total_counts()
            self.close()
            self._source = None
        wait = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        self._retry_at = self._monotonic() + wait
        restarts = self.status.restarts_total + 1
        self.status = replace(self.status, alive=False, problem=problem, restarts_total=restarts)
        log.error("the kernel log cannot be read, next try in %g s: %s", wait, problem)

    def _total_counts(self) -> tuple[int, int, int, int]:
        """Return (lost, overruns, malformed, rotations) over all sources since the start."""
        source = self._source
        if source is None:
            return self._previous_counts
        lost, overruns, malformed, rotations = self._previous_counts
        return (
            lost + source.lost,
            overruns + source.overruns,
            malformed + source.malformed,
            rotations + source.rotations,
        )

    def _update_status(self, lines: int, events: int) -> None:
        lost, overruns, malformed, rotations = self._total_counts()
        missing = self._source.missing if self._source else self.status.problem
        self.status = replace(
            self.status,
            alive=not missing,
            problem=missing or self._forgeable_note(),
            lines_total=self.status.lines_total + lines,
            events_total=self.status.events_total + events,
            lost_total=lost,
            overruns_total=overruns,
            malformed_total=malformed,
            rotations_total=rotations,
            last_line=self._now() if lines else self.status.last_line,
        )


def _describe(error: Exception) -> str:
    """Return text for a source's error. An unexpected exception is also logged, with its location."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ImportError):
        return str(error)
    drop(KERNEL_LOG, error)
    return describe_error(error)
