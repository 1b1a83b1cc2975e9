"""`healthd explain`: what a code means and what to do. `healthd list`: the checks and their codes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.flags import DEFAULT_FILE, Command, Parser, load_settings, settings_errors_as_usage
from healthd.cli.terminal import Stop, as_json, page, write_output

if TYPE_CHECKING:
    from healthd.agent.reporting.explanation import Running
    from healthd.agent.settings.config import CheckConfig, Loaded
    from healthd.agent.settings.registry import Check
    from healthd.common.model import Finding, Inventory, KernelEvent

MAX_QUERY_LENGTH = 80  # maximum characters of an unknown query in the error message


def _explain_arguments(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="WORDS", help="a code, an Xid, a kernel log line, a Reason or a check"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.add_argument(
        "--config", metavar="FILE", help=f"this node's settings (default: {DEFAULT_FILE}, if it exists)"
    )


def _explain(args: argparse.Namespace) -> int:
    from healthd.agent.reporting import explanation

    words = " ".join(args.words).strip()
    if not words:
        raise Stop("healthd explain: give a code, an Xid, a kernel log line or a Reason; healthd list shows the checks")
    document = _code_document(words, args) or _query_document(words, args)
    return write_output(as_json(document) if args.json else explanation.text(document, page()))


def _code_document(words: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the document for a code in healthd's format.

    Only the code's check is imported, because importing all checks takes twice as long.

    Return None for other queries, for a site with its own checks, and for invalid settings (the error message needs all
    checks).
    """
    from healthd.agent.reporting import explanation
    from healthd.agent.settings import registry
    from healthd.agent.settings.config import ConfigError

    name, slash, subcode = words.partition("/")
    if not slash or subcode.startswith("0"):
        return None
    checks = registry.built_in_checks({name})
    if not checks or (text := registry.explain(checks, words)) is None:
        return None
    owner = checks[name]
    try:
        loaded = flags.load_settings_for(args, checks)
    except ConfigError:
        return None
    if loaded is None:
        return None
    context = explanation.NodeContext(loaded, _running_daemon(loaded, args))
    return {**explanation.code_document(words, words, "", text, owner, context), "settings_problem": ""}


def _query_document(words: str, args: argparse.Namespace) -> dict[str, Any]:
    from healthd.agent.reporting import explanation
    from healthd.agent.settings import registry
    from healthd.agent.settings.config import ConfigError
    from healthd.cli import explain_query as typed

    loaded, problem = None, ""
    try:
        loaded, checks = load_settings(args)
    except ConfigError as error:  # continue, because the engineer on call still needs the explanations
        checks, problem = registry.built_in_checks(), str(error)
    if loaded is not None:
        from healthd.agent.kernel_log.parse import use_patterns

        use_patterns(loaded.settings.kernel_log.patterns)
    found = typed.parse_query(words, checks, _correlate(loaded, checks))
    if isinstance(found, typed.CheckQuery):
        check = checks[found.name]
        return explanation.check_document(words, check, codes_json({check.name: check}))
    if isinstance(found, typed.ForeignReasonQuery):
        return explanation.foreign_reason_document(words, *found.meaning)
    if isinstance(found, typed.HarmlessLine):
        return explanation.kernel_line_document(words, found.message)
    if isinstance(found, typed.AmbiguousQuery):
        rows = (row for row in codes_json(checks) if row["code"] in found.codes)
        return explanation.ambiguous_document(words, found.why, rows)
    if isinstance(found, typed.Code) and (text := registry.explain(checks, found.code)) is not None:
        owner = checks.get(found.code.partition("/")[0])
        context = explanation.NodeContext(loaded, _running_daemon(loaded, args))
        document = explanation.code_document(words, found.code, found.part, text, owner, context, found.line)
        return {**document, "settings_problem": problem}
    raise Stop(_unknown_query(words, found.near if isinstance(found, typed.Unknown) else (), problem))


def _running_daemon(loaded: Loaded | None, args: argparse.Namespace) -> Running | None:
    """Return the state of the daemon with these settings, or None if it does not answer within a second.

    If the settings file has an error, the daemon still uses its earlier settings.
    """
    if loaded and not os.path.exists(loaded.settings.runtime_dir):
        return None  # no daemon has run since boot, so do not load the client

    from healthd.agent.control import protocol
    from healthd.agent.control.client import DaemonUnreachable, RefusedByDaemon, send_request
    from healthd.agent.reporting.explanation import Running
    from healthd.common.model import Mode

    try:
        runtime_dir = loaded.settings.runtime_dir if loaded else flags.runtime_dir(args)
        status = send_request(runtime_dir, protocol.simple_request(protocol.STATUS), timeout_seconds=1.0).get(
            "status", {}
        )
        pause = status.get("pause") or {}
        domain = str(status.get("inventory", {}).get("domain_id", ""))
        return Running(Mode(status.get("mode")), float(pause.get("until", 0.0)), domain)
    except (
        DaemonUnreachable,
        RefusedByDaemon,
        Stop,
        AttributeError,
        TypeError,
        ValueError,
    ):  # the last three exceptions mean that the daemon runs another version
        return None


