"""The sources in the order in which they are read: what others refer to first."""

from __future__ import annotations

from healthd.fleet.ingest import Source
from healthd.fleet.sources import (
    events,
    exclusions,
    failures_file,
    jobs_file,
    node_facts,
    node_states,
    preemptions,
    prometheus,
    reservations,
    sacct,
    tickets,
    topology,
)

ALL: tuple[Source, ...] = (
    topology.SOURCE,
    node_facts.SOURCE,
    sacct.SOURCE,
    jobs_file.SOURCE,
    exclusions.SOURCE,
    preemptions.SOURCE,
    node_states.SOURCE,
    reservations.SOURCE,
    events.SOURCE,
    prometheus.SOURCE,
    tickets.SOURCE,
    failures_file.SOURCE,
)
