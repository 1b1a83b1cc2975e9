"""What the daemon believes as Prometheus metrics: a page over HTTP, a file for node_exporter's textfile collector.

Names follow the Prometheus rules: prefix healthd_, base units, counters end in _total. A check's observations are
`healthd_<name>`; one that cannot be shown (a name or label that is not allowed, a name that means something else
already, the same series twice) is left out and counted, so that no check breaks the page for the others.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from healthd.guard import METRICS, drop
from healthd.model import Drain, FleetHold, Health, Leave, Observation, ObservationKind, Outcome, Resume, SourceStatus
from healthd.say.status import Snapshot
from healthd.slurm.policy import Owner

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger("healthd")

PREFIX = "healthd_"
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*")  # a colon is for recording rules only
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
RESERVED_LABELS = ("le", "quantile")
REFUSED = "check_observations_refused"
CLIENT_SECONDS = 10.0  # how long a client may be silent
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
CLIENTS = 16  # at a time; others are turned away

Row: TypeAlias = "tuple[Mapping[str, str], float]"


def families(snapshot: Snapshot) -> list[Metric]:
    """healthd's own metrics, then the checks' observations by name. Families without a sample are left out."""
    own = list(_own(snapshot))
    observed, refused = _observed(snapshot, {REFUSED, *(name for metric in own for name in _names(metric))})
    help_text = "Observations of the last run that are no valid metric and are not shown."
    rows = [({"check": check}, float(count)) for check, count in refused]
    return [metric for metric in (*own, _gauge(REFUSED, help_text, rows), *observed) if metric.samples]


def _own(s: Snapshot) -> Iterator[Metric]:
    yield _gauge("build_info", "The version of healthd that runs.", [({"version": s.version}, 1)])
    yield _gauge("mode_info", "What healthd may do: observe, drain or act.", [({"mode": s.mode}, 1)])
    yield _gauge("start_timestamp_seconds", "When this healthd was started.", [({}, s.started)])
    yield from _health(s)
    yield from _checks(s)
    yield from _round(s)
    yield from _kernel_log(s)
    yield from _sources(s)
    yield from _slurm(s)
    yield from _decision(s)
    yield from _workers(s)
    yield from _processes(s)


def _health(s: Snapshot) -> Iterator[Metric]:
    states = [({"state": health.value}, float(health is s.verdict.health)) for health in Health]
    yield _gauge("health", "What the node is: 1 for the state that holds.", states)
    conditions = [
        (
            {
                "check": c.check,
                "code": c.code,
                "subject": c.subject,
                "severity": c.severity.name.lower(),
                "state": c.state.value,
            },
            1.0,
        )
        for c in s.verdict.conditions
    ]
    yield _gauge("condition", "A problem that stands: 1 while it is there.", conditions)
    acks = [({"code": c.code, "subject": c.subject}, c.ack.until) for c in s.verdict.conditions if c.ack]
    until = "Until when a person knows of a problem that stands, by healthd ack: it does not act."
    yield _gauge("condition_acknowledged_until_timestamp_seconds", until, acks)
    # Its own metric: a job that becomes known later must not make another series of the condition. "job" is a label
    # of Prometheus's own.
    jobs = [
        ({"code": c.code, "subject": c.subject, "slurm_job": job}, 1.0)
        for c in s.verdict.conditions
        for job in c.job.split(",")
        if job
    ]
    yield _gauge("condition_slurm_job", "The Slurm jobs at the source of a problem that stands.", jobs)


def _checks(s: Snapshot) -> Iterator[Metric]:
    runs = [({"check": c, "instance": i, "outcome": o}, float(n)) for (c, i, o), n in s.outcomes.items()]
    yield _counter("check_runs_total", "Runs of a check since the start, by how they ended.", runs)
    results = [({"check": r.check, "instance": r.instance}, r) for r in s.results]
    up = [(name, float(r.outcome is Outcome.COMPLETED)) for name, r in results]
    yield _gauge("check_up", "Whether the last run of a check completed: 0 means that it could not look.", up)
    durations = [(name, r.duration_seconds) for name, r in results]
    yield _gauge("check_duration_seconds", "How long the last run of a check took.", durations)
    completed = [(name, r.started + r.duration_seconds) for name, r in results if r.outcome is Outcome.COMPLETED]
    yield _gauge("check_last_completed_timestamp_seconds", "When a check ended, if its last run completed.", completed)


def _round(s: Snapshot) -> Iterator[Metric]:
    r = s.round
    yield _counter("rounds_total", "Rounds of checks begun since the start.", [({}, r.number)])
    yield _gauge("round_started_timestamp_seconds", "When the last round began.", _moment(r.started))
    yield _gauge("round_duration_seconds", "How long the last finished round took.", [({}, r.seconds)])
    yield _gauge("round_next_timestamp_seconds", "When the next round begins.", _moment(r.next_at))
    yield _gauge("round_interval_seconds", "How far apart rounds are meant to be.", [({}, s.interval_seconds)])


def _kernel_log(s: Snapshot) -> Iterator[Metric]:
    k = s.kernel_log
    yield _gauge("kernel_log_info", "Where kernel lines are read from.", [({"from": k.source}, 1)])
    yield _counter("kernel_log_lines_total", "Lines read.", [({}, k.lines_total)])
    yield _counter("kernel_log_events_total", "Lines that say something about the hardware.", [({}, k.events_total)])
    forgotten = "Events that were judged and are no longer kept: what repeats is counted without them."
    yield _counter("kernel_log_events_forgotten_total", forgotten, [({}, s.events_forgotten_total)])
    yield _gauge("kernel_log_last_line_timestamp_seconds", "Time of the last line.", _moment(k.last_line))


def _sources(s: Snapshot) -> Iterator[Metric]:
    """What healthd listens to: kernel_log, journal (which fills what the ring buffer lost), device_removals."""

    def rows(of: Callable[[SourceStatus], float]) -> list[Row]:
        return [({"source": source.source}, float(of(source))) for source in s.sources]

    up = "Whether what is listened to is open and was last read without an error."
    yield _gauge("source_up", up, rows(lambda source: source.up))
    read = [row for row in rows(lambda source: source.last_read) if row[1]]
    yield _gauge("source_last_read_timestamp_seconds", "When it was last read without an error.", read)
    restarts = "Times that it died, or could not be opened, and was opened again or will be."
    yield _counter("source_restarts_total", restarts, rows(lambda source: source.restarts_total))
    overruns = "Times that something was overwritten or dropped before it was read."
    yield _counter("source_overruns_total", overruns, rows(lambda source: source.overruns_total))
    lost = "Lines that were lost so, where their number is known; the journal may still have them."
    yield _counter("source_lost_total", lost, rows(lambda source: source.lost_total))
    malformed = "What was no record, or too long for a line, and is not read."
    yield _counter("source_malformed_total", malformed, rows(lambda source: source.malformed_total))
    rotations = "Times that the file became another or was cut."
    yield _counter("source_rotations_total", rotations, rows(lambda source: source.rotations_total))


def _slurm(s: Snapshot) -> Iterator[Metric]:
    slurm = s.slurm
    commands = [({"command": command, "result": result}, float(n)) for (command, result), n in slurm.commands.items()]
    yield _counter("slurm_commands_total", "Slurm commands run since the start.", commands)
    wanted = "Whether an open condition wants the node drained, in mode observe too."
    yield _gauge("slurm_drain_wanted", wanted, [({}, float(bool(s.verdict.causes)))])
    owner = [({"owner": slurm.owner}, 1.0)] if slurm.owner not in ("", Owner.NOBODY.value) else []
    yield _gauge("slurm_drained_by", "Whose the node's drain in Slurm is, as last read.", owner)
    yield _gauge("slurm_read_timestamp_seconds", "When the node was last read from Slurm.", _moment(slurm.read_at))
    trouble = "Whether Slurm could not be read or changed when last tried."
    yield _gauge("slurm_trouble", trouble, [({}, float(bool(slurm.trouble)))])
    yield from _fleet_limit(s.fleet_hold)


def _fleet_limit(hold: FleetHold | None) -> Iterator[Metric]:
    """Metrics of a drain that waits for the fleet. Without one there are no samples."""
    counted = hold if hold and hold.times else None
    of = (
        {"partition": counted.partition, "kind": "own_hardware" if counted.own_hardware else "shared"}
        if counted
        else {}
    )

    def rows(value: Callable[[FleetHold], float]) -> list[Row]:
        return [(of, float(value(counted)))] if counted else []

    held = "A drain that is wanted is held back: healthd holds as many nodes of the partition as it may."
    yield _gauge("fleet_limit_held", held, rows(lambda _: 1.0))
    yield _gauge(
        "fleet_limit_nodes_held", "Nodes that healthd held drained at the last count.", rows(lambda h: h.drained)
    )
    yield _gauge("fleet_limit_nodes", "Nodes of that partition.", rows(lambda h: h.nodes))
    yield _gauge("fleet_limit_nodes_allowed", "How many of them healthd may hold.", rows(lambda h: h.limit))
    waits = "Since when a drain waits for the fleet."
    yield _gauge("fleet_limit_waiting_since_timestamp_seconds", waits, _moment(hold.since if hold else 0.0))
    again = "When that drain is tried again."
    yield _gauge("fleet_limit_next_try_timestamp_seconds", again, _moment(hold.until if hold else 0.0))


def _decision(s: Snapshot) -> Iterator[Metric]:
    d = s.decision
    actions = [
        ({"action": "drain"}, float(isinstance(d, Drain) and not d.requeue)),
        ({"action": "drain_requeue"}, float(isinstance(d, Drain) and d.requeue)),
        ({"action": "resume"}, float(isinstance(d, Resume))),
        ({"action": "leave"}, float(isinstance(d, Leave))),
    ]
    yield _gauge("decision", "What was last decided: 1 for the action that holds.", actions)
    withheld = "Whether something would be done but for the mode, a pause or a limit."
    yield _gauge("decision_withheld", withheld, [({}, float(isinstance(d, Leave) and bool(d.would)))])
    told = [({"command": command}, float(times)) for command, times in s.commands.items()]
    yield _counter("commands_total", "What people told healthd since the start: ack, repaired, pause, ...", told)
    yield _gauge("paused", "Whether people paused healthd.", [({}, float(s.pause is not None))])
    until = _moment(s.pause.until) if s.pause else []
    yield _gauge("paused_until_timestamp_seconds", "When the pause ends.", until)


def _workers(s: Snapshot) -> Iterator[Metric]:
    quarantined = [({"resource": resource}, 1.0) for resource in s.quarantined]
    yield _gauge("resource_barred", "A lost worker still hangs in it: checks that use it cannot run.", quarantined)
    yield _counter("workers_started_total", "Worker processes started.", [({}, s.workers_started_total)])
    yield _counter("workers_abandoned_total", "Workers that were overdue.", [({}, s.workers_abandoned_total)])
    copies = "Copies of the ledger to the state directory that failed."
    yield _counter("ledger_copy_failures_total", copies, [({}, s.ledger_copy_failures_total)])
    reloads = "Times that changed settings were refused."
    yield _counter("config_reload_failures_total", reloads, [({}, s.config_reload_failures_total)])
    dropped = "What healthd made a mistake with and left out, by where it came from; its log has the traceback."
    yield _counter("inputs_dropped_total", dropped, [({"from": place}, count) for place, count in s.dropped.items()])


def _processes(s: Snapshot) -> Iterator[Metric]:
    """What healthd itself costs. A lost worker may hang in the driver: no file is read that takes its memory lock."""
    memory: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for name, pids in s.processes.items():
        of = "daemon" if name == "daemon" else "children"
        for found in map(_process, pids):
            memory[name] = memory.get(name, 0.0) + found.resident_bytes
            cpu[of] = cpu.get(of, 0.0) + found.cpu_seconds
            if name == "daemon":
                cpu["children"] = cpu.get("children", 0.0) + found.ended_children_seconds
    rows = [({"process": name}, size) for name, size in memory.items() if size]
    yield _gauge("process_resident_memory_bytes", "Resident memory, of all workers together.", rows)
    spent = "CPU time of the daemon, and of its children: workers and Slurm commands, those that ended too."
    yield _counter("process_cpu_seconds_total", spent, [({"process": name}, used) for name, used in cpu.items()])


class _Cost(NamedTuple):
    resident_bytes: float = 0.0
    cpu_seconds: float = 0.0
    ended_children_seconds: float = 0.0


def _process(pid: int) -> _Cost:
    """From /proc/PID/stat (psutil would cost the daemon 3 MiB). Empty for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        user, system, children_user, children_system = (int(ticks) / _TICKS for ticks in fields[11:15])
        return _Cost(int(fields[21]) * _PAGE_BYTES, user + system, children_user + children_system)
    except (OSError, ValueError, IndexError):
        return _Cost()


