"""`healthd explain`: what a code means, and what to do. `healthd list`: the checks, and their codes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.flags import DEFAULT_FILE, Command, Parser, load_settings, wrong_settings_are_wrong_use
from healthd.cli.terminal import Stop, as_json, page, say

if TYPE_CHECKING:
    from healthd.agent.reporting.explanation import Running
    from healthd.agent.settings.config import CheckConfig, Loaded
    from healthd.agent.settings.registry import Check
    from healthd.common.model import Finding, Inventory, KernelEvent

MOST_SHOWN = 80  # characters of words that mean nothing


def _explain_arguments(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="WORDS", help="a code, an Xid, a kernel log line, a Reason, or a check"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument(
        "--config", metavar="FILE", help=f"settings of this node (default: {DEFAULT_FILE}, if it exists)"
    )


def _explain(args: argparse.Namespace) -> int:
    from healthd.agent.reporting import explanation

    words = " ".join(args.words).strip()
    if not words:
        raise Stop(
            "healthd explain: say what: a code, an Xid, a line of the kernel log, a Reason; healthd list has the checks"
        )
    document = _of_a_code(words, args) or _of_any_words(words, args)
    return say(as_json(document) if args.json else explanation.text(document, page()))


def _of_a_code(words: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The document of a code as healthd writes it, by its check alone: to import all is twice as dear. None for other
    words, for a site with checks of its own, and for wrong settings, of which all checks must be known to say it."""
    from healthd.agent.reporting import explanation
    from healthd.agent.settings import registry
    from healthd.agent.settings.config import ConfigError

    name, slash, rest = words.partition("/")
    if not slash or rest.startswith("0"):
        return None
    checks = registry.built_in({name})
    if not checks or (text := registry.explain(checks, words)) is None:
        return None
    owner = checks[name]
    try:
        loaded = flags.load_settings_of(args, checks)
    except ConfigError:
        return None
    if loaded is None:
        return None
    here = explanation.Here(loaded, _running(loaded, args))
    return {**explanation.of_code(words, words, "", text, owner, here), "settings_problem": ""}


def _of_any_words(words: str, args: argparse.Namespace) -> dict[str, Any]:
    from healthd.agent.reporting import explanation
    from healthd.agent.settings import registry
    from healthd.agent.settings.config import ConfigError
    from healthd.cli import explain_query as typed

    loaded, problem = None, ""
    try:
        loaded, checks = load_settings(args)
    except ConfigError as error:  # the person who is woken needs the texts all the same
        checks, problem = registry.built_in(), str(error)
    if loaded is not None:
        from healthd.agent.kernel_log.parse import use_patterns

        use_patterns(loaded.settings.kernel_log.patterns)
    found = typed.asked(words, checks, _correlate(loaded, checks))
    if isinstance(found, typed.OfCheck):
        check = checks[found.name]
        return explanation.of_check(words, check, codes_json({check.name: check}))
    if isinstance(found, typed.OthersReason):
        return explanation.of_foreign_reason(words, *found.meaning)
    if isinstance(found, typed.HarmlessLine):
        return explanation.of_kernel_line(words, found.message)
    if isinstance(found, typed.Several):
        known = (row for row in codes_json(checks) if row["code"] in found.codes)
        return explanation.of_several(words, found.why, known)
    if isinstance(found, typed.Code) and (text := registry.explain(checks, found.code)) is not None:
        owner = checks.get(found.code.partition("/")[0])
        here = explanation.Here(loaded, _running(loaded, args))
        document = explanation.of_code(words, found.code, found.part, text, owner, here, found.line)
        return {**document, "settings_problem": problem}
    raise Stop(_no_such(words, found.near if isinstance(found, typed.Unknown) else (), problem))


