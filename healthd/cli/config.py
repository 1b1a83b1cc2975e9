"""`healthd config ...`: check and print the settings."""

from __future__ import annotations

import argparse
import os

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, require_scenario, settings_errors_as_usage
from healthd.cli.terminal import USAGE_ERROR, Stop, as_json, page, write_error, write_output

TIMEOUT_SECONDS = 5.0  # time limit for testing a single file, which may be on a file server


def _config_check_arguments(parser: Parser) -> None:
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=flags.DEFAULT_FILE, help=f"default: {flags.DEFAULT_FILE}"
    )
    parser.add_argument(
        *("--node", "--node-name"),
        metavar="NAME",
        dest="node_name",
        help="check the file as this node reads it, with its [[node]] sections",
    )


def _config_check(args: argparse.Namespace) -> int:
    from healthd.agent.settings import config, registry
    from healthd.agent.settings.configured import Configured
    from healthd.agent.settings.effective import find_mistakes, setting_path
    from healthd.agent.settings.round_budget import warnings
    from healthd.agent.settings.settings_file import read_file

    file, _ = flags.settings_file(args)
    if file == flags.DEFAULT_FILE and not os.path.lexists(file):
        raise Stop(f"healthd: {file} does not exist, so all settings are at their defaults; name a file to check it")
    with settings_errors_as_usage():
        table = read_file(file, required=True)
        mistakes_found = find_mistakes(table, file, registry.find_checks(config.checks_dir(table)))
    if mistakes_found:
        for mistake in mistakes_found:
            write_error(f"healthd: {mistake}")
        return USAGE_ERROR
    with settings_errors_as_usage():
        loaded, checks = load_settings(args)
        require_scenario(loaded)
    for warning in warnings(Configured(loaded, checks)):
        write_error(f"{args.config}: warning: {warning}")
    for name, run in loaded.checks.items():
        program = next(iter(getattr(run, "command", ())), "")
        if program.startswith("/") and (problem := _program_problem(program)):
            write_error(f"{args.config}: warning: {setting_path(*name, 'command')}: {program} {problem}")
    if path := loaded.settings.metrics.web_config:
        from healthd.agent.metrics.certificates import WebFiles
        from healthd.agent.metrics.web_config import WebConfigError

        try:
            problem = WebFiles(path).problem()
        except WebConfigError as error:
            problem = f"the metrics page cannot start: {error}"
        if problem:
            write_error(f"{args.config}: warning: metrics.web_config: {problem}")
    counted = registry.count_summary(checks, loaded)
    return write_output(f"{args.config}: no errors; mode {loaded.settings.mode.value}, {counted}\n")


def _program_problem(program: str) -> str:
    """Return the reason why a program cannot be started here, or "" if it can.

    The check does not hang if a file server is down.
    """
    from healthd.host.program import run_program

    try:
        ran = run_program(("test", "-e", program), TIMEOUT_SECONDS)
    except TimeoutError:
        return f"cannot be tested: no answer within {TIMEOUT_SECONDS:g} s"
    return "" if ran.status == 0 else "does not exist here"


def _config_show_arguments(parser: Parser) -> None:
    parser.add_argument("--changed", action="store_true", help="only settings that differ from their defaults")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.add_daemon_flags(parser)


def _config_show(args: argparse.Namespace) -> int:
    from healthd import __version__
    from healthd.agent.reporting import render
    from healthd.agent.settings.effective import setting_rows

    with settings_errors_as_usage():
        loaded, _ = load_settings(args)
    rows = [row for row in setting_rows(loaded) if not args.changed or row[2] != "default"]
    if args.json:
        settings = [{"setting": setting, "value": value, "from": origin} for setting, value, origin in rows]
        return write_output(as_json({"version": __version__, "settings": settings}))
    return write_output(render.settings(rows, page()))


COMMANDS = {
    "config check": Command(
        _config_check_arguments,
        _config_check,
        "Print all errors in a settings file, one per line.\n"
        "Exit status: 0 no errors (warnings are printed), 64 errors.",
        "  healthd config check\n"
        "  healthd config check new.toml && healthd reload\n"
        "  healthd config check new.toml --node gpu-042\n",
    ),
    "config show": Command(
        _config_show_arguments,
        _config_show,
        "Print all settings in effect and their sources.",
        "  healthd config show --changed\n  healthd config show --changed --node-name gpu-042\n",
    ),
}
