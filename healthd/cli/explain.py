"""`healthd explain` and `healthd list`: the checks there are, and their codes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, load_settings, wrong_settings_are_wrong_use
from healthd.cli.terminal import Stop, page, say

if TYPE_CHECKING:
    from healthd.config import Loaded
    from healthd.model import Explain
    from healthd.settings.registry import Check


def _explain_arguments(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE|NAME", help="gpu_xid/79, ...; the name of a check for all of its codes")
    parser.add_argument("--config", metavar="FILE", help=argparse.SUPPRESS)


def _explain(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from healthd.convert import nearest
    from healthd.say import render
    from healthd.settings import registry

    checks = registry.built_in()
    if args.code.partition("/")[0] not in checks and registry.explain(checks, args.code) is None:
        with wrong_settings_are_wrong_use():
            _, checks = load_settings(args)  # the site's own
    if args.code in checks:
        known = checks[args.code]
        rows = _code_rows(registry.explained({args.code: known}))
        return say(render.explain_check(known.name, known.summary, rows, page()))
    found = registry.explain(checks, args.code)
    if found is None:
        hint = registry.renamed(args.code) or nearest(args.code, registry.all_names(checks))
        raise Stop(f'healthd explain: there is no code "{args.code}"{hint}')
    texts = (found.meaning, found.matters, found.todo)
    check = checks.get(args.code.partition("/")[0])
    enforced = check is None or bool(next(f.default for f in fields(check.config) if f.name == "enforce"))
    severity, clears = found.severity.name.lower(), found.clears.name.lower()
    return say(render.explain(args.code, severity, clears, texts, page(), enforced))


def _list_arguments(parser: Parser) -> None:
    parser.add_argument("--codes", action="store_true", help="the codes of findings instead")
    parser.add_argument(
        "--config", metavar="FILE", help=f"the settings (default: {flags.DEFAULT_FILE}, if there is one)"
    )


def _list(args: argparse.Namespace) -> int:
    from healthd.say import render

    with wrong_settings_are_wrong_use():
        loaded, checks = load_settings(args)
    if args.codes:
        from healthd.settings import registry

        return say(render.codes(_code_rows(registry.explained(checks)), page()))
    return say(render.checks(_check_rows(loaded, checks), page()))


def _code_rows(explained: Mapping[str, Explain]) -> Iterator[tuple[str, str, str, str]]:
    for code, text in explained.items():
        meaning = text.meaning.partition(". ")[0].rstrip(".")
        yield code, text.severity.name.lower(), text.clears.name.lower().replace("_", " "), meaning


def _check_rows(loaded: Loaded, checks: Mapping[str, Check]) -> Iterator[tuple[str, str, str, str]]:
    from healthd.say.render import duration as words

    for name, check in checks.items():
        mine = {instance: config for (owner, instance), config in loaded.checks.items() if owner == name}
        if not mine:
            yield name, "not set up" if check.per else "off", "", check.summary
        for instance, config in mine.items():
            every = words(config.interval_seconds or loaded.settings.interval_seconds)
            every += ", when idle" if check.when else ""
            timing = (every, words(config.timeout_seconds)) if check.runs else ("each kernel line", "")
            yield (f"{name} {instance}".strip(), *timing, check.summary)


COMMANDS = {
    "explain": Command(
        _explain_arguments,
        _explain,
        "What a code means, why it matters, what healthd does, what ends it, and what an engineer should do.\n"
        "With the name of a check: what it looks at, and its codes. nvlink5/149:4 is what an Xid 149 names as 149:4.",
        "  healthd explain gpu_xid/79\n  healthd explain nvlink5/149:4\n  healthd explain mount\n",
    ),
    "list": Command(
        _list_arguments, _list, "The checks: what they look at, how often they run, how long they may take."
    ),
}
