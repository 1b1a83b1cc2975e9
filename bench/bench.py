"""`make bench`: what healthd costs on this machine, as a table. `--json FILE` writes the figures too.

Nothing is simulated but the hardware: `healthd run` as a user starts it, its worker, a real slurmctld. CPU time is what
the scheduler counted (a process's own clock, nanoseconds), memory is PSS (smaps_rollup), a wake-up is a time slice that
a thread got (schedstat).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "bench"), str(REPOSITORY / "tests" / "e2e")]

import big_log  # noqa: E402
import node_tree  # noqa: E402
from healthd_daemon import Healthd, xid  # noqa: E402
from slurm_cluster import SlurmCluster  # noqa: E402

ROUNDS = 20
DRAINS = 100
STORM_LINES = 1_000_000
STORMS = 5
STARTS = 10
PROLOGS = 200
IDLE_SECONDS = 20.0
QUIET_SECONDS = 0.5  # after a round: the errands that follow it are over
INJECTED = "[kernel_log]\naccept_injected = true\n"
# What comes round only on a drained idle node would keep the drain until the next round: nobody waits for that here.
DRAINED = "[checks.gpu_processes]\nenabled = false\n"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: `values` in `unit`; `aim` is what their median must stay under (None: no aim; 0: nothing at all)."""

    name: str
    unit: str
    values: list[float]
    aim: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        return self.aim is None or self.median < self.aim or self.median == self.aim == 0


def main() -> int:
    """Exit status 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description="What healthd costs on this machine.")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--only", metavar="PART", choices=sorted(PARTS), help=f"one of {', '.join(PARTS)}")
    args = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as compiled:
        # Compiled modules, as where healthd is installed: without them each start compiles everything again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ |= {"PYTHONPYCACHEPREFIX": compiled, "PYTHONPATH": str(REPOSITORY)}
        start("check", "--fake-nvml", "dgx-h100")
        with Healthd("--listen", "127.0.0.1:0") as daemon:
            scrape(daemon)
        for name, part in PARTS.items():
            if args.only in (None, name):
                print(f"bench: {name} ...", file=sys.stderr, flush=True)
                figures += part()
    print(machine())
    print(table(figures))
    if args.json:
        rows = [{**asdict(figure), "median": figure.median, "met": figure.met} for figure in figures]
        Path(args.json).write_text(json.dumps({"machine": machine(), "figures": rows}, indent=2) + "\n")
    return 0 if all(figure.met for figure in figures) else 1


# --- a round


def rounds() -> list[Figure]:
    """CPU of rounds, one a second; the programs that exec checks start are not in it. Then the memory of the tree."""
    with node() as (folder, config), Healthd("--interval", "1", "--root", str(folder), config=config) as daemon:
        pids = [daemon_pid(daemon), daemon.worker()]
        settle(daemon)
        spent = []
        for _ in range(ROUNDS):
            before = [cpu_ms(pid) for pid in pids]
            settle(daemon)
            spent.append([cpu_ms(pid) - was for pid, was in zip(pids, before, strict=True)])
        assert pids[1] == daemon.worker(), "the worker was replaced while it was measured"
        status = daemon.status()
        assert status["health"] == "healthy", status["conditions"]
        pss = tree_pss(daemon)
    return [
        Figure("one round, daemon and worker: CPU", "ms", [sum(both) for both in spent], aim=30),
        Figure("  of it the daemon", "ms", [ours for ours, _ in spent]),
        Figure("  of it the worker", "ms", [theirs for _, theirs in spent]),
        Figure("memory of the process tree, PSS", "MiB", [pss], aim=40),
    ]


def memory_with_page() -> list[Figure]:
    """The same with the metrics page, after some scrapes."""
    with node() as (folder, config):
        flags = ("--interval", "1", "--root", str(folder), "--listen", "127.0.0.1:0")
        with Healthd(*flags, config=config) as daemon:
            settle(daemon)
            spent = []
            for _ in range(ROUNDS):
                before = cpu_ms(daemon_pid(daemon))
                scrape(daemon)
                spent.append(cpu_ms(daemon_pid(daemon)) - before)
            settle(daemon)
            pss = tree_pss(daemon)
    return [
        Figure("  with the metrics page", "MiB", [pss], aim=40),
        Figure("one scrape of the page: CPU", "ms", spent),
    ]


def scrape(daemon: Healthd) -> None:
    address = next(word for word in daemon.log.read_text().split() if word.startswith("http://"))
    with urllib.request.urlopen(address, timeout=5) as page:
        page.read()


def settle(daemon: Healthd) -> None:
    """Wait until the next round and what follows it are over. The verdict file is new after each: nobody is woken."""
    verdict = daemon.run_dir / "verdict"
    last = verdict.stat().st_mtime_ns
    end = time.monotonic() + 10
    while verdict.stat().st_mtime_ns == last:
        if time.monotonic() > end:
            raise TimeoutError("no round within 10 s")
        time.sleep(0.01)
    time.sleep(QUIET_SECONDS)


# --- from a kernel line to Slurm


def drains_from_file() -> list[Figure]:
    return drains("a followed file", lambda daemon, line: daemon.kernel_line(line))


def drains_from_kmsg() -> list[Figure]:
    return drains("/dev/kmsg", inject, "--kernel-log", "kmsg", config=INJECTED)


def drains_under_load() -> list[Figure]:
    """Beside a loop on each core that never sleeps."""
    with beside([[sys.executable, "-c", "while True: pass"]] * (os.cpu_count() or 1)):
        return drains("/dev/kmsg, all cores busy", inject, "--kernel-log", "kmsg", config=INJECTED)


STORM = """
line = "<12>NVRM: Xid (PCI:0000:%s:00): 31, pid=%d, name=python3, Ch %08x, intr 00000000. MMU Fault: ENGINE GRAPHICS\\n"
buses = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
number = 0
while True:
    with open("/dev/kmsg", "wb", buffering=0) as file:  # one open a line: more of one writer are held back
        file.write((line % (buses[number % 8], number % 32768, number)).encode())
    number += 1
