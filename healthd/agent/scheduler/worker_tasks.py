"""Worker tasks other than checks. Each class creates a task's requests and handles the replies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

from healthd.agent.conditions.store import NAMES, ConditionStore
from healthd.agent.hooks.result import state_path
from healthd.agent.scheduler.worker_queue import TASK_TIMEOUT_SECONDS
from healthd.agent.worker import installed_files
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import (
    AppendEvents,
    CheckInstalledFiles,
    CopyAnswer,
    LoadCopy,
    ReadClusterName,
    SaveCopy,
    TakeInventory,
    WriteFile,
)
from healthd.common.model import Inventory, Observation, Outcome, StreamStatus
from healthd.common.repair_plan import Attempt
from healthd.common.text import strip_error_class
from healthd.host.inventory import JOINED, complete_gpus

log = logging.getLogger("healthd")

CLUSTER_NAME = Request("slurm_conf", TASK_TIMEOUT_SECONDS, ReadClusterName())
INVENTORY = Request("nvml", TASK_TIMEOUT_SECONDS, TakeInventory(gpus=True))
INVENTORY_SECONDS = 24 * 3600.0


def hooks_record(state_dir: str) -> Request:
    """Return the request for the record of the hooks. The worker reads it, because the disk may hang."""
    folder, name = os.path.split(state_path(state_dir))
    return Request("state_dir", TASK_TIMEOUT_SECONDS, LoadCopy(folder, (name,)))


def has_hooks_record(reply: Reply) -> bool:
    """Return True if there is a record, or if there may be one that cannot be read."""
    texts = reply.answer.texts if isinstance(reply.answer, CopyAnswer) else {}
    return set(texts.values()) != {None}


class LedgerCopy:
    """Copies the ledger to the state directory, whose disk may hang.

    problem  why the last copy failed, or ""
    attempt  the step of a repair that the last complete copy contains
    """

    def __init__(self, store: ConditionStore, runtime_dir: str, state_dir: str) -> None:
        self.failures, self.problem = 0, ""
        self.attempt: Attempt | None = None
        self._copied_attempt: Attempt | None = None  # in the copy that is being made
        self._store = store
        self._runtime_dir, self._state_dir = runtime_dir, state_dir

    def is_due(self, round_ended: bool) -> bool:
        """Return True after a round, and at once after an action in Slurm.

        If a node reboots minutes after a drain, healthd must still be able to recognise the drain as its own.
        """
        return self._store.uncopied and (round_ended or self._store.slurm_uncopied)

    def request(self) -> Request:
        store = self._store
        self._copied_attempt = store.ledger.repair.attempt
        copy = SaveCopy(self._runtime_dir, self._state_dir, NAMES, store.copy_unreadable)
        store.uncopied = store.slurm_uncopied = store.copy_unreadable = False
        return Request("state_dir", TASK_TIMEOUT_SECONDS, copy)

    def handle_reply(self, reply: Reply) -> None:
        self.problem = failure(reply)
        if self.problem:
            self.failures += 1
            self._store.uncopied = True  # the next round tries again
        else:
            self.attempt = self._copied_attempt


class InstalledFiles:
    """Watches healthd's own files, which may be removed or replaced while the daemon runs. `problem` is a sentence
    about such a change.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._at_start = installed_files.identities()

    def changed(self) -> str:
        """Return a sentence if the files were removed or replaced, otherwise "". The call may hang if their disk
        hangs.
        """
        return installed_files.problem(self._at_start, installed_files.identities(list(self._at_start)))

    def request(self) -> Request:
        return Request("own_files", TASK_TIMEOUT_SECONDS, CheckInstalledFiles(tuple(self._at_start)))

    def handle_reply(self, reply: Reply) -> None:
        if reply.outcome is Outcome.COMPLETED:
            assert isinstance(reply.answer, dict)
            found = installed_files.problem(self._at_start, reply.answer)
        elif reply.outcome is Outcome.FAILED:  # no worker could be started, or it exited at once
            found = self.changed() or f"no worker answers: {reply.error}"
        else:
            return  # a hang says nothing about the files
        if found and found != self.problem:
            log.error("%s", found)
        self.problem = found


