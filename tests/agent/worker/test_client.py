"""Tests of the worker client with misbehaving real workers: each request ends, and no worker is killed inside NVML."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from healthd.agent.worker import client as work_runner
from healthd.agent.worker.client import WORKERS_FILE, Identity, Reply, Request, WorkerClient, start_time
from healthd.agent.worker.process import Setup, Worker
from healthd.agent.worker.requests import (
    SEPARATOR,
    CloseNvml,
    CopyAnswer,
    LoadCopy,
    Message,
    Response,
    Run,
    RunAnswer,
    SaveCopy,
    TakeInventory,
    WriteFile,
)
from healthd.common import values
from healthd.common.codec import dump
from healthd.common.history import decode
from healthd.common.model import Inventory, Observation, Outcome
from healthd.host.host import Host

CHECKS = {
    "fine": 'yield Observation("answer", 42)',
    "raises": 'yield Observation("answer", 42)\nraise RuntimeError("no\\nway")',
    "exits": "sys.exit(3)",
    "crashes": "os._exit(7)",
    "faults": "import faulthandler, ctypes; faulthandler.disable(); ctypes.string_at(0)",
    "babbles": 'os.write(stream(), b"hello")',
    "pretends": 'os.write(stream(), b\'{"error": "", "findings": []}\\n\')',
    "talks_later": (
        "import threading\ndef psst():\n    while not os.path.exists(config.name): time.sleep(0.01)\n"
        '    os.write(stream(), b"psst")\nthreading.Thread(target=psst).start()'
    ),
    "floods": 'os.write(stream(), b"x" * (9 << 20))',
    "gives_too_much": 'yield Observation("x" * (9 << 20), 1)',
    "hangs_up": "os.close(stream()); time.sleep(600)",
    "prints": 'print("hello", flush=True)\nos.write(1, b"hello")\nyield Observation("answer", 42)',
    "reads": "sys.stdin.read()",
    "gives_nonsense": "yield 42",
    "gives_bytes": 'yield Finding(Severity.WARNING, "gives_bytes/x", b"part", "m")',
    "gives_bytes_as_label": 'yield Observation("answer", 1, labels=(("part", b"x"),))',
    "gives_text_as_bits": 'yield Observation("answer", 1, bits="64")',
    "gives_a_derived_number": 'yield Observation("answer", type("Number", (float,), {})(42.0))',
    "gives_nan": 'yield Observation("answer", float("nan"))',
    "gives_an_object": 'yield Observation("answer", 1, bits=object())',
    "gives_a_path": 'yield Finding(Severity.WARNING, "gives_a_path/x", os.fsdecode(b"/data/\\xff"), "m")',
    "another_name": 'yield Finding(Severity.WARNING, "fine/x", "", "m")',
    "unclosable": 'def close(): raise OSError("nvmlShutdown failed")\nhost._nvml = lambda: 0; host._nvml.close = close',
    "hangs": "time.sleep(600)",
    "calls_nvml_twice": (
        "gpus = host.nvml.gpus()\nwhile not os.path.exists(config.name): time.sleep(0.01)\n"
        'gpus[0].temperature()\nopen(config.name + ".called", "w").close()\ntime.sleep(600)'
    ),
    "waits_for_file": (  # or until the test ends
        "while os.path.exists(os.path.dirname(config.name)) and not os.path.exists(config.name): time.sleep(0.01)"
    ),
}

HEADER = """
import os, stat, sys, time
from healthd.common.model import Finding, Observation, Severity

def stream():
    for name in os.listdir("/proc/self/fd"):
        path = "/proc/self/fd/" + name
        if int(name) > 2 and os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            return int(name)

def run(host, config, past):
    yield from ()
"""


@pytest.fixture
def checks_dir(tmp_path: Path) -> str:
    """Create a site's checks directory. Each check does one thing."""
    directory = tmp_path / "checks"
    directory.mkdir(mode=0o755)
    for name, body in CHECKS.items():
        (directory / f"{name}.py").write_text(f"{HEADER}{textwrap.indent(body, '    ')}\n")
    return str(directory)