"""


def drains_in_a_storm() -> list[Figure]:
    """While another process writes Xid 31 of all GPUs into /dev/kmsg, without a pause."""
    with beside([[sys.executable, "-c", STORM]]):
        return drains("/dev/kmsg, in a storm", inject, "--kernel-log", "kmsg", config=INJECTED)


def inject(_daemon: Healthd, line: str) -> None:
    with open("/dev/kmsg", "w", buffering=1) as file:
        file.write(f"<12>{line}\n")


@contextlib.contextmanager
def beside(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Programs that run until it is over."""
    running = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def drains(source: str, write: Callable[[Healthd, str], None], *flags: str, config: str = "") -> list[Figure]:
    """From before the line is written until slurmctld has logged the new Reason; a repair in between."""
    taken = []
    with SlurmCluster(nodes=1) as cluster:
        daemon = Healthd("--mode", "drain", "--node-name", "n1", *flags, config=DRAINED + config, env=cluster.env)
        log = cluster.directory / "log" / "slurmctld.log"
        with daemon:
            for number in range(DRAINS):
                pci = node_tree.GPUS[number % len(node_tree.GPUS)]
                place = log.stat().st_size
                began = time.perf_counter()
                write(daemon, xid(79, pci=pci.rpartition(".")[0]))
                wait_for_text(log, place, f"reason set to: healthd: gpu_xid/79 {pci}".encode())
                taken.append((time.perf_counter() - began) * 1000)
                cluster.wait_state("n1", "DRAIN", reason=f"healthd: gpu_xid/79 {pci}")
                daemon.ask(command="repaired", code="gpu_xid/79", part=pci)
                cluster.wait_state("n1", "IDLE", without=("DRAIN",))
    return [
        Figure(f"kernel line ({source}) to the drain in slurmctld", "ms", taken, aim=250),
        Figure("  99th percentile", "ms", [statistics.quantiles(taken, n=100, method="inclusive")[98]], aim=1000),
    ]


# --- a storm


def storms() -> list[Figure]:
    """A million Xid lines in a followed file, all at once, and another fault as the last: when is it a condition?"""
    return [*storm("the same", same_line), *storm("varying, 8 GPUs", varying_line)]


def same_line(_number: int) -> str:
    return xid(95, "0000:1b:00", "Uncontained: LTC TAG (0x0,0x0). RST: Yes, D-RST: No")