def _unknown_query(words: str, near: Sequence[str], problem: str) -> str:
    short = words if len(words) <= MAX_QUERY_LENGTH else f"{words[: MAX_QUERY_LENGTH - 3]}..."
    unread = f" (the site's own checks could not be loaded: {problem})" if problem else ""
    *other_names, last = (f'"{name}"' for name in near) if near else ("",)
    hint = (
        f"; did you mean {', '.join(other_names)}{' or ' if other_names else ''}{last}?"
        if near
        else "; see healthd list"
    )
    return f'healthd explain: unknown code "{short}"{hint}{unread}'


def _correlate(
    loaded: Loaded | None, checks: Mapping[str, Check]
) -> Callable[[Sequence[KernelEvent], Inventory], list[Finding]]:
    """Return a function that returns all checks' findings for kernel events.

    The function uses this node's settings, but not the site's overrides.
    """

    def config_of(check: Check) -> CheckConfig:
        configs = {**loaded.disabled, **loaded.checks} if loaded else {}
        return configs.get(RunName(check.name)) or check.config()

    def correlate(events: Sequence[KernelEvent], node: Inventory) -> list[Finding]:
        listening = [check for check in checks.values() if check.reads_kernel_log]
        return [found for check in listening for found in check.correlate(events, node, config_of(check))[0]]

    from healthd.common.model import RunName

    return correlate


# --- healthd list


def _list_arguments(parser: Parser) -> None:
    parser.add_argument("--codes", action="store_true", help="list the finding codes instead")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    flags.add_config_flag(parser)


def _list(args: argparse.Namespace) -> int:
    from healthd import __version__
    from healthd.agent.reporting import render

    with settings_errors_as_usage():
        loaded, checks = load_settings(args)
    if args.codes:
        codes = list(codes_json(checks))
        if args.json:
            return write_output(as_json({"version": __version__, "codes": codes}))
        from healthd.agent.reporting.explanation import code_row

        return write_output(render.codes(map(code_row, codes), page()))
    listed = list(checks_json(loaded, checks))
    if args.json:
        return write_output(as_json({"version": __version__, "checks": listed}))
    return write_output(render.checks(map(_check_row, listed), page()))


def codes_json(checks: Mapping[str, Check]) -> Iterator[dict[str, Any]]:
    """Yield each code, sorted by name (docs/json.md)."""
    from healthd.agent.reporting.explanation import finding_ending
    from healthd.agent.reporting.fault_timeline import possible_findings
    from healthd.agent.settings import registry

    for code, text in registry.explained(checks).items():
        defaults = checks[code.partition("/")[0]].config()
        yield {
            "code": code,
            "severity": text.severity.name.lower(),
            "clears": text.clears.name.lower(),
            "ends": finding_ending(possible_findings(code, text, defaults)[0]),
            "meaning": text.meaning,
        }


def checks_json(loaded: Loaded, checks: Mapping[str, Check]) -> Iterator[dict[str, Any]]:
    """Yield each check (docs/json.md). A check with its own tables is yielded once per table."""
    for name, check in checks.items():
        tables = {**loaded.disabled, **loaded.checks}
        mine = {run: config for run, config in tables.items() if run.check == name}
        common = {
            "summary": check.summary,
            "runs": check.has_run,
            "reads_kernel_log": check.reads_kernel_log,
            "when": check.when,
        }
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
        "Explain a code: what it means, why it matters, what healthd does with this node's settings, what clears it "
        "and what to do.\n"
        "WORDS: a code from healthd status; 79, xid 79 or sxid 12028; a kernel log line; a drained node's Reason, "
        "written by healthd or not, even if truncated by sinfo -R. With a check's name, the command lists "
        "the check's codes. nvlink5/149:4 is sub-code 4 of Xid 149.",
        "  healthd explain gpu_xid/79\n"
        "  healthd explain xid 79\n"
        "  healthd explain 'NVRM: Xid (PCI:0000:61:00): 94, pid=4711, name=python3'\n"
        "  healthd explain Kill task failed\n"
        "  healthd explain mount\n",
    ),
    "list": Command(
        _list_arguments,
        _list,
        "List the checks, what each one covers, its interval and its timeout.",
        "  healthd list\n  healthd list --codes\n"
        "  healthd list --json | jq -r '.checks[] | select(.state == \"on\").check'\n",
    ),
}
