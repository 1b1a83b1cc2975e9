"""`healthd baseline`: what this node has, shown, written to its file, or compared with it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.check import runner_of
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, wrong_settings_are_wrong_use
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, as_json, complain, page, say

if TYPE_CHECKING:
    from healthd.agent.settings.config import Loaded
    from healthd.agent.settings.registry import Check
    from healthd.cli.baseline_settings import Change
    from healthd.common.model import LeftOut


def _baseline_arguments(parser: Parser) -> None:
    parser.add_argument("--diff", action="store_true", help="show changes since the baseline was written")
    parser.add_argument("--write", action="store_true", help="write it to baseline_file of the settings, as root")
    parser.add_argument(
        "--force", action="store_true", help="with --write: replace an existing file, or write an incomplete one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.look(parser)


def _baseline(args: argparse.Namespace) -> int:
    from healthd import __version__
    from healthd.agent.reporting import render
    from healthd.agent.settings import layers
    from healthd.agent.worker.process import setup_of
    from healthd.cli import baseline_settings

    if args.diff and args.write:
        raise Stop("healthd baseline: --diff and --write are two things")
    if args.force and not args.write:
        raise Stop("healthd baseline: --force is for --write")
    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args, layers.without_baseline)
        require_scenario(loaded)
        path = _baseline_file(loaded) if args.diff or args.write else ""
        before = _baseline_before(path, checks, args) if path else None
    settings = loaded.settings
    with runner_of(setup_of(settings), checks) as runner:
        present = baseline_settings.take(loaded, checks, runner)
    changes = baseline_settings.drift(before, present, checks) if before is not None else []
    kept = baseline_settings.keep(before or {}, present, checks)
    document = {"version": __version__, "node": settings.node_name, "file": path or None, "written": False}
    if args.diff:
        known = [change for change in changes if not change.unknown]
        status = REFUSED if known else UNKNOWN if changes else OK
        if args.json:
            return say(as_json({**document, **baseline_settings.as_json(present, (), changes)}), status)
        return say(render.drift(path, changes, page()), status)
    if args.write:
        if kept.lost and not args.force:
            raise Stop(_incomplete(path, kept.lost), UNKNOWN)
        changes = [change for change in changes if not change.unknown]
        changes += baseline_settings.by_hand(before, checks) if before is not None else []
        text = baseline_settings.as_toml(kept.present, checks, _baseline_heading(settings.node_name))
        _write_baseline(path, text, changes, args.force, checks)
        told = render.drift(path, changes, page()) + "\n" if changes else ""
        if args.json:
            told = as_json(
                {**document, "written": True, **baseline_settings.as_json(kept.present, kept.entries, changes)}
            )
        say(told if args.json else f"{told}{path}: written\n")
        for left in present.left_out:
            complain(baseline_settings.words_of(left))
        for entry in kept.entries:
            complain(baseline_settings.words_of_kept(entry))
        return OK
    if args.json:
        return say(as_json({**document, **baseline_settings.as_json(present, (), ())}))
    return say(baseline_settings.as_toml(present, checks, _baseline_heading(settings.node_name)))


def _incomplete(path: str, lost: Sequence[LeftOut]) -> str:
    """Why the file is not written: it would hold the node to less than it should have."""
    from healthd.cli.baseline_settings import words_of

    whats = "; ".join(words_of(left) for left in lost)
    return f"healthd baseline: {path}: not written, for not all could be looked at: {whats}; --force leaves it out"


def _baseline_file(loaded: Loaded) -> str:
    """The baseline's path. The tree looked at must be this machine's, unless a file was named for it."""
    from healthd.agent.settings.config import Settings

    settings = loaded.settings
    if not settings.baseline_file:
        raise Stop('healthd baseline: baseline_file is "": name a file with --baseline')
    if (settings.root != "/" or settings.nvml.fake) and settings.baseline_file == Settings().baseline_file:
        raise Stop("healthd baseline: this is not the machine that is looked at: name a file with --baseline")
    return settings.baseline_file


def _baseline_before(path: str, checks: Mapping[str, Check], args: argparse.Namespace) -> Mapping[str, Any] | None:
    """The tables of the file; None if there is none, or a wrong one that will be replaced. Raises ConfigError."""
    from healthd.agent.settings.config import ConfigError
    from healthd.agent.settings.effective import settle
    from healthd.agent.settings.layers import checks_of

    if not os.path.exists(path):
        if args.write:
            return None
        raise Stop(f"healthd baseline: {path}: there is no such file; healthd baseline --write makes it", UNKNOWN)
    try:
        tables: Mapping[str, Any] = checks_of(path)
        settle({"checks": tables}, path, {}, checks)
    except ConfigError as error:
        if not args.force:
            raise
        complain(str(error))
        return None
    return tables


def _baseline_heading(node: str) -> str:
    import time

    from healthd import __version__

    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"""\
What {node} has, as healthd {__version__} found it on {now}: healthd baseline --write.
The checks hold the node to it: what is gone or less later drains it. Take out what may come and go.
After a change of hardware or software: healthd baseline --diff, then healthd baseline --write --force."""


def _write_baseline(path: str, text: str, changes: Sequence[Change], force: bool, checks: Mapping[str, Check]) -> None:
    from healthd.agent.reporting import render
    from healthd.agent.settings.effective import settle
    from healthd.agent.settings.settings_file import parse_toml
    from healthd.common.atomic_files import replace_file

    settle(parse_toml(text, path), path, {}, checks)  # never write a file with which the daemon would not start
    if os.path.exists(path) and changes and not force:
        say(f"{render.drift(path, changes, page())}\n")
        raise Stop(f"healthd baseline: {path}: is there and differs; --force replaces it", REFUSED)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, text, mode=0o644, durable=True)
    except OSError as error:
        raise Stop(f"healthd baseline: {path}: cannot be written: {error.strerror}", REFUSED) from None


COMMANDS = {
    "baseline": Command(
        _baseline_arguments,
        _baseline,
        "Print this node's hardware as a settings file that the checks compare with later: GPUs, ports and their "
        "rates, disks, memory, CPUs, mounts, device nodes, services. Parts that look broken are left out, with the "
        "reason.\n"
        "Parts that cannot be read keep their old lines in the file. If there are no old lines, nothing is written "
        "without --force.\n"
        "Exit status: 0 done, or no change; 1 something changed, or refused; 3 something could not be read; 64 usage "
        "error.",
        "  healthd baseline                        # print it first\n"
        "  healthd baseline --write && systemctl reload healthd\n"
        "  healthd baseline --diff                 # changes since then\n",
    ),
}
