"""Measure the user and system time of short commands, with children, also as a multiple of a Python that does nothing.

NHC is measured too if NHC=DIR names a checkout of github.com/mej/nhc. The commands run in turn, so that a slow moment
of the machine affects all of them. Each ratio compares two neighbouring runs. The targets are the ratios of 2026-11-29
plus about a tenth.

    [NHC=DIR] .venv/bin/python bench/start.py [TIMES]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "e2e")]

from figure import Figure, table  # noqa: E402
from healthd_daemon import Healthd  # noqa: E402

TIMES = 20
BARE = "python -c pass"
NHC_CHECKS = """\
check_fs_mount_rw -f /
check_fs_free / 1%
check_fs_ifree / 1%
check_fs_used / 100%
check_fs_iused / 100%
check_fs_size / 1M 1000T
check_hw_cpuinfo
check_hw_physmem 1k 100TB
check_hw_physmem_free 1k
check_hw_mem 1k 100TB
check_hw_mem_free 1k
check_hw_swap 0 100TB
check_hw_eth lo
check_file_test -r -f /etc/passwd
check_file_test -d /tmp
check_file_contents /etc/passwd /^root:/
check_ps_loadavg 100000 100000 100000
check_ps_blacklist nobody-runs-this
check_ps_kswapd 100000000 1 log
check_cmd_output -m 'good' echo good
"""


def rows(times: int = TIMES) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder, Healthd() as daemon:
        healthd, run_dir = [sys.executable, "-m", "healthd"], ["--runtime-dir", str(daemon.run_dir)]
        commands: dict[str, tuple[list[str], float | None]] = {
            BARE: ([sys.executable, "-c", "pass"], None),
            "healthd --version": ([*healthd, "--version"], 2.3),
            "healthd hook healthcheck": ([*healthd, "hook", "healthcheck", *run_dir], 3),
            "healthd hook epilog": ([*healthd, "hook", "epilog", *run_dir], 3),
            "healthd status": ([*healthd, "status", *run_dir], 3.5),
            "healthd explain CODE": ([*healthd, "explain", "gpu_xid/79"], 6.5),
            "healthd check, this machine": ([*healthd, "check"], 12.5),
            "healthd check, fake DGX H100": ([*healthd, "check", "--fake-nvml", "dgx-h100"], 14.5),
        }
        nhc, name = os.environ.get("NHC", ""), f"NHC, {len(NHC_CHECKS.splitlines())} checks"
        if nhc:
            conf = Path(folder) / "nhc.conf"
            conf.write_text("".join(f"* || {line}\n" for line in NHC_CHECKS.splitlines()))
            commands[name] = nhc_argv(Path(nhc), conf), None
        taken: dict[str, list[float]] = {title: [] for title in commands}
        for number in range(times + 1):
            for title, (argv, _) in commands.items():
                spent = cpu_ms(argv)
                if number:  # the first run loads the files into memory
                    taken[title].append(spent)
    figures = []
    for title, values in taken.items():
        figures.append(Figure(f"{title}: CPU", "ms", values))
        if title != BARE:
            ratios = [value / bare for value, bare in zip(values, taken[BARE], strict=True)]
            figures.append(Figure(f"  ratio to {BARE}", "x", ratios, commands[title][1]))
    return figures if nhc else [*figures, Figure(f"{name}: not measured (NHC=DIR is not a checkout)", "", [])]


def nhc_argv(checkout: Path, conf: Path) -> list[str]:
    """Return a command line for NHC with which it marks no node offline and logs to standard output.

    Raises RuntimeError if a check of NHC fails, because a failing check has another cost.
    """
    argv = ["bash", str(checkout / "nhc"), "-a", "-c", str(conf), "-l", "-", f"INCDIR={checkout / 'scripts'}"]
    argv += [f"HELPERDIR={checkout / 'helpers'}", "MARK_OFFLINE=0", "NHC_RM=slurm", "TIMEOUT=60"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit status {done.returncode}: {done.stdout}{done.stderr}")
    return argv


def cpu_ms(argv: Sequence[str]) -> float:
    """Return the user and system time of one run, with the children that it waited for."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    null = subprocess.DEVNULL
    process = subprocess.Popen(argv, cwd=REPOSITORY, env=env, stdin=null, stdout=null, stderr=null)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 2, 3):
        raise RuntimeError(f"{' '.join(argv)}: exit status {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000


if __name__ == "__main__":
    print(table(rows(*map(int, sys.argv[1:2]))))
