"""Values that must not grow while a daemon runs, measured while its node is at rest, and their slopes."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from healthd_daemon import Healthd

# These values must return exactly to their earlier values. All other values are memory, of which the allocator keeps
# some.
COUNTED = ("descriptors", "threads", "processes", "files")
WARM = 0.25  # share of the soak's time after which memory is compared; by then, all caches are filled


class Sample(NamedTuple):
    """One measurement. seconds: time since the soak began.

    round, pid: the daemon's; a new pid means that it was restarted.
    """

    seconds: float
    round: int
    pid: int
    values: Mapping[str, float]


def measure(daemon: Healthd) -> dict[str, float]:
    """Measure a daemon. Values are KiB, KB (1,000 bytes) or counts."""
    assert daemon.process is not None
    daemon_pid, worker, text = daemon.process.pid, daemon.worker_pid(), page(daemon)
    tree = [daemon_pid, *descendants(daemon_pid)]
    ledger = json.loads((daemon.run_dir / "ledger.json").read_bytes())
    return {
        "descriptors": float(len(os.listdir(f"/proc/{daemon_pid}/fd")) + len(os.listdir(f"/proc/{worker}/fd"))),
        "threads": float(sum(len(os.listdir(f"/proc/{pid}/task")) for pid in tree)),
        "processes": float(len(tree)),
        "files": float(sum(1 for path in daemon.run_dir.rglob("*"))),
        "own memory of the daemon, KiB": memory(daemon_pid, "Pss_Anon"),
        "own memory of the worker, KiB": memory(worker, "Pss_Anon"),
        "PSS of all processes, KiB": sum(memory(pid, "Pss") for pid in tree),
        "ledger, KB": len(json.dumps(ledger, separators=(",", ":"))) / 1000,
        "series on the metrics page": float(sum(map(is_series, text.splitlines()))),
        "metrics page, KB": len(text) / 1000,
    }


def is_series(line: bytes) -> bool:
    """Return True for a series of a gauge. Counters get a series for each outcome that occurred, so they may grow."""
    name = line.partition(b"{")[0].partition(b" ")[0]
    return bool(name) and not name.startswith(b"#") and not name.endswith(b"_total")


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process. They may end in the meantime."""
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from descendants(child)


def memory(pid: int, name: str) -> float:
    """Return a value of /proc/PID/smaps_rollup in KiB.

    Pss_Anon is memory that the process itself allocated. Other processes do not change it, but they change the
    process's share of libraries.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def address(daemon: Healthd) -> str:
    """Return the address of the metrics page, as last logged by the current daemon."""
    return [word for word in daemon.log.read_text(errors="replace").split() if word.startswith("http://")][-1]


def page(daemon: Healthd) -> bytes:
    with urllib.request.urlopen(address(daemon), timeout=60) as answer:
        text: bytes = answer.read()
    return text


def growth_problems(samples: Sequence[Sample], max_kib: float, max_series: float) -> list[str]:
    """Return one sentence for each value that grew. Every event must have happened once before the first sample.

    For counts, the last sample is compared with the first; for memory, with the first sample after the warm-up.
    """
    if len(samples) < 2:
        return []
    first, last, warm = samples[0], samples[-1], after_warming(samples)
    problems = []
    for name in first.values:
        if name in COUNTED:
            limit, since = 0.0, first
        elif name.startswith("own memory"):
            # After a kill, the worker is a new process that has not yet run all checks.
            limit, since = max_kib * (4 if "worker" in name else 1), warm[0]
        elif name.startswith("series"):
            limit, since = max_series, first
        else:
            continue
        if last.values[name] - since.values[name] > limit:
            problems.append(
                f"{name}: {since.values[name]:g} in round {since.round}, {last.values[name]:g} in {last.round}"
            )
    return problems


def after_warming(samples: Sequence[Sample]) -> Sequence[Sample]:
    begin, end = samples[0].seconds, samples[-1].seconds
    return [sample for sample in samples if sample.seconds >= begin + WARM * (end - begin)]


def slope(samples: Sequence[Sample], name: str) -> float:
    """Return the growth per 1,000 rounds, from the least-squares line through the samples after the warm-up."""
    points = [(sample.round / 1000, sample.values[name]) for sample in after_warming(samples)]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    across = sum((at - x) ** 2 for at, _ in points)
    return sum((at - x) * (value - y) for at, value in points) / across if across else 0.0


def table(samples: Sequence[Sample]) -> str:
    """Return, for each name, the first value, the value after the warm-up, the last value, and the slope."""
    warm = after_warming(samples)[0]
    head = (f"round {sample.round}" for sample in (samples[0], warm, samples[-1]))
    lines = [f"{'':32} " + " ".join(f"{word:>12}" for word in (*head, "per 1000"))]
    for name in samples[0].values:
        values = (samples[0].values[name], warm.values[name], samples[-1].values[name])
        lines.append(f"{name:32} " + " ".join(f"{value:12.1f}" for value in values) + f" {slope(samples, name):+12.2f}")
    return "\n".join(lines)
