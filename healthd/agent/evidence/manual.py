"""Collect evidence by hand, without a request of the daemon."""

from __future__ import annotations

import fcntl
import os
import time

from msgspec.structs import replace

from healthd.agent.evidence.case import FIRST, FULL, Result, make_id
from healthd.agent.evidence.collect import collect_part, log_result, stop_reason
from healthd.agent.evidence.request import NAME, Request
from healthd.agent.settings.config import Settings
from healthd.host.lock import lock_file


def collect_now(settings: Settings, runtime_dir: str, state_dir: str, config: str | None, full: bool) -> Result | None:
    """Collect the evidence. Return the last part's result, or None if another collector is running.

    Raises ownership.Untrusted or OSError.
    """
    descriptor = lock_file(runtime_dir, f"{NAME}.lock")
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        now = time.time()
        request = Request(
            make_id(time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now)), ()),
            FIRST,
            state_dir,
            node=settings.node_name,
            cluster=settings.cluster,
            mode=settings.mode.value,
            began=now,
            fault_at=now,
            flags=("--config", config) if config else (),
            root=settings.root,
            settings=settings.evidence,
        )
        result = Result(request.id, FIRST)
        for part in (FIRST, FULL) if full else (FIRST,):
            request = replace(request, part=part)
            result = collect_part(request, runtime_dir, stop_reason(request, lambda: False))
            log_result(result)
            if result.error or result.stopped:
                break
        return result
    finally:
        os.close(descriptor)