def _running(loaded: Loaded | None, args: argparse.Namespace) -> Running | None:
    """The daemon of these settings, if it answers within a second: this works without one. One that runs goes on with
    what it read before the settings became wrong."""
    if loaded and not os.path.exists(loaded.settings.runtime_dir):
        return None  # no daemon was ever here since the boot: what would ask it need not be loaded

    from healthd.agent.control import protocol
    from healthd.agent.control.client import NoAnswer, RefusedByDaemon, ask
    from healthd.agent.reporting.explanation import Running
    from healthd.common.model import Mode

    try:
        runtime_dir = loaded.settings.runtime_dir if loaded else flags.runtime_dir(args)
        status = ask(runtime_dir, protocol.plain(protocol.STATUS), patience_seconds=1.0).get("status", {})
        pause = status.get("pause") or {}
        return Running(Mode(status.get("mode")), float(pause.get("until", 0.0)))
    except (NoAnswer, RefusedByDaemon, Stop, AttributeError, TypeError, ValueError):  # or one of another version
        return None


def _no_such(words: str, near: Sequence[str], problem: str) -> str:
    short = words if len(words) <= MOST_SHOWN else f"{words[: MOST_SHOWN - 3]}..."
    unread = f" (the site's own checks are not known: {problem})" if problem else ""
    *others, last = (f'"{name}"' for name in near) if near else ("",)
    hint = f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if near else "; see healthd list"
    return f'healthd explain: there is no code "{short}"{hint}{unread}'


def _correlate(
    loaded: Loaded | None, checks: Mapping[str, Check]
) -> Callable[[Sequence[KernelEvent], Inventory], list[Finding]]:
    """What the checks that listen find in kernel events, before the settings change it; with this node's settings."""

    def config_of(check: Check) -> CheckConfig:
        known = {**loaded.disabled, **loaded.checks} if loaded else {}
        return known.get(RunName(check.name)) or check.config()

    def correlate(events: Sequence[KernelEvent], node: Inventory) -> list[Finding]:
        listening = [check for check in checks.values() if check.listens]
        return [found for check in listening for found in check.correlate(events, node, config_of(check))[0]]

    from healthd.common.model import RunName

    return correlate


# --- healthd list


def _list_arguments(parser: Parser) -> None:
    parser.add_argument("--codes", action="store_true", help="list the codes of findings instead")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.config(parser)


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
        defaults = checks[code.partition("/")[0]].config()
        yield {
            "code": code,
            "severity": text.severity.name.lower(),
            "clears": text.clears.name.lower(),
            "ends": ends_of(findings_of(code, text, defaults)[0]),
            "meaning": text.meaning,
        }


def checks_json(loaded: Loaded, checks: Mapping[str, Check]) -> Iterator[dict[str, Any]]:
    """Each check, one that has tables of its own once a table (docs/json.md)."""
    for name, check in checks.items():
        tables = {**loaded.disabled, **loaded.checks}
        mine = {run: config for run, config in tables.items() if run.check == name}
        common = {"summary": check.summary, "runs": check.runs, "reads_kernel_log": check.listens, "when": check.when}
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
    "explain": Command(
        _explain_arguments,
        _explain,
        "Explain a code: its meaning, why it matters, what healthd does with this node's settings, what clears it, and "
        "what to do.\n"
        "WORDS: a code from healthd status; 79, xid 79 or sxid 12028; a kernel log line; the Reason of a drained node, "
        "written by healthd or not, also as truncated by sinfo -R. The name of a check lists its codes. "
        "nvlink5/149:4 is sub-code 4 of Xid 149.",
        "  healthd explain gpu_xid/79\n"
        "  healthd explain xid 79\n"
        "  healthd explain 'NVRM: Xid (PCI:0000:61:00): 94, pid=4711, name=python3'\n"
        "  healthd explain Kill task failed\n"
        "  healthd explain mount\n",
    ),
    "list": Command(
        _list_arguments,
        _list,
        "List the checks: what each one covers, its interval and its timeout.",
        "  healthd list\n  healthd list --codes\n"
        "  healthd list --json | jq -r '.checks[] | select(.state == \"on\").check'\n",
    ),
}
