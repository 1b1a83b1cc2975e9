"""Tests with kill -9 at random moments of the real daemon and its worker, while the disk fills up and the clock jumps.

Every event is in the stream once, and only lines that the node reports as dropped are missing.
HEALTHD_KILLS_SEED: the seed that a failed run printed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from healthd_daemon import EVERY_SECOND, Healthd, condition, xid_line
from requirements import require_programs, require_root

from healthd.agent.conditions import store
from healthd.agent.settings.registry import built_in_checks
from healthd.events.reader import Cursor, Tally, find, read
from healthd.events.writer import MAX_BYTES

KILLS = (
    pytest.param(20, 1, marks=pytest.mark.timeout(3600)),
    pytest.param(1000, 4, marks=(pytest.mark.timeout(7200), pytest.mark.long)),
)
SEED = int(os.environ.get("HEALTHD_KILLS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
KILLS_PER_REPAIR = 10  # so that a code never has more parts than may have their own condition
ENABLED = ("gpu_xid", "gpu_count", "exec", "mount")  # a kernel log check, one that runs, and two without configuration
FEW_CHECKS = "".join(f"[checks.{name}]\nenabled = false\n" for name in built_in_checks() if name not in ENABLED)
HERE = Path(__file__).parent


@dataclass
class Statistics:
    daemon_kills: int = 0
    worker_kills: int = 0
    rotations: int = 0
    full: int = 0
    jumps: int = 0
    faults: int = 0


class KilledNode:
    """A node whose daemon is killed repeatedly, and all lines of its stream."""

    def __init__(self, folder: Path, disk: Path, preload: Path, kills: int) -> None:
        self.state, self.clock, self.kills = disk / "state", folder / "clock", kills
        self.random = random.Random(f"{SEED} {folder.name}")
        self.figures = Statistics()
        self.ballast = disk / "ballast"
        self.clock.write_text("0")
        self.daemon = Healthd(
            *("--node-name", folder.name, "--state-dir", str(self.state)),
            config=EVERY_SECOND + FEW_CHECKS,
            directory=folder,
            env={"LD_PRELOAD": str(preload), "WRONG_CLOCK": str(self.clock)},
            wait=False,
        )
        self.cursor, self.tally = Cursor(), Tally()
        self.events: list[dict[str, object]] = []
        self.raw: defaultdict[tuple[str, int], set[bytes]] = defaultdict(set)

    def run(self) -> None:
        self.daemon.start()  # lines from before the first start are history, so it waits for that start
        self.daemon.wait_until(lambda s: s["round"].get("seconds", 0) > 0, "the first round is over")
        while self.figures.daemon_kills + self.figures.worker_kills < self.kills:
            self.kill_once()
            if (self.figures.daemon_kills + self.figures.worker_kills) % KILLS_PER_REPAIR == 0:
                self.recover(stop=False)
                assert "done" in self.daemon.request(command="repaired", code="gpu_xid/79")
        self.overflow_outbox()
        self.recover()

    def kill_once(self) -> None:
        self.ensure_running()
        chance = self.random.random()
        if chance < 0.15:
            self.prepare_rotation()
        elif chance < 0.3:
            self.fill_disk()
        elif chance < 0.4:
            self.jump_clock()
        elif chance < 0.6:
            self.ballast.unlink(missing_ok=True)
        for _ in range(self.random.randrange(4)):
            self.log_fault()
            time.sleep(self.random.uniform(0, 0.1))
        time.sleep(self.random.uniform(0, self.random.choice((0.1, 0.5))))
        if self.random.random() < 0.3 and (worker := self.worker_pid()):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                self.figures.worker_kills += 1
            return
        self.daemon.kill()
        self.figures.daemon_kills += 1

    def overflow_outbox(self) -> None:
        """Produce more events on a full disk than fit into the outbox."""
        self.recover(stop=False)
        self.fill_disk()
        for number in range(2000):
            self.daemon.request(command="pause", seconds=600, why=f"{number} " + "x" * 490)
            if number % 50 == 49 and self.daemon.status()["stream"]["dropped_total"]:
                break
        self.daemon.kill()
        self.figures.daemon_kills += 1

    def recover(self, stop: bool = True) -> None:
        """Let the node write all waiting lines, with room on its disk."""
        self.ballast.unlink(missing_ok=True)
        self.ensure_running()
        self.daemon.wait_until(lambda s: s["stream"]["waiting"] < 100, "there is room for more lines")
        last = self.log_fault()
        self.daemon.wait_until(lambda s: condition(s, "gpu_xid/79", last) is not None, "the last line is read")
        self.daemon.wait_until(lambda s: s["stream"]["waiting"] == 0, "no line waits")
        if stop:
            assert self.daemon.stop_when_idle() == 0
        self.read_stream()

    # faults

    def log_fault(self) -> str:
        """Log a fault of a new part. (Lines about one part within 5 s are one event.)"""
        self.figures.faults += 1
        part = f"{self.figures.faults >> 8:04x}:{self.figures.faults & 255:02x}:00"
        self.daemon.kernel_line(xid_line(79, pci=part, when=time.clock_gettime(time.CLOCK_MONOTONIC)))
        return f"{part}.0"

    def prepare_rotation(self) -> None:
        self.read_stream()  # the oldest file will be deleted
        newest = self.state / "events.jsonl"
        if newest.exists() and newest.stat().st_size < MAX_BYTES - 100:
            with suppress(OSError):
                os.truncate(newest, MAX_BYTES - 100)  # a hole takes no room
                self.figures.rotations += 1

    def fill_disk(self) -> None:
        self.figures.full += 1
        with open(self.ballast, "ab", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    def jump_clock(self) -> None:
        self.figures.jumps += 1
        self.clock.write_text(str(self.random.choice((-86400, -3600, 0, 3600, 40 * 86400))))

    def ensure_running(self) -> None:
        process = self.daemon.process
        if process is None or process.poll() is not None:
            self.daemon.start()

    def worker_pid(self) -> int | None:
        """Return the pid of the worker, which the daemon starts first; None while it is being replaced."""
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            with suppress(StopIteration, OSError):
                return self.daemon.worker_pid()
            time.sleep(0.01)
        return None

    # reading

    def read_stream(self) -> None:
        """Read new lines as the centre does, and all lines once more without the reader, by number."""
        self.events += [
            stream_event.fields
            for stream in find([str(self.state)], self.tally)
            for stream_event in read(stream, self.cursor, self.tally)
        ]
        for path in self.state.glob("events.jsonl*"):
            for row in path.read_bytes().split(b"\n"):
                with suppress(ValueError):
                    fields = json.loads(row.strip(b"\0"))
                    self.raw[fields["stream_id"], fields["seq"]].add(row.strip(b"\0"))


@pytest.fixture
def killed_nodes(kills: int, nodes: int, tmp_path: Path) -> Iterator[list[KilledNode]]:
    require_root()
    require_programs("gcc", "mount", packages="gcc mount")
    preload = tmp_path / "wrong_clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", preload, HERE / "wrong_clock.c", "-ldl"], check=True, timeout=240)
    new_nodes, disks = [], []
    try:
        for number in range(nodes):
            folder, disk = tmp_path / f"n{number}", tmp_path / f"disk{number}"
            folder.mkdir()
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "disk", disk], check=True, timeout=240)
            disks.append(disk)
            new_nodes.append(KilledNode(folder, disk, preload, -(-kills // nodes)))
        yield new_nodes
    finally:
        for patient in new_nodes:
            process = patient.daemon.process
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        for disk in disks:
            subprocess.run(["umount", "--lazy", disk], check=True, timeout=240)


@pytest.mark.parametrize(("kills", "nodes"), KILLS)
def test_each_event_is_in_stream_once_across_kills(killed_nodes: list[KilledNode], kills: int, nodes: int) -> None:
    print(f"HEALTHD_KILLS_SEED={SEED}")
    start = time.monotonic()
    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(KilledNode.run, killed_nodes))
    seconds = time.monotonic() - start
    lines = repeats = dropped = 0
    for patient in killed_nodes:
        log = patient.daemon.log.read_text(errors="replace")
        assert "Traceback" not in log, log[-4000:]
        assert {key: raw for key, raw in patient.raw.items() if len(raw) > 1} == {}, "a number was used twice"
        assert list(patient.cursor.sequences.gaps()) == []
        (key,) = patient.cursor.sequences.runs
        path = patient.daemon.run_dir / "ledger.json"
        ledger = store.decode(path.read_text(), str(path))
        dropped_numbers = {n for run in patient.cursor.sequences.dropped[key] for n in range(run[0], run[1] + 1)}
        seqs = [int(str(event["seq"])) for event in patient.events]
        # The last event waits for the next start if the disk was too slow.
        waiting = [event for event in map(json.loads, ledger.outbox.lines) if event["seq"] not in seqs]
        assert [event["event"] for event in waiting] in ([], ["stopped"])
        numbers = sorted([*seqs, *dropped_numbers, *(event["seq"] for event in waiting)])
        assert numbers == list(range(1, ledger.outbox.next_seq)), "each number once: written, dropped or waiting"
        assert dropped_numbers, "the outbox did not overflow"
        reported_dropped = sum(int(str(event["count"])) for event in patient.events if event["event"] == "dropped")
        assert reported_dropped == len(dropped_numbers)
        opened = Counter(str(event["subject"]) for event in patient.events if event["event"] == "opened")
        assert (len(opened), set(opened.values())) == (patient.figures.faults, {1}), "each fault is reported once"
        assert [*patient.events, *waiting][-1]["event"] == "stopped"
        lines, dropped = lines + len(seqs), dropped + len(dropped_numbers)
        repeats += patient.tally.repeats
    all_figures = [patient.figures for patient in killed_nodes]
    total_kills = sum(statistics.daemon_kills + statistics.worker_kills for statistics in all_figures)
    print(
        f"{total_kills} kills ({sum(statistics.worker_kills for statistics in all_figures)} of the worker), "
        f"{lines} events, "
        f"{dropped} dropped and reported, {repeats} repeats, {sum(p.tally.unread for p in killed_nodes)} torn lines, "
        f"{sum(statistics.rotations for statistics in all_figures)} rotations, "
        f"{sum(statistics.full for statistics in all_figures)} full disks, "
        f"{sum(statistics.jumps for statistics in all_figures)} clock jumps, "
        f"{sum(statistics.faults for statistics in all_figures)} faults: {seconds:.0f} s"
    )
    assert total_kills >= kills
