"""Table of `healthd scan`: incidents in order of time, the first cause on top, and notes. Pure.

Bounded: a repeated incident is shown once, with its count. If there are too many, the mildest are only counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from healthd.agent.conditions.incidents import GAP_SECONDS, INDEX_SECONDS, Span, joins, may_join_by_index
from healthd.common.model import Severity
from healthd.common.page import Page, plain, plural
from healthd.scan.events import Seen
from healthd.scan.findings import Judged
from healthd.scan.lines import Tally

MOST_ROWS = 30  # per incident
MOST_OPEN = 50  # per host
MOST_HOSTS = 200  # hosts with open incidents
MOST_INCIDENTS = 300
MOST_NOTES = 100
ROOM = 60  # columns that a message needs after its prefix


RowKey = tuple[str, str, bool]


@dataclass(slots=True)
class Row:
    """One code on one part, proven or not: the `key`. `first`: its first event; `worst`: the event with the displayed
    message; `count`: its lines.
    """

    key: RowKey
    first: Seen
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


def _moment(seen: Seen) -> str:
    if seen.epoch is not None:
        return _local(seen.epoch).strftime("%H:%M:%S")
    return f"{seen.uptime:.3f}" if seen.uptime is not None else f"line {seen.line}"


def _date(seen: Seen) -> str:
    if seen.epoch is not None:
        return _local(seen.epoch).strftime("%Y-%m-%d %H:%M:%S")
    return f"{seen.uptime:.3f} s after boot" if seen.uptime is not None else f"line {seen.line}"


def _local(epoch: float) -> datetime:
    try:
        return datetime.fromtimestamp(epoch)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0)


@dataclass(slots=True, eq=False)
class Incident:
    """`boot`: of its host; `last`: on its host's clock; `hidden_rows`: rows that are only counted; `repeats`: how often
    it repeated; `until`: its last event.
    """

    host: str
    boot: int
    number: int
    about: frozenset[str]
    last: float
    until: Seen
    rows: dict[RowKey, Row] = field(default_factory=dict)
    severity: Severity = Severity.INFO
    left_out: int = 0
    again: int = 0

    @property
    def first(self) -> Row:
        return min(self.rows.values(), key=lambda row: row.line)

    @property
    def worst(self) -> Row:
        return max(self.rows.values(), key=lambda row: (row.severity, -row.line))


@dataclass(slots=True)
class Summary:
    """Result of a log. `hidden_incidents`: the mildest incidents, which are not shown."""

    incidents: dict[object, Incident] = field(default_factory=dict)
    notes: dict[str, Row] = field(default_factory=dict)
    left_out: int = 0


# --- collection


@dataclass(slots=True)
class Open:
    """Open incidents of one host, in the order in which they began, and by the parts that they name.

    earliest: no incident's last event is before this time.
    """

    boot: int = 0
    earliest: float = 0.0
    incidents: dict[int, Incident] = field(default_factory=dict)
    by_part: dict[str, dict[int, Incident]] = field(default_factory=dict)

    def over(self, new: Seen) -> list[Incident]:
        """Remove the incidents that no event can join any more, and return them."""
        found: list[Incident] = []
        if self.boot != new.boot or new.clock - self.earliest > GAP_SECONDS:
            self.earliest = new.clock
            for one in self.incidents.values():
                if one.boot != new.boot or new.clock - one.last > GAP_SECONDS:
                    found.append(one)
                elif one.last < self.earliest:
                    self.earliest = one.last
            for one in found:
                self.remove(one)
            self.boot = new.boot
        while len(self.incidents) > MOST_OPEN:
            oldest = next(iter(self.incidents.values()))
            self.remove(oldest)
            found.append(oldest)
        return found

    def add(self, incident: Incident) -> None:
        self.incidents[incident.number] = incident
        self.earliest = min(self.earliest, incident.last)
        self.name(incident, incident.about)

    def name(self, incident: Incident, about: Iterable[str]) -> None:
        for part in about:
            self.by_part.setdefault(part, {})[incident.number] = incident

    def remove(self, incident: Incident) -> None:
        del self.incidents[incident.number]
        for part in incident.about:
            those = self.by_part[part]
            del those[incident.number]
            if not those:
                del self.by_part[part]

    def joined(self, one: Judged) -> list[Incident]:
        """Return the incidents that a new event belongs to (incidents.joins()): first those that name one of
        its parts.
        """
        about, clock = one.meaning.about, one.seen.clock
        near: Iterable[Incident]
        if len(about) == 1:
            (part,) = about
            near = self.by_part[part].values() if part in self.by_part else ()
        else:
            numbered: dict[int, Incident] = {}
            for part in about:
                numbered.update(self.by_part.get(part, {}))
            near = [numbered[number] for number in sorted(numbered)]
        found = [old for old in near if abs(clock - old.last) <= GAP_SECONDS]
        if not found and may_join_by_index(one.seen.message.event):
            recent = [old for old in self.incidents.values() if abs(clock - old.last) <= INDEX_SECONDS]
            spans = [Span(old.about, old.last) for old in recent]
            return [recent[place] for place in joins(spans, one.seen.message.event, about, clock)]
        return found


def summary(judged: Iterable[Judged]) -> Summary:
    found = Summary()
    open_ones: OrderedDict[str, Open] = OrderedDict()
    for number, one in enumerate(judged):
        seen = one.seen
        here = open_ones.get(seen.host)
        if here is None:
            here = open_ones[seen.host] = Open(seen.boot, seen.clock)
            if len(open_ones) > MOST_HOSTS:
                for old in open_ones.popitem(last=False)[1].incidents.values():
                    _close(found, old)
        else:
            open_ones.move_to_end(seen.host)
            for old in here.over(seen):
                _close(found, old)
        _place(here, one, number)
    for here in open_ones.values():
        for old in here.incidents.values():
            _close(found, old)
    _leave_out(found)
    return found


def _place(here: Open, one: Judged, number: int) -> None:
    seen, meaning = one.seen, one.meaning
    mine, *others = here.joined(one) or (None,)
    if mine is None:
        mine = Incident(seen.host, seen.boot, number, meaning.about, seen.last_clock, seen)
        here.add(mine)
    elif not meaning.about <= mine.about:
        here.name(mine, meaning.about - mine.about)
        mine.about |= meaning.about
    for other in others:
        here.remove(other)
        here.name(mine, other.about - mine.about)
        mine.about |= other.about
        mine.last = max(mine.last, other.last)
        mine.left_out += other.left_out
        for row in other.rows.values():
            _add(mine, row)
    if seen.last_clock > mine.last:
        mine.last = seen.last_clock
    mine.until = seen
    key = (meaning.code, meaning.part, seen.message.event.observed)
    old = mine.rows.get(key)
    if old is not None and meaning.severity <= old.severity:
        old.count += seen.count
    else:
        _add(mine, Row(key, seen, one, meaning.severity, seen.count))


def _add(incident: Incident, row: Row) -> None:
    incident.severity = max(incident.severity, row.severity)
    old = incident.rows.get(row.key)
    if old is None:
        if len(incident.rows) >= MOST_ROWS and row.severity <= min(r.severity for r in incident.rows.values()):
            incident.left_out += 1
            return
        incident.rows[row.key] = row
        if len(incident.rows) > MOST_ROWS:
            mildest = min(incident.rows.values(), key=lambda r: (r.severity, -r.line))
            del incident.rows[mildest.key]
            incident.left_out += 1
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
            elif len(found.notes) < MOST_NOTES:
                found.notes[row.code] = row
        return
    signature = (incident.host, frozenset((row.key, row.severity) for row in incident.rows.values()))
    old = found.incidents.get(signature)
    if old is not None:
        old.again += 1
        old.until = incident.until
        for key, row in incident.rows.items():
            old.rows[key].count += row.count
        return
    found.incidents[signature] = incident
    if len(found.incidents) > 2 * MOST_INCIDENTS:
        _leave_out(found)


def _leave_out(found: Summary) -> None:
    """If there are too many incidents, keep the worst, and the first among equals."""
    best = sorted(found.incidents.items(), key=lambda item: (-item[1].severity, item[1].first.line))
    found.left_out += sum(1 + incident.again for _, incident in best[MOST_INCIDENTS:])
    found.incidents = dict(best[:MOST_INCIDENTS])


# --- output


def table(found: Summary, name: str, tally: Tally, page: Page, unknown: bool = False) -> str:
    """Return the table. `unknown`: list the lines of known drivers that no rule recognises, else only count them."""
    incidents = sorted(found.incidents.values(), key=_order(found))
    lines = [page.heading(_title(found, name, tally))]
    hosts = len({incident.host for incident in incidents}) > 1
    for incident in incidents:
        lines += ["", *_incident(incident, page, hosts)]
    if found.left_out:
        lines += ["", *page.wrap(f"{found.left_out} more incidents, the mildest, are not shown; --json prints all")]
    if tally.drivers and not unknown:
        lines += ["", *page.wrap(f"{unrecognised_words(tally)}; list them with --unknown")]
    if found.notes:
        lines += ["", page.heading("Notes: not a fault of the node by itself")]
        rows = [(f"x{row.count}", row.code, _date(row.first), row.worst.message) for row in found.notes.values()]
        lines += [f"  {line}" for line in _page(page, 2).table(("lines", "code", "first", ""), rows)]
    if tally.drivers and unknown:
        lines += unrecognised_lines(tally, page)
    return "\n".join(lines) + "\n"


def unrecognised_words(tally: Tally) -> str:
    """Return the counts of unrecognised lines: "3 NVRM lines and 1 PCIe line not recognised"."""
    counts = sorted(tally.drivers.items(), key=lambda item: (-item[1], item[0]))
    parts = [plural(count, f"{driver} line") for driver, count in counts]
    listed = parts[-1] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{listed} not recognised"


def unrecognised_lines(tally: Tally, page: Page) -> list[str]:
    """Return the table of the lines that no rule recognises, each text once."""
    rows = [
        (f"x{count}", driver, f"line {line}", plain(text))
        for (driver, text), (line, count) in sorted(tally.texts.items(), key=lambda item: item[1])
    ]
    listed = _page(page, 2).table(("lines", "driver", "first", ""), rows)
    return ["", page.heading(f"{unrecognised_words(tally)}: may report a fault"), *(f"  {line}" for line in listed)]


def _page(page: Page, indent: int) -> Page:
    return Page(page.width - indent, page.colour, page.fold)


def _order(found: Summary) -> Callable[[Incident], tuple[float, int]]:
    """Sort by time if all incidents have one, else in the file's order."""
    dated = all(incident.first.first.epoch is not None for incident in found.incidents.values())
    return lambda incident: ((incident.first.first.epoch or 0.0) if dated else 0.0, incident.first.line)