class Textfile:
    """Writes the file `metrics.textfile`, whose disk may hang. `problem` is the reason why the last write failed."""

    def __init__(self) -> None:
        self.problem = ""

    def request(self, path: str, page: str) -> Request:
        return Request("textfile", TASK_TIMEOUT_SECONDS, WriteFile(path, page))

    def handle_reply(self, reply: Reply) -> None:
        problem = strip_error_class(failure(reply))
        if problem:
            assert isinstance(reply.request.operation, WriteFile)
            problem = f"cannot write {reply.request.operation.path} (metrics.textfile): {problem}"
        if problem not in ("", self.problem):
            log.error("%s", problem)
        self.problem = problem


class InventoryTask:
    """Reads this node's inventory once a day, and when it may have changed."""

    def __init__(self, store: ConditionStore, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._monotonic = monotonic
        self._read_at = -float("inf")

    def renew_soon(self) -> None:
        """Read the inventory again after the next GPU check."""
        self._read_at = -float("inf")

    def is_due(self, check: Reply, observations: Iterable[Observation]) -> bool:
        """Return True after a GPU check if the inventory is old or differs from the check's observations.

        The inventory is then read before the driver is closed.
        """
        if check.request.resource != "nvml" or check.outcome is not Outcome.COMPLETED:
            return False
        is_old = self._monotonic() - self._read_at >= INVENTORY_SECONDS
        return is_old or is_outdated(self._store.ledger.inventory, observations)

    def handle_reply(self, reply: Reply) -> Inventory:
        """Return the inventory that the worker read."""
        inventory = reply.answer
        assert isinstance(inventory, Inventory)
        self._store.change(whole_gpus=complete_gpus(self._store.ledger.whole_gpus, inventory.gpus))
        self._store.stream.emit_gpus(inventory.gpus)
        self._read_at = self._monotonic()
        return inventory


def failure(reply: Reply) -> str:
    """Return the reason why the worker did not complete the task, or "" if it did."""
    if reply.outcome is Outcome.COMPLETED:
        return ""
    return reply.error or reply.outcome.value.replace("_", " ")


def is_outdated(inventory: Inventory, observations: Iterable[Observation]) -> bool:
    """Return True if NVML shows more GPUs than the inventory, or another driver, or if the GPUs have joined an NVLink
    fabric since. A lost GPU stays in the inventory."""
    observations = tuple(observations)
    fabric_states = [observation.value for observation in observations if observation.name == "gpu_fabric_state"]
    has_joined = inventory.domain is None and bool(fabric_states) and set(fabric_states) == {JOINED}
    return has_joined or any(
        (observation.name == "gpus" and observation.value > len(inventory.gpus))
        or (observation.name == "gpu_driver_info" and ("version", inventory.driver_version) not in observation.labels)
        for observation in observations
    )


class StreamDelivery:
    """Writes events from the ledger's outbox to the stream's files, one write at a time. `observers` are called with
    lines that are on disk.
    """

    def __init__(self, store: ConditionStore, state_dir: str) -> None:
        self._store = store
        self._state_dir = state_dir
        self._is_pending = False
        self._may_repeat = True  # lines may already be in the file, after a kill or a failure
        self._failures = 0
        self._journal_lost = 0
        self.problem = ""  # why lines cannot be written, or ""
        self.observers: list[Callable[[Iterable[str]], None]] = []

    @property
    def status(self) -> StreamStatus:
        waiting = len(self._store.ledger.outbox.lines)
        return StreamStatus(waiting, self._store.stream.dropped, self._failures, self._journal_lost, self.problem)

    @property
    def is_due(self) -> bool:
        """True if lines are waiting and the ledger that contains them is saved.

        If the daemon were killed before the ledger is saved, the next daemon could give the written lines' numbers to
        other lines.
        """
        return bool(self._store.ledger.outbox.lines) and not self._is_pending and not self._store.unsaved

    def request(self) -> Request:
        self._is_pending = True
        operation = AppendEvents(self._state_dir, tuple(self._store.ledger.outbox.lines), self._may_repeat)
        return Request("state_dir", TASK_TIMEOUT_SECONDS, operation)

    def handle_reply(self, reply: Reply) -> None:
        self._is_pending = False
        before, self.problem = self.problem, failure(reply)
        self._may_repeat = self.problem != ""
        if self._may_repeat:
            self._failures += 1
            if not before:
                log.error("the worker could not write events: %s", self.problem)
            return
        assert isinstance(reply.answer, int)
        assert isinstance(reply.request.operation, AppendEvents)
        self._journal_lost += reply.answer
        self._store.stream.mark_written(reply.request.operation.lines)
        for observe in self.observers:
            observe(reply.request.operation.lines)
