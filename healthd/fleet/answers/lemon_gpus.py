"""Finds GPUs that keep failing, even after being moved, so that they can be replaced.

The rule is that of `lemons`, with GPUs in place of nodes: a GPU's failures are the conditions that drain and are about
this GPU, its time in service is that of the nodes in which it was, and its rate is compared with that of all GPUs of
the cluster. Unlike a node, a GPU must have failed at least twice. If several GPUs of a node have the same condition at
the same time, its cause is probably not one of them, so they share its weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from healthd.fleet.answers.lemon_evidence import BEFORE_SECONDS, MIN_SHARE, FleetEvidence, Key, Outage, service_spells
from healthd.fleet.answers.study import Study
from healthd.fleet.statistics.domain_faults import domain_fault
from healthd.fleet.statistics.lemon_score import (
    DiscountedCounts,
    FleetPrior,
    Incident,
    Observation,
    Record,
    discounted_counts,
    fit_prior,
    merge_incidents,
    probability,
    score,
)

MIN_EVENTS = 2
UNKNOWN_SHARE = 0.5  # weight of a code without data, as in failure_shares


class GpuPeriod(NamedTuple):
    """A row returned by lemon_gpu_periods.sql."""

    cluster: str
    node: str
    subject: str
    gpu: str
    serial: str | None
    uuid: str | None
    name: str | None
    from_time: int
    until_time: int | None
    ended: str | None


class GpuFault(NamedTuple):
    """A row returned by lemon_gpu_faults.sql."""

    cluster: str
    node: str
    subject: str
    gpu: str
    from_time: int
    time: int
    code: str


@dataclass(frozen=True, slots=True)
class SuspectGpu:
    """Data of one GPU.

    Attributes:
        periods: where it was, in the order of time; the last one is the newest.
        faults: its faults, with their weights, in the order of time.
        incidents: the faults that `merge_incidents` joined.
        counted: the same history, discounted to the end of the window.
    """

    periods: Sequence[GpuPeriod]
    faults: Sequence[tuple[GpuFault, float]]
    incidents: Sequence[Incident]
    counted: DiscountedCounts


def find_lemon_gpus(
    study: Study,
    fleet_evidence: FleetEvidence,
    window: tuple[int, int],
    history_from: int,
    rule: tuple[float, float, float],
) -> dict[str, Any]:
    """Return the key `gpus` of the document for `lemons`.

    Args:
        history_from: start of the history before the window.
        rule: minimum probability, factor on the rate and maximum share of the GPUs, as for nodes.
    """
    periods = study.query("lemon_gpu_periods", GpuPeriod, window_to=window[1])
    faults = [
        row
        for row in study.query("lemon_gpu_faults", GpuFault, window_from=history_from, window_to=window[1])
        if domain_fault(fleet_evidence.domain_faults, row.cluster, row.node, row.code, row.time) is None
    ]
    suspects = suspect_gpus(periods, fault_weights(faults, fleet_evidence.shares), fleet_evidence.outages, window)
    present = {cluster: [gpu for gpu in gpus if is_present(gpu, window[1])] for cluster, gpus in suspects.items()}
    return {
        "recorded": bool(periods),
        "known": sum(map(len, present.values())),
        "lemons": [
            row for cluster in sorted(suspects) for row in lemon_rows(suspects[cluster], present[cluster], window, rule)
        ],
    }


# --- pure


def fault_weights(faults: Sequence[GpuFault], shares: Mapping[str, float]) -> list[tuple[GpuFault, float]]:
    """Return each fault with the probability that it is this GPU's own failure.

    Args:
        shares: for each code, the share of its sightings at which a job failed.
    """
    by_code: dict[tuple[str, str, str], list[GpuFault]] = defaultdict(list)
    for fault in faults:
        by_code[fault.cluster, fault.node, fault.code].append(fault)
    found: list[tuple[GpuFault, float]] = []
    for (_, _, code), code_faults in by_code.items():
        for episode in _episodes(sorted(code_faults, key=lambda fault: fault.time)):
            gpus = len({fault.subject for fault in episode})
            found += [(fault, shares.get(code, UNKNOWN_SHARE) / gpus) for fault in episode]
    return found


def _episodes(faults: Iterable[GpuFault]) -> list[list[GpuFault]]:
    """Divide sorted faults where more than BEFORE_SECONDS lie between two of them."""
    found: list[list[GpuFault]] = []
    for fault in faults:
        if found and fault.time - found[-1][-1].time <= BEFORE_SECONDS:
            found[-1].append(fault)
        else:
            found.append([fault])
    return found


def suspect_gpus(
    periods: Iterable[GpuPeriod],
    faults: Iterable[tuple[GpuFault, float]],
    outages: Mapping[Key, Sequence[Outage]],
    window: tuple[int, int],
) -> dict[str, list[SuspectGpu]]:
    """Return all GPUs by cluster.

    Args:
        periods: sorted by time for each GPU.
        outages: periods in which a node was out of service.
    """
    by_gpu: dict[tuple[str, str], list[GpuPeriod]] = defaultdict(list)
    for period in periods:
        by_gpu[period.cluster, period.gpu].append(period)
    faults_by_gpu: dict[tuple[str, str], list[tuple[GpuFault, float]]] = defaultdict(list)
    for fault, weight in faults:
        if weight >= MIN_SHARE:
            faults_by_gpu[fault.cluster, fault.gpu].append((fault, weight))
    found: dict[str, list[SuspectGpu]] = defaultdict(list)
    for (cluster, gpu), gpu_periods in by_gpu.items():
        gpu_faults = sorted(faults_by_gpu[cluster, gpu])
        incidents = merge_incidents(Observation(fault.time, fault.time, weight) for fault, weight in gpu_faults)
        spells = [spell for period in gpu_periods for spell in _spells(period, outages, window[1])]
        counted = discounted_counts(Record(incidents, spells), window)
        found[cluster].append(SuspectGpu(gpu_periods, gpu_faults, incidents, counted))
    return dict(found)


def _spells(period: GpuPeriod, outages: Mapping[Key, Sequence[Outage]], end: int) -> list[tuple[int, int]]:
    until = end if period.until_time is None else min(period.until_time, end)
    return service_spells(min(period.from_time, until), until, outages.get((period.cluster, period.node), ()))


def is_present(gpu: SuspectGpu, time: int) -> bool:
    """Return True if the GPU was still in a node at this time, as far as the store shows."""
    until = gpu.periods[-1].until_time
    return until is None or until >= time


def lemon_rows(
    gpus: Sequence[SuspectGpu], present: Sequence[SuspectGpu], window: tuple[int, int], rule: tuple[float, float, float]
) -> list[dict[str, Any]]:
    """Return the lemons among the GPUs of one cluster, the most likely first.

    Args:
        present: the GPUs that were in a node at the end of the window. The others are not named.
    """
    min_probability, factor, max_share = rule
    fleet = fit_prior(gpu.counted for gpu in gpus)
    if fleet is None:
        return []
    repeated = [gpu for gpu in present if _has_repeated_failures(gpu, window)]
    rows = [_lemon_row(gpu, fleet, factor) for gpu in repeated]
    probable = [row for row in rows if row["probability"] >= min_probability]
    probable.sort(key=lambda row: (-row["probability"], -row["score"], row["node"], row["subject"]))
    return probable[: max(1, int(len(present) * max_share + 1e-9)) if len(present) > 1 else 0]


def _has_repeated_failures(gpu: SuspectGpu, window: tuple[int, int]) -> bool:
    in_window = any(window[0] <= incident.end_time < window[1] for incident in gpu.incidents)
    return in_window and len(gpu.incidents) >= MIN_EVENTS


def _lemon_row(gpu: SuspectGpu, fleet: FleetPrior, factor: float) -> dict[str, Any]:
    last = gpu.periods[-1]
    return {
        "cluster": last.cluster,
        "node": last.node,
        "subject": last.subject,
        "serial": last.serial,
        "uuid": last.uuid,
        "name": last.name,
        "score": score(gpu.counted, fleet),
        "probability": probability(gpu.counted, fleet, factor),
        "events": len(gpu.incidents),
        "slots": [
            {
                "node": period.node,
                "subject": period.subject,
                "from_time": period.from_time,
                "until_time": period.until_time,
            }
            for period in gpu.periods
        ],
        "evidence": [_incident_row(incident, gpu.faults) for incident in gpu.incidents],
    }


def _incident_row(incident: Incident, faults: Iterable[tuple[GpuFault, float]]) -> dict[str, Any]:
    joined = [fault for fault, _ in faults if incident.start_time <= fault.time <= incident.end_time]
    return {
        "time": incident.start_time,
        "node": joined[0].node,
        "subject": joined[0].subject,
        "codes": sorted({fault.code for fault in joined}),
        "weight": incident.weight,
    }
