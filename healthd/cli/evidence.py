"""`healthd evidence`: list, show, copy and collect the evidence of faults."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.flags import Command, Parser
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, as_json, page, write_output

if TYPE_CHECKING:
    from healthd.agent.evidence.archive import Archive


def _add_place(parser: Parser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="state directory (default: from the settings)")
    flags.add_config_flag(parser)


@contextmanager
def _archive_errors(name: str) -> Iterator[None]:
    from healthd.agent.evidence.archive import ArchiveError

    try:
        yield
    except ArchiveError as error:
        raise Stop(f"healthd evidence {name}: {error}", UNKNOWN) from None
    except PermissionError as error:
        raise Stop(f"healthd evidence {name}: {error.filename}: only root can read the evidence", REFUSED) from None
    except OSError as error:
        raise Stop(f"healthd evidence {name}: {error.filename}: {error.strerror}", UNKNOWN) from None


def _find(args: argparse.Namespace, name: str) -> Archive:
    """Return the archive with this id, or the newest one. Raises Stop."""
    from healthd.agent.evidence import archive

    state_dir = flags.state_dir(args)
    found = archive.list_archives(state_dir)
    if not found:
        raise Stop(f"healthd evidence {name}: no evidence in {archive.folder(state_dir)}", REFUSED)
    if args.id == "latest":
        return found[-1]
    chosen = [entry for entry in found if entry.id == args.id]
    if not chosen:
        from healthd.common.codec import spelling_hint

        hint = spelling_hint(args.id, (entry.id for entry in found))
        raise Stop(f'healthd evidence {name}: no evidence has the id "{args.id}"{hint}', REFUSED)
    return chosen[0]


# --- list


def _list_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    _add_place(parser)


def _list(args: argparse.Namespace) -> int:
    from healthd.agent.evidence import archive

    with _archive_errors("list"):
        rows = [_row(entry) for entry in archive.list_archives(flags.state_dir(args))]
    if args.json:
        return write_output(as_json({"evidence": rows}))
    if not rows:
        return write_output("no evidence has been saved\n")
    from healthd.agent.evidence.describe import size_text
    from healthd.common.page import date, plain

    table = [
        (
            row["id"],
            date(row["began"]),
            ", ".join(row["parts"]),
            size_text(row["bytes"]),
            plain(" ".join(row["causes"][:1])),
        )
        for row in rows
    ]
    return write_output("\n".join(page().table(("id", "began", "parts", "size", "fault"), table)) + "\n")


def _row(entry: Archive) -> dict[str, Any]:
    """Return the document of one file. A damaged file has an error instead of its content."""
    from healthd.agent.evidence.archive import ArchiveError, read_manifest

    row = {"id": entry.id, "path": entry.path, "bytes": entry.bytes, "began": entry.modified, "parts": [], "causes": []}
    try:
        found = read_manifest(entry.path)
    except ArchiveError as error:
        return {**row, "error": str(error)}
    parts = [part.name for part in found.parts]
    return {**row, "began": found.began, "parts": parts, "causes": [c.text for c in found.causes], "error": ""}


# --- show


def _show_arguments(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", nargs="?", default="latest", help="id of the evidence (default: latest)")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON (docs/json.md)")
    _add_place(parser)


def _show(args: argparse.Namespace) -> int:
    from healthd.agent.evidence import archive

    with _archive_errors("show"):
        entry = _find(args, "show")
        found, files = archive.read_manifest(entry.path), archive.list_files(entry.path)
    if args.json:
        from healthd.agent.evidence.describe import document

        return write_output(as_json(document(found, entry.path, entry.bytes, files)))
    from healthd.agent.evidence.describe import text

    return write_output(text(found, entry.path, entry.bytes, files, page()))


# --- path


def _path_arguments(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", nargs="?", default="latest", help="id of the evidence (default: latest)")
    parser.add_argument("--redact", action="store_true", help="write a copy for a vendor to --out")
    parser.add_argument("--out", metavar="FILE", help="file for the copy; it must not exist")
    _add_place(parser)


def _path(args: argparse.Namespace) -> int:
    if args.redact != (args.out is not None):
        raise Stop("healthd evidence path: --redact and --out FILE must be used together")
    with _archive_errors("path"):
        entry = _find(args, "path")
        if not args.redact:
            return write_output(f"{entry.path}\n")
        from healthd.agent.evidence.describe import size_text
        from healthd.agent.evidence.redacted_copy import write_redacted

        target = os.path.abspath(args.out)
        if os.path.lexists(target):
            raise Stop(f"healthd evidence path: {target}: already exists", REFUSED)
        left_out, size = write_redacted(entry.path, target, (*_user_names(), os.uname().nodename))
    lines = [f"{target}: {size_text(size)}; left out: {', '.join(left_out) or 'nothing'}"]
    lines += ["Read the copy before you send it: a rule cannot know every name."]
    return write_output("\n".join(lines) + "\n")


def _user_names() -> list[str]:
    """Return the users of this machine, except those of the system."""
    import pwd

    return sorted(user.pw_name for user in pwd.getpwall() if 1000 <= user.pw_uid < 65534)


# --- collect


def _collect_arguments(parser: Parser) -> None:
    parser.add_argument("--now", action="store_true", help="collect evidence now, without a request from the daemon")
    parser.add_argument("--full", action="store_true", help="with --now: also run programs that disturb jobs")
    flags.add_client_flags(parser)
    parser.add_argument("--state-dir", metavar="DIR", help="state directory (default: from the settings)")


def _collect(args: argparse.Namespace) -> int:
    from healthd.agent.evidence import collect
    from healthd.common.ownership import Untrusted

    if args.now and os.geteuid() != 0:
        raise Stop("healthd evidence collect: --now must be run as root", REFUSED)
    if args.full and not args.now:
        raise Stop("healthd evidence collect: --full requires --now")
    _set_up_logging()
    collect.prepare_process()
    runtime_dir = flags.runtime_dir(args)
    try:
        if args.now:
            return _collect_now(args, runtime_dir)
        collect.serve_requests(runtime_dir)
    except Untrusted as error:
        raise Stop(f"healthd evidence collect: {error.with_context(runtime_dir, 'runtime_dir')}", UNKNOWN) from None
    except OSError as error:
        raise Stop(f"healthd evidence collect: {error.filename}: {error.strerror}", UNKNOWN) from None
    return OK


def _collect_now(args: argparse.Namespace, runtime_dir: str) -> int:
    from healthd.agent.evidence.manual import collect_now

    with flags.settings_errors_as_usage():
        loaded, _ = flags.load_settings(args)
    result = collect_now(loaded.settings, runtime_dir, flags.state_dir(args), args.config, args.full)
    if result is None:
        raise Stop("healthd evidence collect: another collector is running; try again later", REFUSED)
    if result.error:
        raise Stop(f"healthd evidence collect: {result.error}", UNKNOWN)
    return write_output(f"{result.path}\n", REFUSED if result.stopped else OK)


def _set_up_logging() -> None:
    import logging
    import sys

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="healthd: %(message)s")


COMMANDS = {
    "evidence list": Command(
        _list_arguments,
        _list,
        "List the saved evidence of faults: one file per drain.",
        "  healthd evidence list\n  healthd evidence list --json | jq '.evidence[-1].path'\n",
    ),
    "evidence show": Command(
        _show_arguments,
        _show,
        "Show the content of one evidence file: faults, serial numbers, firmware versions, and each program's result.",
        "  healthd evidence show\n  healthd evidence show 20261129T060000Z-gpu_xid-79 --json\n",
    ),
    "evidence path": Command(
        _path_arguments,
        _path,
        "Print the path of an evidence file.\n"
        "With --redact, write a copy for a vendor, without user names, command lines, job names and the node's name. "
        "docs/evidence.md lists what the copy contains.",
        "  tar xzf $(healthd evidence path)\n  healthd evidence path latest --redact --out /root/evidence.tar.gz\n",
    ),
    "evidence collect": Command(
        _collect_arguments,
        _collect,
        "Save the evidence that the daemon has requested. healthd-evidence.service runs this command.\n"
        "With --now, save evidence by hand. With --full, also run nvidia-bug-report.sh and other programs that disturb "
        "jobs.",
        "  healthd evidence collect --now\n  healthd evidence collect --now --full     # on a node without jobs\n",
    ),
}
