"""The five opening sentences of a report, for management: usage, loss, interruptions, main cause, recommendation.

Computed from the documents that `--json` prints. The sentences are true for any store: unknown facts are reported as
unknown, with the reason. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from healthd.common.page import plural
from healthd.common.text import printable
from healthd.fleet.answers.causes import CAUSES, USER_PROGRAM
from healthd.fleet.answers.document import Document, number, percent, span

LARGE_GPUS = 1024  # size of the job whose interruptions are given: typical for training a large model
GPUS_OF_A_NODE = 8
DAY = 86400
LONGEST_SECONDS = 1000 * 365 * DAY  # as in `rate`
MOST_NODES = 3  # nodes named in a sentence; the chapter has all
# Missing data in words for readers who know neither stores nor commands.
PLAINLY = {
    "the store has no jobs": "no job records were read",
    "the store has no events": "no records of health checks were read",
    "the store has no data about failing nodes": "no data about failing nodes was read",
}


def opening(told: Mapping[str, Document], untold: Mapping[str, str]) -> tuple[str, str, str, str, str]:
    """Return the opening. documents: name of an answer -> its document. missing: name -> why there is none."""
    return (
        _ran(told.get("states"), _why("states", untold)),
        _lost(told.get("goodput"), told.get("states"), _why("goodput", untold)),
        _interrupted(told.get("rate"), _why("rate", untold)),
        _breaks(told.get("attribution"), _why("attribution", untold)),
        _take_out(told.get("lemons"), _why("lemons", untold)),
    )


def _why(name: str, untold: Mapping[str, str]) -> str:
    """Return ": no job's records were read", or "". The chapter has the command that adds the data."""
    if name not in untold:
        return ""
    reason = untold[name].partition(": healthd ")[0]
    return f": {PLAINLY.get(reason, reason)}"


def _ran(states: Document | None, why: str) -> str:
    if states is None:
        return f"The usage is not known{why}."
    rows = states["by_state"]
    jobs, gpu_hours = sum(row["jobs"] for row in rows), _gpu_hours(states)
    if not jobs:
        return "No job ended in this period."
    completed = sum(row["gpu_seconds"] for row in rows if row["state"] == "COMPLETED") / 3600
    whole = f"{plural(jobs, 'job')} ended, after {number(float(gpu_hours))} GPU-hours"
    if not gpu_hours:
        return f"{plural(jobs, 'job')} ended; none of them used a GPU."
    return f"{whole}; jobs that completed used {percent(completed / gpu_hours)} of these hours."


def _lost(goodput: Document | None, states: Document | None, why: str) -> str:
    if goodput is None:
        return f"The cost of failures is not known{why}."
    first, second = goodput["first_order"], goodput["second_order"]
    hours = first["gpu_hours"] + second["gpu_hours"]
    if not first["jobs"]:
        return "No job is known to have been ended by the infrastructure, so no loss is known."
    of = percent(hours / total) if states is not None and (total := _gpu_hours(states)) else None
    share = f", {of} of the time used" if of is not None else ""
    price = goodput["price_per_gpu_hour"]
    money = f", which cost {number(float(hours * price))}" if price is not None else ""
    ended = f"The infrastructure ended {plural(first['jobs'], 'job')}"
    also = f" and pre-empted {second['jobs']:,} others for requeues" if second["jobs"] else ""
    return (
        f"{ended}{also}: about {number(float(hours))} GPU-hours of work were lost{share}{money} "
        f"(a checkpoint every {span(goodput['checkpoint_seconds'])} assumed)."
    )


def _interrupted(rate: Document | None, why: str) -> str:
    if rate is None:
        return f"The interruption rate of a large job is not known{why}."
    if not rate["node_days"]:
        return "The interruption rate of a large job is not known: no job on more than 128 GPUs ran in this period."
    nodes = LARGE_GPUS / GPUS_OF_A_NODE
    low, high = rate["interval"]
    job = f"a job on {LARGE_GPUS:,} GPUs"
    if not rate["failures"]:
        at_least = f", so {job} runs {_between(nodes, high)} or longer between two" if high else ""
        return (
            f"No large job was ended by its nodes in {number(float(rate['node_days']))} node-days{at_least} "
            "(97.5 % confidence)."  # the upper end of a two-sided 95 % interval
        )
    likely = f" (95 % interval: {_range(nodes, low, high)})" if low and high else ""
    every = _between(nodes, rate["r_f"])
    return f"At the measured rate, {job} is interrupted by its nodes every {every}{likely}."


def _between(nodes: float, per_thousand_node_days: float) -> str:
    """Return the time between two interruptions: 1 / (N r_f), as in `rate`."""
    return span(DAY * 1000 / (nodes * per_thousand_node_days))


def _range(nodes: float, low: float, high: float) -> str:
    if DAY * 1000 / (nodes * low) > LONGEST_SECONDS:
        return f"{_between(nodes, high)} or longer"
    return f"{_between(nodes, high)} to {_between(nodes, low)}"


def _breaks(attribution: Document | None, why: str) -> str:
    if attribution is None:
        return f"The main cause of failures is not known{why}."
    ours = [row for row in attribution["causes"] if row["domain"] != USER_PROGRAM and row["jobs"]]
    silent, unseen = attribution["unattributed_node_fails"], attribution["unattributed"]
    others = f"{plural(unseen, 'job')} failed without a known fault on {'its' if unseen == 1 else 'their'} nodes"
    infrastructure = silent + sum(row["jobs"] for row in ours)
    lost = f"{silent:,} of the {plural(infrastructure, 'job')} ended by faults or lost nodes"
    if silent and not ours:
        return f"Nodes were lost without a known fault, which ended {plural(silent, 'job')}; {others}."
    if not ours:
        return f"The main cause of failures is not known: {others}." if unseen else "No job failed by a known fault."
    most = min(ours, key=lambda row: (-row["jobs"], row["cause"]))
    known = sum(row["jobs"] for row in ours)
    ended = f"{most['jobs']:,} of the {plural(known, 'job')} that known faults ended"
    if silent > most["jobs"]:
        return (
            f"Most often a node was lost without a known fault: {lost}; among the known faults, "
            f"{_named(most['cause'])} ended most jobs: {most['jobs']:,}."
        )
    return f"The main cause of failures is {_named(most['cause'])}, which ended {ended}; {others}."


def _take_out(lemons: Document | None, why: str) -> str:
    if lemons is None:
        return f"The nodes to take out are not known{why}."
    nodes = [printable(str(row["node"])) for row in lemons["nodes"]]
    if not nodes:
        return "No node fails often enough to be taken out."
    if len(nodes) > MOST_NODES:
        nodes = [*nodes[:MOST_NODES], f"{len(nodes) - MOST_NODES:,} more"]
    what = "it keeps" if len(nodes) == 1 else "they keep"
    return f"Take out {_listed(nodes)} for repair: {what} failing far more often than the others."


def _gpu_hours(states: Document) -> float:
    return float(sum(row["gpu_seconds"] for row in states["by_state"]) / 3600)


def _named(cause: str) -> str:
    return CAUSES[cause].words if cause in CAUSES else printable(cause)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
