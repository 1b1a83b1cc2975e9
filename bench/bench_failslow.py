"""How right `healthd failslow` is: what it finds, misses, reports of healthy jobs, and whom it blames, on made sets
whose truth is known (bench/failslow/), beside plain BOCD and a sliding window on the same sets. `make bench-failslow`;
docs/bench.md has the figures. Exit status 1: an aim was missed.

Seeds below 100 are those that thresholds were chosen on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from failslow import alibaba
from failslow.baselines import bocd, sliding_window
from failslow.generate import NEGATIVE, POSITIVE, Made, sets
from failslow.score import QUIET_CV, Outcome, aims, blame, outcome, table, timing

from healthd.failslow.analysis import diagnose
from healthd.failslow.model import Diagnosis

SEED = 101
STREAMS = 200  # of operations, whose period is looked for


def healthd(made: Made) -> Diagnosis:
    """What healthd answers of a set, but for reading its file."""
    return diagnose(made.series, made.evidence)


DETECTORS: dict[str, Callable[[Made], Diagnosis]] = {
    "healthd": healthd,
    "plain BOCD": bocd,
    "sliding window": sliding_window,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="How right healthd failslow is, and what it costs.")
    parser.add_argument("--seed", type=int, action="append", help=f"of the sets ({SEED}); several are pooled")
    parser.add_argument("--positive", type=int, default=POSITIVE, help="sets of a seed")
    parser.add_argument("--negative", type=int, default=NEGATIVE, help="sets of a seed")
    parser.add_argument("--alone", action="store_true", help="healthd without the two others beside it")
    parser.add_argument("--sets", action="store_true", help="name each set whose answer is wrong")
    parser.add_argument(
        "--alibaba", type=Path, metavar="DIR", help="mini-batch-time of alibaba/clusterdata, cluster-trace-gpu-v2020"
    )
    parser.add_argument("--rows", type=int, default=0, help="of files whose cost is measured; periods too (0: neither)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables, for docs/bench.md")
    asked = parser.parse_args()
    if asked.alibaba and not (asked.alibaba / "job_1_norm.csv").is_file():
        print(f"bench_failslow: --alibaba: {asked.alibaba} has no job_1_norm.csv", file=sys.stderr)
        return 2
    seeds = asked.seed or [SEED]
    print(f"{machine()}; seeds {', '.join(map(str, seeds))}; load average {os.getloadavg()[0]:.1f}\n")
    results = {}
    for name in ("healthd",) if asked.alone else DETECTORS:
        begun = time.monotonic()
        results[name] = outcomes(name, seeds, asked.positive, asked.negative)
        print(f"{name}: {len(results[name])} sets in {time.monotonic() - begun:.0f} s", flush=True)
    sections = told(results)
    for title, grid in sections:
        print(f"\n{title}")
        show(grid)
    if asked.markdown:
        asked.markdown.write_text("\n".join(markdown(*one) for one in sections), encoding="utf-8")
    if asked.sets:
        each(results["healthd"])
    verdicts: list[tuple[bool | None, str]] = [*aims(results["healthd"])]
    if asked.alibaba:
        verdicts += alibaba.verdicts(
            asked.alibaba, healthd, {name: DETECTORS[name] for name in results if name != "healthd"}
        )
    if asked.rows:
        from failslow import cost, rhythm

        verdicts += [*rhythm.verdicts(seeds[0], STREAMS), *cost.verdicts(asked.rows)]
    print()
    for met, sentence in verdicts:
        print(sentence if met is None else f"{'met' if met else 'MISSED'}: {sentence}")
    if not asked.alibaba:
        print("NOT MEASURED: the public trace of Alibaba was not named: make bench-failslow ALIBABA=DIR")
    return 1 if any(met is False for met, _ in verdicts) else 0


def outcomes(name: str, seeds: Sequence[int], positive: int, negative: int) -> list[Outcome]:
    """Of all sets, in as many processes as there are cores: each makes its sets itself."""
    parts = [(name, seed, positive, negative, part) for seed in seeds for part in range(PARTS)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return [one for some in pool.imap_unordered(_part, parts) for one in some]


PARTS = 8


def _part(asked: tuple[str, int, int, int, int]) -> list[Outcome]:
    name, seed, positive, negative, part = asked
    every = sets(seed, positive, negative, part, PARTS)
    return [outcome(made, DETECTORS[name](made)).without_samples() for made in every]


def told(results: dict[str, list[Outcome]]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows) of each table."""
    sections = []
    for nth, what in ((1, "healthy sets with any report (FPR)"), (2, "slow sets that were missed (FNR)")):
        tables = {name: {row[0]: row for row in table(of)} for name, of in results.items()}
        grid = [["", *tables]]
        for group in tables["healthd"]:
            row = [tables[name][group][nth] for name in tables]
            if any(row):
                grid.append([group, *row])
        sections.append((f"{what}: %, exact 95 % interval, count", grid))
    head = ["", "|onset error|", "within 10", "of 8 to 12 %", "alarm after onset", "|relief error|"]
    for name, of in results.items():
        title = f"{name}: when, in iterations from the true onset; points outside of any slowness in {stray(of)}"
        sections.append((title, [head, *map(list, timing(of))]))
    quiet = [one for one in results["healthd"] if one.made.cv <= QUIET_CV]
    sections.append(("healthd at CV <= 5 %: when", [head, *map(list, timing(quiet))]))
    blamed = [[str(cell) for cell in row] for row in blame(results["healthd"])]
    sections.append(("healthd: who is blamed", [["", "sets", "rightly", "wrongly", "nobody", "cause right"], *blamed]))
    return sections


def markdown(title: str, grid: list[list[str]]) -> str:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in grid]
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def stray(of: Sequence[Outcome]) -> str:
    slow = [one for one in of if one.made.positive]
    return f"{sum(one.stray > 0 for one in slow)} of {len(slow)} slow sets"


def show(grid: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in grid) for column in range(len(grid[0]))]
    for row in grid:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def each(of: Sequence[Outcome]) -> None:
    """A line a set that is not answered rightly, to look at: `sets(SEED)` makes it again by its name."""
    print()
    for one in sorted(of, key=lambda one: one.made.name):
        wrong = []
        if not one.made.positive and one.alarmed:
            wrong.append("reported")
        if one.missed:
            wrong.append("missed")
        if one.made.positive and one.stray:
            wrong.append(f"{one.stray} stray")
        if one.blamed == "wrong":
            wrong.append("wrongly blamed")
        wrong += [f"onset {found.onset:+d}" for found in one.found if not found.within]
        wrong += [f"alarm after {found.delay}" for found in one.found if found.delay > 30]
        if wrong:
            made = one.made
            kind = "gang" if made.gang else "workers"
            causes = "+".join(f"{e.cause.value} {e.shape} {e.height:.0%}" for e in made.events)
            beside = ",".join(sorted(made.beside))
            print(f"{made.name:16} {kind:8} CV {made.cv:.0%} {causes or made.about} ({beside}): {', '.join(wrong)}")


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
