"""`healthd config ...`: the settings, read and shown."""

from __future__ import annotations

import argparse

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, wrong_settings_are_wrong_use
from healthd.cli.terminal import page, say


def _config_check_arguments(parser: Parser) -> None:
    parser.add_argument("config", metavar="FILE")


def _config_check(args: argparse.Namespace) -> int:
    with wrong_settings_are_wrong_use():
        loaded, _ = load_settings(args)
        require_scenario(loaded)
    return say(f"{args.config}: right; mode {loaded.settings.mode.value}, {len(loaded.checks)} checks\n")


def _config_show_arguments(parser: Parser) -> None:
    parser.add_argument("--changed", action="store_true", help="only what is not at its default")
    flags.daemon(parser)


def _config_show(args: argparse.Namespace) -> int:
    from healthd.say import render
    from healthd.settings.settle import effective

    with wrong_settings_are_wrong_use():
        loaded, _ = load_settings(args)
    rows = [row for row in effective(loaded) if not args.changed or row[2] != "default"]
    return say(render.settings(rows, page()))


COMMANDS = {
    "config check": Command(
        _config_check_arguments, _config_check, "Read a settings file; say in one sentence what is wrong with it."
    ),
    "config show": Command(_config_show_arguments, _config_show, "Every setting that holds, and where it comes from."),
}
