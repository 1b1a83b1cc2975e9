"""Tests of forked workers: a fork keeps no more of its command than an executed program, and ends in the same way."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stub_nvml
from waiting import until

from tests.agent.worker.test_client import CHECKS, HEADER

HANG_SECONDS = 600.0

# A command with state that a fork must not keep. It sends requests to its worker and prints the replies. Arguments: how
# the worker is started ("copy", "program"), the site's checks, a lock, then "CHECK RESOURCE SECONDS" of each request.
COMMAND = """
import fcntl, json, os, signal, socket, sys, time
from functools import partial
from healthd.agent.settings import registry
from healthd.agent.scheduler import one_round
from healthd.agent.worker import client, forked
from healthd.agent.worker.process import Setup
from healthd.agent.worker.requests import Run
how, checks_dir, lock, *requests = sys.argv[1:]
checks = registry.built_in_checks()
sys.stdout.write("")
for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
woken, wakes = socket.socketpair()
wakes.setblocking(False)
signal.set_wakeup_fd(wakes.fileno())
held = os.open(lock, os.O_RDWR | os.O_CREAT)
os.set_inheritable(held, True)
fcntl.flock(held, fcntl.LOCK_EX)
if how == "program":  # an executed program keeps the signal mask
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
begin = partial(forked.start, checks) if how == "copy" else None
client.EXIT_WAIT_SECONDS = 10.0  # on a busy machine the exit status comes late
worker_client = client.WorkerClient(Setup(checks_dir=checks_dir), "", time.monotonic, start_process=begin)
results = []
for request in requests:
    check, resource, seconds = request.split()
    run = Run(check, "", {}, boot_id="b")
    reply = one_round.send_and_wait(worker_client, client.Request(resource, float(seconds), run))
    observed = str(reply.answer.observations) if reply.answer else ""
    results.append([check, reply.outcome.value, reply.error, observed])
driver = "libnvidia-ml" in open("/proc/self/maps").read()
print(json.dumps({"results": results, "pids": worker_client.pids, "driver": driver}))
sys.stdout.flush()
worker_client.close(5.0)
"""


@pytest.fixture
def checks_dir(tmp_path: Path) -> str:
    directory = tmp_path / "checks"
    directory.mkdir(mode=0o755)
    bodies = {**CHECKS, "tells_itself": f"print('words', file=sys.stderr, flush=True)\ntime.sleep({HANG_SECONDS})"}
    for name, body in bodies.items():
        (directory / f"{name}.py").write_text(f"{HEADER}{textwrap.indent(body, '    ')}\n")
        (directory / f"{name}.py").chmod(0o644)
    return str(directory)


def run_command(
    start_method: str, checks_dir: str, tmp_path: Path, *requests: str, env: dict[str, str] | None = None
) -> Any:
    """Return the printed document. This ends when the last process with the pipe of its output has ended."""
    argv = [sys.executable, "-c", COMMAND, start_method, checks_dir, str(tmp_path / "lock"), *requests]
    with open(tmp_path / "words", "wb") as stderr_file:
        completed = subprocess.run(argv, stdout=subprocess.PIPE, stderr=stderr_file, timeout=300, check=False, env=env)
    assert completed.returncode == 0, (tmp_path / "words").read_text()
    return json.loads(completed.stdout)


ENDING_CHECKS = (
    "fine",
    "raises",
    "exits",
    "crashes",
    "faults",
    "babbles",
    "pretends",
    "hangs_up",
    "prints",
    "reads",
    "another_name",
)


def test_forked_worker_ends_like_executed_worker(checks_dir: str, tmp_path: Path) -> None:
    requests = [f"{name} {name} 60" for name in ENDING_CHECKS]
    copied, executed = (run_command(how, checks_dir, tmp_path, *requests)["results"] for how in ("copy", "program"))
    assert copied == executed
    assert {outcome for _, outcome, _, _ in copied} == {"completed", "failed"}
    assert ["exits", "failed", "the worker died (exit status 3)", ""] in copied
    assert ["faults", "failed", "the worker died (signal 11)", ""] in copied


def status(pid: int, *names: str) -> list[str]:
    rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [rows[name].strip() for name in names]


@pytest.fixture
def hanging_workers(checks_dir: str, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Return the pids of a forked and an executed worker that hang in NVML, whose command has ended."""
    pids = []
    try:
        for how in ("copy", "program"):
            outcome_document = run_command(how, checks_dir, tmp_path, "tells_itself nvml 5")
            ((_, outcome, _, _),) = outcome_document["results"]
            assert outcome == "timed_out"
            pids += outcome_document["pids"]
            until(lambda: (tmp_path / "words").read_text() == "words\n", "its standard error is kept")
        yield pids[0], pids[1]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_hanging_forked_worker_keeps_nothing_from_command(hanging_workers: tuple[int, int], tmp_path: Path) -> None:
    copy, program = hanging_workers
    files = [
        sorted(os.readlink(f"/proc/{pid}/fd/{name}").split(":")[0] for name in os.listdir(f"/proc/{pid}/fd"))
        for pid in hanging_workers
    ]
    assert files[0] == files[1] == sorted(["/dev/null"] * 3 + [str(tmp_path / "words"), "socket"])
    with open(tmp_path / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert [os.getsid(pid) for pid in hanging_workers] == [copy, program]
    assert [os.readlink(f"/proc/{pid}/cwd") for pid in hanging_workers] == ["/", "/"]
    names = ("SigBlk", "SigIgn", "SigCgt", "Threads")
    assert status(copy, *names) == status(program, *names)
    scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in hanging_workers]
    assert scores[0] == scores[1]


def test_nvml_library_is_not_loaded_in_command(checks_dir: str, tmp_path: Path) -> None:
    env = stub_nvml.environment(tmp_path)
    outcome_document = run_command("copy", checks_dir, tmp_path, "gpu_access nvml 120", env=env)
    ((_, outcome, error, observed),) = outcome_document["results"]
    assert (outcome, error) == ("completed", "")
    assert "gpu" in observed
    assert outcome_document["driver"] is False


CAN_FORK = """
import sys, threading
from healthd.agent.settings import registry
from healthd.agent.worker import forked
what, checks_dir = sys.argv[1:]
registry.built_in_checks()
end = threading.Event()
if what == "a thread":
    threading.Thread(target=end.wait).start()
elif what:
    try:
        registry.load_site(f"{checks_dir}/{what}.py")
    except Exception as error:
        assert "no run(" in str(error), error
print(forked.can_fork())
end.set()
"""


@pytest.mark.parametrize(("case", "expected"), [("", True), ("fine", False), ("refused", False), ("a thread", False)])
def test_can_fork_only_without_foreign_code(checks_dir: str, case: str, expected: bool) -> None:
    (Path(checks_dir) / "refused.py").write_text("import threading\n")  # it may have started a thread
    (Path(checks_dir) / "refused.py").chmod(0o644)
    argv = [sys.executable, "-c", CAN_FORK, case, checks_dir]
    completed = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert completed.stdout == f"{expected}\n"
