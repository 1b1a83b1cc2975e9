"""A storm of kernel lines: bounded resources, answers meanwhile, and no delay for another fault.

The tests assert counts and bounds; `make bench` measures the duration.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from healthd_daemon import Healthd, condition, xid_line
from requirements import require, require_root

GPUS = [f"0000:{bus}:00" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")]
LINES = 1_000_000
GROWTH_MIB = 16
LEDGER_BYTES = 256 << 10
WATCHDOG_SECONDS = 60.0  # 15 min in the unit


def same_line(number: int) -> str:
    del number
    return xid_line(95, GPUS[0], "Uncontained: LTC TAG (0x0,0x0). RST: Yes, D-RST: No")


def varying_line(number: int) -> str:
    code = (13, 31, 94, 95)[number // 8 % 4]
    message = f"Ch {number:08x}, intr {number * 7:08x}. MMU Fault: ENGINE GRAPHICS faulted @ 0x{number:x}_00000000"
    return f"NVRM: Xid (PCI:{GPUS[number % 8]}): {code}, pid={number % 32768}, name=p{number % 100}, {message}"


class DaemonWatcher:
    """Receive the watchdog messages that systemd would get, and check that the daemon answers all the time."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(0.2)
        self.longest_gap = 0.0
        self.answers = 0
        self.storm_over = threading.Event()
        self.daemon_stopped = threading.Event()

    @property
    def env(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.path, "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6))}

    def read_pings(self) -> None:
        last_ping = time.monotonic()
        while not self.daemon_stopped.is_set():
            try:
                if b"WATCHDOG=1" in self.socket.recv(4096):
                    self.longest_gap, last_ping = max(self.longest_gap, time.monotonic() - last_ping), time.monotonic()
            except OSError:  # nothing for a moment, or the test has failed and closed the socket
                pass

    def read_status_repeatedly(self, daemon: Healthd) -> None:
        while not self.storm_over.is_set():
            self.answers += bool(daemon.status()["kernel_log"])
            time.sleep(0.02)


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[DaemonWatcher]:
    daemon_watcher = DaemonWatcher(tmp_path)
    yield daemon_watcher
    daemon_watcher.storm_over.set()
    daemon_watcher.daemon_stopped.set()
    daemon_watcher.socket.close()


def rss_mib(daemon: Healthd) -> float:
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


@pytest.mark.parametrize("line", [same_line, varying_line])
def test_million_lines_in_file_stay_bounded_and_hide_no_other_fault(watcher: DaemonWatcher, line) -> None:
    ping_reader = threading.Thread(target=watcher.read_pings)
    ping_reader.start()  # before the daemon: a socket without a reader blocks its writer
    with Healthd("--interval", "3600", env=watcher.env) as daemon:
        before, ledger = rss_mib(daemon), daemon.run_dir / "ledger.json"
        size, log = ledger.stat().st_size, daemon.log.stat().st_size
        status_reader = threading.Thread(target=watcher.read_status_repeatedly, args=[daemon])
        status_reader.start()
        peak = before
        for tenth in range(10):
            lines = [line(tenth * LINES // 10 + number) for number in range(LINES // 10)]
            if tenth == 5:
                lines[len(lines) // 2] = xid_line(79, "0000:df:00")  # in the middle
            daemon.kernel_line(*lines)
            peak = max(peak, rss_mib(daemon))
        daemon.kernel_line(xid_line(48, "0000:c3:00", "DBE (double bit error)"))  # right after the storm
        status = daemon.wait_until(lambda s: s["kernel_log"]["lines_total"] == LINES + 1, "all lines are read", 900)
        watcher.storm_over.set()
        status_reader.join()
        peak = max(peak, rss_mib(daemon))
        assert status["kernel_log"]["events_total"] == LINES + 1
        assert condition(status, "gpu_xid/79", "0000:df:00.0")
        assert condition(status, "gpu_xid/48", "0000:c3:00.0")
        assert peak - before < GROWTH_MIB
        assert ledger.stat().st_size - size < LEDGER_BYTES
        assert daemon.log.stat().st_size - log < LEDGER_BYTES, "the journal gets no storm"
        assert watcher.answers > 0
        assert 0 < watcher.longest_gap < WATCHDOG_SECONDS
    watcher.daemon_stopped.set()
    ping_reader.join()


def test_storm_through_fifo_blocks_writer_and_hides_no_other_fault(tmp_path: Path) -> None:
    fifo = tmp_path / "kernel.fifo"
    os.mkfifo(fifo)
    with Healthd("--interval", "3600", "--kernel-log", str(fifo)) as daemon:
        before = rss_mib(daemon)
        with open(fifo, "w") as writer:
            writer.writelines(varying_line(number) + "\n" for number in range(200_000))
            writer.write(xid_line(79, "0000:df:00") + "\n")
        status = daemon.wait_until(lambda s: s["kernel_log"]["lines_total"] == 200_001, "all lines are read")
        assert condition(status, "gpu_xid/79", "0000:df:00.0")
        assert rss_mib(daemon) - before < GROWTH_MIB


def test_storm_in_kernel_log_is_read_or_counted_as_lost(tmp_path: Path) -> None:
    """One process writes one record at a time, as fast as it can."""
    require_root()
    if not os.path.exists("/dev/kmsg"):
        require("there is no /dev/kmsg")
    config = "[kernel_log]\naccept_injected = true\n"
    with Healthd("--interval", "3600", "--kernel-log", "kmsg", config=config) as daemon:
        before, rss_before = daemon.status()["kernel_log"], rss_mib(daemon)
        count = 20_000
        for number in range(count):
            write_kmsg(xid_line(79, "0000:df:00") if number == count // 2 else varying_line(number))
        write_kmsg(xid_line(48, "0000:c3:00", "DBE (double bit error)"))

        def count_accounted(status: dict) -> int:
            kernel_log = status["kernel_log"]
            return kernel_log["lines_total"] - before["lines_total"] + kernel_log["lost_total"] - before["lost_total"]

        status = daemon.wait_until(
            lambda s: count_accounted(s) >= count + 1 and condition(s, "gpu_xid/48", "0000:c3:00.0"),
            "all lines are read or lost",
        )
        if status["kernel_log"]["lost_total"] == before["lost_total"]:
            assert condition(status, "gpu_xid/79", "0000:df:00.0")
        assert rss_mib(daemon) - rss_before < GROWTH_MIB
        assert {source["source"]: source["up"] for source in status["sources"]}["kernel_log"]


def write_kmsg(text: str) -> None:
    with open("/dev/kmsg", "w", buffering=1) as file:
        file.write(f"<12>{text}\n")
