"""Measure the cost of the fleet store and the accuracy of its answers: `make bench-fleet`.

The cost of these steps is measured: the ingest of a generated history from the text output of Slurm's programs, the
daily rerun, the events, each query, each answer, and all answers at once. All answers at once are measured with all
sources, and without one source at a time. The accuracy is checked against the truth of the history, or against public
data (bench/fleet_truth/). `make bench-fleet JOBS=400000` is a smaller run. docs/bench.md has the figures.

Below --folder, one history is generated and kept for each size, seed and version of the generator. The stores are not
kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import peak
from history.size import FULL, Size, nodes_for, refusal

REPOSITORY = Path(__file__).parents[1]
# Targets in seconds and MiB. GROWTH is the maximum factor for twice the number of jobs.
INGEST_SECONDS, INGEST_MIB, RERUN_SECONDS, GROWTH = 300.0, 1024.0, 10.0, 2.2
ANSWERS_SECONDS, ANSWERS_MIB = 60.0, 1024.0  # for 4 million jobs
RERUNS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one program: wall seconds, CPU seconds (user and system, with children), and peak resident MiB."""

    name: str
    wall: float
    cpu: float
    mib: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of the fleet store.")
    parser.add_argument("--jobs", type=int, default=FULL[0])
    parser.add_argument("--nodes", type=int, help="nodes with 8 GPUs each (default: enough for the jobs)")
    parser.add_argument("--months", type=int, default=FULL[2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "histories", help="folder of histories")
    parser.add_argument("--no-half", action="store_true", help="skip the measurement with half the jobs")
    parser.add_argument("--lanl", type=Path, metavar="FILE", help="LA-UR-05-7318, the failures of LANL's nodes, as CSV")
    parser.add_argument("--answers-of", type=Path, metavar="DB", help="measure only the answers of this store")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if args.answers_of:
        return 0 if print_verdicts(answers_judged(answers(args.answers_of))) else 1
    if args.lanl and not args.lanl.is_file():
        print(f"bench_fleet: --lanl: {args.lanl} does not exist", file=sys.stderr)
        return 2
    size = Size(args.jobs, args.nodes or nodes_for(args.jobs, args.months), args.months, args.seed)
    half = Size(size.jobs // 2, max(4, size.nodes // 2), size.months, size.seed)
    sizes = [size] if args.no_half else [half, size]
    for run_size in sizes:
        if reason := refusal(run_size):
            print(f"bench_fleet: {reason}", file=sys.stderr)
            return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    histories = [history(run_size, args.folder) for run_size in sizes]

    print(f"\n{machine()}; load average at the start {load()}")
    ingests, costs = [], list[Cost]()
    store = Path(tempfile.mkdtemp(prefix="store.", dir=args.folder))
    try:
        for run_size, made in zip(sizes, histories, strict=True):
            shutil.rmtree(store)
            ingests.append(ingest_without_last_day(run_size, made, store))
        costs = reruns(histories[-1], store)
        report_costs = reports_without_each_source(histories[-1], store)
        costs += [*optional_source_costs(histories[-1], store), *queries(store)]
        answer_costs = answers(store)
        truth_verdicts = truths(store, histories[-1] / "truth", args.lanl)
        folder_mib = sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) / (1 << 20)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    print(f"size of the store: {folder_mib:.0f} MiB; load average at the end {load()}\n")
    met = print_verdicts(
        judged(ingests, [cost for cost in costs if cost.name == RERUN], size)
        + answers_judged(answer_costs)
        + reports_judged(report_costs)
        + truth_verdicts
    )
    if args.json:
        all_costs = (*ingests, *costs, *report_costs, *answer_costs)
        figures = [{"name": c.name, "wall": c.wall, "cpu": c.cpu, "mib": c.mib} for c in all_costs]
        args.json.write_text(json.dumps({"machine": machine(), "store_mib": folder_mib, "figures": figures}, indent=1))
    return 0 if met else 1


def print_verdicts(verdicts: list[tuple[bool, str]]) -> bool:
    """Print the verdicts. Returns True if all targets are met."""
    for _, sentence in verdicts:
        print(sentence)
    return all(met for met, _ in verdicts)


# --- the history


def history(size: Size, folder: Path) -> Path:
    """Return the folder of the history. Generate it if it does not exist."""
    made = folder / f"{size.jobs}-jobs-{size.nodes}-nodes-{size.months}-months-seed-{size.seed}-{generator()}"
    if not made.exists():
        flags = (f"--{name}={getattr(size, name)}" for name in ("jobs", "nodes", "months", "seed"))
        print(f"generating {made}", flush=True)
        print(
            row(
                measured(
                    "  total", [sys.executable, str(REPOSITORY / "bench/make_history.py"), f"--out={made}", *flags]
                )
            )
        )
    return made


def generator() -> str:
    """Return a hash of the code that generates the history, because changed code makes another history."""
    whole = sha256()
    for path in (*sorted((REPOSITORY / "bench/history").glob("*.py")), REPOSITORY / "healthd/events/schema.py"):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:8]


