"""The daemon's store for the ledger: load it at startup, replace it at each change, save and copy it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

import healthd
from healthd.agent.conditions import endings, events, log_lines, state_files
from healthd.agent.conditions import ledger as ledgers
from healthd.agent.conditions.condition import ended
from healthd.agent.conditions.durable_file import rewrite_file
from healthd.agent.conditions.event_stream import EventStream
from healthd.agent.conditions.ledger import VERSION, Ledger
from healthd.agent.conditions.log_lines import Line
from healthd.agent.conditions.state_files import LedgerError
from healthd.common import guard, history, values
from healthd.common.guard import LEDGER, LOG
from healthd.common.model import Condition, ConditionKey, Ending, Mode, RunName, Severity
from healthd.common.values import DecodeError
from healthd.events import outbox

log = logging.getLogger("healthd")

FILE = "ledger.json"
PAST_FILE = "past.json"
NAMES = (FILE, PAST_FILE)
LOG_LEVELS = {
    Severity.INFO: logging.INFO,
    Severity.WARNING: logging.WARNING,
}  # log level for each severity; higher severities are logged as errors
QUIET_STEP_SECONDS = 1.0  # windows last from minutes to days


class ConditionStore:
    """Contains the ledger and `past`, which maps each check to its counters as text. Only the worker decodes that text.

    unsaved              True if a kill would lose something that the next round does not report again
    uncopied             True if a reboot would lose something
    node_name, cluster   fields for the event stream (event_stream.py)
    is_loaded            until this is True, the ledger is not the recorded one, and `save` does not touch the files,
                         because the next start would prefer an empty live ledger to the copy
    """

    def __init__(
        self,
        runtime_dir: str,
        now: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        node_name: str = "",
        cluster: str = "",
    ) -> None:
        self._runtime_dir = runtime_dir
        self._now = now
        self.boot_id = ""
        self.booted_at = 0.0  # epoch seconds of healthd's first start in this boot; 0 if this is not the first
        self.is_loaded = False
        self.ledger = Ledger()
        self.past: dict[str, str] = {}
        self._indexed_conditions: tuple[Condition, ...] = ()
        self._conditions: dict[ConditionKey, Condition] = {}
        self._ack_conditions: tuple[Condition, ...] = ()
        self._next_ack_expiry = float("inf")
        self.unsaved = False
        self.uncopied = False
        self.slurm_uncopied = False  # True if an action in Slurm or a step of a repair is not in any copy yet
        self._past_unsaved = False
        self._past_is_urgent = False  # a command or a clock step changed the counters; save them at once
        self._quiet_seconds = 0.0  # time that has passed but is not yet added to any window
        self._saved_ledger: Ledger | None = None  # the ledger that the file contains
        self.save_failed = False
        self.copy_unreadable = False  # if an existing copy may be unreadable, the next copy does not replace it
        self.copied_at = 0.0  # when the copy was written; 0 if unknown
        self.stream = EventStream(self, now, monotonic, node_name, cluster)
        # Called with the ledger before and after a change, before the cleared conditions are trimmed.
        self.observers: list[Callable[[Ledger, Ledger], None]] = [self.stream.observe, log_change]

    @property
    def conditions(self) -> dict[ConditionKey, Condition]:
        """Conditions that are not cleared. Do not change the dict in place."""
        if self._indexed_conditions is not self.ledger.conditions:
            self._indexed_conditions, self._conditions = self.ledger.conditions, self.ledger.by_key()
        return self._conditions

    @property
    def next_ack_expiry(self) -> float:
        """Time at which `end_expired_acks` is due (epoch seconds). It is computed again only when the conditions have
        changed.
        """
        if self._ack_conditions is not self.ledger.conditions:
            self._ack_conditions, self._next_ack_expiry = (
                self.ledger.conditions,
                endings.next_ack_expiry(self.ledger.conditions),
            )
        return self._next_ack_expiry

    # --- load

    def load(
        self, read_copy: Callable[[], dict[str, str | None]], boot_id: str, mode: Mode, last_alive: float = 0.0
    ) -> None:
        """Load the live ledger or its copy, or start a new ledger. Then apply a boot and a mode change, if any.

        read_copy   returns the texts of the copy in the state directory, or {} if it cannot be read (which it logs)
        last_alive  last time at which the live ledger's daemon is known to have run (epoch seconds); 0 if unknown
        """
        self.boot_id = boot_id
        self._load(read_copy, boot_id, mode, last_alive)
        self.is_loaded = True

    def _load(
        self, read_copy: Callable[[], dict[str, str | None]], boot_id: str, mode: Mode, last_alive: float
    ) -> None:
        with guard.dropping_errors(LEDGER, self._path(FILE)):
            if (live := self._live_ledger()) is not None:
                try:
                    self._continue_from(live, boot_id, mode, last_alive)
                except Exception:
                    log.error("the ledger was moved to %s", state_files.set_aside(self._path(FILE)))
                    raise
                self._saved_ledger = live
                return
        with guard.dropping_errors(LEDGER, "the copy of the ledger"):
            if (copied := self._copied_ledger(read_copy)) is not None:
                self.copy_unreadable = True
                self._continue_from(_with_new_stream(copied), boot_id, mode, self.copied_at)
                self.copy_unreadable = False
                return
        self._continue_from(Ledger(born=self._now(), trusted_since=self._now()), boot_id, mode, 0.0)

    def _continue_from(self, loaded: Ledger, boot_id: str, mode: Mode, last_alive: float) -> None:
        now = self._now()
        loaded = ledgers.without_future_times(loaded, now)
        loaded = loaded if loaded.outbox.stream_id else _with_new_stream(loaded)
        self.ledger = loaded
        alive_at = last_alive if last_alive <= now else 0.0  # a later time is from a clock that was ahead
        self.stream.emit(*events.started(loaded.emitted, healthd.__version__, mode.value, alive_at))
        if loaded.boot_id != boot_id:
            self.booted_at = now
            self.set_conditions(endings.after_boot(loaded.by_key(), boot_id, now))
        self.change_mode(mode)
        self.change(boot_id=boot_id)

    def change_mode(self, mode: Mode) -> None:
        """Change the mode. Conditions that were found in mode observe do not drain until a check reports them again."""
        if self.ledger.mode in ("", Mode.OBSERVE.value) and mode is not Mode.OBSERVE:
            self.change(trusted_since=self._now())
        self.change(mode=mode.value)

    def _live_ledger(self) -> Ledger | None:
        ledger = self._decode(FILE, self._read_text(FILE))
        return ledger if ledger is not None and self._load_past(self._read_text(PAST_FILE)) else None

    def _read_text(self, name: str) -> str | None:
        try:
            return state_files.read_text(self._path(name))
        except LedgerError as error:
            log.error("%s", error)
            return None

    def _decode(self, name: str, text: str | None) -> Ledger | None:
        if not text:
            return None
        try:
            return decode(text, self._path(name))
        except LedgerError as error:
            aside = state_files.set_aside(self._path(name))
            log.error("%s; moved to %s, continuing with the copy or a new ledger", error, aside)
            return None

    def _load_past(self, text: str | None) -> bool:
        """Load the counters' history. If it cannot be read, rules about growth wait for new readings, but nothing else
        is lost.
        """
        try:
            self.past = decode_past(text, self._path(PAST_FILE)) if text else {}
        except LedgerError as error:
            log.error("%s; counters start from new readings", error)
            self.past = {}
        return True

    def _copied_ledger(self, read_copy: Callable[[], dict[str, str | None]]) -> Ledger | None:
        texts = read_copy()
        text = texts.get(FILE)
        if not text:
            return None
        self._load_past(texts.get(PAST_FILE))
        try:
            return decode(text, "the copy of the ledger")
        except LedgerError as error:
            log.error("%s; starting a new ledger", error)
            self.copy_unreadable = True
            return None

    def _path(self, name: str) -> str:
        return os.path.join(self._runtime_dir, name)

    # --- change

    def change(self, **changes: Any) -> None:
        self.commit(replace(self.ledger, **changes))

    def commit(self, ledger: Ledger) -> None:
        """Replace the ledger and call the observers with the change. Then trim the history."""
        before = self.ledger
        if ledger != before:
            self.set(ledger)
            for observe in self.observers:
                observe(before, ledger)
            if ledger.conditions is not before.conditions:
                self.set(ledgers.trim_history(self.ledger, self._now()))

    def set(self, ledger: Ledger) -> None:
        """Replace the ledger without calling the observers."""
        if ledger != self.ledger:
            is_new_step = ledger.repair.attempt != self.ledger.repair.attempt
            self.slurm_uncopied = self.slurm_uncopied or is_new_step or ledger.slurm is not self.ledger.slurm
            self.unsaved = self.unsaved or not ledgers.is_only_seen_again(self.ledger, ledger)
            self.ledger = ledger
            self.uncopied = True

    def set_conditions(self, conditions: dict[ConditionKey, Condition]) -> None:
        self.commit(ledgers.with_conditions(self.ledger, conditions))

    def count_quiet_time(self, seconds: float, under_load: bool) -> None:
        """Add quiet time to the windows, in steps of at least QUIET_STEP_SECONDS.

        The steps prevent a burst of events from changing every condition that has a window. The ledger is marked
        unsaved only if a condition was cleared.
        """
        self._quiet_seconds += seconds
        if self._quiet_seconds < QUIET_STEP_SECONDS:
            return
        seconds, self._quiet_seconds = self._quiet_seconds, 0.0
        before, unsaved = self.ledger, self.unsaved
        self.set_conditions(endings.after_quiet_time(before.by_key(), seconds, under_load, self._now()))
        if len(self.ledger.conditions) == len(before.conditions):
            self.unsaved = unsaved

    def end_expired_acks(self) -> None:
        """End acks that have expired, or whose condition has become worse."""
        if self._now() < self.next_ack_expiry:
            return
        ended = endings.end_expired_acks(self.conditions, self._now())
        write_log_lines(log_lines.ended_ack_lines(self.conditions, ended))
        self.set_conditions(ended)

    def apply_clock_step(self, step: float, since: float = 0.0, until: float = float("inf")) -> None:
        """Adjust the ledger after the clock was set by `step` seconds. Times between `since` and `until` (now, on the
        old clock) move with the clock.

        Times that an earlier daemon wrote do not move. If the clock was ahead then, they are limited to the present, as
        at a start.
        """

        def move(moment: float) -> float:
            return moment + step if since <= moment <= until else moment

        moved = ledgers.after_clock_step(self.ledger, step, since, until)
        self.set(ledgers.without_future_times(moved, until + step))
        self._past_unsaved = self._past_is_urgent = True
        for check, store in self.past.items():
            self.past[check] = history.encode(history.shift_times(history.decode(store), move))

    def set_past(self, label: str, store: str) -> None:
        """Store the counters' history after a check has run."""
        self.past[label] = store
        self._past_unsaved = self.uncopied = True

    def reset_growth(self, conditions: Iterable[Condition]) -> None:
        """Reset the growth of these parts' counters after `healthd repaired`, so that earlier growth does not reopen
        conditions.
        """
        for condition in conditions:
            label = f"{condition.check} {condition.instance}".strip()
            if label in self.past:
                self.set_past(
                    label, history.encode(history.without_growth(history.decode(self.past[label]), condition.subject))
                )
                self._past_is_urgent = True

    def clear_unconfigured(self, configured: Collection[RunName]) -> None:
        """Clear conditions whose checks are no longer configured. They would otherwise stay open forever."""
        self.clear_runs({c.run for c in self.ledger.conditions} - set(configured), "no longer configured")

    def clear_runs(self, names: Collection[RunName], why: str) -> None:
        """Clear the conditions of these runs."""
        now = self._now()
        conditions = {
            key: ended(c, Ending.UNCHECKED, now, why) if c.run in names else c for key, c in self.conditions.items()
        }
        self.set_conditions(conditions)

    # --- save

    def save(self, round_ended: bool = False) -> None:
        """Save to tmpfs, where a commit cannot block.

        The files keep their space if the tmpfs becomes full. If there is no space, the error is logged once, and the
        next change tries again. A node that cannot save can still drain.

        The counters' history is saved with a changed ledger and at the end of a round. The saved history is never newer
        than the saved ledger, so after a kill, growth may be reported twice but is never missed. Nor is it older, so
        that the repair of a condition in the ledger (a counter that fell) is still detected.
        """
        if not self.is_loaded:
            return
        try:
            has_changed = self.ledger is not self._saved_ledger
            if has_changed:
                self._save_ledger()
            if self._past_unsaved and (has_changed or round_ended or self._past_is_urgent):
                rewrite_file(self._path(PAST_FILE), values.encode(self.past))
                self._past_unsaved = self._past_is_urgent = False
        except OSError as error:
            if not self.save_failed:
                log.error("%s: the ledger cannot be saved: %s", self._runtime_dir, error.strerror)
            self.save_failed = True
            return
        self._saved_ledger = self.ledger
        self.unsaved = self.save_failed = False

    def _save_ledger(self) -> None:
        """Save the ledger. If space is short, drop new lines of the stream rather than other state. Raises OSError."""
        path = self._path(FILE)
        try:
            rewrite_file(path, values.encode(self.ledger))
        except OSError as error:
            before = self.ledger.outbox
            remaining = outbox.truncate(before, self._saved_ledger.outbox.lines if self._saved_ledger else ())
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or remaining is before:
                raise
            self.ledger = replace(self.ledger, outbox=remaining)
            self.stream.dropped += len(before.lines) - len(remaining.lines)
            rewrite_file(path, values.encode(self.ledger))

    def save_all(self) -> None:
        """Save everything to a new, empty runtime directory."""
        self._saved_ledger, self._past_unsaved = None, True
        self.save(round_ended=True)


