"""`healthd config ...`: the settings, read and shown."""

from __future__ import annotations

import argparse
import os

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, wrong_settings_are_wrong_use
from healthd.cli.terminal import WRONG_USE, Stop, as_json, complain, page, say

LOOK_SECONDS = 5.0  # for one look at a file, which may lie on a file server


def _config_check_arguments(parser: Parser) -> None:
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=flags.DEFAULT_FILE, help=f"default: {flags.DEFAULT_FILE}"
    )
    parser.add_argument(
        *("--node", "--node-name"),
        metavar="NAME",
        dest="node_name",
        help="as this node reads it: with its [[node]] sections",
    )


def _config_check(args: argparse.Namespace) -> int:
    from healthd.agent.settings import config, registry
    from healthd.agent.settings.configured import Configured
    from healthd.agent.settings.effective import mistakes, place_of
    from healthd.agent.settings.round_budget import warnings
    from healthd.agent.settings.settings_file import read_file

    file, _ = flags.settings_file(args)
    if file == flags.DEFAULT_FILE and not os.path.lexists(file):
        raise Stop(f"healthd: there is no {file}: all settings are at their defaults. To check another file, name it")
    with wrong_settings_are_wrong_use():
        table = read_file(file, required=True)
        wrong = mistakes(table, file, registry.find(config.checks_dir(table)))
    if wrong:
        for mistake in wrong:
            complain(f"healthd: {mistake}")
        return WRONG_USE
    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
        require_scenario(loaded)
    for warning in warnings(Configured(loaded, checks)):
        complain(f"{args.config}: warning: {warning}")
    for name, run in loaded.checks.items():
        program = next(iter(getattr(run, "command", ())), "")
        if program.startswith("/") and (problem := _trouble(program)):
            complain(f"{args.config}: warning: {place_of(*name, 'command')}: {program} {problem}")
    if path := loaded.settings.metrics.web_config:
        from healthd.agent.metrics.certificates import WebFiles
        from healthd.agent.metrics.web_config import WebConfigError

        try:
            problem = WebFiles(path).problem()
        except WebConfigError as error:
            problem = f"there would be no metrics page: {error}"
        if problem:
            complain(f"{args.config}: warning: metrics.web_config: {problem}")
    counted = registry.counted(checks, loaded)
    return say(f"{args.config}: right; mode {loaded.settings.mode.value}, {counted}\n")


def _trouble(program: str) -> str:
    """Return why a program cannot be started here; "" = it exists. A file server that is down may never answer."""
    from healthd.host.program import run_program

    try:
        ran = run_program(("test", "-e", program), LOOK_SECONDS)
    except TimeoutError:
        return f"cannot be looked at: no answer within {LOOK_SECONDS:g} s"
    return "" if ran.status == 0 else "does not exist here"


def _config_show_arguments(parser: Parser) -> None:
    parser.add_argument("--changed", action="store_true", help="only settings that are not at their default")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.daemon(parser)


def _config_show(args: argparse.Namespace) -> int:
    from healthd import __version__
    from healthd.agent.reporting import render
    from healthd.agent.settings.effective import effective

    with wrong_settings_are_wrong_use():
        loaded, _ = load_settings(args)
    rows = [row for row in effective(loaded) if not args.changed or row[2] != "default"]
    if args.json:
        settings = [{"setting": setting, "value": value, "from": origin} for setting, value, origin in rows]
        return say(as_json({"version": __version__, "settings": settings}))
    return say(render.settings(rows, page()))


COMMANDS = {
    "config check": Command(
        _config_check_arguments,
        _config_check,
        "Print every error in a settings file, one per line.\n"
        "Exit status: 0 no errors (warnings are printed), 64 errors.",
        "  healthd config check\n"
        "  healthd config check new.toml && healthd reload\n"
        "  healthd config check new.toml --node gpu-042\n",
    ),
    "config show": Command(
        _config_show_arguments,
        _config_show,
        "Print every setting in force and its source.",
        "  healthd config show --changed\n  healthd config show --changed --node-name gpu-042\n",
    ),
}