def varying_line(number: int) -> str:
    pci, code = node_tree.GPUS[number % 8].rpartition(".")[0], (13, 31, 94, 95)[number // 8 % 4]
    fault = f"MMU Fault: ENGINE GRAPHICS GPC{number % 7} faulted @ 0x{number:x}_00000000. Fault is of type FAULT_PDE"
    who = f"pid={number % 32768}, name=p{number % 100}"
    return f"NVRM: Xid (PCI:{pci}): {code}, {who}, Ch {number:08x}, intr {number * 7:08x}. {fault}"


def storm(name: str, line: Callable[[int], str]) -> list[Figure]:
    text = "".join(line(number) + "\n" for number in range(STORM_LINES)) + xid(79, "0000:df:00") + "\n"
    waited, spent, grown, ledger, answers = [], [], [], [], []
    for _ in range(STORMS):
        with Healthd("--interval", "3600") as daemon:
            before, file = peak_mib(daemon_pid(daemon)), daemon.run_dir / "ledger.json"
            size, place = file.stat().st_size, daemon.log.stat().st_size
            used = cpu_ms(daemon_pid(daemon))
            with open(daemon.kernel_log, "a", encoding="ascii") as log:
                log.write(text)
            began = time.perf_counter()
            while True:
                try:
                    wait_for_text(daemon.log, place, b"gpu_xid/79 0000:df:00.0: critical, open", 0.25)
                    break
                except TimeoutError:
                    asked = time.perf_counter()
                    daemon.status()
                    answers.append((time.perf_counter() - asked) * 1000)
            waited.append((time.perf_counter() - began) * 1000)
            spent.append(cpu_ms(daemon_pid(daemon)) - used)
            grown.append(peak_mib(daemon_pid(daemon)) - before)
            daemon.status()  # what was heard in that pass is saved
            ledger.append((file.stat().st_size - size) / 1024)
    return [
        Figure(f"{STORM_LINES} Xid lines ({name}) written, to the fault behind them", "ms", waited, aim=1000),
        Figure("  CPU of the daemon", "ms", spent),
        Figure("  the daemon's memory grows by, peak RSS", "MiB", grown),
        Figure("  its ledger grows by", "KiB", ledger),
        Figure("  the status is answered meanwhile in", "ms", answers),
    ]


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def wait_for_text(path: Path, place: int, text: bytes, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.stat().st_size > place:
            with open(path, "rb") as file:
                file.seek(place)
                if text in file.read():
                    return
        time.sleep(0.001)
    raise TimeoutError(f"{path}: no {text!r} within {seconds} s")


# --- the prolog


def prologs() -> list[Figure]:
    """The prolog as slurmd runs it before each job, of a node that is well and of one that is to be drained."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench.", dir="/tmp") as folder:
        default, script, verdict = (Path(folder) / name for name in ("default", "prolog", "verdict"))
        default.write_text(f"HEALTHD_RUNTIME_DIR={folder}\nHEALTHD_TELL_JOB=no\n")
        shipped = (REPOSITORY / "packaging/slurm/prolog").read_text()
        script.write_text(shipped.replace("/etc/default/healthd", str(default)))
        for what, word, status in (("well", "ok", 0), ("to be drained", "drain", 1)):
            verdict.write_text(f"{word} {int(time.time()) + 3600} gpu_xid/79 0000:61:00.0: of the bench\n")
            taken = []
            for _ in range(PROLOGS):
                began = time.perf_counter()
                done = subprocess.run(["/bin/sh", script], env={}, stderr=subprocess.DEVNULL)
                taken.append((time.perf_counter() - began) * 1000)
                assert done.returncode == status
            p90 = statistics.quantiles(taken, n=10, method="inclusive")[8]
            figures += [
                Figure(f"the prolog, the node is {what}: wall", "ms", taken, aim=5),
                Figure("  90th percentile", "ms", [p90]),
            ]
    return figures


# --- starts


def starts() -> list[Figure]:
    fake = ("check", "--fake-nvml", "dgx-h100")
    figures = []
    for name, argv in (("--version", ("--version",)), ("check, fake H100", fake), ("check, this machine", ("check",))):
        runs = [start(*argv) for _ in range(STARTS)]
        figures.append(Figure(f"healthd {name}: wall", "ms", [wall for wall, _ in runs]))
        figures.append(Figure("  CPU, its worker included", "ms", [cpu for _, cpu in runs]))
    return figures


def start(*arguments: str) -> tuple[float, float]:
    """(wall, CPU) of one run in ms, children that it waited for included."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "healthd", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if not said:
        raise RuntimeError(f"healthd {' '.join(arguments)}: exit status {process.returncode} and not a word")
    return (time.perf_counter() - began) * 1000, (used.ru_utime + used.ru_stime) * 1000


# --- idle


def idle() -> list[Figure]:
    """Between two rounds nothing may run, on this machine's own /dev/kmsg and udev, with the metrics page on."""
    flags = ("--interval", "86400", "--kernel-log", "kmsg", "--listen", "127.0.0.1:0", "--node-name", "bench")
    with Healthd(*flags) as daemon:
        daemon.until(lambda status: status["health"] == "healthy", "all is well")
        time.sleep(12)  # looks that events of the start asked for are over
        pids = [daemon_pid(daemon), daemon.worker()]
        for _ in range(5):  # until no kernel line came meanwhile: each is an event and wakes us
            lines = daemon.status()["kernel_log"]["lines_total"]
            time.sleep(1)
            before = {pid: time_slices(pid) for pid in pids}
            time.sleep(IDLE_SECONDS)
            woken = [float(time_slices(pid) - before[pid]) for pid in pids]
            if daemon.status()["kernel_log"]["lines_total"] == lines:
                break
    hourly = 3600 / IDLE_SECONDS
    return [
        Figure("wake-ups an hour between rounds, daemon", "", [woken[0] * hourly], aim=0),
        Figure("  its worker", "", [woken[1] * hourly], aim=0),
    ]


# --- a log


def scans() -> list[Figure]:
    """`healthd scan` over logs of up to 155 MB: CPU of the whole program, its start included, on one core. With the
    usual faults, with more of them, and with a storm; the figure to aim at is 50 MB/s."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        log = Path(folder) / "syslog"
        for name, size, each in SCANNED:
            if name.startswith("captured"):
                big_log.write_captures(log, size, dated="dated" in name)
            elif each:
                big_log.write(log, size, each)
            else:
                big_log.write_storm(log, STORM_LINES)
            megabytes = log.stat().st_size / 1e6
            subprocess.run(["cksum", log], stdout=subprocess.DEVNULL, check=True)  # it is in the page cache
            runs = [scan(log) for _ in range(SCANS)]
            speed = [megabytes / seconds for seconds, _ in runs]
            aim = 100 / SCAN_MB_A_SECOND if each == 500 else None
            figures += [
                Figure(f"healthd scan, {name}: CPU for 100 MB", "s", [100 / rate for rate in speed], aim),
                Figure("  that is", "MB/s", speed),
                Figure("  its memory, resident at most", "MiB", [resident for _, resident in runs]),
            ]
    return figures


SCANS = 5
SCAN_MB_A_SECOND = 50
SCANNED = (
    ("a fault in 500 lines", 100_000_000, 500),
    ("no fault", 100_000_000, 10**9),
    ("a fault in 10 lines", 20_000_000, 10),
    ("faults only", 5_000_000, 1),
    ("captured lines again and again", 100_000_000, 0),
    ("captured lines, dated", 20_000_000, 0),
    ("a million lines of one Xid", 0, 0),
)


def scan(log: Path) -> tuple[float, float]:
    """(CPU seconds, MiB resident at most) of one run."""
    argv = [sys.executable, "-m", "healthd", "scan", str(log)]
    process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1, 2), process.returncode
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


# --- what the kernel counts


def daemon_pid(daemon: Healthd) -> int:
    assert daemon.process is not None
    return daemon.process.pid


def cpu_ms(pid: int) -> float:
    """CPU time of a process, ended threads included: its clock (linux/posix-timers.h, CPUCLOCK_SCHED)."""
    return time.clock_gettime(~pid << 3 | 2) * 1000


def time_slices(pid: int) -> int:
    """Times that one of its threads got a CPU (Documentation/scheduler/sched-stats.rst, the third field)."""
    tasks = os.listdir(f"/proc/{pid}/task")
    return sum(int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[2]) for task in tasks)


def tree_pss(daemon: Healthd) -> float:
    """MiB of the daemon and its worker."""
    return sum(pss(pid) for pid in (daemon_pid(daemon), daemon.worker()))


def pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


# --- the table


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.strip()
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; {platform.system()} "
        f"{platform.release()}; Python {platform.python_version()}; {slurm}"
    )


def table(figures: list[Figure]) -> str:
    width = max(len(figure.name) for figure in figures)
    lines = [f"{'':{width}}  {'median':>8} {'min':>8} {'max':>8}  {'':4} {'n':>3}  aim"]
    for figure in figures:
        numbers = " ".join(f"{number:8.1f}" for number in (figure.median, min(figure.values), max(figure.values)))
        aim = "" if figure.aim is None else f"under {figure.aim:g}" if figure.aim else "none"
        verdict = "" if figure.met else "  MISSED"
        row = f"{figure.name:{width}}  {numbers}  {figure.unit:4} {len(figure.values):3}  {aim}{verdict}"
        lines.append(row.rstrip())
    return "\n".join(lines)


@contextlib.contextmanager
def node() -> Iterator[tuple[Path, str]]:
    """The node's tree, and settings with its own baseline: every check has something to hold the node to."""
    folder = Path(tempfile.mkdtemp(prefix="healthd-bench.", dir="/tmp"))
    try:
        node_tree.build(folder)
        argv = (sys.executable, "-m", "healthd", "baseline", "--root", str(folder), "--fake-nvml", "dgx-h100")
        baseline = folder / "baseline.toml"
        baseline.write_text(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, cwd="/").stdout)
        yield folder, f'baseline_file = "{baseline}"\n{node_tree.CONFIG}'
    finally:
        shutil.rmtree(folder)


PARTS: dict[str, Callable[[], list[Figure]]] = {
    "rounds": rounds,
    "page": memory_with_page,
    "drains-file": drains_from_file,
    "drains-kmsg": drains_from_kmsg,
    "drains-load": drains_under_load,
    "drains-storm": drains_in_a_storm,
    "storm": storms,
    "prolog": prologs,
    "starts": starts,
    "idle": idle,
    "scan": scans,
}

if __name__ == "__main__":
    sys.exit(main())