# --- measurements

RERUN = "daily rerun with one new day"


def ingest_without_last_day(size: Size, made: Path, store: Path) -> Cost:
    return fleet_ingest(f"sacct: {size.jobs:,} jobs", store, "--sacct", *days(made)[:-1])


def reruns(made: Path, store: Path) -> list[Cost]:
    """Return the cost of three reruns of the command: with one new day, with a changed file of that day, with nothing
    new."""
    costs = []
    for number in range(RERUNS):
        if number:
            os.utime(days(made)[-1])
        costs.append(fleet_ingest(RERUN, store, "--sacct", *days(made)))
    costs.append(fleet_ingest("rerun with nothing new", store, "--sacct", *days(made)))
    return costs


def optional_sources(made: Path) -> dict[str, tuple[str | Path, ...]]:
    """Return the flags of every source except sacct, by name."""
    return {
        "nodes and topology": ("--nodes", made / "nodes.csv", "--topology", made / "topology.conf"),
        "slurmctld's log": ("--slurmctld-log", made / "slurmctld.log"),
        "node states": ("--node-states", made / "node_states.txt"),
        "reservations": ("--reservations", made / "reservations.txt"),
        "tickets": ("--tickets", made / "tickets.csv"),
        "events": ("--events", made / "events"),
    }


def optional_source_costs(made: Path, store: Path) -> list[Cost]:
    sources = optional_sources(made)
    costs = [fleet_ingest(name, store, *flags) for name, flags in sources.items()]
    return [*costs, fleet_ingest("events, nothing new", store, *sources["events"])]


def reports_without_each_source(made: Path, jobs: Path) -> list[Cost]:
    """Return the cost of the report on stores that each lack one source. `jobs` is a store that has only sacct's data.

    The plan of a query depends on which tables are empty. A site without slurmctld's log once got a plan that paired
    every job with every pre-empted job. Histories with all sources did not show this problem.
    """
    sources = optional_sources(made)
    costs = []
    for missing in (*sources, "sacct"):
        store = Path(tempfile.mkdtemp(prefix="without.", dir=jobs.parent))
        try:
            if missing != "sacct":
                shutil.copytree(jobs, store, dirs_exist_ok=True)
            flags = [flag for name, source_flags in sources.items() if name != missing for flag in source_flags]
            fleet_ingest(f"all sources without {missing}", store, *flags)
            bounds = (f"--threads={os.cpu_count()}", f"--memory={ANSWERS_MIB:.0f}")
            costs.append(fleet(f"report without {missing}", "report", "--db", str(store), *bounds, "--json"))
        finally:
            shutil.rmtree(store)
    return costs