def _title(found: Summary, name: str, tally: Tally) -> str:
    counted = [_counted(found, severity) for severity in (Severity.CRITICAL, Severity.DEGRADED, Severity.WARNING)]
    words = ", ".join(word for word in counted if word) or ("no known fault" if tally.drivers else "no fault")
    return f"{plain(name)}: {words} in {tally.lines:,} line{'s' if tally.lines != 1 else ''}"


def _counted(found: Summary, severity: Severity) -> str:
    number = sum(1 + one.again for one in found.incidents.values() if one.severity is severity)
    return f"{number} {severity.name.lower()}" if number else ""


def _incident(incident: Incident, page: Page, hosts: bool) -> Iterator[str]:
    worst, first = incident.worst, incident.first.first
    severity = worst.severity.name.lower()
    place = f"  {plain(incident.host)}" if incident.host and hosts else ""
    part = f"  {plain(worst.part)}" if worst.part else ""
    line = f"  (line {first.line})" if first.epoch is not None or first.uptime is not None else ""
    yield f"{page.paint(severity)}  {page.heading(_date(first) + place + part)}{line}"
    rows = sorted(incident.rows.values(), key=lambda row: row.line)
    cells = [_cells(row, worst.part) for row in rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    for row, words in zip(rows, cells, strict=True):
        yield from _row(row, words, widths, page)
    if incident.left_out:
        yield f"  and {incident.left_out} more lines"
    if incident.again:
        times = "repeated once" if incident.again == 1 else f"repeated {incident.again} times"
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
    if not page.fold or page.width - len(before) >= ROOM:
        yield from _after(painted, len(before), message, page)
        return
    yield painted.rstrip()
    yield from page.wrap(message, " " * (4 + widths[0]))


def _after(painted: str, column: int, message: str, page: Page) -> Iterator[str]:
    if not page.fold:
        yield f"{painted}{message}".rstrip()
        return
    first, *rest = Page(page.width - column).wrap(message) or [""]
    yield f"{painted}{first}".rstrip()
    yield from (" " * column + line for line in rest)
