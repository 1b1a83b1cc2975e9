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
def runners(checks_dir: str, tmp_path: Path) -> Iterator[Callable[..., WorkerClient]]:
    made: list[WorkerClient] = []

    def make(
        monotonic: Callable[[], float] = time.monotonic, now: Callable[[], float] | None = None, **setup: str
    ) -> WorkerClient:
        made.append(WorkerClient(Setup(checks_dir=checks_dir, **setup), str(tmp_path), monotonic, now))
        made[-1].adopt_lost()
        return made[-1]

    yield make
    for runner in made:
        lost = list(runner.quarantined.values())
        runner.close(2.0)
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def runner(runners: Callable[..., WorkerClient]) -> WorkerClient:
    return runners()


def request(check: str, resource: str = "", timeout_seconds: float = 120.0, **config: object) -> Request:
    return Request(resource or check, timeout_seconds, Run(check, "", config, boot_id="b"))


def wait(runner: WorkerClient, seconds: float) -> None:
    """Wait as the daemon does."""
    poll = select.poll()
    for descriptor, writes in runner.waits():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
    poll.poll(max(0.0, min(seconds, runner.deadline - time.monotonic())) * 1000 + 1)


def ask(runner: WorkerClient, what: Request) -> Reply:
    return runner.send(what) or answered(runner)


def answered(runner: WorkerClient) -> Reply:
    """Return the reply to the request in flight."""
    while (reply := runner.step()) is None:
        wait(runner, 30.0)
    return reply