def queries(store: Path) -> list[Cost]:
    return [
        fleet(f"query {path.stem}", "query", path.stem, "--db", str(store), "--csv")
        for path in sorted((REPOSITORY / "healthd/fleet/sql").glob("*.sql"))
    ]


ANSWERS_WITHOUT_STORE = ("nccl",)
ALL_ANSWERS = "all answers in one process"


def answers(store: Path) -> list[Cost]:
    """Return the cost of each answer alone, and of all answers on one page.

    The number of threads is the number of cores.
    """
    from healthd.cli.fleet import answers as fleet_answers
    from healthd.cli.fleet import compare, lemons

    # Required options besides the store.
    flags = {"ettr": ("--gpus", "16384"), "compare": halves(store)}
    commands = (*fleet_answers.COMMANDS, *lemons.COMMANDS, *compare.COMMANDS)
    names = [name for name in (command.partition(" ")[2] for command in commands) if name not in ANSWERS_WITHOUT_STORE]
    bounds = ("--db", str(store), f"--threads={os.cpu_count()}", f"--memory={ANSWERS_MIB:.0f}")
    alone = [
        fleet(f"answer {name}", name, *flags.get(name, ()), *bounds, "--json", accepted_statuses=(0, 1))
        for name in names
    ]  # exit status 1 means that the answer has findings
    with tempfile.TemporaryDirectory() as folder:
        return [*alone, fleet(ALL_ANSWERS, "report", *bounds, "--out", folder)]


def halves(store: Path) -> tuple[str, str]:
    """Return the first and the second half of the period that the store covers, as options of `compare`."""
    from healthd.fleet.engine import covered_period
    from healthd.fleet.store import open_for_reading
    from healthd.fleet.tables import TABLES

    with open_for_reading(str(store)) as snapshot:
        period = covered_period({table: snapshot.files(table) for table in TABLES})
    if period is None:
        sys.exit(f"{store}: contains no times")
    times = (period[0], sum(period) // 2, period[1])
    begin, middle, end = (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(timestamp)) for timestamp in times)
    return f"{begin}..{middle}", f"{middle}..{end}"


# A skipped measurement counts as met, so that it does not fail the benchmark. The text shows that it was skipped.
NOT_MEASURED = (
    True,
    "NOT MEASURED: lanl.py needs the public data LA-UR-05-7318: make bench-fleet LANL=FILE",
)


def truths(store: Path, truth: Path, lanl: Path | None) -> list[tuple[bool, str]]:
    """Run each benchmark of bench/fleet_truth. Returns whether each met its targets."""
    history_flags = ("--db", str(store), "--truth", str(truth))
    flags_by_program = {
        "attribution": history_flags,
        "goodput": history_flags,
        "rate": history_flags,
        "compare": (),
        "lemons": ("--folder", str(REPOSITORY / "build" / "histories" / "lemons")),
        "lanl": ("--data", str(lanl)) if lanl else None,
    }
    verdicts = []
    for name, flags in flags_by_program.items():
        path = REPOSITORY / "bench/fleet_truth" / f"{name}.py"
        if flags is None:
            verdicts.append(NOT_MEASURED)
            continue
        print(f"\n{path.relative_to(REPOSITORY)}", flush=True)
        done = subprocess.run([sys.executable, str(path), *flags], env=environment(), check=False)
        verdicts.append(verdict(done.returncode == 0, f"{path.name} (figures above)"))
    return verdicts


def fleet_ingest(name: str, store: Path, *sources: str | Path) -> Cost:
    return fleet(name, "ingest", "--out", str(store), "--cluster", "made", "--timezone", "UTC", *map(str, sources))


def fleet(name: str, *arguments: str, accepted_statuses: Sequence[int] = (0,)) -> Cost:
    cost = measured(name, [sys.executable, "-m", "healthd", "fleet", *arguments], accepted_statuses)
    print(row(cost), flush=True)
    return cost


def days(made: Path) -> list[Path]:
    return sorted((made / "sacct").iterdir())


