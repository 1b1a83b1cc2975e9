"""What may not grow while a daemon runs, measured while its node is at rest, and the slope of it."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from healthd_daemon import Healthd

# What has to come back to what it was, exactly; the others are memory, which the allocator keeps in pieces.
COUNTED = ("descriptors", "threads", "processes", "files")
WARM = 0.25  # this share of the time goes by before memory is compared: until then all that is kept comes to be there


class Sample(NamedTuple):
    """seconds: since the soak began. round: of the daemon, pid its own: another one has begun anew. values: by name."""

    seconds: float
    round: int
    pid: int
    values: Mapping[str, float]


def measure(daemon: Healthd) -> dict[str, float]:
    """KiB, KB (1,000 bytes), or how many there are."""
    assert daemon.process is not None
    ours, worker, text = daemon.process.pid, daemon.worker_pid(), page(daemon)
    tree = [ours, *descendants(ours)]
    ledger = json.loads((daemon.run_dir / "ledger.json").read_bytes())
    return {
        "descriptors": float(len(os.listdir(f"/proc/{ours}/fd")) + len(os.listdir(f"/proc/{worker}/fd"))),
        "threads": float(sum(len(os.listdir(f"/proc/{pid}/task")) for pid in tree)),
        "processes": float(len(tree)),
        "files": float(sum(1 for path in daemon.run_dir.rglob("*"))),
        "own memory of the daemon, KiB": memory(ours, "Pss_Anon"),
        "own memory of the worker, KiB": memory(worker, "Pss_Anon"),
        "PSS of all processes, KiB": sum(memory(pid, "Pss") for pid in tree),
        "ledger, KB": len(json.dumps(ledger, separators=(",", ":"))) / 1000,
        "series of the page": float(sum(map(is_series, text.splitlines()))),
        "the page, KB": len(text) / 1000,
    }


def is_series(line: bytes) -> bool:
    """Of a page. A counter has a series for each outcome that came once: as many as there are outcomes."""
    name = line.partition(b"{")[0].partition(b" ")[0]
    return bool(name) and not name.startswith(b"#") and not name.endswith(b"_total")


def descendants(pid: int) -> Iterator[int]:
    """Of a process that may end meanwhile: those that are found."""
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from descendants(child)


def memory(pid: int, name: str) -> float:
    """KiB, by /proc/PID/smaps_rollup. Pss_Anon is what a process has made itself: others that come and go do not
    change it as they change what a shared library's pages count for."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def address(daemon: Healthd) -> str:
    """Of the page, as the daemon that runs now logged it last."""
    return [word for word in daemon.log.read_text(errors="replace").split() if word.startswith("http://")][-1]


def page(daemon: Healthd) -> bytes:
    with urllib.request.urlopen(address(daemon), timeout=60) as answer:
        text: bytes = answer.read()
    return text


def what_grew(samples: Sequence[Sample], most_kib: float, most_series: float) -> list[str]:
    """Sentences of one daemon's samples, the first of which is after everything happened once. Numbers of things: the
    last against the first. Memory: the last against what was there when it was warm."""
    if len(samples) < 2:
        return []
    first, last, warm = samples[0], samples[-1], after_warming(samples)
    told = []
    for name in first.values:
        if name in COUNTED:
            limit, since = 0.0, first
        elif name.startswith("own memory"):
            # A worker that was killed is another one, which has not yet looked at everything.
            limit, since = most_kib * (4 if "worker" in name else 1), warm[0]
        elif name.startswith("series"):
            limit, since = most_series, first
        else:
            continue
        if last.values[name] - since.values[name] > limit:
            told.append(f"{name}: {since.values[name]:g} in round {since.round}, {last.values[name]:g} in {last.round}")
    return told


def after_warming(samples: Sequence[Sample]) -> Sequence[Sample]:
    begin, end = samples[0].seconds, samples[-1].seconds
    return [sample for sample in samples if sample.seconds >= begin + WARM * (end - begin)]


def slope(samples: Sequence[Sample], name: str) -> float:
    """By how much it grows in 1,000 rounds: the line of least squares through the samples after the warm-up."""
    points = [(sample.round / 1000, sample.values[name]) for sample in after_warming(samples)]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    across = sum((at - x) ** 2 for at, _ in points)
    return sum((at - x) * (value - y) for at, value in points) / across if across else 0.0


def table(samples: Sequence[Sample]) -> str:
    """First, warm and last value of each, and its slope."""
    warm = after_warming(samples)[0]
    head = (f"round {sample.round}" for sample in (samples[0], warm, samples[-1]))
    lines = [f"{'':32} " + " ".join(f"{word:>12}" for word in (*head, "in 1000"))]
    for name in samples[0].values:
        values = (samples[0].values[name], warm.values[name], samples[-1].values[name])
        lines.append(f"{name:32} " + " ".join(f"{value:12.1f}" for value in values) + f" {slope(samples, name):+12.2f}")
    return "\n".join(lines)