def until(runner: WorkerClient, reached: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "timed out"
        wait(runner, 0.1)
        assert runner.step() is None


def answer_of(reply: Reply) -> RunAnswer:
    assert isinstance(reply.answer, RunAnswer)
    return reply.answer


def worker_pid(runner: WorkerClient) -> int:
    """Return the pid of the worker with the current or the last request."""
    return runner._worker.process.pid  # type: ignore[union-attr]


def signals_pending(pid: int) -> int:
    """Return the pending signals of a process and of its main thread as a mask."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)


def test_a_check_that_completes_gives_what_it_found(runner: WorkerClient) -> None:
    reply = ask(runner, request("fine"))
    assert (reply.outcome, reply.error) == (Outcome.COMPLETED, "")
    assert answer_of(reply).observations == (Observation("answer", 42.0),)


def test_run_answer_has_plain_numbers(runner: WorkerClient) -> None:
    reply = ask(runner, request("gives_a_derived_number"))
    assert answer_of(reply).observations == (Observation("answer", 42.0),)


def test_run_answer_keeps_a_path_that_is_not_utf8(runner: WorkerClient) -> None:
    (finding,) = answer_of(ask(runner, request("gives_a_path"))).findings
    assert os.fsencode(finding.subject) == b"/data/\xff"


def test_a_check_that_raises_fails_with_one_sentence_and_keeps_what_it_gave(runner: WorkerClient) -> None:
    reply = ask(runner, request("raises"))
    assert (reply.outcome, reply.error) == (Outcome.FAILED, "no way")
    assert answer_of(reply).observations == (Observation("answer", 42.0),)


MISBEHAVES = (
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
ENDS_THE_WORKER = ("exits", "crashes", "faults", "babbles", "pretends", "floods")


@pytest.mark.parametrize(
    ("check", "error", "resource"),
    [
        *((check, error, "") for check, error in MISBEHAVES),
        *((check, error, "nvml") for check, error in MISBEHAVES if check in ENDS_THE_WORKER),
    ],
)
def test_a_check_that_misbehaves_fails_and_the_next_one_runs_at_once(
    runner: WorkerClient, monkeypatch: pytest.MonkeyPatch, check: str, error: str, resource: str
) -> None:
    monkeypatch.setattr(work_runner, "EXIT_WAIT_SECONDS", 60.0)  # on a busy machine the exit status comes late
    reply = ask(runner, request(check, resource))
    assert (reply.outcome, reply.error) == (Outcome.FAILED, error)
    until(runner, lambda: not runner.quarantined)  # a worker that may be in NVML is not killed, but ends by itself
    assert ask(runner, request("fine", resource)).outcome is Outcome.COMPLETED
    assert runner.quarantined == {}


def test_what_a_worker_says_unasked_is_not_the_answer_of_the_next_check(runner: WorkerClient, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    assert ask(runner, request("talks_later", name=str(go_on))).outcome is Outcome.COMPLETED
    babbler = worker_pid(runner)
    go_on.touch()
    assert runner.answers_within(60)
    assert ask(runner, request("fine")).outcome is Outcome.COMPLETED
    assert worker_pid(runner) != babbler


def test_what_a_check_prints_or_reads_harms_nobody(runner: WorkerClient) -> None:
    assert answer_of(ask(runner, request("prints"))).observations == (Observation("answer", 42.0),)
    assert ask(runner, request("reads")).outcome is Outcome.COMPLETED


def test_one_worker_serves_all_checks_that_behave(runner: WorkerClient) -> None:
    for _ in range(5):
        ask(runner, request("fine"))
    assert runner.started_total == 1


def test_a_worker_that_was_killed_between_rounds_is_replaced_unseen(runner: WorkerClient) -> None:
    ask(runner, request("fine"))
    os.kill(worker_pid(runner), signal.SIGKILL)
    os.waitid(os.P_PID, worker_pid(runner), os.WEXITED | os.WNOWAIT)
    assert ask(runner, request("fine")).outcome is Outcome.COMPLETED
    assert runner.started_total == 2


def test_a_worker_that_is_killed_at_work_fails_that_check_only(
    runner: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_runner, "EXIT_WAIT_SECONDS", 60.0)  # on a busy machine the exit status comes late
    assert runner.send(request("hangs")) is None
    os.kill(worker_pid(runner), signal.SIGKILL)
    reply = answered(runner)
    assert (reply.outcome, reply.error) == (Outcome.FAILED, "the worker died (signal 9)")
    assert ask(runner, request("fine")).outcome is Outcome.COMPLETED


def test_a_worker_that_hangs_up_is_killed(runner: WorkerClient) -> None:
    assert ask(runner, request("hangs_up")).outcome is Outcome.FAILED
    assert runner.quarantined == {}


def test_an_unknown_check_is_one_sentence(runner: WorkerClient) -> None:
    assert ask(runner, request("nothing")).error == "KeyError: 'nothing'"


# --- overdue


def test_an_overdue_worker_outside_the_driver_is_killed_and_replaced(
    runner: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_runner, "EXIT_WAIT_SECONDS", 60.0)  # on a busy machine the exit status comes late
    runner.send(request("hangs", timeout_seconds=0.5))
    hung = worker_pid(runner)
    reply = answered(runner)
    assert (reply.outcome, reply.error) == (Outcome.TIMED_OUT, "no answer within 0.5 s")
    assert start_time(hung) is None
    assert runner.quarantined == {}
    assert ask(runner, request("hangs", timeout_seconds=0.5)).outcome is Outcome.TIMED_OUT
    assert ask(runner, request("fine")).outcome is Outcome.COMPLETED


def test_an_overdue_worker_in_the_driver_is_left_alone_and_bars_only_the_driver(
    runner: WorkerClient, tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    runner.send(request("waits_for_file", "nvml", timeout_seconds=0.5, name=str(go_on)))
    hung = worker_pid(runner)
    reply = answered(runner)
    assert reply.outcome is Outcome.TIMED_OUT
    assert runner.abandoned_total == 1
    assert runner.quarantined == {"nvml": hung}
    assert signals_pending(hung) == 0
    assert start_time(hung) is not None

    stuck = ask(runner, request("fine", "nvml"))
    assert (stuck.outcome, stuck.error) == (Outcome.STUCK, f"worker {hung} still hangs in nvml")
    assert not runner.nvml_open
    assert ask(runner, request("fine")).outcome is Outcome.COMPLETED

    go_on.touch()
    until(runner, lambda: not runner.quarantined)
    assert start_time(hung) is None
    assert ask(runner, request("fine", "nvml")).outcome is Outcome.COMPLETED


def test_an_inventory_that_hangs_in_the_driver_is_not_killed_either(
    runners: Callable[..., WorkerClient], tmp_path: Path
) -> None:
    scenario = tmp_path / "hangs.toml"
    scenario.write_text('profile = "dgx-h100"\nhang = "nvmlInit"\nhang_seconds = 20\n')
    runner = runners(fake_nvml=str(scenario))
    runner.send(Request("nvml", 5.0, TakeInventory(gpus=True)))
    hung = worker_pid(runner)
    reply = answered(runner)
    assert reply.outcome is Outcome.TIMED_OUT
    assert runner.quarantined == {"nvml": hung}
    assert signals_pending(hung) == 0
    until(runner, lambda: not runner.quarantined)


def test_abandoned_worker_ends_before_its_next_nvml_call(runners: Callable[..., WorkerClient], tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    runner = runners(fake_nvml="dgx-h100")
    runner.send(request("calls_nvml_twice", "nvml", timeout_seconds=0.5, name=str(go_on)))
    hung = worker_pid(runner)
    assert answered(runner).outcome is Outcome.TIMED_OUT
    assert runner.quarantined == {"nvml": hung}
    go_on.touch()
    until(runner, lambda: not runner.quarantined)
    assert start_time(hung) is None
    assert not (tmp_path / "go-on.called").exists()


def test_runner_replaces_a_fifo_in_the_place_of_its_workers_file(
    runners: Callable[..., WorkerClient], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / WORKERS_FILE)
    assert ask(runners(), request("fine")).outcome is Outcome.COMPLETED
    assert (tmp_path / WORKERS_FILE).is_file()


def test_a_worker_without_a_pidfd_is_lost_all_the_same(
    runners: Callable[..., WorkerClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no descriptor when it is abandoned. Its resource stays quarantined until it ends."""
    go_on = tmp_path / "go-on"
    runner = runners()
    runner.send(request("waits_for_file", "nvml", timeout_seconds=0.5, name=str(go_on)))
    hung = worker_pid(runner)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", no_descriptor)
        answered(runner)
    assert runner.quarantined == {"nvml": hung}
    go_on.touch()
    end = time.monotonic() + 120
    while runner.quarantined and time.monotonic() < end:
        time.sleep(0.05)
        runner.step()
    assert runner.quarantined == {}


def no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_lost_worker_is_known_to_the_next_daemon(runners: Callable[..., WorkerClient], tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    first = runners()
    first.send(request("waits_for_file", "nvml", timeout_seconds=0.5, name=str(go_on)))
    hung = worker_pid(first)
    answered(first)

    second = runners()
    assert second.quarantined == {"nvml": hung}
    assert ask(second, request("fine", "nvml")).outcome is Outcome.STUCK
    assert signals_pending(hung) == 0
    go_on.touch()
    until(second, lambda: not second.quarantined)
    assert ask(second, request("fine", "nvml")).outcome is Outcome.COMPLETED


def test_a_worker_at_work_is_known_to_the_daemon_after_a_kill(
    runners: Callable[..., WorkerClient], tmp_path: Path
) -> None:
    """The first daemon has no chance to save anything."""
    go_on = tmp_path / "go-on"
    first = runners()
    first.send(request("waits_for_file", "nvml", name=str(go_on)))
    second = runners()
    assert second.quarantined == {"nvml": worker_pid(first)}
    go_on.touch()


def test_a_pid_that_another_process_has_now_bars_nothing(runners: Callable[..., WorkerClient], tmp_path: Path) -> None:
    other = Identity(os.getpid(), start_time(os.getpid()) + 1, "nvml")  # type: ignore[operator]
    (tmp_path / WORKERS_FILE).write_text(json.dumps([dump(other)]))
    assert runners().quarantined == {}


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"pid": "1"}]', "null", "\0\0"])
def test_a_list_of_workers_that_was_cut_off_bars_nothing(
    runners: Callable[..., WorkerClient], tmp_path: Path, text: str
) -> None:
    (tmp_path / WORKERS_FILE).write_text(text)
    assert runners().quarantined == {}