@pytest.fixture
def make_client(checks_dir: str, tmp_path: Path) -> Iterator[Callable[..., WorkerClient]]:
    clients: list[WorkerClient] = []

    def make(
        monotonic: Callable[[], float] = time.monotonic, now: Callable[[], float] | None = None, **setup: str
    ) -> WorkerClient:
        clients.append(WorkerClient(Setup(checks_dir=checks_dir, **setup), str(tmp_path), monotonic, now))
        clients[-1].adopt_lost()
        return clients[-1]

    yield make
    for worker_client in clients:
        lost = list(worker_client.quarantined.values())
        worker_client.close(2.0)
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def worker_client(make_client: Callable[..., WorkerClient]) -> WorkerClient:
    return make_client()


def request(check: str, resource: str = "", timeout_seconds: float = 120.0, **config: object) -> Request:
    return Request(resource or check, timeout_seconds, Run(check, "", config, boot_id="b"))


def wait(worker_client: WorkerClient, seconds: float) -> None:
    """Wait as the daemon does."""
    poll = select.poll()
    for descriptor, writes in worker_client.waits():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
    poll.poll(max(0.0, min(seconds, worker_client.deadline - time.monotonic())) * 1000 + 1)


def send_and_wait(worker_client: WorkerClient, request_: Request) -> Reply:
    return worker_client.send(request_) or wait_for_reply(worker_client)


def wait_for_reply(worker_client: WorkerClient) -> Reply:
    """Return the reply to the request in flight."""
    while (reply := worker_client.step()) is None:
        wait(worker_client, 30.0)
    return reply