# --- the checks' observations


def _observed(s: Snapshot, taken: set[str]) -> tuple[list[Metric], list[tuple[str, int]]]:
    """(families by name, [(check, how many observations were refused)])."""
    rows: dict[tuple[str, ObservationKind], dict[tuple[tuple[str, str], ...], float]] = {}
    checks: dict[tuple[str, ObservationKind], set[str]] = {}
    refused: Counter[str] = Counter()
    kinds: dict[str, ObservationKind] = {}
    for result in s.results:
        for observation in result.observations:
            name = observation.name.removesuffix("_total")
            family = (name, observation.kind)
            series = tuple(sorted((label, _clean(value)) for label, value in observation.labels))
            ok = (
                _is_valid(observation)
                and taken.isdisjoint({name, observation.name})
                and kinds.setdefault(name, observation.kind) is observation.kind
                and series not in rows.get(family, {})
            )
            if ok:
                rows.setdefault(family, {})[series] = observation.value
                checks.setdefault(family, set()).add(result.check)
            refused[result.check] += not ok
    metrics = []
    for name, kind in sorted(rows, key=lambda family: family[0]):
        make = _counter if kind is ObservationKind.COUNTER else _gauge
        help_text = f"Read by check {', '.join(sorted(checks[name, kind]))}."
        metrics.append(make(name, help_text, [(dict(series), value) for series, value in rows[name, kind].items()]))
    return metrics, sorted(refused.items())