# --- close


def test_closing_ends_an_idle_worker(runner: WorkerClient) -> None:
    ask(runner, request("fine"))
    pid = worker_pid(runner)
    runner.close(120.0)
    assert start_time(pid) is None


def test_closing_leaves_a_busy_worker_in_time_and_unharmed(runner: WorkerClient, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    runner.send(request("waits_for_file", "nvml", name=str(go_on)))
    pid = worker_pid(runner)
    began = time.monotonic()
    runner.close(0.2)
    assert time.monotonic() - began < 60
    assert signals_pending(pid) == 0
    known = json.loads((tmp_path / WORKERS_FILE).read_text())
    assert [(worker["pid"], worker["resource"]) for worker in known] == [(pid, "nvml")]
    go_on.touch()
    assert os.waitpid(pid, 0)[1] == 0, "it ends by itself, without an error"


def test_where_no_worker_can_be_started_every_request_fails_and_the_driver_is_not_held(
    runner: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    reply = ask(runner, request("fine", "nvml"))
    assert reply.outcome is Outcome.FAILED
    assert reply.error.startswith("no worker could be started: ")
    assert not runner.nvml_open


# --- NVML


def test_the_driver_is_held_from_the_first_gpu_check_until_it_is_closed(runners: Callable[..., WorkerClient]) -> None:
    runner = runners(fake_nvml="dgx-h100")
    ask(runner, request("fine"))
    assert not runner.nvml_open
    assert ask(runner, request("gpu_count", "nvml")).outcome is Outcome.COMPLETED
    assert runner.nvml_open
    assert ask(runner, Request("nvml", 60, CloseNvml())).outcome is Outcome.COMPLETED
    assert not runner.nvml_open
    assert runner.started_total == 1


def test_a_driver_that_cannot_be_closed_is_let_go_with_its_worker(runner: WorkerClient) -> None:
    ask(runner, request("unclosable", "nvml"))
    reply = ask(runner, Request("nvml", 60, CloseNvml()))
    assert (reply.outcome, reply.error) == (Outcome.FAILED, "nvmlShutdown failed")
    assert not runner.nvml_open
    assert runner.quarantined == {}
    assert ask(runner, request("fine")).outcome is Outcome.COMPLETED
    assert runner.started_total == 2


@pytest.fixture
def upgraded(runners: Callable[..., WorkerClient], tmp_path: Path) -> tuple[WorkerClient, Path]:
    """Return a client whose worker has loaded NVML, after which the driver was replaced by another version."""
    scenario = tmp_path / "upgrade.toml"
    scenario.write_text('profile = "dgx-h100"\n')
    runner = runners(fake_nvml=str(scenario))
    ask(runner, request("gpu_access", "nvml"))
    ask(runner, Request("nvml", 60, CloseNvml()))
    scenario.write_text('profile = "dgx-h100"\nlibrary = "mismatch"\n')
    return runner, scenario


def test_a_mismatch_is_believed_only_of_a_fresh_worker(upgraded: tuple[WorkerClient, Path]) -> None:
    runner, _scenario = upgraded
    reply = ask(runner, request("gpu_access", "nvml"))
    assert [finding.code for finding in answer_of(reply).findings] == ["gpu_access/driver_mismatch"]
    assert runner.started_total == 2


def test_a_worker_that_saw_a_mismatch_is_believed_for_that_round_and_not_asked_again_later(
    upgraded: tuple[WorkerClient, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, scenario = upgraded
    ask(runner, request("gpu_access", "nvml"))
    ask(runner, request("gpu_count", "nvml"))
    assert not runner.nvml_open
    assert runner.started_total == 2
    scenario.write_text('profile = "dgx-h100"\n')
    monkeypatch.setattr(runner, "_monotonic", lambda: time.monotonic() + 300.0)
    assert answer_of(ask(runner, request("gpu_access", "nvml"))).findings == ()
    assert runner.started_total == 3


def test_an_upgrade_of_the_driver_under_a_worker_is_no_fault(
    runners: Callable[..., WorkerClient], tmp_path: Path
) -> None:
    """The old library stays loaded in the old process, so only that process sees a mismatch."""
    marker = tmp_path / "checks" / "upgraded.py"
    marker.write_text(
        f"{HEADER}"
        "    host.nvml_is_outdated = hasattr(sys, 'healthd_old')\n"
        "    if host.nvml_is_outdated:\n"
        "        yield Finding(Severity.DEGRADED, 'upgraded/mismatch', '', 'm')\n"
        "    sys.healthd_old = True\n"
    )
    runner = runners()
    assert answer_of(ask(runner, request("upgraded", "nvml"))).findings == ()
    assert answer_of(ask(runner, request("upgraded", "nvml"))).findings == ()
    assert runner.started_total == 2


def test_a_check_looks_at_the_moment_that_the_daemon_names(runners: Callable[..., WorkerClient]) -> None:
    runner = runners(now=lambda: 1000.25)
    reply = ask(runner, request("fine"))
    (reading,) = decode(answer_of(reply).past).values()
    assert (reading.time, reply.message_time) == (1000.25, 1000.25)
    runner.close(2.0)
    reply = ask(runners(), request("fine"))
    (reading,) = decode(answer_of(reply).past).values()
    assert abs(reading.time - time.time()) < 60, "without a daemon's clock the worker uses its own"
    assert reply.message_time is None


UPGRADED = """
    host.nvml_is_outdated = hasattr(sys, "healthd_old")
    sys.healthd_old = True
    yield Observation("answer", 42)
"""


@pytest.mark.parametrize("check", ["fine", "upgraded"])
def test_however_long_a_worker_takes_to_start_no_clock_was_set(
    runners: Callable[..., WorkerClient], tmp_path: Path, check: str
) -> None:
    """Each start takes 5 s. The second answer of `upgraded` is refused, and a new worker repeats the run."""
    (tmp_path / "checks" / "upgraded.py").write_text(HEADER + UPGRADED)
    made: list[WorkerClient] = []

    def late(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + sum(5.0 * one.started_total for one in made)

    runner = runners(late(time.monotonic), late(time.time))
    made.append(runner)
    ask(runner, request(check, "nvml"))
    if check == "fine":
        runner.renew()
    before = time.time()
    reply = ask(runner, request(check, "nvml"))
    assert (runner.started_total, reply.outcome) == (2, Outcome.COMPLETED)
    assert abs(reply.clock_step) < 1.0
    assert reply.message_time is not None
    assert reply.message_time >= before + 10.0, "after the second start"
    assert reply.seconds < 9.0  # its clock is 10 s late


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_is_set_while_a_check_runs_is_told_with_its_answer(
    runners: Callable[..., WorkerClient], tmp_path: Path, step: float
) -> None:
    steps: list[float] = []
    runner = runners(now=lambda: 1000.25 + time.monotonic() + sum(steps))
    assert runner.send(request("waits_for_file", name=str(tmp_path / "go"))) is None
    steps.append(step)
    (tmp_path / "go").touch()
    while (reply := runner.step()) is None:
        wait(runner, 30.0)
    assert reply.outcome is Outcome.COMPLETED
    assert reply.clock_step == pytest.approx(step, abs=1.0)
    assert abs(ask(runner, request("fine")).clock_step) < 1.0, "no step during the next run"


# --- other requests


def test_files_go_to_the_state_directory_and_come_back(runner: WorkerClient, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{}")
    state, names = str(tmp_path / "state"), ("ledger.json", "past.json")
    saved = ask(runner, Request("state_dir", 10, SaveCopy(str(tmp_path), state, names)))
    assert saved.outcome is Outcome.COMPLETED
    loaded = ask(runner, Request("state_dir", 10, LoadCopy(state, names)))
    assert isinstance(loaded.answer, CopyAnswer)
    assert loaded.answer.texts == {"ledger.json": "{}", "past.json": None}


def test_a_state_directory_that_cannot_be_written_is_one_sentence(runner: WorkerClient, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{}")
    reply = ask(runner, Request("state_dir", 10, SaveCopy(str(tmp_path), "/proc/nowhere", ("ledger.json",))))
    assert reply.outcome is Outcome.FAILED
    assert "/proc/nowhere" in reply.error


def test_a_file_for_others_is_written_by_the_worker(runner: WorkerClient, tmp_path: Path) -> None:
    path = tmp_path / "healthd.prom"
    reply = ask(runner, Request("textfile", 10, WriteFile(str(path), "up 1\n")))
    assert reply.outcome is Outcome.COMPLETED
    assert path.read_text() == "up 1\n"
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_inventory_comes_from_the_worker(runners: Callable[..., WorkerClient], tmp_path: Path) -> None:
    runner = runners(fake_nvml="dgx-h100", root=str(tmp_path))
    reply = ask(runner, Request("nvml", 60, TakeInventory(gpus=True)))
    assert isinstance(reply.answer, Inventory)
    assert len(reply.answer.gpus) == 8
    assert runner.nvml_open, "the caller must close it"


def test_an_answer_carries_the_number_of_its_request() -> None:
    worker = Worker(Setup(), Host("/"))
    line = worker.respond(values.encode(Message(7, CloseNvml())))
    response = values.decode(Response, line.partition(SEPARATOR)[0])
    assert (response.number, response.error, response.outdated) == (7, "", False)


def test_a_request_longer_than_the_socket_takes_at_once_arrives_whole(runner: WorkerClient) -> None:
    reply = ask(runner, request("fine", name="x" * (2 << 20)))
    assert reply.outcome is Outcome.COMPLETED
