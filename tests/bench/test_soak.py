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

MAX_GROWTH = 32 << 10  # bytes; less than one round of these tests allocates

DRIFTING_CHECK = """
from healthd.common.model import Observation

def run(host, config, past):
    number = host.now()
    for gpu in range(20):
        yield Observation("drifting_celsius", number + gpu / 100, labels=(("gpu", str(gpu)),))
"""


def growth_of(step: Callable[[int], object], first: int, last: int) -> int:
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


def peak_of(step: Callable[[], object]) -> int:
    """Return the peak memory of a step, beyond the bytes in use before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def run_drifting_check(worker: Worker, number: int, past: str = "") -> RunAnswer:
    error, run_answer = worker.do_run(Run("drifts", "", {}, past, BOOT), NOW + number)
    assert not error
    return run_answer


def drifting_worker(tmp_path: Path) -> Worker:
    checks = tmp_path / "checks"
    checks.mkdir(mode=0o755)
    (checks / "drifts.py").write_text(DRIFTING_CHECK)
    clock = iter(range(10_000_000))
    return Worker(Setup(checks_dir=str(checks)), Host(str(tmp_path), now=lambda: float(next(clock))))


def test_worker_keeps_only_last_drifting_readings(tmp_path: Path) -> None:
    worker = drifting_worker(tmp_path)
    past = ""

    def run(number: int) -> None:
        nonlocal past
        past = run_drifting_check(worker, number, past).past

    assert growth_of(run, first=5, last=105) < MAX_GROWTH
    assert "drifting_celsius{gpu=19}" in past


def test_worker_keeps_no_history_refused_by_daemon(tmp_path: Path) -> None:
    """After a run that was too late, the daemon sends the older text again, and the worker reads it."""
    worker = drifting_worker(tmp_path)
    first = run_drifting_check(worker, 0).past
    assert growth_of(lambda number: run_drifting_check(worker, number, first), first=5, last=105) < MAX_GROWTH


def test_daemon_keeps_only_last_drifting_readings() -> None:
    check = built_in_checks()["gpu_temperature"]

    def take(number: int) -> None:
        items = [Observation("drifting_celsius", number + gpu / 100, labels=(("gpu", str(gpu)),)) for gpu in range(20)]
        run_answer = decode(RunAnswer, encode(RunAnswer(observations=tuple(items))))
        run = Request("", 1.0, Run(check.name, "", {}))
        reply = Reply(run, Outcome.COMPLETED, 0.1, answered=True, answer=run_answer)
        assert make_result(check, CheckConfig(), reply, NOW, 0.0).observations[19].value == number + 0.19

    assert growth_of(take, first=5, last=60) < MAX_GROWTH


def test_short_answer_needs_little_peak_memory(tmp_path: Path) -> None:
    """Allocating a megabyte for each answer would leave holes in the heap that never close."""
    runner = WorkerClient(Setup(root=str(tmp_path)), str(tmp_path), lambda: 0.0)
    reply = runner.send(Request("", 60.0, CloseNvml()))
    try:
        while reply is None:
            reply = runner.step()

        def ask() -> None:
            answered = runner.send(Request("", 60.0, CloseNvml()))
            while answered is None:
                answered = runner.step()
            assert answered.outcome is Outcome.COMPLETED

        assert peak_of(ask) < MAX_GROWTH
    finally:
        runner.close(2.0)


def test_worker_reads_short_request_with_little_peak_memory() -> None:
    client_end, worker_end = socket.socketpair()
    lines = workers._lines(worker_end)
    with client_end, worker_end:
        client_end.sendall(b"first\n")
        assert next(lines) == b"first"
        client_end.sendall(b"second\n")
        assert peak_of(lambda: next(lines)) < MAX_GROWTH
        writer = threading.Thread(target=client_end.sendall, args=(b"x" * 200_000 + b"\nlast\n",))
        writer.start()
        assert (len(next(lines)), next(lines)) == (200_000, b"last")
        writer.join()


def test_observations_above_maximum_are_dropped_and_counted(tmp_path: Path) -> None:
    worker = drifting_worker(tmp_path)
    checks = tmp_path / "checks" / "drifts.py"
    for excess in (0, 1, 10_000):
        checks.write_text(DRIFTING_CHECK.replace("range(20)", f"range({workers.MAX_OBSERVATIONS + excess})"))
        worker.checks = workers.NO_CHECKS  # it reloads the checks
        run_answer = run_drifting_check(worker, 0)
        assert (len(run_answer.observations), run_answer.dropped_observations) == (workers.MAX_OBSERVATIONS, excess)
        check = built_in_checks()["gpu_temperature"]
        reply = Reply(
            Request("", 1.0, Run(check.name, "", {})), Outcome.COMPLETED, 0.1, answered=True, answer=run_answer
        )
        assert make_result(check, CheckConfig(), reply, NOW, 0.0).dropped_observations == excess