def _is_valid(observation: Observation) -> bool:
    """A gauge must not look like a counter: in the OpenMetrics text the two would be the same name."""
    labels = [label for label, _value in observation.labels]
    return (
        METRIC_NAME.fullmatch(observation.name) is not None
        and (observation.kind is ObservationKind.COUNTER or not observation.name.endswith("_total"))
        and all(LABEL_NAME.fullmatch(label) and label not in RESERVED_LABELS for label in labels)
        and len(set(labels)) == len(labels)
    )


def _names(metric: Metric) -> set[str]:
    """The names that this metric takes on the page, without the prefix."""
    name = metric.name.removeprefix(PREFIX)
    return {name, f"{name}_total"}


# --- families


def _gauge(name: str, help_text: str, rows: Iterable[Row]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(PREFIX + name, help_text), PREFIX + name, rows)


def _counter(name: str, help_text: str, rows: Iterable[Row]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, help_text)
    return _filled(family, f"{family.name}_total", rows)


def _filled(metric: Metric, sample: str, rows: Iterable[Row]) -> Metric:
    """The samples, sorted, each series once: Prometheus refuses a page on which a series stands twice."""
    series = {tuple(sorted((label, _clean(text)) for label, text in labels.items())): value for labels, value in rows}
    for labels, value in sorted(series.items()):
        metric.add_sample(sample, dict(labels), value)
    return metric


