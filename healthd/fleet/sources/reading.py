"""Context of the reader of one piece (a file, or the output of a program)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import tzinfo

from healthd.fleet import times
from healthd.fleet.ingest import IngestError, Run


@dataclass(frozen=True, slots=True)
class Reading:
    """Options and callbacks for reading one piece.

    name     of the piece
    cluster  for rows that do not name theirs; "" = not given
    zone     for times without a zone; None: such times are unread
    begin    rows that ended before are skipped; None: no limit
    end      rows that began at this time or later are skipped; None: no limit
    user     maps a user's name to the stored text; None: not stored
    unread   counts a row that cannot be read: its line number, from 1 (0: no line), and the reason
    read     counts rows that were read
    cut      reports why the piece cannot be read to its end; earlier rows are kept
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
    def from_run(run: Run, name: str) -> Reading:
        def unread(line: int, why: str) -> None:
            run.unread(name, line, why)

        def cut(why: str) -> None:
            run.failed.append(run.sentence(IngestError(f"{name}: {why}")))

        return Reading(
            *(name, run.cluster, run.zone, run.from_time, run.to_time),
            user=run.privacy.user,
            unread=unread,
            read=run.read,
            cut=cut,
        )

    def resolve_cluster(self, named: str | None = None) -> str:
        """Return the cluster of a row. Raises IngestError if neither the row nor --cluster names one."""
        if not (named or self.cluster):
            raise IngestError(f"{self.name}: does not name the cluster: add --cluster NAME")
        return named or self.cluster

    def seconds(self, text: str) -> int:
        """Parse a time, epoch or ISO. Raises ValueError if it is invalid or missing."""
        found = self.optional_seconds(text)
        if found is None:
            raise ValueError("a time is missing")
        return found

    def optional_seconds(self, text: str) -> int | None:
        """Parse a time; None if the text means that there is no such time yet."""
        return times.parse_seconds(text, self.zone)

    def is_in_period(self, begin: int, end: int | None) -> bool:
        """Return True if the time overlaps the requested period. end: None = not over."""
        is_after = self.end is not None and begin >= self.end
        return not is_after and (self.begin is None or end is None or end >= self.begin)