def measured(name: str, argv: Sequence[str], accepted_statuses: Sequence[int] = (0,)) -> Cost:
    """Run one program to its end. If it fails, exit. The peak memory is that of its largest process (getrusage(2))."""
    with tempfile.TemporaryFile() as errors:
        begun = time.monotonic()
        used = peak.run(argv, errors, environment())
        wall = time.monotonic() - begun
        if used.status not in accepted_statuses:
            errors.seek(0)
            sys.exit(f"{' '.join(argv[:8])} ...: {used.status}\n{errors.read().decode(errors='replace')[-2000:]}")
    return Cost(name, wall, used.cpu_seconds, used.peak_mib)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'bench'}"}


# --- output


def row(cost: Cost) -> str:
    return f"{cost.name:<40} {cost.wall:9.1f} s wall {cost.cpu:9.1f} s CPU {cost.mib:8.0f} MiB"


def judged(ingests: list[Cost], daily: list[Cost], size: Size) -> list[tuple[bool, str]]:
    """Return (met, sentence) for each target."""
    whole, peak = ingests[-1], max(cost.mib for cost in ingests)
    rerun = statistics.median(cost.wall for cost in daily)
    spread = f"{min(cost.wall for cost in daily):.1f} to {max(cost.wall for cost in daily):.1f} s, n={len(daily)}"
    verdicts = [
        (whole.wall <= INGEST_SECONDS, f"ingest of {size.jobs:,} jobs: {whole.wall:.0f} s, aim {INGEST_SECONDS:.0f} s"),
        (peak < INGEST_MIB, f"peak memory of the ingest: {peak:.0f} MiB, aim below {INGEST_MIB:.0f} MiB"),
        (rerun < RERUN_SECONDS, f"daily rerun: {rerun:.1f} s ({spread}), aim below {RERUN_SECONDS:.0f} s"),
    ]
    if len(ingests) == 2:
        clock, work = (after / before for before, after in ((ingests[0].wall, whole.wall), (ingests[0].cpu, whole.cpu)))
        text = f"twice the jobs: {clock:.2f} times the time, {work:.2f} times the CPU time, aim at most {GROWTH}"
        verdicts.append((clock <= GROWTH, text))
    return [verdict(*item) for item in verdicts]


def answers_judged(costs: list[Cost]) -> list[tuple[bool, str]]:
    alone, whole = costs[:-1], costs[-1]
    largest, slowest = max(costs, key=lambda cost: cost.mib), max(alone, key=lambda cost: cost.wall)
    return [
        verdict(whole.wall <= ANSWERS_SECONDS, f"{ALL_ANSWERS}: {whole.wall:.0f} s, aim {ANSWERS_SECONDS:.0f} s"),
        verdict(
            largest.mib < ANSWERS_MIB,
            f"peak memory of the answers: {largest.mib:.0f} MiB ({largest.name}), aim below {ANSWERS_MIB:.0f} MiB",
        ),
        (True, f"slowest single answer: {slowest.name}, {slowest.wall:.1f} s"),
    ]


def reports_judged(costs: list[Cost]) -> list[tuple[bool, str]]:
    """Compare the reports that lack one source with the targets for the report with all sources."""
    slowest, largest = max(costs, key=lambda cost: cost.wall), max(costs, key=lambda cost: cost.mib)
    return [
        verdict(slowest.wall <= ANSWERS_SECONDS, f"{slowest.name}: {slowest.wall:.0f} s, aim {ANSWERS_SECONDS:.0f} s"),
        verdict(largest.mib < ANSWERS_MIB, f"{largest.name}: {largest.mib:.0f} MiB, aim below {ANSWERS_MIB:.0f} MiB"),
    ]


def verdict(met: bool, sentence: str) -> tuple[bool, str]:
    return met, f"{'met' if met else 'MISSED'}: {sentence}"


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}"


def load() -> str:
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


if __name__ == "__main__":
    sys.exit(main())