def _moment(moment: float) -> list[Row]:
    """A time that is 0 has not happened yet: no sample."""
    return [({}, moment)] if moment else []


def _clean(text: str) -> str:
    """The text as the text format can carry it: UTF-8, without NUL (Prometheus stops reading there)."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


# --- the page and the file


class _Page:
    """What prometheus_client calls a collector."""

    def __init__(self, get_snapshot: Callable[[], Snapshot]) -> None:
        self._get_snapshot = get_snapshot

    def collect(self) -> Iterable[Metric]:
        return families(self._get_snapshot())


def render(snapshot: Snapshot) -> bytes:
    """The page in the Prometheus text format."""
    from prometheus_client import generate_latest

    return generate_latest(_Page(lambda: snapshot))


def serve(address: tuple[str, int], get_snapshot: Callable[[], Snapshot]) -> tuple[int, Callable[[], None]]:
    """Serve http://ADDRESS/metrics from a thread that sleeps until somebody asks. Port 0: any free one.

    Returns the port and a function that stops it. Raises OSError in one sentence. Other threads call `get_snapshot`.
    """
    import socket
    import socketserver

    from prometheus_client import CollectorRegistry, MetricsHandler

    pages = CollectorRegistry()
    pages.register(_Page(get_snapshot))

    class Handler(MetricsHandler):
        registry = pages
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            if self.path.partition("?")[0] == "/metrics":
                super().do_GET()
            else:
                self.send_error(404, "the page is /metrics")

    class Server(socketserver.ThreadingTCPServer):
        # Not http.server's own: it asks the resolver for our name when it starts, which can hang.
        address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True

        def verify_request(self, _request: object, _client: object) -> bool:
            return threading.active_count() <= CLIENTS

        def handle_error(self, _request: object, client: object) -> None:
            error = sys.exc_info()[1]
            if isinstance(error, Exception) and not isinstance(error, OSError):  # OSError: the client went away
                drop(METRICS, error, client)

    try:
        server = Server(address, Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(f"metrics.listen: cannot listen on {address[0]}:{address[1]}: {why}") from None
    stopping = threading.Event()

    def listen() -> None:
        while not stopping.is_set():
            server.handle_request()

    thread = threading.Thread(target=listen, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        stopping.set()
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes nothing that is in use
        thread.join(1.0)
        server.server_close()

    return int(server.server_address[1]), stop
