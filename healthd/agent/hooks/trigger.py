"""The daemon's side of the hooks: requests a run when a relevant event is on disk, and reads the results.

The program `healthd hooks run` finds the events in the stream, and runs the site's programs (runner.py). This module
imports nothing of that program.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator

from healthd.agent.hooks.request import PROGRAM, HooksRequest, parse_request, render_request
from healthd.agent.hooks.result import HookResult, read_results, result_path
from healthd.agent.settings.config import Settings
from healthd.common import guard, ownership
from healthd.common.guard import HOOKS
from healthd.host.separate_program import SeparateProgram

log = logging.getLogger("healthd")

LONGEST_RUN_SECONDS = 24 * 3600.0  # without systemd; a program that is ended continues with the next event
# For each hook, words that a line of the event has. A quote inside a text is escaped, so no text contains them.
MARKS = {
    "on_drain": ('"event":"drain"', '"stage":"confirmed"'),
    "on_resume": ('"event":"resume"', '"stage":"confirmed"'),
    "on_repair": ('"event":"repair"', '"stage":"succeeded"'),
    "on_repair_failed": ('"event":"repair"', '"stage":"gave_up"'),
}


class HookTrigger:
    """Requests runs of the hooks, and reads their results."""

    def __init__(
        self,
        settings: Settings,
        argv: tuple[str, ...],
        is_managed: bool,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._found: dict[str, HookResult] = {}
        self._settings = settings
        self._now = now
        self._since: dict[str, float] = {}
        self._requested_at = 0.0
        self._problem = ""
        self._result_id: tuple[int, int] = (0, 0)
        self._program = SeparateProgram(PROGRAM, argv, settings.runtime_dir, LONGEST_RUN_SECONDS, is_managed, monotonic)

    @property
    def problem(self) -> str:
        """Why hooks cannot run, or ""."""
        return self._problem or self._program.problem

    @property
    def deadline(self) -> float:
        return self._program.deadline

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._program.waits()

    @property
    def results(self) -> dict[str, HookResult]:
        """The result of each configured hook."""
        return {name: self._found.get(name, HookResult()) for name in self._settings.hooks.programs}

    def start(self) -> None:
        """Request a run, because the daemon may have been killed before it requested one for the last event."""
        now = self._now()
        self._since = dict.fromkeys(self._settings.hooks.programs, now)
        if self._since or self._program.adopt():
            earlier = self._open_request_since()
            self._since = {name: min(now, earlier.get(name, now)) for name in self._since}
            self._request()

    def remove_record(self) -> None:
        """Request a run that removes the record of hooks which were configured before the start.

        Without it, hooks that are configured again later would get old events.
        """
        self._request()

    def reconfigure(self, settings: Settings) -> None:
        """Apply the settings after a reload."""
        before, self._settings = self._settings, settings
        if settings.hooks != before.hooks:
            now = self._now()
            self._since = {name: self._since.get(name, now) for name in settings.hooks.programs}
            self._request()

    def take_written(self, lines: Iterable[str]) -> None:
        """Request a run if one of these lines, which are now on disk, belongs to a configured hook."""
        with guard.dropping_errors(HOOKS):
            marks = [MARKS[name] for name in self._settings.hooks.programs]
            if any(all(mark in line for mark in event_marks) for line in lines for event_marks in marks):
                self._request()

    def step(self) -> None:
        """Start the program if systemd does not do this, and read the results when a request has been served."""
        if self._program.step():
            # A record that is lost later does not repeat the events that were handled.
            self._since = {name: max(since, self._requested_at) for name, since in self._since.items()}
            self._read_results()

    def end_round(self) -> None:
        """Read the results, which `healthd hooks test` changes too, and repeat a request that could not be written."""
        self._read_results()
        if self._problem:
            self._request()

    def _read_results(self) -> None:
        """Read the results if their file has changed."""
        try:
            status = os.stat(result_path(self._settings.runtime_dir))
            file_id = (status.st_ino, status.st_mtime_ns)
        except OSError:
            file_id = (0, 0)
        if file_id != self._result_id:
            self._result_id = file_id
            self._found = read_results(self._settings.runtime_dir)

    def close(self) -> None:
        """Stop following the request. A running program continues."""
        self._program.close()

    def _request(self) -> None:
        settings = self._settings
        request = HooksRequest(settings.state_dir, self._since, settings.hooks)
        try:
            self._program.request(render_request(request))
        except OSError as error:
            self._problem = str(error)
            log.error("hooks cannot run: %s", error)
        else:
            self._problem = ""
            self._requested_at = self._now()

    def _open_request_since(self) -> dict[str, float]:
        """Return the times in a request of an earlier daemon that has not been served yet."""
        try:
            request = parse_request(ownership.read(self._program.path).decode("utf-8", "replace"))
        except OSError:
            return {}
        return request.since if request else {}
