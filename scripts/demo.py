"""`make demo`: show the main function of healthd in a few seconds, without a GPU and without changing the machine.

healthd reads this machine's /proc, /sys and mounts, with a fake DGX H100 behind NVML and a fifo as kernel log. GPU 3
falls off the bus (Xid 79), and is then repaired. The mode is "observe": nothing changes in Slurm. The demo ends by
itself with exit status 0 and needs no terminal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

XID = "NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PCI = "0000:61:00.0"
BOLD, DIM, RESET = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="healthd-demo-") as folder:
        return show(Path(folder))


def show(folder: Path) -> int:
    log, fifo = folder / "healthd.log", folder / "kernel-log"
    os.mkfifo(fifo)
    common = ["--runtime-dir", str(folder / "run")]
    argv = [*healthd("run"), *common, "--state-dir", str(folder / "state"), "--fake-nvml", "dgx-h100"]
    argv += ["--kernel-log", str(fifo), "--mode", "observe", "--node-name", "dgx-demo", "--listen", "127.0.0.1:0"]
    step("healthd run", "a fake DGX H100 (8 GPUs) behind NVML, a fifo as kernel log, mode observe")
    with open(log, "wb") as output:
        daemon = subprocess.Popen(argv, stdout=output, stderr=output)
    try:
        daemon_log = DaemonLog(log)
        status = wait_for(
            lambda: read_status(common), lambda s: s["round"]["number"] > 0 and s["health"] != "unknown", daemon
        )
        daemon_log.print_new_lines()
        before = status["health"]  # "warning" if this machine has a warning
        print_indented(f"health: {before}, {len(status['results'])} checks, {len(status['inventory']['gpus'])} GPUs")

        step("a kernel line", XID)
        with open(fifo, "w", encoding="ascii") as kernel:
            kernel.write(XID + "\n")
        status = wait_for(lambda: read_status(common), lambda s: s["health"] == "unhealthy", daemon)
        daemon_log.print_new_lines()

        step("healthd status", "")
        print(run("status", *common))
        step("the metrics page", "")
        show_metrics(log)
        step(
            "cat RUNTIME_DIR/verdict",
            "what a Slurm prolog reads: in mode observe, healthd never writes drain",
        )
        print_indented((folder / "run" / "verdict").read_text().strip())

        step(f"healthd repaired gpu_xid/79 {PCI}", "an engineer has replaced the GPU")
        print_indented(run("repaired", "gpu_xid/79", PCI, *common).strip())
        wait_for(lambda: read_status(common), lambda s: s["health"] == before, daemon)
        daemon_log.print_new_lines()
        print_indented((folder / "run" / "verdict").read_text().strip())
    finally:
        daemon.terminate()
        stopped = daemon.wait(timeout=10)
    print(f'\n{BOLD}End of the demo.{RESET} In mode = "act" healthd would have drained the node, requeued its')
    print("batch jobs, and resumed the node after the repair. README.md describes how to enable it on a node.")
    return stopped


def healthd(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "healthd", *arguments]


def run(*arguments: str) -> str:
    return subprocess.run(healthd(*arguments), capture_output=True, text=True, timeout=20).stdout


def read_status(common: list[str]) -> dict[str, Any] | None:
    out = run("status", "--json", *common)
    found: dict[str, Any] | None = json.loads(out) if out.strip() else None
    return found


def wait_for(
    query: Callable[[], dict[str, Any] | None],
    is_reached: Callable[[dict[str, Any]], bool],
    daemon: subprocess.Popen[bytes],
) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    status = None
    while time.monotonic() < deadline:
        status = query()
        if status is not None and is_reached(status):
            return status
        if daemon.poll() is not None:
            break
        time.sleep(0.05)
    log = Path(daemon.args[daemon.args.index("--runtime-dir") + 1]).parent / "healthd.log"  # type: ignore[union-attr,index,operator]
    last = {name: (status or {}).get(name) for name in ("health", "unknown", "problems")}
    raise SystemExit(f"the demo timed out after 120 s; last status: {last}\n{log.read_text()}")


def show_metrics(log: Path) -> None:
    address = next(word for word in log.read_text().split() if word.startswith("http://"))
    with urllib.request.urlopen(address, timeout=5) as page:
        lines = page.read().decode().splitlines()
    for line in lines:
        if line.startswith(("healthd_health{", "healthd_condition_severity{", "healthd_kernel_log_events_total")):
            print_indented(line)


class DaemonLog:
    """Print the daemon's log as it grows."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.printed_lines = 0

    def print_new_lines(self) -> None:
        lines = self.log.read_text().splitlines()
        for line in lines[self.printed_lines :]:
            print(f"    {DIM}{line}{RESET}")
        self.printed_lines = len(lines)


def step(title: str, explanation: str) -> None:
    print(f"\n{BOLD}== {title}{RESET}{'   ' + explanation if explanation else ''}", flush=True)


def print_indented(text: str) -> None:
    for line in text.splitlines():
        print(f"    {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
