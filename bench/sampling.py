"""Measure cost and accuracy of sampling a node's counters: `PYTHONPATH=. python bench/sampling.py`.

The cost is the CPU time of this process for one sample of each source. It is measured on generated trees (tmpfs,
/dev/shm) and a compiled stub of NVML (tests/support/stub_nvml.c), so it includes Python, ctypes and the kernel, but no
driver and no adapter firmware. If the machine has InfiniBand ports, these are read too.

The accuracy is measured with generated rates that have a known period (bench/failslow/counters.py), at several
thresholds, and then with whole jobs up to the alarm. docs/fail-slow-counters.md has the tables. The thresholds were
chosen on seeds below 100.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests/support"), str(REPOSITORY / "bench")]

import node_tree  # noqa: E402
import stub_nvml  # noqa: E402
from failslow.counters import MAKERS, bursts, noisy  # noqa: E402

from healthd.failslow.live import iterations as rule  # noqa: E402
from healthd.failslow.live.counters import GpuCounters, IbPorts  # noqa: E402
from healthd.failslow.live.iterations import Iterations  # noqa: E402
from healthd.failslow.live.job_gpus import RunningJobs, find_jobs  # noqa: E402
from healthd.failslow.live.node import read_node  # noqa: E402
from healthd.failslow.live.series import Series  # noqa: E402
from healthd.failslow.model import Kind  # noqa: E402
from healthd.host.host import Host  # noqa: E402
from healthd.nvidia.fake_nvml import open_fake  # noqa: E402

SEED = 101
NOISES = (0.05, 0.2, 0.4)
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)
MAX_PERIOD_ERROR = 0.08  # a period within this relative error is right
PERCENT = 20.0  # [checks.failslow] counters_percent
HALF_ITERATIONS = 300  # iterations
STUB = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from sampling import cost_of
from healthd.host.host import Host
from healthd.failslow.live.counters import GpuCounters
source = GpuCounters(Host("/nonexistent"), ("nvlink", "pcie", "power"))
source.open()
print(json.dumps([len(source.read()["nvlink"]), cost_of(source.read)]))
"""


