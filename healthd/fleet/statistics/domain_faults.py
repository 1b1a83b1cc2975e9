"""Faults of an NVLink domain's switch side, found in the link faults of its nodes. All functions are pure.

On GB200 and GB300 NVL72, the NVLinks of all nodes of a domain lead to the same switches. A fault of a switch, its
cables or the fabric manager makes many nodes report link faults at the same time. These are one fault, and the nodes
are not to blame for it.

Rule (healthd's own): at least MIN_NODES nodes of one domain report link faults that may have begun within
WINDOW_SECONDS. A bad node is one node, and a bad link can have an error at both of its ends, which are two: for the
Xids 144 to 150 (docs.nvidia.com/deploy/xid-errors), NVIDIA's catalogue lists as effects elsewhere only lost packets and
"Other end of link: source of link fatal". The rules in packaging/prometheus/healthd.recording.yml are the same for
alerts.

Times are those of the nodes' clocks. If clocks differ by more than WINDOW_SECONDS, faults at the same time are not
recognised, and the nodes count for themselves; a node whose clock is wrong by less is in the incident. An Xid has the
time of its line in the kernel log. A finding of a check may have begun up to one round earlier.

Left out are faults that a switch cannot cause (a link between a GPU and its CPU, an illegal access by a program), and
warnings: one node whose IMEX service failed warns all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from healthd.common.text import regex

MIN_NODES = 3
WINDOW_SECONDS = 60
ROUND_SECONDS = 300  # default interval of the checks; the store does not have the nodes' settings
# Later link faults of the domain belong to the incident if they begin within this time: the checks that confirm an Xid
# need one round and up to 5 minutes. It equals the time for one incident of a node (weeks.INCIDENT_GAP_SECONDS).
JOIN_SECONDS = 900
# An outage of one of the nodes that begins within this time belongs to the incident, unless the node went DOWN: healthd
# drains only some nodes of a domain (fleet.domain_limit_nodes), and people drain the others later.
OUTAGE_SECONDS = 86400
# Codes of faults that a switch can cause on the other end of its links. Xids: docs.nvidia.com/deploy/xid-errors (74
# NVLink, 136 link training, 144 to 150 and 155 NVLink on Blackwell).
LINK_CODES = (
    "gpu_nvlink/.*|gpu_fabric/(degraded|manager_lost|no_fabric|not_joined|other_domain|unhealthy)"
    "|gpu_xid/(74|136|14[4-9]|150|155|nvlink)"
)
# The driver requests a reset after the Xids above.
CONSEQUENCE_CODES = "gpu_recovery_action/.*|gpu_xid/154"
_LINK = regex(LINK_CODES)
_CONSEQUENCE = regex(CONSEQUENCE_CODES)


class LinkFault(NamedTuple):
    """The beginning of a condition that drains (degraded or critical) on a node, in epoch seconds. `domain` is the UUID
    of the node's NVLink domain, or "" if it is unknown."""

    cluster: str
    node: str
    domain: str
    code: str
    time: int

    @property
    def earliest(self) -> int:
        """The earliest time at which the fault may have begun."""
        return self.time if self.code.startswith("gpu_xid/") else self.time - ROUND_SECONDS


class DomainFault(NamedTuple):
    """A fault of a domain's switch side.

    Attributes:
        start_time: when the first of the faults was seen.
        end_time: link faults of the domain that are seen until then belong to it.
        nodes: the nodes that report it.
    """

    cluster: str
    domain: str
    start_time: int
    end_time: int
    nodes: frozenset[str]


FaultsByNode: TypeAlias = "Mapping[tuple[str, str], Sequence[DomainFault]]"  # by cluster and node


def is_link_fault(code: str) -> bool:
    """Return True if the code is a fault that a switch can cause."""
    return _LINK.fullmatch(code) is not None


def find_domain_faults(faults: Iterable[LinkFault]) -> list[DomainFault]:
    """Return the faults of the domains' switch sides, sorted by time. The order of `faults` does not matter."""
    by_domain: dict[tuple[str, str], list[LinkFault]] = defaultdict(list)
    for fault in faults:
        if fault.domain and is_link_fault(fault.code):
            by_domain[fault.cluster, fault.domain].append(fault)
    found = [
        each
        for (cluster, domain), domain_faults in by_domain.items()
        for each in _find_in_domain(cluster, domain, sorted(domain_faults, key=lambda fault: fault.time))
    ]
    return sorted(found, key=lambda fault: (fault.start_time, fault.cluster, fault.domain))


def _find_in_domain(cluster: str, domain: str, faults: Sequence[LinkFault]) -> Iterator[DomainFault]:
    """Yield the faults of one domain. `faults` are sorted by time.

    Each fault in turn is the first of a minute. `nodes` counts, for each node, its faults from this one on that may
    have begun within the minute.
    """
    times = [fault.time for fault in faults]
    by_earliest = sorted(range(len(faults)), key=lambda index: faults[index].earliest)
    nodes: Counter[str] = Counter()
    counted = 0
    end: int | None = None
    for position, first in enumerate(faults):
        minute_end = first.time + WINDOW_SECONDS
        while counted < len(faults) and faults[by_earliest[counted]].earliest <= minute_end:
            if by_earliest[counted] >= position:
                nodes[faults[by_earliest[counted]].node] += 1
            counted += 1
        if len(nodes) >= MIN_NODES and (end is None or first.time > end):
            candidates = faults[position : bisect_right(times, minute_end + ROUND_SECONDS)]
            end = max(fault.time for fault in candidates if fault.earliest <= minute_end) + JOIN_SECONDS
            members = faults[position : bisect_right(times, end)]
            yield DomainFault(cluster, domain, first.time, end, frozenset(fault.node for fault in members))
        nodes[first.node] -= 1
        if not nodes[first.node]:
            del nodes[first.node]


def faults_by_node(faults: Iterable[DomainFault]) -> FaultsByNode:
    found: dict[tuple[str, str], list[DomainFault]] = defaultdict(list)
    for fault in faults:
        for node in fault.nodes:
            found[fault.cluster, node].append(fault)
    return dict(found)


def domain_fault(faults: FaultsByNode, cluster: str, node: str, code: str, time: int) -> DomainFault | None:
    """Return the fault to which a condition that began or was seen at this time belongs, or None."""
    if not (is_link_fault(code) or _CONSEQUENCE.fullmatch(code)):
        return None
    return next(
        (fault for fault in faults.get((cluster, node), ()) if fault.start_time <= time <= fault.end_time), None
    )


def explains_outage(faults: FaultsByNode, cluster: str, node: str, code: str, start_time: int) -> bool:
    """Return True if an outage of the node belongs to a fault. `code` is a condition's code, "healthd" or "person"."""
    if not (code in ("healthd", "person") or is_link_fault(code) or _CONSEQUENCE.fullmatch(code)):
        return False
    return any(
        fault.start_time <= start_time <= fault.start_time + OUTAGE_SECONDS for fault in faults.get((cluster, node), ())
    )
