"""The table that `healthd scan` prints: incidents in chronological order, and notes. All functions are pure.

Each incident begins with its first cause. A repeated incident is shown once, with its count. If there are too many
incidents, the mildest are only counted, so the output is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from healthd.agent.conditions.incidents import GAP_SECONDS, INDEX_SECONDS, Span, matching_spans, may_join_by_index
from healthd.common.model import Severity
from healthd.common.page import Page, plain, plural
from healthd.scan.events import LogEvent
from healthd.scan.findings import Judged
from healthd.scan.lines import Tally

MAX_ROWS = 30  # maximum number of rows per incident
MAX_OPEN = 50  # maximum number of open incidents per host
MAX_HOSTS = 200  # maximum number of hosts with open incidents
MAX_INCIDENTS = 300
MAX_NOTES = 100
MIN_MESSAGE_WIDTH = 60  # minimum number of columns for a message after its prefix


RowKey = tuple[str, str, bool]


@dataclass(slots=True)
class Row:
    """All events with the same `key`: a code, a part, and whether the lines are proven.

    Attributes:
        first: the first event.
        worst: the event whose message is displayed.
        count: number of lines.
    """

    key: RowKey
    first: LogEvent
    worst: Judged
    severity: Severity
    count: int

    @property
    def code(self) -> str:
        return self.key[0]

    @property
    def part(self) -> str:
        return self.key[1]

    @property
    def line(self) -> int:
        return self.first.line


def _moment(log_event: LogEvent) -> str:
    if log_event.epoch is not None:
        return _local(log_event.epoch).strftime("%H:%M:%S")
    return f"{log_event.uptime:.3f}" if log_event.uptime is not None else f"line {log_event.line}"


def _date(log_event: LogEvent) -> str:
    if log_event.epoch is not None:
        return _local(log_event.epoch).strftime("%Y-%m-%d %H:%M:%S")
    return f"{log_event.uptime:.3f} s after boot" if log_event.uptime is not None else f"line {log_event.line}"


def _local(epoch: float) -> datetime:
    try:
        return datetime.fromtimestamp(epoch)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0)


@dataclass(slots=True, eq=False)
class Incident:
    """An incident on one host.

    Attributes:
        boot: the host's boot.
        last: time of the last event, on the host's clock.
        hidden_rows: number of rows that are not shown.
        repeats: number of repetitions of the incident.
        until: the last event.
    """

    host: str
    boot: int
    number: int
    part_names: frozenset[str]
    last: float
    until: LogEvent
    rows: dict[RowKey, Row] = field(default_factory=dict)
    severity: Severity = Severity.INFO
    hidden_rows: int = 0
    repeats: int = 0

    @property
    def first(self) -> Row:
        return min(self.rows.values(), key=lambda row: row.line)

    @property
    def worst(self) -> Row:
        return max(self.rows.values(), key=lambda row: (row.severity, -row.line))


@dataclass(slots=True)
class Summary:
    """Result for a log. `hidden_incidents` is the number of the mildest incidents, which are not shown."""

    incidents: dict[object, Incident] = field(default_factory=dict)
    notes: dict[str, Row] = field(default_factory=dict)
    hidden_incidents: int = 0


# --- collection


@dataclass(slots=True)
class OpenIncidents:
    """The open incidents on one host, oldest first, indexed by the parts that they name.

    No incident has its last event before the time `earliest`.
    """

    boot: int = 0
    earliest: float = 0.0
    incidents: dict[int, Incident] = field(default_factory=dict)
    by_part: dict[str, dict[int, Incident]] = field(default_factory=dict)

    def take_ended(self, new: LogEvent) -> list[Incident]:
        """Remove and return the incidents that no further event can join."""
        found: list[Incident] = []
        if self.boot != new.boot or new.clock - self.earliest > GAP_SECONDS:
            self.earliest = new.clock
            for incident in self.incidents.values():
                if incident.boot != new.boot or new.clock - incident.last > GAP_SECONDS:
                    found.append(incident)
                elif incident.last < self.earliest:
                    self.earliest = incident.last
            for incident in found:
                self.remove(incident)
            self.boot = new.boot
        while len(self.incidents) > MAX_OPEN:
            oldest = next(iter(self.incidents.values()))
            self.remove(oldest)
            found.append(oldest)
        return found

    def add(self, incident: Incident) -> None:
        self.incidents[incident.number] = incident
        self.earliest = min(self.earliest, incident.last)
        self.index_parts(incident, incident.part_names)

    def index_parts(self, incident: Incident, part_names: Iterable[str]) -> None:
        for part in part_names:
            self.by_part.setdefault(part, {})[incident.number] = incident

    def remove(self, incident: Incident) -> None:
        del self.incidents[incident.number]
        for part in incident.part_names:
            numbered = self.by_part[part]
            del numbered[incident.number]
            if not numbered:
                del self.by_part[part]

    def matching(self, judged: Judged) -> list[Incident]:
        """Return the incidents to which a new event belongs (incidents.joins()).

        Incidents that name the event's parts come first.
        """
        part_names, clock = judged.meaning.part_names, judged.log_event.clock
        candidates: Iterable[Incident]
        if len(part_names) == 1:
            (part,) = part_names
            candidates = self.by_part[part].values() if part in self.by_part else ()
        else:
            numbered: dict[int, Incident] = {}
            for part in part_names:
                numbered.update(self.by_part.get(part, {}))
            candidates = [numbered[number] for number in sorted(numbered)]
        found = [old for old in candidates if abs(clock - old.last) <= GAP_SECONDS]
        if not found and may_join_by_index(judged.log_event.message.event):
            recent = [old for old in self.incidents.values() if abs(clock - old.last) <= INDEX_SECONDS]
            spans = [Span(old.part_names, old.last) for old in recent]
            return [recent[index] for index in matching_spans(spans, judged.log_event.message.event, part_names, clock)]
        return found


def summary(judged: Iterable[Judged]) -> Summary:
    found = Summary()
    open_by_host: OrderedDict[str, OpenIncidents] = OrderedDict()
    for number, event in enumerate(judged):
        log_event = event.log_event
        host_incidents = open_by_host.get(log_event.host)
        if host_incidents is None:
            host_incidents = open_by_host[log_event.host] = OpenIncidents(log_event.boot, log_event.clock)
            if len(open_by_host) > MAX_HOSTS:
                for old in open_by_host.popitem(last=False)[1].incidents.values():
                    _close(found, old)
        else:
            open_by_host.move_to_end(log_event.host)
            for old in host_incidents.take_ended(log_event):
                _close(found, old)
        _add_event(host_incidents, event, number)
    for host_incidents in open_by_host.values():
        for old in host_incidents.incidents.values():
            _close(found, old)
    _leave_out(found)
    return found


def _add_event(host_incidents: OpenIncidents, event: Judged, number: int) -> None:
    log_event, meaning = event.log_event, event.meaning
    incident, *other_incidents = host_incidents.matching(event) or (None,)
    if incident is None:
        incident = Incident(log_event.host, log_event.boot, number, meaning.part_names, log_event.last_clock, log_event)
        host_incidents.add(incident)
    elif not meaning.part_names <= incident.part_names:
        host_incidents.index_parts(incident, meaning.part_names - incident.part_names)
        incident.part_names |= meaning.part_names
    for other in other_incidents:
        host_incidents.remove(other)
        host_incidents.index_parts(incident, other.part_names - incident.part_names)
        incident.part_names |= other.part_names
        incident.last = max(incident.last, other.last)
        incident.hidden_rows += other.hidden_rows
        for row in other.rows.values():
            _add(incident, row)
    if log_event.last_clock > incident.last:
        incident.last = log_event.last_clock
    incident.until = log_event
    key = (meaning.code, meaning.part, log_event.message.event.observed)
    old = incident.rows.get(key)
    if old is not None and meaning.severity <= old.severity:
        old.count += log_event.count
    else:
        _add(incident, Row(key, log_event, event, meaning.severity, log_event.count))


def _add(incident: Incident, row: Row) -> None:
    incident.severity = max(incident.severity, row.severity)
    old = incident.rows.get(row.key)
    if old is None:
        if len(incident.rows) >= MAX_ROWS and row.severity <= min(r.severity for r in incident.rows.values()):
            incident.hidden_rows += 1
            return
        incident.rows[row.key] = row
        if len(incident.rows) > MAX_ROWS:
            mildest = min(incident.rows.values(), key=lambda r: (r.severity, -r.line))
            del incident.rows[mildest.key]
            incident.hidden_rows += 1
        return
    old.count += row.count
    if row.severity > old.severity:
        old.severity, old.worst = row.severity, row.worst


def _close(found: Summary, incident: Incident) -> None:
    if incident.severity is Severity.INFO:
        for row in incident.rows.values():
            note = found.notes.get(row.code)
            if note is not None:
                note.count += row.count
            elif len(found.notes) < MAX_NOTES:
                found.notes[row.code] = row
        return
    signature = (incident.host, frozenset((row.key, row.severity) for row in incident.rows.values()))
    old = found.incidents.get(signature)
    if old is not None:
        old.repeats += 1
        old.until = incident.until
        for key, row in incident.rows.items():
            old.rows[key].count += row.count
        return
    found.incidents[signature] = incident
    if len(found.incidents) > 2 * MAX_INCIDENTS:
        _leave_out(found)


def _leave_out(found: Summary) -> None:
    """If there are too many incidents, keep the most severe. Among equally severe incidents, keep the earliest."""
    best = sorted(found.incidents.items(), key=lambda item: (-item[1].severity, item[1].first.line))
    found.hidden_incidents += sum(1 + incident.repeats for _, incident in best[MAX_INCIDENTS:])
    found.incidents = dict(best[:MAX_INCIDENTS])


# --- output


def table(found: Summary, name: str, tally: Tally, page: Page, unknown: bool = False) -> str:
    """Return the table.

    Args:
        unknown: list the lines from known drivers that no rule recognises. Otherwise, only count them.
    """
    incidents = sorted(found.incidents.values(), key=_order(found))
    lines = [page.heading(_title(found, name, tally))]
    hosts = len({incident.host for incident in incidents}) > 1
    for incident in incidents:
        lines += ["", *_incident_lines(incident, page, hosts)]
    if found.hidden_incidents:
        lines += [
            "",
            *page.wrap(f"{found.hidden_incidents} less severe incidents are not shown; --json prints all"),
        ]
    if tally.drivers and not unknown:
        lines += ["", *page.wrap(f"{unrecognised_summary(tally)}; list them with --unknown")]
    if found.notes:
        lines += ["", page.heading("Notes: these lines are not faults by themselves")]
        rows = [(f"x{row.count}", row.code, _date(row.first), row.worst.message) for row in found.notes.values()]
        lines += [f"  {line}" for line in _page(page, 2).table(("lines", "code", "first", ""), rows)]
    if tally.drivers and unknown:
        lines += unrecognised_lines(tally, page)
    return "\n".join(lines) + "\n"


def unrecognised_summary(tally: Tally) -> str:
    """Return the counts of unrecognised lines, such as "3 NVRM lines and 1 PCIe line not recognised"."""
    counts = sorted(tally.drivers.items(), key=lambda item: (-item[1], item[0]))
    parts = [plural(count, f"{driver} line") for driver, count in counts]
    listed = parts[-1] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{listed} not recognised"


def unrecognised_lines(tally: Tally, page: Page) -> list[str]:
    """Return a table of the lines that no rule recognises, with each text once."""
    rows = [
        (f"x{count}", driver, f"line {line}", plain(text))
        for (driver, text), (line, count) in sorted(tally.texts.items(), key=lambda item: item[1])
    ]
    listed = _page(page, 2).table(("lines", "driver", "first", ""), rows)
    return ["", page.heading(f"{unrecognised_summary(tally)}; may be faults"), *(f"  {line}" for line in listed)]


def _page(page: Page, indent: int) -> Page:
    return Page(page.width - indent, page.colour, page.fold)


def _order(found: Summary) -> Callable[[Incident], tuple[float, int]]:
    """Return a sort key for an incident: its time if all incidents have one, otherwise its order in the file."""
    dated = all(incident.first.first.epoch is not None for incident in found.incidents.values())
    return lambda incident: ((incident.first.first.epoch or 0.0) if dated else 0.0, incident.first.line)


def _title(found: Summary, name: str, tally: Tally) -> str:
    counted = [_count_text(found, severity) for severity in (Severity.CRITICAL, Severity.DEGRADED, Severity.WARNING)]
    summary_text = ", ".join(word for word in counted if word) or ("no known fault" if tally.drivers else "no fault")
    return f"{plain(name)}: {summary_text} in {tally.lines:,} line{'s' if tally.lines != 1 else ''}"


def _count_text(found: Summary, severity: Severity) -> str:
    number = sum(1 + incident.repeats for incident in found.incidents.values() if incident.severity is severity)
    return f"{number} {severity.name.lower()}" if number else ""


def _incident_lines(incident: Incident, page: Page, hosts: bool) -> Iterator[str]:
    worst, first = incident.worst, incident.first.first
    severity = worst.severity.name.lower()
    host_text = f"  {plain(incident.host)}" if incident.host and hosts else ""
    part = f"  {plain(worst.part)}" if worst.part else ""
    line = f"  (line {first.line})" if first.epoch is not None or first.uptime is not None else ""
    yield f"{page.paint(severity)}  {page.heading(_date(first) + host_text + part)}{line}"
    rows = sorted(incident.rows.values(), key=lambda row: row.line)
    cells = [_cells(row, worst.part) for row in rows]
    widths = [max(len(row[host_text]) for row in cells) for host_text in range(len(cells[0]))]
    for row, row_cells in zip(rows, cells, strict=True):
        yield from _row(row, row_cells, widths, page)
    if incident.hidden_rows:
        yield f"  and {incident.hidden_rows} more lines"
    if incident.repeats:
        times = "repeated once" if incident.repeats == 1 else f"repeated {incident.repeats} times"
        yield f"  {times}, last {_date(incident.until)} (line {incident.until.line})"
    yield f"  healthd explain {worst.code}"


def _cells(row: Row, part: str) -> tuple[str, ...]:
    elsewhere = row.part if row.part != part else ""
    return (
        _moment(row.first),
        row.severity.name.lower(),
        f"x{row.count}" if row.count > 1 else "",
        plain(row.code),
        plain(elsewhere),
    )


def _row(row: Row, cells: tuple[str, ...], widths: list[int], page: Page) -> Iterator[str]:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True) if width]
    before = "  " + "  ".join(padded) + "  "
    severity = row.severity.name.lower()
    painted = before.replace(f"  {severity}", f"  {page.paint(severity)}", 1)
    message = plain(row.worst.message)
    if not page.fold or page.width - len(before) >= MIN_MESSAGE_WIDTH:
        yield from _message_lines(painted, len(before), message, page)
        return
    yield painted.rstrip()
    yield from page.wrap(message, " " * (4 + widths[0]))


def _message_lines(painted: str, column: int, message: str, page: Page) -> Iterator[str]:
    if not page.fold:
        yield f"{painted}{message}".rstrip()
        return
    first, *more_lines = Page(page.width - column).wrap(message) or [""]
    yield f"{painted}{first}".rstrip()
    yield from (" " * column + line for line in more_lines)
