"""`healthd list`: the checks there are, and their codes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, wrong_settings_are_wrong_use
from healthd.cli.terminal import as_json, page, say

if TYPE_CHECKING:
    from healthd.agent.settings.config import CheckConfig, Loaded
    from healthd.agent.settings.registry import Check


def _arguments(parser: Parser) -> None:
    parser.add_argument("--codes", action="store_true", help="the codes of findings instead")
    parser.add_argument("--json", action="store_true", help="for programs (docs/json.md)")
    parser.add_argument(
        "--config", metavar="FILE", help=f"the settings (default: {flags.DEFAULT_FILE}, if there is one)"
    )


def _list(args: argparse.Namespace) -> int:
    from healthd import __version__
    from healthd.agent.reporting import render

    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
    if args.codes:
        codes = list(codes_json(checks))
        if args.json:
            return say(as_json({"version": __version__, "codes": codes}))
        from healthd.agent.reporting.explanation import code_row

        return say(render.codes(map(code_row, codes), page()))
    listed = list(checks_json(loaded, checks))
    if args.json:
        return say(as_json({"version": __version__, "checks": listed}))
    return say(render.checks(map(_check_row, listed), page()))


def codes_json(checks: Mapping[str, Check]) -> Iterator[dict[str, Any]]:
    """Each code, in the order of their names (docs/json.md)."""
    from healthd.agent.reporting.explanation import ends_of
    from healthd.agent.reporting.fault_course import findings_of
    from healthd.agent.settings import registry

    for code, text in registry.explained(checks).items():
        yield {
            "code": code,
            "severity": text.severity.name.lower(),
            "clears": text.clears.name.lower(),
            "ends": ends_of(findings_of(code, text, _config(checks, code))[0]),
            "meaning": text.meaning,
        }


def _config(checks: Mapping[str, Check], code: str) -> CheckConfig:
    """Return the default settings of the check that a code belongs to."""
    return checks[code.partition("/")[0]].config()


def checks_json(loaded: Loaded, checks: Mapping[str, Check]) -> Iterator[dict[str, Any]]:
    """Each check, one that has tables of its own once a table (docs/json.md)."""
    for name, check in checks.items():
        tables = {**loaded.disabled, **loaded.checks}
        mine = {run: config for run, config in tables.items() if run.check == name}
        common = {"summary": check.summary, "runs": check.runs, "listens": check.listens, "when": check.when}
        if not mine:
            yield {"check": name, "instance": "", "state": "not_set_up", **common, **_times(None, None)}
        for run, config in mine.items():
            times = _times(config.interval_seconds or loaded.settings.interval_seconds, config.timeout_seconds)
            state = "on" if run in loaded.checks else "off"
            yield {"check": name, "instance": run.instance, "state": state, **common, **times}


def _times(interval_seconds: float | None, timeout_seconds: float | None) -> dict[str, float | None]:
    return {"interval_seconds": interval_seconds, "timeout_seconds": timeout_seconds}


def _check_row(listed: Mapping[str, Any]) -> tuple[str, str, str, str]:
    from healthd.common.duration import duration as words

    name = f"{listed['check']} {listed['instance']}".strip()
    if listed["state"] != "on":
        return name, listed["state"].replace("_", " "), "", listed["summary"]
    if not listed["runs"]:
        return name, "each kernel line", "", listed["summary"]
    every = words(listed["interval_seconds"]) + (", when idle" if listed["when"] else "")
    return name, every, words(listed["timeout_seconds"]), listed["summary"]


COMMANDS = {
    "list": Command(
        _arguments,
        _list,
        "The checks: what they look at, how often they run, how long they may take.",
        "  healthd list\n  healthd list --codes\n"
        "  healthd list --json | jq -r '.checks[] | select(.state == \"on\").check'\n",
    ),
}
