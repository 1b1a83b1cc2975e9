"""Write the logs that `make bench` scans: a GPU node's syslog with a given share of faults."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from healthd.agent.kernel_log.prefix import strip_prefix

CAPTURES = Path(__file__).parents[1] / "tests/data/kernel_lines.jsonl"

# Typical lines of a GPU node's syslog. {t}: seconds since the boot, {n}: a number, {h}: 48 bits in hexadecimal, {u}: a
# user, {k}: a key.
USUAL = (
    "sshd[{n}]: Accepted publickey for {u} from 10.1.{b}.{b} port {n} ssh2: ED25519 SHA256:{k}",
    "sshd[{n}]: pam_unix(sshd:session): session opened for user {u}(uid={n}) by (uid=0)",
    "systemd[1]: Started Session {n} of User {u}.",
    "systemd-logind[812]: New session {n} of user {u}.",
    "slurmd[4211]: launch task StepId={n}.0 request from UID:{n} GID:{n} HOST:10.1.{b}.{b} PORT:{n}",
    "slurmstepd[{n}]: task/cgroup: _memcg_initialize: job: alloc=2063937MB mem.limit=2063937MB memsw.limit=unlimited",
    "kernel: [{t}] IPv6: ADDRCONF(NETDEV_CHANGE): cali{h}: link becomes ready",
    "kernel: [{t}] python[{n}]: segfault at 0 ip 0000{h} sp 0000{h} error 4 in libc.so.6[{h}+156000]",
    "kernel: [{t}] audit: type=1400 audit({n}.{b}:{n}): apparmor=\"STATUS\" operation=\"profile_load\" pid={n}",
    "kernel: [{t}] docker0: port 1(veth{h}) entered blocking state",
    "dockerd[1822]: time=\"2026-10-03T05:56:38.{n}Z\" level=info msg=\"ignoring event\" container={h}{h}{h}",
    "nv-hostengine[2211]: [{n}] DCGM health watch poll {h} finished in {b} ms",
)  # fmt: skip
FAULTS = (
    "NVRM: Xid (PCI:0000:{g}:00): 31, pid={n}, name=python3, Ch 000000{b}, intr 00000000. MMU Fault: ENGINE GRAPHICS "
    "GPCCLIENT_T1_{b} faulted @ 0x7f_{h}. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    "NVRM: Xid (PCI:0000:{g}:00): 94, pid={n}, name=train.py, Contained: SM (0x{b}). RST: No, D-RST: No",
    "pcieport 0000:{g}:01.0: AER: Corrected error received: 0000:{g}:00.0",
    "nvidia-nvswitch{s}: SXid (PCI:0000:{g}:00.0): 22013, Non-fatal, Link {b} Minion Link DLREQ interrupt",
    "nvme nvme{s}: I/O {b} QID {b} timeout, completion polled",
    "mlx5_core 0000:{g}:00.0 ib{s}: Link down",
)
STORM = "NVRM: Xid (PCI:0000:3b:00): 95, pid=4711, name=python3, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No"
GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
MONTH_SECONDS = 28 * 86400


def write(path: Path, size: int, fault_each: int, seed: int = 1) -> int:
    """Write about `size` bytes. One in `fault_each` lines is a fault (0: no line). Returns the number of lines."""
    chance = random.Random(seed)
    average = 127
    step = MONTH_SECONDS / (size / average)
    written = lines = 0
    with open(path, "w") as file:
        for number in itertools.count():
            if written >= size:
                return lines
            fault = fault_each and number % fault_each == fault_each - 1
            text = f"kernel: [{{t}}] {chance.choice(FAULTS)}" if fault else chance.choice(USUAL)
            written += file.write(f"{_date(number * step)} gpu-042 {_filled(text, chance, number * step)}\n")
            lines += 1
    return lines


def write_captures(path: Path, size: int, dated: bool) -> None:
    """Write the captured kernel lines of the tests again and again. Four fifths of them are faults.

    With `dated`, the lines have syslog's prefix of one node and are two seconds apart.
    """
    rows = [json.loads(row) for row in CAPTURES.read_text("utf-8").splitlines()]
    lines = [line for row in rows for line in row["text"].split("\n")]
    if dated:
        lines = [found.text for line in lines if (found := strip_prefix(line, 0.0)) is not None]
    written = 0
    with open(path, "w") as file:
        for number, line in enumerate(itertools.cycle(lines)):
            if written >= size:
                return
            begins = f"{_date(2.0 * number)} gpu-042 kernel: [{88000 + 2 * number:.6f}] " if dated else ""
            written += file.write(f"{begins}{line}\n")


def write_storm(path: Path, lines: int) -> None:
    """Write the same Xid again and again, with ten thousand lines for each second of log time."""
    with open(path, "w") as file:
        for number in range(lines):
            seconds = number / 10_000
            file.write(f"{_date(seconds)} gpu-042 kernel: [{88000 + seconds:.6f}] {STORM}\n")


def _date(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return f"Oct {day + 1:2} {hour:02}:{minute:02}:{second:02}"


def _filled(text: str, chance: random.Random, seconds: float) -> str:
    return text.format(
        t=f"{88000 + seconds:.6f}",
        n=chance.randrange(1000, 4_000_000),
        b=chance.randrange(10, 99),
        s=chance.randrange(4),
        h=f"{chance.getrandbits(48):012x}",
        u=f"user{chance.randrange(300)}",
        k=f"{chance.getrandbits(250):x}",
        g=chance.choice(GPUS),
    )
