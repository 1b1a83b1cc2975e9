"""Tests of the process that samples counters, with a simulated clock and tree, and of the reader of its pipe."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest
from trees import write
from waiting import until

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from failslow.counters import bursts

from healthd.failslow.live.counters import Counts
from healthd.failslow.live.iterations import STRIDE
from healthd.failslow.live.job_gpus import RunningJobs, find_jobs
from healthd.failslow.live.sampler import Sampler
from healthd.failslow.live.sampling import (
    BUDGET_SECONDS,
    JOBS_SECONDS,
    MAX_SHARE,
    SETTLED_SECONDS,
    Budget,
    Reduction,
    Sampling,
    Setup,
    choose_reduction,
)
from healthd.host.host import Host
from healthd.nvidia.fake_nvml import open_fake

JOB = RunningJobs(frozenset({"4711"}), 17)
SECONDS = 0.5
COUNTERS = ("port_rcv_data", "port_xmit_data")


class SimulatedNode:
    """A simulated node with one port that counts by `rate`, one number per sample, and with its own clock."""

    def __init__(self, root: Path, setup: Setup | None = None, running_jobs: RunningJobs = JOB) -> None:
        self.root, self.running_jobs = root, running_jobs
        self.now, self.clock, self.cpu = 1000.0, 1.7e9, 0.0
        self.counted = 0
        self.cpu_each = 0.0
        self.files = [f"/sys/class/infiniband/mlx5_0/ports/1/counters/{name}" for name in COUNTERS]
        write(root, dict.fromkeys(self.files, "0\n"))
        self.lines: list[Mapping[str, Any]] = []
        host = Host(str(root))
        setup = setup or Setup(("ib",), SECONDS, str(root))
        self.sampling = Sampling(setup, host, self.lines.append, lambda previous: self.running_jobs, lambda: self.cpu)

    def run(self, rates: Iterable[float]) -> None:
        """Do one step per half second."""
        for rate in rates:
            self.counted += int(rate * 1e6)
            for file in self.files:
                (self.root / file.lstrip("/")).write_text(f"{self.counted}\n")
            self.pass_time(SECONDS)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / SECONDS)):
            self.now += SECONDS
            self.clock += SECONDS
            self.cpu += self.cpu_each
            while self.sampling.deadline <= self.now:
                self.sampling.step(self.now, self.clock)

    def values_of(self, key: str) -> list[Any]:
        return [line[key] for line in self.lines if key in line]


def simulated_rates(period_seconds: float, seconds: float, seed: int = 1) -> list[float]:
    return bursts(random.Random(seed), int(seconds / SECONDS), period_seconds / SECONDS, 0.3, 0.02)


def test_iterations_are_reported_with_job_and_time(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.run(simulated_rates(14, 600))
    samples = node.values_of("sample")
    assert len(samples) >= 5
    assert {(job, series) for job, series, _, _ in samples} == {("4711", "ib")}
    assert [seconds for *_, seconds in samples] == pytest.approx([14] * len(samples), rel=0.03)
    assert all(1.7e9 < moment <= node.clock for _, _, moment, _ in samples)
    assert node.values_of("steps")[0] == round(STRIDE * SECONDS / 14)
    assert node.values_of("problem") == []


def test_second_job_is_a_problem_and_stops_sampling(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path, running_jobs=RunningJobs(frozenset({"1", "2"})))
    node.run(simulated_rates(14, 400))
    assert node.values_of("sample") == []
    ((kind, sentence),) = node.values_of("problem")
    assert (kind, sentence.startswith("2 jobs ")) == ("jobs", True)
    node.running_jobs = JOB
    node.run(simulated_rates(14, 400))
    assert node.values_of("sample")
    assert node.values_of("problem")[-1] == ["jobs", ""]


def test_next_job_starts_without_old_samples(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.run(simulated_rates(14, 300))
    assert node.values_of("sample")
    node.lines.clear()
    node.running_jobs = RunningJobs(frozenset({"4712"}), 18)
    node.run(simulated_rates(21, 600, seed=2))
    jobs = {job for job, *_ in node.values_of("sample")}
    assert jobs == {"4712"}
    assert all(abs(seconds / 21 - 1) < 0.05 for *_, seconds in node.values_of("sample"))


def test_no_counter_is_open_without_job(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path, running_jobs=RunningJobs(frozenset()))
    node.run([1.0] * 200)
    assert count_open_counters(tmp_path) == 0
    node.now = node.sampling.deadline
    node.sampling.step(node.now, node.clock)
    assert node.sampling.deadline - node.now >= JOBS_SECONDS / 2


def count_open_counters(root: Path) -> int:
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith(f"{root}/sys/") for path in paths if os.path.lexists(path))


def test_sampling_starts_one_minute_after_job(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.run([1.0] * int((SETTLED_SECONDS - JOBS_SECONDS) / SECONDS))
    assert count_open_counters(tmp_path) == 0
    node.run([1.0] * int(2 * JOBS_SECONDS / SECONDS))
    assert count_open_counters(tmp_path) == 2
    node.sampling.close()
    assert count_open_counters(tmp_path) == 0


def test_clock_change_moves_times_only(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.run(simulated_rates(14, 300))
    node.clock -= 86400
    node.lines.clear()
    node.run(simulated_rates(14, 200, seed=3))
    assert [seconds for *_, seconds in node.values_of("sample")] == pytest.approx(
        [14] * len(node.values_of("sample")), rel=0.05
    )
    assert all(abs(moment - node.clock) < 300 for _, _, moment, _ in node.values_of("sample"))


def test_sleep_of_machine_restarts_search(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.run(simulated_rates(14, 300))
    node.now += 3600
    node.lines.clear()
    node.run(simulated_rates(14, 100))
    assert node.values_of("sample") == []
    node.run(simulated_rates(14, 300))
    assert node.values_of("sample")


def test_counter_reset_gives_no_iteration(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.run(simulated_rates(14, 300))
    node.counted = 0
    node.run(simulated_rates(14, 300, seed=2))
    assert [seconds for *_, seconds in node.values_of("sample")] == pytest.approx(
        [14] * len(node.values_of("sample")), rel=0.05
    )


def test_missing_ports_are_reported_once_and_searched_again(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    shutil.rmtree(tmp_path / "sys")
    node.pass_time(300)
    ((kind, sentence),) = node.values_of("problem")
    assert (kind, "InfiniBand" in sentence) == ("ib", True)
    write(tmp_path, dict.fromkeys(node.files, "0\n"))
    node.run(simulated_rates(14, 500))
    assert node.values_of("sample")
    assert node.values_of("problem")[-1] == ["ib", ""]


# --- the driver


class SimulatedGpus:
    """A source with a number of parts that records when it is open."""

    def __init__(self, parts: int = 8) -> None:
        self.parts, self.is_open, self.opened = parts, False, 0

    def open(self) -> str:
        self.is_open, self.opened = True, self.opened + 1
        return ""

    def read(self) -> Counts:
        assert self.is_open
        return {"nvlink": dict.fromkeys(map(str, range(self.parts)), 1)}

    def narrow(self) -> bool:
        if self.parts < 2:
            return False
        self.parts = (self.parts + 1) // 2
        return True

    def close(self) -> None:
        self.is_open = False


def node_with_gpus(root: Path, running_jobs: RunningJobs, gpus: SimulatedGpus) -> SimulatedNode:
    node = SimulatedNode(root, Setup(("nvlink",), SECONDS, str(root)), running_jobs)
    node.sampling._sources = {"nvml": gpus}
    node.sampling._gpus_at = float("inf")
    return node


def test_driver_is_open_only_while_job_uses_gpu(tmp_path: Path) -> None:
    gpus = SimulatedGpus()
    node = node_with_gpus(tmp_path, JOB._replace(gpu_process=0), gpus)
    node.run([1.0] * 400)
    assert gpus.opened == 0
    node.running_jobs = JOB
    node.run([1.0] * 100)
    assert gpus.is_open
    node.running_jobs = JOB._replace(gpu_process=0)
    node.run([1.0] * 40)
    assert not gpus.is_open
    node.running_jobs = JOB
    node.run([1.0] * 40)
    assert gpus.is_open
    node.running_jobs = RunningJobs(frozenset())
    node.run([1.0] * 40)
    assert not gpus.is_open
    assert gpus.opened == 2


def test_driver_mismatch_stops_process(
    tmp_path: Path,
) -> None:
    scenario = tmp_path / "gpus.toml"
    scenario.write_text('profile = "dgx-h100"\nlibrary = "mismatch"\n')
    lines: list[Mapping[str, Any]] = []
    host = Host(str(tmp_path), lambda: open_fake(str(scenario)))
    sampling = Sampling(Setup(("nvlink",), SECONDS, settled_seconds=0.0), host, lines.append, lambda previous: JOB)
    sampling.step(1.0, 1.7e9)
    assert sampling.stopped
    assert [line["problem"][0] for line in lines if "problem" in line] == ["nvml"]


# --- the cost limit


def test_too_expensive_sampling_reduces_gpus_then_rate_then_stops(tmp_path: Path) -> None:
    gpus = SimulatedGpus()
    node = node_with_gpus(tmp_path, JOB, gpus)
    node.cpu_each = 2 * MAX_SHARE * SECONDS
    reductions = []
    for _ in range(30):
        node.run([1.0] * int(BUDGET_SECONDS / SECONDS))
        reductions.append((gpus.parts, node.sampling.seconds))
        if node.sampling.stopped:
            break
    steps = list(dict.fromkeys(reductions))
    assert steps == [(8, 0.5), (4, 0.5), (2, 0.5), (1, 0.5), (1, 1.0), (1, 2.0), (1, 4.0)]
    assert node.sampling.stopped
    assert not gpus.is_open
    problems = node.values_of("problem")
    kind, sentence = problems[0]
    assert kind == "rate"
    assert re.findall(r"[\d.]+(?:%| s\b)", sentence) == ["0.20%", "0.1%", "1 s", "20 s"]
    assert problems[-2] == ["rate", ""]
    kind, sentence = problems[-1]
    assert kind == "cost"
    assert re.findall(r"[\d.]+(?:%| s\b)", sentence) == ["0.20%", "4 s", "0.1%"]


def test_sampling_within_limit_is_unchanged(tmp_path: Path) -> None:
    gpus = SimulatedGpus()
    node = node_with_gpus(tmp_path, JOB, gpus)
    node.cpu_each = 0.9 * MAX_SHARE * SECONDS
    node.run([1.0] * 2000)
    assert (gpus.parts, node.sampling.seconds) == (8, SECONDS)
    assert node.values_of("problem") == []
    assert node.values_of("share")[-1] == pytest.approx(0.9 * MAX_SHARE)


@pytest.mark.parametrize(
    ("seconds", "period", "can_narrow", "expected"),
    [
        (0.5, 20.0, True, Reduction.SLOWER),  # 20 samples of one second each still show the rhythm
        (0.5, 19.9, True, Reduction.FEWER),
        (0.5, None, True, Reduction.FEWER),
        (0.5, 10.0, False, Reduction.SLOWER),
        (2.5, None, False, Reduction.SLOWER),
        (2.6, None, False, Reduction.STOP),
        (2.6, 104.0, False, Reduction.SLOWER),
    ],
)
def test_choose_reduction_keeps_visible_rhythm(
    seconds: float, period: float | None, can_narrow: bool, expected: Reduction
) -> None:
    assert choose_reduction(seconds, period, can_narrow) is expected


def test_budget_share_covers_one_minute() -> None:
    budget = Budget((10.0, 1.0))
    assert budget.share(10.0 + BUDGET_SECONDS - 1, 5.0) is None
    assert budget.share(10.0 + BUDGET_SECONDS, 1.6) == pytest.approx(0.01)
    assert budget.share(10.0 + 2 * BUDGET_SECONDS, 1.6) == 0


# --- jobs of the node


def put_in_job(root: Path, job: int, *pids: int, gpus: Mapping[int, str] | None = None) -> None:
    path = f"/sys/fs/cgroup/system.slice/slurmstepd.scope/job_{job}/step_0/cgroup.procs"
    write(root, {path: "".join(f"{pid}\n" for pid in pids)})
    for pid in pids:
        folder = root / f"proc/{pid}/fd"
        folder.mkdir(parents=True)
        (folder / "1").symlink_to((gpus or {}).get(pid, "/dev/null"))


def test_find_jobs_returns_jobs_and_gpu_process(tmp_path: Path) -> None:
    no_jobs = RunningJobs(frozenset())
    assert find_jobs(str(tmp_path), True, no_jobs) == no_jobs
    put_in_job(tmp_path, 4711, 10, 11, 12, gpus={11: "/dev/nvidia3"})
    assert find_jobs(str(tmp_path), False, no_jobs) == RunningJobs(frozenset({"4711"}))
    assert find_jobs(str(tmp_path), True, no_jobs) == RunningJobs(frozenset({"4711"}), 11)
    assert find_jobs(str(tmp_path), True, RunningJobs(frozenset({"4711"}), 11)) == RunningJobs(frozenset({"4711"}), 11)
    (tmp_path / "proc/11/fd/1").unlink()
    assert find_jobs(str(tmp_path), True, RunningJobs(frozenset({"4711"}), 11)) == RunningJobs(frozenset({"4711"}))
    put_in_job(tmp_path, 4712, 20)
    assert find_jobs(str(tmp_path), True, no_jobs) == RunningJobs(frozenset({"4711", "4712"}))


# --- the reader


def script_command(tmp_path: Path, program: str) -> tuple[str, ...]:
    path = tmp_path / "stand_in.py"
    path.write_text(program)
    return (sys.executable, str(path))


def step_until(sampler: Sampler, now: float, is_done: Callable[[], object]) -> list[Any]:
    """Step until it is done, and return the results of all steps."""
    found: list[Any] = []

    def advance() -> object:
        found.extend(sampler.step(now))
        return is_done()

    until(advance)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_of(sampler: Sampler) -> int:
    assert sampler._process is not None
    return sampler._process.pid


def test_sampling_process_reports_job_and_ends_with_its_reader(tmp_path: Path) -> None:
    put_in_job(tmp_path, 4711, 10, gpus={10: "/dev/nvidia3"})
    sampler = Sampler(Setup(("ib", "power"), 1.0, str(tmp_path), "dgx-h100", str(tmp_path / "lock"), 0.0))
    step_until(sampler, 0.0, lambda: sampler.gpus and sampler.problems)
    assert sampler.job == "4711"
    assert len(sampler.gpus) == 8
    without_port, without_counter = sorted(sampler.problems)
    assert without_port.startswith("ib: ")
    assert without_counter.startswith("nvml: ")
    assert without_counter.endswith(" power")
    pid = pid_of(sampler)
    assert is_alive(pid)
    second = Sampler(Setup(("ib",), 1.0, str(tmp_path), lock=str(tmp_path / "lock")))
    step_until(second, 0.0, lambda: second.problems)
    (problem,) = second.problems
    assert "earlier sampling process" in problem
    sampler.close()
    step_until(second, 0.0, lambda: not second.problems and second.job)
    second.close()
    until(lambda: not is_alive(pid))


def test_valid_samples_are_read_and_other_lines_ignored(tmp_path: Path) -> None:
    lines = [
        {"sample": ["4711", "ib", 1.7e9, 2.5], "steps": 16, "parts": 2},
        {"sample": ["4711"]},
        {"sample": ["4711", "ib", "then", 2.5], "steps": 16},
        {"gpus": 5},
        {"problem": "x"},
        [],
        {"sample": ["4711", "ib", 1.7e9 + 1, 2.6], "steps": 15, "parts": 2},
        {"share": 0.0004, "seconds": 0.5},
    ]
    text = "no json\n" + "".join(json.dumps(line) + "\n" for line in lines) + '{"sample": ["cut'
    program = f"import sys\nsys.stdout.write({text!r})\nsys.stdout.flush()\nsys.stdin.read()\n"
    sampler = Sampler(Setup(("ib",), 0.5), script_command(tmp_path, program))
    found = step_until(sampler, 0.0, lambda: sampler.share)
    assert [(sample.job, sample.series, sample.value, sample.steps) for sample in found] == [
        ("4711", "ib", 2.5, 16),
        ("4711", "ib", 2.6, 15),
    ]
    sampler.close()


def test_ended_process_is_restarted_with_growing_delay(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\n"
    sampler = Sampler(Setup(("ib",), 0.5), script_command(tmp_path, program))
    starts, now = tmp_path / "starts", 0.0
    delays = []
    for _ in range(4):
        before = len(starts.read_text()) if starts.exists() else 0
        step_until(sampler, now, lambda: sampler._process is None and sampler._hung is None)
        assert len(starts.read_text()) == before + 1
        (problem,) = sampler.problems
        assert "restarted" in problem
        delays.append(sampler._restart_at - now)
        now = sampler._restart_at
        assert list(sampler.step(now - 1)) == []
        assert sampler._process is None
    assert delays == [60, 120, 240, 480]
    sampler.close()


def test_process_stopped_for_cost_stays_off(tmp_path: Path) -> None:
    problem = "sampling is off: it took 1% of a core"
    line = json.dumps({"problem": ["cost", problem]})
    sampler = Sampler(Setup(("ib",), 0.5), script_command(tmp_path, f"print({line!r})\n"))
    step_until(sampler, 0.0, lambda: sampler._process is None and sampler._hung is None)
    assert sampler.problems == (problem,)
    assert list(sampler.step(1e9)) == []
    assert sampler._process is None


def test_hanging_process_is_not_killed_and_blocks_restart(tmp_path: Path) -> None:
    program = 'import time\nprint(\'{"job": "4711"}\', flush=True)\ntime.sleep(600)\n'
    sampler = Sampler(Setup(("nvlink",), 0.5), script_command(tmp_path, program))
    step_until(sampler, 0.0, lambda: sampler.job)
    pid = pid_of(sampler)
    assert list(sampler.step(1e6)) == []
    assert is_alive(pid)
    assert sampler.job == ""
    (problem,) = sampler.problems
    assert "may hang" in problem
    assert list(sampler.step(2e6)) == []
    assert sampler._process is None
    os.kill(pid, 9)  # the call returned
    now = time.monotonic() + 3e6
    step_until(sampler, now, lambda: sampler._process is not None)
    assert pid_of(sampler) != pid
    os.kill(pid_of(sampler), 9)
    sampler.close()


def take_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_live_process_samples_and_ends_sampling_process(tmp_path: Path) -> None:
    put_in_job(tmp_path, 1, 10)
    put_in_job(tmp_path, 2, 20)
    run = tmp_path / "run"
    run.mkdir()
    own_end, process_end = socket.socketpair()
    locations = {"runtime_dir": str(run), "root": str(tmp_path), "fake_nvml": ""}
    setup = json.dumps({"locations": locations, "settings": {"sample": ["ib"], "sample_seconds": 0.5}})
    command = [sys.executable, "-m", "healthd.failslow.live", str(process_end.fileno()), setup]
    with own_end, process_end:
        live = subprocess.Popen(command, pass_fds=[process_end.fileno()])
        process_end.close()
        document = run / "failslow.json"
        until(lambda: document.exists() and json.loads(document.read_text())["problems"])
        (problem,) = json.loads(document.read_text())["problems"]
        assert problem.startswith("2 jobs ")
        with open(run / "sampling.lock") as lock:
            assert not take_lock(lock)
            own_end.close()
            assert live.wait(240) == 0
            until(lambda: take_lock(lock), "the sampling process ends too")
