"""IMEX: the service that lets jobs share GPU memory between the nodes of an NVLink domain (GB200, GB300).

Rules: jobs that span nodes of an NVLink domain need IMEX on each of these nodes (NVIDIA's IMEX guide). An IMEX that is
idle, absent or half upgraded is normal where Slurm or a container starts IMEX for each job: alarms about such nodes
were false for days (github.com/NVIDIA/aicr/issues/2641, github.com/NVIDIA/DCGM/issues/308). Nothing is therefore
queried unless the settings expect IMEX to run at all times.

The node cannot tell whether a job uses IMEX. With SwitchType=switch/nvidia_imex, Slurm allocates a channel to every
job, also to jobs on one node (slurm.conf(5), SwitchParameters), and starts no service. The channel's device exists only
in the mount namespace of the job (github.com/SchedMD/slurm, src/plugins/switch/nvidia_imex/imex_device.c,
setup_imex_channel). Only slurmctld knows the number of a job's nodes, and healthd does not query it for each job. Set
`expected` where nvidia-imex runs as a service for all jobs.

A service that does not run on this node is degraded. A domain that is not UP is only a warning, because the cause is
usually another node, which has its own condition: `nvidia-imex-ctl -N -j` lists each configured node, and a node that
the daemon cannot reach is UNAVAILABLE. While the nodes have different versions, as during a rolling upgrade, the domain
is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from healthd.api import (
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Seconds,
    Severity,
)
from healthd.host.program import ProgramResult

USES = ""

UNIT = "nvidia-imex.service"
UNIT_COMMAND = ("systemctl", "show", "--property=LoadState,ActiveState", UNIT)
DOMAIN_COMMAND = ("nvidia-imex-ctl", "-N", "-j")
DOMAIN_STATES = ("UP", "DEGRADED", "DOWN")
READY = "READY"
MAX_NAMED_NODES = 4


class Config(CheckSettings, frozen=True):
    """expected         true if IMEX must run at all times on this node; false = not checked
    confirm_seconds  the fault must last this long before it is reported
    """

    expected: bool = False
    confirm_seconds: Seconds = 300.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    if not config.expected:
        yield NothingToCheck("IMEX is not expected")
        return
    seconds = config.timeout_seconds * 0.4  # two programs
    state = _service_state(host, seconds)
    is_active = state in ("active", "reloading")
    yield Observation("imex_active", int(is_active))
    if not is_active:
        yield Finding(
            Severity.DEGRADED,
            "imex/daemon",
            "",
            f"{UNIT} is {state}; jobs need it to share GPU memory with other nodes",
            confirm_seconds=config.confirm_seconds,
            shared_cause=True,
        )
        return
    result = host.run(DOMAIN_COMMAND, seconds)
    if result is None:
        raise RuntimeError("cannot query the IMEX domain: nvidia-imex-ctl is missing")
    domain, nodes, versions = _domain(result)
    not_ready = [f"{name} {status}" for name, status in nodes.items() if status != READY]
    yield Observation("imex_nodes", len(nodes))
    yield Observation("imex_nodes_ready", len(nodes) - len(not_ready))
    yield Observation("imex_versions", len(versions))
    if domain != "UP" and len(versions) < 2:
        named = ", ".join(not_ready[:MAX_NAMED_NODES])
        more = f" and {len(not_ready) - MAX_NAMED_NODES} more" if len(not_ready) > MAX_NAMED_NODES else ""
        yield Finding(
            Severity.WARNING,
            "imex/domain",
            "",
            f"the IMEX domain of {len(nodes)} nodes is {domain}{f': {named}{more}' if named else ''}",
            confirm_seconds=config.confirm_seconds,
            shared_cause=True,
        )


def _domain(result: ProgramResult) -> tuple[str, dict[str, str], frozenset[str]]:
    """Return the domain as `parse` does. The exit status counts only if nothing was reported: no source tells whether
    it is 0 for a domain that is DOWN. Raises RuntimeError or ValueError."""
    try:
        return parse(result.stdout)
    except ValueError:
        if result.status == 0:
            raise
    message = (result.stderr or result.stdout).strip()[:200]
    raise RuntimeError(f"nvidia-imex-ctl: exit status {result.status} (is IMEX_CMD_ENABLED set?): {message}")


def _service_state(host: Host, seconds: float) -> str:
    """Return the ActiveState of the service, or "not installed". Raises RuntimeError or ValueError."""
    result = host.run(UNIT_COMMAND, seconds)
    if result is None:
        raise RuntimeError(f"cannot query {UNIT}: systemctl is missing")
    properties = dict(line.split("=", 1) for line in result.stdout.split("\n") if "=" in line)
    state = properties.get("ActiveState")
    if result.status != 0 or not state or not properties.get("LoadState"):
        raise ValueError(f"systemctl: no state of {UNIT}: {(result.stderr or result.stdout).strip()[:80]!r}")
    return "not installed" if properties["LoadState"] == "not-found" else state


class _Node(msgspec.Struct):
    host: str
    status: str
    version: str = ""


class _Domain(msgspec.Struct):
    status: str
    nodes: dict[str, _Node]


def parse(text: str) -> tuple[str, dict[str, str], frozenset[str]]:
    """Return the domain's state, each node's status by address, and the versions of the nodes that report one, from the
    output of `nvidia-imex-ctl -N -j`.

    Raises ValueError for any other output.
    """
    try:
        domain = msgspec.json.decode(text, type=_Domain)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"nvidia-imex-ctl: not a domain: {text[:60]!r}") from error
    if domain.status not in DOMAIN_STATES or not domain.nodes:
        raise ValueError(f"nvidia-imex-ctl: not a domain: {text[:60]!r}")
    versions = frozenset(node.version for node in domain.nodes.values() if node.version)
    return domain.status, {node.host[:64]: node.status[:32] for node in domain.nodes.values()}, versions


OBSERVATIONS = {
    "imex_active": Meaning("1 if the IMEX service is active, else 0. Only if IMEX is expected."),
    "imex_nodes": Meaning("Nodes in this node's IMEX domain."),
    "imex_nodes_ready": Meaning("Nodes in this node's IMEX domain that are ready."),
    "imex_versions": Meaning("Number of different IMEX versions in this node's IMEX domain."),
}

EXPLAIN = {
    "imex/daemon": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The settings expect IMEX to run at all times, but the service nvidia-imex is not active on this node.",
        "Jobs that share GPU memory between the nodes of an NVLink domain fail on this node, or use a slower network.",
        "Run systemctl status nvidia-imex and journalctl -u nvidia-imex. Its version must match the driver's on all "
        "nodes of the domain. /etc/nvidia-imex/nodes_config.cfg lists these nodes. If Slurm or a container starts IMEX "
        "for each job, set expected = false in [checks.imex].",
        confirm="confirm_seconds",
        shared=True,
    ),
    "imex/domain": Explain(
        Severity.WARNING,
        Clears.PASS,
        "IMEX runs on this node, but its domain is DEGRADED or DOWN: some of the domain's nodes are not ready.",
        "Jobs on these nodes cannot share GPU memory with other nodes.",
        "No action tonight on this node. nvidia-imex-ctl -N shows the nodes that are not ready. Check nvidia-imex, its "
        "version and the network there.",
        confirm="confirm_seconds",
        shared=True,
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.SERVICES)
ENDS_JOB = {"imex/daemon": EndsJob.ALWAYS, "imex/domain": EndsJob.NEVER}
