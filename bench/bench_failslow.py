"""Measure the accuracy of `healthd failslow` on generated sets with known faults: `make bench-failslow`.

The sets come from bench/failslow/. The script reports detected and missed faults, false alarms on healthy jobs, and how
often the right component is blamed. For comparison, it reports the same for plain BOCD and a sliding window.
docs/bench.md has the figures. Exit status 1: a target was missed. The thresholds were chosen on seeds below 100.
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
STREAMS = 200  # number of operation streams whose period is searched


def healthd(made: Made) -> Diagnosis:
    """Return healthd's diagnosis of a set, without reading its file."""
    return diagnose(made.series, made.evidence)


DETECTORS: dict[str, Callable[[Made], Diagnosis]] = {
    "healthd": healthd,
    "plain BOCD": bocd,
    "sliding window": sliding_window,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure accuracy and cost of healthd failslow.")
    parser.add_argument(
        "--seed", type=int, action="append", help=f"seed of the sets ({SEED}); the results of several seeds are pooled"
    )
    parser.add_argument("--positive", type=int, default=POSITIVE, help="number of slow sets per seed")
    parser.add_argument("--negative", type=int, default=NEGATIVE, help="number of healthy sets per seed")
    parser.add_argument("--alone", action="store_true", help="measure healthd without the two other detectors")
    parser.add_argument("--sets", action="store_true", help="name each set whose answer is wrong")
    parser.add_argument(
        "--alibaba", type=Path, metavar="DIR", help="mini-batch-time of alibaba/clusterdata, cluster-trace-gpu-v2020"
    )
    parser.add_argument(
        "--rows", type=int, default=0, help="number of rows of the files for cost and period (0: skip both)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables for docs/bench.md to FILE")
    args = parser.parse_args()
    if args.alibaba and not (args.alibaba / "job_1_norm.csv").is_file():
        print(f"bench_failslow: --alibaba: {args.alibaba} has no job_1_norm.csv", file=sys.stderr)
        return 2
    seeds = args.seed or [SEED]
    print(f"{machine()}; seeds {', '.join(map(str, seeds))}; load average {os.getloadavg()[0]:.1f}\n")
    results = {}
    for name in ("healthd",) if args.alone else DETECTORS:
        begun = time.monotonic()
        results[name] = outcomes(name, seeds, args.positive, args.negative)
        print(f"{name}: {len(results[name])} sets in {time.monotonic() - begun:.0f} s", flush=True)
    sections = result_tables(results)
    for title, grid in sections:
        print(f"\n{title}")
        show(grid)
    if args.markdown:
        args.markdown.write_text("\n".join(markdown(*section) for section in sections), encoding="utf-8")
    if args.sets:
        show_errors(results["healthd"])
    verdicts: list[tuple[bool | None, str]] = [*aims(results["healthd"])]
    if args.alibaba:
        verdicts += alibaba.verdicts(
            args.alibaba, healthd, {name: DETECTORS[name] for name in results if name != "healthd"}
        )
    if args.rows:
        from failslow import cost, rhythm

        verdicts += [*rhythm.verdicts(seeds[0], STREAMS), *cost.verdicts(args.rows)]
    print()
    for met, sentence in verdicts:
        print(sentence if met is None else f"{'met' if met else 'MISSED'}: {sentence}")
    if not args.alibaba:
        print("NOT MEASURED: the public trace of Alibaba; run make bench-failslow ALIBABA=DIR")
    return 1 if any(met is False for met, _ in verdicts) else 0


def outcomes(name: str, seeds: Sequence[int], positive: int, negative: int) -> list[Outcome]:
    """Return the outcomes of all sets, computed in one process per core. Each process generates its sets itself."""
    parts = [(name, seed, positive, negative, part) for seed in seeds for part in range(PARTS)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return [
            outcome_of_set for part_outcomes in pool.imap_unordered(_part, parts) for outcome_of_set in part_outcomes
        ]


PARTS = 8


def _part(task: tuple[str, int, int, int, int]) -> list[Outcome]:
    name, seed, positive, negative, part = task
    made_sets = sets(seed, positive, negative, part, PARTS)
    return [outcome(made, DETECTORS[name](made)).without_samples() for made in made_sets]


def result_tables(results: dict[str, list[Outcome]]) -> list[tuple[str, list[list[str]]]]:
    """Return (title, rows) of each table."""
    sections = []
    for column, rate_name in ((1, "healthy sets with any report (FPR)"), (2, "slow sets that were missed (FNR)")):
        tables = {
            name: {row[0]: row for row in table(outcomes_of_detector)} for name, outcomes_of_detector in results.items()
        }
        grid = [["", *tables]]
        for group in tables["healthd"]:
            row = [tables[name][group][column] for name in tables]
            if any(row):
                grid.append([group, *row])
        sections.append((f"{rate_name}: %, exact 95 % interval, count", grid))
    head = ["", "|onset error|", "within 10", "of 8 to 12 %", "alarm after onset", "|relief error|"]
    for name, outcomes_of_detector in results.items():
        title = f"{name}: time, in iterations from the true onset; "
        title += f"reports outside of any slowness in {stray(outcomes_of_detector)}"
        sections.append((title, [head, *map(list, timing(outcomes_of_detector))]))
    quiet = [result for result in results["healthd"] if result.made.cv <= QUIET_CV]
    sections.append(("healthd at CV <= 5 %: time", [head, *map(list, timing(quiet))]))
    blamed = [[str(cell) for cell in row] for row in blame(results["healthd"])]
    sections.append(("healthd: blame", [["", "sets", "right", "wrong", "none", "cause right"], *blamed]))
    return sections


def markdown(title: str, grid: list[list[str]]) -> str:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in grid]
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def stray(outcomes_of_detector: Sequence[Outcome]) -> str:
    slow = [result for result in outcomes_of_detector if result.made.positive]
    return f"{sum(result.stray > 0 for result in slow)} of {len(slow)} slow sets"


def show(grid: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in grid) for column in range(len(grid[0]))]
    for row in grid:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_errors(outcomes_of_detector: Sequence[Outcome]) -> None:
    """Print one line for each set with a wrong answer. `sets(SEED)` generates it again by its name."""
    print()
    for result in sorted(outcomes_of_detector, key=lambda result: result.made.name):
        errors = []
        if not result.made.positive and result.alarmed:
            errors.append("reported")
        if result.missed:
            errors.append("missed")
        if result.made.positive and result.stray:
            errors.append(f"{result.stray} stray")
        if result.blamed == "wrong":
            errors.append("wrongly blamed")
        errors += [f"onset {found.onset:+d}" for found in result.found if not found.within]
        errors += [f"alarm after {found.delay}" for found in result.found if found.delay > 30]
        if errors:
            made = result.made
            kind = "gang" if made.gang else "workers"
            causes = "+".join(f"{e.cause.value} {e.shape} {e.height:.0%}" for e in made.events)
            disturbances = ",".join(sorted(made.disturbances))
            print(
                f"{made.name:16} {kind:8} CV {made.cv:.0%} {causes or made.about} ({disturbances}): {', '.join(errors)}"
            )


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
