"""Writes a report's five opening sentences for managers: usage, loss, interruptions, main cause, recommendation.

They are computed from the documents that `--json` prints. If a store lacks the data for a fact, the sentence states
that the fact is unknown, and the reason. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from healthd.common.page import plural
from healthd.common.text import printable
from healthd.fleet.answers.causes import CAUSES, USER_PROGRAM
from healthd.fleet.answers.document import Document, format_duration, number, percent

LARGE_GPUS = 1024  # size of the job whose interruptions are reported; typical for training a large model
GPUS_PER_NODE = 8
DAY = 86400
MAX_MTTF_SECONDS = 1000 * 365 * DAY  # as in `rate`
MAX_NODES = 3  # maximum number of nodes named in a sentence; the chapter lists all
# Descriptions of missing data for readers who do not know the store or its commands.
PLAIN_REASONS = {
    "the store has no jobs": "no job records were read",
    "the store has no events": "no records of health checks were read",
    "the store has no data about failing nodes": "no data about failing nodes was read",
}


def opening_sentences(documents: Mapping[str, Document], missing: Mapping[str, str]) -> tuple[str, str, str, str, str]:
    """Return the opening sentences.

    Args:
        documents: each answer's document, by name.
        missing: the reason for each missing answer, by name.
    """
    return (
        _usage_sentence(documents.get("states"), _reason_suffix("states", missing)),
        _loss_sentence(documents.get("goodput"), documents.get("states"), _reason_suffix("goodput", missing)),
        _interruption_sentence(documents.get("rate"), _reason_suffix("rate", missing)),
        _cause_sentence(documents.get("attribution"), _reason_suffix("attribution", missing)),
        _lemon_sentence(documents.get("lemons"), _reason_suffix("lemons", missing)),
    )


def _reason_suffix(name: str, missing: Mapping[str, str]) -> str:
    """Return text like ": no job records were read", or "". The chapter shows the command that adds the data."""
    if name not in missing:
        return ""
    reason = missing[name].partition(": healthd ")[0]
    return f": {PLAIN_REASONS.get(reason, reason)}"


def _usage_sentence(states: Document | None, why: str) -> str:
    if states is None:
        return f"The usage is unknown{why}."
    rows = states["by_state"]
    jobs, gpu_hours = sum(row["jobs"] for row in rows), _gpu_hours(states)
    if not jobs:
        return "No job ended in this period."
    completed = sum(row["gpu_seconds"] for row in rows if row["state"] == "COMPLETED") / 3600
    whole = f"{plural(jobs, 'job')} ended, after {number(float(gpu_hours))} GPU-hours"
    if not gpu_hours:
        return f"{plural(jobs, 'job')} ended; none of them used a GPU."
    return f"{whole}; jobs that completed used {percent(completed / gpu_hours)} of these hours."


def _loss_sentence(goodput: Document | None, states: Document | None, why: str) -> str:
    if goodput is None:
        return f"The cost of failures is unknown{why}."
    first, second = goodput["first_order"], goodput["second_order"]
    hours = first["gpu_hours"] + second["gpu_hours"]
    if not first["jobs"]:
        return "No job is known to have been ended by the infrastructure, so no loss is known."
    lost_share = percent(hours / total) if states is not None and (total := _gpu_hours(states)) else None
    share = f", {lost_share} of the time used" if lost_share is not None else ""
    price = goodput["price_per_gpu_hour"]
    money = f", which cost {number(float(hours * price))}" if price is not None else ""
    ended = f"The infrastructure ended {plural(first['jobs'], 'job')}"
    preemption_text = f" and pre-empted {second['jobs']:,} others for requeues" if second["jobs"] else ""
    return (
        f"{ended}{preemption_text}: about {number(float(hours))} GPU-hours of work were lost{share}{money} "
        f"(a checkpoint every {format_duration(goodput['checkpoint_seconds'])} assumed)."
    )


def _interruption_sentence(rate: Document | None, why: str) -> str:
    if rate is None:
        return f"The interruption rate of a large job is unknown{why}."
    if not rate["node_days"]:
        return "The interruption rate of a large job is unknown: no job on more than 128 GPUs ran in this period."
    nodes = LARGE_GPUS / GPUS_PER_NODE
    low, high = rate["interval"]
    job = f"a job on {LARGE_GPUS:,} GPUs"
    if not rate["failures"]:
        lower_bound = (
            f", so {job} runs at least {_format_interval(nodes, high)} between two interruptions" if high else ""
        )
        return (
            f"No large job was ended by its nodes in {number(float(rate['node_days']))} node-days{lower_bound} "
            "(97.5 % confidence)."  # the upper end of a two-sided 95 % interval
        )
    interval_text = f" (95 % interval: {_format_range(nodes, low, high)})" if low and high else ""
    interval = _format_interval(nodes, rate["r_f"])
    return f"At the measured rate, nodes interrupt {job} every {interval}{interval_text}."


def _format_interval(nodes: float, per_thousand_node_days: float) -> str:
    """Return the time between two interruptions: 1 / (N r_f), as in `rate`."""
    return format_duration(DAY * 1000 / (nodes * per_thousand_node_days))


def _format_range(nodes: float, low: float, high: float) -> str:
    if DAY * 1000 / (nodes * low) > MAX_MTTF_SECONDS:
        return f"{_format_interval(nodes, high)} or longer"
    return f"{_format_interval(nodes, high)} to {_format_interval(nodes, low)}"


def _cause_sentence(attribution: Document | None, why: str) -> str:
    if attribution is None:
        return f"The main cause of failures is unknown{why}."
    infrastructure_causes = [row for row in attribution["causes"] if row["domain"] != USER_PROGRAM and row["jobs"]]
    silent_node_fails, unattributed = attribution["unattributed_node_fails"], attribution["unattributed"]
    unexplained = (
        f"{plural(unattributed, 'job')} failed without a known fault on {'its' if unattributed == 1 else 'their'} nodes"
    )
    infrastructure = silent_node_fails + sum(row["jobs"] for row in infrastructure_causes)
    silent_text = f"{silent_node_fails:,} of the {plural(infrastructure, 'job')} ended by faults or lost nodes"
    if silent_node_fails and not infrastructure_causes:
        return f"Nodes were lost without a known fault, which ended {plural(silent_node_fails, 'job')}; {unexplained}."
    if not infrastructure_causes:
        return (
            f"The main cause of failures is unknown: {unexplained}."
            if unattributed
            else "No job failed because of a known fault."
        )
    top_cause = min(infrastructure_causes, key=lambda row: (-row["jobs"], row["cause"]))
    known_jobs = sum(row["jobs"] for row in infrastructure_causes)
    ended = f"{top_cause['jobs']:,} of the {plural(known_jobs, 'job')} that known faults ended"
    if silent_node_fails > top_cause["jobs"]:
        return (
            f"Most often, a node was lost without a known fault: {silent_text}; among the known faults, "
            f"{_cause_label(top_cause['cause'])} ended the most jobs: {top_cause['jobs']:,}."
        )
    return f"The main cause of failures is {_cause_label(top_cause['cause'])}, which ended {ended}; {unexplained}."


def _lemon_sentence(lemons: Document | None, why: str) -> str:
    if lemons is None:
        return f"The nodes to take out are unknown{why}."
    nodes = [printable(str(row["node"])) for row in lemons["nodes"]]
    if not nodes:
        return "No node fails often enough to be taken out."
    if len(nodes) > MAX_NODES:
        nodes = [*nodes[:MAX_NODES], f"{len(nodes) - MAX_NODES:,} more"]
    reason = "it keeps" if len(nodes) == 1 else "they keep"
    return f"Take out {_join_names(nodes)} for repair: {reason} failing far more often than the others."


def _gpu_hours(states: Document) -> float:
    return float(sum(row["gpu_seconds"] for row in states["by_state"]) / 3600)


def _cause_label(cause: str) -> str:
    return CAUSES[cause].label if cause in CAUSES else printable(cause)


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
