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
from healthd_daemon import Healthd, condition, xid
from requirements import require, require_root

GPUS = [f"0000:{bus}:00" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")]
LINES = 1_000_000
GROWTH_MIB = 16
LEDGER_BYTES = 256 << 10
WATCHDOG_SECONDS = 60.0  # 15 min in the unit


def same(number: int) -> str:
    del number
    return xid(95, GPUS[0], "Uncontained: LTC TAG (0x0,0x0). RST: Yes, D-RST: No")


def varying(number: int) -> str:
    code = (13, 31, 94, 95)[number // 8 % 4]
    message = f"Ch {number:08x}, intr {number * 7:08x}. MMU Fault: ENGINE GRAPHICS faulted @ 0x{number:x}_00000000"
    return f"NVRM: Xid (PCI:{GPUS[number % 8]}): {code}, pid={number % 32768}, name=p{number % 100}, {message}"


class Watched:
    """Receive the watchdog messages that systemd would get, and check that the daemon answers all the time."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(0.2)
        self.longest = 0.0
        self.answers = 0
        self.finished = threading.Event()
        self.done = threading.Event()

    @property
    def env(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.path, "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6))}

    def pings(self) -> None:
        last = time.monotonic()
        while not self.done.is_set():
            try:
                if b"WATCHDOG=1" in self.socket.recv(4096):
                    self.longest, last = max(self.longest, time.monotonic() - last), time.monotonic()
            except OSError:  # nothing for a moment, or the test has failed and closed the socket
                pass

    def ask(self, daemon: Healthd) -> None:
        while not self.finished.is_set():
            self.answers += bool(daemon.status()["kernel_log"])
            time.sleep(0.02)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.finished.set()
    watched.done.set()
    watched.socket.close()


def rss_mib(daemon: Healthd) -> float:
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


@pytest.mark.parametrize("line", [same, varying])
def test_a_million_lines_in_a_file_are_counted_in_bounds_and_hide_no_other_fault(watched: Watched, line) -> None:
    hears = threading.Thread(target=watched.pings)
    hears.start()  # before the daemon: a socket without a reader blocks its writer
    with Healthd("--interval", "3600", env=watched.env) as daemon:
        before, ledger = rss_mib(daemon), daemon.run_dir / "ledger.json"
        size, log = ledger.stat().st_size, daemon.log.stat().st_size
        asks = threading.Thread(target=watched.ask, args=[daemon])
        asks.start()
        most = before
        for part in range(10):
            lines = [line(part * LINES // 10 + number) for number in range(LINES // 10)]
            if part == 5:
                lines[len(lines) // 2] = xid(79, "0000:df:00")  # in the middle
            daemon.kernel_line(*lines)
            most = max(most, rss_mib(daemon))
        daemon.kernel_line(xid(48, "0000:c3:00", "DBE (double bit error)"))  # right after the storm
        status = daemon.until(lambda s: s["kernel_log"]["lines_total"] == LINES + 1, "all lines are read", 900)
        watched.finished.set()
        asks.join()
        most = max(most, rss_mib(daemon))
        assert status["kernel_log"]["events_total"] == LINES + 1
        assert condition(status, "gpu_xid/79", "0000:df:00.0")
        assert condition(status, "gpu_xid/48", "0000:c3:00.0")
        assert most - before < GROWTH_MIB
        assert ledger.stat().st_size - size < LEDGER_BYTES
        assert daemon.log.stat().st_size - log < LEDGER_BYTES, "the journal gets no storm"
        assert watched.answers > 0
        assert 0 < watched.longest < WATCHDOG_SECONDS
    watched.done.set()
    hears.join()


def test_a_storm_through_a_fifo_holds_its_writer_back_and_hides_no_other_fault(tmp_path: Path) -> None:
    fifo = tmp_path / "kernel.fifo"
    os.mkfifo(fifo)
    with Healthd("--interval", "3600", "--kernel-log", str(fifo)) as daemon:
        before = rss_mib(daemon)
        with open(fifo, "w") as writer:
            writer.writelines(varying(number) + "\n" for number in range(200_000))
            writer.write(xid(79, "0000:df:00") + "\n")
        status = daemon.until(lambda s: s["kernel_log"]["lines_total"] == 200_001, "all lines are read")
        assert condition(status, "gpu_xid/79", "0000:df:00.0")
        assert rss_mib(daemon) - before < GROWTH_MIB


def test_a_storm_in_the_kernels_own_log_is_heard_or_counted_as_lost(tmp_path: Path) -> None:
    """One process writes one record at a time, as fast as it can."""
    require_root()
    if not os.path.exists("/dev/kmsg"):
        require("there is no /dev/kmsg")
    config = "[kernel_log]\naccept_injected = true\n"
    with Healthd("--interval", "3600", "--kernel-log", "kmsg", config=config) as daemon:
        before, then = daemon.status()["kernel_log"], rss_mib(daemon)
        count = 20_000
        for number in range(count):
            write_kmsg(xid(79, "0000:df:00") if number == count // 2 else varying(number))
        write_kmsg(xid(48, "0000:c3:00", "DBE (double bit error)"))

        def heard(status: dict) -> int:
            now = status["kernel_log"]
            return now["lines_total"] - before["lines_total"] + now["lost_total"] - before["lost_total"]

        status = daemon.until(
            lambda s: heard(s) >= count + 1 and condition(s, "gpu_xid/48", "0000:c3:00.0"), "all lines are read or lost"
        )
        if status["kernel_log"]["lost_total"] == before["lost_total"]:
            assert condition(status, "gpu_xid/79", "0000:df:00.0")
        assert rss_mib(daemon) - then < GROWTH_MIB
        assert {source["source"]: source["up"] for source in status["sources"]}["kernel_log"]


def write_kmsg(text: str) -> None:
    with open("/dev/kmsg", "w", buffering=1) as file:
        file.write(f"<12>{text}\n")
