"""`healthd baseline`: print this node's hardware, write it to the baseline file, or compare it with the file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.check import worker_client
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, settings_errors_as_usage
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, as_json, page, write_error, write_output

if TYPE_CHECKING:
    from healthd.agent.settings.config import Loaded
    from healthd.agent.settings.registry import Check
    from healthd.cli.baseline_settings import Change
    from healthd.common.model import LeftOut


def _baseline_arguments(parser: Parser) -> None:
    parser.add_argument("--diff", action="store_true", help="show changes since the baseline was written")
    parser.add_argument(
        "--write", action="store_true", help="write the baseline to the file set by baseline_file (as root)"
    )
    parser.add_argument(
        "--force", action="store_true", help="with --write: replace an existing file, or write an incomplete baseline"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.add_target_flags(parser)


def _baseline(args: argparse.Namespace) -> int:
    from healthd import __version__
    from healthd.agent.reporting import render
    from healthd.agent.settings import layers
    from healthd.agent.worker.process import worker_setup
    from healthd.cli import baseline_settings

    if args.diff and args.write:
        raise Stop("healthd baseline: use --diff or --write, not both")
    if args.force and not args.write:
        raise Stop("healthd baseline: --force requires --write")
    with settings_errors_as_usage():
        loaded, checks = load_settings(args, layers.layers_without_baseline)
        require_scenario(loaded)
        path = _baseline_file(loaded) if args.diff or args.write else ""
        before = _previous_baseline(path, checks, args) if path else None
    settings = loaded.settings
    with worker_client(worker_setup(settings), checks) as client:
        present = baseline_settings.read_baseline(loaded, checks, client)
    changes = baseline_settings.find_changes(before, present, checks) if before is not None else []
    merged = baseline_settings.merge_baseline(before or {}, present, checks)
    document = {"version": __version__, "node": settings.node_name, "file": path or None, "written": False}
    if args.diff:
        certain = [change for change in changes if not change.unknown]
        status = REFUSED if certain else UNKNOWN if changes else OK
        if args.json:
            return write_output(as_json({**document, **baseline_settings.as_json(present, (), changes)}), status)
        return write_output(render.drift(path, changes, page()), status)
    if args.write:
        if merged.lost and not args.force:
            raise Stop(_incomplete(path, merged.lost), UNKNOWN)
        changes = [change for change in changes if not change.unknown]
        changes += baseline_settings.manual_settings(before, checks) if before is not None else []
        text = baseline_settings.as_toml(merged.present, checks, _baseline_heading(settings.node_name))
        _write_baseline(path, text, changes, args.force, checks)
        output = render.drift(path, changes, page()) + "\n" if changes else ""
        if args.json:
            output = as_json(
                {**document, "written": True, **baseline_settings.as_json(merged.present, merged.entries, changes)}
            )
        write_output(output if args.json else f"{output}{path}: written\n")
        for omission in present.left_out:
            write_error(baseline_settings.describe_left_out(omission))
        for entry in merged.entries:
            write_error(baseline_settings.describe_kept(entry))
        return OK
    if args.json:
        return write_output(as_json({**document, **baseline_settings.as_json(present, (), ())}))
    return write_output(baseline_settings.as_toml(present, checks, _baseline_heading(settings.node_name)))


def _incomplete(path: str, lost: Sequence[LeftOut]) -> str:
    """Return the message for an incomplete baseline.

    With an incomplete baseline, the checks would require too little.
    """
    from healthd.cli.baseline_settings import describe_left_out

    omissions = "; ".join(describe_left_out(omission) for omission in lost)
    return (
        f"healthd baseline: {path}: not written, because some parts could not be read: {omissions}; --force skips them"
    )


def _baseline_file(loaded: Loaded) -> str:
    """Return the baseline file's path. For another root or a fake machine, the user must name the file."""
    from healthd.agent.settings.config import Settings

    settings = loaded.settings
    if not settings.baseline_file:
        raise Stop('healthd baseline: baseline_file is ""; name a file with --baseline')
    if (settings.root != "/" or settings.nvml.fake) and settings.baseline_file == Settings().baseline_file:
        raise Stop("healthd baseline: the hardware found is not this machine's; name a file with --baseline")
    return settings.baseline_file


def _previous_baseline(path: str, checks: Mapping[str, Check], args: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return the tables in the file. Return None for a missing file, and for an invalid file that will be replaced.

    Raises ConfigError.
    """
    from healthd.agent.settings.config import ConfigError
    from healthd.agent.settings.effective import resolve_settings
    from healthd.agent.settings.layers import baseline_tables

    if not os.path.exists(path):
        if args.write:
            return None
        raise Stop(f"healthd baseline: {path}: no such file; healthd baseline --write creates it", UNKNOWN)
    try:
        tables: Mapping[str, Any] = baseline_tables(path)
        resolve_settings({"checks": tables}, path, {}, checks)
    except ConfigError as error:
        if not args.force:
            raise
        write_error(str(error))
        return None
    return tables


def _baseline_heading(node: str) -> str:
    import time

    from healthd import __version__

    time_text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"""\
Hardware of {node}, written by healthd {__version__} (healthd baseline --write) on {time_text}.
The checks compare the node with this file and drain it if a part is missing or smaller. Remove parts that may change.
After a hardware or software change, run healthd baseline --diff, then healthd baseline --write --force."""


def _write_baseline(path: str, text: str, changes: Sequence[Change], force: bool, checks: Mapping[str, Check]) -> None:
    from healthd.agent.reporting import render
    from healthd.agent.settings.effective import resolve_settings
    from healthd.agent.settings.settings_file import parse_toml
    from healthd.common.atomic_files import replace_file

    resolve_settings(
        parse_toml(text, path), path, {}, checks
    )  # never write a file that would prevent the daemon from starting
    if os.path.exists(path) and changes and not force:
        write_output(f"{render.drift(path, changes, page())}\n")
        raise Stop(f"healthd baseline: {path}: already exists and differs; --force replaces it", REFUSED)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, text, mode=0o644, durable=True)
    except OSError as error:
        raise Stop(f"healthd baseline: {path}: cannot be written: {error.strerror}", REFUSED) from None


COMMANDS = {
    "baseline": Command(
        _baseline_arguments,
        _baseline,
        "Print this node's hardware as a settings file: GPUs, ports and their rates, disks, memory, CPUs, mounts, "
        "device nodes and services. The checks later compare the node with this file. Parts that appear broken are "
        "left out, with the reason.\n"
        "Parts that cannot be read keep their old lines in the file. If there are no old lines, nothing is written "
        "without --force.\n"
        "Exit status: 0 done or no change; 1 something changed, or the file was not written; 3 something could not be "
        "read; 64 usage error.",
        "  healthd baseline                        # print it first\n"
        "  healthd baseline --write && systemctl reload healthd\n"
        "  healthd baseline --diff                 # changes since then\n",
    ),
}
