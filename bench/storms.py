"""Measure floods of kernel lines: the time until a fault that follows hundreds of thousands of lines is a condition."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import node_tree
from counted import cpu_ms, daemon_pid, peak_mib, scrape, wait_for_text
from figure import Figure
from healthd_daemon import Healthd, xid_line

from healthd.agent.conditions.bounds import MAX_CONDITIONS

STORM_LINES = 1_000_000
STORMS = 5
BURST_LINES = 1280
DIFFERENT_LINES = 100_000
CHECKS, CODES_PER_CHECK = 60, 150
ANSWERS = 20
# A site check that finds two parts for each of its codes.
CHECK = '''"""Broken."""

from healthd.common.model import Finding, Severity


def run(host, config, past):
    for number in range({count}):
        code, part = f"{name}/code{{number % {codes}}}", f"part{{number}}"
        yield Finding(Severity.WARNING, code, part, "a message with the usual length of such a message and a number")
'''


def storms() -> list[Figure]:
    """Measure a million Xid lines in a followed file: the time until the fault in the last line is a condition."""
    varying = storm("varying, 8 GPUs", varying_line)
    return [*storm("the same", same_line), *varying, *burst(), *different_parts(), *many_checks()]


def different_line(number: int) -> str:
    """Return a line about its own part. Most lines also have their own code."""
    code = 200 + number % 9000
    return xid_line(code, f"{number % 65536:04x}:{number // 65536:02x}:00", "a fault of another part")


def burst() -> list[Figure]:
    """Measure many different faults at once, with an Xid 79 in the middle: the time until the Xid 79 is a condition."""
    waited = []
    for _ in range(STORMS):
        lines = [different_line(number) for number in range(BURST_LINES)]
        lines.insert(BURST_LINES // 2, xid_line(79, "0000:df:00"))
        with Healthd("--interval", "3600") as daemon:
            log_offset = daemon.log.stat().st_size
            began = time.perf_counter()
            daemon.kernel_line(*lines)
            wait_for_text(daemon.log, log_offset, b"gpu_xid/79 0000:df:00.0: critical, open")
            waited.append((time.perf_counter() - began) * 1000)
    return [Figure(f"{BURST_LINES} different faults and one Xid 79: delay until it is open", "ms", waited, aim=1000)]


def different_parts() -> list[Figure]:
    """Measure lines that each name another part: how much is kept, and how long the daemon takes to answer."""
    with Healthd("--interval", "3600", "--listen", "127.0.0.1:0") as daemon:
        scrape(daemon)
        log_offset, began = daemon.log.stat().st_size, time.perf_counter()
        daemon.kernel_line(*(different_line(number) for number in range(DIFFERENT_LINES)), xid_line(79, "0000:df:00"))
        wait_for_text(daemon.log, log_offset, b"gpu_xid/79 0000:df:00.0: critical, open", 300)
        waited = (time.perf_counter() - began) * 1000
        answers, status_text = [], b""
        for _ in range(ANSWERS):
            request_time = time.perf_counter()
            status_text = json.dumps(daemon.status()).encode()
            answers.append((time.perf_counter() - request_time) * 1000)
        page = scrape(daemon)
        ledger = (daemon.run_dir / "ledger.json").stat().st_size
        conditions = len(json.loads(status_text)["conditions"])
    series = sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))
    return [
        Figure(f"{DIFFERENT_LINES} lines of different parts: delay until the last fault is open", "ms", [waited]),
        Figure("  conditions", "", [conditions], aim=200),
        Figure("  series on the metrics page", "", [series]),
        Figure("  size of the ledger", "KiB", [ledger / 1024], aim=512),
        Figure("  size of the status as JSON", "KiB", [len(status_text) / 1024], aim=512),
        Figure("  time to answer status", "ms", answers, aim=250),
    ]


def many_checks() -> list[Figure]:
    """Measure a further Xid and the status, while site checks report hundreds of parts and the log has thousands of
    codes."""
    directory = Path(tempfile.mkdtemp(prefix="healthd."))
    checks = directory / "checks.d"
    checks.mkdir()
    for number in range(CHECKS):
        name = f"broken{number:02}"
        text = CHECK.format(name=name, count=2 * CODES_PER_CHECK, codes=CODES_PER_CHECK)
        (checks / f"{name}.py").write_text(text)
    addresses = [node_tree.GPUS[number % 8].rpartition(".")[0] for number in range(12_000)]
    with Healthd("--interval", "3600", config=f'checks_dir = "{checks}"\n', directory=directory) as daemon:
        daemon.kernel_line(*(xid_line(200 + number, pci, "of any code") for number, pci in enumerate(addresses)))
        daemon.kernel_line(xid_line(79, "0000:df:00"))
        wait_for_text(daemon.log, 0, b"gpu_xid/79 0000:df:00.0: critical, open", 300)
        waited = []
        for number in range(1, ANSWERS + 1):
            log_offset, began = daemon.log.stat().st_size, time.perf_counter()
            daemon.kernel_line(xid_line(48, f"0000:{number:02x}:00", "An uncorrectable double bit error (DBE)"))
            wait_for_text(daemon.log, log_offset, b"critical, open: Xid 48")
            waited.append((time.perf_counter() - began) * 1000)
        answers, status = [], {}
        for _ in range(ANSWERS):
            request_time = time.perf_counter()
            status = daemon.status()
            answers.append((time.perf_counter() - request_time) * 1000)
        ledger = (daemon.run_dir / "ledger.json").stat().st_size
    return [
        Figure(
            f"{CHECKS} checks with {2 * CODES_PER_CHECK} parts each, 12000 codes: conditions",
            "",
            [len(status["conditions"])],
            aim=MAX_CONDITIONS + 1,
        ),
        Figure("  size of the ledger", "KiB", [ledger / 1024], aim=1024),
        Figure("  time to answer status", "ms", answers, aim=250),
        Figure("  delay from a further Xid to its condition", "ms", waited, aim=250),
    ]


def same_line(_number: int) -> str:
    return xid_line(95, "0000:1b:00", "Uncontained: LTC TAG (0x0,0x0). RST: Yes, D-RST: No")


def varying_line(number: int) -> str:
    pci, code = node_tree.GPUS[number % 8].rpartition(".")[0], (13, 31, 94, 95)[number // 8 % 4]
    fault = f"MMU Fault: ENGINE GRAPHICS GPC{number % 7} faulted @ 0x{number:x}_00000000. Fault is of type FAULT_PDE"
    process_fields = f"pid={number % 32768}, name=p{number % 100}"
    return f"NVRM: Xid (PCI:{pci}): {code}, {process_fields}, Ch {number:08x}, intr {number * 7:08x}. {fault}"


def storm(name: str, line: Callable[[int], str]) -> list[Figure]:
    text = "".join(line(number) + "\n" for number in range(STORM_LINES)) + xid_line(79, "0000:df:00") + "\n"
    waited, spent, grown, ledger, answers = [], [], [], [], []
    for _ in range(STORMS):
        with Healthd("--interval", "3600") as daemon:
            before, file = peak_mib(daemon_pid(daemon)), daemon.run_dir / "ledger.json"
            size, log_offset = file.stat().st_size, daemon.log.stat().st_size
            used = cpu_ms(daemon_pid(daemon))
            with open(daemon.kernel_log, "a", encoding="ascii") as log:
                log.write(text)
            began = time.perf_counter()
            while True:
                try:
                    wait_for_text(daemon.log, log_offset, b"gpu_xid/79 0000:df:00.0: critical, open", 0.25)
                    break
                except TimeoutError:
                    request_time = time.perf_counter()
                    daemon.status()
                    answers.append((time.perf_counter() - request_time) * 1000)
            waited.append((time.perf_counter() - began) * 1000)
            spent.append(cpu_ms(daemon_pid(daemon)) - used)
            grown.append(peak_mib(daemon_pid(daemon)) - before)
            daemon.status()  # this saves the lines that the last pass received
            ledger.append((file.stat().st_size - size) / 1024)
    return [
        Figure(f"{STORM_LINES} Xid lines ({name}): delay until the last fault is open", "ms", waited, aim=1000),
        Figure("  CPU of the daemon", "ms", spent),
        Figure("  growth of the daemon's peak RSS", "MiB", grown),
        Figure("  growth of the ledger", "KiB", ledger),
        Figure("  time to answer status meanwhile", "ms", answers),
    ]
