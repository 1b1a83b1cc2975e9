"""Tests that a process does not grow over thousands of rounds (`make bench` measures it)."""

from __future__ import annotations

import gc
import socket
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from fakes import BOOT, NOW

from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import built_in_checks
from healthd.agent.worker import process as workers
from healthd.agent.worker.client import Reply, Request, WorkerClient
from healthd.agent.worker.process import Setup, Worker
from healthd.agent.worker.requests import CloseNvml, Run, RunAnswer
from healthd.agent.worker.results import make_result
from healthd.common.model import Observation, Outcome
from healthd.common.values import decode, encode
from healthd.host.host import Host

LITTLE = 32 << 10  # bytes; less than one round of these tests allocates

CHANGING = """
from healthd.common.model import Observation

def run(host, config, past):
    number = host.now()
    for gpu in range(20):
        yield Observation("drifting_celsius", number + gpu / 100, labels=(("gpu", str(gpu)),))
"""


def grown(step: Callable[[int], object], first: int, last: int) -> int:
    """Return how many bytes more are in use after the last call than after the first calls."""
    tracemalloc.start()
    try:
        for number in range(first):
            step(number)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(first, last):
            step(number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def peak(step: Callable[[], object]) -> int:
    """Return the peak memory of a step, beyond the bytes in use before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def answer(worker: Worker, number: int, past: str = "") -> RunAnswer:
    error, found = worker.do_run(Run("drifts", "", {}, past, BOOT), NOW + number)
    assert not error
    return found


def drifting(tmp_path: Path) -> Worker:
    checks = tmp_path / "checks"
    checks.mkdir(mode=0o755)
    (checks / "drifts.py").write_text(CHANGING)
    clock = iter(range(10_000_000))
    return Worker(Setup(checks_dir=str(checks)), Host(str(tmp_path), now=lambda: float(next(clock))))


def test_a_worker_keeps_of_readings_that_never_come_again_only_those_of_the_last_run(tmp_path: Path) -> None:
    worker = drifting(tmp_path)
    past = ""

    def run(number: int) -> None:
        nonlocal past
        past = answer(worker, number, past).past

    assert grown(run, first=5, last=105) < LITTLE
    assert "drifting_celsius{gpu=19}" in past


def test_a_worker_keeps_no_store_that_the_daemon_did_not_take(tmp_path: Path) -> None:
    """After a run that was too late, the daemon sends the older text again, and the worker reads it."""
    worker = drifting(tmp_path)
    first = answer(worker, 0).past
    assert grown(lambda number: answer(worker, number, first), first=5, last=105) < LITTLE


def test_the_daemon_keeps_of_readings_that_never_come_again_only_those_of_the_last_run() -> None:
    check = built_in_checks()["gpu_temperature"]

    def take(number: int) -> None:
        items = [Observation("drifting_celsius", number + gpu / 100, labels=(("gpu", str(gpu)),)) for gpu in range(20)]
        found = decode(RunAnswer, encode(RunAnswer(observations=tuple(items))))
        run = Request("", 1.0, Run(check.name, "", {}))
        reply = Reply(run, Outcome.COMPLETED, 0.1, answered=True, answer=found)
        assert make_result(check, CheckConfig(), reply, NOW, 0.0).observations[19].value == number + 0.19

    assert grown(take, first=5, last=60) < LITTLE


def test_a_short_answer_needs_little_memory_for_a_moment_too(tmp_path: Path) -> None:
    """Allocating a megabyte for each answer would leave holes in the heap that never close."""
    runner = WorkerClient(Setup(root=str(tmp_path)), str(tmp_path), lambda: 0.0)
    reply = runner.send(Request("", 60.0, CloseNvml()))
    try:
        while reply is None:
            reply = runner.step()

        def ask() -> None:
            said = runner.send(Request("", 60.0, CloseNvml()))
            while said is None:
                said = runner.step()
            assert said.outcome is Outcome.COMPLETED

        assert peak(ask) < LITTLE
    finally:
        runner.close(2.0)


def test_a_worker_needs_little_memory_for_a_moment_to_read_a_short_request() -> None:
    ours, theirs = socket.socketpair()
    lines = workers._lines(theirs)
    with ours, theirs:
        ours.sendall(b"first\n")
        assert next(lines) == b"first"
        ours.sendall(b"second\n")
        assert peak(lambda: next(lines)) < LITTLE
        writer = threading.Thread(target=ours.sendall, args=(b"x" * 200_000 + b"\nlast\n",))
        writer.start()
        assert (len(next(lines)), next(lines)) == (200_000, b"last")
        writer.join()


def test_of_more_readings_than_a_page_can_carry_so_many_are_kept_and_the_rest_counted(tmp_path: Path) -> None:
    worker = drifting(tmp_path)
    checks = tmp_path / "checks" / "drifts.py"
    for more in (0, 1, 10_000):
        checks.write_text(CHANGING.replace("range(20)", f"range({workers.MAX_OBSERVATIONS + more})"))
        worker.checks = workers.NO_CHECKS  # it reloads the checks
        found = answer(worker, 0)
        assert (len(found.observations), found.dropped_observations) == (workers.MAX_OBSERVATIONS, more)
        check = built_in_checks()["gpu_temperature"]
        reply = Reply(Request("", 1.0, Run(check.name, "", {})), Outcome.COMPLETED, 0.1, answered=True, answer=found)
        assert make_result(check, CheckConfig(), reply, NOW, 0.0).dropped_observations == more