def _with_new_stream(ledger: Ledger) -> Ledger:
    """Start a new stream. The ledger may be older than the last line, so the old stream would reuse a number.

    The new stream lists the node's GPUs again, because the old list may have been lost.
    """
    new_outbox = outbox.new_stream(ledger.outbox, os.urandom(8).hex())
    return replace(ledger, outbox=new_outbox, emitted=replace(ledger.emitted, gpus=""))


def log_change(before: Ledger, after: Ledger) -> None:
    """Log conditions that opened, worsened or were cleared."""
    write_log_lines(log_lines.change_lines(before, after))


def write_log_lines(lines: Iterable[Line]) -> None:
    """Write lines to the log. An error in a line's text must not affect the change that the line describes."""
    with guard.dropping_errors(LOG):
        for line in lines:
            log.log(LOG_LEVELS.get(line.severity, logging.ERROR), "%s", line.text, extra=line.fields)


# --- JSON for the ledger and the counters' past. state_files.py reads and writes the files.


class _Version(Struct):
    version: int = VERSION


def decode(text: str | bytes, where: str) -> Ledger:
    """Parse the ledger. Raises LedgerError if it is invalid; the message is one sentence."""
    try:
        if (version := values.decode(_Version, text).version) != VERSION:
            raise LedgerError(f"{where}: has version {version}; this healthd reads version {VERSION}")
        return values.decode(Ledger, text)
    except DecodeError as error:
        raise LedgerError(f"{where}: is not a ledger: {error}") from None


def decode_past(text: str | bytes, where: str) -> dict[str, str]:
    """Return a dict that maps each check to its counters, as the worker encoded them (history.py).

    Raises LedgerError if the text is invalid or contains counters that the worker could not read.
    """
    try:
        past = values.decode(dict[str, str], text)
        for store in past.values():
            history.decode(store)
    except DecodeError as error:
        raise LedgerError(f"{where}: is not a store of counters: {error}") from None
    return past
