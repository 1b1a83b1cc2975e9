"""The daemon's side of evidence: begins a case, requests its parts, and reads the results.

The daemon only writes a request file (host/separate_program.py). On a healthy node it does nothing at all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from healthd.agent.evidence.case import (
    RUNNING,
    Case,
    Result,
    Stage,
    View,
    after_request,
    after_result,
    make_id,
    next_case,
)
from healthd.agent.evidence.request import NAME, RESULT_FILE, STOP, Request, parse_result
from healthd.agent.settings.config import Settings
from healthd.common import ownership
from healthd.common.model import Gpu
from healthd.common.values import encode
from healthd.host.separate_program import SeparateProgram

log = logging.getLogger("healthd")

EXTRA_SECONDS = 1800.0  # deadline without systemd, beyond evidence.timeout_seconds: for all other programs

Emit = Callable[[str, Mapping[str, Any]], None]  # stage and fields of an event "evidence"


class EvidenceCollection:
    """Requests the evidence of the current case.

    failures   number of parts that could not be saved since the start
    problem    why the evidence of the current case is missing, or ""
    """

    def __init__(
        self,
        settings: Settings,
        argv: tuple[str, ...],
        record_flags: tuple[str, ...],
        is_managed: bool,
        emit: Emit,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.failures = 0
        self._settings, self._record_flags = settings, record_flags
        self._emit, self._now, self._monotonic = emit, now, monotonic
        seconds = settings.evidence.timeout_seconds + EXTRA_SECONDS
        self._program = SeparateProgram(NAME, argv, settings.runtime_dir, seconds, is_managed, monotonic)
        self._gpus: tuple[Gpu, ...] = ()
        self._request_problem = ""
        self._is_adopted = self._is_unserved = False

    @property
    def deadline(self) -> float:
        return self._program.deadline

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._program.waits()

    def close(self) -> None:
        self._program.close()

    def problem(self, case: Case | None) -> str:
        """Return why evidence is missing, or ""."""
        if self._request_problem or self._program.problem:
            return self._request_problem or self._program.problem
        return case.error if case is not None else ""

    def step(
        self, case: Case | None, view: View, settings: Settings, cluster: str, gpus: tuple[Gpu, ...] = ()
    ) -> Case | None:
        """Return the case after this turn. `settings` are the current settings, which a reload may have changed.

        `gpus` are the GPUs of the last complete inventory.
        """
        self._settings, self._gpus = settings, gpus
        if case is None and not view.causes:
            return None
        if not self._is_adopted:
            self._is_adopted = True
            self._program.adopt()
        was_served = self._program.step()
        if bool(self._program.problem) is not self._is_unserved:
            self._is_unserved = bool(self._program.problem)
            self.failures += self._is_unserved
        if case is not None and (was_served or (case.is_requested and not self._program.is_open)):
            case = self._take_result(case)
        if not settings.evidence.enabled:
            is_drained = view.is_drained and (case is None or case.stage is Stage.DONE)
            view = view._replace(causes=(), is_drained=is_drained)  # no case begins, and an open case ends
        before = case
        case = next_case(case, view, make_id(_time_text(self._now()), view.causes), self._now())
        if case is None:
            return None
        if before is not None and before.is_requested and not case.is_requested:
            self._request(case, STOP, cluster)
            self._report("stopped", case, before.stage)
        elif case.stage in RUNNING and not case.is_requested and not self._program.is_open:
            requested = after_request(case)
            if self._request(requested, case.stage.value, cluster):
                self._report("begun", case, case.stage)
                case = requested
        return case

    def _request(self, case: Case, part: str, cluster: str) -> bool:
        settings = self._settings
        request = Request(
            case.id,
            part,
            settings.state_dir,
            case.attempts,
            node=settings.node_name,
            cluster=cluster,
            mode=settings.mode.value,
            began=case.began,
            fault_at=case.fault_at,
            reason=case.reason,
            causes=case.causes,
            gpus=self._gpus,
            flags=self._record_flags,
            root=settings.root,
            settings=settings.evidence,
        )
        try:
            self._program.request(encode(request).decode())
        except (ownership.Untrusted, OSError) as error:
            if not self._request_problem:
                log.error("evidence: the request cannot be written: %s", error)
            self._request_problem = f"the request cannot be written: {error}"
            return False
        self._request_problem = ""
        return True

    # --- results

    def _take_result(self, case: Case) -> Case:
        """Return the case after a request has been served, and report the end of its part."""
        result = self._read_result()
        after = after_result(case, result)
        if after.error and after.error != case.error:
            self.failures += 1
            self._report("failed", after, case.stage)
        elif result is not None and (after.path, after.bytes) != (case.path, case.bytes):
            self._report("saved", after, Stage(result.part), result)
        return after

    def _read_result(self) -> Result | None:
        path = os.path.join(self._settings.runtime_dir, RESULT_FILE)
        try:
            return parse_result(ownership.read(path).decode("utf-8", "replace"))
        except (ownership.Untrusted, OSError):
            return None

    def _report(self, stage: str, case: Case, part: Stage, result: Result | None = None) -> None:
        fields: dict[str, Any] = {"case": case.id, "part": part.value}
        if stage == "saved" and result is not None:
            fields |= {"path": result.path, "bytes": result.bytes, "seconds": result.seconds}
            fields |= {"error": "; ".join(result.problems)} if result.problems else {}
            log.info("evidence: saved the %s part of %s: %s", part.value, case.id, result.path)
        elif stage == "failed":
            fields["error"] = case.error
            log.error("evidence: %s", case.error)
        else:
            log.info("evidence: %s: the %s part of %s", stage, part.value, case.id)
        self._emit(stage, fields)


def _time_text(now: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
