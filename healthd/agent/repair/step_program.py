"""The daemon's side of healthd-repair: requests the steps, and reads the journal.

The daemon only writes a request file (host/separate_program.py). On a healthy node, it requests only the journal, once,
when it starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from healthd.agent.evidence.case import Case
from healthd.agent.repair.journal import JOURNAL_FILE, NAME, Journal, Request, parse_journal, stopped_problem
from healthd.agent.settings.config import Settings
from healthd.common import ownership
from healthd.common.model import Gpu
from healthd.common.repair_plan import Attempt, RepairRecord
from healthd.common.slurm.builtin_reasons import strip_appended
from healthd.common.values import DecodeError, encode
from healthd.host.separate_program import SeparateProgram

log = logging.getLogger("healthd")

EXTRA_SECONDS = 1800.0  # without systemd: time that the program may take for services and Slurm, besides the step
SLURM_ENVIRONMENT = ("PATH", "SLURM_CONF")
REPEAT_SECONDS = 30.0  # until a request without a result is written again
# A journal that cannot be read, and services that do not start, are tried again less and less often: systemd starts a
# unit only a limited number of times (StartLimitBurst=).
MAX_REPEAT_SECONDS = 900.0


class StepProgram:
    """Requests steps.

    journal   the journal, or None if it has not been read
    problem   why no steps are taken, or ""
    """

    def __init__(
        self,
        settings: Settings,
        argv: tuple[str, ...],
        is_managed: bool,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.journal: Journal | None = None
        self._settings = settings
        self._now, self._monotonic = now, monotonic
        seconds = settings.repair.boot_timeout_seconds + EXTRA_SECONDS
        self._program = SeparateProgram(NAME, argv, settings.runtime_dir, seconds, is_managed, monotonic)
        self._request_problem = self._journal_problem = ""
        self._has_started = False
        self._repeat_at, self._repeat_seconds = -float("inf"), REPEAT_SECONDS
        self._requested = ""  # id of the last request
        self._may_withdraw = False  # the open request may be one for a step
        self._requested_at = -float("inf")

    @property
    def deadline(self) -> float:
        return min(self._program.deadline, self._repeat_at) if self._is_waiting else self._program.deadline

    @property
    def has_stopped(self) -> bool:
        """True if a reset's services are still stopped. The node must not return to service before they run."""
        return self.journal is not None and self.journal.stopped is not None

    @property
    def _is_waiting(self) -> bool:
        """True if stopped services will be started at `_repeat_at`."""
        return self.has_stopped and not self._program.is_open

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._program.waits()

    def close(self) -> None:
        self._program.close()

    @property
    def problem(self) -> str:
        return self._request_problem or self._program.problem or self._journal_problem or stopped_problem(self.journal)

    @property
    def is_open(self) -> bool:
        return self._program.is_open

    @property
    def is_served(self) -> bool:
        return self._has_started and not self._program.is_open

    @property
    def is_stalled(self) -> bool:
        """True if a request is open, but healthd-repair does not run."""
        return self._program.is_open and bool(self._program.problem)

    def reconfigure(self, settings: Settings) -> None:
        self._settings = settings

    def start(self) -> None:
        """Continue to start the services that a reset has stopped, even if repair.mode is "off" now."""
        found = self._read_copy()
        if isinstance(found, Journal) and found.stopped is not None:
            self.journal = found

    def step(self) -> None:
        """Read the journal when a request has been served. The first call requests the journal.

        The request is repeated while there is no readable journal, or services are stopped.
        """
        if not self._has_started:
            self._has_started = True
            self._may_withdraw = self._program.adopt()
        now = self._monotonic()
        is_unfinished = self.journal is None or bool(self.journal.problem) or self.has_stopped
        if is_unfinished and not self._program.is_open and now >= self._repeat_at:
            self._repeat_at = now + self._repeat_seconds
            self._repeat_seconds = min(self._repeat_seconds * 2, MAX_REPEAT_SECONDS)
            self._write(self._empty_request())
        if self._program.step():
            self._may_withdraw = False
            self._read_journal()

    def request(
        self, attempt: Attempt, record: RepairRecord, reason: str, gpus: tuple[Gpu, ...], case: Case | None
    ) -> None:
        """Request the attempt's step, unless it has just been requested. `reason` is the drain's Reason in Slurm."""
        is_recent = self._monotonic() < self._requested_at + REPEAT_SECONDS
        if self._program.is_open or (attempt.id == self._requested and is_recent):
            return
        settings = self._settings
        request = Request(
            attempt.id,
            settings.state_dir,
            node=settings.node_name,
            boot_id=attempt.boot_id,
            step=attempt.step,
            reason=strip_appended(reason),
            causes=attempt.causes,
            parts=attempt.parts,
            gpus=gpus,
            stuck=case.stuck if case is not None else (),
            requested_at=self._now(),
            is_booted=record.booted == attempt.boot_id,
            is_ordered=bool(record.ordered_by),
            command_timeout_seconds=settings.slurm.command_timeout_seconds,
            root=settings.root,
            environment={name: os.environ[name] for name in SLURM_ENVIRONMENT if name in os.environ},
            settings=settings.repair,
        )
        if self._write(request):
            log.warning("repair: requested step %s (%s)", attempt.step.value, attempt.id)
            self._requested, self._requested_at = attempt.id, self._monotonic()
            self._may_withdraw = True

    def withdraw(self) -> None:
        """Replace an open request for a step. healthd-repair then refuses the step, unless the step has begun."""
        if self._program.is_open and self._may_withdraw:
            self._requested = ""
            if self._write(self._empty_request()):
                self._may_withdraw = False

    def _empty_request(self) -> Request:
        settings = self._settings
        return Request("", settings.state_dir, node=settings.node_name, root=settings.root)

    def _write(self, request: Request) -> bool:
        try:
            self._program.request(encode(request).decode())
        except (ownership.Untrusted, OSError) as error:
            if not self._request_problem:
                log.error("repair: the request cannot be written: %s", error)
            self._request_problem = f"the request cannot be written: {error}"
            return False
        self._request_problem = ""
        return True

    def _read_copy(self) -> Journal | str:
        """Return the daemon's copy of the journal, or why it cannot be read."""
        path = os.path.join(self._settings.runtime_dir, JOURNAL_FILE)
        try:
            return parse_journal(ownership.read(path).decode("utf-8", "replace"))
        except (ownership.Untrusted, OSError, DecodeError) as error:
            return f"{path}: {error}"

    def _read_journal(self) -> None:
        before, found = self._journal_problem, self._read_copy()
        if isinstance(found, str):
            self._journal_problem = found
        else:
            self._journal_problem = found.problem
            if found.first_boot:
                self.journal = found
            elif self.journal is not None:  # healthd-repair could not read it: keep the last one, with the new refusal
                self.journal = replace(self.journal, refused=found.refused, problem=found.problem)
        if self._journal_problem and self._journal_problem != before:
            log.error("repair: the journal: %s", self._journal_problem)
        if self._journal_problem or self.has_stopped:
            self._repeat_at = max(self._repeat_at, self._monotonic() + REPEAT_SECONDS)
        else:
            self._repeat_seconds = REPEAT_SECONDS