def run_until(worker_client: WorkerClient, is_reached: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_reached():
        assert time.monotonic() < end, "timed out"
        wait(worker_client, 0.1)
        assert worker_client.step() is None


def run_answer(reply: Reply) -> RunAnswer:
    assert isinstance(reply.answer, RunAnswer)
    return reply.answer


def worker_pid(worker_client: WorkerClient) -> int:
    """Return the pid of the worker with the current or the last request."""
    return worker_client._worker.process.pid  # type: ignore[union-attr]


def pending_signals(pid: int) -> int:
    """Return the pending signals of a process and of its main thread as a mask."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)


def test_completed_run_returns_observations(worker_client: WorkerClient) -> None:
    reply = send_and_wait(worker_client, request("fine"))
    assert (reply.outcome, reply.error) == (Outcome.COMPLETED, "")
    assert run_answer(reply).observations == (Observation("answer", 42.0),)


def test_run_answer_has_plain_numbers(worker_client: WorkerClient) -> None:
    reply = send_and_wait(worker_client, request("gives_a_derived_number"))
    assert run_answer(reply).observations == (Observation("answer", 42.0),)


def test_run_answer_keeps_path_that_is_not_utf8(worker_client: WorkerClient) -> None:
    (finding,) = run_answer(send_and_wait(worker_client, request("gives_a_path"))).findings
    assert os.fsencode(finding.subject) == b"/data/\xff"


def test_exception_in_check_is_single_sentence_and_keeps_observations(worker_client: WorkerClient) -> None:
    reply = send_and_wait(worker_client, request("raises"))
    assert (reply.outcome, reply.error) == (Outcome.FAILED, "no way")
    assert run_answer(reply).observations == (Observation("answer", 42.0),)


MISBEHAVING_CHECKS = (
        ("exits", "the worker died (exit status 3)"),
        ("crashes", "the worker died (exit status 7)"),
        ("faults", "the worker died (signal 11)"),
        ("babbles", "the worker sent an invalid answer"),
        ("pretends", "the worker sent an invalid answer"),  # must not count as a clean run
        ("floods", "the worker's answer exceeds 8 MiB"),
        ("gives_too_much", "the worker's answer exceeds 8 MiB"),
        ("gives_nonsense", 'TypeError: the check "gives_nonsense" yielded 42: must be a Finding, an Observation, a '
         "Repair or NothingToCheck"),
        ("gives_bytes", "TypeError: Object of type bytes is not JSON serializable"),
        ("gives_bytes_as_label", "TypeError: observation 'answer': its name and labels must be text, got "
         "(('part', b'x'),)"),
        ("gives_text_as_bits", "the worker's answer: Expected `int | null`, got `str` - at `$.observations[0].bits`"),
        ("gives_nan", 'the check "gives_nan" yielded the observation "answer" with the value nan: must be finite'),
        ("gives_an_object", "the answer cannot be sent: TypeError: a value of type object has no JSON"),
        ("another_name", "the check \"another_name\" yielded a finding with the code \"fine/x\": it must be "
         "\"another_name/...\""),
)  # fmt: skip
CHECKS_THAT_END_WORKER = ("exits", "crashes", "faults", "babbles", "pretends", "floods")


@pytest.mark.parametrize(
    ("check", "error", "resource"),
    [
        *((check, error, "") for check, error in MISBEHAVING_CHECKS),
        *((check, error, "nvml") for check, error in MISBEHAVING_CHECKS if check in CHECKS_THAT_END_WORKER),
    ],
)
def test_misbehaving_check_fails_and_next_check_runs(
    worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch, check: str, error: str, resource: str
) -> None:
    monkeypatch.setattr(work_runner, "EXIT_WAIT_SECONDS", 60.0)  # on a busy machine the exit status comes late
    reply = send_and_wait(worker_client, request(check, resource))
    assert (reply.outcome, reply.error) == (Outcome.FAILED, error)
    run_until(
        worker_client, lambda: not worker_client.quarantined
    )  # a worker that may be in NVML is not killed, but ends by itself
    assert send_and_wait(worker_client, request("fine", resource)).outcome is Outcome.COMPLETED
    assert worker_client.quarantined == {}


def test_unrequested_output_is_not_next_answer(worker_client: WorkerClient, tmp_path: Path) -> None:
    release_file = tmp_path / "go-on"
    assert send_and_wait(worker_client, request("talks_later", name=str(release_file))).outcome is Outcome.COMPLETED
    first_pid = worker_pid(worker_client)
    release_file.touch()
    assert worker_client.answers_within(60)
    assert send_and_wait(worker_client, request("fine")).outcome is Outcome.COMPLETED
    assert worker_pid(worker_client) != first_pid


def test_check_may_print_and_read_stdin(worker_client: WorkerClient) -> None:
    assert run_answer(send_and_wait(worker_client, request("prints"))).observations == (Observation("answer", 42.0),)
    assert send_and_wait(worker_client, request("reads")).outcome is Outcome.COMPLETED


def test_single_worker_runs_all_checks(worker_client: WorkerClient) -> None:
    for _ in range(5):
        send_and_wait(worker_client, request("fine"))
    assert worker_client.started_total == 1


def test_worker_killed_between_rounds_is_replaced(worker_client: WorkerClient) -> None:
    send_and_wait(worker_client, request("fine"))
    os.kill(worker_pid(worker_client), signal.SIGKILL)
    os.waitid(os.P_PID, worker_pid(worker_client), os.WEXITED | os.WNOWAIT)
    assert send_and_wait(worker_client, request("fine")).outcome is Outcome.COMPLETED
    assert worker_client.started_total == 2


def test_worker_killed_during_run_fails_only_that_run(
    worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_runner, "EXIT_WAIT_SECONDS", 60.0)  # on a busy machine the exit status comes late
    assert worker_client.send(request("hangs")) is None
    os.kill(worker_pid(worker_client), signal.SIGKILL)
    reply = wait_for_reply(worker_client)
    assert (reply.outcome, reply.error) == (Outcome.FAILED, "the worker died (signal 9)")
    assert send_and_wait(worker_client, request("fine")).outcome is Outcome.COMPLETED


def test_worker_that_closes_socket_is_killed(worker_client: WorkerClient) -> None:
    assert send_and_wait(worker_client, request("hangs_up")).outcome is Outcome.FAILED
    assert worker_client.quarantined == {}


def test_unknown_check_is_single_sentence(worker_client: WorkerClient) -> None:
    assert send_and_wait(worker_client, request("nothing")).error == "KeyError: 'nothing'"


# --- overdue


def test_overdue_worker_outside_nvml_is_killed(worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_runner, "EXIT_WAIT_SECONDS", 60.0)  # on a busy machine the exit status comes late
    worker_client.send(request("hangs", timeout_seconds=0.5))
    worker = worker_pid(worker_client)
    reply = wait_for_reply(worker_client)
    assert (reply.outcome, reply.error) == (Outcome.TIMED_OUT, "no answer within 0.5 s")
    assert start_time(worker) is None
    assert worker_client.quarantined == {}
    assert send_and_wait(worker_client, request("hangs", timeout_seconds=0.5)).outcome is Outcome.TIMED_OUT
    assert send_and_wait(worker_client, request("fine")).outcome is Outcome.COMPLETED


def test_overdue_worker_in_nvml_is_quarantined_and_not_signalled(worker_client: WorkerClient, tmp_path: Path) -> None:
    release_file = tmp_path / "go-on"
    worker_client.send(request("waits_for_file", "nvml", timeout_seconds=0.5, name=str(release_file)))
    worker = worker_pid(worker_client)
    reply = wait_for_reply(worker_client)
    assert reply.outcome is Outcome.TIMED_OUT
    assert worker_client.abandoned_total == 1
    assert worker_client.quarantined == {"nvml": worker}
    assert pending_signals(worker) == 0
    assert start_time(worker) is not None

    stuck = send_and_wait(worker_client, request("fine", "nvml"))
    assert (stuck.outcome, stuck.error) == (Outcome.STUCK, f"worker {worker} still hangs in nvml")
    assert not worker_client.nvml_open
    assert send_and_wait(worker_client, request("fine")).outcome is Outcome.COMPLETED

    release_file.touch()
    run_until(worker_client, lambda: not worker_client.quarantined)
    assert start_time(worker) is None
    assert send_and_wait(worker_client, request("fine", "nvml")).outcome is Outcome.COMPLETED


def test_hanging_inventory_is_not_signalled(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    scenario = tmp_path / "hangs.toml"
    scenario.write_text('profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 20\n')
    worker_client = make_client(fake_nvml=str(scenario))
    worker_client.send(Request("nvml", 5.0, TakeInventory(gpus=True)))
    worker = worker_pid(worker_client)
    reply = wait_for_reply(worker_client)
    assert reply.outcome is Outcome.TIMED_OUT
    assert worker_client.quarantined == {"nvml": worker}
    assert pending_signals(worker) == 0
    run_until(worker_client, lambda: not worker_client.quarantined)


def test_abandoned_worker_ends_before_next_nvml_call(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    release_file = tmp_path / "go-on"
    worker_client = make_client(fake_nvml="dgx-h100")
    worker_client.send(request("calls_nvml_twice", "nvml", timeout_seconds=0.5, name=str(release_file)))
    worker = worker_pid(worker_client)
    assert wait_for_reply(worker_client).outcome is Outcome.TIMED_OUT
    assert worker_client.quarantined == {"nvml": worker}
    release_file.touch()
    run_until(worker_client, lambda: not worker_client.quarantined)
    assert start_time(worker) is None
    assert not (tmp_path / "go-on.called").exists()


def test_client_replaces_fifo_at_workers_file(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WORKERS_FILE)
    assert send_and_wait(make_client(), request("fine")).outcome is Outcome.COMPLETED
    assert (tmp_path / WORKERS_FILE).is_file()


def test_worker_without_pidfd_is_quarantined(
    make_client: Callable[..., WorkerClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no descriptor when it is abandoned. Its resource stays quarantined until it ends."""
    release_file = tmp_path / "go-on"
    worker_client = make_client()
    worker_client.send(request("waits_for_file", "nvml", timeout_seconds=0.5, name=str(release_file)))
    worker = worker_pid(worker_client)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", fail_no_descriptor)
        wait_for_reply(worker_client)
    assert worker_client.quarantined == {"nvml": worker}
    release_file.touch()
    end = time.monotonic() + 120
    while worker_client.quarantined and time.monotonic() < end:
        time.sleep(0.05)
        worker_client.step()
    assert worker_client.quarantined == {}


def fail_no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_next_daemon_adopts_quarantined_worker(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    release_file = tmp_path / "go-on"
    first = make_client()
    first.send(request("waits_for_file", "nvml", timeout_seconds=0.5, name=str(release_file)))
    worker = worker_pid(first)
    wait_for_reply(first)

    second = make_client()
    assert second.quarantined == {"nvml": worker}
    assert send_and_wait(second, request("fine", "nvml")).outcome is Outcome.STUCK
    assert pending_signals(worker) == 0
    release_file.touch()
    run_until(second, lambda: not second.quarantined)
    assert send_and_wait(second, request("fine", "nvml")).outcome is Outcome.COMPLETED


def test_next_daemon_adopts_busy_worker_after_kill(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    """The first daemon has no chance to save anything."""
    release_file = tmp_path / "go-on"
    first = make_client()
    first.send(request("waits_for_file", "nvml", name=str(release_file)))
    second = make_client()
    assert second.quarantined == {"nvml": worker_pid(first)}
    release_file.touch()


def test_reused_pid_is_not_quarantined(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    other_process = Identity(os.getpid(), start_time(os.getpid()) + 1, "nvml")  # type: ignore[operator]
    (tmp_path / WORKERS_FILE).write_text(json.dumps([dump(other_process)]))
    assert make_client().quarantined == {}


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"pid": "1"}]', "null", "\0\0"])
def test_truncated_workers_file_quarantines_nothing(
    make_client: Callable[..., WorkerClient], tmp_path: Path, text: str
) -> None:
    (tmp_path / WORKERS_FILE).write_text(text)
    assert make_client().quarantined == {}


# --- close


def test_close_ends_idle_worker(worker_client: WorkerClient) -> None:
    send_and_wait(worker_client, request("fine"))
    pid = worker_pid(worker_client)
    worker_client.close(120.0)
    assert start_time(pid) is None


def test_close_leaves_busy_nvml_worker_running(worker_client: WorkerClient, tmp_path: Path) -> None:
    release_file = tmp_path / "go-on"
    worker_client.send(request("waits_for_file", "nvml", name=str(release_file)))
    pid = worker_pid(worker_client)
    started = time.monotonic()
    worker_client.close(0.2)
    assert time.monotonic() - started < 60
    assert pending_signals(pid) == 0
    recorded = json.loads((tmp_path / WORKERS_FILE).read_text())
    assert [(worker["pid"], worker["resource"]) for worker in recorded] == [(pid, "nvml")]
    release_file.touch()
    assert os.waitpid(pid, 0)[1] == 0, "it ends by itself, without an error"


def test_request_without_worker_fails_and_nvml_stays_closed(
    worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    reply = send_and_wait(worker_client, request("fine", "nvml"))
    assert reply.outcome is Outcome.FAILED
    assert reply.error.startswith("no worker could be started: ")
    assert not worker_client.nvml_open


# --- NVML


def test_nvml_open_from_first_gpu_check_to_close_nvml(make_client: Callable[..., WorkerClient]) -> None:
    worker_client = make_client(fake_nvml="dgx-h100")
    send_and_wait(worker_client, request("fine"))
    assert not worker_client.nvml_open
    assert send_and_wait(worker_client, request("gpu_count", "nvml")).outcome is Outcome.COMPLETED
    assert worker_client.nvml_open
    assert send_and_wait(worker_client, Request("nvml", 60, CloseNvml())).outcome is Outcome.COMPLETED
    assert not worker_client.nvml_open
    assert worker_client.started_total == 1


def test_failed_close_nvml_replaces_worker(worker_client: WorkerClient) -> None:
    send_and_wait(worker_client, request("unclosable", "nvml"))
    reply = send_and_wait(worker_client, Request("nvml", 60, CloseNvml()))
    assert (reply.outcome, reply.error) == (Outcome.FAILED, "nvmlShutdown failed")
    assert not worker_client.nvml_open
    assert worker_client.quarantined == {}
    assert send_and_wait(worker_client, request("fine")).outcome is Outcome.COMPLETED
    assert worker_client.started_total == 2


@pytest.fixture
def outdated(make_client: Callable[..., WorkerClient], tmp_path: Path) -> tuple[WorkerClient, Path]:
    """Return a client whose worker has loaded NVML, after which the driver was replaced by another version."""
    scenario = tmp_path / "upgrade.toml"
    scenario.write_text('profile = "dgx-h100"\n')
    worker_client = make_client(fake_nvml=str(scenario))
    send_and_wait(worker_client, request("gpu_access", "nvml"))
    send_and_wait(worker_client, Request("nvml", 60, CloseNvml()))
    scenario.write_text('profile = "dgx-h100"\nlibrary = "mismatch"\n')
    return worker_client, scenario


def test_version_mismatch_is_confirmed_by_new_worker(outdated: tuple[WorkerClient, Path]) -> None:
    worker_client, _scenario = outdated
    reply = send_and_wait(worker_client, request("gpu_access", "nvml"))
    assert [finding.code for finding in run_answer(reply).findings] == ["gpu_access/driver_mismatch"]
    assert worker_client.started_total == 2


def test_version_mismatch_is_cached_within_round(
    outdated: tuple[WorkerClient, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_client, scenario = outdated
    send_and_wait(worker_client, request("gpu_access", "nvml"))
    send_and_wait(worker_client, request("gpu_count", "nvml"))
    assert not worker_client.nvml_open
    assert worker_client.started_total == 2
    scenario.write_text('profile = "dgx-h100"\n')
    monkeypatch.setattr(worker_client, "_monotonic", lambda: time.monotonic() + 300.0)
    assert run_answer(send_and_wait(worker_client, request("gpu_access", "nvml"))).findings == ()
    assert worker_client.started_total == 3


def test_driver_upgrade_under_worker_is_no_fault(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    """The old library stays loaded in the old process, so only that process sees a mismatch."""
    marker = tmp_path / "checks" / "upgraded.py"
    marker.write_text(
        f"{HEADER}"
        "    host.nvml_is_outdated = hasattr(sys, 'healthd_old')\n"
        "    if host.nvml_is_outdated:\n"
        "        yield Finding(Severity.DEGRADED, 'upgraded/mismatch', '', 'm')\n"
        "    sys.healthd_old = True\n"
    )
    worker_client = make_client()
    assert run_answer(send_and_wait(worker_client, request("upgraded", "nvml"))).findings == ()
    assert run_answer(send_and_wait(worker_client, request("upgraded", "nvml"))).findings == ()
    assert worker_client.started_total == 2


def test_check_reads_at_message_time(make_client: Callable[..., WorkerClient]) -> None:
    worker_client = make_client(now=lambda: 1000.25)
    reply = send_and_wait(worker_client, request("fine"))
    (reading,) = decode(run_answer(reply).past).values()
    assert (reading.time, reply.message_time) == (1000.25, 1000.25)
    worker_client.close(2.0)
    reply = send_and_wait(make_client(), request("fine"))
    (reading,) = decode(run_answer(reply).past).values()
    assert abs(reading.time - time.time()) < 60, "without a daemon's clock the worker uses its own"
    assert reply.message_time is None


OUTDATED_CHECK = """
    host.nvml_is_outdated = hasattr(sys, "healthd_old")
    sys.healthd_old = True
    yield Observation("answer", 42)
"""


@pytest.mark.parametrize("check", ["fine", "upgraded"])
def test_slow_worker_start_is_no_clock_step(
    make_client: Callable[..., WorkerClient], tmp_path: Path, check: str
) -> None:
    """Each start takes 5 s. The second answer of `upgraded` is refused, and a new worker repeats the run."""
    (tmp_path / "checks" / "upgraded.py").write_text(HEADER + OUTDATED_CHECK)
    clients: list[WorkerClient] = []

    def delayed(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + sum(5.0 * client_.started_total for client_ in clients)

    worker_client = make_client(delayed(time.monotonic), delayed(time.time))
    clients.append(worker_client)
    send_and_wait(worker_client, request(check, "nvml"))
    if check == "fine":
        worker_client.renew()
    started_at = time.time()
    reply = send_and_wait(worker_client, request(check, "nvml"))
    assert (worker_client.started_total, reply.outcome) == (2, Outcome.COMPLETED)
    assert abs(reply.clock_step) < 1.0
    assert reply.message_time is not None
    assert reply.message_time >= started_at + 10.0, "after the second start"
    assert reply.seconds < 9.0  # its clock is 10 s late


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_clock_step_during_run_is_returned_with_reply(
    make_client: Callable[..., WorkerClient], tmp_path: Path, step: float
) -> None:
    clock_steps: list[float] = []
    worker_client = make_client(now=lambda: 1000.25 + time.monotonic() + sum(clock_steps))
    assert worker_client.send(request("waits_for_file", name=str(tmp_path / "go"))) is None
    clock_steps.append(step)
    (tmp_path / "go").touch()
    while (reply := worker_client.step()) is None:
        wait(worker_client, 30.0)
    assert reply.outcome is Outcome.COMPLETED
    assert reply.clock_step == pytest.approx(step, abs=1.0)
    assert abs(send_and_wait(worker_client, request("fine")).clock_step) < 1.0, "no step during the next run"


# --- other requests


def test_save_copy_and_load_copy_restore_files(worker_client: WorkerClient, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{}")
    state, names = str(tmp_path / "state"), ("ledger.json", "past.json")
    save_reply = send_and_wait(worker_client, Request("state_dir", 10, SaveCopy(str(tmp_path), state, names)))
    assert save_reply.outcome is Outcome.COMPLETED
    load_reply = send_and_wait(worker_client, Request("state_dir", 10, LoadCopy(state, names)))
    assert isinstance(load_reply.answer, CopyAnswer)
    assert load_reply.answer.texts == {"ledger.json": "{}", "past.json": None}


def test_unwritable_state_dir_is_single_sentence(worker_client: WorkerClient, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{}")
    reply = send_and_wait(
        worker_client, Request("state_dir", 10, SaveCopy(str(tmp_path), "/proc/nowhere", ("ledger.json",)))
    )
    assert reply.outcome is Outcome.FAILED
    assert "/proc/nowhere" in reply.error


def test_write_file_is_done_by_worker(worker_client: WorkerClient, tmp_path: Path) -> None:
    path = tmp_path / "healthd.prom"
    reply = send_and_wait(worker_client, Request("textfile", 10, WriteFile(str(path), "up 1\n")))
    assert reply.outcome is Outcome.COMPLETED
    assert path.read_text() == "up 1\n"
    assert path.stat().st_mode & 0o777 == 0o644


def test_take_inventory_is_done_by_worker(make_client: Callable[..., WorkerClient], tmp_path: Path) -> None:
    worker_client = make_client(fake_nvml="dgx-h100", root=str(tmp_path))
    reply = send_and_wait(worker_client, Request("nvml", 60, TakeInventory(gpus=True)))
    assert isinstance(reply.answer, Inventory)
    assert len(reply.answer.gpus) == 8
    assert worker_client.nvml_open, "the caller must close it"


def test_response_has_message_number() -> None:
    worker = Worker(Setup(), Host("/"))
    line = worker.respond(values.encode(Message(7, CloseNvml())))
    response = values.decode(Response, line.partition(SEPARATOR)[0])
    assert (response.number, response.error, response.outdated) == (7, "", False)


def test_long_request_arrives_whole(worker_client: WorkerClient) -> None:
    reply = send_and_wait(worker_client, request("fine", name="x" * (2 << 20)))
    assert reply.outcome is Outcome.COMPLETED