def call_cost(function: Callable[[], object], times: int = 300) -> float:
    """Return the CPU seconds of one call, as the minimum of five means."""
    means = []
    for _ in range(5):
        before = time.process_time()
        for _ in range(times // 5):
            function()
        means.append((time.process_time() - before) / (times // 5))
    return min(means)


def costs(folder: Path) -> list[tuple[str, float]]:
    rows = []
    for ports in (1, 8):
        root = folder / f"ports{ports}"
        for port in range(ports):
            counters = root / f"sys/class/infiniband/mlx5_{port}/ports/1/counters"
            counters.mkdir(parents=True)
            for name in ("port_rcv_data", "port_xmit_data"):
                (counters / name).write_text("123456789012345\n")
        source = IbPorts(Host(str(root)))
        source.open()
        rows.append((f"ib: {ports} fake ports", call_cost(source.read)))
        source.close()
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        source = IbPorts(Host())
        source.open()
        rows.append((f"ib: {len(source.read()['ib'])} ports of this machine", call_cost(source.read)))
    scenario = folder / "gpus.toml"
    scenario.write_text('profile = "dgx-h100"\n' + "".join(f"gpu.{n}.iteration_seconds = 2.0\n" for n in range(8)))
    gpus = GpuCounters(Host(str(folder), lambda: open_fake(str(scenario))), ("nvlink", "pcie", "power"))
    gpus.open()
    rows.append(("nvlink, pcie and power: 8 fake GPUs", call_cost(gpus.read)))
    for count in (1, 8):
        environment = stub_nvml.environment(folder, STUB_GPUS=str(count))
        done = subprocess.run(
            [sys.executable, "-c", STUB, str(REPOSITORY / "bench")], env=environment, stdout=subprocess.PIPE, check=True
        )
        found, seconds = json.loads(done.stdout)
        rows.append((f"nvlink, pcie and power: {found} GPUs, through pynvml and a stub", seconds))
    iterations, rates = (
        Iterations(0.1),
        iter(noisy(random.Random(1), bursts(random.Random(1), 6001, 25, 0.3, 0.02), 0.1)),
    )
    state = [0.0, 0.0]

    def add() -> None:
        state[0], state[1] = state[0] + 0.1, state[1] + next(rates)
        list(iterations.add(*state))

    rows.append(("rhythm search of one source", call_cost(add, 6000)))
    tree = folder / "node"
    node_tree.build(tree)
    job = tree / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0"
    job.mkdir(parents=True)
    (job / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in range(2000, 2200)))
    host = Host(str(tree))
    running = find_jobs(str(tree), False, RunningJobs(frozenset()))
    rows.append(("finding the job (every 10 s)", call_cost(lambda: find_jobs(str(tree), False, running))))
    rows.append(("reading the node's evidence (every 60 s)", call_cost(lambda: read_node(host, {}), 25)))
    return rows


def windows(seed: int, repeats: int) -> None:
    print(f"{'threshold':>10} {'noise':>6} {'false rhythms':>18} {'training, found':>16} {'wrong period':>13}")
    default_threshold = rule.THRESHOLD
    kinds: dict[str, Counter[str]] = {}
    for threshold in THRESHOLDS:
        rule.THRESHOLD = threshold
        for noise in NOISES:
            rng, outcomes = random.Random(seed), Counter[str]()
            for _ in range(repeats):
                for maker, make in MAKERS.items():
                    for signal in make(rng, rule.WINDOW, noise):
                        found = rule.find_rhythm(signal.rate)
                        is_right = (
                            found is not None
                            and signal.period
                            and abs(found.period / signal.period - 1) < MAX_PERIOD_ERROR
                        )
                        verdict = "none" if found is None else "right" if is_right else "wrong"
                        outcomes[maker] += 1
                        outcomes[f"{maker} {verdict}"] += 1
                        if threshold == default_threshold:
                            kinds.setdefault(signal.kind, Counter())[f"{noise} {verdict}"] += 1
            print(
                f"{threshold:10} {noise:6} {outcomes['no training wrong']:9} of {outcomes['no training']:5}"
                f" {outcomes['training right'] / outcomes['training']:15.1%}"
                f" {outcomes['training wrong']:6} of {outcomes['training']:5}"
            )
    rule.THRESHOLD = default_threshold
    print(f"\nby kind, at {default_threshold}: found at noise {', '.join(map(str, NOISES))}; wrong or false")
    for kind, outcomes in kinds.items():
        shares = [outcomes[f"{noise} right"] / repeats for noise in NOISES]
        wrong_count = sum(outcomes[f"{noise} wrong"] for noise in NOISES)
        print(
            f"  {kind:34} {'  '.join(f'{share:6.1%}' for share in shares)}   {wrong_count:4} of {repeats * len(NOISES)}"
        )


def job(rng: random.Random, period: float, slower: float, noise: float) -> list[float]:
    """Return the rates of a job with 600 iterations, evaluations and checkpoints. From the middle on, it is slower."""
    rates: list[float] = []
    duty = rng.uniform(0.1, 0.6)
    half = HALF_ITERATIONS * period
    while len(rates) < 2 * half:
        slowdown = slower if len(rates) >= half else 1.0
        rates += bursts(
            rng, int(rng.uniform(20, 80) * period), period * slowdown, duty / slowdown, 0.02, rng.choice((1, 1, 4))
        )
        rates += rng.choice(([], [0.0] * 60, [0.0] * 30 + [4.0] * 20, bursts(rng, 120, period / 3.3, 0.4, 0.05)))
    return noisy(rng, rates[: int(2 * half)], noise)


def jobs(seed: int, job_count: int, noise: float, seconds: float = 0.5) -> None:
    """Measure whole jobs, from readings to the alarm."""
    rng = random.Random(seed)
    print(f"\n{2 * job_count} jobs of {2 * HALF_ITERATIONS} iterations, 1 % of the readings missing, noise {noise}")
    false_alarms, delays, too_few_detected = 0, list[float](), 0
    for number in range(2 * job_count):
        slower = 1.0 if number < job_count else rng.uniform(1.3, 2.2)
        iterations, series, count = Iterations(seconds), Series(Kind.ITERATION, PERCENT), 0.0
        alarm: float | None = None
        detected = 0
        period = rng.uniform(25, 200)  # samples
        onset = HALF_ITERATIONS * period * seconds
        for at, rate in enumerate(job(rng, period, slower, noise)):
            count += rate
            if rng.random() < 0.01:
                continue
            for iteration in iterations.add((at + rng.uniform(0, 0.2)) * seconds, count):
                detected += 1
                if series.add(iteration.seconds, iteration.time) and series.slow is not None and alarm is None:
                    alarm = iteration.time
        too_few_detected += detected < 30
        if slower == 1.0:
            false_alarms += alarm is not None
        elif alarm is not None and alarm >= onset:
            delays.append((alarm - onset) / (period * seconds * slower))
    print(f"  false alarms: {false_alarms} of {job_count}; slow jobs (30 to 120 %) found: {len(delays)} of {job_count}")
    if delays:
        delays.sort()
        middle, late = delays[len(delays) // 2], delays[len(delays) * 9 // 10]
        print(f"  alarm after {middle:.0f} slow iterations (median), {late:.0f} (90th percentile)")
    print(f"  jobs with fewer than 30 detected iterations: {too_few_detected}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure cost and accuracy of sampling.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--each", type=int, default=200, help="number of windows per kind, noise and threshold")
    parser.add_argument("--jobs", type=int, default=30, help="number of healthy jobs, and of slow jobs")
    args = parser.parse_args(arguments)
    print(f"load average {os.getloadavg()[0]:.1f}; Python {sys.version.split()[0]}\n")
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        for description, seconds in costs(Path(folder)):
            print(f"{description:66} {seconds * 1e6:9.1f} us of CPU")
    print()
    windows(args.seed, args.each)
    for noise in (0.1, 0.3):
        jobs(args.seed, args.jobs, noise)
    return 0


if __name__ == "__main__":
    sys.exit(main())
