"""What the reader of a piece (a file, what a program printed) is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import tzinfo

from healthd.fleet import times
from healthd.fleet.ingest import IngestError, Run


@dataclass(frozen=True, slots=True)
class Reading:
    """name     of the piece
    cluster  of rows that do not name theirs; "" = not said
    zone     of times that do not name theirs; None: such a time is not read
    begin    what ended before is not wanted; None: everything is
    end      what began at it or later is not wanted; None: everything is
    user     a user's name -> what is kept of it; None: nothing
    unread   counts a row that cannot be read: the number of its line, from 1 (0: of no line), and why
    read     counts rows that were read
    cut      the piece cannot be read to its end, and why; what was before stays
    """

    name: str
    cluster: str = ""
    zone: tzinfo | None = None
    begin: int | None = None
    end: int | None = None
    user: Callable[[str], str | None] = lambda name: name
    unread: Callable[[int, str], None] = lambda line, why: None
    read: Callable[[int], None] = lambda rows: None
    cut: Callable[[str], None] = lambda why: None

    @staticmethod
    def of(run: Run, name: str) -> Reading:
        def unread(line: int, why: str) -> None:
            run.unread(name, line, why)

        def cut(why: str) -> None:
            run.failed.append(run.sentence(IngestError(f"{name}: {why}")))

        return Reading(
            *(name, run.cluster, run.zone, run.from_time, run.to_time),
            user=run.private.user,
            unread=unread,
            read=run.read,
            cut=cut,
        )

    def cluster_of(self, named: str | None = None) -> str:
        """IngestError: neither the row names it nor --cluster."""
        if not (named or self.cluster):
            raise IngestError(f"{self.name}: does not tell the cluster: say --cluster NAME")
        return named or self.cluster

    def seconds(self, text: str) -> int:
        """A time, epoch or ISO. ValueError: it is none, or not one."""
        found = self.maybe_seconds(text)
        if found is None:
            raise ValueError("a time is missing")
        return found

    def maybe_seconds(self, text: str) -> int | None:
        """None where the text says that there is no such time yet."""
        return times.seconds(text, self.zone)

    def wants(self, begin: int, end: int | None) -> bool:
        """Whether it touches the time that was asked for. `end`: None = it lasts."""
        late = self.end is not None and begin >= self.end
        return not late and (self.begin is None or end is None or end >= self.begin)
