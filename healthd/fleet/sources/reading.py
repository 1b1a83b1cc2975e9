"""The context in which one piece (a file, or a program's output) is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import tzinfo

from healthd.fleet import times
from healthd.fleet.ingest import IngestError, Run


@dataclass(frozen=True, slots=True)
class Reading:
    """Options and callbacks for reading one piece.

    Attributes:
        name: name of the piece.
        cluster: cluster for rows that do not name one; "" if not given.
        zone: time zone for times without one; None if such times are unread.
        begin: rows that ended earlier are skipped; None for no limit.
        end: rows that began at this time or later are skipped; None for no limit.
        user: maps a user's name to the stored text, or to None if it is not stored.
        unread: counts an unreadable row, given its line number (from 1; 0 if there is none) and the reason.
        read: counts rows that were read.
        cut: reports why the rest of the piece cannot be read; earlier rows are kept.
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
        """Return a row's cluster. Raises IngestError if neither the row nor --cluster names one."""
        if not (named or self.cluster):
            raise IngestError(f"{self.name}: does not name the cluster; add --cluster NAME")
        return named or self.cluster

    def seconds(self, text: str) -> int:
        """Parse a time in epoch seconds or ISO format. Raises ValueError if it is invalid or missing."""
        found = self.optional_seconds(text)
        if found is None:
            raise ValueError("a time is missing")
        return found

    def optional_seconds(self, text: str) -> int | None:
        """Parse a time. Return None if the text means that the time is not known yet."""
        return times.parse_seconds(text, self.zone)

    def is_in_period(self, begin: int, end: int | None) -> bool:
        """Return True if the time span overlaps the requested period.

        Args:
            end: None if it is not over.
        """
        is_after = self.end is not None and begin >= self.end
        return not is_after and (self.begin is None or end is None or end >= self.begin)
