"""Tasks of the worker beside the checks. Each type makes the requests of one task and takes the replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from healthd.agent.conditions.store import NAMES, Memory
from healthd.agent.scheduler.worker_queue import TASK_SECONDS
from healthd.agent.worker import installed_files
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import (
    AppendEvents,
    LookAtOwnFiles,
    ReadClusterName,
    SaveCopy,
    TakeInventory,
    WriteFile,
)
from healthd.common.model import Inventory, Observation, Outcome, StreamStatus
from healthd.common.text import without_class
from healthd.host.inventory import when_whole

log = logging.getLogger("healthd")

CLUSTER_NAME = Request("slurm_conf", TASK_SECONDS, ReadClusterName())
INVENTORY = Request("nvml", TASK_SECONDS, TakeInventory(gpus=True))
INVENTORY_SECONDS = 24 * 3600.0


class LedgerCopy:
    """The copy of the ledger in the state directory, whose disk may hang. trouble: why the last copy failed."""

    def __init__(self, memory: Memory, runtime_dir: str, state_dir: str) -> None:
        self.failures, self.problem = 0, ""
        self._memory = memory
        self._runtime_dir, self._state_dir = runtime_dir, state_dir

    def is_due(self, round_ended: bool) -> bool:
        """Return True after a round, and at once after an action in Slurm: a node that reboots minutes after its drain
        must know that the drain is healthd's."""
        return self._memory.uncopied and (round_ended or self._memory.slurm_uncopied)

    def request(self) -> Request:
        memory = self._memory
        copy = SaveCopy(self._runtime_dir, self._state_dir, NAMES, memory.copy_unread)
        memory.uncopied = memory.slurm_uncopied = memory.copy_unread = False
        return Request("state_dir", TASK_SECONDS, copy)

    def ended(self, reply: Reply) -> None:
        self.problem = failure(reply)
        if self.problem:
            self.failures += 1
            self._memory.uncopied = True  # the next round tries again


class InstalledFiles:
    """healthd's own files, which may be removed or replaced while it runs. trouble: a sentence if they were."""

    def __init__(self) -> None:
        self.problem = ""
        self._at_start = installed_files.identities()

    def changed(self) -> str:
        """Return a sentence if the files are gone or replaced, "" if not. It may hang with their disk."""
        return installed_files.problem(self._at_start, installed_files.identities(list(self._at_start)))

    def request(self) -> Request:
        return Request("own_files", TASK_SECONDS, LookAtOwnFiles(tuple(self._at_start)))

    def ended(self, reply: Reply) -> None:
        if reply.outcome is Outcome.COMPLETED:
            assert isinstance(reply.answer, dict)
            found = installed_files.problem(self._at_start, reply.answer)
        elif reply.outcome is Outcome.FAILED:  # no worker could be started, or it ended at once
            found = self.changed() or f"no worker answers: {reply.error}"
        else:
            return  # a hang is no evidence about the files
        if found and found != self.problem:
            log.error("%s", found)
        self.problem = found


class Textfile:
    """The file `metrics.textfile`, whose disk may hang. trouble: why it could not be written."""

    def __init__(self) -> None:
        self.problem = ""

    def request(self, path: str, page: str) -> Request:
        return Request("textfile", TASK_SECONDS, WriteFile(path, page))

    def ended(self, reply: Reply) -> None:
        problem = without_class(failure(reply))
        if problem:
            assert isinstance(reply.request.asked, WriteFile)
            problem = f"no metrics in {reply.request.asked.path} (metrics.textfile): {problem}"
        if problem not in ("", self.problem):
            log.error("%s", problem)
        self.problem = problem


class InventoryTask:
    """The inventory of this node: read again when it may have changed, and once a day."""

    def __init__(self, memory: Memory, monotonic: Callable[[], float]) -> None:
        self._memory = memory
        self._monotonic = monotonic
        self._read_at = -float("inf")

    def renew_soon(self) -> None:
        """Read it again after the next GPU check."""
        self._read_at = -float("inf")

    def is_due(self, check: Reply, observations: Iterable[Observation]) -> bool:
        """Return True after a check of GPUs if the inventory is old or differs from what the check observed. It is then
        read before the driver is closed."""
        if check.request.resource != "nvml" or check.outcome is not Outcome.COMPLETED:
            return False
        is_old = self._monotonic() - self._read_at >= INVENTORY_SECONDS
        return is_old or outgrown(self._memory.ledger.inventory, observations)

    def ended(self, reply: Reply) -> Inventory:
        """Return the inventory that the worker read."""
        inventory = reply.answer
        assert isinstance(inventory, Inventory)
        self._memory.change(whole_gpus=when_whole(self._memory.ledger.whole_gpus, inventory.gpus))
        self._read_at = self._monotonic()
        return inventory


def failure(reply: Reply) -> str:
    """Return why the worker did not do the task, "" if it did."""
    if reply.outcome is Outcome.COMPLETED:
        return ""
    return reply.error or reply.outcome.value.replace("_", " ")


def outgrown(inventory: Inventory, observations: Iterable[Observation]) -> bool:
    """Return True if NVML shows more GPUs than the inventory, or another driver. A lost GPU stays in the inventory."""
    return any(
        (seen.name == "gpus" and seen.value > len(inventory.gpus))
        or (seen.name == "gpu_driver_info" and ("version", inventory.driver_version) not in seen.labels)
        for seen in observations
    )


class Delivery:
    """Events on their way to the stream's files: lines of the ledger's outbox, one write at a time."""

    def __init__(self, memory: Memory, state_dir: str) -> None:
        self._memory = memory
        self._state_dir = state_dir
        self._under_way = False
        self._again = True  # they may stand in the file already: of a daemon that was killed, or after a failure
        self._failures = 0
        self._journal_lost = 0
        self.problem = ""  # why no line can be written, until one can

    @property
    def status(self) -> StreamStatus:
        waiting = len(self._memory.ledger.outbox.lines)
        return StreamStatus(waiting, self._memory.stream.dropped, self._failures, self._journal_lost, self.problem)

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
        before, self.problem = self.problem, failure(reply)
        self._again = self.problem != ""
        if self._again:
            self._failures += 1
            if not before:
                log.error("the worker could not write events: %s", self.problem)
            return
        assert isinstance(reply.answer, int)
        assert isinstance(reply.request.asked, AppendEvents)
        self._journal_lost += reply.answer
        self._memory.stream.written(reply.request.asked.lines)
