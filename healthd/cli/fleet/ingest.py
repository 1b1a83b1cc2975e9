"""`healthd fleet ingest` and `prune`: add data to the fleet store, and remove old data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, write_error, write_output

if TYPE_CHECKING:
    from datetime import tzinfo

    from healthd.fleet.ingest import IngestOptions, IngestResult

_MAX_FAILED = 20  # maximum number of messages about unreadable files; a folder may have one file per node
INSTALL_HINT = 'docs/deploy.md, "Central host", describes the installation'


@contextmanager
def fleet_errors(command: str = "healthd fleet") -> Iterator[None]:
    """End the command with a message if the store or a source fails. `command` is the name for messages."""
    from healthd.common.errors import HealthdError

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "healthd").partition(".")[0] == "healthd":
            raise
        raise Stop(f"{command}: {error.name} is not installed here: {INSTALL_HINT}", UNKNOWN) from None
    except Stop:
        raise
    except HealthdError as error:
        raise Stop(f"{command}: {error}", UNKNOWN) from None


def parse_time(text: str, flag: str, zone: tzinfo | None = None) -> int:
    """Parse a date or time to whole epoch seconds. Without a time zone, use `zone` or UTC. Raises Stop."""
    from datetime import timezone

    from healthd.fleet import times

    try:
        found = times.parse_seconds(text, zone or timezone.utc)
    except times.NotATime:
        found = None
    except times.TimeError as error:
        raise Stop(f'healthd fleet: {flag}: "{text}": {error}') from None
    if found is None:
        raise Stop(f'healthd fleet: {flag}: "{text}" is not a time; examples: 2026-11-01, 2026-11-01T12:00:00')
    return found


# --- ingest


def _ingest_arguments(parser: Parser) -> None:
    from healthd.fleet.all_sources import ALL

    parser.add_argument("--out", metavar="DB", required=True, help="store directory; created if missing")
    for source in ALL:
        parser.add_argument(
            source.flag,
            dest=source.name,
            metavar=source.metavar,
            nargs="*" if source.runs_without_files else "+",
            action="extend",
            help=source.help.replace("%", "%%"),
        )
    parser.add_argument("--cluster", metavar="NAME", default="", help="cluster name for data that does not name one")
    parser.add_argument("--from", dest="from_time", metavar="TIME", help="skip data that ended before TIME")
    parser.add_argument("--to", dest="to_time", metavar="TIME", help="skip data that began at TIME or later")
    parser.add_argument(
        "--timezone", metavar="ZONE", help="time zone for times that have none, such as Europe/Berlin or UTC"
    )
    parser.add_argument(
        "--users",
        choices=("keep", "drop", "hash"),
        default="",
        help="store user names unchanged, not at all, or hashed (default: as in the store; in a new store, hashed)",
    )
    parser.add_argument("--key", metavar="FILE", help="key for the hashes (default: DB/key, created with the store)")


def _ingest(args: argparse.Namespace) -> int:
    with fleet_errors():
        from healthd.fleet.all_sources import ALL
        from healthd.fleet.ingest import ingest

        requested = [(source, vars(args)[source.name]) for source in ALL if vars(args)[source.name] is not None]
        if not requested:
            raise Stop(f"healthd fleet ingest: name a source: {', '.join(source.flag for source in ALL)}")
        for source, files in requested:
            if len(files) > 1 and not source.allows_several:
                raise Stop(f"healthd fleet ingest: {source.flag} takes one {source.metavar}, got {len(files)}")
        try:
            return _print_result(ingest(args.out, requested, _ingest_options(args)))
        except KeyboardInterrupt:
            write_error("healthd fleet: stopped; data loaded so far is kept, and the same command continues from there")
            raise


def _ingest_options(args: argparse.Namespace) -> IngestOptions:
    import time

    from healthd.fleet import times
    from healthd.fleet.ingest import IngestOptions

    try:
        zone = None if args.timezone is None else times.load_zone(args.timezone)
    except times.TimeError as error:
        raise Stop(f"healthd fleet: --timezone: {error}") from None
    start = None if args.from_time is None else parse_time(args.from_time, "--from", zone)
    end = None if args.to_time is None else parse_time(args.to_time, "--to", zone)
    if start is not None and end is not None and start >= end:
        raise Stop(f"healthd fleet: --from {args.from_time} is not before --to {args.to_time}")
    return IngestOptions(int(time.time()), args.cluster, zone, start, end, args.users, args.key)


def _print_result(result: IngestResult) -> int:
    for source in result.sources:
        rows, unread = result.unread.rows[source], result.unread.unread[source]
        write_output(f"{source}: {f'{rows - unread:,} rows' if rows else 'nothing new'}\n")
    for sentence in [*result.unread.messages(), *result.failed[:_MAX_FAILED]]:
        write_error(sentence)
    if more := len(result.failed[_MAX_FAILED:]):
        write_error(f"... and {more:,} more files that cannot be read")
    if result.failed:
        return UNKNOWN
    return REFUSED if result.unread.is_over_limit() else OK


# --- prune


def _prune_arguments(parser: Parser) -> None:
    parser.add_argument("--db", metavar="DB", required=True, help="store directory")
    parser.add_argument("--before", metavar="DATE", required=True, help="date in UTC, such as 2026-01-01")


def _prune(args: argparse.Namespace) -> int:
    import time

    with fleet_errors():
        from healthd.fleet.prune import prune
        from healthd.fleet.store import open_for_writing

        before = parse_time(args.before, "--before")
        if before > time.time():
            raise Stop(f"healthd fleet prune: --before {args.before} is in the future and would remove everything")
        with open_for_writing(args.db) as store:
            removed = prune(store, before)
    lines = [f"{table}: {rows:,} rows removed\n" for table, rows in removed.items() if rows]
    return write_output("".join(lines) or f"no rows older than {args.before}\n")


COMMANDS = {
    "fleet ingest": Command(
        _ingest_arguments,
        _ingest,
        "Load new data from each given source into the store.\n"
        "If the command is interrupted or killed, run it again to continue.\n"
        "Exit status: 0 done, 1 more than 1 % of a source's rows could not be read, 3 a source or the store could not "
        "be used (data from other sources is kept), 64 usage error.",
        "  healthd fleet ingest --out db --sacct --events /srv/events\n"
        "  healthd fleet ingest --out db --sacct 2026-*.txt --timezone Europe/Rome\n",
    ),
    "fleet prune": Command(
        _prune_arguments,
        _prune,
        "Delete data older than a date from the store.\n"
        "A later ingest does not load it again.\n"
        "Exit status: 0 done, 3 the store could not be used, 64 usage error.",
        "  healthd fleet prune --db db --before 2026-01-01\n",
    ),
}
