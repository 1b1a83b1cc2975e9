"""Run each command of an installed healthd once, in a temporary folder, and print the mistakes.

python tests/support/wheel_commands.py ENVIRONMENT     runs ENVIRONMENT/bin/healthd
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SECONDS = 240.0
NODE = ("--root", "tree", "--fake-nvml", "dgx-h100", "--profile", "none", "--baseline", "baseline.toml")
DAEMON = ("--runtime-dir", "run")
XID = "Jun  1 12:00:00 n1 kernel: NVRM: Xid (PCI:0000:61:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"

# command -> (arguments, exit status), in this order, while a daemon runs. The exit status of `run` is that at its end.
COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    "run": ((*NODE, *DAEMON, "--state-dir", "state", "--kernel-log", "log", "--listen", "off", "--interval", "1"), 0),
    "status": (DAEMON, 2),
    "ack": (("gpu_xid/79", "--for", "1h", "--why", "known", *DAEMON), 0),
    "unack": (("gpu_xid/79", *DAEMON), 0),
    "pause": (("--for", "1h", "--why", "a driver", *DAEMON), 0),
    "unpause": (DAEMON, 0),
    "failslow pause": (("--for", "1h", "--why", "a benchmark", *DAEMON), 0),
    "failslow unpause": (DAEMON, 0),
    "reload": (DAEMON, 0),
    "repaired": (("gpu_xid/79", *DAEMON), 0),
    "hook epilog": (DAEMON, 0),
    "hook healthcheck": (DAEMON, 0),
    "evidence list": (("--state-dir", "none"), 0),
    "evidence show": (("--state-dir", "none"), 1),  # nothing is saved
    "evidence path": (("--state-dir", "none"), 1),
    "evidence collect": (DAEMON, 0),
    "hooks run": (DAEMON, 0),
    "hooks test": (("on_drain",), 64),  # no hook is configured
    "repair": (DAEMON, 1),  # repair is off
    "repair now": (DAEMON, 1),  # the node needs no step
    "repair stop": (DAEMON, 1),
    "repair history": (("--state-dir", "state"), 0),
    "repair run": (DAEMON, 0),
    "check": (("gpu_count", "gpu_ecc", *NODE), 0),
    "record": (("node.rec", "gpu_count", *NODE), 0),
    "doctor": ((*NODE, *DAEMON), 2),  # the tree has no /dev/kmsg
    "baseline": (("--write", "--force", *NODE), 0),
    "config check": (("healthd.toml",), 0),
    "config show": (NODE, 0),
    "explain": (("gpu_xid/79",), 0),
    "list": ((), 0),
    "completion": (("bash",), 3),  # the extra is not installed
    "failslow": (("steps.csv",), 0),
    "failslow period": (("steps.csv",), 3),  # the file has no operations
    "failslow plan": (("steps.csv", "--gpus", "8"), 0),
    "failslow split": (("--micro-batches", "8", "--times", "1.0,1.3"), 0),
    "validate": (("--plan", "8"), 0),
    "scan": (("log",), 2),
    "events": (("--state-dir", "state"), 0),
    "fleet ingest": (("--out", "db", "--tickets", "none.csv"), 3),  # the extra is not installed
    "fleet prune": (("--db", "db", "--before", "2026-01-01"), 3),
    "fleet query": ((), 0),
    "fleet status": (("--prometheus", "http://127.0.0.1:9"), 3),  # no server listens there
    "fleet states": (("--db", "db"), 3),
    "fleet goodput": (("--db", "db"), 3),
    "fleet availability": (("--db", "db"), 3),
    "fleet nccl": (("none",), 3),
    "fleet attribution": (("--db", "db"), 3),
    "fleet rate": (("--db", "db"), 3),
    "fleet ettr": (("--db", "db"), 3),
    "fleet alarms": (("--db", "db"), 3),
    "fleet checks": (("--db", "db"), 3),
    "fleet links": (("--db", "db"), 3),
    "fleet repairs": (("--db", "db"), 3),
    "fleet failslow": (("--db", "db"), 3),
    "fleet lemons": (("--db", "db"), 3),
    "fleet compare": (("2026-01", "2026-02", "--db", "db"), 3),
    "fleet report": (("--db", "db", "--out", "report"), 3),
}


def find_mistakes(environment: Path) -> Iterator[str]:
    """Yield a message for each command that is not tried here or has an unexpected result."""
    names = "from healthd.cli.main import FAMILIES; print(*FAMILIES, sep=chr(10))"
    python, healthd = (str(environment / "bin" / name) for name in ("python", "healthd"))
    with tempfile.TemporaryDirectory(prefix="healthd.") as folder:
        families = subprocess.run([python, "-c", names], cwd=folder, capture_output=True, text=True, check=True)
        yield from (f"{name}: is not tried" for name in families.stdout.splitlines() if name not in COMMANDS)
        _make_node(Path(folder))

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([healthd, *words], cwd=folder, capture_output=True, text=True, timeout=SECONDS)

        arguments, status = COMMANDS["run"]
        with open(f"{folder}/daemon.log", "w") as log_file:
            daemon = subprocess.Popen([healthd, "run", *arguments], cwd=folder, stderr=log_file)
            try:
                _until(lambda health: health != 3, lambda: run("status", *DAEMON).returncode, daemon)
                Path(folder, "log").write_text(XID)
                _until(lambda health: health == 2, lambda: run("status", *DAEMON).returncode, daemon)
                for name, (words, expected) in COMMANDS.items():
                    if name != "run":
                        call = run(*name.split(), *words)
                        if call.returncode != expected or "Traceback" in call.stderr:
                            yield f"{name}: exit status {call.returncode}, not {expected}: {call.stdout}{call.stderr}"
            finally:
                daemon.terminate()
            exit_status = daemon.wait(SECONDS)
            log_text = Path(log_file.name).read_text()
            if exit_status != status or "Traceback" in log_text:
                yield f"run: exit status {exit_status}, not {status}: {log_text}"


def _make_node(folder: Path) -> None:
    """Create a machine with made-up files only."""
    (folder / "tree/proc/1").mkdir(parents=True)
    (folder / "tree/proc/self").mkdir()
    (folder / "tree/proc/1/stat").write_text(f"1 (init) S 0 {'0 ' * 48}\n")
    (folder / "tree/proc/self/mountinfo").write_text("22 1 8:2 / / rw - ext4 /dev/sda2 rw\n")
    (folder / "healthd.toml").write_text('mode = "observe"\n')
    (folder / "log").write_text("")
    (folder / "steps.csv").write_text("step_time\n" + "1.5\n" * 40)


def _until(is_reached: Callable[[int], bool], status: Callable[[], int], daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_reached(status()) and time.monotonic() < deadline and daemon.poll() is None:
        time.sleep(0.1)


if __name__ == "__main__":
    found = list(find_mistakes(Path(sys.argv[1])))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)
