"""The stream's way to the disk: lines that wait in the ledger's outbox are given to the worker, one write at a time."""

from __future__ import annotations

import logging

from healthd.agent.conditions.store import Memory
from healthd.agent.scheduler.worker_queue import TASK_SECONDS
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import AppendEvents
from healthd.common.model import Outcome, StreamStatus

log = logging.getLogger("healthd")


class Delivery:
    def __init__(self, memory: Memory, state_dir: str) -> None:
        self._memory = memory
        self._state_dir = state_dir
        self._under_way = False
        self._again = True  # they may stand in the file already: of a daemon that was killed, or after a failure
        self._failures = 0
        self._journal_lost = 0
        self.trouble = ""  # why no line can be written, until one can

    @property
    def status(self) -> StreamStatus:
        waiting = len(self._memory.ledger.outbox.lines)
        return StreamStatus(waiting, self._memory.stream.dropped, self._failures, self._journal_lost, self.trouble)

    @property
    def is_due(self) -> bool:
        """Only once the ledger with these lines is saved: who is killed after the write knows that they were told, and
        gives no other line their numbers."""
        return bool(self._memory.ledger.outbox.lines) and not self._under_way and not self._memory.unsaved

    def request(self) -> Request:
        self._under_way = True
        asked = AppendEvents(self._state_dir, tuple(self._memory.ledger.outbox.lines), self._again)
        return Request("state_dir", TASK_SECONDS, asked)

    def ended(self, reply: Reply) -> None:
        self._under_way = False
        self._again = reply.outcome is not Outcome.COMPLETED
        if self._again:
            self._failures += 1
            trouble = reply.error or reply.outcome.value.replace("_", " ")
            if not self.trouble:
                log.error("the worker could not write events: %s", trouble)
            self.trouble = trouble
            return
        self.trouble = ""
        assert isinstance(reply.answer, int)
        assert isinstance(reply.request.asked, AppendEvents)
        self._journal_lost += reply.answer
        self._memory.stream.written(reply.request.asked.lines)
