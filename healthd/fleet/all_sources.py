"""List of all sources, in the order in which they are read. A source precedes the sources that refer to it."""

from __future__ import annotations

from healthd.fleet.ingest import Source
from healthd.fleet.sources import (
    events,
    exclusions,
    node_facts,
    preemptions,
    prometheus,
    sacct,
    sacctmgr,
    site_tables,
    topology,
)

ALL: tuple[Source, ...] = (
    topology.SOURCE,
    node_facts.SOURCE,
    sacct.SOURCE,
    site_tables.JOBS_FILE,
    exclusions.SOURCE,
    preemptions.SOURCE,
    sacctmgr.NODE_STATES,
    sacctmgr.RESERVATIONS,
    events.SOURCE,
    prometheus.SOURCE,
    site_tables.TICKETS,
    site_tables.FAILURES,
)
