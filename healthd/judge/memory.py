"""The ledger in the daemon's hands: recalled at the start, changed as a value, saved whole, copied by the worker."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

from healthd import guard, past
from healthd.guard import LEDGER
from healthd.judge import endings, ledger_file
from healthd.judge import ledger as ledgers
from healthd.judge.ledger import Ledger
from healthd.judge.ledger_file import LedgerError
from healthd.machine.files import replace_file
from healthd.model import Condition, ConditionKey, ConditionState, Mode, RunName, Severity

log = logging.getLogger("healthd")

NAMES = (ledger_file.FILE, ledger_file.PAST_FILE)


class Memory:
    """`ledger` and `past` (check -> its counters, as text that only the worker reads).

    `unsaved`: a kill would lose something now; `uncopied`: a reboot would.
    """

    def __init__(self, runtime_dir: str, now: Callable[[], float]) -> None:
        self._runtime_dir = runtime_dir
        self._now = now
        self.ledger = Ledger()
        self.past: dict[str, str] = {}
        self._conditions_of: tuple[Condition, ...] = ()
        self._conditions: dict[ConditionKey, Condition] = {}
        self.unsaved = False
        self.uncopied = False
        self._past_unsaved = False
        self._saved: Ledger | None = None  # what stands in the file
        self.save_failed = False
        self.copy_unread = False  # a copy may exist that could not be read: it is kept beside the next one

    @property
    def conditions(self) -> dict[ConditionKey, Condition]:
        """The conditions that stand, not to be changed in place."""
        if self._conditions_of is not self.ledger.conditions:
            self._conditions_of, self._conditions = self.ledger.conditions, self.ledger.by_key()
        return self._conditions

    # --- recall

    def recall(self, read_copy: Callable[[], dict[str, str | None]], boot_id: str, mode: Mode) -> None:
        """Go on from the live ledger, else the copy, else a new one; then end what a boot or a change of mode ends.

        `read_copy`: the texts of the copy in the state directory, {} if it cannot be read (it says so itself).
        """
        with guard.at(LEDGER, self._path(ledger_file.FILE)):
            if (live := self._live()) is not None:
                try:
                    self._go_on_from(live, boot_id, mode)
                except Exception:
                    log.error("the ledger is kept as %s", ledger_file.set_aside(self._path(ledger_file.FILE)))
                    raise
                return
        with guard.at(LEDGER, "the copy of the ledger"):
            if (copied := self._copied(read_copy)) is not None:
                self.copy_unread = True
                self._go_on_from(copied, boot_id, mode)
                self.copy_unread = False
                return
        self._go_on_from(Ledger(born=self._now(), trusted_since=self._now()), boot_id, mode)

    def _go_on_from(self, found: Ledger, boot_id: str, mode: Mode) -> None:
        now = self._now()
        found = ledgers.with_none_in_the_future(found, now)
        # A clock that now stands before `trusted_since` must not switch draining off until then.
        self.ledger = dataclasses.replace(found, trusted_since=min(found.trusted_since, now))
        if found.boot_id != boot_id:
            self.set_conditions(endings.after_boot(found.by_key(), boot_id, now))
        self.change_mode(mode)
        self.change(boot_id=boot_id)

    def change_mode(self, mode: Mode) -> None:
        """What healthd only observed until now never drains by itself: a check must find it again."""
        if self.ledger.mode in ("", Mode.OBSERVE.value) and mode is not Mode.OBSERVE:
            self.change(trusted_since=self._now())
        self.change(mode=mode.value)

    def _live(self) -> Ledger | None:
        ledger = self._decoded(ledger_file.FILE, self._text(ledger_file.FILE))
        return ledger if ledger is not None and self._past_from(self._text(ledger_file.PAST_FILE)) else None

    def _text(self, name: str) -> str | None:
        try:
            return ledger_file.read_text(self._path(name))
        except LedgerError as error:
            log.error("%s", error)
            return None

    def _decoded(self, name: str, text: str | None) -> Ledger | None:
        if not text:
            return None
        try:
            return ledger_file.decode(text, self._path(name))
        except LedgerError as error:
            aside = ledger_file.set_aside(self._path(name))
            log.error("%s; kept as %s, going on with the copy or a new ledger", error, aside)
            return None

    def _past_from(self, text: str | None) -> bool:
        """Take the counters' past. If it cannot be read only the past is lost: rules that ask for growth wait."""
        try:
            self.past = ledger_file.decode_past(text, self._path(ledger_file.PAST_FILE)) if text else {}
        except LedgerError as error:
            log.error("%s; counters begin anew", error)
            self.past = {}
        return True

    def _copied(self, read_copy: Callable[[], dict[str, str | None]]) -> Ledger | None:
        texts = read_copy()
        text = texts.get(ledger_file.FILE)
        if not text:
            return None
        self._past_from(texts.get(ledger_file.PAST_FILE))
        try:
            return ledger_file.decode(text, "the copy of the ledger")
        except LedgerError as error:
            log.error("%s; beginning a new one", error)
            self.copy_unread = True
            return None

    def _path(self, name: str) -> str:
        return os.path.join(self._runtime_dir, name)

    # --- change

    def change(self, **changes: Any) -> None:
        self._replace(dataclasses.replace(self.ledger, **changes))

    def _replace(self, ledger: Ledger) -> None:
        if ledger != self.ledger:
            self.ledger = ledger
            self.unsaved = self.uncopied = True

    def go_back_to(self, ledger: Ledger) -> None:
        """Undo every change since this ledger."""
        self._replace(ledger)

    def take(self, after: Ledger) -> None:
        """Go on with this ledger. The log is told what opened, rose or cleared."""
        before, known = self.ledger, self.conditions
        self._replace(after)
        if after.conditions is not before.conditions:
            history = set(map(id, before.cleared))
            for condition in (*after.conditions, *(c for c in after.cleared if id(c) not in history)):
                tell(known.get(condition.key), condition)

    def set_conditions(self, conditions: dict[ConditionKey, Condition]) -> None:
        """Go on with these conditions. The log is told."""
        self.take(ledgers.with_conditions(self.ledger, conditions, self._now()))

    def pass_quiet_time(self, seconds: float, loaded: bool) -> None:
        """Windows run on. The ledger is saved for that only when a condition ended."""
        before, unsaved = self.ledger, self.unsaved
        self.set_conditions(endings.after_quiet(before.by_key(), seconds, loaded, self._now()))
        if len(self.ledger.conditions) == len(before.conditions):
            self.unsaved = unsaved

    def end_acks(self) -> None:
        """End the acks whose time is over, or whose condition is worse than the person knew."""
        for key, after in (ended := endings.after_acks(self.conditions, self._now())).items():
            before = self.conditions[key]
            if before.ack and not after.ack:
                worse = "it is worse now" if after.severity > before.ack.severity else "its time is over"
                log.info("%s: the ack of %s ends, %s: %s", key, before.ack.who, worse, before.ack.why)
        self.set_conditions(ended)

    def set_clock(self, step: float, since: float = 0.0, until: float = float("inf")) -> None:
        """The clock was set by `step` seconds: moments in `since`..`until` (of the old clock) move with it."""

        def move(moment: float) -> float:
            return moment + step if since <= moment <= until else moment

        self._replace(ledgers.after_clock_step(self.ledger, step, since, until))
        self._past_unsaved = True
        for check, store in self.past.items():
            self.past[check] = past.encode(past.moved(past.decode(store), move))

    def set_past(self, label: str, store: str) -> None:
        """Keep the counters' past as a check's run left it."""
        self.past[label] = store
        self._past_unsaved = self.uncopied = True

    def forget_growth(self, conditions: Iterable[Condition]) -> None:
        """An operator answers for these parts: growth from before must not open the same conditions again."""
        for condition in conditions:
            label = f"{condition.check} {condition.instance}".strip()
            if label in self.past:
                self.set_past(label, past.encode(past.without_growth(past.decode(self.past[label]), condition.subject)))

    def keep_only(self, configured: Collection[RunName]) -> None:
        """End conditions whose check is no longer configured: nobody looks, so they would stand for ever."""
        self.forget({c.run for c in self.ledger.conditions} - set(configured), "no longer configured")

    def forget(self, names: Collection[RunName], why: str) -> None:
        """Clear what these runs have found."""
        now = self._now()
        conditions = {
            key: dataclasses.replace(c, state=ConditionState.CLEARED, cleared_at=now, cleared_by=why)
            if c.run in names
            else c
            for key, c in self.conditions.items()
        }
        self.set_conditions(conditions)

    # --- save

    def save(self) -> None:
        """Save to tmpfs, where a commit cannot block. If it is full the log says so once, and the next change tries
        again: a node that cannot remember can still drain."""
        try:
            if self.ledger is not self._saved:
                replace_file(self._path(ledger_file.FILE), ledger_file.encode(self.ledger))
            if self._past_unsaved:
                replace_file(self._path(ledger_file.PAST_FILE), ledger_file.encode_past(self.past))
        except OSError as error:
            if not self.save_failed:
                log.error("%s: the ledger cannot be saved: %s", self._runtime_dir, error.strerror)
            self.save_failed = True
            return
        self._saved = self.ledger
        self.unsaved = self._past_unsaved = self.save_failed = False

    def save_anew(self) -> None:
        """Save all into a new runtime directory, where nothing that was saved is left."""
        self._saved, self._past_unsaved = None, True
        self.save()


def tell(before: Condition | None, after: Condition) -> None:
    """Tell the log how a condition changed. If it opened and cleared at once, the log is told both."""
    if before is None and after.state is ConditionState.CLEARED:
        opened = dataclasses.replace(after, state=ConditionState.OPEN)
        tell(None, opened)
        before = opened
    words = news(before, after)
    if words:
        level = logging.WARNING if after.severity >= Severity.WARNING else logging.INFO
        log.log(level, "%s", words)


def news(before: Condition | None, after: Condition) -> str:
    """What to tell the log about a condition that changed; "" if a person need not know."""
    what = after.key
    if before is None or after.state is not before.state:
        if after.state is ConditionState.PENDING:
            return f"{what}: {after.message} (counts if it lasts {after.confirm_seconds:g} s)"
        if after.state is ConditionState.CLEARED:
            return f"{what}: cleared: {after.cleared_by}"
        return f"{what}: {after.severity.name.lower()}, {after.state.value}: {after.message}"
    if after.severity > before.severity:
        return f"{what}: now {after.severity.name.lower()}: {after.message}"
    return ""
